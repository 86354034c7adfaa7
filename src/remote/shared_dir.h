/* A directory that machines share (NFS, Lustre, CephFS, ...) as a shared tier: docs/remote.md.
 * Opened by kvt_remote_tier_open(). */
#ifndef KVT_REMOTE_SHARED_DIR_H
#define KVT_REMOTE_SHARED_DIR_H

#include "remote/remote.h"
#include "remote/remote_url.h"

__attribute__((warn_unused_result)) int kvt_shared_dir_open(const struct kvt_remote_params *params,
                                                            const struct kvt_remote_url *url,
                                                            struct kvt_remote **out, char *error,
                                                            size_t error_len);

#endif
