/* What a cache costs beyond the DRAM and the index that it was given: little when it is opened, and
 * no more after 10^6 operations; nothing runs when nobody asks.
 *
 * Method: everything is read from the system (resident pages, mallinfo2, descriptors, threads,
 * rusage) and from the arena's own pages (mincore), before and after; the figures are printed.
 * Blocks are as small as they can be (4 KiB records), requests are batches, and DRAM and disk are
 * small, so that eviction and the recycling of segments never stop. An operation is one block
 * stored, loaded, looked up, pinned, prefetched or purged. Under sanitizers there are fewer, and
 * memory is not compared: it is theirs. The directory is in memory where it can be.
 * glibc's mallinfo2 counts as used the freed pieces that each thread keeps for itself, some hundred
 * bytes that come and go: the program starts itself again with those caches off, so what it says is
 * what somebody holds.
 */
#include "support/rig.h"

#include <dirent.h>
#include <malloc.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/client.h"
#include "format/disk.h"
#include "support/memory_help.h"

#define CHAIN 64u
#define CHAINS 4u
#define BATCH (CHAIN * CHAINS)
#define AT_REST_MAX (UINT64_C(32) << 20)
#define SEGMENT_FDS_MAX                                                       \
    64u /* of one root, however many segments it has: fds_max, docs/config.md \
         */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OPERATIONS 40000u
#define SANITIZED 1
#else
#define OPERATIONS 1000000u
#define SANITIZED 0
#endif

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static struct rig_shape tiny_shape(uint32_t pages)
{
    return (struct rig_shape){
        .layers = 1, .heads = 1, .dim = 16, .tokens = 16, .pages = pages, .dtype = KVT_DTYPE_BF16};
}

static unsigned thread_count(void)
{
    unsigned count = 0;
    DIR *dir = opendir("/proc/self/task");
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(dir);
    return count;
}

/* Bytes of the arena that are in memory. */
static uint64_t arena_resident(void)
{
    const struct kvt_cache *cache = rig.cache;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = cache->host.memory.map_bytes / page;
    unsigned char *there = malloc(pages);
    uint64_t count = 0;
    assert_non_null(there);
    assert_int_equal(mincore(cache->host.memory.map, pages * page, there), 0);
    for (size_t i = 0; i < pages; i++)
        count += there[i] & 1u;
    free(there);
    return count * page;
}

#define PURGES_MAX 8192u /* that the journal of a root of 32 MiB holds, rounded up */

struct held {
    uint64_t resident; /* without the arena */
    uint64_t heap;     /* what malloc has given out */
    unsigned fds;      /* descriptors, those of segments apart */
    unsigned segments; /* descriptors of segment files */
    unsigned threads;
};

/* Descriptors of this process that stand for segment files. */
static unsigned segment_fds(void)
{
    char path[300], target[300];
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *entry;
    unsigned n = 0;
    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        snprintf(path, sizeof(path), "/proc/self/fd/%s", entry->d_name);
        ssize_t len = readlink(path, target, sizeof(target) - 1);
        target[len > 0 ? len : 0] = '\0';
        n += strstr(target, "/seg-") != NULL;
    }
    closedir(dir);
    return n;
}

static struct held held_now(void)
{
    struct mallinfo2 heap = mallinfo2();
    unsigned segments = segment_fds();
    return (struct held){.resident = memory_resident_bytes() - arena_resident(),
                         .heap = heap.uordblks + heap.hblkhd,
                         .fds = rig_open_fds() - segments,
                         .segments = segments,
                         .threads = thread_count()};
}

static double mib(uint64_t bytes)
{
    return (double)(int64_t)bytes / 1048576;
}

static void wait_for(int rc, struct kvt_req **req)
{
    assert_int_equal(rc, 0);
    assert_int_equal(kvt_req_wait(*req, -1), 1);
    kvt_req_free(*req);
}

/* Where the drive is slower than the loop, blocks may have left DRAM unwritten: that is said. */
static void flush(void)
{
    int rc = kvt_flush(rig.cache);
    assert_true(rc == 0 || rc == KVT_E_DROPPED);
}

static void keys_make(struct kvt_key *keys, uint32_t *ids, uint64_t chain)
{
    for (uint32_t i = 0; i < CHAIN; i++) {
        keys[i] = rig_key(chain * CHAIN + i);
        ids[i] = i;
    }
}

