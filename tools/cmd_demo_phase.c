/* kvtier demo: the work of one process.
 *
 *   first:    cold (whole prompt computed) -> save -> same prompt from DRAM -> other questions
 *   restart:  a new process on the same directory: everything comes from disk
 *   prefetch: another one, in which reading begins while the prompt is tokenised
 *
 * Cold and restored prompts are computed in the same batches (the blocks that can be restored, then
 * the rest), and the quality text too, so that with --level raw the logits are the same bit for
 * bit. TTFT is from having the tokens to the first sampled token. Threads: llama.cpp's and the
 * cache's.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"
#include "demo.h"

#define COLD_AGAIN_NS 20000000000 /* the other questions are measured cold when one takes less */
#define WARM_NS_MAX 10000000000   /* a drive that needs longer is measured as it is */
#define DRAM_SAMPLES 3            /* odd: the median is one of them */
#define DRAM_MIN (64ull << 20)
#define FNV_START 0xcbf29ce484222325u
#define FNV_PRIME 0x100000001b3u

enum phase { PHASE_FIRST, PHASE_RESTART, PHASE_PREFETCH };
static const char *const phase_names[] = {"first", "restart", "prefetch"};

struct run {
    struct demo_config config;
    struct demo_engine engine;
    struct demo_prompt prompt;
    struct kvt_cache *cache;
    struct kvt_llama *llama;
    int32_t expect[DEMO_FORCED_TOKENS]; /* the exact cache's choices */
    char expect_logits[17];             /* digest of its logits, hex */
};

static double ms(int64_t ns)
{
    return (double)ns / 1e6;
}

static void clear_context(struct run *run)
{
    llama_memory_clear(llama_get_memory(run->engine.ctx), false);
}

/* Generate an answer; the first token has been computed. The sequence is cut back to `count`. */
static char *answer(struct run *run, size_t count, int32_t first)
{
    int32_t tokens[DEMO_ANSWER_TOKENS];
    int32_t *all = calloc(count + DEMO_ANSWER_TOKENS, sizeof(*all));
    size_t n = 0;

    if (all == NULL)
        return NULL;
    for (int32_t token = first; n < DEMO_ANSWER_TOKENS;) {
        if (llama_vocab_is_eog(run->engine.vocab, token))
            break;
        tokens[n] = token;
        all[count + n] = token;
        n++;
        if (n == DEMO_ANSWER_TOKENS ||
            demo_decode(&run->engine, all, count + n - 1, count + n, 0, NULL) != 0)
            break;
        token = demo_argmax(&run->engine, -1);
    }
    free(all);
    llama_memory_seq_rm(llama_get_memory(run->engine.ctx), 0, (llama_pos)count, -1);
    return kvt_cli_interrupted() ? NULL : demo_detokenize(&run->engine, tokens, n);
}

/* The quality text over what sequence 0 holds (count tokens): the choice at every position, and a
 * digest of all logits. The sequence is cut back. */
static int forced(struct run *run, size_t count, int32_t choices[DEMO_FORCED_TOKENS],
                  char digest[17])
{
    const int32_t vocab = llama_vocab_n_tokens(run->engine.vocab);
    int32_t *all = calloc(count + DEMO_FORCED_TOKENS, sizeof(*all));
    uint64_t hash = FNV_START;

    if (all == NULL)
        return -1;
    memcpy(all + count, run->prompt.forced, DEMO_FORCED_TOKENS * sizeof(*all));
    int rc = demo_decode(&run->engine, all, count, count + DEMO_FORCED_TOKENS, 1, NULL);
    free(all);
    for (int32_t i = 0; rc == 0 && i < DEMO_FORCED_TOKENS; i++) {
        const float *logits = llama_get_logits_ith(run->engine.ctx, i);
        choices[i] = demo_argmax(&run->engine, i);
        for (int32_t t = 0; t < vocab; t++) {
            uint32_t bits;
            memcpy(&bits, &logits[t], sizeof(bits));
            hash = (hash ^ bits) * FNV_PRIME;
        }
    }
    snprintf(digest, 17, "%016" PRIx64, hash);
    llama_memory_seq_rm(llama_get_memory(run->engine.ctx), 0, (llama_pos)count, -1);
    return rc;
}

