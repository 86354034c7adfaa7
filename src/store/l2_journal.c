/* The journal: purges that a restart must remember. Pages are appended and fdatasynced before
 * done().
 *
 * The file is one epoch: its page 0 names it. It is rewritten (merged, without items that no record
 * on disk can need any more) when it is full, when its end is not certain, and for the first purge
 * of a root. Order of a rewrite, safe at each step: write journal.tmp with epoch + 1 | fdatasync |
 * rename over journal | sync directory | superblock learns epoch and pages | done A crash before
 * the rename leaves the old file; after it, recovery takes the higher epoch from page 0. An append
 * is: write | fdatasync | superblock learns the number of pages | done.
 *
 * So recovery knows what it must find. A bad page beyond the superblock's number is an append that
 * never returned; a bad or missing one below it may have held a purge that did: a doubt, and then
 * nothing on disk counts, and PURGE_ALL is written so that it stays so. Epoch 0 means that no purge
 * was ever promised: in such a root a missing journal costs nothing. When both superblock copies
 * are lost, every page that is not zero must be good.
 *
 * Items that could not be written stay in memory, and a rewrite is tried again every second: until
 * one has them, nothing is erased (what had its bytes erased would be damaged for no reason). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

static uint32_t pages_for(uint32_t items)
{
    return (items + KVT_JOURNAL_ITEMS_MAX - 1) / KVT_JOURNAL_ITEMS_MAX;
}

static int reserve_items(struct kvt_l2_journal *journal, uint32_t more)
{
    uint32_t need = journal->count + more, capacity = KVT_MAX(journal->capacity * 2, need);
    void *grown;

    if (need <= journal->capacity)
        return 0;
    grown = realloc(journal->items, capacity * sizeof *journal->items);
    if (!grown)
        return -ENOMEM;
    journal->items = grown;
    journal->capacity = capacity;
    return 0;
}

/* Fill journal->buffer with `count` items as pages first, first + 1, ... of `epoch`. */
static int make_pages(struct kvt_l2_journal *journal, const struct kvt_journal_item *items,
                      uint32_t count, uint32_t first, uint64_t epoch)
{
    uint32_t pages = pages_for(count);

    free(journal->buffer);
    journal->buffer = kvt_l2_pages_alloc((size_t)pages * KVT_PAGE_BYTES);
    if (!journal->buffer)
        return -ENOMEM;
    memset(journal->buffer, 0, (size_t)pages * KVT_PAGE_BYTES);
    for (uint32_t p = 0; p < pages; p++) {
        struct kvt_journal_page *page = &journal->buffer[p];
        uint32_t n = KVT_MIN(count - p * KVT_JOURNAL_ITEMS_MAX, KVT_JOURNAL_ITEMS_MAX);

        page->magic = KVT_JOURNAL_MAGIC;
        page->version = KVT_DISK_VERSION;
        page->page = first + p;
        page->epoch = epoch;
        page->count = n;
        memcpy(page->items, items + (size_t)p * KVT_JOURNAL_ITEMS_MAX, n * sizeof *items);
        kvt_journal_page_finish(page);
    }
    return 0;
}

/* No record on disk, and none on its way there, is older than this. */
static uint64_t min_live(const struct kvt_l2 *l2)
{
    uint64_t min = UINT64_MAX;

    for (uint32_t i = 0; i < l2->limit; i++)
        if (l2->segments[i].state != KVT_L2_ABSENT)
            min = KVT_MIN(min, l2->segments[i].min_sequence);
    for (const struct kvt_l2_write *w = l2->pending.head; w; w = w->next)
        min = KVT_MIN(min, w->entry.sequence);
    for (uint32_t i = 0; i < l2->batch_count; i++) {
        const struct kvt_l2_batch *batch = &l2->batches[(l2->batch_head + i) % KVT_L2_WRITES];

        for (const struct kvt_l2_write *w = batch->list; w; w = w->next)
            min = KVT_MIN(min, w->entry.sequence);
    }
    return min;
}

/* Items of a rewrite into the buffer; sets next_pages. A file has at least one item, so an empty
 * set is written as "everything below 0". */
