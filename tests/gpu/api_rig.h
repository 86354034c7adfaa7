/* A small engine in GPU memory for tests of the public API, on a real driver or on the fake one:
 * a pool, a host mirror of what it should hold, keys from numbers, and the scalar codec as the
 * judge of what a load must give back. Every helper asserts what must not fail. */
#ifndef KVT_TESTS_API_RIG_H
#define KVT_TESTS_API_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "gpu/cuda_abi.h"
#include "gpu/fake_cuda.h"
#include "kvtier/kvtier.h"

#define API_PARTS_MAX 160u
#define API_PAGES_MAX 256u

enum api_order { API_NHD, API_HND, API_PACKED }; /* packed: K and V of a layer in one tensor */
enum api_values { API_SMOOTH, API_ROUGH /* some blocks fail the guard */, API_NAN };

struct api_shape {
    const char *name;
    uint32_t layers, heads, dim, tokens, pages;
    int dtype;
    enum api_order order;
    bool mla; /* one latent part a layer, heads is 1 */
};

struct api {
    struct api_shape shape;
    const char *library;
    struct kvt_cuda cuda;
    kvt_cu_context context;
    kvt_cu_stream stream;
    kvt_cu_ptr memory; /* of the pool */
    size_t bytes;
    uint8_t *mirror; /* what it should hold */
    uint8_t *back;
    struct kvt_part parts[API_PARTS_MAX];
    struct kvt_part_place device[API_PARTS_MAX], host[API_PARTS_MAX];
    struct kvt_layout layout;
    struct kvt_pool_desc device_desc, host_desc;
    struct kvt_identity identity;
    char dir[128]; /* "": no disk */
    const char *gds_library;
    bool gds_any;          /* direct loads by whatever path cuFile takes */
    const char *disk_size; /* NULL: 1GiB */
    uint32_t tune_runs;    /* kvt_cache.gpu_tune_runs, gpu_tune_clock */
    struct kvt_clock *tune_clock;
    char config[512];
    char log[4096];
    struct kvt_cache *cache;
    struct kvt_ns *ns;
    struct kvt_pool *pool;
};

/* Driver, context, pool memory. false: there is no GPU (reason printed). */
bool api_init(struct api *api, const char *library, const struct api_shape *shape,
              const char *config, bool disk);
void api_free(struct api *api);

int api_try_register(
    struct api *api); /* cache and namespace asserted, kvt_pool_register's result */
void api_open(struct api *api);
void api_close(struct api *api);

/* Make our context current on this thread, and the one before again. */
void api_enter(struct api *api);
void api_leave(struct api *api);

/* Numbers of a page in the mirror; api_upload() sends all of it. */
void api_fill(struct api *api, uint32_t page, uint64_t seed, enum api_values values);
void api_upload(struct api *api);
/* Poison device and mirror alike. */
void api_poison(struct api *api);
/* Whether the device's pool is the mirror, all of it. */
bool api_same(struct api *api);

/* Replace a page of the mirror by what a load of it at `level` gives (level as the store chooses
 * it: the first at or above that passes the guard); returns that level. */
int api_coded(struct api *api, uint32_t page, int level);

/* Tests over the fake driver. api_fake_load(): it is loaded once for good, so that its counters
 * outlive the code under test; api_fake_reset(): a good driver of one device, and nothing alive. */
extern struct fake_cuda *fake; /* NULL before */
int api_fake_load(void **state);
int api_fake_reset(void **state);
void api_fake_nothing_left(void);

struct kvt_key api_key(uint64_t seed);
/* Blocks first, first + 1, ... as one chain from position first_pos, pages from `page` on; waits.
 * Status of each in status (optional); returns how many ended with 0 or EXISTS. */
size_t api_store(struct api *api, uint64_t first, uint32_t n, uint32_t page, uint32_t first_pos,
                 int32_t *status);
size_t api_load(struct api *api, uint64_t first, uint32_t n, uint32_t page, int32_t *status);
uint64_t api_stat(struct api *api, const char *name);
void api_stat_text(struct api *api, const char *name, char *out, size_t len);

#endif
