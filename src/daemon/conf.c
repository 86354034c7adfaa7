/* Keys of a kvtierd: see conf.h. Its own are in the table here, the store's in the library's table
 * of options (client/options.c); an option that means nothing to a store is refused by name.
 * Threads: one. Reads one file; does not look at disks or sockets.
 */
#include "daemon/conf.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "base/parse.h"
#include "client/options.h"
#include "kvtier/error.h"

#define LINE_MAX_BYTES 4608u
#define CAP_MAX (UINT64_C(64) << 30) /* of "dir", which names no size */

struct own_key {
    const char *key, *fallback, *help;
    int reload;
};

static const struct own_key own_keys[] = {
    {"socket", "auto",
     "path of the socket; auto: /run/kvtier.sock for root, $XDG_RUNTIME_DIR/kvtier.sock", 0},
    {"socket_mode", "0600", "permissions of the socket, octal; who may connect is also allow_uid",
     0},
    {"allow_uid", "none", "user ids that may connect besides our own and root: \"1000+1001\"", 1},
    {"metrics", "off", "Prometheus endpoint, \"127.0.0.1:9464\"; off", 0},
    {"log_level", "info", "error, warn, info, debug", 1},
    {"dir", "none",
     "a disk root without a size: half of its file system, at most 64GiB; \"disk\" takes a size",
     0},
};

/* Options of the library that a store has. */
static const char *const store_keys[] = {
    "dram",
    "dram_share",
    "ranks",
    "ttl",
    "ns_quota",
    "ns_limit",
    "numa_device",
    "disk",
    "disk_required",
    "staging",
    "write_queue",
    "write",
    "admission",
    "write_budget",
    "write_dwpd",
    "pin_max",
    "io",
    "io_threads",
    "fds_max",
    "io_register",
    "direct",
    "pin",
    "huge_pages",
    "numa_node",
    "scrub",
    "plan_prefill",
    "plan_disk",
    "spin",
    "remote",
    "remote_auth",
    "remote_write",
    "remote_deadline",
    "remote_ttl",
    "remote_queue",
    "remote_mac",
    "remote_ca",
    "remote_cap",
    "remote_ns_cap",
};

static const char *const levels[] = {[KVT_LOG_ERROR] = "error",
                                     [KVT_LOG_WARN] = "warn",
                                     [KVT_LOG_INFO] = "info",
                                     [KVT_LOG_DEBUG] = "debug"};

__attribute__((format(printf, 3, 4))) static int refuse(struct kvt_conf *conf, int code,
                                                        const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(conf->error, sizeof(conf->error), format, args);
    va_end(args);
    return code;
}

#define OWN_KEYS KVT_ARRAY_LEN(own_keys)
#define ALL_KEYS (OWN_KEYS + KVT_ARRAY_LEN(store_keys))
static_assert(ALL_KEYS <= 64, "a bit of kvt_conf.given each");

/* Its place in the two tables, one behind the other; ALL_KEYS: none such. */
static size_t key_place(const char *key)
{
    for (size_t i = 0; i < ALL_KEYS; i++)
        if (strcmp(i < OWN_KEYS ? own_keys[i].key : store_keys[i - OWN_KEYS], key) == 0)
            return i;
    return ALL_KEYS;
}

static bool is_store_key(const char *key)
{
    const size_t place = key_place(key);
    return place >= OWN_KEYS && place < ALL_KEYS;
}

static int unknown_key(struct kvt_conf *conf, const char *key)
{
    const char *names[ALL_KEYS];
    for (size_t i = 0; i < ALL_KEYS; i++)
        names[i] = i < OWN_KEYS ? own_keys[i].key : store_keys[i - OWN_KEYS];
    const struct kvt_option *option;
    for (size_t i = 0; (option = kvt_option_at(i)) != NULL; i++)
        if (strcmp(option->key, key) == 0)
            return refuse(conf, KVT_E_CONFIG_KEY,
                          "\"%s\" is an option of the programs that connect, not of kvtierd: set "
                          "it there",
                          key);
    const char *near = kvt_nearest(key, names, ALL_KEYS);
    return refuse(conf, KVT_E_CONFIG_KEY, "unknown key \"%.64s\"%s%s%s", key,
                  near ? "; did you mean \"" : "; 'kvtierd --help' lists the valid ones",
                  near ? near : "", near ? "\"?" : "");
}

/* ---- values -------------------------------------------------------------------------------- */

