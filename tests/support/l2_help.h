/* For tests of the L2 log: a small store over one root. Records are made from (id, version), so
 * every read can be compared with what was put; an array by id is the index.
 *
 * Use: l2_env_init(); l2_env_open() over an io; put, get, flush, purge; l2_env_close(). All calls
 * run the log until their work is done. Checks that must always hold are made inside (a read never
 * gives other bytes; every write is reported once; the files never exceed the cap). */
#ifndef KVT_TESTS_L2_HELP_H
#define KVT_TESTS_L2_HELP_H

#include "base/rng.h"
#include "store/l2.h"

#define L2_IDS 4096u
#define L2_WRITES_MAX 512u

struct l2_put_state {
    struct kvt_l2_write write;
    uint32_t id, version;
    bool busy;
};

struct l2_entry {
    bool present;
    uint32_t version; /* of the bytes, known after put; found ones learn it from the sequence */
    struct kvt_l2_where where;
    uint32_t pages;
    uint64_t sequence, generation, checksum;
};

struct l2_env {
    struct kvt_io *io;
    struct kvt_l2 *l2;
    uint64_t cap;
    int64_t now;            /* the log's clock: advanced by the test, or by waiting */
    uint64_t sequence;      /* next */
    uint64_t next_sequence; /* as the last open said */
    struct l2_entry index[L2_IDS];
    /* sequence -> version of every put of this env, by id: the latest few */
    struct {
        uint64_t sequence;
        uint32_t version;
    } puts[L2_IDS][8];
    struct l2_put_state states[L2_WRITES_MAX];
    uint32_t in_flight;
    void (*on_evict)(uint32_t segment); /* optional */
    uint64_t found, evictions, reported, failed;
    int last_status;
    bool pinned_segments[1u << 12];
    int log_level; /* messages up to this are printed */
    uint32_t warnings;
    char last_message[256];
    struct kvt_l2_params params; /* of the next open; callbacks are set */
};

void l2_env_init(struct l2_env *env, uint64_t cap);
int l2_env_open(struct l2_env *env, struct kvt_io *io);
/* A copy of the files in memory: an image to come back to. The caller destroys it. */
struct kvt_io *l2_clone(const struct kvt_io *io);
void l2_env_close(struct l2_env *env); /* the io stays */
/* Forget the log as a crash would: nothing is written any more. Its io must not be used after. */
void l2_env_forget_index(struct l2_env *env);

/* Bytes of a record: pages * 4096, aligned; free() it. */
void *l2_record(uint32_t id, uint32_t version, uint32_t pages, uint64_t sequence,
                struct kvt_entry *entry);
void l2_key(uint32_t id, struct kvt_full_key *key);

/* Queue one record, or a list of `count` ids, as one append. 0 or kvt_l2_append()'s error. */
int l2_env_queue(struct l2_env *env, const uint32_t *ids, uint32_t count, uint32_t version,
                 uint32_t pages);
/* One turn of the log; the clock goes on to when it wants to run. */
void l2_env_turn(struct l2_env *env);
/* Run until nothing is in flight. */
void l2_env_drain(struct l2_env *env);
/* Queue and drain; the status of the last record. */
int l2_env_put(struct l2_env *env, uint32_t id, uint32_t version, uint32_t pages);
/* 0 exact bytes; KVT_E_MISS not in the index; KVT_E_CORRUPT record does not verify; -errno. A
 * record that verifies and is not what was put fails the test. */
int l2_env_get(struct l2_env *env, uint32_t id);
int l2_env_flush(struct l2_env *env);
int l2_env_purge_key(struct l2_env *env, uint32_t id);
int l2_env_purge_ns(struct l2_env *env, uint32_t ns);
/* Ids present. */
uint32_t l2_env_count(const struct l2_env *env);
/* Get every present id: how many were exact (the others are dropped from the index). */
uint32_t l2_env_verify(struct l2_env *env);
/* Bytes of all files of a root, as the io tells. */
uint64_t l2_files_bytes(struct kvt_io *io);
uint32_t l2_files_count(struct kvt_io *io);
/* A directory under TMPDIR, and its removal with everything in it. */
void l2_dir_make(char path[256]);
void l2_dir_remove(const char *path);

#endif
