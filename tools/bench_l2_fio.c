/* fio's side of `kvtier bench l2`: one fixed job as a child process, its JSON read back. The job
 * moves the same bytes with requests of the same size and as many in flight; nothing is checked.
 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench_l2.h"

#define OUTPUT_BYTES_MAX (256u << 10)

extern char **environ;

/* Run fio and take what it prints. 0, -errno. */
static int run_fio(char *const argv[], char *text, size_t len)
{
    posix_spawn_file_actions_t actions;
    int pipes[2], status = 0;
    size_t used = 0;
    ssize_t n;
    pid_t pid;

    if (pipe(pipes) < 0)
        return -errno;
    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawn_file_actions_adddup2(&actions, pipes[1], STDOUT_FILENO);
    (void)posix_spawn_file_actions_addclose(&actions, pipes[0]);
    (void)posix_spawn_file_actions_addclose(&actions, pipes[1]);
    int rc = -posix_spawnp(&pid, argv[0], &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(pipes[1]);
    while (!rc && used < len - 1) {
        n = read(pipes[0], text + used, len - 1 - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        used += (size_t)n;
    }
    close(pipes[0]);
    text[used] = '\0';
    if (rc)
        return rc;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -errno;
    return WIFEXITED(status) && !WEXITSTATUS(status) ? 0 : -EIO;
}

/* GB/s out of fio's report. 0, -EPROTO. */
static int parse(const char *text, bool write, double *gbps)
{
    const char *begin = strchr(text, '{'); /* notes may come first */
    json_t *report = begin ? json_loads(begin, JSON_DISABLE_EOF_CHECK, NULL) : NULL;
    json_t *job = json_array_get(json_object_get(report, "jobs"), 0);
    json_t *side = json_object_get(job, write ? "write" : "read");
    double bytes = (double)json_integer_value(json_object_get(side, "io_bytes"));
    double ms = json_number_value(json_object_get(side, "runtime"));
    json_t *rate = json_object_get(side, "bw_bytes");

    *gbps = json_is_integer(rate) ? (double)json_integer_value(rate) * 1e-9
            : ms > 0              ? bytes / ms * 1e-6
                                  : 0;
    json_decref(report);
    return bytes > 0 && *gbps > 0 ? 0 : -EPROTO;
}

int kvt_bench_fio(const char *file, const struct kvt_bench_l2_shape *shape, bool write, bool direct,
                  double *gbps, char *why, size_t why_len)
{
    char name[4200], size[64], block[64], depth[64];
    const char *const words[] = {"fio",
                                 "--name=kvtier",
                                 name,
                                 size,
                                 block,
                                 depth,
                                 write ? "--rw=write" : "--rw=read",
                                 direct ? "--direct=1" : "--direct=0",
                                 "--ioengine=io_uring",
                                 "--overwrite=1",
                                 "--fallocate=none",
                                 "--invalidate=1",
                                 "--output-format=json",
                                 NULL};
    char *text = malloc(OUTPUT_BYTES_MAX);
    int rc;

    if (!text)
        return -ENOMEM;
    snprintf(name, sizeof(name), "--filename=%s", file);
    snprintf(size, sizeof(size), "--size=%" PRIu64, shape->bytes);
    snprintf(block, sizeof(block), "--bs=%" PRIu64, shape->block);
    snprintf(depth, sizeof(depth), "--iodepth=%u", shape->depth);
    rc = run_fio((char *const *)words, text, OUTPUT_BYTES_MAX); /* execve() changes none of them */
    if (rc == -ENOENT)
        snprintf(why, why_len, "fio is not installed: it is in the package \"fio\"");
    else if (rc)
        snprintf(why, why_len, "fio failed: %.200s", text);
    else if (parse(text, write, gbps)) {
        snprintf(why, why_len, "fio's report cannot be read");
        rc = -EPROTO;
    }
    free(text);
    return rc;
}
