/* Goal: one store serves several contexts of a process, from several threads, and what one saved
 * another restores bit for bit; blocks of any size do, and do not mix; a prefetch brings into DRAM
 * what is on disk, before the restore, and changes nothing else; a restore is one call of
 * llama_state_seq_set_data. Method: tiny random models in the real llama.cpp, and the demo's model
 * where it has been downloaded; the linker wraps llama_state_seq_set_data to count its calls.
 */
#include "llama_help.h"

#include <pthread.h>
#include <time.h>

#define N 273 /* prompt: 17 blocks of 16, 8 of 32, 4 of 64, 2 of 128, and more */
#define PROMPTS 6
#define SEED_WORDS 5

size_t __real_llama_state_seq_set_data(struct llama_context *ctx, const uint8_t *src, size_t size,
                                       llama_seq_id seq);
size_t __wrap_llama_state_seq_set_data(struct llama_context *ctx, const uint8_t *src, size_t size,
                                       llama_seq_id seq);

static _Atomic int set_calls;

size_t __wrap_llama_state_seq_set_data(struct llama_context *ctx, const uint8_t *src, size_t size,
                                       llama_seq_id seq)
{
    set_calls++;
    return __real_llama_state_seq_set_data(ctx, src, size, seq);
}

/* A context and its adapter on a cache that others use too. */
struct seat {
    struct llama_context *ctx;
    struct kvt_llama *llama;
    struct llama_context_params params;
    uint32_t block;
};

static char model_file[64];
static struct llama_model *model;

static int setup(void **state)
{
    (void)state;
    help_file(model_file, "weights");
    model = tiny_model(&tiny_plain);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    llama_model_free(model);
    return unlink(model_file);
}

static void sit_down(struct seat *seat, struct kvt_cache *cache, struct llama_model *of,
                     const char *path, uint32_t n_ctx, uint32_t block, int level)
{
    struct kvt_llama_opts opts;
    char error[512] = "";

    seat->params = help_params();
    seat->params.n_ctx = n_ctx;
    seat->block = block;
    seat->ctx = llama_init_from_model(of, seat->params);
    assert_non_null(seat->ctx);
    kvt_llama_opts_init(&opts);
    opts.context_params = &seat->params;
    opts.model_path = path;
    opts.level = level;
    opts.window_tokens = 0;
    opts.block_tokens = block;
    int rc = kvt_llama_new(cache, seat->ctx, &opts, &seat->llama, error, sizeof(error));
    if (rc != 0)
        fail_msg("kvt_llama_new: %d %s", rc, error);
}

static void sit(struct seat *seat, struct kvt_cache *cache, uint32_t block, int level)
{
    sit_down(seat, cache, model, model_file, HELP_CTX, block, level);
}

static void leave(struct seat *seat)
{
    kvt_llama_free(seat->llama);
    llama_free(seat->ctx);
}

static size_t whole(const struct seat *seat, size_t n)
{
    return seat->block * kvt_usable_blocks(seat->block, n);
}

static void clear(struct seat *seat)
{
    llama_memory_clear(llama_get_memory(seat->ctx), true);
}

/* The prompt with nothing remembered, in the batches that a restore leaves. */
static void cold(struct seat *seat, const int32_t *tokens, size_t n, float *logits, size_t vocab)
{
    clear(seat);
    help_decode(seat->ctx, 0, tokens, 0, whole(seat, n));
    help_decode(seat->ctx, 0, tokens, whole(seat, n), n);
    memcpy(logits, llama_get_logits_ith(seat->ctx, -1), vocab * sizeof(*logits));
}

static long recall(struct seat *seat, const int32_t *tokens, size_t n, float *logits, size_t vocab,
                   struct kvt_llama_report *report)
{
    clear(seat);
    report->struct_size = sizeof(*report);
    long got = kvt_llama_restore(seat->llama, 0, tokens, n, report);
    if (got < 0)
        fail_msg("restore: %s", kvt_llama_error(seat->llama));
    help_decode(seat->ctx, 0, tokens, (size_t)got, n);
    memcpy(logits, llama_get_logits_ith(seat->ctx, -1), vocab * sizeof(*logits));
    return got;
}

static void keep(struct seat *seat, const int32_t *tokens, size_t n)
{
    long queued = kvt_llama_save(seat->llama, 0, tokens, n);
    if (queued != (long)(n / seat->block))
        fail_msg("saved %ld blocks: %s", queued, kvt_llama_error(seat->llama));
    assert_int_equal(kvt_llama_sync(seat->llama), 0);
}

