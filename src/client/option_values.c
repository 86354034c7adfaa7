/* Values of options: strict parsing of text, values as text, sentences for what is refused. The
 * table is in options.c.
 *
 * What one direction writes the other reads: both know the same words. Defaults go through the same
 * parser as the user's text. A refused value changes nothing. Threads: one at a time per config.
 * Does not look at files or at the environment: whether a disk can be used is found out by
 * kvt_open().
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/parse.h"
#include "client/options.h"
#include "io/io.h"
#include "kvtier/codec.h"
#include "kvtier/layout.h"
#include "plan/admission.h"
#include "remote/remote.h"

const char *kvt_size_text(uint64_t bytes, char *buffer, size_t len)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    unsigned unit = 0;
    while (unit < KVT_ARRAY_LEN(units) - 1 && bytes != 0 && bytes % 1024 == 0) {
        bytes /= 1024;
        unit++;
    }
    (void)snprintf(buffer, len, "%" PRIu64 "%s", bytes, bytes == 0 ? "" : units[unit]);
    return buffer;
}

const char *kvt_duration_text(uint64_t ns, char *buffer, size_t len)
{
    static const struct {
        uint64_t ns;
        const char *unit;
    } units[] = {{3600000000000, "h"}, {60000000000, "min"}, {1000000000, "s"},
                 {1000000, "ms"},      {1000, "us"},         {1, "ns"}};
    for (size_t i = 0; i < KVT_ARRAY_LEN(units); i++) {
        if (ns % units[i].ns == 0) {
            (void)snprintf(buffer, len, "%" PRIu64 "%s", ns / units[i].ns, units[i].unit);
            break;
        }
    }
    return buffer;
}

static int set_size(struct kvt_config *config, const struct kvt_option *option, const char *value,
                    uint64_t *field)
{
    uint64_t bytes;
    char low[32], high[32];
    int rc = kvt_parse_size(value, &bytes);
    if (rc == KVT_E_CONFIG_VALUE && value[0] == '-')
        return kvt_config_refuse(config, rc, "%s: \"%.64s\" is negative: a size is 0 or more",
                                 option->key, value);
    if (rc == KVT_E_CONFIG_VALUE) {
        const char *unit = kvt_nearest_size_unit(value);
        return kvt_config_refuse(
            config, rc,
            "%s: \"%.64s\" is not a size%s%s%s: a number with KiB, MiB, GiB, TiB, kB, "
            "MB, GB or TB%s%s",
            option->key, value, unit ? " (did you mean " : "", unit ? unit : "", unit ? "?)" : "",
            option->word ? ", or " : "", option->word ? option->word : "");
    }
    if (rc != 0 || bytes < option->min || bytes > option->max)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE, "%s: %.64s is out of range: %s to %s",
                                 option->key, value, kvt_size_text(option->min, low, sizeof(low)),
                                 kvt_size_text(option->max, high, sizeof(high)));
    *field = bytes;
    return 0;
}

static int set_count(struct kvt_config *config, const struct kvt_option *option, const char *value,
                     uint64_t *field)
{
    int64_t number;
    int rc = kvt_parse_int(value, (int64_t)option->min, (int64_t)option->max, &number);
    if (rc != 0)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "%s: \"%.64s\" is not a whole number from %" PRIu64 " to %" PRIu64
                                 "%s%s",
                                 option->key, value, option->min, option->max,
                                 option->word ? ", or " : "", option->word ? option->word : "");
    *field = (uint64_t)number;
    return 0;
}

static int set_deadline(struct kvt_config *config, const struct kvt_option *option,
                        const char *value, uint64_t *field)
{
    int64_t ns;
    int rc = kvt_parse_duration(value, &ns);
    if (rc == KVT_E_CONFIG_VALUE) {
        const char *unit = kvt_nearest_duration_unit(value);
        return kvt_config_refuse(
            config, rc,
            "%s: \"%.64s\" is not a time%s%s%s: a number with ns, us, ms, s, min, h or "
            "d, or none",
            option->key, value, unit ? " (did you mean " : "", unit ? unit : "", unit ? "?)" : "");
    }
    if (rc != 0 || ns <= 0)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "%s: %.64s is out of range: more than 0, or none", option->key,
                                 value);
    *field = (uint64_t)ns;
    return 0;
}

static int refuse_choice(struct kvt_config *config, const char *key, const char *value,
                         const char *const *choices, size_t count, const char *list)
{
    const char *nearest = kvt_nearest(value, choices, count);
    return kvt_config_refuse(config, KVT_E_CONFIG_VALUE, "%s: \"%.64s\" is not one of %s%s%s%s",
                             key, value, list, nearest ? "; did you mean \"" : "",
                             nearest ? nearest : "", nearest ? "\"?" : "");
}

static int set_level(struct kvt_config *config, const char *value, int *field)
{
    static const char *const levels[] = {"raw", "kv8", "kv6", "kv5", "kv4", "int4"};
    int level = kvt_level_parse(value);
    if (level < 0)
        return refuse_choice(config, "level", value, levels, KVT_ARRAY_LEN(levels),
                             "raw, kv8, kv6, kv5, kv4, int4");
    if (!kvt_level_supported(level))
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE, "level: this build cannot code \"%s\"",
                                 value);
    *field = level;
    return 0;
}

static int set_switch(struct kvt_config *config, const char *key, const char *value, int *field)
{
    static const char *const words[] = {"auto", "on", "off"};
    if (strcmp(value, "auto") == 0)
        *field = -1;
    else if (strcmp(value, "on") == 0)
        *field = 1;
    else if (strcmp(value, "off") == 0)
        *field = 0;
    else
        return refuse_choice(config, key, value, words, KVT_ARRAY_LEN(words), "auto, on, off");
    return 0;
}

static const char *const io_words[] = {
    [KVT_IO_POSIX] = "posix", [KVT_IO_URING] = "uring", [KVT_IO_AUTO] = "auto"};

/* A word of a table; its value is its place, from `first` on. listed: for people. */
static int set_word(struct kvt_config *config, const char *key, const char *value,
                    const char *const *words, size_t count, int first, const char *listed,
                    int *field)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(value, words[i]) == 0) {
            *field = first + (int)i;
            return 0;
        }
    }
    return refuse_choice(config, key, value, words, count, listed);
}

