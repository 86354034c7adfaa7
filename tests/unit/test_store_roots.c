/* A store over two roots.
 *
 * Goal:   batches go to both; a root that fails costs its own blocks, as misses, and nothing else;
 *         after a restart both are recovered, in whatever order they are given, and of two records
 *         of a key on different roots the newer one is served.
 * Method: a rig without threads over two memory disks behind fault injectors; every load is
 *         compared byte for byte, the store's invariants are checked after each step. Which root
 *         has a block is read from the index.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "kvtier/error.h"
#include "store/store_impl.h"
#include "support/fault_io.h"

static const uint32_t pages[7] = {0, 0, 4, 0, 0, 8, 16};
enum { KV4 = 2, KV8 = 5, RAW = 6, BLOCKS = 64 };

static void open_two(struct rig *rig, uint32_t *ns)
{
    struct rig_options options = rig_defaults();

    options.cache_bytes = 16 * 4 * 4096; /* a quarter of the blocks: the others come from disk */
    options.disk_cap_bytes = 32u << 20;
    options.two_roots = true;
    rig_open(rig, &options, NULL);
    *ns = rig_ns(rig, 1, pages);
}

/* One block a chain, each flushed, so that each is a batch of its own. Returns those stored. */
static uint32_t put_each(struct rig *rig, uint32_t ns, uint64_t first, uint32_t n, uint8_t map)
{
    uint32_t stored = 0;

    for (uint64_t number = first; number < first + n; number++) {
        stored += rig_put(rig, ns, &number, 1, 0, map, true, NULL);
        (void)rig_flush(rig);
        rig_forget_replies(rig);
    }
    return stored;
}

static uint32_t get_each(struct rig *rig, uint32_t ns, uint64_t first, uint32_t n, uint8_t min)
{
    uint32_t got = 0;

    for (uint64_t number = first; number < first + n; number++) {
        got += rig_get(rig, ns, &number, 1, min, NULL, NULL);
        rig_forget_replies(rig);
    }
    return got;
}

static void count_roots(const struct rig *rig, uint32_t on[2])
{
    const struct kvt_index *index = &rig->store->index;

    on[0] = on[1] = 0;
    for (uint32_t i = 0; i < index->touched; i++) {
        const struct kvt_index_entry *e = kvt_index_at(index, i);

        if (e->used && e->on_disk) {
            assert_true(e->root < 2);
            on[e->root]++;
        }
    }
}

static void test_striped(void **state)
{
    struct rig rig;
    uint32_t ns, on[2];

    (void)state;
    open_two(&rig, &ns);
    assert_int_equal(put_each(&rig, ns, 1, BLOCKS, KV4), BLOCKS);
    count_roots(&rig, on);
    printf("           %u and %u of %u blocks\n", on[0], on[1], BLOCKS);
    assert_int_equal(on[0] + on[1], BLOCKS);
    assert_true(on[0] >= BLOCKS / 4 && on[1] >= BLOCKS / 4);
    assert_int_equal(get_each(&rig, ns, 1, BLOCKS, 0), BLOCKS);
    assert_true(rig_stats(&rig).load_granted_disk >= BLOCKS / 2);
    rig_close(&rig);
}

static void test_recovered(void **state)
{
    struct rig rig;
    uint32_t ns, on[2], after[2];

    (void)state;
    open_two(&rig, &ns);
    assert_int_equal(put_each(&rig, ns, 1, BLOCKS, KV4), BLOCKS);
    count_roots(&rig, on);
    rig_crash(&rig);
    count_roots(&rig, after);
    assert_memory_equal(after, on, sizeof(on));
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get_each(&rig, ns, 1, BLOCKS, 0), BLOCKS);
    rig.swap_roots = true;
    rig_reopen(&rig);
    count_roots(&rig, after);
    assert_int_equal(after[0], on[1]);
    assert_int_equal(after[1], on[0]);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get_each(&rig, ns, 1, BLOCKS, 0), BLOCKS);
    assert_int_equal(put_each(&rig, ns, 1000, BLOCKS, KV4), BLOCKS); /* and goes on */
    assert_int_equal(get_each(&rig, ns, 1000, BLOCKS, 0), BLOCKS);
    rig_close(&rig);
}

