/* Prefill time as a fit of two terms: what each token costs, and what attention adds.
 * Threads: the owner's. Does not measure: the engine says how long it took.
 */
#include "plan/prefill.h"

#include <math.h>

#include "kvtier/error.h"

#define SECONDS_MAX 86400.0

bool kvt_prefill_init(struct kvt_prefill *model, double a, double b)
{
    /* a short prompt and a long one: where tokens, and where attention, make most of the time */
    static const double ref[2][2] = {{512, 512.0 * 512}, {131072, 131072.0 * 131072}};
    if (!isfinite(a) || !isfinite(b) || !(a > 0) || b < 0)
        return false;
    *model = (struct kvt_prefill){.taken = 0};
    kvt_fit_init(&model->fit, a, b, ref);
    model->line = model->fit.start;
    return true;
}

int kvt_prefill_observe(struct kvt_prefill *model, uint64_t new_tokens, uint64_t cached_tokens,
                        double seconds)
{
    if (new_tokens == 0 || new_tokens > KVT_PREFILL_TOKENS_MAX ||
        cached_tokens > KVT_PREFILL_TOKENS_MAX || !isfinite(seconds) || !(seconds > 0) ||
        seconds > SECONDS_MAX) {
        model->refused++;
        return KVT_E_INVAL;
    }
    double m = (double)new_tokens, n = (double)cached_tokens;
    model->taken++;
    if (model->fixed || new_tokens < KVT_PREFILL_TOKENS_MIN)
        return 0;
    kvt_fit_add(&model->fit, m, m * (m + 2 * n), seconds, 0);
    kvt_fit_solve(&model->fit, 0, &model->line);
    return 0;
}

double kvt_prefill_seconds(const struct kvt_prefill *model, double tokens, double cached)
{
    return model->line.p * tokens + model->line.q * tokens * (tokens + 2 * cached);
}

bool kvt_prefill_unsure(const struct kvt_prefill *model)
{
    return model->line.spread > KVT_FIT_SPREAD_MAX;
}
