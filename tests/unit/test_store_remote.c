/* The tier that machines share, seen from the store half.
 *
 * Goal:   what another store has put is found, loaded and verified; what is not there costs one
 *         question, then none for a while; a tier that hangs, fails or lies costs a bounded time
 *         and a miss, never other bytes; nothing is put twice; a purge reaches there; every
 *         shortened hit has its counter.
 * Method: the rig without threads over a tier in memory (support/mem_remote.h), two stores on one
 *         tier one after the other; bytes follow from keys, so each record is checked whole.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "support/mem_remote.h"

enum { KV4 = 2, MIXED = 8, RAW = 6 };
enum { OFF = -1 }; /* of remote_write, for the rig */

#define BLOCK 8192u
#define SECOND INT64_C(1000000000)
#define CHAIN 8u

static const uint32_t pages[7] = {0, 0, 2, 0, 0, 0, 8};
static struct rig rig;
static uint32_t ns;
static struct mem_tier tier;
static struct mem_remote remote;

static struct rig_options options(int write)
{
    struct rig_options o = rig_defaults();

    o.cache_bytes = 64 * BLOCK;
    o.disk_cap_bytes = 0;
    o.remote = &remote.remote;
    o.remote_write = write;
    return o;
}

static void begin(const struct rig_options *o)
{
    mem_remote_init(&remote, &tier);
    rig_open(&rig, o, NULL);
    ns = rig_ns(&rig, 1, pages);
}

static void numbers_from(uint64_t first, uint32_t n, uint64_t *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = first + i;
}

static uint32_t put(uint64_t first, uint32_t n)
{
    uint64_t numbers[256];

    numbers_from(first, n, numbers);
    return rig_put(&rig, ns, numbers, n, 0, KV4, false, NULL);
}

static uint32_t get(uint64_t first, uint32_t n)
{
    uint64_t numbers[256];

    numbers_from(first, n, numbers);
    return rig_get(&rig, ns, numbers, n, 0, NULL, NULL);
}

static uint32_t found(uint64_t first, uint32_t n, uint8_t *tiers)
{
    uint64_t numbers[256];

    numbers_from(first, n, numbers);
    return rig_lookup(&rig, ns, numbers, n, 0, tiers);
}

/* A chain that some other machine has put there. */
static void elsewhere(uint64_t first, uint32_t n)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);

    begin(&o);
    assert_int_equal(put(first, n), n);
    rig_settle(&rig);
    assert_true(tier.count >= n);
    rig_close(&rig);
}

static int tear_down(void **state)
{
    (void)state;
    if (rig.store)
        rig_close(&rig);
    mem_tier_free(&tier);
    return 0;
}

/* ---- found and loaded ---------------------------------------------------------------------- */

static void test_what_another_store_put_is_loaded(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    uint8_t tiers[CHAIN];

    (void)state;
    elsewhere(1, CHAIN);
    begin(&o);
    assert_int_equal(found(1, CHAIN, tiers), CHAIN);
    for (uint32_t i = 0; i < CHAIN; i++)
        assert_int_equal(tiers[i], KVT_TIER_REMOTE);
    assert_int_equal(get(1, CHAIN), CHAIN);
    assert_int_equal(rig_stats(&rig).load_granted_remote, CHAIN);
    assert_int_equal(rig_stats(&rig).remote_got_bytes, CHAIN * BLOCK);
    /* it is a block like any other now */
    assert_int_equal(found(1, CHAIN, tiers), CHAIN);
    assert_int_equal(tiers[0], KVT_TIER_DRAM);
    assert_int_equal(get(1, CHAIN), CHAIN);
    assert_int_equal(rig_stats(&rig).load_granted_dram, CHAIN);
    assert_int_equal(remote.gets, CHAIN);
    assert_int_equal(remote.probes, 1);
}

/* What is absent is asked for once, and again a second later. */
static void test_absent_ones_are_remembered_for_a_second(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);

    (void)state;
    begin(&o);
    assert_int_equal(found(1, 4, NULL), 0);
    assert_int_equal(remote.probed, 4);
    assert_int_equal(found(1, 4, NULL), 0);
    assert_int_equal(remote.probed, 4);
    assert_true(rig_stats(&rig).remote_negative > 0);
    rig_advance(&rig, SECOND + 1);
    assert_int_equal(found(1, 4, NULL), 0);
    assert_int_equal(remote.probed, 8);
}

/* A long chain is asked for in two rounds at most, and a miss does not ask for all of it. */
static void test_a_long_chain_takes_two_rounds(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);

    (void)state;
    elsewhere(1, 60);
    begin(&o);
    assert_int_equal(found(1001, 200, NULL), 0);
    assert_int_equal(remote.probes, 1);
    assert_true(remote.probed < 64);
    remote.probes = 0;
    assert_int_equal(found(1, 60, NULL), 60);
    assert_int_equal(remote.probes, 2);
    assert_int_equal(rig_stats(&rig).remote_rounds, 3);
    rig.whole = 1; /* what precedes is there: all at once */
    remote.probed = 0;
    assert_int_equal(found(2001, 100, NULL), 0);
    assert_int_equal(remote.probes, 3);
    assert_int_equal(remote.probed, 100);
}

