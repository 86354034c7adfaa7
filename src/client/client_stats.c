/* Statistics: the store's numbers, the client's numbers, and texts that say what is in force.
 *
 * Everything is copied first and reported afterwards without a lock, so the callback may call the
 * library. Threads: any. Blocks for one round trip.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "client/client.h"
#include "kvtier/codec.h"
#include "kvtier/version.h"

/* Namespaces whose prefill is shown; those opened first. */
#define NS_MAX 8u
#define ROOT_VALUES (sizeof(struct kvt_store_root_state) / sizeof(uint64_t))

struct snapshot {
    struct kvt_store_stats store;
    uint64_t store_values[KVT_STORE_STAT_COUNT + KVT_DISKS_MAX * ROOT_VALUES];
    struct kvt_root_state roots[KVT_DISKS_MAX];
    uint32_t roots_known; /* behind the numbers */
    struct kvt_client_counters client;
    uint64_t requests_active, requests_held, blocks_held, threads, arena_bytes, arena_pinned;
    char gpu_state[256], gds_state[512], gpu_paths[256], daemon_state[512], pin_text[160];
    bool remote, huge;
    bool answered;    /* by the store */
    char *roots_text; /* remote: what the kvtierd says of its roots; `roots` points into it */
    uint32_t root_count;
    uint64_t root_used[KVT_DISKS_MAX], root_fails[KVT_DISKS_MAX];
    struct tier_learnt {
        struct kvt_fit_line line; /* of loads of 32 MiB */
        uint64_t taken;
    } tiers[KVT_PLAN_TIERS];
    uint32_t ns_count;
    struct ns_prefill {
        uint8_t id[KVT_NS_BYTES];
        struct kvt_fit_line line;
        uint64_t taken;
    } prefill[NS_MAX];
};

static_assert(sizeof(struct kvt_store_stats) == KVT_STORE_STAT_COUNT * sizeof(uint64_t),
              "the store's numbers are a plain array");

/* What the store says of a root that is in use: writes that fail make its state. */
static void root_numbers(struct snapshot *snapshot, uint32_t i)
{
    struct kvt_root_state *root = &snapshot->roots[i];
    struct kvt_store_root_state state = {.failing = 0};
    if (root->io != NULL && root->number >= 0 && (uint32_t)root->number < snapshot->roots_known)
        memcpy(&state,
               &snapshot->store_values[KVT_STORE_STAT_COUNT + (uint32_t)root->number * ROOT_VALUES],
               sizeof(state));
    if (state.failing != 0) {
        root->error = state.failing;
        (void)snprintf(root->state, sizeof(root->state),
                       "disk root %.250s: writing fails, what it holds is still read: %s (%d)",
                       root->path, kvt_strerror(state.failing), (int)state.failing);
    } else if (root->io == NULL && root->error == 0) {
        root->error = KVT_E_CLOSED;
    }
    snapshot->root_used[i] = state.bytes_used;
    snapshot->root_fails[i] = state.read_fails;
}

