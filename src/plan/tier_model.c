/* Load time as a fit of two terms, per class of size, with a floor of probes.
 * Threads: the owner's. Does not know what a tier is made of.
 */
#include "plan/tier_model.h"

#include <math.h>

#include "kvtier/error.h"

#define SECONDS_MAX 86400.0
#define BYTES_MAX (UINT64_C(1) << 50)
#define PROBE_SHARE_WAKING 0.15
#define PROBE_SHARE_OVERDUE 0.5
#define STREAK 6u
#define WAKING 0.6 /* of the predicted time: something has changed */

uint32_t kvt_tier_class(double bytes)
{
    static const double limits[KVT_FIT_CLASSES - 1] = {0x1p20, 0x1p24, 0x1p28};
    uint32_t klass = 0;
    while (klass < KVT_FIT_CLASSES - 1 && bytes >= limits[klass])
        klass++;
    return klass;
}

bool kvt_tier_init(struct kvt_tier_model *model, double latency, double bandwidth)
{
    static const double ref[2][2] = {{1, 0x1p16}, {1, 0x1p30}};
    if (!isfinite(latency) || !isfinite(bandwidth) || latency < 0 || !(bandwidth > 0) ||
        !isfinite(1 / bandwidth))
        return false;
    *model = (struct kvt_tier_model){.taken = 0};
    kvt_fit_init(&model->fit, latency, 1 / bandwidth, ref);
    for (uint32_t i = 0; i < KVT_FIT_CLASSES; i++)
        model->line[i] = model->fit.start;
    return true;
}

static double seconds_by(const struct kvt_fit_line *line, uint64_t bytes, uint64_t queued)
{
    return line->p + line->q * ((double)bytes + (double)queued);
}

/* Is it another tier than before? Several loads in a row that took less than half, or more than
 * twice, of what is expected: what was seen before them is of no use. */
static void judge(struct kvt_tier_model *model, uint64_t bytes, uint64_t queued, double seconds)
{
    bool slow = true, fast = false;
    for (uint32_t i = 0; i < KVT_FIT_CLASSES; i++) {
        double expected = seconds_by(&model->line[i], bytes, queued);
        fast |= seconds < expected * WAKING;
        slow &= seconds > expected / WAKING;
    }
    model->waking = fast;
    int now = fast ? -1 : slow ? 1 : 0;
    model->streak = now != 0 && now == model->streak_kind ? model->streak + 1 : now != 0;
    model->streak_kind = (int8_t)now;
    if (model->streak >= STREAK)
        kvt_fit_keep(&model->fit, STREAK - 1);
}

int kvt_tier_observe(struct kvt_tier_model *model, uint64_t bytes, uint64_t queued, double seconds)
{
    if (bytes == 0 || bytes > BYTES_MAX || queued > BYTES_MAX || !isfinite(seconds) ||
        !(seconds > 0) || seconds > SECONDS_MAX) {
        model->refused++;
        return KVT_E_INVAL;
    }
    model->taken++;
    if (model->fixed)
        return 0;
    judge(model, bytes, queued, seconds);
    kvt_fit_add(&model->fit, 1, (double)bytes + (double)queued, seconds,
                kvt_tier_class((double)bytes));
    for (uint32_t i = 0; i < KVT_FIT_CLASSES; i++)
        kvt_fit_solve(&model->fit, i, &model->line[i]);
    return 0;
}

double kvt_tier_seconds(const struct kvt_tier_model *model, double bytes, double queued)
{
    const struct kvt_fit_line *line = &model->line[kvt_tier_class(bytes)];
    return line->p + line->q * (bytes + queued);
}

bool kvt_tier_unsure(const struct kvt_tier_model *model, double bytes)
{
    return model->line[kvt_tier_class(bytes)].spread > KVT_FIT_SPREAD_MAX;
}

double kvt_tier_refused(struct kvt_tier_model *model)
{
    if (model->fixed)
        return 0;
    if (model->left_aside < UINT32_MAX)
        model->left_aside++;
    if (model->left_aside >= KVT_PROBE_OVERDUE)
        return PROBE_SHARE_OVERDUE;
    if (model->waking)
        return PROBE_SHARE_WAKING;
    return model->left_aside >= KVT_PROBE_EVERY ? KVT_PROBE_SHARE : 0;
}

void kvt_tier_used(struct kvt_tier_model *model)
{
    model->left_aside = 0;
    model->waking = false;
}
