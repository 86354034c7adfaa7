/* The log's life: open, run, close, and how its requests reach the backend. See l2.h for the rules
 * and l2_internal.h for the parts. kvt_l2_run() is the loop: collect completions (which only
 * record), report to the user, then let every part take its next step. */
#include "store/l2.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

#define CAP_BYTES_MIN (8ull << 20)
#define BATCH_BYTES_DEFAULT (16u << 20)
#define READS_DEFAULT 32u
#define ZERO_BYTES (64u << 10)
#define REAP 32u
#define REAPS_PER_RUN 8u

int64_t kvt_l2_now(const struct kvt_l2 *l2)
{
    return kvt_clock_now(&l2->params.clock);
}

void *kvt_l2_pages_alloc(size_t bytes)
{
    return aligned_alloc(KVT_PAGE_BYTES, kvt_round_up(bytes, KVT_PAGE_BYTES));
}

static void op_done(struct kvt_io_req *req)
{
    struct kvt_l2_op *op = req->user;

    op->l2->ops_in_flight--;
    op->busy = false;
    op->finish(op);
}

/* False: the backend is full, try again later. */
static bool op_send(struct kvt_l2 *l2, struct kvt_l2_op *op)
{
    int rc = l2->io->ops->submit(l2->io, &op->req);

    if (rc == -EAGAIN)
        return false;
    l2->ops_in_flight++;
    if (rc) {
        op->req.result = rc;
        op_done(&op->req);
    }
    return true;
}

static void unsent_send(struct kvt_l2 *l2)
{
    while (l2->unsent_head) {
        struct kvt_l2_op *op = l2->unsent_head;

        /* off the list first: a refused request finishes at once and may submit its next step */
        l2->unsent_head = op->next;
        if (!l2->unsent_head)
            l2->unsent_tail = NULL;
        if (op_send(l2, op))
            continue;
        op->next = l2->unsent_head;
        l2->unsent_head = op;
        if (!op->next)
            l2->unsent_tail = op;
        return;
    }
}

void kvt_l2_submit(struct kvt_l2 *l2, struct kvt_l2_op *op)
{
    op->l2 = l2;
    op->busy = true;
    op->next = NULL;
    op->req.user = op;
    op->req.done = op_done;
    if (!l2->unsent_head && op_send(l2, op))
        return;
    if (l2->unsent_tail)
        l2->unsent_tail->next = op;
    else
        l2->unsent_head = op;
    l2->unsent_tail = op;
}

static bool collect(struct kvt_l2 *l2)
{
    struct kvt_io_req *out[REAP];
    bool any = false;

    for (uint32_t i = 0; i < REAPS_PER_RUN; i++) {
        unsigned n = l2->io->ops->reap(l2->io, out, REAP);

        for (unsigned k = 0; k < n; k++)
            out[k]->done(out[k]);
        any = any || n;
        if (n < REAP)
            break;
    }
    return any;
}

/* No segment will take the pending writes before the pause is over. */
static bool must_refuse(const struct kvt_l2 *l2, int64_t now)
{
    return l2->pending.head && l2->pause_until_ns > now && (!l2->open || l2->open->failed) &&
           l2->prepare.step == KVT_L2_IDLE;
}

static void pump(struct kvt_l2 *l2, int64_t now)
{
    unsent_send(l2);
    kvt_l2_seal_pump(l2);
    kvt_l2_super_pump(l2, now);
    kvt_l2_append_pump(l2);
    kvt_l2_prepare_pump(l2, now);
    if (must_refuse(l2, now))
        kvt_l2_refuse_pending(l2, l2->pause_status);
    kvt_l2_read_pump(l2);
    kvt_l2_journal_pump(l2, now);
    kvt_l2_flush_pump(l2);
    kvt_l2_erase_pump(l2);
    kvt_l2_again_pump(l2, now);
}

static int64_t next_time(const struct kvt_l2 *l2, int64_t now)
{
    int64_t next = INT64_MAX;

    if (l2->refused.head || l2->read_done.head)
        return now;
    if (l2->ops_in_flight && l2->io->ops->event_fd(l2->io) < 0)
        return now;
    if (l2->erase.count && !l2->erase.op.busy && !l2->erase.holds && !l2->journal.owed)
        return now;
    if (l2->unsent_head && !l2->ops_in_flight)
        return now + KVT_L2_RETRY_NS;
    if (l2->pending.head && l2->prepare.step == KVT_L2_IDLE)
        next = KVT_MAX(l2->prepare.retry_ns, l2->pause_until_ns);
    if (l2->super.wanted && l2->super.step == KVT_L2_IDLE)
        next = KVT_MIN(next, l2->super.retry_ns);
    if (l2->journal.owed && l2->journal.step == KVT_L2_JOURNAL_IDLE)
        next = KVT_MIN(next, l2->journal.retry_ns);
    next = KVT_MIN(next, kvt_l2_again_next(l2));
    return KVT_MAX(next, now);
}

