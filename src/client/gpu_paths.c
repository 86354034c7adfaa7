/* Which path small jobs of a device take: measured at its first pool (gpu/tune.h) and kept for the
 * next time, in the file "gpu-paths" of the first root.
 *
 *   kvtier-gpu-paths 2
 *   <device>|<driver>|<capability>|<CTAs of loads>|<of stores> <9 numbers of struct kvt_gpu_tuned>
 *   end <hash>
 *
 * A state_file.h with one line for each device and setting; what is damaged, or makes no sense, is
 * measured again. Without a root nothing is kept. Threads: the one that opens a lane, under
 * cache->gpu_lock.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/gpu_lane_impl.h"
#include "client/state_file.h"

#define VERSION_LINE "kvtier-gpu-paths 2\n"
#define KEY_MAX 160u
#define BLOCKS_SANE 1024u
#define RECORD_SANE (64u << 20)

static void key_of(const struct kvt_lane *lane, char key[KEY_MAX])
{
    const struct kvt_settings *settings = lane->cache->settings;
    struct kvt_gpu_info info;
    kvt_gpu_info(lane->gpu, &info);
    (void)snprintf(key, KEY_MAX, "%s|%d|%d|%" PRIu64 "|%" PRIu64, info.name, info.driver_version,
                   info.capability, settings->gpu_ctas, settings->gpu_store_ctas);
}

static bool path_of(const struct kvt_cache *cache, char path[PATH_MAX])
{
    const struct kvt_settings *settings = cache->settings;
    if (cache->remote || settings->disk_count == 0)
        return false;
    return kvt_state_in_root(settings->disks[0].path, "gpu-paths", path);
}

static bool take_numbers(const char *at, struct kvt_gpu_tuned *tuned)
{
    uint32_t *sizes = tuned->record_bytes, last = 0;
    for (uint32_t i = 0; i < 3 * KVT_GPU_TUNE_SIZES; i++) {
        char *end;
        uint32_t limit = i < KVT_GPU_TUNE_SIZES ? RECORD_SANE : BLOCKS_SANE;
        if (at[0] != ' ' || at[1] < '0' || at[1] > '9')
            return false;
        errno = 0;
        unsigned long value = strtoul(at + 1, &end, 10);
        if (errno != 0 || value > limit || (i < KVT_GPU_TUNE_SIZES && value <= last))
            return false;
        if (i < KVT_GPU_TUNE_SIZES)
            sizes[i] = last = (uint32_t)value;
        else
            tuned->sm_blocks[i / KVT_GPU_TUNE_SIZES - 1][i % KVT_GPU_TUNE_SIZES] = (uint32_t)value;
        at = end;
    }
    return *at == '\0';
}

/* The numbers of a line that is the key's; else NULL. */
static const char *numbers_of(const char *line, const char *key)
{
    size_t len = strlen(key);
    return strncmp(line, key, len) == 0 && line[len] == ' ' ? line + len : NULL;
}

/* Whether the file has numbers of this key. */
static bool find(const struct kvt_cache *cache, const char *key, struct kvt_gpu_tuned *tuned)
{
    char path[PATH_MAX], *lines;
    struct kvt_state_text text;
    if (!path_of(cache, path) || kvt_state_read(path, VERSION_LINE, &text, &lines) != 0)
        return false;
    for (const char *line; (line = kvt_state_next(&lines)) != NULL;) {
        const char *numbers = numbers_of(line, key);
        if (numbers != NULL)
            return take_numbers(numbers, tuned);
    }
    return false;
}

/* Our line, and those of other devices, as many as there is room for. What cannot be kept is
 * measured again next time. */
static void keep(const struct kvt_cache *cache, const char *key, const struct kvt_gpu_tuned *tuned)
{
    const uint32_t *s = tuned->record_bytes, *r = tuned->sm_blocks[0], *e = tuned->sm_blocks[1];
    char path[PATH_MAX], *lines;
    struct kvt_state_text text, old;
    if (!path_of(cache, path))
        return;
    kvt_state_begin(&text, VERSION_LINE);
    kvt_state_add(&text, "%s %u %u %u %u %u %u %u %u %u\n", key, s[0], s[1], s[2], r[0], r[1], r[2],
                  e[0], e[1], e[2]);
    if (kvt_state_read(path, VERSION_LINE, &old, &lines) == 0)
        for (const char *line; (line = kvt_state_next(&lines)) != NULL;)
            if (numbers_of(line, key) == NULL && kvt_state_room(&text, strlen(line) + 1))
                kvt_state_add(&text, "%s\n", line);
    if (kvt_state_write(path, &text) != 0)
        return;
}

static void describe(struct kvt_cache *cache, const char *how, const struct kvt_gpu_tuned *tuned)
{
    const uint32_t *s = tuned->record_bytes, *r = tuned->sm_blocks[0], *e = tuned->sm_blocks[1];
    pthread_mutex_lock(&cache->lock);
    (void)snprintf(cache->gpu_paths, sizeof(cache->gpu_paths),
                   "%s: by the SMs up to %u, %u, %u blocks of a load and %u, %u, %u of a store, of "
                   "records up to %u, %u KiB, and larger; else by the copy engine",
                   how, r[0], r[1], r[2], e[0], e[1], e[2], s[0] >> 10, s[1] >> 10);
    pthread_mutex_unlock(&cache->lock);
}

int kvt_paths_open(struct kvt_lane *lane)
{
    struct kvt_cache *cache = lane->cache;
    struct kvt_gpu_tune_opts opts = {
        .ctas = {(uint32_t)cache->settings->gpu_ctas, (uint32_t)cache->settings->gpu_store_ctas},
        .runs = cache->gpu_tune_runs,
    };
    char key[KEY_MAX];
    if (!cache->settings->gpu_tune)
        return 0;
    if (cache->gpu_tune_runs > 0) { /* a test's: little work for a fake device */
        opts.blocks_max = 4;
        for (uint32_t i = 0; i < KVT_GPU_TUNE_SIZES; i++)
            opts.layers[i] = i + 1;
    }
    key_of(lane, key);
    if (find(cache, key, &lane->tuned)) {
        describe(cache, "kept", &lane->tuned);
        return 0;
    }
    struct kvt_clock *clock = cache->gpu_tune_clock != NULL ? cache->gpu_tune_clock : &cache->clock;
    int rc = kvt_gpu_tune(lane->gpu, clock, &opts, &lane->tuned);
    if (rc == KVT_E_DEVICE)
        return rc;
    if (rc != 0) { /* no memory for it: the copy engine does */
        memset(&lane->tuned, 0, sizeof(lane->tuned));
        return 0;
    }
    keep(cache, key, &lane->tuned);
    describe(cache, "measured", &lane->tuned);
    return 0;
}
