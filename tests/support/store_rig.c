/* See store_rig.h. */
#include "support/store_rig.h"

#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "support/fault_io.h"

#define CLIENT 1u
#define SETTLE_STEPS 100000
#define SETTLE_AHEAD_NS 20000000 /* timers within 20 ms belong to work in progress */

/* KVT_TEST_LOG: what the store says. */
static void rig_log(void *ctx, int level, const char *message)
{
    (void)ctx;
    print_message("log %d: %s\n", level, message);
}

static int64_t rig_now(void *ctx)
{
    return ((struct rig *)ctx)->now_ns;
}

static int64_t rig_wall(void *ctx)
{
    const struct rig *rig = ctx;

    return RIG_WALL_NS + rig->now_ns + rig->wall_ahead_ns;
}

static void rig_take_reply(void *ctx, uint32_t client, const struct kvt_msg *msg)
{
    struct rig *rig = ctx;
    struct kvt_msg *copy;

    if (msg->op == KVT_OP_GRANT && rig->on_grant &&
        rig->on_grant(rig->on_grant_ctx, client, (const struct kvt_msg_grant *)msg))
        return;
    copy = malloc(msg->bytes);
    assert_non_null(copy);
    assert_true(rig->reply_count < RIG_REPLIES_MAX);
    memcpy(copy, msg, msg->bytes);
    rig->reply_clients[rig->reply_count] = client;
    rig->replies[rig->reply_count++] = copy;
}

void rig_forget_replies(struct rig *rig)
{
    for (uint32_t i = 0; i < rig->reply_count; i++)
        free(rig->replies[i]);
    rig->reply_count = 0;
}

struct rig_options rig_defaults(void)
{
    return (struct rig_options){.cache_bytes = 1u << 20,
                                .staging_bytes = 256u << 10,
                                .disk_cap_bytes = 64u << 20,
                                .write_queue_bytes = 512u << 10,
                                .pin_bytes_max = 256u << 10};
}

static int start(struct rig *rig)
{
    const struct rig_options *o = &rig->options;
    struct kvt_store_params params = {
        .arena = rig->arena,
        .arena_bytes = rig->arena_bytes,
        .staging_bytes = o->staging_bytes,
        .write_queue_bytes = o->write_queue_bytes,
        .pin_bytes_max = o->pin_bytes_max,
        .scrub_bytes_per_s = o->scrub_bytes_per_s,
        .blocks_max = o->blocks_max,
        .write = o->write,
        .ttl_ns = o->ttl_ns,
        .ns_bytes_max = o->ns_bytes_max,
        .ns_rules = o->ns_rules,
        .ns_rule_count = o->ns_rule_count,
        .admit = o->admit,
        .admit_permille = o->admit_permille,
        .roots_pending = o->roots_pending,
        .remote = o->remote,
        .remote_deadline_ns = RIG_REMOTE_DEADLINE_NS,
        .remote_queue_bytes = o->remote_queue_bytes ? o->remote_queue_bytes : 1u << 20,
        .remote_write = o->remote_write < 0 ? KVT_REMOTE_WRITE_OFF
                        : o->remote_write   ? o->remote_write
                                            : KVT_REMOTE_WRITE_SECOND,
        .root_count = rig->second ? 2
                      : rig->io   ? 1
                                  : 0,
        .seed = 42,
        .test_collide = o->collide,
        .clock = {.now_ns = rig_now, .ctx = rig},
        .wall = {.now_ns = rig_wall, .ctx = rig},
        .log = {getenv("KVT_TEST_LOG") ? rig_log : NULL, NULL, KVT_LOG_DEBUG},
        .reply = rig_take_reply,
        .reply_ctx = rig,
    };

    for (uint32_t i = 0; i < params.root_count; i++) {
        params.roots[i].io = (i == 1) != rig->swap_roots ? rig->second : rig->io;
        params.roots[i].cap_bytes = o->disk_cap_bytes;
        params.roots[i].write_bytes_day = o->write_bytes_day;
    }
    return kvt_store_open(&params, &rig->store, NULL);
}

