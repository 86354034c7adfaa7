// The Gaussian coders (kv4; keys of kv5): Lloyd-Max levels, the step width chosen out of three.
//
// t = rne(y * factor), by the addition of 1.5 * 2^23, whose low bits then are t. One lookup of t gives
// the signed levels for all three widths, a byte each, and in the fourth byte the codes; there is one
// copy of the table per lane, so lookups never collide. Sums are of integers, in any order: dot
// products of 4 levels at a time.
// The address of an entry is made by two fused multiply-adds, as those units are the least busy: t/512
// + 1/2 is exact and saturates at the ends of the table, whatever t is; and a float that is a
// multiple of 2^-149 below 2^-126 has that multiple for its bits.
#pragma once

#include "encode.cuh"

namespace kvt {

template <int BITS_> struct Book;
template <> struct Book<4> {
    static constexpr int COUNT = 8, STAGE = KVT_GPU_C4_STAGE_BYTES, LARGEST = 243;
    static constexpr float TWICE_UNIT = 0x1.73cedap+6f;
    static constexpr int level(int i)
    {
        constexpr int table[COUNT] = {6, 18, 31, 44, 58, 75, 96, 127};
        return table[i];
    }
    static constexpr int threshold(int width, int i)
    {
        constexpr int table[3][COUNT - 1] = {{24, 49, 75, 102, 133, 171, 223},
                                             {22, 45, 68, 93, 121, 156, 203},
                                             {26, 53, 82, 111, 145, 186, 243}};
        return table[width][i];
    }
};
template <> struct Book<5> {
    static constexpr int COUNT = 16, STAGE = KVT_GPU_C5_STAGE_BYTES, LARGEST = 253;
    static constexpr float TWICE_UNIT = 0x1.379582p+6f;
    static constexpr int level(int i)
    {
        constexpr int table[COUNT] = {3,  8,  13, 18, 24, 29, 35,  41,
                                      47, 54, 61, 70, 79, 90, 105, 127};
        return table[i];
    }
    static constexpr int threshold(int width, int i)
    {
        constexpr int table[3][COUNT - 1] = {
            {11, 21, 31, 42, 53, 64, 76, 88, 101, 115, 131, 149, 169, 195, 232},
            {10, 19, 28, 38, 48, 58, 69, 80, 92, 105, 119, 136, 154, 177, 211},
            {12, 23, 34, 46, 58, 70, 83, 96, 110, 125, 143, 162, 184, 213, 253}};
        return table[width][i];
    }
};

// What one lookup gives. Levels by width from the lowest byte on, and the code: the index of the
// first width, the sign, then whether the second width's index is one more, and the third's one
// less. It never is more.
template <int BITS> struct Entries {
    using B = Book<BITS>;
    static constexpr int REACH = 256, SIZE = 2 * REACH + 1;
    static_assert(REACH > B::LARGEST && SIZE == KVT_GPU_LEVELS, "the table ends beyond all thresholds");
    uint32_t word[SIZE];

    static constexpr uint32_t entry(int t)
    {
        uint32_t word = 0;
        int index[3] = {}, size = t < 0 ? -t : t;
        for (int k = 0; k < 3; k++) {
            for (int i = 0; i < B::COUNT - 1; i++)
                index[k] += B::threshold(k, i) <= size;
            int level = B::level(index[k]);
            word |= static_cast<uint32_t>((t < 0 ? -level : level) & 255) << (8 * k);
        }
        uint32_t code = index[0] | (t < 0 ? B::COUNT : 0) | (index[1] - index[0]) << BITS |
                        (index[0] - index[2]) << (BITS + 1);
        return word | code << 24;
    }
    constexpr Entries() : word()
    {
        for (int at = 0; at < SIZE; at++)
            word[at] = entry(at - REACH);
    }
};
template <int BITS> __device__ constexpr Entries<BITS> entries;

template <int BITS_> struct Gauss {
    static constexpr int BITS = BITS_;
    __device__ static constexpr uint32_t bits() { return BITS; }
    __device__ static constexpr bool rotated() { return true; }
    using B = Book<BITS>;
    static constexpr int SIZE = Entries<BITS>::SIZE;
    static constexpr uint32_t EACH = 0x01010101u;

    float base;  // shared address of this lane's entry of -REACH, as a multiple of 2^-149

    // Fill the table. All threads of the CTA.
    __device__ Gauss(uint32_t *table, const Lane &lane)
    {
        for (int at = threadIdx.x; at < SIZE * 8; at += blockDim.x) {
            uint32_t word = entries<BITS>.word[at / 8];
            reinterpret_cast<uint4 *>(table)[at] = make_uint4(word, word, word, word);
        }
        __syncthreads();
        base = __uint_as_float(shared_address(table) + lane.id * 4);
    }

    // moved: t + MAGIC.
    __device__ __forceinline__ uint32_t lookup(float moved) const
    {
        float place = fma_saturated(moved, 1.0f / 512, 0.5f - MAGIC / 512);
        float address = __fmaf_rn(place, 0x1p-133f, base);  // 512 entries of 128 bytes
        return load_shared(__float_as_uint(address));
    }

    // Sums over the row of c*t and c*c for the three widths, and the codes: four a word, in the
    // order 1, 0, 3, 2. SQUARES: also this lane's sum of t*t in the low 23 bits, of which a row needs
    // 21: with a = MAGIC's bits, (a + t)^2 is t*t + 2at + a*a, and 2a and a*a are multiples of 2^23.
    template <int D, bool SQUARES>
    __device__ __forceinline__ void look_up(const float *y, float factor, int (&num)[3],
                                            int (&den)[3], uint32_t *codes, uint32_t &squares) const
    {
#pragma unroll
        for (int k = 0; k < 3; k++)
            num[k] = den[k] = 0;
#pragma unroll
        for (int i = 0; i < D / 4; i += 4) {
            float t[4];
            uint32_t w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {  // a row that is not finite gives anything here
                t[j] = __fadd_rn(__fmul_rn(y[i + (j ^ 1)], factor), MAGIC);
                w[j] = lookup(t[j]);
                if constexpr (SQUARES)
                    squares += __float_as_uint(t[j]) * __float_as_uint(t[j]);
            }
            uint32_t low0 = __byte_perm(w[0], w[1], 0x5140), low1 = __byte_perm(w[2], w[3], 0x5140);
            uint32_t high0 = __byte_perm(w[0], w[1], 0x7362);
            uint32_t high1 = __byte_perm(w[2], w[3], 0x7362);
            int four[3] = {static_cast<int>(__byte_perm(low0, low1, 0x5410)),
                           static_cast<int>(__byte_perm(low0, low1, 0x7632)),
                           static_cast<int>(__byte_perm(high0, high1, 0x5410))};
            codes[i / 4] = __byte_perm(high0, high1, 0x7632);
            int first = static_cast<int>(
                __byte_perm(__float_as_uint(t[0]), __float_as_uint(t[1]), 0x5410));
            int second = static_cast<int>(
                __byte_perm(__float_as_uint(t[2]), __float_as_uint(t[3]), 0x5410));
#pragma unroll
            for (int k = 0; k < 3; k++) {
                num[k] = __dp2a_lo(first, four[k], num[k]);
                num[k] = __dp2a_hi(second, four[k], num[k]);
                den[k] = __dp4a(four[k], four[k], den[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < 3; k++) {
            num[k] += __shfl_xor_sync(FULL, num[k], 1);
            num[k] += __shfl_xor_sync(FULL, num[k], 2);
            den[k] += __shfl_xor_sync(FULL, den[k], 1);
            den[k] += __shfl_xor_sync(FULL, den[k], 2);
        }
    }

    // Sum of t*t: an integer below 2^24 (about 2^20.1), so exact in any order.
    template <int D>
    __device__ __forceinline__ static float square_sum_of(const float *y, float factor)
    {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 4; i++) {
            float t = __fsub_rn(__fadd_rn(__fmul_rn(y[i], factor), MAGIC), MAGIC);
            sum = __fmaf_rn(t, t, sum);
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 1));
        return __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 2));
    }

