/* Error codes to text. One list (KVT_ERRORS) makes everything here. Threads: any; no state but a
 * thread-local buffer for strerror_r(). */
#include "kvtier/error.h"

#include <stddef.h>
#include <string.h>

const char *kvt_strerror(int code)
{
    static _Thread_local char buffer[128];

    if (code >= 0)
        return "success";
    switch (code) {
#define KVT_X(name, value, text) \
    case value:                  \
        return text;
        KVT_ERRORS(KVT_X)
#undef KVT_X
    default:
        break;
    }
    if (code < -4095) /* beyond what Linux uses for errno */
        return "unknown kvtier error";
    return strerror_r(-code, buffer, sizeof buffer);
}

const char *kvt_error_name(int code)
{
    switch (code) {
#define KVT_X(name, value, text) \
    case value:                  \
        return #name;
        KVT_ERRORS(KVT_X)
#undef KVT_X
    default:
        return NULL;
    }
}
