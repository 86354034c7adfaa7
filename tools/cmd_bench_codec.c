/* `kvtier bench codec`: how fast each level codes and decodes, against memcpy in the same run.
 *
 * One core. A pool larger than the caches (K and V, 8 heads, 16-token blocks; MLA for 576) is
 * encoded into payloads and decoded into a second pool; memcpy copies the first pool to the second.
 * The three are interleaved and the medians reported, as bytes of the engine's side per second, so
 * that decode_gbps / memcpy_gbps compares like with like; a row whose rounds disagree is marked.
 * The guard runs, as it does when storing. Every page is touched before the first measurement.
 * Nothing is printed before all is measured.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/rng.h"
#include "cli.h"
#include "codec/block.h"
#include "codec/half.h"
#include "commands.h"

#define COMMAND "bench codec"
#define TOKENS 16u /* of a block: vLLM's page on GPUs */
#define ROUNDS_MAX 99
#define SPREAD_MAX 0.15 /* a quiet machine stays below a twentieth */

struct bench {
    struct kvt_part parts[2];
    struct kvt_layout layout;
    struct kvt_part_place from_places[2], to_places[2];
    struct kvt_pool_desc from, to;
    char *memory; /* pool, second pool, payloads */
    size_t pool_bytes, payload_bytes;
};

struct bench_options {
    int json, no_guard;
    const char *level, *dtype, *isa;
    int64_t dim, rounds;
    uint64_t size;
};

struct bench_result {
    int level, dtype;
    uint32_t dim;
    int mla; /* one latent row a token, not heads of K and V */
    double bits, encode_gbps, decode_gbps, memcpy_gbps;
    double spread; /* of the worst of the three: the middle half of its rounds, over the median */
};

static const struct {
    const char *name;
    int dtype;
} dtype_names[] = {{"bf16", KVT_DTYPE_BF16}, {"f16", KVT_DTYPE_F16}, {"f32", KVT_DTYPE_F32}};

static const char *dtype_name(int dtype)
{
    return dtype_names[dtype - KVT_DTYPE_BF16].name;
}

static void store_element(int dtype, char *at, float value)
{
    uint16_t half = dtype == KVT_DTYPE_BF16 ? kvt_float_to_bf16(value) : kvt_float_to_f16(value);
    if (dtype == KVT_DTYPE_F32)
        memcpy(at, &value, sizeof(value));
    else
        memcpy(at, &half, sizeof(half));
}

/* N(0,1) rows, four channels of each head with an offset, as keys have. 2 MiB of distinct pages,
 * then copies of them. */
static void fill_pool(struct bench *bench, uint32_t dim, int dtype, size_t page_bytes)
{
    size_t element = kvt_dtype_bytes(dtype), distinct = page_bytes;
    struct kvt_rng rng = {20};
    while (distinct < (2u << 20) && 2 * distinct <= bench->pool_bytes)
        distinct *= 2;
    for (size_t i = 0; i < distinct / element; i++) {
        double u = (double)((kvt_rng_next(&rng) >> 11) + 1) * 0x1p-53;
        double v = (double)(kvt_rng_next(&rng) >> 11) * 0x1p-53;
        double x = sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
        if (i % dim < 4)
            x += 10.0 + (double)(i % dim);
        store_element(dtype, bench->memory + i * element, (float)x);
    }
    for (size_t at = distinct; at < bench->pool_bytes; at += page_bytes)
        memcpy(bench->memory + at, bench->memory + at - distinct, page_bytes);
    memset(bench->memory + bench->pool_bytes, 0, bench->pool_bytes + bench->payload_bytes);
}

