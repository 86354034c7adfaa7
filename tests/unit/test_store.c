/* Goal: every message of the store does what message.h says, and the reported cases hold.
 * Method: a rig without threads (support/store_rig.h): messages by call, time by hand, disk in
 * memory behind a fault injector; each load is compared byte for byte, and the store's invariants
 * are checked after each step.
 * CASES C2 C8 C9 C10 (store part) C22 C25 C26 C33 C34 C52 C54 C58 C59.
 */
#include "support/store_rig.h"

#include <malloc.h>
#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "store/index.h"
#include "store/store_impl.h"
#include "support/fault_io.h"

/* pages of a record by map: 2 kv4, 5 kv8, 6 raw */
static const uint32_t one_size[7] = {0, 0, 4, 0, 0, 0, 0};
static const uint32_t pages[7] = {0, 0, 4, 0, 0, 8, 16};
enum { KV4 = 2, KV8 = 5, RAW = 6, CLIENT = 1, OTHER = 2, MANY = 512 };

static uint64_t many[MANY]; /* 1000, 1001, ... */

static int numbers_setup(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < MANY; i++)
        many[i] = 1000 + i;
    return 0;
}

static void test_put_get(void **state)
{
    struct rig_options options = rig_defaults();
    int32_t statuses[12];
    uint8_t tiers[12];
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_lookup(&rig, ns, many, 12, 0, tiers), 0);
    assert_int_equal(tiers[0], KVT_TIER_MISS);
    assert_int_equal(rig_put(&rig, ns, many, 10, 0, KV4, false, statuses), 10);
    assert_int_equal(rig_lookup(&rig, ns, many, 12, 0, tiers), 10);
    assert_int_equal(tiers[9], KVT_TIER_DRAM);
    assert_int_equal(tiers[10], KVT_TIER_MISS);
    assert_int_equal(rig_get(&rig, ns, many, 12, 0, statuses, NULL), 10);
    assert_int_equal(statuses[10], KVT_E_MISS);
    assert_int_equal(statuses[11], KVT_E_MISS);
    assert_int_equal(rig_put(&rig, ns, many, 12, 0, KV4, false, statuses), 2);
    assert_int_equal(statuses[0], KVT_E_EXISTS);
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(rig_stats(&rig).disk_blocks, 12);
    rig_reopen(&rig);
    assert_int_equal(rig_filed_stat(&rig, "disk.blocks"), 12);
    assert_true(rig_filed_stat(&rig, "disk.bytes_used") > 12 * 4 * 4096);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_lookup(&rig, ns, many, 12, 0, tiers), 12);
    assert_int_equal(tiers[0], KVT_TIER_DISK);
    assert_int_equal(rig_get(&rig, ns, many, 12, 0, statuses, NULL), 12);
    assert_int_equal(rig_stats(&rig).load_granted_disk, 12);
    assert_int_equal(rig_lookup(&rig, ns, many, 12, 0, tiers), 12);
    assert_int_equal(tiers[0], KVT_TIER_DRAM); /* promoted */
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_close(&rig);
}

static void test_levels(void **state)
{
    struct rig_options options = rig_defaults();
    int32_t status;
    uint8_t map;
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_put(&rig, ns, many, 1, 0, KV4, false, NULL), 1);
    assert_int_equal(rig_lookup(&rig, ns, many, 1, KV8, NULL), 0);
    assert_int_equal(rig_stats(&rig).lookup_miss_level, 1);
    assert_int_equal(rig_get(&rig, ns, many, 1, KV8, &status, NULL), 0);
    assert_int_equal(status, KVT_E_MISS);
    assert_int_equal(rig_put(&rig, ns, many, 1, 0, KV8, false, &status), 0);
    assert_int_equal(status, KVT_E_EXISTS); /* not asked to replace */
    assert_int_equal(rig_put(&rig, ns, many, 1, 0, KV8, true, NULL), 1);
    assert_int_equal(rig_get(&rig, ns, many, 1, KV8, &status, &map), 1);
    assert_int_equal(map, KV8);
    assert_int_equal(rig_put(&rig, ns, many, 1, 0, KV4, true, &status), 0);
    assert_int_equal(status, KVT_E_EXISTS); /* never downwards */
    assert_int_equal(rig_stats(&rig).commit_replaced, 1);
    assert_int_equal(rig_flush(&rig), 0);
    rig_crash(&rig); /* both records are on disk: the later one counts */
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_get(&rig, ns, many, 1, 0, &status, &map), 1);
    assert_int_equal(map, KV8);
    rig_close(&rig);
}

/* Cooling: a lower level takes the place of a higher one, where it was asked for; readers of the
 * old record finish undisturbed; after a crash whichever is on disk with the higher sequence is
 * there: the old record as long as the new one was not written. */