static double agreement(const struct run *run, const int32_t choices[DEMO_FORCED_TOKENS])
{
    int same = 0;

    for (int i = 0; i < DEMO_FORCED_TOKENS; i++)
        same += choices[i] == run->expect[i];
    return (double)same / DEMO_FORCED_TOKENS;
}

/* One question with nothing remembered, in two batches that meet at `split`. NULL when interrupted.
 */
static json_t *ask_cold(struct run *run, const struct demo_question *question, size_t split)
{
    clear_context(run);
    const int64_t start = demo_now_ns();
    if (demo_decode(&run->engine, question->tokens, 0, split, 0, "cold: reading the document") !=
            0 ||
        demo_decode(&run->engine, question->tokens, split, question->count, 0, NULL) != 0)
        return NULL;
    const int32_t first = demo_argmax(&run->engine, -1);
    const int64_t ttft = demo_now_ns() - start;
    char *text = answer(run, question->count, first);
    if (text == NULL)
        return NULL;
    json_t *result = json_pack("{s:f, s:i, s:I, s:s}", "ttft_ms", ms(ttft), "loaded_tokens", 0,
                               "computed_tokens", (json_int_t)question->count, "answer", text);
    free(text);
    return result;
}

/* One restore of a question's prompt, up to its first token. */
struct sample {
    struct kvt_llama_report report;
    int64_t ttft_ns;
    long loaded;
    int32_t first;
};

static int take_sample(struct run *run, const struct demo_question *question, struct sample *sample)
{
    sample->report = (struct kvt_llama_report){.struct_size = sizeof(sample->report)};
    clear_context(run);
    const int64_t start = demo_now_ns();
    sample->loaded =
        kvt_llama_restore(run->llama, 0, question->tokens, question->count, &sample->report);
    if (sample->loaded < 0) {
        kvt_cli_error("demo", "restore: %s", kvt_llama_error(run->llama));
        return -1;
    }
    if (demo_decode(&run->engine, question->tokens, (size_t)sample->loaded, question->count, 0,
                    NULL) != 0)
        return -1;
    sample->first = demo_argmax(&run->engine, -1);
    sample->ttft_ns = demo_now_ns() - start;
    return 0;
}

static int faster(const void *a, const void *b)
{
    const int64_t x = ((const struct sample *)a)->ttft_ns, y = ((const struct sample *)b)->ttft_ns;

    return (x > y) - (x < y);
}

/* One question with what the store has; the median of `samples` (from disk only the first is from
 * disk, so there is one). NULL when interrupted or refused (said). */
static json_t *ask_restored(struct run *run, const struct demo_question *question, int samples)
{
    struct sample taken[DRAM_SAMPLES] = {0};

    for (int i = 0; i < samples; i++)
        if (take_sample(run, question, &taken[i]) != 0)
            return NULL;
    qsort(taken, (size_t)samples, sizeof(taken[0]), faster);
    const struct sample *sample = &taken[samples / 2];
    const struct kvt_llama_report *report = &sample->report;
    const int64_t moved = report->lookup_ns + report->load_ns + report->set_state_ns;
    char *text = answer(run, question->count, sample->first);
    if (text == NULL)
        return NULL;
    json_t *result = json_pack(
        "{s:f, s:i, s:I, s:I, s:s, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f}", "ttft_ms",
        ms(sample->ttft_ns), "samples", samples, "loaded_tokens", (json_int_t)sample->loaded,
        "computed_tokens", (json_int_t)(question->count - (size_t)sample->loaded), "answer", text,
        "blocks_dram", (json_int_t)report->blocks_dram, "blocks_disk",
        (json_int_t)report->blocks_disk, "blocks_remote", (json_int_t)report->blocks_remote,
        "bytes_moved", (json_int_t)report->bytes_moved, "lookup_ms", ms(report->lookup_ns),
        "load_ms", ms(report->load_ns), "set_state_ms", ms(report->set_state_ns), "compute_ms",
        ms(sample->ttft_ns - moved));
    free(text);
    return result;
}

