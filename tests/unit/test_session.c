/* Goal: the session manager does what session.h says: pages for tokens, sharing, idle and resume
 *       over all tiers, the window, cooling, pressure, and a clear code for every wrong call.
 * Method: small caches whose "engine" makes KV from tokens (support/session_rig.h), so that every
 *         page that comes back is compared with what it must be. After each step the manager's own
 *         invariants are checked. The seed is the tokens: nothing is random.
 */
#include "support/session_rig.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/session_internal.h"

#define UNIT 16u

static struct srig s;
static struct srig_session a, b, c;

static int tear_down(void **state)
{
    (void)state;
    srig_session_free(&a);
    srig_session_free(&b);
    srig_session_free(&c);
    if (s.mgr != NULL && s.rig.cache->worker_count == 0) { /* a test has failed in the middle */
        s.rig.cache->stop_workers = false;
        assert_int_equal(kvt_workers_start(s.rig.cache), 0);
    }
    if (s.mgr != NULL)
        srig_free(&s);
    return 0;
}

static void open_with(uint32_t pages, const char *config, const char *disk, uint32_t window)
{
    struct rig_shape shape = rig_shape_small(pages);
    struct kvt_session_mgr_opts opts = {.window_tokens = window, .tokens_max = 2048};
    srig_open(&s, &shape, config, disk, &opts);
}

/* Begin a sequence of n tokens and fill it. */
static void start(struct srig_session *x, uint32_t first, uint32_t n)
{
    srig_session_open(&s, x, 1024, 0);
    srig_tokens(x, first, n);
    srig_turn(&s, x, NULL);
    srig_check(&s);
}

static void go_idle(struct srig_session *x)
{
    assert_int_equal(kvt_session_idle(s.mgr, x->id), 0);
    srig_check(&s);
}

/* Take every page that may be taken, by a session that is closed at once and stores nothing. */
static void squeeze(void)
{
    struct srig_session x;
    uint32_t pages = (uint32_t)srig_stats(&s).pages, used = 0;
    srig_settle(&s);
    for (uint32_t at = s.mgr->groups[0].oldest; at != KVT_NONE; at = s.mgr->cells[at].newer)
        used++;
    uint32_t want = (uint32_t)s.mgr->groups[0].pages_free + used;
    assert_true(want <= pages);
    srig_session_open(&s, &x, want * UNIT, 77);
    assert_int_equal(kvt_session_resume(s.mgr, x.id, NULL, 0, NULL, NULL), 0);
    srig_tokens(&x, 1000000, want * UNIT);
    int rc = 0;
    do {
        rc = kvt_session_append(s.mgr, x.id, x.token, x.tokens);
        if (rc == -EAGAIN)
            assert_true(kvt_session_mgr_work(s.mgr, 1000000000) >= 0);
    } while (rc == -EAGAIN);
    assert_int_equal(rc, 0);
    assert_int_equal(kvt_session_close(s.mgr, x.id), 0); /* not filled: nothing is kept */
    srig_session_free(&x);
    srig_settle(&s);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void a_turn_and_another_one(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(32, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 100);
    struct kvt_session_info info = srig_info(&s, &a);
    assert_int_equal(info.state, KVT_SESSION_ACTIVE);
    assert_int_equal(info.tokens, 100);
    assert_int_equal(info.filled, 100);
    assert_int_equal(info.blocks, 6);
    srig_tokens(&a, 500, 10); /* decoding: token by token */
    assert_int_equal(srig_append(&s, &a), 0);
    go_idle(&a);
    info = srig_info(&s, &a);
    assert_int_equal(info.state, KVT_SESSION_IDLE);
    assert_int_equal(info.tokens, 110);
    /* nothing was evicted: all of it is still there, the partial block too */
    srig_tokens(&a, 600, 30);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.in_l0, 110);
    assert_int_equal(plan.recompute, 30);
    srig_fill(&s, &a, 110, 140);
    assert_int_equal(srig_verify(&s, &a, 140, NULL), SRIG_EXACT);
    go_idle(&a);
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    srig_settle(&s);
    assert_int_equal(srig_stats(&s).sessions, 0);
    assert_int_equal(srig_stats(&s).evicted, 0);
}

/* Pages taken away come back from the store: the first block exact, the window at kv8, what had
 * left it at kv4; the partial block has no record and is computed again. */
