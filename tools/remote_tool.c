/* Commands and a shared tier: its backend is opened as a cache does, asked, and closed. What it
 * warns of meanwhile is the reason when something fails. Threads: one, and the backend's.
 */
#include "remote_tool.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "remote/remote.h"

#define ANSWER_NS INT64_C(5000000000)
#define PURGE_NS INT64_C(60000000000)
#define SLACK_NS INT64_C(1000000000) /* for the end of a connection */
#define TRIAL_BYTES (1u << 20)

struct tier {
    const struct kvt_remote_where *where;
    struct kvt_remote *remote;
    pthread_mutex_t lock;
    char reason[400]; /* under the lock */
};

static void take_reason(void *arg, int level, const char *message)
{
    struct tier *tier = arg;

    (void)level;
    pthread_mutex_lock(&tier->lock);
    (void)snprintf(tier->reason, sizeof(tier->reason), "%s", message);
    pthread_mutex_unlock(&tier->lock);
}

static int tier_open(struct tier *tier, const struct kvt_remote_where *where, char *error,
                     size_t error_len)
{
    const struct kvt_remote_params params = {
        .where = where->url,
        .auth_file = where->auth_file,
        .mac_file = where->mac_file,
        .ca_file = where->ca_file,
        .about = true,
        .log = {.fn = take_reason, .arg = tier, .level_max = KVT_LOG_WARN}};
    int rc;

    memset(tier, 0, sizeof(*tier));
    tier->where = where;
    (void)pthread_mutex_init(&tier->lock, NULL); /* cannot fail with these arguments */
    error[0] = '\0';
    rc = kvt_remote_tier_open(&params, &tier->remote, error, error_len);
    if (rc && !error[0])
        (void)snprintf(error, error_len, "%.300s: %s", where->url, kvt_strerror(rc));
    return rc;
}

/* status: what the last request ended with; its sentence. */
static int tier_close(struct tier *tier, int status, char *error, size_t error_len)
{
    if (tier->remote) {
        tier->remote->ops->stop(tier->remote);
        tier->remote->ops->destroy(tier->remote);
        if (status == -EHOSTDOWN && tier->reason[0]) /* the reason says more than "Host is down" */
            (void)snprintf(error, error_len, "%.300s: %.400s", tier->where->url, tier->reason);
        else if (status && tier->reason[0])
            (void)snprintf(error, error_len, "%.300s: %s: %.400s", tier->where->url,
                           kvt_strerror(status), tier->reason);
        else if (status)
            (void)snprintf(error, error_len, "%.300s: %s", tier->where->url, kvt_strerror(status));
    }
    (void)pthread_mutex_destroy(&tier->lock);
    return status;
}

/* One request, waited for. Its status. */
static int ask(struct tier *tier, struct kvt_remote_req *req, int64_t deadline_ns, double *took_s)
{
    struct kvt_remote *remote = tier->remote;
    struct kvt_clock clock = kvt_clock_system();
    struct kvt_remote_req *done = NULL;
    int64_t start_ns = kvt_clock_now(&clock);
    int rc;

    req->deadline_ns = start_ns + deadline_ns;
    rc = remote->ops->submit(remote, req);
    if (rc)
        return rc;
    while (!remote->ops->reap(remote, &done, 1)) {
        struct pollfd ready = {.fd = remote->ops->event_fd(remote), .events = POLLIN};

        (void)poll(&ready, 1, 100);
    }
    if (took_s)
        *took_s = (double)(kvt_clock_now(&clock) - start_ns) * 1e-9;
    return req->status;
}

/* Whether it answers at all: what waits for a server that is not there waits for its deadline. */
static int answers(struct tier *tier, const struct kvt_full_key *key, int64_t limit_ns,
                   double *took_s)
{
    struct kvt_remote_found found;
    struct kvt_remote_req req = {.op = KVT_REMOTE_PROBE, .count = 1, .keys = key, .found = &found};

    return ask(tier, &req, limit_ns, took_s);
}

static int purge_one(struct tier *tier, const uint8_t ns[KVT_NS_BYTES], uint64_t *removed)
{
    struct kvt_full_key key = {.hash_len = 1};
    struct kvt_remote_req req = {.op = KVT_REMOTE_DROP_NS, .count = 1, .keys = &key};
    int rc;

    memcpy(key.ns, ns, KVT_NS_BYTES);
    rc = answers(tier, &key, ANSWER_NS, NULL);
    if (!rc)
        rc = ask(tier, &req, PURGE_NS, NULL);
    *removed += req.removed;
    return rc;
}

