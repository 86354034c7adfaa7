/* What docs/security.md says is defended, and no other test shows.
 *
 * Goal:   bytes of a purged block are in no file any more; a prompt that is only looked up, or
 * stored while the cache is off, leaves no byte; no salt and no model name is in any file; blocks
 *         are in no core dump and in no forked child; no socket is opened; files that somebody else
 *         has put into a root are refused.
 * Method: a cache over a directory of its own, marked bytes, and a look at everything below the
 *         directory, at /proc/self/smaps and at /proc/self/fd.
 */
#include "support/rig.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"

enum { CHAIN = 16 };
static const char marker[] = "This is what somebody asked a model, and nobody else may read it.";

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static void begin(const char *config)
{
    struct rig_shape shape = rig_shape_small(CHAIN);

    rig_init(&rig, &shape, config, "32MiB");
    rig_open(&rig);
}

/* How often bytes stand in the files of the root. */
static unsigned found_in_files(const void *bytes, size_t len)
{
    DIR *dir = opendir(rig.dir);
    const struct dirent *entry;
    unsigned found = 0;

    assert_non_null(dir);
    while ((entry = readdir(dir)) != NULL) {
        struct stat st;
        uint8_t *data, *at;
        int fd;

        if (entry->d_name[0] == '.')
            continue;
        fd = openat(dirfd(dir), entry->d_name, O_RDONLY | O_CLOEXEC);
        assert_true(fd >= 0);
        assert_int_equal(fstat(fd, &st), 0);
        data = malloc((size_t)st.st_size + 1);
        assert_non_null(data);
        assert_int_equal(read(fd, data, (size_t)st.st_size), st.st_size);
        for (at = data; (at = memmem(at, (size_t)(data + st.st_size - at), bytes, len)); at++)
            found++;
        free(data);
        close(fd);
    }
    closedir(dir);
    return found;
}

/* Every row of a page begins with the marker. */
static void mark(uint32_t page)
{
    rig_fill(&rig, page, page + 1);
    for (uint32_t part = 0; part < rig.layout.part_count; part++)
        for (uint32_t row = 0; row < rig.shape.heads * rig.shape.tokens; row++)
            memcpy(rig.memory[part] + page * (size_t)rig.places[part].stride_block +
                       row * (size_t)rig.places[part].stride_token,
                   marker, sizeof(marker) - 1);
}

static void name_blocks(struct kvt_key *keys, uint32_t *ids)
{
    for (uint32_t i = 0; i < CHAIN; i++) {
        keys[i] = rig_key(1 + i);
        ids[i] = i;
    }
}

static void store_marked(int want)
{
    struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = 1};
    struct kvt_key keys[CHAIN];
    uint32_t ids[CHAIN];
    struct kvt_req *req;

    name_blocks(keys, ids);
    for (uint32_t i = 0; i < CHAIN; i++)
        mark(i);
    assert_int_equal(kvt_pool_reset_origin(rig.pool, ids, CHAIN), 0);
    assert_int_equal(kvt_store(rig.ns, rig.pool, keys, ids, CHAIN, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, INT64_C(60000000000)), 1);
    for (uint32_t i = 0; i < CHAIN; i++)
        assert_int_equal(kvt_req_status(req, NULL)[i], want);
    kvt_req_free(req);
}

/* ---- purge really removes ---- */

