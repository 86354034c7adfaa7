/* Directories that cannot be a root, or cannot hold what they should: each has its own sentence,
 * nothing in them is touched, and the cache works without them.
 *
 * Method: real file systems: small ones in memory, mounted in a mount namespace of this process,
 * read-only or full. Where mounting is not allowed those tests are skipped, and say so.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"

#define BLOCKS 32u

static struct rig rig;
static char place[100]; /* the mount point */
static bool may_mount, mounted;

static int tear_down(void **state)
{
    (void)state;
    rig_close(&rig);
    if (mounted)
        (void)umount2(place, MNT_DETACH);
    mounted = false;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

/* A file system in memory of `bytes`, and a rig whose root is the directory "root" in it. */
static bool mount_new(const char *size, const char *cap)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    char options[64];

    if (!may_mount) {
        printf("           skipped: mounting is not allowed here\n");
        return false;
    }
    snprintf(options, sizeof(options), "size=%s", size);
    assert_int_equal(mount("tmpfs", place, "tmpfs", 0, options), 0);
    mounted = true;
    rig_init(&rig, &shape, "dram=1MiB,disk_required=yes", NULL);
    snprintf(rig.dir, sizeof(rig.dir), "%s/root", place);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "%s", cap);
    return true;
}

static void remount(bool read_only)
{
    assert_int_equal(mount("none", place, NULL, MS_REMOUNT | (read_only ? MS_RDONLY : 0), NULL), 0);
}

/* Opening fails with a code and a sentence that has `words`; without disk_required it works. */
static void refused(int code, const char *words)
{
    char state[512];
    int rc = rig_try_open(&rig);

    if (rc != code || strstr(rig.error, words) == NULL || strstr(rig.error, rig.dir) == NULL)
        fail_msg("%d (%s) instead of %d (%s): %s", rc, kvt_strerror(rc), code, words, rig.error);
    assert_null(rig.cache);
    snprintf(rig.config, sizeof(rig.config), "dram=1MiB,disk_required=no");
    rig_open(&rig);
    rig_stat_text(&rig, "disk.state", state, sizeof(state));
    if (strstr(state, words) == NULL)
        fail_msg("disk.state: %s", state);
    assert_non_null(strstr(rig.log, "going on without it"));
    assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
    assert_int_equal(rig_load(&rig, 1, 8, NULL), 8);
    rig_close(&rig);
    snprintf(rig.config, sizeof(rig.config), "dram=1MiB,disk_required=yes");
}

static void fill_file_system(void)
{
    static const char zeros[65536];
    char path[256];
    int fd;

    snprintf(path, sizeof(path), "%s/filler", place);
    fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    for (size_t step = sizeof(zeros); step > 0;) {
        ssize_t n = write(fd, zeros, step);

        if (n < (ssize_t)step)
            step /= 2; /* to the last byte */
    }
    close(fd);
}

static void remove_filler(void)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/filler", place);
    assert_int_equal(unlink(path), 0);
}

