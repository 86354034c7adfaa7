/* Goal: the registry of sessions keeps its rules (session_internal.h): nodes by hash, lives, pages,
 *       the list by last use; and kvt_session_mgr_check() finds each breach of them.
 * Method: its functions are called directly on a manager without sessions; then a manager with
 *         sessions is damaged in one place after the other, the check must name the fault, and be
 *         content again when it is undone. Random operations beside plain arrays; seed printed.
 */
#include "support/session_rig.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "client/session_internal.h"

static struct srig s;
static struct srig_session a, b;

static int tear_down(void **state)
{
    (void)state;
    srig_session_free(&a);
    srig_session_free(&b);
    if (s.mgr != NULL)
        srig_free(&s);
    return 0;
}

static struct kvt_session_mgr *open_mgr(uint32_t pages, uint32_t blocks_max)
{
    struct rig_shape shape = rig_shape_small(pages);
    struct kvt_session_mgr_opts opts = {
        .window_tokens = 64, .tokens_max = 1024, .blocks_max = blocks_max};
    srig_open(&s, &shape, "dram=8MiB,level=kv4", NULL, &opts);
    return s.mgr;
}

static const uint8_t *hash_of(uint32_t number, uint8_t hash[KVT_HASH_BYTES_MAX])
{
    struct kvt_rng rng = {.state = number};
    uint64_t words[4];
    for (int i = 0; i < 4; i++)
        words[i] = kvt_rng_next(&rng);
    memcpy(hash, words, sizeof(words));
    return hash;
}

static void nodes_are_found_by_their_hash(void **state)
{
    struct kvt_session_mgr *mgr = open_mgr(16, 300);
    uint8_t hash[KVT_HASH_BYTES_MAX];
    uint32_t nodes[300];
    (void)state;
    for (uint32_t i = 0; i < 300; i++) {
        assert_int_equal(kvt_snode_room(mgr), 300 - i);
        assert_int_equal(kvt_snode_find(mgr, hash_of(i, hash)), KVT_NONE);
        nodes[i] = kvt_snode_add(mgr, hash, KVT_NONE, 0, KVT_NONE);
        assert_true(nodes[i] != KVT_NONE);
        kvt_snode_at(mgr, nodes[i])->refs = 1;
    }
    assert_int_equal(kvt_snode_add(mgr, hash_of(300, hash), KVT_NONE, 0, KVT_NONE), KVT_NONE);
    for (uint32_t i = 0; i < 300; i++)
        assert_int_equal(kvt_snode_find(mgr, hash_of(i, hash)), nodes[i]);
    for (uint32_t i = 0; i < 300; i += 2) { /* every other one goes; the rest is still found */
        kvt_snode_at(mgr, nodes[i])->refs = 0;
        kvt_snode_settle(mgr, nodes[i]);
    }
    for (uint32_t i = 0; i < 300; i++)
        assert_int_equal(kvt_snode_find(mgr, hash_of(i, hash)), i % 2 ? nodes[i] : KVT_NONE);
    assert_int_equal(kvt_snode_room(mgr), 150);
    assert_true(kvt_snode_add(mgr, hash_of(300, hash), KVT_NONE, 0, KVT_NONE) != KVT_NONE);
    kvt_snode_settle(mgr, kvt_snode_find(mgr, hash));
    for (uint32_t i = 1; i < 300; i += 2) {
        kvt_snode_at(mgr, nodes[i])->refs = 0;
        kvt_snode_settle(mgr, nodes[i]);
    }
    assert_int_equal(kvt_snode_room(mgr), 300);
    srig_check(&s);
}

