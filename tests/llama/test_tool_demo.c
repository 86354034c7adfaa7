/* Goal: `kvtier demo` keeps its word end to end: both phases, in two processes, on a fresh store;
 * at raw every logit is the same; the JSON has the promised fields; bad input is named before any
 * work; an interrupt leaves a usable store and no process. Method: the real binary on a tiny random
 * model written to a file; the real model too, where it has been downloaded (KVT_TEST_MODEL, or the
 * scripts' cache).
 */
#include "tool_help.h"

#include "support/redis_rig.h"

static void demo(struct outcome *outcome, const char *const words[])
{
    run_tool(outcome, "demo", words);
}

/* The fields of the document, whatever the model and level. */
static json_t *check_json_of(const struct outcome *outcome, int want_identical, int block)
{
    json_t *report = json_loads(outcome->out, 0, NULL);

    if (outcome->status != 0 || report == NULL)
        fail_msg("exit %d, stderr '%s', stdout '%.200s'", outcome->status, outcome->err,
                 outcome->out);
    assert_true(json_is_string(json_object_get(report, "model")));
    assert_true(json_is_string(json_object_get(report, "level")));
    assert_true(json_is_boolean(json_object_get(report, "direct_io")));
    const double tokens = number(report, "prompt_tokens", NULL);
    assert_true(number(report, "ttft_ms", "cold") > 0);
    assert_true(number(report, "ttft_ms", "dram") > 0);
    assert_true(number(report, "ttft_ms", "disk") > 0);
    const double loaded = number(report, "loaded_tokens", "dram");
    assert_true(loaded > 0 && loaded < tokens && loaded + block >= tokens);
    assert_true(number(report, "loaded_tokens", "disk") == loaded);
    assert_true(number(report, "engine_bytes_per_token", NULL) > 0);
    assert_true(number(report, "stored_bytes_per_token", NULL) > 0);
    const double agreement = number(report, "top1_agreement", NULL);
    assert_true(agreement >= 0 && agreement <= 1);
    if (want_identical) {
        const json_t *identical = json_object_get(report, "logits_identical");
        assert_true(json_is_true(json_object_get(identical, "dram")));
        assert_true(json_is_true(json_object_get(identical, "disk")));
        assert_true(agreement == 1);
    }
    /* the second process had nothing in DRAM */
    const json_t *first = json_array_get(json_object_get(report, "questions"), 0);
    const json_t *disk = json_object_get(first, "disk"), *dram = json_object_get(first, "dram");
    const double parts = number(dram, "lookup_ms", NULL) + number(dram, "load_ms", NULL) +
                         number(dram, "set_state_ms", NULL) + number(dram, "compute_ms", NULL);
    assert_true(parts > 0.99 * number(report, "ttft_ms", "dram"));
    const bool remote = json_is_true(json_object_get(report, "remote"));
    assert_true(number(disk, remote ? "blocks_remote" : "blocks_disk", NULL) == loaded / block);
    assert_true(number(disk, remote ? "blocks_disk" : "blocks_remote", NULL) == 0);
    assert_true(number(disk, "blocks_dram", NULL) == 0);
    assert_int_equal(json_array_size(json_object_get(report, "questions")), 3);
    /* the third process read ahead: each block came from one of the two tiers */
    const json_t *ahead = json_object_get(report, "prefetched");
    assert_true(number(ahead, "loaded_tokens", NULL) == loaded);
    assert_true(number(ahead, "blocks_dram", NULL) + number(ahead, "blocks_disk", NULL) +
                    number(ahead, "blocks_remote", NULL) ==
                loaded / block);
    assert_true(number(ahead, "tokenise_ms", NULL) > 0);
    assert_true(number(report, "ttft_ms", "disk_prefetched") > 0);
    assert_string_equal(json_string_value(json_object_get(ahead, "answer")),
                        json_string_value(json_object_get(disk, "answer")));
    return report;
}

