/* Strict text parsing and nearest-match suggestions: see parse.h. No locale, no allocation. */
#include "base/parse.h"

#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit size_units[] = {
    {"B", 1},
    {"KiB", 1ull << 10},
    {"MiB", 1ull << 20},
    {"GiB", 1ull << 30},
    {"TiB", 1ull << 40},
    {"kB", 1000},
    {"MB", 1000000},
    {"GB", 1000000000},
    {"TB", 1000000000000},
};

static const struct unit duration_units[] = {
    {"ns", 1},
    {"us", 1000},
    {"ms", 1000000},
    {"s", 1000000000},
    {"min", 60000000000},
    {"h", 3600000000000},
    {"d", 86400000000000},
};

#define FRACTION_DIGITS_MAX 9
#define EDIT_LEN_MAX 63u

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Digits at *text into *out, advancing; 0, KVT_E_CONFIG_VALUE (no digit), KVT_E_LIMIT. */
static int take_digits(const char **text, uint64_t *out)
{
    const char *p = *text;
    uint64_t value = 0;
    bool fits = true;

    if (!is_digit(*p))
        return KVT_E_CONFIG_VALUE;
    for (; is_digit(*p); p++)
        fits = fits && kvt_mul_ok(value, (uint64_t)10, &value) &&
               kvt_add_ok(value, (uint64_t)(*p - '0'), &value);
    *text = p;
    *out = value;
    return fits ? 0 : KVT_E_LIMIT;
}

static const struct unit *find_unit(const struct unit *units, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(units[i].name, name))
            return &units[i];
    return NULL;
}

/* number[.fraction][unit] times the unit's factor. bare_max: largest value allowed without unit. */
static int parse_with_unit(const char *text, const struct unit *units, size_t count,
                           uint64_t bare_max, uint64_t *out)
{
    uint64_t whole = 0, fraction = 0, scale = 1, part;
    const struct unit *unit;
    const char *dot = NULL;
    int whole_rc, rc;

    if (!text)
        return KVT_E_CONFIG_VALUE;
    whole_rc = take_digits(&text, &whole);
    if (whole_rc == KVT_E_CONFIG_VALUE)
        return whole_rc;
    if (*text == '.') {
        dot = ++text;
        rc = take_digits(&text, &fraction);
        if (rc || text - dot > FRACTION_DIGITS_MAX)
            return KVT_E_CONFIG_VALUE;
        for (ptrdiff_t i = text - dot; i > 0; i--)
            scale *= 10;
    }
    if (!*text) {
        if (dot || (!whole_rc && whole > bare_max))
            return KVT_E_CONFIG_VALUE;
        if (whole_rc)
            return bare_max == UINT64_MAX ? whole_rc : KVT_E_CONFIG_VALUE;
        *out = whole;
        return 0;
    }
    unit = find_unit(units, count, text);
    if (!unit || (dot && unit->factor == 1))
        return KVT_E_CONFIG_VALUE;
    if (whole_rc || !kvt_mul_ok(whole, unit->factor, &whole))
        return KVT_E_LIMIT;
    part = (uint64_t)((unsigned __int128)fraction * unit->factor / scale);
    return kvt_add_ok(whole, part, out) ? 0 : KVT_E_LIMIT;
}

int kvt_parse_size(const char *text, uint64_t *out)
{
    uint64_t value = 0;
    int rc = parse_with_unit(text, size_units, KVT_ARRAY_LEN(size_units), UINT64_MAX, &value);

    if (!rc)
        *out = value;
    return rc;
}

int kvt_parse_duration(const char *text, int64_t *out)
{
    uint64_t value = 0;
    int rc = parse_with_unit(text, duration_units, KVT_ARRAY_LEN(duration_units), 0, &value);

    if (!rc && value > INT64_MAX)
        rc = KVT_E_LIMIT;
    if (!rc)
        *out = (int64_t)value;
    return rc;
}

