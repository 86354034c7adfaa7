/* Reading and erasing.
 *
 * Reads are queued, and bounded in flight; a segment counts the reads accepted for it (`busy`) and
 * is not recycled while there are any. Queued reads that lie side by side go out as one request.
 * When that fails or ends early, each of them is read again alone: a bad sector costs its own
 * record only. Erase overwrites purged bytes: a hole, or zeros where holes cannot be punched. Best
 * effort, by the backend's threads, one request at a time; neighbours that wait are one range.
 * Queued ranges keep their segment from being recycled, so an erase never meets a later life. Bytes
 * are not verified here: only the reader knows what they should be. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

#define SLOTS_FOR_WRITES 5 /* open, closing, preparing, flush, erase */
#define ZERO_BYTES (64u << 10)
#define MERGE_LOOKS 16u /* ranges that a new one may be merged with */

static void list_push(struct kvt_l2_read_list *list, struct kvt_l2_read *read)
{
    read->next = NULL;
    if (list->tail)
        list->tail->next = read;
    else
        list->head = read;
    list->tail = read;
}

static struct kvt_l2_read *list_pop(struct kvt_l2_read_list *list)
{
    struct kvt_l2_read *read = list->head;

    list->head = read->next;
    if (!list->head)
        list->tail = NULL;
    read->next = NULL;
    return read;
}

static bool live(const struct kvt_l2 *l2, uint32_t segment)
{
    uint8_t state;

    if (segment >= l2->limit)
        return false;
    state = l2->segments[segment].state;
    return state == KVT_L2_OPEN || state == KVT_L2_CLOSING || state == KVT_L2_SEALED ||
           state == KVT_L2_UNREAD;
}

/* 0; KVT_E_INVAL not a place of any segment; KVT_E_STALE the segment has no live records. */
static int check_range(const struct kvt_l2 *l2, struct kvt_l2_where where, uint32_t pages, bool raw)
{
    if (where.segment >= l2->limit || !where.page || !pages ||
        (uint64_t)where.page + pages + !raw > l2->segment_pages)
        return KVT_E_INVAL;
    return live(l2, where.segment) ? 0 : KVT_E_STALE;
}

static void read_over(struct kvt_l2 *l2, struct kvt_l2_read *read, int status)
{
    read->status = status;
    list_push(&l2->read_done, read);
}

/* Back into the queue, ahead of the others. */
static void read_again(struct kvt_l2 *l2, struct kvt_l2_read *read)
{
    read->alone = true;
    read->next = l2->read_queue.head;
    l2->read_queue.head = read;
    if (!read->next)
        l2->read_queue.tail = read;
}

static void read_done(struct kvt_l2_op *op)
{
    struct kvt_l2_read_op *read_op = (struct kvt_l2_read_op *)op;
    struct kvt_l2 *l2 = op->l2;
    int64_t want = (int64_t)read_op->pages * KVT_PAGE_BYTES;
    int status = 0;

    if (op->req.result < 0)
        status = (int)op->req.result;
    else if (op->req.result != want)
        status = KVT_E_CORRUPT; /* the file ends before the record does */
    l2->stats.bytes_read += (uint64_t)KVT_MAX(op->req.result, 0);
    l2->reads_in_flight--;
    kvt_l2_file_put(l2, read_op->slot);
    while (read_op->reads.head) {
        struct kvt_l2_read *read = list_pop(&read_op->reads);

        if (status && read_op->count > 1) {
            read_again(l2, read);
            continue;
        }
        l2->segments[read->where.segment].busy--;
        read_over(l2, read, status);
    }
    read_op->next_free = l2->read_free;
    l2->read_free = read_op;
}

static bool slot_free(const struct kvt_l2 *l2, uint32_t segment)
{
    int idle = 0;

    if (l2->segments[segment].slot >= 0)
        return true;
    for (uint32_t i = 0; i < l2->params.files_max; i++)
        idle += !l2->files[i].refs;
    return idle > SLOTS_FOR_WRITES;
}

