/* A robust fit of t = p x + q y with p, q >= 0, over the last observations, the newest ones most.
 *
 * Method: least absolute deviations in units of the prediction (a median in two dimensions), then
 * Cauchy weights around it: a third of the observations may be nonsense of either direction. Means
 * of any kind follow one stalled request for a dozen others. However far one is off, it pulls no
 * harder than at 32 times the prediction. One that is more than 1000 times the start values at the
 * observed scale, or less than a thousandth, is left out: a first such one waits until others
 * agree. Weights halve every 10 observations: after a jump the newer half wins after 10. Start
 * values are two pseudo-observations of small weight that follow the observed scale: they decide
 * what the observations leave open (all of them at one size), and nothing else.
 *
 * Plain memory, no pointers, no allocation, a few microseconds. Threads: the owner's. Knows nothing
 * of what x, y and t are.
 */
#ifndef KVT_PLAN_FIT_H
#define KVT_PLAN_FIT_H

#include <stdint.h>

#define KVT_FIT_SAMPLES 40u /* four half-lives: what is older would weigh a sixteenth */
#define KVT_FIT_CLASSES 4u
/* Distance from the fit (the 70 % quantile) from which observations are said to contradict each
 * other. */
#define KVT_FIT_SPREAD_MAX 0.5

struct kvt_fit_line {
    double p, q;   /* both >= 0, one of them > 0, finite */
    double spread; /* |t / predicted - 1| that 70 % of the observations keep within */
};

struct kvt_fit_sample {
    double x, y, t;
    uint32_t klass;
};

struct kvt_fit {
    struct kvt_fit_line start;
    double ref[2][2]; /* (x, y) at which the start values speak */
    uint32_t next;    /* ring position */
    uint32_t count;   /* samples in the ring */
    struct kvt_fit_sample samples[KVT_FIT_SAMPLES];
};

/* start.p, start.q >= 0, not both 0; the references are two different points. */
void kvt_fit_init(struct kvt_fit *fit, double p, double q, const double ref[2][2]);
/* x, y >= 0, not both 0; t > 0; all finite. klass: what kind of observation it is. */
void kvt_fit_add(struct kvt_fit *fit, double x, double y, double t, uint32_t klass);
/* Forget all but the newest `count` samples. */
void kvt_fit_keep(struct kvt_fit *fit, uint32_t count);
/* The fit for observations of `klass`: those two classes away count half. */
void kvt_fit_solve(const struct kvt_fit *fit, uint32_t klass, struct kvt_fit_line *out);

#endif
