/* Purged bytes are gone from the files, whatever the file system can do.
 *
 * Goal:   after a purge no byte of a purged record is left in any file, and every other record is
 *         whole, also in a new life and when segments are reused; where holes cannot be punched
 *         zeros are written; an error leaves the bytes until then and says so.
 * Method: the log over posix and uring on real files, with system calls that refuse to punch; the
 *         files are searched by plain open() and read(), not through the log or its backend.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "io/io_posix.h"
#include "kvtier/error.h"
#include "support/fault_io.h"
#include "support/l2_help.h"

#define CAP (8u << 20)
#define COUNT 30u

static struct l2_env env; /* large: not on the stack */
static char base[256], dir[300];
static unsigned punches;

static int refused_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    if (!(mode & FALLOC_FL_PUNCH_HOLE))
        return fallocate(fd, mode, offset, bytes);
    punches++;
    errno = EOPNOTSUPP;
    return -1;
}

static int absent_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    (void)fd;
    (void)offset;
    (void)bytes;
    punches += (mode & FALLOC_FL_PUNCH_HOLE) != 0;
    errno = ENOSYS;
    return -1;
}

/* The raw segment files, one after the other, as they are now. */
static uint8_t raw[2 * CAP];
static size_t raw_bytes;

static void look(void)
{
    raw_bytes = 0;
    for (unsigned segment = 0; segment < 16; segment++) {
        char path[400];
        ssize_t n;

        snprintf(path, sizeof path, "%s/seg-%08x", dir, segment);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        while ((n = read(fd, raw + raw_bytes, sizeof raw - raw_bytes)) > 0)
            raw_bytes += (size_t)n;
        assert_int_equal(raw_bytes % 4096, 0);
        close(fd);
    }
    assert_true(raw_bytes >= 1u << 20);
}

/* Whether any page of the record stood in the files at the last look; then all of them must. */
static bool in_files(const void *record, uint32_t pages)
{
    uint32_t seen = 0;

    for (uint32_t page = 0; page < pages; page++)
        for (size_t at = 0; at < raw_bytes; at += 4096)
            if (!memcmp(raw + at, (const uint8_t *)record + page * 4096ull, 4096)) {
                seen++;
                break;
            }
    assert_true(seen == 0 || seen == pages);
    return seen;
}

static struct kvt_io *open_files(int backend, const struct kvt_posix_sys *sys)
{
    static unsigned roots;
    struct kvt_io_posix_params params = {
        .path = dir, .threads = 2, .direct = -1, .backend = backend};
    struct kvt_io *io = NULL;

    snprintf(dir, sizeof dir, "%s/%u", base, roots++);
    assert_int_equal(kvt_io_files_new_sys(&params, sys, &io), 0);
    return io;
}

static uint32_t pages_of(uint32_t id)
{
    return id % 5 ? 3 : 60; /* some are longer than one write of zeros */
}

/* Put COUNT records, purge every other one, look into the files. */
static void purge_over(struct kvt_io *io)
{
    void *records[COUNT];

    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < COUNT; i++) {
        records[i] = l2_record(i, 1, pages_of(i), env.sequence, NULL);
        assert_int_equal(l2_env_put(&env, i, 1, pages_of(i)), 0);
    }
    look();
    for (uint32_t i = 0; i < COUNT; i += 7)
        assert_true(in_files(records[i], pages_of(i)));
    for (uint32_t i = 0; i < COUNT; i += 2)
        assert_int_equal(l2_env_purge_key(&env, i), 0);
    for (uint32_t turns = 0; turns < 100; turns++)
        l2_env_turn(&env);
    for (int life = 0; life < 2; life++) {
        look();
        for (uint32_t i = 0; i < COUNT; i++) {
            assert_int_equal(in_files(records[i], pages_of(i)), i % 2);
            assert_int_equal(l2_env_get(&env, i), i % 2 ? 0 : KVT_E_MISS);
        }
        l2_env_close(&env);
        assert_int_equal(l2_env_open(&env, io), 0);
        assert_int_equal(l2_env_count(&env), COUNT / 2);
    }
    for (uint32_t i = 100; i < 200; i++) /* neither holes nor zeros hinder recycling */
        assert_int_equal(l2_env_put(&env, i, 1, 50), 0);
    assert_int_equal(l2_env_verify(&env), l2_env_count(&env));
    for (uint32_t i = 0; i < COUNT; i++)
        free(records[i]);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static bool may_run(int backend)
{
    char why[160];

    if (backend != KVT_IO_URING || !kvt_io_uring_probe(why, sizeof why))
        return true;
    print_message("             without uring: %s\n", why);
    return false;
}

