/* Purges: those whose journal cannot be written, those by id, and what becomes of the bytes.
 *
 * Goal:   such a purge says so, and nothing of it is half done: on disk every record stays whole as
 *         long as no journal says that it is gone (a restart serves it again, fsck finds no
 *         damage); once the journal can be written, without being asked again, the records are gone
 *         for good and so are their bytes. Meanwhile the answer comes at once, also for more blocks
 *         than can wait to be erased, and the log goes on turning over.
 * Method: a rig without threads (support/store_rig.h), writes of the journal fail; the medium as it
 *         is at that moment is copied, checked by fsck and opened. Broken on purpose: without
 *         `owed` in l2_journal.c the first two tests find damaged records.
 */
#include "support/store_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/fsck.h"
#include "store/l2_internal.h"
#include "store/store_impl.h"
#include "support/fault_io.h"

enum { KV4 = 2, CHAIN = 8, PAGES = 2 };
#define SECOND 1000000000ll

static const uint32_t pages[7] = {0, 0, PAGES, 0, 0, 0, 0};
static const struct fault_rule no_journal = {
    .ops = FAULT_WRITE, .name = "journal", .action = FAULT_FAIL, .error = EIO};
static struct rig rig;
static uint32_t ns;

static void begin(uint64_t cap)
{
    struct rig_options o = rig_defaults();

    o.disk_cap_bytes = cap;
    rig_open(&rig, &o, NULL);
    ns = rig_ns(&rig, 1, pages);
}

static void put(uint64_t first, uint32_t n)
{
    uint64_t numbers[64];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    assert_int_equal(rig_put(&rig, ns, numbers, n, 0, KV4, 0, NULL), n);
}

static uint32_t get(struct rig *from, uint32_t handle, uint64_t first, uint32_t n)
{
    uint64_t numbers[64];

    for (uint32_t i = 0; i < n; i++)
        numbers[i] = first + i;
    return rig_get(from, handle, numbers, n, 0, NULL, NULL);
}

static int32_t purge_chain(void)
{
    uint64_t numbers[CHAIN];

    for (uint32_t i = 0; i < CHAIN; i++)
        numbers[i] = 1 + i;
    return rig_keys(&rig, KVT_OP_PURGE, ns, numbers, CHAIN);
}

static struct kvt_io *medium_now(void)
{
    struct kvt_io *io = NULL;

    assert_int_equal(kvt_io_mem_clone(fault_io_inner(rig.io), &io), 0);
    return io;
}

static void say(void *ctx, bool problem, const char *text)
{
    (void)ctx;
    if (problem)
        print_message("           fsck: %s\n", text);
}

/* Records that a crash right now would leave; none of them may be damaged. */
static uint64_t records_now(void)
{
    struct kvt_io *io = medium_now();
    struct kvt_fsck_params params = {.io = io, .found = say};
    struct kvt_fsck_report report;

    assert_int_equal(kvt_fsck(&params, &report), 0);
    assert_int_equal(report.problems, 0);
    io->ops->destroy(io);
    return report.records;
}

/* How many blocks of the chain a crash right now would leave to the next life. */
static uint32_t after_crash(void)
{
    struct rig_options o = rig.options;
    static struct rig next;
    uint32_t handle, count;

    rig_open(&next, &o, medium_now());
    handle = rig_ns(&next, 1, pages);
    count = get(&next, handle, 1, CHAIN);
    rig_close(&next);
    return count;
}

/* Record headers that stand on the medium, whatever knows of them. */
static uint32_t headers_on_medium(void)
{
    static _Alignas(4096) uint8_t page[4096];
    uint32_t count = 0;

    for (uint32_t segment = 0; segment < 64; segment++) {
        struct kvt_io *io = fault_io_inner(rig.io);
        char name[32];
        int file;

        snprintf(name, sizeof(name), "seg-%08x", segment);
        file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);
        if (file < 0)
            continue;
        for (int64_t at = 0; at + 4096 <= io->ops->size(io, file); at += 4096) {
            uint32_t magic;

            assert_int_equal(kvt_io_read_now(io, file, (uint64_t)at, page, 4096), 4096);
            memcpy(&magic, page, sizeof(magic));
            count += magic == KVT_RECORD_MAGIC;
        }
        io->ops->close(io, file);
    }
    return count;
}

