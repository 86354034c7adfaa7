/* What a test tells the fake cuFile (fake_cufile.c) and learns from it. Found by
 * dlsym("fake_cufile") in the same library that the code under test loads. */
#ifndef KVT_TESTS_FAKE_CUFILE_H
#define KVT_TESTS_FAKE_CUFILE_H

#include <stdint.h>

enum fake_cufile_path { FAKE_POSIX = 0, FAKE_P2P, FAKE_NVFS, FAKE_MIXED, FAKE_SILENT };

struct fake_cufile {
    /* set by the test */
    int version;        /* 1200 */
    int path;           /* how reads are counted: enum fake_cufile_path */
    int gpu;            /* whose counters move */
    int old_statistics; /* laid out as in 1.15 */
    int open_code;      /* of cuFileDriverOpen, 0: fine; likewise: */
    int handle_code, buffer_code, stats_code;
    int read_code;    /* 5001 ..: that error; 1 .. 4095: -1 with this errno */
    int reads_good;   /* reads that succeed before read_code counts */
    int short_by;     /* bytes that a read lacks */
    int wrong;        /* a byte of each read is another one */
    int does_nothing; /* a read says that all is well */
    _Atomic int hold; /* reads begin when it is 0 again */
    unsigned nvfs_version, features;
    /* told to the test */
    int opened, handles, buffers, reads, level, started;
    _Atomic int held;   /* reads that have had to wait */
    int misaligned;     /* reads that the direct path would refuse */
    char log_path[256]; /* CUFILE_LOGFILE_PATH when the driver was opened */
};

#endif
