/* The set of purge items that may still matter: sorted by kind and key, one item a key, dropped as
 * soon as no record on disk can be older than its bound. Pure functions on the array. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "store/l2_internal.h"

/* PURGE_ALL first, then by namespace: its PURGE_NS before its PURGE_KEYs. */
static int rank(const struct kvt_journal_item *item)
{
    switch (item->kind) {
    case KVT_JOURNAL_PURGE_ALL:
        return 0;
    case KVT_JOURNAL_PURGE_NS:
        return 1;
    default:
        return 2;
    }
}

static int compare_keys(const struct kvt_journal_item *x, const struct kvt_journal_item *y)
{
    int rx = rank(x), ry = rank(y);

    if (rx != ry)
        return rx < ry ? -1 : 1;
    if (!rx)
        return 0;
    return rx == 1 ? memcmp(x->key.ns, y->key.ns, KVT_NS_BYTES)
                   : memcmp(&x->key, &y->key, sizeof x->key);
}

static int compare_items(const void *a, const void *b)
{
    const struct kvt_journal_item *x = a, *y = b;
    int c = compare_keys(x, y);

    return c ? c : (x->value < y->value) - (x->value > y->value); /* larger bound first */
}

/* Bound of the item with this kind and key among the sorted items; 0: none. */
static uint64_t bound_of(const struct kvt_l2_journal *journal, uint32_t kind,
                         const struct kvt_full_key *key)
{
    struct kvt_journal_item want = {.kind = kind, .key = *key};
    uint32_t low = 0, high = journal->count;

    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        int c = compare_keys(&journal->items[mid], &want);

        if (!c)
            return journal->items[mid].value;
        if (c < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return 0;
}

bool kvt_l2_journal_purged(const struct kvt_l2 *l2, const struct kvt_entry *entry)
{
    const struct kvt_l2_journal *journal = &l2->journal;

    if (journal->doubt)
        return true;
    if (!journal->count)
        return false;
    return entry->sequence < bound_of(journal, KVT_JOURNAL_PURGE_ALL, &entry->key) ||
           entry->sequence < bound_of(journal, KVT_JOURNAL_PURGE_NS, &entry->key) ||
           entry->sequence < bound_of(journal, KVT_JOURNAL_PURGE_KEY, &entry->key);
}

void kvt_l2_purge_merge(struct kvt_l2_journal *journal, uint64_t min_live)
{
    struct kvt_journal_item *items = journal->items;
    uint64_t all = 0;
    uint32_t kept = 0;

    if (journal->count > 1)
        qsort(items, journal->count, sizeof *items, compare_items);
    for (uint32_t i = 0; i < journal->count; i++) { /* the first of equals has the largest bound */
        if (kept && !compare_keys(&items[kept - 1], &items[i]))
            continue;
        items[kept++] = items[i];
    }
    journal->count = kept;
    if (kept && items[0].kind == KVT_JOURNAL_PURGE_ALL)
        all = items[0].value;
    kept = 0;
    for (uint32_t i = 0; i < journal->count; i++) {
        struct kvt_journal_item item = items[i];

        if (item.value <= min_live || (item.kind != KVT_JOURNAL_PURGE_ALL && item.value <= all))
            continue;
        if (item.kind == KVT_JOURNAL_PURGE_KEY) {
            struct kvt_l2_journal before = {.items = items, .count = kept};

            if (item.value <= bound_of(&before, KVT_JOURNAL_PURGE_NS, &item.key))
                continue;
        }
        items[kept++] = item;
    }
    journal->count = kept;
}

void kvt_l2_purge_coarsen(struct kvt_l2_journal *journal, uint32_t max)
{
    uint64_t bound = 0;

    if (journal->count <= max)
        return;
    for (uint32_t i = 0; i < journal->count; i++)
        if (journal->items[i].kind == KVT_JOURNAL_PURGE_KEY)
            journal->items[i].kind = KVT_JOURNAL_PURGE_NS;
    kvt_l2_purge_merge(journal, 0);
    if (journal->count <= max)
        return;
    for (uint32_t i = 0; i < journal->count; i++)
        bound = KVT_MAX(bound, journal->items[i].value);
    memset(&journal->items[0], 0, sizeof journal->items[0]);
    journal->items[0].kind = KVT_JOURNAL_PURGE_ALL;
    journal->items[0].value = bound;
    journal->count = 1;
}