/* ---- block sizes --------------------------------------------------------------------------- */

/* Every size restores bit for bit by one set_data; no size finds another's blocks. */
static void test_block_sizes(void **state)
{
    (void)state;
    const uint32_t sizes[] = {16, 32, 64, 128};
    int32_t tokens[N];
    struct kvt_cache *cache = help_cache(NULL);
    struct seat seats[4];
    float exact[HELP_VOCAB], logits[HELP_VOCAB];
    struct kvt_llama_report report;

    help_tokens(SEED_WORDS, tokens, N);
    for (int i = 0; i < 4; i++) {
        sit(&seats[i], cache, sizes[i], KVT_LEVEL_RAW);
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(kvt_llama_ns_id(seats[i].llama),
                                    kvt_llama_ns_id(seats[k].llama), KVT_NS_BYTES);
        assert_int_equal(recall(&seats[i], tokens, N, logits, HELP_VOCAB, &report), 0);
        assert_int_equal(report.tokens_found, 0);
        cold(&seats[i], tokens, N, exact, HELP_VOCAB);
        keep(&seats[i], tokens, N);
        set_calls = 0;
        assert_int_equal(recall(&seats[i], tokens, N, logits, HELP_VOCAB, &report),
                         whole(&seats[i], N));
        assert_int_equal(set_calls, 1);
        assert_int_equal(report.blocks_dram, whole(&seats[i], N) / sizes[i]);
        assert_memory_equal(logits, exact, sizeof(logits));
    }
    for (int i = 0; i < 4; i++)
        leave(&seats[i]);
    kvt_close(cache);
}

/* Lossy levels and the window work in blocks of their size. */
static void test_large_blocks_lossy(void **state)
{
    (void)state;
    int32_t tokens[N];
    struct kvt_cache *cache = help_cache(NULL);
    struct seat seat;
    float exact[HELP_VOCAB], logits[HELP_VOCAB];
    struct kvt_llama_report report;

    help_tokens(SEED_WORDS, tokens, N);
    sit(&seat, cache, 64, KVT_LEVEL_KV4);
    cold(&seat, tokens, N, exact, HELP_VOCAB);
    keep(&seat, tokens, N);
    assert_int_equal(recall(&seat, tokens, N, logits, HELP_VOCAB, &report), 256);
    const float distance = help_distance(logits, exact);
    if (!(distance > 0 && distance < 0.2f))
        fail_msg("distance %g", (double)distance);
    /* one raw block of 64 tokens and three of kv4 */
    const struct kvt_ns *ns = kvt_llama_ns(seat.llama);
    assert_int_equal(report.bytes_moved, kvt_ns_record_bytes(ns, 0, KVT_LEVEL_RAW) +
                                             3 * kvt_ns_record_bytes(ns, 0, KVT_LEVEL_KV4));
    leave(&seat);
    kvt_close(cache);
}

static void test_block_sizes_refused(void **state)
{
    (void)state;
    const uint32_t sizes[] = {0, 8, 24, 4112};
    struct kvt_cache *cache = help_cache(NULL);
    struct llama_context_params params = help_params();
    struct llama_context *ctx = llama_init_from_model(model, params);
    struct kvt_llama *llama = NULL;
    struct kvt_llama_opts opts;
    char error[256];

    for (int i = 0; i < 4; i++) {
        kvt_llama_opts_init(&opts);
        opts.context_params = &params;
        opts.model_path = model_file;
        opts.block_tokens = sizes[i];
        assert_int_equal(kvt_llama_new(cache, ctx, &opts, &llama, error, sizeof(error)),
                         KVT_E_INVAL);
        assert_non_null(strstr(error, "multiple of 16"));
        assert_null(llama);
    }
    llama_free(ctx);
    kvt_close(cache);
}

/* ---- several contexts ---------------------------------------------------------------------- */

