/* A CUDA driver without a GPU, for tests on any machine: the functions of gpu/cuda_abi.h over host
 * memory, with the kernels replaced by the scalar codec or run by an emulator (fake_kernels.h).
 *
 * Streams really are asynchronous: operations are queued and run only when somebody asks whether an
 * event or a stream is done, one at a time, from a stream chosen at random among those whose next
 * operation may run. A missing wait between two streams therefore shows as wrong bytes. Not
 * modelled: timing, several devices' memory. Threads: any, one call at a time.
 */
#include "gpu/fake_cuda.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "gpu/cuda_abi.h"
#include "gpu/fake_kernels.h"

struct fake_cuda fake_cuda = {.version = 12040, .device_count = 1, .capability = 90};

/* ---- calls: log, injected errors, context ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int context_depth;
static int good_calls;

static int take_lock(void)
{
    return pthread_mutex_lock(&lock);
}

static void drop_lock(const int *taken)
{
    (void)taken;
    pthread_mutex_unlock(&lock);
}

static void drop_streams(void); /* of a context that is lost: what is queued never runs */

static int enter(const char *name, int needs_context)
{
    size_t used = strlen(fake_cuda.log), len = strlen(name);
    if (used + len + 2 < sizeof(fake_cuda.log)) {
        memcpy(fake_cuda.log + used, name, len);
        memcpy(fake_cuda.log + used + len, " ", 2);
    }
    if (needs_context && context_depth == 0)
        fake_cuda.out_of_context++;
    if (fake_cuda.fail == NULL)
        good_calls = 0; /* the next failure is counted from its own start */
    if (fake_cuda.fail == NULL || strcmp(fake_cuda.fail, name) != 0)
        return KVT_CU_OK;
    if (good_calls++ < fake_cuda.fail_after)
        return KVT_CU_OK;
    if (fake_cuda.fail_result >= KVT_CU_FIRST_STICKY && fake_cuda.fail_result <= KVT_CU_LAST_STICKY)
        drop_streams();
    return fake_cuda.fail_result;
}

#define ENTER(needs_context)                                                  \
    int enter_lock __attribute__((cleanup(drop_lock), unused)) = take_lock(); \
    int enter_result = enter(__func__ + 5, needs_context);                    \
    if (enter_result != KVT_CU_OK)                                            \
    return enter_result

/* ---- streams and events ---- */

enum op_kind { OP_COPY, OP_FILL, OP_LAUNCH, OP_RECORD, OP_WAIT };

struct event {
    uint64_t issued, executed;
};

struct op {
    struct op *next;
    enum op_kind kind;
    void *to;
    const void *from;
    size_t bytes;
    unsigned value;
    struct event *event;
    uint64_t count;
    struct fake_launch launch; /* of the parameter below */
    unsigned char parameter[4096];
};

struct stream {
    struct op *head, **tail;
    struct stream *next;
};

static struct stream *streams;
static int fault; /* of a kernel that ran */

static struct op *queue(struct stream *stream, enum op_kind kind)
{
    struct op *op = calloc(1, sizeof(*op));
    if (op == NULL)
        abort();
    op->kind = kind;
    *stream->tail = op;
    stream->tail = &op->next;
    return op;
}

static void drop_streams(void)
{
    for (struct stream *stream = streams; stream != NULL; stream = stream->next) {
        while (stream->head != NULL) {
            struct op *op = stream->head;
            stream->head = op->next;
            free(op);
        }
        stream->tail = &stream->head;
    }
}

static struct kvt_rng launch_seeds;

static int may_run(const struct stream *stream)
{
    const struct op *op = stream->head;
    return op != NULL && (op->kind != OP_WAIT || op->event->executed >= op->count);
}

