/* What an operator says of single namespaces (option ns_limit), and room within a quota.
 *
 * Goal:   a rule by id holds from the first record on that a restart finds, before any program has
 *         opened the namespace; one by a model's name once it has; the smaller one holds of what
 *         the operator, the option for all and a program say, whoever came first; a namespace that
 *         is small in a large index finds its own room, also in one long chain; C79 as far as
 *         namespaces have their own times.
 * Method: the rig without threads, its invariants (rings among them) checked at every step.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/checked.h"
#include "format/ns_rules.h"
#include "kvtier/error.h"

enum { KV4 = 2, RAW = 6 };

#define BLOCK 8192u
#define SECOND INT64_C(1000000000)

static const uint32_t pages[7] = {0, 0, 2, 0, 0, 0, 8};
static struct rig rig;

static struct rig_options options(const struct kvt_ns_rule *rules, uint32_t count)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 64 * BLOCK;
    o.write_queue_bytes = 64 * BLOCK;
    o.pin_bytes_max = 8 * BLOCK;
    o.ns_rules = rules;
    o.ns_rule_count = count;
    return o;
}

static struct kvt_ns_rule by_id(uint8_t name, uint64_t quota_bytes, int64_t ttl_ns)
{
    struct kvt_ns_rule rule = {.by_id = true, .quota_bytes = quota_bytes, .ttl_ns = ttl_ns};

    memset(rule.id, name, sizeof(rule.id));
    return rule;
}

static uint32_t put(uint32_t space, uint64_t first, uint32_t n)
{
    uint64_t numbers[1024];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_put(&rig, space, numbers, n, 0, KV4, false, NULL);
}

static uint32_t got(uint32_t space, uint64_t first, uint32_t n)
{
    uint64_t numbers[1024];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_get(&rig, space, numbers, n, 0, NULL, NULL);
}

/* ---- rules --------------------------------------------------------------------------------- */

/* Nobody opens the namespace after the restart, and its blocks go all the same. */
static void an_id_holds_before_anybody_opens(void **state)
{
    const struct kvt_ns_rule rule = by_id(1, 0, 4 * SECOND);
    struct rig_options o = options(&rule, 1);

    (void)state;
    rig_open(&rig, &o, NULL);
    uint32_t ns = rig_ns(&rig, 1, pages), other = rig_ns(&rig, 2, pages);
    assert_int_equal(put(ns, 1, 8), 8);
    assert_int_equal(put(other, 1, 8), 8);
    assert_int_equal(rig_flush(&rig), 0);
    rig_reopen(&rig);
    assert_int_equal(rig_stats(&rig).disk_blocks, 16);
    for (int i = 0; i < 6; i++)
        rig_advance(&rig, SECOND);
    assert_int_equal(rig_stats(&rig).ttl_expired, 8);
    assert_int_equal(rig_stats(&rig).disk_blocks, 8);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    other = rig_ns(&rig, 2, pages);
    assert_int_equal(got(ns, 1, 8), 0); /* for good */
    assert_int_equal(got(other, 1, 8), 8);
    rig_close(&rig);
}

static void a_label_holds_once_it_is_opened(void **state)
{
    struct kvt_ns_rule rule = {.quota_bytes = 8 * BLOCK, .ttl_ns = 4 * SECOND};
    struct rig_options o = options(&rule, 1);

    (void)state;
    snprintf(rule.label, sizeof(rule.label), "small/model");
    rig_open(&rig, &o, NULL);
    rig.label = "small/model";
    uint32_t ns = rig_ns(&rig, 1, pages), twin = rig_ns(&rig, 3, pages);
    rig.label = "small/model-2";
    uint32_t other = rig_ns(&rig, 2, pages);
    assert_int_equal(put(ns, 1, 12), 8);
    assert_int_equal(put(twin, 1, 12), 8); /* each namespace of that model */
    assert_int_equal(put(other, 1, 12), 12);
    for (int i = 0; i < 6; i++)
        rig_advance(&rig, SECOND);
    assert_int_equal(got(ns, 1, 8), 0);
    assert_int_equal(got(other, 1, 12), 12);
    rig.label = NULL;
    rig_close(&rig);
}

/* Who says less is heard: the operator, the option for all, a program. */
static void the_smallest_holds(void **state)
{
    static const struct {
        uint64_t all, rule, program;
    } cases[] = {{8, 12, 16}, {12, 8, 16}, {16, 12, 8},       {0, 8, 12},
                 {0, 12, 8},  {8, 0, 12},  {0, 8, UINT64_MAX}};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        const struct kvt_ns_rule rule =
            by_id(1, cases[i].rule * BLOCK, cases[i].rule ? 8 * SECOND : 4 * SECOND);
        struct rig_options o = options(&rule, 1);
        uint32_t ns, second;

        o.ns_bytes_max = cases[i].all * BLOCK;
        rig_open(&rig, &o, NULL);
        rig.ns_quota = cases[i].program == UINT64_MAX ? INT64_MAX : cases[i].program * BLOCK;
        rig.ns_ttl_ns = cases[i].program == UINT64_MAX ? INT64_MAX : 4 * SECOND;
        ns = rig_ns(&rig, 1, pages);
        rig.ns_quota = 0;
        rig.ns_ttl_ns = 0;
        assert_int_equal(put(ns, 1, 32), 8);
        rig.group = 5; /* a group that comes later has it, too */
        second = rig_ns(&rig, 1, pages);
        assert_int_equal(put(second, 1, 32), 8);
        rig.group = 0;
        for (int s = 0; s < 5; s++)
            rig_advance(&rig, SECOND);
        rig.group = 5;
        assert_int_equal(got(second, 1, 8), cases[i].program == UINT64_MAX ? 8 : 0);
        rig.group = 0;
        for (int s = 0; s < 10; s++)
            rig_advance(&rig, SECOND);
        assert_int_equal(rig_stats(&rig).disk_blocks, 0);
        rig_close(&rig);
    }
}

