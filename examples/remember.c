/* The smallest whole use of the library: store two blocks of a pool, forget them, load them back.
 *
 * Build:  cc remember.c $(pkg-config --cflags --libs kvtier)
 * Usage:  remember [DIRECTORY]    with a directory the blocks also survive the process
 * The "engine" is an array: one layer, two KV heads of 64 elements, blocks of 16 tokens, bf16.
 */
#include <kvtier/kvtier.h>
#include <stdio.h>
#include <string.h>

enum { BLOCKS = 8, HEADS = 2, TOKENS = 16, DIM = 64, N = 2 };

static uint16_t k[BLOCKS][HEADS][TOKENS][DIM], v[BLOCKS][HEADS][TOKENS][DIM];

/* What an engine does once: describe its cache, open kvtier over it. 0 or an error. */
static int open_all(const char *dir, struct kvt_cache **cache, struct kvt_ns **ns,
                    struct kvt_pool **pool)
{
    const struct kvt_part parts[] = {
        {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = HEADS, .head_dim = DIM},
        {.kind = KVT_PART_V, .dtype = KVT_DTYPE_BF16, .heads = HEADS, .head_dim = DIM}};
    const struct kvt_part_place places[] = {
        {k, sizeof(k[0]), sizeof(k[0][0]), sizeof(k[0][0][0]), sizeof(uint16_t)},
        {v, sizeof(v[0]), sizeof(v[0][0]), sizeof(v[0][0][0]), sizeof(uint16_t)}};
    const struct kvt_layout layout = {
        .struct_size = sizeof(layout), .block_tokens = TOKENS, .part_count = 2, .parts = parts};
    const struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, BLOCKS, 2, places};
    struct kvt_identity who; /* two caches with equal identities may exchange blocks */
    struct kvt_config *config = NULL;
    char disk[512], error[512] = "";

    int rc = kvt_config_new(&config);
    if (rc)
        return rc;
    snprintf(disk, sizeof(disk), "%s:256MiB", dir ? dir : "");
    rc = kvt_config_set(config, "dram", "64MiB");
    if (!rc && dir)
        rc = kvt_config_set(config, "disk", disk);
    if (!rc)
        rc = kvt_open(config, cache, error, sizeof(error));
    if (rc || error[0]) /* also when it runs without its disk */
        fprintf(stderr, "remember: %s%s\n", kvt_config_error(config), error);
    kvt_config_free(config);
    kvt_identity_init(&who);
    who.engine = "example";
    who.key_scheme = KVT_KEY_SCHEME;
    who.model = "none";
    if (!rc)
        rc = kvt_ns_open(*cache, &who, &layout, ns);
    if (!rc)
        rc = kvt_pool_register(*cache, &layout, &desc, pool);
    return rc;
}

/* Store pages from[], load them into pages to[]. 0 or an error. */
static int store_and_load(struct kvt_ns *ns, struct kvt_pool *pool, const struct kvt_key *keys,
                          const uint32_t *from, const uint32_t *to)
{
    const struct kvt_store_opts exact = {.struct_size = sizeof(exact), .exact = 1};
    struct kvt_req *req = NULL;

    int rc = kvt_store(ns, pool, keys, from, N, &exact, &req);
    if (!rc)
        kvt_req_wait(req, -1);
    kvt_req_free(req);
    if (rc || kvt_lookup(ns, keys, N, NULL, NULL) != N)
        return rc ? rc : KVT_E_MISS;
    req = NULL;
    rc = kvt_load(ns, pool, keys, to, N, NULL, &req);
    if (!rc)
        kvt_req_wait(req, -1);
    kvt_req_free(req);
    return rc;
}

int main(int argc, char **argv)
{
    const uint32_t from[N] = {0, 1}, to[N] = {5, 6};
    struct kvt_cache *cache = NULL;
    struct kvt_ns *ns = NULL;
    struct kvt_pool *pool = NULL;
    struct kvt_key keys[N];
    uint32_t tokens[N * TOKENS];
    uint8_t root[32];

    for (uint32_t i = 0; i < N * TOKENS; i++)
        tokens[i] = 100 + i;
    for (int i = 0; i < N * HEADS * TOKENS * DIM; i++) { /* stands for what the model computed */
        (&k[0][0][0][0])[i] = (uint16_t)(0x3f80 + i % 97);
        (&v[0][0][0][0])[i] = (uint16_t)(0xbf00 + i % 89);
    }
    int rc = open_all(argc > 1 ? argv[1] : NULL, &cache, &ns, &pool);
    if (!rc)
        rc = kvt_key_root(NULL, 0, root);
    if (!rc && kvt_key_chain(root, tokens, N * TOKENS, TOKENS, NULL, 0, 0, 0, keys, N) != N)
        rc = KVT_E_INVAL;
    if (!rc) {
        printf("found before: %ld blocks\n", kvt_lookup(ns, keys, N, NULL, NULL));
        rc = store_and_load(ns, pool, keys, from, to);
    }
    int same = !rc && !memcmp(k[to[0]], k[from[0]], sizeof(k[0])) &&
               !memcmp(v[to[1]], v[from[1]], sizeof(v[0]));
    printf("loaded bytes are %s (%s)\n", same ? "the same" : "different", kvt_strerror(rc));
    if (pool)
        kvt_pool_unregister(pool);
    if (ns)
        kvt_ns_close(ns);
    kvt_close(cache);
    return same ? 0 : 1;
}
