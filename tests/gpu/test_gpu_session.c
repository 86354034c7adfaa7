/* Sessions over a pool in GPU memory, against the fake driver.
 *
 * Goal:   the session manager needs nothing of a pool but page numbers: blocks leave the pages of a
 *         device, come back as the scalar codec says, cool from their pages and through a scratch
 *         page, and no page but those that were asked for is touched; of several groups each has
 * the pages of its own, and a window group only those of its window. Method: api_rig.h over
 * fake_cuda.c; a mirror of the whole pool is kept by the session's own plan, and compared after
 * each step.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "client/client.h"
#include "client/session_internal.h"
#include "gpu/api_rig.h"
#include "gpu/fake_cuda.h"
#include "gpu/gpu.h"
#include "support/rig.h"

enum { UNIT = 16, PAGES = 48, TOKENS_MAX = 1024 };

static const struct api_shape shape = {"sessions",     2,       2,    64, UNIT, PAGES,
                                       KVT_DTYPE_BF16, API_NHD, false};
static struct api api;
static struct kvt_session_mgr *mgr;

static void open_mgr(void)
{
    const struct kvt_session_mgr_opts opts = {
        .struct_size = sizeof(opts), .window_tokens = 64, .tokens_max = TOKENS_MAX};
    if (!kvt_gpu_kernels_built())
        skip();
    assert_true(
        api_init(&api, KVT_FAKE_CUDA, &shape, "dram=64MiB,level=kv4,threads=1,plan=off", false));
    api_open(&api);
    api_poison(&api);
    assert_int_equal(kvt_session_mgr_open(api.ns, api.pool, &opts, &mgr), 0);
}

static void close_mgr(void)
{
    kvt_session_mgr_close(mgr);
    api_close(&api);
    api_free(&api);
}

static void settle(void)
{
    char why[128] = "";
    while (kvt_session_mgr_work(mgr, -1) > 0)
        ;
    assert_int_equal(kvt_session_mgr_check(mgr, why, sizeof(why)), 0);
}

/* Resume with n more tokens first, first + 1, ...; returns the plan after the load. */
static struct kvt_session_plan resume(kvt_session_id id, uint32_t first, uint32_t n)
{
    struct kvt_session_plan plan = {.struct_size = sizeof(plan)};
    uint32_t tokens[TOKENS_MAX];
    int rc;
    for (uint32_t i = 0; i < n; i++)
        tokens[i] = first + i;
    while ((rc = kvt_session_resume(mgr, id, tokens, n, NULL, NULL)) == -EAGAIN)
        assert_true(kvt_session_mgr_work(mgr, -1) >= 0);
    assert_int_equal(rc, 0);
    assert_int_equal(kvt_session_wait(mgr, id, -1), 1);
    assert_int_equal(kvt_session_get_plan(mgr, id, &plan), 0);
    return plan;
}

static uint32_t page_of(kvt_session_id id, uint32_t block)
{
    uint32_t page;
    assert_int_equal(kvt_session_pages(mgr, id, block, &page, 1), 1);
    return page;
}

/* The engine computes blocks [from, to): numbers by seed. Whole blocks here. */
static void compute(kvt_session_id id, uint32_t from, uint32_t to, uint64_t seed)
{
    for (uint32_t i = from; i < to; i++)
        api_fill(&api, page_of(id, i), seed + i, API_SMOOTH);
    api_upload(&api);
    assert_int_equal(kvt_session_filled(mgr, id, to * UNIT), 0);
}

/* The mirror of a block that came back through these levels, in order; 0 ends them. */
static void came_back(kvt_session_id id, uint32_t block, uint64_t seed, int first, int second)
{
    uint32_t page = page_of(id, block);
    api_fill(&api, page, seed + block, API_SMOOTH);
    assert_int_equal(api_coded(&api, page, first), first);
    if (second != 0)
        assert_int_equal(api_coded(&api, page, second), second);
}

