/* Opening a root: look (survey, journal), decide, and only then change anything.
 *
 * Order: 1 survey and verdict, nothing written; 2 layout by superblock and cap; 3 journal; 4
 * reclaim temporary files, drop segments above the cap and those of another length; 5 per segment,
 * by age: footer, or walk and verify; 6 journal and superblock written, so that a second recovery
 * finds what this one found. The youngest segment without footer is opened again and appended to;
 * others get their footer now. Costs: a header and a tail of 64 KiB are read for each segment,
 * several at once. Bad reads: what cannot be read or looks damaged is read twice before that is
 * believed. A segment of which something still cannot be read (UNREAD) is not touched: l2_again.c,
 * or the next open, finds everything that was durable in it. Where it is the journal, or all that
 * tells whose root it is, the open fails and has changed nothing. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"
#include "store/l2_layout.h"

#define OUTGROWN 3u /* times the length of segments */
#define GROUP 8u    /* segments whose tails are read at once */
#define REBUILD_GENERATIONS                                                                    \
    (1ull << 20)                       /* jumps when both superblock copies are lost, over ... \
                                        */
#define REBUILD_SEQUENCES (1ull << 32) /* ... what an unreadable segment may hold */

struct recovery {
    struct kvt_l2 *l2;
    struct kvt_l2_survey survey;
    struct kvt_l2_scan scan;
    const struct kvt_l2_survey_segment
        *held;  /* the youngest without footer; entries in actives[0] */
    bool whole; /* all of its records are good: else its batch headers must not be walked again */
    uint64_t max_generation, max_sequence;
    uint8_t *tails;
    struct kvt_io_req *reqs;
    bool new_root;
};

static bool ours(const struct kvt_l2 *l2, const struct kvt_l2_survey_segment *segment)
{
    return !segment->status && segment->number < KVT_L2_SEGMENT_NUMBERS &&
           segment->segment_bytes == l2->segment_bytes &&
           !memcmp(segment->root_id, l2->root_id, sizeof l2->root_id);
}

static void new_identity(struct kvt_l2 *l2)
{
    struct kvt_rng rng = {l2->params.seed};
    uint64_t words[2] = {kvt_rng_next(&rng), kvt_rng_next(&rng)};

    memcpy(l2->root_id, words, sizeof l2->root_id);
}

/* The cap has grown so much that segments of its own length are worth what is in the old ones: a
 * third of the cap at most, and 6 GiB, as segments grow up to a cap of 16 GiB. What cannot be read
 * at present is kept for the next open, and the old length with it. */
static bool outgrown(const struct recovery *r, uint64_t cap, uint64_t segment_bytes)
{
    return kvt_segment_bytes_for(cap) >= OUTGROWN * segment_bytes &&
           !kvt_l2_survey_unread(&r->survey);
}

