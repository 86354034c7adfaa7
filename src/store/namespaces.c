/* The namespace table: ids to small numbers, and record lengths by map. See namespaces.h.
 * Threads: the store's owner. Allocates at init only.
 */
#include "store/namespaces.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"

#define CELLS (KVT_NAMESPACES_MAX * 2u) /* power of two; never more than half full */

int kvt_namespaces_init(struct kvt_namespaces *spaces)
{
    memset(spaces, 0, sizeof(*spaces));
    spaces->table = calloc(KVT_NAMESPACES_MAX, sizeof(*spaces->table));
    spaces->hash = calloc(CELLS, sizeof(*spaces->hash));
    if (spaces->table && spaces->hash)
        return 0;
    kvt_namespaces_destroy(spaces);
    return -ENOMEM;
}

void kvt_namespaces_destroy(struct kvt_namespaces *spaces)
{
    free(spaces->table);
    free(spaces->hash);
    memset(spaces, 0, sizeof(*spaces));
}

static uint32_t home_of(const uint8_t id[KVT_NS_BYTES], uint16_t group)
{
    uint32_t word;

    memcpy(&word, id, sizeof(word)); /* ids are hashes: any four bytes will do */
    return (word + group) & (CELLS - 1);
}

static uint32_t cell_of(const struct kvt_namespaces *spaces, const uint8_t id[KVT_NS_BYTES],
                        uint16_t group)
{
    uint32_t cell = home_of(id, group);

    for (; spaces->hash[cell]; cell = (cell + 1) & (CELLS - 1)) {
        const struct kvt_namespace *ns = &spaces->table[spaces->hash[cell] - 1];

        if (ns->group == group && memcmp(ns->id, id, KVT_NS_BYTES) == 0)
            break;
    }
    return cell;
}

uint32_t kvt_namespaces_find(const struct kvt_namespaces *spaces, const uint8_t id[KVT_NS_BYTES],
                             uint16_t group)
{
    uint16_t value = spaces->hash[cell_of(spaces, id, group)];

    return value ? value - 1u : KVT_NS_NONE;
}

static void rebuild(struct kvt_namespaces *spaces)
{
    memset(spaces->hash, 0, CELLS * sizeof(*spaces->hash));
    for (uint32_t i = 0; i < spaces->touched; i++)
        if (spaces->table[i].used)
            spaces->hash[cell_of(spaces, spaces->table[i].id, spaces->table[i].group)] =
                (uint16_t)(i + 1);
}

/* Into the ring of the groups of its id; what was said of the namespace holds for it too. */
static void ring_enter(struct kvt_namespaces *spaces, uint32_t number)
{
    struct kvt_namespace *ns = &spaces->table[number], *other;

    ns->next_group = ns->leader = number;
    ns->quota_hand = ns->quota_climb = KVT_NS_NONE;
    for (uint32_t i = 0; i < spaces->touched; i++) {
        other = &spaces->table[i];
        if (i == number || !other->used || memcmp(other->id, ns->id, KVT_NS_BYTES) != 0)
            continue;
        ns->next_group = other->next_group;
        other->next_group = number;
        ns->leader = other->leader;
        ns->quota_bytes = other->quota_bytes;
        ns->ttl_ns = other->ttl_ns;
        ns->rule_quota_bytes = other->rule_quota_bytes;
        ns->rule_ttl_ns = other->rule_ttl_ns;
        ns->ttl = other->ttl;
        return;
    }
}

static void ring_leave(struct kvt_namespaces *spaces, uint32_t number)
{
    uint32_t before = number;

    while (spaces->table[before].next_group != number)
        before = spaces->table[before].next_group;
    spaces->table[before].next_group = spaces->table[number].next_group;
}

uint64_t kvt_namespaces_held(const struct kvt_namespaces *spaces, uint32_t ns)
{
    uint64_t bytes = 0;
    uint32_t at = ns;

    do {
        bytes += spaces->table[at].bytes + spaces->table[at].filling_bytes;
        at = spaces->table[at].next_group;
    } while (at != ns);
    return bytes;
}

bool kvt_namespaces_same(const struct kvt_namespaces *spaces, uint32_t one, uint32_t other)
{
    return spaces->table[one].leader == spaces->table[other].leader;
}

