/* Read-only check of a root: see fsck.h. Uses the log's own readers (survey, scan, journal) and
 * compares what they find with each other: footer with batches, entries with records, counters with
 * the superblock. Knows what a crash may leave, so that only damage is a problem. */
#include "store/fsck.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

#define TICK_BYTES (8u << 20) /* records read between two reports of progress */

struct seen_key { /* one record, for counting keys */
    XXH128_hash_t key;
    uint64_t sequence;
    uint32_t pages;
};

struct fsck {
    const struct kvt_fsck_params *params;
    struct kvt_fsck_report *report;
    struct kvt_l2_survey survey;
    struct kvt_l2 *l2; /* not opened: holds the journal */
    struct kvt_l2_scan scan, walk;
    uint8_t root_id[16];
    uint64_t segment_bytes;
    struct seen_key *seen;
    size_t seen_count, seen_room;
    uint64_t done_bytes, total_bytes;
};

__attribute__((format(printf, 3, 4))) static void say(struct fsck *fsck, bool problem,
                                                      const char *format, ...)
{
    char text[512];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (problem)
        fsck->report->problems++;
    else
        fsck->report->notes++;
    if (fsck->params->found)
        fsck->params->found(fsck->params->ctx, problem, text);
}

static bool all_zero(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bytes[i])
            return false;
    return true;
}

static int tick(struct fsck *fsck, uint64_t bytes)
{
    fsck->done_bytes = KVT_MIN(fsck->done_bytes + bytes, fsck->total_bytes);
    if (!fsck->params->progress)
        return 0;
    return fsck->params->progress(fsck->params->ctx, fsck->done_bytes, fsck->total_bytes)
               ? KVT_E_CANCELED
               : 0;
}

static void check_superblock(struct fsck *fsck)
{
    const struct kvt_l2_survey *survey = &fsck->survey;

    if (survey->superblock_copy < 0) { /* without segments: creation was interrupted */
        say(fsck, kvt_l2_survey_any_segment(survey), "superblock: %s; the next open makes it new",
            survey->superblock_file ? "neither copy is good" : "the file is missing");
        return;
    }
    fsck->report->cap_bytes = survey->superblock.cap_bytes;
    for (int copy = 0; copy < 2; copy++) /* they are written in turn: a crash tears one at most */
        if (survey->superblock_status[copy])
            say(fsck, false, "superblock: copy %d is unfinished or damaged; the other one counts",
                copy);
}

static int check_journal(struct fsck *fsck)
{
    struct kvt_l2 *l2 = fsck->l2;
    int rc = kvt_l2_journal_load(l2, &fsck->survey);

    if (l2->journal.file >= 0)
        l2->io->ops->close(l2->io, l2->journal.file);
    l2->journal.file = -1;
    if (rc == -ENOMEM)
        return rc;
    if (rc)
        say(fsck, true, "journal: cannot be read: %s", kvt_strerror(rc));
    else if (l2->journal.doubt)
        say(fsck, true,
            "journal: damaged; purges may be lost, so the next open drops every record");
    else if (l2->journal.broken && fsck->survey.journal_bytes)
        say(fsck, false, "journal: ends in a purge that did not return");
    else if (!fsck->survey.journal_file)
        say(fsck, false, "journal: missing; nothing was ever purged");
    return 0;
}

static int note_file(void *arg, const char *name)
{
    struct fsck *fsck = arg;
    uint32_t number;

    switch (kvt_l2_name_kind(name, &number)) {
    case KVT_L2_NAME_IS_FOREIGN:
        say(fsck, false, "%s: not a file of ours", name);
        break;
    case KVT_L2_NAME_IS_TEMP:
        say(fsck, false, "%s: left by an interrupted write; the next open removes it", name);
        break;
    default:
        break;
    }
    return 0;
}

static int remember(struct fsck *fsck, const struct kvt_entry *entry)
{
    if (fsck->seen_count == fsck->seen_room) {
        size_t room = fsck->seen_room ? fsck->seen_room * 2 : 1024;
        void *grown = reallocarray(fsck->seen, room, sizeof *fsck->seen);

        if (!grown)
            return -ENOMEM;
        fsck->seen = grown;
        fsck->seen_room = room;
    }
    fsck->seen[fsck->seen_count++] =
        (struct seen_key){.key = XXH3_128bits(&entry->key, sizeof entry->key),
                          .sequence = entry->sequence,
                          .pages = entry->pages};
    return 0;
}

