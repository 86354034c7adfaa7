/* One device: driver, primary context, kernels, pinned host memory. See gpu.h.
 *
 * Invariants: the primary context is retained once and is current only inside our calls, so that we
 * live beside PyTorch and anybody else; the device is offline from the first result that says its
 * context is lost, and then nothing but release is attempted. Threads: any; the lock covers the
 * table of pinned regions.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fd.h"
#include "gpu/driver.h"
#include "gpu/gpu_internal.h"

#define CAPABILITY_MIN 80 /* the kernels use cvt.bf16x2, redux and int8 tensor instructions */

int kvt_gpu_kernels_built(void)
{
    return kvt_gpu_images_built;
}

/* Nothing on this context will ever work again. */
static int is_sticky(kvt_cu_result result)
{
    return (result >= KVT_CU_FIRST_STICKY && result <= KVT_CU_LAST_STICKY) ||
           result == KVT_CU_DEINITIALIZED || result == KVT_CU_INVALID_CONTEXT ||
           result == KVT_CU_ECC_UNCORRECTABLE || result == KVT_CU_NVLINK_UNCORRECTABLE ||
           result == KVT_CU_UNKNOWN;
}

int kvt_gpu_check(struct kvt_gpu *gpu, kvt_cu_result result)
{
    if (is_sticky(result)) {
        int fine = 0;
        atomic_compare_exchange_strong_explicit(&gpu->offline, &fine, result, memory_order_relaxed,
                                                memory_order_relaxed);
    }
    return kvt_cuda_status(result);
}

int kvt_gpu_offline(const struct kvt_gpu *gpu)
{
    return atomic_load_explicit(&gpu->offline, memory_order_relaxed) != 0;
}

const char *kvt_gpu_offline_reason(const struct kvt_gpu *gpu)
{
    int result = atomic_load_explicit(&gpu->offline, memory_order_relaxed);
    return result == 0 ? "" : kvt_cuda_error_name(&gpu->cuda, result);
}

void kvt_gpu_info(const struct kvt_gpu *gpu, struct kvt_gpu_info *info)
{
    *info = gpu->info;
}

/* Whether our context is still there: somebody else in the process may have reset the device, and
 * the driver crashes on streams and events of a context that has gone. (Who resets it while one of
 * our calls is under way is not seen.) */
static int context_is_there(struct kvt_gpu *gpu)
{
    unsigned flags = 0;
    unsigned long long id = 0;
    int active = 0;
    kvt_cu_result result = gpu->cuda.context_state(gpu->device, &flags, &active);
    if (result == KVT_CU_OK && active)
        result = gpu->cuda.context_id(gpu->context, &id);
    if (result == KVT_CU_OK && (!active || id != gpu->context_id)) {
        result = KVT_CU_CONTEXT_IS_DESTROYED;
        atomic_store_explicit(&gpu->context_gone, 1, memory_order_relaxed);
    }
    return kvt_gpu_check(gpu, result) == 0;
}

int kvt_gpu_enter(struct kvt_gpu *gpu)
{
    if (kvt_gpu_offline(gpu) || !context_is_there(gpu))
        return KVT_E_DEVICE;
    return kvt_gpu_check(gpu, gpu->cuda.context_push(gpu->context)) == 0 ? 0 : KVT_E_DEVICE;
}

int kvt_gpu_enter_to_release(struct kvt_gpu *gpu)
{
    (void)context_is_there(gpu);
    if (atomic_load_explicit(&gpu->context_gone, memory_order_relaxed))
        return KVT_E_DEVICE; /* there is nothing left to release */
    return gpu->cuda.context_push(gpu->context) == KVT_CU_OK ? 0 : KVT_E_DEVICE;
}

void kvt_gpu_leave(struct kvt_gpu *gpu)
{
    kvt_cu_context ours;
    (void)kvt_gpu_check(gpu, gpu->cuda.context_pop(&ours));
}

/* ---- open and close ---- */

