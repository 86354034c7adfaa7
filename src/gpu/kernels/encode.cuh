// Gather + encode: what the three encoders share. One warp per (record, part, head, tile), pieces
// one after another; device.cuh has the lanes and channels, src/codec/scalar.c the arithmetic.
#pragma once

#include "device.cuh"

namespace kvt {

struct Energy {  // of this lane's two tokens, the same in the four lanes of a row
    float rows[2], noise[2];
    float residue;  // of the tile
};

// What a coder says of one row; energies in the domain of y, not yet divided by D.
struct Row {
    uint32_t scale;
    float energy, noise;
    bool fine;  // finite
};

// ---- sums over the channels of a row, in the codec's order ----

// v: E values, already summed over q. The four lanes of a row all get the sum.
template <int E> __device__ __forceinline__ float row_sum(float *v)
{
#pragma unroll
    for (int e = 0; e < E; e++)
        v[e] = __fadd_rn(v[e], __shfl_xor_sync(FULL, v[e], 2));
#pragma unroll
    for (int e = 0; e < E; e++)
        v[e] = __fadd_rn(v[e], __shfl_xor_sync(FULL, v[e], 1));
#pragma unroll
    for (int half = E / 2; half > 0; half /= 2)
#pragma unroll
        for (int e = 0; e < half; e++)
            v[e] = __fadd_rn(v[e], v[e + half]);
    return v[0];
}

// Sum of term(i) over the D/4 channels of each lane of the row. term is evaluated once per channel.
template <int D, typename F> __device__ __forceinline__ float row_sum_of(F term)
{
    constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
    float v[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        if constexpr (Q == 4) {
            float a = __fadd_rn(term(e), term(2 * E + e));
            float b = __fadd_rn(term(E + e), term(3 * E + e));
            v[e] = __fadd_rn(a, b);
        } else if constexpr (Q == 2) {
            v[e] = __fadd_rn(term(e), term(E + e));
        } else {
            v[e] = term(e);
        }
    }
    return row_sum<E>(v);
}

template <int D> __device__ __forceinline__ uint32_t row_largest(const float *y)
{
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < Geometry<D>::PER; i++)
        largest = max(largest, __float_as_uint(y[i]) & 0x7fffffffu);
    largest = max(largest, __shfl_xor_sync(FULL, largest, 1));
    return max(largest, __shfl_xor_sync(FULL, largest, 2));
}

// Sum over the tile's tokens: t and t + 8 are in one lane.
__device__ __forceinline__ float token_sum(const float *two)
{
    float v = __fadd_rn(two[0], two[1]);
    v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 16));
    v = __fadd_rn(v, __shfl_xor_sync(FULL, v, 8));
    return __fadd_rn(v, __shfl_xor_sync(FULL, v, 4));
}

// ---- stored channel means ----

// Means of the channels: lane group g (l/4) gets COUNT local channels from g*COUNT on (D = 16: from
// (g/2); its neighbour has the same).
template <int D> struct Means {
    static constexpr int COUNT = D >= 32 ? D / 32 : 1;
    float mean[COUNT];
    uint32_t channel[COUNT];
};

// Sums over the lanes that differ in one bit of the row; each keeps HALF of what it had.
template <int HALF> __device__ __forceinline__ void fold(float *v, bool upper, int mask)
{
    if constexpr (HALF == 0) {
        v[0] = __fadd_rn(v[0], __shfl_xor_sync(FULL, v[0], mask));
    } else {
#pragma unroll
        for (int i = 0; i < HALF; i++) {
            float give = upper ? v[i] : v[i + HALF], keep = upper ? v[i + HALF] : v[i];
            v[i] = __fadd_rn(keep, __shfl_xor_sync(FULL, give, mask));
        }
    }
}

