/* kvtier purge unix:SOCKET: a namespace of a running kvtierd, or all. */
#ifndef KVT_TOOLS_PURGE_DAEMON_H
#define KVT_TOOLS_PURGE_DAEMON_H

struct kvt_purge_words {   /* as they were given; NULL, 0: not */
    const char *where;     /* unix:SOCKET */
    const char *namespace; /* 32 digits, or the name of a model that has one namespace there */
    int all, yes, json;
    const char *remote;
};

/* An exit code. Asks on a terminal, unless `yes`. */
int kvt_purge_daemon(const struct kvt_purge_words *words);

#endif
