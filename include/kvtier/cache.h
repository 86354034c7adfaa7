/* The cache: store blocks of an engine's pool, look them up by key, load them back.
 *
 * Purpose:  client half of kvtier over an in-process store (DRAM and disk).
 * Threads:  every function may be called from any thread unless it says otherwise; callbacks do not
 *           exist, completions are polled, waited for, or signalled on an event fd.
 * Errors:   error.h. A miss is a result. Every accepted request completes exactly once; a refused
 *           call completes never.
 * Lifetime: cache outlives its namespaces, pools and requests; kvt_close() cancels what is left,
 *           waits for it and frees everything. Pool pages are borrowed from kvt_store()/kvt_load()
 *           until the request completes.
 * After kvt_ns_open() and kvt_pool_register() the data path allocates nothing, but for the level
 * maps that a namespace chooses from its first blocks (docs/config.md, Levels). Closed:   when the
 * store behind a cache disconnects it (it never does so without a defect, and logs it), what is in
 * flight ends with KVT_E_CLOSED, and so do later calls; kvt_close() is what is left to do. Fork: a
 * forked child owns nothing of the cache: its calls return KVT_E_CLOSED or do nothing, its exit
 * disturbs nothing, and it holds no lock of a root, so that the roots of a parent that died are
 * free. dlclose() leaves the library where it is, since threads of an open cache run in it.
 */
#ifndef KVTIER_CACHE_H
#define KVTIER_CACHE_H

#include <kvtier/config.h>
#include <kvtier/error.h>
#include <kvtier/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_cache;
struct kvt_ns;
struct kvt_pool;
struct kvt_req;

/* Open a cache. config NULL: the defaults. KVTIER_CONFIG of the environment is applied over the
 * config unless it says env=no (docs/config.md). Blocks: while L2 roots are scanned. A root that
 * cannot be used (locked, read-only, not ours, newer) fails the open when disk_required=yes, else
 * the cache runs without it, logs one warning and says so in kvt_stats_each ("disk.state"). Returns
 * 0; -errno of the system (-ENOMEM, -EMFILE, -EAGAIN: no thread to be had, ...); a KVT_E_* code of
 * error.h.
 * error: optional, error_len bytes. On failure one sentence that names the thing and the remedy; on
 * success "", or one sentence for each root that the cache runs without. So print it whenever it is
 * not empty. *out is owned by the caller until kvt_close(). */
int kvt_open(const struct kvt_config *config, struct kvt_cache **out, char *error,
             size_t error_len);

/* The same by one text, as kvt_config_set_all() takes it: kvt_open_at("unix:/run/kvtier.sock", ...)
 * uses a kvtierd, kvt_open_at("dram=4GiB", ...) a store of this process; "" or NULL: the defaults.
 * No log callback: what kvt_open() would log as a warning is in `error` as far as it is about the
 * open. Returns, error: as kvt_open(); KVT_E_CONFIG_KEY, KVT_E_CONFIG_VALUE. */
int kvt_open_at(const char *where, struct kvt_cache **out, char *error, size_t error_len);

/* Cancel requests in flight, write what is queued, seal, sync and free. Blocks. NULL is allowed. */
void kvt_close(struct kvt_cache *cache);

/* Open the namespace of an identity and layout. Blocks briefly; allocates.
 * An identity without model and without revision (weights digest) is refused: any two models would
 * share blocks under it. The layout is part of the namespace, so another layout is another, empty
 * namespace and no error.
 * 0; KVT_E_VERSION; KVT_E_INVAL; KVT_E_LIMIT 4,096 groups of namespaces have been opened since the
 * store was, closed ones included; KVT_E_UNSUPPORTED; KVT_E_LAYOUT the store knows this
 * very namespace with records of another size (two versions of the library on one store);
 * KVT_E_TOO_SMALL a record does not fit the caps. The log has the argument and its range. Owned
 * until kvt_ns_close(). */
int kvt_ns_open(struct kvt_cache *cache, const struct kvt_identity *identity,
                const struct kvt_layout *layout, struct kvt_ns **out);
void kvt_ns_close(struct kvt_ns *ns); /* its requests must have completed; NULL is allowed */

