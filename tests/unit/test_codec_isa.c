/* Goal:   every instruction set of this machine gives the scalar reference's bits, for any input,
 * in any floating-point mode of the host; and the choice of set obeys the environment. Method: more
 * than 10^6 rows of hostile values (zeros, constants, subnormals, huge, NaN, Inf, ties, offsets,
 * wild tokens, random bits) over all levels, dtypes, pieces and strides, coded by each set and
 * compared byte by byte, guard energies included; then random bytes, decoded by each. The seed is
 * printed; KVT_TEST_SEED=N repeats a run. Sanitizer builds do a tenth.
 */
#include <fenv.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "unit/codec_support.h"

#define TOKENS KVT_TILE_TOKENS
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TILES_PER_CASE 60u
#else
#define TILES_PER_CASE 560u /* x 120 cases x 16 rows: 1,075,200 rows */
#endif

static uint64_t seed;
static const struct kvt_codec_kernels *sets[8];
static size_t set_count;

enum pattern {
    ZEROS,
    CONSTANT,
    SMALL_INTEGERS, /* many ties */
    NORMAL,
    SCALED,     /* the whole tile by a power of two, up to the limits */
    TINY,       /* subnormals */
    WILD_ROWS,  /* each row by its own power of two */
    OFFSETS,    /* some channels far off */
    SPARSE,     /* one element in eight */
    NON_FINITE, /* a few NaN and Inf */
    RANDOM_BITS,
    PATTERNS
};

static float pattern_value(enum pattern pattern, struct kvt_rng *rng, double tile, double row,
                           uint32_t i)
{
    switch (pattern) {
    case ZEROS:
        return kvt_rng_below(rng, 16) == 0 ? -0.0f : 0.0f;
    case CONSTANT:
        return (float)(3.5 * tile);
    case SMALL_INTEGERS:
        return (float)(int)kvt_rng_below(rng, 7) - 3.0f;
    case SCALED:
    case TINY:
        return (float)(codec_normal(rng) * tile);
    case WILD_ROWS:
        return (float)(codec_normal(rng) * row);
    case OFFSETS:
        return (float)(codec_normal(rng) + (i % 5 == 0 ? 100.0 * (i % 3) - 60.0 : 0.0));
    case SPARSE:
        return kvt_rng_below(rng, 8) ? 0.0f : (float)codec_normal(rng);
    case NON_FINITE:
        if (kvt_rng_below(rng, 600) == 0)
            return kvt_rng_below(rng, 3) ? (kvt_rng_below(rng, 2) ? INFINITY : -INFINITY) : NAN;
        return (float)codec_normal(rng);
    default:
        return (float)codec_normal(rng);
    }
}

static void fill_tile(struct kvt_rng *rng, enum pattern pattern, int dtype, uint32_t d,
                      size_t stride, char *rows)
{
    double tile = 1.0;
    if (pattern == SCALED || pattern == CONSTANT)
        tile = exp2((codec_uniform(rng) - 0.5) * 252.0);
    else if (pattern == TINY)
        tile = exp2(-100.0 - 50.0 * codec_uniform(rng));
    for (uint32_t t = 0; t < TOKENS; t++) {
        double row = exp2((codec_uniform(rng) - 0.5) * 60.0);
        for (uint32_t i = 0; i < d; i++) {
            char *at = rows + t * stride + i * kvt_dtype_bytes(dtype);
            uint64_t bits = kvt_rng_next(rng);
            if (pattern == RANDOM_BITS)
                memcpy(at, &bits, kvt_dtype_bytes(dtype));
            else
                codec_store(dtype, at, pattern_value(pattern, rng, tile, row, i));
        }
    }
}

struct one_case {
    struct kvt_piece piece;
    size_t stride;
    size_t row_bytes;
    int want_energy;
};

/* rows: exactly 16 strides, less the gap after the last row: so a sanitizer sees any overrun. */
static int check_encode(const struct one_case *c, const char *rows)
{
    uint8_t *want = malloc(c->piece.bytes), *got = malloc(c->piece.bytes);
    struct kvt_tile_energy want_energy, got_energy;
    memset(want, 0x55, c->piece.bytes);
    memset(&want_energy, 0, sizeof(want_energy));
    int status = kvt_codec_scalar.encode(&c->piece, rows, c->stride, want,
                                         c->want_energy ? &want_energy : NULL);
    for (size_t s = 0; s < set_count; s++) {
        memset(got, 0xaa, c->piece.bytes);
        memset(&got_energy, 0, sizeof(got_energy));
        assert_int_equal(
            sets[s]->encode(&c->piece, rows, c->stride, got, c->want_energy ? &got_energy : NULL),
            status);
        if (status != 0)
            continue;
        assert_memory_equal(want, got, c->piece.bytes);
        assert_memory_equal(&want_energy, &got_energy, sizeof(got_energy));
    }
    free(want);
    free(got);
    return status;
}

