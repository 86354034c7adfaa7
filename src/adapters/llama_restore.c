/* Restore: keys -> lookup -> plan -> load into the rows of a composed state -> one set_data.
 *
 *   tokens --chain--> keys --lookup--> leading run --kvt_plan--> what pays
 *                     --kvt_load, or llama_hybrid.c--> rows of the blob --set_data--> seq
 *
 * Rules:
 * 1. Rows go in by one call and in ascending position: attention sums in cell order, so any other
 *    order would change the logits.
 * 2. Only a leading run of blocks that all loaded is used: a hole in the middle is accepted by
 *    llama.cpp in silence and gives other text.
 * 3. What set_data returns and the positions that the sequence has afterwards are checked; any
 * doubt clears the sequence and is a counted miss. Threads: one at a time.
 */
#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "llama_internal.h"

/* Load blocks [0, blocks) into the blob of the load staging. Returns the leading run loaded. */
static long load_blocks(struct kvt_llama *llama, size_t blocks, double deadline_s,
                        struct kvt_llama_report *report)
{
    const uint32_t cells = (uint32_t)(blocks * llama->block_tokens);
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .min_level = llama->min_level};
    struct kvt_req_report done = {.struct_size = sizeof(done)};
    struct kvt_pool *pool = NULL;
    struct kvt_req *req = NULL;
    size_t n = 0;
    long run = 0;

    if (deadline_s > 0)
        opts.deadline_ns = (int64_t)(deadline_s * 1e9) + 1;
    int rc = kvt_llama_pool(llama, llama->load.bytes, cells, &pool);
    if (rc != 0) {
        kvt_llama_fail(llama, "cannot register the staging rows: %s", kvt_strerror(rc));
        return rc;
    }
    rc = kvt_load(llama->ns, pool, llama->keys, llama->ids, blocks, &opts, &req);
    if (rc == -EAGAIN) /* too many requests: recompute, do not wait */
        goto out;
    if (rc != 0) {
        kvt_llama_fail(llama, "the load was refused: %s", kvt_strerror(rc));
        run = rc;
        goto out;
    }
    (void)kvt_req_wait(req, -1);
    rc = kvt_req_report(req, &done);
    if (rc != 0) {
        run = rc;
        goto out;
    }
    report->blocks_dram = done.blocks_dram;
    report->blocks_disk = done.blocks_disk;
    report->blocks_remote = done.blocks_remote;
    report->bytes_moved = done.bytes_moved;
    run = (long)done.blocks_run_ok;
    if (done.blocks_run_ok < blocks)
        report->late = kvt_req_status(req, &n)[run] == KVT_E_DEADLINE;
out:
    kvt_req_free(req);
    kvt_pool_unregister(pool);
    return run;
}

/* Give the first `blocks` blocks of the staging to the context. Returns the tokens restored. */
static long set_state(struct kvt_llama *llama, int32_t seq, size_t loaded, size_t blocks)
{
    const uint32_t cells = (uint32_t)(blocks * llama->block_tokens);
    llama_memory_t memory = llama_get_memory(llama->ctx);
    size_t len = kvt_blob_bytes(&llama->shape, cells);

    if (blocks < loaded)
        len = kvt_blob_shrink(&llama->shape, seq, 0, (uint32_t)(loaded * llama->block_tokens),
                              cells, llama->load.bytes);
    else
        kvt_blob_write_headers(&llama->shape, seq, 0, cells, llama->load.bytes);
    if (llama_state_seq_set_data(llama->ctx, llama->load.bytes, len, seq) != len) {
        llama->counters.restore_refused++;
        kvt_llama_fail(llama, "llama.cpp did not take a state of %u tokens (no room in the cache?)",
                       cells);
    } else if (llama_memory_seq_pos_min(memory, seq) != 0 ||
               llama_memory_seq_pos_max(memory, seq) != (llama_pos)cells - 1) {
        llama->counters.restore_bad_range++;
        kvt_llama_fail(llama, "the restored sequence does not hold positions 0 to %u", cells - 1);
    } else {
        return (long)cells;
    }
    llama_memory_seq_rm(memory, seq, -1, -1);
    return 0;
}

