/* See l2_help.h. Asserts through cmocka. */
#include <errno.h>
#include <ftw.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "support/l2_help.h"

#define NAMESPACES 4u /* id % 4 */

void l2_key(uint32_t id, struct kvt_full_key *key)
{
    struct kvt_rng rng = {id};

    memset(key, 0, sizeof *key);
    memset(key->ns, (int)(id % NAMESPACES) + 1, sizeof key->ns);
    memcpy(key->hash, &id, sizeof id);
    for (uint32_t i = sizeof id; i < 32; i++)
        key->hash[i] = (uint8_t)kvt_rng_next(&rng);
    key->hash_len = 32;
}

void *l2_record(uint32_t id, uint32_t version, uint32_t pages, uint64_t sequence,
                struct kvt_entry *entry)
{
    uint32_t bytes = pages * KVT_PAGE_BYTES;
    struct kvt_record_header *header = aligned_alloc(KVT_PAGE_BYTES, bytes);
    struct kvt_rng rng = {(uint64_t)id << 32 | version};
    uint64_t *words = (uint64_t *)header;

    assert_non_null(header);
    for (uint32_t i = 0; i < bytes / 8; i++)
        words[i] = kvt_rng_next(&rng);
    memset(header, 0, sizeof *header);
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = KVT_LEVEL_KV4;
    l2_key(id, &header->key);
    header->record_bytes = bytes;
    header->payload_bytes = bytes - (uint32_t)sizeof *header;
    header->sequence = sequence;
    header->checksum = kvt_record_checksum(header, bytes);
    if (entry) {
        memset(entry, 0, sizeof *entry);
        entry->key = header->key;
        entry->sequence = sequence;
        entry->checksum = header->checksum;
        entry->pages = pages;
        entry->map = header->map;
    }
    return header;
}

static uint32_t id_of(const struct kvt_full_key *key)
{
    uint32_t id;

    memcpy(&id, key->hash, sizeof id);
    assert_true(id < L2_IDS);
    return id;
}

static int64_t env_now(void *ctx)
{
    return ((struct l2_env *)ctx)->now;
}

static void env_log(void *ctx, int level, const char *message)
{
    struct l2_env *env = ctx;

    if (level <= env->log_level)
        print_message("log %d: %s\n", level, message);
    assert_null(strstr(message, "bug:"));
    env->warnings += level == KVT_LOG_WARN;
    if (level <= KVT_LOG_WARN)
        snprintf(env->last_message, sizeof env->last_message, "%s", message);
}

static void env_found(void *ctx, const struct kvt_entry *entry, uint32_t segment,
                      uint64_t generation)
{
    struct l2_env *env = ctx;
    uint32_t id = id_of(&entry->key);
    struct l2_entry *at = &env->index[id];

    env->found++;
    if (at->present && (at->sequence > entry->sequence ||
                        (at->sequence == entry->sequence && at->generation > generation)))
        return;
    *at = (struct l2_entry){.present = true,
                            .where = {segment, entry->page},
                            .pages = entry->pages,
                            .sequence = entry->sequence,
                            .generation = generation,
                            .checksum = entry->checksum};
}

static void env_evicted(void *ctx, uint32_t segment)
{
    struct l2_env *env = ctx;

    env->evictions++;
    if (env->on_evict)
        env->on_evict(segment);
    for (uint32_t i = 0; i < L2_IDS; i++)
        if (env->index[i].present && env->index[i].where.segment == segment)
            env->index[i].present = false;
}

static bool env_may_evict(void *ctx, uint32_t segment)
{
    struct l2_env *env = ctx;

    return segment >= KVT_ARRAY_LEN(env->pinned_segments) || !env->pinned_segments[segment];
}

void l2_env_init(struct l2_env *env, uint64_t cap)
{
    memset(env, 0, sizeof *env);
    env->log_level = getenv("KVT_TEST_LOG") ? KVT_LOG_DEBUG : -1;
    env->cap = cap;
    env->now = 1000000000;
    env->params = (struct kvt_l2_params){
        .cap_bytes = cap,
        .seed = 7,
        .clock = {env_now, env},
        .log = {env_log, env, KVT_LOG_DEBUG},
        .batch_bytes_max = 1u << 20,
        .reads_max = 8,
        .found = env_found,
        .evicted = env_evicted,
        .may_evict = env_may_evict,
        .ctx = env,
    };
}

void l2_env_forget_index(struct l2_env *env)
{
    for (uint32_t i = 0; i < L2_IDS; i++)
        env->index[i].present = false;
}

int l2_env_open(struct l2_env *env, struct kvt_io *io)
{
    int rc;

    l2_env_forget_index(env);
    env->io = io;
    env->found = 0;
    env->params.io = io;
    env->params.cap_bytes = env->cap;
    rc = kvt_l2_open(&env->params, &env->l2, &env->next_sequence);
    assert_true(!rc == (env->l2 != NULL));
    if (!rc) {
        struct kvt_l2_stats stats;

        env->sequence = KVT_MAX(env->sequence, env->next_sequence);
        kvt_l2_stats(env->l2, &stats);
        assert_true(env->params.read_only || stats.bytes_used <= env->cap);
    }
    return rc;
}

