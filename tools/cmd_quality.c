/* kvtier quality: what each level does to a model's predictions.
 *
 *   text -> tokens [0, context) computed exactly -> state -> codec and back -> context restored
 *        -> the next `score` tokens computed over it, teacher-forced, against the exact cache
 *
 * This is what a returning session sees: its context was computed exactly, stored coded, restored,
 * and goes on. With --grow N the context itself is computed over coded cache, N tokens at a time.
 * Nothing is left behind but the dequantised model. Threads: those of llama.cpp.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "quality.h"

#define COMMAND "quality"

int kvt_cmd_quality(int argc, char **argv);

struct run {
    const struct quality_config *config;
    struct demo_engine engine;
    struct kvt_cache *cache; /* the adapter wants one; nothing is stored */
    struct kvt_llama *llama;
    struct quality_level levels[QUALITY_LEVELS_MAX];
    struct quality_exact exact;
    struct quality_alone alone;
    const struct quality_text *text; /* the one at hand */
    double exact_nll;
    int32_t vocab;
};

static void clear(struct run *run, size_t from)
{
    llama_memory_seq_rm(llama_get_memory(run->engine.ctx), 0, (llama_pos)from, -1);
}

/* The state of sequence 0, which holds `cells` tokens, in position order. 0 or -1 (said). */
static int take_state(struct run *run, uint32_t cells, uint8_t *blob)
{
    const struct kvt_blob_shape *shape = &run->llama->shape;
    const size_t bytes = kvt_blob_bytes(shape, cells);
    uint32_t *order = calloc(cells, sizeof(*order));
    const char *why = "out of memory";
    int sorted = 0, rc = -1;

    if (order != NULL) {
        const size_t got = llama_state_seq_get_data(run->engine.ctx, blob, bytes, 0);
        rc = kvt_blob_parse(shape, 0, 0, cells, blob, got, order, &sorted, &why);
        if (rc == 0 && !sorted) {
            why = "its cells are not in the order of positions";
            rc = -1;
        }
    }
    free(order);
    if (rc != 0)
        kvt_cli_error(COMMAND, "the state of the context cannot be used: %s", why);
    return rc == 0 ? 0 : -1;
}

static int give_state(struct run *run, uint32_t cells, const uint8_t *blob)
{
    const size_t bytes = kvt_blob_bytes(&run->llama->shape, cells);

    clear(run, 0);
    if (llama_state_seq_set_data(run->engine.ctx, blob, bytes, 0) == bytes)
        return 0;
    kvt_cli_error(COMMAND, "llama.cpp did not take the coded state");
    return -1;
}

/* Score the tokens behind the context: level NULL: they become the exact ones. */
static int score(struct run *run, const struct quality_text *text, struct quality_level *level,
                 const char *what)
{
    const size_t from = (size_t)run->config->tokens, rows = (size_t)run->config->score;

    for (size_t at = 0; at < rows; at += DEMO_BATCH_TOKENS) {
        const size_t n = rows - at < DEMO_BATCH_TOKENS ? rows - at : DEMO_BATCH_TOKENS;
        if (demo_decode(&run->engine, text->tokens, from + at, from + at + n, 1, what) != 0)
            return -1;
        for (size_t i = 0; i < n; i++) {
            const float *logits = llama_get_logits_ith(run->engine.ctx, (int32_t)i);
            const int32_t next = text->tokens[from + at + i + 1];
            if (level == NULL)
                quality_exact_add(&run->exact, at + i, logits, run->vocab, next);
            else
                quality_compare(level, &run->exact, at + i, logits, run->vocab, next);
        }
    }
    clear(run, from);
    return 0;
}

static int code(struct run *run, struct quality_level *level, uint8_t *blob, size_t from, size_t to)
{
    const struct quality_config *config = run->config;

    int rc =
        quality_code(run->llama, level, blob, (uint32_t)to, from / QUALITY_BLOCK_TOKENS,
                     to / QUALITY_BLOCK_TOKENS, (size_t)config->tokens, (size_t)config->window);
    if (rc != 0)
        kvt_cli_error(COMMAND, "%s: %s", kvt_level_name(level->level), kvt_strerror(rc));
    return rc == 0 ? 0 : -1;
}

