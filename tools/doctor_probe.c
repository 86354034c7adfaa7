/* Probes of `kvtier doctor`: processor, memory and its limits, a directory.
 *
 * Invariants: nothing that a probe makes outlives it; an unreadable source means "unknown", never a
 * made-up figure.
 * Threads: one. It does not print; cmd_doctor.c does.
 */
#include "doctor.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/rng.h"
#include "io/io.h"
#include "kvtier/error.h"

/* One fast drive needs about this much in flight to show what it can do. */
#define PIECE_BYTES (2u << 20)
#define DEPTH 4u

int kvt_doctor_cpus(char *model, size_t model_len)
{
    char line[512];
    cpu_set_t set;
    FILE *f = fopen("/proc/cpuinfo", "re");

    snprintf(model, model_len, "unknown processor");
    while (f && fgets(line, sizeof(line), f)) {
        char *colon = strstr(line, ": ");
        if (strncmp(line, "model name", 10) != 0 || !colon)
            continue;
        colon[strcspn(colon, "\n")] = '\0';
        snprintf(model, model_len, "%s", colon + 2);
        break;
    }
    if (f)
        fclose(f);
    return sched_getaffinity(0, sizeof(set), &set) ? 1 : CPU_COUNT(&set);
}

/* The number in the first line of a file; "max" and unreadable files give UINT64_MAX. */
static uint64_t read_limit(const char *path)
{
    char text[64];
    uint64_t value = UINT64_MAX;
    FILE *f = fopen(path, "re");

    if (!f)
        return value;
    if (fgets(text, sizeof(text), f) && text[0] >= '0' && text[0] <= '9')
        value = strtoull(text, NULL, 10);
    fclose(f);
    return value;
}

/* Walk from the process's group up to the root of the hierarchy: the tightest limit counts. */
static uint64_t tightest_limit(const char *mount, char *group, const char *file)
{
    char path[1024];
    uint64_t limit = UINT64_MAX;

    for (;;) {
        snprintf(path, sizeof(path), "%s%s/%s", mount, group, file);
        limit = KVT_MIN(limit, read_limit(path));
        char *slash = strrchr(group, '/');
        if (!slash)
            return limit;
        *slash = '\0';
    }
}

static uint64_t cgroup_limit(void)
{
    char line[600];
    uint64_t limit = UINT64_MAX;
    FILE *f = fopen("/proc/self/cgroup", "re");

    while (f && fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = '\0';
        char *group = strrchr(line, ':');
        if (!group)
            continue;
        if (!strncmp(line, "0::", 3)) /* version 2 */
            limit = KVT_MIN(limit, tightest_limit("/sys/fs/cgroup", group + 1, "memory.max"));
        else if (strstr(line, ":memory:")) /* version 1 */
            limit = KVT_MIN(
                limit, tightest_limit("/sys/fs/cgroup/memory", group + 1, "memory.limit_in_bytes"));
    }
    if (f)
        fclose(f);
    return limit >= (UINT64_C(1) << 60) ? UINT64_MAX : limit; /* version 1 writes "none" so */
}

