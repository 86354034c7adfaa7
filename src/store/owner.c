/* The owner thread: a loop over the clients' rings and the store.
 *
 * One event fd wakes it for every request ring and for control; the backends' fds wake it for
 * completions; the store's own timers give poll() its limit. Before it sleeps it announces so in
 * every ring and looks once more (base/ring.h), so no message is slept over and it never spins.
 *
 * A client's place goes FREE -> LIVE (attach) -> LEAVING (detach) -> GONE (the thread has let
 * go of it) -> FREE. A client whose reply ring is full, or whose messages are broken, becomes
 * BROKEN: its reply ring is closed, which tells it; it loses its pins and grants at once, and what
 * it was filling when it is detached: until then its threads may still write there, and a slot that
 * somebody else fills meanwhile would get a valid checksum over their bytes. PARTING (part) frees
 * the place before that: what was being filled is known by the client's number alone, and numbers
 * do not come back.
 * Threads: attach, detach and enable from any; everything of the store on the owner's.
 */
#include "store/owner.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "remote/remote.h"

#define CLIENTS_MAX KVT_OWNER_CLIENTS_MAX /* the low bits of a client's number */
#define RECLAIMS_MAX 64u
#define MESSAGES_PER_TURN 64 /* of one client, before others and the store get their turn */

enum place {
    PLACE_FREE,
    PLACE_TAKEN,
    PLACE_LIVE,
    PLACE_LEAVING,
    PLACE_PARTING,
    PLACE_BROKEN,
    PLACE_GONE
};

struct client {
    _Atomic int place;
    uint32_t number;          /* life and index: a later client of this place has another number */
    struct kvt_ring requests; /* consumer side */
    struct kvt_ring replies;  /* producer side */
    bool remote; /* of another process: it has a request fd of its own, and no second chance */
    bool told;   /* BROKEN, and it has been told */
    _Atomic int expelled; /* BROKEN because somebody wanted it */
    int broken_fd;
    void *memory; /* ours; NULL: the wire is somebody else's */
};

struct kvt_owner {
    struct kvt_store *store;
    struct kvt_store_params params;
    pthread_t thread;
    int started;
    int again; /* the owner's thread: a client broke while it was not its turn */
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
    uint32_t reclaims[RECLAIMS_MAX];
    struct client clients[CLIENTS_MAX];
    _Alignas(8) uint8_t message[KVT_MSG_BYTES_MAX];
};

int kvt_owner_new(struct kvt_owner **out)
{
    struct kvt_owner *owner = calloc(1, sizeof(*owner));

    *out = NULL;
    if (!owner)
        return -ENOMEM;
    owner->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (owner->wake_fd < 0) {
        free(owner);
        return -errno;
    }
    pthread_mutex_init(&owner->lock, NULL);
    pthread_cond_init(&owner->left, NULL);
    atomic_init(&owner->enabled, 1);
    *out = owner;
    return 0;
}

static void ring(int fd)
{
    uint64_t one = 1;

    /* Full means that it is readable already. */
    if (write(fd, &one, sizeof(one)) < 0)
        return;
}

static void wake(struct kvt_owner *owner)
{
    ring(owner->wake_fd);
}

/* Empty an event fd that poll() found readable. */
static void unring(int fd)
{
    uint64_t rung;

    if (read(fd, &rung, sizeof(rung)) < 0)
        return; /* somebody else has */
}

/* Pairs with the release stores of attach() and detach(). */
static int place_of(const struct client *client)
{
    return atomic_load_explicit(&client->place, memory_order_acquire);
}

/* The thread touches nothing of a client's any more, and says so. */
static void let_go(struct kvt_owner *owner, struct client *client)
{
    pthread_mutex_lock(&owner->lock);
    /* release: pairs with detach(), which lets go of the rings when it sees GONE */
    atomic_store_explicit(&client->place, PLACE_GONE, memory_order_release);
    pthread_cond_broadcast(&owner->left);
    pthread_mutex_unlock(&owner->lock);
}

