/* Prefetch: the stored blocks of a prompt's beginning are read from disk while the rest of it is
 * still being made.
 *
 *   tokens so far --chain--> keys --lookup--> those on disk --kvt_prefetch--> DRAM
 *
 * A hint: nothing waits for it, a restore that comes too early reads what is missing itself, and
 * one that never comes costs a read. It keeps no state: the store reads a block once, however often
 * it is asked for. Threads: one at a time. Nothing is put into the context here.
 */
#include "llama_internal.h"

static long prefetch(struct kvt_llama *llama, size_t blocks)
{
    const struct kvt_lookup_opts find = {
        .struct_size = sizeof(find), .min_level = llama->min_level, .flags = KVT_LOOKUP_PROBE};
    const struct kvt_load_opts load = {.struct_size = sizeof(load), .min_level = llama->min_level};
    size_t first = 0;
    long queued = 0;

    long run = kvt_lookup(llama->ns, llama->keys, blocks, &find, llama->tiers);
    if (run <= 0)
        return run;
    size_t end = (size_t)run;
    while (first < end && llama->tiers[first] == KVT_TIER_DRAM)
        first++;
    while (end > first && llama->tiers[end - 1] == KVT_TIER_DRAM)
        end--;
    if (end > first)
        queued = kvt_prefetch(llama->ns, &llama->keys[first], end - first, &load);
    if (queued > 0)
        llama->counters.prefetched_blocks += (uint64_t)queued;
    return queued;
}

long kvt_llama_prefetch(struct kvt_llama *llama, const int32_t *tokens, size_t n)
{
    if (llama == NULL || (tokens == NULL && n > 0))
        return KVT_E_INVAL;
    size_t blocks = n / llama->block_tokens;
    const size_t room = llama_n_ctx_seq(llama->ctx) / llama->block_tokens;
    if (blocks > room)
        blocks = room;
    if (blocks == 0)
        return 0;
    int rc = kvt_llama_scratch(llama, blocks);
    if (rc != 0)
        return rc;
    long made = kvt_key_chain(llama->root, (const uint32_t *)tokens, blocks * llama->block_tokens,
                              llama->block_tokens, NULL, 0, 0, 0, llama->keys, blocks);
    if (made != (long)blocks)
        return made < 0 ? made : KVT_E_INVAL;
    long queued = prefetch(llama, blocks);
    if (queued < 0)
        kvt_llama_fail(llama, "%s", kvt_strerror((int)queued));
    return queued;
}
