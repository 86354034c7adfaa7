/* Prints the option table of a command in four forms: text for --help, a man page, and a branch of
 * the completion scripts for bash and zsh. One table, so none of them can differ.
 *
 * Invariants: every option of the table is in every form; what comes from the table is quoted for
 * the form. Threads: one. Does not know the commands: kvtier.c and cmd_help.c do.
 */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "about.h"
#include "base/checked.h"
#include "cli.h"
#include "kvtier/version.h"

#define TEXT_COLUMNS 80

static enum kvt_help_form form;
static const char *summary = "";

void kvt_cli_help_form(enum kvt_help_form wanted, const char *command_summary)
{
    form = wanted;
    summary = command_summary;
}

/* Words that can stand for an option's metavar; NULL: nobody can guess them. */
static const char *choices_of(const struct kvt_cli_option *option)
{
    static const struct {
        const char *metavar, *words;
    } known[] = {
        {"LEVEL", "raw kv8 kv6 kv5 kv4 int4"},
        {"TYPE", "bf16 f16 f32"},
        {"SHELL", "bash zsh"},
    };

    for (size_t i = 0; !option->words && option->metavar && i < KVT_ARRAY_LEN(known); i++)
        if (!strcmp(known[i].metavar, option->metavar))
            return known[i].words;
    return option->words;
}

static bool is_path(const char *metavar)
{
    return metavar && (!strcmp(metavar, "DIR") || !strcmp(metavar, "FILE"));
}

/* ---- text ---------------------------------------------------------------------------------- */

/* Paragraphs filled to the width of a terminal. */
static void print_filled(const char *text)
{
    int column = 0;

    while (*text) {
        size_t len = strcspn(text, " \n");
        if (column && column + 1 + (int)len > TEXT_COLUMNS) {
            putchar('\n');
            column = 0;
        }
        column += printf("%s%.*s", column ? " " : "", (int)len, text);
        text += len;
        if (text[0] == '\n' && text[1] == '\n') {
            printf("\n\n");
            column = 0;
        }
        text += strspn(text, " \n");
    }
    putchar('\n');
}

static void print_indented(const char *lines)
{
    while (*lines) {
        size_t len = strcspn(lines, "\n");
        printf("  %.*s\n", (int)len, lines);
        lines += len + (lines[len] == '\n');
    }
}

static void print_text(const char *command, const char *usage, const struct kvt_cli_option *options,
                       size_t count)
{
    const struct kvt_about *about = kvt_about(command);
    int width = (int)strlen("--help");

    for (size_t i = 0; i < count; i++) {
        size_t n = 2 + strlen(options[i].name);
        if (options[i].metavar)
            n += 1 + strlen(options[i].metavar);
        if ((int)n > width)
            width = (int)n;
    }
    printf("usage: kvtier %s %s\n\n", command, usage);
    if (about) {
        print_filled(about->text);
        putchar('\n');
    }
    for (size_t i = 0; i < count; i++) {
        int n = printf("  --%s%s%s", options[i].name, options[i].metavar ? " " : "",
                       options[i].metavar ? options[i].metavar : "");
        printf("%*s%s\n", width + 4 - n + 2, "", options[i].help);
    }
    printf("  --help%*s%s\n", width + 4 - (int)strlen("  --help") + 2, "", "show this text");
    if (about && about->examples) {
        printf("\nexamples\n");
        print_indented(about->examples);
    }
}

/* ---- man page ------------------------------------------------------------------------------ */

void kvt_man_text(const char *text)
{
    bool line_start = true;

    for (; *text; text++) {
        if (line_start && (*text == '.' || *text == '\''))
            fputs("\\&", stdout);
        if (*text == '\n' && text[1] == '\n') {
            fputs("\n.PP\n", stdout);
            text++;
            line_start = true;
            continue;
        }
        line_start = *text == '\n';
        if (*text == '-')
            fputs("\\-", stdout);
        else if (*text == '\\')
            fputs("\\e", stdout);
        else
            putchar(*text);
    }
}

void kvt_man_title(const char *command)
{
    printf(".TH KVTIER");
    if (command[0])
        putchar('-');
    for (const char *c = command; *c; c++)
        putchar(*c == ' ' ? '-' : toupper((unsigned char)*c));
    printf(" 1 \"%s\" \"kvtier %s\" \"kvtier\"\n.SH NAME\nkvtier", KVT_SOURCE_DATE, kvt_version());
    if (command[0])
        printf("\\-");
    for (const char *c = command; *c; c++)
        fputs(*c == ' ' ? "\\-" : (char[]){*c, '\0'}, stdout);
    printf(" \\- ");
}

