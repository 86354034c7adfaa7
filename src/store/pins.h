/* Who has pinned what: (entry, client) pairs of kvt_pin, so that a client that dies loses its own
 * pins, and a block that two have pinned stays until both have let go.
 *
 * An open-addressing table by entry; pairs of one entry lie in one probe run. A fixed number of
 * pairs: more are refused. Threads: the store's owner. Allocates at init only. Does not: know
 * blocks, count bytes (store_query.c does).
 */
#ifndef KVT_STORE_PINS_H
#define KVT_STORE_PINS_H

#include <stdbool.h>
#include <stdint.h>

#define KVT_PINS_CELLS (1u << 17)
#define KVT_PINS_MAX (KVT_PINS_CELLS / 4 * 3)

struct kvt_pins {
    struct kvt_pins_cell {
        uint32_t entry; /* + 1; 0: empty */
        uint32_t client;
    } * cells;
    uint32_t used;
};

/* 0, -ENOMEM. */
__attribute__((warn_unused_result)) int kvt_pins_init(struct kvt_pins *pins);
void kvt_pins_destroy(struct kvt_pins *pins);

/* true: the client has it pinned now, or had; false: the table is full. */
__attribute__((warn_unused_result)) bool kvt_pins_add(struct kvt_pins *pins, uint32_t entry,
                                                      uint32_t client);
/* false: the client had not pinned it. */
bool kvt_pins_remove(struct kvt_pins *pins, uint32_t entry, uint32_t client);
/* Whether anybody has it pinned. */
bool kvt_pins_any(const struct kvt_pins *pins, uint32_t entry);
/* The entry is gone, or may not stay pinned: forget all who pinned it. */
void kvt_pins_drop(struct kvt_pins *pins, uint32_t entry);
/* Take away one pin of the client and say which entry it was; false: it has none left. cursor: 0 at
 * the first call of a row. */
bool kvt_pins_pop(struct kvt_pins *pins, uint32_t client, uint32_t *cursor, uint32_t *entry);

#endif
