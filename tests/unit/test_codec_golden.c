/* Goal:   the coded bytes are those of format version 0, on every machine and with every set of
 *         instructions; and hostile payloads never read or write out of bounds.
 * Method: tests/golden/codec-v0.txt has a line for each configuration with the XXH3-64 of the
 * payload and of the decoded elements, made by the scalar reference, and one tile in full. The
 * inputs come from integers alone (docs/codec.md, "Golden vectors"), so anybody can make them.
 *         `test_codec_golden --write FILE` makes the file again. Hostile payloads are random bytes
 * in allocations of the exact size, decoded into pools with red zones.
 */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <xxhash.h>

#include "unit/codec_support.h"

#define GOLDEN_FILE KVT_GOLDEN_DIR "/codec-v0.txt"
#define LINE_BYTES 16384

static const uint32_t dims[] = {16, 32, 48, 64, 80, 96, 128, 192, 256, 576, 1024};
static const char *const dtypes[] = {"", "bf16", "f16", "f32"};

/* Sum of four 16-bit numbers less their mean, over 2^14: near N(0, 2.3), exact in float. Every
 * seventh channel of K has 24 added. Row-major: part, head, token, element. */
static void fill_golden(struct codec_pool *pool)
{
    struct kvt_rng rng = {0};
    CODEC_EACH(pool, p, b, h, t, e)
    {
        uint64_t word = kvt_rng_next(&rng);
        int sum = (int)(word & 0xffff) + (int)(word >> 16 & 0xffff) + (int)(word >> 32 & 0xffff) +
                  (int)(word >> 48);
        float x = (float)(sum - 2 * 0xffff) * 0x1p-14f;
        if (p == 0 && e % 7 == 3)
            x += 24.0f;
        codec_set(pool, p, b, h, t, e, x);
    }
}

static void make_line(const struct kvt_codec_kernels *set, int level, int dtype, uint32_t dim,
                      char *line)
{
    struct codec_pool pool;
    codec_pool_make(&pool, dtype, dim, 2, 32, 1, CODEC_ORDER_BHTE);
    if (dim == 576) { /* one latent row a token, K's place; V is left out */
        pool.parts[0].kind = KVT_PART_MLA;
        pool.parts[0].heads = 1;
        pool.layout.part_count = 1;
        pool.desc.place_count = 1;
    }
    fill_golden(&pool);
    size_t n = kvt_payload_bytes(&pool.layout, 0, level);
    uint8_t *payload = malloc(n);
    assert_int_equal(
        kvt_encode_block_by(set, &pool.layout, 0, level, &pool.desc, 0, payload, n, 0, NULL), 0);
    assert_int_equal(kvt_decode_block_by(set, &pool.layout, 0, level, payload, n, &pool.desc, 0),
                     0);
    XXH3_state_t *hash = XXH3_createState();
    XXH3_64bits_reset(hash);
    CODEC_EACH(&pool, p, b, h, t, e)
    {
        XXH3_64bits_update(hash, codec_element(&pool, p, b, h, t, e), kvt_dtype_bytes(dtype));
    }
    snprintf(line, LINE_BYTES, "%s %s %u %zu %016llx %016llx", kvt_level_name(level), dtypes[dtype],
             dim, n, (unsigned long long)XXH3_64bits(payload, n),
             (unsigned long long)XXH3_64bits_digest(hash));
    XXH3_freeState(hash);
    free(payload);
    codec_pool_free(&pool);
}

static void append_hex(char *line, const char *name, const void *bytes, size_t count)
{
    size_t at = strlen(line);
    at += (size_t)snprintf(line + at, LINE_BYTES - at, " %s ", name);
    for (size_t i = 0; i < count; i++, at += 2)
        snprintf(line + at, LINE_BYTES - at, "%02x", ((const uint8_t *)bytes)[i]);
}

/* One tile of K, d = 16, in full: input, payload, output. */
static void make_example(const struct kvt_codec_kernels *set, int level, char *line)
{
    struct kvt_piece piece;
    uint16_t rows[16 * 16];
    uint8_t payload[16 * 16 + 64];
    struct kvt_rng rng = {0};
    kvt_piece_init(&piece, level, KVT_DTYPE_BF16, 1, 16);
    for (uint32_t i = 0; i < 256; i++) {
        uint64_t word = kvt_rng_next(&rng);
        int sum = (int)(word & 0xffff) + (int)(word >> 16 & 0xffff) + (int)(word >> 32 & 0xffff) +
                  (int)(word >> 48);
        codec_store(KVT_DTYPE_BF16, &rows[i],
                    (float)(sum - 2 * 0xffff) * 0x1p-14f + (i % 16 % 7 == 3 ? 24.0f : 0.0f));
    }
    snprintf(line, LINE_BYTES, "example %s bf16 16", kvt_level_name(level));
    append_hex(line, "input", rows, sizeof(rows));
    assert_int_equal(set->encode(&piece, rows, 32, payload, NULL), 0);
    append_hex(line, "payload", payload, piece.bytes);
    set->decode(&piece, payload, rows, 32);
    append_hex(line, "output", rows, sizeof(rows));
}

