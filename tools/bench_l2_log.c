/* Our side of `kvtier bench l2`: the log of the store (store/l2.h) over a real backend, driven as
 * the store drives it: batches of consecutive records are appended, two of them in flight; records
 * are read in order, and adjacent reads become one request by the log's own doing.
 *
 * Checksums are part of the time: each record's is made right before it is appended, while two
 * batches are being written, and is verified, with the header and the key, while the next requests
 * are being read.
 * Threads: one, and those of the backend.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "bench_l2.h"
#include "kvtier/error.h"
#include "store/l2.h"

#define GROUPS_MAX 64u /* of records in flight */
#define PASS_NS_MAX 600000000000ll
#define HUGE_BYTES (2ull << 20)
/* A root of this cap or more has segments of 256 MiB, as any real drive has. Smaller passes than
 * LARGE_BYTES get the segments of their own cap. */
#define REAL_CAP_BYTES (16ull << 30)
#define REAL_SEGMENT_BYTES (256ull << 20)
#define LARGE_BYTES (1ull << 30)
#define SEQUENCE_AHEAD (1u << 20)

struct place { /* of a record, by its number */
    struct kvt_l2_where where;
    uint64_t checksum;
    bool present;
};

struct group { /* the records of one request */
    struct kvt_l2_write *writes;
    struct kvt_l2_read *reads;
    uint8_t *memory;
    uint32_t first;    /* record number */
    uint32_t left;     /* not reported yet */
    uint32_t prepared; /* records with a checksum */
    bool busy;
};

struct kvt_bench_log {
    struct kvt_bench_l2_shape shape;
    char dir[PATH_MAX];
    struct kvt_io *io;
    struct kvt_l2 *l2;
    struct kvt_clock clock;
    uint64_t sequence, reserved;
    int64_t next_run; /* when the log wants to run again */
    uint32_t records, per_group, group_count;
    struct place *places;
    uint8_t *memory; /* of all groups: huge pages, as the cache's DRAM has them */
    uint64_t memory_bytes;
    struct group groups[GROUPS_MAX];
    int error; /* the first one of this pass */
};

static int64_t now(const struct kvt_bench_log *log)
{
    return kvt_clock_now(&log->clock);
}

/* ---- what the log asks its store ---- */

static void found(void *ctx, const struct kvt_entry *entry, uint32_t segment, uint64_t generation)
{
    (void)ctx; /* a new directory */
    (void)entry;
    (void)segment;
    (void)generation;
}

static void evicted(void *ctx, uint32_t segment)
{
    struct kvt_bench_log *log = ctx;

    for (uint32_t i = 0; i < log->records; i++)
        if (log->places[i].where.segment == segment)
            log->places[i].present = false;
}

static bool may_evict(void *ctx, uint32_t segment)
{
    (void)ctx;
    (void)segment;
    return true;
}

static void run_log(struct kvt_bench_log *log)
{
    log->next_run = kvt_l2_run(log->l2);
}

/* Sleep until something is done or due, then let the log work: what it reports can be answered
 * before the next sleep. */
static void turn(struct kvt_bench_log *log)
{
    int64_t wait = log->next_run - now(log);
    struct pollfd ready = {.fd = log->io->ops->event_fd(log->io), .events = POLLIN};

    if (wait > 0)
        (void)poll(&ready, ready.fd >= 0, wait < 10000000 ? (int)(wait / 1000000) + 1 : 10);
    run_log(log);
}

/* ---- writing ---- */

/* The group whose turn a record is. */
static struct group *group_of(struct kvt_bench_log *log, uint32_t number)
{
    return &log->groups[number / log->per_group % KVT_MAX(log->group_count, 1u)];
}

static void record_key(uint32_t number, struct kvt_full_key *key)
{
    memset(key, 0, sizeof(*key));
    key->hash_len = 8;
    memcpy(key->hash, &number, sizeof(number));
}

static void written(struct kvt_l2_write *write)
{
    struct kvt_bench_log *log = write->user;
    uint32_t number;

    memcpy(&number, write->entry.key.hash, sizeof(number));
    group_of(log, number)->left--;
    if (write->status && !log->error)
        log->error = write->status;
    log->places[number] = (struct place){write->where, write->entry.checksum, !write->status};
}

/* Header and checksum of the next record of a group. */
static void prepare_write(struct kvt_bench_log *log, struct group *group)
{
    uint32_t bytes = (uint32_t)log->shape.record, i = group->prepared++;
    struct kvt_record_header *header =
        (struct kvt_record_header *)(group->memory + i * log->shape.record);
    struct kvt_l2_write *write = &group->writes[i];

    memset(header, 0, sizeof(*header));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = KVT_LEVEL_KV4;
    record_key(group->first + i, &header->key);
    header->record_bytes = bytes;
    header->payload_bytes = bytes - (uint32_t)sizeof(*header);
    header->sequence = log->sequence++;
    header->checksum = kvt_record_checksum(header, bytes);
    memset(write, 0, sizeof(*write));
    write->record = header;
    write->done = written;
    write->user = log;
    write->entry.key = header->key;
    write->entry.sequence = header->sequence;
    write->entry.checksum = header->checksum;
    write->entry.pages = bytes / KVT_PAGE_BYTES;
    write->entry.map = header->map;
    write->next = i + 1 < log->per_group ? &group->writes[i + 1] : NULL;
}

