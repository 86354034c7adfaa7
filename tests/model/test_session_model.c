/* Goal: whatever sessions do in whatever order, a page that the manager calls filled holds what its
 *       tokens say, at a level that it may have, and the manager's books agree.
 * Method: random turns (resume with new tokens or without, append, fill a part, idle, close, again
 *       under a late deadline), flushes, purges, switching off, restarts, over many sessions whose
 *       token sequences share prefixes and a pool that holds few of them. Every filled page is
 *       compared with what the codec alone makes of its tokens' KV; every step ends with the
 *       manager's check of itself. Without faults, all that was filled must come back without
 *       being computed again, but for a partial block. With them (a backend that fails, flips,
 *       loses and tears, put under the cache by the linker) there may be misses, never other bytes.
 *       Layouts of one group, and of full attention with a window and states: there what was filled
 *       comes back where the session was last left whole, unless it was cut.
 */
#include "support/rig.h"
#include "support/session_rig.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/session_internal.h"
#include "io/io_posix.h"
#include "support/fault_io.h"

enum { SESSIONS = 10, UNIT = 16, TOKENS_MAX = 640 };

struct model {
    struct srig s;
    struct srig_session c[SESSIONS];
    bool open[SESSIONS];
    bool marked[SESSIONS]; /* not to be stored: computed again once its pages have gone */
    bool loose[SESSIONS];  /* of several groups: cut, or left where its state is in no page */
    struct kvt_rng rng;
    bool calm;  /* room for everything, no faults, nothing purged or switched off */
    bool alone; /* all sessions of the manager are here */
    uint64_t resumed, restored, computed, refused, verified, cut;
};

static struct kvt_io *faulty; /* the instance under the cache; NULL: faults are off */
static bool want_faults;

int __real_kvt_io_files_new(const struct kvt_io_posix_params *params, struct kvt_io **out);
int __wrap_kvt_io_files_new(const struct kvt_io_posix_params *params, struct kvt_io **out);

int __wrap_kvt_io_files_new(const struct kvt_io_posix_params *params, struct kvt_io **out)
{
    int rc = __real_kvt_io_files_new(params, out);
    if (rc != 0 || !want_faults)
        return rc;
    faulty = fault_io_new(*out, 7);
    assert_non_null(faulty);
    *out = faulty;
    return 0;
}

static uint32_t roll(struct model *m, uint32_t bound)
{
    return (uint32_t)kvt_rng_below(&m->rng, bound);
}

static struct kvt_session_info info_of(struct model *m, uint32_t i)
{
    struct kvt_session_info info = {.struct_size = sizeof(info)};
    assert_int_equal(kvt_session_get_info(m->s.mgr, m->c[i].id, &info), 0);
    return info;
}

static bool is_active(struct model *m, uint32_t i)
{
    return m->open[i] && info_of(m, i).state == KVT_SESSION_ACTIVE;
}

/* More tokens, of few kinds, so that sequences go the same way for a while. */
static uint32_t more_tokens(struct model *m, uint32_t i)
{
    uint32_t room = m->c[i].max - m->c[i].tokens;
    uint32_t n = roll(m, 4) ? 1 + roll(m, 40) : UNIT * (1 + roll(m, 6));
    n = KVT_MIN(n, room);
    srig_tokens(&m->c[i], roll(m, 8) ? 1 : 100, n);
    return n;
}

static void op_open(struct model *m, uint32_t i)
{
    if (m->open[i])
        return;
    srig_session_open(&m->s, &m->c[i], TOKENS_MAX, roll(m, 5) ? 0 : 9);
    m->marked[i] = roll(m, 6) == 0;
    if (m->marked[i])
        assert_int_equal(kvt_session_no_store(m->s.mgr, m->c[i].id), 0);
    m->open[i] = true;
}

static void forget(struct model *m, uint32_t i)
{
    srig_session_free(&m->c[i]);
    m->open[i] = m->loose[i] = false;
}

static bool several(const struct model *m)
{
    return m->s.layout->count > 1;
}