static json_t *check_json(const struct outcome *outcome, int want_identical)
{
    return check_json_of(outcome, want_identical, 16);
}

static int count_demo_dirs(void)
{
    DIR *list = opendir(work);
    struct dirent *entry;
    int count = 0;

    assert_non_null(list);
    while ((entry = readdir(list)) != NULL)
        count += strncmp(entry->d_name, "demo-", 5) == 0;
    closedir(list);
    return count;
}

static void test_raw_is_identical(void **state)
{
    (void)state;
    static struct outcome outcome;

    demo(&outcome, (const char *[]){"--model", model, "--tokens", "300", "--threads", "1",
                                    "--level", "raw", "--json", NULL});
    json_decref(check_json(&outcome, 1));
    assert_string_equal(outcome.err, ""); /* no progress in a pipe */
    assert_int_equal(count_demo_dirs(), 0);
}

/* Processes that share nothing but a server: the second one computes no more than the first one's
 * DRAM column, and has the same logits; without the server there is a sentence. */
static void test_over_a_server(void **state)
{
    (void)state;
    static struct outcome outcome;
    static struct redis_rig redis;
    char url[256], out[256];

    if (!redis_rig_able())
        return;
    redis_rig_start(&redis, "");
    redis_rig_url(&redis, url, sizeof(url));
    const char *const words[] = {"--model", model, "--tokens", "300", "--threads", "1",
                                 "--level", "raw", "--remote", url,   "--json",    NULL};
    demo(&outcome, words);
    json_decref(check_json(&outcome, 1));
    assert_int_equal(redis_rig_cli(&redis, 0, "DBSIZE", out, sizeof(out)), 0);
    assert_true(strtol(out, NULL, 10) > 0);
    redis_rig_kill(&redis, 0);
    demo(&outcome, words);
    assert_int_equal(outcome.status, 1);
    assert_non_null(strstr(outcome.err, "loaded nothing from redis://"));
    redis_rig_stop(&redis);
}

static void test_kv4_table(void **state)
{
    (void)state;
    static struct outcome outcome;

    demo(&outcome, (const char *[]){"--model", model, "--tokens", "400", "--threads", "1", NULL});
    assert_int_equal(outcome.status, 0);
    assert_non_null(strstr(outcome.out, "time to first token"));
    assert_non_null(strstr(outcome.out, "bytes per token"));
    assert_non_null(strstr(outcome.out, "same next token as the exact cache"));
}

/* A directory that is given is kept, and found again by the next run. */
static void test_kept_directory(void **state)
{
    (void)state;
    static struct outcome outcome;
    char store[128];
    struct stat st;

    snprintf(store, sizeof(store), "%s/store", work);
    for (int run = 0; run < 2; run++) {
        demo(&outcome, (const char *[]){"--model", model, "--tokens", "300", "--threads", "1",
                                        "--dir", store, "--json", NULL});
        json_t *report = check_json(&outcome, 0);
        const json_t *save = json_object_get(report, "save");
        assert_true((json_integer_value(json_object_get(save, "blocks")) > 0) == (run == 0));
        /* what was there is said, and the column DRAM is DRAM all the same */
        const json_t *dram =
            json_object_get(json_array_get(json_object_get(report, "questions"), 0), "dram");
        const double blocks = number(report, "loaded_tokens", "dram") / 16;
        assert_true(number(report, "found_before", NULL) == (run == 0 ? 0 : blocks));
        assert_true(number(dram, "blocks_dram", NULL) == blocks);
        assert_true(number(dram, "blocks_disk", NULL) == 0);
        assert_true(number(dram, "samples", NULL) == 3);
        json_decref(report);
        assert_int_equal(stat(store, &st), 0);
    }
    demo(&outcome, (const char *[]){"--model", model, "--tokens", "300", "--threads", "1", "--dir",
                                    store, NULL});
    assert_non_null(strstr(outcome.out, "blocks were in the directory from an earlier run"));
    assert_null(strstr(outcome.out, "came from disk all the same"));
    remove_tree(store);
}

