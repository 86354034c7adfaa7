/* Arithmetic that reports overflow, and byte-order helpers. */
#ifndef KVT_BASE_CHECKED_H
#define KVT_BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* false on overflow; *out is then unspecified. */
#define kvt_add_ok(a, b, out) (!__builtin_add_overflow((a), (b), (out)))
#define kvt_mul_ok(a, b, out) (!__builtin_mul_overflow((a), (b), (out)))

/* v rounded up to a multiple of unit (a power of two); the caller knows that it fits. */
static inline uint64_t kvt_round_up(uint64_t v, uint64_t unit)
{
    return (v + unit - 1) & ~(unit - 1);
}

#define KVT_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define KVT_MIN(a, b) ((a) < (b) ? (a) : (b))
#define KVT_MAX(a, b) ((a) > (b) ? (a) : (b))

#endif
