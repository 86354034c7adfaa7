/* Opens a store directory for the tools: superblock, recovery, a sorted list of its records.
 *
 * Invariants: with writable = 0 no byte of the directory changes and no lock is kept; of two
 * records with one key only the newer is listed. Threads: one. It never creates a store: a
 * directory without a superblock is refused.
 */
#include "store_dir.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "cli.h"
#include "kvtier/error.h"
#include "stats_file.h"
#include "store/l2_survey.h"

void kvt_dir_not_daemon(const char *path, char *error, size_t error_len)
{
    snprintf(error, error_len,
             "%.400s: this command takes the directory of a store, not the socket of a kvtierd; "
             "'kvtier stat' and 'kvtier top' ask a running one",
             path);
}

int64_t kvt_dir_owner(const char *dir)
{
    struct kvt_io_posix_params params = {.path = dir, .threads = 1, .direct = 0, .read_only = 1};
    struct kvt_io *io;
    int64_t pid = 0;

    if (kvt_io_posix_new(&params, &io))
        return 0;
    if (io->ops->lock(io, &pid) != KVT_E_LOCKED)
        pid = 0;
    io->ops->destroy(io);
    return pid;
}

static int read_superblock(struct kvt_dir *dir)
{
    struct kvt_superblock *copies = aligned_alloc(KVT_IO_ALIGN, 2 * sizeof(*copies));
    int rc = KVT_E_NOT_OURS, file = -1;

    if (!copies)
        return -ENOMEM;
    memset(copies, 0, 2 * sizeof(*copies));
    file = dir->io->ops->open(dir->io, "superblock", KVT_IO_OPEN_READ_ONLY);
    if (file < 0) {
        rc = file == -ENOENT ? KVT_E_NOT_OURS : file;
        goto out;
    }
    int64_t n = kvt_io_read_now(dir->io, file, 0, copies, 2 * sizeof(*copies));
    if (n < 0) {
        rc = (int)n;
        goto out;
    }
    for (uint32_t i = 0; i < 2; i++) {
        int check = kvt_superblock_check(&copies[i], i);
        if (check == KVT_E_NEWER)
            rc = KVT_E_NEWER;
        if (check || (rc == 0 && copies[i].update < dir->superblock.update))
            continue;
        dir->superblock = copies[i];
        rc = 0;
    }
out:
    if (file >= 0)
        dir->io->ops->close(dir->io, file);
    free(copies);
    return rc;
}

static void found(void *ctx, const struct kvt_entry *entry, uint32_t segment, uint64_t generation)
{
    struct kvt_dir *dir = ctx;

    if (dir->record_count == dir->record_room) {
        size_t room = dir->record_room ? dir->record_room * 2 : 1024;
        struct kvt_dir_record *grown = reallocarray(dir->records, room, sizeof(*grown));
        if (!grown) {
            dir->out_of_memory = 1;
            return;
        }
        dir->records = grown;
        dir->record_room = room;
    }
    struct kvt_dir_record *record = &dir->records[dir->record_count++];
    *record = (struct kvt_dir_record){
        .key = entry->key,
        .sequence = entry->sequence,
        .generation = generation,
        .checksum = entry->checksum,
        .where = {.segment = segment, .page = entry->page},
        .pages = entry->pages,
        .first_pos = entry->first_pos,
        .map = entry->map,
        .parent_len = entry->parent_len,
    };
    memcpy(record->parent, entry->parent, sizeof(record->parent));
}

/* By key; of equal keys the newest first. */
static int compare(const void *a, const void *b)
{
    const struct kvt_dir_record *x = a, *y = b;
    int order = memcmp(&x->key, &y->key, sizeof(x->key));

    if (order)
        return order;
    if (x->sequence != y->sequence)
        return x->sequence > y->sequence ? -1 : 1;
    return (x->generation < y->generation) - (x->generation > y->generation);
}

static void keep_newest(struct kvt_dir *dir)
{
    size_t kept = 0;

    if (!dir->record_count)
        return;
    qsort(dir->records, dir->record_count, sizeof(dir->records[0]), compare);
    for (size_t i = 0; i < dir->record_count; i++)
        if (!kept ||
            memcmp(&dir->records[kept - 1].key, &dir->records[i].key, sizeof(dir->records[i].key)))
            dir->records[kept++] = dir->records[i];
    dir->record_count = kept;
}

static void evicted(void *ctx, uint32_t segment)
{
    (void)ctx; /* the tools append nothing, so nothing is recycled */
    (void)segment;
}

static void print_warning(void *arg, int level, const char *message)
{
    (void)level;
    kvt_cli_error("", "%s: %s", (const char *)arg, message);
}

static bool may_evict(void *ctx, uint32_t segment)
{
    (void)ctx;
    (void)segment;
    return false;
}

