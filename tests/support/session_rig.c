/* See session_rig.h. */
#include "support/session_rig.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* A number about N(0, 1), as bf16: the sum of eight bytes. */
static uint16_t gauss(uint64_t bits)
{
    int sum = 0;
    for (int i = 0; i < 64; i += 8)
        sum += (int)(bits >> i & 255);
    float x = (float)(sum - 1020) * (1.0f / 209.0f);
    uint32_t word;
    memcpy(&word, &x, sizeof(word));
    return (uint16_t)(word >> 16);
}

static uint16_t *row_of(const struct rig *rig, uint32_t part, uint32_t page, uint32_t head,
                        uint32_t token)
{
    const struct kvt_part_place *place = &rig->places[part];
    return (uint16_t *)(void *)((uint8_t *)place->base + page * place->stride_block +
                                head * place->stride_head + token * place->stride_token);
}

static void fill_token(const struct rig *rig, uint32_t page, uint32_t slot, uint64_t state)
{
    for (uint32_t part = 0; part < rig->layout.part_count; part++) {
        for (uint32_t head = 0; head < rig->shape.heads; head++) {
            uint16_t *row = row_of(rig, part, page, head, slot);
            uint64_t x = mix(state + part * 977 + head);
            for (uint32_t i = 0; i < rig->shape.dim; i++)
                row[i] = gauss(x = mix(x + 0x9e3779b97f4a7c15u));
        }
    }
}

void srig_mgr_open(struct srig *s)
{
    s->opts.struct_size = sizeof(s->opts);
    int rc = kvt_session_mgr_open(s->rig.ns, s->rig.pool, &s->opts, &s->mgr);
    if (rc != 0)
        fail_msg("kvt_session_mgr_open: %d %s", rc, kvt_strerror(rc));
}

void srig_open(struct srig *s, const struct rig_shape *shape, const char *config,
               const char *disk_cap, const struct kvt_session_mgr_opts *opts)
{
    struct rig_shape two = *shape;
    char all[512];
    memset(s, 0, sizeof(*s));
    /* what is loaded must not depend on how fast this machine is: test_session_plan is about that
     */
    snprintf(all, sizeof(all), "plan=off%s%s", config[0] != '\0' ? "," : "", config);
    rig_init(&s->rig, shape, all, disk_cap);
    rig_open(&s->rig);
    two.pages = 2;
    rig_init(&s->oracle, &two, "", NULL);
    s->block_bytes = rig_block_bytes(&s->rig);
    s->payload_bytes = (kvt_payload_bytes(&s->rig.layout, 0, KVT_LEVEL_RAW) + 63) / 64 * 64;
    s->payload = aligned_alloc(64, s->payload_bytes);
    s->want = malloc(s->block_bytes);
    s->got = malloc(s->block_bytes);
    assert_true(s->payload != NULL && s->want != NULL && s->got != NULL);
    if (opts != NULL)
        s->opts = *opts;
    srig_mgr_open(s);
}

void srig_free(struct srig *s)
{
    kvt_session_mgr_close(s->mgr);
    s->mgr = NULL;
    rig_free(&s->rig);
    rig_free(&s->oracle);
    free(s->payload);
    free(s->want);
    free(s->got);
    memset(s, 0, sizeof(*s));
}

void srig_check(struct srig *s)
{
    char why[128] = "";
    if (kvt_session_mgr_check(s->mgr, why, sizeof(why)) != 0)
        fail_msg("the manager is inconsistent: %s", why);
}

struct kvt_session_stats srig_stats(struct srig *s)
{
    struct kvt_session_stats stats = {.struct_size = sizeof(stats)};
    assert_int_equal(kvt_session_mgr_stats(s->mgr, &stats), 0);
    return stats;
}

void srig_settle(struct srig *s)
{
    long left = 1;
    for (int i = 0; i < 100000 && left > 0; i++)
        left = kvt_session_mgr_work(s->mgr, 1000000000);
    assert_int_equal(left, 0);
    srig_check(s);
}

/* ---- sessions ------------------------------------------------------------------------------ */