static void test_out_of_the_gpu_and_back(void **state)
{
    kvt_session_id a, b;
    (void)state;
    open_mgr();
    assert_int_equal(kvt_session_open(mgr, NULL, 0, &a), 0);
    assert_int_equal(kvt_session_open(mgr, NULL, 0, &b), 0);
    assert_int_equal(resume(a, 1, 192).recompute, 192);
    compute(a, 0, 12, 100);
    assert_int_equal(kvt_session_idle(mgr, a), 0);
    assert_int_equal(resume(b, 10000, 47 * UNIT).recompute, 47 * UNIT); /* every page */
    compute(b, 0, 47, 500);
    assert_true(api_same(&api));
    assert_int_equal(kvt_session_idle(mgr, b), 0);
    assert_int_equal(resume(a, 0, 0).from_dram, 192);
    for (uint32_t i = 0; i < 12; i++)
        came_back(a, i, 100, i == 0 ? KVT_LEVEL_RAW : i < 8 ? KVT_LEVEL_KV4 : KVT_LEVEL_KV8, 0);
    assert_true(api_same(&api)); /* b's other pages are as they were */
    /* three blocks leave the window and cool from their pages; three are new */
    uint32_t more[48] = {7};
    int rc;
    while ((rc = kvt_session_append(mgr, a, more, 48)) == -EAGAIN)
        assert_true(kvt_session_mgr_work(mgr, -1) >= 0);
    assert_int_equal(rc, 0);
    compute(a, 12, 15, 100);
    assert_int_equal(kvt_session_idle(mgr, a), 0);
    settle();
    (void)resume(b, 0, 0);
    assert_int_equal(kvt_session_idle(mgr, b), 0);
    api_poison(&api); /* b's turn is not looked at; all of a's pages were taken */
    assert_int_equal(resume(a, 0, 0).from_dram, 240);
    for (uint32_t i = 0; i < 15; i++)
        came_back(a, i, 100,
                  i == 0  ? KVT_LEVEL_RAW
                  : i < 8 ? KVT_LEVEL_KV4
                          : KVT_LEVEL_KV8,
                  i >= 8 && i < 11 ? KVT_LEVEL_KV4 : 0);
    assert_true(api_same(&api));
    assert_int_equal(api_stat(&api, "store.cooled"), 3);
    assert_int_equal(api_stat(&api, "session.evicted_unsaved"), 0);
    close_mgr();
}

/* What two sessions share and only one still has in its window cools when that one is closed: its
 * pages have gone, so through a scratch page of the device. */
static void test_cooling_by_a_scratch_page(void **state)
{
    struct kvt_session_stats stats = {.struct_size = sizeof(stats)};
    kvt_session_id a, b, c;
    (void)state;
    open_mgr();
    assert_int_equal(kvt_session_open(mgr, NULL, 0, &a), 0);
    assert_int_equal(kvt_session_open(mgr, NULL, 0, &b), 0);
    assert_int_equal(kvt_session_open(mgr, NULL, 0, &c), 0);
    (void)resume(a, 1, 80);
    compute(a, 0, 5, 100);
    assert_int_equal(resume(b, 1, 240).in_l0, 80);
    compute(b, 5, 15, 100);
    assert_int_equal(kvt_session_idle(mgr, a), 0);
    assert_int_equal(kvt_session_idle(mgr, b), 0);
    (void)resume(c, 10000, 47 * UNIT);
    assert_int_equal(kvt_session_close(mgr, c), 0); /* nothing of it is kept */
    assert_int_equal(kvt_session_close(mgr, a), 0);
    settle();
    assert_int_equal(kvt_session_mgr_stats(mgr, &stats), 0);
    assert_int_equal(stats.cooled_record, 4);
    api_poison(&api);
    assert_int_equal(resume(b, 0, 0).from_dram, 240);
    for (uint32_t i = 0; i < 15; i++)
        came_back(b, i, 100,
                  i == 0             ? KVT_LEVEL_RAW
                  : i >= 5 && i < 11 ? KVT_LEVEL_KV4
                                     : KVT_LEVEL_KV8,
                  i > 0 && i < 5 ? KVT_LEVEL_KV4 : 0);
    assert_true(api_same(&api));
    close_mgr();
}

/* ---- two groups: full attention, and a window ---------------------------------------------------
 */

enum { WINDOW_GROUP = 5, WINDOW_TOKENS = 64 };

