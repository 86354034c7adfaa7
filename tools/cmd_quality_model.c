/* kvtier quality: a model whose weights are float32.
 *
 * Quantised weights meet 8-bit activations in llama.cpp: the last bit of a cache entry then changes
 * a logit far more than a codec of 8 bits does, and the table would show the weights. So they are
 * dequantised once into the cache directory, under the digest of the model. The copy gets its name
 * when it is whole; what an earlier run left half done is removed.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <gguf.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "adapters/llama_digest.h"
#include "cli.h"
#include "quality.h"

#define PART_SUFFIX ".part"

/* Bytes of all tensors as float32 and whether they are that already; -1: not readable. */
static int weigh(const char *model, uint64_t *bytes, int *is_float)
{
    struct ggml_context *tensors = NULL;
    struct gguf_init_params params = {.no_alloc = true, .ctx = &tensors};
    struct gguf_context *gguf = gguf_init_from_file(model, params);

    if (gguf == NULL)
        return -1;
    *bytes = 0;
    *is_float = 1;
    for (struct ggml_tensor *t = ggml_get_first_tensor(tensors); t != NULL;
         t = ggml_get_next_tensor(tensors, t)) {
        *bytes += (uint64_t)ggml_nelements(t) * sizeof(float);
        *is_float &= t->type == GGML_TYPE_F32;
    }
    ggml_free(tensors);
    gguf_free(gguf);
    return 0;
}

/* Remove "NAME.PID.part" of processes that are gone. */
static void remove_parts(const char *dir)
{
    DIR *list = opendir(dir);
    struct dirent *entry;

    if (list == NULL)
        return;
    while ((entry = readdir(list)) != NULL) {
        const size_t len = strlen(entry->d_name), tail = strlen(PART_SUFFIX);
        if (len <= tail || strcmp(entry->d_name + len - tail, PART_SUFFIX) != 0)
            continue;
        const char *dot = entry->d_name + len - tail;
        while (dot > entry->d_name && dot[-1] >= '0' && dot[-1] <= '9')
            dot--;
        const long pid = strtol(dot, NULL, 10);
        if (pid > 0 && kill((pid_t)pid, 0) != 0 && errno == ESRCH)
            (void)unlinkat(dirfd(list), entry->d_name, 0);
    }
    closedir(list);
}

static int check_room(const char *dir, uint64_t bytes)
{
    struct statvfs fs;
    char need[32], have[32];

    if (statvfs(dir, &fs) != 0)
        return 0;
    const uint64_t room = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (room > bytes + bytes / 16)
        return 0;
    kvt_cli_error("quality",
                  "the model's weights as float32 take %s, %s has room for %s; --as-is measures "
                  "with the weights as they are",
                  kvt_human_bytes(bytes, need), dir, kvt_human_bytes(room, have));
    return -1;
}

/* Write `path`, whole or not at all. */
static int dequantise(const struct quality_config *config, const char *path)
{
    struct llama_model_quantize_params params = llama_model_quantize_default_params();
    char part[PATH_MAX + 32];
    struct kvt_progress progress;

    snprintf(part, sizeof(part), "%s.%ld" PART_SUFFIX, path, (long)getpid());
    params.nthread = (int32_t)config->threads;
    params.ftype = LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    kvt_progress_start(&progress, "dequantising the weights, once");
    kvt_progress_update(&progress, 0, 1);
    const uint32_t failed = llama_model_quantize(config->model, part, &params);
    kvt_progress_done(&progress);
    int rc = failed == 0 && !kvt_cli_interrupted() ? 0 : -1;
    if (rc == 0 && rename(part, path) != 0)
        rc = -1;
    if (rc != 0) {
        (void)unlink(part);
        if (!kvt_cli_interrupted())
            kvt_cli_error("quality",
                          "llama.cpp could not dequantise %s; --as-is measures with "
                          "the weights as they are",
                          config->model);
    }
    return rc;
}

int quality_model(const struct quality_config *config, const struct demo_paths *paths,
                  char path[PATH_MAX])
{
    char digest[KVT_DIGEST_HEX + 1], reason[512], dir[PATH_MAX - 32];
    uint64_t bytes = 0;
    int is_float = 0;

    if (kvt_llama_check_file(config->model, reason, sizeof(reason)) != 0) {
        kvt_cli_error("quality", "%s", reason);
        return -1;
    }
    snprintf(path, PATH_MAX, "%s", config->model);
    if (config->as_is)
        return 0;
    if (weigh(config->model, &bytes, &is_float) != 0) {
        kvt_cli_error("quality", "llama.cpp cannot read the tensors of %s", config->model);
        return -1;
    }
    if (is_float)
        return 0;
    int rc = kvt_model_digest(config->model, paths->digests, digest);
    if (rc != 0) {
        kvt_cli_error("quality", "cannot read %s: %s", config->model, kvt_strerror(rc));
        return -1;
    }
    int n = snprintf(dir, sizeof(dir), "%s/quality", paths->cache);
    if (n < 0 || (size_t)n >= sizeof(dir)) {
        kvt_cli_error("quality", "the path of the cache directory is too long");
        return -1;
    }
    (void)mkdir(paths->cache, 0777);
    if (mkdir(dir, 0700) != 0 && errno != EEXIST) {
        kvt_cli_error("quality", "cannot make %s: %m", dir);
        return -1;
    }
    remove_parts(dir);
    n = snprintf(path, PATH_MAX, "%s/%.16s-f32.gguf", dir, digest);
    if (n < 0 || n >= PATH_MAX)
        return -1;
    if (access(path, R_OK) == 0 && kvt_llama_check_file(path, reason, sizeof(reason)) == 0)
        return 0;
    return check_room(dir, bytes) == 0 ? dequantise(config, path) : -1;
}