template <int D>
__device__ __forceinline__ void channel_means(const float (*x)[D / 4], const Lane &lane,
                                              Means<D> &means)
{
    constexpr int PER = Geometry<D>::PER, E = Geometry<D>::E, COUNT = Means<D>::COUNT;
    float v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] = __fadd_rn(x[0][i], x[1][i]);
    fold<PER / 2>(v, lane.id & 16, 16);
    fold<PER / 4>(v, lane.id & 8, 8);
    fold<PER / 8>(v, lane.id & 4, 4);
    uint32_t first = D >= 32 ? lane.row * COUNT : lane.row / 2;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        uint32_t i = first + k;
        means.mean[k] = __fmul_rn(v[k], 0.0625f);
        means.channel[k] = i / E * 4 * E + lane.c * E + i % E;
    }
}

// Choose and store the largest means, of equal ones the lower channel first: out gets 32 bytes,
// stored[] (D floats of shared memory) what a decoder adds back, with the transform's signs, and
// left[] what of its own means a lane has not stored.
template <int D>
__device__ __forceinline__ void choose_offsets(const Means<D> &means, const Lane &lane,
                                               uint8_t *out, float *stored, float *left)
{
    constexpr int COUNT = Means<D>::COUNT;
    constexpr uint32_t NONE = 0xffu;
    const uint32_t first = means.channel[0];  // a lane's channels follow each other in one run
    const uint32_t signs = sign_word(first / 32) >> first % 32;
    bool writes = D >= 32 || (lane.row & 1) == 0;  // D = 16: two lanes have each channel
    uint32_t size[COUNT], place[COUNT];  // magnitude bits + 1, 0 when chosen; and in which round
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        size[k] = (__float_as_uint(means.mean[k]) & 0x7fffffffu) + 1u;
        place[k] = NONE;
    }
    if (lane.id < 8)
        reinterpret_cast<uint32_t *>(out)[lane.id] = 0;
    __syncwarp();
#pragma unroll 1
    for (uint32_t round = 0; round < Geometry<D>::OFFSETS; round++) {
        uint32_t own = size[0];
#pragma unroll
        for (int k = 1; k < COUNT; k++)
            own = max(own, size[k]);
        uint32_t best = __reduce_max_sync(FULL, own);
        bool wins = own == best;
        uint32_t votes = __ballot_sync(FULL, wins);
        if (votes & (votes - 1)) {  // a tie: the lower channel
            uint32_t channel = first;
#pragma unroll
            for (int k = COUNT - 1; k >= 0; k--)
                channel = size[k] == best ? first + k : channel;
            wins = __reduce_min_sync(FULL, wins ? channel : 0xffffffffu) == channel && wins;
        }
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            bool this_one = wins && size[k] == best;
            size[k] = this_one ? 0u : size[k];
            place[k] = this_one ? round : place[k];
            wins = wins && !this_one;
        }
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        uint32_t half = float_bf16(means.mean[k]);
        bool chosen = place[k] != NONE;
        left[k] = chosen ? __fsub_rn(means.mean[k], bf16_float(half)) : means.mean[k];
        if (!writes)
            continue;
        stored[first + k] = chosen ? bf16_float(half ^ (signs >> k & 1u) << 15) : 0.0f;
        if (chosen) {
            *reinterpret_cast<uint16_t *>(out + 2 * place[k]) = static_cast<uint16_t>(half);
            out[16 + place[k]] = static_cast<uint8_t>(first + k);
        }
    }
    __syncwarp();
}

// The sum of the squares of what is left of a tile's means, in the codec's order: the channel bits
// from the top are q, c, e. A lane has consecutive e, the lanes' bits have the rest.
template <int D> __device__ __forceinline__ float residue_of(float *left)
{
    constexpr int COUNT = Means<D>::COUNT, Q = Geometry<D>::Q;
    auto over = [&](int mask) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            left[k] = __fadd_rn(left[k], __shfl_xor_sync(FULL, left[k], mask));
    };
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        left[k] = __fmul_rn(left[k], left[k]);
    if constexpr (Q >= 2)
        over(16);
    if constexpr (Q == 4)
        over(8);
    over(2);
    over(1);
    if constexpr (Q == 1)
        over(16);
    if constexpr (Q <= 2)
        over(8);
    if constexpr (D >= 32)
        over(4);
    if constexpr (COUNT == 4)
        return __fadd_rn(__fadd_rn(left[0], left[2]), __fadd_rn(left[1], left[3]));
    else if constexpr (COUNT == 2)
        return __fadd_rn(left[0], left[1]);
    else
        return left[0];
}

