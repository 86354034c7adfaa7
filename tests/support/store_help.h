/* For tests of the store half: cmocka's includes in their order, and the seed of a run. */
#ifndef KVT_TESTS_STORE_HELP_H
#define KVT_TESTS_STORE_HELP_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

/* KVT_TEST_SEED, or a fixed one; printed, so that a failure can be repeated. */
static inline uint64_t test_seed(void)
{
    const char *text = getenv("KVT_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : 20261129u;

    printf("           seed %llu\n", (unsigned long long)seed);
    return seed;
}

#endif
