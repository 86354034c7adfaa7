// Decode + scatter: payloads (device memory, or pinned host memory read over the link) to pages.
//
// The inverse transform is a product of the 16 x D code levels with the D x D matrix of +-1 (signs
// of the codec folded in), done by the int8 tensor units: exact integers, as the format defines
// them. Both the order of the contraction (k) and of the result columns (n) are permuted so that a
// lane reads its codes in one load and owns runs of 8 neighbouring channels of its two tokens.
//   k = c*(D/4) + s*8 + jb*4 + byte      s: step of 32, jb: which of the two registers
//   n = q*4E + (col/2)*E + i*2 + col%2   tile q*(E/2) + i, column col
// A matrix register is base(tile, lane) with its bytes negated where parity(k & n) asks for it.
// Accumulators start at the bits of 1.5*2^23, so that they end as floats 1.5*2^23 + w.
#include "device.cuh"

namespace kvt {

constexpr uint32_t NEGATE = 0xfefefefeu;  // 0x01 <-> 0xff in every byte
constexpr int BASES = 30;                 // tiles of 8 columns: 16 + 8 + 4 + 2
constexpr int BASE_AT_128 = 0, BASE_AT_64 = 16, BASE_AT_32 = 24, BASE_AT_16 = 28;

struct DecodeShared {
    uint2 base[BASES][32]; // both registers
    float stored[KVT_GPU_WARPS][128];
};

template <int D> __device__ constexpr int base_at()
{
    return D == 128 ? BASE_AT_128 : D == 64 ? BASE_AT_64 : D == 32 ? BASE_AT_32 : BASE_AT_16;
}

template <int D> __device__ void fill_bases(DecodeShared &shared)
{
    constexpr int E = Geometry<D>::E;
    for (uint32_t index = threadIdx.x; index < D / 8 * 32; index += blockDim.x) {
        uint32_t tile = index / 32, id = index % 32, c = id & 3, col = id >> 2;
        uint32_t q = tile / (E / 2), i = tile % (E / 2);
        uint32_t n = q * 4 * E + (col >> 1) * E + i * 2 + (col & 1);
        uint32_t flip = __popc((c * (D / 4)) & n) ^ (sign_word(n / 32) >> (n % 32));
        uint32_t bytes = 0;
        for (uint32_t byte = 0; byte < 4; byte++)
            bytes |= ((flip ^ __popc(byte & n)) & 1 ? 0xffu : 0x01u) << (8 * byte);
        shared.base[base_at<D>() + tile][id] = make_uint2(bytes, i >> 1 ? bytes ^ NEGATE : bytes);
    }
}

// ---- codes to int8 levels, eight at a time: low[] elements 0..3, high elements 4..7 ----

// 0x00 or 0xff per nibble, by its top bit.
__device__ __forceinline__ void nibble_masks(uint32_t codes, uint32_t &low, uint32_t &high)
{
    uint32_t even = codes << 4;  // the even nibbles' top bits become their bytes' top bits
    low = permute(even, codes, 0xd9c8);
    high = permute(even, codes, 0xfbea);
}

__device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t set, uint32_t clear)
{
    return (set & mask) | (clear & ~mask);
}

// -x of every byte where mask is 0xff; x is never 0 there, so nothing carries.
__device__ __forceinline__ uint32_t negate_bytes(uint32_t x, uint32_t mask)
{
    return (x ^ mask) + (mask & 0x01010101u);
}

__device__ __forceinline__ void levels_c4(uint32_t codes, uint32_t &low, uint32_t &high)
{
    uint32_t index = codes & 0x77777777u, mask_low, mask_high;
    nibble_masks(codes, mask_low, mask_high);
    low = negate_bytes(__byte_perm(0x2c1f1206u, 0x7f604b3au, index), mask_low);
    high = negate_bytes(__byte_perm(0x2c1f1206u, 0x7f604b3au, index >> 16), mask_high);
}

