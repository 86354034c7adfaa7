/* Where a shared tier is, as an option says it:
 *
 *   redis://host[:port][,host[:port]...]   a server, or seeds of a cluster; "+" separates too
 *   rediss://...                           the same over TLS
 *   redis://...?replicas=yes               reads go to replicas of a cluster
 *   redis+unix:/path                       a server on a Unix socket
 *   dir:/path                              a shared directory
 *
 * A name and a password do not belong there: options are shown. Pure; threads: any.
 */
#ifndef KVT_REMOTE_REMOTE_URL_H
#define KVT_REMOTE_REMOTE_URL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVT_REMOTE_SEEDS 16u
#define KVT_REMOTE_HOST_BYTES 256u

struct kvt_remote_seed {
    char host[KVT_REMOTE_HOST_BYTES]; /* or the path of a Unix socket */
    char port[8];                     /* "": a Unix socket */
};

enum kvt_remote_kind { KVT_REMOTE_REDIS = 1, KVT_REMOTE_DIR };

struct kvt_remote_url {
    enum kvt_remote_kind kind;
    bool tls;
    bool replicas; /* are read from */
    uint32_t seed_count;
    struct kvt_remote_seed seeds[KVT_REMOTE_SEEDS];
    char path[1024]; /* DIR */
};

/* 0, or KVT_E_CONFIG_VALUE and a sentence. */
__attribute__((warn_unused_result)) int
kvt_remote_url_parse(const char *where, struct kvt_remote_url *out, char *error, size_t error_len);

/* "host:port" of a server's own words, where the last colon separates; a host that is empty is
 * `fallback`. false: it cannot be read. */
__attribute__((warn_unused_result)) bool kvt_remote_host_parse(const char *text, size_t len,
                                                               const char *fallback,
                                                               struct kvt_remote_seed *out);

#endif
