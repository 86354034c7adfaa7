/* A cache whose process is killed at a random moment (C1).
 *
 * Goal:   after kill -9 the next open serves each block exactly or not at all, and serves every
 *         block that a returned flush covered; what the kill left never stops it from opening.
 * Method: this program starts itself as a child that stores 1,000 blocks in short chains, with a
 *         flush now and then, and says through a pipe how far a flush has returned. It is killed
 *         some random milliseconds after its cache was open, mostly in the midst of writes; then
 *         everything is loaded and compared byte for byte. Every fifth store goes on: it is written
 *         to and killed once more. 50 seeds, over all write policies and backends. The disk is
 *         larger than what is stored, so nothing leaves it by right.
 */
#include "support/rig.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "support/tally.h"

#define BLOCKS 1000u
#define CHAIN 8u
#define KILLS_MAX 2u
#define KILL_MS_MAX 120u
#define OPENED 0xffffffffu /* the child's first word; then: blocks covered by a flush */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SEEDS 10u
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SEEDS 10u
#endif
#endif
#ifndef SEEDS
#define SEEDS 50u
#endif

static const char *const policies[] = {"through", "evict", "idle", "auto"};
static const char *const backends[] = {"posix", "auto"};

static struct rig rig;
static uint64_t tried, passed;

static int tell(void **state)
{
    (void)state;
    tally_print("kill9", tried, tried - passed);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static void make_rig(const char *dir, const char *config)
{
    struct rig_shape shape = rig_shape_small(CHAIN);

    rig_init(&rig, &shape, config, NULL);
    snprintf(rig.dir, sizeof(rig.dir), "%s", dir);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "256MiB");
}

/* ---- the child ---- */

static void say(uint32_t word)
{
    if (write(STDOUT_FILENO, &word, sizeof(word)) != (ssize_t)sizeof(word))
        _exit(1);
}

/* Store blocks first.. until all are there, or one is dropped, and wait for the end. */
static _Noreturn void child(const char *dir, const char *config, uint64_t first, uint64_t seed)
{
    struct kvt_rng rng = {seed};
    uint32_t done = 0;

    make_rig(dir, config);
    rig_open(&rig);
    say(OPENED);
    while (done < BLOCKS) {
        if (rig_store(&rig, first + done, CHAIN, 0, NULL) < CHAIN)
            break; /* nothing is promised of what was dropped */
        done += CHAIN;
        if (kvt_rng_next(&rng) % 8 && done < BLOCKS)
            continue;
        if (kvt_flush(rig.cache))
            break;
        say(done);
    }
    for (;;)
        pause();
}

/* ---- the parent ---- */

static pid_t start_child(const char *config, uint64_t first, uint64_t seed, int *from)
{
    char first_text[32], seed_text[32];
    int ends[2];
    pid_t pid;

    snprintf(first_text, sizeof(first_text), "%llu", (unsigned long long)first);
    snprintf(seed_text, sizeof(seed_text), "%llu", (unsigned long long)seed);
    assert_int_equal(pipe(ends), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        (void)dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        (void)execl("/proc/self/exe", "test_cases_kill", rig.dir, config, first_text, seed_text,
                    (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    *from = ends[0];
    return pid;
}

static bool next_word(int from, uint32_t *word)
{
    ssize_t n;

    do
        n = read(from, word, sizeof(*word));
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof(*word);
}

/* Run a child and kill it. Returns how many blocks a flush covered. */
static uint32_t run_and_kill(const char *config, uint64_t first, struct kvt_rng *rng)
{
    uint32_t word, flushed = 0;
    int from, status;
    pid_t pid = start_child(config, first, kvt_rng_next(rng), &from);

    if (!next_word(from, &word) || word != OPENED)
        fail_msg("the child did not open its cache (%s)", config);
    rig_sleep_ms((unsigned)kvt_rng_below(rng, KILL_MS_MAX));
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    while (next_word(from, &word))
        flushed = word;
    close(from);
    return flushed;
}

/* Exact or a miss; the flushed ones exact. Returns the blocks found. */
static uint32_t check_all(uint64_t first, uint32_t flushed)
{
    uint32_t found = 0;

    for (uint32_t at = 0; at < BLOCKS; at += CHAIN) {
        uint32_t got = (uint32_t)rig_load(&rig, first + at, CHAIN, NULL);

        if (at < flushed && got != CHAIN)
            fail_msg("%u blocks were flushed, and of those at %u are %u there", flushed, at, got);
        found += got;
    }
    return found;
}

static void test_c01_killed_at_random_moments(void **state)
{
    struct kvt_rng rng = {rig_seed()};
    uint64_t flushed_sum = 0, found_sum = 0, midst = 0;
    char config[128], dir[128];

    (void)state;
    for (uint32_t seed = 0; seed < SEEDS; seed++) {
        uint32_t flushed[KILLS_MAX], last = seed % 5 ? 1 : KILLS_MAX;

        snprintf(config, sizeof(config), "dram=4MiB,threads=1,write=%s,io=%s",
                 policies[seed % KVT_ARRAY_LEN(policies)],
                 backends[seed / KVT_ARRAY_LEN(policies) % KVT_ARRAY_LEN(backends)]);
        rig_dir_make(dir, sizeof(dir));
        make_rig(dir, config);
        for (uint64_t kills = 0; kills < last; kills++) {
            tried++;
            flushed[kills] = run_and_kill(config, 1 + kills * BLOCKS, &rng);
            rig_open(&rig);
            for (uint64_t run = 0; run <= kills; run++) {
                uint32_t found = check_all(1 + run * BLOCKS, flushed[run]);

                found_sum += found;
                flushed_sum += flushed[run];
            }
            midst += flushed[kills] < BLOCKS;
            assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
            rig_close(&rig);
            passed++;
        }
        (void)tear_down(NULL);
    }
    printf("           %u seeds, %llu kills before the last flush; %llu blocks flushed,"
           " %llu found, all exact\n",
           SEEDS, (unsigned long long)midst, (unsigned long long)flushed_sum,
           (unsigned long long)found_sum);
    assert_true(flushed_sum > 0 && midst > 0);
}

int main(int argc, char *argv[])
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c01_killed_at_random_moments, tear_down),
    };

    if (argc == 5)
        child(argv[1], argv[2], strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
    return cmocka_run_group_tests(tests, NULL, tell);
}
