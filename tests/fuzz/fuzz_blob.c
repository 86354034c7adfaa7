/* A sequence state of llama.cpp of any bytes: the shape that is learnt stays within the blob, and a
 * blob that is taken holds each position once; nothing is read past its end.
 * Input: cells, then the blob. */
#include "fuzz/fuzz.h"
#include "kvtier/error.h"
#include "llama_blob.h"

#define SEQ 3

static void parse(const struct kvt_blob_shape *shape, uint32_t cells, const uint8_t *blob,
                  size_t size)
{
    const char *why = NULL;
    uint32_t order[64];
    uint64_t seen = 0;
    uint8_t *sorted_rows;
    int sorted = -1;
    int rc = kvt_blob_parse(shape, SEQ, 16, cells, blob, size, order, &sorted, &why);

    FUZZ_CHECK(rc == 0 || (rc == KVT_E_ENGINE && why != NULL));
    if (rc != 0)
        return;
    FUZZ_CHECK(kvt_blob_bytes(shape, cells) == size && (sorted == 0 || sorted == 1));
    for (uint32_t i = 0; i < cells; i++) {
        FUZZ_CHECK(order[i] < cells && !(seen >> order[i] & 1));
        seen |= 1ull << order[i];
    }
    sorted_rows = fuzz_memory(size);
    kvt_blob_write_headers(shape, SEQ, 16, cells, sorted_rows);
    kvt_blob_sort_rows(shape, cells, order, blob, sorted_rows);
    FUZZ_CHECK(kvt_blob_parse(shape, SEQ, 16, cells, sorted_rows, size, order, &sorted, &why) == 0);
    FUZZ_CHECK(sorted == 1);
    free(sorted_rows);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kvt_blob_row rows[] = {{1, 24}, {1, 24}, {1, 40}, {30, 40}};
    static const struct kvt_blob_shape plain = {2, 128, rows};
    struct fuzz_input in = {data, size};
    uint32_t cells = 1u + fuzz_u8(&in) % 64u;
    struct kvt_blob_shape learnt;
    const char *why = NULL;
    int rc = kvt_blob_learn(in.data, in.size, SEQ, 16, &learnt, &why);

    if (rc == 0) {
        FUZZ_CHECK(learnt.layers >= 1 && learnt.layers <= KVT_BLOB_LAYERS_MAX);
        FUZZ_CHECK(learnt.token_bytes < in.size);
        FUZZ_CHECK(kvt_blob_bytes(&learnt, 1) == in.size);
        parse(&learnt, 1, in.data, in.size);
        kvt_blob_shape_free(&learnt);
    } else {
        FUZZ_CHECK(rc < 0 && (rc == -12 || why != NULL));
    }
    parse(&plain, cells, in.data, in.size);
    return 0;
}