/* Keys of the usable blocks and how many of them the store has. */
static long find_run(struct kvt_llama *llama, const int32_t *tokens, size_t n,
                     struct kvt_llama_report *report)
{
    struct kvt_lookup_opts opts = {
        .struct_size = sizeof(opts), .min_level = llama->min_level, .prompt_tokens = (uint32_t)n};
    const size_t room = llama_n_ctx_seq(llama->ctx) / llama->block_tokens;
    size_t blocks = kvt_usable_blocks(llama->block_tokens, n);

    if (blocks == 0) {
        llama->counters.restore_short_prompt++;
        return 0;
    }
    if (blocks > room) {
        llama->counters.restore_cut_room++;
        blocks = room;
    }
    report->tokens_usable = blocks * llama->block_tokens;
    int rc = kvt_llama_scratch(llama, blocks);
    if (rc != 0)
        return rc;
    long made = kvt_key_chain(llama->root, (const uint32_t *)tokens, blocks * llama->block_tokens,
                              llama->block_tokens, NULL, 0, 0, 0, llama->keys, blocks);
    if (made != (long)blocks)
        return made < 0 ? made : KVT_E_INVAL;
    opts.roots = llama->roots;
    long run = kvt_lookup(llama->ns, llama->keys, blocks, &opts, llama->tiers);
    if (run == 0)
        llama->counters.restore_none++;
    return run;
}

/* Remember what came from records that may be lossy: everything from block `first` on but the very
 * first block, which is always raw, unless this adapter stores and loads at raw. */
static void note_origin(struct kvt_llama *llama, size_t first, size_t blocks)
{
    if (llama->level == KVT_LEVEL_RAW || llama->min_level == KVT_LEVEL_RAW)
        return;
    for (size_t i = first > 0 ? first : 1; i < blocks; i++)
        kvt_origin_add(&llama->origin, &llama->keys[i]);
    llama->counters.origin_forgotten = llama->origin.forgotten;
}

/* What of the first `found` blocks to load. A question that is refused is answered "nothing". */
static void ask_plan(struct kvt_llama *llama, size_t found, size_t n, struct kvt_plan *plan,
                     struct kvt_llama_report *report)
{
    const struct kvt_plan_query query = {.struct_size = sizeof(query),
                                         .tiers = llama->tiers,
                                         .roots = llama->roots,
                                         .n = found,
                                         .prompt_tokens = n,
                                         .cut = (uint16_t)llama->cut};

    *plan = (struct kvt_plan){.struct_size = sizeof(*plan)};
    if (kvt_plan(llama->ns, &query, plan) != 0)
        *plan = (struct kvt_plan){.struct_size = sizeof(*plan), .reason = KVT_PLAN_NO_BLOCKS};
    report->plan_reason = plan->reason;
    report->plan_unsure = plan->unsure;
    report->plan_ttft_s = plan->ttft_s;
    report->plan_recompute_s = plan->recompute_s;
    report->plan_load_all_s = plan->load_all_s;
    report->tokens_planned = (size_t)plan->count * llama->block_tokens;
    llama->counters.restore_recompute += plan->count == 0;
}

/* Bring what the plan says into the staging. Returns how many blocks of it are good, from the first
 * on; *loaded_from: the first of them that was loaded. */
