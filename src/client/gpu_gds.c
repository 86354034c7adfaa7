/* Direct loads: records that threads of ours read from the drive into GPU memory by cuFile, past
 * DRAM (gpu_lane_impl.h). Decision 0016.
 *
 *   READY, granted where it lies on disk --> due --> a thread reads it into chunks of the buffer
 *     --> the lane's queue `staged` --> job: checksum, decode --> end, chunks free
 *     `-- error, short, other bytes --> given back, asked for again without `direct`: through DRAM
 *
 * Invariants: nothing that was read is believed: the header's key and the checksum are compared as
 * for any record. A block that failed here is not said to be damaged: DRAM's path judges that.
 * FAILURES_MAX failures in a row switch direct loads off for the device, until the cache is closed.
 * On or off is said for all roots together: an ACQUIRE cannot name some of them.
 * Threads: THREADS of its own, and the lane's; "locked" means the cache's lock.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/gpu_lane_impl.h"
#include "gpu/gds.h"
#include "gpu/gds_read.h"

#define THREADS 8u      /* reads under way: what a drive of 7 GB/s wants of records of 0.5 MiB */
#define FAILURES_MAX 3u /* in a row */
#define FASTER_BY 1.05  /* than by DRAM in the probe, before "auto" takes it */
#define PROBE_BYTES (8u << 20)

struct file {
    uint32_t root, segment;
    uint32_t refs; /* reads under way */
    uint64_t used; /* when, for the oldest */
    bool stale;    /* other bytes than were granted: the file may be another one now */
    struct kvt_gds_file file;
};

struct thread {
    struct kvt_lane_gds *gds;
    pthread_t id;
    bool runs;
    void *stream;
};

struct kvt_lane_gds {
    struct kvt_lane *lane;
    struct kvt_gds_reader *reader;
    struct thread threads[THREADS];
    uint32_t root_count;
    char *roots[KVT_DISKS_MAX]; /* by the store's number */

    pthread_mutex_t files_lock; /* taken without the cache's lock, but by its holder never */
    uint64_t file_clock;
    struct file files[KVT_GDS_FILES];

    /* locked */
    bool stop, on;
    uint32_t failures;   /* in a row */
    pthread_cond_t work; /* blocks, or chunks came back */
    struct kvt_block_queue due;
    uint8_t taken[KVT_GDS_CHUNKS];
};

/* ---- chunks: locked ------------------------------------------------------------------------ */

static uint32_t chunks_of(uint32_t bytes)
{
    return (bytes + KVT_GDS_CHUNK_BYTES - 1) / KVT_GDS_CHUNK_BYTES;
}

/* The first of a free run, taken; KVT_NONE: there is none now. */
static uint32_t chunks_take(struct kvt_lane_gds *gds, uint32_t bytes)
{
    uint32_t wanted = chunks_of(bytes), run = 0;
    for (uint32_t i = 0; i < KVT_GDS_CHUNKS; i++) {
        run = gds->taken[i] ? 0 : run + 1;
        if (run < wanted)
            continue;
        memset(&gds->taken[i + 1 - wanted], 1, wanted);
        return i + 1 - wanted;
    }
    return KVT_NONE;
}

static void chunks_give(struct kvt_lane_gds *gds, uint32_t chunk, uint32_t bytes)
{
    memset(&gds->taken[chunk], 0, chunks_of(bytes));
    pthread_cond_broadcast(&gds->work);
}

void kvt_lane_let_go(struct kvt_cache *cache, struct kvt_block *block)
{
    if (!block->staged)
        return;
    block->staged = 0;
    chunks_give(kvt_block_req(cache, block)->pool->gpu->lane->gds, block->chunk,
                block->record_bytes);
}

uint8_t *kvt_lane_head(const struct kvt_lane *lane, const struct kvt_block *block)
{
    return kvt_gds_head(lane->gds->reader, block->chunk);
}

uint64_t kvt_lane_address(const struct kvt_lane *lane, const struct kvt_block *block)
{
    return kvt_gds_address(lane->gds->reader, block->chunk);
}

/* ---- files: not locked --------------------------------------------------------------------- */

