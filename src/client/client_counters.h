/* Every counter of the client half, by one list, and every gauge that it adds to the store's.
 * Rule: each refusal, shortened load, escalation and fallback has a counter with a reason. */
#ifndef KVT_CLIENT_COUNTERS_H
#define KVT_CLIENT_COUNTERS_H

#include <stdint.h>

/* Of all session managers together, as of their last call: the fields of struct kvt_session_stats.
 */
#define KVT_SESSION_COUNTERS(X)                                                                   \
    X(session_resumed, "session.resumed", "sessions brought back")                                \
    X(session_blocks_l0, "session.blocks_l0", "of them, blocks that were in L0")                  \
    X(session_blocks_loaded, "session.blocks_loaded", "of them, blocks that were loaded")         \
    X(session_load_short, "session.load_short", "blocks planned to be loaded that did not come")  \
    X(session_met, "session.met", "sessions computed and loaded from both ends")                  \
    X(session_blocks_beside, "session.blocks_beside", "blocks that these computed")               \
    X(session_shared, "session.shared", "blocks that L0 held for another session")                \
    X(session_duplicates, "session.duplicates", "blocks computed by two sessions at a time")      \
    X(session_stored_window, "session.stored_window", "blocks stored at the window's level")      \
    X(session_stored_final, "session.stored_final", "blocks stored at the final level")           \
    X(session_cooled_record, "session.cooled_record", "of them, blocks cooled from their record") \
    X(session_store_failed, "session.store_failed", "blocks that the store did not take")         \
    X(session_cool_failed, "session.cool_failed", "records that could not be loaded to cool")     \
    X(session_evicted, "session.evicted", "pages taken from idle sessions")                       \
    X(session_evicted_unsaved, "session.evicted_unsaved", "of them, pages without a record")      \
    X(session_tails_lost, "session.tails_lost", "of them, pages of partial blocks")               \
    X(session_truncated_tokens, "session.truncated_tokens",                                       \
      "tokens cut off by kvt_session_truncate()")                                                 \
    X(session_cut_tokens, "session.cut_tokens", "tokens not filled when a session went idle")     \
    X(session_refused_busy, "session.refused_busy", "calls that had to be tried again")           \
    X(session_refused_limit, "session.refused_limit", "calls refused by a limit")

