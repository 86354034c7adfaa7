/* Numbers: counters are kept where things happen, gauges are computed here. Also the file "stats"
 * in the first root: the last numbers as text lines "name value", those of the client half behind
 * the store's, for `kvtier stat` and `kvtier top` beside a live process.
 *
 * The file is one write of a fixed size, padded with newlines, at most every two seconds and only
 * when something has happened; it is written in place, so a reader may see a mixture of two states.
 * It is for people; nothing reads it back.
 * Threads: the store's owner. Allocates at open.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define REAP_POLL_MS 10

struct kvt_store_statfile {
    struct kvt_io_req req;
    struct kvt_io *io;
    char *text; /* KVT_STORE_STATS_BYTES, page aligned */
    int file;
    int going;
    int64_t next_ns;
    uint64_t activity; /* at the last write */
};

static void disk_gauges(const struct kvt_store *store, struct kvt_store_stats *stats)
{
    for (uint32_t i = 0; i < store->disk_count; i++) {
        const struct kvt_store_disk *disk = &store->disks[i];
        struct kvt_l2_stats l2;
        struct kvt_io_info info;

        if (!disk->l2) { /* closing */
            stats->disk_bytes_used = store->at_close.disk_bytes_used;
            stats->disk_written_bytes = store->at_close.disk_written_bytes;
            stats->disk_bytes_max = store->at_close.disk_bytes_max;
            stats->disk_direct = store->at_close.disk_direct;
            stats->disk_short_bytes = store->at_close.disk_short_bytes;
            stats->disk_segments = store->at_close.disk_segments;
            stats->disk_unread = store->at_close.disk_unread;
            stats->disk_erases = store->at_close.disk_erases;
            stats->disk_batch_bytes = store->at_close.disk_batch_bytes;
            stats->enospc = store->at_close.enospc;
            return;
        }
        kvt_l2_stats(disk->l2, &l2);
        memset(&info, 0, sizeof(info));
        disk->io->ops->info(disk->io, &info);
        stats->disk_bytes_used += l2.bytes_used;
        stats->disk_written_bytes += l2.bytes_written;
        stats->disk_failing += l2.failing != 0;
        stats->disk_bytes_max += disk->cap_bytes;
        stats->disk_short_bytes += l2.short_bytes;
        stats->disk_segments += l2.segments_live;
        stats->disk_unread += l2.segments_unread;
        stats->disk_erases += l2.erases_queued;
        stats->enospc += l2.enospc;
        if (i == 0 || disk->batch_bytes < stats->disk_batch_bytes)
            stats->disk_batch_bytes = disk->batch_bytes;
        stats->disk_direct = (i == 0 || stats->disk_direct) && info.direct;
    }
}

void kvt_store_stats(const struct kvt_store *store, struct kvt_store_stats *stats)
{
    const struct kvt_region *cache = &store->slots.arena.regions[KVT_REGION_CACHE];
    const struct kvt_region *staging = &store->slots.arena.regions[KVT_REGION_STAGING];
    uint64_t taken =
        (uint64_t)cache->pages - cache->free_pages + staging->pages - staging->free_pages;

    *stats = store->counts;
    stats->blocks = store->index.used;
    stats->index_bytes = kvt_index_bytes(&store->index);
    stats->dram_bytes_max = store->params.arena_bytes;
    stats->parted_bytes = store->slots.parted_bytes;
    stats->dram_bytes_used = taken * KVT_PAGE_BYTES;
    stats->dram_blocks = store->slots.in_state[KVT_SLOT_VALID];
    stats->dram_pins = store->slots.pins;
    stats->pinned_blocks = store->pinned_blocks;
    stats->pinned_bytes = store->pinned_bytes;
    stats->disk_roots = store->disk_count;
    stats->disk_blocks = store->disk_blocks;
    stats->disk_queue_blocks = store->write_queue.count;
    stats->disk_queue_bytes = store->write_queue.bytes;
    stats->disk_unsaved = store->disk_count ? store->unsaved : 0;
    stats->namespaces = store->spaces.used;
    stats->ns_given_back = store->spaces.given_back;
    int64_t left = kvt_admission_left(&store->admission);
    stats->budget_left = left == INT64_MAX ? 0 : (uint64_t)KVT_MAX(left, INT64_C(0));
    disk_gauges(store, stats);
    kvt_l3_stats(store, stats);
}

static void root_state(const struct kvt_store_disk *disk, struct kvt_store_root_state *state)
{
    struct kvt_l2_stats l2;

    memset(state, 0, sizeof(*state));
    if (!disk->l2)
        return;
    kvt_l2_stats(disk->l2, &l2);
    state->failing = l2.failing;
    state->read_fails = disk->read_fails;
    state->bytes_used = l2.bytes_used;
}

