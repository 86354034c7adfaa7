/* Options of a configuration: the table, strict parsing, values as text, sentences for what is
 * refused.
 *
 * One table row is the whole truth about an option: key, type, where it is kept, default, limits,
 * help. Defaults go through the same parser as the user's text. A refused value changes nothing.
 * Threads: one at a time per config. Does not look at files or at the environment: whether a disk
 * can be used is found out by kvt_open().
 */
#include "client/options.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/parse.h"
#include "io/io.h"
#include "kvtier/codec.h"
#include "kvtier/layout.h"
#include "plan/admission.h"
#include "remote/remote.h"

#define KIB (UINT64_C(1) << 10)
#define TIB (UINT64_C(1) << 40)

#define AT(field) offsetof(struct kvt_settings, field)

static const struct kvt_option options[] = {
    {"store", T_STORE, AT(socket), "process", NULL, 0, 0,
     "where the store is: process (this one), or \"unix:/path\", the socket of a kvtierd"},
    {"dram", T_SIZE, AT(dram), "1GiB", NULL, 0, 64 * TIB,
     "DRAM for blocks, staging included, a hard cap; 0: only what loads stage through"},
    {"dram_share", T_COUNT, AT(dram_share), "none", "none", 1, 95,
     "dram as per cent of the memory of this machine or control group, shared out among ranks"},
    {"ranks", T_COUNT, AT(ranks), "1", NULL, 1, 1024,
     "processes that take their dram_share of the same memory: each gets an equal part"},
    {"disk", T_DISK, AT(disks), "none", NULL, 0, 0,
     "a root directory and its cap, \"/path:SIZE\"; repeat for more drives; \"none\" forgets them"},
    {"disk_required", T_BOOL, AT(disk_required), "no", NULL, 0, 1,
     "yes: opening fails when a root cannot be used; no: the cache runs without it and says so"},
    {"level", T_LEVEL, AT(level), "kv4", NULL, 0, 0,
     "level that blocks are stored at: raw, kv8, kv6, kv5, kv4, int4 (as far as built in)"},
    {"exclude_layers", T_LAYERS, AT(exclude), "none", NULL, 0, 0,
     "layers stored raw whatever the level: numbers, ranges and \"last\", as 0+last or 0-3+30"},
    {"guard", T_BOOL, AT(guard), "yes", NULL, 0, 1,
     "check the quality of each coded block and go a level up where it is too low"},
    {"threads", T_COUNT, AT(threads), "auto", "auto", 1, 64,
     "threads that encode and decode; auto: the CPUs this process may use, at most 4"},
    {"staging", T_SIZE, AT(staging), "auto", "auto", 64 * KIB, 64 * TIB,
     "part of dram that loads from disk stage through; auto: an eighth of dram, at most 64MiB"},
    {"write_queue", T_SIZE, AT(write_queue), "auto", "auto", 0, 64 * TIB,
     "bytes waiting for the disks before blocks are dropped; auto: half of dram, at most 256MiB"},
    {"write", T_WRITE, AT(write), "through", NULL, 0, 0,
     "when blocks go to disk: through (at once), evict (when DRAM runs short), idle"},
    {"admission", T_ADMISSION, AT(admission), "all", NULL, 0, 0,
     "which blocks go to disk: all, continued (all but a prompt's last block until it is "
     "continued), second_use (used twice), value (best saving for the budget)"},
    {"write_budget", T_SIZE, AT(write_budget), "none", "none", 1024 * KIB, 1024 * TIB,
     "bytes that may be written to each root in a day; blocks beyond are not written; none: any"},
    {"write_dwpd", T_COUNT, AT(write_dwpd), "none", "none", 1, 100000,
     "the same in per cent of a root's size a day (drive writes per day x 100); the smaller holds"},
    {"ttl", T_DEADLINE, AT(ttl), "none", "none", 0, INT64_MAX,
     "blocks that are not used for so long are gone, a second at least; none: never"},
    {"ns_quota", T_SIZE, AT(ns_quota), "none", "none", 64 * KIB, 64 * TIB,
     "record bytes that one namespace (model, tenant) may hold, DRAM and disk together; none: any"},
    {"ns_limit", T_NS_LIMIT, AT(ns_limits), "none", NULL, 0, 0,
     "quota and ttl of single namespaces, \"NAME:QUOTA:TTL\", by id or model; repeat it for more"},
    {"pin_max", T_SIZE, AT(pin_max), "auto", "auto", 0, 64 * TIB,
     "bytes that kvt_pin() may keep from eviction; auto: half of dram"},
    {"io", T_IO, AT(io), "auto", NULL, 0, 0,
     "what moves the bytes: posix (threads), uring (io_uring), auto (measured at open)"},
    {"io_threads", T_COUNT, AT(io_threads), "4", NULL, 1, 16,
     "I/O threads of each root, where posix is used"},
    {"fds_max", T_COUNT, AT(fds_max), "auto", "auto", 32, 4096,
     "file descriptors of the cache; auto: 72 a root, at most half of the process's limit"},
    {"io_register", T_BOOL, AT(io_register), "no", NULL, 0, 1,
     "yes: register dram with io_uring, as far as the limit on locked memory lets it"},
    {"direct", T_SWITCH, AT(direct), "auto", NULL, 0, 0,
     "O_DIRECT: auto (where a probe proves it), on (required), off"},
    {"pin", T_PIN, AT(pin), "auto", NULL, 0, 0,
     "lock dram in physical memory: auto (when a GPU pool needs it), required (always), off"},
    {"huge_pages", T_SWITCH, AT(huge_pages), "auto", NULL, 0, 0,
     "huge pages for dram: auto (from 64MiB on), on (required), off"},
    {"numa_node", T_COUNT, AT(numa_node), "none", "none", 0, 1023,
     "NUMA node that dram is taken from, best the GPU's or the drive's; none: no preference"},
    {"numa_device", T_COUNT, AT(numa_device), "none", "none", 0, 63,
     "CUDA device on whose NUMA node dram is taken, when numa_node does not say otherwise"},
    {"scrub", T_SIZE, AT(scrub), "8MiB", "off", 64 * KIB, TIB,
     "cold records read back and verified when nobody asks for anything, bytes a second; off"},
    {"load_deadline", T_DEADLINE, AT(load_deadline), "none", "none", 0, INT64_MAX,
     "time that a load may take unless it says otherwise; none: as long as it takes"},
    {"spin", T_DEADLINE, AT(spin), "none", "none", 0, INT64_MAX,
     "time that a call looks for its answer before it sleeps; none: it sleeps at once"},
    {"plan", T_PLAN, AT(plan), "on", NULL, 0, 0,
     "kvt_plan(): on (by what was measured), deterministic (by the start values), off (load all)"},
    {"plan_file", T_FILE, AT(plan_file), "none", NULL, 0, 0,
     "where kvt_plan() keeps what it has learnt; none: the first root; of a kvtierd's client "
     "nowhere"},
    {"plan_lambda", T_COUNT, AT(plan_lambda), "100", NULL, 0, 10000,
     "per cent: seconds of waiting that a second of a busy GPU is worth to kvt_plan()"},
    {"plan_prefill", T_COUNT, AT(plan_prefill), "10000", NULL, 1, 100000000,
     "start value of kvt_plan(): tokens a second that the engine computes of short prompts"},
    {"plan_disk", T_SIZE, AT(plan_disk), "2GiB", NULL, 1024 * KIB, 64 * TIB,
     "start value of kvt_plan(): record bytes a second that loads from disk reach"},
    {"plan_dram", T_SIZE, AT(plan_dram), "8GiB", NULL, 1024 * KIB, 64 * TIB,
     "start value of kvt_plan(): record bytes a second that loads from DRAM reach"},
    {"requests_max", T_COUNT, AT(requests_max), "256", NULL, 1, 65536,
     "requests that exist at a time; more are refused with -EAGAIN"},
    {"request_blocks_max", T_COUNT, AT(request_blocks_max), "32768", NULL, 16, 4194304,
     "blocks of all requests at a time; more are refused with -EAGAIN"},
    {"gpu_ctas", T_COUNT, AT(gpu_ctas), "16", NULL, 1, 1024,
     "thread blocks that loads into GPU memory may keep at work; 16 fill a PCIe 5 link"},
    {"gpu_store_ctas", T_COUNT, AT(gpu_store_ctas), "32", NULL, 1, 1024,
     "thread blocks that stores out of GPU memory may keep at work; 64 fill a PCIe 5 link"},
    {"gpu_wave", T_SIZE, AT(gpu_wave), "11MiB", NULL, 1024 * KIB, 256 * 1024 * KIB,
     "record bytes that one launch of a GPU kernel takes; three times as much is staging memory"},
    {"gpu_pace", T_SIZE, AT(gpu_pace), "none", "none", 1024 * KIB, 64 * TIB,
     "record bytes a second that a GPU's loads and stores are held to; none: as fast as it goes"},
    {"gpu_tune", T_BOOL, AT(gpu_tune), "no", NULL, 0, 1,
     "yes: measure once which path small jobs of a GPU take; no: all go by the copy engine"},
    {"gds", T_PIN, AT(gds), "off", NULL, 0, 0,
     "loads from disk into GPU memory past DRAM: auto (where that is faster), required, off"},
    {"remote", T_REMOTE, AT(remote), "none", NULL, 0, 0,
     "a tier that machines share: redis://host:port (or seeds of a cluster; ?replicas=yes: read "
     "from "
     "replicas), rediss://, redis+unix:/path, dir:/path; none"},
    {"remote_auth", T_FILE, AT(remote_auth), "none", NULL, 0, 0,
     "a file with \"password\" or \"user password\" for it, read at each connect; none"},
    {"remote_write", T_REMOTE_WRITE, AT(remote_write), "second_use", NULL, 0, 0,
     "which blocks are put there: second_use (used twice), all (stored), off (it is only read)"},
    {"remote_deadline", T_DEADLINE, AT(remote_deadline), "250ms", NULL, 0, 60000000000,
     "time that one look-up or one read there may take; what comes later counts as absent"},
    {"remote_ttl", T_DEADLINE, AT(remote_ttl), "none", "none", 0, INT64_MAX,
     "records live so long there; none: as long as the server keeps them, or for ever"},
    {"remote_queue", T_SIZE, AT(remote_queue), "16MiB", NULL, 64 * KIB, 64 * TIB,
     "bytes of records on their way there at a time; they stay in dram meanwhile"},
    {"remote_cap", T_SIZE, AT(remote_cap), "none", "none", 1024 * KIB, 1024 * TIB,
     "bytes that a shared directory may hold: one of its users removes what was not used for "
     "longest"},
    {"remote_ns_cap", T_SIZE, AT(remote_ns_cap), "none", "none", 1024 * KIB, 1024 * TIB,
     "bytes that each namespace may hold there, in a directory or on servers"},
    {"plan_remote", T_SIZE, AT(plan_remote), "1GiB", NULL, 1024 * KIB, 64 * TIB,
     "start value of kvt_plan(): record bytes a second that loads from the shared tier reach"},
    {"remote_mac", T_FILE, AT(remote_mac), "none", NULL, 0, 0,
     "a file with a key of 32 bytes or more: records without its MAC are not loaded; none"},
    {"remote_ca", T_FILE, AT(remote_ca), "none", NULL, 0, 0,
     "certificates that rediss:// trusts, PEM; none: the system's"},
    {"trace", T_FILE, AT(trace), "none", NULL, 0, 0,
     "a file that lookups are recorded in for 'kvtier replay': salted digests, no prompts; none"},
    {"trace_max", T_SIZE, AT(trace_max), "64MiB", NULL, 1024 * KIB, TIB,
     "bytes of the trace and the one before it, FILE.1, together"},
    {"shadow", T_BOOL, AT(shadow), "no", NULL, 0, 1,
     "yes: store, load nothing, and count what loading would have saved (shadow.*)"},
    {"enabled", T_BOOL, AT(enabled), "yes", NULL, 0, 1,
     "no: every lookup misses and every store does nothing, until kvt_enable()"},
    {"env", T_BOOL, AT(env), "yes", NULL, 0, 1,
     "yes: " KVT_CONFIG_ENV " (\"key=value,...\") is applied last, over the program's settings"},
};

