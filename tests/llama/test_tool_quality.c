/* Goal: `kvtier quality` orders the levels as they are (raw loses nothing, kv8 far less than kv4,
 * kv4 far less than int4), on a tiny random model and on the demo's; its document has the promised
 * fields; weights are dequantised once, whole or not at all; bad input is named before any work;
 * an interrupt leaves nothing. Method: the real binary.
 */
#include <math.h>

#include "tool_help.h"

static void quality(struct outcome *outcome, const char *const words[])
{
    run_tool(outcome, "quality", words);
}

static json_t *parsed(const struct outcome *outcome)
{
    json_t *report = json_loads(outcome->out, 0, NULL);

    if (outcome->status != 0 || report == NULL)
        fail_msg("exit %d, stderr '%s', stdout '%.200s'", outcome->status, outcome->err,
                 outcome->out);
    assert_string_equal(outcome->err, ""); /* no progress in a pipe */
    return report;
}

static json_t *level_of(const json_t *report, const char *name)
{
    json_t *level;
    size_t i;

    json_array_foreach(json_object_get(report, "levels"), i,
                       level) if (strcmp(json_string_value(json_object_get(level, "level")),
                                         name) == 0) return level;
    fail_msg("no level %s", name);
    return NULL;
}

static double kl(const json_t *report, const char *name)
{
    return number(level_of(report, name), "kl_mean", NULL);
}

/* Every promised field, and what holds at any model. */
static void check_report(const json_t *report, size_t levels, double tokens)
{
    json_t *level;
    size_t i;

    assert_true(json_is_string(json_object_get(report, "model")));
    assert_true(json_array_size(json_object_get(report, "texts")) > 0);
    assert_true(number(report, "tokens", NULL) == tokens);
    assert_true(number(report, "window", NULL) >= 0);
    assert_int_equal(json_array_size(json_object_get(report, "levels")), levels);
    json_array_foreach(json_object_get(report, "levels"), i, level)
    {
        assert_true(number(level, "bits_per_element", NULL) > 4);
        assert_true(number(level, "ppl", NULL) >= 1);
        const double mean = number(level, "kl_mean", NULL);
        assert_true(mean >= 0 && isfinite(mean));
        assert_true(number(level, "kl_p99", NULL) >= 0);
        const double top1 = number(level, "top1", NULL);
        assert_true(top1 >= 0 && top1 <= 1);
        const double delta = number(level, "ppl_delta_pct", NULL);
        const double ratio = number(level, "ppl", NULL) / number(report, "ppl_exact", NULL);
        assert_true(fabs(100 * (ratio - 1) - delta) < 1e-6 * (1 + fabs(delta)));
    }
    const json_t *raw = level_of(report, "raw");
    assert_true(number(raw, "kl_mean", NULL) == 0);
    assert_true(number(raw, "kl_p99", NULL) == 0);
    assert_true(number(raw, "top1", NULL) == 1);
    assert_true(number(raw, "ppl_delta_pct", NULL) == 0);
    assert_true(json_is_null(json_object_get(raw, "worst")));
}

static void test_levels_in_order(void **state)
{
    (void)state;
    static struct outcome outcome;

    quality(&outcome, (const char *[]){"--model", model, "--tokens", "512", "--score", "256",
                                       "--threads", "1", "--json", NULL});
    json_t *report = parsed(&outcome);
    check_report(report, 6, 512);
    assert_int_equal(json_array_size(json_object_get(report, "texts")), 3);
    assert_true(kl(report, "kv8") > 0);
    assert_true(kl(report, "kv8") < 0.1 * kl(report, "kv6"));
    assert_true(kl(report, "kv6") < 0.5 * kl(report, "kv5"));
    assert_true(kl(report, "kv5") < 1.01 * kl(report, "kv4"));
    assert_true(kl(report, "kv4") < 0.8 * kl(report, "int4"));
    const json_t *worst = json_object_get(level_of(report, "kv4"), "worst");
    const double layer = number(worst, "layer", NULL), head = number(worst, "head", NULL);
    assert_true(layer >= 0 && layer < tiny_plain.layers);
    assert_true(head >= 0 && head < tiny_plain.kv_heads);
    const double db = number(worst, "sqnr_db", NULL);
    if (!(db > 8 && db < 25))
        fail_msg("worst head at %.1f dB", db);
    json_decref(report);
}