static void fill_some(struct model *m, uint32_t i, uint32_t from, uint32_t to)
{
    m->loose[i] = several(m);
    srig_fill(&m->s, &m->c[i], from, to);
}

/* Nobody else is active, and each group has pages for the whole sequence: then it can come back. */
static bool has_room(struct model *m, uint32_t tokens)
{
    for (uint32_t i = 0; i < SESSIONS; i++)
        if (!m->alone || is_active(m, i))
            return false;
    for (uint32_t g = 0; g < m->s.layout->count; g++) {
        const struct kvt_sgroup *group = &m->s.mgr->groups[g];
        if (group->page_count - group->scratch_pages < (tokens + UNIT - 1) / UNIT)
            return false;
    }
    return true;
}

static void op_resume(struct model *m, uint32_t i)
{
    struct kvt_session_plan plan;
    if (!m->open[i] || is_active(m, i))
        return;
    uint32_t before = m->c[i].tokens, n = roll(m, 5) ? more_tokens(m, i) : 0;
    int rc = srig_resume(&m->s, &m->c[i], &plan);
    if (rc != 0) {
        assert_int_equal(rc, KVT_E_LIMIT);
        assert_false(has_room(m, m->c[i].tokens));
        m->c[i].tokens = info_of(m, i).tokens; /* a refused call changes nothing */
        if (several(m))                        /* another one of the same resume may have */
            assert_true(m->c[i].tokens <= before + n);
        else
            assert_int_equal(m->c[i].tokens, before);
        m->refused++;
        return;
    }
    bool lost = m->marked[i] && srig_stats(&m->s).evicted_unsaved > 0;
    if (m->calm && !m->loose[i] && !lost && plan.recompute > n + UNIT - 1) /* a partial block */
        fail_msg("%u of %u tokens to compute, %u of them new; reason %d, %llu blocks went unsaved",
                 plan.recompute, plan.tokens, n, plan.reason,
                 (unsigned long long)srig_stats(&m->s).evicted_unsaved);
    m->loose[i] = false;
    m->resumed++;
    m->restored += plan.from_dram + plan.from_disk;
    m->computed += plan.recompute;
    if (roll(m, 6)) /* else the engine was stopped before it computed anything, or in the middle */
        srig_fill(&m->s, &m->c[i], m->c[i].tokens - plan.recompute, m->c[i].tokens);
    else
        fill_some(m, i, m->c[i].tokens - plan.recompute,
                  m->c[i].tokens - roll(m, plan.recompute + 1));
}

/* A resume whose deadline is in the past, more or less. */
static void op_late(struct model *m, uint32_t i)
{
    struct kvt_session_resume_opts opts = {.struct_size = sizeof(opts),
                                           .deadline_ns = 1 + roll(m, 200000)};
    if (!m->open[i] || is_active(m, i))
        return;
    int rc = kvt_session_resume(m->s.mgr, m->c[i].id, NULL, 0, &opts, NULL);
    if (rc != 0) {
        assert_true(rc == KVT_E_LIMIT || rc == -EAGAIN);
        return;
    }
    if (roll(m, 2))
        assert_int_equal(kvt_session_wait(m->s.mgr, m->c[i].id, -1), 1);
    if (!is_active(m, i)) { /* close while it loads */
        assert_int_equal(kvt_session_close(m->s.mgr, m->c[i].id), 0);
        forget(m, i);
        return;
    }
    (void)srig_verify(&m->s, &m->c[i], info_of(m, i).filled, NULL);
    srig_fill(&m->s, &m->c[i], info_of(m, i).filled, m->c[i].tokens);
}

static void op_append(struct model *m, uint32_t i)
{
    if (!is_active(m, i) || info_of(m, i).filled != m->c[i].tokens || m->c[i].tokens == m->c[i].max)
        return;
    uint32_t before = m->c[i].tokens;
    (void)more_tokens(m, i);
    int rc = srig_append(&m->s, &m->c[i]);
    if (rc != 0) {
        assert_int_equal(rc, KVT_E_LIMIT);
        m->c[i].tokens = before;
        m->refused++;
    }
}

