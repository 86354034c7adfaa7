/* Goal: what a fuzzer has found once stays found, in every build, without libFuzzer.
 * Method: replay TARGET DIR: runs the target over every file of DIR in the order of their names,
 * then over mutations of them (flipped, set, cut, inserted and copied bytes, two files joined) for
 * KVT_FUZZ_MS milliseconds, 500 without. The seed (KVT_TEST_SEED) is printed; an input that ends
 * the program is written to ./fuzz-TARGET.bin first. Fails when DIR is empty. */
#define FILE_BYTES_MAX ((size_t)256 << 10)
#define FILES_MAX 512u

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "base/rng.h"
#include "fuzz/fuzz.h"
#include "support/tally.h"

struct sample {
    uint8_t *data;
    size_t size;
};

static struct sample samples[FILES_MAX];
static unsigned sample_count;
static const uint8_t *volatile running;
static volatile size_t running_bytes;
static char failure_name[64];

/* The sanitizers end by abort(), so that the handler below sees them. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "abort_on_error=1:handle_abort=0:handle_segv=0";
}
const char *__ubsan_default_options(void);
const char *__ubsan_default_options(void)
{
    return "abort_on_error=1:print_stacktrace=1";
}

static void on_death(int number)
{
    int fd = open(failure_name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    if (fd >= 0 && write(fd, (const void *)running, running_bytes) >= 0)
        close(fd);
    signal(number, SIG_DFL);
    raise(number);
}

/* A copy of exactly its size: a read past the input is seen. */
static void run(const uint8_t *data, size_t size)
{
    uint8_t *copy = fuzz_memory(size);

    if (size)
        memcpy(copy, data, size);
    running = copy;
    running_bytes = size;
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void load(const char *dir, const char *name)
{
    char path[4096];
    FILE *file;
    struct sample *sample = &samples[sample_count];

    snprintf(path, sizeof path, "%s/%s", dir, name);
    file = fopen(path, "rb");
    if (!file)
        return;
    sample->data = fuzz_memory(FILE_BYTES_MAX);
    sample->size = fread(sample->data, 1, FILE_BYTES_MAX, file);
    fclose(file);
    sample_count++;
}

static void load_all(const char *dir)
{
    struct dirent **names;
    int count = scandir(dir, &names, NULL, alphasort);

    for (int i = 0; i < count; i++) {
        if (names[i]->d_name[0] != '.' && sample_count < FILES_MAX)
            load(dir, names[i]->d_name);
        free(names[i]);
    }
    if (count >= 0)
        free(names);
}

static size_t mutate(struct kvt_rng *rng, uint8_t *data, size_t size)
{
    static const uint8_t edges[] = {0, 1, 0x7f, 0x80, 0xff, 0xfe, 0x40, 16};
    size_t at = kvt_rng_below(rng, size + 1), n = 1 + kvt_rng_below(rng, 16);

    switch (kvt_rng_below(rng, 7)) {
    case 0:
        if (at < size)
            data[at] ^= (uint8_t)(1u << kvt_rng_below(rng, 8));
        break;
    case 1:
        if (at < size)
            data[at] = (uint8_t)kvt_rng_next(rng);
        break;
    case 2:
        if (at < size)
            data[at] = edges[kvt_rng_below(rng, sizeof edges)];
        break;
    case 3: /* cut the end off, or something out */
        if (kvt_rng_below(rng, 4) == 0)
            return at;
        if (at + n <= size) {
            memmove(data + at, data + at + n, size - at - n);
            return size - n;
        }
        break;
    case 4: /* insert */
        if (size + n <= FILE_BYTES_MAX) {
            memmove(data + at + n, data + at, size - at);
            for (size_t i = 0; i < n; i++)
                data[at + i] = (uint8_t)kvt_rng_next(rng);
            return size + n;
        }
        break;
    case 5: /* copy from elsewhere */
        if (at + n <= size)
            memmove(data + at, data + kvt_rng_below(rng, size - n + 1), n);
        break;
    default: { /* the end of another file */
        const struct sample *other = &samples[kvt_rng_below(rng, sample_count)];
        size_t from = kvt_rng_below(rng, other->size + 1);

        if (at + other->size - from > FILE_BYTES_MAX)
            break;
        memcpy(data + at, other->data + from, other->size - from);
        return at + other->size - from;
    }
    }
    return size;
}

static uint64_t run_mutations(uint64_t seed, long ms)
{
    static uint8_t data[FILE_BYTES_MAX];
    struct kvt_rng rng = {seed};
    struct timespec start, now;
    uint64_t runs = 0;

    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        const struct sample *sample = &samples[kvt_rng_below(&rng, sample_count)];
        size_t size = sample->size;

        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 >= ms)
            return runs;
        memcpy(data, sample->data, size);
        for (uint64_t edits = 1 + kvt_rng_below(&rng, 8); edits; edits--)
            size = mutate(&rng, data, size);
        run(data, size);
        runs++;
    }
}

int main(int argc, char **argv)
{
    const char *seed_text = getenv("KVT_TEST_SEED"), *ms_text = getenv("KVT_FUZZ_MS");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 0) : 20261129u, runs;

    if (argc != 3) {
        fprintf(stderr, "usage: %s TARGET DIR\n", argv[0]);
        return 2;
    }
    snprintf(failure_name, sizeof failure_name, "fuzz-%s.bin", argv[1]);
    signal(SIGABRT, on_death);
    signal(SIGSEGV, on_death);
    signal(SIGBUS, on_death);
    signal(SIGFPE, on_death);
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    load_all(argv[2]);
    if (!sample_count) {
        fprintf(stderr, "%s: no corpus in %s\n", argv[1], argv[2]);
        return 1;
    }
    for (unsigned i = 0; i < sample_count; i++)
        run(samples[i].data, samples[i].size);
    runs = run_mutations(seed, ms_text ? strtol(ms_text, NULL, 10) : 500);
    printf("%s: %u files of the corpus, %llu mutations\n", argv[1], sample_count,
           (unsigned long long)runs);
    tally_print("fuzz", sample_count + runs, 0);
    for (unsigned i = 0; i < sample_count; i++)
        free(samples[i].data);
    return 0;
}
