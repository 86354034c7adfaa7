/* See api_rig.h. */
#include "gpu/api_rig.h"

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "client/client.h"
#include "codec/block.h"
#include "codec/half.h"
#include "gpu/driver.h"
#include "support/rig.h"

/* ---- the fake driver ---- */

struct fake_cuda *fake;

int api_fake_load(void **state)
{
    (void)state;
    void *library = dlopen(KVT_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    fake = library != NULL ? dlsym(library, "fake_cuda") : NULL;
    return fake != NULL ? 0 : -1;
}

int api_fake_reset(void **state)
{
    (void)state;
    memset(fake, 0, sizeof(*fake));
    fake->version = 12040;
    fake->device_count = 1;
    fake->capability = 90;
    fake->seed = rig_seed();
    return 0;
}

void api_fake_nothing_left(void)
{
    assert_int_equal(fake->retained, 0);
    assert_int_equal(fake->context_depth, 0);
    assert_int_equal(fake->memory, 0);
    assert_int_equal(fake->host_memory, 0);
    assert_int_equal(fake->registered, 0);
    assert_int_equal(fake->streams, 0);
    assert_int_equal(fake->events, 0);
    assert_int_equal(fake->modules, 0);
    assert_int_equal(fake->out_of_context, 0);
}

/* ---- the engine ---- */

static size_t element_bytes(const struct api *api)
{
    return api->shape.dtype == KVT_DTYPE_F32 ? 4 : 2;
}

/* Strides of one part; returns the bytes it takes for all pages. */
static size_t place_part(const struct api *api, uint32_t i, size_t at, struct kvt_part_place *place)
{
    const struct api_shape *s = &api->shape;
    size_t element = element_bytes(api), row = s->dim * element, part = row * s->heads * s->tokens;
    size_t parts = s->order == API_PACKED ? 2 : 1;
    place->base = (void *)(at + (s->order == API_PACKED && i % 2 ? part : 0));
    place->stride_elem = (int64_t)element;
    place->stride_block = (int64_t)(part * parts);
    place->stride_token = (int64_t)(s->order == API_HND ? row : row * s->heads);
    place->stride_head = (int64_t)(s->order == API_HND ? row * s->tokens : row);
    return part * parts * s->pages;
}

static void place_parts(struct api *api)
{
    const struct api_shape *s = &api->shape;
    uint32_t count = s->layers * (s->mla ? 1 : 2);
    size_t at = 0;
    assert_true(count <= API_PARTS_MAX && s->pages <= API_PAGES_MAX);
    for (uint32_t i = 0; i < count; i++) {
        api->parts[i] = (struct kvt_part){
            .kind = s->mla  ? KVT_PART_MLA
                    : i % 2 ? KVT_PART_V
                            : KVT_PART_K,
            .dtype = (uint8_t)s->dtype,
            .layer = s->mla ? i : i / 2,
            .heads = s->heads,
            .head_dim = s->dim,
        };
        size_t bytes = place_part(api, i, at, &api->device[i]);
        if (s->order != API_PACKED || s->mla || i % 2)
            at += bytes;
    }
    api->bytes = at;
    api->layout = (struct kvt_layout){sizeof(api->layout), s->tokens, count, api->parts};
    api->host_desc =
        (struct kvt_pool_desc){sizeof(api->host_desc), KVT_DEVICE_HOST, s->pages, count, api->host};
    api->device_desc = api->host_desc;
    api->device_desc.device = 0;
    api->device_desc.places = api->device;
}

static bool start_driver(struct api *api)
{
    kvt_cu_device device;
    char reason[256];
    if (kvt_cuda_load(&api->cuda, api->library, reason, sizeof(reason)) != 0) {
        print_message("%s\n", reason);
        return false;
    }
    assert_int_equal(api->cuda.device_get(&device, 0), 0);
    assert_int_equal(api->cuda.context_retain(&api->context, device), 0);
    return true;
}

bool api_init(struct api *api, const char *library, const struct api_shape *shape,
              const char *config, bool disk)
{
    memset(api, 0, sizeof(*api));
    api->shape = *shape;
    api->library = library;
    place_parts(api);
    if (!start_driver(api))
        return false;
    api_enter(api);
    assert_int_equal(api->cuda.stream_create(&api->stream, KVT_CU_STREAM_NON_BLOCKING, 0), 0);
    assert_int_equal(api->cuda.memory_alloc(&api->memory, api->bytes), 0);
    api_leave(api);
    api->mirror = aligned_alloc(4096, (api->bytes + 4095) / 4096 * 4096);
    api->back = malloc(api->bytes);
    assert_true(api->mirror != NULL && api->back != NULL);
    for (uint32_t i = 0; i < api->layout.part_count; i++) {
        size_t offset = (uintptr_t)api->device[i].base;
        api->host[i] = api->device[i];
        api->host[i].base = api->mirror + offset;
        api->device[i].base = (void *)(uintptr_t)(api->memory + offset);
    }
    memset(api->mirror, 0, api->bytes);
    kvt_identity_init(&api->identity);
    api->identity.engine = "test";
    api->identity.key_scheme = "test";
    api->identity.model = shape->name;
    snprintf(api->config, sizeof(api->config), "%s", config);
    if (disk)
        rig_dir_make(api->dir, sizeof(api->dir));
    return true;
}

void api_free(struct api *api)
{
    kvt_cu_device device;
    api_close(api);
    rig_dir_remove(api->dir);
    if (api->cuda.context_push(api->context) == KVT_CU_OK) { /* a lost device refuses most */
        (void)api->cuda.memory_free(api->memory);
        (void)api->cuda.stream_destroy(api->stream);
        api_leave(api);
    }
    if (api->cuda.device_get(&device, 0) == KVT_CU_OK)
        (void)api->cuda.context_release(device);
    kvt_cuda_unload(&api->cuda);
    free(api->mirror);
    free(api->back);
}

static void collect_log(void *arg, int level, const char *message)
{
    struct api *api = arg;
    size_t used = strlen(api->log);
    if (level <= 1)
        snprintf(api->log + used, sizeof(api->log) - used, "%s\n", message);
}

int api_try_register(struct api *api)
{
    struct kvt_config *config;
    char error[512] = "", disk[256];
    assert_int_equal(kvt_config_new(&config), 0);
    if (kvt_config_set_all(config, api->config) != 0)
        fail_msg("%s", kvt_config_error(config));
    if (api->dir[0] != '\0') {
        snprintf(disk, sizeof(disk), "%s:%s", api->dir,
                 api->disk_size != NULL ? api->disk_size : "1GiB");
        assert_int_equal(kvt_config_set(config, "disk", disk), 0);
    }
    kvt_config_log(config, collect_log, api);
    int rc = kvt_open(config, &api->cache, error, sizeof(error));
    kvt_config_free(config);
    if (rc != 0)
        fail_msg("kvt_open: %d %s", rc, error);
    api->cache->gpu_library = api->library;
    api->cache->gds_library = api->gds_library;
    api->cache->gds_any = api->gds_any;
    api->cache->gpu_tune_runs = api->tune_runs;
    api->cache->gpu_tune_clock = api->tune_clock;
    api->cache->gds_probe_bytes = 1u << 20; /* what is proved with; nobody measures here */
    assert_int_equal(kvt_ns_open(api->cache, &api->identity, &api->layout, &api->ns), 0);
    return kvt_pool_register(api->cache, &api->layout, &api->device_desc, &api->pool);
}

void api_open(struct api *api)
{
    int rc = api_try_register(api);
    if (rc != 0)
        fail_msg("kvt_pool_register: %s; %s", kvt_strerror(rc), api->log);
}

void api_close(struct api *api)
{
    if (api->cache == NULL)
        return;
    kvt_pool_unregister(api->pool);
    kvt_ns_close(api->ns);
    kvt_close(api->cache);
    api->pool = NULL;
    api->ns = NULL;
    api->cache = NULL;
}

void api_enter(struct api *api)
{
    assert_int_equal(api->cuda.context_push(api->context), 0);
}

void api_leave(struct api *api)
{
    kvt_cu_context ours;
    (void)api->cuda.context_pop(&ours);
}

/* ---- numbers ---- */

static float gauss(struct kvt_rng *rng)
{
    float sum = -4.0f;
    for (int i = 0; i < 8; i++)
        sum += (float)(kvt_rng_next(rng) >> 40) * 0x1p-24f;
    return sum;
}

static float number(struct kvt_rng *rng, uint32_t element, enum api_values values, bool wild)
{
    float x = gauss(rng) + (element % 19 == 0 ? 6.0f : 0.0f);
    if (wild && values == API_ROUGH) /* more channels with offsets than a level has room for */
        return x + (element % 2 ? 8.0f : -5.0f) * (float)(1 + element % 7);
    if (wild && values == API_NAN && kvt_rng_below(rng, 200) == 0)
        return NAN;
    return x;
}

static void put(uint8_t *at, int dtype, float x)
{
    uint16_t half = dtype == KVT_DTYPE_BF16 ? kvt_float_to_bf16(x) : kvt_float_to_f16(x);
    if (dtype == KVT_DTYPE_F32)
        memcpy(at, &x, 4);
    else
        memcpy(at, &half, 2);
}

void api_fill(struct api *api, uint32_t page, uint64_t seed, enum api_values values)
{
    struct kvt_rng rng = {seed * 2654435761u + 1};
    bool wild = values != API_SMOOTH && kvt_rng_below(&rng, 3) == 0;
    for (uint32_t p = 0; p < api->layout.part_count; p++) {
        const struct kvt_part_place *place = &api->host[p];
        for (uint32_t h = 0; h < api->shape.heads; h++)
            for (uint32_t t = 0; t < api->shape.tokens; t++)
                for (uint32_t e = 0; e < api->shape.dim; e++)
                    put((uint8_t *)place->base + place->stride_block * page +
                            place->stride_head * h + place->stride_token * t +
                            place->stride_elem * e,
                        api->shape.dtype, number(&rng, e, values, wild));
    }
}

void api_upload(struct api *api)
{
    api_enter(api);
    assert_int_equal(
        api->cuda.copy_to_device_async(api->memory, api->mirror, api->bytes, api->stream), 0);
    assert_int_equal(api->cuda.stream_sync(api->stream), 0);
    api_leave(api);
}

void api_poison(struct api *api)
{
    memset(api->mirror, 0x5a, api->bytes);
    api_upload(api);
}

bool api_same(struct api *api)
{
    api_enter(api);
    assert_int_equal(api->cuda.copy_to_host_async(api->back, api->memory, api->bytes, api->stream),
                     0);
    assert_int_equal(api->cuda.stream_sync(api->stream), 0);
    api_leave(api);
    return memcmp(api->back, api->mirror, api->bytes) == 0;
}

int api_coded(struct api *api, uint32_t page, int level)
{
    size_t bytes = kvt_payload_bytes(&api->layout, 0, KVT_LEVEL_RAW) * 2;
    uint8_t *payload = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    size_t size = 0;
    int rc = KVT_E_GUARD;
    assert_non_null(payload);
    for (level--; rc == KVT_E_GUARD && level < KVT_LEVEL_RAW;) {
        level++;
        size = kvt_payload_bytes(&api->layout, 0, level);
        rc = kvt_encode_block_by(&kvt_codec_scalar, &api->layout, 0, level, &api->host_desc, page,
                                 payload, size, 1, NULL);
    }
    if (rc == KVT_E_NONFINITE) {
        level = KVT_LEVEL_RAW;
        size = kvt_payload_bytes(&api->layout, 0, level);
        rc = kvt_encode_block_by(&kvt_codec_scalar, &api->layout, 0, level, &api->host_desc, page,
                                 payload, size, 1, NULL);
    }
    assert_int_equal(rc, 0);
    assert_int_equal(kvt_decode_block(&api->layout, 0, level, payload, size, &api->host_desc, page),
                     0);
    free(payload);
    return level;
}

/* ---- requests ---- */

struct kvt_key api_key(uint64_t seed)
{
    return rig_key(seed);
}

static size_t finish(struct kvt_req *req, int32_t *status)
{
    size_t n, good = 0;
    assert_int_equal(kvt_req_wait(req, -1), 1);
    const int32_t *all = kvt_req_status(req, &n);
    for (size_t i = 0; i < n; i++) {
        good += all[i] == 0 || all[i] == KVT_E_EXISTS;
        if (status != NULL)
            status[i] = all[i];
    }
    kvt_req_free(req);
    return good;
}

static void make_chain(uint64_t first, uint32_t n, uint32_t page, struct kvt_key *keys,
                       uint32_t *ids)
{
    assert_true(n <= API_PAGES_MAX);
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = api_key(first + i);
        ids[i] = page + i;
    }
}

