/* Failures from the field about lossy levels, seen through the cache: C67 C71 C73.
 *
 * Method: keys and values are made here (N(0,1) from a printed seed), stored and loaded by the
 * public functions, and compared in float64.
 */
#include "support/rig.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"

#define TOKENS 256u
#define DIM 128u
#define QUERIES 512u

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static double gauss(struct kvt_rng *rng)
{
    double u = (double)(kvt_rng_next(rng) >> 11) * 0x1p-53 + 0x1p-54;
    double v = (double)(kvt_rng_next(rng) >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* f16 of the values used here: normal or zero, rounded to nearest. */
static uint16_t to_f16(double x)
{
    if (x == 0)
        return 0;
    int exponent;
    double mantissa = frexp(fabs(x), &exponent); /* [0.5, 1) */
    int biased = exponent - 1 + 15;
    uint16_t sign = x < 0 ? 0x8000 : 0;
    if (biased <= 0)
        return sign | (uint16_t)lrint(ldexp(fabs(x), 24));
    long bits = lrint(ldexp(mantissa * 2 - 1, 10)) + ((long)biased << 10);
    return (uint16_t)(sign | bits);
}

static double from_f16(uint16_t h)
{
    int exponent = h >> 10 & 31;
    double m = exponent ? ldexp(1024 + (h & 1023), exponent - 25) : ldexp(h & 1023, -24);
    return h & 0x8000 ? -m : m;
}

static uint16_t *element(uint32_t part, uint32_t token, uint32_t i)
{
    uint32_t page = token / rig.shape.tokens;
    return (uint16_t *)(void *)((uint8_t *)rig.places[part].base +
                                page * rig.places[part].stride_block +
                                token % rig.shape.tokens * rig.places[part].stride_token + i * 2);
}

static void read_part(uint32_t part, double *out)
{
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t i = 0; i < DIM; i++)
            out[t * DIM + i] = from_f16(*element(part, t, i));
}

/* Sum of p * log(p / q) over softmax attention of one query. */
static double attention_kl(const double *exact, const double *coded, const double *query)
{
    static double a[TOKENS], b[TOKENS];
    double max_a = -INFINITY, max_b = -INFINITY, sum_a = 0, sum_b = 0, kl = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        a[t] = b[t] = 0;
        for (uint32_t i = 0; i < DIM; i++) {
            a[t] += query[i] * exact[t * DIM + i];
            b[t] += query[i] * coded[t * DIM + i];
        }
        a[t] /= sqrt(DIM);
        b[t] /= sqrt(DIM);
        max_a = fmax(max_a, a[t]);
        max_b = fmax(max_b, b[t]);
    }
    for (uint32_t t = 0; t < TOKENS; t++) {
        sum_a += exp(a[t] - max_a);
        sum_b += exp(b[t] - max_b);
    }
    for (uint32_t t = 0; t < TOKENS; t++) {
        double log_p = a[t] - max_a - log(sum_a), log_q = b[t] - max_b - log(sum_b);
        kl += exp(log_p) * (log_p - log_q);
    }
    return kl;
}

/* Store the TOKENS tokens of the pool's pages as one chain after position 0, forget, load. */
static void through_the_cache(int level)
{
    enum { n = TOKENS / 16 };
    struct kvt_key keys[n];
    uint32_t ids[n];
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .first_pos = 16, .level = level};
    struct kvt_lookup_opts above = {.struct_size = sizeof(above), .min_level = level + 1};
    struct kvt_req *req;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(i);
        ids[i] = i;
    }
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, n, &opts, &req), 0);
    kvt_req_free(req);
    assert_int_equal(kvt_lookup(rig.ns, keys, n, NULL, NULL), n);
    for (uint32_t i = 0; i < n; i++) /* nothing had to go up a level */
        assert_int_equal(kvt_lookup(rig.ns, keys + i, 1, &above, NULL), 0);
    for (uint32_t i = 0; i < n; i++)
        rig_poison(&rig, i, 0xa5);
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, n, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvt_req_status(req, NULL)[i], 0);
    kvt_req_free(req);
}