    // Bit 4 of the codes of a word, in order.
    __device__ __forceinline__ static uint32_t plane_of(uint32_t codes)
    {
        return ((codes >> 4 & EACH) * (1u << 25 | 1u << 16 | 1u << 11 | 1u << 2)) >> 24 & 15u;
    }

    // The codes of the width `best` into the stage.
    template <int D>
    __device__ __forceinline__ static void put(uint32_t *codes, uint32_t best, uint8_t *stage,
                                               uint32_t token, const Lane &lane)
    {
        constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
        const uint32_t shift = BITS + (best == 2), mask = best == 0 ? 0u : EACH;
        const uint32_t side = best == 2 ? 0xffffffffu : 1u;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            codes[i] = (codes[i] & (2 * B::COUNT - 1) * EACH) + (codes[i] >> shift & mask) * side;
#pragma unroll
        for (int q = 0; q < Q; q++) {
            uint32_t channel = q * 4 * E + lane.c * E, *run = codes + q * E / 4;
            uint32_t last = run[E / 4 - 1];
            // the lower code of two into the lower half of a byte
            const uint32_t low = BITS == 4 ? ~0u : 15u * EACH;  // of 4 bits there is no more
            uint32_t x = (run[0] & low) * 0x1001u, y = (last & low) * 0x1001u;
            uint8_t *at = stage + token * (D / 2) + channel / 2;
            if constexpr (E == 8)
                *reinterpret_cast<uint32_t *>(at) = __byte_perm(x, y, 0x7531);
            else
                *reinterpret_cast<uint16_t *>(at) =
                    static_cast<uint16_t>(__byte_perm(x, 0, 0x4431));
            if constexpr (BITS == 5 && E == 8) {
                stage[8 * D + token * (D / 8) + channel / 8] =
                    static_cast<uint8_t>(plane_of(run[0]) | plane_of(last) << 4);
            } else if constexpr (BITS == 5) {  // half a byte: two lanes share it
                uint32_t plane = plane_of(run[0]), other = __shfl_xor_sync(FULL, plane, 1);
                if ((lane.c & 1) == 0)
                    stage[8 * D + token * (D / 8) + channel / 8] =
                        static_cast<uint8_t>(plane | other << 4);
            }
        }
    }

