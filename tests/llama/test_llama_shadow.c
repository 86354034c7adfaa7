/* Goal: with shadow mode set from outside, a program over llama.cpp computes every prompt as if
 * there were no cache, bit for bit, and the statistics say what it would have saved; what a save
 * asks for is no prompt: neither counted nor recorded. Afterwards, without shadow mode, what was
 * stored meanwhile is there. Method: a tiny random model in the real llama.cpp; options by the
 * environment, as whoever runs a program would set them; the trace that is recorded beside it.
 */
#include "llama_help.h"

#define N 210
#define BLOCKS 13
#define TOKENS 208

struct rig {
    struct llama_model *model;
    struct llama_context_params params;
    struct llama_context *ctx;
    struct kvt_cache *cache;
    struct kvt_llama *llama;
    char model_path[64], dir[40];
    int32_t tokens[N];
    float exact[HELP_VOCAB];
};

static void open_cache(struct rig *rig, const char *config)
{
    struct kvt_llama_opts opts;
    char error[512] = "";
    assert_int_equal(setenv("KVTIER_CONFIG", config, 1), 0);
    rig->cache = help_cache(rig->dir);
    assert_int_equal(unsetenv("KVTIER_CONFIG"), 0);
    kvt_llama_opts_init(&opts);
    opts.context_params = &rig->params;
    opts.model_path = rig->model_path;
    opts.level = KVT_LEVEL_RAW;
    int rc = kvt_llama_new(rig->cache, rig->ctx, &opts, &rig->llama, error, sizeof(error));
    if (rc != 0)
        fail_msg("kvt_llama_new: %d %s", rc, error);
}

static void close_cache(struct rig *rig)
{
    kvt_llama_free(rig->llama);
    kvt_close(rig->cache);
}

static uint64_t counter(const struct rig *rig, const char *name)
{
    uint64_t value = 0;
    assert_int_equal(kvt_stats_get(rig->cache, name, &value), 0);
    return value;
}

/* The prompt as a program takes it: restore, compute the rest, save. Returns tokens restored. */
static long turn(struct rig *rig, float logits[HELP_VOCAB])
{
    struct kvt_llama_report report = {.struct_size = sizeof(report)};
    llama_memory_clear(llama_get_memory(rig->ctx), true);
    long got = kvt_llama_restore(rig->llama, 0, rig->tokens, N, &report);
    assert_true(got >= 0);
    if (got == 0)
        help_prefill(rig->ctx, 0, rig->tokens, N);
    else
        help_decode(rig->ctx, 0, rig->tokens, (size_t)got, N);
    help_logits(rig->ctx, logits);
    assert_true(kvt_llama_save(rig->llama, 0, rig->tokens, N) >= 0);
    assert_int_equal(kvt_llama_sync(rig->llama), 0);
    return got;
}

static void shadow_changes_nothing_and_counts(void **state)
{
    (void)state;
    struct rig rig;
    float logits[HELP_VOCAB];
    char config[256], trace[128], line[1024];
    memset(&rig, 0, sizeof(rig));
    rig.model = tiny_model(&tiny_plain);
    rig.params = help_params();
    rig.ctx = llama_init_from_model(rig.model, rig.params);
    assert_non_null(rig.ctx);
    help_file(rig.model_path, "weights");
    snprintf(rig.dir, sizeof(rig.dir), "/var/tmp/kvt-test-llama-XXXXXX");
    assert_non_null(mkdtemp(rig.dir));
    help_tokens(3, rig.tokens, N);
    help_prefill(rig.ctx, 0, rig.tokens, N);
    help_logits(rig.ctx, rig.exact);
    snprintf(trace, sizeof(trace), "%s.trace", rig.dir);
    snprintf(config, sizeof(config), "shadow=yes,plan=on,plan_prefill=500,trace=%s", trace);
    open_cache(&rig, config);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(turn(&rig, logits), 0);
        assert_memory_equal(logits, rig.exact, sizeof(logits));
        usleep(1100000); /* another request, not the same one asked for again */
    }
    assert_int_equal(counter(&rig, "shadow.prompts"), 3);
    assert_int_equal(counter(&rig, "shadow.hits"), 2);
    assert_int_equal(counter(&rig, "shadow.tokens"), 2 * TOKENS);
    assert_true(counter(&rig, "shadow.saved_ttft_us") > 0);
    assert_true(counter(&rig, "shadow.saved_ttft_us") < counter(&rig, "shadow.prefill_us"));
    assert_int_equal(counter(&rig, "load.granted_dram") + counter(&rig, "load.granted_disk"), 0);
    assert_int_equal(counter(&rig, "trace.written"), 3);
    print_message("           %.1f s of %.1f s would have been saved\n",
                  (double)counter(&rig, "shadow.saved_ttft_us") * 1e-6,
                  (double)counter(&rig, "shadow.prefill_us") * 1e-6);
    close_cache(&rig);
    FILE *file = fopen(trace, "r");
    int lines = 0;
    assert_non_null(file);
    while (fgets(line, sizeof(line), file) != NULL) {
        lines++;
        assert_non_null(strstr(line, "\"input_length\": 210,"));
    }
    assert_int_equal(fclose(file), 0);
    assert_int_equal(lines, 3);
    open_cache(&rig, "shadow=no");
    assert_int_equal(turn(&rig, logits), TOKENS);
    assert_int_equal(counter(&rig, "shadow.prompts"), 0);
    close_cache(&rig);
    unlink(trace);
    help_remove(rig.dir);
    llama_free(rig.ctx);
    llama_model_free(rig.model);
    unlink(rig.model_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shadow_changes_nothing_and_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
