/* What a program that tries to break things has tried: the line of support/tally.h, printed at the
 * program's end whatever ends it, an abort or SIGTERM included. Threads: one. */
#ifndef KVT_TESTS_PRACTICE_H
#define KVT_TESTS_PRACTICE_H

#include <stdint.h>

/* Once, before the first point. name: static. */
void practice_begin(const char *name);
/* A point begins; it has failed unless practice_passed() follows. */
void practice_point(void);
void practice_passed(void);
/* `tried` points at once, of which `failed` did. */
void practice_add(uint64_t tried, uint64_t failed);
/* In a child: the line is the parent's. */
void practice_forget(void);
/* Whether a long form is to go on: KVT_SOAK_SECONDS is set and not over since practice_begin(). */
int practice_goes_on(void);

#endif