// ---- the transform ----

// The signs of the transform for rows of bf16: two channels a word, for the lanes with c = 0..3 of
// run q from masks[16 q] on. 64 words of shared memory.
__device__ __forceinline__ void fill_signs(uint32_t *masks)
{
    for (uint32_t at = threadIdx.x; at < 64; at += blockDim.x) {
        uint32_t pair = sign_word(at / 16) >> (at % 16 * 2);
        masks[at] = (pair & 1u) << 15 | (pair >> 1 & 1u) << 31;
    }
}

// Butterflies from neighbours up: first e, then c (lanes), then q. The signs are there already.
template <int D> __device__ __forceinline__ void transform(float *y, const Lane &lane)
{
    constexpr int E = Geometry<D>::E, PER = Geometry<D>::PER;
#pragma unroll
    for (int h = 1; h < E; h *= 2)
#pragma unroll
        for (int i = 0; i < PER; i++)
            if ((i & h) == 0) {
                float u = y[i], v = y[i + h];
                y[i] = __fadd_rn(u, v);
                y[i + h] = __fsub_rn(u, v);
            }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        float side = lane.c & bit ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < PER; i++)  // u + v below, u - v above: one exact product, one rounding
            y[i] = __fmaf_rn(y[i], side, __shfl_xor_sync(FULL, y[i], bit));
    }
#pragma unroll
    for (int h = E; h < PER; h *= 2)
#pragma unroll
        for (int i = 0; i < PER; i++)
            if ((i & h) == 0) {
                float u = y[i], v = y[i + h];
                y[i] = __fadd_rn(u, v);
                y[i + h] = __fsub_rn(u, v);
            }
}

// ---- bytes of a piece, put together in shared memory ----

// codes[e]: E codes of the run at `channel` of a token.
template <int D>
__device__ __forceinline__ void put_bytes(uint8_t *stage, uint32_t token, uint32_t channel,
                                          const uint32_t *codes)
{
#pragma unroll
    for (int e = 0; e < Geometry<D>::E; e += 4)
        *reinterpret_cast<uint32_t *>(stage + token * D + channel + e) =
            (codes[e] & 255u) | (codes[e + 1] & 255u) << 8 | (codes[e + 2] & 255u) << 16 |
            codes[e + 3] << 24;
}

template <int D>
__device__ __forceinline__ void put_nibbles(uint8_t *stage, uint32_t token, uint32_t channel,
                                            const uint32_t *codes)
{
    constexpr int E = Geometry<D>::E;
    uint32_t nibbles = 0;
#pragma unroll
    for (int e = 0; e < E; e++)
        nibbles |= (codes[e] & 15u) << (4 * e);
    uint8_t *at = stage + token * (D / 2) + channel / 2;
    if constexpr (E == 8)
        *reinterpret_cast<uint32_t *>(at) = nibbles;
    else
        *reinterpret_cast<uint16_t *>(at) = static_cast<uint16_t>(nibbles);
}

// The bits of the codes above the nibble, EXTRA of each.
template <int D, int EXTRA>
__device__ __forceinline__ void put_plane(uint8_t *stage, uint32_t token, uint32_t channel,
                                          const uint32_t *codes, const Lane &lane)
{
    constexpr int E = Geometry<D>::E;
    uint32_t plane = 0;
#pragma unroll
    for (int e = 0; e < E; e++)
        plane |= (codes[e] >> 4 & ((1u << EXTRA) - 1u)) << (EXTRA * e);
    uint8_t *at = stage + 8 * D + token * (D * EXTRA / 8) + channel * EXTRA / 8;
    if constexpr (E * EXTRA == 16) {
        *reinterpret_cast<uint16_t *>(at) = static_cast<uint16_t>(plane);
    } else if constexpr (E * EXTRA == 8) {
        *at = static_cast<uint8_t>(plane);
    } else {  // half a byte: two lanes share it
        uint32_t other = __shfl_xor_sync(FULL, plane, 1);
        if ((lane.c & 1) == 0)
            *at = static_cast<uint8_t>(plane | other << 4);
    }
}