/* Root id, segment size and count. */
static int choose_layout(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    struct kvt_l2_layout layout;
    uint64_t cap = l2->params.cap_bytes, segment_bytes = 0;
    bool known = kvt_l2_survey_identity(&r->survey, l2->root_id, &segment_bytes);

    if (!known && kvt_l2_survey_unread(&r->survey))
        return kvt_l2_survey_unread(&r->survey); /* it may be known the next time */
    if (!known)
        new_identity(l2);
    if (l2->params.read_only)
        cap = KVT_MAX(r->survey.superblock.cap_bytes, cap);
    else if (!kvt_l2_survey_any_segment(&r->survey)) {
        segment_bytes = 0; /* nothing is kept in the old size */
    } else if (segment_bytes && outgrown(r, cap, segment_bytes)) {
        kvt_log(&l2->params.log, KVT_LOG_WARN,
                "the cap has outgrown this root's segments of %llu bytes: they become %u, and what "
                "they held is gone",
                (unsigned long long)segment_bytes, (unsigned)kvt_segment_bytes_for(cap));
        segment_bytes = 0;
    }
    layout = kvt_l2_layout_for(cap, (uint32_t)segment_bytes);
    if (layout.segment_count < KVT_L2_SEGMENTS_MIN && segment_bytes && !l2->params.read_only) {
        kvt_log(&l2->params.log, KVT_LOG_WARN,
                "the cap is too small for this root's segments of %llu bytes: starting it anew",
                (unsigned long long)segment_bytes);
        layout = kvt_l2_layout_for(cap, 0);
    } else if (layout.segment_bytes < kvt_segment_bytes_for(cap) &&
               layout.segment_count == KVT_L2_SEGMENT_NUMBERS) {
        kvt_log(&l2->params.log, KVT_LOG_WARN,
                "this root keeps its segments of %u bytes and cannot use all of its cap",
                (unsigned)layout.segment_bytes);
    }
    l2->segment_bytes = layout.segment_bytes;
    l2->segment_pages = layout.segment_bytes / KVT_PAGE_BYTES;
    l2->segment_count = layout.segment_count;
    l2->journal.pages_max = layout.journal_pages_max;
    return layout.segment_count >= KVT_L2_SEGMENTS_MIN || l2->params.read_only ? 0
                                                                               : KVT_E_TOO_SMALL;
}

static int by_generation(const void *a, const void *b)
{
    const struct kvt_l2_survey_segment *x = a, *y = b;

    if (x->generation != y->generation)
        return x->generation < y->generation ? -1 : 1;
    return (x->number > y->number) - (x->number < y->number);
}

/* Something of it could not be read: it stays as it is, and may hold records of any age. */
static void keep_aside(struct kvt_l2 *l2, uint32_t number, int status)
{
    kvt_log(&l2->params.log, KVT_LOG_WARN,
            "segment %u cannot be read (%s): it is kept as it is, and looked at again",
            (unsigned)number, kvt_strerror(status));
    kvt_l2_segment_move(l2, number, KVT_L2_UNREAD);
    l2->segments[number].min_sequence = 0;
    l2->stats.segments_unread++;
}

/* The table of segments: all files start as BLANK, but for those that could not be read. */
static int make_table(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    struct kvt_l2_survey *survey = &r->survey;

    l2->limit = l2->segment_count;
    for (uint32_t i = 0; i < survey->segment_count; i++)
        if (survey->segments[i].number < KVT_L2_SEGMENT_NUMBERS)
            l2->limit = KVT_MAX(l2->limit, survey->segments[i].number + 1);
    l2->segments = calloc(KVT_MAX(l2->limit, 1u), sizeof *l2->segments);
    if (!l2->segments)
        return -ENOMEM;
    l2->in_state[KVT_L2_ABSENT] = l2->limit;
    for (uint32_t i = 0; i < l2->limit; i++) {
        struct kvt_l2_segment *segment = &l2->segments[i];

        segment->older = segment->newer = KVT_L2_NONE;
        segment->slot = -1;
        segment->retry_ns = INT64_MIN;
        segment->min_sequence = UINT64_MAX;
    }
    for (uint32_t i = 0; i < survey->segment_count; i++) {
        const struct kvt_l2_survey_segment *file = &survey->segments[i];
        struct kvt_l2_segment *segment = &l2->segments[file->number];

        if (file->number >= KVT_L2_SEGMENT_NUMBERS) {
            kvt_log(&l2->params.log, KVT_LOG_WARN, "seg-%08x is out of range: left alone",
                    (unsigned)file->number);
            continue;
        }
        kvt_l2_segment_move(l2, file->number, KVT_L2_BLANK);
        segment->bytes = file->file_bytes;
        segment->generation = file->generation;
        if (kvt_l2_unread(file->status))
            keep_aside(l2, file->number, file->status);
        l2->stats.recovered_bad += file->status != 0 && file->file_bytes;
        l2->stats.bytes_used += segment->bytes;
        l2->segment_files++;
    }
    if (survey->segment_count > 1)
        qsort(survey->segments, survey->segment_count, sizeof *survey->segments, by_generation);
    return 0;
}

