/* What a program that tries to break the store has tried, as one line that scripts/tally.py adds up
 * over all programs and builds: {"kill9": {"tried": 300, "failed": 0}}. The names of the practices
 * are those of that script. */
#ifndef KVT_TESTS_TALLY_H
#define KVT_TESTS_TALLY_H

#include <stdint.h>
#include <stdio.h>

/* Print the line. Call it once a practice, also when a test has failed: from the teardown of the
 * group, or at the end of main(). */
static inline void tally_print(const char *practice, uint64_t tried, uint64_t failed)
{
    printf("{\"%s\": {\"tried\": %llu, \"failed\": %llu}}\n", practice, (unsigned long long)tried,
           (unsigned long long)failed);
    fflush(stdout);
}

#endif
