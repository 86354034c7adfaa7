/* A slow disk: stores and reads do not wait for its writes.
 *
 * Goal:   case C48. Writes go at 50 MB/s and far more is offered: every store is answered at once,
 *         the queue keeps its bound, what is not written is counted block for block, and reads of
 *         1 MiB beside it end in well under 200 ms, also when the drive serves them behind the
 *         writes that it has begun.
 * Method: simulated time. A backend over memory lets each request take the time that it would take:
 *         writes at a rate, reads at a rate, each kind one after another; or both on one channel.
 *         The rig sends messages and turns the store a millisecond at a time.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"

enum { RAW = 6, BLOCK_PAGES = 64, READ_BLOCKS = 4, CLIENT = 1 };
#define MB 1000000.0
#define STEP_NS 1000000
#define REQUESTS 512

struct slow_io {
    struct kvt_io io;
    struct kvt_io *inner;
    const int64_t *now;
    double write_rate, read_rate; /* bytes a second */
    bool one_channel;
    int64_t write_free_ns, read_free_ns; /* the channel is busy until then */
    struct {
        struct kvt_io_req *req;
        int64_t due_ns;
    } queue[REQUESTS];
    unsigned count;
};

static struct slow_io *slow_of(struct kvt_io *io)
{
    return (struct slow_io *)io;
}

#define INNER (slow_of(io)->inner)

static void slow_destroy(struct kvt_io *io)
{
    INNER->ops->destroy(INNER);
    free(io);
}

static int slow_open(struct kvt_io *io, const char *name, int flags)
{
    return INNER->ops->open(INNER, name, flags);
}

static void slow_close(struct kvt_io *io, int file)
{
    INNER->ops->close(INNER, file);
}

static int64_t slow_size(struct kvt_io *io, int file)
{
    return INNER->ops->size(INNER, file);
}

static int slow_truncate(struct kvt_io *io, int file, uint64_t bytes)
{
    return INNER->ops->truncate(INNER, file, bytes);
}

static int slow_allocate(struct kvt_io *io, int file, uint64_t bytes)
{
    return INNER->ops->allocate(INNER, file, bytes);
}

static int slow_punch(struct kvt_io *io, int file, uint64_t offset, uint64_t bytes)
{
    return INNER->ops->punch(INNER, file, offset, bytes);
}

static int slow_unlink(struct kvt_io *io, const char *name)
{
    return INNER->ops->unlink(INNER, name);
}

static int slow_rename(struct kvt_io *io, const char *from, const char *to)
{
    return INNER->ops->rename(INNER, from, to);
}

static int slow_sync_dir(struct kvt_io *io)
{
    return INNER->ops->sync_dir(INNER);
}

static int slow_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    return INNER->ops->list(INNER, fn, arg);
}

static int slow_lock(struct kvt_io *io, int64_t *owner_pid)
{
    return INNER->ops->lock(INNER, owner_pid);
}

static void slow_info(struct kvt_io *io, struct kvt_io_info *info)
{
    INNER->ops->info(INNER, info);
}

static int slow_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct slow_io *slow = slow_of(io);
    bool read = req->kind == KVT_IO_READ;
    int64_t *free_ns = read && !slow->one_channel ? &slow->read_free_ns : &slow->write_free_ns;
    double bytes = 0;

    if (slow->count == REQUESTS)
        return -11; /* EAGAIN */
    for (uint32_t i = 0; i < req->iov_count && req->kind != KVT_IO_PUNCH; i++)
        bytes += (double)req->iov[i].iov_len;
    *free_ns = KVT_MAX(*free_ns, *slow->now) +
               (int64_t)(bytes / (read ? slow->read_rate : slow->write_rate) * 1e9);
    slow->queue[slow->count].req = req;
    slow->queue[slow->count++].due_ns = *free_ns;
    return 0;
}

static unsigned slow_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct slow_io *slow = slow_of(io);
    unsigned n = 0;

    for (unsigned i = 0; i < slow->count && n < max;) {
        if (slow->queue[i].due_ns > *slow->now) {
            i++;
            continue;
        }
        assert_int_equal(INNER->ops->submit(INNER, slow->queue[i].req), 0);
        while (!INNER->ops->reap(INNER, &out[n], 1))
            ;
        n++;
        memmove(&slow->queue[i], &slow->queue[i + 1],
                (slow->count - i - 1) * sizeof(slow->queue[0]));
        slow->count--;
    }
    return n;
}

static int slow_event_fd(struct kvt_io *io)
{
    (void)io;
    return -1;
}

static const struct kvt_io_ops slow_ops = {
    .name = "slow",
    .destroy = slow_destroy,
    .open = slow_open,
    .close = slow_close,
    .size = slow_size,
    .truncate = slow_truncate,
    .allocate = slow_allocate,
    .punch = slow_punch,
    .unlink = slow_unlink,
    .rename = slow_rename,
    .sync_dir = slow_sync_dir,
    .list = slow_list,
    .lock = slow_lock,
    .info = slow_info,
    .submit = slow_submit,
    .reap = slow_reap,
    .event_fd = slow_event_fd,
};

static const uint32_t pages[7] = {0, 0, 0, 0, 0, 0, BLOCK_PAGES}; /* 256 KiB */
static struct rig rig;
static uint32_t ns;

static struct slow_io *begin(const struct rig_options *options)
{
    struct slow_io *slow = calloc(1, sizeof(*slow));

    assert_non_null(slow);
    slow->io.ops = &slow_ops;
    slow->now = &rig.now_ns;
    slow->write_rate = slow->read_rate = 1e18; /* at once, for the preparation */
    assert_int_equal(kvt_io_mem_new(UINT64_C(1) << 30, &slow->inner), 0);
    rig_open(&rig, options, &slow->io);
    rig.check_each_step = false;
    ns = rig_ns(&rig, 1, pages);
    return slow;
}