static void check_centred(const struct one_case *c, const char *rows)
{
    float want[TOKENS], got[TOKENS];
    kvt_codec_scalar.centred(&c->piece, rows, c->stride, want);
    for (size_t s = 0; s < set_count; s++) {
        sets[s]->centred(&c->piece, rows, c->stride, got);
        assert_memory_equal(want, got, sizeof(got));
    }
}

static void check_decode(const struct one_case *c, const uint8_t *payload)
{
    size_t bytes = c->stride * (TOKENS - 1) + c->row_bytes;
    char *want = malloc(bytes), *got = malloc(bytes);
    memset(want, 0x77, bytes);
    kvt_codec_scalar.decode(&c->piece, payload, want, c->stride);
    for (size_t s = 0; s < set_count; s++) {
        memset(got, 0x77, bytes);
        sets[s]->decode(&c->piece, payload, got, c->stride);
        assert_memory_equal(want, got, bytes);
    }
    free(want);
    free(got);
}

/* Random bytes; scales and offsets mostly in a sane range, so that products matter. */
static void fill_payload(struct kvt_rng *rng, const struct kvt_piece *piece, uint8_t *payload)
{
    int wild = kvt_rng_below(rng, 3) == 0;
    for (uint32_t i = 0; i < piece->bytes; i++)
        payload[i] = (uint8_t)kvt_rng_next(rng);
    for (uint32_t t = 0; t < TOKENS && !wild; t++)
        payload[piece->scales_at + 2 * t + 1] = (uint8_t)(0x38 + kvt_rng_below(rng, 9));
    for (uint32_t k = 0; k < piece->offsets && !wild; k++)
        payload[piece->offsets_at + 2 * k + 1] =
            (uint8_t)((0x38 + kvt_rng_below(rng, 9)) | (kvt_rng_next(rng) & 0x80));
}

static void check_case(struct kvt_rng *rng, int level, int dtype, int key, uint32_t d,
                       uint64_t *rows_done, uint64_t *refused)
{
    struct one_case c = {.row_bytes = d * kvt_dtype_bytes(dtype)};
    kvt_piece_init(&c.piece, level, dtype, key, d);
    for (uint32_t n = 0; n < TILES_PER_CASE; n++) {
        enum pattern pattern = (enum pattern)kvt_rng_below(rng, PATTERNS);
        c.stride = c.row_bytes + kvt_dtype_bytes(dtype) * kvt_rng_below(rng, 3);
        c.want_energy = c.piece.offsets > 0 && n % 4 != 0;
        char *rows = malloc(c.stride * (TOKENS - 1) + c.row_bytes);
        uint8_t *payload = malloc(c.piece.bytes);
        for (uint32_t t = 0; t + 1 < TOKENS; t++)
            memset(rows + t * c.stride, 0x13, c.stride);
        fill_tile(rng, pattern, dtype, d, c.stride, rows);
        *refused += check_encode(&c, rows) != 0;
        if (c.piece.offsets > 0 && pattern != NON_FINITE && pattern != RANDOM_BITS)
            check_centred(&c, rows);
        fill_payload(rng, &c.piece, payload);
        check_decode(&c, payload);
        *rows_done += TOKENS;
        free(rows);
        free(payload);
    }
}

static void test_c75_sets_agree(void **state)
{
    (void)state;
    struct kvt_rng rng = {seed};
    uint64_t rows = 0, refused = 0;
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_KV8; level++)
        for (int dtype = KVT_DTYPE_BF16; dtype <= KVT_DTYPE_F32; dtype++)
            for (int key = 0; key < 2; key++)
                for (uint32_t d = 16; d <= 128; d *= 2)
                    check_case(&rng, level, dtype, key, d, &rows, &refused);
    print_message("%zu sets, %llu rows, %llu tiles refused\n", set_count, (unsigned long long)rows,
                  (unsigned long long)refused);
    assert_true(refused > 0 && refused < rows / TOKENS / 2);
}

/* Blocks of every head_dim, both parts, in two stride orders: payload, status, report and decoded
 * values of each set. */
