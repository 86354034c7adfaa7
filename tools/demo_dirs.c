/* A demo works in a directory of its own below the cache, and removes it at its end. One that was
 * killed cannot: the next one does that.
 *
 * A living demo holds a lock (flock) on its directory, which its children inherit: the lock ends
 * with the last of them, however they end. What is not locked belongs to nobody; that it must not
 * be young is for one that was made a moment ago, and is about to be locked. Names of any other
 * form, symbolic links and directories of other users are left alone. Threads: one.
 */
#include "demo_dirs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PREFIX "demo-"
#define SUFFIX_LEN 6u /* of mkdtemp() */

int kvt_demo_dir_make(const char *below, char *path, size_t room)
{
    int n = snprintf(path, room, "%s/" PREFIX "XXXXXX", below);

    if (n < 0 || (size_t)n >= room)
        return -ENAMETOOLONG;
    if (!mkdtemp(path))
        return -errno;
    /* Kept open on purpose, and by children too. A file system without locks: it is young enough.
     */
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd >= 0)
        (void)flock(fd, LOCK_EX | LOCK_NB);
    return 0;
}

static void empty(int dir)
{
    int fd = dup(dir);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);

    if (!list) {
        if (fd >= 0)
            close(fd);
        return;
    }
    for (struct dirent *entry; (entry = readdir(list)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            (void)unlinkat(fd, entry->d_name, 0);
    closedir(list);
}

void kvt_demo_dir_remove(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);

    if (fd < 0)
        return;
    empty(fd);
    close(fd);
    (void)rmdir(path);
}

static int is_ours(const char *name)
{
    return strncmp(name, PREFIX, strlen(PREFIX)) == 0 &&
           strlen(name) == strlen(PREFIX) + SUFFIX_LEN;
}

/* Nobody has it, and nobody is about to. */
static int is_left(int fd, int64_t young_s)
{
    struct stat st;

    return fstat(fd, &st) == 0 && st.st_uid == geteuid() &&
           (int64_t)time(NULL) - (int64_t)st.st_mtime >= young_s &&
           flock(fd, LOCK_EX | LOCK_NB) == 0;
}

unsigned kvt_demo_dirs_clean(const char *below, int64_t young_s)
{
    DIR *list = opendir(below);
    unsigned count = 0;

    if (!list)
        return 0;
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) {
        if (!is_ours(entry->d_name))
            continue;
        int fd =
            openat(dirfd(list), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0)
            continue;
        if (is_left(fd, young_s)) {
            empty(fd);
            count += unlinkat(dirfd(list), entry->d_name, AT_REMOVEDIR) == 0;
        }
        close(fd);
    }
    closedir(list);
    return count;
}
