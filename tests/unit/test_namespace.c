/* Namespace ids (C13, C15, C17, C18, C77 on the id).
 *
 * Goal:   every field that makes caches incompatible changes the id; strings do not run together;
 *         any bytes are accepted.
 * Method: golden ids from golden/make_keys.py; one change at a time from a base identity; hostile
 *         strings.
 */
#include "support/store_help.h"

#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/codec.h"
#include "kvtier/key.h"

#define PARTS_MAX 80
#define WITH_GROUPS 200u /* golden layouts from this number on list groups */
#define GOLDEN (WITH_GROUPS + 100u)

struct subject {
    struct kvt_identity identity;
    struct kvt_layout layout;
    struct kvt_part parts[PARTS_MAX];
    struct kvt_group groups[4];
    char text[9][32];
    uint8_t salt[32];
};

static const char **string_field(struct kvt_identity *identity, size_t i)
{
    const char **const fields[] = {&identity->engine,   &identity->key_scheme, &identity->model,
                                   &identity->revision, &identity->adapter,    &identity->layout,
                                   &identity->rope,     &identity->rotation,   &identity->extra};

    assert_true(i < KVT_ARRAY_LEN(fields));
    return fields[i];
}
#define STRINGS 9

/* As identity() of make_keys.py, draw by draw. */
static void draw_subject(struct subject *s, uint64_t number)
{
    struct kvt_rng rng = {1000003 + number};
    uint64_t layers;

    memset(s, 0, sizeof *s);
    kvt_identity_init(&s->identity);
    for (size_t i = 0; i < STRINGS; i++) {
        size_t len = kvt_rng_below(&rng, 30);
        for (size_t j = 0; j < len; j++)
            s->text[i][j] = (char)(33 + kvt_rng_below(&rng, 94));
        *string_field(&s->identity, i) = s->text[i];
    }
    s->identity.salt_len = kvt_rng_below(&rng, 30);
    for (size_t j = 0; j < s->identity.salt_len; j++)
        s->salt[j] = (uint8_t)kvt_rng_below(&rng, 256);
    s->identity.salt = s->salt;
    s->identity.tp_size = 1 + (uint32_t)kvt_rng_below(&rng, 16);
    s->identity.pp_size = 1 + (uint32_t)kvt_rng_below(&rng, 16);
    s->identity.pp_rank = (uint32_t)kvt_rng_below(&rng, s->identity.pp_size);
    s->layout.struct_size = sizeof s->layout;
    s->layout.block_tokens = 16 * (1 + (uint32_t)kvt_rng_below(&rng, 256));
    s->layout.parts = s->parts;
    layers = 1 + kvt_rng_below(&rng, 40);
    for (uint32_t layer = 0; layer < layers; layer++) {
        uint32_t heads = 1 + (uint32_t)kvt_rng_below(&rng, 64);
        uint32_t dim = 16 * (1 + (uint32_t)kvt_rng_below(&rng, 64));
        uint8_t dtype = (uint8_t)(1 + kvt_rng_below(&rng, 3));
        uint16_t group = (uint16_t)kvt_rng_below(&rng, 4);

        for (uint8_t kind = 1; kind <= 2; kind++)
            s->parts[s->layout.part_count++] = (struct kvt_part){.kind = kind,
                                                                 .dtype = dtype,
                                                                 .group = group,
                                                                 .layer = layer,
                                                                 .heads = heads,
                                                                 .head_dim = dim};
    }
    if (number >= WITH_GROUPS)
        s->layout.group_count = 1 + (uint32_t)kvt_rng_below(&rng, KVT_ARRAY_LEN(s->groups));
    s->layout.groups = s->layout.group_count ? s->groups : NULL;
    for (uint32_t i = 0; i < s->layout.group_count; i++) {
        struct kvt_group *group = &s->groups[i];

        group->group = (uint16_t)i;
        group->kind = (uint8_t)kvt_rng_below(&rng, 3);
        if (kvt_rng_below(&rng, 4))
            group->block_tokens = 16 * (1 + (uint32_t)kvt_rng_below(&rng, 64));
        if (group->kind == KVT_GROUP_WINDOW)
            group->window_tokens = 1 + (uint32_t)kvt_rng_below(&rng, 8192);
    }
}