static void a_node_lives_as_long_as_it_is_needed(void **state)
{
    struct kvt_session_mgr *mgr = open_mgr(16, 64);
    uint8_t hash[KVT_HASH_BYTES_MAX];
    uint32_t chain[4];
    (void)state;
    for (uint32_t i = 0; i < 4; i++)
        chain[i] = kvt_snode_add(mgr, hash_of(i, hash), i ? chain[i - 1] : KVT_NONE, i, KVT_NONE);
    kvt_snode_settle(mgr, chain[0]); /* has a child */
    assert_int_equal(mgr->stats.blocks, 4);
    kvt_scell_set_page(mgr, chain[3], kvt_spage_take(&mgr->groups[0]));
    kvt_snode_settle(mgr, chain[3]); /* has a page */
    assert_int_equal(mgr->stats.blocks, 4);
    kvt_snode_at(mgr, chain[1])->refs = 1;
    kvt_spage_put(&mgr->groups[0], kvt_scell_take_page(mgr, chain[3]));
    kvt_scell_at(mgr, chain[3], 0)->busy = true;
    kvt_snode_settle(mgr, chain[3]); /* a request needs it */
    assert_int_equal(mgr->stats.blocks, 4);
    kvt_scell_at(mgr, chain[3], 0)->busy = false;
    kvt_scell_at(mgr, chain[3], 0)->queued = true;
    kvt_snode_settle(mgr, chain[3]); /* the cooling queue needs it */
    assert_int_equal(mgr->stats.blocks, 4);
    kvt_scell_at(mgr, chain[3], 0)->queued = false;
    kvt_snode_settle(mgr, chain[3]); /* goes, and its parent with it, as far as nobody holds one */
    assert_int_equal(mgr->stats.blocks, 2);
    assert_int_equal(kvt_snode_at(mgr, chain[1])->children, 0);
    kvt_snode_at(mgr, chain[1])->refs = 0;
    kvt_snode_settle(mgr, chain[1]);
    assert_int_equal(mgr->stats.blocks, 0);
    srig_check(&s);
}

/* Random use beside a plain array of time stamps: the oldest is the one used longest ago. */
static void the_list_is_in_order_of_use(void **state)
{
    enum { N = 12 };
    struct kvt_session_mgr *mgr = open_mgr(N + 1, 64);
    struct kvt_rng rng = {.state = rig_seed()};
    uint8_t hash[KVT_HASH_BYTES_MAX];
    uint32_t nodes[N], used[N] = {0}; /* 0: not in the list */
    (void)state;
    for (uint32_t i = 0; i < N; i++) {
        nodes[i] = kvt_snode_add(mgr, hash_of(i, hash), KVT_NONE, 0, KVT_NONE);
        kvt_scell_at(mgr, nodes[i], 0)->queued = true; /* keeps it */
    }
    for (uint32_t step = 1; step < 4000; step++) {
        uint32_t i = (uint32_t)kvt_rng_below(&rng, N), dice = (uint32_t)kvt_rng_below(&rng, 5);
        struct kvt_scell *cell = kvt_scell_at(mgr, nodes[i], 0);
        if (dice == 0 && cell->page == KVT_NONE)
            kvt_scell_set_page(mgr, nodes[i], kvt_spage_take(&mgr->groups[0]));
        else if (dice == 1 && cell->page != KVT_NONE)
            kvt_spage_put(&mgr->groups[0], kvt_scell_take_page(mgr, nodes[i]));
        else if (dice == 2)
            cell->pinned ^= 1;
        kvt_scell_lru(mgr, nodes[i]);
        used[i] = cell->page != KVT_NONE && cell->pinned == 0 ? step : 0;
        uint32_t oldest = KVT_NONE, count = 0;
        for (uint32_t j = 0; j < N; j++) {
            count += used[j] != 0;
            if (used[j] != 0 && (oldest == KVT_NONE || used[j] < used[oldest]))
                oldest = j;
        }
        assert_int_equal(mgr->groups[0].lru_count, count);
        assert_int_equal(mgr->groups[0].oldest, oldest == KVT_NONE ? KVT_NONE : nodes[oldest]);
        uint32_t last = 0;
        for (uint32_t at = mgr->groups[0].oldest; at != KVT_NONE; at = mgr->cells[at].newer)
            for (uint32_t j = 0; j < N; j++)
                if (nodes[j] == at) {
                    assert_true(used[j] > last);
                    last = used[j];
                }
    }
    for (uint32_t i = 0; i < N; i++) {
        struct kvt_scell *cell = kvt_scell_at(mgr, nodes[i], 0);
        cell->pinned = 0;
        cell->queued = false;
        if (cell->page != KVT_NONE)
            kvt_spage_put(&mgr->groups[0], kvt_scell_take_page(mgr, nodes[i]));
        kvt_snode_settle(mgr, nodes[i]);
    }
    srig_check(&s);
    assert_int_equal(mgr->groups[0].pages_free, N);
}

