/* A write beyond RLIMIT_FSIZE fails with EFBIG and also raises SIGXFSZ, which ends a process that
 * does not expect it. The store's own threads block all signals; opening and closing write from the
 * thread that calls. There the signal is blocked meanwhile, and taken out if it came.
 * Threads: any; a guard belongs to the thread that took it.
 */
#include "client/fsize.h"

#include <time.h>

static bool pending(void)
{
    sigset_t set;
    return sigpending(&set) == 0 && sigismember(&set, SIGXFSZ) == 1;
}

void kvt_fsize_hold(struct kvt_fsize_guard *guard)
{
    sigset_t only;
    (void)sigemptyset(&only);
    (void)sigaddset(&only, SIGXFSZ);
    guard->held = !pending() && pthread_sigmask(SIG_BLOCK, &only, &guard->before) == 0;
}

void kvt_fsize_release(struct kvt_fsize_guard *guard)
{
    static const struct timespec at_once = {0, 0};
    sigset_t only;
    if (!guard->held)
        return;
    (void)sigemptyset(&only);
    (void)sigaddset(&only, SIGXFSZ);
    while (pending() && sigtimedwait(&only, NULL, &at_once) == SIGXFSZ)
        ;
    (void)pthread_sigmask(SIG_SETMASK, &guard->before, NULL);
    guard->held = false;
}