int64_t kvt_l2_run(struct kvt_l2 *l2)
{
    int64_t now = kvt_l2_now(l2);
    bool any;

    do {
        any = collect(l2);
        any = kvt_l2_append_report(l2, now) || any;
        any = kvt_l2_read_report(l2) || any;
        pump(l2, now);
        /* a backend that completes inside reap() is done when nothing more comes out; others ring
         */
    } while (any && l2->io->ops->event_fd(l2->io) < 0 && now == kvt_l2_now(l2));
    return next_time(l2, now);
}

/* Sleep until a completion may be there, at most some milliseconds. */
int kvt_l2_wait(struct kvt_l2 *l2)
{
    int fd = l2->io->ops->event_fd(l2->io);
    struct pollfd pfd = {.fd = fd, .events = POLLIN};

    if (fd < 0)
        return 0;
    return poll(&pfd, 1, 10) < 0 && errno != EINTR ? -errno : 0;
}

static bool idle(const struct kvt_l2 *l2)
{
    return !l2->pending.head && !l2->refused.head && !l2->batch_count && !l2->closed &&
           !(l2->open && l2->open->failed) && !l2->unsent_head && !l2->ops_in_flight &&
           !l2->read_queue.head && !l2->read_done.head &&
           (!l2->erase.count || l2->erase.holds || l2->journal.owed) &&
           l2->flush.step == KVT_L2_FLUSH_IDLE && l2->journal.step == KVT_L2_JOURNAL_IDLE;
}

static int parts_alloc(struct kvt_l2 *l2)
{
    const struct kvt_l2_params *params = &l2->params;

    l2->files = calloc(params->files_max, sizeof *l2->files);
    if (!l2->files)
        return -ENOMEM;
    for (uint32_t i = 0; i < params->files_max; i++)
        l2->files[i].file = -1;
    for (uint32_t i = 0; i < KVT_L2_WRITES; i++) {
        l2->batches[i].header =
            kvt_l2_pages_alloc((size_t)KVT_L2_BATCH_HEADER_PAGES * KVT_PAGE_BYTES);
        if (!l2->batches[i].header)
            return -ENOMEM;
    }
    l2->prepare.page = kvt_l2_pages_alloc(KVT_PAGE_BYTES);
    l2->seal.page = kvt_l2_pages_alloc(KVT_PAGE_BYTES);
    l2->super.page = kvt_l2_pages_alloc(KVT_PAGE_BYTES);
    l2->erase.zeros = kvt_l2_pages_alloc(ZERO_BYTES);
    l2->read_ops = calloc(params->reads_max, sizeof *l2->read_ops);
    if (!l2->prepare.page || !l2->seal.page || !l2->super.page || !l2->erase.zeros || !l2->read_ops)
        return -ENOMEM;
    memset(l2->erase.zeros, 0, ZERO_BYTES);
    for (uint32_t i = 0; i < params->reads_max; i++) {
        l2->read_ops[i].next_free = l2->read_free;
        l2->read_free = &l2->read_ops[i];
    }
    return 0;
}

static void parts_free(struct kvt_l2 *l2)
{
    kvt_l2_again_end(l2);
    kvt_l2_files_close(l2);
    if (l2->super.file >= 0)
        l2->io->ops->close(l2->io, l2->super.file);
    if (l2->journal.file >= 0)
        l2->io->ops->close(l2->io, l2->journal.file);
    for (uint32_t i = 0; i < KVT_L2_WRITES; i++)
        free(l2->batches[i].header);
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(l2->actives); i++)
        free(l2->actives[i].entries);
    free(l2->journal.items);
    free(l2->journal.buffer);
    free(l2->prepare.page);
    free(l2->seal.page);
    free(l2->super.page);
    free(l2->erase.zeros);
    free(l2->read_ops);
    free(l2->files);
    free(l2->segments);
    free(l2);
}