static void test_cool(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entry;
    uint64_t sum;
    int32_t status;
    uint8_t got[2];
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_put(&rig, ns, many, 2, 0, KV8, KVT_REPLACE_NEW, NULL), 2);
    assert_int_equal(rig_flush(&rig), 0);
    /* until its COMMIT the better record stays, and an ABORT changes nothing */
    rig_alloc(&rig, 1, ns, many, 1, 0, KV4, KVT_REPLACE_COOL, &entry);
    assert_int_equal(entry.status, 0);
    assert_int_equal(rig_get(&rig, ns, many, 1, KV8, NULL, got), 1);
    assert_int_equal(got[0], KV8);
    rig_abort(&rig, 1, &entry);
    assert_int_equal(rig_get(&rig, ns, many, 2, KV8, NULL, NULL), 2);
    /* a reader holds the old slot while the new one is committed */
    rig.keep = true;
    assert_int_equal(rig_get(&rig, ns, many, 1, KV8, NULL, NULL), 1);
    rig.keep = false;
    rig_alloc(&rig, 1, ns, many, 1, 0, KV4, KVT_REPLACE_COOL, &entry);
    sum = rig_fill(&rig, ns, many[0], 0, KV4, &entry);
    assert_int_equal(rig_commit(&rig, 1, &entry, sum), 0);
    assert_int_equal(rig_stats(&rig).commit_cooled, 1);
    assert_int_equal(rig_stats(&rig).dram_pins > 0, 1);
    assert_int_equal(rig_get(&rig, ns, many, 2, 0, NULL, got), 2);
    assert_int_equal(got[0], KV4);
    rig_release_all(&rig, 1);
    rig_settle(&rig);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    /* down again, sideways and up: there is nothing to cool */
    assert_int_equal(rig_put(&rig, ns, many, 1, 0, KV4, KVT_REPLACE_COOL, &status), 0);
    assert_int_equal(status, KVT_E_EXISTS);
    assert_int_equal(rig_put(&rig, ns, many, 1, 0, KV8, KVT_REPLACE_COOL, &status), 0);
    assert_int_equal(status, KVT_E_EXISTS);
    assert_int_equal(rig_put(&rig, ns, many + 2, 1, many[1], KV4, KVT_REPLACE_COOL, NULL), 1);
    /* both are on disk: the later one counts; block 1 was not touched */
    assert_int_equal(rig_flush(&rig), 0);
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_lookup(&rig, ns, many, 3, 0, NULL), 3);
    assert_int_equal(rig_lookup(&rig, ns, many, 1, KV8, NULL), 0);
    assert_int_equal(rig_lookup(&rig, ns, many + 1, 1, KV8, NULL), 1);
    rig_close(&rig);
}

/* A crash at any moment of writing the cooled records: the old one or the new one is there, whole;
 * never neither, and never the old one where a flush had covered the new one. */
static void test_cool_crash(void **state)
{
    struct rig_options options = rig_defaults();
    bool old_seen = false, new_seen = false;

    (void)state;
    options.write_queue_bytes = 1u << 20;
    for (unsigned ended = 0; ended <= 12; ended++) {
        uint8_t cooled[8], map;
        struct rig rig;
        uint32_t ns;

        rig_open(&rig, &options, NULL);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(rig_put(&rig, ns, many, 8, 0, KV8, KVT_REPLACE_NEW, NULL), 8);
        assert_int_equal(rig_flush(&rig), 0);
        for (uint32_t i = 0; i < 8; i += 2) { /* a write for each: they are not one batch */
            rig_hold(&rig, true);
            assert_int_equal(
                rig_put(&rig, ns, many + i, 1, i ? many[i - 1] : 0, KV4, KVT_REPLACE_COOL, NULL),
                1);
            rig_advance(&rig, 10000000);
            if (ended > i)
                rig_release_io(&rig, ended - i, (ended & 1) != 0);
        }
        rig_crash(&rig);
        rig_hold(&rig, false);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(rig_get(&rig, ns, many, 8, 0, NULL, cooled), 8);
        for (uint32_t i = 0; i < 8; i++) {
            assert_true(cooled[i] == KV8 || (i % 2 == 0 && cooled[i] == KV4));
            old_seen |= cooled[i] == KV8 && i % 2 == 0;
            new_seen |= cooled[i] == KV4;
        }
        assert_int_equal(rig_put(&rig, ns, many, 1, 0, KV4, KVT_REPLACE_COOL, NULL),
                         cooled[0] == KV8);
        assert_int_equal(rig_flush(&rig), 0);
        rig_crash(&rig);
        ns = rig_ns(&rig, 1, pages);
        assert_int_equal(rig_get(&rig, ns, many, 1, 0, NULL, &map), 1);
        assert_int_equal(map, KV4);
        rig_close(&rig);
    }
    assert_true(new_seen);
    printf("           old record seen after a crash: %s\n", old_seen ? "yes" : "no");
}

/* Two clients race for one key. Whoever allocated before the last COMMIT has lost; a COOL that
 * comes last takes the place of a higher level, never of a lower one. */
