/* Clients of the owner: attaching and leaving, and the turns in which their messages are handled.
 * Their lives: owner_impl.h.
 * Threads: attach, detach and their kin from any; turns and replies are the owner's.
 */
#include "store/owner_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "kvtier/error.h"
#include "store/slots.h"

static_assert(KVT_SLOT_CLIENTS % KVT_OWNER_CLIENTS_MAX == 0,
              "the bytes of live clients are counted apart");

#define MESSAGES_PER_TURN 64 /* of one client, before others and the store get their turn */
/* Replies between two bells. A client that keeps up with us would be woken, and fall asleep again,
 * for each grant of a load; so many records keep its workers busy until the next bell. */
#define REPLIES_PER_BELL 32

/* ---- turns: the owner's thread ------------------------------------------------------------- */

/* The thread touches nothing of a client's any more, and says so. */
static void let_go(struct kvt_owner *owner, struct kvt_owner_client *client)
{
    pthread_mutex_lock(&owner->lock);
    /* release: pairs with detach(), which lets go of the rings when it sees GONE */
    atomic_store_explicit(&client->place, KVT_PLACE_GONE, memory_order_release);
    pthread_cond_broadcast(&owner->left);
    pthread_mutex_unlock(&owner->lock);
}

void kvt_owner_reply(void *ctx, uint32_t client_number, const struct kvt_msg *msg)
{
    struct kvt_owner *owner = ctx;
    struct kvt_owner_client *client = &owner->clients[client_number % KVT_OWNER_CLIENTS_MAX];
    int place = kvt_owner_place(client);
    void *frame;

    if (client->number != client_number || (place != KVT_PLACE_LIVE && place != KVT_PLACE_LEAVING))
        return;
    frame = kvt_ring_reserve(&client->replies, msg->bytes);
    if (frame) {
        memcpy(frame, msg, msg->bytes);
        kvt_ring_push_quiet(&client->replies, msg->bytes);
        owner->unrung = 1;
        if (++client->unrung % REPLIES_PER_BELL == 0)
            kvt_ring_bell(&client->replies);
        return;
    }
    /* It was owed less than it had room for, so it breaks the protocol: dropped after this turn,
     * because the store is in the middle of something. Never over a LEAVING: that is waited for. */
    place = KVT_PLACE_LIVE;
    atomic_compare_exchange_strong_explicit(&client->place, &place, KVT_PLACE_BROKEN,
                                            memory_order_acq_rel, memory_order_acquire);
    owner->again = 1;
}

void kvt_owner_ring_all(struct kvt_owner *owner)
{
    if (!owner->unrung)
        return;
    owner->unrung = 0;
    for (uint32_t i = 0; i < kvt_owner_places(owner); i++) {
        struct kvt_owner_client *client = &owner->clients[i];
        int place = kvt_owner_place(client);

        if (place != KVT_PLACE_LIVE && place != KVT_PLACE_LEAVING)
            continue; /* not ours to touch, or told already */
        if (client->unrung)
            kvt_ring_bell(&client->replies);
        client->unrung = 0;
    }
}

/* Handle some messages of one client. Returns whether there were any. */
static bool client_turn(struct kvt_owner *owner, struct kvt_owner_client *client)
{
    struct kvt_msg *msg = (struct kvt_msg *)owner->message;
    int broken = 0, count = 0;

    while (!broken && count < MESSAGES_PER_TURN && kvt_owner_place(client) == KVT_PLACE_LIVE) {
        const void *frame;
        int bytes = kvt_ring_peek(&client->requests, &frame);

        if (bytes == 0)
            break;
        count++;
        /* Copied before it is looked at: in shared memory the client could still change it. */
        broken = bytes < (int)sizeof(*msg) || bytes > (int)sizeof(owner->message);
        if (broken)
            break;
        memcpy(msg, frame, (size_t)bytes);
        kvt_ring_pop(&client->requests);
        broken = msg->bytes > (uint32_t)bytes;
        if (!broken) {
            int rc = kvt_store_handle(owner->store, client->number, msg);
            kvt_owner_ring_all(owner);
            broken = rc < 0 || (rc > 0 && client->remote);
        }
    }
    if (broken) {
        int place = KVT_PLACE_LIVE;

        atomic_compare_exchange_strong_explicit(&client->place, &place, KVT_PLACE_BROKEN,
                                                memory_order_acq_rel, memory_order_acquire);
    }
    return count > 0;
}

