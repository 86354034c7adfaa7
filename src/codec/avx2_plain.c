#include "codec/avx2.h"
void kvt_avx2_decode_plain(const struct kvt_piece *piece, const uint8_t *in, void *rows,
                           size_t stride_bytes)
{
    kvt_codec_scalar.decode(piece, in, rows, stride_bytes);
}

int kvt_avx2_encode_plain(const struct kvt_piece *piece, const void *rows, size_t stride_bytes,
                          uint8_t *out)
{
    return kvt_codec_scalar.encode(piece, rows, stride_bytes, out, NULL);
}