static void fail_then_recover(bool first_of_the_root, bool whole)
{
    begin(64u << 20);
    if (!first_of_the_root) { /* there is a journal to append to */
        uint64_t other = 100;

        put(other, 1);
        assert_int_equal(rig_flush(&rig), 0);
        assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &other, 1), 1);
        rig_advance(&rig, SECOND);
    }
    put(1, CHAIN);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(fault_io_rule(rig.io, &no_journal) >= 0);
    if (whole)
        assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), -EIO);
    else
        assert_int_equal(purge_chain(), -EIO);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(get(&rig, ns, 1, CHAIN), 0); /* gone here and now ... */
        assert_int_equal(records_now(), CHAIN);
        assert_int_equal(after_crash(), CHAIN); /* ... and not half gone after a restart */
        rig_advance(&rig, SECOND);
    }
    assert_int_equal(headers_on_medium(), CHAIN);
    fault_io_clear(rig.io);
    rig_advance(&rig, 2 * SECOND); /* nobody asks again */
    assert_int_equal(headers_on_medium(), 0);
    assert_int_equal(records_now(), 0);
    assert_int_equal(after_crash(), 0);
    put(1, CHAIN); /* what is stored after it is not meant by it */
    assert_int_equal(rig_flush(&rig), 0);
    assert_int_equal(after_crash(), CHAIN);
    rig_close(&rig);
}

static void test_a_failed_purge_of_keys(void **state)
{
    (void)state;
    fail_then_recover(false, false);
    fail_then_recover(true, false);
}

static void test_a_failed_purge_of_a_namespace(void **state)
{
    (void)state;
    fail_then_recover(false, true);
    fail_then_recover(true, true);
}

/* The next purge writes both, though it is small enough to be appended alone. */
static void test_the_next_purge_brings_it_along(void **state)
{
    struct fault_rule once = no_journal;
    uint64_t other = 100;

    (void)state;
    once.times = 1;
    begin(64u << 20);
    put(1, CHAIN);
    put(other, 1);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(fault_io_rule(rig.io, &once) >= 0);
    assert_int_equal(purge_chain(), -EIO);
    assert_int_equal(after_crash(), CHAIN);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &other, 1), 1);
    assert_int_equal(records_now(), 0);
    assert_int_equal(after_crash(), 0);
    rig_close(&rig);
}

/* A journal that is full is rewritten; that fails, and a smaller purge would still fit behind it.
 */
static void test_a_full_journal_that_cannot_be_rewritten(void **state)
{
    struct fault_rule once = no_journal;
    uint64_t numbers[64], other = 1000;
    const struct kvt_l2_journal *journal;

    (void)state;
    once.times = 1;
    begin(8u << 20);
    journal = &rig.store->disks[0].l2->journal;
    do
        assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &other, 1), 0);
    while (journal->pages + 1 != journal->pages_max);
    put(1, 64);
    assert_int_equal(rig_flush(&rig), 0);
    for (uint32_t i = 0; i < 64; i++)
        numbers[i] = 1 + i;
    assert_true(fault_io_rule(rig.io, &once) >= 0);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, numbers, 64), -EIO);
    assert_int_equal(after_crash(), CHAIN);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, &other, 1), 0);
    assert_int_equal(records_now(), 0);
    assert_int_equal(after_crash(), 0);
    rig_close(&rig);
}

/* An orderly close in between: the journal was never written, so everything is there again. */
static void test_closed_before_it_could_be_written(void **state)
{
    (void)state;
    begin(64u << 20);
    put(1, CHAIN);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(fault_io_rule(rig.io, &no_journal) >= 0);
    assert_int_equal(purge_chain(), -EIO);
    rig_reopen(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get(&rig, ns, 1, CHAIN), CHAIN);
    rig_close(&rig);
}

/* More blocks than may wait to be erased: the answer comes all the same. */
static void test_many_blocks_answer_at_once(void **state)
{
    (void)state;
    begin(160u << 20);
    rig.check_each_step = false;
    for (uint64_t first = 1; first < 1 + 16 * 600; first += 16)
        put(first, 16);
    rig.check_each_step = true;
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(rig_stats(&rig).disk_blocks > 9500);
    assert_true(fault_io_rule(rig.io, &no_journal) >= 0);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), -EIO);
    assert_int_equal(rig_stats(&rig).blocks, 0);
    assert_true(records_now() > 9500);
    fault_io_clear(rig.io);
    rig_advance(&rig, 2 * SECOND);
    assert_int_equal(records_now(), 0);
    rig_close(&rig);
}

