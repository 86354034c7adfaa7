// The Gaussian coders for what nearly all pools are: rows of 128 bf16 elements, 16-byte loads
// (KVT_GPU_CLASS_C4_DENSE, _C5_DENSE). The same bits as encode_gauss.cuh, which takes the rest.
//
// What differs is what the multiprocessor feels: keys and values are two phases of one launch, each
// with little code and no branches on kinds of rows; CTAs ask for their work; and the tile of the
// next unit is asked for while the unit before is coded.
#pragma once

#include "encode_gauss.cuh"

namespace kvt {

// One unit, found beforehand.
struct Tile {
    const char *row;  // this lane's first
    uint8_t *payload;
    int64_t stride;  // of a token
};

// Unit `at` of units [first, first + count) of all records, one record after the other. An entry of
// the table is one unit here.
struct Place {
    uint32_t record, unit;
    __device__ __forceinline__ Place(uint32_t first, uint32_t count, uint32_t at)
        : record(at / count), unit(first + at % count)
    {
    }
    __device__ __forceinline__ const kvt_gpu_part *part(const kvt_gpu_coding &job) const
    {
        return reinterpret_cast<const kvt_gpu_part *>(job.parts) + unit;
    }
    __device__ __forceinline__ Tile tile(const kvt_gpu_coding &job, const Lane &lane) const
    {
        const kvt_gpu_part *at = part(job);
        int64_t stride = __ldg(&at->stride_token);
        return {reinterpret_cast<const char *>(__ldg(&at->base)) +
                    __ldg(&at->stride_block) * job.block[record] + stride * lane.row + lane.c * 16,
                global(reinterpret_cast<uint8_t *>(job.payload[record]) + __ldg(&at->payload_at)),
                stride};
    }
};

// Turns of the CTA, a unit a warp each. They are dealt as CTAs ask for them, since these do not
// begin together where an engine's kernel leaves the multiprocessors one by one. The turn after the
// next is asked for while a turn goes on.
struct Turns {
    uint32_t now, next, side;  // side: of the two words that are written in turn
    __device__ __forceinline__ Turns(const kvt_gpu_coding &job, uint32_t *shared)
    {
        if (threadIdx.x == 0)
            shared[0] = atomicAdd(reinterpret_cast<uint32_t *>(job.turns), 2u) + 1u;
        __syncthreads();
        now = shared[0], next = now + 1, side = 0;
    }
    __device__ __forceinline__ void ask(const kvt_gpu_coding &job, uint32_t *asked) const
    {
        if (threadIdx.x == 0)
            asked[side] = atomicAdd(reinterpret_cast<uint32_t *>(job.turns), 1u) + 1u;
    }
    // After a barrier.
    __device__ __forceinline__ void go_on(const uint32_t *asked)
    {
        now = next, next = asked[side], side ^= 1u;
    }
};

// All 4 KiB of a tile, a line a lane, into the cache that all multiprocessors share.
__device__ __forceinline__ void ask_for(const Tile &tile, const Lane &lane)
{
    const char *line = tile.row + (lane.c >> 1) * 8 * tile.stride + (lane.c & 1u) * 128 - lane.c * 16;
    prefetch(global(line));
}

__device__ __forceinline__ void load_words(const char *row, uint4 (&words)[4])
{
#pragma unroll
    for (int q = 0; q < 4; q++)
        words[q] = *reinterpret_cast<const uint4 *>(global(row + q * 64));
}

__device__ __forceinline__ void to_floats(const uint4 (&words)[4], float *x)
{
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const uint32_t w[4] = {words[q].x, words[q].y, words[q].z, words[q].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[q * 8 + 2 * i] = __uint_as_float(w[i] << 16);
            x[q * 8 + 2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
    }
}

// As row_sum_of<128>: the same additions, each made by one lane of the row that has its terms.
template <typename F> __device__ __forceinline__ float dense_row_sum(F term, const Lane &lane)
{
    float v[8];
#pragma unroll
    for (int e = 0; e < 8; e++)
        v[e] = __fadd_rn(__fadd_rn(term(e), term(16 + e)), __fadd_rn(term(8 + e), term(24 + e)));
    const bool odd = lane.c & 2, upper = lane.c & 1;
    float w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {  // e = 2j, or 2j + 1
        float give = odd ? v[2 * j] : v[2 * j + 1], keep = odd ? v[2 * j + 1] : v[2 * j];
        w[j] = __fadd_rn(keep, __shfl_xor_sync(FULL, give, 2));
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {  // the second bit of e
        float give = upper ? w[j] : w[j + 1], keep = upper ? w[j + 1] : w[j];
        w[j] = __fadd_rn(keep, __shfl_xor_sync(FULL, give, 1));
    }
    float sum = __fadd_rn(w[0], w[2]);
    sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 2));
}

// n / m, correctly rounded, of integers from 0 to 2^21 and 1 to 2^21: the steps of a division whose
// operands need no scaling. r: about 1 / m.
__device__ __forceinline__ float small_quotient(float n, float m, float r)
{
    r = __fmaf_rn(r, __fmaf_rn(-m, r, 1.0f), r);
    float q = __fmul_rn(n, r);
    q = __fmaf_rn(__fmaf_rn(-m, q, n), r, q);
    return __fmaf_rn(__fmaf_rn(-m, q, n), r, q);
}

struct Width {  // the step width that was chosen
    uint32_t best;
    float num, den, ratio;
};

// The width with the best num^2 / den, the first of equal ones. The quotients are compared as they
// are about; those nearer to each other than their errors (2^-22) could explain are divided.
__device__ __forceinline__ Width choose_width(const int (&num)[3], const int (&den)[3])
{
    float n[3], m[3], r[3], score[3];
#pragma unroll
    for (int k = 0; k < 3; k++) {
        n[k] = static_cast<float>(num[k]), m[k] = static_cast<float>(den[k]);
        r[k] = about_reciprocal(m[k]);
        score[k] = __fmul_rn(__fmul_rn(n[k], n[k]), r[k]);
    }
    float low = fminf(score[0], score[1]), high = fmaxf(score[0], score[1]);
    float second = fmaxf(low, fminf(high, score[2]));
    if (!(__fmul_rn(second, 1.0f + 0x1p-20f) < fmaxf(high, score[2])))
#pragma unroll
        for (int k = 0; k < 3; k++)
            score[k] = __fdiv_rn(__fmul_rn(n[k], n[k]), m[k]);
    Width width = {0, n[0], m[0], 0.0f};
    float top = score[0], reciprocal = r[0];
#pragma unroll
    for (int k = 1; k < 3; k++)
        if (score[k] > top) {
            top = score[k], reciprocal = r[k];
            width.best = k, width.num = n[k], width.den = m[k];
        }
    width.ratio = small_quotient(width.num, width.den, reciprocal);
    return width;
}

template <int BITS> struct Dense : Gauss<BITS> {
    using Base = Gauss<BITS>;
    using B = Book<BITS>;
    using Base::Base;

    // As Gauss::row. Keys' noise is computed whether it is wanted or not.
    template <bool KEY>
    __device__ __forceinline__ Row dense_row(const float *y, const Lane &lane, uint8_t *stage,
                                             uint32_t token) const
    {
        Row out;
        out.energy = dense_row_sum([&](int i) { return __fmul_rn(y[i], y[i]); }, lane);
        out.fine = (__float_as_uint(out.energy) & 0x7fffffffu) < 0x7f800000u;
        float sigma = __fsqrt_rn(__fmul_rn(out.energy, 1.0f / 128));
        bool silent = sigma == 0.0f || !out.fine;
        float factor = silent ? 0.0f : __fdiv_rn(B::TWICE_UNIT, sigma);
        int num[3], den[3];
        uint32_t codes[8];
        uint32_t squares = 0;
        this->template look_up<128, KEY>(y, factor, num, den, codes, squares);
        const Width width = choose_width(num, den);
        out.scale = silent ? 0u : float_bf16(__fdiv_rn(width.ratio, factor));
        out.noise = out.energy;
        if constexpr (KEY) {
            squares += __shfl_xor_sync(FULL, squares, 1);
            squares += __shfl_xor_sync(FULL, squares, 2);
            const float sum = static_cast<float>(squares & 0x7fffffu);
            float step = __fmul_rn(bf16_float(out.scale), factor);
            float cross = __fmul_rn(step, width.num);
            float rest = __fsub_rn(__fmul_rn(__fmul_rn(step, step), width.den), cross);
            float noise = __fadd_rn(__fsub_rn(sum, cross), rest);
            if (!silent)
                out.noise = noise > 0.0f ? __fdiv_rn(__fdiv_rn(noise, factor), factor) : 0.0f;
        }
        Base::template put<128>(codes, width.best, stage, token, lane);
        return out;
    }
};

// As take_offsets().
__device__ __forceinline__ float dense_offsets(const Tile &tile, const Lane &lane, uint8_t *out,
                                               float *stored)
{
    Means<128> means;
    uint4 words[2][4];
    float x[2][32], left[4];
#pragma unroll
    for (int h = 0; h < 2; h++)
        load_words(tile.row + 8 * h * tile.stride, words[h]);
#pragma unroll
    for (int h = 0; h < 2; h++)
        to_floats(words[h], x[h]);
    channel_means<128>(x, lane, means);
    choose_offsets<128>(means, lane, out, stored, left);
    return residue_of<128>(left);
}

// One tile, into the stage and out. As encode_piece().
template <bool KEY, int BITS>
__device__ __forceinline__ bool encode_tile(const Tile &tile, const Dense<BITS> &coder,
                                            uint8_t *stage, const uint32_t *masks, const Lane &lane,
                                            Energy &energy)
{
    constexpr uint32_t scales_at = 256 * BITS;
    const float *stored = reinterpret_cast<const float *>(stage) + 128 + lane.c * 8;
    const char *row = tile.row;
    bool fine = true;
    if constexpr (KEY)
        energy.residue = dense_offsets(tile, lane, stage + scales_at + 32,
                                       reinterpret_cast<float *>(stage) + 128);
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
        uint32_t token = lane.row + 8 * h;
        float x[32];
        {
            uint4 words[4];
            load_words(row, words);
#pragma unroll
            for (int q = 0; q < 4; q++) {
                uint4 m = *reinterpret_cast<const uint4 *>(masks + q * 16 + lane.c * 4);
                words[q].x ^= m.x, words[q].y ^= m.y, words[q].z ^= m.z, words[q].w ^= m.w;
            }
            to_floats(words, x);
        }
        row += 8 * tile.stride;
        if constexpr (KEY) {
#pragma unroll
            for (int q = 0; q < 4; q++)
#pragma unroll
                for (int e = 0; e < 8; e++)
                    x[q * 8 + e] = __fsub_rn(x[q * 8 + e], stored[q * 32 + e]);
            __syncwarp();
        }
        transform<128>(x, lane);
        const Row result = coder.template dense_row<KEY>(x, lane, stage, token);
        fine &= result.fine;
        if (lane.c == 0)
            *reinterpret_cast<uint16_t *>(stage + scales_at + 2 * token) =
                static_cast<uint16_t>(result.scale);
        if constexpr (KEY) {
            float rows = __fmul_rn(result.energy, 1.0f / 128);
            float noise = __fmul_rn(result.noise, 1.0f / 128);
            if (h == 0)
                energy.rows[0] = rows, energy.noise[0] = noise;
            else
                energy.rows[1] = rows, energy.noise[1] = noise;
        }
    }
    flush_piece(stage, scales_at + (KEY ? 64 : 32), tile.payload, lane);
    return fine;
}

