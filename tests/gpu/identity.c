/* See identity.h. One case: a random layout and pool, filled with one of several kinds of numbers;
 * some of its pages are evicted and compared with records made by the scalar codec; then records
 * (those, or random bytes) are restored into the device's pool and into a host copy, and both pools
 * are compared whole, so that stray writes show; then again by layers, over poisoned pools, looking
 * at the layers that are said to be there after each range. */
#include "gpu/identity.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/rng.h"
#include "codec/block.h"
#include "codec/half.h"
#include "codec/piece.h"
#include "format/record.h"
#include "gpu/gpu_internal.h"

#define POOL_BYTES (8u << 20)
#define SLOT_BYTES (8u << 20)
#define PARTS_MAX 6
#define BLOCKS_MAX 4

struct identity {
    struct kvt_gpu *gpu;
    kvt_cu_ptr pool;
    kvt_cu_ptr staged;              /* records, for the path that finds them on the device */
    uint8_t *host_pool, *back_pool; /* what the device pool should hold; a copy of it */
    uint8_t *slots;                 /* pinned */
    uint8_t *want;
    size_t pool_bytes_max;
};

struct shape {
    struct kvt_layout layout;
    struct kvt_part parts[PARTS_MAX];
    struct kvt_part_place device[PARTS_MAX], host[PARTS_MAX];
    struct kvt_pool_desc device_pool, host_pool;
    uint32_t blocks;
    uint16_t group;
    int level, guard, values;
    int mixed; /* a level for each head, behind a lead */
    uint8_t levels[PARTS_MAX * 8], lead[64];
    uint32_t lead_bytes;
    int reverse; /* records stand in memory against the order of the items */
    enum kvt_gpu_path path;
    size_t record_bytes, payload_bytes, pool_bytes;
};

