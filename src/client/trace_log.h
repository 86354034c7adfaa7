/* The recorder behind the option "trace": which prompts were looked up, and when, for `kvtier
 * replay`. Lines of {"timestamp" ms since open, "input_length" tokens, "output_length": 0,
 * "hash_ids": a number for each 512 tokens}: digests of a salt that is drawn at open and kept
 * nowhere, the namespace and the key. No prompt, no token, no key is in the file.
 *
 * Bounded: FILE takes half of trace_max, then becomes FILE.1 in place of the one before. A write
 * that fails ends the recording, once said in the log; what was written stays whole lines.
 * Threads: any, under its own lock; never the cache's. Allocates at open only.
 */
#ifndef KVT_CLIENT_TRACE_LOG_H
#define KVT_CLIENT_TRACE_LOG_H

#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/log.h"
#include "kvtier/key.h"

#define KVT_TRACE_BLOCK_TOKENS 512u

struct kvt_trace_log;

enum kvt_trace_noted { KVT_TRACE_DROPPED = -1, KVT_TRACE_REPEATED = 0, KVT_TRACE_WRITTEN = 1 };

/* What was looked up: blocks of one chain from the prompt's first one on, of a namespace. */
struct kvt_trace_prompt {
    const uint8_t *ns_id; /* KVT_NS_BYTES */
    const struct kvt_key *keys;
    size_t n;
    uint32_t block_tokens;
    uint64_t tokens; /* of the prompt; 0: those of the blocks */
};

/* 0, or a negative error with a sentence that names the file. Blocks. */
int kvt_trace_open(const char *path, uint64_t bytes_max, const struct kvt_clock *clock,
                   const struct kvt_log *log, struct kvt_trace_log **out, char *error,
                   size_t error_len) __attribute__((warn_unused_result));
void kvt_trace_close(struct kvt_trace_log *trace);
/* Write its line, unless the same prompt was noted within the last second: engines ask again while
 * a request waits. One write(2). */
enum kvt_trace_noted kvt_trace_note(struct kvt_trace_log *trace,
                                    const struct kvt_trace_prompt *prompt);

#endif