static int compose(struct kvt_l2 *l2, uint64_t epoch)
{
    static const struct kvt_journal_item nothing = {.kind = KVT_JOURNAL_PURGE_ALL};
    struct kvt_l2_journal *journal = &l2->journal;
    uint32_t before, max = journal->pages_max * KVT_JOURNAL_ITEMS_MAX;
    uint64_t min = min_live(l2);

    if (journal->keep_from) /* what they purge may still be on its way to the log */
        min = KVT_MIN(min, journal->keep_from - 1);
    kvt_l2_purge_merge(journal, min);
    before = journal->count;
    kvt_l2_purge_coarsen(journal, max / 2); /* room for appends before the next rewrite */
    if (journal->count != before)
        kvt_log(&l2->params.log, KVT_LOG_WARN,
                "journal is full: purges of keys become purges of their namespaces at restart");
    journal->next_pages = KVT_MAX(pages_for(journal->count), 1u);
    if (!journal->count)
        return make_pages(journal, &nothing, 1, 0, epoch);
    return make_pages(journal, journal->items, journal->count, 0, epoch);
}

static int open_next(struct kvt_l2 *l2)
{
    const struct kvt_io_ops *ops = l2->io->ops;
    int file = ops->open(l2->io, KVT_L2_NAME_JOURNAL_NEXT, KVT_IO_OPEN_CREATE);
    int rc = file < 0 ? file : ops->truncate(l2->io, file, 0);

    if (file >= 0 && rc) {
        ops->close(l2->io, file);
        return rc;
    }
    return file;
}

/* The rewritten file is durable: put it in the old one's place. */
static int take_over(struct kvt_l2 *l2)
{
    struct kvt_l2_journal *journal = &l2->journal;
    const struct kvt_io_ops *ops = l2->io->ops;
    int rc = ops->rename(l2->io, KVT_L2_NAME_JOURNAL_NEXT, KVT_L2_NAME_JOURNAL);

    if (!rc)
        rc = ops->sync_dir(l2->io);
    if (rc) { /* which of the two is there is not certain: rewrite again before the next append */
        ops->close(l2->io, journal->next_file);
        journal->next_file = -1;
        journal->broken = true;
        return rc;
    }
    if (journal->file >= 0)
        ops->close(l2->io, journal->file);
    journal->file = journal->next_file;
    journal->next_file = -1;
    journal->epoch = journal->buffer[0].epoch;
    journal->pages = journal->next_pages;
    journal->broken = false;
    return 0;
}

static void owe(struct kvt_l2 *l2)
{
    l2->journal.owed = true;
    l2->journal.retry_ns = kvt_l2_now(l2) + KVT_L2_PAUSE_NS_MIN;
}

static void journal_failed(struct kvt_l2 *l2, int status)
{
    struct kvt_l2_journal *journal = &l2->journal;

    if (journal->next_file >= 0)
        l2->io->ops->close(l2->io, journal->next_file);
    journal->next_file = -1;
    if (!journal->rewriting)
        journal->broken = true;
    if (kvt_l2_full(status) && journal->done) /* once: not each time that it is tried again */
        l2->stats.enospc++;
    owe(l2);
    journal->status = kvt_l2_full(status) ? KVT_E_NO_SPACE : status;
    journal->step = KVT_L2_JOURNAL_REPORT;
}

static void tell_superblock(struct kvt_l2 *l2)
{
    l2->super.wanted = true;
    l2->super.retry_ns = INT64_MIN;
    l2->journal.step = KVT_L2_JOURNAL_SUPER;
}

/* Does the durable superblock count all pages of the journal? */
static bool acknowledged(const struct kvt_l2 *l2)
{
    const struct kvt_superblock *durable = &l2->super.durable;

    if (durable->journal_epoch != l2->journal.epoch)
        return durable->journal_epoch > l2->journal.epoch;
    return durable->journal_pages >= l2->journal.pages;
}

