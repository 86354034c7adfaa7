/* Sessions as an engine makes them, in a DRAM that holds a few of them: a raw first block, kv4
 * blocks, and a kv8 window, so records of three lengths, the longest almost four times the
 * shortest.
 *
 * Goal:   every chain is stored whole, first block included, however full DRAM is; the youngest are
 *         in reach, from their first block; no slot, pin or byte is left behind. A disk that does
 *         not keep up costs blocks: each of them is in a counter, and no other one is missing.
 * Method: the public API over the real store, with and without a disk; chains of random length;
 *         random older ones read in between, so that what leaves does not stand side by side.
 *         Over a disk once with a flush behind each chain, so that nothing may be dropped however
 *         slow disk and machine are; and once as fast as it goes, where every block is looked for.
 */
#include "support/rig.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"

#define CHAIN_MAX 24u
#define WINDOW 4u
#define CHAINS 300u
#define CHAIN_SEEDS 1000u /* seeds of a chain begin at its number times this */

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

struct counts {
    unsigned stored, dropped, orphaned, sinks_dropped;
};

static uint8_t stored[CHAINS + 1][CHAIN_MAX]; /* what each chain's store said of its blocks */

/* Store blocks from, from + 1, ... of a chain. */
static void store_part(uint64_t chain, uint32_t from, uint32_t n, int level, struct counts *counts)
{
    uint64_t seed = chain * CHAIN_SEEDS + from;
    struct kvt_key keys[CHAIN_MAX], parent = rig_key(seed - 1);
    uint32_t ids[CHAIN_MAX];
    struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                  .first_pos = from * rig.shape.tokens,
                                  .parent = from ? &parent : NULL,
                                  .level = level};
    struct kvt_req *req;

    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(seed + i);
        ids[i] = i;
        rig_fill_smooth(&rig, i, seed + i);
    }
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < n; i++) {
        int32_t status = kvt_req_status(req, NULL)[i];

        assert_true(status == 0 || status == KVT_E_DROPPED || status == KVT_E_ORPHAN);
        stored[chain][from + i] = status == 0;
        counts->stored += status == 0;
        counts->dropped += status == KVT_E_DROPPED;
        counts->orphaned += status == KVT_E_ORPHAN;
        counts->sinks_dropped += status != 0 && from + i == 0;
    }
    kvt_req_free(req);
}

static void load_some(uint64_t seed)
{
    struct kvt_key keys[CHAIN_MAX];
    uint32_t ids[CHAIN_MAX];
    struct kvt_req *req;

    for (uint32_t i = 0; i < CHAIN_MAX; i++) {
        keys[i] = rig_key(seed + i);
        ids[i] = CHAIN_MAX + i; /* stores never read these: their origin stays lossy */
    }
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, CHAIN_MAX, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    kvt_req_free(req);
}

/* Store and read chains. Returns how many. */
static unsigned sessions(const char *config, const char *disk_cap, bool flushing,
                         struct counts *counts)
{
    struct rig_shape shape = {.layers = 2,
                              .heads = 4,
                              .dim = 128,
                              .tokens = 16,
                              .pages = 2 * CHAIN_MAX,
                              .dtype = KVT_DTYPE_BF16};
    struct kvt_rng rng = {rig_seed()};
    unsigned chains = CHAINS;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    chains /= 4;
#endif
    memset(counts, 0, sizeof(*counts));
    memset(stored, 0, sizeof(stored));
    rig_init(&rig, &shape, config, disk_cap);
    rig_open(&rig);
    for (uint64_t c = 1; c <= chains; c++) {
        uint32_t n = WINDOW + 1 + (uint32_t)(kvt_rng_next(&rng) % (CHAIN_MAX - WINDOW));

        store_part(c, 0, n - WINDOW, KVT_LEVEL_KV4, counts);
        store_part(c, n - WINDOW, WINDOW, KVT_LEVEL_KV8, counts);
        if (flushing)
            assert_int_equal(kvt_flush(rig.cache), 0);
        for (int i = 0; i < 2; i++)
            load_some((c - kvt_rng_next(&rng) % KVT_MIN(c, 12u)) * CHAIN_SEEDS);
    }
    printf("           %u chains: %u blocks stored, %u dropped, %u after them, %u first blocks"
           " among these, %llu evicted, %llu of them unwritten\n",
           chains, counts->stored, counts->dropped, counts->orphaned, counts->sinks_dropped,
           (unsigned long long)rig_stat(&rig, "dram.evicted"),
           (unsigned long long)rig_stat(&rig, "dram.evicted_lost"));
    return chains;
}