#define LONG 2048u
#define MESSAGE 1024u

/* A look-up of 2,048 keys, in two messages as the client sends them, with somebody else's between
 * them: round trips of its own. */
static uint32_t long_rounds(struct kvt_rng *rng)
{
    static uint64_t numbers[LONG];
    uint32_t before = remote.probes, rounds, run;

    numbers_from(1, LONG, numbers);
    rig.whole = 0;
    run = rig_lookup(&rig, ns, numbers, MESSAGE, 0, NULL);
    rounds = remote.probes - before;
    if (kvt_rng_below(rng, 2)) /* a miss, or a hit */
        (void)found(kvt_rng_below(rng, 2) ? 900000 + kvt_rng_below(rng, 1000) : 1, 50, NULL);
    if (run < MESSAGE)
        return rounds;
    before = remote.probes;
    rig.whole = 1;
    (void)rig_lookup(&rig, ns, numbers + MESSAGE, MESSAGE, 0, NULL);
    rig.whole = 0;
    return rounds + remote.probes - before;
}

/* Three round trips to a node at most, whatever was looked up, loaded, lost or refused before. */
static void test_2048_keys_in_three_rounds_in_every_history(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
    struct kvt_rng rng = {test_seed()};
    uint32_t most = 0;

    (void)state;
    begin(&o);
    for (uint32_t at = 0; at < LONG; at += 32) {
        assert_int_equal(put(1 + at, 32), 32);
        rig_settle(&rig);
    }
    assert_int_equal(tier.count, LONG);
    rig_close(&rig);
    o = options(KVT_REMOTE_WRITE_SECOND);
    begin(&o);
    for (int i = 0; i < 24; i++) {
        uint32_t before = (uint32_t)kvt_rng_below(&rng, 4), rounds;

        for (uint32_t k = 0; k < before; k++) {
            uint64_t first = 1 + kvt_rng_below(&rng, LONG - 64);

            remote.fail = kvt_rng_below(&rng, 4) ? 0 : -EHOSTDOWN;
            (void)found(kvt_rng_below(&rng, 2) ? first : 500000 + first, 64, NULL);
            remote.fail = 0;
            (void)get(first, 8);
        }
        rounds = long_rounds(&rng);
        assert_true(rounds <= 3);
        most = KVT_MAX(most, rounds);
        if (kvt_rng_below(&rng, 3)) /* what is known to be there is forgotten */
            rig_advance(&rig, 61 * SECOND);
    }
    assert_int_equal(most, 3); /* it was all of it at least once */
}

/* Local blocks first, the rest from there, one chain. */
static void test_a_chain_over_both(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    uint8_t tiers[CHAIN];

    (void)state;
    elsewhere(1, CHAIN);
    begin(&o);
    assert_int_equal(put(1, 3), 3);
    assert_int_equal(found(1, CHAIN, tiers), CHAIN);
    assert_int_equal(tiers[2], KVT_TIER_DRAM);
    assert_int_equal(tiers[3], KVT_TIER_REMOTE);
    assert_int_equal(get(1, CHAIN), CHAIN);
    assert_int_equal(remote.gets, CHAIN - 3);
}

/* A record of too low a level is no hit, and one that a request does not ask for by LOOKUP is not
 * looked for. */
static void test_levels_and_loads_without_lookup(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    uint64_t numbers[2] = {1, 2};

    (void)state;
    elsewhere(1, 2);
    begin(&o);
    assert_int_equal(get(1, 2), 0);
    assert_int_equal(remote.gets, 0);
    assert_int_equal(rig_lookup(&rig, ns, numbers, 2, KVT_LEVEL_RAW, NULL), 0);
    assert_int_equal(rig_lookup(&rig, ns, numbers, 2, KVT_LEVEL_KV4, NULL), 2);
    assert_int_equal(rig_get(&rig, ns, numbers, 2, KVT_LEVEL_RAW, NULL, NULL), 0);
    assert_int_equal(rig_get(&rig, ns, numbers, 2, KVT_LEVEL_KV4, NULL, NULL), 2);
}

/* What came from there is written to disk like what was stored here, and is found after a restart
 * without asking; numbered as one of ours, so that a purge of later holds. */
static void test_it_goes_to_disk_and_survives(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    uint8_t tiers[CHAIN];
    uint64_t one = 2;

    (void)state;
    elsewhere(1, CHAIN);
    o.disk_cap_bytes = 8u << 20;
    begin(&o);
    assert_int_equal(found(1, CHAIN, NULL), CHAIN);
    assert_int_equal(get(1, CHAIN), CHAIN);
    assert_int_equal(rig_flush(&rig), 0);
    remote.stopped = false;
    rig_reopen(&rig);
    remote.stopped = false;
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(found(1, CHAIN, tiers), CHAIN);
    assert_int_equal(tiers[CHAIN - 1], KVT_TIER_DISK);
    assert_int_equal(get(1, CHAIN), CHAIN);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &one, 1), 1);
    rig_reopen(&rig);
    remote.stopped = false;
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(found(1, CHAIN, NULL), 1);
    assert_int_equal(get(1, CHAIN), 1);
}

/* ---- lies, failures, hangs ----------------------------------------------------------------- */