int kvt_remote_purge(const struct kvt_remote_where *where, const uint8_t (*ns)[KVT_NS_BYTES],
                     size_t count, uint64_t *removed, char *error, size_t error_len)
{
    struct tier tier;
    int rc = tier_open(&tier, where, error, error_len);
    bool open = rc == 0;

    *removed = 0;
    for (size_t i = 0; open && i < count; i++) {
        int failed = purge_one(&tier, ns[i], removed);

        if (failed && !rc)
            rc = failed;
    }
    return tier_close(&tier, rc, error, error_len);
}

/* A record of random bytes, whole as a cache would put it. */
static void record_make(const struct kvt_full_key *key, uint8_t *out)
{
    struct kvt_rng rng = {.state = kvt_rng_seed_os()};
    struct kvt_record_header header = {.magic = KVT_RECORD_MAGIC,
                                       .version = KVT_RECORD_VERSION,
                                       .map = KVT_LEVEL_RAW,
                                       .key = *key,
                                       .payload_bytes = TRIAL_BYTES - sizeof(header),
                                       .record_bytes = TRIAL_BYTES,
                                       .sequence = 1};

    for (size_t i = 0; i < TRIAL_BYTES / sizeof(uint64_t); i++) {
        uint64_t word = kvt_rng_next(&rng);

        memcpy(out + i * sizeof(word), &word, sizeof(word));
    }
    memcpy(out, &header, sizeof(header));
    header.checksum = kvt_record_checksum(out, TRIAL_BYTES);
    memcpy(out, &header, sizeof(header));
}

static int there_and_back(struct tier *tier, const struct kvt_full_key *key, uint8_t *record,
                          struct kvt_remote_trial *out)
{
    struct kvt_remote_req put = {.op = KVT_REMOTE_PUT,
                                 .count = 1,
                                 .keys = key,
                                 .record = record,
                                 .record_bytes = TRIAL_BYTES};
    struct kvt_remote_req get = {.op = KVT_REMOTE_GET,
                                 .count = 1,
                                 .keys = key,
                                 .record = record + TRIAL_BYTES,
                                 .record_bytes = TRIAL_BYTES};
    /* in a directory the ones made for it go as well; a server would be walked for that */
    struct kvt_remote_req drop = {
        .op = strncmp(tier->where->url, "dir:", 4) == 0 ? KVT_REMOTE_DROP_NS : KVT_REMOTE_DROP,
        .count = 1,
        .keys = key};
    int rc = ask(tier, &put, ANSWER_NS, &out->put_s), gone;

    if (rc)
        return rc;
    rc = ask(tier, &get, ANSWER_NS, &out->get_s);
    if (!rc && memcmp(record, record + TRIAL_BYTES, TRIAL_BYTES) != 0)
        rc = KVT_E_CORRUPT;
    gone = ask(tier, &drop, ANSWER_NS, NULL);
    out->bytes = TRIAL_BYTES;
    return rc ? rc : gone;
}

struct trial {                     /* of a thread, and of who waits for it */
    struct kvt_remote_where where; /* copies */
    int write;
    int64_t answer_ns;
    struct kvt_remote_trial out;
    char error[1200];
    int rc;
    bool over, left; /* left: nobody waits any more */
    pthread_mutex_t lock;
    pthread_cond_t ended;
};

static void trial_free(struct trial *trial)
{
    free((void *)trial->where.url);
    free((void *)trial->where.auth_file);
    free((void *)trial->where.mac_file);
    free((void *)trial->where.ca_file);
    pthread_cond_destroy(&trial->ended);
    pthread_mutex_destroy(&trial->lock);
    free(trial);
}

