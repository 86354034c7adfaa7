/* Time to live: blocks that nobody has used for that long are gone, from DRAM, from the index, and
 * for good: a restart brings none of them back. It is the store's, or a shorter one that a
 * namespace has of its own (all its groups).
 *
 * Two bytes an entry say when it was last used, in 64ths of the time to live. Whoever looks an
 * entry up asks here first, so a block is a miss the moment it expires; a pass over the index every
 * sixteenth of the shortest time finds those that nobody asks for, long before the two bytes come
 * round. Then the roots journal "what was stored before this sequence is gone" (of that namespace),
 * where the sequence is the first that was given out within the time to live. So a block that was
 * kept alive by its uses for longer than that does not survive a restart either: the disk does not
 * know of its uses. What a restart finds goes on with the age that store_marks.c knows of, until it
 * is used; what has been used in this life begins anew when a namespace gets another time.
 *
 * The clock never goes back here. Pinned blocks do not expire; they begin anew when they are let
 * go. Bytes on disk stay until their segment is recycled: a purge is for what must not. Threads:
 * the store's owner. Allocates at open, when the index grows, and when a namespace opens.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define PASS_TICKS (KVT_TTL_TICKS / 16u)
#define BORN_NS UINT64_C(62500000) /* unit of kvt_store_ttl.born */
#define TICKS_OLD UINT64_C(16384)  /* any age above the time to live, far from coming round */

/* The clocks that run: the store's first, when it has one. */
static struct kvt_ttl_clock *first_clock(struct kvt_store_ttl *ttl)
{
    return ttl->store.unit_ns ? &ttl->store : ttl->own;
}

static struct kvt_ttl_clock *next_clock(struct kvt_store_ttl *ttl,
                                        const struct kvt_ttl_clock *clock)
{
    return clock == &ttl->store ? ttl->own : clock->next;
}

/* The one that an entry lives by; NULL: it lives for ever. */
static struct kvt_ttl_clock *clock_of(struct kvt_store *store, uint32_t entry)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_ttl_clock *own = kvt_namespace_at(&store->spaces, e->ns)->ttl;

    if (own)
        return own;
    return store->ttl.store.unit_ns ? &store->ttl.store : NULL;
}

/* When the next pass is due, by the shortest time to live. */
static void plan_pass(struct kvt_store_ttl *ttl)
{
    ttl->pass_ns = ttl->pass_every_ns = INT64_MAX;
    for (const struct kvt_ttl_clock *c = first_clock(ttl); c; c = next_clock(ttl, c)) {
        ttl->pass_ns = KVT_MIN(ttl->pass_ns, (int64_t)(c->pass_tick + PASS_TICKS) * c->unit_ns);
        ttl->pass_every_ns = KVT_MIN(ttl->pass_every_ns, (int64_t)PASS_TICKS * c->unit_ns);
    }
}

/* Of a block of an earlier life that nobody has used in this one the age counts. */
static void stamp(struct kvt_store *store, uint32_t entry, const struct kvt_ttl_clock *clock)
{
    const struct kvt_store_ttl *ttl = &store->ttl;
    uint64_t born = entry < ttl->born_capacity ? ttl->born[entry] : 0, ticks = 0;

    if (born)
        ticks = ((born - 1) * BORN_NS + (uint64_t)KVT_MAX(ttl->now_ns - ttl->open_ns, INT64_C(0))) /
                (uint64_t)clock->unit_ns;
    store->ttl.stamps[entry] = (uint16_t)(clock->tick - KVT_MIN(ticks, TICKS_OLD));
}

/* The clock is among those that run. */
static void start(struct kvt_store *store, struct kvt_ttl_clock *clock, int64_t ttl_ns)
{
    struct kvt_store_ttl *ttl = &store->ttl;

    ttl->now_ns = KVT_MAX(ttl->now_ns, kvt_store_now(store));
    memset(clock->marks, 0, sizeof(clock->marks));
    clock->ttl_ns = ttl_ns;
    clock->unit_ns = KVT_MAX(ttl_ns / KVT_TTL_TICKS, INT64_C(1));
    clock->tick = (uint64_t)(KVT_MAX(ttl->now_ns, INT64_C(0)) / clock->unit_ns);
    clock->pass_tick = clock->tick;
    /* What is here now was stored before: nothing is known to be older than the time to live. */
    clock->marks[clock->tick % KVT_TTL_MARKS] = store->sequence_next;
    ttl->tick_ns = INT64_MIN;
    plan_pass(ttl);
}

