// The Gaussian coders (kv4; keys of kv5): Lloyd-Max levels, the step width chosen out of three.
//
// t = rne(y * factor), by the addition of 1.5 * 2^23, whose bits then hold t. One lookup of |t| gives
// the levels for all three widths, a byte each; there is one copy of the table per lane, so lookups
// never collide. Sums are of integers, in any order: dot products of 4 levels at a time.
#pragma once

#include "encode.cuh"

namespace kvt {

template <int BITS_> struct Book;
template <> struct Book<4> {
    static constexpr int COUNT = 8, REACH = KVT_GPU_C4_REACH, STAGE = KVT_GPU_C4_STAGE_BYTES, LARGEST = 243;
    static constexpr float TWICE_UNIT = 0x1.73cedap+6f;
    __device__ static int level(int i)
    {
        constexpr int table[COUNT] = {6, 18, 31, 44, 58, 75, 96, 127};
        return table[i];
    }
    __device__ static int threshold(int width, int i)
    {
        constexpr int table[3][COUNT - 1] = {{24, 49, 75, 102, 133, 171, 223},
                                             {22, 45, 68, 93, 121, 156, 203},
                                             {26, 53, 82, 111, 145, 186, 243}};
        return table[width][i];
    }
};
template <> struct Book<5> {
    static constexpr int COUNT = 16, REACH = KVT_GPU_C5_REACH, STAGE = KVT_GPU_C5_STAGE_BYTES, LARGEST = 253;
    static constexpr float TWICE_UNIT = 0x1.379582p+6f;
    __device__ static int level(int i)
    {
        constexpr int table[COUNT] = {3,  8,  13, 18, 24, 29, 35,  41,
                                      47, 54, 61, 70, 79, 90, 105, 127};
        return table[i];
    }
    __device__ static int threshold(int width, int i)
    {
        constexpr int table[3][COUNT - 1] = {
            {11, 21, 31, 42, 53, 64, 76, 88, 101, 115, 131, 149, 169, 195, 232},
            {10, 19, 28, 38, 48, 58, 69, 80, 92, 105, 119, 136, 154, 177, 211},
            {12, 23, 34, 46, 58, 70, 83, 96, 110, 125, 143, 162, 184, 213, 253}};
        return table[width][i];
    }
};

template <int BITS_> struct Gauss {
    static constexpr int BITS = BITS_;
    __device__ static constexpr uint32_t bits() { return BITS; }
    __device__ static constexpr bool rotated() { return true; }
    using B = Book<BITS>;
    static constexpr int SIZE = B::REACH + 1;
    static_assert(B::REACH >= B::LARGEST, "the table must reach the last threshold");

    uint32_t levels;  // shared address of this lane's entry 0
    uint32_t codes;   // of the indices, 256 bytes a width

    // Fill the tables. All threads of the CTA.
    __device__ Gauss(uint32_t *table, uint8_t *code_table, const Lane &lane)
    {
        for (int at = threadIdx.x; at < 3 * 256; at += blockDim.x) {
            int index = 0;
            for (int i = 0; i < B::COUNT - 1; i++)
                index += B::threshold(at / 256, i) <= at % 256;
            code_table[at] = static_cast<uint8_t>(index);
        }
        __syncthreads();
        for (int at = threadIdx.x; at < SIZE * 32; at += blockDim.x) {
            const uint8_t *code = code_table + at / 32;
            table[at] = B::level(code[0]) | B::level(code[256]) << 8 | B::level(code[512]) << 16;
        }
        __syncthreads();
        levels = static_cast<uint32_t>(__cvta_generic_to_shared(table)) + lane.id * 4;
        codes = static_cast<uint32_t>(__cvta_generic_to_shared(code_table));
    }

    __device__ __forceinline__ static uint32_t magnitude(int t)
    {
        return min(static_cast<uint32_t>(abs(t)), static_cast<uint32_t>(B::REACH));
    }

    __device__ __forceinline__ uint32_t level(int t) const
    {
        uint32_t value;
        asm("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(magnitude(t) * 128 + levels));
        return value;
    }

    __device__ __forceinline__ uint32_t code(int t, uint32_t width_codes) const
    {
        uint32_t value;
        asm("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(magnitude(t) + width_codes));
        return t < 0 ? value | B::COUNT : value;
    }

    // Sums over the row of c*|t| and c*c for the three widths.
    template <int D>
    __device__ __forceinline__ void sums_of(const int *t, int (&num)[3], int (&den)[3]) const
    {
#pragma unroll
        for (int k = 0; k < 3; k++)
            num[k] = den[k] = 0;
#pragma unroll
        for (int i = 0; i < D / 4; i += 4) {
            uint32_t w0 = level(t[i]), w1 = level(t[i + 1]);
            uint32_t w2 = level(t[i + 2]), w3 = level(t[i + 3]);
            uint32_t low = __byte_perm(w0, w1, 0x5140), high = __byte_perm(w2, w3, 0x5140);
            uint32_t four[3] = {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632),
                                __byte_perm(__byte_perm(w0, w1, 0x0062),
                                            __byte_perm(w2, w3, 0x0062), 0x5410)};
            uint32_t first = __byte_perm(abs(t[i]), abs(t[i + 1]), 0x5410);
            uint32_t second = __byte_perm(abs(t[i + 2]), abs(t[i + 3]), 0x5410);
#pragma unroll
            for (int k = 0; k < 3; k++) {
                num[k] = __dp2a_lo(first, four[k], static_cast<uint32_t>(num[k]));
                num[k] = __dp2a_hi(second, four[k], static_cast<uint32_t>(num[k]));
                den[k] = __dp4a(four[k], four[k], static_cast<uint32_t>(den[k]));
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

    template <int D> __device__ __forceinline__ static float square_sum_of(const int *t)
    {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < D / 4; i++)
            sum += t[i] * t[i];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        return static_cast<float>(sum);
    }

    template <int D>
    __device__ __forceinline__ Row row(const float *y, const Lane &lane, uint8_t *stage,
                                       uint32_t token, bool judge) const
    {
        constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
        Row out;
        out.energy = row_sum_of<D>([&](int i) { return __fmul_rn(y[i], y[i]); });
        out.fine = (__float_as_uint(out.energy) & 0x7fffffffu) < 0x7f800000u;
        float sigma = __fsqrt_rn(__fmul_rn(out.energy, 1.0f / D));
        bool silent = sigma == 0.0f || !out.fine;
        float factor = silent ? 0.0f : __fdiv_rn(B::TWICE_UNIT, sigma);
        int t[D / 4], num[3], den[3];
#pragma unroll
        for (int i = 0; i < D / 4; i++)  // a row that is not finite gives anything here
            t[i] = static_cast<int>(
                __float_as_uint(__fadd_rn(silent ? 0.0f : __fmul_rn(y[i], factor), MAGIC)) -
                0x4b400000u);
        sums_of<D>(t, num, den);
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
            float noise = __fadd_rn(__fsub_rn(square_sum_of<D>(t), cross), rest);
            if (!silent)
                out.noise = noise > 0.0f ? __fdiv_rn(__fdiv_rn(noise, factor), factor) : 0.0f;
        }
        uint32_t width_codes = codes + 256 * best;
#pragma unroll
        for (int q = 0; q < Q; q++) {
            uint32_t run[E];
#pragma unroll
            for (int e = 0; e < E; e++)  // silent rows: t = 0, the lowest level
                run[e] = code(t[q * E + e], width_codes);
            put_nibbles<D>(stage, token, q * 4 * E + lane.c * E, run);
            if constexpr (BITS == 5)
                put_plane<D, 1>(stage, token, q * 4 * E + lane.c * E, run, lane);
        }
        return out;
    }
};

template <int BITS> __device__ __forceinline__ void encode_gauss(const kvt_gpu_coding &job)
{
    using Coder = Gauss<BITS>;
    extern __shared__ __align__(16) uint8_t shared[];
    Lane lane;
    uint8_t *code_table = shared + Coder::SIZE * 128;
    uint8_t *stage = code_table + KVT_GPU_CODES_BYTES + threadIdx.x / 32 * Coder::B::STAGE;
    Coder coder(reinterpret_cast<uint32_t *>(shared), code_table, lane);
    for_units(job, [&](uint32_t record, uint32_t index) {
        encode_unit(job, Unit(job, record, index), coder, stage, lane);
    });
}

}  // namespace kvt
