/* Goal: a restored prompt continues as if it had been computed; a doubt is a miss; nothing is
 * stored as better than it is. Method: a tiny random model of float32 weights in the real
 * llama.cpp. The reference is the same prompt computed in the same batches without any cache; raw
 * restores must give the same logits bit for bit, from DRAM, from disk after a reopen, and out of
 * caches whose cells are scattered or in reverse order. A poison check shows that the logits do
 * depend on the cache.
 */
#include "llama_help.h"
#include "llama_internal.h"

#define N 210        /* prompt: 13 blocks and 2 tokens */
#define BLOCKS 13    /* full blocks */
#define TOKENS 208   /* of them */
#define SEED_WORDS 3 /* of the prompt */
/* Largest logit difference: other batches round other f16 cache entries; no cache gives other text.
 */
#define ROUNDING 0.02f
#define POISON 0.2f

struct rig {
    struct llama_model *model;
    struct llama_context_params params;
    struct llama_context *ctx;
    struct kvt_cache *cache;
    struct kvt_llama *llama;
    char model_path[64];
    int32_t tokens[N];
    float exact[HELP_VOCAB];
};

static void open_adapter(struct rig *rig, int level, uint32_t window)
{
    struct kvt_llama_opts opts;
    char error[512] = "";

    kvt_llama_opts_init(&opts);
    opts.context_params = &rig->params;
    opts.model_path = rig->model_path;
    opts.level = level;
    opts.window_tokens = window;
    int rc = kvt_llama_new(rig->cache, rig->ctx, &opts, &rig->llama, error, sizeof(error));
    if (rc != 0)
        fail_msg("kvt_llama_new: %d %s", rc, error);
}

static void clear(struct rig *rig)
{
    llama_memory_clear(llama_get_memory(rig->ctx), true);
}

static void open_rig_of(struct rig *rig, const struct tiny_spec *spec, enum ggml_type type,
                        int level, uint32_t window)
{
    memset(rig, 0, sizeof(*rig));
    rig->model = tiny_model(spec);
    rig->params = help_params();
    rig->params.type_k = rig->params.type_v = type;
    rig->ctx = llama_init_from_model(rig->model, rig->params);
    assert_non_null(rig->ctx);
    help_file(rig->model_path, "weights");
    help_tokens(SEED_WORDS, rig->tokens, N);
    help_prefill(rig->ctx, 0, rig->tokens, N);
    help_logits(rig->ctx, rig->exact);
    clear(rig);
    rig->cache = help_cache(NULL);
    open_adapter(rig, level, window);
}

static void open_rig(struct rig *rig, int level, uint32_t window)
{
    open_rig_of(rig, &tiny_plain, GGML_TYPE_F16, level, window);
}

static void close_rig(struct rig *rig)
{
    kvt_llama_free(rig->llama);
    kvt_close(rig->cache);
    llama_free(rig->ctx);
    llama_model_free(rig->model);
    unlink(rig->model_path);
}

/* Compute the prompt in sequence 0 and store it. */
static void learn(struct rig *rig)
{
    help_prefill(rig->ctx, 0, rig->tokens, N);
    long queued = kvt_llama_save(rig->llama, 0, rig->tokens, N);
    if (queued != BLOCKS)
        fail_msg("saved %ld blocks: %s", queued, kvt_llama_error(rig->llama));
    assert_int_equal(kvt_llama_sync(rig->llama), 0);
    clear(rig);
}

/* Restore into seq and compute the rest; want: tokens restored. */
static void recall(struct rig *rig, int32_t seq, size_t want, float logits[HELP_VOCAB])
{
    struct kvt_llama_report report = {.struct_size = sizeof(report)};

    long got = kvt_llama_restore(rig->llama, seq, rig->tokens, N, &report);
    if (got != (long)want)
        fail_msg("restored %ld, wanted %zu: %s", got, want, kvt_llama_error(rig->llama));
    assert_int_equal(report.tokens_loaded, want);
    assert_int_equal(report.tokens_usable, TOKENS);
    assert_int_equal(report.blocks_dram + report.blocks_disk, report.tokens_found / 16);
    help_decode(rig->ctx, seq, rig->tokens, want, N);
    help_logits(rig->ctx, logits);
}