static int set_socket(struct kvt_conf *conf, const char *value)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char path[PATH_MAX];
    if (strcmp(value, "auto") == 0 && geteuid() != 0 && runtime != NULL && runtime[0] != '\0')
        (void)snprintf(path, sizeof(path), "%s/kvtier.sock", runtime);
    else
        (void)snprintf(path, sizeof(path), "%s",
                       strcmp(value, "auto") == 0 ? "/run/kvtier.sock" : value);
    if (path[0] == '\0' || strlen(path) + strlen(".lock") >= sizeof(conf->socket))
        return refuse(conf, KVT_E_CONFIG_VALUE,
                      "socket: a path of 1 to %zu bytes, \"%.80s\" has %zu",
                      sizeof(conf->socket) - 1 - strlen(".lock"), path, strlen(path));
    (void)snprintf(conf->socket, sizeof(conf->socket), "%.107s", path);
    return 0;
}

static int set_mode(struct kvt_conf *conf, const char *value)
{
    char *end;
    unsigned long mode = strtoul(value, &end, 8);
    if (value[0] < '0' || value[0] > '7' || *end != '\0' || mode > 0777 || (mode & 0600) != 0600)
        return refuse(conf, KVT_E_CONFIG_VALUE,
                      "socket_mode: \"%.64s\" are no permissions that let this user in: octal, "
                      "0600 to 0777",
                      value);
    conf->socket_mode = (mode_t)mode;
    return 0;
}

static int set_uids(struct kvt_conf *conf, const char *value)
{
    uid_t uids[KVT_SERVER_UIDS_MAX] = {0};
    size_t count = 0;
    for (const char *at = value; strcmp(value, "none") != 0;) {
        char word[16];
        int64_t uid;
        size_t len = strcspn(at, "+");
        (void)snprintf(word, sizeof(word), "%.*s", (int)KVT_MIN(len, sizeof(word) - 1), at);
        if (len >= sizeof(word) || kvt_parse_int(word, 0, UINT32_MAX - 1, &uid) != 0)
            return refuse(conf, KVT_E_CONFIG_VALUE,
                          "allow_uid: \"%.64s\" is not a list of user ids, as 1000+1001, nor none",
                          value);
        if (count == KVT_SERVER_UIDS_MAX)
            return refuse(conf, KVT_E_CONFIG_VALUE, "allow_uid: at most %u ids",
                          KVT_SERVER_UIDS_MAX);
        uids[count++] = (uid_t)uid;
        if (at[len] == '\0')
            break;
        at += len + 1;
    }
    memcpy(conf->uids, uids, count * sizeof(uids[0]));
    conf->uid_count = count;
    return 0;
}

static int set_level(struct kvt_conf *conf, const char *value)
{
    for (size_t i = 0; i < KVT_ARRAY_LEN(levels); i++) {
        if (strcmp(levels[i], value) == 0) {
            conf->log_level = (int)i;
            return 0;
        }
    }
    const char *near = kvt_nearest(value, levels, KVT_ARRAY_LEN(levels));
    return refuse(conf, KVT_E_CONFIG_VALUE,
                  "log_level: \"%.64s\" is not one of error, warn, info, debug%s%s%s", value,
                  near ? "; did you mean \"" : "", near ? near : "", near ? "\"?" : "");
}

static int set_metrics(struct kvt_conf *conf, const char *value)
{
    const char *colon = strrchr(value, ':');
    int64_t port;
    if (strcmp(value, "off") == 0) {
        conf->metrics[0] = '\0';
        return 0;
    }
    if (colon == NULL || colon == value || strlen(value) >= sizeof(conf->metrics) ||
        kvt_parse_int(colon + 1, 0, 65535, &port) != 0)
        return refuse(conf, KVT_E_CONFIG_VALUE,
                      "metrics: \"%.64s\" is neither \"off\" nor \"ADDRESS:PORT\", as "
                      "127.0.0.1:9464",
                      value);
    (void)snprintf(conf->metrics, sizeof(conf->metrics), "%s", value);
    return 0;
}

