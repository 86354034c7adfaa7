/* Namespaces come and go: numbers of those that are closed and empty are given back.
 *
 * Goal:   a store takes any number of namespaces one after the other; one that a client has open,
 *         or of which anything is left (a block in DRAM or on disk, a pin, a slot being filled, a
 *         load or a purge under way, a record that is being written), keeps its number, and its
 *         blocks come back exact; a handle of an earlier life of a number is refused, so that a
 *         late message never meets another namespace; a restart changes none of it.
 * Method: the rig without threads, its invariants checked at every step; the table filled to its
 *         last place, and beyond; thousands of namespaces by ids of their own.
 */
#include "support/store_rig.h"

#include <stdlib.h>
#include <string.h>

#include "kvtier/error.h"
#include "store/store_impl.h"

enum { KV4 = 2, RAW = 6 };

#define MAX KVT_NAMESPACES_MAX
#define RIG 1u /* the client that rig_ns() and the like are */

static const uint32_t pages[7] = {0, 0, 2, 0, 0, 0, 8};
static const uint64_t chain[8] = {1, 2, 3, 4, 5, 6, 7, 8};
static struct rig rig;

static void start(void)
{
    struct rig_options o = rig_defaults();

    o.ns_bytes_max = 64 << 20; /* so that the rings of quotas are there, too */
    rig_open(&rig, &o, NULL);
    rig.check_each_step = false; /* thousands of steps; rig_check() where it matters */
}

static int32_t send(uint32_t client, int op, uint32_t ns, void *msg, size_t bytes)
{
    struct kvt_msg *m = msg;
    const struct kvt_msg *reply;

    m->bytes = (uint32_t)bytes;
    m->op = (uint16_t)op;
    m->cookie = ++rig.cookie;
    m->ns = ns;
    rig_forget_replies(&rig);
    (void)rig_send(&rig, client, m);
    rig_settle(&rig);
    reply = rig_reply(&rig, m->cookie);
    assert_non_null(reply);
    return reply->status;
}

/* Namespace number i, by a client; 0 when it is refused. */
static uint32_t opened_at(uint32_t client, uint32_t i, int64_t ttl_ns)
{
    struct kvt_msg_ns_open msg = {.block_tokens = 16, .ttl_ns = ttl_ns};
    int32_t status;

    memset(msg.id, 0xee, sizeof(msg.id));
    memcpy(msg.id, &i, sizeof(i));
    msg.record_bytes[KV4] = pages[KV4] * 4096;
    msg.record_bytes[RAW] = pages[RAW] * 4096;
    status = send(client, KVT_OP_NS_OPEN, 0, &msg, sizeof(msg));
    if (status != 0)
        assert_int_equal(status, KVT_E_LIMIT);
    return status != 0 ? 0 : rig_reply(&rig, rig.cookie)->ns;
}

static uint32_t opened(uint32_t client, uint32_t i)
{
    return opened_at(client, i, 0);
}

static void closed(uint32_t client, uint32_t ns)
{
    struct kvt_msg msg = {0};

    assert_int_equal(send(client, KVT_OP_NS_CLOSE, ns, &msg, sizeof(msg)), 0);
}

/* Open and close `count` namespaces that nobody has seen; how many were refused. */
static uint32_t flood(uint32_t count)
{
    static uint32_t next = 1000000;
    uint32_t refused = 0;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t ns = opened(9, next++);

        refused += ns == 0;
        if (ns != 0)
            closed(9, ns);
    }
    rig_check(&rig);
    return refused;
}

/* A client opens, and keeps, all that there may be but for `free` of them. */
static void fill(uint32_t free)
{
    for (uint32_t i = 0; i < MAX - free; i++)
        assert_int_not_equal(opened(8, 1u << 24 | i), 0);
}

static void start_full(uint32_t free)
{
    start();
    fill(free);
}

static bool is_known(uint32_t ns)
{
    struct kvt_msg_keys msg = {0};

    return send(1, KVT_OP_LOOKUP, ns, &msg, sizeof(msg)) == 0;
}

/* ---------------------------------------------------------------------------------------------- */

static void any_number_one_after_the_other(void **state)
{
    (void)state;
    start();
    assert_int_equal(flood(MAX + 10), 0);
    struct kvt_store_stats stats = rig_stats(&rig);
    assert_int_equal(stats.namespaces, MAX);
    assert_int_equal(stats.ns_given_back, 10);
    assert_int_equal(stats.ns_refused, 0);
    rig_close(&rig);
}

