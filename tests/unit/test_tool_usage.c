/* Goal: the binary itself: help, version, unknown commands, exit codes, a full disk behind a
 *       redirection; every subcommand has --help and refuses unknown options with exit code 2.
 * Method: the built binary is run; the list of subcommands is taken from its own help, so a new
 *         command is tested the day it lands.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/version.h"
#include "support/run_tool.h"

static struct tool_run run;

#define TOOL(...) \
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", __VA_ARGS__, NULL}, NULL, NULL)

static void test_help(void **state)
{
    (void)state;
    TOOL("--help");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "usage: kvtier COMMAND"));
    assert_string_equal(run.err, "");
    TOOL("help");
    assert_int_equal(run.code, 0);
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", NULL}, NULL, NULL);
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.out, "usage: kvtier COMMAND"));
}

static void test_version(void **state)
{
    (void)state;
    TOOL("--version");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, KVT_VERSION_STRING));
    assert_ptr_equal(strchr(run.out, '\n'), run.out + strlen(run.out) - 1); /* one line */
}

static void test_unknown_command(void **state)
{
    (void)state;
    TOOL("docter");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "unknown command 'docter'; did you mean 'doctor'?"));
    TOOL("bench", "codecs");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "did you mean 'bench codec'?"));
    assert_null(strstr(run.err, "unknown command 'bench';")); /* the word that is wrong is named */
    TOOL("nothing-like-it");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "see 'kvtier --help'"));
    TOOL("");
    assert_int_equal(run.code, 2);
    assert_string_equal(run.out, "");
}

static void test_family(void **state)
{
    (void)state;
    TOOL("bench");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.out, "usage: kvtier bench WHAT"));
    assert_non_null(strstr(run.out, "codec"));
    TOOL("bench", "--help");
    assert_int_equal(run.code, 0);
    TOOL("bench", "everything");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "'bench' knows no 'everything'; one of: "));
    TOOL("bench", "--json");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "one of: "));
}

/* An empty path is no directory, and never means "none given". */
static void test_empty_path(void **state)
{
    (void)state;
    TOOL("doctor", "--dir", "");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "--dir needs a path"));
    TOOL("fsck", "");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "an empty word"));
}

/* Run fn for each command that the help lists ("  name   summary", two blanks before the summary).
 */
static int each_command(void (*fn)(const char *first, const char *second))
{
    static struct tool_run help;
    char line[256], name[64], *save = help.out;
    int count = 0;

    tool_run(&help, KVT_TOOL, (const char *const[]){"kvtier", "--help", NULL}, NULL, NULL);
    while (*save) {
        size_t len = strcspn(save, "\n");
        snprintf(line, sizeof(line), "%.*s", (int)len, save);
        save += len + (save[len] == '\n');
        if (strncmp(line, "  ", 2) != 0 || !strncmp(line, "  kvtier", 8))
            continue;
        snprintf(name, sizeof(name), "%.*s", (int)(strstr(line + 2, "  ") - (line + 2)), line + 2);
        char *space = strchr(name, ' ');
        if (space)
            *space = '\0';
        fn(name, space ? space + 1 : NULL);
        count++;
    }
    return count;
}

static void run_with(const char *first, const char *second, const char *option)
{
    const char *const two[] = {"kvtier", first, second, option, NULL};
    const char *const one[] = {"kvtier", first, option, NULL};

    tool_run(&run, KVT_TOOL, second ? two : one, NULL, NULL);
}

static int is_left_out(const char *first, const char *second)
{
    return (strcmp(first, "demo") == 0 || strcmp(first, "quality") == 0 ||
            (second && strcmp(second, "plan") == 0)) &&
           strstr(run.err, "no llama.cpp adapter");
}

static void check_command(const char *first, const char *second)
{
    run_with(first, second, "--help");
    if (is_left_out(first, second))
        return;
    if (run.code != 0 || !strstr(run.out, "usage: kvtier") || !strstr(run.out, "--json"))
        fail_msg("%s --help: %d\n%s%s", first, run.code, run.out, run.err);
    run_with(first, second, "--no-such-option-anywhere");
    if (run.code != 2 || !strstr(run.err, "no-such-option-anywhere") || run.out[0])
        fail_msg("%s with an unknown option: %d\n%s%s", first, run.code, run.out, run.err);
    run_with(first, second, "--jsno");
    if (run.code != 2 || !strstr(run.err, "did you mean '--json'?"))
        fail_msg("%s --jsno: %d\n%s%s", first, run.code, run.out, run.err);
}

