/* Direct loads: records granted where they lie on disk.
 *
 * Goal:   a direct GRANT names the bytes that were stored; while its pin is held its segment is not
 *         recycled, whatever is written; pins go back by RELEASE, by the client's death and by no
 *         one else; a bad record leaves the index; without pins, and in DRAM, loads are ordinary.
 * Method: the store without threads over files in memory; what a grant names is read from the file
 *         by the test itself and verified whole.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvtier/error.h"
#include "store/store_impl.h"
#include "support/store_rig.h"

#define RAW 1
#define BLOCKS 40u
#define CLIENT 5u

static const uint32_t pages[7] = {0, 16, 16, 16, 16, 16, 16};
static struct rig rig;
static uint64_t numbers[2000];
static struct kvt_msg_grant grants[2000];
static uint32_t grant_count;

static bool keep_grant(void *ctx, uint32_t client, const struct kvt_msg_grant *grant)
{
    (void)ctx;
    assert_int_equal(client, CLIENT);
    assert_true(grant_count < 2000);
    grants[grant_count++] = *grant;
    return true;
}

/* A store whose blocks 1 .. count are on disk only. Returns the namespace. */
static uint32_t open_cold(uint32_t count, uint64_t cap_bytes)
{
    struct rig_options options = rig_defaults();
    options.disk_cap_bytes = cap_bytes;
    for (uint32_t i = 0; i < 2000; i++)
        numbers[i] = i + 1;
    memset(&rig, 0, sizeof(rig));
    rig_open(&rig, &options, NULL);
    rig.check_each_step = false;
    uint32_t ns = rig_ns(&rig, 1, pages);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(rig_put(&rig, ns, &numbers[i], 1, i ? numbers[i - 1] : 0, RAW, 0, NULL),
                         1);
    assert_int_equal(rig_flush(&rig), 0);
    rig_reopen(&rig);
    return rig_ns(&rig, 1, pages);
}

static void acquire(uint32_t ns, uint32_t first, uint32_t n, int direct)
{
    struct kvt_msg_acquire *msg = calloc(1, sizeof(*msg) + n * sizeof(msg->keys[0]));
    assert_non_null(msg);
    msg->msg.bytes = (uint32_t)(sizeof(*msg) + n * sizeof(msg->keys[0]));
    msg->msg.op = KVT_OP_ACQUIRE;
    msg->msg.cookie = 1000000 + ++rig.cookie;
    msg->msg.ns = ns;
    msg->msg.count = n;
    msg->deadline_ns = INT64_MAX;
    msg->direct = (uint8_t)direct;
    for (uint32_t i = 0; i < n; i++)
        msg->keys[i] = rig_key(numbers[first + i]);
    grant_count = 0;
    rig.on_grant = keep_grant;
    assert_int_equal(rig_send(&rig, CLIENT, msg), 0);
    free(msg);
    rig_settle(&rig);
    rig.on_grant = NULL;
    assert_int_equal(grant_count, n);
}

static void release(uint32_t client, const struct kvt_msg_grant *grant, int status)
{
    uint8_t bytes[sizeof(struct kvt_msg_slots) + sizeof(struct kvt_slot_ref)] = {0};
    _Alignas(8) uint8_t message[sizeof(bytes)];
    struct kvt_msg_slots *msg = (struct kvt_msg_slots *)(void *)message;
    memcpy(message, bytes, sizeof(bytes));
    msg->msg.bytes = sizeof(message);
    msg->msg.op = KVT_OP_RELEASE;
    msg->msg.count = 1;
    msg->slots[0] = (struct kvt_slot_ref){.slot = grant->slot,
                                          .generation = grant->generation,
                                          .status = status,
                                          .direct = grant->direct};
    assert_int_equal(rig_send(&rig, client, msg), 0);
    rig_settle(&rig);
}

/* The bytes that a direct grant names, as a client would read them; verified whole. */
static int read_direct(uint32_t ns, uint64_t number, const struct kvt_msg_grant *grant)
{
    char name[32];
    struct kvt_msg_key key = rig_key(number);
    struct kvt_key plain = {.hash_len = key.hash_len};
    struct kvt_full_key full;
    uint8_t *record = aligned_alloc(4096, grant->record_bytes);
    assert_non_null(record);
    memcpy(plain.hash, key.hash, sizeof(key.hash));
    kvt_full_key_make(&full, rig_ns_id(&rig, ns), &plain);
    snprintf(name, sizeof(name), "seg-%08x", (unsigned)grant->segment);
    int file = rig.io->ops->open(rig.io, name, KVT_IO_OPEN_READ_ONLY);
    assert_true(file >= 0);
    assert_int_equal(
        kvt_io_read_now(rig.io, file, grant->arena_offset, record, grant->record_bytes),
        grant->record_bytes);
    rig.io->ops->close(rig.io, file);
    int rc = kvt_record_verify(record, grant->record_bytes, &full, 0);
    free(record);
    return rc;
}