/* A drive disappears: its blocks are misses, the others are served, new ones are stored, and what
 * was flushed comes back with the drive. */
static void test_one_fails(void **state)
{
    struct kvt_store_stats stats;
    struct rig rig;
    uint32_t ns, on[2], got, stored;

    (void)state;
    open_two(&rig, &ns);
    assert_int_equal(put_each(&rig, ns, 1, BLOCKS, KV4), BLOCKS);
    assert_int_equal(put_each(&rig, ns, 500, 16, KV4), 16); /* push the first ones out of DRAM */
    count_roots(&rig, on);
    fault_io_pull_the_plug(rig.second);
    got = get_each(&rig, ns, 1, BLOCKS, 0);
    stats = rig_stats(&rig);
    printf("           %u of %u after the failure, %llu reads failed\n", got, BLOCKS,
           (unsigned long long)stats.read_fail);
    assert_true(got >= BLOCKS / 4 && got < BLOCKS);
    assert_true(stats.read_fail > 0);
    assert_int_equal(get_each(&rig, ns, 1, BLOCKS, 0), got); /* nothing more is lost */
    for (unsigned round = 0; round < 3; round++) {
        stored = put_each(&rig, ns, 2000 + 100 * round, 32, KV4);
        printf("           %u of 32 new ones stored, %u in reach\n", stored,
               get_each(&rig, ns, 2000 + 100 * round, 32, 0));
        assert_int_equal(stored, 32); /* in DRAM, and on disk with luck */
        rig_advance(&rig, 20000000000);
    }
    assert_true(rig_stats(&rig).write_fail > 0);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_crash(&rig); /* with the drive back */
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get_each(&rig, ns, 1, BLOCKS, 0), BLOCKS);
    rig_close(&rig);
}

/* The file system of one root is full: no segment can be made there, those that it has go round.
 * The other one takes what comes, nothing of it goes, and both take their share once there is room.
 */
static void test_one_fills(void **state)
{
    struct fault_rule full = {
        .ops = FAULT_ALLOCATE | FAULT_TRUNCATE, .action = FAULT_FAIL, .error = ENOSPC};
    struct kvt_store_stats stats;
    struct rig rig;
    uint32_t ns, on[2], before[2];

    (void)state;
    open_two(&rig, &ns);
    assert_int_equal(put_each(&rig, ns, 1, BLOCKS / 2, KV4), BLOCKS / 2);
    count_roots(&rig, before);
    assert_int_equal(fault_io_rule(rig.second, &full), 0);
    for (uint64_t first = 1000; first < 1000 + 4 * BLOCKS; first += 16) {
        assert_int_equal(put_each(&rig, ns, first, 16, KV4), 16);
        rig_advance(&rig, 1100000000);
    }
    stats = rig_stats(&rig);
    count_roots(&rig, on);
    printf("           %u and %u before, %u and %u with one full; no room %llu times\n", before[0],
           before[1], on[0], on[1], (unsigned long long)stats.enospc);
    assert_true(stats.enospc > 0);
    assert_int_equal(stats.write_fail, 0);
    assert_int_equal(stats.disk_dropped_error, 0);
    assert_true(on[0] >= before[0] + 2 * BLOCKS); /* its half, and all that was there */
    assert_true(get_each(&rig, ns, 1, BLOCKS / 2, 0) >= before[0]);
    /* the last ones: the full root has one segment, which may just have begun anew */
    assert_true(get_each(&rig, ns, 1000 + 3 * BLOCKS, BLOCKS, 0) >= BLOCKS / 2);
    fault_io_clear(rig.second);
    rig_advance(&rig, 20000000000);
    count_roots(&rig, before);
    assert_int_equal(put_each(&rig, ns, 5000, 2 * BLOCKS, KV4), 2 * BLOCKS);
    count_roots(&rig, on);
    assert_true(on[1] >= before[1] + BLOCKS / 2);
    assert_int_equal(get_each(&rig, ns, 5000, 2 * BLOCKS, 0), 2 * BLOCKS);
    rig_close(&rig);
}