/* ---- room ---------------------------------------------------------------------------------- */

/* Twenty thousand blocks of others stand before it in the index. */
static void a_small_namespace_finds_its_own(void **state)
{
    const struct kvt_ns_rule rule = by_id(2, 8 * BLOCK, 0);
    struct rig_options o = options(&rule, 1);
    uint64_t refused = 0;

    (void)state;
    o.disk_cap_bytes = 256u << 20;
    o.disk_real_bytes = 512u << 20;
    rig_open(&rig, &o, NULL);
    uint32_t large = rig_ns(&rig, 1, pages), small = rig_ns(&rig, 2, pages);
    rig.check_each_step = false;
    for (uint64_t i = 0; i < 20000; i += 32)
        assert_int_equal(put(large, 1 + i, 32), 32);
    assert_true(rig_stats(&rig).blocks >= 20000);
    for (uint64_t i = 0; i < 40; i++) {
        assert_int_equal(put(small, 1 + 100 * i, 4), 4);
        assert_int_equal(got(small, 1 + 100 * i, 4), 4); /* used: passed once for each use */
    }
    refused = rig_stats(&rig).quota_refused;
    assert_int_equal(refused, 0);
    assert_true(rig_stats(&rig).quota_evicted >= 38 * 4);
    rig_check(&rig);
    assert_int_equal(got(large, 1, 32), 32);
    rig_close(&rig);
}

/* One chain, longer than what is looked at for a record: it goes from its end. */
static void a_long_chain_goes_from_its_end(void **state)
{
    const struct kvt_ns_rule rule = by_id(2, 4000 * BLOCK, 0);
    struct rig_options o = options(&rule, 1);

    (void)state;
    o.disk_cap_bytes = 256u << 20;
    o.disk_real_bytes = 512u << 20;
    rig_open(&rig, &o, NULL);
    uint32_t ns = rig_ns(&rig, 2, pages);
    rig.check_each_step = false;
    for (uint64_t i = 0; i < 4000; i += 32) {
        uint64_t numbers[32];
        for (uint32_t k = 0; k < 32; k++)
            numbers[k] = 1 + i + k;
        assert_int_equal(rig_put(&rig, ns, numbers, 32, i, KV4, false, NULL), 32);
    }
    for (uint64_t i = 0; i < 100; i++)
        assert_int_equal(put(ns, 100001 + 100 * i, 8), 8);
    assert_int_equal(rig_stats(&rig).quota_refused, 0);
    assert_int_equal(rig_stats(&rig).quota_evicted, 800);
    rig_check(&rig);
    assert_int_equal(got(ns, 1, 1000), 1000); /* its beginning stands */
    rig_close(&rig);
}

/* What waits for the disk gives room, too: it is the newest that are stored. */
static void what_is_queued_gives_room(void **state)
{
    const struct kvt_ns_rule rule = by_id(1, 16 * BLOCK, 0);
    struct rig_options o = options(&rule, 1);

    (void)state;
    rig_open(&rig, &o, NULL);
    uint32_t ns = rig_ns(&rig, 1, pages);
    rig_hold(&rig, true); /* the drive answers nothing */
    for (uint64_t i = 0; i < 10; i++)
        (void)put(ns, 1 + 100 * i, 4);
    assert_true(rig_stats(&rig).disk_queue_blocks > 0);
    assert_int_equal(put(ns, 5001, 4), 4);
    rig_hold(&rig, false);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(got(ns, 5001, 4), 4);
    rig_close(&rig);
}

/* Pinned for longer than it may live: it lives as long as any from when it is let go. C79 */
static void a_pinned_block_begins_anew(void **state)
{
    const struct kvt_ns_rule rule = by_id(1, 0, 2 * SECOND);
    struct rig_options o = options(&rule, 1);
    uint64_t numbers[4] = {1, 2, 3, 4};

    (void)state;
    rig_open(&rig, &o, NULL);
    uint32_t ns = rig_ns(&rig, 1, pages);
    assert_int_equal(put(ns, 1, 4), 4);
    assert_int_equal(rig_keys(&rig, KVT_OP_PIN, ns, numbers, 4), 4);
    for (int s = 0; s < 5; s++)
        rig_advance(&rig, SECOND);
    assert_int_equal(rig_keys(&rig, KVT_OP_UNPIN, ns, numbers, 4), 4);
    rig_advance(&rig, SECOND);
    assert_int_equal(rig_lookup(&rig, ns, numbers, 4, 0, NULL), 4);
    for (int s = 0; s < 3; s++)
        rig_advance(&rig, SECOND);
    assert_int_equal(rig_lookup(&rig, ns, numbers, 4, 0, NULL), 0);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_id_holds_before_anybody_opens),
        cmocka_unit_test(a_label_holds_once_it_is_opened),
        cmocka_unit_test(the_smallest_holds),
        cmocka_unit_test(a_small_namespace_finds_its_own),
        cmocka_unit_test(a_long_chain_goes_from_its_end),
        cmocka_unit_test(what_is_queued_gives_room),
        cmocka_unit_test(a_pinned_block_begins_anew),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