static void test_raw_is_bit_identical(void **state)
{
    (void)state;
    struct rig rig;
    float logits[HELP_VOCAB];

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    learn(&rig);
    recall(&rig, 0, TOKENS, logits);
    assert_memory_equal(logits, rig.exact, sizeof(logits));
    /* poison: the same rest over nothing gives something else */
    clear(&rig);
    help_decode(rig.ctx, 0, rig.tokens, TOKENS, N);
    help_logits(rig.ctx, logits);
    printf("largest logit difference without the cache: %g\n",
           (double)help_distance(logits, rig.exact));
    assert_true(help_distance(logits, rig.exact) > POISON);
    close_rig(&rig);
}

/* Other head counts and sizes, every cache type: bit-identical as well. */
/* The copy that a save made becomes the memory of the next restore, which then maps nothing new. */
static void test_restore_reuses_the_copy_of_a_save(void **state)
{
    (void)state;
    struct rig rig;
    float logits[HELP_VOCAB];

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    assert_null(rig.llama->load.bytes);
    learn(&rig);
    const uint8_t *kept = rig.llama->load.bytes;
    assert_non_null(kept);
    recall(&rig, 0, TOKENS, logits);
    assert_ptr_equal(rig.llama->load.bytes, kept);
    assert_memory_equal(logits, rig.exact, sizeof(logits));
    /* a smaller copy does not take its place */
    clear(&rig);
    rig.tokens[0] ^= 1;
    help_prefill(rig.ctx, 0, rig.tokens, 33);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, 33), 2);
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    assert_ptr_equal(rig.llama->load.bytes, kept);
    close_rig(&rig);
}

static void test_raw_of_every_shape(void **state)
{
    (void)state;
    static const enum ggml_type types[] = {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32};
    struct tiny_spec specs[2] = {tiny_plain, tiny_plain};
    float logits[HELP_VOCAB];
    struct rig rig;

    specs[0].kv_heads = 1;
    specs[1].arch = "qwen3";
    specs[1].key_length = specs[1].value_length = 64;
    for (size_t s = 0; s < 2; s++)
        for (size_t t = 0; t < 3; t++) {
            open_rig_of(&rig, &specs[s], types[t], KVT_LEVEL_RAW, 0);
            learn(&rig);
            recall(&rig, 0, TOKENS, logits);
            assert_memory_equal(logits, rig.exact, sizeof(logits));
            close_rig(&rig);
        }
}

static void test_raw_after_reopen(void **state)
{
    (void)state;
    struct rig rig;
    float logits[HELP_VOCAB];
    char dir[] = "/var/tmp/kvt-test-llama-XXXXXX";
    struct kvt_llama_report report = {.struct_size = sizeof(report)};

    assert_non_null(mkdtemp(dir));
    open_rig(&rig, KVT_LEVEL_RAW, 0);
    kvt_llama_free(rig.llama);
    kvt_close(rig.cache);
    rig.cache = help_cache(dir);
    open_adapter(&rig, KVT_LEVEL_RAW, 0);
    learn(&rig);
    assert_int_equal(kvt_flush(rig.cache), 0);
    kvt_llama_free(rig.llama);
    kvt_close(rig.cache);
    rig.cache = help_cache(dir);
    open_adapter(&rig, KVT_LEVEL_RAW, 0);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, N, &report), TOKENS);
    assert_int_equal(report.blocks_disk, BLOCKS);
    assert_int_equal(report.blocks_dram, 0);
    help_decode(rig.ctx, 0, rig.tokens, TOKENS, N);
    help_logits(rig.ctx, logits);
    assert_memory_equal(logits, rig.exact, sizeof(logits));
    close_rig(&rig);
    help_remove(dir);
}

/* kv4 and kv8 are near, kv8 is nearer, and the record sizes are those of the levels. */
static void test_lossy_is_near(void **state)
{
    (void)state;
    float kv4[HELP_VOCAB], kv8[HELP_VOCAB];
    struct rig rig;

    open_rig(&rig, KVT_LEVEL_KV4, 0);
    learn(&rig);
    recall(&rig, 0, TOKENS, kv4);
    close_rig(&rig);
    open_rig(&rig, KVT_LEVEL_KV8, 0);
    learn(&rig);
    recall(&rig, 0, TOKENS, kv8);
    const float far = help_distance(kv4, rig.exact), near = help_distance(kv8, rig.exact);
    printf("largest logit difference: kv4 %g, kv8 %g\n", (double)far, (double)near);
    assert_true(near > 0 && far > near && far < 0.5f);
    close_rig(&rig);
}

