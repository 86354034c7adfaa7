/* Goal: runs, slots and eviction order keep their rules.
 * Method: the run allocator and the slot table under random allocation and release beside plain
 * arrays (overlap is detected by writing an owner into a map of pages), every state transition
 * tried from every state, and the policy with small hand-made chains.
 * CASES C32 (10^6 random alloc/free, 0 failures, all freed gives 100 %), C52 (a reused slot is a
 * new life), C58 and C59 (leaf first, new before old hits).
 */
#include "support/store_help.h"

#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "store/policy.h"
#include "store/slots.h"
#include "support/memory_help.h"

#define KIB 1024u
#define MIB (1024u * 1024u)

static void expect_sound(const struct kvt_slots *slots)
{
    char why[160] = "";

    if (kvt_slots_check(slots, why, sizeof(why)) != 0)
        fail_msg("%s", why);
}

/* C32 on the allocator alone: what does not fit makes room by releasing random others, as eviction
 * would; at most 80 % are live otherwise. */
static void test_c32_random(void **state)
{
    enum { LIVE_MAX = 4096 };
    static const uint32_t sizes[] = {64 * KIB, 300 * KIB, 1000 * KIB};
    const uint32_t pages = 256 * MIB / 4096;
    struct kvt_rng rng = {test_seed()};
    static uint32_t live[LIVE_MAX];
    uint32_t count = 0, evicted = 0;
    uint64_t used = 0, rss = 0;
    struct kvt_slots slots;

    (void)state;
    memory_small_pages();
    assert_int_equal(kvt_slots_init(&slots, pages, 0, 2 * LIVE_MAX + 2, 0), 0);
    for (uint32_t step = 0; step < 1000000; step++) {
        uint32_t bytes = sizes[kvt_rng_below(&rng, 3)];
        bool grow = kvt_rng_below(&rng, 8) < 5 && (used + bytes) * 10 <= (uint64_t)pages * 4096 * 8;
        uint32_t slot = KVT_SLOT_NONE;

        while (grow && (slot = kvt_slots_take(&slots, KVT_REGION_CACHE, bytes, KVT_SLOT_FILLING)) ==
                           KVT_SLOT_NONE) {
            uint32_t victim = (uint32_t)kvt_rng_below(&rng, count);

            assert_true(count > 0);
            used -= kvt_slot_at(&slots, live[victim])->record_bytes;
            assert_true(kvt_slot_move(&slots, live[victim], KVT_SLOT_FREE));
            live[victim] = live[--count];
            evicted++;
        }
        if (grow) {
            live[count++] = slot;
            used += bytes;
        } else if (count) {
            uint32_t victim = (uint32_t)kvt_rng_below(&rng, count);

            used -= kvt_slot_at(&slots, live[victim])->record_bytes;
            assert_true(kvt_slot_move(&slots, live[victim], KVT_SLOT_FREE));
            live[victim] = live[--count];
        }
        if (step % 100000 == 0)
            expect_sound(&slots);
        if (step == 100000)
            rss = memory_own_bytes();
    }
    printf("           %u evictions for 10^6 operations\n", evicted);
    assert_true(memory_own_bytes() < rss + rss / 50 + 64 * KIB);
    while (count)
        assert_true(kvt_slot_move(&slots, live[--count], KVT_SLOT_FREE));
    assert_int_equal(slots.arena.regions[KVT_REGION_CACHE].free_pages, pages);
    assert_true(kvt_arena_fits(&slots.arena, KVT_REGION_CACHE, pages));
    expect_sound(&slots);
    kvt_slots_destroy(&slots);
}