static int bench_make(struct bench *bench, const struct bench_result *wanted, uint64_t size)
{
    int level = wanted->level, dtype = wanted->dtype, mla = wanted->mla;
    uint32_t dim = wanted->dim;
    uint32_t heads = mla ? 1 : 8, part_count = mla ? 1 : 2;
    int64_t element = kvt_dtype_bytes(dtype), row = element * dim;
    memset(bench, 0, sizeof(*bench));
    size_t page_bytes = (size_t)(row * TOKENS * heads * part_count);
    uint32_t blocks = (uint32_t)KVT_MAX(size / page_bytes, 1);
    for (uint32_t i = 0; i < part_count; i++)
        bench->parts[i] =
            (struct kvt_part){(uint8_t)(mla ? KVT_PART_MLA : i == 0 ? KVT_PART_K : KVT_PART_V),
                              (uint8_t)dtype,
                              0,
                              0,
                              heads,
                              dim};
    bench->layout = (struct kvt_layout){sizeof(bench->layout), TOKENS, part_count, bench->parts};
    bench->pool_bytes = page_bytes * blocks;
    bench->payload_bytes = kvt_payload_bytes(&bench->layout, 0, level) * blocks;
    bench->memory =
        aligned_alloc(4096, kvt_round_up(2 * bench->pool_bytes + bench->payload_bytes, 4096));
    if (bench->memory == NULL)
        return -1;
    for (uint32_t i = 0; i < part_count; i++) {
        char *base = bench->memory + page_bytes / part_count * i;
        bench->from_places[i] =
            (struct kvt_part_place){base, (int64_t)page_bytes, row * TOKENS, row, element};
        bench->to_places[i] = bench->from_places[i];
        bench->to_places[i].base = base + bench->pool_bytes;
    }
    bench->from = (struct kvt_pool_desc){sizeof(bench->from), KVT_DEVICE_HOST, blocks, part_count,
                                         bench->from_places};
    bench->to = bench->from;
    bench->to.places = bench->to_places;
    fill_pool(bench, dim, dtype, page_bytes);
    return 0;
}

static int encode_all(struct bench *bench, const struct kvt_codec_kernels *kernels, int level,
                      int guard)
{
    size_t bytes = kvt_payload_bytes(&bench->layout, 0, level);
    char *payload = bench->memory + 2 * bench->pool_bytes;
    int status = 0;
    for (uint32_t b = 0; b < bench->from.block_count && status == 0; b++, payload += bytes)
        status = kvt_encode_block_by(kernels, &bench->layout, 0, level, &bench->from, b, payload,
                                     bytes, guard, NULL);
    return status;
}

static int decode_all(struct bench *bench, const struct kvt_codec_kernels *kernels, int level)
{
    size_t bytes = kvt_payload_bytes(&bench->layout, 0, level);
    const char *payload = bench->memory + 2 * bench->pool_bytes;
    int status = 0;
    for (uint32_t b = 0; b < bench->to.block_count && status == 0; b++, payload += bytes)
        status =
            kvt_decode_block_by(kernels, &bench->layout, 0, level, payload, bytes, &bench->to, b);
    return status;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int64_t count)
{
    qsort(values, (size_t)count, sizeof(*values), compare_doubles);
    return values[count / 2];
}

/* How far apart the middle half of the rounds lies, over the median. values: sorted. */
static double spread(const double *values, int64_t count)
{
    return (values[3 * (count - 1) / 4] - values[(count - 1) / 4]) / values[count / 2];
}

/* Round 0 warms up and is not counted. */
static int measure(const struct bench_options *options, const struct kvt_codec_kernels *kernels,
                   struct bench_result *result)
{
    struct bench bench;
    struct kvt_clock clock = kvt_clock_system();
    double seconds[3][ROUNDS_MAX];
    int status = 0;
    if (bench_make(&bench, result, options->size) != 0) {
        kvt_cli_error(COMMAND, "out of memory");
        return -1;
    }
    for (int64_t round = -1; round < options->rounds && status == 0; round++) {
        int64_t start = kvt_clock_now(&clock);
        memcpy(bench.memory + bench.pool_bytes, bench.memory, bench.pool_bytes);
        int64_t copied = kvt_clock_now(&clock);
        status = encode_all(&bench, kernels, result->level, !options->no_guard);
        int64_t encoded = kvt_clock_now(&clock);
        if (status == 0)
            status = decode_all(&bench, kernels, result->level);
        int64_t decoded = kvt_clock_now(&clock);
        if (round < 0)
            continue;
        seconds[0][round] = 1e-9 * (double)(copied - start);
        seconds[1][round] = 1e-9 * (double)(encoded - copied);
        seconds[2][round] = 1e-9 * (double)(decoded - encoded);
    }
    if (status == 0) {
        double gigabytes = 1e-9 * (double)bench.pool_bytes;
        result->memcpy_gbps = gigabytes / median(seconds[0], options->rounds);
        result->encode_gbps = gigabytes / median(seconds[1], options->rounds);
        result->decode_gbps = gigabytes / median(seconds[2], options->rounds);
        for (int i = 0; i < 3; i++)
            result->spread = KVT_MAX(result->spread, spread(seconds[i], options->rounds));
        result->bits = 8.0 * (double)bench.payload_bytes /
                       ((double)bench.pool_bytes / kvt_dtype_bytes(result->dtype));
    } else {
        kvt_cli_error(COMMAND, "%s, %s, %u: %s", kvt_level_name(result->level),
                      dtype_name(result->dtype), result->dim, kvt_strerror(status));
    }
    free(bench.memory);
    return status == 0 ? 0 : -1;
}