struct identity *identity_new(struct kvt_gpu *gpu)
{
    struct identity *id = calloc(1, sizeof(*id));
    if (id == NULL)
        return NULL;
    id->gpu = gpu;
    id->pool_bytes_max = POOL_BYTES;
    id->host_pool = malloc(POOL_BYTES);
    id->back_pool = malloc(POOL_BYTES);
    id->want = malloc(SLOT_BYTES);
    id->slots = mmap(NULL, SLOT_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fine = id->host_pool != NULL && id->back_pool != NULL && id->want != NULL &&
               id->slots != MAP_FAILED && kvt_gpu_pin(gpu, id->slots, SLOT_BYTES) == 0 &&
               kvt_gpu_enter(gpu) == 0;
    if (fine) {
        fine = gpu->cuda.memory_alloc(&id->pool, POOL_BYTES) == KVT_CU_OK &&
               gpu->cuda.memory_alloc(&id->staged, SLOT_BYTES) == KVT_CU_OK;
        kvt_gpu_leave(gpu);
    }
    if (fine)
        return id;
    identity_free(id);
    return NULL;
}

void identity_free(struct identity *id)
{
    if (id == NULL)
        return;
    if (id->pool != 0 && kvt_gpu_enter(id->gpu) == 0) {
        (void)id->gpu->cuda.memory_free(id->pool);
        if (id->staged != 0)
            (void)id->gpu->cuda.memory_free(id->staged);
        kvt_gpu_leave(id->gpu);
    }
    if (id->slots != NULL && id->slots != MAP_FAILED) {
        kvt_gpu_unpin(id->gpu, id->slots);
        munmap(id->slots, SLOT_BYTES);
    }
    free(id->host_pool);
    free(id->back_pool);
    free(id->want);
    free(id);
}

void identity_limit(struct identity *id, size_t pool_bytes)
{
    id->pool_bytes_max = pool_bytes;
}

/* ---- random shapes ---- */

static uint32_t pick(struct kvt_rng *rng, uint32_t bound)
{
    return (uint32_t)kvt_rng_below(rng, bound);
}

static void random_part(struct kvt_rng *rng, struct kvt_part *part)
{
    static const uint16_t dims[] = {16, 32, 48, 64, 80, 96, 112, 128, 128, 128, 144, 192, 256, 576};
    part->kind = (uint8_t)(1 + pick(rng, 8) % 4);
    part->dtype = (uint8_t)(1 + pick(rng, 3));
    if (part->kind == KVT_PART_OPAQUE && pick(rng, 2))
        part->dtype = KVT_DTYPE_BYTE;
    if (pick(rng, 16) == 0)
        part->dtype = KVT_DTYPE_BYTE;
    part->group = (uint16_t)(pick(rng, 8) == 0);
    part->heads = part->kind == KVT_PART_MLA ? 1 : 1 + pick(rng, 5);
    part->head_dim = dims[pick(rng, sizeof(dims) / sizeof(dims[0]))];
    if (pick(rng, 3) == 0) { /* what most models have, and an encoder is made for */
        part->dtype = KVT_DTYPE_BF16;
        part->head_dim = 128;
    }
}

/* Axes from the innermost out: element, token, head, block in a random order (elements mostly
 * inside), with a random gap after some. Returns the bytes of the part. */
static size_t random_place(struct kvt_rng *rng, const struct kvt_part *part, uint32_t tokens,
                           uint32_t blocks, struct kvt_part_place *place)
{
    int64_t *strides[4] = {&place->stride_elem, &place->stride_token, &place->stride_head,
                           &place->stride_block};
    uint32_t counts[4] = {part->head_dim, tokens, part->heads, blocks}, order[4] = {0, 1, 2, 3};
    uint32_t element = kvt_dtype_bytes(part->dtype), style = pick(rng, 8);
    int64_t extent = element;
    if (style >= 4) { /* NHD */
        order[1] = 2;
        order[2] = 1;
    }
    if (style == 7) { /* K transposed, or anything */
        for (uint32_t i = 3; i > 0; i--) {
            uint32_t j = pick(rng, i + 1), swap = order[i];
            order[i] = order[j];
            order[j] = swap;
        }
    }
    for (int i = 0; i < 4; i++) {
        if (i > 0 && pick(rng, 3) == 0)
            extent += (style & 1 ? 16 : (int64_t)element) * (1 + pick(rng, 5));
        if (style & 1 && i > 0)
            extent = (extent + 15) / 16 * 16;
        *strides[order[i]] = extent;
        extent *= counts[order[i]];
    }
    return (size_t)extent;
}

static int random_shape(struct kvt_rng *rng, struct identity *id, struct shape *s)
{
    static const enum kvt_gpu_path paths[] = {KVT_GPU_PATH_COPY, KVT_GPU_PATH_SM,
                                              KVT_GPU_PATH_DIRECT, KVT_GPU_PATH_STAGED};
    size_t at = 0;
    memset(s, 0, sizeof(*s));
    s->layout.struct_size = sizeof(s->layout);
    s->layout.block_tokens = 16 * (1 + pick(rng, 4) % 3);
    s->layout.part_count = 1 + pick(rng, PARTS_MAX);
    s->layout.parts = s->parts;
    s->blocks = 1 + pick(rng, BLOCKS_MAX);
    int same = pick(rng, 2) == 0; /* all parts alike, as models have it */
    for (uint32_t i = 0; i < s->layout.part_count; i++) {
        if (i == 0 || !same)
            random_part(rng, &s->parts[i]);
        else
            s->parts[i] = s->parts[0];
        if (same && s->parts[i].kind <= KVT_PART_V)
            s->parts[i].kind = (uint8_t)(i % 2 ? KVT_PART_V : KVT_PART_K);
        at += pick(rng, 4) ? (16 - at % 16) % 16 : (4 - at % 4) % 4;
        size_t bytes =
            random_place(rng, &s->parts[i], s->layout.block_tokens, s->blocks, &s->device[i]);
        s->host[i] = s->device[i];
        s->host[i].base = id->host_pool + at;
        s->device[i].base = (void *)(uintptr_t)(id->pool + at);
        at += bytes;
        if (at > id->pool_bytes_max)
            return -1;
    }
    s->pool_bytes = (at + 3) / 4 * 4;
    s->host_pool = (struct kvt_pool_desc){.struct_size = sizeof(s->host_pool),
                                          .device = KVT_DEVICE_HOST,
                                          .block_count = s->blocks,
                                          .place_count = s->layout.part_count,
                                          .places = s->host};
    s->device_pool = s->host_pool;
    s->device_pool.device = 0;
    s->device_pool.places = s->device;
    for (uint32_t i = 0; i < s->layout.part_count; i++)
        s->parts[i].layer = i / 2;
    s->group = s->parts[0].group;
    s->level = 1 + (int)pick(rng, 6);
    s->guard = (int)pick(rng, 2);
    s->values = (int)pick(rng, 12);
    s->path = paths[pick(rng, 4)];
    s->reverse = (int)(s->blocks + (uint32_t)s->values) & 1; /* no number of rng: seeds stay */
    s->payload_bytes = kvt_payload_bytes(&s->layout, s->group, s->level);
    s->record_bytes = kvt_record_bytes(s->payload_bytes);
    return s->record_bytes * s->blocks <= SLOT_BYTES ? 0 : -1;
}

/* One case of three has a mixed map; its numbers come from a generator of their own, so that the
 * other cases stay what they were. */
static int random_map(uint64_t seed, struct shape *s)
{
    struct kvt_rng rng = {.state = ~seed};
    uint32_t entry = 0;
    s->mixed = seed % 3 == 1;
    if (!s->mixed)
        return 0;
    for (uint32_t i = 0; i < s->layout.part_count; i++)
        for (uint32_t head = 0; s->parts[i].group == s->group && head < s->parts[i].heads; head++) {
            int before = head > 0 ? kvt_map_get(s->levels, entry - 1) : 0;
            int level = before != 0 && pick(&rng, 3) ? before : 1 + (int)pick(&rng, 6);
            kvt_map_set(s->levels, entry++, kvt_level_for_part(level, &s->parts[i]));
        }
    s->lead_bytes = 16 * (1 + pick(&rng, 4));
    for (uint32_t i = 0; i < s->lead_bytes; i++)
        s->lead[i] = (uint8_t)kvt_rng_next(&rng);
    size_t coded = kvt_map_payload_bytes(&s->layout, s->group, s->levels, NULL);
    s->payload_bytes = s->lead_bytes + coded + 16 * pick(&rng, 300);
    s->record_bytes = kvt_record_bytes(s->payload_bytes);
    return s->record_bytes * s->blocks <= SLOT_BYTES ? 0 : -1;
}

static size_t coded_bytes(const struct shape *s)
{
    return s->mixed ? kvt_map_payload_bytes(&s->layout, s->group, s->levels, NULL)
                    : s->payload_bytes;
}

static int scalar_encode(const struct shape *s, uint32_t block, uint8_t *payload)
{
    if (!s->mixed)
        return kvt_encode_block_by(&kvt_codec_scalar, &s->layout, s->group, s->level, &s->host_pool,
                                   block, payload, s->payload_bytes, s->guard, NULL);
    memcpy(payload, s->lead, s->lead_bytes);
    return kvt_encode_map(&s->layout, s->group, s->levels, &s->host_pool, block,
                          payload + s->lead_bytes, coded_bytes(s), s->guard, NULL);
}

static int scalar_decode(const struct shape *s, uint32_t block, const uint8_t *payload)
{
    if (!s->mixed)
        return kvt_decode_block_by(&kvt_codec_scalar, &s->layout, s->group, s->level, payload,
                                   s->payload_bytes, &s->host_pool, block);
    return kvt_decode_map(&s->layout, s->group, s->levels, payload + s->lead_bytes, coded_bytes(s),
                          &s->host_pool, block);
}

/* ---- random numbers ---- */

static float gauss(struct kvt_rng *rng)
{
    float sum = -6.0f;
    for (int i = 0; i < 12; i++)
        sum += (float)(kvt_rng_next(rng) >> 40) * 0x1p-24f;
    return sum;
}

static float number(struct kvt_rng *rng, int kind, uint32_t channel)
{
    float x = gauss(rng), offset = (channel * 2654435761u >> 24) > 220 ? 12.0f : 0.3f;
    switch (kind) {
    case 0: /* keys with offsets */
    case 1:
        return x + offset;
    case 2:
        return x;
    case 3:
        return ldexpf(x, -128 + (int)pick(rng, 12)); /* subnormal and nearly so */
    case 4:
        return ldexpf(x, 118 + (int)pick(rng, 7)); /* near the limits */
    case 5:
        return 0.0f;
    case 6: /* ties everywhere */
        return (float)((int)pick(rng, 31) - 15) * 0.5f;
    case 7: /* a tall mean and the input's own rounding: the guard's excuse */
        return 1000.0f * offset + x * 0.001f;
    case 8: /* outliers */
        return pick(rng, 64) == 0 ? x * 300.0f : x;
    case 9: /* any exponent: rows that the guard refuses */
        return ldexpf(x, (int)pick(rng, 60) - 30);
    case 10:
        return pick(rng, 3) ? 0.0f : -0.0f;
    default:
        return pick(rng, 20000) == 0 ? (pick(rng, 2) ? INFINITY : NAN) : x;
    }
}

static void fill_pool(struct kvt_rng *rng, const struct shape *s, struct identity *id)
{
    for (size_t i = 0; i < s->pool_bytes; i++)
        id->host_pool[i] = (uint8_t)(i * 31);
    for (uint32_t p = 0; p < s->layout.part_count; p++) {
        const struct kvt_part *part = &s->parts[p];
        const struct kvt_part_place *place = &s->host[p];
        for (uint32_t b = 0; b < s->blocks; b++)
            for (uint32_t h = 0; h < part->heads; h++)
                for (uint32_t t = 0; t < s->layout.block_tokens; t++)
                    for (uint32_t e = 0; e < part->head_dim; e++) {
                        char *at = (char *)place->base + place->stride_block * b +
                                   place->stride_head * h + place->stride_token * t +
                                   place->stride_elem * e;
                        float x = number(rng, s->values, e);
                        uint16_t half = part->dtype == KVT_DTYPE_BF16 ? kvt_float_to_bf16(x)
                                                                      : kvt_float_to_f16(x);
                        if (part->dtype == KVT_DTYPE_F32)
                            memcpy(at, &x, 4);
                        else if (part->dtype == KVT_DTYPE_BYTE)
                            *at = (char)pick(rng, 256);
                        else
                            memcpy(at, &half, 2);
                    }
    }
}

static void random_bytes(struct kvt_rng *rng, uint8_t *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (uint8_t)kvt_rng_next(rng);
}

/* ---- the case ---- */

#define FAIL(...)                                                                    \
    do {                                                                             \
        int used_ = snprintf(message, len, __VA_ARGS__);                             \
        describe(s, message + used_, len > (size_t)used_ ? len - (size_t)used_ : 0); \
        return -1;                                                                   \
    } while (0)

static void describe(const struct shape *s, char *text, size_t len)
{
    int used = snprintf(text, len, " [%s %d guard %d values %d path %d tokens %u blocks %u:",
                        s->mixed ? "mixed, not level" : "level", s->level, s->guard, s->values,
                        (int)s->path, s->layout.block_tokens, s->blocks);
    for (uint32_t i = 0; i < s->layout.part_count && used > 0 && (size_t)used < len; i++)
        used +=
            snprintf(text + used, len - (size_t)used, " %u/%u %ux%u g%u", s->parts[i].kind,
                     s->parts[i].dtype, s->parts[i].heads, s->parts[i].head_dim, s->parts[i].group);
}

static uint8_t *slot_of(const struct identity *id, const struct shape *s, uint32_t i)
{
    return id->slots + s->record_bytes * (s->reverse ? s->blocks - 1 - i : i);
}

static int move(struct identity *id, kvt_cu_ptr device, void *host, size_t bytes, int to_device)
{
    const struct kvt_cuda *cuda = &id->gpu->cuda;
    kvt_cu_stream stream;
    int rc = kvt_gpu_enter(id->gpu);
    if (rc != 0)
        return rc;
    rc = kvt_gpu_check(id->gpu, cuda->stream_create(&stream, KVT_CU_STREAM_NON_BLOCKING, 0));
    if (rc == 0) {
        kvt_cu_result result = to_device ? cuda->copy_to_device_async(device, host, bytes, stream)
                                         : cuda->copy_to_host_async(host, device, bytes, stream);
        if (result == KVT_CU_OK)
            result = cuda->stream_sync(stream);
        rc = kvt_gpu_check(id->gpu, result);
        (void)cuda->stream_destroy(stream);
    }
    kvt_gpu_leave(id->gpu);
    return rc;
}

/* The pool there and back, on a stream of its own and waited for. */
static int move_pool(struct identity *id, const struct shape *s, int to_device)
{
    return move(id, id->pool, to_device ? id->host_pool : id->back_pool, s->pool_bytes, to_device);
}

/* The record that the device should make of a block; returns the scalar encoder's status. */
static int want_record(struct identity *id, const struct shape *s, uint32_t block,
                       const uint8_t *header)
{
    struct kvt_record_header *want = (struct kvt_record_header *)(void *)id->want;
    memset(id->want, 0, s->record_bytes);
    memcpy(id->want, header, sizeof(*want));
    int status = scalar_encode(s, block, id->want + sizeof(*want));
    if (status == 0)
        want->checksum = kvt_record_checksum(id->want, (uint32_t)s->record_bytes);
    return status;
}

static size_t first_difference(const uint8_t *a, const uint8_t *b, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (a[i] != b[i])
            return i;
    return bytes;
}

static size_t differences(const uint8_t *a, const uint8_t *b, size_t bytes)
{
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++)
        count += a[i] != b[i];
    return count;
}

