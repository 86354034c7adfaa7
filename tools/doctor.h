/* What `kvtier doctor` measures, apart from how it is shown. Tools only. */
#ifndef KVT_TOOLS_DOCTOR_H
#define KVT_TOOLS_DOCTOR_H

#include <stddef.h>
#include <stdint.h>

/* One line of text per probe; every function writes a zero-terminated sentence into `why`. */

/* CPU model, and how many CPUs this process may use. */
int kvt_doctor_cpus(char *model, size_t model_len);

struct kvt_doctor_memory {
    uint64_t total_bytes;     /* of the machine; 0 unknown */
    uint64_t available_bytes; /* as the kernel sees it now; 0 unknown */
    uint64_t cgroup_bytes;    /* the tightest limit above this process; UINT64_MAX: none */
    uint64_t memlock_bytes;   /* RLIMIT_MEMLOCK; UINT64_MAX: none */
    uint64_t files_max;       /* RLIMIT_NOFILE; UINT64_MAX: none */
};
void kvt_doctor_memory(struct kvt_doctor_memory *memory);

struct kvt_doctor_io {
    char backend[16];
    char backend_why[160]; /* why this backend */
    char why[256];         /* why this mode, or why nothing works */
    int direct;
    uint64_t free_bytes;
    uint64_t total_bytes;
    uint64_t probe_bytes; /* written and read back */
    double write_gbps;    /* GB/s (10^9), with fdatasync */
    double read_gbps;
};
/* Write, sync, read back and compare `bytes` in a scratch directory inside dir, which is removed
 * again; a store that lives in dir is not touched. 0; a negative code, and out->why names the
 * reason. Blocks for seconds. */
int kvt_doctor_io(const char *dir, uint64_t bytes, struct kvt_doctor_io *out);

/* Code and decode a fixed block at every level that the build supports, and compare the payload
 * with the digest that every instruction set must give. 0, or KVT_E_CORRUPT with the level in why.
 */
int kvt_doctor_codec(char *why, size_t why_len);

#endif