/* Open the directory and read its superblock; with writable the lock is taken too. */
static int open_root(const char *path, int writable, struct kvt_dir *dir, int64_t *pid)
{
    struct kvt_io_posix_params params = {
        .path = path, .threads = 1, .direct = writable ? -1 : 0, .read_only = !writable};

    int rc = kvt_io_posix_new(&params, &dir->io);
    if (!rc)
        rc = kvt_l2_probe(dir->io);
    if (rc == 1) /* nothing there: a root could be made, which is not our business */
        rc = KVT_E_NOT_OURS;
    if (!rc && writable)
        rc = dir->io->ops->lock(dir->io, pid);
    if (rc)
        return rc;
    rc = read_superblock(dir);
    /* Segments without a superblock are read; to write, its cap would have to be guessed. */
    return rc == KVT_E_NOT_OURS ? (writable ? KVT_E_CORRUPT : 0) : rc;
}

int kvt_dir_open(const char *path, int writable, struct kvt_dir *dir, char *error, size_t error_len)
{
    int64_t pid = 0;

    memset(dir, 0, sizeof(*dir));
    if (kvt_stats_is_daemon(path)) {
        kvt_dir_not_daemon(path, error, error_len);
        return KVT_E_INVAL;
    }
    int rc = open_root(path, 0, dir, NULL); /* first look: opening to write may create */
    if (!rc && writable) {
        dir->io->ops->destroy(dir->io);
        memset(dir, 0, sizeof(*dir));
        rc = open_root(path, 1, dir, &pid);
    }
    if (rc)
        goto out;
    struct kvt_l2_params params = {
        .io = dir->io,
        .cap_bytes = dir->superblock.cap_bytes,
        .seed = kvt_rng_seed_os(),
        .clock = kvt_clock_system(),
        .log = {.fn = print_warning, .arg = (void *)(uintptr_t)path, .level_max = KVT_LOG_WARN},
        .batch_bytes_max = 16u << 20,
        .reads_max = 4,
        .read_only = !writable,
        .found = found,
        .evicted = evicted,
        .may_evict = may_evict,
        .ctx = dir,
    };
    rc = kvt_l2_open(&params, &dir->l2, &dir->next_sequence);
    if (!rc && dir->out_of_memory)
        rc = -ENOMEM;
    if (!rc)
        keep_newest(dir);
out:
    if (rc == KVT_E_LOCKED && pid > 0)
        snprintf(error, error_len, "%.400s: process %" PRId64 " owns this directory", path, pid);
    else if (rc == KVT_E_NOT_OURS)
        snprintf(error, error_len, "%.400s: not a kvtier store", path);
    else if (rc == KVT_E_CORRUPT)
        snprintf(error, error_len,
                 "%.400s: its superblock is lost; a cache that opens it makes it new", path);
    else if (rc)
        snprintf(error, error_len, "%.400s: %s", path, kvt_strerror(rc));
    if (rc)
        kvt_dir_close(dir);
    return rc;
}

void kvt_dir_close(struct kvt_dir *dir)
{
    if (dir->l2)
        kvt_l2_close(dir->l2);
    if (dir->io)
        dir->io->ops->destroy(dir->io);
    free(dir->records);
    memset(dir, 0, sizeof(*dir));
}

struct first_segment {
    char name[KVT_IO_NAME_MAX];
    bool found;
};

static int first_segment(void *arg, const char *name)
{
    struct first_segment *first = arg;
    uint32_t number;

    if (kvt_l2_name_kind(name, &number) != KVT_L2_NAME_IS_SEGMENT)
        return 0;
    snprintf(first->name, sizeof(first->name), "%s", name);
    first->found = true;
    return 1;
}

int kvt_dir_drop_segments(struct kvt_dir *dir)
{
    struct kvt_l2_stats stats;
    int rc = 0;

    kvt_l2_stats(dir->l2, &stats);
    if (stats.segments_unread) /* they may hold what nobody has seen */
        return 0;
    kvt_l2_close(dir->l2); /* the journal and the superblock are durable */
    dir->l2 = NULL;
    while (!rc) {
        struct first_segment first = {.found = false};

        rc = dir->io->ops->list(dir->io, first_segment, &first);
        if (rc < 0 || !first.found)
            break;
        rc = dir->io->ops->unlink(dir->io, first.name);
    }
    return rc < 0 ? rc : dir->io->ops->sync_dir(dir->io);
}

enum { UNKNOWN = 0, ON_PATH, REACHED, CUT };

size_t kvt_dir_cut(const struct kvt_dir *dir, uint8_t *cut)
{
    size_t *path = calloc(dir->record_count + 1, sizeof(*path)), count = 0;

    if (!path)
        return SIZE_MAX;
    memset(cut, UNKNOWN, dir->record_count);
    for (size_t i = 0; i < dir->record_count; i++) {
        size_t at = i, steps = 0;
        uint8_t end = UNKNOWN;

        while (at != SIZE_MAX && cut[at] == UNKNOWN && end == UNKNOWN) {
            const struct kvt_dir_record *record = &dir->records[at];

            cut[at] = ON_PATH;
            path[steps++] = at;
            end = record->parent_len ? UNKNOWN : REACHED;
            at = kvt_dir_parent(dir, record);
        }
        if (end == UNKNOWN) /* no parent; one that is known; or a ring, which no look-up enters */
            end = at != SIZE_MAX && cut[at] == REACHED ? REACHED : CUT;
        while (steps)
            cut[path[--steps]] = end;
    }
    free(path);
    for (size_t i = 0; i < dir->record_count; i++) {
        cut[i] = cut[i] == CUT;
        count += cut[i];
    }
    return count;
}

