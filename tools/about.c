/* Texts of --help and of the man pages, one for each command. Threads: any; no state. */
#include "about.h"

#include <stddef.h>
#include <string.h>

#include "base/checked.h"

static const struct kvt_about abouts[] = {
    {"demo",
     "Runs a real model over a long document: several questions as a chat, first cold, then with "
     "the "
     "document's KV cache taken from DRAM, then from disk in a new process whose page cache is "
     "empty. Shows the time to the first token, what was loaded and what was computed, bytes moved "
     "and stored, the answers side by side, and how often the coded cache and the exact one agree "
     "on the next token.",
     "kvtier demo\nkvtier demo --model your.gguf --prompt-file notes.txt --level kv8"},
    {"doctor",
     "Checks what the library would use on this machine: instruction set, memory and its limits, "
     "a directory for the disk tier, and says why the rest is not used. A line is ok; off: not "
     "there, and nobody asked for it; warn: works, worse than it could; fail: asked for, and does "
     "not work. Exit code 1 when any line is fail. With --dir it writes a scratch file there and "
     "removes it; a store that lives in the directory is not touched. With remote=URL in --config "
     "a "
     "record is put to the tier that machines share, read, compared and removed.",
     "kvtier doctor --dir /var/cache/kvtier\nkvtier doctor --config dram=8GiB,level=kv8\n"
     "kvtier doctor --config remote=redis://10.0.0.5:6379,remote_auth=/etc/kvtier.auth"},
    {"plan",
     "Tells before anything is bought whether a cache pays: what a token takes at each level, "
     "as records on disk with header and padding; the bandwidth from which loading beats "
     "computing; "
     "for each tier the shortest prompt that it pays for, what a million cached tokens cost, and "
     "how "
     "long a drive lives at a given traffic; and how many sessions fit with and without. Models, "
     "prefill rates, drives and prices come from share/kvtier/plan.json; add yours by --data, or "
     "give "
     "a model's config.json. Without a model it lists those that it knows.",
     "kvtier plan --model llama-3-70b --prefill 18000\nkvtier plan --config config.json --prefill "
     "9000 --traffic 500\nkvtier plan --example"},
    {"replay",
     "Sends a trace of requests through the store itself, with a drive in memory and the trace's "
     "own clock, and says what would have been found, where, and what that would have meant: time "
     "to the first token with kvtier's plan, computing everything, and loading everything; GPU "
     "seconds saved; bytes written; whether it would have paid, and with which of the sizes given. "
     "Records are one page each and caps are scaled alike: the store never looks into a payload. "
     "Requests wait for engines, and loads for their drive; the plan has to find the rates out. A "
     "line of the trace is a JSON object with timestamp (ms), input_length (tokens) and hash_ids, "
     "one for each block of 512 tokens, standing for it and all before it; the option \"trace\" of "
     "the library records such lines. LRU, beside the hits: two lists of DRAM's and the disk's "
     "size "
     "that both take every block, which find what one of the larger size finds; sum: one list as "
     "large as both together. Percentiles lie between two values in proportion: p50 of two is "
     "their mean.",
     "kvtier replay --trace requests.jsonl --dram 64GiB --disk 2TB\n"
     "kvtier replay --trace requests.jsonl --dram 50GB,200GB --disk none,2TB,8TB\n"
     "kvtier replay --generate 5000 --sweep"},
    {"stat",
     "Answers an operator's three questions about a store directory: is it working (who owns it, "
     "what it holds, how full it is), is it paying (hits by tier, bytes saved), is my data safe "
     "(what was refused, dropped or found damaged). Also beside the running owner: it reads the "
     "log without its lock, and the numbers that the owner writes every two seconds while "
     "something happens.",
     "kvtier stat /var/cache/kvtier\nkvtier stat --effective --config level=kv8"},
    {"top",
     "Shows the numbers that a running cache writes into its first root every two seconds while "
     "something happens: what was loaded instead of computed, what was looked up (a question, "
     "which saves nothing by itself and is asked again and again), stores with their rates, the "
     "write queue, and every drop with its reason. On a terminal it redraws until 'q'; elsewhere, "
     "and with --json, it prints until it is ended. The process itself is not asked, so it is not "
     "slowed.",
     "kvtier top /var/cache/kvtier\nkvtier top /var/cache/kvtier --once --json"},
    {"fsck",
     "Checks a store at rest as a structure: superblock, journal, segment headers, batches, "
     "footers, and every record's checksum, purged and superseded ones included. A problem is "
     "damage; a note is what a crash left unfinished, which the next open drops. Changes nothing. "
     "A directory that a process owns is refused, unless --force. To prove that blocks can be had, "
     "also beside the owner, see kvtier verify.",
     "kvtier fsck /var/cache/kvtier"},
    {"verify",
     "Looks at a store as a load does, while fsck looks at it as a structure: lists what a restart "
     "would find (the newest record of each key, without purged ones), reads each record whole, "
     "checks key, header, lengths and checksum, and follows its chain to the start of its "
     "sequence, since no lookup reaches a block behind a gap.\n\n"
     "Works beside a running owner, and reads only. What fails there is looked up again, and is a "
     "problem only if it is still listed and still bad; what the owner recycled or purged "
     "meanwhile is counted apart. --rate keeps it from taking the drive away from the owner. What "
     "lies in the page cache is not read from the drive; a store on direct I/O leaves nothing "
     "there.",
     "kvtier verify /var/cache/kvtier --rate 200MiB"},
    {"inspect",
     "Without a second word: the root (format, cap, counters), its namespaces with their level "
     "maps "
     "and record lengths, and its segments. With one: the record that it names, by the first "
     "hexadecimal digits of its key's hash or by SEGMENT:PAGE as in file names: header fields, "
     "sizes, whether it verifies, and its chain to the start of the sequence. Payload is never "
     "shown. Works beside a running owner. Exit code 1 when the record is damaged, absent or not "
     "unique.",
     "kvtier inspect /var/cache/kvtier\nkvtier inspect /var/cache/kvtier 3fa1c2\n"
     "kvtier inspect /var/cache/kvtier 0000002a:17 --json"},
    {"purge",
     "Removes a namespace, or everything, for good: the journal first, synced, so that no restart "
     "finds the records; then their bytes are overwritten or punched out (flash keeps old copies "
     "of its own). A directory that a process owns is refused: that process can purge by "
     "kvt_purge(), and a kvtierd that runs is asked to, with unix:SOCKET for the directory: "
     "by root or its own user, the tier that it shares included. Of a kvtierd --all are the "
     "namespaces that it has blocks of; what programs store meanwhile may stay. Asks on a "
     "terminal; elsewhere it needs --yes.\n\n"
     "With --remote URL the tier that machines share is purged after the directory: of the "
     "namespace, or with --all of those that the directory holds records of. Without DIR only that "
     "is done, also while caches run. What other machines hold themselves stays until it is purged "
     "there.",
     "kvtier purge /var/cache/kvtier --namespace 0123456789abcdef0123456789abcdef --yes\n"
     "kvtier purge unix:/run/kvtier.sock --namespace 0123456789abcdef0123456789abcdef --yes\n"
     "kvtier purge --namespace 0123456789abcdef0123456789abcdef --remote redis://10.0.0.5:6379"},
    {"bench",
     "Each benchmark measures one part of the library on this machine, in turns with the plain way "
     "of doing the same in the same run: memcpy, copies by the driver, fio, a store without a "
     "daemon. Figures of a busy machine say little; each prints what it ran on. A reader of "
     "JSON takes --json.",
     "kvtier bench codec\nkvtier bench l2 --dir /mnt/nvme --fio\nkvtier bench index --json"},
    {"bench codec",
     "Encodes and decodes a pool larger than the caches on one core, in turn with memcpy of the "
     "same buffers, at each level, and prints the medians and their ratio to memcpy. Rows of 576 "
     "elements are taken as MLA latents, which are stored at kv8 or raw; with --level a lower "
     "level is measured on key rows of that length.",
     "kvtier bench codec --level kv4 --dim 128 --json"},
    {"bench gpu",
     "Moves blocks between pinned DRAM and a pool in GPU memory, coded, on an idle GPU, and "
     "compares "
     "the rates with copies of the same bytes by the driver in the same run.",
     "kvtier bench gpu --json"},
    {"bench l2",
     "Measures a drive through the log of the store: batches of records are appended, then read "
     "back in order and verified; checksums are part of the time. With --fio every pass is paired "
     "with one of a fixed fio job (io_uring, O_DIRECT, the same bytes, block and depth, a file "
     "written before), in turns, and the medians and their ratio are printed. Says which backend "
     "was used and why, how long the requests were, and how much came from the page cache. Exit "
     "code 1 when nothing was read from the drive. Works in a directory of its own inside --dir, "
     "which it removes; takes up to three times --size there, four with --fio.",
     "kvtier bench l2 --dir /mnt/nvme --fio\nkvtier bench l2 --dir /mnt/nvme --size 8GiB --json"},
    {"bench daemon",
     "Measures the same cache in this process and through a kvtierd that it starts: round trips of "
     "lookups by callers that sleep and by ones that spin, loads from DRAM and, with --dir, from "
     "disk, and as many client processes as processors beside one process with a store of its own. "
     "Both sides of a pair are measured right after each other; medians of each side and of the "
     "pairs' ratios are printed.",
     "kvtier bench daemon --json\nkvtier bench daemon --dir /mnt/nvme"},
    {"bench remote",
     "Puts records to a Redis server and reads them back as the store does, beside redis-benchmark "
     "with values of the same size on the same server, in turns, and prints the medians of both "
     "and of the rounds' ratios. A record is removed for each that is put, so that the server has "
     "memory for it, as it has for redis-benchmark, which writes over its own values. Without "
     "--url a redis-server of its own is started on loopback, without persistence, and ended.",
     "kvtier bench remote --json\nkvtier bench remote --url redis://10.0.0.5:6379"},
    {"bench index",
     "Makes a root of very many small records (real headers and footers; the records are holes, "
     "since opening reads none), drops its page cache, and opens it in a new process: how long "
     "that "
     "takes, what a block costs in memory, how many lookups a second one core answers with half of "
     "the keys absent, how long the lookup of a whole chain takes. The root is removed afterwards.",
     "kvtier bench index --blocks 1000000 --json"},
    {"bench sessions",
     "Opens more conversations on a GPU than its memory holds, through the session manager, with "
     "real pages, kernels, DRAM and disk: every one prefills and goes idle, then they come back in "
     "random order with a short prompt. Says how many are held against bf16 pages in GPU memory "
     "alone, and the time to the first token by where their blocks came from. Attention is not "
     "computed: what computing takes comes from a model that is printed first.",
     "kvtier bench sessions --dir /mnt/nvme --json\n"
     "kvtier bench sessions --sessions 32 --tokens 32768 --pool 20GB --dram 32GiB"},
    {"quality",
     "Measures what a level does to a model: perplexity, divergence from the exact cache and "
     "agreement on the next token, with the cache coded while a text is scored. Quantised weights "
     "are dequantised once, into the cache directory.",
     "kvtier quality\nkvtier quality --model your.gguf --text notes.txt --levels kv4,kv5,kv8"},
    {"bench plan",
     "Slows a drive down to rates around the one where loading a prompt takes as long as computing "
     "it, and measures the time to the first token on a live llama.cpp: everything computed, "
     "everything loaded, and as the plan decides. Regret is the plan's time over the better of the "
     "other two. Then the drive becomes 20 times slower, and recovers: after how many loads plans "
     "know it. Takes some minutes, and two idle processors.",
     "kvtier bench plan --json\nkvtier bench plan --tokens 2048 --dir /mnt/nvme"},
    {"help",
     "Shows the options of a command, as --help does; as a man page with --man; or prints a script "
     "that completes commands and options in bash or zsh.",
     "kvtier help bench index\nkvtier help --man stat | man -l -\n"
     "source <(kvtier help --complete bash)"},
};

const struct kvt_about *kvt_about(const char *command)
{
    for (size_t i = 0; i < KVT_ARRAY_LEN(abouts); i++)
        if (!strcmp(abouts[i].command, command))
            return &abouts[i];
    return NULL;
}