static const char *const write_words[] = {"through", "evict", "idle", "auto"}; /* from THROUGH on */

static const char *const admission_words[] = {[KVT_ADMIT_ALL] = "all",
                                              [KVT_ADMIT_SECOND] = "second_use",
                                              [KVT_ADMIT_VALUE] = "value",
                                              [KVT_ADMIT_CONTINUED] = "continued"};

void kvt_settings_forget_disks(struct kvt_settings *settings)
{
    for (uint32_t i = 0; i < settings->disk_count; i++)
        free(settings->disks[i].path);
    settings->disk_count = 0;
}

/* The cap behind the last ':' of a disk's value. */
static int set_cap(struct kvt_config *config, const char *value, const char *text, uint64_t *cap)
{
    int rc = kvt_parse_size(text, cap);
    if (rc == 0 && *cap != 0)
        return 0;
    const char *unit = kvt_nearest_size_unit(text);
    if (rc == 0)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "disk: the size of \"%.200s\" is too small: give it 8MiB or more",
                                 value);
    if (rc == KVT_E_LIMIT)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "disk: the size of \"%.200s\" is too large", value);
    if (text[0] == '-')
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "disk: the size of \"%.200s\" is negative", value);
    return kvt_config_refuse(
        config, KVT_E_CONFIG_VALUE,
        "disk: \"%.64s\" after the last ':' of \"%.200s\" is not a size%s%s%s: write "
        "\"/path:100GiB\"",
        text, value, unit ? " (did you mean " : "", unit ? unit : "", unit ? "?)" : "");
}

static const char *const pin_words[] = {
    [KVT_PIN_SET_OFF] = "off", [KVT_PIN_SET_AUTO] = "auto", [KVT_PIN_SET_REQUIRED] = "required"};

