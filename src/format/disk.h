/* On-disk structures of a root directory, apart from the in-memory ones. Pure functions.
 *
 *   superblock      two copies (4 KiB each, alternating), the newer valid one counts
 *   journal         4 KiB pages, appended and fdatasynced before a purge returns
 *   seg-%08x        page 0 segment header | batches ... | footer | last page: trailer (when sealed)
 *   lock, stats     the owner's lock; the last snapshot of the counters as text
 *
 * A batch is one append: a 4 KiB-aligned batch header that lists its records, then the records.
 * So an open segment is walked by reading batch headers, and a record's own bytes stay the same in
 * every tier. Everything carries magic, version, its own location and a checksum (XXH3-64 over all
 * bytes before the checksum field); a generation keeps an earlier life of a recycled segment from
 * coming back: every batch header, footer and trailer repeats the generation of the segment header.
 */
#ifndef KVT_FORMAT_DISK_H
#define KVT_FORMAT_DISK_H

#include "format/record.h"

#define KVT_DISK_VERSION 0u
#define KVT_SUPERBLOCK_MAGIC 0x3042535245495456ull /* "VTIERSB0" */
#define KVT_SEGMENT_MAGIC 0x3047455354564bull      /* "KVTSEG0" */
#define KVT_BATCH_MAGIC 0x3054414254564bull        /* "KVTBAT0" */
#define KVT_TRAILER_MAGIC 0x30444e4554564bull      /* "KVTEND0" */
#define KVT_JOURNAL_MAGIC 0x304e524a54564bull      /* "KVTJRN0" */

#define KVT_BATCH_RECORDS_MAX 65535u /* a segment of 256 MiB has 65,536 pages */
#define KVT_SEGMENT_BYTES_MIN (1u << 20)
#define KVT_SEGMENT_BYTES_MAX (256u << 20)
#define KVT_SEGMENTS_OF_CAP 64u /* as many are of a cap, between those */
#define KVT_JOURNAL_ITEMS_MAX 55u

struct kvt_superblock { /* 4 KiB; copy i at offset i * 4096 of file "superblock" */
    uint64_t magic;
    uint32_t version;
    uint32_t copy;       /* which copy this is: its own location */
    uint8_t root_id[16]; /* random, made with the root */
    uint64_t update;     /* rises by one with each write; the higher valid copy counts */
    uint64_t cap_bytes;  /* of the whole root */
    uint32_t segment_bytes;
    uint32_t segment_count;    /* files that may exist */
    uint64_t next_generation;  /* no segment header holds this or more */
    uint64_t next_sequence;    /* no record holds this or more (reserved ahead) */
    uint64_t journal_epoch;    /* a journal of an older epoch is void; 0: nothing was ever purged */
    uint64_t journal_pages;    /* of that epoch, that purges which returned rely on */
    uint64_t clean_generation; /* the segment that was open at the last close, and the page ... */
    uint64_t clean_page;       /* ... before which all of it is durable: not verified at open */
    uint8_t zero[4096 - 104 - 8];
    uint64_t checksum;
};
static_assert(sizeof(struct kvt_superblock) == 4096, "superblock is one page");

struct kvt_segment_header { /* page 0 of a segment */
    uint64_t magic;
    uint32_t version;
    uint32_t segment; /* its own number */
    uint8_t root_id[16];
    uint64_t generation;
    uint64_t segment_bytes; /* so that a root whose superblock was lost can still be read */
    uint8_t zero[4096 - 48 - 8];
    uint64_t checksum;
};
static_assert(sizeof(struct kvt_segment_header) == 4096, "segment header is one page");

struct kvt_entry {                      /* one record, in batch headers and footers */
    struct kvt_full_key key;            /*  0 */
    uint8_t parent[KVT_HASH_BYTES_MAX]; /* 56 */
    uint64_t sequence;                  /* 88 */
    uint64_t checksum;                  /* 96 the record's */
    uint32_t page;                      /* 104 first page of the record in the segment */
    uint32_t pages;                     /* 108 */
    uint32_t first_pos;                 /* 112 */
    uint8_t map;                        /* 116 */
    uint8_t parent_len;                 /* 117 */
    uint8_t reserved[2];                /* 118 */
    uint64_t zero;                      /* 120 */
};
static_assert(sizeof(struct kvt_entry) == 128, "entry is 128 bytes");