static void journal_done(struct kvt_l2_op *op)
{
    struct kvt_l2 *l2 = op->l2;
    struct kvt_l2_journal *journal = &l2->journal;
    bool sync = journal->step == KVT_L2_JOURNAL_SYNC;
    int64_t want = sync ? 0 : (int64_t)op->req.iov[0].iov_len;

    if (op->req.result != want) {
        journal_failed(l2, op->req.result < 0 ? (int)op->req.result : -EIO);
        return;
    }
    if (sync) {
        if (journal->rewriting) {
            journal->step = KVT_L2_JOURNAL_RENAME;
        } else {
            journal->pages += journal->next_pages;
            tell_superblock(l2);
        }
        return;
    }
    l2->stats.bytes_written += (uint64_t)want;
    journal->step = KVT_L2_JOURNAL_SYNC;
    op->req.kind = KVT_IO_SYNC;
    op->req.iov_count = 0;
    op->req.offset = 0;
    kvt_l2_submit(l2, op);
}

static void submit_pages(struct kvt_l2 *l2, int file, uint32_t first)
{
    struct kvt_l2_journal *journal = &l2->journal;
    struct kvt_io_req *req = &journal->op.req;

    memset(req, 0, offsetof(struct kvt_io_req, iov));
    req->kind = KVT_IO_WRITE;
    req->file = file;
    req->offset = first * (uint64_t)KVT_PAGE_BYTES;
    req->iov_count = 1;
    req->iov[0] = (struct iovec){journal->buffer, (size_t)journal->next_pages * KVT_PAGE_BYTES};
    journal->op.finish = journal_done;
    journal->step = KVT_L2_JOURNAL_WRITE;
    kvt_l2_submit(l2, &journal->op);
}

static int start_rewrite(struct kvt_l2 *l2)
{
    struct kvt_l2_journal *journal = &l2->journal;
    int rc = compose(l2, KVT_MAX(journal->epoch, l2->super.durable.journal_epoch) + 1);

    if (rc)
        return rc;
    rc = open_next(l2);
    if (rc < 0)
        return rc;
    journal->next_file = rc;
    journal->rewriting = true;
    submit_pages(l2, journal->next_file, 0);
    return 0;
}

static int start_append(struct kvt_l2 *l2, const struct kvt_journal_item *items, uint32_t count)
{
    struct kvt_l2_journal *journal = &l2->journal;
    int rc = make_pages(journal, items, count, journal->pages, journal->epoch);

    if (rc)
        return rc;
    journal->next_pages = pages_for(count);
    journal->rewriting = false;
    submit_pages(l2, journal->file, journal->pages);
    return 0;
}

static bool items_ok(const struct kvt_journal_item *items, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (items[i].reserved || items[i].kind < KVT_JOURNAL_PURGE_NS ||
            items[i].kind > KVT_JOURNAL_PURGE_ALL || items[i].kind == KVT_JOURNAL_LEVEL_MAP)
            return false;
        if (items[i].kind == KVT_JOURNAL_PURGE_KEY && !kvt_full_key_ok(&items[i].key))
            return false;
    }
    return count > 0;
}

int kvt_l2_journal(struct kvt_l2 *l2, const struct kvt_journal_item *items, uint32_t count,
                   void (*done)(void *ctx, int status), void *ctx)
{
    struct kvt_l2_journal *journal = &l2->journal;
    int rc;

    if (l2->params.read_only)
        return KVT_E_READ_ONLY;
    if (!items_ok(items, count))
        return KVT_E_INVAL;
    if (count > journal->pages_max * KVT_JOURNAL_ITEMS_MAX / 2)
        return KVT_E_LIMIT;
    if (journal->step != KVT_L2_JOURNAL_IDLE)
        return -EAGAIN;
    rc = reserve_items(journal, count);
    if (rc)
        return rc;
    memcpy(journal->items + journal->count, items, count * sizeof *items);
    journal->count += count;
    journal->keep_from = journal->purging ? journal->purging : UINT64_MAX;
    for (uint32_t i = 0; i < count; i++) {
        kvt_l2_reserve_sequence(l2, items[i].value);
        journal->keep_from = KVT_MIN(journal->keep_from, KVT_MAX(items[i].value, UINT64_C(1)));
    }
    journal->done = done; /* before it starts: a request may be refused at once */
    journal->ctx = ctx;
    journal->status = 0;
    if (!journal->epoch || journal->broken || journal->owed ||
        journal->pages + pages_for(count) > journal->pages_max)
        rc = start_rewrite(l2);
    else
        rc = start_append(l2, items, count);
    if (rc)
        owe(l2);
    if (kvt_l2_full(rc)) {
        l2->stats.enospc++;
        return KVT_E_NO_SPACE;
    }
    return rc;
}