static void read_only_file_system(void **state)
{
    uint64_t bytes;
    unsigned files, after;

    (void)state;
    if (!mount_new("64m", "32MiB"))
        return;
    remount(true);
    refused(KVT_E_READ_ONLY, "cannot be written"); /* nothing there yet */
    remount(false);
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    rig_close(&rig);
    bytes = rig_dir_bytes(rig.dir, &files);
    remount(true);
    refused(KVT_E_READ_ONLY, "cannot be written"); /* a root that was good */
    assert_int_equal(rig_dir_bytes(rig.dir, &after), bytes);
    assert_int_equal(after, files);
    remount(false);
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

static void full_file_system(void **state)
{
    (void)state;
    if (!mount_new("64m", "32MiB"))
        return;
    fill_file_system();
    refused(KVT_E_NO_SPACE, "file system is full");
    remove_filler();
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig);
    fill_file_system(); /* with a store in it: what is there is served all the same */
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    rig_close(&rig);
    remove_filler();
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

/* The file system is smaller than the cap: it fills up while the store runs. */
static void fills_up_while_running(void **state)
{
    uint32_t there = 0, after = 0;

    (void)state;
    if (!mount_new("12m", "64MiB"))
        return;
    rig_open(&rig);
    for (uint64_t seed = 1; seed < 1 + 64 * BLOCKS; seed += BLOCKS) { /* 24 MiB */
        (void)rig_store(&rig, seed, BLOCKS, 0, NULL);
        (void)kvt_flush(rig.cache);
    }
    printf(
        "           %llu writes found no room, %llu blocks on disk, %llu given up for new ones\n",
        (unsigned long long)rig_stat(&rig, "disk.enospc"),
        (unsigned long long)rig_stat(&rig, "disk.blocks"),
        (unsigned long long)rig_stat(&rig, "disk.evicted"));
    assert_true(rig_stat(&rig, "disk.enospc") > 0); /* also when recycling hides it */
    assert_true(rig_stat(&rig, "disk.evicted") > 0);
    for (uint64_t seed = 1; seed < 1 + 64 * BLOCKS; seed += BLOCKS)
        there += rig_load(&rig, seed, BLOCKS, NULL); /* exact bytes or a miss: asserted */
    assert_true(there >= BLOCKS);
    rig_reopen(&rig);
    for (uint64_t seed = 1; seed < 1 + 64 * BLOCKS; seed += BLOCKS)
        after += rig_load(&rig, seed, BLOCKS, NULL);
    printf("           %u of %u in reach, %u after a restart\n", there, 64 * BLOCKS, after);
    assert_true(after >= BLOCKS);
}

static void not_a_directory_of_ours(void **state)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    char path[120], lock[120], root[100];
    int fd;

    (void)state;
    rig_init(&rig, &shape, "dram=1MiB,disk_required=yes", "32MiB");
    snprintf(root, sizeof(root), "%.99s", rig.dir);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "1KiB");
    refused(KVT_E_TOO_SMALL, "a cap of 1024 bytes is too small");
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "5MiB");
    refused(KVT_E_TOO_SMALL, "a cap of 5 MiB is too small");
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "32MiB");
    snprintf(rig.dir, sizeof(rig.dir), "%s/no/such", root);
    refused(-ENOENT, "parent directory does not exist");
    snprintf(path, sizeof(path), "%s/file", root);
    fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    snprintf(rig.dir, sizeof(rig.dir), "%s", path);
    refused(-ENOTDIR, "is not a directory");
    snprintf(rig.dir, sizeof(rig.dir), "%s", root); /* holds somebody's file now */
    snprintf(lock, sizeof(lock), "%s/lock", root);
    assert_int_equal(unlink(lock), 0); /* made by the opens above */
    refused(KVT_E_NOT_OURS, "");
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(access(lock, F_OK), -1); /* not even the lock was made there */
}

/* A file with one of our names is somebody's file all the same. */
static void a_name_of_ours_is_no_proof(void **state)
{
    static const char *const names[] = {"lock", "stats"};
    struct rig_shape shape = rig_shape_small(BLOCKS);

    (void)state;
    rig_init(&rig, &shape, "dram=1MiB,disk_required=yes", "32MiB");
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(names); i++) {
        char path[160], text[16] = "";
        int fd;

        snprintf(path, sizeof(path), "%s/%s", rig.dir, names[i]);
        fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0644);
        assert_true(fd >= 0 && write(fd, "data", 4) == 4);
        refused(KVT_E_NOT_OURS, "");
        assert_int_equal(pread(fd, text, sizeof(text), 0), 4);
        assert_string_equal(text, "data");
        close(fd);
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(rig_try_open(&rig), 0); /* empty again: a root may be made */
}

/* A store whose files were replaced by things that are none: the file is named, not the root. */
static void odd_files_in_a_root(void **state)
{
    static const char *const names[] = {"superblock", "journal"};
    struct rig_shape shape = rig_shape_small(BLOCKS);
    struct kvt_key key = rig_key(1);
    char path[256];

    (void)state;
    rig_init(&rig, &shape, "dram=1MiB,disk_required=yes", "32MiB");
    for (unsigned kind = 0; kind < 3; kind++) {
        for (unsigned i = 0; i < KVT_ARRAY_LEN(names); i++) {
            rig_open(&rig);
            assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
            assert_int_equal(kvt_purge(rig.ns, &key, 1), 1); /* makes a journal */
            rig_close(&rig);
            snprintf(path, sizeof(path), "%s/%s", rig.dir, names[i]);
            assert_int_equal(unlink(path), 0);
            if (kind == 0)
                assert_int_equal(symlink("/etc/hostname", path), 0);
            else
                assert_int_equal(kind == 1 ? mkfifo(path, 0600) : mkdir(path, 0700), 0);
            int rc = rig_try_open(&rig);
            snprintf(path, sizeof(path), "\"%s\" in it is not a regular file", names[i]);
            if (rc == 0 && i == 1) { /* a journal that is lost: all on disk is in doubt, so gone */
                kvt_close(rig.cache);
                rig_open(&rig);
                assert_int_equal(rig_load(&rig, 1, 8, NULL), 0);
                rig_close(&rig);
            } else if (rc == 0 || strstr(rig.error, path) == NULL) {
                fail_msg("kind %u, %s: %d %s", kind, names[i], rc, rig.error);
            }
            rig_dir_remove(rig.dir);
        }
    }
}

