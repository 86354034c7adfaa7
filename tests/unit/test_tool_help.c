/* Goal: --help, man pages and completion come from one table and cannot differ: every option that
 *       --help lists is in the man page and is completed by a real bash; pages render without a
 *       warning; every command has a text of its own.
 * Method: the list of commands is the tool's own (help --json); pages go through man or mandoc
 * where installed; the script for bash is loaded by bash, and its function called as bash calls it;
 * the one for zsh is parsed by zsh where installed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "about.h"
#include "cli.h"
#include "kvtier/version.h"
#include "support/run_tool.h"

#define OPTIONS_MAX 64

static struct tool_run run, help;

static void tool(const char *const argv[])
{
    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
}
#define TOOL(...) tool((const char *const[]){"kvtier", __VA_ARGS__, NULL})

/* Run fn for each command that is built: its name, its first and second word. */
static int each_command(void (*fn)(const char *name, const char *first, const char *second))
{
    json_t *list, *command;
    int count = 0;
    size_t i;

    TOOL("help", "--json");
    assert_int_equal(run.code, 0);
    list = json_loads(run.out, 0, NULL);
    assert_non_null(list);
    json_array_foreach(json_object_get(list, "commands"), i, command)
    {
        char first[32];
        const char *name = json_string_value(json_object_get(command, "name"));
        assert_non_null(name);
        assert_true(strlen(json_string_value(json_object_get(command, "summary"))) > 10);
        if (json_is_false(json_object_get(command, "built")))
            continue;
        snprintf(first, sizeof(first), "%.*s", (int)strcspn(name, " "), name);
        fn(name, first, strchr(name, ' ') ? strchr(name, ' ') + 1 : NULL);
        count++;
    }
    json_decref(list);
    return count;
}

/* The options that --help lists, "--name", in `help`. Returns how many. */
static size_t options_of(const char *first, const char *second, char names[OPTIONS_MAX][40])
{
    const char *const two[] = {"kvtier", first, second, "--help", NULL};
    const char *const one[] = {"kvtier", first, "--help", NULL};
    size_t n = 0;

    tool_run(&help, KVT_TOOL, second ? two : one, NULL, NULL);
    assert_int_equal(help.code, 0);
    for (const char *line = help.out; line; line = strchr(line, '\n')) {
        line += line != help.out;
        if (strncmp(line, "  --", 4) != 0)
            continue;
        assert_true(n < OPTIONS_MAX);
        snprintf(names[n++], 40, "%.*s", (int)strcspn(line + 2, " \n"), line + 2);
    }
    return n;
}

static void escape(const char *text, char *out)
{
    for (; *text; text++) {
        if (*text == '-')
            *out++ = '\\';
        *out++ = *text;
    }
    *out = '\0';
}

static void check_page(const char *name, const char *first, const char *second)
{
    const char *const two[] = {"kvtier", "help", "--man", first, second, NULL};
    char options[OPTIONS_MAX][40], escaped[80];
    size_t n = options_of(first, second, options);

    assert_true(n >= 2); /* --json and --help at least */
    tool(two);
    if (run.code || run.err[0])
        fail_msg("%s: %d %s", name, run.code, run.err);
    assert_memory_equal(run.out, ".TH KVTIER", 10);
    int year, month, day, end = 0; /* 1 "2026-11-29" "kvtier ... */
    if (sscanf(strchr(run.out + 10, ' '), " 1 \"%4d-%2d-%2d\" \"kvtier %n", &year, &month, &day,
               &end) != 3 ||
        !end || year < 2024 || month < 1 || month > 12 || day < 1 || day > 31)
        fail_msg("%s: no date in '%.60s'", name, run.out);
    assert_non_null(strstr(run.out, KVT_VERSION_STRING));
    for (const char *const *part = (const char *const[]){"NAME", "SYNOPSIS", "DESCRIPTION",
                                                         "OPTIONS", "EXIT STATUS", NULL};
         *part; part++) {
        snprintf(escaped, sizeof(escaped), ".SH %s\n", *part);
        if (!strstr(run.out, escaped))
            fail_msg("%s: no %s", name, *part);
    }
    for (size_t i = 0; i < n; i++) {
        char word[84];
        escape(options[i], escaped);
        snprintf(word, sizeof(word), ".B %s", escaped);
        char *at = strstr(run.out, word);
        if (!at || !strchr(" \n", at[strlen(word)]))
            fail_msg("%s: %s is not in its man page", name, options[i]);
    }
    if (!kvt_about(name))
        print_message("           %s has no text in about.c yet\n", name);
}