/* No two runs overlap, and no run leaves its region. */
static void test_runs_disjoint(void **state)
{
    enum { CACHE = 700, STAGING = 100, LIVE = 200 };
    struct kvt_rng rng = {test_seed()};
    uint32_t owner[CACHE + STAGING] = {0};
    uint32_t live[LIVE];
    struct kvt_slots slots;

    (void)state;
    assert_int_equal(kvt_slots_init(&slots, CACHE, STAGING, 2 * LIVE, 0), 0);
    for (unsigned i = 0; i < LIVE; i++)
        live[i] = KVT_SLOT_NONE;
    for (uint32_t step = 0; step < 200000; step++) {
        unsigned i = (unsigned)kvt_rng_below(&rng, LIVE);
        int region = (int)kvt_rng_below(&rng, 2);

        if (live[i] != KVT_SLOT_NONE) {
            const struct kvt_run *run = &slots.arena.runs[live[i]];

            for (uint32_t p = run->page; p < run->page + run->pages; p++) {
                assert_int_equal(owner[p], i + 1);
                owner[p] = 0;
            }
            assert_true(kvt_slot_move(&slots, live[i], KVT_SLOT_FREE));
            live[i] = KVT_SLOT_NONE;
            continue;
        }
        live[i] = kvt_slots_take(&slots, region, (1 + (uint32_t)kvt_rng_below(&rng, 20)) * 4096,
                                 KVT_SLOT_READING);
        if (live[i] == KVT_SLOT_NONE)
            continue;
        assert_int_equal(kvt_slot_region(&slots, live[i]), region);
        for (uint32_t p = 0; p < slots.arena.runs[live[i]].pages; p++) {
            uint32_t page = slots.arena.runs[live[i]].page + p;

            assert_true(region == KVT_REGION_CACHE ? page < CACHE
                                                   : page >= CACHE && page < CACHE + STAGING);
            assert_int_equal(owner[page], 0);
            owner[page] = i + 1;
        }
        if (step % 10000 == 0)
            expect_sound(&slots);
    }
    expect_sound(&slots);
    kvt_slots_destroy(&slots);
}

/* With too few nodes to split, runs are larger than asked, never refused. */
static void test_few_nodes(void **state)
{
    struct kvt_slots slots;
    uint32_t slot;

    (void)state;
    assert_int_equal(kvt_slots_init(&slots, 64, 0, 1, 0), 0);
    for (int i = 0; i < 3; i++)
        assert_true(kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING) !=
                    KVT_SLOT_NONE);
    slot = kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING);
    assert_true(slot != KVT_SLOT_NONE);
    assert_int_equal(slots.arena.runs[slot].pages, 61);
    assert_int_equal(kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING),
                     KVT_SLOT_NONE);
    assert_int_equal(kvt_slots_grow(&slots, 100), 0);
    assert_true(kvt_slot_move(&slots, slot, KVT_SLOT_FREE));
    slot = kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING);
    assert_int_equal(slots.arena.runs[slot].pages, 1);
    expect_sound(&slots);
    kvt_slots_destroy(&slots);
}

/* Every pair of states against the diagram. */
static void test_transitions(void **state)
{
    static const char allowed[KVT_SLOT_STATES][KVT_SLOT_STATES + 1] = {
        /*            FREE FILLING READING VALID DOOMED */
        [KVT_SLOT_FREE] = "01100",  [KVT_SLOT_FILLING] = "10011", [KVT_SLOT_READING] = "10011",
        [KVT_SLOT_VALID] = "10001", [KVT_SLOT_DOOMED] = "10000",
    };
    struct kvt_slots slots;

    (void)state;
    for (int from = KVT_SLOT_FILLING; from < KVT_SLOT_STATES; from++) {
        for (int to = 0; to < KVT_SLOT_STATES; to++) {
            uint32_t slot;
            bool moved;

            assert_int_equal(kvt_slots_init(&slots, 8, 0, 8, 2), 0);
            slot = kvt_slots_take(&slots, KVT_REGION_CACHE, 4096,
                                  from == KVT_SLOT_READING ? KVT_SLOT_READING : KVT_SLOT_FILLING);
            if (from >= KVT_SLOT_VALID)
                assert_true(kvt_slot_move(&slots, slot, (enum kvt_slot_state)from));
            moved = kvt_slot_move(&slots, slot, (enum kvt_slot_state)to);
            assert_int_equal(moved, allowed[from][to] == '1');
            assert_int_equal(slots.bad_moves, !moved);
            kvt_slots_destroy(&slots);
        }
    }
}