static uint64_t rlimit_of(__rlimit_resource_t what)
{
    struct rlimit limit;

    if (getrlimit(what, &limit) || limit.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return limit.rlim_cur;
}

/* "Name:   123 kB" of /proc/meminfo in bytes; 0 when the line has another name. */
static uint64_t meminfo_bytes(const char *line, const char *name)
{
    size_t len = strlen(name);

    if (strncmp(line, name, len) != 0 || line[len] != ':')
        return 0;
    return strtoull(line + len + 1, NULL, 10) * 1024;
}

void kvt_doctor_memory(struct kvt_doctor_memory *memory)
{
    char line[256];
    FILE *f = fopen("/proc/meminfo", "re");

    memset(memory, 0, sizeof(*memory));
    while (f && fgets(line, sizeof(line), f)) {
        memory->total_bytes += meminfo_bytes(line, "MemTotal");
        memory->available_bytes += meminfo_bytes(line, "MemAvailable");
    }
    if (f)
        fclose(f);
    memory->cgroup_bytes = cgroup_limit();
    memory->memlock_bytes = rlimit_of(RLIMIT_MEMLOCK);
    memory->files_max = rlimit_of(RLIMIT_NOFILE);
}

/* Take finished requests back into `free`; the first error goes to *rc. Returns how many. */
static unsigned collect(struct kvt_io *io, struct kvt_io_req **free_list, unsigned free_count,
                        int *rc)
{
    unsigned n = io->ops->reap(io, free_list + free_count, DEPTH - free_count);

    for (unsigned i = 0; i < n; i++) {
        const struct kvt_io_req *req = free_list[free_count + i];
        if (!*rc && req->result != (int64_t)req->iov[0].iov_len)
            *rc = req->result < 0 ? (int)req->result : -EIO;
    }
    return n;
}

/* Move `bytes` of one file in pieces, DEPTH in flight. Returns 0 or the first error. */
static int transfer(struct kvt_io *io, int file, int kind, uint8_t *buffer, uint64_t bytes)
{
    static struct kvt_io_req reqs[DEPTH]; /* 1 KiB of iovecs each: not for the stack */
    struct kvt_io_req *free_list[DEPTH];  /* completions come in any order */
    unsigned free_count = DEPTH;
    uint64_t at = 0;
    int rc = 0;

    for (unsigned i = 0; i < DEPTH; i++)
        free_list[i] = &reqs[i];
    while ((at < bytes && !rc) || free_count < DEPTH) {
        while (!rc && at < bytes && free_count) {
            struct kvt_io_req *req = free_list[free_count - 1];
            size_t len = (size_t)KVT_MIN((uint64_t)PIECE_BYTES, bytes - at);
            memset(req, 0, sizeof(*req));
            req->kind = kind;
            req->file = file;
            req->offset = at;
            req->iov_count = 1;
            req->iov[0] = (struct iovec){.iov_base = buffer + at, .iov_len = len};
            int refused = io->ops->submit(io, req);
            if (refused == -EAGAIN && free_count < DEPTH)
                break;
            rc = refused;
            if (rc)
                break;
            at += len;
            free_count--;
        }
        if (free_count == DEPTH)
            break;
        struct pollfd ready = {.fd = io->ops->event_fd(io), .events = POLLIN};
        poll(&ready, ready.fd >= 0 ? 1 : 0, ready.fd >= 0 ? -1 : 0);
        free_count += collect(io, free_list, free_count, &rc);
    }
    return rc;
}

static double gbps(uint64_t bytes, int64_t ns)
{
    return ns > 0 ? (double)bytes / (double)ns : 0.0;
}

static int measure(struct kvt_io *io, uint64_t bytes, struct kvt_doctor_io *out)
{
    struct kvt_clock clock = kvt_clock_system();
    struct kvt_rng rng = {.state = 1};
    uint8_t *from = aligned_alloc(KVT_IO_ALIGN, bytes), *to = aligned_alloc(KVT_IO_ALIGN, bytes);
    int file = -1, rc = -ENOMEM;

    if (!from || !to)
        goto out;
    for (uint64_t i = 0; i < bytes / 8; i++) { /* incompressible: some drives would cheat */
        uint64_t word = kvt_rng_next(&rng);
        memcpy(from + i * 8, &word, 8);
    }
    memset(to, 0, bytes);
    rc = file = io->ops->open(io, "probe", KVT_IO_OPEN_CREATE);
    if (file < 0)
        goto out;
    int64_t start = kvt_clock_now(&clock);
    rc = transfer(io, file, KVT_IO_WRITE, from, bytes);
    if (!rc)
        rc = kvt_io_sync_now(io, file);
    int64_t written = kvt_clock_now(&clock);
    if (!rc)
        rc = transfer(io, file, KVT_IO_READ, to, bytes);
    int64_t read = kvt_clock_now(&clock);
    if (!rc && memcmp(from, to, bytes) != 0)
        rc = KVT_E_CORRUPT;
    out->probe_bytes = bytes;
    out->write_gbps = gbps(bytes, written - start);
    out->read_gbps = gbps(bytes, read - written);
out:
    if (file >= 0) {
        io->ops->close(io, file);
        if (io->ops->unlink(io, "probe") && !rc)
            rc = -EIO;
    }
    free(from);
    free(to);
    return rc;
}

int kvt_doctor_io(const char *dir, uint64_t bytes, struct kvt_doctor_io *out)
{
    char scratch[PATH_MAX];
    struct kvt_io_posix_params params = {.path = dir, .threads = 2, .direct = -1, .read_only = 1};
    struct kvt_io_info info;
    struct kvt_io *io = NULL;
    int made = 0;

    memset(out, 0, sizeof(*out));
    int rc = kvt_io_posix_new(&params, &io); /* the refusals that a store would meet */
    if (rc)
        goto out;
    io->ops->destroy(io);
    io = NULL;
    rc = -ENAMETOOLONG;
    if (snprintf(scratch, sizeof(scratch), "%s/.kvtier-doctor-XXXXXX", dir) >= (int)sizeof(scratch))
        goto out;
    rc = mkdtemp(scratch) ? 0 : -errno;
    if (rc)
        goto out;
    made = 1;
    params.path = scratch;
    params.read_only = 0;
    params.backend = KVT_IO_AUTO; /* as a store would by default */
    rc = kvt_io_files_new(&params, &io);
    if (rc)
        goto out;
    io->ops->info(io, &info);
    snprintf(out->backend, sizeof(out->backend), "%s", info.backend);
    snprintf(out->backend_why, sizeof(out->backend_why), "%s",
             info.backend_why ? info.backend_why : "");
    snprintf(out->why, sizeof(out->why), "%s", info.why);
    out->direct = info.direct;
    out->free_bytes = info.free_bytes;
    out->total_bytes = info.total_bytes;
    rc = info.free_bytes < 2 * bytes ? -ENOSPC : measure(io, bytes, out);
out:
    if (io)
        io->ops->destroy(io);
    if (made && rmdir(scratch) && !rc)
        rc = -errno;
    if (rc)
        snprintf(out->why, sizeof(out->why), "%s", kvt_strerror(rc));
    return rc;
}