static void resume_from_records(void **state)
{
    struct kvt_session_plan plan;
    uint8_t kinds[16];
    (void)state;
    open_with(32, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 200); /* 12 blocks and a half; the window is the last 64 tokens: from block 8 on */
    go_idle(&a);
    squeeze();
    assert_int_equal(srig_stats(&s).tails_lost, 1);
    assert_int_equal(srig_stats(&s).evicted_unsaved, 0);
    for (uint32_t i = 0; i < 12; i++) {
        struct kvt_session_block block = srig_block(&s, &a, i);
        assert_int_equal(block.page, KVT_SESSION_NO_PAGE);
        assert_int_equal(block.tier, KVT_TIER_DRAM);
        assert_int_equal(block.record,
                         i < 8 ? KVT_SESSION_RECORD_FINAL : KVT_SESSION_RECORD_WINDOW);
    }
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 192);
    assert_int_equal(plan.in_l0, 0);
    assert_int_equal(plan.recompute, 8);
    assert_int_equal(plan.reason, 0);
    (void)srig_verify(&s, &a, 192, kinds);
    for (uint32_t i = 0; i < 12; i++)
        assert_int_equal(kinds[i], i == 0 ? SRIG_EXACT : i < 8 ? SRIG_KV4 : SRIG_KV8);
    srig_fill(&s, &a, 192, 200);
    /* the sequence grows: blocks 8 to 10 leave the window and cool from their kv8 pages, 11 and the
     * new ones do not */
    srig_tokens(&a, 900, 48);
    assert_int_equal(srig_append(&s, &a), 0);
    go_idle(&a);
    squeeze();
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 240);
    (void)srig_verify(&s, &a, 240, kinds);
    for (uint32_t i = 8; i < 15; i++)
        assert_int_equal(kinds[i], i < 11 ? SRIG_KV8_KV4 : SRIG_KV8);
    go_idle(&a);
}

static void resume_from_disk_and_after_a_restart(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(32, "dram=8MiB,level=kv4", "64MiB", 64);
    start(&a, 1, 200);
    go_idle(&a);
    assert_int_equal(kvt_session_mgr_flush(s.mgr), 0);
    kvt_session_mgr_close(s.mgr);
    rig_reopen(&s.rig);
    srig_mgr_open(&s);
    srig_session_free(&a);
    srig_session_open(&s, &a, 1024, 0);
    srig_tokens(&a, 1, 200);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_disk, 192);
    assert_int_equal(plan.recompute, 8);
    srig_fill(&s, &a, 192, 200);
    go_idle(&a);
    srig_settle(&s);
    assert_int_equal(srig_stats(&s).store_failed, 0);
}

static void whole_blocks_leave_a_token_to_compute(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(32, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 64);
    start(&b, 1, 64); /* the same prompt: its last block is computed by b itself */
    assert_int_equal(srig_stats(&s).shared, 3);
    assert_int_equal(srig_stats(&s).duplicates, 1);
    go_idle(&a);
    go_idle(&b); /* the second copy is given back */
    assert_int_equal(srig_block(&s, &a, 3).page, srig_block(&s, &b, 3).page);
    assert_int_equal(srig_stats(&s).pages - srig_stats(&s).pages_free, 4);
    /* without new tokens nothing has to be computed */
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.recompute, 0);
    assert_int_equal(plan.in_l0, 64);
}

/* ---- sharing ------------------------------------------------------------------------------- */

static void prefixes_are_shared_and_counted_once(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 96);
    srig_session_open(&s, &b, 1024, 0);
    srig_tokens(&b, 1, 80); /* five blocks of a's, then its own way */
    srig_tokens(&b, 700, 40);
    srig_turn(&s, &b, &plan);
    assert_int_equal(plan.in_l0, 80);
    assert_int_equal(srig_stats(&s).pages - srig_stats(&s).pages_free, 6 + 3);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(srig_block(&s, &a, i).page, srig_block(&s, &b, i).page);
        assert_int_equal(srig_block(&s, &a, i).sessions, 2);
    }
    /* another salt shares nothing */
    srig_session_open(&s, &c, 1024, 5);
    srig_tokens(&c, 1, 80);
    srig_turn(&s, &c, &plan);
    assert_int_equal(plan.in_l0, 0);
    assert_int_equal(plan.recompute, 80);
    /* b stays active: squeezing takes nothing of what it shares with a */
    go_idle(&c);
    go_idle(&a);
    squeeze();
    for (uint32_t i = 0; i < 5; i++)
        assert_true(srig_block(&s, &a, i).page != KVT_SESSION_NO_PAGE);
    assert_int_equal(srig_block(&s, &a, 5).page, KVT_SESSION_NO_PAGE);
    (void)srig_verify(&s, &b, 120, NULL);
    assert_int_equal(kvt_session_close(s.mgr, b.id), 0);
    assert_int_equal(srig_block(&s, &a, 0).sessions, 1);
    srig_check(&s);
}

/* A block in the window of one session is not cooled for another that has gone past it; when the
 * first one is closed, it is, from its record: nobody has it in L0. */
static void the_last_window_decides(void **state)
{
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 80);
    srig_session_open(&s, &b, 1024, 0);
    srig_tokens(&b, 1, 80);
    srig_tokens(&b, 700, 160); /* a's blocks 1.. are in a's window, and far behind in b's */
    srig_turn(&s, &b, NULL);
    go_idle(&a);
    go_idle(&b);
    squeeze();
    assert_int_equal(srig_block(&s, &b, 0).record, KVT_SESSION_RECORD_FINAL);
    for (uint32_t i = 1; i < 5; i++)
        assert_int_equal(srig_block(&s, &b, i).record, KVT_SESSION_RECORD_WINDOW);
    for (uint32_t i = 5; i < 11; i++)
        assert_int_equal(srig_block(&s, &b, i).record, KVT_SESSION_RECORD_FINAL);
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    srig_settle(&s);
    for (uint32_t i = 1; i < 5; i++)
        assert_int_equal(srig_block(&s, &b, i).record, KVT_SESSION_RECORD_FINAL);
    assert_int_equal(srig_stats(&s).cooled_record, 4);
    assert_int_equal(rig_stat(&s.rig, "store.cooled"), 4);
    assert_int_equal(srig_stats(&s).store_failed, 0); /* parents went first */
    uint8_t kinds[15];
    assert_int_equal(srig_resume(&s, &b, NULL), 0);
    (void)srig_verify(&s, &b, 240, kinds);
    for (uint32_t i = 1; i < 11; i++)
        assert_int_equal(kinds[i], i < 5 ? SRIG_KV8_KV4 : SRIG_KV4);
}

