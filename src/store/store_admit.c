/* Admission, coupled to the store: what a block is, what was written, and what becomes of a block
 * that is not taken. The decision itself is admission.c's.
 *
 * A block that is not taken is FILTERED: it stays in DRAM as long as others are not wanted more,
 * may leave without having been written, and is asked about again when it is used. Nor are blocks
 * taken behind one that was not: no lookup would reach them on disk. Threads: the store's owner.
 * Allocates at open.
 */
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/store_impl.h"

#define TOKEN_S 1e-4          /* plan_prefill's default: 10,000 tokens a second */
#define BYTE_S (0.5 / 0x1p30) /* plan_disk's: 2 GiB a second */

int kvt_admit_init(struct kvt_store *store)
{
    const struct kvt_store_params *from = &store->params;
    const struct kvt_admission_chances *chances = from->chances;
    struct kvt_admission_params params = {.admit = from->admit,
                                          .permille = from->admit_permille,
                                          .seed = from->seed,
                                          .token_s = from->token_s > 0 ? from->token_s : TOKEN_S,
                                          .byte_s = from->token_s > 0 ? from->byte_s : BYTE_S,
                                          .remember = from->arena_bytes / KVT_PAGE_BYTES,
                                          .root_count = from->root_count};
    int rc;

    store->params.chances = NULL; /* borrowed by open only */
    for (uint32_t root = 0; root < from->root_count; root++) {
        params.bytes_a_day[root] = from->roots[root].write_bytes_day;
        params.remember += from->roots[root].cap_bytes / KVT_PAGE_BYTES;
    }
    rc = kvt_admission_init(&store->admission, &params, kvt_store_now(store));
    if (rc)
        return rc;
    for (uint32_t root = 0; root < from->root_count; root++)
        kvt_admit_root_left(store, root, &from->roots[root]);
    if (chances && !kvt_admission_chances_set(&store->admission, chances))
        kvt_log(&from->log, KVT_LOG_WARN, "what admission had learnt makes no sense: forgotten");
    return 0;
}

void kvt_admit_root_left(struct kvt_store *store, uint32_t number,
                         const struct kvt_store_root *root)
{
    if (root->write_left_known)
        kvt_admission_left_set(&store->admission, number, root->write_left);
}

void kvt_admit_keep(struct kvt_store *store)
{
    kvt_admit_run(store);
    if (store->params.admission_kept)
        store->params.admission_kept(store->params.admission_ctx, &store->admission);
}

/* first_pos: what the client wrote; it orders blocks and no more. */
static struct kvt_admission_block block_of(const struct kvt_store *store, uint32_t entry,
                                           uint32_t slot)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);
    struct kvt_record_header header;

    memset(&header, 0, sizeof(header));
    if (slot != KVT_SLOT_NONE && kvt_slot_at(&store->slots, slot)->state == KVT_SLOT_VALID)
        memcpy(&header, kvt_slot_bytes(store, slot), sizeof(header));
    return (struct kvt_admission_block){
        .tag = e->fp.word[1],
        .first_pos = header.first_pos,
        .tokens = kvt_namespace_at(&store->spaces, e->ns)->block_tokens,
        .bytes = KVT_MAX(kvt_entry_bytes(store, entry), KVT_PAGE_BYTES)};
}

static void used(struct kvt_store *store, uint32_t entry, uint32_t slot, bool at_hand)
{
    struct kvt_admission_block block;

    if (!store->admission.seen) /* nobody wants to know */
        return;
    block = block_of(store, entry, slot);
    (void)kvt_admission_use(&store->admission, &block, at_hand, kvt_store_now(store));
}

void kvt_admit_first(struct kvt_store *store, uint32_t slot)
{
    used(store, kvt_slot_at(&store->slots, slot)->entry, slot, false);
    kvt_ttl_touch(store, kvt_slot_at(&store->slots, slot)->entry);
}

/* It was not taken; now it may be. */
static void again(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);

    if (s->state != KVT_SLOT_VALID || s->write != KVT_SLOT_WRITE_FILTERED)
        return;
    kvt_write_move(store, slot, KVT_SLOT_WRITE_LATER);
    if ((s->policy == KVT_WRITE_THROUGH || s->policy == KVT_WRITE_AUTO) &&
        kvt_admit_ask(store, slot))
        (void)kvt_writes_queue(store, slot, false);
}