static void test_c67_an_offset_channel_does_not_drown_the_others(void **state)
{
    struct rig_shape shape = {.layers = 1,
                              .heads = 1,
                              .dim = DIM,
                              .tokens = 16,
                              .pages = TOKENS / 16,
                              .dtype = KVT_DTYPE_F16};
    static double exact[TOKENS * DIM], coded[TOKENS * DIM], query[DIM];
    struct kvt_rng rng = {rig_seed()};
    (void)state;
    rig_init(&rig, &shape, "dram=8MiB,level=kv4", NULL);
    rig_open(&rig);
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t i = 0; i < DIM; i++) {
            *element(0, t, i) = to_f16(gauss(&rng) + (i == 7 ? 600 : 0));
            *element(1, t, i) = to_f16(gauss(&rng));
        }
    }
    read_part(0, exact);
    through_the_cache(KVT_LEVEL_KV4);
    read_part(0, coded);
    double error = 0, energy = 0, kl = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t i = 0; i < DIM; i++) {
            double d = exact[t * DIM + i] - coded[t * DIM + i];
            error += i == 7 ? 0 : d * d;
            energy += i == 7 ? 0 : exact[t * DIM + i] * exact[t * DIM + i];
        }
    }
    for (uint32_t q = 0; q < QUERIES; q++) {
        for (uint32_t i = 0; i < DIM; i++)
            query[i] = gauss(&rng);
        kl += attention_kl(exact, coded, query) / QUERIES;
    }
    printf("           relative error %.4f, attention KL %.5f\n", sqrt(error / energy), kl);
    assert_true(sqrt(error / energy) <= 0.12);
    assert_true(kl <= 0.008);
}

/* 8 KV heads of 128, 32 layers: a block of 16 tokens is 2 MiB in the engine. */
static struct rig_shape shape_8b(uint32_t pages)
{
    return (struct rig_shape){.layers = 32,
                              .heads = 8,
                              .dim = 128,
                              .tokens = 16,
                              .pages = pages,
                              .dtype = KVT_DTYPE_BF16};
}

/* Store blocks [from, to) of the chain; their pages hold the tokens already. */
static void append(uint32_t from, uint32_t to)
{
    struct kvt_key keys[16] = {{{0}, 0, 0, 0, 0}}, parent = rig_key(from ? from - 1 : 0);
    uint32_t ids[16] = {0}, n = to - from;
    struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                  .first_pos = 16 + from * 16,
                                  .parent = from ? &parent : NULL,
                                  .level = KVT_LEVEL_INT4};
    struct kvt_req *req;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(from + i);
        ids[i] = from + i;
    }
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(kvt_req_status(req, NULL)[i], 0);
    kvt_req_free(req);
}

static void load_all(uint8_t *out)
{
    struct kvt_key keys[16];
    uint32_t ids[16];
    struct kvt_req *req;
    for (uint32_t i = 0; i < 16; i++) {
        keys[i] = rig_key(i);
        ids[i] = i;
        rig_poison(&rig, i, 0xa5);
    }
    assert_int_equal(kvt_load(rig.ns, rig.pool, keys, ids, 16, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < 16; i++) {
        assert_int_equal(kvt_req_status(req, NULL)[i], 0);
        rig_page_bytes(&rig, i, out + i * rig_block_bytes(&rig));
    }
    kvt_req_free(req);
}

/* 256 tokens appended one by one: a block is stored when its last token is there. */
static void test_c71_many_appends_store_what_one_put_does(void **state)
{
    struct rig_shape shape = shape_8b(16);
    (void)state;
    rig_init(&rig, &shape, "dram=96MiB,guard=off", "1GiB");
    rig_open(&rig);
    size_t bytes = rig_block_bytes(&rig) * 16;
    uint8_t *one = malloc(bytes), *many = malloc(bytes);
    for (uint32_t i = 0; i < 16; i++)
        rig_fill_smooth(&rig, i, i);
    append(0, 16);
    load_all(one);
    assert_int_equal(kvt_purge(rig.ns, NULL, 0), 16);
    uint64_t logical = rig_stat(&rig, "client.store_logical_bytes");
    uint64_t stored = rig_stat(&rig, "client.store_bytes");
    uint32_t ids[16];
    for (uint32_t i = 0; i < 16; i++) {
        rig_fill_smooth(&rig, i, i);
        ids[i] = i;
    }
    assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, 16), 0);
    for (uint32_t token = 1; token <= 256; token++)
        if (token % 16 == 0)
            append(token / 16 - 1, token / 16);
    load_all(many);
    assert_memory_equal(one, many, bytes);
    assert_int_equal(rig_stat(&rig, "client.store_logical_bytes"), 2 * logical);
    assert_int_equal(rig_stat(&rig, "client.store_bytes"), 2 * stored);
    assert_int_equal(logical, bytes);
    printf("           int4 ratio %.3f\n", (double)logical / (double)stored);
    assert_true((double)logical / (double)stored >= 3.5);
    /* and on disk: what was written, headers of batches and segments included */
    assert_int_equal(kvt_flush(rig.cache), 0);
    double written = (double)rig_stat(&rig, "disk.written_bytes");
    double blocks = (double)rig_stat(&rig, "disk.written_blocks");
    double record = (double)kvt_ns_record_bytes(rig.ns, 0, KVT_LEVEL_INT4);
    assert_true(written >= blocks * record && written <= blocks * record * 1.01 + 16384);
    free(one);
    free(many);
}

