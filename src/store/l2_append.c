/* Appending: records wait in `pending`, become batches (header + records, one request), and are
 * reported in append order. The ring of batches holds at most two. A failed batch ends its segment:
 * its records are reported failed; a batch that was in flight behind it keeps its own outcome, and
 * is found again through the footer (a walk stops at the failed one). Does not choose segments. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

struct batch_plan {
    uint32_t count;
    uint32_t pages; /* header included */
    uint32_t header_pages;
};

static void list_push(struct kvt_l2_write_list *list, struct kvt_l2_write *write)
{
    write->next = NULL;
    if (list->tail)
        list->tail->next = write;
    else
        list->head = write;
    list->tail = write;
}

static struct kvt_l2_write *list_pop(struct kvt_l2_write_list *list)
{
    struct kvt_l2_write *write = list->head;

    list->head = write->next;
    if (!list->head)
        list->tail = NULL;
    write->next = NULL;
    return write;
}

void kvt_l2_active_reset(struct kvt_l2_active *active, uint32_t segment, int slot)
{
    struct kvt_entry *entries = active->entries;

    memset(active, 0, sizeof *active);
    active->entries = entries;
    active->segment = segment;
    active->slot = slot;
    active->next_page = 1;
}

static uint32_t footer_pages(uint32_t entries)
{
    return (uint32_t)(kvt_round_up(entries * (uint64_t)sizeof(struct kvt_entry), KVT_PAGE_BYTES) /
                      KVT_PAGE_BYTES);
}

/* The longest run of pending records that one batch in this segment can take. */
static struct batch_plan plan_batch(const struct kvt_l2 *l2, const struct kvt_l2_active *active)
{
    struct batch_plan plan = {0, 0, 0};
    uint32_t pages = 0, pieces = 1, count = 0;
    const uint8_t *end = NULL;

    for (const struct kvt_l2_write *w = l2->pending.head; w; w = w->next) {
        uint32_t header, total;

        count++;
        pages += w->entry.pages;
        pieces += w->record != end;
        end = (const uint8_t *)w->record + (size_t)w->entry.pages * KVT_PAGE_BYTES;
        header = kvt_batch_header_bytes(count) / KVT_PAGE_BYTES;
        total = header + pages;
        if (count > KVT_L2_BATCH_RECORDS || pieces > KVT_IO_IOV_MAX)
            break;
        if (count > 1 && (uint64_t)total * KVT_PAGE_BYTES > l2->params.batch_bytes_max)
            break;
        if (active->next_page + total + footer_pages(active->reserved + count) + 1 >
            l2->segment_pages)
            break;
        plan = (struct batch_plan){.count = count, .pages = total, .header_pages = header};
    }
    return plan;
}

static void batch_done(struct kvt_l2_op *op)
{
    struct kvt_l2_batch *batch = (struct kvt_l2_batch *)op;
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_active *active = batch->active;
    int64_t result = op->req.result;

    batch->complete = true;
    batch->status = 0;
    if (result == (int64_t)batch->bytes) {
        active->written++;
        if (batch->moved)
            active->moved = active->written;
        l2->stats.bytes_written += batch->bytes;
    } else {
        batch->status = result >= 0 ? -EIO : kvt_l2_full(result) ? KVT_E_NO_SPACE : (int)result;
    }
}

