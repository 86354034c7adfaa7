/* The kvtier binary: finds the subcommand and runs it. The table is in commands.h.
 *
 * Exit codes: 0 ok, 1 the command found a problem, 2 the command line was wrong.
 * Threads: none of its own.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/parse.h"
#include "cli.h"
#include "commands.h"
#include "daemon/standard.h"
#include "kvtier/version.h"

#ifdef KVT_HAVE_LLAMA
#define HAVE_LLAMA 1
#else
#define HAVE_LLAMA 0
#define KVT_X(name, function, summary)                                                      \
    int function(int argc, char **argv)                                                     \
    {                                                                                       \
        (void)argc;                                                                         \
        (void)argv;                                                                         \
        kvt_cli_error(name, "this build has no llama.cpp adapter; 'make demo' builds one"); \
        return KVT_EXIT_PROBLEM;                                                            \
    }
KVT_COMMANDS_LLAMA(KVT_X)
#undef KVT_X
#endif

const struct kvt_command kvt_commands[] = {
#define KVT_X(name, function, summary) {name, summary, function, HAVE_LLAMA},
    KVT_COMMANDS_LLAMA(KVT_X)
#undef KVT_X
#define KVT_X(name, function, summary) {name, summary, function, 1},
        KVT_COMMANDS(KVT_X)
#undef KVT_X
};
const size_t kvt_command_count = KVT_ARRAY_LEN(kvt_commands);

void kvt_usage_print(void)
{
    printf("usage: kvtier COMMAND [OPTION...]\n\n"
           "Keeps a language model's KV cache in DRAM and on disk.\n\n");
    for (size_t i = 0; i < KVT_ARRAY_LEN(kvt_commands); i++)
        printf("  %-15s %s\n", kvt_commands[i].name, kvt_commands[i].summary);
    printf("\n  kvtier COMMAND --help   options of a command; each has --json, for errors, too\n"
           "  kvtier --version        version and build\n\n"
           "exit codes: 0 ok, 1 found a problem, 2 wrong usage\n");
}

/* How many words of argv[1..] name this command (1 or 2), or 0. */
static int match(const struct kvt_command *command, int argc, char **argv)
{
    const char *space = strchr(command->name, ' ');

    if (!space)
        return strcmp(command->name, argv[1]) == 0;
    size_t first = (size_t)(space - command->name);
    if (argc < 3 || strlen(argv[1]) != first || memcmp(command->name, argv[1], first) != 0)
        return 0;
    return strcmp(space + 1, argv[2]) == 0 ? 2 : 0;
}

const char *kvt_family(const char *word)
{
#define KVT_X(name, summary) \
    if (!strcmp(name, word)) \
        return summary;
    KVT_FAMILIES(KVT_X)
#undef KVT_X
    return NULL;
}

void kvt_family_print(const char *word)
{
    size_t len = strlen(word);

    printf("usage: kvtier %s WHAT [OPTION...]\n\n%s\n\n", word, kvt_family(word));
    for (size_t i = 0; i < KVT_ARRAY_LEN(kvt_commands); i++)
        if (!strncmp(kvt_commands[i].name, word, len) && kvt_commands[i].name[len] == ' ')
            printf("  %-15s %s\n", kvt_commands[i].name + len + 1, kvt_commands[i].summary);
    printf("\n  kvtier %s WHAT --help   its options\n", word);
}

/* The second words of the commands that begin with word, "a, b"; returns how many. */
static int list_family(const char *word, char *text, size_t room)
{
    size_t len = strlen(word), used = 0;
    int found = 0;

    text[0] = '\0';
    for (size_t i = 0; i < KVT_ARRAY_LEN(kvt_commands); i++) {
        if (strncmp(kvt_commands[i].name, word, len) != 0 || kvt_commands[i].name[len] != ' ')
            continue;
        int n = snprintf(text + used, room - used, "%s%s", found++ ? ", " : "",
                         kvt_commands[i].name + len + 1);
        used = n > 0 && used + (size_t)n < room ? used + (size_t)n : room - 1;
    }
    return found;
}

int kvt_unknown_command(int argc, char **argv)
{
    const char *names[KVT_ARRAY_LEN(kvt_commands)];
    char words[128], members[256];

    for (size_t i = 0; i < KVT_ARRAY_LEN(kvt_commands); i++)
        names[i] = kvt_commands[i].name;
    snprintf(words, sizeof(words), "%s", argv[1]);
    const char *near = kvt_nearest(words, names, KVT_ARRAY_LEN(kvt_commands));
    if (argc > 2 && argv[2][0] != '-') { /* "bench codecs" is nearer to "bench codec" */
        snprintf(words, sizeof(words), "%s %s", argv[1], argv[2]);
        const char *both = kvt_nearest(words, names, KVT_ARRAY_LEN(kvt_commands));
        if (both && strchr(both, ' '))
            near = both;
        else
            snprintf(words, sizeof(words), "%s", argv[1]);
    }
    if (argc > 2 && list_family(argv[1], members, sizeof(members)) && !(near && strchr(near, ' ')))
        kvt_cli_error("", "'%s' knows no '%s'; one of: %s", argv[1], argv[2], members);
    else if (near)
        kvt_cli_error("", "unknown command '%s'; did you mean '%s'?", words, near);
    else
        kvt_cli_error("", "unknown command '%s'; see 'kvtier --help'", argv[1]);
    return KVT_EXIT_USAGE;
}

static int run(int argc, char **argv)
{
    if (argc < 2) {
        kvt_usage_print();
        return KVT_EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
        kvt_usage_print();
        return KVT_EXIT_OK;
    }
    if (!strcmp(argv[1], "--version")) {
        printf("%s\n", kvt_build_info());
        return KVT_EXIT_OK;
    }
    for (size_t i = 0; i < KVT_ARRAY_LEN(kvt_commands); i++) {
        int words = match(&kvt_commands[i], argc, argv);
        if (words) {
            kvt_cli_help_form(KVT_HELP_TEXT, kvt_commands[i].summary);
            return kvt_commands[i].run(argc - words, argv + words);
        }
    }
    if (kvt_family(argv[1]) && (argc == 2 || !strcmp(argv[2], "--help"))) {
        kvt_family_print(argv[1]);
        return argc == 2 ? KVT_EXIT_USAGE : KVT_EXIT_OK;
    }
    return kvt_unknown_command(argc, argv);
}

int main(int argc, char **argv)
{
    if (!kvt_standard_hold())
        return KVT_EXIT_PROBLEM;
    int rc = kvt_cli_json_error(argc, argv, kvt_cli_end(run(argc, argv)));

    if (fflush(stdout) || ferror(stdout)) { /* a full disk behind a redirection is a failure */
        kvt_cli_error("", "cannot write to standard output: %s", strerror(errno));
        return rc ? rc : KVT_EXIT_PROBLEM;
    }
    return rc;
}
