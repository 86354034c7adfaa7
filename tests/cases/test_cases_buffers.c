/* Failures from the field about buffers and file systems: C43 C44.
 *
 * Method: pools whose bases lie at 64 mod 4096 with gaps between rows, in many sizes, through disk
 * in direct and in buffered mode; and a fallocate() that the file system does not support (this
 * program defines its own, which the library then calls).
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "base/checked.h"

static struct rig rig;
static unsigned refused; /* calls of our fallocate() */
static int refuse_now;

int fallocate(int fd, int mode, off_t offset, off_t len);
int fallocate64(int fd, int mode, off64_t offset, off64_t len);

/* A file system without fallocate() when asked to be one; else reserves by writing. */
static int our_fallocate(int fd, int mode, off_t offset, off_t len)
{
    if (refuse_now || mode != 0) {
        refused++;
        errno = EOPNOTSUPP;
        return -1;
    }
    return -posix_fallocate(fd, offset, len);
}

int fallocate(int fd, int mode, off_t offset, off_t len)
{
    return our_fallocate(fd, mode, offset, len);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t len)
{
    return our_fallocate(fd, mode, offset, len);
}

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    refuse_now = 0;
    return 0;
}

static void through_disk(const struct rig_shape *shape, const char *direct)
{
    char config[128];
    snprintf(config, sizeof(config), "dram=48MiB,direct=%s", direct);
    rig_init(&rig, shape, config, "1GiB");
    rig_open(&rig);
    uint32_t n = shape->pages;
    assert_int_equal(rig_store(&rig, 1, n, 0, NULL), n);
    assert_int_equal(rig_load(&rig, 1, n, NULL), n);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 1, n, NULL), n);
    assert_int_equal(rig_stat(&rig, "load.granted_disk"), n);
    if (strcmp(direct, "off") == 0)
        assert_int_equal(rig_stat(&rig, "disk.direct"), 0);
    tear_down(NULL);
}

static void sizes(const char *direct)
{
    static const struct rig_shape shapes[] = {
        /* 1 to 16 rows of 32 to 2,048 bytes: payloads from 1 KiB on, around page multiples */
        {1, 1, 16, 16, 5, KVT_DTYPE_BF16, 64, 2},    {1, 1, 112, 16, 5, KVT_DTYPE_F16, 64, 6},
        {1, 3, 80, 16, 5, KVT_DTYPE_BF16, 64, 10},   {1, 1, 64, 48, 5, KVT_DTYPE_F32, 64, 4},
        {2, 5, 96, 16, 5, KVT_DTYPE_BF16, 64, 34},   {1, 1, 1024, 16, 5, KVT_DTYPE_F32, 64, 12},
        {1, 2, 128, 32, 5, KVT_DTYPE_F16, 64, 4098}, {3, 7, 48, 16, 5, KVT_DTYPE_BF16, 4032, 14},
        {32, 3, 64, 128, 2, KVT_DTYPE_BF16, 64, 2}, /* 3 MiB a block, odd strides */
    };
    for (size_t i = 0; i < KVT_ARRAY_LEN(shapes); i++)
        through_disk(&shapes[i], direct);
}

static void test_c43_unaligned_pools_buffered(void **state)
{
    (void)state;
    sizes("off");
}

static void test_c43_unaligned_pools_direct_where_it_works(void **state)
{
    (void)state;
    sizes("auto");
}

