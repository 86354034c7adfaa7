/* A second look at records that were found damaged, by a load or by scrub, so that no restart
 * brings them back.
 *
 *   found damaged -> it leaves the index; its place waits here
 *     -> RECORD   is read from the drive: whole -> it was a bad read, or memory: nothing is done
 *                 damaged twice -> the journal learns "this key, up to this number, is gone"
 *     -> TRAILER -> FOOTER   where its header is damaged as well: the footer tells key and number
 *
 * Invariants
 *  1. Journaled is only what was read from the drive twice, damaged both times: a bad read must not
 *     cost what a flush has acknowledged.
 *  2. What cannot be read, and what no header or footer names (a segment that is still being
 *     filled), is not journaled: it has left the index, and the next open brings it back.
 *  3. The place may have been recycled meanwhile. So what is found there is judged by its own key,
 *     which must have the fingerprint of what was lost, and by its own number.
 *  4. One read at a time, none while scrub reads (they share its buffer). KVT_STORE_SUSPECTS places
 *     wait at most; more are forgotten, as in 2.
 * Threads: the store's owner. Allocates nothing.
 */
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define LOOKS 2u

void kvt_suspect_place(struct kvt_store *store, uint32_t root, struct kvt_l2_where where,
                       uint32_t pages, struct kvt_fp fp)
{
    struct kvt_store_suspects *s = &store->suspects;

    if (s->count == KVT_STORE_SUSPECTS)
        return;
    s->ring[(s->head + s->count++) % KVT_STORE_SUSPECTS] =
        (struct kvt_store_suspect){.fp = fp, .root = root, .where = where, .pages = pages};
    store->again = 1;
}

void kvt_suspect_entry(struct kvt_store *store, uint32_t entry)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_l2_where where = {.segment = e->segment, .page = e->page};

    if (e->on_disk && !e->older)
        kvt_suspect_place(store, e->root, where, kvt_entry_bytes(store, entry) / KVT_PAGE_BYTES,
                          e->fp);
}

static const struct kvt_store_suspect *first(const struct kvt_store_suspects *s)
{
    return &s->ring[s->head];
}

static void suspect_read_done(struct kvt_l2_read *read)
{
    struct kvt_store *store = read->user;

    store->suspects.reading = false;
    store->again = 1;
}

/* Read pages of the suspect's segment into the buffer. False: they do not fit. */
static bool start_read(struct kvt_store *store, enum kvt_suspect_step step, uint32_t page,
                       uint32_t pages)
{
    struct kvt_store_suspects *s = &store->suspects;
    const struct kvt_store_suspect *suspect = first(s);

    if (!pages || (uint64_t)pages * KVT_PAGE_BYTES > store->scrub.buffer_bytes)
        return false;
    s->step = step;
    s->reading = true;
    s->read = (struct kvt_l2_read){.where = {suspect->where.segment, page},
                                   .pages = pages,
                                   .dst = store->scrub.buffer,
                                   .raw = step != KVT_SUSPECT_RECORD,
                                   .done = suspect_read_done,
                                   .user = store};
    kvt_l2_read(store->disks[suspect->root].l2, &s->read);
    return true;
}

static bool same_key(const struct kvt_store *store, const struct kvt_full_key *key)
{
    const struct kvt_store_suspect *suspect = first(&store->suspects);
    struct kvt_fp fp = kvt_index_fingerprint(&store->index, key);

    return fp.word[0] == suspect->fp.word[0] && fp.word[1] == suspect->fp.word[1];
}

static void note_bad(struct kvt_store *store, const struct kvt_full_key *key, uint64_t sequence)
{
    struct kvt_store_suspects *s = &store->suspects;
    struct kvt_journal_item *bad = &s->bad[s->bad_count];

    if (sequence >= store->sequence_next || !same_key(store, key))
        return;
    memset(bad, 0, sizeof(*bad));
    bad->kind = KVT_JOURNAL_PURGE_KEY;
    bad->key = *key;
    bad->value = sequence + 1;
    s->bad_root[s->bad_count++] = (uint8_t)first(s)->root;
}