/* Two sequences that grow in turns: cells of one are scattered, in ascending order. */
static void test_scattered_cells(void **state)
{
    (void)state;
    struct rig rig;
    float logits[HELP_VOCAB];
    int32_t other[N];

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    help_tokens(99, other, N);
    for (size_t at = 0; at < TOKENS; at += 26) {
        help_decode(rig.ctx, 0, rig.tokens, at, at + 26);
        help_decode(rig.ctx, 1, other, at, at + 26);
    }
    help_decode(rig.ctx, 0, rig.tokens, TOKENS, N);
    float grown[HELP_VOCAB];
    help_logits(rig.ctx, grown);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, N), BLOCKS);
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    /* the other sequence stays in the cache: the restored one fills the holes */
    llama_memory_seq_rm(llama_get_memory(rig.ctx), 0, -1, -1);
    recall(&rig, 0, TOKENS, logits);
    assert_memory_equal(logits, grown, sizeof(logits));
    close_rig(&rig);
}

/* Rows of a sequence in position order, straight from the state of llama.cpp. */
static uint8_t *rows_of(struct rig *rig, int32_t seq, size_t *len)
{
    *len = llama_state_seq_get_size(rig->ctx, seq);
    uint8_t *blob = malloc(*len);

    assert_non_null(blob);
    assert_int_equal(llama_state_seq_get_data(rig->ctx, blob, *len, seq), *len);
    return blob;
}

/* A sequence whose later tokens lie in lower cells: saved in position order all the same. */
static void test_wrapped_cells(void **state)
{
    (void)state;
    struct rig rig;
    int32_t filler[HELP_CTX];
    int32_t first_pos;
    size_t len, clean_len;

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    llama_memory_t memory = llama_get_memory(rig.ctx);
    help_tokens(5, filler, HELP_CTX);
    /* cells 0..399 filler, 400.. the first 96 tokens, then the filler goes and the rest wraps */
    help_decode(rig.ctx, 1, filler, 0, 200);
    help_decode(rig.ctx, 1, filler, 200, 400);
    help_decode(rig.ctx, 0, rig.tokens, 0, 96);
    llama_memory_seq_rm(memory, 1, -1, -1);
    help_decode(rig.ctx, 0, rig.tokens, 96, TOKENS);
    uint8_t *wrapped = rows_of(&rig, 0, &len);
    memcpy(&first_pos, wrapped + 16, 4);
    assert_int_not_equal(first_pos, 0); /* the case is the one meant */
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, TOKENS), BLOCKS);
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    clear(&rig);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, N, NULL), TOKENS);
    uint8_t *clean = rows_of(&rig, 0, &clean_len);
    assert_int_equal(len, clean_len);
    /* every row of every layer, moved to its position's place */
    const size_t rows_at = 16 + 12 * (size_t)TOKENS + 8, row = 2 * 2 * 32;
    for (size_t part = 0; part < 6; part++)
        for (size_t i = 0; i < TOKENS; i++) {
            int32_t pos;
            memcpy(&pos, wrapped + 16 + 12 * i, 4);
            const size_t base = rows_at + part * (12 + TOKENS * row) + 12;
            assert_memory_equal(wrapped + base + i * row, clean + base + (size_t)pos * row, row);
        }
    free(wrapped);
    free(clean);
    close_rig(&rig);
}

static void chain_keys(const struct rig *rig, struct kvt_key keys[BLOCKS])
{
    uint8_t root[32];

    assert_int_equal(kvt_key_root(NULL, 0, root), 0);
    assert_int_equal(
        kvt_key_chain(root, (const uint32_t *)rig->tokens, TOKENS, 16, NULL, 0, 0, 0, keys, BLOCKS),
        BLOCKS);
}