/* Restored answer and quality of the first question; the sequence holds its prompt afterwards. */
static json_t *ask_first_restored(struct run *run, int samples, double *agree, char digest[17])
{
    int32_t choices[DEMO_FORCED_TOKENS];

    json_t *result = ask_restored(run, &run->prompt.questions[0], samples);
    if (result == NULL || forced(run, run->prompt.questions[0].count, choices, digest) != 0) {
        json_decref(result);
        return NULL;
    }
    *agree = agreement(run, choices);
    return result;
}

static void see_enabled(void *arg, const char *name, uint64_t value, const char *text,
                        const char *help)
{
    (void)value;
    (void)help;
    if (strcmp(name, "config.enabled") == 0 && text != NULL && strcmp(text, "no") == 0)
        *(int *)arg = 1;
}

/* We never switch the cache off: then the environment did. */
static int check_enabled(struct kvt_cache *cache)
{
    int off = 0;

    if (kvt_stats_each(cache, see_enabled, &off) != 0 || !off)
        return 0;
    kvt_cli_error("demo", "the cache is switched off (KVTIER_CONFIG says enabled=no), so nothing "
                          "would be remembered: unset KVTIER_CONFIG");
    return -1;
}

static int open_cache(struct run *run)
{
    struct kvt_config *config = NULL;
    struct kvt_llama_opts opts;
    char error[512], value[4200];
    const struct llama_model *model = run->engine.model;
    const uint64_t heads =
        (uint64_t)(llama_model_n_head(model) > 0 ? llama_model_n_head(model) : 1);
    const uint64_t token_bytes = 2 * 4 * (uint64_t)llama_model_n_layer(model) *
                                 (uint64_t)llama_model_n_head_kv(model) *
                                 (uint64_t)llama_model_n_embd(model) / heads;
    /* room for the whole context even if every block ended up raw */
    const uint64_t dram = DRAM_MIN + llama_n_ctx(run->engine.ctx) * token_bytes;

    int rc = kvt_config_new(&config);
    if (rc != 0)
        return -1;
    if (run->config.socket != NULL) {
        snprintf(value, sizeof(value), "unix:%s", run->config.socket);
        rc = kvt_config_set(config, "store", value);
    } else if (run->config.remote != NULL) {
        snprintf(value, sizeof(value), "%" PRIu64 "MiB", dram >> 20);
        rc = kvt_config_set(config, "dram", value);
        if (rc == 0)
            rc = kvt_config_set(config, "remote", run->config.remote);
        if (rc == 0) /* the other process is to find all of it, however slow the network is */
            rc = kvt_config_set(config, "remote_write", "all");
        if (rc == 0)
            rc = kvt_config_set(config, "remote_deadline", "10s");
    } else {
        snprintf(value, sizeof(value), "%" PRIu64 "MiB", dram >> 20);
        rc = kvt_config_set(config, "dram", value);
        snprintf(value, sizeof(value), "%s:%" PRIu64 "MiB", run->config.dir, (4 * dram) >> 20);
        if (rc == 0)
            rc = kvt_config_set(config, "disk", value);
        if (rc == 0) /* without its directory there is nothing to show */
            rc = kvt_config_set(config, "disk_required", "yes");
    }
    if (rc == 0) /* what loading takes is what the demo shows, also where computing is quicker */
        rc = kvt_config_set(config, "plan", "off");
    if (rc != 0)
        kvt_cli_error("demo", "%s", kvt_config_error(config));
    if (rc == 0 && (rc = kvt_open(config, &run->cache, error, sizeof(error))) != 0)
        kvt_cli_error("demo", "%s", error);
    kvt_config_free(config);
    if (rc != 0 || check_enabled(run->cache) != 0)
        return -1;
    kvt_llama_opts_init(&opts);
    opts.context_params = &run->engine.params;
    opts.model_path = run->config.model;
    opts.digest_dir = run->config.digest_dir;
    opts.level = run->config.level;
    opts.window_tokens = (uint32_t)run->config.window;
    opts.block_tokens = (uint32_t)run->config.block;
    rc = kvt_llama_new(run->cache, run->engine.ctx, &opts, &run->llama, error, sizeof(error));
    if (rc != 0 && !kvt_cli_interrupted())
        kvt_cli_error("demo", "this model or context cannot be remembered: %s", error);
    return rc == 0 ? 0 : -1;
}