/* An entry for a segment that is not open: one that is not, or rests. Under files_lock. */
static struct file *file_place(struct kvt_lane_gds *gds)
{
    struct file *best = NULL;
    for (size_t i = 0; i < KVT_GDS_FILES; i++) {
        struct file *file = &gds->files[i];
        if (file->refs > 0)
            continue;
        if (file->file.handle == NULL)
            return file;
        if (best == NULL || file->stale > best->stale ||
            (file->stale == best->stale && file->used < best->used))
            best = file;
    }
    return best;
}

static int file_get(struct kvt_lane_gds *gds, uint32_t root, uint32_t segment, struct file **out)
{
    char path[PATH_MAX];
    int rc = 0;
    struct file *file = NULL;
    if (root >= gds->root_count || gds->roots[root] == NULL)
        return -ENOENT;
    if (snprintf(path, sizeof(path), "%s/seg-%08x", gds->roots[root], segment) >= (int)sizeof(path))
        return -ENAMETOOLONG;
    pthread_mutex_lock(&gds->files_lock);
    for (size_t i = 0; i < KVT_GDS_FILES && file == NULL; i++)
        if (gds->files[i].file.handle != NULL && !gds->files[i].stale &&
            gds->files[i].root == root && gds->files[i].segment == segment)
            file = &gds->files[i];
    if (file == NULL) {
        file = file_place(gds); /* there are more of them than threads */
        kvt_gds_file_close(gds->reader, &file->file);
        rc = kvt_gds_file_open(gds->reader, path, &file->file);
        file->root = root;
        file->segment = segment;
        file->stale = false;
    }
    if (rc == 0) {
        file->refs++;
        file->used = ++gds->file_clock;
        *out = file;
    }
    pthread_mutex_unlock(&gds->files_lock);
    return rc;
}

static void file_put(struct kvt_lane_gds *gds, struct file *file, bool good)
{
    pthread_mutex_lock(&gds->files_lock);
    file->refs--;
    file->stale |= !good;
    pthread_mutex_unlock(&gds->files_lock);
}

static void file_forget(struct kvt_lane_gds *gds, uint32_t root, uint32_t segment)
{
    pthread_mutex_lock(&gds->files_lock);
    for (size_t i = 0; i < KVT_GDS_FILES; i++)
        if (gds->files[i].root == root && gds->files[i].segment == segment)
            gds->files[i].stale = true;
    pthread_mutex_unlock(&gds->files_lock);
}

/* ---- failures ------------------------------------------------------------------------------ */

/* Locked; lets go of the lock to say so. */
static void note_failure(struct kvt_lane_gds *gds, const char *what)
{
    struct kvt_cache *cache = gds->lane->cache;
    if (++gds->failures < FAILURES_MAX || !gds->on)
        return;
    gds->on = false;
    cache->counters.gds_off++;
    (void)snprintf(cache->gds_state, sizeof(cache->gds_state),
                   "off: %u direct loads in a row failed, the last one: %s", FAILURES_MAX, what);
    pthread_mutex_unlock(&cache->lock);
    kvt_log(&cache->log, KVT_LOG_WARN,
            "direct loads into CUDA device %d are switched off: %u in a row failed, the last one: "
            "%s; loads go through DRAM",
            gds->lane->device, FAILURES_MAX, what);
    pthread_mutex_lock(&cache->lock);
}

void kvt_lane_judged(struct kvt_lane *lane, const struct kvt_block *block, bool good)
{
    struct kvt_lane_gds *gds = lane->gds;
    struct kvt_cache *cache = lane->cache;
    if (good) {
        gds->failures = 0;
        return;
    }
    cache->counters.gds_wrong++;
    cache->counters.gds_fallback++;
    uint32_t root = block->root, segment = block->segment;
    pthread_mutex_unlock(&cache->lock);
    file_forget(gds, root, segment);
    pthread_mutex_lock(&cache->lock);
    note_failure(gds, "other bytes than were stored");
}

/* ---- reads --------------------------------------------------------------------------------- */

/* Not locked. */
static int read_block(struct thread *own, const struct kvt_block *block, uint32_t chunk)
{
    struct kvt_lane_gds *gds = own->gds;
    struct file *file;
    int rc = file_get(gds, block->root, block->segment, &file);
    if (rc != 0)
        return rc;
    rc = kvt_gds_read(gds->reader, own->stream, &file->file, block->arena_offset,
                      block->record_bytes, chunk);
    file_put(gds, file, rc == 0);
    return rc;
}