struct kvt_batch_header { /* header_pages pages, followed by the records */
    uint64_t magic;
    uint32_t version;
    uint32_t segment;
    uint64_t generation;
    uint32_t page;         /* its own first page in the segment */
    uint32_t header_pages; /* ceil((64 + count*128) / 4096) */
    uint32_t pages;        /* whole batch, header included: the next batch starts at page + pages */
    uint32_t count;
    uint64_t previous; /* checksum of the batch before it in this life, 0 for the first: a walk
                          never steps from a new batch onto a stale one of the same generation */
    uint64_t zero;
    uint64_t checksum; /* of the 56 bytes before it, then everything after it in header_pages */
    struct kvt_entry entries[];
};
static_assert(sizeof(struct kvt_batch_header) == 64, "batch header is 64 bytes");

struct kvt_trailer { /* last page of a sealed segment */
    uint64_t magic;
    uint32_t version;
    uint32_t segment;
    uint64_t generation;
    uint32_t footer_page;     /* entries start here */
    uint32_t footer_count;    /* number of entries */
    uint64_t footer_checksum; /* XXH3-64 of footer_count * 128 bytes */
    uint8_t zero[4096 - 40 - 8];
    uint64_t checksum;
};
static_assert(sizeof(struct kvt_trailer) == 4096, "trailer is one page");

enum kvt_journal_kind {
    KVT_JOURNAL_PURGE_NS = 1,  /* records of ns with sequence < value are gone */
    KVT_JOURNAL_PURGE_KEY = 2, /* records of key with sequence < value are gone */
    KVT_JOURNAL_LEVEL_MAP = 3, /* reserved: maps travel in their records */
    KVT_JOURNAL_PURGE_ALL = 4  /* every record with sequence < value is gone; key is not used */
};

struct kvt_journal_page { /* one append; 4 KiB; page i at offset i * 4096 */
    uint64_t magic;
    uint32_t version;
    uint32_t page; /* its own number */
    uint64_t epoch;
    uint32_t count;
    uint32_t reserved;
    struct kvt_journal_item {
        uint32_t kind;
        uint32_t reserved;
        struct kvt_full_key key; /* PURGE_NS: only ns counts */
        uint64_t value;
    } items[KVT_JOURNAL_ITEMS_MAX];
    uint8_t zero[4096 - 32 - 55 * 72 - 8];
    uint64_t checksum;
};
static_assert(sizeof(struct kvt_journal_page) == 4096, "journal page is one page");

#define KVT_DISK_RESULT __attribute__((warn_unused_result))

/* Fill in the checksum (last field, or the batch header's rule). */
void kvt_superblock_finish(struct kvt_superblock *superblock);
void kvt_segment_header_finish(struct kvt_segment_header *header);
void kvt_trailer_finish(struct kvt_trailer *trailer);
void kvt_journal_page_finish(struct kvt_journal_page *page);
void kvt_batch_header_finish(struct kvt_batch_header *batch);

/* Validate bytes read from location `where` (copy, segment or page number). 0; KVT_E_CORRUPT (torn,
 * foreign, misdirected); KVT_E_NEWER (magic and checksum fit, version is newer: the place of magic,
 * version and checksum is the same in every future version, so a damaged version field is told
 * from a newer one). Never reads past `bytes`: a batch header that needs more is KVT_E_CORRUPT, and
 * kvt_batch_header_bytes() says how many to read. */
KVT_DISK_RESULT int kvt_superblock_check(const struct kvt_superblock *superblock, uint32_t copy);
KVT_DISK_RESULT int kvt_segment_header_check(const struct kvt_segment_header *header,
                                             uint32_t segment, const uint8_t root_id[16]);
KVT_DISK_RESULT int kvt_trailer_check(const struct kvt_trailer *trailer, uint32_t segment,
                                      uint64_t generation, uint32_t segment_pages);
KVT_DISK_RESULT int kvt_journal_page_check(const struct kvt_journal_page *page, uint32_t number,
                                           uint64_t epoch);
/* Also checks every entry: inside the batch, in order, not overlapping, sane lengths. */
KVT_DISK_RESULT int kvt_batch_header_check(const struct kvt_batch_header *batch, size_t bytes,
                                           uint32_t segment, uint64_t generation, uint32_t page,
                                           uint32_t segment_pages);
KVT_DISK_RESULT int kvt_entry_check(const struct kvt_entry *entry, uint32_t segment_pages);

/* Bytes of the pages of a batch header with `count` entries; 0 when count is 0 or above
 * KVT_BATCH_RECORDS_MAX. */
uint32_t kvt_batch_header_bytes(uint32_t count);

/* Checksum of the footer's entries, as the trailer keeps it. */
uint64_t kvt_footer_checksum(const struct kvt_entry *entries, uint32_t count);

/* Segment size rule: clamp(cap/64, 1 MiB, 256 MiB), rounded down to 4 KiB. */
uint32_t kvt_segment_bytes_for(uint64_t cap_bytes);

#endif
