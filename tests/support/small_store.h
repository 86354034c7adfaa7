/* For tests of the tools: a store of two namespaces (two salts) in a directory of its own, made and
 * kept open by the library in this process. One part of 16 x 64 bf16 a block: a record of one page
 * at kv4, of two at raw. */
#ifndef KVT_TESTS_SMALL_STORE_H
#define KVT_TESTS_SMALL_STORE_H

#include "kvtier/kvtier.h"

enum { SMALL_BLOCKS = 160, SMALL_TOKENS = 16, SMALL_DIM = 64 };

struct small_store {
    char base[256], dir[300]; /* dir is base/root */
    struct kvt_cache *cache;  /* NULL: closed */
    struct kvt_ns *ns[2];
    struct kvt_pool *pool;
    struct kvt_key keys[2][SMALL_BLOCKS];
    char ids[2][2 * KVT_NS_BYTES + 1];
};

void small_store_init(struct small_store *store); /* a directory, nothing in it */
void small_store_done(struct small_store *store); /* closes, removes the directory */
void small_store_remove(const char *path);        /* a directory of files, if it is there */
void small_store_open(struct small_store *store);
void small_store_close(struct small_store *store);
/* Store the first n blocks of namespace i (0, 1), exact or at the default level, and flush. */
void small_store_put(struct small_store *store, int i, uint32_t n, int exact);
/* Load them again; returns how many came. */
uint32_t small_store_get(struct small_store *store, int i, uint32_t n);
/* Wait until the owner has written this line into the file "stats", 20 seconds at most: it writes
 * every two seconds, when something has happened. */
void small_store_wait_stats(const struct small_store *store, const char *line);
void small_store_hex(const struct kvt_key *key, char text[2 * KVT_HASH_BYTES_MAX + 1]);

#endif
