/* Another look at segments that could not be read when the root was opened.
 *
 *   UNREAD --a look: header, footer, or a walk--> its records are reported --> SEALED
 *                                                 it holds none            --> BLANK
 *                     something cannot be read, or is not certain: left as it is, until later
 *
 * Rules
 *  1. Bounded: one segment at a time, one read of 1 MiB at a time, a pause between looks that
 *     begins with a second and doubles to ten minutes. So a drive that is dying costs little, and
 * loads wait for one read at most.
 *  2. Nothing is believed less carefully than at open: a footer counts by its checksum; where there
 *     is none, two walks must agree, every record verified in both; a header that is not ours is
 *     read twice.
 *  3. What the journal, as it is now, says is purged is not reported, and erased. Records are
 *     reported when room() allows it: no purge is between the store and the journal then.
 *     The youngest record first: of two of one key that one stays.
 *  4. The file is not written to: a segment without footer gets none, and the next open walks it.
 * The scan of l2_scan.c blocks; here it reads through a backend over memory that refuses what it
 * does not have (-EAGAIN): that is fetched, and the step is done again. Threads: the owner's.
 * Allocates for a look (a few MiB), and frees that after it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

#define PIECE_PAGES 256u
#define FIRST_NS 1000000000ll
#define PAUSE_NS_MAX 600000000000ll
#define PASSES 3u          /* walks, until two agree */
#define SLICE_RECORDS 512u /* reported in one run */
#define STEPS_PER_RUN 64u  /* records verified, mostly */
#define HOPE 4u            /* useless looks after which the store goes on without */

/* ---- a look begins and ends ---- */

void kvt_l2_again_end(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;

    kvt_l2_scan_free(&again->scan);
    free(again->tail);
    free(again->peek.bytes);
    again->tail = NULL;
    memset(&again->peek, 0, sizeof again->peek);
    again->fetching = false;
    again->step = KVT_L2_AGAIN_IDLE;
}

void kvt_l2_again_start(struct kvt_l2 *l2)
{
    l2->again.segment = l2->limit ? l2->limit - 1 : 0;
    l2->again.pause_ns = FIRST_NS;
    l2->again.due_ns = kvt_l2_now(l2) + FIRST_NS;
}

static bool wanted(const struct kvt_l2 *l2)
{
    return l2->in_state[KVT_L2_UNREAD] && l2->params.found_again && !l2->params.read_only &&
           !l2->closing;
}

bool kvt_l2_may_return(const struct kvt_l2 *l2)
{
    return wanted(l2) && l2->again.fails < HOPE;
}

int64_t kvt_l2_again_next(const struct kvt_l2 *l2)
{
    return wanted(l2) && !l2->again.op.busy ? l2->again.due_ns : INT64_MAX;
}

/* This look was of no use. */
static void useless(struct kvt_l2 *l2, int status)
{
    struct kvt_l2_again *again = &l2->again;

    kvt_log(&l2->params.log, KVT_LOG_DEBUG, "segment %u still cannot be read: %s",
            (unsigned)again->segment, kvt_strerror(status));
    again->fails++;
    again->due_ns = kvt_l2_now(l2) + again->pause_ns;
    again->pause_ns = KVT_MIN(again->pause_ns * 2, PAUSE_NS_MAX);
    kvt_l2_again_end(l2);
}

static void useful(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;

    l2->segments[again->segment].partly = 0;
    l2->stats.segments_unread--;
    again->fails = 0;
    again->pause_ns = FIRST_NS;
    again->due_ns = kvt_l2_now(l2);
    kvt_l2_again_end(l2);
    l2->params.again_over(l2->params.ctx);
}

static void begin(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;

    do {
        again->segment = (again->segment + 1) % l2->limit;
    } while (l2->segments[again->segment].state != KVT_L2_UNREAD);
    kvt_l2_peek_init(&again->peek);
    again->looks = again->passes = again->fetches = again->at = again->kept = 0;
    again->mark = again->mark_before = 0;
    again->generation = 0;
    again->items = 0;
    again->slot = -1;
    again->step = KVT_L2_AGAIN_HEADER;
    again->tail = kvt_l2_pages_alloc(KVT_L2_TAIL_BYTES);
    if (!again->tail || kvt_l2_scan_init(&again->scan, &again->peek.io, l2->segment_pages))
        useless(l2, -ENOMEM);
}

