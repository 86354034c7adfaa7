/* How long a tier takes to bring bytes: latency + (queued + bytes) / bandwidth seconds.
 *
 * Fitted for four classes of size, since a drive's small reads and its large ones are two drives;
 * a class without observations of its own is told by its neighbours.
 * A tier that looks too slow to be used would never be measured again: kvt_tier_refused() counts
 * the plans that left it aside and says when to probe it all the same.
 * Threads: the owner's. Allocates: never.
 */
#ifndef KVT_PLAN_TIER_MODEL_H
#define KVT_PLAN_TIER_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/fit.h"

#define KVT_PROBE_SHARE 0.04  /* of the recompute time, that a probe may take; more when overdue */
#define KVT_PROBE_EVERY 8u    /* plans that leave a tier aside, until one probes it */
#define KVT_PROBE_OVERDUE 64u /* until one probes it that pays more for that */

struct kvt_tier_model {
    struct kvt_fit fit;
    struct kvt_fit_line line[KVT_FIT_CLASSES]; /* p: latency, q: seconds a byte */
    uint64_t taken, refused;
    uint32_t left_aside; /* plans since it was last used */
    uint32_t streak;     /* observations in a row that were far off the same way, */
    int8_t streak_kind;  /* 1: too slow; -1: too fast */
    bool waking;         /* the last observation was far faster than predicted: probe again */
    bool fixed;          /* observations are counted and change nothing */
};

/* latency: seconds, >= 0; bandwidth: bytes a second, > 0. false: not so, and nothing is set. */
bool kvt_tier_init(struct kvt_tier_model *model, double latency, double bandwidth);
/* One load as measured: bytes that came, bytes that were queued before them, seconds until the last
 * one was there. 0; KVT_E_INVAL no bytes, more than 2^50, or seconds that are not finite, not above
 * 0 or above a day. */
int kvt_tier_observe(struct kvt_tier_model *model, uint64_t bytes, uint64_t queued, double seconds)
    __attribute__((warn_unused_result));
uint32_t kvt_tier_class(double bytes);
double kvt_tier_seconds(const struct kvt_tier_model *model, double bytes, double queued);
bool kvt_tier_unsure(const struct kvt_tier_model *model, double bytes);
/* A plan left the tier aside. Returns the share of the recompute time that a probe of the tier may
 * take now: 0 when none is due; more when many plans were too short for one. */
double kvt_tier_refused(struct kvt_tier_model *model);
/* A plan uses the tier, be it for a probe. */
void kvt_tier_used(struct kvt_tier_model *model);

#endif