struct temp_name {
    char name[KVT_IO_NAME_MAX];
    bool found;
};

static int first_temp(void *arg, const char *name)
{
    struct temp_name *temp = arg;
    uint32_t segment;

    if (kvt_l2_name_kind(name, &segment) != KVT_L2_NAME_IS_TEMP)
        return 0;
    memcpy(temp->name, name, strlen(name) + 1);
    temp->found = true;
    return 1;
}

/* Files of ours that an interrupted write left behind. */
static int reclaim_temps(struct recovery *r)
{
    struct kvt_io *io = r->l2->io;

    for (uint32_t i = 0; i < r->survey.temps; i++) {
        struct temp_name temp = {.found = false};
        int rc = io->ops->list(io, first_temp, &temp);

        if (rc < 0)
            return rc;
        if (!temp.found)
            break;
        rc = io->ops->unlink(io, temp.name);
        if (rc && rc != -ENOENT)
            return rc;
    }
    return 0;
}

static int drop_segment(struct recovery *r, struct kvt_l2_survey_segment *file)
{
    int rc = kvt_l2_segment_unlink(r->l2, file->number);

    file->status = KVT_E_STALE;
    return rc;
}

/* It must go before its length is forgotten: purges are journaled for as long as there are records
 * that they are about, and if the cap becomes what it was, this one would be a segment again. */
static bool other_length(const struct kvt_l2 *l2, const struct kvt_l2_survey_segment *file)
{
    return file->segment_bytes != l2->segment_bytes;
}

/* Files above the cap: those of another size, then blank ones, then the oldest; what could not be
 * read counts as oldest of all. */
static int drop_excess(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    uint32_t before = l2->segment_files;
    int rc = 0;

    for (int pass = 0; pass < 3 && !rc; pass++) {
        for (uint32_t i = 0; i < r->survey.segment_count && !rc; i++) {
            struct kvt_l2_survey_segment *file = &r->survey.segments[i];
            bool valid = ours(l2, file) || kvt_l2_unread(file->status);

            if (file->status == KVT_E_STALE || file->number >= KVT_L2_SEGMENT_NUMBERS)
                continue;
            if (pass == 0 ? !ours(l2, file) && (file->file_bytes > l2->segment_bytes ||
                                                (!file->status && other_length(l2, file)))
                          : l2->segment_files > l2->segment_count && (pass == 2 || !valid))
                rc = drop_segment(r, file);
        }
    }
    if (before == l2->segment_files)
        return rc;
    kvt_log(&l2->params.log, KVT_LOG_INFO, "%u segments dropped to keep the cap",
            (unsigned)(before - l2->segment_files));
    return rc ? rc : l2->io->ops->sync_dir(l2->io);
}

static bool purged(void *ctx, const struct kvt_entry *entry)
{
    return kvt_l2_journal_purged(ctx, entry);
}

/* Tell the store what the scanned segment holds. */
static void report_entries(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    const struct kvt_l2_scan *scan = &r->scan;
    struct kvt_l2_segment *segment = &l2->segments[scan->segment];

    for (uint32_t i = 0; i < scan->count; i++) {
        const struct kvt_entry *entry = &scan->entries[i];

        segment->min_sequence = KVT_MIN(segment->min_sequence, entry->sequence);
        r->max_sequence = KVT_MAX(r->max_sequence, entry->sequence);
        if (l2->params.found && !kvt_l2_journal_purged(l2, entry))
            l2->params.found(l2->params.ctx, entry, scan->segment, scan->generation);
    }
}

