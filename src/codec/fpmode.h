/* The floating-point mode that the codec's arithmetic is defined in: round to nearest even,
 * subnormals kept, no traps. Hosts turn flush-to-zero on and traps on; we set our mode around a
 * call and give theirs back, status flags included. Thread: the calling one only.
 */
#ifndef KVT_CODEC_FPMODE_H
#define KVT_CODEC_FPMODE_H

#include <stdint.h>

#if defined(__x86_64__)

#include <xmmintrin.h>

typedef uint32_t kvt_fpmode;

static inline kvt_fpmode kvt_fpmode_enter(void)
{
    kvt_fpmode saved = _mm_getcsr();
    _mm_setcsr(0x1f80u); /* all exceptions masked, nearest even, DAZ and FTZ off */
    return saved;
}

static inline void kvt_fpmode_leave(kvt_fpmode saved)
{
    _mm_setcsr(saved);
}

#elif defined(__aarch64__)

typedef uint64_t kvt_fpmode;

static inline kvt_fpmode kvt_fpmode_enter(void)
{
    kvt_fpmode saved;
    uint64_t mode = 0; /* nearest even, FZ, FZ16, DN and traps off */
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
    return saved;
}

static inline void kvt_fpmode_leave(kvt_fpmode saved)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(saved));
}

#else

#include <fenv.h>

typedef fenv_t kvt_fpmode;

static inline kvt_fpmode kvt_fpmode_enter(void)
{
    fenv_t saved;
    feholdexcept(&saved);
    fesetround(FE_TONEAREST);
    return saved;
}

static inline void kvt_fpmode_leave(kvt_fpmode saved)
{
    fesetenv(&saved);
}

#endif
#endif
