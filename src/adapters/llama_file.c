/* Is a GGUF file whole? Its tensor table against its size, before any weight is read.
 * A truncated file loads far enough elsewhere to fail late, or with a message about a tensor.
 * Threads: any. llama.cpp's own parser reads the table; nothing of the format is known here.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <kvtier/llama.h>

#include <gguf.h>

#include "base/fd.h"

#define GGUF_MAGIC "GGUF"

static int check_magic(const char *path, uint64_t *size, char *error, size_t error_len)
{
    char magic[4];
    struct stat st;
    int rc = 0;
    FILE *file = kvt_fd_fopen(path);

    if (file == NULL || fstat(fileno(file), &st) != 0) {
        rc = -errno;
        snprintf(error, error_len, "%s: %s", path, strerror(-rc));
    } else if (!S_ISREG(st.st_mode)) {
        rc = KVT_E_UNSUPPORTED;
        snprintf(error, error_len, "%s is not a file", path);
    } else if (fread(magic, 1, sizeof(magic), file) != sizeof(magic) ||
               memcmp(magic, GGUF_MAGIC, sizeof(magic)) != 0) {
        rc = KVT_E_UNSUPPORTED;
        snprintf(error, error_len, "%s is not a GGUF file", path);
    }
    if (rc == 0)
        *size = (uint64_t)st.st_size;
    if (file != NULL)
        fclose(file);
    return rc;
}

int kvt_llama_check_file(const char *model_path, char *error, size_t error_len)
{
    const struct gguf_init_params params = {.no_alloc = true, .ctx = NULL};
    uint64_t size = 0, need = 0;
    char sink[1];

    if (error == NULL || error_len == 0) {
        error = sink;
        error_len = sizeof(sink);
    }
    error[0] = '\0';
    if (model_path == NULL)
        return KVT_E_INVAL;
    int rc = check_magic(model_path, &size, error, error_len);
    if (rc != 0)
        return rc;
    struct gguf_context *gguf = gguf_init_from_file(model_path, params);
    if (gguf == NULL) {
        snprintf(
            error, error_len,
            "%s: the tensor table cannot be read: the file is truncated, damaged, or of a GGUF "
            "version or tensor type that this llama.cpp does not know",
            model_path);
        return KVT_E_CORRUPT;
    }
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); i++) {
        uint64_t end;
        if (__builtin_add_overflow((uint64_t)gguf_get_tensor_offset(gguf, i),
                                   (uint64_t)gguf_get_tensor_size(gguf, i), &end))
            end = UINT64_MAX / 2;
        if (end > need)
            need = end;
    }
    need += gguf_get_data_offset(gguf);
    const int64_t tensors = gguf_get_n_tensors(gguf);
    gguf_free(gguf);
    if (need > size) {
        snprintf(error, error_len, "%s is truncated: it has %llu bytes, its %lld tensors need %llu",
                 model_path, (unsigned long long)size, (long long)tensors,
                 (unsigned long long)need);
        return KVT_E_CORRUPT;
    }
    return 0;
}