static struct kvt_io *medium_new(const struct rig_options *options)
{
    struct kvt_io *io = NULL;

    assert_int_equal(kvt_io_mem_new(options->disk_real_bytes ? options->disk_real_bytes
                                                             : options->disk_cap_bytes * 2,
                                    &io),
                     0);
    return io;
}

/* The medium behind a fault injector. */
static struct kvt_io *with_faults(struct kvt_io *medium)
{
    struct kvt_io *io = fault_io_new(medium, 7);

    assert_non_null(io);
    return io;
}

int rig_try_open(struct rig *rig, const struct rig_options *options, struct kvt_io *io)
{
    memset(rig, 0, sizeof(*rig));
    rig->options = *options;
    rig->check_each_step = true;
    rig->now_ns = 1000000000;
    rig->arena_bytes = options->cache_bytes + options->staging_bytes;
    if (rig->arena_bytes) {
        rig->arena = aligned_alloc(4096, rig->arena_bytes);
        assert_non_null(rig->arena);
        memset(rig->arena, 0xA5, rig->arena_bytes);
    }
    if (!io && options->disk_cap_bytes)
        io = medium_new(options);
    rig->io = io ? with_faults(io) : NULL;
    if (options->two_roots)
        rig->second = with_faults(medium_new(options));
    return start(rig);
}

void rig_open(struct rig *rig, const struct rig_options *options, struct kvt_io *io)
{
    assert_int_equal(rig_try_open(rig, options, io), 0);
}

void rig_close(struct rig *rig)
{
    if (rig->store)
        kvt_store_close(rig->store, 1000000000);
    if (rig->io)
        rig->io->ops->destroy(rig->io);
    if (rig->second)
        rig->second->ops->destroy(rig->second);
    rig_forget_replies(rig);
    free(rig->arena);
    memset(rig, 0, sizeof(*rig));
}

static void read_statfile(struct rig *rig)
{
    static _Alignas(4096) char page[16384];
    int file;

    if (!rig->io)
        return;
    file = rig->io->ops->open(rig->io, "stats", KVT_IO_OPEN_READ_ONLY);
    assert_true(file >= 0);
    assert_int_equal(kvt_io_read_now(rig->io, file, 0, page, sizeof(page)), sizeof(page));
    rig->io->ops->close(rig->io, file);
    memcpy(rig->stats_text, page, sizeof(page));
}

uint64_t rig_filed_stat(const struct rig *rig, const char *name)
{
    size_t len = strlen(name);

    for (const char *line = rig->stats_text; line && *line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, len) == 0 && line[len] == ' ')
            return strtoull(line + len, NULL, 10);
    }
    fail_msg("the file stats has no %s", name);
    return 0;
}

void rig_start(struct rig *rig)
{
    rig->held_count = 0;
    rig_forget_replies(rig);
    if (rig->arena)
        memset(rig->arena, 0xA5, rig->arena_bytes); /* nothing is remembered in DRAM */
    assert_int_equal(start(rig), 0);
    rig_settle(rig);
}

void rig_reopen(struct rig *rig)
{
    kvt_store_close(rig->store, 1000000000);
    read_statfile(rig);
    rig->store = NULL;
    rig_start(rig);
}

void rig_crash(struct rig *rig)
{
    struct kvt_io *after = NULL, *second = NULL;

    if (rig->io) {
        assert_int_equal(kvt_io_mem_clone(fault_io_inner(rig->io), &after), 0);
        fault_io_hold(rig->io, 0);
    }
    if (rig->second)
        assert_int_equal(kvt_io_mem_clone(fault_io_inner(rig->second), &second), 0);
    rig->held_io = false;
    kvt_store_close(rig->store, 0);
    rig->store = NULL;
    if (rig->io)
        rig->io->ops->destroy(rig->io);
    rig->io = after ? with_faults(after) : NULL;
    if (rig->second)
        rig->second->ops->destroy(rig->second);
    rig->second = second ? with_faults(second) : NULL;
    rig_start(rig);
}

void rig_check(struct rig *rig)
{
    char why[256] = "";

    if (kvt_store_check(rig->store, why, sizeof(why)) != 0)
        fail_msg("%s", why);
}

