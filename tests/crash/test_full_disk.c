/* A file system that is really full: a small tmpfs of its own.
 *
 * Goal:   where a root lives on a file system smaller than its cap, or one that others fill up,
 *         nothing crashes and no other byte is served; the log lives with the segments it has,
 *         counts what it could not write, keeps what a flush acknowledged within them, and writes
 *         again once there is room, without a restart.
 * Method: the process takes a mount namespace of its own (as root, or by a user namespace) and
 *         mounts a tmpfs of 64 MiB, or one with few inodes; a file beside the root stands for what
 *         others write. Where mounting is not allowed the test is skipped and says so: the same is
 *         run over the fault backend in test_l2_fault. KVT_SOAK_SECONDS: the random rounds go on
 *         for so long.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/rng.h"
#include "support/run_tool.h"

enum { CHAIN = 16 };
#define MIB (UINT64_C(1) << 20)

static struct rig rig;
static char base[100];   /* the mount point */
static char cannot[160]; /* why nothing can be mounted; "": it can */

/* ---- the file system ---- */

static void write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);

    if (fd < 0)
        return;
    if (write(fd, text, strlen(text)) < 0)
        snprintf(cannot, sizeof(cannot), "%s: %s", path, strerror(errno));
    close(fd);
}

/* Into a mount namespace of our own, before there is any thread. */
static void own_mounts(void)
{
    char map[64];
    unsigned uid = (unsigned)geteuid(), gid = (unsigned)getegid();

    if (unshare(CLONE_NEWNS) != 0) {
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
            snprintf(cannot, sizeof(cannot), "no mount namespace: %s", strerror(errno));
            return;
        }
        snprintf(map, sizeof(map), "0 %u 1", uid);
        write_text("/proc/self/uid_map", map);
        write_text("/proc/self/setgroups", "deny");
        snprintf(map, sizeof(map), "0 %u 1", gid);
        write_text("/proc/self/gid_map", map);
    }
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        snprintf(cannot, sizeof(cannot), "mounts cannot be made private: %s", strerror(errno));
}

static void make_fs(const char *options)
{
    rig_dir_make(base, sizeof(base));
    if (!cannot[0] && mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, options) != 0)
        snprintf(cannot, sizeof(cannot), "tmpfs cannot be mounted: %s", strerror(errno));
    if (cannot[0]) {
        printf("           skipped: %s\n", cannot);
        (void)rmdir(base);
        base[0] = '\0';
        skip();
    }
}

static uint64_t free_bytes(void)
{
    struct statvfs fs;

    assert_int_equal(statvfs(base, &fs), 0);
    return (uint64_t)fs.f_bavail * fs.f_frsize;
}

/* Others take all but `leave` bytes, or give back what is more. */
static void others_leave(uint64_t leave)
{
    char name[120];
    uint64_t have = free_bytes();
    int fd;
    off_t size;

    snprintf(name, sizeof(name), "%s/others", base);
    fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 && errno == ENOSPC)
        return;
    assert_true(fd >= 0);
    size = lseek(fd, 0, SEEK_END);
    if (have > leave)
        (void)posix_fallocate(fd, size, (off_t)(have - leave)); /* ENOSPC: somebody was faster */
    else if ((uint64_t)size > leave - have)
        assert_int_equal(ftruncate(fd, size - (off_t)(leave - have)), 0);
    else
        assert_int_equal(ftruncate(fd, 0), 0);
    close(fd);
}

static void others_leave_all(void)
{
    char name[120];

    snprintf(name, sizeof(name), "%s/others", base);
    (void)unlink(name);
}

static int tear_down(void **state)
{
    (void)state;
    rig_close(&rig);
    rig.dir[0] = '\0';
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    if (base[0]) {
        assert_int_equal(umount2(base, MNT_DETACH), 0);
        assert_int_equal(rmdir(base), 0);
        base[0] = '\0';
    }
    return 0;
}

static void begin(const struct rig_shape *shape, const char *config, const char *cap)
{
    rig_init(&rig, shape, config, NULL);
    snprintf(rig.dir, sizeof(rig.dir), "%s/root", base);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "%s", cap);
}

static uint64_t load_chains(uint64_t chains)
{
    uint64_t got = 0;

    for (uint64_t chain = 0; chain < chains; chain++)
        got += rig_load(&rig, 1 + chain * CHAIN, CHAIN, NULL);
    return got;
}

/* One line names the root, what it holds and what it was given; a number says what is missing. */
static void assert_told_once(void)
{
    const char *line = strstr(rig.log, "the file system is full at ");

    assert_non_null(line);
    assert_null(strstr(line + 1, "the file system is full at "));
    assert_non_null(strstr(rig.log, rig.dir));
    assert_non_null(strstr(line, "MiB of a cap of 1024 MiB"));
    assert_true(rig_stat(&rig, "disk.short_bytes") > 900 * MIB);
    assert_true(rig_stat(&rig, "disk.short_bytes") + rig_stat(&rig, "disk.bytes_used") <=
                1024 * MIB);
}

