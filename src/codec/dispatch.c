/* Which instruction set codes: the one place that asks the CPU and the environment.
 *
 * KVTIER_CODEC_ISA=scalar|avx2 forces one; a name that is unknown, or that this CPU or build lacks,
 * gets scalar, which is always right. The choice is made once; racing first callers come to the
 * same answer, so a relaxed store is enough.
 */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codec/kernel.h"
#include "kvtier/codec.h"

#if defined(__x86_64__)
/* clang 14 does not know "f16c" as a word of __builtin_cpu_supports(). */
static int has_avx2_and_f16c(void)
{
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

size_t kvt_codec_kernels_all(const struct kvt_codec_kernels **sets, size_t max)
{
    size_t count = 0;
    if (count < max)
        sets[count++] = &kvt_codec_scalar;
#if defined(__x86_64__)
    if (count < max && has_avx2_and_f16c())
        sets[count++] = &kvt_codec_avx2;
#endif
    return count;
}

static const struct kvt_codec_kernels *choose(void)
{
    const struct kvt_codec_kernels *sets[4];
    size_t count = kvt_codec_kernels_all(sets, 4);
    const char *forced = getenv("KVTIER_CODEC_ISA");
    if (forced == NULL || forced[0] == '\0')
        return sets[count - 1]; /* the last is the best */
    for (size_t i = 0; i < count; i++)
        if (strcmp(sets[i]->name, forced) == 0)
            return sets[i];
    return &kvt_codec_scalar;
}

const struct kvt_codec_kernels *kvt_codec_kernels(void)
{
    static _Atomic(const struct kvt_codec_kernels *) chosen;
    const struct kvt_codec_kernels *kernels = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (kernels == NULL) {
        kernels = choose();
        atomic_store_explicit(&chosen, kernels, memory_order_relaxed);
    }
    return kernels;
}

const char *kvt_codec_isa(void)
{
    return kvt_codec_kernels()->name;
}
