/* Whether a root's cap fits its file system: what the store has there, and what is free.
 *
 * Looked at when a root is opened and when an operator asks; others may take the room afterwards.
 * Quotas of a user or a project are not seen. Threads: any. Changes nothing.
 */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "base/fd.h"
#include "client/host.h"

#define MIB (UINT64_C(1) << 20)
#define CAP_MIN (8 * MIB) /* of a root */

/* Bytes that the files of a directory take; 0 also: it cannot be read. */
static uint64_t dir_bytes(const char *path)
{
    DIR *dir = kvt_fd_opendir(path);
    const struct dirent *entry;
    struct stat st;
    uint64_t bytes = 0;
    while (dir != NULL && (entry = readdir(dir)) != NULL)
        if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(st.st_mode))
            bytes += (uint64_t)st.st_blocks * 512; /* its unit, whatever st_blksize says */
    if (dir != NULL)
        (void)closedir(dir);
    return bytes;
}

int kvt_root_room(const char *path, uint64_t cap_bytes, struct kvt_root_room *out)
{
    char parent[PATH_MAX];
    struct statvfs fs;
    *out = (struct kvt_root_room){.cap_bytes = cap_bytes};
    if (statvfs(path, &fs) != 0) {
        if (errno != ENOENT ||
            snprintf(parent, sizeof(parent), "%s", path) >= (int)sizeof(parent) ||
            statvfs(dirname(parent), &fs) != 0)
            return -errno;
    }
    out->used_bytes = dir_bytes(path);
    out->free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    return 0;
}

bool kvt_root_room_short(const struct kvt_root_room *room, const char *path, char *text, size_t len)
{
    const uint64_t there = room->used_bytes + room->free_bytes;
    char remedy[64] = "give it a larger one";
    text[0] = '\0';
    if (room->cap_bytes <= there)
        return false;
    if (there >= CAP_MIN)
        (void)snprintf(remedy, sizeof(remedy), "set its cap to %" PRIu64 "MiB", there / MIB);
    (void)snprintf(text, len,
                   "disk root %.250s: its cap of %" PRIu64 " MiB is more than there is room for: "
                   "the store has %" PRIu64 " MiB there, and %" PRIu64 " MiB are free on the file "
                   "system; where that ends the oldest blocks go early. Free %" PRIu64
                   " MiB there, or %s",
                   path, room->cap_bytes / MIB, room->used_bytes / MIB, room->free_bytes / MIB,
                   (room->cap_bytes - there + MIB - 1) / MIB, remedy);
    return true;
}