static int check_evicted(struct identity *id, const struct shape *s, struct kvt_gpu_job *job,
                         const struct kvt_gpu_item *items, uint8_t (*headers)[128],
                         struct identity_counts *counts, char *message, size_t len)
{
    for (uint32_t i = 0; i < s->blocks; i++) {
        uint64_t checksum;
        int status = kvt_gpu_job_result(job, i, &checksum);
        int want = want_record(id, s, items[i].block, headers[i]);
        counts->blocks++;
        counts->guard += want == KVT_E_GUARD;
        counts->nonfinite += want == KVT_E_NONFINITE;
        if (status != want)
            FAIL("evict of block %u: status %d, scalar %d", items[i].block, status, want);
        if (want != 0)
            continue;
        size_t at = first_difference(items[i].record, id->want, s->record_bytes);
        if (at != s->record_bytes)
            FAIL("evict of block %u: record byte %zu is %02x, scalar %02x (%zu of %zu differ)",
                 items[i].block, at, ((uint8_t *)items[i].record)[at], id->want[at],
                 differences(items[i].record, id->want, s->record_bytes), s->record_bytes);
        if (checksum != ((struct kvt_record_header *)(void *)id->want)->checksum)
            FAIL("evict of block %u: checksum reported is not the record's", items[i].block);
    }
    return 0;
}

