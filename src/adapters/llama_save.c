/* Save: which blocks are missing -> their rows out of the context -> kvt_store, in the background.
 *
 *   seq --seq_cp--> spare seq --get_data--> blob --parse, sort--> pool --kvt_store--> store
 *
 * Rules:
 * 1. The blob is checked field by field against the shape learnt at attach time and against the
 *    positions asked for; anything else is dropped and counted.
 * 2. Blocks already stored are not stored again, whatever their level: a block that was in the
 * window once keeps its kv8 record until it is cooled.
 * 3. Levels: the window at kv8, the rest at the adapter's level, the first block raw (the store
 * does that). A block that this context got from a lossy record, and whose record is gone, is
 * stored at kv8: coarse coding happens once.
 * 4. The copy lives until its requests end; at most KVT_LLAMA_SAVES_MAX live at one time, then
 * blocks are dropped and counted: a save never waits for the disk. Threads: one at a time; encoding
 * runs on the cache's threads.
 */
#include <errno.h>
#include <string.h>

#include "llama_internal.h"

/* Blocks [from, to) of the prompt, to be stored at one level. */
struct run {
    size_t from, to;
    int level;
};

struct plan {
    struct run runs[KVT_LLAMA_RUNS_MAX];
    size_t count;
    size_t cut; /* blocks left out because there were too many runs */
};

/* The larger of the copy and the load staging stays, for the next restore: its pages are there, and
 * a fresh mapping costs as much time as decoding into it. */
static void keep_rows(struct kvt_llama *llama, struct kvt_llama_saving *saving)
{
    if (saving->rows.capacity > llama->load.capacity) {
        const struct kvt_staging smaller = llama->load;
        llama->load = saving->rows;
        saving->rows = smaller;
    }
    kvt_staging_free(&saving->rows);
}

static void finish(struct kvt_llama *llama, struct kvt_llama_saving *saving)
{
    for (size_t i = 0; i < saving->req_count; i++) {
        size_t n = 0;
        (void)kvt_req_wait(saving->reqs[i], -1);
        const int32_t *status = kvt_req_status(saving->reqs[i], &n);
        for (size_t k = 0; k < n; k++) {
            if (status[k] == 0 || status[k] == KVT_E_EXISTS)
                continue;
            llama->counters.save_failed_blocks++;
            if (llama->save_error == 0)
                llama->save_error = status[k];
        }
        kvt_req_free(saving->reqs[i]);
        saving->reqs[i] = NULL;
    }
    kvt_pool_unregister(saving->pool);
    saving->pool = NULL;
    keep_rows(llama, saving);
    saving->req_count = 0;
}

void kvt_llama_reap(struct kvt_llama *llama, int wait)
{
    for (size_t s = 0; s < KVT_LLAMA_SAVES_MAX; s++) {
        struct kvt_llama_saving *saving = &llama->saving[s];
        int ended = 1;
        for (size_t i = 0; !wait && ended && i < saving->req_count; i++)
            ended = kvt_req_wait(saving->reqs[i], 0);
        if (saving->req_count > 0 && ended)
            finish(llama, saving);
    }
}

/* Level of a missing block; DEFAULT: it is not missing after all. Negative: an error. */
static int level_of(struct kvt_llama *llama, size_t block, size_t n)
{
    const size_t end = (block + 1) * llama->block_tokens;

    if (kvt_origin_has(&llama->origin, &llama->keys[block])) {
        /* behind a hole its record may still be there: a lossy page must not replace it */
        const struct kvt_lookup_opts opts = {.struct_size = sizeof(opts),
                                             .flags = KVT_LOOKUP_PROBE};
        long there = kvt_lookup(llama->ns, &llama->keys[block], 1, &opts, NULL);
        if (there != 0)
            return there > 0 ? KVT_LEVEL_DEFAULT : (int)there;
        llama->counters.save_again++;
        return llama->window_level;
    }
    return end + llama->window_tokens > n ? llama->window_level : llama->level;
}

static void plan_add(struct plan *plan, size_t block, int level)
{
    struct run *last = plan->count > 0 ? &plan->runs[plan->count - 1] : NULL;

    if (last != NULL && last->to == block && last->level == level)
        last->to = block + 1;
    else if (plan->count < KVT_LLAMA_RUNS_MAX)
        plan->runs[plan->count++] = (struct run){block, block + 1, level};
    else
        plan->cut++;
}

