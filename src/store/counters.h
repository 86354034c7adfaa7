/* Every counter and gauge of the store half, by one list: the struct, the names and the help.
 * Rule: each shortened hit, drop and fallback has a counter with a reason. */
#ifndef KVT_STORE_COUNTERS_H
#define KVT_STORE_COUNTERS_H

#include <stdint.h>

/* X(field, "dotted.name", "help"); counters only ever rise */
#define KVT_STORE_COUNTERS(X)                                                                     \
    X(lookup_keys, "lookup.keys", "keys asked for by lookups")                                    \
    X(lookup_hits_dram, "lookup.hits_dram", "keys of leading runs found in DRAM")                 \
    X(lookup_hits_disk, "lookup.hits_disk", "keys of leading runs found on disk")                 \
    X(lookup_hits_remote, "lookup.hits_remote", "keys of leading runs found in the shared tier")  \
    X(lookup_miss_absent, "lookup.miss_absent", "runs ended by an absent block")                  \
    X(lookup_miss_level, "lookup.miss_level", "runs ended by a block below the minimum level")    \
    X(lookup_miss_pending, "lookup.miss_pending", "runs ended by a block being stored")           \
    X(alloc_granted, "store.granted", "slots given to stores")                                    \
    X(alloc_exists, "store.exists", "stores of blocks that were there already")                   \
    X(alloc_dropped_dram, "store.dropped_dram", "stores dropped: no slot could be freed")         \
    X(alloc_dropped_chain, "store.dropped_chain", "stores dropped: a block before is absent")     \
    X(alloc_dropped_index, "store.dropped_index", "stores dropped: the index was full")           \
    X(alloc_purging, "store.dropped_purge", "stores dropped: their namespace was being purged")   \
    X(index_collision, "index.collision",                                                         \
      "keys refused: their fingerprint belongs to another key")                                   \
    X(commit_ok, "store.committed", "blocks committed")                                           \
    X(commit_lost, "store.lost_race", "commits that lost to an earlier one of the same key")      \
    X(commit_replaced, "store.replaced", "blocks replaced by one of another level")               \
    X(commit_cooled, "store.cooled", "of them, blocks replaced by one of a lower level")          \
    X(older_back, "store.older_back",                                                             \
      "blocks that are the record on disk again: the one that replaced it went unwritten")        \
    X(commit_bad, "store.bad_header", "commits refused: the header is not what was granted")      \
    X(commit_stale, "store.stale", "commits or releases with a stale slot reference")             \
    X(commit_aborted, "store.aborted", "slots given back uncommitted")                            \
    X(load_granted_dram, "load.granted_dram", "blocks granted from DRAM")                         \
    X(load_granted_disk, "load.granted_disk", "blocks granted from disk")                         \
    X(load_granted_remote, "load.granted_remote", "blocks granted from the shared tier")          \
    X(load_granted_direct, "load.granted_direct", "blocks granted where they lie on disk")        \
    X(load_miss, "load.miss", "blocks asked for and absent")                                      \
    X(load_miss_pending, "load.miss_pending", "loads ended by a block being stored")              \
    X(load_miss_level, "load.miss_level", "loads ended by a block below the minimum level")       \
    X(load_deadline, "load.deadline", "blocks not granted by their deadline")                     \
    X(load_canceled, "load.canceled", "blocks cancelled before their grant")                      \
    X(load_no_slot, "load.no_slot", "blocks not granted: no staging slot")                        \
    X(prefetch_dropped, "prefetch.dropped", "blocks not prefetched: too many requests")           \
    X(checksum_fail, "verify.checksum_fail", "records whose bytes or key did not match")          \
    X(read_fail, "disk.read_fail", "reads that failed")                                           \
    X(write_fail, "disk.write_fail", "writes that failed")                                        \
    X(enospc, "disk.enospc", "times there was no room on disk: segment, write, footer, journal")  \
    X(disk_written_blocks, "disk.written_blocks", "blocks written")                               \
    X(disk_written_bytes, "disk.written_bytes", "bytes written, headers and footers included")    \
    X(disk_read_blocks, "disk.read_blocks", "blocks read")                                        \
    X(disk_read_bytes, "disk.read_bytes", "bytes read for loads")                                 \
    X(disk_dropped_queue, "disk.dropped_queue", "blocks not written: the write queue was full")   \
    X(disk_dropped_space, "disk.dropped_space", "blocks not written: no room on disk")            \
    X(disk_dropped_error, "disk.dropped_error", "blocks not written: the write failed")           \
    X(disk_deferred, "disk.deferred", "blocks whose write was put off by their write policy")     \
    X(admit_yes, "admission.taken", "blocks that admission took for the disk")                    \
    X(admit_first, "admission.first_use", "blocks not taken: used once so far")                   \
    X(admit_value, "admission.low_value", "blocks not taken: others save more for the bytes")     \
    X(admit_budget, "admission.budget", "blocks not taken: the write budget was used up")         \
    X(admit_random, "admission.random", "blocks not taken: not drawn")                            \
    X(admit_chain, "admission.chain", "blocks not taken: the block before them was not")          \
    X(admit_long, "admission.too_long", "blocks not taken: no root can hold records as long")     \
    X(admit_last, "admission.last_block", "blocks not taken: the last of a prompt so far")        \
    X(admit_gone, "admission.gone", "blocks evicted from DRAM that admission had not taken")      \
    X(lost_deferred, "disk.lost_deferred", "blocks gone unwritten: evicted before their write")   \
    X(lost_queue, "disk.lost_queue", "blocks gone unwritten: the write queue had been full")      \
    X(lost_error, "disk.lost_error", "blocks gone unwritten: their write had failed")             \
    X(lost_again, "disk.lost_again",                                                              \
      "blocks gone with DRAM: the log had given their copy up, and they were not written again")  \
    X(evict_dram_blocks, "dram.evicted", "blocks evicted from DRAM")                              \
    X(evict_dram_lost, "dram.evicted_lost", "blocks evicted from DRAM that were not on disk")     \
    X(lost_no_dram, "store.lost", "blocks lost: not written, and no DRAM to stay in")             \
    X(evict_index_blocks, "index.evicted", "blocks on disk given up for room in the index")       \
    X(evict_disk_blocks, "disk.evicted", "blocks evicted from disk with their segment")           \
    X(evict_disk_segments, "disk.segments_recycled", "segments recycled")                         \
    X(given_up, "disk.given_up",                                                                  \
      "copies on disk given up for room: the block is in DRAM, and written again when it leaves") \
    X(reinserted, "disk.reinserted", "blocks worth keeping, moved before their segment went")     \
    X(renewed, "disk.renewed", "segments kept as they are: nearly all of it had been asked for")  \
    X(reinsert_failed, "disk.reinsert_failed", "blocks that could not be read or moved for that") \
    X(orphan_dropped, "disk.orphans", "blocks dropped because their parent was evicted")          \
    X(purged_blocks, "purge.blocks", "blocks purged")                                             \
    X(recovered_blocks, "recover.blocks", "blocks found at open")                                 \
    X(recovered_segments, "recover.segments", "segments found at open")                           \
    X(recovered_bad, "recover.bad", "segments, batches or entries refused at open")               \
    X(recovered_no_room, "recover.no_room", "records at open beyond the index capacity")          \
    X(ttl_expired, "ttl.expired", "blocks gone: not used for the time to live")                   \
    X(quota_evicted, "quota.evicted", "blocks given up for others of their namespace: its quota") \
    X(quota_refused, "quota.refused", "stores dropped: the namespace is full of blocks in use")   \
    X(ns_refused, "index.namespaces_refused",                                                     \
      "namespaces refused: as many are open, or hold blocks, as there may be")                    \
    X(ns_without_root, "index.namespaces_without_root",                                           \
      "namespaces that go without a root: it cannot hold their longest records")                  \
    X(ns_given_back, "index.namespaces_given_back",                                               \
      "closed and empty namespaces whose place another one took")                                 \
    X(pin_refused, "pin.refused", "pins refused by the pin budget")                               \
    X(flushes, "flush.count", "flushes completed")                                                \
    X(scrub_records, "scrub.records", "cold records read back from disk and verified")            \
    X(scrub_bytes, "scrub.bytes", "bytes of them")                                                \
    X(scrub_bad, "scrub.bad", "of them, records dropped: damaged, or not to be read")             \
    X(scrub_read_fail, "scrub.read_fail", "of them, records that could not be read")              \
    X(scrub_buried, "scrub.buried", "damaged records that no restart finds again: journaled")     \
    X(scrub_passes, "scrub.passes", "walks over all records that came to their end")              \
    X(remote_asked, "remote.asked", "keys that the shared tier was asked for by lookups")         \
    X(remote_rounds, "remote.rounds", "round trips to its nodes that this took")                  \
    X(remote_found, "remote.found", "of these keys, those it had")                                \
    X(remote_unknown, "remote.unknown", "of them, those that got no answer: taken for absent")    \
    X(remote_refused, "remote.refused", "of them, those that are no records we can read")         \
    X(remote_negative, "remote.negative", "keys not asked for: absent there a moment ago")        \
    X(remote_busy, "remote.busy", "lookups or reads not sent there: too many under way")          \
    X(remote_lookup_fail, "remote.lookup_fail", "lookups answered without all its answers")       \
    X(remote_late, "remote.late", "requests given up on: the shared tier hung")                   \
    X(remote_got, "remote.got", "records read from the shared tier")                              \
    X(remote_got_bytes, "remote.got_bytes", "bytes of them")                                      \
    X(remote_get_gone, "remote.gone", "records found there that had gone, or changed, when read") \
    X(remote_get_bad, "remote.bad", "records there of wrong length, bytes, key or MAC")           \
    X(remote_get_deadline, "remote.deadline", "records not read there in time")                   \
    X(remote_get_fail, "remote.get_fail", "records not read there: node down, refused, error")    \
    X(remote_put, "remote.put", "records put there")                                              \
    X(remote_put_bytes, "remote.put_bytes", "bytes of them")                                      \
    X(remote_put_exists, "remote.put_exists", "records not put there: somebody else had")         \
    X(remote_put_gone, "remote.put_gone", "records not put there: they had left DRAM")            \
    X(remote_put_dropped, "remote.put_dropped", "records not put there: the queue was full")      \
    X(remote_put_full, "remote.put_full", "records not put there: it has no room")                \
    X(remote_put_fail, "remote.put_fail", "records not put there: deadline, node down, error")    \
    X(remote_purged, "remote.purged", "records purged there")                                     \
    X(remote_purge_fail, "remote.purge_fail", "purges that did not reach all of it")              \
    X(bad_messages, "message.bad", "malformed messages from clients")                             \
    X(off_requests, "off.requests", "requests answered while switched off")