/* Purged bytes that wait do not keep segments from being recycled. */
static void test_the_log_turns_over_meanwhile(void **state)
{
    const struct kvt_l2 *l2;
    uint64_t before, first = 1;

    (void)state;
    begin(8u << 20);
    l2 = rig.store->disks[0].l2;
    for (; !rig_stats(&rig).evict_disk_segments; first += CHAIN)
        put(first, CHAIN);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(fault_io_rule(rig.io, &no_journal) >= 0);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), -EIO);
    before = rig_stats(&rig).evict_disk_segments;
    for (uint64_t end = first + 2000; first < end; first += CHAIN)
        put(first, CHAIN);
    assert_true(rig_stats(&rig).evict_disk_segments > before + 8);
    for (uint32_t i = 0; i < l2->limit; i++) /* nor those that it waits for */
        assert_int_equal(l2->segments[i].erases, 0);
    (void)records_now();
    fault_io_clear(rig.io);
    rig_advance(&rig, 2 * SECOND);
    assert_int_equal(get(&rig, ns, first - CHAIN, CHAIN), CHAIN);
    (void)records_now();
    rig_crash(&rig);
    ns = rig_ns(&rig, 1, pages);
    assert_int_equal(get(&rig, ns, 1, 1), 0);
    rig_close(&rig);
}

/* ---- by id ----------------------------------------------------------------------------------- */

static struct kvt_msg_purge_ns_reply purge_ns(const uint8_t id[KVT_NS_BYTES])
{
    struct kvt_msg_purge_ns ask = {
        .msg = {.bytes = sizeof(ask), .op = KVT_OP_PURGE_NS, .cookie = ++rig.cookie}};
    struct kvt_msg_purge_ns_reply reply;
    const struct kvt_msg *msg;

    memcpy(ask.id, id, KVT_NS_BYTES);
    assert_int_equal(rig_send(&rig, 0, &ask), 0);
    rig_settle(&rig);
    msg = rig_reply(&rig, ask.msg.cookie);
    assert_non_null(msg);
    assert_int_equal(msg->bytes, sizeof(reply));
    memcpy(&reply, msg, sizeof(reply));
    rig_forget_replies(&rig);
    rig_check(&rig);
    return reply;
}

/* Two namespaces, one of them with two groups, in DRAM and on disk; a third one in DRAM only. */
static void put_three(uint32_t handles[4])
{
    handles[0] = rig_ns(&rig, 1, pages);
    handles[2] = rig_ns(&rig, 2, pages);
    rig.group = 1;
    handles[1] = rig_ns(&rig, 1, pages);
    rig.group = 0;
    handles[3] = rig_ns(&rig, 3, pages);
    for (int i = 0; i < 4; i++) {
        ns = handles[i];
        rig.group = i == 1;
        put(1, CHAIN);
        if (i == 2) {
            rig.group = 0;
            assert_int_equal(rig_flush(&rig), 0);
        }
    }
    rig.group = 0;
}

static uint32_t there(uint32_t handle, uint16_t group)
{
    rig.group = group;
    uint32_t count = get(&rig, handle, 1, CHAIN);
    rig.group = 0;
    return count;
}

/* All groups go, for good, and nothing of another namespace; what was removed is told. */
static void test_a_namespace_by_its_id(void **state)
{
    uint8_t id[KVT_NS_BYTES];
    uint32_t handles[4];

    (void)state;
    begin(64u << 20);
    put_three(handles);
    memcpy(id, rig_ns_id(&rig, handles[0]), sizeof(id));
    struct kvt_msg_purge_ns_reply reply = purge_ns(id);
    assert_int_equal(reply.msg.status, 0);
    assert_int_equal(reply.msg.count, 2);
    assert_int_equal(reply.blocks, 2 * CHAIN);
    assert_int_equal(reply.bytes, 2 * CHAIN * PAGES * KVT_PAGE_BYTES);
    assert_int_equal(reply.remote_records, 0);
    assert_int_equal(there(handles[0], 0), 0);
    assert_int_equal(there(handles[1], 1), 0);
    assert_int_equal(there(handles[2], 0), CHAIN);
    assert_int_equal(there(handles[3], 0), CHAIN);
    reply = purge_ns(id); /* it is known still, and empty */
    assert_int_equal(reply.msg.count, 2);
    assert_int_equal(reply.blocks, 0);
    ns = handles[0];
    put(1, CHAIN); /* and takes blocks again */
    assert_int_equal(there(handles[0], 0), CHAIN);
    assert_int_equal(purge_ns(id).blocks, CHAIN);
    rig_crash(&rig);
    assert_int_equal(there(rig_ns(&rig, 1, pages), 0), 0);
    assert_int_equal(there(rig_ns(&rig, 2, pages), 0), CHAIN);
    rig_close(&rig);
}