/* Write the footer of the segment that is held. A failure leaves it walkable. */
static void seal_held(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    int rc;

    if (!r->held)
        return;
    rc = l2->params.read_only ? 0 : kvt_l2_seal_now(l2, r->held->number, &l2->actives[0]);
    if (rc)
        kvt_log(&l2->params.log, KVT_LOG_WARN, "segment %u: no footer: %s",
                (unsigned)r->held->number, kvt_strerror(rc));
    if (rc)
        kvt_l2_segment_inherited(l2, r->held->number);
    r->held = NULL;
}

/* The scanned segment has no footer: keep what is needed to go on in it. */
static void hold(struct recovery *r, const struct kvt_l2_survey_segment *file, bool whole)
{
    struct kvt_l2_scan *scan = &r->scan;
    struct kvt_l2_active *active = &r->l2->actives[0];
    struct kvt_entry *entries = active->entries;

    seal_held(r);
    kvt_l2_active_reset(active, file->number, -1);
    active->entries = scan->entries;
    scan->entries = entries;
    active->count = active->reserved = scan->count;
    active->next_page = scan->next_page;
    active->previous = scan->previous;
    r->held = file;
    r->whole = whole;
}

/* What the last close made durable needs no check. */
static uint64_t clean_page(const struct recovery *r, uint64_t generation)
{
    const struct kvt_superblock *superblock = &r->survey.superblock;

    return superblock->clean_generation == generation ? superblock->clean_page : 0;
}

static int recover_segment(struct recovery *r, const struct kvt_l2_survey_segment *file,
                           const uint8_t *tail, int slot)
{
    struct kvt_l2 *l2 = r->l2;
    struct kvt_l2_scan *scan = &r->scan;
    int handle = l2->files[slot].file, removed = 0, unread = 0, rc;
    bool inherited;

    rc = kvt_l2_scan_footer(scan, handle, file->number, file->generation, tail, KVT_L2_TAIL_BYTES);
    if (rc) /* a second look */
        rc = kvt_l2_scan_footer(scan, handle, file->number, file->generation, NULL, 0);
    if (rc) {
        unread = kvt_l2_unread(rc) ? rc : 0; /* of a footer that knows more than a walk */
        if (kvt_l2_scan_sealed(tail + KVT_L2_TAIL_BYTES - KVT_PAGE_BYTES, file->number,
                               file->generation, l2->segment_pages))
            l2->stats.recovered_bad++; /* a trailer whose footer is damaged */
        rc = kvt_l2_scan_walk(scan, handle, file->number, file->generation);
        removed = kvt_l2_scan_verify(scan, clean_page(r, file->generation), purged, l2);
        if (removed < 0)
            return removed;
        l2->stats.recovered_bad += (uint32_t)removed + scan->torn + (rc != 0);
        unread = rc ? rc : scan->unread ? -EIO : unread;
    }
    inherited = scan->gap;
    r->max_generation = KVT_MAX(r->max_generation, file->generation);
    l2->stats.segments_live += scan->count > 0;
    if (unread) {
        keep_aside(l2, file->number, unread);
        l2->segments[file->number].partly = scan->count > 0;
        inherited = scan->count > 0;
    } else if (!scan->count) {
        return 0; /* a header without records: blank */
    } else {
        kvt_l2_segment_move(l2, file->number, KVT_L2_SEALED);
    }
    if (inherited && !l2->params.read_only)
        kvt_l2_segment_inherited(l2, file->number);
    report_entries(r);
    if (scan->batches && !unread)
        hold(r, file, !removed);
    return 0;
}