/* gauges: current values */
#define KVT_STORE_GAUGES(X)                                                                     \
    X(blocks, "index.blocks", "blocks in the index")                                            \
    X(index_bytes, "index.bytes", "memory of the index")                                        \
    X(dram_bytes_max, "dram.bytes_max", "DRAM cap")                                             \
    X(dram_bytes_used, "dram.bytes_used", "DRAM in slots")                                      \
    X(dram_blocks, "dram.blocks", "blocks in DRAM")                                             \
    X(dram_pins, "dram.pins", "pins held on slots by loads, stores and writes")                 \
    X(parted_bytes, "dram.parted_bytes",                                                        \
      "being filled by programs that were disconnected and live on: theirs until they end")     \
    X(pinned_blocks, "pin.blocks", "blocks pinned by kvt_pin")                                  \
    X(pinned_bytes, "pin.bytes", "bytes of records pinned by kvt_pin")                          \
    X(disk_roots, "disk.roots", "roots in use")                                                 \
    X(disk_failing, "disk.roots_failing", "roots whose last write failed")                      \
    X(disk_bytes_max, "disk.bytes_max", "disk cap, all roots")                                  \
    X(disk_bytes_used, "disk.bytes_used", "bytes of all files of the store")                    \
    X(disk_short_bytes, "disk.short_bytes",                                                     \
      "bytes of the cap that the file systems had no room for, when that was last tried")       \
    X(disk_blocks, "disk.blocks", "blocks on disk")                                             \
    X(disk_segments, "disk.segments", "segments that hold blocks")                              \
    X(disk_unread, "disk.segments_unread",                                                      \
      "segments that could not be read at open, nor since: kept as they are until they can be") \
    X(disk_erases, "disk.erases_queued", "purged ranges not overwritten yet")                   \
    X(disk_queue_blocks, "disk.queue_blocks", "blocks waiting to be written")                   \
    X(disk_batch_bytes, "disk.batch_bytes",                                                     \
      "most bytes of one write, by the measured speed of the slowest root")                     \
    X(disk_queue_bytes, "disk.queue_bytes", "bytes waiting to be written")                      \
    X(disk_unsaved, "disk.unsaved_blocks", "blocks in DRAM that are on no disk, nor queued")    \
    X(budget_left, "admission.budget_left", "bytes that may be written now; 0 also: no budget") \
    X(disk_direct, "disk.direct", "1 when O_DIRECT is proved and in use")                       \
    X(namespaces, "index.namespaces", "namespaces known")                                       \
    X(remote_queue, "remote.queue", "records that wait to be put to the shared tier")           \
    X(remote_nodes, "remote.nodes", "nodes of the shared tier that are known")                  \
    X(remote_nodes_down, "remote.nodes_down", "of them, those that do not answer at present")   \
    X(remote_connects, "remote.connects", "connections made to them")                           \
    X(remote_losses, "remote.losses", "connections lost, refused, or given up")                 \
    X(remote_redirects, "remote.redirects", "answers of a cluster that a key is elsewhere")     \
    X(remote_auth_fails, "remote.auth_fails", "log-ins refused")

struct kvt_store_stats {
#define KVT_X(field, name, help) uint64_t field;
    KVT_STORE_COUNTERS(KVT_X)
    KVT_STORE_GAUGES(KVT_X)
#undef KVT_X
};

#define KVT_STORE_STAT_COUNT (sizeof(struct kvt_store_stats) / sizeof(uint64_t))

#endif