/* One that nobody has opened since the start, and one that nobody has heard of. */
static void test_a_namespace_that_nobody_has_opened(void **state)
{
    uint8_t id[KVT_NS_BYTES], unknown[KVT_NS_BYTES] = {9, 9, 9};
    uint32_t handles[4];

    (void)state;
    begin(64u << 20);
    put_three(handles);
    memcpy(id, rig_ns_id(&rig, handles[2]), sizeof(id));
    rig_reopen(&rig);
    struct kvt_msg_purge_ns_reply reply = purge_ns(unknown);
    assert_int_equal(reply.msg.status, 0);
    assert_int_equal(reply.msg.count, 0);
    assert_int_equal(reply.blocks, 0);
    reply = purge_ns(id);
    assert_int_equal(reply.msg.count, 1);
    assert_int_equal(reply.blocks, CHAIN);
    rig_reopen(&rig);
    assert_int_equal(there(rig_ns(&rig, 2, pages), 0), 0);
    assert_int_equal(there(rig_ns(&rig, 1, pages), 0), CHAIN);
    rig_close(&rig);
}

/* A journal that cannot be written: it is said, with what has gone from here. */
static void test_a_failed_purge_by_id(void **state)
{
    uint32_t handles[4];

    (void)state;
    begin(64u << 20);
    put_three(handles);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(fault_io_rule(rig.io, &no_journal) >= 0);
    struct kvt_msg_purge_ns_reply reply = purge_ns(rig_ns_id(&rig, handles[2]));
    assert_int_equal(reply.msg.status, -EIO);
    assert_int_equal(reply.blocks, CHAIN);
    assert_int_equal(there(handles[2], 0), 0);
    fault_io_clear(rig.io);
    rig_advance(&rig, 2 * SECOND);
    rig_close(&rig);
}

/* What is being filled for any group of it is refused at its commit. */
static void test_fills_of_a_namespace_by_its_id(void **state)
{
    static const uint64_t numbers[] = {100, 101};
    struct kvt_alloc_entry entries[2], other[2];
    uint32_t handles[4];

    (void)state;
    begin(64u << 20);
    put_three(handles);
    rig.group = 1;
    rig_alloc(&rig, 0, handles[1], numbers, 2, 0, KV4, 0, entries);
    rig.group = 0;
    rig_alloc(&rig, 0, handles[3], numbers, 2, 0, KV4, 0, other);
    assert_int_equal(purge_ns(rig_ns_id(&rig, handles[0])).msg.status, 0);
    rig.group = 1;
    uint64_t sum = rig_fill(&rig, handles[1], 100, 0, KV4, &entries[0]);
    assert_true(rig_commit(&rig, 0, &entries[0], sum) < 0);
    rig.group = 0;
    sum = rig_fill(&rig, handles[3], 100, 0, KV4, &other[0]);
    assert_int_equal(rig_commit(&rig, 0, &other[0], sum), 0);
    rig_abort(&rig, 0, &other[1]);
    rig_close(&rig);
}

/* ---- the bytes ------------------------------------------------------------------------------- */

#define MANY 125u /* chains */

/* Completions are held back meanwhile, so that all but the first are written in batches. */
static void put_many(void)
{
    struct rig_options o = rig_defaults();

    o.disk_cap_bytes = 64u << 20;
    o.cache_bytes = o.write_queue_bytes = 16u << 20;
    rig_open(&rig, &o, NULL);
    ns = rig_ns(&rig, 1, pages);
    rig.write = KVT_WRITE_THROUGH;
    rig_hold(&rig, true);
    for (uint64_t first = 1; first < MANY * CHAIN; first += CHAIN)
        put(first, CHAIN);
    rig_hold(&rig, false);
    assert_int_equal(rig_flush(&rig), 0);
    assert_true(rig_stats(&rig).disk_blocks == MANY * CHAIN);
}