/* One round of everything, around chain number `at`. Returns operations. */
static uint64_t work(uint64_t at, struct kvt_rng *rng)
{
    static const struct kvt_store_opts store = {.struct_size = sizeof(store)};
    struct kvt_key keys[CHAIN];
    uint32_t ids[CHAIN];
    struct kvt_req *req;
    uint64_t done = 0;

    for (uint64_t chain = at; chain < at + CHAINS; chain++) {
        keys_make(keys, ids, chain);
        wait_for(kvt_store(rig.ns, rig.pool, keys, ids, CHAIN, &store, &req), &req);
        assert_true(kvt_lookup(rig.ns, keys, CHAIN, NULL, NULL) >= 0);
        wait_for(kvt_load(rig.ns, rig.pool, keys, ids, CHAIN, NULL, &req), &req);
        done += 3 * CHAIN;
    }
    for (unsigned i = 0; i < 4; i++) { /* older ones: on disk, or gone */
        keys_make(keys, ids, at - kvt_rng_next(rng) % KVT_MIN(at, 300u));
        assert_true(kvt_lookup(rig.ns, keys, CHAIN, NULL, NULL) >= 0);
        wait_for(kvt_load(rig.ns, rig.pool, keys, ids, CHAIN, NULL, &req), &req);
        done += 2 * CHAIN;
    }
    assert_true(kvt_prefetch(rig.ns, keys, CHAIN, NULL) >= 0);
    assert_true(kvt_pin(rig.ns, keys, CHAIN) >= 0);
    assert_true(kvt_unpin(rig.ns, keys, CHAIN) >= 0);
    keys_make(keys, ids, at);
    assert_true(kvt_purge(rig.ns, keys, 8) >= 0);
    if (at % 200 == 0)
        flush();
    return done + 3 * CHAIN + 8;
}

static void nothing_grows(void **state)
{
    struct rig_shape shape = tiny_shape(CHAIN);
    struct kvt_rng rng = {rig_seed()};
    struct held before, after;
    uint64_t done = 0, at = CHAINS, counted = 0;
    (void)state;
    rig_init(&rig, &shape, "dram=4MiB,threads=1,fds_max=32", "32MiB"); /* FDS_MAX */
    rig_open(&rig);
    /* until every table, ring and stack has been touched, and every segment is open */
    while (done < OPERATIONS / 5 || rig_stat(&rig, "disk.segments_recycled") < 8) {
        done += work(at, &rng);
        at += CHAINS;
    }
    flush();
    before = held_now();
    int64_t start = rig_now_ns();
    while (counted < OPERATIONS) {
        counted += work(at, &rng);
        at += CHAINS;
    }
    flush();
    double seconds = (double)(rig_now_ns() - start) / 1e9;
    after = held_now();
    printf("           %llu operations in %.1f s (asked for 10^6, %s), %llu blocks evicted from"
           " DRAM, %llu on disk at the end\n",
           (unsigned long long)counted, seconds, SANITIZED ? "fewer: sanitizers" : "all of them",
           (unsigned long long)rig_stat(&rig, "dram.evicted"),
           (unsigned long long)rig_stat(&rig, "disk.blocks"));
    printf("           heap %.2f -> %.2f MiB, resident without arena %.2f -> %.2f MiB, %u -> %u"
           " descriptors, %u -> %u of segments, %u -> %u threads\n",
           mib(before.heap), mib(after.heap), mib(before.resident), mib(after.resident), before.fds,
           after.fds, before.segments, after.segments, before.threads, after.threads);
    assert_true(rig_stat(&rig, "dram.evicted") > 1000);
    assert_int_equal(after.threads, before.threads);
    assert_int_equal(after.fds, before.fds);
    assert_true(before.segments <= SEGMENT_FDS_MAX);
    assert_true(after.segments <= SEGMENT_FDS_MAX);
    if (!SANITIZED) {
        /* to the byte, but for one list: purges are kept as long as records older than them are
         * on disk; it doubles, in a mapping of its own */
        uint64_t more = after.heap > before.heap ? after.heap - before.heap : 0;
        assert_true(more % 4096 == 0);
        assert_true(more <= PURGES_MAX * sizeof(struct kvt_journal_item));
        assert_true(after.resident <= before.resident + (256u << 10) + more);
        assert_true(rig_dir_bytes(rig.dir, NULL) <= 32u << 20);
    }
}

