/* kvt_encode_block() and kvt_decode_block() with a named instruction set: for tests and benchmarks,
 * which compare them within one process. Contract: kvtier/codec.h. */
#ifndef KVT_CODEC_BLOCK_H
#define KVT_CODEC_BLOCK_H

#include "codec/kernel.h"
#include "kvtier/codec.h"

int kvt_encode_block_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                        uint16_t group, int level, const struct kvt_pool_desc *pool, uint32_t block,
                        void *payload, size_t payload_len, int guard,
                        struct kvt_encode_report *report);
int kvt_decode_block_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                        uint16_t group, int level, const void *payload, size_t payload_len,
                        const struct kvt_pool_desc *pool, uint32_t block);
int kvt_encode_map_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                      uint16_t group, const uint8_t *map, const struct kvt_pool_desc *pool,
                      uint32_t block, void *payload, size_t payload_len, int guard,
                      struct kvt_encode_report *report);
int kvt_decode_map_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                      uint16_t group, const uint8_t *map, const void *payload, size_t payload_len,
                      const struct kvt_pool_desc *pool, uint32_t block);
long kvt_map_fit_by(const struct kvt_codec_kernels *kernels, const struct kvt_layout *layout,
                    uint16_t group, uint8_t *map, const struct kvt_pool_desc *pool, uint32_t block);

#endif
