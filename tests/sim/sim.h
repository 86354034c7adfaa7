/* The simulator: the production store half under a simulated clock, scheduler, drives and clients.
 *
 * One seed decides everything: the shape (memory, drives, caps, record sizes, latencies, policies),
 * what the clients do and which of them die, what goes wrong and when, what a power loss leaves. So
 * a seed that finds something finds it again; the hash over the log of events says whether two runs
 * were the same.
 *
 *   test_sim.c, test_power_loss.c  what a seed does
 *   sim_seeds.c    seeds, repetition, the sum
 *   sim_world.c    drives, store, time; lives and how they end
 *   sim_client.c   what clients send, what comes back
 *   sim_fault.c    what goes wrong with drives
 *   sim_oracle.c   what may and what must be seen
 *   sim_limits.c   quotas and times to live of namespaces
 *   sim_late.c     a root that somebody else holds when the store opens, and that comes later
 *   sim_check.c    invariants after every recovery
 *   sim_direct.c   a client that reads records where they lie on disk
 *   sim_rude.c     clients that break off in the middle of things
 *   sim_net.h      several machines over one shared tier
 *
 * A seed's further choices (machines, direct loads, rude clients) come from a second stream of
 * numbers, so that a seed that has none of them is what it was before they came.
 *
 * Drives: fault_io over power_io over memory, so that completions come late and in any order, fail
 * or lie, and a loss of power leaves any part of what was not synced.
 * Threads: one. Seeds run in a process of their own, some in each; a check that fails ends it. */
#ifndef KVT_TESTS_SIM_H
#define KVT_TESTS_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/rng.h"
#include "format/message.h"
#include "store/store.h"
#include "support/place.h"
#include "support/power_io.h"

enum {
    SIM_NS = 2,
    SIM_CHAINS = 6,
    SIM_DEPTH = 12,
    SIM_BLOCKS = SIM_CHAINS * SIM_DEPTH,
    SIM_CLIENTS = 4,
    SIM_DISKS = 2,
    SIM_PIECE = 8, /* keys of one request at most */
    SIM_FILLS = 48,
    SIM_HELD = 512,
    SIM_LOADS = 24,
    SIM_WAITS = 32,
    SIM_KINDS = 19,     /* of faults */
    SIM_NET_KINDS = 23, /* of the shared tier's */
    SIM_ASKED = 17,     /* look-ups that wait for the shared tier, and one that is sent */
    SIM_DIRECTS = 256,
};
#define SIM_ARENA_MAX (2u << 20)
#define SIM_RECORD_PAGES_MAX 48u
#define SIM_MEDIUM_LARGE (64u << 20) /* never full */

enum sim_faults { SIM_SOUND, SIM_HONEST, SIM_LYING };

struct sim_shape {
    uint64_t cache_bytes, staging_bytes, cap_bytes, medium_bytes, queue_bytes, pin_bytes;
    uint64_t scrub_bytes;
    int64_t latency_min, latency_max;
    uint64_t quota_bytes[SIM_NS], store_quota_bytes; /* 0: any */
    int64_t ttl_ns[SIM_NS], store_ttl_ns;            /* 0: for ever */
    bool late;                                       /* the last root comes later */
    uint32_t disks;
    int write;
    enum sim_faults faults;
    uint8_t pages[SIM_NS][3]; /* of a record, by map */
};

/* What is known of one block. */
struct sim_block {
    uint8_t may;           /* bit i: the record under sim_maps[i] may be seen */
    uint8_t ever;          /* the same, purges not counted: what a drive that lied may bring back */
    uint64_t committed[3]; /* when it last was, by map; an operation's number */
    uint64_t arrived[3];   /* the same; but when it was asked for, where it is another machine's */
    uint64_t last_commit;
    uint64_t durable;  /* when the flush was sent that acknowledged it; 0: none holds */
    int64_t used_ns;   /* when anybody last named it; in a new life, when it was last stored */
    int64_t stored_ns; /* when it last was */
    int64_t age_ns;   /* what it was found with counts from then at the earliest; 0: of this life */
    int64_t first_ns; /* when it was first allocated since it was last purged; 0: never */
    bool kept;        /* may be used by the store itself in this life */
    bool gone;        /* expired for good: no later life may have it */
    uint8_t absent;   /* purged while the late root was not there: as `may`, for the next life */
    struct place place;
    uint32_t purges;
    uint32_t purging; /* of them, those of this life that have not been answered */
    uint64_t purged;  /* when the last of them was: its walk may have taken what came before */
};

struct sim_fill {
    uint32_t client, ns, index, map, purges;
    int64_t since_ns;
    uint64_t checksum;
    struct kvt_alloc_entry entry;
};