/* Read the tails of n segments at once, then each segment. */
static int recover_group(struct recovery *r, const struct kvt_l2_survey_segment **files, uint32_t n)
{
    struct kvt_l2 *l2 = r->l2;
    int slots[GROUP], rc;
    uint32_t sent = 0;

    memset(r->tails, 0, (size_t)n * KVT_L2_TAIL_BYTES);
    for (uint32_t i = 0; i < n; i++) {
        struct kvt_io_req *req = &r->reqs[sent];

        slots[i] = kvt_l2_file_get(l2, files[i]->number, false);
        if (slots[i] < 0)
            slots[i] = kvt_l2_file_get(l2, files[i]->number, false);
        if (slots[i] < 0)
            continue;
        memset(req, 0, sizeof *req);
        req->kind = KVT_IO_READ;
        req->file = l2->files[slots[i]].file;
        req->offset = l2->segment_bytes - KVT_L2_TAIL_BYTES;
        req->iov_count = 1;
        req->iov[0] = (struct iovec){r->tails + (size_t)i * KVT_L2_TAIL_BYTES, KVT_L2_TAIL_BYTES};
        sent++;
    }
    rc = kvt_l2_gather(l2->io, r->reqs, sent);
    for (uint32_t i = 0; i < n; i++) {
        if (slots[i] < 0) {
            keep_aside(l2, files[i]->number, slots[i]);
            r->max_generation = KVT_MAX(r->max_generation, files[i]->generation);
            l2->stats.recovered_bad++;
            continue;
        }
        if (!rc)
            rc = recover_segment(r, files[i], r->tails + (size_t)i * KVT_L2_TAIL_BYTES, slots[i]);
        kvt_l2_file_put(l2, slots[i]);
    }
    return rc;
}

static int recover_segments(struct recovery *r)
{
    const struct kvt_l2_survey_segment *group[GROUP];
    uint32_t n = 0;
    int rc = 0;

    for (uint32_t i = 0; i < r->survey.segment_count && !rc; i++) {
        if (ours(r->l2, &r->survey.segments[i]))
            group[n++] = &r->survey.segments[i];
        if (n == GROUP) {
            rc = recover_group(r, group, n);
            n = 0;
        }
    }
    if (n && !rc)
        rc = recover_group(r, group, n);
    return rc;
}

/* Go on appending in the youngest segment without footer. */
static void resume(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    struct kvt_l2_active *active = &l2->actives[0];
    struct kvt_l2_segment *segment;
    int rc = 0, slot;

    if (!r->held || l2->params.read_only)
        return;
    segment = &l2->segments[active->segment];
    slot = kvt_l2_file_get(l2, active->segment, false);
    if (slot >= 0 && segment->bytes != l2->segment_bytes)
        rc = kvt_l2_segment_space(l2, active->segment, l2->files[slot].file);
    if (slot < 0 || rc || !r->whole) {
        kvt_l2_file_put(l2, slot);
        seal_held(r);
        return;
    }
    active->slot = slot;
    if (clean_page(r, segment->generation) != active->next_page) {
        active->written = 1; /* what a crashed process wrote may not be durable yet, ... */
        active->moved = 1;   /* ... and may have been moved there */
        l2->super.durable.clean_generation = 0;
    }
    kvt_l2_segment_move(l2, active->segment, KVT_L2_OPEN);
    l2->open = active;
}

static void set_counters(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    const struct kvt_superblock *superblock = &r->survey.superblock;

    for (uint32_t i = 0; i < l2->journal.count; i++)
        if (l2->journal.items[i].value)
            r->max_sequence = KVT_MAX(r->max_sequence, l2->journal.items[i].value - 1);
    l2->generation_next = KVT_MAX(superblock->next_generation, r->max_generation + 1);
    l2->sequence_upto = KVT_MAX(superblock->next_sequence, r->max_sequence + 1);
    if (r->new_root)
        return;
    if (r->survey.superblock_copy < 0) {
        l2->generation_next += REBUILD_GENERATIONS;
        l2->sequence_upto += REBUILD_SEQUENCES;
    } else if (r->survey.superblock_status[0] || r->survey.superblock_status[1]) {
        /* the copy that is lost may be the newer one, which promised a stride more */
        l2->generation_next += KVT_L2_GENERATION_STRIDE;
        l2->sequence_upto += 2ull * KVT_L2_SEQUENCE_STRIDE;
    }
}

/* The superblock promises what the journal holds under its name, so the directory is synced before.
 * That is also for a process that died: a file that it has removed must not come back later. */
