/* What every fuzz target shares: one entry point, a reader of its input, a check that cannot be
 * compiled out.
 *
 * A target is one file fuzz_<what>.c with LLVMFuzzerTestOneInput(); it states what must hold by
 * FUZZ_CHECK(). libFuzzer drives it in the build "fuzz"; everywhere else replay_main.c runs the
 * corpus and, for a moment, mutations of it. Same input, same run: no clock, no true randomness.
 * Threads: one. */
#ifndef KVT_TESTS_FUZZ_H
#define KVT_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_CHECK(condition)                                                          \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: must hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                   \
        }                                                                              \
    } while (0)

struct fuzz_input {
    const uint8_t *data;
    size_t size;
};

/* The next bytes, zeros behind the end. Returns how many came. */
static inline size_t fuzz_take(struct fuzz_input *in, void *out, size_t bytes)
{
    size_t have = bytes < in->size ? bytes : in->size;

    memset(out, 0, bytes);
    if (have)
        memcpy(out, in->data, have);
    in->data += have;
    in->size -= have;
    return have;
}

static inline uint8_t fuzz_u8(struct fuzz_input *in)
{
    uint8_t value;

    fuzz_take(in, &value, sizeof value);
    return value;
}

static inline uint16_t fuzz_u16(struct fuzz_input *in)
{
    uint16_t value;

    fuzz_take(in, &value, sizeof value);
    return value;
}

/* Memory of exactly that size, so that a sanitizer sees the first byte past it. */
static inline void *fuzz_memory(size_t bytes)
{
    void *memory = NULL;

    FUZZ_CHECK(posix_memalign(&memory, 64, bytes ? bytes : 1) == 0);
    memset(memory, 0xa5, bytes ? bytes : 1);
    return memory;
}

#endif