void l2_env_close(struct l2_env *env)
{
    kvt_l2_close(env->l2);
    env->l2 = NULL;
    assert_int_equal(env->in_flight, 0);
}

static void env_written(struct kvt_l2_write *write)
{
    struct l2_env *env = write->user;
    struct l2_put_state *state = (struct l2_put_state *)write;
    struct l2_entry *at = &env->index[state->id];

    assert_true(state->busy);
    env->in_flight--;
    env->reported++;
    env->failed += write->status != 0;
    env->last_status = write->status;
    if (!write->status) {
        assert_true(write->where.segment < kvt_l2_segment_limit(env->l2));
        if (!at->present || at->sequence < write->entry.sequence)
            *at = (struct l2_entry){.present = true,
                                    .version = state->version,
                                    .where = write->where,
                                    .pages = write->entry.pages,
                                    .sequence = write->entry.sequence,
                                    .checksum = write->entry.checksum};
    }
    free((void *)write->record);
    memset(state, 0, sizeof *state);
}

static struct l2_put_state *free_state(struct l2_env *env)
{
    for (uint32_t i = 0; i < L2_WRITES_MAX; i++)
        if (!env->states[i].busy)
            return &env->states[i];
    fail_msg("too many writes in flight for the helper");
    return NULL;
}

int l2_env_queue(struct l2_env *env, const uint32_t *ids, uint32_t count, uint32_t version,
                 uint32_t pages)
{
    struct kvt_l2_write *list = NULL, **end = &list;
    struct l2_put_state *states[L2_WRITES_MAX];
    int rc;

    assert_true(count <= L2_WRITES_MAX);
    for (uint32_t i = 0; i < count; i++) {
        struct l2_put_state *state = states[i] = free_state(env);
        uint32_t id = ids[i];

        state->busy = true;
        state->id = id;
        state->version = version;
        state->write.record = l2_record(id, version, pages, env->sequence, &state->write.entry);
        state->write.done = env_written;
        state->write.user = env;
        env->sequence++;
        *end = &state->write;
        end = &state->write.next;
    }
    rc = kvt_l2_append(env->l2, list);
    if (rc) {
        for (uint32_t i = 0; i < count; i++) {
            free((void *)states[i]->write.record);
            memset(states[i], 0, sizeof *states[i]);
        }
        return rc;
    }
    for (uint32_t i = 0; i < count; i++) { /* reports come later, from the run */
        uint32_t id = ids[i];

        memmove(&env->puts[id][1], &env->puts[id][0],
                sizeof env->puts[id] - sizeof env->puts[id][0]);
        env->puts[id][0].sequence = states[i]->write.entry.sequence;
        env->puts[id][0].version = version;
    }
    env->in_flight += count;
    return 0;
}

void l2_env_turn(struct l2_env *env)
{
    int fd = env->io->ops->event_fd(env->io);
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    int64_t next = kvt_l2_run(env->l2);
    struct kvt_l2_stats stats;

    if (fd >= 0 && next > env->now)
        (void)poll(&ready, 1, 1); /* the drive works in its own time */
    if (next != INT64_MAX && next > env->now)
        env->now = next;
    else
        env->now += 1000;
    kvt_l2_stats(env->l2, &stats);
    assert_true(stats.bytes_used <= env->cap);
    assert_true(stats.writes_in_flight <= 2);
    assert_true(stats.reads_in_flight <= env->params.reads_max);
}

void l2_env_drain(struct l2_env *env)
{
    uint32_t turns = 0;

    while (env->in_flight) {
        l2_env_turn(env);
        assert_true(++turns < 1000000);
    }
    l2_env_turn(env);
}

int l2_env_put(struct l2_env *env, uint32_t id, uint32_t version, uint32_t pages)
{
    uint32_t turns = 0;
    int rc;

    while ((rc = l2_env_queue(env, &id, 1, version, pages)) == -EAGAIN) {
        l2_env_turn(env);
        assert_true(++turns < 100000);
    }
    if (rc)
        return rc;
    l2_env_drain(env);
    return env->last_status;
}

static void env_read(struct kvt_l2_read *read)
{
    *(bool *)read->user = true;
}