static int read_info(struct kvt_gpu *gpu)
{
    const struct {
        int attribute;
        int *out;
    } wanted[] = {
        {KVT_CU_ATTR_MULTIPROCESSORS, &gpu->info.multiprocessors},
        {KVT_CU_ATTR_COPY_ENGINES, &gpu->info.copy_engines},
    };
    int major = 0, minor = 0;
    kvt_cu_result result =
        gpu->cuda.device_name(gpu->info.name, (int)sizeof(gpu->info.name), gpu->device);
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]) && result == KVT_CU_OK; i++)
        result = gpu->cuda.device_attribute(wanted[i].out, wanted[i].attribute, gpu->device);
    if (result == KVT_CU_OK)
        result = gpu->cuda.device_attribute(&major, KVT_CU_ATTR_CAPABILITY_MAJOR, gpu->device);
    if (result == KVT_CU_OK)
        result = gpu->cuda.device_attribute(&minor, KVT_CU_ATTR_CAPABILITY_MINOR, gpu->device);
    gpu->info.capability = 10 * major + minor;
    gpu->info.driver_version = gpu->cuda.version;
    return kvt_gpu_check(gpu, result);
}

static int choose_device(struct kvt_gpu *gpu, int ordinal, char *reason, size_t len)
{
    int count = 0;
    int status = kvt_gpu_check(gpu, gpu->cuda.device_count(&count));
    if (status == 0 && (ordinal < 0 || ordinal >= count)) {
        snprintf(reason, len, "there is no CUDA device %d; this process sees %d", ordinal, count);
        return KVT_E_UNSUPPORTED;
    }
    if (status == 0)
        status = kvt_gpu_check(gpu, gpu->cuda.device_get(&gpu->device, ordinal));
    if (status == 0)
        status = read_info(gpu);
    if (status != 0) {
        snprintf(reason, len, "CUDA device %d does not answer", ordinal);
        return status;
    }
    if (gpu->info.capability < CAPABILITY_MIN) {
        snprintf(reason, len, "%s has compute capability %d.%d; the kernels need 8.0",
                 gpu->info.name, gpu->info.capability / 10, gpu->info.capability % 10);
        return KVT_E_UNSUPPORTED;
    }
    gpu->ordinal = ordinal;
    return 0;
}

static int load_kernels(struct kvt_gpu *gpu, char *reason, size_t len)
{
    for (int i = 0; i < KVT_GPU_KERNELS; i++) {
        const struct kvt_gpu_image *image = &kvt_gpu_images[i];
        kvt_cu_result result = gpu->cuda.module_load(&gpu->modules[i], image->bytes);
        if (result == KVT_CU_OK)
            result = gpu->cuda.module_function(&gpu->kernels[i], gpu->modules[i], image->kernel);
        if (result == KVT_CU_OK && image->shared_bytes > 0)
            result = gpu->cuda.function_set(gpu->kernels[i], KVT_CU_FUNC_MAX_DYNAMIC_SHARED,
                                            (int)image->shared_bytes);
        if (result != KVT_CU_OK) {
            snprintf(reason, len, "kernel %s does not load on %s: %s", image->kernel,
                     gpu->info.name, kvt_cuda_error_name(&gpu->cuda, result));
            return kvt_gpu_check(gpu, result);
        }
    }
    return 0;
}

static int open_context(struct kvt_gpu *gpu, char *reason, size_t len)
{
    int greatest = 0;

    kvt_cu_result result = gpu->cuda.context_retain(&gpu->context, gpu->device);
    if (result == KVT_CU_OK) {
        result = gpu->cuda.context_id(gpu->context, &gpu->context_id);
        if (result != KVT_CU_OK)
            (void)gpu->cuda.context_release(gpu->device);
    }
    if (result != KVT_CU_OK) {
        gpu->context = NULL;
        snprintf(reason, len, "no context on %s: %s", gpu->info.name,
                 kvt_cuda_error_name(&gpu->cuda, result));
        return kvt_gpu_check(gpu, result);
    }
    int status = kvt_gpu_enter(gpu);
    if (status != 0) {
        snprintf(reason, len, "the context of %s cannot be used", gpu->info.name);
        return status;
    }
    status = kvt_gpu_check(gpu, gpu->cuda.priority_range(&gpu->least_priority, &greatest));
    if (status != 0)
        snprintf(reason, len, "%s does not tell its stream priorities", gpu->info.name);
    else
        status = load_kernels(gpu, reason, len);
    kvt_gpu_leave(gpu);
    return status;
}

