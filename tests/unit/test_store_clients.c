/* Several clients of one store: what each one holds is its own, and ends with it.
 *
 * Goal:   pins of kvt_pin are kept per client; a client that is disconnected loses its grants at
 * once, and what it is filling when it is gone; one client's share of slots leaves room for others;
 *         usage by namespace and rank adds up.
 * Method: messages of several clients into a store without threads; its invariants are checked
 * after each step. Pairs of pins are compared with a plain matrix under random operations.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

enum { KV4 = 2, BLOCKS = 16, PAGES = 4 };

static const uint32_t pages[7] = {0, 4, 4, 4, 4, 4, 4};
static uint64_t numbers[64];

static void pin_as(struct rig *rig, uint32_t client, int op, uint32_t ns, uint64_t number,
                   int32_t expected)
{
    struct {
        struct kvt_msg_keys head;
        struct kvt_msg_key key;
    } msg;

    memset(&msg, 0, sizeof(msg));
    msg.head.msg.bytes = sizeof(msg);
    msg.head.msg.op = (uint16_t)op;
    msg.head.msg.cookie = ++rig->cookie;
    msg.head.msg.ns = ns;
    msg.head.msg.count = 1;
    msg.key = rig_key(number);
    assert_int_equal(rig_send(rig, client, &msg), 0);
    rig_settle(rig);
    assert_int_equal(rig_reply(rig, msg.head.msg.cookie)->status, expected);
}

static void begin(struct rig *rig, uint32_t *ns)
{
    struct rig_options options = rig_defaults();

    for (uint32_t i = 0; i < 64; i++)
        numbers[i] = 1 + i;
    options.cache_bytes = 2u << 20;
    options.staging_bytes = 512u << 10;
    options.pin_bytes_max = 1u << 20;
    rig_open(rig, &options, NULL);
    *ns = rig_ns(rig, 1, pages);
}

static void pins_are_each_clients_own(void **state)
{
    struct rig rig;
    uint32_t ns;

    (void)state;
    begin(&rig, &ns);
    assert_int_equal(rig_put(&rig, ns, numbers, 4, 0, KV4, 0, NULL), 4);
    pin_as(&rig, 1, KVT_OP_PIN, ns, 1, 1);
    pin_as(&rig, 1, KVT_OP_PIN, ns, 1, 1); /* once more is still once */
    pin_as(&rig, 2, KVT_OP_PIN, ns, 1, 1);
    pin_as(&rig, 2, KVT_OP_PIN, ns, 2, 1);
    assert_int_equal(rig_stats(&rig).pinned_blocks, 2);
    pin_as(&rig, 1, KVT_OP_UNPIN, ns, 2, 0); /* not its own */
    pin_as(&rig, 1, KVT_OP_UNPIN, ns, 1, 1);
    assert_int_equal(rig_stats(&rig).pinned_blocks, 2); /* the other one still has it */
    kvt_store_client_gone(rig.store, 2);
    rig_check(&rig);
    assert_int_equal(rig_stats(&rig).pinned_blocks, 0);
    assert_int_equal(rig_stats(&rig).pinned_bytes, 0);
    /* What is purged while it is pinned is nobody's pin, and its entry may serve another block. */
    pin_as(&rig, 1, KVT_OP_PIN, ns, 4, 1);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &numbers[3], 1), 1);
    rig_check(&rig);
    assert_int_equal(rig_put(&rig, ns, &numbers[3], 1, 3, KV4, 0, NULL), 1);
    pin_as(&rig, 1, KVT_OP_UNPIN, ns, 4, 0);
    rig_close(&rig);
}