/* Find the blocks that are neither stored nor being stored. A lookup sees the leading run alone:
 * all blocks behind it count as missing, and the store answers "exists" for those that are not. */
static int plan_missing(struct kvt_llama *llama, size_t blocks, size_t n, struct plan *plan)
{
    const struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .flags = KVT_LOOKUP_PROBE};

    long run = kvt_lookup(llama->ns, llama->keys, blocks, &opts, llama->tiers);
    if (run < 0)
        return (int)run;
    llama->counters.save_present += (uint64_t)run;
    for (size_t block = (size_t)run; block < blocks; block++) {
        int level = KVT_LEVEL_DEFAULT;
        if (llama->tiers[block] != KVT_TIER_PENDING)
            level = level_of(llama, block, n);
        if (level < 0)
            return level;
        if (level == KVT_LEVEL_DEFAULT)
            llama->counters.save_present++;
        else
            plan_add(plan, block, level);
    }
    return 0;
}

int kvt_llama_copy_rows(struct kvt_llama *llama, int32_t seq, uint32_t first, uint32_t cells,
                        struct kvt_staging *rows)
{
    llama_memory_t memory = llama_get_memory(llama->ctx);
    const int32_t from = llama->staging_seq;
    const size_t want = kvt_blob_bytes(&llama->shape, cells);
    struct kvt_staging sorted = {NULL, 0};
    const char *why = "llama.cpp gave a state of another size";
    int in_order = 0;

    int rc = want > 0 ? kvt_staging_reserve(rows, want) : -ENOMEM;
    if (rc != 0)
        return rc;
    if (from != seq)
        llama_memory_seq_cp(memory, seq, from, (llama_pos)first, (llama_pos)(first + cells));
    size_t len = llama_state_seq_get_size(llama->ctx, from);
    if (len == want)
        len = llama_state_seq_get_data(llama->ctx, rows->bytes, want, from);
    if (from != seq)
        llama_memory_seq_rm(memory, from, -1, -1);
    rc = len == want ? kvt_blob_parse(&llama->shape, from, (int32_t)first, cells, rows->bytes, len,
                                      llama->order, &in_order, &why)
                     : KVT_E_ENGINE;
    if (rc != 0) {
        llama->counters.save_refused++;
        kvt_llama_fail(llama, "the state of sequence %d was not saved: %s", seq, why);
        return rc;
    }
    if (in_order)
        return 0;
    rc = kvt_staging_reserve(&sorted, want);
    if (rc != 0)
        return rc;
    kvt_blob_sort_rows(&llama->shape, cells, llama->order, rows->bytes, sorted.bytes);
    kvt_staging_free(rows);
    *rows = sorted;
    return 0;
}

/* Hand the runs of a plan to the store. Returns blocks queued, or an error when none was. */
static long queue_runs(struct kvt_llama *llama, const struct plan *plan, size_t first_block,
                       struct kvt_llama_saving *saving)
{
    long queued = 0;
    int rc = 0;

    for (size_t i = 0; i < plan->count; i++) {
        const struct run *run = &plan->runs[i];
        const size_t count = run->to - run->from;
        const struct kvt_store_opts opts = {
            .struct_size = sizeof(opts),
            .parent = run->from > 0 ? &llama->keys[run->from - 1] : NULL,
            .first_pos = (uint32_t)(run->from * llama->block_tokens),
            .level = run->level};
        rc = kvt_store(llama->ns, saving->pool, &llama->keys[run->from],
                       &llama->ids[run->from - first_block], count, &opts,
                       &saving->reqs[saving->req_count]);
        if (rc == -EAGAIN) {
            llama->counters.save_busy += count;
            rc = 0;
        } else if (rc == 0) {
            saving->req_count++;
            queued += (long)count;
        } else {
            llama->counters.save_failed_blocks += count;
            kvt_llama_fail(llama, "the store refused blocks: %s", kvt_strerror(rc));
        }
    }
    llama->counters.saved_blocks += (uint64_t)queued;
    return queued > 0 ? queued : rc;
}

