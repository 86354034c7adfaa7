/* Life of an adapter: attach to a context, learn what its state looks like, let go.
 *
 * The shape of the state is learnt from the engine, never assumed: attaching decodes one token in
 * the spare sequence, reads that sequence's state, takes it apart (llama_blob.c), writes the same
 * state back through our own composer and compares what comes out. A llama.cpp whose format has
 * drifted is refused here, before any block is stored or restored.
 * Threads: one at a time. It does not look blocks up or move them: llama_restore.c, llama_save.c.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "llama_internal.h"

#define DEFAULT_BLOCK_TOKENS 16
#define DEFAULT_WINDOW_TOKENS 4096
#define PROBE_TOKEN 0
#define STAGING_UNIT ((size_t)2 << 20) /* huge pages save most of the faults of a fresh mapping */

void kvt_llama_opts_init(struct kvt_llama_opts *opts)
{
    memset(opts, 0, sizeof(*opts));
    opts->struct_size = sizeof(*opts);
    opts->block_tokens = DEFAULT_BLOCK_TOKENS;
    opts->window_tokens = DEFAULT_WINDOW_TOKENS;
    opts->level = KVT_LEVEL_DEFAULT;
    opts->min_level = KVT_LEVEL_DEFAULT;
    opts->staging_seq = -1;
    opts->cut = KVT_PLAN_CUT_OVERLAP;
}

void kvt_llama_fail(struct kvt_llama *llama, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(llama->error, sizeof(llama->error), format, args);
    va_end(args);
}

int kvt_staging_reserve(struct kvt_staging *staging, size_t bytes)
{
    if (bytes <= staging->capacity)
        return 0;
    if (bytes > SIZE_MAX - STAGING_UNIT)
        return -ENOMEM;
    bytes = (bytes + STAGING_UNIT - 1) & ~(STAGING_UNIT - 1);
    kvt_staging_free(staging);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return -ENOMEM;
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    staging->bytes = memory;
    staging->capacity = bytes;
    return 0;
}

void kvt_staging_free(struct kvt_staging *staging)
{
    if (staging->bytes != NULL)
        munmap(staging->bytes, staging->capacity);
    staging->bytes = NULL;
    staging->capacity = 0;
}

int kvt_llama_scratch(struct kvt_llama *llama, size_t blocks)
{
    if (blocks <= llama->scratch_blocks)
        return 0;
    if (blocks > UINT32_MAX / llama->block_tokens)
        return -ENOMEM;
    struct kvt_key *keys = calloc(blocks, sizeof(*keys));
    uint32_t *ids = calloc(blocks, sizeof(*ids));
    uint32_t *order = calloc(blocks * llama->block_tokens, sizeof(*order));
    enum kvt_tier *tiers = calloc(blocks, sizeof(*tiers));
    uint8_t *roots = calloc(blocks, sizeof(*roots));
    if (keys == NULL || ids == NULL || order == NULL || tiers == NULL || roots == NULL) {
        free(roots);
        free(tiers);
        free(keys);
        free(ids);
        free(order);
        return -ENOMEM;
    }
    for (size_t i = 0; i < blocks; i++)
        ids[i] = (uint32_t)i;
    free(llama->keys);
    free(llama->ids);
    free(llama->order);
    free(llama->tiers);
    free(llama->roots);
    llama->roots = roots;
    llama->tiers = tiers;
    llama->keys = keys;
    llama->ids = ids;
    llama->order = order;
    llama->scratch_blocks = blocks;
    return 0;
}

void kvt_llama_places(const struct kvt_llama *llama, uint8_t *blob, uint32_t cells,
                      struct kvt_part_place *places)
{
    const uint32_t layers = llama->shape.layers, parts = 2 * layers;
    size_t offset = kvt_blob_rows_offset(&llama->shape, 0, cells);
    const size_t row_head = kvt_blob_rows_offset(&llama->shape, 1, cells) - offset -
                            (size_t)cells * llama->shape.rows[0].bytes;

    for (uint32_t p = 0; p < parts; p++) { /* blob order: all K, then all V */
        const size_t row = llama->shape.rows[p].bytes;
        const uint32_t at = p < layers ? 2 * p : 2 * (p - layers) + 1;
        const struct kvt_part *part = &llama->parts[at];
        const int64_t head_bytes = (int64_t)(row / part->heads);
        places[at] = (struct kvt_part_place){.base = blob + offset,
                                             .stride_block = (int64_t)row * llama->block_tokens,
                                             .stride_token = (int64_t)row,
                                             .stride_head = head_bytes,
                                             .stride_elem = head_bytes / part->head_dim};
        offset += cells * row + row_head;
    }
}

