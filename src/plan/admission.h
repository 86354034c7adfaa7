/* Which blocks are worth a write to disk, and how many bytes a day may be written.
 *
 * A block is asked about when its write policy would write it; when the answer is no, again after
 * each further use. How often blocks were used is remembered in a table that outlives them, so that
 * a block that comes back after it has gone unwritten is known.
 *
 *   ALL     everything
 *   SECOND  what is used a second time
 *   VALUE   what has the best expected saving for the bytes that may be written:
 *             (uses still to come that DRAM will not serve | uses so far, place in its sequence)
 *             x (seconds to compute it - seconds to load it) / bytes
 *           Chances are counted; the threshold follows from what was asked for lately
 *           and the budget.
 *
 *   CONTINUED everything but the last block of a prompt, until it is continued or asked for, as
 *           soon as something on disk has had to go: the store's to see, which knows the chains
 *
 *   RANDOM  a share of them: what the others are compared with
 *
 * The budget is a bucket for each root: bytes a day drip in, what was really written goes out; it
 * holds an hour's worth at most, and may be overdrawn by what was under way. It holds for every
 * policy. Without a budget VALUE takes what is expected to save anything.
 * Threads: the store's owner. Allocates in init. Pure but for its own memory: time comes in.
 */
#ifndef KVT_PLAN_ADMISSION_H
#define KVT_PLAN_ADMISSION_H

#include <stdbool.h>
#include <stdint.h>

#define KVT_ADMISSION_ROOTS 16u
#define KVT_ADMISSION_USES 4u    /* classes of uses so far: 1, 2, 3, more */
#define KVT_ADMISSION_PLACES 8u  /* classes of the place in a sequence, each twice the last */
#define KVT_ADMISSION_VALUES 96u /* buckets of value, four to an octave */

enum kvt_admit {
    KVT_ADMIT_ALL = 0,
    KVT_ADMIT_SECOND,
    KVT_ADMIT_VALUE,
    KVT_ADMIT_CONTINUED,
    KVT_ADMIT_RANDOM
};

enum kvt_verdict {
    KVT_VERDICT_YES = 0,
    KVT_VERDICT_FIRST_USE, /* it has been used once */
    KVT_VERDICT_VALUE,     /* others save more for the bytes, or nothing would be saved */
    KVT_VERDICT_BUDGET,    /* the day's bytes are used up */
    KVT_VERDICT_RANDOM
};

struct kvt_admission_params {
    int admit;                                 /* enum kvt_admit */
    uint32_t permille;                         /* RANDOM: the share admitted */
    uint64_t seed;                             /* RANDOM */
    double token_s;                            /* seconds that computing a token takes, > 0 */
    double byte_s;                             /* seconds that loading a byte takes, >= 0 */
    uint64_t remember;                         /* blocks whose uses are remembered, about */
    uint32_t root_count;                       /* may rise: kvt_admission_root() */
    uint64_t bytes_a_day[KVT_ADMISSION_ROOTS]; /* 0: as many as one likes */
};

struct kvt_admission_block {
    uint64_t tag; /* evenly spread, the same for all uses of the block */
    uint32_t first_pos, tokens, bytes;
};

struct kvt_seen { /* a block of the past */
    uint32_t tag;
    uint32_t uses : 6; /* saturating; 0: free */
    uint32_t age : 26; /* when it was last used, in units of 2^34 ns */
};

struct kvt_bucket {
    double level, most; /* bytes; below 0: overdrawn */
    uint64_t written;   /* of the root, when last looked at */
};

struct kvt_admission {
    struct kvt_admission_params params;
    struct kvt_seen *seen; /* sets of 8 */
    uint64_t set_mask;
    double used[KVT_ADMISSION_USES][KVT_ADMISSION_PLACES];  /* blocks of the class so far */
    double again[KVT_ADMISSION_USES][KVT_ADMISSION_PLACES]; /* of them, wanted when out of DRAM */
    double asked[KVT_ADMISSION_VALUES]; /* bytes asked about, by value; halved every HALF_LIFE */
    struct kvt_bucket buckets[KVT_ADMISSION_ROOTS];
    int64_t now_ns, faded_ns;
};

/* What has been learnt of who comes again: it outlives the process, as the levels of buckets do. */
struct kvt_admission_chances {
    double used[KVT_ADMISSION_USES][KVT_ADMISSION_PLACES];
    double again[KVT_ADMISSION_USES][KVT_ADMISSION_PLACES];
};

/* 0, -ENOMEM, KVT_E_INVAL. Starts with three quarters of each bucket. */
__attribute__((warn_unused_result)) int
kvt_admission_init(struct kvt_admission *admission, const struct kvt_admission_params *params,
                   int64_t now_ns);
void kvt_admission_destroy(struct kvt_admission *admission);

/* A further root. */
void kvt_admission_root(struct kvt_admission *admission, uint32_t root, uint64_t bytes_a_day);

/* The block was used (stored, loaded, asked for). at_hand: it was in DRAM, so that no copy on disk
 * was needed for this use. Returns how often so far, this time included, as far as is remembered.
 */
uint32_t kvt_admission_use(struct kvt_admission *admission, const struct kvt_admission_block *block,
                           bool at_hand, int64_t now_ns);

/* May it be written? committed: bytes that are to be written already and are not. */
enum kvt_verdict kvt_admission_ask(struct kvt_admission *admission,
                                   const struct kvt_admission_block *block, uint64_t committed,
                                   int64_t now_ns);

/* Time has passed, and root `root` has written so many bytes since it was opened. */
void kvt_admission_written(struct kvt_admission *admission, uint32_t root, uint64_t written,
                           int64_t now_ns);
/* Whether the root's bucket has something in it, or it has none. */
bool kvt_admission_root_may(const struct kvt_admission *admission, uint32_t root);
/* Bytes in all buckets; INT64_MAX: a root has no limit. */
int64_t kvt_admission_left(const struct kvt_admission *admission);

/* What is left in one root's bucket, below 0: overdrawn; and that of an earlier life put in the
 * place of what the bucket began with. */
double kvt_admission_left_in(const struct kvt_admission *admission, uint32_t root);
void kvt_admission_left_set(struct kvt_admission *admission, uint32_t root, double left);
/* What has been learnt, and that of an earlier life. false: it makes no sense, nothing is taken. */
void kvt_admission_chances_get(const struct kvt_admission *admission,
                               struct kvt_admission_chances *out);
bool kvt_admission_chances_set(struct kvt_admission *admission,
                               const struct kvt_admission_chances *chances);

/* The probability that a block of these many uses at this position is used again, by experience. */
double kvt_admission_chance(const struct kvt_admission *admission, uint32_t uses,
                            uint32_t first_pos);

#endif