/* Blocks of the prompt that an earlier run left in the directory, brought into DRAM: what is
 * measured as DRAM must lie there. */
static int find_before(struct run *run, json_t *result)
{
    const struct demo_question *question = &run->prompt.questions[0];
    const int64_t end = demo_now_ns() + WARM_NS_MAX;
    const long found = kvt_llama_prefetch(run->llama, question->tokens, question->count);
    long left = found;

    while (left > 0 && demo_now_ns() < end && !kvt_cli_interrupted()) {
        nanosleep(&(const struct timespec){0, 10000000}, NULL);
        left = kvt_llama_prefetch(run->llama, question->tokens, question->count);
    }
    if (found < 0 || left < 0) {
        kvt_cli_error("demo", "prefetch: %s", kvt_llama_error(run->llama));
        return -1;
    }
    json_object_set_new(result, "found_before", json_integer(found));
    return 0;
}

static int save_first(struct run *run, json_t *result)
{
    const struct demo_question *question = &run->prompt.questions[0];
    const int64_t start = demo_now_ns();

    long queued = kvt_llama_save(run->llama, 0, question->tokens, question->count);
    const int64_t copied = demo_now_ns();
    int rc = queued < 0 ? (int)queued : kvt_llama_sync(run->llama);
    if (rc == 0)
        rc = kvt_flush(run->cache);
    if (rc != 0) {
        kvt_cli_error("demo", "saving the prompt: %s", kvt_strerror(rc));
        return -1;
    }
    json_object_set_new(result, "save",
                        json_pack("{s:I, s:f, s:f}", "blocks", (json_int_t)queued, "copy_ms",
                                  ms(copied - start), "store_ms", ms(demo_now_ns() - copied)));
    return 0;
}

static json_t *choices_json(const int32_t choices[DEMO_FORCED_TOKENS])
{
    json_t *list = json_array();

    for (int i = 0; i < DEMO_FORCED_TOKENS; i++)
        json_array_append_new(list, json_integer(choices[i]));
    return list;
}

static size_t loaded_tokens(const json_t *restored)
{
    return (size_t)json_integer_value(json_object_get(restored, "loaded_tokens"));
}

