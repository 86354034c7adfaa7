/* Records: sizes, checksum, verification. See record.h and docs/format.md. Pure functions, any
 * thread, no allocation. It does not look inside a payload. */
#include "format/record.h"

#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "format/hash.h"
#include "kvtier/error.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "on-disk structures are used in place: little-endian machines only");

/* Page hashes are themselves hashed as a stream; this many are handed over at a time. */
#define HASH_BATCH 512u

uint32_t kvt_record_bytes(size_t payload_bytes)
{
    if (payload_bytes > KVT_RECORD_BYTES_MAX - sizeof(struct kvt_record_header))
        return 0;
    return (uint32_t)kvt_round_up(payload_bytes + sizeof(struct kvt_record_header), KVT_PAGE_BYTES);
}

/* Page 0 with its checksum field taken as zero. */
static uint64_t first_page_hash(const uint8_t *page)
{
    uint8_t copy[KVT_PAGE_BYTES];

    memcpy(copy, page, sizeof copy);
    memset(copy + offsetof(struct kvt_record_header, checksum), 0, sizeof(uint64_t));
    return kvt_hash64(copy, sizeof copy);
}

uint64_t kvt_record_checksum(const void *record, uint32_t record_bytes)
{
    const uint8_t *bytes = record;
    uint64_t hashes[HASH_BATCH];
    uint32_t pages = record_bytes / KVT_PAGE_BYTES, filled = 0;
    struct kvt_hash_stream state;

    if (!pages)
        return 0;
    if (pages > HASH_BATCH)
        kvt_hash_start(&state);
    hashes[filled++] = first_page_hash(bytes);
    for (uint32_t page = 1; page < pages; page++) {
        if (filled == HASH_BATCH) {
            kvt_hash_more(&state, hashes, sizeof hashes);
            filled = 0;
        }
        hashes[filled++] = kvt_hash64(bytes + (size_t)page * KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    }
    if (pages <= HASH_BATCH)
        return kvt_hash64(hashes, filled * sizeof *hashes);
    kvt_hash_more(&state, hashes, filled * sizeof *hashes);
    return kvt_hash_end(&state);
}

static bool all_zero(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bytes[i])
            return false;
    return true;
}

bool kvt_full_key_ok(const struct kvt_full_key *key)
{
    return key->hash_len >= 1 && key->hash_len <= KVT_HASH_BYTES_MAX && !key->reserved &&
           all_zero(key->hash + key->hash_len, KVT_HASH_BYTES_MAX - key->hash_len);
}

bool kvt_parent_ok(const uint8_t parent[KVT_HASH_BYTES_MAX], uint8_t parent_len)
{
    return parent_len <= KVT_HASH_BYTES_MAX &&
           all_zero(parent + parent_len, KVT_HASH_BYTES_MAX - parent_len);
}

int kvt_record_header_check(const struct kvt_record_header *header)
{
    if (header->magic != KVT_RECORD_MAGIC)
        return KVT_E_CORRUPT;
    if (header->version > KVT_RECORD_VERSION)
        return KVT_E_NEWER;
    if (!kvt_full_key_ok(&header->key) || !kvt_parent_ok(header->parent, header->parent_len))
        return KVT_E_CORRUPT;
    if (kvt_map_id_level(header->map) == 0 || header->flags)
        return KVT_E_CORRUPT;
    if (!header->payload_bytes || header->record_bytes != kvt_record_bytes(header->payload_bytes))
        return KVT_E_CORRUPT;
    return 0;
}

int kvt_record_verify(const void *record, uint32_t record_bytes, const struct kvt_full_key *key,
                      uint64_t want_checksum)
{
    const struct kvt_record_header *header = record;
    uint64_t checksum;
    int rc;

    if (record_bytes < KVT_PAGE_BYTES || record_bytes % KVT_PAGE_BYTES ||
        record_bytes > KVT_RECORD_BYTES_MAX)
        return KVT_E_CORRUPT;
    rc = kvt_record_header_check(header);
    if (rc == KVT_E_CORRUPT || header->record_bytes != record_bytes)
        return KVT_E_CORRUPT;
    if (key && memcmp(key, &header->key, sizeof *key))
        return KVT_E_CORRUPT;
    /* A damaged version field must not pass for a newer version: the checksum decides first. */
    checksum = kvt_record_checksum(record, record_bytes);
    if (checksum != header->checksum || (want_checksum && checksum != want_checksum))
        return KVT_E_CORRUPT;
    return rc;
}

void kvt_full_key_make(struct kvt_full_key *out, const uint8_t ns[KVT_NS_BYTES],
                       const struct kvt_key *key)
{
    uint8_t len = KVT_MIN(key->hash_len, (uint8_t)KVT_HASH_BYTES_MAX);

    memset(out, 0, sizeof *out);
    memcpy(out->ns, ns, KVT_NS_BYTES);
    memcpy(out->hash, key->hash, len);
    out->hash_len = len;
    out->group = key->group;
    out->shard = key->shard;
}