size_t api_store(struct api *api, uint64_t first, uint32_t n, uint32_t page, uint32_t first_pos,
                 int32_t *status)
{
    struct kvt_key keys[API_PAGES_MAX], parent = api_key(first - 1);
    uint32_t ids[API_PAGES_MAX];
    struct kvt_store_opts opts = {
        .struct_size = sizeof(opts), .first_pos = first_pos, .parent = first_pos ? &parent : NULL};
    struct kvt_req *req;
    make_chain(first, n, page, keys, ids);
    assert_int_equal(kvt_store(api->ns, api->pool, keys, ids, n, &opts, &req), 0);
    return finish(req, status);
}

size_t api_load(struct api *api, uint64_t first, uint32_t n, uint32_t page, int32_t *status)
{
    struct kvt_key keys[API_PAGES_MAX];
    uint32_t ids[API_PAGES_MAX];
    struct kvt_req *req;
    make_chain(first, n, page, keys, ids);
    assert_int_equal(kvt_load(api->ns, api->pool, keys, ids, n, NULL, &req), 0);
    return finish(req, status);
}

uint64_t api_stat(struct api *api, const char *name)
{
    uint64_t value;
    if (kvt_stats_get(api->cache, name, &value) != 0)
        fail_msg("no statistic %s", name);
    return value;
}

struct find_text {
    const char *name;
    char *out;
    size_t len;
};

static void find_text(void *arg, const char *name, uint64_t value, const char *text,
                      const char *help)
{
    struct find_text *find = arg;
    (void)value, (void)help;
    if (text != NULL && strcmp(name, find->name) == 0)
        snprintf(find->out, find->len, "%s", text);
}

void api_stat_text(struct api *api, const char *name, char *out, size_t len)
{
    struct find_text find = {name, out, len};
    out[0] = '\0';
    assert_int_equal(kvt_stats_each(api->cache, find_text, &find), 0);
}
