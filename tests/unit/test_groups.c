/* Groups of a layout: blocks of their own sizes, hits over all groups (C61, C62), what is kept of
 * windows and states when the blocks before are gone, origin of pages by group, restart.
 *
 * Method: a layout of three groups (full attention, a sliding window, raw state) over small pages;
 * blocks are stored group by group and the hit is compared with the cases' figures and, at random,
 * with a plain search. Seed printed; KVT_TEST_SEED=N repeats a run.
 */
#include "support/rig.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/client.h"

#define FULL 0u
#define WINDOW 5u /* numbers need not follow each other */
#define STATE 9u
#define CHAIN 80u

static struct rig rig;
static struct kvt_group groups[3];
static enum kvt_tier tiers[3][CHAIN];
static struct kvt_key keys[3][CHAIN];
static struct kvt_group_chain chains[3];

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

/* Parts: K V (full), K V (window), K V (state: opaque bytes). tokens[g]: of a block. */
static void start(const char *config, const char *disk_cap, const uint32_t tokens[3],
                  uint32_t window, uint32_t most_tokens, uint32_t pages)
{
    static const uint16_t numbers[3] = {FULL, WINDOW, STATE};
    static const uint8_t kinds[3] = {KVT_GROUP_FULL, KVT_GROUP_WINDOW, KVT_GROUP_STATE};
    struct rig_shape shape = {.layers = 3,
                              .heads = 1,
                              .dim = 64,
                              .tokens = most_tokens,
                              .pages = pages,
                              .dtype = KVT_DTYPE_BF16};
    rig_init(&rig, &shape, config, disk_cap);
    for (uint32_t p = 0; p < 6; p++)
        rig.parts[p].group = numbers[p / 2];
    for (uint32_t p = 4; p < 6; p++)
        rig.parts[p].kind = KVT_PART_OPAQUE;
    for (uint32_t g = 0; g < 3; g++)
        groups[g] = (struct kvt_group){.group = numbers[g],
                                       .kind = kinds[g],
                                       .block_tokens = tokens[g],
                                       .window_tokens = g == 1 ? window : 0};
    rig.layout.block_tokens = 16;
    rig.layout.groups = groups;
    rig.layout.group_count = 3;
    rig_open(&rig);
    for (uint32_t g = 0; g < 3; g++) {
        for (uint32_t i = 0; i < CHAIN; i++) {
            keys[g][i] = rig_key(1000 * (g + 1) + i);
            keys[g][i].group = numbers[g];
        }
        chains[g] = (struct kvt_group_chain){
            .group = numbers[g], .keys = keys[g], .n = CHAIN, .tiers = tiers[g]};
    }
}

/* Blocks [from, from + n) of group g, out of pages from, ... A chain is stored from its parent on.
 */
static void store(uint32_t g, uint32_t from, uint32_t n, int32_t want)
{
    uint32_t ids[CHAIN], tokens = groups[g].block_tokens;
    struct kvt_req *req;
    struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                  .parent = from > 0 ? &keys[g][from - 1] : NULL,
                                  .first_pos = from * tokens,
                                  .exact = 1};
    if (n == 0)
        return;
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (from + i) % rig.shape.pages;
        rig_fill(&rig, ids[i], 7000 * g + from + i);
    }
    assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, n), 0);
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys[g] + from, ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvt_req_status(req, NULL)[i], want);
    kvt_req_free(req);
}

static long hit(size_t max_tokens)
{
    return kvt_lookup_groups(rig.ns, chains, 3, max_tokens, NULL);
}

#define NEEDS(g, from, blocks)                     \
    do {                                           \
        assert_int_equal(chains[g].first, from);   \
        assert_int_equal(chains[g].count, blocks); \
    } while (0)

static const uint32_t sixteen[3] = {16, 16, 16};

/* "Full group 10 pages, sidecar 7 -> usable 7. Trailing-2 group holding pages 7-8 -> usable 8;
 * holding none -> 0." */
