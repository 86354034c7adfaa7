/* kvtier help: the options of a command as text or as a man page; the list of commands; scripts
 * that complete them in bash and zsh. All of it comes from the tables that the commands parse
 * their words with: each command is asked for its --help in another form.
 * Threads: one.
 */
#include <stdio.h>
#include <string.h>

#include "about.h"
#include "base/checked.h"
#include "cli.h"
#include "commands.h"

#define COMMAND "help"

/* Ask a command for its help in the form. */
static int ask(const struct kvt_command *command, enum kvt_help_form form)
{
    char name[32], help[] = "--help";
    char *argv[] = {name, help, NULL};

    snprintf(name, sizeof(name), "%s", command->name);
    kvt_cli_help_form(form, command->summary);
    return command->run(2, argv);
}

static const struct kvt_command *find(const char *first, const char *second)
{
    char name[64];

    snprintf(name, sizeof(name), "%s%s%s", first, second ? " " : "", second ? second : "");
    for (size_t i = 0; i < kvt_command_count; i++)
        if (!strcmp(kvt_commands[i].name, name))
            return &kvt_commands[i];
    return NULL;
}

/* The first word of command i, if no command before it has it too. */
static int first_word(size_t i, char *word, size_t room)
{
    size_t len = strcspn(kvt_commands[i].name, " ");

    snprintf(word, room, "%.*s", (int)len, kvt_commands[i].name);
    for (size_t k = 0; k < i; k++)
        if (!strncmp(kvt_commands[k].name, word, len) && strchr(" ", kvt_commands[k].name[len]))
            return 0;
    return 1;
}

/* ---- the page of the whole tool ------------------------------------------------------------ */

static int print_main_page(void)
{
    kvt_man_title("");
    kvt_man_text("keeps a language model's KV cache in DRAM and on disk");
    printf("\n.SH SYNOPSIS\n.B kvtier\n.I COMMAND\n[\\fIOPTION\\fR...]\n.SH DESCRIPTION\n");
    kvt_man_text("kvtier keeps the key/value cache of a language model alive beyond the engine's "
                 "memory: in DRAM and on disk, coded to little more than a quarter of its size. A "
                 "prompt that "
                 "comes back is loaded instead of computed again. This tool shows, checks and "
                 "measures what the library does; every command takes --help and --json.");
    printf("\n.SH COMMANDS\n");
    for (size_t i = 0; i < kvt_command_count; i++) {
        printf(".TP\n.B %s\n", kvt_commands[i].name);
        kvt_man_text(kvt_commands[i].summary);
        putchar('\n');
    }
    printf(".SH ENVIRONMENT\n.TP\n.B KVTIER_CONFIG\n");
    kvt_man_text("options of the library, \"key=value,...\", applied over those of a program; "
                 "kvtier stat --effective lists them");
    printf("\n.TP\n.B KVTIER_CODEC_ISA\nforces the instruction set of the codec: scalar, avx2\n");
    kvt_man_end(NULL);
    return KVT_EXIT_OK;
}

/* The page of a first word that commands share: what each of them is for, and its own page. */
static int print_family_page(const char *word)
{
    const struct kvt_about *about = kvt_about(word);
    size_t len = strlen(word);

    kvt_man_title(word);
    kvt_man_text(kvt_family(word));
    printf("\n.SH SYNOPSIS\n.B kvtier %s\n.I WHAT\n[\\fIOPTION\\fR...]\n.SH DESCRIPTION\n", word);
    kvt_man_text(about ? about->text : kvt_family(word));
    printf("\n.SH COMMANDS\n");
    for (size_t i = 0; i < kvt_command_count; i++) {
        const char *name = kvt_commands[i].name;
        if (strncmp(name, word, len) != 0 || name[len] != ' ')
            continue;
        printf(".TP\n.BR kvtier\\-%s\\-%s (1)\n", word, name + len + 1);
        kvt_man_text(kvt_commands[i].summary);
        putchar('\n');
    }
    kvt_man_end(about ? about->examples : NULL);
    return KVT_EXIT_OK;
}

/* ---- completion ---------------------------------------------------------------------------- */

/* Branches for commands of two words: word -> its second words. bash sets a variable, zsh another
 * form of it. */
static void print_families(const char *format)
{
    char word[32];

    for (size_t i = 0; i < kvt_command_count; i++) {
        if (!strchr(kvt_commands[i].name, ' ') || !first_word(i, word, sizeof(word)))
            continue;
        char members[512] = "";
        size_t used = 0, len = strlen(word);
        for (size_t k = i; k < kvt_command_count; k++)
            if (!strncmp(kvt_commands[k].name, word, len) && kvt_commands[k].name[len] == ' ')
                used += (size_t)snprintf(members + used, sizeof(members) - used, "%s%s",
                                         used ? " " : "", kvt_commands[k].name + len + 1);
        printf(format, word, members);
    }
}

static int print_branches(enum kvt_help_form form)
{
    int rc = KVT_EXIT_OK;

    for (size_t i = 0; i < kvt_command_count && !rc; i++)
        if (kvt_commands[i].built)
            rc = ask(&kvt_commands[i], form);
    return rc;
}