/* What has been found goes to the journals of its roots. */
static void bury(struct kvt_store *store)
{
    struct kvt_store_suspects *s = &store->suspects;
    struct kvt_journal_item items[KVT_STORE_SUSPECTS];

    for (uint32_t root = 0; root < store->disk_count && s->bad_count; root++) {
        uint32_t count = 0;

        for (uint32_t i = 0; i < s->bad_count; i++)
            if (s->bad_root[i] == root)
                items[count++] = s->bad[i];
        if (count)
            kvt_purges_bury(store, root, items, count);
    }
    s->bad_count = 0;
}

/* The record is in the buffer. True: it was read again, or the trailer is. */
static bool judge_record(struct kvt_store *store)
{
    struct kvt_store_suspects *s = &store->suspects;
    const struct kvt_store_suspect *suspect = first(s);
    const struct kvt_record_header *header = s->read.dst;
    uint32_t bytes = suspect->pages * KVT_PAGE_BYTES, last;
    bool named = kvt_record_header_check(header) == 0 && same_key(store, &header->key);

    if (named && header->record_bytes == bytes &&
        kvt_record_verify(header, bytes, &header->key, header->checksum) == 0)
        return false; /* whole */
    if (++s->looks < LOOKS)
        return start_read(store, KVT_SUSPECT_RECORD, suspect->where.page, suspect->pages);
    if (named) {
        note_bad(store, &header->key, header->sequence);
        return false;
    }
    last = kvt_l2_segment_bytes(store->disks[suspect->root].l2) / KVT_PAGE_BYTES - 1;
    return start_read(store, KVT_SUSPECT_TRAILER, last, 1);
}

/* True: the footer is read. */
static bool judge_trailer(struct kvt_store *store)
{
    struct kvt_store_suspects *s = &store->suspects;
    const struct kvt_trailer *trailer = s->read.dst;
    uint32_t last = s->read.where.page;

    if (kvt_trailer_check(trailer, first(s)->where.segment, trailer->generation, last + 1) ||
        !trailer->footer_count || trailer->footer_page >= last)
        return false;
    s->footer_count = trailer->footer_count;
    s->footer_checksum = trailer->footer_checksum;
    return start_read(store, KVT_SUSPECT_FOOTER, trailer->footer_page, last - trailer->footer_page);
}

static void judge_footer(struct kvt_store *store)
{
    struct kvt_store_suspects *s = &store->suspects;
    const struct kvt_entry *entries = s->read.dst;

    if (s->footer_count > s->read.pages * KVT_PAGE_BYTES / sizeof(*entries) ||
        kvt_footer_checksum(entries, s->footer_count) != s->footer_checksum)
        return;
    for (uint32_t i = 0; i < s->footer_count; i++) {
        if (entries[i].page != first(s)->where.page)
            continue;
        note_bad(store, &entries[i].key, entries[i].sequence);
        return; /* one record at a place, whatever a footer says */
    }
}

/* What was read is judged. True: the suspect needs another read, which has begun. */
static bool judge(struct kvt_store *store)
{
    struct kvt_store_suspects *s = &store->suspects;

    if (s->read.status)
        return false;
    if (s->step == KVT_SUSPECT_RECORD)
        return judge_record(store);
    if (s->step == KVT_SUSPECT_TRAILER)
        return judge_trailer(store);
    judge_footer(store);
    return false;
}

static void next(struct kvt_store_suspects *s)
{
    s->head = (s->head + 1) % KVT_STORE_SUSPECTS;
    s->count--;
    s->step = KVT_SUSPECT_NONE;
    s->looks = 0;
}

bool kvt_suspects_run(struct kvt_store *store)
{
    struct kvt_store_suspects *s = &store->suspects;

    if (s->reading)
        return true;
    if (s->step != KVT_SUSPECT_NONE) {
        if (judge(store))
            return true;
        next(s);
    }
    if (s->bad_count && (!s->count || s->bad_count == KVT_STORE_SUSPECTS) && kvt_purges_free(store))
        bury(store);
    while (s->count && s->bad_count < KVT_STORE_SUSPECTS) {
        if (start_read(store, KVT_SUSPECT_RECORD, first(s)->where.page, first(s)->pages))
            return true;
        next(s); /* longer than the buffer */
    }
    return false;
}
