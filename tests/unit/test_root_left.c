/* A root that is taken away under its owner: removed, moved, replaced, its lock or its files
 * deleted. Who is told "flushed" finds it after a restart.
 *
 * Goal:   from the moment on in which a restart would not find what is written, no flush succeeds,
 *         and the log says why, once; what is in DRAM is still served; when the directory is back,
 *         so are the flushes; two owners of one directory never write at the same time.
 * Method: the public API over a real directory that the test renames, deletes and replaces while
 *         the cache is open; over each backend that can be had. The ledger is what flushes said.
 * Checked to fail: with in_place() of io_files.c returning 0, and with named() looking at no link
 *         count.
 */
#include "support/rig.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "io/io.h"

#define BLOCKS 64u
#define PROMPT 8u

static struct rig rig, second;
static char aside[160];
static const char *backend = "posix";

static int tear_down(void **state)
{
    (void)state;
    rig_close(&rig);
    rig_close(&second);
    if (aside[0])
        rig_dir_remove(aside);
    rig_free(&rig);
    rig_free(&second);
    memset(&rig, 0, sizeof(rig));
    memset(&second, 0, sizeof(second));
    aside[0] = '\0';
    return 0;
}

/* An open cache with one prompt of its own that is on disk. */
static void open_with_a_prompt(struct rig *owner)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    char config[120];

    snprintf(config, sizeof(config), "dram=4MiB,io=%s,disk_required=yes", backend);
    rig_init(owner, &shape, config, "16MiB");
    rig_open(owner);
    assert_int_equal(rig_store(owner, 1, PROMPT, 0, NULL), PROMPT);
    assert_int_equal(kvt_flush(owner->cache), 0);
    snprintf(aside, sizeof(aside), "%s.aside", owner->dir);
}

/* A prompt that is stored now is not said to be on disk, but is served. */
static void nothing_is_flushed(struct rig *owner, uint64_t seed)
{
    char state[512];

    assert_int_equal(rig_store(owner, seed, PROMPT, 0, NULL), PROMPT);
    assert_true(kvt_flush(owner->cache) < 0);
    assert_int_equal(rig_load(owner, seed, PROMPT, NULL), PROMPT);
    assert_int_equal(rig_stat(owner, "disk.roots_failing"), 1);
    rig_stat_text(owner, "disk.state", state, sizeof(state));
    assert_non_null(strstr(state, owner->dir));
    const char *said = strstr(owner->log, "is not there any more");
    assert_non_null(said);
    assert_null(strstr(said + 1, "is not there any more"));
}

static void a_moved_root_takes_nothing_until_it_is_back(void **state)
{
    (void)state;
    open_with_a_prompt(&rig);
    assert_int_equal(rename(rig.dir, aside), 0);
    nothing_is_flushed(&rig, 100);
    assert_int_equal(rename(aside, rig.dir), 0);
    int rc = -1;
    for (int i = 0; i < 600 && rc != 0; i++) { /* a pause of writes ends by itself */
        rig_sleep_ms(100);
        (void)rig_store(&rig, 200, PROMPT, 0, NULL);
        rc = kvt_flush(rig.cache);
    }
    assert_int_equal(rc, 0);
    assert_non_null(strstr(rig.log, "the directory is back"));
    rig_reopen(&rig);
    assert_int_equal(rig_lookup(&rig, 1, PROMPT), PROMPT);
    assert_int_equal(rig_load(&rig, 200, PROMPT, NULL), PROMPT);
}

static void a_root_that_another_directory_replaces(void **state)
{
    (void)state;
    open_with_a_prompt(&rig);
    assert_int_equal(rename(rig.dir, aside), 0);
    assert_int_equal(mkdir(rig.dir, 0700), 0);
    nothing_is_flushed(&rig, 100);
    rig_reopen(&rig);
    assert_int_equal(rig_lookup(&rig, 1, PROMPT), 0);
    assert_int_equal(rig_lookup(&rig, 100, PROMPT), 0);
    assert_int_equal(rig_store(&rig, 1, PROMPT, 0, NULL), PROMPT);
    assert_int_equal(kvt_flush(rig.cache), 0);
}

static void a_removed_root(void **state)
{
    (void)state;
    open_with_a_prompt(&rig);
    rig_dir_remove(rig.dir);
    nothing_is_flushed(&rig, 100);
}

static void a_link_that_leads_to_it_is_the_same_place(void **state)
{
    (void)state;
    open_with_a_prompt(&rig);
    assert_int_equal(rename(rig.dir, aside), 0);
    assert_int_equal(symlink(aside, rig.dir), 0);
    assert_int_equal(rig_store(&rig, 100, PROMPT, 0, NULL), PROMPT);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_int_equal(unlink(rig.dir), 0);
    assert_int_equal(rename(aside, rig.dir), 0);
}