static const uint32_t all_dims[] = {64, 80, 96, 112, 128, 192, 256, 576};
#define RESULTS_MAX 512

/* What to measure: all levels and dims in bf16, the common dims in f16 and f32, less what the
 * options leave out. 576 is MLA, which is stored at kv8 or raw only; who asks for that length at a
 * lower level gets rows of K and V. */
static size_t plan(const struct bench_options *options, int level, int dtype,
                   struct bench_result *results)
{
    size_t count = 0;
    for (int d = KVT_DTYPE_BF16; d <= KVT_DTYPE_F32; d++)
        for (size_t i = 0; i <= KVT_ARRAY_LEN(all_dims); i++)
            for (int l = KVT_LEVEL_INT4; l <= KVT_LEVEL_RAW; l++) {
                int asked = i == KVT_ARRAY_LEN(all_dims);
                if (asked != (options->dim != 0))
                    continue;
                uint32_t dim = asked ? (uint32_t)options->dim : all_dims[i];
                if (dtype != 0 ? d != dtype : d != KVT_DTYPE_BF16 && dim != 64 && dim != 128)
                    continue;
                int mla = dim == 576 && l >= KVT_LEVEL_KV8;
                if ((level != 0 && l != level) || (dim == 576 && !mla && (!asked || !level)))
                    continue;
                results[count++] =
                    (struct bench_result){.level = l, .dtype = d, .dim = dim, .mla = mla};
            }
    return count;
}

static json_t *to_json(const struct bench_options *options, const char *isa,
                       const struct bench_result *results, size_t count)
{
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++) {
        const struct bench_result *r = &results[i];
        json_array_append_new(
            list,
            json_pack("{s:s,s:s,s:i,s:s,s:s,s:f,s:f,s:f,s:f,s:f,s:b}", "level",
                      kvt_level_name(r->level), "dtype", dtype_name(r->dtype), "dim", (int)r->dim,
                      "rows", r->mla ? "mla" : "kv", "isa", isa, "bits_per_element", r->bits,
                      "encode_gbps", r->encode_gbps, "decode_gbps", r->decode_gbps, "memcpy_gbps",
                      r->memcpy_gbps, "spread", r->spread, "noisy", r->spread > SPREAD_MAX));
    }
    return json_pack("{s:i,s:b,s:I,s:I,s:o}", "format_version", (int)KVT_CODEC_FORMAT_VERSION,
                     "guard", !options->no_guard, "pool_bytes", (json_int_t)options->size, "rounds",
                     (json_int_t)options->rounds, "results", list);
}

static void print_table(const char *isa, const struct bench_result *results, size_t count)
{
    printf("one core, %s; GB/s of the engine's side, and the ratio to memcpy\n", isa);
    printf("level  dtype   dim   bits    encode          decode          memcpy  spread\n");
    size_t noisy = 0;
    for (size_t i = 0; i < count; i++) {
        const struct bench_result *r = &results[i];
        printf("%-6s %-5s %5u %6.3f  %6.2f (%.2f x)  %6.2f (%.2f x)  %6.2f  %4.0f %%%s\n",
               kvt_level_name(r->level), dtype_name(r->dtype), r->dim, r->bits, r->encode_gbps,
               r->encode_gbps / r->memcpy_gbps, r->decode_gbps, r->decode_gbps / r->memcpy_gbps,
               r->memcpy_gbps, 100 * r->spread, r->spread > SPREAD_MAX ? "  ?" : "");
        noisy += r->spread > SPREAD_MAX;
        if (r->dim == 576 && !r->mla)
            printf("       (rows of K and V: MLA latents are never stored below kv8)\n");
    }
    if (noisy)
        printf(
            "?: the rounds of %zu of %zu rows disagree by more than %.0f %%, so their ratios say "
            "little: something else runs on this machine\n",
            noisy, count, 100 * SPREAD_MAX);
}

