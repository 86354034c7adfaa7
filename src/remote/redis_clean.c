/* The cleaner of servers: each namespace within remote_ns_cap. A server bounds all of its memory
 * itself (maxmemory); what one namespace takes of it, it does not.
 *
 *   REST -- a period --> ELECT   SET kvt0:cleaner TOKEN NX PX 6 periods; ours already: GET, SET XX
 *   ELECT -- ours -----> SCAN    a node, a page of names, at a rate
 *         -- not ours -> REST
 *   SCAN -- names -----> ASK     OBJECT IDLETIME and MEMORY USAGE of each: neither is a use
 *   ASK -----------------> DROP  UNLINK of those that have to go, and on to SCAN
 *   SCAN -- the end ---> REST    sums are taken; at once from the start where something has to go
 *
 * A walk adds up each namespace, by how long its records have not been used; one that takes more
 * than its cap loses in the next walk what was not used for longest, down to nine tenths. What a
 * server does not tell is replaced: ages by chance, memory by lengths. Walks take a quarter of the
 * time at most, and at most a page of names in PACE_NS.
 *
 * Two cleaners for a moment remove what has to go anyway. Threads: the backend's. Allocates at
 * start only. Does not: look at records, or at what is not one of ours.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "remote/redis_impl.h"

#define PERIOD_NS INT64_C(10000000000)
#define LEASE_PERIODS 6
#define PACE_NS INT64_C(50000000) /* between two pages of names */
#define REST 3                    /* times as long as a walk took */
#define STEP_NS INT64_C(2000000000)

/* ---- names and ages -------------------------------------------------------------------------- */

uint32_t redis_clean_age(int64_t idle_s)
{
    uint64_t idle = idle_s > 0 ? (uint64_t)idle_s : 0;
    uint32_t octave = 0, age;

    if (idle < 4)
        return (uint32_t)idle;
    while (idle >> (octave + 1))
        octave++;
    age = (octave - 1) * 4 + (uint32_t)(idle >> (octave - 2) & 3);
    return KVT_MIN(age, REDIS_CLEAN_AGES - 1);
}

static bool is_hex(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
}

bool redis_clean_is_record(const char *name, uint32_t len)
{
    const uint32_t hash = 5 + 2 * KVT_NS_BYTES + 1;
    uint32_t at = hash, colons = 0;

    if (len < hash + 2 || len >= KVT_REMOTE_NAME_BYTES || memcmp(name, "kvt0:", 5) != 0 ||
        name[hash - 1] != ':')
        return false;
    for (uint32_t i = 5; i < hash - 1; i++)
        if (!is_hex(name[i]))
            return false;
    while (at < len && is_hex(name[at]))
        at++;
    if (at == hash)
        return false;
    for (; at < len; at++) {
        colons += name[at] == ':';
        if (name[at] == ':' ? at + 1 == len || name[at + 1] == ':'
                            : name[at] < '0' || name[at] > '9')
            return false;
    }
    return colons == 2;
}

/* Its place; REDIS_CLEAN_SPACES: there is no room for another one. */
static uint32_t space_of(struct redis *redis, const char *ns)
{
    struct redis_clean *clean = &redis->clean;
    uint32_t at = 0;

    for (int i = 0; i < 8; i++)
        at = at * 31 + (uint8_t)ns[i];
    for (uint32_t tries = 0; tries < REDIS_CLEAN_SPACES; tries++) {
        struct redis_clean_space *space = &clean->spaces[(at + tries) % REDIS_CLEAN_SPACES];

        if (!space->ns[0]) {
            memcpy(space->ns, ns, sizeof(space->ns) - 1);
            clean->space_count++;
        }
        if (memcmp(space->ns, ns, sizeof(space->ns) - 1) == 0)
            return (at + tries) % REDIS_CLEAN_SPACES;
    }
    if (!clean->full_told)
        kvt_log(&redis->log, KVT_LOG_WARN,
                "remote_ns_cap: there are more than %u namespaces on the server: those beyond are "
                "not held to it",
                REDIS_CLEAN_SPACES);
    clean->full_told = true;
    return REDIS_CLEAN_SPACES;
}

/* ---- commands -------------------------------------------------------------------------------- */

static bool send(struct redis *redis, enum redis_kind kind, const char *name, uint32_t len,
                 uint32_t index)
{
    struct redis_op *op = redis_op_new(redis, kind);

    if (!op)
        return false;
    op->clean = true;
    op->name = name;
    op->name_len = len;
    op->index = index;
    op->deadline_ns = redis->now_ns + STEP_NS;
    redis->clean.left++;
    if (kind == REDIS_SCAN)
        redis_give(redis, &redis->nodes[redis->clean.node], op);
    else
        redis_route(redis, op);
    return true;
}

