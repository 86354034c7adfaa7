/* Options of a configuration: the table, and what is found in it by a key. How values are read and
 * written is in option_values.c.
 *
 * One table row is the whole truth about an option: key, type, where it is kept, default, limits,
 * help. Threads: one at a time per config.
 */
#include "client/options.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/parse.h"

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
    {"write", T_WRITE, AT(write), "auto", NULL, 0, 0,
     "when blocks go to disk: through (at once), evict (when DRAM runs short), idle, auto (at "
     "once while the disk has room, then within half a minute)"},
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