static void test_one_saves_another_restores(void **state)
{
    (void)state;
    int32_t tokens[N];
    struct kvt_cache *cache = help_cache(NULL);
    struct seat a, b, other;
    float exact[HELP_VOCAB], logits[HELP_VOCAB];
    struct kvt_llama_report report;

    help_tokens(SEED_WORDS, tokens, N);
    sit(&a, cache, 16, KVT_LEVEL_RAW);
    sit(&b, cache, 16, KVT_LEVEL_RAW);
    assert_memory_equal(kvt_llama_ns_id(a.llama), kvt_llama_ns_id(b.llama), KVT_NS_BYTES);
    cold(&b, tokens, N, exact, HELP_VOCAB);
    cold(&a, tokens, N, logits, HELP_VOCAB);
    assert_memory_equal(logits, exact, sizeof(logits));
    keep(&a, tokens, N);
    assert_int_equal(recall(&b, tokens, N, logits, HELP_VOCAB, &report), whole(&b, N));
    assert_memory_equal(logits, exact, sizeof(logits));
    /* nothing is stored twice, also not by the other */
    assert_int_equal(kvt_llama_save(b.llama, 0, tokens, N), 0);
    /* the one that saved may go */
    leave(&a);
    assert_int_equal(recall(&b, tokens, N, logits, HELP_VOCAB, &report), whole(&b, N));
    assert_memory_equal(logits, exact, sizeof(logits));
    /* and one with a larger context, which computes the same bytes */
    sit_down(&other, cache, model, model_file, 2 * HELP_CTX, 16, KVT_LEVEL_RAW);
    assert_int_equal(recall(&other, tokens, N, logits, HELP_VOCAB, &report), whole(&other, N));
    assert_memory_equal(logits, exact, sizeof(logits));
    leave(&other);
    leave(&b);
    kvt_close(cache);
}

/* One thread per context: saves its own prompts and restores everybody's as they appear. */
struct guest {
    struct kvt_cache *cache;
    const int32_t (*tokens)[N];
    const float (*exact)[HELP_VOCAB];
    int first, step;
    long restored;
    const char *failure;
};

static void *guest_main(void *arg)
{
    struct guest *guest = arg;
    struct seat seat;
    struct kvt_llama_report report;
    float *logits = malloc(HELP_VOCAB * sizeof(float));

    sit(&seat, guest->cache, 16, KVT_LEVEL_RAW);
    for (int p = guest->first; p < PROMPTS; p += guest->step) {
        cold(&seat, guest->tokens[p], N, logits, HELP_VOCAB);
        if (kvt_llama_save(seat.llama, 0, guest->tokens[p], N) < 0 ||
            kvt_llama_sync(seat.llama) != 0)
            guest->failure = "save";
    }
    for (int round = 0; round < 2 && guest->failure == NULL; round++)
        for (int p = 0; p < PROMPTS; p++) {
            long got = recall(&seat, guest->tokens[p], N, logits, HELP_VOCAB, &report);
            if (got == (long)whole(&seat, N) &&
                memcmp(logits, guest->exact[p], HELP_VOCAB * sizeof(float)) != 0)
                guest->failure = "other logits";
            if (got > 0)
                guest->restored++;
        }
    leave(&seat);
    free(logits);
    return NULL;
}

static void test_contexts_of_several_threads(void **state)
{
    (void)state;
    static int32_t tokens[PROMPTS][N];
    static float exact[PROMPTS][HELP_VOCAB];
    struct kvt_cache *cache = help_cache(NULL);
    struct guest guests[3];
    pthread_t threads[3];
    struct seat seat;
    struct kvt_llama_report report;
    float logits[HELP_VOCAB];

    sit(&seat, cache, 16, KVT_LEVEL_RAW);
    for (int p = 0; p < PROMPTS; p++) {
        help_tokens(SEED_WORDS + (uint64_t)p, tokens[p], N);
        cold(&seat, tokens[p], N, exact[p], HELP_VOCAB);
    }
    for (int g = 0; g < 3; g++) {
        guests[g] = (struct guest){
            cache, (const int32_t(*)[N])tokens, (const float(*)[HELP_VOCAB])exact, g, 3, 0, NULL};
        assert_int_equal(pthread_create(&threads[g], NULL, guest_main, &guests[g]), 0);
    }
    for (int g = 0; g < 3; g++) {
        assert_int_equal(pthread_join(threads[g], NULL), 0);
        if (guests[g].failure != NULL)
            fail_msg("guest %d: %s", g, guests[g].failure);
        assert_true(guests[g].restored >= 2 * PROMPTS / 3); /* its own at least */
    }
    for (int p = 0; p < PROMPTS; p++) {
        assert_int_equal(recall(&seat, tokens[p], N, logits, HELP_VOCAB, &report), whole(&seat, N));
        assert_memory_equal(logits, exact[p], sizeof(logits));
    }
    leave(&seat);
    kvt_close(cache);
}