static void op_verify(struct model *m, uint32_t i)
{
    if (!is_active(m, i))
        return;
    uint32_t filled = info_of(m, i).filled;
    (void)srig_verify(&m->s, &m->c[i], filled, NULL);
    m->verified += filled;
}

static void op_idle(struct model *m, uint32_t i)
{
    if (!is_active(m, i))
        return;
    op_verify(m, i);
    uint32_t filled = info_of(m, i).filled;
    assert_int_equal(kvt_session_idle(m->s.mgr, m->c[i].id), 0);
    assert_int_equal(info_of(m, i).tokens, filled);
    m->c[i].tokens = filled;
}

/* The end goes: anything from nothing to all of it. */
static void op_truncate(struct model *m, uint32_t i)
{
    if (!m->open[i])
        return;
    struct kvt_session_info before = info_of(m, i), after;
    uint32_t tokens = before.tokens ? roll(m, before.tokens + 1) : 0;
    int rc;
    do {
        rc = kvt_session_truncate(m->s.mgr, m->c[i].id, tokens);
        if (rc == -EAGAIN)
            assert_true(kvt_session_mgr_work(m->s.mgr, 1000000) >= 0);
    } while (rc == -EAGAIN);
    after = info_of(m, i);
    if (rc != 0) { /* changes nothing */
        assert_true(rc == KVT_E_LIMIT || (rc == KVT_E_STATE && several(m)));
        assert_memory_equal(&before, &after, sizeof(before));
        m->refused++;
        return;
    }
    m->loose[i] = several(m);
    assert_int_equal(after.tokens, tokens);
    assert_true(after.filled <= tokens && after.filled <= before.filled);
    assert_true(after.filled + UNIT > KVT_MIN(before.filled, tokens));
    m->c[i].tokens = tokens;
    m->cut += before.tokens - tokens;
    if (after.state != KVT_SESSION_ACTIVE)
        return;
    (void)srig_verify(&m->s, &m->c[i], after.filled, NULL);
    if (roll(m, 4))
        srig_fill(&m->s, &m->c[i], after.filled, tokens);
}

static void op_close(struct model *m, uint32_t i)
{
    if (!m->open[i])
        return;
    op_verify(m, i);
    assert_int_equal(kvt_session_close(m->s.mgr, m->c[i].id), 0);
    forget(m, i);
}

static void op_purge(struct model *m, uint32_t i)
{
    struct kvt_key keys[TOKENS_MAX / UNIT];
    uint8_t root[32];
    if (!m->open[i] || m->c[i].tokens < UNIT || m->calm)
        return;
    const struct srig_session *c = &m->c[i];
    assert_int_equal(kvt_key_root(c->salt ? &c->salt : NULL, c->salt ? sizeof(c->salt) : 0, root),
                     0);
    long n = kvt_key_chain(root, c->token, c->tokens, UNIT, NULL, 0, 0, 0, keys, TOKENS_MAX / UNIT);
    assert_true(n > 0);
    uint32_t first = roll(m, (uint32_t)n), g = roll(m, m->s.layout->count);
    for (long k = 0; k < n; k++)
        keys[k].group = m->s.layout->groups[g].group;
    long rc = kvt_purge(m->s.rig.ns, keys + first, 1 + roll(m, (uint32_t)n - first));
    assert_true(rc >= 0 || want_faults);
}

static void op_fault(struct model *m)
{
    static const unsigned ops[] = {FAULT_READ, FAULT_WRITE, FAULT_SYNC, FAULT_ALLOCATE};
    struct fault_rule rule = {.ops = ops[roll(m, 4)],
                              .name = "seg-",
                              .skip = roll(m, 6),
                              .times = 1 + roll(m, 4),
                              .action = FAULT_FAIL,
                              .error = roll(m, 2) ? EIO : ENOSPC};
    if (faulty == NULL || m->calm)
        return;
    if (rule.ops == FAULT_READ && roll(m, 2)) {
        rule.action = roll(m, 3) ? FAULT_FLIP : FAULT_SHORT;
        rule.arg = rule.action == FAULT_FLIP ? FAULT_RANDOM : 1;
    } else if (rule.ops == FAULT_WRITE) {
        rule.action =
            (int)((const int[]){FAULT_FAIL, FAULT_LOST, FAULT_TORN, FAULT_MISDIRECT})[roll(m, 4)];
        rule.arg = 1 + roll(m, 6);
        rule.error = rule.action == FAULT_FAIL ? rule.error : 0;
    }
    fault_io_clear(faulty);
    if (roll(m, 3))
        assert_true(fault_io_rule(faulty, &rule) >= 0);
}

