/* SHA-256 as a small builder: OpenSSL's EVP with one context per call of ours, however many digests
 * that call makes. Threads: one thread per builder. The first failure sticks and is returned by
 * kvt_digest_final(); a builder that failed to open may be used and closed like any other. */
#ifndef KVT_FORMAT_DIGEST_H
#define KVT_FORMAT_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#define KVT_DIGEST_BYTES 32u

struct kvt_digest {
    void *ctx; /* EVP_MD_CTX */
    int error; /* 0, -ENOMEM, -EIO */
};

void kvt_digest_open(struct kvt_digest *digest);
void kvt_digest_close(struct kvt_digest *digest);

/* Start a new digest; anything unfinished is dropped. */
void kvt_digest_start(struct kvt_digest *digest);
void kvt_digest_bytes(struct kvt_digest *digest, const void *bytes, size_t len);
void kvt_digest_u32(struct kvt_digest *digest, uint32_t value); /* little-endian */
void kvt_digest_u64(struct kvt_digest *digest, uint64_t value);
/* u64 length, then the bytes. */
void kvt_digest_string(struct kvt_digest *digest, const void *bytes, size_t len);
/* 0 and out filled, or the first error. */
__attribute__((warn_unused_result)) int kvt_digest_final(struct kvt_digest *digest,
                                                         uint8_t out[KVT_DIGEST_BYTES]);

#endif
