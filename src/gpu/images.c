/* The kernels as bytes: fatbins made by nvcc, taken in by the assembler. KVT_GPU_IMAGE_DIR is where
 * the build put them; without it they are empty, for tests whose driver has kernels of its own. See
 * kernels/ for the sources. */
#include "gpu/gpu_internal.h"

#ifdef KVT_GPU_IMAGE_DIR
#define IMAGE(name)                                                \
    __asm__(".pushsection .rodata\n"                               \
            ".balign 64\n"                                         \
            "kvt_gpu_image_" #name ":\n"                           \
            ".incbin \"" KVT_GPU_IMAGE_DIR "/" #name ".fatbin\"\n" \
            ".popsection\n");                                      \
    extern const uint8_t kvt_gpu_image_##name[] __attribute__((visibility("hidden")))
#else
#define IMAGE(name) static const uint8_t kvt_gpu_image_##name[1]
#endif

IMAGE(decode);
IMAGE(encode_dense_c4);
IMAGE(encode_dense_c5);
IMAGE(encode_c4);
IMAGE(encode_c5);
IMAGE(encode_uniform);
IMAGE(raw);
IMAGE(pages);

const int kvt_gpu_images_built = 1;

const struct kvt_gpu_image kvt_gpu_images[KVT_GPU_KERNELS] = {
    [KVT_GPU_DECODE] = {"kvt_gpu_decode", kvt_gpu_image_decode, 0, KVT_GPU_WARPS},
    [KVT_GPU_ENCODE_DENSE_C4] = {"kvt_gpu_encode_dense_c4", kvt_gpu_image_encode_dense_c4,
                                 KVT_GPU_DENSE_C4_SHARED, KVT_GPU_ENCODE_WARPS},
    [KVT_GPU_ENCODE_DENSE_C5] = {"kvt_gpu_encode_dense_c5", kvt_gpu_image_encode_dense_c5,
                                 KVT_GPU_DENSE_C5_SHARED, KVT_GPU_ENCODE_WARPS},
    [KVT_GPU_ENCODE_C4] = {"kvt_gpu_encode_c4", kvt_gpu_image_encode_c4, KVT_GPU_ENCODE_C4_SHARED,
                           KVT_GPU_ENCODE_WARPS},
    [KVT_GPU_ENCODE_C5] = {"kvt_gpu_encode_c5", kvt_gpu_image_encode_c5, KVT_GPU_ENCODE_C5_SHARED,
                           KVT_GPU_ENCODE_WARPS},
    [KVT_GPU_ENCODE_UNIFORM] = {"kvt_gpu_encode_uniform", kvt_gpu_image_encode_uniform,
                                KVT_GPU_ENCODE_UNIFORM_SHARED, KVT_GPU_ENCODE_WARPS},
    [KVT_GPU_RAW_GATHER] = {"kvt_gpu_raw_gather", kvt_gpu_image_raw, 0, KVT_GPU_WARPS},
    [KVT_GPU_RAW_SCATTER] = {"kvt_gpu_raw_scatter", kvt_gpu_image_raw, 0, KVT_GPU_WARPS},
    [KVT_GPU_PAGES] = {"kvt_gpu_pages", kvt_gpu_image_pages, 0, KVT_GPU_WARPS},
};
