/* Quotas that cannot come into force, since something smaller holds: one warning each, naming both.
 * Nobody should find out by measuring. Pure but for the log. */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/log.h"
#include "client/host.h"
#include "client/options.h"

/* DRAM and the caps of all roots; a block may be in both. */
static uint64_t all_bytes(const struct kvt_settings *settings)
{
    uint64_t bytes = settings->dram;
    for (uint32_t i = 0; i < settings->disk_count; i++)
        if (!kvt_add_ok(bytes, settings->disks[i].cap_bytes, &bytes))
            return UINT64_MAX;
    return bytes;
}

/* "ns_limit of NAME" */
static void rule_name(const struct kvt_ns_rule *rule, char *text, size_t len)
{
    int used = snprintf(text, len, "ns_limit of %s", rule->by_id ? "" : rule->label);
    for (size_t i = 0; rule->by_id && i < KVT_NS_BYTES && used > 0; i++)
        used += snprintf(text + used, len - (size_t)used, "%02x", rule->id[i]);
}

static void tell(const struct kvt_log *log, const char *name, uint64_t bytes, const char *other,
                 uint64_t other_bytes)
{
    char mine[32], theirs[32];
    kvt_log(log, KVT_LOG_WARN, "%s: a quota of %s has no effect: %s of %s is smaller, and holds",
            name, kvt_size_text(bytes, mine, sizeof(mine)), other,
            kvt_size_text(other_bytes, theirs, sizeof(theirs)));
}

void kvt_quota_unused_tell(const struct kvt_settings *settings, const struct kvt_log *log)
{
    static const char everything[] = "all there is (dram and the caps of the disks)";
    const uint64_t all = all_bytes(settings), quota = settings->ns_quota;
    char name[128];
    if (quota != KVT_AUTO && quota > all)
        tell(log, "ns_quota", quota, everything, all);
    for (uint32_t i = 0; i < settings->ns_limit_count; i++) {
        const struct kvt_ns_rule *rule = &settings->ns_limits[i];
        rule_name(rule, name, sizeof(name));
        if (rule->quota_bytes > quota && quota <= all)
            tell(log, name, rule->quota_bytes, "ns_quota", quota);
        else if (rule->quota_bytes > all)
            tell(log, name, rule->quota_bytes, everything, all);
    }
}