/* ---- pressure ------------------------------------------------------------------------------ */

static void the_least_recently_used_goes_first_leaf_first(void **state)
{
    (void)state;
    open_with(21, "dram=8MiB,level=kv4", NULL, 64); /* one of them for scratch */
    start(&a, 1, 128);
    go_idle(&a);
    start(&b, 5000, 128);
    go_idle(&b);
    srig_settle(&s);
    start(&c, 9000, 128); /* four pages are free, four are taken from a's end */
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(srig_block(&s, &a, i).page == KVT_SESSION_NO_PAGE, i >= 4);
        assert_true(srig_block(&s, &b, i).page != KVT_SESSION_NO_PAGE);
    }
    assert_int_equal(srig_stats(&s).evicted, 4);
    assert_int_equal(srig_stats(&s).evicted_unsaved, 0);
}

static void pages_of_active_sessions_are_never_taken(void **state)
{
    const uint32_t one = 1;
    (void)state;
    open_with(17, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 128);
    start(&b, 5000, 128);
    assert_int_equal(kvt_session_append(s.mgr, a.id, &one, 1), KVT_E_LIMIT);
    srig_session_open(&s, &c, 1024, 0);
    srig_tokens(&c, 9000, 32);
    assert_int_equal(kvt_session_resume(s.mgr, c.id, c.token, 32, NULL, NULL), KVT_E_LIMIT);
    assert_int_equal(srig_info(&s, &c).state, KVT_SESSION_IDLE);
    assert_int_equal(srig_info(&s, &c).tokens, 0);
    assert_int_equal(srig_info(&s, &a).tokens, 128);
    assert_int_equal(srig_stats(&s).refused_limit, 2);
    (void)srig_verify(&s, &a, 128, NULL);
    go_idle(&b); /* its blocks are being stored: first not yet, then there is room */
    srig_turn(&s, &c, NULL);
    (void)srig_verify(&s, &a, 128, NULL);
    srig_check(&s);
}

/* A store that takes nothing: pages are taken all the same, and computed again. */
static void without_a_store_pages_go_unsaved(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(17, "dram=8MiB,level=kv4", NULL, 64);
    kvt_enable(s.rig.cache, 0);
    start(&a, 1, 128);
    go_idle(&a);
    start(&b, 5000, 240);
    assert_true(srig_stats(&s).evicted_unsaved >= 7);
    go_idle(&b);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_true(plan.in_l0 <= 16);
    assert_int_equal(plan.from_dram + plan.from_disk, 0);
    assert_true(srig_stats(&s).store_failed > 0);
}

/* Records that have gone are a miss in the plan, and are stored again. */
static void lost_records_are_computed_and_stored_again(void **state)
{
    struct kvt_session_plan plan;
    struct kvt_key keys[12];
    uint8_t root[32];
    (void)state;
    open_with(32, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 192);
    go_idle(&a);
    squeeze();
    assert_int_equal(kvt_key_root(NULL, 0, root), 0);
    assert_int_equal(kvt_key_chain(root, a.token, 192, UNIT, NULL, 0, 0, 0, keys, 12), 12);
    assert_int_equal(kvt_purge(s.rig.ns, keys + 4, 2), 2);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 64);
    assert_int_equal(plan.recompute, 128);
    srig_fill(&s, &a, 64, 192);
    go_idle(&a);
    srig_settle(&s);
    assert_int_equal(kvt_lookup(s.rig.ns, keys, 12, NULL, NULL), 12);
}

/* The record of a block in DRAM, damaged. */
static void damage(const struct srig_session *x, uint32_t block)
{
    const struct kvt_session *session = &s.mgr->sessions[(x->id & UINT32_MAX) - 1];
    uint8_t *arena = s.rig.cache->channel.arena;
    int found = 0;
    for (uint64_t at = 0; at < s.rig.cache->channel.arena_bytes; at += 4096) {
        struct kvt_record_header *header = (struct kvt_record_header *)(void *)(arena + at);
        if (header->magic != KVT_RECORD_MAGIC ||
            memcmp(header->key.hash, session->hash[block], KVT_HASH_BYTES_MAX) != 0)
            continue;
        arena[at + sizeof(*header) + 5] ^= 16;
        found++;
    }
    assert_true(found > 0);
}

/* Blocks behind a bad one came, but the engine computes them anew: their pages are exact then. */
static void a_damaged_record_ends_the_run(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(32, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 192);
    go_idle(&a);
    squeeze();
    damage(&a, 4);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 64);
    assert_int_equal(plan.recompute, 128);
    assert_int_equal(plan.reason, KVT_E_CORRUPT);
    srig_fill(&s, &a, 64, 192);
    (void)srig_verify(&s, &a, 192, NULL); /* levels of pages, too */
    go_idle(&a);
    squeeze();
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.from_dram, 192);
}

