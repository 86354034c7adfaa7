/* The cache object of the client half. Its parts have headers of their own: requests.h, calls.h,
 * ns.h (namespaces, layouts, pools), planning.h, choice.h, coding.h.
 *
 * One mutex (kvt_cache.lock) guards everything that is not marked otherwise: requests, block
 * entries, queues, messages in flight, the producer side of the request ring and the counters. It
 * is never held over a codec call, a checksum, a log call or a wait for the store. What takes time
 * (encode, decode, verify) runs on worker threads, which own a block while it is CODING.
 *
 * Threads: API callers; one reply thread (reply.c); `threads` workers (worker.c). All data-path
 * memory is allocated by kvt_open(), kvt_ns_open() and kvt_pool_register().
 */
#ifndef KVT_CLIENT_CLIENT_H
#define KVT_CLIENT_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/log.h"
#include "client/calls.h"
#include "client/client_counters.h"
#include "client/host.h"
#include "client/link.h"
#include "client/ns.h"
#include "client/pin.h"
#include "client/planning.h"
#include "client/requests.h"
#include "client/settings.h"
#include "format/message.h"
#include "io/io.h"
#include "kvtier/cache.h"
#include "store/owner.h"

#define KVT_CLIENT_RING_BYTES (1u << 20) /* each way */
#define KVT_WORKERS_MAX 64u

struct kvt_cache {
    pid_t pid; /* of the opener: a forked child is refused */
    struct kvt_config *config;
    const struct kvt_settings *settings;
    struct kvt_log log;
    struct kvt_clock clock;
    bool remote;          /* the store is a kvtierd's: link, not host */
    struct kvt_host host; /* the store in this process */
    struct kvt_link link; /* to the store in another one; the reply thread's (link.c) */
    uint8_t *arena;       /* of either; remote: NULL while there is none */
    uint64_t arena_bytes;
    struct kvt_pin pin; /* of the arena; pools of devices start it, under their own lock */
    bool connected;     /* to the host's owner */
    struct kvt_channel channel;
    int event_fd; /* rung at each completion */
    int wake_fd;  /* wakes the reply thread */
    _Atomic int enabled;
    pthread_t workers[KVT_WORKERS_MAX];
    uint32_t worker_count;
    pthread_t reply_thread;
    bool reply_running;
    const char *gpu_library;          /* the CUDA driver; NULL: where it usually is. Set by tests */
    const char *gds_library;          /* cuFile, likewise */
    bool gds_any;                     /* a test's: direct loads by whatever path cuFile takes */
    uint64_t gds_probe_bytes;         /* a test's; 0: as usual */
    uint32_t gpu_tune_runs;           /* a test's; 0: as usual */
    struct kvt_clock *gpu_tune_clock; /* a test's; NULL: ours */
    pthread_mutex_t gpu_lock;         /* lanes and their stages (gpu_pool.c); taken before lock */
    struct kvt_lane *lanes;

    pthread_mutex_t lock; /* everything below */
    bool closing, stop_workers, stop_reply;
    char daemon_state[512];      /* remote: "connected", or why not */
    bool daemon_told;            /* that it is away */
    bool pinged;                 /* and no reply since */
    int64_t heard_ns;            /* of the last reply, or since nothing is owed */
    uint32_t link_lives;         /* connections so far: handles are of one of them */
    struct kvt_call ping;        /* asked to see whether the daemon lives */
    struct kvt_call *lead;       /* its caller sleeps on the reply ring itself; NULL: nobody does */
    _Atomic uint32_t *lead_word; /* where */
    bool stuck;                  /* a message waits for room in the request ring */
    bool broken;         /* disconnected, or the reply ring is malformed: nothing more is asked;
                            remote: until the next connection */
    uint32_t callers;    /* API calls that may touch the cache after unlocking */
    pthread_cond_t idle; /* callers, refs or active requests went down */
    pthread_cond_t room; /* credits, flights or ring space came back */
    pthread_cond_t work; /* a block is READY */
    uint32_t workers_idle, room_waiters;
    bool worker_waking; /* one has been signalled and has not come awake yet */
    uint32_t purges;    /* calls in kvt_purge() */

    struct kvt_block *blocks;
    int32_t *statuses;
    uint64_t *granule_bits; /* 1: in use */
    uint32_t granule_count, granule_hint;
    struct kvt_req *requests;
    struct kvt_req_list free_reqs, active;
    struct kvt_req_list asking[2]; /* by kind */
    uint32_t active_count, held_count, held_blocks;

    struct kvt_block_queue ready[2]; /* by kind */
    struct kvt_block_queue give_back[2];
    struct kvt_block_queue coded;          /* to be COMMITted */
    struct kvt_block_queue retry;          /* to be ALLOCed one by one */
    struct kvt_block_queue reload;         /* to be ACQUIREd one by one, not direct */
    uint32_t load_streak;                  /* load jobs since the last store job */
    uint64_t alloc_bytes, alloc_bytes_max; /* in slots allocated and not yet committed */

    struct kvt_flight flights[KVT_FLIGHTS_MAX];
    uint32_t flight_free;
    uint32_t flight_count[KVT_C_CLASSES];
    uint32_t credit_used[KVT_C_CLASSES];
    uint32_t cancels_wanted;

