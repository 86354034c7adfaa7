/* Names and ways in a shared directory: see shared_path.h. */
#include "remote/shared_path.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fd.h"
#include "kvtier/error.h"
#include "remote/remote_seal.h"

#define DIR_MODE (O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW)

void kvt_shared_name(const struct kvt_full_key *key, struct kvt_shared_name *out)
{
    char name[KVT_REMOTE_NAME_BYTES];
    const char *hash = name + 5 + sizeof(out->ns); /* behind "kvt0:" and the namespace's colon */

    (void)kvt_remote_name(key, name);
    (void)snprintf(out->ns, sizeof(out->ns), "%.32s", name + 5);
    (void)snprintf(out->below, sizeof(out->below), "%.2s", hash);
    (void)snprintf(out->file, sizeof(out->file), "%s", hash);
    for (char *at = out->file; *at; at++)
        if (*at == ':')
            *at = '.';
}

static bool is_hex(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
}

bool kvt_shared_is_ns(const char *name)
{
    size_t len = 0;

    while (is_hex(name[len]))
        len++;
    return len == (size_t)2 * KVT_NS_BYTES && !name[len];
}

/* ".NUMBER": behind it; NULL: it is none. */
static const char *number_at(const char *at)
{
    const char *digits = at + 1;

    if (*at != '.' || *digits < '0' || *digits > '9')
        return NULL;
    while (*digits >= '0' && *digits <= '9')
        digits++;
    return digits;
}

bool kvt_shared_is_record(const char *name, const char *below)
{
    const char *at = name;

    while (is_hex(*at))
        at++;
    if (at - name < 2 || (at - name) % 2 || at - name > 2 * KVT_HASH_BYTES_MAX ||
        memcmp(name, below, 2) != 0)
        return false;
    at = number_at(at);
    at = at ? number_at(at) : NULL;
    return at && !*at;
}

bool kvt_shared_gone(int err)
{
    return err == ENOENT || err == ESTALE || err == ENOTDIR;
}

/* O_NOFOLLOW with O_DIRECTORY says ENOTDIR of a link. */
static int why_not(int parent, const char *name, int err)
{
    struct stat st;

    if (err == ENOTDIR && fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISLNK(st.st_mode))
        return -ELOOP;
    return -err;
}

int kvt_shared_dir_at(int parent, const char *name)
{
    int fd = kvt_fd_high(openat(parent, name, O_PATH | DIR_MODE));

    return fd >= 0 ? fd : why_not(parent, name, errno);
}

DIR *kvt_shared_list_at(int parent, const char *name, int *rc)
{
    int fd = kvt_fd_high(openat(parent, name, O_RDONLY | DIR_MODE));
    DIR *list;

    *rc = 0;
    if (fd < 0) {
        *rc = why_not(parent, name, errno);
        return NULL;
    }
    list = fdopendir(fd);
    if (!list) {
        *rc = -errno;
        (void)close(fd);
    }
    return list;
}

void kvt_shared_way_init(struct kvt_shared_way *way)
{
    memset(way, 0, sizeof(*way));
    way->ns = way->below = -1;
}

void kvt_shared_way_close(struct kvt_shared_way *way)
{
    if (way->below >= 0)
        (void)close(way->below);
    if (way->ns >= 0)
        (void)close(way->ns);
    way->ns = way->below = -1;
}

int kvt_shared_way_to(struct kvt_shared_way *way, int root, const struct kvt_full_key *key)
{
    char ns[sizeof(way->name.ns)], below[sizeof(way->name.below)];
    int fd;

    memcpy(ns, way->name.ns, sizeof(ns));
    memcpy(below, way->name.below, sizeof(below));
    kvt_shared_name(key, &way->name);
    if (strcmp(ns, way->name.ns) != 0)
        kvt_shared_way_close(way);
    if (way->ns < 0) {
        fd = kvt_shared_dir_at(root, way->name.ns);
        if (fd < 0)
            return kvt_shared_gone(-fd) ? KVT_E_MISS : fd;
        way->ns = fd;
    }
    if (way->below >= 0 && strcmp(below, way->name.below) == 0)
        return 0;
    if (way->below >= 0)
        (void)close(way->below);
    way->below = -1;
    fd = kvt_shared_dir_at(way->ns, way->name.below);
    if (fd < 0)
        return kvt_shared_gone(-fd) ? KVT_E_MISS : fd;
    way->below = fd;
    return 0;
}