/* What a namespace may have of the store: all its groups together, DRAM and disk. 0 says nothing,
 * and what was said before (by any client) holds; KVT_LIMIT_NONE lifts it. The options ns_quota and
 * ttl hold for every namespace: nothing said here gives more than these. */
#define KVT_LIMIT_NONE INT64_MAX
struct kvt_ns_limits {
    size_t struct_size;
    uint64_t quota_bytes; /* of records, 64 KiB at least: beyond it its own blocks make room */
    int64_t ttl_ns; /* blocks that nobody uses for so long are gone; a second at least. Changing it
                       makes all blocks of the namespace begin anew */
};
/* Say it; it holds as long as the store is open, and is said again to a kvtierd that was restarted.
 * A smaller quota than what is there takes effect by and by: as blocks are stored.
 * Thread: any. Blocks: for a round trip per group. 0; KVT_E_INVAL; KVT_E_VERSION; -ENOMEM. */
int kvt_ns_limit(struct kvt_ns *ns, const struct kvt_ns_limits *limits);

/* The namespace id (16 bytes), for tools and logs. Borrowed while ns lives. */
const uint8_t *kvt_ns_id(const struct kvt_ns *ns);

/* Bytes of one stored record of `group` at `level` (header and padding included) as blocks are
 * stored now: it may grow when levels rise (docs/config.md, Levels). 0 if none. */
size_t kvt_ns_record_bytes(const struct kvt_ns *ns, uint16_t group, int level);

/* Register engine memory as a pool. The memory must stay valid until kvt_pool_unregister().
 * A pool in GPU memory (desc->device >= 0) is coded by the GPU itself; the first one opens the
 * device, takes about 35 MiB of its memory for staging and starts to pin host memory in the
 * background ("dram.pinned_bytes"). When the device is lost, requests on its pools end with
 * KVT_E_DEVICE and everything else lives on.
 * 0; KVT_E_LAYOUT shapes do not match; KVT_E_VERSION; KVT_E_INVAL also: memory that is not of that
 * device; KVT_E_UNSUPPORTED no such device, no driver, no kernels in this build; -ENOMEM;
 * KVT_E_DEVICE. "gpu.state" and the log have the reason. */
int kvt_pool_register(struct kvt_cache *cache, const struct kvt_layout *layout,
                      const struct kvt_pool_desc *desc, struct kvt_pool **out);
void kvt_pool_unregister(struct kvt_pool *pool); /* its requests must have completed; NULL: ok */

/* Say that pages were computed anew (or are about to be) and hold exact KV again.
 * Every page remembers the level that it was last loaded from. A page of lossy origin is never
 * stored as if it were exact: when its record is gone, it is stored again at kv8 ("store.reorigin"
 * counts them). An engine that reuses a page calls this before it stores the page's new content,
 * best when it allocates the page.
 * ids: n page numbers, each < block_count. Thread: any. Blocks, allocates: never. 0; KVT_E_INVAL,
 * and then nothing is changed. */
int kvt_pool_reset_origin(struct kvt_pool *pool, const uint32_t *ids, size_t n);
/* The same for one group, where page 5 of one group is not page 5 of another: the call above means
 * every group's. */
int kvt_pool_reset_origin_group(struct kvt_pool *pool, uint16_t group, const uint32_t *ids,
                                size_t n);

enum kvt_lookup_flag {
    /* Not a prompt that is about to be computed: whoever stores looks what is missing, a tool what
     * there is. Not recorded ("trace"), and answered as it is in shadow mode ("shadow"). */
    KVT_LOOKUP_PROBE = 1
};