/* acquire: pairs with the release of attach(), which has made the place before */
static uint32_t places(const struct kvt_owner *owner)
{
    return atomic_load_explicit(&owner->places, memory_order_acquire);
}

void kvt_owner_reply(void *ctx, uint32_t client_number, const struct kvt_msg *msg)
{
    struct kvt_owner *owner = ctx;
    struct client *client = &owner->clients[client_number % CLIENTS_MAX];
    int place = place_of(client);
    void *frame;

    if (client->number != client_number || (place != PLACE_LIVE && place != PLACE_LEAVING))
        return;
    frame = kvt_ring_reserve(&client->replies, msg->bytes);
    if (frame) {
        memcpy(frame, msg, msg->bytes);
        kvt_ring_push(&client->replies, msg->bytes);
        return;
    }
    /* It was owed less than it had room for, so it breaks the protocol: dropped after this turn,
     * because the store is in the middle of something. Never over a LEAVING: that is waited for. */
    place = PLACE_LIVE;
    atomic_compare_exchange_strong_explicit(&client->place, &place, PLACE_BROKEN,
                                            memory_order_acq_rel, memory_order_acquire);
    owner->again = 1;
}

/* Handle some messages of one client. Returns whether there were any. */
static bool client_turn(struct kvt_owner *owner, struct client *client)
{
    struct kvt_msg *msg = (struct kvt_msg *)owner->message;
    int broken = 0, count = 0;

    while (!broken && count < MESSAGES_PER_TURN && place_of(client) == PLACE_LIVE) {
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
            broken = rc < 0 || (rc > 0 && client->remote);
        }
    }
    if (broken) {
        int place = PLACE_LIVE;

        atomic_compare_exchange_strong_explicit(&client->place, &place, PLACE_BROKEN,
                                                memory_order_acq_rel, memory_order_acquire);
    }
    return count > 0;
}

/* First told, then taken from: a record decoded while the ring was open is good. */
static void tell_broken(struct kvt_owner *owner, struct client *client)
{
    client->told = true;
    if (!atomic_load_explicit(&client->expelled, memory_order_relaxed))
        kvt_log(&owner->params.log, KVT_LOG_ERROR,
                "client %u broke the protocol or left no room for replies: disconnected",
                client->number);
    kvt_ring_close(&client->replies);
    kvt_store_client_stop(owner->store, client->number);
    if (client->broken_fd >= 0)
        ring(client->broken_fd);
}

/* One turn for every client. */
static bool clients_turn(struct kvt_owner *owner)
{
    bool any = false;

    for (uint32_t i = 0; i < places(owner); i++) {
        struct client *client = &owner->clients[i];
        int place = place_of(client);

        if (place == PLACE_LIVE)
            any = client_turn(owner, client) || any;
        place = place_of(client);
        if ((place == PLACE_BROKEN || place == PLACE_PARTING) && !client->told)
            tell_broken(owner, client);
        if (place != PLACE_LEAVING && place != PLACE_PARTING)
            continue;
        if (place == PLACE_LEAVING)
            kvt_store_client_gone(owner->store, client->number);
        let_go(owner, client);
        any = true;
    }
    return any;
}

