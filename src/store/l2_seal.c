/* Sealing a full (or failed) segment and flushing.
 *
 * Seal: fdatasync of the records; footer right before the trailer in the segment's last pages, one
 * request; fdatasync. So a footer speaks only for records that are durable. A footer that cannot be
 * written leaves a segment that the next open walks and verifies.
 * Flush: every batch accepted before is reported, the open segment is synced, the segments closed
 * before are sealed, and those whose sync had failed are synced again: after a failure no flush
 * succeeds as long as the drive refuses to sync what is before it. (Without O_DIRECT the kernel may
 * have dropped the pages of a failed sync: then a second one proves nothing.) */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

void kvt_l2_close_open(struct kvt_l2 *l2)
{
    l2->closed = l2->open;
    l2->open = NULL;
    l2->seals_started++;
    kvt_l2_segment_move(l2, l2->closed->segment, KVT_L2_CLOSING);
}

uint32_t kvt_l2_trailer_make(const struct kvt_l2 *l2, uint32_t segment, struct kvt_entry *entries,
                             uint32_t count, struct kvt_trailer *trailer)
{
    size_t bytes = count * sizeof *entries, padded = kvt_round_up(bytes, KVT_PAGE_BYTES);

    memset((uint8_t *)entries + bytes, 0, padded - bytes);
    memset(trailer, 0, sizeof *trailer);
    trailer->magic = KVT_TRAILER_MAGIC;
    trailer->version = KVT_DISK_VERSION;
    trailer->segment = segment;
    trailer->generation = l2->segments[segment].generation;
    trailer->footer_page = l2->segment_pages - 1 - (uint32_t)(padded / KVT_PAGE_BYTES);
    trailer->footer_count = count;
    trailer->footer_checksum = kvt_footer_checksum(entries, count);
    kvt_trailer_finish(trailer);
    return trailer->footer_page;
}

static void sync_request(struct kvt_l2 *l2, struct kvt_l2_op *op, int slot)
{
    memset(&op->req, 0, offsetof(struct kvt_io_req, iov));
    op->req.kind = KVT_IO_SYNC;
    op->req.file = l2->files[slot].file;
    kvt_l2_submit(l2, op);
}

static void segment_sealed(struct kvt_l2 *l2, int status, enum kvt_l2_unsynced state)
{
    struct kvt_l2_active *active = l2->closed;

    if (status)
        kvt_log(&l2->params.log, KVT_LOG_WARN, "segment %u: sync failed: %s",
                (unsigned)active->segment, kvt_strerror(status));
    kvt_l2_file_put(l2, active->slot);
    if (!active->count)
        l2->stats.segments_live--;
    kvt_l2_segment_move(l2, active->segment, active->count ? KVT_L2_SEALED : KVT_L2_BLANK);
    if (active->count)
        kvt_l2_segment_synced(l2, active->segment, state);
    l2->segments[active->segment].moved = active->moved > active->synced;
    l2->closed = NULL;
    l2->seal.step = KVT_L2_IDLE;
    l2->seals_done++;
}

/* Footer and trailer of the closed segment, whose records are durable. */
static void write_footer(struct kvt_l2 *l2)
{
    struct kvt_l2_active *active = l2->closed;
    struct kvt_io_req *req = &l2->seal.op.req;
    uint32_t page =
        kvt_l2_trailer_make(l2, active->segment, active->entries, active->count, l2->seal.page);

    memset(req, 0, offsetof(struct kvt_io_req, iov));
    req->kind = KVT_IO_WRITE;
    req->file = l2->files[active->slot].file;
    req->offset = page * (uint64_t)KVT_PAGE_BYTES;
    req->iov_count = 2;
    req->iov[0] =
        (struct iovec){active->entries, (size_t)(l2->segment_pages - 1 - page) * KVT_PAGE_BYTES};
    req->iov[1] = (struct iovec){l2->seal.page, KVT_PAGE_BYTES};
    l2->seal.step = KVT_L2_WRITE;
    kvt_l2_submit(l2, &l2->seal.op);
}

static void footer_written(struct kvt_l2 *l2, const struct kvt_io_req *req)
{
    int64_t want = (int64_t)(req->iov[0].iov_len + req->iov[1].iov_len);
    int status;

    if (req->result == want) {
        l2->stats.bytes_written += (uint64_t)want;
        l2->seal.step = KVT_L2_SYNC;
        sync_request(l2, &l2->seal.op, l2->closed->slot);
        return;
    }
    status = req->result < 0 ? (int)req->result : -EIO;
    kvt_log(&l2->params.log, KVT_LOG_WARN, "segment %u: no footer: %s",
            (unsigned)l2->closed->segment, kvt_strerror(status));
    if (kvt_l2_full(status))
        l2->stats.enospc++;
    /* a walk finds the records, but for those behind a failed batch */
    segment_sealed(l2, 0, l2->closed->gap ? KVT_L2_SYNC_NEVER : KVT_L2_SYNCED);
}

static void seal_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    int status = (int)KVT_MIN(op->req.result, 0);
    /* without a footer, records behind a failed batch are lost */
    bool never = l2->seal.step == KVT_L2_DATA && l2->closed->gap;

    if (l2->seal.step == KVT_L2_WRITE)
        footer_written(l2, &op->req);
    else if (status)
        segment_sealed(l2, status, never ? KVT_L2_SYNC_NEVER : KVT_L2_SYNC_AGAIN);
    else if (l2->seal.step == KVT_L2_SYNC)
        segment_sealed(l2, 0, KVT_L2_SYNCED);
    else
        write_footer(l2);
}

