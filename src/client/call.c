/* Calls that wait for one reply: lookup, prefetch, pin, unpin, purge, flush, and what open and the
 * statistics need. Long key lists are cut into messages.
 *
 * Threads: any. Each blocks for a round trip per KVT_MSG_KEYS_MAX keys, on a condition variable.
 * Keys are written straight into the ring; nothing is allocated.
 */
#include <string.h>

#include "base/checked.h"
#include "client/misuse.h"
#include "client/prompts.h"

#define FRAME_EXTRA 16u
#define SHARDS_MAX 256u  /* of a lookup: a few blocks still go into one message */
#define LEAD_NS 2000000  /* most replies come within it; then the reply thread waits for them */
#define RETRY_NS 1000000 /* how often to look for room when no reply is due that would tell */
/* Numbers, and states of the roots behind them. */
#define STAT_REPLY_BYTES \
    ((uint32_t)(sizeof(struct kvt_msg) + KVT_STORE_STAT_COUNT * sizeof(uint64_t) + 4096))
#define PURGES_MAX 4u /* the store handles a few at a time and refuses more */

static void call_init(struct kvt_call *call)
{
    pthread_condattr_t attr;
    memset(call, 0, sizeof(*call));
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&call->cond, &attr);
    pthread_condattr_destroy(&attr);
}

/* Wait until credits, flights, ring space or a purge's place may have come back. */
void kvt_call_wait_room(struct kvt_cache *cache)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_nsec += RETRY_NS;
    if (at.tv_nsec >= 1000000000) {
        at.tv_nsec -= 1000000000;
        at.tv_sec++;
    }
    cache->room_waiters++;
    if (cache->stuck)
        pthread_cond_timedwait(&cache->room, &cache->lock, &at);
    else
        pthread_cond_wait(&cache->room, &cache->lock);
    cache->room_waiters--;
}

/* Wait until a flight and `bytes` of ring space are there. NULL: the store is gone. */
static void *call_begin(struct kvt_cache *cache, struct kvt_call *call, uint32_t bytes, uint16_t op,
                        uint32_t ns, uint32_t count, uint32_t reply_bytes)
{
    for (;;) {
        if (cache->broken)
            return NULL;
        struct kvt_flight *flight =
            kvt_flight_take(cache, KVT_C_CALL, op, reply_bytes + FRAME_EXTRA);
        if (flight != NULL) {
            void *msg =
                kvt_msg_reserve(cache, bytes, op, kvt_flight_cookie(cache, flight), ns, count);
            if (msg != NULL) {
                flight->call = call;
                return msg;
            }
            kvt_flight_put(cache, flight);
            kvt_reply_wake(cache);
        }
        kvt_call_wait_room(cache);
    }
}

/* Look for the answer instead of sleeping, for as long as the user lets us (option "spin"). */
static void call_spin(struct kvt_cache *cache, const struct kvt_call *call)
{
    if (cache->settings->spin == KVT_AUTO)
        return;
    const int64_t end = kvt_clock_now(&cache->clock) + (int64_t)cache->settings->spin;
    kvt_ring_awake(&cache->channel.replies);
    while (!call->done && !cache->broken) {
        if (kvt_reply_drain(cache) > 0)
            continue;
        pthread_mutex_unlock(&cache->lock);
        bool late = kvt_clock_now(&cache->clock) >= end;
        pthread_mutex_lock(&cache->lock);
        if (late)
            break;
    }
    (void)kvt_reply_listen(cache);
}

/* Sleep on the ring itself and not on the reply thread: the store then wakes the caller at once,
 * which saves a wake-up on the way. One caller at a time, for a short while, and only where no
 * block is under way: those are the reply thread's. Whoever handles our reply meanwhile wakes us.
 */
static void call_lead(struct kvt_cache *cache, struct kvt_call *call)
{
    if (call->done || cache->broken || cache->lead != NULL || cache->active_count > 0)
        return;
    const int64_t end = kvt_clock_now(&cache->clock) + LEAD_NS;
    for (int64_t left = LEAD_NS; !call->done && !cache->broken && left > 0;) {
        if (kvt_reply_drain(cache) > 0)
            continue;
        _Atomic uint32_t *word = kvt_ring_sleep_word(&cache->channel.replies);
        if (word == NULL)
            continue;
        cache->lead = call;
        cache->lead_word = word;
        pthread_mutex_unlock(&cache->lock);
        kvt_ring_word_wait(word, left);
        pthread_mutex_lock(&cache->lock);
        cache->lead = NULL;
        left = end - kvt_clock_now(&cache->clock);
    }
    (void)kvt_reply_listen(cache);
}

