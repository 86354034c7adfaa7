/* The arena's memory: mapped at open, taken as it is touched, never more than the cap.
 *
 * Huge pages: an arena of 64 MiB or more starts at a huge page and asks for them (huge_pages=auto):
 * records are read and written in runs of many pages, so there is one entry of the TLB and one page
 * fault where there were 512. Below that size, rounding up would show in the resident size.
 * NUMA: numa_node=N asks for memory of that node, before anything is touched, by the system call
 * itself (no library for one call); numa_device=N for memory of the node of that GPU, if anybody
 * knows it. A node that is full falls back to others rather than ending
 * the process; one that does not exist, or that the process may not use, is refused by a sentence.
 * Threads: kvt_open() and kvt_close(). Does not pin (pin.c).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/fd.h"
#include "client/host.h"
#include "gpu/gpu.h"
#include "kvtier/error.h"

#define POLICY_PREFERRED 1 /* MPOL_PREFERRED of linux/mempolicy.h */
#define NODES_MAX 1024u

/* Where a preference for huge pages begins. */
static bool huge_wanted(const struct kvt_settings *settings, uint64_t bytes)
{
    return settings->huge_pages > 0 || (settings->huge_pages < 0 && bytes >= KVT_HUGE_ARENA_MIN);
}

static int pages_advise(const struct kvt_settings *settings, struct kvt_arena_map *map, bool huge,
                        char *error, size_t error_len)
{
    uint64_t bytes = map->arena_bytes / KVT_HUGE_BYTES * KVT_HUGE_BYTES;
    if (settings->huge_pages == 0) { /* also where the system gives them to everybody */
        (void)madvise(map->arena, map->arena_bytes, MADV_NOHUGEPAGE);
        return 0;
    }
    if (!huge || bytes == 0)
        return 0;
    /* Advice only: a kernel without it serves small pages. */
    if (madvise(map->arena, bytes, MADV_HUGEPAGE) == 0) {
        map->huge = true;
        return 0;
    }
    if (settings->huge_pages < 0)
        return 0;
    int rc = -errno;
    (void)snprintf(error, error_len,
                   "huge_pages=on: this kernel refuses them (%s); set huge_pages=auto",
                   kvt_strerror(rc));
    return rc;
}

static int node_prefer(const struct kvt_settings *settings, struct kvt_arena_map *map, char *error,
                       size_t error_len)
{
    unsigned long mask[NODES_MAX / (8 * sizeof(unsigned long))] = {0};
    uint64_t node = settings->numa_node;
    if (node == KVT_AUTO && settings->numa_device != KVT_AUTO) {
        int own = kvt_gpu_node(NULL, (int)settings->numa_device, "/sys");
        node = own < 0 ? KVT_AUTO : (uint64_t)own;
    }
    if (node == KVT_AUTO || node >= NODES_MAX)
        return 0;
    const size_t bits = 8 * sizeof(mask[0]);
    mask[node / bits] = 1ul << (node % bits);
    /* One more than the bits that count: the kernel takes one off. */
    if (syscall(SYS_mbind, map->arena, map->arena_bytes, POLICY_PREFERRED, mask,
                (unsigned long)NODES_MAX + 1, 0u) == 0)
        return 0;
    int rc = -errno;
    (void)snprintf(error, error_len, "numa_node=%llu: %s", (unsigned long long)node,
                   rc == -EINVAL ? "there is no such node here, or this process may not use it: "
                                   "see /sys/devices/system/node and the cpuset"
                   : rc == -EPERM || rc == -ENOSYS
                       ? "this system does not let the process choose a node (a container may "
                         "forbid mbind): set numa_node=none and numa_device=none"
                       : kvt_strerror(rc));
    return rc;
}

/* Memory that other processes map too. Sealed: nobody can take pages away under somebody's feet. */
static int shared_memory(uint64_t bytes, int *fd)
{
    *fd = kvt_fd_high(memfd_create("kvtier-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (*fd < 0)
        return -errno;
    if (ftruncate(*fd, (off_t)bytes) != 0 ||
        fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return -errno;
    return 0;
}

/* Room for bytes at an address that huge pages fit, if slack is KVT_HUGE_BYTES: address space that
 * nobody touches. */
static int reserve(uint64_t bytes, uint64_t slack, int prot, struct kvt_arena_map *out)
{
    void *map = mmap(NULL, bytes + slack, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return -errno;
    out->map = map;
    out->map_bytes = bytes + slack;
    out->arena = map;
    out->arena_bytes = bytes;
    if (slack != 0)
        out->arena += kvt_round_up((uintptr_t)map, KVT_HUGE_BYTES) - (uintptr_t)map;
    return 0;
}

int kvt_arena_map_fd(int fd, uint64_t bytes, struct kvt_arena_map *out)
{
    *out = (struct kvt_arena_map){.fd = -1};
    int rc = reserve(bytes, bytes >= KVT_HUGE_ARENA_MIN ? KVT_HUGE_BYTES : 0, PROT_NONE, out);
    if (rc != 0)
        return rc;
    if (mmap(out->arena, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd,
             0) != MAP_FAILED)
        return 0;
    rc = -errno;
    kvt_arena_unmap(out);
    return rc;
}

int kvt_arena_map(const struct kvt_settings *settings, bool shared, struct kvt_arena_map *out,
                  char *error, size_t error_len)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t bytes = settings->dram != 0 ? settings->dram : settings->staging;
    int fd = -1;
    *out = (struct kvt_arena_map){.fd = -1};
    bytes = bytes / page * page; /* a cap: never rounded up */
    if (bytes < page || bytes > SIZE_MAX / 2)
        return KVT_E_LIMIT;
    bool huge = huge_wanted(settings, bytes);
    int rc = shared ? kvt_arena_room(bytes, error, error_len) : 0;
    if (rc == 0 && shared)
        rc = shared_memory(bytes, &fd);
    if (rc == 0 && shared)
        rc = kvt_arena_map_fd(fd, bytes, out);
    else if (rc == 0)
        rc = reserve(bytes, huge ? KVT_HUGE_BYTES : 0, PROT_READ | PROT_WRITE, out);
    out->fd = fd;
    if (rc != 0)
        return rc;
    /* Without it a fork would copy the arena. */
    (void)madvise(out->arena, bytes, MADV_DONTFORK);
    /* Nor does a core dump: it would be as large, and hold what users asked. */
    (void)madvise(out->arena, bytes, MADV_DONTDUMP);
    rc = pages_advise(settings, out, huge, error, error_len);
    return rc != 0 ? rc : node_prefer(settings, out, error, error_len);
}

void kvt_arena_unmap(struct kvt_arena_map *map)
{
    if (map->map != NULL)
        (void)munmap(map->map, map->map_bytes);
    if (map->fd >= 0)
        (void)close(map->fd);
    *map = (struct kvt_arena_map){.fd = -1};
}
