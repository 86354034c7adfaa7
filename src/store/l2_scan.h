/* Reading one segment: footer of a sealed one, batch headers of an open one. Reads only. Used by
 * recovery and fsck. Threads: one. Blocks; allocates in init. */
#ifndef KVT_STORE_L2_SCAN_H
#define KVT_STORE_L2_SCAN_H

#include <stdbool.h>

#include "format/disk.h"
#include "io/io.h"

#define KVT_L2_LOOKS 2u /* at what cannot be read or looks damaged, before that is believed */
#define KVT_L2_TAIL_BYTES (64u << 10) /* footer and trailer of most segments, in one read */

struct kvt_l2_scan {
    struct kvt_io *io;
    uint32_t segment_pages;
    struct kvt_entry *entries; /* capacity segment_pages; 4 KiB aligned; owned unless taken */
    uint8_t *window;           /* WINDOW bytes of the segment, for walking */
    uint32_t window_page, window_pages;
    uint8_t *large; /* for records that do not fit the window */
    uint32_t large_pages;

    /* of the segment scanned last */
    int file;
    uint32_t segment;
    uint64_t generation;
    uint32_t count;     /* entries */
    uint32_t batches;   /* walked */
    uint32_t next_page; /* where the walk ended: the next batch would start here */
    uint64_t previous;  /* checksum of the last batch header */
    bool torn;          /* something that is not a clean end stopped the walk */
    bool gap;           /* a footer's: a walk would not find all that it names */
    uint32_t unread;    /* records that verify could not read */
};

int kvt_l2_scan_init(struct kvt_l2_scan *scan, struct kvt_io *io, uint32_t segment_pages);
void kvt_l2_scan_free(struct kvt_l2_scan *scan);

/* The footer. tail: the last tail_bytes bytes of the segment, already read, or NULL.
 * 0: entries are filled; KVT_E_CORRUPT: not sealed, or damaged: walk it; -errno. */
int kvt_l2_scan_footer(struct kvt_l2_scan *scan, int file, uint32_t segment, uint64_t generation,
                       const uint8_t *tail, uint32_t tail_bytes);

/* Is there a valid trailer in the segment's last page? */
bool kvt_l2_scan_sealed(const uint8_t *last_page, uint32_t segment, uint64_t generation,
                        uint32_t segment_pages);

/* Walk the batches from page 1 on. Always fills entries, count, next_page. 0, -errno. */
int kvt_l2_scan_walk(struct kvt_l2_scan *scan, int file, uint32_t segment, uint64_t generation);
/* The same in parts: begin, then go on for as long as it returns -EAGAIN of the backend. */
void kvt_l2_scan_begin(struct kvt_l2_scan *scan, int file, uint32_t segment, uint64_t generation);
int kvt_l2_scan_walk_on(struct kvt_l2_scan *scan);

/* Verify the records of the scanned segment that start at from_page or later; entries whose record
 * does not match, or cannot be read (counted in scan->unread), are removed. skip: optional, entries
 * that need not match (purged). Returns how many were removed, -ENOMEM. */
int kvt_l2_scan_verify(struct kvt_l2_scan *scan, uint64_t from_page,
                       bool (*skip)(void *ctx, const struct kvt_entry *entry), void *ctx);

/* One record: 0; KVT_E_CORRUPT, KVT_E_NEWER; -errno; -ENOMEM. */
int kvt_l2_scan_record(struct kvt_l2_scan *scan, const struct kvt_entry *entry);

#endif
