/* Run the built kvtier binary from a test and keep what it said. */
#ifndef KVT_TEST_RUN_TOOL_H
#define KVT_TEST_RUN_TOOL_H

#include <stddef.h>

struct tool_run {
    int code;        /* exit code; 128 + signal when it was killed */
    char out[65536]; /* standard output, zero-terminated, cut when longer */
    char err[16384]; /* standard error, likewise */
};

/* Run program with argv (NULL-terminated, argv[0] included). input: text on standard input, or NULL
 * for none. env: one "NAME=value" to add, or NULL. Fails the test when the program cannot be
 * started. */
void tool_run(struct tool_run *run, const char *program, const char *const argv[],
              const char *input, const char *env);

#endif
