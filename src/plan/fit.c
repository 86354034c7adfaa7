/* Robust fit of two non-negative terms, by iteratively reweighted least squares: first the least
 * absolute deviations, which find the bulk of the observations, then Cauchy's weights from there,
 * which let go of what does not belong to it.
 *
 * Residuals are taken in units of the prediction: a sample that is ten times too fast pulls no
 * harder than one that is ten times too slow. (In units of t it would pull ten times as hard.)
 * Threads: any, no state. Does not judge its input: prefill.c and tier_model.c do.
 */
#include "plan/fit.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define HALF_LIFE 10.0
#define START_WEIGHT 0.05 /* of each reference, where the newest observation has 1 */
#define DELTA 0.02        /* residuals below it count by their square: no division by nothing */
#define ROUNDS 16u
#define SETTLED 1e-3
#define SPREAD_SHARE 0.7 /* a third may be nonsense before the rest is doubted */
#define FAR 32.0         /* times the prediction: what is further off pulls no harder than that */
#define ABSURD 1000.0    /* times the scaled start values, or a part of them: is left out */
#define ROWS (KVT_FIT_SAMPLES + 2u)

struct row {
    double x, y, t, weight;
};

void kvt_fit_init(struct kvt_fit *fit, double p, double q, const double ref[2][2])
{
    memset(fit, 0, sizeof(*fit));
    fit->start.p = p;
    fit->start.q = q;
    memcpy(fit->ref, ref, sizeof(fit->ref));
}

void kvt_fit_add(struct kvt_fit *fit, double x, double y, double t, uint32_t klass)
{
    fit->samples[fit->next] = (struct kvt_fit_sample){x, y, t, klass};
    fit->next = (fit->next + 1) % KVT_FIT_SAMPLES;
    if (fit->count < KVT_FIT_SAMPLES)
        fit->count++;
}

void kvt_fit_keep(struct kvt_fit *fit, uint32_t count)
{
    if (fit->count > count)
        fit->count = count;
}

/* The value that `share` of the weight does not exceed; sorts both arrays. n > 0. */
static double quantile(double *values, double *weights, uint32_t n, double share)
{
    double part = 0;
    for (uint32_t i = 0; i < n; i++)
        part += weights[i] * share;
    for (uint32_t i = 1; i < n; i++) {
        double value = values[i], weight = weights[i];
        uint32_t at = i;
        for (; at > 0 && values[at - 1] > value; at--) {
            values[at] = values[at - 1];
            weights[at] = weights[at - 1];
        }
        values[at] = value;
        weights[at] = weight;
    }
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += weights[i];
        if (sum >= part)
            return values[i];
    }
    return values[n - 1];
}

static double predict(const struct kvt_fit_line *line, double x, double y)
{
    return line->p * x + line->q * y;
}

static uint32_t rows_make(const struct kvt_fit *fit, uint32_t klass, struct row *rows)
{
    for (uint32_t i = 0; i < fit->count; i++) {
        const struct kvt_fit_sample *sample =
            &fit->samples[(fit->next + KVT_FIT_SAMPLES - 1 - i) % KVT_FIT_SAMPLES];
        uint32_t far = sample->klass > klass ? sample->klass - klass : klass - sample->klass;
        rows[i] = (struct row){sample->x, sample->y, sample->t,
                               exp2(-(double)i / HALF_LIFE - (double)far / 2)};
    }
    return fit->count;
}

/* How much faster or slower than the start values it is as a whole. The start values themselves
 * count as one observation, so that a single odd one does not decide. */
static double scale_of(const struct kvt_fit_line *start, const struct row *rows, uint32_t n)
{
    double ratios[ROWS], weights[ROWS];
    for (uint32_t i = 0; i < n; i++) {
        double base = predict(start, rows[i].x, rows[i].y);
        ratios[i] = base > 0 ? rows[i].t / base : 1;
        weights[i] = rows[i].weight;
    }
    ratios[n] = 1;
    weights[n] = 1;
    return quantile(ratios, weights, n + 1, 0.5);
}

