/* A cache whose store is a kvtierd's: connecting at open, and again whenever the daemon has gone.
 *
 *            daemon gone, we were disconnected, no answer for seconds
 *   UP ------------------------------------------------------------> BROKEN
 *    ^                                                                 |  everything owed ends as a
 *    |                                                                 v  miss, or by its worker
 *    `--- namespaces opened anew <--- connected <--- tried again <-- nothing touches the arena
 *
 * Rules
 *  1. While there is no connection every lookup, load and store is a miss, counted; the engine goes
 *     on. One warning says so, one line says when it is over.
 *  2. The old arena is let go of (and the daemon told so) only when no worker and no GPU touches
 * it: that is when no request is active.
 *  3. Handles of namespaces are the daemon's: each life of a connection gives new ones, under the
 *     cache's lock, before anything is asked. A namespace that the daemon refuses has handle 0, and
 *     is never asked for.
 *  4. A daemon that owes answers and says nothing for PATIENCE is treated as gone.
 * Threads: kvt_open(), then the reply thread. The lock is held over the few round trips of rule 3.
 */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/gpu_lane.h"
#include "client/options.h"

#define BACKOFF_MIN_MS 20
#define BACKOFF_MAX_MS 1000
#define OPEN_TIMEOUT_MS 2000 /* of a namespace: its tables may grow */
#define WATCH_MS 1000
#define PATIENCE_NS INT64_C(2000000000)

/* ---- namespaces of a new connection -------------------------------------------------------- */

/* The next reply, waited for. 0; KVT_E_CLOSED none came, or it makes no sense. */
static int next_reply(struct kvt_cache *cache, struct kvt_msg *out)
{
    struct kvt_ring *ring = &cache->channel.replies;
    const int64_t end = kvt_clock_now(&cache->clock) + OPEN_TIMEOUT_MS * INT64_C(1000000);
    for (;;) {
        const void *frame;
        int bytes = kvt_ring_peek(ring, &frame);
        if (bytes >= (int)sizeof(*out)) {
            memcpy(out, frame, sizeof(*out));
            kvt_ring_pop(ring);
            return 0;
        }
        const int64_t left = end - kvt_clock_now(&cache->clock);
        if (bytes != 0 || left <= 0 || kvt_ring_closed(ring))
            return KVT_E_CLOSED;
        struct pollfd fds[2] = {{.fd = ring->event_fd, .events = POLLIN},
                                {.fd = cache->link.sock, .events = POLLIN}};
        uint64_t rung;
        if (!kvt_ring_sleep(ring))
            continue;
        (void)poll(fds, 2, (int)(left / 1000000) + 1);
        kvt_ring_awake(ring);
        if ((fds[0].revents & POLLIN) && read(ring->event_fd, &rung, sizeof(rung)) < 0)
            continue; /* somebody else's wake-up: look again */
        if (fds[1].revents != 0)
            return KVT_E_CLOSED;
    }
}

/* Open one group; *handle is 0 when the daemon refuses it. 0, KVT_E_CLOSED. */
static int group_open(struct kvt_cache *cache, const struct kvt_msg_ns_open *open, uint32_t *handle)
{
    struct kvt_msg reply;
    struct kvt_msg_ns_open *msg =
        kvt_msg_reserve(cache, sizeof(*msg), KVT_OP_NS_OPEN, 1, 0, 0); /* the ring is empty */
    if (msg == NULL)
        return KVT_E_CLOSED;
    memcpy((char *)msg + sizeof(msg->msg), (const char *)open + sizeof(open->msg),
           sizeof(*msg) - sizeof(msg->msg));
    kvt_msg_push(cache, msg);
    int rc = next_reply(cache, &reply);
    if (rc != 0 || reply.op != KVT_OP_REPLY || reply.reply_to != KVT_OP_NS_OPEN)
        return KVT_E_CLOSED;
    *handle = reply.status < 0 ? 0 : reply.ns;
    if (reply.status < 0)
        cache->counters.daemon_ns_refused++;
    return 0;
}

static int namespaces_open(struct kvt_cache *cache)
{
    struct kvt_ns *ns;
    int rc = 0;
    TAILQ_FOREACH(ns, &cache->namespaces, list)
    {
        for (uint32_t i = 0; i < ns->shape->group_count && rc == 0; i++) {
            struct kvt_msg_ns_open msg;
            kvt_ns_message(ns, i, &msg);
            ns->groups[i].handle = 0;
            rc = group_open(cache, &msg, &ns->groups[i].handle);
        }
        if (rc != 0)
            break;
    }
    return rc;
}

/* ---- connecting ---------------------------------------------------------------------------- */

/* Use a link that has been dialled. */
static int link_use(struct kvt_cache *cache)
{
    struct kvt_link *link = &cache->link;
    memset(&cache->channel, 0, sizeof(cache->channel));
    int rc = kvt_channel_attach(&cache->channel, &link->wire);
    if (rc != 0)
        return rc;
    cache->channel.arena = cache->arena = link->memory.arena;
    cache->channel.arena_bytes = cache->arena_bytes = link->memory.arena_bytes;
    cache->channel.client = link->client;
    cache->alloc_bytes_max = kvt_alloc_window(cache);
    cache->stuck = false;
    cache->link_lives++;
    rc = namespaces_open(cache);
    if (rc != 0)
        return rc;
    kvt_pin_init(&cache->pin, cache->arena, cache->arena_bytes,
                 cache->arena_bytes >= KVT_HUGE_ARENA_MIN ? KVT_HUGE_BYTES
                                                          : (uint64_t)sysconf(_SC_PAGESIZE),
                 &cache->log);
    cache->pin.huge = link->memory.huge;
    cache->heard_ns = kvt_clock_now(&cache->clock);
    cache->pinged = false;
    cache->broken = false;
    return 0;
}