static void test_man_pages(void **state)
{
    (void)state;
    assert_true(each_command(check_page) >= 10);
    TOOL("help", "--man");
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, ".B bench index"));
    assert_non_null(strstr(run.out, "KVTIER_CONFIG"));
}

/* The page of a word that commands share names each of them, and so does its help. */
static void check_in_family(const char *name, const char *first, const char *second)
{
    char word[80];

    (void)name;
    if (!second)
        return;
    TOOL("help", "--man", first);
    assert_int_equal(run.code, 0);
    snprintf(word, sizeof(word), ".BR kvtier\\-%s\\-%s (1)\n", first, second);
    if (!strstr(run.out, word))
        fail_msg("no %s in %s", word, run.out);
    TOOL("help", first);
    assert_int_equal(run.code, 0);
    snprintf(word, sizeof(word), "\n  %s ", second);
    if (!strstr(run.out, word))
        fail_msg("no %s in %s", second, run.out);
}

static void test_families(void **state)
{
    (void)state;
    assert_true(each_command(check_in_family) >= 10);
    TOOL("help", "--man", "bench");
    assert_memory_equal(run.out, ".TH KVTIER-BENCH 1 ", 19);
    for (const char *const *part =
             (const char *const[]){"NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "EXAMPLES", NULL};
         *part; part++) {
        char line[32];
        snprintf(line, sizeof(line), ".SH %s\n", *part);
        assert_non_null(strstr(run.out, line));
    }
    TOOL("bench");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.out, "usage: kvtier bench WHAT"));
    TOOL("bench", "--help");
    assert_int_equal(run.code, 0);
    TOOL("help", "doctor", "x");
    assert_int_equal(run.code, 2);
}

/* What a formatter says of a page on standard input; skipped where there is none. */
static void check_render(const char *name, const char *first, const char *second)
{
    char command[512];

    (void)name;
    snprintf(command, sizeof(command),
             "if command -v mandoc >/dev/null; then"
             " \"$0\" help --man %s %s | mandoc -T lint -W warning | grep -v 'missing date';"
             " elif command -v man >/dev/null && command -v groff >/dev/null; then"
             " \"$0\" help --man %s %s | man --warnings=all -l - 2>&1 >/dev/null; fi; true",
             first, second ? second : "", first, second ? second : "");
    tool_run(&run, "/bin/sh", (const char *const[]){"sh", "-c", command, KVT_TOOL, NULL}, NULL,
             NULL);
    assert_int_equal(run.code, 0);
    if (run.out[0] || run.err[0])
        fail_msg("%s: %s%s", name, run.out, run.err);
}

static void test_pages_render(void **state)
{
    (void)state;
    assert_true(each_command(check_render) >= 10);
    check_render("bench", "bench", NULL);
}

/* ---- completion ---------------------------------------------------------------------------- */

/* What bash would offer for these words, the last one unfinished: one a line. */
static void complete(const char *words)
{
    static const char script[] =
        "source <(\"$0\" help --complete bash) || exit 9\n"
        "complete -p kvtier >/dev/null || exit 8\n"
        "eval \"COMP_WORDS=($1)\"\n"
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n"
        "_kvtier kvtier \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD-1]}\"\n"
        "printf '%s\\n' \"${COMPREPLY[@]}\"\n";

    tool_run(&run, "/bin/bash",
             (const char *const[]){"bash", "--norc", "-c", script, KVT_TOOL, words, NULL}, NULL,
             NULL);
    if (run.code || run.err[0])
        fail_msg("%s: %d %s%s", words, run.code, run.out, run.err);
}

static int offered(const char *word)
{
    size_t len = strlen(word);

    for (const char *at = run.out; (at = strstr(at, word)); at += len)
        if ((at == run.out || at[-1] == '\n') && at[len] == '\n')
            return 1;
    return 0;
}

static void check_completion(const char *name, const char *first, const char *second)
{
    char options[OPTIONS_MAX][40], words[128];
    size_t n = options_of(first, second, options);

    snprintf(words, sizeof(words), "kvtier '%.3s'", first);
    complete(words);
    if (!offered(first))
        fail_msg("'%s' does not complete to %s: %s", words, first, run.out);
    if (second) {
        snprintf(words, sizeof(words), "kvtier %s ''", first);
        complete(words);
        assert_true(offered(second));
    }
    snprintf(words, sizeof(words), "kvtier %s --", name);
    complete(words);
    for (size_t i = 0; i < n; i++)
        if (!offered(options[i]))
            fail_msg("%s: %s is not offered: %s", words, options[i], run.out);
    snprintf(words, sizeof(words), "kvtier %s --js", name);
    complete(words);
    assert_string_equal(run.out, "--json\n");
}