/* Resolve the words; 0, or -1 after an error was printed. */
static int resolve(const struct bench_options *options, int *level, int *dtype,
                   const struct kvt_codec_kernels **kernels)
{
    const struct kvt_codec_kernels *sets[8];
    size_t count = kvt_codec_kernels_all(sets, KVT_ARRAY_LEN(sets));
    *kernels = options->isa == NULL ? kvt_codec_kernels() : NULL;
    for (size_t i = 0; i < count && options->isa != NULL; i++)
        if (strcmp(sets[i]->name, options->isa) == 0)
            *kernels = sets[i];
    for (size_t i = 0; i < KVT_ARRAY_LEN(dtype_names) && options->dtype != NULL; i++)
        if (strcmp(dtype_names[i].name, options->dtype) == 0)
            *dtype = dtype_names[i].dtype;
    *level = options->level != NULL ? kvt_level_parse(options->level) : 0;
    if (*kernels == NULL)
        kvt_cli_error(COMMAND, "--isa %s: not one of scalar%s here", options->isa,
                      count > 1 ? ", avx2" : "");
    else if (*level < 0)
        kvt_cli_error(COMMAND, "--level %s: not one of int4, kv4, kv5, kv6, kv8, raw",
                      options->level);
    else if (options->dtype != NULL && *dtype == 0)
        kvt_cli_error(COMMAND, "--dtype %s: not one of bf16, f16, f32", options->dtype);
    else if (options->dim % 16 != 0)
        kvt_cli_error(COMMAND, "--dim %lld: not a multiple of 16", (long long)options->dim);
    else
        return 0;
    return -1;
}

int kvt_cmd_bench_codec(int argc, char **argv)
{
    struct bench_options options = {.rounds = 7, .size = 128u << 20};
    const struct kvt_cli_option cli[] = {
        {.name = "json", .help = "one JSON object", .flag = &options.json},
        {.name = "level", .metavar = "LEVEL", .help = "this one only", .text = &options.level},
        {.name = "dtype", .metavar = "TYPE", .help = "bf16, f16 or f32", .text = &options.dtype},
        {.name = "dim",
         .metavar = "N",
         .help = "head_dim, a multiple of 16; 576 is MLA at kv8 and raw, K and V rows below",
         .number = &options.dim,
         .min = 16,
         .max = KVT_HEAD_DIM_MAX},
        {.name = "isa", .metavar = "NAME", .help = "scalar or avx2", .text = &options.isa},
        {.name = "size",
         .metavar = "SIZE",
         .help = "bytes of the pool; 128MiB by default",
         .size = &options.size,
         .min = 1 << 20,
         .max = INT64_C(8) << 30},
        {.name = "rounds",
         .metavar = "N",
         .help = "measurements; the median counts",
         .number = &options.rounds,
         .min = 1,
         .max = ROUNDS_MAX},
        {.name = "no-guard", .help = "encode without the quality guard", .flag = &options.no_guard},
    };
    size_t words = 0;
    int status = kvt_cli_parse(COMMAND, "[OPTION...]", cli, KVT_ARRAY_LEN(cli), NULL, 0, 0, &words,
                               argc, argv);
    if (status != 0)
        return status == 1 ? KVT_EXIT_OK : KVT_EXIT_USAGE;
    int level = 0, dtype = 0;
    const struct kvt_codec_kernels *kernels;
    if (resolve(&options, &level, &dtype, &kernels) != 0)
        return KVT_EXIT_USAGE;
    struct bench_result results[RESULTS_MAX];
    size_t count = plan(&options, level, dtype, results);
    struct kvt_progress progress;
    kvt_progress_start(&progress, "measuring");
    for (size_t i = 0; i < count && status == 0; i++) {
        kvt_progress_update(&progress, i, count);
        status = measure(&options, kernels, &results[i]);
    }
    kvt_progress_done(&progress);
    if (status != 0)
        return KVT_EXIT_PROBLEM;
    if (options.json)
        return kvt_cli_json(to_json(&options, kernels->name, results, count));
    print_table(kernels->name, results, count);
    return KVT_EXIT_OK;
}