/* The context computed over coded cache, `grow` tokens at a time; blob is scratch. */
static int grow_context(struct run *run, const struct quality_text *text,
                        struct quality_level *level, uint8_t *blob, const char *what)
{
    const size_t end = (size_t)run->config->tokens, step = (size_t)run->config->grow;

    clear(run, 0);
    for (size_t at = 0; at < end; at += step) {
        const size_t to = at + step < end ? at + step : end;
        if (demo_decode(&run->engine, text->tokens, at, to, 0, what) != 0 ||
            take_state(run, (uint32_t)to, blob) != 0 || code(run, level, blob, at, to) != 0 ||
            give_state(run, (uint32_t)to, blob) != 0)
            return -1;
    }
    return 0;
}

/* One level over one text, whose exact state is `exact`; blob is scratch of the same size. */
static int measure_level(struct run *run, const struct quality_text *text,
                         struct quality_level *level, const uint8_t *exact, uint8_t *blob,
                         const char *where)
{
    const uint32_t cells = (uint32_t)run->config->tokens;
    char what[160];
    int rc;

    snprintf(what, sizeof(what), "%s, %s", where, kvt_level_name(level->level));
    if (run->config->grow > 0) {
        rc = grow_context(run, text, level, blob, what);
    } else {
        memcpy(blob, exact, kvt_blob_bytes(&run->llama->shape, cells));
        rc = code(run, level, blob, 0, cells);
        if (rc == 0)
            rc = give_state(run, cells, blob);
    }
    return rc == 0 ? score(run, text, level, what) : -1;
}

static int score_state(void *ctx, struct quality_level *level, const uint8_t *blob,
                       const char *what)
{
    struct run *run = ctx;

    if (give_state(run, (uint32_t)run->config->tokens, blob) != 0)
        return -1;
    return score(run, run->text, level, what);
}

/* Layers and heads alone; `blob` is scratch, of the size of `exact`. */
static int measure_alone(struct run *run, const uint8_t *exact, uint8_t *blob, const char *where,
                         bool last)
{
    const uint32_t cells = (uint32_t)run->config->tokens;
    const size_t bytes = kvt_blob_bytes(&run->llama->shape, cells);
    const struct quality_scorer scorer = {score_state, run, where};
    struct quality_level whole = {.level = run->config->alone};
    uint8_t *coded = malloc(bytes);
    size_t heads = 0;
    int rc = -1;

    for (uint32_t p = 0; p < 2 * run->llama->shape.layers; p += 2)
        heads += run->llama->parts[p].heads;
    whole.head_signal = calloc(heads + 1, sizeof(*whole.head_signal));
    whole.head_noise = calloc(heads + 1, sizeof(*whole.head_noise));
    if (coded == NULL || whole.head_signal == NULL || whole.head_noise == NULL) {
        kvt_cli_error(COMMAND, "out of memory");
        goto out;
    }
    memcpy(coded, exact, bytes);
    if (code(run, &whole, coded, 0, cells) == 0)
        rc = quality_alone_text(&run->alone, run->llama, &scorer, exact, coded, blob, cells, last);
out:
    free(coded);
    free(whole.head_signal);
    free(whole.head_noise);
    return rc;
}

/* The exact context in the batches that --grow takes, so that a raw control is exact there too. */
static int compute_exact(struct run *run, const struct quality_text *text, const char *what)
{
    const size_t end = (size_t)run->config->tokens;
    const size_t step = run->config->grow > 0 ? (size_t)run->config->grow : end;

    clear(run, 0);
    for (size_t at = 0; at < end; at += step)
        if (demo_decode(&run->engine, text->tokens, at, at + step < end ? at + step : end, 0,
                        what) != 0)
            return -1;
    return 0;
}

