/* The table of namespaces.
 *
 * Goal:   an id has one number; a map has one record length, whoever says it first; a number given
 *         out by open stays while a client has it open; the table is bounded, and room is made only
 *         of what nobody has open and holds nothing (test_store_ns.c: of what nothing names).
 * Method: against a plain list; ids that share their home cell, so that probing and rebuilding are
 *         used; the table filled to its last place.
 */
#include "store/namespaces.h"

#include "support/store_help.h"

#include <string.h>

#include "kvtier/error.h"

static struct kvt_namespaces spaces;

static int setup(void **state)
{
    (void)state;
    return kvt_namespaces_init(&spaces);
}

static int teardown(void **state)
{
    (void)state;
    kvt_namespaces_destroy(&spaces);
    return 0;
}

/* The first four bytes choose the cell: `home` may be shared by many ids. */
static const uint8_t *id_of(uint32_t home, uint32_t number)
{
    static uint8_t id[KVT_NS_BYTES];

    memset(id, 0, sizeof(id));
    memcpy(id, &home, 4);
    memcpy(id + 8, &number, 4);
    return id;
}

static struct kvt_msg_ns_open open_of(uint32_t number)
{
    struct kvt_msg_ns_open open = {.block_tokens = 16};

    memcpy(open.id, id_of(number, number), sizeof(open.id));
    open.record_bytes[2] = 2 * KVT_PAGE_BYTES;
    open.record_bytes[6] = 8 * KVT_PAGE_BYTES;
    return open;
}

static void test_one_number_each(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 300; i++)
        assert_int_equal(kvt_namespaces_find(&spaces, id_of(i % 3, i), 0), KVT_NS_NONE);
    for (uint32_t i = 0; i < 300; i++)
        assert_int_equal(kvt_namespaces_add(&spaces, id_of(i % 3, i), 0), i);
    for (uint32_t i = 0; i < 300; i++) {
        assert_int_equal(kvt_namespaces_find(&spaces, id_of(i % 3, i), 0), i);
        assert_int_equal(kvt_namespaces_add(&spaces, id_of(i % 3, i), 0), i);
        assert_memory_equal(kvt_namespace_at(&spaces, i)->id, id_of(i % 3, i), KVT_NS_BYTES);
    }
    assert_int_equal(spaces.used, 300);
}

static void test_open_fixes_lengths(void **state)
{
    struct kvt_msg_ns_open open = open_of(7);

    (void)state;
    assert_int_equal(kvt_namespaces_open(&spaces, &open), 0);
    assert_int_equal(kvt_namespaces_open(&spaces, &open), 0); /* again: the same */
    assert_int_equal(kvt_namespace_record_bytes(&spaces, 0, 2), 2 * KVT_PAGE_BYTES);
    assert_int_equal(kvt_namespace_record_bytes(&spaces, 0, 5), 0);
    open.record_bytes[2] = 3 * KVT_PAGE_BYTES;
    open.record_bytes[5] = 4 * KVT_PAGE_BYTES;
    assert_int_equal(kvt_namespaces_open(&spaces, &open), KVT_E_LAYOUT);
    assert_int_equal(kvt_namespace_record_bytes(&spaces, 0, 5), 0); /* nothing was taken over */
    open.record_bytes[2] = 0;                                       /* says nothing: no conflict */
    assert_int_equal(kvt_namespaces_open(&spaces, &open), 0);
    assert_int_equal(kvt_namespace_record_bytes(&spaces, 0, 5), 4 * KVT_PAGE_BYTES);
    open.block_tokens = 32;
    assert_int_equal(kvt_namespaces_open(&spaces, &open), KVT_E_LAYOUT);
}

static void test_open_refuses_nonsense(void **state)
{
    const struct kvt_msg_ns_open good = open_of(1);
    struct kvt_msg_ns_open open;

    (void)state;
#define REFUSED(change)                                                     \
    do {                                                                    \
        open = good;                                                        \
        change;                                                             \
        assert_int_equal(kvt_namespaces_open(&spaces, &open), KVT_E_INVAL); \
    } while (0)
    REFUSED(open.loose = 2);
    REFUSED(open.reserved = 1);
    REFUSED(open.block_tokens = 0);
    REFUSED(open.block_tokens = KVT_BLOCK_TOKENS_MAX + 1);
    REFUSED(open.record_bytes[0] = KVT_PAGE_BYTES);
    REFUSED(open.record_bytes[7] = KVT_PAGE_BYTES);
    REFUSED(open.record_bytes[2] = KVT_PAGE_BYTES + 1);
    REFUSED(open.record_bytes[2] = KVT_RECORD_BYTES_MAX + KVT_PAGE_BYTES);
    REFUSED(memset(open.record_bytes, 0, sizeof(open.record_bytes)));
#undef REFUSED
    assert_int_equal(spaces.used, 0);
    open = good;
    memset(open.label, 'x', sizeof(open.label));
    assert_int_equal(kvt_namespaces_open(&spaces, &open), 0);
    assert_int_equal(strlen(kvt_namespace_at(&spaces, 0)->label), sizeof(open.label) - 1);
}

