/* Survey of a root: see l2_survey.h.
 *
 * A directory is ours when one superblock copy, one segment header or the journal's first page is
 * valid: each has a magic, a version, its own place and a checksum, so no accident looks like one.
 * Files with our names and no such sign are somebody else's unless all of them are empty (an open
 * that was interrupted before its first write); unfinished ones (".tmp") are ours beside a lock
 * file only, because we lock before we write. Does not write, does not look into segments beyond
 * their first page. */
#include "store/l2_survey.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2.h"

#define TEMP_SUFFIX ".tmp"
#define SEGMENT_PREFIX "seg-"
#define GROUP 12u /* headers read at once */

void kvt_l2_segment_name(uint32_t segment, char name[KVT_IO_NAME_MAX])
{
    snprintf(name, KVT_IO_NAME_MAX, SEGMENT_PREFIX "%08x", (unsigned)segment);
}

static bool segment_number(const char *name, uint32_t *segment)
{
    uint32_t number = 0;

    if (strncmp(name, SEGMENT_PREFIX, 4) || strlen(name) != 12)
        return false;
    for (const char *p = name + 4; *p; p++) {
        if (*p >= '0' && *p <= '9')
            number = number << 4 | (uint32_t)(*p - '0');
        else if (*p >= 'a' && *p <= 'f')
            number = number << 4 | (uint32_t)(*p - 'a' + 10);
        else
            return false;
    }
    *segment = number;
    return true;
}

static enum kvt_l2_name plain_name_kind(const char *name, uint32_t *segment)
{
    if (!strcmp(name, KVT_L2_NAME_SUPERBLOCK))
        return KVT_L2_NAME_IS_SUPERBLOCK;
    if (!strcmp(name, KVT_L2_NAME_JOURNAL))
        return KVT_L2_NAME_IS_JOURNAL;
    if (!strcmp(name, KVT_L2_NAME_LOCK))
        return KVT_L2_NAME_IS_LOCK;
    if (!strcmp(name, KVT_L2_NAME_STATS) || !strcmp(name, KVT_L2_NAME_PLAN) ||
        !strcmp(name, KVT_L2_NAME_PATHS) || !strcmp(name, KVT_L2_NAME_ADMISSION) ||
        !strcmp(name, KVT_L2_NAME_TTL))
        return KVT_L2_NAME_IS_STATS;
    return segment_number(name, segment) ? KVT_L2_NAME_IS_SEGMENT : KVT_L2_NAME_IS_FOREIGN;
}

enum kvt_l2_name kvt_l2_name_kind(const char *name, uint32_t *segment)
{
    char stem[KVT_IO_NAME_MAX];
    size_t len = strlen(name), suffix = strlen(TEMP_SUFFIX);

    if (len <= suffix || len >= sizeof stem || strcmp(name + len - suffix, TEMP_SUFFIX))
        return plain_name_kind(name, segment);
    memcpy(stem, name, len - suffix);
    stem[len - suffix] = '\0';
    return plain_name_kind(stem, segment) == KVT_L2_NAME_IS_FOREIGN ? KVT_L2_NAME_IS_FOREIGN
                                                                    : KVT_L2_NAME_IS_TEMP;
}

static void gathered(struct kvt_io_req *req)
{
    ++*(uint32_t *)req->user;
}

int kvt_l2_gather(struct kvt_io *io, struct kvt_io_req *reqs, uint32_t n)
{
    uint32_t sent = 0, done = 0;
    int rc = 0;

    while (done < n) {
        struct kvt_io_req *out[GROUP];
        unsigned count;
        int fd = io->ops->event_fd(io);

        while (!rc && sent < n) {
            int sub;

            reqs[sent].user = &done;
            reqs[sent].done = gathered;
            sub = io->ops->submit(io, &reqs[sent]);
            if (sub == -EAGAIN)
                break;
            rc = sub;
            sent += !sub;
        }
        if (rc && done == sent)
            return rc;
        count = io->ops->reap(io, out, GROUP);
        for (unsigned i = 0; i < count; i++)
            out[i]->done(out[i]);
        if (!count && fd >= 0) {
            struct pollfd pfd = {.fd = fd, .events = POLLIN};

            (void)poll(&pfd, 1, 100);
        }
    }
    return 0;
}