struct kvt_lookup_opts {
    size_t struct_size;
    int min_level;  /* enum kvt_level; DEFAULT accepts any */
    uint32_t flags; /* enum kvt_lookup_flag, or 0 */
    /* Ranks that hold a part of each block: keys name the block with shard 0, and it counts as
     * there when shards 0 .. shards - 1 are, all of them, on the tier of the slowest. 0 and 1: each
     * key as it is (also where all ranks hold the same bytes, as with MLA: those are stored once,
     * with shard 0). So a scheduler that owns no pool sees what all its workers can load. At most
     * 256. */
    uint32_t shards;
    uint32_t prompt_tokens; /* of the whole prompt, for trace and shadow; 0: those of the keys */
    uint8_t *roots; /* kvt_lookup() only: optional output, n entries: the number of the root that a
                       block with tier DISK is on (with shards: one of its parts), else 0: for
                       kvt_plan_query.roots, so that a slow drive is told from a fast one */
};
/* struct_size of callers whose struct ends before `shards`: flags are not looked at; and before
 * `roots`. */
#define KVT_LOOKUP_OPTS_SIZE_0 16u
#define KVT_LOOKUP_OPTS_SIZE_1 24u

/* How many of the n keys, from the first on, can be loaded (the longest leading run).
 * tiers: optional, n entries: where each key of the run is; entries after the run are MISS, or
 *        PENDING where the block is being stored right now (PENDING ends the run).
 * Blocks: for one round trip to the store. Returns 0..n or a negative error. */
long kvt_lookup(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                const struct kvt_lookup_opts *opts, enum kvt_tier *tiers);

/* A prompt's blocks of one group, for kvt_lookup_groups(). */
struct kvt_group_chain {
    uint16_t group;
    uint16_t reserved;          /* 0 */
    const struct kvt_key *keys; /* of its blocks from the start of the prompt on, borrowed */
    size_t n;
    enum kvt_tier *tiers; /* output, n entries: where each key is, as far as it was asked for */
    size_t first, count;  /* output: blocks [first, first + count) are what the hit needs */
};

/* The longest prefix of a prompt that every group of the layout can serve, in tokens: it ends where
 * a block of each group ends, and needs what enum kvt_group_kind says.
 * chains: one for each group of the layout, in any order; tiers, first and count are outputs.
 * max_tokens: the hit may be that long: the prompt's tokens less one, when one must be computed.
 * Blocks: for a round trip per group. Allocates: never. Returns 0..max_tokens or a negative error.
 * What is stored of window and state groups is found and kept without the blocks before it. */
long kvt_lookup_groups(struct kvt_ns *ns, struct kvt_group_chain *chains, size_t count,
                       size_t max_tokens, const struct kvt_lookup_opts *opts);

/* How many whole blocks of a prompt of n_tokens may be loaded so that at least one token is left to
 * compute: (n_tokens - 1) / block_tokens. "short" when 0. */
size_t kvt_usable_blocks(uint32_t block_tokens, size_t n_tokens);

/* What a pool in GPU memory waits for, on the device and without the CPU, before pages are read or
 * written. A stream counts with what was queued on it before the call; an event must have been
 * recorded before the call and not be recorded again until the request completes. Both are of the
 * pool's device, in its primary context; handles of the driver API and of the runtime API are the
 * same. */
enum kvt_wait_for {
    KVT_WAIT_FOR_NOTHING = 0,
    KVT_WAIT_FOR_STREAM = 1, /* wait_for is a CUstream; NULL is the legacy default stream */
    KVT_WAIT_FOR_EVENT = 2   /* wait_for is a CUevent */
};

struct kvt_store_opts {
    size_t struct_size;
    /* Key of the block before keys[0]. It must be stored, or being stored: else no block of the
     * call is, each ends with KVT_E_ORPHAN, since no lookup would get past the gap. NULL at the
     * start of a sequence; with first_pos > 0 it means "unknown": the blocks are stored whatever is
     * there before them, and stay when it goes. Not NULL with first_pos 0 is refused. */
    const struct kvt_key *parent;
    uint32_t first_pos; /* of the first token of keys[0], in tokens; a multiple of block_tokens */
    int level;          /* enum kvt_level; DEFAULT: the configured level */
    int exact;          /* 1: raw whatever the level */
    int cool;           /* 1: take the place of a better record: the block has left its window */
    int write;          /* enum kvt_write: when the blocks go to disk; DEFAULT: as configured */
    int wait;           /* enum kvt_wait_for: what makes the pages ready; GPU memory only */
    void *wait_for;
};
/* struct_size of callers whose struct ends before `cool`: accepted, what is not there is 0. */
#define KVT_STORE_OPTS_SIZE_0 32u