/* At rest: after open, and with the cache full. */
static void little_beyond_dram_and_index(void **state)
{
    struct rig_shape shape = tiny_shape(CHAIN);
    struct kvt_key keys[CHAIN];
    uint32_t ids[CHAIN];
    struct kvt_req *req;
    (void)state;
    rig_init(&rig, &shape, "dram=64MiB", "128MiB");
    uint64_t before = memory_resident_bytes();
    rig_open(&rig);
    uint64_t opened = memory_resident_bytes() - before - arena_resident();
    uint64_t index = rig_stat(&rig, "index.bytes");
    for (uint64_t chain = 1; chain <= (SANITIZED ? 50 : 600); chain++) {
        keys_make(keys, ids, chain);
        wait_for(kvt_store(rig.ns, rig.pool, keys, ids, CHAIN, NULL, &req), &req);
        wait_for(kvt_load(rig.ns, rig.pool, keys, ids, CHAIN, NULL, &req), &req);
    }
    flush();
    uint64_t full = memory_resident_bytes() - before - arena_resident();
    printf("           beyond the arena: %.1f MiB after open, %.1f MiB when full; index %.2f MiB of"
           " it at most; arena %.1f MiB touched\n",
           mib(opened), mib(full), mib(index), mib(arena_resident()));
    if (SANITIZED)
        return;
    assert_true(opened <= AT_REST_MAX);
    assert_true(full <= AT_REST_MAX + index);
    assert_true(arena_resident() <= 64u << 20);
}

/* What our threads and those of the ring have used; the threads of a sanitizer are not ours. */
static int64_t cpu_us(void)
{
    int64_t ns = 0;
    DIR *dir = opendir("/proc/self/task");
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        char path[300], name[32] = "", numbers[100] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL)
            continue;
        bool ours = fgets(name, sizeof(name), file) != NULL &&
                    (strncmp(name, "kvt-", 4) == 0 || strncmp(name, "iou-", 4) == 0);
        fclose(file);
        snprintf(path, sizeof(path), "/proc/self/task/%s/schedstat", entry->d_name);
        if (!ours || (file = fopen(path, "r")) == NULL)
            continue;
        assert_non_null(fgets(numbers, sizeof(numbers), file));
        fclose(file);
        ns += strtoll(numbers, NULL, 10); /* the first: nanoseconds on a processor */
    }
    closedir(dir);
    return ns / 1000;
}

static void idle_costs_no_cpu(void **state)
{
    struct rig_shape shape = tiny_shape(CHAIN);
    struct kvt_rng rng = {rig_seed()};
    (void)state;
    rig_init(&rig, &shape, "dram=4MiB,threads=4", "32MiB");
    rig_open(&rig);
    for (uint64_t at = CHAINS; at < 20 * CHAINS; at += CHAINS)
        (void)work(at, &rng);
    flush();
    /* the first pass of the scrub is work that was asked for; the next is a day away */
    for (int i = 0; i < 600 && rig_stat(&rig, "scrub.passes") == 0; i++)
        rig_sleep_ms(100);
    assert_true(rig_stat(&rig, "scrub.passes") > 0);
    rig_sleep_ms(2500); /* the file of statistics follows the last change */
    int64_t before = cpu_us();
    assert_true(before > 0); /* they have worked, so they are counted */
    rig_sleep_ms(1000);
    int64_t used = cpu_us() - before;
    printf("           %lld us of CPU in 1 s, %u threads\n", (long long)used, thread_count());
    assert_true(used < 20000);
}

/* The allocator reads its settings before main: set them, and begin again. */
static void without_thread_caches(char *argv[])
{
    static const char name[] = "GLIBC_TUNABLES", off[] = "glibc.malloc.tcache_count=0";
    const char *now = getenv(name);
    if (SANITIZED || (now && strcmp(now, off) == 0))
        return;
    (void)setenv(name, off, 1);
    (void)execv("/proc/self/exe", argv);
    perror("/proc/self/exe");
    exit(1);
}

int main(int argc, char *argv[])
{
    (void)argc;
    without_thread_caches(argv);
    memory_small_pages();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(little_beyond_dram_and_index, tear_down),
        cmocka_unit_test_teardown(nothing_grows, tear_down),
        cmocka_unit_test_teardown(idle_costs_no_cpu, tear_down),
    };
    if (getenv("TMPDIR") == NULL && access("/dev/shm", W_OK) == 0)
        (void)setenv("TMPDIR", "/dev/shm", 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