static void read_request(struct kvt_io_req *req, int file, uint64_t offset, void *buf, size_t len)
{
    memset(req, 0, sizeof *req);
    req->kind = KVT_IO_READ;
    req->file = file;
    req->offset = offset;
    req->iov_count = 1;
    req->iov[0].iov_base = buf;
    req->iov[0].iov_len = len;
}

static int note_segment(struct kvt_l2_survey *survey, uint32_t number)
{
    if (survey->segment_count == survey->segment_capacity) {
        uint32_t capacity = survey->segment_capacity ? survey->segment_capacity * 2 : 64;
        void *grown = realloc(survey->segments, capacity * sizeof *survey->segments);

        if (!grown)
            return -ENOMEM;
        survey->segments = grown;
        survey->segment_capacity = capacity;
    }
    survey->segments[survey->segment_count++] = (struct kvt_l2_survey_segment){.number = number};
    return 0;
}

static int note_name(void *arg, const char *name)
{
    struct kvt_l2_survey *survey = arg;
    uint32_t number = 0;

    switch (kvt_l2_name_kind(name, &number)) {
    case KVT_L2_NAME_IS_SUPERBLOCK:
        survey->superblock_file = true;
        break;
    case KVT_L2_NAME_IS_JOURNAL:
        survey->journal_file = true;
        break;
    case KVT_L2_NAME_IS_LOCK:
        survey->lock_file = true;
        break;
    case KVT_L2_NAME_IS_STATS:
        survey->stats_file = true;
        break;
    case KVT_L2_NAME_IS_TEMP:
        survey->temps++;
        break;
    case KVT_L2_NAME_IS_SEGMENT:
        return note_segment(survey, number);
    case KVT_L2_NAME_IS_FOREIGN:
        if (!survey->foreign++)
            snprintf(survey->foreign_name, sizeof survey->foreign_name, "%s", name);
        break;
    }
    return 0;
}

static int by_number(const void *a, const void *b)
{
    const struct kvt_l2_survey_segment *x = a, *y = b;

    return (x->number > y->number) - (x->number < y->number);
}

/* A file to be read, or -errno; a failure is tried once more. */
static int open_file(struct kvt_io *io, const char *name)
{
    int file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);

    return file < 0 && file != -ENOENT ? io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY) : file;
}

/* One page; zeros where the file is shorter. 0, -errno. */
static int read_page(struct kvt_io *io, int file, uint64_t offset, void *page)
{
    int64_t got;

    memset(page, 0, KVT_PAGE_BYTES);
    got = kvt_io_read_now(io, file, offset, page, KVT_PAGE_BYTES);
    return got < 0 ? (int)got : 0;
}

static int read_superblock(struct kvt_io *io, int file, uint32_t copy, void *page)
{
    int status = KVT_E_CORRUPT;

    for (uint32_t look = 0; look < KVT_L2_LOOKS && status; look++) {
        status = read_page(io, file, copy * (uint64_t)KVT_PAGE_BYTES, page);
        if (!status)
            status = kvt_superblock_check(page, copy);
    }
    return status;
}

static void read_superblocks(struct kvt_io *io, struct kvt_l2_survey *survey, void *page)
{
    int file = open_file(io, KVT_L2_NAME_SUPERBLOCK);
    int64_t bytes = file < 0 ? 0 : io->ops->size(io, file);

    survey->superblock_bytes = bytes > 0 ? (uint64_t)bytes : 0;
    for (uint32_t copy = 0; copy < 2; copy++) {
        const struct kvt_superblock *superblock = page;

        if (file < 0)
            survey->superblock_status[copy] = file == -ENOENT ? KVT_E_CORRUPT : file;
        else
            survey->superblock_status[copy] = read_superblock(io, file, copy, page);
        if (survey->superblock_status[copy])
            continue;
        if (survey->superblock_copy < 0 || superblock->update > survey->superblock.update) {
            survey->superblock = *superblock;
            survey->superblock_copy = (int)copy;
        }
    }
    if (file >= 0)
        io->ops->close(io, file);
}

