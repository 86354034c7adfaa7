/* A directory behind a backend of its own, one request at a time: submit() waits until the backend
 * has done it, reap() reports it. So tests that drive the store by hand, with a clock of their own,
 * run over real files as they do over memory.
 *
 * Use: step_io_new() makes a directory below TMPDIR, which goes with the instance; step_io_copy()
 * makes another one with the same files. Threads: the owner of the instance. */
#ifndef KVT_TESTS_STEP_IO_H
#define KVT_TESTS_STEP_IO_H

#include "io/io.h"

/* backend: enum kvt_io_backend. NULL: it cannot be had here, *rc says why. */
struct kvt_io *step_io_new(int backend, int *rc);
/* The files of any instance, at rest. */
struct kvt_io *step_io_copy(const struct kvt_io *from, int backend);

#endif
