/* Numbers into sentences: what `kvtier stat` answers an operator, and what to do about it.
 *
 * Rules stand in a table: a counter above zero, its sentence, its remedy. What needs more than one
 * number is a function. A sentence never says more than the numbers do: they are sums since the
 * process that wrote them has opened the cache.
 * Threads: any; no state.
 */
#include "stat_verdict.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"
#include "client/client_counters.h"
#include "client/host.h"
#include "stats_file.h"
#include "store/counters.h"

const char *kvt_stat_help(const char *name)
{
    static const struct {
        const char *name, *help;
    } all[] = {
#define KVT_X(field, name, help) {name, help},
        KVT_STORE_COUNTERS(KVT_X) KVT_STORE_GAUGES(KVT_X) KVT_CLIENT_COUNTERS(KVT_X)
#undef KVT_X
    };

    for (size_t i = 0; i < KVT_ARRAY_LEN(all); i++)
        if (!strcmp(all[i].name, name))
            return all[i].help;
    return NULL;
}

__attribute__((format(printf, 5, 6))) static void say(json_t *list, const char *question,
                                                      const char *state, const char *remedy,
                                                      const char *format, ...)
{
    char text[700];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    json_t *verdict =
        json_pack("{s:s, s:s, s:s}", "question", question, "state", state, "text", text);
    if (remedy)
        json_object_set_new(verdict, "remedy", json_string(remedy));
    json_array_append_new(list, verdict);
}