static void check_purged(bool whole, bool flushed)
{
    struct kvt_key keys[CHAIN];
    uint32_t ids[CHAIN];

    begin("dram=4MiB");
    name_blocks(keys, ids);
    store_marked(0);
    if (flushed) {
        assert_int_equal(kvt_flush(rig.cache), 0);
        assert_true(found_in_files(marker, sizeof(marker) - 1) >= CHAIN);
    }
    assert_int_equal(kvt_purge(rig.ns, whole ? NULL : keys, whole ? 0 : CHAIN), CHAIN);
    assert_int_equal(rig_load(&rig, 1, CHAIN, NULL), 0);
    if (flushed) /* erased behind the answer, and at the latest when the cache is closed */
        for (int i = 0; i < 6000 && found_in_files(marker, sizeof(marker) - 1); i++)
            rig_sleep_ms(10);
    rig_close(&rig);
    assert_int_equal(found_in_files(marker, sizeof(marker) - 1), 0);
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, CHAIN, NULL), 0);
    assert_int_equal(rig_stat(&rig, "disk.blocks"), 0);
    tear_down(NULL);
}

static void test_purged_blocks_leave_no_byte(void **state)
{
    (void)state;
    check_purged(false, true);
}

static void test_a_purged_namespace_leaves_no_byte(void **state)
{
    (void)state;
    check_purged(true, true);
}

static void test_purged_while_they_are_written(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        check_purged(false, false);
        check_purged(true, false);
    }
}

/* ---- what is not stored is nowhere ---- */

static void test_what_is_not_stored_leaves_no_byte(void **state)
{
    struct kvt_key keys[CHAIN];
    uint32_t ids[CHAIN];
    uint64_t bytes;

    (void)state;
    begin("dram=4MiB");
    name_blocks(keys, ids);
    bytes = rig_dir_bytes(rig.dir, NULL);
    assert_int_equal(kvt_lookup(rig.ns, keys, CHAIN, NULL, NULL), 0);
    assert_int_equal(rig_load(&rig, 1, CHAIN, NULL), 0);
    assert_true(kvt_prefetch(rig.ns, keys, CHAIN, NULL) >= 0);
    assert_true(kvt_pin(rig.ns, keys, CHAIN) >= 0);
    kvt_enable(rig.cache, 0);
    store_marked(KVT_E_MISS);
    kvt_enable(rig.cache, 1);
    assert_int_equal(kvt_flush(rig.cache), 0);
    assert_int_equal(kvt_lookup(rig.ns, keys, CHAIN, NULL, NULL), 0);
    assert_int_equal(rig_stat(&rig, "dram.blocks"), 0);
    rig_close(&rig);
    assert_int_equal(found_in_files(marker, sizeof(marker) - 1), 0);
    for (uint32_t i = 0; i < CHAIN; i++)
        assert_int_equal(found_in_files(keys[i].hash, KVT_HASH_BYTES_MAX), 0);
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "disk.blocks"), 0);
    rig_close(&rig);
    assert_true(rig_dir_bytes(rig.dir, NULL) <= bytes + 2 * 1048576); /* a segment made ahead */
}

static void test_no_salt_and_no_name_in_any_file(void **state)
{
    static const char salt[] = "salt-of-a-tenant-7f3a", model[] = "model-that-is-nobodys-business",
                      extra[] = "adapter-of-a-customer";
    struct kvt_identity identity;
    struct rig_shape shape = rig_shape_small(CHAIN);

    (void)state;
    rig_init(&rig, &shape, "dram=4MiB", "32MiB");
    identity = rig.identity;
    rig.identity.salt = salt;
    rig.identity.salt_len = sizeof(salt) - 1;
    rig.identity.model = model;
    rig.identity.extra = extra;
    rig_open(&rig);
    assert_int_equal(rig_store(&rig, 1, CHAIN, 0, NULL), CHAIN);
    assert_int_equal(kvt_purge(rig.ns, NULL, 0), CHAIN);
    assert_int_equal(rig_store(&rig, 1, CHAIN, 0, NULL), CHAIN);
    assert_int_equal(kvt_flush(rig.cache), 0);
    rig_close(&rig); /* with it, the file of statistics is written */
    assert_int_equal(found_in_files(salt, sizeof(salt) - 1), 0);
    assert_int_equal(found_in_files(model, sizeof(model) - 1), 0);
    assert_int_equal(found_in_files(extra, sizeof(extra) - 1), 0);
    rig.identity = identity;
}

