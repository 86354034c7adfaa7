/* Direct loads: records from a drive into GPU memory past DRAM, against fake drivers of CUDA and of
 * cuFile.
 *
 * Goal:   what is on disk only comes back as the scalar codec says, read by cuFile, beside blocks
 *         that come from DRAM; cuFile that is absent, refuses, reads through the CPU, fails, brings
 *         fewer or other bytes costs a detour through DRAM, a counter, and in the end the direct
 *         path, never a block; a cancelled request is not read on; gds=required is refused where
 *         the path is not proved; nothing is left.
 * Method: api_rig.h over fake_cuda.c and fake_cufile.c; every chain is stored, flushed, and loaded
 *         after a restart. Files are real ones where the build is (O_DIRECT is needed).
 */
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/client.h"
#include "client/gpu_lane_impl.h"
#include "gpu/api_rig.h"
#include "gpu/fake_cuda.h"
#include "gpu/fake_cufile.h"
#include "gpu/gds.h"
#include "support/rig.h"

#define BLOCKS 48u
#define FIRST 1000u
#define REQUIRED "dram=16MiB,threads=1,gds=required"

static struct fake_cufile *cufile;

static const struct api_shape small = {"small",        2,       2,    64, 16, BLOCKS,
                                       KVT_DTYPE_BF16, API_NHD, false};

static int load_fakes(void **state)
{
    /* Roots lie where the build is: /tmp may be a file system without O_DIRECT. */
    if (setenv("TMPDIR", ".", 1) != 0)
        return -1;
    void *library = dlopen(KVT_FAKE_CUFILE, RTLD_NOW | RTLD_LOCAL);
    cufile = library != NULL ? dlsym(library, "fake_cufile") : NULL;
    return cufile != NULL ? api_fake_load(state) : -1;
}

static int reset(void **state)
{
    (void)api_fake_reset(state);
    fake->version = 13000;
    memset(cufile, 0, sizeof(*cufile));
    cufile->version = 1200;
    cufile->path = FAKE_P2P;
    return 0;
}

static void assert_nothing_left(void)
{
    assert_int_equal(cufile->opened, 0);
    assert_int_equal(cufile->handles, 0);
    assert_int_equal(cufile->buffers, 0);
    assert_int_equal(cufile->misaligned, 0);
    api_fake_nothing_left();
}

static void start(struct api *api, const struct api_shape *shape, const char *config)
{
    assert_true(api_init(api, KVT_FAKE_CUDA, shape, config, true));
    api->gds_library = KVT_FAKE_CUFILE;
}

static void end(struct api *api)
{
    assert_int_equal(api_stat(api, "client.bad_move"), 0);
    assert_int_equal(api_stat(api, "client.bad_reply"), 0);
    assert_int_equal(api_stat(api, "gpu.failed_blocks"), 0);
    assert_int_equal(api_stat(api, "store.stale"), 0);
    assert_int_equal(api_stat(api, "client.blocks_held"), 0);
    api_free(api);
    assert_nothing_left();
}

/* Where O_DIRECT is not to be had, nothing here can be tested. */
static void open_direct(struct api *api)
{
    char text[512];
    int rc = api_try_register(api);
    api_stat_text(api, "gpu.gds.state", text, sizeof(text));
    if (strstr(text, "O_DIRECT") != NULL) {
        api_free(api);
        skip();
    }
    if (rc != 0)
        fail_msg("%s; %s", text, api->log);
}

static void fill(struct api *api, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        api_fill(api, i, FIRST + i, API_SMOOTH);
    api_upload(api);
}

/* The mirror, and the poisoned device, wait for what loads of pages 0 to n - 1 must give. */
static void expect(struct api *api, uint32_t n)
{
    api_poison(api);
    for (uint32_t i = 0; i < n; i++) {
        api_fill(api, i, FIRST + i, API_SMOOTH);
        (void)api_coded(api, i, i == 0 ? KVT_LEVEL_RAW : KVT_LEVEL_KV4);
    }
}

