/* The automatic choice of level maps: after the first blocks, heads that the level cannot hold are
 * raised alone, or the whole level when they are many; it never sinks; what is asked for explicitly
 * lower stays lower; and blocks of a namespace that mostly fails do not all try the low level
 * first.
 *
 * Method: Gaussian pages in which the keys of chosen heads carry offsets in more channels than the
 * codec stores means for, so that the guard refuses them. What blocks were stored at is read from
 * counters, from minimum levels, and from which parts come back exact.
 */
#include "support/rig.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "client/client.h"
#include "kvtier/key.h"

#define LAYERS 4u
#define HEADS 4u
#define DIM 64u
#define TOKENS 16u
#define CHOICE 8u /* blocks that are looked at */

static struct rig rig;
static uint64_t next_seed;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static void start(const char *config)
{
    struct rig_shape shape = {.layers = LAYERS,
                              .heads = HEADS,
                              .dim = DIM,
                              .tokens = TOKENS,
                              .pages = 64,
                              .dtype = KVT_DTYPE_BF16};
    next_seed = 1000;
    rig_init(&rig, &shape, config, NULL);
    rig_open(&rig);
}

/* Add an offset to the keys of one head of a page, in 24 channels. */
static void ruin(uint32_t page, uint32_t layer, uint32_t head, float offset)
{
    const struct kvt_part_place *place = &rig.places[2 * layer];
    uint8_t *base = (uint8_t *)place->base + place->stride_block * page + place->stride_head * head;
    assert_int_equal(rig.parts[2 * layer].kind, KVT_PART_K);
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t e = 0; e < 24; e++) {
            uint8_t *at = base + t * place->stride_token + e * place->stride_elem;
            uint32_t bits = 0;
            float value;
            memcpy((uint8_t *)&bits + 2, at, 2);
            memcpy(&value, &bits, 4);
            value += offset;
            memcpy(&bits, &value, 4);
            memcpy(at, (uint8_t *)&bits + 2, 2);
        }
}

/* Store n blocks (pages 1..n) with `heads` ruined key heads each; a sequence of its own. Returns
 * the key number of the first. */
static uint64_t store(uint32_t n, uint32_t heads, int level)
{
    struct kvt_key keys[32], first = rig_key(next_seed);
    uint32_t ids[32], page0 = 0;
    struct kvt_req *req;
    uint64_t seed = next_seed + 1;
    rig_fill_smooth(&rig, 0, next_seed);
    assert_int_equal(kvt_store(rig.ns, rig.pool, &first, &page0, 1, NULL, &req), 0);
    kvt_req_free(req);
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(seed + i);
        ids[i] = 1 + i;
        rig_fill_smooth(&rig, ids[i], seed + i);
        for (uint32_t h = 0; h < heads; h++)
            ruin(ids[i], h / HEADS, h % HEADS, 12.0f);
    }
    assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, n), 0);
    struct kvt_store_opts opts = {
        .struct_size = sizeof(opts), .parent = &first, .first_pos = TOKENS, .level = level};
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvt_req_status(req, NULL)[i], 0);
    kvt_req_free(req);
    next_seed += n + 1;
    return seed;
}

static long lookup(uint64_t seed, uint32_t n, int min_level)
{
    struct kvt_key keys[32];
    struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .min_level = min_level};
    for (uint32_t i = 0; i < n; i++)
        keys[i] = rig_key(seed + i);
    return kvt_lookup(rig.ns, keys, n, &opts, NULL);
}

/* Signal-to-noise ratio of one key head of a loaded block, around nothing but zero. */
static double error_of(uint32_t page, uint32_t stored_page, uint32_t layer, uint32_t head)
{
    const struct kvt_part_place *place = &rig.places[2 * layer];
    double sum = 0;
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t e = 0; e < DIM; e++) {
            float value[2];
            for (int k = 0; k < 2; k++) {
                const uint8_t *at =
                    (const uint8_t *)place->base + place->stride_block * (k ? page : stored_page) +
                    place->stride_head * head + place->stride_token * t + place->stride_elem * e;
                uint32_t bits = 0;
                memcpy((uint8_t *)&bits + 2, at, 2);
                memcpy(&value[k], &bits, 4);
            }
            sum += (value[0] - value[1]) * (double)(value[0] - value[1]);
        }
    return sum / (TOKENS * DIM);
}

static void good_blocks_change_nothing(void **state)
{
    (void)state;
    start("dram=16MiB,threads=1");
    size_t record = kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4);
    uint64_t seed = store(20, 0, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "store.judged"), CHOICE);
    assert_int_equal(rig_stat(&rig, "store.heads_raised"), 0);
    assert_int_equal(rig_stat(&rig, "store.levels_raised"), 0);
    assert_int_equal(rig_stat(&rig, "store.escalated"), 0);
    assert_int_equal(kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4), record);
    assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV4), 20);
    assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV5), 0);
}