/* ---- C27 ---- */

static void test_c27_a_real_file_system_smaller_than_the_cap(void **state)
{
    struct rig_shape shape = rig_shape_large(CHAIN); /* 260 KiB a record: 4 MiB a chain */
    uint64_t got, before;
    char text[256];

    (void)state;
    make_fs("size=64m,mode=700");
    begin(&shape, "dram=16MiB", "1GiB");
    rig_open(&rig);
    others_leave(40 * MIB); /* and there is less yet */
    for (uint64_t chain = 0; chain < 30; chain++) {
        (void)rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL);
        assert_true(kvt_flush(rig.cache) <= 0);
        (void)rig_load(&rig, 1 + chain * CHAIN, CHAIN, NULL); /* serves */
    }
    assert_true(rig_stat(&rig, "disk.enospc") > 0);
    assert_told_once();
    got = load_chains(30);
    printf("           %llu of %d blocks while it was full\n", (unsigned long long)got, 30 * CHAIN);
    assert_true(got > 0);
    before = rig_dir_bytes(rig.dir, NULL);
    others_leave_all();
    rig_sleep_ms(2500); /* it looks for room every second */
    for (uint64_t chain = 100; chain < 108; chain++) {
        (void)rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL);
        (void)kvt_flush(rig.cache);
    }
    assert_int_equal(rig_store(&rig, 2001, CHAIN, 0, NULL), CHAIN);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_true(rig_dir_bytes(rig.dir, NULL) > before); /* it has grown into the room */
    rig_stat_text(&rig, "disk.state", text, sizeof(text));
    assert_string_equal(text, "ok");
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 2001, CHAIN, NULL), CHAIN);
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
}

static void store_flushed(uint64_t chains)
{
    for (uint64_t chain = 0; chain < chains; chain++) {
        assert_int_equal(rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL), CHAIN);
        assert_int_equal(kvt_flush(rig.cache), 0);
    }
}

/* Told before it hurts, by whoever is asked, with the figures; a cap that what is free and what the
 * store has there can hold is no matter. */
static void test_a_cap_that_does_not_fit_is_told(void **state)
{
    static const char says[] = "more than there is room for";
    static struct tool_run run;
    struct rig_shape shape = rig_shape_large(CHAIN);
    char disk[200], option[220], program[300];

    (void)state;
    make_fs("size=64m,mode=700");
    begin(&shape, "dram=16MiB", "1GiB");
    rig_open(&rig);
    const char *line = strstr(rig.log, says);
    assert_non_null(line);
    assert_null(strstr(line + 1, says));
    assert_non_null(strstr(line, "the store has 0 MiB there, and 6"));
    assert_non_null(strstr(line, "Free 960 MiB there, or set its cap to 64MiB"));
    store_flushed(10);
    rig_close(&rig);
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", rig.dir, NULL}, NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, says));
    assert_non_null(strstr(run.out, "free on the file system"));
    snprintf(disk, sizeof(disk), "%s:1GiB", rig.dir);
    snprintf(option, sizeof(option), "disk=%s", disk);
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "doctor", "--config", option, NULL},
             NULL, NULL);
    assert_non_null(strstr(run.out, says));
    snprintf(program, sizeof(program), "%s", KVT_TOOL);
    snprintf(strrchr(program, '/'), 9, "/kvtierd");
    const char *const daemon[] = {"kvtierd",  "--check", "--dram",    "16MiB", "--disk", disk,
                                  "--socket", "s",       "--fds-max", "64",    NULL};
    tool_run(&run, program, daemon, NULL, NULL);
    assert_int_equal(run.code, 0); /* it would start */
    assert_non_null(strstr(run.out, says));
    rig_free(&rig);
    begin(&shape, "dram=16MiB", "50MiB");
    rig_open(&rig);
    store_flushed(10); /* less than the cap is free now */
    rig_reopen(&rig);
    assert_null(strstr(rig.log, says));
    rig_close(&rig);
    tool_run(&run, KVT_TOOL, (const char *const[]){"kvtier", "stat", rig.dir, NULL}, NULL, NULL);
    assert_null(strstr(run.out, says));
}

/* Not a byte is left when it is opened: a sentence, and a cache that works without. */
static void test_opened_on_a_full_file_system(void **state)
{
    struct rig_shape shape = rig_shape_small(CHAIN);

    (void)state;
    make_fs("size=16m,mode=700");
    others_leave(0);
    begin(&shape, "dram=1MiB,disk_required=yes", "8MiB");
    assert_true(rig_try_open(&rig) < 0);
    printf("           %s\n", rig.error);
    assert_non_null(strstr(rig.error, rig.dir));
    assert_non_null(strstr(rig.error, "space"));
    rig_free(&rig);
    begin(&shape, "dram=1MiB,disk_required=no", "8MiB");
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, CHAIN, 0, NULL), CHAIN);
    assert_int_equal(rig_load(&rig, 1, CHAIN, NULL), CHAIN);
    rig_close(&rig);
    others_leave_all();
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "disk.roots"), 1);
    assert_int_equal(rig_store(&rig, 1, CHAIN, 0, NULL), CHAIN);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 1, CHAIN, NULL), CHAIN);
}

