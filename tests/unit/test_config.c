/* Configuration: every option's good and bad values, sentences, the environment, what "auto"
 * becomes. C82: unknown key, bad unit and a string for a bool are errors that name the key.
 *
 * Method: tables of (key, value, outcome, words that the sentence must contain); and round trips:
 * the text that kvt_config_each() prints for a value sets the same value again.
 */
#include <errno.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "base/checked.h"
#include "client/settings.h"
#include "kvtier/codec.h"

static struct kvt_config *fresh(void)
{
    struct kvt_config *config = NULL;
    assert_int_equal(kvt_config_new(NULL), KVT_E_INVAL);
    assert_int_equal(kvt_config_new(&config), 0);
    assert_string_equal(kvt_config_error(config), "");
    return config;
}

struct find_text {
    const char *key;
    char value[8192];
    char fallback[64];
    int found;
};

static void find_text(void *arg, const char *key, const char *value, const char *default_value,
                      const char *help)
{
    struct find_text *find = arg;
    assert_non_null(help);
    assert_true(strlen(help) > 10);
    if (strcmp(key, find->key) != 0)
        return;
    snprintf(find->value, sizeof(find->value), "%s", value);
    snprintf(find->fallback, sizeof(find->fallback), "%s", default_value);
    find->found++;
}

static const char *text_of(const struct kvt_config *config, const char *key)
{
    static struct find_text find;
    memset(&find, 0, sizeof(find));
    find.key = key;
    kvt_config_each(config, find_text, &find);
    assert_int_equal(find.found, 1);
    return find.value;
}

static void defaults_are_what_the_table_says(void **state)
{
    static const struct {
        const char *key, *value;
    } expected[] = {{"dram", "1GiB"},      {"disk", "none"},        {"disk_required", "no"},
                    {"level", "kv4"},      {"guard", "yes"},        {"threads", "auto"},
                    {"staging", "auto"},   {"write_queue", "auto"}, {"pin_max", "auto"},
                    {"io_threads", "4"},   {"write", "auto"},       {"huge_pages", "auto"},
                    {"numa_node", "none"}, {"direct", "auto"},      {"load_deadline", "none"},
                    {"scrub", "8MiB"},     {"pin", "auto"},         {"io", "auto"},
                    {"io_register", "no"}, {"requests_max", "256"}, {"request_blocks_max", "32768"},
                    {"enabled", "yes"},    {"env", "yes"},          {"exclude_layers", "none"}};
    struct kvt_config *config = fresh();
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(expected); i++)
        assert_string_equal(text_of(config, expected[i].key), expected[i].value);
    kvt_config_free(config);
}