static void run_op(struct stream *stream)
{
    struct op *op = stream->head;
    switch (op->kind) {
    case OP_COPY:
        memcpy(op->to, op->from, op->bytes);
        break;
    case OP_FILL:
        for (size_t i = 0; i < op->bytes; i++)
            memcpy((char *)op->to + 4 * i, &op->value, 4);
        break;
    case OP_LAUNCH:
        op->launch.parameter = op->parameter;
        if (fake_kernel_run(&op->launch) != 0)
            fault = KVT_CU_FIRST_STICKY;
        break;
    case OP_RECORD:
        op->event->executed = op->count;
        break;
    case OP_WAIT:
        break;
    }
    stream->head = op->next;
    if (stream->head == NULL)
        stream->tail = &stream->head;
    free(op);
}

/* One step of any stream that can make one; 0 when none can. */
static int step(void)
{
    static struct kvt_rng rng;
    struct stream *ready[64];
    size_t count = 0;
    if (fake_cuda.seed != 0) {
        rng.state = fake_cuda.seed;
        launch_seeds.state = ~fake_cuda.seed;
        fake_cuda.seed = 0;
    }
    for (struct stream *s = streams; s != NULL && count < 64; s = s->next)
        if (may_run(s))
            ready[count++] = s;
    if (count == 0)
        return 0;
    run_op(ready[kvt_rng_below(&rng, count)]);
    return 1;
}

static int fake_cuStreamCreateWithPriority(kvt_cu_stream *out, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    ENTER(1);
    struct stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        return KVT_CU_OUT_OF_MEMORY;
    stream->tail = &stream->head;
    stream->next = streams;
    streams = stream;
    fake_cuda.streams++;
    *out = stream;
    return KVT_CU_OK;
}

static int fake_cuStreamSynchronize(kvt_cu_stream handle)
{
    struct stream *stream = handle;
    ENTER(1);
    while (stream->head != NULL && step()) {
    }
    return fault;
}

static int fake_cuStreamDestroy(kvt_cu_stream handle)
{
    struct stream **at = &streams;
    ENTER(1);
    while (*at != handle)
        at = &(*at)->next;
    while ((*at)->head != NULL && step()) {
    }
    struct stream *stream = *at;
    *at = stream->next;
    free(stream);
    fake_cuda.streams--;
    return KVT_CU_OK;
}

static int fake_cuEventCreate(kvt_cu_event *out, unsigned flags)
{
    (void)flags;
    ENTER(1);
    *out = calloc(1, sizeof(struct event));
    fake_cuda.events += *out != NULL;
    return *out != NULL ? KVT_CU_OK : KVT_CU_OUT_OF_MEMORY;
}

/* A real driver lets go of an event once what is queued on it is over. */
static int fake_cuEventDestroy(kvt_cu_event handle)
{
    struct event *event = handle;
    ENTER(1);
    while (event->executed < event->issued && step()) {
    }
    for (struct stream *stream = streams; stream != NULL; stream = stream->next)
        for (struct op *op = stream->head; op != NULL; op = op->next)
            if (op->event == event) {
                op->kind = OP_FILL; /* of nothing */
                op->bytes = 0;
            }
    free(event);
    fake_cuda.events--;
    return KVT_CU_OK;
}

static int fake_cuEventRecord(kvt_cu_event handle, kvt_cu_stream stream)
{
    struct event *event = handle;
    ENTER(1);
    struct op *op = queue(stream, OP_RECORD);
    op->event = event;
    op->count = ++event->issued;
    return KVT_CU_OK;
}

static int fake_cuStreamWaitEvent(kvt_cu_stream stream, kvt_cu_event handle, unsigned flags)
{
    struct event *event = handle;
    (void)flags;
    ENTER(1);
    struct op *op = queue(stream, OP_WAIT);
    op->event = event;
    op->count = event->issued;
    return KVT_CU_OK;
}

static int fake_cuEventQuery(kvt_cu_event handle)
{
    struct event *event = handle;
    ENTER(1);
    step();
    if (fault != 0)
        return fault;
    return event->executed == event->issued ? KVT_CU_OK : KVT_CU_NOT_READY;
}

