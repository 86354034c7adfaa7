/* kvtier version and build information. Thread: any. Strings are static. */
#ifndef KVTIER_VERSION_H
#define KVTIER_VERSION_H

#ifdef __cplusplus
extern "C" {
#endif

#define KVT_VERSION_MAJOR 0
#define KVT_VERSION_MINOR 1
#define KVT_VERSION_PATCH 0
#define KVT_VERSION_STRING "0.1.0"

/* Version of the loaded library, "0.1.0". */
const char *kvt_version(void);

/* Compiler, instruction sets and optional features of the loaded library, one line. */
const char *kvt_build_info(void);

#ifdef __cplusplus
}
#endif
#endif