static void good_values_read_back(void **state)
{
    static const struct {
        const char *key, *value, *shown;
    } cases[] = {
        {"dram", "0", "0"},
        {"dram", "64GiB", "64GiB"},
        {"dram", "1.5GiB", "1536MiB"},
        {"dram", "1000000", "1000000B"},
        {"dram", "4MB", "4000000B"},
        {"staging", "1MiB", "1MiB"},
        {"staging", "auto", "auto"},
        {"write_queue", "0", "0"},
        {"pin_max", "2TiB", "2TiB"},
        {"threads", "1", "1"},
        {"threads", "64", "64"},
        {"threads", "auto", "auto"},
        {"io_threads", "16", "16"},
        {"io", "posix", "posix"},
        {"io", "uring", "uring"},
        {"io", "auto", "auto"},
        {"io_register", "on", "yes"},
        {"scrub", "16MiB", "16MiB"},
        {"fds_max", "32", "32"},
        {"fds_max", "auto", "auto"},
        {"scrub", "off", "off"},
        {"huge_pages", "off", "off"},
        {"numa_node", "3", "3"},
        {"numa_device", "0", "0"},
        {"numa_device", "none", "none"},
        {"dram_share", "80", "80"},
        {"dram_share", "none", "none"},
        {"ranks", "8", "8"},
        {"numa_node", "none", "none"},
        {"write", "evict", "evict"},
        {"write", "idle", "idle"},
        {"write", "through", "through"},
        {"write", "auto", "auto"},
        {"direct", "on", "on"},
        {"direct", "off", "off"},
        {"direct", "auto", "auto"},
        {"admission", "continued", "continued"},
        {"admission", "all", "all"},
        {"ns_limit", "a model:50GiB:7d", "a model:50GiB:168h"},
        {"ns_limit", "a model:64KiB:none", "a model:64KiB:none"}, /* the same: in its place */
        {"ns_limit", "none", "none"},
        {"ns_limit", "org/name:tag:none:90s", "org/name:tag:none:90s"},
        {"ns_limit", "none", "none"},
        {"ns_limit", "0123456789abcdef0123456789ABCDEF:1GiB:none",
         "0123456789abcdef0123456789abcdef:1GiB:none"},
        {"ns_limit", "none", "none"},
        {"exclude_layers", "0", "0"},
        {"exclude_layers", "0+last", "0+last"},
        {"exclude_layers", "0,last", "0+last"},
        {"exclude_layers", "1-3+7,20-last", "1-3+7+20-last"},
        {"exclude_layers", "none", "none"},
        {"exclude_layers", "4-4", "4"},
        {"pin", "off", "off"},
        {"pin", "required", "required"},
        {"pin", "auto", "auto"},
        {"guard", "off", "no"},
        {"guard", "true", "yes"},
        {"disk_required", "1", "yes"},
        {"enabled", "false", "no"},
        {"level", "raw", "raw"},
        {"level", "int4", "int4"},
        {"level", "kv8", "kv8"},
        {"load_deadline", "250ms", "250ms"},
        {"load_deadline", "1.5s", "1500ms"},
        {"load_deadline", "90min", "90min"},
        {"load_deadline", "2h", "2h"},
        {"load_deadline", "none", "none"},
        {"requests_max", "1", "1"},
        {"request_blocks_max", "16", "16"},
    };
    struct kvt_config *config = fresh();
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        assert_int_equal(kvt_config_set(config, cases[i].key, cases[i].value), 0);
        assert_string_equal(kvt_config_error(config), "");
        assert_string_equal(text_of(config, cases[i].key), cases[i].shown);
        /* what is shown is accepted and means the same */
        assert_int_equal(kvt_config_set(config, cases[i].key, cases[i].shown), 0);
        assert_string_equal(text_of(config, cases[i].key), cases[i].shown);
    }
    kvt_config_free(config);
}

