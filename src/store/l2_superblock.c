/* The superblock: two copies written in turn, so that one is whole at any moment. It reserves
 * generations and sequences ahead in strides and is therefore written rarely: at open, when a
 * stride runs out, when the journal gets a new epoch, and at close. What it promises counts only
 * after the fdatasync: `durable` is copied from `next` then. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

/* What the next write says: room for the strides ahead. last: nothing is in flight, none follows.
 */
static void super_compose(struct kvt_l2 *l2, bool last)
{
    struct kvt_l2_super *super = &l2->super;
    struct kvt_superblock *next = &super->next;
    const struct kvt_superblock *durable = &super->durable;

    memset(next, 0, sizeof *next);
    next->magic = KVT_SUPERBLOCK_MAGIC;
    next->version = KVT_DISK_VERSION;
    next->update = durable->update + 1;
    next->copy = (uint32_t)(next->update & 1);
    memcpy(next->root_id, l2->root_id, sizeof next->root_id);
    next->cap_bytes = l2->params.cap_bytes;
    next->segment_bytes = l2->segment_bytes;
    next->segment_count = l2->segment_count;
    next->next_generation =
        KVT_MAX(durable->next_generation, l2->generation_next + KVT_L2_GENERATION_STRIDE);
    next->next_sequence =
        KVT_MAX(durable->next_sequence, l2->sequence_upto + KVT_L2_SEQUENCE_STRIDE);
    next->journal_epoch = durable->journal_epoch;
    next->journal_pages = durable->journal_pages;
    if (l2->journal.epoch > durable->journal_epoch) {
        next->journal_epoch = l2->journal.epoch;
        next->journal_pages = l2->journal.pages;
    } else if (l2->journal.epoch == durable->journal_epoch) {
        next->journal_pages = KVT_MAX(durable->journal_pages, l2->journal.pages);
    }
    if (last && l2->open && l2->open->written == l2->open->synced) {
        next->clean_generation = l2->segments[l2->open->segment].generation;
        next->clean_page = l2->open->next_page;
    } else {
        next->clean_generation = durable->clean_generation;
        next->clean_page = durable->clean_page;
    }
    kvt_superblock_finish(next);
    *super->page = *next;
}

static void super_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_super *super = &l2->super;
    int64_t want = super->step == KVT_L2_WRITE ? KVT_PAGE_BYTES : 0;

    if (op->req.result != want) {
        kvt_log(&l2->params.log, KVT_LOG_WARN, "superblock cannot be written: %s",
                kvt_strerror(op->req.result < 0 ? (int)op->req.result : -EIO));
        l2->stats.enospc += kvt_l2_full(op->req.result);
        super->step = KVT_L2_IDLE;
        super->wanted = true;
        super->retry_ns = kvt_l2_now(l2) + KVT_L2_PAUSE_NS_MIN;
        return;
    }
    if (super->step == KVT_L2_SYNC) {
        super->durable = super->next;
        super->step = KVT_L2_IDLE;
        return;
    }
    super->step = KVT_L2_SYNC;
    memset(&op->req, 0, offsetof(struct kvt_io_req, iov));
    op->req.kind = KVT_IO_SYNC;
    op->req.file = super->file;
    kvt_l2_submit(l2, op);
}

void kvt_l2_super_pump(struct kvt_l2 *l2, int64_t now)
{
    struct kvt_l2_super *super = &l2->super;
    struct kvt_io_req *req = &super->op.req;

    if (!super->wanted || super->step != KVT_L2_IDLE || super->retry_ns > now ||
        l2->params.read_only)
        return;
    super->wanted = false;
    super_compose(l2, false);
    memset(req, 0, offsetof(struct kvt_io_req, iov));
    req->kind = KVT_IO_WRITE;
    req->file = super->file;
    req->offset = super->next.copy * (uint64_t)KVT_PAGE_BYTES;
    req->iov_count = 1;
    req->iov[0] = (struct iovec){super->page, KVT_PAGE_BYTES};
    super->op.finish = super_done;
    super->step = KVT_L2_WRITE;
    kvt_l2_submit(l2, &super->op);
}

int kvt_l2_super_write_now(struct kvt_l2 *l2)
{
    struct kvt_l2_super *super = &l2->super;
    int64_t got;
    int rc;

    super_compose(l2, l2->closing);
    got = kvt_io_write_now(l2->io, super->file, super->next.copy * (uint64_t)KVT_PAGE_BYTES,
                           super->page, KVT_PAGE_BYTES);
    if (got != KVT_PAGE_BYTES)
        return got < 0 ? (int)got : -EIO;
    rc = kvt_io_sync_now(l2->io, super->file);
    if (!rc)
        super->durable = super->next;
    return rc;
}

void kvt_l2_reserve_sequence(struct kvt_l2 *l2, uint64_t upto)
{
    l2->sequence_upto = KVT_MAX(l2->sequence_upto, upto);
    if (l2->sequence_upto + KVT_L2_SEQUENCE_STRIDE / 2 > l2->super.durable.next_sequence)
        l2->super.wanted = true;
}
