/* The owner thread: runs a store on a thread of its own and connects clients to it by rings.
 * Sleeps in poll() on its event fds and the ios' fds; never spins.
 */
#ifndef KVT_STORE_OWNER_H
#define KVT_STORE_OWNER_H

#include "base/ring.h"
#include "store/store.h"

struct kvt_owner;

/* A client's end of its connection. Requests are pushed under the client's own lock. */
struct kvt_channel {
    struct kvt_ring requests; /* producer side */
    struct kvt_ring replies;  /* consumer side; wait on replies.event_fd */
    uint8_t *arena;
    uint64_t arena_bytes;
    uint32_t client;
};

/* Start the thread over an opened store (which it owns from now on). params as given to
 * kvt_store_open(), except that reply must have been kvt_owner_reply with the owner as context:
 * so kvt_owner_new() comes first, then kvt_store_open(), then kvt_owner_start(). */
int kvt_owner_new(struct kvt_owner **out);
void kvt_owner_reply(void *owner, uint32_t client, const struct kvt_msg *msg);
int kvt_owner_start(struct kvt_owner *owner, struct kvt_store *store,
                    const struct kvt_store_params *params);
/* Stop the thread, close the store (bounded by timeout_ns), free. Channels are dead after. */
void kvt_owner_stop(struct kvt_owner *owner, int64_t timeout_ns);

/* Connect a client: rings of ring_bytes each. Any thread. */
int kvt_owner_connect(struct kvt_owner *owner, uint32_t ring_bytes, struct kvt_channel *out);
/* Disconnect: pins and uncommitted slots are freed. Blocks until the owner has done it. */
void kvt_owner_disconnect(struct kvt_owner *owner, struct kvt_channel *channel);

/* Use one more root from now on. Blocks until it is recovered, on the caller's thread, and all that
 * it holds is in the index; other requests are served meanwhile. Any thread. 0, or as
 * kvt_store_root_open() and kvt_store_root_join(). The io is the caller's, until the owner has
 * stopped. */
int kvt_owner_root_add(struct kvt_owner *owner, const struct kvt_store_root *root);

/* Run-time switch, any thread. */
void kvt_owner_enable(struct kvt_owner *owner, int on);

#endif
