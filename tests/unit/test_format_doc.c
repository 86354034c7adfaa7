/* docs/format.md is enough to read a store.
 *
 * Goal:   a reader that shares nothing with the library, written from the document, finds exactly
 * the records that the library finds, byte for byte. Method: a real root is filled, purged and
 * recycled by the log; golden/read_store.py lists it; its lines are compared with the index. Then
 * bytes are damaged: what the library loses, it loses too.
 */
#include "support/store_help.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "io/io.h"
#include "support/l2_help.h"

#define CAP (12u << 20) /* 1 MiB of fixed files and eleven segments */

static char root[64];

static int setup(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "format-test-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state)
{
    struct dirent *entry;
    DIR *dir = opendir(root);
    char path[400];

    (void)state;
    while (dir && (entry = readdir(dir))) {
        snprintf(path, sizeof path, "%s/%s", root, entry->d_name);
        (void)unlink(path);
    }
    if (dir)
        closedir(dir);
    return rmdir(root);
}

/* The script's exit code; 77 when it or a library that it needs is missing. Its lines go to *out.
 */
static int run_reader(FILE **out)
{
    const char *const argv[] = {"python3", KVT_GOLDEN_DIR "/read_store.py", root, NULL};
    int pipe_fds[2], status;
    char buffer[4096];
    ssize_t len;
    pid_t pid;

    *out = tmpfile();
    assert_non_null(*out);
    assert_int_equal(pipe(pipe_fds), 0);
    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        dup2(pipe_fds[1], 1);
        close(pipe_fds[0]);
        unsetenv("LD_PRELOAD");
        execvp(argv[0], (char *const *)(uintptr_t)argv);
        _exit(77);
    }
    close(pipe_fds[1]);
    while ((len = read(pipe_fds[0], buffer, sizeof buffer)) > 0)
        assert_int_equal(fwrite(buffer, 1, (size_t)len, *out), len);
    close(pipe_fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    rewind(*out);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/* Every line is in the index as it says, and there are as many as there are entries. */
static int compare(const struct l2_env *env)
{
    uint32_t lines = 0, segment, page, pages, id;
    unsigned long long sequence;
    struct kvt_full_key key;
    char hash[65];
    FILE *out;
    int rc = run_reader(&out);

    while (fscanf(out, "%64s %llu %u %u %u\n", hash, &sequence, &segment, &page, &pages) == 5) {
        char want[65];

        /* the id stands in the first four bytes of the hash, little-endian */
        assert_int_equal(sscanf(hash, "%8x", &id), 1);
        id = __builtin_bswap32(id);
        assert_true(id < L2_IDS && env->index[id].present);
        l2_key(id, &key);
        for (size_t i = 0; i < 32; i++)
            snprintf(want + 2 * i, 3, "%02x", key.hash[i]);
        assert_string_equal(hash, want);
        assert_int_equal(env->index[id].sequence, sequence);
        assert_int_equal(env->index[id].where.segment, segment);
        assert_int_equal(env->index[id].where.page, page);
        assert_int_equal(env->index[id].pages, pages);
        lines++;
    }
    fclose(out);
    if (rc == 0)
        assert_int_equal(lines, l2_env_count(env));
    return rc;
}

static struct kvt_io *open_io(void)
{
    struct kvt_io_posix_params params = {.path = root, .threads = 2, .direct = -1};
    struct kvt_io *io = NULL;

    assert_int_equal(kvt_io_posix_new(&params, &io), 0);
    return io;
}

static void reopen(struct l2_env *env, struct kvt_io *io)
{
    l2_env_forget_index(env);
    assert_int_equal(l2_env_open(env, io), 0);
}

static void fill(struct l2_env *env, uint32_t rounds)
{
    struct kvt_rng rng = {test_seed()};

    for (uint32_t i = 0; i < rounds; i++) {
        uint32_t ids[20], count = 1 + (uint32_t)kvt_rng_below(&rng, 20);
        uint32_t first = (uint32_t)kvt_rng_below(&rng, 400);

        for (uint32_t k = 0; k < count; k++)
            ids[k] = first + k;
        assert_int_equal(l2_env_queue(env, ids, count, i, 1 + (uint32_t)kvt_rng_below(&rng, 9)), 0);
        l2_env_drain(env);
    }
}

static void test_reader_agrees(void **state)
{
    static struct l2_env env;
    struct kvt_io *io = open_io();
    int rc;

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    fill(&env, 20);
    assert_int_equal(l2_env_flush(&env), 0);
    rc = compare(&env); /* an open segment: walked */
    if (rc == 77) {
        print_message("[   SKIP   ] no python3 or no libxxhash.so.0\n");
        l2_env_close(&env);
        io->ops->destroy(io);
        skip();
    }
    assert_int_equal(rc, 0);
    fill(&env, 300); /* sealed and recycled segments */
    assert_true(env.evictions > 0);
    assert_int_equal(l2_env_purge_ns(&env, 2), 0);
    for (uint32_t id = 0; id < 100; id += 3)
        assert_int_equal(l2_env_purge_key(&env, id), 0);
    assert_int_equal(l2_env_flush(&env), 0);
    assert_int_equal(compare(&env), 0);
    l2_env_close(&env);
    reopen(&env, io);
    assert_true(l2_env_count(&env) > 100);
    assert_int_equal(compare(&env), 0);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* Damage in turn: record bytes, a trailer, a superblock copy. */
static void test_reader_refuses_what_the_library_refuses(void **state)
{
    static struct l2_env env;
    struct kvt_io *io = open_io();
    uint32_t before, victim = 0;
    char path[128];
    int fd, rc;

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    fill(&env, 120);
    l2_env_close(&env);
    reopen(&env, io);
    before = l2_env_count(&env);
    rc = compare(&env);
    if (rc == 77) {
        print_message("[   SKIP   ] no python3 or no libxxhash.so.0\n");
        l2_env_close(&env);
        io->ops->destroy(io);
        skip();
    }
    assert_int_equal(rc, 0);
    while (!env.index[victim].present)
        victim++;
    snprintf(path, sizeof path, "%s/seg-%08x", root, env.index[victim].where.segment);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "damaged", 7, env.index[victim].where.page * 4096 + 2000), 7);
    assert_int_equal(pwrite(fd, "damaged", 7, (1 << 20) - 4096 + 100), 7); /* its trailer */
    close(fd);
    l2_env_close(&env);
    snprintf(path, sizeof path, "%s/superblock", root);
    fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "damaged", 7, 4096 + 50), 7);
    close(fd);
    reopen(&env, io);
    (void)l2_env_verify(&env); /* drops what does not verify */
    assert_int_equal(l2_env_count(&env), before - 1);
    assert_false(env.index[victim].present);
    assert_in_range(compare(&env), 0,
                    1); /* 1: an entry that counts, a record that does not verify */
    l2_env_close(&env);
    io->ops->destroy(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_reader_agrees, setup, teardown),
        cmocka_unit_test_setup_teardown(test_reader_refuses_what_the_library_refuses, setup,
                                        teardown),
    };

    return cmocka_run_group_tests_name("format_doc", tests, NULL, NULL);
}
