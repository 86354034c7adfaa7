/* See admission.h. Threads: the store's owner. Does not know slots, queues or files.
 *
 * The threshold of VALUE: bytes asked about lately, by value, are a histogram that fades. Of it,
 * from the top, as much is taken as the budget lets through in the same time; in the bucket where
 * that ends, a share by slices of time, so that equal values do not mean all or nothing. A full
 * bucket takes half more, an empty one half (of what was used once: twice as much, and nothing
 * below FIRST_FROM). What was used twice comes before all that was used
 * once, whatever the counted chances say: a first use tells little, and in the traces at hand the
 * same bytes found more when they were spent on second uses.
 */
#include "plan/admission.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"

#define DAY_NS 86400e9
#define BURST 24.0         /* an hour's worth of a day's bytes */
#define HALF_LIFE_NS 900e9 /* of what was asked: a quarter of an hour */
#define FADE_NS 1000000000 /* not more often than every second */
#define SET 8u             /* a cache line */
#define SEEN_MIN 1024u
#define SEEN_MAX (UINT64_C(1) << 20) /* 8 MiB */
#define USES_MAX 63u
#define AGE_SHIFT 34 /* 17 s */
#define AGE_MASK ((UINT32_C(1) << 26) - 1)
#define CLASS_MAX 65536.0 /* then both counts are halved: habits change */
#define CHANCE_MAX 0.95   /* of the class of many uses: 19 more */
#define PLACE_TOKENS 512u
#define SLICE_SHIFT 28 /* a quarter of a second */
#define PRIOR_AGAIN 1.0
#define PRIOR_USED 2.0
/* Buckets of value: 2 to an octave, from 2^-20 to 2^4 times the computing of a token for each KiB;
 * once for blocks of one use, and again, above all of these, for others. */
#define VALUE_STEPS 2.0
#define VALUE_ONE 40.0
#define VALUE_HALF 48u
/* Of a full bucket: below it, only what was used twice is written. So the bytes of a quiet time are
 * there when sessions come back, and are not spent on what nobody has asked for again. */
#define FIRST_FROM 0.75
#define AGAIN_FROM 0.05 /* above it, all that was used twice is written */
#define BEGIN_AT 0.75   /* first uses wait for what drips in: who comes again is not known yet */
#define VALUE_BYTES 1024.0

static_assert(2 * VALUE_HALF == KVT_ADMISSION_VALUES, "two halves");

static void bucket_init(struct kvt_admission *admission, uint32_t root)
{
    struct kvt_bucket *bucket = &admission->buckets[root];

    bucket->most = (double)admission->params.bytes_a_day[root] / BURST;
    bucket->level = bucket->most * BEGIN_AT;
    bucket->written = 0;
}

int kvt_admission_init(struct kvt_admission *admission, const struct kvt_admission_params *params,
                       int64_t now_ns)
{
    uint64_t sets = SEEN_MIN / SET;

    memset(admission, 0, sizeof(*admission));
    if (params->admit < KVT_ADMIT_ALL || params->admit > KVT_ADMIT_RANDOM ||
        params->root_count > KVT_ADMISSION_ROOTS || params->permille > 1000 ||
        !(params->token_s > 0) || !(params->byte_s >= 0))
        return KVT_E_INVAL;
    admission->params = *params;
    admission->now_ns = admission->faded_ns = now_ns;
    for (uint32_t root = 0; root < params->root_count; root++)
        bucket_init(admission, root);
    if (params->admit != KVT_ADMIT_SECOND && params->admit != KVT_ADMIT_VALUE)
        return 0;
    while (sets * SET < SEEN_MAX && sets * SET < params->remember)
        sets *= 2;
    admission->set_mask = sets - 1;
    admission->seen = calloc(sets * SET, sizeof(*admission->seen));
    return admission->seen ? 0 : -ENOMEM;
}

void kvt_admission_destroy(struct kvt_admission *admission)
{
    free(admission->seen);
    memset(admission, 0, sizeof(*admission));
}

void kvt_admission_root(struct kvt_admission *admission, uint32_t root, uint64_t bytes_a_day)
{
    if (root >= KVT_ADMISSION_ROOTS)
        return;
    admission->params.bytes_a_day[root] = bytes_a_day;
    admission->params.root_count = KVT_MAX(admission->params.root_count, root + 1);
    bucket_init(admission, root);
}

/* ---- uses ---------------------------------------------------------------------------------- */

static uint32_t use_class(uint32_t uses)
{
    return KVT_MIN(uses, KVT_ADMISSION_USES) - 1;
}

static uint32_t place_class(uint32_t first_pos)
{
    uint32_t place = 0;

    for (uint32_t at = first_pos / PLACE_TOKENS; at && place < KVT_ADMISSION_PLACES - 1; at /= 2)
        place++;
    return place;
}

