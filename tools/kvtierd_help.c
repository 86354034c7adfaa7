/* The usage of kvtierd and its man page: see kvtierd_help.h. Prints to standard output. */
#include "kvtierd_help.h"

#include <stdio.h>

#include "base/checked.h"
#include "kvtier/version.h"

static const char summary[] = "one store of KV blocks, in DRAM and on disk, for many programs";
static const char what[] =
    "Keeps one store of KV blocks, in DRAM and on disk, for all programs that connect\n"
    "(option store=unix:PATH). DRAM stays warm when they restart. Programs that share a\n"
    "daemon can write each other's memory: tenants that distrust each other run their own.\n";

struct item {
    const char *name, *value, *text;
};

static const struct item options[] = {
    {"--config", "FILE", "read \"key = value\" lines first; SIGHUP reads them again"},
    {"--KEY", "VALUE", "set one key, over what the file says"},
    {"--check", NULL,
     "say whether the configuration is good and would work here: memory, the places of socket and "
     "roots, the address of metrics, whether the shared tier's server answers, and which it is; "
     "and "
     "end. Exit status 0 good, 1 not here, 2 not at all"},
    {"--offline", NULL, "with --check: ask no server of a shared tier"},
    {"--man", NULL, "print the man page, as troff"},
    {"--version", NULL, "version and build"},
    {"--help", NULL, "show the usage"},
};

static const struct item signals[] = {
    {"SIGTERM, SIGINT", NULL,
     "clients are told, what is queued is written, files close; exit status 0"},
    {"SIGHUP", NULL,
     "the configuration is read again; keys marked [SIGHUP] change at once, others are named in "
     "the log and wait for a restart; a configuration with an error changes nothing"},
};

static const struct item environment[] = {
    {"XDG_RUNTIME_DIR", NULL, "where the socket is unless --socket says otherwise, but for root"},
    {"NOTIFY_SOCKET", NULL, "told READY=1, RELOADING=1, STOPPING=1, as systemd wants it"},
    {"LISTEN_PID, LISTEN_FDS", NULL,
     "one socket that somebody else has made and listens on (ListenSequentialPacket=); it is "
     "served in the place of --socket"},
    {"JOURNAL_STREAM", NULL,
     "DEVICE:INODE; where that is standard error, lines of the log carry their priority"},
};

static const struct item files[] = {
    {"SOCKET.lock", NULL, "beside the socket: who holds it owns the socket's name"},
    {"DIR", NULL,
     "a root on disk: one daemon at a time; a second one serves without it, says so, and takes it "
     "over when the first has gone"},
};

static const char examples[] =
    "kvtierd --socket /run/kvtier.sock --dram 64GiB --disk /nvme/kvtier:1TiB\n"
    "KVTIER_CONFIG=store=unix:/run/kvtier.sock ./engine\n"
    "kvtier stat unix:/run/kvtier.sock\n"
    "kvtierd --config /etc/kvtier/kvtierd.conf --check";

/* ---- usage --------------------------------------------------------------------------------- */

static void usage_key(void *arg, const char *key, const char *value, const char *fallback,
                      const char *help, int reload)
{
    (void)arg;
    (void)value;
    printf("  --%-16s %s (default %s)%s\n", key, help, fallback, reload ? " [SIGHUP]" : "");
}

void kvt_daemon_usage(const struct kvt_conf *conf)
{
    printf("usage: kvtierd [--config FILE] [--KEY VALUE...]\n\n%s\n", what);
    for (size_t i = 0; i < KVT_ARRAY_LEN(options); i++) {
        char name[32];
        (void)snprintf(name, sizeof(name), "%s%s%s", options[i].name,
                       options[i].value != NULL ? " " : "",
                       options[i].value != NULL ? options[i].value : "");
        printf("  %-18s %s\n", name, options[i].text);
    }
    printf("\nkeys, the same in the file and on the command line; [SIGHUP]: a new value in the "
           "file\nis taken by a running daemon\n");
    kvt_conf_each(conf, usage_key, NULL);
    printf("\nSIGTERM writes what is queued and ends. 'kvtier stat unix:PATH' shows what it does.\n"
           "exit codes: 0 ok, 1 it could not start, 2 wrong usage\n");
}

/* ---- the man page -------------------------------------------------------------------------- */

/* Text of ours as troff: hyphens are minus signs, and no line begins with a control character. */
static void put(const char *text)
{
    for (const char *at = text; *at != '\0'; at++) {
        if ((*at == '.' || *at == '\'') && (at == text || at[-1] == '\n'))
            fputs("\\&", stdout);
        if (*at == '-')
            fputs("\\-", stdout);
        else if (*at == '\\')
            fputs("\\e", stdout);
        else
            putchar(*at);
    }
}

static void put_items(const char *title, const struct item *items, size_t count)
{
    printf(".SH %s\n", title);
    for (size_t i = 0; i < count; i++) {
        printf(".TP\n.B ");
        put(items[i].name);
        if (items[i].value != NULL)
            printf(" \\fI%s\\fR", items[i].value);
        putchar('\n');
        put(items[i].text);
        putchar('\n');
    }
}

static void man_key(void *arg, const char *key, const char *value, const char *fallback,
                    const char *help, int reload)
{
    (void)arg;
    (void)value;
    printf(".TP\n.B ");
    put(key);
    putchar('\n');
    put(help);
    printf("; default ");
    put(fallback);
    printf("%s\n", reload ? " [SIGHUP]" : "");
}

void kvt_daemon_man(const struct kvt_conf *conf)
{
    printf(".TH KVTIERD 8 \"%s\" \"kvtier %s\" \"kvtier\"\n.SH NAME\nkvtierd \\- ", KVT_SOURCE_DATE,
           kvt_version());
    put(summary);
    printf("\n.SH SYNOPSIS\n.B kvtierd\n[\\fB\\-\\-config\\fR \\fIFILE\\fR] "
           "[\\fB\\-\\-\\fIKEY VALUE\\fR...]\n.SH DESCRIPTION\n");
    put(what);
    put_items("OPTIONS", options, KVT_ARRAY_LEN(options));
    printf(".SH KEYS\n");
    put("The same in the file, as lines \"key = value\", and on the command line, as --key value. "
        "A running daemon takes a new value of those marked [SIGHUP].\n");
    kvt_conf_each(conf, man_key, NULL);
    put_items("SIGNALS", signals, KVT_ARRAY_LEN(signals));
    put_items("ENVIRONMENT", environment, KVT_ARRAY_LEN(environment));
    put_items("FILES", files, KVT_ARRAY_LEN(files));
    printf(".SH EXAMPLES\n.nf\n");
    put(examples);
    printf("\n.fi\n.SH EXIT STATUS\n.TP\n.B 0\nfine\n.TP\n.B 1\nit could not start, or work\n"
           ".TP\n.B 2\nthe command line or the configuration was wrong\n"
           ".SH SEE ALSO\n.BR kvtier (1),\n.BR kvtier\\-stat (1),\n.BR kvtier\\-top (1)\n");
}
