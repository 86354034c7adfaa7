/* Goal: 20 sessions of 8K tokens in a pool that holds 4, DRAM that holds a part of the rest, and a
 *       disk: every page that comes back equals what its level promises, bit for bit, and nothing
 *       is computed again that has a record.
 * Method: the sessions take turns in a mixed order: each turn resumes one, compares every block
 *         with the original coded and decoded by the codec alone, through exactly the levels that
 *         the block has gone through by the test's own book, adds 300 tokens and goes idle. The
 *         heads are few, so that it takes seconds; the tokens are real.
 *         KVT_SESSION_TURNS changes how many turns there are. Sanitizers see 2K tokens a session.
 */
#include "support/session_rig.h"

#include <string.h>
#include <sys/resource.h>

#include "base/checked.h"
#include "base/rng.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SLOW 1
#endif
#endif
#ifdef SLOW
#define TOKENS 2048u
#define WINDOW 1024u
#define DRAM "dram=5MiB,level=kv4"
#else
#define TOKENS 8192u
#define WINDOW 4096u
#define DRAM "dram=20MiB,level=kv4"
#endif
#define UNIT 32u
#define SESSIONS 20u
#define TURN_TOKENS 300u
#define GROWTH_MAX 6u /* turns of one session */
#define TOKENS_MAX (TOKENS + GROWTH_MAX * TURN_TOKENS)
#define BLOCKS_MAX (TOKENS_MAX / UNIT)

struct book { /* one session */
    struct srig_session c;
    uint32_t filled_before;     /* full blocks when it last went idle */
    uint8_t record[BLOCKS_MAX]; /* what its record is: enum srig_bytes */
    uint8_t page[BLOCKS_MAX];   /* what its page was when it went idle */
    uint32_t turns;
};

static struct srig s;
static struct book books[SESSIONS];

static uint32_t window_from(uint32_t tokens)
{
    return tokens > WINDOW ? (tokens - WINDOW) / UNIT : 0;
}

/* What must be in the store after the session has gone idle, by what its pages hold. */
static void note_idle(struct book *book)
{
    uint32_t blocks = book->c.tokens / UNIT, from = window_from(book->c.tokens);
    for (uint32_t i = 0; i < blocks; i++) {
        uint8_t page = book->page[i];
        if (i == 0)
            book->record[i] = SRIG_EXACT;
        else if (i < from && page == SRIG_EXACT && book->record[i] != SRIG_KV4)
            book->record[i] = SRIG_KV4;
        else if (i < from && page == SRIG_KV8)
            book->record[i] = SRIG_KV8_KV4;
        else if (i >= from && page == SRIG_EXACT)
            book->record[i] = SRIG_KV8;
    }
    book->filled_before = blocks;
}

/* Idle, and written: how fast the disk is, is not the question here. */
static void go_idle(struct book *book)
{
    note_idle(book);
    assert_int_equal(kvt_session_idle(s.mgr, book->c.id), 0);
    srig_settle(&s);
    assert_int_equal(kvt_flush(s.rig.cache), 0);
}

struct sums {
    uint64_t l0, dram, disk, recompute;
};

static void turn(struct book *book, struct sums *sums)
{
    static uint8_t kinds[BLOCKS_MAX];
    struct kvt_session_plan plan;
    uint32_t had = book->c.tokens;

    srig_tokens(&book->c, 1000 * (book->turns + 1), TURN_TOKENS);
    assert_int_equal(srig_resume(&s, &book->c, &plan), 0);
    assert_int_equal(plan.reason, 0);
    /* no recompute where a record exists: all but a partial block and the new tokens */
    assert_true(plan.recompute <= TURN_TOKENS + had % UNIT);
    (void)srig_verify(&s, &book->c, book->c.tokens - plan.recompute, kinds);
    for (uint32_t i = 0; i < book->filled_before; i++) {
        bool stayed = i < plan.in_l0 / UNIT;
        if (kinds[i] != (stayed ? book->page[i] : book->record[i]))
            fail_msg("block %u is %u; page %u, record %u, in L0 %u", i, kinds[i], book->page[i],
                     book->record[i], stayed);
        book->page[i] = kinds[i];
    }
    srig_fill(&s, &book->c, book->c.tokens - plan.recompute, book->c.tokens);
    for (uint32_t i = book->filled_before; i < book->c.tokens / UNIT; i++)
        book->page[i] = SRIG_EXACT;
    go_idle(book);
    book->turns++;
    sums->l0 += plan.in_l0;
    sums->dram += plan.from_dram;
    sums->disk += plan.from_disk;
    sums->recompute += plan.recompute;
}

static void first_turns(void)
{
    for (uint32_t i = 0; i < SESSIONS; i++) {
        struct book *book = &books[i];
        srig_session_open(&s, &book->c, TOKENS_MAX, i + 1);
        srig_tokens(&book->c, 1, TOKENS);
        srig_turn(&s, &book->c, NULL);
        for (uint32_t b = 0; b < TOKENS / UNIT; b++)
            book->page[b] = SRIG_EXACT;
        go_idle(book);
    }
}

static void test_twenty_sessions(void **state)
{
    const char *text = getenv("KVT_SESSION_TURNS");
    uint32_t turns = text ? (uint32_t)strtoul(text, NULL, 10) : 50, done = 0;
    struct rig_shape shape = {.layers = 1,
                              .heads = 1,
                              .dim = 64,
                              .tokens = UNIT,
                              .pages = 4 * BLOCKS_MAX + 4,
                              .dtype = KVT_DTYPE_BF16};
    struct kvt_session_mgr_opts opts = {.tokens_max = TOKENS_MAX, .window_tokens = WINDOW};
    struct sums sums = {0};
    struct kvt_rng rng = {.state = rig_seed()};

    (void)state;
    srig_open(&s, &shape, DRAM, "512MiB", &opts);
    first_turns();
    while (done < turns) {
        struct book *book = &books[kvt_rng_below(&rng, SESSIONS)];
        if (book->turns == GROWTH_MAX)
            break;
        turn(book, &sums);
        done++;
    }
    srig_settle(&s);
    struct kvt_session_stats stats = srig_stats(&s);
    printf("           %u turns; tokens from L0 %llu, DRAM %llu, disk %llu, computed %llu; "
           "%llu pages evicted, %llu window and %llu final records\n",
           done, (unsigned long long)sums.l0, (unsigned long long)sums.dram,
           (unsigned long long)sums.disk, (unsigned long long)sums.recompute,
           (unsigned long long)stats.evicted, (unsigned long long)stats.stored_window,
           (unsigned long long)stats.stored_final);
    assert_int_equal(stats.evicted_unsaved, 0);
    assert_int_equal(stats.load_short, 0);
    assert_true(sums.l0 > 0 && sums.dram > 0 && sums.disk > 0); /* all tiers were used */
    for (uint32_t i = 0; i < SESSIONS; i++)
        srig_session_free(&books[i].c);
    srig_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_twenty_sessions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