/* Those that are open are not; the one that was closed first goes first. */
static void what_is_open_stays(void **state)
{
    uint32_t *handles = calloc(MAX, sizeof(*handles));

    (void)state;
    assert_non_null(handles);
    start();
    for (uint32_t i = 0; i < MAX; i++)
        handles[i] = opened(i % 2, i);
    assert_int_equal(opened(1, MAX), 0);
    assert_int_equal(rig_stats(&rig).ns_refused, 1);
    assert_int_equal(opened(0, 7), handles[7]); /* the same, again; and by both clients now */
    closed(1, handles[7]);
    assert_int_equal(opened(1, MAX), 0);
    closed(1, handles[901]);
    closed(0, handles[900]);
    uint32_t first = opened(1, MAX), second = opened(1, MAX + 1);
    assert_int_equal(kvt_handle_number(first), 901);
    assert_int_equal(kvt_handle_number(second), 900);
    assert_int_equal(opened(1, MAX + 2), 0);
    for (uint32_t i = 0; i < MAX; i++)
        if (i != 900 && i != 901)
            assert_true(is_known(handles[i]));
    assert_false(is_known(handles[900]));
    assert_false(is_known(handles[901]));
    assert_true(is_known(first));
    rig_check(&rig);
    free(handles);
    rig_close(&rig);
}

/* A client that ends closes what it had; one that came to its place later keeps its own. */
static void who_ends_has_nothing_open(void **state)
{
    (void)state;
    start();
    fill(4);
    uint32_t shared = opened(4, 5);
    for (uint32_t i = 5; i < 9; i++)
        (void)opened(3, i);
    assert_int_equal(flood(1), 1);
    kvt_store_client_stop(rig.store, 3);
    assert_int_equal(flood(10), 0);
    assert_true(is_known(shared));
    uint32_t later = opened(3 + KVT_NS_CLIENTS, 5000);
    kvt_store_client_gone(rig.store, 3); /* what it was filling may be taken now; that is all */
    assert_int_equal(flood(10), 0);
    assert_true(is_known(later));
    kvt_store_client_gone(rig.store, 3 + KVT_NS_CLIENTS);
    assert_int_equal(flood(10), 0);
    assert_false(is_known(later));
    assert_true(is_known(shared));
    rig_close(&rig);
}

/* Blocks keep their namespace, in DRAM, on the way to the disk and on it, over a restart; and are
 * found exact by whoever opens it again. */
static void what_holds_blocks_stays(void **state)
{
    (void)state;
    start_full(3);
    uint32_t ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_put(&rig, ns, chain, 8, 0, KV4, 0, NULL), 8);
    closed(RIG, ns);
    assert_int_equal(flood(10), 0);
    assert_int_equal(rig_ns(&rig, 1, pages), ns);
    assert_int_equal(rig_get(&rig, ns, chain, 8, 0, NULL, NULL), 8);
    assert_int_equal(rig_flush(&rig), 0);
    closed(RIG, ns);
    rig_reopen(&rig);
    fill(3);
    assert_int_equal(flood(10), 0);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_get(&rig, ns, chain, 8, 0, NULL, NULL), 8);
    /* purged, it has nothing left; neither has it after a crash */
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), 8);
    closed(RIG, ns);
    assert_int_equal(flood(10), 0);
    assert_false(is_known(ns));
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_lookup(&rig, ns, chain, 8, 0, NULL), 0);
    rig_close(&rig);
}

static void what_is_being_filled_stays(void **state)
{
    struct kvt_alloc_entry entry;
    const uint64_t number = 1;

    (void)state;
    start_full(3);
    uint32_t ns = rig_ns(&rig, 1, pages);
    rig_alloc(&rig, RIG, ns, &number, 1, 0, KV4, 0, &entry);
    assert_int_equal(entry.status, 0);
    closed(RIG, ns); /* no client of ours would */
    assert_int_equal(flood(10), 0);
    uint64_t checksum = rig_fill(&rig, ns, number, 0, KV4, &entry);
    assert_int_equal(rig_commit(&rig, RIG, &entry, checksum), 0);
    assert_int_equal(flood(10), 0);
    assert_int_equal(rig_ns(&rig, 1, pages), ns);
    assert_int_equal(rig_get(&rig, ns, &number, 1, 0, NULL, NULL), 1);
    rig_alloc(&rig, RIG, ns, chain + 1, 1, 1, KV4, 0, &entry);
    closed(RIG, ns);
    rig_abort(&rig, RIG, &entry);
    assert_int_equal(flood(10), 0);
    assert_true(is_known(ns));
    rig_close(&rig);
}

/* A load that waits for its disk, and what is purged meanwhile: its number is nobody else's before
 * both have ended. */