static int measure_text(struct run *run, const struct quality_text *text, size_t index, size_t of)
{
    const size_t bytes = kvt_blob_bytes(&run->llama->shape, (uint32_t)run->config->tokens);
    uint8_t *exact = malloc(bytes), *blob = malloc(bytes);
    char where[64], what[80];
    int rc = -1;

    snprintf(where, sizeof(where), "text %zu of %zu", index + 1, of);
    snprintf(what, sizeof(what), "%s, exact", where);
    if (exact == NULL || blob == NULL) {
        kvt_cli_error(COMMAND, "out of memory");
        goto out;
    }
    if (compute_exact(run, text, what) != 0 ||
        take_state(run, (uint32_t)run->config->tokens, exact) != 0 ||
        score(run, text, NULL, what) != 0)
        goto out;
    run->exact_nll = run->exact.nll; /* of all texts so far */
    rc = 0;
    for (size_t i = 0; rc == 0 && i < run->config->level_count; i++)
        rc = measure_level(run, text, &run->levels[i], exact, blob, where);
    run->text = text;
    if (rc == 0 && run->config->alone)
        rc = measure_alone(run, exact, blob, where, index + 1 == of);
out:
    free(exact);
    free(blob);
    return rc;
}

/* ---- the run ------------------------------------------------------------------------------- */

static int open_levels(struct run *run, size_t texts)
{
    size_t heads = 0;

    for (uint32_t p = 0; p < 2 * run->llama->shape.layers; p += 2)
        heads += run->llama->parts[p].heads;
    for (size_t i = 0; i < run->config->level_count; i++) {
        struct quality_level *level = &run->levels[i];
        level->level = run->config->levels[i];
        level->kl = calloc(texts * (size_t)run->config->score, sizeof(*level->kl));
        level->head_signal = calloc(heads + 1, sizeof(*level->head_signal));
        level->head_noise = calloc(heads + 1, sizeof(*level->head_noise));
        if (level->kl == NULL || level->head_signal == NULL || level->head_noise == NULL)
            return -1;
    }
    if (run->config->alone && quality_alone_new(&run->alone, run->config->alone, run->llama,
                                                (size_t)run->config->score) != 0)
        return -1;
    run->vocab = llama_vocab_n_tokens(run->engine.vocab);
    return quality_exact_new(&run->exact, (size_t)run->config->score, run->vocab);
}

/* The adapter refuses what cannot be stored, with the reason, and knows the shape of the cache. */
static int open_adapter(struct run *run, const char *model, const struct demo_paths *paths)
{
    struct kvt_config *config = NULL;
    struct kvt_llama_opts opts;
    char error[512] = "";

    int rc = kvt_config_new(&config);
    if (rc == 0)
        rc = kvt_config_set(config, "env", "no");
    if (rc == 0)
        rc = kvt_config_set(config, "dram", "1GiB"); /* touched as it fills: never */
    if (rc == 0)
        rc = kvt_open(config, &run->cache, error, sizeof(error));
    kvt_config_free(config);
    if (rc == 0) {
        kvt_llama_opts_init(&opts);
        opts.context_params = &run->engine.params;
        opts.model_path = model;
        opts.digest_dir = paths->digests;
        opts.block_tokens = QUALITY_BLOCK_TOKENS;
        rc = kvt_llama_new(run->cache, run->engine.ctx, &opts, &run->llama, error, sizeof(error));
    }
    if (rc != 0 && !kvt_cli_interrupted())
        kvt_cli_error(COMMAND, "this model cannot be measured: %s", error);
    return rc == 0 ? 0 : -1;
}

static void close_run(struct run *run)
{
    for (size_t i = 0; i < QUALITY_LEVELS_MAX; i++) {
        free(run->levels[i].kl);
        free(run->levels[i].head_signal);
        free(run->levels[i].head_noise);
    }
    quality_exact_free(&run->exact);
    quality_alone_free(&run->alone);
    kvt_llama_free(run->llama);
    kvt_close(run->cache);
    demo_engine_close(&run->engine);
}