static int32_t call_finish(struct kvt_cache *cache, struct kvt_call *call, const void *msg)
{
    if (msg != NULL) {
        kvt_msg_push(cache, msg);
        call_spin(cache, call);
        call_lead(cache, call);
        if (!call->done) /* the ring may have been left to the workers */
            (void)kvt_reply_listen(cache);
        while (!call->done)
            pthread_cond_wait(&call->cond, &cache->lock);
    } else {
        call->status = KVT_E_CLOSED;
    }
    pthread_cond_destroy(&call->cond);
    return call->status;
}

struct key_opts {
    uint8_t min_level;
    uint8_t each;         /* LOOKUP: do not stop at an absent key */
    enum kvt_tier *tiers; /* LOOKUP: optional output */
    uint32_t shards;      /* 0: keys as they are; else each stands for that many, shard 0 and up */
    uint8_t *roots;       /* LOOKUP: optional output */
    uint8_t whole;        /* LOOKUP: not the first message of a call */
};

static void keys_write(struct kvt_msg_key *out, const struct kvt_key *keys, uint32_t count,
                       uint32_t shards)
{
    const uint32_t per_key = shards == 0 ? 1 : shards;
    for (uint32_t i = 0; i < count; i++) {
        const struct kvt_key *key = &keys[i / per_key];
        memcpy(out[i].hash, key->hash, key->hash_len);
        out[i].hash_len = key->hash_len;
        out[i].group = key->group;
        out[i].shard = shards == 0 ? key->shard : i % shards;
    }
}

/* One message of `count` keys of one group (index); the lock is held. */
static int32_t call_keys(struct kvt_ns *ns, uint8_t group, uint16_t op, const struct kvt_key *keys,
                         uint32_t count, struct key_opts opts)
{
    struct kvt_cache *cache = ns->cache;
    struct kvt_call call;
    uint32_t bytes = (uint32_t)(sizeof(struct kvt_msg_keys) + count * sizeof(struct kvt_msg_key));
    uint32_t reply = sizeof(struct kvt_msg_lookup_reply);
    if (op == KVT_OP_LOOKUP)
        reply += (uint32_t)kvt_round_up(count * sizeof(struct kvt_lookup_entry), 8);
    call_init(&call);
    call.count = count;
    call.tiers = opts.tiers;
    call.roots = opts.roots;
    call.each = opts.each != 0;
    struct kvt_msg_keys *msg = NULL;
    if (ns->groups[group].handle != 0)
        msg = call_begin(cache, &call, bytes, op, 0, count, reply);
    if (msg != NULL) {
        msg->msg.ns = ns->groups[group].handle; /* of the connection that takes the message */
        msg->min_level = opts.min_level;
        msg->each = opts.each;
        msg->whole = opts.whole;
        keys_write(msg->keys, keys, count, opts.shards);
    }
    int32_t status = call_finish(cache, &call, msg);
    if (status != KVT_E_CLOSED || !cache->remote || op == KVT_OP_PURGE)
        return status;
    cache->counters.daemon_keys += count; /* nothing is there, so nothing was found or kept */
    for (uint32_t i = 0; opts.tiers != NULL && i < count; i++)
        opts.tiers[i] = KVT_TIER_MISS;
    return 0;
}

int kvt_call_enter(struct kvt_ns *ns, const struct kvt_key *keys, size_t n)
{
    if (ns == NULL || (keys == NULL && n != 0) || !kvt_keys_ok(ns, keys, n, false))
        return KVT_E_INVAL;
    int rc = kvt_cache_enter_live(ns->cache);
    if (rc == 0) {
        ns->cache->callers++;
        ns->refs++;
    }
    return rc;
}

void kvt_call_leave(struct kvt_ns *ns)
{
    struct kvt_cache *cache = ns->cache;
    cache->callers--;
    ns->refs--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
}

/* How many keys at the front are of one group, at most a message. */
static uint32_t group_run(const struct kvt_key *keys, size_t n)
{
    uint32_t run = 1;
    while (run < n && run < KVT_MSG_KEYS_MAX && keys[run].group == keys[0].group)
        run++;
    return run;
}

/* The same for all n keys, message by message; statuses are counts and add up. */
static long call_sum(struct kvt_ns *ns, uint16_t op, const struct kvt_key *keys, size_t n,
                     uint8_t min_level)
{
    long sum = 0;
    for (size_t at = 0; at < n;) {
        uint32_t count = group_run(keys + at, n - at);
        int32_t status = call_keys(ns, kvt_ns_group_index(ns, keys[at].group), op, keys + at, count,
                                   (struct key_opts){.min_level = min_level});
        if (status < 0)
            return sum > 0 ? sum : status;
        sum += status;
        at += count;
    }
    return sum;
}

