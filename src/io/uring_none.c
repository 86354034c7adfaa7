/* The uring engine of a build without liburing: it says so, and everything runs on posix. */
#include <errno.h>
#include <stdio.h>

#include "io/io_engine.h"

int kvt_io_uring_probe(char *why, size_t why_len)
{
    snprintf(why, why_len, "built without liburing");
    return -EOPNOTSUPP;
}

int kvt_uring_engine_new(bool direct, const struct kvt_uring_sys *sys, struct kvt_io_engine **out,
                         char *why, size_t why_len)
{
    (void)direct;
    (void)sys;
    (void)out;
    return kvt_io_uring_probe(why, why_len);
}

uint64_t kvt_uring_engine_register(struct kvt_io_engine *engine, void *base, uint64_t bytes)
{
    (void)engine;
    (void)base;
    (void)bytes;
    return 0;
}