static void test_wrong_bytes_are_a_miss(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    int32_t statuses[4];
    uint64_t numbers[4] = {1, 2, 3, 4};

    (void)state;
    elsewhere(1, 4);
    begin(&o);
    assert_int_equal(found(1, 4, NULL), 4);
    remote.flips = 1;
    assert_int_equal(rig_get(&rig, ns, numbers, 4, 0, statuses, NULL), 0);
    assert_int_equal(statuses[0], KVT_E_MISS);
    assert_int_equal(rig_stats(&rig).remote_get_bad, 1);
    assert_int_equal(found(1, 4, NULL), 0); /* not asked for while it is computed */
    rig_advance(&rig, 30 * SECOND);
    assert_int_equal(found(1, 4, NULL), 0);
    rig_advance(&rig, 31 * SECOND);
    assert_int_equal(found(1, 4, NULL), 4);
    assert_int_equal(get(1, 4), 4);
}

/* Somebody finds what is in the tier now damaged, computes it, and stores it. */
static void computes(int write)
{
    struct rig_options o = options(write);

    begin(&o);
    assert_int_equal(found(1, 4, NULL), 1);
    assert_int_equal(get(1, 1), 0);
    assert_int_equal(rig_stats(&rig).remote_get_bad, 1);
    assert_int_equal(rig_stats(&rig).remote_refused, 1);
    assert_int_equal(rig_stats(&rig).remote_get_gone, 0);
    rig_advance(&rig, 20 * SECOND); /* a long prompt */
    assert_int_equal(put(1, 4), 4);
    rig_settle(&rig);
}

/* What is damaged there, in its header or behind it, does not stay there: whoever has computed it
 * puts it, once, and the next one loads it. */
static void test_damaged_records_are_replaced(void **state)
{
    static const int writes[] = {KVT_REMOTE_WRITE_ALL, KVT_REMOTE_WRITE_SECOND};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(writes); i++) {
        struct rig_options o = options(OFF);

        elsewhere(1, 4);
        tier.objects[0].record[5000] ^= 1;
        tier.objects[1].record[0] ^= 1;
        computes(writes[i]);
        assert_int_equal(rig_stats(&rig).remote_put, 2);
        assert_int_equal(rig_stats(&rig).remote_put_exists, 0);
        assert_int_equal(get(1, 4), 4);
        rig_settle(&rig);
        assert_int_equal(remote.puts, 2);
        rig_close(&rig);
        begin(&o);
        assert_int_equal(found(1, 4, NULL), 4);
        assert_int_equal(get(1, 4), 4);
        assert_int_equal(rig_stats(&rig).load_granted_remote, 4);
        rig_close(&rig);
        mem_tier_free(&tier);
    }
    elsewhere(1, 4);
    tier.objects[0].record[5000] ^= 1;
    tier.objects[1].record[0] ^= 1;
    computes(OFF);
    assert_int_equal(remote.puts, 0);
}

/* A record that is of no use here is left alone where others may have it: of a later version, of a
 * level that nobody here has opened, of a mixed map. One that no namespace can have is not. */
static void test_records_of_others_are_left_alone(void **state)
{
    static const struct {
        uint16_t version;
        uint8_t map;
        uint32_t payload_pages;
        bool stays;
    } cases[] = {{1, 0, 0, true}, {0, 3, 0, true}, {0, KV4, 3, false}, {0, MIXED, 20, false}};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
        struct kvt_record_header *header;

        elsewhere(1, 1);
        header = (struct kvt_record_header *)(void *)tier.objects[0].record;
        header->version = (uint16_t)(header->version + cases[i].version);
        header->map = cases[i].map ? cases[i].map : header->map;
        if (cases[i].payload_pages) {
            header->payload_bytes = cases[i].payload_pages * KVT_PAGE_BYTES - 200;
            header->record_bytes = kvt_record_bytes(header->payload_bytes);
        }
        begin(&o);
        assert_int_equal(found(1, 1, NULL), 0);
        assert_int_equal(rig_stats(&rig).remote_refused, 1);
        assert_int_equal(put(1, 1), 1);
        rig_settle(&rig);
        assert_int_equal(rig_stats(&rig).remote_put_exists, cases[i].stays);
        assert_int_equal(rig_stats(&rig).remote_put, !cases[i].stays);
        rig_close(&rig);
        mem_tier_free(&tier);
    }
}

/* Another key's record, a damaged header, and one of another length. */
static void test_other_records_are_refused(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    struct mem_object *objects = tier.objects;
    struct kvt_full_key swap;

    (void)state;
    elsewhere(1, 3);
    swap = objects[0].key;
    objects[0].key = objects[1].key;
    objects[1].key = swap;
    objects[2].record[2000] ^= 1;
    begin(&o);
    assert_int_equal(found(1, 1, NULL), 0);
    assert_int_equal(rig_stats(&rig).remote_refused, 1);
    assert_int_equal(found(3, 1, NULL), 1);
    assert_int_equal(get(3, 1), 0);
    assert_int_equal(rig_stats(&rig).remote_get_bad, 1);
}

