/* kvtier quality: distributions compared.
 *
 * KL(exact || coded) over the whole vocabulary, in nats; sums in double. Pure arithmetic: no model,
 * no output.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "quality.h"

static double log_sum_exp(const float *logits, int32_t vocab)
{
    float most = logits[0];
    double sum = 0;

    for (int32_t t = 1; t < vocab; t++)
        if (logits[t] > most)
            most = logits[t];
    for (int32_t t = 0; t < vocab; t++)
        sum += exp((double)logits[t] - most);
    return sum > 0 ? most + log(sum) : most; /* at least 1, the largest's own */
}

static int32_t arg_max(const float *logits, int32_t vocab)
{
    int32_t best = 0;

    for (int32_t t = 1; t < vocab; t++)
        if (logits[t] > logits[best])
            best = t;
    return best;
}

int quality_exact_new(struct quality_exact *exact, size_t rows, int32_t vocab)
{
    exact->logits = calloc(rows * (size_t)vocab, sizeof(*exact->logits));
    exact->lse = calloc(rows, sizeof(*exact->lse));
    exact->best = calloc(rows, sizeof(*exact->best));
    exact->nll = 0;
    if (exact->logits != NULL && exact->lse != NULL && exact->best != NULL)
        return 0;
    quality_exact_free(exact);
    return -ENOMEM;
}

void quality_exact_free(struct quality_exact *exact)
{
    free(exact->logits);
    free(exact->lse);
    free(exact->best);
    memset(exact, 0, sizeof(*exact));
}

void quality_exact_add(struct quality_exact *exact, size_t row, const float *logits, int32_t vocab,
                       int32_t next)
{
    memcpy(exact->logits + row * (size_t)vocab, logits, (size_t)vocab * sizeof(*logits));
    exact->lse[row] = log_sum_exp(logits, vocab);
    exact->best[row] = arg_max(logits, vocab);
    exact->nll += exact->lse[row] - logits[next];
}

void quality_compare(struct quality_level *level, const struct quality_exact *exact, size_t row,
                     const float *logits, int32_t vocab, int32_t next)
{
    const float *want = exact->logits + row * (size_t)vocab;
    const double lse = log_sum_exp(logits, vocab), lse_want = exact->lse[row];
    double kl = 0;

    for (int32_t t = 0; t < vocab; t++) {
        const double p = want[t] - lse_want;
        kl += exp(p) * (p - (logits[t] - lse));
    }
    level->kl[level->kl_count++] = kl;
    level->nll += lse - logits[next];
    level->top1_same += arg_max(logits, vocab) == exact->best[row];
}

double quality_mean(const double *values, size_t count)
{
    double sum = 0;

    for (size_t i = 0; i < count; i++)
        sum += values[i];
    return count > 0 ? sum / (double)count : 0;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double quality_quantile(double *values, size_t count, double share)
{
    if (count == 0)
        return 0;
    qsort(values, count, sizeof(*values), ascending);
    size_t at = (size_t)ceil(share * (double)count);
    return values[at > 0 ? at - 1 : 0];
}
