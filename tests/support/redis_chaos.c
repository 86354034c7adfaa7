/* See redis_chaos.h. */
#include "support/redis_chaos.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/clock.h"
#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "remote/resp.h"
#include "support/remote_help.h"
#include "support/rig.h"

#define NS 0x44
#define KEYS 200u
#define PAGES 2u
#define BYTES (PAGES * KVT_PAGE_BYTES)
#define SLOTS 32u
#define PROBES 8u
#define DEADLINE_NS INT64_C(300000000)
#define FILL 0xEE

struct one { /* a request under way */
    struct kvt_remote_req req;
    uint64_t number;
    struct kvt_full_key keys[PROBES];
    struct kvt_remote_found found[PROBES];
    uint8_t *record;
    bool busy;
};

struct redis_load {
    struct remote_help help;
    struct one ones[SLOTS];
    uint8_t *memory, *want;
    struct kvt_rng rng;
    struct redis_load_counts counts; /* the thread's until it has ended */
    _Atomic bool stop;
    pthread_t thread;
};

static int64_t now(void)
{
    struct kvt_clock clock = kvt_clock_system();

    return kvt_clock_now(&clock);
}

/* ---- the load ------------------------------------------------------------------------------ */

/* Nobody writes to memory that has come back. */
static void look_untouched(struct redis_load *load, const struct one *one)
{
    for (uint32_t i = 0; i < BYTES; i++)
        if (one->record[i] != FILL) {
            load->counts.touched++;
            return;
        }
}

static void begin(struct redis_load *load, struct one *one)
{
    uint64_t draw = kvt_rng_below(&load->rng, 400);
    enum kvt_remote_op op = draw < 200   ? KVT_REMOTE_GET
                            : draw < 330 ? KVT_REMOTE_PUT
                            : draw < 370 ? KVT_REMOTE_PROBE
                            : draw < 399 ? KVT_REMOTE_DROP
                                         : KVT_REMOTE_DROP_NS;

    look_untouched(load, one);
    one->number = 1 + kvt_rng_below(&load->rng, KEYS);
    for (uint32_t i = 0; i < PROBES; i++)
        one->keys[i] = remote_help_key(NS, one->number + i);
    one->req =
        (struct kvt_remote_req){.op = op,
                                .count = op == KVT_REMOTE_PROBE ? PROBES : 1,
                                .keys = one->keys,
                                .found = one->found,
                                .record = one->record,
                                .record_bytes = BYTES,
                                .sequence = op == KVT_REMOTE_GET ? 7 : 0,
                                .map = KVT_LEVEL_KV4,
                                .replace = op == KVT_REMOTE_PUT && kvt_rng_below(&load->rng, 2),
                                .deadline_ns = now() + DEADLINE_NS,
                                .user = one};
    if (op == KVT_REMOTE_PUT)
        remote_help_record(NS, one->number, PAGES, one->record);
    one->busy = load->help.remote->ops->submit(load->help.remote, &one->req) == 0;
}

static void compare(struct redis_load *load, const struct one *one)
{
    const size_t head = sizeof(struct kvt_record_header);

    load->counts.got++;
    remote_help_record(NS, one->number, PAGES, load->want);
    load->counts.wrong += kvt_record_verify(one->record, BYTES, one->keys, 0) != 0 ||
                          memcmp(one->record + head, load->want + head, BYTES - head) != 0;
}

static void compare_found(struct redis_load *load, const struct one *one)
{
    for (uint32_t i = 0; i < PROBES; i++) {
        const struct kvt_record_header *header = &one->found[i].header;

        if (one->found[i].status)
            continue;
        load->counts.found++;
        load->counts.wrong += kvt_record_header_check(header) != 0 ||
                              memcmp(&header->key, &one->keys[i], sizeof(header->key)) != 0;
    }
}

static void ended(struct redis_load *load, struct one *one)
{
    struct redis_load_counts *counts = &load->counts;
    int status = one->req.status;

    counts->late_ns = KVT_MAX(counts->late_ns, now() - one->req.deadline_ns);
    if (one->req.op == KVT_REMOTE_PROBE)
        compare_found(load, one);
    else if (status == KVT_E_MISS || status == KVT_E_STALE)
        counts->missed++;
    else if (status == KVT_E_EXISTS)
        counts->exists++;
    else if (status)
        counts->failed++;
    else if (one->req.op == KVT_REMOTE_GET)
        compare(load, one);
    else if (one->req.op == KVT_REMOTE_PUT)
        counts->put++;
    else
        counts->dropped += one->req.removed;
    memset(one->record, FILL, BYTES);
    one->busy = false;
}