/* While a block is being stored its page is not taken, nor are those of its ancestors. */
static void pages_being_stored_are_not_taken(void **state)
{
    (void)state;
    open_with(33, "dram=8MiB,level=kv4,threads=1", NULL, 64);
    start(&a, 1, 192); /* 12 blocks; from block 8 on they are in the window */
    go_idle(&a);
    srig_settle(&s);
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    kvt_workers_stop(s.rig.cache);
    srig_tokens(&a, 900, 48); /* blocks 8 to 10 leave the window and begin to cool */
    assert_int_equal(kvt_session_append(s.mgr, a.id, a.token + 192, 48), 0);
    assert_true(kvt_session_mgr_work(s.mgr, 0) > 0);
    go_idle(&a); /* without having filled them */
    a.tokens = 192;
    assert_int_equal(srig_stats(&s).in_flight, 1);
    srig_session_open(&s, &b, 1024, 0);
    srig_tokens(&b, 5000, 25 * UNIT); /* 20 are free; 11 may be taken, 8 to 10 later */
    assert_int_equal(kvt_session_resume(s.mgr, b.id, b.token, b.tokens, NULL, NULL), -EAGAIN);
    srig_check(&s);
    for (uint32_t i = 0; i < 12; i++)
        assert_int_equal(srig_block(&s, &a, i).page != KVT_SESSION_NO_PAGE, i < 11);
    assert_int_equal(srig_stats(&s).refused_busy, 1);
    s.rig.cache->stop_workers = false;
    assert_int_equal(kvt_workers_start(s.rig.cache), 0);
    srig_turn(&s, &b, NULL);
    go_idle(&b);
    squeeze();
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
}

static void a_deadline_shortens_the_load(void **state)
{
    struct kvt_session_plan plan = {.struct_size = sizeof(plan)};
    struct kvt_session_resume_opts late = {.struct_size = sizeof(late), .deadline_ns = 1};
    (void)state;
    open_with(32, "dram=8MiB,level=kv4", NULL, 64);
    start(&a, 1, 200);
    go_idle(&a);
    squeeze();
    assert_int_equal(kvt_session_resume(s.mgr, a.id, NULL, 0, &late, &plan), 0);
    assert_int_equal(plan.from_dram, 192);
    assert_int_equal(kvt_session_wait(s.mgr, a.id, -1), 1);
    assert_int_equal(kvt_session_get_plan(s.mgr, a.id, &plan), 0);
    assert_int_equal(plan.reason, KVT_E_DEADLINE);
    assert_int_equal(plan.recompute, 200);
    assert_int_equal(srig_stats(&s).load_short, 12);
    srig_fill(&s, &a, 0, 200);
    go_idle(&a);
    squeeze();
    assert_int_equal(srig_resume(&s, &a, &plan), 0); /* the records are as good as before */
    assert_int_equal(plan.from_dram, 192);
}

/* ---- options ------------------------------------------------------------------------------- */

static void a_raw_window_and_a_raw_level(void **state)
{
    struct rig_shape shape = rig_shape_small(32);
    struct kvt_session_mgr_opts opts = {
        .window_tokens = 64, .tokens_max = 1024, .window_level = KVT_LEVEL_RAW};
    uint8_t kinds[16];
    (void)state;
    srig_open(&s, &shape, "dram=8MiB,level=kv4", NULL, &opts);
    start(&a, 1, 192);
    go_idle(&a);
    squeeze();
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    (void)srig_verify(&s, &a, 192, kinds);
    for (uint32_t i = 0; i < 12; i++)
        assert_int_equal(kinds[i], i == 0 || i >= 8 ? SRIG_EXACT : SRIG_KV4);
    srig_tokens(&a, 900, 48); /* cooled from an exact page: one step */
    assert_int_equal(srig_append(&s, &a), 0);
    go_idle(&a);
    squeeze();
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    (void)srig_verify(&s, &a, 240, kinds);
    assert_int_equal(kinds[8], SRIG_KV4);
    go_idle(&a);
    kvt_session_mgr_close(s.mgr);
    s.opts.level = KVT_LEVEL_RAW; /* nothing to cool to */
    srig_mgr_open(&s);
    srig_session_free(&a);
    start(&a, 40000, 192);
    go_idle(&a);
    squeeze();
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    assert_int_equal(srig_verify(&s, &a, 192, NULL), SRIG_EXACT);
    assert_int_equal(rig_stat(&s.rig, "store.cooled"), 3);
}

