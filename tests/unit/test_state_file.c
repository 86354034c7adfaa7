/* Small texts that outlive the process.
 *
 * Goal:   what was written is read again, line by line; what is damaged, cut, longer, of another
 *         version, a link, a pipe or a directory is refused whole; a write that fails leaves the
 *         old file and nothing beside it; a text that does not fit is not written; nothing waits.
 * Method: real files. Every byte of a file is changed, and every length of it tried.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/state_file.h"
#include "kvtier/error.h"
#include "support/rig.h"

#define VERSION "kvtier-test 3\n"

static char dir[128], path[256], temp[256];
static struct kvt_state_text text;

static int make_dir(void **state)
{
    (void)state;
    rig_dir_make(dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/file", dir);
    snprintf(temp, sizeof(temp), "%s/file.tmp", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    rig_dir_remove(dir);
    return 0;
}

static size_t get_bytes(char *bytes, size_t room)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t len = fread(bytes, 1, room, file);
    fclose(file);
    return len;
}

static void put_bytes(const char *bytes, size_t len)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, len, file), len);
    fclose(file);
}

static void write_good(const char *word)
{
    kvt_state_begin(&text, VERSION);
    kvt_state_add(&text, "first %s\n", word);
    kvt_state_add(&text, "\n");
    kvt_state_add(&text, "last %d\n", 7);
    assert_int_equal(kvt_state_write(path, &text), 0);
}

static int read_file(void)
{
    char *lines;
    return kvt_state_read(path, VERSION, &text, &lines);
}

static void assert_good(const char *word)
{
    char want[64], *lines;
    snprintf(want, sizeof(want), "first %s", word);
    assert_int_equal(kvt_state_read(path, VERSION, &text, &lines), 0);
    assert_string_equal(kvt_state_next(&lines), want);
    assert_string_equal(kvt_state_next(&lines), "");
    assert_string_equal(kvt_state_next(&lines), "last 7");
    assert_null(kvt_state_next(&lines));
    assert_null(kvt_state_next(&lines));
}

static void what_is_written_is_read(void **state)
{
    struct stat st;
    char *lines;
    (void)state;
    assert_int_equal(read_file(), -ENOENT);
    write_good("one");
    assert_good("one");
    write_good("two"); /* over the old one */
    assert_good("two");
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_not_equal(access(temp, F_OK), 0);
    kvt_state_begin(&text, VERSION);
    assert_int_equal(kvt_state_write(path, &text), 0);
    assert_int_equal(kvt_state_read(path, VERSION, &text, &lines), 0);
    assert_null(kvt_state_next(&lines)); /* nothing in it is no fault */
    assert_int_equal(kvt_state_read(path, "kvtier-test 4\n", &text, &lines), KVT_E_CORRUPT);
    assert_null(lines);
}

static void damage_is_refused(void **state)
{
    char good[512], bad[520];
    (void)state;
    write_good("one");
    size_t len = get_bytes(good, sizeof(good));
    for (size_t at = 0; at < len; at++) {
        for (int bit = 0; bit < 8; bit++) {
            memcpy(bad, good, len);
            bad[at] ^= (char)(1 << bit);
            put_bytes(bad, len);
            if (read_file() != KVT_E_CORRUPT)
                fail_msg("bit %d of byte %zu", bit, at);
        }
        put_bytes(good, at);
        if (read_file() != KVT_E_CORRUPT)
            fail_msg("%zu bytes", at);
    }
    memcpy(bad, good, len);
    memcpy(bad + len, "\n\0x\n", 4);
    for (size_t more = 1; more <= 4; more++) {
        put_bytes(bad, len + more);
        assert_int_equal(read_file(), KVT_E_CORRUPT);
    }
    put_bytes(good, len);
    assert_good("one");
}

