/* SHA-256 builder over OpenSSL EVP: see digest.h. The algorithm is fetched once per builder;
 * starting again with a NULL type only resets the state, which keeps a chain of short digests
 * cheap. */
#include "format/digest.h"

#include <errno.h>
#include <openssl/evp.h>

void kvt_digest_open(struct kvt_digest *digest)
{
    digest->error = 0;
    digest->ctx = EVP_MD_CTX_new();
    if (!digest->ctx)
        digest->error = -ENOMEM;
    else if (!EVP_DigestInit_ex(digest->ctx, EVP_sha256(), NULL))
        digest->error = -EIO;
}

void kvt_digest_close(struct kvt_digest *digest)
{
    EVP_MD_CTX_free(digest->ctx);
    digest->ctx = NULL;
}

void kvt_digest_start(struct kvt_digest *digest)
{
    if (!digest->error && !EVP_DigestInit_ex(digest->ctx, NULL, NULL))
        digest->error = -EIO;
}

void kvt_digest_bytes(struct kvt_digest *digest, const void *bytes, size_t len)
{
    if (!digest->error && len && !EVP_DigestUpdate(digest->ctx, bytes, len))
        digest->error = -EIO;
}

void kvt_digest_u32(struct kvt_digest *digest, uint32_t value)
{
    uint8_t bytes[4];

    for (int i = 0; i < 4; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
    kvt_digest_bytes(digest, bytes, sizeof bytes);
}

void kvt_digest_u64(struct kvt_digest *digest, uint64_t value)
{
    kvt_digest_u32(digest, (uint32_t)value);
    kvt_digest_u32(digest, (uint32_t)(value >> 32));
}

void kvt_digest_string(struct kvt_digest *digest, const void *bytes, size_t len)
{
    kvt_digest_u64(digest, len);
    kvt_digest_bytes(digest, bytes, len);
}

int kvt_digest_final(struct kvt_digest *digest, uint8_t out[KVT_DIGEST_BYTES])
{
    unsigned len = 0;

    if (!digest->error && (!EVP_DigestFinal_ex(digest->ctx, out, &len) || len != KVT_DIGEST_BYTES))
        digest->error = -EIO;
    return digest->error;
}