/* Make the next record that is to be written, as far ahead as there are groups. False: nothing to
 * do now. `made`: records begun so far. */
static bool prepare_ahead(struct kvt_bench_log *log, uint32_t *made)
{
    struct group *group = group_of(log, *made);

    if (*made == log->records)
        return false;
    if (*made % log->per_group == 0) {
        if (group->left || group->prepared)
            return false;
        group->first = *made;
    }
    prepare_write(log, group);
    ++*made;
    return true;
}

static bool groups_busy(const struct kvt_bench_log *log)
{
    for (uint32_t i = 0; i < log->group_count; i++)
        if (log->groups[i].left)
            return true;
    return false;
}

int kvt_bench_log_write(struct kvt_bench_log *log, int64_t *ns)
{
    uint32_t next = 0, made = 0;
    int64_t start = now(log);

    log->error = 0;
    for (uint32_t i = 0; i < log->group_count; i++)
        log->groups[i].prepared = 0;
    while ((next < log->records && !log->error) || groups_busy(log)) {
        struct group *group = group_of(log, next);

        if (log->sequence + log->records > log->reserved) {
            log->reserved = log->sequence + SEQUENCE_AHEAD;
            kvt_l2_reserve_sequence(log->l2, log->reserved);
        }
        if (next < log->records && !log->error && group->prepared == log->per_group &&
            kvt_l2_can_append(log->l2) && !kvt_l2_append(log->l2, group->writes)) {
            group->prepared = 0;
            group->left = log->per_group;
            next += log->per_group;
            run_log(log);
        }
        /* a record at a time: what is done meanwhile does not wait for more than that */
        if (!log->error && prepare_ahead(log, &made))
            run_log(log);
        else
            turn(log);
        if (now(log) - start > PASS_NS_MAX)
            return -ETIME;
    }
    *ns = now(log) - start;
    return log->error;
}

/* ---- reading ---- */

static void read_over(struct kvt_l2_read *read)
{
    struct group *group = read->user;

    group->left--;
}

static int verify(const struct kvt_bench_log *log, const struct group *group)
{
    struct kvt_full_key key;
    int rc = 0;

    for (uint32_t i = 0; i < log->per_group && !rc; i++) {
        rc = group->reads[i].status;
        record_key(group->first + i, &key);
        if (!rc)
            rc = kvt_record_verify(group->reads[i].dst, (uint32_t)log->shape.record, &key,
                                   log->places[group->first + i].checksum);
    }
    return rc;
}

static int start_reads(struct kvt_bench_log *log, struct group *group, uint32_t first)
{
    for (uint32_t i = 0; i < log->per_group; i++) {
        if (!log->places[first + i].present)
            return KVT_E_MISS;
        group->reads[i] =
            (struct kvt_l2_read){.where = log->places[first + i].where,
                                 .pages = (uint32_t)(log->shape.record / KVT_PAGE_BYTES),
                                 .dst = group->memory + i * log->shape.record,
                                 .done = read_over,
                                 .user = group};
    }
    group->first = first;
    group->left = log->per_group;
    group->busy = true;
    for (uint32_t i = 0; i < log->per_group; i++)
        kvt_l2_read(log->l2, &group->reads[i]);
    return 0;
}

int kvt_bench_log_read(struct kvt_bench_log *log, int64_t *ns)
{
    uint32_t next = 0, groups = KVT_MIN(log->shape.depth, log->group_count), busy = 0;
    int64_t start = now(log);
    int rc = 0;

    while ((next < log->records && !rc) || busy) {
        for (uint32_t i = 0; i < groups; i++) {
            struct group *group = &log->groups[i];

            if (group->busy && !group->left) {
                int bad = verify(log, group);

                group->busy = false;
                busy--;
                rc = rc ? rc : bad;
            }
            if (!group->busy && next < log->records && !rc) {
                rc = start_reads(log, group, next);
                busy += !rc;
                next += log->per_group;
                run_log(log); /* on its way before the next one is verified */
            }
        }
        if (busy)
            turn(log);
        if (now(log) - start > PASS_NS_MAX && !rc)
            rc = -ETIME;
    }
    *ns = now(log) - start;
    return rc;
}

/* ---- life ---- */

static int alloc_groups(struct kvt_bench_log *log)
{
    struct kvt_rng rng = {kvt_rng_seed_os()};

    log->memory_bytes = kvt_round_up(log->group_count * log->shape.block, HUGE_BYTES);
    log->memory = aligned_alloc(HUGE_BYTES, log->memory_bytes);
    if (!log->memory)
        return -ENOMEM;
    (void)madvise(log->memory, log->memory_bytes, MADV_HUGEPAGE);
    for (uint64_t at = 0; at < log->memory_bytes; at += sizeof(uint64_t)) {
        uint64_t word = kvt_rng_next(&rng); /* some drives would cheat on anything simpler */
        memcpy(log->memory + at, &word, sizeof(word));
    }
    for (uint32_t i = 0; i < log->group_count; i++) {
        struct group *group = &log->groups[i];

        group->memory = log->memory + i * log->shape.block;
        group->writes = calloc(log->per_group, sizeof(*group->writes));
        group->reads = calloc(log->per_group, sizeof(*group->reads));
        if (!group->writes || !group->reads)
            return -ENOMEM;
    }
    return 0;
}