// Four bits to four bytes of 0x00 or 0xff.
__device__ __forceinline__ uint32_t spread_bits(uint32_t bits)
{
    return (((bits & 15u) * 0x00204081u) & 0x01010101u) * 0xffu;
}

__device__ __forceinline__ void levels_c5(uint32_t codes, uint32_t signs, uint32_t &low,
                                          uint32_t &high)
{
    uint32_t index = codes & 0x77777777u, upper_low, upper_high;
    nibble_masks(codes, upper_low, upper_high);
    low = choose(upper_low, __byte_perm(0x463d362fu, 0x7f695a4fu, index),
                 __byte_perm(0x120d0803u, 0x29231d18u, index));
    high = choose(upper_high, __byte_perm(0x463d362fu, 0x7f695a4fu, index >> 16),
                  __byte_perm(0x120d0803u, 0x29231d18u, index >> 16));
    low = negate_bytes(low, spread_bits(signs));
    high = negate_bytes(high, spread_bits(signs >> 4));
}

// Bits 4 and 5 of four bytes out of one byte of the plane.
__device__ __forceinline__ uint32_t spread_pairs(uint32_t byte)
{
    return ((byte << 4) & 0x30u) | ((byte << 10) & 0x3000u) | ((byte << 16) & 0x300000u) |
           ((byte << 22) & 0x30000000u);
}

__device__ __forceinline__ uint32_t extend_6(uint32_t x)
{
    uint32_t sign = x & 0x20202020u;
    return x | (sign << 1) | (sign << 2);
}

__device__ __forceinline__ void levels_u6(uint32_t codes, uint32_t plane, uint32_t &low,
                                          uint32_t &high)
{
    uint32_t even = codes & 0x0f0f0f0fu, odd = (codes >> 4) & 0x0f0f0f0fu;
    low = extend_6(__byte_perm(even, odd, 0x5140) | spread_pairs(plane & 0xffu));
    high = extend_6(__byte_perm(even, odd, 0x7362) | spread_pairs((plane >> 8) & 0xffu));
}

// COUNT words of 4 bytes; at is aligned to the smaller of COUNT words and 16 bytes.
template <int COUNT> __device__ __forceinline__ void load_words(const uint8_t *at, uint32_t *words)
{
    if constexpr (COUNT >= 4) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            uint4 v = *reinterpret_cast<const uint4 *>(at + 4 * i);
            words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
        }
    } else if constexpr (COUNT == 2) {
        uint2 v = *reinterpret_cast<const uint2 *>(at);
        words[0] = v.x, words[1] = v.y;
    } else {
        words[0] = *reinterpret_cast<const uint32_t *>(at);
    }
}

// Code levels of one token, its half h of the registers a[step][2*jb + h].
template <int D, int H>
__device__ __forceinline__ void load_levels(uint32_t bits, const uint8_t *piece, uint32_t token, const Lane &lane, uint32_t (*a)[4])
{
    constexpr int STEPS = D >= 32 ? D / 32 : 1;
    if (bits == 8) {
        const uint8_t *at = piece + token * D + lane.c * (D / 4);
        uint32_t words[2 * STEPS] = {};
        load_words<D / 16>(at, words);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            a[s][H] = words[2 * s], a[s][2 + H] = words[2 * s + 1];
        return;
    }
    uint32_t codes[STEPS], extra = bits - 4u;
    const uint8_t *at = piece + token * (D / 2) + lane.c * (D / 8);
    if constexpr (D == 16)
        codes[0] = *reinterpret_cast<const uint16_t *>(at);
    else
        load_words<STEPS>(at, codes);
    const uint8_t *plane = piece + 8 * D + token * (D * extra / 8) + lane.c * (D / 4 * extra) / 8;
    if (bits == 4) {
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            levels_c4(codes[s], a[s][H], a[s][2 + H]);
    } else if (bits == 5) {
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            levels_c5(codes[s], D == 16 ? plane[0] >> (4 * (lane.c & 1)) : plane[s], a[s][H],
                      a[s][2 + H]);
    } else {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint32_t pairs = D == 16 ? plane[0] : *reinterpret_cast<const uint16_t *>(plane + 2 * s);
            levels_u6(codes[s], pairs, a[s][H], a[s][2 + H]);
        }
    }
    if constexpr (D == 16)
        a[0][2 + H] = 0;
}