/* A root that cannot be opened is named, so that the caller can go on without it. */
static void test_open_names_the_bad_root(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_store_params params;
    struct kvt_store *store = NULL;
    uint32_t bad = 77;
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.two_roots = true;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(put_each(&rig, ns, 1, 8, KV4), 8);
    params = rig.store->params;
    kvt_store_close(rig.store, 1000000000);
    rig.store = NULL;
    fault_io_pull_the_plug(rig.second);
    assert_true(kvt_store_open(&params, &store, &bad) < 0);
    assert_int_equal(bad, 1);
    assert_null(store);
    params.root_count = 1;
    assert_int_equal(kvt_store_open(&params, &rig.store, &bad), 0);
    rig_settle(&rig);
    ns = rig_ns(&rig, 1, pages);
    uint32_t got = get_each(&rig, ns, 1, 8, 0);
    assert_true(got >= 2 && got <= 6);
    rig_close(&rig);
}

/* A key stored again at a higher level lands on the other root; after a crash the newer record is
 * the one that counts, whichever root is read first. */
static void test_newer_of_two_roots(void **state)
{
    struct rig rig;
    uint32_t ns, on[2];

    (void)state;
    for (int swapped = 0; swapped < 2; swapped++) {
        uint32_t low = 0;

        open_two(&rig, &ns);
        for (uint64_t number = 1; number <= 16; number++) {
            assert_int_equal(put_each(&rig, ns, number, 1, KV4), 1);
            count_roots(&rig, on);
            low += on[0];
            assert_int_equal(put_each(&rig, ns, number, 1, KV8), 1);
        }
        rig.swap_roots = swapped;
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(get_each(&rig, ns, 1, 16, KV8), 16);
        assert_true(low > 0);
        rig_close(&rig);
    }
}

/* A medium that another process has left behind: blocks 1 .. n of namespace 1, flushed. */
static struct kvt_io *left_behind(uint32_t n)
{
    struct rig_options options = rig_defaults();
    struct kvt_io *copy = NULL;
    static struct rig other;
    uint32_t ns;

    options.disk_cap_bytes = 32u << 20;
    rig_open(&other, &options, NULL);
    ns = rig_ns(&other, 1, pages);
    assert_int_equal(put_each(&other, ns, 1, n, KV4), n);
    assert_int_equal(kvt_io_mem_clone(fault_io_inner(other.io), &copy), 0);
    rig_close(&other);
    return copy;
}

static int add(struct rig *rig, struct kvt_io *io)
{
    const struct kvt_store_root root = {.io = io, .cap_bytes = 32u << 20};
    struct kvt_store_joining *joining = NULL;
    int rc = kvt_store_root_open(rig->store, &root, &joining);

    if (rc == 0) {
        rc = kvt_store_root_join(rig->store, joining);
        if (rc != 0)
            kvt_store_root_discard(joining);
    }
    if (rc == 0)
        rig->second = io; /* the rig frees it */
    rig_settle(rig);
    return rc;
}

/* A root comes while the store runs: what it holds is found, but for what was purged meanwhile and
 * what is here already; what was in DRAM only gets to disk. */