static void test_disk_and_open_agree(void **state)
{
    struct kvt_msg_ns_open open = open_of(1);
    uint32_t ns = kvt_namespaces_add(&spaces, open.id, 0);

    (void)state;
    assert_true(kvt_namespaces_learn(&spaces, ns, 2, 3)); /* a record on disk says it first */
    assert_true(kvt_namespaces_learn(&spaces, ns, 2, 3));
    assert_false(kvt_namespaces_learn(&spaces, ns, 2, 2));
    assert_false(kvt_namespaces_learn(&spaces, ns, KVT_NS_MAPS, 3));
    assert_false(kvt_namespaces_learn(&spaces, ns, 3, 0));
    assert_int_equal(kvt_namespaces_open(&spaces, &open), KVT_E_LAYOUT);
    assert_false(kvt_namespace_at(&spaces, ns)->opened);
    open.record_bytes[2] = 3 * KVT_PAGE_BYTES;
    assert_int_equal(kvt_namespaces_open(&spaces, &open), (long)ns);
}

static void test_groups_are_apart(void **state)
{
    struct kvt_msg_ns_open open = open_of(1);
    uint32_t numbers[3];

    (void)state;
    for (uint16_t group = 0; group < 3; group++) {
        open.group = group;
        open.loose = group == 2;
        open.record_bytes[2] = (2u + group) * KVT_PAGE_BYTES; /* each has its own lengths */
        numbers[group] = (uint32_t)kvt_namespaces_open(&spaces, &open);
        assert_int_equal(numbers[group], group);
        assert_int_equal(kvt_namespaces_find(&spaces, open.id, group), group);
        assert_int_equal(kvt_namespace_at(&spaces, group)->loose, group == 2);
        assert_int_equal(kvt_namespace_at(&spaces, group)->group, group);
    }
    assert_int_equal(kvt_namespaces_find(&spaces, open.id, 3), KVT_NS_NONE);
    for (uint16_t group = 0; group < 3; group++)
        assert_int_equal(kvt_namespace_record_bytes(&spaces, numbers[group], 2),
                         (2u + group) * KVT_PAGE_BYTES);
}

static void test_ids_of_mixed_maps(void **state)
{
    struct kvt_msg_ns_open open = open_of(1);
    uint32_t ns = (uint32_t)kvt_namespaces_open(&spaces, &open), page = KVT_PAGE_BYTES;
    uint8_t ids[3];

    (void)state;
    /* Equal level and length: one id. Three lengths have room at kv4, and say their level. */
    for (uint32_t i = 0; i < 3; i++) {
        ids[i] = kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV4, (3 + i) * page);
        assert_true(ids[i] >= KVT_MAP_MIXED_FIRST && ids[i] < KVT_MAP_IDS);
        assert_int_equal(kvt_map_id_level(ids[i]), KVT_LEVEL_KV4);
        assert_int_equal(kvt_namespace_record_bytes(&spaces, ns, ids[i]), (3 + i) * page);
        for (uint32_t j = 0; j < i; j++)
            assert_int_not_equal(ids[i], ids[j]);
    }
    assert_int_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV4, 4 * page), ids[1]);
    assert_int_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV4, 6 * page), 0);
    assert_int_not_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV5, 6 * page), 0);
    assert_int_not_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV8, 6 * page), 0);
    /* Lengths that no record has, or longer than raw; levels that are none. */
    assert_int_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV8, 9 * page), 0);
    assert_int_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV8, 0), 0);
    assert_int_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV8, page + 1), 0);
    assert_int_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_RAW, page), 0);
    assert_int_equal(kvt_namespaces_mixed(&spaces, ns, 0, page), 0);
    /* What a record on disk said first counts. */
    open.id[0] ^= 0xff;
    ns = (uint32_t)kvt_namespaces_open(&spaces, &open);
    assert_true(kvt_namespaces_learn(&spaces, ns, ids[0], 7));
    assert_int_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV4, 7 * page), ids[0]);
    assert_int_not_equal(kvt_namespaces_mixed(&spaces, ns, KVT_LEVEL_KV4, 6 * page), ids[0]);
}

