/* Chained token keys: see kvtier/key.h; docs/format.md gives the exact bytes. Any thread, no state;
 * one digest context per call. The tags end in a zero byte, so that none is a prefix of another. */
#include "kvtier/key.h"

#include <string.h>

#include "base/checked.h"
#include "format/digest.h"

static const char root_tag[] = KVT_KEY_SCHEME ":root";
static const char block_tag[] = KVT_KEY_SCHEME ":block";

int kvt_key_root(const void *salt, size_t salt_len, uint8_t root[32])
{
    struct kvt_digest digest;
    int rc;

    if (!root || (!salt && salt_len))
        return KVT_E_INVAL;
    kvt_digest_open(&digest);
    kvt_digest_start(&digest);
    kvt_digest_bytes(&digest, root_tag, sizeof root_tag);
    kvt_digest_string(&digest, salt, salt_len);
    rc = kvt_digest_final(&digest, root);
    kvt_digest_close(&digest);
    return rc;
}

static int extras_check(const struct kvt_key_extra *extras, size_t n_extras)
{
    if (n_extras > UINT32_MAX || (n_extras && !extras))
        return KVT_E_INVAL;
    for (size_t i = 0; i < n_extras; i++)
        if (!extras[i].bytes && extras[i].len)
            return KVT_E_INVAL;
    return 0;
}

static int block_key(struct kvt_digest *digest, const uint8_t parent[32], const uint32_t *tokens,
                     uint32_t n_tokens, const struct kvt_key_extra *extras, size_t n_extras,
                     uint8_t out[32])
{
    kvt_digest_start(digest);
    kvt_digest_bytes(digest, block_tag, sizeof block_tag);
    kvt_digest_bytes(digest, parent, 32);
    kvt_digest_u32(digest, n_tokens);
    /* little-endian u32 in memory: record.c refuses to build elsewhere */
    kvt_digest_bytes(digest, tokens, n_tokens * sizeof *tokens);
    kvt_digest_u32(digest, (uint32_t)n_extras);
    for (size_t i = 0; i < n_extras; i++) {
        kvt_digest_u32(digest, extras[i].type);
        kvt_digest_u32(digest, extras[i].len);
        kvt_digest_bytes(digest, extras[i].bytes, extras[i].len);
    }
    return kvt_digest_final(digest, out);
}

long kvt_key_chain(const uint8_t root[32], const uint32_t *tokens, size_t n_tokens,
                   uint32_t block_tokens, const struct kvt_key_extra *extras, size_t n_extras,
                   uint16_t group, uint32_t shard, struct kvt_key *keys, size_t max_keys)
{
    struct kvt_digest digest;
    const uint8_t *parent = root;
    size_t count;
    int rc = 0;

    if (!root || (n_tokens && !tokens) || !block_tokens || block_tokens > KVT_BLOCK_TOKENS_MAX ||
        (max_keys && !keys) || extras_check(extras, n_extras))
        return KVT_E_INVAL;
    count = KVT_MIN(n_tokens / block_tokens, max_keys);
    kvt_digest_open(&digest);
    for (size_t i = 0; i < count && !rc; i++) {
        memset(&keys[i], 0, sizeof keys[i]);
        keys[i].hash_len = 32;
        keys[i].group = group;
        keys[i].shard = shard;
        rc = block_key(&digest, parent, tokens + i * block_tokens, block_tokens, extras, n_extras,
                       keys[i].hash);
        parent = keys[i].hash;
    }
    kvt_digest_close(&digest);
    return rc ? rc : (long)count;
}