static int evict(struct identity *id, const struct shape *s, struct kvt_gpu_plan *plan,
                 struct kvt_rng *rng, struct identity_counts *counts, char *message, size_t len)
{
    struct kvt_gpu_item items[BLOCKS_MAX];
    uint8_t headers[BLOCKS_MAX][128];
    struct kvt_gpu_job *job;
    struct kvt_gpu_order order = {.path = s->path, .guard = s->guard};
    if (order.path >= KVT_GPU_PATH_DIRECT) /* for restores only */
        order.path = KVT_GPU_PATH_SM;
    for (uint32_t i = 0; i < s->blocks; i++) {
        items[i].record = slot_of(id, s, i);
        items[i].block = s->blocks - 1 - i;
        random_bytes(rng, items[i].record, 256);
        memset((uint8_t *)items[i].record + 256, 0x5a, s->record_bytes - 256);
        memcpy(headers[i], items[i].record, 128);
    }
    int rc = kvt_gpu_evict(plan, items, s->blocks, &order, &job);
    if (rc != 0)
        FAIL("evict refused: %d", rc);
    rc = kvt_gpu_job_poll(job, 1);
    if (rc != 1)
        FAIL("evict did not end: %d", rc);
    rc = check_evicted(id, s, job, items, headers, counts, message, len);
    kvt_gpu_job_free(job);
    return rc;
}

