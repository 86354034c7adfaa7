/* GPU lanes: one thread per device that turns READY blocks of its pools into jobs.
 *
 * A lane takes the place of the workers for blocks whose pool lies in GPU memory: it collects them
 * into batches, keeps a few jobs in flight, and ends blocks by the rules of coding.c.
 * Lifetime: a lane is opened by the first pool of its device and lives until the cache is closed.
 * Threads: as noted; "locked" means the cache's lock.
 */
#ifndef KVT_CLIENT_GPU_LANE_H
#define KVT_CLIENT_GPU_LANE_H

#include "client/client.h"

/* Open the device if need be, prepare the pool's plans and hang them on pool->gpu. Not locked;
 * blocks; allocates. 0; KVT_E_UNSUPPORTED no driver, device or kernels; KVT_E_INVAL pointers that
 * are not of this device; -ENOMEM; KVT_E_DEVICE. The log and "gpu.state" have the reason. */
int kvt_lane_pool_new(struct kvt_cache *cache, struct kvt_pool *pool);
/* Its requests have completed. Not locked. Nothing for a pool in host memory. */
void kvt_lane_pool_free(struct kvt_pool *pool);

/* A READY block of a GPU pool. Locked. */
void kvt_lane_push(struct kvt_cache *cache, struct kvt_block *block, int kind);
/* Whether the pool's device is lost: requests on it end with KVT_E_DEVICE. Any thread. */
bool kvt_lane_offline(const struct kvt_pool *pool);

/* Whether loads into the pool take what is on disk from there, past DRAM. Locked. */
bool kvt_lane_direct(const struct kvt_pool *pool);
/* A block that was coded, or will not be: the device memory that it was read into is free. Nothing
 * for others. Locked. */
void kvt_lane_let_go(struct kvt_cache *cache, struct kvt_block *block);

/* Before a request is submitted: its blocks wait for an engine's stream or event (enum
 * kvt_wait_for). Any thread, not locked. 0; KVT_E_DEVICE. */
int kvt_lane_wait_for(struct kvt_req *req, int wait, void *handle);

/* The arena is about to go (nothing is in flight), or another one has come. Not locked. */
void kvt_lanes_arena(struct kvt_cache *cache, bool there);

/* Join the threads, unpin the arena, close the devices. Not locked; nothing is in flight. */
void kvt_lanes_close(struct kvt_cache *cache);

#endif
