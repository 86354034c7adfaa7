/* Seeds from the operating system. Threads: any; no state. */
#include "base/rng.h"

#include <errno.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

uint64_t kvt_rng_seed_os(void)
{
    uint64_t seed;
    struct timespec ts;
    ssize_t got;

    do
        got = getrandom(&seed, sizeof seed, 0);
    while (got < 0 && errno == EINTR);
    if (got == (ssize_t)sizeof seed)
        return seed;
    /* only a sandbox without getrandom comes here: differing between processes is enough */
    clock_gettime(CLOCK_REALTIME, &ts);
    struct kvt_rng rng = {(uint64_t)ts.tv_sec * 1000000007u + (uint64_t)ts.tv_nsec +
                          ((uint64_t)getpid() << 40)};
    return kvt_rng_next(&rng);
}