int kvt_gpu_open(const struct kvt_gpu_opts *opts, struct kvt_gpu **out, char *reason,
                 size_t reason_len)
{
    char own_reason[160];
    if (reason == NULL) {
        reason = own_reason;
        reason_len = sizeof(own_reason);
    }
    if (!kvt_gpu_images_built) {
        snprintf(reason, reason_len, "no GPU kernels in this build (nvcc was not found)");
        return KVT_E_UNSUPPORTED;
    }
    struct kvt_gpu *gpu = calloc(1, sizeof(*gpu));
    if (gpu == NULL)
        return -ENOMEM;
    pthread_mutex_init(&gpu->lock, NULL);
    pthread_mutex_init(&gpu->pinning, NULL);
    pthread_rwlock_init(&gpu->queueing, NULL);
    int held[KVT_FD_LEAST]; /* the driver opens its devices */
    kvt_fd_hold(held);
    int status = kvt_cuda_load(&gpu->cuda, opts->library, reason, reason_len);
    if (status == 0)
        status = choose_device(gpu, opts->device, reason, reason_len);
    if (status == 0)
        status = open_context(gpu, reason, reason_len);
    kvt_fd_release(held);
    if (status != 0) {
        kvt_gpu_close(gpu);
        return status;
    }
    *out = gpu;
    return 0;
}

void kvt_gpu_close(struct kvt_gpu *gpu)
{
    if (gpu == NULL)
        return;
    if (gpu->context != NULL) {
        if (kvt_gpu_enter_to_release(gpu) == 0) {
            for (size_t i = 0; i < gpu->region_count; i++)
                (void)gpu->cuda.host_unregister(gpu->regions[i].host);
            for (int i = 0; i < KVT_GPU_KERNELS; i++)
                if (gpu->modules[i] != NULL)
                    (void)gpu->cuda.module_unload(gpu->modules[i]);
            kvt_gpu_leave(gpu);
        }
        if (!atomic_load_explicit(&gpu->context_gone, memory_order_relaxed))
            (void)gpu->cuda.context_release(gpu->device);
    }
    kvt_cuda_unload(&gpu->cuda);
    pthread_mutex_destroy(&gpu->lock);
    pthread_mutex_destroy(&gpu->pinning);
    pthread_rwlock_destroy(&gpu->queueing);
    free(gpu);
}

/* ---- pinned memory ---- */