/* A new process, as far as the manager can tell: it knows nothing, the engine opens anew. */
static void op_restart(struct model *m)
{
    for (uint32_t i = 0; i < SESSIONS; i++) {
        op_idle(m, i);
        if (m->open[i])
            assert_int_equal(kvt_session_close(m->s.mgr, m->c[i].id), 0);
    }
    int rc = kvt_session_mgr_flush(m->s.mgr);
    assert_true(rc == 0 || !m->calm);
    kvt_session_mgr_close(m->s.mgr);
    if (roll(m, 3) && m->s.rig.dir[0] != '\0')
        rig_reopen(&m->s.rig);
    srig_mgr_open(&m->s);
    for (uint32_t i = 0; i < SESSIONS; i++)
        if (m->open[i])
            assert_int_equal(kvt_session_open(m->s.mgr, m->c[i].salt ? &m->c[i].salt : NULL,
                                              m->c[i].salt ? sizeof(m->c[i].salt) : 0, &m->c[i].id),
                             0);
    for (uint32_t i = 0; i < SESSIONS; i++) /* the whole sequence is new to the manager */
        if (m->open[i] && m->c[i].tokens > 0) {
            struct kvt_session_plan plan;
            uint32_t all = m->c[i].tokens;
            rc = srig_resume(&m->s, &m->c[i], &plan);
            if (rc == 0) {
                srig_fill(&m->s, &m->c[i], all - plan.recompute, all);
                m->restored += plan.from_dram + plan.from_disk;
                op_idle(m, i);
                continue;
            }
            assert_int_equal(rc, KVT_E_LIMIT);
            m->c[i].tokens = 0;
        }
}

static void op_any(struct model *m, uint32_t step)
{
    uint32_t i = roll(m, SESSIONS), dice = roll(m, 100);
    if (dice < 12)
        op_open(m, i);
    else if (dice < 42)
        op_resume(m, i);
    else if (dice < 60)
        op_append(m, i);
    else if (dice < 64)
        op_truncate(m, i);
    else if (dice < 82)
        op_idle(m, i);
    else if (dice < 86)
        op_verify(m, i);
    else if (dice < 89)
        op_late(m, i);
    else if (dice < 92)
        op_close(m, i);
    else if (dice < 94)
        assert_true(kvt_session_mgr_work(m->s.mgr, (int64_t)roll(m, 1000000)) >= 0);
    else if (dice < 95)
        assert_true(kvt_session_mgr_flush(m->s.mgr) <= 0);
    else if (dice < 97)
        op_purge(m, i);
    else if (dice < 98)
        kvt_enable(m->s.rig.cache, m->calm || roll(m, 2));
    else if (step % 8 == 0)
        op_restart(m);
    else
        op_fault(m);
}

static uint32_t steps_wanted(void)
{
    const char *text = getenv("KVT_MODEL_STEPS");
    return text ? (uint32_t)strtoul(text, NULL, 10) : 1500;
}

static const struct srig_layout mixed = {
    .count = 3,
    .groups = {{.group = 0},
               {.group = 5, .kind = KVT_GROUP_WINDOW, .window_tokens = 128},
               {.group = 9, .kind = KVT_GROUP_STATE}},
    .of_layer = {0, 1, 2}};

static const struct srig_layout windows_only = {
    .count = 2,
    .groups = {{.group = 5, .kind = KVT_GROUP_WINDOW, .window_tokens = 80},
               {.group = 6, .kind = KVT_GROUP_WINDOW, .window_tokens = 160}},
    .of_layer = {0, 1}};
