/* What `kvtier inspect` shows of a store: the root, its namespaces and segments, one record with
 * its chain. Makes JSON; cmd_inspect.c prints it.
 *
 * Invariants: reads only; nothing of a payload is shown; a record that does not verify is shown
 * with that verdict and with what recovery knows of it, not with the bytes that lie there.
 * Threads: one.
 */
#include "inspect.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/codec.h"
#include "kvtier/error.h"
#include "store/l2_scan.h"
#include "store/l2_survey.h"

#define MAPS_MAX 16u

static json_t *hex(const uint8_t *bytes, size_t n)
{
    char text[2 * KVT_HASH_BYTES_MAX + 1] = "";

    for (size_t i = 0; i < n && i < KVT_HASH_BYTES_MAX; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return json_string(text);
}

/* The lowest level of a map; "kv4+" where some heads are above it. */
static json_t *level_of(unsigned map)
{
    const char *name = kvt_level_name(kvt_map_id_level(map));

    return name ? json_sprintf("%s%s", name, map >= KVT_MAP_MIXED_FIRST ? "+" : "") : json_null();
}

/* ---- the root ------------------------------------------------------------------------------ */

struct map_sum {
    uint64_t records, pages; /* pages: of one record, the largest seen */
};

static json_t *maps_json(const struct map_sum *sums)
{
    json_t *list = json_array();

    for (unsigned map = 0; map < MAPS_MAX; map++)
        if (sums[map].records)
            json_array_append_new(list, json_pack("{s:i, s:o, s:I, s:I}", "map", (int)map, "level",
                                                  level_of(map), "records",
                                                  (json_int_t)sums[map].records, "record_bytes",
                                                  (json_int_t)sums[map].pages * KVT_PAGE_BYTES));
    return list;
}

/* The namespace whose records start at *at; *at moves behind them. */
static json_t *space_json(const struct kvt_dir *dir, const uint8_t *cut, size_t *at)
{
    const uint8_t *ns = dir->records[*at].key.ns;
    struct map_sum sums[MAPS_MAX] = {{0}};
    uint64_t bytes = 0, starts = 0, unreachable = 0, records = 0, oldest = UINT64_MAX, newest = 0;
    uint32_t last_pos = 0;
    char id[2 * KVT_NS_BYTES + 1];

    for (; *at < dir->record_count && !memcmp(dir->records[*at].key.ns, ns, KVT_NS_BYTES); ++*at) {
        const struct kvt_dir_record *r = &dir->records[*at];
        struct map_sum *sum = &sums[r->map % MAPS_MAX];
        sum->records++;
        sum->pages = KVT_MAX(sum->pages, (uint64_t)r->pages);
        records++;
        bytes += (uint64_t)r->pages * KVT_PAGE_BYTES;
        starts += !r->parent_len;
        unreachable += cut[*at];
        oldest = KVT_MIN(oldest, r->sequence);
        newest = KVT_MAX(newest, r->sequence);
        last_pos = KVT_MAX(last_pos, r->first_pos);
    }
    kvt_dir_ns_text(ns, id);
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "id", id, "records",
                     (json_int_t)records, "bytes", (json_int_t)bytes, "starts", (json_int_t)starts,
                     "unreachable", (json_int_t)unreachable, "last_position", (json_int_t)last_pos,
                     "sequence_first", (json_int_t)oldest, "sequence_last", (json_int_t)newest,
                     "maps", maps_json(sums));
}

/* "sealed", "open" or "blank": what its header and last page say. */
static const char *segment_state(struct kvt_dir *dir, const struct kvt_l2_survey_segment *segment,
                                 void *page)
{
    uint64_t bytes = segment->segment_bytes;
    char name[KVT_IO_NAME_MAX];

    if (segment->status)
        return segment->status == KVT_E_CORRUPT ? "blank" : "unreadable";
    kvt_l2_segment_name(segment->number, name);
    int file = dir->io->ops->open(dir->io, name, KVT_IO_OPEN_READ_ONLY);
    if (file < 0)
        return "unreadable";
    int64_t n = kvt_io_read_now(dir->io, file, bytes - KVT_PAGE_BYTES, page, KVT_PAGE_BYTES);
    dir->io->ops->close(dir->io, file);
    if (n < 0)
        return "unreadable";
    return n == KVT_PAGE_BYTES && kvt_l2_scan_sealed(page, segment->number, segment->generation,
                                                     (uint32_t)(bytes / KVT_PAGE_BYTES))
               ? "sealed"
               : "open";
}