int kvt_dir_knows_ns(const struct kvt_dir *dir, const uint8_t ns[KVT_NS_BYTES], const char *command,
                     const char *path, const char *outcome)
{
    for (size_t i = 0; i < dir->record_count; i++)
        if (!memcmp(dir->records[i].key.ns, ns, KVT_NS_BYTES))
            return 1;
    kvt_cli_error(command,
                  "%s: no such namespace%s; 'kvtier stat %s' lists those that hold records", path,
                  outcome, path);
    return 0;
}

size_t kvt_dir_find(const struct kvt_dir *dir, const struct kvt_full_key *key)
{
    size_t low = 0, high = dir->record_count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = memcmp(&dir->records[middle].key, key, sizeof(*key));
        if (!order)
            return middle;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return SIZE_MAX;
}

size_t kvt_dir_parent(const struct kvt_dir *dir, const struct kvt_dir_record *record)
{
    struct kvt_full_key key = record->key;

    if (!record->parent_len)
        return SIZE_MAX;
    memcpy(key.hash, record->parent, sizeof(key.hash));
    key.hash_len = record->parent_len;
    return kvt_dir_find(dir, &key);
}

void kvt_dir_reader_open(struct kvt_dir_reader *reader, const struct kvt_dir *dir)
{
    *reader = (struct kvt_dir_reader){.io = dir->io, .file = -1};
}

void kvt_dir_reader_close(struct kvt_dir_reader *reader)
{
    if (reader->file >= 0)
        reader->io->ops->close(reader->io, reader->file);
    free(reader->bytes);
    *reader = (struct kvt_dir_reader){.file = -1};
}

static int reader_segment(struct kvt_dir_reader *reader, uint32_t segment)
{
    char name[KVT_IO_NAME_MAX];

    if (reader->file >= 0 && reader->segment == segment)
        return 0;
    if (reader->file >= 0)
        reader->io->ops->close(reader->io, reader->file);
    kvt_l2_segment_name(segment, name);
    reader->file = reader->io->ops->open(reader->io, name, KVT_IO_OPEN_READ_ONLY);
    reader->segment = segment;
    return reader->file < 0 ? reader->file : 0;
}

int kvt_dir_read(struct kvt_dir_reader *reader, const struct kvt_dir_record *record)
{
    uint32_t bytes = record->pages * KVT_PAGE_BYTES;
    int rc = reader_segment(reader, record->where.segment);

    if (rc)
        return rc;
    if (reader->room < bytes) {
        free(reader->bytes);
        reader->bytes = aligned_alloc(KVT_IO_ALIGN, bytes);
        reader->room = reader->bytes ? bytes : 0;
        if (!reader->bytes)
            return -ENOMEM;
    }
    int64_t n =
        kvt_io_read_now(reader->io, reader->file, (uint64_t)record->where.page * KVT_PAGE_BYTES,
                        reader->bytes, bytes);
    if (n != (int64_t)bytes)
        return n < 0 ? (int)n : KVT_E_CORRUPT;
    rc = kvt_record_verify(reader->bytes, bytes, &record->key, record->checksum);
    if (rc)
        return rc;
    const struct kvt_record_header *header = (const void *)reader->bytes;
    return header->sequence != record->sequence || header->map != record->map ||
                   header->parent_len != record->parent_len ||
                   header->first_pos != record->first_pos ||
                   memcmp(header->parent, record->parent, sizeof(header->parent)) != 0
               ? KVT_E_CORRUPT
               : 0;
}

void kvt_dir_ns_text(const uint8_t ns[KVT_NS_BYTES], char text[2 * KVT_NS_BYTES + 1])
{
    for (unsigned i = 0; i < KVT_NS_BYTES; i++)
        snprintf(text + 2 * i, 3, "%02x", ns[i]);
}

int kvt_dir_ns_parse(const char *text, uint8_t ns[KVT_NS_BYTES])
{
    static const char digits[] = "0123456789abcdef";

    if (strlen(text) != 2 * KVT_NS_BYTES)
        return KVT_E_INVAL;
    for (unsigned i = 0; i < 2 * KVT_NS_BYTES; i++) {
        char c = text[i] >= 'A' && text[i] <= 'F' ? (char)(text[i] + 32) : text[i];
        const char *at = strchr(digits, c);
        if (!at)
            return KVT_E_INVAL;
        unsigned nibble = (unsigned)(at - digits);
        ns[i / 2] = (uint8_t)(i % 2 ? ns[i / 2] | nibble : nibble << 4);
    }
    return 0;
}