static void check_block(int level, int dtype, uint32_t head_dim, int order)
{
    struct codec_pool pool, copy;
    codec_pool_make(&pool, dtype, head_dim, 1, 16, 1, order);
    codec_pool_make(&copy, dtype, head_dim, 1, 16, 1, order);
    codec_pool_fill_normal(&pool, seed + head_dim, 2.0);
    size_t n = kvt_payload_bytes(&pool.layout, 0, level);
    uint8_t *want = malloc(n), *got = malloc(n), *decoded = malloc(2 * pool.part_bytes);
    struct kvt_encode_report want_report, report;
    assert_int_equal(kvt_encode_block_by(&kvt_codec_scalar, &pool.layout, 0, level, &pool.desc, 0,
                                         want, n, 1, &want_report),
                     0);
    assert_int_equal(
        kvt_decode_block_by(&kvt_codec_scalar, &pool.layout, 0, level, want, n, &copy.desc, 0), 0);
    memcpy(decoded, copy.memory + CODEC_RED, 2 * pool.part_bytes);
    for (size_t s = 0; s < set_count; s++) {
        assert_int_equal(
            kvt_encode_block_by(sets[s], &pool.layout, 0, level, &pool.desc, 0, got, n, 1, &report),
            0);
        assert_memory_equal(want, got, n);
        assert_memory_equal(&want_report, &report, sizeof(report));
        memset(copy.memory + CODEC_RED, CODEC_RED_BYTE, 2 * pool.part_bytes);
        assert_int_equal(
            kvt_decode_block_by(sets[s], &pool.layout, 0, level, want, n, &copy.desc, 0), 0);
        assert_memory_equal(decoded, copy.memory + CODEC_RED, 2 * pool.part_bytes);
    }
    free(want);
    free(got);
    free(decoded);
    codec_pool_free(&pool);
    codec_pool_free(&copy);
}

static void test_c75_every_head_dim(void **state)
{
    (void)state;
    for (uint32_t dim = 16; dim <= KVT_HEAD_DIM_MAX; dim += 16)
        for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_KV8; level++)
            check_block(level, KVT_DTYPE_BF16 + (int)(dim / 16 + (uint32_t)level) % 3, dim,
                        dim % 48 == 0 ? CODEC_ORDER_BHET : CODEC_ORDER_BHTE);
}

#if defined(__x86_64__)
#include <xmmintrin.h>

/* A host with flush-to-zero, upward rounding and sticky flags: same bytes, and all of it given
 * back. */
static void test_host_mode(void **state)
{
    (void)state;
    struct codec_pool pool;
    size_t n;
    codec_pool_make(&pool, KVT_DTYPE_F32, 64, 1, 16, 2, 0);
    codec_pool_fill_normal(&pool, seed, 1e-38); /* subnormals within */
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_KV8; level++) {
        uint8_t *want = codec_encode(&pool, level, 0, &n), *got = malloc(n);
        float want_x, got_x;
        assert_int_equal(kvt_decode_block(&pool.layout, 0, level, want, n, &pool.desc, 1), 0);
        want_x = codec_get(&pool, 0, 1, 0, 3, 5);
        unsigned plain = _mm_getcsr(), strange = (plain | 0x8040u | 0x4000u | 0x2u) & ~0x2000u;
        _mm_setcsr(strange);
        int encoded = kvt_encode_block(&pool.layout, 0, level, &pool.desc, 0, got, n, 0, NULL);
        unsigned between = _mm_getcsr();
        int decoded = kvt_decode_block(&pool.layout, 0, level, got, n, &pool.desc, 1);
        unsigned after = _mm_getcsr();
        _mm_setcsr(plain);
        assert_int_equal(encoded, 0);
        assert_int_equal(decoded, 0);
        assert_int_equal(between, strange);
        assert_int_equal(after, strange);
        assert_memory_equal(want, got, n);
        got_x = codec_get(&pool, 0, 1, 0, 3, 5);
        assert_memory_equal(&want_x, &got_x, 4);
        free(want);
        free(got);
    }
    codec_pool_free(&pool);
}
#else
static void test_host_mode(void **state)
{
    (void)state;
    skip();
}
#endif

/* The choice is made at first use, so each try gets its own process. */
static int isa_is(const char *forced, const char *want)
{
    pid_t child = fork();
    if (child == 0) {
        if (forced != NULL)
            setenv("KVTIER_CODEC_ISA", forced, 1);
        else
            unsetenv("KVTIER_CODEC_ISA");
        _exit(strcmp(kvt_codec_isa(), want) == 0 ? 0 : 1);
    }
    int status = -1;
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void test_forced_isa(void **state)
{
    (void)state;
    const char *best = sets[set_count - 1]->name;
    assert_true(isa_is("scalar", "scalar"));
    assert_true(isa_is(NULL, best));
    assert_true(isa_is("", best));
    assert_true(isa_is("no-such-set", "scalar"));
    for (size_t i = 0; i < set_count; i++)
        assert_true(isa_is(sets[i]->name, sets[i]->name));
    assert_false(isa_is("scalar", "avx2"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forced_isa), /* first: before this process chooses */
        cmocka_unit_test(test_c75_sets_agree),
        cmocka_unit_test(test_c75_every_head_dim),
        cmocka_unit_test(test_host_mode),
    };
    const char *fixed = getenv("KVT_TEST_SEED");
    seed = fixed != NULL ? strtoull(fixed, NULL, 0) : kvt_rng_seed_os();
    set_count = kvt_codec_kernels_all(sets, KVT_ARRAY_LEN(sets));
    print_message("seed %#llx\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
