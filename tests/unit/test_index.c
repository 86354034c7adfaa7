/* Goal: the index finds exactly what is in it, whatever the hash does, and its links stay sound.
 * Method: random insertions, removals, links and growth beside a plain array of what should be
 * there, under a good hash, under one home for all (every key collides in the table) and at full
 * capacity; kvt_index_check() along the way. Cycles are attempted and must be refused.
 * CASES C84 (index part): 10^6 entries stay within 48 bytes each.
 */
#include "support/store_help.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "store/index.h"

static void key_of(uint32_t i, struct kvt_full_key *key)
{
    memset(key, 0, sizeof(*key));
    memcpy(key->ns, "namespace-number", KVT_NS_BYTES);
    memcpy(key->hash, &i, sizeof(i));
    key->hash_len = 4;
}

static struct kvt_fp fp_of(const struct kvt_index *index, uint32_t i)
{
    struct kvt_full_key key;

    key_of(i, &key);
    return kvt_index_fingerprint(index, &key);
}

static void expect_sound(const struct kvt_index *index)
{
    char why[160] = "";

    if (kvt_index_check(index, why, sizeof(why)) != 0)
        fail_msg("%s", why);
}

/* keys 0..universe-1; where[i] is the entry of key i, or NONE. */
static void churn(int collide, uint32_t capacity, uint32_t universe, uint32_t steps, uint64_t seed)
{
    struct kvt_rng rng = {seed};
    struct kvt_index index;
    uint32_t *where = malloc(universe * sizeof(*where));
    uint32_t living = 0;

    assert_non_null(where);
    assert_int_equal(kvt_index_init(&index, capacity, seed, collide), 0);
    for (uint32_t i = 0; i < universe; i++)
        where[i] = KVT_INDEX_NONE;
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t i = (uint32_t)kvt_rng_below(&rng, universe);
        struct kvt_fp fp = fp_of(&index, i);

        assert_int_equal(kvt_index_find(&index, fp), where[i]);
        if (where[i] != KVT_INDEX_NONE) {
            kvt_index_remove(&index, where[i]);
            where[i] = KVT_INDEX_NONE;
            living--;
        } else {
            where[i] = kvt_index_insert(&index, fp);
            if (living == index.capacity)
                assert_int_equal(where[i], KVT_INDEX_NONE);
            else
                assert_true(where[i] < index.capacity);
            living += where[i] != KVT_INDEX_NONE;
        }
        if (step % (steps / 8) == 0)
            expect_sound(&index);
        if (step == steps / 2)
            assert_int_equal(kvt_index_grow(&index, capacity + capacity / 4), 0);
    }
    assert_int_equal(index.used, living);
    for (uint32_t i = 0; i < universe; i++)
        assert_int_equal(kvt_index_find(&index, fp_of(&index, i)), where[i]);
    expect_sound(&index);
    kvt_index_destroy(&index);
    free(where);
}

static void test_churn_good_hash(void **state)
{
    (void)state;
    churn(KVT_COLLIDE_NONE, 3000, 5000, 200000, test_seed());
}

static void test_churn_full(void **state)
{
    (void)state;
    churn(KVT_COLLIDE_NONE, 64, 100, 100000, test_seed());
    churn(KVT_COLLIDE_NONE, 1, 3, 1000, test_seed());
}

static void test_churn_one_home(void **state)
{
    (void)state;
    churn(KVT_COLLIDE_HOME, 200, 300, 20000, test_seed());
}

static void test_same_fingerprint(void **state)
{
    struct kvt_index index;
    uint32_t entry;

    (void)state;
    assert_int_equal(kvt_index_init(&index, 8, 1, KVT_COLLIDE_FP), 0);
    entry = kvt_index_insert(&index, fp_of(&index, 1));
    /* Two keys, one entry: telling them apart is the business of whoever holds the full key. */
    assert_int_equal(kvt_index_find(&index, fp_of(&index, 2)), entry);
    kvt_index_destroy(&index);
}

static void test_seed_is_secret(void **state)
{
    struct kvt_index a, b;
    struct kvt_fp fa, fb;

    (void)state;
    assert_int_equal(kvt_index_init(&a, 8, 1, KVT_COLLIDE_NONE), 0);
    assert_int_equal(kvt_index_init(&b, 8, 2, KVT_COLLIDE_NONE), 0);
    fa = fp_of(&a, 7);
    fb = fp_of(&b, 7);
    assert_true(fa.word[0] != fb.word[0] && fa.word[1] != fb.word[1]);
    kvt_index_destroy(&a);
    kvt_index_destroy(&b);
}

static void test_batch_agrees(void **state)
{
    enum { N = 1000 };
    struct kvt_rng rng = {test_seed()};
    struct kvt_fp fps[N];
    uint32_t found[N];

    (void)state;
    for (int collide = KVT_COLLIDE_NONE; collide <= KVT_COLLIDE_HOME; collide++) {
        struct kvt_index index;

        assert_int_equal(kvt_index_init(&index, N, rng.state, collide), 0);
        for (uint32_t i = 0; i < N; i++) {
            fps[i] = fp_of(&index, i);
            if (kvt_rng_below(&rng, 3))
                assert_true(kvt_index_insert(&index, fps[i]) != KVT_INDEX_NONE);
        }
        for (uint32_t n = 0; n < N; n += 1 + n * 2) { /* sizes around and far above a batch */
            kvt_index_find_batch(&index, fps, n, found);
            for (uint32_t i = 0; i < n; i++)
                assert_int_equal(found[i], kvt_index_find(&index, fps[i]));
        }
        kvt_index_destroy(&index);
    }
}

