/* The quality guard (guard.h). */
#include <string.h>

#include "codec/guard.h"

#define TOKENS KVT_TILE_TOKENS

float kvt_guard_ratio(int level)
{
    switch (level) {
    case KVT_LEVEL_KV4:
        return 0x1.f9f6e4p+4f; /* 15 dB */
    case KVT_LEVEL_KV5:
        return 0x1.f8c41p+5f; /* 18 dB: what 12 dB at kv4 becomes */
    case KVT_LEVEL_KV6:
        return 0x1.3dbb36p+6f; /* 19 dB: what 8 dB at kv4 becomes */
    case KVT_LEVEL_KV8:
        return 100.0f; /* 20 dB */
    default:
        return 0.0f;
    }
}

static float tree_sum_tokens(const float *values)
{
    float sum[TOKENS];
    memcpy(sum, values, sizeof(sum));
    for (uint32_t half = TOKENS / 2; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            sum[i] = sum[i] + sum[i + half];
    return sum[0];
}

/* Energy around the mean: that around the stored means, less what these leave of the mean. */
static float tile_signal(const struct kvt_tile_energy *energy)
{
    float signal = tree_sum_tokens(energy->rows) - (float)TOKENS * energy->residue;
    return signal > 0.0f ? signal : 0.0f;
}

struct kvt_guard_verdict kvt_guard_judge(int level, const struct kvt_tile_energy *energy)
{
    struct kvt_guard_verdict verdict = {
        .signal = tile_signal(energy),
        .noise = tree_sum_tokens(energy->noise),
    };
    verdict.pass = verdict.noise * kvt_guard_ratio(level) <= verdict.signal;
    /* A row's centred energy is at least (sqrt(r) - sqrt(m))^2 >= r/4 - m/3, r its energy around
     * the stored means, m the residue: a bound without a second look at the data, rounded down. */
    for (uint32_t t = 0; t < TOKENS; t++)
        verdict.pass &=
            energy->noise[t] * 4.01f + energy->residue * 0.334f <= energy->rows[t] * 0.249f;
    return verdict;
}

int kvt_guard_appeal(int level, int dtype, const struct kvt_tile_energy *energy,
                     const float *centred, const float *square_sums)
{
    /* (half a unit in the last place / |x|)^2, at its smallest: 2^-9, 2^-12, 2^-25 squared */
    float rounding = dtype == KVT_DTYPE_BF16  ? 0x1p-18f
                     : dtype == KVT_DTYPE_F16 ? 0x1p-24f
                                              : 0x1p-50f;
    float allowed[TOKENS];
    for (uint32_t t = 0; t < TOKENS; t++) {
        allowed[t] = square_sums[t] * rounding;
        /* written so that NaN fails */
        if (!(energy->noise[t] * 4.0f <= centred[t]) && !(energy->noise[t] <= allowed[t]))
            return 0;
    }
    float noise = tree_sum_tokens(energy->noise);
    return noise * kvt_guard_ratio(level) <= tile_signal(energy) ||
           noise <= tree_sum_tokens(allowed);
}