static void test_cool_races(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry cool, raise;
    uint64_t sum;
    struct rig rig;
    uint32_t ns;
    uint8_t map;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_put(&rig, ns, many, 1, 0, KV8, KVT_REPLACE_NEW, NULL), 1);
    rig_alloc(&rig, 1, ns, many, 1, 0, KV4, KVT_REPLACE_COOL, &cool);
    rig_alloc(&rig, 2, ns, many, 1, 0, RAW, KVT_REPLACE_RAISE, &raise);
    sum = rig_fill(&rig, ns, many[0], 0, RAW, &raise);
    assert_int_equal(rig_commit(&rig, 2, &raise, sum), 0);
    sum = rig_fill(&rig, ns, many[0], 0, KV4, &cool);
    assert_int_equal(rig_commit(&rig, 1, &cool, sum), KVT_E_EXISTS);
    assert_int_equal(rig_get(&rig, ns, many, 1, 0, NULL, &map), 1);
    assert_int_equal(map, RAW);
    /* allocated for a block that is not there; a lower one is committed first */
    rig_alloc(&rig, 1, ns, many + 1, 1, many[0], KV8, KVT_REPLACE_COOL, &cool);
    assert_int_equal(cool.status, 0);
    assert_int_equal(rig_put(&rig, ns, many + 1, 1, many[0], KV4, KVT_REPLACE_NEW, NULL), 1);
    sum = rig_fill(&rig, ns, many[1], many[0], KV8, &cool);
    assert_int_equal(rig_commit(&rig, 1, &cool, sum), KVT_E_EXISTS);
    assert_int_equal(rig_get(&rig, ns, many, 2, 0, NULL, NULL), 2);
    rig_close(&rig);
}

/* Two clients fill one key: the first COMMIT wins, the other's slot is freed. A slot from before
 * the last COMMIT has lost, whatever its level. */
static void test_races(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry a, b;
    uint64_t sum_a, sum_b;
    uint8_t tier;
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    rig_alloc(&rig, CLIENT, ns, many, 1, 0, RAW, true, &a);
    rig_alloc(&rig, OTHER, ns, many, 1, 0, KV4, true, &b);
    assert_int_equal(a.status, 0);
    assert_int_equal(b.status, 0);
    assert_int_equal(rig_lookup(&rig, ns, many, 1, 0, &tier), 0);
    assert_int_equal(tier, KVT_TIER_PENDING);
    sum_a = rig_fill(&rig, ns, many[0], 0, RAW, &a);
    sum_b = rig_fill(&rig, ns, many[0], 0, KV4, &b);
    assert_int_equal(rig_commit(&rig, CLIENT, &b, sum_b), KVT_E_STALE); /* not the holder */
    assert_int_equal(rig_commit(&rig, OTHER, &b, sum_b), 0);
    assert_int_equal(rig_commit(&rig, CLIENT, &a, sum_a), KVT_E_EXISTS);
    assert_int_equal(rig_commit(&rig, CLIENT, &a, sum_a), KVT_E_STALE);
    assert_int_equal(rig_stats(&rig).commit_lost, 1);
    assert_int_equal(rig_stats(&rig).dram_blocks, 1);
    assert_int_equal(rig_get(&rig, ns, many, 1, 0, NULL, NULL), 1);
    rig_close(&rig);
}

static void test_bad_commit(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry a;
    uint64_t sum;
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (int bad = 0; bad < 4; bad++) {
        struct kvt_record_header *header;

        rig_alloc(&rig, CLIENT, ns, many, 1, 0, KV4, false, &a);
        sum = rig_fill(&rig, ns, many[0], 0, KV4, &a);
        header = (struct kvt_record_header *)(rig.arena + a.arena_offset);
        header->map = bad == 0 ? KV8 : header->map;
        header->sequence += bad == 1;
        header->key.hash[0] ^= bad == 2;
        header->magic ^= bad == 3;
        assert_int_equal(rig_commit(&rig, CLIENT, &a, sum), KVT_E_CORRUPT);
    }
    assert_int_equal(rig_stats(&rig).commit_bad, 4);
    assert_int_equal(rig_stats(&rig).blocks, 0);
    assert_int_equal(rig_stats(&rig).dram_bytes_used, 0);
    rig_close(&rig);
}

/* Call fn for every record that the medium's segments hold, as stored. */
static uint32_t damage_records(struct rig *rig, uint32_t max, bool header)
{
    static _Alignas(4096) uint8_t page[4096];
    uint32_t done = 0;

    for (uint32_t segment = 0; segment < 64 && done < max; segment++) {
        char name[32];
        int file;
        int64_t size;

        snprintf(name, sizeof(name), "seg-%08x", segment);
        file = rig->io->ops->open(rig->io, name, KVT_IO_OPEN_READ_ONLY);
        if (file < 0)
            continue;
        size = rig->io->ops->size(rig->io, file);
        for (int64_t at = 0; at + 4096 <= size && done < max; at += 4096) {
            uint32_t magic;

            assert_int_equal(kvt_io_read_now(rig->io, file, (uint64_t)at, page, 4096), 4096);
            memcpy(&magic, page, 4);
            if (magic != KVT_RECORD_MAGIC)
                continue;
            assert_int_equal(fault_io_corrupt(rig->io, name, (uint64_t)at + (header ? 9 : 3000), 3),
                             0);
            done++;
        }
        rig->io->ops->close(rig->io, file);
    }
    return done;
}

