/* Records from a drive into GPU memory by cuFile: a buffer there, registered once, files, and reads
 * that also bring the head of each record (header, table of levels) to the host.
 *
 * Whether that is a direct path is not known here (gds.h). Threads: any; a kvt_gds_stream and a
 * kvt_gds_file by one thread at a time, but reads of one file may overlap. Everything here blocks.
 */
#ifndef KVT_GPU_GDS_READ_H
#define KVT_GPU_GDS_READ_H

#include "gpu/cufile.h"

struct kvt_gds_reader;

struct kvt_gds_reader_opts {
    const char *library;  /* NULL: "libcufile.so.0" */
    uint64_t bytes;       /* of the buffer in device memory */
    uint32_t chunk_bytes; /* the buffer is handed out in these; multiple of 65,536 */
    uint32_t head_bytes;  /* of host memory for the head of a record, one for each chunk */
};

/* 0; KVT_E_UNSUPPORTED cuFile is absent, does not start, or refuses the buffer; -ENOMEM;
 * KVT_E_DEVICE. reason: a sentence. The device outlives it. */
KVT_GPU_RESULT int kvt_gds_reader_new(struct kvt_gpu *gpu, const struct kvt_gds_reader_opts *opts,
                                      struct kvt_gds_reader **out, char *reason, size_t len);
/* Nothing is being read. NULL is allowed. */
void kvt_gds_reader_free(struct kvt_gds_reader *reader);

/* Where a record lies that was read at a chunk, and its head. Pure. */
uint64_t kvt_gds_address(const struct kvt_gds_reader *reader, uint32_t chunk);
uint8_t *kvt_gds_head(const struct kvt_gds_reader *reader, uint32_t chunk);

/* What cuFile said when a call last failed with -EIO: kvt_cufile_error() has it in words. */
int kvt_gds_last_code(const struct kvt_gds_reader *reader);

/* A thread's own stream, for the heads. 0; -ENOMEM; KVT_E_DEVICE. */
KVT_GPU_RESULT int kvt_gds_stream_new(struct kvt_gds_reader *reader, void **stream);
void kvt_gds_stream_free(struct kvt_gds_reader *reader, void *stream); /* NULL is allowed */

struct kvt_gds_file {
    int fd;
    void *handle; /* cuFile's; NULL: not open */
};

/* Open read-only, with O_DIRECT, never through a symbolic link. 0; -errno; -EIO cuFile refuses. */
KVT_GPU_RESULT int kvt_gds_file_open(struct kvt_gds_reader *reader, const char *path,
                                     struct kvt_gds_file *file);
void kvt_gds_file_close(struct kvt_gds_reader *reader, struct kvt_gds_file *file);

/* Read `bytes` (a multiple of 4,096) at `offset` of the file to a chunk, and the first head_bytes
 * of them to its head. 0; -ENODATA fewer came; -errno, -EIO; KVT_E_DEVICE. */
KVT_GPU_RESULT int kvt_gds_read(struct kvt_gds_reader *reader, void *stream,
                                const struct kvt_gds_file *file, uint64_t offset, uint32_t bytes,
                                uint32_t chunk);

#endif