/* Cold, save, DRAM. Returns 0 or -1. */
static int first_phase(struct run *run, json_t *result)
{
    json_t *cold[DEMO_QUESTIONS] = {NULL}, *dram[DEMO_QUESTIONS] = {NULL};
    struct demo_question *questions = run->prompt.questions;
    char digest[17];
    double agree = 0;
    int rc = -1;

    if (find_before(run, result) != 0)
        return -1;
    const int64_t start = demo_now_ns();
    const uint32_t block = (uint32_t)run->config.block;
    cold[0] = ask_cold(run, &questions[0], block * kvt_usable_blocks(block, questions[0].count));
    const int64_t took = demo_now_ns() - start;
    if (cold[0] == NULL || forced(run, questions[0].count, run->expect, run->expect_logits) != 0 ||
        save_first(run, result) != 0)
        goto out;
    dram[0] = ask_first_restored(run, DRAM_SAMPLES, &agree, digest);
    if (dram[0] == NULL)
        goto out;
    for (int q = 1; q < DEMO_QUESTIONS; q++)
        if ((dram[q] = ask_restored(run, &questions[q], DRAM_SAMPLES)) == NULL)
            goto out;
    for (int q = 1; q < DEMO_QUESTIONS && took < COLD_AGAIN_NS; q++)
        if ((cold[q] = ask_cold(run, &questions[q], loaded_tokens(dram[q]))) == NULL)
            goto out;
    json_t *list = json_array();
    for (int q = 0; q < DEMO_QUESTIONS; q++)
        json_array_append_new(
            list, json_pack("{s:s, s:I, s:o, s:O}", "question", questions[q].text, "prompt_tokens",
                            (json_int_t)questions[q].count, "cold",
                            cold[q] != NULL ? json_incref(cold[q]) : json_null(), "dram", dram[q]));
    json_object_set_new(result, "questions", list);
    json_object_set_new(result, "expect", choices_json(run->expect));
    json_object_set_new(result, "expect_logits", json_string(run->expect_logits));
    json_object_set_new(result, "agreement", json_real(agree));
    json_object_set_new(result, "identical", json_boolean(strcmp(digest, run->expect_logits) == 0));
    rc = 0;
out:
    for (int q = 0; q < DEMO_QUESTIONS; q++) {
        json_decref(cold[q]);
        json_decref(dram[q]);
    }
    return rc;
}

static int restart_phase(struct run *run, json_t *result)
{
    json_t *list = json_array();
    uint64_t direct = 0;
    char digest[17];
    double agree = 0;

    json_object_set_new(result, "questions", list);
    for (int q = 0; q < DEMO_QUESTIONS; q++) {
        json_t *disk = q == 0 ? ask_first_restored(run, 1, &agree, digest)
                              : ask_restored(run, &run->prompt.questions[q], 1);
        if (disk == NULL)
            return -1;
        json_array_append_new(list, json_pack("{s:o}", "disk", disk));
    }
    if (kvt_stats_get(run->cache, "disk.direct", &direct) != 0)
        direct = 0;
    json_object_set_new(result, "direct_io", json_boolean(direct != 0));
    json_object_set_new(result, "agreement", json_real(agree));
    json_object_set_new(result, "identical", json_boolean(strcmp(digest, run->expect_logits) == 0));
    return 0;
}

/* The prompt arrives as text. What is read of it so far is tokenised and asked for from disk at
 * every doubling, then the whole; then it is restored as ever. A token at a cut may come out
 * otherwise in the whole: its block is then one that is not there. */
static int prefetch_phase(struct run *run, json_t *result)
{
    const struct demo_question *question = &run->prompt.questions[0];
    const size_t len = strlen(question->prompt);
    const int64_t start = demo_now_ns();
    long asked = 0;

    for (size_t part = len / 8; asked >= 0 && part < 2 * len; part *= 2) {
        size_t n = part < len ? part : len, count = 0;
        while (n < len && (question->prompt[n] & 0xc0) == 0x80) /* never inside a character */
            n++;
        int32_t *tokens = demo_tokenize(&run->engine, question->prompt, n, 1, &count);
        if (tokens == NULL)
            return -1;
        asked = kvt_llama_prefetch(run->llama, tokens, count);
        free(tokens);
    }
    const int64_t took = demo_now_ns() - start;
    if (asked < 0) {
        kvt_cli_error("demo", "prefetch: %s", kvt_llama_error(run->llama));
        return -1;
    }
    json_t *restored = ask_restored(run, question, 1);
    if (restored == NULL)
        return -1;
    json_object_set_new(restored, "tokenise_ms", json_real(ms(took)));
    json_object_set_new(result, "disk", restored);
    return 0;
}

