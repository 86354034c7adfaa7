/* Goal: options mean what they say, every refused word is named with the nearest valid one, and the
 *       exit codes are those of the contract (0, 1, 2).
 * Method: kvt_cli_parse() in process, with both output streams on temporary files; a table of wrong
 *         command lines, each with a piece of the sentence that must appear.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "cli.h"

#define WORDS_MAX 2

static struct {
    int flag, json;
    const char *text, *word;
    int64_t number;
    uint64_t size;
} given;

static const struct kvt_cli_option options[] = {
    {.name = "flag", .help = "a flag", .flag = &given.flag},
    {.name = "json", .help = "JSON", .flag = &given.json},
    {.name = "text", .metavar = "DIR", .help = "a text", .text = &given.text},
    {.name = "word", .metavar = "K=V", .help = "a word", .text = &given.word},
    {.name = "number",
     .metavar = "N",
     .help = "a number",
     .number = &given.number,
     .min = -3,
     .max = 10},
    {.name = "size",
     .metavar = "SIZE",
     .help = "a size",
     .size = &given.size,
     .min = 1024,
     .max = 1 << 30},
};

/* What was printed while `stream` pointed to a file. */
struct capture {
    FILE *stream, *file;
    int saved;
    char text[4096];
};

static void capture_start(struct capture *c, FILE *stream)
{
    c->stream = stream;
    c->file = tmpfile();
    assert_non_null(c->file);
    fflush(stream);
    c->saved = dup(fileno(stream));
    assert_true(c->saved >= 0);
    assert_true(dup2(fileno(c->file), fileno(stream)) >= 0);
}

static void capture_end(struct capture *c)
{
    fflush(c->stream);
    assert_true(dup2(c->saved, fileno(c->stream)) >= 0);
    close(c->saved);
    rewind(c->file);
    c->text[fread(c->text, 1, sizeof(c->text) - 1, c->file)] = '\0';
    fclose(c->file);
}

static struct capture out, err;
static const char *words[WORDS_MAX];
static size_t word_count;

/* Parse a command line of up to 8 words. */
static int parse(size_t min, size_t max, const char *const line[])
{
    char *argv[10] = {(char *)"probe"};
    int argc = 1;

    for (; line[argc - 1]; argc++)
        argv[argc] = (char *)line[argc - 1];
    memset(&given, 0, sizeof(given));
    memset(words, 0, sizeof(words));
    word_count = 99;
    capture_start(&out, stdout);
    capture_start(&err, stderr);
    int rc = kvt_cli_parse("probe", "DIR [--flag]", options, KVT_ARRAY_LEN(options), words, min,
                           max, &word_count, argc, argv);
    capture_end(&err);
    capture_end(&out);
    return rc;
}
#define PARSE(min, max, ...) parse(min, max, (const char *const[]){__VA_ARGS__, NULL})

static void test_values(void **state)
{
    (void)state;
    assert_int_equal(
        PARSE(1, 2, "--flag", "here", "--text", "a b", "--number=-3", "--size", "1.5KiB"), 0);
    assert_int_equal(given.flag, 1);
    assert_int_equal(given.json, 0);
    assert_string_equal(given.text, "a b");
    assert_int_equal(given.number, -3);
    assert_int_equal(given.size, 1536);
    assert_int_equal(word_count, 1);
    assert_string_equal(words[0], "here");
    assert_string_equal(err.text, "");
    assert_string_equal(out.text, "");
}

static void test_both_spellings_agree(void **state)
{
    (void)state;
    assert_int_equal(PARSE(0, 0, "--text", "--json"), 0); /* a value may look like an option */
    assert_string_equal(given.text, "--json");
    assert_int_equal(given.json, 0);
    assert_int_equal(PARSE(0, 0, "--word="), 0); /* only a path is never empty */
    assert_string_equal(given.word, "");
    assert_int_equal(PARSE(0, 0, "--text=a=b"), 0);
    assert_string_equal(given.text, "a=b");
    assert_int_equal(PARSE(0, 0, "--number", "1", "--number=2"), 0); /* the last one wins */
    assert_int_equal(given.number, 2);
}