void srig_session_open(struct srig *s, struct srig_session *c, uint32_t max, uint64_t salt)
{
    memset(c, 0, sizeof(*c));
    c->max = max;
    c->salt = salt;
    c->token = calloc(max, sizeof(*c->token));
    c->state = calloc(max, sizeof(*c->state));
    assert_true(c->token != NULL && c->state != NULL);
    assert_int_equal(kvt_session_open(s->mgr, salt ? &salt : NULL, salt ? sizeof(salt) : 0, &c->id),
                     0);
}

void srig_session_free(struct srig_session *c)
{
    free(c->token);
    free(c->state);
    memset(c, 0, sizeof(*c));
}

const uint32_t *srig_tokens(struct srig_session *c, uint32_t first, uint32_t n)
{
    uint32_t at = c->tokens;
    assert_true(n <= c->max - at);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t before = at + i ? c->state[at + i - 1] : mix(c->salt + 1);
        c->token[at + i] = first + i;
        c->state[at + i] = mix(before * 3 + first + i);
    }
    c->tokens += n;
    return c->token + at;
}

static uint32_t page_of(struct srig *s, const struct srig_session *c, uint32_t block)
{
    uint32_t page = KVT_SESSION_NO_PAGE;
    assert_int_equal(kvt_session_pages(s->mgr, c->id, block, &page, 1), 1);
    assert_true(page >= s->opts.first_page && page < s->rig.desc.block_count);
    return page;
}

void srig_compute(struct srig *s, struct srig_session *c, uint32_t from, uint32_t to)
{
    uint32_t unit = s->rig.shape.tokens, page = 0;
    for (uint32_t t = from; t < to; t++) {
        if (t == from || t % unit == 0)
            page = page_of(s, c, t / unit);
        fill_token(&s->rig, page, t % unit, c->state[t]);
    }
}

void srig_fill(struct srig *s, struct srig_session *c, uint32_t from, uint32_t to)
{
    srig_compute(s, c, from, to);
    assert_int_equal(kvt_session_filled(s->mgr, c->id, to), 0);
}

int srig_resume(struct srig *s, struct srig_session *c, struct kvt_session_plan *plan)
{
    struct kvt_session_info info = {.struct_size = sizeof(info)};
    struct kvt_session_plan seen = {.struct_size = sizeof(seen)};
    int rc;
    assert_int_equal(kvt_session_get_info(s->mgr, c->id, &info), 0);
    do {
        rc = kvt_session_resume(s->mgr, c->id, c->token + info.tokens, c->tokens - info.tokens,
                                NULL, &seen);
        if (rc == -EAGAIN)
            assert_true(kvt_session_mgr_work(s->mgr, 1000000000) >= 0);
    } while (rc == -EAGAIN);
    if (rc != 0)
        return rc;
    assert_int_equal(seen.tokens, c->tokens);
    assert_int_equal(seen.in_l0 + seen.from_dram + seen.from_disk + seen.recompute, c->tokens);
    assert_int_equal(kvt_session_wait(s->mgr, c->id, -1), 1);
    assert_int_equal(kvt_session_get_plan(s->mgr, c->id, &seen), 0);
    assert_int_equal(kvt_session_get_info(s->mgr, c->id, &info), 0);
    assert_int_equal(info.state, KVT_SESSION_ACTIVE);
    assert_int_equal(info.filled, c->tokens - seen.recompute);
    (void)srig_verify(s, c, info.filled, NULL);
    if (plan != NULL)
        *plan = seen;
    return 0;
}

void srig_turn(struct srig *s, struct srig_session *c, struct kvt_session_plan *plan)
{
    struct kvt_session_plan seen;
    assert_int_equal(srig_resume(s, c, &seen), 0);
    srig_fill(s, c, c->tokens - seen.recompute, c->tokens);
    if (plan != NULL)
        *plan = seen;
}