/* C82, and the rest of its kind: nothing is guessed, the sentence names key, value and remedy. */
static void test_c82_bad_values_name_the_key_and_the_nearest(void **state)
{
    static const struct {
        const char *key, *value;
        int code;
        const char *words[3];
    } cases[] = {
        {"drm", "1GiB", KVT_E_CONFIG_KEY, {"\"drm\"", "\"dram\""}},
        {"threds", "1", KVT_E_CONFIG_KEY, {"\"threds\"", "\"threads\""}},
        {"disk-required", "yes", KVT_E_CONFIG_KEY, {"\"disk_required\""}},
        {"Level", "kv4", KVT_E_CONFIG_KEY, {"\"Level\"", "\"level\""}},
        {"xyzzy", "1", KVT_E_CONFIG_KEY, {"\"xyzzy\"", "kvtier doctor"}},
        {"", "1", KVT_E_CONFIG_KEY, {"unknown option"}},
        {"dram", "64gb", KVT_E_CONFIG_VALUE, {"dram", "\"64gb\"", "GB"}},
        {"dram", "64 GiB", KVT_E_CONFIG_VALUE, {"dram", "GiB"}},
        {"dram", "-1", KVT_E_CONFIG_VALUE, {"dram", "\"-1\""}},
        {"dram", "", KVT_E_CONFIG_VALUE, {"dram"}},
        {"dram", "lots", KVT_E_CONFIG_VALUE, {"dram", "\"lots\""}},
        {"dram", "0x10", KVT_E_CONFIG_VALUE, {"dram"}},
        {"dram", "65TiB", KVT_E_CONFIG_VALUE, {"dram", "64TiB"}},
        {"dram", "99999999999999999999", KVT_E_CONFIG_VALUE, {"dram", "range"}},
        {"dram", "auto", KVT_E_CONFIG_VALUE, {"dram", "\"auto\""}},
        {"staging", "1KiB", KVT_E_CONFIG_VALUE, {"staging", "64KiB"}},
        {"staging", "atuo", KVT_E_CONFIG_VALUE, {"staging", "auto"}},
        {"threads", "0", KVT_E_CONFIG_VALUE, {"threads", "1 to 64"}},
        {"threads", "65", KVT_E_CONFIG_VALUE, {"threads", "1 to 64"}},
        {"threads", "4.0", KVT_E_CONFIG_VALUE, {"threads", "\"4.0\""}},
        {"threads", "four", KVT_E_CONFIG_VALUE, {"threads", "auto"}},
        {"io_threads", "17", KVT_E_CONFIG_VALUE, {"io_threads", "1 to 16"}},
        {"guard", "maybe", KVT_E_CONFIG_VALUE, {"guard", "\"maybe\"", "yes"}},
        {"enabled", "2", KVT_E_CONFIG_VALUE, {"enabled", "\"2\""}},
        {"disk_required", "", KVT_E_CONFIG_VALUE, {"disk_required"}},
        {"level", "kv9", KVT_E_CONFIG_VALUE, {"level", "\"kv9\"", "kv4"}},
        {"level", "KV4x", KVT_E_CONFIG_VALUE, {"level", "did you mean"}},
        {"level", "fp8", KVT_E_CONFIG_VALUE, {"level", "int4"}},
        {"io", "io_uring", KVT_E_CONFIG_VALUE, {"io", "\"io_uring\"", "auto, posix, uring"}},
        {"io", "urnig", KVT_E_CONFIG_VALUE, {"io", "\"uring\""}},
        {"dram_share", "96", KVT_E_CONFIG_VALUE, {"dram_share", "95"}},
        {"ranks", "0", KVT_E_CONFIG_VALUE, {"ranks", "1"}},
        {"numa_device", "64", KVT_E_CONFIG_VALUE, {"numa_device", "63"}},
        {"numa_node", "1024", KVT_E_CONFIG_VALUE, {"numa_node", "1023"}},
        {"huge_pages", "2MiB", KVT_E_CONFIG_VALUE, {"huge_pages", "auto, on, off"}},
        {"write",
         "later",
         KVT_E_CONFIG_VALUE,
         {"write", "\"later\"", "through, evict, idle, auto"}},
        {"direct", "yes", KVT_E_CONFIG_VALUE, {"direct", "\"yes\"", "auto, on, off"}},
        {"direct", "atuo", KVT_E_CONFIG_VALUE, {"direct", "\"auto\""}},
        {"load_deadline", "10", KVT_E_CONFIG_VALUE, {"load_deadline", "ms"}},
        {"load_deadline", "10sec", KVT_E_CONFIG_VALUE, {"load_deadline"}},
        {"load_deadline", "0", KVT_E_CONFIG_VALUE, {"load_deadline", "none"}},
        {"load_deadline", "-1s", KVT_E_CONFIG_VALUE, {"load_deadline"}},
        {"requests_max", "0", KVT_E_CONFIG_VALUE, {"requests_max"}},
        {"request_blocks_max", "15", KVT_E_CONFIG_VALUE, {"request_blocks_max", "16"}},
        {"disk", "/a", KVT_E_CONFIG_VALUE, {"disk", "/path:SIZE"}},
        {"disk", ":1GiB", KVT_E_CONFIG_VALUE, {"disk", "/path:SIZE"}},
        {"disk", "/a:", KVT_E_CONFIG_VALUE, {"disk", "size"}},
        {"disk", "/a:1gib", KVT_E_CONFIG_VALUE, {"disk", "GiB"}},
        {"disk", "/a:0", KVT_E_CONFIG_VALUE, {"disk", "too small", "8MiB"}},
        {"disk", "/a:-1", KVT_E_CONFIG_VALUE, {"disk", "negative"}},
        {"disk", "/a:99999999TiB", KVT_E_CONFIG_VALUE, {"disk", "too large"}},
        {"dram", "-1", KVT_E_CONFIG_VALUE, {"dram", "\"-1\" is negative"}},
        {"dram", "-4KiB", KVT_E_CONFIG_VALUE, {"dram", "negative"}},
        {"disk", "", KVT_E_CONFIG_VALUE, {"disk"}},
        {"ns_limit", "", KVT_E_CONFIG_VALUE, {"ns_limit", "NAME:QUOTA:TTL"}},
        {"ns_limit", "m:1GiB", KVT_E_CONFIG_VALUE, {"ns_limit", "two colons"}},
        {"ns_limit", ":1GiB:1h", KVT_E_CONFIG_VALUE, {"ns_limit", "no name"}},
        {"ns_limit", "m:1gib:1h", KVT_E_CONFIG_VALUE, {"ns_limit", "quota", "\"m:1gib:1h\""}},
        {"ns_limit", "m:1KiB:1h", KVT_E_CONFIG_VALUE, {"ns_limit", "64KiB"}},
        {"ns_limit", "m:-1:1h", KVT_E_CONFIG_VALUE, {"ns_limit", "quota"}},
        {"ns_limit", "m:1GiB:1", KVT_E_CONFIG_VALUE, {"ns_limit", "time to live"}},
        {"ns_limit", "m:1GiB:1ms", KVT_E_CONFIG_VALUE, {"ns_limit", "1s or more"}},
        {"ns_limit", "m:none:none", KVT_E_CONFIG_VALUE, {"ns_limit", "says nothing"}},
        {"admission", "continue", KVT_E_CONFIG_VALUE, {"admission", "\"continued\""}},
        {"exclude_layers", "", KVT_E_CONFIG_VALUE, {"exclude_layers", "0+last"}},
        {"exclude_layers", "first", KVT_E_CONFIG_VALUE, {"exclude_layers", "\"first\""}},
        {"exclude_layers", "0+", KVT_E_CONFIG_VALUE, {"exclude_layers"}},
        {"exclude_layers", "3-1", KVT_E_CONFIG_VALUE, {"exclude_layers"}},
        {"exclude_layers", "last-3", KVT_E_CONFIG_VALUE, {"exclude_layers"}},
        {"exclude_layers", "0 last", KVT_E_CONFIG_VALUE, {"exclude_layers"}},
        {"exclude_layers", "-1", KVT_E_CONFIG_VALUE, {"exclude_layers"}},
        {"exclude_layers", "99999", KVT_E_CONFIG_VALUE, {"exclude_layers"}},
        {"pin", "on", KVT_E_CONFIG_VALUE, {"pin", "auto, required, off"}},
    };
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        struct kvt_config *config = fresh();
        struct kvt_settings before = config->settings;
        int rc = kvt_config_set(config, cases[i].key, cases[i].value);
        const char *sentence = kvt_config_error(config);
        if (rc != cases[i].code)
            fail_msg("%s=%s: %d (%s)", cases[i].key, cases[i].value, rc, sentence);
        for (size_t j = 0; j < 3 && cases[i].words[j] != NULL; j++)
            if (strstr(sentence, cases[i].words[j]) == NULL)
                fail_msg("%s=%s: no %s in: %s", cases[i].key, cases[i].value, cases[i].words[j],
                         sentence);
        assert_memory_equal(&config->settings, &before, sizeof(before)); /* nothing changed */
        assert_int_equal(kvt_config_set(config, "dram", "1MiB"), 0);
        assert_string_equal(kvt_config_error(config), "");
        kvt_config_free(config);
    }
}