/* 3,098,112 bytes: 2,017 opaque parts of 16 tokens x 96 bytes; its record is 757 pages. */
static void test_c43_a_block_of_3098112_bytes(void **state)
{
    enum { PARTS = 2017, ROW = 96, TOKENS = 16, PART = ROW * TOKENS, STRIDE = PART + 64 };
    struct kvt_part *parts = calloc(PARTS, sizeof(*parts));
    struct kvt_part_place *places = calloc(PARTS, sizeof(*places));
    uint8_t *memory = aligned_alloc(4096, (size_t)4096 * 2 * 800), *pool_base = memory + 64;
    struct kvt_layout layout = {sizeof(layout), TOKENS, PARTS, parts};
    struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, 2, PARTS, places};
    struct kvt_key key = rig_key(1);
    struct kvt_req *req;
    uint32_t from = 0, to = 1;
    (void)state;
    for (uint32_t i = 0; i < PARTS; i++) {
        parts[i] = (struct kvt_part){KVT_PART_OPAQUE, KVT_DTYPE_BYTE, 0, i, 1, ROW};
        places[i] =
            (struct kvt_part_place){pool_base + i * (size_t)(2 * STRIDE), STRIDE, PART, ROW, 1};
    }
    assert_true(2 * (size_t)STRIDE * PARTS + 64 <= (size_t)4096 * 2 * 800);
    for (size_t i = 0; i < (size_t)4096 * 2 * 800; i++)
        memory[i] = (uint8_t)(i * 2654435761u >> 13);
    for (int direct = 0; direct < 2; direct++) {
        struct rig_shape shape = rig_shape_small(1);
        rig_init(&rig, &shape, direct ? "dram=32MiB" : "dram=32MiB,direct=off", "1GiB");
        for (int pass = 0; pass < 2; pass++) { /* from DRAM, then from disk */
            rig_open(&rig);
            struct kvt_ns *ns;
            struct kvt_pool *pool;
            assert_int_equal(kvt_ns_open(rig.cache, &rig.identity, &layout, &ns), 0);
            assert_int_equal(kvt_pool_register(rig.cache, &layout, &desc, &pool), 0);
            assert_int_equal(kvt_ns_record_bytes(ns, 0, KVT_LEVEL_RAW), 3100672);
            if (pass == 0) {
                assert_int_equal(kvt_store(ns, pool, &key, &from, 1, NULL, &req), 0);
                assert_int_equal(kvt_req_wait(req, -1), 1);
                assert_int_equal(kvt_req_status(req, NULL)[0], 0);
                kvt_req_free(req);
            }
            for (uint32_t i = 0; i < PARTS; i++)
                memset((uint8_t *)places[i].base + STRIDE, 0xa5, PART);
            assert_int_equal(kvt_load(ns, pool, &key, &to, 1, NULL, &req), 0);
            assert_int_equal(kvt_req_wait(req, -1), 1);
            assert_int_equal(kvt_req_status(req, NULL)[0], 0);
            kvt_req_free(req);
            for (uint32_t i = 0; i < PARTS; i++)
                assert_memory_equal((uint8_t *)places[i].base + STRIDE, places[i].base, PART);
            assert_int_equal(kvt_flush(rig.cache), 0);
            kvt_pool_unregister(pool);
            kvt_ns_close(ns);
            rig_close(&rig);
        }
        tear_down(NULL);
    }
    free(memory);
    free(places);
    free(parts);
}

static void test_c44_without_fallocate(void **state)
{
    struct rig_shape shape = rig_shape_small(100);
    (void)state;
    rig_init(&rig, &shape, "dram=4MiB", "8MiB");
    refuse_now = 1;
    refused = 0;
    rig_open(&rig);
    for (uint64_t seed = 0; seed < 2000; seed += 100) { /* 24 MB through a cap of 8 MiB */
        assert_int_equal(rig_store(&rig, 1 + seed, 100, 0, NULL), 100);
        assert_int_equal(kvt_flush(rig.cache), 0);
    }
    assert_true(refused > 0);
    assert_true(rig_stat(&rig, "disk.written_blocks") > 0);
    assert_int_equal(rig_stat(&rig, "disk.write_fail"), 0);
    assert_true(rig_dir_bytes(rig.dir, NULL) <= 8u << 20);
    rig_reopen(&rig);
    size_t loaded = 0;
    for (uint64_t seed = 0; seed < 2000; seed += 100)
        loaded += rig_load(&rig, 1 + seed, 100, NULL);
    assert_true(loaded > 100);
    assert_true(rig_stat(&rig, "load.granted_disk") > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c43_unaligned_pools_buffered, tear_down),
        cmocka_unit_test_teardown(test_c43_unaligned_pools_direct_where_it_works, tear_down),
        cmocka_unit_test_teardown(test_c43_a_block_of_3098112_bytes, tear_down),
        cmocka_unit_test_teardown(test_c44_without_fallocate, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
