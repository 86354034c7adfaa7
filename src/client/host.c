/* The store half in this process: opening in order, closing backwards. See host.h.
 *
 * Threads: open and close from one thread. The owner thread and the retry thread live in between.
 */
#include "client/host.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"

#define CLOSE_TIMEOUT_NS INT64_C(30000000000)

static void store_params(struct kvt_host *host, struct kvt_store_params *params,
                         uint32_t numbers[KVT_DISKS_MAX])
{
    const struct kvt_settings *settings = host->settings;
    memset(params, 0, sizeof(*params));
    params->arena = host->memory.arena;
    params->arena_bytes = host->memory.arena_bytes;
    params->staging_bytes = KVT_MIN(settings->staging, host->memory.arena_bytes);
    params->write_queue_bytes = settings->write_queue;
    params->write = settings->write;
    params->admit = settings->admission;
    params->ttl_ns = settings->ttl == KVT_AUTO ? 0 : (int64_t)settings->ttl;
    params->ns_bytes_max = settings->ns_quota == KVT_AUTO ? 0 : settings->ns_quota;
    params->ns_rules = settings->ns_limits;
    params->ns_rule_count = settings->ns_limit_count;
    params->token_s = 1 / (double)settings->plan_prefill;
    params->byte_s = 1 / (double)settings->plan_disk;
    params->pin_bytes_max = settings->pin_max;
    /* Clients of a daemon may be stopped while they hold slots: a quarter each. */
    params->client_bytes_max = host->shared ? host->memory.arena_bytes / 4 : 0;
    /* One that breaks the protocol and lives on keeps what it was filling: no more than it needs.
     */
    params->client_fill_max =
        host->shared ? KVT_MIN(host->memory.arena_bytes / 8, KVT_GPU_ALLOC_WINDOW) : 0;
    params->scrub_bytes_per_s = settings->scrub == KVT_AUTO ? 0 : settings->scrub;
    params->remote = host->remote;
    params->remote_deadline_ns = (int64_t)settings->remote_deadline;
    if (host->shared) /* clients that hear nothing for two seconds ask whether it lives */
        params->remote_deadline_ns =
            KVT_MIN(params->remote_deadline_ns, KVT_HOST_REMOTE_DEADLINE_NS);
    params->remote_queue_bytes = settings->remote_queue;
    params->remote_write = settings->remote_write;
    params->seed = kvt_rng_seed_os();
    params->clock = host->clock;
    params->wall = kvt_clock_wall();
    params->log = host->log;
    params->reply = kvt_owner_reply;
    params->reply_ctx = host->owner;
    params->stats_lines = host->stats_lines;
    params->stats_ctx = host->stats_ctx;
    params->chances = host->chances_known ? &host->chances : NULL;
    params->admission_kept = kvt_admission_kept;
    params->admission_ctx = host;
    for (uint32_t i = 0; i < settings->disk_count; i++) {
        params->roots_pending += host->roots[i].waiting;
        if (host->roots[i].io == NULL)
            continue;
        host->roots[i].number = (int)params->root_count;
        numbers[params->root_count] = i;
        params->roots[params->root_count].io = host->roots[i].io;
        params->roots[params->root_count].cap_bytes = host->roots[i].cap_bytes;
        params->roots[params->root_count].name = host->roots[i].path;
        params->roots[params->root_count].files_max = kvt_settings_files(settings);
        params->roots[params->root_count].write_bytes_day =
            kvt_settings_root_writes(settings, host->roots[i].cap_bytes);
        params->roots[params->root_count].write_left_known = host->roots[i].write_left_known;
        params->roots[params->root_count].write_left = host->roots[i].write_left;
        params->root_count++;
    }
    if (params->root_count == 0)
        params->no_root_status = kvt_roots_missing(host);
}

