/* A store directory as the tools see it: recovered, its records listed. Tools only. */
#ifndef KVT_TOOLS_STORE_DIR_H
#define KVT_TOOLS_STORE_DIR_H

#include <stddef.h>
#include <stdint.h>

#include "format/disk.h"
#include "io/io.h"
#include "store/l2.h"

struct kvt_dir_record {
    struct kvt_full_key key;
    uint8_t parent[KVT_HASH_BYTES_MAX];
    uint64_t sequence;
    uint64_t generation;
    uint64_t checksum;
    struct kvt_l2_where where;
    uint32_t pages;
    uint32_t first_pos;
    uint8_t map;
    uint8_t parent_len; /* 0: starts a sequence */
};

struct kvt_dir {
    struct kvt_io *io;
    struct kvt_l2 *l2;
    struct kvt_superblock superblock;
    uint64_t next_sequence;         /* no record holds this or more */
    struct kvt_dir_record *records; /* the newest of each key, sorted by key */
    size_t record_count;
    size_t record_room;
    int out_of_memory;
};

/* The process that owns dir now, 0 when nobody does or it cannot be told. The lock is held for an
 * instant only. */
int64_t kvt_dir_owner(const char *dir);

/* Recover the store in path. writable: 1 takes the lock and may write, 0 only reads.
 * 0; a negative code, and error holds one sentence that names the directory. Blocks. */
int kvt_dir_open(const char *path, int writable, struct kvt_dir *dir, char *error,
                 size_t error_len);
/* What is said of "unix:SOCKET" where a directory is wanted. */
void kvt_dir_not_daemon(const char *path, char *error, size_t error_len);
void kvt_dir_close(struct kvt_dir *dir);
/* A directory opened writable whose records have all been purged: its segments go too, so that the
 * next open divides its cap anew. Only kvt_dir_close() may follow. 0, -errno: some are left, empty.
 */
int kvt_dir_drop_segments(struct kvt_dir *dir);

/* The listed record of a key; that of a record's parent (same namespace, group and shard). Index
 * into dir->records, or SIZE_MAX: there is none. */
size_t kvt_dir_find(const struct kvt_dir *dir, const struct kvt_full_key *key);
size_t kvt_dir_parent(const struct kvt_dir *dir, const struct kvt_dir_record *record);
/* Records that no look-up reaches, as a block before them, however far, is gone: cut[i] is 1 for
 * each (record_count of them). Returns how many; SIZE_MAX without memory. */
size_t kvt_dir_cut(const struct kvt_dir *dir, uint8_t *cut);

/* Whether any listed record is of ns; if not, the command says so. 1: yes. A typing error must not
 * look like success. outcome: behind the sentence, "" or ", and what came of it". */
int kvt_dir_knows_ns(const struct kvt_dir *dir, const uint8_t ns[KVT_NS_BYTES], const char *command,
                     const char *path, const char *outcome);

/* Read records of a directory. Files stay open for the next one in the same segment. */
struct kvt_dir_reader {
    struct kvt_io *io;
    int file;
    uint32_t segment;
    uint8_t *bytes; /* the record read last; 4 KiB aligned */
    uint32_t room;  /* of bytes */
};
void kvt_dir_reader_open(struct kvt_dir_reader *reader, const struct kvt_dir *dir);
void kvt_dir_reader_close(struct kvt_dir_reader *reader);

/* Read a record whole into reader->bytes and check it as a load does: header, key, checksum; then
 * the header against what recovery said. 0; KVT_E_CORRUPT; KVT_E_NEWER; -errno; -ENOMEM. */
int kvt_dir_read(struct kvt_dir_reader *reader, const struct kvt_dir_record *record);

/* Namespace ids as text: 32 hexadecimal digits. */
void kvt_dir_ns_text(const uint8_t ns[KVT_NS_BYTES], char text[2 * KVT_NS_BYTES + 1]);
int kvt_dir_ns_parse(const char *text, uint8_t ns[KVT_NS_BYTES]); /* 0, KVT_E_INVAL */

#endif
