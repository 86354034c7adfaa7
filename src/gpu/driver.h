/* Loading the CUDA driver. See cuda_abi.h for the table.
 * Threads: any. Blocks: for the driver's start (a fraction of a second the first time). */
#ifndef KVT_GPU_DRIVER_H
#define KVT_GPU_DRIVER_H

#include "gpu/cuda_abi.h"

/* Load the driver, fill the table and initialise it (cuInit).
 * library: path or name; NULL: "libcuda.so.1".
 * reason:  one sentence when it fails: what is missing and what would help.
 * Returns 0; KVT_E_UNSUPPORTED no driver, a driver older than CUDA 12.0, no device;
 *         KVT_E_DEVICE the driver refuses to start. On success kvt_cuda_unload() ends it. */
__attribute__((warn_unused_result)) int kvt_cuda_load(struct kvt_cuda *cuda, const char *library,
                                                      char *reason, size_t reason_len);
void kvt_cuda_unload(struct kvt_cuda *cuda);

/* Name of a result ("CUDA_ERROR_OUT_OF_MEMORY"). Static string, never NULL. */
const char *kvt_cuda_error_name(const struct kvt_cuda *cuda, kvt_cu_result result);

/* 0; -ENOMEM; KVT_E_UNSUPPORTED (no device); KVT_E_DEVICE everything else. */
int kvt_cuda_status(kvt_cu_result result);

#endif