/* Locked. The block goes back to the store, and is asked for again without `direct`. */
static void fall_back(struct kvt_lane_gds *gds, struct kvt_block *block, int rc)
{
    struct kvt_cache *cache = gds->lane->cache;
    struct kvt_outcome out = {.kind = KVT_OUT_RETRY};
    cache->counters.gds_fallback++;
    if (rc == -ENODATA)
        cache->counters.gds_short++;
    else if (rc != 0)
        cache->counters.gds_errors++;
    kvt_coding_end(cache, KVT_REQ_LOAD, block, &out);
    kvt_pump(cache);
    int code = rc == -EIO ? kvt_gds_last_code(gds->reader) : 0;
    char what[160];
    (void)snprintf(what, sizeof(what), "%s%s%s (%d)",
                   rc == -ENODATA ? "a read brought fewer bytes" : kvt_strerror(rc),
                   code != 0 ? ": " : "", code != 0 ? kvt_cufile_error(code) : "",
                   code != 0 ? code : rc);
    if (rc != 0)
        note_failure(gds, what);
}

/* Locked; lets go of the lock to read. */
static void serve(struct thread *own, struct kvt_block *block, uint32_t chunk)
{
    struct kvt_lane_gds *gds = own->gds;
    struct kvt_cache *cache = gds->lane->cache;
    const struct kvt_req *req = kvt_block_req(cache, block);
    struct kvt_outcome out;
    kvt_engine_move(cache, block, KVT_B_CODING);
    pthread_mutex_unlock(&cache->lock);
    bool wanted = kvt_coding_begin(cache, req, &out);
    int rc = wanted ? read_block(own, block, chunk) : 0;
    pthread_mutex_lock(&cache->lock);
    if (!wanted || rc != 0)
        chunks_give(gds, chunk, block->record_bytes);
    if (!wanted) {
        kvt_coding_end(cache, KVT_REQ_LOAD, block, &out);
        kvt_pump(cache);
    } else if (rc != 0) {
        fall_back(gds, block, rc);
    } else {
        block->chunk = chunk;
        block->staged = 1;
        cache->counters.gds_reads++;
        cache->counters.gds_bytes += block->record_bytes;
        kvt_bq_push(cache, &gds->lane->ready[KVT_LANE_STAGED], block);
        pthread_cond_signal(&gds->lane->work);
    }
}

/* Locked. Whether it cannot be read directly at all: it is too large, or its table of levels is. */
static bool unfit(struct kvt_lane_gds *gds, const struct kvt_block *block)
{
    const struct kvt_shape_group *group = kvt_req_group(kvt_block_req(gds->lane->cache, block));
    return !gds->on || chunks_of(block->record_bytes) > KVT_GDS_CHUNKS ||
           (block->map_id >= KVT_MAP_MIXED_FIRST &&
            sizeof(struct kvt_record_header) + kvt_map_table_bytes(group) > KVT_GDS_HEAD_BYTES);
}

static void *thread_main(void *arg)
{
    struct thread *own = arg;
    struct kvt_lane_gds *gds = own->gds;
    struct kvt_cache *cache = gds->lane->cache;
    pthread_mutex_lock(&cache->lock);
    while (!gds->stop) {
        struct kvt_block *block = kvt_bq_peek(cache, &gds->due);
        if (block != NULL && unfit(gds, block)) {
            (void)kvt_bq_pop(cache, &gds->due);
            kvt_engine_move(cache, block, KVT_B_CODING);
            fall_back(gds, block, 0);
            continue;
        }
        uint32_t chunk = block == NULL ? KVT_NONE : chunks_take(gds, block->record_bytes);
        if (chunk == KVT_NONE) {
            pthread_cond_wait(&gds->work, &cache->lock);
            continue;
        }
        (void)kvt_bq_pop(cache, &gds->due);
        serve(own, block, chunk);
    }
    pthread_mutex_unlock(&cache->lock);
    return NULL;
}

void kvt_gds_push(struct kvt_lane *lane, struct kvt_block *block)
{
    kvt_bq_push(lane->cache, &lane->gds->due, block);
    pthread_cond_signal(&lane->gds->work);
}