static void test_words(void **state)
{
    (void)state;
    assert_int_equal(PARSE(0, 2, "--", "--flag", "-x"), 0);
    assert_int_equal(word_count, 2);
    assert_string_equal(words[0], "--flag");
    assert_string_equal(words[1], "-x");
    assert_int_equal(given.flag, 0);
    assert_int_equal(PARSE(0, 1, "-"), 0); /* a lone dash is a word */
    assert_string_equal(words[0], "-");
    assert_int_equal(PARSE(1, 1, "--flag"), 2);
    assert_non_null(strstr(err.text, "too few words"));
    assert_int_equal(PARSE(0, 1, "one", "two"), 2);
    assert_non_null(strstr(err.text, "unexpected word 'two'"));
}

static void test_help(void **state)
{
    (void)state;
    assert_int_equal(PARSE(1, 1, "--help"), 1);
    assert_non_null(strstr(out.text, "usage: kvtier probe DIR [--flag]"));
    for (size_t i = 0; i < KVT_ARRAY_LEN(options); i++) {
        assert_non_null(strstr(out.text, options[i].name));
        assert_non_null(strstr(out.text, options[i].help));
    }
    assert_string_equal(err.text, "");
    assert_int_equal(PARSE(1, 1, "-h"), 1);
    assert_int_equal(PARSE(0, 1, "--", "--help"), 0);
}

static void test_refused(void **state)
{
    static const struct {
        const char *line[4];
        const char *sentence;
    } wrong[] = {
        {{"--flug"}, "unknown option '--flug'; did you mean '--flag'?"},
        {{"--siez=4KiB"}, "unknown option '--siez'; did you mean '--size'?"},
        {{"--hlep"}, "did you mean '--help'?"},
        {{"--completely-different"}, "see 'kvtier probe --help'"},
        {{"-f"}, "unknown option '-f'; options are written '--name'"},
        {{"--flag=1"}, "--flag takes no value"},
        {{"--text"}, "--text needs a value: --text DIR"},
        {{"--number"}, "--number needs a value: --number N"},
        {{"--number", "seven"}, "--number: 'seven' is not a whole number"},
        {{"--number", "7x"}, "--number: '7x' is not a whole number"},
        {{"--number", ""}, "--number: '' is not a whole number"},
        {{"--number", "11"}, "--number: 11 is outside -3..10"},
        {{"--number", "-4"}, "--number: -4 is outside -3..10"},
        {{"--number", "99999999999999999999"}, "is outside -3..10"},
        {{"--size", "4gb"}, "'4gb' is not a size; did you mean the unit 'GB'?"},
        {{"--size", "4"}, "--size: 4 is outside 1.0 KiB..1.0 GiB"},
        {{"--size", "2GiB"}, "--size: 2GiB is outside 1.0 KiB..1.0 GiB"},
        {{"--size", "large"}, "--size: 'large' is not a size"},
        {{"--size", "-4KiB"}, "--size: '-4KiB' is not a size: it is negative"},
        {{"--size", "-1"}, "--size: '-1' is not a size: it is negative"},
        {{"--size", "1EiB"}, "--size: '1EiB' is not a size; write it like"},
        {{"--text", ""}, "--text needs a path"},
        {{"--text="}, "--text needs a path"},
    };

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(wrong); i++) {
        int rc = parse(0, 0, wrong[i].line);
        if (rc != 2 || !strstr(err.text, wrong[i].sentence))
            fail_msg("%s %s: %d, %s", wrong[i].line[0], wrong[i].line[1] ? wrong[i].line[1] : "",
                     rc, err.text);
        assert_int_equal(strncmp(err.text, "kvtier probe: ", 14), 0);
        assert_int_equal(strlen(out.text), 0);
        assert_true(given.flag == 0 && given.text == NULL && given.number == 0 && given.size == 0);
    }
}

static void test_long_word_is_cut(void **state)
{
    char word[4000];

    (void)state;
    memset(word, 'x', sizeof(word));
    word[0] = word[1] = '-';
    word[sizeof(word) - 1] = '\0';
    assert_int_equal(PARSE(0, 0, word), 2);
    assert_true(strlen(err.text) < 400);
}

