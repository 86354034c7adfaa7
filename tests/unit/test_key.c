/* Chained token keys (C20, C21) against golden files made by an independent Python script.
 *
 * Goal:   keys are a function of salt, tokens, extras and block size alone, and of each of them.
 * Method: 1,000 token lists drawn by the same generator as golden/make_keys.py, in this process and
 * in others with another locale and address layout; the script itself under two hash seeds; then
 *         changes of one thing at a time.
 */
#include "kvtier/key.h"

#include "support/store_help.h"

#include <errno.h>
#include <locale.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "format/digest.h"

#define LISTS 1000
#define TOKENS_MAX 2000
#define SALT_MAX 40
#define EXTRA_MAX 48

struct list {
    uint32_t block;
    uint8_t salt[SALT_MAX];
    size_t salt_len;
    uint8_t extra_bytes[2][EXTRA_MAX];
    struct kvt_key_extra extras[2];
    size_t n_extras;
    uint32_t tokens[TOKENS_MAX];
    size_t n_tokens;
};

static void draw_bytes(struct kvt_rng *rng, uint8_t *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++)
        bytes[i] = (uint8_t)kvt_rng_below(rng, 256);
}

/* As token_list() of make_keys.py, draw by draw. */
static void draw_list(struct list *list, uint64_t number)
{
    static const uint32_t blocks[] = {16, 64, 128, 256, 1, 7};
    struct kvt_rng rng = {number};
    uint64_t vocabulary;

    list->block = blocks[kvt_rng_below(&rng, 6)];
    list->salt_len = kvt_rng_below(&rng, SALT_MAX);
    draw_bytes(&rng, list->salt, list->salt_len);
    list->n_extras = kvt_rng_below(&rng, 3);
    for (size_t i = 0; i < list->n_extras; i++) {
        list->extras[i].type = (uint32_t)kvt_rng_below(&rng, 1ull << 32);
        list->extras[i].len = (uint32_t)kvt_rng_below(&rng, EXTRA_MAX);
        draw_bytes(&rng, list->extra_bytes[i], list->extras[i].len);
        list->extras[i].bytes = list->extra_bytes[i];
    }
    vocabulary = kvt_rng_below(&rng, 10) ? 151936 : 1ull << 32;
    list->n_tokens = kvt_rng_below(&rng, TOKENS_MAX);
    for (size_t i = 0; i < list->n_tokens; i++)
        list->tokens[i] = (uint32_t)kvt_rng_below(&rng, vocabulary);
}