int kvt_llama_pool(struct kvt_llama *llama, uint8_t *blob, uint32_t cells, struct kvt_pool **out)
{
    const uint32_t parts = 2 * llama->shape.layers;
    struct kvt_layout layout = {sizeof(layout), llama->block_tokens, parts, llama->parts};
    struct kvt_pool_desc desc = {.struct_size = sizeof(desc),
                                 .device = KVT_DEVICE_HOST,
                                 .block_count = cells / llama->block_tokens,
                                 .place_count = parts};
    struct kvt_part_place *places = calloc(parts, sizeof(*places));

    if (places == NULL)
        return -ENOMEM;
    kvt_llama_places(llama, blob, cells, places);
    desc.places = places;
    int rc = kvt_pool_register(llama->cache, &layout, &desc, out);
    free(places);
    return rc;
}

/* Decode one token in the spare sequence. */
static int probe_decode(struct kvt_llama *llama)
{
    struct llama_batch batch = llama_batch_init(1, 0, 1);

    batch.n_tokens = 1;
    batch.token[0] = PROBE_TOKEN;
    batch.pos[0] = 0;
    batch.n_seq_id[0] = 1;
    batch.seq_id[0][0] = llama->staging_seq;
    batch.logits[0] = 1;
    int rc = llama_decode(llama->ctx, batch);
    llama_batch_free(batch);
    return rc == 0 ? 0 : KVT_E_ENGINE;
}

/* Read the one-cell state, learn its shape, and see that our own composition of the same rows is
 * taken and comes out again byte for byte. */
static int probe_state(struct kvt_llama *llama, const char **why)
{
    const int32_t seq = llama->staging_seq;
    llama_memory_t memory = llama_get_memory(llama->ctx);
    const size_t len = llama_state_seq_get_size(llama->ctx, seq);
    uint8_t *first = calloc(1, len + 1), *second = calloc(1, len + 1);
    int rc = first != NULL && second != NULL ? 0 : -ENOMEM;

    *why = "out of memory";
    if (rc == 0 && (len == 0 || llama_state_seq_get_data(llama->ctx, first, len, seq) != len)) {
        *why = "llama.cpp gave no sequence state";
        rc = KVT_E_ENGINE;
    }
    if (rc == 0)
        rc = kvt_blob_learn(first, len, seq, 0, &llama->shape, why);
    if (rc != 0)
        goto out;
    memcpy(second, first, len);
    kvt_blob_write_headers(&llama->shape, seq, 0, 1, second);
    llama_memory_seq_rm(memory, seq, -1, -1);
    *why = "a sequence state of our composition did not survive llama.cpp: its format has drifted";
    rc = KVT_E_ENGINE;
    if (kvt_blob_bytes(&llama->shape, 1) != len || memcmp(first, second, len) != 0)
        goto out;
    if (llama_state_seq_set_data(llama->ctx, second, len, seq) != len)
        goto out;
    if (llama_memory_seq_pos_min(memory, seq) != 0 || llama_memory_seq_pos_max(memory, seq) != 0)
        goto out;
    memset(second, 0, len);
    if (llama_state_seq_get_data(llama->ctx, second, len, seq) == len &&
        memcmp(first, second, len) == 0)
        rc = 0;
out:
    free(first);
    free(second);
    return rc;
}

static int probe(struct kvt_llama *llama, char *error, size_t error_len)
{
    llama_memory_t memory = llama_get_memory(llama->ctx);
    const char *why = "";

    if (llama_memory_seq_pos_max(memory, llama->staging_seq) != -1) {
        snprintf(error, error_len,
                 "sequence %d of the context is in use; the adapter needs it empty",
                 llama->staging_seq);
        return KVT_E_INVAL;
    }
    int rc = probe_decode(llama);
    if (rc != 0)
        why = "llama.cpp could not decode a first token (no free cell in the cache?)";
    else
        rc = probe_state(llama, &why);
    llama_memory_seq_rm(memory, llama->staging_seq, -1, -1);
    if (rc != 0)
        snprintf(error, error_len, "%s", why);
    return rc;
}