/* Layer 1 is of the window group. Level raw: bytes come back as they were. */
static void open_groups(void)
{
    static const struct kvt_group groups[] = {
        {.group = 0},
        {.group = WINDOW_GROUP, .kind = KVT_GROUP_WINDOW, .window_tokens = WINDOW_TOKENS}};
    const struct kvt_session_mgr_opts opts = {
        .struct_size = sizeof(opts), .window_tokens = 64, .tokens_max = TOKENS_MAX};
    if (!kvt_gpu_kernels_built())
        skip();
    assert_true(
        api_init(&api, KVT_FAKE_CUDA, &shape, "dram=64MiB,level=raw,threads=1,plan=off", false));
    api.parts[2].group = api.parts[3].group = WINDOW_GROUP;
    api.layout.groups = groups;
    api.layout.group_count = 2;
    api_open(&api);
    api_poison(&api);
    assert_int_equal(kvt_session_mgr_open(api.ns, api.pool, &opts, &mgr), 0);
}

static uint32_t group_page(kvt_session_id id, uint16_t group, uint32_t block)
{
    uint32_t page;
    assert_int_equal(kvt_session_group_pages(mgr, id, group, block, &page, 1), 1);
    return page;
}

/* The mirror of one group's page; the other group's page of that number stays as it is. */
static void fill_group(uint16_t group, uint32_t page, uint64_t seed)
{
    size_t half = api.bytes / 2; /* a layer's parts follow each other, and layers are alike */
    size_t keep = group == WINDOW_GROUP ? 0 : half;
    memcpy(api.back, api.mirror + keep, half);
    api_fill(&api, page, seed, API_SMOOTH);
    memcpy(api.mirror + keep, api.back, half);
}

static uint64_t seed_of(uint64_t session, uint16_t group, uint32_t block)
{
    return session * 1000 + group * 100u + block;
}

static void compute_groups(kvt_session_id id, uint64_t session, uint32_t blocks)
{
    for (uint32_t i = 0; i < blocks; i++)
        for (uint16_t g = 0; g <= WINDOW_GROUP; g += WINDOW_GROUP)
            fill_group(g, group_page(id, g, i), seed_of(session, g, i));
    api_upload(&api);
    assert_int_equal(kvt_session_filled(mgr, id, blocks * UNIT), 0);
}

static void test_groups_out_of_the_gpu_and_back(void **state)
{
    kvt_session_id a, b;
    uint32_t there = 0;
    (void)state;
    open_groups();
    assert_int_equal(kvt_session_open(mgr, NULL, 0, &a), 0);
    assert_int_equal(kvt_session_open(mgr, NULL, 0, &b), 0);
    assert_int_equal(resume(a, 1, 192).recompute, 192);
    compute_groups(a, 1, 12);
    assert_int_equal(kvt_session_idle(mgr, a), 0);
    settle();
    assert_int_equal(resume(b, 10000, 47 * UNIT).recompute, 47 * UNIT); /* every page of both */
    compute_groups(b, 2, 47);
    assert_true(api_same(&api));
    assert_int_equal(kvt_session_idle(mgr, b), 0);
    settle();
    assert_int_equal(resume(a, 0, 0).from_dram, 192);
    for (uint32_t i = 0; i < 12; i++) {
        uint32_t page = group_page(a, WINDOW_GROUP, i);
        fill_group(0, group_page(a, 0, i), seed_of(1, 0, i));
        if (page != KVT_SESSION_NO_PAGE)
            fill_group(WINDOW_GROUP, page, seed_of(1, WINDOW_GROUP, i));
        there += page != KVT_SESSION_NO_PAGE;
        assert_true(page != KVT_SESSION_NO_PAGE || i < 12 - WINDOW_TOKENS / UNIT);
    }
    assert_int_equal(there, WINDOW_TOKENS / UNIT);
    assert_true(api_same(&api)); /* b's other pages, of both groups, are as they were */
    assert_int_equal(api_stat(&api, "session.evicted_unsaved"), 0);
    close_mgr();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_out_of_the_gpu_and_back, api_fake_reset),
        cmocka_unit_test_setup(test_cooling_by_a_scratch_page, api_fake_reset),
        cmocka_unit_test_setup(test_groups_out_of_the_gpu_and_back, api_fake_reset),
    };
    return cmocka_run_group_tests(tests, api_fake_load, NULL);
}