/* Close, damage records on the medium, open again. */
static uint32_t reopen_damaged(struct rig *rig, uint32_t max)
{
    struct kvt_io *medium = NULL;
    struct rig_options options = rig->options;
    uint32_t done;

    assert_int_equal(rig_flush(rig), 0);
    done = damage_records(rig, max, false);
    assert_int_equal(kvt_io_mem_clone(fault_io_inner(rig->io), &medium), 0);
    rig_close(rig);
    rig_open(rig, &options, medium);
    return done;
}

/* Single blocks, so that one miss does not end a chain. */
static uint32_t get_each(struct rig *rig, uint32_t ns, uint32_t n)
{
    uint32_t good = 0;

    for (uint32_t i = 0; i < n; i++)
        good += rig_get(rig, ns, &many[i], 1, 0, NULL, NULL);
    return good;
}

static void put_each(struct rig *rig, uint32_t ns, uint32_t n, uint8_t map)
{
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(rig_put(rig, ns, &many[i], 1, 0, map, false, NULL), 1);
}

static void test_c2_flipped_bits(void **state)
{
    struct rig_options options = rig_defaults();
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 100, KV4);
    assert_int_equal(reopen_damaged(&rig, 20), 20);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get_each(&rig, ns, 100), 80);
    assert_int_equal(rig_stats(&rig).checksum_fail, 20);
    assert_int_equal(get_each(&rig, ns, 100), 80); /* they are misses now, not tried again */
    assert_int_equal(rig_stats(&rig).checksum_fail, 20);
    rig_close(&rig);
}

/* A record that is not there any more: one miss, then absent, then stored again. C10's store part:
 * what does not match is never granted as good. */
static void test_c8_c10_record_removed(void **state)
{
    struct rig_options options = rig_defaults();
    struct rig rig;
    int32_t status;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 1, KV4);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(damage_records(&rig, 1, true), 1); /* another key stands in the header */
    assert_int_equal(rig_lookup(&rig, ns, many, 1, 0, NULL), 1);
    assert_int_equal(rig_get(&rig, ns, many, 1, 0, &status, NULL), 0);
    assert_int_equal(status, KVT_E_MISS); /* seen by the store: not even granted */
    assert_int_equal(rig_stats(&rig).checksum_fail, 1);
    assert_int_equal(rig_lookup(&rig, ns, many, 1, 0, NULL), 0);
    put_each(&rig, ns, 1, KV4);
    assert_int_equal(rig_get(&rig, ns, many, 1, 0, NULL, NULL), 1);
    rig_close(&rig);
}

static void test_read_error(void **state)
{
    struct fault_rule rule = {
        .ops = FAULT_READ, .name = "seg-", .times = 1, .action = FAULT_FAIL, .error = 5};
    struct rig_options options = rig_defaults();
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 20, KV4);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_true(fault_io_rule(rig.io, &rule) >= 0);
    assert_int_equal(get_each(&rig, ns, 20), 19);
    assert_int_equal(rig_stats(&rig).read_fail, 1);
    rig_close(&rig);
}

/* C9: staging for 4 blocks, 10 keys. A client that decodes and releases gets all of them; one that
 * keeps what it has gets statuses within two seconds, and the rest when it has released. */
static void c9(uint64_t cache_bytes)
{
    struct rig_options options = rig_defaults();
    int32_t statuses[10];
    struct rig rig;
    uint32_t ns, run;

    options.cache_bytes = cache_bytes;
    options.staging_bytes = 4 * 16 * 4096;
    options.write_queue_bytes = 1u << 20;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (int i = 0; i < 10; i++)
        assert_int_equal(rig_put(&rig, ns, &many[i], 1, i ? many[i - 1] : 0, RAW, false, NULL), 1);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_get(&rig, ns, many, 10, 0, statuses, NULL), 10);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    rig.keep = true;
    run = rig_get(&rig, ns, many, 10, 0, statuses, NULL);
    if (!cache_bytes) {
        assert_int_equal(run, 4);
        assert_int_equal(statuses[4], KVT_E_DROPPED);
        assert_int_equal(rig_stats(&rig).load_no_slot, 6);
    }
    assert_true(rig.now_ns < 5000000000);
    rig_release_all(&rig, CLIENT);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig.keep = false;
    assert_int_equal(rig_get(&rig, ns, many, 10, 0, NULL, NULL), 10);
    rig_close(&rig);
}

static void test_c9_staging(void **state)
{
    (void)state;
    c9(0);
    c9(16 * 4096);
}

static uint64_t bytes_of_files(struct kvt_io *io)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < 4096; i++) {
        char name[32];
        int file;

        snprintf(name, sizeof(name), "seg-%08x", i);
        file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);
        if (file < 0)
            continue;
        sum += (uint64_t)io->ops->size(io, file);
        io->ops->close(io, file);
    }
    return sum;
}

static void test_c22_reopen(void **state)
{
    struct rig_options options = rig_defaults();
    struct rig rig;
    uint64_t used;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    rig.check_each_step = false;
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 500, KV4);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get_each(&rig, ns, 500), 500);
    used = rig_stats(&rig).disk_bytes_used;
    assert_in_range(used, bytes_of_files(rig.io), bytes_of_files(rig.io) * 101 / 100 + (64u << 10));
    rig_check(&rig);
    rig_close(&rig);
}

