/* Goal: a restore loads what pays, computes what does not, and joins both where that is faster;
 * whatever it does, the sequence holds the rows that it should, in order. A load that falls behind
 * is cut off and what came of it is used. Method: the tiny model; start values by options and
 * plan=deterministic make each decision certain, a drive slowed down by a wrapper makes loads late.
 * Rows are read back from the context: those that were loaded are compared bit for bit with those
 * that were stored (raw), those that were computed with the same, but for rounding.
 */
#include "llama_help.h"
#include "llama_internal.h"

#include <math.h>

#include "client/settings.h"
#include "slow_io.h"

#define N 466 /* prompt: 29 blocks and 2 tokens */
#define BLOCKS 29u
#define TOKENS 464
#define ROUNDING 0.02f
#define MIB (1u << 20)

struct rig {
    struct llama_model *model;
    struct llama_context_params params;
    struct llama_context *ctx;
    struct kvt_cache *cache;
    struct kvt_llama *llama;
    struct kvt_slow_speed speed;
    struct kvt_llama_report report;
    char model_path[64];
    char dir[64];
    int32_t tokens[N];
    float exact[HELP_VOCAB];
    uint8_t *stored; /* the state of the prompt as it was stored, rows in order */
};

static void open_cache(struct rig *rig, const char *options)
{
    struct kvt_config *config = NULL;
    char error[256] = "", root[100], text[400], *save = NULL;

    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set(config, "dram", "32MiB"), 0);
    snprintf(root, sizeof(root), "%s:64MiB", rig->dir);
    assert_int_equal(kvt_config_set(config, "disk", root), 0);
    snprintf(text, sizeof(text), "%s", options);
    for (char *word = strtok_r(text, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        char *value = strchr(word, '=');
        *value++ = '\0';
        if (kvt_config_set(config, word, value) != 0)
            fail_msg("%s", kvt_config_error(config));
    }
    config->settings.io_wrap = kvt_slow_io_new;
    config->settings.io_wrap_arg = &rig->speed;
    int rc = kvt_open(config, &rig->cache, error, sizeof(error));
    if (rc != 0)
        fail_msg("kvt_open: %s", error);
    kvt_config_free(config);
}

static void open_adapter(struct rig *rig, int cut)
{
    struct kvt_llama_opts opts;
    char error[512] = "";

    kvt_llama_opts_init(&opts);
    assert_int_equal(opts.cut, KVT_PLAN_CUT_OVERLAP);
    opts.context_params = &rig->params;
    opts.model_path = rig->model_path;
    opts.level = KVT_LEVEL_RAW;
    opts.window_tokens = 0;
    opts.cut = cut;
    int rc = kvt_llama_new(rig->cache, rig->ctx, &opts, &rig->llama, error, sizeof(error));
    if (rc != 0)
        fail_msg("kvt_llama_new: %d %s", rc, error);
}

static void close_cache(struct rig *rig)
{
    kvt_llama_free(rig->llama);
    kvt_close(rig->cache);
}

static void clear(struct rig *rig)
{
    llama_memory_clear(llama_get_memory(rig->ctx), true);
}

/* Positions [0, cells) of sequence 0, rows in order, headers as of one composed state. */
static uint8_t *state_of(struct rig *rig, uint32_t cells)
{
    struct kvt_staging rows = {NULL, 0};
    const size_t bytes = kvt_blob_bytes(&rig->llama->shape, cells);
    uint8_t *copy = malloc(bytes);

    assert_non_null(copy);
    assert_int_equal(kvt_llama_scratch(rig->llama, cells / 16 + 1), 0);
    assert_int_equal(kvt_llama_copy_rows(rig->llama, 0, 0, cells, &rows), 0);
    memcpy(copy, rows.bytes, bytes);
    kvt_staging_free(&rows);
    return copy;
}