/* A root that names no size. */
static int set_dir(struct kvt_conf *conf, const char *value)
{
    char parent[PATH_MAX], text[PATH_MAX + 32];
    struct statvfs fs;
    if (strcmp(value, "none") == 0)
        return 0;
    if (value[0] == '\0' || strlen(value) >= sizeof(parent))
        return refuse(conf, KVT_E_CONFIG_VALUE, "dir: a path of 1 to %d bytes", PATH_MAX - 1);
    (void)snprintf(parent, sizeof(parent), "%s", value);
    while (statvfs(parent, &fs) != 0) { /* it may be made later: the file system is its parent's */
        char *slash = strrchr(parent, '/');
        if (slash == NULL || slash == parent) {
            if (statvfs(slash == NULL ? "." : "/", &fs) != 0)
                return refuse(conf, KVT_E_CONFIG_VALUE, "dir: %.200s cannot be looked at: %s",
                              value, kvt_strerror(-errno));
            break;
        }
        *slash = '\0';
    }
    uint64_t half = (uint64_t)fs.f_blocks * fs.f_frsize / 2;
    (void)snprintf(text, sizeof(text), "%s:%" PRIu64 "MiB", value, KVT_MIN(half, CAP_MAX) >> 20);
    int rc = kvt_config_set(conf->options, "disk", text);
    return rc == 0 ? 0 : refuse(conf, rc, "%.500s", kvt_config_error(conf->options));
}

static int set_key(struct kvt_conf *conf, const char *key, const char *value)
{
    if (strcmp(key, "socket") == 0)
        return set_socket(conf, value);
    if (strcmp(key, "socket_mode") == 0)
        return set_mode(conf, value);
    if (strcmp(key, "allow_uid") == 0)
        return set_uids(conf, value);
    if (strcmp(key, "metrics") == 0)
        return set_metrics(conf, value);
    if (strcmp(key, "log_level") == 0)
        return set_level(conf, value);
    if (strcmp(key, "dir") == 0)
        return set_dir(conf, value);
    if (!is_store_key(key))
        return unknown_key(conf, key);
    int rc = kvt_config_set(conf->options, key, value);
    return rc == 0 ? 0 : refuse(conf, rc, "%.500s", kvt_config_error(conf->options));
}

int kvt_conf_set(struct kvt_conf *conf, const char *key, const char *value)
{
    conf->error[0] = '\0';
    int rc = set_key(conf, key, value);
    if (rc == 0) /* "dir" is one of "disk" */
        conf->given |= UINT64_C(1) << key_place(strcmp(key, "dir") == 0 ? "disk" : key);
    return rc;
}

int kvt_conf_known(struct kvt_conf *conf, const char *key)
{
    return key_place(key) < ALL_KEYS ? 0 : unknown_key(conf, key);
}

bool kvt_conf_given(const struct kvt_conf *conf, const char *key)
{
    const size_t place = key_place(key);
    return place < ALL_KEYS && (conf->given >> place & 1) != 0;
}

int kvt_conf_new(struct kvt_conf *conf)
{
    memset(conf, 0, sizeof(*conf));
    int rc = kvt_config_new(&conf->options);
    for (size_t i = 0; i < KVT_ARRAY_LEN(own_keys) && rc == 0; i++)
        rc = kvt_conf_set(conf, own_keys[i].key, own_keys[i].fallback);
    conf->given = 0;
    if (rc != 0)
        kvt_conf_free(conf);
    return rc;
}

void kvt_conf_free(struct kvt_conf *conf)
{
    kvt_config_free(conf->options);
    conf->options = NULL;
}

/* ---- the file ------------------------------------------------------------------------------ */

/* Cut blanks at both ends. */
static char *trim(char *text)
{
    size_t len;
    text += strspn(text, " \t");
    len = strlen(text);
    while (len > 0 && strchr(" \t\r\n", text[len - 1]) != NULL)
        text[--len] = '\0';
    return text;
}

/* A "#" at the start, or behind a blank, begins a comment: paths may hold others. */
static void comment_cut(char *line)
{
    for (char *at = line; (at = strchr(at, '#')) != NULL; at++) {
        if (at == line || at[-1] == ' ' || at[-1] == '\t') {
            *at = '\0';
            return;
        }
    }
}

static int set_line(struct kvt_conf *conf, char *line)
{
    comment_cut(line);
    char *text = trim(line), *equals = strchr(text, '=');
    if (text[0] == '\0')
        return 0;
    if (text[0] == '[')
        return refuse(conf, KVT_E_CONFIG_VALUE,
                      "\"%.64s\": there are no sections, only lines key = value", text);
    if (equals == NULL)
        return refuse(conf, KVT_E_CONFIG_VALUE, "\"%.64s\" is not of the form key = value", text);
    *equals = '\0';
    char *key = trim(text), *value = trim(equals + 1);
    if (value[0] == '"' || value[0] == '\'')
        return refuse(conf, KVT_E_CONFIG_VALUE, "%.64s: values are written without quotes", key);
    return kvt_conf_set(conf, key, value);
}

