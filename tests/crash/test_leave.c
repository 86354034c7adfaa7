/* Leaving in the midst of it: fork(), exit() and dlclose() with I/O in flight.
 *
 * Goal:   a process may fork at any moment: the child's calls are refused, its ways of ending harm
 *         nobody, the parent's blocks stay exact. It may end by exit() while threads of its own are
 *         inside calls. It may dlclose() the library with a cache open and I/O in flight, or after
 *         kvt_close(), and go on: no crash, and the next process finds exact blocks or misses.
 * Method: children of this program over real files; the library is loaded by dlopen() there. What
 *         each leaves on disk is loaded and compared by the parent.
 */
#include "support/rig.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"

enum { BLOCKS = 128, CHAIN = 16, THREADS = 4 };
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { ROUNDS = 6 };
#else
enum { ROUNDS = 20 };
#endif

#if defined(__SANITIZE_ADDRESS__)
/* Those who leave by exit() with a cache open leave its memory behind, too. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "leak_check_at_exit=0"; /* detect_leaks may stand in the environment */
}
#endif

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static void open_dir(const char *dir, uint32_t pages)
{
    struct rig_shape shape = rig_shape_small(pages);

    rig_init(&rig, &shape, "dram=4MiB,threads=2", NULL);
    snprintf(rig.dir, sizeof(rig.dir), "%s", dir);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "64MiB");
}

/* ---- threads that store and load, each its own pages ---- */

struct job {
    pthread_t thread;
    uint32_t number;
    uint64_t seed;
    _Atomic int *stop;
    uint64_t loaded, bad;
};

static void one_request(struct job *job, struct kvt_rng *rng)
{
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    uint64_t first = 1 + kvt_rng_below(rng, 64) * CHAIN;
    bool load = kvt_rng_below(rng, 2) == 0;
    struct kvt_key keys[CHAIN];
    uint32_t ids[CHAIN];
    struct kvt_req *req;
    int rc;

    for (uint32_t i = 0; i < CHAIN; i++) {
        keys[i] = rig_key(first + i);
        ids[i] = job->number * CHAIN + i;
        if (!load)
            rig_fill(&rig, ids[i], first + i);
    }
    if (kvt_pool_reset_origin(rig.pool, ids, CHAIN) != 0)
        job->bad++;
    rc = load ? kvt_load(rig.ns, rig.pool, keys, ids, CHAIN, NULL, &req)
              : kvt_store(rig.ns, rig.pool, keys, ids, CHAIN, &opts, &req);
    if (rc != 0) {
        job->bad++;
        return;
    }
    job->bad += kvt_req_wait(req, INT64_C(60000000000)) != 1;
    for (uint32_t i = 0; load && i < CHAIN; i++)
        if (kvt_req_status(req, NULL)[i] == 0) {
            job->bad += !rig_same(&rig, ids[i], first + i);
            job->loaded++;
        }
    kvt_req_free(req);
}

static void *thread_main(void *arg)
{
    struct job *job = arg;
    struct kvt_rng rng = {job->seed};

    while (!atomic_load_explicit(job->stop, memory_order_relaxed))
        one_request(job, &rng);
    return NULL;
}

static void start_threads(struct job *jobs, _Atomic int *stop, uint64_t seed)
{
    for (uint32_t i = 0; i < THREADS; i++) {
        jobs[i] = (struct job){.number = i, .seed = seed + i, .stop = stop};
        assert_int_equal(pthread_create(&jobs[i].thread, NULL, thread_main, &jobs[i]), 0);
    }
}

/* ---- fork ---- */

/* In the child: nothing of the cache is its own. Exit code 0: all calls were refused. */
static _Noreturn void forked_child(uint64_t round, struct kvt_req *req)
{
    struct kvt_key key = rig_key(1);
    uint32_t id = 0;
    struct kvt_req *other = NULL;
    int bad = 0;

    bad += kvt_lookup(rig.ns, &key, 1, NULL, NULL) != KVT_E_CLOSED;
    bad += kvt_store(rig.ns, rig.pool, &key, &id, 1, NULL, &other) != KVT_E_CLOSED;
    bad += kvt_load(rig.ns, rig.pool, &key, &id, 1, NULL, &other) != KVT_E_CLOSED;
    bad += kvt_purge(rig.ns, NULL, 0) != KVT_E_CLOSED;
    bad += kvt_flush(rig.cache) != KVT_E_CLOSED;
    bad += kvt_req_wait(req, -1) != KVT_E_CLOSED;
    kvt_req_cancel(req);
    kvt_req_free(req);
    kvt_pool_unregister(rig.pool);
    kvt_ns_close(rig.ns);
    kvt_close(rig.cache);
    if (round % 3 == 0)
        (void)kill(getpid(), SIGKILL);
    if (round % 3 == 1)
        exit(bad);
    _exit(bad);
}