static void test_a_root_comes_later(void **state)
{
    struct rig_options options = rig_defaults();
    uint64_t purged[2] = {3, 4}, here = 5;
    static struct rig rig;
    struct kvt_alloc_entry entry;
    uint32_t ns;

    (void)state;
    options.disk_cap_bytes = 0;
    options.roots_pending = 1;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_put(&rig, ns, &here, 1, 0, KV8, false, NULL), 1);
    assert_int_equal(put_each(&rig, ns, 101, 8, KV4), 8);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, purged, 2), 0);
    rig_alloc(&rig, 1, ns, (uint64_t[]){7}, 1, 0, KV4, false,
              &entry); /* in the middle of a store */
    assert_int_equal(entry.status, 0);
    assert_int_equal(add(&rig, left_behind(20)), 0);
    assert_int_equal(rig_stats(&rig).disk_roots, 1);
    for (uint64_t n = 1; n <= 20; n++) {
        uint8_t map = 0;
        uint32_t got = rig_get(&rig, ns, &n, 1, 0, NULL, &map);

        assert_int_equal(got, n == 3 || n == 4 ? 0 : 1);
        if (got)
            assert_int_equal(map, n == here ? KV8 : KV4);
    }
    assert_true(rig_commit(&rig, 1, &entry, rig_fill(&rig, ns, 7, 0, KV4, &entry)) != 0);
    assert_int_equal(rig_flush(&rig), 0);
    /* the next process */
    assert_int_equal(kvt_io_mem_clone(rig.second, &rig.io), 0);
    {
        struct kvt_io *after = rig.io;
        static struct rig next;

        rig.io = NULL;
        rig_close(&rig);
        options.disk_cap_bytes = 32u << 20;
        rig_open(&next, &options, after);
        ns = rig_ns(&next, 1, pages);
        assert_int_equal(get_each(&next, ns, 101, 8, 0), 8);
        assert_int_equal(get_each(&next, ns, 1, 20, 0), 18);
        rig_close(&next);
    }
}

/* What was stored before a root came is newer than what lies in the root, and than every purge of
 * its journal, whatever the numbers say: a flush after the root came holds for it. */
static void test_what_was_stored_before_a_root_came_stays_the_newer(void **state)
{
    struct rig_options options = rig_defaults();
    uint64_t again = 3, better = 5;
    struct kvt_io *io, *after = NULL;
    static struct rig rig, other, next;
    uint8_t map = 0;
    uint32_t ns;

    (void)state;
    /* the owner before: stores 1 to 20, purges the namespace, stores 5 anew */
    options.disk_cap_bytes = 32u << 20;
    rig_open(&other, &options, NULL);
    ns = rig_ns(&other, 1, pages);
    assert_int_equal(put_each(&other, ns, 1, 20, KV4), 20);
    assert_int_equal(rig_keys(&other, KVT_OP_PURGE, ns, NULL, 0), 20);
    assert_int_equal(put_each(&other, ns, 5, 1, KV4), 1);
    assert_int_equal(rig_flush(&other), 0);
    assert_int_equal(kvt_io_mem_clone(fault_io_inner(other.io), &io), 0);
    rig_close(&other);
    /* without the root: 1 to 4, of which 3 is purged and stored again; 5 at a better level */
    options.disk_cap_bytes = 0;
    options.roots_pending = 1;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(put_each(&rig, ns, 1, 4, KV4), 4);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &again, 1), 1);
    assert_int_equal(put_each(&rig, ns, again, 1, KV4), 1);
    assert_int_equal(rig_put(&rig, ns, &better, 1, 0, KV8, false, NULL), 1);
    assert_int_equal(add(&rig, io), 0);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(get_each(&rig, ns, 1, 5, 0), 5);
    /* the next process */
    assert_int_equal(kvt_io_mem_clone(rig.second, &after), 0);
    rig_close(&rig);
    options.disk_cap_bytes = 32u << 20;
    options.roots_pending = 0;
    rig_open(&next, &options, after);
    ns = rig_ns(&next, 1, pages);
    assert_int_equal(get_each(&next, ns, 1, 5, 0), 5);
    assert_int_equal(rig_get(&next, ns, &better, 1, 0, NULL, &map), 1);
    assert_int_equal(map, KV8);
    rig_close(&next);
}

