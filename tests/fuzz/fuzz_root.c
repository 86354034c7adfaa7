/* A root directory with any bytes changed in any of its files, checksums made to fit: it opens or
 * is refused; what is found lies inside its segment, and a record that verifies is, byte for byte,
 * one that was written. fsck reads the same files first. The second opening never gives other bytes
 * either.
 * Input: edits {file and flags, page, offset, length, bytes}. Files: superblock, journal, the first
 * three segments. Flag 0x80: the page's checksum is not made to fit; 0x40: the file is cut there.
 */
#include "fuzz/fuzz.h"
#include "kvtier/error.h"
#include "store/fsck.h"
#include "store/l2.h"
#include "store/l2_survey.h"
#include "support/root_image.h"

#define EDITS_MAX 16u

struct finding {
    struct kvt_entry entry;
    uint32_t segment;
};
#define FINDINGS_MAX 512u

struct opened {
    struct kvt_l2 *l2;
    int64_t now;
    uint32_t count;
    struct finding findings[FINDINGS_MAX];
};

static int64_t opened_now(void *ctx)
{
    return ((struct opened *)ctx)->now;
}

static void opened_found(void *ctx, const struct kvt_entry *entry, uint32_t segment,
                         uint64_t generation)
{
    struct opened *opened = ctx;

    (void)generation;
    FUZZ_CHECK(kvt_entry_check(entry, KVT_SEGMENT_BYTES_MAX / KVT_PAGE_BYTES) == 0);
    if (opened->count < FINDINGS_MAX)
        opened->findings[opened->count++] = (struct finding){*entry, segment};
}

static void opened_evicted(void *ctx, uint32_t segment)
{
    (void)ctx;
    (void)segment;
}

static bool opened_may_evict(void *ctx, uint32_t segment)
{
    (void)ctx;
    (void)segment;
    return true;
}

static void read_done(struct kvt_l2_read *read)
{
    *(volatile bool *)read->user = true;
}

static void check_record(struct opened *opened, const struct finding *finding)
{
    uint32_t bytes = finding->entry.pages * KVT_PAGE_BYTES;
    struct kvt_l2_read read = {.where = {finding->segment, finding->entry.page},
                               .pages = finding->entry.pages,
                               .done = read_done};
    volatile bool done = false; /* set through read.user */
    int turns = 0;

    if (bytes > (1u << 20))
        return; /* entries of that size are of no record here; reading them is only slow */
    FUZZ_CHECK(posix_memalign(&read.dst, KVT_PAGE_BYTES, bytes) == 0);
    read.user = (void *)&done;
    kvt_l2_read(opened->l2, &read);
    while (!done) {
        int64_t next = kvt_l2_run(opened->l2);

        FUZZ_CHECK(turns++ < 100000);
        opened->now = next != INT64_MAX && next > opened->now ? next : opened->now + 1000;
    }
    if (read.status == 0 &&
        kvt_record_verify(read.dst, bytes, &finding->entry.key, finding->entry.checksum) == 0)
        FUZZ_CHECK(root_image_holds(read.dst, bytes));
    free(read.dst);
}

static void open_and_read(struct kvt_io *io)
{
    static struct opened opened;
    struct kvt_l2_params params = {.io = io,
                                   .cap_bytes = ROOT_IMAGE_CAP,
                                   .seed = 7,
                                   .clock = {opened_now, &opened},
                                   .batch_bytes_max = 1u << 20,
                                   .reads_max = 8,
                                   .found = opened_found,
                                   .evicted = opened_evicted,
                                   .may_evict = opened_may_evict,
                                   .ctx = &opened};
    uint64_t next_sequence = 0;
    int rc;

    memset(&opened, 0, sizeof opened);
    opened.now = 1000000000;
    rc = kvt_l2_open(&params, &opened.l2, &next_sequence);
    FUZZ_CHECK(rc <= 0 && (rc == 0) == (opened.l2 != NULL));
    if (rc != 0)
        return;
    for (uint32_t i = 0; i < opened.count; i++) {
        FUZZ_CHECK(opened.findings[i].segment < kvt_l2_segment_limit(opened.l2));
        check_record(&opened, &opened.findings[i]);
    }
    kvt_l2_close(opened.l2);
}

static void fsck_found(void *ctx, bool problem, const char *text)
{
    (void)problem;
    FUZZ_CHECK(text != NULL && text[0]);
    ++*(unsigned *)ctx;
}

static void check_fsck(struct kvt_io *io)
{
    unsigned findings = 0;
    struct kvt_fsck_params params = {.io = io, .found = fsck_found, .ctx = &findings};
    struct kvt_fsck_report report;
    int rc = kvt_fsck(&params, &report);

    FUZZ_CHECK(rc <= 1);
    if (rc == 0)
        FUZZ_CHECK(report.problems + report.notes == findings);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct kvt_io *io = root_image_clone();

    for (unsigned i = 0; i < EDITS_MAX && in.size >= 6; i++) {
        struct root_edit edit = {.file = fuzz_u8(&in), .page = fuzz_u8(&in)};

        edit.offset = fuzz_u16(&in) % KVT_PAGE_BYTES;
        edit.bytes = fuzz_u8(&in) % (uint32_t)sizeof edit.data;
        fuzz_take(&in, edit.data, edit.bytes);
        root_image_edit(io, &edit);
    }
    check_fsck(io);
    open_and_read(io);
    open_and_read(io);
    io->ops->destroy(io);
    return 0;
}