// The turns [from, end) of a phase: units [first, first + count) of all records.
template <bool KEY, int BITS>
__device__ __forceinline__ void encode_phase(const kvt_gpu_coding &job, uint32_t first,
                                             uint32_t count, uint32_t from, uint32_t end,
                                             Turns &turns, uint32_t *asked,
                                             const Dense<BITS> &coder, uint8_t *stage,
                                             const uint32_t *masks, const Lane &lane)
{
    const uint32_t total = count * job.records, warp = threadIdx.x / 32;
#pragma unroll 1
    while (turns.now < end) {
        turns.ask(job, asked);
        uint32_t at = (turns.now - from) * KVT_GPU_ENCODE_WARPS + warp;
        uint32_t after = (turns.next - from) * KVT_GPU_ENCODE_WARPS + warp;
        if (turns.next < end && after < total)
            ask_for(Place(first, count, after).tile(job, lane), lane);
        if (at < total) {
            const Place place(first, count, at);
            const Tile tile = place.tile(job, lane);
            Energy energy;
            bool fine = encode_tile<KEY>(tile, coder, stage, masks, lane, energy);
            fine = __all_sync(FULL, fine);
            bool good = fine;
            const kvt_gpu_part *part = place.part(job);
            if (KEY && fine && job.guard && part->guard_ratio > 0.0f)
                good = passes(*part, tile.row - tile.stride * lane.row - lane.c * 16, energy, lane,
                              reinterpret_cast<float *>(stage));
            if (!good && lane.id == 0)
                atomicMin(reinterpret_cast<uint32_t *>(job.status) + place.record,
                          part->order_at * 2 +
                              (fine ? KVT_GPU_STATUS_GUARD : KVT_GPU_STATUS_NONFINITE));
        }
        __syncthreads();
        turns.go_on(asked);
    }
}