static void id_of(const struct subject *s, uint8_t id[KVT_NS_BYTES])
{
    struct kvt_layout layout = s->layout;

    layout.parts = s->parts; /* subjects are copied */
    assert_int_equal(kvt_namespace_id(&s->identity, &layout, id), 0);
}

static void test_golden(void **state)
{
    FILE *file = fopen(KVT_GOLDEN_DIR "/namespaces.txt", "r");
    static struct subject s;
    char line[80], want[80];

    (void)state;
    assert_non_null(file);
    assert_int_equal(KVT_CODEC_FORMAT_VERSION, 0); /* make the file again when it changes */
    assert_non_null(fgets(line, sizeof line, file));
    for (uint64_t i = 0; i < GOLDEN; i++) {
        uint8_t id[KVT_NS_BYTES];
        int at;

        draw_subject(&s, i);
        id_of(&s, id);
        at = snprintf(want, sizeof want, "%llu ", (unsigned long long)i);
        for (size_t j = 0; j < sizeof id; j++)
            at += snprintf(want + at, sizeof want - (size_t)at, "%02x", id[j]);
        snprintf(want + at, sizeof want - (size_t)at, "\n");
        assert_non_null(fgets(line, sizeof line, file));
        assert_string_equal(line, want);
    }
    fclose(file);
}

static void base_subject(struct subject *s)
{
    static const char *const texts[STRINGS] = {"llama.cpp", "kvt-sha256-v1", "SmolLM2", "r1", "",
                                               "",          "none",          "none",    ""};

    memset(s, 0, sizeof *s);
    kvt_identity_init(&s->identity);
    for (size_t i = 0; i < STRINGS; i++)
        *string_field(&s->identity, i) = texts[i];
    s->identity.salt = "a";
    s->identity.salt_len = 1;
    s->identity.pp_size = 2;
    s->layout =
        (struct kvt_layout){.struct_size = sizeof s->layout, .block_tokens = 16, .part_count = 4};
    for (uint32_t i = 0; i < 4; i++)
        s->parts[i] = (struct kvt_part){.kind = i % 2 ? KVT_PART_V : KVT_PART_K,
                                        .dtype = KVT_DTYPE_BF16,
                                        .layer = i / 2,
                                        .heads = 8,
                                        .head_dim = 128};
}

/* C13 on the id: one thing at a time; all ids differ from the base and from each other. That other
 * ids give no hits is for the store's and the client's tests. */
static void test_c13_every_field(void **state)
{
    enum { NUMBERS = 14, VARIANTS = 1 + STRINGS + NUMBERS };
    static struct subject s[VARIANTS];
    uint8_t ids[VARIANTS][KVT_NS_BYTES];
    size_t n = 1 + STRINGS;

    (void)state;
    for (size_t i = 0; i < VARIANTS; i++)
        base_subject(&s[i]);
    for (size_t i = 0; i < STRINGS; i++) /* engine, scheme, model, revision, adapter (C18), ... */
        *string_field(&s[1 + i].identity, i) = "other";
    s[n++].identity.salt = "b";
    s[n++].identity.salt_len = 0;
    s[n++].identity.tp_size = 2;
    s[n++].identity.pp_size = 3;
    s[n++].identity.pp_rank = 1;
    s[n++].layout.block_tokens = 32;
    s[n++].layout.part_count = 2;
    s[n++].parts[3].kind = KVT_PART_K;
    s[n++].parts[3].dtype = KVT_DTYPE_F16;
    s[n++].parts[3].group = 1;
    s[n++].parts[3].layer = 9;
    s[n++].parts[3].heads = 4;
    s[n++].parts[3].head_dim = 64;
    s[n].parts[0] = s[0].parts[1]; /* V before K: another order */
    s[n++].parts[1] = s[0].parts[0];
    assert_int_equal(n, VARIANTS);
    for (size_t i = 0; i < VARIANTS; i++) {
        id_of(&s[i], ids[i]);
        for (size_t j = 0; j < i; j++)
            assert_memory_not_equal(ids[i], ids[j], KVT_NS_BYTES);
    }
}