static void test_holes(void **state)
{
    (void)state;
    for (int backend = KVT_IO_POSIX; backend <= KVT_IO_URING; backend++)
        if (may_run(backend))
            purge_over(open_files(backend, &kvt_posix_sys_real));
}

/* The backend's threads are refused, and write zeros by themselves. (Through a ring the log does:
 * the next test.) */
static void test_zeros_where_no_hole_can_be_punched(void **state)
{
    struct kvt_posix_sys refused = kvt_posix_sys_real, absent = kvt_posix_sys_real;

    (void)state;
    refused.fallocate = refused_fallocate;
    absent.fallocate = absent_fallocate;
    punches = 0;
    purge_over(open_files(KVT_IO_POSIX, &refused));
    assert_true(punches >= COUNT / 2);
    punches = 0;
    purge_over(open_files(KVT_IO_POSIX, &absent));
    assert_true(punches >= COUNT / 2);
}

/* The backend cannot punch at all: the log writes zeros, without waiting for them. */
static void test_the_log_writes_zeros(void **state)
{
    struct fault_rule rule = {.ops = FAULT_PUNCH, .action = FAULT_FAIL, .error = EOPNOTSUPP};

    (void)state;
    for (int backend = KVT_IO_POSIX; backend <= KVT_IO_URING; backend++) {
        if (!may_run(backend))
            continue;
        struct kvt_io *io = fault_io_new(open_files(backend, &kvt_posix_sys_real), 1);

        assert_int_equal(fault_io_rule(io, &rule), 0);
        purge_over(io);
    }
}

/* A hole that ends early, with an error: the whole range becomes zeros. */
static void test_half_a_hole(void **state)
{
    struct fault_rule rule = {.ops = FAULT_PUNCH, .action = FAULT_TORN, .arg = 8, .error = EIO};
    struct kvt_io *io = fault_io_new(open_files(KVT_IO_POSIX, &kvt_posix_sys_real), 1);

    (void)state;
    assert_int_equal(fault_io_rule(io, &rule), 0);
    purge_over(io);
}

/* Zeros that cannot be written either: said once for each, the record is a miss all the same, and
 * its bytes go with the next life of their segment. */
static void test_an_error_is_said(void **state)
{
    struct fault_rule punch = {.ops = FAULT_PUNCH, .action = FAULT_FAIL, .error = EIO};
    struct fault_rule write = {
        .ops = FAULT_WRITE, .name = "seg-", .times = 1, .action = FAULT_FAIL, .error = EIO};
    struct kvt_io *io = fault_io_new(open_files(KVT_IO_POSIX, &kvt_posix_sys_real), 1);
    void *record;

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    record = l2_record(1, 1, 4, env.sequence, NULL);
    assert_int_equal(l2_env_put(&env, 1, 1, 4), 0);
    assert_int_equal(fault_io_rule(io, &punch), 0);
    assert_int_equal(fault_io_rule(io, &write), 1);
    assert_int_equal(l2_env_purge_key(&env, 1), 0);
    for (uint32_t turns = 0; turns < 100; turns++)
        l2_env_turn(&env);
    assert_non_null(strstr(env.last_message, "stay until it is reused"));
    assert_int_equal(l2_env_get(&env, 1), KVT_E_MISS);
    look();
    assert_true(in_files(record, 4));
    fault_io_clear(io);
    for (uint32_t i = 100; i < 500; i++) /* three times the cap */
        assert_int_equal(l2_env_put(&env, i, 1, 60), 0);
    look();
    assert_false(in_files(record, 4));
    free(record);
    l2_env_close(&env);
    io->ops->destroy(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_holes),
        cmocka_unit_test(test_zeros_where_no_hole_can_be_punched),
        cmocka_unit_test(test_the_log_writes_zeros),
        cmocka_unit_test(test_half_a_hole),
        cmocka_unit_test(test_an_error_is_said),
    };
    int failed;

    l2_dir_make(base);
    failed = cmocka_run_group_tests_name("l2_erase", tests, NULL, NULL);
    l2_dir_remove(base);
    return failed;
}