static json_t *segments_json(struct kvt_dir *dir, const struct kvt_l2_survey *survey)
{
    json_t *list = json_array();
    void *page = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    struct map_sum *live = calloc((size_t)survey->segment_count + 1, sizeof(*live));

    for (size_t i = 0; live && i < dir->record_count; i++)
        for (uint32_t s = 0, end = survey->segment_count; s < end;) { /* sorted by number */
            uint32_t middle = s + (end - s) / 2;
            uint32_t number = survey->segments[middle].number;
            if (number == dir->records[i].where.segment) {
                live[middle].records++;
                live[middle].pages += dir->records[i].pages;
                break;
            }
            if (number < dir->records[i].where.segment)
                s = middle + 1;
            else
                end = middle;
        }
    for (uint32_t s = 0; page && live && s < survey->segment_count; s++) {
        const struct kvt_l2_survey_segment *segment = &survey->segments[s];
        char name[KVT_IO_NAME_MAX];
        kvt_l2_segment_name(segment->number, name);
        json_array_append_new(list, json_pack("{s:s, s:s, s:I, s:I, s:I, s:I}", "name", name,
                                              "state", segment_state(dir, segment, page),
                                              "generation", (json_int_t)segment->generation,
                                              "file_bytes", (json_int_t)segment->file_bytes,
                                              "records", (json_int_t)live[s].records, "bytes",
                                              (json_int_t)live[s].pages * KVT_PAGE_BYTES));
    }
    free(page);
    free(live);
    return list;
}

json_t *kvt_inspect_root(struct kvt_dir *dir)
{
    const struct kvt_superblock *super = &dir->superblock;
    struct kvt_l2_survey survey;
    uint8_t *cut = calloc(dir->record_count + 1, 1);
    json_t *spaces;

    memset(&survey, 0, sizeof(survey));
    if (!cut || kvt_l2_survey(dir->io, &survey)) {
        free(cut);
        kvt_l2_survey_free(&survey);
        return NULL;
    }
    (void)kvt_dir_cut(dir, cut);
    spaces = json_array();
    for (size_t at = 0; at < dir->record_count;)
        json_array_append_new(spaces, space_json(dir, cut, &at));
    free(cut);
    json_t *root = json_pack(
        "{s:b, s:i, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o}", "superblock",
        survey.superblock_copy >= 0, "disk_version", (int)super->version, "root_id",
        hex(super->root_id, sizeof(super->root_id)), "cap_bytes", (json_int_t)super->cap_bytes,
        "segment_bytes", (json_int_t)super->segment_bytes, "segments_max",
        (json_int_t)super->segment_count, "next_generation", (json_int_t)super->next_generation,
        "next_sequence", (json_int_t)super->next_sequence, "journal_pages",
        (json_int_t)super->journal_pages, "records", (json_int_t)dir->record_count, "namespaces",
        spaces, "segments", segments_json(dir, &survey));
    kvt_l2_survey_free(&survey);
    return root;
}

/* ---- records ------------------------------------------------------------------------------- */

json_t *kvt_inspect_brief(const struct kvt_dir_record *record)
{
    char place[32], ns[2 * KVT_NS_BYTES + 1];

    snprintf(place, sizeof(place), "%08x:%" PRIu32, record->where.segment, record->where.page);
    kvt_dir_ns_text(record->key.ns, ns);
    return json_pack("{s:s, s:o, s:i, s:I, s:s, s:I, s:o, s:I}", "namespace", ns, "hash",
                     hex(record->key.hash, record->key.hash_len), "group", (int)record->key.group,
                     "shard", (json_int_t)record->key.shard, "place", place, "first_pos",
                     (json_int_t)record->first_pos, "level", level_of(record->map), "record_bytes",
                     (json_int_t)record->pages * KVT_PAGE_BYTES);
}