static void test_c49_forks_while_threads_store_and_load(void **state)
{
    static struct job jobs[THREADS];
    static _Atomic int stop;
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    struct rig_shape shape = rig_shape_small((THREADS + 1) * CHAIN);
    uint64_t loaded = 0;

    (void)state;
    rig_init(&rig, &shape, "dram=4MiB,threads=2", "64MiB");
    rig_open(&rig);
    atomic_store(&stop, 0);
    start_threads(jobs, &stop, rig_seed());
    for (uint64_t round = 0; round < ROUNDS; round++) {
        struct kvt_key key = rig_key(5000 + round);
        uint32_t id = THREADS * CHAIN;
        struct kvt_req *req;
        int status;
        pid_t pid;

        rig_fill(&rig, id, 5000 + round);
        assert_int_equal(kvt_pool_reset_origin(rig.pool, &id, 1), 0);
        assert_int_equal(kvt_store(rig.ns, rig.pool, &key, &id, 1, &opts, &req), 0);
        fflush(NULL);
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
            forked_child(round, req);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (round % 3 == 0)
            assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        else
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        assert_int_equal(kvt_req_wait(req, INT64_C(60000000000)), 1);
        status = kvt_req_status(req, NULL)[0]; /* DRAM may be full of what waits for the disk */
        assert_true(status == 0 || status == KVT_E_DROPPED);
        kvt_req_free(req);
    }
    atomic_store(&stop, 1);
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(jobs[i].thread, NULL);
        assert_int_equal(jobs[i].bad, 0);
        loaded += jobs[i].loaded;
    }
    assert_true(loaded > 0);
    assert_true(kvt_flush(rig.cache) <= 0);
    rig_reopen(&rig);
    for (uint64_t chain = 0; chain < 64; chain++)
        (void)rig_load(&rig, 1 + chain * CHAIN, CHAIN, NULL);
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
}

/* ---- processes that are started anew ---- */

static int run_again(const char *word, const char *dir)
{
    int status = 0;
    pid_t pid;

    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)execl("/proc/self/exe", "test_leave", word, dir, (char *)NULL);
        _exit(99);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status))
        fail_msg("%s: signal %d", word, WTERMSIG(status));
    return WEXITSTATUS(status);
}

/* Start it over and over on one root; what it leaves is exact or missing. Returns blocks found. */
static uint64_t leave_and_look(const char *word)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    uint64_t found = 0;

    rig_init(&rig, &shape, "dram=4MiB", "64MiB");
    for (int round = 0; round < ROUNDS / 2; round++) {
        int code = run_again(word, rig.dir);

        if (code)
            fail_msg("%s: exit code %d", word, code);
        rig_open(&rig);
        for (uint64_t chain = 0; chain < 64; chain++)
            found += rig_load(&rig, 1 + chain * CHAIN, CHAIN, NULL);
        assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
        rig_close(&rig);
    }
    return found;
}

/* In the child: exit() while threads are inside calls. */
static int child_exit_among_threads(const char *dir)
{
    static struct job jobs[THREADS];
    static _Atomic int stop;

    open_dir(dir, THREADS * CHAIN);
    rig_open(&rig);
    start_threads(jobs, &stop, 1);
    rig_sleep_ms(100);
    exit(0);
}

static void test_c49_exit_while_threads_are_in_calls(void **state)
{
    (void)state;
    assert_true(leave_and_look("exit") > 0);
}

/* ---- dlclose ---- */

#define EACH_FUNCTION(X)   \
    X(kvt_config_new)      \
    X(kvt_config_set)      \
    X(kvt_config_free)     \
    X(kvt_open)            \
    X(kvt_close)           \
    X(kvt_ns_open)         \
    X(kvt_ns_close)        \
    X(kvt_pool_register)   \
    X(kvt_pool_unregister) \
    X(kvt_store)           \
    X(kvt_req_wait)        \
    X(kvt_req_free)