/* Queue the store of n blocks of one chain out of pool pages.
 * keys:    n keys of one chain and group, parents first. Borrowed until return.
 * ids:     n page numbers, each < block_count. The pages are read until completion.
 * n:       0 is allowed: the request is complete at once, and is freed like any other.
 * opts:    NULL for defaults.
 * The first block of a sequence (first_pos 0) is stored raw; a block that fails the guard goes to
 * the next level up. Blocks already present at the level or better are not written again.
 * cool: a present record of a higher level is replaced by one of `level` (of a lower one: not). A
 * page that was loaded from a kv8 record is as good a source as an exact one, since kv8's error is
 * far below that of the levels that blocks cool to; a page of 6 bits or less is never coded again.
 * Thread:  any. Blocks: never. Allocates: never.
 * Returns: 0 accepted, *out is owned until kvt_req_free(); -EAGAIN queue full; KVT_E_LAYOUT the
 *          pool does not match the namespace; KVT_E_LIMIT n is above request_blocks_max;
 *          KVT_E_DEVICE the stream or event was refused; KVT_E_VERSION; KVT_E_UNSUPPORTED;
 *          KVT_E_INVAL also: wait on a pool in host memory. The log says at debug level which
 *          argument it was. A refused call completes never. */
int kvt_store(struct kvt_ns *ns, struct kvt_pool *pool, const struct kvt_key *keys,
              const uint32_t *ids, size_t n, const struct kvt_store_opts *opts,
              struct kvt_req **out);

struct kvt_load_opts {
    size_t struct_size;
    int64_t deadline_ns; /* from now; 0: the configured default; < 0: none */
    int min_level;       /* enum kvt_level; DEFAULT accepts any */
    int wait;            /* as in kvt_store_opts: pages are not written before */
    void *wait_for;
    int layers;   /* 1: the first layers of all blocks come first, where that can be done (a
                     pool in GPU memory): kvt_req_wait_layer() */
    int reserved; /* 0 */
};
/* struct_size of callers whose struct ends before `wait`, and before `layers`. */
#define KVT_LOAD_OPTS_SIZE_0 24u
#define KVT_LOAD_OPTS_SIZE_1 32u

/* Queue the load of n blocks into pool pages. Same rules as kvt_store(); pages are written until
 * completion, and only pages whose status is 0 hold what the level promises: the others are
 * untouched or must be treated as garbage. Blocks are verified before a page is written (in GPU
 * memory: before the block's status is 0).
 * No page may stand twice in ids, nor in two loads at a time: of two blocks in one page either may
 * win, in part. */
int kvt_load(struct kvt_ns *ns, struct kvt_pool *pool, const struct kvt_key *keys,
             const uint32_t *ids, size_t n, const struct kvt_load_opts *opts, struct kvt_req **out);

/* ---- does it pay? -------------------------------------------------------------------------------
 * What a namespace has seen of the engine's prefill, and the cache of its tiers, weighed against
 * each other. Option "plan" (docs/config.md): on; deterministic: by the start values alone, so that
 * equal questions get equal answers; off: everything is loaded. docs/plan.md has the models. */

/* What the engine can do with blocks that are not at the front of the prompt. */
enum kvt_plan_cut {
    KVT_PLAN_CUT_NONE = 0,   /* nothing: blocks are loaded from the front on */
    KVT_PLAN_CUT_SERIAL = 1, /* compute [0, s), load [s, N), one after the other */
    KVT_PLAN_CUT_OVERLAP = 2 /* both at a time */
};

enum kvt_plan_reason {
    KVT_PLAN_NO_BLOCKS = 0, /* nothing that could be loaded */
    KVT_PLAN_LOAD = 1,      /* loading all is the fastest */
    KVT_PLAN_RECOMPUTE = 2, /* computing all is */
    KVT_PLAN_CUT = 3,       /* computing what is before `first`, and loading the rest, is */
    KVT_PLAN_PREFIX = 4,    /* loading the first ones is: the others are on a slower tier */
    KVT_PLAN_PROBE = 5,     /* some blocks are loaded to see whether a slow tier has recovered */
    KVT_PLAN_OFF = 6        /* not weighed: plan=off */
};

