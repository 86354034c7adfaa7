/* The options of a cache on the command line: --config K=V,... and listing them. Tools only. */
#ifndef KVT_TOOLS_CLI_CONFIG_H
#define KVT_TOOLS_CLI_CONFIG_H

#include <jansson.h>

#include "kvtier/config.h"

/* Defaults, then text (NULL: none), then KVTIER_CONFIG of the environment. 0, or an exit code after
 * the error was printed. *out is owned by the caller (kvt_config_free) in every case; it may be
 * NULL after an error. */
int kvt_cli_config(const char *command, const char *text, struct kvt_config **out);

/* Every option: key, value, default, help. */
void kvt_cli_config_print(const struct kvt_config *config);
json_t *kvt_cli_config_json(const struct kvt_config *config);

#endif
