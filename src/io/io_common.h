/* Shared by the I/O backends: argument checks and limits. Nothing here keeps state. */
#ifndef KVT_IO_IO_COMMON_H
#define KVT_IO_IO_COMMON_H

#include "io/io.h"

/* Files open at once in one instance. A 7.68 TB root has 28,600 segments of 256 MiB. */
#define KVT_IO_FILES_MAX 32768

/* Requests in flight in one instance; submit() says -EAGAIN beyond it. */
#define KVT_IO_FLIGHT_MAX 1024u

/* 0; -EINVAL empty, "." or "..", '/' inside, or too long. */
__attribute__((warn_unused_result)) int kvt_io_name_check(const char *name);

/* Bytes of a data request, or -EINVAL (kind, alignment, piece count, extent beyond INT64_MAX). */
__attribute__((warn_unused_result)) int64_t kvt_io_req_bytes(const struct kvt_io_req *req);

/* The pieces of req from byte `skip` on, into out; returns their number. */
unsigned kvt_io_iov_from(const struct kvt_io_req *req, uint64_t skip,
                         struct iovec out[KVT_IO_IOV_MAX]);

#endif
