/* USAGE: how many blocks and bytes each namespace and rank holds, in DRAM and on disk. Counted when
 * somebody asks, a bounded part of the index per message, so that nobody waits for it.
 * Threads: the store's owner. Allocates nothing.
 */
#include <string.h>

#include "base/checked.h"
#include "store/store_impl.h"

#define ROWS_MAX                                                           \
    ((uint32_t)((KVT_MSG_BYTES_MAX - sizeof(struct kvt_msg_usage_reply)) / \
                sizeof(struct kvt_usage_row)))
#define CELLS 2048u /* of the table that finds a row: a power of two, several times ROWS_MAX */

struct rows {
    struct kvt_usage_row *row;
    uint32_t count;
    uint16_t cells[CELLS]; /* row + 1 */
    uint32_t names[CELLS]; /* namespace << 8 | rank */
};

/* The row of a namespace and rank; NULL: no room for another one. */
static struct kvt_usage_row *row_of(const struct kvt_store *store, struct rows *rows, uint32_t ns,
                                    uint8_t rank)
{
    uint32_t name = ns << 8 | rank, cell = (name * 2654435761u >> 21) % CELLS;
    const struct kvt_namespace *space = kvt_namespace_at(&store->spaces, ns);
    struct kvt_usage_row *row;

    for (; rows->cells[cell]; cell = (cell + 1) % CELLS)
        if (rows->names[cell] == name)
            return &rows->row[rows->cells[cell] - 1];
    if (rows->count == ROWS_MAX)
        return NULL;
    row = &rows->row[rows->count++];
    rows->cells[cell] = (uint16_t)rows->count;
    rows->names[cell] = name;
    memset(row, 0, sizeof(*row));
    memcpy(row->ns, space->id, sizeof(row->ns));
    memcpy(row->label, space->label, sizeof(row->label));
    row->group = space->group;
    row->block_tokens = space->block_tokens;
    row->rank = rank;
    return row;
}

void kvt_handle_usage(struct kvt_store *store, uint32_t client, const struct kvt_msg *msg)
{
    const struct kvt_msg_usage *request = (const struct kvt_msg_usage *)msg;
    struct kvt_msg_usage_reply *reply =
        (struct kvt_msg_usage_reply *)kvt_reply_begin(store, msg, sizeof(*reply));
    struct rows rows = {.row = reply->rows};
    uint32_t at = request->from, end;

    end = (uint32_t)KVT_MIN((uint64_t)at + KVT_STORE_SCAN_ENTRIES, (uint64_t)store->index.touched);
    for (; at < end; at++) {
        const struct kvt_index_entry *e = kvt_index_at(&store->index, at);
        struct kvt_usage_row *row;
        uint64_t bytes;

        if (!e->used || !kvt_index_present(e))
            continue;
        row = row_of(store, &rows, e->ns, store->index.ranks[at]);
        if (!row)
            break;
        bytes = kvt_entry_bytes(store, at);
        row->dram_blocks += e->slot != KVT_INDEX_NONE;
        row->dram_bytes += e->slot != KVT_INDEX_NONE ? bytes : 0;
        row->disk_blocks += e->on_disk;
        row->disk_bytes += e->on_disk ? bytes : 0;
    }
    reply->next = at < store->index.touched ? at : 0;
    reply->msg.count = rows.count;
    reply->msg.bytes += rows.count * (uint32_t)sizeof(reply->rows[0]);
    kvt_reply_send(store, client, &reply->msg);
}
