/* Programs that a test runs by a line of words. */
#ifndef KVT_TESTS_WORDS_H
#define KVT_TESTS_WORDS_H

#include <sys/types.h>

/* Start a program with these words (split at blanks, where they stand), its output into `out` (-1:
 * nowhere). Returns its pid; 0: it is not there. */
pid_t words_start(char *words, int out);
/* Wait for its end: its exit code, or -1. */
int words_end(pid_t pid);
/* Both, for a format; -1 also when the program is not there. */
__attribute__((format(printf, 1, 2))) int words_run(const char *format, ...);

#endif
