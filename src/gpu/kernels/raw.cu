// Raw parts: rows between pool and payload, as they are. One warp per 16 rows.
#include "device.cuh"

namespace kvt {

template <typename T>
__device__ __forceinline__ void move(bool to_pool, char *pool, char *payload)
{
    if (to_pool)
        *reinterpret_cast<T *>(pool) = *reinterpret_cast<const T *>(payload);
    else
        *reinterpret_cast<T *>(payload) = *reinterpret_cast<const T *>(pool);
}

// step: bytes moved at a time.
template <typename T>
__device__ __forceinline__ void move_rows(const kvt_gpu_part &part, const Unit &unit, bool to_pool,
                                          const Lane &lane)
{
    uint32_t row_bytes = part.head_dim * part.element_bytes, steps = row_bytes / sizeof(T);
    int64_t stride = sizeof(T) == part.element_bytes ? part.stride_elem : sizeof(T);
    for (uint32_t i = lane.id; i < 16 * steps; i += 32) {
        uint32_t token = i / steps, step = i % steps;
        move<T>(to_pool, unit.rows + part.stride_token * token + stride * step,
                reinterpret_cast<char *>(unit.payload) + i * sizeof(T));
    }
}

__device__ __forceinline__ void move_units(const kvt_gpu_coding &job, bool to_pool)
{
    Lane lane;
    for_units(job, [&](uint32_t record, uint32_t index) {
        Unit unit(job, record, index);
        const kvt_gpu_part &part = unit.part;
        if (part.vector)
            move_rows<uint4>(part, unit, to_pool, lane);
        else if (part.element_bytes == 4)
            move_rows<uint32_t>(part, unit, to_pool, lane);
        else if (part.element_bytes == 2)
            move_rows<uint16_t>(part, unit, to_pool, lane);
        else
            move_rows<uint8_t>(part, unit, to_pool, lane);
    });
}

}  // namespace kvt

extern "C" __global__ void __launch_bounds__(KVT_GPU_WARPS * 32, 1)
    kvt_gpu_raw_gather(const __grid_constant__ kvt_gpu_coding job)
{
    kvt::move_units(job, false);
}

extern "C" __global__ void __launch_bounds__(KVT_GPU_WARPS * 32, 1)
    kvt_gpu_raw_scatter(const __grid_constant__ kvt_gpu_coding job)
{
    kvt::move_units(job, true);
}