static void test_full_table(void **state)
{
    struct kvt_msg_ns_open open;
    uint32_t number;

    (void)state;
    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++) {
        open = open_of(i);
        assert_int_equal(kvt_namespaces_open(&spaces, &open), (long)i);
        kvt_namespaces_enter(&spaces, i, 5);
    }
    open = open_of(KVT_NAMESPACES_MAX);
    assert_int_equal(kvt_namespaces_open(&spaces, &open), KVT_E_LIMIT);
    assert_int_equal(kvt_namespaces_add(&spaces, open.id, 0), KVT_NS_NONE);
    /* what was opened stays, and so does what holds a block or is being purged */
    for (uint32_t i = 100; i < 103; i++)
        kvt_namespaces_leave(&spaces, i, 5);
    kvt_namespace_at(&spaces, 100)->blocks = 1;
    kvt_namespace_at(&spaces, 101)->purging = 1;
    number = kvt_namespaces_add(&spaces, open.id, 0);
    assert_int_equal(number, 102);
    assert_int_equal(kvt_namespace_at(&spaces, 102)->record_pages[2], 0); /* a new life */
    assert_int_equal(kvt_namespaces_find(&spaces, id_of(102, 102), 0), KVT_NS_NONE);
    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++)
        if (i != 102)
            assert_int_equal(kvt_namespaces_find(&spaces, id_of(i, i), 0), i);
    assert_int_equal(kvt_namespaces_find(&spaces, open.id, 0), 102);
    assert_int_equal(spaces.used, KVT_NAMESPACES_MAX);
    assert_int_equal(kvt_namespaces_open(&spaces, &open), 102);
    kvt_namespaces_enter(&spaces, 102, 5);
    open = open_of(KVT_NAMESPACES_MAX + 1);
    assert_int_equal(kvt_namespaces_open(&spaces, &open), KVT_E_LIMIT);
}

/* Groups of one id find each other, whatever else comes and goes between them. */
static void test_groups_are_one_namespace(void **state)
{
    struct kvt_namespace *table = spaces.table;

    (void)state;
    for (uint32_t i = 0; i < 60; i++) /* groups 0, 1, 2 of twenty ids, and their bytes */
        assert_int_equal(kvt_namespaces_add(&spaces, id_of(3, i % 20), (uint16_t)(i / 20)), i);
    for (uint32_t i = 0; i < 60; i++) {
        table[i].bytes = 1000 * (i % 20);
        table[i].filling_bytes = i / 20;
        assert_true(kvt_namespaces_same(&spaces, i, (i + 20) % 60));
        assert_false(kvt_namespaces_same(&spaces, i, (i + 1) % 60));
    }
    for (uint32_t i = 0; i < 60; i++)
        assert_int_equal(kvt_namespaces_held(&spaces, i), 3000 * (i % 20) + 3);
    table[0].quota_bytes = 77; /* of all groups that are there: the store sees to that; and later */
    table[20].quota_bytes = 77;
    table[40].quota_bytes = 77;
    assert_int_equal(kvt_namespaces_add(&spaces, id_of(3, 0), 9), 60);
    assert_int_equal(table[60].quota_bytes, 77);
    assert_int_equal(kvt_namespaces_held(&spaces, 60), 3);
    /* the table is full, and the middle group's place goes to another namespace */
    for (uint32_t i = 61; i < KVT_NAMESPACES_MAX; i++) {
        assert_int_equal(kvt_namespaces_add(&spaces, id_of(i, i), 0), i);
        table[i].blocks = 1;
    }
    for (uint32_t i = 0; i < 61; i++)
        table[i].blocks = i != 20;
    table[20].bytes = table[20].filling_bytes = 0;
    assert_int_equal(kvt_namespaces_add(&spaces, id_of(4, 1), 0), 20);
    assert_int_equal(kvt_namespaces_held(&spaces, 20), 0);
    assert_int_equal(kvt_namespaces_held(&spaces, 0), 2);
    assert_int_equal(kvt_namespaces_held(&spaces, 40), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_one_number_each, setup, teardown),
        cmocka_unit_test_setup_teardown(test_open_fixes_lengths, setup, teardown),
        cmocka_unit_test_setup_teardown(test_open_refuses_nonsense, setup, teardown),
        cmocka_unit_test_setup_teardown(test_disk_and_open_agree, setup, teardown),
        cmocka_unit_test_setup_teardown(test_groups_are_apart, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ids_of_mixed_maps, setup, teardown),
        cmocka_unit_test_setup_teardown(test_groups_are_one_namespace, setup, teardown),
        cmocka_unit_test_setup_teardown(test_full_table, setup, teardown),
    };

    return cmocka_run_group_tests_name("namespaces", tests, NULL, NULL);
}