static void close_rig(void)
{
    rig_check(&rig);
    assert_int_equal(rig.store->direct_used, 0);
    rig_close(&rig);
}

static void test_grants_name_the_bytes(void **state)
{
    (void)state;
    uint32_t ns = open_cold(BLOCKS, 64u << 20);
    acquire(ns, 0, BLOCKS, 1);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(grants[i].msg.status, 0);
        assert_int_equal(grants[i].index, i);
        assert_int_equal(grants[i].direct, 1);
        assert_int_equal(grants[i].tier, KVT_TIER_DISK);
        assert_int_equal(grants[i].map, RAW);
        assert_int_equal(grants[i].root, 0);
        assert_int_equal(grants[i].record_bytes, 16 * 4096);
        assert_int_equal(read_direct(ns, numbers[i], &grants[i]), 0);
    }
    assert_int_equal(rig_stats(&rig).load_granted_direct, BLOCKS);
    assert_int_equal(rig_stats(&rig).disk_read_blocks, 0); /* the store itself read nothing */
    assert_int_equal(rig.store->direct_used, BLOCKS);
    for (uint32_t i = 0; i < BLOCKS; i++)
        release(CLIENT, &grants[i], 0);
    assert_int_equal(rig_stats(&rig).commit_stale, 0);
    close_rig();
}

/* A chain with a hole ends there, pins and all; unasked, nothing is direct. */
static void test_ordinary_ways(void **state)
{
    (void)state;
    uint32_t ns = open_cold(BLOCKS, 64u << 20);
    acquire(ns, BLOCKS - 2, 4, 1);
    assert_int_equal(grants[1].msg.status, 0);
    assert_int_equal(grants[2].msg.status, KVT_E_MISS);
    assert_int_equal(grants[3].msg.status, KVT_E_MISS);
    assert_int_equal(rig.store->direct_used, 2);
    release(CLIENT, &grants[0], 0);
    release(CLIENT, &grants[1], 0);
    acquire(ns, 0, 2, 0);
    assert_int_equal(grants[0].direct + grants[1].direct, 0);
    assert_int_equal(rig_verify(&rig, ns, numbers[0], &grants[0]), 0);
    release(CLIENT, &grants[0], 0);
    release(CLIENT, &grants[1], 0);
    acquire(ns, 0, 3, 1); /* the first two are in DRAM now */
    assert_int_equal(grants[0].direct + grants[1].direct, 0);
    assert_int_equal(grants[2].direct, 1);
    for (int i = 0; i < 3; i++)
        release(CLIENT, &grants[i], 0);
    assert_int_equal(rig_stats(&rig).commit_stale, 0);
    close_rig();
}

/* Only who holds a pin gives it back, once. */
static void test_stale_references(void **state)
{
    (void)state;
    uint32_t ns = open_cold(2, 64u << 20);
    acquire(ns, 0, 1, 1);
    struct kvt_msg_grant other = grants[0];
    release(CLIENT + 1, &grants[0], 0);
    other.generation++;
    release(CLIENT, &other, 0);
    other.generation = grants[0].generation;
    other.slot = UINT32_MAX;
    release(CLIENT, &other, 0);
    other.slot = KVT_STORE_DIRECTS - 1;
    release(CLIENT, &other, 0);
    assert_int_equal(rig.store->direct_used, 1);
    assert_int_equal(rig_stats(&rig).commit_stale, 4);
    other = grants[0];
    release(CLIENT, &other, 0);
    release(CLIENT, &other, 0);
    assert_int_equal(rig_stats(&rig).commit_stale, 5);
    acquire(ns, 0, 1, 1); /* the same place in the table, another life */
    assert_int_equal(grants[0].slot, other.slot);
    release(CLIENT, &other, KVT_E_CORRUPT);
    assert_int_equal(rig.store->direct_used, 1);
    release(CLIENT, &grants[0], 0);
    assert_int_equal(rig_stats(&rig).checksum_fail, 0);
    close_rig();
}

static uint32_t write_more(uint32_t ns, uint32_t from, uint32_t count)
{
    for (uint32_t i = from; i < from + count; i++)
        assert_int_equal(rig_put(&rig, ns, &numbers[i], 1, 0, RAW, 0, NULL), 1);
    assert_int_equal(rig_flush(&rig), 0);
    return from + count;
}

