/* Request traces: lines of JSON {"timestamp" ms, "input_length", "output_length", "hash_ids"}, a
 * hash for each block of 512 tokens that stands for the block and all before it. Lines of other
 * blocks say so, all of them alike: "block_tokens". Tools only. */
#ifndef KVT_TOOLS_REPLAY_TRACE_H
#define KVT_TOOLS_REPLAY_TRACE_H

#include <stddef.h>
#include <stdint.h>

#define REPLAY_BLOCK_TOKENS 512u
#define REPLAY_CHAIN_MAX 65536u

struct replay_request {
    int64_t at_ms;
    uint32_t tokens;
    uint32_t count;
    uint64_t *ids;   /* owned by the trace */
    uint32_t *ranks; /* of the ids among the trace's different ones, < distinct; owned as well */
};

struct replay_trace {
    struct replay_request *requests;
    size_t count, room;
    uint32_t block_tokens;
    uint64_t blocks, distinct; /* all; different ones */
    uint64_t reordered;        /* requests that stood before an earlier one: taken at once */
    uint64_t short_chains;     /* requests with fewer ids than their tokens fill blocks */
};

/* 0, or -1 with a sentence that names the line. Ends early when the command was interrupted. */
int replay_trace_read(struct replay_trace *trace, const char *path, char *error, size_t len);
/* Sessions over shared system prompts that come back with a longer history; same seed, same trace.
 * 0; -1 no memory, or interrupted. */
int replay_trace_make(struct replay_trace *trace, uint64_t seed, size_t requests);
/* Take from each prompt the block that its tokens do not fill. 0; -1 no memory. */
int replay_trace_whole_blocks(struct replay_trace *trace);
void replay_trace_free(struct replay_trace *trace);

#endif
