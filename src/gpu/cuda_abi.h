/* The part of the CUDA driver's binary interface that we use, declared by ourselves: the library
 * builds without CUDA, and loads libcuda.so.1 at run time.
 *
 * One table, filled through cuGetProcAddress for CUDA 12.0: a newer driver then gives the functions
 * with the signatures of 12.0, whatever it calls them today. CUDA_VERSION below is that pin.
 */
#ifndef KVT_GPU_CUDA_ABI_H
#define KVT_GPU_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

#define KVT_CUDA_VERSION 12000

typedef int kvt_cu_result; /* CUresult */
typedef int kvt_cu_device;
typedef uint64_t kvt_cu_ptr;
typedef void *kvt_cu_context;
typedef void *kvt_cu_module;
typedef void *kvt_cu_function;
typedef void *kvt_cu_stream;
typedef void *kvt_cu_event;

enum { /* the results that we tell apart */
       KVT_CU_OK = 0,
       KVT_CU_INVALID_VALUE = 1,
       KVT_CU_OUT_OF_MEMORY = 2,
       KVT_CU_DEINITIALIZED = 4, /* the process is ending */
       KVT_CU_NO_DEVICE = 100,
       KVT_CU_INVALID_DEVICE = 101,
       KVT_CU_INVALID_CONTEXT = 201, /* somebody reset the primary context */
       KVT_CU_ECC_UNCORRECTABLE = 214,
       KVT_CU_NVLINK_UNCORRECTABLE = 220,
       KVT_CU_NOT_FOUND = 500,
       KVT_CU_NOT_READY = 600,
       KVT_CU_CONTEXT_IS_DESTROYED = 709,
       KVT_CU_FIRST_STICKY = 700, /* from here to 720: the context is broken for good */
       KVT_CU_LAST_STICKY = 720,
       KVT_CU_UNKNOWN = 999,
};

enum {
    KVT_CU_STREAM_NON_BLOCKING = 1,
    KVT_CU_EVENT_BLOCKING_SYNC = 1,
    KVT_CU_EVENT_DISABLE_TIMING = 2,
    KVT_CU_HOST_PORTABLE = 1, /* cuMemHostAlloc and cuMemHostRegister alike */
    KVT_CU_HOST_DEVICE_MAP = 2,
    KVT_CU_FUNC_MAX_DYNAMIC_SHARED = 8,
    KVT_CU_POINTER_MEMORY_TYPE = 2,
    KVT_CU_POINTER_DEVICE_ORDINAL = 9,
    KVT_CU_MEMORY_TYPE_DEVICE = 2,
    KVT_CU_ATTR_MULTIPROCESSORS = 16,
    KVT_CU_ATTR_COPY_ENGINES = 40,
    KVT_CU_ATTR_CAPABILITY_MAJOR = 75,
    KVT_CU_ATTR_CAPABILITY_MINOR = 76,
    KVT_CU_ATTR_SHARED_OPTIN = 97,
};