static int take(struct kvt_cache *cache, struct snapshot *snapshot)
{
    uint32_t count = 0;
    memset(snapshot, 0, sizeof(*snapshot));
    int rc = kvt_cache_enter(cache);
    if (rc != 0)
        return rc;
    kvt_planning_learn(cache);
    cache->callers++;
    rc =
        kvt_call_stat(cache, snapshot->store_values, KVT_ARRAY_LEN(snapshot->store_values), &count);
    snapshot->answered = rc == 0;
    if (count > KVT_STORE_STAT_COUNT)
        snapshot->roots_known = (count - (uint32_t)KVT_STORE_STAT_COUNT) / ROOT_VALUES;
    if (rc == KVT_E_CLOSED && cache->remote)
        rc = 0; /* no daemon: its numbers are 0, ours are still of use */
    snapshot->client = cache->counters;
    snapshot->requests_active = cache->active_count;
    snapshot->requests_held = cache->held_count;
    snapshot->blocks_held = cache->held_blocks;
    snapshot->threads = cache->worker_count;
    snapshot->arena_bytes = cache->arena_bytes;
    snapshot->arena_pinned = kvt_pin_bytes(&cache->pin);
    for (uint32_t tier = KVT_TIER_DRAM; tier < KVT_PLAN_TIERS; tier++) {
        const struct kvt_tier_model *model = &cache->planning.tiers[tier];
        snapshot->tiers[tier] =
            (struct tier_learnt){model->line[kvt_tier_class(0x1p25)], model->taken};
    }
    const struct kvt_ns *ns;
    TAILQ_FOREACH(ns, &cache->namespaces, list)
    {
        if (snapshot->ns_count == NS_MAX)
            break;
        struct ns_prefill *prefill = &snapshot->prefill[snapshot->ns_count++];
        memcpy(prefill->id, ns->id, sizeof(prefill->id));
        prefill->line = ns->prefill.line;
        prefill->taken = ns->prefill.taken;
    }
    memcpy(snapshot->gpu_state, cache->gpu_state, sizeof(snapshot->gpu_state));
    memcpy(snapshot->gds_state, cache->gds_state, sizeof(snapshot->gds_state));
    memcpy(snapshot->gpu_paths, cache->gpu_paths, sizeof(snapshot->gpu_paths));
    snapshot->remote = cache->remote;
    memcpy(snapshot->daemon_state, cache->daemon_state, sizeof(snapshot->daemon_state));
    char pin[160];
    (void)snprintf(snapshot->pin_text, sizeof(snapshot->pin_text), "%s",
                   kvt_pin_text(&cache->pin, pin, sizeof(pin)));
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    memcpy(&snapshot->store, snapshot->store_values, sizeof(snapshot->store));
    if (rc != 0 || cache->remote)
        return rc;
    pthread_mutex_lock(&cache->host.lock);
    memcpy(snapshot->roots, cache->host.roots, sizeof(snapshot->roots));
    pthread_mutex_unlock(&cache->host.lock);
    snapshot->huge = cache->host.memory.huge;
    snapshot->root_count = cache->settings->disk_count;
    for (uint32_t i = 0; i < snapshot->root_count; i++)
        root_numbers(snapshot, i);
    return 0;
}

/* One line "disk.N.what value" of the kvtierd's; the value stays where it is. */
static void remote_root_line(struct snapshot *snapshot, char *line)
{
    char *what, *value;
    if (strncmp(line, "disk.", 5) != 0)
        return;
    unsigned long number = strtoul(line + 5, &what, 10);
    if (what == line + 5 || *what != '.' || number >= KVT_DISKS_MAX ||
        (value = strchr(what, ' ')) == NULL)
        return;
    what++;
    *value++ = '\0';
    struct kvt_root_state *root = &snapshot->roots[number];
    if (strcmp(what, "path") == 0)
        root->path = value;
    else if (strcmp(what, "state") == 0)
        (void)snprintf(root->state, sizeof(root->state), "%s", value);
    else if (strcmp(what, "backend") == 0)
        (void)snprintf(root->backend, sizeof(root->backend), "%s", value);
    else if (strcmp(what, "backend_why") == 0)
        (void)snprintf(root->backend_why, sizeof(root->backend_why), "%s", value);
    else if (strcmp(what, "why") == 0)
        (void)snprintf(root->why, sizeof(root->why), "%s", value);
    else if (strcmp(what, "cap_bytes") == 0)
        root->cap_bytes = strtoull(value, NULL, 10);
    else if (strcmp(what, "bytes_used") == 0)
        snapshot->root_used[number] = strtoull(value, NULL, 10);
    else if (strcmp(what, "read_fail") == 0)
        snapshot->root_fails[number] = strtoull(value, NULL, 10);
    root->error = strcmp(root->state, "ok") == 0 ? 0 : KVT_E_CLOSED; /* not told: only whether */
    snapshot->root_count = KVT_MAX(snapshot->root_count, (uint32_t)number + 1);
}

/* The roots of a store in another process: asked for over its socket, since only texts are missing.
 * Without an answer there are none. */