__device__ __forceinline__ void flush_piece(const uint8_t *stage, uint32_t bytes, uint8_t *out,
                                            const Lane &lane)
{
    __syncwarp();
    for (uint32_t at = lane.id * 16; at < bytes; at += 512)
        *reinterpret_cast<uint4 *>(global(out + at)) = *reinterpret_cast<const uint4 *>(stage + at);
    __syncwarp();
}

// ---- one piece ----

// A row, with the transform's signs where it will be transformed: s (x - m) is s x - s m. The sign of
// a zero may differ from the codec's: nothing that is written depends on it.
template <int D>
__device__ __forceinline__ void load_signed(const kvt_gpu_part &part, const kvt_gpu_part *at,
                                            const char *row, uint32_t first, bool rotated,
                                            const uint32_t *masks, const Lane &lane, float *x)
{
    constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
    if (E == 8 && part.vector && part.dtype == DTYPE_BF16) {
        row += 2 * first;
#pragma unroll
        for (int q = 0; q < Q; q++) {
            uint4 v = *reinterpret_cast<const uint4 *>(global(row + (q * 32 + lane.c * 8) * 2));
            uint4 m = rotated ? *reinterpret_cast<const uint4 *>(masks + q * 16 + lane.c * 4)
                              : make_uint4(0, 0, 0, 0);
            uint32_t words[4] = {v.x ^ m.x, v.y ^ m.y, v.z ^ m.z, v.w ^ m.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[(q * E + 2 * i) % (Q * E)] = __uint_as_float(words[i] << 16);
                x[(q * E + 2 * i + 1) % (Q * E)] = __uint_as_float(words[i] & 0xffff0000u);
            }
        }
        return;
    }
    load_row<D>(*at, row, first, lane, x);
    if (!rotated)
        return;
#pragma unroll
    for (int q = 0; q < Q; q++) {
        uint32_t signs = sign_word(q) >> (lane.c * E);  // a run never crosses a word
#pragma unroll
        for (int e = 0; e < E; e++)
            x[q * E + e] = __uint_as_float(__float_as_uint(x[q * E + e]) ^
                                           ((signs << (31 - e)) & 0x80000000u));
    }
}

// Means, stored ones, and what is left of them (judge), of one piece.
template <int D>
__device__ __forceinline__ void take_offsets(const kvt_gpu_part &part, const kvt_gpu_part *at,
                                             const char *row, uint32_t first, uint8_t *out,
                                             float *stored, bool judge, const Lane &lane,
                                             Energy &energy)
{
    float x[2][D / 4], left[Means<D>::COUNT];
    Means<D> means;
    if (part.vector && part.dtype == DTYPE_BF16) {
        load_row_bf16<D>(row + 2 * first, lane, x[0]);
        load_row_bf16<D>(row + 2 * first + 8 * part.stride_token, lane, x[1]);
    } else {
        load_row<D>(*at, row, first, lane, x[0]);
        load_row<D>(*at, row + 8 * part.stride_token, first, lane, x[1]);
    }
    channel_means<D>(x, lane, means);
    choose_offsets<D>(means, lane, out, stored, left);
    if (!judge)
        return;
    float residue = residue_of<D>(left);
    energy.residue = first == 0 ? residue : __fadd_rn(energy.residue, residue);
}

