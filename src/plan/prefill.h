/* How long an engine takes to compute a prompt: C(m | N) = a m + b (m^2 + 2 N m) seconds for m new
 * tokens behind N that it has. So C(n + m | 0) = C(n | 0) + C(m | n).
 *
 * Threads: the owner's. Allocates: never. Errors: kvt_prefill_observe() refuses what is no
 * observation; nothing that was taken can make a prediction negative, infinite or NaN.
 */
#ifndef KVT_PLAN_PREFILL_H
#define KVT_PLAN_PREFILL_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/fit.h"

/* Fewer new tokens tell what a launch costs, not what a token does: counted, not fitted. */
#define KVT_PREFILL_TOKENS_MIN 64u
#define KVT_PREFILL_TOKENS_MAX (UINT32_C(1) << 30)

struct kvt_prefill {
    struct kvt_fit fit;
    struct kvt_fit_line line; /* in force: p is a, q is b */
    uint64_t taken, refused;
    bool fixed; /* observations are counted and change nothing */
};

/* a: seconds a token, > 0; b: seconds a token squared, >= 0. false: not so, and nothing is set. */
bool kvt_prefill_init(struct kvt_prefill *model, double a, double b);
/* One prefill as measured. 0; KVT_E_INVAL no new token, more than KVT_PREFILL_TOKENS_MAX, or
 * seconds that are not finite, not above 0 or above a day. */
int kvt_prefill_observe(struct kvt_prefill *model, uint64_t new_tokens, uint64_t cached_tokens,
                        double seconds) __attribute__((warn_unused_result));
/* Seconds for `tokens` behind `cached`. */
double kvt_prefill_seconds(const struct kvt_prefill *model, double tokens, double cached);
/* The observations contradict each other: predictions are a median of things far apart. */
bool kvt_prefill_unsure(const struct kvt_prefill *model);

#endif