static bool is_open(const struct kvt_namespace *ns)
{
    for (unsigned i = 0; i < KVT_ARRAY_LEN(ns->clients); i++)
        if (ns->clients[i])
            return true;
    return false;
}

/* Nobody has it open, and nothing is left of it. */
static bool may_go(const struct kvt_namespaces *spaces, uint32_t number)
{
    const struct kvt_namespace *ns = &spaces->table[number];

    if (is_open(ns) || ns->purging || ns->blocks || ns->bytes || ns->filling_bytes ||
        (ns->leader == number && ns->next_group != number))
        return false;
    return !spaces->user.busy || !spaces->user.busy(spaces->user.ctx, number);
}

static void give_back(struct kvt_namespaces *spaces, uint32_t number)
{
    struct kvt_namespace *ns = &spaces->table[number];

    if (spaces->user.forget)
        spaces->user.forget(spaces->user.ctx, number);
    ring_leave(spaces, number);
    spaces->given_back += ns->opened;
    spaces->used--;
    ns->used = 0;
    rebuild(spaces);
}

/* A number for a new namespace: an unused one, else that of one that is empty and closed: those
 * that were never opened first, then whichever was closed first. */
static uint32_t number_take(struct kvt_namespaces *spaces)
{
    uint32_t best = KVT_NS_NONE;

    if (spaces->touched < KVT_NAMESPACES_MAX)
        return spaces->touched++;
    for (uint32_t i = 0; i < spaces->touched; i++) {
        const struct kvt_namespace *ns = &spaces->table[i];

        if (best != KVT_NS_NONE && ns->closed >= spaces->table[best].closed)
            continue;
        if (may_go(spaces, i))
            best = i;
    }
    if (best != KVT_NS_NONE)
        give_back(spaces, best);
    return best;
}

uint32_t kvt_namespaces_add(struct kvt_namespaces *spaces, const uint8_t id[KVT_NS_BYTES],
                            uint16_t group)
{
    uint32_t number = kvt_namespaces_find(spaces, id, group);
    struct kvt_namespace *ns;

    if (number != KVT_NS_NONE)
        return number;
    number = number_take(spaces);
    if (number == KVT_NS_NONE)
        return number;
    ns = &spaces->table[number];
    const uint32_t life = ns->opened ? (ns->life + 1) % KVT_NS_LIVES : ns->life;
    memset(ns, 0, sizeof(*ns));
    memcpy(ns->id, id, KVT_NS_BYTES);
    ns->group = group;
    ns->life = life;
    ns->used = 1;
    spaces->used++;
    ring_enter(spaces, number);
    spaces->hash[cell_of(spaces, id, group)] = (uint16_t)(number + 1);
    return number;
}

static int lengths_check(const struct kvt_msg_ns_open *open)
{
    int any = 0;

    if (open->loose > 1 || open->reserved || !open->block_tokens ||
        (open->ttl_ns && open->ttl_ns < KVT_TTL_MIN_NS) ||
        (open->quota_bytes && open->quota_bytes < KVT_QUOTA_MIN) ||
        open->block_tokens > KVT_BLOCK_TOKENS_MAX)
        return KVT_E_INVAL;
    for (unsigned map = 0; map < 8; map++) {
        uint32_t bytes = open->record_bytes[map];

        if (!bytes)
            continue;
        if (map == 0 || map == 7 || bytes % KVT_PAGE_BYTES || bytes > KVT_RECORD_BYTES_MAX)
            return KVT_E_INVAL;
        any = 1;
    }
    return any ? 0 : KVT_E_INVAL;
}

long kvt_namespaces_open(struct kvt_namespaces *spaces, const struct kvt_msg_ns_open *open)
{
    int err = lengths_check(open);
    struct kvt_namespace *ns;
    uint32_t number;

    if (err)
        return err;
    number = kvt_namespaces_add(spaces, open->id, open->group);
    if (number == KVT_NS_NONE)
        return KVT_E_LIMIT;
    ns = &spaces->table[number];
    if (ns->opened && ns->block_tokens != open->block_tokens)
        return KVT_E_LAYOUT;
    for (unsigned map = 1; map <= 6; map++) {
        uint32_t pages = open->record_bytes[map] / KVT_PAGE_BYTES;

        if (ns->record_pages[map] && pages && ns->record_pages[map] != pages)
            return KVT_E_LAYOUT;
    }
    for (unsigned map = 1; map <= 6; map++)
        if (open->record_bytes[map])
            ns->record_pages[map] = open->record_bytes[map] / KVT_PAGE_BYTES;
    ns->opened = 1;
    ns->loose = open->loose;
    ns->block_tokens = open->block_tokens;
    memcpy(ns->label, open->label, sizeof(ns->label));
    ns->label[sizeof(ns->label) - 1] = 0;
    return (long)number;
}

