/* Mixed level maps, groups and LOOKUP of each key, at the store's own door: which ids are given,
 * what is refused, what a restart remembers, that loose groups keep no chain.
 *
 * Method: hand-made NS_OPEN, ALLOC and LOOKUP messages into a store without threads over a memory
 * disk; blocks are committed and read back whole by the rig.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"

#define CLIENT 1u /* the rig's own */
#define PAGE 4096u

static const uint32_t pages[7] = {0, 2, 3, 4, 5, 6, 12};

static const struct kvt_msg *say(struct rig *rig, struct kvt_msg *msg, uint16_t op, uint32_t ns,
                                 uint32_t count, size_t bytes)
{
    msg->bytes = (uint32_t)kvt_round_up(bytes, 8);
    msg->op = op;
    msg->ns = ns;
    msg->count = count;
    msg->cookie = ++rig->cookie;
    rig_forget_replies(rig);
    assert_true(rig_send(rig, CLIENT, msg) >= 0); /* 1: refused as malformed, and answered */
    rig_settle(rig);
    const struct kvt_msg *reply = rig_reply(rig, msg->cookie);
    assert_non_null(reply);
    return reply;
}

static uint32_t open_group(struct rig *rig, uint8_t name, uint16_t group, uint8_t loose)
{
    struct kvt_msg_ns_open msg = {.block_tokens = 16, .group = group, .loose = loose};
    memset(msg.id, name, sizeof(msg.id));
    for (int map = 1; map <= 6; map++)
        msg.record_bytes[map] = pages[map] * PAGE;
    const struct kvt_msg *reply = say(rig, &msg.msg, KVT_OP_NS_OPEN, 0, 0, sizeof(msg));
    assert_int_equal(reply->status, 0);
    memset(rig->ns_ids[(reply->ns - 1) % 16], name, 16);
    return reply->ns;
}

union alloc {
    struct kvt_msg_alloc msg;
    uint8_t room[sizeof(struct kvt_msg_alloc) + 8 * sizeof(struct kvt_msg_key)];
};

/* ALLOC of n keys; the status of the message. *map: the id given. */
static int32_t alloc(struct rig *rig, uint32_t ns, uint64_t number, uint32_t n, uint16_t group,
                     int level, uint32_t bytes, uint8_t *map, struct kvt_alloc_entry *entries)
{
    union alloc u;
    memset(&u, 0, sizeof(u));
    u.msg.level = (uint8_t)level;
    u.msg.record_bytes = bytes;
    u.msg.replace = KVT_REPLACE_RAISE;
    u.msg.block_tokens = 16;
    for (uint32_t i = 0; i < n; i++) {
        u.msg.keys[i] = rig_key(number + i);
        u.msg.keys[i].group = group;
    }
    const struct kvt_msg_alloc_reply *reply = (const struct kvt_msg_alloc_reply *)(const void *)say(
        rig, &u.msg.msg, KVT_OP_ALLOC, ns, n, sizeof(u.msg) + n * sizeof(u.msg.keys[0]));
    *map = reply->msg.status == 0 ? reply->map : 0;
    if (reply->msg.status == 0)
        memcpy(entries, reply->entries, n * sizeof(entries[0]));
    return reply->msg.status;
}

/* One block of a mixed map, committed. Its id. */
static uint8_t put_mixed(struct rig *rig, uint32_t ns, uint64_t number, int level, uint32_t bytes)
{
    struct kvt_alloc_entry entry;
    uint8_t map;
    assert_int_equal(alloc(rig, ns, number, 1, 0, level, bytes, &map, &entry), 0);
    assert_int_equal(entry.status, 0);
    assert_int_equal(entry.record_bytes, bytes);
    uint64_t checksum = rig_fill(rig, ns, number, 0, map, &entry);
    assert_int_equal(rig_commit(rig, CLIENT, &entry, checksum), 0);
    return map;
}

static void ids_say_level_and_length(void **state)
{
    struct rig rig;
    struct rig_options options = rig_defaults();
    uint64_t number = 1;
    uint8_t maps[4], tiers[1];
    (void)state;
    rig_open(&rig, &options, NULL);
    uint32_t ns = open_group(&rig, 1, 0, 0);
    maps[0] = put_mixed(&rig, ns, 1, KVT_LEVEL_KV4, 4 * PAGE);
    maps[1] = put_mixed(&rig, ns, 2, KVT_LEVEL_KV4, 5 * PAGE);
    maps[2] = put_mixed(&rig, ns, 3, KVT_LEVEL_KV8, 7 * PAGE);
    assert_int_equal(put_mixed(&rig, ns, 4, KVT_LEVEL_KV4, 4 * PAGE), maps[0]);
    assert_int_not_equal(maps[0], maps[1]);
    for (uint64_t i = 1; i <= 4; i++) {
        int level = i == 3 ? KVT_LEVEL_KV8 : KVT_LEVEL_KV4;
        number = i;
        assert_int_equal(rig_lookup(&rig, ns, &number, 1, (uint8_t)level, tiers), 1);
        assert_int_equal(rig_lookup(&rig, ns, &number, 1, (uint8_t)(level + 1), tiers), 0);
        assert_int_equal(rig_get(&rig, ns, &number, 1, 0, NULL, &maps[3]), 1);
        assert_int_equal(maps[3], i == 2 ? maps[1] : i == 3 ? maps[2] : maps[0]);
    }
    rig_close(&rig);
}