/* Every block of the `reach` last chains is there: all that were stored were stored whole. */
static void check_whole(const struct counts *counts, unsigned chains, unsigned reach)
{
    assert_true(rig_stat(&rig, "dram.evicted") > 100);
    assert_int_equal(counts->dropped + counts->orphaned, 0);
    for (unsigned back = 0; back < reach; back++) {
        uint32_t n = 0;

        while (n < CHAIN_MAX && stored[chains - back][n])
            n++;
        assert_true(n > WINDOW);
        assert_true(rig_lookup(&rig, (chains - back) * (uint64_t)CHAIN_SEEDS, CHAIN_MAX) ==
                    (long)n);
    }
}

static void check_rest(void)
{
    rig_sleep_ms(20);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
    assert_int_equal(rig_stat(&rig, "client.bad_move"), 0);
}

static void in_dram_alone(void **state)
{
    struct counts counts;
    unsigned chains = sessions("dram=2MiB,guard=no,threads=2", NULL, false, &counts);
    (void)state;

    check_whole(&counts, chains, 1);
    assert_int_equal(kvt_flush(rig.cache), 0);
    check_rest();
}

static void over_a_disk(void **state)
{
    struct counts counts;
    unsigned chains = sessions("dram=4MiB,guard=no,threads=2", "256MiB", true, &counts);
    (void)state;

    check_whole(&counts, chains, chains);
    assert_int_equal(rig_stat(&rig, "dram.evicted_lost"), 0);
    check_rest();
}

static unsigned count_absent(unsigned chains)
{
    unsigned absent = 0;

    for (uint64_t c = 1; c <= chains; c++)
        for (uint32_t i = 0; i < CHAIN_MAX; i++) {
            long there = rig_lookup(&rig, c * CHAIN_SEEDS + i, 1);

            if (!stored[c][i])
                assert_true(there == 0);
            absent += stored[c][i] && there != 1;
        }
    return absent;
}

/* Blocks that the counters say are gone: without having been written, or, later, because a block
 * before them was. */
static uint64_t counted_lost(void)
{
    return rig_stat(&rig, "dram.evicted_lost") + rig_stat(&rig, "store.lost");
}

/* How many blocks are lost is the disk's speed; that no other one is, is not. */
static void faster_than_the_disk(void **state)
{
    struct counts counts;
    unsigned chains = sessions("dram=4MiB,guard=no,threads=2", "256MiB", false, &counts);
    uint64_t lost, swept;
    unsigned absent;
    (void)state;

    int rc = kvt_flush(rig.cache); /* also those that would not fit into the queue */
    lost = counted_lost();
    assert_int_equal(rc, lost ? KVT_E_DROPPED : 0);
    assert_int_equal(rig_stat(&rig, "disk.lost_deferred") + rig_stat(&rig, "disk.lost_queue") +
                         rig_stat(&rig, "disk.lost_error"),
                     lost);
    assert_int_equal(counts.dropped, rig_stat(&rig, "store.dropped_dram"));
    if (!counts.dropped && !lost)
        assert_int_equal(counts.orphaned, 0);
    do { /* what nothing leads to any more goes step by step */
        swept = rig_stat(&rig, "disk.orphans");
        absent = count_absent(chains);
    } while (rig_stat(&rig, "disk.orphans") != swept);
    assert_int_equal(absent, lost + swept);
    assert_int_equal(counted_lost(), lost);
    check_rest();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(in_dram_alone, tear_down),
        cmocka_unit_test_teardown(over_a_disk, tear_down),
        cmocka_unit_test_teardown(faster_than_the_disk, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