static void test_own_text(void **state)
{
    (void)state;
    static struct outcome outcome;
    char path[128];

    snprintf(path, sizeof(path), "%s/text", work);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    for (int i = 0; i < 400; i++)
        fprintf(file, "Sentence number %d says %d. ", i, i * i);
    fclose(file);
    demo(&outcome, (const char *[]){"--model", model, "--tokens", "300", "--threads", "1",
                                    "--prompt-file", path, "--json", NULL});
    json_t *report = check_json(&outcome, 0);
    assert_string_equal(json_string_value(json_object_get(report, "document")), path);
    json_decref(report);
    demo(&outcome, (const char *[]){"--model", model, "--tokens", "1000000", "--threads", "1",
                                    "--prompt-file", path, NULL});
    assert_non_null(strstr(outcome.err, "the whole text makes a prompt of"));
    assert_int_equal(truncate(path, 100), 0); /* too short to measure with */
    demo(&outcome,
         (const char *[]){"--model", model, "--threads", "1", "--prompt-file", path, NULL});
    assert_int_equal(outcome.status, 1);
    assert_non_null(strstr(outcome.err, "at least 256"));
}

/* Bad input: an exit code and a sentence that names the thing, and no directory left behind. */
static void test_bad_input(void **state)
{
    (void)state;
    static struct outcome outcome;
    char cut[128];
    const struct {
        int status;
        const char *word;
        const char *argv[8];
    } cases[] = {
        {2, "--tokens", {"--tokenz", "5", NULL}},
        {2, "--tokens", {"--tokens", "many", NULL}},
        {2, "kv4", {"--level", "kv44", "--model", model, NULL}},
        {1, "/nonexistent", {"--model", "/nonexistent", NULL}},
        {1, "not a GGUF", {"--model", "/etc/passwd", NULL}},
        {1, "fetch-model", {"--tokens", "300", NULL}}, /* no model in this cache */
        {1, "cannot read", {"--model", model, "--prompt-file", "/nonexistent", NULL}},
        {1, "smaller --tokens", {"--model", model, "--tokens", "4000", NULL}},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        demo(&outcome, (const char *const *)cases[i].argv);
        if (outcome.status != cases[i].status || strstr(outcome.err, cases[i].word) == NULL)
            fail_msg("case %zu: exit %d, '%s'", i, outcome.status, outcome.err);
        assert_string_equal(outcome.out, "");
    }
    /* a truncated model is said to be one, before it is loaded */
    static char bytes[8 << 20];
    snprintf(cut, sizeof(cut), "%s/cut.gguf", work);
    FILE *file = fopen(model, "rb");
    size_t len = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    file = fopen(cut, "wb");
    assert_int_equal(fwrite(bytes, 1, len / 2, file), len / 2);
    fclose(file);
    demo(&outcome, (const char *[]){"--model", cut, NULL});
    assert_int_equal(outcome.status, 1);
    assert_non_null(strstr(outcome.err, "is truncated"));
    assert_int_equal(count_demo_dirs(), 0);
}

