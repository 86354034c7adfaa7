/* Configuration: making, copying and listing one, KVTIER_CONFIG, and what "auto" comes to.
 *
 * The options themselves are in options.c. Threads: one at a time per config. Reads the environment
 * only in kvt_config_apply_env().
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/checked.h"
#include "client/host.h"
#include "client/options.h"
#include "store/owner.h"

#define UNIX_PREFIX "unix:"
#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define TTL_MIN_NS UINT64_C(1000000000)
#define STAGING_AUTO_MAX (64 * MIB)
#define WRITE_QUEUE_AUTO_MAX (256 * MIB)
#define THREADS_AUTO_MAX 4u
#define CACHE_FDS 8u   /* of a cache itself: what wakes its threads and its user */
#define FILES_AUTO 64u /* segments of a root kept open, unless fds_max says otherwise */

int kvt_config_new(struct kvt_config **out)
{
    if (out == NULL)
        return KVT_E_INVAL;
    struct kvt_config *config = calloc(1, sizeof(*config));
    if (config == NULL)
        return -ENOMEM;
    const struct kvt_option *option;
    for (size_t i = 0; (option = kvt_option_at(i)) != NULL; i++) {
        int rc = kvt_option_set(config, option, option->fallback);
        if (rc != 0) {
            kvt_config_free(config);
            return rc;
        }
    }
    *out = config;
    return 0;
}

void kvt_config_free(struct kvt_config *config)
{
    if (config == NULL)
        return;
    kvt_settings_forget_disks(&config->settings);
    free(config);
}

int kvt_config_set(struct kvt_config *config, const char *key, const char *value)
{
    if (config == NULL || key == NULL || value == NULL)
        return KVT_E_INVAL;
    config->error[0] = '\0';
    const struct kvt_option *option = kvt_option_find(config, key);
    return option == NULL ? KVT_E_CONFIG_KEY : kvt_option_set(config, option, value);
}

/* Cut blanks at both ends of text[0..*len). Returns its new start. */
static const char *trim(const char *text, size_t *len)
{
    static const char blanks[] = " \t\r\n";
    while (*len > 0 && strchr(blanks, text[0]) != NULL) {
        text++;
        --*len;
    }
    while (*len > 0 && strchr(blanks, text[*len - 1]) != NULL)
        --*len;
    return text;
}

static int refuse_pair(struct kvt_config *config, const char *pair)
{
    char word[64] = "";
    const char *nearest = NULL;
    if (sscanf(pair, "%63[a-z_]", word) == 1)
        nearest = kvt_option_nearest(word);
    return kvt_config_refuse(
        config, KVT_E_CONFIG_VALUE, "\"%.64s\" is not of the form key=value%s%s%s", pair,
        nearest ? "; did you mean \"" : "", nearest ? nearest : "", nearest ? "=...\"?" : "");
}

static int set_pair(struct kvt_config *config, const char *text, size_t len)
{
    char pair[PATH_MAX + 128];
    text = trim(text, &len);
    if (len == 0) /* nothing between two commas, or after the last */
        return 0;
    if (len >= sizeof(pair))
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE, "an option is longer than %zu bytes",
                                 sizeof(pair) - 1);
    memcpy(pair, text, len);
    pair[len] = '\0';
    if (strncmp(pair, UNIX_PREFIX, strlen(UNIX_PREFIX)) == 0) /* the socket of a kvtierd, alone */
        return kvt_config_set(config, "store", pair);
    char *equals = strchr(pair, '=');
    if (equals == NULL)
        return refuse_pair(config, pair);
    size_t key_len = (size_t)(equals - pair), value_len = strlen(equals + 1);
    const char *value = trim(equals + 1, &value_len); /* its end has been cut already */
    (void)trim(pair, &key_len);
    pair[key_len] = '\0';
    return kvt_config_set(config, pair, value);
}

int kvt_config_set_all(struct kvt_config *config, const char *text)
{
    if (config == NULL || text == NULL)
        return KVT_E_INVAL;
    config->error[0] = '\0';
    while (*text != '\0') {
        size_t len = strcspn(text, ",");
        int rc = set_pair(config, text, len);
        if (rc != 0)
            return rc;
        text += len;
        if (*text == ',')
            text++;
    }
    return 0;
}

const char *kvt_config_error(const struct kvt_config *config)
{
    return config == NULL ? "" : config->error;
}

void kvt_config_log(struct kvt_config *config, kvt_log_fn fn, void *arg)
{
    config->log_fn = fn;
    config->log_arg = arg;
}

void kvt_config_each(const struct kvt_config *config, kvt_config_each_fn fn, void *arg)
{
    size_t len = KVT_DISKS_MAX * (PATH_MAX + 32);
    char *buffer = malloc(len);
    char small[256];
    const struct kvt_option *option;
    for (size_t i = 0; (option = kvt_option_at(i)) != NULL; i++) {
        const char *text = kvt_option_text(&config->settings, option, buffer ? buffer : small,
                                           buffer ? len : sizeof(small));
        fn(arg, option->key, text, option->fallback, option->help);
    }
    free(buffer);
}