static void long_text_is_cut_in_the_sentence_not_in_the_buffer(void **state)
{
    struct kvt_config *config = fresh();
    size_t len = 100000;
    char *text = malloc(len + 1);
    (void)state;
    memset(text, 'x', len);
    text[len] = '\0';
    assert_int_equal(kvt_config_set(config, text, "1"), KVT_E_CONFIG_KEY);
    assert_int_equal(kvt_config_set(config, "dram", text), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_config_set(config, "level", text), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_config_set(config, "disk", text), KVT_E_CONFIG_VALUE);
    assert_int_equal(kvt_config_set_all(config, text), KVT_E_CONFIG_VALUE);
    memcpy(text + PATH_MAX + 10, ":1GiB", 6);
    assert_int_equal(kvt_config_set(config, "disk", text), KVT_E_CONFIG_VALUE);
    assert_true(strlen(kvt_config_error(config)) < sizeof(config->error));
    free(text);
    kvt_config_free(config);
}

static void disks_add_up_and_split_at_the_last_colon(void **state)
{
    struct kvt_config *config = fresh();
    (void)state;
    assert_int_equal(kvt_config_set(config, "disk", "/mnt/a:1GiB"), 0);
    assert_int_equal(kvt_config_set(config, "disk", "/mnt/odd:name/:2GiB"), 0);
    assert_int_equal(kvt_config_set(config, "disk", "relative/dir:16MiB"), 0);
    assert_int_equal(kvt_config_set(config, "disk", "/:8MiB"), 0);
    assert_int_equal(config->settings.disk_count, 4);
    assert_string_equal(config->settings.disks[0].path, "/mnt/a");
    assert_string_equal(config->settings.disks[1].path, "/mnt/odd:name");
    assert_int_equal(config->settings.disks[1].cap_bytes, UINT64_C(2) << 30);
    assert_string_equal(config->settings.disks[3].path, "/");
    assert_string_equal(text_of(config, "disk"), "/mnt/a:1GiB,/mnt/odd:name:2GiB,"
                                                 "relative/dir:16MiB,/:8MiB");
    assert_int_equal(kvt_config_set(config, "disk", "/mnt/a//:3GiB"), KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "twice"));
    assert_int_equal(config->settings.disk_count, 4);
    assert_int_equal(kvt_config_set(config, "disk", "none"), 0);
    assert_int_equal(config->settings.disk_count, 0);
    for (unsigned i = 0; i < KVT_DISKS_MAX; i++) {
        char value[64];
        snprintf(value, sizeof(value), "/r%u:8MiB", i);
        assert_int_equal(kvt_config_set(config, "disk", value), 0);
    }
    assert_int_equal(kvt_config_set(config, "disk", "/more:8MiB"), KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "16"));
    kvt_config_free(config);
}