static void a_lock_that_is_gone_ends_the_first_owner(void **state)
{
    char lock[200];

    (void)state;
    open_with_a_prompt(&rig);
    snprintf(lock, sizeof(lock), "%s/lock", rig.dir);
    assert_int_equal(unlink(lock), 0);
    nothing_is_flushed(&rig, 100);

    struct rig_shape shape = rig_shape_small(BLOCKS);
    char config[120], own[128];
    snprintf(config, sizeof(config), "dram=4MiB,io=%s,disk_required=yes", backend);
    rig_init(&second, &shape, config, "16MiB");
    snprintf(own, sizeof(own), "%s", second.dir);
    snprintf(second.dir, sizeof(second.dir), "%s", rig.dir);
    rig_open(&second);
    for (uint64_t seed = 300; seed < 340; seed += 10) {
        assert_int_equal(rig_store(&second, seed, PROMPT, 0, NULL), PROMPT);
        assert_int_equal(kvt_flush(second.cache), 0);
        assert_int_equal(rig_store(&rig, seed + 500, PROMPT, 0, NULL), PROMPT);
        assert_true(kvt_flush(rig.cache) < 0);
        const struct kvt_key key = rig_key(seed + 501);
        assert_true(kvt_purge(rig.ns, &key, 1) < 0); /* it cannot be kept */
    }
    rig_close(&rig); /* must not touch what is another's now */
    rig_reopen(&second);
    assert_int_equal(rig_load(&second, 1, PROMPT, NULL), PROMPT);
    for (uint64_t seed = 300; seed < 340; seed += 10)
        assert_int_equal(rig_load(&second, seed, PROMPT, NULL), PROMPT);
    assert_int_equal(second.warnings, 0);
    rig_close(&second);
    snprintf(second.dir, sizeof(second.dir), "%s", own);
}

static void a_segment_without_a_name_takes_nothing(void **state)
{
    char name[400];
    struct dirent *entry;

    (void)state;
    open_with_a_prompt(&rig);
    DIR *dir = opendir(rig.dir);
    assert_non_null(dir);
    unsigned removed = 0;
    while ((entry = readdir(dir)) != NULL) {
        if (strncmp(entry->d_name, "seg", 3) != 0)
            continue;
        snprintf(name, sizeof(name), "%s/%s", rig.dir, entry->d_name);
        assert_int_equal(unlink(name), 0);
        removed++;
    }
    closedir(dir);
    assert_true(removed > 0);
    int rc = -1;
    for (int i = 0; i < 600 && rc != 0; i++) { /* until there is a segment that has a name */
        assert_int_equal(rig_store(&rig, 100, PROMPT, 0, NULL), PROMPT);
        rc = kvt_flush(rig.cache);
        if (rc != 0)
            rig_sleep_ms(100);
    }
    assert_int_equal(rc, 0);
    rig_reopen(&rig);
    assert_int_equal(rig_load(&rig, 100, PROMPT, NULL), PROMPT);
}

static void a_relative_path_is_that_of_the_open(void **state)
{
    char here[512], up[160];

    (void)state;
    assert_non_null(getcwd(here, sizeof(here)));
    struct rig_shape shape = rig_shape_small(BLOCKS);
    rig_init(&rig, &shape, "dram=4MiB,disk_required=yes", "16MiB");
    snprintf(up, sizeof(up), "%s", rig.dir);
    snprintf(aside, sizeof(aside), "%s", up);
    assert_int_equal(chdir(up), 0);
    snprintf(rig.dir, sizeof(rig.dir), "below");
    int rc = rig_try_open(&rig);
    assert_int_equal(chdir(here), 0);
    if (rc != 0) { /* relative roots are refused: nothing to look at */
        printf("           skipped: %s\n", rig.error);
        return;
    }
    assert_int_equal(kvt_flush(rig.cache), 0);
}

int main(void)
{
    char why[160];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_moved_root_takes_nothing_until_it_is_back, tear_down),
        cmocka_unit_test_teardown(a_root_that_another_directory_replaces, tear_down),
        cmocka_unit_test_teardown(a_removed_root, tear_down),
        cmocka_unit_test_teardown(a_link_that_leads_to_it_is_the_same_place, tear_down),
        cmocka_unit_test_teardown(a_lock_that_is_gone_ends_the_first_owner, tear_down),
        cmocka_unit_test_teardown(a_segment_without_a_name_takes_nothing, tear_down),
        cmocka_unit_test_teardown(a_relative_path_is_that_of_the_open, tear_down),
    };
    int failed = cmocka_run_group_tests_name("posix", tests, NULL, NULL);

    if (kvt_io_uring_probe(why, sizeof(why)) != 0) {
        printf("no ring: %s\n", why);
        return failed;
    }
    backend = "uring";
    return failed + cmocka_run_group_tests_name("uring", tests, NULL, NULL);
}