/* Rows [from, to) of two states, of a_cells and b_cells, are the same. */
static void assert_rows(struct rig *rig, const uint8_t *a, uint32_t a_cells, const uint8_t *b,
                        uint32_t b_cells, uint32_t from, uint32_t to)
{
    const struct kvt_blob_shape *shape = &rig->llama->shape;

    for (uint32_t part = 0; part < 2 * shape->layers; part++) {
        const size_t row = shape->rows[part].bytes;
        assert_memory_equal(a + kvt_blob_rows_offset(shape, part, a_cells) + from * row,
                            b + kvt_blob_rows_offset(shape, part, b_cells) + from * row,
                            (to - from) * row);
    }
}

/* Rows [0, to) are those of `stored`, but for what the size of a step does to the last bits. */
static void assert_rows_near(struct rig *rig, const uint8_t *got, uint32_t cells, uint32_t to)
{
    const struct kvt_blob_shape *shape = &rig->llama->shape;

    for (uint32_t part = 0; part < 2 * shape->layers; part++) {
        const size_t n = to * shape->rows[part].bytes / sizeof(ggml_fp16_t);
        const ggml_fp16_t *a =
            (const ggml_fp16_t *)(const void *)(got + kvt_blob_rows_offset(shape, part, cells));
        const ggml_fp16_t *b =
            (const ggml_fp16_t *)(const void *)(rig->stored +
                                                kvt_blob_rows_offset(shape, part, TOKENS));
        double away = 0, all = 0; /* rows of other tokens would be as far away as they are long */
        for (size_t i = 0; i < n; i++) {
            double y = (double)ggml_fp16_to_fp32(b[i]);
            away += fabs((double)ggml_fp16_to_fp32(a[i]) - y);
            all += fabs(y);
        }
        if (!(away <= 0.02 * all))
            fail_msg("part %u: %g away, of %g", part, away, all);
    }
}

/* A model, and its prompt's blocks on disk and in DRAM. */
static void open_rig(struct rig *rig, int seqs)
{
    memset(rig, 0, sizeof(*rig));
    rig->model = tiny_model(&tiny_plain);
    rig->params = help_params();
    rig->params.n_seq_max = (uint32_t)seqs;
    rig->ctx = llama_init_from_model(rig->model, rig->params);
    assert_non_null(rig->ctx);
    help_file(rig->model_path, "weights");
    snprintf(rig->dir, sizeof(rig->dir), "/var/tmp/kvt-test-llama-XXXXXX");
    assert_non_null(mkdtemp(rig->dir));
    help_tokens(3, rig->tokens, N);
    open_cache(rig, "plan=off");
    open_adapter(rig, KVT_PLAN_CUT_OVERLAP);
    help_decode(rig->ctx, 0, rig->tokens, 0, TOKENS);
    rig->stored = state_of(rig, TOKENS);
    help_decode(rig->ctx, 0, rig->tokens, TOKENS, N);
    help_logits(rig->ctx, rig->exact);
    assert_int_equal(kvt_llama_save(rig->llama, 0, rig->tokens, N), (long)BLOCKS);
    assert_int_equal(kvt_llama_sync(rig->llama), 0);
    clear(rig);
}

/* The same store under other options; warm: blocks are read into DRAM first. */
static void again(struct rig *rig, const char *options, int cut, bool warm)
{
    close_cache(rig);
    open_cache(rig, options);
    open_adapter(rig, cut);
    if (!warm)
        return;
    struct kvt_cache *cache = rig->cache;
    assert_true(kvt_llama_prefetch(rig->llama, rig->tokens, N) > 0);
    uint64_t blocks = 0;
    while (blocks < BLOCKS) {
        assert_int_equal(kvt_stats_get(cache, "disk.read_blocks", &blocks), 0);
        usleep(1000);
    }
}

static void close_rig(struct rig *rig)
{
    close_cache(rig);
    llama_free(rig->ctx);
    llama_model_free(rig->model);
    unlink(rig->model_path);
    help_remove(rig->dir);
    free(rig->stored);
}

