/* The options io, io_register, fds_max and scrub through a whole cache (C29, C41).
 *
 * Goal:   whatever moves the bytes, they are the same; which backend is in force and why can be
 *         read; a backend that was asked for by name and is not there is an error that says so.
 * Method: real roots; seccomp filters in children, whose verdict is their exit code.
 */
#include "support/rig.h"

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "io/io.h"
#include "support/no_ring.h"

#define BLOCKS 64u
#define SKIPPED 77

static struct rig rig;

static void set_up(const char *config, const char *cap)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(&rig, &shape, config, cap);
    rig_open(&rig);
}

static int tear_down(void **state)
{
    (void)state;
    rig_close(&rig);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static const char *stat_of(const char *name)
{
    static char text[512];

    rig_stat_text(&rig, name, text, sizeof(text));
    return text;
}

/* Stored with one backend, read with each. */
static void every_backend_reads_what_any_wrote(void **state)
{
    static const char *const choices[] = {"posix", "uring", "auto"};
    char config[128], why[160];
    bool ring = kvt_io_uring_probe(why, sizeof(why)) == 0;

    (void)state;
    if (!ring)
        printf("           without uring: %s\n", why);
    set_up("dram=4MiB,io=auto", "128MiB");
    for (size_t i = 0; i < KVT_ARRAY_LEN(choices); i++) {
        if (!ring && i == 1)
            continue;
        snprintf(config, sizeof(config), "dram=4MiB,io=%s,io_register=%s", choices[i],
                 i == 1 ? "yes" : "no");
        snprintf(rig.config, sizeof(rig.config), "%s", config);
        rig_reopen(&rig);
        if (i < 2)
            assert_string_equal(stat_of("disk.backend"), choices[i]);
        assert_string_equal(stat_of("config.io"), choices[i]);
        printf("           io=%s: %s,", choices[i], stat_of("disk.0.backend"));
        printf(" %s\n", stat_of("disk.0.backend_why"));
        assert_true(strlen(stat_of("disk.backend_why")) > 5);
        if (i == 1)
            assert_non_null(strstr(stat_of("disk.backend_why"), "registered"));
        assert_int_equal(rig_store(&rig, 1 + i * BLOCKS, BLOCKS, 0, NULL), BLOCKS);
        for (size_t k = 0; k < i; k++) { /* of earlier lives: they come from the disk */
            if (ring || k != 1)
                assert_int_equal(rig_load(&rig, 1 + k * BLOCKS, BLOCKS, NULL), BLOCKS);
        }
    }
}

/* C29: fds_max holds at every moment, whatever is read; more of them are used where it allows. */
static void test_c29_descriptors_within_fds_max(void **state)
{
    static const char *const configs[] = {"io=posix,fds_max=32", "io=uring,fds_max=32",
                                          "io=posix,fds_max=auto"};
    char why[160];
    unsigned most[KVT_ARRAY_LEN(configs)] = {0};
    bool ring = kvt_io_uring_probe(why, sizeof(why)) == 0;

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(configs); i++) {
        char config[128];
        unsigned before = rig_open_fds();

        if (i == 1 && !ring)
            continue;
        snprintf(config, sizeof(config), "dram=2MiB,staging=1MiB,%s", configs[i]);
        set_up(config, "64MiB"); /* segments of 1 MiB */
        for (uint64_t chain = 0; chain < 60; chain++) {
            assert_int_equal(rig_store(&rig, 1 + chain * BLOCKS, BLOCKS, 0, NULL), BLOCKS);
            assert_int_equal(kvt_flush(rig.cache), 0);
            most[i] = KVT_MAX(most[i], rig_open_fds() - before);
        }
        for (uint64_t turn = 0; turn < 120; turn++) {
            uint64_t chain = turn * 37 % 60;

            (void)rig_load(&rig, 1 + chain * BLOCKS, BLOCKS, NULL); /* exact, or gone */
            most[i] = KVT_MAX(most[i], rig_open_fds() - before);
        }
        assert_true(rig_stat(&rig, "load.granted_disk") > 60 * BLOCKS);
        rig_close(&rig);
        rig_free(&rig);
        memset(&rig, 0, sizeof(rig));
        printf("           %s: %u descriptors at most\n", configs[i], most[i]);
        if (i < 2)
            assert_true(most[i] <= 32);
    }
    assert_true(most[2] > 40);
}

/* The owner's thread wakes by itself for it, a second after the last request. */
static void cold_records_are_scrubbed(void **state)
{
    (void)state;
    for (int on = 0; on < 2; on++) {
        set_up(on ? "dram=4MiB,scrub=64MiB" : "dram=4MiB,scrub=off", "32MiB");
        assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
        rig_reopen(&rig);
        for (int tries = 0; tries < (on ? 20 : 2) && rig_stat(&rig, "scrub.records") < BLOCKS;
             tries++)
            rig_sleep_ms(1500);
        assert_int_equal(rig_stat(&rig, "scrub.records"), on ? BLOCKS : 0);
        assert_int_equal(rig_stat(&rig, "scrub.bad"), 0);
        assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
        rig_close(&rig);
        rig_free(&rig);
        memset(&rig, 0, sizeof(rig));
    }
}

/* In a child, where the kernel refuses a ring with `error`. */
static int refused(int error)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);
    int rc;

    if (no_ring(error))
        return SKIPPED;
    rig_init(&rig, &shape, "dram=4MiB", "1GiB"); /* not too small for a measurement */
    rig_open(&rig);
    if (strcmp(stat_of("disk.backend"), "posix") != 0)
        return 1;
    if (!strstr(stat_of("disk.backend_why"), strerrordesc_np(error)) &&
        !strstr(stat_of("disk.backend_why"), "liburing"))
        return 2;
    if (rig_store(&rig, 1, BLOCKS, 0, NULL) != BLOCKS)
        return 3;
    rig_reopen(&rig);
    if (rig_load(&rig, 1, BLOCKS, NULL) != BLOCKS)
        return 5;
    rig_close(&rig);
    snprintf(rig.config, sizeof(rig.config), "dram=4MiB,io=uring,disk_required=no");
    rc = rig_try_open(&rig);
    if (rc != KVT_E_UNSUPPORTED || !strstr(rig.error, "io=uring") || !strstr(rig.error, "io=auto"))
        return 4;
    rig_free(&rig);
    return 0;
}

static void test_c41_posix_and_the_reason_in_stat(void **state)
{
    static const int errors[] = {EPERM, ENOMEM};

    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(errors); i++) {
        int status;
        pid_t pid;

        fflush(NULL);
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
            _exit(refused(errors[i]));
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == SKIPPED) {
            printf("           skipped: no seccomp filter can be installed here\n");
            skip();
        }
        assert_int_equal(WEXITSTATUS(status), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(every_backend_reads_what_any_wrote, tear_down),
        cmocka_unit_test(cold_records_are_scrubbed),
        cmocka_unit_test(test_c29_descriptors_within_fds_max),
        cmocka_unit_test(test_c41_posix_and_the_reason_in_stat),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