/* Returns the report, or NULL (said, or interrupted). */
static json_t *measure(struct run *run, const char *model, const struct demo_paths *paths)
{
    struct quality_text texts[QUALITY_TEXTS_MAX] = {{NULL, NULL, 0}};
    json_t *names = json_array(), *report = NULL;
    size_t count = 0, done = 0;

    if (demo_engine_open(&run->engine, COMMAND, model) != 0 ||
        (count = quality_read_texts(run->config, &run->engine, texts)) == 0 ||
        demo_engine_context(&run->engine, run->config->threads,
                            (uint32_t)((quality_wanted(run->config) + 255) / 256 * 256)) != 0 ||
        open_adapter(run, model, paths) != 0)
        goto out;
    if (open_levels(run, count) != 0) {
        kvt_cli_error(COMMAND, "out of memory");
        goto out;
    }
    while (done < count && measure_text(run, &texts[done], done, count) == 0) {
        json_array_append_new(names, json_string(texts[done].name));
        done++;
    }
    if (done == count)
        report =
            quality_report(run->config, run->llama, run->levels, run->exact_nll, names,
                           run->config->alone ? quality_alone_json(&run->alone, run->llama) : NULL);
out:
    for (size_t i = 0; i < QUALITY_TEXTS_MAX; i++)
        free(texts[i].tokens);
    json_decref(names);
    return report;
}

/* ---- the command line ---------------------------------------------------------------------- */

/* "kv4,kv8"; NULL: all. */
static int parse_levels(const char *list, struct quality_config *config)
{
    static const int all[] = {KVT_LEVEL_RAW, KVT_LEVEL_INT4, KVT_LEVEL_KV4,
                              KVT_LEVEL_KV5, KVT_LEVEL_KV6,  KVT_LEVEL_KV8};
    char name[16];

    if (list == NULL) {
        memcpy(config->levels, all, sizeof(all));
        config->level_count = sizeof(all) / sizeof(all[0]);
        return 0;
    }
    for (const char *at = list;; at++) {
        const size_t len = strcspn(at, ",");
        snprintf(name, sizeof(name), "%.*s", (int)(len < 15 ? len : 15), at);
        const int level = kvt_level_parse(name);
        if (level <= 0 || !kvt_level_supported(level)) {
            kvt_cli_error(COMMAND,
                          "--levels: '%s' is not a level; some of raw,int4,kv4,kv5,kv6,"
                          "kv8, separated by commas",
                          name);
            return -1;
        }
        for (size_t i = 0; i < config->level_count; i++)
            if (config->levels[i] == level) {
                kvt_cli_error(COMMAND, "--levels: '%s' is there twice", name);
                return -1;
            }
        config->levels[config->level_count++] = level;
        at += len;
        if (*at == '\0')
            return 0;
    }
}

static int parse_alone(const char *name, struct quality_config *config)
{
    const int level = name != NULL ? kvt_level_parse(name) : 0;

    if (name == NULL)
        return 0;
    if (level <= 0 || level == KVT_LEVEL_RAW || !kvt_level_supported(level)) {
        kvt_cli_error(COMMAND, "--alone: '%s' is not one of int4, kv4, kv5, kv6, kv8", name);
        return -1;
    }
    if (config->grow > 0) {
        kvt_cli_error(COMMAND,
                      "--alone codes a context that was computed exactly: not with --grow");
        return -1;
    }
    config->alone = level;
    return 0;
}

/* --text may be given many times: each becomes a plain word. Returns the new argc. */
static int flatten_texts(int argc, char **argv)
{
    int n = 1;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--text") == 0 && i + 1 < argc)
            argv[n++] = argv[++i];
        else if (strncmp(argv[i], "--text=", 7) == 0)
            argv[n++] = argv[i] + 7;
        else
            argv[n++] = argv[i];
    }
    return n;
}

static int check_config(struct quality_config *config, const struct demo_paths *paths, int have)
{
    config->tokens -= config->tokens % QUALITY_BLOCK_TOKENS;
    if (config->grow % QUALITY_BLOCK_TOKENS != 0) {
        kvt_cli_error(COMMAND, "--grow must be a multiple of %d", QUALITY_BLOCK_TOKENS);
        return KVT_EXIT_USAGE;
    }
    if (config->model == NULL) {
        config->model = paths->model;
        if (!have || access(paths->model, R_OK) != 0) {
            kvt_cli_error(COMMAND,
                          "there is no model at %s; scripts/fetch-model.sh downloads it, or give "
                          "one with --model",
                          have ? paths->model : "(no HOME)");
            return KVT_EXIT_PROBLEM;
        }
    }
    if (!have && !config->as_is) {
        kvt_cli_error(COMMAND, "no HOME to keep dequantised weights in: set KVTIER_CACHE_DIR");
        return KVT_EXIT_PROBLEM;
    }
    return KVT_EXIT_OK;
}

