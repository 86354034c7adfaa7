/* The AVX2 set: which file does what, and its own tables. */
#include "codec/avx2.h"

const uint8_t kvt_avx2_c4_biased[16] = {134, 146, 159, 172, 186, 203, 224, 255,
                                        122, 110, 97,  84,  70,  53,  32,  1};

const struct kvt_codec_kernels kvt_codec_avx2 = {
    .name = "avx2",
    .encode = kvt_avx2_encode,
    .centred = kvt_avx2_centred,
    .decode = kvt_avx2_decode,
};