    struct kvt_planning planning;
    struct kvt_trace_log *trace; /* NULL: nothing is recorded; locked by itself */
    struct kvt_prompts *prompts; /* of the last second; shadow mode only */
    enum kvt_tier *shadow_tiers; /* NULL: somebody is using it */
    uint32_t shadow_room;        /* entries of it; 0: no shadow mode */
    struct kvt_shape *shapes;
    TAILQ_HEAD(, kvt_ns) namespaces;
    TAILQ_HEAD(, kvt_pool) pools;
    struct kvt_client_counters counters;
    struct kvt_client_counters counters_seen; /* the owner's copy, for the file "stats" */
    char gpu_state[256]; /* of the last pool registered in GPU memory, as a sentence */
    char gds_state[512]; /* of direct loads into the device opened last */
    char gpu_paths[256]; /* how small jobs go on it */
};

/* cache.c: take the lock for an API call. 0 with the lock held; KVT_E_CLOSED without (closing, or
 * this is a forked child; _enter_live: or the store of this process has disconnected us). */
int kvt_cache_enter(struct kvt_cache *cache);
int kvt_cache_enter_live(struct kvt_cache *cache);
bool kvt_cache_forked(const struct kvt_cache *cache);
/* Record bytes that may be in slots being filled. */
uint64_t kvt_alloc_window(const struct kvt_cache *cache);

/* remote.c: the store is a kvtierd's. _open: never fails, error says what is missing; _restore: the
 * reply thread's, comes back connected, or when the cache closes; _watch: gives up a daemon that
 * says nothing (lock held); returns for how long to sleep at most (ms). */
void kvt_remote_open(struct kvt_cache *cache, char *error, size_t error_len);
void kvt_remote_close(struct kvt_cache *cache);
void kvt_remote_restore(struct kvt_cache *cache);
int kvt_remote_watch(struct kvt_cache *cache);

/* worker.c and reply.c */
int kvt_workers_start(struct kvt_cache *cache);
void kvt_workers_stop(struct kvt_cache *cache);
/* A block is READY: to the workers, or to its GPU's lane. Lock held; _wake() is due after it. */
void kvt_ready_push(struct kvt_cache *cache, struct kvt_block *block, int kind);
void kvt_workers_wake(struct kvt_cache *cache); /* blocks became READY; lock held */
int kvt_reply_start(struct kvt_cache *cache);
/* Handle replies that are there, pump and wake who waits; lock held. Returns replies handled. */
int kvt_reply_drain(struct kvt_cache *cache);
/* Who reads the reply ring, in turn with the reply thread: _busy() a worker that takes a batch, and
 * leaves the ring to the workers where nobody waits for a reply meanwhile; _listen() whoever stops
 * reading: the reply thread hears of what comes from now on. Lock held. Returns replies handled. */
void kvt_reply_busy(struct kvt_cache *cache);
int kvt_reply_listen(struct kvt_cache *cache);
void kvt_reply_stop(struct kvt_cache *cache);
void kvt_reply_wake(struct kvt_cache *cache); /* any thread */

/* client_stats.c */
/* kvt_store_params.stats_lines: our counters for the file "stats". Owner thread; never waits. */
size_t kvt_stats_lines(void *cache, char *text, size_t room);

/* ---- block queues -------------------------------------------------------------------------- */

static inline void kvt_bq_init(struct kvt_block_queue *queue)
{
    queue->head = queue->tail = KVT_NONE;
    queue->count = 0;
}

static inline void kvt_bq_push(struct kvt_cache *cache, struct kvt_block_queue *queue,
                               struct kvt_block *block)
{
    uint32_t index = (uint32_t)(block - cache->blocks);
    block->next = KVT_NONE;
    if (queue->tail == KVT_NONE)
        queue->head = index;
    else
        cache->blocks[queue->tail].next = index;
    queue->tail = index;
    queue->count++;
}

static inline struct kvt_block *kvt_bq_peek(struct kvt_cache *cache,
                                            const struct kvt_block_queue *queue)
{
    return queue->head == KVT_NONE ? NULL : &cache->blocks[queue->head];
}

static inline struct kvt_block *kvt_bq_pop(struct kvt_cache *cache, struct kvt_block_queue *queue)
{
    struct kvt_block *block = kvt_bq_peek(cache, queue);
    if (block == NULL)
        return NULL;
    queue->head = block->next;
    if (queue->head == KVT_NONE)
        queue->tail = KVT_NONE;
    queue->count--;
    block->next = KVT_NONE;
    return block;
}

/* ---- what follows from a request ----------------------------------------------------------- */

static inline struct kvt_req *kvt_block_req(struct kvt_cache *cache, const struct kvt_block *block)
{
    return &cache->requests[block->req];
}

static inline const struct kvt_shape_group *kvt_req_group(const struct kvt_req *req)
{
    return &req->ns->shape->groups[req->group];
}

static inline uint32_t kvt_req_handle(const struct kvt_req *req)
{
    return req->ns->groups[req->group].handle;
}

/* Where the pool remembers what a page of the request was loaded from. */
static inline _Atomic uint8_t *kvt_req_origin(const struct kvt_req *req, uint32_t page)
{
    return &req->pool->origin[(size_t)req->group * req->pool->desc.block_count + page];
}

/* How a block ends whose store has gone: without one there is nothing but misses. */
static inline int32_t kvt_lost_status(const struct kvt_cache *cache)
{
    return cache->remote ? KVT_E_MISS : KVT_E_CLOSED;
}

#endif