/* ---- the process ---- */

/* The flags of the mapping in which the arena begins. */
static void arena_flags(uint64_t bytes, char *flags, size_t len)
{
    char line[512];
    FILE *file = fopen("/proc/self/smaps", "r");
    bool ours = false;

    flags[0] = '\0';
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        unsigned long start, end;

        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            ours = end - start == bytes;
        if (ours && strncmp(line, "VmFlags:", 8) == 0)
            snprintf(flags, len, "%.250s", line + 8);
    }
    fclose(file);
}

static void test_blocks_are_in_no_core_dump_and_no_child(void **state)
{
    const uint64_t bytes = 12345 * UINT64_C(4096); /* a size that nothing else has */
    char config[64], flags[256];

    (void)state;
    snprintf(config, sizeof(config), "dram=%llu,huge_pages=off", (unsigned long long)bytes);
    begin(config);
    arena_flags(bytes, flags, sizeof(flags));
    assert_non_null(strstr(flags, " dd")); /* MADV_DONTDUMP */
    assert_non_null(strstr(flags, " dc")); /* MADV_DONTFORK */
}

static void test_no_socket_is_opened(void **state)
{
    DIR *dir;
    const struct dirent *entry;

    (void)state;
    begin("dram=4MiB");
    dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while ((entry = readdir(dir)) != NULL) {
        char target[256] = "";

        if (entry->d_name[0] == '.' || strtol(entry->d_name, NULL, 10) <= 2)
            continue;
        (void)readlinkat(dirfd(dir), entry->d_name, target, sizeof(target) - 1);
        assert_null(strstr(target, "socket:"));
    }
    closedir(dir);
}

/* ---- files of others ---- */

/* A root of one chain, closed; its file `name` given to somebody else. False: only root can. */
static bool give_away(const char *name, struct stat *st)
{
    char path[200];

    if (geteuid() != 0) {
        printf("           skipped: only root can give a file away\n");
        return false;
    }
    begin("dram=4MiB");
    assert_int_equal(rig_store(&rig, 1, CHAIN, 0, NULL), CHAIN);
    rig_close(&rig);
    snprintf(path, sizeof(path), "%s/%s", rig.dir, name);
    assert_int_equal(chown(path, 65534, 65534), 0);
    assert_int_equal(stat(path, st), 0);
    return true;
}

static void test_a_root_with_a_file_of_another_user_is_refused(void **state)
{
    static const char *const names[] = {"superblock", "journal", "lock"};
    struct stat st;

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(names); i++) {
        if (!give_away(names[i], &st))
            skip();
        (void)snprintf(rig.config, sizeof(rig.config), "dram=4MiB,disk_required=yes");
        if (rig_try_open(&rig) == 0) {
            kvt_close(rig.cache);
            rig.cache = NULL;
            fail_msg("%s of another user was taken", names[i]);
        }
        assert_non_null(strstr(rig.error, "owner"));
        tear_down(NULL);
    }
}

/* A segment is neither read nor written; the rest of the root is used. */
static void test_a_segment_of_another_user_is_left_alone(void **state)
{
    struct stat before, after;
    char path[200];

    (void)state;
    if (!give_away("seg-00000000", &before))
        skip();
    rig_open(&rig);
    assert_int_equal(rig_load(&rig, 1, CHAIN, NULL), 0);
    for (uint64_t chain = 1; chain < 300; chain++) /* more than the cap: segments are recycled */
        (void)rig_store(&rig, 1 + chain * CHAIN, CHAIN, 0, NULL);
    assert_true(kvt_flush(rig.cache) <= 0);
    snprintf(path, sizeof(path), "%s/seg-00000000", rig.dir);
    rig_close(&rig);
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(after.st_uid, 65534);
    assert_int_equal(after.st_mtim.tv_sec, before.st_mtim.tv_sec);
    assert_int_equal(after.st_mtim.tv_nsec, before.st_mtim.tv_nsec);
}

