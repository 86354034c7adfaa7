/* How much memory this process may have; and whether shared memory of a size can be had at all,
 * asked before any of it is touched.
 *
 * Shared memory is promised by mmap() and given page by page: what is too large for the container
 * or the machine is found out in the middle of the work, by a signal or by the kernel's killer, in
 * whichever process happens to touch the page. So the limits are read first, and a refusal names
 * both numbers. A limit that cannot be read is none. (memfd is not bound by the size of /dev/shm.)
 * Threads: any. Reads /proc and /sys only.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/fd.h"
#include "client/host.h"
#include "client/options.h"
#include "kvtier/error.h"

#define GROUP_BYTES 4096u /* of a line: a path of nested groups is long */

struct limit {
    uint64_t bytes; /* UINT64_MAX: none */
    const char *what;
    const char *remedy;
};

/* The number at the start of a file; UINT64_MAX when there is none ("max" too). */
static uint64_t number_in(const char *path)
{
    char text[64];
    FILE *file = kvt_fd_fopen(path);
    uint64_t value = UINT64_MAX;
    if (file == NULL)
        return value;
    if (fgets(text, sizeof(text), file) != NULL && text[0] >= '0' && text[0] <= '9')
        value = strtoull(text, NULL, 10);
    (void)fclose(file);
    return value;
}

static uint64_t number_in_dir(const char *dir, const char *name)
{
    char path[400];
    (void)snprintf(path, sizeof(path), "%.300s/%s", dir, name);
    return number_in(path);
}

/* The least number in `file` of a control group and of all groups above it, below `dir`. */
static uint64_t least_upwards(const char *dir, const char *group, const char *file)
{
    char name[GROUP_BYTES], path[GROUP_BYTES + 300];
    uint64_t least = UINT64_MAX;
    (void)snprintf(name, sizeof(name), "%s", group);
    for (size_t len = strlen(name);;) {
        while (len > 0 && name[len - 1] == '/')
            name[--len] = '\0';
        (void)snprintf(path, sizeof(path), "%.250s%s/%s", dir, name, file);
        uint64_t here = number_in(path);
        least = here < least ? here : least;
        char *last = strrchr(name, '/');
        if (last == NULL)
            return least;
        *last = '\0';
        len = (size_t)(last - name);
    }
}

/* Whether a list of words with commas has the word. */
static bool has_word(const char *list, const char *word)
{
    size_t len = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at += len)
        if ((at == list || at[-1] == ',') && (at[len] == ',' || at[len] == '\0'))
            return true;
    return false;
}

/* Lines of the file are "number:controllers:path"; of version 2 "0::path". A container sees its own
 * group as the root: that one's limit is in `dir` itself. */
uint64_t kvt_cgroup_limit(const char *groups, const char *dir)
{
    char line[GROUP_BYTES], memory[300];
    (void)snprintf(memory, sizeof(memory), "%.250s/memory", dir);
    uint64_t least = number_in_dir(dir, "memory.max");
    uint64_t other = number_in_dir(memory, "memory.limit_in_bytes");
    FILE *file = kvt_fd_fopen(groups);
    least = other < least ? other : least;
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *list = strchr(line, ':');
        char *path = list != NULL ? strchr(list + 1, ':') : NULL;
        if (path == NULL)
            continue;
        *path++ = '\0';
        if (list[1] == '\0')
            other = least_upwards(dir, path, "memory.max");
        else if (has_word(list + 1, "memory"))
            other = least_upwards(memory, path, "memory.limit_in_bytes");
        else
            continue;
        least = other < least ? other : least;
    }
    if (file != NULL)
        (void)fclose(file);
    return least >= UINT64_MAX / 4 ? UINT64_MAX
                                   : least; /* version 1 says "none" by a huge number */
}

static uint64_t cgroup_limit(void)
{
    return kvt_cgroup_limit("/proc/self/cgroup", "/sys/fs/cgroup");
}

static uint64_t machine_memory(void)
{
    char line[128];
    FILE *file = kvt_fd_fopen("/proc/meminfo");
    unsigned long long kib = 0;
    if (file != NULL && fgets(line, sizeof(line), file) != NULL &&
        strncmp(line, "MemTotal:", 9) == 0)
        kib = strtoull(line + 9, NULL, 10);
    if (file != NULL)
        (void)fclose(file);
    return kib == 0 ? UINT64_MAX : (uint64_t)kib * 1024;
}

static uint64_t process_limit(int resource)
{
    struct rlimit limit;
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return (uint64_t)limit.rlim_cur;
}

uint64_t kvt_memory_allowed(void)
{
    uint64_t group = cgroup_limit(), machine = machine_memory();
    return group < machine ? group : machine;
}

uint64_t kvt_memory_share(uint64_t allowed, uint64_t percent, uint64_t ranks)
{
    uint64_t mib = allowed == UINT64_MAX ? 0 : allowed >> 20;
    return (mib * percent / 100 / ranks) << 20;
}

int kvt_arena_room(uint64_t bytes, char *error, size_t error_len)
{
    char wanted[32], allowed[32];
    const struct limit limits[] = {
        {process_limit(RLIMIT_FSIZE), "the limit on file sizes (ulimit -f)", "raise it"},
        {process_limit(RLIMIT_AS), "the limit on memory (ulimit -v)", "raise it"},
        {cgroup_limit(), "the memory limit of this container or control group", "raise it"},
        {machine_memory(), "the memory of this machine", "there is no more"},
    };
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        if (bytes <= limits[i].bytes)
            continue;
        (void)snprintf(error, error_len,
                       "dram=%s is more than %s, which is %s: make dram smaller, or %s",
                       kvt_size_text(bytes, wanted, sizeof(wanted)), limits[i].what,
                       kvt_size_text(limits[i].bytes, allowed, sizeof(allowed)), limits[i].remedy);
        return KVT_E_LIMIT;
    }
    return 0;
}