static int fake_cuEventSynchronize(kvt_cu_event handle)
{
    struct event *event = handle;
    ENTER(1);
    while (event->executed < event->issued && step()) {
    }
    return fault != 0 ? fault : event->executed == event->issued ? KVT_CU_OK : KVT_CU_NOT_READY;
}

/* ---- memory ---- */

struct allocation {
    struct allocation *next;
    char *memory;
    size_t bytes;
};

static struct allocation *allocations;

static int fake_cuMemAlloc(kvt_cu_ptr *out, size_t bytes)
{
    ENTER(1);
    struct allocation *a = calloc(1, sizeof(*a));
    if (a == NULL || (a->memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)) == NULL) {
        free(a);
        return KVT_CU_OUT_OF_MEMORY;
    }
    memset(a->memory, 0xa5, bytes);
    a->bytes = bytes;
    a->next = allocations;
    allocations = a;
    fake_cuda.memory++;
    *out = (uintptr_t)a->memory;
    return KVT_CU_OK;
}

static int fake_cuMemFree(kvt_cu_ptr memory)
{
    ENTER(1);
    for (struct allocation **at = &allocations; *at != NULL; at = &(*at)->next) {
        struct allocation *a = *at;
        if ((uintptr_t)a->memory != memory)
            continue;
        *at = a->next;
        free(a->memory);
        free(a);
        fake_cuda.memory--;
        return KVT_CU_OK;
    }
    return KVT_CU_INVALID_VALUE;
}

static int fake_cuPointerGetAttribute(void *out, int attribute, kvt_cu_ptr pointer)
{
    ENTER(1);
    for (struct allocation *a = allocations; a != NULL; a = a->next)
        if (pointer >= (uintptr_t)a->memory && pointer < (uintptr_t)a->memory + a->bytes) {
            *(int *)out = attribute == KVT_CU_POINTER_MEMORY_TYPE ? KVT_CU_MEMORY_TYPE_DEVICE
                                                                  : fake_cuda.pointer_ordinal;
            return KVT_CU_OK;
        }
    return KVT_CU_INVALID_VALUE;
}

static int fake_cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    (void)flags;
    ENTER(1);
    *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    fake_cuda.host_memory += *out != NULL;
    return *out != NULL ? KVT_CU_OK : KVT_CU_OUT_OF_MEMORY;
}

static int fake_cuMemFreeHost(void *memory)
{
    ENTER(1);
    free(memory);
    fake_cuda.host_memory--;
    return KVT_CU_OK;
}

/* Registered memory: a copy may lie in one region or in none, as with the real one. */
static struct {
    const char *host;
    size_t bytes;
} regions[512];
static size_t region_count;

static int fake_cuMemHostRegister(void *memory, size_t bytes, unsigned flags)
{
    (void)flags;
    ENTER(1);
    if (fake_cuda.register_max > 0 && fake_cuda.registered >= fake_cuda.register_max)
        return KVT_CU_OUT_OF_MEMORY;
    fake_cuda.registered++;
    if (region_count < sizeof(regions) / sizeof(regions[0])) {
        regions[region_count].host = memory;
        regions[region_count++].bytes = bytes;
    }
    return KVT_CU_OK;
}

static int fake_cuMemHostUnregister(void *memory)
{
    ENTER(1);
    fake_cuda.registered--;
    for (size_t i = 0; i < region_count; i++)
        if (regions[i].host == memory) {
            regions[i] = regions[--region_count];
            break;
        }
    return KVT_CU_OK;
}

static int crosses_seam(uintptr_t host, size_t bytes)
{
    for (size_t i = 0; i < region_count; i++) {
        uintptr_t first = (uintptr_t)regions[i].host, end = first + regions[i].bytes;
        if (host < end && host + bytes > first)
            return host < first || host + bytes > end;
    }
    return 0;
}

