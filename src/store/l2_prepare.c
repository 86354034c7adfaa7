/* Preparing the next segment ahead of need: choose, evict, reserve space, write the header of the
 * new generation, fdatasync. Only then is it READY: no batch of a new life is ever on disk under
 * the header of the old one, so an old footer cannot speak for new bytes.
 *
 * Choice: a blank file, a file not made yet (while the file system has room), the oldest sealed
 * segment without readers that the store lets go: one that has been drained; another one only when
 * the store does not drain, or writes wait. What was moved out of drained ones is made durable
 * first, and as long as the drive refuses that, nothing old is overwritten. When files cannot be
 * made for lack of space, the log lives with those it has and tries again later. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

#define CREATE_TRIES 3u /* to make a file, before recycling instead */

void kvt_l2_worked(struct kvt_l2 *l2)
{
    l2->fail_streak = 0;
    l2->stats.failing = 0;
    l2->pause_ns = KVT_L2_PAUSE_NS_MIN;
    l2->pause_until_ns = INT64_MIN;
}

static void pause_writes(struct kvt_l2 *l2, int status, int64_t now)
{
    l2->pause_status = status;
    l2->pause_until_ns = now + l2->pause_ns;
    l2->pause_ns = KVT_MIN(l2->pause_ns * 2, (int64_t)KVT_L2_PAUSE_NS_MAX);
}

/* No segment is to be had: none can be made, and none may be recycled. */
static void no_room(struct kvt_l2 *l2, int64_t now)
{
    l2->stats.enospc++;
    pause_writes(l2, KVT_E_NO_SPACE, now);
}

bool kvt_l2_paused(const struct kvt_l2 *l2)
{
    return l2->pause_until_ns > kvt_l2_now(l2);
}

/* A drive that fails, fails often: one line an interval, with what happened in between. */
void kvt_l2_log_failure(struct kvt_l2 *l2, const char *what, uint32_t segment, int status)
{
    int64_t now = kvt_l2_now(l2);

    if (now < l2->failure_log_ns) {
        l2->failures_unlogged++;
        return;
    }
    kvt_log(&l2->params.log, KVT_LOG_WARN,
            "segment %u: %s failed: %s (%d); %u more since the last such line", (unsigned)segment,
            what, kvt_strerror(status), status, (unsigned)l2->failures_unlogged);
    l2->failures_unlogged = 0;
    l2->failure_log_ns = now + KVT_L2_FAILURE_LOG_NS;
}

/* One failure may be a bad spot and costs one segment's rest; a second one in a row is a bad drive:
 * wait, so that retrying does not evict everything. For lack of space the log goes on in segments
 * that have theirs, and pauses only when there is none. */
void kvt_l2_failed(struct kvt_l2 *l2, int status, int64_t now)
{
    l2->stats.failing = status;
    if (status == KVT_E_NO_SPACE) {
        l2->stats.enospc++;
        l2->create_retry_ns = now + KVT_L2_PAUSE_NS_MIN;
    } else if (++l2->fail_streak >= 2) {
        pause_writes(l2, status, now);
    }
}

static uint32_t blank_segment(const struct kvt_l2 *l2, int64_t now)
{
    for (uint32_t i = 0; i < l2->limit && l2->in_state[KVT_L2_BLANK]; i++) {
        const struct kvt_l2_segment *segment = &l2->segments[i];

        if (segment->state == KVT_L2_BLANK && !segment->busy && segment->retry_ns <= now)
            return i;
    }
    return KVT_L2_NONE;
}

static uint32_t absent_segment(const struct kvt_l2 *l2, int64_t now)
{
    if (l2->segment_files >= l2->segment_count || l2->create_retry_ns > now)
        return KVT_L2_NONE;
    for (uint32_t i = 0; i < l2->limit; i++)
        if (l2->segments[i].state == KVT_L2_ABSENT)
            return i;
    return KVT_L2_NONE;
}