/* Open the store; a root whose log cannot be opened is left out, unless it is required. */
static int store_open(struct kvt_host *host, char *error, size_t error_len)
{
    struct kvt_store_params params;
    struct kvt_store *store;
    uint32_t numbers[KVT_DISKS_MAX], bad;
    int rc;
    for (;;) {
        bad = UINT32_MAX;
        store_params(host, &params, numbers);
        rc = kvt_store_open(&params, &store, &bad);
        if (rc == 0 || bad >= params.root_count)
            break;
        kvt_roots_drop(host, numbers[bad], rc, 0);
        if (host->settings->disk_required) {
            (void)snprintf(error, error_len, "%s", host->roots[numbers[bad]].state);
            return rc;
        }
        kvt_log(&host->log, KVT_LOG_WARN, "%s (going on without it)",
                host->roots[numbers[bad]].state);
    }
    host->roots_used = params.root_count;
    if (rc == 0) {
        rc = kvt_owner_start(host->owner, store, &params);
        if (rc != 0)
            kvt_store_close(store, 0);
    }
    return rc;
}

int kvt_host_init(struct kvt_host *host, char *error, size_t error_len)
{
    pthread_condattr_t attr;
    host->memory.fd = -1;
    int rc = -pthread_mutex_init(&host->lock, NULL);
    if (rc != 0)
        return rc;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&host->again, &attr);
    pthread_condattr_destroy(&attr);
    host->ready = true;
    return kvt_arena_map(host->settings, host->shared, &host->memory, error, error_len);
}

static const char *file_or_null(const char *path)
{
    return path[0] ? path : NULL;
}

static int remote_open(const struct kvt_host *host, bool look, struct kvt_remote **out, char *error,
                       size_t error_len)
{
    const struct kvt_settings *settings = host->settings;
    const struct kvt_remote_params params = {
        .look = look,
        .where = settings->remote,
        .auth_file = file_or_null(settings->remote_auth),
        .mac_file = file_or_null(settings->remote_mac),
        .ca_file = file_or_null(settings->remote_ca),
        .cap_bytes = settings->remote_cap == KVT_AUTO ? 0 : settings->remote_cap,
        .ns_cap_bytes = settings->remote_ns_cap == KVT_AUTO ? 0 : settings->remote_ns_cap,
        .ttl_ns = settings->remote_ttl == KVT_AUTO ? 0 : (int64_t)settings->remote_ttl,
        .log = host->log};
    kvt_remote_unused_tell(settings, host->shared, &host->log);
    if (!settings->remote[0])
        return 0;
    return kvt_remote_tier_open(&params, out, error, error_len);
}

int kvt_host_remote_look(const struct kvt_host *host, char *error, size_t error_len)
{
    struct kvt_remote *none = NULL;
    return remote_open(host, true, &none, error, error_len);
}

int kvt_host_open(struct kvt_host *host, char *error, size_t error_len)
{
    kvt_quota_unused_tell(host->settings, &host->log);
    int rc = kvt_roots_open(host, error, error_len);
    for (uint32_t i = 0; rc == 0 && i < host->settings->disk_count; i++)
        if (host->roots[i].io != NULL)
            kvt_admission_file_read(host, i, &host->roots[i]);
    if (rc == 0)
        rc = remote_open(host, false, &host->remote, error, error_len);
    if (rc == 0)
        rc = kvt_owner_new(&host->owner);
    if (rc == 0)
        rc = store_open(host, error, error_len);
    for (uint32_t i = 0; rc == 0 && i < host->settings->disk_count; i++)
        if (host->roots[i].io != NULL)
            kvt_admission_file_mark(host, i);
    if (rc == 0)
        rc = kvt_roots_retry_start(host);
    if (rc == 0)
        kvt_huge_start(host);
    return rc;
}

void kvt_host_close(struct kvt_host *host)
{
    if (!host->ready)
        return;
    kvt_roots_retry_stop(host);
    kvt_huge_stop(host);
    kvt_owner_stop(host->owner, CLOSE_TIMEOUT_NS);
    host->owner = NULL;
    kvt_admission_files_write(host);
    if (host->remote != NULL)
        host->remote->ops->destroy(host->remote);
    host->remote = NULL;
    kvt_roots_close(host);
}

void kvt_host_free(struct kvt_host *host)
{
    if (!host->ready)
        return;
    kvt_arena_unmap(&host->memory);
    pthread_cond_destroy(&host->again);
    pthread_mutex_destroy(&host->lock);
    host->ready = false;
}
