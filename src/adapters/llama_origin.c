/* Open-addressing set of key tags with linear probing, at most half full.
 *
 * Invariants: used * 2 <= slots; an entry with tag 0 ends a probe; ages order the additions so that
 * the older half can be dropped. A tag is 8 bytes of a SHA-256: a false "lossy" (2^-64 a pair)
 * costs one block stored at kv8 instead of kv4, never wrong bytes. Threads: one at a time.
 */
#include "llama_origin.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS_MIN 1024

void kvt_origin_init(struct kvt_origin *origin)
{
    memset(origin, 0, sizeof(*origin));
}

void kvt_origin_free(struct kvt_origin *origin)
{
    free(origin->entries);
    kvt_origin_init(origin);
}

static uint64_t tag_of(const struct kvt_key *key)
{
    uint64_t tag;

    memcpy(&tag, key->hash, sizeof(tag));
    return tag != 0 ? tag : 1;
}

/* The slot of a tag, or the free slot where it would go. */
static size_t find(const struct kvt_origin_entry *entries, size_t slots, uint64_t tag)
{
    size_t at = (size_t)(tag * 0x9e3779b97f4a7c15u >> 32) & (slots - 1);

    while (entries[at].tag != 0 && entries[at].tag != tag)
        at = (at + 1) & (slots - 1);
    return at;
}

/* Move the entries added at `from_age` or later into a table of `slots`. */
static int rebuild(struct kvt_origin *origin, size_t slots, uint64_t from_age)
{
    struct kvt_origin_entry *fresh = calloc(slots, sizeof(*fresh));
    size_t used = 0;

    if (fresh == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < origin->slots; i++) {
        const struct kvt_origin_entry *entry = &origin->entries[i];
        if (entry->tag == 0 || entry->age < from_age)
            continue;
        fresh[find(fresh, slots, entry->tag)] = *entry;
        used++;
    }
    origin->forgotten += origin->used - used;
    free(origin->entries);
    origin->entries = fresh;
    origin->slots = slots;
    origin->used = used;
    return 0;
}

static int fits(const struct kvt_origin *origin, size_t more, size_t slots)
{
    return (origin->used + more) * 2 <= slots;
}

int kvt_origin_reserve(struct kvt_origin *origin, size_t more)
{
    size_t slots = origin->slots > 0 ? origin->slots : SLOTS_MIN;
    uint64_t from_age = 0;

    if (more > KVT_ORIGIN_MAX / 4)
        return -ENOMEM; /* no context is that long: 4.2 M tokens */
    while (!fits(origin, more, slots) && slots < 2 * KVT_ORIGIN_MAX)
        slots *= 2;
    if (slots != origin->slots) {
        int rc = rebuild(origin, slots, 0);
        if (rc != 0)
            return rc;
    }
    while (!fits(origin, more, slots)) {
        from_age += (origin->clock - from_age + 1) / 2;
        int rc = rebuild(origin, slots, from_age);
        if (rc != 0)
            return rc;
    }
    return 0;
}

void kvt_origin_add(struct kvt_origin *origin, const struct kvt_key *key)
{
    size_t at = find(origin->entries, origin->slots, tag_of(key));

    if (origin->entries[at].tag == 0) {
        origin->entries[at].tag = tag_of(key);
        origin->used++;
    }
    origin->entries[at].age = origin->clock++;
}

int kvt_origin_has(const struct kvt_origin *origin, const struct kvt_key *key)
{
    if (origin->slots == 0)
        return 0;
    return origin->entries[find(origin->entries, origin->slots, tag_of(key))].tag != 0;
}
