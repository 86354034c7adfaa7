/* The owner thread: runs a store on a thread of its own and connects clients to it by rings.
 * Sleeps in poll() on its event fds and the ios' fds; never spins, unless kvt_owner_spin() says so.
 *
 * Clients differ by their wire only: the memory of the two rings and the descriptors that wake
 * either side. A client of this process has private memory and wakes the owner by one descriptor
 * that all such clients share; one of another process has memory that both map, and a descriptor of
 * its own, so that it can take nobody else's wake-ups.
 */
#ifndef KVT_STORE_OWNER_H
#define KVT_STORE_OWNER_H

#include "base/ring.h"
#include "store/store.h"

struct kvt_owner;

/* Clients at a time. kvtierd asks for its own numbers as one of them. */
#define KVT_OWNER_CLIENTS_MAX 128u

/* A client's end of its connection. Requests are pushed under the client's own lock. */
struct kvt_channel {
    struct kvt_ring requests; /* producer side */
    struct kvt_ring replies;  /* consumer side; wait on replies.event_fd */
    uint8_t *arena;
    uint64_t arena_bytes;
    uint32_t client;
};

/* What connects a client: made and freed by whoever attaches it. */
struct kvt_wire {
    void *memory;        /* kvt_wire_bytes(ring_bytes), zeroed, 64-byte aligned */
    uint32_t ring_bytes; /* of each ring: a power of two (base/ring.h) */
    int request_fd;      /* rung by the client */
    int reply_fd;        /* rung by the owner */
    int broken_fd; /* rung when the client has broken the protocol; -1: nobody wants to know */
};

/* Bytes of memory that a wire takes; 0 when ring_bytes is not a size that a ring can have. Replies
 * begin at kvt_wire_replies_at(): the requests' ring is at the start. */
size_t kvt_wire_bytes(uint32_t ring_bytes);
size_t kvt_wire_replies_at(uint32_t ring_bytes);

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

/* The client's side of a wire that has been attached: its two rings. 0, KVT_E_INVAL,
 * KVT_E_CORRUPT. */
__attribute__((warn_unused_result)) int kvt_channel_attach(struct kvt_channel *channel,
                                                           const struct kvt_wire *wire);

/* Attach a client of another process over a wire, which stays the caller's and must live until
 * kvt_owner_detach() has returned. Both rings are laid out here. A malformed message ends such a
 * client: its reply ring is closed and broken_fd rung; what it was filling stays its own until it
 * is detached, because it may still write there. 0; KVT_E_INVAL; KVT_E_LIMIT. Any thread. */
__attribute__((warn_unused_result)) int
kvt_owner_attach(struct kvt_owner *owner, const struct kvt_wire *wire, uint32_t *client);
/* The client has gone, or will write no byte more: pins and uncommitted slots are freed. Blocks
 * until the owner has done it. */
void kvt_owner_detach(struct kvt_owner *owner, uint32_t client);
/* Disconnect a client as if it had broken the protocol; it is still to be detached. Any thread. */
void kvt_owner_expel(struct kvt_owner *owner, uint32_t client);
/* The same, and its place is free for others: its rings and descriptors are not touched any more
 * when this returns. What it was filling stays its own until kvt_owner_reclaim(), which is due in
 * the place of kvt_owner_detach() and does not wait. Blocks until the owner has done it. */
void kvt_owner_part(struct kvt_owner *owner, uint32_t client);
void kvt_owner_reclaim(struct kvt_owner *owner, uint32_t client);
/* Whether the client has broken the protocol and only waits to be detached. Any thread. */
int kvt_owner_broken(const struct kvt_owner *owner, uint32_t client);

/* How long the thread looks for messages before it sleeps; 0, as at the start: not at all. */
void kvt_owner_spin(struct kvt_owner *owner, int64_t spin_ns);

/* Use one more root from now on. Blocks until it is recovered, on the caller's thread, and all that
 * it holds is in the index; other requests are served meanwhile. Any thread. 0, or as
 * kvt_store_root_open() and kvt_store_root_join(). The io is the caller's, until the owner has
 * stopped. */
int kvt_owner_root_add(struct kvt_owner *owner, const struct kvt_store_root *root);

/* Run-time switch, any thread. */
void kvt_owner_enable(struct kvt_owner *owner, int on);

#endif