/* Take plan.count records off pending into the batch; fill header and request. */
static void fill_batch(struct kvt_l2 *l2, struct kvt_l2_active *active, struct kvt_l2_batch *batch,
                       const struct batch_plan *plan)
{
    struct kvt_batch_header *header = batch->header;
    struct kvt_io_req *req = &batch->op.req;
    struct kvt_l2_write_list taken = {NULL, NULL};
    uint32_t page = active->next_page + plan->header_pages;
    struct iovec *last = &req->iov[0];

    memset(header, 0, (size_t)plan->header_pages * KVT_PAGE_BYTES);
    batch->moved = false;
    *last = (struct iovec){header, (size_t)plan->header_pages * KVT_PAGE_BYTES};
    for (uint32_t i = 0; i < plan->count; i++) {
        struct kvt_l2_write *w = list_pop(&l2->pending);
        size_t bytes = (size_t)w->entry.pages * KVT_PAGE_BYTES;

        w->entry.page = page;
        w->where = (struct kvt_l2_where){active->segment, page};
        page += w->entry.pages;
        header->entries[i] = w->entry;
        batch->moved = batch->moved || w->moved;
        if (i && (const uint8_t *)last->iov_base + last->iov_len == w->record)
            last->iov_len += bytes;
        else
            *++last = (struct iovec){(void *)w->record, bytes};
        list_push(&taken, w);
    }
    header->magic = KVT_BATCH_MAGIC;
    header->version = KVT_DISK_VERSION;
    header->segment = active->segment;
    header->generation = l2->segments[active->segment].generation;
    header->page = active->next_page;
    header->header_pages = plan->header_pages;
    header->pages = plan->pages;
    header->count = plan->count;
    header->previous = active->previous;
    kvt_batch_header_finish(header);
    req->iov_count = (uint32_t)(last - req->iov) + 1;
    batch->list = taken.head;
}

static void submit_batch(struct kvt_l2 *l2, struct kvt_l2_active *active,
                         const struct batch_plan *plan)
{
    uint32_t at = (l2->batch_head + l2->batch_count) % KVT_L2_WRITES;
    struct kvt_l2_batch *batch = &l2->batches[at];
    struct kvt_io_req *req = &batch->op.req;

    memset(req, 0, offsetof(struct kvt_io_req, iov));
    fill_batch(l2, active, batch, plan);
    req->kind = KVT_IO_WRITE;
    req->file = l2->files[active->slot].file;
    req->offset = active->next_page * (uint64_t)KVT_PAGE_BYTES;
    batch->active = active;
    batch->bytes = plan->pages * KVT_PAGE_BYTES;
    batch->complete = false;
    batch->op.finish = batch_done;

    active->next_page += plan->pages;
    active->reserved += plan->count;
    active->previous = batch->header->checksum;
    active->in_flight++;
    l2->batch_count++;
    kvt_l2_submit(l2, &batch->op);
}

static void open_prepared(struct kvt_l2 *l2)
{
    struct kvt_l2_active *active =
        l2->closed == &l2->actives[0] ? &l2->actives[1] : &l2->actives[0];

    kvt_l2_active_reset(active, l2->prepare.segment, l2->prepare.slot);
    kvt_l2_segment_move(l2, active->segment, KVT_L2_OPEN);
    l2->stats.segments_live++;
    l2->prepare.slot = -1;
    l2->prepare.step = KVT_L2_IDLE;
    l2->open = active;
}

static bool append_one(struct kvt_l2 *l2)
{
    struct batch_plan plan;

    if (!l2->pending.head || l2->batch_count == KVT_L2_WRITES)
        return false;
    if (!l2->open) {
        if (l2->prepare.step != KVT_L2_PREPARED)
            return false;
        open_prepared(l2);
    }
    plan = plan_batch(l2, l2->open);
    if (l2->open->failed || !plan.count) {
        if (l2->closed)
            return false; /* the one before is still being sealed */
        kvt_l2_close_open(l2);
        return true;
    }
    submit_batch(l2, l2->open, &plan);
    return true;
}

void kvt_l2_append_pump(struct kvt_l2 *l2)
{
    while (append_one(l2))
        ;
}

/* Pending writes will not find room for now: hand them back. */
void kvt_l2_refuse_pending(struct kvt_l2 *l2, int status)
{
    while (l2->pending.head) {
        struct kvt_l2_write *w = list_pop(&l2->pending);

        w->status = status;
        list_push(&l2->refused, w);
    }
}

/* After the batches in flight, so that reports come in the order of acceptance (flush counts them).
 */
static void report_refused(struct kvt_l2 *l2)
{
    while (l2->refused.head && !l2->batch_count) {
        struct kvt_l2_write *w = list_pop(&l2->refused);

        l2->writes_reported++;
        w->done(w);
    }
}