static void set_all_stops_at_the_first_error(void **state)
{
    struct kvt_config *config = fresh();
    (void)state;
    assert_int_equal(kvt_config_set_all(config, ""), 0);
    assert_int_equal(kvt_config_set_all(config, "dram=2MiB,level=raw,disk=/a:8MiB"), 0);
    assert_string_equal(text_of(config, "dram"), "2MiB");
    assert_string_equal(text_of(config, "level"), "raw");
    assert_int_equal(config->settings.disk_count, 1);
    assert_int_equal(kvt_config_set_all(config, "dram=3MiB,threads=x,level=kv8"),
                     KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "threads"));
    assert_string_equal(text_of(config, "dram"), "3MiB");
    assert_string_equal(text_of(config, "level"), "raw");
    assert_int_equal(kvt_config_set_all(config, "dram"), KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "key=value"));
    kvt_config_free(config);
}

/* As people write it in a shell or a unit file: blanks, line breaks, a comma at the end. */
static void set_all_forgives_blanks_and_commas(void **state)
{
    struct kvt_config *config = fresh();
    (void)state;
    assert_int_equal(kvt_config_set_all(config, " dram = 2MiB , level=raw,\n\tguard= no ,"), 0);
    assert_string_equal(text_of(config, "dram"), "2MiB");
    assert_string_equal(text_of(config, "level"), "raw");
    assert_string_equal(text_of(config, "guard"), "no");
    assert_int_equal(kvt_config_set_all(config, ",, dram=3MiB,,"), 0);
    assert_string_equal(text_of(config, "dram"), "3MiB");
    assert_int_equal(kvt_config_set_all(config, "  ,"), 0);
    assert_int_equal(kvt_config_set_all(config, "disk=/a dir/b :8MiB"), 0); /* blanks within stay */
    assert_string_equal(config->settings.disks[0].path, "/a dir/b ");
    assert_int_equal(kvt_config_set_all(config, " = 2MiB"), KVT_E_CONFIG_KEY);
    assert_int_equal(kvt_config_set_all(config, " drma = 2MiB,"), KVT_E_CONFIG_KEY);
    assert_non_null(strstr(kvt_config_error(config), "\"drma\"; did you mean \"dram\"?"));
    assert_int_equal(kvt_config_set_all(config, "level: raw"), KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "did you mean \"level=...\"?"));
    assert_int_equal(kvt_config_set_all(config, "levle raw,"), KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "did you mean \"level=...\"?"));
    assert_int_equal(kvt_config_set_all(config, "@"), KVT_E_CONFIG_VALUE);
    assert_null(strstr(kvt_config_error(config), "did you mean"));
    kvt_config_free(config);
}