static const struct srig_layout full_twice = {
    .count = 3,
    .groups = {{.group = 2},
               {.group = 3, .kind = KVT_GROUP_WINDOW, .window_tokens = 48},
               {.group = 1}},
    .of_layer = {0, 1, 2, 2}};

static uint64_t restored_disk, restored_groups; /* by all lives: one may happen to have none */

static void run_over(const struct srig_layout *layout, const char *name,
                     const struct rig_shape *shape, const char *config, const char *disk, bool calm,
                     bool faults, uint64_t seed)
{
    uint32_t steps = layout != NULL ? steps_wanted() / 2 : steps_wanted();
    struct kvt_session_mgr_opts opts = {
        .window_tokens = 96, .tokens_max = TOKENS_MAX, .sessions_max = SESSIONS, .first_page = 2};
    struct model *m = calloc(1, sizeof(*m));

    assert_non_null(m);
    m->rng.state = seed;
    m->calm = calm;
    m->alone = true;
    want_faults = faults;
    if (layout != NULL)
        srig_open_groups(&m->s, layout, shape, config, disk, &opts);
    else
        srig_open(&m->s, shape, config, disk, &opts);
    for (uint32_t step = 0; step < steps; step++) {
        op_any(m, step);
        srig_check(&m->s);
    }
    for (uint32_t i = 0; i < SESSIONS; i++)
        op_close(m, i);
    if (faulty != NULL)
        fault_io_clear(faulty);
    srig_settle(&m->s);
    printf("           %-10s %llu resumed, %llu tokens restored, %llu computed, %llu verified, "
           "%llu refused, %llu cut off\n",
           name, (unsigned long long)m->resumed, (unsigned long long)m->restored,
           (unsigned long long)m->computed, (unsigned long long)m->verified,
           (unsigned long long)m->refused, (unsigned long long)m->cut);
    assert_true(m->resumed > steps / 50);
    assert_true(m->restored > 0 || layout != NULL || disk != NULL);
    restored_disk += layout == NULL && disk != NULL ? m->restored : 0;
    restored_groups += layout != NULL ? m->restored : 0;
    srig_free(&m->s);
    faulty = NULL;
    free(m);
}

static void run(const char *name, uint32_t pages, const char *config, const char *disk, bool calm,
                bool faults, uint64_t seed)
{
    struct rig_shape shape = rig_shape_small(pages);
    run_over(NULL, name, &shape, config, disk, calm, faults, seed);
}

static void run_groups(const struct srig_layout *layout, uint32_t layers, const char *name,
                       uint32_t pages, const char *config, const char *disk, bool calm, bool faults,
                       uint64_t seed)
{
    struct rig_shape shape = rig_shape_small(pages);
    shape.layers = layers;
    run_over(layout, name, &shape, config, disk, calm, faults, seed);
}

static void test_calm(void **state)
{
    (void)state;
    run("calm", 140, "dram=32MiB,level=kv4", NULL, true, false, rig_seed());
}

static void test_calm_on_disk(void **state)
{
    (void)state;
    run("disk", 100, "dram=2MiB,level=kv4", "256MiB", false, false, rig_seed() + 1);
}

static void test_tight(void **state)
{
    (void)state;
    run("tight", 60, "dram=1MiB,level=kv4", "16MiB", false, false, rig_seed() + 2);
}

static void test_faults(void **state)
{
    (void)state;
    run("faults", 80, "dram=1MiB,level=kv4", "64MiB", false, true, rig_seed() + 3);
    assert_true(restored_disk > 0);
}

static void test_groups_calm(void **state)
{
    (void)state;
    run_groups(&mixed, 3, "calm", 140, "dram=64MiB,level=kv4", NULL, true, false, rig_seed() + 4);
}

static void test_groups_tight(void **state)
{
    (void)state;
    run_groups(&mixed, 3, "tight", 56, "dram=2MiB,level=kv4", "32MiB", false, false,
               rig_seed() + 5);
}

static void test_groups_full_twice(void **state)
{
    (void)state;
    run_groups(&full_twice, 4, "full twice", 60, "dram=2MiB,level=kv4", "64MiB", false, false,
               rig_seed() + 6);
}