static int check_opts(const struct kvt_llama_opts *opts, char *error, size_t error_len)
{
    if (opts == NULL || opts->struct_size != sizeof(*opts)) {
        snprintf(error, error_len, "kvt_llama_opts comes from another version of the headers");
        return KVT_E_VERSION;
    }
    if (opts->model_path == NULL || opts->context_params == NULL) {
        snprintf(error, error_len, "model_path and context_params are required");
        return KVT_E_INVAL;
    }
    if (opts->block_tokens == 0 || opts->block_tokens % KVT_TILE_TOKENS != 0 ||
        opts->block_tokens > KVT_BLOCK_TOKENS_MAX) {
        snprintf(error, error_len, "block_tokens is %u; it must be a multiple of %u up to %u",
                 opts->block_tokens, KVT_TILE_TOKENS, KVT_BLOCK_TOKENS_MAX);
        return KVT_E_INVAL;
    }
    if (opts->cut != KVT_PLAN_CUT_NONE && opts->cut != KVT_PLAN_CUT_OVERLAP) {
        snprintf(error, error_len, "cut is neither KVT_PLAN_CUT_NONE nor KVT_PLAN_CUT_OVERLAP");
        return KVT_E_INVAL;
    }
    const int level = opts->level == KVT_LEVEL_DEFAULT ? KVT_LEVEL_KV4 : opts->level;
    if (!kvt_level_supported(level) || opts->min_level < 0 || opts->min_level > KVT_LEVEL_RAW) {
        snprintf(error, error_len, "level or min_level is not one of this build");
        return KVT_E_INVAL;
    }
    return 0;
}

int kvt_llama_new(struct kvt_cache *cache, struct llama_context *ctx,
                  const struct kvt_llama_opts *opts, struct kvt_llama **out, char *error,
                  size_t error_len)
{
    char sink[1];

    if (error == NULL || error_len == 0) {
        error = sink;
        error_len = sizeof(sink);
    }
    error[0] = '\0';
    if (cache == NULL || ctx == NULL || out == NULL)
        return KVT_E_INVAL;
    *out = NULL;
    int rc = check_opts(opts, error, error_len);
    if (rc == 0)
        rc = kvt_llama_check_model(ctx, opts, error, error_len);
    if (rc != 0)
        return rc;

    struct kvt_llama *llama = calloc(1, sizeof(*llama));
    if (llama == NULL)
        return -ENOMEM;
    kvt_origin_init(&llama->origin);
    llama->cache = cache;
    llama->ctx = ctx;
    llama->block_tokens = opts->block_tokens;
    llama->window_tokens = opts->window_tokens;
    llama->level = opts->level == KVT_LEVEL_DEFAULT ? KVT_LEVEL_KV4 : opts->level;
    llama->window_level = llama->level > KVT_LEVEL_KV8 ? llama->level : KVT_LEVEL_KV8;
    llama->min_level = opts->min_level;
    llama->cut = opts->cut;
    llama->staging_seq =
        opts->staging_seq >= 0 ? opts->staging_seq : (int32_t)llama_n_seq_max(ctx) - 1;
    rc = kvt_key_root(opts->salt, opts->salt_len, llama->root);
    if (rc == 0)
        rc = probe(llama, error, error_len);
    if (rc == 0)
        rc = kvt_llama_make_parts(llama, error, error_len);
    if (rc == 0)
        rc = kvt_llama_open_ns(llama, opts, error, error_len);
    if (rc != 0) {
        if (error[0] == '\0')
            snprintf(error, error_len, "%s", kvt_strerror(rc));
        kvt_llama_free(llama);
        return rc;
    }
    *out = llama;
    return 0;
}

void kvt_llama_free(struct kvt_llama *llama)
{
    if (llama == NULL)
        return;
    kvt_llama_reap(llama, 1);
    kvt_ns_close(llama->ns);
    kvt_blob_shape_free(&llama->shape);
    kvt_origin_free(&llama->origin);
    kvt_staging_free(&llama->load);
    free(llama->parts);
    free(llama->keys);
    free(llama->ids);
    free(llama->order);
    free(llama->tiers);
    free(llama->roots);
    free(llama);
}

size_t kvt_llama_token_bytes(const struct kvt_llama *llama)
{
    return llama->shape.token_bytes;
}

struct kvt_ns *kvt_llama_ns(struct kvt_llama *llama)
{
    return llama->ns;
}

const uint8_t *kvt_llama_ns_id(const struct kvt_llama *llama)
{
    return kvt_ns_id(llama->ns);
}

const char *kvt_llama_error(const struct kvt_llama *llama)
{
    return llama->error;
}

void kvt_llama_stats_each(const struct kvt_llama *llama, kvt_stats_fn fn, void *arg)
{
#define KVT_X(field, name, help) fn(arg, name, llama->counters.field, NULL, help);
    KVT_LLAMA_COUNTERS(KVT_X)
#undef KVT_X
}
