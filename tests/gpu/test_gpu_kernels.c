/* Module: src/gpu/kernels, without a GPU.
 * Goal: the kernels' own code makes the bits of the scalar codec, for every layout, level and type,
 * and touches nothing else.
 * Method: they are compiled as C++ and run thread by thread by the emulator behind a fake driver
 * (emulator/), with the random shapes of gpu_check (identity.h), threads in a random order.
 * Payloads, headers, checksums, statuses and whole pools are compared. Address sanitizer: every
 * access, shared memory included.
 * Not shown: speed, and what a real GPU's memory does with accesses that race.
 *
 * KVT_TEST_SEED: the first shape. KVT_KERNEL_CASES: how many shapes (default below). */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "gpu/fake_cuda.h"
#include "gpu/identity.h"
#include "support/rig.h"

/* Shapes are small, so that there are many. Under sanitizers each takes some ten times as long. */
#define POOL_BYTES (160u << 10)
#if defined(__SANITIZE_ADDRESS__)
#define CASES 150
#else
#define CASES 600
#endif

static struct fake_cuda *fake;

static int load_driver(void **state)
{
    (void)state;
    void *library = dlopen(KVT_FAKE_CUDA_EMULATED, RTLD_NOW | RTLD_LOCAL);
    fake = library != NULL ? dlsym(library, "fake_cuda") : NULL;
    return fake != NULL ? 0 : -1;
}

static void open_driver(struct kvt_gpu **gpu, struct identity **identity, uint64_t seed)
{
    struct kvt_gpu_opts opts = {.library = KVT_FAKE_CUDA_EMULATED};
    char reason[200] = "";
    fake->seed = seed;
    if (kvt_gpu_open(&opts, gpu, reason, sizeof(reason)) != 0)
        fail_msg("%s", reason);
    *identity = identity_new(*gpu);
    assert_non_null(*identity);
}

static void test_kernels_make_the_scalar_codecs_bits(void **state)
{
    const char *text = getenv("KVT_KERNEL_CASES");
    uint64_t cases = text != NULL ? strtoull(text, NULL, 0) : CASES, seed = rig_seed();
    struct identity_counts counts = {0};
    struct identity *identity;
    struct kvt_gpu *gpu;
    char message[1024];
    (void)state;
    open_driver(&gpu, &identity, seed);
    for (uint64_t i = 0; i < cases; i++) {
        fake->log[0] = '\0';
        fake->seed = seed + i;
        /* some with many turns for each CTA */
        identity_limit(identity, i % 16 == 15 ? 8 * POOL_BYTES : POOL_BYTES);
        if (identity_case(identity, seed + i, &counts, message, sizeof(message)) != 0)
            fail_msg("shape %llu: %s", (unsigned long long)(seed + i), message);
    }
    print_message("%llu shapes, %llu blocks evicted, guard %llu, nonfinite %llu, random records "
                  "%llu, levels %llu %llu %llu %llu %llu %llu, mixed %llu\n",
                  (unsigned long long)counts.cases, (unsigned long long)counts.blocks,
                  (unsigned long long)counts.guard, (unsigned long long)counts.nonfinite,
                  (unsigned long long)counts.hostile, (unsigned long long)counts.levels[1],
                  (unsigned long long)counts.levels[2], (unsigned long long)counts.levels[3],
                  (unsigned long long)counts.levels[4], (unsigned long long)counts.levels[5],
                  (unsigned long long)counts.levels[6], (unsigned long long)counts.levels[0]);
    if (cases >= CASES)
        for (int level = 0; level <= 6; level++)
            assert_true(counts.levels[level] > 0);
    identity_free(identity);
    kvt_gpu_close(gpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kernels_make_the_scalar_codecs_bits),
    };
    return cmocka_run_group_tests(tests, load_driver, NULL);
}
