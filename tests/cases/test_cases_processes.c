/* Cases from the field: several processes and one directory.
 *
 * Goal:   one process owns a root; the others run without it, say so, and take over when it dies;
 * no process ever sees other bytes than those that were put. Method: forked processes, each with a
 * cache of its own over the same directory, store and load chains at random and compare every byte.
 * The owner is killed twice; what the survivors say of themselves is read from shared memory. fsck
 * and one more process look at the rest.
 */
#include "support/rig.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/rng.h"
#include "store/fsck.h"

enum { PROCESSES = 4, CHAIN = 8, CHAINS = 24 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TAKEOVER_NS INT64_C(8000000000)
#else
#define TAKEOVER_NS INT64_C(2000000000)
#endif

struct shared {
    _Atomic int stop;
    struct {
        _Atomic int ready;      /* turns of its loop */
        _Atomic uint64_t roots; /* in use */
        _Atomic uint64_t good;  /* blocks loaded, exact */
        _Atomic int said;       /* its state named the owner while it had none */
    } process[PROCESSES];
};

static struct rig rig;
static char dir[100];

static int tear_down(void **state)
{
    (void)state;
    rig_close(&rig);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static void rig_begin(void)
{
    struct rig_shape shape = rig_shape_small(CHAIN);

    rig_init(&rig, &shape, "dram=1MiB,disk_required=no", NULL);
    snprintf(rig.dir, sizeof(rig.dir), "%s", dir);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "32MiB");
    rig_open(&rig);
}

/* A process: exits 0, or by a failed assertion of the rig. */
static void process_main(struct shared *shared, int number)
{
    struct kvt_rng rng = {rig_seed() + (uint64_t)number};
    char text[512];

    rig_begin();
    /* relaxed: numbers for the parent to look at */
    while (!atomic_load_explicit(&shared->stop, memory_order_relaxed)) {
        uint64_t seed = 1 + kvt_rng_below(&rng, CHAINS) * CHAIN;
        uint64_t roots;

        if (kvt_rng_below(&rng, 3) == 0)
            (void)rig_store(&rig, seed, CHAIN, 0, NULL);
        atomic_fetch_add_explicit(&shared->process[number].good, rig_load(&rig, seed, CHAIN, NULL),
                                  memory_order_relaxed);
        roots = rig_stat(&rig, "disk.roots");
        rig_stat_text(&rig, "disk.state", text, sizeof(text));
        if (!roots && strstr(text, "in use by"))
            atomic_store_explicit(&shared->process[number].said, 1, memory_order_relaxed);
        atomic_store_explicit(&shared->process[number].roots, roots, memory_order_relaxed);
        atomic_fetch_add_explicit(&shared->process[number].ready, 1, memory_order_relaxed);
        rig_sleep_ms(2);
    }
    (void)kvt_flush(rig.cache);
    rig_close(&rig);
    _exit(0);
}

/* The process that has the root; -1: none yet. Fails when there are two. */
static int owner_of(struct shared *shared, const bool *dead)
{
    int owner = -1;

    for (int i = 0; i < PROCESSES; i++) {
        if (dead[i] || !atomic_load_explicit(&shared->process[i].roots, memory_order_relaxed))
            continue;
        assert_int_equal(owner, -1);
        owner = i;
    }
    return owner;
}

static int wait_for_owner(struct shared *shared, const bool *dead, int64_t limit_ns, int64_t *took)
{
    int64_t start = rig_now_ns();
    int owner;

    while ((owner = owner_of(shared, dead)) < 0) {
        if (rig_now_ns() - start > limit_ns)
            fail_msg("nobody has taken the directory over in %lld ms",
                     (long long)(limit_ns / 1000000));
        rig_sleep_ms(5);
    }
    *took = rig_now_ns() - start;
    return owner;
}

static int show_problem(bool problem, const char *text)
{
    if (problem)
        printf("           fsck: %s\n", text);
    return problem;
}

static void found(void *ctx, bool problem, const char *text)
{
    (void)ctx;
    (void)show_problem(problem, text);
}

static void check_fsck(void)
{
    struct kvt_io_posix_params params = {.path = dir, .threads = 1, .read_only = 1};
    struct kvt_fsck_params fsck = {.found = found};
    struct kvt_fsck_report report;

    assert_int_equal(kvt_io_posix_new(&params, &fsck.io), 0);
    assert_int_equal(kvt_fsck(&fsck, &report), 0);
    assert_int_equal(report.problems, 0);
    assert_true(report.records > 0);
    fsck.io->ops->destroy(fsck.io);
}

static void test_c56_one_directory_several_processes(void **state)
{
    struct shared *shared =
        mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bool dead[PROCESSES] = {false};
    pid_t pids[PROCESSES];
    int64_t took;
    int owner, status, said = 0;

    (void)state;
    assert_true(shared != MAP_FAILED);
    rig_dir_make(dir, sizeof(dir));
    fflush(stdout);
    for (int i = 0; i < PROCESSES; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0)
            process_main(shared, i);
    }
    for (int i = 0; i < PROCESSES; i++)
        while (atomic_load_explicit(&shared->process[i].ready, memory_order_relaxed) < 5)
            rig_sleep_ms(5);
    owner = wait_for_owner(shared, dead, TAKEOVER_NS, &took);
    for (int kill_number = 0; kill_number < 2; kill_number++) {
        rig_sleep_ms(1500);
        assert_int_equal(owner_of(shared, dead), owner);
        dead[owner] = true;
        assert_int_equal(kill(pids[owner], SIGKILL), 0);
        assert_int_equal(waitpid(pids[owner], &status, 0), pids[owner]);
        assert_true(WIFSIGNALED(status));
        owner = wait_for_owner(shared, dead, TAKEOVER_NS, &took);
        printf("           taken over after %lld ms\n", (long long)(took / 1000000));
    }
    rig_sleep_ms(1500);
    atomic_store_explicit(&shared->stop, 1, memory_order_relaxed);
    for (int i = 0; i < PROCESSES; i++) {
        said += atomic_load_explicit(&shared->process[i].said, memory_order_relaxed);
        assert_true(atomic_load_explicit(&shared->process[i].good, memory_order_relaxed) > 0);
        if (dead[i])
            continue;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_int_equal(said, PROCESSES - 1); /* all but the first owner had to wait */
    check_fsck();
    rig_begin();
    assert_int_equal(rig_stat(&rig, "disk.roots"), 1);
    took = 0;
    for (uint64_t chain = 0; chain < CHAINS; chain++)
        took += (int64_t)rig_load(&rig, 1 + chain * CHAIN, CHAIN, NULL);
    printf("           %lld of %d blocks left\n", (long long)took, CHAINS * CHAIN);
    assert_true(took > 0);
    rig_close(&rig);
    rig_dir_remove(dir);
    munmap(shared, sizeof(*shared));
}

/* The same within one process: a cache waits for another one, and close() while it waits. */
static void test_c56_a_cache_waits_in_the_background(void **state)
{
    static struct rig first;
    struct rig_shape shape = rig_shape_small(CHAIN);
    char text[512];

    (void)state;
    rig_dir_make(dir, sizeof(dir));
    rig_begin();
    first = rig;
    memset(&rig, 0, sizeof(rig));
    assert_int_equal(rig_store(&first, 1, CHAIN, 0, NULL), CHAIN);
    rig_begin();
    rig_stat_text(&rig, "disk.state", text, sizeof(text));
    assert_non_null(strstr(text, "in use by"));
    assert_int_equal(rig_lookup(&rig, 1, CHAIN), 0);
    assert_int_equal(rig_store(&rig, 1001, CHAIN, 0, NULL), CHAIN); /* DRAM works meanwhile */
    rig_close(&rig);                                                /* while it waits */
    rig.dir[0] = '\0';                                              /* the directory stays */
    rig_free(&rig);
    rig_init(&rig, &shape, "dram=1MiB,disk_required=no", NULL);
    snprintf(rig.dir, sizeof(rig.dir), "%s", dir);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "32MiB");
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1001, CHAIN, 0, NULL), CHAIN);
    rig_close(&first);
    /* Its state, not the count of roots: the store counts it a moment before it is called "ok". */
    for (int i = 0; i < 6000 && strcmp(text, "ok") != 0; i++) {
        rig_sleep_ms(10);
        rig_stat_text(&rig, "disk.state", text, sizeof(text));
    }
    assert_string_equal(text, "ok");
    assert_int_equal(rig_stat(&rig, "disk.roots"), 1);
    assert_int_equal(rig_load(&rig, 1, CHAIN, NULL), CHAIN); /* what the first one left */
    assert_int_equal(kvt_flush(rig.cache), 0);               /* and what DRAM had */
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 1001, CHAIN, NULL), CHAIN);
    first.dir[0] = '\0';
    rig_free(&first);
    rig_close(&rig);
    rig_dir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c56_one_directory_several_processes, tear_down),
        cmocka_unit_test_teardown(test_c56_a_cache_waits_in_the_background, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
