/* An engine of sessions for tests: KV that follows from tokens, and what each level makes of it.
 *
 * The KV of a token is made from all tokens before it and itself, as in a causal model: the row of
 * every part and head is filled from a number that hashes the sequence so far ("state"). So equal
 * prefixes have equal KV, a partial block can be filled and checked token by token, and any page
 * can be compared with what it must hold, at any level.
 */
#ifndef KVT_TESTS_SESSION_RIG_H
#define KVT_TESTS_SESSION_RIG_H

#include "support/rig.h"

/* What a page holds, by the codings that its bytes went through. */
enum srig_bytes {
    SRIG_OTHER = 0, /* none of these: a defect */
    SRIG_EXACT = 1,
    SRIG_KV8 = 2,
    SRIG_KV4 = 4,
    SRIG_KV8_KV4 = 8 /* cooled from its kv8 record */
};

/* Groups of a layout, and which of them each layer is of (both its parts); a group of states has
 * opaque parts, whose page is a function of all tokens up to the state. */
struct srig_layout {
    uint32_t count;
    struct kvt_group groups[4]; /* in the order of their first layers */
    uint8_t of_layer[8];        /* index in groups */
};

struct srig {
    struct rig rig;
    const struct srig_layout *layout; /* borrowed */
    struct rig oracle;                /* two pages: before and after a codec */
    struct kvt_session_mgr *mgr;
    struct kvt_session_mgr_opts opts;
    uint8_t *payload, *want, *got;
};

struct srig_session {
    kvt_session_id id;
    uint32_t tokens; /* of the sequence, as the engine knows it */
    uint32_t max;
    uint32_t *token;
    uint64_t *state; /* after each token */
    uint64_t salt;
};

/* shape, config and disk_cap as for rig_init(), with plan=off unless config says otherwise;
 * opts->struct_size is set here. */
void srig_open(struct srig *s, const struct rig_shape *shape, const char *config,
               const char *disk_cap, const struct kvt_session_mgr_opts *opts);
/* The same over several groups. */
void srig_open_groups(struct srig *s, const struct srig_layout *layout,
                      const struct rig_shape *shape, const char *config, const char *disk_cap,
                      const struct kvt_session_mgr_opts *opts);
/* The judge of bytes alone, for another thread: s->rig and s->layout are there. */
void srig_oracle_open(struct srig *s, const struct rig_shape *shape);
void srig_oracle_free(struct srig *s);
void srig_mgr_open(struct srig *s);
void srig_free(struct srig *s);
/* The manager's invariants hold. */
void srig_check(struct srig *s);
struct kvt_session_stats srig_stats(struct srig *s);
/* Until nothing is in flight. */
void srig_settle(struct srig *s);
struct kvt_session_info srig_info(const struct srig *s, const struct srig_session *x);

/* Open a session that can take `max` tokens; salt 0: none. */
void srig_session_open(struct srig *s, struct srig_session *c, uint32_t max, uint64_t salt);
void srig_session_free(struct srig_session *c); /* memory only; the session may be closed */
/* Put n tokens at the end of the engine's own list: first, first + 1, ... */
const uint32_t *srig_tokens(struct srig_session *c, uint32_t first, uint32_t n);

/* Write tokens [from, to) of the sequence into its pages. */
void srig_compute(struct srig *s, struct srig_session *c, uint32_t from, uint32_t to);
/* The same, and say so. */
void srig_fill(struct srig *s, struct srig_session *c, uint32_t from, uint32_t to);
/* resume + wait: tokens [c's length in the manager, c->tokens) are new. Every token that the plan
 * says is there is compared with what it must be. Repeats on -EAGAIN. Returns resume's result. */
int srig_resume(struct srig *s, struct srig_session *c, struct kvt_session_plan *plan);
/* The whole turn: resume, fill what is to be computed. */
void srig_turn(struct srig *s, struct srig_session *c, struct kvt_session_plan *plan);
/* Append what c->tokens has more, and fill it. Repeats on -EAGAIN. Returns append's result. */
int srig_append(struct srig *s, struct srig_session *c);
/* What block i is, in the page that an active session uses; tokens of it that count. */
enum srig_bytes srig_page_is(struct srig *s, const struct srig_session *c, uint32_t block,
                             uint32_t page, uint32_t tokens);
/* Compare blocks [0, tokens) of an active session with what they must be; the kinds seen, or'ed.
 * kinds: optional, of each full block. */
unsigned srig_verify(struct srig *s, const struct srig_session *c, uint32_t tokens, uint8_t *kinds);
/* The same for one group (index). Every block that an engine reads when it goes on behind `tokens`
 * must have a page; kinds of blocks without one are SRIG_OTHER. */
unsigned srig_verify_group(struct srig *s, const struct srig_session *c, uint32_t g,
                           uint32_t tokens, uint8_t *kinds);
/* The page of a block in group g (index), or KVT_SESSION_NO_PAGE. */
uint32_t srig_page(struct srig *s, const struct srig_session *c, uint32_t g, uint32_t block);
/* Record, page and tier of a block. */
struct kvt_session_block srig_block(struct srig *s, const struct srig_session *c, uint32_t block);
struct kvt_session_block srig_group_block(struct srig *s, const struct srig_session *c, uint32_t g,
                                          uint32_t block);

#endif