/* What a script reads: standard output is one object with the sentence in it. */
static void check_json_error(const char *what)
{
    json_t *out = json_loads(run.out, 0, NULL);
    const json_t *error = json_object_get(out, "error");
    const char *text = json_string_value(json_object_get(error, "text"));

    if (run.code == 0 || !text || !text[0] || !strstr(run.err, text) ||
        json_integer_value(json_object_get(error, "exit_code")) != run.code)
        fail_msg("%s: %d\n%s%s", what, run.code, run.out, run.err);
    json_decref(out);
}

static void check_wrong_option(const char *first, const char *second)
{
    const char *const two[] = {"kvtier", first, second, "--json", "--no-such-option", NULL};
    const char *const one[] = {"kvtier", first, "--json", "--no-such-option", NULL};

    run_with(first, second, "--help");
    if (is_left_out(first, second))
        return;
    tool_run(&run, KVT_TOOL, second ? two : one, NULL, NULL);
    assert_int_equal(run.code, 2);
    check_json_error(first);
}

static void test_errors_are_json_too(void **state)
{
    static const char *const lines[] = {"stat /no/such/store",
                                        "stat unix:/no/such/socket",
                                        "top /no/such/store --once",
                                        "fsck /no/such/store",
                                        "fsck unix:/no/such/socket",
                                        "verify /no/such/store",
                                        "verify unix:/no/such/socket",
                                        "inspect /no/such/store",
                                        "inspect unix:/no/such/socket",
                                        "purge /no/such/store --all --yes",
                                        "plan --config /no/such/config.json",
                                        "replay /no/such/trace",
                                        "doctor --config drma=1GiB",
                                        "docter"};

    (void)state;
    assert_true(each_command(check_wrong_option) >= 6);
    for (size_t i = 0; i < KVT_ARRAY_LEN(lines); i++) {
        tool_run(&run, "/bin/sh",
                 (const char *const[]){"sh", "-c", "\"$0\" $1 --json", KVT_TOOL, lines[i], NULL},
                 NULL, NULL);
        check_json_error(lines[i]);
    }
    TOOL("verify", "unix:/no/such/socket");
    assert_non_null(strstr(run.err, "takes the directory of a store"));
    TOOL("stat", "unix:/no/such/socket");
    assert_non_null(strstr(run.err, "start one"));
    assert_null(strstr(run.err, "store=process"));
    TOOL("replay", "--trace", "/no/such/trace");
    assert_non_null(strstr(run.err, "/no/such/trace: cannot be opened: No such file"));
    TOOL("plan", "--config", "/no/such/config.json");
    assert_non_null(strstr(run.err, "/no/such/config.json: cannot be read: No such file"));
    assert_null(strstr(run.err, "line -1"));
    TOOL("replay", "--generate", "500", "--disk", "1GB");
    assert_non_null(strstr(run.err, "GB at least"));
    TOOL("stat", "/no/such/store"); /* without it nothing but the sentence */
    assert_string_equal(run.out, "");
}

static void test_every_command(void **state)
{
    (void)state;
    assert_true(each_command(check_command) >= 6);
}

static void test_full_disk(void **state)
{
    (void)state;
    tool_run(&run, "/bin/sh",
             (const char *const[]){"sh", "-c", "\"$0\" --help >/dev/full", KVT_TOOL, NULL}, NULL,
             NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "cannot write to standard output"));
    tool_run(&run, "/bin/sh",
             (const char *const[]){"sh", "-c", "\"${0}d\" --help >/dev/full", KVT_TOOL, NULL}, NULL,
             NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "cannot write to standard output"));
}

/* What a signal cut short has not been done, says so, and leaves nothing where it worked. 130: the
 * signal came before the work, on a machine that is slow to start. */
static void test_interrupted(void **state)
{
    static const char *const commands[] = {"bench index --blocks 4000000",
                                           "bench l2 --size 256MiB --pairs 31",
                                           "doctor --probe 256MiB"};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(commands); i++) {
        tool_run(&run, "/bin/sh",
                 (const char *const[]){"sh", "-c",
                                       "d=$(mktemp -d) && timeout --preserve-status -s INT 0.4 "
                                       "\"$0\" $1 --dir $d >/dev/null; echo code $?; ls -A $d; "
                                       "rm -rf $d",
                                       KVT_TOOL, commands[i], NULL},
                 NULL, NULL);
        const bool said = strcmp(run.out, "code 1\n") == 0 && strstr(run.err, "interrupted");
        if (!said && strcmp(run.out, "code 130\n") != 0)
            fail_msg("%s: %s%s", commands[i], run.out, run.err);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_unknown_command),
        cmocka_unit_test(test_family),
        cmocka_unit_test(test_errors_are_json_too),
        cmocka_unit_test(test_empty_path),
        cmocka_unit_test(test_every_command),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_interrupted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
