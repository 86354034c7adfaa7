/* How old what a restart finds is: the file "ttl" in each root (docs/format.md).
 *
 * A mark says "records below this sequence were stored before this time". One is taken at open,
 * with the ticks of store_ttl.c and at close, and all are written at open, with its passes, at the
 * first store after a rest, and at close. So a record's age is known afterwards: it counts from the
 * last mark at or below its sequence, which is never too young. Marks are not of one time to live:
 * they serve the store's, each namespace's, and one that is changed. When there are too many, that
 * one goes whose loss says least: those that remain lie the closer the younger.
 *
 * The system's clock may be wrong. Within a life time goes on as the monotonic clock does at
 * least. Found before the youngest mark, it was set back: then all marks are moved so that the
 * youngest is now, ages stay, and nothing gets more time but what the store was down for. A clock
 * that jumps ahead makes what is found older than it is: it expires too early.
 *
 * Two pages, written in turn, each synced before the other is written, so that a torn one costs one
 * turn. A file that is missing or damaged says nothing: what is found counts as stored at that
 * open. Only where somebody has a time to live, or had one. Threads: the store's owner; reading at
 * open also who opens a root that comes later. Blocks at open and close only, and once for the name
 * of a new file.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "format/hash.h"
#include "kvtier/error.h"
#include "store/l2_survey.h"
#include "store/store_impl.h"

#define MAGIC 0x304c545454564bull /* "KVTTTL0" */
#define VERSION 1u
#define REAP_POLL_MS 5
/* A mark of a store at rest is renewed so often at the most. */
#define RENEW_NS INT64_C(60000000000)

struct page { /* little-endian, as all of them */
    uint64_t magic;
    uint32_t version;
    uint32_t count;
    uint64_t turn; /* the higher one counts; its page is turn % 2 */
    uint64_t reserved;
    struct kvt_ttl_mark marks[KVT_TTL_FILE_MARKS];
    uint8_t zero[56];
    uint64_t checksum; /* XXH3-64 of all before it */
};

static_assert(sizeof(struct kvt_ttl_mark) == 16 && sizeof(struct page) == KVT_PAGE_BYTES,
              "one page");
static_assert(offsetof(struct page, checksum) == KVT_PAGE_BYTES - 8, "last");

/* The rule, over a list. */

static void drop_least(struct kvt_ttl_marks *m)
{
    double least = 0;
    uint32_t at = 0;
    int64_t now = m->marks[m->count - 1].wall_ns;

    for (uint32_t i = 1; i + 1 < m->count; i++) {
        double gap = (double)(m->marks[i + 1].wall_ns - m->marks[i - 1].wall_ns);
        double lost = gap / ((double)(now - m->marks[i - 1].wall_ns) + 1);

        if (!at || lost < least) {
            least = lost;
            at = i;
        }
    }
    memmove(&m->marks[at], &m->marks[at + 1], (m->count - at - 1) * sizeof(m->marks[0]));
    m->count--;
}

void kvt_ttl_mark_add(struct kvt_ttl_marks *m, uint64_t sequence, int64_t wall_ns)
{
    struct kvt_ttl_mark *last = m->count ? &m->marks[m->count - 1] : NULL;

    if (last && last->wall_ns > wall_ns)
        wall_ns = last->wall_ns;
    if (last && last->sequence > sequence)
        sequence = last->sequence;
    /* None was given out since. The first stays: it is for what was there before it, too. */
    if (m->count > 1 && last->sequence == sequence) {
        last->wall_ns = wall_ns;
        return;
    }
    if (m->count == KVT_TTL_FILE_MARKS)
        drop_least(m);
    m->marks[m->count++] = (struct kvt_ttl_mark){.sequence = sequence, .wall_ns = wall_ns};
}

int64_t kvt_ttl_mark_of(const struct kvt_ttl_marks *m, uint64_t sequence)
{
    uint32_t low = 0, high = m->count;

    if (!m->count)
        return INT64_MAX;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;

        if (m->marks[middle].sequence <= sequence)
            low = middle;
        else
            high = middle;
    }
    return m->marks[low].wall_ns; /* what is older than all marks: since the first */
}

