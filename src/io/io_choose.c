/* Which engine moves the data of a directory: asked for, or the faster one of a short race.
 *
 * The race: one scratch file without a name, written once, then read by both engines in turns with
 * large requests; the best pass of each counts. What disturbs a pass only makes it slower, so the
 * best one is the drive's. It takes RACE_NS at most, plus the pass that is under way; on a drive so
 * slow that nothing was learned in that time it does not matter who reads. Where reads tie, writes
 * are compared in the same way and for as long; a tie of both goes to the ring, which needs no
 * threads. Threads: the owner, at open. Leaves no file and no engine behind but the
 * chosen one.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "io/io_common.h"
#include "io/io_engine.h"
#include "kvtier/error.h"

#define RACE_NS 60000000ll       /* all passes of one kind together */
#define RACE_BYTES (8ull << 20)  /* of the scratch file */
#define PIECE_BYTES (1ull << 20) /* of one request */
#define DEPTH_MAX 64u            /* requests in flight: the whole file */
#define PASSES 4u                /* of each engine */
#define TINY_BYTES (64ull << 20) /* no race for a root that keeps or has room for less */
#define TIE 1.05                 /* a lead of less is noise */

/* All pieces of the file, moved by one engine. 0 with the time, or -errno. */
static int pass(struct kvt_io_engine *engine, struct kvt_io_req *reqs, int kind, int fd,
                uint8_t *buffer, unsigned count, int64_t *elapsed_ns)
{
    struct kvt_clock clock = kvt_clock_system();
    int64_t start = kvt_clock_now(&clock);
    struct kvt_io_req *out[DEPTH_MAX];
    unsigned over = 0, sent = 0;
    int rc = 0;

    for (; sent < count && !rc; sent += !rc) {
        reqs[sent] = (struct kvt_io_req){.kind = kind, .iov_count = 1};
        reqs[sent].offset = sent * PIECE_BYTES;
        reqs[sent].iov[0] = (struct iovec){buffer + sent * PIECE_BYTES, PIECE_BYTES};
        rc = engine->ops->submit(engine, &reqs[sent], fd, (int64_t)PIECE_BYTES);
    }
    while (over < sent) { /* also after an error: the buffer is theirs until then */
        struct pollfd wait = {.fd = engine->event_fd, .events = POLLIN};
        unsigned n = engine->ops->reap(engine, out, DEPTH_MAX);

        for (unsigned i = 0; i < n; i++)
            if (!rc && out[i]->result != (int64_t)PIECE_BYTES)
                rc = out[i]->result < 0 ? (int)out[i]->result : -EIO;
        over += n;
        if (over < sent && !n)
            (void)poll(&wait, 1, -1);
    }
    *elapsed_ns = kvt_clock_now(&clock) - start;
    return rc;
}

/* Passes of one kind by both, until `end`. 0 with the best of each in best_ns; -ETIME; -errno. */
static int passes(struct kvt_io_race *race, int kind, int fd, uint8_t *buffer,
                  struct kvt_io_req *reqs, unsigned count, int64_t end, int64_t best_ns[2])
{
    struct kvt_clock clock = kvt_clock_system();
    int64_t took;
    int rc = 0;

    best_ns[0] = best_ns[1] = INT64_MAX;
    for (unsigned i = 0; i < 2 * PASSES && !rc && kvt_clock_now(&clock) < end; i++) {
        unsigned who = (i + i / 2) % 2; /* 0 1 1 0 ...: neither is always the second */

        rc = pass(race->engines[who], reqs, kind, fd, buffer, count, &took);
        best_ns[who] = KVT_MIN(best_ns[who], took);
    }
    if (!rc && (best_ns[0] == INT64_MAX || best_ns[1] == INT64_MAX))
        rc = -ETIME;
    return rc;
}

/* 0 or 1: who leads by more than noise; -1: nobody. */
static int leader(const int64_t ns[2])
{
    if ((double)ns[0] > TIE * (double)ns[1])
        return 1;
    return (double)ns[1] > TIE * (double)ns[0] ? 0 : -1;
}

unsigned kvt_io_race_winner(const struct kvt_io_race *race)
{
    int who = leader(race->best_ns);

    if (who < 0 && race->write_ns[0])
        who = leader(race->write_ns);
    return who == 1;
}

/* The passes, on a file that is written first. 0, -ETIME, -errno. */
static int run_race(struct kvt_io_race *race, int fd, uint8_t *buffer, uint64_t bytes,
                    int64_t budget_ns)
{
    unsigned count = (unsigned)(bytes / PIECE_BYTES);
    struct kvt_io_req *reqs = calloc(count, sizeof *reqs);
    struct kvt_clock clock = kvt_clock_system();
    int64_t end = kvt_clock_now(&clock) + budget_ns, took;
    int rc = reqs ? pass(race->engines[0], reqs, KVT_IO_WRITE, fd, buffer, count, &took) : -ENOMEM;

    race->write_ns[0] = race->write_ns[1] = 0;
    if (!rc)
        rc = passes(race, KVT_IO_READ, fd, buffer, reqs, count, end, race->best_ns);
    if (!rc && leader(race->best_ns) < 0 &&
        passes(race, KVT_IO_WRITE, fd, buffer, reqs, count, kvt_clock_now(&clock) + budget_ns,
               race->write_ns))
        race->write_ns[0] = race->write_ns[1] = 0; /* reads alone have to do */
    free(reqs);
    return rc;
}