static void a_part_of_the_pool(void **state)
{
    struct rig_shape shape = rig_shape_small(32);
    struct kvt_session_mgr_opts opts = {.first_page = 8, .page_count = 10, .tokens_max = 1024};
    uint32_t pages[16];
    (void)state;
    srig_open(&s, &shape, "dram=8MiB,level=kv4", NULL, &opts);
    assert_int_equal(srig_stats(&s).pages, 9);
    for (uint32_t i = 0; i < 32; i++)
        rig_poison(&s.rig, i, 0xa5);
    start(&a, 1, 9 * UNIT);
    assert_int_equal(kvt_session_pages(s.mgr, a.id, 0, pages, 16), 9);
    for (uint32_t i = 0; i < 9; i++)
        assert_true(pages[i] >= 8 && pages[i] < 18);
    go_idle(&a);
    squeeze();
    srig_turn(&s, &a, NULL);
    for (uint32_t i = 0; i < 32; i++)
        if (i < 8 || i >= 18)
            assert_true(rig_poisoned(&s.rig, i, 0xa5));
}

/* ---- wrong calls --------------------------------------------------------------------------- */

static void wrong_options_are_refused(void **state)
{
    struct kvt_session_mgr_opts o = {.struct_size = sizeof(o)};
    struct kvt_session_mgr *mgr = NULL;
    (void)state;
    open_with(16, "dram=8MiB", NULL, 64);
    struct kvt_ns *ns = s.rig.ns;
    struct kvt_pool *pool = s.rig.pool;
    assert_int_equal(kvt_session_mgr_open(NULL, pool, &o, &mgr), KVT_E_INVAL);
    assert_int_equal(kvt_session_mgr_open(ns, NULL, &o, &mgr), KVT_E_INVAL);
    assert_int_equal(kvt_session_mgr_open(ns, pool, &o, NULL), KVT_E_INVAL);
    o.struct_size--;
    assert_int_equal(kvt_session_mgr_open(ns, pool, &o, &mgr), KVT_E_VERSION);
#define REFUSED(field, number, code)                                      \
    do {                                                                  \
        o = (struct kvt_session_mgr_opts){.struct_size = sizeof(o)};      \
        o.field = (number);                                               \
        assert_int_equal(kvt_session_mgr_open(ns, pool, &o, &mgr), code); \
        assert_null(mgr);                                                 \
    } while (0)
    REFUSED(first_page, 16, KVT_E_INVAL);
    REFUSED(first_page, UINT32_MAX, KVT_E_INVAL);
    REFUSED(page_count, 17, KVT_E_INVAL);
    REFUSED(page_count, 1, KVT_E_INVAL); /* nothing is left beside the scratch page */
    REFUSED(scratch_pages, 16, KVT_E_INVAL);
    REFUSED(level, 7, KVT_E_INVAL);
    REFUSED(level, -1, KVT_E_INVAL);
    REFUSED(window_level, KVT_LEVEL_KV4, KVT_E_INVAL);
    REFUSED(sessions_max, UINT32_MAX, KVT_E_INVAL);
    REFUSED(tokens_max, UINT32_MAX, KVT_E_INVAL);
    REFUSED(blocks_max, UINT32_MAX, KVT_E_INVAL);
#undef REFUSED
    struct kvt_pool_desc desc = pool->desc;
    struct kvt_pool *huge = NULL;
    desc.block_count = (1u << 26) + 1; /* nobody looks whether so much is there */
    assert_int_equal(kvt_pool_register(s.rig.cache, &s.rig.layout, &desc, &huge), 0);
    assert_int_equal(kvt_session_mgr_open(ns, huge, NULL, &mgr), KVT_E_INVAL);
    assert_null(mgr);
    kvt_pool_unregister(huge);
    kvt_session_mgr_close(NULL);
}

