/* Options of the shared tier that have no effect where they are set.
 *
 * Goal:   each of them is told by its name, with where it belongs; what has an effect is not; each
 *         option of the shared tier's can be given to a kvtierd, but those of kvt_plan().
 * Method: tables of option texts, in memory; one cache over a directory, one whose store would be a
 *         kvtierd's that is not there.
 */
#include "support/rig.h"

#include <string.h>

#include "client/host.h"
#include "client/options.h"
#include "daemon/conf.h"

static char lines[4096];

static void take(void *arg, int level, const char *message)
{
    size_t used = strlen(lines);

    (void)arg;
    assert_int_equal(level, KVT_LOG_WARN);
    snprintf(lines + used, sizeof(lines) - used, "%s\n", message);
}

static const struct kvt_log log_here = {.fn = take, .level_max = KVT_LOG_WARN};

static struct kvt_config *config_of(const char *text)
{
    struct kvt_config *config;

    lines[0] = '\0';
    assert_int_equal(kvt_config_new(&config), 0);
    if (kvt_config_set_all(config, text) != 0)
        fail_msg("%s: %s", text, kvt_config_error(config));
    return config;
}

static unsigned count_lines(void)
{
    unsigned count = 0;

    for (const char *at = lines; (at = strchr(at, '\n')) != NULL; at++)
        count++;
    return count;
}

static void test_each_is_told(void **state)
{
    static const struct {
        const char *options;
        bool shared;
        unsigned count;
        const char *says;
    } cases[] = {
        {"remote=none", false, 0, ""},
        {"remote=redis://a,remote_auth=/f,remote_mac=/m,remote_ttl=1h", false, 0, ""},
        {"remote=rediss://a,remote_ca=/f,remote_deadline=5s", false, 0, ""},
        {"remote=dir:/d,remote_cap=1GiB,remote_ns_cap=1MiB,remote_mac=/m", true, 0, ""},
        {"remote=redis://a,remote_deadline=1s", true, 0, ""},
        {"remote=redis://a,remote_ca=/f", false, 1, "remote_ca has no effect: it is for TLS"},
        {"remote=redis+unix:/s,remote_ca=/f", false, 1, "rediss://"},
        {"remote=redis://a,remote_cap=1GiB", false, 1, "remote_cap has no effect"},
        {"remote=redis://a,remote_cap=1GiB,remote_ns_cap=1GiB", false, 1, "maxmemory"},
        {"remote=dir:/d,remote_auth=/f", false, 1, "remote_auth has no effect"},
        {"remote=dir:/d,remote_auth=/f,remote_ca=/f", false, 2, "remote_ca"},
        {"remote=redis://a,remote_deadline=5s", true, 1, "one second"},
        {"remote_auth=/f", false, 1, "remote_auth has no effect: remote is not set"},
        {"remote_mac=/f", true, 1, "remote_mac has no effect"},
        {"remote_ca=/f", false, 1, "remote_ca has no effect"},
        {"remote_cap=1GiB", false, 1, "remote_cap has no effect"},
        {"remote_ns_cap=1GiB", false, 1, "remote_ns_cap has no effect"},
        {"remote_ttl=1h", false, 1, "remote_ttl has no effect"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvt_config *config = config_of(cases[i].options);

        kvt_remote_unused_tell(&config->settings, cases[i].shared, &log_here);
        if (count_lines() != cases[i].count || !strstr(lines, cases[i].says))
            fail_msg("%s: %u lines, not %u: \"%s\"", cases[i].options, count_lines(),
                     cases[i].count, lines);
        kvt_config_free(config);
    }
}

/* A program whose store is a kvtierd's. */
static void test_the_shared_tier_is_the_daemons(void **state)
{
    static const char *const options[] = {"remote=redis://a", "remote_cap=1GiB",
                                          "remote_ns_cap=1GiB", "remote_mac=/f"};

    (void)state;
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        struct kvt_config *config = config_of(options[i]);
        const size_t len = strcspn(options[i], "=");
        char key[32];

        snprintf(key, sizeof(key), "%.*s", (int)len, options[i]);
        kvt_remote_elsewhere_tell(&config->settings, &log_here);
        assert_int_equal(count_lines(), 1);
        assert_non_null(strstr(lines, key));
        assert_non_null(strstr(lines, "give it to kvtierd"));
        kvt_config_free(config);
    }
    struct kvt_config *config = config_of("plan_remote=2GiB"); /* kvt_plan() is the program's */

    kvt_remote_elsewhere_tell(&config->settings, &log_here);
    assert_int_equal(count_lines(), 0);
    kvt_config_free(config);
}

/* Where a cache opens they are heard. */
static void test_caches_tell(void **state)
{
    const struct rig_shape shape = rig_shape_small(16);
    char options[300], dir[128];
    static struct rig rig;

    (void)state;
    if (getenv("KVT_RIG_DAEMON"))
        return;
    rig_dir_make(dir, sizeof(dir));
    snprintf(options, sizeof(options), "dram=4MiB,remote=dir:%s,remote_auth=/nothing", dir);
    rig_init(&rig, &shape, options, NULL);
    rig_open(&rig);
    assert_non_null(strstr(rig.log, "remote_auth has no effect"));
    rig_close(&rig);
    rig_free(&rig);
    snprintf(options, sizeof(options), "store=unix:%s/none,remote=dir:%s", dir, dir);
    rig_init(&rig, &shape, options, NULL);
    if (rig_try_open(&rig) == 0) /* it is not there, and may come */
        kvt_close(rig.cache);
    rig.cache = NULL;
    assert_non_null(strstr(rig.log, "give it to kvtierd"));
    rig_free(&rig);
    snprintf(options, sizeof(options), "%s/kvt0/tmp", dir);
    assert_int_equal(remove(options), 0);
    snprintf(options, sizeof(options), "%s/kvt0", dir);
    assert_int_equal(remove(options), 0);
    rig_dir_remove(dir);
}

/* What the library knows of the shared tier a kvtierd takes. */
static void test_a_kvtierd_takes_all_of_them(void **state)
{
    const struct kvt_option *option;
    struct kvt_conf conf;
    unsigned count = 0;

    (void)state;
    assert_int_equal(kvt_conf_new(&conf), 0);
    for (size_t i = 0; (option = kvt_option_at(i)) != NULL; i++) {
        if (strncmp(option->key, "remote", 6) != 0)
            continue;
        count++;
        if (kvt_conf_set(&conf, option->key, option->fallback) != 0)
            fail_msg("%s: %s", option->key, conf.error);
    }
    assert_true(count >= 10);
    assert_int_equal(kvt_conf_set(&conf, "remote_ns_cap", "2GiB"), 0);
    assert_int_equal(conf.options->settings.remote_ns_cap, UINT64_C(2) << 30);
    kvt_conf_free(&conf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_is_told),
        cmocka_unit_test(test_the_shared_tier_is_the_daemons),
        cmocka_unit_test(test_caches_tell),
        cmocka_unit_test(test_a_kvtierd_takes_all_of_them),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