/* One that cannot be used leaves the store as it was. */
static void test_a_root_that_cannot_be_used_is_refused(void **state)
{
    struct rig_options options = rig_defaults();
    static const uint32_t long_pages[7] = {0, 0, 4, 0, 0, 8, 64};
    static struct rig rig;
    struct kvt_io *io;
    uint32_t ns;
    int file;

    (void)state;
    options.roots_pending = 2;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(put_each(&rig, ns, 1, 8, KV4), 8);
    assert_int_equal(kvt_io_mem_new(128u << 20, &io), 0);
    file = io->ops->open(io, "superblock", KVT_IO_OPEN_CREATE);
    assert_int_equal(kvt_io_write_now(io, file, 0, rig.arena, 4096), 4096);
    io->ops->close(io, file);
    assert_int_equal(add(&rig, io), KVT_E_NOT_OURS);
    io->ops->destroy(io);
    /* segments of 1 MiB take no record of 256 KiB */
    assert_int_equal(get_each(&rig, ns, 1, 8, 0), 8);
    rig_close(&rig);
    options.disk_cap_bytes = 0;
    options.cache_bytes = 4u << 20;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 2, long_pages);
    io = left_behind(20);
    assert_int_equal(add(&rig, io), 0); /* but those that are shorter: test_store_sizes.c */
    assert_int_equal(rig_stats(&rig).disk_roots, 1);
    assert_int_equal(rig_stats(&rig).ns_without_root, 1);
    assert_int_equal(put_each(&rig, ns, 1, 8, KV4), 8);
    assert_int_equal(get_each(&rig, ns, 1, 8, 0), 8);
    rig_close(&rig);
}

/* One of two roots fails for ever in mid-run: its blocks become misses, stores and loads go on with
 * the other, and both are said. */
static void test_a_root_dies_in_mid_run(void **state)
{
    const struct fault_rule dead = {.ops = FAULT_ALL, .action = FAULT_FAIL, .error = 5};
    static struct rig rig;
    struct kvt_store_stats stats;
    uint32_t ns, on[2], got;
    uint64_t lost;

    (void)state;
    open_two(&rig, &ns);
    assert_int_equal(put_each(&rig, ns, 1, BLOCKS, KV4), BLOCKS);
    count_roots(&rig, on);
    assert_true(on[0] > 8 && on[1] > 8);
    assert_true(fault_io_rule(rig.io, &dead) >= 0);
    got = get_each(&rig, ns, 1, BLOCKS, 0);
    assert_in_range(got, on[1], BLOCKS);
    for (uint64_t n = 200; n < 600; n++) {
        (void)rig_put(&rig, ns, &n, 1, 0, KV4, false, NULL);
        rig_advance(&rig, 30000000);
        rig_forget_replies(&rig);
    }
    stats = rig_stats(&rig);
    lost = stats.lost_error + stats.lost_queue + stats.lost_deferred;
    got = get_each(&rig, ns, 200, 400, 0);
    printf("           %u of 400 stored after the death are there, %llu counted lost\n", got,
           (unsigned long long)lost);
    assert_true(stats.disk_failing == 1);
    assert_true(got + lost >= 400); /* a batch or two before the pause, and one a pause */
    assert_true(lost < 60);
    fault_io_clear(rig.io);
    for (int i = 0; i < 40; i++) { /* it comes back by itself */
        uint64_t n = 1000 + (uint64_t)i;

        (void)rig_put(&rig, ns, &n, 1, 0, KV4, false, NULL);
        rig_advance(&rig, 1000000000);
    }
    assert_int_equal(rig_stats(&rig).disk_failing, 0);
    rig_close(&rig);
}

enum { LEFT = 9000, CHAIN = 100 };

static const uint32_t short_pages[7] = {0, 0, 1, 0, 0, 2, 3};

/* What an owner left behind: 90 chains of 100 blocks, of which block 50 was raised later. */
static struct kvt_io *left_many(void)
{
    static struct rig other;
    struct rig_options options = rig_defaults();
    struct kvt_io *copy = NULL;
    uint64_t numbers[CHAIN], raised = 50;
    uint32_t ns;