/* It was there when it was looked for. */
static void test_gone_between_lookup_and_load(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);

    (void)state;
    elsewhere(1, 4);
    begin(&o);
    assert_int_equal(found(1, 4, NULL), 4);
    mem_tier_free(&tier);
    assert_int_equal(get(1, 4), 0);
    assert_true(rig_stats(&rig).remote_get_gone >= 1);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(get(1, 4), 4);
}

static uint64_t send_lookup(uint64_t first, uint32_t n)
{
    struct kvt_msg_keys *msg = calloc(1, sizeof(*msg) + n * sizeof(msg->keys[0]));
    uint64_t cookie = 1000000 + first;

    assert_non_null(msg);
    msg->msg = (struct kvt_msg){.bytes = (uint32_t)(sizeof(*msg) + n * sizeof(msg->keys[0])),
                                .op = KVT_OP_LOOKUP,
                                .cookie = cookie,
                                .ns = ns,
                                .count = n};
    for (uint32_t i = 0; i < n; i++)
        msg->keys[i] = rig_key(first + i);
    assert_int_equal(rig_send(&rig, 1, msg), 0);
    free(msg);
    rig_settle(&rig);
    return cookie;
}

/* A tier that hangs: a look-up is answered a little after its deadline, the next one at once. */
static void test_a_hanging_lookup_is_answered(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    uint64_t cookie;

    (void)state;
    elsewhere(1, 4);
    begin(&o);
    remote.hold = true;
    cookie = send_lookup(1, 4);
    assert_null(rig_reply(&rig, cookie));
    rig_advance(&rig, RIG_REMOTE_DEADLINE_NS + SECOND / 5);
    assert_non_null(rig_reply(&rig, cookie));
    assert_int_equal(rig_reply(&rig, cookie)->status, 0);
    assert_int_equal(rig_stats(&rig).remote_late, 1);
    cookie = send_lookup(101, 4);
    assert_non_null(rig_reply(&rig, cookie)); /* it is left alone for a second */
    remote.hold = false;
    rig_advance(&rig, 2 * SECOND);
    assert_int_equal(found(1, 4, NULL), 4);
}

/* Four blocks are known to be there, and reads of them hang. */
static void begin_held(const struct rig_options *o)
{
    elsewhere(1, 4);
    begin(o);
    assert_int_equal(found(1, 4, NULL), 4);
    remote.hold = true;
}

/* A read that hangs: the load misses, the slot is kept until the read has come back, and what it
 * brings then harms nobody. */
static void test_a_hanging_read_is_given_up(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    uint64_t numbers[4] = {1, 2, 3, 4}, cookie;

    (void)state;
    begin_held(&o);
    cookie = rig_acquire(&rig, 1, ns, numbers, 4, 0, INT64_MAX);
    rig_settle(&rig);
    assert_null(rig_reply(&rig, cookie));
    rig_advance(&rig, RIG_REMOTE_DEADLINE_NS + SECOND / 5);
    assert_non_null(rig_reply(&rig, cookie));
    assert_int_equal(rig_reply(&rig, cookie)->status, KVT_E_MISS);
    assert_int_equal(rig_stats(&rig).dram_bytes_used, 4 * BLOCK); /* what is written to still */
    assert_int_equal(put(1, 4), 4);
    remote.hold = false;
    rig_advance(&rig, SECOND);
    assert_int_equal(rig_stats(&rig).dram_bytes_used, 4 * BLOCK);
    assert_int_equal(get(1, 4), 4);
}

/* A load whose own deadline comes first, and one that is cancelled. */
static void test_loads_end_while_reads_go_on(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    uint64_t numbers[4] = {1, 2, 3, 4}, cookie;

    (void)state;
    begin_held(&o);
    cookie = rig_acquire(&rig, 1, ns, numbers, 4, 0, rig.now_ns + SECOND / 100);
    rig_advance(&rig, SECOND / 50);
    assert_non_null(rig_reply(&rig, cookie));
    assert_int_equal(rig_reply(&rig, cookie)->status, KVT_E_DEADLINE);
    rig_forget_replies(&rig);
    cookie = rig_acquire(&rig, 1, ns, numbers, 4, 0, INT64_MAX);
    rig_settle(&rig);
    rig_cancel(&rig, 1, cookie);
    remote.hold = false;
    rig_settle(&rig);
    assert_int_equal(found(1, 4, NULL), 4);
    assert_int_equal(get(1, 4), 4);
    assert_int_equal(remote.gets, 4); /* what was read for the first one was kept */
}

static void test_a_tier_that_fails_or_is_full_of_work(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);

    (void)state;
    elsewhere(1, 4);
    begin(&o);
    remote.fail = -EHOSTDOWN;
    assert_int_equal(found(1, 4, NULL), 0);
    assert_int_equal(rig_stats(&rig).remote_unknown, 4);
    assert_int_equal(rig_stats(&rig).remote_lookup_fail, 1);
    assert_int_equal(rig_stats(&rig).remote_nodes_down, 1);
    remote.fail = 0;
    assert_int_equal(found(1, 4, NULL), 4); /* not known to be absent: asked again */
    remote.fail = -EIO;
    assert_int_equal(get(1, 4), 0);
    assert_true(rig_stats(&rig).remote_get_fail >= 1);
    remote.fail = 0;
    rig_advance(&rig, SECOND + 1);
    remote.refuse = true;
    assert_int_equal(found(1, 4, NULL), 0);
    remote.refuse = false;
    assert_int_equal(found(1, 4, NULL), 4);
    remote.refuse = true;
    assert_int_equal(get(1, 4), 0);
    assert_int_equal(rig_stats(&rig).remote_busy, 1);
    remote.refuse = false;
    assert_int_equal(get(1, 4), 4);
}