bool kvt_lane_direct(const struct kvt_pool *pool)
{
    return pool->gpu != NULL && pool->gpu->lane->gds != NULL && pool->gpu->lane->gds->on;
}

/* ---- open and close ------------------------------------------------------------------------ */

bool kvt_gds_wanted(int setting, const struct kvt_gds_report *report)
{
    if (report->verdict == KVT_GDS_ABSENT)
        return false;
    if (setting == KVT_PIN_SET_REQUIRED)
        return report->verdict == KVT_GDS_DIRECT;
    return report->ordinary_gbps > 0 && report->read_gbps >= FASTER_BY * report->ordinary_gbps;
}

/* Where the probe's file may lie: beside the root, so that the root's cap holds, else in it. */
static void scratch_dir(const char *root, char dir[PATH_MAX])
{
    struct stat a, b;
    (void)snprintf(dir, PATH_MAX, "%s", root);
    char *slash = strrchr(dir, '/');
    if (slash != NULL && slash != dir)
        *slash = '\0';
    if (slash == NULL || slash == dir || stat(dir, &a) != 0 || stat(root, &b) != 0 ||
        a.st_dev != b.st_dev || faccessat(AT_FDCWD, dir, W_OK, AT_EACCESS) != 0)
        (void)snprintf(dir, PATH_MAX, "%s", root);
}

/* Probe one root. true: it is to be read directly. text: why, or why not. */
static bool probe_root(struct kvt_lane *lane, const char *root, char *text, size_t len)
{
    struct kvt_cache *cache = lane->cache;
    struct kvt_gds_report report;
    char dir[PATH_MAX];
    scratch_dir(root, dir);
    struct kvt_gds_opts opts = {.dir = dir, .library = cache->gds_library, .bytes = PROBE_BYTES};
    if (cache->gds_probe_bytes != 0)
        opts.bytes = cache->gds_probe_bytes;
    int rc = kvt_gds_probe(lane->gpu, &opts, &report);
    bool wanted = rc == 0 && (kvt_gds_wanted(cache->settings->gds, &report) ||
                              (cache->gds_any && report.verdict != KVT_GDS_ABSENT));
    const char *end = "";
    if (!wanted && rc == 0 && report.verdict != KVT_GDS_ABSENT)
        end = cache->settings->gds == KVT_PIN_SET_REQUIRED ? ": not a direct path"
                                                           : ": not faster than through DRAM";
    (void)snprintf(text, len, "%s%s: %s (%.2f GB/s, through DRAM %.2f GB/s)%s",
                   wanted ? "" : "off: ", kvt_gds_name(report.verdict), report.reason,
                   report.read_gbps, report.ordinary_gbps, end);
    return wanted;
}

/* The roots in use, by number. true: all of them are to be read directly, and there is one. */
static bool find_roots(struct kvt_lane_gds *gds, char *text, size_t len)
{
    struct kvt_host *host = &gds->lane->cache->host;
    bool wanted = true;
    pthread_mutex_lock(&host->lock);
    for (uint32_t i = 0; i < KVT_DISKS_MAX && wanted; i++) {
        const struct kvt_root_state *root = &host->roots[i];
        if (root->io == NULL || root->number < 0 || root->number >= (int)KVT_DISKS_MAX)
            continue;
        gds->root_count = KVT_MAX(gds->root_count, (uint32_t)root->number + 1);
        gds->roots[root->number] = realpath(root->path, NULL);
        wanted = root->direct && gds->roots[root->number] != NULL;
    }
    pthread_mutex_unlock(&host->lock);
    if (gds->root_count == 0)
        (void)snprintf(text, len, "off: no disk root is in use");
    else if (!wanted)
        (void)snprintf(text, len, "off: a root is not read with O_DIRECT");
    for (uint32_t i = 0; i < gds->root_count && wanted; i++)
        wanted = gds->roots[i] == NULL || probe_root(gds->lane, gds->roots[i], text, len);
    return wanted && gds->root_count > 0;
}