static void link_drop(struct kvt_cache *cache)
{
    kvt_lanes_arena(cache, false);
    pthread_mutex_lock(&cache->lock);
    cache->arena = NULL;
    cache->arena_bytes = 0;
    memset(&cache->channel, 0, sizeof(cache->channel));
    pthread_mutex_unlock(&cache->lock);
    kvt_link_hang_up(&cache->link);
}

static int link_try(struct kvt_cache *cache, char *text, size_t len)
{
    int rc = kvt_link_dial(&cache->link, text, len);
    if (rc != 0)
        return rc;
    pthread_mutex_lock(&cache->lock);
    rc = link_use(cache);
    pthread_mutex_unlock(&cache->lock);
    if (rc != 0) {
        (void)snprintf(text, len, "the kvtierd at %s went away during the first messages",
                       cache->link.path);
        link_drop(cache);
        return rc;
    }
    kvt_lanes_arena(cache, true);
    return 0;
}

static void say_down(struct kvt_cache *cache, const char *text)
{
    pthread_mutex_lock(&cache->lock);
    (void)snprintf(cache->daemon_state, sizeof(cache->daemon_state), "%s", text);
    bool told = cache->daemon_told;
    cache->daemon_told = true;
    pthread_mutex_unlock(&cache->lock);
    if (!told)
        kvt_log(&cache->log, KVT_LOG_WARN, "%s (everything misses meanwhile; tried again)", text);
}

static void say_up(struct kvt_cache *cache)
{
    char size[32];
    pthread_mutex_lock(&cache->lock);
    (void)snprintf(cache->daemon_state, sizeof(cache->daemon_state), "connected");
    bool told = cache->daemon_told;
    cache->daemon_told = false;
    if (cache->link_lives > 1)
        cache->counters.daemon_reconnects++;
    pthread_mutex_unlock(&cache->lock);
    kvt_log(&cache->log, KVT_LOG_INFO, "%s the kvtierd at %s: %s of DRAM",
            told ? "connected again to" : "connected to", cache->link.path,
            kvt_size_text(cache->link.memory.arena_bytes, size, sizeof(size)));
}

void kvt_remote_open(struct kvt_cache *cache, char *error, size_t error_len)
{
    char text[512];
    kvt_link_init(&cache->link, cache->settings->socket);
    cache->broken = true;
    if (link_try(cache, text, sizeof(text)) == 0) {
        say_up(cache);
        return;
    }
    (void)snprintf(error, error_len, "%s (everything misses meanwhile)", text);
    say_down(cache, text);
}

void kvt_remote_close(struct kvt_cache *cache)
{
    kvt_link_hang_up(&cache->link);
}

/* ---- losing and finding -------------------------------------------------------------------- */

/* Wait until nothing touches the arena. false: the cache closes. */
static bool wait_quiet(struct kvt_cache *cache)
{
    pthread_mutex_lock(&cache->lock);
    kvt_pump(cache); /* ends what was coded meanwhile */
    while (cache->active_count > 0 && !cache->stop_reply)
        pthread_cond_wait(&cache->idle, &cache->lock);
    bool stop = cache->stop_reply;
    pthread_mutex_unlock(&cache->lock);
    return !stop;
}

/* Sleep, but for a close. false: the cache closes. */
static bool wait_a_while(struct kvt_cache *cache, int ms)
{
    struct pollfd wake = {.fd = cache->wake_fd, .events = POLLIN};
    uint64_t rung;
    if (poll(&wake, 1, ms) > 0 && read(cache->wake_fd, &rung, sizeof(rung)) < 0)
        return true;
    pthread_mutex_lock(&cache->lock);
    bool stop = cache->stop_reply;
    pthread_mutex_unlock(&cache->lock);
    return !stop;
}

void kvt_remote_restore(struct kvt_cache *cache)
{
    char text[512];
    int backoff_ms = BACKOFF_MIN_MS;
    if (cache->link.sock >= 0) {
        (void)snprintf(text, sizeof(text), "the kvtierd at %s is gone, or has disconnected us",
                       cache->link.path);
        say_down(cache, text);
        if (!wait_quiet(cache))
            return;
        link_drop(cache);
    }
    while (link_try(cache, text, sizeof(text)) != 0) {
        say_down(cache, text);
        if (!wait_a_while(cache, backoff_ms))
            return;
        backoff_ms = KVT_MIN(2 * backoff_ms, BACKOFF_MAX_MS);
    }
    say_up(cache);
}

int kvt_remote_watch(struct kvt_cache *cache)
{
    bool owed = false;
    for (int klass = 0; klass < KVT_C_CLASSES; klass++)
        owed = owed || cache->flight_count[klass] > 0;
    const int64_t now = kvt_clock_now(&cache->clock);
    if (!owed) {
        cache->heard_ns = now;
        cache->pinged = false;
        return WATCH_MS; /* who asks meanwhile does not wake us for it */
    }
    if (cache->pinged && cache->ping.done) /* it has answered: it lives, and may be asked again */
        cache->pinged = false;
    const int64_t silent = now - cache->heard_ns;
    if (silent < PATIENCE_NS)
        return (int)((PATIENCE_NS - silent) / 1000000) + 1;
    if (!cache->pinged && kvt_call_ping(cache)) { /* what it owes may wait for a disk */
        cache->pinged = true;
        cache->heard_ns = now;
        return (int)(PATIENCE_NS / 1000000) + 1;
    }
    cache->counters.daemon_silent++;
    kvt_engine_fail_all(cache);
    return 0;
}
