/* Which backend an option names. See remote.h. */
#include <stdio.h>

#include "kvtier/error.h"
#include "remote/redis.h"
#include "remote/remote_url.h"

int kvt_remote_where_check(const char *where, char *error, size_t error_len)
{
    struct kvt_remote_url url;
    int rc = kvt_remote_url_parse(where, &url, error, error_len);

    if (rc == 0 && url.kind == KVT_REMOTE_DIR) {
        (void)snprintf(error, error_len, "remote: dir: is not built yet");
        rc = KVT_E_CONFIG_VALUE;
    }
    return rc;
}

int kvt_remote_tier_open(const struct kvt_remote_params *params, struct kvt_remote **out,
                         char *error, size_t error_len)
{
    struct kvt_remote_url url;
    int rc = kvt_remote_url_parse(params->where, &url, error, error_len);

    *out = NULL;
    if (rc)
        return rc;
    if (url.kind == KVT_REMOTE_REDIS)
        return kvt_redis_open(params, &url, out, error, error_len);
    (void)snprintf(error, error_len, "remote: dir: is not built yet");
    return KVT_E_CONFIG_VALUE;
}