static int fake_cuMemHostGetDevicePointer(kvt_cu_ptr *out, void *memory, unsigned flags)
{
    (void)flags;
    ENTER(1);
    *out = (uintptr_t)memory;
    return KVT_CU_OK;
}

static int copy(kvt_cu_ptr to, uintptr_t from, size_t bytes, kvt_cu_stream stream)
{
    if (crosses_seam(to, bytes) || crosses_seam(from, bytes))
        return KVT_CU_INVALID_VALUE;
    struct op *op = queue(stream, OP_COPY);
    op->to = (void *)(uintptr_t)to;
    op->from = (const void *)from;
    op->bytes = bytes;
    fake_cuda.copies++;
    return KVT_CU_OK;
}

static int fake_cuMemcpyHtoDAsync(kvt_cu_ptr to, const void *from, size_t bytes,
                                  kvt_cu_stream stream)
{
    ENTER(1);
    return copy(to, (uintptr_t)from, bytes, stream);
}

static int fake_cuMemcpyDtoHAsync(void *to, kvt_cu_ptr from, size_t bytes, kvt_cu_stream stream)
{
    ENTER(1);
    return copy((uintptr_t)to, (uintptr_t)from, bytes, stream);
}

static int fake_cuMemcpyBatchAsync(kvt_cu_ptr *to, kvt_cu_ptr *from, size_t *bytes, size_t count,
                                   struct kvt_cu_copy_attributes *attributes, size_t *starts,
                                   size_t attribute_count, size_t *failed, kvt_cu_stream stream)
{
    ENTER(1);
    if (count == 0 || attribute_count != 1 || starts[0] != 0 || attributes->source_order != 1 ||
        stream == NULL)
        return KVT_CU_INVALID_VALUE;
    *failed = SIZE_MAX;
    fake_cuda.batches++;
    for (size_t i = 0; i < count; i++)
        if (copy(to[i], (uintptr_t)from[i], bytes[i], stream) != KVT_CU_OK)
            return KVT_CU_INVALID_VALUE;
    return KVT_CU_OK;
}

static int fake_cuMemsetD32Async(kvt_cu_ptr to, unsigned value, size_t count, kvt_cu_stream stream)
{
    ENTER(1);
    struct op *op = queue(stream, OP_FILL);
    op->to = (void *)(uintptr_t)to;
    op->value = value;
    op->bytes = count;
    return KVT_CU_OK;
}

/* ---- the rest ---- */

static int fake_cuInit(unsigned flags)
{
    (void)flags;
    ENTER(0);
    return KVT_CU_OK;
}

static int fake_cuDriverGetVersion(int *version)
{
    ENTER(0);
    *version = fake_cuda.version;
    return KVT_CU_OK;
}

static int fake_cuGetErrorName(kvt_cu_result result, const char **name)
{
    *name = result == KVT_CU_FIRST_STICKY           ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : result == KVT_CU_CONTEXT_IS_DESTROYED ? "CUDA_ERROR_CONTEXT_IS_DESTROYED"
                                                    : "CUDA_ERROR_FAKE";
    return KVT_CU_OK;
}

static int fake_cuDeviceGetCount(int *count)
{
    ENTER(0);
    *count = fake_cuda.device_count;
    return KVT_CU_OK;
}

static int fake_cuDeviceGet(kvt_cu_device *device, int ordinal)
{
    ENTER(0);
    *device = ordinal;
    return KVT_CU_OK;
}

static int fake_cuDeviceGetName(char *name, int len, kvt_cu_device device)
{
    (void)device;
    ENTER(0);
    snprintf(name, (size_t)len, "Fake GPU");
    return KVT_CU_OK;
}

static int fake_cuDeviceGetPCIBusId(char *text, int len, kvt_cu_device device)
{
    ENTER(0);
    snprintf(text, (size_t)len, "0000:AB:%02X.0", (unsigned)device);
    return KVT_CU_OK;
}