/* A millisecond passes. */
static void step(void)
{
    rig.now_ns += STEP_NS;
    for (int i = 0; i < 3; i++)
        kvt_store_run(rig.store);
}

/* Load READ_BLOCKS blocks (1 MiB) while `offer` goes on; how long it took. */
static int64_t read_beside(const uint64_t *numbers, void (*offer)(void))
{
    int64_t start = rig.now_ns;
    uint64_t cookie;
    uint32_t have = 0;

    rig_forget_replies(&rig);
    cookie = rig_acquire(&rig, CLIENT, ns, numbers, READ_BLOCKS, 0, INT64_MAX);
    while (have < READ_BLOCKS) {
        kvt_store_run(rig.store);
        for (uint32_t i = 0; i < rig.reply_count; i++) {
            struct kvt_msg_grant grant;

            if (rig.replies[i]->cookie != cookie)
                continue;
            memcpy(&grant, rig.replies[i], sizeof(grant));
            assert_int_equal(grant.msg.status, 0);
            assert_int_equal(rig_verify(&rig, ns, numbers[have], &grant), 0);
            rig_release(&rig, CLIENT, &grant, 0);
            have++;
        }
        rig_forget_replies(&rig);
        assert_true(rig.now_ns - start < INT64_C(60000000000));
        offer();
        step();
    }
    return rig.now_ns - start;
}

static uint64_t next_number, offered, refused;

/* What a fast engine offers in a millisecond: a block of 256 KiB, 262 MB/s. Answered within it. */
static void offer_block(void)
{
    int64_t before = rig.now_ns;
    struct kvt_alloc_entry entry;

    rig_alloc(&rig, CLIENT, ns, &next_number, 1, 0, RAW, false, &entry);
    if (entry.status) {
        assert_int_equal(entry.status, KVT_E_DROPPED);
        refused++;
    } else {
        assert_int_equal(
            rig_commit(&rig, CLIENT, &entry, rig_fill(&rig, ns, next_number, 0, RAW, &entry)), 0);
    }
    assert_true(rig.now_ns - before <= INT64_C(10000000)); /* put <= 10 ms */
    assert_true(rig_stats(&rig).disk_queue_bytes <= rig.options.write_queue_bytes);
    offered++;
    next_number++;
}

static void slow_writes(bool one_channel, int write_policy, uint64_t blocks)
{
    struct rig_options options = rig_defaults();
    struct kvt_store_stats stats;
    uint64_t old[64], found = 0, worst = 0;
    struct slow_io *slow;

    options.cache_bytes = 8u << 20;
    options.staging_bytes = 4u << 20;
    options.write_queue_bytes = 4u << 20;
    options.disk_cap_bytes = 640u << 20; /* more than is written: nothing is recycled */
    options.write = write_policy;
    slow = begin(&options);
    for (uint32_t i = 0; i < 64; i++) { /* 16 MiB that are read later: twice DRAM */
        old[i] = 1000000 + i;
        assert_int_equal(rig_put(&rig, ns, &old[i], 1, 0, RAW, false, NULL), 1);
    }
    assert_int_equal(rig_flush(&rig), 0);
    rig.held_io = true; /* the rig does not wait for the disk any more */
    slow->write_rate = 50 * MB;
    slow->read_rate = 2000 * MB;
    slow->one_channel = one_channel;
    next_number = 1;
    offered = refused = 0;
    for (int round = 0; offered < blocks; round++) {
        int64_t took;

        for (int i = 0; i < 25; i++) {
            offer_block();
            step();
        }
        took = read_beside(&old[round % 16 * READ_BLOCKS], offer_block);
        worst = KVT_MAX(worst, (uint64_t)took);
    }
    stats = rig_stats(&rig);
    rig_check(&rig);
    printf("           %s: %llu MiB offered in %llu ms, slowest read %llu ms, %llu blocks refused,"
           " %llu dropped by the queue, %llu lost\n",
           one_channel ? "one channel" : "own channels", (unsigned long long)offered / 4,
           (unsigned long long)offered, (unsigned long long)worst / 1000000,
           (unsigned long long)refused, (unsigned long long)stats.disk_dropped_queue,
           (unsigned long long)stats.evict_dram_lost);
    assert_true(worst < UINT64_C(200000000));
    assert_int_equal(refused, stats.alloc_dropped_dram);
    slow->write_rate = slow->read_rate = 1e18;
    for (int i = 0; i < 3000; i++) /* what is in flight ends at the old rate */
        step();
    rig.held_io = false;
    rig_settle(&rig);
    assert_int_equal(rig_flush(&rig) == 0 || rig_stats(&rig).evict_dram_lost > 0, 1);
    stats = rig_stats(&rig);
    for (uint64_t n = 1; n < next_number; n++)
        found += rig_get(&rig, ns, &n, 1, 0, NULL, NULL);
    /* everything offered is there, or in a counter */
    assert_int_equal(found + refused + stats.lost_queue + stats.lost_deferred, offered);
    rig_close(&rig);
}

static void test_c48_slow_writes_hold_up_nobody(void **state)
{
    (void)state;
    slow_writes(false, KVT_WRITE_THROUGH, 8192); /* 2 GiB: 40 s of the drive, offered in 8 */
    slow_writes(false, KVT_WRITE_EVICT, 1000);
}

static void test_c48_nor_on_a_drive_with_one_channel(void **state)
{
    (void)state;
    slow_writes(true, KVT_WRITE_THROUGH, 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c48_slow_writes_hold_up_nobody),
        cmocka_unit_test(test_c48_nor_on_a_drive_with_one_channel),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
