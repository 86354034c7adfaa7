/* How the level maps of a group are chosen from its first blocks (choice.c), and remembered in a
 * record for the next life (choice_memo.c).
 * Threads: any, without the cache's lock; a group's choice has a lock of its own.
 */
#ifndef KVT_CLIENT_CHOICE_H
#define KVT_CLIENT_CHOICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct kvt_block;
struct kvt_cache;
struct kvt_ns;
struct kvt_req;

#define KVT_CHOICES_MAX 4u /* of a group; each may take new map ids, of which there are few */

/* How the maps of a group are chosen (choice.c). */
struct kvt_choice {
    pthread_mutex_t lock; /* everything below that is not atomic or constant */
    _Atomic int judging;  /* relaxed: looked at again under the lock */
    bool watched;         /* constant: there is something to choose */
    uint8_t level;        /* that most heads are stored at, so far */
    uint8_t *bounds;      /* packed: heads that are above it, excluded layers included */
    uint8_t *fits;        /* packed: what the blocks judged so far need */
    uint32_t judged, choices;
    uint32_t coded, failed; /* since the last look */
    bool news;              /* chosen, and not remembered yet */
};

/* choice.c. A namespace's group; takes the bounds over, also when it fails (no memory). */
bool kvt_choice_init(struct kvt_ns *ns, uint32_t index, uint8_t *bounds);
void kvt_choice_free(struct kvt_ns *ns, uint32_t index);

struct kvt_chosen { /* what came of looking at a block */
    bool judged;
    uint8_t level;  /* of most heads, when it rose; else 0 */
    uint32_t heads; /* raised alone */
};
/* Look at a block that is about to be coded, while maps are being chosen. No lock held. */
void kvt_choice_judge(const struct kvt_req *req, const struct kvt_block *block,
                      struct kvt_chosen *out);
/* A block was coded at a guarded level, or failed its map. */
void kvt_choice_watch(const struct kvt_req *req, bool failed);
/* What was chosen in an earlier life is in force. */
void kvt_choice_adopt(struct kvt_ns *ns, uint32_t index, uint8_t level, uint8_t choices,
                      const uint8_t *bounds);
/* Whether there is something to remember; then read takes it. No lock held. */
bool kvt_choice_news(struct kvt_ns *ns, uint32_t index);
void kvt_choice_read(struct kvt_ns *ns, uint32_t index, uint8_t *level, uint8_t *choices,
                     uint8_t *bounds);

/* choice_memo.c. No lock held in any of them. */
/* Find what was chosen before, when the namespace has just been opened. Blocks. */
void kvt_choice_recall(struct kvt_ns *ns);
/* Store what is new; wait: until it is stored. */
void kvt_choice_save(struct kvt_ns *ns, bool wait);
void kvt_choices_save(struct kvt_cache *cache); /* of every namespace; waits */
void kvt_choice_forget(struct kvt_ns *ns);      /* with the rest of a purged namespace */
/* Before the namespace is taken out of the cache; free: its memory, in the end. */
void kvt_choice_memo_close(struct kvt_ns *ns);
void kvt_choice_memo_free(struct kvt_ns *ns);

#endif