static void test_c25_cap(void **state)
{
    struct rig_options options = rig_defaults();
    struct rig rig;
    uint32_t a, b;

    (void)state;
    options.disk_cap_bytes = 10u << 20;
    rig_open(&rig, &options, NULL);
    rig.check_each_step = false;
    a = rig_ns(&rig, 1, pages);
    b = rig_ns(&rig, 2, pages);
    for (int turn = 0; turn < 2; turn++) {
        for (uint32_t i = 0; i < 200; i++) { /* 12.5 MiB each */
            assert_int_equal(rig_put(&rig, turn ? b : a, &many[i], 1, 0, RAW, false, NULL), 1);
            assert_true(bytes_of_files(rig.io) <= options.disk_cap_bytes);
        }
    }
    assert_true(rig_stats(&rig).evict_disk_blocks > 100);
    assert_true(get_each(&rig, a, 200) < 40); /* A has yielded */
    assert_true(get_each(&rig, b, 200) > 50);
    rig_check(&rig);
    rig_close(&rig);
}

static void test_c26_too_large(void **state)
{
    static const uint32_t large[7] = {0, 0, 4, 0, 0, 0, 400};
    struct rig_options options = rig_defaults();
    uint32_t handle;
    struct rig rig;

    (void)state;
    rig_open(&rig, &options, NULL);
    assert_int_equal(rig_try_ns(&rig, 1, large, &handle), KVT_E_TOO_SMALL);
    assert_int_equal(rig_stats(&rig).dram_bytes_used, 0);
    rig_close(&rig);
    options.disk_cap_bytes = 0; /* DRAM alone: larger than all of it */
    rig_open(&rig, &options, NULL);
    assert_int_equal(rig_try_ns(&rig, 1, large, &handle), KVT_E_TOO_SMALL);
    rig_close(&rig);
}

static void test_layout_mismatch(void **state)
{
    static const uint32_t others[7] = {0, 0, 5, 0, 0, 8, 16};
    struct rig_options options = rig_defaults();
    uint32_t handle, ns;
    struct rig rig;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_try_ns(&rig, 1, others, &handle), KVT_E_LAYOUT);
    assert_int_equal(rig_try_ns(&rig, 1, pages, &handle), 0);
    assert_int_equal(handle, ns);
    put_each(&rig, ns, 1, KV4);
    rig_reopen(&rig); /* lengths are known from the records */
    assert_int_equal(rig_try_ns(&rig, 1, others, &handle), KVT_E_LAYOUT);
    rig_close(&rig);
}

/* Lookups hold nothing; pins are bounded and can all be taken back. */
static void test_c33_pins(void **state)
{
    struct rig_options options = rig_defaults();
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.cache_bytes = 2u << 20;
    options.write_queue_bytes = 4u << 20;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 64, KV4);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(rig_lookup(&rig, ns, &many[i % 64], 1, 0, NULL), 1);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    assert_int_equal(rig_keys(&rig, KVT_OP_PIN, ns, many, 64), 16); /* 256 KiB of 16 KiB records */
    assert_int_equal(rig_stats(&rig).pinned_bytes, 256u << 10);
    assert_int_equal(rig_stats(&rig).pin_refused, 48);
    for (uint32_t i = 100; i < 400; i++) /* a flood */
        assert_int_equal(rig_put(&rig, ns, &many[i], 1, 0, KV4, false, NULL), 1);
    for (uint32_t i = 0; i < 16; i++) {
        uint8_t tier;

        assert_int_equal(rig_lookup(&rig, ns, &many[i], 1, 0, &tier), 1);
        assert_int_equal(tier, KVT_TIER_DRAM);
    }
    assert_int_equal(rig_keys(&rig, KVT_OP_UNPIN, ns, many, 64), 16);
    assert_int_equal(rig_stats(&rig).pinned_bytes, 0);
    rig_close(&rig);
}

/* Free places for loads. */
static uint32_t count_loads(const struct kvt_store *store)
{
    uint32_t count = 0;

    for (uint32_t at = store->load_free; at != KVT_NO_NUMBER; at = store->loads[at].next)
        count++;
    return count;
}

static void test_c34_prefetch(void **state)
{
    struct kvt_rng rng = {test_seed()};
    struct rig_options options = rig_defaults();
    const struct kvt_region *regions;
    uint32_t free_before[KVT_REGIONS], loads;
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    loads = count_loads(rig.store);
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 100, KV4);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    regions = rig.store->slots.arena.regions;
    for (int i = 0; i < KVT_REGIONS; i++)
        free_before[i] = regions[i].free_pages;
    assert_int_equal(rig_keys(&rig, KVT_OP_PREFETCH, ns, many, 20), 20);
    assert_int_equal(rig_stats(&rig).dram_blocks, 20);
    for (int i = 0; i < 10000; i++) {
        uint32_t n = 1 + (uint32_t)kvt_rng_below(&rng, 8);

        if (i % 100 == 0)
            rig_hold(&rig, !rig.held_io);
        rig.check_each_step = i % 100 == 0;
        rig_keys(&rig, KVT_OP_PREFETCH, ns, &many[kvt_rng_below(&rng, 90)], n);
        if (kvt_rng_below(&rng, 2))
            rig_cancel(&rig, CLIENT, rig.cookie);
        if (rig.held_io && kvt_rng_below(&rng, 2))
            rig_release_io(&rig, 1, true);
    }
    rig_hold(&rig, false);
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), 100);
    assert_int_equal(rig_stats(&rig).dram_bytes_used, 0);
    for (int i = 0; i < KVT_REGIONS; i++)
        assert_int_equal(regions[i].free_pages, free_before[i]);
    assert_int_equal(rig.store->prefetch_going, 0); /* the prefetch budget */
    assert_int_equal(rig.store->reads_going, 0);
    assert_int_equal(rig.store->items_used, 0);
    assert_int_equal(rig.store->slots.hold_used, 0);
    assert_int_equal(count_loads(rig.store), loads);
    rig_close(&rig);
}