/* ---- the file ------------------------------------------------------------------------------- */

static bool page_good(const struct page *page, uint32_t place)
{
    if (page->magic != MAGIC || page->version != VERSION || page->turn % 2 != place ||
        !page->count || page->count > KVT_TTL_FILE_MARKS ||
        page->checksum != kvt_hash64(page, offsetof(struct page, checksum)))
        return false;
    for (uint32_t i = 0; i < page->count; i++)
        if (page->marks[i].wall_ns < 0 ||
            (i && (page->marks[i].sequence < page->marks[i - 1].sequence ||
                   page->marks[i].wall_ns < page->marks[i - 1].wall_ns)))
            return false;
    return true;
}

static void page_make(struct kvt_ttl_marks *m)
{
    struct page *page = m->buffer;

    memset(page, 0, sizeof(*page));
    page->magic = MAGIC;
    page->version = VERSION;
    page->count = m->count;
    page->turn = ++m->turn;
    memcpy(page->marks, m->marks, m->count * sizeof(m->marks[0]));
    page->checksum = kvt_hash64(page, offsetof(struct page, checksum));
}

static uint64_t place_of(const struct kvt_ttl_marks *m)
{
    return m->turn % 2 * KVT_PAGE_BYTES;
}

/* false: there is no file. */
static bool pages_read(struct kvt_ttl_marks *m, const struct kvt_log *log)
{
    const struct page *page = m->buffer;
    int file = m->io->ops->open(m->io, KVT_L2_NAME_TTL, 0);

    if (file < 0)
        return false;
    for (uint32_t place = 0; place < 2; place++) {
        memset(m->buffer, 0, KVT_PAGE_BYTES);
        if (kvt_io_read_now(m->io, file, place * KVT_PAGE_BYTES, m->buffer, KVT_PAGE_BYTES) < 0 ||
            !page_good(page, place) || page->turn <= m->turn)
            continue;
        m->turn = page->turn;
        m->count = page->count;
        memcpy(m->marks, page->marks, page->count * sizeof(m->marks[0]));
    }
    m->io->ops->close(m->io, file);
    if (!m->count)
        kvt_log(log, KVT_LOG_WARN,
                "the file ttl is damaged: what is found counts as stored now for the time to live");
    return true;
}

static int write_now(struct kvt_ttl_marks *m)
{
    int64_t got;
    int rc, file = m->io->ops->open(m->io, KVT_L2_NAME_TTL, KVT_IO_OPEN_CREATE);

    if (file < 0)
        return file;
    page_make(m);
    got = kvt_io_write_now(m->io, file, place_of(m), m->buffer, KVT_PAGE_BYTES);
    rc = got < 0 ? (int)got : 0;
    if (!rc)
        rc = kvt_io_sync_now(m->io, file);
    if (!rc)
        rc = m->io->ops->sync_dir(m->io);
    m->io->ops->close(m->io, file);
    m->unnamed = rc != 0;
    m->turn -= rc != 0; /* the same page once more: the other one is good */
    return rc;
}

static void say(const struct kvt_log *log, int rc)
{
    if (rc)
        kvt_log(log, KVT_LOG_WARN,
                "the file ttl was not written: %s; after a restart blocks may live anew",
                kvt_strerror(rc));
}

void kvt_ttl_marks_read(struct kvt_ttl_marks *m, struct kvt_io *io,
                        const struct kvt_store_params *params)
{
    int64_t back;

    memset(m, 0, sizeof(*m));
    if (!params->wall.now_ns)
        return;
    m->buffer = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    if (!m->buffer)
        return;
    m->io = io;
    m->there = pages_read(m, &params->log);
    back = m->count ? m->marks[m->count - 1].wall_ns - kvt_clock_now(&params->wall) : 0;
    for (uint32_t i = 0; i < m->count && back > 0; i++)
        m->marks[i].wall_ns = KVT_MAX(m->marks[i].wall_ns - back, INT64_C(0));
}