/* Random forest: links, slots and removals, with the counts checked by kvt_index_check(). */
static void test_links(void **state)
{
    enum { N = 400 };
    struct kvt_rng rng = {test_seed()};
    struct kvt_index index;
    uint32_t refused = 0, linked = 0;

    (void)state;
    assert_int_equal(kvt_index_init(&index, N, 3, KVT_COLLIDE_NONE), 0);
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(kvt_index_insert(&index, fp_of(&index, i)), i);
    for (uint32_t step = 0; step < 60000; step++) {
        uint32_t a = (uint32_t)kvt_rng_below(&rng, N);
        uint32_t b = (uint32_t)kvt_rng_below(&rng, N);
        struct kvt_index_entry *e = kvt_index_at(&index, a);

        switch (kvt_rng_below(&rng, 4)) {
        case 0:
        case 1:
            if (e->parent != KVT_INDEX_NONE)
                break;
            if (kvt_index_link(&index, a, b, UINT32_MAX))
                linked++;
            else
                refused++;
            break;
        case 2:
            kvt_index_unlink(&index, a);
            break;
        default:
            kvt_index_set_slot(&index, a, e->slot == KVT_INDEX_NONE ? b : KVT_INDEX_NONE);
        }
        if (step % 5000 == 0)
            expect_sound(&index);
    }
    assert_true(linked > 1000 && refused > 20);
    /* No cycle: every walk to the root ends. */
    for (uint32_t i = 0; i < N; i++) {
        uint32_t steps = 0;

        for (uint32_t up = i; up != KVT_INDEX_NONE; up = kvt_index_at(&index, up)->parent)
            assert_true(++steps <= N);
    }
    expect_sound(&index);
    kvt_index_destroy(&index);
}

static void test_link_refusals(void **state)
{
    struct kvt_index index;

    (void)state;
    assert_int_equal(kvt_index_init(&index, 8, 3, KVT_COLLIDE_NONE), 0);
    for (uint32_t i = 0; i < 7; i++)
        assert_int_equal(kvt_index_insert(&index, fp_of(&index, i)), i);
    assert_false(kvt_index_link(&index, 0, 0, 100));
    assert_true(kvt_index_link(&index, 1, 0, 100));
    assert_true(kvt_index_link(&index, 2, 1, 100));
    assert_false(kvt_index_link(&index, 0, 2, 100)); /* 0 <- 1 <- 2 <- 0 */
    assert_true(kvt_index_link(&index, 3, 2, 0));    /* childless: no walk is needed */
    assert_true(kvt_index_link(&index, 5, 4, 0));
    assert_true(kvt_index_link(&index, 6, 5, 0));
    assert_false(kvt_index_link(&index, 0, 6, 1)); /* a longer walk than allowed is a refusal */
    assert_true(kvt_index_link(&index, 0, 6, 2));
    expect_sound(&index);
    kvt_index_destroy(&index);
}

static void test_limits(void **state)
{
    struct kvt_index index;

    (void)state;
    assert_int_equal(kvt_index_init(&index, KVT_INDEX_CAPACITY_MAX + 1, 1, 0), KVT_E_LIMIT);
    assert_int_equal(kvt_index_init(&index, 0, 1, 0), 0);
    assert_true(index.capacity >= 1);
    assert_int_equal(kvt_index_grow(&index, 0), 0);
    kvt_index_destroy(&index);
}

static void test_c84_million(void **state)
{
    enum { N = 1000000 };
    struct kvt_index index;

    (void)state;
    assert_int_equal(kvt_index_init(&index, N, test_seed(), KVT_COLLIDE_NONE), 0);
    assert_true(kvt_index_bytes(&index) < 8u * N); /* untouched entries are not memory yet */
    for (uint32_t i = 0; i < N; i++)
        assert_true(kvt_index_insert(&index, fp_of(&index, i)) == i);
    assert_true(kvt_index_insert(&index, fp_of(&index, N)) == KVT_INDEX_NONE);
    assert_true(kvt_index_bytes(&index) <= 48ull * N);
    for (uint32_t i = 0; i < N; i += 7)
        assert_int_equal(kvt_index_find(&index, fp_of(&index, i)), i);
    for (uint32_t i = N; i < N + 100000; i++)
        assert_int_equal(kvt_index_find(&index, fp_of(&index, i)), KVT_INDEX_NONE);
    kvt_index_destroy(&index);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_churn_good_hash), cmocka_unit_test(test_churn_full),
        cmocka_unit_test(test_churn_one_home),  cmocka_unit_test(test_same_fingerprint),
        cmocka_unit_test(test_seed_is_secret),  cmocka_unit_test(test_batch_agrees),
        cmocka_unit_test(test_links),           cmocka_unit_test(test_link_refusals),
        cmocka_unit_test(test_limits),          cmocka_unit_test(test_c84_million),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