static struct kvt_llama_saving *free_saving(struct kvt_llama *llama)
{
    for (size_t s = 0; s < KVT_LLAMA_SAVES_MAX; s++)
        if (llama->saving[s].req_count == 0)
            return &llama->saving[s];
    return NULL;
}

static size_t plan_blocks(const struct plan *plan)
{
    size_t blocks = 0;

    for (size_t i = 0; i < plan->count; i++)
        blocks += plan->runs[i].to - plan->runs[i].from;
    return blocks;
}

/* Save what the plan says out of sequence seq, which holds positions 0..pos_max. */
static long save_plan(struct kvt_llama *llama, int32_t seq, llama_pos pos_max,
                      const struct plan *plan)
{
    const int whole = seq == llama->staging_seq; /* no spare sequence: copy all of it */
    const size_t first = whole ? 0 : plan->runs[0].from;
    const size_t cells = whole ? (size_t)pos_max + 1
                               : (plan->runs[plan->count - 1].to - first) * llama->block_tokens;
    struct kvt_llama_saving *saving = free_saving(llama);

    if (saving == NULL) {
        llama->counters.save_busy += plan_blocks(plan);
        return 0;
    }
    int rc = kvt_llama_copy_rows(llama, seq, (uint32_t)(first * llama->block_tokens),
                                 (uint32_t)cells, &saving->rows);
    if (rc == 0)
        rc = kvt_llama_pool(llama, saving->rows.bytes, (uint32_t)cells, &saving->pool);
    long queued = rc == 0 ? queue_runs(llama, plan, first, saving) : rc;
    if (saving->req_count == 0)
        finish(llama, saving);
    return queued;
}

static int check_sequence(struct kvt_llama *llama, int32_t seq, size_t n, llama_pos *pos_max)
{
    llama_memory_t memory = llama_get_memory(llama->ctx);
    const uint32_t seqs = llama_n_seq_max(llama->ctx);

    if (seq < 0 || (uint32_t)seq >= seqs || (seq == llama->staging_seq && seqs > 1)) {
        kvt_llama_fail(llama, "sequence %d is not one that can be saved", seq);
        return KVT_E_INVAL;
    }
    if (seq != llama->staging_seq && llama_memory_seq_pos_max(memory, llama->staging_seq) != -1) {
        kvt_llama_fail(llama, "the spare sequence %d is in use", llama->staging_seq);
        return KVT_E_INVAL;
    }
    *pos_max = llama_memory_seq_pos_max(memory, seq);
    if (n > INT32_MAX || llama_memory_seq_pos_min(memory, seq) != 0 ||
        *pos_max < (llama_pos)n - 1) {
        kvt_llama_fail(llama, "sequence %d does not hold positions 0 to %zu", seq, n - 1);
        return KVT_E_INVAL;
    }
    return 0;
}

long kvt_llama_save(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t n)
{
    struct plan plan = {.count = 0};
    llama_pos pos_max = -1;

    if (llama == NULL || (tokens == NULL && n > 0))
        return KVT_E_INVAL;
    llama->counters.saves++;
    kvt_llama_reap(llama, 0);
    const size_t blocks = n / llama->block_tokens;
    if (blocks == 0)
        return 0;
    int rc = check_sequence(llama, seq, n, &pos_max);
    if (rc == 0)
        rc =
            kvt_llama_scratch(llama, ((size_t)pos_max + llama->block_tokens) / llama->block_tokens);
    if (rc != 0)
        return rc;
    long made = kvt_key_chain(llama->root, (const uint32_t *)tokens, blocks * llama->block_tokens,
                              llama->block_tokens, NULL, 0, 0, 0, llama->keys, blocks);
    if (made != (long)blocks)
        return made < 0 ? made : KVT_E_INVAL;
    rc = plan_missing(llama, blocks, n, &plan);
    if (rc != 0) {
        kvt_llama_fail(llama, "%s", kvt_strerror(rc));
        return rc;
    }
    llama->counters.save_busy += plan.cut;
    return plan.count > 0 ? save_plan(llama, seq, pos_max, &plan) : 0;
}

int kvt_llama_sync(struct kvt_llama *llama)
{
    if (llama == NULL)
        return KVT_E_INVAL;
    kvt_llama_reap(llama, 1);
    const int rc = llama->save_error;
    llama->save_error = 0;
    return rc;
}