// Stored means of the keys into shared memory. The last of equal indices counts, as in a loop.
template <int D>
__device__ __forceinline__ void load_offsets(const uint8_t *at, const Lane &lane, float *stored)
{
    constexpr uint32_t OFFSETS = Geometry<D>::OFFSETS;
    uint32_t index = 0x100u + lane.id, half = 0;
    if (lane.id < OFFSETS) {
        index = at[16 + lane.id] & (D - 1);
        half = *reinterpret_cast<const uint16_t *>(at + 2 * lane.id);
    }
    if constexpr (D >= 32) {
#pragma unroll
        for (int k = 0; k < D / 32; k++)
            stored[k * 32 + lane.id] = 0.0f;
    } else if (lane.id < D) {
        stored[lane.id] = 0.0f;
    }
    uint32_t equals = __match_any_sync(FULL, index);
    __syncwarp();
    if (lane.id < OFFSETS && equals >> lane.id == 1u)
        stored[index] = stored_float(half);
    __syncwarp();
}

// BITS: known at compile time, or 0: the part's. FAST: a bf16 pool whose rows can be written 16
// bytes at a time.
template <int D, int BITS, bool FAST>
__device__ __forceinline__ void decode_rotated(const kvt_gpu_part &part, const uint8_t *piece,
                                               char *rows, const Lane &lane, DecodeShared &shared)
{
    constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q, STEPS = D >= 32 ? D / 32 : 1;
    const uint32_t bits = BITS != 0 ? BITS : part.bits;
    uint32_t a[STEPS][4], scales_at = 2 * D * bits, masks[STEPS];
    float step[2], *stored = shared.stored[threadIdx.x / 32];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t scale = *reinterpret_cast<const uint16_t *>(piece + scales_at +
                                                             2 * (lane.row + 8 * h));
        step[h] = stored_float(scale & 0x7fffu) * (1.0f / D);  // a scale has no sign
    }
    load_levels<D, 0>(bits, piece, lane.row, lane, a);
    load_levels<D, 1>(bits, piece, lane.row + 8, lane, a);
    if (part.key)
        load_offsets<D>(piece + scales_at + 32, lane, stored);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        masks[s] = __popc(s & (lane.id >> 3)) & 1 ? NEGATE : 0u;
    char *row[2] = {rows + part.stride_token * lane.row, rows + part.stride_token * (lane.row + 8)};
