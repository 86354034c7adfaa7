/* The checker of a concurrent history: which bytes may a load of a key return?
 *
 * Every store of a block writes bytes of its own, which begin with a version: key, thread, number
 * of the store. A load may return a version only if that very store was begun for that key, did
 * not end by a status that says its bytes were not taken, and was not purged: no purge of the key
 * that began after the store had ended may have returned before the load began.
 * (A miss is always right; the order of versions is not looked at.)
 *
 * Threads: any; a thread number is used by one thread at a time. Memory: fixed, by HISTORY_RING
 * remembered stores a thread: of an older one only a later bound of its end is known, which makes
 * the checker milder, never wrong.
 */
#ifndef KVT_TESTS_HISTORY_H
#define KVT_TESTS_HISTORY_H

#include <stdbool.h>
#include <stdint.h>

enum { HISTORY_THREADS = 16, HISTORY_KEYS = 1024, HISTORY_RING = 1 << 15 };

enum history_verdict {
    HISTORY_FINE = 0,
    HISTORY_OTHER_KEY,   /* a version of another key, or of no key at all */
    HISTORY_NEVER_BEGUN, /* a store that has not begun */
    HISTORY_NOT_TAKEN,   /* of a store that was told that its bytes were not taken */
    HISTORY_PURGED       /* purged before the load began */
};

struct history;
struct history *history_new(void); /* NULL: no memory */
void history_free(struct history *history);

/* A store of `key` by `thread` begins. Returns its version, which its bytes must begin with. */
uint64_t history_store_begin(struct history *history, uint32_t thread, uint32_t key);
/* It has ended. taken: its bytes may be found from now on (also where that is not known). */
void history_store_end(struct history *history, uint64_t version, bool taken);

/* A purge of a key, begun before the call and ended after it. */
uint64_t history_purge_begin(struct history *history);
void history_purge_end(struct history *history, uint32_t key, uint64_t begun);

/* Before a load of a key begins: what must not come back from it. */
uint64_t history_load_begin(struct history *history, uint32_t key);
/* What it returned. */
enum history_verdict history_load_check(struct history *history, uint32_t key, uint64_t begun,
                                        uint64_t version);
const char *history_verdict_name(enum history_verdict verdict);

#endif
