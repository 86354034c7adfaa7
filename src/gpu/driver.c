/* Loading the CUDA driver: see driver.h.
 *
 * The only symbol looked up by name is cuGetProcAddress_v2, which drivers have since CUDA 12.0; all
 * others come from it, for version 12.0 (one optional function for 12.8). Not done here: choosing a
 * device, contexts. The library stays loaded once the driver has started: it has threads and exit
 * handlers of its own.
 */
#include "gpu/driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kvtier/error.h"

typedef kvt_cu_result (*get_proc_fn)(const char *symbol, void **out, int version, uint64_t flags,
                                     int *status);

struct wanted {
    const char *name;
    size_t at; /* in struct kvt_cuda */
};

static const struct wanted functions[] = {
#define KVT_X(member, name, arguments) {name, offsetof(struct kvt_cuda, member)},
    KVT_CUDA_FUNCTIONS(KVT_X)
#undef KVT_X
};

int kvt_cuda_status(kvt_cu_result result)
{
    switch (result) {
    case KVT_CU_OK:
        return 0;
    case KVT_CU_OUT_OF_MEMORY:
        return -ENOMEM;
    case KVT_CU_NO_DEVICE:
    case KVT_CU_INVALID_DEVICE:
        return KVT_E_UNSUPPORTED;
    default:
        return KVT_E_DEVICE;
    }
}

const char *kvt_cuda_error_name(const struct kvt_cuda *cuda, kvt_cu_result result)
{
    const char *name = NULL;
    if (cuda->error_name == NULL || cuda->error_name(result, &name) != KVT_CU_OK || name == NULL)
        return "unknown CUDA error";
    return name;
}

static int fill_table(struct kvt_cuda *cuda, get_proc_fn get_proc, char *reason, size_t len)
{
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void *address = NULL;
        int found = 0;
        kvt_cu_result result = get_proc(functions[i].name, &address, KVT_CUDA_VERSION, 0, &found);
        if (result != KVT_CU_OK || address == NULL) {
            snprintf(reason, len, "the NVIDIA driver has no %s of CUDA 12.0; update the driver",
                     functions[i].name);
            return KVT_E_UNSUPPORTED;
        }
        memcpy((char *)cuda + functions[i].at, &address, sizeof(address));
    }
    return 0;
}

/* Optional: without it copies go one by one. */
static void find_copy_batch(struct kvt_cuda *cuda, get_proc_fn get_proc)
{
    void *address = NULL;
    int found = 0;
    if (get_proc(KVT_CUDA_BATCH_NAME, &address, KVT_CUDA_BATCH_VERSION, 0, &found) != KVT_CU_OK)
        address = NULL;
    memcpy(&cuda->copy_batch, &address, sizeof(address));
}

static int start_driver(struct kvt_cuda *cuda, char *reason, size_t len)
{
    int count = 0;
    kvt_cu_result result = cuda->init(0);
    if (result == KVT_CU_OK)
        result = cuda->driver_version(&cuda->version);
    if (result == KVT_CU_OK)
        result = cuda->device_count(&count);
    if (result == KVT_CU_NO_DEVICE || (result == KVT_CU_OK && count == 0)) {
        snprintf(reason, len, "the NVIDIA driver is there, but it shows no GPU to this process");
        return KVT_E_UNSUPPORTED;
    }
    if (result != KVT_CU_OK) {
        snprintf(reason, len, "the NVIDIA driver does not start: %s",
                 kvt_cuda_error_name(cuda, result));
        return KVT_E_DEVICE;
    }
    return 0;
}

int kvt_cuda_load(struct kvt_cuda *cuda, const char *library, char *reason, size_t reason_len)
{
    get_proc_fn get_proc;
    void *symbol;
    int status;
    memset(cuda, 0, sizeof(*cuda));
    if (reason_len > 0)
        reason[0] = '\0';
    cuda->library = dlopen(library != NULL ? library : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (cuda->library == NULL) {
        snprintf(reason, reason_len, "no NVIDIA driver on this machine (%s)", dlerror());
        return KVT_E_UNSUPPORTED;
    }
    symbol = dlsym(cuda->library, "cuGetProcAddress_v2");
    if (symbol == NULL) {
        snprintf(reason, reason_len,
                 "the NVIDIA driver is older than CUDA 12.0 (R525); update the driver");
        status = KVT_E_UNSUPPORTED;
        goto out;
    }
    memcpy(&get_proc, &symbol, sizeof(get_proc));
    status = fill_table(cuda, get_proc, reason, reason_len);
    if (status == 0) {
        find_copy_batch(cuda, get_proc);
        status = start_driver(cuda, reason, reason_len);
    }
out:
    if (status != 0)
        kvt_cuda_unload(cuda);
    return status;
}

void kvt_cuda_unload(struct kvt_cuda *cuda)
{
    if (cuda->library != NULL)
        dlclose(cuda->library);
    memset(cuda, 0, sizeof(*cuda));
}
