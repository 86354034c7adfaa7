/* Names, MACs, verification: see remote_seal.h. */
#include "remote/remote_seal.h"

#include <stdio.h>
#include <string.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "kvtier/error.h"
#include "remote/remote_secret.h"

#define MAC_KEY_MIN 32u

static size_t hex(const uint8_t *bytes, size_t count, char *out)
{
    static const char digits[] = "0123456789abcdef";

    for (size_t i = 0; i < count; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    return 2 * count;
}

size_t kvt_remote_ns_prefix(const struct kvt_full_key *key, char out[KVT_REMOTE_NAME_BYTES])
{
    size_t at = 5;

    memcpy(out, "kvt0:", at);
    at += hex(key->ns, KVT_NS_BYTES, out + at);
    out[at++] = ':';
    out[at] = '\0';
    return at;
}

size_t kvt_remote_name(const struct kvt_full_key *key, char out[KVT_REMOTE_NAME_BYTES])
{
    size_t at = kvt_remote_ns_prefix(key, out);
    size_t len = key->hash_len <= KVT_HASH_BYTES_MAX ? key->hash_len : KVT_HASH_BYTES_MAX;

    at += hex(key->hash, len, out + at);
    at += (size_t)snprintf(out + at, KVT_REMOTE_NAME_BYTES - at, ":%u:%u", (unsigned)key->group,
                           (unsigned)key->shard);
    return at;
}

int kvt_remote_mac_read(const char *path, struct kvt_remote_mac *out, char *error, size_t error_len)
{
    ssize_t got;

    memset(out, 0, sizeof(*out));
    if (path == NULL)
        return 0;
    got = kvt_remote_secret_read("remote_mac", path, out->key, sizeof(out->key), error, error_len);
    if (got < 0)
        return (int)got;
    if (got < (ssize_t)MAC_KEY_MIN) {
        (void)snprintf(error, error_len,
                       "remote_mac: %.200s has fewer than %u bytes: head -c 32 /dev/urandom > FILE",
                       path, MAC_KEY_MIN);
        return KVT_E_CONFIG_VALUE;
    }
    out->key_len = (size_t)got;
    out->on = true;
    return 0;
}

bool kvt_remote_mac(const struct kvt_remote_mac *mac, const void *record, uint32_t record_bytes,
                    uint8_t out[KVT_REMOTE_MAC_BYTES])
{
    unsigned len = KVT_REMOTE_MAC_BYTES;

    return HMAC(EVP_sha256(), mac->key, (int)mac->key_len, record, record_bytes, out, &len) !=
               NULL &&
           len == KVT_REMOTE_MAC_BYTES;
}

int kvt_remote_other(const struct kvt_remote_mac *mac, const struct kvt_full_key *key,
                     const struct kvt_record_header *header, uint64_t len)
{
    int rc = kvt_record_header_check(header);

    if (rc == KVT_E_NEWER)
        return KVT_E_STALE;
    if (rc != 0 || memcmp(&header->key, key, sizeof(*key)) != 0)
        return KVT_E_CORRUPT;
    if (len == (uint64_t)header->record_bytes + KVT_REMOTE_MAC_BYTES ||
        (!mac->on && len == header->record_bytes))
        return KVT_E_STALE;
    return KVT_E_CORRUPT;
}

int kvt_remote_unseal(const struct kvt_remote_mac *mac, const struct kvt_remote_req *req,
                      const uint8_t *found_mac)
{
    struct kvt_record_header *header = req->record;
    uint8_t wanted[KVT_REMOTE_MAC_BYTES];

    if (mac->on && (!kvt_remote_mac(mac, req->record, req->record_bytes, wanted) ||
                    CRYPTO_memcmp(wanted, found_mac, sizeof(wanted)) != 0))
        return KVT_E_CORRUPT;
    if (kvt_record_verify(req->record, req->record_bytes, req->keys, 0) != 0)
        return KVT_E_CORRUPT;
    if (!req->sequence)
        return 0;
    if (header->map != req->map &&
        (header->map < KVT_MAP_MIXED_FIRST || req->map < KVT_MAP_MIXED_FIRST ||
         kvt_map_id_level(header->map) != kvt_map_id_level(req->map)))
        return KVT_E_CORRUPT; /* another record than the one that was found */
    header->sequence = req->sequence;
    header->map = req->map;
    header->checksum = kvt_record_checksum(header, req->record_bytes);
    return 0;
}