/* First told, then taken from: a record decoded while the ring was open is good. */
static void tell_broken(struct kvt_owner *owner, struct kvt_owner_client *client)
{
    client->told = true;
    if (!atomic_load_explicit(&client->expelled, memory_order_relaxed))
        kvt_log(&owner->params.log, KVT_LOG_ERROR,
                "client %u broke the protocol or left no room for replies: disconnected",
                client->number);
    kvt_ring_close(&client->replies);
    kvt_store_client_stop(owner->store, client->number);
    if (client->broken_fd >= 0)
        kvt_owner_ring(client->broken_fd);
}

bool kvt_owner_clients_turn(struct kvt_owner *owner)
{
    bool any = false;

    for (uint32_t i = 0; i < kvt_owner_places(owner); i++) {
        struct kvt_owner_client *client = &owner->clients[i];
        int place = kvt_owner_place(client);

        if (place == KVT_PLACE_LIVE)
            any = client_turn(owner, client) || any;
        place = kvt_owner_place(client);
        if ((place == KVT_PLACE_BROKEN || place == KVT_PLACE_PARTING) && !client->told)
            tell_broken(owner, client);
        if (place != KVT_PLACE_LEAVING && place != KVT_PLACE_PARTING)
            continue;
        if (place == KVT_PLACE_LEAVING)
            kvt_store_client_gone(owner->store, client->number);
        let_go(owner, client);
        any = true;
    }
    return any;
}

/* What clients that have ended were filling is taken back. */
void kvt_owner_reclaim_turn(struct kvt_owner *owner)
{
    uint32_t numbers[KVT_OWNER_RECLAIMS_MAX], count;

    /* relaxed: the lock orders what it is about */
    if (!atomic_load_explicit(&owner->reclaim_wanted, memory_order_relaxed))
        return;
    pthread_mutex_lock(&owner->lock);
    count = owner->reclaim_count;
    memcpy(numbers, owner->reclaims, count * sizeof(numbers[0]));
    owner->reclaim_count = 0;
    atomic_store_explicit(&owner->reclaim_wanted, 0, memory_order_relaxed);
    pthread_cond_broadcast(&owner->left);
    pthread_mutex_unlock(&owner->lock);
    for (uint32_t i = 0; i < count; i++)
        kvt_store_client_gone(owner->store, numbers[i]);
}

/* ---- wires --------------------------------------------------------------------------------- */

size_t kvt_wire_replies_at(uint32_t ring_bytes)
{
    return kvt_round_up(kvt_ring_bytes(ring_bytes), 64);
}

size_t kvt_wire_bytes(uint32_t ring_bytes)
{
    return 2 * kvt_wire_replies_at(ring_bytes);
}

int kvt_channel_attach(struct kvt_channel *channel, const struct kvt_wire *wire)
{
    int err;

    if (!kvt_wire_bytes(wire->ring_bytes))
        return KVT_E_INVAL;
    err = kvt_ring_init(&channel->requests, wire->memory, wire->ring_bytes, wire->request_fd, 0);
    if (err)
        return err;
    return kvt_ring_init(&channel->replies,
                         (uint8_t *)wire->memory + kvt_wire_replies_at(wire->ring_bytes),
                         wire->ring_bytes, wire->reply_fd, 0);
}

void kvt_owner_wire_free(struct kvt_owner_client *client)
{
    if (!client->memory)
        return;
    close(client->replies.event_fd);
    free(client->memory);
    client->memory = NULL;
}

/* ---- coming and going: any thread ---------------------------------------------------------- */

int kvt_owner_attach(struct kvt_owner *owner, const struct kvt_wire *wire, uint32_t *number)
{
    struct kvt_owner_client *client = NULL;
    uint32_t index;
    int err;

    if (!kvt_wire_bytes(wire->ring_bytes))
        return KVT_E_INVAL;
    pthread_mutex_lock(&owner->lock);
    for (index = 0; index < KVT_OWNER_CLIENTS_MAX && !client; index++)
        if (kvt_owner_place(&owner->clients[index]) == KVT_PLACE_FREE)
            client = &owner->clients[index];
    if (client) {
        atomic_store_explicit(&client->place, KVT_PLACE_TAKEN, memory_order_relaxed);
        client->number = ++owner->lives * KVT_OWNER_CLIENTS_MAX + (index - 1);
        if (index >
            kvt_owner_places(owner)) /* release: the loop that sees it sees a place that is TAKEN */
            atomic_store_explicit(&owner->places, index, memory_order_release);
    }
    pthread_mutex_unlock(&owner->lock);
    if (!client)
        return KVT_E_LIMIT;
    client->told = false;
    client->unrung = 0;
    atomic_store_explicit(&client->expelled, 0, memory_order_relaxed);
    client->remote = wire->request_fd != owner->wake_fd;
    client->broken_fd = wire->broken_fd;
    err = kvt_ring_init(&client->requests, wire->memory, wire->ring_bytes, wire->request_fd, 1);
    if (!err)
        err = kvt_ring_init(&client->replies,
                            (uint8_t *)wire->memory + kvt_wire_replies_at(wire->ring_bytes),
                            wire->ring_bytes, wire->reply_fd, 1);
    if (err) {
        atomic_store_explicit(&client->place, KVT_PLACE_FREE, memory_order_release);
        return err;
    }
    *number = client->number;
    /* release: the thread that sees LIVE sees the rings */
    atomic_store_explicit(&client->place, KVT_PLACE_LIVE, memory_order_release);
    kvt_owner_wake(owner); /* it may be asleep without having announced so in this ring */
    return 0;
}

