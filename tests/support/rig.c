/* See rig.h. */
#include "support/rig.h"

#include "support/daemon_rig.h"

#include <dirent.h>
#include <errno.h>
#include <ftw.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/rng.h"

uint64_t rig_seed(void)
{
    const char *text = getenv("KVT_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : 20261129u;
    printf("           seed %llu\n", (unsigned long long)seed);
    return seed;
}

void rig_dir_make(char *dir, size_t len)
{
    const char *base = getenv("TMPDIR");
    snprintf(dir, len, "%s/kvt-test-XXXXXX", base && base[0] ? base : "/tmp");
    assert_non_null(mkdtemp(dir));
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

void rig_dir_remove(const char *dir)
{
    if (dir[0] != '\0')
        (void)nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

struct rig_shape rig_shape_small(uint32_t pages)
{
    return (struct rig_shape){
        .layers = 1, .heads = 2, .dim = 64, .tokens = 16, .pages = pages, .dtype = KVT_DTYPE_BF16};
}

struct rig_shape rig_shape_large(uint32_t pages)
{
    return (struct rig_shape){
        .layers = 8, .heads = 8, .dim = 64, .tokens = 16, .pages = pages, .dtype = KVT_DTYPE_BF16};
}

static size_t elem_bytes(const struct rig *rig)
{
    return rig->shape.dtype == KVT_DTYPE_F32 ? 4 : 2;
}

static void place_parts(struct rig *rig)
{
    const struct rig_shape *shape = &rig->shape;
    size_t row = shape->dim * elem_bytes(rig) + shape->row_gap;
    size_t head = row * shape->tokens, page = head * shape->heads;
    assert_true(shape->layers * 2 <= RIG_PARTS_MAX);
    for (uint32_t i = 0; i < shape->layers * 2; i++) {
        size_t bytes = page * shape->pages + shape->base_offset;
        rig->memory[i] = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        assert_non_null(rig->memory[i]);
        memset(rig->memory[i], 0, (bytes + 4095) / 4096 * 4096);
        rig->parts[i] = (struct kvt_part){.kind = i % 2 ? KVT_PART_V : KVT_PART_K,
                                          .dtype = (uint8_t)shape->dtype,
                                          .layer = i / 2,
                                          .heads = shape->heads,
                                          .head_dim = shape->dim};
        rig->places[i] =
            (struct kvt_part_place){rig->memory[i] + shape->base_offset, (int64_t)page,
                                    (int64_t)head, (int64_t)row, (int64_t)elem_bytes(rig)};
    }
    rig->layout =
        (struct kvt_layout){sizeof(rig->layout), shape->tokens, shape->layers * 2, rig->parts};
    rig->desc = (struct kvt_pool_desc){sizeof(rig->desc), KVT_DEVICE_HOST, shape->pages,
                                       shape->layers * 2, rig->places};
}

void rig_init(struct rig *rig, const struct rig_shape *shape, const char *config,
              const char *disk_cap)
{
    memset(rig, 0, sizeof(*rig));
    rig->shape = *shape;
    place_parts(rig);
    kvt_identity_init(&rig->identity);
    rig->identity.engine = "test";
    rig->identity.key_scheme = "test";
    rig->identity.model = "model";
    snprintf(rig->config, sizeof(rig->config), "%s", config);
    if (disk_cap != NULL) {
        rig_dir_make(rig->dir, sizeof(rig->dir));
        snprintf(rig->disk_cap, sizeof(rig->disk_cap), "%s", disk_cap);
    }
}

static void collect_log(void *arg, int level, const char *message)
{
    struct rig *rig = arg;
    size_t used = strlen(rig->log);
    snprintf(rig->last, sizeof(rig->last), "%s", message);
    if (level > 1)
        return;
    rig->warnings++;
    snprintf(rig->log + used, sizeof(rig->log) - used, "%s\n", message);
}

__attribute__((constructor)) static void filter_tests(void)
{
    if (getenv("KVT_TEST_FILTER") != NULL)
        cmocka_set_test_filter(getenv("KVT_TEST_FILTER"));
}

/* Options that are a store's; the others stay the client's. */
static bool is_store_option(const char *option)
{
    static const char *const keys[] = {
        "dram=",   "staging=", "write_queue=", "write=",   "pin_max=",  "io=",
        "direct=", "scrub=",   "io_threads=",  "fds_max=", "admission="};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        if (strncmp(option, keys[i], strlen(keys[i])) == 0)
            return true;
    return false;
}

/* A daemon with the store's options; what is left for the client goes to config. */
static void daemon_under(struct rig *rig, char *config, size_t len)
{
    char options[sizeof(rig->config)], words[1024] = "", *rest;
    size_t at = 0, used;
    snprintf(options, sizeof(options), "%s", rig->config);
    if (rig->dir[0] != '\0')
        at = (size_t)snprintf(words, sizeof(words), "--disk %s:%s ", rig->dir, rig->disk_cap);
    rig->daemon = calloc(1, sizeof(*rig->daemon));
    assert_non_null(rig->daemon);
    used = 0;
    for (char *word = strtok_r(options, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        if (is_store_option(word))
            at += (size_t)snprintf(words + at, sizeof(words) - at, "--%s ", word);
        else
            used += (size_t)snprintf(config + used, len - used, "%s,", word);
    }
    daemon_init(rig->daemon, words);
    daemon_start(rig->daemon);
    snprintf(config + used, len - used, "%s", rig->daemon->config);
}

int rig_try_open(struct rig *rig)
{
    struct kvt_config *config;
    char disk[512], options[1024];
    const bool daemon = getenv("KVT_RIG_DAEMON") != NULL && strstr(rig->config, "store=") == NULL;
    snprintf(options, sizeof(options), "%s", rig->config);
    if (daemon)
        daemon_under(rig, options, sizeof(options));
    assert_int_equal(kvt_config_new(&config), 0);
    if (rig->tweak != NULL)
        rig->tweak(config);
    if (kvt_config_set_all(config, options) != 0)
        fail_msg("%s", kvt_config_error(config));
    if (rig->dir[0] != '\0' && !daemon) {
        snprintf(disk, sizeof(disk), "%s:%s", rig->dir, rig->disk_cap);
        assert_int_equal(kvt_config_set(config, "disk", disk), 0);
    }
    rig->log[0] = '\0';
    rig->warnings = 0;
    kvt_config_log(config, collect_log, rig);
    rig->cache = NULL;
    int rc = kvt_open(config, &rig->cache, rig->error, sizeof(rig->error));
    kvt_config_free(config);
    return rc;
}

void rig_open(struct rig *rig)
{
    int rc = rig_try_open(rig);
    if (rc != 0)
        fail_msg("kvt_open: %d %s", rc, rig->error);
    rc = kvt_ns_open(rig->cache, &rig->identity, &rig->layout, &rig->ns);
    if (rc != 0)
        fail_msg("kvt_ns_open: %d %s", rc, kvt_strerror(rc));
    assert_int_equal(kvt_pool_register(rig->cache, &rig->layout, &rig->desc, &rig->pool), 0);
}

void rig_close(struct rig *rig)
{
    if (rig->cache == NULL)
        return;
    kvt_pool_unregister(rig->pool);
    kvt_ns_close(rig->ns);
    kvt_close(rig->cache);
    rig->pool = NULL;
    rig->ns = NULL;
    rig->cache = NULL;
    if (rig->daemon != NULL) {
        if (rig->daemon->pid > 0)
            assert_int_equal(daemon_stop(rig->daemon), 0);
        daemon_free(rig->daemon);
        free(rig->daemon);
        rig->daemon = NULL;
    }
}

void rig_reopen(struct rig *rig)
{
    rig_close(rig);
    rig_open(rig);
}

void rig_free(struct rig *rig)
{
    rig_close(rig);
    rig_dir_remove(rig->dir);
    for (uint32_t i = 0; i < RIG_PARTS_MAX; i++)
        free(rig->memory[i]);
}

struct kvt_key rig_key(uint64_t seed)
{
    struct kvt_rng rng = {seed ^ 0x6b6579u};
    struct kvt_key key;
    memset(&key, 0, sizeof(key));
    for (unsigned i = 0; i < 4; i++) {
        uint64_t word = kvt_rng_next(&rng);
        memcpy(key.hash + 8 * i, &word, 8);
    }
    key.hash_len = 32;
    return key;
}

static uint8_t *row_at(const struct rig *rig, uint32_t part, uint32_t page, uint32_t head,
                       uint32_t token)
{
    const struct kvt_part_place *place = &rig->places[part];
    return (uint8_t *)place->base + page * place->stride_block + head * place->stride_head +
           token * place->stride_token;
}

typedef bool (*row_fn)(void *arg, uint8_t *row, size_t bytes, uint32_t part);

/* Call fn for every row of a page, in a fixed order; false stops. */
static bool each_row(const struct rig *rig, uint32_t page, row_fn fn, void *arg)
{
    assert_true(page < rig->shape.pages);
    for (uint32_t part = 0; part < rig->layout.part_count; part++)
        for (uint32_t head = 0; head < rig->shape.heads; head++)
            for (uint32_t token = 0; token < rig->shape.tokens; token++)
                if (!fn(arg, row_at(rig, part, page, head, token), rig->shape.dim * elem_bytes(rig),
                        part))
                    return false;
    return true;
}

static bool fill_row(void *arg, uint8_t *row, size_t bytes, uint32_t part)
{
    uint64_t words[RIG_SIZE_MAX / 8]; /* whole rows at once: sanitizers look at each access */
    (void)part;
    assert_true(bytes <= sizeof(words));
    for (size_t i = 0; i < bytes; i += 8)
        words[i / 8] = kvt_rng_next(arg);
    memcpy(row, words, bytes);
    return true;
}

static bool same_row(void *arg, uint8_t *row, size_t bytes, uint32_t part)
{
    uint8_t want[RIG_SIZE_MAX];
    assert_true(bytes <= sizeof(want));
    fill_row(arg, want, bytes, part);
    return memcmp(row, want, bytes) == 0;
}

void rig_fill(struct rig *rig, uint32_t page, uint64_t seed)
{
    struct kvt_rng rng = {seed};
    (void)each_row(rig, page, fill_row, &rng);
}

bool rig_same(const struct rig *rig, uint32_t page, uint64_t seed)
{
    struct kvt_rng rng = {seed};
    return each_row(rig, page, same_row, &rng);
}

/* About N(0, 1): the sum of four uniforms; as bf16 by truncation. */
static bool smooth_row(void *arg, uint8_t *row, size_t bytes, uint32_t part)
{
    (void)part;
    for (size_t i = 0; i < bytes; i += 2) {
        uint64_t word = kvt_rng_next(arg);
        float x = 0;
        for (unsigned j = 0; j < 4; j++)
            x += (float)(word >> (16 * j) & 0xffff) / 65536.0f - 0.5f;
        x *= 1.7320508f;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        uint16_t half = (uint16_t)(bits >> 16);
        memcpy(row + i, &half, 2);
    }
    return true;
}

void rig_fill_smooth(struct rig *rig, uint32_t page, uint64_t seed)
{
    struct kvt_rng rng = {seed};
    assert_int_equal(rig->shape.dtype, KVT_DTYPE_BF16);
    (void)each_row(rig, page, smooth_row, &rng);
}

static bool poison_row(void *arg, uint8_t *row, size_t bytes, uint32_t part)
{
    (void)part;
    memset(row, *(const uint8_t *)arg, bytes);
    return true;
}

static bool poisoned_row(void *arg, uint8_t *row, size_t bytes, uint32_t part)
{
    (void)part;
    return row[0] == *(const uint8_t *)arg && memcmp(row, row + 1, bytes - 1) == 0;
}

void rig_poison(struct rig *rig, uint32_t page, uint8_t byte)
{
    (void)each_row(rig, page, poison_row, &byte);
}

bool rig_poisoned(const struct rig *rig, uint32_t page, uint8_t byte)
{
    return each_row(rig, page, poisoned_row, &byte);
}

static bool copy_row(void *arg, uint8_t *row, size_t bytes, uint32_t part)
{
    uint8_t **out = arg;
    (void)part;
    memcpy(*out, row, bytes);
    *out += bytes;
    return true;
}

size_t rig_block_bytes(const struct rig *rig)
{
    return (size_t)rig->layout.part_count * rig->shape.heads * rig->shape.tokens * rig->shape.dim *
           elem_bytes(rig);
}

void rig_page_bytes(const struct rig *rig, uint32_t page, uint8_t *out)
{
    (void)each_row(rig, page, copy_row, &out);
}

static struct kvt_key *keys_of(uint64_t first_seed, uint32_t n, uint32_t **ids)
{
    struct kvt_key *keys = calloc(n + 1, sizeof(*keys));
    *ids = calloc(n + 1, sizeof(**ids));
    assert_non_null(keys);
    assert_non_null(*ids);
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = rig_key(first_seed + i);
        (*ids)[i] = i;
    }
    return keys;
}

size_t rig_store(struct rig *rig, uint64_t first_seed, uint32_t n, uint32_t first_pos,
                 int32_t *status)
{
    uint32_t *ids;
    struct kvt_key *keys = keys_of(first_seed, n, &ids), parent = rig_key(first_seed - 1);
    struct kvt_store_opts opts = {.struct_size = sizeof(opts),
                                  .first_pos = first_pos,
                                  .parent = first_pos ? &parent : NULL,
                                  .exact = 1};
    struct kvt_req *req;
    size_t ok = 0, count;
    for (uint32_t i = 0; i < n; i++)
        rig_fill(rig, i, first_seed + i);
    assert_int_equal(kvt_pool_reset_origin(rig->pool, ids, n), 0);
    assert_int_equal(kvt_store(rig->ns, rig->pool, keys, ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, 60000000000), 1);
    const int32_t *got = kvt_req_status(req, &count);
    assert_int_equal(count, n);
    for (uint32_t i = 0; i < n; i++) {
        ok += got[i] == 0 || got[i] == KVT_E_EXISTS;
        if (status != NULL)
            status[i] = got[i];
    }
    kvt_req_free(req);
    free(keys);
    free(ids);
    return ok;
}

size_t rig_load(struct rig *rig, uint64_t first_seed, uint32_t n, int32_t *status)
{
    uint32_t *ids;
    struct kvt_key *keys = keys_of(first_seed, n, &ids);
    struct kvt_req *req;
    size_t ok = 0, count;
    for (uint32_t i = 0; i < n; i++)
        rig_poison(rig, i, 0xa5);
    assert_int_equal(kvt_load(rig->ns, rig->pool, keys, ids, n, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, 60000000000), 1);
    const int32_t *got = kvt_req_status(req, &count);
    assert_int_equal(count, n);
    for (uint32_t i = 0; i < n; i++) {
        if (got[i] == 0 && !rig_same(rig, i, first_seed + i))
            fail_msg("block %u of %llu: other bytes", i, (unsigned long long)first_seed);
        if (got[i] != 0 && !rig_poisoned(rig, i, 0xa5))
            fail_msg("block %u: status %d, page touched", i, got[i]);
        ok += got[i] == 0;
        if (status != NULL)
            status[i] = got[i];
    }
    kvt_req_free(req);
    free(keys);
    free(ids);
    return ok;
}

long rig_lookup(struct rig *rig, uint64_t first_seed, uint32_t n)
{
    uint32_t *ids;
    struct kvt_key *keys = keys_of(first_seed, n, &ids);
    long run = kvt_lookup(rig->ns, keys, n, NULL, NULL);
    free(keys);
    free(ids);
    return run;
}

uint64_t rig_stat(struct rig *rig, const char *name)
{
    uint64_t value = 0;
    if (kvt_stats_get(rig->cache, name, &value) != 0)
        fail_msg("no statistic %s", name);
    return value;
}

struct text_arg {
    const char *name;
    char *out;
    size_t len;
};

static void find_text(void *arg, const char *name, uint64_t value, const char *text,
                      const char *help)
{
    struct text_arg *find = arg;
    (void)value;
    (void)help;
    if (text != NULL && strcmp(name, find->name) == 0)
        snprintf(find->out, find->len, "%s", text);
}

void rig_stat_text(struct rig *rig, const char *name, char *out, size_t len)
{
    struct text_arg find = {name, out, len};
    out[0] = '\0';
    assert_int_equal(kvt_stats_each(rig->cache, find_text, &find), 0);
}

static uint64_t walk_bytes;
static unsigned walk_files;

static int walk_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)path;
    (void)ftw;
    if (flag == FTW_F) {
        walk_bytes += (uint64_t)st->st_size;
        walk_files++;
    }
    return 0;
}

uint64_t rig_dir_bytes(const char *dir, unsigned *files)
{
    walk_bytes = 0;
    walk_files = 0;
    assert_int_equal(nftw(dir, walk_one, 16, FTW_PHYS), 0);
    if (files != NULL)
        *files = walk_files;
    return walk_bytes;
}

unsigned rig_open_fds(void)
{
    unsigned count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir) != NULL)
        count++;
    closedir(dir);
    return count;
}

int64_t rig_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void rig_sleep_ms(unsigned ms)
{
    struct timespec time = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&time, NULL);
}