/* The socket of a kvtierd needs no key. */
static void set_all_takes_a_socket_alone(void **state)
{
    struct kvt_config *config = fresh();
    (void)state;
    assert_int_equal(kvt_config_set_all(config, " unix:/run/k=v.sock , dram=2MiB"), 0);
    assert_string_equal(text_of(config, "store"), "unix:/run/k=v.sock");
    assert_string_equal(text_of(config, "dram"), "2MiB");
    assert_int_equal(kvt_config_set_all(config, "store=process"), 0);
    assert_int_equal(kvt_config_set_all(config, "unix:"), KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "unix:/path"));
    assert_string_equal(text_of(config, "store"), "process");
    assert_int_equal(kvt_config_set_all(config, "unix=/x"), KVT_E_CONFIG_KEY);
    kvt_config_free(config);
}

/* A default is written as its value is, so that what differs is what somebody changed. */
static void compare_texts(void *arg, const char *key, const char *value, const char *default_value,
                          const char *help)
{
    int *count = arg;
    (void)help;
    if (strcmp(value, default_value) != 0)
        fail_msg("%s: value %s, default %s", key, value, default_value);
    ++*count;
}

static void values_and_defaults_are_written_alike(void **state)
{
    struct kvt_config *config = fresh();
    int count = 0;
    (void)state;
    kvt_config_each(config, compare_texts, &count);
    assert_true(count > 15);
    kvt_config_free(config);
}

static void copies_are_deep(void **state)
{
    struct kvt_config *config = fresh(), *copy = NULL;
    (void)state;
    assert_int_equal(kvt_config_set(config, "disk", "/a:8MiB"), 0);
    assert_int_equal(kvt_config_copy(config, &copy), 0);
    kvt_config_free(config);
    assert_string_equal(copy->settings.disks[0].path, "/a");
    kvt_config_free(copy);
    kvt_config_free(NULL);
}

static void bad_arguments_are_refused(void **state)
{
    struct kvt_config *config = fresh();
    (void)state;
    assert_int_equal(kvt_config_set(NULL, "dram", "1MiB"), KVT_E_INVAL);
    assert_int_equal(kvt_config_set(config, NULL, "1MiB"), KVT_E_INVAL);
    assert_int_equal(kvt_config_set(config, "dram", NULL), KVT_E_INVAL);
    assert_int_equal(kvt_config_set_all(config, NULL), KVT_E_INVAL);
    assert_string_equal(kvt_config_error(NULL), "");
    kvt_config_free(config);
}

static void the_environment_has_the_last_word_unless_forbidden(void **state)
{
    struct kvt_config *config = fresh();
    int applied = 7;
    (void)state;
    unsetenv("KVTIER_CONFIG");
    assert_int_equal(kvt_config_apply_env(config, &applied), 0);
    assert_int_equal(applied, 0);
    setenv("KVTIER_CONFIG", "enabled=no,dram=5MiB", 1);
    assert_int_equal(kvt_config_apply_env(config, &applied), 0);
    assert_int_equal(applied, 1);
    assert_string_equal(text_of(config, "dram"), "5MiB");
    assert_string_equal(text_of(config, "enabled"), "no");
    setenv("KVTIER_CONFIG", "dramm=5MiB", 1);
    assert_int_equal(kvt_config_apply_env(config, &applied), KVT_E_CONFIG_KEY);
    assert_int_equal(applied, 0);
    assert_non_null(strstr(kvt_config_error(config), "KVTIER_CONFIG"));
    assert_non_null(strstr(kvt_config_error(config), "\"dram\""));
    assert_int_equal(kvt_config_set(config, "env", "no"), 0);
    assert_int_equal(kvt_config_apply_env(config, &applied), 0);
    assert_int_equal(applied, 0);
    unsetenv("KVTIER_CONFIG");
    kvt_config_free(config);
}