/* Other blocks push what they can out of DRAM, and a restart the rest; back from disk; ten times.
 */
static void cycle_ten_times(int level, bool exact_bits)
{
    struct rig_shape shape = rig_shape_small(16);
    rig_init(&rig, &shape, "dram=256KiB,staging=128KiB", "32MiB");
    rig_open(&rig);
    size_t bytes = rig_block_bytes(&rig) * 16;
    uint8_t *original = malloc(bytes), *first = malloc(bytes), *again = malloc(bytes);
    for (uint32_t i = 0; i < 16; i++) {
        rig_fill_smooth(&rig, i, i);
        rig_page_bytes(&rig, i, original + i * rig_block_bytes(&rig));
    }
    struct kvt_key keys[16];
    uint32_t ids[16];
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .first_pos = 16, .level = level};
    for (uint32_t i = 0; i < 16; i++) {
        keys[i] = rig_key(i);
        ids[i] = i;
    }
    for (uint32_t i = 0; i < 16; i++) { /* one at a time: DRAM holds about ten raw records */
        struct kvt_req *req;
        opts.first_pos = 16 + i * 16;
        opts.parent = i ? &keys[i - 1] : NULL;
        assert_int_equal(kvt_store(rig.ns, rig.pool, keys + i, ids + i, 1, &opts, &req), 0);
        assert_int_equal(kvt_req_wait(req, -1), 1);
        assert_int_equal(kvt_req_status(req, NULL)[0], 0);
        kvt_req_free(req);
        assert_int_equal(kvt_flush(rig.cache), 0);
    }
    load_all(first);
    if (exact_bits)
        assert_memory_equal(first, original, bytes);
    for (int cycle = 0; cycle < 10; cycle++) {
        struct kvt_req *req;
        /* the engine stores its pages again (they are there) and others push them out */
        assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, 16, &opts, &req), 0);
        assert_int_equal(kvt_req_wait(req, -1), 1);
        kvt_req_free(req);
        for (uint64_t seed = 0; seed < 40; seed++) {
            (void)rig_store(&rig, 1000 + (uint64_t)cycle * 100 + seed, 1, 0, NULL);
            assert_int_equal(kvt_flush(rig.cache), 0);
        }
        load_all(again);
        assert_memory_equal(again, first, bytes);
        rig_reopen(&rig); /* what stayed in DRAM is forgotten too */
        load_all(again);
        assert_memory_equal(again, first, bytes);
        assert_int_equal(rig_stat(&rig, "load.granted_disk"), 16);
    }
    free(original);
    free(first);
    free(again);
}

static void test_c73_ten_cycles_do_not_wear_a_block_out(void **state)
{
    (void)state;
    cycle_ten_times(KVT_LEVEL_KV4, false);
}

static void test_c73_lossless_cycles_are_bit_exact(void **state)
{
    (void)state;
    cycle_ten_times(KVT_LEVEL_RAW, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c67_an_offset_channel_does_not_drown_the_others, tear_down),
        cmocka_unit_test_teardown(test_c71_many_appends_store_what_one_put_does, tear_down),
        cmocka_unit_test_teardown(test_c73_ten_cycles_do_not_wear_a_block_out, tear_down),
        cmocka_unit_test_teardown(test_c73_lossless_cycles_are_bit_exact, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