static void wrong_calls_change_nothing(void **state)
{
    struct kvt_session_plan plan = {.struct_size = sizeof(plan)};
    struct kvt_session_info info = {.struct_size = sizeof(info)};
    struct kvt_session_block block = {.struct_size = sizeof(block)};
    struct kvt_session_resume_opts opts = {.struct_size = 1};
    struct kvt_session_stats stats = {.struct_size = 3};
    kvt_session_id other = 0;
    uint32_t page, token = 1;
    (void)state;
    open_with(32, "dram=8MiB", NULL, 64);
    srig_session_open(&s, &a, 1024, 0);
    /* idle and empty */
    assert_int_equal(kvt_session_append(s.mgr, a.id, &token, 1), KVT_E_STATE);
    assert_int_equal(kvt_session_idle(s.mgr, a.id), KVT_E_STATE);
    assert_int_equal(kvt_session_filled(s.mgr, a.id, 0), KVT_E_STATE);
    assert_int_equal(kvt_session_pages(s.mgr, a.id, 0, &page, 1), KVT_E_STATE);
    assert_int_equal(kvt_session_resume(s.mgr, a.id, NULL, 1, NULL, NULL), KVT_E_INVAL);
    assert_int_equal(kvt_session_resume(s.mgr, a.id, &token, 2049, NULL, NULL), KVT_E_LIMIT);
    assert_int_equal(kvt_session_resume(s.mgr, a.id, &token, SIZE_MAX, NULL, NULL), KVT_E_LIMIT);
    assert_int_equal(kvt_session_resume(s.mgr, a.id, &token, 1, &opts, NULL), KVT_E_VERSION);
    plan.struct_size++;
    assert_int_equal(kvt_session_resume(s.mgr, a.id, &token, 1, NULL, &plan), KVT_E_VERSION);
    assert_int_equal(kvt_session_get_plan(s.mgr, a.id, &plan), KVT_E_VERSION);
    plan.struct_size--;
    info.struct_size++;
    assert_int_equal(kvt_session_get_info(s.mgr, a.id, &info), KVT_E_VERSION);
    block.struct_size++;
    assert_int_equal(kvt_session_get_block(s.mgr, a.id, 0, &block), KVT_E_VERSION);
    block.struct_size--;
    assert_int_equal(kvt_session_get_block(s.mgr, a.id, 0, &block), KVT_E_INVAL);
    assert_int_equal(kvt_session_mgr_stats(s.mgr, &stats), KVT_E_VERSION);
    assert_int_equal(kvt_session_open(s.mgr, NULL, 3, &other), KVT_E_INVAL);
    assert_int_equal(kvt_session_open(s.mgr, NULL, 0, NULL), KVT_E_INVAL);
    assert_int_equal(srig_info(&s, &a).state, KVT_SESSION_IDLE);
    /* active */
    assert_int_equal(kvt_session_resume(s.mgr, a.id, NULL, 0, NULL, &plan), 0);
    assert_int_equal(plan.tokens, 0);
    assert_int_equal(kvt_session_resume(s.mgr, a.id, NULL, 0, NULL, NULL), KVT_E_STATE);
    assert_int_equal(kvt_session_append(s.mgr, a.id, &token, 0), KVT_E_INVAL);
    assert_int_equal(kvt_session_append(s.mgr, a.id, NULL, 1), KVT_E_INVAL);
    assert_int_equal(kvt_session_append(s.mgr, a.id, &token, 2049), KVT_E_LIMIT);
    assert_int_equal(kvt_session_append(s.mgr, a.id, &token, 1), 0);
    assert_int_equal(kvt_session_filled(s.mgr, a.id, 2), KVT_E_INVAL);
    assert_int_equal(kvt_session_filled(s.mgr, a.id, 1), 0);
    assert_int_equal(kvt_session_filled(s.mgr, a.id, 0), KVT_E_INVAL);
    assert_int_equal(kvt_session_pages(s.mgr, a.id, 1, &page, 1), 0);
    assert_int_equal(kvt_session_pages(s.mgr, a.id, SIZE_MAX, &page, 1), 0);
    assert_int_equal(kvt_session_pages(s.mgr, a.id, 0, NULL, 1), KVT_E_INVAL);
    assert_int_equal(kvt_session_idle(s.mgr, a.id), 0);
    assert_int_equal(kvt_session_idle(s.mgr, a.id), KVT_E_STATE); /* twice */
    /* unknown, and closed */
    const kvt_session_id wrong[] = {0, 2, a.id + 1, a.id + (UINT64_C(2) << 32), UINT64_MAX, a.id};
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    assert_int_equal(kvt_session_open(s.mgr, NULL, 0, &other), 0); /* in the same place */
    for (size_t i = 0; i < KVT_ARRAY_LEN(wrong); i++) {
        assert_int_equal(kvt_session_resume(s.mgr, wrong[i], &token, 1, NULL, NULL),
                         KVT_E_NO_SESSION);
        assert_int_equal(kvt_session_append(s.mgr, wrong[i], &token, 1), KVT_E_NO_SESSION);
        assert_int_equal(kvt_session_idle(s.mgr, wrong[i]), KVT_E_NO_SESSION);
        assert_int_equal(kvt_session_wait(s.mgr, wrong[i], 0), KVT_E_NO_SESSION);
        assert_int_equal(kvt_session_close(s.mgr, wrong[i]), KVT_E_NO_SESSION);
    }
    srig_check(&s);
}

/* A new manager: L0 and its memory of blocks are empty. */
static void squeeze_to_nothing(void)
{
    kvt_session_mgr_close(s.mgr);
    srig_mgr_open(&s);
}

static void limits_hold(void **state)
{
    struct rig_shape shape = rig_shape_small(64);
    struct kvt_session_mgr_opts opts = {
        .sessions_max = 2, .tokens_max = 320, .blocks_max = 30, .window_tokens = 64};
    kvt_session_id other;
    (void)state;
    srig_open(&s, &shape, "dram=8MiB", NULL, &opts);
    srig_session_open(&s, &a, 320, 0);
    srig_session_open(&s, &b, 320, 0);
    assert_int_equal(kvt_session_open(s.mgr, NULL, 0, &other), KVT_E_LIMIT);
    srig_tokens(&a, 1, 319);
    srig_turn(&s, &a, NULL);
    srig_tokens(&b, 1000, 320);
    assert_int_equal(kvt_session_resume(s.mgr, b.id, b.token, 320, NULL, NULL), KVT_E_LIMIT);
    assert_int_equal(kvt_session_resume(s.mgr, b.id, b.token, 100, NULL, NULL), 0);
    assert_int_equal(srig_stats(&s).refused_limit, 2);
    srig_check(&s);
    /* both may begin, one cannot end: nothing of it is noted */
    go_idle(&b);
    assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
    assert_int_equal(kvt_session_close(s.mgr, b.id), 0);
    squeeze_to_nothing();
    srig_session_free(&a);
    srig_session_free(&b);
    srig_session_open(&s, &a, 320, 0);
    srig_session_open(&s, &b, 320, 0);
    srig_tokens(&a, 2000, 240);
    srig_tokens(&b, 3000, 319);
    assert_int_equal(srig_resume(&s, &a, NULL), 0);
    assert_int_equal(srig_resume(&s, &b, NULL), 0);
    srig_fill(&s, &b, 0, 319);
    assert_int_equal(kvt_session_filled(s.mgr, a.id, 240), KVT_E_LIMIT);
    assert_int_equal(srig_info(&s, &a).filled, 0);
    assert_int_equal(kvt_session_filled(s.mgr, a.id, 100), 0);
    srig_check(&s);
}

