/* A build without nvcc: the table is empty, and kvt_gpu_open() says so. */
#include "gpu/gpu_internal.h"

const int kvt_gpu_images_built = 0;
const struct kvt_gpu_image kvt_gpu_images[KVT_GPU_KERNELS];