/* A file, and nothing that lets its opener or reader wait, as a FIFO does. 0, or -errno. */
static int file_open(const char *path, FILE **out)
{
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -errno;
    int rc = fstat(fd, &st) != 0 ? -errno : 0;
    if (rc == 0 && !S_ISREG(st.st_mode))
        rc = S_ISDIR(st.st_mode) ? -EISDIR : KVT_E_NOT_OURS;
    *out = rc == 0 ? fdopen(fd, "r") : NULL;
    if (rc == 0 && *out == NULL)
        rc = -errno;
    if (rc != 0)
        (void)close(fd);
    return rc;
}

int kvt_conf_read(struct kvt_conf *conf, const char *path)
{
    char line[LINE_MAX_BYTES], why[sizeof(conf->error)];
    FILE *file = NULL;
    int rc = file_open(path, &file);
    if (rc != 0)
        return refuse(conf, rc, "the configuration %.300s cannot be read: %s", path,
                      rc == KVT_E_NOT_OURS ? "it is no regular file" : kvt_strerror(rc));
    errno = 0;
    for (unsigned number = 1; rc == 0; number++) {
        memset(line, 1, sizeof(line)); /* no NUL, so that the last one is what ended the line */
        if (fgets(line, sizeof(line), file) == NULL)
            break;
        const size_t len = strlen(line);
        size_t used = sizeof(line) - 1; /* of the line, its NULs included */
        while (line[used] != '\0')
            used--;
        if (used > len)
            rc = refuse(conf, KVT_E_CONFIG_VALUE, "the line holds a NUL");
        else if (strchr(line, '\n') == NULL && len == sizeof(line) - 1)
            rc = refuse(conf, KVT_E_CONFIG_VALUE, "the line is longer than %u bytes",
                        LINE_MAX_BYTES - 1);
        else
            rc = set_line(conf, line);
        if (rc != 0) {
            (void)snprintf(why, sizeof(why), "%s", conf->error);
            (void)refuse(conf, rc, "%.150s:%u: %.340s", path, number, why);
        }
    }
    if (rc == 0 && ferror(file)) {
        rc = errno > 0 ? -errno : -EIO;
        rc =
            refuse(conf, rc, "the configuration %.300s cannot be read: %s", path, kvt_strerror(rc));
    }
    (void)fclose(file);
    return rc;
}

/* ---- listing ------------------------------------------------------------------------------- */

static const char *own_text(const struct kvt_conf *conf, const char *key, char *text, size_t len)
{
    if (strcmp(key, "socket") == 0)
        return conf->socket;
    if (strcmp(key, "metrics") == 0)
        return conf->metrics[0] ? conf->metrics : "off";
    if (strcmp(key, "log_level") == 0)
        return levels[conf->log_level];
    if (strcmp(key, "socket_mode") == 0) {
        (void)snprintf(text, len, "%04o", (unsigned)conf->socket_mode);
        return text;
    }
    (void)snprintf(text, len, "none");
    for (size_t i = 0, used = 0; strcmp(key, "allow_uid") == 0 && i < conf->uid_count; i++)
        used += (size_t)snprintf(text + used, len - used, "%s%u", i ? "+" : "",
                                 (unsigned)conf->uids[i]);
    return text;
}

void kvt_conf_each(const struct kvt_conf *conf, kvt_conf_each_fn fn, void *arg)
{
    char text[KVT_SERVER_UIDS_MAX * 12];
    const size_t len = KVT_DISKS_MAX * (PATH_MAX + 32);
    char *buffer = malloc(len);
    for (size_t i = 0; i < KVT_ARRAY_LEN(own_keys); i++)
        fn(arg, own_keys[i].key, own_text(conf, own_keys[i].key, text, sizeof(text)),
           own_keys[i].fallback, own_keys[i].help, own_keys[i].reload);
    const struct kvt_option *option;
    for (size_t i = 0; buffer != NULL && (option = kvt_option_at(i)) != NULL; i++)
        if (is_store_key(option->key))
            fn(arg, option->key, kvt_option_text(&conf->options->settings, option, buffer, len),
               option->fallback, option->help, 0);
    free(buffer);
}