static int sync_names(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    int rc = l2->io->ops->sync_dir(l2->io);

    if (!rc || l2->journal.epoch != l2->super.durable.journal_epoch)
        return rc;
    kvt_log(&l2->params.log, KVT_LOG_WARN, "the directory cannot be synced: %s", kvt_strerror(rc));
    return 0;
}

/* Journal, then superblock; both copies of one that was not there. */
static int write_meta(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    int rc = kvt_l2_journal_tidy_now(l2);

    if (rc && !r->new_root && l2->journal.file >= 0) {
        kvt_log(&l2->params.log, KVT_LOG_WARN, "journal cannot be rewritten: %s", kvt_strerror(rc));
        rc = 0; /* the old one stays */
    }
    if (!rc)
        rc = sync_names(r);
    if (rc)
        return rc;
    l2->super.file = l2->io->ops->open(l2->io, KVT_L2_NAME_SUPERBLOCK, KVT_IO_OPEN_CREATE);
    if (l2->super.file < 0)
        return l2->super.file;
    rc = kvt_l2_super_write_now(l2);
    if (!rc && r->survey.superblock_copy < 0)
        rc = kvt_l2_super_write_now(l2);
    if (!rc && !r->survey.superblock_file)
        rc = l2->io->ops->sync_dir(l2->io);
    return rc;
}

static int recover_surveyed(struct recovery *r)
{
    struct kvt_l2 *l2 = r->l2;
    int rc = choose_layout(r);

    if (!rc)
        rc = make_table(r);
    if (!rc && !r->new_root)
        rc = kvt_l2_journal_load(l2, &r->survey);
    if (r->new_root)
        l2->journal.broken = true; /* there is none */
    if (r->survey.superblock_copy >= 0)
        l2->super.durable = r->survey.superblock;
    else if (!r->new_root)
        kvt_log(&l2->params.log, KVT_LOG_WARN, "both superblock copies are lost: rebuilt");
    if (l2->journal.doubt)
        kvt_log(&l2->params.log, KVT_LOG_WARN,
                "the journal is damaged: what is on disk may have been purged and is dropped");
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(l2->actives) && !rc; i++) {
        l2->actives[i].entries =
            kvt_l2_pages_alloc((size_t)l2->segment_pages * sizeof(struct kvt_entry));
        rc = l2->actives[i].entries ? 0 : -ENOMEM;
    }
    if (!rc)
        rc = kvt_l2_scan_init(&r->scan, l2->io, l2->segment_pages);
    if (!rc && !l2->params.read_only)
        rc = reclaim_temps(r);
    if (!rc && !l2->params.read_only)
        rc = drop_excess(r);
    if (!rc)
        rc = recover_segments(r);
    if (rc)
        return rc;
    set_counters(r);
    resume(r);
    return l2->params.read_only ? 0 : write_meta(r);
}

int kvt_l2_recover(struct kvt_l2 *l2, uint64_t *next_sequence)
{
    struct recovery r = {.l2 = l2};
    int rc = kvt_l2_survey(l2->io, &r.survey);

    if (!rc)
        rc = kvt_l2_survey_verdict(&r.survey);
    if (rc < 0)
        goto out;
    r.new_root = rc == 1;
    rc = -ENOMEM;
    r.tails = kvt_l2_pages_alloc((size_t)GROUP * KVT_L2_TAIL_BYTES);
    r.reqs = calloc(GROUP, sizeof *r.reqs);
    if (r.tails && r.reqs)
        rc = recover_surveyed(&r);
    *next_sequence = l2->sequence_upto;
out:
    free(r.reqs);
    free(r.tails);
    kvt_l2_scan_free(&r.scan);
    kvt_l2_survey_free(&r.survey);
    if (kvt_l2_full(rc))
        return KVT_E_NO_SPACE;
    return rc == -EROFS ? KVT_E_READ_ONLY : rc;
}