/* A line that does not fit makes the text one that is not written; one that just fits is. */
static void a_full_text_is_not_written(void **state)
{
    char line[101], *lines;
    size_t count = 0;
    (void)state;
    write_good("old");
    memset(line, 'x', sizeof(line));
    line[99] = '\n';
    line[100] = '\0';
    kvt_state_begin(&text, VERSION);
    while (kvt_state_room(&text, 100)) {
        kvt_state_add(&text, "%s", line);
        count++;
    }
    assert_false(text.full);
    kvt_state_add(&text, "%s", line);
    assert_true(text.full);
    assert_int_equal(kvt_state_write(path, &text), -ENOSPC);
    assert_good("old");
    kvt_state_begin(&text, VERSION);
    assert_false(text.full);
    for (size_t i = 0; i < count; i++)
        kvt_state_add(&text, "%s", line);
    size_t left = KVT_STATE_BYTES_MAX - KVT_STATE_END_BYTES - text.len;
    assert_true(kvt_state_room(&text, left) && !kvt_state_room(&text, left + 1));
    kvt_state_add(&text, "%*s\n", (int)left - 1, "");
    assert_int_equal(kvt_state_write(path, &text), 0);
    assert_int_equal(text.len, KVT_STATE_BYTES_MAX);
    assert_int_equal(kvt_state_read(path, VERSION, &text, &lines), 0);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(strlen(kvt_state_next(&lines)), 99);
    assert_int_equal(strlen(kvt_state_next(&lines)), left - 1);
    assert_null(kvt_state_next(&lines));
    /* one byte more than there is room for, and its hash would be right of what was read */
    FILE *file = fopen(path, "ab");
    assert_non_null(file);
    fputc('\n', file);
    fclose(file);
    assert_int_equal(read_file(), KVT_E_CORRUPT);
}

static void what_is_in_the_way(void **state)
{
    char other[256], far[5000];
    (void)state;
    snprintf(other, sizeof(other), "%s/other", dir);
    write_good("old");
    assert_int_equal(mkdir(temp, 0700), 0);
    kvt_state_begin(&text, VERSION);
    assert_int_equal(kvt_state_write(path, &text), -EISDIR);
    assert_good("old");
    assert_int_equal(rmdir(temp), 0);
    assert_int_equal(mkfifo(temp, 0600), 0); /* nobody reads it: no waiting, and it is not ours */
    kvt_state_begin(&text, VERSION);
    assert_int_equal(kvt_state_write(path, &text), KVT_E_NOT_OURS);
    assert_int_equal(unlink(temp), 0);
    assert_good("old");
    assert_int_equal(rename(path, other), 0);
    assert_int_equal(symlink(other, path), 0);
    assert_int_equal(read_file(), -ELOOP);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(read_file(), KVT_E_CORRUPT);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(read_file(), -EISDIR);
    kvt_state_begin(&text, VERSION);
    assert_int_not_equal(kvt_state_write(path, &text), 0);
    assert_int_not_equal(access(temp, F_OK), 0);
    assert_int_equal(rmdir(path), 0);
    memset(far, 'x', sizeof(far));
    far[sizeof(far) - 1] = '\0';
    kvt_state_begin(&text, VERSION);
    assert_int_equal(kvt_state_write(far, &text), -ENAMETOOLONG);
}

/* Devices, pipes, links and files of others are what they were afterwards; what we left behind
 * ourselves, whole or not, is replaced. */
static void what_is_not_ours_stays(void **state)
{
    char other[256], bytes[64];
    struct stat st;
    (void)state;
    snprintf(other, sizeof(other), "%s/other", dir);
    put_bytes("precious", 8);
    kvt_state_begin(&text, VERSION);
    assert_int_equal(kvt_state_write(path, &text), KVT_E_NOT_OURS);
    assert_int_equal(get_bytes(bytes, sizeof(bytes)), 8);
    assert_memory_equal(bytes, "precious", 8);
    assert_int_equal(rename(path, other), 0);
    assert_int_equal(symlink(other, path), 0);
    kvt_state_begin(&text, VERSION);
    assert_int_equal(kvt_state_write(path, &text), KVT_E_NOT_OURS);
    assert_int_equal(lstat(path, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    kvt_state_begin(&text, VERSION);
    assert_int_equal(kvt_state_write(path, &text), KVT_E_NOT_OURS);
    assert_int_equal(lstat(path, &st), 0);
    assert_true(S_ISFIFO(st.st_mode));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rename(other, temp), 0); /* a user's file with our suffix */
    kvt_state_begin(&text, VERSION);
    assert_int_equal(kvt_state_write(path, &text), KVT_E_NOT_OURS);
    assert_int_equal(stat(temp, &st), 0);
    assert_int_equal(st.st_size, 8);
    assert_int_equal(unlink(temp), 0);
    for (int i = 0; i < 3; i++) {
        put_bytes("kvtier-test 1\nx", (size_t[]){0, 15, 9}[i]);
        write_good("new");
        assert_good("new");
    }
    snprintf(other, sizeof(other), "%s/none/x", dir);
    assert_int_equal(kvt_state_place(other), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_written_is_read, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(damage_is_refused, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(a_full_text_is_not_written, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(what_is_in_the_way, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(what_is_not_ours_stays, make_dir, remove_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
