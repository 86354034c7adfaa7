/* Conversations that outlive the engine's memory: more of them than its pages can hold.
 *
 * Build:  cc sessions.c $(pkg-config --cflags --libs kvtier)
 * Usage:  sessions [DIRECTORY]    with a directory the conversations also survive the process
 * The "engine" is an array of 24 pages of 16 tokens; eight conversations of up to 300 tokens take
 * turns. All begin with the same 64 tokens, which are computed once. "Computing" a token is writing
 * numbers; a real engine would run its model over the tokens that the plan leaves to it.
 */
#include <errno.h>
#include <kvtier/kvtier.h>
#include <stdio.h>

enum { PAGES = 24, HEADS = 2, UNIT = 16, DIM = 64, TALKS = 8, TURNS = 4, SYSTEM = 64, SAID = 58 };

static uint16_t k[PAGES][HEADS][UNIT][DIM], v[PAGES][HEADS][UNIT][DIM];

static int open_all(const char *dir, struct kvt_cache **cache, struct kvt_ns **ns,
                    struct kvt_pool **pool, struct kvt_session_mgr **mgr)
{
    const struct kvt_part parts[] = {
        {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = HEADS, .head_dim = DIM},
        {.kind = KVT_PART_V, .dtype = KVT_DTYPE_BF16, .heads = HEADS, .head_dim = DIM}};
    const struct kvt_part_place places[] = {
        {k, sizeof(k[0]), sizeof(k[0][0]), sizeof(k[0][0][0]), sizeof(uint16_t)},
        {v, sizeof(v[0]), sizeof(v[0][0]), sizeof(v[0][0][0]), sizeof(uint16_t)}};
    const struct kvt_layout layout = {
        .struct_size = sizeof(layout), .block_tokens = UNIT, .part_count = 2, .parts = parts};
    const struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, PAGES, 2, places};
    const struct kvt_session_mgr_opts opts = {
        .struct_size = sizeof(opts), .window_tokens = 128, .tokens_max = 1024};
    struct kvt_identity who;
    struct kvt_config *config = NULL;
    char text[512], error[256] = "";

    int rc = kvt_config_new(&config);
    snprintf(text, sizeof(text), dir ? "dram=64MiB,disk=%s:256MiB" : "dram=64MiB", dir);
    if (!rc)
        rc = kvt_config_set_all(config, text);
    if (!rc)
        rc = kvt_open(config, cache, error, sizeof(error));
    if (rc)
        fprintf(stderr, "sessions: %s%s\n", kvt_config_error(config), error);
    kvt_config_free(config);
    kvt_identity_init(&who);
    who.engine = "example";
    who.key_scheme = KVT_KEY_SCHEME;
    who.model = "none";
    if (!rc)
        rc = kvt_ns_open(*cache, &who, &layout, ns);
    if (!rc)
        rc = kvt_pool_register(*cache, &layout, &desc, pool);
    return rc ? rc : kvt_session_mgr_open(*ns, *pool, &opts, mgr);
}

/* One turn of one conversation: its context comes back, what is new is computed, it goes idle. */
static int turn(struct kvt_session_mgr *mgr, kvt_session_id id, const uint32_t *said, size_t n,
                struct kvt_session_plan *plan)
{
    uint32_t page = 0;
    int rc;

    while ((rc = kvt_session_resume(mgr, id, said, n, NULL, NULL)) == -EAGAIN)
        kvt_session_mgr_work(mgr, -1); /* pages of idle conversations are being stored */
    if (rc)
        return rc;
    kvt_session_wait(mgr, id, -1);
    kvt_session_get_plan(mgr, id, plan);
    for (uint32_t t = plan->tokens - plan->recompute; t < plan->tokens; t++) { /* the model */
        kvt_session_pages(mgr, id, t / UNIT, &page, 1);
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < DIM; i++)
                k[page][h][t % UNIT][i] = v[page][h][t % UNIT][i] =
                    (uint16_t)(0x3f00 + t % 251 + i);
    }
    rc = kvt_session_filled(mgr, id, plan->tokens);
    return rc ? rc : kvt_session_idle(mgr, id);
}

int main(int argc, char **argv)
{
    struct kvt_session_stats stats = {.struct_size = sizeof(stats)};
    struct kvt_session_plan plan = {.struct_size = sizeof(plan)};
    struct kvt_session_mgr *mgr = NULL;
    struct kvt_cache *cache = NULL;
    struct kvt_pool *pool = NULL;
    struct kvt_ns *ns = NULL;
    kvt_session_id talks[TALKS];
    uint32_t said[SYSTEM + SAID];

    int rc = open_all(argc > 1 ? argv[1] : NULL, &cache, &ns, &pool, &mgr);
    for (int i = 0; i < TALKS && !rc; i++)
        rc = kvt_session_open(mgr, NULL, 0, &talks[i]);
    for (int t = 0; t < TURNS && !rc; t++) {
        for (uint32_t i = 0; i < TALKS && !rc; i++) {
            size_t n = t ? SAID : SYSTEM + SAID; /* the first turn begins with what all share */
            for (uint32_t j = 0; j < n; j++)
                said[j] = !t && j < SYSTEM ? j : 1000 * i + 100 * (uint32_t)t + j;
            rc = turn(mgr, talks[i], said, n, &plan);
            if (!rc)
                printf("talk %u, turn %d: %3u tokens: %3u in place, %3u from DRAM, %3u from disk, "
                       "%3u computed\n",
                       i + 1, t + 1, plan.tokens, plan.in_l0, plan.from_dram, plan.from_disk,
                       plan.recompute);
        }
    }
    rc = rc ? rc : kvt_session_mgr_stats(mgr, &stats);
    printf("%llu pages evicted, %llu of them without a record (%s)\n",
           (unsigned long long)stats.evicted, (unsigned long long)stats.evicted_unsaved,
           kvt_strerror(rc));
    kvt_session_mgr_close(mgr);
    kvt_pool_unregister(pool); /* NULL is allowed everywhere here */
    kvt_ns_close(ns);
    kvt_close(cache);
    return rc ? 1 : 0;
}