static const struct rule {
    const char *counter, *question, *state, *text, *remedy;
} rules[] = {
    {"off.lookup_keys", "working", "note", "keys were asked for while the cache was switched off",
     "unset enabled=no, or call kvt_enable()"},
    {"client.refused_busy", "working", "warn", "requests were refused: too many at a time",
     "raise requests_max or request_blocks_max"},
    {"client.refused_invalid", "working", "warn", "requests were refused: bad arguments or shapes",
     "the program's log says which call and which argument"},
    {"client.freed_twice", "working", "warn", "requests were freed twice by the program",
     "a defect of the program: its log names the call"},
    {"gpu.lost", "working", "warn", "GPUs went offline; their pools do nothing any more",
     "gpu.state and the log name the driver's error; restart the engine"},
    {"remote.nodes_down", "working", "warn",
     "nodes of the shared tier do not answer: what they hold is computed",
     "the log has the reason; 'kvtier doctor --config remote=...' tries it"},
    {"remote.auth_fails", "working", "warn", "log-ins to the shared tier were refused",
     "correct the file of remote_auth; the log has the server's words"},
    {"recover.no_room", "working", "warn", "records did not fit the index at open",
     "raise the disk cap only with the memory for its index: 46 bytes a block"},
    {"load.deadline", "paying", "warn", "blocks came later than their deadline and were computed",
     "see 'kvtier doctor --dir' for the drive's speed; raise load_deadline, or dram"},
    {"client.load_late", "paying", "warn", "blocks had come, but after their deadline",
     "raise load_deadline, or give the codec more threads"},
    {"load.no_slot", "paying", "warn", "blocks were not loaded: no staging slot", "raise staging"},
    {"store.dropped_dram", "paying", "warn",
     "blocks were not stored: no room in DRAM could be freed", "raise dram"},
    {"store.dropped_index", "paying", "warn", "blocks were not stored: the index was full",
     "raise dram or the disk cap before the namespaces open"},
    {"disk.dropped_queue", "paying", "warn", "blocks were not written: the write queue was full",
     "raise write_queue, add a drive, or set write=evict"},
    {"quota.refused", "paying", "warn",
     "blocks were not stored: their namespace is full (ns_quota, or its own), and what it holds is "
     "in use",
     "raise ns_quota, or the namespace's quota in ns_limit"},
    {"quota.evicted", "paying", "note",
     "blocks made room for newer ones of their namespace: it is full (ns_quota, or its own)",
     "raise ns_quota, or the namespace's quota in ns_limit, if they are missed"},
    {"admission.too_long", "paying", "note",
     "times a block was kept off the disk: no root can hold a record as long",
     "the log says which cap, or staging, would do"},
    {"index.namespaces_refused", "working", "warn",
     "times a namespace was refused: 4,096 are open or hold blocks",
     "close those that are not used; 'kvtier purge --namespace' empties one"},
    {"index.namespaces_without_root", "working", "note",
     "times a namespace went without a disk root: its records are too long for it",
     "the log says which cap, or staging, would do"},
    {"store.map_full", "paying", "note", "blocks were stored raw: no id left for a mixed level map",
     "a finer level needs fewer exceptions"},
    {"dram.evicted_lost", "paying", "note", "blocks left DRAM and were not on disk: lost",
     "raise dram; give the cache a disk; or set write=through"},
    {"store.lost", "paying", "warn", "blocks were lost: not written, and no DRAM to stay in",
     "raise dram or staging"},
    {"remote.deadline", "paying", "warn",
     "records of the shared tier did not come in time and were computed",
     "raise remote_deadline, or look at the network and the server's load"},
    {"remote.put_full", "paying", "warn", "blocks were not put to the shared tier: it has no room",
     "a server: maxmemory-policy allkeys-lru, or more maxmemory; a directory: remote_cap"},
    {"remote.put_fail", "paying", "warn", "blocks were not put to the shared tier: it failed",
     "the log has the reason; 'kvtier doctor --config remote=...' tries it"},
    {"remote.put_dropped", "paying", "note",
     "blocks were not put to the shared tier: too many waited", "raise remote_queue"},
    {"remote.gone", "paying", "note", "records had left the shared tier between look-up and load",
     "give it more room"},
    {"pin.refused", "paying", "note", "pins were refused by the pin budget", "raise pin_max"},
    {"verify.checksum_fail", "safe", "warn",
     "records did not verify; they were not used, and their blocks computed",
     "'kvtier verify DIR' names what is still there; then look at the drive (smartctl -a), its "
     "cable and the memory"},
    {"client.load_corrupt", "safe", "warn",
     "records did not verify where they were decoded; their pages were not used",
     "memory or drive: run 'kvtier verify DIR' and a memory test"},
    {"disk.read_fail", "safe", "warn", "reads failed; their blocks were computed",
     "dmesg and smartctl -a tell of the drive"},
    {"disk.write_fail", "safe", "warn", "writes failed", "dmesg and smartctl -a tell of the drive"},
    {"disk.enospc", "safe", "warn", "writes found the file system full",
     "free space there, or lower the cap: disk=DIR:SIZE"},
    {"disk.short_bytes", "safe", "warn",
     "bytes of the disk caps have no room on their file systems: the oldest segment goes early, "
     "and "
     "beginnings of long prompts with it",
     "free space there, or give a cap that it can hold: disk=DIR:SIZE"},
    {"disk.roots_failing", "safe", "warn", "disk roots fail to write at present",
     "dmesg tells why; what is there can still be read, and writes are tried again"},
    {"disk.dropped_space", "safe", "note", "blocks were not written: no room on disk", NULL},
    {"disk.dropped_error", "safe", "note", "blocks were not written: their write failed", NULL},
    {"remote.bad", "safe", "warn",
     "records of the shared tier did not verify; they were computed, and put again",
     "one remote_mac for all machines; else see who writes there, and the server's memory"},
    {"remote.refused", "safe", "warn",
     "records of the shared tier could not be read: damaged, or of another version",
     "one version of kvtier on all machines; else see who writes there"},
    {"remote.purge_fail", "safe", "warn", "purges did not reach all of the shared tier",
     "repeat them: 'kvtier purge --namespace HEX --remote URL'"},
    {"scrub.bad", "safe", "warn", "cold records were found damaged, and dropped",
     "look at the drive (smartctl -a); they are computed again when asked for"},
    {"scrub.read_fail", "safe", "warn", "cold records could not be read",
     "dmesg and smartctl -a tell of the drive"},
    {"disk.segments_unread", "safe", "warn",
     "segments could not be read when the root was opened, nor since; they are kept as they are",
     "dmesg and smartctl -a tell of the drive; they are read again now and then; 'kvtier fsck DIR' "
     "names them"},
    {"recover.bad", "safe", "note",
     "segments, batches or entries were refused at open: unfinished or damaged",
     "'kvtier fsck DIR', while no process owns it, tells which"},
    {"index.collision", "safe", "warn", "keys had the fingerprint of another key",
     "please report it"},
    {"message.bad", "safe", "warn", "messages between client and store were malformed",
     "a defect: please report it"},
    {"client.bad_reply", "safe", "warn", "replies of the store made no sense",
     "a defect: please report it"},
    {"client.bad_move", "safe", "warn", "state transitions that must not happen",
     "a defect: please report it"},
};

