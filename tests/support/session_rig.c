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

/* The rows of one token in the parts of a group. */
static void fill_token(const struct rig *rig, uint16_t group, uint32_t page, uint32_t slot,
                       uint64_t state)
{
    for (uint32_t part = 0; part < rig->layout.part_count; part++) {
        if (rig->parts[part].group != group)
            continue;
        for (uint32_t head = 0; head < rig->shape.heads; head++) {
            uint16_t *row = row_of(rig, part, page, head, slot);
            uint64_t x = mix(state + part * 977 + head);
            for (uint32_t i = 0; i < rig->shape.dim; i++)
                row[i] = gauss(x = mix(x + 0x9e3779b97f4a7c15u));
        }
    }
}

/* A state fills its page, whatever it has summed up. */
static void fill_state(const struct rig *rig, uint16_t group, uint32_t page, uint64_t state)
{
    for (uint32_t slot = 0; slot < rig->shape.tokens; slot++)
        fill_token(rig, group, page, slot, state + slot);
}

/* The bytes of one group's parts, without the gaps between rows. */
static size_t group_bytes(const struct rig *rig, uint16_t group, uint32_t page, uint8_t *out)
{
    size_t at = 0, row = (size_t)rig->shape.dim * 2;
    for (uint32_t part = 0; part < rig->layout.part_count; part++)
        for (uint32_t head = 0; head < rig->shape.heads && rig->parts[part].group == group; head++)
            for (uint32_t t = 0; t < rig->shape.tokens; t++, at += row)
                memcpy(out + at, row_of(rig, part, page, head, t), row);
    return at;
}

static void put_layout(struct rig *rig, const struct srig_layout *layout)
{
    for (uint32_t part = 0; part < rig->layout.part_count; part++) {
        uint32_t g = layout->of_layer[part / 2];
        rig->parts[part].group = layout->groups[g].group;
        if (layout->groups[g].kind == KVT_GROUP_STATE)
            rig->parts[part].kind = KVT_PART_OPAQUE;
    }
    rig->layout.groups = layout->groups;
    rig->layout.group_count = layout->count;
}

void srig_mgr_open(struct srig *s)
{
    s->opts.struct_size = sizeof(s->opts);
    int rc = kvt_session_mgr_open(s->rig.ns, s->rig.pool, &s->opts, &s->mgr);
    if (rc != 0)
        fail_msg("kvt_session_mgr_open: %d %s", rc, kvt_strerror(rc));
}

static const struct srig_layout plain = {.count = 1};

void srig_open(struct srig *s, const struct rig_shape *shape, const char *config,
               const char *disk_cap, const struct kvt_session_mgr_opts *opts)
{
    srig_open_groups(s, &plain, shape, config, disk_cap, opts);
}

void srig_open_groups(struct srig *s, const struct srig_layout *layout,
                      const struct rig_shape *shape, const char *config, const char *disk_cap,
                      const struct kvt_session_mgr_opts *opts)
{
    struct rig_shape two = *shape;
    char all[512];
    memset(s, 0, sizeof(*s));
    /* what is loaded must not depend on how fast this machine is: test_session_plan is about that
     */
    snprintf(all, sizeof(all), "plan=off%s%s", config[0] != '\0' ? "," : "", config);
    rig_init(&s->rig, shape, all, disk_cap);
    s->layout = layout;
    if (layout != &plain)
        put_layout(&s->rig, layout);
    rig_open(&s->rig);
    srig_oracle_open(s, &two);
    if (opts != NULL)
        s->opts = *opts;
    srig_mgr_open(s);
}

void srig_oracle_open(struct srig *s, const struct rig_shape *shape)
{
    struct rig_shape two = *shape;
    size_t payload = 0;
    two.pages = 2;
    rig_init(&s->oracle, &two, "", NULL);
    if (s->layout != &plain)
        put_layout(&s->oracle, s->layout);
    for (uint32_t g = 0; g < s->layout->count; g++)
        payload = KVT_MAX(
            payload, kvt_payload_bytes(&s->rig.layout, s->layout->groups[g].group, KVT_LEVEL_RAW));
    s->payload = aligned_alloc(64, (payload + 63) / 64 * 64);
    s->want = malloc(rig_block_bytes(&s->rig));
    s->got = malloc(rig_block_bytes(&s->rig));
    assert_true(s->payload != NULL && s->want != NULL && s->got != NULL);
}

void srig_oracle_free(struct srig *s)
{
    rig_free(&s->oracle);
    free(s->payload);
    free(s->want);
    free(s->got);
}