    options.disk_cap_bytes = 128u << 20;
    options.cache_bytes = 4u << 20;
    options.write_queue_bytes = 4u << 20;
    rig_open(&other, &options, NULL);
    other.check_each_step = false;
    ns = rig_ns(&other, 1, short_pages);
    for (uint64_t first = 1; first < LEFT; first += CHAIN) {
        for (uint64_t i = 0; i < CHAIN; i++)
            numbers[i] = first + i;
        assert_int_equal(rig_put(&other, ns, numbers, CHAIN, 0, KV4, false, NULL), CHAIN);
        assert_int_equal(rig_flush(&other), 0);
    }
    assert_int_equal(rig_put(&other, ns, &raised, 1, 49, KV8, KVT_REPLACE_RAISE, NULL), 1);
    assert_int_equal(rig_flush(&other), 0);
    assert_int_equal(kvt_io_mem_clone(fault_io_inner(other.io), &copy), 0);
    rig_close(&other);
    return copy;
}

static struct kvt_store_joining *join_many(struct rig *rig, struct kvt_io *io)
{
    const struct kvt_store_root root = {.io = io, .cap_bytes = 128u << 20};
    struct kvt_store_joining *joining = NULL;

    assert_int_equal(kvt_store_root_open(rig->store, &root, &joining), 0);
    assert_int_equal(kvt_store_root_join(rig->store, joining), 0);
    rig->second = io;
    return joining;
}

/* A large root is taken in by slices: requests are answered in between, each of them exactly as if
 * the rest were not there, and what is asked for meanwhile counts. */
static void test_a_large_root_is_taken_in_by_slices(void **state)
{
    struct rig_options options = rig_defaults();
    uint64_t early = 1, late = LEFT, purged = 8950, here = 8050, fresh = 20000, chain[CHAIN];
    struct kvt_store_stats stats;
    static struct rig rig;
    uint32_t ns, slices = 0;
    uint8_t map = 0;

    (void)state;
    options.disk_cap_bytes = 0;
    options.roots_pending = 1;
    options.cache_bytes = 1u << 20;
    rig_open(&rig, &options, NULL);
    rig.check_each_step = false;
    ns = rig_ns(&rig, 1, short_pages);
    (void)join_many(&rig, left_many());
    (void)kvt_store_run(rig.store);
    slices++;
    stats = rig_stats(&rig);
    assert_true(stats.recovered_blocks > 1000 && stats.recovered_blocks < LEFT / 2 + 1);
    assert_true(kvt_store_root_joining(rig.store));
    rig.held_io = true; /* settle() runs a few times only */
    assert_int_equal(rig_lookup(&rig, ns, &late, 1, 0, NULL), 0);
    assert_int_equal(rig_lookup(&rig, ns, &early, 1, 0, NULL), 1);
    rig.held_io = false;
    rig_check(&rig);
    while (kvt_store_root_joining(rig.store) && slices < 100) {
        (void)kvt_store_run(rig.store);
        slices++;
    }
    rig_close(&rig);

    rig_open(&rig, &options, NULL);
    rig.check_each_step = false;
    ns = rig_ns(&rig, 1, short_pages);
    (void)join_many(&rig, left_many());
    /* before the first slice: by hand, since every helper lets the store settle */
    {
        union {
            struct kvt_msg_keys msg;
            uint8_t room[sizeof(struct kvt_msg_keys) + sizeof(struct kvt_msg_key)];
        } u;

        memset(&u, 0, sizeof(u));
        u.msg.msg.bytes = (uint32_t)((sizeof(u) + 7) / 8 * 8);
        u.msg.msg.op = KVT_OP_PURGE;
        u.msg.msg.ns = ns;
        u.msg.msg.count = 1;
        u.msg.msg.cookie = ++rig.cookie;
        u.msg.keys[0] = rig_key(purged);
        assert_int_equal(kvt_store_handle(rig.store, 1, &u.msg.msg), 0);
    }
    assert_int_equal(rig_put(&rig, ns, &fresh, 1, 0, KV8, false, NULL), 1);
    rig_settle(&rig);
    assert_false(kvt_store_root_joining(rig.store));
    rig_check(&rig);
    assert_int_equal(rig_stats(&rig).recovered_blocks, LEFT - 1);
    assert_int_equal(rig_stats(&rig).evict_disk_segments, 0);
    assert_int_equal(rig_lookup(&rig, ns, &purged, 1, 0, NULL), 0);
    assert_int_equal(rig_get(&rig, ns, &fresh, 1, 0, NULL, NULL), 1);
    for (uint64_t first = 1; first < LEFT; first += CHAIN) {
        for (uint64_t i = 0; i < CHAIN; i++)
            chain[i] = first + i;
        assert_int_equal(rig_lookup(&rig, ns, chain, CHAIN, 0, NULL), first == 8901 ? 49 : CHAIN);
        rig_forget_replies(&rig);
    }
    early = 50; /* of two records of one key the later one */
    assert_int_equal(rig_get(&rig, ns, &early, 1, 0, NULL, &map), 1);
    assert_int_equal(map, KV8);
    assert_int_equal(rig_get(&rig, ns, &here, 1, 0, NULL, &map), 1);
    assert_int_equal(map, KV4);
    rig_advance(&rig, 2000000000);
    assert_int_equal(rig_stats(&rig).disk_erases, 0); /* nothing is held back any more */
    /* and the next process does not find the purged one either */
    {
        struct kvt_io *after = NULL;
        static struct rig next;

        assert_int_equal(rig_flush(&rig), 0);
        assert_int_equal(kvt_io_mem_clone(rig.second, &after), 0);
        rig_close(&rig);
        options.disk_cap_bytes = 128u << 20;
        options.roots_pending = 0;
        rig_open(&next, &options, after);
        ns = rig_ns(&next, 1, short_pages);
        assert_int_equal(rig_lookup(&next, ns, &purged, 1, 0, NULL), 0);
        assert_int_equal(rig_get(&next, ns, &fresh, 1, 0, NULL, NULL), 1);
        rig_close(&next);
    }
}