static void what_no_record_can_be_is_refused(void **state)
{
    struct rig rig;
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entry;
    uint8_t map;
    (void)state;
    rig_open(&rig, &options, NULL);
    uint32_t ns = open_group(&rig, 1, 0, 0);
    static const struct {
        int level;
        uint32_t bytes;
        int32_t want;
    } cases[] = {{0, 4 * PAGE, KVT_E_INVAL},
                 {KVT_LEVEL_RAW, 4 * PAGE, KVT_E_INVAL},
                 {7, 4 * PAGE, KVT_E_INVAL},
                 {KVT_LEVEL_KV4, 0, KVT_E_LIMIT},
                 {KVT_LEVEL_KV4, PAGE + 8, KVT_E_LIMIT},
                 {KVT_LEVEL_KV4, 13 * PAGE, KVT_E_LIMIT}, /* longer than raw */
                 {KVT_LEVEL_KV4, UINT32_MAX - 4095, KVT_E_LIMIT}};
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++)
        assert_int_equal(alloc(&rig, ns, 1, 1, 0, cases[i].level, cases[i].bytes, &map, &entry),
                         cases[i].want);
    /* Three lengths have room at kv4; what is given stays given. */
    for (uint32_t i = 0; i < 3; i++)
        put_mixed(&rig, ns, 10 + i, KVT_LEVEL_KV4, (4 + i) * PAGE);
    assert_int_equal(alloc(&rig, ns, 20, 1, 0, KVT_LEVEL_KV4, 8 * PAGE, &map, &entry), KVT_E_LIMIT);
    put_mixed(&rig, ns, 21, KVT_LEVEL_KV4, 5 * PAGE);
    put_mixed(&rig, ns, 22, KVT_LEVEL_KV5, 8 * PAGE);
    rig_close(&rig);
}

static void a_restart_learns_ids_from_the_records(void **state)
{
    struct rig rig;
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entry;
    uint64_t number;
    uint8_t ids[3], map;
    (void)state;
    rig_open(&rig, &options, NULL);
    uint32_t ns = open_group(&rig, 1, 0, 0);
    for (uint32_t i = 0; i < 3; i++)
        ids[i] = put_mixed(&rig, ns, 10 + i, KVT_LEVEL_KV4, (4 + i) * PAGE);
    assert_int_equal(rig_flush(&rig), 0);
    rig_crash(&rig);
    ns = open_group(&rig, 1, 0, 0);
    for (uint32_t i = 0; i < 3; i++) {
        number = 10 + i;
        assert_int_equal(rig_get(&rig, ns, &number, 1, KVT_LEVEL_KV4, NULL, &map), 1);
        assert_int_equal(map, ids[i]);
        assert_int_equal(put_mixed(&rig, ns, 20 + i, KVT_LEVEL_KV4, (4 + i) * PAGE), ids[i]);
    }
    assert_int_equal(alloc(&rig, ns, 30, 1, 0, KVT_LEVEL_KV4, 8 * PAGE, &map, &entry), KVT_E_LIMIT);
    rig_close(&rig);
}

static void replacing_goes_by_the_lowest_level(void **state)
{
    struct rig rig;
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entry;
    uint64_t number = 5;
    uint8_t map;
    (void)state;
    rig_open(&rig, &options, NULL);
    uint32_t ns = open_group(&rig, 1, 0, 0);
    put_mixed(&rig, ns, 5, KVT_LEVEL_KV5, 6 * PAGE);
    /* Longer is not better: kv4 with most heads raw does not take the place of kv5. */
    assert_int_equal(alloc(&rig, ns, 5, 1, 0, KVT_LEVEL_KV4, 11 * PAGE, &map, &entry), 0);
    assert_int_equal(entry.status, KVT_E_EXISTS);
    assert_int_equal(alloc(&rig, ns, 5, 1, 0, KVT_LEVEL_KV5, 7 * PAGE, &map, &entry), 0);
    assert_int_equal(entry.status, KVT_E_EXISTS);
    put_mixed(&rig, ns, 5, KVT_LEVEL_KV6, 7 * PAGE);
    assert_int_equal(rig_put(&rig, ns, &number, 1, 0, KVT_LEVEL_KV6, 1, NULL), 0);
    assert_int_equal(rig_put(&rig, ns, &number, 1, 0, KVT_LEVEL_KV8, 1, NULL), 1);
    assert_int_equal(rig_get(&rig, ns, &number, 1, KVT_LEVEL_KV8, NULL, &map), 1);
    assert_int_equal(map, KVT_LEVEL_KV8);
    rig_close(&rig);
}

