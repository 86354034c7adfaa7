/* The option ns_limit: what single namespaces may have, as text and as rules of the store.
 * Threads: one at a time per config. Which namespaces there are is not known here.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/parse.h"
#include "client/options.h"
#include "format/message.h"

#define NONE "none"

/* 32 hexadecimal digits are an id; anything else is a model's name. */
static bool take_id(const char *name, size_t len, uint8_t id[KVT_NS_BYTES])
{
    if (len != 2 * KVT_NS_BYTES)
        return false;
    for (size_t i = 0; i < len; i++) {
        const char *digits = "0123456789abcdef0123456789ABCDEF", *at = strchr(digits, name[i]);
        if (at == NULL)
            return false;
        unsigned value = (unsigned)(at - digits) % 16;
        id[i / 2] = (uint8_t)(i % 2 ? id[i / 2] | value : value << 4);
    }
    return true;
}

static int refuse(struct kvt_config *config, const char *value, const char *why)
{
    return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                             "ns_limit: \"%.200s\" %s: write \"NAME:QUOTA:TTL\", as "
                             "\"my-model:50GiB:7d\" or \"my-model:50GiB:none\"",
                             value, why);
}

/* The two fields behind the name. 0 or the refusal. */
static int take_limits(struct kvt_config *config, const char *value, const char *quota,
                       const char *ttl, struct kvt_ns_rule *rule)
{
    if (strcmp(quota, NONE) != 0 &&
        (kvt_parse_size(quota, &rule->quota_bytes) != 0 || rule->quota_bytes < KVT_QUOTA_MIN ||
         rule->quota_bytes > INT64_MAX))
        return refuse(config, value, "has no quota of 64KiB or more, nor none, in its middle");
    if (strcmp(ttl, NONE) != 0 &&
        (kvt_parse_duration(ttl, &rule->ttl_ns) != 0 || rule->ttl_ns < KVT_TTL_MIN_NS))
        return refuse(config, value, "has no time to live of 1s or more, nor none, at its end");
    if (rule->quota_bytes == 0 && rule->ttl_ns == 0)
        return refuse(config, value, "says nothing");
    return 0;
}

static bool same_name(const struct kvt_ns_rule *a, const struct kvt_ns_rule *b)
{
    if (a->by_id != b->by_id)
        return false;
    return a->by_id ? memcmp(a->id, b->id, sizeof(a->id)) == 0 : strcmp(a->label, b->label) == 0;
}

int kvt_limits_set(struct kvt_config *config, const char *value)
{
    struct kvt_settings *settings = &config->settings;
    struct kvt_ns_rule rule = {.by_id = false};
    char text[256];
    uint32_t at = 0;
    if (strcmp(value, NONE) == 0) {
        settings->ns_limit_count = 0;
        return 0;
    }
    if (strlen(value) >= sizeof(text))
        return refuse(config, value, "is too long");
    memcpy(text, value, strlen(value) + 1);
    char *ttl = strrchr(text, ':');
    if (ttl != NULL)
        *ttl++ = '\0';
    char *quota = ttl != NULL ? strrchr(text, ':') : NULL;
    if (quota == NULL)
        return refuse(config, value, "does not have two colons");
    *quota++ = '\0';
    size_t len = strlen(text);
    if (len == 0 || len >= sizeof(rule.label))
        return refuse(config, value, "has no name of 1 to 63 bytes");
    rule.by_id = take_id(text, len, rule.id);
    if (!rule.by_id)
        memcpy(rule.label, text, len + 1);
    int rc = take_limits(config, value, quota, ttl, &rule);
    if (rc != 0)
        return rc;
    while (at < settings->ns_limit_count && !same_name(&settings->ns_limits[at], &rule))
        at++;
    if (at == KVT_NS_RULES_MAX)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE, "ns_limit: at most %u namespaces",
                                 KVT_NS_RULES_MAX);
    settings->ns_limits[at] = rule;
    settings->ns_limit_count = KVT_MAX(settings->ns_limit_count, at + 1);
    return 0;
}

const char *kvt_limits_text(const struct kvt_settings *settings, char *buffer, size_t len)
{
    size_t used = 0;
    (void)snprintf(buffer, len, NONE);
    for (uint32_t i = 0; i < settings->ns_limit_count && used < len; i++) {
        const struct kvt_ns_rule *rule = &settings->ns_limits[i];
        char id[2 * KVT_NS_BYTES + 1] = "", quota[32] = NONE, ttl[32] = NONE;
        for (size_t byte = 0; byte < KVT_NS_BYTES && rule->by_id; byte++)
            (void)snprintf(id + 2 * byte, 3, "%02x", rule->id[byte]);
        if (rule->quota_bytes != 0)
            (void)kvt_size_text(rule->quota_bytes, quota, sizeof(quota));
        if (rule->ttl_ns != 0)
            (void)kvt_duration_text((uint64_t)rule->ttl_ns, ttl, sizeof(ttl));
        int n = snprintf(buffer + used, len - used, "%s%s:%s:%s", i ? "," : "",
                         rule->by_id ? id : rule->label, quota, ttl);
        used += n > 0 ? (size_t)n : 0;
    }
    return buffer;
}