/* C52: a reference to an earlier life of a slot does nothing. */
/* C52: one place in DRAM, two evictions of it in one step (two stores without a turn of the store
 * in between): the last owner is exact, the earlier ones are misses, and what an old reference
 * gives back is not taken for the new life. */
static void test_c52_two_evictions_into_one_slot(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entries[3];
    struct kvt_msg_grant grant = {0};
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.cache_bytes = 4 * 4096; /* one record */
    options.staging_bytes = 0;
    options.disk_cap_bytes = 0;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, one_size);
    rig.held_io = true; /* the rig does not wait for the store */
    for (uint32_t i = 0; i < 3; i++) {
        rig_alloc(&rig, CLIENT, ns, &many[i], 1, 0, KV4, false, &entries[i]);
        assert_int_equal(entries[i].status, 0);
        assert_int_equal(entries[i].slot, entries[0].slot);
        assert_true(!i || entries[i].generation > entries[i - 1].generation);
        assert_int_equal(
            rig_commit(&rig, CLIENT, &entries[i], rig_fill(&rig, ns, many[i], 0, KV4, &entries[i])),
            0);
    }
    rig.held_io = false;
    assert_int_equal(rig_stats(&rig).evict_dram_blocks, 2);
    for (uint32_t i = 0; i < 2; i++) {
        grant.slot = entries[i].slot;
        grant.generation = entries[i].generation;
        rig_release(&rig, CLIENT, &grant,
                    KVT_E_CORRUPT); /* "it was bad": said of a life long over */
        assert_int_equal(rig_get(&rig, ns, &many[i], 1, 0, NULL, NULL), 0);
    }
    assert_int_equal(rig_get(&rig, ns, &many[2], 1, 0, NULL, NULL), 1);
    rig_close(&rig);
}

static void test_c52_stale(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry first, second;
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    rig_alloc(&rig, CLIENT, ns, &many[0], 1, 0, KV4, false, &first);
    rig_abort(&rig, CLIENT, &first);
    rig_alloc(&rig, CLIENT, ns, &many[1], 1, 0, KV4, false, &second);
    assert_int_equal(second.slot, first.slot);
    assert_int_equal(rig_commit(&rig, CLIENT, &first, 1), KVT_E_STALE);
    rig_abort(&rig, CLIENT, &first);
    assert_int_equal(
        rig_commit(&rig, CLIENT, &second, rig_fill(&rig, ns, many[1], 0, KV4, &second)), 0);
    assert_int_equal(rig_get(&rig, ns, &many[1], 1, 0, NULL, NULL), 1);
    assert_int_equal(rig_lookup(&rig, ns, &many[0], 1, 0, NULL), 0);
    rig_close(&rig);
}

/* C54: pending while it is being filled; kept in DRAM until its write has ended. */
static void test_c54_until_written(void **state)
{
    struct rig_options options = rig_defaults();
    uint8_t tiers[8];
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.cache_bytes = 8 * 16 * 4096;
    options.write_queue_bytes = 1u << 20;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    rig_hold(&rig, true);
    put_each(&rig, ns, 8, RAW); /* DRAM is full of blocks that are not on disk yet */
    rig_advance(&rig, 10000000);
    assert_int_equal(rig_stats(&rig).disk_blocks, 0);
    for (uint32_t i = 20; i < 40; i++) /* pressure: only staging is left, then nothing */
        rig_put(&rig, ns, &many[i], 1, 0, RAW, false, NULL);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(rig_lookup(&rig, ns, &many[i], 1, 0, &tiers[i]), 1);
        assert_int_equal(tiers[i], KVT_TIER_DRAM);
    }
    assert_true(rig_stats(&rig).alloc_dropped_dram > 0);
    rig_hold(&rig, false);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(rig_stats(&rig).disk_blocks >= 8);
    assert_int_equal(get_each(&rig, ns, 8), 8);
    rig_close(&rig);
}

