/* Segments as objects: their states, their age list, and a few open descriptors shared by all of
 * them (LRU: a large drive has more segments than a process may have files). A slot with refs > 0
 * is in use by a request and never closed. Does not do data I/O. */
#include <errno.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"

/* allowed[from] is the set of states that may follow */
static const uint8_t allowed[KVT_L2_STATES] = {
    [KVT_L2_ABSENT] = 1u << KVT_L2_BLANK,
    [KVT_L2_BLANK] =
        1u << KVT_L2_PREPARING | 1u << KVT_L2_ABSENT | 1u << KVT_L2_SEALED | 1u << KVT_L2_UNREAD,
    [KVT_L2_PREPARING] = 1u << KVT_L2_READY | 1u << KVT_L2_BLANK,
    [KVT_L2_READY] = 1u << KVT_L2_OPEN,
    [KVT_L2_OPEN] = 1u << KVT_L2_CLOSING,
    [KVT_L2_CLOSING] = 1u << KVT_L2_SEALED | 1u << KVT_L2_BLANK,
    [KVT_L2_SEALED] = 1u << KVT_L2_PREPARING | 1u << KVT_L2_OPEN, /* OPEN: resumed at open */
    [KVT_L2_UNREAD] = 1u << KVT_L2_ABSENT | 1u << KVT_L2_SEALED | 1u << KVT_L2_BLANK,
};

static void age_append(struct kvt_l2 *l2, uint32_t number)
{
    struct kvt_l2_segment *segment = &l2->segments[number];

    segment->older = l2->newest;
    segment->newer = KVT_L2_NONE;
    if (l2->newest == KVT_L2_NONE)
        l2->oldest = number;
    else
        l2->segments[l2->newest].newer = number;
    l2->newest = number;
}

static void age_remove(struct kvt_l2 *l2, uint32_t number)
{
    struct kvt_l2_segment *segment = &l2->segments[number];

    if (segment->older == KVT_L2_NONE)
        l2->oldest = segment->newer;
    else
        l2->segments[segment->older].newer = segment->newer;
    if (segment->newer == KVT_L2_NONE)
        l2->newest = segment->older;
    else
        l2->segments[segment->newer].older = segment->older;
    segment->older = segment->newer = KVT_L2_NONE;
}

void kvt_l2_segment_renew(struct kvt_l2 *l2, uint32_t number)
{
    age_remove(l2, number);
    age_append(l2, number);
}

void kvt_l2_segment_by_age(struct kvt_l2 *l2, uint32_t number)
{
    struct kvt_l2_segment *segment = &l2->segments[number];
    uint32_t at = l2->oldest;

    while (at != KVT_L2_NONE &&
           (at == number || l2->segments[at].generation <= segment->generation))
        at = l2->segments[at].newer;
    if (at == KVT_L2_NONE) {
        kvt_l2_segment_renew(l2, number);
        return;
    }
    age_remove(l2, number);
    segment->newer = at;
    segment->older = l2->segments[at].older;
    if (segment->older == KVT_L2_NONE)
        l2->oldest = number;
    else
        l2->segments[segment->older].newer = number;
    l2->segments[at].older = number;
}

void kvt_l2_segment_synced(struct kvt_l2 *l2, uint32_t number, enum kvt_l2_unsynced state)
{
    struct kvt_l2_segment *segment = &l2->segments[number];

    l2->unsynced -= segment->unsynced != KVT_L2_SYNCED;
    l2->unsynced += state != KVT_L2_SYNCED;
    segment->unsynced = (uint8_t)state;
}

void kvt_l2_segment_inherited(struct kvt_l2 *l2, uint32_t number)
{
    kvt_l2_segment_synced(l2, number, KVT_L2_SYNC_AGAIN);
    l2->segments[number].moved = 1;
}

void kvt_l2_segment_move(struct kvt_l2 *l2, uint32_t number, enum kvt_l2_state to)
{
    struct kvt_l2_segment *segment = &l2->segments[number];

    if (!(allowed[segment->state] & 1u << to))
        kvt_log(&l2->params.log, KVT_LOG_ERROR, "bug: segment %u goes from state %u to %u",
                (unsigned)number, (unsigned)segment->state, (unsigned)to);
    if (segment->state == KVT_L2_SEALED) {
        age_remove(l2, number);
        l2->drained -= segment->drained;
        segment->drained = 0;
    }
    kvt_l2_segment_synced(l2, number, KVT_L2_SYNCED); /* until the caller says otherwise */
    if (to == KVT_L2_SEALED)
        age_append(l2, number);
    if (to == KVT_L2_READY || to == KVT_L2_ABSENT)
        segment->min_sequence = UINT64_MAX; /* not before: until then a crash shows the old life */
    l2->in_state[segment->state]--;
    l2->in_state[to]++;
    segment->state = (uint8_t)to;
}