/* The log says why; ns NULL: nobody to tell. Returns code. */
static int refused(const char *call, const struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                   int code)
{
    if (ns != NULL)
        kvt_misuse_keys(call, ns, keys, n, code);
    return code;
}

static int min_level_of(int level)
{
    return level >= KVT_LEVEL_DEFAULT && level <= KVT_LEVEL_RAW ? level : KVT_E_INVAL;
}

/* The tier of a block of which each rank holds a part: it is there when all are. */
static enum kvt_tier shards_tier(const enum kvt_tier *tiers, uint32_t shards)
{
    enum kvt_tier worst = KVT_TIER_DRAM;
    for (uint32_t i = 0; i < shards; i++) {
        if (tiers[i] == KVT_TIER_MISS)
            return KVT_TIER_MISS;
        if (tiers[i] == KVT_TIER_PENDING || worst == KVT_TIER_PENDING)
            worst = KVT_TIER_PENDING;
        else if (tiers[i] > worst)
            worst = tiers[i];
    }
    return worst;
}

/* Whether a message of a look-up asks the shared tier for all of its keys at once. The first one
 * does not, since most prompts miss at once; but where shards that fill no message whole make three
 * messages of 2,048 keys: three round trips are enough for those. */
static uint8_t asks_whole(size_t at, size_t n, uint32_t shards)
{
    const uint32_t per_message = KVT_MSG_KEYS_MAX / shards;
    return at > 0 || (n * shards <= (size_t)2 * KVT_MSG_KEYS_MAX && n > (size_t)2 * per_message);
}

/* The same, each key standing for `shards` of them, side by side in one message. */
static long lookup_shards(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                          struct key_opts use, enum kvt_tier *tiers, uint8_t *roots)
{
    enum kvt_tier parts[KVT_MSG_KEYS_MAX];
    uint8_t part_roots[KVT_MSG_KEYS_MAX] = {0};
    const uint32_t per_message = KVT_MSG_KEYS_MAX / use.shards;
    long hits = 0;
    use.tiers = parts;
    use.roots = part_roots;
    for (size_t at = 0; at < n;) {
        uint32_t count = (uint32_t)KVT_MIN(n - at, per_message), run = 0;
        use.whole = asks_whole(at, n, use.shards);
        int32_t status = call_keys(ns, kvt_ns_group_index(ns, keys[0].group), KVT_OP_LOOKUP,
                                   keys + at, count * use.shards, use);
        if (status < 0)
            return status;
        for (uint32_t i = 0; i < count; i++) {
            enum kvt_tier tier = shards_tier(parts + i * use.shards, use.shards);
            bool there = tier == KVT_TIER_DRAM || tier == KVT_TIER_DISK || tier == KVT_TIER_REMOTE;
            if (tiers != NULL && (use.each || run == i))
                tiers[at + i] = tier;
            for (uint32_t part = 0; roots != NULL && part < use.shards; part++)
                if (parts[i * use.shards + part] == KVT_TIER_DISK)
                    roots[at + i] = part_roots[i * use.shards + part];
            run += there && (use.each || run == i);
        }
        hits += run;
        if (!use.each && run < count)
            break;
        at += count;
    }
    return hits;
}

long kvt_call_lookup(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                     const struct kvt_lookup_opts *opts, bool each, enum kvt_tier *tiers)
{
    const uint8_t min_level = (uint8_t)opts->min_level;
    long hits = 0;
    if (opts->shards > 1)
        return lookup_shards(ns, keys, n,
                             (struct key_opts){min_level, each, NULL, opts->shards, NULL, 0}, tiers,
                             opts->roots);
    for (size_t at = 0; at < n;) {
        uint32_t count = (uint32_t)KVT_MIN(n - at, KVT_MSG_KEYS_MAX);
        struct key_opts use = {min_level,
                               each,
                               tiers ? tiers + at : NULL,
                               0,
                               opts->roots ? opts->roots + at : NULL,
                               asks_whole(at, n, 1)};
        int32_t status = call_keys(ns, kvt_ns_group_index(ns, keys[0].group), KVT_OP_LOOKUP,
                                   keys + at, count, use);
        if (status < 0)
            return status;
        hits += status;
        if (!each && (uint32_t)status < count)
            break;
        at += count;
    }
    return hits;
}

