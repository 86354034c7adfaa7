/* kvtierd --check: looks at memory, the socket's place, the roots, the files of the shared tier,
 * descriptors and the address for scrapers, by the steps of the start, as far as they change
 * nothing, and with its sentences.
 *
 * A kvtierd that runs with the same configuration is no problem: what it holds is told as a note.
 * A server that machines share is asked for a record, and nothing is put there ('kvtier doctor
 * --config remote=...' does that); --offline: it is not. Threads: one, and the shared tier's.
 */
#include "kvtierd_check.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "client/host.h"
#include "client/pin.h"
#include "daemon/listen.h"
#include "daemon/metrics.h"
#include "kvtier/error.h"
#include "remote_tool.h"
#include "root_check.h"

/* Descriptors of a client: its socket, its end, its rings and the two bells; and our own: log,
 * sockets, bells, spares, scrapers, the shared tier. */
enum { FDS_A_CLIENT = 5, FDS_OWN = 28 };

struct check {
    kvt_daemon_tell_fn tell;
    const struct kvt_log *log;
    unsigned problems;
    bool runs; /* somebody listens at the socket */
};

static void problem(struct check *check, const char *sentence)
{
    check->problems++;
    check->tell(true, sentence);
}

/* The arena is mapped, and not touched; locked, where it must be, as far as the limit goes. */
static void check_memory(struct check *check, const struct kvt_conf *conf)
{
    struct kvt_host host = {.settings = &conf->options->settings, .shared = true};
    char error[512] = "", why[400], text[480];
    int rc = kvt_host_init(&host, error, sizeof(error));
    if (rc != 0)
        problem(check, error[0] ? error : kvt_strerror(rc));
    if (rc == 0 && host.settings->pin == KVT_PIN_SET_REQUIRED) {
        rc = mlock2(host.memory.arena, host.memory.arena_bytes, MLOCK_ONFAULT) == 0 ? 0 : -errno;
        if (rc == -EPERM || rc == -ENOMEM || rc == -EAGAIN) {
            kvt_pin_describe(kvt_pin_host_ops()->name, host.memory.arena_bytes, rc, why,
                             sizeof(why));
            (void)snprintf(text, sizeof(text), "pin=required: %s; or set pin=auto", why);
            problem(check, text);
        }
    }
    kvt_host_free(&host);
}

static void check_socket(struct check *check, const struct kvt_conf *conf)
{
    char error[512], text[640];
    int rc = kvt_listen_check(conf->socket, error, sizeof(error));
    check->runs = rc == KVT_E_LOCKED;
    if (check->runs) {
        (void)snprintf(text, sizeof(text),
                       "somebody listens at %s now, a kvtierd or systemd for it: another one can "
                       "start there when it has ended",
                       conf->socket);
        check->tell(false, text);
    } else if (rc != 0) {
        problem(check, error);
    }
}

static void check_roots(struct check *check, const struct kvt_conf *conf)
{
    const struct kvt_settings *settings = &conf->options->settings;
    char why[KVT_ROOT_WHY_MAX], text[640];
    struct kvt_root_room room;
    for (uint32_t i = 0; i < settings->disk_count; i++) {
        int rc = kvt_root_check(settings->disks[i].path, why);
        if (rc == KVT_E_LOCKED)
            check->tell(false, why); /* by the one that runs, or taken over when it is let go of */
        else if (rc < 0)
            problem(check, why);
        if ((rc >= 0 || rc == KVT_E_LOCKED) &&
            kvt_root_room(settings->disks[i].path, settings->disks[i].cap_bytes, &room) == 0 &&
            kvt_root_room_short(&room, settings->disks[i].path, text, sizeof(text)))
            check->tell(false, text); /* it would start, and say so */
    }
}

static void check_metrics(struct check *check, const struct kvt_conf *conf)
{
    char error[512];
    if (conf->metrics[0] == '\0')
        return;
    int rc = kvt_metrics_check(conf->metrics, error, sizeof(error));
    if (rc == -EADDRINUSE && check->runs)
        check->tell(false, error);
    else if (rc != 0)
        problem(check, error);
}

static const char *or_null(const char *path)
{
    return path[0] ? path : NULL;
}

/* What answers there: the start would go on without it. */
static void check_server(struct check *check, const struct kvt_settings *settings)
{
    const struct kvt_remote_where where = {.url = settings->remote,
                                           .auth_file = or_null(settings->remote_auth),
                                           .mac_file = or_null(settings->remote_mac),
                                           .ca_file = or_null(settings->remote_ca)};
    struct kvt_remote_trial trial;
    char error[1200], text[800];
    if (kvt_remote_try(&where, 0, kvt_remote_patience(settings->remote_deadline), &trial, error,
                       sizeof(error)) != 0) {
        problem(check, error);
        return;
    }
    (void)snprintf(text, sizeof(text), "remote: %.300s answers: %s", settings->remote,
                   trial.about[0] ? trial.about : "it does not tell what it is (INFO)");
    check->tell(false, text);
}

static void check_remote(struct check *check, const struct kvt_conf *conf, bool offline)
{
    const struct kvt_host host = {
        .settings = &conf->options->settings, .shared = true, .log = *check->log};
    char error[512] = "";
    int rc = kvt_host_remote_look(&host, error, sizeof(error));
    if (rc != 0)
        problem(check, error[0] ? error : kvt_strerror(rc));
    else if (host.settings->remote[0] && strncmp(host.settings->remote, "dir:", 4) != 0 && !offline)
        check_server(check, host.settings);
}

bool kvt_daemon_descriptors(const struct kvt_settings *settings, uint64_t *programs, char *text,
                            size_t len)
{
    const uint64_t places = KVT_OWNER_CLIENTS_MAX - 1;
    const uint64_t taken = FDS_OWN + settings->fds_max;
    const uint64_t needed = taken + places * FDS_A_CLIENT;
    struct rlimit limit;
    *programs = places;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed)
        return true;
    *programs = limit.rlim_cur > taken ? (limit.rlim_cur - taken) / FDS_A_CLIENT : 0;
    (void)snprintf(text, len,
                   "descriptors: %llu of %llu programs can be connected at the limit of %llu, %llu "
                   "of which are for us and the disk roots (fds_max): raise it to %llu "
                   "(LimitNOFILE= of the unit, ulimit -Hn)",
                   (unsigned long long)*programs, (unsigned long long)places,
                   (unsigned long long)limit.rlim_cur, (unsigned long long)taken,
                   (unsigned long long)needed);
    return false;
}

static void check_descriptors(struct check *check, const struct kvt_conf *conf)
{
    char text[400];
    uint64_t programs;
    if (kvt_daemon_descriptors(&conf->options->settings, &programs, text, sizeof(text)))
        return;
    if (programs == 0)
        problem(check, text);
    else
        check->tell(false, text);
}

unsigned kvt_daemon_check(const struct kvt_conf *conf, const struct kvt_log *log, bool offline,
                          kvt_daemon_tell_fn tell)
{
    struct check check = {.tell = tell, .log = log};
    check_memory(&check, conf);
    kvt_quota_unused_tell(&conf->options->settings, log);
    check_socket(&check, conf);
    check_roots(&check, conf);
    check_remote(&check, conf, offline);
    check_descriptors(&check, conf);
    check_metrics(&check, conf);
    return check.problems;
}
