/* Signals of a kvtierd: see kvtierd_reload.h. A key that was given, now or at the start, and has
 * another value is named; what the library derives from others, as the length of a queue from
 * "dram", is nobody's to be told of.
 * Threads: the one that waits for signals.
 */
#include "kvtierd_reload.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "daemon/notify.h"

struct differ {       /* keys of a new configuration whose values are other ones */
    char *values[64]; /* in the order of the keys */
    size_t count, at;
    const struct kvt_conf *before, *now;
    struct kvt_log log;
};

static void keep_value(void *arg, const char *key, const char *value, const char *fallback,
                       const char *help, int reload)
{
    struct differ *differ = arg;
    (void)key;
    (void)fallback;
    (void)help;
    (void)reload;
    if (differ->count == KVT_ARRAY_LEN(differ->values))
        return;
    differ->values[differ->count++] = strdup(value);
}

static void compare_value(void *arg, const char *key, const char *value, const char *fallback,
                          const char *help, int reload)
{
    struct differ *differ = arg;
    size_t i = differ->at++;
    (void)fallback;
    (void)help;
    if (i >= differ->count || differ->values[i] == NULL || strcmp(differ->values[i], value) == 0)
        return;
    if (!kvt_conf_given(differ->before, key) && !kvt_conf_given(differ->now, key))
        return; /* it follows another one, which is named */
    if (reload)
        kvt_log(&differ->log, KVT_LOG_INFO, "reload: %s is now %s", key, value);
    else
        kvt_log(&differ->log, KVT_LOG_WARN,
                "reload: %s = %s takes a restart; %s stays in force until then", key, value,
                differ->values[i]);
}

static void reload(struct kvt_daemon_signals *signals)
{
    struct kvt_conf fresh;
    struct differ differ = {.before = signals->conf, .now = &fresh, .log = signals->log};
    char why[512] = "";
    kvt_notify("RELOADING=1");
    if (kvt_conf_new(&fresh) != 0) {
        kvt_notify("READY=1");
        return;
    }
    if (kvt_daemon_conf(signals->args, &fresh, why, sizeof(why)) != 0) {
        kvt_log(&signals->log, KVT_LOG_ERROR, "reload: %s (nothing was changed)", why);
    } else {
        kvt_conf_each(signals->conf, keep_value, &differ);
        kvt_conf_each(&fresh, compare_value, &differ);
        atomic_store_explicit(&signals->out->level, fresh.log_level, memory_order_relaxed);
        kvt_server_allow(signals->server, fresh.uids, fresh.uid_count);
        signals->conf->log_level = fresh.log_level;
        memcpy(signals->conf->uids, fresh.uids, sizeof(fresh.uids));
        signals->conf->uid_count = fresh.uid_count;
        signals->conf->given |= fresh.given;
        kvt_log(&signals->log, KVT_LOG_INFO, "reload: done");
    }
    for (size_t i = 0; i < differ.count; i++)
        free(differ.values[i]);
    kvt_conf_free(&fresh);
    kvt_notify("READY=1");
}

void *kvt_daemon_signals(void *arg)
{
    struct kvt_daemon_signals *signals = arg;
    sigset_t set;
    int number;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGUSR2); /* our own: the main thread is done */
    while (sigwait(&set, &number) == 0 && !atomic_load(&signals->over)) {
        if (number == SIGHUP) {
            reload(signals);
        } else if (number != SIGUSR2) {
            kvt_log(&signals->log, KVT_LOG_INFO, "signal %d: closing", number);
            kvt_notify("STOPPING=1");
            kvt_server_stop(signals->server);
        }
    }
    return NULL;
}