/* The first region that starts behind `memory`. */
static size_t region_after(const struct kvt_gpu *gpu, const char *memory)
{
    size_t low = 0, high = gpu->region_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (gpu->regions[middle].host > memory)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static int register_region(struct kvt_gpu *gpu, void *memory, size_t bytes)
{
    kvt_cu_ptr device = 0;
    kvt_cu_result result =
        gpu->cuda.host_register(memory, bytes, KVT_CU_HOST_PORTABLE | KVT_CU_HOST_DEVICE_MAP);
    if (result != KVT_CU_OK)
        return kvt_gpu_check(gpu, result);
    result = gpu->cuda.host_device_ptr(&device, memory, 0);
    if (result != KVT_CU_OK) {
        (void)gpu->cuda.host_unregister(memory);
        return kvt_gpu_check(gpu, result);
    }
    pthread_mutex_lock(&gpu->lock);
    size_t at = region_after(gpu, memory);
    memmove(&gpu->regions[at + 1], &gpu->regions[at],
            (gpu->region_count - at) * sizeof(gpu->regions[0]));
    gpu->regions[at] = (struct kvt_gpu_region){memory, bytes, device};
    gpu->region_count++;
    pthread_mutex_unlock(&gpu->lock);
    return 0;
}

int kvt_gpu_pin(struct kvt_gpu *gpu, void *memory, size_t bytes)
{
    if (memory == NULL || bytes == 0 || (uintptr_t)memory % 4096 != 0)
        return KVT_E_INVAL;
    int status = kvt_gpu_enter(gpu);
    if (status != 0)
        return status;
    /* Registering takes long: not under the lock of those who look up. pinning keeps others out. */
    pthread_mutex_lock(&gpu->pinning);
    status = gpu->region_count == KVT_GPU_REGIONS_MAX ? KVT_E_LIMIT
                                                      : register_region(gpu, memory, bytes);
    pthread_mutex_unlock(&gpu->pinning);
    kvt_gpu_leave(gpu);
    return status;
}

/* Jobs that were queued with an address that is no longer in the table are over. Our context is
 * current. */
static void wait_for_jobs(struct kvt_gpu *gpu)
{
    pthread_rwlock_wrlock(&gpu->queueing);
    pthread_mutex_lock(&gpu->lock);
    struct kvt_gpu_stage *stage = gpu->stages;
    pthread_mutex_unlock(&gpu->lock);
    for (; stage != NULL; stage = stage->next)
        kvt_gpu_stage_sync(stage);
    pthread_rwlock_unlock(&gpu->queueing);
}

void kvt_gpu_unpin(struct kvt_gpu *gpu, void *memory)
{
    int found = 0;
    pthread_mutex_lock(&gpu->pinning);
    pthread_mutex_lock(&gpu->lock);
    size_t at = region_after(gpu, memory);
    if (at > 0 && gpu->regions[at - 1].host == memory) {
        found = 1;
        gpu->region_count--;
        memmove(&gpu->regions[at - 1], &gpu->regions[at],
                (gpu->region_count - (at - 1)) * sizeof(gpu->regions[0]));
    }
    pthread_mutex_unlock(&gpu->lock);
    if (found && kvt_gpu_enter_to_release(gpu) == 0) {
        wait_for_jobs(gpu);
        (void)kvt_gpu_check(gpu, gpu->cuda.host_unregister(memory));
        kvt_gpu_leave(gpu);
    }
    pthread_mutex_unlock(&gpu->pinning);
}

void kvt_gpu_pin_grid(struct kvt_gpu *gpu, const void *base, size_t piece_bytes)
{
    gpu->grid_base = base;
    gpu->grid_bytes = piece_bytes;
}

/* A range may span regions that lie side by side in both address spaces. */
kvt_cu_ptr kvt_gpu_pinned(struct kvt_gpu *gpu, const void *memory, size_t bytes)
{
    kvt_cu_ptr device = 0;
    const char *at = memory;
    pthread_mutex_lock(&gpu->lock);
    size_t next = region_after(gpu, at);
    if (next > 0) {
        const struct kvt_gpu_region *region = &gpu->regions[next - 1];
        size_t offset = (size_t)(at - region->host), have = 0;
        if (offset < region->bytes) {
            device = region->device + offset;
            have = region->bytes - offset;
        }
        while (device != 0 && have < bytes) {
            region = &gpu->regions[next];
            if (next == gpu->region_count || region->host != at + have ||
                region->device != device + have)
                device = 0;
            have += region->bytes;
            next++;
        }
    }
    pthread_mutex_unlock(&gpu->lock);
    return device;
}

/* ---- events ---- */

int kvt_gpu_event_new(struct kvt_gpu *gpu, void **event)
{
    int status = kvt_gpu_enter(gpu);
    if (status != 0)
        return status;
    status = kvt_gpu_check(gpu, gpu->cuda.event_create(event, KVT_CU_EVENT_DISABLE_TIMING));
    kvt_gpu_leave(gpu);
    return status;
}

void kvt_gpu_event_free(struct kvt_gpu *gpu, void *event)
{
    if (event == NULL || kvt_gpu_enter_to_release(gpu) != 0)
        return;
    (void)gpu->cuda.event_destroy(event);
    kvt_gpu_leave(gpu);
}

int kvt_gpu_event_record(struct kvt_gpu *gpu, void *event, void *stream)
{
    int status = kvt_gpu_enter(gpu);
    if (status != 0)
        return status;
    status = kvt_gpu_check(gpu, gpu->cuda.event_record(event, stream));
    kvt_gpu_leave(gpu);
    return status == 0 ? 0 : KVT_E_DEVICE;
}