static void test_groups_windows_only(void **state)
{
    (void)state;
    run_groups(&windows_only, 2, "windows", 60, "dram=2MiB,level=kv4", "64MiB", false, false,
               rig_seed() + 7);
}

static void test_groups_faults(void **state)
{
    (void)state;
    run_groups(&mixed, 3, "faults", 80, "dram=2MiB,level=kv4", "64MiB", false, true,
               rig_seed() + 8);
    assert_true(restored_groups > 0);
}

/* ---- several threads ----------------------------------------------------------------------- */

/* One engine thread of several on one manager: sessions of its own, which share prefixes with those
 * of the others; the judge of bytes is its own, too. */
struct storm {
    pthread_t thread;
    struct model m;
    uint32_t steps;
};

static void *storm_main(void *arg)
{
    struct storm *storm = arg;
    struct model *m = &storm->m;
    for (uint32_t step = 0; step < storm->steps; step++) {
        uint32_t i = roll(m, 3), dice = roll(m, 100);
        if (dice < 15)
            op_open(m, i);
        else if (dice < 50)
            op_resume(m, i);
        else if (dice < 65)
            op_append(m, i);
        else if (dice < 90)
            op_idle(m, i);
        else if (dice < 94)
            op_late(m, i);
        else if (dice < 97)
            op_close(m, i);
        else
            assert_true(kvt_session_mgr_work(m->s.mgr, (int64_t)roll(m, 300000)) >= 0);
        if (is_active(m, i) && roll(m, 3)) /* or its pages starve the others */
            op_idle(m, i);
    }
    for (uint32_t i = 0; i < 3; i++)
        op_close(m, i);
    return NULL;
}

static void judge_init(struct srig *mine, const struct srig *shared, const struct rig_shape *shape)
{
    *mine = *shared;
    srig_oracle_open(mine, shape);
}

static void storm_over(const struct srig_layout *layout, uint32_t layers)
{
    enum { THREADS = 4 };
    struct rig_shape shape = rig_shape_small(80);
    struct kvt_session_mgr_opts opts = {
        .window_tokens = 96, .tokens_max = TOKENS_MAX, .first_page = 2};
    struct storm *storms = calloc(THREADS, sizeof(*storms));
    struct srig s;
    uint64_t resumed = 0, restored = 0, seed = rig_seed();

    assert_non_null(storms);
    want_faults = false;
    shape.layers = layers;
    if (layout != NULL)
        srig_open_groups(&s, layout, &shape, "dram=4MiB,level=kv4,threads=2", "64MiB", &opts);
    else
        srig_open(&s, &shape, "dram=2MiB,level=kv4,threads=2", "64MiB", &opts);
    for (uint32_t i = 0; i < THREADS; i++) {
        judge_init(&storms[i].m.s, &s, &shape);
        storms[i].m.rng.state = seed + 10 + i;
        storms[i].steps = steps_wanted() / 3;
        assert_int_equal(pthread_create(&storms[i].thread, NULL, storm_main, &storms[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(storms[i].thread, NULL), 0);
        resumed += storms[i].m.resumed;
        restored += storms[i].m.restored;
        srig_oracle_free(&storms[i].m.s);
    }
    srig_settle(&s);
    assert_int_equal(srig_stats(&s).sessions, 0);
    printf("           %u threads: %llu resumed, %llu tokens restored\n", (unsigned)THREADS,
           (unsigned long long)resumed, (unsigned long long)restored);
    assert_true(resumed > steps_wanted() / 20);
    srig_free(&s);
    free(storms);
}

static void test_storm(void **state)
{
    (void)state;
    storm_over(NULL, 1);
}

static void test_groups_storm(void **state)
{
    (void)state;
    storm_over(&mixed, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_calm),
        cmocka_unit_test(test_calm_on_disk),
        cmocka_unit_test(test_tight),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_groups_calm),
        cmocka_unit_test(test_groups_tight),
        cmocka_unit_test(test_groups_full_twice),
        cmocka_unit_test(test_groups_windows_only),
        cmocka_unit_test(test_groups_faults),
        cmocka_unit_test(test_storm),
        cmocka_unit_test(test_groups_storm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