void rig_hold(struct rig *rig, bool on)
{
    if (!rig->io)
        return;
    fault_io_hold(rig->io, on);
    rig->held_io = on;
    rig_settle(rig);
}

void rig_release_io(struct rig *rig, unsigned count, bool backwards)
{
    if (rig->io)
        fault_io_release(rig->io, count, backwards);
    rig_settle(rig);
}

void rig_settle(struct rig *rig)
{
    for (int step = 0; rig->held_io && step < 4; step++)
        kvt_store_run(rig->store);
    if (rig->held_io) {
        if (rig->check_each_step)
            rig_check(rig);
        return;
    }
    for (int step = 0, quiet = 0; step < SETTLE_STEPS; step++) {
        int64_t next = kvt_store_run(rig->store);

        quiet = next > rig->now_ns + SETTLE_AHEAD_NS ? quiet + 1 : 0;
        /* a shared tier that is no thread has what was submitted in the next run */
        if (quiet && quiet < 64 && rig->options.remote)
            continue;
        if (quiet) {
            if (rig->check_each_step)
                rig_check(rig);
            return;
        }
        if (next > rig->now_ns)
            rig->now_ns = next;
    }
    fail_msg("the store does not settle");
}

void rig_advance(struct rig *rig, int64_t ns)
{
    rig->now_ns += ns;
    rig_settle(rig);
}

int rig_send(struct rig *rig, uint32_t client, const void *msg)
{
    return kvt_store_handle(rig->store, client, msg);
}

const struct kvt_msg *rig_reply(struct rig *rig, uint64_t cookie)
{
    for (uint32_t i = 0; i < rig->reply_count; i++)
        if (rig->replies[i]->cookie == cookie)
            return rig->replies[i];
    return NULL;
}

/* A zeroed request on the heap, header filled. */
static void *request(struct rig *rig, int op, size_t bytes, uint32_t ns, uint32_t count)
{
    struct kvt_msg *msg = calloc(1, (bytes + 7) / 8 * 8);

    assert_non_null(msg);
    msg->bytes = (uint32_t)((bytes + 7) / 8 * 8);
    msg->op = (uint16_t)op;
    msg->cookie = ++rig->cookie;
    msg->ns = ns;
    msg->count = count;
    return msg;
}

/* Send, settle, and return the reply, which must be there. */
static const struct kvt_msg *ask(struct rig *rig, uint32_t client, void *msg)
{
    uint64_t cookie = ((struct kvt_msg *)msg)->cookie;
    const struct kvt_msg *reply;

    assert_int_equal(rig_send(rig, client, msg), 0);
    free(msg);
    rig_settle(rig);
    reply = rig_reply(rig, cookie);
    for (int seconds = 0; rig->patient && !reply && seconds < 60; seconds++) {
        rig_advance(rig, 1000000000);
        reply = rig_reply(rig, cookie);
    }
    assert_non_null(reply);
    return reply;
}

int rig_try_ns(struct rig *rig, uint8_t name, const uint32_t pages[7], uint32_t *handle)
{
    struct kvt_msg_ns_open *msg = request(rig, KVT_OP_NS_OPEN, sizeof(*msg), 0, 0);
    const struct kvt_msg *reply;

    memset(msg->id, name, sizeof(msg->id));
    msg->block_tokens = 16;
    msg->group = rig->group;
    msg->quota_bytes = rig->ns_quota;
    msg->ttl_ns = rig->ns_ttl_ns;
    if (rig->label)
        snprintf(msg->label, sizeof(msg->label), "%s", rig->label);
    for (int map = 1; map <= 6; map++)
        msg->record_bytes[map] = pages[map] * 4096;
    rig_forget_replies(rig);
    reply = ask(rig, CLIENT, msg);
    *handle = reply->ns;
    if (reply->status == 0)
        memset(rig->ns_ids[(reply->ns - 1) % 16], name, 16);
    return reply->status;
}