static long gather(struct kvt_llama *llama, int32_t seq, const int32_t *tokens,
                   const struct kvt_plan *plan, struct kvt_llama_report *report,
                   size_t *loaded_from)
{
    const size_t end = (size_t)plan->first + plan->count;
    const size_t bytes = kvt_blob_bytes(&llama->shape, (uint32_t)(end * llama->block_tokens));
    long good;

    *loaded_from = 0;
    int rc = bytes > 0 ? kvt_staging_reserve(&llama->load, bytes) : -ENOMEM;
    if (rc == 0)
        rc = kvt_origin_reserve(&llama->origin, end);
    if (rc != 0)
        return rc;
    if (plan->first > 0)
        good = kvt_llama_hybrid(llama, seq, tokens, plan, report, loaded_from);
    else
        good = load_blocks(llama, end, plan->deadline_s, report);
    llama->counters.hybrids += plan->first > 0;
    llama->counters.hybrid_computed += report->tokens_computed;
    llama->counters.hybrid_failed += plan->first > 0 && good < 0;
    llama->counters.restore_late += report->late != 0;
    if (good >= 0 && (size_t)good < end)
        llama->counters.restore_cut_load++;
    return good;
}

static long restore(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t n,
                    struct kvt_llama_report *report)
{
    struct kvt_plan plan = {.struct_size = sizeof(plan)};
    size_t loaded_from;
    int64_t start = kvt_llama_now_ns();

    long found = find_run(llama, tokens, n, report);
    if (found > 0) {
        report->tokens_found = (size_t)found * llama->block_tokens;
        ask_plan(llama, (size_t)found, n, &plan, report);
    }
    report->lookup_ns = kvt_llama_now_ns() - start;
    if (found <= 0 || plan.count == 0)
        return found < 0 ? found : 0;
    start = kvt_llama_now_ns();
    long good = gather(llama, seq, tokens, &plan, report, &loaded_from);
    report->load_ns = kvt_llama_now_ns() - start;
    if (good <= 0)
        return good;
    start = kvt_llama_now_ns();
    long restored = set_state(llama, seq, (size_t)plan.first + plan.count, (size_t)good);
    report->set_state_ns = kvt_llama_now_ns() - start;
    if (restored > 0)
        note_origin(llama, loaded_from, (size_t)good);
    return restored;
}

static_assert(offsetof(struct kvt_llama_report, blocks_remote) == KVT_LLAMA_REPORT_SIZE_0,
              "what old callers have");

long kvt_llama_restore(struct kvt_llama *llama, int32_t seq, const int32_t *tokens, size_t n,
                       struct kvt_llama_report *report)
{
    struct kvt_llama_report mine;

    if (llama == NULL || (tokens == NULL && n > 0))
        return KVT_E_INVAL;
    const size_t size = report != NULL ? report->struct_size : 0;
    if (report != NULL && size != sizeof(*report) && size != KVT_LLAMA_REPORT_SIZE_0) {
        kvt_llama_fail(llama, "kvt_llama_report comes from another version of the headers");
        return KVT_E_VERSION;
    }
    if (seq < 0 || (uint32_t)seq >= llama_n_seq_max(llama->ctx) ||
        (seq == llama->staging_seq && llama_n_seq_max(llama->ctx) > 1)) {
        kvt_llama_fail(llama, "sequence %d is not one that can be restored into", seq);
        return KVT_E_INVAL;
    }
    if (llama_memory_seq_pos_max(llama_get_memory(llama->ctx), seq) != -1) {
        kvt_llama_fail(llama, "sequence %d is not empty", seq);
        return KVT_E_INVAL;
    }
    llama->counters.restores++;
    memset(&mine, 0, sizeof(mine));
    mine.struct_size = sizeof(mine);
    long restored = restore(llama, seq, tokens, n, &mine);
    if (restored < 0 && llama->error[0] == '\0')
        kvt_llama_fail(llama, "%s", kvt_strerror((int)restored));
    if (restored > 0) {
        mine.tokens_loaded = (size_t)restored;
        llama->counters.restored_tokens += (uint64_t)restored;
    }
    if (size == KVT_LLAMA_REPORT_SIZE_0)
        mine.blocks_disk += mine.blocks_remote;
    mine.struct_size = size;
    if (report != NULL)
        memcpy(report, &mine, size);
    return restored;
}