static void test_c61_usable_is_what_every_group_has(void **state)
{
    (void)state;
    start("dram=4MiB", NULL, sixteen, 32, 16, 16);
    store(0, 0, 10, 0);
    store(1, 0, 10, 0);
    store(2, 0, 7, 0);
    assert_int_equal(hit(SIZE_MAX), 7 * 16);
    NEEDS(0, 0, 7);
    NEEDS(1, 5, 2);
    NEEDS(2, 6, 1);
    assert_int_equal(hit(7 * 16 - 1), 6 * 16); /* one token to be computed */
    assert_int_equal(hit(15), 0);
    tear_down(state);

    start("dram=4MiB", NULL, sixteen, 32, 16, 16);
    store(0, 0, 10, 0);
    store(2, 0, 10, 0);
    assert_int_equal(hit(SIZE_MAX), 0); /* the window holds nothing */
    NEEDS(0, 0, 0);
    store(1, 6, 2, 0); /* pages 7 and 8 */
    assert_int_equal(hit(SIZE_MAX), 8 * 16);
    NEEDS(0, 0, 8);
    NEEDS(1, 6, 2);
    NEEDS(2, 7, 1);
    assert_int_equal(tiers[1][5], KVT_TIER_MISS);
    assert_int_equal(tiers[1][7], KVT_TIER_DRAM);
}

/* "Groups of 3,584/64/4 tokens accepted." */
static void test_c62_groups_of_very_different_blocks_are_accepted(void **state)
{
    static const uint32_t tokens[3] = {3584, 64, 4};
    (void)state;
    start("dram=64MiB", NULL, tokens, 128, 3584, 2);
    assert_int_equal(kvt_ns_record_bytes(rig.ns, FULL, KVT_LEVEL_RAW),
                     kvt_record_bytes(2u * 3584 * 64 * 2));
    assert_int_equal(kvt_ns_record_bytes(rig.ns, WINDOW, KVT_LEVEL_RAW),
                     kvt_record_bytes(2u * 64 * 64 * 2));
    assert_int_equal(kvt_ns_record_bytes(rig.ns, STATE, KVT_LEVEL_KV4),
                     kvt_record_bytes(2u * 4 * 64 * 2));
    store(0, 0, 1, 0);
    for (uint32_t i = 54; i < 56; i++)
        store(1, i, 1, 0);
    chains[2].n = 0; /* no state yet */
    assert_int_equal(hit(SIZE_MAX), 0);
    struct kvt_key last = keys[2][0];
    uint32_t page = 0;
    struct kvt_req *req;
    last.hash[0] ^= 0x80;
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .first_pos = 3584 - 4};
    assert_int_equal(kvt_store(rig.ns, rig.pool, &last, &page, 1, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], 0);
    kvt_req_free(req);
    /* A chain of 896 states, of which the last is there. */
    static struct kvt_key states[896];
    static enum kvt_tier state_tiers[896];
    for (uint32_t i = 0; i < 896; i++) {
        states[i] = rig_key(90000 + i);
        states[i].group = STATE;
    }
    states[895] = last;
    chains[2].keys = states;
    chains[2].tiers = state_tiers;
    chains[2].n = 896;
    assert_int_equal(hit(SIZE_MAX), 3584);
    NEEDS(0, 0, 1);
    NEEDS(1, 54, 2);
    NEEDS(2, 895, 1);
}

/* "Window 128, block 16, hit 1,024: window group loads 8 blocks, full group 64." */
static void test_c62_a_window_loads_its_window_only(void **state)
{
    (void)state;
    start("dram=16MiB", NULL, sixteen, 128, 16, CHAIN);
    store(0, 0, 64, 0);
    store(1, 0, 64, 0);
    store(2, 0, 64, 0);
    assert_int_equal(hit(1024), 1024);
    NEEDS(0, 0, 64);
    NEEDS(1, 56, 8);
    NEEDS(2, 63, 1);
    /* Its first blocks may be gone; one of the last eight may not. */
    assert_int_equal(kvt_purge(rig.ns, keys[1], 56), 56);
    assert_int_equal(hit(1024), 1024);
    assert_int_equal(kvt_purge(rig.ns, keys[1] + 60, 1), 1);
    assert_int_equal(hit(1024), 0);
    /* What is needed can be loaded, and is what was stored. */
    store(1, 60, 1, 0);
    assert_int_equal(hit(1024), 1024);
    uint32_t ids[8];
    struct kvt_req *req;
    for (uint32_t i = 0; i < 8; i++) {
        ids[i] = i;
        rig_poison(&rig, i, 0xcd);
    }
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys[1] + 56, ids, 8, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(kvt_req_status(req, NULL)[i], 0);
        rig_fill(&rig, 70, 7000 + 56 + i); /* what the page was made of */
        for (uint32_t p = 0; p < 6; p++) {
            const uint8_t *base = rig.places[p].base;
            int64_t stride = rig.places[p].stride_block;
            int same = memcmp(base + stride * i, base + stride * 70, (size_t)stride) == 0;
            assert_int_equal(same, p / 2 == 1); /* and no other group's part was written */
        }
    }
    kvt_req_free(req);
}