/* The store closes while there is work under way: whoever waits is answered. */
static void test_close_answers_lookups(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);
    uint64_t numbers[4] = {1, 2, 3, 4}, cookie, load;

    (void)state;
    elsewhere(1, 4);
    begin(&o);
    assert_int_equal(found(1, 4, NULL), 4);
    remote.hold = true;
    load = rig_acquire(&rig, 1, ns, numbers, 4, 0, INT64_MAX);
    cookie = send_lookup(101, 4);
    kvt_store_close(rig.store, 1);
    rig.store = NULL;
    assert_true(remote.stopped);
    assert_non_null(rig_reply(&rig, cookie));
    assert_int_equal(rig_reply(&rig, load)->status, KVT_E_CLOSED);
    rig_close(&rig);
}

/* ---- puts ---------------------------------------------------------------------------------- */

static void test_what_is_used_twice_is_put_once(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    rig_settle(&rig);
    assert_int_equal(remote.puts, 0);
    assert_int_equal(get(1, 2), 2);
    rig_settle(&rig);
    assert_int_equal(remote.puts, 2);
    assert_int_equal(rig_stats(&rig).remote_put, 2);
    assert_int_equal(rig_stats(&rig).remote_put_bytes, 2 * BLOCK);
    assert_int_equal(get(1, 4), 4);
    rig_settle(&rig);
    assert_int_equal(remote.puts, 4);
    assert_int_equal(get(1, 4), 4);
    rig_settle(&rig);
    assert_int_equal(remote.puts, 4);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
}

static void test_all_and_off(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    rig_settle(&rig);
    assert_int_equal(remote.puts, 4);
    rig_close(&rig);
    o.remote_write = OFF;
    begin(&o);
    assert_int_equal(found(1, 4, NULL), 4);
    assert_int_equal(get(1, 4), 4);
    assert_int_equal(get(1, 4), 4);
    rig_settle(&rig);
    assert_int_equal(remote.puts, 0); /* it came from there */
}

/* Somebody else was first: one copy, and nothing is tried again. */
static void test_two_stores_one_copy(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_SECOND);

    (void)state;
    elsewhere(1, 4);
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    assert_int_equal(get(1, 4), 4);
    rig_settle(&rig);
    assert_int_equal(rig_stats(&rig).remote_put_exists, 4);
    assert_int_equal(tier.count, 4);
    assert_int_equal(get(1, 4), 4);
    rig_settle(&rig);
    assert_int_equal(remote.puts, 4);
}

/* Ours is of a higher level: it takes the place of the one that is there. */
static void test_a_better_record_replaces(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
    uint64_t one = 1;
    struct kvt_full_key key;

    (void)state;
    elsewhere(1, 1);
    key = tier.objects[0].key;
    begin(&o);
    assert_int_equal(rig_lookup(&rig, ns, &one, 1, KVT_LEVEL_RAW, NULL), 0);
    assert_int_equal(rig_put(&rig, ns, &one, 1, 0, RAW, false, NULL), 1);
    rig_settle(&rig);
    assert_int_equal(rig_stats(&rig).remote_put, 1);
    assert_int_equal(mem_tier_find(&tier, &key)->record_bytes, 8 * 4096);
    rig_close(&rig);
    begin(&o);
    assert_int_equal(rig_lookup(&rig, ns, &one, 1, KVT_LEVEL_RAW, NULL), 1);
    assert_int_equal(rig_get(&rig, ns, &one, 1, KVT_LEVEL_RAW, NULL, NULL), 1);
}

/* A full tier is left alone for a second, and so is one that fails. */
static void test_no_room_there(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);

    (void)state;
    tier.room = 2;
    begin(&o);
    o.remote_queue_bytes = BLOCK;
    assert_int_equal(put(1, 6), 6);
    rig_settle(&rig);
    assert_int_equal(tier.count, 2);
    assert_true(rig_stats(&rig).remote_put_full >= 1);
    tier.room = 0;
    assert_int_equal(put(11, 2), 2);
    rig_settle(&rig);
    assert_int_equal(tier.count, 2);
    rig_advance(&rig, SECOND + 1);
    assert_true(tier.count > 2);
    assert_int_equal(rig_stats(&rig).remote_queue, 0);
}

/* Puts in flight are bounded, and hold their blocks; queued ones do not. */
static void test_puts_are_bounded(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);

    (void)state;
    o.remote_queue_bytes = 4 * BLOCK;
    begin(&o);
    remote.hold = true;
    assert_int_equal(put(1, 32), 32);
    rig_settle(&rig);
    assert_int_equal(rig_stats(&rig).dram_pins, 4);
    assert_int_equal(rig_stats(&rig).remote_queue, 32);
    for (uint64_t first = 101; first < 401; first += 100) /* the queued ones leave DRAM for these */
        assert_int_equal(put(first, 30), 30);
    remote.hold = false;
    rig_settle(&rig);
    assert_true(rig_stats(&rig).remote_put_gone > 0);
    assert_int_equal(rig_stats(&rig).remote_put + rig_stats(&rig).remote_put_gone, 122);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
}