static void test_a_directory_for_everybody_is_warned_of(void **state)
{
    struct rig_shape shape = rig_shape_small(CHAIN);

    (void)state;
    rig_init(&rig, &shape, "dram=4MiB", "32MiB");
    assert_int_equal(chmod(rig.dir, 0777), 0);
    rig_open(&rig);
    assert_non_null(strstr(rig.log, "every user"));
    rig_close(&rig);
    assert_int_equal(chmod(rig.dir, 01777), 0); /* others cannot take our files away */
    rig_open(&rig);
    assert_null(strstr(rig.log, "every user"));
}

/* ---- the environment ---- */

/* In the child: 0: KVTIER_CONFIG was not looked at; 1: it was, and this is no set-user-id program;
 * 2: it was, and it is. */
static int child_open(void)
{
    struct kvt_cache *cache;
    int rc = kvt_open(NULL, &cache, NULL, 0);

    return rc == 0 ? 0 : rc != KVT_E_CONFIG_KEY ? 3 : getauxval(AT_SECURE) ? 2 : 1;
}

static int run_copy(const char *path)
{
    char *const argv[] = {(char *)(uintptr_t)path, (char *)(uintptr_t) "open", NULL};
    char *const envp[] = {(char *)(uintptr_t) "KVTIER_CONFIG=nonsense=1", NULL};
    int status = 0;
    pid_t pid;

    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)execve(path, argv, envp);
        _exit(99);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_the_environment_of_a_set_user_id_program_is_ignored(void **state)
{
    char dir[100], path[120], buf[65536];
    int from, to;
    ssize_t n;

    (void)state;
    if (geteuid() != 0) {
        printf("           skipped: only root can make a program of somebody else\n");
        skip();
    }
    rig_dir_make(dir, sizeof(dir));
    assert_int_equal(chmod(dir, 0711), 0);
    snprintf(path, sizeof(path), "%s/program", dir);
    from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    to = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
    assert_true(from >= 0 && to >= 0);
    while ((n = read(from, buf, sizeof(buf))) > 0)
        assert_int_equal(write(to, buf, (size_t)n), n);
    close(from);
    close(to);
    assert_int_equal(run_copy(path), 1); /* it is looked at */
    assert_int_equal(chown(path, 65534, 65534), 0);
    assert_int_equal(chmod(path, 04755), 0);
    n = run_copy(path);
    rig_dir_remove(dir);
    if (n == 1 || n == 99) { /* mounted with nosuid, or user 65534 may not read the libraries */
        printf("           skipped: set-user-id has no effect here\n");
        skip();
    }
    assert_int_equal(n, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_purged_blocks_leave_no_byte, tear_down),
        cmocka_unit_test_teardown(test_a_purged_namespace_leaves_no_byte, tear_down),
        cmocka_unit_test_teardown(test_purged_while_they_are_written, tear_down),
        cmocka_unit_test_teardown(test_what_is_not_stored_leaves_no_byte, tear_down),
        cmocka_unit_test_teardown(test_no_salt_and_no_name_in_any_file, tear_down),
        cmocka_unit_test_teardown(test_blocks_are_in_no_core_dump_and_no_child, tear_down),
        cmocka_unit_test_teardown(test_no_socket_is_opened, tear_down),
        cmocka_unit_test_teardown(test_a_root_with_a_file_of_another_user_is_refused, tear_down),
        cmocka_unit_test_teardown(test_a_segment_of_another_user_is_left_alone, tear_down),
        cmocka_unit_test_teardown(test_a_directory_for_everybody_is_warned_of, tear_down),
        cmocka_unit_test(test_the_environment_of_a_set_user_id_program_is_ignored),
    };

    if (argc == 2 && strcmp(argv[1], "open") == 0)
        _exit(child_open());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