/* The longest hit by trying each length, from what is known to be stored. */
static long plain_search(bool there[3][CHAIN], const uint32_t tokens[3], uint32_t window,
                         uint64_t max)
{
    for (uint64_t n = max; n > 0; n--) {
        bool good = true;
        for (uint32_t g = 0; g < 3 && good; g++) {
            uint64_t end = n / tokens[g];
            good = n % tokens[g] == 0 && end <= CHAIN;
            for (uint64_t i = 0; i < end && good; i++) {
                bool needed = g == 0 || (g == 1 && (i + 1) * tokens[1] + window > n) ||
                              (g == 2 && i + 1 == end);
                good = !needed || there[g][i];
            }
        }
        if (good)
            return (long)n;
    }
    return 0;
}

static void random_stores_agree_with_a_plain_search(void **state)
{
    static const uint32_t tokens[3] = {32, 16, 8};
    struct kvt_rng rng = {rig_seed()};
    unsigned hits = 0;
    (void)state;
    for (int round = 0; round < 40; round++) {
        uint32_t window = 1 + (uint32_t)kvt_rng_below(&rng, 80);
        bool there[3][CHAIN] = {{false}};
        start("dram=8MiB", NULL, tokens, window, 32, CHAIN);
        uint32_t full = (uint32_t)kvt_rng_below(&rng, 20);
        store(0, 0, full, 0);
        for (uint32_t i = 0; i < full; i++)
            there[0][i] = true;
        for (uint32_t g = 1; g < 3; g++)
            for (uint32_t i = 0; i < CHAIN; i++)
                if (kvt_rng_below(&rng, 8) != 0) {
                    store(g, i, 1, 0);
                    there[g][i] = true;
                }
        for (int k = 0; k < 5; k++) {
            uint64_t max = kvt_rng_below(&rng, 700);
            long want = plain_search(there, tokens, window, max);
            assert_int_equal(hit(max), want);
            hits += want > 0;
        }
        tear_down(state);
    }
    printf("           %u of 200 prompts hit\n", hits);
    assert_true(hits > 20);
}

static void blocks_of_windows_need_no_predecessor_after_a_restart(void **state)
{
    (void)state;
    start("dram=4MiB", "64MiB", sixteen, 32, 16, CHAIN);
    store(0, 0, 8, 0);
    store(1, 6, 2, 0); /* their predecessors were never stored */
    store(2, 7, 1, 0);
    store(0, 20, 2, KVT_E_ORPHAN); /* a chain of full attention would be out of reach */
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_reopen(&rig);
    assert_int_equal(hit(SIZE_MAX), 8 * 16);
    assert_int_equal(tiers[1][6], KVT_TIER_DISK);
    assert_int_equal(rig_stat(&rig, "disk.orphans"), 0);
    /* Purging the namespace purges every group. */
    assert_int_equal(kvt_purge(rig.ns, NULL, 0), 11);
    assert_int_equal(hit(SIZE_MAX), 0);
    rig_reopen(&rig);
    assert_int_equal(hit(SIZE_MAX), 0);
    assert_int_equal(kvt_lookup(rig.ns, keys[1] + 6, 1, NULL, NULL), 0);
}

