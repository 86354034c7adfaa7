/* Reading the option "remote". See remote_url.h. Pure functions: nothing is looked up or opened. */
#include "remote/remote_url.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kvtier/error.h"

#define PORT_DEFAULT "6379"

__attribute__((format(printf, 3, 4))) static int refuse(char *error, size_t len, const char *format,
                                                        ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(error, len, format, args);
    va_end(args);
    return KVT_E_CONFIG_VALUE;
}

static bool port_ok(const char *text, size_t len)
{
    unsigned long port = 0;

    if (len == 0 || len > 5)
        return false;
    for (size_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        port = port * 10 + (unsigned long)(text[i] - '0');
    }
    return port >= 1 && port <= 65535;
}

static bool seed_set(struct kvt_remote_seed *out, const char *host, size_t host_len,
                     const char *port, size_t port_len)
{
    if (host_len == 0 || host_len >= sizeof(out->host) || !port_ok(port, port_len))
        return false;
    memcpy(out->host, host, host_len);
    out->host[host_len] = '\0';
    memcpy(out->port, port, port_len);
    out->port[port_len] = '\0';
    return true;
}

bool kvt_remote_host_parse(const char *text, size_t len, const char *fallback,
                           struct kvt_remote_seed *out)
{
    size_t colon = len;

    while (colon > 0 && text[colon - 1] != ':')
        colon--;
    if (colon == 0)
        return false;
    if (colon == 1)
        return seed_set(out, fallback, strlen(fallback), text + colon, len - colon);
    return seed_set(out, text, colon - 1, text + colon, len - colon);
}

/* "host", "host:port", "[v6]", "[v6]:port" */
static bool seed_parse(const char *text, size_t len, struct kvt_remote_seed *out)
{
    const char *end = text + len, *colon;

    if (len > 0 && text[0] == '[') {
        const char *close = memchr(text, ']', len);

        if (close == NULL)
            return false;
        if (close + 1 == end)
            return seed_set(out, text + 1, (size_t)(close - text - 1), PORT_DEFAULT,
                            strlen(PORT_DEFAULT));
        return close[1] == ':' && seed_set(out, text + 1, (size_t)(close - text - 1), close + 2,
                                           (size_t)(end - close - 2));
    }
    colon = memchr(text, ':', len);
    if (colon == NULL)
        return seed_set(out, text, len, PORT_DEFAULT, strlen(PORT_DEFAULT));
    return seed_set(out, text, (size_t)(colon - text), colon + 1, (size_t)(end - colon - 1));
}

/* What follows a question mark. */
static int query_parse(const char *text, struct kvt_remote_url *out, char *error, size_t error_len)
{
    if (strcmp(text, "replicas=yes") == 0)
        out->replicas = true;
    else if (strcmp(text, "replicas=no") != 0)
        return refuse(error, error_len,
                      "remote: \"?%.80s\": only ?replicas=yes and ?replicas=no are known", text);
    return 0;
}

static int seeds_parse(const char *from, struct kvt_remote_url *out, char *error, size_t error_len)
{
    char seeds[KVT_REMOTE_SEEDS * (KVT_REMOTE_HOST_BYTES + 8)];
    const size_t seeds_len = strcspn(from, "?");
    const char *rest = seeds;

    if (strchr(from, '@') != NULL) /* before any of it is shown */
        return refuse(error, error_len,
                      "remote: a name or password does not belong into the address, which is "
                      "shown: write it to a file and set remote_auth=FILE");
    if (seeds_len >= sizeof(seeds))
        return refuse(error, error_len, "remote: the address is too long");
    memcpy(seeds, from, seeds_len);
    seeds[seeds_len] = '\0';
    if (from[seeds_len] == '?') {
        int rc = query_parse(from + seeds_len + 1, out, error, error_len);

        if (rc)
            return rc;
    }
    while (*rest != '\0') {
        size_t len = strcspn(rest, ",+");
        size_t use = len;

        if (use > 0 && rest[use - 1] == '/' && rest[len] == '\0')
            use--;
        if (out->seed_count == KVT_REMOTE_SEEDS)
            return refuse(error, error_len, "remote: at most %u servers", KVT_REMOTE_SEEDS);
        if (use > 0 && memchr(rest, '/', use) != NULL)
            return refuse(error, error_len,
                          "remote: \"%.*s\": leave out what is behind the \"/\": databases are not "
                          "supported, all is in the first one",
                          (int)(use < 80 ? use : 80), rest);
        if (!seed_parse(rest, use, &out->seeds[out->seed_count]))
            return refuse(error, error_len,
                          "remote: \"%.*s\" is not of the form host, host:port or [v6]:port",
                          (int)(use < 80 ? use : 80), rest);
        out->seed_count++;
        rest += len;
        if (*rest != '\0' && *++rest == '\0')
            return refuse(error, error_len, "remote: a server is missing at the end");
    }
    return out->seed_count ? 0 : refuse(error, error_len, "remote: no server is named");
}

static int path_parse(const char *path, char *out, size_t room, char *error, size_t error_len)
{
    if (path[0] != '/' || path[1] == '\0')
        return refuse(error, error_len, "remote: \"%.80s\" is not an absolute path", path);
    if (strlen(path) >= room)
        return refuse(error, error_len, "remote: a path of at most %zu bytes", room - 1);
    if (strstr(path, "?replicas=") != NULL)
        return refuse(error, error_len,
                      "remote: \"%.80s\": ?replicas is for the servers of a cluster", path);
    memcpy(out, path, strlen(path) + 1);
    return 0;
}

int kvt_remote_url_parse(const char *where, struct kvt_remote_url *out, char *error,
                         size_t error_len)
{
    static const char plain[] = "redis://", tls[] = "rediss://", local[] = "redis+unix:";
    static const char dir[] = "dir:";

    memset(out, 0, sizeof(*out));
    out->kind = KVT_REMOTE_REDIS;
    if (strncmp(where, plain, strlen(plain)) == 0)
        return seeds_parse(where + strlen(plain), out, error, error_len);
    if (strncmp(where, tls, strlen(tls)) == 0) {
        out->tls = true;
        return seeds_parse(where + strlen(tls), out, error, error_len);
    }
    if (strncmp(where, local, strlen(local)) == 0) {
        where += strlen(local);
        if (strncmp(where, "//", 2) == 0)
            where += 2;
        out->seed_count = 1;
        return path_parse(where, out->seeds[0].host, 108, error, error_len);
    }
    if (strncmp(where, dir, strlen(dir)) == 0) {
        out->kind = KVT_REMOTE_DIR;
        return path_parse(where + strlen(dir), out->path, sizeof(out->path), error, error_len);
    }
    return refuse(error, error_len,
                  "remote: \"%.80s\" is none of redis://HOST:PORT, rediss://HOST:PORT, "
                  "redis+unix:/PATH, dir:/PATH",
                  where);
}