int kvt_parse_bool(const char *text, int *out)
{
    static const char *const yes[] = {"yes", "true", "on", "1"};
    static const char *const no[] = {"no", "false", "off", "0"};

    if (!text)
        return KVT_E_CONFIG_VALUE;
    for (size_t i = 0; i < KVT_ARRAY_LEN(yes); i++) {
        if (!strcmp(text, yes[i]) || !strcmp(text, no[i])) {
            *out = !strcmp(text, yes[i]);
            return 0;
        }
    }
    return KVT_E_CONFIG_VALUE;
}

int kvt_parse_int(const char *text, int64_t min, int64_t max, int64_t *out)
{
    uint64_t magnitude;
    int64_t value;
    bool negative;
    int rc;

    if (!text)
        return KVT_E_CONFIG_VALUE;
    negative = *text == '-';
    text += negative;
    rc = take_digits(&text, &magnitude);
    if (rc == KVT_E_CONFIG_VALUE || *text)
        return KVT_E_CONFIG_VALUE;
    if (rc || magnitude > (uint64_t)INT64_MAX + negative)
        return KVT_E_LIMIT;
    value = negative ? (int64_t)(0 - magnitude) : (int64_t)magnitude;
    if (value < min || value > max)
        return KVT_E_LIMIT;
    *out = value;
    return 0;
}

static char folded(char c)
{
    if (c >= 'A' && c <= 'Z')
        return (char)(c - 'A' + 'a');
    return c == '-' ? '_' : c;
}

static const char *nearest_unit(const char *text, const struct unit *units, size_t count)
{
    const char *best = NULL;
    /* A unit is three letters at most: two edits, or another first letter (EiB), make another. */
    unsigned best_cost = 3;

    if (!text || !is_digit(*text))
        return NULL; /* it is the number that is wrong */
    while (is_digit(*text) || *text == '.' || *text == '-' || *text == ' ')
        text++;
    if (!*text)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        /* the first letter is rarely the one that is wrong */
        unsigned cost = 2 * kvt_edit_distance(text, units[i].name) +
                        (folded(text[0]) != folded(units[i].name[0]));

        if (cost < best_cost) {
            best_cost = cost;
            best = units[i].name;
        }
    }
    return best;
}

const char *kvt_nearest_size_unit(const char *text)
{
    return nearest_unit(text, size_units, KVT_ARRAY_LEN(size_units));
}

const char *kvt_nearest_duration_unit(const char *text)
{
    return nearest_unit(text, duration_units, KVT_ARRAY_LEN(duration_units));
}

unsigned kvt_edit_distance(const char *a, const char *b)
{
    /* three rows of the dynamic programme: swaps look two rows back */
    unsigned rows[3][EDIT_LEN_MAX + 1];
    size_t a_len = strnlen(a, EDIT_LEN_MAX), b_len = strnlen(b, EDIT_LEN_MAX);

    for (size_t j = 0; j <= b_len; j++)
        rows[0][j] = (unsigned)j;
    for (size_t i = 1; i <= a_len; i++) {
        unsigned *row = rows[i % 3], *above = rows[(i - 1) % 3], *above2 = rows[(i + 1) % 3];

        row[0] = (unsigned)i;
        for (size_t j = 1; j <= b_len; j++) {
            bool same = folded(a[i - 1]) == folded(b[j - 1]);
            unsigned best = above[j - 1] + !same;

            best = KVT_MIN(best, above[j] + 1);
            best = KVT_MIN(best, row[j - 1] + 1);
            if (i > 1 && j > 1 && folded(a[i - 1]) == folded(b[j - 2]) &&
                folded(a[i - 2]) == folded(b[j - 1]))
                best = KVT_MIN(best, above2[j - 2] + 1);
            row[j] = best;
        }
    }
    return rows[a_len % 3][b_len];
}

const char *kvt_nearest(const char *word, const char *const *choices, size_t count)
{
    const char *best = NULL;
    unsigned best_distance = 0;

    for (size_t i = 0; i < count; i++) {
        unsigned distance = kvt_edit_distance(word, choices[i]);
        unsigned limit = (unsigned)KVT_MAX(strlen(choices[i]) / 3, (size_t)1);

        if (distance <= limit && (!best || distance < best_distance)) {
            best = choices[i];
            best_distance = distance;
        }
    }
    return best;
}
