/* The subcommands of `kvtier`. To add one: write cmd_<name>.c, list it in tools/CMakeLists.txt, add
 * a line here. */
#ifndef KVT_TOOLS_COMMANDS_H
#define KVT_TOOLS_COMMANDS_H

#include "cli.h"

/* X("name", function, "one line for kvtier --help"); a name may have two words. */
#define KVT_COMMANDS(X)                                                                          \
    X("doctor", kvt_cmd_doctor, "what works on this machine, and why the rest does not")         \
    X("plan", kvt_cmd_plan, "does a cache pay for a model, and on which drives?")                \
    X("replay", kvt_cmd_replay, "would it have paid? A trace of requests through the store")     \
    X("stat", kvt_cmd_stat, "what a store directory holds, and every option in force")           \
    X("top", kvt_cmd_top, "what a running cache is doing: hits, rates, queues, drops")           \
    X("fsck", kvt_cmd_fsck, "check a store directory, record by record")                         \
    X("verify", kvt_cmd_verify,                                                                  \
      "read every block of a store as a load would, also beside its owner")                      \
    X("inspect", kvt_cmd_inspect, "namespaces, segments, or one record with its chain")          \
    X("purge", kvt_cmd_purge, "remove a namespace, or everything, from a store for good")        \
    X("bench codec", kvt_cmd_bench_codec, "speed of the codec against memcpy")                   \
    X("bench daemon", kvt_cmd_bench_daemon, "what the way to a kvtierd costs")                   \
    X("bench gpu", kvt_cmd_bench_gpu, "blocks between DRAM and GPU memory, and plain copies")    \
    X("bench index", kvt_cmd_bench_index, "open, memory and lookups of a store of many blocks")  \
    X("bench l2", kvt_cmd_bench_l2, "our log on a drive, beside fio")                            \
    X("bench remote", kvt_cmd_bench_remote, "records to and from Redis, beside redis-benchmark") \
    X("bench sessions", kvt_cmd_bench_sessions, "conversations that outgrow a GPU's memory")     \
    X("help", kvt_cmd_help, "options of a command, its man page, completion for shells")

/* Commands that need the llama.cpp adapter; a build without it says how to get it. */
#define KVT_COMMANDS_LLAMA(X)                                                                 \
    X("demo", kvt_cmd_demo, "a real model answers over a long document, cold and remembered") \
    X("quality", kvt_cmd_quality, "what each level does to a model's predictions")            \
    X("bench plan", kvt_cmd_bench_plan, "load or compute, on a live llama.cpp and a slowed drive")

/* First words that several commands share: X("word", "one line for its page and its help"). */
#define KVT_FAMILIES(X) \
    X("bench", "what this machine reaches: a benchmark for each part, beside the plain way")

#define KVT_X(name, function, summary) int function(int argc, char **argv);
KVT_COMMANDS(KVT_X)
KVT_COMMANDS_LLAMA(KVT_X)
#undef KVT_X

/* kvtier.c: the list, in the order of the usage. */
extern const struct kvt_command kvt_commands[];
extern const size_t kvt_command_count;

void kvt_usage_print(void);
/* The summary of a first word that commands share; NULL: it is none. */
const char *kvt_family(const char *word);
/* Print the commands that begin with such a word. */
void kvt_family_print(const char *word);
/* Say that argv[1], or argv[1] with argv[2], is no command, and which is near. KVT_EXIT_USAGE. */
int kvt_unknown_command(int argc, char **argv);

#endif
