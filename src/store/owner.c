/* The owner thread: a loop over the clients' rings and the store.
 *
 * One event fd wakes it for every request ring and for control; the backends' fds wake it for
 * completions; the store's own timers give poll() its limit. Before it sleeps it announces so in
 * every ring and looks once more (base/ring.h), so no message is slept over and it never spins.
 * Clients are owner_clients.c's.
 * Threads: start, stop, root_add and enable from any; everything of the store on the owner's.
 */
#include "store/owner_impl.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>

#include "base/fd.h"
#include "kvtier/error.h"
#include "remote/remote.h"

/* Empty an event fd that poll() found readable. */
static void unring(int fd)
{
    uint64_t rung;

    if (read(fd, &rung, sizeof(rung)) < 0)
        return; /* somebody else has */
}

/* Announce sleep in every ring. false: somebody has sent something meanwhile. */
static bool announce(struct kvt_owner *owner)
{
    bool quiet = true;

    for (uint32_t i = 0; i < kvt_owner_places(owner); i++)
        if (kvt_owner_place(&owner->clients[i]) == KVT_PLACE_LIVE)
            quiet = kvt_ring_sleep(&owner->clients[i].requests) && quiet;
    return quiet;
}

static void awake(struct kvt_owner *owner)
{
    for (uint32_t i = 0; i < kvt_owner_places(owner); i++)
        if (kvt_owner_place(&owner->clients[i]) == KVT_PLACE_LIVE)
            kvt_ring_awake(&owner->clients[i].requests);
}

/* Descriptors that wake the thread. Remote clients come first, right behind our own. */
static nfds_t poll_set(struct kvt_owner *owner, struct pollfd *fds, nfds_t *own)
{
    nfds_t count = 0;

    fds[count++] = (struct pollfd){.fd = owner->wake_fd, .events = POLLIN};
    for (uint32_t i = 0; i < kvt_owner_places(owner); i++) {
        const struct kvt_owner_client *client = &owner->clients[i];

        if (kvt_owner_place(client) == KVT_PLACE_LIVE && client->remote)
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
    struct pollfd fds[2 + KVT_OWNER_CLIENTS_MAX + KVT_STORE_ROOTS_MAX];
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
    kvt_owner_wake(owner);
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
        kvt_owner_reclaim_turn(owner);
        any = kvt_owner_clients_turn(owner);
        next_run = kvt_store_run(owner->store);
        kvt_owner_ring_all(owner);
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

int kvt_owner_new(struct kvt_owner **out)
{
    struct kvt_owner *owner = calloc(1, sizeof(*owner));

    *out = NULL;
    if (!owner)
        return -ENOMEM;
    owner->wake_fd = kvt_fd_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
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

void kvt_owner_stop(struct kvt_owner *owner, int64_t timeout_ns)
{
    if (!owner)
        return;
    if (owner->started) {
        atomic_store_explicit(&owner->stopping, 1, memory_order_release);
        kvt_owner_wake(owner);
        pthread_join(owner->thread, NULL);
        kvt_store_close(owner->store, timeout_ns);
        kvt_owner_ring_all(owner);
    }
    for (uint32_t i = 0; i < KVT_OWNER_CLIENTS_MAX; i++)
        kvt_owner_wire_free(&owner->clients[i]);
    pthread_cond_destroy(&owner->left);
    pthread_mutex_destroy(&owner->lock);
    close(owner->wake_fd);
    free(owner);
}

void kvt_owner_enable(struct kvt_owner *owner, int on)
{
    atomic_store_explicit(&owner->enabled, on, memory_order_release);
    kvt_owner_wake(owner);
}