static int read_request(struct run *run, const json_t *request, enum phase *which)
{
    const char *phase = NULL, *expect_logits = NULL;
    json_t *expect = NULL;
    json_int_t level, tokens, threads, window, block;

    if (json_unpack((json_t *)request,
                    "{s:s, s:s, s:s, s?s, s?s, s?s, s:I, s:I, s:I, s:I, s:I, s?o, s?s, s?s}",
                    "phase", &phase, "model", &run->config.model, "dir", &run->config.dir,
                    "prompt_file", &run->config.prompt_file, "digest_dir", &run->config.digest_dir,
                    "socket", &run->config.socket, "level", &level, "tokens", &tokens, "threads",
                    &threads, "window", &window, "block", &block, "expect", &expect,
                    "expect_logits", &expect_logits, "remote", &run->config.remote) != 0)
        return -1;
    run->config.level = (int)level;
    run->config.tokens = tokens;
    run->config.threads = threads;
    run->config.window = window;
    run->config.block = block;
    *which = PHASE_FIRST;
    for (int i = 0; i < 3; i++)
        if (strcmp(phase, phase_names[i]) == 0)
            *which = (enum phase)i;
    const int restart = *which != PHASE_FIRST;
    run->config.say_short = !restart && tokens != DEMO_TOKENS;
    if (restart && (json_array_size(expect) != DEMO_FORCED_TOKENS || expect_logits == NULL))
        return -1;
    for (size_t i = 0; restart && i < DEMO_FORCED_TOKENS; i++)
        run->expect[i] = (int32_t)json_integer_value(json_array_get(expect, i));
    if (expect_logits != NULL)
        snprintf(run->expect_logits, sizeof(run->expect_logits), "%s", expect_logits);
    return 0;
}

static int work(struct run *run, enum phase phase, json_t *result)
{
    char name[128];

    if (demo_engine_open(&run->engine, "demo", run->config.model) != 0 ||
        demo_prompt_make(&run->prompt, &run->engine, &run->config) != 0)
        return -1;
    const size_t longest = demo_prompt_max(&run->prompt);
    if (demo_engine_context(&run->engine, run->config.threads,
                            (uint32_t)((longest + DEMO_FORCED_TOKENS + 255) / 256 * 256)) != 0 ||
        open_cache(run) != 0)
        return -1;
    if (llama_model_desc(run->engine.model, name, sizeof(name)) < 0)
        name[0] = '\0';
    json_object_set_new(result, "model_desc", json_string(name));
    json_object_set_new(result, "title", json_string(run->prompt.title));
    json_object_set_new(result, "engine_bytes_per_token",
                        json_integer((json_int_t)kvt_llama_token_bytes(run->llama)));
    switch (phase) {
    case PHASE_RESTART:
        return restart_phase(run, result);
    case PHASE_PREFETCH:
        return prefetch_phase(run, result);
    default:
        return first_phase(run, result);
    }
}

int demo_child(const char *request_text, int fd)
{
    struct run *run = calloc(1, sizeof(*run));
    json_t *request = json_loads(request_text, 0, NULL), *result = json_object();
    enum phase phase = PHASE_FIRST;
    int rc = KVT_EXIT_PROBLEM;

    kvt_cli_catch_interrupt();
    if (run == NULL || request == NULL || read_request(run, request, &phase) != 0) {
        kvt_cli_error("demo", "the inner command line is wrong");
        rc = KVT_EXIT_USAGE;
    } else if (work(run, phase, result) == 0 && !kvt_cli_interrupted()) {
        rc = json_dumpfd(result, fd, JSON_COMPACT) == 0 ? KVT_EXIT_OK : KVT_EXIT_PROBLEM;
    }
    if (run != NULL) { /* in any case: what was saved stays usable */
        kvt_llama_free(run->llama);
        kvt_close(run->cache);
        demo_prompt_free(&run->prompt);
        demo_engine_close(&run->engine);
    }
    json_decref(result);
    json_decref(request);
    free(run);
    return rc;
}