int kvt_lookup_opts_read(const struct kvt_lookup_opts *from, struct kvt_lookup_opts *opts)
{
    memset(opts, 0, sizeof(*opts));
    if (from == NULL)
        return 0;
    if (from->struct_size == sizeof(*opts))
        *opts = *from;
    else if (from->struct_size == KVT_LOOKUP_OPTS_SIZE_0)
        opts->min_level = from->min_level;
    else if (from->struct_size == KVT_LOOKUP_OPTS_SIZE_1)
        memcpy(opts, from, KVT_LOOKUP_OPTS_SIZE_1);
    else
        return KVT_E_VERSION;
    return min_level_of(opts->min_level) < 0 || opts->shards > SHARDS_MAX ||
                   (opts->flags & ~(uint32_t)KVT_LOOKUP_PROBE) != 0
               ? KVT_E_INVAL
               : 0;
}

/* Keys of a lookup over shards name the block: which of its parts is not theirs to say. */
static bool shards_ok(const struct kvt_lookup_opts *opts, const struct kvt_key *keys, size_t n)
{
    for (size_t i = 0; opts->shards > 1 && i < n; i++)
        if (keys[i].shard != 0)
            return false;
    return true;
}

long kvt_lookup(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                const struct kvt_lookup_opts *opts, enum kvt_tier *tiers)
{
    struct kvt_lookup_opts use;
    int rc = kvt_lookup_opts_read(opts, &use);
    if (rc == 0 && keys != NULL && !shards_ok(&use, keys, n))
        rc = KVT_E_INVAL;
    if (rc != 0)
        return refused("kvt_lookup", ns, keys, n, rc);
    rc = kvt_call_enter(ns, keys, n);
    if (rc != 0)
        return refused("kvt_lookup", ns, keys, n, rc);
    if (!kvt_keys_ok(ns, keys, n, true)) { /* one chain is of one group */
        kvt_call_leave(ns);
        return refused("kvt_lookup", ns, keys, n, KVT_E_INVAL);
    }
    for (size_t i = 0; tiers != NULL && i < n; i++)
        tiers[i] = KVT_TIER_MISS;
    if (use.roots != NULL)
        memset(use.roots, 0, n);
    const bool prompt = (use.flags & KVT_LOOKUP_PROBE) == 0;
    long run = 0;
    if (!atomic_load_explicit(&ns->cache->enabled, memory_order_relaxed))
        ns->cache->counters.off_lookup += n;
    else if (prompt && ns->cache->settings->shadow)
        run = kvt_shadow_lookup(ns, keys, n, &use);
    else
        run = kvt_call_lookup(ns, keys, n, &use, false, tiers);
    if (prompt)
        kvt_prompts_record(ns, keys, n, use.prompt_tokens);
    kvt_call_leave(ns);
    return run;
}

long kvt_prefetch(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                  const struct kvt_load_opts *opts)
{
    if (opts != NULL && opts->struct_size != sizeof(*opts) &&
        opts->struct_size != KVT_LOAD_OPTS_SIZE_0 && opts->struct_size != KVT_LOAD_OPTS_SIZE_1)
        return refused("kvt_prefetch", ns, keys, n, KVT_E_VERSION);
    int min_level = min_level_of(opts ? opts->min_level : KVT_LEVEL_DEFAULT);
    if (min_level < 0)
        return refused("kvt_prefetch", ns, keys, n, min_level);
    int rc = kvt_call_enter(ns, keys, n);
    if (rc != 0)
        return refused("kvt_prefetch", ns, keys, n, rc);
    long queued = 0;
    if (atomic_load_explicit(&ns->cache->enabled, memory_order_relaxed) &&
        !ns->cache->settings->shadow)
        queued = call_sum(ns, KVT_OP_PREFETCH, keys, n, (uint8_t)min_level);
    kvt_call_leave(ns);
    return queued;
}

static long keys_call(struct kvt_ns *ns, uint16_t op, const struct kvt_key *keys, size_t n)
{
    int rc = kvt_call_enter(ns, keys, n);
    if (rc != 0)
        return refused(op == KVT_OP_PIN ? "kvt_pin" : "kvt_unpin", ns, keys, n, rc);
    long sum = call_sum(ns, op, keys, n, 0);
    kvt_call_leave(ns);
    return sum;
}

long kvt_call_touch_held(struct kvt_ns *ns, const struct kvt_key *keys, size_t n)
{
    return call_sum(ns, KVT_OP_TOUCH, keys, n, 0);
}

long kvt_call_touch(struct kvt_ns *ns, const struct kvt_key *keys, size_t n)
{
    int rc = kvt_call_enter(ns, keys, n);
    if (rc != 0)
        return rc;
    long sum = call_sum(ns, KVT_OP_TOUCH, keys, n, 0);
    kvt_call_leave(ns);
    return sum;
}

