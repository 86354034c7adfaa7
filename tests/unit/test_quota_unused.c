/* Quotas that cannot come into force are told: by an open, by kvtierd --check and by the doctor.
 *
 * Goal:   one warning for each, that names it and what holds in its place; none for a quota that
 *         does come into force, or that is as large as what holds.
 * Method: configurations in text, and a log that keeps lines; then the three who tell.
 * Checked to fail: with kvt_quota_unused_tell() empty.
 */
#include "support/rig.h"

#include <string.h>

#include "client/host.h"
#include "client/options.h"
#include "support/run_tool.h"

static char said[4096];
static unsigned lines;

static void keep_line(void *arg, int level, const char *text)
{
    size_t used = strlen(said);

    (void)arg;
    assert_int_equal(level, KVT_LOG_WARN);
    snprintf(said + used, sizeof(said) - used, "%s\n", text);
    lines++;
}

static void tell(const char *options)
{
    const struct kvt_log log = {keep_line, NULL, KVT_LOG_DEBUG};
    struct kvt_config *config = NULL;

    assert_int_equal(kvt_config_new(&config), 0);
    said[0] = '\0';
    lines = 0;
    if (kvt_config_set_all(config, options) != 0 || kvt_settings_resolve(config) != 0)
        fail_msg("%s: %s", options, kvt_config_error(config));
    kvt_quota_unused_tell(&config->settings, &log);
    kvt_config_free(config);
}

static void what_holds_is_named(void **state)
{
    static const struct {
        const char *options, *first; /* NULL: nothing */
        unsigned lines;
    } cases[] = {
        {"dram=1GiB", NULL, 0},
        {"dram=1GiB,ns_limit=m:1GiB:none", NULL, 0}, /* as large: it holds */
        {"dram=1GiB,ns_limit=m:none:7d", NULL, 0},
        {"dram=1GiB,ns_quota=1GiB,ns_limit=m:512MiB:none", NULL, 0},
        {"dram=1GiB,ns_limit=m:2GiB:none",
         "ns_limit of m: a quota of 2GiB has no effect: all there is (dram and the caps of the "
         "disks) of 1GiB is smaller, and holds\n",
         1},
        {"dram=1GiB,disk=/d:3GiB,disk=/e:4GiB,ns_limit=m:8GiB:none", NULL, 0},
        {"dram=1GiB,disk=/d:3GiB,disk=/e:4GiB,ns_limit=m:9GiB:none", "ns_limit of m: ", 1},
        {"dram=1GiB,ns_quota=512MiB,ns_limit=m:768MiB:none",
         "ns_limit of m: a quota of 768MiB has no effect: ns_quota of 512MiB is smaller, and "
         "holds\n",
         1},
        {"dram=1GiB,ns_quota=2GiB", "ns_quota: a quota of 2GiB has no effect: all there is ", 1},
        {"dram=1GiB,ns_quota=512MiB,ns_limit=m:2GiB:1h,ns_limit=n:1MiB:none,"
         "ns_limit=00112233445566778899AABBCCDDEEFF:1GiB:none",
         "ns_limit of m: a quota of 2GiB has no effect: ns_quota of 512MiB is smaller, and holds\n"
         "ns_limit of 00112233445566778899aabbccddeeff: a quota of 1GiB has no effect: ns_quota ",
         2},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        tell(cases[i].options);
        if (lines != cases[i].lines)
            fail_msg("%s: %u lines: %s", cases[i].options, lines, said);
        if (cases[i].first && strncmp(said, cases[i].first, strlen(cases[i].first)) != 0)
            fail_msg("%s: %s", cases[i].options, said);
    }
}

static void an_open_tells(void **state)
{
    struct rig_shape shape = rig_shape_small(4);
    struct rig rig;

    (void)state;
    rig_init(&rig, &shape, "dram=4MiB,ns_quota=1MiB,ns_limit=m:2MiB:none", NULL);
    rig_open(&rig);
    if (!rig.daemon) /* else it is the kvtierd's log */
        assert_non_null(strstr(rig.log, "ns_limit of m: a quota of 2MiB has no effect: ns_quota of "
                                        "1MiB is smaller"));
    rig_free(&rig);
}

static void the_doctor_and_the_check_tell(void **state)
{
    static const char says[] = "ns_limit of m: a quota of 2MiB has no effect: ns_quota of 1MiB";
    static struct tool_run run;
    char program[600];

    (void)state;
    tool_run(&run, KVT_TOOL,
             (const char *const[]){"kvtier", "doctor", "--config",
                                   "dram=4MiB,ns_quota=1MiB,ns_limit=m:2MiB:none", NULL},
             NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.out, "warn  quota"));
    assert_non_null(strstr(run.out, says));
    snprintf(program, sizeof(program), "%s", KVT_TOOL);
    snprintf(strrchr(program, '/'), 9, "/kvtierd");
    const char *const words[] = {"kvtierd",   "--check",    "--dram",      "4MiB",     "--ns-quota",
                                 "1MiB",      "--ns-limit", "m:2MiB:none", "--socket", "./s",
                                 "--fds-max", "64",         NULL};
    tool_run(&run, program, words, NULL, NULL);
    assert_int_equal(run.code, 0);
    assert_non_null(strstr(run.err, says));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_holds_is_named),
        cmocka_unit_test(an_open_tells),
        cmocka_unit_test(the_doctor_and_the_check_tell),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