static int slot_for(struct kvt_l2 *l2)
{
    int best = -EAGAIN;

    for (int i = 0; i < (int)l2->params.files_max; i++) {
        if (l2->files[i].refs)
            continue;
        if (l2->files[i].file < 0)
            return i;
        if (best < 0 || l2->files[i].used < l2->files[best].used)
            best = i;
    }
    return best;
}

static void slot_close(struct kvt_l2 *l2, int slot)
{
    struct kvt_l2_file *file = &l2->files[slot];

    if (file->file < 0)
        return;
    l2->io->ops->close(l2->io, file->file);
    l2->segments[file->segment].slot = -1;
    file->file = -1;
}

/* Close the descriptor that was used longest ago. False: all are in use, or closed. */
static bool close_one(struct kvt_l2 *l2)
{
    int best = -1;

    for (int i = 0; i < (int)l2->params.files_max; i++)
        if (!l2->files[i].refs && l2->files[i].file >= 0 &&
            (best < 0 || l2->files[i].used < l2->files[best].used))
            best = i;
    if (best >= 0)
        slot_close(l2, best);
    return best >= 0;
}

int kvt_l2_file_get(struct kvt_l2 *l2, uint32_t number, bool create)
{
    struct kvt_l2_segment *segment = &l2->segments[number];
    char name[KVT_IO_NAME_MAX];
    int slot = segment->slot;

    if (slot < 0) {
        int flags = l2->params.read_only ? KVT_IO_OPEN_READ_ONLY : 0;
        int file;

        slot = slot_for(l2);
        if (slot < 0)
            return slot;
        slot_close(l2, slot);
        kvt_l2_segment_name(number, name);
        if (create)
            flags |= KVT_IO_OPEN_CREATE;
        file = l2->io->ops->open(l2->io, name, flags);
        /* the process has none left: one of ours that rests is given for it */
        if ((file == -EMFILE || file == -ENFILE) && close_one(l2))
            file = l2->io->ops->open(l2->io, name, flags);
        if (file < 0)
            return file == -EAGAIN ? -EIO : file;
        l2->files[slot].file = file;
        l2->files[slot].segment = number;
        segment->slot = (int8_t)slot;
    }
    l2->files[slot].refs++;
    l2->files[slot].used = ++l2->file_clock;
    return slot;
}

void kvt_l2_file_put(struct kvt_l2 *l2, int slot)
{
    if (slot >= 0)
        l2->files[slot].refs--;
}

void kvt_l2_file_forget(struct kvt_l2 *l2, uint32_t number)
{
    if (l2->segments[number].slot >= 0)
        slot_close(l2, l2->segments[number].slot);
}

void kvt_l2_files_close(struct kvt_l2 *l2)
{
    for (uint32_t i = 0; l2->files && i < l2->params.files_max; i++)
        slot_close(l2, (int)i);
}

/* Reserve the segment's space up to its full size, so that later writes find room and overwrite
 * instead of extending. Where the file system cannot, the file is only as long as it should be, and
 * a write may meet ENOSPC. 0, -errno. */
int kvt_l2_segment_space(struct kvt_l2 *l2, uint32_t number, int file)
{
    struct kvt_l2_segment *segment = &l2->segments[number];
    const struct kvt_io_ops *ops = l2->io->ops;
    int rc = ops->allocate(l2->io, file, l2->segment_bytes);
    int64_t bytes;

    if (rc && rc != -EOPNOTSUPP && rc != -ENOSYS && rc != -EINVAL)
        return rc;
    bytes = ops->size(l2->io, file);
    if (bytes < 0)
        return (int)bytes;
    if (bytes != (int64_t)l2->segment_bytes)
        rc = ops->truncate(l2->io, file, l2->segment_bytes);
    else
        rc = 0;
    if (!rc) {
        l2->stats.bytes_used += l2->segment_bytes - segment->bytes;
        segment->bytes = l2->segment_bytes;
        segment->punched = 0;
    }
    return rc;
}

int kvt_l2_segment_unlink(struct kvt_l2 *l2, uint32_t number)
{
    struct kvt_l2_segment *segment = &l2->segments[number];
    char name[KVT_IO_NAME_MAX];
    int rc;

    kvt_l2_file_forget(l2, number);
    kvt_l2_segment_name(number, name);
    rc = l2->io->ops->unlink(l2->io, name);
    if (rc && rc != -ENOENT)
        return rc;
    l2->stats.bytes_used -= segment->bytes;
    segment->bytes = 0;
    segment->generation = 0;
    segment->punched = 0;
    if (segment->state != KVT_L2_ABSENT)
        l2->segment_files--;
    kvt_l2_segment_move(l2, number, KVT_L2_ABSENT);
    return 0;
}
