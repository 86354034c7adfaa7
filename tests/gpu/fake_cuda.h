/* What a test tells the fake driver (fake_cuda.c) and learns from it. Found by
 * dlsym("fake_cuda") in the same library that the code under test loads. */
#ifndef KVT_TESTS_FAKE_CUDA_H
#define KVT_TESTS_FAKE_CUDA_H

#include <stdint.h>

struct fake_cuda {
    /* set by the test */
    int version, device_count, capability, pointer_ordinal;
    const char *missing; /* a function that cuGetProcAddress does not know */
    const char *fail;    /* this function returns fail_result ... */
    int fail_after;      /* ... after so many good calls, from then on */
    int fail_result;
    int register_max;          /* more registered regions are refused; 0: any number */
    int no_batch;              /* it has no cuMemcpyBatchAsync */
    int context_gone;          /* somebody has reset the device */
    unsigned long long resets; /* so often, and has used it again since */
    uint64_t seed;             /* of the order in which streams run */
    /* told to the test */
    int pinned_version; /* the version that was asked for */
    int wrong_version;  /* calls of cuGetProcAddress for another one */
    int retained, context_depth;
    int memory, host_memory, registered, streams, events, modules; /* alive */
    int launches, copies, batches;
    int out_of_context; /* calls that need a context, made without one */
    char log[4096];     /* names of the calls, a blank between, as many as fit */
};

#endif