int kvt_config_refuse(struct kvt_config *config, int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(config->error, sizeof(config->error), format, args);
    va_end(args);
    return code;
}

const struct kvt_option *kvt_option_at(size_t i)
{
    return i < KVT_ARRAY_LEN(options) ? &options[i] : NULL;
}

const char *kvt_option_nearest(const char *key)
{
    const char *keys[KVT_ARRAY_LEN(options)];
    for (size_t i = 0; i < KVT_ARRAY_LEN(options); i++)
        keys[i] = options[i].key;
    return kvt_nearest(key, keys, KVT_ARRAY_LEN(options));
}

static void refuse_key(struct kvt_config *config, const char *key)
{
    const char *nearest = kvt_option_nearest(key);
    if (nearest != NULL)
        (void)kvt_config_refuse(config, KVT_E_CONFIG_KEY,
                                "unknown option \"%.64s\"; did you mean \"%s\"?", key, nearest);
    else
        (void)kvt_config_refuse(config, KVT_E_CONFIG_KEY,
                                "unknown option \"%.64s\"; 'kvtier doctor' lists the valid ones",
                                key);
}

const struct kvt_option *kvt_option_find(struct kvt_config *config, const char *key)
{
    for (size_t i = 0; i < KVT_ARRAY_LEN(options); i++)
        if (strcmp(options[i].key, key) == 0)
            return &options[i];
    refuse_key(config, key);
    return NULL;
}

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

static const char *const write_words[] = {"through", "evict", "idle"}; /* from THROUGH on */

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
                        KVT_WRITE_THROUGH, "through, evict, idle", field);
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