struct kvt_plan_query {
    size_t struct_size;
    const enum kvt_tier *tiers; /* of n blocks, as kvt_lookup() gave them; those up to the first
                                   that cannot be loaded count. Borrowed until return. */
    size_t n;
    uint64_t first_tokens;  /* the engine has them: before the first block */
    uint64_t prompt_tokens; /* of the whole prompt; 0: it ends with block n - 1 */
    double gpu_busy;        /* 0 idle .. 1 requests wait for the GPU: how much GPU time counts */
    uint16_t group;         /* of the blocks */
    uint16_t cut;           /* enum kvt_plan_cut */
    uint32_t reserved;      /* 0 */
    const uint8_t *roots;   /* of n blocks, as kvt_lookup() gave them; NULL: those on disk are taken
                               to lie on the roots as the blocks loaded lately did */
};
/* struct_size of callers whose struct ends before `roots`. */
#define KVT_PLAN_QUERY_SIZE_0 56u

struct kvt_plan {
    size_t struct_size;
    size_t first, count; /* blocks to load; what is before and behind is computed */
    int reason;          /* enum kvt_plan_reason */
    int unsure;          /* 1: what was measured contradicts itself: all or nothing, no cut */
    double ttft_s;       /* expected seconds to the first token; of that, */
    double load_s, gpu_s;
    double recompute_s, load_all_s; /* expected if nothing, or everything, were loaded */
    double deadline_s; /* the load is to be cut off after it: the rest is computed sooner than it
                          would come. 0: no load, or plan=off */
};

/* Decide what of a prompt to load. Both structs' struct_size are set by the caller.
 * Thread: any. Blocks, allocates: never. 0; KVT_E_VERSION; KVT_E_INVAL a query that makes no sense
 * (NaN, a prompt shorter than its blocks, an unknown group): *plan then says to load nothing;
 * KVT_E_LIMIT more than 2^30 tokens; KVT_E_CLOSED. */
int kvt_plan(struct kvt_ns *ns, const struct kvt_plan_query *query, struct kvt_plan *plan);

/* Tell what a prefill took: `new_tokens` computed behind `cached_tokens` in `seconds` of the GPU.
 * Chunks may be told one by one. Thread: any. Blocks, allocates: never. 0; KVT_E_INVAL no
 * observation (no tokens, seconds not above 0, not finite or above a day): counted, and nothing
 * changes; KVT_E_CLOSED. */
int kvt_observe_prefill(struct kvt_ns *ns, uint64_t new_tokens, uint64_t cached_tokens,
                        double seconds);

/* Bring blocks from disk into DRAM. Fire and forget: nothing to wait for. Returns blocks queued. */
long kvt_prefetch(struct kvt_ns *ns, const struct kvt_key *keys, size_t n,
                  const struct kvt_load_opts *opts);

/* Wait for completion. timeout_ns < 0: for ever; 0: poll.
 * Returns 1 complete, 0 not yet, KVT_E_CLOSED in a forked child, KVT_E_INVAL a request that has
 * been freed; the request stays owned by the caller. */
int kvt_req_wait(struct kvt_req *req, int64_t timeout_ns);

/* Wait until a load that was asked for by layers has brought kvt_part.layer `layer`, and all layers
 * before it, of all its blocks, so that an engine can compute with them while later ones come.
 * Their bytes are provisional: a block is verified as a whole, when all of it has come. So the last
 * layers are there only when the request is complete, and whoever waits for each layer in turn has
 * passed the verdict before his step ends: he must then look at kvt_req_status(), and let nothing
 * leave that was computed from a block whose status is not 0. For any other request, and when it
 * could not be done, this is kvt_req_wait(). timeout_ns, returns: as there. */
int kvt_req_wait_layer(struct kvt_req *req, uint32_t layer, int64_t timeout_ns);

/* Ask for an early end. Idempotent, any time; the request still completes exactly once, blocks not
 * yet done get KVT_E_CANCELED. No byte is written to a page after completion. */