void kvt_l2_seal_pump(struct kvt_l2 *l2)
{
    struct kvt_l2_active *active;

    if (l2->open && l2->open->failed && !l2->closed)
        kvt_l2_close_open(l2);
    active = l2->closed;
    if (!active || active->in_flight || l2->seal.step != KVT_L2_IDLE ||
        (l2->flush.step == KVT_L2_FLUSH_OPEN && l2->flush.active == active))
        return;
    l2->seal.op.finish = seal_done;
    if (!active->count) {
        segment_sealed(l2, 0, KVT_L2_SYNCED);
    } else if (active->written == active->synced) {
        write_footer(l2);
    } else {
        l2->seal.step = KVT_L2_DATA;
        sync_request(l2, &l2->seal.op, active->slot);
    }
}

int kvt_l2_seal_now(struct kvt_l2 *l2, uint32_t segment, const struct kvt_l2_active *active)
{
    uint32_t page, pages;
    int64_t got;
    int file, slot = kvt_l2_file_get(l2, segment, false);

    if (slot < 0)
        return slot;
    file = l2->files[slot].file;
    page = kvt_l2_trailer_make(l2, segment, active->entries, active->count, l2->seal.page);
    pages = l2->segment_pages - 1 - page;
    got = kvt_io_sync_now(l2->io, file);
    if (got >= 0)
        got = kvt_io_write_now(l2->io, file, page * (uint64_t)KVT_PAGE_BYTES, active->entries,
                               (size_t)pages * KVT_PAGE_BYTES);
    if (got == (int64_t)pages * KVT_PAGE_BYTES)
        got = kvt_io_write_now(l2->io, file, (l2->segment_pages - 1) * (uint64_t)KVT_PAGE_BYTES,
                               l2->seal.page, KVT_PAGE_BYTES);
    if (got >= 0)
        got = kvt_io_sync_now(l2->io, file);
    kvt_l2_file_put(l2, slot);
    return (int)KVT_MIN(got, 0);
}

static void flush_open_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_flush *flush = &l2->flush;

    if (op->req.result < 0)
        flush->status = (int)op->req.result;
    else
        flush->active->synced = flush->mark;
    kvt_l2_file_put(l2, flush->slot);
    flush->step = KVT_L2_FLUSH_SEALS;
}

/* Sync the open segment if it has batches that are not durable. */
static void flush_open(struct kvt_l2 *l2)
{
    struct kvt_l2_flush *flush = &l2->flush;
    struct kvt_l2_active *active = l2->open;

    flush->seals_target = l2->seals_started;
    if (!active || active->written == active->synced) {
        flush->step = KVT_L2_FLUSH_SEALS;
        return;
    }
    flush->step = KVT_L2_FLUSH_OPEN;
    flush->active = active;
    flush->mark = active->written;
    flush->slot = kvt_l2_file_get(l2, active->segment, false); /* open already: cannot fail */
    flush->op.finish = flush_open_done;
    sync_request(l2, &flush->op, active->slot);
}

static void flush_again_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_flush *flush = &l2->flush;

    l2->segments[flush->cursor].busy--;
    kvt_l2_file_put(l2, flush->slot);
    if (op->req.result < 0)
        flush->status = (int)op->req.result;
    else
        kvt_l2_segment_synced(l2, flush->cursor, KVT_L2_SYNCED);
    flush->cursor++;
    flush->step = KVT_L2_FLUSH_SEALS;
}

/* Sync the next segment whose sync had failed. False: there is none left. */
static bool flush_again(struct kvt_l2 *l2)
{
    struct kvt_l2_flush *flush = &l2->flush;

    for (; flush->cursor < l2->limit && l2->unsynced; flush->cursor++) {
        struct kvt_l2_segment *segment = &l2->segments[flush->cursor];

        if (segment->unsynced == KVT_L2_SYNC_NEVER)
            flush->status = -EIO;
        if (segment->unsynced != KVT_L2_SYNC_AGAIN)
            continue;
        flush->slot = kvt_l2_file_get(l2, flush->cursor, false);
        if (flush->slot == -EAGAIN)
            return true; /* no descriptor now: the next run tries again */
        if (flush->slot < 0) {
            flush->status = flush->slot;
            continue;
        }
        segment->busy++;
        flush->step = KVT_L2_FLUSH_AGAIN;
        flush->op.finish = flush_again_done;
        sync_request(l2, &flush->op, flush->slot);
        return true;
    }
    return false;
}

void kvt_l2_flush_pump(struct kvt_l2 *l2)
{
    struct kvt_l2_flush *flush = &l2->flush;

    if (flush->step == KVT_L2_FLUSH_WRITES && l2->writes_reported >= flush->writes_target)
        flush_open(l2);
    if (flush->step != KVT_L2_FLUSH_SEALS || l2->seals_done < flush->seals_target ||
        flush_again(l2))
        return;
    flush->step = KVT_L2_FLUSH_IDLE;
    flush->done(flush->ctx, flush->status);
}

int kvt_l2_flush(struct kvt_l2 *l2, void (*done)(void *ctx, int status), void *ctx)
{
    struct kvt_l2_flush *flush = &l2->flush;

    if (flush->step != KVT_L2_FLUSH_IDLE)
        return -EAGAIN;
    flush->step = KVT_L2_FLUSH_WRITES;
    flush->writes_target = l2->writes_accepted;
    flush->status = 0;
    flush->cursor = 0;
    flush->done = done;
    flush->ctx = ctx;
    return 0;
}
