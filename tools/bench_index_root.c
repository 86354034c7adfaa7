/* Makes the root that `kvtier bench index` opens: real superblock, segment headers, footers and
 * trailers for as many one-page records as wanted.
 *
 * Invariants: every structure is one that recovery accepts as its own; a record's body is a hole,
 * so fsck and loads rightly refuse it: this root is for measuring, and for nothing else.
 * Threads: one. Does not measure: cmd_bench_index.c does.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "bench_index.h"
#include "cli.h"
#include "store/l2.h"
#include "store/l2_survey.h"

#define KEY_SEED UINT64_C(0x6b76746965720001)

uint64_t kvt_bench_root_cap(const struct kvt_bench_root *root)
{
    /* A footer entry costs a 32nd of its record; superblock, journal and free segments the rest. */
    uint64_t records = root->blocks * KVT_PAGE_BYTES;

    return records + records / 10 + (32u << 20);
}

void kvt_bench_root_space(struct kvt_identity *identity, struct kvt_layout *layout)
{
    static const struct kvt_part parts[] = {
        {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = 64},
        {.kind = KVT_PART_V, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = 64},
    };

    kvt_identity_init(identity);
    identity->engine = "bench index";
    identity->key_scheme = "counter";
    identity->model = "none";
    *layout = (struct kvt_layout){
        .struct_size = sizeof(*layout), .block_tokens = 16, .part_count = 2, .parts = parts};
}

void kvt_bench_root_key(uint64_t i, struct kvt_key *key)
{
    struct kvt_rng rng = {KEY_SEED ^ i * UINT64_C(0x9e3779b97f4a7c15)};

    memset(key, 0, sizeof(*key));
    for (unsigned word = 0; word < 4; word++) {
        uint64_t bits = kvt_rng_next(&rng);
        memcpy(key->hash + 8 * word, &bits, sizeof(bits));
    }
    key->hash_len = KVT_HASH_BYTES_MAX;
}

static void make_entry(const struct kvt_bench_root *root, const uint8_t ns[KVT_NS_BYTES],
                       uint64_t i, uint32_t page, struct kvt_entry *entry)
{
    struct kvt_key key;

    memset(entry, 0, sizeof(*entry));
    kvt_bench_root_key(i, &key);
    kvt_full_key_make(&entry->key, ns, &key);
    if (i % root->chain) {
        kvt_bench_root_key(i - 1, &key);
        memcpy(entry->parent, key.hash, key.hash_len);
        entry->parent_len = key.hash_len;
    }
    entry->sequence = 1 + i;
    entry->checksum = 1; /* of a record that nobody will read */
    entry->first_pos = (uint32_t)(i % root->chain * 16);
    entry->page = page;
    entry->pages = 1;
    entry->map = KVT_LEVEL_KV4;
}

/* What the writing of one segment needs, all of it page aligned. */
struct maker {
    const struct kvt_bench_root *root;
    uint8_t ns[KVT_NS_BYTES];
    struct kvt_io *io;
    struct kvt_superblock superblock;
    struct kvt_segment_header *header;
    struct kvt_trailer *trailer;
    struct kvt_entry *entries; /* of a whole segment */
};

static int write_page(struct maker *m, int file, uint32_t page, const void *bytes, size_t len)
{
    int64_t n = kvt_io_write_now(m->io, file, (uint64_t)page * KVT_PAGE_BYTES, bytes, len);

    return n < 0 ? (int)n : n == (int64_t)len ? 0 : -EIO;
}

/* Sealed segment `number` of the blocks from first on; *count says how many it took. */
static int write_segment(struct maker *m, uint32_t number, uint64_t first, uint64_t *count)
{
    uint32_t pages = m->superblock.segment_bytes / KVT_PAGE_BYTES;
    uint32_t n = (uint32_t)KVT_MIN((uint64_t)pages * 31 / 32 - 3, m->root->blocks - first);
    size_t footer_bytes = kvt_round_up(n * sizeof(*m->entries), KVT_PAGE_BYTES);
    uint32_t footer = pages - 1 - (uint32_t)(footer_bytes / KVT_PAGE_BYTES);
    char name[KVT_IO_NAME_MAX];

    memset(m->header, 0, sizeof(*m->header));
    m->header->magic = KVT_SEGMENT_MAGIC;
    m->header->version = KVT_DISK_VERSION;
    m->header->segment = number;
    memcpy(m->header->root_id, m->superblock.root_id, sizeof(m->header->root_id));
    m->header->generation = number + 1u;
    m->header->segment_bytes = m->superblock.segment_bytes;
    kvt_segment_header_finish(m->header);
    memset(m->entries, 0, footer_bytes);
    for (uint32_t i = 0; i < n; i++)
        make_entry(m->root, m->ns, first + i, 1 + i, &m->entries[i]);
    memset(m->trailer, 0, sizeof(*m->trailer));
    m->trailer->magic = KVT_TRAILER_MAGIC;
    m->trailer->version = KVT_DISK_VERSION;
    m->trailer->segment = number;
    m->trailer->generation = number + 1u;
    m->trailer->footer_page = footer;
    m->trailer->footer_count = n;
    m->trailer->footer_checksum = kvt_footer_checksum(m->entries, n);
    kvt_trailer_finish(m->trailer);

    kvt_l2_segment_name(number, name);
    int file = m->io->ops->open(m->io, name, KVT_IO_OPEN_CREATE);
    if (file < 0)
        return file;
    int rc = m->io->ops->truncate(m->io, file, m->superblock.segment_bytes);
    if (!rc)
        rc = write_page(m, file, 0, m->header, sizeof(*m->header));
    if (!rc)
        rc = write_page(m, file, footer, m->entries, footer_bytes);
    if (!rc)
        rc = write_page(m, file, pages - 1, m->trailer, sizeof(*m->trailer));
    if (!rc)
        rc = kvt_io_sync_now(m->io, file);
    m->io->ops->close(m->io, file);
    *count = n;
    return rc;
}

