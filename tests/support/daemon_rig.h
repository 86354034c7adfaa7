/* A kvtierd as a process of its own, for tests: started on a socket and a root in a fresh
 * directory, waited for by its readiness message, ended in every way. Every helper asserts what
 * must not fail.
 */
#ifndef KVT_TESTS_DAEMON_RIG_H
#define KVT_TESTS_DAEMON_RIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct daemon {
    char dir[128];    /* of everything below */
    char socket[160]; /* dir/s */
    char store[160];  /* dir/root */
    char log[160];    /* dir/log: what it says */
    char config[224]; /* "store=unix:..." for a rig */
    char options[1024];
    uint64_t fsize; /* limit on file sizes that it runs under; 0: none */
    uint64_t files; /* limit on descriptors; 0: none */
    int log_fd;     /* standard error goes there; 0: to the file */
    int passed_fd;  /* a socket that listens, handed over as systemd does it; 0: none */
    pid_t pid;      /* 0: none */
};

/* A directory; options: "--key value ..." of kvtierd besides --socket ("{store}" is the root's
 * path). Nothing runs yet. */
void daemon_init(struct daemon *daemon, const char *options);
/* Start it and wait until it is ready; _try: returns its exit code when it ends instead, else -1.
 */
void daemon_start(struct daemon *daemon);
int daemon_try(struct daemon *daemon);
/* SIGTERM, and wait; its exit code. */
int daemon_stop(struct daemon *daemon);
void daemon_kill(struct daemon *daemon);   /* SIGKILL, and wait */
void daemon_freeze(struct daemon *daemon); /* SIGSTOP, and wait until it has stopped */
/* Stop it if it runs, and remove the directory. */
void daemon_free(struct daemon *daemon);

/* A number or text that it tells a control client; UINT64_MAX, "" when there is none such. */
uint64_t daemon_stat(const struct daemon *daemon, const char *name);
void daemon_stat_text(const struct daemon *daemon, const char *name, char *out, size_t len);
/* Wait until a number is `value`; fails the test after `ms`. */
void daemon_wait_stat(const struct daemon *daemon, const char *name, uint64_t value, unsigned ms);
/* Whether its log has a line with this text. */
bool daemon_said(const struct daemon *daemon, const char *text);
/* A connection to the port that it says it listens on for scrapers. The caller closes it. */
int daemon_scraper(const struct daemon *daemon);

#endif