static long restore(struct rig *rig)
{
    rig->report = (struct kvt_llama_report){.struct_size = sizeof(rig->report)};
    long got = kvt_llama_restore(rig->llama, 0, rig->tokens, N, &rig->report);
    if (got < 0)
        fail_msg("restore: %ld %s", got, kvt_llama_error(rig->llama));
    return got;
}

/* What is in the sequence: tokens [0, computed) as computed in steps of some size, the others as
 * they were stored; and the prompt goes on as it should. */
static void assert_restored(struct rig *rig, uint32_t cells, uint32_t computed)
{
    float logits[HELP_VOCAB];
    uint8_t *got = state_of(rig, cells);

    assert_rows(rig, got, cells, rig->stored, TOKENS, computed, cells);
    help_decode(rig->ctx, 0, rig->tokens, cells, N);
    help_logits(rig->ctx, logits);
    assert_true(help_distance(logits, rig->exact) < ROUNDING);
    assert_rows_near(rig, got, cells, computed);
    free(got);
    clear(rig);
}

/* ---- all or nothing ------------------------------------------------------------------------ */

static void what_pays_is_loaded_and_what_does_not_is_not(void **state)
{
    (void)state;
    struct rig rig;
    uint64_t plans = 0;

    open_rig(&rig, 4);
    again(&rig, "plan=deterministic,plan_prefill=1000", KVT_PLAN_CUT_OVERLAP, true);
    assert_int_equal(restore(&rig), TOKENS);
    assert_int_equal(rig.report.plan_reason, KVT_PLAN_LOAD);
    assert_int_equal(rig.report.tokens_planned, TOKENS);
    assert_int_equal(rig.report.tokens_computed, 0);
    assert_true(rig.report.plan_recompute_s > 0.4 && rig.report.plan_load_all_s < 0.1);
    assert_restored(&rig, TOKENS, 0);

    again(&rig, "plan=deterministic,plan_prefill=100000000", KVT_PLAN_CUT_OVERLAP, true);
    assert_int_equal(restore(&rig), 0);
    assert_int_equal(rig.report.plan_reason, KVT_PLAN_RECOMPUTE);
    assert_int_equal(rig.report.tokens_found, TOKENS);
    assert_int_equal(rig.report.tokens_planned, 0);
    assert_int_equal(help_counter(rig.llama, "llama.restore_recompute"), 1);
    assert_int_equal(kvt_stats_get(rig.cache, "plan.recompute", &plans), 0);
    assert_int_equal(plans, 1);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 0), -1);

    again(&rig, "plan=off,plan_prefill=100000000", KVT_PLAN_CUT_OVERLAP, true);
    assert_int_equal(restore(&rig), TOKENS);
    assert_int_equal(rig.report.plan_reason, KVT_PLAN_OFF);
    assert_restored(&rig, TOKENS, 0);
    close_rig(&rig);
}

/* What the engine is seen to take decides: loaded at first, computed once it is known to be fast.
 */
static void prefills_are_observed(void **state)
{
    (void)state;
    struct rig rig;
    uint64_t seen = 0;

    open_rig(&rig, 4);
    again(&rig, "plan=on,plan_prefill=1000", KVT_PLAN_CUT_NONE, true);
    assert_int_equal(restore(&rig), TOKENS);
    clear(&rig);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kvt_llama_compute(rig.llama, 0, rig.tokens, 0, 200), 0);
        assert_int_equal(kvt_llama_compute(rig.llama, 0, rig.tokens, 200, N), 0);
        clear(&rig);
    }
    assert_int_equal(kvt_stats_get(rig.cache, "plan.prefills", &seen), 0);
    assert_int_equal(seen, 6);
    /* a run of its own is as good: the spare sequence is empty again */
    assert_int_equal(kvt_llama_calibrate(rig.llama, 400), 0);
    assert_int_equal(kvt_stats_get(rig.cache, "plan.prefills", &seen), 0);
    assert_int_equal(seen, 6 + 5);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(rig.ctx), 3), -1);
    for (int i = 0; i < 100; i++) /* an engine of a million tokens a second */
        assert_int_equal(kvt_observe_prefill(kvt_llama_ns(rig.llama), 1000, 0, 1e-6 * 1000), 0);
    for (int i = 0; i < 100; i++)
        assert_int_equal(kvt_observe_prefill(kvt_llama_ns(rig.llama), 4000, 0, 1e-8 * 4000), 0);
    assert_int_equal(restore(&rig), 0);
    assert_int_equal(rig.report.plan_reason, KVT_PLAN_RECOMPUTE);
    close_rig(&rig);
}