int kvt_ttl_init(struct kvt_store *store)
{
    if (!store->params.ttl_ns)
        return 0;
    start(store, &store->ttl.store, store->params.ttl_ns);
    return kvt_ttl_grow(store);
}

void kvt_ttl_destroy(struct kvt_store *store)
{
    while (store->ttl.own) {
        struct kvt_ttl_clock *clock = store->ttl.own;

        store->ttl.own = clock->next;
        free(clock);
    }
    free(store->ttl.stamps);
    store->ttl.stamps = NULL;
    free(store->ttl.born);
    store->ttl.born = NULL;
}

/* ---- of an earlier life ------------------------------------------------------------------------
 */

void kvt_ttl_open(struct kvt_store *store)
{
    store->ttl.open_ns = store->ttl.wall_at_ns = kvt_store_now(store);
}

bool kvt_ttl_wanted(const struct kvt_store_params *params)
{
    bool wanted = params->ttl_ns > 0;

    for (uint32_t i = 0; i < params->ns_rule_count; i++)
        wanted = wanted || params->ns_rules[i].ttl_ns > 0;
    return wanted;
}

int64_t kvt_ttl_wall(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    int64_t now = kvt_store_now(store),
            wall = KVT_MAX(kvt_clock_now(&store->params.wall), INT64_C(0));

    wall = KVT_MAX(wall, ttl->wall_ns + KVT_MAX(now - ttl->wall_at_ns, INT64_C(0)));
    ttl->wall_ns = wall;
    ttl->wall_at_ns = KVT_MAX(ttl->wall_at_ns, now);
    return wall;
}

void kvt_ttl_found(struct kvt_store *store, uint32_t entry, const struct kvt_ttl_marks *marks,
                   uint64_t sequence)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    int64_t stored = kvt_ttl_mark_of(marks, sequence), now;
    const struct kvt_ttl_clock *clock;
    uint64_t age;

    if (stored == INT64_MAX)
        return;
    if (entry >= ttl->born_capacity) {
        uint32_t capacity = store->index.capacity, before = ttl->born_capacity;
        uint32_t *grown = realloc(ttl->born, (size_t)capacity * sizeof(*grown));

        if (!grown)
            return;
        memset(grown + before, 0, (size_t)(capacity - before) * sizeof(*grown));
        ttl->born = grown;
        ttl->born_capacity = capacity;
    }
    now = kvt_ttl_wall(store) - (kvt_store_now(store) - ttl->open_ns);
    age = ((uint64_t)KVT_MAX(now - stored, INT64_C(0)) + BORN_NS - 1) / BORN_NS;
    ttl->born[entry] = (uint32_t)KVT_MIN(age, (uint64_t)UINT32_MAX - 1) + 1;
    clock = entry < ttl->capacity ? clock_of(store, entry) : NULL;
    if (clock)
        stamp(store, entry, clock);
}

/* What was there before its clock was. */
static void stamp_as_is(struct kvt_store *store, uint32_t entry)
{
    const struct kvt_ttl_clock *clock = entry < store->ttl.capacity ? clock_of(store, entry) : NULL;

    if (clock)
        stamp(store, entry, clock);
}

int kvt_ttl_grow(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    uint32_t capacity = store->index.capacity, before = ttl->capacity;
    uint16_t *stamps;

    if (!first_clock(ttl) || before >= capacity)
        return 0;
    stamps = realloc(ttl->stamps, (size_t)capacity * sizeof(*stamps));
    if (!stamps)
        return -ENOMEM;
    memset(stamps + before, 0, (size_t)(capacity - before) * sizeof(*stamps));
    ttl->stamps = stamps;
    ttl->capacity = capacity;
    for (uint32_t i = before; i < KVT_MIN(store->index.touched, capacity); i++)
        if (kvt_index_at(&store->index, i)->used)
            stamp_as_is(store, i);
    return 0;
}

void kvt_ttl_touch(struct kvt_store *store, uint32_t entry)
{
    if (entry < store->ttl.born_capacity)
        store->ttl.born[entry] = 0;
    stamp_as_is(store, entry);
}

static void tick_clock(struct kvt_store *store, struct kvt_ttl_clock *clock)
{
    uint64_t tick = (uint64_t)store->ttl.now_ns / (uint64_t)clock->unit_ns;

    if (tick == clock->tick)
        return;
    /* Nothing was given out in ticks that passed unseen: every message and every run asks for the
     * time first. */
    for (uint64_t t = KVT_MAX(clock->tick + 1, tick - KVT_MIN(tick, KVT_TTL_MARKS - 1)); t <= tick;
         t++)
        clock->marks[t % KVT_TTL_MARKS] = store->sequence_next;
    clock->tick = tick;
}

