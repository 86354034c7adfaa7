/* Inside the owner (owner.c, owner_clients.c): its structure, and the lives of its clients.
 *
 * A client's place goes FREE -> LIVE (attach) -> LEAVING (detach) -> GONE (the thread has let
 * go of it) -> FREE. A client whose reply ring is full, or whose messages are broken, becomes
 * BROKEN: its reply ring is closed, which tells it; it loses its pins and grants at once, and what
 * it was filling when it is detached: until then its threads may still write there, and a slot that
 * somebody else fills meanwhile would get a valid checksum over their bytes. PARTING (part) frees
 * the place before that: what was being filled is known by the client's number alone, and numbers
 * do not come back.
 * Threads: places and what has a lock, any; the rest is the owner's.
 */
#ifndef KVT_STORE_OWNER_IMPL_H
#define KVT_STORE_OWNER_IMPL_H

#include "store/owner.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#define KVT_OWNER_RECLAIMS_MAX 64u

enum kvt_place {
    KVT_PLACE_FREE,
    KVT_PLACE_TAKEN,
    KVT_PLACE_LIVE,
    KVT_PLACE_LEAVING,
    KVT_PLACE_PARTING,
    KVT_PLACE_BROKEN,
    KVT_PLACE_GONE
};

struct kvt_owner_client {
    _Atomic int place;
    uint32_t number;          /* life and index: a later client of this place has another number */
    struct kvt_ring requests; /* consumer side */
    struct kvt_ring replies;  /* producer side */
    bool remote; /* of another process: it has a request fd of its own, and no second chance */
    bool told;   /* BROKEN, and it has been told */
    _Atomic int expelled; /* BROKEN because somebody wanted it */
    int broken_fd;
    uint32_t unrung; /* replies that it may be asleep over */
    void *memory;    /* ours; NULL: the wire is somebody else's */
};

struct kvt_owner {
    struct kvt_store *store;
    struct kvt_store_params params;
    pthread_t thread;
    int started;
    int again;  /* the owner's thread: a client broke while it was not its turn */
    int unrung; /* the owner's thread: some client may be asleep over replies */
    int wake_fd;
    _Atomic int64_t spin_ns;
    _Atomic int stopping;
    _Atomic int enabled;
    pthread_mutex_t lock; /* of `left` and of giving places out; never held while handling */
    pthread_cond_t left;  /* also: root_wanted is done with */
    struct kvt_store_joining *_Atomic root_wanted;
    struct kvt_store_root root_coming; /* what it is made of */
    bool root_busy;                    /* somebody is adding one */
    bool root_joining;                 /* the owner's: it is the store's, and being taken in */
    int root_result;
    uint32_t lives;
    _Atomic uint32_t places; /* those from here on have never been used */
    _Atomic int reclaim_wanted;
    uint32_t reclaim_count; /* under lock */
    uint32_t reclaims[KVT_OWNER_RECLAIMS_MAX];
    struct kvt_owner_client clients[KVT_OWNER_CLIENTS_MAX];
    _Alignas(8) uint8_t message[KVT_MSG_BYTES_MAX];
};

static inline void kvt_owner_ring(int fd)
{
    uint64_t one = 1;

    /* Full means that it is readable already. */
    if (write(fd, &one, sizeof(one)) < 0)
        return;
}

static inline void kvt_owner_wake(struct kvt_owner *owner)
{
    kvt_owner_ring(owner->wake_fd);
}

/* Pairs with the release stores of attach() and detach(). */
static inline int kvt_owner_place(const struct kvt_owner_client *client)
{
    return atomic_load_explicit(&client->place, memory_order_acquire);
}

/* acquire: pairs with the release of attach(), which has made the place before */
static inline uint32_t kvt_owner_places(const struct kvt_owner *owner)
{
    return atomic_load_explicit(&owner->places, memory_order_acquire);
}

/* ---- owner_clients.c: the owner's thread */
/* One turn for every client. Whether there was anything to do. */
bool kvt_owner_clients_turn(struct kvt_owner *owner);
void kvt_owner_reclaim_turn(struct kvt_owner *owner);
/* Wake the clients that sleep over replies: before anything else is done. */
void kvt_owner_ring_all(struct kvt_owner *owner);
/* Any thread, once nothing uses them: memory and reply fd of a client of this process. */
void kvt_owner_wire_free(struct kvt_owner_client *client);

#endif