/* ---- the check ----------------------------------------------------------------------------- */

static void must_be_found(const char *what)
{
    char why[128] = "";
    assert_int_equal(kvt_session_mgr_check(s.mgr, why, sizeof(why)), KVT_E_CORRUPT);
    if (strstr(why, what) == NULL)
        fail_msg("the check says \"%s\", not \"%s\"", why, what);
}

#define BREACH(place, wrong, what)     \
    do {                               \
        __typeof__(place) was = place; \
        place = (wrong);               \
        must_be_found(what);           \
        place = was;                   \
        srig_check(&s);                \
    } while (0)

static void start(struct srig_session *x, uint32_t first, uint32_t n)
{
    srig_session_open(&s, x, 1024, 0);
    srig_tokens(x, first, n);
    srig_turn(&s, x, NULL);
}

static void the_check_finds_what_is_wrong(void **state)
{
    struct kvt_session_mgr *mgr = open_mgr(40, 0);
    (void)state;
    start(&a, 1, 200); /* idle, with a tail */
    start(&b, 1, 100); /* active, shares six blocks */
    assert_int_equal(kvt_session_idle(mgr, a.id), 0);
    srig_settle(&s);
    struct kvt_session *idle = &mgr->sessions[(a.id & UINT32_MAX) - 1];
    struct kvt_session *active = &mgr->sessions[(b.id & UINT32_MAX) - 1];
    struct kvt_snode *shared = kvt_snode_at(mgr, idle->node[3]);
    struct kvt_scell *cell = kvt_scell_at(mgr, idle->node[3], 0);
    struct kvt_scell *last = kvt_scell_at(mgr, idle->node[11], 0);
    BREACH(shared->refs, 3, "counts");
    BREACH(cell->pinned, 2, "counts");
    BREACH(cell->holders, 1, "counts");
    BREACH(shared->windows, shared->windows + 1, "counts");
    BREACH(shared->children, 2, "children");
    BREACH(cell->resident, 0, "children");
    BREACH(shared->depth, 7, "another block");
    BREACH(shared->hash[5], (uint8_t)(shared->hash[5] + 1), "another block");
    BREACH(shared->parent, KVT_NONE, "another block");
    BREACH(cell->in_lru, true, "list by last use");
    BREACH(last->in_lru, false, "list by last use");
    BREACH(mgr->groups[0].lru_count, mgr->groups[0].lru_count + 1, "miscounted");
    BREACH(cell->page, last->page, "a page");
    BREACH(active->page[6], active->page[0], "two owners");
    BREACH(mgr->groups[0].pages_free, mgr->groups[0].pages_free - 1, "lost");
    BREACH(mgr->groups[0].scratch_free, 0, "lost");
    BREACH(active->filled, active->tokens + 1, "more than it has");
    BREACH(idle->blocks, 13, "more than it has");
    BREACH(idle->tail, idle->node[2], "tail");
    BREACH(kvt_snode_at(mgr, idle->node[0])->beyond, false, "unnoticed");
    BREACH(idle->window_from, idle->window_from - 1, "counts");
}

/* A parent that would be evicted before its child. */
static void the_check_finds_a_wrong_order(void **state)
{
    struct kvt_session_mgr *mgr = open_mgr(40, 0);
    (void)state;
    start(&a, 1, 200);
    assert_int_equal(kvt_session_idle(mgr, a.id), 0);
    srig_settle(&s);
    const struct kvt_session *idle = &mgr->sessions[(a.id & UINT32_MAX) - 1];
    kvt_scell_lru(mgr, idle->node[5]); /* used alone: now it is newer than its ancestors */
    must_be_found("older than its child");
    for (uint32_t i = 5; i-- > 0;)
        kvt_scell_lru(mgr, idle->node[i]);
    srig_check(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(nodes_are_found_by_their_hash, tear_down),
        cmocka_unit_test_teardown(a_node_lives_as_long_as_it_is_needed, tear_down),
        cmocka_unit_test_teardown(the_list_is_in_order_of_use, tear_down),
        cmocka_unit_test_teardown(the_check_finds_what_is_wrong, tear_down),
        cmocka_unit_test_teardown(the_check_finds_a_wrong_order, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
