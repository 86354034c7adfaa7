/* Huge pages for an arena that several processes map.
 *
 * The kernel gives them to private memory at the first touch, but to shared memory only where the
 * system says so (shmem_enabled; usually "never"), and a drive that reads into small pages takes
 * half as long again. So kvtierd asks for them piece by piece (MADV_COLLAPSE, Linux 6.1), which
 * works whatever shmem_enabled says. That takes the memory when the daemon starts and not as it is
 * touched, for the control group of the daemon; where there are none to be had, small pages stay,
 * and nothing else is given up for them.
 * A client that pins the memory asks before it pins, from the other end on: what a device has
 * pinned cannot be moved together any more. Invariants: contents never change; a client that has
 * the piece mapped sees the same bytes. Threads: one of its own, in the background, from
 * kvt_huge_start() to kvt_huge_stop(); kvt_huge_make() on its caller's.
 */
#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/host.h"
#include "kvtier/error.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#define IN_VAIN_MAX 32u /* pieces in a row that could not be had: there are none left */
#define NICENESS 10
#define PASSES 4
#define PAUSE_MS 1000
#define STEP_MS 50
#define TRIES 3 /* before pinning, a millisecond apart: somebody is just filling a page */

static bool stopped(struct kvt_host *host)
{
    /* relaxed: nothing else is told by it */
    return atomic_load_explicit(&host->huge_stop, memory_order_relaxed) != 0;
}

/* One piece. 0, -errno. */
static int collapse(uint8_t *piece)
{
    /* a piece without any page is refused; not by a read: somebody may write there */
    (void)madvise(piece, KVT_PAGE_BYTES, MADV_POPULATE_READ);
    return madvise(piece, KVT_HUGE_BYTES, MADV_COLLAPSE) == 0 ? 0 : -errno;
}

/* One walk, from the end on: what loads from disk stage through is there. Pieces that are huge
 * already are cheap. 0, or the last error. */
static int walk(struct kvt_host *host)
{
    uint64_t left = host->memory.arena_bytes / KVT_HUGE_BYTES, got = 0;
    unsigned in_vain = 0;
    int rc = 0;
    while (left > 0 && in_vain < IN_VAIN_MAX && !stopped(host)) {
        int failed = collapse(host->memory.arena + --left * KVT_HUGE_BYTES);
        if (failed == 0) {
            in_vain = 0;
            got += KVT_HUGE_BYTES;
            if (got > atomic_load_explicit(&host->huge_bytes, memory_order_relaxed))
                atomic_store_explicit(&host->huge_bytes, got, memory_order_relaxed);
            continue;
        }
        rc = failed;
        in_vain++;
        if (rc == -EINVAL) /* this kernel does not know it, or not for shared memory */
            break;
    }
    return rc;
}

static void *huge_main(void *arg)
{
    struct kvt_host *host = arg;
    int rc = 0;
    (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICENESS); /* of this thread */
    for (int pass = 0; pass < PASSES && !stopped(host); pass++) {
        rc = walk(host); /* pages that somebody is just filling are refused: again later */
        if (rc == 0 || rc == -EINVAL)
            break;
        for (int i = 0; i < PAUSE_MS / STEP_MS && !stopped(host); i++)
            nanosleep(&(const struct timespec){0, STEP_MS * 1000000}, NULL);
    }
    if (rc != 0 && !stopped(host))
        kvt_log(&host->log, KVT_LOG_INFO,
                "huge pages: %llu of %llu MiB of DRAM have them (%s); the rest does without",
                (unsigned long long)atomic_load_explicit(&host->huge_bytes, memory_order_relaxed) >>
                    20,
                (unsigned long long)(host->memory.arena_bytes >> 20), kvt_strerror(rc));
    return NULL;
}

bool kvt_huge_make(uint8_t *base, uint64_t bytes, const _Atomic int *stop)
{
    unsigned in_vain = 0;
    for (uint64_t at = 0; at + KVT_HUGE_BYTES <= bytes && in_vain < IN_VAIN_MAX;
         at += KVT_HUGE_BYTES) {
        int rc = -EAGAIN;
        /* relaxed: nothing else is told by it */
        if (atomic_load_explicit(stop, memory_order_relaxed))
            break;
        for (int i = 0; i < TRIES && rc != 0 && rc != -EINVAL; i++) {
            if (i > 0)
                nanosleep(&(const struct timespec){0, 1000000}, NULL);
            rc = collapse(base + at);
        }
        if (rc == -EINVAL)
            return false;
        in_vain = rc == 0 ? 0 : in_vain + 1;
    }
    return in_vain < IN_VAIN_MAX;
}

void kvt_huge_start(struct kvt_host *host)
{
    if (!host->shared || !host->memory.huge)
        return;
    /* Without a thread there are small pages, which serve too. */
    host->huge_running = kvt_thread_start(&host->huge_thread, "kvt-huge", huge_main, host) == 0;
}

void kvt_huge_stop(struct kvt_host *host)
{
    if (!host->huge_running)
        return;
    atomic_store_explicit(&host->huge_stop, 1, memory_order_relaxed);
    (void)pthread_join(host->huge_thread, NULL);
    host->huge_running = false;
}