static bool may_go(const struct kvt_l2 *l2, uint32_t number, int64_t now)
{
    return l2->segments[number].retry_ns <= now &&
           (!l2->params.may_evict || l2->params.may_evict(l2->params.ctx, number));
}

/* Somebody reads it, or purged bytes in it are about to be erased. Those that wait for a journal
 * which cannot be written do not keep it: recycling is the way that is left for them. */
static bool in_use(const struct kvt_l2 *l2, uint32_t number)
{
    const struct kvt_l2_segment *segment = &l2->segments[number];

    if (l2->journal.owed && !l2->erase.op.busy)
        return segment->busy > segment->erases;
    return segment->busy > 0;
}

/* The oldest that may go now; drained: of those that are. *busy: something could be taken later
 * (readers, pins). */
static uint32_t oldest_sealed(const struct kvt_l2 *l2, int64_t now, bool drained, bool *busy)
{
    for (uint32_t i = l2->oldest; i != KVT_L2_NONE; i = l2->segments[i].newer) {
        const struct kvt_l2_segment *segment = &l2->segments[i];

        if (segment->retry_ns > now || (drained && !segment->drained))
            continue;
        *busy = true;
        if (!in_use(l2, i) && may_go(l2, i, now))
            return i;
    }
    return KVT_L2_NONE;
}

static bool is_moved_unsynced(const struct kvt_l2_segment *segment, enum kvt_l2_unsynced state)
{
    return segment->unsynced == state && segment->moved;
}

/* The oldest full segment in `state` that holds moved records, or one that cannot be read. */
static uint32_t moved_unsynced(const struct kvt_l2 *l2, enum kvt_l2_unsynced state)
{
    if (!l2->unsynced)
        return KVT_L2_NONE;
    for (uint32_t i = l2->oldest; i != KVT_L2_NONE; i = l2->segments[i].newer)
        if (is_moved_unsynced(&l2->segments[i], state))
            return i;
    for (uint32_t i = 0; i < l2->limit && l2->in_state[KVT_L2_UNREAD]; i++)
        if (l2->segments[i].state == KVT_L2_UNREAD && is_moved_unsynced(&l2->segments[i], state))
            return i;
    return KVT_L2_NONE;
}

static uint32_t sealed_segment(const struct kvt_l2 *l2, int64_t now, bool *busy)
{
    bool waits = l2->pending.head && (!l2->open || l2->open->failed);
    uint32_t number = moved_unsynced(l2, KVT_L2_SYNC_NEVER);

    if (number != KVT_L2_NONE) { /* a restart finds those records where they were moved from */
        *busy = true;
        return !in_use(l2, number) && may_go(l2, number, now) ? number : KVT_L2_NONE;
    }
    number = l2->drained ? oldest_sealed(l2, now, true, busy) : KVT_L2_NONE;
    if (number != KVT_L2_NONE || (l2->params.drains && !waits && !l2->closing))
        return number;
    if (l2->params.choose)
        number = l2->params.choose(l2->params.ctx);
    if (number < l2->limit && l2->segments[number].state == KVT_L2_SEALED &&
        !l2->segments[number].busy && may_go(l2, number, now))
        return number;
    return oldest_sealed(l2, now, false, busy);
}

bool kvt_l2_drain_wanted(const struct kvt_l2 *l2)
{
    uint32_t want = l2->segment_count > KVT_L2_SEGMENTS_FEW ? KVT_L2_FREE_SEGMENTS : 1;
    uint32_t have = l2->in_state[KVT_L2_BLANK] + l2->drained;

    if (l2->params.read_only || !l2->writes_accepted || have >= want)
        return false;
    /* unless another file can be made */
    return l2->segment_files >= l2->segment_count || l2->create_retry_ns > kvt_l2_now(l2);
}

uint32_t kvt_l2_recyclable(const struct kvt_l2 *l2, uint32_t after)
{
    int64_t now = kvt_l2_now(l2);

    for (uint32_t i = after < l2->limit ? l2->segments[after].newer : l2->oldest; i != KVT_L2_NONE;
         i = l2->segments[i].newer)
        if (!l2->segments[i].drained && may_go(l2, i, now))
            return i;
    return KVT_L2_SEGMENT_NONE;
}