static void send_lease(struct redis *redis, enum redis_kind kind)
{
    (void)send(redis, kind, REDIS_CLEAN_LEASE, sizeof(REDIS_CLEAN_LEASE) - 1, 0);
}

int redis_clean_text(const struct redis *redis, const struct redis_op *op, char *out, size_t room)
{
    const struct redis_clean *clean = &redis->clean;
    long long lease_ms = clean->period_ns * LEASE_PERIODS / 1000000;
    char px[24];

    switch (op->kind) {
    case REDIS_SCAN:
        return snprintf(out, room,
                        "*6\r\n$4\r\nSCAN\r\n$%zu\r\n%s\r\n$5\r\nMATCH\r\n$6\r\nkvt0:*\r\n$5\r\n"
                        "COUNT\r\n$3\r\n512\r\n",
                        strlen(clean->cursor), clean->cursor);
    case REDIS_IDLE:
        return snprintf(out, room, "*3\r\n$6\r\nOBJECT\r\n$8\r\nIDLETIME\r\n$%u\r\n%.*s\r\n",
                        op->name_len, (int)op->name_len, op->name);
    case REDIS_USAGE:
        if (clean->no_memory)
            return snprintf(out, room, "*2\r\n$6\r\nSTRLEN\r\n$%u\r\n%.*s\r\n", op->name_len,
                            (int)op->name_len, op->name);
        return snprintf(out, room, "*3\r\n$6\r\nMEMORY\r\n$5\r\nUSAGE\r\n$%u\r\n%.*s\r\n",
                        op->name_len, (int)op->name_len, op->name);
    case REDIS_HOLDER:
        return snprintf(out, room, "*2\r\n$3\r\nGET\r\n$%u\r\n%s\r\n", op->name_len, op->name);
    case REDIS_LEASE:
    case REDIS_KEEP:
        (void)snprintf(px, sizeof(px), "%lld", lease_ms);
        return snprintf(
            out, room,
            "*6\r\n$3\r\nSET\r\n$%u\r\n%s\r\n$%zu\r\n%s\r\n$2\r\n%s\r\n$2\r\nPX\r\n$%zu\r\n%s\r\n",
            op->name_len, op->name, strlen(clean->token), clean->token,
            op->kind == REDIS_LEASE ? "NX" : "XX", strlen(px), px);
    default:
        return -1;
    }
}

static void not_allowed(struct redis *redis, const char *what)
{
    if (!redis->clean.told)
        kvt_log(&redis->log, KVT_LOG_WARN,
                "remote_ns_cap: the server does not let us %s (allow scan, unlink, "
                "object|idletime and memory|usage; an LFU policy knows no times)",
                what);
    redis->clean.told = true;
}

void redis_clean_op_end(struct redis *redis, const struct redis_op *op, int status, int64_t number)
{
    struct redis_clean *clean = &redis->clean;
    bool good = status == 0;

    if (clean->left)
        clean->left--;
    switch (op->kind) {
    case REDIS_IDLE:
        if (good)
            clean->names[op->index].idle_s = number;
        else if (status == -EIO || status == -EACCES)
            clean->no_idle = true;
        break;
    case REDIS_USAGE:
        if (good)
            clean->names[op->index].bytes = number;
        else if (status == -EIO || status == -EACCES)
            clean->no_memory = true;
        break;
    case REDIS_LEASE:
    case REDIS_KEEP:
        clean->ours = good;
        break;
    case REDIS_HOLDER:
        clean->ours = good && strcmp(clean->holder, clean->token) == 0;
        if (clean->ours)
            send_lease(redis, REDIS_KEEP);
        break;
    case REDIS_SCAN: /* with 0 it has been taken already */
        if (status == -EACCES)
            not_allowed(redis, "walk its keys");
        clean->walking = clean->walking && good;
        break;
    case REDIS_DEL:
        if (status == -EACCES)
            not_allowed(redis, "remove records");
        clean->walking = clean->walking && good;
        break;
    default:
        break;
    }
}

/* ---- a walk ---------------------------------------------------------------------------------- */

static void walk_begin(struct redis *redis)
{
    struct redis_clean *clean = &redis->clean;
    bool removes = false;

    for (uint32_t i = 0; i < REDIS_CLEAN_SPACES; i++) {
        struct redis_clean_space *space = &clean->spaces[i];

        removes = removes || space->to_go;
        space->bytes = 0;
        memset(space->ages, 0, sizeof(space->ages));
    }
    if (!removes) { /* what has gone is forgotten, and chance takes others */
        memset(clean->spaces, 0, REDIS_CLEAN_SPACES * sizeof(*clean->spaces));
        clean->space_count = 0;
        clean->salt = clean->salt * 5 + 17;
        clean->no_idle = clean->no_memory = false; /* it may have been given the right */
    }
    clean->walking = true;
    clean->node = 0;
    clean->began_ns = redis->now_ns;
    memcpy(clean->cursor, "0", 2);
}

