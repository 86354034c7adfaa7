/* What the shared tier is known to have: hints with an end. Records that are there for a minute,
 * absent ones for a second, damaged ones for the minute that it takes to compute them. A table of
 * fixed size; a place that is taken gives way. Threads: the store's owner. Allocates nothing. Does
 * not ask: store_remote_lookup.c does.
 */
#include <string.h>

#include "kvtier/error.h"
#include "store/store_remote.h"

#define KNOWN_WAYS 4u
#define PRESENT_NS INT64_C(60000000000)
#define ABSENT_NS INT64_C(1000000000)

static struct kvt_known *known_at(struct kvt_store_remote *remote, struct kvt_fp fp, uint32_t way)
{
    return &remote->known[(fp.word[0] + way) & (KVT_REMOTE_KNOWN - 1)];
}

struct kvt_known *kvt_l3_known_find(struct kvt_store *store, struct kvt_fp fp)
{
    int64_t now = kvt_store_now(store);

    for (uint32_t way = 0; way < KNOWN_WAYS; way++) {
        struct kvt_known *k = known_at(store->remote, fp, way);

        if (k->state != KVT_KNOWN_NOTHING && k->fp.word[0] == fp.word[0] &&
            k->fp.word[1] == fp.word[1])
            return k->until_ns > now ? k : NULL;
    }
    return NULL;
}

void kvt_l3_known_set(struct kvt_store *store, struct kvt_fp fp, enum kvt_known_state state,
                      uint8_t map, uint32_t pages)
{
    struct kvt_known *best = known_at(store->remote, fp, 0);
    int64_t lives = state == KVT_KNOWN_ABSENT ? ABSENT_NS : PRESENT_NS;

    for (uint32_t way = 0; way < KNOWN_WAYS; way++) {
        struct kvt_known *k = known_at(store->remote, fp, way);

        if (k->fp.word[0] == fp.word[0] && k->fp.word[1] == fp.word[1]) {
            best = k;
            break;
        }
        if (k->until_ns < best->until_ns)
            best = k;
    }
    *best = (struct kvt_known){.fp = fp,
                               .until_ns = kvt_store_now(store) + lives,
                               .pages = (uint16_t)pages,
                               .map = map,
                               .state = (uint8_t)state};
}

void kvt_l3_known_forget(struct kvt_store *store, struct kvt_fp fp)
{
    struct kvt_known *k = kvt_l3_known_find(store, fp);

    if (k)
        memset(k, 0, sizeof(*k));
}

void kvt_l3_known_forget_all(struct kvt_store_remote *remote)
{
    memset(remote->known, 0, KVT_REMOTE_KNOWN * sizeof(*remote->known));
}

/* The map id that a record of a given length has here; 0: it cannot be had here. Ids of mixed maps
 * are each store's own, with one length each. */
static uint8_t map_here(struct kvt_store *store, uint32_t ns, uint8_t map, uint32_t record_bytes)
{
    if (record_bytes > store->params.staging_bytes)
        return 0;
    if (map >= KVT_MAP_MIXED_FIRST)
        return kvt_namespaces_mixed(&store->spaces, ns, kvt_map_id_level(map), record_bytes);
    return kvt_namespace_record_bytes(&store->spaces, ns, map) == record_bytes ? map : 0;
}

/* Whether a record that cannot be had here, by its header, may be a good one for others: of a later
 * version, of a level that nobody has used here, of a mixed map for which no id is left, longer
 * than the staging memory. */
static bool good_elsewhere(struct kvt_store *store, uint32_t ns, const struct kvt_full_key *key,
                           const struct kvt_record_header *header)
{
    int rc = kvt_record_header_check(header);
    uint8_t map = header->map >= KVT_MAP_MIXED_FIRST ? KVT_LEVEL_RAW : header->map;
    uint32_t bytes;

    if (rc || memcmp(&header->key, key, sizeof(*key)) != 0)
        return rc == KVT_E_NEWER;
    bytes = kvt_namespace_record_bytes(&store->spaces, ns, map);
    return !bytes || header->record_bytes > store->params.staging_bytes ||
           (map != header->map && header->record_bytes <= bytes);
}

void kvt_l3_learn(struct kvt_store *store, uint32_t ns, const struct kvt_full_key *key,
                  const struct kvt_remote_found *found)
{
    struct kvt_fp fp = kvt_index_fingerprint(&store->index, key);
    const struct kvt_record_header *header = &found->header;
    uint8_t map = 0;

    if (kvt_l3_dropping(store, key))
        return;
    if (found->status == KVT_E_MISS) {
        kvt_l3_known_set(store, fp, KVT_KNOWN_ABSENT, 0, 0);
        return;
    }
    if (found->status == KVT_E_CORRUPT) {
        store->counts.remote_refused++;
        kvt_l3_known_set(store, fp, KVT_KNOWN_DAMAGED, 0, 0);
        return;
    }
    if (found->status) {
        store->counts.remote_unknown++;
        return;
    }
    if (kvt_record_header_check(header) == 0 && memcmp(&header->key, key, sizeof(*key)) == 0)
        map = map_here(store, ns, header->map, header->record_bytes);
    if (!map) { /* damaged, of another version, or of a length that this namespace has not */
        store->counts.remote_refused++;
        kvt_l3_known_set(
            store, fp,
            good_elsewhere(store, ns, key, header) ? KVT_KNOWN_ABSENT : KVT_KNOWN_DAMAGED, 0, 0);
        return;
    }
    store->counts.remote_found++;
    kvt_l3_known_set(store, fp, KVT_KNOWN_PRESENT, map, header->record_bytes / KVT_PAGE_BYTES);
}

bool kvt_l3_known(struct kvt_store *store, struct kvt_fp fp, uint8_t min_level, uint8_t *map)
{
    const struct kvt_known *k = store->remote ? kvt_l3_known_find(store, fp) : NULL;

    if (!k || k->state != KVT_KNOWN_PRESENT || kvt_map_id_level(k->map) < min_level)
        return false;
    *map = k->map;
    return true;
}