/* ---- what is wanted is fetched ---- */

static void piece_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_again *again = &l2->again;
    struct kvt_l2_peek *peek = &again->peek;
    int64_t result = op->req.result;

    kvt_l2_file_put(l2, again->slot);
    again->slot = -1;
    if (result < 0) {
        peek->status = result == -EAGAIN ? -EIO : (int)result;
        again->fetching = false;
        return;
    }
    l2->stats.bytes_read += (uint64_t)result;
    peek->got += (uint64_t)result;
    again->fetching = (uint64_t)result == op->req.iov[0].iov_len &&
                      peek->got < (uint64_t)peek->pages * KVT_PAGE_BYTES;
}

/* Read the next piece of the range. */
static void fetch_on(struct kvt_l2 *l2, int64_t now)
{
    struct kvt_l2_again *again = &l2->again;
    struct kvt_l2_peek *peek = &again->peek;
    struct kvt_io_req *req = &again->op.req;
    uint64_t left = (uint64_t)peek->pages * KVT_PAGE_BYTES - peek->got;
    int slot = kvt_l2_file_get(l2, again->segment, false);

    if (slot == -EAGAIN) {
        again->due_ns = now + KVT_L2_RETRY_NS;
        return;
    }
    if (slot < 0) {
        peek->status = slot;
        again->fetching = false;
        return;
    }
    again->slot = slot;
    memset(req, 0, offsetof(struct kvt_io_req, iov));
    req->kind = KVT_IO_READ;
    req->file = l2->files[slot].file;
    req->offset = peek->page * (uint64_t)KVT_PAGE_BYTES + peek->got;
    req->iov_count = 1;
    req->iov[0] = (struct iovec){peek->bytes + peek->got,
                                 KVT_MIN(left, (uint64_t)PIECE_PAGES * KVT_PAGE_BYTES)};
    again->op.finish = piece_done;
    kvt_l2_submit(l2, &again->op);
}

/* True: a step has to be done again, since what it wants is not there yet. */
static bool fetch(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;
    struct kvt_l2_peek *peek = &again->peek;

    if (!peek->wanting)
        return false;
    if (++again->fetches > PASSES * 2 * l2->segment_pages) { /* cannot be: no step wants more */
        useless(l2, KVT_E_CORRUPT);
        return true;
    }
    if (peek->want_pages > peek->capacity) {
        free(peek->bytes);
        peek->capacity = 0;
        peek->bytes = kvt_l2_pages_alloc((size_t)peek->want_pages * KVT_PAGE_BYTES);
        if (!peek->bytes) {
            useless(l2, -ENOMEM);
            return true;
        }
        peek->capacity = peek->want_pages;
    }
    peek->page = peek->want_page;
    peek->pages = peek->want_pages;
    peek->got = 0;
    peek->status = 0;
    again->fetching = true;
    return true;
}

/* Bytes of the segment, zeros where its file is shorter. 0, -errno. */
static int read_at(struct kvt_l2_again *again, uint32_t page, uint8_t *to, size_t bytes)
{
    int64_t got = kvt_io_read_now(&again->peek.io, 0, page * (uint64_t)KVT_PAGE_BYTES, to, bytes);

    if (got < 0)
        return (int)got;
    memset(to + got, 0, bytes - (size_t)got);
    return 0;
}

/* ---- steps ---- */

/* What looks damaged is read once more before that is believed. */
static bool once_more(struct kvt_l2_again *again, enum kvt_l2_again_step step)
{
    if (++again->looks >= KVT_L2_LOOKS)
        return false;
    kvt_l2_peek_forget(&again->peek);
    again->step = step;
    return true;
}

/* It holds nothing of ours: it is there to be written. */
static void give_back(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;
    struct kvt_l2_segment *segment = &l2->segments[again->segment];

    if (segment->busy) {
        again->due_ns = kvt_l2_now(l2) + KVT_L2_RETRY_NS;
        return;
    }
    if (segment->partly) {
        l2->stats.segments_live--;
        l2->params.evicted(l2->params.ctx, again->segment);
    }
    kvt_log(&l2->params.log, KVT_LOG_WARN, "segment %u can be read again, and holds nothing",
            (unsigned)again->segment);
    segment->min_sequence = UINT64_MAX;
    kvt_l2_segment_move(l2, again->segment, KVT_L2_BLANK);
    useful(l2);
}