void kvt_l2_renew(struct kvt_l2 *l2, uint32_t segment)
{
    if (segment < l2->limit && l2->segments[segment].state == KVT_L2_SEALED)
        kvt_l2_segment_renew(l2, segment);
}

void kvt_l2_drained(struct kvt_l2 *l2, uint32_t segment)
{
    struct kvt_l2_segment *s = &l2->segments[segment];

    if (segment >= l2->limit || s->state != KVT_L2_SEALED || s->drained)
        return;
    s->drained = 1;
    l2->drained++;
}

static bool want_next(const struct kvt_l2 *l2)
{
    if (!l2->open)
        return l2->pending.head != NULL;
    if (l2->closing || !l2->writes_accepted)
        return l2->pending.head && l2->open->failed;
    return l2->open->failed || l2->open->next_page > l2->segment_pages / 2;
}

/* No room for one more file: the log works with those that it has, until there is. Said once: it is
 * legal, and costs blocks early that the cap seemed to keep. */
static void cut_short(struct kvt_l2 *l2)
{
    const uint64_t mib = 1u << 20;

    l2->stats.short_bytes = (uint64_t)(l2->segment_count - l2->segment_files) * l2->segment_bytes;
    if (l2->short_told || !l2->stats.short_bytes)
        return;
    l2->short_told = true;
    kvt_log(&l2->params.log, KVT_LOG_WARN,
            "disk root %s: the file system is full at %llu MiB of a cap of %llu MiB: the oldest "
            "segment goes early, and with it beginnings of long prompts. Free space there, or give "
            "a cap that it can hold",
            l2->params.name ? l2->params.name : "(unnamed)",
            (unsigned long long)(l2->stats.bytes_used / mib),
            (unsigned long long)(l2->params.cap_bytes / mib));
}

/* After a failed step: the file stays, without a life. */
static void prepare_failed(struct kvt_l2 *l2, int status, int64_t now)
{
    struct kvt_l2_prepare *prepare = &l2->prepare;

    kvt_l2_log_failure(l2, "preparing it", prepare->segment, status);
    kvt_l2_file_put(l2, prepare->slot);
    prepare->slot = -1;
    prepare->step = KVT_L2_IDLE;
    l2->segments[prepare->segment].retry_ns = now + KVT_L2_PAUSE_NS_MIN;
    kvt_l2_segment_move(l2, prepare->segment, KVT_L2_BLANK);
    if (status == KVT_E_NO_SPACE && !prepare->recycled) { /* a file without space is of no use */
        (void)kvt_l2_segment_unlink(l2, prepare->segment);
        cut_short(l2);
    }
    kvt_l2_failed(l2, status, now);
}

static void prepare_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_prepare *prepare = &l2->prepare;
    int64_t want = prepare->step == KVT_L2_WRITE ? KVT_PAGE_BYTES : 0;
    int status = (int)KVT_MIN(op->req.result, 0);

    if (!status && op->req.result != want)
        status = -EIO;
    if (status) {
        prepare_failed(l2, kvt_l2_full(status) ? KVT_E_NO_SPACE : status, kvt_l2_now(l2));
        return;
    }
    if (prepare->step == KVT_L2_WRITE) {
        l2->stats.bytes_written += KVT_PAGE_BYTES;
        prepare->step = KVT_L2_SYNC;
        memset(&op->req, 0, offsetof(struct kvt_io_req, iov));
        op->req.kind = KVT_IO_SYNC;
        op->req.file = l2->files[prepare->slot].file;
        kvt_l2_submit(l2, op);
        return;
    }
    prepare->step = KVT_L2_PREPARED;
    kvt_l2_segment_move(l2, prepare->segment, KVT_L2_READY);
}

