/* Configuration text of any bytes, as KVTIER_CONFIG and as one option: no crash; a refusal has a
 * sentence and changes nothing; what was taken is said in words that are taken again.
 * Input: a flag, then "key=value,..." or "key" NUL "value". */
#include "fuzz/fuzz.h"
#include "kvtier/config.h"

struct said {
    char text[8192];
    size_t bytes;
};

static void say(void *arg, const char *key, const char *value, const char *fallback,
                const char *help)
{
    struct said *said = arg;
    int n =
        snprintf(said->text + said->bytes, sizeof said->text - said->bytes, "%s=%s\n", key, value);

    (void)fallback;
    (void)help;
    FUZZ_CHECK(n > 0);
    said->bytes += (size_t)n;
    if (said->bytes > sizeof said->text)
        said->bytes = sizeof said->text;
}

/* Every value that is shown must be taken by a fresh configuration, and be shown the same. */
static void set_again(void *arg, const char *key, const char *value, const char *fallback,
                      const char *help)
{
    (void)help;
    if (strcmp(key, "disk") == 0 || strcmp(value, fallback) == 0)
        return;
    if (kvt_config_set(arg, key, value) != 0) {
        fprintf(stderr, "%s=%s: %s\n", key, value, kvt_config_error(arg));
        abort();
    }
}

/* Whether a disk is named: by the value, since a path may hold any line. */
static void note_disk(void *arg, const char *key, const char *value, const char *fallback,
                      const char *help)
{
    (void)fallback;
    (void)help;
    if (strcmp(key, "disk") == 0 && value[0] != '\0')
        *(int *)arg = 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    uint8_t how = fuzz_u8(&in);
    struct kvt_config *config, *again;
    struct said before = {.bytes = 0}, after = {.bytes = 0}, third = {.bytes = 0};
    char *text = fuzz_memory(in.size + 1);
    size_t bytes = in.size;
    int rc, disk = 0;

    fuzz_take(&in, text, bytes);
    text[bytes] = 0;
    FUZZ_CHECK(kvt_config_new(&config) == 0 && kvt_config_new(&again) == 0);
    kvt_config_each(config, say, &before);
    if (how & 1)
        rc = kvt_config_set_all(config, text);
    else
        rc = kvt_config_set(config, text, strlen(text) < bytes ? text + strlen(text) + 1 : "");
    FUZZ_CHECK(kvt_config_error(config) != NULL);
    FUZZ_CHECK(rc <= 0 && (rc == 0 || kvt_config_error(config)[0]));
    kvt_config_each(config, say, &after);
    if (rc != 0 && !(how & 1))
        FUZZ_CHECK(strcmp(before.text, after.text) == 0);
    kvt_config_each(config, note_disk, &disk);
    if (rc == 0 && !disk) {
        kvt_config_each(config, set_again, again);
        kvt_config_each(again, say, &third);
        FUZZ_CHECK(strcmp(after.text, third.text) == 0);
    }
    kvt_config_free(config);
    kvt_config_free(again);
    free(text);
    return 0;
}
