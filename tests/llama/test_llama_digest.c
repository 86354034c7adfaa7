/* Goal: the digest of a model is that of all its bytes and all its parts; a remembered one is used
 * only for the very same file, and never for one that changed.
 * Method: small files, known SHA-256 values, changes of content, length, time stamps and parts;
 * notes that are cut or forged.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "llama_digest.h"

#define ABC "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
#define EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

static char dir[64], model[128], notes[128];

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/kvt-test-digest-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(model, sizeof(model), "%s/model.gguf", dir);
    snprintf(notes, sizeof(notes), "%s/notes", dir);
    return 0;
}

static void empty_dir(const char *path)
{
    char name[512];
    DIR *list = opendir(path);
    struct dirent *entry;

    if (list == NULL)
        return;
    while ((entry = readdir(list)) != NULL) {
        snprintf(name, sizeof(name), "%s/%s", path, entry->d_name);
        (void)unlink(name);
    }
    closedir(list);
    (void)rmdir(path);
}

static int teardown(void **state)
{
    (void)state;
    empty_dir(notes);
    empty_dir(dir);
    return 0;
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

/* How many notes there are; the path of the last one goes to path. */
static int count_notes(char path[512])
{
    DIR *list = opendir(notes);
    struct dirent *entry;
    int count = 0;

    if (list == NULL)
        return 0;
    while ((entry = readdir(list)) != NULL)
        if (strstr(entry->d_name, ".sha256") != NULL) {
            snprintf(path, 512, "%s/%s", notes, entry->d_name);
            count++;
        }
    closedir(list);
    return count;
}

static void test_known_values(void **state)
{
    (void)state;
    char hex[KVT_DIGEST_HEX + 1];

    write_file(model, "abc");
    assert_int_equal(kvt_model_digest(model, NULL, hex), 0);
    assert_string_equal(hex, ABC);
    write_file(model, "");
    assert_int_equal(kvt_model_digest(model, NULL, hex), 0);
    assert_string_equal(hex, EMPTY);
}

static void test_errors(void **state)
{
    (void)state;
    char hex[KVT_DIGEST_HEX + 1], long_path[5000];

    assert_int_equal(kvt_model_digest("/nonexistent/x", NULL, hex), -ENOENT);
    assert_int_equal(kvt_model_digest(dir, NULL, hex), -EINVAL);
    memset(long_path, 'a', sizeof(long_path) - 1);
    long_path[0] = '/';
    long_path[sizeof(long_path) - 1] = '\0';
    assert_int_equal(kvt_model_digest(long_path, NULL, hex), -ENAMETOOLONG);
}

/* A fresh file is not remembered: it could change again within the same time stamp. */
static void test_fresh_file_is_not_remembered(void **state)
{
    (void)state;
    char hex[KVT_DIGEST_HEX + 1], path[512];

    write_file(model, "abc");
    assert_int_equal(kvt_model_digest(model, notes, hex), 0);
    assert_string_equal(hex, ABC);
    assert_int_equal(count_notes(path), 0);
    write_file(model, "abd");
    assert_int_equal(kvt_model_digest(model, notes, hex), 0);
    assert_string_not_equal(hex, ABC);
}

static void test_remembered(void **state)
{
    (void)state;
    const struct timespec settle = {2, 200000000};
    char hex[KVT_DIGEST_HEX + 1], path[512];
    struct stat st;
    const char forged[] = "0000000000000000000000000000000000000000000000000000000000000000\n";

    write_file(model, "abc");
    nanosleep(&settle, NULL);
    assert_int_equal(kvt_model_digest(model, notes, hex), 0);
    assert_string_equal(hex, ABC);
    assert_int_equal(count_notes(path), 1);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(stat(notes, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    /* it is used: a forged note shows */
    write_file(path, forged);
    assert_int_equal(kvt_model_digest(model, notes, hex), 0);
    assert_memory_equal(hex, forged, KVT_DIGEST_HEX);
    /* a note that is no note is not */
    char letters[KVT_DIGEST_HEX + 2] = "";
    memset(letters, 'z', KVT_DIGEST_HEX);
    letters[KVT_DIGEST_HEX] = '\n';
    const char *const bad[] = {"", "abc\n", letters};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_file(path, bad[i]);
        assert_int_equal(kvt_model_digest(model, notes, hex), 0);
        assert_string_equal(hex, ABC);
    }
    /* another content of the same length with the same mtime: ctime tells */
    assert_int_equal(kvt_model_digest(model, notes, hex), 0);
    assert_int_equal(stat(model, &st), 0);
    write_file(model, "abd");
    const struct timespec times[2] = {st.st_atim, st.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    assert_int_equal(kvt_model_digest(model, notes, hex), 0);
    assert_string_not_equal(hex, ABC);
    /* a link in place of a note is not followed */
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("/etc/passwd", path), 0);
    assert_int_equal(kvt_model_digest(model, notes, hex), 0);
}

static void test_splits(void **state)
{
    (void)state;
    char first[256], second[256], hex[KVT_DIGEST_HEX + 1], other[KVT_DIGEST_HEX + 1];

    snprintf(first, sizeof(first), "%s/big-00001-of-00002.gguf", dir);
    snprintf(second, sizeof(second), "%s/big-00002-of-00002.gguf", dir);
    write_file(first, "abc");
    assert_int_equal(kvt_model_digest(first, NULL, hex), -ENOENT); /* a part is missing */
    write_file(second, "def");
    assert_int_equal(kvt_model_digest(first, NULL, hex), 0);
    assert_string_not_equal(hex, ABC);
    write_file(second, "deg");
    assert_int_equal(kvt_model_digest(first, NULL, other), 0);
    assert_string_not_equal(hex, other);                      /* every part counts */
    assert_int_equal(kvt_model_digest(second, NULL, hex), 0); /* not a first part: itself */
    const char *const plain[] = {"big-00001-of-00001.gguf", "big-0001-of-00002.gguf",
                                 "big-00001-of-0000x.gguf", "-00001-of-00002.ggu"};
    for (size_t i = 0; i < sizeof(plain) / sizeof(plain[0]); i++) {
        char path[256];
        snprintf(path, sizeof(path), "%s/%s", dir, plain[i]);
        write_file(path, "abc");
        assert_int_equal(kvt_model_digest(path, NULL, hex), 0);
        assert_string_equal(hex, ABC);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_known_values, setup, teardown),
        cmocka_unit_test_setup_teardown(test_errors, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fresh_file_is_not_remembered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_remembered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_splits, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