static void hex(const uint8_t *bytes, size_t len, char *out)
{
    for (size_t i = 0; i < len; i++)
        snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

/* The line of keys.txt for a list. */
static void list_line(uint64_t number, char *line, size_t line_len)
{
    static struct list list;
    static struct kvt_key keys[TOKENS_MAX];
    char first[65] = "-", last[65] = "-", total[65];
    uint8_t root[32], digest[32];
    struct kvt_digest all;
    long n;

    draw_list(&list, number);
    assert_int_equal(kvt_key_root(list.salt, list.salt_len, root), 0);
    n = kvt_key_chain(root, list.tokens, list.n_tokens, list.block, list.extras, list.n_extras, 0,
                      0, keys, TOKENS_MAX);
    assert_int_equal(n, list.n_tokens / list.block);
    kvt_digest_open(&all);
    kvt_digest_start(&all);
    for (long i = 0; i < n; i++)
        kvt_digest_bytes(&all, keys[i].hash, 32);
    assert_int_equal(kvt_digest_final(&all, digest), 0);
    kvt_digest_close(&all);
    if (n) {
        hex(keys[0].hash, 8, first);
        hex(keys[n - 1].hash, 32, last);
    }
    hex(digest, 8, total);
    snprintf(line, line_len, "%llu %ld %s %s %s\n", (unsigned long long)number, n, first, last,
             total);
}

/* Compare every list with the golden file; the number of differing lines. */
static int compare_golden(void)
{
    FILE *file = fopen(KVT_GOLDEN_DIR "/keys.txt", "r");
    char want[256], got[256];
    int differing = 0;

    if (!file)
        return -1;
    if (!fgets(want, sizeof want, file)) /* the comment */
        differing++;
    for (uint64_t i = 0; i < LISTS; i++) {
        list_line(i, got, sizeof got);
        if (!fgets(want, sizeof want, file) || strcmp(want, got) != 0)
            differing++;
    }
    differing += fgets(want, sizeof want, file) != NULL; /* nothing may be left */
    fclose(file);
    return differing;
}

static void test_c20_golden(void **state)
{
    (void)state;
    assert_int_equal(compare_golden(), 0);
}

/* Run a program with one more environment variable; its exit code. */
static int run(const char *const argv[], const char *name, const char *value)
{
    pid_t pid = fork();
    int status;

    assert_true(pid >= 0);
    if (!pid) {
        if (name)
            setenv(name, value, 1);
        execvp(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static void test_c20_other_processes(void **state)
{
    static const char *const locales[] = {"C", "tr_TR.UTF-8", "de_DE.UTF-8", "ja_JP.eucJP"};
    const char *const argv[] = {"/proc/self/exe", "--compare", NULL};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(locales); i++)
        assert_int_equal(run(argv, "LC_ALL", locales[i]), 0);
}

static void test_c20_python(void **state)
{
    const char *const argv[] = {"python3", KVT_GOLDEN_DIR "/make_keys.py", "--check", NULL};
    int rc = run(argv, "PYTHONHASHSEED", "1");

    (void)state;
    if (rc == 127) {
        print_message("[   SKIP   ] no python3: the golden files are not made again\n");
        skip();
    }
    assert_int_equal(rc, 0);
    assert_int_equal(run(argv, "PYTHONHASHSEED", "4242"), 0);
}

static void chain(const uint8_t root[32], const uint32_t *tokens, size_t n, uint32_t block,
                  struct kvt_key *keys)
{
    assert_int_equal(kvt_key_chain(root, tokens, n, block, NULL, 0, 0, 0, keys, n / block),
                     n / block);
}

static int same(const struct kvt_key *a, const struct kvt_key *b)
{
    return !memcmp(a->hash, b->hash, sizeof a->hash);
}

static void test_c21_tokens_do_not_run_together(void **state)
{
    uint8_t root[32];
    struct kvt_key a[2], b[2];

    (void)state;
    assert_int_equal(kvt_key_root(NULL, 0, root), 0);
    chain(root, (const uint32_t[]){1, 23}, 2, 2, a);
    chain(root, (const uint32_t[]){12, 3}, 2, 2, b);
    assert_false(same(a, b));
    chain(root, (const uint32_t[]){0x00010002}, 1, 1, a);
    chain(root, (const uint32_t[]){1, 2}, 2, 2, b);
    assert_false(same(a, b));
    chain(root, (const uint32_t[]){2, 1}, 2, 2, a);
    assert_false(same(a, b));
    chain(root, (const uint32_t[]){1, 2}, 2, 1, a); /* other block size: other keys */
    assert_false(same(&a[0], &b[0]) || same(&a[1], &b[0]));
    chain(root, (const uint32_t[]){0, 0}, 2, 2, a);
    chain(root, (const uint32_t[]){0}, 1, 1, b);
    assert_false(same(a, b));
}

static void test_c21_parents_enter(void **state)
{
    uint32_t tokens[] = {5, 6, 7, 8}, others[] = {5, 9, 7, 8};
    uint8_t root[32], salted[32];
    struct kvt_key a[2], b[2], c[2], again[2];

    (void)state;
    assert_int_equal(kvt_key_root(NULL, 0, root), 0);
    assert_int_equal(kvt_key_root("tenant", 6, salted), 0);
    chain(root, tokens, 4, 2, a);
    chain(root, others, 4, 2, b);
    chain(salted, tokens, 4, 2, c);
    assert_false(same(&a[1], &b[1])); /* same tokens, other parent */
    assert_false(same(&a[0], &c[0]) || same(&a[1], &c[1]));
    /* a chain may be continued from any block */
    chain(a[0].hash, tokens + 2, 2, 2, again);
    assert_true(same(&again[0], &a[1]));
    /* position alone does not: the second block equals a first block only after the same parent */
    chain(root, tokens + 2, 2, 2, again);
    assert_false(same(&again[0], &a[1]));
}

static void test_root(void **state)
{
    uint8_t a[32], b[32], c[32];

    (void)state;
    assert_int_equal(kvt_key_root(NULL, 0, a), 0);
    assert_int_equal(kvt_key_root("", 0, b), 0);
    assert_memory_equal(a, b, 32);
    /* C17, C77: any bytes */
    assert_int_equal(kvt_key_root("a\0b", 3, b), 0);
    assert_int_equal(kvt_key_root("a\0c", 3, c), 0);
    assert_memory_not_equal(b, c, 32);
    assert_int_equal(kvt_key_root("a", 1, c), 0);
    assert_memory_not_equal(b, c, 32);
    assert_memory_not_equal(a, c, 32);
    assert_int_equal(kvt_key_root(NULL, 1, c), KVT_E_INVAL);
    assert_int_equal(kvt_key_root("a", 1, NULL), KVT_E_INVAL);
}

/* Extras: number, type, length and bytes all count, and do not run together. */
static void test_extras(void **state)
{
    static const struct {
        struct kvt_key_extra extras[2];
        size_t n;
    } sets[] = {
        {{{0}}, 0},
        {{{1, 0, ""}}, 1},
        {{{2, 0, ""}}, 1},
        {{{1, 1, "a"}}, 1},
        {{{1, 2, "ab"}}, 1},
        {{{1, 2, "ac"}}, 1},
        {{{1, 1, "a"}, {1, 1, "b"}}, 2},
        {{{1, 1, "b"}, {1, 1, "a"}}, 2},
        {{{1, 2, "ab"}, {1, 0, ""}}, 2},
        {{{1, 0, ""}, {1, 2, "ab"}}, 2},
        {{{1, 9, "a\1\0\0\0\1\0\0\0"}}, 1}, /* looks like two when lengths are forgotten */
    };
    struct kvt_key keys[KVT_ARRAY_LEN(sets)];
    uint32_t tokens[16] = {0};
    uint8_t root[32];

    (void)state;
    assert_int_equal(kvt_key_root(NULL, 0, root), 0);
    for (size_t i = 0; i < KVT_ARRAY_LEN(sets); i++) {
        assert_int_equal(
            kvt_key_chain(root, tokens, 16, 16, sets[i].extras, sets[i].n, 0, 0, &keys[i], 1), 1);
        for (size_t j = 0; j < i; j++)
            assert_false(same(&keys[i], &keys[j]));
    }
}

static void test_key_fields(void **state)
{
    uint32_t tokens[40] = {0};
    struct kvt_key keys[3];
    uint8_t root[32];

    (void)state;
    memset(keys, 0xff, sizeof keys);
    assert_int_equal(kvt_key_root(NULL, 0, root), 0);
    assert_int_equal(kvt_key_chain(root, tokens, 40, 16, NULL, 0, 3, 77, keys, 3), 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(keys[i].hash_len, 32);
        assert_int_equal(keys[i].reserved, 0);
        assert_int_equal(keys[i].group, 3);
        assert_int_equal(keys[i].shard, 77);
    }
    assert_int_equal(keys[2].hash_len, 0xff); /* a partial tail has no key */
    /* C60: fewer tokens than a block: nothing */
    assert_int_equal(kvt_key_chain(root, tokens, 15, 16, NULL, 0, 0, 0, keys, 3), 0);
    assert_int_equal(kvt_key_chain(root, NULL, 0, 16, NULL, 0, 0, 0, keys, 3), 0);
    assert_int_equal(kvt_key_chain(root, tokens, 40, 16, NULL, 0, 0, 0, keys, 1), 1);
    assert_int_equal(kvt_key_chain(root, tokens, 40, 16, NULL, 0, 0, 0, NULL, 0), 0);
}

static void test_arguments(void **state)
{
    struct kvt_key_extra no_bytes = {.type = 1, .len = 4};
    uint32_t tokens[16] = {0};
    struct kvt_key key;
    uint8_t root[32] = {0};

    (void)state;
    assert_int_equal(kvt_key_chain(NULL, tokens, 16, 16, NULL, 0, 0, 0, &key, 1), KVT_E_INVAL);
    assert_int_equal(kvt_key_chain(root, NULL, 16, 16, NULL, 0, 0, 0, &key, 1), KVT_E_INVAL);
    assert_int_equal(kvt_key_chain(root, tokens, 16, 0, NULL, 0, 0, 0, &key, 1), KVT_E_INVAL);
    assert_int_equal(
        kvt_key_chain(root, tokens, 16, KVT_BLOCK_TOKENS_MAX + 1, NULL, 0, 0, 0, &key, 1),
        KVT_E_INVAL);
    assert_int_equal(kvt_key_chain(root, tokens, 16, 16, NULL, 1, 0, 0, &key, 1), KVT_E_INVAL);
    assert_int_equal(kvt_key_chain(root, tokens, 16, 16, &no_bytes, 1, 0, 0, &key, 1), KVT_E_INVAL);
    assert_int_equal(kvt_key_chain(root, tokens, 16, 16, NULL, 0, 0, 0, NULL, 1), KVT_E_INVAL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c20_golden),
        cmocka_unit_test(test_c20_other_processes),
        cmocka_unit_test(test_c20_python),
        cmocka_unit_test(test_c21_tokens_do_not_run_together),
        cmocka_unit_test(test_c21_parents_enter),
        cmocka_unit_test(test_root),
        cmocka_unit_test(test_extras),
        cmocka_unit_test(test_key_fields),
        cmocka_unit_test(test_arguments),
    };

    if (argc == 2 && !strcmp(argv[1], "--compare")) {
        (void)setlocale(LC_ALL, ""); /* one that is not installed stays "C" */
        return compare_golden() != 0;
    }
    return cmocka_run_group_tests_name("key", tests, NULL, NULL);
}