static int add_disk(struct kvt_config *config, const char *value)
{
    struct kvt_settings *settings = &config->settings;
    const char *colon = strrchr(value, ':');
    uint64_t cap;
    if (colon == NULL || colon == value || strlen(value) >= PATH_MAX)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "disk: \"%.200s\" is not of the form \"/path:SIZE\", or too long",
                                 value);
    int rc = set_cap(config, value, colon + 1, &cap);
    if (rc != 0)
        return rc;
    size_t len = (size_t)(colon - value);
    while (len > 1 && value[len - 1] == '/')
        len--;
    for (uint32_t i = 0; i < settings->disk_count; i++)
        if (strlen(settings->disks[i].path) == len &&
            memcmp(settings->disks[i].path, value, len) == 0)
            return kvt_config_refuse(config, KVT_E_CONFIG_VALUE, "disk: \"%.200s\" is given twice",
                                     settings->disks[i].path);
    if (settings->disk_count == KVT_DISKS_MAX)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE, "disk: at most %u roots",
                                 KVT_DISKS_MAX);
    char *path = strndup(value, len);
    if (path == NULL)
        return kvt_config_refuse(config, -ENOMEM, "disk: out of memory");
    settings->disks[settings->disk_count].path = path;
    settings->disks[settings->disk_count].cap_bytes = cap;
    settings->disk_count++;
    return 0;
}

static const char *const plan_words[] = {[KVT_PLAN_SET_OFF] = "off",
                                         [KVT_PLAN_SET_ON] = "on",
                                         [KVT_PLAN_SET_DETERMINISTIC] = "deterministic"};

/* what: of a text too short or too long for its field. */
static int set_text(struct kvt_config *config, const char *key, const char *what, const char *value,
                    char *field, size_t room)
{
    size_t len = strlen(value);
    if (len == 0 || len >= room)
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "%s: %s has 1 to %zu bytes, this one has %zu: choose another", key,
                                 what, room - 1, len);
    memcpy(field, value, len + 1);
    return 0;
}

static int set_store(struct kvt_config *config, const char *value)
{
    char *socket = config->settings.socket;
    if (strcmp(value, "process") == 0) {
        socket[0] = '\0';
        return 0;
    }
    if (strncmp(value, "unix:", 5) != 0 || value[5] == '\0')
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "store: \"%.64s\" is neither \"process\" nor \"unix:/path\" (the "
                                 "socket of a kvtierd)",
                                 value);
    return set_text(config, "store", "the path of a socket", value + 5, socket,
                    sizeof(config->settings.socket));
}

static int set_file(struct kvt_config *config, const struct kvt_option *option, const char *value,
                    char *field)
{
    if (strcmp(value, "none") == 0) {
        field[0] = '\0';
        return 0;
    }
    return set_text(config, option->key, "a path (or none)", value, field,
                    sizeof(config->settings.trace));
}

static const char *const remote_write_words[] = {[KVT_REMOTE_WRITE_OFF] = "off",
                                                 [KVT_REMOTE_WRITE_SECOND] = "second_use",
                                                 [KVT_REMOTE_WRITE_ALL] = "all"};

static int set_remote(struct kvt_config *config, const char *value)
{
    char *field = config->settings.remote;
    if (strcmp(value, "none") == 0) {
        field[0] = '\0';
        return 0;
    }
    int rc = kvt_remote_where_check(value, config->error, sizeof(config->error));
    return rc != 0 ? rc
                   : set_text(config, "remote", "a place (or none)", value, field,
                              sizeof(config->settings.remote));
}