static void apply_rules(json_t *list, const json_t *counters, const char *question)
{
    for (size_t i = 0; i < KVT_ARRAY_LEN(rules); i++) {
        uint64_t n = kvt_stats_value(counters, rules[i].counter);
        if (n && !strcmp(rules[i].question, question))
            say(list, question, rules[i].state, rules[i].remedy, "%" PRIu64 " %s", n,
                rules[i].text);
    }
}

/* What makes a chain end early has been said; what is left of it is not stored, and that is no
 * defect of whoever stores. */
static void judge_chains(json_t *list, const json_t *c)
{
    uint64_t dropped = kvt_stats_value(c, "store.dropped_chain");
    bool known = kvt_stats_value(c, "quota.refused") || kvt_stats_value(c, "store.dropped_dram") ||
                 kvt_stats_value(c, "store.dropped_index");

    if (dropped && known)
        say(list, "paying", "note", NULL,
            "%" PRIu64 " more blocks were not stored: the block before them had not been, as above",
            dropped);
    else if (dropped)
        say(list, "paying", "note", "store a chain from its first block on, or name its parent",
            "%" PRIu64 " blocks were not stored: the block before them is absent", dropped);
}

static void judge_working(json_t *list, const struct kvt_stat_facts *facts)
{
    char used[32], max[32], held[32];
    const char *state = json_string_value(json_object_get(facts->counters, "cache.state"));
    uint64_t nodes = kvt_stats_value(facts->counters, "remote.nodes");

    if (facts->daemon && facts->clients)
        say(list, "working", "ok", NULL,
            "kvtierd, process %" PRId64 ", serves %" PRIu64 " programs", facts->owner_pid,
            facts->clients);
    else if (facts->daemon)
        say(list, "working", "note", "start an engine with store=unix:... of this socket",
            "kvtierd, process %" PRId64 ", serves nobody at present", facts->owner_pid);
    else if (facts->owner_pid)
        say(list, "working", "ok", NULL, "process %" PRId64 " owns it%s%s", facts->owner_pid,
            state ? "; the cache is " : "", state ? state : "");
    else
        say(list, "working", "note",
            "start the engine; a second process on one directory runs without the disk",
            "no process owns it now");
    say(list, "working", "ok", NULL, "%" PRIu64 " blocks, %s; files %s of %s", facts->records,
        kvt_human_bytes(facts->bytes, held), kvt_human_bytes(facts->bytes_used, used),
        facts->bytes_max ? kvt_human_bytes(facts->bytes_max, max) : "an unknown cap");
    if (facts->counters && !kvt_stats_value(facts->counters, "disk.direct") &&
        (!facts->daemon || kvt_stats_value(facts->counters, "disk.roots")))
        say(list, "working", "note", "'kvtier doctor --dir' says why",
            "the disk is read and written through the page cache");
    if (nodes && !kvt_stats_value(facts->counters, "remote.nodes_down"))
        say(list, "working", "ok", NULL, "the shared tier answers, %" PRIu64 " nodes of it", nodes);
    apply_rules(list, facts->counters, "working");
}

/* " (1,600 tokens)", or nothing where a block's length is not known. */
static const char *tokens(const struct kvt_stat_facts *facts, uint64_t blocks, char *text,
                          size_t room)
{
    text[0] = '\0';
    if (facts->block_tokens)
        snprintf(text, room, " (%" PRIu64 " tokens)", blocks * facts->block_tokens);
    return text;
}

/* Loads are what pays. A prompt is looked up several times, and what the engine has itself is
 * looked up too: hits alone have saved nothing. */