uint32_t rig_ns(struct rig *rig, uint8_t name, const uint32_t pages[7])
{
    uint32_t handle;

    assert_int_equal(rig_try_ns(rig, name, pages, &handle), 0);
    return handle;
}

struct kvt_msg_key rig_key(uint64_t number)
{
    struct kvt_msg_key key = {.hash_len = 8};

    memcpy(key.hash, &number, sizeof(number));
    return key;
}

static struct kvt_msg_key key_of(const struct rig *rig, uint64_t number)
{
    struct kvt_msg_key key = rig_key(number);

    key.group = rig->group;
    return key;
}

void rig_alloc(struct rig *rig, uint32_t client, uint32_t ns, const uint64_t *numbers, uint32_t n,
               uint64_t parent, uint8_t map, uint8_t replace, struct kvt_alloc_entry *entries)
{
    struct kvt_msg_alloc *msg = request(rig, KVT_OP_ALLOC, sizeof(*msg) + n * 40, ns, n);
    const struct kvt_msg_alloc_reply *reply;

    msg->map = map;
    msg->replace = replace;
    msg->block_tokens = 16;
    msg->write = rig->write;
    if (parent) {
        msg->parent_len = 8;
        memcpy(msg->parent, &parent, 8);
    }
    for (uint32_t i = 0; i < n; i++)
        msg->keys[i] = key_of(rig, numbers[i]);
    rig_forget_replies(rig);
    reply = (const struct kvt_msg_alloc_reply *)ask(rig, client, msg);
    assert_int_equal(reply->msg.status, 0);
    assert_int_equal(reply->msg.count, n);
    memcpy(entries, reply->entries, n * sizeof(*entries));
}

static uint64_t content_seed(const struct rig *rig, uint32_t ns, uint64_t number, uint8_t map)
{
    return number * 1000003u + rig_ns_id(rig, ns)[0] * 101u + map;
}

/* The bytes that block `number` has at a map: PRNG(namespace, key, map). */
static void content_fill(struct rig *rig, uint32_t ns, uint64_t number, uint8_t map, uint8_t *out,
                         uint32_t bytes)
{
    struct kvt_rng rng = {content_seed(rig, ns, number, map)};

    for (uint32_t i = 0; i < bytes; i += 8) {
        uint64_t word = kvt_rng_next(&rng);

        memcpy(out + i, &word, 8);
    }
}

uint64_t rig_fill(struct rig *rig, uint32_t ns, uint64_t number, uint64_t parent, uint8_t map,
                  const struct kvt_alloc_entry *entry)
{
    uint8_t *record = rig->arena + entry->arena_offset;
    struct kvt_record_header *header = (struct kvt_record_header *)record;
    struct kvt_msg_key key = key_of(rig, number);
    struct kvt_key plain = {.hash_len = key.hash_len, .group = key.group};

    memcpy(plain.hash, key.hash, sizeof(key.hash));
    memset(header, 0, sizeof(*header));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = map;
    kvt_full_key_make(&header->key, rig_ns_id(rig, ns), &plain);
    if (parent) {
        header->parent_len = 8;
        memcpy(header->parent, &parent, 8);
    }
    header->record_bytes = entry->record_bytes;
    header->payload_bytes = entry->record_bytes - sizeof(*header);
    header->sequence = entry->sequence;
    content_fill(rig, ns, number, map, record + sizeof(*header), header->payload_bytes);
    header->checksum = kvt_record_checksum(record, entry->record_bytes);
    return header->checksum;
}

static void *slots_request(struct rig *rig, int op, uint32_t slot, uint32_t generation,
                           uint64_t checksum, int32_t status)
{
    struct kvt_msg_slots *msg = request(rig, op, sizeof(*msg) + sizeof(msg->slots[0]), 0, 1);

    msg->slots[0] = (struct kvt_slot_ref){
        .slot = slot, .generation = generation, .checksum = checksum, .status = status};
    return msg;
}

int32_t rig_commit(struct rig *rig, uint32_t client, const struct kvt_alloc_entry *entry,
                   uint64_t checksum)
{
    const struct kvt_msg_slots *reply;

    rig_forget_replies(rig);
    reply = (const struct kvt_msg_slots *)ask(
        rig, client,
        slots_request(rig, KVT_OP_COMMIT, entry->slot, entry->generation, checksum, 0));
    return reply->slots[0].status;
}