void kvt_handle_stat(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    struct kvt_store_stats stats;
    size_t roots = store->disk_count * sizeof(struct kvt_store_root_state);
    struct kvt_msg_stat_reply *reply = (struct kvt_msg_stat_reply *)kvt_reply_begin(
        store, msg, sizeof(*reply) + sizeof(stats) + roots);

    kvt_store_stats(store, &stats);
    memcpy(reply->values, &stats, sizeof(stats));
    for (uint32_t i = 0; i < store->disk_count; i++) {
        struct kvt_store_root_state state;

        root_state(&store->disks[i], &state);
        memcpy((uint8_t *)reply->values + sizeof(stats) + i * sizeof(state), &state, sizeof(state));
    }
    reply->msg.count = KVT_STORE_STAT_COUNT + (uint32_t)(roots / sizeof(uint64_t));
    kvt_reply_send(store, client, &reply->msg);
}

void kvt_handle_hist(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    struct kvt_msg_stat_reply *reply = (struct kvt_msg_stat_reply *)kvt_reply_begin(
        store, msg, sizeof(*reply) + sizeof(store->hists));

    static_assert(sizeof(struct kvt_msg_stat_reply) + sizeof(store->hists) <= KVT_MSG_BYTES_MAX,
                  "one message");
    memcpy(reply->values, store->hists, sizeof(store->hists));
    reply->msg.count = KVT_HIST_KINDS * (KVT_HIST_BOUNDS + 2); /* a sum and the buckets */
    kvt_reply_send(store, client, &reply->msg);
}

int kvt_statfile_open(struct kvt_store *store)
{
    struct kvt_store_statfile *statfile;

    if (!store->disk_count || store->statfile)
        return 0;
    statfile = calloc(1, sizeof(*statfile));
    if (!statfile)
        return -ENOMEM;
    statfile->io = store->disks[0].io;
    statfile->text = aligned_alloc(KVT_PAGE_BYTES, KVT_STORE_STATS_BYTES);
    if (!statfile->text) {
        free(statfile);
        return -ENOMEM;
    }
    statfile->file = statfile->io->ops->open(statfile->io, "stats", KVT_IO_OPEN_CREATE);
    store->statfile = statfile; /* no file: one warning, everything else works */
    if (statfile->file < 0)
        kvt_log(&store->params.log, KVT_LOG_WARN, "the file stats cannot be written: %s",
                kvt_strerror(statfile->file));
    return 0;
}

static void format(const struct kvt_store *store, struct kvt_store_statfile *statfile)
{
    struct kvt_store_stats stats;
    size_t at = 0;

    kvt_store_stats(store, &stats);
#define KVT_X(field, name, help)                                                                \
    at += (size_t)snprintf(statfile->text + at, KVT_STORE_STATS_BYTES - at, "%s %" PRIu64 "\n", \
                           name, stats.field);
    static_assert(KVT_STORE_STAT_COUNT * 64 < KVT_STORE_STATS_BYTES, "every line fits");
    KVT_STORE_COUNTERS(KVT_X)
    KVT_STORE_GAUGES(KVT_X)
#undef KVT_X
    if (store->params.stats_lines)
        at += store->params.stats_lines(store->params.stats_ctx, statfile->text + at,
                                        KVT_STORE_STATS_BYTES - at);
    memset(statfile->text + at, '\n', KVT_STORE_STATS_BYTES - at);
    statfile->activity = store->activity;
}

static void write_stats_done(struct kvt_io_req *req)
{
    struct kvt_store_statfile *statfile = req->user;

    statfile->going = 0;
}

int64_t kvt_statfile_run(struct kvt_store *store)
{
    struct kvt_store_statfile *statfile = store->statfile;
    int64_t now;

    if (!statfile || statfile->file < 0 || statfile->going || statfile->activity == store->activity)
        return INT64_MAX;
    now = kvt_store_now(store);
    if (now < statfile->next_ns)
        return statfile->next_ns;
    format(store, statfile);
    statfile->req = (struct kvt_io_req){.kind = KVT_IO_WRITE,
                                        .file = statfile->file,
                                        .iov_count = 1,
                                        .user = statfile,
                                        .done = write_stats_done};
    statfile->req.iov[0] =
        (struct iovec){.iov_base = statfile->text, .iov_len = KVT_STORE_STATS_BYTES};
    statfile->next_ns = now + KVT_STORE_STATS_PERIOD_NS;
    statfile->going = statfile->io->ops->submit(statfile->io, &statfile->req) == 0;
    return INT64_MAX;
}

void kvt_statfile_close(struct kvt_store *store)
{
    struct kvt_store_statfile *statfile = store->statfile;

    if (!statfile)
        return;
    while (statfile->going) { /* the log has closed: nobody else reaps any more */
        struct kvt_io_req *req;
        int fd = statfile->io->ops->event_fd(statfile->io);
        struct pollfd pfd = {.fd = fd, .events = POLLIN};

        if (statfile->io->ops->reap(statfile->io, &req, 1))
            req->done(req);
        else if (fd >= 0)
            (void)poll(&pfd, 1, REAP_POLL_MS);
    }
    if (statfile->file >= 0) {
        format(store, statfile);
        if (kvt_io_write_now(statfile->io, statfile->file, 0, statfile->text,
                             KVT_STORE_STATS_BYTES) < 0)
            kvt_log(&store->params.log, KVT_LOG_WARN, "the last numbers were not written");
        statfile->io->ops->close(statfile->io, statfile->file);
    }
    free(statfile->text);
    free(statfile);
    store->statfile = NULL;
}
