/* src/gpu/kernels/instructions.cuh for a CPU. See there for what each one is. */
#ifndef KVT_TESTS_INSTRUCTIONS_HPP
#define KVT_TESTS_INSTRUCTIONS_HPP
#define KVT_GPU_INSTRUCTIONS /* instead of the header of the kernels */

#define KVT_LAUNCH_SHARED(name) uint8_t *name = emulator::launch_memory()

namespace kvt
{

template <typename T> T &own_shared()
{
    return *static_cast<T *>(emulator::own_memory(sizeof(T)));
}

/* Not 0: a GPU of today keeps the first KiB for itself. */
constexpr uint32_t SHARED_START = 1024;

inline uint32_t shared_address(const void *at)
{
    return SHARED_START +
           static_cast<uint32_t>(static_cast<const uint8_t *>(at) - emulator::launch_memory());
}
inline uint32_t load_shared(uint32_t address)
{
    uint32_t word;
    emulator::require(address % 4 == 0, "a shared address that is not of a word");
    emulator::require(address >= SHARED_START &&
                          address - SHARED_START + 4 <= emulator::launch_memory_bytes(),
                      "a shared address beyond the launch's memory");
    memcpy(&word, emulator::launch_memory() + (address - SHARED_START), 4);
    return word;
}
inline void prefetch(const void *at)
{
    volatile char byte = *static_cast<const char *>(at); /* a sanitizer looks at it */
    (void)byte;
}

inline uint32_t nearest_bf16(float x)
{
    uint32_t bits = __float_as_uint(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline uint32_t bf16_pair(float low, float high)
{
    return nearest_bf16(low) | nearest_bf16(high) << 16;
}
/* Adding a power of two leaves the fraction's last place there: the sum rounds, ties to even. */
inline uint32_t nearest_f16(float x)
{
    uint32_t sign = __float_as_uint(x) >> 16 & 0x8000u;
    float size = fabsf(x);
    if (size != size)
        return 0x7fffu;
    if (size < 0x1p-14f) /* steps of 2^-24 */
        return sign | (__float_as_uint(size + 0.5f) - __float_as_uint(0.5f));
    uint32_t bits = __float_as_uint(size);
    bits = (bits + 0xfffu + (bits >> 13 & 1u)) >> 13; /* 10 bits of fraction */
    bits -= (127u - 15u) << 10;
    return sign | min(bits, 0x7c00u);
}
inline uint32_t f16_pair(float low, float high)
{
    return nearest_f16(low) | nearest_f16(high) << 16;
}
inline float f16_float(uint32_t half)
{
    uint32_t exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
    float size = exponent == 0    ? static_cast<float>(fraction) * 0x1p-24f
                 : exponent == 31 ? __uint_as_float(0x7f800000u | fraction << 13)
                                  : __uint_as_float((exponent + 112u) << 23 | fraction << 13);
    return half & 0x8000u ? -size : size;
}

/* Another ulp each time, and for each lane: nothing may depend on it. */
inline float about_reciprocal(float x)
{
    float exact = 1.0f / x;
    uint32_t step = emulator::random_word() % 3;
    return std::isnormal(exact) ? __uint_as_float(__float_as_uint(exact) + step - 1) : exact;
}
inline float fma_saturated(float a, float b, float c)
{
    float out = fmaf(a, b, c);
    return out > 0.0f ? (out < 1.0f ? out : 1.0f) : 0.0f;
}
inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector)
{
    uint32_t out = __byte_perm(low, high, selector);
    for (int i = 0; i < 4; i++)
        if (selector >> (4 * i + 3) & 1u) {
            uint32_t signs = out >> (8 * i + 7) & 1u ? 255u : 0u;
            out = (out & ~(255u << (8 * i))) | signs << (8 * i);
        }
    return out;
}
inline void multiply(uint32_t (&acc)[4], const uint32_t *a, uint32_t b0, uint32_t b1)
{
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const unsigned lane = threadIdx.x % emulator::LANES, row = lane / 4, column = lane % 4 * 2;
    uint64_t number = emulator::give(emulator::Act::MULTIPLY, words, sizeof(words));
    emulator::meet(number, emulator::Act::MULTIPLY);
    for (unsigned c = 0; c < 4; c++) { /* who has the k of both operands */
        const uint32_t *rows = emulator::take(number, emulator::Act::MULTIPLY, row * 4 + c).words;
        for (unsigned j = 0; j < 2; j++) {
            const uint32_t *columns =
                emulator::take(number, emulator::Act::MULTIPLY, (column + j) * 4 + c).words + 4;
            for (unsigned h = 0; h < 2; h++)
                acc[2 * h + j] = static_cast<uint32_t>(
                    __dp4a(static_cast<int>(rows[2 + h]), static_cast<int>(columns[1]),
                           __dp4a(static_cast<int>(rows[h]), static_cast<int>(columns[0]),
                                  static_cast<int>(acc[2 * h + j]))));
        }
    }
    emulator::leave(number);
}

} // namespace kvt

#endif