static void write_header(struct kvt_l2 *l2)
{
    struct kvt_l2_prepare *prepare = &l2->prepare;
    struct kvt_segment_header *header = prepare->page;
    struct kvt_l2_op *op = &prepare->op;

    memset(header, 0, sizeof *header);
    header->magic = KVT_SEGMENT_MAGIC;
    header->version = KVT_DISK_VERSION;
    header->segment = prepare->segment;
    memcpy(header->root_id, l2->root_id, sizeof header->root_id);
    header->generation = l2->segments[prepare->segment].generation;
    header->segment_bytes = l2->segment_bytes;
    kvt_segment_header_finish(header);

    memset(&op->req, 0, offsetof(struct kvt_io_req, iov));
    op->req.kind = KVT_IO_WRITE;
    op->req.file = l2->files[prepare->slot].file;
    op->req.iov_count = 1;
    op->req.iov[0].iov_base = header;
    op->req.iov[0].iov_len = sizeof *header;
    op->finish = prepare_done;
    prepare->step = KVT_L2_WRITE;
    kvt_l2_submit(l2, op);
}

/* Make the file of an ABSENT segment with its space. 0, -errno. */
static int create_segment(struct kvt_l2 *l2, uint32_t number)
{
    int slot = kvt_l2_file_get(l2, number, true);
    int rc;

    if (slot < 0)
        return slot;
    l2->segment_files++;
    kvt_l2_segment_move(l2, number, KVT_L2_BLANK);
    rc = kvt_l2_segment_space(l2, number, l2->files[slot].file);
    if (!rc)
        rc = l2->io->ops->sync_dir(l2->io);
    kvt_l2_file_put(l2, slot);
    if (rc && kvt_l2_segment_unlink(l2, number))
        kvt_log(&l2->params.log, KVT_LOG_WARN, "segment %u: an unusable file stays behind",
                (unsigned)number);
    return rc;
}

/* Take `number` for the next life. */
static void prepare_segment(struct kvt_l2 *l2, uint32_t number, int64_t now)
{
    struct kvt_l2_segment *segment = &l2->segments[number];
    bool evict = segment->state == KVT_L2_SEALED;
    int rc = 0, slot = kvt_l2_file_get(l2, number, true);

    if (slot == -EAGAIN) {
        l2->prepare.retry_ns = now + KVT_L2_RETRY_NS;
        return;
    }
    kvt_l2_segment_move(l2, number, KVT_L2_PREPARING);
    segment->generation = l2->generation_next++;
    segment->retry_ns = INT64_MIN;
    l2->prepare.segment = number;
    l2->prepare.slot = slot;
    l2->prepare.recycled = evict;
    if (evict) {
        kvt_l2_erase_forget(l2, number);
        l2->stats.segments_recycled++;
        l2->stats.segments_live--;
        if (l2->params.evicted)
            l2->params.evicted(l2->params.ctx, number);
    }
    if (slot < 0)
        rc = slot;
    else if (segment->bytes != l2->segment_bytes || segment->punched)
        rc = kvt_l2_segment_space(l2, number, l2->files[slot].file);
    if (rc)
        prepare_failed(l2, kvt_l2_full(rc) ? KVT_E_NO_SPACE : rc, now);
    else
        write_header(l2);
}

/* A new file, when one may be made. *again: making it failed in a way that may pass: do not recycle
 * for that yet. */
static uint32_t new_segment(struct kvt_l2 *l2, int64_t now, bool *again)
{
    uint32_t number = absent_segment(l2, now);
    int rc;

    if (number == KVT_L2_NONE)
        return number;
    rc = create_segment(l2, number);
    if (!rc) {
        l2->create_fails = 0;
        l2->stats.short_bytes = 0;
        return number;
    }
    *again = !kvt_l2_full(rc) && ++l2->create_fails < CREATE_TRIES;
    if (*again)
        return KVT_L2_NONE;
    if (kvt_l2_full(rc))
        cut_short(l2);
    else
        kvt_log(&l2->params.log, KVT_LOG_WARN, "no new segment: %s; using those that exist",
                kvt_strerror(rc));
    l2->stats.enospc += kvt_l2_full(rc);
    l2->create_fails = 0;
    l2->create_retry_ns = now + KVT_L2_PAUSE_NS_MIN;
    return KVT_L2_NONE;
}