/* ---- purge --------------------------------------------------------------------------------- */

static void test_a_purge_reaches_there(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
    uint64_t two[2] = {2, 3};

    (void)state;
    elsewhere(1, CHAIN);
    begin(&o);
    assert_int_equal(found(1, CHAIN, NULL), CHAIN);
    (void)rig_keys(&rig, KVT_OP_PURGE, ns, two, 2);
    assert_int_equal(tier.count, CHAIN - 2);
    assert_int_equal(rig_stats(&rig).remote_purged, 2);
    assert_int_equal(found(1, CHAIN, NULL), 1);
    (void)rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0);
    assert_int_equal(tier.count, 0);
    rig_advance(&rig, SECOND + 1);
    assert_int_equal(found(1, CHAIN, NULL), 0);
}

/* A put that is on its way when its block is purged does not outlive the purge. */
static void test_a_purge_waits_for_puts(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
    struct kvt_msg_keys purge = {.msg = {.bytes = sizeof(purge), .op = KVT_OP_PURGE, .cookie = 77}};

    (void)state;
    begin(&o);
    remote.hold = true;
    assert_int_equal(put(1, 4), 4);
    rig_settle(&rig);
    purge.msg.ns = ns;
    assert_int_equal(rig_send(&rig, 1, &purge), 0);
    rig_settle(&rig);
    assert_null(rig_reply(&rig, 77));
    remote.hold = false;
    rig_settle(&rig);
    assert_non_null(rig_reply(&rig, 77));
    assert_int_equal(rig_reply(&rig, 77)->status, 4);
    assert_int_equal(remote.puts, 4);
    assert_int_equal(tier.count, 0);
}

/* A purge that cannot reach there says so; what is here is gone all the same. */
static void test_a_purge_that_fails_there_says_so(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);

    (void)state;
    begin(&o);
    assert_int_equal(put(1, 4), 4);
    rig_settle(&rig);
    remote.fail = -EHOSTDOWN;
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), -EHOSTDOWN);
    assert_int_equal(rig_stats(&rig).remote_purge_fail, 1);
    assert_int_equal(get(1, 4), 0);
    remote.fail = 0;
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), 0);
    assert_int_equal(tier.count, 0);
}

static uint64_t send_purge(uint64_t cookie)
{
    struct kvt_msg_keys purge = {
        .msg = {.bytes = sizeof(purge), .op = KVT_OP_PURGE, .cookie = cookie, .ns = ns}};

    assert_int_equal(rig_send(&rig, 1, &purge), 0);
    rig_settle(&rig);
    return cookie;
}

/* A tier that hangs: a purge is given up after ten seconds, and says so; so does the next one,
 * which cannot even be handed in, and one that would have to wait for a put that hangs. */
static void test_a_purge_of_a_tier_that_hangs(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);

    (void)state;
    begin(&o);
    remote.hold = true;
    (void)send_purge(70);
    rig_advance(&rig, 9 * SECOND);
    rig_settle(&rig);
    assert_null(rig_reply(&rig, 70));
    rig_advance(&rig, 2 * SECOND);
    rig_settle(&rig);
    assert_non_null(rig_reply(&rig, 70));
    assert_int_equal(rig_reply(&rig, 70)->status, KVT_E_DEADLINE);
    (void)send_purge(71);
    assert_non_null(rig_reply(&rig, 71));
    assert_int_equal(rig_reply(&rig, 71)->status, -EAGAIN);
    assert_int_equal(rig_stats(&rig).remote_purge_fail, 2);
    remote.hold = false;
    rig_settle(&rig);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), 0);
    remote.hold = true;
    assert_int_equal(put(1, 4), 4);
    rig_settle(&rig);
    (void)send_purge(72);
    assert_null(rig_reply(&rig, 72));
    rig_advance(&rig, 11 * SECOND);
    rig_settle(&rig);
    assert_non_null(rig_reply(&rig, 72));
    assert_int_equal(rig_reply(&rig, 72)->status, KVT_E_DEADLINE);
    remote.hold = false;
    rig_settle(&rig);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), 0);
    assert_int_equal(tier.count, 0);
}

/* One that removes something all the while goes on: a large namespace takes longer than that. */
static void test_a_purge_that_takes_long(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);

    (void)state;
    begin(&o);
    remote.hold = true;
    (void)send_purge(70);
    assert_non_null(remote.queue);
    for (int i = 0; i < 10; i++) {
        rig_advance(&rig, 9 * SECOND);
        kvt_remote_removed(remote.queue, 1);
        rig_settle(&rig);
        assert_null(rig_reply(&rig, 70));
    }
    remote.hold = false;
    rig_settle(&rig);
    assert_non_null(rig_reply(&rig, 70));
    assert_int_equal(rig_reply(&rig, 70)->status, 0);
    remote.hold = true; /* but not for ever */
    (void)send_purge(71);
    for (int i = 0; i < 80 && !rig_reply(&rig, 71); i++) {
        rig_advance(&rig, 9 * SECOND);
        kvt_remote_removed(remote.queue, 1);
        rig_settle(&rig);
    }
    assert_non_null(rig_reply(&rig, 71));
    assert_int_equal(rig_reply(&rig, 71)->status, KVT_E_DEADLINE);
    remote.hold = false;
    rig_settle(&rig);
}