/* ---- prefetch ------------------------------------------------------------------------------ */

static uint64_t stat_of(struct kvt_cache *cache, const char *name)
{
    uint64_t value = 0;

    assert_int_equal(kvt_stats_get(cache, name, &value), 0);
    return value;
}

/* Wait (at most ten seconds) until a lookup of the prompt's last block says DRAM. */
static void wait_for_dram(struct seat *seat, const int32_t *tokens, size_t blocks)
{
    struct kvt_key keys[N / 16];
    enum kvt_tier tiers[N / 16];
    const struct kvt_lookup_opts opts = {sizeof(opts), KVT_LEVEL_DEFAULT};
    const struct timespec pause = {0, 2000000};
    uint8_t root[32];

    assert_int_equal(kvt_key_root(NULL, 0, root), 0);
    assert_int_equal(
        kvt_key_chain(root, (const uint32_t *)tokens, blocks * 16, 16, NULL, 0, 0, 0, keys, blocks),
        blocks);
    for (int i = 0; i < 5000; i++) {
        size_t there = 0;
        assert_int_equal(kvt_lookup(kvt_llama_ns(seat->llama), keys, blocks, &opts, tiers), blocks);
        for (size_t b = 0; b < blocks; b++)
            there += tiers[b] == KVT_TIER_DRAM;
        if (there == blocks)
            return;
        nanosleep(&pause, NULL);
    }
    fail_msg("the prefetched blocks did not come");
}

/* A prompt on disk alone: what remains is what a new process finds. */
static struct kvt_cache *on_disk(const char *dir, const int32_t *tokens, float *exact)
{
    struct kvt_cache *cache = help_cache(dir);
    struct seat seat;

    sit(&seat, cache, 16, KVT_LEVEL_RAW);
    cold(&seat, tokens, N, exact, HELP_VOCAB);
    keep(&seat, tokens, N);
    assert_int_equal(kvt_flush(cache), 0);
    leave(&seat);
    kvt_close(cache);
    return help_cache(dir);
}

static void test_prefetch_then_restore(void **state)
{
    (void)state;
    int32_t tokens[N];
    char dir[] = "/var/tmp/kvt-test-prefetch-XXXXXX";
    float exact[HELP_VOCAB], logits[HELP_VOCAB];
    struct seat seat;
    struct kvt_llama_report report;

    assert_non_null(mkdtemp(dir));
    help_tokens(SEED_WORDS, tokens, N);
    struct kvt_cache *cache = on_disk(dir, tokens, exact);
    sit(&seat, cache, 16, KVT_LEVEL_RAW);
    assert_int_equal(kvt_llama_prefetch(seat.llama, tokens, 15), 0); /* no block yet */
    assert_int_equal(kvt_llama_prefetch(seat.llama, tokens, 100), 6);
    wait_for_dram(&seat, tokens, 6);
    /* more tokens: the first six are there */
    assert_int_equal(kvt_llama_prefetch(seat.llama, tokens, N), 17 - 6);
    wait_for_dram(&seat, tokens, 17);
    assert_int_equal(kvt_llama_prefetch(seat.llama, tokens, N), 0);
    assert_int_equal(help_counter(seat.llama, "llama.prefetched_blocks"), 17);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(seat.ctx), 0), -1);
    assert_int_equal(recall(&seat, tokens, N, logits, HELP_VOCAB, &report), whole(&seat, N));
    assert_int_equal(report.blocks_dram, 17);
    assert_int_equal(report.blocks_disk, 0);
    assert_memory_equal(logits, exact, sizeof(logits));
    leave(&seat);
    kvt_close(cache);
    help_remove(dir);
}

