/* Log sink: the library never prints; it formats one line and hands it to the user's callback. */
#ifndef KVT_BASE_LOG_H
#define KVT_BASE_LOG_H

enum kvt_log_level { KVT_LOG_ERROR = 0, KVT_LOG_WARN = 1, KVT_LOG_INFO = 2, KVT_LOG_DEBUG = 3 };

struct kvt_log {
    void (*fn)(void *arg, int level, const char *message); /* NULL: silent */
    void *arg;
    int level_max; /* messages above it are not formatted */
};

__attribute__((format(printf, 3, 4))) void kvt_log(const struct kvt_log *log, int level,
                                                   const char *format, ...);

#endif