static void take_remote_roots(const struct kvt_cache *cache, struct snapshot *snapshot)
{
    char why[512], *rest = NULL;
    if (!snapshot->remote || !snapshot->answered ||
        kvt_link_ask(cache->settings->socket, "roots", &snapshot->roots_text, why, sizeof(why)) !=
            0)
        return;
    for (char *line = strtok_r(snapshot->roots_text, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest))
        remote_root_line(snapshot, line);
    for (uint32_t i = 0; i < snapshot->root_count; i++)
        if (snapshot->roots[i].path == NULL)
            snapshot->roots[i].path = "?";
}

static void numbers(const struct snapshot *snapshot, kvt_stats_fn fn, void *arg)
{
#define KVT_X(field, name, help) fn(arg, name, snapshot->store.field, NULL, help);
    KVT_STORE_COUNTERS(KVT_X)
    KVT_STORE_GAUGES(KVT_X)
#undef KVT_X
#define KVT_X(field, name, help) fn(arg, name, snapshot->client.field, NULL, help);
    KVT_CLIENT_COUNTERS(KVT_X)
#undef KVT_X
#define KVT_X(field, name, help) fn(arg, name, snapshot->field, NULL, help);
    KVT_CLIENT_GAUGES(KVT_X)
#undef KVT_X
}

static void root_report(const struct snapshot *snapshot, uint32_t i, kvt_stats_fn fn, void *arg)
{
    char name[48];
    (void)snprintf(name, sizeof(name), "disk.%" PRIu32 ".bytes_used", i);
    fn(arg, name, snapshot->root_used[i], NULL, "bytes of all files of this root");
    (void)snprintf(name, sizeof(name), "disk.%" PRIu32 ".read_fail", i);
    fn(arg, name, snapshot->root_fails[i], NULL, "reads of this root that failed");
}

/* "disk.state" and its like: the first root that is off, else the first one. "disk.0.state" and so
 * on are there for each. */
static void root_texts(const struct snapshot *snapshot, kvt_stats_fn fn, void *arg)
{
    static const char none[] = "none";
    const uint32_t count = snapshot->root_count;
    for (uint32_t i = 0; i < count; i++)
        root_report(snapshot, i, fn, arg);
    const struct kvt_root_state *first = count > 0 ? &snapshot->roots[0] : NULL;
    for (uint32_t i = 0; i < count; i++) {
        if (snapshot->roots[i].error != 0) {
            first = &snapshot->roots[i];
            break;
        }
    }
    fn(arg, "disk.path", 0, first ? first->path : none, "directory of the root");
    fn(arg, "disk.state", 0, first ? first->state : none, "ok, or why a root is not in use");
    fn(arg, "disk.backend", 0, first ? first->backend : none, "I/O backend");
    fn(arg, "disk.backend_why", 0, first ? first->backend_why : none, "why this backend");
    fn(arg, "disk.why", 0, first ? first->why : none, "why direct or buffered");
    for (uint32_t i = 0; i < count; i++) {
        const struct kvt_root_state *root = &snapshot->roots[i];
        const struct {
            const char *what, *text, *help;
        } texts[] = {{"path", root->path, "directory of this root"},
                     {"state", root->state, "ok, or why this root is not in use"},
                     {"backend", root->backend, "I/O backend of this root"},
                     {"backend_why", root->backend_why, "why this backend"},
                     {"why", root->why, "why direct or buffered"}};
        char name[48];
        for (size_t j = 0; j < KVT_ARRAY_LEN(texts); j++) {
            (void)snprintf(name, sizeof(name), "disk.%" PRIu32 ".%s", i, texts[j].what);
            fn(arg, name, 0, texts[j].text, texts[j].help);
        }
        (void)snprintf(name, sizeof(name), "disk.%" PRIu32 ".cap_bytes", i);
        fn(arg, name, root->cap_bytes, NULL, "hard cap of this root");
    }
}

static uint64_t rounded(double value)
{
    return value > 0 && value < 1e18 ? (uint64_t)(value + 0.5) : 0;
}

