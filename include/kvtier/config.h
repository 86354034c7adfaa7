/* Configuration of a cache: named options as text, checked when they are set.
 *
 * Keys and defaults are listed by kvt_config_each() and in docs/config.md. Sizes take KiB, MiB,
 * GiB, TiB (powers of 1024) or kB, MB, GB, TB; times take ns, us, ms, s, min, h, d. Thread rule:
 * one thread at a time. Error rule: error.h; kvt_config_error() has the sentence. Lifetime:
 * kvt_open() copies what it needs; the config may be freed right after.
 */
#ifndef KVTIER_CONFIG_H
#define KVTIER_CONFIG_H

#include <kvtier/error.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_config;

/* A new config holding the defaults. 0, -ENOMEM. Free with kvt_config_free() (NULL is allowed). */
int kvt_config_new(struct kvt_config **out);
void kvt_config_free(struct kvt_config *config);

/* Set one option from text. 0; KVT_E_CONFIG_KEY; KVT_E_CONFIG_VALUE. A refused call changes
 * nothing. "disk" may be set several times: each adds a root ("/path:SIZE"). */
int kvt_config_set(struct kvt_config *config, const char *key, const char *value);

/* Parse "key=value,key=value"; blanks around keys and values and empty entries are skipped. An
 * entry "unix:/path" means store=unix:/path. Stops at the first error. */
int kvt_config_set_all(struct kvt_config *config, const char *text);

/* The sentence for the last refused call, naming the key, the value and the nearest valid one.
 * Borrowed until the next call on the same config; "" when nothing was refused. */
const char *kvt_config_error(const struct kvt_config *config);

/* Log callback: level 0 error, 1 warning, 2 info, 3 debug. Called from any thread of the library,
 * never with a lock held that an API call needs. The message is borrowed during the call. */
typedef void (*kvt_log_fn)(void *arg, int level, const char *message);
void kvt_config_log(struct kvt_config *config, kvt_log_fn fn, void *arg);

/* Call fn once per option: key, current value as text, default, one line of help. */
typedef void (*kvt_config_each_fn)(void *arg, const char *key, const char *value,
                                   const char *default_value, const char *help);
void kvt_config_each(const struct kvt_config *config, kvt_config_each_fn fn, void *arg);

#ifdef __cplusplus
}
#endif
#endif
