/* The kernels of src/gpu/kernels/ on a CPU: the same parameters, the scalar codec's arithmetic. */
#ifndef KVT_TESTS_FAKE_KERNELS_H
#define KVT_TESTS_FAKE_KERNELS_H

#include <stddef.h>

size_t fake_kernel_parameter_bytes(const char *kernel);
/* 0, or -1 for an unknown kernel: a fault. */
int fake_kernel_run(const char *kernel, const void *parameter);

#endif
