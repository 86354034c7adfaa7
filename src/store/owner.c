/* The owner thread: a loop over the clients' rings and the store.
 *
 * One event fd wakes it for every request ring and for control; the backends' fds wake it for
 * completions; the store's own timers give poll() its limit. Before it sleeps it announces so in
 * every ring and looks once more (base/ring.h), so no message is slept over and it never spins.
 *
 * A client's place goes FREE -> LIVE (connect) -> LEAVING (disconnect) -> GONE (the thread has let
 * go of it) -> FREE. A client whose reply ring is full, or whose messages are broken, becomes
 * BROKEN: its reply ring is closed, which tells it; it loses its pins and slots, and stays so until
 * it disconnects.
 * Threads: connect, disconnect and enable from any; everything of the store on the owner's.
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

#define CLIENTS_MAX 64u      /* low bits of a client's number */
#define MESSAGES_PER_TURN 64 /* of one client, before others and the store get their turn */

enum place { PLACE_FREE, PLACE_TAKEN, PLACE_LIVE, PLACE_LEAVING, PLACE_BROKEN, PLACE_GONE };

struct client {
    _Atomic int place;
    uint32_t number; /* life << 6 | index: a later client of this place has another number */
    struct kvt_ring requests; /* consumer side */
    struct kvt_ring replies;  /* producer side */
    void *memory;
    int reply_fd;
};

struct kvt_owner {
    struct kvt_store *store;
    struct kvt_store_params params;
    pthread_t thread;
    int started;
    int again; /* the owner's thread: a client broke while it was not its turn */
    int wake_fd;
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

static void wake(struct kvt_owner *owner)
{
    uint64_t one = 1;

    /* Full means that it is readable already. */
    if (write(owner->wake_fd, &one, sizeof(one)) < 0)
        return;
}

/* Pairs with the release stores of connect() and disconnect(). */
static int place_of(const struct client *client)
{
    return atomic_load_explicit(&client->place, memory_order_acquire);
}

/* The thread lets go of a client; place says what it is from now on. */
static void let_go(struct kvt_owner *owner, struct client *client, int place)
{
    kvt_store_client_gone(owner->store, client->number);
    /* release: pairs with disconnect(), which frees the rings when it sees GONE */
    atomic_store_explicit(&client->place, place, memory_order_release);
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
        broken = msg->bytes > (uint32_t)bytes ||
                 kvt_store_handle(owner->store, client->number, msg) != 0;
    }
    if (broken) {
        int place = PLACE_LIVE;

        atomic_compare_exchange_strong_explicit(&client->place, &place, PLACE_BROKEN,
                                                memory_order_acq_rel, memory_order_acquire);
    }
    return count > 0;
}

/* One turn for every client. */
static bool clients_turn(struct kvt_owner *owner)
{
    bool any = false;

    for (uint32_t i = 0; i < CLIENTS_MAX; i++) {
        struct client *client = &owner->clients[i];
        int place = place_of(client);

        if (place == PLACE_LIVE)
            any = client_turn(owner, client) || any;
        place = place_of(client);
        if (place == PLACE_BROKEN && client->number) {
            kvt_log(&owner->params.log, KVT_LOG_ERROR,
                    "a client broke the protocol or left no room for replies: disconnected");
            /* First told, then taken from: a record decoded while the ring was open is good. */
            kvt_ring_close(&client->replies);
            kvt_store_client_gone(owner->store, client->number);
            client->number = 0;
        }
        if (place == PLACE_LEAVING) {
            let_go(owner, client, PLACE_GONE);
            pthread_mutex_lock(&owner->lock);
            pthread_cond_broadcast(&owner->left);
            pthread_mutex_unlock(&owner->lock);
            any = true;
        }
    }
    return any;
}

/* Announce sleep in every ring. false: somebody has sent something meanwhile. */
static bool announce(struct kvt_owner *owner)
{
    bool quiet = true;

    for (uint32_t i = 0; i < CLIENTS_MAX; i++)
        if (place_of(&owner->clients[i]) == PLACE_LIVE)
            quiet = kvt_ring_sleep(&owner->clients[i].requests) && quiet;
    return quiet;
}

static void awake(struct kvt_owner *owner)
{
    for (uint32_t i = 0; i < CLIENTS_MAX; i++)
        if (place_of(&owner->clients[i]) == PLACE_LIVE)
            kvt_ring_awake(&owner->clients[i].requests);
}

