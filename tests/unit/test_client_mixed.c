/* Sessions as an engine makes them, in a DRAM that holds a few of them: a raw first block, kv4
 * blocks, and a kv8 window, so records of three lengths, the longest almost four times the
 * shortest.
 *
 * Goal:   every chain is stored whole, first block included, however full DRAM is; the youngest are
 *         in reach, from their first block; no slot, pin or byte is left behind.
 * Method: the public API over the real store, with and without a disk; chains of random length;
 *         random older ones read in between, so that what leaves does not stand side by side.
 */
#include "support/rig.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"

#define CHAIN_MAX 24u
#define WINDOW 4u
#define CHAINS 300u

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

struct counts {
    unsigned stored, dropped, sinks_dropped;
};

static void store_part(uint64_t seed, uint32_t from, uint32_t n, int level, struct counts *counts)
{
    struct kvt_key keys[CHAIN_MAX], parent = rig_key(seed + from - 1);
    uint32_t ids[CHAIN_MAX];
    struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                  .first_pos = from * rig.shape.tokens,
                                  .parent = from ? &parent : NULL,
                                  .level = level};
    struct kvt_req *req;

    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(seed + from + i);
        ids[i] = i;
        rig_fill_smooth(&rig, i, seed + from + i);
    }
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < n; i++) {
        int32_t status = kvt_req_status(req, NULL)[i];

        assert_true(status == 0 || status == KVT_E_DROPPED || status == KVT_E_ORPHAN);
        counts->stored += status == 0;
        counts->dropped += status != 0;
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

static void sessions(const char *config, const char *disk_cap, unsigned reach)
{
    struct rig_shape shape = {.layers = 2,
                              .heads = 4,
                              .dim = 128,
                              .tokens = 16,
                              .pages = 2 * CHAIN_MAX,
                              .dtype = KVT_DTYPE_BF16};
    struct kvt_rng rng = {rig_seed()};
    struct counts counts = {0};
    unsigned chains = CHAINS;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    chains /= 4;
#endif
    rig_init(&rig, &shape, config, disk_cap);
    rig_open(&rig);
    for (uint64_t c = 1; c <= chains; c++) {
        uint32_t n = WINDOW + 1 + (uint32_t)(kvt_rng_next(&rng) % (CHAIN_MAX - WINDOW));

        store_part(c * 1000, 0, n - WINDOW, KVT_LEVEL_KV4, &counts);
        store_part(c * 1000, n - WINDOW, WINDOW, KVT_LEVEL_KV8, &counts);
        for (int i = 0; i < 2; i++)
            load_some((c - kvt_rng_next(&rng) % KVT_MIN(c, 12u)) * 1000);
    }
    printf("           %u chains: %u blocks stored, %u dropped, %u first blocks dropped, %llu"
           " evicted\n",
           chains, counts.stored, counts.dropped, counts.sinks_dropped,
           (unsigned long long)rig_stat(&rig, "dram.evicted"));
    /* A disk that is slower than this loop: blocks go unwritten, or find DRAM full of such as wait
     * to be written. Then each of them is in a counter, and no more can be asked for. */
    bool slow = disk_cap != NULL &&
                rig_stat(&rig, "disk.dropped_queue") + rig_stat(&rig, "store.dropped_dram") > 0;
    assert_true(rig_stat(&rig, "dram.evicted") > 100);
    if (!slow) {
        assert_int_equal(counts.sinks_dropped, 0);
        assert_int_equal(counts.dropped, 0);
        for (unsigned back = 0; back < reach; back++)
            assert_true(rig_lookup(&rig, (chains - back) * 1000, WINDOW + 1) == WINDOW + 1);
    }
    int rc = kvt_flush(rig.cache);
    assert_true(rc == 0 ||
                (slow && rc == KVT_E_DROPPED && rig_stat(&rig, "dram.evicted_lost") > 0));
    rig_sleep_ms(20);
    assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
    assert_int_equal(rig_stat(&rig, "client.bad_move"), 0);
}

static void in_dram_alone(void **state)
{
    (void)state;
    sessions("dram=2MiB,guard=no,threads=2", NULL, 1);
}

static void over_a_disk(void **state)
{
    (void)state;
    sessions("dram=4MiB,guard=no,threads=2", "256MiB", CHAINS / 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(in_dram_alone, tear_down),
        cmocka_unit_test_teardown(over_a_disk, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