static void judge_loads(json_t *list, const struct kvt_stat_facts *facts)
{
    const json_t *c = facts->counters;
    uint64_t keys = kvt_stats_value(c, "lookup.keys");
    uint64_t hits = kvt_stats_value(c, "lookup.hits_dram") +
                    kvt_stats_value(c, "lookup.hits_disk") +
                    kvt_stats_value(c, "lookup.hits_remote");
    uint64_t dram = kvt_stats_value(c, "load.granted_dram");
    uint64_t disk = kvt_stats_value(c, "load.granted_disk");
    uint64_t shared = kvt_stats_value(c, "load.granted_remote");
    uint64_t loaded = dram + disk + shared;
    uint64_t stored = kvt_stats_value(c, "store.committed") - kvt_stats_value(c, "store.replaced");
    char a[64], there[64] = "";

    if (shared)
        snprintf(there, sizeof(there), ", %" PRIu64 " from the shared tier", shared);
    if (loaded)
        say(list, "paying", "ok", NULL,
            "%" PRIu64 " blocks%s were loaded instead of computed, and %" PRIu64
            " computed and stored: %.1f %% loaded; %" PRIu64 " from DRAM, %" PRIu64 " from disk%s",
            loaded, tokens(facts, loaded, a, sizeof(a)), stored,
            kvt_stats_percent(loaded, loaded + stored), dram, disk, there);
    else if (!keys)
        say(list, "paying", "note", "is the engine calling kvt_lookup()?",
            "no key has been looked up yet");
    else if (hits)
        say(list, "paying", "note",
            "what the engine has in its own cache it need not load; else look at its log, and at "
            "what the plan chose (plan.*)",
            "nothing has been loaded yet: %" PRIu64 " of %" PRIu64 " keys looked up were there",
            hits, keys);
    else
        say(list, "paying", "note",
            "the same prompts must come again, with the same model, settings and salt",
            "nothing has been loaded yet: none of %" PRIu64 " keys looked up was there", keys);
    if (loaded)
        say(list, "paying", "ok", NULL,
            "%" PRIu64 " of %" PRIu64 " keys looked up were there (each counts as often as it is "
            "looked up)",
            hits, keys);
}

/* Levels of which a block takes a third of the engine's bytes at most. */
static bool is_packed(const char *level)
{
    return level && (!strcmp(level, "kv4") || !strcmp(level, "kv5") || !strcmp(level, "int4"));
}

static void judge_paying(json_t *list, const struct kvt_stat_facts *facts)
{
    const json_t *c = facts->counters;
    uint64_t stored = kvt_stats_value(c, "client.store_bytes");
    uint64_t engine = kvt_stats_value(c, "client.store_logical_bytes");
    uint64_t blocks = kvt_stats_value(c, "client.store_blocks");
    uint64_t escalated = kvt_stats_value(c, "store.escalated");
    const char *level = json_string_value(json_object_get(c, "codec.level"));
    char a[64], b[32], d[32];

    if (!c) {
        say(list, "paying", "note", "numbers come two seconds after the first request",
            "nothing can be said: no process has left numbers here");
        return;
    }
    judge_loads(list, facts);
    if (engine && stored)
        say(list, "paying", "ok", NULL, "%s of the engine's cache were stored as %s: %.2f of it",
            kvt_human_bytes(engine, b), kvt_human_bytes(stored, d),
            (double)stored / (double)engine);
    if (engine && stored > engine / 2 && escalated <= blocks / 2 && is_packed(level))
        say(list, "paying", "note",
            "a shorter window (window_tokens; --window-tokens of kvtier.llama_server) leaves more "
            "of a prompt at the level",
            "most was stored above the level (%s): the first block of a prompt is raw, and its "
            "window, the most recent tokens, at kv8",
            level);
    uint64_t prompts = kvt_stats_value(c, "shadow.prompts");
    if (prompts)
        say(list, "paying", "note", "set shadow=no to load",
            "shadow mode: of %" PRIu64 " prompts %" PRIu64
            " would have been loaded%s; first tokens "
            "would have come %.1f s sooner, all together, of %.1f s of computing; %.1f s of the "
            "GPU "
            "saved",
            prompts, kvt_stats_value(c, "shadow.hits"),
            tokens(facts,
                   kvt_stats_value(c, "shadow.blocks_dram") +
                       kvt_stats_value(c, "shadow.blocks_disk") +
                       kvt_stats_value(c, "shadow.blocks_remote"),
                   a, sizeof(a)),
            (double)kvt_stats_value(c, "shadow.saved_ttft_us") * 1e-6,
            (double)kvt_stats_value(c, "shadow.prefill_us") * 1e-6,
            (double)kvt_stats_value(c, "shadow.saved_gpu_us") * 1e-6);
    if (blocks && escalated > blocks / 2)
        say(list, "paying", "warn",
            "set a finer level (kv5, kv6 or kv8), which saves the attempt at the low one; 'kvtier "
            "quality' compares them",
            "%" PRIu64 " of %" PRIu64 " stored blocks were refused by the guard at the level asked "
            "for",
            escalated, blocks);
    apply_rules(list, c, "paying");
    judge_chains(list, c);
}