static void compute_refuses_what_makes_no_sense(void **state)
{
    (void)state;
    struct rig rig;

    open_rig(&rig, 4);
    assert_int_equal(kvt_llama_compute(rig.llama, 0, rig.tokens, 16, N), KVT_E_INVAL);
    assert_int_equal(kvt_llama_compute(rig.llama, 0, rig.tokens, N, N), KVT_E_INVAL);
    assert_int_equal(kvt_llama_compute(rig.llama, 9, rig.tokens, 0, N), KVT_E_INVAL);
    assert_int_equal(kvt_llama_compute(NULL, 0, rig.tokens, 0, N), KVT_E_INVAL);
    assert_int_equal(kvt_llama_compute(rig.llama, 0, NULL, 0, N), KVT_E_INVAL);
    assert_int_equal(kvt_llama_calibrate(NULL, 10), KVT_E_INVAL);
    assert_int_equal(kvt_llama_calibrate(rig.llama, 0), KVT_E_INVAL);
    help_decode(rig.ctx, 3, rig.tokens, 0, 8);
    assert_int_equal(kvt_llama_calibrate(rig.llama, 100), KVT_E_INVAL);
    clear(&rig);
    assert_int_equal(kvt_llama_calibrate(rig.llama, 1), 0);
    assert_int_equal(kvt_llama_calibrate(rig.llama, 100000),
                     0); /* no more than there is room for */
    /* the logits are those of the last token */
    assert_int_equal(kvt_llama_compute(rig.llama, 0, rig.tokens, 0, TOKENS), 0);
    assert_int_equal(kvt_llama_compute(rig.llama, 0, rig.tokens, TOKENS, N), 0);
    float logits[HELP_VOCAB];
    help_logits(rig.ctx, logits);
    assert_memory_equal(logits, rig.exact, sizeof(logits));
    close_rig(&rig);
}

/* ---- from both ends ------------------------------------------------------------------------ */

/* 1 ms a token computed, and 1 ms a token loaded: they are expected to meet in the middle. */
#define HALVES "plan=deterministic,plan_prefill=1000,plan_dram=1MiB,plan_disk=1MiB"

static void both_ends_meet(void **state)
{
    (void)state;
    for (int seqs = 1; seqs <= 4; seqs += 3) { /* without a spare sequence as well */
        struct rig rig;

        open_rig(&rig, seqs);
        again(&rig, HALVES, KVT_PLAN_CUT_OVERLAP, true);
        assert_int_equal(restore(&rig), TOKENS);
        assert_int_equal(rig.report.plan_reason, KVT_PLAN_CUT);
        assert_true(rig.report.tokens_planned > 0 && rig.report.tokens_planned < TOKENS);
        assert_true(rig.report.tokens_computed > 0 && rig.report.tokens_computed < TOKENS);
        assert_int_equal(rig.report.tokens_loaded, TOKENS);
        printf("%d sequences: %zu tokens computed, %zu planned to be loaded\n", seqs,
               rig.report.tokens_computed, rig.report.tokens_planned);
        assert_int_equal(help_counter(rig.llama, "llama.hybrids"), 1);
        assert_int_equal(help_counter(rig.llama, "llama.hybrid_computed"),
                         rig.report.tokens_computed);
        assert_restored(&rig, TOKENS, (uint32_t)rig.report.tokens_computed);

        again(&rig, HALVES, KVT_PLAN_CUT_NONE, true); /* only where the caller lets it */
        (void)restore(&rig);
        assert_int_not_equal(rig.report.plan_reason, KVT_PLAN_CUT);
        assert_int_equal(rig.report.tokens_computed, 0);
        close_rig(&rig);
    }
}

