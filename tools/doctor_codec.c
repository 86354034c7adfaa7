/* The codec's self-check in `kvtier doctor`: one fixed block, coded at every level.
 *
 * Method: the block comes from integer arithmetic alone, so its bits are the same everywhere; the
 * digests below are XXH3-64 of the payloads that the scalar reference makes. Any difference means a
 * miscompiled or broken instruction set.
 * It is no test of quality: tests/ has those.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <xxhash.h>

#include "base/checked.h"
#include "base/rng.h"
#include "doctor.h"
#include "kvtier/codec.h"

#define HEADS 2u
#define DIM 80u /* pieces of 64 and 16: both paths of the splitter */
#define TOKENS 32u
#define ELEMENTS (HEADS * TOKENS * DIM)

struct digest {
    uint64_t payload; /* what coding page 0 gives */
    uint64_t page;    /* what decoding that gives, K then V */
};

/* clang-format off: a table is read by its columns */
static const struct digest digests[] = {
    [KVT_LEVEL_INT4] = {0x88a741c245b2011bu, 0x89fdb28f40e8b801u},
    [KVT_LEVEL_KV4] = {0x854bf46fb7c371d4u, 0xf4e1daa4d5bc4a9fu},
    [KVT_LEVEL_KV5] = {0xe4b13c193e8f18a2u, 0xb8cd3c8dc78c379cu},
    [KVT_LEVEL_KV6] = {0x7cdef650ad84b955u, 0xe7286297a10035e7u},
    [KVT_LEVEL_KV8] = {0xbde78585e3974026u, 0x8264ceff8a016f51u},
    [KVT_LEVEL_RAW] = {0x36fd3bdd2d9e6ed5u, 0xa875582c1c4c1bbau},
};
/* clang-format on */

static const struct kvt_part parts[] = {
    {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = HEADS, .head_dim = DIM},
    {.kind = KVT_PART_V, .dtype = KVT_DTYPE_BF16, .heads = HEADS, .head_dim = DIM},
};

/* bf16 values of magnitude 2^-4 to 2^1, with a constant offset in one channel of K. */
static void fill(uint16_t *k, uint16_t *v)
{
    struct kvt_rng rng = {.state = 7};

    for (uint32_t i = 0; i < ELEMENTS; i++) {
        uint64_t word = kvt_rng_next(&rng);
        k[i] = (uint16_t)((word & 0x807f) | ((123 + (word >> 32) % 5) << 7));
        word = kvt_rng_next(&rng);
        v[i] = (uint16_t)((word & 0x807f) | ((123 + (word >> 32) % 5) << 7));
        if (i % DIM == 11)
            k[i] = 0x41a0; /* 20.0 */
    }
}

static uint64_t page_digest(const uint16_t *k, const uint16_t *v)
{
    const uint64_t both[] = {XXH3_64bits(k, ELEMENTS * sizeof(*k)),
                             XXH3_64bits(v, ELEMENTS * sizeof(*v))};

    return XXH3_64bits(both, sizeof(both));
}

/* Code page 0, decode into page 1, report the digests. 0 or an error of the codec. */
static int run_level(const struct kvt_layout *layout, const struct kvt_pool_desc *pool, int level,
                     struct digest *got)
{
    size_t bytes = kvt_payload_bytes(layout, 0, level);
    void *payload = bytes ? aligned_alloc(16, bytes) : NULL;

    if (!payload)
        return KVT_E_UNSUPPORTED;
    int rc = kvt_encode_block(layout, 0, level, pool, 0, payload, bytes, 0, NULL);
    if (!rc) {
        got->payload = XXH3_64bits(payload, bytes);
        rc = kvt_decode_block(layout, 0, level, payload, bytes, pool, 1);
    }
    free(payload);
    return rc;
}

int kvt_doctor_codec(char *why, size_t why_len)
{
    static _Alignas(64) uint16_t k[2][ELEMENTS],
        v[2][ELEMENTS]; /* page 0 and where it comes back */
    const struct kvt_layout layout = {sizeof(layout), TOKENS, KVT_ARRAY_LEN(parts), parts};
    const struct kvt_part_place places[] = {
        {k, sizeof(k[0]), 2 * TOKENS * DIM, 2 * DIM, 2},
        {v, sizeof(v[0]), 2 * TOKENS * DIM, 2 * DIM, 2},
    };
    const struct kvt_pool_desc pool = {sizeof(pool), KVT_DEVICE_HOST, 2, 2, places};
    size_t used = 0;

    fill(k[0], v[0]);
    used += (size_t)snprintf(why, why_len, "known block coded and decoded at");
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        if (!kvt_level_supported(level) || (size_t)level >= KVT_ARRAY_LEN(digests))
            continue;
        struct digest got = {0};
        int rc = run_level(&layout, &pool, level, &got);
        if (rc) {
            snprintf(why, why_len, "level %s: %s", kvt_level_name(level), kvt_strerror(rc));
            return rc;
        }
        got.page = page_digest(k[1], v[1]);
        if (got.payload != digests[level].payload || got.page != digests[level].page) {
            snprintf(why, why_len,
                     "level %s gives 0x%016" PRIx64 ", 0x%016" PRIx64
                     ", which is wrong: do not use this build",
                     kvt_level_name(level), got.payload, got.page);
            return KVT_E_CORRUPT;
        }
        if (used < why_len)
            used += (size_t)snprintf(why + used, why_len - used, " %s", kvt_level_name(level));
    }
    return 0;
}
