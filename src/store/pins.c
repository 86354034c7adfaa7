/* Pairs (entry, client) in an open-addressing table: linear probing, backward shift on removal, so
 * that there are no tombstones. See pins.h.
 */
#include "store/pins.h"

#include <errno.h>
#include <stdlib.h>

#define MASK (KVT_PINS_CELLS - 1)

static uint32_t home_of(uint32_t entry)
{
    return (uint32_t)((entry * UINT64_C(0x9e3779b97f4a7c15)) >> 40) & MASK;
}

int kvt_pins_init(struct kvt_pins *pins)
{
    pins->used = 0;
    pins->cells = calloc(KVT_PINS_CELLS, sizeof(*pins->cells)); /* touched as it is used */
    return pins->cells ? 0 : -ENOMEM;
}

void kvt_pins_destroy(struct kvt_pins *pins)
{
    free(pins->cells);
    pins->cells = NULL;
}

/* The cell of a pair, or the empty one where it would go; any client: client 0 with any = true. */
static uint32_t find(const struct kvt_pins *pins, uint32_t entry, uint32_t client, bool any)
{
    uint32_t at = home_of(entry);

    while (pins->cells[at].entry &&
           !(pins->cells[at].entry == entry + 1 && (any || pins->cells[at].client == client)))
        at = (at + 1) & MASK;
    return at;
}

/* Empty a cell; what lies behind it in the run moves up. */
static void empty(struct kvt_pins *pins, uint32_t at)
{
    uint32_t next = at;

    pins->used--;
    for (;;) {
        uint32_t home;

        next = (next + 1) & MASK;
        if (!pins->cells[next].entry)
            break;
        home = home_of(pins->cells[next].entry - 1);
        /* It may move up unless its home lies behind the hole. */
        if (((next - home) & MASK) < ((next - at) & MASK))
            continue;
        pins->cells[at] = pins->cells[next];
        at = next;
    }
    pins->cells[at] = (struct kvt_pins_cell){0};
}

bool kvt_pins_add(struct kvt_pins *pins, uint32_t entry, uint32_t client)
{
    uint32_t at = find(pins, entry, client, false);

    if (pins->cells[at].entry)
        return true;
    if (pins->used == KVT_PINS_MAX)
        return false;
    pins->cells[at] = (struct kvt_pins_cell){entry + 1, client};
    pins->used++;
    return true;
}

bool kvt_pins_remove(struct kvt_pins *pins, uint32_t entry, uint32_t client)
{
    uint32_t at = find(pins, entry, client, false);

    if (!pins->cells[at].entry)
        return false;
    empty(pins, at);
    return true;
}

bool kvt_pins_any(const struct kvt_pins *pins, uint32_t entry)
{
    return pins->cells[find(pins, entry, 0, true)].entry != 0;
}

void kvt_pins_drop(struct kvt_pins *pins, uint32_t entry)
{
    uint32_t at;

    while (pins->used && pins->cells[at = find(pins, entry, 0, true)].entry)
        empty(pins, at);
}

bool kvt_pins_pop(struct kvt_pins *pins, uint32_t client, uint32_t *cursor, uint32_t *entry)
{
    if (!pins->used)
        return false;
    for (; *cursor < KVT_PINS_CELLS; ++*cursor) {
        const struct kvt_pins_cell *cell = &pins->cells[*cursor];

        if (!cell->entry || cell->client != client)
            continue;
        *entry = cell->entry - 1;
        empty(pins, *cursor); /* what moved up here is looked at next */
        return true;
    }
    return false;
}