void kvt_admit_use(struct kvt_store *store, uint32_t entry)
{
    uint32_t slot = kvt_index_at(&store->index, entry)->slot;

    used(store, entry, slot,
         slot != KVT_INDEX_NONE && kvt_slot_at(&store->slots, slot)->state == KVT_SLOT_VALID);
    kvt_ttl_touch(store, entry);
    if (slot == KVT_INDEX_NONE)
        return;
    kvt_l3_offer(store, slot, false);
    again(store, slot);
}

void kvt_admit_continued(struct kvt_store *store, uint32_t entry)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, entry);

    if (store->params.admit == KVT_ADMIT_CONTINUED && e->slot != KVT_INDEX_NONE)
        again(store, e->slot);
}

/* The block before it is in DRAM only, and was not taken. */
static bool cut_off(const struct kvt_store *store, uint32_t entry)
{
    uint32_t parent = kvt_index_at(&store->index, entry)->parent;
    const struct kvt_index_entry *e;

    if (parent == KVT_INDEX_NONE)
        return false;
    e = kvt_index_at(&store->index, parent);
    return !e->on_disk && e->slot != KVT_INDEX_NONE &&
           kvt_slot_at(&store->slots, e->slot)->write == KVT_SLOT_WRITE_FILTERED;
}

/* The last block of a prompt, as far as is known: nothing has continued it and nobody has asked for
 * it. It is where the next prompt of a conversation differs most often. */
static bool is_last(const struct kvt_store *store, const struct kvt_slot *s)
{
    const struct kvt_index_entry *e = kvt_index_at(&store->index, s->entry);

    return !s->had_child && !e->children && !e->freq && e->parent != KVT_INDEX_NONE;
}

bool kvt_admit_ask(struct kvt_store *store, uint32_t slot)
{
    struct kvt_slot *s = kvt_slot_at(&store->slots, slot);
    struct kvt_store_stats *counts = &store->counts;
    uint64_t *const by_verdict[] = {[KVT_VERDICT_YES] = &counts->admit_yes,
                                    [KVT_VERDICT_FIRST_USE] = &counts->admit_first,
                                    [KVT_VERDICT_VALUE] = &counts->admit_value,
                                    [KVT_VERDICT_BUDGET] = &counts->admit_budget,
                                    [KVT_VERDICT_RANDOM] = &counts->admit_random};
    struct kvt_admission_block block;
    enum kvt_verdict verdict;

    /* These were taken before: the queue was full, or the drive failed. */
    if (s->write == KVT_SLOT_WRITE_DROPPED || s->write == KVT_SLOT_WRITE_FAILED)
        return true;
    if (store->disk_count && !kvt_roots_hold(store, s->record_bytes)) {
        counts->admit_long++;
        kvt_write_move(store, slot, KVT_SLOT_WRITE_FILTERED);
        return false;
    }
    if (cut_off(store, s->entry)) {
        counts->admit_chain++;
        kvt_write_move(store, slot, KVT_SLOT_WRITE_FILTERED);
        return false;
    }
    /* until something on disk has had to go, a write takes nothing's place */
    if (store->params.admit == KVT_ADMIT_CONTINUED && store->counts.evict_disk_segments > 0 &&
        is_last(store, s)) {
        counts->admit_last++;
        kvt_write_move(store, slot, KVT_SLOT_WRITE_FILTERED);
        return false;
    }
    block = block_of(store, s->entry, slot);
    verdict =
        kvt_admission_ask(&store->admission, &block, store->write_queue.bytes + store->going_bytes,
                          kvt_store_now(store));
    ++*by_verdict[verdict];
    if (verdict == KVT_VERDICT_YES)
        return true;
    kvt_write_move(store, slot, KVT_SLOT_WRITE_FILTERED);
    return false;
}

void kvt_admit_run(struct kvt_store *store)
{
    for (uint32_t root = 0; root < store->disk_count; root++) {
        struct kvt_l2_stats l2;

        if (!store->admission.params.bytes_a_day[root])
            continue;
        kvt_l2_stats(store->disks[root].l2, &l2);
        kvt_admission_written(&store->admission, root, l2.bytes_written, kvt_store_now(store));
    }
}