/* Write until segments come round again: from then on nothing is allocated on the drive. */
static int fill(struct kvt_bench_log *log)
{
    struct kvt_l2_stats stats;
    int64_t ns;
    int rc;

    do {
        rc = kvt_bench_log_write(log, &ns);
        kvt_l2_stats(log->l2, &stats);
    } while (!rc && !stats.segments_recycled);
    return rc;
}

static int open_log(struct kvt_bench_log *log)
{
    const struct kvt_bench_l2_shape *shape = &log->shape;
    struct kvt_io_posix_params params = {
        .path = log->dir, .threads = 4, .direct = shape->direct, .backend = shape->backend};
    struct kvt_l2_params l2 = {.cap_bytes = shape->bytes + shape->bytes / 4 + (8u << 20),
                               .seed = kvt_rng_seed_os(),
                               .clock = log->clock,
                               .batch_bytes_max = 64u << 20, /* the shape says how long */
                               .reads_max = shape->depth,
                               .found = found,
                               .evicted = evicted,
                               .may_evict = may_evict,
                               .ctx = log};
    struct kvt_io *inner = NULL;
    struct kvt_io_info info;
    int rc = kvt_io_files_new(&params, &inner);

    if (rc)
        return rc;
    log->io = kvt_io_count_new(inner);
    if (!log->io) {
        inner->ops->destroy(inner);
        return -ENOMEM;
    }
    log->io->ops->info(log->io, &info);
    if (info.free_bytes < l2.cap_bytes + (64u << 20))
        return -ENOSPC;
    l2.io = log->io;
    rc = log->io->ops->lock(log->io, NULL);
    if (!rc && shape->bytes >= LARGE_BYTES) { /* the size of segments is that of the first open */
        uint64_t cap = KVT_MAX(l2.cap_bytes, shape->bytes + 5 * REAL_SEGMENT_BYTES);

        l2.cap_bytes = KVT_MAX(cap, REAL_CAP_BYTES);
        rc = kvt_l2_open(&l2, &log->l2, &log->sequence);
        kvt_l2_close(log->l2);
        l2.cap_bytes = cap;
    }
    if (!rc)
        rc = kvt_l2_open(&l2, &log->l2, &log->sequence);
    if (!rc && kvt_l2_record_bytes_max(log->l2) < shape->record)
        return KVT_E_TOO_SMALL;
    return rc;
}

int kvt_bench_log_open(const char *dir, const struct kvt_bench_l2_shape *shape,
                       struct kvt_bench_log **out, char *why, size_t why_len)
{
    struct kvt_bench_log *log = calloc(1, sizeof(*log));
    int rc = log ? 0 : -ENOMEM;

    if (rc)
        goto out;
    log->shape = *shape;
    log->clock = kvt_clock_system();
    log->records = (uint32_t)(shape->bytes / shape->record);
    log->per_group = (uint32_t)(shape->block / shape->record);
    /* writes: two in flight, one being prepared, one to spare */
    log->group_count = KVT_MIN(KVT_MAX(shape->depth, 4u), GROUPS_MAX);
    snprintf(log->dir, sizeof(log->dir), "%s/log", dir);
    log->places = calloc(log->records, sizeof(*log->places));
    rc = log->places ? alloc_groups(log) : -ENOMEM;
    if (!rc)
        rc = open_log(log);
    if (!rc)
        rc = fill(log);
    if (!rc) {
        kvt_io_count_reset(log->io);
        *out = log;
        return 0;
    }
out:
    snprintf(why, why_len, "%s",
             rc == KVT_E_TOO_SMALL ? "a segment holds at least four records: take a larger --size "
                                     "or a smaller --record"
                                   : kvt_strerror(rc));
    kvt_bench_log_close(log);
    return rc;
}

void kvt_bench_log_info(const struct kvt_bench_log *log, struct kvt_io_info *info)
{
    log->io->ops->info(log->io, info);
}

const struct kvt_io_counts *kvt_bench_log_counts(const struct kvt_bench_log *log, int kind)
{
    return kvt_io_count_of(log->io, kind);
}

static int remove_file(void *arg, const char *name)
{
    struct kvt_io *io = arg;

    (void)io->ops->unlink(io, name);
    return 0;
}

void kvt_bench_log_close(struct kvt_bench_log *log)
{
    if (!log)
        return;
    kvt_l2_close(log->l2);
    if (log->io) {
        (void)log->io->ops->list(log->io, remove_file, log->io);
        log->io->ops->destroy(log->io);
        (void)rmdir(log->dir);
    }
    for (uint32_t i = 0; i < log->group_count; i++) {
        free(log->groups[i].writes);
        free(log->groups[i].reads);
    }
    free(log->memory);
    free(log->places);
    free(log);
}