static int fake_cuDeviceGetAttribute(int *value, int attribute, kvt_cu_device device)
{
    (void)device;
    ENTER(0);
    *value = attribute == KVT_CU_ATTR_CAPABILITY_MAJOR   ? fake_cuda.capability / 10
             : attribute == KVT_CU_ATTR_CAPABILITY_MINOR ? fake_cuda.capability % 10
             : attribute == KVT_CU_ATTR_COPY_ENGINES     ? 3
                                                         : 132;
    return KVT_CU_OK;
}

static int fake_cuDevicePrimaryCtxRetain(kvt_cu_context *context, kvt_cu_device device)
{
    (void)device;
    ENTER(0);
    fake_cuda.retained++;
    *context = &fake_cuda;
    return KVT_CU_OK;
}

static int fake_cuDevicePrimaryCtxRelease(kvt_cu_device device)
{
    (void)device;
    ENTER(0);
    fake_cuda.retained--;
    return KVT_CU_OK;
}

static int fake_cuDevicePrimaryCtxGetState(kvt_cu_device device, unsigned *flags, int *active)
{
    (void)device;
    ENTER(0);
    *flags = 0;
    if (fake_cuda.context_gone || fake_cuda.resets > 0)
        drop_streams();
    *active = fake_cuda.retained > 0 && !fake_cuda.context_gone;
    return KVT_CU_OK;
}

static int fake_cuCtxGetId(kvt_cu_context context, unsigned long long *id)
{
    (void)context;
    ENTER(0);
    *id = 7 + fake_cuda.resets;
    return KVT_CU_OK;
}

static int fake_cuCtxPushCurrent(kvt_cu_context context)
{
    (void)context;
    ENTER(0);
    fake_cuda.context_depth++;
    context_depth++;
    return KVT_CU_OK;
}

static int fake_cuCtxPopCurrent(kvt_cu_context *context)
{
    ENTER(1);
    fake_cuda.context_depth--;
    context_depth--;
    *context = &fake_cuda;
    return KVT_CU_OK;
}

static int fake_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER(1);
    *least = 0;
    *greatest = -5;
    return KVT_CU_OK;
}

static int fake_cuModuleLoadData(kvt_cu_module *module, const void *image)
{
    (void)image;
    ENTER(1);
    fake_cuda.modules++;
    *module = &fake_cuda;
    return KVT_CU_OK;
}

static int fake_cuModuleUnload(kvt_cu_module module)
{
    (void)module;
    ENTER(1);
    fake_cuda.modules--;
    return KVT_CU_OK;
}

static int fake_cuModuleGetFunction(kvt_cu_function *function, kvt_cu_module module,
                                    const char *name)
{
    (void)module;
    ENTER(1);
    *function = (void *)(uintptr_t)name; /* a literal of the code under test */
    return KVT_CU_OK;
}

static int fake_cuFuncSetAttribute(kvt_cu_function function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    ENTER(1);
    return KVT_CU_OK;
}

static int fake_cuLaunchKernel(kvt_cu_function function, unsigned gx, unsigned gy, unsigned gz,
                               unsigned bx, unsigned by, unsigned bz, unsigned shared,
                               kvt_cu_stream stream, void **parameters, void **extra)
{
    (void)gy, (void)gz, (void)by, (void)bz, (void)extra;
    ENTER(1);
    if (gx == 0 || bx == 0)
        return KVT_CU_INVALID_VALUE;
    struct op *op = queue(stream, OP_LAUNCH);
    op->launch = (struct fake_launch){.kernel = function,
                                      .grid = gx,
                                      .block = bx,
                                      .shared_bytes = shared,
                                      .seed = kvt_rng_next(&launch_seeds)};
    memcpy(op->parameter, parameters[0], fake_kernel_parameter_bytes(function));
    fake_cuda.launches++;
    return KVT_CU_OK;
}

/* ---- the door ---- */

static const struct {
    const char *name;
    void (*function)(void);
} known[] = {
#define KVT_X(member, name, arguments) {name, NULL},
    KVT_CUDA_FUNCTIONS(KVT_X)
#undef KVT_X
};