/* What was flushed stays readable, over a restart, when others then take the last byte; a purge
 * either says that it could not, or holds. */
static void test_flushed_then_full(void **state)
{
    struct rig_shape shape = rig_shape_small(CHAIN);
    struct kvt_key keys[CHAIN];
    long purged;

    (void)state;
    make_fs("size=64m,mode=700");
    begin(&shape, "dram=16MiB", "48MiB");
    rig_open(&rig);
    for (uint64_t chain = 0; chain < 64; chain++)
        assert_int_equal(rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL), CHAIN);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_reopen(&rig); /* nothing in DRAM */
    others_leave(0);
    assert_int_equal(load_chains(64), 64 * CHAIN);
    for (uint32_t i = 0; i < CHAIN; i++)
        keys[i] = rig_key(1 + i);
    purged = kvt_purge(rig.ns, keys, CHAIN);
    printf("           purge without a byte of room: %ld %s\n", purged,
           purged < 0 ? kvt_strerror((int)purged) : "");
    for (int lives = 0; lives < 3; lives++) {
        rig_reopen(&rig);
        assert_int_equal(rig_stat(&rig, "disk.roots"), 1);
        if (purged >= 0)
            assert_int_equal(rig_load(&rig, 1, CHAIN, NULL), 0);
        for (uint64_t chain = 1; chain < 64; chain++)
            assert_int_equal(rig_load(&rig, 1 + chain * CHAIN, CHAIN, NULL), CHAIN);
        others_leave(0); /* also what the close has given back */
    }
}

/* No inode is left, with bytes enough: no new segment can be made. */
static void test_out_of_inodes(void **state)
{
    struct rig_shape shape = rig_shape_small(CHAIN);

    (void)state;
    make_fs("size=64m,mode=700,nr_inodes=12");
    begin(&shape, "dram=1MiB", "48MiB");
    rig_open(&rig);
    for (uint64_t chain = 0; chain < 200; chain++) {
        (void)rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL);
        (void)kvt_flush(rig.cache);
    }
    assert_true(rig_stat(&rig, "disk.enospc") > 0);
    assert_true(load_chains(200) > 0);
    assert_int_equal(rig_store(&rig, 9001, CHAIN, 0, NULL), CHAIN);
    assert_int_equal(kvt_flush(rig.cache), 0); /* by recycling */
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 9001, CHAIN, NULL), CHAIN);
}

/* Fill, evict, recover, with others who come and go. */
static void test_fill_evict_recover(void **state)
{
    struct rig_shape shape = rig_shape_small(CHAIN);
    struct kvt_rng rng = {rig_seed()};
    const char *seconds = getenv("KVT_SOAK_SECONDS");
    int64_t until = seconds ? rig_now_ns() + strtoll(seconds, NULL, 10) * INT64_C(1000000000) : 0;
    uint64_t rounds = 0, loaded = 0;

    (void)state;
    make_fs("size=32m,mode=700");
    begin(&shape, "dram=1MiB", "64MiB");
    rig_open(&rig);
    for (; rounds < 24 || rig_now_ns() < until; rounds++) {
        others_leave(kvt_rng_below(&rng, 24) * MIB);
        for (int i = 0; i < 40; i++) {
            uint64_t seed = 1 + kvt_rng_below(&rng, 400) * CHAIN;

            if (kvt_rng_below(&rng, 3))
                (void)rig_store(&rig, seed, CHAIN, 0, NULL);
            else
                loaded += rig_load(&rig, seed, CHAIN, NULL);
            if (i % 10 == 9)
                (void)kvt_flush(rig.cache);
        }
        if (rounds % 3 == 2)
            rig_reopen(&rig);
    }
    assert_true(loaded > 0);
    others_leave_all();
    rig_reopen(&rig);
    assert_int_equal(rig_stat(&rig, "disk.roots"), 1);
    for (uint64_t chain = 1000; chain < 1040; chain++)
        (void)rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL);
    (void)kvt_flush(rig.cache); /* says what was dropped before */
    assert_int_equal(rig_store(&rig, 40001, CHAIN, 0, NULL), CHAIN);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 40001, CHAIN, NULL), CHAIN);
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
    printf("           %llu rounds, %llu blocks loaded, all exact\n", (unsigned long long)rounds,
           (unsigned long long)loaded);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_c27_a_real_file_system_smaller_than_the_cap, tear_down),
        cmocka_unit_test_teardown(test_a_cap_that_does_not_fit_is_told, tear_down),
        cmocka_unit_test_teardown(test_opened_on_a_full_file_system, tear_down),
        cmocka_unit_test_teardown(test_flushed_then_full, tear_down),
        cmocka_unit_test_teardown(test_out_of_inodes, tear_down),
        cmocka_unit_test_teardown(test_fill_evict_recover, tear_down),
    };

    own_mounts();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