    template <int D>
    __device__ __forceinline__ Row row(const float *y, const Lane &lane, uint8_t *stage,
                                       uint32_t token, bool judge) const
    {
        Row out;
        out.energy = row_sum_of<D>([&](int i) { return __fmul_rn(y[i], y[i]); });
        out.fine = (__float_as_uint(out.energy) & 0x7fffffffu) < 0x7f800000u;
        float sigma = __fsqrt_rn(__fmul_rn(out.energy, 1.0f / D));
        bool silent = sigma == 0.0f || !out.fine;
        float factor = silent ? 0.0f : __fdiv_rn(B::TWICE_UNIT, sigma);
        int num[3], den[3];
        uint32_t codes[D / 16];
        uint32_t unused = 0;
        look_up<D, false>(y, factor, num, den, codes, unused);
        float best_score = -1.0f, best_num = 0.0f, best_den = 1.0f;
        uint32_t best = 0;
#pragma unroll
        for (int k = 0; k < 3; k++) {
            float n = static_cast<float>(num[k]), m = static_cast<float>(den[k]);
            float score = __fdiv_rn(__fmul_rn(n, n), m);
            if (score > best_score)
                best_score = score, best_num = n, best_den = m, best = k;
        }
        float ratio = __fdiv_rn(best_num, best_den);
        out.scale = silent ? 0u : float_bf16(__fdiv_rn(ratio, factor));
        out.noise = out.energy;
        if (judge) {
            float step = __fmul_rn(bf16_float(out.scale), factor);
            float cross = __fmul_rn(step, best_num);
            float rest = __fsub_rn(__fmul_rn(__fmul_rn(step, step), best_den), cross);
            float noise = __fadd_rn(__fsub_rn(square_sum_of<D>(y, factor), cross), rest);
            if (!silent)
                out.noise = noise > 0.0f ? __fdiv_rn(__fdiv_rn(noise, factor), factor) : 0.0f;
        }
        put<D>(codes, best, stage, token, lane);
        return out;
    }
};

template <int BITS> __device__ __forceinline__ void encode_gauss(const kvt_gpu_coding &job)
{
    using Coder = Gauss<BITS>;
    KVT_LAUNCH_SHARED(shared);
    Lane lane;
    uint32_t *masks = reinterpret_cast<uint32_t *>(shared + KVT_GPU_LEVELS_BYTES);
    uint8_t *stages = shared + KVT_GPU_LEVELS_BYTES + KVT_GPU_SIGNS_BYTES;
    uint8_t *stage = stages + threadIdx.x / 32 * Coder::B::STAGE;
    fill_signs(masks);
    Coder coder(reinterpret_cast<uint32_t *>(shared), lane);
    for_units(job, [&](uint32_t record, uint32_t index) {
        encode_unit(job, Unit(job, record, index), coder, stage, masks, lane);
    });
}

}  // namespace kvt