void kvt_req_cancel(struct kvt_req *req);

/* Outcome per block, valid after completion: 0 done; KVT_E_EXISTS (store) it was there already;
 * KVT_E_MISS, KVT_E_DEADLINE, KVT_E_CANCELED (store: also while it is being purged), KVT_E_DROPPED
 * no room for it, KVT_E_ORPHAN the block before it is not stored, KVT_E_CORRUPT, ... otherwise.
 * Borrowed until kvt_req_free(); n as given. */
const int32_t *kvt_req_status(const struct kvt_req *req, size_t *n);

struct kvt_req_report {
    size_t struct_size;
    size_t blocks_ok;     /* status 0 (load) or 0/EXISTS (store) */
    size_t blocks_run_ok; /* longest leading run of them */
    size_t blocks_dram;   /* loaded from each tier */
    size_t blocks_disk;
    uint64_t bytes_moved; /* record bytes read or written */
    int64_t elapsed_ns;
    size_t blocks_remote; /* loaded from the tier that machines share */
};
/* struct_size of callers whose struct ends before `blocks_remote`: blocks_disk has those, too. */
#define KVT_REQ_REPORT_SIZE_0 56u
/* Fill *report (struct_size set by the caller). 0; -EAGAIN not complete; KVT_E_VERSION. */
int kvt_req_report(const struct kvt_req *req, struct kvt_req_report *report);

/* Free a request, exactly once; waits if it is not complete. NULL is allowed. A second time is a
 * mistake of the program that is logged and counted ("client.freed_twice"), as long as no later
 * request has taken its place. */
void kvt_req_free(struct kvt_req *req);

/* An eventfd that becomes readable when any request completes; read it to reset. Owned by the
 * cache. */
int kvt_event_fd(struct kvt_cache *cache);

/* Keep blocks from eviction until kvt_unpin() or close, within the pin budget ("pin_max").
 * Returns the number of blocks pinned (absent ones are skipped), or an error. Blocks briefly. */
long kvt_pin(struct kvt_ns *ns, const struct kvt_key *keys, size_t n);
long kvt_unpin(struct kvt_ns *ns, const struct kvt_key *keys, size_t n);

/* Remove blocks for good, from every tier; keys NULL: the whole namespace. After return no get,
 * now or after a restart, finds them. Blocks that continue a purged one become unreachable (a
 * prefix ends at its first absent block): they are not counted as removed, and may be dropped at
 * any time, at the latest when the store is next opened ("disk.orphans"). They are not gone for
 * good, though: name them too for that. Returns blocks removed, or an error. Blocks. */
long kvt_purge(struct kvt_ns *ns, const struct kvt_key *keys, size_t n);

/* Write what is queued and sync it to the drive. After 0, every block committed before the call is
 * there after a crash, or has been evicted by policy. Blocks. 0; KVT_E_DROPPED some blocks since
 * the last flush had to leave DRAM unwritten (the counters of disk.* say why), the rest is there;
 * -EIO; KVT_E_NO_SPACE; where disks are configured and none is in use, the code of the first:
 * KVT_E_LOCKED (another process holds it, it is tried again), KVT_E_NEWER, ... : nothing is on
 * disk. Without disks in the configuration there is nothing to do, and 0. */
int kvt_flush(struct kvt_cache *cache);

/* Run-time switch: 0 makes every lookup and load a miss and every store a no-op whose blocks end
 * with KVT_E_MISS (counted under "off."), 1 is normal. Requests accepted before go on. */
void kvt_enable(struct kvt_cache *cache, int on);

/* Call fn for every counter, gauge and text of the cache: names are dotted ("dram.hits",
 * "disk.direct"). text is NULL for numbers. Blocks for one round trip. */
typedef void (*kvt_stats_fn)(void *arg, const char *name, uint64_t value, const char *text,
                             const char *help);
int kvt_stats_each(struct kvt_cache *cache, kvt_stats_fn fn, void *arg);

/* One number by name. 0; KVT_E_INVAL unknown name. */
int kvt_stats_get(struct kvt_cache *cache, const char *name, uint64_t *value);

#ifdef __cplusplus
}
#endif
#endif