static void a_disconnected_client_keeps_what_it_fills_until_it_is_gone(void **state)
{
    struct kvt_alloc_entry entries[3];
    struct rig rig;
    uint32_t ns;

    (void)state;
    begin(&rig, &ns);
    assert_int_equal(rig_put(&rig, ns, numbers, 4, 0, KV4, 0, NULL), 4);
    rig.keep = true;
    rig_alloc(&rig, 7, ns, &numbers[10], 3, 0, KV4, 0, entries);
    (void)rig_acquire(&rig, 7, ns, numbers, 4, 0, INT64_MAX);
    rig_settle(&rig);
    assert_int_equal(kvt_slots_client_bytes(&rig.store->slots, 7), 7 * PAGES * 4096);
    kvt_store_client_stop(rig.store, 7);
    rig_check(&rig);
    assert_int_equal(kvt_slots_client_bytes(&rig.store->slots, 7), 0);
    assert_int_equal(kvt_slots_client_fills(&rig.store->slots, 7), 0);
    assert_int_equal(rig.store->slots.parted_bytes, 3 * PAGES * 4096);
    for (int i = 0; i < 3; i++) /* its threads may still write there */
        assert_int_equal(rig.store->slots.slots[entries[i].slot].state, KVT_SLOT_FILLING);
    kvt_store_client_gone(rig.store, 7);
    rig_check(&rig);
    assert_int_equal(kvt_slots_client_bytes(&rig.store->slots, 7), 0);
    assert_int_equal(rig.store->slots.parted_bytes, 0);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_close(&rig);
}

/* Its place is given to others, whose numbers have the same low bits: nothing is held against them,
 * neither before nor after its end. */
static void who_gets_the_place_of_a_disconnected_client_has_a_share_of_its_own(void **state)
{
    const uint32_t old = 5, heir = old + KVT_SLOT_CLIENTS;
    struct kvt_alloc_entry entries[20];
    struct rig rig;
    uint32_t ns;

    (void)state;
    begin(&rig, &ns);
    rig.store->params.client_bytes_max = 20 * PAGES * 4096;
    rig_alloc(&rig, old, ns, numbers, 20, 0, KV4, 0, entries);
    assert_int_equal(entries[19].status, 0);
    kvt_store_client_stop(rig.store, old);
    rig_alloc(&rig, heir, ns, &numbers[40], 20, 0, KV4, 0, entries);
    for (int i = 0; i < 20; i++)
        assert_int_equal(entries[i].status, 0);
    rig_check(&rig);
    assert_int_equal(kvt_slots_client_fills(&rig.store->slots, heir), 20 * PAGES * 4096);
    kvt_store_client_gone(rig.store, old);
    rig_check(&rig);
    assert_int_equal(kvt_slots_client_bytes(&rig.store->slots, heir), 20 * PAGES * 4096);
    kvt_store_client_stop(rig.store, heir);
    kvt_store_client_stop(rig.store, heir); /* told twice, counted once */
    assert_int_equal(rig.store->slots.parted_bytes, 20 * PAGES * 4096);
    kvt_store_client_gone(rig.store, heir);
    rig_check(&rig);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_close(&rig);
}

/* What is being filled has a smaller share than what is held: it comes back late when its client
 * breaks the protocol. What is committed does not count; one record always goes. */