static void count_class(struct kvt_admission *admission, uint32_t before, uint32_t uses,
                        uint32_t first_pos, bool at_hand)
{
    uint32_t place = place_class(first_pos);

    if (before && !at_hand)
        admission->again[use_class(before)][place] += 1;
    admission->used[use_class(uses)][place] += 1;
    if (admission->used[use_class(uses)][place] > CLASS_MAX) {
        admission->used[use_class(uses)][place] /= 2;
        admission->again[use_class(uses)][place] /= 2;
    }
}

static struct kvt_seen *find(const struct kvt_admission *admission, uint64_t tag)
{
    struct kvt_seen *set = &admission->seen[(tag & admission->set_mask) * SET];

    for (uint32_t i = 0; i < SET; i++)
        if (set[i].uses && set[i].tag == (uint32_t)(tag >> 32))
            return &set[i];
    return NULL;
}

static struct kvt_seen *oldest(const struct kvt_admission *admission, uint64_t tag)
{
    struct kvt_seen *set = &admission->seen[(tag & admission->set_mask) * SET], *out = set;

    for (uint32_t i = 1; i < SET && out->uses; i++)
        if (!set[i].uses || set[i].age < out->age)
            out = &set[i];
    return out;
}

uint32_t kvt_admission_use(struct kvt_admission *admission, const struct kvt_admission_block *block,
                           bool at_hand, int64_t now_ns)
{
    struct kvt_seen *seen;
    uint32_t before;

    if (!admission->seen)
        return 1;
    seen = find(admission, block->tag);
    before = seen ? seen->uses : 0;
    if (!seen)
        seen = oldest(admission, block->tag);
    seen->tag = (uint32_t)(block->tag >> 32);
    seen->uses = KVT_MIN(before + 1, USES_MAX) & USES_MAX;
    seen->age = (uint32_t)((uint64_t)now_ns >> AGE_SHIFT) & AGE_MASK;
    count_class(admission, before, seen->uses, block->first_pos, at_hand);
    return seen->uses;
}

double kvt_admission_chance(const struct kvt_admission *admission, uint32_t uses,
                            uint32_t first_pos)
{
    uint32_t class = use_class(KVT_MAX(uses, 1u)), place = place_class(first_pos);
    double again = admission->again[class][place], used = admission->used[class][place];

    return KVT_MIN((again + PRIOR_AGAIN) / (used + PRIOR_USED), 1.0);
}

void kvt_admission_chances_get(const struct kvt_admission *admission,
                               struct kvt_admission_chances *out)
{
    memcpy(out->used, admission->used, sizeof(out->used));
    memcpy(out->again, admission->again, sizeof(out->again));
}

bool kvt_admission_chances_set(struct kvt_admission *admission,
                               const struct kvt_admission_chances *chances)
{
    for (uint32_t u = 0; u < KVT_ADMISSION_USES; u++)
        for (uint32_t p = 0; p < KVT_ADMISSION_PLACES; p++) {
            double used = chances->used[u][p], again = chances->again[u][p];

            if (!(again >= 0 && again <= used && used <= CLASS_MAX)) /* nor what is no number */
                return false;
        }
    memcpy(admission->used, chances->used, sizeof(admission->used));
    memcpy(admission->again, chances->again, sizeof(admission->again));
    return true;
}

/* ---- budget -------------------------------------------------------------------------------- */

/* Time does not go back here: what has dripped in has. */
static void drip(struct kvt_admission *admission, int64_t now_ns)
{
    double days;

    if (now_ns <= admission->now_ns)
        return;
    days = (double)(now_ns - admission->now_ns) / DAY_NS;
    admission->now_ns = now_ns;
    for (uint32_t root = 0; root < admission->params.root_count; root++) {
        struct kvt_bucket *bucket = &admission->buckets[root];

        bucket->level += days * (double)admission->params.bytes_a_day[root];
        bucket->level = KVT_MIN(bucket->level, bucket->most);
    }
}

static void fade(struct kvt_admission *admission)
{
    double factor;

    if (admission->now_ns - admission->faded_ns < FADE_NS)
        return;
    factor = exp2(-(double)(admission->now_ns - admission->faded_ns) / HALF_LIFE_NS);
    admission->faded_ns = admission->now_ns;
    for (uint32_t i = 0; i < KVT_ADMISSION_VALUES; i++)
        admission->asked[i] *= factor;
}

void kvt_admission_left_set(struct kvt_admission *admission, uint32_t root, double left)
{
    if (root < admission->params.root_count && isfinite(left))
        admission->buckets[root].level = KVT_MIN(left, admission->buckets[root].most);
}

double kvt_admission_left_in(const struct kvt_admission *admission, uint32_t root)
{
    return root < admission->params.root_count ? admission->buckets[root].level : 0;
}

void kvt_admission_written(struct kvt_admission *admission, uint32_t root, uint64_t written,
                           int64_t now_ns)
{
    if (root >= admission->params.root_count)
        return;
    struct kvt_bucket *bucket = &admission->buckets[root];
    drip(admission, now_ns);
    if (admission->params.bytes_a_day[root] && written > bucket->written)
        bucket->level -= (double)(written - bucket->written);
    bucket->written = written;
}

