/* The table of options, for config.c: what each one is called, how its text is read and written.
 * Internal to the configuration; kvtier/config.h is the public face.
 */
#ifndef KVT_CLIENT_OPTIONS_H
#define KVT_CLIENT_OPTIONS_H

#include <stddef.h>

#include "client/settings.h"

#define KVT_CONFIG_ENV "KVTIER_CONFIG"

enum kvt_option_type {
    T_SIZE,
    T_COUNT,
    T_BOOL,
    T_LEVEL,
    T_SWITCH,
    T_WRITE,
    T_ADMISSION,
    T_IO,
    T_PIN,
    T_PLAN,
    T_LAYERS,
    T_DEADLINE,
    T_STORE,
    T_FILE,
    T_REMOTE,
    T_REMOTE_WRITE,
    T_NS_LIMIT,
    T_DISK
};

struct kvt_option {
    const char *key;
    enum kvt_option_type type;
    size_t offset;        /* in struct kvt_settings */
    const char *fallback; /* default, as text */
    const char *word;     /* a word allowed instead of a number: "auto", "none"; NULL: none */
    uint64_t min, max;
    const char *help;
};

/* Row i of the table; NULL past the end. */
const struct kvt_option *kvt_option_at(size_t i);
/* The row of a key; NULL: unknown, and config->error says what is nearest. */
const struct kvt_option *kvt_option_find(struct kvt_config *config, const char *key);
/* The key most like a word that is none, or NULL. */
const char *kvt_option_nearest(const char *key);

/* Set one option from text. 0; KVT_E_CONFIG_VALUE, -ENOMEM with the sentence in config->error. */
int kvt_option_set(struct kvt_config *config, const struct kvt_option *option, const char *value);

/* The value in force as text, in buffer or static. */
const char *kvt_option_text(const struct kvt_settings *settings, const struct kvt_option *option,
                            char *buffer, size_t len);

/* option_layers.c: the values of exclude_layers. As kvt_option_set() and kvt_option_text(). */
int kvt_layers_set(struct kvt_config *config, const char *value);
const char *kvt_layers_text(const struct kvt_settings *settings, char *buffer, size_t len);

/* option_limits.c: the values of ns_limit. As kvt_option_set() and kvt_option_text(). */
int kvt_limits_set(struct kvt_config *config, const char *value);
const char *kvt_limits_text(const struct kvt_settings *settings, char *buffer, size_t len);

/* The sentence of a refusal; returns code. */
__attribute__((format(printf, 3, 4))) int kvt_config_refuse(struct kvt_config *config, int code,
                                                            const char *format, ...);

/* Bytes with the largest unit that divides them: "64MiB". Returns buffer. */
const char *kvt_size_text(uint64_t bytes, char *buffer, size_t len);

/* A time with the largest unit that divides it: "90min". Returns buffer. */
const char *kvt_duration_text(uint64_t ns, char *buffer, size_t len);

/* Forget the roots and free their paths. */
void kvt_settings_forget_disks(struct kvt_settings *settings);

#endif