static void slots_to_fill_have_a_share_of_their_own(void **state)
{
    struct kvt_alloc_entry entries[20];
    struct rig rig;
    uint32_t ns, granted = 0;

    (void)state;
    begin(&rig, &ns);
    rig.store->params.client_bytes_max = 20 * PAGES * 4096;
    rig.store->params.client_fill_max = 8 * PAGES * 4096;
    rig_alloc(&rig, 5, ns, numbers, 20, 0, KV4, 0, entries);
    for (int i = 0; i < 20; i++)
        granted += entries[i].status == 0;
    assert_int_equal(granted, 8);
    rig_alloc(&rig, 6, ns, &numbers[40], 8, 0, KV4, 0, entries); /* another client has its own */
    assert_int_equal(entries[7].status, 0);
    kvt_store_client_gone(rig.store, 5);
    kvt_store_client_gone(rig.store, 6);
    for (uint32_t i = 0; i < 16; i += 4) /* filled and committed, four at a time */
        assert_int_equal(
            rig_put(&rig, ns, &numbers[i], 4, i > 0 ? numbers[i - 1] : 0, KV4, 0, NULL), 4);
    (void)rig_acquire(&rig, 5, ns, numbers, 16, 0, INT64_MAX);
    rig_settle(&rig);
    assert_int_equal(kvt_slots_client_bytes(&rig.store->slots, 5), 16 * PAGES * 4096);
    assert_int_equal(kvt_slots_client_fills(&rig.store->slots, 5), 0);
    kvt_store_client_gone(rig.store, 5);
    rig.store->params.client_fill_max = 1;
    rig_alloc(&rig, 5, ns, &numbers[20], 2, 0, KV4, 0, entries);
    assert_int_equal(entries[0].status, 0);
    assert_int_equal(entries[1].status, KVT_E_DROPPED);
    rig_check(&rig);
    kvt_store_client_gone(rig.store, 5);
    rig_close(&rig);
}

/* However many break off one after the other and live on: together they keep less than half, the
 * next one gets less to fill, and what one record takes it gets always. */
static void those_who_broke_off_keep_less_than_half_together(void **state)
{
    enum { CLIENTS = 40, EACH = 64 };
    struct kvt_alloc_entry entries[EACH];
    uint64_t names[EACH];
    struct rig rig;
    uint32_t ns, first = 0, granted = 0;

    (void)state;
    begin(&rig, &ns);
    const uint64_t record = PAGES * KVT_PAGE_BYTES, arena = rig.store->params.arena_bytes;
    assert_true(arena / 8 < EACH * record);
    rig.store->params.client_fill_max = arena / 8;
    for (uint32_t client = 1; client <= CLIENTS; client++) {
        for (uint32_t i = 0; i < EACH; i++)
            names[i] = 1000 + client * EACH + i;
        rig_alloc(&rig, client, ns, names, EACH, 0, KV4, 0, entries);
        granted = 0;
        for (uint32_t i = 0; i < EACH; i++)
            granted += entries[i].status == 0;
        first = client == 1 ? granted : first;
        assert_true(granted >= 1 && granted <= first);
        if (rig_stats(&rig).parted_bytes + record > arena / 2)
            break;
        kvt_store_client_stop(rig.store, client);
        assert_true(rig_stats(&rig).parted_bytes <= arena / 2);
    }
    assert_int_equal(first, arena / 8 / record);
    assert_true(granted < first / 2);
    assert_true(rig_stats(&rig).parted_bytes > arena / 4);
    for (uint32_t client = 1; client <= CLIENTS; client++)
        kvt_store_client_gone(rig.store, client);
    assert_int_equal(rig_stats(&rig).parted_bytes, 0);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_close(&rig);
}

static void one_clients_share_leaves_room_for_the_others(void **state)
{
    struct kvt_alloc_entry entries[40];
    struct rig rig;
    uint32_t ns, granted = 0;

    (void)state;
    begin(&rig, &ns);
    rig.store->params.client_bytes_max = 20 * PAGES * 4096;
    rig_alloc(&rig, 5, ns, numbers, 40, 0, KV4, 0, entries);
    for (int i = 0; i < 40; i++)
        granted += entries[i].status == 0;
    assert_int_equal(granted, 20);
    rig_alloc(&rig, 6, ns, &numbers[40], 20, 0, KV4, 0, entries);
    for (int i = 0; i < 20; i++)
        assert_int_equal(entries[i].status, 0);
    kvt_store_client_gone(rig.store, 5);
    kvt_store_client_gone(rig.store, 6);
    rig.store->params.client_bytes_max = 0;
    /* Loads: the share is granted; the rest waits for releases, and is given up in the end. */
    assert_int_equal(rig_put(&rig, ns, numbers, 30, 0, KV4, 0, NULL), 30);
    rig.store->params.client_bytes_max = 20 * PAGES * 4096;
    (void)rig_acquire(&rig, 5, ns, numbers, 30, 0, INT64_MAX);
    rig_settle(&rig);
    assert_int_equal(kvt_slots_client_bytes(&rig.store->slots, 5), 20 * PAGES * 4096);
    assert_int_equal(rig_get(&rig, ns, numbers, 20, 0, NULL, NULL), 20); /* another client */
    rig_advance(&rig, 2 * KVT_STORE_SLOT_WAIT_NS);
    assert_int_equal(rig_stats(&rig).load_no_slot > 0, 1);
    kvt_store_client_gone(rig.store, 5);
    rig_check(&rig);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_close(&rig);
}