/* Tokens that were announced and not computed leave no trace. */
static void what_was_not_filled_is_cut_off(void **state)
{
    struct kvt_session_plan plan;
    (void)state;
    open_with(32, "dram=8MiB,level=kv4", NULL, 64);
    srig_session_open(&s, &a, 1024, 0);
    srig_tokens(&a, 1, 100);
    assert_int_equal(srig_resume(&s, &a, &plan), 0);
    assert_int_equal(plan.recompute, 100);
    srig_fill(&s, &a, 0, 60);
    go_idle(&a);
    assert_int_equal(srig_info(&s, &a).tokens, 60);
    assert_int_equal(srig_stats(&s).cut_tokens, 40);
    a.tokens = 60;
    srig_tokens(&a, 900, 40); /* another way on */
    srig_turn(&s, &a, &plan);
    assert_int_equal(plan.in_l0, 60);
    go_idle(&a);
    squeeze();
    srig_turn(&s, &a, &plan);
    assert_int_equal(plan.from_dram, 96);
}

static void a_forked_child_is_refused(void **state)
{
    (void)state;
    open_with(32, "dram=8MiB", NULL, 64);
    start(&a, 1, 40);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        kvt_session_id id;
        uint32_t token = 1;
        int bad = kvt_session_append(s.mgr, a.id, &token, 1) != KVT_E_CLOSED;
        bad |= kvt_session_open(s.mgr, NULL, 0, &id) != KVT_E_CLOSED;
        bad |= kvt_session_mgr_work(s.mgr, 0) != KVT_E_CLOSED;
        kvt_session_mgr_close(s.mgr);
        _exit(bad);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    go_idle(&a);
}

/* ---- loads in progress --------------------------------------------------------------------- */

static void close_during_a_restore(void **state)
{
    (void)state;
    open_with(64, "dram=8MiB,level=kv4", "64MiB", 64);
    start(&a, 1, 500);
    go_idle(&a);
    squeeze();
    for (int i = 0; i < 20; i++) {
        assert_int_equal(kvt_session_resume(s.mgr, a.id, NULL, 0, NULL, NULL), 0);
        if (srig_info(&s, &a).state == KVT_SESSION_RESTORING) {
            const uint32_t token = 3;
            int rc = kvt_session_append(s.mgr, a.id, &token, 1);
            assert_true(rc == KVT_E_STATE || rc == 0); /* it may have ended by now */
        }
        assert_int_equal(kvt_session_close(s.mgr, a.id), 0);
        srig_check(&s);
        squeeze();
        srig_session_free(&a);
        srig_session_open(&s, &a, 1024, 0);
        srig_tokens(&a, 1, 500);
        srig_turn(&s, &a, NULL);
        go_idle(&a);
        squeeze();
    }
    assert_int_equal(srig_stats(&s).store_failed, 0);
}

/* Promise 5: kv8 and then kv4 has kv4's error, since kv8's is 20 dB below it. */
static void cooling_costs_no_more_than_kv4(void **state)
{
    double error[2] = {0, 0}, power = 0;
    uint8_t kinds[64];
    (void)state;
    open_with(72, "dram=8MiB,level=kv4", NULL, 512);
    for (int cooled = 0; cooled < 2; cooled++) {
        struct srig_session *x = cooled ? &b : &a;
        srig_session_open(&s, x, 1024, 3 + (uint64_t)cooled);
        srig_tokens(x, 1, 512);
        srig_turn(&s, x, NULL);
        if (cooled) { /* through its kv8 records */
            go_idle(x);
            squeeze();
            assert_int_equal(srig_resume(&s, x, NULL), 0);
        }
        srig_tokens(x, 2000, 512);
        assert_int_equal(srig_append(&s, x), 0);
        go_idle(x);
        squeeze();
        assert_int_equal(srig_resume(&s, x, NULL), 0);
        (void)srig_verify(&s, x, 1024, kinds);
        for (uint32_t i = 1; i < 32; i++) {
            uint32_t page;
            assert_int_equal(kinds[i], cooled ? SRIG_KV8_KV4 : SRIG_KV4);
            assert_int_equal(kvt_session_pages(s.mgr, x->id, i, &page, 1), 1);
            rig_page_bytes(&s.rig, page, s.got);
            (void)srig_page_is(&s, x, i, page, UNIT);
            rig_page_bytes(&s.oracle, 0, s.want); /* the original */
            for (size_t e = 0; e < rig_block_bytes(&s.rig) / 2; e++) {
                uint32_t w = (uint32_t)((uint16_t *)(void *)s.want)[e] << 16;
                uint32_t g = (uint32_t)((uint16_t *)(void *)s.got)[e] << 16;
                float wf, gf;
                memcpy(&wf, &w, 4);
                memcpy(&gf, &g, 4);
                error[cooled] += (double)(wf - gf) * (double)(wf - gf);
                power += cooled ? 0 : (double)wf * (double)wf;
            }
        }
        go_idle(x);
    }
    double once = 10 * log10(power / error[0]), twice = 10 * log10(power / error[1]);
    printf("           kv4 %.2f dB, kv8 then kv4 %.2f dB\n", once, twice);
    assert_true(once > 18);
    assert_true(fabs(once - twice) < 0.15);
}