static void sleep_until(struct kvt_owner *owner, int64_t when)
{
    struct pollfd fds[KVT_STORE_ROOTS_MAX + 1] = {{.fd = owner->wake_fd, .events = POLLIN}};
    nfds_t count = 1;
    int64_t left = when == INT64_MAX ? 0 : when - kvt_clock_now(&owner->params.clock);
    struct timespec limit;
    uint64_t rung;

    if (when != INT64_MAX && left <= 0)
        return;
    limit = (struct timespec){.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
    for (uint32_t i = 0; i < owner->params.root_count; i++) {
        struct kvt_io *io = owner->params.roots[i].io;
        int fd = io->ops->event_fd(io);

        if (fd >= 0)
            fds[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    /* An error (EINTR) is a wake-up like any other: the loop looks at everything again. */
    (void)ppoll(fds, count, when == INT64_MAX ? NULL : &limit, NULL);
    if (read(owner->wake_fd, &rung, sizeof(rung)) < 0)
        return; /* it was not this one */
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

static void *owner_thread(void *arg)
{
    struct kvt_owner *owner = arg;
    int enabled = 1;

    /* acquire: pairs with the release of stop(); everything before it is seen */
    while (!atomic_load_explicit(&owner->stopping, memory_order_acquire)) {
        int want = atomic_load_explicit(&owner->enabled, memory_order_acquire);
        bool any;
        int64_t next_run;

        if (want != enabled)
            kvt_store_enable(owner->store, want);
        enabled = want;
        root_turn(owner);
        any = clients_turn(owner);
        next_run = kvt_store_run(owner->store);
        if (any || owner->again) {
            owner->again = 0;
            continue;
        }
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

static void client_free(struct client *client)
{
    if (client->reply_fd > 0)
        close(client->reply_fd);
    free(client->memory);
    client->memory = NULL;
    client->reply_fd = 0;
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
        client_free(&owner->clients[i]);
    pthread_cond_destroy(&owner->left);
    pthread_mutex_destroy(&owner->lock);
    close(owner->wake_fd);
    free(owner);
}

/* Rings of a new client, both ends. */
static int client_init(struct kvt_owner *owner, struct client *client, uint32_t ring_bytes,
                       struct kvt_channel *out)
{
    size_t bytes = kvt_round_up(kvt_ring_bytes(ring_bytes), 64);
    uint8_t *memory;
    int err;

    if (!bytes)
        return KVT_E_INVAL;
    memory = aligned_alloc(64, 2 * bytes);
    if (!memory)
        return -ENOMEM;
    memset(memory, 0, 2 * bytes);
    client->memory = memory;
    client->reply_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (client->reply_fd < 0) {
        client->reply_fd = 0;
        return -errno;
    }
    err = kvt_ring_init(&client->requests, memory, ring_bytes, owner->wake_fd, 1);
    if (!err)
        err = kvt_ring_init(&out->requests, memory, ring_bytes, owner->wake_fd, 0);
    if (!err)
        err = kvt_ring_init(&client->replies, memory + bytes, ring_bytes, client->reply_fd, 1);
    if (!err)
        err = kvt_ring_init(&out->replies, memory + bytes, ring_bytes, client->reply_fd, 0);
    return err;
}

int kvt_owner_connect(struct kvt_owner *owner, uint32_t ring_bytes, struct kvt_channel *out)
{
    struct client *client = NULL;
    uint32_t index;
    int err;

    pthread_mutex_lock(&owner->lock);
    for (index = 0; index < CLIENTS_MAX && !client; index++)
        if (place_of(&owner->clients[index]) == PLACE_FREE)
            client = &owner->clients[index];
    if (client) {
        atomic_store_explicit(&client->place, PLACE_TAKEN, memory_order_relaxed);
        client->number = ++owner->lives * CLIENTS_MAX + (index - 1);
    }
    pthread_mutex_unlock(&owner->lock);
    if (!client)
        return KVT_E_LIMIT;
    memset(out, 0, sizeof(*out));
    err = client_init(owner, client, ring_bytes, out);
    if (err) {
        client_free(client);
        atomic_store_explicit(&client->place, PLACE_FREE, memory_order_release);
        return err;
    }
    out->arena = owner->params.arena;
    out->arena_bytes = owner->params.arena_bytes;
    out->client = client->number;
    /* release: the thread that sees LIVE sees the rings */
    atomic_store_explicit(&client->place, PLACE_LIVE, memory_order_release);
    wake(owner); /* it may be asleep without having announced so in this ring */
    return 0;
}

void kvt_owner_disconnect(struct kvt_owner *owner, struct kvt_channel *channel)
{
    struct client *client = &owner->clients[channel->client % CLIENTS_MAX];

    if (!channel->client)
        return;
    atomic_store_explicit(&client->place, PLACE_LEAVING, memory_order_release);
    wake(owner);
    pthread_mutex_lock(&owner->lock);
    while (place_of(client) != PLACE_GONE)
        pthread_cond_wait(&owner->left, &owner->lock);
    pthread_mutex_unlock(&owner->lock);
    client_free(client);
    memset(channel, 0, sizeof(*channel));
    atomic_store_explicit(&client->place, PLACE_FREE, memory_order_release);
}

void kvt_owner_enable(struct kvt_owner *owner, int on)
{
    atomic_store_explicit(&owner->enabled, on, memory_order_release);
    wake(owner);
}
