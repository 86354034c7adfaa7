/* The kernels of src/gpu/kernels/ on a CPU, for the fake driver. Two of them: fake_kernels.c takes
 * the same parameters and does the scalar codec's arithmetic; emulator/ runs the kernels' own code,
 * thread by thread. */
#ifndef KVT_TESTS_FAKE_KERNELS_H
#define KVT_TESTS_FAKE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

struct fake_launch {
    const char *kernel;
    const void *parameter;
    unsigned grid, block; /* CTAs; threads of each */
    unsigned shared_bytes;
    uint64_t seed; /* of the order in which threads run */
};

size_t fake_kernel_parameter_bytes(const char *kernel);
/* 0, or -1 for an unknown kernel, or one that went wrong: a fault. */
int fake_kernel_run(const struct fake_launch *launch);

#endif