/* Closed in the middle of it, or purged whole: nothing is left behind, nothing comes back. */
static void test_closed_or_purged_while_it_is_taken_in(void **state)
{
    struct rig_options options = rig_defaults();
    static struct rig rig;
    uint64_t number = 1;
    uint32_t ns;

    (void)state;
    options.disk_cap_bytes = 0;
    options.roots_pending = 1;
    rig_open(&rig, &options, NULL);
    (void)join_many(&rig, left_many());
    (void)kvt_store_run(rig.store);
    assert_true(kvt_store_root_joining(rig.store));
    rig_close(&rig);

    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, short_pages);
    (void)join_many(&rig, left_many());
    (void)kvt_store_run(rig.store);
    rig.check_each_step = false;
    assert_true(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0) >= 1000); /* those taken in so far */
    assert_int_equal(rig_stats(&rig).blocks, 0);
    assert_int_equal(rig_lookup(&rig, ns, &number, 1, 0, NULL), 0);
    rig_settle(&rig);
    rig_check(&rig);
    assert_false(kvt_store_root_joining(rig.store));
    assert_int_equal(rig_stats(&rig).blocks, 0);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_striped),
        cmocka_unit_test(test_recovered),
        cmocka_unit_test(test_one_fails),
        cmocka_unit_test(test_one_fills),
        cmocka_unit_test(test_open_names_the_bad_root),
        cmocka_unit_test(test_newer_of_two_roots),
        cmocka_unit_test(test_a_root_comes_later),
        cmocka_unit_test(test_what_was_stored_before_a_root_came_stays_the_newer),
        cmocka_unit_test(test_a_root_that_cannot_be_used_is_refused),
        cmocka_unit_test(test_a_root_dies_in_mid_run),
        cmocka_unit_test(test_a_large_root_is_taken_in_by_slices),
        cmocka_unit_test(test_closed_or_purged_while_it_is_taken_in),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