// Coder: has bits() and rotated(), the same in all lanes, and
//   template <int D> Row row(const float *y, lane, uint8_t *stage, token, bool judge) const
// which codes a row into the stage; energies are wanted when judge is set.
//
// The two rows of a lane go one after the other, and are read again after the means: few registers
// and little code count more than the second read, which the L1 cache answers.
// stage: stored[] is at the half of where the codes go, and has been read for the last time when
// those of tokens 8 to 15 come.
template <int D, typename Coder>
__device__ __forceinline__ bool encode_piece(const kvt_gpu_part &part, const kvt_gpu_part *at,
                                             const char *rows, uint32_t first, const Coder &coder,
                                             uint8_t *stage, const uint32_t *masks, uint8_t *out,
                                             bool judge, const Lane &lane, Energy &energy)
{
    constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q, PER = Geometry<D>::PER;
    const uint32_t scales_at = 2 * D * coder.bits();
    const char *row = rows + part.stride_token * lane.row;
    bool with_offsets = part.key && coder.rotated(), fine = true;
    float *stored = reinterpret_cast<float *>(stage) + (coder.bits() == 8 ? 2 * D : D);
    if (with_offsets)
        take_offsets<D>(part, at, row, first, stage + scales_at + 32, stored, judge, lane, energy);
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
        uint32_t token = lane.row + 8 * h;
        float x[PER];
        load_signed<D>(part, at, row, first, coder.rotated(), masks, lane, x);
        row += 8 * part.stride_token;
        if (with_offsets) {
#pragma unroll
            for (int q = 0; q < Q; q++)
#pragma unroll
                for (int e = 0; e < E; e++)
                    x[q * E + e] = __fsub_rn(x[q * E + e], stored[q * 4 * E + lane.c * E + e]);
            __syncwarp();
        }
        if (coder.rotated())
            transform<D>(x, lane);
        Row row_result = coder.template row<D>(x, lane, stage, token, judge);
        fine &= row_result.fine;
        if (lane.c == 0)
            *reinterpret_cast<uint16_t *>(stage + scales_at + 2 * token) =
                static_cast<uint16_t>(row_result.scale);
        if (judge) {
            float rows_energy = __fmul_rn(row_result.energy, 1.0f / D);
            float noise = __fmul_rn(row_result.noise, 1.0f / D);
            if (first != 0) {
                rows_energy = __fadd_rn(h == 0 ? energy.rows[0] : energy.rows[1], rows_energy);
                noise = __fadd_rn(h == 0 ? energy.noise[0] : energy.noise[1], noise);
            }
            if (h == 0)
                energy.rows[0] = rows_energy, energy.noise[0] = noise;
            else
                energy.rows[1] = rows_energy, energy.noise[1] = noise;
        }
    }
    flush_piece(stage, scales_at + 32 + (with_offsets ? 32 : 0), out, lane);
    return fine;
}

// ---- guard (codec/guard.c) ----

// Energies of this lane's two rows in a piece, around the tile's mean and around zero.
template <int D>
__device__ __noinline__ void measure_piece(const kvt_gpu_part &part, const char *rows,
                                           uint32_t first, const Lane lane, float *mean,
                                           float *centred, float *squares)
{
    constexpr int E = Geometry<D>::E;
    float x[2][D / 4];
    Means<D> means;
    for (int h = 0; h < 2; h++)
        load_row<D>(part, rows + part.stride_token * (lane.row + 8 * h), first, lane, x[h]);
    channel_means<D>(x, lane, means);
    if (D >= 32 || (lane.row & 1) == 0)
#pragma unroll
        for (int k = 0; k < Means<D>::COUNT; k++)
            mean[means.channel[k]] = means.mean[k];
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float around = row_sum_of<D>([&](int i) {
            float d = __fsub_rn(x[h][i], mean[i / E * 4 * E + lane.c * E + i % E]);
            return __fmul_rn(d, d);
        });
        float square = row_sum_of<D>([&](int i) { return __fmul_rn(x[h][i], x[h][i]); });
        centred[h] = first == 0 ? around : __fadd_rn(centred[h], around);
        squares[h] = first == 0 ? square : __fadd_rn(squares[h], square);
    }
    __syncwarp();
}

__device__ __forceinline__ float tile_signal(const Energy &energy)
{
    float signal = __fsub_rn(token_sum(energy.rows), __fmul_rn(16.0f, energy.residue));
    return signal > 0.0f ? signal : 0.0f;
}