static int print_bash(void)
{
    char word[32];

    printf("# bash completion for kvtier, made by 'kvtier help --complete bash'\n"
           "_kvtier()\n{\n"
           "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}\n"
           "    local command=${COMP_WORDS[1]} words=2 members='' options='' paths='' values='' "
           "choices=''\n"
           "    local commands='");
    for (size_t i = 0; i < kvt_command_count; i++)
        if (first_word(i, word, sizeof(word)))
            printf("%s ", word);
    printf("--help --version'\n"
           "    COMPREPLY=()\n"
           "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
           "        mapfile -t COMPREPLY < <(compgen -W \"$commands\" -- \"$current\")\n"
           "        return\n"
           "    fi\n"
           "    case $command in\n");
    print_families("    %s) members='%s' words=3 ;;\n");
    printf("    esac\n"
           "    if [ -n \"$members\" ] && [ \"$COMP_CWORD\" -eq 2 ]; then\n"
           "        mapfile -t COMPREPLY < <(compgen -W \"$members --help\" -- \"$current\")\n"
           "        return\n"
           "    fi\n"
           "    [ $words -eq 3 ] && command=\"$command ${COMP_WORDS[2]}\"\n"
           "    case $command in\n");
    int rc = print_branches(KVT_HELP_BASH);
    printf("    esac\n"
           "    if [ -n \"$choices\" ]; then\n"
           "        mapfile -t COMPREPLY < <(compgen -W \"$choices\" -- \"$current\")\n"
           "    elif [[ \" $values \" == *\" $previous \"* ]]; then\n"
           "        return # a value that nobody can guess\n"
           "    elif [[ $current == -* && \" $paths \" != *\" $previous \"* ]]; then\n"
           "        mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$current\")\n"
           "    elif [ \"$command\" = help ]; then\n"
           "        mapfile -t COMPREPLY < <(compgen -W \"$commands\" -- \"$current\")\n"
           "    else\n"
           "        mapfile -t COMPREPLY < <(compgen -f -- \"$current\")\n"
           "    fi\n"
           "}\n"
           "complete -o filenames -F _kvtier kvtier\n");
    return rc;
}

static int print_zsh(void)
{
    char word[32];

    printf("#compdef kvtier\n# zsh completion for kvtier, made by 'kvtier help --complete zsh'\n"
           "_kvtier() {\n"
           "    local command=$words[2]\n"
           "    local -a commands members\n"
           "    commands=(\n");
    for (size_t i = 0; i < kvt_command_count; i++) {
        if (!first_word(i, word, sizeof(word)))
            continue;
        printf("        '%s:", word);
        kvt_cli_print_quoted(kvt_family(word) ? kvt_family(word) : kvt_commands[i].summary);
        printf("'\n");
    }
    printf("    )\n"
           "    if (( CURRENT == 2 )); then\n"
           "        _describe command commands\n"
           "        return\n"
           "    fi\n"
           "    case $command in\n");
    print_families("    %s) members=(%s) ;;\n");
    printf("    esac\n"
           "    if (( $#members )); then\n"
           "        if (( CURRENT == 3 )); then\n"
           "            _describe command members\n"
           "            return\n"
           "        fi\n"
           "        command=\"$command $words[3]\"\n"
           "        shift words\n"
           "        (( CURRENT-- ))\n"
           "    fi\n"
           "    shift words\n"
           "    (( CURRENT-- ))\n"
           "    case $command in\n");
    int rc = print_branches(KVT_HELP_ZSH);
    printf("    esac\n"
           "}\n"
           "_kvtier \"$@\"\n");
    return rc;
}

/* ---- the command --------------------------------------------------------------------------- */

static int list_json(void)
{
    json_t *list = json_array();

    for (size_t i = 0; i < kvt_command_count; i++)
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:b}", "name", kvt_commands[i].name, "summary",
                                        kvt_commands[i].summary, "built", kvt_commands[i].built));
    return kvt_cli_json(json_pack("{s:o}", "commands", list));
}

static int complete(const char *shell)
{
    if (!strcmp(shell, "bash"))
        return print_bash();
    if (!strcmp(shell, "zsh"))
        return print_zsh();
    kvt_cli_error(COMMAND, "--complete: no script for '%s'; bash or zsh", shell);
    return KVT_EXIT_USAGE;
}

int kvt_cmd_help(int argc, char **argv)
{
    int man = 0, json = 0;
    const char *shell = NULL, *given[2] = {NULL, NULL};
    size_t words = 0;
    const struct kvt_cli_option options[] = {
        {.name = "man", .help = "as the source of a man page", .flag = &man},
        {.name = "complete",
         .metavar = "SHELL",
         .help = "a script that completes commands and options, for bash or zsh",
         .text = &shell},
        {.name = "json", .help = "the list of commands as one JSON object", .flag = &json},
    };
    int rc = kvt_cli_parse(COMMAND, "[COMMAND] [--man] [--complete SHELL] [--json]", options,
                           KVT_ARRAY_LEN(options), given, 0, 2, &words, argc, argv);

    if (rc)
        return rc == 1 ? KVT_EXIT_OK : rc;
    if (shell)
        return complete(shell);
    if (json)
        return list_json();
    if (!words && man)
        return print_main_page();
    if (!words) {
        kvt_usage_print();
        return KVT_EXIT_OK;
    }
    if (words == 1 && kvt_family(given[0])) {
        if (man)
            return print_family_page(given[0]);
        kvt_family_print(given[0]);
        return KVT_EXIT_OK;
    }
    const struct kvt_command *command = find(given[0], given[1]);
    if (!command)
        return kvt_unknown_command(
            words == 2 ? 3 : 2,
            (char *[]){NULL, (char *)(uintptr_t)given[0], (char *)(uintptr_t)given[1], NULL});
    return ask(command, man ? KVT_HELP_MAN : KVT_HELP_TEXT);
}