/* A block missing in the middle ends the run; the next save fills the hole and no more. */
static void test_missing_middle_block(void **state)
{
    (void)state;
    struct rig rig;
    float logits[HELP_VOCAB];
    struct kvt_key keys[BLOCKS];

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    learn(&rig);
    chain_keys(&rig, keys);
    assert_int_equal(kvt_purge(kvt_llama_ns(rig.llama), &keys[5], 1), 1);
    recall(&rig, 0, 5 * 16, logits);
    printf("largest logit difference in other batches: %g\n",
           (double)help_distance(logits, rig.exact));
    assert_true(help_distance(logits, rig.exact) < ROUNDING);
    const uint64_t before = help_counter(rig.llama, "llama.saved_blocks");
    assert_true(kvt_llama_save(rig.llama, 0, rig.tokens, N) >= 1);
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    assert_true(help_counter(rig.llama, "llama.saved_blocks") > before);
    clear(&rig);
    recall(&rig, 0, TOKENS, logits);
    assert_true(help_distance(logits, rig.exact) < ROUNDING);
    close_rig(&rig);
}

/* Flip one payload byte of the record with that key in the files of a closed store. */
static void damage(const char *dir, const struct kvt_key *key)
{
    static uint8_t bytes[8 << 20];
    char path[4200];
    struct dirent *entry;
    DIR *list = opendir(dir);
    int done = 0;

    assert_non_null(list);
    while ((entry = readdir(list)) != NULL) {
        if (strncmp(entry->d_name, "seg-", 4) != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", dir, entry->d_name);
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0);
        const ssize_t len = pread(fd, bytes, sizeof(bytes), 0);
        for (ssize_t at = 0; !done && at + 4096 <= len; at += 4096) {
            if (memcmp(bytes + at, "KVTR", 4) != 0 || memcmp(bytes + at + 24, key->hash, 32) != 0)
                continue;
            uint8_t byte = bytes[at + 1000] ^ 1;
            assert_int_equal(pwrite(fd, &byte, 1, at + 1000), 1);
            done = 1;
        }
        close(fd);
    }
    closedir(list);
    assert_int_equal(done, 1);
}

/* A record that is found and then proves damaged: the run before it is used, and it alone. */
static void test_damaged_block_cuts_the_run(void **state)
{
    (void)state;
    struct rig rig;
    float logits[HELP_VOCAB];
    struct kvt_key keys[BLOCKS];
    struct kvt_llama_report report = {.struct_size = sizeof(report)};
    char dir[] = "/var/tmp/kvt-test-llama-XXXXXX";

    assert_non_null(mkdtemp(dir));
    open_rig(&rig, KVT_LEVEL_RAW, 0);
    chain_keys(&rig, keys);
    kvt_llama_free(rig.llama);
    kvt_close(rig.cache);
    rig.cache = help_cache(dir);
    open_adapter(&rig, KVT_LEVEL_RAW, 0);
    learn(&rig);
    kvt_llama_free(rig.llama);
    kvt_close(rig.cache);
    damage(dir, &keys[6]);
    rig.cache = help_cache(dir);
    open_adapter(&rig, KVT_LEVEL_RAW, 0);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, N, &report), 6 * 16);
    assert_int_equal(report.tokens_found, TOKENS);
    assert_int_equal(report.tokens_loaded, 6 * 16);
    assert_int_equal(help_counter(rig.llama, "llama.restore_cut_load"), 1);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 0), 6 * 16 - 1);
    help_decode(rig.ctx, 0, rig.tokens, 6 * 16, N);
    help_logits(rig.ctx, logits);
    assert_true(help_distance(logits, rig.exact) < ROUNDING);
    close_rig(&rig);
    help_remove(dir);
}

static uint64_t restored_bytes(struct rig *rig)
{
    struct kvt_llama_report report = {.struct_size = sizeof(report)};

    clear(rig);
    assert_int_equal(kvt_llama_restore(rig->llama, 0, rig->tokens, N, &report), TOKENS);
    return report.bytes_moved;
}

/* The window costs what kv8 costs, the first block what raw costs. Random keys may fail the guard
 * of kv4, which moves single blocks up: so sizes are compared between windows, not with a formula.
 */