static void tier_numbers(const struct tier_learnt *tier, const char *of, kvt_stats_fn fn, void *arg)
{
    const struct kvt_fit_line *line = &tier->line;
    char name[64];
    (void)snprintf(name, sizeof(name), "plan.%s_bytes_per_s", of);
    fn(arg, name, rounded(line->q > 0 ? 1 / line->q : 0), NULL, "expected rate of large loads");
    (void)snprintf(name, sizeof(name), "plan.%s_latency_us", of);
    fn(arg, name, rounded(line->p * 1e6), NULL, "expected wait before the first byte");
    (void)snprintf(name, sizeof(name), "plan.%s_loads", of);
    fn(arg, name, tier->taken, NULL, "loads that this was learnt from");
}

/* What kvt_plan() goes by: loads of 32 MiB for the tiers, prompts for the namespaces. "disk" is the
 * root that most was learnt of; where there are several, each has lines of its own. */
static void plan_numbers(const struct snapshot *snapshot, kvt_stats_fn fn, void *arg)
{
    char name[64];
    uint32_t most = KVT_TIER_DISK, known = 0;
    for (uint32_t tier = KVT_TIER_DISK; tier < KVT_PLAN_TIERS; tier++) {
        known += snapshot->tiers[tier].taken > 0;
        if (snapshot->tiers[tier].taken > snapshot->tiers[most].taken)
            most = tier;
    }
    tier_numbers(&snapshot->tiers[KVT_TIER_DRAM], "dram", fn, arg);
    tier_numbers(&snapshot->tiers[most], "disk", fn, arg);
    for (uint32_t tier = KVT_TIER_DISK; known > 1 && tier < KVT_PLAN_TIERS; tier++) {
        char of[16];
        (void)snprintf(of, sizeof(of), "root%" PRIu32, tier - (uint32_t)KVT_TIER_DISK);
        if (tier == KVT_TIER_DISK + KVT_PLAN_ROOT_REMOTE)
            (void)snprintf(of, sizeof(of), "remote");
        if (snapshot->tiers[tier].taken > 0)
            tier_numbers(&snapshot->tiers[tier], of, fn, arg);
    }
    for (uint32_t i = 0; i < snapshot->ns_count; i++) {
        const struct ns_prefill *prefill = &snapshot->prefill[i];
        char id[9];
        for (uint32_t j = 0; j < 4; j++)
            (void)snprintf(id + 2 * j, 3, "%02x", prefill->id[j]);
        (void)snprintf(name, sizeof(name), "plan.ns.%s.ns_per_token", id);
        fn(arg, name, rounded(prefill->line.p * 1e9), NULL, "prefill: what each token takes");
        (void)snprintf(name, sizeof(name), "plan.ns.%s.fs_per_token2", id);
        fn(arg, name, rounded(prefill->line.q * 1e15), NULL, "prefill: what attention adds");
        (void)snprintf(name, sizeof(name), "plan.ns.%s.prefills", id);
        fn(arg, name, prefill->taken, NULL, "prefills that this was learnt from");
    }
}

struct config_arg {
    kvt_stats_fn fn;
    void *arg;
};

static void config_text(void *arg, const char *key, const char *value, const char *default_value,
                        const char *help)
{
    const struct config_arg *to = arg;
    char name[64];
    (void)default_value;
    (void)snprintf(name, sizeof(name), "config.%s", key);
    to->fn(to->arg, name, 0, value, help);
}

static const char *state_of(struct kvt_cache *cache)
{
    if (!atomic_load_explicit(&cache->enabled, memory_order_relaxed))
        return "off";
    return cache->settings->shadow ? "shadow" : "on";
}