static void a_few_bad_heads_are_raised_alone(void **state)
{
    (void)state;
    start("dram=16MiB,threads=1");
    store(CHOICE, 2, KVT_LEVEL_DEFAULT); /* heads 0 and 1 of layer 0 */
    uint64_t escalated = rig_stat(&rig, "store.escalated");
    assert_true(escalated >= CHOICE - 1); /* each tried the low level first */
    assert_int_equal(rig_stat(&rig, "store.heads_raised"), 2);
    assert_int_equal(rig_stat(&rig, "store.levels_raised"), 0);

    uint64_t seed = store(20, 2, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "store.escalated"), escalated); /* none any more */
    assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV4), 20);
    assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV5), 0); /* the rest is still kv4 */
    assert_true(kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4) <
                kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV6));

    /* The ruined heads come back with small errors: much smaller than offset and kv4 would give. */
    struct kvt_key key = rig_key(seed);
    uint32_t page = 60;
    struct kvt_req *req;
    assert_int_equal(kvt_load(rig.ns, rig.pool, &key, &page, 1, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], 0);
    kvt_req_free(req);
    for (uint32_t head = 0; head < HEADS; head++) {
        double error = error_of(page, 1, 0, head);
        printf("           head %u: mean square error %.4f\n", head, error);
        assert_true(error < 0.05);
    }
}

static void many_bad_heads_raise_the_level(void **state)
{
    (void)state;
    start("dram=16MiB,threads=1");
    store(CHOICE, LAYERS * HEADS, KVT_LEVEL_DEFAULT);
    uint64_t escalated = rig_stat(&rig, "store.escalated");
    assert_int_equal(rig_stat(&rig, "store.levels_raised"), 1);
    uint64_t seed = store(20, LAYERS * HEADS, KVT_LEVEL_DEFAULT);
    /* A namespace whose blocks all fail does not try the low level for each of them. */
    assert_true(rig_stat(&rig, "store.escalated") - escalated <= 2);
    assert_true(lookup(seed, 20, KVT_LEVEL_KV5) == 20);
    /* It does not sink again for blocks that would do with less, nor for a level asked for that
     * was found to be too low; int4, which has no guard, is what it is. */
    seed = store(20, 0, KVT_LEVEL_DEFAULT);
    assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV5), 20);
    seed = store(20, 0, KVT_LEVEL_KV4);
    assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV5), 20);
    seed = store(20, 0, KVT_LEVEL_INT4);
    assert_int_equal(lookup(seed, 20, KVT_LEVEL_INT4), 20);
    assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV4), 0);
    assert_int_equal(rig_stat(&rig, "store.judged"), CHOICE);
}

static void no_guard_no_choice(void **state)
{
    static const char *const configs[] = {"dram=16MiB,guard=off", "dram=16MiB,level=raw",
                                          "dram=16MiB,level=int4"};
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(configs); i++) {
        start(configs[i]);
        store(20, 3, KVT_LEVEL_DEFAULT);
        assert_int_equal(rig_stat(&rig, "store.judged"), 0);
        assert_int_equal(rig_stat(&rig, "store.heads_raised"), 0);
        rig_free(&rig);
        memset(&rig, 0, sizeof(rig));
    }
}

static void blocks_at_other_levels_say_nothing(void **state)
{
    (void)state;
    start("dram=16MiB,threads=1");
    store(20, LAYERS * HEADS, KVT_LEVEL_KV8);
    store(20, LAYERS * HEADS, KVT_LEVEL_RAW);
    assert_int_equal(rig_stat(&rig, "store.judged"), 0);
}

/* What the first blocks did not show: later ones fail, most of them, and it is looked at again. */
static void it_is_chosen_again_when_most_blocks_fail(void **state)
{
    (void)state;
    start("dram=32MiB,threads=1");
    store(CHOICE, 0, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "store.judged"), CHOICE);
    for (int i = 0; i < 5; i++)
        store(20, 1, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "store.judged"), 2 * CHOICE);
    assert_int_equal(rig_stat(&rig, "store.heads_raised"), 1);
    uint64_t escalated = rig_stat(&rig, "store.escalated");
    store(20, 1, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "store.escalated"), escalated);
}

static void excluded_layers_do_not_count(void **state)
{
    (void)state;
    start("dram=16MiB,threads=1,exclude_layers=0-2");
    store(CHOICE, 3 * HEADS, KVT_LEVEL_DEFAULT); /* all of the ruined heads are raw anyway */
    assert_int_equal(rig_stat(&rig, "store.judged"), CHOICE);
    assert_int_equal(rig_stat(&rig, "store.escalated"), 0);
    assert_int_equal(rig_stat(&rig, "store.heads_raised"), 0);
    assert_int_equal(rig_stat(&rig, "store.levels_raised"), 0);
}