/* At once, over and over, of prompts that end otherwise or are not stored: all of it is right. */
static void test_prefetch_races_the_restore(void **state)
{
    (void)state;
    int32_t tokens[N], strange[N];
    char dir[] = "/var/tmp/kvt-test-prefetch-XXXXXX";
    float exact[HELP_VOCAB], logits[HELP_VOCAB];
    struct seat seat;
    struct kvt_llama_report report;

    assert_non_null(mkdtemp(dir));
    help_tokens(SEED_WORDS, tokens, N);
    help_tokens(SEED_WORDS + 100, strange, N);
    struct kvt_cache *cache = on_disk(dir, tokens, exact);
    sit(&seat, cache, 16, KVT_LEVEL_RAW);
    assert_int_equal(kvt_llama_prefetch(seat.llama, strange, N), 0);
    memcpy(strange, tokens, 64 * sizeof(*tokens)); /* four blocks in common */
    assert_int_equal(kvt_llama_prefetch(seat.llama, strange, N), 4);
    for (size_t n = 16; n <= N; n += 16) /* token by token, as a tokeniser would */
        assert_true(kvt_llama_prefetch(seat.llama, tokens, n) >= 0);
    assert_int_equal(recall(&seat, tokens, N, logits, HELP_VOCAB, &report), whole(&seat, N));
    assert_int_equal(report.blocks_dram + report.blocks_disk, 17);
    assert_memory_equal(logits, exact, sizeof(logits));
    assert_int_equal(stat_of(cache, "disk.read_blocks"), 17); /* no block was read twice */
    leave(&seat);
    kvt_close(cache);
    help_remove(dir);
}

static void test_prefetch_bounds(void **state)
{
    (void)state;
    static int32_t tokens[4 * HELP_CTX];
    struct kvt_cache *cache = help_cache(NULL);
    struct seat seat;

    help_tokens(SEED_WORDS, tokens, 4 * HELP_CTX);
    sit(&seat, cache, 16, KVT_LEVEL_RAW);
    assert_int_equal(kvt_llama_prefetch(NULL, tokens, 64), KVT_E_INVAL);
    assert_int_equal(kvt_llama_prefetch(seat.llama, NULL, 64), KVT_E_INVAL);
    assert_int_equal(kvt_llama_prefetch(seat.llama, NULL, 0), 0);
    assert_int_equal(kvt_llama_prefetch(seat.llama, tokens, 4 * HELP_CTX), 0); /* > context */
    kvt_enable(cache, 0);
    assert_int_equal(kvt_llama_prefetch(seat.llama, tokens, N), 0);
    kvt_enable(cache, 1);
    leave(&seat);
    kvt_close(cache);
}

/* ---- the demo's model ---------------------------------------------------------------------- */

/* Two contexts of the real model on one store, from two threads one after the other. */
struct real {
    struct kvt_cache *cache;
    struct llama_model *model;
    const char *path;
    const int32_t *tokens;
    size_t n, vocab;
    float *logits;
    int save;
    long restored;
};

static void *real_main(void *arg)
{
    struct real *real = arg;
    struct seat seat;
    struct kvt_llama_report report;

    sit_down(&seat, real->cache, real->model, real->path, HELP_CTX, 32, KVT_LEVEL_RAW);
    if (real->save) {
        cold(&seat, real->tokens, real->n, real->logits, real->vocab);
        keep(&seat, real->tokens, real->n);
    } else {
        real->restored = recall(&seat, real->tokens, real->n, real->logits, real->vocab, &report);
    }
    leave(&seat);
    return NULL;
}

static void test_real_model_shared(void **state)
{
    (void)state;
    const char *path = getenv("KVT_TEST_MODEL");
    int32_t tokens[140];

    if (path == NULL || access(path, R_OK) != 0)
        skip();
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    struct real real = {.path = path, .tokens = tokens, .n = 140, .save = 1};
    real.model = llama_model_load_from_file(path, params);
    assert_non_null(real.model);
    real.vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(real.model));
    for (int i = 0; i < 140; i++)
        tokens[i] = 1000 + i * 37 % 5000;
    real.cache = help_cache(NULL);
    struct real second = real;
    second.save = 0;
    real.logits = calloc(real.vocab, sizeof(float));
    second.logits = calloc(real.vocab, sizeof(float));
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, real_main, &real), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(pthread_create(&thread, NULL, real_main, &second), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(second.restored, 128);
    assert_memory_equal(real.logits, second.logits, real.vocab * sizeof(float));
    free(real.logits);
    free(second.logits);
    kvt_close(real.cache);
    llama_model_free(real.model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_sizes),
        cmocka_unit_test(test_large_blocks_lossy),
        cmocka_unit_test(test_block_sizes_refused),
        cmocka_unit_test(test_one_saves_another_restores),
        cmocka_unit_test(test_contexts_of_several_threads),
        cmocka_unit_test(test_prefetch_then_restore),
        cmocka_unit_test(test_prefetch_races_the_restore),
        cmocka_unit_test(test_prefetch_bounds),
        cmocka_unit_test(test_real_model_shared),
    };
    printf("seed %d\n", SEED_WORDS);
    llama_backend_init();
    return cmocka_run_group_tests(tests, setup, teardown);
}