void rig_abort(struct rig *rig, uint32_t client, const struct kvt_alloc_entry *entry)
{
    ask(rig, client, slots_request(rig, KVT_OP_ABORT, entry->slot, entry->generation, 0, 0));
}

uint32_t rig_put(struct rig *rig, uint32_t ns, const uint64_t *numbers, uint32_t n, uint64_t parent,
                 uint8_t map, uint8_t replace, int32_t *statuses)
{
    static struct kvt_alloc_entry entries[RIG_CHAIN_MAX];
    uint32_t committed = 0;

    rig_alloc(rig, CLIENT, ns, numbers, n, parent, map, replace, entries);
    for (uint32_t i = 0; i < n; i++) {
        int32_t status = entries[i].status;

        if (status == 0) {
            uint64_t checksum =
                rig_fill(rig, ns, numbers[i], i ? numbers[i - 1] : parent, map, &entries[i]);

            status = rig_commit(rig, CLIENT, &entries[i], checksum);
            committed += status == 0;
        }
        if (statuses)
            statuses[i] = status;
    }
    return committed;
}

uint64_t rig_acquire(struct rig *rig, uint32_t client, uint32_t ns, const uint64_t *numbers,
                     uint32_t n, uint8_t min, int64_t deadline_ns)
{
    struct kvt_msg_acquire *msg = request(rig, KVT_OP_ACQUIRE, sizeof(*msg) + n * 40, ns, n);
    uint64_t cookie = msg->msg.cookie;

    msg->deadline_ns = deadline_ns;
    msg->min_level = min;
    for (uint32_t i = 0; i < n; i++)
        msg->keys[i] = key_of(rig, numbers[i]);
    assert_int_equal(rig_send(rig, client, msg), 0);
    free(msg);
    return cookie;
}

int rig_verify(struct rig *rig, uint32_t ns, uint64_t number, const struct kvt_msg_grant *grant)
{
    const uint8_t *record = rig->arena + grant->arena_offset;
    const struct kvt_record_header *header = (const struct kvt_record_header *)record;
    struct kvt_msg_key key = key_of(rig, number);
    struct kvt_key plain = {.hash_len = key.hash_len, .group = key.group};
    struct kvt_full_key full;
    uint8_t *want;

    memcpy(plain.hash, key.hash, sizeof(key.hash));
    kvt_full_key_make(&full, rig_ns_id(rig, ns), &plain);
    assert_true(grant->arena_offset + grant->record_bytes <= rig->arena_bytes);
    if (kvt_record_verify(record, grant->record_bytes, &full, grant->checksum) != 0)
        return KVT_E_CORRUPT;
    want = malloc(grant->record_bytes);
    assert_non_null(want);
    content_fill(rig, ns, number, grant->map, want, header->payload_bytes);
    assert_memory_equal(record + sizeof(*header), want, header->payload_bytes);
    free(want);
    return 0;
}

void rig_release(struct rig *rig, uint32_t client, const struct kvt_msg_grant *grant, int status)
{
    struct kvt_msg_slots *msg =
        slots_request(rig, KVT_OP_RELEASE, grant->slot, grant->generation, 0, status);

    msg->msg.cookie = 0; /* silent */
    assert_int_equal(rig_send(rig, client, msg), 0);
    free(msg);
}

void rig_release_all(struct rig *rig, uint32_t client)
{
    for (uint32_t i = 0; i < rig->held_count; i++) {
        struct kvt_msg_grant grant = {.slot = rig->held[i].slot,
                                      .generation = rig->held[i].generation};

        rig_release(rig, client, &grant, 0);
    }
    rig->held_count = 0;
    rig_settle(rig);
}