static void many_threads_choose_once(void **state)
{
    (void)state;
    start("dram=32MiB,threads=4");
    for (int i = 0; i < 6; i++)
        store(30, 2, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "store.judged"), CHOICE);
    assert_int_equal(rig_stat(&rig, "store.heads_raised"), 2);
    assert_int_equal(rig_stat(&rig, "client.bad_move"), 0);
}

/* ---- across restarts ------------------------------------------------------------------------ */

static void start_on_disk(const char *config)
{
    struct rig_shape shape = {.layers = LAYERS,
                              .heads = HEADS,
                              .dim = DIM,
                              .tokens = TOKENS,
                              .pages = 64,
                              .dtype = KVT_DTYPE_BF16};
    next_seed = 1000;
    rig_init(&rig, &shape, config, "64MiB");
    rig_open(&rig);
}

/* The first block after a restart is coded as the last one before it. */
static void what_was_chosen_is_remembered(void **state)
{
    static const struct {
        uint32_t ruined;
        bool heads, level; /* what rises */
    } cases[] = {{0, false, false}, {2, true, false}, {LAYERS * HEADS, false, true}};
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        start_on_disk("dram=16MiB,threads=1");
        size_t before = kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4);
        (void)store(20, cases[i].ruined, KVT_LEVEL_DEFAULT);
        size_t chosen = kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4);
        if (cases[i].level)
            assert_true(chosen > before);
        assert_int_equal(rig_stat(&rig, "store.heads_raised"), cases[i].heads ? 2 : 0);
        assert_int_equal(rig_stat(&rig, "store.levels_raised"), cases[i].level);
        for (int life = 0; life < 2; life++) {
            rig_reopen(&rig);
            assert_int_equal(kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4), chosen);
            uint64_t seed = store(20, cases[i].ruined, KVT_LEVEL_DEFAULT);
            assert_int_equal(rig_stat(&rig, "store.judged"), cases[i].ruined ? 0 : CHOICE);
            assert_int_equal(rig_stat(&rig, "store.escalated"), 0);
            assert_int_equal(rig_stat(&rig, "store.heads_raised"), 0);
            assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV4), 20);
            assert_int_equal(lookup(seed, 20, KVT_LEVEL_KV5), cases[i].level ? 20 : 0);
        }
        rig_free(&rig);
        memset(&rig, 0, sizeof(rig));
    }
}

/* A flush is enough: no orderly end is needed. Another one is looked for after a purge, or at
 * another level. */
static void what_is_forgotten(void **state)
{
    (void)state;
    start_on_disk("dram=16MiB,threads=1");
    (void)store(20, 2, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "store.heads_raised"), 2);
    assert_int_equal(kvt_flush(rig.cache), 0);
    uint64_t blocks = rig_stat(&rig, "index.blocks");
    assert_int_equal(blocks, 22); /* the first one, and what was chosen */
    assert_int_equal(rig_stat(&rig, "disk.blocks"), 22);
    assert_int_equal(kvt_purge(rig.ns, NULL, 0), 21);
    assert_int_equal(rig_stat(&rig, "index.blocks"), 0);
    rig_reopen(&rig);
    (void)store(20, 2, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "store.judged"), CHOICE);
    assert_int_equal(rig_stat(&rig, "store.heads_raised"), 2);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
}

/* Without a disk nothing outlives the process; without a guard nothing is chosen. */
static void nothing_is_remembered_for_nothing(void **state)
{
    (void)state;
    start("dram=16MiB,threads=1");
    assert_null(rig.ns->memo);
    assert_int_equal(rig_stat(&rig, "index.namespaces"), 1);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    start_on_disk("dram=16MiB,threads=1,guard=off");
    assert_null(rig.ns->memo);
    (void)store(20, 2, KVT_LEVEL_DEFAULT);
    assert_int_equal(rig_stat(&rig, "index.namespaces"), 1);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    start_on_disk("dram=16MiB,threads=1,level=raw");
    assert_null(rig.ns->memo);
}

/* What is kept is as long as the namespace's records, so that it does not change what the store
 * makes its tables for. */
static void its_record_is_not_the_shortest(void **state)
{
    (void)state;
    start_on_disk("dram=16MiB,threads=1");
    assert_non_null(rig.ns->memo);
    (void)store(20, 2, KVT_LEVEL_DEFAULT);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_int_equal(rig_stat(&rig, "index.namespaces"), 2);
    assert_int_equal(rig_stat(&rig, "load.miss"), 0);
}

/* A record of choices as somebody else may have made it: another version, or no friend. */
struct forged {
    uint32_t magic, version, entries;
    uint8_t configured, level, choices, reserved;
    uint8_t bounds[64];
};