/* Take the queued read that begins where `read_op` ends out of the queue, or NULL. */
static struct kvt_l2_read *take_adjacent(struct kvt_l2 *l2, const struct kvt_l2_read_op *read_op)
{
    const struct kvt_l2_read *first = read_op->reads.head;
    uint32_t end = first->where.page + read_op->pages;
    struct kvt_l2_read *before = NULL;

    if (first->alone)
        return NULL;
    for (struct kvt_l2_read *read = l2->read_queue.head; read; before = read, read = read->next) {
        if (read->where.segment != first->where.segment || read->where.page != end || read->alone)
            continue;
        if ((read_op->pages + read->pages) * (uint64_t)KVT_PAGE_BYTES > KVT_L2_READ_BYTES_MAX)
            return NULL;
        if (before)
            before->next = read->next;
        else
            l2->read_queue.head = read->next;
        if (!read->next)
            l2->read_queue.tail = before;
        return read;
    }
    return NULL;
}

/* Append a read to the request; memory that lies side by side as well is one piece. */
static void add_read(struct kvt_l2_read_op *read_op, struct kvt_l2_read *read)
{
    struct kvt_io_req *req = &read_op->op.req;
    struct iovec *last = req->iov_count ? &req->iov[req->iov_count - 1] : NULL;
    size_t bytes = (size_t)read->pages * KVT_PAGE_BYTES;

    if (last && (uint8_t *)last->iov_base + last->iov_len == (uint8_t *)read->dst)
        last->iov_len += bytes;
    else
        req->iov[req->iov_count++] = (struct iovec){read->dst, bytes};
    list_push(&read_op->reads, read);
    read_op->count++;
    read_op->pages += read->pages;
}

static bool start_read(struct kvt_l2 *l2)
{
    struct kvt_l2_read *read = l2->read_queue.head;
    struct kvt_l2_read_op *read_op = l2->read_free;
    struct kvt_io_req *req;
    int slot;

    if (!read || !read_op || !slot_free(l2, read->where.segment))
        return false;
    slot = kvt_l2_file_get(l2, read->where.segment, false);
    if (slot == -EAGAIN)
        return false;
    (void)list_pop(&l2->read_queue);
    if (slot < 0) {
        l2->segments[read->where.segment].busy--;
        read_over(l2, read, slot);
        return true;
    }
    l2->read_free = read_op->next_free;
    read_op->reads = (struct kvt_l2_read_list){NULL, NULL};
    read_op->count = read_op->pages = 0;
    read_op->slot = slot;
    read_op->op.finish = read_done;
    req = &read_op->op.req;
    memset(req, 0, offsetof(struct kvt_io_req, iov));
    req->kind = KVT_IO_READ;
    req->file = l2->files[slot].file;
    req->offset = read->where.page * (uint64_t)KVT_PAGE_BYTES;
    while (read) {
        add_read(read_op, read);
        read = req->iov_count < KVT_IO_IOV_MAX ? take_adjacent(l2, read_op) : NULL;
    }
    l2->reads_in_flight++;
    kvt_l2_submit(l2, &read_op->op);
    return true;
}

void kvt_l2_read_pump(struct kvt_l2 *l2)
{
    while (start_read(l2))
        ;
}

bool kvt_l2_read_report(struct kvt_l2 *l2)
{
    bool any = l2->read_done.head != NULL;

    while (l2->read_done.head) {
        struct kvt_l2_read *read = list_pop(&l2->read_done);

        read->done(read);
    }
    return any;
}

void kvt_l2_read(struct kvt_l2 *l2, struct kvt_l2_read *read)
{
    int rc = check_range(l2, read->where, read->pages, read->raw);

    if (!rc && l2->closing)
        rc = KVT_E_CLOSED;
    if (rc) {
        read_over(l2, read, rc);
        return;
    }
    l2->segments[read->where.segment].busy++;
    read->alone = false;
    list_push(&l2->read_queue, read);
}