/* The same for what a layout says of its groups; a layout that lists none has the id that it had
 * before there were lists; 0 tokens are the layout's. */
static void test_c13_every_field_of_a_group(void **state)
{
    enum { VARIANTS = 8 };
    struct kvt_group groups[VARIANTS][2];
    struct subject s[VARIANTS];
    uint8_t ids[VARIANTS][KVT_NS_BYTES], same[KVT_NS_BYTES];

    (void)state;
    for (size_t i = 0; i < VARIANTS; i++) {
        base_subject(&s[i]);
        groups[i][0] = (struct kvt_group){.group = 0, .block_tokens = 16};
        groups[i][1] = (struct kvt_group){
            .group = 1, .kind = KVT_GROUP_WINDOW, .block_tokens = 64, .window_tokens = 128};
        s[i].layout.groups = groups[i];
        s[i].layout.group_count = i == 0 ? 0 : 2;
    }
    groups[2][1].group = 2;
    groups[3][1].kind = KVT_GROUP_STATE;
    groups[4][1].block_tokens = 128;
    groups[5][1].window_tokens = 256;
    groups[6][0].block_tokens = 48;
    s[7].layout.group_count = 1;
    for (size_t i = 0; i < VARIANTS; i++) {
        id_of(&s[i], ids[i]);
        for (size_t j = 0; j < i; j++)
            assert_memory_not_equal(ids[i], ids[j], KVT_NS_BYTES);
    }
    s[0].layout.groups = NULL;
    id_of(&s[0], same);
    assert_memory_equal(same, ids[0], KVT_NS_BYTES);
    groups[1][0].block_tokens = 0;
    id_of(&s[1], same);
    assert_memory_equal(same, ids[1], KVT_NS_BYTES);
    s[1].layout.groups = NULL;
    assert_int_equal(kvt_namespace_id(&s[1].identity, &s[1].layout, same), KVT_E_INVAL);
    s[1].layout.groups = groups[1];
    s[1].layout.group_count = KVT_GROUPS_MAX + 1;
    assert_int_equal(kvt_namespace_id(&s[1].identity, &s[1].layout, same), KVT_E_INVAL);
}

/* The sum of the fields is the same text, split differently: another id each time. */
static void test_strings_do_not_run_together(void **state)
{
    static const char *const splits[][2] = {{"ab", "c"}, {"a", "bc"}, {"abc", ""}, {"", "abc"}};
    uint8_t ids[STRINGS * 4][KVT_NS_BYTES];
    struct subject s;
    size_t n = 0;

    (void)state;
    for (size_t field = 0; field + 1 < STRINGS; field++) {
        for (size_t i = 0; i < KVT_ARRAY_LEN(splits); i++, n++) {
            base_subject(&s);
            for (size_t j = 0; j < STRINGS; j++)
                *string_field(&s.identity, j) = "";
            *string_field(&s.identity, field) = splits[i][0];
            *string_field(&s.identity, field + 1) = splits[i][1];
            id_of(&s, ids[n]);
        }
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < i; j++) {
            /* ("", "abc") in fields f, f+1 is ("abc", "") in f+1, f+2 */
            int equal = i % 4 == 2 && j + 3 == i;
            assert_int_equal(!memcmp(ids[i], ids[j], KVT_NS_BYTES), equal);
        }
    }
}

/* C15 on the id: switching a revision and back gives the old id again; copies and NULL give what ""
 * gives. Misses, hits and purge in every tier are for the client's tests. */
static void test_c15_deterministic(void **state)
{
    uint8_t base[KVT_NS_BYTES], id[KVT_NS_BYTES];
    char revision[] = "r1";
    struct subject s;

    (void)state;
    base_subject(&s);
    id_of(&s, base);
    s.identity.revision = "r2";
    id_of(&s, id);
    assert_memory_not_equal(base, id, sizeof id);
    s.identity.revision = revision;
    id_of(&s, id);
    assert_memory_equal(base, id, sizeof id);
    s.identity.adapter = NULL;
    s.identity.extra = NULL;
    id_of(&s, id);
    assert_memory_equal(base, id, sizeof id);
}