static void report_batch(struct kvt_l2 *l2, struct kvt_l2_batch *batch)
{
    struct kvt_l2_active *active = batch->active;
    struct kvt_l2_segment *segment = &l2->segments[active->segment];
    struct kvt_l2_write *next;

    for (struct kvt_l2_write *w = batch->list; w; w = next) {
        next = w->next;
        w->next = NULL;
        w->status = batch->status;
        segment->min_sequence = KVT_MIN(segment->min_sequence, w->entry.sequence);
        if (!w->status)
            active->entries[active->count++] = w->entry;
        l2->writes_reported++;
        w->done(w);
    }
    batch->list = NULL;
}

/* Report complete batches in append order. True when something was reported. */
bool kvt_l2_append_report(struct kvt_l2 *l2, int64_t now)
{
    bool any = false;

    while (l2->batch_count && l2->batches[l2->batch_head].complete) {
        struct kvt_l2_batch *batch = &l2->batches[l2->batch_head];
        struct kvt_l2_active *active = batch->active;

        if (batch->status) {
            kvt_l2_log_failure(l2, "a write", active->segment, batch->status);
            active->failed = true;
            if (batch->status == KVT_E_NO_SPACE)
                l2->segments[active->segment].retry_ns = now + KVT_L2_PAUSE_NS_MIN;
            kvt_l2_failed(l2, batch->status, now);
        } else {
            active->gap = active->gap || active->failed;
            kvt_l2_worked(l2);
        }
        report_batch(l2, batch);
        active->in_flight--;
        l2->batch_head = (l2->batch_head + 1) % KVT_L2_WRITES;
        l2->batch_count--;
        any = true;
    }
    any = any || (l2->refused.head && !l2->batch_count);
    report_refused(l2);
    return any;
}

uint32_t kvt_l2_record_bytes_max(const struct kvt_l2 *l2)
{
    /* four batches of one record, each with a header page, between segment header and footer */
    uint32_t pages = (l2->segment_pages - 3) / 4 - 1;

    return KVT_MIN(pages * KVT_PAGE_BYTES, KVT_RECORD_BYTES_MAX);
}

uint64_t kvt_l2_cap_for(uint32_t record_bytes)
{
    uint64_t pages = 4 * (kvt_round_up(record_bytes, KVT_PAGE_BYTES) / KVT_PAGE_BYTES + 1) + 3;
    uint64_t bytes = KVT_MAX(pages * KVT_PAGE_BYTES, (uint64_t)KVT_SEGMENT_BYTES_MIN);

    return bytes > KVT_SEGMENT_BYTES_MAX ? 0 : bytes * KVT_SEGMENTS_OF_CAP;
}

bool kvt_l2_can_append(const struct kvt_l2 *l2)
{
    return !l2->params.read_only && !l2->closing && !l2->pending.head && !l2->refused.head &&
           l2->batch_count < KVT_L2_WRITES;
}

int kvt_l2_append(struct kvt_l2 *l2, struct kvt_l2_write *list)
{
    uint32_t pages_max = kvt_l2_record_bytes_max(l2) / KVT_PAGE_BYTES;
    struct kvt_l2_write *next;

    if (l2->params.read_only)
        return KVT_E_READ_ONLY;
    if (!kvt_l2_can_append(l2))
        return -EAGAIN;
    for (struct kvt_l2_write *w = list; w; w = next) {
        next = w->next;
        l2->writes_accepted++;
        w->entry.page = 1; /* for the check; the true one is set when its batch is made */
        if (!w->entry.pages || w->entry.pages > pages_max)
            w->status = KVT_E_TOO_SMALL;
        else
            w->status = kvt_entry_check(&w->entry, l2->segment_pages) ? KVT_E_INVAL : 0;
        list_push(w->status ? &l2->refused : &l2->pending, w);
        if (!w->status)
            kvt_l2_reserve_sequence(l2, w->entry.sequence + 1);
    }
    kvt_l2_append_pump(l2);
    return 0;
}
