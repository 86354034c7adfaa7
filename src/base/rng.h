/* Seeded pseudo-random numbers (splitmix64): for fingerprints' secrets, jitter and tests.
 * Never for anything that must be unpredictable; kvt_rng_seed_os() fills a seed from the system. */
#ifndef KVT_BASE_RNG_H
#define KVT_BASE_RNG_H

#include <stdint.h>

struct kvt_rng {
    uint64_t state;
};

static inline uint64_t kvt_rng_next(struct kvt_rng *rng)
{
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [0, bound), bound > 0. */
static inline uint64_t kvt_rng_below(struct kvt_rng *rng, uint64_t bound)
{
    return (uint64_t)(((unsigned __int128)kvt_rng_next(rng) * bound) >> 64);
}

/* A seed from getrandom(2). */
uint64_t kvt_rng_seed_os(void);

#endif
