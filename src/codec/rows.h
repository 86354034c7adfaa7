/* Rows of one (part, head) of a page, for block.c: gathering elements out of a pool of any strides
 * into dense rows, scattering them back, and copying rows that are stored raw.
 * Offsets cannot overflow once shape.c has passed the pool. Pure functions over memory.
 */
#ifndef KVT_CODEC_ROWS_H
#define KVT_CODEC_ROWS_H

#include <string.h>

#include "codec/piece.h"

/* Where one (part, head) of a page lies. */
struct rows {
    char *base; /* token 0, element 0 */
    int64_t stride_token;
    int64_t stride_elem;
    uint32_t element_bytes;
    uint32_t head_dim;
};

static inline struct rows rows_of(const struct kvt_part *part, const struct kvt_part_place *place,
                                  uint32_t block, uint32_t head)
{
    return (struct rows){
        .base = (char *)place->base + place->stride_block * block + place->stride_head * head,
        .stride_token = place->stride_token,
        .stride_elem = place->stride_elem,
        .element_bytes = kvt_dtype_bytes(part->dtype),
        .head_dim = part->head_dim,
    };
}

static inline int is_contiguous(const struct rows *rows)
{
    return rows->stride_elem == (int64_t)rows->element_bytes;
}

/* ---- moving elements between a pool of any strides and dense rows ---- */

#define COPY_ELEMENTS(type)                  \
    for (uint32_t t = 0; t < tokens; t++)    \
        for (uint32_t i = 0; i < count; i++) \
    memcpy(to + t * to_token + i * to_elem, from + t * from_token + i * from_elem, sizeof(type))

static inline void copy_elements(char *to, int64_t to_token, int64_t to_elem, const char *from,
                                 int64_t from_token, int64_t from_elem, uint32_t tokens,
                                 uint32_t count, uint32_t element_bytes)
{
    if (element_bytes == 2)
        COPY_ELEMENTS(uint16_t);
    else if (element_bytes == 4)
        COPY_ELEMENTS(uint32_t);
    else
        COPY_ELEMENTS(uint8_t);
}

static inline void gather(const struct rows *rows, uint32_t token, uint32_t tokens,
                          uint32_t element, uint32_t count, void *dense)
{
    int64_t size = rows->element_bytes;
    copy_elements(dense, size * count, size,
                  rows->base + rows->stride_token * token + rows->stride_elem * element,
                  rows->stride_token, rows->stride_elem, tokens, count, rows->element_bytes);
}

static inline void scatter(const struct rows *rows, uint32_t token, uint32_t tokens,
                           uint32_t element, uint32_t count, const void *dense)
{
    int64_t size = rows->element_bytes;
    copy_elements(rows->base + rows->stride_token * token + rows->stride_elem * element,
                  rows->stride_token, rows->stride_elem, dense, size * count, size, tokens, count,
                  rows->element_bytes);
}

/* ---- raw ---- */

static inline size_t copy_raw(const struct rows *rows, uint32_t tokens, void *payload,
                              int to_payload)
{
    size_t row_bytes = (size_t)rows->head_dim * rows->element_bytes;
    for (uint32_t t = 0; t < tokens; t++) {
        char *dense = (char *)payload + t * row_bytes;
        char *row = rows->base + rows->stride_token * t;
        if (!is_contiguous(rows) && to_payload)
            gather(rows, t, 1, 0, rows->head_dim, dense);
        else if (!is_contiguous(rows))
            scatter(rows, t, 1, 0, rows->head_dim, dense);
        else if (to_payload)
            memcpy(dense, row, row_bytes);
        else
            memcpy(row, dense, row_bytes);
    }
    return tokens * row_bytes;
}

#endif
