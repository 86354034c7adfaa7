/* What a kvtierd is told: a file of "key = value" lines and the same keys as options of the command
 * line ("--key value"). One table; the library's options that concern a store are keys too.
 * Threads: one.
 */
#ifndef KVT_DAEMON_CONF_H
#define KVT_DAEMON_CONF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/settings.h"
#include "daemon/server.h"

struct kvt_conf {
    struct kvt_config *options; /* of the store */
    char socket[108];
    mode_t socket_mode;
    uid_t uids[KVT_SERVER_UIDS_MAX]; /* allow_uid */
    size_t uid_count;
    char metrics[64]; /* "": off; "ADDRESS:PORT" */
    int log_level;    /* enum kvt_log_level */
    uint64_t given;   /* bits of the keys that were set, by their places in the tables of conf.c */
    char error[512];  /* of the last refused call */
};

/* The defaults. 0, -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_conf_new(struct kvt_conf *conf);
void kvt_conf_free(struct kvt_conf *conf);

/* Set one key. 0; KVT_E_CONFIG_KEY, KVT_E_CONFIG_VALUE: conf->error names key, value and the
 * nearest valid one. */
__attribute__((warn_unused_result)) int kvt_conf_set(struct kvt_conf *conf, const char *key,
                                                     const char *value);
/* Whether there is such a key. 0; KVT_E_CONFIG_KEY, and conf->error as above. */
__attribute__((warn_unused_result)) int kvt_conf_known(struct kvt_conf *conf, const char *key);
/* Whether somebody has set it: not its default, and not what follows from other keys. */
bool kvt_conf_given(const struct kvt_conf *conf, const char *key);
/* Set everything in a file: lines "key = value"; "#" at the start or behind a blank begins a
 * comment. Errors name the line. */
__attribute__((warn_unused_result)) int kvt_conf_read(struct kvt_conf *conf, const char *path);

/* Every key: the name, what it is now, the default, one line of help. reload: a running daemon
 * takes a new value (SIGHUP). */
typedef void (*kvt_conf_each_fn)(void *arg, const char *key, const char *value,
                                 const char *fallback, const char *help, int reload);
void kvt_conf_each(const struct kvt_conf *conf, kvt_conf_each_fn fn, void *arg);

#endif