/* A store that cannot be is refused before any work, and nothing is made or printed. */
static void test_bad_directory(void **state)
{
    (void)state;
    static struct outcome outcome;
    char foreign[128], notes[160];

    snprintf(foreign, sizeof(foreign), "%s/foreign", work);
    snprintf(notes, sizeof(notes), "%s/notes.txt", foreign);
    assert_int_equal(mkdir(foreign, 0700), 0);
    FILE *file = fopen(notes, "wb");
    assert_non_null(file);
    fputs("mine", file);
    fclose(file);
    const struct {
        int status;
        const char *dir, *word;
    } cases[] = {
        {1, "/etc/passwd", "/etc/passwd is not a directory: name a directory"},
        {1, "/nonexist/x/y", "/nonexist/x/y: its parent directory does not exist: create it"},
        {1, foreign, "holds files that are not a kvtier store"},
        {2, "", "--dir needs a path"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        demo(&outcome, (const char *[]){"--model", model, "--tokens", "200", "--threads", "1",
                                        "--dir", cases[i].dir, NULL});
        if (outcome.status != cases[i].status || strstr(outcome.err, cases[i].word) == NULL)
            fail_msg("case %zu: exit %d, '%s'", i, outcome.status, outcome.err);
        assert_string_equal(outcome.out, "");
    }
    assert_int_equal(unlink(notes), 0);
    assert_int_equal(rmdir(foreign), 0); /* nothing was put there */
}

/* A second process that finds nothing is a failure, whatever made it so. */
static void test_nothing_from_disk(void **state)
{
    (void)state;
    static struct outcome outcome;

    assert_int_equal(setenv("KVTIER_CONFIG", "disk=none", 1), 0);
    demo(&outcome,
         (const char *[]){"--model", model, "--tokens", "300", "--threads", "1", "--json", NULL});
    assert_int_equal(unsetenv("KVTIER_CONFIG"), 0);
    assert_int_equal(outcome.status, 1);
    assert_non_null(strstr(outcome.err, "the new process loaded nothing from"));
    assert_int_equal(count_demo_dirs(), 0);
}

/* Switched off from outside: said as such, at once. */
static void test_switched_off(void **state)
{
    (void)state;
    static struct outcome outcome;

    assert_int_equal(setenv("KVTIER_CONFIG", "enabled=no", 1), 0);
    demo(&outcome, (const char *[]){"--model", model, "--tokens", "300", "--threads", "1", NULL});
    assert_int_equal(setenv("KVTIER_CONFIG", "enabled=perhaps", 1), 0);
    static struct outcome bad;
    demo(&bad, (const char *[]){"--model", model, "--tokens", "300", "--threads", "1", NULL});
    assert_int_equal(unsetenv("KVTIER_CONFIG"), 0);
    assert_int_equal(outcome.status, 1);
    assert_string_equal(outcome.out, "");
    if (strstr(outcome.err, "switched off (KVTIER_CONFIG says enabled=no)") == NULL ||
        strchr(outcome.err, '\n') != outcome.err + strlen(outcome.err) - 1) /* one sentence */
        fail_msg("'%s'", outcome.err);
    assert_int_equal(bad.status, 1);
    assert_non_null(strstr(bad.err, "enabled"));
    assert_int_equal(count_demo_dirs(), 0);
}

/* Blocks of every size, at raw: all logits the same, and other blocks than those of 16. */
static void test_block_sizes(void **state)
{
    (void)state;
    static struct outcome outcome;
    const char *const sizes[] = {"32", "64", "128"};

    for (int i = 0; i < 3; i++) {
        const int block = 32 << i;
        demo(&outcome, (const char *[]){"--model", model, "--tokens", "600", "--threads", "1",
                                        "--level", "raw", "--block", sizes[i], "--json", NULL});
        json_t *report = check_json_of(&outcome, 1, block);
        assert_true(number(report, "block_tokens", NULL) == block);
        json_decref(report);
    }
    demo(&outcome, (const char *[]){"--model", model, "--block", "40", NULL});
    assert_int_equal(outcome.status, 2);
    assert_non_null(strstr(outcome.err, "not a multiple of 16"));
}

/* A copy of the model whose 32-bit number behind `key` is another one. */
static void damage(const char *path, const char *key, uint32_t number)
{
    static char bytes[8 << 20];
    FILE *file = fopen(model, "rb");

    assert_non_null(file);
    size_t len = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    char *at = memmem(bytes, len, key, strlen(key));
    assert_non_null(at);
    memcpy(at + strlen(key) + sizeof(uint32_t), &number, sizeof(number)); /* behind its type */
    file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, len, file), len);
    fclose(file);
}