static void keys_of_several_groups_may_be_purged_and_pinned_together(void **state)
{
    (void)state;
    struct kvt_key mixed[6];
    start("dram=4MiB", NULL, sixteen, 32, 16, CHAIN);
    for (uint32_t g = 0; g < 3; g++) {
        store(g, 0, 2, 0);
        mixed[2 * g] = keys[g][0];
        mixed[2 * g + 1] = keys[g][1];
    }
    assert_int_equal(kvt_lookup(rig.ns, mixed, 6, NULL, NULL), KVT_E_INVAL); /* not one chain */
    assert_int_equal(kvt_pin(rig.ns, mixed, 6), 6);
    assert_int_equal(kvt_unpin(rig.ns, mixed, 6), 6);
    assert_int_equal(kvt_purge(rig.ns, mixed, 6), 6);
    uint32_t ids[6] = {0, 1, 2, 3, 4, 5};
    struct kvt_req *req;
    assert_int_equal(kvt_load(rig.ns, rig.pool, mixed, ids, 6, NULL, &req), KVT_E_INVAL);
    assert_int_equal(kvt_store(rig.ns, rig.pool, mixed, ids, 6, NULL, &req), KVT_E_INVAL);
}

/* Page 3 of one group is not page 3 of another. */
static void origin_is_kept_by_group(void **state)
{
    (void)state;
    uint32_t page = 3;
    struct kvt_req *req;
    start("dram=4MiB", NULL, sixteen, 32, 16, CHAIN);
    rig_fill_smooth(&rig, 5, 1);
    rig_fill_smooth(&rig, 6, 2);
    uint32_t ids[2] = {5, 6};
    struct kvt_store_opts lossy = {.struct_size = sizeof(lossy), .level = KVT_LEVEL_KV4};
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys[0], ids, 2, &lossy, &req), 0);
    kvt_req_free(req);
    struct kvt_key second = keys[0][1];
    assert_int_equal(kvt_load(rig.ns, rig.pool, &second, &page, 1, NULL, &req), 0);
    kvt_req_free(req);
    /* Group 1's page 3 is exact; group 0's is not, whatever is said of group 1's. */
    struct kvt_store_opts exact = {.struct_size = sizeof(exact), .exact = 1};
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys[1], &page, 1, &exact, &req), 0);
    kvt_req_free(req);
    struct kvt_lookup_opts raw = {.struct_size = sizeof(raw), .min_level = KVT_LEVEL_RAW};
    assert_int_equal(kvt_lookup(rig.ns, keys[1], 1, &raw, NULL), 1);
    assert_int_equal(rig_stat(&rig, "store.reorigin"), 0);
    assert_int_equal(kvt_pool_reset_origin_group(rig.pool, WINDOW, &page, 1), 0);
    assert_int_equal(kvt_pool_reset_origin_group(rig.pool, 77, &page, 1), KVT_E_INVAL);
    exact.parent = keys[0];
    exact.first_pos = 16;
    assert_int_equal(kvt_purge(rig.ns, &second, 1), 1);
    assert_int_equal(kvt_store(rig.ns, rig.pool, &second, &page, 1, &exact, &req), 0);
    kvt_req_free(req);
    assert_int_equal(kvt_lookup(rig.ns, &second, 1, &raw, NULL), 0); /* kv8 */
    assert_int_equal(rig_stat(&rig, "store.reorigin"), 1);
    assert_int_equal(kvt_pool_reset_origin_group(rig.pool, FULL, &page, 1), 0);
    assert_int_equal(kvt_store(rig.ns, rig.pool, &second, &page, 1, &exact, &req), 0);
    kvt_req_free(req);
    assert_int_equal(kvt_lookup(rig.ns, &second, 1, &raw, NULL), 1);
}

