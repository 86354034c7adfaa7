/* A small engine for tests of the public API: a pool of pages, keys and bytes made from numbers,
 * and a cache over a directory of its own. Every helper asserts what must not fail.
 *
 * KVT_RIG_DAEMON=1 puts a kvtierd of its own under each rig that says "dram=" or has a disk: the
 * same tests then run over a daemon. KVT_TEST_FILTER names the tests to run, with wildcards.
 *
 * A block is a number ("seed"): its key and its bytes follow from it. Pages are raw bf16 bits, so
 * tests of exactness store them exact (or at level raw).
 */
#ifndef KVT_TESTS_RIG_H
#define KVT_TESTS_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kvtier/kvtier.h"

#define RIG_PARTS_MAX 64u
#define RIG_SIZE_MAX 4096u

struct rig_shape {
    uint32_t layers; /* each has a K and a V part */
    uint32_t heads, dim, tokens;
    uint32_t pages;
    int dtype;
    size_t base_offset; /* bytes added to each part's 4 KiB-aligned base (multiple of 2) */
    size_t row_gap;     /* bytes between rows (multiple of 2) */
};

/* layers 1, heads 2, dim 64, tokens 16, bf16: 8 KiB of engine bytes a block, 12 KiB raw record. */
struct rig_shape rig_shape_small(uint32_t pages);
/* 256 KiB of engine bytes a block. */
struct rig_shape rig_shape_large(uint32_t pages);

struct rig {
    struct rig_shape shape;
    struct kvt_part parts[RIG_PARTS_MAX];
    struct kvt_part_place places[RIG_PARTS_MAX];
    uint8_t *memory[RIG_PARTS_MAX];
    struct kvt_layout layout;
    struct kvt_pool_desc desc;
    struct kvt_identity identity;
    char dir[128]; /* "" : no disk */
    char config[512];
    char disk_cap[32];
    char error[512];
    char log[8192]; /* every line of level <= warning */
    int warnings;
    char last[512];                           /* the last line of any level */
    void (*tweak)(struct kvt_config *config); /* optional: what no option can set */
    struct daemon *daemon; /* KVT_RIG_DAEMON=1: the kvtierd that holds this rig's store */
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
};

/* KVT_TEST_SEED, or a fixed one; printed, so that a failure can be repeated. */
uint64_t rig_seed(void);

/* A fresh directory under TMPDIR or /tmp; removed with what is in it by rig_dir_remove(). */
void rig_dir_make(char *dir, size_t len);
void rig_dir_remove(const char *dir);

/* Make pool memory, identity "test"; config as for kvt_config_set_all(); disk_cap NULL: no disk,
 * else a fresh directory with that cap. Nothing is opened. */
void rig_init(struct rig *rig, const struct rig_shape *shape, const char *config,
              const char *disk_cap);
/* Open cache, namespace and pool; asserts success. rig_try_open() opens the cache only and returns
 * kvt_open()'s result. */
void rig_open(struct rig *rig);
int rig_try_open(struct rig *rig);
void rig_close(struct rig *rig);
void rig_reopen(struct rig *rig);
/* Close, remove the directory, free the pool. */
void rig_free(struct rig *rig);

struct kvt_key rig_key(uint64_t seed);
void rig_fill(struct rig *rig, uint32_t page, uint64_t seed);
/* Gaussian-like K and V instead of random bits, for tests of the codec's levels. */
void rig_fill_smooth(struct rig *rig, uint32_t page, uint64_t seed);
bool rig_same(const struct rig *rig, uint32_t page, uint64_t seed);
void rig_poison(struct rig *rig, uint32_t page, uint8_t byte);
bool rig_poisoned(const struct rig *rig, uint32_t page, uint8_t byte);
/* Copy a page's bytes out, rig_block_bytes() of them. */
size_t rig_block_bytes(const struct rig *rig);
void rig_page_bytes(const struct rig *rig, uint32_t page, uint8_t *out);

/* Store blocks first_seed, +1, ... as one chain at position first_pos, from pages 0, 1, ... (filled
 * here), exact, and wait. Status of each in status (optional). Returns the number of 0 / EXISTS. */
size_t rig_store(struct rig *rig, uint64_t first_seed, uint32_t n, uint32_t first_pos,
                 int32_t *status);
/* Load them into pages 0, 1, ... (poisoned first) and wait. Every block with status 0 must be exact
 * and every other page must be untouched: asserted. Returns the number of blocks loaded. */
size_t rig_load(struct rig *rig, uint64_t first_seed, uint32_t n, int32_t *status);
/* Length of the leading run that lookup answers. */
long rig_lookup(struct rig *rig, uint64_t first_seed, uint32_t n);
uint64_t rig_stat(struct rig *rig, const char *name);
/* The text of a statistic; "" when there is none. */
void rig_stat_text(struct rig *rig, const char *name, char *out, size_t len);

/* Bytes of all files below dir, and number of files. */
uint64_t rig_dir_bytes(const char *dir, unsigned *files);
/* Open descriptors of this process; resident bytes. */
unsigned rig_open_fds(void);
int64_t rig_now_ns(void);
void rig_sleep_ms(unsigned ms);

#endif
