/* The words of CUDA C++ that the kernels of src/gpu/kernels/ use, for a CPU: included before a .cu
 * file, which then compiles as C++. Arithmetic is IEEE, as the kernels' own flags ask for: compile
 * with -ffp-contract=off. */
#ifndef KVT_TESTS_CUDA_HPP
#define KVT_TESTS_CUDA_HPP

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "warp.hpp"

#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ inline /* one definition for all files that include it */
#define __launch_bounds__(...)
#define __builtin_assume(what) emulator::require(what, #what)

/* ---- vectors ---- */

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

/* ---- numbers ---- */

template <typename T> constexpr T max(T a, T b)
{
    return a < b ? b : a;
}
template <typename T> constexpr T min(T a, T b)
{
    return b < a ? b : a;
}
inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float __fadd_rn(float a, float b)
{
    return a + b;
}
inline float __fsub_rn(float a, float b)
{
    return a - b;
}
inline float __fmul_rn(float a, float b)
{
    return a * b;
}
inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
inline float __frcp_rn(float a)
{
    return 1.0f / a;
}
inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}
inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
inline int __popc(uint32_t x)
{
    return __builtin_popcount(x);
}
inline uint32_t __brev(uint32_t x)
{
    uint32_t out = 0;
    for (int i = 0; i < 32; i++)
        out |= (x >> i & 1u) << (31 - i);
    return out;
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b)
{
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int8_t byte_of(uint32_t word, int i)
{
    return static_cast<int8_t>(word >> (8 * i));
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector)
{
    uint64_t both = static_cast<uint64_t>(y) << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++)
        out |= static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7u)) & 255u) << (8 * i);
    return out;
}
/* Sums wrap, as registers do. */
inline int dot_pairs(int halves, int bytes, int sum, int first)
{
    int low = static_cast<int16_t>(halves) * byte_of(static_cast<uint32_t>(bytes), first);
    int high = static_cast<int16_t>(static_cast<uint32_t>(halves) >> 16) *
               byte_of(static_cast<uint32_t>(bytes), first + 1);
    return static_cast<int>(static_cast<uint32_t>(sum) + static_cast<uint32_t>(low) +
                            static_cast<uint32_t>(high));
}
inline int __dp2a_lo(int halves, int bytes, int sum)
{
    return dot_pairs(halves, bytes, sum, 0);
}
inline int __dp2a_hi(int halves, int bytes, int sum)
{
    return dot_pairs(halves, bytes, sum, 2);
}
inline int __dp4a(int a, int b, int sum)
{
    for (int i = 0; i < 4; i++)
        sum += byte_of(static_cast<uint32_t>(a), i) * byte_of(static_cast<uint32_t>(b), i);
    return sum;
}

/* ---- memory ---- */

template <typename T> T __ldg(const T *at)
{
    return *at;
}
template <typename T> T __ldcg(const T *at)
{
    return *at;
}
inline bool __isGlobal(const void *at)
{
    const uint8_t *own = static_cast<const uint8_t *>(at), *shared = emulator::launch_memory();
    return own < shared || own >= shared + emulator::launch_memory_bytes();
}
inline void __threadfence()
{
}
inline uint32_t atomicAdd(uint32_t *at, uint32_t value)
{
    uint32_t before = *at;
    *at += value;
    return before;
}
inline uint32_t atomicMin(uint32_t *at, uint32_t value)
{
    uint32_t before = *at;
    *at = min(before, value);
    return before;
}

/* ---- what lanes do together: only whole warps do ---- */

inline void whole(uint32_t mask)
{
    emulator::require(mask == 0xffffffffu, "lanes of a part of a warp");
}
template <typename T> T __shfl_sync(uint32_t mask, T value, uint32_t from)
{
    whole(mask);
    return emulator::exchange(value, from);
}
template <typename T> T __shfl_xor_sync(uint32_t mask, T value, uint32_t bits)
{
    whole(mask);
    return emulator::exchange(value, threadIdx.x ^ bits);
}
inline uint32_t __ballot_sync(uint32_t mask, bool vote)
{
    whole(mask);
    return emulator::gather(
        emulator::Act::VOTE, vote, 0,
        [](uint32_t out, uint32_t word, unsigned lane) { return out | word << lane; });
}
inline bool __all_sync(uint32_t mask, bool vote)
{
    return __ballot_sync(mask, vote) == 0xffffffffu;
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value)
{
    whole(mask);
    return emulator::gather(emulator::Act::REDUCE, value, 0,
                            [](uint32_t out, uint32_t word, unsigned) { return max(out, word); });
}
inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value)
{
    whole(mask);
    return emulator::gather(emulator::Act::REDUCE, value, 0xffffffffu,
                            [](uint32_t out, uint32_t word, unsigned) { return min(out, word); });
}
inline uint32_t __match_any_sync(uint32_t mask, uint32_t value)
{
    whole(mask);
    return emulator::gather(emulator::Act::MATCH, value, 0,
                            [value](uint32_t out, uint32_t word, unsigned lane) {
                                return out | static_cast<uint32_t>(word == value) << lane;
                            });
}
inline void __syncwarp()
{
    uint64_t number = emulator::give(emulator::Act::SYNC, nullptr, 0);
    emulator::meet(number, emulator::Act::SYNC);
    emulator::leave(number);
}
inline void __syncthreads()
{
    emulator::sync_block();
}

#include "instructions.hpp"

#endif