int kvt_l2_hold(struct kvt_l2 *l2, struct kvt_l2_where where, uint32_t pages)
{
    int rc = check_range(l2, where, pages, false);

    if (rc || l2->closing)
        return rc ? rc : KVT_E_CLOSED;
    l2->segments[where.segment].busy++;
    return 0;
}

void kvt_l2_unhold(struct kvt_l2 *l2, struct kvt_l2_where where)
{
    l2->segments[where.segment].busy--;
}

static void erase_next(struct kvt_l2 *l2)
{
    struct kvt_l2_erase_queue *erase = &l2->erase;
    const struct kvt_l2_erase_range *range = &erase->ring[erase->head];

    if (range->pages) {
        l2->segments[range->segment].busy--;
        l2->segments[range->segment].erases--;
    }
    erase->head = (erase->head + 1) % KVT_L2_ERASES;
    erase->count--;
    erase->done_pages = 0;
}

static void zeros_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_erase_queue *erase = &l2->erase;

    kvt_l2_file_put(l2, erase->slot);
    erase->done_pages += (uint32_t)(KVT_MAX(op->req.result, 0) / KVT_PAGE_BYTES);
    if (op->req.result <= 0) {
        kvt_log(&l2->params.log, KVT_LOG_WARN, "purged bytes of segment %u stay until it is reused",
                (unsigned)erase->ring[erase->head].segment);
        erase_next(l2);
    } else if (erase->done_pages >= erase->ring[erase->head].pages) {
        erase_next(l2);
    }
}

/* Overwrite what is left of the range at the head with zeros, one request at a time. */
static void write_zeros(struct kvt_l2 *l2, int slot)
{
    struct kvt_l2_erase_queue *erase = &l2->erase;
    const struct kvt_l2_erase_range *range = &erase->ring[erase->head];
    struct kvt_io_req *req = &erase->op.req;
    uint64_t left = (uint64_t)(range->pages - erase->done_pages) * KVT_PAGE_BYTES;

    memset(req, 0, offsetof(struct kvt_io_req, iov));
    req->kind = KVT_IO_WRITE;
    req->file = l2->files[slot].file;
    req->offset = (range->page + (uint64_t)erase->done_pages) * KVT_PAGE_BYTES;
    while (left && req->iov_count < KVT_IO_IOV_MAX) {
        size_t piece = KVT_MIN(left, (uint64_t)ZERO_BYTES);

        req->iov[req->iov_count++] = (struct iovec){erase->zeros, piece};
        left -= piece;
    }
    erase->slot = slot;
    erase->op.finish = zeros_done;
    kvt_l2_submit(l2, &erase->op);
}

/* The bytes stay in the way that a hole would have ended: zeros, and for good where there are no
 * holes. */
static void punch_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_erase_queue *erase = &l2->erase;
    int64_t rc = op->req.result;

    if (rc >= 0) {
        kvt_l2_file_put(l2, erase->slot);
        erase_next(l2);
        return;
    }
    erase->no_punch = erase->no_punch || rc == -EOPNOTSUPP || rc == -ENOSYS;
    write_zeros(l2, erase->slot);
}

static void punch(struct kvt_l2 *l2, int slot)
{
    struct kvt_l2_erase_queue *erase = &l2->erase;
    const struct kvt_l2_erase_range *range = &erase->ring[erase->head];
    struct kvt_io_req *req = &erase->op.req;

    memset(req, 0, offsetof(struct kvt_io_req, iov));
    req->kind = KVT_IO_PUNCH;
    req->file = l2->files[slot].file;
    req->offset = range->page * (uint64_t)KVT_PAGE_BYTES;
    req->iov_count = 1;
    req->iov[0] = (struct iovec){NULL, (size_t)range->pages * KVT_PAGE_BYTES};
    erase->slot = slot;
    erase->op.finish = punch_done;
    l2->segments[range->segment].punched = 1;
    kvt_l2_submit(l2, &erase->op);
}