/* X(member, name, arguments): every function of the table. */
#define KVT_CUDA_FUNCTIONS(X)                                                                      \
    X(init, "cuInit", (unsigned flags))                                                            \
    X(driver_version, "cuDriverGetVersion", (int *version))                                        \
    X(error_name, "cuGetErrorName", (kvt_cu_result result, const char **name))                     \
    X(device_count, "cuDeviceGetCount", (int *count))                                              \
    X(device_get, "cuDeviceGet", (kvt_cu_device * device, int ordinal))                            \
    X(device_name, "cuDeviceGetName", (char *name, int len, kvt_cu_device device))                 \
    X(device_bus, "cuDeviceGetPCIBusId", (char *text, int len, kvt_cu_device device))              \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, kvt_cu_device device)) \
    X(context_retain, "cuDevicePrimaryCtxRetain",                                                  \
      (kvt_cu_context * context, kvt_cu_device device))                                            \
    X(context_release, "cuDevicePrimaryCtxRelease", (kvt_cu_device device))                        \
    X(context_state, "cuDevicePrimaryCtxGetState",                                                 \
      (kvt_cu_device device, unsigned *flags, int *active))                                        \
    X(context_id, "cuCtxGetId", (kvt_cu_context context, unsigned long long *id))                  \
    X(context_push, "cuCtxPushCurrent", (kvt_cu_context context))                                  \
    X(context_pop, "cuCtxPopCurrent", (kvt_cu_context * context))                                  \
    X(priority_range, "cuCtxGetStreamPriorityRange", (int *least, int *greatest))                  \
    X(module_load, "cuModuleLoadData", (kvt_cu_module * module, const void *image))                \
    X(module_unload, "cuModuleUnload", (kvt_cu_module module))                                     \
    X(module_function, "cuModuleGetFunction",                                                      \
      (kvt_cu_function * function, kvt_cu_module module, const char *name))                        \
    X(function_set, "cuFuncSetAttribute", (kvt_cu_function function, int attribute, int value))    \
    X(launch, "cuLaunchKernel",                                                                    \
      (kvt_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,                \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,                \
       kvt_cu_stream stream, void **parameters, void **extra))                                     \
    X(memory_alloc, "cuMemAlloc", (kvt_cu_ptr * out, size_t bytes))                                \
    X(memory_free, "cuMemFree", (kvt_cu_ptr memory))                                               \
    X(host_alloc, "cuMemHostAlloc", (void **out, size_t bytes, unsigned flags))                    \
    X(host_free, "cuMemFreeHost", (void *memory))                                                  \
    X(host_register, "cuMemHostRegister", (void *memory, size_t bytes, unsigned flags))            \
    X(host_unregister, "cuMemHostUnregister", (void *memory))                                      \
    X(host_device_ptr, "cuMemHostGetDevicePointer",                                                \
      (kvt_cu_ptr * out, void *memory, unsigned flags))                                            \
    X(pointer_attribute, "cuPointerGetAttribute", (void *out, int attribute, kvt_cu_ptr pointer))  \
    X(copy_to_device_async, "cuMemcpyHtoDAsync",                                                   \
      (kvt_cu_ptr to, const void *from, size_t bytes, kvt_cu_stream stream))                       \
    X(copy_to_host_async, "cuMemcpyDtoHAsync",                                                     \
      (void *to, kvt_cu_ptr from, size_t bytes, kvt_cu_stream stream))                             \
    X(fill_words_async, "cuMemsetD32Async",                                                        \
      (kvt_cu_ptr to, unsigned value, size_t count, kvt_cu_stream stream))                         \
    X(stream_create, "cuStreamCreateWithPriority",                                                 \
      (kvt_cu_stream * stream, unsigned flags, int priority))                                      \
    X(stream_destroy, "cuStreamDestroy", (kvt_cu_stream stream))                                   \
    X(stream_wait, "cuStreamWaitEvent",                                                            \
      (kvt_cu_stream stream, kvt_cu_event event, unsigned flags))                                  \
    X(stream_sync, "cuStreamSynchronize", (kvt_cu_stream stream))                                  \
    X(event_create, "cuEventCreate", (kvt_cu_event * event, unsigned flags))                       \
    X(event_destroy, "cuEventDestroy", (kvt_cu_event event))                                       \
    X(event_record, "cuEventRecord", (kvt_cu_event event, kvt_cu_stream stream))                   \
    X(event_query, "cuEventQuery", (kvt_cu_event event))                                           \
    X(event_sync, "cuEventSynchronize", (kvt_cu_event event))

/* Several copies in one call: from CUDA 12.8 on, hence optional. The signature is that
 * of 12.8; 13.0 has another one under the same name. */
#define KVT_CUDA_BATCH_NAME "cuMemcpyBatchAsync"
#define KVT_CUDA_BATCH_VERSION 12080

struct kvt_cu_location {
    int type, id; /* 0: unspecified */
};

struct kvt_cu_copy_attributes {
    int source_order; /* 1: in stream order */
    struct kvt_cu_location source, destination;
    unsigned flags; /* 1: leave the SMs alone where possible */
};

typedef kvt_cu_result (*kvt_cu_copy_batch_fn)(kvt_cu_ptr *to, kvt_cu_ptr *from, size_t *bytes,
                                              size_t count,
                                              struct kvt_cu_copy_attributes *attributes,
                                              size_t *attribute_starts, size_t attribute_count,
                                              size_t *failed, kvt_cu_stream stream);

struct kvt_cuda {
    void *library;                   /* of dlopen() */
    kvt_cu_copy_batch_fn copy_batch; /* NULL: the driver has none */
    int version;                     /* of the driver: 13000 is 13.0 */
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration */
#define KVT_X(member, name, arguments) kvt_cu_result(*member) arguments;
    KVT_CUDA_FUNCTIONS(KVT_X)
#undef KVT_X
};

#endif