int srig_append(struct srig *s, struct srig_session *c)
{
    struct kvt_session_info info = {.struct_size = sizeof(info)};
    int rc;
    assert_int_equal(kvt_session_get_info(s->mgr, c->id, &info), 0);
    do {
        rc = kvt_session_append(s->mgr, c->id, c->token + info.tokens, c->tokens - info.tokens);
        if (rc == -EAGAIN)
            assert_true(kvt_session_mgr_work(s->mgr, 1000000000) >= 0);
    } while (rc == -EAGAIN);
    if (rc == 0)
        srig_fill(s, c, info.filled, c->tokens);
    return rc;
}

/* ---- what pages must hold ------------------------------------------------------------------ */

/* Page 0 of the oracle, coded and decoded into page 1. */
static void recode(struct srig *s, int level, uint32_t from)
{
    size_t bytes = kvt_payload_bytes(&s->oracle.layout, 0, level);
    assert_int_equal(kvt_encode_block(&s->oracle.layout, 0, level, &s->oracle.desc, from,
                                      s->payload, bytes, 1, NULL),
                     0);
    assert_int_equal(
        kvt_decode_block(&s->oracle.layout, 0, level, s->payload, bytes, &s->oracle.desc, 1), 0);
}

static bool matches(struct srig *s, uint32_t page)
{
    rig_page_bytes(&s->oracle, page, s->want);
    return memcmp(s->want, s->got, s->block_bytes) == 0;
}

/* The first `tokens` rows only: a partial block is never coded. */
static bool partial_matches(const struct srig *s, uint32_t page, uint32_t tokens)
{
    for (uint32_t part = 0; part < s->rig.layout.part_count; part++)
        for (uint32_t head = 0; head < s->rig.shape.heads; head++)
            for (uint32_t t = 0; t < tokens; t++)
                if (memcmp(row_of(&s->rig, part, page, head, t),
                           row_of(&s->oracle, part, 0, head, t), s->rig.shape.dim * 2) != 0)
                    return false;
    return true;
}

enum srig_bytes srig_page_is(struct srig *s, const struct srig_session *c, uint32_t block,
                             uint32_t page, uint32_t tokens)
{
    uint32_t unit = s->rig.shape.tokens;
    for (uint32_t t = 0; t < tokens; t++)
        fill_token(&s->oracle, 0, t, c->state[block * unit + t]);
    if (tokens < unit)
        return partial_matches(s, page, tokens) ? SRIG_EXACT : SRIG_OTHER;
    rig_page_bytes(&s->rig, page, s->got);
    if (matches(s, 0))
        return SRIG_EXACT;
    recode(s, KVT_LEVEL_KV4, 0);
    if (matches(s, 1))
        return SRIG_KV4;
    recode(s, KVT_LEVEL_KV8, 0);
    if (matches(s, 1))
        return SRIG_KV8;
    recode(s, KVT_LEVEL_KV4, 1);
    return matches(s, 1) ? SRIG_KV8_KV4 : SRIG_OTHER;
}

unsigned srig_verify(struct srig *s, const struct srig_session *c, uint32_t tokens, uint8_t *kinds)
{
    uint32_t unit = s->rig.shape.tokens;
    unsigned seen = 0;
    for (uint32_t t = 0; t < tokens; t += unit) {
        uint32_t page = page_of(s, c, t / unit);
        enum srig_bytes is = srig_page_is(s, c, t / unit, page, KVT_MIN(unit, tokens - t));
        uint8_t origin = atomic_load(&s->rig.pool->origin[page]);
        if (is == SRIG_OTHER)
            fail_msg("block %u in page %u is nothing that it may be", t / unit, page);
        if (t == 0)
            assert_int_equal(is, SRIG_EXACT); /* the sink */
        assert_int_equal(origin, is == SRIG_EXACT ? 0 : is == SRIG_KV8 ? KVT_LEVEL_KV8 : 2);
        if (kinds != NULL && tokens - t >= unit)
            kinds[t / unit] = (uint8_t)is;
        seen |= (unsigned)is;
    }
    return seen;
}

struct kvt_session_block srig_block(struct srig *s, const struct srig_session *c, uint32_t block)
{
    struct kvt_session_block out = {.struct_size = sizeof(out)};
    assert_int_equal(kvt_session_get_block(s->mgr, c->id, block, &out), 0);
    return out;
}