/* Call `take` with each line of the file that the set gives. */
static void each_line(const struct kvt_codec_kernels *set, void (*take)(void *, const char *),
                      void *arg)
{
    static char line[LINE_BYTES];
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++)
        for (int dtype = KVT_DTYPE_BF16; dtype <= KVT_DTYPE_F32; dtype++)
            for (size_t i = 0; i < KVT_ARRAY_LEN(dims); i++) {
                if (dims[i] == 576 && level < KVT_LEVEL_KV8)
                    continue;
                make_line(set, level, dtype, dims[i], line);
                take(arg, line);
            }
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_KV8; level++) {
        make_example(set, level, line);
        take(arg, line);
    }
}

static void compare_line(void *arg, const char *line)
{
    static char want[LINE_BYTES];
    do
        assert_non_null(fgets(want, sizeof(want), arg));
    while (want[0] == '#');
    want[strcspn(want, "\n")] = '\0';
    assert_string_equal(want, line);
}

static void test_golden_vectors(void **state)
{
    (void)state;
    const struct kvt_codec_kernels *sets[8];
    size_t count = kvt_codec_kernels_all(sets, 8);
    for (size_t s = 0; s < count; s++) {
        char rest[8];
        FILE *file = fopen(GOLDEN_FILE, "r");
        assert_non_null(file);
        each_line(sets[s], compare_line, file);
        assert_null(fgets(rest, sizeof(rest), file));
        fclose(file);
    }
}

static void write_line(void *arg, const char *line)
{
    fprintf(arg, "%s\n", line);
}

static int write_golden(const char *path)
{
    FILE *file = fopen(path, "w");
    if (file == NULL)
        return 1;
    fprintf(file,
            "# Golden vectors of codec format version 0; docs/codec.md says how to read them.\n"
            "# level dtype head_dim payload_bytes xxh3(payload) xxh3(decoded elements)\n");
    each_line(&kvt_codec_scalar, write_line, file);
    return fclose(file) != 0;
}

/* A decode of any bytes: in bounds (red zones, sanitizer), finite or the dtype's infinity, the same
 * from every set, and nothing but the page is written. */
static void check_hostile(struct kvt_rng *rng, int level, int dtype, uint32_t dim, int order)
{
    const struct kvt_codec_kernels *sets[8];
    size_t count = kvt_codec_kernels_all(sets, 8);
    struct codec_pool pools[2];
    for (int i = 0; i < 2; i++)
        codec_pool_make(&pools[i], dtype, dim, 1, 16, 2, order);
    size_t n = kvt_payload_bytes(&pools[0].layout, 0, level);
    uint8_t *payload = malloc(n);
    for (size_t i = 0; i < n; i++)
        payload[i] = (uint8_t)(kvt_rng_below(rng, 8) ? kvt_rng_next(rng) : 0xff);
    for (size_t s = 0; s < count; s++) {
        struct codec_pool *pool = &pools[s > 0];
        memset(pool->memory + CODEC_RED, CODEC_RED_BYTE, 2 * pool->part_bytes);
        assert_int_equal(
            kvt_decode_block_by(sets[s], &pool->layout, 0, level, payload, n, &pool->desc, 1), 0);
        if (s > 0)
            assert_memory_equal(pools[0].memory, pools[1].memory, 2 * pool->part_bytes + CODEC_RED);
    }
    CODEC_EACH(&pools[0], p, b, h, t, e)
    {
        static const uint8_t red[4] = {CODEC_RED_BYTE, CODEC_RED_BYTE, CODEC_RED_BYTE,
                                       CODEC_RED_BYTE};
        if (b == 0)
            assert_memory_equal(codec_element(&pools[0], p, b, h, t, e), red,
                                kvt_dtype_bytes(dtype));
        else
            assert_false(isnan(codec_get(&pools[0], p, b, h, t, e)));
    }
    free(payload);
    for (int i = 0; i < 2; i++)
        codec_pool_free(&pools[i]);
}

static void test_hostile_payloads(void **state)
{
    (void)state;
    struct kvt_rng rng = {kvt_rng_seed_os()};
    print_message("seed %#llx\n", (unsigned long long)rng.state);
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_KV8; level++)
        for (int dtype = KVT_DTYPE_BF16; dtype <= KVT_DTYPE_F32; dtype++)
            for (size_t i = 0; i < KVT_ARRAY_LEN(dims); i++)
                for (int order = 0; order < CODEC_ORDERS; order++)
                    check_hostile(&rng, level, dtype, dims[i], order);
}

/* docs/codec.md, read by somebody else: a plain Python program that shares no code. */
static void test_documentation_is_enough(void **state)
{
    (void)state;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        execlp("python3", "python3", KVT_GOLDEN_DIR "/check_codec.py", (char *)NULL);
        _exit(127);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 127)
        skip(); /* no python3 */
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_vectors),
        cmocka_unit_test(test_documentation_is_enough),
        cmocka_unit_test(test_hostile_payloads),
    };
    if (argc == 3 && strcmp(argv[1], "--write") == 0)
        return write_golden(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
