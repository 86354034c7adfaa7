/* A kernel without io_uring, for tests: a seccomp filter as containers have it. */
#ifndef KVT_TESTS_NO_RING_H
#define KVT_TESTS_NO_RING_H

/* From now on io_uring_setup(2) fails with `error` (an errno) in this process and its children: in
 * a child of the test only. 0; 1 no filter can be installed here. */
int no_ring(int error);

#endif
