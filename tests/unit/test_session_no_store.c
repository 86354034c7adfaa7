/* Sessions whose blocks are not to be stored.
 *
 * Goal:   no byte of them reaches DRAM or disk: not when they go idle, on flush, under pressure or
 *         at close; they share pages and load what others have stored; what an unmarked session
 *         holds as well is stored for that one, and no block behind it.
 * Method: the engine of session_rig, whose every page can be checked; a disk's files are searched
 *         for the record magic; lookups and counters say what the store has.
 */
#include "support/session_rig.h"

#include <string.h>

#include "base/checked.h"
#include "client/session_internal.h"

#define UNIT 16u

static struct srig s;
static struct srig_session a, b;

static int tear_down(void **state)
{
    (void)state;
    srig_session_free(&a);
    srig_session_free(&b);
    if (s.mgr != NULL)
        srig_free(&s);
    memset(&s, 0, sizeof(s));
    return 0;
}

static void open_with(uint32_t pages)
{
    struct rig_shape shape = rig_shape_small(pages);
    struct kvt_session_mgr_opts opts = {.window_tokens = 64, .tokens_max = 2048};
    srig_open(&s, &shape, "dram=8MiB,level=kv4", "64MiB", &opts);
}

static void open_session(struct srig_session *x, bool stored)
{
    srig_session_open(&s, x, 1024, 0);
    if (!stored)
        assert_int_equal(kvt_session_no_store(s.mgr, x->id), 0);
}

/* Tokens first, first + 1, ... at the end; computed, and idle. Returns what was computed. */
static uint32_t turn(struct srig_session *x, uint32_t first, uint32_t n)
{
    struct kvt_session_plan plan;
    srig_tokens(x, first, n);
    srig_turn(&s, x, &plan);
    assert_int_equal(kvt_session_idle(s.mgr, x->id), 0);
    srig_settle(&s);
    srig_check(&s);
    return plan.recompute;
}

static uint64_t stored(void)
{
    return rig_stat(&s.rig, "client.store_blocks");
}

/* How many full blocks of the session the store has. */
static long in_store(const struct srig_session *x)
{
    struct kvt_key keys[64];
    const struct kvt_session *session = &s.mgr->sessions[(x->id & UINT32_MAX) - 1];
    uint32_t n = x->tokens / UNIT;
    const struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .flags = KVT_LOOKUP_PROBE};
    assert_true(n <= KVT_ARRAY_LEN(keys));
    for (uint32_t i = 0; i < n; i++)
        keys[i] = kvt_session_key(s.mgr, 0, session->hash[i]);
    return kvt_lookup(s.rig.ns, keys, n, &opts, NULL);
}

static void nothing_of_it_is_stored(void **state)
{
    (void)state;
    open_with(96);
    open_session(&a, false);
    assert_int_equal(turn(&a, 1, 600), 600); /* beyond the window: it would cool, too */
    assert_int_equal(kvt_session_mgr_flush(s.mgr), 0);
    assert_int_equal(in_store(&a), 0);
    assert_int_equal(stored(), 0);
    /* in L0 it is there */
    assert_int_equal(turn(&a, 900, 8), 8);
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    kvt_session_mgr_close(s.mgr);
    assert_int_equal(kvt_flush(s.rig.cache), 0);
    assert_int_equal(stored(), 0);
    assert_int_equal(rig_stat(&s.rig, "disk.written_blocks"), 0);
    assert_int_equal(rig_stat(&s.rig, "dram.blocks"), 0);
    srig_mgr_open(&s);
}

static void under_pressure_its_pages_go(void **state)
{
    (void)state;
    open_with(40); /* 39 pages of use: a takes 30 */
    open_session(&a, false);
    open_session(&b, true);
    (void)turn(&a, 1, 480);
    (void)turn(&b, 5000, 480);
    assert_int_equal(in_store(&a), 0);
    assert_true(srig_stats(&s).evicted_unsaved >= 20);
    assert_int_equal(srig_stats(&s).refused_limit, 0);
    assert_int_equal(in_store(&b), 30);
    /* what went is computed again, and right */
    assert_true(turn(&a, 900, 16) > 16);
    assert_int_equal(in_store(&a), 0);
}

static void what_others_hold_is_theirs(void **state)
{
    (void)state;
    open_with(128);
    open_session(&a, false);
    (void)turn(&a, 1, 320);
    assert_int_equal(stored(), 0);
    /* the same tokens for 10 blocks, then others: shared in L0, and stored */
    open_session(&b, true);
    srig_tokens(&b, 1, 160);
    assert_int_equal(turn(&b, 7000, 160), 160);
    assert_int_equal(in_store(&b), 20);
    assert_int_equal(in_store(&a), 10);
    assert_int_equal(stored(), 20);
    /* and the other way round: it loads what another one has stored */
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    assert_int_equal(kvt_session_close(s.mgr, b.id), 0);
    kvt_session_mgr_close(s.mgr);
    srig_mgr_open(&s);
    srig_session_free(&a);
    open_session(&a, false);
    srig_tokens(&a, 1, 160);
    assert_int_equal(turn(&a, 7000, 200), 200 - 160);
    assert_int_equal(in_store(&a), 20);
    assert_int_equal(stored(), 20);
}

/* A node of its own that an unmarked session comes to hold later. */
static void a_later_session_has_it_stored(void **state)
{
    (void)state;
    open_with(128);
    open_session(&a, false);
    (void)turn(&a, 1, 320);
    open_session(&b, true);
    assert_int_equal(turn(&b, 1, 321), 1);
    assert_int_equal(in_store(&a), 20);
    /* what the marked one adds behind it is not */
    assert_int_equal(turn(&a, 5000, 160), 160);
    assert_int_equal(in_store(&a), 20);
}

static void only_before_the_first_token(void **state)
{
    (void)state;
    open_with(64);
    open_session(&a, true);
    assert_int_equal(kvt_session_no_store(s.mgr, a.id + 1), KVT_E_NO_SESSION);
    assert_int_equal(kvt_session_no_store(NULL, a.id), KVT_E_INVAL);
    assert_int_equal(kvt_session_no_store(s.mgr, a.id), 0);
    assert_int_equal(kvt_session_no_store(s.mgr, a.id), 0);
    open_session(&b, true);
    (void)turn(&b, 1, 40);
    assert_int_equal(kvt_session_no_store(s.mgr, b.id), KVT_E_STATE);
    /* the next one in the same place is an ordinary one */
    kvt_session_id old = a.id;
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    assert_int_equal(kvt_session_no_store(s.mgr, old), KVT_E_NO_SESSION);
    srig_session_free(&a);
    open_session(&a, true);
    (void)turn(&a, 3000, 160);
    assert_int_equal(in_store(&a), 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(nothing_of_it_is_stored, tear_down),
        cmocka_unit_test_teardown(under_pressure_its_pages_go, tear_down),
        cmocka_unit_test_teardown(what_others_hold_is_theirs, tear_down),
        cmocka_unit_test_teardown(a_later_session_has_it_stored, tear_down),
        cmocka_unit_test_teardown(only_before_the_first_token, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