static void resolve(struct kvt_config *config, const char *text, int want)
{
    assert_int_equal(kvt_config_set_all(config, text), 0);
    assert_int_equal(kvt_settings_resolve(config), want);
}

/* Every root gets its share of fds_max; too few are refused, but never by "auto". */
static void descriptors_are_shared_out(void **state)
{
    struct rlimit old, low;
    (void)state;
    struct kvt_config *config = fresh();
    resolve(config, "disk=/a:1GiB,fds_max=32", 0);
    assert_int_equal(kvt_settings_files(&config->settings), 16);
    resolve(config, "fds_max=72", 0);
    assert_int_equal(kvt_settings_files(&config->settings), 56);
    resolve(config, "fds_max=4096", 0);
    assert_int_equal(kvt_settings_files(&config->settings), 120);
    resolve(config, "disk=/b:1GiB,fds_max=55", KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "fds_max"));
    assert_non_null(strstr(kvt_config_error(config), "56"));
    resolve(config, "fds_max=56", 0);
    assert_int_equal(kvt_settings_files(&config->settings), 16);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    low = old;
    low.rlim_cur = 20;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    resolve(config, "fds_max=auto", 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(config->settings.fds_max, 56);
    kvt_config_free(config);
}

static void auto_becomes_numbers_within_the_cap(void **state)
{
    static const struct {
        const char *dram;
        uint64_t staging, write_queue, pin_max; /* MiB */
    } cases[] = {{"1GiB", 64, 256, 512},
                 {"64GiB", 64, 256, 32768},
                 {"256MiB", 32, 128, 128},
                 {"8MiB", 1, 4, 4},
                 {"0", 64, 32, 0}};
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(cases); i++) {
        struct kvt_config *config = fresh();
        assert_int_equal(kvt_config_set(config, "dram", cases[i].dram), 0);
        assert_int_equal(kvt_settings_resolve(config), 0);
        const struct kvt_settings *s = &config->settings;
        assert_int_equal(s->staging >> 20, cases[i].staging);
        assert_int_equal(s->write_queue >> 20, cases[i].write_queue);
        assert_int_equal(s->pin_max >> 20, cases[i].pin_max);
        assert_in_range(s->threads, 1, 4);
        kvt_config_free(config);
    }
    struct kvt_config *config = fresh();
    resolve(config, "dram=8MiB,staging=9MiB", KVT_E_CONFIG_VALUE);
    assert_non_null(strstr(kvt_config_error(config), "staging"));
    assert_non_null(strstr(kvt_config_error(config), "8MiB"));
    resolve(config, "dram=0,staging=9MiB", 0);
    resolve(config, "dram=63KiB", KVT_E_CONFIG_VALUE);
    kvt_config_free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_what_the_table_says),
        cmocka_unit_test(good_values_read_back),
        cmocka_unit_test(test_c82_bad_values_name_the_key_and_the_nearest),
        cmocka_unit_test(long_text_is_cut_in_the_sentence_not_in_the_buffer),
        cmocka_unit_test(disks_add_up_and_split_at_the_last_colon),
        cmocka_unit_test(set_all_stops_at_the_first_error),
        cmocka_unit_test(set_all_forgives_blanks_and_commas),
        cmocka_unit_test(set_all_takes_a_socket_alone),
        cmocka_unit_test(values_and_defaults_are_written_alike),
        cmocka_unit_test(copies_are_deep),
        cmocka_unit_test(bad_arguments_are_refused),
        cmocka_unit_test(the_environment_has_the_last_word_unless_forbidden),
        cmocka_unit_test(auto_becomes_numbers_within_the_cap),
        cmocka_unit_test(descriptors_are_shared_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