/* Records to restore: made by the scalar codec, or random bytes behind a header that fits. */
static void make_records(struct identity *id, const struct shape *s, struct kvt_rng *rng,
                         struct kvt_gpu_item *items, struct identity_counts *counts)
{
    for (uint32_t i = 0; i < s->blocks; i++) {
        uint8_t *record = slot_of(id, s, i), header[128];
        items[i].record = record;
        items[i].block = (i + 1) % s->blocks;
        random_bytes(rng, header, sizeof(header));
        int hostile = pick(rng, 3) == 0 || want_record(id, s, i, header) != 0;
        if (!hostile) {
            memcpy(record, id->want, s->record_bytes);
            continue;
        }
        counts->hostile++;
        random_bytes(rng, record, s->record_bytes);
        struct kvt_record_header *own = (struct kvt_record_header *)(void *)record;
        own->checksum = kvt_record_checksum(record, (uint32_t)s->record_bytes);
    }
}

static int restore(struct identity *id, const struct shape *s, struct kvt_gpu_plan *plan,
                   struct kvt_rng *rng, struct identity_counts *counts, char *message, size_t len)
{
    struct kvt_gpu_item items[BLOCKS_MAX];
    struct kvt_gpu_job *job;
    struct kvt_gpu_order order = {.path = s->path};
    make_records(id, s, rng, items, counts);
    uint32_t broken =
        pick(rng, 8) == 0 && s->path != KVT_GPU_PATH_DIRECT ? pick(rng, s->blocks) : s->blocks;
    if (broken < s->blocks) /* one bit, not in the checksum field */
        ((uint8_t *)items[broken].record)[128 + pick(rng, (uint32_t)s->record_bytes - 128)] ^= 4;
    if (s->path == KVT_GPU_PATH_STAGED &&
        move(id, id->staged, id->slots, s->blocks * s->record_bytes, 1) != 0)
        FAIL("upload of records failed");
    for (uint32_t i = 0; i < s->blocks; i++)
        items[i].staged = id->staged + (kvt_cu_ptr)((uint8_t *)items[i].record - id->slots);
    int rc = kvt_gpu_restore(plan, items, s->blocks, &order, &job);
    if (rc != 0)
        FAIL("restore refused: %d", rc);
    rc = kvt_gpu_job_poll(job, 1);
    if (rc != 1)
        FAIL("restore did not end: %d", rc);
    for (uint32_t i = 0; i < s->blocks; i++) {
        int status = kvt_gpu_job_result(job, i, NULL);
        if (status != (i == broken ? KVT_E_CORRUPT : 0))
            FAIL("restore of record %u: status %d", i, status);
        if (scalar_decode(s, items[i].block, (uint8_t *)items[i].record + 128) != 0)
            FAIL("scalar decode refused");
    }
    kvt_gpu_job_free(job);
    if (move_pool(id, s, 0) != 0)
        FAIL("download failed");
    size_t at = first_difference(id->back_pool, id->host_pool, s->pool_bytes);
    if (at != s->pool_bytes)
        FAIL("restore: pool byte %zu is %02x, scalar %02x", at, id->back_pool[at],
             id->host_pool[at]);
    return 0;
}