uint32_t kvt_namespaces_handle(const struct kvt_namespaces *spaces, uint32_t ns)
{
    return spaces->table[ns].life * KVT_NAMESPACES_MAX + ns + 1;
}

bool kvt_namespaces_valid(const struct kvt_namespaces *spaces, uint32_t handle)
{
    uint32_t number = kvt_handle_number(handle);

    return handle && number < spaces->touched && spaces->table[number].used &&
           spaces->table[number].opened && kvt_namespaces_handle(spaces, number) == handle;
}

static void bit_clear(struct kvt_namespaces *spaces, uint32_t ns, uint32_t place)
{
    struct kvt_namespace *n = &spaces->table[ns];
    uint64_t bit = UINT64_C(1) << place % 64;

    if (!(n->clients[place / 64] & bit))
        return;
    n->clients[place / 64] &= ~bit;
    if (!is_open(n))
        n->closed = ++spaces->closings;
}

static void place_clear(struct kvt_namespaces *spaces, uint32_t place)
{
    for (uint32_t i = 0; i < spaces->touched; i++)
        bit_clear(spaces, i, place);
}

void kvt_namespaces_leave(struct kvt_namespaces *spaces, uint32_t ns, uint32_t client)
{
    if (spaces->client_of[client % KVT_NS_CLIENTS] == client)
        bit_clear(spaces, ns, client % KVT_NS_CLIENTS);
}

void kvt_namespaces_client_gone(struct kvt_namespaces *spaces, uint32_t client)
{
    if (spaces->client_of[client % KVT_NS_CLIENTS] == client)
        place_clear(spaces, client % KVT_NS_CLIENTS);
}

void kvt_namespaces_enter(struct kvt_namespaces *spaces, uint32_t ns, uint32_t client)
{
    uint32_t place = client % KVT_NS_CLIENTS;

    if (spaces->client_of[place] != client) { /* of one that has ended */
        place_clear(spaces, place);
        spaces->client_of[place] = client;
    }
    spaces->table[ns].clients[place / 64] |= UINT64_C(1) << place % 64;
}

uint8_t kvt_namespaces_mixed(struct kvt_namespaces *spaces, uint32_t ns, int level,
                             uint32_t record_bytes)
{
    struct kvt_namespace *n = &spaces->table[ns];
    uint32_t pages = record_bytes / KVT_PAGE_BYTES;
    uint8_t unused = 0;

    /* Never longer than a raw record: that one has been found to have a place everywhere. */
    if (!pages || record_bytes % KVT_PAGE_BYTES || pages > n->record_pages[KVT_LEVEL_RAW])
        return 0;
    for (uint8_t map = KVT_NS_MAPS - 1; map >= KVT_MAP_MIXED_FIRST; map--) {
        if (kvt_map_id_level(map) != level)
            continue;
        if (n->record_pages[map] == pages)
            return map;
        if (!n->record_pages[map])
            unused = map;
    }
    if (unused)
        n->record_pages[unused] = pages;
    return unused;
}

bool kvt_namespaces_learn(struct kvt_namespaces *spaces, uint32_t ns, uint8_t map, uint32_t pages)
{
    struct kvt_namespace *n = &spaces->table[ns];

    if (map >= KVT_NS_MAPS || !pages)
        return false;
    if (!n->record_pages[map])
        n->record_pages[map] = pages;
    return n->record_pages[map] == pages;
}

uint32_t kvt_namespaces_largest(const struct kvt_namespaces *spaces)
{
    uint32_t pages = 0;

    for (uint32_t i = 0; i < spaces->touched; i++)
        for (unsigned map = 1; spaces->table[i].used && spaces->table[i].opened && map <= 6; map++)
            pages = KVT_MAX(pages, spaces->table[i].record_pages[map]);
    return pages * KVT_PAGE_BYTES;
}