static void test_pins_and_holds(void **state)
{
    struct kvt_slots slots;
    uint32_t slot;

    (void)state;
    assert_int_equal(kvt_slots_init(&slots, 8, 0, 8, 3), 0);
    slot = kvt_slots_take(&slots, KVT_REGION_CACHE, 8192, KVT_SLOT_FILLING);
    assert_true(kvt_slot_hold(&slots, slot, 1));
    assert_true(kvt_slot_hold(&slots, slot, 2));
    assert_true(kvt_slot_hold(&slots, slot, 1));
    assert_false(kvt_slot_hold(&slots, slot, 3)); /* no record left: refused, nothing pinned */
    assert_int_equal(kvt_slot_at(&slots, slot)->pins, 3);
    assert_false(kvt_slot_unhold(&slots, slot, 3));
    assert_true(kvt_slot_unhold(&slots, slot, 1));
    assert_true(kvt_slot_unhold(&slots, slot, 1));
    assert_false(kvt_slot_unhold(&slots, slot, 1)); /* released twice: nobody else loses */
    assert_int_equal(kvt_slot_at(&slots, slot)->pins, 1);
    expect_sound(&slots);
    assert_false(kvt_slot_move(&slots, slot, KVT_SLOT_FREE)); /* pinned */
    assert_true(kvt_slot_unhold(&slots, slot, 2));
    assert_true(kvt_slot_move(&slots, slot, KVT_SLOT_FREE));
    slots.bad_moves = 0;
    expect_sound(&slots);
    kvt_slots_destroy(&slots);
}

/* C52: two lives in one place; only the last reference is alive. A slot whose generations are used
 * up is never used again. */
static void test_c52_generations(void **state)
{
    struct kvt_slots slots;
    uint32_t slot, first, second;

    (void)state;
    assert_int_equal(kvt_slots_init(&slots, 1, 0, 8, 0), 0);
    slot = kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING);
    first = kvt_slot_at(&slots, slot)->generation;
    assert_true(kvt_slot_move(&slots, slot, KVT_SLOT_FREE));
    assert_int_equal(kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING), slot);
    second = kvt_slot_at(&slots, slot)->generation;
    assert_false(kvt_slots_alive(&slots, slot, first));
    assert_true(kvt_slots_alive(&slots, slot, second));
    assert_false(kvt_slots_alive(&slots, slot + 1, second));
    assert_false(kvt_slots_alive(&slots, UINT32_MAX, second));
    assert_true(kvt_slot_move(&slots, slot, KVT_SLOT_FREE));
    assert_false(kvt_slots_alive(&slots, slot, second));
    kvt_slots_destroy(&slots);

    assert_int_equal(kvt_slots_init(&slots, 2, 0, 8, 0), 0);
    slot = kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING);
    first = kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING);
    assert_true(kvt_slot_move(&slots, first, KVT_SLOT_FREE));
    kvt_slot_at(&slots, first)->generation = UINT32_MAX - 1;
    assert_int_equal(kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING), first);
    assert_true(kvt_slot_move(&slots, first, KVT_SLOT_FREE));
    assert_true(kvt_slot_move(&slots, slot, KVT_SLOT_FREE)); /* merges: the name `first` ends */
    for (int i = 0; i < 2; i++)
        assert_true(kvt_slots_take(&slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING) != first);
    expect_sound(&slots);
    kvt_slots_destroy(&slots);
}

/* A little cache of equal blocks over policy, index and slots. */
struct cache {
    struct kvt_slots slots;
    struct kvt_index index;
    struct kvt_policy policy;
};

