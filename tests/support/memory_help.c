/* See memory_help.h. */
#include "support/memory_help.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include <cmocka.h>

void memory_small_pages(void)
{
    (void)prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
}

static uint64_t rollup(const char *name)
{
    FILE *file = fopen("/proc/self/smaps_rollup", "re");
    unsigned long long kib = 0;
    char line[256];
    bool found = false;

    assert_non_null(file);
    while (!found && fgets(line, sizeof(line), file))
        found = strncmp(line, name, strlen(name)) == 0 &&
                sscanf(line + strlen(name), ": %llu kB", &kib) == 1;
    (void)fclose(file);
    assert_true(found);
    return kib << 10;
}

uint64_t memory_resident_bytes(void)
{
    return rollup("Rss");
}

uint64_t memory_own_bytes(void)
{
    return rollup("Anonymous");
}