static void read_journal_page(struct kvt_io *io, struct kvt_l2_survey *survey, void *page)
{
    const struct kvt_journal_page *first = page;
    int file = open_file(io, KVT_L2_NAME_JOURNAL);
    int64_t bytes;

    if (file < 0) {
        survey->journal_status = file == -ENOENT ? 0 : file;
        return;
    }
    bytes = io->ops->size(io, file);
    survey->journal_bytes = bytes > 0 ? (uint64_t)bytes : 0;
    survey->journal_status = KVT_E_CORRUPT;
    for (uint32_t look = 0; look < KVT_L2_LOOKS && survey->journal_status; look++) {
        survey->journal_status = read_page(io, file, 0, page);
        if (!survey->journal_status)
            survey->journal_status = kvt_journal_page_check(first, 0, first->epoch);
    }
    survey->journal_ok = !survey->journal_status;
    io->ops->close(io, file);
}

/* A lock file of ours holds a process id, or nothing yet; anything else is somebody's file. */
static void read_lock(struct kvt_io *io, struct kvt_l2_survey *survey, void *page)
{
    const char *text = page;
    int file = io->ops->open(io, KVT_L2_NAME_LOCK, KVT_IO_OPEN_READ_ONLY);
    int64_t size, bytes;

    survey->lock_ok = false;
    if (file < 0)
        return;
    size = io->ops->size(io, file);
    bytes = kvt_io_read_now(io, file, 0, page, KVT_PAGE_BYTES);
    io->ops->close(io, file);
    survey->lock_ok = size >= 0 && size == bytes; /* all of it was seen */
    for (int64_t i = 0; i < bytes; i++)
        if (!(text[i] >= '0' && text[i] <= '9') && text[i] != '\n')
            survey->lock_ok = false;
}

static void note_header(struct kvt_l2_survey_segment *segment,
                        const struct kvt_segment_header *header)
{
    segment->status = kvt_segment_header_check(header, segment->number, header->root_id);
    segment->generation = header->generation;
    segment->segment_bytes = header->segment_bytes;
    memcpy(segment->root_id, header->root_id, sizeof segment->root_id);
    if (!segment->status &&
        (segment->segment_bytes < KVT_SEGMENT_BYTES_MIN ||
         segment->segment_bytes > KVT_SEGMENT_BYTES_MAX || segment->segment_bytes % KVT_PAGE_BYTES))
        segment->status = KVT_E_CORRUPT;
}

static int read_headers(struct kvt_io *io, struct kvt_l2_survey *survey, uint8_t *pages,
                        struct kvt_io_req *reqs, uint32_t first, uint32_t n)
{
    struct kvt_l2_survey_segment *segments = survey->segments + first;
    char name[KVT_IO_NAME_MAX];
    int files[GROUP];
    uint32_t opened = 0;
    int rc;

    memset(pages, 0, (size_t)n * KVT_PAGE_BYTES);
    for (uint32_t i = 0; i < n; i++) {
        int64_t bytes;

        kvt_l2_segment_name(segments[i].number, name);
        files[i] = open_file(io, name);
        segments[i].status = files[i] < 0 ? files[i] : 0;
        if (files[i] < 0)
            continue;
        bytes = io->ops->size(io, files[i]);
        segments[i].file_bytes = bytes > 0 ? (uint64_t)bytes : 0;
        read_request(&reqs[opened++], files[i], 0, pages + (size_t)i * KVT_PAGE_BYTES,
                     KVT_PAGE_BYTES);
    }
    rc = kvt_l2_gather(io, reqs, opened);
    opened = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *page = pages + (size_t)i * KVT_PAGE_BYTES;
        int64_t result;

        if (files[i] < 0)
            continue;
        result = reqs[opened++].result;
        segments[i].status = result < 0 ? (int)result : 0;
        for (uint32_t look = 1; look <= KVT_L2_LOOKS; look++) {
            if (!segments[i].status)
                note_header(&segments[i], (const void *)page);
            if (!segments[i].status || look == KVT_L2_LOOKS)
                break;
            segments[i].status = read_page(io, files[i], 0, page);
        }
        io->ops->close(io, files[i]);
    }
    return rc;
}