struct sim_load {
    uint64_t cookie;
    uint32_t client, ns, n, have;
    uint8_t min;
    bool ended, direct;
    uint32_t index[SIM_PIECE];
    uint32_t dead; /* bit i: had expired when it was asked for */
    uint64_t op;
    int64_t end_ns; /* its deadline */
};

struct sim_asked { /* a LOOKUP that is answered later; cookie 0: free */
    uint64_t cookie, op;
    uint32_t ns, first, n, dead;
    int64_t since_ns, end_ns;
};

struct sim_direct { /* a record that its client reads on disk */
    uint32_t client, ns, index, map, slot, generation;
    uint32_t root, segment, bytes, purges;
    uint64_t offset;
    bool orphan; /* the store that granted it is gone */
    int status;  /* of the last read */
};

struct sim_held {
    uint32_t client, ns, index, map, slot, generation;
    uint64_t offset;
    uint32_t bytes;
};

struct sim_wait { /* for the answer to a FLUSH or PURGE; op 0: free */
    uint64_t cookie, sent;
    uint16_t op;
    uint32_t client, ns, n;
    uint32_t index[SIM_PIECE]; /* n == 0: the namespace */
};

struct sim_fault { /* on a drive */
    bool on, pictured;
    uint32_t kind;
    uint64_t stale_before;
};

struct sim_counts {
    uint64_t commits, good, missed, damaged, flushes, purges, lives, losses, durable, evicted;
    uint64_t unsynced, refused, deaths, faults, sticky;
    uint64_t quotas, given_up, expired, joined, unread;
    uint64_t struck[SIM_KINDS]; /* operations that went wrong, by kind of fault */
    uint64_t shared, put, fetched, reached, direct, rude;
    uint64_t net[SIM_NET_KINDS];
};

struct sim_net;

struct sim {
    uint64_t seed;
    struct kvt_rng rng;
    uint64_t hash, events;
    uint64_t op;      /* number of the operation that runs, from 1 */
    uint64_t life_op; /* when this life began */
    int64_t now_ns;
    bool hurry; /* the clock moves by itself: the store waits for its drives */
    struct sim_shape shape;
    struct kvt_store *store;
    uint8_t *arena;
    struct kvt_io *disks[SIM_DISKS]; /* fault_io */
    struct sim_fault faults[SIM_DISKS];
    const char *program; /* that repeats a seed */
    bool lied;           /* a drive has told a lie: only exact or miss is promised */
    bool closing, verbose;
    bool out;        /* the late root has not come yet */
    int64_t anew_ns; /* when it was last being taken in */
    int64_t life_ns; /* when this life began */
    bool thinned;    /* marks of ages have been left out */
    bool garbled;
    uint64_t cookie;
    uint32_t clients[SIM_CLIENTS]; /* ids; a new one after each death */
    uint32_t next_client;
    struct sim_block blocks[SIM_NS][SIM_BLOCKS];
    uint32_t ns[SIM_NS]; /* handles */
    struct sim_fill fills[SIM_FILLS];
    struct sim_held held[SIM_HELD];
    struct sim_load loads[SIM_LOADS];
    struct sim_wait waits[SIM_WAITS];
    uint32_t fill_count, held_count, load_count;
    /* of an ALLOC or LOOKUP that is being handled */
    const struct kvt_msg_alloc *allocating;
    uint32_t alloc_ns, alloc_map, alloc_first, answers;
    struct kvt_lookup_entry looked[SIM_PIECE];
    uint32_t looked_count;
    int32_t status; /* of the last direct answer */
    /* what a seed has besides: sim_net.h, sim_direct.c, sim_rude.c */
    struct kvt_rng more;
    struct sim_net *net; /* NULL: one machine, and no shared tier */
    uint32_t number;     /* of this machine */
    uint32_t left;       /* operations of this life */
    int64_t jumped_ns;   /* that the store did not run: the machine was slow, not the tier */
    struct sim_asked asked[SIM_ASKED];
    struct sim_asked wanted; /* has been looked up, is to be loaded */
    uint64_t grants;         /* of this life */
    bool reads, rude, cut;   /* cut: a message that is not whole is being handled */
    struct sim_direct directs[SIM_DIRECTS];
    uint32_t direct_count;
    struct sim_fill parted[SIM_FILLS]; /* of clients that have broken off */
    uint32_t parted_count, gone_count;
    uint32_t gone[SIM_FILLS]; /* clients that have, and live */
    struct sim_counts counts;
    char why[512]; /* fsck's first problem */
};

extern const uint8_t sim_maps[3];
uint32_t sim_map_index(uint8_t map); /* in sim_maps; 3: it is not there */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SIM_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SIM_SANITIZED 1
#endif
#endif
#ifndef SIM_SANITIZED
#define SIM_SANITIZED 0
#endif