static int by_key(const void *a, const void *b)
{
    const struct seen_key *x = a, *y = b;
    int c = XXH128_cmp(&x->key, &y->key);

    return c ? c : (x->sequence < y->sequence) - (x->sequence > y->sequence);
}

static void count_keys(struct fsck *fsck)
{
    struct kvt_fsck_report *report = fsck->report;

    if (fsck->seen_count)
        qsort(fsck->seen, fsck->seen_count, sizeof *fsck->seen, by_key);
    for (size_t i = 0; i < fsck->seen_count; i++) {
        if (i && !XXH128_cmp(&fsck->seen[i].key, &fsck->seen[i - 1].key)) {
            report->superseded++;
            continue;
        }
        report->records++;
        report->bytes += (uint64_t)fsck->seen[i].pages * KVT_PAGE_BYTES;
    }
}

/* A header that is well-formed but for generation and checksum, or not begun: the segment was being
 * given a new life when the writer died. */
static bool header_unfinished(const struct fsck *fsck, uint32_t number, uint8_t *page)
{
    struct kvt_segment_header *header = (void *)page;
    struct kvt_segment_header want = {.magic = KVT_SEGMENT_MAGIC,
                                      .version = KVT_DISK_VERSION,
                                      .segment = number,
                                      .segment_bytes = fsck->segment_bytes};

    memcpy(want.root_id, fsck->root_id, sizeof want.root_id);
    header->generation = 0;
    header->checksum = 0;
    return !memcmp(&want, header, sizeof want) || all_zero(page, KVT_PAGE_BYTES);
}

/* Is the header good? False: nothing more can be said about this file. */
static bool check_header(struct fsck *fsck, const struct kvt_l2_survey_segment *file, int handle,
                         const char *name)
{
    const struct kvt_l2_survey *survey = &fsck->survey;
    uint8_t *page = fsck->scan.window;
    int64_t got;

    if (kvt_l2_unread(file->status)) {
        say(fsck, true, "%s: header cannot be read (%s); it is kept as it is", name,
            kvt_strerror(file->status));
        return false;
    }
    if (file->status) {
        memset(page, 0, KVT_PAGE_BYTES);
        got = kvt_io_read_now(fsck->params->io, handle, 0, page, KVT_PAGE_BYTES);
        if (got >= 0 && header_unfinished(fsck, file->number, page))
            say(fsck, false, "%s: blank", name);
        else
            say(fsck, true, "%s: header is damaged (%s); its records are lost", name,
                kvt_strerror(file->status));
        return false;
    }
    if (memcmp(file->root_id, fsck->root_id, sizeof fsck->root_id)) {
        say(fsck, true, "%s: belongs to another root", name);
        return false;
    }
    if (file->segment_bytes != fsck->segment_bytes) {
        say(fsck, true, "%s: made for segments of %llu bytes, this root has %llu", name,
            (unsigned long long)file->segment_bytes, (unsigned long long)fsck->segment_bytes);
        return false;
    }
    if (survey->superblock_copy >= 0 && file->generation >= survey->superblock.next_generation)
        say(fsck, true, "%s: generation %llu was never given out", name,
            (unsigned long long)file->generation);
    return true;
}

/* What does the last page of a segment without usable footer say? True: it was sealed once, so its
 * records were durable. */
static bool check_trailer(struct fsck *fsck, const struct kvt_l2_survey_segment *file, int handle,
                          const char *name)
{
    const struct kvt_trailer *trailer = (const void *)fsck->scan.window;
    uint32_t pages = fsck->scan.segment_pages;
    int64_t got = kvt_io_read_now(fsck->params->io, handle, (pages - 1) * (uint64_t)KVT_PAGE_BYTES,
                                  fsck->scan.window, KVT_PAGE_BYTES);

    if (got < 0)
        say(fsck, true, "%s: trailer cannot be read: %s", name, kvt_strerror((int)got));
    if (got < (int64_t)KVT_PAGE_BYTES)
        return false; /* short: said elsewhere */
    if (kvt_l2_scan_sealed(fsck->scan.window, file->number, file->generation, pages)) {
        say(fsck, false, "%s: footer is unfinished or damaged; its batches are read", name);
        return true;
    }
    if (!all_zero(fsck->scan.window, KVT_PAGE_BYTES) &&
        kvt_trailer_check(trailer, file->number, trailer->generation, pages))
        say(fsck, false, "%s: trailer is unfinished or damaged; its batches are read", name);
    return false;
}

