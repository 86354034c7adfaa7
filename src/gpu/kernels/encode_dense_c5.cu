// Encoder of the keys of kv5, rows of 128 bf16 elements.
#include "encode_dense.cuh"

extern "C" __global__ void __launch_bounds__(KVT_GPU_ENCODE_WARPS * 32, 1)
    kvt_gpu_encode_dense_c5(const __grid_constant__ kvt_gpu_coding job)
{
    kvt::encode_dense<5>(job);
}