#pragma unroll
    for (int q = 0; q < Q; q++) {
        float x[2][E];
#pragma unroll
        for (int i = 0; i < E / 2; i++) {
            uint32_t acc[4] = {0x4b400000u, 0x4b400000u, 0x4b400000u, 0x4b400000u};
            uint2 base = shared.base[base_at<D>() + q * (E / 2) + i][lane.id];
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                multiply(acc, a[s], base.x ^ masks[s], base.y ^ masks[s]);
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    x[h][2 * i + j] =
                        __fmul_rn(__fsub_rn(__uint_as_float(acc[2 * h + j]), MAGIC), step[h]);
        }
        uint32_t channel = q * 4 * E + lane.c * E;
        if (part.key) {
#pragma unroll
            for (int e = 0; e < E; e++) {
                float mean = stored[channel + e];
                x[0][e] = __fadd_rn(mean, x[0][e]);
                x[1][e] = __fadd_rn(mean, x[1][e]);
            }
        } else {  // a mean of zero: it turns -0 to 0
#pragma unroll
            for (int e = 0; e < E; e++) {
                x[0][e] = __fadd_rn(0.0f, x[0][e]);
                x[1][e] = __fadd_rn(0.0f, x[1][e]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            if constexpr (FAST)
                store_run_fast<E>(row[h], channel, x[h]);
            else
                store_run<E>(part, row[h], channel, x[h]);
    }
    __syncwarp();
}

template <int D>
__device__ __noinline__ void decode_plain(const kvt_gpu_part &part, const uint8_t *piece, char *rows,
                                          const Lane lane)
{
    constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t token = lane.row + 8 * h;
        float scale = stored_float(
            *reinterpret_cast<const uint16_t *>(piece + 8 * D + 2 * token) & 0x7fffu);
#pragma unroll
        for (int q = 0; q < Q; q++) {
            uint32_t channel = q * 4 * E + lane.c * E;
            const uint8_t *at = piece + token * (D / 2) + channel / 2;
            uint32_t codes = E == 8 ? *reinterpret_cast<const uint32_t *>(at)
                                    : *reinterpret_cast<const uint16_t *>(at);
            float x[E];
#pragma unroll
            for (int e = 0; e < E; e++)
                x[e] = __fmul_rn(static_cast<float>(static_cast<int32_t>(codes << (28 - 4 * e)) >> 28),
                                 scale);
            store_run<E>(part, rows + part.stride_token * token, channel, x);
        }
    }
}

// Out of line, so that its registers do not press on the fast path.
template <int D>
__device__ __noinline__ void decode_other(const kvt_gpu_part &part, const uint8_t *piece,
                                          char *rows, const Lane lane, DecodeShared &shared)
{
    if (part.vector && part.dtype == DTYPE_BF16)
        decode_rotated<D, 0, true>(part, piece, rows, lane, shared);
    else
        decode_rotated<D, 0, false>(part, piece, rows, lane, shared);
}

template <int D>
__device__ __forceinline__ const uint8_t *decode_piece(const kvt_gpu_part &part,
                                                       const kvt_gpu_part *at,
                                                       const uint8_t *piece, char *rows,
                                                       const Lane &lane, DecodeShared &shared)
{
    if (part.coder == CODER_PLAIN) {
        decode_plain<D>(*at, piece, rows, lane);
        return piece + 8 * D + 32;
    }
    bool fast = part.vector && part.dtype == DTYPE_BF16;
    if (D >= 64 && fast && part.bits == 4)
        decode_rotated<D, 4, true>(part, piece, rows, lane, shared);
    else
        decode_other<D>(*at, piece, rows, lane, shared);
    return piece + 2 * D * part.bits + 32 + (part.key ? 32 : 0);
}

}  // namespace kvt

using namespace kvt;

extern "C" __global__ void __launch_bounds__(KVT_GPU_WARPS * 32, 1)
    kvt_gpu_decode(const __grid_constant__ kvt_gpu_coding job)
{
    DecodeShared &shared = own_shared<DecodeShared>();
    fill_bases<128>(shared);
    fill_bases<64>(shared);
    fill_bases<32>(shared);
    fill_bases<16>(shared);
    __syncthreads();
    Lane lane;
    for_units(job, [&](uint32_t record, uint32_t index) {
        Unit unit(job, record, index);
        const kvt_gpu_part &part = unit.part;
        const uint8_t *piece = unit.payload;
        for (uint32_t first = 0, dim; first < part.head_dim; first += dim) {
            char *rows = unit.rows + part.stride_elem * first;
            dim = next_dim(part.head_dim - first);
            if (dim == 128)
                piece = decode_piece<128>(part, unit.at, piece, rows, lane, shared);
            else if (dim == 64)
                piece = decode_piece<64>(part, unit.at, piece, rows, lane, shared);
            else if (dim == 32)
                piece = decode_piece<32>(part, unit.at, piece, rows, lane, shared);
            else
                piece = decode_piece<16>(part, unit.at, piece, rows, lane, shared);
        }
    });
}