bool kvt_l2_journal_rewrites(const struct kvt_l2 *l2)
{
    return l2->journal.next_file >= 0;
}

void kvt_l2_purging(struct kvt_l2 *l2, uint64_t from)
{
    l2->journal.purging = from;
}

/* Write what could not be written before. */
static void try_again(struct kvt_l2 *l2)
{
    struct kvt_l2_journal *journal = &l2->journal;

    journal->done = NULL;
    journal->status = 0;
    if (start_rewrite(l2))
        owe(l2);
}

void kvt_l2_journal_pump(struct kvt_l2 *l2, int64_t now)
{
    struct kvt_l2_journal *journal = &l2->journal;
    struct kvt_l2_super *super = &l2->super;
    int rc;

    if (journal->owed && journal->step == KVT_L2_JOURNAL_IDLE && now >= journal->retry_ns &&
        !l2->closing)
        try_again(l2);
    if (journal->step == KVT_L2_JOURNAL_RENAME) {
        rc = take_over(l2);
        if (rc)
            journal_failed(l2, rc);
        else
            tell_superblock(l2);
    }
    /* A superblock that cannot be written is tried again later; the journal itself is durable. */
    if (journal->step == KVT_L2_JOURNAL_SUPER &&
        (acknowledged(l2) || (super->step == KVT_L2_IDLE && super->retry_ns != INT64_MIN)))
        journal->step = KVT_L2_JOURNAL_REPORT;
    if (journal->step == KVT_L2_JOURNAL_REPORT) {
        free(journal->buffer);
        journal->buffer = NULL;
        journal->step = KVT_L2_JOURNAL_IDLE;
        if (!journal->status && journal->rewriting)
            journal->owed = false; /* all items in memory were in it */
        if (journal->done)
            journal->done(journal->ctx, journal->status);
    }
}

static bool page_is_zero(const struct kvt_journal_page *page)
{
    const uint8_t *bytes = (const void *)page;

    for (size_t i = 0; i < sizeof *page; i++)
        if (bytes[i])
            return false;
    return true;
}

/* Take the items of the pages that are there. sure: pages that must be there and good. */
static int load_pages(struct kvt_l2_journal *journal, const struct kvt_journal_page *pages,
                      uint32_t count, uint64_t sure)
{
    uint32_t i;

    for (i = 0; i < count; i++) {
        int rc;

        if (kvt_journal_page_check(&pages[i], i, journal->epoch)) {
            if (i >= sure)
                break; /* an append that never returned */
            journal->doubt = true;
            continue;
        }
        rc = reserve_items(journal, pages[i].count);
        if (rc)
            return rc;
        memcpy(journal->items + journal->count, pages[i].items,
               pages[i].count * sizeof pages[i].items[0]);
        journal->count += pages[i].count;
    }
    journal->pages = i;
    journal->broken = i < count;
    journal->doubt = journal->doubt || i < sure;
    return 0;
}

/* How many pages of the journal must be good. */
static uint64_t sure_pages(const struct kvt_l2_journal *journal,
                           const struct kvt_superblock *superblock,
                           const struct kvt_journal_page *pages, uint32_t count)
{
    if (superblock && superblock->journal_epoch == journal->epoch)
        return superblock->journal_pages;
    /* just rewritten, or no superblock: all of it but for zeros at the end */
    while (count && page_is_zero(&pages[count - 1]))
        count--;
    return count;
}

static bool all_good(const struct kvt_l2_journal *journal, const struct kvt_journal_page *pages,
                     uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (kvt_journal_page_check(&pages[i], i, journal->epoch))
            return false;
    return true;
}