static void minimum_levels_and_the_switch_hold(void **state)
{
    (void)state;
    start("dram=4MiB", NULL, sixteen, 32, 16, CHAIN);
    for (uint32_t g = 0; g < 3; g++)
        store(g, 0, 4, 0);
    struct kvt_lookup_opts raw = {.struct_size = sizeof(raw), .min_level = KVT_LEVEL_RAW};
    assert_int_equal(kvt_lookup_groups(rig.ns, chains, 3, SIZE_MAX, &raw), 64);
    raw.min_level = 7;
    assert_int_equal(kvt_lookup_groups(rig.ns, chains, 3, SIZE_MAX, &raw), KVT_E_INVAL);
    raw.struct_size = 1;
    assert_int_equal(kvt_lookup_groups(rig.ns, chains, 3, SIZE_MAX, &raw), KVT_E_VERSION);
    kvt_enable(rig.cache, 0);
    assert_int_equal(hit(SIZE_MAX), 0);
    assert_int_equal(tiers[0][0], KVT_TIER_MISS);
    kvt_enable(rig.cache, 1);
    assert_int_equal(hit(SIZE_MAX), 64);
    /* Every group must be named, once, with its own keys. */
    assert_int_equal(kvt_lookup_groups(rig.ns, chains, 2, SIZE_MAX, NULL), KVT_E_INVAL);
    chains[2].group = WINDOW;
    assert_int_equal(hit(SIZE_MAX), KVT_E_INVAL);
    chains[2].group = 3;
    assert_int_equal(hit(SIZE_MAX), KVT_E_INVAL);
    chains[2].group = STATE;
    chains[2].tiers = NULL;
    assert_int_equal(hit(SIZE_MAX), KVT_E_INVAL);
    chains[2].tiers = tiers[2];
    keys[2][3].group = WINDOW;
    assert_int_equal(hit(SIZE_MAX), KVT_E_INVAL);
}

/* What a namespace says of itself holds for all its groups together, and never gives more than the
 * option does. */
static void a_quota_is_of_all_groups_together(void **state)
{
    struct kvt_ns_limits limits = {.struct_size = sizeof(limits)};
    (void)state;
    start("dram=4MiB,ns_quota=1MiB", NULL, sixteen, 32, 16, CHAIN);
    size_t bytes = kvt_ns_record_bytes(rig.ns, FULL, KVT_LEVEL_RAW);
    assert_int_equal(kvt_ns_record_bytes(rig.ns, WINDOW, KVT_LEVEL_RAW), bytes);
    limits.quota_bytes = 16 * bytes;
    assert_int_equal(kvt_ns_limit(rig.ns, &limits), 0);
    store(0, 0, 12, 0);
    assert_int_equal(rig_stat(&rig, "quota.evicted"), 0);
    store(1, 0, 12, 0);
    assert_int_equal(rig_stat(&rig, "quota.evicted"), 8);
    assert_int_equal(kvt_lookup(rig.ns, keys[1], 12, NULL, NULL), 12);
    assert_int_equal(kvt_lookup(rig.ns, keys[0], 12, NULL, NULL), 4);
    limits.quota_bytes = KVT_LIMIT_NONE;
    limits.ttl_ns = INT64_C(3600000000000);
    assert_int_equal(kvt_ns_limit(rig.ns, &limits), 0);
    store(0, 4, 36, 0);
    assert_int_equal(rig_stat(&rig, "quota.evicted"), 8);
    limits.quota_bytes = 1;
    assert_int_equal(kvt_ns_limit(rig.ns, &limits), KVT_E_INVAL);
    limits.quota_bytes = 0;
    limits.ttl_ns = 1000;
    assert_int_equal(kvt_ns_limit(rig.ns, &limits), KVT_E_INVAL);
    limits.ttl_ns = -1;
    assert_int_equal(kvt_ns_limit(rig.ns, &limits), KVT_E_INVAL);
    limits.struct_size = 4;
    assert_int_equal(kvt_ns_limit(rig.ns, &limits), KVT_E_VERSION);
    assert_int_equal(kvt_ns_limit(NULL, &limits), KVT_E_INVAL);
    assert_int_equal(kvt_ns_limit(rig.ns, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_lookup(rig.ns, keys[0], 40, NULL, NULL), 40);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c61_usable_is_what_every_group_has, tear_down),
        cmocka_unit_test_teardown(test_c62_groups_of_very_different_blocks_are_accepted, tear_down),
        cmocka_unit_test_teardown(test_c62_a_window_loads_its_window_only, tear_down),
        cmocka_unit_test(random_stores_agree_with_a_plain_search),
        cmocka_unit_test_teardown(blocks_of_windows_need_no_predecessor_after_a_restart, tear_down),
        cmocka_unit_test_teardown(keys_of_several_groups_may_be_purged_and_pinned_together,
                                  tear_down),
        cmocka_unit_test_teardown(origin_is_kept_by_group, tear_down),
        cmocka_unit_test_teardown(minimum_levels_and_the_switch_hold, tear_down),
        cmocka_unit_test_teardown(a_quota_is_of_all_groups_together, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