/* X(field, "dotted.name", "help"); counters only ever rise */
#define KVT_CLIENT_COUNTERS(X)                                                                     \
    KVT_SESSION_COUNTERS(X)                                                                        \
    X(load_requests, "client.load_requests", "loads accepted")                                     \
    X(load_blocks_ok, "client.load_blocks", "blocks decoded into pool pages")                      \
    X(load_bytes, "client.load_bytes", "record bytes decoded into pool pages")                     \
    X(load_short_miss, "client.load_miss", "blocks of loads that were absent")                     \
    X(load_short_deadline, "client.load_deadline", "blocks of loads not granted in time")          \
    X(load_late, "client.load_late", "blocks granted, but past the deadline: page not touched")    \
    X(load_canceled, "client.load_canceled", "blocks of loads that were cancelled")                \
    X(load_corrupt, "client.load_corrupt", "granted records whose bytes or key did not match")     \
    X(load_other, "client.load_other", "blocks of loads that ended with another error")            \
    X(store_requests, "client.store_requests", "stores accepted")                                  \
    X(store_blocks_ok, "client.store_blocks", "blocks encoded and committed")                      \
    X(store_exists, "client.store_exists", "blocks of stores that were there already")             \
    X(store_dropped, "client.store_dropped", "blocks of stores dropped: no slot")                  \
    X(store_orphan, "client.store_orphans", "blocks of stores whose parent is not stored")         \
    X(store_cut, "client.store_cut", "blocks not tried: one before them in the chain was dropped") \
    X(store_canceled, "client.store_canceled", "blocks of stores cancelled, or being purged")      \
    X(store_other, "client.store_other", "blocks of stores that ended with another error")         \
    X(store_bytes, "client.store_bytes", "record bytes committed")                                 \
    X(store_logical, "client.store_logical_bytes", "engine bytes of the blocks committed")         \
    X(escalated, "store.escalated", "blocks that failed the guard and went a level up")            \
    X(escalated_raw, "store.escalated_raw", "of them, blocks that ended at raw")                   \
    X(judged, "store.judged", "blocks looked at to choose level maps")                             \
    X(chosen_heads, "store.heads_raised", "key heads raised alone above the level of their group") \
    X(chosen_levels, "store.levels_raised", "times a group's level rose as a whole")               \
    X(map_full, "store.map_full", "blocks stored raw: no id left for a mixed map of that length")  \
    X(nonfinite, "store.nonfinite", "blocks stored raw: NaN, Inf or an overflowing scale")         \
    X(reorigin, "store.reorigin", "pages of lossy origin stored again, at kv8")                    \
    X(reorigin_dropped, "store.reorigin_dropped", "pages of lossy origin that kv8 cannot hold")    \
    X(plan_load, "plan.load", "plans to load all blocks that are there")                           \
    X(plan_recompute, "plan.recompute", "plans to load nothing: computing is faster")              \
    X(plan_cut, "plan.cut", "plans to compute the front and load the rest")                        \
    X(plan_prefix, "plan.prefix", "plans to load the front alone: the rest is on a slower tier")   \
    X(plan_probe, "plan.probe", "plans to load a little, to see whether a tier has recovered")     \
    X(plan_no_blocks, "plan.no_blocks", "plans of prompts without any block")                      \
    X(plan_off, "plan.off", "plans not weighed: plan=off")                                         \
    X(plan_unsure, "plan.unsure", "plans by measurements that contradict each other")              \
    X(plan_refused, "plan.refused", "plans asked for with numbers that make no sense")             \
    X(plan_file_read, "plan.file_read", "what plans had learnt was found at open")                 \
    X(plan_file_bad, "plan.file_bad", "it was damaged, and is forgotten")                          \
    X(shadow_prompts, "shadow.prompts", "prompts looked up in shadow mode")                        \
    X(shadow_hits, "shadow.hits",                                                                  \
      "of them, prompts that would have been loaded, in part or whole")                            \
    X(shadow_blocks_dram, "shadow.blocks_dram", "blocks that would have been loaded from DRAM")    \
    X(shadow_blocks_disk, "shadow.blocks_disk", "blocks that would have been loaded from disk")    \
    X(shadow_blocks_remote, "shadow.blocks_remote",                                                \
      "blocks that would have been loaded from the shared tier")                                   \
    X(shadow_tokens, "shadow.tokens", "tokens that would not have been computed")                  \
    X(shadow_prefill_us, "shadow.prefill_us", "expected time to compute all of these prompts")     \
    X(shadow_ttft_us, "shadow.saved_ttft_us", "time to first tokens that would have been saved")   \
    X(shadow_gpu_us, "shadow.saved_gpu_us", "time of the GPU that would have been saved")          \
    X(shadow_loads, "shadow.load_blocks", "blocks of loads asked for in shadow mode: misses")      \
    X(trace_written, "trace.written", "prompts recorded in the trace")                             \
    X(trace_repeated, "trace.repeated", "prompts asked for again within a second: not recorded")   \
    X(trace_dropped, "trace.dropped", "prompts not recorded: the file could not be written")       \
    X(prefills, "plan.prefills", "prefills told by kvt_observe_prefill()")                         \
    X(prefills_refused, "plan.prefills_refused", "of them, refused: no observation")               \
    X(refused_again, "client.refused_busy", "requests refused: no request or block entry left")    \
    X(refused_bad, "client.refused_invalid", "requests refused: bad arguments or shapes")          \
    X(freed_twice, "client.freed_twice", "requests given to kvt_req_free() once too often")        \
    X(completed, "client.completed", "requests completed")                                         \
    X(canceled, "client.canceled", "requests cancelled before their end")                          \
    X(off_lookup, "off.lookup_keys", "keys looked up while switched off")                          \
    X(off_load, "off.load_blocks", "blocks of loads while switched off")                           \
    X(off_store, "off.store_blocks", "blocks of stores while switched off")                        \
    X(daemon_keys, "daemon.miss_keys", "keys asked for while there was no daemon: all missed")     \
    X(daemon_blocks, "daemon.miss_blocks", "blocks of loads and stores that ended so")             \
    X(daemon_reconnects, "daemon.reconnects", "times a kvtierd was found again")                   \
    X(daemon_silent, "daemon.silent", "times a kvtierd was given up: it owed answers")             \
    X(daemon_ns_refused, "daemon.refused_namespaces", "namespaces that a kvtierd did not take")    \
    X(gpu_jobs, "gpu.jobs", "batches of blocks that GPUs coded")                                   \
    X(gpu_layers, "gpu.layers", "runs of layers that were announced before their load had ended")  \
    X(gpu_failed_blocks, "gpu.failed_blocks", "blocks that ended because a GPU failed")            \
    X(gpu_lost, "gpu.lost", "GPUs that went offline")                                              \
    X(gpu_refused, "gpu.refused", "pools in GPU memory that were refused")                         \
    X(gds_reads, "gpu.gds.reads", "blocks read from a drive into GPU memory, past DRAM")           \
    X(gds_bytes, "gpu.gds.bytes", "record bytes of these")                                         \
    X(gds_fallback, "gpu.gds.fallback", "blocks that went through DRAM after all")                 \
    X(gds_errors, "gpu.gds.errors", "of them, reads that failed")                                  \
    X(gds_short, "gpu.gds.short", "of them, reads that brought fewer bytes")                       \
    X(gds_wrong, "gpu.gds.wrong", "of them, reads that brought other bytes")                       \
    X(gds_off, "gpu.gds.off", "times direct loads were switched off after failures")               \
    X(ring_full, "client.ring_full", "times a message had to wait for room in the ring")           \
    X(bad_reply, "client.bad_reply", "replies of the store that made no sense")                    \
    X(bad_move, "client.bad_move", "state transitions that must not happen (0 always)")

/* gauges: current values */
#define KVT_CLIENT_GAUGES(X)                                                                \
    X(requests_active, "client.requests_active", "requests in flight")                      \
    X(requests_held, "client.requests_held", "requests not yet freed")                      \
    X(blocks_held, "client.blocks_held", "block entries in use")                            \
    X(threads, "client.threads", "worker threads that encode or decode")                    \
    X(arena_pinned, "dram.pinned_bytes", "of the mapping, bytes locked in physical memory") \
    X(arena_bytes, "client.arena_bytes", "bytes of the mapping that holds slots and staging")

struct kvt_client_counters {
#define KVT_X(field, name, help) uint64_t field;
    KVT_CLIENT_COUNTERS(KVT_X)
#undef KVT_X
};

#endif