bool kvt_admission_root_may(const struct kvt_admission *admission, uint32_t root)
{
    return root >= admission->params.root_count || !admission->params.bytes_a_day[root] ||
           admission->buckets[root].level > 0;
}

/* Sums over roots: what is left, what fits, what drips in each day. false: no limit. */
static bool totals(const struct kvt_admission *admission, double *left, double *most, double *day)
{
    *left = *most = *day = 0;
    for (uint32_t root = 0; root < admission->params.root_count; root++) {
        if (!admission->params.bytes_a_day[root])
            return false;
        *left += admission->buckets[root].level;
        *most += admission->buckets[root].most;
        *day += (double)admission->params.bytes_a_day[root];
    }
    return admission->params.root_count > 0;
}

int64_t kvt_admission_left(const struct kvt_admission *admission)
{
    double left, most, day;

    return totals(admission, &left, &most, &day) ? (int64_t)left : INT64_MAX;
}

/* ---- the question -------------------------------------------------------------------------- */

/* How often a block of so many uses is still going to be wanted when it is out of DRAM: each
 * further use makes it one of the next class. */
static double expected_uses(const struct kvt_admission *admission, uint32_t uses,
                            uint32_t first_pos)
{
    double last = kvt_admission_chance(admission, KVT_ADMISSION_USES, first_pos);
    double expected = KVT_MIN(last, CHANCE_MAX);

    expected /= 1 - expected;
    for (uint32_t u = KVT_ADMISSION_USES - 1; u >= KVT_MAX(uses, 1u); u--)
        expected = kvt_admission_chance(admission, u, first_pos) * (1 + expected);
    return expected;
}

/* Expected saving for each byte, in seconds; <= 0: loading it costs as much as computing it. */
static double value_of(const struct kvt_admission *admission,
                       const struct kvt_admission_block *block, uint32_t uses)
{
    double saved =
        block->tokens * admission->params.token_s - (double)block->bytes * admission->params.byte_s;

    return expected_uses(admission, uses, block->first_pos) * saved / block->bytes;
}

static uint32_t value_class(const struct kvt_admission *admission, double value, bool again)
{
    double at = VALUE_ONE + VALUE_STEPS * log2(value * VALUE_BYTES / admission->params.token_s);
    uint32_t class = at < 0 ? 0 : at > VALUE_HALF - 1 ? VALUE_HALF - 1 : (uint32_t)at;

    return class + (again ? VALUE_HALF : 0);
}

/* A number in [0, 1) that is the tag's (or the slice of time's) own. */
static double draw(const struct kvt_admission *admission, uint64_t tag)
{
    uint64_t mixed = (tag ^ admission->params.seed) * UINT64_C(0x9e3779b97f4a7c15);

    mixed ^= mixed >> 32;
    mixed *= UINT64_C(0xd6e8feb86659fd93);
    return (double)(mixed >> 11) * 0x1p-53;
}

static bool worth_it(struct kvt_admission *admission, const struct kvt_admission_block *block,
                     double value, bool again)
{
    double left, most, day, above = 0, all = 0, full, share;
    uint32_t class = value_class(admission, value, again);

    if (!totals(admission, &left, &most, &day))
        return true;
    fade(admission);
    admission->asked[class] += block->bytes;
    for (uint32_t i = 0; i < KVT_ADMISSION_VALUES; i++) {
        all += admission->asked[i];
        above += i > class ? admission->asked[i] : 0;
    }
    /* what was asked lately is a stream faded with this half-life: its sum is as long as 1/ln 2 */
    full = KVT_MAX(left, 0.0) / most;
    if (again && full >= AGAIN_FROM)
        return true;
    share = day / DAY_NS * HALF_LIFE_NS / M_LN2 *
            (again ? 0.5 + full : 2 * (full - FIRST_FROM) / (1 - FIRST_FROM));
    if (all <= share)
        return true;
    return draw(admission, (uint64_t)admission->now_ns >> SLICE_SHIFT) * admission->asked[class] <
           share - above;
}

enum kvt_verdict kvt_admission_ask(struct kvt_admission *admission,
                                   const struct kvt_admission_block *block, uint64_t committed,
                                   int64_t now_ns)
{
    const struct kvt_seen *seen = admission->seen ? find(admission, block->tag) : NULL;
    double left, most, day;

    drip(admission, now_ns);
    if (admission->params.admit == KVT_ADMIT_SECOND && (!seen || seen->uses < 2))
        return KVT_VERDICT_FIRST_USE;
    if (admission->params.admit == KVT_ADMIT_RANDOM &&
        draw(admission, block->tag) * 1000 >= admission->params.permille)
        return KVT_VERDICT_RANDOM;
    if (admission->params.admit == KVT_ADMIT_VALUE) {
        double value = value_of(admission, block, seen ? seen->uses : 1);

        if (!(value > 0) || !worth_it(admission, block, value, seen && seen->uses > 1))
            return KVT_VERDICT_VALUE;
    }
    if (totals(admission, &left, &most, &day) && left < (double)committed + block->bytes)
        return KVT_VERDICT_BUDGET;
    return KVT_VERDICT_YES;
}
