/* What a client and kvtierd say to each other over the socket before (and after) they talk through
 * the rings. Fixed-width little-endian. One message per packet.
 *
 *   client                         kvtierd
 *   HELLO versions, kind     ->    checks peer, versions, room
 *                            <-    WELCOME status, versions, sizes, a sentence;
 *                                  kind ENGINE: descriptors of arena, rings, request and reply
 *   ... rings (message.h) ...
 *   BYE                      ->    no byte will be written any more: everything is taken back
 *
 *   kind CONTROL: after WELCOME the client sends a question in plain text; the answer is text in
 *   one or more packets, and then the daemon closes. Lines "name value", or "error: why not".
 *     stat, roots, metrics   numbers; whoever may connect
 *     purge HEX              a namespace by the 32 digits of its id; root and the daemon's own
 * user. "purge.*" comes when it is done, or has failed
 *
 * A socket that ends without BYE says nothing about the threads of a dying process: its slots are
 * taken back when the process itself is gone.
 */
#ifndef KVT_FORMAT_HANDSHAKE_H
#define KVT_FORMAT_HANDSHAKE_H

#include <assert.h>
#include <stdint.h>

#define KVT_HANDSHAKE_MAGIC 0x4f4c4c454854564bull /* "KVTHELLO" in memory */
#define KVT_HANDSHAKE_VERSION 1u                  /* of these very structs */
#define KVT_CONTROL_VERSION 1u /* of questions and answers; "control.version" of "stat" */
#define KVT_WELCOME_FDS 4u

enum kvt_hello_kind { KVT_HELLO_ENGINE = 1, KVT_HELLO_CONTROL = 2, KVT_HELLO_BYE = 3 };

/* Which descriptor is which. */
enum kvt_welcome_fd { KVT_FD_ARENA, KVT_FD_RINGS, KVT_FD_REQUEST, KVT_FD_REPLY };

struct kvt_hello { /* also BYE */
    uint64_t magic;
    uint32_t bytes;     /* of this struct */
    uint32_t handshake; /* KVT_HANDSHAKE_VERSION */
    uint32_t proto;     /* KVT_PROTO_VERSION */
    uint32_t record;    /* version of the record format */
    uint32_t kind;      /* enum kvt_hello_kind */
    uint32_t ring_bytes;
    uint32_t pid;     /* for people: what counts is what the kernel says */
    uint32_t stats;   /* values of STAT that it knows: they have no version of their own */
    char version[32]; /* of the library, for people */
    char name[48];    /* of the program, for people; printable, zero-terminated */
};
static_assert(sizeof(struct kvt_hello) == 120, "fixed on the wire");

/* Flags of WELCOME. HUGE: DRAM is to have huge pages, and who pins it makes them first. */
#define KVT_WELCOME_HUGE 1u

struct kvt_welcome {
    uint64_t magic;
    uint32_t bytes;
    uint32_t handshake;
    uint32_t proto;
    uint32_t record;
    int32_t status; /* 0, or why not: KVT_E_VERSION, KVT_E_LIMIT, -EACCES, KVT_E_CLOSED */
    uint32_t client;
    uint64_t arena_bytes;
    uint64_t rings_bytes;
    uint32_t ring_bytes; /* of each ring */
    uint32_t pid;        /* of the daemon, for people */
    char version[32];
    char text[240]; /* status != 0: a sentence that names what is wrong and the remedy */
    int64_t now_ns; /* the daemon's CLOCK_MONOTONIC, which deadlines are told by; 0: not said */
    uint32_t flags; /* KVT_WELCOME_*; 0 from who knows none, as now_ns: they were text once */
    uint32_t reserved;
};
static_assert(sizeof(struct kvt_welcome) == 344, "fixed on the wire");

/* Whether a packet is a HELLO (or BYE) that can be read at all. */
static inline int kvt_hello_ok(const struct kvt_hello *hello, int bytes)
{
    return bytes == (int)sizeof(*hello) && hello->magic == KVT_HANDSHAKE_MAGIC &&
           hello->bytes == sizeof(*hello);
}

#endif