static int run_quality(const struct quality_config *config, const struct demo_paths *paths,
                       int as_json)
{
    struct run *run = calloc(1, sizeof(*run));
    char model[PATH_MAX];
    json_t *report = NULL;
    int rc = KVT_EXIT_PROBLEM;

    kvt_cli_catch_interrupt();
    llama_log_set(demo_quiet, NULL);
    if (run == NULL)
        return rc;
    run->config = config;
    if (quality_model(config, paths, model) == 0)
        report = measure(run, model, paths);
    if (report != NULL && as_json) {
        rc = kvt_cli_json(json_incref(report));
    } else if (report != NULL) {
        quality_print(report);
        rc = KVT_EXIT_OK;
    } else if (kvt_cli_interrupted()) {
        kvt_cli_error(COMMAND, "interrupted; nothing was left behind");
    }
    json_decref(report);
    close_run(run);
    free(run);
    return rc;
}

int kvt_cmd_quality(int argc, char **argv)
{
    static struct demo_paths paths;
    struct quality_config config = {
        .tokens = 4096, .score = 512, .threads = demo_default_threads()};
    const char *levels = NULL, *text = NULL, *alone = NULL;
    int as_json = 0;
    const struct kvt_cli_option options[] = {
        {.name = "model",
         .metavar = "FILE",
         .text = &config.model,
         .help = "GGUF file (default: the downloaded SmolLM2)"},
        {.name = "text",
         .metavar = "FILE",
         .text = &text,
         .help = "text to score, any number of them (default: the shipped ones)"},
        {.name = "tokens",
         .metavar = "N",
         .number = &config.tokens,
         .min = 32,
         .max = 1 << 20,
         .help = "context that is coded, all but its first block (default 4096)"},
        {.name = "score",
         .metavar = "N",
         .number = &config.score,
         .min = 1,
         .max = 8192,
         .help = "tokens behind it that are scored (default 512)"},
        {.name = "window",
         .metavar = "N",
         .number = &config.window,
         .min = 0,
         .max = 1 << 20,
         .help = "most recent tokens of the context coded at kv8 (default 0)"},
        {.name = "levels",
         .metavar = "LIST",
         .text = &levels,
         .help = "default raw,int4,kv4,kv5,kv6,kv8"},
        {.name = "grow",
         .metavar = "N",
         .number = &config.grow,
         .min = 0,
         .max = 1 << 20,
         .help = "code after every N tokens of the context, before the next are computed "
                 "(default 0: when all is computed)"},
        {.name = "alone",
         .metavar = "LEVEL",
         .text = &alone,
         .help =
             "also score with one layer coded at LEVEL and all others exact, each in turn, then "
             "with the keys of one head of the worst layer"},
        {.name = "as-is",
         .flag = &config.as_is,
         .help = "keep quantised weights: quicker, and blind to small differences"},
        {.name = "threads",
         .metavar = "N",
         .number = &config.threads,
         .min = 1,
         .max = 512,
         .help = "threads of llama.cpp (default: the processors, at most 8)"},
        {.name = "json", .flag = &as_json, .help = "one JSON document instead of the table"},
    };

    argc = flatten_texts(argc, argv);
    int rc = kvt_cli_parse(COMMAND, "[OPTION...] [--text FILE]...", options,
                           sizeof(options) / sizeof(options[0]), config.texts, 0, QUALITY_TEXTS_MAX,
                           &config.text_count, argc, argv);
    if (rc != 0)
        return rc == 1 ? KVT_EXIT_OK : KVT_EXIT_USAGE;
    if (parse_levels(levels, &config) != 0 || parse_alone(alone, &config) != 0)
        return KVT_EXIT_USAGE;
    const int have = demo_cache_paths(&paths) == 0;
    rc = check_config(&config, &paths, have);
    return rc == KVT_EXIT_OK ? run_quality(&config, &paths, as_json) : rc;
}