int kvt_config_copy(const struct kvt_config *config, struct kvt_config **out)
{
    struct kvt_config *copy = malloc(sizeof(*copy));
    if (copy == NULL)
        return -ENOMEM;
    *copy = *config;
    copy->settings.disk_count = 0;
    for (uint32_t i = 0; i < config->settings.disk_count; i++) {
        char *path = strdup(config->settings.disks[i].path);
        if (path == NULL) {
            kvt_config_free(copy);
            return -ENOMEM;
        }
        copy->settings.disks[i].path = path;
        copy->settings.disk_count++;
    }
    *out = copy;
    return 0;
}

int kvt_config_apply_env(struct kvt_config *config, int *applied)
{
    /* Not for a privileged program: the environment is another user's. */
    const char *text = secure_getenv(KVT_CONFIG_ENV);
    *applied = 0;
    if (!config->settings.env || text == NULL || text[0] == '\0')
        return 0;
    int rc = kvt_config_set_all(config, text);
    *applied = rc == 0;
    if (rc != 0) {
        char sentence[sizeof(config->error)];
        (void)snprintf(sentence, sizeof(sentence), "%s", config->error);
        return kvt_config_refuse(config, rc, "in the environment variable %s: %.400s",
                                 KVT_CONFIG_ENV, sentence);
    }
    return 0;
}

static uint64_t usable_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0)
        return 1;
    int count = CPU_COUNT(&set);
    return count > 0 ? (uint64_t)count : 1;
}

/* Descriptors that roots with so many segments open take, the cache's own included. */
static uint64_t fds_for(const struct kvt_settings *s, uint64_t files)
{
    return CACHE_FDS + s->disk_count * (files + KVT_STORE_ROOT_FDS_OTHER) +
           (s->gds != KVT_PIN_SET_OFF ? KVT_GDS_FILES : 0);
}

uint64_t kvt_settings_root_writes(const struct kvt_settings *s, uint64_t cap_bytes)
{
    uint64_t bytes = s->write_budget == KVT_AUTO ? 0 : s->write_budget;
    if (s->write_dwpd == KVT_AUTO)
        return bytes;
    uint64_t share = KVT_MAX(cap_bytes / 100 * s->write_dwpd, 1u); /* within 2^63: limits of both */
    return bytes == 0 ? share : KVT_MIN(bytes, share);
}

uint32_t kvt_settings_files(const struct kvt_settings *s)
{
    uint64_t least = fds_for(s, 0), rest = s->fds_max > least ? s->fds_max - least : 0;
    return (uint32_t)KVT_MIN(rest / KVT_MAX(s->disk_count, 1u), (uint64_t)KVT_STORE_ROOT_FILES_MAX);
}

/* 0 or KVT_E_CONFIG_VALUE. Fewer than the roots need cannot be kept; "auto" takes them anyway. */
static int resolve_fds(struct kvt_config *config)
{
    struct kvt_settings *s = &config->settings;
    uint64_t least = fds_for(s, KVT_STORE_ROOT_FILES_MIN);
    struct rlimit limit = {.rlim_cur = RLIM_INFINITY};
    if (s->fds_max == KVT_AUTO) {
        (void)getrlimit(RLIMIT_NOFILE, &limit);
        s->fds_max = KVT_MAX(least, KVT_MIN(fds_for(s, FILES_AUTO), (uint64_t)limit.rlim_cur / 2));
    }
    if (s->fds_max < least)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "fds_max: %" PRIu64 " are too few for %" PRIu32
                                 " disk roots: they need %" PRIu64,
                                 s->fds_max, s->disk_count, least);
    return 0;
}

int kvt_settings_resolve(struct kvt_config *config)
{
    struct kvt_settings *s = &config->settings;
    char dram[32], staging[32];
    if (s->dram_share != KVT_AUTO)
        s->dram = kvt_memory_share(kvt_memory_allowed(), s->dram_share, s->ranks);
    if (s->threads == KVT_AUTO)
        s->threads = KVT_MIN(usable_cpus(), THREADS_AUTO_MAX);
    if (s->staging == KVT_AUTO && s->dram == 0)
        s->staging = STAGING_AUTO_MAX;
    else if (s->staging == KVT_AUTO)
        s->staging = KVT_MIN(s->dram / 8, STAGING_AUTO_MAX);
    if (s->dram != 0 && s->dram < 64 * KIB)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "dram: %s is out of range: 0, or 64KiB and more",
                                 kvt_size_text(s->dram, dram, sizeof(dram)));
    if (s->dram != 0 && s->staging > s->dram)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "staging: %s is more than dram (%s), of which it is a part",
                                 kvt_size_text(s->staging, staging, sizeof(staging)),
                                 kvt_size_text(s->dram, dram, sizeof(dram)));
    if (s->ttl != KVT_AUTO && s->ttl < TTL_MIN_NS)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "ttl: it is less than a second; give it 1s or more, or none");
    uint64_t arena = s->dram != 0 ? s->dram : s->staging;
    if (s->write_queue == KVT_AUTO)
        s->write_queue = KVT_MIN(arena / 2, WRITE_QUEUE_AUTO_MAX);
    if (s->pin_max == KVT_AUTO)
        s->pin_max = s->dram / 2;
    return resolve_fds(config);
}
