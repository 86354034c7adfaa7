/* Which backend an option names. See remote.h. */
#include "remote/redis.h"
#include "remote/remote_url.h"
#include "remote/shared_dir.h"

int kvt_remote_where_check(const char *where, char *error, size_t error_len)
{
    struct kvt_remote_url url;

    return kvt_remote_url_parse(where, &url, error, error_len);
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
    return kvt_shared_dir_open(params, &url, out, error, error_len);
}