// The full rule, for tiles in doubt. mean: 128 floats of shared memory.
__device__ __noinline__ bool appeal(const kvt_gpu_part &part, const char *rows,
                                    const Energy energy, const Lane lane, float *mean)
{
    float centred[2], allowed[2];
    for (uint32_t first = 0, dim; first < part.head_dim; first += dim) {
        dim = next_dim(part.head_dim - first);
        if (dim == 128)
            measure_piece<128>(part, rows, first, lane, mean, centred, allowed);
        else if (dim == 64)
            measure_piece<64>(part, rows, first, lane, mean, centred, allowed);
        else if (dim == 32)
            measure_piece<32>(part, rows, first, lane, mean, centred, allowed);
        else
            measure_piece<16>(part, rows, first, lane, mean, centred, allowed);
    }
    float rounding = part.dtype == DTYPE_BF16 ? 0x1p-18f : part.dtype == DTYPE_F16 ? 0x1p-24f
                                                                                   : 0x1p-50f;
    bool pass = true;
    for (int h = 0; h < 2; h++) {
        allowed[h] = __fmul_rn(allowed[h], rounding);
        pass &= __fmul_rn(energy.noise[h], 4.0f) <= centred[h] || energy.noise[h] <= allowed[h];
    }
    float signal = tile_signal(energy), noise = token_sum(energy.noise);
    float sum = token_sum(allowed);
    pass &= __fmul_rn(noise, part.guard_ratio) <= signal || noise <= sum;
    return __all_sync(FULL, pass);
}

__device__ __forceinline__ bool passes(const kvt_gpu_part &part, const char *rows,
                                       const Energy &energy, const Lane &lane, float *mean)
{
    float signal = tile_signal(energy), noise = token_sum(energy.noise);
    bool pass = __fmul_rn(noise, part.guard_ratio) <= signal;
    for (int h = 0; h < 2; h++)
        pass &= __fadd_rn(__fmul_rn(energy.noise[h], 4.01f), __fmul_rn(energy.residue, 0.334f)) <=
                __fmul_rn(energy.rows[h], 0.249f);
    return __all_sync(FULL, pass) || appeal(part, rows, energy, lane, mean);
}

// ---- the loop over units ----

template <typename Coder>
__device__ __forceinline__ void encode_unit(const kvt_gpu_coding &job, const Unit &unit,
                                            const Coder &coder, uint8_t *stage, const uint32_t *masks,
                                            const Lane &lane)
{
    const kvt_gpu_part &part = *unit.at;  // registers are scarce here, and L1 is near
    bool judge = job.guard && part.guard_ratio > 0.0f, fine = true;
    uint8_t *out = unit.payload;
    Energy energy;
    for (uint32_t first = 0, dim; first < part.head_dim; first += dim) {
        dim = next_dim(part.head_dim - first);
        if (dim == 128)
            fine &= encode_piece<128>(part, unit.at, unit.rows, first, coder, stage, masks, out, judge, lane,
                                      energy);
        else if (dim == 64)
            fine &= encode_piece<64>(part, unit.at, unit.rows, first, coder, stage, masks, out, judge, lane,
                                      energy);
        else if (dim == 32)
            fine &= encode_piece<32>(part, unit.at, unit.rows, first, coder, stage, masks, out, judge, lane,
                                      energy);
        else
            fine &= encode_piece<16>(part, unit.at, unit.rows, first, coder, stage, masks, out, judge, lane,
                                      energy);
        out += 2 * dim * coder.bits() + 32 + (part.key && coder.rotated() ? 32 : 0);
    }
    fine = __all_sync(FULL, fine);
    bool good = fine && (!judge || passes(part, unit.rows, energy, lane, reinterpret_cast<float *>(stage)));
    if (!good && lane.id == 0)
        atomicMin(reinterpret_cast<uint32_t *>(job.status) + unit.record,
                  unit.order * 2 + (fine ? KVT_GPU_STATUS_GUARD : KVT_GPU_STATUS_NONFINITE));
}

}  // namespace kvt