/* ---- threads ------------------------------------------------------------------------------- */

struct crowd {
    pthread_t thread;
    uint32_t number;
    int bad;
};

/* No cmocka in here: it belongs to the main thread. */
static void *crowd_main(void *arg)
{
    struct crowd *me = arg;
    uint32_t tokens[160], pages[10];
    kvt_session_id id;
    for (uint32_t i = 0; i < 160; i++) /* the first 96 are everybody's */
        tokens[i] = i < 96 ? i : me->number * 1000 + i;
    me->bad |= kvt_session_open(s.mgr, NULL, 0, &id) != 0;
    for (int turn = 0; turn < 12 && !me->bad; turn++) {
        struct kvt_session_plan plan = {.struct_size = sizeof(plan)};
        int rc = kvt_session_resume(s.mgr, id, turn ? NULL : tokens, turn ? 0 : 160, NULL, NULL);
        if (rc == -EAGAIN || rc == KVT_E_LIMIT) { /* all pages are busy: so are the others */
            turn--;
            (void)kvt_session_mgr_work(s.mgr, 1000000);
            continue;
        }
        me->bad |= rc != 0 || kvt_session_wait(s.mgr, id, -1) != 1;
        me->bad |= kvt_session_get_plan(s.mgr, id, &plan) != 0 || plan.tokens != 160;
        me->bad |= kvt_session_pages(s.mgr, id, 0, pages, 10) != 10;
        for (uint32_t i = (160 - plan.recompute) / UNIT; i < 10; i++)
            rig_fill_smooth(&s.rig, pages[i], i < 6 ? i : me->number * 100 + i);
        me->bad |= kvt_session_filled(s.mgr, id, 160) != 0;
        me->bad |= kvt_session_idle(s.mgr, id) != 0;
    }
    me->bad |= kvt_session_close(s.mgr, id) != 0;
    return NULL;
}

static void several_threads(void **state)
{
    struct crowd crowd[4];
    (void)state;
    open_with(34, "dram=4MiB,level=kv4", "64MiB", 64);
    for (uint32_t i = 0; i < 4; i++) {
        crowd[i] = (struct crowd){.number = i + 1};
        assert_int_equal(pthread_create(&crowd[i].thread, NULL, crowd_main, &crowd[i]), 0);
    }
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(crowd[i].thread, NULL), 0);
        assert_int_equal(crowd[i].bad, 0);
    }
    srig_settle(&s);
    assert_int_equal(srig_stats(&s).sessions, 0);
    assert_true(srig_stats(&s).resumed >= 48);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_turn_and_another_one, tear_down),
        cmocka_unit_test_teardown(resume_from_records, tear_down),
        cmocka_unit_test_teardown(resume_from_disk_and_after_a_restart, tear_down),
        cmocka_unit_test_teardown(whole_blocks_leave_a_token_to_compute, tear_down),
        cmocka_unit_test_teardown(prefixes_are_shared_and_counted_once, tear_down),
        cmocka_unit_test_teardown(the_last_window_decides, tear_down),
        cmocka_unit_test_teardown(the_least_recently_used_goes_first_leaf_first, tear_down),
        cmocka_unit_test_teardown(pages_of_active_sessions_are_never_taken, tear_down),
        cmocka_unit_test_teardown(without_a_store_pages_go_unsaved, tear_down),
        cmocka_unit_test_teardown(lost_records_are_computed_and_stored_again, tear_down),
        cmocka_unit_test_teardown(a_damaged_record_ends_the_run, tear_down),
        cmocka_unit_test_teardown(pages_being_stored_are_not_taken, tear_down),
        cmocka_unit_test_teardown(a_deadline_shortens_the_load, tear_down),
        cmocka_unit_test_teardown(a_raw_window_and_a_raw_level, tear_down),
        cmocka_unit_test_teardown(a_part_of_the_pool, tear_down),
        cmocka_unit_test_teardown(wrong_options_are_refused, tear_down),
        cmocka_unit_test_teardown(wrong_calls_change_nothing, tear_down),
        cmocka_unit_test_teardown(limits_hold, tear_down),
        cmocka_unit_test_teardown(what_was_not_filled_is_cut_off, tear_down),
        cmocka_unit_test_teardown(a_forked_child_is_refused, tear_down),
        cmocka_unit_test_teardown(close_during_a_restore, tear_down),
        cmocka_unit_test_teardown(cooling_costs_no_more_than_kv4, tear_down),
        cmocka_unit_test_teardown(several_threads, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