int kvt_l2_open(const struct kvt_l2_params *params, struct kvt_l2 **out, uint64_t *next_sequence)
{
    struct kvt_l2 *l2;
    int rc;

    *out = NULL;
    *next_sequence = 0;
    if (params->cap_bytes < CAP_BYTES_MIN && !params->read_only)
        return KVT_E_TOO_SMALL;
    l2 = calloc(1, sizeof *l2);
    if (!l2)
        return -ENOMEM;
    l2->params = *params;
    l2->io = params->io;
    if (!l2->params.batch_bytes_max)
        l2->params.batch_bytes_max = BATCH_BYTES_DEFAULT;
    if (!l2->params.reads_max)
        l2->params.reads_max = READS_DEFAULT;
    l2->params.files_max = KVT_MIN(KVT_MAX(params->files_max, KVT_L2_FILES_MIN), KVT_L2_FILES_MAX);
    l2->oldest = l2->newest = KVT_L2_NONE;
    l2->super.file = l2->journal.file = l2->journal.next_file = -1;
    l2->prepare.slot = -1;
    l2->pause_until_ns = l2->create_retry_ns = l2->prepare.retry_ns = INT64_MIN;
    l2->super.retry_ns = l2->failure_log_ns = INT64_MIN;
    l2->pause_ns = KVT_L2_PAUSE_NS_MIN;
    rc = parts_alloc(l2);
    if (!rc)
        rc = kvt_l2_recover(l2, next_sequence);
    if (rc) {
        parts_free(l2);
        return rc;
    }
    kvt_l2_again_start(l2);
    *out = l2;
    return 0;
}

static int sync_at_close(struct kvt_l2 *l2, uint32_t segment)
{
    int slot = kvt_l2_file_get(l2, segment, false);
    int rc = slot < 0 ? slot : kvt_io_sync_now(l2->io, l2->files[slot].file);

    kvt_l2_file_put(l2, slot);
    if (rc)
        kvt_log(&l2->params.log, KVT_LOG_WARN, "segment %u: sync failed: %s", (unsigned)segment,
                kvt_strerror(rc));
    return rc;
}

/* Make the open segment durable; it stays walkable, and the next open goes on in it. And a last try
 * for those whose sync has failed. */
static void sync_segments(struct kvt_l2 *l2)
{
    struct kvt_l2_active *active = l2->open;

    if (active && active->written != active->synced && !sync_at_close(l2, active->segment))
        active->synced = active->written;
    for (uint32_t i = 0; i < l2->limit && l2->unsynced; i++)
        if (l2->segments[i].unsynced == KVT_L2_SYNC_AGAIN && !sync_at_close(l2, i))
            kvt_l2_segment_synced(l2, i, KVT_L2_SYNCED);
}

void kvt_l2_close(struct kvt_l2 *l2)
{
    int rc;

    if (!l2)
        return;
    l2->closing = true;
    while (!idle(l2)) {
        int64_t next = kvt_l2_run(l2);

        if (l2->pending.head && !l2->ops_in_flight && !l2->unsent_head && next > kvt_l2_now(l2) &&
            l2->prepare.step == KVT_L2_IDLE)
            kvt_l2_refuse_pending(l2, KVT_E_NO_SPACE); /* nothing will come free any more */
        if (l2->ops_in_flight)
            (void)kvt_l2_wait(l2);
    }
    if (!l2->params.read_only) {
        sync_segments(l2);
        rc = kvt_l2_super_write_now(l2);
        if (rc)
            kvt_log(&l2->params.log, KVT_LOG_WARN, "superblock cannot be written: %s",
                    kvt_strerror(rc));
    }
    parts_free(l2);
}

void kvt_l2_set_ctx(struct kvt_l2 *l2, void *ctx)
{
    l2->params.ctx = ctx;
}

const char *kvt_l2_name(const struct kvt_l2 *l2)
{
    return l2->params.name ? l2->params.name : "";
}

uint32_t kvt_l2_segment_bytes(const struct kvt_l2 *l2)
{
    return l2->segment_bytes;
}

uint32_t kvt_l2_segment_limit(const struct kvt_l2 *l2)
{
    return l2->limit;
}

void kvt_l2_stats(const struct kvt_l2 *l2, struct kvt_l2_stats *stats)
{
    *stats = l2->stats;
    stats->writes_in_flight = l2->batch_count;
    stats->reads_in_flight = l2->reads_in_flight;
    stats->erases_queued = l2->erase.count;
}