static void test_c58_chain(void **state)
{
    static const uint64_t others[3] = {1, 2, 3};
    struct rig_options options = rig_defaults();
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.cache_bytes = 10 * 16 * 4096;
    options.disk_cap_bytes = 0;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(rig_put(&rig, ns, many, 10, 0, RAW, false, NULL), 10);
    rig_keys(&rig, KVT_OP_TOUCH, ns, many, 2);
    assert_int_equal(rig_put(&rig, ns, &many[2], 8, many[1], RAW, false, NULL), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(rig_put(&rig, ns, &others[i], 1, i ? others[i - 1] : 0, RAW, false, NULL),
                         1);
    assert_int_equal(rig_lookup(&rig, ns, many, 10, 0, NULL), 7);
    rig_close(&rig);
}

static void test_c59_new_survives(void **state)
{
    static const uint64_t fresh[2] = {1, 2};
    struct rig_options options = rig_defaults();
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.cache_bytes = 11 * 16 * 4096;
    options.disk_cap_bytes = 0;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 10, RAW);
    rig_keys(&rig, KVT_OP_TOUCH, ns, many, 10);
    assert_int_equal(rig_put(&rig, ns, &fresh[0], 1, 0, RAW, false, NULL), 1);
    assert_int_equal(rig_put(&rig, ns, &fresh[1], 1, 0, RAW, false, NULL), 1); /* evicts one */
    assert_int_equal(rig_lookup(&rig, ns, &fresh[0], 1, 0, NULL), 1);
    assert_int_equal(rig_stats(&rig).evict_dram_blocks, 1);
    rig_close(&rig);
}

/* A chain longer than DRAM, nothing below it: its start is kept, not its unreachable end. */
static void test_long_chain_keeps_its_start(void **state)
{
    struct rig_options options = rig_defaults();
    struct rig rig;
    uint32_t ns, run;

    (void)state;
    options.cache_bytes = 40 * 4 * 4096;
    options.disk_cap_bytes = 0;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (uint32_t i = 0; i < 100; i += 10)
        rig_put(&rig, ns, &many[i], 10, i ? many[i - 1] : 0, KV4, false, NULL);
    run = rig_lookup(&rig, ns, many, 100, 0, NULL);
    assert_int_equal(run, 40);
    rig_close(&rig);
}

static void test_deadline_and_cancel(void **state)
{
    struct rig_options options = rig_defaults();
    uint64_t cookie;
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 4, KV4);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    rig_hold(&rig, true);
    rig_forget_replies(&rig);
    cookie = rig_acquire(&rig, CLIENT, ns, many, 2, 0, rig.now_ns + 1000);
    rig_settle(&rig);
    assert_int_equal(rig.reply_count, 0);
    rig_advance(&rig, 2000);
    assert_int_equal(rig.reply_count, 2);
    assert_int_equal(rig_reply(&rig, cookie)->status, KVT_E_DEADLINE);
    rig_forget_replies(&rig);
    cookie = rig_acquire(&rig, CLIENT, ns, &many[2], 2, 0, INT64_MAX);
    rig_settle(&rig);
    rig_cancel(&rig, OTHER, cookie); /* not its own */
    assert_null(rig_reply(&rig, cookie));
    rig_cancel(&rig, CLIENT, cookie);
    assert_int_equal(rig_reply(&rig, cookie)->status, KVT_E_CANCELED);
    rig_forget_replies(&rig);
    rig_hold(&rig, false);
    assert_int_equal(rig.reply_count, 0);             /* late reads are granted to nobody */
    assert_int_equal(rig_stats(&rig).dram_blocks, 4); /* and kept */
    assert_int_equal(rig_stats(&rig).dram_pins, 0);
    rig_close(&rig);
}

static void test_purge(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entry;
    struct rig rig;
    uint32_t a, b;

    (void)state;
    rig_open(&rig, &options, NULL);
    a = rig_ns(&rig, 1, pages);
    b = rig_ns(&rig, 2, pages);
    put_each(&rig, a, 10, KV4);
    put_each(&rig, b, 10, KV4);
    assert_int_equal(rig_flush(&rig), 0);
    rig_alloc(&rig, CLIENT, a, &many[10], 1, 0, KV4, false, &entry);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, a, many, 3), 3);
    assert_int_equal(get_each(&rig, a, 10), 7);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, a, NULL, 0), 7);
    assert_int_equal(rig_commit(&rig, CLIENT, &entry, rig_fill(&rig, a, many[10], 0, KV4, &entry)),
                     KVT_E_CANCELED);
    rig_crash(&rig);
    a = rig_ns(&rig, 1, pages);
    b = rig_ns(&rig, 2, pages);
    assert_int_equal(get_each(&rig, a, 11), 0);
    assert_int_equal(get_each(&rig, b, 10), 10);
    put_each(&rig, a, 1, KV4);
    assert_int_equal(get_each(&rig, a, 1), 1);
    rig_close(&rig);
}

static void test_off(void **state)
{
    struct rig_options options = rig_defaults();
    struct kvt_alloc_entry entry;
    int32_t status;
    struct rig rig;
    uint32_t ns;

    (void)state;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    put_each(&rig, ns, 1, KV4);
    kvt_store_enable(rig.store, 0);
    assert_int_equal(rig_lookup(&rig, ns, many, 1, 0, NULL), 0);
    rig_alloc(&rig, CLIENT, ns, &many[1], 1, 0, KV4, false, &entry);
    assert_int_equal(entry.status, KVT_E_MISS);
    assert_int_equal(rig_get(&rig, ns, many, 1, 0, &status, NULL), 0);
    assert_int_equal(status, KVT_E_MISS);
    assert_true(rig_stats(&rig).off_requests >= 3);
    kvt_store_enable(rig.store, 1);
    assert_int_equal(rig_lookup(&rig, ns, many, 1, 0, NULL), 1);
    rig_close(&rig);
}