/* Whatever is written, the bytes under a pin stay; released, they go. */
static void test_recycling_waits_for_pins(void **state)
{
    (void)state;
    uint32_t ns = open_cold(8, 10u << 20);
    uint32_t other = rig_ns(&rig, 2, pages);
    acquire(ns, 0, 8, 1);
    uint32_t next = write_more(other, 100, 500);
    assert_true(rig_stats(&rig).evict_disk_segments > 5);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(read_direct(ns, numbers[i], &grants[i]), 0);
    struct kvt_msg_grant held[8];
    memcpy(held, grants, sizeof(held));
    for (uint32_t i = 1; i < 8; i++)
        release(CLIENT, &held[i], 0);
    next = write_more(other, next, 500); /* one pin is enough */
    assert_int_equal(read_direct(ns, numbers[0], &held[0]), 0);
    release(CLIENT, &held[0], 0);
    (void)write_more(other, next, 500);
    acquire(ns, 0, 1, 1);
    assert_int_equal(grants[0].msg.status, KVT_E_MISS);
    close_rig();
}

static void test_client_dies_with_pins(void **state)
{
    (void)state;
    uint32_t ns = open_cold(8, 10u << 20);
    uint32_t other = rig_ns(&rig, 2, pages);
    acquire(ns, 0, 8, 1);
    kvt_store_client_gone(rig.store, CLIENT + 1); /* another's death changes nothing */
    assert_int_equal(rig.store->direct_used, 8);
    kvt_store_client_gone(rig.store, CLIENT);
    assert_int_equal(rig.store->direct_used, 0);
    (void)write_more(other, 100, 600);
    acquire(ns, 0, 1, 1);
    assert_int_equal(grants[0].msg.status, KVT_E_MISS); /* its segment could go */
    close_rig();
}

static void test_bad_record_leaves(void **state)
{
    (void)state;
    uint32_t ns = open_cold(3, 64u << 20);
    acquire(ns, 0, 3, 1);
    release(CLIENT, &grants[2], KVT_E_CORRUPT);
    assert_int_equal(rig_stats(&rig).checksum_fail, 1);
    release(CLIENT, &grants[0], 0);
    release(CLIENT, &grants[1], 0);
    acquire(ns, 0, 3, 1);
    assert_int_equal(grants[1].msg.status, 0);
    assert_int_equal(grants[2].msg.status, KVT_E_MISS);
    release(CLIENT, &grants[0], 0);
    release(CLIENT, &grants[1], 0);
    close_rig();
}

/* Purged under a pin: the reader finds other bytes, or the old ones; the store none. */
static void test_purge_under_a_pin(void **state)
{
    (void)state;
    uint32_t ns = open_cold(2, 64u << 20);
    acquire(ns, 0, 1, 1);
    struct kvt_msg_grant held = grants[0];
    assert_true(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0) >= 0);
    rig_settle(&rig);
    assert_int_not_equal(read_direct(ns, numbers[0], &held), 0);
    release(CLIENT, &held, KVT_E_CORRUPT);
    acquire(ns, 0, 1, 1);
    assert_int_equal(grants[0].msg.status, KVT_E_MISS);
    close_rig();
}

/* No pin left: the rest comes through DRAM. */
static void test_table_full(void **state)
{
    (void)state;
    uint32_t ns = open_cold(4, 64u << 20);
    static struct kvt_msg_grant held[KVT_STORE_DIRECTS];
    for (uint32_t i = 0; i < KVT_STORE_DIRECTS; i++) {
        acquire(ns, 0, 1, 1);
        assert_int_equal(grants[0].direct, 1);
        held[i] = grants[0];
    }
    acquire(ns, 0, 2, 1);
    assert_int_equal(grants[0].msg.status, 0);
    assert_int_equal(grants[0].direct + grants[1].direct, 0);
    assert_int_equal(rig_verify(&rig, ns, numbers[1], &grants[1]), 0);
    release(CLIENT, &grants[0], 0);
    release(CLIENT, &grants[1], 0);
    for (uint32_t i = 0; i < KVT_STORE_DIRECTS; i++)
        release(CLIENT, &held[i], 0);
    assert_int_equal(rig_stats(&rig).commit_stale, 0);
    close_rig();
}

/* A store that closes does not wait for pins, and the next one knows nothing of them. */
static void test_close_with_pins(void **state)
{
    (void)state;
    uint32_t ns = open_cold(4, 64u << 20);
    acquire(ns, 0, 4, 1);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    release(CLIENT, &grants[0], 0);
    assert_int_equal(rig_stats(&rig).commit_stale, 1);
    assert_int_equal(rig_get(&rig, ns, numbers, 4, 0, NULL, NULL), 4);
    close_rig();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grants_name_the_bytes),
        cmocka_unit_test(test_ordinary_ways),
        cmocka_unit_test(test_stale_references),
        cmocka_unit_test(test_recycling_waits_for_pins),
        cmocka_unit_test(test_client_dies_with_pins),
        cmocka_unit_test(test_bad_record_leaves),
        cmocka_unit_test(test_purge_under_a_pin),
        cmocka_unit_test(test_table_full),
        cmocka_unit_test(test_close_with_pins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