static void header_step(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;
    const struct kvt_l2_segment *segment = &l2->segments[again->segment];
    const struct kvt_segment_header *header = (const void *)again->scan.window;
    int rc = read_at(again, 0, again->scan.window, KVT_PAGE_BYTES);

    if (fetch(l2))
        return;
    if (!rc)
        rc = kvt_segment_header_check(header, again->segment, l2->root_id);
    if (rc == KVT_E_CORRUPT) {
        if (once_more(again, KVT_L2_AGAIN_HEADER))
            return;
        again->scan.count = 0;
        again->step = KVT_L2_AGAIN_TAKE;
        return;
    }
    if (!rc && (header->generation >= l2->generation_next || /* of another length: open decides */
                header->segment_bytes != l2->segment_bytes ||
                (segment->generation && segment->generation != header->generation)))
        rc = KVT_E_STALE;
    if (rc) {
        useless(l2, rc);
        return;
    }
    again->generation = header->generation;
    again->looks = 0;
    again->step = KVT_L2_AGAIN_TAIL;
}

static void tail_step(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;
    int rc = read_at(again, l2->segment_pages - KVT_L2_TAIL_BYTES / KVT_PAGE_BYTES, again->tail,
                     KVT_L2_TAIL_BYTES);

    if (fetch(l2))
        return;
    if (rc)
        useless(l2, rc);
    else
        again->step = KVT_L2_AGAIN_FOOTER;
}

static void walk_begin(struct kvt_l2_again *again)
{
    kvt_l2_peek_forget(&again->peek);
    kvt_l2_scan_begin(&again->scan, 0, again->segment, again->generation);
    again->step = KVT_L2_AGAIN_WALK;
}

static void footer_step(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;
    int rc = kvt_l2_scan_footer(&again->scan, 0, again->segment, again->generation, again->tail,
                                KVT_L2_TAIL_BYTES);

    if (fetch(l2))
        return;
    again->sealed = !rc;
    if (!rc)
        again->step = KVT_L2_AGAIN_TAKE;
    else if (kvt_l2_unread(rc))
        useless(l2, rc);
    else if (!once_more(again, KVT_L2_AGAIN_TAIL))
        walk_begin(again);
}