/* The exact window and the coded growth do what their names say. */
static void test_window_and_growth(void **state)
{
    (void)state;
    static struct outcome outcome;
    const char *base[] = {"--model", model,       "--tokens", "512",      "--score",
                          "128",     "--threads", "1",        "--levels", "raw,kv4,kv8",
                          "--json",  NULL,        NULL,       NULL};
    double plain, windowed, covered, coarse;

    quality(&outcome, base);
    json_t *report = parsed(&outcome);
    plain = kl(report, "kv4");
    const double fine = kl(report, "kv8");
    json_decref(report);
    base[11] = "--window";
    base[12] = "256";
    quality(&outcome, base);
    report = parsed(&outcome);
    check_report(report, 3, 512);
    windowed = kl(report, "kv4");
    assert_true(kl(report, "kv8") == fine); /* as good already */
    json_decref(report);
    base[12] = "512";
    quality(&outcome, base);
    report = parsed(&outcome);
    covered = kl(report, "kv4");
    json_decref(report);
    assert_true(windowed < plain);
    assert_true(covered == fine);
    base[11] = "--grow";
    base[12] = "64";
    quality(&outcome, base);
    report = parsed(&outcome);
    check_report(report, 3, 512); /* raw loses nothing on the way */
    coarse = kl(report, "kv4");
    assert_true(coarse > 0 && coarse != plain && coarse < 100 * plain);
    json_decref(report);
}

/* One layer, one head: each hurts, none as much as all of them together, and the worst one named
 * is the worst one. */
static void test_layers_alone(void **state)
{
    (void)state;
    static struct outcome outcome;
    double worst = 0, sum = 0;
    json_t *value;
    size_t i, at = 0;

    quality(&outcome,
            (const char *[]){"--model", model, "--tokens", "256", "--score", "128", "--threads",
                             "1", "--levels", "raw,int4", "--alone", "int4", "--json", NULL});
    json_t *report = parsed(&outcome);
    const json_t *alone = json_object_get(report, "alone");
    assert_string_equal(json_string_value(json_object_get(alone, "level")), "int4");
    const json_t *layers = json_object_get(alone, "layers_kl");
    assert_int_equal(json_array_size(layers), tiny_plain.layers);
    json_array_foreach((json_t *)(uintptr_t)layers, i, value)
    {
        const double one = json_number_value(value);
        assert_true(one > 0 && one < kl(report, "int4"));
        sum += one;
        at = one > worst ? i : at;
        worst = one > worst ? one : worst;
    }
    assert_true(sum > 0.2 * kl(report, "int4") && sum < 5 * kl(report, "int4"));
    assert_int_equal(number(alone, "layer", NULL), at);
    const json_t *heads = json_object_get(alone, "heads_kl");
    assert_int_equal(json_array_size(heads), tiny_plain.kv_heads);
    const size_t head = (size_t)number(alone, "head", NULL);
    json_array_foreach((json_t *)(uintptr_t)heads, i, value)
    {
        assert_true(json_number_value(value) > 0);
        assert_true(json_number_value(value) <= json_number_value(json_array_get(heads, head)));
    }
    json_decref(report);
    quality(&outcome, (const char *[]){"--model", model, "--alone", "raw", NULL});
    assert_int_equal(outcome.status, 2);
    assert_non_null(strstr(outcome.err, "--alone"));
    quality(&outcome, (const char *[]){"--model", model, "--alone", "kv4", "--grow", "64", NULL});
    assert_int_equal(outcome.status, 2);
}

static void test_table_and_advice(void **state)
{
    (void)state;
    static struct outcome outcome;

    quality(&outcome, (const char *[]){"--model", model, "--tokens", "64", "--score", "32",
                                       "--threads", "1", "--levels", "raw,kv8", NULL});
    if (outcome.status != 0 || strstr(outcome.out, "kv8 is safe for this model") == NULL)
        fail_msg("exit %d, '%s' '%s'", outcome.status, outcome.err, outcome.out);
    assert_non_null(strstr(outcome.out, "paradise-lost (shipped)"));
    assert_non_null(strstr(outcome.out, "perplexity of the exact cache"));
}

static void write_text(const char *path, const void *bytes, size_t len)
{
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, len, file), len);
    fclose(file);
}