/* roots: also what has to be asked for apart. */
static int stats_each(struct kvt_cache *cache, bool roots, kvt_stats_fn fn, void *arg)
{
    struct snapshot snapshot;
    if (cache == NULL || fn == NULL)
        return KVT_E_INVAL;
    int rc = take(cache, &snapshot);
    if (rc != 0)
        return rc;
    if (roots)
        take_remote_roots(cache, &snapshot);
    numbers(&snapshot, fn, arg);
    fn(arg, "version", 0, kvt_version(), "version of the library");
    fn(arg, "build", 0, kvt_build_info(), "how the library was built");
    fn(arg, "codec.isa", 0, kvt_codec_isa(), "instruction set of the codec");
    fn(arg, "codec.level", 0, kvt_level_name(cache->settings->level), "level of stored blocks");
    fn(arg, "dram.huge_pages", 0, snapshot.huge ? "asked for" : "no",
       "whether dram asks for huge pages");
    fn(arg, "dram.pin_state", 0, snapshot.pin_text,
       "off, pinning, ready, or why the mapping is not held in physical memory");
    fn(arg, "cache.state", 0, state_of(cache),
       "off: every lookup misses, every store does nothing; shadow: stores, loads nothing");
    fn(arg, "gpu.state", 0, snapshot.gpu_state,
       "the GPU of the last pool in GPU memory, or why not");
    fn(arg, "gpu.paths", 0, snapshot.gpu_paths, "which way blocks take between DRAM and the GPU");
    fn(arg, "gpu.gds.state", 0, snapshot.gds_state,
       "how loads from disk reach GPU memory past DRAM, or why they do not");
    fn(arg, "daemon.state", 0, snapshot.remote ? snapshot.daemon_state : "none: store=process",
       "connected, or why there is no kvtierd");
    root_texts(&snapshot, fn, arg);
    plan_numbers(&snapshot, fn, arg);
    struct config_arg to = {fn, arg};
    kvt_config_each(cache->config, config_text, &to);
    free(snapshot.roots_text);
    return 0;
}

int kvt_stats_each(struct kvt_cache *cache, kvt_stats_fn fn, void *arg)
{
    return stats_each(cache, true, fn, arg);
}

size_t kvt_stats_lines(void *arg, char *text, size_t room)
{
    struct kvt_cache *cache = arg;
    struct kvt_client_counters *counters = &cache->counters_seen;
    size_t at = 0;
    /* The owner waits for nobody: where a caller is at work, the numbers of last time do. */
    if (pthread_mutex_trylock(&cache->lock) == 0) {
        *counters = cache->counters;
        pthread_mutex_unlock(&cache->lock);
    }
#define KVT_X(field, name, help)                                   \
    if (at < room) /* what is cut off at the end is not written */ \
        at += (size_t)snprintf(text + at, room - at, "%s %" PRIu64 "\n", name, counters->field);
    KVT_CLIENT_COUNTERS(KVT_X)
#undef KVT_X
    const char *state = state_of(cache);
    struct timespec now; /* for people: the store's own clock counts from some boot */
    clock_gettime(CLOCK_REALTIME, &now);
    if (at < room)
        at += (size_t)snprintf(
            text + at, room - at,
            "writer.pid %d\nwriter.time_s %lld\ncodec.level %s\ncache.state %s\n", (int)cache->pid,
            (long long)now.tv_sec, kvt_level_name(cache->settings->level), state);
    return at < room ? at : 0;
}

struct find {
    const char *name;
    uint64_t value;
    int found;
};

static void find_number(void *arg, const char *name, uint64_t value, const char *text,
                        const char *help)
{
    struct find *find = arg;
    (void)help;
    if (text != NULL || strcmp(name, find->name) != 0)
        return;
    find->value = value;
    find->found = 1;
}

int kvt_stats_get(struct kvt_cache *cache, const char *name, uint64_t *value)
{
    if (cache == NULL || name == NULL || value == NULL)
        return KVT_E_INVAL;
    struct find find = {.name = name};
    const bool root = strncmp(name, "disk.", 5) == 0 && name[5] >= '0' && name[5] <= '9';
    int rc = stats_each(cache, root, find_number, &find);
    if (rc != 0)
        return rc;
    *value = find.value;
    return find.found ? 0 : KVT_E_INVAL;
}