/* Bytes of parts below `next_layer` that differ between the device's pool (a copy) and ours. */
static size_t layers_differ(const struct identity *id, const struct shape *s, uint32_t next_layer)
{
    size_t count = 0;
    for (uint32_t p = 0; p < s->layout.part_count; p++) {
        const struct kvt_part *part = &s->parts[p];
        const struct kvt_part_place *at = &s->host[p];
        if (part->group != s->group || part->layer >= next_layer)
            continue;
        for (uint32_t b = 0; b < s->blocks; b++)
            for (uint32_t h = 0; h < part->heads; h++)
                for (uint32_t t = 0; t < s->layout.block_tokens; t++)
                    for (uint32_t e = 0; e < part->head_dim; e++) {
                        const uint8_t *ours = (const uint8_t *)at->base + at->stride_block * b +
                                              at->stride_head * h + at->stride_token * t +
                                              at->stride_elem * e;
                        count += memcmp(ours, id->back_pool + (ours - id->host_pool),
                                        kvt_dtype_bytes(part->dtype)) != 0;
                    }
    }
    return count;
}

static int restore_layers(struct identity *id, const struct shape *s, struct kvt_gpu_plan *plan,
                          struct kvt_rng *rng, struct identity_counts *counts, char *message,
                          size_t len)
{
    struct kvt_gpu_item items[BLOCKS_MAX];
    struct kvt_gpu_order order = {.path = KVT_GPU_PATH_COPY};
    uint32_t half = s->blocks / 2, broken = pick(rng, 4) == 0 ? pick(rng, s->blocks) : s->blocks;
    struct kvt_gpu_load loads[2] = {{.plan = plan, .items = items, .n = s->blocks - half},
                                    {.plan = plan, .items = items + s->blocks - half, .n = half}};
    make_records(id, s, rng, items, counts);
    memset(id->host_pool, 0xa5, s->pool_bytes);
    if (move_pool(id, s, 1) != 0)
        FAIL("upload failed");
    if (broken < s->blocks)
        ((uint8_t *)items[broken].record)[128 + pick(rng, (uint32_t)s->record_bytes - 128)] ^= 4;
    for (uint32_t i = 0; i < s->blocks; i++)
        if (scalar_decode(s, items[i].block, (uint8_t *)items[i].record + 128) != 0)
            FAIL("scalar decode refused");
    int rc = kvt_gpu_restore_layers(loads, half > 0 ? 2 : 1, &order);
    if (rc != 0)
        FAIL("restore by layers refused: %d", rc);
    for (uint32_t range = 0; range < kvt_gpu_job_ranges(loads[0].job); range++) {
        uint32_t next, other = UINT32_MAX;
        rc = kvt_gpu_job_await_range(loads[0].job, range, &next);
        if (rc == 0 && half > 0)
            rc = kvt_gpu_job_await_range(loads[1].job, range, &other);
        if (rc != 0 || move_pool(id, s, 0) != 0)
            FAIL("range %u did not come: %d", range, rc);
        if (half > 0 && next != other)
            FAIL("range %u: jobs of one plan differ", range);
        size_t differ = layers_differ(id, s, next);
        if (differ != 0)
            FAIL("range %u of %u, layers below %u: %zu elements differ", range,
                 kvt_gpu_job_ranges(loads[0].job), next, differ);
        counts->ranges += next != UINT32_MAX;
    }
    for (uint32_t i = 0; i < s->blocks; i++) {
        struct kvt_gpu_load *load = &loads[i >= s->blocks - half];
        if (kvt_gpu_job_poll(load->job, 1) != 1)
            FAIL("restore by layers did not end");
        int status = kvt_gpu_job_result(load->job, i - (size_t)(load->items - items), NULL);
        if (status != (i == broken ? KVT_E_CORRUPT : 0))
            FAIL("restore by layers of record %u: status %d", i, status);
    }
    kvt_gpu_job_free(loads[0].job);
    kvt_gpu_job_free(loads[1].job);
    size_t at = first_difference(id->back_pool, id->host_pool, s->pool_bytes);
    if (at != s->pool_bytes)
        FAIL("restore by layers: pool byte %zu is %02x, scalar %02x", at, id->back_pool[at],
             id->host_pool[at]);
    return 0;
}