/* One directory under two names: the second is refused by a sentence that says so. */
static void the_same_directory_spelt_twice(void **state)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    char spelt[1024];

    (void)state;
    rig_init(&rig, &shape, "dram=1MiB,disk_required=yes", "32MiB");
    snprintf(spelt, sizeof(spelt), "%s,disk=%s/../%s:32MiB", rig.config, rig.dir,
             strrchr(rig.dir, '/') + 1);
    snprintf(rig.config, sizeof(rig.config), "%.500s", spelt);
    assert_int_equal(rig_try_open(&rig), KVT_E_LOCKED);
    assert_non_null(strstr(rig.error, "under two names"));
    assert_null(strstr(rig.error, "stop it")); /* that would be this process */
}

/* A flush where another owner holds the only root says so: nothing of it is on disk. Once the owner
 * has gone the root is taken over, and a flush holds. */
static void a_flush_without_the_root_says_so(void **state)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    struct kvt_config *config = NULL;
    struct kvt_cache *second = NULL;
    char text[512], error[512] = "";
    int rc = KVT_E_LOCKED;

    (void)state;
    rig_init(&rig, &shape, "dram=1MiB,disk_required=yes", "32MiB");
    rig_open(&rig);
    assert_int_equal(kvt_config_new(&config), 0);
    snprintf(text, sizeof(text), "%s:32MiB", rig.dir);
    assert_int_equal(kvt_config_set(config, "dram", "1MiB"), 0);
    assert_int_equal(kvt_config_set(config, "disk", text), 0);
    assert_int_equal(kvt_open(config, &second, error, sizeof(error)), 0);
    assert_true(error[0] != 0);
    assert_int_equal(kvt_flush(second), KVT_E_LOCKED);
    rig_close(&rig);
    for (int i = 0; i < 1000 && rc == KVT_E_LOCKED; i++) {
        rig_sleep_ms(5);
        rc = kvt_flush(second);
    }
    assert_int_equal(rc, 0);
    kvt_close(second);
    kvt_config_free(config);
}

/* A limit on the size of files is an error of a write, also of the writes that open and close do on
 * the caller's thread, and does not end the process by a signal. */
static void a_limit_on_file_size(void **state)
{
    static const char *const backends[] = {"auto", "posix"};
    static const rlim_t limits[] = {100 << 10, 5000, 0};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(backends) * KVT_ARRAY_LEN(limits); i++) {
        struct rlimit limit = {limits[i / 2], limits[i / 2]};
        struct rig_shape shape = rig_shape_small(BLOCKS);
        char options[64];
        int status;
        pid_t pid;

        snprintf(options, sizeof(options), "dram=4MiB,io=%s", backends[i % 2]);
        rig_init(&rig, &shape, options, "64MiB");
        fflush(stdout);
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            if (setrlimit(RLIMIT_FSIZE, &limit))
                _exit(90);
            rig_open(&rig);
            (void)rig_store(&rig, 1, 8, 0, NULL);
            if (rig_load(&rig, 1, 8, NULL) != 8) /* DRAM serves all the same */
                _exit(91);
            (void)kvt_flush(rig.cache);
            rig_close(&rig);
            _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
        rig_free(&rig);
    }
    memset(&rig, 0, sizeof(rig));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(read_only_file_system, tear_down),
        cmocka_unit_test_teardown(full_file_system, tear_down),
        cmocka_unit_test_teardown(fills_up_while_running, tear_down),
        cmocka_unit_test_teardown(not_a_directory_of_ours, tear_down),
        cmocka_unit_test_teardown(a_name_of_ours_is_no_proof, tear_down),
        cmocka_unit_test_teardown(odd_files_in_a_root, tear_down),
        cmocka_unit_test_teardown(the_same_directory_spelt_twice, tear_down),
        cmocka_unit_test_teardown(a_flush_without_the_root_says_so, tear_down),
        cmocka_unit_test(a_limit_on_file_size),
    };
    int failed;

    rig_dir_make(place, sizeof(place));
    may_mount = unshare(CLONE_NEWNS) == 0 &&
                mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                mount("tmpfs", place, "tmpfs", 0, "size=1m") == 0 && umount(place) == 0;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_dir_remove(place);
    return failed;
}
