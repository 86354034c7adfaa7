// What a GPU has and C++ has no words for: single instructions, and the shared memory of a CTA.
// Kernels say them through these functions alone. A test that runs the kernels on a CPU defines
// KVT_GPU_INSTRUCTIONS beforehand and brings its own (tests/gpu/emulator/).
#ifndef KVT_GPU_INSTRUCTIONS
#define KVT_GPU_INSTRUCTIONS

#include <cstdint>
#include <cuda_fp16.h>

// Declares the shared memory that the launch asked for. (A function that returned its address made
// other machine code of the dense encoders.)
#define KVT_LAUNCH_SHARED(name) extern __shared__ __align__(16) uint8_t name[]

namespace kvt {

// A T in the CTA's shared memory. One a kernel.
template <typename T> __device__ __forceinline__ T &own_shared()
{
    __shared__ T shared;
    return shared;
}

__device__ __forceinline__ uint32_t shared_address(const void *at)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address)
{
    uint32_t word;
    asm("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}

// The line at `at`, of global memory, into the cache that all multiprocessors share.
__device__ __forceinline__ void prefetch(const void *at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Two floats to two halves, nearest even.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    uint32_t out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ uint32_t f16_pair(float low, float high)
{
    uint32_t out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float f16_float(uint32_t half)
{
    return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
}

// About 1 / x: at most an ulp off.
__device__ __forceinline__ float about_reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// a * b + c, rounded once, into [0, 1]; 0 for NaN.
__device__ __forceinline__ float fma_saturated(float a, float b, float c)
{
    float out;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(out) : "f"(a), "f"(b), "f"(c));
    return out;
}

// Each nibble of the selector takes a byte of {low, high}; with its top bit set, that byte's sign
// bit eight times. (__byte_perm() has no such mode.)
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector)
{
    uint32_t out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
    return out;
}

// acc += A * B of a warp: A 16 x 32 and B 32 x 8 of int8, acc 16 x 8 of int32. Lane 4g + c has of A
// the bytes 4c.. and 4c+16.. (k) of the rows g and g+8 as {g 4c.., g+8 4c.., g 4c+16.., g+8 4c+16..},
// of B the same k of column g, of acc the columns 2c and 2c+1 of both rows.
__device__ __forceinline__ void multiply(uint32_t (&acc)[4], const uint32_t *a, uint32_t b0,
                                         uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace kvt

#endif
