/* gpu_check [--library PATH] [--cases N] [--seed S] [--seconds T]: the identity cases on this
 * machine's GPU. Prints what it covered; exit 0 all equal, 1 a difference, 77 no GPU (skipped). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu/identity.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int run(struct kvt_gpu *gpu, uint64_t seed, uint64_t cases, double seconds)
{
    struct identity_counts counts = {0};
    struct identity *identity = identity_new(gpu);
    char message[1024];
    double start = now();
    uint64_t failures = 0;
    if (identity == NULL) {
        fprintf(stderr, "gpu_check: no memory on the device\n");
        return 1;
    }
    for (uint64_t i = 0; i < cases && now() - start < seconds && failures < 10; i++) {
        uint64_t case_seed = seed + i * 0x9e3779b97f4a7c15u;
        if (identity_case(identity, case_seed, &counts, message, sizeof(message)) != 0) {
            printf("case %llu (seed %llu): %s\n", (unsigned long long)i,
                   (unsigned long long)case_seed, message);
            failures++;
            if (kvt_gpu_offline(gpu)) {
                printf("offline: %s\n", kvt_gpu_offline_reason(gpu));
                break;
            }
        }
    }
    printf("seed %llu: %llu cases, %llu blocks evicted, guard %llu, nonfinite %llu, hostile "
           "records %llu, ranges %llu, mixed %llu, levels %llu %llu %llu %llu %llu %llu, %llu "
           "failures, %.1f s\n",
           (unsigned long long)seed, (unsigned long long)counts.cases,
           (unsigned long long)counts.blocks, (unsigned long long)counts.guard,
           (unsigned long long)counts.nonfinite, (unsigned long long)counts.hostile,
           (unsigned long long)counts.ranges, (unsigned long long)counts.levels[0],
           (unsigned long long)counts.levels[1], (unsigned long long)counts.levels[2],
           (unsigned long long)counts.levels[3], (unsigned long long)counts.levels[4],
           (unsigned long long)counts.levels[5], (unsigned long long)counts.levels[6],
           (unsigned long long)failures, now() - start);
    identity_free(identity);
    return failures != 0;
}

int main(int argc, char **argv)
{
    struct kvt_gpu_opts opts = {0};
    uint64_t cases = 10000, seed = 1;
    double seconds = 1e9;
    char reason[256];
    struct kvt_gpu *gpu;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--library") == 0)
            opts.library = argv[i + 1];
        else if (strcmp(argv[i], "--cases") == 0)
            cases = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seconds") == 0)
            seconds = strtod(argv[i + 1], NULL);
    }
    int rc = kvt_gpu_open(&opts, &gpu, reason, sizeof(reason));
    if (rc != 0) {
        printf("gpu_check: %s\n", reason);
        return 77;
    }
    rc = run(gpu, seed, cases, seconds);
    kvt_gpu_close(gpu);
    return rc;
}
