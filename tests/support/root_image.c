/* See root_image.h. */
#include "support/root_image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/disk.h"
#include "store/l2.h"
#include "store/l2_survey.h"
#include "support/l2_help.h"

#define RECORDS 160u
#define VERSION 1u

#define MUST(condition)                                                                \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: must hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                   \
        }                                                                              \
    } while (0)

static struct kvt_io *image;
static uint64_t sequences[RECORDS];
static uint32_t sizes[RECORDS];

static void make(void)
{
    static struct l2_env env;

    MUST(kvt_io_mem_new(2 * ROOT_IMAGE_CAP, &image) == 0);
    l2_env_init(&env, ROOT_IMAGE_CAP);
    MUST(l2_env_open(&env, image) == 0);
    for (uint32_t id = 0; id < RECORDS; id++) {
        sizes[id] = 1 + id % 3 * 2;
        sequences[id] = env.sequence;
        MUST(l2_env_put(&env, id, VERSION, sizes[id]) == 0);
        if (id == 20)
            MUST(l2_env_purge_key(&env, 3) == 0);
        if (id == 40)
            MUST(l2_env_purge_ns(&env, 2) == 0);
    }
    MUST(l2_env_flush(&env) == 0);
    l2_env_close(&env);
}

struct kvt_io *root_image_clone(void)
{
    struct kvt_io *copy = NULL;

    if (!image)
        make();
    MUST(kvt_io_mem_clone(image, &copy) == 0);
    return copy;
}

bool root_image_holds(const void *record, uint32_t bytes)
{
    const struct kvt_record_header *header = record;

    for (uint32_t id = 0; id < RECORDS; id++) {
        void *want;
        bool same;

        if (sequences[id] != header->sequence || sizes[id] * KVT_PAGE_BYTES != bytes)
            continue;
        want = l2_record(id, VERSION, sizes[id], sequences[id], NULL);
        same = memcmp(want, record, bytes) == 0;
        free(want);
        if (same)
            return true;
    }
    return false;
}

/* The checksum of whatever structure the page seems to be. */
static void make_fit(uint8_t *page)
{
    struct kvt_batch_header *batch = (struct kvt_batch_header *)page;
    uint64_t magic;

    memcpy(&magic, page, sizeof magic);
    if (magic == KVT_SUPERBLOCK_MAGIC)
        kvt_superblock_finish((struct kvt_superblock *)page);
    else if (magic == KVT_SEGMENT_MAGIC)
        kvt_segment_header_finish((struct kvt_segment_header *)page);
    else if (magic == KVT_TRAILER_MAGIC)
        kvt_trailer_finish((struct kvt_trailer *)page);
    else if (magic == KVT_JOURNAL_MAGIC)
        kvt_journal_page_finish((struct kvt_journal_page *)page);
    else if (magic == KVT_BATCH_MAGIC && kvt_batch_header_bytes(batch->count) == KVT_PAGE_BYTES)
        kvt_batch_header_finish(batch);
}

/* A sealed segment's footer follows its entries: so that a changed entry gets past it. */
static void make_footer_fit(struct kvt_io *io, int file, uint64_t bytes)
{
    static _Alignas(4096) uint8_t last[KVT_PAGE_BYTES];
    struct kvt_trailer *trailer = (struct kvt_trailer *)last;
    uint64_t want, offset;
    uint8_t *entries = NULL;

    if (bytes < 2 * KVT_PAGE_BYTES ||
        kvt_io_read_now(io, file, bytes - KVT_PAGE_BYTES, last, KVT_PAGE_BYTES) != KVT_PAGE_BYTES)
        return;
    want = (uint64_t)trailer->footer_count * sizeof(struct kvt_entry);
    want = (want + KVT_PAGE_BYTES - 1) / KVT_PAGE_BYTES * KVT_PAGE_BYTES;
    offset = (uint64_t)trailer->footer_page * KVT_PAGE_BYTES;
    if (trailer->magic != KVT_TRAILER_MAGIC || !want || want > bytes || offset > bytes - want)
        return;
    MUST(posix_memalign((void **)&entries, KVT_PAGE_BYTES, want) == 0);
    if (kvt_io_read_now(io, file, offset, entries, want) == (int64_t)want) {
        trailer->footer_checksum =
            kvt_footer_checksum((struct kvt_entry *)entries, trailer->footer_count);
        kvt_trailer_finish(trailer);
        MUST(kvt_io_write_now(io, file, bytes - KVT_PAGE_BYTES, last, KVT_PAGE_BYTES) ==
             KVT_PAGE_BYTES);
    }
    free(entries);
}

void root_image_edit(struct kvt_io *io, const struct root_edit *edit)
{
    static _Alignas(4096) uint8_t page[KVT_PAGE_BYTES];
    uint32_t number = edit->file & ROOT_EDIT_FILE;
    char name[KVT_IO_NAME_MAX] = KVT_L2_NAME_SUPERBLOCK;
    uint64_t bytes, offset = (uint64_t)edit->page * KVT_PAGE_BYTES;
    int file;

    if (number == 1)
        snprintf(name, sizeof name, KVT_L2_NAME_JOURNAL);
    else if (number > 1)
        kvt_l2_segment_name(number - 2, name);
    file = io->ops->open(io, name, 0);
    if (file < 0)
        return;
    bytes = (uint64_t)io->ops->size(io, file);
    if (edit->page == 0xff && bytes >= KVT_PAGE_BYTES)
        offset = bytes - KVT_PAGE_BYTES;
    if (edit->file & ROOT_EDIT_CUT) {
        MUST(io->ops->truncate(io, file, offset < bytes ? offset + edit->offset : bytes) == 0);
    } else if (kvt_io_read_now(io, file, offset, page, sizeof page) == (int64_t)sizeof page) {
        uint32_t room = KVT_PAGE_BYTES - edit->offset;

        memcpy(page + edit->offset, edit->data, edit->bytes < room ? edit->bytes : room);
        if (!(edit->file & ROOT_EDIT_UNFIT))
            make_fit(page);
        MUST(kvt_io_write_now(io, file, offset, page, sizeof page) == (int64_t)sizeof page);
        if (!(edit->file & ROOT_EDIT_UNFIT) && number > 1)
            make_footer_fit(io, file, bytes);
    }
    io->ops->close(io, file);
}