/* Put it where the namespace of the rig looks for it. */
static void forge(const struct forged *forged, uint8_t choices)
{
    size_t bytes = 16u << 10;
    struct kvt_ns *side;
    struct kvt_pool *pool;
    struct kvt_req *req;
    while (bytes < kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_INT4))
        bytes *= 2;
    uint8_t *page = calloc(1, bytes);
    assert_non_null(page);
    memcpy(page, forged, sizeof(*forged));
    const struct kvt_part part = {.kind = KVT_PART_OPAQUE,
                                  .dtype = KVT_DTYPE_BYTE,
                                  .heads = (uint32_t)(bytes / 16384),
                                  .head_dim = 1024};
    const struct kvt_layout layout = {
        .struct_size = sizeof(layout), .block_tokens = 16, .part_count = 1, .parts = &part};
    const struct kvt_part_place place = {.base = page,
                                         .stride_block = (int64_t)bytes,
                                         .stride_head = 1024,
                                         .stride_token = (int64_t)part.heads * 1024,
                                         .stride_elem = 1};
    const struct kvt_pool_desc desc = {.struct_size = sizeof(desc),
                                       .device = KVT_DEVICE_HOST,
                                       .block_count = 1,
                                       .place_count = 1,
                                       .places = &place};
    struct kvt_identity identity;
    kvt_identity_init(&identity);
    identity.engine = "kvtier";
    identity.key_scheme = "kvtier-level-maps-v1";
    identity.model = "level maps of other namespaces";
    assert_int_equal(kvt_ns_open(rig.cache, &identity, &layout, &side), 0);
    assert_int_equal(kvt_pool_register(rig.cache, &layout, &desc, &pool), 0);
    struct kvt_key key = {.hash_len = KVT_NS_BYTES + 3};
    memcpy(key.hash, kvt_ns_id(rig.ns), KVT_NS_BYTES);
    key.hash[KVT_NS_BYTES + 2] = choices;
    uint32_t id = 0;
    assert_int_equal(kvt_store(side, pool, &key, &id, 1, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_status(req, NULL)[0], 0);
    kvt_req_free(req);
    kvt_pool_unregister(pool);
    kvt_ns_close(side);
    free(page);
}

static void what_makes_no_sense_is_not_adopted(void **state)
{
    const struct forged good = {.magic = 0x6d6d766bu,
                                .version = 1,
                                .entries = 2 * LAYERS * HEADS,
                                .configured = KVT_LEVEL_KV4,
                                .level = KVT_LEVEL_KV8,
                                .choices = 3};
    struct forged bad[8];
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++)
        bad[i] = good;
    bad[1].magic++;
    bad[2].version = 2;
    bad[3].entries--;
    bad[4].configured = KVT_LEVEL_KV5;
    bad[5].level = KVT_LEVEL_INT4; /* below what is configured */
    bad[6].level = KVT_LEVEL_RAW + 1;
    memset(bad[7].bounds, 0xff, sizeof(bad[7].bounds)); /* no such level */
    for (size_t i = 0; i < KVT_ARRAY_LEN(bad); i++) {
        start_on_disk("dram=16MiB,threads=1");
        size_t before = kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4);
        forge(&bad[i], i == 0 || i % 2 ? 3 : 4); /* 4: says that it is number 3 */
        rig_reopen(&rig);
        bool adopted = i == 0; /* so the others would have been, too */
        assert_int_equal(kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_KV4) != before, adopted);
        (void)store(10, 0, KVT_LEVEL_DEFAULT);
        assert_int_equal(rig_stat(&rig, "store.judged"), adopted ? 0 : CHOICE);
        rig_free(&rig);
        memset(&rig, 0, sizeof(rig));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(good_blocks_change_nothing, tear_down),
        cmocka_unit_test_teardown(a_few_bad_heads_are_raised_alone, tear_down),
        cmocka_unit_test_teardown(many_bad_heads_raise_the_level, tear_down),
        cmocka_unit_test_teardown(no_guard_no_choice, tear_down),
        cmocka_unit_test_teardown(blocks_at_other_levels_say_nothing, tear_down),
        cmocka_unit_test_teardown(it_is_chosen_again_when_most_blocks_fail, tear_down),
        cmocka_unit_test_teardown(excluded_layers_do_not_count, tear_down),
        cmocka_unit_test_teardown(many_threads_choose_once, tear_down),
        cmocka_unit_test_teardown(what_was_chosen_is_remembered, tear_down),
        cmocka_unit_test_teardown(what_is_forgotten, tear_down),
        cmocka_unit_test_teardown(nothing_is_remembered_for_nothing, tear_down),
        cmocka_unit_test_teardown(what_makes_no_sense_is_not_adopted, tear_down),
        cmocka_unit_test_teardown(its_record_is_not_the_shortest, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