/* Ask for all parts and add up. */
static void usage(struct rig *rig, uint64_t *blocks, uint64_t *bytes, uint32_t *rows)
{
    struct kvt_msg_usage msg = {.msg = {.bytes = sizeof(msg), .op = KVT_OP_USAGE}};

    *blocks = *bytes = *rows = 0;
    do {
        msg.msg.cookie = ++rig->cookie;
        assert_int_equal(rig_send(rig, 1, &msg), 0);
        const struct kvt_msg_usage_reply *reply =
            (const struct kvt_msg_usage_reply *)(const void *)rig_reply(rig, msg.msg.cookie);
        assert_non_null(reply);
        for (uint32_t i = 0; i < reply->msg.count; i++) {
            *blocks += reply->rows[i].dram_blocks;
            *bytes += reply->rows[i].dram_bytes;
        }
        *rows += reply->msg.count;
        msg.from = reply->next;
    } while (msg.from != 0);
}

static uint32_t last_index;

static bool in_order(void *out, uint32_t client, const struct kvt_msg_grant *grant)
{
    (void)client;
    assert_int_equal(grant->index, *(uint32_t *)out + (last_index != UINT32_MAX));
    last_index = *(uint32_t *)out = grant->index;
    return false;
}

/* A chain that is longer than what is looked up at a time: in order, up to the share, up to a block
 * that is not there, and to its end. */
static void long_chains_are_granted_in_pieces(void **state)
{
    static const uint32_t shares[] = {31, 32, 33, 45, 60, 64};
    struct rig rig;
    uint32_t ns, at;

    (void)state;
    begin(&rig, &ns);
    assert_int_equal(rig_put(&rig, ns, numbers, 60, 0, KV4, 0, NULL), 60);
    rig.on_grant = in_order;
    rig.on_grant_ctx = &at;
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        const uint32_t most = shares[i] < 60 ? shares[i] : 60;

        rig.store->params.client_bytes_max = (uint64_t)shares[i] * PAGES * 4096;
        last_index = UINT32_MAX;
        at = 0;
        (void)rig_acquire(&rig, 5, ns, numbers, 60, 0, INT64_MAX);
        kvt_store_run(rig.store);
        assert_int_equal(at, most - 1);
        assert_int_equal(kvt_slots_client_bytes(&rig.store->slots, 5), most * PAGES * 4096);
        kvt_store_client_gone(rig.store, 5);
        rig_check(&rig);
    }
    rig.on_grant = NULL;
    rig.store->params.client_bytes_max = 0;
    for (uint64_t gone = 59; gone > 20; gone -= 13) {
        int32_t statuses[60];

        assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &numbers[gone], 1), 1);
        assert_int_equal(rig_get(&rig, ns, numbers, 60, 0, statuses, NULL), gone);
        for (uint64_t i = gone; i < 60; i++)
            assert_int_equal(statuses[i], KVT_E_MISS);
    }
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_close(&rig);
}