/* Before the probes, which then find cuFile started: it does not like to start twice. */
static int start_reader(struct kvt_lane_gds *gds, char *text, size_t len)
{
    struct kvt_gds_reader_opts opts = {
        .library = gds->lane->cache->gds_library,
        .bytes = (uint64_t)KVT_GDS_CHUNKS * KVT_GDS_CHUNK_BYTES,
        .chunk_bytes = KVT_GDS_CHUNK_BYTES,
        .head_bytes = KVT_GDS_HEAD_BYTES,
    };
    char reason[200];
    int rc = kvt_gds_reader_new(gds->lane->gpu, &opts, &gds->reader, reason, sizeof(reason));
    if (rc != 0) {
        gds->reader = NULL;
        (void)snprintf(text, len, "off: %s", reason);
    }
    return rc;
}

static int start_threads(struct kvt_lane_gds *gds, char *text, size_t len)
{
    int rc = 0;
    for (uint32_t i = 0; i < THREADS && rc == 0; i++) {
        struct thread *own = &gds->threads[i];
        own->gds = gds;
        rc = kvt_gds_stream_new(gds->reader, &own->stream);
        if (rc == 0)
            rc = kvt_thread_start(&own->id, "kvt-gds", thread_main, own);
        own->runs = rc == 0;
        if (rc != 0)
            (void)snprintf(text, len, "off: %s", kvt_strerror(rc));
    }
    return rc;
}

static void gds_free(struct kvt_lane_gds *gds)
{
    struct kvt_cache *cache = gds->lane->cache;
    pthread_mutex_lock(&cache->lock);
    gds->stop = true;
    pthread_cond_broadcast(&gds->work);
    pthread_mutex_unlock(&cache->lock);
    for (uint32_t i = 0; i < THREADS; i++) {
        if (gds->threads[i].runs)
            pthread_join(gds->threads[i].id, NULL);
        if (gds->reader != NULL)
            kvt_gds_stream_free(gds->reader, gds->threads[i].stream);
    }
    for (size_t i = 0; i < KVT_GDS_FILES && gds->reader != NULL; i++)
        kvt_gds_file_close(gds->reader, &gds->files[i].file);
    kvt_gds_reader_free(gds->reader);
    for (uint32_t i = 0; i < KVT_DISKS_MAX; i++)
        free(gds->roots[i]);
    pthread_mutex_destroy(&gds->files_lock);
    pthread_cond_destroy(&gds->work);
    free(gds);
}

/* NULL: it is off, and text says why. */
static struct kvt_lane_gds *gds_make(struct kvt_lane *lane, char *text, size_t len)
{
    struct kvt_lane_gds *gds = calloc(1, sizeof(*gds));
    if (gds == NULL) {
        (void)snprintf(text, len, "off: out of memory");
        return NULL;
    }
    gds->lane = lane;
    gds->on = true;
    kvt_bq_init(&gds->due);
    pthread_mutex_init(&gds->files_lock, NULL);
    pthread_cond_init(&gds->work, NULL);
    if (start_reader(gds, text, len) == 0 && find_roots(gds, text, len) &&
        start_threads(gds, text, len) == 0)
        return gds;
    gds_free(gds);
    return NULL;
}

int kvt_gds_open(struct kvt_lane *lane, char *reason, size_t len)
{
    struct kvt_cache *cache = lane->cache;
    int setting = cache->settings->gds;
    char text[sizeof(cache->gds_state)] = "off: gds=off";
    struct kvt_lane_gds *gds = NULL;
    if (setting != KVT_PIN_SET_OFF && cache->remote)
        (void)snprintf(text, sizeof(text), "off: the store is in another process");
    else if (setting != KVT_PIN_SET_OFF)
        gds = gds_make(lane, text, sizeof(text));
    pthread_mutex_lock(&cache->lock);
    lane->gds = gds;
    (void)snprintf(cache->gds_state, sizeof(cache->gds_state), "%s", text);
    pthread_mutex_unlock(&cache->lock);
    if (gds != NULL || setting != KVT_PIN_SET_REQUIRED)
        return 0;
    (void)snprintf(reason, len, "gds=required, but it is %s", text);
    return KVT_E_UNSUPPORTED;
}

void kvt_gds_close(struct kvt_lane *lane)
{
    if (lane->gds != NULL)
        gds_free(lane->gds);
    lane->gds = NULL;
}