/* Every footer entry that lies in the walked part must stand in a batch header just so. */
static void compare_footer(struct fsck *fsck, const char *name)
{
    const struct kvt_l2_scan *scan = &fsck->scan, *walk = &fsck->walk;
    uint32_t k = 0, differ = 0, beyond = 0;

    for (uint32_t i = 0; i < scan->count; i++) {
        while (k < walk->count && walk->entries[k].page < scan->entries[i].page)
            k++;
        if (scan->entries[i].page >= walk->next_page)
            beyond++;
        else if (k == walk->count ||
                 memcmp(&walk->entries[k], &scan->entries[i], sizeof scan->entries[i]))
            differ++;
    }
    if (differ)
        say(fsck, true, "%s: %u entries of the footer are in no batch header", name,
            (unsigned)differ);
    if (beyond)
        say(fsck, false, "%s: %u records behind a failed write are known by the footer only", name,
            (unsigned)beyond);
}

static int check_record(struct fsck *fsck, const struct kvt_entry *entry, bool settled,
                        const char *name)
{
    int rc = fsck->params->quick ? 0 : kvt_l2_scan_record(&fsck->scan, entry);

    if (rc == -ENOMEM)
        return rc;
    if (!rc)
        return remember(fsck, entry);
    if (settled)
        say(fsck, true, "%s: record at page %u, %u pages, key %02x%02x%02x%02x...: %s", name,
            (unsigned)entry->page, (unsigned)entry->pages, entry->key.hash[0], entry->key.hash[1],
            entry->key.hash[2], entry->key.hash[3], kvt_strerror(rc));
    else
        say(fsck, false, "%s: record at page %u was not written to its end", name,
            (unsigned)entry->page);
    return 0;
}

/* clean_page: what lies before it was durable once, so damage there is damage. */
static int check_entries(struct fsck *fsck, uint64_t clean_page, const char *name)
{
    const struct kvt_l2_survey *survey = &fsck->survey;
    const struct kvt_l2_scan *scan = &fsck->scan;
    uint64_t next = 1, bytes = 0;
    uint32_t strange = 0;
    int rc = 0;

    for (uint32_t i = 0; i < scan->count && !rc; i++) {
        const struct kvt_entry *entry = &scan->entries[i];

        if (entry->page < next)
            say(fsck, true, "%s: records overlap at page %u", name, (unsigned)entry->page);
        next = (uint64_t)entry->page + entry->pages;
        strange +=
            survey->superblock_copy >= 0 && entry->sequence >= survey->superblock.next_sequence;
        bytes += (uint64_t)entry->pages * KVT_PAGE_BYTES;
        if (kvt_l2_journal_purged(fsck->l2, entry)) {
            fsck->report->purged++;
            continue;
        }
        rc = check_record(fsck, entry, entry->page < clean_page, name);
        if (!rc && bytes >= TICK_BYTES) {
            rc = tick(fsck, bytes);
            bytes = 0;
        }
    }
    if (strange)
        say(fsck, true, "%s: %u records have a sequence that was never given out", name,
            (unsigned)strange);
    return rc;
}

/* A segment without usable footer: walk it. Returns the page before which all must be good. */
static uint64_t check_batches(struct fsck *fsck, const struct kvt_l2_survey_segment *file,
                              int handle, const char *name)
{
    const struct kvt_superblock *superblock = &fsck->survey.superblock;
    struct kvt_l2_scan *scan = &fsck->scan;
    bool sealed = check_trailer(fsck, file, handle, name);
    uint64_t clean = superblock->clean_generation == file->generation ? superblock->clean_page : 0;
    int rc = kvt_l2_scan_walk(scan, handle, file->number, file->generation);

    if (rc < 0)
        say(fsck, true, "%s: cannot be read: %s", name, kvt_strerror(rc));
    else if (scan->next_page < clean)
        say(fsck, true, "%s: batches end at page %u, but %llu pages were durable", name,
            (unsigned)scan->next_page, (unsigned long long)clean);
    else if (scan->torn)
        say(fsck, false, "%s: the batch at page %u was not written to its end", name,
            (unsigned)scan->next_page);
    return sealed ? UINT64_MAX : clean;
}