int kvt_l2_survey(struct kvt_io *io, struct kvt_l2_survey *survey)
{
    uint8_t *pages = aligned_alloc(KVT_PAGE_BYTES, (size_t)GROUP * KVT_PAGE_BYTES);
    struct kvt_io_req *reqs = calloc(GROUP, sizeof *reqs);
    int rc = -ENOMEM;

    memset(survey, 0, sizeof *survey);
    survey->superblock_copy = -1;
    if (!pages || !reqs)
        goto out;
    rc = io->ops->list(io, note_name, survey);
    if (rc)
        goto out;
    if (survey->segment_count > 1)
        qsort(survey->segments, survey->segment_count, sizeof *survey->segments, by_number);
    read_superblocks(io, survey, pages);
    read_journal_page(io, survey, pages);
    if (survey->lock_file)
        read_lock(io, survey, pages);
    for (uint32_t i = 0; i < survey->segment_count && !rc; i += GROUP)
        rc = read_headers(io, survey, pages, reqs, i, KVT_MIN(GROUP, survey->segment_count - i));
out:
    free(reqs);
    free(pages);
    return rc;
}

void kvt_l2_survey_free(struct kvt_l2_survey *survey)
{
    free(survey->segments);
    memset(survey, 0, sizeof *survey);
}

int kvt_l2_survey_verdict(const struct kvt_l2_survey *survey)
{
    bool sign = survey->superblock_copy >= 0 || survey->journal_ok;
    bool bytes = survey->superblock_bytes || survey->journal_bytes;

    for (int copy = 0; copy < 2; copy++)
        if (survey->superblock_status[copy] == KVT_E_NEWER)
            return KVT_E_NEWER;
    if (survey->journal_status == KVT_E_NEWER)
        return KVT_E_NEWER;
    for (uint32_t i = 0; i < survey->segment_count; i++) {
        if (survey->segments[i].status == KVT_E_NEWER)
            return KVT_E_NEWER;
        sign = sign || !survey->segments[i].status;
        bytes = bytes || survey->segments[i].file_bytes;
    }
    if (sign)
        return 0;
    if (kvt_l2_survey_unread(survey)) /* the sign may be there */
        return kvt_l2_survey_unread(survey);
    if (survey->foreign || bytes || (survey->lock_file && !survey->lock_ok))
        return KVT_E_NOT_OURS;
    /* An open of ours that was interrupted had locked the directory before it wrote anything: names
     * like those of our unfinished files do not make it ours. */
    return (survey->stats_file || survey->temps) && !survey->lock_file ? KVT_E_NOT_OURS : 1;
}

int kvt_l2_survey_unread(const struct kvt_l2_survey *survey)
{
    if (kvt_l2_unread(survey->journal_status))
        return survey->journal_status;
    for (int copy = 0; copy < 2; copy++)
        if (kvt_l2_unread(survey->superblock_status[copy]))
            return survey->superblock_status[copy];
    for (uint32_t i = 0; i < survey->segment_count; i++)
        if (kvt_l2_unread(survey->segments[i].status))
            return survey->segments[i].status;
    return 0;
}

bool kvt_l2_survey_any_segment(const struct kvt_l2_survey *survey)
{
    for (uint32_t i = 0; i < survey->segment_count; i++)
        if (!survey->segments[i].status || kvt_l2_unread(survey->segments[i].status))
            return true;
    return false;
}

int kvt_l2_probe(struct kvt_io *io)
{
    struct kvt_l2_survey survey;
    int rc = kvt_l2_survey(io, &survey);

    if (!rc)
        rc = kvt_l2_survey_verdict(&survey);
    kvt_l2_survey_free(&survey);
    return rc;
}

bool kvt_l2_survey_identity(const struct kvt_l2_survey *survey, uint8_t root_id[16],
                            uint64_t *segment_bytes)
{
    const struct kvt_l2_survey_segment *winner = NULL;
    uint32_t votes = 0;

    if (survey->superblock_copy >= 0) {
        memcpy(root_id, survey->superblock.root_id, 16);
        *segment_bytes = survey->superblock.segment_bytes;
        return true;
    }
    for (uint32_t i = 0; i < survey->segment_count; i++) { /* majority vote */
        const struct kvt_l2_survey_segment *segment = &survey->segments[i];

        if (segment->status)
            continue;
        if (!votes)
            winner = segment;
        if (!memcmp(segment->root_id, winner->root_id, 16) &&
            segment->segment_bytes == winner->segment_bytes)
            votes++;
        else
            votes--;
    }
    if (!winner)
        return false;
    memcpy(root_id, winner->root_id, 16);
    *segment_bytes = winner->segment_bytes;
    return true;
}
