/* Options of a cache on the command line. One list (kvt_config_each) feeds text and JSON.
 * Threads: one. It validates nothing itself: the library does, and says what is wrong. */
#include "cli_config.h"

#include <stdio.h>

#include "cli.h"
#include "client/settings.h"

int kvt_cli_config(const char *command, const char *text, struct kvt_config **out)
{
    int applied;

    *out = NULL;
    if (kvt_config_new(out)) {
        kvt_cli_error(command, "out of memory");
        return KVT_EXIT_PROBLEM;
    }
    if (text && kvt_config_set_all(*out, text)) {
        kvt_cli_error(command, "--config: %s", kvt_config_error(*out));
        return KVT_EXIT_USAGE;
    }
    if (kvt_config_apply_env(*out, &applied)) {               /* as kvt_open() does */
        kvt_cli_error(command, "%s", kvt_config_error(*out)); /* names the variable */
        return KVT_EXIT_USAGE;
    }
    return 0;
}

static void print_option(void *arg, const char *key, const char *value, const char *default_value,
                         const char *help)
{
    (void)arg;
    (void)default_value;
    printf("  %-20s %-16s %s\n", key, value[0] ? value : "\"\"", help);
}

void kvt_cli_config_print(const struct kvt_config *config)
{
    printf("options in force\n");
    kvt_config_each(config, print_option, NULL);
}

static void add_option(void *arg, const char *key, const char *value, const char *default_value,
                       const char *help)
{
    json_array_append_new(arg, json_pack("{s:s, s:s, s:s, s:s}", "key", key, "value", value,
                                         "default", default_value, "help", help));
}

json_t *kvt_cli_config_json(const struct kvt_config *config)
{
    json_t *list = json_array();

    kvt_config_each(config, add_option, list);
    return list;
}