static void mark(struct kvt_l2_again *again, uint64_t value)
{
    again->mark = (again->mark ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    again->mark ^= again->mark >> 29;
}

static void walk_step(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;
    int rc = kvt_l2_scan_walk_on(&again->scan);

    if (fetch(l2))
        return;
    if (rc) {
        useless(l2, rc);
        return;
    }
    again->scan.window_pages = 0;
    again->at = again->kept = 0;
    again->mark_before = again->mark;
    again->mark = 1;
    mark(again, again->scan.next_page);
    mark(again, again->scan.previous);
    again->step = KVT_L2_AGAIN_VERIFY;
}

/* One record; at the end: do two walks agree? */
static void verify_step(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;
    struct kvt_l2_scan *scan = &again->scan;
    int rc = 0;

    if (again->at < scan->count) {
        const struct kvt_entry *entry = &scan->entries[again->at];

        if (!kvt_l2_journal_purged(l2, entry))
            rc = kvt_l2_scan_record(scan, entry);
        if (fetch(l2))
            return;
        if (kvt_l2_unread(rc)) {
            useless(l2, rc);
            return;
        }
        if (!rc) {
            mark(again, entry->sequence);
            scan->entries[again->kept++] = *entry;
        }
        again->at++;
        return;
    }
    scan->count = again->kept;
    again->at = 0;
    if (again->passes++ && again->mark == again->mark_before)
        again->step = KVT_L2_AGAIN_TAKE;
    else if (again->passes < PASSES)
        walk_begin(again);
    else
        useless(l2, KVT_E_CORRUPT);
}

/* Its file may not even have been opened before. 0, or why it cannot be taken. */
static int count_bytes(struct kvt_l2 *l2)
{
    struct kvt_l2_segment *segment = &l2->segments[l2->again.segment];
    int slot = kvt_l2_file_get(l2, l2->again.segment, false);
    int64_t bytes;

    if (slot < 0)
        return slot;
    bytes = l2->io->ops->size(l2->io, l2->files[slot].file);
    kvt_l2_file_put(l2, slot);
    if (bytes < 0)
        return (int)bytes;
    if (bytes > (int64_t)l2->segment_bytes)
        return KVT_E_LIMIT;
    l2->stats.bytes_used += (uint64_t)bytes - segment->bytes;
    segment->bytes = (uint64_t)bytes;
    return 0;
}

static void take_back(struct kvt_l2 *l2)
{
    struct kvt_l2_again *again = &l2->again;
    struct kvt_l2_segment *segment = &l2->segments[again->segment];

    segment->generation = again->generation;
    segment->min_sequence = UINT64_MAX;
    for (uint32_t i = 0; i < again->scan.count; i++)
        segment->min_sequence = KVT_MIN(segment->min_sequence, again->scan.entries[i].sequence);
    l2->stats.segments_live += !segment->partly;
    kvt_l2_segment_move(l2, again->segment, KVT_L2_SEALED);
    kvt_l2_segment_by_age(l2, again->segment);
    if (!again->sealed || again->scan.gap)
        kvt_l2_segment_inherited(l2, again->segment);
    kvt_log(&l2->params.log, KVT_LOG_INFO, "segment %u can be read again: %u records",
            (unsigned)again->segment, (unsigned)again->scan.count);
    useful(l2);
}

/* Purges since the last rewrite stand behind the sorted ones: look-ups would miss them. */
static void sort_purges(struct kvt_l2 *l2)
{
    if (l2->again.items == l2->journal.count)
        return;
    kvt_l2_purge_merge(&l2->journal, 0);
    l2->again.items = l2->journal.count;
}

static void take_step(struct kvt_l2 *l2, int64_t now)
{
    struct kvt_l2_again *again = &l2->again;
    int rc = again->at ? 0 : count_bytes(l2);

    if (rc == -EAGAIN || !kvt_l2_erase_room(l2) ||
        !l2->params.room(l2->params.ctx, again->scan.count - again->at)) {
        again->due_ns = now + KVT_L2_RETRY_NS;
        return;
    }
    if (rc) {
        useless(l2, rc);
        return;
    }
    if (!again->scan.count) {
        give_back(l2);
        return;
    }
    sort_purges(l2);
    for (uint32_t n = 0; n < SLICE_RECORDS && again->at < again->scan.count; n++) {
        const struct kvt_entry *entry = &again->scan.entries[again->scan.count - ++again->at];
        struct kvt_l2_where where = {again->segment, entry->page};

        if (kvt_l2_journal_purged(l2, entry))
            kvt_l2_erase(l2, where, entry->pages);
        else if (entry->sequence < l2->sequence_upto)
            l2->params.found_again(l2->params.ctx, entry, again->segment);
    }
    if (again->at == again->scan.count)
        take_back(l2);
}

static void step(struct kvt_l2 *l2, int64_t now)
{
    l2->again.peek.wanting = false;
    switch (l2->again.step) {
    case KVT_L2_AGAIN_HEADER:
        header_step(l2);
        break;
    case KVT_L2_AGAIN_TAIL:
        tail_step(l2);
        break;
    case KVT_L2_AGAIN_FOOTER:
        footer_step(l2);
        break;
    case KVT_L2_AGAIN_WALK:
        walk_step(l2);
        break;
    case KVT_L2_AGAIN_VERIFY:
        verify_step(l2);
        break;
    case KVT_L2_AGAIN_TAKE:
        take_step(l2, now);
        break;
    case KVT_L2_AGAIN_IDLE:
        begin(l2);
        break;
    }
}

void kvt_l2_again_pump(struct kvt_l2 *l2, int64_t now)
{
    struct kvt_l2_again *again = &l2->again;

    for (uint32_t i = 0; i < STEPS_PER_RUN && wanted(l2) && !again->op.busy && again->due_ns <= now;
         i++) {
        if (again->fetching)
            fetch_on(l2, now);
        else
            step(l2, now);
    }
}
