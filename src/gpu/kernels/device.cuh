// What all kernels share: lanes and channels of a piece, rows of a paged pool, half floats.
//
// One warp codes one piece (16 tokens x D channels). Lane l has tokens l/4 and l/4 + 8; of each it
// has D/4 channels, in Q runs of E: channel = q*4E + c*E + e with c = l%4. So runs are 16 bytes of
// bf16, four lanes touch 64 bytes in a row, and the channel bits are, from the top: q (registers),
// c (lanes), e (registers). Sums over channels go from the top bit down, as the codec orders them.
//
// Compile with -fmad=false -ftz=false -prec-div=true -prec-sqrt=true: the bits are the format.
#pragma once

#include <cstdint>
#include <cstring>

#include "gpu/kernel_abi.h"
#include "instructions.cuh"

namespace kvt {

constexpr uint32_t FULL = 0xffffffffu;
constexpr int CODER_PLAIN = 1, CODER_GAUSS = 2, CODER_UNIFORM = 3;  // codec/piece.h
constexpr int DTYPE_BF16 = 1, DTYPE_F16 = 2, DTYPE_F32 = 3;         // kvtier/layout.h
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

template <int D> struct Geometry {
    static constexpr int E = D >= 32 ? 8 : 4;  // channels of a run
    static constexpr int Q = D / (4 * E);      // runs of a lane
    static constexpr int PER = D / 4;          // channels of a lane
    static constexpr int OFFSETS = D / 4 < 8 ? D / 4 : 8;
};

struct Lane {
    uint32_t id, row, c;
    __device__ Lane() : id(threadIdx.x & 31u), row(id >> 2), c(id & 3u) {}
};

// Bit i (0 the first channel) set: channel i is negated. codec/tables.c, bytes reversed to bits.
__device__ __forceinline__ uint32_t sign_word(uint32_t word)
{
    // __brev of the big-endian words of 4449d042 3ee576b2 568f0c4d af5e0c9f
    return word == 0 ? __brev(0x4449d042u) : word == 1 ? __brev(0x3ee576b2u)
           : word == 2 ? __brev(0x568f0c4du) : __brev(0xaf5e0c9fu);
}

__device__ __forceinline__ float bf16_float(uint32_t half) { return __uint_as_float(half << 16); }

__device__ __forceinline__ uint32_t float_bf16(float value)
{
    uint32_t bits = __float_as_uint(value);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Non-finite stored numbers of a damaged payload count as zero.
__device__ __forceinline__ float stored_float(uint32_t half)
{
    return (half & 0x7f80u) == 0x7f80u ? 0.0f : bf16_float(half);
}

// Two floats to two bf16, nearest even. Decoded numbers are never NaN.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    return bf16_pair(low, high);
}

// f16 saturates at 65504.
__device__ __forceinline__ uint32_t pack_f16(float low, float high)
{
    low = fminf(fmaxf(low, -65504.0f), 65504.0f);
    high = fminf(fmaxf(high, -65504.0f), 65504.0f);
    return f16_pair(low, high);
}

// The part of a unit: computed when all parts are alike, else searched.
__device__ __forceinline__ const kvt_gpu_part *part_of(const kvt_gpu_coding &job, uint32_t unit)
{
    const kvt_gpu_part *parts = reinterpret_cast<const kvt_gpu_part *>(job.parts);
    if (job.units_per_part != 0)
        return parts + unit / job.units_per_part;
    uint32_t low = 0, high = job.part_count;  // parts[low] starts at or before the unit
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (parts[middle].first_unit - job.first_unit <= unit)
            low = middle;
        else
            high = middle;
    }
    return parts + low;
}

// Rows and payloads lie in global memory; the compiler cannot know, as their addresses come out of
// structs.
template <typename T> __device__ __forceinline__ T *global(T *at)
{
    __builtin_assume(__isGlobal(at));
    return at;
}

// Where one warp works: a (record, part, head, tile).
struct Unit {
    const kvt_gpu_part *at; // in the table; for paths where speed does not matter
    kvt_gpu_part part;      // its fields in registers, read 16 bytes at a time
    uint32_t record;
    uint32_t order;   // place in the walk of the scalar encoder
    uint8_t *payload; // of this unit
    char *rows;       // token 0, element 0 of the tile in the pool
    __device__ __forceinline__ Unit(const kvt_gpu_coding &job, uint32_t record_, uint32_t unit)
        : at(part_of(job, unit)), record(record_)
    {
        static_assert(sizeof(part) == 5 * sizeof(uint4));
        uint4 words[5];
#pragma unroll
        for (int i = 0; i < 5; i++)
            words[i] = __ldg(reinterpret_cast<const uint4 *>(at) + i);
        memcpy(&part, words, sizeof(part));
        uint32_t local = unit - (part.first_unit - job.first_unit), head = local, tile = 0;
        if (part.tiles > 1) {
            head = local / part.tiles;
            tile = local % part.tiles;
        }
        order = part.order_at + local;
        payload = global(reinterpret_cast<uint8_t *>(job.payload[record]) + part.payload_at +
                         static_cast<uint64_t>(local) * part.unit_bytes);
        rows = global(reinterpret_cast<char *>(part.base) + part.stride_block * job.block[record] +
                      part.stride_head * head + part.stride_token * (tile * 16ll));
    }
};

// All units of all records, dealt to the warps of the grid in turn: work(record, unit).
template <typename F>
__device__ __forceinline__ void for_units(const kvt_gpu_coding &job, F work)
{
    uint32_t own = blockDim.x / 32, warps = gridDim.x * own, record = 0;
    uint32_t unit = blockIdx.x * own + threadIdx.x / 32;
    for (;; unit += warps) {
        while (unit >= job.unit_count) {
            unit -= job.unit_count;
            if (++record >= job.records)
                return;
        }
        work(record, unit);
    }
}