/* Texts of the user, several of them, by either spelling. */
static void test_own_texts(void **state)
{
    (void)state;
    static struct outcome outcome;
    static char bytes[6000];
    char a[128], b[160];

    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = "the quick brown fox, 0123456789.\n"[i * i % 34 % 33];
    snprintf(a, sizeof(a), "%s/a.txt", work);
    write_text(a, bytes, sizeof(bytes));
    snprintf(b, sizeof(b), "--text=%s", a);
    quality(&outcome,
            (const char *[]){"--model", model, "--tokens", "64", "--score", "32", "--threads", "1",
                             "--levels", "raw,kv4", "--text", a, b, "--json", NULL});
    json_t *report = parsed(&outcome);
    const json_t *texts = json_object_get(report, "texts");
    assert_int_equal(json_array_size(texts), 2);
    assert_string_equal(json_string_value(json_array_get(texts, 1)), a);
    json_decref(report);
    assert_int_equal(unlink(a), 0);
}

static void test_bad_input(void **state)
{
    (void)state;
    static struct outcome outcome;
    char nul[128], high[128], empty[128], brief[128];

    snprintf(nul, sizeof(nul), "%s/nul", work);
    write_text(nul, "some\0text", 9);
    snprintf(high, sizeof(high), "%s/high", work);
    write_text(high, "\xff\xfe text", 7);
    snprintf(empty, sizeof(empty), "%s/empty", work);
    write_text(empty, "", 0);
    snprintf(brief, sizeof(brief), "%s/brief", work);
    write_text(brief, "too short", 9);
    static char bytes[8 << 20];
    char cut[128];
    snprintf(cut, sizeof(cut), "%s/cut.gguf", work);
    FILE *file = fopen(model, "rb");
    assert_non_null(file);
    const size_t len = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    write_text(cut, bytes, len - len / 3);
    const struct {
        int status;
        const char *word;
        const char *argv[8];
    } cases[] = {
        {2, "'kv9' is not a level", {"--levels", "raw,kv9", "--model", model, NULL}},
        {2, "'kv4' is there twice", {"--levels", "kv4,kv8,kv4", "--model", model, NULL}},
        {2, "is not a level", {"--levels", "kv4,", "--model", model, NULL}},
        {2, "multiple of 16", {"--grow", "17", "--model", model, NULL}},
        {2, "did you mean '--tokens'", {"--token", "17", NULL}},
        {2, "--text needs a value", {"--text", NULL}},
        {1, "fetch-model", {"--score", "32", NULL}},
        {1, "not a GGUF", {"--model", "/etc/passwd", NULL}},
        {1, "is truncated", {"--model", cut, NULL}},
        {1, "holds a NUL byte", {"--model", model, "--text", nul, NULL}},
        {1, "is not UTF-8", {"--model", model, "--text", high, NULL}},
        {1, "is empty", {"--model", model, "--text", empty, NULL}},
        {1, "are needed", {"--model", model, "--text", brief, NULL}},
        {1, "cannot read", {"--model", model, "--text", "/nonexistent", NULL}},
        {1, "the model has 2048", {"--model", model, NULL}}, /* a context of 4,609 tokens */
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        quality(&outcome, (const char *const *)cases[i].argv);
        if (outcome.status != cases[i].status || strstr(outcome.err, cases[i].word) == NULL)
            fail_msg("case %zu: exit %d, '%s'", i, outcome.status, outcome.err);
        assert_string_equal(outcome.out, "");
    }
}

/* Names below the cache's folder of dequantised models; the first goes to `name`. */
static int count_copies(char name[512])
{
    char dir[128];
    struct dirent *entry;
    int count = 0;

    snprintf(dir, sizeof(dir), "%s/quality", work);
    DIR *list = opendir(dir);
    if (list == NULL)
        return 0;
    while ((entry = readdir(list)) != NULL)
        if (entry->d_name[0] != '.' && count++ == 0)
            snprintf(name, 512, "%s/%s", dir, entry->d_name);
    closedir(list);
    return count;
}

/* A quantised model is dequantised once; what a killed run left is removed; a damaged copy is made
 * again; --as-is makes none. */
