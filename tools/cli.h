/* Shared by every subcommand: option parsing, JSON output, progress. Tools only, not the library.
 */
#ifndef KVT_TOOLS_CLI_H
#define KVT_TOOLS_CLI_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

/* Exit codes of every subcommand. */
enum { KVT_EXIT_OK = 0, KVT_EXIT_PROBLEM = 1, KVT_EXIT_USAGE = 2 };

struct kvt_command {
    const char *name;                  /* "bench codec" style names use two words */
    const char *summary;               /* one line for `kvtier --help` */
    int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns an exit code */
    int built;                         /* 0: only says why it is not in this build */
};

/* One option of a subcommand. Exactly one of flag, text, number, size is set. */
struct kvt_cli_option {
    const char *name;    /* without dashes; "--name value" and "--name=value" are taken */
    const char *metavar; /* in help: "DIR", "N", "SIZE"; DIR and FILE are never empty */
    const char *help;
    int *flag;         /* set to 1 when given */
    const char **text; /* borrowed from argv */
    int64_t *number;   /* decimal integer within [min, max] */
    uint64_t *size;    /* bytes with a unit, "4GiB" */
    int64_t min, max;  /* for number and size; both 0: any */
    const char *words; /* offered by completion, a space between; NULL: those of the metavar */
};

/* Parse argv[1..]. Positional words go to positional[0..max), their number to *count.
 * usage: the line after "usage: kvtier <command> ".
 * Returns 0 to go on; 1 when --help was printed (exit 0); 2 after an error was printed that names
 * the word and the nearest valid option (exit 2). */
int kvt_cli_parse(const char *command, const char *usage, const struct kvt_cli_option *options,
                  size_t option_count, const char **positional, size_t positional_min,
                  size_t positional_max, size_t *count, int argc, char **argv);

/* How --help is printed from now on, and the one line that says what the command is for (borrowed).
 * BASH, ZSH: a branch of a completion script. */
enum kvt_help_form { KVT_HELP_TEXT, KVT_HELP_MAN, KVT_HELP_BASH, KVT_HELP_ZSH };
void kvt_cli_help_form(enum kvt_help_form form, const char *summary);
void kvt_cli_print_help(const char *command, const char *usage,
                        const struct kvt_cli_option *options, size_t count);

/* Pieces of man pages and scripts: text escaped for roff, the head up to the name's dash, examples
 * (optional), exit status and what follows; text inside single quotes of a shell. */
void kvt_man_text(const char *text);
void kvt_man_title(const char *command);
void kvt_man_end(const char *examples);
void kvt_cli_print_quoted(const char *text);

/* Print "kvtier <command>: message" to stderr. */
__attribute__((format(printf, 2, 3))) void kvt_cli_error(const char *command, const char *format,
                                                         ...);

/* Write a JSON document to stdout, one line per call, and free it. Returns KVT_EXIT_OK, or
 * KVT_EXIT_PROBLEM when stdout failed. */
int kvt_cli_json(json_t *document);

/* Progress on standard error: on a terminal a line that changes, which kvt_progress_done() clears;
 * elsewhere a line a minute, none in the first one. */
struct kvt_progress {
    const char *what;
    int on;          /* a terminal */
    int64_t last_ns; /* when it was said; elsewhere from the start on */
};
void kvt_progress_start(struct kvt_progress *progress, const char *what);
void kvt_progress_update(struct kvt_progress *progress, uint64_t done, uint64_t total);
void kvt_progress_done(struct kvt_progress *progress);

/* SIGINT, SIGTERM, SIGHUP and SIGPIPE set this to the signal number; long work polls it and ends
 * cleanly. A second one, later than a second after the first, ends the process at once. */
void kvt_cli_catch_interrupt(void);
int kvt_cli_interrupted(void);
/* For a command that a signal ends as it should. */
void kvt_cli_interrupt_forget(void);
/* The exit code of a command: one that was interrupted has not done what was asked, and has said
 * so. */
int kvt_cli_end(int rc);

/* With --json an error is an object, too: {"error": {text, remedy (where one is said), exit_code}},
 * when the command has written none. Returns rc. */
int kvt_cli_json_error(int argc, char **argv, int rc);

/* "12.3 MiB"; the buffer is the caller's, at least 32 bytes. Returns it. */
const char *kvt_human_bytes(uint64_t bytes, char *buffer);

#endif