/* C17 on the id: a model id of 4,096 bytes; salts with path parts, NUL, newline, UTF-8. File names
 * in the root are for the client's tests. */
static void test_c17_hostile_strings(void **state)
{
    static const struct {
        const char *bytes;
        size_t len;
    } salts[] = {
        {"../../x", 7},  {"a\0b", 3}, {"a\0c", 3}, {"a\nb", 3}, {"\xc3\xa9\xf0\x9f\x94\x91", 6},
        {"\xff\xfe", 2}, {"", 0}};
    uint8_t ids[KVT_ARRAY_LEN(salts) + 2][KVT_NS_BYTES];
    static char model[4097];
    struct subject s;
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(salts); i++) {
        base_subject(&s);
        s.identity.salt = salts[i].bytes;
        s.identity.salt_len = salts[i].len;
        id_of(&s, ids[n++]);
    }
    memset(model, 'm', 4096);
    base_subject(&s);
    s.identity.model = model;
    id_of(&s, ids[n++]);
    model[4095] = 'n'; /* the last byte counts */
    id_of(&s, ids[n++]);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            assert_memory_not_equal(ids[i], ids[j], KVT_NS_BYTES);
}

static void test_arguments(void **state)
{
    uint8_t id[KVT_NS_BYTES];
    struct subject s;
    struct kvt_layout l;

    (void)state;
#define EXPECT(change, code)                                           \
    do {                                                               \
        base_subject(&s);                                              \
        l = s.layout;                                                  \
        l.parts = s.parts;                                             \
        change;                                                        \
        assert_int_equal(kvt_namespace_id(&s.identity, &l, id), code); \
    } while (0)
    EXPECT((void)0, 0);
    EXPECT(s.identity.struct_size = 0, KVT_E_VERSION);
    EXPECT(s.identity.struct_size++, KVT_E_VERSION);
    EXPECT(l.struct_size = 8, KVT_E_VERSION);
    EXPECT(s.identity.salt = NULL, KVT_E_INVAL);
    EXPECT(s.identity.tp_size = 0, KVT_E_INVAL);
    EXPECT(s.identity.pp_size = 0, KVT_E_INVAL);
    EXPECT(s.identity.pp_rank = 2, KVT_E_INVAL);
    EXPECT(l.parts = NULL, KVT_E_INVAL);
    EXPECT(l.part_count = 0, KVT_E_INVAL);
    EXPECT(l.part_count = KVT_PARTS_MAX + 1, KVT_E_INVAL);
    EXPECT(l.block_tokens = 0, KVT_E_INVAL);
    EXPECT(l.block_tokens = KVT_BLOCK_TOKENS_MAX + 1, KVT_E_INVAL);
#undef EXPECT
    base_subject(&s);
    assert_int_equal(kvt_namespace_id(NULL, &s.layout, id), KVT_E_INVAL);
    assert_int_equal(kvt_namespace_id(&s.identity, NULL, id), KVT_E_INVAL);
    l = s.layout;
    l.parts = s.parts;
    assert_int_equal(kvt_namespace_id(&s.identity, &l, NULL), KVT_E_INVAL);
}

static void test_identity_init(void **state)
{
    struct kvt_identity identity;

    (void)state;
    memset(&identity, 0xff, sizeof identity);
    kvt_identity_init(&identity);
    assert_int_equal(identity.struct_size, sizeof identity);
    assert_int_equal(identity.tp_size, 1);
    assert_int_equal(identity.pp_size, 1);
    assert_int_equal(identity.pp_rank, 0);
    for (size_t i = 0; i < STRINGS; i++)
        assert_null(*string_field(&identity, i));
    assert_null(identity.salt);
    assert_int_equal(identity.salt_len, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_c13_every_field),
        cmocka_unit_test(test_c13_every_field_of_a_group),
        cmocka_unit_test(test_strings_do_not_run_together),
        cmocka_unit_test(test_c15_deterministic),
        cmocka_unit_test(test_c17_hostile_strings),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_identity_init),
    };

    return cmocka_run_group_tests_name("namespace", tests, NULL, NULL);
}
