/* Version and build information of the loaded library. Threads: any; constants only. */
#include "kvtier/version.h"

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

#if defined(__x86_64__)
#define MACHINE "x86-64"
#elif defined(__aarch64__)
#define MACHINE "aarch64"
#else
#define MACHINE "other"
#endif

#if defined(__OPTIMIZE__)
#define OPTIMISED "optimised"
#else
#define OPTIMISED "not optimised"
#endif

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZER ", address sanitizer"
#elif defined(__SANITIZE_THREAD__)
#define SANITIZER ", thread sanitizer"
#else
#define SANITIZER ""
#endif

#if defined(KVT_HAVE_URING)
#define IO "posix uring mem"
#else
#define IO "posix mem"
#endif

const char *kvt_version(void)
{
    return KVT_VERSION_STRING;
}

const char *kvt_build_info(void)
{
    return "kvtier " KVT_VERSION_STRING ", " MACHINE ", " COMPILER ", " OPTIMISED
           ", io: " IO SANITIZER;
}