/* A read under way of what is purged grants nothing. */
static void test_a_purge_during_a_read(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_OFF + 1);
    uint64_t numbers[4] = {1, 2, 3, 4}, cookie;

    (void)state;
    begin_held(&o);
    cookie = rig_acquire(&rig, 1, ns, numbers, 4, 0, INT64_MAX);
    rig_settle(&rig);
    remote.hold = false;
    (void)rig_keys(&rig, KVT_OP_PURGE, ns, numbers, 4);
    assert_non_null(rig_reply(&rig, cookie) ? rig_reply(&rig, cookie) : (void *)&rig);
    assert_int_equal(tier.count, 0);
    assert_int_equal(get(1, 4), 0);
    assert_int_equal(found(1, 4, NULL), 0);
}

/* While a purge is on its way there, what it names is not had from there again: it would be here,
 * younger than the purge, when the answer says that it is gone. Whole: of the namespace. */
static void purged_and_asked_for(bool whole)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
    _Alignas(8) uint8_t message[sizeof(struct kvt_msg_keys) + 4 * sizeof(struct kvt_msg_key)] = {0};
    struct kvt_msg_keys *purge = (struct kvt_msg_keys *)(void *)message;
    uint64_t numbers[CHAIN], asked;

    elsewhere(1, CHAIN);
    begin(&o);
    remote.hold_drops = true;
    purge->msg.bytes = (uint32_t)(whole ? sizeof(*purge) : sizeof(message));
    purge->msg.op = KVT_OP_PURGE;
    purge->msg.cookie = 70;
    purge->msg.ns = ns;
    purge->msg.count = whole ? 0 : 4;
    for (uint32_t i = 0; !whole && i < 4; i++)
        purge->keys[i] = rig_key(3 + i);
    assert_int_equal(rig_send(&rig, 1, purge), 0);
    rig_settle(&rig);
    assert_null(rig_reply(&rig, 70));
    asked = remote.probed;
    assert_int_equal(found(1, CHAIN, NULL), whole ? 0 : 2);
    assert_int_equal(remote.probed - asked, whole ? 0 : 2);
    numbers_from(1, CHAIN, numbers);
    (void)rig_acquire(&rig, 1, ns, numbers, CHAIN, 0, INT64_MAX);
    (void)rig_acquire(&rig, 1, ns, &numbers[2], 1, 0, INT64_MAX);
    rig_settle(&rig);
    assert_int_equal(rig_stats(&rig).load_granted_remote, whole ? 0 : 2);
    assert_int_equal(rig_stats(&rig).load_miss, whole ? CHAIN + 1 : CHAIN - 2 + 1);
    assert_null(rig_reply(&rig, 70));
    remote.hold_drops = false;
    rig_settle(&rig);
    assert_non_null(rig_reply(&rig, 70));
    assert_int_equal(rig_reply(&rig, 70)->status, 0);
    assert_int_equal(tier.count, whole ? 0 : CHAIN - 4);
    assert_int_equal(found(1, CHAIN, NULL), whole ? 0 : 2);
    assert_int_equal(get(1, CHAIN), whole ? 0 : 2);
    rig_close(&rig);
    mem_tier_free(&tier);
}

static void test_a_purge_is_not_undone_by_a_load(void **state)
{
    (void)state;
    purged_and_asked_for(false);
    purged_and_asked_for(true);
}

/* A question that was asked before the purge, and is answered while it is on its way. */
static void test_a_purge_during_a_lookup(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
    uint64_t cookie;

    (void)state;
    elsewhere(1, 1);
    begin(&o);
    remote.hold = remote.hold_drops = true;
    cookie = send_lookup(1, 1);
    assert_null(rig_reply(&rig, cookie));
    (void)send_purge(70);
    remote.hold = false;
    rig_settle(&rig);
    assert_non_null(rig_reply(&rig, cookie));
    assert_int_equal(rig_reply(&rig, cookie)->status, 0);
    assert_null(rig_reply(&rig, 70));
    remote.hold_drops = false;
    rig_settle(&rig);
    assert_non_null(rig_reply(&rig, 70));
    assert_int_equal(rig_reply(&rig, 70)->status, 0);
    assert_int_equal(get(1, 1), 0);
}

/* What a put that was waited for has brought there is not loaded from there before the DROP. */
static void test_a_load_between_a_put_and_its_purge(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
    uint64_t one = 1;

    (void)state;
    begin(&o);
    remote.hold = remote.hold_drops = true;
    assert_int_equal(put(1, 4), 4);
    rig_settle(&rig);
    (void)send_purge(70);
    remote.hold = false;
    rig_settle(&rig);
    assert_int_equal(tier.count, 4);
    (void)rig_acquire(&rig, 1, ns, &one, 1, 0, INT64_MAX);
    rig_settle(&rig);
    assert_int_equal(rig_stats(&rig).load_miss, 1);
    assert_int_equal(remote.gets, 0);
    remote.hold_drops = false;
    rig_settle(&rig);
    assert_non_null(rig_reply(&rig, 70));
    assert_int_equal(rig_reply(&rig, 70)->status, 4);
    assert_int_equal(tier.count, 0);
}