static int make_plan(struct identity *id, const struct shape *s, struct kvt_gpu_stage_opts *opts,
                     struct kvt_gpu_stage **stage, struct kvt_gpu_plan **plan)
{
    struct kvt_gpu_map map = {.level = s->level,
                              .range_bytes = 4096u << (s->record_bytes / 4096 % 3)};
    *stage = NULL;
    if (s->mixed) {
        map.levels = s->levels;
        map.lead = s->lead;
        map.lead_bytes = s->lead_bytes;
        map.payload_bytes = (uint32_t)s->payload_bytes;
    }
    opts->record_bytes = (uint32_t)s->record_bytes;
    opts->layer_pages = SLOT_BYTES / 4096;
    int rc = kvt_gpu_stage_new(id->gpu, opts, stage);
    if (rc == 0)
        rc = kvt_gpu_plan_on(*stage, &s->layout, s->group, &map, &s->device_pool, plan);
    return rc;
}

int identity_case(struct identity *id, uint64_t seed, struct identity_counts *counts, char *message,
                  size_t len)
{
    struct kvt_rng rng = {.state = seed};
    struct shape shape, *s = &shape;
    struct kvt_gpu_stage *stage;
    struct kvt_gpu_plan *plan;
    while (random_shape(&rng, id, s) != 0 || random_map(seed, s) != 0) {
    }
    struct kvt_gpu_stage_opts opts = {.ctas = 2 + pick(&rng, 31),
                                      .wave = 1 + pick(&rng, 3),
                                      .depth = 1 + pick(&rng, 3),
                                      .records_max = BLOCKS_MAX,
                                      .jobs_max = 2};
    fill_pool(&rng, s, id);
    if (move_pool(id, s, 1) != 0)
        FAIL("upload failed");
    int rc = make_plan(id, s, &opts, &stage, &plan);
    if (rc != 0)
        FAIL("plan refused: %d", rc);
    counts->cases++;
    counts->levels[s->mixed ? 0 : s->level]++;
    rc = evict(id, s, plan, &rng, counts, message, len);
    if (rc == 0)
        rc = restore(id, s, plan, &rng, counts, message, len);
    if (rc == 0)
        rc = restore_layers(id, s, plan, &rng, counts, message, len);
    kvt_gpu_plan_free(plan);
    kvt_gpu_stage_free(stage);
    return rc;
}
