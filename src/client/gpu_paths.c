/* Which path small jobs of a device take: measured at its first pool (gpu/tune.h) and kept for the
 * next time, in the file "gpu-paths" of the first root.
 *
 *   kvtier-gpu-paths 1
 *   <device>|<driver>|<capability>|<CTAs of loads>|<of stores> <9 numbers of struct kvt_gpu_tuned>
 *
 * One line for each device and setting. It is written beside the old one and renamed over it; what
 * is damaged, or makes no sense, is measured again. Without a root nothing is kept. Threads: the
 * one that opens a lane, under cache->gpu_lock.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/gpu_lane_impl.h"

#define VERSION_LINE "kvtier-gpu-paths 1\n"
#define BYTES_MAX 8192u
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

static bool path_of(const struct kvt_cache *cache, const char *suffix, char path[PATH_MAX])
{
    const struct kvt_settings *settings = cache->settings;
    if (cache->remote || settings->disk_count == 0)
        return false;
    return snprintf(path, PATH_MAX, "%s/gpu-paths%s", settings->disks[0].path, suffix) < PATH_MAX;
}

/* The whole file, ended by a zero; 0 bytes when there is none, or it is not one of ours. */
static size_t read_file(const struct kvt_cache *cache, char text[BYTES_MAX + 1])
{
    char path[PATH_MAX];
    size_t len = 0;
    ssize_t n = 0;
    text[0] = '\0';
    if (!path_of(cache, "", path))
        return 0;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0)
        return 0;
    do {
        n = read(file, text + len, BYTES_MAX - len);
        len += n > 0 ? (size_t)n : 0;
    } while ((n > 0 && len < BYTES_MAX) || (n < 0 && errno == EINTR));
    (void)close(file);
    text[n < 0 ? 0 : len] = '\0';
    if (n != 0 || strlen(text) != len || len == 0 || text[len - 1] != '\n' ||
        strncmp(text, VERSION_LINE, strlen(VERSION_LINE)) != 0)
        text[len = 0] = '\0';
    return len;
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
    return *at == '\n';
}

/* The numbers of a line that is the key's; else NULL. */
static const char *numbers_of(const char *line, const char *key)
{
    size_t len = strlen(key);
    return strncmp(line, key, len) == 0 && line[len] == ' ' ? line + len : NULL;
}

static bool find(const char *text, const char *key, struct kvt_gpu_tuned *tuned)
{
    for (const char *line = text; *line != '\0'; line = strchr(line, '\n') + 1) {
        const char *numbers = numbers_of(line, key);
        if (numbers != NULL)
            return take_numbers(numbers, tuned);
    }
    return false;
}

/* The other devices' lines, and ours. */
static size_t compose(const char *old, const char *key, const struct kvt_gpu_tuned *tuned,
                      char text[BYTES_MAX + 1])
{
    const uint32_t *s = tuned->record_bytes, *r = tuned->sm_blocks[0], *e = tuned->sm_blocks[1];
    size_t len = (size_t)snprintf(text, BYTES_MAX, VERSION_LINE "%s %u %u %u %u %u %u %u %u %u\n",
                                  key, s[0], s[1], s[2], r[0], r[1], r[2], e[0], e[1], e[2]);
    const char *line = *old != '\0' ? old + strlen(VERSION_LINE) : old;
    for (const char *next; *line != '\0'; line = next) {
        next = strchr(line, '\n') + 1;
        size_t bytes = (size_t)(next - line);
        if (numbers_of(line, key) != NULL || len + bytes > BYTES_MAX)
            continue;
        memcpy(text + len, line, bytes);
        len += bytes;
    }
    return len;
}

/* What cannot be kept is measured again next time. */
static void keep(const struct kvt_cache *cache, const char *old, const char *key,
                 const struct kvt_gpu_tuned *tuned)
{
    char path[PATH_MAX], new_path[PATH_MAX], text[BYTES_MAX + 1];
    if (!path_of(cache, "", path) || !path_of(cache, ".new", new_path))
        return;
    size_t len = compose(old, key, tuned, text);
    int file =
        open(new_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (file < 0)
        return;
    bool good = write(file, text, len) == (ssize_t)len && fsync(file) == 0;
    good = close(file) == 0 && good;
    if (!good || rename(new_path, path) != 0)
        (void)unlink(new_path);
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
    char key[KEY_MAX], text[BYTES_MAX + 1];
    if (!cache->settings->gpu_tune)
        return 0;
    if (cache->gpu_tune_runs > 0) { /* a test's: little work for a fake device */
        opts.blocks_max = 4;
        for (uint32_t i = 0; i < KVT_GPU_TUNE_SIZES; i++)
            opts.layers[i] = i + 1;
    }
    key_of(lane, key);
    (void)read_file(cache, text);
    if (find(text, key, &lane->tuned)) {
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
    keep(cache, text, key, &lane->tuned);
    describe(cache, "measured", &lane->tuned);
    return 0;
}