void kvt_owner_expel(struct kvt_owner *owner, uint32_t number)
{
    struct kvt_owner_client *client = &owner->clients[number % KVT_OWNER_CLIENTS_MAX];
    int place = KVT_PLACE_LIVE;

    atomic_store_explicit(&client->expelled, 1, memory_order_relaxed);
    atomic_compare_exchange_strong_explicit(&client->place, &place, KVT_PLACE_BROKEN,
                                            memory_order_acq_rel, memory_order_acquire);
    kvt_owner_wake(owner);
}

int kvt_owner_broken(const struct kvt_owner *owner, uint32_t number)
{
    const struct kvt_owner_client *client = &owner->clients[number % KVT_OWNER_CLIENTS_MAX];

    return kvt_owner_place(client) == KVT_PLACE_BROKEN;
}

/* The place becomes free by way of LEAVING or PARTING. */
static void place_end(struct kvt_owner *owner, uint32_t number, int how)
{
    struct kvt_owner_client *client = &owner->clients[number % KVT_OWNER_CLIENTS_MAX];

    atomic_store_explicit(&client->place, how, memory_order_release);
    kvt_owner_wake(owner);
    pthread_mutex_lock(&owner->lock);
    while (kvt_owner_place(client) != KVT_PLACE_GONE)
        pthread_cond_wait(&owner->left, &owner->lock);
    pthread_mutex_unlock(&owner->lock);
    kvt_owner_wire_free(client);
    atomic_store_explicit(&client->place, KVT_PLACE_FREE, memory_order_release);
}

void kvt_owner_detach(struct kvt_owner *owner, uint32_t number)
{
    place_end(owner, number, KVT_PLACE_LEAVING);
}

void kvt_owner_part(struct kvt_owner *owner, uint32_t number)
{
    /* relaxed: the place orders it */
    atomic_store_explicit(&owner->clients[number % KVT_OWNER_CLIENTS_MAX].expelled, 1,
                          memory_order_relaxed);
    place_end(owner, number, KVT_PLACE_PARTING);
}

void kvt_owner_reclaim(struct kvt_owner *owner, uint32_t number)
{
    pthread_mutex_lock(&owner->lock);
    while (owner->reclaim_count == KVT_OWNER_RECLAIMS_MAX)
        pthread_cond_wait(&owner->left, &owner->lock);
    owner->reclaims[owner->reclaim_count++] = number;
    atomic_store_explicit(&owner->reclaim_wanted, 1, memory_order_relaxed);
    pthread_mutex_unlock(&owner->lock);
    kvt_owner_wake(owner);
}

int kvt_owner_connect(struct kvt_owner *owner, uint32_t ring_bytes, struct kvt_channel *out)
{
    struct kvt_wire wire = {
        .ring_bytes = ring_bytes, .request_fd = owner->wake_fd, .reply_fd = -1, .broken_fd = -1};
    size_t bytes = kvt_wire_bytes(ring_bytes);
    uint32_t number = 0;
    int err = 0;

    memset(out, 0, sizeof(*out));
    if (!bytes)
        return KVT_E_INVAL;
    wire.memory = aligned_alloc(64, bytes);
    if (!wire.memory)
        return -ENOMEM;
    memset(wire.memory, 0, bytes);
    wire.reply_fd = kvt_fd_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (wire.reply_fd < 0)
        err = -errno;
    if (!err)
        err = kvt_owner_attach(owner, &wire, &number);
    if (err) {
        if (wire.reply_fd >= 0)
            close(wire.reply_fd);
        free(wire.memory);
        return err;
    }
    owner->clients[number % KVT_OWNER_CLIENTS_MAX].memory = wire.memory;
    out->arena = owner->params.arena;
    out->arena_bytes = owner->params.arena_bytes;
    out->client = number;
    return kvt_channel_attach(out, &wire);
}

void kvt_owner_disconnect(struct kvt_owner *owner, struct kvt_channel *channel)
{
    if (!channel->client)
        return;
    kvt_owner_detach(owner, channel->client);
    memset(channel, 0, sizeof(*channel));
}