static void test_json(void **state)
{
    (void)state;
    capture_start(&out, stdout);
    int rc = kvt_cli_json(json_pack("{s:i, s:f, s:s}", "a", 1, "b", 0.25, "c", "x\ny"));
    capture_end(&out);
    assert_int_equal(rc, KVT_EXIT_OK);
    assert_string_equal(out.text, "{\"a\":1,\"b\":0.25,\"c\":\"x\\ny\"}\n"); /* one line */
    capture_start(&err, stderr);
    rc = kvt_cli_json(NULL); /* what json_pack gives when it fails */
    capture_end(&err);
    assert_int_equal(rc, KVT_EXIT_PROBLEM);
}

static void test_json_to_full_disk(void **state)
{
    (void)state;
    FILE *full = fopen("/dev/full", "w");
    if (!full)
        skip();
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    dup2(fileno(full), STDOUT_FILENO);
    capture_start(&err, stderr);
    int rc = kvt_cli_json(json_pack("{s:i}", "a", 1));
    capture_end(&err);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    fclose(full);
    clearerr(stdout);
    assert_int_equal(rc, KVT_EXIT_PROBLEM);
    assert_non_null(strstr(err.text, "No space left"));
}

/* In the first minute; then a line a minute. */
static void test_progress_in_a_pipe_is_a_line_a_minute(void **state)
{
    struct kvt_progress progress;

    (void)state;
    capture_start(&err, stderr);
    kvt_progress_start(&progress, "working");
    for (uint64_t i = 0; i <= 100; i++)
        kvt_progress_update(&progress, i, 100);
    capture_end(&err);
    assert_string_equal(err.text, "");

    capture_start(&err, stderr);
    for (uint64_t i = 0; i < 3; i++) { /* the clock goes on by 61 s, now and then again */
        progress.last_ns -= i < 2 ? INT64_C(61000000000) : 0;
        kvt_progress_update(&progress, 40 + i, i < 1 ? 100 : 0);
    }
    kvt_progress_done(&progress);
    capture_end(&err);
    assert_string_equal(err.text, "working: 40 of 100\nworking: 41\n");
}

static void test_progress_on_a_terminal(void **state)
{
    struct kvt_progress progress;

    (void)state;
    capture_start(&err, stderr);
    kvt_progress_start(&progress, "working");
    progress.on = 1; /* as if it were one */
    for (uint64_t i = 0; i <= 1000; i++)
        kvt_progress_update(&progress, i, 1000);
    kvt_progress_done(&progress);
    capture_end(&err);
    assert_non_null(strstr(err.text, "working 100%"));
    assert_true(strlen(err.text) < 1000); /* redrawn by time, not by call */
    assert_string_equal(err.text + strlen(err.text) - 4, "\r\033[K");
}

static void test_human_bytes(void **state)
{
    static const struct {
        uint64_t bytes;
        const char *text;
    } rows[] = {
        {0, "0 B"},           {1023, "1023 B"},        {1024, "1.0 KiB"},        {1536, "1.5 KiB"},
        {1 << 20, "1.0 MiB"}, {5242880000, "4.9 GiB"}, {UINT64_MAX, "16.0 EiB"},
    };
    char buffer[32];

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(rows); i++)
        assert_string_equal(kvt_human_bytes(rows[i].bytes, buffer), rows[i].text);
}

static void test_interrupt(void **state)
{
    int status = 0;

    (void)state;
    kvt_cli_catch_interrupt();
    assert_int_equal(kvt_cli_interrupted(), 0);
    raise(SIGINT);
    assert_int_equal(kvt_cli_interrupted(), SIGINT);
    raise(SIGINT); /* `timeout` sends it to the process, then to its group */
    raise(SIGHUP);
    assert_int_equal(kvt_cli_interrupted(), SIGHUP);
    raise(SIGPIPE);
    assert_int_equal(kvt_cli_interrupted(), SIGPIPE);
    pid_t child = fork();
    if (child == 0) { /* somebody who does not want to wait */
        nanosleep(&(const struct timespec){1, 100000000}, NULL);
        raise(SIGPIPE); /* but nobody who reads is not somebody */
        raise(SIGINT);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_both_spellings_agree),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_long_word_is_cut),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_json_to_full_disk),
        cmocka_unit_test(test_progress_in_a_pipe_is_a_line_a_minute),
        cmocka_unit_test(test_progress_on_a_terminal),
        cmocka_unit_test(test_human_bytes),
        cmocka_unit_test(test_interrupt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