static void *load_thread(void *arg)
{
    struct redis_load *load = arg;
    const struct kvt_remote_ops *ops = load->help.remote->ops;

    while (!atomic_load_explicit(&load->stop, memory_order_relaxed)) {
        struct pollfd fd = {.fd = ops->event_fd(load->help.remote), .events = POLLIN};
        struct kvt_remote_req *done[SLOTS];
        uint32_t count;

        for (uint32_t i = 0; i < SLOTS; i++)
            if (!load->ones[i].busy)
                begin(load, &load->ones[i]);
        (void)poll(&fd, 1, 20);
        while ((count = ops->reap(load->help.remote, done, SLOTS)) != 0)
            for (uint32_t i = 0; i < count; i++)
                ended(load, done[i]->user);
    }
    return NULL;
}

struct redis_load *redis_load_start(const char *url, uint64_t seed)
{
    struct redis_load *load = calloc(1, sizeof(*load));

    assert_non_null(load);
    load->memory = aligned_alloc(KVT_PAGE_BYTES, (SLOTS + 1) * BYTES);
    assert_non_null(load->memory);
    memset(load->memory, FILL, (SLOTS + 1) * BYTES);
    for (uint32_t i = 0; i < SLOTS; i++)
        load->ones[i].record = load->memory + (size_t)i * BYTES;
    load->want = load->memory + (size_t)SLOTS * BYTES;
    load->rng.state = seed;
    remote_help_open(&load->help, url, NULL, NULL, NULL);
    assert_int_equal(pthread_create(&load->thread, NULL, load_thread, load), 0);
    return load;
}

struct redis_load_counts redis_load_stop(struct redis_load *load)
{
    struct redis_load_counts counts;

    atomic_store_explicit(&load->stop, true, memory_order_relaxed);
    assert_int_equal(pthread_join(load->thread, NULL), 0);
    remote_help_close(&load->help); /* from here on nothing is touched */
    for (uint32_t i = 0; i < SLOTS; i++)
        if (!load->ones[i].busy)
            look_untouched(load, &load->ones[i]);
    counts = load->counts;
    free(load->memory);
    free(load);
    return counts;
}

/* ---- events -------------------------------------------------------------------------------- */

static bool says(const struct redis_rig *rig, unsigned node, const char *words, const char *want)
{
    char out[8192];

    return rig->pids[node] && redis_rig_cli(rig, node, words, out, sizeof(out)) == 0 &&
           strstr(out, want) != NULL;
}

static bool is_master(const struct redis_rig *rig, unsigned node)
{
    return says(rig, node, "ROLE", "master");
}

static unsigned masters(const struct redis_rig *rig, unsigned out[REDIS_RIG_NODES])
{
    unsigned count = 0;

    for (unsigned i = 0; i < rig->count; i++)
        if (is_master(rig, i))
            out[count++] = i;
    return count;
}

static void quick_to_fail_over(const struct redis_rig *rig, unsigned node)
{
    char out[256];

    (void)redis_rig_cli(rig, node, "CONFIG SET cluster-node-timeout 1000", out, sizeof(out));
}

static bool whole(const struct redis_rig *rig)
{
    for (unsigned i = 0; i < rig->count; i++)
        if (!says(rig, i, "CLUSTER INFO", "cluster_state:ok"))
            return false;
    return true;
}

/* Slots that a death in the middle of a move has left to nobody are given to somebody, as who
 * operates a cluster would. */
static void mend(const struct redis_rig *rig)
{
    static char out[1u << 20];
    char words[128];
    unsigned all[REDIS_RIG_NODES];

    if (!masters(rig, all))
        return;
    snprintf(words, sizeof(words), "--cluster fix 127.0.0.1:%d --cluster-yes", rig->ports[all[0]]);
    (void)redis_rig_cli(rig, all[0], words, out, sizeof(out));
    print_message("           the cluster was mended by hand\n");
}

void redis_chaos_ready(const struct redis_rig *rig)
{
    for (unsigned i = 0; i < rig->count; i++)
        quick_to_fail_over(rig, i);
    for (int tries = 0; tries < 20; tries++) {
        for (int i = 0; i < 50; i++) { /* ten seconds, about */
            if (whole(rig))
                return;
            rig_sleep_ms(150);
        }
        mend(rig);
    }
    fail_msg("the cluster is not whole");
}

