/* Goal: `kvtier fsck` says what a store holds and what is wrong with it, exits 1 when something is,
 * refuses what is no store or is owned by a process, and changes nothing. Method: a store is
 * written through the log in this process, on a real directory; the built binary is run on it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/l2_help.h"
#include "support/run_tool.h"

#define CAP (8u << 20)

static struct l2_env env;
static struct tool_run run;
static char base[256], dir[300];

static struct kvt_io *open_io(void)
{
    struct kvt_io_posix_params params = {.path = dir, .threads = 2, .direct = 0};
    struct kvt_io *io = NULL;

    assert_int_equal(kvt_io_posix_new(&params, &io), 0);
    assert_int_equal(io->ops->lock(io, NULL), 0);
    return io;
}

static int setup(void **state)
{
    struct kvt_io *io;

    (void)state;
    l2_dir_make(base);
    snprintf(dir, sizeof dir, "%s/root", base);
    io = open_io();
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 60; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    assert_int_equal(l2_env_purge_key(&env, 1), 0);
    l2_env_close(&env);
    io->ops->destroy(io);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    l2_dir_remove(base);
    return 0;
}

static void fsck(const char *path, const char *option, const char *another)
{
    const char *argv[] = {"kvtier", "fsck", path, option, another, NULL};

    tool_run(&run, KVT_TOOL, argv, NULL, NULL);
}

static json_t *fsck_json(const char *option)
{
    json_t *out;

    fsck(dir, "--json", option);
    out = json_loads(run.out, 0, NULL);
    assert_non_null(out);
    assert_int_equal(json_array_size(json_object_get(out, "problems")),
                     json_integer_value(json_object_get(out, "problem_count")));
    return out;
}

static int64_t number(const json_t *object, const char *key)
{
    assert_true(json_is_integer(json_object_get(object, key)));
    return json_integer_value(json_object_get(object, key));
}

static void path_of(char path[400], const char *name)
{
    snprintf(path, 400, "%s/%s", dir, name);
}

static void damage(const char *name, off_t offset)
{
    char path[400];
    int fd;

    path_of(path, name);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "damage", 6, offset), 6);
    close(fd);
}

static void test_healthy(void **state)
{
    struct stat before, after;
    char path[400];
    json_t *out;

    (void)state;
    path_of(path, "superblock");
    assert_int_equal(stat(path, &before), 0);
    out = fsck_json(NULL);
    assert_int_equal(run.code, 0);
    assert_string_equal(run.err, "");
    assert_int_equal(number(out, "records"), 59);
    assert_int_equal(number(out, "bytes"), 59 * 40960);
    assert_int_equal(number(out, "purged"), 1);
    assert_int_equal(number(out, "segments"), 3);
    json_decref(out);
    fsck(dir, NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "59 records"));
    assert_non_null(strstr(run.out, "no problems"));
    fsck(dir, "--quick", NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "not read"));
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_mtim.tv_nsec, after.st_mtim.tv_nsec);
    assert_int_equal(before.st_mtim.tv_sec, after.st_mtim.tv_sec);
}

static void test_damage_is_found(void **state)
{
    json_t *out;

    (void)state;
    damage("seg-00000000", env.index[2].where.page * 4096 + 9000);
    out = fsck_json(NULL);
    assert_int_equal(run.code, 1);
    assert_int_equal(number(out, "records"), 58);
    assert_int_equal(number(out, "problem_count"), 1);
    assert_non_null(strstr(json_string_value(json_array_get(json_object_get(out, "problems"), 0)),
                           "seg-00000000: record at page"));
    json_decref(out);
    fsck(dir, NULL, NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.out, "problem: seg-00000000"));
    assert_non_null(strstr(run.out, "\n1 problem\nremedy: none is needed"));
    out = fsck_json("--quick");
    assert_int_equal(run.code, 0);
    json_decref(out);
}

/* A segment that somebody removed: the last owner's count tells. */
static void test_a_vanished_segment_is_noted(void **state)
{
    char path[400];
    json_t *out;
    FILE *file;

    (void)state;
    path_of(path, "stats");
    file = fopen(path, "w");
    assert_non_null(file);
    fputs("disk.roots 1\ndisk.segments 3\n", file);
    fclose(file);
    out = fsck_json(NULL);
    assert_int_equal(json_array_size(json_object_get(out, "notes")), 0); /* all three are there */
    json_decref(out);
    path_of(path, "seg-00000001");
    assert_int_equal(unlink(path), 0);
    out = fsck_json(NULL);
    assert_int_equal(run.code, 0); /* not damage: nobody knows */
    assert_non_null(strstr(json_string_value(json_array_get(json_object_get(out, "notes"), 0)),
                           "counted 3 segments with records, 2 are here"));
    json_decref(out);
}

static void test_owned_is_refused(void **state)
{
    struct kvt_io *io = open_io();
    char pid[32];

    (void)state;
    fsck(dir, NULL, NULL);
    assert_int_equal(run.code, 1);
    snprintf(pid, sizeof pid, "process %ld", (long)getpid());
    assert_non_null(strstr(run.err, pid));
    assert_non_null(strstr(run.err, "--force"));
    assert_string_equal(run.out, "");
    fsck(dir, "--force", NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "59 records"));
    io->ops->destroy(io);
}

static void test_not_a_store(void **state)
{
    char path[400];
    int fd;

    (void)state;
    snprintf(path, sizeof path, "%s/other", base);
    assert_int_equal(mkdir(path, 0700), 0);
    fsck(path, NULL, NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "empty"));
    snprintf(path, sizeof path, "%s/other/notes.txt", base);
    fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_int_equal(write(fd, "hello", 5), 5);
    close(fd);
    snprintf(path, sizeof path, "%s/other", base);
    fsck(path, NULL, NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "not a kvtier store"));
    snprintf(path, sizeof path, "%s/other/lock", base);
    assert_int_not_equal(access(path, F_OK), 0); /* nothing was made there */
    fsck("/does/not/exist", NULL, NULL);
    assert_int_equal(run.code, 1);
    assert_non_null(strstr(run.err, "/does/not/exist"));
    fsck(dir, "--quik", NULL);
    assert_int_equal(run.code, 2);
    assert_non_null(strstr(run.err, "--quick"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_healthy, setup, teardown),
        cmocka_unit_test_setup_teardown(test_damage_is_found, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_vanished_segment_is_noted, setup, teardown),
        cmocka_unit_test_setup_teardown(test_owned_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_a_store, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
