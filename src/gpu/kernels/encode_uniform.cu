// Encoders of the uniform levels: int4 (on the elements themselves), kv6 and kv8.
#include "encode.cuh"

namespace kvt {

// y / a, correctly rounded, for many y and one a: Markstein's step on a correctly rounded
// reciprocal is exact as long as nothing leaves the normal range and a's fraction is not all ones
// (a has 8 bits). Tiny a are scaled up first, which is exact; quotients below 1/2 may be off, they
// round to zero anyway.
struct Divisor {
    float a, scale, reciprocal;
    __device__ explicit Divisor(float value)
    {
        scale = value < 0x1p-60f ? 0x1p+64f : 1.0f;
        a = value == 0.0f ? 1.0f : __fmul_rn(value, scale);
        reciprocal = __frcp_rn(a);
    }
    __device__ __forceinline__ float quotient(float y) const
    {
        float scaled = __fmul_rn(y, scale), q = __fmul_rn(scaled, reciprocal);
        return __fmaf_rn(__fmaf_rn(-a, q, scaled), reciprocal, q);
    }
};

struct Uniform {
    uint32_t bits_;
    __device__ uint32_t bits() const { return bits_; }
    __device__ bool rotated() const { return bits_ != 4; }

    template <int D>
    __device__ __forceinline__ Row row(const float *y, const Lane &lane, uint8_t *stage,
                                       uint32_t token, bool judge) const
    {
        Row out = {};
        constexpr int E = Geometry<D>::E, Q = Geometry<D>::Q;
        const float high = bits_ == 4 ? 7.0f : bits_ == 6 ? 31.0f : 127.0f;
        const float low = bits_ == 4 ? -8.0f : -high;
        uint32_t largest = row_largest<D>(y);
        out.fine = largest < 0x7e800000u;  // 2^126: no decoded number overflows
        float top = __uint_as_float(largest);
        out.scale = float_bf16(__fdiv_rn(top, high));
        if (__fmul_rn(bf16_float(out.scale), __fadd_rn(high, 0.5f)) < top)
            out.scale++;
        float a = bf16_float(out.scale), squares[Q * E];
        bool zero = a == 0.0f || !out.fine;
        const Divisor divisor(zero ? 1.0f : a);
#pragma unroll
        for (int q = 0; q < Q; q++) {
            uint32_t run[E], channel = q * 4 * E + lane.c * E;
#pragma unroll
            for (int e = 0; e < E; e++) {
                float v = zero ? 0.0f : divisor.quotient(y[q * E + e]);
                float rounded = __fadd_rn(fminf(fmaxf(v, low), high), MAGIC);
                float error = __fsub_rn(y[q * E + e],
                                        __fmul_rn(a, __fsub_rn(rounded, MAGIC)));
                squares[q * E + e] = __fmul_rn(error, error);
                run[e] = __float_as_uint(rounded);  // its low bits are the code
            }
            if (bits_ == 8)
                put_bytes<D>(stage, token, channel, run);
            else
                put_nibbles<D>(stage, token, channel, run);
            if (bits_ == 6)
                put_plane<D, 2>(stage, token, channel, run, lane);
        }
        if (judge) {
            out.noise = row_sum_of<D>([&](int i) { return squares[i]; });
            out.energy = row_sum_of<D>([&](int i) { return __fmul_rn(y[i], y[i]); });
        }
        return out;
    }
};

}  // namespace kvt

using namespace kvt;

extern "C" __global__ void __launch_bounds__(KVT_GPU_ENCODE_WARPS * 32, 1)
    kvt_gpu_encode_uniform(const __grid_constant__ kvt_gpu_coding job)
{
    KVT_LAUNCH_SHARED(shared);
    Lane lane;
    uint32_t *masks = reinterpret_cast<uint32_t *>(shared);
    uint8_t *stage = shared + KVT_GPU_SIGNS_BYTES + threadIdx.x / 32 * KVT_GPU_UNIFORM_STAGE_BYTES;
    fill_signs(masks);
    __syncthreads();
    for_units(job, [&](uint32_t record, uint32_t index) {
        Unit unit(job, record, index);
        Uniform coder = {unit.part.bits};
        encode_unit(job, unit, coder, stage, masks, lane);
    });
}