/* Records that were written side by side are one hole. */
static void test_neighbours_are_one_hole(void **state)
{
    uint64_t before, holes;

    (void)state;
    put_many();
    before = fault_io_count(rig.io, FAULT_PUNCH);
    assert_int_equal(rig_keys(&rig, KVT_OP_PURGE, ns, NULL, 0), MANY * CHAIN);
    holes = fault_io_count(rig.io, FAULT_PUNCH) - before;
    assert_in_range(holes, 1, MANY);
    assert_int_equal(rig_stats(&rig).disk_erases, 0);
    assert_int_equal(records_now(), 0);
    rig_close(&rig);
}

static void run_on(uint32_t times)
{
    while (times--)
        rig_settle(&rig);
}

static int64_t rig_now(void *ctx)
{
    (void)ctx;
    return rig.now_ns;
}

/* A drive that takes for ever to make a hole keeps nobody waiting: neither the purge, nor who
 * stores and loads. */
static void test_a_hole_that_takes_for_ever(void **state)
{
    struct fault_rule never = {.ops = FAULT_PUNCH, .action = FAULT_NEVER};
    const struct kvt_msg *reply;

    (void)state;
    put_many();
    fault_io_clock(rig.io, (struct kvt_clock){.now_ns = rig_now, .ctx = NULL});
    assert_true(fault_io_rule(rig.io, &never) >= 0);
    struct kvt_msg_keys ask = {
        .msg = {.bytes = sizeof(ask), .op = KVT_OP_PURGE, .ns = ns, .cookie = ++rig.cookie}};
    rig.held_io = true; /* the rig does not wait for it either */
    assert_int_equal(rig_send(&rig, 0, &ask), 0);
    run_on(500);
    reply = rig_reply(&rig, ask.msg.cookie);
    assert_non_null(reply);
    assert_int_equal(reply->status, MANY * CHAIN);
    rig_forget_replies(&rig);
    assert_true(rig_stats(&rig).disk_erases > 0);
    put(1, CHAIN);
    assert_int_equal(get(&rig, ns, 1, CHAIN), CHAIN);
    assert_true(rig_stats(&rig).disk_erases > 0);
    rig.held_io = false;
    fault_io_clear(rig.io);
    rig_settle(&rig);
    assert_int_equal(rig_stats(&rig).disk_erases, 0);
    assert_int_equal(get(&rig, ns, 1, CHAIN), CHAIN);
    rig_close(&rig);
}

/* What is stored into a namespace while it is purged is refused for that reason, and counted. */
static void test_stores_meanwhile_are_counted(void **state)
{
    struct kvt_alloc_entry entries[2];
    const uint64_t numbers[] = {5000, 5001};

    (void)state;
    begin(64u << 20);
    put(1, CHAIN);
    assert_int_equal(rig_flush(&rig), 0);
    rig_hold(&rig, true);
    struct kvt_msg_keys ask = {
        .msg = {.bytes = sizeof(ask), .op = KVT_OP_PURGE, .ns = ns, .cookie = ++rig.cookie}};
    assert_int_equal(rig_send(&rig, 0, &ask), 0);
    run_on(4);
    rig_alloc(&rig, 1, ns, numbers, 2, 0, KV4, 0, entries);
    assert_int_equal(entries[0].status, KVT_E_CANCELED);
    assert_int_equal(entries[1].status, KVT_E_CANCELED);
    assert_int_equal(rig_stats(&rig).alloc_purging, 2);
    rig_hold(&rig, false);
    assert_non_null(rig_reply(&rig, ask.msg.cookie));
    rig_forget_replies(&rig);
    put(5000, 2);
    assert_int_equal(rig_stats(&rig).alloc_purging, 2);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_failed_purge_of_keys),
        cmocka_unit_test(test_a_failed_purge_of_a_namespace),
        cmocka_unit_test(test_the_next_purge_brings_it_along),
        cmocka_unit_test(test_a_full_journal_that_cannot_be_rewritten),
        cmocka_unit_test(test_closed_before_it_could_be_written),
        cmocka_unit_test(test_many_blocks_answer_at_once),
        cmocka_unit_test(test_the_log_turns_over_meanwhile),
        cmocka_unit_test(test_a_namespace_by_its_id),
        cmocka_unit_test(test_a_namespace_that_nobody_has_opened),
        cmocka_unit_test(test_a_failed_purge_by_id),
        cmocka_unit_test(test_fills_of_a_namespace_by_its_id),
        cmocka_unit_test(test_neighbours_are_one_hole),
        cmocka_unit_test(test_a_hole_that_takes_for_ever),
        cmocka_unit_test(test_stores_meanwhile_are_counted),
    };

    return cmocka_run_group_tests_name("store_purge", tests, NULL, NULL);
}