void kvt_l2_erase_pump(struct kvt_l2 *l2)
{
    struct kvt_l2_erase_queue *erase = &l2->erase;

    while (erase->count && !erase->op.busy && !erase->holds && !l2->journal.owed) {
        const struct kvt_l2_erase_range *range = &erase->ring[erase->head];
        int slot = range->pages ? kvt_l2_file_get(l2, range->segment, false) : -ENOENT;

        if (slot == -EAGAIN)
            return;
        if (slot < 0)
            erase_next(l2); /* forgotten; or the file is gone, and the bytes with it */
        else if (erase->no_punch || erase->done_pages)
            write_zeros(l2, slot);
        else
            punch(l2, slot);
    }
}

void kvt_l2_erase_hold(struct kvt_l2 *l2, bool on)
{
    l2->erase.holds += on ? 1 : -1u;
}

bool kvt_l2_erase_room(const struct kvt_l2 *l2)
{
    return l2->erase.count < KVT_L2_ERASES / 2 || l2->journal.owed; /* not worth waiting for */
}

void kvt_l2_erase_forget(struct kvt_l2 *l2, uint32_t segment)
{
    struct kvt_l2_erase_queue *erase = &l2->erase;

    for (uint32_t i = 0; i < erase->count && l2->segments[segment].erases; i++) {
        struct kvt_l2_erase_range *range = &erase->ring[(erase->head + i) % KVT_L2_ERASES];

        if (range->segment != segment || !range->pages)
            continue;
        range->pages = 0;
        l2->segments[segment].busy--;
        l2->segments[segment].erases--;
    }
}

/* Make the range part of one that waits beside it. Records leave in about the order in which they
 * were written: a look at the last few is enough. What is under way is not touched. */
static bool erase_merge(struct kvt_l2 *l2, struct kvt_l2_where where, uint32_t pages)
{
    struct kvt_l2_erase_queue *erase = &l2->erase;
    const uint32_t own = erase->op.busy || erase->done_pages ? 1 : 0;

    for (uint32_t i = 1; i <= MERGE_LOOKS && i + own <= erase->count; i++) {
        struct kvt_l2_erase_range *range =
            &erase->ring[(erase->head + erase->count - i) % KVT_L2_ERASES];

        if (!range->pages || range->segment != where.segment)
            continue;
        if (range->page == where.page + pages)
            range->page = where.page;
        else if (range->page + range->pages != where.page)
            continue;
        range->pages += pages;
        return true;
    }
    return false;
}

/* There is no place to wait in: now, by the caller's thread. */
static int erase_at_once(struct kvt_l2 *l2, struct kvt_l2_where where, uint32_t pages)
{
    int rc, slot = l2->erase.holds || l2->erase.no_punch
                       ? -EAGAIN
                       : kvt_l2_file_get(l2, where.segment, false);

    if (slot < 0)
        return slot;
    rc = l2->io->ops->punch(l2->io, l2->files[slot].file, where.page * (uint64_t)KVT_PAGE_BYTES,
                            (uint64_t)pages * KVT_PAGE_BYTES);
    l2->segments[where.segment].punched = 1;
    kvt_l2_file_put(l2, slot);
    return rc;
}

void kvt_l2_erase(struct kvt_l2 *l2, struct kvt_l2_where where, uint32_t pages)
{
    struct kvt_l2_erase_queue *erase = &l2->erase;

    if (l2->params.read_only || check_range(l2, where, pages, false) ||
        erase_merge(l2, where, pages))
        return;
    if (erase->count == KVT_L2_ERASES && l2->journal.owed)
        return; /* a purge that has failed */
    if (erase->count == KVT_L2_ERASES) {
        if (erase_at_once(l2, where, pages))
            kvt_log(&l2->params.log, KVT_LOG_WARN,
                    "purged bytes of segment %u stay until it is reused", (unsigned)where.segment);
        return;
    }
    erase->ring[(erase->head + erase->count) % KVT_L2_ERASES] =
        (struct kvt_l2_erase_range){where.segment, where.page, pages};
    erase->count++;
    l2->segments[where.segment].busy++;
    l2->segments[where.segment].erases++;
}