/* sim_seeds.c */
struct sim_run {
    const char *practice; /* of support/practice.h */
    const char *program;
    bool all_faults;   /* a run of many seeds must have met every kind of fault */
    bool more;         /* some seeds have several machines, or clients that read drives */
    uint64_t seeds;    /* KVT_SIM_SEEDS says otherwise */
    uint64_t repeated; /* of them run twice */
    void (*one)(struct sim *sim);
};
/* All seeds; what main() returns. */
int sim_run(const struct sim_run *run);
uint64_t sim_number(const char *name, uint64_t otherwise); /* of the environment */

/* sim_world.c */
/* Say what is wrong, with the seed, and end the process. */
__attribute__((format(printf, 2, 3), noreturn)) void sim_fail(struct sim *sim, const char *format,
                                                              ...);
#define SIM_CHECK(sim, good)                                                 \
    do {                                                                     \
        if (!(good))                                                         \
            sim_fail(sim, "%s:%d: not true: %s", __FILE__, __LINE__, #good); \
    } while (0)
void sim_log(struct sim *sim, uint64_t what, uint64_t value);
/* With KVT_SIM_LOG only; not in the hash. */
__attribute__((format(printf, 2, 3))) void sim_tell(struct sim *sim, const char *format, ...);
uint32_t sim_roll(struct sim *sim, uint32_t bound);
/* like: a machine that has the same namespaces; NULL: none. */
void sim_start(struct sim *sim, uint64_t seed, uint8_t *arena, const struct sim *like);
uint32_t sim_more(struct sim *sim, uint32_t bound); /* of the second stream */
void sim_stop(struct sim *sim);
/* Let the store and its drives work for that long. */
void sim_advance(struct sim *sim, int64_t ns);
/* Until nothing is in flight: all answers have come. */
void sim_settle(struct sim *sim);
/* One life: open the store over the drives as they are. 0, or the store's error. */
int sim_open(struct sim *sim);
void sim_close(struct sim *sim);   /* orderly */
void sim_settled(struct sim *sim); /* everybody leaves, all is answered, nothing is held */
void sim_die(struct sim *sim, enum power_loss loss);    /* the store is gone, the power may be */
struct kvt_io *sim_medium(struct sim *sim, uint32_t i); /* below the faults */
void sim_new_disk(struct sim *sim, uint32_t i);
void sim_check_store(struct sim *sim);
void sim_set_latency(struct sim *sim, bool on); /* of all drives */

/* sim_fault.c */
void sim_fault(struct sim *sim);
void sim_faults_end(struct sim *sim); /* on all drives; what was late or never came, comes */
const char *sim_kind_name(uint32_t kind);

/* sim_client.c */
void sim_operation(struct sim *sim);
void sim_reply(void *ctx, uint32_t client, const struct kvt_msg *msg);
void sim_clients_start(struct sim *sim); /* of a new life: namespaces are opened */
void sim_clients_die(struct sim *sim);   /* all of them, and nobody notices */
void sim_everybody_leaves(struct sim *sim);
void sim_forget_client(struct sim *sim, uint32_t client); /* what it holds and waits for */
int sim_send_cut(struct sim *sim); /* a message that is not whole; what the store makes of it */
void sim_give_back(struct sim *sim, uint32_t client, const struct kvt_slot_ref *ref);
/* Tier of a block; map: which one is seen. */
uint8_t sim_look(struct sim *sim, uint32_t ns, uint32_t index, uint8_t *map);
/* Load one block, now: 0 exact, or its status. */
int32_t sim_get(struct sim *sim, uint32_t ns, uint32_t index);

/* sim_oracle.c */
struct kvt_msg_key sim_key(uint32_t ns, uint32_t index);
uint32_t sim_parent(uint32_t index); /* UINT32_MAX: none */
void sim_fill_record(struct sim *sim, const struct sim_fill *fill, uint64_t *checksum);
/* A record was handed out: 0 exact; KVT_E_CORRUPT when it does not verify; fails the seed on
 * others. */
int sim_judge(struct sim *sim, uint32_t ns, uint32_t index, uint32_t map, const uint8_t *record,
              uint32_t bytes, uint64_t checksum);
void sim_seen(struct sim *sim, uint32_t ns, uint32_t index, uint32_t map, uint8_t min);
void sim_committed(struct sim *sim, const struct sim_fill *fill);
void sim_full_key(uint32_t ns, uint32_t index, struct kvt_full_key *full);
/* From the shared tier; origin: sim_net.h; asked: the operation that asked for it, and its time. */
void sim_fetched(struct sim *sim, uint32_t ns, uint32_t index, uint32_t map, uint64_t origin,
                 uint64_t asked, int64_t asked_ns);
void sim_purge_sent(struct sim *sim, const struct sim_wait *wait);
void sim_purge_refused(struct sim *sim, const struct sim_wait *wait);
void sim_purges_forgotten(struct sim *sim); /* a new life: none is under way */
void sim_purge_done(struct sim *sim, const struct sim_wait *wait, int32_t status);
void sim_flush_done(struct sim *sim, const struct sim_wait *wait, int32_t status);
void sim_note_places(struct sim *sim);  /* before a life ends: blocks may have been moved */
void sim_places_again(struct sim *sim); /* after a recovery */
void sim_forget_durable(struct sim *sim);
/* What must be there in the life that begins now: acknowledged by a flush, with all that come
 * before it, and in no segment that has been recycled since. */
void sim_expect(struct sim *sim, bool must[SIM_NS][SIM_BLOCKS]);

/* sim_limits.c */
void sim_limits_choose(struct sim *sim, uint32_t record_bytes);
void sim_limits_begin(struct sim *sim); /* of a life: what is found goes on with its age */
void sim_limits_end(struct sim *sim, bool orderly);
bool sim_has_ttl(const struct sim *sim); /* somebody has */
/* It, or one before it in its chain, may have expired since it was stored: it need not be there. */
bool sim_may_be_old(const struct sim *sim, uint32_t ns, uint32_t index);
void sim_used(struct sim *sim, uint32_t ns, uint32_t index);
void sim_kept(struct sim *sim, uint32_t ns, uint32_t index);
/* It has, for certain: nobody may get it. */
bool sim_expired(const struct sim *sim, uint32_t ns, uint32_t index);
/* After an ALLOC that was granted something; older_back: of the store's counters before it. */
void sim_check_quota(struct sim *sim, uint32_t ns, uint64_t older_back);

/* sim_late.c */
/* Whoever held the late root has died. 0, or why it does not come: once more, later. */
int sim_late_comes(struct sim *sim);
void sim_late_purged(struct sim *sim, struct sim_block *block, uint8_t before);
void sim_late_begin(struct sim *sim); /* of a life */
void sim_late_end(struct sim *sim);

/* sim_direct.c */
void sim_direct_granted(struct sim *sim, uint32_t client, const struct sim_load *load,
                        const struct kvt_msg_grant *grant, uint32_t map);
void sim_direct_step(struct sim *sim); /* some client reads, or is done */
void sim_direct_died(struct sim *sim, uint32_t client);
void sim_direct_life(struct sim *sim); /* the store is gone: who reads, reads on */

/* sim_rude.c */
void sim_rude_step(struct sim *sim);
void sim_rude_all(struct sim *sim); /* who has broken off is gone now */

/* sim_net.c: what does nothing where there is one machine */
void sim_net_start(struct sim *machines, uint32_t count, uint64_t seed, uint8_t *arenas[]);
void sim_net_stop(struct sim *sim);
void sim_net_live(struct sim *sim, uint64_t operations, void (*life_ends)(struct sim *sim));
/* One machine is about to open its store, has to be alone with it, or is about to end. */
struct kvt_store_params;
/* Mostly other machines compute that chain. */
bool sim_net_others(const struct sim *sim, uint32_t first);
void sim_net_params(struct sim *sim, struct kvt_store_params *params);
void sim_net_quiet(struct sim *sim, bool quiet);
void sim_net_cut(struct sim *sim);
bool sim_net_waits(const struct sim *sim); /* something is under way, or about to be */
void sim_net_heal(struct sim *sim);
int64_t sim_net_next(const struct sim *sim);      /* when its next answer comes */
int64_t sim_net_answer_by(const struct sim *sim); /* a LOOKUP of now has to be answered */
int64_t sim_net_run(struct sim *sim, int64_t (*run_due)(struct sim *sim));
void sim_net_now(struct sim *sim, int64_t now_ns);
void sim_net_settled(struct sim *sim); /* nothing is under way: nothing may be held */
void sim_net_check(struct sim *sim);
/* A purge of a machine that was sent in that operation has been answered with 0. */
void sim_tier_purged(struct sim *sim, uint64_t sent, uint32_t ns, uint32_t index);
bool sim_net_failed(const struct sim *sim, int32_t status); /* of a purge: the tier alone */

/* sim_check.c */
void sim_nothing_held(struct sim *sim);              /* no pins, no slots, when nobody is there */
void sim_check_medium(struct sim *sim, bool strict); /* fsck finds no damage */
void sim_check_recovery(struct sim *sim, enum power_loss loss);

#endif