/* A model that parses and is wrong: the line of llama.cpp that says why is shown, and an abort
 * inside it is one sentence of ours, with no debugger's output. */
static void test_hostile_model(void **state)
{
    (void)state;
    static struct outcome outcome;
    char path[128];

    snprintf(path, sizeof(path), "%s/hostile.gguf", work);
    damage(path, "llama.embedding_length", 0);
    demo(&outcome, (const char *[]){"--model", path, "--threads", "1", NULL});
    assert_int_equal(outcome.status, 1);
    if (strstr(outcome.err, "error loading model") == NULL)
        fail_msg("'%s'", outcome.err);
    damage(path, "llama.block_count", INT32_MAX);
    demo(&outcome, (const char *[]){"--model", path, "--threads", "1", "--json", NULL});
    assert_int_equal(outcome.status, 1);
    assert_non_null(strstr(outcome.out, "{\"error\":{"));
    if (strstr(outcome.err, "llama.cpp aborted on") == NULL || strstr(outcome.err, "#1 ") != NULL)
        fail_msg("'%s'", outcome.err);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(count_demo_dirs(), 0);
}

static void test_bad_text(void **state)
{
    (void)state;
    static struct outcome outcome;
    char empty[128], binary[128], nul[128], blank[128];

    snprintf(empty, sizeof(empty), "%s/empty", work);
    FILE *file = fopen(empty, "wb");
    assert_non_null(file);
    fclose(file);
    snprintf(binary, sizeof(binary), "%s/binary", work);
    file = fopen(binary, "wb");
    assert_non_null(file);
    fputs("a text with \xff in it", file);
    fclose(file);
    snprintf(nul, sizeof(nul), "%s/nul", work);
    file = fopen(nul, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite("a text\0 with a hole", 1, 20, file), 20);
    fclose(file);
    snprintf(blank, sizeof(blank), "%s/blank", work);
    file = fopen(blank, "wb");
    assert_non_null(file);
    fputs(" \n \n", file);
    fclose(file);
    const char *const cases[][2] = {{"/tmp", "is a directory"},
                                    {empty, "is empty"},
                                    {"/dev/zero", "is too long"},
                                    {binary, "is not UTF-8"},
                                    {nul, "is not text: it holds a NUL byte"},
                                    {blank, "at least 256 are needed"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        demo(&outcome, (const char *[]){"--model", model, "--threads", "1", "--prompt-file",
                                        cases[i][0], NULL});
        if (outcome.status != 1 || strstr(outcome.err, cases[i][1]) == NULL)
            fail_msg("case %zu: exit %d, '%s'", i, outcome.status, outcome.err);
    }
    assert_int_equal(unlink(empty), 0);
    assert_int_equal(unlink(binary), 0);
    assert_int_equal(unlink(nul), 0);
    assert_int_equal(unlink(blank), 0);
}

/* End a run by a signal after `ms`; the store must be usable afterwards. Returns 1 when the run had
 * ended before. */
static int interrupt_after(const char *store, int ms, int signal)
{
    static struct outcome outcome;
    char out[128], err[128];
    const char *argv[] = {"kvtier",    "demo", "--model", model, "--tokens", "1500",
                          "--threads", "1",    "--dir",   store, NULL};
    const struct timespec wait = {0, ms * 1000000};
    int status;

    snprintf(out, sizeof(out), "%s/out", work);
    snprintf(err, sizeof(err), "%s/err", work);
    pid_t child = start(argv, out, err);
    nanosleep(&wait, NULL);
    assert_int_equal(kill(child, signal), 0);
    (void)kill(child, signal); /* as `timeout` does: the process, then its group */
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 1; /* it was faster than we */
    read_all(err, outcome.err, sizeof(outcome.err));
    if (!(WIFEXITED(status) && WEXITSTATUS(status) == 1) &&
        !(WIFSIGNALED(status) && (ms == 20 || signal == SIGKILL))) /* before the handler was set */
        fail_msg("signal %d after %d ms: status %d, '%s'", signal, ms, status, outcome.err);
    return 0;
}

/* Run on the store that something has ended on. A killed parent's child ends by itself: it may hold
 * the store a moment longer. */
static void check_store(const char *store)
{
    static struct outcome outcome;
    const struct timespec pause = {0, 100000000};

    for (int i = 0; i < 100; i++) {
        demo(&outcome, (const char *[]){"--model", model, "--tokens", "300", "--threads", "1",
                                        "--dir", store, "--json", NULL});
        if (outcome.status == 0 || strstr(outcome.err, "use") == NULL)
            break;
        nanosleep(&pause, NULL);
    }
    json_decref(check_json(&outcome, 0));
}

/* Every signal that ends programs, at different moments: a clean end, no process left, and the
 * store serves afterwards. */
static void test_interrupt(void **state)
{
    (void)state;
    const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
    char store[128];

    snprintf(store, sizeof(store), "%s/interrupted", work);
    for (int i = 0; i < 4; i++) {
        for (int ms = 20; ms <= 500; ms += 160)
            if (interrupt_after(store, ms, signals[i]))
                break;
        check_store(store);
    }
    remove_tree(store);
}

static void test_killed(void **state)
{
    (void)state;
    char store[128];

    snprintf(store, sizeof(store), "%s/killed", work);
    for (int ms = 40; ms <= 400; ms += 180) {
        (void)interrupt_after(store, ms, SIGKILL);
        check_store(store);
    }
    remove_tree(store);
}

/* Nobody reads what it prints: an exit code, and the store serves afterwards. */
static void test_closed_output(void **state)
{
    (void)state;
    char store[128];
    int fds[2], status;

    snprintf(store, sizeof(store), "%s/closed", work);
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(close(fds[0]), 0);
    const char *argv[] = {"kvtier",    "demo", "--model", model, "--tokens", "300",
                          "--threads", "1",    "--dir",   store, "--json",   NULL};
    posix_spawn_file_actions_t actions;
    pid_t child;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    assert_int_equal(posix_spawn_file_actions_adddup2(&actions, fds[1], 1), 0);
    assert_int_equal(posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0), 0);
    assert_int_equal(
        posix_spawn(&child, KVT_TOOL, &actions, NULL, (char *const *)(uintptr_t)argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    check_store(store);
    remove_tree(store);
}

/* The model of the demo itself, when it is there. */
static void test_real_model(void **state)
{
    (void)state;
    static struct outcome outcome;
    const char *path = getenv("KVT_TEST_MODEL");

    if (path == NULL || access(path, R_OK) != 0)
        skip();
    demo(&outcome, (const char *[]){"--model", path, "--tokens", "150", "--threads", "1", "--level",
                                    "raw", "--json", NULL});
    json_t *report = check_json(&outcome, 1);
    assert_true(number(report, "engine_bytes_per_token", NULL) == 23040);
    /* the prompt is cut such that half a block is left at most */
    assert_true(number(report, "prompt_tokens", NULL) - number(report, "loaded_tokens", "dram") <=
                8);
    json_decref(report);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_raw_is_identical),  cmocka_unit_test(test_kv4_table),
        cmocka_unit_test(test_over_a_server),     cmocka_unit_test(test_kept_directory),
        cmocka_unit_test(test_own_text),          cmocka_unit_test(test_bad_directory),
        cmocka_unit_test(test_nothing_from_disk), cmocka_unit_test(test_hostile_model),
        cmocka_unit_test(test_bad_text),          cmocka_unit_test(test_bad_input),
        cmocka_unit_test(test_interrupt),         cmocka_unit_test(test_killed),
        cmocka_unit_test(test_closed_output),     cmocka_unit_test(test_switched_off),
        cmocka_unit_test(test_block_sizes),       cmocka_unit_test(test_real_model),
    };
    llama_backend_init();
    return cmocka_run_group_tests(tests, setup, teardown);
}