static void what_is_under_way_stays(void **state)
{
    (void)state;
    start_full(3);
    uint32_t ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_put(&rig, ns, chain, 8, 0, KV4, 0, NULL), 8);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    fill(3);
    rig_hold(&rig, true);
    (void)rig_acquire(&rig, RIG, ns, chain, 8, 0, INT64_MAX);
    struct kvt_msg_keys purge = {.msg = {.bytes = sizeof(purge), .op = KVT_OP_PURGE, .ns = ns}};
    purge.msg.cookie = ++rig.cookie;
    assert_int_equal(rig_send(&rig, RIG, &purge), 0);
    closed(RIG, ns);
    assert_int_equal(flood(10), 0);
    assert_true(is_known(ns));
    rig_hold(&rig, false);
    rig_settle(&rig);
    kvt_store_client_gone(rig.store, RIG);
    rig_settle(&rig);
    assert_int_equal(flood(10), 0);
    assert_false(is_known(ns));
    rig_close(&rig);
}

/* So is a purge of keys that are not there: nothing but the purge itself names the namespace. */
static void what_is_purged_stays(void **state)
{
    struct kvt_msg_keys *purge = calloc(1, sizeof(*purge) + sizeof(purge->keys[0]));

    assert_non_null(purge);
    (void)state;
    start_full(1);
    uint32_t ns = rig_ns(&rig, 1, pages);
    rig_hold(&rig, true);
    purge->msg = (struct kvt_msg){.bytes = sizeof(*purge) + sizeof(purge->keys[0]),
                                  .op = KVT_OP_PURGE,
                                  .cookie = ++rig.cookie,
                                  .ns = ns,
                                  .count = 1};
    purge->keys[0] = rig_key(1);
    assert_int_equal(rig_send(&rig, RIG, purge), 0);
    free(purge);
    closed(RIG, ns);
    assert_int_equal(flood(2), 2);
    assert_true(is_known(ns));
    rig_hold(&rig, false);
    rig_settle(&rig);
    assert_int_equal(flood(2), 0);
    assert_false(is_known(ns));
    rig_close(&rig);
}

/* Late messages by a handle whose number is another's: refused, each of them, and nothing of the
 * other namespace is seen or lost. */
static void late_messages_meet_nobody_else(void **state)
{
    (void)state;
    start_full(1);
    uint32_t old = rig_ns(&rig, 2, pages);
    closed(RIG, old);
    uint32_t ns = rig_ns(&rig, 3, pages);
    assert_int_equal(kvt_handle_number(ns), kvt_handle_number(old));
    assert_int_not_equal(ns, old);
    assert_int_equal(rig_put(&rig, ns, chain, 8, 0, KV4, 0, NULL), 8);
    assert_false(is_known(old));
    uint64_t bad = rig_stats(&rig).bad_messages;
    static const int ops[] = {KVT_OP_LOOKUP, KVT_OP_TOUCH, KVT_OP_PREFETCH, KVT_OP_PIN,
                              KVT_OP_UNPIN,  KVT_OP_PURGE, KVT_OP_NS_CLOSE};
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        struct kvt_msg_keys msg = {0};
        size_t bytes = ops[i] == KVT_OP_NS_CLOSE ? sizeof(msg.msg) : sizeof(msg);

        assert_int_equal(send(RIG, ops[i], old, &msg, bytes), KVT_E_INVAL);
        assert_int_equal(rig_stats(&rig).bad_messages, bad + i + 1);
    }
    assert_int_equal(rig_get(&rig, ns, chain, 8, 0, NULL, NULL), 8);
    assert_false(is_known(0));
    assert_false(is_known(MAX * 77 + 1));
    assert_false(is_known(UINT32_MAX));
    rig_close(&rig);
}

/* Times to live of their own go with the namespace, and are not another one's. */
static void a_time_to_live_goes_with_it(void **state)
{
    const int64_t second = INT64_C(1000000000);

    (void)state;
    start_full(30);
    for (uint32_t i = 0; i < 30; i++)
        closed(2, opened_at(2, i, 2 * second));
    assert_non_null(rig.store->ttl.own);
    assert_int_equal(flood(40), 0);
    assert_null(rig.store->ttl.own);
    uint32_t ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_put(&rig, ns, chain, 8, 0, KV4, 0, NULL), 8);
    for (int i = 0; i < 6; i++)
        rig_advance(&rig, second);
    assert_int_equal(rig_get(&rig, ns, chain, 8, 0, NULL, NULL), 8);
    assert_int_equal(rig_stats(&rig).ttl_expired, 0);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_one_after_the_other),
        cmocka_unit_test(what_is_open_stays),
        cmocka_unit_test(who_ends_has_nothing_open),
        cmocka_unit_test(what_holds_blocks_stays),
        cmocka_unit_test(what_is_being_filled_stays),
        cmocka_unit_test(what_is_under_way_stays),
        cmocka_unit_test(what_is_purged_stays),
        cmocka_unit_test(late_messages_meet_nobody_else),
        cmocka_unit_test(a_time_to_live_goes_with_it),
    };

    return cmocka_run_group_tests_name("store_ns", tests, NULL, NULL);
}