int l2_env_get(struct l2_env *env, uint32_t id)
{
    struct l2_entry *at = &env->index[id];
    struct kvt_l2_read read = {.where = at->where, .pages = at->pages, .done = env_read};
    struct kvt_full_key key;
    uint32_t turns = 0;
    bool done = false;
    int rc;

    if (!at->present)
        return KVT_E_MISS;
    read.user = &done;
    read.dst = aligned_alloc(KVT_PAGE_BYTES, (size_t)at->pages * KVT_PAGE_BYTES);
    assert_non_null(read.dst);
    memset(read.dst, 0xa5, (size_t)at->pages * KVT_PAGE_BYTES);
    kvt_l2_read(env->l2, &read);
    while (!done) {
        l2_env_turn(env);
        assert_true(turns++ < 1000000);
    }
    rc = read.status;
    l2_key(id, &key);
    if (!rc)
        rc = kvt_record_verify(read.dst, at->pages * KVT_PAGE_BYTES, &key, at->checksum);
    if (!rc) { /* it verifies: then it must be one of the versions that were put */
        struct kvt_record_header *header = read.dst;
        bool known = false;

        for (uint32_t i = 0; i < KVT_ARRAY_LEN(env->puts[id]) && !known; i++) {
            void *want;

            if (env->puts[id][i].sequence != header->sequence)
                continue;
            want = l2_record(id, env->puts[id][i].version, at->pages, header->sequence, NULL);
            assert_memory_equal(want, header, (size_t)at->pages * KVT_PAGE_BYTES);
            free(want);
            known = true;
        }
        assert_true(known);
    }
    free(read.dst);
    return rc;
}

struct waiter {
    bool done;
    int status;
};

static void wait_done(void *ctx, int status)
{
    struct waiter *waiter = ctx;

    assert_false(waiter->done);
    waiter->done = true;
    waiter->status = status;
}

static int wait_for(struct l2_env *env, struct waiter *waiter)
{
    for (uint32_t turns = 0; !waiter->done; turns++) {
        l2_env_turn(env);
        assert_true(turns < 1000000);
    }
    return waiter->status;
}

int l2_env_flush(struct l2_env *env)
{
    struct waiter waiter = {false, 0};

    assert_int_equal(kvt_l2_flush(env->l2, wait_done, &waiter), 0);
    return wait_for(env, &waiter);
}

static int purge(struct l2_env *env, struct kvt_journal_item item)
{
    struct waiter waiter = {false, 0};
    int rc;

    item.value = env->sequence;
    rc = kvt_l2_journal(env->l2, &item, 1, wait_done, &waiter);
    return rc ? rc : wait_for(env, &waiter);
}

int l2_env_purge_key(struct l2_env *env, uint32_t id)
{
    struct kvt_journal_item item = {.kind = KVT_JOURNAL_PURGE_KEY};
    int rc;

    l2_key(id, &item.key);
    rc = purge(env, item);
    if (!rc && env->index[id].present) {
        env->index[id].present = false;
        kvt_l2_erase(env->l2, env->index[id].where, env->index[id].pages);
    }
    return rc;
}

int l2_env_purge_ns(struct l2_env *env, uint32_t ns)
{
    struct kvt_journal_item item = {.kind = KVT_JOURNAL_PURGE_NS};
    int rc;

    memset(item.key.ns, (int)ns + 1, sizeof item.key.ns);
    rc = purge(env, item);
    for (uint32_t i = 0; i < L2_IDS && !rc; i++)
        if (i % NAMESPACES == ns && env->index[i].present) {
            env->index[i].present = false;
            kvt_l2_erase(env->l2, env->index[i].where, env->index[i].pages);
        }
    return rc;
}

uint32_t l2_env_count(const struct l2_env *env)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < L2_IDS; i++)
        count += env->index[i].present;
    return count;
}

uint32_t l2_env_verify(struct l2_env *env)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < L2_IDS; i++) {
        if (!env->index[i].present)
            continue;
        if (l2_env_get(env, i))
            env->index[i].present = false;
        else
            count++;
    }
    return count;
}

struct file_sum {
    struct kvt_io *io;
    uint64_t bytes;
    uint32_t count;
};

static int add_file(void *arg, const char *name)
{
    struct file_sum *sum = arg;
    int file = sum->io->ops->open(sum->io, name, KVT_IO_OPEN_READ_ONLY);

    assert_true(file >= 0);
    sum->bytes += (uint64_t)sum->io->ops->size(sum->io, file);
    sum->count++;
    sum->io->ops->close(sum->io, file);
    return 0;
}

uint64_t l2_files_bytes(struct kvt_io *io)
{
    struct file_sum sum = {.io = io};

    assert_int_equal(io->ops->list(io, add_file, &sum), 0);
    return sum.bytes;
}

uint32_t l2_files_count(struct kvt_io *io)
{
    struct file_sum sum = {.io = io};

    assert_int_equal(io->ops->list(io, add_file, &sum), 0);
    return sum.count;
}

void l2_dir_make(char path[256])
{
    const char *base = getenv("TMPDIR");

    snprintf(path, 256, "%s/kvt-l2-XXXXXX", base ? base : "/tmp");
    assert_non_null(mkdtemp(path));
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *where)
{
    (void)info;
    (void)kind;
    (void)where;
    return remove(path);
}

void l2_dir_remove(const char *path)
{
    assert_int_equal(nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
}

struct kvt_io *l2_clone(const struct kvt_io *io)
{
    struct kvt_io *copy = NULL;

    assert_int_equal(kvt_io_mem_clone(io, &copy), 0);
    return copy;
}
