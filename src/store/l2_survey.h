/* What is in a root directory: names, superblock copies, segment headers, first journal page. Reads
 * only; decides whether the directory is ours. Used by open, fsck and whoever must know before
 * taking the lock. What cannot be read, or looks damaged, is looked at once more: a read may fail,
 * or bring a wrong bit, just once. Threads: one. Blocks, allocates. */
#ifndef KVT_STORE_L2_SURVEY_H
#define KVT_STORE_L2_SURVEY_H

#include <stdbool.h>

#include "format/disk.h"
#include "io/io.h"
#include "kvtier/error.h"
#include "store/l2_scan.h"

#define KVT_L2_NAME_SUPERBLOCK "superblock"
#define KVT_L2_NAME_JOURNAL "journal"
#define KVT_L2_NAME_JOURNAL_NEXT "journal.tmp"
#define KVT_L2_NAME_LOCK "lock"
#define KVT_L2_NAME_STATS "stats"
#define KVT_L2_NAME_TTL "ttl"
#define KVT_L2_NAME_PLAN "plan" /* the client half's, which alone reads it; likewise: */
#define KVT_L2_NAME_PATHS "gpu-paths"
#define KVT_L2_NAME_ADMISSION "admission"

enum kvt_l2_name {
    KVT_L2_NAME_IS_FOREIGN = 0,
    KVT_L2_NAME_IS_SUPERBLOCK,
    KVT_L2_NAME_IS_JOURNAL,
    KVT_L2_NAME_IS_LOCK,
    KVT_L2_NAME_IS_STATS, /* or the client half's: no block depends on them */
    KVT_L2_NAME_IS_SEGMENT,
    KVT_L2_NAME_IS_TEMP /* one of the above + ".tmp": unfinished, reclaimed at open */
};

enum kvt_l2_name kvt_l2_name_kind(const char *name, uint32_t *segment);
void kvt_l2_segment_name(uint32_t segment, char name[KVT_IO_NAME_MAX]);

struct kvt_l2_survey_segment {
    uint32_t number;
    int status; /* of its header: 0, KVT_E_CORRUPT, KVT_E_NEWER, -errno */
    uint64_t file_bytes;
    uint64_t generation;
    uint64_t segment_bytes;
    uint8_t root_id[16];
};

struct kvt_l2_survey {
    struct kvt_superblock superblock; /* the newer valid copy */
    int superblock_copy;              /* which, or -1: none is valid */
    int superblock_status[2];
    uint64_t superblock_bytes;
    bool superblock_file, journal_file, stats_file, lock_file;
    bool lock_ok;       /* the lock file holds nothing, or a process id */
    bool journal_ok;    /* page 0 is valid */
    int journal_status; /* of its page 0, where there is a journal */
    uint64_t journal_bytes;
    struct kvt_l2_survey_segment *segments; /* by number */
    uint32_t segment_count, segment_capacity;
    uint32_t temps;
    uint32_t foreign;
    char foreign_name[KVT_IO_NAME_MAX]; /* the first, cut */
};

/* 0, -ENOMEM, -errno of listing. Free in every case. */
int kvt_l2_survey(struct kvt_io *io, struct kvt_l2_survey *survey);
void kvt_l2_survey_free(struct kvt_l2_survey *survey);

/* A status that says that bytes could not be read, and nothing about what they are. */
static inline bool kvt_l2_unread(int status)
{
    return status < 0 && status > KVT_E_INVAL;
}

/* 0 a root of ours; 1 empty: a root may be made here; KVT_E_NOT_OURS; KVT_E_NEWER; -errno: no sign
 * of a store, but something could not be read. */
int kvt_l2_survey_verdict(const struct kvt_l2_survey *survey);

/* The first thing that could not be read: its -errno; 0: all could. */
int kvt_l2_survey_unread(const struct kvt_l2_survey *survey);

/* Is there a segment with a valid header, or one that could not be read? */
bool kvt_l2_survey_any_segment(const struct kvt_l2_survey *survey);

/* Root id and segment size of a root: from the superblock, or, when both copies are lost, what most
 * segment headers say. False when neither tells. */
bool kvt_l2_survey_identity(const struct kvt_l2_survey *survey, uint8_t root_id[16],
                            uint64_t *segment_bytes);

/* Submit n requests and wait for all (open and fsck only; no other may be in flight). Results are
 * in the requests. 0, -errno of submit. */
int kvt_l2_gather(struct kvt_io *io, struct kvt_io_req *reqs, uint32_t n);

#endif