/* How much a row counts that is t times the prediction. doubt 0: as for absolute deviations; above:
 * as little as its distance says that it is of another kind. */
static double trust(double t, double doubt)
{
    if (doubt > 0) {
        double away = log(t) / doubt;
        return 1 / (1 + away * away);
    }
    double away = fabs(t - 1);
    return 1 / (away > DELTA ? away : DELTA);
}

/* One weighted least-squares step from `line`. false: no better line can be told. Without FAR a
 * single row of 100,000 times the prediction (a machine that slept) would win: Cauchy's weights
 * fall by the square of the distance's logarithm, and the distance itself grows faster. */
static bool step(const struct row *rows, uint32_t n, double doubt, struct kvt_fit_line *line)
{
    double xx = 0, xy = 0, yy = 0, xt = 0, yt = 0;
    for (uint32_t i = 0; i < n; i++) {
        double base = predict(line, rows[i].x, rows[i].y);
        if (!(base > 0))
            continue;
        double x = rows[i].x / base, y = rows[i].y / base, t = fmin(rows[i].t / base, FAR);
        double weight = rows[i].weight * trust(t, doubt);
        xx += weight * x * x;
        xy += weight * x * y;
        yy += weight * y * y;
        xt += weight * x * t;
        yt += weight * y * t;
    }
    double det = xx * yy - xy * xy;
    if (!(det > 1e-12 * xx * yy))
        return false;
    double p = (xt * yy - yt * xy) / det, q = (xx * yt - xy * xt) / det;
    if (p < 0) {
        p = 0;
        q = yt / yy;
    } else if (q < 0) {
        q = 0;
        p = xt / xx;
    }
    if (!isfinite(p) || !isfinite(q) || !(p + q > 0))
        return false;
    line->p = p;
    line->q = q;
    return true;
}

static void settle(const struct row *rows, uint32_t n, double doubt, struct kvt_fit_line *line)
{
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct kvt_fit_line before = *line;
        if (!step(rows, n, doubt, line))
            return;
        if (fabs(line->p - before.p) <= SETTLED * before.p &&
            fabs(line->q - before.q) <= SETTLED * before.q)
            return;
    }
}

static double spread_of(const struct kvt_fit_line *line, const struct row *rows, uint32_t n,
                        double share)
{
    double away[ROWS], weights[ROWS];
    for (uint32_t i = 0; i < n; i++) {
        double base = predict(line, rows[i].x, rows[i].y);
        away[i] = base > 0 ? fabs(rows[i].t / base - 1) : 1;
        weights[i] = rows[i].weight;
    }
    return n > 0 ? quantile(away, weights, n, share) : 0;
}

/* Rows that have nothing to do with the line are taken out of the steps; to spread_of() they are as
 * far off as anything. */
static void leave_out_absurd(const struct kvt_fit_line *line, struct row *rows, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        double base = predict(line, rows[i].x, rows[i].y);
        if (rows[i].t > base * ABSURD || rows[i].t < base / ABSURD)
            rows[i].x = rows[i].y = 0;
    }
}

void kvt_fit_solve(const struct kvt_fit *fit, uint32_t klass, struct kvt_fit_line *out)
{
    struct row rows[ROWS];
    uint32_t n = rows_make(fit, klass, rows);
    *out = fit->start;
    if (n == 0)
        return;
    if (n == 1) /* else the median follows it where it is below the start values */
        leave_out_absurd(out, rows, n);
    double scale = scale_of(&fit->start, rows, n);
    out->p *= scale;
    out->q *= scale;
    leave_out_absurd(out, rows, n);
    for (uint32_t i = 0; i < 2; i++) {
        const double *ref = fit->ref[i];
        rows[n + i] = (struct row){ref[0], ref[1], predict(out, ref[0], ref[1]), START_WEIGHT};
    }
    settle(rows, n + 2, 0, out);
    double spread = spread_of(out, rows, n, 0.5);
    settle(rows, n + 2, spread > 2 * DELTA ? spread : 2 * DELTA, out);
    out->spread = spread_of(out, rows, n, SPREAD_SHARE);
}
