/* See alloc_fail.h. The linker puts these before the C library's (--wrap, tests/CMakeLists.txt). */
#include "support/alloc_fail.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

static atomic_long countdown; /* allocations until it fails; 0 and less: see sticky */
static atomic_int armed, sticky, failed_once;

void alloc_fail_arm(long n, int from_then_on)
{
    atomic_store(&countdown, n);
    atomic_store(&sticky, from_then_on);
    atomic_store(&failed_once, 0);
    atomic_store(&armed, 1);
}

int alloc_fail_disarm(void)
{
    atomic_store(&armed, 0);
    return atomic_load(&failed_once);
}

static int fails(void)
{
    long left;

    if (!atomic_load_explicit(&armed, memory_order_relaxed))
        return 0;
    left = atomic_fetch_sub_explicit(&countdown, 1, memory_order_relaxed);
    if (left > 1 || (left < 1 && !atomic_load_explicit(&sticky, memory_order_relaxed)))
        return 0;
    atomic_store_explicit(&failed_once, 1, memory_order_relaxed);
    errno = ENOMEM;
    return 1;
}

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
char *__wrap_strdup(const char *text);

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *old, size_t bytes)
{
    return fails() ? NULL : __real_realloc(old, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    return fails() ? NULL : __real_aligned_alloc(align, bytes);
}

char *__wrap_strdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = fails() ? NULL : __real_malloc(bytes);

    return copy ? memcpy(copy, text, bytes) : NULL;
}
