// Encoder of the keys of kv5.
#include "encode_gauss.cuh"

extern "C" __global__ void __launch_bounds__(KVT_GPU_ENCODE_WARPS * 32, 1)
    kvt_gpu_encode_c5(const __grid_constant__ kvt_gpu_coding job)
{
    kvt::encode_gauss<5>(job);
}