void kvt_ttl_tick(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;

    if (!ttl->stamps)
        return;
    ttl->now_ns = KVT_MAX(ttl->now_ns, kvt_store_now(store));
    if (ttl->now_ns < ttl->tick_ns)
        return;
    ttl->tick_ns = INT64_MAX;
    ttl->owes = true;
    for (struct kvt_ttl_clock *c = first_clock(ttl); c; c = next_clock(ttl, c)) {
        tick_clock(store, c);
        ttl->tick_ns = KVT_MIN(ttl->tick_ns, (int64_t)(c->tick + 1) * c->unit_ns);
    }
    for (uint32_t i = 0; i < store->disk_count; i++)
        if (store->disks[i].marks.count)
            kvt_ttl_mark_add(&store->disks[i].marks, store->sequence_next, kvt_ttl_wall(store));
}

static struct kvt_ttl_clock *expired(struct kvt_store *store, uint32_t entry)
{
    const struct kvt_store_ttl *ttl = &store->ttl;
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_ttl_clock *clock;

    if (entry >= ttl->capacity || !kvt_index_present(e) || e->pinned)
        return NULL;
    clock = clock_of(store, entry);
    return clock && (uint16_t)(clock->tick - ttl->stamps[entry]) > KVT_TTL_TICKS ? clock : NULL;
}

static void expire(struct kvt_store *store, uint32_t entry, struct kvt_ttl_clock *clock)
{
    struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    store->counts.ttl_expired++;
    store->sweep_on |= e->children > 0;
    clock->due = store->sequence_next;
    store->ttl.owes = true;
    if (e->slot != KVT_INDEX_NONE)
        kvt_entry_drop_slot(store, entry, false);
    if (e->on_disk) /* its bytes stay: after a restart the record may be found again */
        kvt_entry_clear_disk(store, entry);
    kvt_entry_settle(store, entry);
}

uint32_t kvt_ttl_alive(struct kvt_store *store, uint32_t entry)
{
    struct kvt_ttl_clock *clock;

    if (entry == KVT_INDEX_NONE || !store->ttl.stamps)
        return entry;
    clock = expired(store, entry);
    if (!clock)
        return entry;
    expire(store, entry, clock);
    return KVT_INDEX_NONE;
}

uint32_t kvt_ttl_find(struct kvt_store *store, const struct kvt_full_key *key)
{
    uint32_t entry = kvt_entry_find(store, key);

    /* the entry may live on as somebody's parent, or because it is being filled */
    return kvt_ttl_alive(store, entry) == entry ? entry : kvt_entry_find(store, key);
}

/* ---- a time of its own ------------------------------------------------------------------------
 */

/* All groups of the namespace live by this clock from now on, and what is there begins anew. */
static void live_by(struct kvt_store *store, uint32_t ns, struct kvt_ttl_clock *clock)
{
    uint32_t at = ns;

    do {
        kvt_namespace_at(&store->spaces, at)->ttl = clock;
        at = kvt_namespace_at(&store->spaces, at)->next_group;
    } while (at != ns);
    for (uint32_t i = 0; i < store->index.touched; i++) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, i);

        if (e->used && kvt_namespaces_same(&store->spaces, e->ns, ns))
            stamp_as_is(store, i);
    }
}

static void stop(struct kvt_store *store, struct kvt_ttl_clock *clock)
{
    struct kvt_ttl_clock **at = &store->ttl.own;

    while (*at != clock)
        at = &(*at)->next;
    *at = clock->next;
    free(clock);
    plan_pass(&store->ttl);
}

static void say(struct kvt_store *store, uint32_t ns, int64_t ttl_ns)
{
    uint32_t at = ns;

    do {
        kvt_namespace_at(&store->spaces, at)->ttl_ns = ttl_ns;
        at = kvt_namespace_at(&store->spaces, at)->next_group;
    } while (at != ns);
}

int kvt_ttl_of(struct kvt_store *store, uint32_t ns, int64_t ttl_ns)
{
    int64_t before = kvt_namespace_at(&store->spaces, ns)->ttl_ns;
    int err;

    if (!ttl_ns)
        return 0;
    say(store, ns, ttl_ns == INT64_MAX ? 0 : ttl_ns);
    err = kvt_ttl_apply(store, ns);
    if (err)
        say(store, ns, before);
    return err;
}