template <int BITS> __device__ __forceinline__ void encode_dense(const kvt_gpu_coding &job)
{
    KVT_LAUNCH_SHARED(shared);
    Lane lane;
    uint32_t *masks = reinterpret_cast<uint32_t *>(shared + KVT_GPU_LEVELS_BYTES);
    uint32_t *asked =
        reinterpret_cast<uint32_t *>(shared + KVT_GPU_LEVELS_BYTES + KVT_GPU_SIGNS_BYTES);
    uint8_t *stages = reinterpret_cast<uint8_t *>(asked) + KVT_GPU_TURNS_BYTES;
    uint8_t *stage = stages + threadIdx.x / 32 * Book<BITS>::STAGE;
    const uint32_t keys = job.key_units, values = job.unit_count - keys, own = KVT_GPU_ENCODE_WARPS;
    const uint32_t key_turns = (keys * job.records + own - 1) / own;
    const uint32_t end = key_turns + (values * job.records + own - 1) / own;
    Turns turns(job, asked + 2);
    const uint32_t warp = threadIdx.x / 32;
    if (turns.now < key_turns && turns.now * own + warp < keys * job.records)
        ask_for(Place(0, keys, turns.now * own + warp).tile(job, lane), lane);
    fill_signs(masks);
    Dense<BITS> coder(reinterpret_cast<uint32_t *>(shared), lane);
    encode_phase<true>(job, 0, keys, 0, key_turns, turns, asked, coder, stage, masks, lane);
    encode_phase<false>(job, keys, values, key_turns, end, turns, asked, coder, stage, masks, lane);
}

}  // namespace kvt