static void groups_have_handles_and_keys_of_their_own(void **state)
{
    struct rig rig;
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entry;
    uint64_t number = 1;
    uint8_t map;
    (void)state;
    rig_open(&rig, &options, NULL);
    uint32_t zero = open_group(&rig, 1, 0, 0), seven = open_group(&rig, 1, 7, 1);
    assert_int_not_equal(zero, seven);
    assert_int_equal(open_group(&rig, 1, 7, 1), seven);
    assert_int_equal(rig_put(&rig, zero, &number, 1, 0, KVT_LEVEL_KV4, 1, NULL), 1);
    /* A key of one group is refused under the handle of another. */
    uint64_t bad = rig_stats(&rig).bad_messages;
    assert_int_equal(alloc(&rig, seven, 1, 1, 0, KVT_LEVEL_KV4, 4 * PAGE, &map, &entry),
                     KVT_E_INVAL);
    assert_int_equal(alloc(&rig, zero, 1, 1, 7, KVT_LEVEL_KV4, 4 * PAGE, &map, &entry),
                     KVT_E_INVAL);
    assert_int_equal(rig_stats(&rig).bad_messages, bad + 2);
    /* The same hash in group 7 is another block. */
    assert_int_equal(alloc(&rig, seven, 1, 1, 7, KVT_LEVEL_KV4, 4 * PAGE, &map, &entry), 0);
    assert_int_equal(entry.status, 0);
    rig_abort(&rig, CLIENT, &entry);
    rig_close(&rig);
}

/* LOOKUP with `each`: presence of every key, and how many. */
static uint32_t look(struct rig *rig, uint32_t ns, uint64_t number, uint32_t n, uint8_t each,
                     uint8_t *tiers)
{
    union {
        struct kvt_msg_keys msg;
        uint8_t room[sizeof(struct kvt_msg_keys) + 16 * sizeof(struct kvt_msg_key)];
    } u;
    memset(&u, 0, sizeof(u));
    u.msg.each = each;
    for (uint32_t i = 0; i < n; i++)
        u.msg.keys[i] = rig_key(number + i);
    const struct kvt_msg_lookup_reply *reply =
        (const struct kvt_msg_lookup_reply *)(const void *)say(
            rig, &u.msg.msg, KVT_OP_LOOKUP, ns, n, sizeof(u.msg) + n * sizeof(u.msg.keys[0]));
    for (uint32_t i = 0; i < n; i++)
        tiers[i] = reply->entries[i].tier;
    return (uint32_t)reply->msg.status;
}

static void lookup_may_look_behind_an_absent_key(void **state)
{
    static const uint64_t there[] = {1, 2, 4, 7};
    static const uint8_t want[8] = {1, 1, 0, 1, 0, 0, 1, 0};
    struct rig rig;
    struct rig_options options = rig_defaults();
    uint8_t tiers[8];
    (void)state;
    rig_open(&rig, &options, NULL);
    uint32_t ns = open_group(&rig, 1, 0, 0);
    for (size_t i = 0; i < KVT_ARRAY_LEN(there); i++)
        assert_int_equal(rig_put(&rig, ns, &there[i], 1, 0, KVT_LEVEL_KV4, 1, NULL), 1);
    assert_int_equal(look(&rig, ns, 1, 8, 0, tiers), 2);
    assert_int_equal(tiers[3], KVT_TIER_MISS);
    assert_int_equal(look(&rig, ns, 1, 8, 1, tiers), 4);
    for (int i = 0; i < 8; i++)
        assert_int_equal(tiers[i] != KVT_TIER_MISS, want[i]);
    rig_close(&rig);
}

/* Eight blocks of a group whose first one could not be given a slot or is gone. */
static void loose_groups_keep_no_chain(void **state)
{
    struct rig rig;
    struct rig_options options = rig_defaults();
    (void)state;
    for (uint8_t loose = 0; loose < 2; loose++) {
        rig_open(&rig, &options, NULL);
        uint32_t ns = open_group(&rig, 1, 0, loose);
        uint64_t numbers[8], gone = 99;
        int32_t statuses[8];
        for (uint64_t i = 0; i < 8; i++)
            numbers[i] = i + 1;
        /* The parent that the request names is nowhere: a chain is refused, loose blocks are not.
         */
        uint32_t done = rig_put(&rig, ns, numbers, 8, gone, KVT_LEVEL_KV4, 1, statuses);
        assert_int_equal(done, loose ? 8 : 0);
        rig_close(&rig);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_say_level_and_length),
        cmocka_unit_test(what_no_record_can_be_is_refused),
        cmocka_unit_test(a_restart_learns_ids_from_the_records),
        cmocka_unit_test(replacing_goes_by_the_lowest_level),
        cmocka_unit_test(groups_have_handles_and_keys_of_their_own),
        cmocka_unit_test(lookup_may_look_behind_an_absent_key),
        cmocka_unit_test(loose_groups_keep_no_chain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
