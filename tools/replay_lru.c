/* Least recently used, by a list threaded through arrays: see replay_lru.h. A block's place in the
 * arrays is its rank among the trace's different blocks. Threads: one.
 */
#include "replay_lru.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "cli.h"

#define NOBODY UINT32_MAX

struct lru {
    uint32_t *newer, *older; /* of each block; NOBODY at the ends */
    uint8_t *held;
    uint32_t newest, oldest;
    uint64_t count, room;
};

static int lru_init(struct lru *lru, uint64_t blocks, uint64_t room)
{
    *lru = (struct lru){.newest = NOBODY, .oldest = NOBODY, .room = room};
    lru->newer = calloc(blocks + 1, sizeof(*lru->newer));
    lru->older = calloc(blocks + 1, sizeof(*lru->older));
    lru->held = calloc(blocks + 1, 1);
    return lru->newer && lru->older && lru->held ? 0 : -1;
}

static void lru_free(struct lru *lru)
{
    free(lru->newer);
    free(lru->older);
    free(lru->held);
}

static void take_out(struct lru *lru, uint32_t block)
{
    uint32_t newer = lru->newer[block], older = lru->older[block];

    if (newer == NOBODY)
        lru->newest = older;
    else
        lru->older[newer] = older;
    if (older == NOBODY)
        lru->oldest = newer;
    else
        lru->newer[older] = newer;
    lru->held[block] = 0;
    lru->count--;
}

/* The block is the newest now, held or not before. */
static void use(struct lru *lru, uint32_t block)
{
    if (lru->room == 0)
        return;
    if (lru->held[block])
        take_out(lru, block);
    else if (lru->count == lru->room)
        take_out(lru, lru->oldest);
    lru->newer[block] = NOBODY;
    lru->older[block] = lru->newest;
    if (lru->newest == NOBODY)
        lru->oldest = block;
    else
        lru->newer[lru->newest] = block;
    lru->newest = block;
    lru->held[block] = 1;
    lru->count++;
}

int64_t replay_lru(const struct replay_trace *trace, uint64_t dram_blocks, uint64_t disk_blocks,
                   struct replay_hits *hits)
{
    struct lru dram, disk;
    int64_t total = 0;
    int rc = lru_init(&dram, trace->distinct, dram_blocks);

    if (lru_init(&disk, trace->distinct, disk_blocks))
        rc = -1;
    for (size_t i = 0; i < trace->count && !rc; i++) {
        const struct replay_request *request = &trace->requests[i];
        struct replay_hits run = {0, 0, 0};
        uint32_t n = 0;

        if (kvt_cli_interrupted())
            rc = -1;
        for (; n < request->count; n++) {
            uint32_t block = request->ranks[n];
            if (dram.held[block]) {
                run.dram++;
                run.front += run.disk == 0;
            } else if (disk.held[block]) {
                run.disk++;
            } else {
                break;
            }
        }
        total += n;
        for (uint32_t j = request->count; j-- > 0;) {
            use(&dram, request->ranks[j]);
            use(&disk, request->ranks[j]);
        }
        if (hits)
            hits[i] = run;
    }
    lru_free(&dram);
    lru_free(&disk);
    return rc ? -1 : total;
}