/* Handle grants of `cookie` that came since; returns how many of n have come so far. */
static uint32_t take_grants(struct rig *rig, uint32_t ns, const uint64_t *numbers, uint64_t cookie,
                            uint32_t have, int32_t *statuses, uint8_t *maps)
{
    for (uint32_t i = 0; i < rig->reply_count; i++) {
        struct kvt_msg_grant grant;

        if (rig->replies[i]->cookie != cookie)
            continue;
        assert_int_equal(rig->replies[i]->op, KVT_OP_GRANT);
        memcpy(&grant, rig->replies[i], sizeof(grant));
        assert_int_equal(grant.index, have); /* chain order, exactly one each */
        statuses[have] = grant.msg.status;
        if (!grant.msg.status) {
            statuses[have] = rig_verify(rig, ns, numbers[have], &grant);
            if (maps)
                maps[have] = grant.map;
            if (rig->keep)
                rig->held[rig->held_count++] =
                    (struct kvt_slot_ref){.slot = grant.slot, .generation = grant.generation};
            else
                rig_release(rig, CLIENT, &grant, statuses[have]);
        }
        have++;
    }
    rig_forget_replies(rig);
    return have;
}

uint32_t rig_get(struct rig *rig, uint32_t ns, const uint64_t *numbers, uint32_t n, uint8_t min,
                 int32_t *statuses, uint8_t *maps)
{
    int32_t own[RIG_CHAIN_MAX];
    uint64_t cookie;
    uint32_t have = 0, run = 0;

    if (!statuses)
        statuses = own;
    rig_forget_replies(rig);
    cookie = rig_acquire(rig, CLIENT, ns, numbers, n, min, INT64_MAX);
    for (int turn = 0; have < n; turn++) {
        int64_t next = kvt_store_run(rig->store);

        assert_true(turn < 100000);
        have = take_grants(rig, ns, numbers, cookie, have, statuses, maps);
        if (have < n && !rig->reply_count && next > rig->now_ns && next != INT64_MAX)
            rig->now_ns = next;
    }
    rig_settle(rig);
    assert_int_equal(rig->reply_count, 0);
    while (run < n && statuses[run] == 0)
        run++;
    return run;
}

static void *keys_request(struct rig *rig, int op, uint32_t ns, const uint64_t *numbers, uint32_t n,
                          uint8_t min)
{
    struct kvt_msg_keys *msg = request(rig, op, sizeof(*msg) + n * 40, ns, n);

    msg->min_level = min;
    for (uint32_t i = 0; i < n; i++)
        msg->keys[i] = key_of(rig, numbers[i]);
    return msg;
}

uint32_t rig_lookup(struct rig *rig, uint32_t ns, const uint64_t *numbers, uint32_t n, uint8_t min,
                    uint8_t *tiers)
{
    const struct kvt_msg_lookup_reply *reply;
    struct kvt_msg_keys *msg;

    rig_forget_replies(rig);
    msg = keys_request(rig, KVT_OP_LOOKUP, ns, numbers, n, min);
    msg->whole = rig->whole;
    reply = (const struct kvt_msg_lookup_reply *)ask(rig, CLIENT, msg);
    assert_int_equal(reply->msg.count, n);
    for (uint32_t i = 0; tiers && i < n; i++)
        tiers[i] = reply->entries[i].tier;
    return (uint32_t)reply->msg.status;
}

int32_t rig_keys(struct rig *rig, int op, uint32_t ns, const uint64_t *numbers, uint32_t n)
{
    rig_forget_replies(rig);
    return ask(rig, CLIENT, keys_request(rig, op, ns, numbers, n, 0))->status;
}

int32_t rig_flush(struct rig *rig)
{
    rig_forget_replies(rig);
    return ask(rig, CLIENT, request(rig, KVT_OP_FLUSH, sizeof(struct kvt_msg), 0, 0))->status;
}

void rig_cancel(struct rig *rig, uint32_t client, uint64_t target)
{
    struct kvt_msg_cancel *msg = request(rig, KVT_OP_CANCEL, sizeof(*msg), 0, 0);

    msg->target = target;
    ask(rig, client, msg);
}

struct kvt_store_stats rig_stats(struct rig *rig)
{
    struct kvt_store_stats stats;

    kvt_store_stats(rig->store, &stats);
    return stats;
}