static int try_it(struct trial *trial)
{
    struct kvt_full_key key = {.hash_len = sizeof(uint64_t)};
    struct kvt_rng rng = {.state = kvt_rng_seed_os()};
    struct tier tier;
    uint8_t *record = NULL;
    int rc = tier_open(&tier, &trial->where, trial->error, sizeof(trial->error));

    memcpy(key.ns, "kvtier doctor", 13);
    for (size_t i = 13; i < KVT_NS_BYTES; i++)
        key.ns[i] = (uint8_t)kvt_rng_next(&rng);
    for (size_t i = 0; i < key.hash_len; i++)
        key.hash[i] = (uint8_t)kvt_rng_next(&rng);
    if (!rc)
        rc = answers(&tier, &key, trial->answer_ns, &trial->out.answer_s);
    if (!rc && tier.remote->ops->about)
        tier.remote->ops->about(tier.remote, trial->out.about, sizeof(trial->out.about));
    if (!rc && trial->write) {
        record = aligned_alloc(KVT_PAGE_BYTES, 2 * (size_t)TRIAL_BYTES);
        rc = record ? 0 : -ENOMEM;
    }
    if (record) {
        record_make(&key, record);
        rc = there_and_back(&tier, &key, record, &trial->out);
    }
    rc = tier_close(&tier, rc, trial->error, sizeof(trial->error));
    free(record);
    return rc;
}

static void *trial_main(void *arg)
{
    struct trial *trial = arg;
    int rc = try_it(trial);

    pthread_mutex_lock(&trial->lock);
    trial->rc = rc;
    trial->over = true;
    bool left = trial->left;
    pthread_cond_signal(&trial->ended);
    pthread_mutex_unlock(&trial->lock);
    if (left)
        trial_free(trial);
    return NULL;
}

/* NULL: out of memory. */
static struct trial *trial_new(const struct kvt_remote_where *where, int write, int64_t answer_ns)
{
    struct trial *trial = calloc(1, sizeof(*trial));
    const struct kvt_remote_where w = *where;
    pthread_condattr_t attr;

    if (!trial)
        return NULL;
    pthread_mutex_init(&trial->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&trial->ended, &attr);
    pthread_condattr_destroy(&attr);
    trial->write = write;
    trial->answer_ns = answer_ns;
    trial->where = (struct kvt_remote_where){.url = strdup(w.url),
                                             .auth_file = w.auth_file ? strdup(w.auth_file) : NULL,
                                             .mac_file = w.mac_file ? strdup(w.mac_file) : NULL,
                                             .ca_file = w.ca_file ? strdup(w.ca_file) : NULL};
    if (trial->where.url && !trial->where.auth_file == !w.auth_file &&
        !trial->where.mac_file == !w.mac_file && !trial->where.ca_file == !w.ca_file)
        return trial;
    trial_free(trial);
    return NULL;
}

/* Until it is over, or for so long. Whether it is over; else the thread frees it one day. */
static bool trial_wait(struct trial *trial, int64_t limit_ns)
{
    const struct kvt_clock clock = kvt_clock_system();
    const int64_t end = kvt_clock_now(&clock) + limit_ns;
    const struct timespec until = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    int err = 0;

    pthread_mutex_lock(&trial->lock);
    while (!trial->over && err == 0)
        err = pthread_cond_timedwait(&trial->ended, &trial->lock, &until);
    bool over = trial->over;
    trial->left = !over;
    pthread_mutex_unlock(&trial->lock);
    return over;
}

int kvt_remote_try(const struct kvt_remote_where *where, int write, int64_t answer_ns,
                   struct kvt_remote_trial *out, char *error, size_t error_len)
{
    struct trial *trial = trial_new(where, write, answer_ns);
    pthread_t thread;

    memset(out, 0, sizeof(*out));
    error[0] = '\0';
    if (!trial || pthread_create(&thread, NULL, trial_main, trial) != 0) {
        if (trial)
            trial_free(trial);
        (void)snprintf(error, error_len, "%.300s: %s", where->url, kvt_strerror(-ENOMEM));
        return -ENOMEM;
    }
    if (!trial_wait(trial, answer_ns + SLACK_NS + (write ? 3 * ANSWER_NS : 0))) {
        (void)pthread_detach(thread);
        (void)snprintf(error, error_len,
                       "%.300s: nothing is heard of it: does its name resolve (getent hosts)? Of a "
                       "directory: is its file server there?",
                       where->url);
        return -ETIMEDOUT;
    }
    (void)pthread_join(thread, NULL);
    int rc = trial->rc;
    *out = trial->out;
    (void)snprintf(error, error_len, "%s", trial->error);
    trial_free(trial);
    return rc;
}