static void cache_open(struct cache *c, uint32_t blocks)
{
    assert_int_equal(kvt_slots_init(&c->slots, blocks, 0, 2 * blocks + 2, 16), 0);
    assert_int_equal(kvt_index_init(&c->index, 4096, 1, KVT_COLLIDE_NONE), 0);
    assert_int_equal(kvt_policy_init(&c->policy, &c->slots, &c->index, (uint64_t)blocks * 4096), 0);
}

static void cache_close(struct cache *c)
{
    char why[160] = "";

    if (kvt_policy_check(&c->policy, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    if (kvt_index_check(&c->index, why, sizeof(why)) != 0)
        fail_msg("%s", why);
    expect_sound(&c->slots);
    kvt_policy_destroy(&c->policy);
    kvt_index_destroy(&c->index);
    kvt_slots_destroy(&c->slots);
}

static struct kvt_fp number_fp(uint64_t number)
{
    return (struct kvt_fp){{number * 0x9e3779b97f4a7c15u, number}};
}

static uint32_t cache_evict(struct cache *c)
{
    uint32_t slot = kvt_policy_victim(&c->policy);
    uint32_t entry, parent;

    if (slot == KVT_SLOT_NONE)
        return KVT_INDEX_NONE;
    entry = kvt_slot_at(&c->slots, slot)->entry;
    parent = kvt_index_at(&c->index, entry)->parent;
    kvt_policy_evicted(&c->policy, slot);
    kvt_policy_leave(&c->policy, slot);
    kvt_index_set_slot(&c->index, entry, KVT_INDEX_NONE);
    assert_true(kvt_slot_move(&c->slots, slot, KVT_SLOT_FREE));
    if (parent != KVT_INDEX_NONE && kvt_index_at(&c->index, parent)->slot != KVT_INDEX_NONE)
        kvt_policy_settle(&c->policy, kvt_index_at(&c->index, parent)->slot, true);
    return entry;
}

/* Put a block; evicts when full. Returns its entry. */
static uint32_t cache_put(struct cache *c, uint64_t number, uint32_t parent)
{
    uint32_t entry = kvt_index_find(&c->index, number_fp(number));
    uint32_t slot;

    if (entry == KVT_INDEX_NONE) {
        entry = kvt_index_insert(&c->index, number_fp(number));
        if (parent != KVT_INDEX_NONE)
            assert_true(kvt_index_link(&c->index, entry, parent, 10));
    }
    if (kvt_index_at(&c->index, entry)->slot != KVT_INDEX_NONE)
        return entry;
    while ((slot = kvt_slots_take(&c->slots, KVT_REGION_CACHE, 4096, KVT_SLOT_FILLING)) ==
           KVT_SLOT_NONE)
        assert_true(cache_evict(c) != KVT_INDEX_NONE);
    assert_true(kvt_slot_move(&c->slots, slot, KVT_SLOT_VALID));
    kvt_slot_at(&c->slots, slot)->entry = entry;
    kvt_index_set_slot(&c->index, entry, slot);
    kvt_policy_enter(&c->policy, slot);
    kvt_policy_settle(&c->policy, slot, false);
    if (parent != KVT_INDEX_NONE && kvt_index_at(&c->index, parent)->slot != KVT_INDEX_NONE)
        kvt_policy_settle(&c->policy, kvt_index_at(&c->index, parent)->slot, false);
    return entry;
}

static bool cached(const struct cache *c, uint32_t entry)
{
    return kvt_index_at(&c->index, entry)->slot != KVT_INDEX_NONE;
}

static void test_c58_leaf_first(void **state)
{
    uint32_t chain[10], parent = KVT_INDEX_NONE;
    struct cache c;

    (void)state;
    cache_open(&c, 10);
    for (unsigned i = 0; i < 10; i++)
        parent = chain[i] = cache_put(&c, i + 1, parent);
    for (unsigned i = 0; i < 10; i++) /* touch 1-2; putting 3-10 again is a hit too */
        kvt_policy_hit(&c.policy, chain[i]);
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(cache_evict(&c), chain[9 - i]);
    for (unsigned i = 0; i < 10; i++)
        assert_int_equal(cached(&c, chain[i]), i < 7);
    cache_close(&c);
}

static void c59(bool as_chain)
{
    uint32_t old[10], parent = KVT_INDEX_NONE, fresh;
    struct cache c;

    cache_open(&c, 11);
    for (unsigned i = 0; i < 10; i++) {
        old[i] = cache_put(&c, i + 1, parent);
        parent = as_chain ? old[i] : KVT_INDEX_NONE;
    }
    for (unsigned i = 0; i < 10; i++)
        kvt_policy_hit(&c.policy, old[i]);
    fresh = cache_put(&c, 11, KVT_INDEX_NONE);
    assert_int_equal(c.policy.queued, as_chain ? 2 : 11); /* nothing has left for it */
    assert_true(cache_evict(&c) != fresh);
    assert_true(cached(&c, fresh));
    cache_close(&c);
}

static void test_c59_new_survives(void **state)
{
    (void)state;
    c59(false);
    c59(true);
}

/* Prompts that come again every turn and a half of the cache, between others that never do: least
 * recently used would lose each of them before it comes. Hits earn credit, and credit grows. */
static void test_scan_resistance(void **state)
{
    struct cache c;
    uint64_t fresh = 0;
    unsigned left = 0;

    (void)state;
    cache_open(&c, 100);
    for (unsigned round = 0; round < 60; round++) {
        left = 0;
        for (unsigned i = 0; i < 10; i++) {
            uint32_t entry = kvt_index_find(&c.index, number_fp(i + 1));
            if (entry != KVT_INDEX_NONE && cached(&c, entry)) {
                kvt_policy_hit(&c.policy, entry);
                left++;
            } else {
                cache_put(&c, i + 1, KVT_INDEX_NONE);
            }
        }
        for (unsigned i = 0; i < 150; i++)
            cache_put(&c, 1000 + fresh++ % 3000, KVT_INDEX_NONE);
    }
    assert_int_equal(left, 10);
    cache_close(&c);
}

/* Without hits, and of equal age, blocks go in the order in which they came; one hit is worth an
 * eighth of a turn, three are worth three, and more than that nothing. */
static void test_order_and_credit(void **state)
{
    uint32_t entries[64];
    struct cache c;

    (void)state;
    cache_open(&c, 64);
    for (unsigned i = 0; i < 64; i++) {
        entries[i] = cache_put(&c, i + 1, KVT_INDEX_NONE);
        for (unsigned hits = i == 0 ? 1 : i == 1 ? 3 : i == 2 ? 9 : 0; hits > 0; hits--)
            kvt_policy_hit(&c.policy, entries[i]);
    }
    for (unsigned i = 3; i < 7; i++) /* of epochs before that of 0 + 4 */
        assert_int_equal(cache_evict(&c), entries[i]);
    for (unsigned i = 0; i < 5; i++)
        cache_evict(&c);
    assert_false(cached(&c, entries[0]));
    assert_true(cached(&c, entries[1]) && cached(&c, entries[2]));
    for (unsigned i = 0; i < 20; i++)
        cache_evict(&c);
    assert_false(cached(&c, entries[1]) || cached(&c, entries[2]));
    cache_close(&c);
}

/* The last block of a prompt goes before older ones, unless it was asked for, or goes on. */
static void test_ends_of_prompts_first(void **state)
{
    uint32_t chain[4][4];
    struct cache c;

    (void)state;
    cache_open(&c, 16);
    for (unsigned p = 0; p < 4; p++)
        for (unsigned i = 0; i < 4; i++)
            chain[p][i] = cache_put(&c, 10 * p + i + 1, i ? chain[p][i - 1] : KVT_INDEX_NONE);
    kvt_policy_hit(&c.policy, chain[1][3]);
    assert_int_equal(cache_evict(&c), chain[0][3]);
    assert_int_equal(cache_evict(&c), chain[2][3]); /* before the rest of 0, which is older */
    for (unsigned i = 3; i-- > 0;)
        assert_int_equal(cache_evict(&c), chain[0][i]);
    cache_close(&c);
}

/* A block that comes back while it is remembered has the hits that it had, and one more. */
static void test_ghost(void **state)
{
    struct cache c;
    uint32_t entry;

    (void)state;
    cache_open(&c, 64);
    entry = cache_put(&c, 1, KVT_INDEX_NONE);
    for (unsigned i = 0; i < 64; i++)
        cache_put(&c, 100 + i, KVT_INDEX_NONE);
    assert_false(cached(&c, entry));
    kvt_index_at(&c.index, entry)->freq = 0;
    assert_int_equal(cache_put(&c, 1, KVT_INDEX_NONE), entry);
    assert_int_equal(kvt_index_at(&c.index, entry)->freq, 1);
    for (unsigned i = 0; i < 200; i++) /* turns later it is forgotten */
        cache_put(&c, 200 + i, KVT_INDEX_NONE);
    assert_false(cached(&c, entry));
    kvt_index_at(&c.index, entry)->freq = 0;
    assert_int_equal(cache_put(&c, 1, KVT_INDEX_NONE), entry);
    assert_int_equal(kvt_index_at(&c.index, entry)->freq, 0);
    cache_close(&c);
}

/* Pinned, unwritten and parent blocks are never chosen, and choosing ends. */
static void test_unevictable(void **state)
{
    uint32_t a, b, d, slot;
    struct cache c;

    (void)state;
    cache_open(&c, 4);
    a = cache_put(&c, 1, KVT_INDEX_NONE);
    b = cache_put(&c, 2, a);
    d = cache_put(&c, 3, KVT_INDEX_NONE);
    slot = kvt_index_at(&c.index, b)->slot;
    kvt_slot_pin(&c.slots, slot);
    kvt_policy_settle(&c.policy, slot, false);
    kvt_index_at(&c.index, d)->pinned = 1;
    kvt_policy_settle(&c.policy, kvt_index_at(&c.index, d)->slot, false);
    assert_int_equal(kvt_policy_victim(&c.policy), KVT_SLOT_NONE);
    kvt_slot_unpin(&c.slots, slot);
    kvt_slot_at(&c.slots, slot)->write = KVT_SLOT_WRITE_GOING;
    kvt_policy_settle(&c.policy, slot, false);
    assert_int_equal(kvt_policy_victim(&c.policy), KVT_SLOT_NONE);
    kvt_slot_at(&c.slots, slot)->write = KVT_SLOT_WRITE_CLEAN;
    kvt_policy_settle(&c.policy, slot, false);
    for (int i = 0; i < 8; i++)
        kvt_policy_hit(&c.policy, b);
    assert_int_equal(cache_evict(&c), b);
    assert_int_equal(cache_evict(&c), a);
    assert_int_equal(cache_evict(&c), KVT_INDEX_NONE);
    cache_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c32_random),
        cmocka_unit_test(test_runs_disjoint),
        cmocka_unit_test(test_few_nodes),
        cmocka_unit_test(test_transitions),
        cmocka_unit_test(test_pins_and_holds),
        cmocka_unit_test(test_c52_generations),
        cmocka_unit_test(test_c58_leaf_first),
        cmocka_unit_test(test_c59_new_survives),
        cmocka_unit_test(test_scan_resistance),
        cmocka_unit_test(test_order_and_credit),
        cmocka_unit_test(test_ends_of_prompts_first),
        cmocka_unit_test(test_ghost),
        cmocka_unit_test(test_unevictable),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