/* From the record to the start of its sequence, or to where the chain breaks. */
static json_t *chain_json(const struct kvt_dir *dir, size_t index, const char **end)
{
    json_t *list = json_array();

    *end = "start";
    for (size_t at = index;;) {
        const struct kvt_dir_record *record = &dir->records[at];
        json_array_append_new(list, kvt_inspect_brief(record));
        if (!record->parent_len)
            break;
        at = kvt_dir_parent(dir, record);
        if (at == SIZE_MAX) {
            *end = "parent missing: no lookup reaches this block";
            break;
        }
        if (dir->records[at].first_pos >= record->first_pos) { /* also keeps this loop finite */
            *end = "parent does not stand before its child";
            break;
        }
    }
    return list;
}

json_t *kvt_inspect_record(struct kvt_dir *dir, size_t index)
{
    const struct kvt_dir_record *record = &dir->records[index];
    struct kvt_dir_reader reader;
    const char *end;
    char checksum[17];

    kvt_dir_reader_open(&reader, dir);
    int rc = kvt_dir_read(&reader, record);
    json_t *out = kvt_inspect_brief(record);
    snprintf(checksum, sizeof(checksum), "%016" PRIx64, record->checksum);
    json_t *more = json_pack("{s:o, s:i, s:I, s:I, s:s, s:s, s:o}", "parent",
                             hex(record->parent, record->parent_len), "map", (int)record->map,
                             "sequence", (json_int_t)record->sequence, "generation",
                             (json_int_t)record->generation, "checksum", checksum, "verify",
                             rc ? kvt_strerror(rc) : "ok", "chain", chain_json(dir, index, &end));
    json_object_set_new(more, "chain_end", json_string(end));
    if (!rc) {
        const struct kvt_record_header *header = (const void *)reader.bytes;
        uint64_t used = sizeof(*header) + (uint64_t)header->payload_bytes;
        json_object_set_new(more, "record_version", json_integer(header->version));
        json_object_set_new(more, "payload_bytes", json_integer(header->payload_bytes));
        json_object_set_new(more, "padding_bytes",
                            json_integer((json_int_t)(header->record_bytes - used)));
    }
    json_object_update(out, more);
    json_decref(more);
    kvt_dir_reader_close(&reader);
    return out;
}

/* SEGMENT:PAGE; 0, or -1 it is not of that form. */
static int parse_place(const char *word, uint32_t *segment, uint32_t *page)
{
    unsigned long long s, p;
    char *end;

    if (!strncmp(word, "seg-", 4))
        word += 4;
    if (!strchr("0123456789abcdefABCDEF", *word))
        return -1;
    s = strtoull(word, &end, 16);
    if (*end != ':' || end[1] < '0' || end[1] > '9')
        return -1;
    p = strtoull(end + 1, &end, 10);
    if (*end || s > UINT32_MAX || p > UINT32_MAX)
        return -1;
    *segment = (uint32_t)s;
    *page = (uint32_t)p;
    return 0;
}

static int digit_of(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool is_prefix(const struct kvt_full_key *key, const char *word)
{
    size_t n = strlen(word);

    if (n > 2u * key->hash_len)
        return false;
    for (size_t i = 0; i < n; i++) {
        int nibble = i % 2 ? key->hash[i / 2] & 15 : key->hash[i / 2] >> 4;
        if (digit_of(word[i]) != nibble)
            return false;
    }
    return true;
}

long kvt_inspect_find(const struct kvt_dir *dir, const char *word, const uint8_t *ns,
                      size_t *indices, size_t room)
{
    uint32_t segment = 0, page = 0;
    bool place = parse_place(word, &segment, &page) == 0;
    long n = 0;

    for (const char *c = word; !place && *c; c++)
        if (digit_of(*c) < 0 || (size_t)(c - word) >= 2 * KVT_HASH_BYTES_MAX)
            return -1;
    for (size_t i = 0; i < dir->record_count; i++) {
        const struct kvt_dir_record *r = &dir->records[i];
        if (ns && memcmp(r->key.ns, ns, KVT_NS_BYTES) != 0)
            continue;
        if (place ? r->where.segment != segment || page < r->where.page ||
                        page - r->where.page >= r->pages
                  : !is_prefix(&r->key, word))
            continue;
        if ((size_t)n < room)
            indices[n] = i;
        n++;
    }
    return n;
}