/* An empty root by the library itself, with a superblock that says so. */
static int make_empty(struct maker *m)
{
    struct kvt_l2_params params = {.io = m->io,
                                   .cap_bytes = kvt_bench_root_cap(m->root),
                                   .seed = kvt_rng_seed_os(),
                                   .clock = kvt_clock_system(),
                                   .batch_bytes_max = 16u << 20,
                                   .reads_max = 4};
    struct kvt_l2_survey survey;
    struct kvt_l2 *l2;
    uint64_t sequence;
    int rc = kvt_l2_open(&params, &l2, &sequence);

    if (rc)
        return rc;
    kvt_l2_close(l2);
    rc = kvt_l2_survey(m->io, &survey);
    m->superblock = survey.superblock;
    kvt_l2_survey_free(&survey);
    return rc;
}

static int write_segments(struct maker *m)
{
    struct kvt_progress progress;
    uint64_t done = 0, count = 0;
    int rc = 0;

    m->header = aligned_alloc(KVT_PAGE_BYTES, sizeof(*m->header));
    m->trailer = aligned_alloc(KVT_PAGE_BYTES, sizeof(*m->trailer));
    m->entries =
        aligned_alloc(KVT_PAGE_BYTES, kvt_round_up(m->superblock.segment_bytes / KVT_PAGE_BYTES *
                                                       sizeof(*m->entries),
                                                   KVT_PAGE_BYTES));
    kvt_progress_start(&progress, "making the root");
    if (!m->header || !m->trailer || !m->entries)
        rc = -ENOMEM;
    for (uint32_t number = 0; !rc && done < m->root->blocks; number++) {
        rc = kvt_cli_interrupted() ? -ECANCELED : write_segment(m, number, done, &count);
        done += count;
        kvt_progress_update(&progress, done, m->root->blocks);
    }
    kvt_progress_done(&progress);
    free(m->header);
    free(m->trailer);
    free(m->entries);
    return rc;
}

int kvt_bench_root_make(const struct kvt_bench_root *root)
{
    struct kvt_io_posix_params params = {.path = root->path, .threads = 1, .direct = 0};
    struct maker m = {.root = root};
    struct kvt_identity identity;
    struct kvt_layout layout;
    int64_t pid;

    kvt_bench_root_space(&identity, &layout);
    int rc = kvt_namespace_id(&identity, &layout, m.ns);
    if (!rc)
        rc = kvt_io_posix_new(&params, &m.io);
    if (rc)
        return rc;
    rc = kvt_l2_probe(m.io);
    rc = rc == 1 ? m.io->ops->lock(m.io, &pid) : rc == 0 ? -EEXIST : rc;
    if (!rc)
        rc = make_empty(&m);
    if (!rc)
        rc = write_segments(&m);
    m.io->ops->destroy(m.io);
    return rc;
}

/* Bytes of one file that are in the page cache after it was asked to leave. */
static int64_t drop_file(int dir, const char *name)
{
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    int64_t cached = -errno;
    struct stat st;

    if (fd < 0)
        return cached;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size == 0) {
        close(fd);
        return 0;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE), len = (size_t)st.st_size;
    unsigned char *resident = malloc((len + page - 1) / page);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    void *map = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, 0);
    cached = -ENOMEM;
    if (map != MAP_FAILED && resident && mincore(map, len, resident) == 0) {
        cached = 0;
        for (size_t i = 0; i < (len + page - 1) / page; i++)
            cached += (resident[i] & 1) ? (int64_t)page : 0;
    }
    if (map != MAP_FAILED)
        munmap(map, len);
    free(resident);
    close(fd);
    return cached;
}

int64_t kvt_bench_root_drop_cache(const struct kvt_bench_root *root)
{
    DIR *dir = opendir(root->path);
    int64_t total = -errno;
    struct dirent *entry;

    if (!dir)
        return total;
    total = 0;
    while (total >= 0 && (entry = readdir(dir))) {
        int64_t cached = entry->d_name[0] == '.' ? 0 : drop_file(dirfd(dir), entry->d_name);
        total = cached < 0 ? cached : total + cached;
    }
    closedir(dir);
    return total;
}

void kvt_bench_root_remove(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;

    if (!dir)
        return;
    while ((entry = readdir(dir)))
        if (kvt_l2_name_kind(entry->d_name, &(uint32_t){0}) != KVT_L2_NAME_IS_FOREIGN)
            (void)unlinkat(dirfd(dir), entry->d_name, 0);
    closedir(dir);
    (void)rmdir(path);
}
