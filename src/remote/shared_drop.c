/* Removal from a shared directory: records by key, and a namespace whole. See shared_files.h. What
 * cannot be reached (a directory that is a symbolic link, or that this user may not list) is an
 * error, after all the rest has been removed: nobody is told that a record is gone that others
 * find. What is none of ours stays. Threads: any. Blocks. Allocates nothing itself; fdopendir()
 * does.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kvtier/error.h"
#include "remote/shared_files.h"

int kvt_shared_drop(struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    struct kvt_shared_way way;
    int status = 0;

    kvt_shared_way_init(&way);
    for (uint32_t i = 0; i < req->count; i++) {
        int rc = kvt_shared_way_to(&way, shared->root, &req->keys[i]);

        if (rc == -ELOOP)
            kvt_shared_link_met(shared, way.name.ns, way.ns >= 0 ? way.name.below : NULL);
        if (!rc && unlinkat(way.below, way.name.file, 0) == 0)
            kvt_remote_removed(req, 1);
        else if (!rc && !kvt_shared_gone(errno) && errno != EISDIR) /* no record */
            rc = -errno;
        if (rc && rc != KVT_E_MISS && !status)
            status = rc;
    }
    kvt_shared_way_close(&way);
    return status;
}

/* Ours, and to be removed with a namespace: a record, or one that is being written. */
static bool ours(const char *name, const char *below)
{
    return kvt_shared_is_record(name, below) ||
           strncmp(name, KVT_SHARED_PUT, strlen(KVT_SHARED_PUT)) == 0;
}

/* Every file of ours in a directory. */
static int drop_files(struct kvt_shared_files *shared, struct kvt_remote_req *req, int ns,
                      const struct kvt_shared_name *name, const char *below)
{
    const struct dirent *entry;
    int rc, status = 0;
    DIR *list = kvt_shared_list_at(ns, below, &rc);

    if (rc == -ELOOP)
        kvt_shared_link_met(shared, name->ns, below);
    if (!list)
        return kvt_shared_gone(-rc) ? 0 : rc;
    for (errno = 0; (entry = readdir(list)) != NULL; errno = 0) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (!ours(entry->d_name, below))
            kvt_shared_foreign_met(shared, name->ns, below, entry->d_name);
        else if (unlinkat(dirfd(list), entry->d_name, 0) == 0)
            kvt_remote_removed(req, 1);
        else if (!kvt_shared_gone(errno) && errno != EISDIR && !status) /* no record */
            status = -errno;
    }
    if (errno && !kvt_shared_gone(errno) && !status)
        status = -errno; /* not all names were told */
    (void)closedir(list);
    (void)unlinkat(ns, below, AT_REMOVEDIR);
    return status;
}

int kvt_shared_drop_ns(struct kvt_shared_files *shared, struct kvt_remote_req *req)
{
    struct kvt_shared_name name;
    int ns, status = 0;

    kvt_shared_name(req->keys, &name);
    kvt_shared_forget(shared, name.ns);
    ns = kvt_shared_dir_at(shared->root, name.ns);
    if (ns == -ELOOP)
        kvt_shared_link_met(shared, name.ns, NULL);
    if (ns < 0)
        return kvt_shared_gone(-ns) ? 0 : ns;
    for (unsigned byte = 0; byte < 256; byte++) {
        char below[4];
        int rc;

        (void)snprintf(below, sizeof(below), "%02x", byte);
        rc = drop_files(shared, req, ns, &name, below);
        if (rc && !status)
            status = rc;
    }
    (void)unlinkat(ns, "ttl", 0);
    (void)close(ns);
    (void)unlinkat(shared->root, name.ns, AT_REMOVEDIR);
    return status;
}
