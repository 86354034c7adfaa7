/* What all backends do with a record on its way: its name there, its MAC, and how one that comes
 * from there is verified and made one of this store's. Pure but for the key's file. Threads: any.
 *
 * An object there is the record, byte for byte as on disk, and behind it the MAC where there is a
 * key: HMAC-SHA-256 over the record. The full key is in the record, so a MAC fits one key only.
 */
#ifndef KVT_REMOTE_REMOTE_SEAL_H
#define KVT_REMOTE_REMOTE_SEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/record.h"
#include "remote/remote.h"

#define KVT_REMOTE_MAC_BYTES 32u
#define KVT_REMOTE_MAC_KEY_MAX 1024u

struct kvt_remote_mac {
    bool on;
    size_t key_len;
    uint8_t key[KVT_REMOTE_MAC_KEY_MAX];
};

/* "kvt0:<namespace>:<hash>:<group>:<shard>", hex and decimal; names of one namespace begin alike.
 * Returns its length. */
size_t kvt_remote_name(const struct kvt_full_key *key, char out[KVT_REMOTE_NAME_BYTES]);
/* The beginning that all names of the key's namespace have, up to and with the colon. */
size_t kvt_remote_ns_prefix(const struct kvt_full_key *key, char out[KVT_REMOTE_NAME_BYTES]);

/* The key's file: not readable by others, 32 bytes or more. path NULL: no MAC. 0; an error with a
 * sentence. */
__attribute__((warn_unused_result)) int
kvt_remote_mac_read(const char *path, struct kvt_remote_mac *out, char *error, size_t error_len);
/* false: libcrypto refuses. */
__attribute__((warn_unused_result)) bool kvt_remote_mac(const struct kvt_remote_mac *mac,
                                                        const void *record, uint32_t record_bytes,
                                                        uint8_t out[KVT_REMOTE_MAC_BYTES]);

/* What an object of `len` bytes is that has another length than its GET expects, by its header:
 * KVT_E_STALE, a whole record of the key, of another level or a later version; KVT_E_CORRUPT, none:
 * cut off, or longer, or without the MAC that it has to have. Pure. */
__attribute__((warn_unused_result)) int kvt_remote_other(const struct kvt_remote_mac *mac,
                                                         const struct kvt_full_key *key,
                                                         const struct kvt_record_header *header,
                                                         uint64_t len);

/* A record that has been read for a GET: its MAC (looked at only where there is a key), then as
 * kvt_record_verify(); then number and map of the request are put in and the checksum made anew.
 * 0; KVT_E_CORRUPT. */
__attribute__((warn_unused_result)) int kvt_remote_unseal(const struct kvt_remote_mac *mac,
                                                          const struct kvt_remote_req *req,
                                                          const uint8_t *found_mac);

#endif
