/* Read-only check of a root: superblock, journal, segments, every record. Changes nothing, needs no
 * memory beyond one segment's entries and 24 bytes a record.
 *
 * A problem is damage: bytes that are not what a correct writer on a correct drive leaves, even
 * across a crash. A note is anything else worth a line: what a crash left unfinished (the next open
 * drops it), files that are not ours. Threads: one. Blocks; allocates. */
#ifndef KVT_STORE_FSCK_H
#define KVT_STORE_FSCK_H

#include <stdbool.h>
#include <stdint.h>

#include "io/io.h"

struct kvt_fsck_params {
    struct kvt_io *io; /* read-only will do; borrowed */
    bool quick;        /* structures only: records are not read */
    /* Each finding, as one sentence that names the file. Borrowed during the call. */
    void (*found)(void *ctx, bool problem, const char *text);
    /* Progress; a return other than 0 ends the check. Optional. */
    int (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *ctx;
};

struct kvt_fsck_report {
    uint64_t segments;   /* that hold records */
    uint64_t records;    /* the newest of each key, verified unless quick */
    uint64_t bytes;      /* of those */
    uint64_t superseded; /* older records of the same keys */
    uint64_t purged;     /* records that the journal hides */
    uint64_t file_bytes; /* of all our files */
    uint64_t cap_bytes;  /* 0: superblock lost */
    uint64_t problems, notes;
};

/* 0 checked, the report is filled; KVT_E_NOT_OURS; KVT_E_NEWER; 1 the directory is empty;
 * KVT_E_CANCELED ended by progress; -ENOMEM; -errno. */
__attribute__((warn_unused_result)) int kvt_fsck(const struct kvt_fsck_params *params,
                                                 struct kvt_fsck_report *report);

#endif