static void print_limits(const struct kvt_cli_option *option)
{
    char low[32], high[32];

    if (!option->min && !option->max)
        return;
    if (option->number)
        printf(" (%" PRId64 " to %" PRId64 ")", option->min, option->max);
    if (option->size && option->max != INT64_MAX)
        printf(" (%s to %s)", kvt_human_bytes((uint64_t)option->min, low),
               kvt_human_bytes((uint64_t)option->max, high));
}

void kvt_man_end(const char *examples)
{
    if (examples) {
        printf(".SH EXAMPLES\n.nf\n");
        kvt_man_text(examples);
        printf("\n.fi\n");
    }
    printf(".SH EXIT STATUS\n.TP\n.B 0\nfine\n.TP\n.B 1\na problem was found\n.TP\n.B 2\n"
           "the command line was wrong\n.SH SEE ALSO\n.BR kvtier (1)\n");
}

static void print_man(const char *command, const char *usage, const struct kvt_cli_option *options,
                      size_t count)
{
    const struct kvt_about *about = kvt_about(command);

    kvt_man_title(command);
    kvt_man_text(summary);
    printf("\n.SH SYNOPSIS\n.B kvtier %s\n", command);
    kvt_man_text(usage);
    printf("\n.SH DESCRIPTION\n");
    kvt_man_text(about ? about->text : summary);
    printf("\n.SH OPTIONS\n");
    for (size_t i = 0; i < count; i++) {
        printf(".TP\n.B \\-\\-");
        kvt_man_text(options[i].name);
        if (options[i].metavar) {
            printf(" \\fI");
            kvt_man_text(options[i].metavar);
            printf("\\fR");
        }
        putchar('\n');
        kvt_man_text(options[i].help);
        print_limits(&options[i]);
        putchar('\n');
    }
    printf(".TP\n.B \\-\\-help\nshow the usage\n");
    kvt_man_end(about ? about->examples : NULL);
}

/* ---- completion ---------------------------------------------------------------------------- */

/* A word inside single quotes of a shell. */
static void print_quoted(const char *text)
{
    for (; *text; text++)
        fputs(*text == '\'' ? "'\\''" : (char[]){*text, '\0'}, stdout);
}

static void print_bash(const char *command, const struct kvt_cli_option *options, size_t count)
{
    printf("    '%s')\n        options='", command);
    for (size_t i = 0; i < count; i++)
        printf("--%s ", options[i].name);
    printf("--help'\n        paths='");
    for (size_t i = 0; i < count; i++)
        if (is_path(options[i].metavar))
            printf(" --%s", options[i].name);
    printf("'\n        values='");
    for (size_t i = 0; i < count; i++)
        if (!options[i].flag && !is_path(options[i].metavar))
            printf(" --%s", options[i].name);
    printf("'\n        case $previous in\n");
    for (size_t i = 0; i < count; i++)
        if (choices_of(&options[i]))
            printf("        --%s) choices='%s' ;;\n", options[i].name, choices_of(&options[i]));
    printf("        esac\n        ;;\n");
}

/* Square brackets and colons end parts of a specification. */
static void print_zsh_text(const char *text)
{
    for (; *text; text++) {
        if (strchr("[]:\\", *text))
            putchar('\\');
        fputs(*text == '\'' ? "'\\''" : (char[]){*text, '\0'}, stdout);
    }
}

static void print_zsh(const char *command, const struct kvt_cli_option *options, size_t count)
{
    printf("    '%s')\n        _arguments \\\n", command);
    for (size_t i = 0; i < count; i++) {
        const char *metavar = options[i].metavar ? options[i].metavar : "VALUE";
        const char *choices = choices_of(&options[i]);
        printf("            '--%s%s[", options[i].name, options[i].flag ? "" : "=");
        print_zsh_text(options[i].help);
        putchar(']');
        if (!options[i].flag) {
            printf(":%s:", metavar);
            if (choices)
                printf("(%s)", choices);
            else if (is_path(metavar))
                printf("_files%s", strcmp(metavar, "DIR") ? "" : " -/");
        }
        printf("' \\\n");
    }
    printf("            '--help[show the usage]' '*: :_files'\n        ;;\n");
}

void kvt_cli_print_help(const char *command, const char *usage,
                        const struct kvt_cli_option *options, size_t count)
{
    switch (form) {
    case KVT_HELP_TEXT:
        print_text(command, usage, options, count);
        break;
    case KVT_HELP_MAN:
        print_man(command, usage, options, count);
        break;
    case KVT_HELP_BASH:
        print_bash(command, options, count);
        break;
    case KVT_HELP_ZSH:
        print_zsh(command, options, count);
        break;
    }
}

void kvt_cli_print_quoted(const char *text)
{
    print_quoted(text);
}