static void test_window(void **state)
{
    (void)state;
    uint64_t bytes[3];
    const uint32_t windows[3] = {0, 64, 4096};
    struct rig rig;

    for (int i = 0; i < 3; i++) {
        open_rig(&rig, KVT_LEVEL_INT4, windows[i]);
        learn(&rig);
        bytes[i] = restored_bytes(&rig);
        if (windows[i] == 4096) {
            const uint64_t kv8 = kvt_ns_record_bytes(kvt_llama_ns(rig.llama), 0, KVT_LEVEL_KV8);
            const uint64_t raw = kvt_ns_record_bytes(kvt_llama_ns(rig.llama), 0, KVT_LEVEL_RAW);
            assert_int_equal(bytes[i], raw + (BLOCKS - 1) * kv8);
        }
        close_rig(&rig);
    }
    assert_true(bytes[0] <= bytes[1] && bytes[1] < bytes[2]);
}

/* A block that came from a lossy record, whose record is gone, is stored at kv8: promise 5. */
static void test_lossy_origin_is_stored_again_at_kv8(void **state)
{
    (void)state;
    struct rig rig;
    struct kvt_key keys[BLOCKS];
    const struct kvt_lookup_opts kv8 = {sizeof(kv8), KVT_LEVEL_KV8};
    const struct kvt_lookup_opts raw = {sizeof(raw), KVT_LEVEL_RAW};

    open_rig(&rig, KVT_LEVEL_KV4, 0);
    learn(&rig);
    chain_keys(&rig, keys);
    struct kvt_ns *ns = kvt_llama_ns(rig.llama);
    assert_int_equal(kvt_lookup(ns, &keys[0], 1, &raw, NULL), 1); /* the first is raw */
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, N, NULL), TOKENS);
    assert_int_equal(kvt_purge(ns, &keys[4], 2), 2);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, TOKENS), 2);
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    assert_int_equal(help_counter(rig.llama, "llama.save_again"), 2);
    for (int i = 4; i <= 5; i++) {
        assert_int_equal(kvt_lookup(ns, &keys[i], 1, &kv8, NULL), 1);
        assert_int_equal(kvt_lookup(ns, &keys[i], 1, &raw, NULL), 0);
    }
    close_rig(&rig);
}

/* A longer prompt over a restored prefix: only the new blocks are stored. */
static void test_growing_conversation(void **state)
{
    (void)state;
    struct rig rig;
    int32_t longer[N + 60];
    float once[HELP_VOCAB], logits[HELP_VOCAB];

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    learn(&rig);
    memcpy(longer, rig.tokens, sizeof(rig.tokens));
    help_tokens(77, longer + N, 60);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, longer, N + 60, NULL), TOKENS);
    help_decode(rig.ctx, 0, longer, TOKENS, N + 60);
    help_logits(rig.ctx, once);
    assert_int_equal(kvt_llama_save(rig.llama, 0, longer, N + 60), (N + 60) / 16 - BLOCKS);
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    assert_int_equal(kvt_llama_save(rig.llama, 0, longer, N + 60), 0);
    /* every turn again, longer, from the store */
    clear(&rig);
    assert_int_equal(kvt_llama_restore(rig.llama, 2, longer, N + 60, NULL), (N + 60 - 1) / 16 * 16);
    help_decode(rig.ctx, 2, longer, (N + 60 - 1) / 16 * 16, N + 60);
    help_logits(rig.ctx, logits);
    assert_true(help_distance(once, logits) < ROUNDING);
    close_rig(&rig);
}

/* C60 here: at least one token is left to compute; short prompts and full contexts are counted. */
static void test_c60_bounds(void **state)
{
    (void)state;
    struct rig rig;
    struct kvt_llama_report report = {.struct_size = sizeof(report)};

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    learn(&rig);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, 0, NULL), 0);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, 16, NULL), 0);
    assert_int_equal(help_counter(rig.llama, "llama.restore_short_prompt"), 2);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, 17, &report), 16);
    assert_int_equal(report.tokens_usable, 16);
    clear(&rig);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, TOKENS, NULL), TOKENS - 16);
    /* not empty: refused, and left as it is */
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, N, NULL), KVT_E_INVAL);
    assert_non_null(strstr(kvt_llama_error(rig.llama), "not empty"));
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 0), TOKENS - 17);
    assert_int_equal(kvt_llama_restore(rig.llama, 3, rig.tokens, N, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_llama_restore(rig.llama, -1, rig.tokens, N, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_llama_restore(rig.llama, 4, rig.tokens, N, NULL), KVT_E_INVAL);
    report.struct_size = 4;
    assert_int_equal(kvt_llama_restore(rig.llama, 1, rig.tokens, N, &report), KVT_E_VERSION);
    close_rig(&rig);
}

/* No room in the context: a counted miss, the sequence is empty, the others are as they were. */
static void test_no_room(void **state)
{
    (void)state;
    struct rig rig;
    int32_t filler[400];

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    learn(&rig);
    help_tokens(1, filler, 400);
    help_decode(rig.ctx, 1, filler, 0, 200);
    help_decode(rig.ctx, 1, filler, 200, 400);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, N, NULL), 0);
    assert_int_equal(help_counter(rig.llama, "llama.restore_refused"), 1);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 0), -1);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 1), 399);
    close_rig(&rig);
}