static void moved_synced(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_prepare *prepare = &l2->prepare;

    if (op->req.result < 0) {
        /* what was moved is not durable: nothing old is overwritten before it is */
        kvt_l2_log_failure(l2, "a sync", prepare->segment, (int)op->req.result);
        kvt_l2_failed(l2, (int)op->req.result, kvt_l2_now(l2));
        prepare->retry_ns = kvt_l2_now(l2) + KVT_L2_PAUSE_NS_MIN;
    } else if (prepare->syncing) {
        prepare->syncing->synced = KVT_MAX(prepare->syncing->synced, prepare->mark);
    } else {
        kvt_l2_segment_synced(l2, prepare->segment, KVT_L2_SYNCED);
    }
    kvt_l2_file_put(l2, prepare->slot);
    prepare->slot = -1;
    prepare->step = KVT_L2_IDLE;
}

/* Make what `segment` holds durable, before anything old is overwritten. */
static void sync_moved(struct kvt_l2 *l2, uint32_t segment, int64_t now)
{
    struct kvt_l2_prepare *prepare = &l2->prepare;
    struct kvt_l2_op *op = &prepare->op;
    int slot = kvt_l2_file_get(l2, segment, false);

    if (slot < 0) {
        prepare->retry_ns = now + KVT_L2_RETRY_NS;
        return;
    }
    prepare->slot = slot;
    prepare->segment = segment;
    prepare->step = KVT_L2_DATA;
    memset(&op->req, 0, offsetof(struct kvt_io_req, iov));
    op->req.kind = KVT_IO_SYNC;
    op->req.file = l2->files[slot].file;
    op->finish = moved_synced;
    kvt_l2_submit(l2, op);
}

/* Records that were moved out of old segments are not durable yet: an old segment must not be
 * overwritten. What is being sealed is synced by that; one whose sync has failed is synced here. */
static bool moved_in_danger(struct kvt_l2 *l2, int64_t now)
{
    struct kvt_l2_prepare *prepare = &l2->prepare;
    uint32_t again = moved_unsynced(l2, KVT_L2_SYNC_AGAIN);

    if (l2->closed && l2->closed->moved > l2->closed->synced && l2->closed->count)
        return true;
    if (again != KVT_L2_NONE) {
        prepare->syncing = NULL;
        sync_moved(l2, again, now);
        return true;
    }
    if (!l2->open || l2->open->moved <= l2->open->synced)
        return false;
    prepare->syncing = l2->open;
    prepare->mark = l2->open->written;
    sync_moved(l2, l2->open->segment, now);
    return true;
}

void kvt_l2_prepare_pump(struct kvt_l2 *l2, int64_t now)
{
    uint32_t number;
    bool busy = false, again = false;

    if (l2->prepare.step != KVT_L2_IDLE || !want_next(l2) || l2->pause_until_ns > now ||
        l2->prepare.retry_ns > now)
        return;
    if (l2->generation_next >= l2->super.durable.next_generation) {
        l2->super.wanted = true; /* comes back when the superblock is durable */
        return;
    }
    number = blank_segment(l2, now);
    if (number == KVT_L2_NONE)
        number = new_segment(l2, now, &again);
    if (number == KVT_L2_NONE && !again) {
        number = sealed_segment(l2, now, &busy);
        if (number != KVT_L2_NONE && moved_in_danger(l2, now))
            return;
        if (number == KVT_L2_NONE && l2->params.drains && l2->open && !l2->open->failed)
            return; /* there is time: one will be drained */
    }
    if (number != KVT_L2_NONE)
        prepare_segment(l2, number, now);
    else if (again || busy || l2->open || l2->closed)
        l2->prepare.retry_ns = now + KVT_L2_RETRY_NS;
    else
        no_room(l2, now);
}