// ---- rows of the pool ----

template <int E> __device__ __forceinline__ void load_halves(const void *at, uint32_t *words)
{
    if constexpr (E == 8) {
        uint4 v = *static_cast<const uint4 *>(global(at));
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
        uint2 v = *static_cast<const uint2 *>(global(at));
        words[0] = v.x, words[1] = v.y;
    }
}

template <int D>
__device__ __forceinline__ void load_row_bf16(const char *row, const Lane &lane, float *x)
{
    constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
    uint32_t words[Q * E / 2];
#pragma unroll
    for (int q = 0; q < Q; q++)
        load_halves<E>(row + (q * 4 * E + lane.c * E) * 2, words + q * E / 2);
#pragma unroll
    for (int i = 0; i < Q * E / 2; i++) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

// The other vector rows: f16 and f32.
template <int D>
__device__ __forceinline__ void load_row_vector(const kvt_gpu_part &part, const char *row,
                                                const Lane &lane, float *x)
{
    constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
    if (part.dtype == DTYPE_F32) {
#pragma unroll
        for (int q = 0; q < Q; q++)
#pragma unroll
            for (int e = 0; e < E; e += 4) {
                float4 v = *reinterpret_cast<const float4 *>(row + (q * 4 * E + lane.c * E + e) * 4);
                x[q * E + e] = v.x, x[q * E + e + 1] = v.y;
                x[q * E + e + 2] = v.z, x[q * E + e + 3] = v.w;
            }
        return;
    }
    uint32_t words[Q * E / 2];
#pragma unroll
    for (int q = 0; q < Q; q++)
        load_halves<E>(row + (q * 4 * E + lane.c * E) * 2, words + q * E / 2);
#pragma unroll
    for (int i = 0; i < Q * E / 2; i++) {
        x[2 * i] = f16_float(words[i] & 0xffffu);
        x[2 * i + 1] = f16_float(words[i] >> 16);
    }
}

__device__ __forceinline__ float load_element(uint32_t dtype, const char *at)
{
    if (dtype == DTYPE_F32)
        return *reinterpret_cast<const float *>(at);
    uint32_t half = *reinterpret_cast<const uint16_t *>(at);
    return dtype == DTYPE_BF16 ? bf16_float(half) : f16_float(half);
}

// Channels of this lane out of the piece that starts at element `first` of the row.
template <int D>
__device__ __forceinline__ void load_row(const kvt_gpu_part &part, const char *row, uint32_t first,
                                         const Lane &lane, float *x)
{
    constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
    row += part.stride_elem * first;
    if (part.vector) {
        if (part.dtype == DTYPE_BF16)
            load_row_bf16<D>(row, lane, x);
        else
            load_row_vector<D>(part, row, lane, x);
        return;
    }
#pragma unroll
    for (int q = 0; q < Q; q++)
#pragma unroll
        for (int e = 0; e < E; e++)
            x[q * E + e] = load_element(part.dtype,
                                        row + part.stride_elem * (q * 4 * E + lane.c * E + e));
}

__device__ __forceinline__ void store_element(uint32_t dtype, char *at, float value)
{
    if (dtype == DTYPE_F32)
        *reinterpret_cast<float *>(at) = value;
    else
        *reinterpret_cast<uint16_t *>(at) = static_cast<uint16_t>(
            dtype == DTYPE_BF16 ? float_bf16(value) : pack_f16(value, 0.0f) & 0xffffu);
}

// One run of E channels of bf16, 16 (or 8) bytes at once.
template <int E>
__device__ __forceinline__ void store_run_fast(char *row, uint32_t channel, const float *x)
{
    if constexpr (E == 8)
        *reinterpret_cast<uint4 *>(global(row + channel * 2)) =
            make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                       pack_bf16(x[6], x[7]));
    else
        *reinterpret_cast<uint2 *>(global(row + channel * 2)) =
            make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

// One run of E channels, from channel `channel` of the row on.
template <int E>
__device__ __forceinline__ void store_run(const kvt_gpu_part &part, char *row, uint32_t channel,
                                          const float *x)
{
    if (!part.vector) {
#pragma unroll
        for (int e = 0; e < E; e++)
            store_element(part.dtype, row + part.stride_elem * (channel + e), x[e]);
        return;
    }
    if (part.dtype == DTYPE_F32) {
#pragma unroll
        for (int e = 0; e < E; e += 4)
            *reinterpret_cast<float4 *>(row + (channel + e) * 4) =
                make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
        return;
    }
    uint32_t words[E / 2];
#pragma unroll
    for (int i = 0; i < E / 2; i++)
        words[i] = part.dtype == DTYPE_BF16 ? pack_bf16(x[2 * i], x[2 * i + 1])
                                            : pack_f16(x[2 * i], x[2 * i + 1]);
    if constexpr (E == 8)
        *reinterpret_cast<uint4 *>(row + channel * 2) =
            make_uint4(words[0], words[1], words[2], words[3]);
    else
        *reinterpret_cast<uint2 *>(row + channel * 2) = make_uint2(words[0], words[1]);
}

// Dimension of the next piece: greedy powers of two.
__device__ __forceinline__ uint32_t next_dim(uint32_t rest)
{
    return rest >= 128 ? 128 : rest >= 64 ? 64 : rest >= 32 ? 32 : 16;
}

}  // namespace kvt