/* Saves that do not fit what the context holds are refused, not guessed. */
static void test_save_refusals(void **state)
{
    (void)state;
    struct rig rig;

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, N), KVT_E_INVAL); /* empty */
    help_decode(rig.ctx, 0, rig.tokens, 0, 100);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, N), KVT_E_INVAL); /* too short */
    assert_non_null(strstr(kvt_llama_error(rig.llama), "does not hold"));
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, 15), 0); /* no full block */
    llama_memory_seq_rm(llama_get_memory(rig.ctx), 0, 0, 20);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, 100), KVT_E_INVAL); /* no start */
    clear(&rig);
    /* a hole in the middle, which pos_min and pos_max do not show */
    help_decode(rig.ctx, 0, rig.tokens, 0, 100);
    llama_memory_seq_rm(llama_get_memory(rig.ctx), 0, 40, 41);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, 96), KVT_E_ENGINE);
    assert_int_equal(help_counter(rig.llama, "llama.save_refused"), 1);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 3), -1);
    /* the spare sequence in use */
    clear(&rig);
    help_decode(rig.ctx, 3, rig.tokens, 0, 20);
    help_decode(rig.ctx, 0, rig.tokens, 0, 32);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, 32), KVT_E_INVAL);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 3), 19);
    close_rig(&rig);
}

/* One sequence and no spare: the whole sequence is copied, the outcome is the same. */
static void test_single_sequence(void **state)
{
    (void)state;
    struct rig rig;
    float logits[HELP_VOCAB];

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    kvt_llama_free(rig.llama);
    llama_free(rig.ctx);
    rig.params.n_seq_max = 1;
    rig.params.kv_unified = false;
    rig.ctx = llama_init_from_model(rig.model, rig.params);
    assert_non_null(rig.ctx);
    open_adapter(&rig, KVT_LEVEL_RAW, 0);
    help_prefill(rig.ctx, 0, rig.tokens, N);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, 100), 6);
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    assert_int_equal(kvt_llama_save(rig.llama, 0, rig.tokens, N), BLOCKS - 6);
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 0), N - 1);
    clear(&rig);
    recall(&rig, 0, TOKENS, logits);
    assert_memory_equal(logits, rig.exact, sizeof(logits));
    close_rig(&rig);
}