/* A cap that its file system does not hold, before that is felt. */
static void judge_room(json_t *list, const char *path, uint64_t cap_bytes, uint64_t used_bytes)
{
    struct kvt_root_room room;
    char text[640];

    if (!path || !cap_bytes || kvt_root_room(path, cap_bytes, &room))
        return;
    if (!room.used_bytes) /* a directory that only its owner may read */
        room.used_bytes = used_bytes;
    if (kvt_root_room_short(&room, path, text, sizeof(text)))
        say(list, "safe", "warn", NULL, "%s", text);
}

static void judge_rooms(json_t *list, const struct kvt_stat_facts *facts)
{
    char name[48];

    if (!facts->daemon)
        judge_room(list, facts->path, facts->bytes_max, facts->bytes_used);
    for (unsigned i = 0; facts->daemon; i++) {
        snprintf(name, sizeof(name), "disk.%u.path", i);
        const char *path = json_string_value(json_object_get(facts->counters, name));
        if (!path)
            return;
        snprintf(name, sizeof(name), "disk.%u.cap_bytes", i);
        uint64_t cap = kvt_stats_value(facts->counters, name);
        snprintf(name, sizeof(name), "disk.%u.bytes_used", i);
        judge_room(list, path, cap, kvt_stats_value(facts->counters, name));
    }
}

static void judge_safe(json_t *list, const struct kvt_stat_facts *facts)
{
    size_t before;
    uint64_t queued = kvt_stats_value(facts->counters, "disk.queue_blocks");

    if (facts->recovered_bad)
        say(list, "safe", "note", "'kvtier fsck DIR', while no process owns it, tells which",
            "%" PRIu64 " segments, batches or entries on disk are unfinished or damaged",
            facts->recovered_bad);
    before = json_array_size(list);
    apply_rules(list, facts->counters, "safe");
    if (facts->counters && before == json_array_size(list))
        say(list, "safe", "ok", NULL, "no record failed to verify, no read and no write failed");
    judge_rooms(list, facts);
    if (facts->unreachable)
        say(list, "safe", "note", "none is needed: their segments are recycled in turn",
            "%" PRIu64 " records cannot be reached: a block before them is gone",
            facts->unreachable);
    uint64_t unsaved = kvt_stats_value(facts->counters, "disk.unsaved_blocks");
    if (unsaved && facts->owner_pid)
        say(list, "safe", "note",
            "kvt_flush() writes them; write=auto does within half a minute, write=through at once",
            "%" PRIu64 " blocks are in DRAM only: a crash would lose them", unsaved);
    if (queued && facts->owner_pid)
        say(list, "safe", "note", "kvt_flush() waits for them; a crash now would lose them",
            "%" PRIu64 " blocks wait to be written", queued);
}

void kvt_stat_verdicts_print(const json_t *verdicts)
{
    static const char *const questions[][2] = {
        {"working", "is it working?"}, {"paying", "is it paying?"}, {"safe", "is the data safe?"}};
    json_t *verdict;
    size_t i;

    for (size_t q = 0; q < KVT_ARRAY_LEN(questions); q++) {
        printf("%s\n", questions[q][1]);
        json_array_foreach((json_t *)verdicts, i, verdict)
        {
            const char *remedy = json_string_value(json_object_get(verdict, "remedy"));
            if (strcmp(json_string_value(json_object_get(verdict, "question")), questions[q][0]))
                continue;
            printf("  %-5s %s\n", json_string_value(json_object_get(verdict, "state")),
                   json_string_value(json_object_get(verdict, "text")));
            if (remedy)
                printf("        -> %s\n", remedy);
        }
    }
}

json_t *kvt_stat_verdicts(const struct kvt_stat_facts *facts)
{
    json_t *list = json_array();

    judge_working(list, facts);
    judge_paying(list, facts);
    judge_safe(list, facts);
    return list;
}