long kvt_pin(struct kvt_ns *ns, const struct kvt_key *keys, size_t n)
{
    return keys_call(ns, KVT_OP_PIN, keys, n);
}

long kvt_unpin(struct kvt_ns *ns, const struct kvt_key *keys, size_t n)
{
    return keys_call(ns, KVT_OP_UNPIN, keys, n);
}

/* Every group of the namespace. */
static long purge_all(struct kvt_ns *ns)
{
    long removed = 0;
    for (uint32_t i = 0; i < ns->shape->group_count; i++) {
        int32_t status = call_keys(ns, (uint8_t)i, KVT_OP_PURGE, NULL, 0, (struct key_opts){0});
        if (status < 0)
            return status;
        removed += status;
    }
    return removed;
}

long kvt_purge(struct kvt_ns *ns, const struct kvt_key *keys, size_t n)
{
    int rc = kvt_call_enter(ns, keys, keys != NULL ? n : 0);
    if (rc != 0)
        return refused("kvt_purge", ns, keys, n, rc);
    struct kvt_cache *cache = ns->cache;
    while (cache->purges == PURGES_MAX)
        kvt_call_wait_room(cache);
    cache->purges++;
    long removed = keys != NULL ? call_sum(ns, KVT_OP_PURGE, keys, n, 0) : purge_all(ns);
    cache->purges--;
    if (cache->room_waiters > 0)
        pthread_cond_broadcast(&cache->room);
    kvt_call_leave(ns);
    if (keys == NULL && removed >= 0)
        kvt_choice_forget(ns);
    return removed;
}

int kvt_flush(struct kvt_cache *cache)
{
    if (cache == NULL)
        return KVT_E_INVAL;
    kvt_choices_save(cache);
    int rc = kvt_cache_enter(cache);
    if (rc != 0)
        return rc;
    struct kvt_call call;
    int missing = cache->remote ? 0 : kvt_roots_missing(&cache->host);
    cache->callers++;
    call_init(&call);
    struct kvt_msg *msg =
        call_begin(cache, &call, sizeof(*msg), KVT_OP_FLUSH, 0, 0, sizeof(struct kvt_msg));
    rc = call_finish(cache, &call, msg);
    if (rc >= 0)
        rc = missing;
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    return rc < 0 ? rc : 0;
}

int kvt_call_ns_open(struct kvt_cache *cache, const struct kvt_msg_ns_open *msg, uint32_t *handle)
{
    struct kvt_call call;
    const uint32_t life = cache->link_lives;
    call_init(&call);
    struct kvt_msg_ns_open *sent =
        call_begin(cache, &call, sizeof(*sent), KVT_OP_NS_OPEN, 0, 0, sizeof(struct kvt_msg));
    if (sent != NULL)
        memcpy((char *)sent + sizeof(sent->msg), (const char *)msg + sizeof(msg->msg),
               sizeof(*sent) - sizeof(sent->msg));
    int32_t status = call_finish(cache, &call, sent);
    if (cache->remote && (status == KVT_E_CLOSED || life != cache->link_lives))
        return 0; /* the next connection opens it, or has done so already */
    *handle = call.ns;
    return status < 0 ? status : 0;
}

bool kvt_call_ping(struct kvt_cache *cache)
{
    struct kvt_flight *flight =
        kvt_flight_take(cache, KVT_C_CALL, KVT_OP_STAT, STAT_REPLY_BYTES + FRAME_EXTRA);
    if (flight == NULL)
        return false;
    struct kvt_msg *msg =
        kvt_msg_reserve(cache, sizeof(*msg), KVT_OP_STAT, kvt_flight_cookie(cache, flight), 0, 0);
    if (msg == NULL) {
        kvt_flight_put(cache, flight);
        return false;
    }
    cache->ping.done = false;
    flight->call = &cache->ping;
    kvt_msg_push(cache, msg);
    return true;
}

int kvt_call_stat(struct kvt_cache *cache, uint64_t *values, uint32_t values_max, uint32_t *count)
{
    struct kvt_call call;
    call_init(&call);
    call.values = values;
    call.values_max = values_max;
    struct kvt_msg *msg =
        call_begin(cache, &call, sizeof(*msg), KVT_OP_STAT, 0, 0, STAT_REPLY_BYTES);
    int32_t status = call_finish(cache, &call, msg);
    *count = status < 0 ? 0 : call.count;
    return status < 0 ? status : 0;
}
