/* Options of the shared tier that are set and have no effect where they are: one warning each, with
 * where they belong. Nobody should find out by measuring. Pure but for the log. */
#include <string.h>

#include "base/log.h"
#include "client/host.h"

static bool is_directory(const struct kvt_settings *settings)
{
    return strncmp(settings->remote, "dir:", 4) == 0;
}

/* Why an option that is set does nothing here; NULL: it does, or is not set. */
typedef const char *(*unused_fn)(const struct kvt_settings *settings);

static const char *auth_unused(const struct kvt_settings *settings)
{
    if (!settings->remote_auth[0] || !is_directory(settings))
        return NULL;
    return "a shared directory has no password: its permissions say who may";
}

static const char *ca_unused(const struct kvt_settings *settings)
{
    if (!settings->remote_ca[0] || strncmp(settings->remote, "rediss://", 9) == 0)
        return NULL;
    return "it is for TLS: write rediss://";
}

static const char *cap_unused(const struct kvt_settings *settings)
{
    if (settings->remote_cap == KVT_AUTO || is_directory(settings))
        return NULL;
    return "it is for shared directories (dir:/path): give the server maxmemory";
}

/* Whether anything is set that is for a shared tier only. */
static const char *any_set(const struct kvt_settings *settings)
{
    return settings->remote_auth[0]              ? "remote_auth"
           : settings->remote_mac[0]             ? "remote_mac"
           : settings->remote_ca[0]              ? "remote_ca"
           : settings->remote_cap != KVT_AUTO    ? "remote_cap"
           : settings->remote_ns_cap != KVT_AUTO ? "remote_ns_cap"
           : settings->remote_ttl != KVT_AUTO    ? "remote_ttl"
                                                 : NULL;
}

void kvt_remote_unused_tell(const struct kvt_settings *settings, bool shared,
                            const struct kvt_log *log)
{
    static const struct {
        const char *key;
        unused_fn why;
    } options[] = {
        {"remote_auth", auth_unused}, {"remote_ca", ca_unused}, {"remote_cap", cap_unused}};
    const char *set = any_set(settings);

    if (!settings->remote[0]) {
        if (set)
            kvt_log(log, KVT_LOG_WARN, "%s has no effect: remote is not set", set);
        return;
    }
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        const char *why = options[i].why(settings);

        if (why)
            kvt_log(log, KVT_LOG_WARN, "%s has no effect: %s", options[i].key, why);
    }
    if (shared && settings->remote_deadline > KVT_HOST_REMOTE_DEADLINE_NS)
        kvt_log(log, KVT_LOG_WARN,
                "remote_deadline: one second is used, the most in kvtierd: programs that "
                "hear nothing for two ask whether it lives");
}

void kvt_remote_elsewhere_tell(const struct kvt_settings *settings, const struct kvt_log *log)
{
    const char *set = settings->remote[0] ? "remote" : any_set(settings);

    if (set)
        kvt_log(log, KVT_LOG_WARN,
                "store=unix:%s: the shared tier is the kvtierd's, and %s has no effect here: give "
                "it to kvtierd",
                settings->socket, set);
}