/* A chain that is on disk only, in a cache that has just been opened. */
static void open_cold(struct api *api)
{
    uint32_t n = api->shape.pages;
    open_direct(api);
    fill(api, n);
    assert_int_equal(api_store(api, FIRST, n, 0, 0, NULL), n);
    assert_int_equal(kvt_flush(api->cache), 0);
    api_close(api);
    api_open(api);
    expect(api, n);
    cufile->reads = 0; /* the probe's */
}

static void load_all(struct api *api)
{
    int32_t status[API_PAGES_MAX];
    uint32_t n = api->shape.pages;
    size_t good = api_load(api, FIRST, n, 0, status);
    for (uint32_t i = 0; i < n && good < n; i++)
        if (status[i] != 0)
            fail_msg("block %u: %s", i, kvt_strerror(status[i]));
    assert_true(api_same(api));
}

/* ---- the direct path ---- */

static void test_round_trip(void **state)
{
    static const struct api_shape shapes[] = {
        {"nhd", 2, 2, 64, 16, BLOCKS, KVT_DTYPE_BF16, API_NHD, false},
        {"packed f32", 2, 1, 80, 16, 16, KVT_DTYPE_F32, API_PACKED, false},
        {"mla", 2, 1, 576, 16, 12, KVT_DTYPE_BF16, API_NHD, true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct api api;
        char text[512];
        uint32_t n = shapes[i].pages;
        start(&api, &shapes[i], REQUIRED);
        open_cold(&api);
        api_stat_text(&api, "gpu.gds.state", text, sizeof(text));
        assert_non_null(strstr(text, "direct: every read went by PCI P2PDMA"));
        load_all(&api);
        assert_int_equal(api_stat(&api, "gpu.gds.reads"), n);
        assert_int_equal(api_stat(&api, "load.granted_direct"), n);
        assert_int_equal(api_stat(&api, "load.granted_disk"), 0);
        assert_int_equal(api_stat(&api, "gpu.gds.bytes"), api_stat(&api, "client.load_bytes"));
        assert_int_equal(cufile->reads, (int)n);
        expect(&api, n); /* once more: nothing of it has come to DRAM */
        load_all(&api);
        assert_int_equal(api_stat(&api, "gpu.gds.reads"), 2 * n);
        assert_int_equal(api_stat(&api, "gpu.gds.fallback"), 0);
        end(&api);
    }
}

/* Records with maps of their own: the head that comes to the host has their table. */
static void test_mixed_maps(void **state)
{
    struct api api;
    (void)state;
    start(&api, &small, REQUIRED ",exclude_layers=1");
    open_direct(&api);
    fill(&api, BLOCKS);
    assert_int_equal(api_store(&api, FIRST, BLOCKS, 0, 0, NULL), BLOCKS);
    assert_int_equal(api_load(&api, FIRST, BLOCKS, 0, NULL), BLOCKS);
    uint8_t *before = malloc(api.bytes);
    assert_non_null(before);
    (void)api_same(&api); /* from DRAM, into api.back */
    memcpy(before, api.back, api.bytes);
    assert_int_equal(kvt_flush(api.cache), 0);
    api_close(&api);
    api_open(&api);
    api_poison(&api);
    memcpy(api.mirror, before, api.bytes);
    load_all(&api);
    assert_int_equal(api_stat(&api, "gpu.gds.reads"), BLOCKS);
    assert_int_equal(api_stat(&api, "gpu.gds.fallback"), 0);
    free(before);
    end(&api);
}

/* One request takes what is in DRAM from there, and the rest from disk. */
static void test_dram_and_direct_at_once(void **state)
{
    struct api api;
    (void)state;
    start(&api, &small, REQUIRED);
    open_direct(&api);
    fill(&api, BLOCKS);
    assert_int_equal(api_store(&api, FIRST, BLOCKS / 2, 0, 0, NULL), BLOCKS / 2);
    assert_int_equal(kvt_flush(api.cache), 0);
    api_close(&api);
    api_open(&api);
    assert_int_equal(
        api_store(&api, FIRST + BLOCKS / 2, BLOCKS / 2, BLOCKS / 2, 16 * BLOCKS / 2, NULL),
        BLOCKS / 2);
    expect(&api, BLOCKS);
    load_all(&api);
    assert_int_equal(api_stat(&api, "load.granted_direct"), BLOCKS / 2);
    assert_int_equal(api_stat(&api, "load.granted_dram"), BLOCKS / 2);
    assert_int_equal(api_stat(&api, "gpu.gds.reads"), BLOCKS / 2);
    end(&api);
}

/* More bytes than the device's buffer holds: reads wait for its chunks. */
static void test_more_than_the_buffer(void **state)
{
    static const struct api_shape large = {"large",       8,       4,    128, 32, 80,
                                           KVT_DTYPE_F32, API_NHD, false};
    struct api api;
    (void)state;
    start(&api, &large, "dram=128MiB,threads=1,gds=required,level=raw");
    open_direct(&api);
    for (uint32_t i = 0; i < large.pages; i++)
        api_fill(&api, i, FIRST + i, API_SMOOTH);
    api_upload(&api);
    assert_int_equal(api_store(&api, FIRST, large.pages, 0, 0, NULL), large.pages);
    assert_int_equal(kvt_flush(api.cache), 0);
    uint8_t *exact = malloc(api.bytes);
    assert_non_null(exact);
    memcpy(exact, api.mirror, api.bytes);
    api_close(&api);
    api_open(&api);
    api_poison(&api);
    memcpy(api.mirror, exact, api.bytes);
    free(exact);
    load_all(&api);
    assert_true(api_stat(&api, "gpu.gds.bytes") > (uint64_t)KVT_GDS_CHUNKS * KVT_GDS_CHUNK_BYTES);
    end(&api);
}

/* A small disk whose segments are written over again and again, while their files stay open. */
static void test_recycled_segments(void **state)
{
    struct api api;
    (void)state;
    start(&api, &small, "dram=1MiB,staging=512KiB,threads=1,gds=required");
    api.disk_size = "8MiB";
    open_direct(&api);
    fill(&api, BLOCKS);
    for (uint64_t round = 0; round < 16; round++) {
        int32_t status[BLOCKS];
        uint64_t first = 1000 * (round + 1);
        assert_int_equal(kvt_pool_reset_origin(api.pool, (uint32_t[]){0}, 1), 0);
        fill(&api, BLOCKS);
        for (uint32_t i = 0; i < BLOCKS; i++)
            assert_int_equal(kvt_pool_reset_origin(api.pool, &i, 1), 0);
        assert_int_equal(api_store(&api, first, BLOCKS, 0, 0, NULL), BLOCKS);
        assert_int_equal(kvt_flush(api.cache), 0);
        if (round < 4)
            continue;
        expect(&api, BLOCKS);
        uint64_t older = 1000 * (round + 1 - round % 4);
        size_t good = api_load(&api, older, BLOCKS, 0, status);
        if (good == BLOCKS) /* else it has been recycled */
            assert_true(api_same(&api));
        for (uint32_t i = 0; i < BLOCKS; i++)
            assert_true(status[i] == 0 || status[i] == KVT_E_MISS);
    }
    assert_true(api_stat(&api, "gpu.gds.reads") > 0);
    assert_int_equal(api_stat(&api, "gpu.gds.off"), 0);
    end(&api);
}

/* ---- off, or refused ---- */

static void assert_off(struct api *api, const char *why)
{
    char text[512];
    api_stat_text(api, "gpu.gds.state", text, sizeof(text));
    if (strncmp(text, "off: ", 5) != 0 || strstr(text, why) == NULL)
        fail_msg("%s", text);
}

/* auto runs without it, required is refused, and both say why. */
static void not_to_be_had(const char *library, const char *why)
{
    static const char *const settings[] = {"gds=auto,dram=16MiB,threads=1", REQUIRED};
    for (int required = 0; required < 2; required++) {
        struct api api;
        char text[256];
        start(&api, &small, settings[required]);
        if (library != NULL)
            api.gds_library = library;
        int rc = api_try_register(&api);
        api_stat_text(&api, "gpu.state", text, sizeof(text));
        assert_off(&api, why);
        if (required) {
            assert_int_equal(rc, KVT_E_UNSUPPORTED);
            assert_non_null(strstr(text, "gds=required"));
            assert_int_equal(api_stat(&api, "gpu.refused"), 1);
        } else {
            assert_int_equal(rc, 0);
            fill(&api, BLOCKS);
            assert_int_equal(api_store(&api, FIRST, BLOCKS, 0, 0, NULL), BLOCKS);
            assert_int_equal(kvt_flush(api.cache), 0);
            api_close(&api);
            api_open(&api);
            expect(&api, BLOCKS);
            load_all(&api);
            assert_int_equal(api_stat(&api, "gpu.gds.reads"), 0);
            assert_int_equal(api_stat(&api, "load.granted_direct"), 0);
            assert_int_equal(api_stat(&api, "load.granted_disk"), BLOCKS);
        }
        end(&api);
    }
}

static void test_absent(void **state)
{
    (void)state;
    not_to_be_had("/nonexistent/libcufile.so.0", "no libcufile on this machine");
    not_to_be_had(KVT_FAKE_CUFILE_OLD, "1.15");
}

static void test_refuses_registration(void **state)
{
    (void)state;
    cufile->handle_code = 5027;
    not_to_be_had(NULL, "refuses to register a file");
    cufile->handle_code = 0;
    cufile->buffer_code = 5030;
    not_to_be_had(NULL, "refuses to register GPU memory");
}

/* Nothing but the CPU's path: never what gds=required means; used by auto only where it is faster,
 * and then it works like any other. */
static void test_c46_compat_only(void **state)
{
    struct api api;
    char text[512];
    (void)state;
    cufile->path = FAKE_POSIX;
    start(&api, &small, REQUIRED);
    assert_int_equal(api_try_register(&api), KVT_E_UNSUPPORTED);
    assert_off(&api, "not a direct path");
    end(&api);
    start(&api, &small, "dram=16MiB,threads=1,gds=auto");
    api.gds_any = true;
    open_cold(&api);
    api_stat_text(&api, "gpu.gds.state", text, sizeof(text));
    assert_non_null(strstr(text, "compat: "));
    load_all(&api);
    assert_int_equal(api_stat(&api, "gpu.gds.reads"), BLOCKS);
    end(&api);
}

static void test_choice(void **state)
{
    struct kvt_gds_report r = {.verdict = KVT_GDS_DIRECT, .read_gbps = 5.0, .ordinary_gbps = 5.0};
    (void)state;
    assert_true(kvt_gds_wanted(KVT_PIN_SET_REQUIRED, &r));
    assert_false(kvt_gds_wanted(KVT_PIN_SET_AUTO, &r)); /* direct is not always faster */
    r.read_gbps = 5.3;
    assert_true(kvt_gds_wanted(KVT_PIN_SET_AUTO, &r));
    r.verdict = KVT_GDS_COMPAT;
    assert_true(kvt_gds_wanted(KVT_PIN_SET_AUTO, &r));
    assert_false(kvt_gds_wanted(KVT_PIN_SET_REQUIRED, &r));
    r.ordinary_gbps = 0; /* not known */
    assert_false(kvt_gds_wanted(KVT_PIN_SET_AUTO, &r));
    r.verdict = KVT_GDS_ABSENT;
    r.ordinary_gbps = 1;
    assert_false(kvt_gds_wanted(KVT_PIN_SET_AUTO, &r));
    assert_false(kvt_gds_wanted(KVT_PIN_SET_REQUIRED, &r));
}

/* Off by default, without a disk, and for loads by layers, which come through DRAM. */
static void test_not_used(void **state)
{
    struct api api;
    struct kvt_key keys[BLOCKS];
    uint32_t ids[BLOCKS];
    struct kvt_req *req;
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .layers = 1};
    (void)state;
    start(&api, &small, "dram=16MiB,threads=1");
    api_open(&api);
    assert_off(&api, "gds=off");
    end(&api);
    assert_true(api_init(&api, KVT_FAKE_CUDA, &small, REQUIRED, false));
    api.gds_library = KVT_FAKE_CUFILE;
    assert_int_equal(api_try_register(&api), KVT_E_UNSUPPORTED);
    assert_off(&api, "no disk root");
    end(&api);
    start(&api, &small, REQUIRED);
    open_cold(&api);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        keys[i] = api_key(FIRST + i);
        ids[i] = i;
    }
    assert_int_equal(kvt_load(api.ns, api.pool, keys, ids, BLOCKS, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    kvt_req_free(req);
    assert_true(api_same(&api));
    assert_int_equal(api_stat(&api, "gpu.gds.reads"), 0);
    end(&api);
}

/* ---- failures: every block comes back, by the detour ---- */

struct failure {
    const char *name, *counter;
    int read_code, short_by, wrong, does_nothing, handle_code;
    int reads_good;
};

static void fails(const struct failure *failure)
{
    struct api api;
    reset(NULL);
    start(&api, &small, REQUIRED);
    open_cold(&api);
    cufile->read_code = failure->read_code;
    cufile->reads_good = failure->reads_good;
    cufile->short_by = failure->short_by;
    cufile->wrong = failure->wrong;
    cufile->does_nothing = failure->does_nothing;
    cufile->handle_code = failure->handle_code;
    load_all(&api);
    if (api_stat(&api, failure->counter) == 0)
        fail_msg("%s: %s is 0", failure->name, failure->counter);
    assert_true(api_stat(&api, "gpu.gds.fallback") > 0);
    assert_int_equal(api_stat(&api, "gpu.gds.off"), 1);
    assert_non_null(strstr(api.log, "are switched off"));
    assert_off(&api, "in a row failed");
    assert_int_equal(api_stat(&api, "client.load_corrupt"), 0);
    assert_int_equal(api_stat(&api, "verify.checksum_fail"), 0); /* the disk's copies stay */
    uint64_t asked = api_stat(&api, "load.granted_direct");
    expect(&api, BLOCKS);
    load_all(&api);
    assert_int_equal(api_stat(&api, "load.granted_direct"), asked);
    end(&api);
}

static void test_failures(void **state)
{
    static const struct failure all[] = {
        {"EIO", "gpu.gds.errors", .read_code = EIO},
        {"EIO later", "gpu.gds.errors", .read_code = EIO, .reads_good = 20},
        {"cuFile's own", "gpu.gds.errors", .read_code = 5030, .reads_good = 3},
        {"short", "gpu.gds.short", .short_by = 4096},
        {"short by a byte", "gpu.gds.short", .short_by = 1},
        {"a wrong byte", "gpu.gds.wrong", .wrong = 1},
        {"does nothing", "gpu.gds.wrong", .does_nothing = 1},
        {"no file", "gpu.gds.errors", .handle_code = 5027},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        fails(&all[i]);
}

/* Two failures in a row, then good reads: it stays on. */
static void test_passing_failure(void **state)
{
    struct api api;
    (void)state;
    start(&api, &small, REQUIRED);
    open_cold(&api);
    cufile->short_by = 4096;
    assert_int_equal(api_load(&api, FIRST, 2, 0, NULL), 2);
    cufile->short_by = 0;
    load_all(&api);
    assert_int_equal(api_stat(&api, "gpu.gds.short"), 2);
    assert_int_equal(api_stat(&api, "gpu.gds.off"), 0);
    assert_int_equal(api_stat(&api, "gpu.gds.reads"), BLOCKS - 2); /* those two are in DRAM */
    cufile->short_by = 4096;
    assert_int_equal(api_load(&api, FIRST + 2, 2, 2, NULL), 2);
    assert_int_equal(api_stat(&api, "gpu.gds.off"), 0);
    end(&api);
}

/* A record that really is damaged on disk: the detour finds it, and it is a miss from then on. */
static void test_damaged_on_disk(void **state)
{
    struct api api;
    int32_t status[BLOCKS];
    char path[256];
    (void)state;
    start(&api, &small, REQUIRED);
    open_cold(&api);
    struct kvt_key want = api_key(FIRST + 5);
    bool flipped = false;
    for (unsigned segment = 0; segment < 8 && !flipped; segment++) {
        snprintf(path, sizeof(path), "%s/seg-%08x", api.dir, segment);
        FILE *file = fopen(path, "r+b");
        struct kvt_record_header header;
        for (long at = 0; file != NULL && !flipped && fseek(file, at, SEEK_SET) == 0 &&
                          fread(&header, sizeof(header), 1, file) == 1;
             at += 4096) {
            if (header.magic != KVT_RECORD_MAGIC ||
                memcmp(header.key.hash, want.hash, want.hash_len) != 0)
                continue;
            fseek(file, at + 1000, SEEK_SET);
            int byte = fgetc(file);
            fseek(file, at + 1000, SEEK_SET);
            fputc(byte ^ 16, file);
            flipped = true;
        }
        if (file != NULL)
            fclose(file);
    }
    assert_true(flipped);
    assert_int_equal(api_load(&api, FIRST, BLOCKS, 0, status), BLOCKS - 1);
    assert_true(status[5] == KVT_E_CORRUPT || status[5] == KVT_E_MISS);
    assert_int_equal(api_stat(&api, "gpu.gds.wrong"), 1);
    assert_int_equal(api_stat(&api, "gpu.gds.fallback"), 1);
    assert_int_equal(api_load(&api, FIRST, BLOCKS, 0, status), 5);
    assert_int_equal(status[5], KVT_E_MISS);
    end(&api);
}

/* ---- requests ---- */

static void test_cancel_and_close(void **state)
{
    struct api api;
    struct kvt_key keys[BLOCKS];
    uint32_t ids[BLOCKS];
    struct kvt_req *reqs[4];
    (void)state;
    start(&api, &small, REQUIRED);
    open_cold(&api);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        keys[i] = api_key(FIRST + i);
        ids[i] = i;
    }
    for (int round = 0; round < 12; round++) {
        struct kvt_load_opts opts = {.struct_size = sizeof(opts),
                                     .deadline_ns = round % 3 == 2 ? 200000 : 0};
        cufile->read_code = round == 6 ? EIO : 0; /* nothing is being read now */
        for (size_t r = 0; r < 4; r++)
            assert_int_equal(kvt_load(api.ns, api.pool, keys, ids, BLOCKS, &opts, &reqs[r]), 0);
        for (size_t r = 0; r < 4; r += 2)
            kvt_req_cancel(reqs[r]);
        for (size_t r = 0; r < 4; r++) {
            assert_int_equal(kvt_req_wait(reqs[r], -1), 1);
            for (uint32_t i = 0; i < BLOCKS; i++) {
                int32_t status = kvt_req_status(reqs[r], NULL)[i];
                assert_true(status == 0 || status == KVT_E_CANCELED || status == KVT_E_DEADLINE);
            }
            kvt_req_free(reqs[r]);
        }
    }
    assert_int_equal(api_stat(&api, "client.bad_move"), 0);
    assert_int_equal(api_stat(&api, "client.bad_reply"), 0);
    load_all(&api);
    assert_int_equal(kvt_load(api.ns, api.pool, keys, ids, BLOCKS, NULL, &reqs[0]), 0);
    kvt_close(api.cache); /* with a load in flight */
    api.cache = NULL;
    api_free(&api);
    assert_nothing_left();
}

/* Some reads are under way, and what else was granted waits for a thread of the reader: a request
 * that is cancelled then has none of it read, and none of its pages written. */
static void test_cancel_ends_the_reads(void **state)
{
    struct api api;
    struct kvt_key keys[BLOCKS];
    uint32_t ids[BLOCKS];
    struct kvt_req *req;
    (void)state;
    start(&api, &small, REQUIRED);
    open_cold(&api);
    api_poison(&api); /* nothing is to come */
    for (uint32_t i = 0; i < BLOCKS; i++) {
        keys[i] = api_key(FIRST + i);
        ids[i] = i;
    }
    atomic_store(&cufile->hold, 1);
    assert_int_equal(kvt_load(api.ns, api.pool, keys, ids, BLOCKS, NULL, &req), 0);
    while (atomic_load(&cufile->held) == 0 || api_stat(&api, "load.granted_direct") < BLOCKS)
        rig_sleep_ms(1);
    kvt_req_cancel(req);
    atomic_store(&cufile->hold, 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_int_equal(kvt_req_status(req, NULL)[i], KVT_E_CANCELED);
    kvt_req_free(req);
    assert_true(cufile->reads > 0 && cufile->reads < (int)BLOCKS / 2);
    assert_int_equal(api_stat(&api, "gpu.gds.fallback"), 0);
    assert_true(api_same(&api));
    expect(&api, BLOCKS);
    load_all(&api);
    end(&api);
}

/* The device is lost under the reads: statuses, and an end. */
static void test_device_lost(void **state)
{
    struct api api;
    int32_t status[BLOCKS];
    (void)state;
    start(&api, &small, REQUIRED);
    open_cold(&api);
    fake->fail = "cuStreamSynchronize";
    fake->fail_after = 5;
    fake->fail_result = 700;
    assert_true(api_load(&api, FIRST, BLOCKS, 0, status) < BLOCKS);
    for (uint32_t i = 0; i < BLOCKS; i++)
        assert_true(status[i] == 0 || status[i] == KVT_E_DEVICE);
    assert_int_equal(api_stat(&api, "gpu.lost"), 1);
    assert_int_equal(api_stat(&api, "client.bad_move"), 0);
    fake->fail = NULL;
    api_free(&api);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_round_trip, reset),
        cmocka_unit_test_setup(test_mixed_maps, reset),
        cmocka_unit_test_setup(test_dram_and_direct_at_once, reset),
        cmocka_unit_test_setup(test_more_than_the_buffer, reset),
        cmocka_unit_test_setup(test_recycled_segments, reset),
        cmocka_unit_test_setup(test_absent, reset),
        cmocka_unit_test_setup(test_refuses_registration, reset),
        cmocka_unit_test_setup(test_c46_compat_only, reset),
        cmocka_unit_test_setup(test_choice, reset),
        cmocka_unit_test_setup(test_not_used, reset),
        cmocka_unit_test_setup(test_failures, reset),
        cmocka_unit_test_setup(test_passing_failure, reset),
        cmocka_unit_test_setup(test_damaged_on_disk, reset),
        cmocka_unit_test_setup(test_cancel_and_close, reset),
        cmocka_unit_test_setup(test_cancel_ends_the_reads, reset),
        cmocka_unit_test_setup(test_device_lost, reset),
    };
    if (!kvt_gpu_kernels_built()) {
        print_message("skipped: no GPU kernels in this build, so no device opens\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, load_fakes, NULL);
}