static int read_pages(struct kvt_l2 *l2, uint64_t bytes, const struct kvt_superblock *superblock)
{
    struct kvt_l2_journal *journal = &l2->journal;
    uint64_t padded = kvt_round_up(bytes, KVT_PAGE_BYTES);
    struct kvt_journal_page *pages;
    uint32_t count = (uint32_t)(padded / KVT_PAGE_BYTES);
    int64_t got = -EIO;
    int rc;

    if (padded > 64u << 20) /* no journal of ours is that large */
        return KVT_E_CORRUPT;
    pages = kvt_l2_pages_alloc(padded);
    if (!pages)
        return -ENOMEM;
    for (uint32_t look = 0; look < KVT_L2_LOOKS; look++) {
        memset(pages, 0, padded);
        got = kvt_io_read_now(l2->io, journal->file, 0, pages, padded);
        journal->epoch = pages[0].epoch;
        if (got >= 0 && all_good(journal, pages, count))
            break; /* else a second look: one bad read must not cost what is on disk */
    }
    rc = got < 0 ? (int)got
                 : load_pages(journal, pages, count, sure_pages(journal, superblock, pages, count));
    free(pages);
    return rc;
}

int kvt_l2_journal_load(struct kvt_l2 *l2, const struct kvt_l2_survey *survey)
{
    struct kvt_l2_journal *journal = &l2->journal;
    const struct kvt_superblock *superblock =
        survey->superblock_copy >= 0 ? &survey->superblock : NULL;
    int rc = 0;

    journal->broken = true;
    if (kvt_l2_unread(survey->journal_status)) /* as below */
        return survey->journal_status;
    if (survey->journal_ok) {
        int flags = l2->params.read_only ? KVT_IO_OPEN_READ_ONLY : 0;

        journal->file = l2->io->ops->open(l2->io, KVT_L2_NAME_JOURNAL, flags);
        rc = journal->file < 0 ? journal->file : read_pages(l2, survey->journal_bytes, superblock);
        if (rc && rc != KVT_E_CORRUPT)
            return rc; /* it may be readable the next time: change nothing now */
        journal->doubt = journal->doubt || rc;
        journal->broken = journal->broken || journal->doubt;
        if (superblock && journal->epoch < superblock->journal_epoch)
            journal->doubt = journal->broken = true;
    } else if (!superblock || superblock->journal_epoch) {
        journal->doubt = true;
    }
    kvt_l2_purge_merge(journal, 0);
    return 0;
}

int kvt_l2_journal_tidy_now(struct kvt_l2 *l2)
{
    struct kvt_l2_journal *journal = &l2->journal;
    uint64_t epoch = KVT_MAX(journal->epoch, l2->super.durable.journal_epoch);
    bool first = !epoch && !journal->count && !journal->doubt;
    int64_t bytes, got;
    int rc;

    if (journal->doubt) {
        rc = reserve_items(journal, 1);
        if (rc)
            return rc;
        journal->items[journal->count++] =
            (struct kvt_journal_item){.kind = KVT_JOURNAL_PURGE_ALL, .value = l2->sequence_upto};
    } else if (!journal->broken && journal->pages <= journal->pages_max / 2) {
        /* pages that the superblock does not count yet may not be durable: they are before it does
         */
        rc = acknowledged(l2) ? 0 : kvt_io_sync_now(l2->io, journal->file);
        if (!rc)
            return 0;
        if (journal->epoch == l2->super.durable.journal_epoch)
            journal->pages = (uint32_t)l2->super.durable.journal_pages;
        journal->broken = true;
    }
    rc = compose(l2, first ? 0 : epoch + 1);
    if (rc)
        return rc;
    rc = open_next(l2);
    if (rc < 0)
        return rc;
    journal->next_file = rc;
    bytes = (int64_t)journal->next_pages * KVT_PAGE_BYTES;
    got = kvt_io_write_now(l2->io, journal->next_file, 0, journal->buffer, (size_t)bytes);
    rc = got == bytes ? kvt_io_sync_now(l2->io, journal->next_file) : got < 0 ? (int)got : -EIO;
    if (rc) {
        l2->io->ops->close(l2->io, journal->next_file);
        journal->next_file = -1;
    } else {
        rc = take_over(l2);
    }
    free(journal->buffer);
    journal->buffer = NULL;
    return rc;
}