/* What clients that have ended were filling is taken back. */
static void reclaim_turn(struct kvt_owner *owner)
{
    uint32_t numbers[RECLAIMS_MAX], count;

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

/* Announce sleep in every ring. false: somebody has sent something meanwhile. */
static bool announce(struct kvt_owner *owner)
{
    bool quiet = true;

    for (uint32_t i = 0; i < places(owner); i++)
        if (place_of(&owner->clients[i]) == PLACE_LIVE)
            quiet = kvt_ring_sleep(&owner->clients[i].requests) && quiet;
    return quiet;
}

static void awake(struct kvt_owner *owner)
{
    for (uint32_t i = 0; i < places(owner); i++)
        if (place_of(&owner->clients[i]) == PLACE_LIVE)
            kvt_ring_awake(&owner->clients[i].requests);
}

/* Descriptors that wake the thread. Remote clients come first, right behind our own. */
static nfds_t poll_set(struct kvt_owner *owner, struct pollfd *fds, nfds_t *own)
{
    nfds_t count = 0;

    fds[count++] = (struct pollfd){.fd = owner->wake_fd, .events = POLLIN};
    for (uint32_t i = 0; i < places(owner); i++) {
        const struct client *client = &owner->clients[i];

        if (place_of(client) == PLACE_LIVE && client->remote)
            fds[count++] = (struct pollfd){.fd = client->requests.event_fd, .events = POLLIN};
    }
    *own = count;
    for (uint32_t i = 0; i < owner->params.root_count; i++) {
        struct kvt_io *io = owner->params.roots[i].io;
        int fd = io->ops->event_fd(io);

        if (fd >= 0)
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    if (owner->params.remote) {
        int fd = owner->params.remote->ops->event_fd(owner->params.remote);

        if (fd >= 0)
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    return count;
}

static void sleep_until(struct kvt_owner *owner, int64_t when)
{
    struct pollfd fds[2 + CLIENTS_MAX + KVT_STORE_ROOTS_MAX];
    nfds_t own, count;
    int64_t left = when == INT64_MAX ? 0 : when - kvt_clock_now(&owner->params.clock);
    struct timespec limit;

    if (when != INT64_MAX && left <= 0)
        return;
    limit = (struct timespec){.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
    count = poll_set(owner, fds, &own);
    /* An error (EINTR) is a wake-up like any other: the loop looks at everything again. */
    if (ppoll(fds, count, when == INT64_MAX ? NULL : &limit, NULL) <= 0)
        return;
    for (nfds_t i = 0; i < own; i++)
        if (fds[i].revents)
            unring(fds[i].fd);
}

/* Somebody brings one more root; they wait until all that it holds is in the index. */
static void root_turn(struct kvt_owner *owner)
{
    /* acquire: pairs with the release of root_add() */
    struct kvt_store_joining *joining =
        atomic_load_explicit(&owner->root_wanted, memory_order_acquire);
    int rc = 0;

    if (!joining)
        return;
    if (!owner->root_joining) {
        rc = owner->params.root_count == KVT_STORE_ROOTS_MAX
                 ? KVT_E_LIMIT
                 : kvt_store_root_join(owner->store, joining);
        if (rc == 0) {
            owner->params.roots[owner->params.root_count++] = owner->root_coming;
            owner->root_joining = true;
        }
    }
    if (rc == 0 && kvt_store_root_joining(owner->store))
        return;
    owner->root_joining = false;
    pthread_mutex_lock(&owner->lock);
    owner->root_result = rc;
    atomic_store_explicit(&owner->root_wanted, NULL, memory_order_release);
    pthread_cond_broadcast(&owner->left);
    pthread_mutex_unlock(&owner->lock);
}

int kvt_owner_root_add(struct kvt_owner *owner, const struct kvt_store_root *root)
{
    struct kvt_store_joining *joining;
    int rc = kvt_store_root_open(owner->store, root, &joining);

    if (rc)
        return rc;
    pthread_mutex_lock(&owner->lock);
    while (owner->root_busy)
        pthread_cond_wait(&owner->left, &owner->lock);
    owner->root_busy = true;
    owner->root_coming = *root;
    /* release: the thread sees what is in both */
    atomic_store_explicit(&owner->root_wanted, joining, memory_order_release);
    wake(owner);
    while (atomic_load_explicit(&owner->root_wanted, memory_order_relaxed))
        pthread_cond_wait(&owner->left, &owner->lock);
    rc = owner->root_result;
    owner->root_busy = false;
    pthread_cond_broadcast(&owner->left);
    pthread_mutex_unlock(&owner->lock);
    if (rc)
        kvt_store_root_discard(joining);
    return rc;
}

void kvt_owner_spin(struct kvt_owner *owner, int64_t spin_ns)
{
    atomic_store_explicit(&owner->spin_ns, spin_ns, memory_order_relaxed);
}

/* Whether to look once more instead of sleeping. since: of the first look in vain; 0: this one. */
static bool spinning(struct kvt_owner *owner, int64_t *since)
{
    int64_t spin_ns = atomic_load_explicit(&owner->spin_ns, memory_order_relaxed);
    int64_t now;

    if (spin_ns <= 0)
        return false;
    now = kvt_clock_now(&owner->params.clock);
    if (!*since)
        *since = now;
    return now - *since < spin_ns;
}

static void *owner_thread(void *arg)
{
    struct kvt_owner *owner = arg;
    int enabled = 1;
    int64_t busy_ns = 0; /* when there was something to do */

    /* acquire: pairs with the release of stop(); everything before it is seen */
    while (!atomic_load_explicit(&owner->stopping, memory_order_acquire)) {
        int want = atomic_load_explicit(&owner->enabled, memory_order_acquire);
        bool any;
        int64_t next_run;

        if (want != enabled)
            kvt_store_enable(owner->store, want);
        enabled = want;
        root_turn(owner);
        reclaim_turn(owner);
        any = clients_turn(owner);
        next_run = kvt_store_run(owner->store);
        if (any || owner->again) {
            owner->again = 0;
            busy_ns = 0;
            continue;
        }
        if (spinning(owner, &busy_ns))
            continue;
        if (announce(owner))
            sleep_until(owner, next_run);
        awake(owner);
    }
    return NULL;
}

int kvt_owner_start(struct kvt_owner *owner, struct kvt_store *store,
                    const struct kvt_store_params *params)
{
    sigset_t all, before;
    int err;

    owner->store = store;
    owner->params = *params;
    /* The program's signals are for the program's threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    err = pthread_create(&owner->thread, NULL, owner_thread, owner);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err) {
        owner->store = NULL;
        return -err;
    }
    pthread_setname_np(owner->thread, "kvt-owner");
    owner->started = 1;
    return 0;
}

/* Memory and reply fd of a client of this process. */
static void wire_free(struct client *client)
{
    if (!client->memory)
        return;
    close(client->replies.event_fd);
    free(client->memory);
    client->memory = NULL;
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

void kvt_owner_stop(struct kvt_owner *owner, int64_t timeout_ns)
{
    if (!owner)
        return;
    if (owner->started) {
        atomic_store_explicit(&owner->stopping, 1, memory_order_release);
        wake(owner);
        pthread_join(owner->thread, NULL);
        kvt_store_close(owner->store, timeout_ns);
    }
    for (uint32_t i = 0; i < CLIENTS_MAX; i++)
        wire_free(&owner->clients[i]);
    pthread_cond_destroy(&owner->left);
    pthread_mutex_destroy(&owner->lock);
    close(owner->wake_fd);
    free(owner);
}

size_t kvt_wire_replies_at(uint32_t ring_bytes)
{
    return kvt_round_up(kvt_ring_bytes(ring_bytes), 64);
}

size_t kvt_wire_bytes(uint32_t ring_bytes)
{
    return 2 * kvt_wire_replies_at(ring_bytes);
}

int kvt_owner_attach(struct kvt_owner *owner, const struct kvt_wire *wire, uint32_t *number)
{
    struct client *client = NULL;
    uint32_t index;
    int err;

    if (!kvt_wire_bytes(wire->ring_bytes))
        return KVT_E_INVAL;
    pthread_mutex_lock(&owner->lock);
    for (index = 0; index < CLIENTS_MAX && !client; index++)
        if (place_of(&owner->clients[index]) == PLACE_FREE)
            client = &owner->clients[index];
    if (client) {
        atomic_store_explicit(&client->place, PLACE_TAKEN, memory_order_relaxed);
        client->number = ++owner->lives * CLIENTS_MAX + (index - 1);
        if (index > places(owner)) /* release: the loop that sees it sees a place that is TAKEN */
            atomic_store_explicit(&owner->places, index, memory_order_release);
    }
    pthread_mutex_unlock(&owner->lock);
    if (!client)
        return KVT_E_LIMIT;
    client->told = false;
    atomic_store_explicit(&client->expelled, 0, memory_order_relaxed);
    client->remote = wire->request_fd != owner->wake_fd;
    client->broken_fd = wire->broken_fd;
    err = kvt_ring_init(&client->requests, wire->memory, wire->ring_bytes, wire->request_fd, 1);
    if (!err)
        err = kvt_ring_init(&client->replies,
                            (uint8_t *)wire->memory + kvt_wire_replies_at(wire->ring_bytes),
                            wire->ring_bytes, wire->reply_fd, 1);
    if (err) {
        atomic_store_explicit(&client->place, PLACE_FREE, memory_order_release);
        return err;
    }
    *number = client->number;
    /* release: the thread that sees LIVE sees the rings */
    atomic_store_explicit(&client->place, PLACE_LIVE, memory_order_release);
    wake(owner); /* it may be asleep without having announced so in this ring */
    return 0;
}

void kvt_owner_expel(struct kvt_owner *owner, uint32_t number)
{
    struct client *client = &owner->clients[number % CLIENTS_MAX];
    int place = PLACE_LIVE;

    atomic_store_explicit(&client->expelled, 1, memory_order_relaxed);
    atomic_compare_exchange_strong_explicit(&client->place, &place, PLACE_BROKEN,
                                            memory_order_acq_rel, memory_order_acquire);
    wake(owner);
}

int kvt_owner_broken(const struct kvt_owner *owner, uint32_t number)
{
    const struct client *client = &owner->clients[number % CLIENTS_MAX];

    return place_of(client) == PLACE_BROKEN;
}

/* The place becomes free by way of LEAVING or PARTING. */
static void place_end(struct kvt_owner *owner, uint32_t number, int how)
{
    struct client *client = &owner->clients[number % CLIENTS_MAX];

    atomic_store_explicit(&client->place, how, memory_order_release);
    wake(owner);
    pthread_mutex_lock(&owner->lock);
    while (place_of(client) != PLACE_GONE)
        pthread_cond_wait(&owner->left, &owner->lock);
    pthread_mutex_unlock(&owner->lock);
    wire_free(client);
    atomic_store_explicit(&client->place, PLACE_FREE, memory_order_release);
}

void kvt_owner_detach(struct kvt_owner *owner, uint32_t number)
{
    place_end(owner, number, PLACE_LEAVING);
}

void kvt_owner_part(struct kvt_owner *owner, uint32_t number)
{
    /* relaxed: the place orders it */
    atomic_store_explicit(&owner->clients[number % CLIENTS_MAX].expelled, 1, memory_order_relaxed);
    place_end(owner, number, PLACE_PARTING);
}

void kvt_owner_reclaim(struct kvt_owner *owner, uint32_t number)
{
    pthread_mutex_lock(&owner->lock);
    while (owner->reclaim_count == RECLAIMS_MAX)
        pthread_cond_wait(&owner->left, &owner->lock);
    owner->reclaims[owner->reclaim_count++] = number;
    atomic_store_explicit(&owner->reclaim_wanted, 1, memory_order_relaxed);
    pthread_mutex_unlock(&owner->lock);
    wake(owner);
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
    wire.reply_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
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
    owner->clients[number % CLIENTS_MAX].memory = wire.memory;
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

void kvt_owner_enable(struct kvt_owner *owner, int on)
{
    atomic_store_explicit(&owner->enabled, on, memory_order_release);
    wake(owner);
}