int kvt_io_race(struct kvt_io_race *race, int dir_fd, bool direct, uint64_t bytes,
                int64_t budget_ns)
{
    struct kvt_rng rng = {kvt_rng_seed_os()};
    uint8_t *buffer = NULL;
    int fd, rc;

    if (!bytes || bytes % PIECE_BYTES || bytes > DEPTH_MAX * PIECE_BYTES)
        return KVT_E_INVAL;
    fd = kvt_posix_scratch(dir_fd);
    if (fd < 0)
        return fd;
    rc = direct && fcntl(fd, F_SETFL, O_RDWR | O_DIRECT) < 0 ? -errno : 0;
    if (!rc) {
        buffer = aligned_alloc(KVT_IO_ALIGN, bytes);
        rc = buffer ? 0 : -ENOMEM;
    }
    if (!rc) {
        for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) { /* drives compress zeros */
            uint64_t word = kvt_rng_next(&rng);
            memcpy(buffer + i, &word, sizeof word);
        }
        rc = run_race(race, fd, buffer, bytes, budget_ns);
    }
    free(buffer);
    close(fd);
    return rc;
}

/* Why there is nothing to measure, or NULL. */
static const char *no_race(const struct kvt_io_posix_params *params, int dir_fd, bool direct)
{
    struct statvfs fs;

    if (params->read_only)
        return "opened for reading only, not measured";
    if (!direct)
        return "reads go through the page cache, where a ring gains nothing";
    if (params->cap_bytes && params->cap_bytes < TINY_BYTES)
        return "the root is too small to measure";
    if (fstatvfs(dir_fd, &fs) || (uint64_t)fs.f_bavail * fs.f_frsize < TINY_BYTES)
        return "the file system is too full to measure";
    return NULL;
}

/* The faster of two running engines is *out, the other one is stopped. */
static int race_them(struct kvt_io_engine *uring, struct kvt_io_engine *posix, int dir_fd,
                     bool direct, struct kvt_io_engine **out, char *why, size_t why_len)
{
    struct kvt_io_race race = {.engines = {uring, posix}};
    int rc = kvt_io_race(&race, dir_fd, direct, RACE_BYTES, RACE_NS);
    bool ring = !rc && kvt_io_race_winner(&race) == 0;
    size_t used;

    *out = ring ? uring : posix;
    (ring ? posix : uring)->ops->stop(ring ? posix : uring);
    if (rc)
        snprintf(why, why_len, "%s",
                 rc == -ETIME ? "the drive is too slow for a short measurement to tell"
                              : "the measurement failed");
    else
        snprintf(why, why_len, "measured at open: uring read %.2f GB/s, posix %.2f",
                 (double)RACE_BYTES / (double)race.best_ns[0],
                 (double)RACE_BYTES / (double)race.best_ns[1]);
    used = strlen(why);
    if (!rc && race.write_ns[0])
        snprintf(why + used, why_len - used, "; uring wrote %.2f, posix %.2f",
                 (double)RACE_BYTES / (double)race.write_ns[0],
                 (double)RACE_BYTES / (double)race.write_ns[1]);
    return 0;
}

/* posix where the ring cannot be had or gains nothing, else a race. */
static int choose(const struct kvt_io_posix_params *params, const struct kvt_posix_sys *sys,
                  int dir_fd, bool direct, struct kvt_io_engine **out, char *why, size_t why_len)
{
    const char *none = no_race(params, dir_fd, direct);
    struct kvt_io_engine *uring = NULL, *posix = NULL;
    int rc = kvt_posix_engine_new(sys, direct, params->threads, &posix);

    if (rc)
        return rc;
    *out = posix;
    if (kvt_uring_engine_new(direct, NULL, &uring, why, why_len))
        return 0; /* EPERM, ENOSYS, EINVAL, ENOMEM, ...: why has the reason */
    if (!none)
        return race_them(uring, posix, dir_fd, direct, out, why, why_len);
    uring->ops->stop(uring);
    snprintf(why, why_len, "%s", none);
    return 0;
}

int kvt_io_choose(const struct kvt_io_posix_params *params, const struct kvt_posix_sys *sys,
                  int dir_fd, bool direct, struct kvt_io_engine **out, char *why, size_t why_len)
{
    uint64_t fixed;
    int rc;

    if (params->backend == KVT_IO_POSIX) {
        snprintf(why, why_len, "asked for");
        return kvt_posix_engine_new(sys, direct, params->threads, out);
    }
    if (params->backend == KVT_IO_URING) {
        rc = kvt_uring_engine_new(direct, NULL, out, why, why_len);
        if (rc) {
            kvt_log(&params->log, KVT_LOG_ERROR, "%s: the uring backend is required, but %s",
                    params->path, why);
            return KVT_E_UNSUPPORTED;
        }
        snprintf(why, why_len, "asked for");
    } else {
        rc = choose(params, sys, dir_fd, direct, out, why, why_len);
        if (rc)
            return rc;
    }
    if (params->fixed && params->fixed_bytes) {
        size_t used = strlen(why);

        fixed = kvt_uring_engine_register(*out, params->fixed, params->fixed_bytes);
        snprintf(why + used, why_len - used, "; %llu of %llu MiB registered",
                 (unsigned long long)(fixed >> 20),
                 (unsigned long long)(params->fixed_bytes >> 20));
    }
    return 0;
}