/* In the order of KVT_CUDA_FUNCTIONS: the compiler checks each type against the table. */
static struct kvt_cuda table = {
    .init = fake_cuInit,
    .driver_version = fake_cuDriverGetVersion,
    .error_name = fake_cuGetErrorName,
    .device_count = fake_cuDeviceGetCount,
    .device_get = fake_cuDeviceGet,
    .device_name = fake_cuDeviceGetName,
    .device_bus = fake_cuDeviceGetPCIBusId,
    .device_attribute = fake_cuDeviceGetAttribute,
    .context_retain = fake_cuDevicePrimaryCtxRetain,
    .context_release = fake_cuDevicePrimaryCtxRelease,
    .context_state = fake_cuDevicePrimaryCtxGetState,
    .context_id = fake_cuCtxGetId,
    .context_push = fake_cuCtxPushCurrent,
    .context_pop = fake_cuCtxPopCurrent,
    .priority_range = fake_cuCtxGetStreamPriorityRange,
    .module_load = fake_cuModuleLoadData,
    .module_unload = fake_cuModuleUnload,
    .module_function = fake_cuModuleGetFunction,
    .function_set = fake_cuFuncSetAttribute,
    .launch = fake_cuLaunchKernel,
    .memory_alloc = fake_cuMemAlloc,
    .memory_free = fake_cuMemFree,
    .host_alloc = fake_cuMemHostAlloc,
    .host_free = fake_cuMemFreeHost,
    .host_register = fake_cuMemHostRegister,
    .host_unregister = fake_cuMemHostUnregister,
    .host_device_ptr = fake_cuMemHostGetDevicePointer,
    .pointer_attribute = fake_cuPointerGetAttribute,
    .copy_to_device_async = fake_cuMemcpyHtoDAsync,
    .copy_to_host_async = fake_cuMemcpyDtoHAsync,
    .fill_words_async = fake_cuMemsetD32Async,
    .stream_create = fake_cuStreamCreateWithPriority,
    .stream_destroy = fake_cuStreamDestroy,
    .stream_wait = fake_cuStreamWaitEvent,
    .stream_sync = fake_cuStreamSynchronize,
    .event_create = fake_cuEventCreate,
    .event_destroy = fake_cuEventDestroy,
    .event_record = fake_cuEventRecord,
    .event_query = fake_cuEventQuery,
    .event_sync = fake_cuEventSynchronize,
};

#ifdef FAKE_CUDA_OLD /* a driver from before CUDA 12.0 */
#define DOOR cuGetProcAddress
#else
#define DOOR cuGetProcAddress_v2
#endif

int DOOR(const char *symbol, void **out, int version, uint64_t flags, int *status);

int DOOR(const char *symbol, void **out, int version, uint64_t flags, int *status)
{
    (void)flags;
    good_calls = 0;
    fault = 0;
    *out = NULL;
    *status = 1;
    if (strcmp(symbol, KVT_CUDA_BATCH_NAME) == 0) {
        kvt_cu_copy_batch_fn batch = fake_cuMemcpyBatchAsync;
        if (fake_cuda.no_batch || version != KVT_CUDA_BATCH_VERSION)
            return KVT_CU_NOT_FOUND;
        memcpy(out, &batch, sizeof(*out));
        return KVT_CU_OK;
    }
    fake_cuda.pinned_version = version;
    fake_cuda.wrong_version += version != KVT_CUDA_VERSION;
    if (fake_cuda.missing != NULL && strcmp(symbol, fake_cuda.missing) == 0)
        return KVT_CU_NOT_FOUND;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strcmp(known[i].name, symbol) == 0) {
            memcpy(out, (char *)&table + offsetof(struct kvt_cuda, init) + i * sizeof(void *),
                   sizeof(*out));
            *status = 0;
            return KVT_CU_OK;
        }
    return KVT_CU_NOT_FOUND;
}