int kvt_option_set(struct kvt_config *config, const struct kvt_option *option, const char *value)
{
    void *field = (char *)&config->settings + option->offset;
    if (option->word != NULL && strcmp(value, option->word) == 0) {
        *(uint64_t *)field = KVT_AUTO;
        return 0;
    }
    switch (option->type) {
    case T_SIZE:
        return set_size(config, option, value, field);
    case T_COUNT:
        return set_count(config, option, value, field);
    case T_DEADLINE:
        return set_deadline(config, option, value, field);
    case T_LEVEL:
        return set_level(config, value, field);
    case T_SWITCH:
        return set_switch(config, option->key, value, field);
    case T_WRITE:
        return set_word(config, "write", value, write_words, KVT_ARRAY_LEN(write_words),
                        KVT_WRITE_THROUGH, "through, evict, idle, auto", field);
    case T_ADMISSION:
        return set_word(config, "admission", value, admission_words, KVT_ARRAY_LEN(admission_words),
                        0, "all, second_use, value, continued", field);
    case T_IO:
        return set_word(config, "io", value, io_words, KVT_ARRAY_LEN(io_words), 0,
                        "auto, posix, uring", field);
    case T_PIN:
        return set_word(config, option->key, value, pin_words, KVT_ARRAY_LEN(pin_words), 0,
                        "auto, required, off", field);
    case T_PLAN:
        return set_word(config, "plan", value, plan_words, KVT_ARRAY_LEN(plan_words), 0,
                        "on, deterministic, off", field);
    case T_LAYERS:
        return kvt_layers_set(config, value);
    case T_STORE:
        return set_store(config, value);
    case T_FILE:
        return set_file(config, option, value, field);
    case T_REMOTE:
        return set_remote(config, value);
    case T_REMOTE_WRITE:
        return set_word(config, "remote_write", value, remote_write_words,
                        KVT_ARRAY_LEN(remote_write_words), 0, "second_use, all, off", field);
    case T_NS_LIMIT:
        return kvt_limits_set(config, value);
    case T_DISK:
        if (strcmp(value, "none") != 0)
            return add_disk(config, value);
        kvt_settings_forget_disks(&config->settings);
        return 0;
    case T_BOOL:
        if (kvt_parse_bool(value, field) == 0)
            return 0;
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "%s: \"%.64s\" is neither yes nor no (true, false, on, off, 1, 0)",
                                 option->key, value);
    }
    return KVT_E_INVAL;
}

const char *kvt_option_text(const struct kvt_settings *settings, const struct kvt_option *option,
                            char *buffer, size_t len)
{
    const void *field = (const char *)settings + option->offset;
    uint64_t number = 0;
    if (option->type == T_SIZE || option->type == T_COUNT || option->type == T_DEADLINE)
        memcpy(&number, field, sizeof(number));
    if (number == KVT_AUTO && option->word != NULL)
        return option->word;
    switch (option->type) {
    case T_SIZE:
        return kvt_size_text(number, buffer, len);
    case T_COUNT:
        (void)snprintf(buffer, len, "%" PRIu64, number);
        return buffer;
    case T_DEADLINE:
        return kvt_duration_text(number, buffer, len);
    case T_BOOL:
        return *(const int *)field ? "yes" : "no";
    case T_LEVEL:
        return kvt_level_name(*(const int *)field);
    case T_ADMISSION:
        return admission_words[*(const int *)field];
    case T_IO:
        return io_words[*(const int *)field];
    case T_SWITCH:
        return *(const int *)field < 0 ? "auto" : *(const int *)field ? "on" : "off";
    case T_PIN:
        return *(const int *)field == KVT_PIN_SET_OFF    ? "off"
               : *(const int *)field == KVT_PIN_SET_AUTO ? "auto"
                                                         : "required";
    case T_WRITE:
        return write_words[*(const int *)field - KVT_WRITE_THROUGH];
    case T_PLAN:
        return plan_words[*(const int *)field];
    case T_LAYERS:
        return kvt_layers_text(settings, buffer, len);
    case T_STORE:
        (void)snprintf(buffer, len, "%s%s", settings->socket[0] ? "unix:" : "process",
                       settings->socket);
        return buffer;
    case T_FILE:
    case T_REMOTE:
        return *(const char *)field ? field : "none";
    case T_REMOTE_WRITE:
        return remote_write_words[*(const int *)field];
    case T_NS_LIMIT:
        return kvt_limits_text(settings, buffer, len);
    case T_DISK:
        break;
    }
    size_t used = 0;
    (void)snprintf(buffer, len, "none");
    for (uint32_t i = 0; i < settings->disk_count && used < len; i++) {
        char size[32];
        int n =
            snprintf(buffer + used, len - used, "%s%s:%s", i ? "," : "", settings->disks[i].path,
                     kvt_size_text(settings->disks[i].cap_bytes, size, sizeof(size)));
        used += n > 0 ? (size_t)n : 0;
    }
    return buffer;
}