void kvt_ttl_marks_begin(struct kvt_ttl_marks *m, const struct kvt_store_params *params,
                         uint64_t sequence, bool wanted)
{
    if (!m->buffer || (!m->there && !wanted))
        return;
    kvt_ttl_mark_add(m, sequence, KVT_MAX(kvt_clock_now(&params->wall), INT64_C(0)));
    m->written_ns = m->marks[m->count - 1].wall_ns;
    m->written_sequence = sequence;
    say(&params->log, write_now(m));
}

static void mark_ends(struct kvt_ttl_marks *m, bool good)
{
    m->io->ops->close(m->io, m->req.file);
    m->going = false;
    if (good && m->unnamed)
        good = m->io->ops->sync_dir(m->io) == 0;
    m->unnamed = m->unnamed && !good;
    if (!good) { /* once more, with the next pass: no sequence is that one */
        m->written_sequence = UINT64_MAX;
        m->turn--;
    }
    *m->again = 1;
}

static void mark_written(struct kvt_io_req *req)
{
    struct kvt_ttl_marks *m = req->user;
    bool write = req->kind == KVT_IO_WRITE;

    if (write && req->result == KVT_PAGE_BYTES) {
        req->kind = KVT_IO_SYNC;
        req->offset = 0;
        req->iov_count = 0;
        if (m->io->ops->submit(m->io, req) == 0)
            return;
    }
    mark_ends(m, !write && req->result == 0);
}

/* After a pass, or where the last one is a pass old and something is being stored: what is stored
 * counts from a mark of a sixteenth before it at most, after a rest, too. */
static bool mark_is_due(const struct kvt_ttl_marks *m, const struct kvt_store *store, int64_t wall,
                        bool pass)
{
    int64_t old = wall - m->written_ns;

    if (m->written_sequence == store->sequence_next)
        return pass && old >= RENEW_NS;
    return pass || !m->count || old >= store->ttl.pass_every_ns;
}

void kvt_ttl_marks_note(struct kvt_store *store, uint32_t root, bool pass)
{
    struct kvt_ttl_marks *m = &store->disks[root].marks;
    int64_t wall;
    int file;

    if (!m->buffer || m->going || kvt_l2_journal_rewrites(store->disks[root].l2))
        return; /* a descriptor for either: KVT_STORE_ROOT_FDS_OTHER */
    if (!pass && m->count && m->written_sequence == store->sequence_next)
        return;
    wall = kvt_ttl_wall(store);
    if (!mark_is_due(m, store, wall, pass))
        return;
    m->unnamed = m->unnamed || !m->count;
    kvt_ttl_mark_add(m, store->sequence_next, wall);
    file = m->io->ops->open(m->io, KVT_L2_NAME_TTL, KVT_IO_OPEN_CREATE);
    m->written_ns = wall;
    m->written_sequence = file < 0 ? UINT64_MAX : store->sequence_next;
    if (file < 0)
        return; /* it is tried again, and said at close */
    m->again = &store->again;
    page_make(m);
    m->req = (struct kvt_io_req){.kind = KVT_IO_WRITE,
                                 .file = file,
                                 .offset = place_of(m),
                                 .iov_count = 1,
                                 .user = m,
                                 .done = mark_written};
    m->req.iov[0] = (struct iovec){.iov_base = m->buffer, .iov_len = KVT_PAGE_BYTES};
    m->going = true;
    if (m->io->ops->submit(m->io, &m->req))
        mark_ends(m, false);
}

void kvt_ttl_marks_wait(struct kvt_ttl_marks *m)
{
    while (m->going) { /* the log has closed: nobody else reaps any more */
        struct kvt_io_req *req;
        int fd = m->io->ops->event_fd(m->io);
        struct pollfd pfd = {.fd = fd, .events = POLLIN};

        if (m->io->ops->reap(m->io, &req, 1))
            req->done(req);
        else if (fd >= 0)
            (void)poll(&pfd, 1, REAP_POLL_MS);
    }
}

void kvt_ttl_marks_close(struct kvt_store *store, struct kvt_ttl_marks *m, bool last)
{
    if (m->buffer && m->count && last) {
        kvt_ttl_mark_add(m, store->sequence_next, kvt_ttl_wall(store));
        say(&store->params.log, write_now(m));
    }
    free(m->buffer);
    m->buffer = NULL;
    m->count = 0;
}