/* C13, C18, C77 here: whatever differs in the identity gives no hits; the same again gives all. */
static void test_c13_identity(void **state)
{
    (void)state;
    struct rig rig;
    struct kvt_llama_opts base, opts;
    struct kvt_llama *llama = NULL;
    char other_path[64], error[512];

    open_rig(&rig, KVT_LEVEL_RAW, 0);
    learn(&rig);
    help_file(other_path, "weightS");
    kvt_llama_opts_init(&base);
    base.context_params = &rig.params;
    base.model_path = rig.model_path;
    base.level = KVT_LEVEL_RAW;
    for (int variant = 0; variant <= 8; variant++) {
        struct llama_context_params params = rig.params;
        opts = base;
        opts.context_params = &params;
        if (variant == 1)
            opts.model_path = other_path;
        if (variant == 2)
            opts.lora = "sha256:1234 scale=1";
        if (variant == 3) {
            opts.salt = "tenant";
            opts.salt_len = 6;
        }
        if (variant == 4)
            params.rope_freq_base = 20000.0f;
        if (variant == 5)
            params.type_k = params.type_v = GGML_TYPE_BF16;
        if (variant == 6)
            opts.block_tokens = 32;
        if (variant == 7)
            setenv("LLAMA_ATTN_ROT_DISABLE", "1", 1);
        if (variant == 8)
            opts.engine_build = "sha256:5678";
        struct llama_context *ctx = llama_init_from_model(rig.model, params);
        assert_non_null(ctx);
        int rc = kvt_llama_new(rig.cache, ctx, &opts, &llama, error, sizeof(error));
        if (rc != 0)
            fail_msg("variant %d: %s", variant, error);
        const long got = kvt_llama_restore(llama, 0, rig.tokens, N, NULL);
        if (got != (variant == 0 ? TOKENS : 0))
            fail_msg("variant %d restored %ld tokens", variant, got);
        assert_int_equal(memcmp(kvt_llama_ns_id(llama), kvt_llama_ns_id(rig.llama), 16) == 0,
                         variant == 0);
        kvt_llama_free(llama);
        llama_free(ctx);
        unsetenv("LLAMA_ATTN_ROT_DISABLE");
    }
    unlink(other_path);
    close_rig(&rig);
}

/* A demand for a level that is not there is a miss. */
static void test_minimum_level(void **state)
{
    (void)state;
    struct rig rig;
    struct kvt_llama_opts opts;
    char error[512];

    open_rig(&rig, KVT_LEVEL_KV4, 64);
    learn(&rig);
    kvt_llama_free(rig.llama);
    kvt_llama_opts_init(&opts);
    opts.context_params = &rig.params;
    opts.model_path = rig.model_path;
    opts.min_level = KVT_LEVEL_RAW;
    assert_int_equal(kvt_llama_new(rig.cache, rig.ctx, &opts, &rig.llama, error, sizeof(error)), 0);
    assert_int_equal(kvt_llama_restore(rig.llama, 0, rig.tokens, N, NULL), 16); /* the first */
    close_rig(&rig);
}

/* Saves in flight are bounded: the copies that do not fit are dropped and counted, never waited
 * for; what was queued is whole. */
static void test_many_saves(void **state)
{
    (void)state;
    struct rig rig;
    long queued = 0;

    open_rig(&rig, KVT_LEVEL_KV8, 0);
    for (int round = 0; round < 12; round++) {
        int32_t tokens[200];
        clear(&rig);
        help_tokens(1000 + (uint64_t)round, tokens, 200);
        help_decode(rig.ctx, 0, tokens, 0, 200);
        long got = kvt_llama_save(rig.llama, 0, tokens, 200);
        assert_true(got == 12 || got == 0);
        queued += got;
    }
    assert_int_equal(kvt_llama_sync(rig.llama), 0);
    assert_int_equal(queued + (long)help_counter(rig.llama, "llama.save_busy"), 12 * 12);
    assert_int_equal(help_counter(rig.llama, "llama.saved_blocks"), queued);
    long found = 0;
    for (int round = 0; round < 12; round++) {
        int32_t tokens[200];
        clear(&rig);
        help_tokens(1000 + (uint64_t)round, tokens, 200);
        long got = kvt_llama_restore(rig.llama, 0, tokens, 200, NULL);
        assert_true(got == 0 || got == 192);
        found += got / 16;
    }
    assert_int_equal(found, queued);
    close_rig(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_raw_is_bit_identical),
        cmocka_unit_test(test_restore_reuses_the_copy_of_a_save),
        cmocka_unit_test(test_raw_of_every_shape),
        cmocka_unit_test(test_raw_after_reopen),
        cmocka_unit_test(test_lossy_is_near),
        cmocka_unit_test(test_scattered_cells),
        cmocka_unit_test(test_wrapped_cells),
        cmocka_unit_test(test_missing_middle_block),
        cmocka_unit_test(test_damaged_block_cuts_the_run),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_lossy_origin_is_stored_again_at_kv8),
        cmocka_unit_test(test_growing_conversation),
        cmocka_unit_test(test_c60_bounds),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_save_refusals),
        cmocka_unit_test(test_single_sequence),
        cmocka_unit_test(test_c13_identity),
        cmocka_unit_test(test_minimum_level),
        cmocka_unit_test(test_many_saves),
    };
    llama_backend_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