int kvt_ttl_apply(struct kvt_store *store, uint32_t ns)
{
    const struct kvt_namespace *space = kvt_namespace_at(&store->spaces, ns);
    int64_t ttl_ns = space->ttl_ns ? space->ttl_ns : INT64_MAX;
    struct kvt_ttl_clock *clock = space->ttl;
    int err;

    if (space->rule_ttl_ns)
        ttl_ns = KVT_MIN(ttl_ns, space->rule_ttl_ns);
    if (clock && clock->ttl_ns == ttl_ns)
        return 0;
    if (ttl_ns == INT64_MAX || (store->ttl.store.unit_ns && ttl_ns >= store->ttl.store.ttl_ns)) {
        if (clock) {
            live_by(store, ns, NULL);
            stop(store, clock);
        }
        return 0;
    }
    if (!clock) {
        clock = calloc(1, sizeof(*clock));
        if (!clock)
            return -ENOMEM;
        memcpy(clock->ns, space->id, sizeof(clock->ns));
        clock->next = store->ttl.own;
        store->ttl.own = clock;
        start(store, clock, ttl_ns);
        err = kvt_ttl_grow(store);
        if (err) {
            stop(store, clock);
            return err;
        }
    } else {
        start(store, clock, ttl_ns);
    }
    live_by(store, ns, clock);
    return 0;
}

bool kvt_ttl_waits(const struct kvt_store *store, uint32_t ns)
{
    const struct kvt_ttl_clock *clock = kvt_namespace_at(&store->spaces, ns)->ttl;

    return clock && store->disk_count && clock->floor < clock->due;
}

void kvt_ttl_forget(struct kvt_store *store, uint32_t ns)
{
    struct kvt_namespace *space = kvt_namespace_at(&store->spaces, ns);

    if (space->ttl && space->next_group == ns)
        stop(store, space->ttl);
    space->ttl = NULL;
}

/* ---- for good ---------------------------------------------------------------------------------
 */

/* What is older than the time to live has a sequence below this one; 0: that is no news. Goes on
 * until it covers whatever has expired: a time to live later at the latest. */
static uint64_t floor_of(const struct kvt_ttl_clock *clock)
{
    uint64_t floor;

    if (clock->floor >= clock->due || clock->tick < KVT_TTL_TICKS)
        return 0;
    floor = clock->marks[(clock->tick - KVT_TTL_TICKS) % KVT_TTL_MARKS];
    return floor > clock->floor ? floor : 0;
}

/* Once a pass has seen everything. All clocks in one purge, and one such purge at a time: callers
 * have purges, too. What has to wait for that is owed. */
static void journal(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    struct kvt_store_purge *purge = NULL;

    ttl->owes = false;
    for (struct kvt_ttl_clock *c = first_clock(ttl); c && store->disk_count;
         c = next_clock(ttl, c)) {
        uint64_t floor = floor_of(c);

        if (!floor)
            continue;
        if (!purge)
            purge = kvt_purges_floor(store);
        if (!purge || !kvt_purges_floor_add(purge, c == &ttl->store ? NULL : c->ns, floor)) {
            ttl->owes = true;
            return;
        }
        c->floor = floor;
    }
}

bool kvt_ttl_owes(const struct kvt_store *store)
{
    return store->ttl.owes;
}

int64_t kvt_ttl_run(struct kvt_store *store)
{
    struct kvt_store_ttl *ttl = &store->ttl;
    uint32_t end;

    if (!ttl->stamps)
        return INT64_MAX;
    kvt_ttl_tick(store);
    for (uint32_t i = 0; i < store->disk_count; i++)
        kvt_ttl_marks_note(store, i, !ttl->cursor && ttl->now_ns >= ttl->pass_ns);
    for (struct kvt_ttl_clock *c = first_clock(ttl); c && store->closing; c = next_clock(ttl, c))
        c->due = store->sequence_next;
    if (store->closing || (ttl->owes && !ttl->cursor))
        journal(store);
    if (!ttl->cursor && ttl->now_ns < ttl->pass_ns)
        return store->index.used ? ttl->pass_ns : INT64_MAX;
    if (!ttl->cursor) {
        for (struct kvt_ttl_clock *c = first_clock(ttl); c; c = next_clock(ttl, c))
            c->pass_tick = c->tick;
        plan_pass(ttl);
    }
    end = KVT_MIN(store->index.touched, ttl->cursor + KVT_STORE_SCAN_ENTRIES);
    for (; ttl->cursor < end; ttl->cursor++) {
        struct kvt_ttl_clock *clock =
            kvt_index_at(&store->index, ttl->cursor)->used ? expired(store, ttl->cursor) : NULL;

        if (clock)
            expire(store, ttl->cursor, clock);
    }
    if (ttl->cursor >= store->index.touched)
        ttl->cursor = 0;
    return kvt_store_now(store);
}