void srig_free(struct srig *s)
{
    kvt_session_mgr_close(s->mgr);
    s->mgr = NULL;
    rig_free(&s->rig);
    srig_oracle_free(s);
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

struct kvt_session_info srig_info(const struct srig *s, const struct srig_session *x)
{
    struct kvt_session_info info = {.struct_size = sizeof(info)};
    assert_int_equal(kvt_session_get_info(s->mgr, x->id, &info), 0);
    return info;
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

uint32_t srig_page(struct srig *s, const struct srig_session *c, uint32_t g, uint32_t block)
{
    uint32_t page = 0;
    uint16_t group = s->layout->groups[g].group;
    assert_int_equal(kvt_session_group_pages(s->mgr, c->id, group, block, &page, 1), 1);
    assert_true(page == KVT_SESSION_NO_PAGE ||
                (page >= s->mgr->groups[g].first_page && page < s->rig.desc.block_count));
    return page;
}

static bool is_state(const struct srig *s, uint32_t g)
{
    return s->layout->groups[g].kind == KVT_GROUP_STATE;
}

static void compute_group(struct srig *s, struct srig_session *c, uint32_t g, uint32_t from,
                          uint32_t to)
{
    uint32_t unit = s->rig.shape.tokens, page = 0;
    uint16_t group = s->layout->groups[g].group;
    for (uint32_t t = from; t < to; t++) {
        bool end = t + 1 == to || (t + 1) % unit == 0;
        if (t == from || t % unit == 0)
            page = srig_page(s, c, g, t / unit);
        if (!is_state(s, g))
            assert_int_not_equal(page, KVT_SESSION_NO_PAGE);
        if (!is_state(s, g))
            fill_token(&s->rig, group, page, t % unit, c->state[t]);
        else if (end && page != KVT_SESSION_NO_PAGE)
            fill_state(&s->rig, group, page, c->state[t]);
    }
}

void srig_compute(struct srig *s, struct srig_session *c, uint32_t from, uint32_t to)
{
    for (uint32_t g = 0; g < s->layout->count; g++)
        compute_group(s, c, g, from, to);
}

void srig_fill(struct srig *s, struct srig_session *c, uint32_t from, uint32_t to)
{
    srig_compute(s, c, from, to);
    assert_int_equal(kvt_session_filled(s->mgr, c->id, to), 0);
}

/* One resume with what the manager does not know yet, and the wait. */
static int resume_once(struct srig *s, struct srig_session *c, struct kvt_session_plan *seen,
                       struct kvt_session_info *info)
{
    int rc;
    assert_int_equal(kvt_session_get_info(s->mgr, c->id, info), 0);
    do {
        rc = kvt_session_resume(s->mgr, c->id, c->token + info->tokens, c->tokens - info->tokens,
                                NULL, seen);
        if (rc == -EAGAIN)
            assert_true(kvt_session_mgr_work(s->mgr, 1000000000) >= 0);
    } while (rc == -EAGAIN);
    if (rc != 0)
        return rc;
    assert_int_equal(seen->tokens, c->tokens);
    assert_int_equal(seen->in_l0 + seen->from_dram + seen->from_disk + seen->recompute, c->tokens);
    assert_int_equal(kvt_session_wait(s->mgr, c->id, -1), 1);
    assert_int_equal(kvt_session_get_plan(s->mgr, c->id, seen), 0);
    assert_int_equal(kvt_session_get_info(s->mgr, c->id, info), 0);
    return 0;
}

/* The engine can go on: the state that it goes on from is in a page. */
static void verify_states(struct srig *s, const struct srig_session *c, uint32_t filled)
{
    for (uint32_t g = 0; g < s->layout->count; g++)
        if (is_state(s, g) && filled > 0)
            assert_int_not_equal(srig_page(s, c, g, (filled - 1) / s->rig.shape.tokens),
                                 KVT_SESSION_NO_PAGE);
}

int srig_resume(struct srig *s, struct srig_session *c, struct kvt_session_plan *plan)
{
    struct kvt_session_info info = {.struct_size = sizeof(info)};
    struct kvt_session_plan seen = {.struct_size = sizeof(seen)};
    for (int i = 0; info.state != KVT_SESSION_ACTIVE; i++) {
        int rc = resume_once(s, c, &seen, &info);
        if (rc != 0)
            return rc;
        /* of several groups: a load came short, and there were no pages to compute instead */
        assert_true(info.state == KVT_SESSION_ACTIVE || (s->layout->count > 1 && i < 1000));
    }
    assert_int_equal(info.filled, c->tokens - seen.recompute);
    (void)srig_verify(s, c, info.filled, NULL);
    verify_states(s, c, info.filled);
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
static void recode(struct srig *s, uint16_t group, int level, uint32_t from)
{
    size_t bytes = kvt_payload_bytes(&s->oracle.layout, group, level);
    assert_int_equal(kvt_encode_block(&s->oracle.layout, group, level, &s->oracle.desc, from,
                                      s->payload, bytes, 1, NULL),
                     0);
    assert_int_equal(
        kvt_decode_block(&s->oracle.layout, group, level, s->payload, bytes, &s->oracle.desc, 1),
        0);
}

static bool matches(struct srig *s, uint16_t group, uint32_t page)
{
    size_t bytes = group_bytes(&s->oracle, group, page, s->want);
    return memcmp(s->want, s->got, bytes) == 0;
}

/* The first `tokens` rows only: a partial block is never coded. */
static bool partial_matches(const struct srig *s, uint16_t group, uint32_t page, uint32_t tokens)
{
    for (uint32_t part = 0; part < s->rig.layout.part_count; part++)
        for (uint32_t head = 0; head < s->rig.shape.heads; head++)
            for (uint32_t t = 0; t < tokens && s->rig.parts[part].group == group; t++)
                if (memcmp(row_of(&s->rig, part, page, head, t),
                           row_of(&s->oracle, part, 0, head, t), s->rig.shape.dim * 2) != 0)
                    return false;
    return true;
}

static enum srig_bytes group_page_is(struct srig *s, const struct srig_session *c, uint32_t g,
                                     uint32_t block, uint32_t page, uint32_t tokens)
{
    uint32_t unit = s->rig.shape.tokens, first = block * unit;
    uint16_t group = s->layout->groups[g].group;
    (void)group_bytes(&s->rig, group, page, s->got);
    if (is_state(s, g)) {
        fill_state(&s->oracle, group, 0, c->state[first + tokens - 1]);
        return matches(s, group, 0) ? SRIG_EXACT : SRIG_OTHER;
    }
    for (uint32_t t = 0; t < tokens; t++)
        fill_token(&s->oracle, group, 0, t, c->state[first + t]);
    if (tokens < unit)
        return partial_matches(s, group, page, tokens) ? SRIG_EXACT : SRIG_OTHER;
    if (matches(s, group, 0))
        return SRIG_EXACT;
    recode(s, group, KVT_LEVEL_KV4, 0);
    if (matches(s, group, 1))
        return SRIG_KV4;
    recode(s, group, KVT_LEVEL_KV8, 0);
    if (matches(s, group, 1))
        return SRIG_KV8;
    recode(s, group, KVT_LEVEL_KV4, 1);
    return matches(s, group, 1) ? SRIG_KV8_KV4 : SRIG_OTHER;
}

enum srig_bytes srig_page_is(struct srig *s, const struct srig_session *c, uint32_t block,
                             uint32_t page, uint32_t tokens)
{
    return group_page_is(s, c, 0, block, page, tokens);
}

/* Whether an engine that goes on behind `tokens` reads block t / unit of the group. */
static bool is_read(const struct srig *s, uint32_t g, uint32_t t, uint32_t tokens)
{
    const struct kvt_group *group = &s->layout->groups[g];
    return group->kind == KVT_GROUP_FULL ||
           (group->kind == KVT_GROUP_WINDOW &&
            t + s->rig.shape.tokens + group->window_tokens > tokens);
}

unsigned srig_verify_group(struct srig *s, const struct srig_session *c, uint32_t g,
                           uint32_t tokens, uint8_t *kinds)
{
    uint32_t unit = s->rig.shape.tokens;
    unsigned seen = 0;
    for (uint32_t t = 0; t < tokens; t += unit) {
        uint32_t page = srig_page(s, c, g, t / unit);
        if (kinds != NULL && tokens - t >= unit)
            kinds[t / unit] = SRIG_OTHER;
        if (page == KVT_SESSION_NO_PAGE) {
            assert_false(is_read(s, g, t, tokens));
            continue;
        }
        if (is_state(s, g) && s->mgr->sessions[(uint32_t)c->id - 1].unwritten && tokens - t < unit)
            continue; /* a cut gave it: the engine has yet to write it */
        enum srig_bytes is = group_page_is(s, c, g, t / unit, page, KVT_MIN(unit, tokens - t));
        uint8_t origin = atomic_load(&s->rig.pool->origin[g * s->rig.desc.block_count + page]);
        if (is == SRIG_OTHER)
            fail_msg("block %u of group %u in page %u is nothing that it may be", t / unit, g,
                     page);
        if (t == 0)
            assert_int_equal(is, SRIG_EXACT); /* the sink */
        assert_int_equal(origin, is == SRIG_EXACT ? 0 : is == SRIG_KV8 ? KVT_LEVEL_KV8 : 2);
        if (kinds != NULL && tokens - t >= unit)
            kinds[t / unit] = (uint8_t)is;
        seen |= (unsigned)is;
    }
    return seen;
}

unsigned srig_verify(struct srig *s, const struct srig_session *c, uint32_t tokens, uint8_t *kinds)
{
    unsigned seen = srig_verify_group(s, c, 0, tokens, kinds);
    for (uint32_t g = 1; g < s->layout->count; g++)
        (void)srig_verify_group(s, c, g, tokens, NULL);
    return seen;
}

struct kvt_session_block srig_block(struct srig *s, const struct srig_session *c, uint32_t block)
{
    struct kvt_session_block out = {.struct_size = sizeof(out)};
    assert_int_equal(kvt_session_get_block(s->mgr, c->id, block, &out), 0);
    return out;
}

struct kvt_session_block srig_group_block(struct srig *s, const struct srig_session *c, uint32_t g,
                                          uint32_t block)
{
    struct kvt_session_block out = {.struct_size = sizeof(out)};
    assert_int_equal(
        kvt_session_get_group_block(s->mgr, c->id, s->layout->groups[g].group, block, &out), 0);
    return out;
}