static void test_bash(void **state)
{
    (void)state;
    assert_true(each_command(check_completion) >= 10);
    complete("kvtier bench codec --level k");
    assert_true(offered("kv4") && offered("kv8") && !offered("raw"));
    complete("kvtier plan --model llama");
    assert_true(offered("llama-3-70b") && offered("llama-3.3-70b") && !offered("qwen3-8b"));
    complete("kvtier bench codec --rounds ''");
    assert_string_equal(run.out, "\n"); /* nothing: a number */
    complete("kvtier fsck /et");
    assert_string_equal(run.out, "/etc\n");
    complete("kvtier doctor --dir /et");
    assert_string_equal(run.out, "/etc\n");
    complete("kvtier help ver");
    assert_true(offered("verify"));
    complete("kvtier nonsense --");
    assert_string_equal(run.out, "\n");
}

static void test_zsh(void **state)
{
    (void)state;
    TOOL("help", "--complete", "zsh");
    assert_int_equal(run.code, 0);
    assert_memory_equal(run.out, "#compdef kvtier", 15);
    assert_non_null(strstr(run.out, "'bench index')"));
    assert_non_null(strstr(run.out, "llama-3.3-70b"));
    assert_non_null(strstr(run.out, "'--chain=["));
    tool_run(&run, "/bin/sh",
             (const char *const[]){
                 "sh", "-c",
                 "command -v zsh >/dev/null || exit 0; \"$0\" help --complete zsh >\"$1\" && "
                 "zsh -n \"$1\"; rc=$?; rm -f \"$1\"; exit $rc",
                 KVT_TOOL, "kvtier-zsh.tmp", NULL},
             NULL, NULL);
    if (run.code)
        fail_msg("%s", run.err);
}

static void test_help_words(void **state)
{
    (void)state;
    TOOL("help", "bench", "index");
    assert_int_equal(run.code, 0);
    TOOL("bench", "index", "--help");
    assert_non_null(strstr(run.out, "usage: kvtier bench index"));
    assert_non_null(strstr(run.out, "examples\n  kvtier bench index"));
    TOOL("help", "verfy");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "did you mean 'verify'?"));
    TOOL("help", "bench", "idex");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "bench index"));
    TOOL("help", "--complete", "fish");
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "fish"));
    TOOL("help", "a", "b", "c");
    assert_int_equal(run.code, 2);
}

/* Text of the tables may hold what means something to roff, bash and zsh. */
static void test_quoting(void **state)
{
    static int flag;
    static const char *text;
    const struct kvt_cli_option hostile[] = {
        {.name = "it", .help = "a 'quoted' [thing]: \\back, $HOME `id`", .flag = &flag},
        {.name = "dot", .metavar = "X", .help = ".starts with a dot", .text = &text},
    };
    char path[64] = "/tmp/kvt-help-XXXXXX", out[4096];
    int fd = mkstemp(path), saved = dup(STDOUT_FILENO);

    (void)state;
    assert_true(fd >= 0 && saved >= 0);
    fflush(stdout);
    assert_true(dup2(fd, STDOUT_FILENO) >= 0);
    kvt_cli_help_form(KVT_HELP_MAN, "-s");
    kvt_cli_print_help("none", "", hostile, 2);
    kvt_cli_help_form(KVT_HELP_ZSH, "-s");
    kvt_cli_print_help("none", "", hostile, 2);
    kvt_cli_help_form(KVT_HELP_TEXT, "");
    fflush(stdout);
    assert_true(dup2(saved, STDOUT_FILENO) >= 0);
    close(saved);
    out[pread(fd, out, sizeof(out) - 1, 0)] = '\0';
    close(fd);
    unlink(path);
    assert_non_null(strstr(out, "\\eback"));
    assert_non_null(strstr(out, "\n\\&.starts with a dot"));
    assert_non_null(strstr(out, "a '\\''quoted'\\'' \\[thing\\]\\: \\\\back, $HOME `id`]"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_man_pages),  cmocka_unit_test(test_pages_render),
        cmocka_unit_test(test_bash),       cmocka_unit_test(test_zsh),
        cmocka_unit_test(test_help_words), cmocka_unit_test(test_quoting),
        cmocka_unit_test(test_families),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