static void usage_adds_up(void **state)
{
    uint64_t blocks, bytes;
    uint32_t ns, other, rows;
    struct rig rig;

    (void)state;
    begin(&rig, &ns);
    other = rig_ns(&rig, 2, pages);
    usage(&rig, &blocks, &bytes, &rows);
    assert_int_equal(rows, 0);
    assert_int_equal(rig_put(&rig, ns, numbers, 10, 0, KV4, 0, NULL), 10);
    assert_int_equal(rig_put(&rig, other, numbers, 5, 0, KV4, 0, NULL), 5);
    usage(&rig, &blocks, &bytes, &rows);
    assert_int_equal(rows, 2);
    assert_int_equal(blocks, rig_stats(&rig).dram_blocks);
    assert_int_equal(bytes, 15 * PAGES * 4096);
    rig_close(&rig);
}

/* The table against a plain matrix. */
static void pairs_of_pins_behave_like_a_set(void **state)
{
    enum { ENTRIES = 500, CLIENTS = 5, STEPS = 200000 };
    static uint8_t model[ENTRIES][CLIENTS];
    struct kvt_rng rng = {20261129};
    struct kvt_pins pins;
    uint32_t used = 0;

    (void)state;
    memset(model, 0, sizeof(model));
    assert_int_equal(kvt_pins_init(&pins), 0);
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t entry = (uint32_t)kvt_rng_below(&rng, ENTRIES);
        uint32_t client = (uint32_t)kvt_rng_below(&rng, CLIENTS), cursor = 0, popped;
        uint8_t *cell = &model[entry][client];
        bool any = false;

        switch (kvt_rng_below(&rng, 400)) {
        case 0:
            while (kvt_pins_pop(&pins, client, &cursor, &popped)) {
                assert_true(model[popped][client]);
                model[popped][client] = 0;
                used--;
            }
            for (uint32_t i = 0; i < ENTRIES; i++)
                assert_false(model[i][client]);
            break;
        case 1:
        case 2:
            kvt_pins_drop(&pins, entry);
            for (uint32_t i = 0; i < CLIENTS; i++) {
                used -= model[entry][i];
                model[entry][i] = 0;
            }
            break;
        default:
            if (kvt_rng_below(&rng, 3) > 0) {
                assert_true(kvt_pins_add(&pins, entry, client));
                used += !*cell;
                *cell = 1;
            } else {
                assert_int_equal(kvt_pins_remove(&pins, entry, client), *cell);
                used -= *cell;
                *cell = 0;
            }
        }
        for (uint32_t i = 0; i < CLIENTS; i++)
            any = any || model[entry][i];
        assert_int_equal(kvt_pins_any(&pins, entry), any);
        assert_int_equal(pins.used, used);
    }
    kvt_pins_destroy(&pins);
}

static void a_full_table_of_pins_refuses(void **state)
{
    struct kvt_pins pins;

    (void)state;
    assert_int_equal(kvt_pins_init(&pins), 0);
    for (uint32_t i = 0; i < KVT_PINS_MAX; i++)
        assert_true(kvt_pins_add(&pins, i, 64 + i % 3));
    assert_false(kvt_pins_add(&pins, KVT_PINS_MAX, 64));
    assert_true(kvt_pins_add(&pins, 7, 64 + 7 % 3)); /* it is there already */
    assert_true(kvt_pins_remove(&pins, 9, 64));
    assert_true(kvt_pins_add(&pins, KVT_PINS_MAX, 64));
    kvt_pins_destroy(&pins);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pins_are_each_clients_own),
        cmocka_unit_test(a_disconnected_client_keeps_what_it_fills_until_it_is_gone),
        cmocka_unit_test(who_gets_the_place_of_a_disconnected_client_has_a_share_of_its_own),
        cmocka_unit_test(slots_to_fill_have_a_share_of_their_own),
        cmocka_unit_test(those_who_broke_off_keep_less_than_half_together),
        cmocka_unit_test(one_clients_share_leaves_room_for_the_others),
        cmocka_unit_test(long_chains_are_granted_in_pieces),
        cmocka_unit_test(usage_adds_up),
        cmocka_unit_test(pairs_of_pins_behave_like_a_set),
        cmocka_unit_test(a_full_table_of_pins_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