/* No message, however made, does more than be refused. */
static void test_hostile_messages(void **state)
{
    struct kvt_rng rng = {test_seed()};
    struct rig_options options = rig_defaults();
    struct rig rig;
    union {
        struct kvt_msg msg;
        uint8_t bytes[2048];
    } m;

    (void)state;
    rig_open(&rig, &options, NULL);
    rig_ns(&rig, 1, pages);
    for (int i = 0; i < 20000; i++) {
        for (size_t j = 0; j < sizeof(m.bytes); j += 8) {
            uint64_t word = kvt_rng_below(&rng, 4) ? 0 : kvt_rng_next(&rng);

            memcpy(m.bytes + j, &word, 8);
        }
        m.msg.op = (uint16_t)kvt_rng_below(&rng, 20);
        m.msg.ns = (uint32_t)kvt_rng_below(&rng, 4);
        m.msg.count = kvt_rng_below(&rng, 8) ? (uint32_t)kvt_rng_below(&rng, 40) : 0xffffffffu;
        m.msg.bytes = kvt_rng_below(&rng, 2)
                          ? (uint32_t)(kvt_rng_below(&rng, 200) * 8)
                          : 40 + (m.msg.op == KVT_OP_ALLOC ? 40 : 0) + m.msg.count % 40 * 40;
        rig_send(&rig, CLIENT, &m.msg);
        rig.check_each_step = i % 200 == 0;
        rig_settle(&rig);
        rig_forget_replies(&rig);
    }
    assert_true(rig_stats(&rig).bad_messages > 1000);
    kvt_store_client_gone(rig.store, CLIENT);
    rig_check(&rig);
    rig_close(&rig);
}

/* Every key has one fingerprint: the store is of little use and gives no wrong byte. */
static void test_same_fingerprint(void **state)
{
    struct rig_options options = rig_defaults();
    int32_t statuses[20];
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.collide = KVT_COLLIDE_FP;
    rig_open(&rig, &options, NULL);
    ns = rig_ns(&rig, 1, pages);
    for (uint32_t i = 0; i < 20; i++)
        rig_put(&rig, ns, &many[i], 1, 0, KV4, false, &statuses[i]);
    assert_int_equal(statuses[0], 0);
    assert_int_equal(get_each(&rig, ns, 20), 1); /* rig_get() compares every byte */
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_true(get_each(&rig, ns, 20) <= 1);
    rig_close(&rig);
}

/* The data path allocates nothing: the heap is the same after many operations. */
static void test_no_growth(void **state)
{
    struct rig_options options = rig_defaults();
    struct mallinfo2 before;
    struct rig rig;
    uint32_t ns;

    (void)state;
    options.disk_cap_bytes = 0; /* the memory disk allocates by itself */
    rig_open(&rig, &options, NULL);
    rig.check_each_step = false;
    ns = rig_ns(&rig, 1, pages);
    for (uint64_t i = 0; i < 3000; i++) {
        uint64_t number = i;

        if (i == 1000) {
            rig_forget_replies(&rig);
            before = mallinfo2();
        }
        rig_put(&rig, ns, &number, 1, 0, KV4, false, NULL);
        rig_get(&rig, ns, &number, 1, 0, NULL, NULL);
    }
    rig_forget_replies(&rig);
    assert_true(mallinfo2().uordblks <= before.uordblks);
    rig_check(&rig);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_put_get),
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_cool),
        cmocka_unit_test(test_cool_crash),
        cmocka_unit_test(test_cool_races),
        cmocka_unit_test(test_races),
        cmocka_unit_test(test_bad_commit),
        cmocka_unit_test(test_c2_flipped_bits),
        cmocka_unit_test(test_c8_c10_record_removed),
        cmocka_unit_test(test_read_error),
        cmocka_unit_test(test_c9_staging),
        cmocka_unit_test(test_c22_reopen),
        cmocka_unit_test(test_c25_cap),
        cmocka_unit_test(test_c26_too_large),
        cmocka_unit_test(test_layout_mismatch),
        cmocka_unit_test(test_c33_pins),
        cmocka_unit_test(test_c34_prefetch),
        cmocka_unit_test(test_c52_stale),
        cmocka_unit_test(test_c52_two_evictions_into_one_slot),
        cmocka_unit_test(test_c54_until_written),
        cmocka_unit_test(test_c58_chain),
        cmocka_unit_test(test_c59_new_survives),
        cmocka_unit_test(test_long_chain_keeps_its_start),
        cmocka_unit_test(test_deadline_and_cancel),
        cmocka_unit_test(test_purge),
        cmocka_unit_test(test_off),
        cmocka_unit_test(test_hostile_messages),
        cmocka_unit_test(test_same_fingerprint),
        cmocka_unit_test(test_no_growth),
    };

    return cmocka_run_group_tests(tests, numbers_setup, NULL);
}