/* What a namespace says of how long its blocks live goes with them, and with what asks for them;
 * one that says nothing leaves it to the tier. */
static void test_a_namespace_takes_its_time_to_live_along(void **state)
{
    struct rig_options o = options(KVT_REMOTE_WRITE_ALL);
    uint64_t other = 9;
    uint32_t silent;

    (void)state;
    mem_remote_init(&remote, &tier);
    rig_open(&rig, &o, NULL);
    rig.ns_ttl_ns = 5 * SECOND;
    ns = rig_ns(&rig, 1, pages);
    rig.ns_ttl_ns = 0;
    silent = rig_ns(&rig, 2, pages);
    assert_int_equal(put(1, CHAIN), CHAIN);
    rig_settle(&rig);
    assert_int_equal(remote.ttl_ns[KVT_REMOTE_PUT], 5 * SECOND);
    assert_int_equal(rig_put(&rig, silent, &other, 1, 0, KV4, false, NULL), 1);
    rig_settle(&rig);
    assert_int_equal(remote.puts, CHAIN + 1);
    assert_int_equal(remote.ttl_ns[KVT_REMOTE_PUT], 0);
    rig_close(&rig);

    mem_remote_init(&remote, &tier);
    rig_open(&rig, &o, NULL);
    rig.ns_ttl_ns = 7 * SECOND;
    ns = rig_ns(&rig, 1, pages);
    rig.ns_ttl_ns = 0;
    silent = rig_ns(&rig, 2, pages);
    assert_int_equal(found(1, CHAIN, NULL), CHAIN);
    assert_int_equal(remote.ttl_ns[KVT_REMOTE_PROBE], 7 * SECOND);
    assert_int_equal(get(1, CHAIN), CHAIN);
    assert_int_equal(remote.ttl_ns[KVT_REMOTE_GET], 7 * SECOND);
    assert_int_equal(rig_lookup(&rig, silent, &other, 1, 0, NULL), 1);
    assert_int_equal(remote.ttl_ns[KVT_REMOTE_PROBE], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_what_another_store_put_is_loaded, tear_down),
        cmocka_unit_test_teardown(test_absent_ones_are_remembered_for_a_second, tear_down),
        cmocka_unit_test_teardown(test_a_long_chain_takes_two_rounds, tear_down),
        cmocka_unit_test_teardown(test_2048_keys_in_three_rounds_in_every_history, tear_down),
        cmocka_unit_test_teardown(test_a_chain_over_both, tear_down),
        cmocka_unit_test_teardown(test_levels_and_loads_without_lookup, tear_down),
        cmocka_unit_test_teardown(test_it_goes_to_disk_and_survives, tear_down),
        cmocka_unit_test_teardown(test_wrong_bytes_are_a_miss, tear_down),
        cmocka_unit_test_teardown(test_damaged_records_are_replaced, tear_down),
        cmocka_unit_test_teardown(test_records_of_others_are_left_alone, tear_down),
        cmocka_unit_test_teardown(test_other_records_are_refused, tear_down),
        cmocka_unit_test_teardown(test_gone_between_lookup_and_load, tear_down),
        cmocka_unit_test_teardown(test_a_hanging_lookup_is_answered, tear_down),
        cmocka_unit_test_teardown(test_a_hanging_read_is_given_up, tear_down),
        cmocka_unit_test_teardown(test_loads_end_while_reads_go_on, tear_down),
        cmocka_unit_test_teardown(test_a_tier_that_fails_or_is_full_of_work, tear_down),
        cmocka_unit_test_teardown(test_close_answers_lookups, tear_down),
        cmocka_unit_test_teardown(test_what_is_used_twice_is_put_once, tear_down),
        cmocka_unit_test_teardown(test_all_and_off, tear_down),
        cmocka_unit_test_teardown(test_two_stores_one_copy, tear_down),
        cmocka_unit_test_teardown(test_a_better_record_replaces, tear_down),
        cmocka_unit_test_teardown(test_no_room_there, tear_down),
        cmocka_unit_test_teardown(test_puts_are_bounded, tear_down),
        cmocka_unit_test_teardown(test_a_purge_reaches_there, tear_down),
        cmocka_unit_test_teardown(test_a_purge_waits_for_puts, tear_down),
        cmocka_unit_test_teardown(test_a_purge_that_fails_there_says_so, tear_down),
        cmocka_unit_test_teardown(test_a_purge_of_a_tier_that_hangs, tear_down),
        cmocka_unit_test_teardown(test_a_purge_that_takes_long, tear_down),
        cmocka_unit_test_teardown(test_a_purge_during_a_read, tear_down),
        cmocka_unit_test_teardown(test_a_purge_is_not_undone_by_a_load, tear_down),
        cmocka_unit_test_teardown(test_a_purge_during_a_lookup, tear_down),
        cmocka_unit_test_teardown(test_a_load_between_a_put_and_its_purge, tear_down),
        cmocka_unit_test_teardown(test_a_namespace_takes_its_time_to_live_along, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
