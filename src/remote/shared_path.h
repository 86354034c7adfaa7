/* Names below ROOT/kvt0 of a shared directory, and the way there: directory by directory, no
 * symbolic link followed, for look-ups, loads, puts, purges and the cleaner alike. A link's target
 * is out of a purge's reach, so what lies behind one is not there for anybody.
 *
 *   ROOT/kvt0/NAMESPACE/HH/HASH.GROUP.SHARD   HH: the first byte of the hash
 *   ROOT/kvt0/NAMESPACE/HH/put.NODE.PID.NUMBER   being written, where NAMESPACE is a mount
 *   ROOT/kvt0/NAMESPACE/ttl                   how long its records live, in ms, as said last
 *   ROOT/kvt0/tmp/NODE.PID.NUMBER             being written
 *   ROOT/kvt0/cleaner                         the lease: shared_clean.c
 *
 * Threads: any. Blocks as the file system does. Allocates nothing itself; fdopendir() does. */
#ifndef KVT_REMOTE_SHARED_PATH_H
#define KVT_REMOTE_SHARED_PATH_H

#include <dirent.h>
#include <stdbool.h>

#include "format/record.h"
#include "remote/remote.h"

#define KVT_SHARED_PUT "put." /* files being written beside records */

struct kvt_shared_name {
    char ns[2 * KVT_NS_BYTES + 1];
    char below[3];
    char file[KVT_REMOTE_NAME_BYTES];
};

void kvt_shared_name(const struct kvt_full_key *key, struct kvt_shared_name *out);
/* Whether a name is one of a namespace; of a record in the directory `below`. Pure. */
bool kvt_shared_is_ns(const char *name);
bool kvt_shared_is_record(const char *name, const char *below);

/* ENOENT and its kin: somebody has removed it. */
bool kvt_shared_gone(int err);

/* A directory by one name, for *at() calls. A descriptor; -ELOOP it is a symbolic link; -errno. */
__attribute__((warn_unused_result)) int kvt_shared_dir_at(int parent, const char *name);
/* The same, to be listed. NULL: the error in *rc. */
__attribute__((warn_unused_result)) DIR *kvt_shared_list_at(int parent, const char *name, int *rc);

/* The way to a record: kept from one key to the next, as far as it is the same. */
struct kvt_shared_way {
    int ns, below; /* descriptors; -1: none */
    struct kvt_shared_name name;
};

/* 0; KVT_E_MISS a directory on the way is not there; -ELOOP; -errno. `way` is for a new key from
 * then on, whatever is returned. */
__attribute__((warn_unused_result)) int kvt_shared_way_to(struct kvt_shared_way *way, int root,
                                                          const struct kvt_full_key *key);
void kvt_shared_way_init(struct kvt_shared_way *way);
void kvt_shared_way_close(struct kvt_shared_way *way);

#endif
