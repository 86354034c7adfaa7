/* kvtier errors: one list makes the codes, the strings, the documentation and the Python enum.
 *
 * Rule: a function returns 0 or a positive result on success and a negative number on failure:
 * a -errno of the system, or one of the codes below (all under -5000, so that the two never meet).
 * A miss is a result, never an error.
 * Thread: any. Lifetime: strings are static.
 */
#ifndef KVTIER_ERROR_H
#define KVTIER_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, "what it means and what to do") */
#define KVT_ERRORS(X)                                                                            \
    X(KVT_E_INVAL, -5001,                                                                        \
      "an argument is out of its documented range (a log, if set, says which)")                  \
    X(KVT_E_VERSION, -5002, "struct_size is not set, or comes from another version of kvtier")   \
    X(KVT_E_CONFIG_KEY, -5003, "unknown configuration key")                                      \
    X(KVT_E_CONFIG_VALUE, -5004, "malformed configuration value")                                \
    X(KVT_E_LAYOUT, -5005, "the layout or shape does not match the namespace")                   \
    X(KVT_E_LIMIT, -5006, "a hard limit (count, bytes, descriptors) would be exceeded")          \
    X(KVT_E_CLOSED, -5007, "the cache or the store behind it has been closed")                   \
    X(KVT_E_STATE, -5008, "the session is in a state that does not allow the call")              \
    X(KVT_E_NO_SESSION, -5009, "no such session: never opened, or closed")                       \
    X(KVT_E_NOT_OURS, -5010, "the directory holds files that are not a kvtier store")            \
    X(KVT_E_LOCKED, -5011, "another process owns this directory")                                \
    X(KVT_E_NEWER, -5012, "the directory was written by a newer format version; left untouched") \
    X(KVT_E_READ_ONLY, -5013, "the directory cannot be written")                                 \
    X(KVT_E_SYMLINK, -5014, "the directory is a symbolic link; refused")                         \
    X(KVT_E_NO_SPACE, -5015, "no room: the file system or the cap is full")                      \
    X(KVT_E_TOO_SMALL, -5016, "the cap is too small for this record size")                       \
    X(KVT_E_CORRUPT, -5020, "bytes do not match their checksum, key or structure")               \
    X(KVT_E_EXISTS, -5021, "the block is already stored at this level or better")                \
    X(KVT_E_STALE, -5022, "the slot reference belongs to an earlier life of the slot")           \
    X(KVT_E_GUARD, -5023, "the coded block failed the quality guard; use the next level")        \
    X(KVT_E_NONFINITE, -5024, "NaN, Inf or an overflowing scale: store at raw")                  \
    X(KVT_E_DEADLINE, -5030, "the deadline passed before the block arrived")                     \
    X(KVT_E_CANCELED, -5031, "cancelled by its caller, or purged before it was stored")          \
    X(KVT_E_DROPPED, -5032, "dropped: the write queue or the slots were full")                   \
    X(KVT_E_MISS, -5033, "not present (per-block status only; never a function's error)")        \
    X(KVT_E_ORPHAN, -5034, "not stored: the block before it in its chain is not stored either")  \
    X(KVT_E_UNSUPPORTED, -5040, "not supported by this build, model or engine")                  \
    X(KVT_E_ENGINE, -5041, "the engine refused a call or returned state we do not understand")   \
    X(KVT_E_DEVICE, -5042, "the GPU or its driver failed; its tier is offline")

enum kvt_error {
#define KVT_X(name, value, text) name = (value),
    KVT_ERRORS(KVT_X)
#undef KVT_X
};

/* The text of a code: our list for own codes, strerror() for -errno, "success" for >= 0.
 * Returns a static or thread-local string, never NULL. Thread: any. */
const char *kvt_strerror(int code);

/* The identifier of an own code ("KVT_E_INVAL"), or NULL when the code is not ours. */
const char *kvt_error_name(int code);

#ifdef __cplusplus
}
#endif
#endif