static void test_dequantised_once(void **state)
{
    (void)state;
    static struct outcome outcome;
    struct llama_model_quantize_params params = llama_model_quantize_default_params();
    char small[160], copy[512] = "", stale[200];
    struct stat before, after;

    snprintf(small, sizeof(small), "%s/q8.gguf", work);
    params.nthread = 1;
    params.ftype = LLAMA_FTYPE_MOSTLY_Q8_0;
    assert_int_equal(llama_model_quantize(model, small, &params), 0);
    const char *argv[] = {"--model", small,      "--tokens", "64",     "--score", "32", "--threads",
                          "1",       "--levels", "raw,kv8",  "--json", "--as-is", NULL};
    quality(&outcome, argv);
    json_t *report = parsed(&outcome);
    assert_true(json_is_false(json_object_get(report, "weights_f32")));
    json_decref(report);
    assert_int_equal(count_copies(copy), 0);
    argv[11] = NULL;
    quality(&outcome, argv);
    report = parsed(&outcome);
    check_report(report, 2, 64);
    assert_true(json_is_true(json_object_get(report, "weights_f32")));
    json_decref(report);
    assert_int_equal(count_copies(copy), 1);
    assert_non_null(strstr(copy, "-f32.gguf"));
    assert_int_equal(stat(copy, &before), 0);

    snprintf(stale, sizeof(stale), "%s/quality/x-f32.gguf.2147483646.part", work);
    write_text(stale, "half", 4);
    quality(&outcome, argv);
    json_decref(parsed(&outcome));
    assert_int_equal(count_copies(copy), 1);
    assert_int_equal(stat(copy, &after), 0);
    assert_true(before.st_ino == after.st_ino && before.st_mtim.tv_nsec == after.st_mtim.tv_nsec);

    assert_int_equal(truncate(copy, before.st_size / 2), 0);
    quality(&outcome, argv);
    json_decref(parsed(&outcome));
    assert_int_equal(stat(copy, &after), 0);
    assert_int_equal(before.st_size, after.st_size);
}

/* Signals at different moments: a clean end, and no half copy. */
static void test_interrupt(void **state)
{
    (void)state;
    static struct outcome outcome;
    char out[128], err[128], copy[512];
    const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    int status;

    const int copies = count_copies(copy);
    snprintf(out, sizeof(out), "%s/out", work);
    snprintf(err, sizeof(err), "%s/err", work);
    for (int i = 0; i < 3; i++) {
        const char *argv[] = {"kvtier", "quality",   "--model", model, "--tokens",
                              "1024",   "--threads", "1",       NULL};
        const struct timespec wait = {0, (50 + 200 * i) * 1000000};
        pid_t child = start(argv, out, err);
        nanosleep(&wait, NULL);
        assert_int_equal(kill(child, signals[i]), 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        read_all(err, outcome.err, sizeof(outcome.err));
        if (WIFSIGNALED(status) && i == 0) /* before the handler was set */
            continue;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 1 ||
            strstr(outcome.err, "interrupted; nothing was left behind") == NULL)
            fail_msg("signal %d: status %d, '%s'", signals[i], status, outcome.err);
    }
    assert_int_equal(count_copies(copy), copies);
}

/* The demo's model, a few hundred tokens of one text: what the full run shows, coarsely. */
static void test_real_model(void **state)
{
    (void)state;
    static struct outcome outcome;
    const char *path = getenv("KVT_TEST_MODEL");

    if (path == NULL || access(path, R_OK) != 0)
        skip();
    quality(&outcome,
            (const char *[]){"--model", path, "--tokens", "256", "--score", "64", "--threads", "1",
                             "--levels", "raw,int4,kv4,kv8", "--json", NULL});
    json_t *report = parsed(&outcome);
    check_report(report, 4, 256);
    assert_true(kl(report, "kv8") < 0.02 * kl(report, "kv4"));
    assert_true(kl(report, "kv4") < 0.35 * kl(report, "int4"));
    assert_true(fabs(number(level_of(report, "kv4"), "bits_per_element", NULL) - 4.375) < 0.01);
    json_decref(report);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels_in_order),  cmocka_unit_test(test_window_and_growth),
        cmocka_unit_test(test_layers_alone),     cmocka_unit_test(test_table_and_advice),
        cmocka_unit_test(test_own_texts),        cmocka_unit_test(test_bad_input),
        cmocka_unit_test(test_dequantised_once), cmocka_unit_test(test_interrupt),
        cmocka_unit_test(test_real_model),
    };
    llama_backend_init();
    return cmocka_run_group_tests(tests, setup, teardown);
}