#define MEMBER(name) __typeof__(&name) name;
#define TAKE(name)                                    \
    *(void **)&lib->name = dlsym(lib->handle, #name); \
    missing += !lib->name;

struct lib {
    void *handle;
    EACH_FUNCTION(MEMBER)
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
};

static int lib_load(struct lib *lib)
{
    int missing = 0;

    lib->handle = dlopen(KVT_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!lib->handle)
        return 1;
    EACH_FUNCTION(TAKE)
    return missing;
}

static int lib_open(struct lib *lib, const char *dir)
{
    struct kvt_config *config;
    char disk[200];
    int rc;

    open_dir(dir, BLOCKS);
    snprintf(disk, sizeof(disk), "%s:64MiB", dir);
    if (lib->kvt_config_new(&config))
        return 2;
    rc = lib->kvt_config_set(config, "disk", disk) || lib->kvt_config_set(config, "dram", "4MiB") ||
         lib->kvt_open(config, &lib->cache, rig.error, sizeof(rig.error)) ||
         lib->kvt_ns_open(lib->cache, &rig.identity, &rig.layout, &lib->ns) ||
         lib->kvt_pool_register(lib->cache, &rig.layout, &rig.desc, &lib->pool);
    lib->kvt_config_free(config);
    return rc ? 3 : 0;
}

/* Queue the store of all blocks; no waiting. */
static int lib_store(struct lib *lib, struct kvt_req **req)
{
    static struct kvt_key keys[BLOCKS];
    static uint32_t ids[BLOCKS];
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};

    for (uint32_t i = 0; i < BLOCKS; i++) {
        rig_fill(&rig, i, 1 + i);
        keys[i] = rig_key(1 + i);
        ids[i] = i;
    }
    return lib->kvt_store(lib->ns, lib->pool, keys, ids, BLOCKS, &opts, req) ? 4 : 0;
}

static unsigned threads_now(void)
{
    DIR *dir = opendir("/proc/self/task");
    unsigned count = 0;

    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count - 2; /* "." and ".." */
}

/* In the child: the library is closed under a cache that works; the process lives on. */
static int child_dlclose_open(const char *dir)
{
    static struct lib lib, again;
    struct kvt_req *req;
    int rc = lib_load(&lib);

    rc = rc ? rc : lib_open(&lib, dir);
    rc = rc ? rc : lib_store(&lib, &req);
    if (rc || dlclose(lib.handle))
        return rc ? rc : 5;
    rig_sleep_ms(60); /* its threads go on writing */
    if (lib_load(&again) || again.kvt_open != lib.kvt_open)
        return 6; /* it stayed where it was */
    return 0;     /* and exit() with the cache open */
}

/* In the child: closed first, with requests in flight; no thread may be left in the library. */
static int child_dlclose_closed(const char *dir)
{
    static struct lib lib;
#if defined(__SANITIZE_THREAD__)
    const unsigned extra = 1; /* the sanitizer's own */
#else
    const unsigned extra = 0;
#endif

    for (int i = 0; i < 3; i++) {
        struct kvt_req *req;
        int rc = lib_load(&lib);

        rc = rc ? rc : lib_open(&lib, dir);
        rc = rc ? rc : lib_store(&lib, &req);
        if (rc)
            return rc;
        lib.kvt_req_free(req);
        lib.kvt_pool_unregister(lib.pool);
        lib.kvt_ns_close(lib.ns);
        lib.kvt_close(lib.cache);
        for (int ms = 0; threads_now() != 1 + extra && ms < 60000; ms++)
            rig_sleep_ms(1); /* joined, but not yet gone from /proc */
        if (threads_now() != 1 + extra)
            return 7;
        if (dlclose(lib.handle))
            return 5;
        rig_sleep_ms(5);
    }
    return 0;
}

static void test_c49_dlclose_with_io_in_flight(void **state)
{
    (void)state;
    (void)leave_and_look("dlclose-open"); /* exact or missing */
}

static void test_c49_dlclose_after_close(void **state)
{
    (void)state;
    assert_int_equal(leave_and_look("dlclose-closed"), ROUNDS / 2 * BLOCKS);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c49_forks_while_threads_store_and_load, tear_down),
        cmocka_unit_test_teardown(test_c49_exit_while_threads_are_in_calls, tear_down),
        cmocka_unit_test_teardown(test_c49_dlclose_with_io_in_flight, tear_down),
        cmocka_unit_test_teardown(test_c49_dlclose_after_close, tear_down),
    };

    if (argc == 3 && strcmp(argv[1], "exit") == 0)
        return child_exit_among_threads(argv[2]);
    if (argc == 3 && strcmp(argv[1], "dlclose-open") == 0)
        return child_dlclose_open(argv[2]);
    if (argc == 3 && strcmp(argv[1], "dlclose-closed") == 0)
        return child_dlclose_closed(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