/* A drive so slow that nothing comes in time: the engine computes all of it. And one that is much
 * faster than was thought: how much is computed beside it depends on who gets the processor. Both
 * end at the right place. */
static void they_meet_wherever_they_meet(void **state)
{
    (void)state;
    struct rig rig;

    open_rig(&rig, 4);
    atomic_store(&rig.speed.latency_ns, 0);
    atomic_store(&rig.speed.bytes_per_s, 0);
    again(&rig, HALVES, KVT_PLAN_CUT_OVERLAP, false);
    assert_int_equal(restore(&rig), TOKENS);
    assert_int_equal(rig.report.plan_reason, KVT_PLAN_CUT);
    size_t fast = rig.report.tokens_computed;
    assert_restored(&rig, TOKENS, (uint32_t)fast);

    again(&rig, HALVES, KVT_PLAN_CUT_OVERLAP, false);
    atomic_store(&rig.speed.bytes_per_s, 20000);
    long got = restore(&rig);
    size_t slow = rig.report.tokens_computed;
    atomic_store(&rig.speed.bytes_per_s, 0);
    printf("computed: %zu tokens beside a fast drive, %zu beside a slow one\n", fast, slow);
    /* all of it, or as far as the engine came until the deadline of the loads: nothing was loaded
     */
    assert_true(got > 0 && got <= TOKENS && (size_t)got == slow);
    assert_restored(&rig, (uint32_t)got, (uint32_t)slow);
    close_rig(&rig);
}

/* ---- late ---------------------------------------------------------------------------------- */

/* A drive that has become 1,000 times slower than the plan thinks: cut off, and what came of it
 * from the front on is used. */
static void a_late_load_is_cut_off(void **state)
{
    (void)state;
    struct rig rig;

    open_rig(&rig, 4);
    again(&rig, "plan=deterministic,plan_prefill=2000,plan_disk=64MiB", KVT_PLAN_CUT_OVERLAP,
          false);
    uint64_t read = 0;
    assert_int_equal(kvt_llama_prefetch(rig.llama, rig.tokens, 160), 10);
    while (read < 10) {
        assert_int_equal(kvt_stats_get(rig.cache, "disk.read_blocks", &read), 0);
        usleep(1000);
    }
    atomic_store(&rig.speed.bytes_per_s, MIB / 2);
    int64_t start = kvt_llama_now_ns();
    long got = restore(&rig);
    double seconds = (double)(kvt_llama_now_ns() - start) * 1e-9;
    atomic_store(&rig.speed.bytes_per_s, 0);
    assert_int_equal(rig.report.plan_reason, KVT_PLAN_LOAD);
    printf("restored %ld of %d tokens after %.3f s, recompute %.3f s\n", got, TOKENS, seconds,
           rig.report.plan_recompute_s);
    assert_true(got >= 160 && got < TOKENS && got % 16 == 0);
    assert_true(seconds < 1.5 * rig.report.plan_recompute_s);
    assert_int_equal(rig.report.late, 1);
    assert_int_equal(help_counter(rig.llama, "llama.restore_late"), 1);
    assert_int_equal(help_counter(rig.llama, "llama.restore_cut_load"), 1);
    assert_restored(&rig, (uint32_t)got, 0);
    close_rig(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_pays_is_loaded_and_what_does_not_is_not),
        cmocka_unit_test(prefills_are_observed),
        cmocka_unit_test(compute_refuses_what_makes_no_sense),
        cmocka_unit_test(both_ends_meet),
        cmocka_unit_test(they_meet_wherever_they_meet),
        cmocka_unit_test(a_late_load_is_cut_off),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