/* What has to go of a namespace, and what is too young for it. */
static bool judge(const struct redis_clean *clean, struct redis_clean_space *space)
{
    uint64_t seen = 0;

    space->to_go = 0;
    if (space->bytes <= clean->cap_bytes)
        return false;
    space->to_go = space->bytes - clean->cap_bytes / 10 * 9;
    space->limit = REDIS_CLEAN_AGES;
    while (space->limit > 0 && seen < space->to_go)
        seen += space->ages[--space->limit];
    return true;
}

static void walk_end(struct redis *redis)
{
    struct redis_clean *clean = &redis->clean;
    bool again = false;

    for (uint32_t i = 0; i < REDIS_CLEAN_SPACES; i++)
        if (clean->spaces[i].ns[0])
            again = judge(clean, &clean->spaces[i]) || again;
    clean->walking = false;
    clean->walk_ns =
        again ? redis->now_ns : redis->now_ns + REST * (redis->now_ns - clean->began_ns);
    clean->state = CLEAN_REST;
    clean->next_ns = again ? redis->now_ns : redis->now_ns + clean->period_ns;
}

/* A page of names. false: it makes no sense. */
static bool take_names(struct redis *redis, const char *bytes, size_t len)
{
    struct redis_clean *clean = &redis->clean;
    struct kvt_resp_head head;
    const char *text;
    size_t text_len, at;
    long used = kvt_resp_head(bytes, len, &head);

    if (used <= 0 || head.type != '*' || head.number != 2)
        return false;
    at = (size_t)used;
    used = kvt_resp_string(bytes + at, len - at, &text, &text_len);
    if (used <= 0 || text_len >= sizeof(clean->cursor))
        return false;
    memcpy(clean->cursor, text, text_len);
    clean->cursor[text_len] = '\0';
    at += (size_t)used;
    used = kvt_resp_head(bytes + at, len - at, &head);
    if (used <= 0 || head.type != '*')
        return false;
    at += (size_t)used;
    memcpy(clean->text, bytes, len);
    for (int64_t i = 0; i < head.number; i++) {
        struct redis_clean_name *name = &clean->names[clean->name_count];

        used = kvt_resp_string(clean->text + at, len - at, &text, &text_len);
        if (used <= 0)
            return false;
        at += (size_t)used;
        if (clean->name_count == REDIS_CLEAN_NAMES || text_len >= KVT_REMOTE_NAME_BYTES ||
            !redis_clean_is_record(text, (uint32_t)text_len))
            continue;
        *name = (struct redis_clean_name){.at = (uint32_t)(text - clean->text),
                                          .len = (uint32_t)text_len,
                                          .space = space_of(redis, text + 5),
                                          .idle_s = -1,
                                          .bytes = -1};
        clean->name_count += name->space < REDIS_CLEAN_SPACES;
    }
    return true;
}

void redis_clean_scan_reply(struct redis *redis, const char *bytes, size_t len)
{
    struct redis_clean *clean = &redis->clean;

    clean->name_count = 0;
    if (!take_names(redis, bytes, len)) {
        clean->name_count = 0;
        clean->walking = false;
    }
}

static void ask(struct redis *redis, bool ages)
{
    struct redis_clean *clean = &redis->clean;

    clean->state = CLEAN_ASK;
    clean->by_length = clean->no_memory;
    for (uint32_t i = 0; i < clean->name_count; i++) {
        const struct redis_clean_name *name = &clean->names[i];

        if (ages && !clean->no_idle)
            (void)send(redis, REDIS_IDLE, clean->text + name->at, name->len, i);
        (void)send(redis, REDIS_USAGE, clean->text + name->at, name->len, i);
    }
}

/* All is known of a page of names that can be: what goes, and the sums of what stays. */
static void drop(struct redis *redis)
{
    struct redis_clean *clean = &redis->clean;

    for (uint32_t i = 0; i < clean->name_count; i++) {
        const struct redis_clean_name *name = &clean->names[i];
        struct redis_clean_space *space = &clean->spaces[name->space];
        const char *text = clean->text + name->at;
        uint64_t bytes = name->bytes > 0 ? (uint64_t)name->bytes : 0;
        uint32_t age = name->idle_s >= 0
                           ? redis_clean_age(name->idle_s)
                           : (kvt_resp_slot(text, name->len) + clean->salt) % REDIS_CLEAN_AGES;

        if (!bytes)
            continue; /* it has gone, or nothing is known of it */
        if (space->to_go && age >= space->limit && send(redis, REDIS_DEL, text, name->len, i)) {
            space->to_go -= KVT_MIN(bytes, space->to_go);
            continue;
        }
        space->bytes += bytes;
        space->ages[age] += bytes;
    }
}