static int check_opened(struct fsck *fsck, const struct kvt_l2_survey_segment *file, int handle,
                        const char *name)
{
    struct kvt_l2_scan *scan = &fsck->scan;
    uint64_t clean_page = UINT64_MAX;
    int rc;

    if (!check_header(fsck, file, handle, name))
        return 0;
    rc = kvt_l2_scan_footer(scan, handle, file->number, file->generation, NULL, 0);
    if (rc) {
        clean_page = check_batches(fsck, file, handle, name);
    } else {
        rc = kvt_l2_scan_walk(&fsck->walk, handle, file->number, file->generation);
        if (rc)
            say(fsck, true, "%s: batches cannot be read: %s", name, kvt_strerror(rc));
        compare_footer(fsck, name);
    }
    if (file->file_bytes != fsck->segment_bytes) /* a new file may not have its size yet */
        say(fsck, scan->count > 0, "%s: %llu bytes long, should be %llu", name,
            (unsigned long long)file->file_bytes, (unsigned long long)fsck->segment_bytes);
    fsck->report->segments += scan->count > 0;
    scan->window_pages = 0;
    return check_entries(fsck, clean_page, name);
}

static int check_segment(struct fsck *fsck, const struct kvt_l2_survey_segment *file)
{
    const struct kvt_io_ops *ops = fsck->params->io->ops;
    char name[KVT_IO_NAME_MAX];
    uint64_t end_bytes = fsck->done_bytes + file->file_bytes;
    int handle, rc;

    kvt_l2_segment_name(file->number, name);
    fsck->report->file_bytes += file->file_bytes;
    if (file->number >= KVT_L2_SEGMENT_NUMBERS) {
        say(fsck, false, "%s: out of range, not a segment of ours", name);
        return 0;
    }
    handle = ops->open(fsck->params->io, name, KVT_IO_OPEN_READ_ONLY);
    if (handle < 0) {
        say(fsck, true, "%s: cannot be opened: %s", name, kvt_strerror(handle));
        return 0;
    }
    rc = check_opened(fsck, file, handle, name);
    ops->close(fsck->params->io, handle);
    if (!rc && fsck->done_bytes < end_bytes)
        rc = tick(fsck, end_bytes - fsck->done_bytes);
    return rc;
}

static int check_root(struct fsck *fsck)
{
    struct kvt_l2_survey *survey = &fsck->survey;
    bool known = kvt_l2_survey_identity(survey, fsck->root_id, &fsck->segment_bytes);
    int rc;

    check_superblock(fsck);
    rc = check_journal(fsck);
    if (!rc)
        rc = fsck->params->io->ops->list(fsck->params->io, note_file, fsck);
    for (uint32_t i = 0; i < survey->segment_count; i++)
        fsck->total_bytes += survey->segments[i].file_bytes;
    if (!rc && known) {
        rc = kvt_l2_scan_init(&fsck->scan, fsck->params->io,
                              (uint32_t)(fsck->segment_bytes / KVT_PAGE_BYTES));
        if (!rc)
            rc = kvt_l2_scan_init(&fsck->walk, fsck->params->io,
                                  (uint32_t)(fsck->segment_bytes / KVT_PAGE_BYTES));
        for (uint32_t i = 0; i < survey->segment_count && !rc; i++)
            rc = check_segment(fsck, &survey->segments[i]);
    }
    fsck->report->file_bytes += survey->superblock_bytes + survey->journal_bytes;
    if (!rc && fsck->report->cap_bytes && fsck->report->file_bytes > fsck->report->cap_bytes)
        say(fsck, true, "all files together have %llu bytes, more than the cap of %llu",
            (unsigned long long)fsck->report->file_bytes,
            (unsigned long long)fsck->report->cap_bytes);
    count_keys(fsck);
    return rc;
}

int kvt_fsck(const struct kvt_fsck_params *params, struct kvt_fsck_report *report)
{
    struct fsck fsck = {.params = params, .report = report};
    int rc;

    memset(report, 0, sizeof *report);
    rc = kvt_l2_survey(params->io, &fsck.survey);
    if (!rc)
        rc = kvt_l2_survey_verdict(&fsck.survey);
    if (rc)
        goto out;
    fsck.l2 = calloc(1, sizeof *fsck.l2);
    if (!fsck.l2) {
        rc = -ENOMEM;
        goto out;
    }
    fsck.l2->io = params->io;
    fsck.l2->params.read_only = 1;
    fsck.l2->journal.file = fsck.l2->journal.next_file = -1;
    rc = check_root(&fsck);
    free(fsck.l2->journal.items);
    free(fsck.l2);
out:
    kvt_l2_scan_free(&fsck.scan);
    kvt_l2_scan_free(&fsck.walk);
    kvt_l2_survey_free(&fsck.survey);
    free(fsck.seen);
    return rc;
}