void redis_chaos_kill(struct redis_rig *rig, struct kvt_rng *rng, bool master, bool at_once)
{
    unsigned all[REDIS_RIG_NODES], before = masters(rig, all);
    unsigned victim = master && before ? all[kvt_rng_below(rng, before)]
                                       : (unsigned)kvt_rng_below(rng, rig->count);
    bool was_master = is_master(rig, victim);

    rig_sleep_ms((unsigned)kvt_rng_below(rng, 100));
    redis_rig_kill(rig, victim);
    for (int i = 0; i < 50 && !at_once && was_master; i++) { /* ten seconds, about */
        unsigned left[REDIS_RIG_NODES];

        if (masters(rig, left) >= before)
            break;
        rig_sleep_ms(150);
    }
    redis_rig_run(rig, victim);
    redis_chaos_ready(rig);
}

/* The master that has a key's slot; `count` of them: none. */
static unsigned owner(const struct redis_rig *rig, const unsigned *all, unsigned count,
                      const char *name)
{
    char words[256], out[512];

    snprintf(words, sizeof(words), "GETRANGE %s 0 3", name);
    for (unsigned i = 0; i < count; i++)
        if (redis_rig_cli(rig, all[i], words, out, sizeof(out)) == 0 && !strstr(out, "MOVED"))
            return i;
    return count;
}

/* All keys that are in it now, one after the other. */
static void move_keys(const struct redis_rig *rig, unsigned from, unsigned to, unsigned slot)
{
    char words[512], names[8192], out[512], *rest = NULL;

    snprintf(words, sizeof(words), "CLUSTER GETKEYSINSLOT %u 50", slot);
    if (redis_rig_cli(rig, from, words, names, sizeof(names)) != 0)
        return;
    for (char *name = strtok_r(names, "\n", &rest); name; name = strtok_r(NULL, "\n", &rest)) {
        snprintf(words, sizeof(words), "MIGRATE 127.0.0.1 %d %s 0 20000 REPLACE", rig->ports[to],
                 name);
        (void)redis_rig_cli(rig, from, words, out, sizeof(out));
    }
}

bool redis_chaos_move(const struct redis_rig *rig, struct kvt_rng *rng)
{
    char name[KVT_REMOTE_NAME_BYTES], ids[2][64], words[512], out[512];
    unsigned all[REDIS_RIG_NODES], count = masters(rig, all), at, from, to;
    struct kvt_full_key key = remote_help_key(NS, 1 + kvt_rng_below(rng, KEYS));
    unsigned slot = kvt_resp_slot(name, kvt_remote_name(&key, name));
    bool good;

    at = owner(rig, all, count, name);
    if (at == count || count < 2)
        return false;
    from = all[at];
    to = all[(at + 1 + kvt_rng_below(rng, count - 1)) % count];
    if (redis_rig_cli(rig, from, "CLUSTER MYID", ids[0], sizeof(ids[0])) != 0 ||
        redis_rig_cli(rig, to, "CLUSTER MYID", ids[1], sizeof(ids[1])) != 0)
        return false;
    snprintf(words, sizeof(words), "CLUSTER SETSLOT %u IMPORTING %s", slot, ids[0]);
    (void)redis_rig_cli(rig, to, words, out, sizeof(out));
    snprintf(words, sizeof(words), "CLUSTER SETSLOT %u MIGRATING %s", slot, ids[1]);
    (void)redis_rig_cli(rig, from, words, out, sizeof(out));
    for (int i = 0; i < 20; i++) {
        rig_sleep_ms((unsigned)kvt_rng_below(rng, 60));
        snprintf(words, sizeof(words), "CLUSTER COUNTKEYSINSLOT %u", slot);
        if (i > 1 && redis_rig_number(rig, from, words) == 0)
            break;
        move_keys(rig, from, to, slot);
    }
    snprintf(words, sizeof(words), "CLUSTER SETSLOT %u NODE %s", slot, ids[1]);
    good = redis_rig_cli(rig, to, words, out, sizeof(out)) == 0 && strcmp(out, "OK") == 0;
    good = redis_rig_cli(rig, from, words, out, sizeof(out)) == 0 && strcmp(out, "OK") == 0 && good;
    for (unsigned i = 0; i < count; i++)
        if (all[i] != from && all[i] != to)
            (void)redis_rig_cli(rig, all[i], words, out, sizeof(out));
    return good;
}