/* The next page, of the next node that holds keys. */
static void scan(struct redis *redis)
{
    struct redis_clean *clean = &redis->clean;

    while (clean->node < REDIS_NODES && !redis_node_serves(redis, clean->node))
        clean->node++;
    if (clean->node == REDIS_NODES) {
        walk_end(redis);
        return;
    }
    clean->pace_ns = redis->now_ns + PACE_NS;
    clean->name_count = 0;
    (void)send(redis, REDIS_SCAN, NULL, 0, 0);
    clean->state = CLEAN_SCAN;
}

/* ---- its turn -------------------------------------------------------------------------------- */

static void elect(struct redis *redis)
{
    redis->clean.state = CLEAN_ELECT;
    redis->clean.renewed_ns = redis->now_ns;
    send_lease(redis, redis->clean.ours ? REDIS_HOLDER : REDIS_LEASE);
}

static void rest(struct redis *redis)
{
    redis->clean.walking = false;
    redis->clean.state = CLEAN_REST;
    redis->clean.next_ns = redis->now_ns + redis->clean.period_ns;
}

static void elected(struct redis *redis)
{
    struct redis_clean *clean = &redis->clean;

    if (!clean->ours || (!clean->walking && redis->now_ns < clean->walk_ns)) {
        rest(redis);
        return;
    }
    if (!clean->walking)
        walk_begin(redis);
    scan(redis);
}

void redis_clean_turn(struct redis *redis)
{
    struct redis_clean *clean = &redis->clean;

    if (!clean->cap_bytes || clean->left || redis->mode == MODE_UNKNOWN)
        return;
    switch (clean->state) {
    case CLEAN_REST:
        if (redis->now_ns >= clean->next_ns)
            elect(redis);
        return;
    case CLEAN_ELECT:
        elected(redis);
        return;
    case CLEAN_SCAN:
        if (!clean->walking) { /* a node is down, or it may not be walked: the sums are worth
                                  nothing */
            rest(redis);
            return;
        }
        ask(redis, true);
        return;
    case CLEAN_ASK:
        if (clean->no_memory && !clean->by_length) { /* it has just said so */
            ask(redis, false);
            return;
        }
        clean->state = CLEAN_DROP;
        if (clean->no_idle)
            not_allowed(redis, "know how long a record was not used: what goes is left to chance");
        drop(redis);
        return;
    case CLEAN_DROP:
        if (!clean->walking) {
            rest(redis);
            return;
        }
        if (redis->now_ns < clean->pace_ns)
            return;
        if (strcmp(clean->cursor, "0") == 0) /* the walk of this node is over, and begins so */
            clean->node++;
        if (redis->now_ns - clean->renewed_ns > clean->period_ns)
            elect(redis);
        else
            scan(redis);
        return;
    }
}

int redis_clean_init(struct redis *redis, uint64_t cap_bytes, int64_t period_ns)
{
    struct redis_clean *clean = &redis->clean;
    char node[65] = "";

    if (!cap_bytes)
        return 0;
    if (gethostname(node, sizeof(node) - 1) != 0)
        node[0] = '\0';
    for (char *at = node; *at; at++)
        if (*at <= ' ' || *at > '~')
            *at = '_';
    (void)snprintf(clean->token, sizeof(clean->token), "%.40s.%ld.%llx", node, (long)getpid(),
                   (unsigned long long)kvt_clock_now(&redis->clock));
    clean->cap_bytes = cap_bytes;
    clean->period_ns = period_ns ? period_ns : PERIOD_NS;
    clean->text = malloc(REDIS_AGG);
    clean->names = calloc(REDIS_CLEAN_NAMES, sizeof(*clean->names));
    clean->spaces = calloc(REDIS_CLEAN_SPACES, sizeof(*clean->spaces));
    redis->clean_agg.bytes = malloc(REDIS_AGG);
    return clean->text && clean->names && clean->spaces && redis->clean_agg.bytes ? 0 : -ENOMEM;
}

void redis_clean_free(struct redis *redis)
{
    free(redis->clean.text);
    free(redis->clean.names);
    free(redis->clean.spaces);
    free(redis->clean_agg.bytes);
}
