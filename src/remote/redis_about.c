/* What a server says that it is (INFO server), in a few words for people. Asked for by
 * redis_login.c where params.about wants it; the text is in redis->about once about_ready is set.
 * Threads: any.
 */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "remote/redis_impl.h"

/* The value of "name:" in INFO's text; its length, 0: it is not there. */
static int info_value(const char *info, const char *name, const char **value)
{
    const char *at = strstr(info, name);

    if (!at || (at != info && at[-1] != '\n'))
        return 0;
    *value = at + strlen(name);
    return (int)strspn(*value, "abcdefghijklmnopqrstuvwxyz0123456789.-_");
}

void redis_about(struct kvt_remote *remote, char *text, size_t len)
{
    /* the last one is also what others say that they are compatible with */
    static const char *const names[][2] = {{"dragonfly_version:", "Dragonfly"},
                                           {"kvrocks_version:", "Kvrocks"},
                                           {"valkey_version:", "Valkey"},
                                           {"redis_version:", "Redis"}};
    struct redis *redis = (struct redis *)remote;
    const char *version = "", *mode = "";
    size_t i = 0;

    text[0] = '\0';
    /* pairs with redis_body_end() */
    if (!atomic_load_explicit(&redis->about_ready, memory_order_acquire))
        return;
    int version_len = 0, mode_len = info_value(redis->about, "redis_mode:", &mode);
    while (i < KVT_ARRAY_LEN(names) &&
           !(version_len = info_value(redis->about, names[i][0], &version)))
        i++;
    if (i == KVT_ARRAY_LEN(names))
        return;
    int used = snprintf(text, len, "%s %.*s, ", names[i][1], version_len, version);
    if (used < 0 || (size_t)used >= len)
        return;
    if (mode_len == 7 && memcmp(mode, "cluster", 7) == 0)
        (void)snprintf(
            text + used, len - (size_t)used, "a cluster of %llu nodes",
            (unsigned long long)atomic_load_explicit(&redis->node_count, memory_order_relaxed));
    else if (mode_len == 8 && memcmp(mode, "sentinel", 8) == 0)
        (void)snprintf(text + used, len - (size_t)used,
                       "a sentinel, which keeps no records: name the server itself");
    else
        (void)snprintf(text + used, len - (size_t)used, "one server");
}
