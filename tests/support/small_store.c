#include "support/small_store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint16_t pages[SMALL_BLOCKS][SMALL_TOKENS][SMALL_DIM];

static const struct kvt_part parts[] = {
    {.kind = KVT_PART_K, .dtype = KVT_DTYPE_BF16, .heads = 1, .head_dim = SMALL_DIM}};

void small_store_init(struct small_store *store)
{
    const char *tmp = getenv("TMPDIR");

    memset(store, 0, sizeof(*store));
    snprintf(store->base, sizeof(store->base), "%s/kvt-tool-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(store->base));
    snprintf(store->dir, sizeof(store->dir), "%s/root", store->base);
}

void small_store_remove(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;

    if (!dir)
        return;
    while ((entry = readdir(dir)))
        (void)unlinkat(dirfd(dir), entry->d_name, 0);
    closedir(dir);
    (void)rmdir(path);
}

void small_store_done(struct small_store *store)
{
    small_store_close(store);
    small_store_remove(store->dir);
    small_store_remove(store->base);
}

void small_store_open(struct small_store *store)
{
    const struct kvt_part_place place = {pages, sizeof(pages[0]), sizeof(pages[0]),
                                         sizeof(pages[0][0]), 2};
    const struct kvt_layout layout = {sizeof(layout), SMALL_TOKENS, 1, parts};
    const struct kvt_pool_desc desc = {sizeof(desc), KVT_DEVICE_HOST, SMALL_BLOCKS, 1, &place};
    uint32_t tokens[SMALL_BLOCKS * SMALL_TOKENS];
    struct kvt_config *config;
    char disk[400], error[256];
    uint8_t root[32];

    assert_int_equal(kvt_config_new(&config), 0);
    assert_int_equal(kvt_config_set(config, "dram", "16MiB"), 0);
    snprintf(disk, sizeof(disk), "%s:64MiB", store->dir);
    assert_int_equal(kvt_config_set(config, "disk", disk), 0);
    assert_int_equal(kvt_config_set(config, "disk_required", "yes"), 0);
    if (kvt_open(config, &store->cache, error, sizeof(error)))
        fail_msg("%s", error);
    kvt_config_free(config);
    assert_int_equal(kvt_pool_register(store->cache, &layout, &desc, &store->pool), 0);
    for (uint32_t t = 0; t < SMALL_BLOCKS * SMALL_TOKENS; t++)
        tokens[t] = t + 1;
    for (int i = 0; i < 2; i++) {
        struct kvt_identity who;
        kvt_identity_init(&who);
        who.engine = "test";
        who.key_scheme = KVT_KEY_SCHEME;
        who.model = "none";
        who.salt = i ? "b" : "a";
        who.salt_len = 1;
        assert_int_equal(kvt_ns_open(store->cache, &who, &layout, &store->ns[i]), 0);
        for (unsigned b = 0; b < KVT_NS_BYTES; b++)
            snprintf(store->ids[i] + 2 * b, 3, "%02x", kvt_ns_id(store->ns[i])[b]);
        assert_int_equal(kvt_key_root(who.salt, 1, root), 0);
        assert_int_equal(kvt_key_chain(root, tokens, SMALL_BLOCKS * SMALL_TOKENS, SMALL_TOKENS,
                                       NULL, 0, 0, 0, store->keys[i], SMALL_BLOCKS),
                         SMALL_BLOCKS);
    }
}

void small_store_close(struct small_store *store)
{
    if (!store->cache)
        return;
    kvt_pool_unregister(store->pool);
    kvt_ns_close(store->ns[0]);
    kvt_ns_close(store->ns[1]);
    kvt_close(store->cache);
    store->cache = NULL;
}

void small_store_put(struct small_store *store, int i, uint32_t n, int exact)
{
    const struct kvt_store_opts opts = {.struct_size = sizeof(opts), .exact = exact};
    uint32_t ids[SMALL_BLOCKS];
    struct kvt_req *req;

    for (uint32_t b = 0; b < SMALL_BLOCKS; b++) {
        ids[b] = b;
        for (uint32_t e = 0; e < SMALL_TOKENS * SMALL_DIM; e++)
            pages[b][e / SMALL_DIM][e % SMALL_DIM] =
                (uint16_t)(0x3c00 + (e * 37 + b * 11 + (uint32_t)i) % 512);
    }
    assert_int_equal(kvt_pool_reset_origin(store->pool, ids, SMALL_BLOCKS), 0);
    assert_int_equal(kvt_store(store->ns[i], store->pool, store->keys[i], ids, n, &opts, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    kvt_req_free(req);
    assert_int_equal(kvt_flush(store->cache), 0);
}

uint32_t small_store_get(struct small_store *store, int i, uint32_t n)
{
    struct kvt_req_report report = {.struct_size = sizeof(report)};
    uint32_t ids[SMALL_BLOCKS];
    struct kvt_req *req;

    for (uint32_t b = 0; b < SMALL_BLOCKS; b++)
        ids[b] = b;
    assert_int_equal(kvt_load(store->ns[i], store->pool, store->keys[i], ids, n, NULL, &req), 0);
    assert_int_equal(kvt_req_wait(req, -1), 1);
    assert_int_equal(kvt_req_report(req, &report), 0);
    kvt_req_free(req);
    return (uint32_t)report.blocks_run_ok;
}

void small_store_wait_stats(const struct small_store *store, const char *line)
{
    static char text[65536];
    char path[400];

    snprintf(path, sizeof(path), "%s/stats", store->dir);
    for (int i = 0; i < 1000; i++) {
        FILE *f = fopen(path, "r");
        size_t n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;
        if (f)
            fclose(f);
        text[n] = '\0';
        if (strstr(text, line))
            return;
        usleep(20000);
    }
    fail_msg("the owner has not written '%s'", line);
}

void small_store_hex(const struct kvt_key *key, char text[2 * KVT_HASH_BYTES_MAX + 1])
{
    text[0] = '\0';
    for (unsigned i = 0; i < key->hash_len; i++)
        snprintf(text + 2 * i, 3, "%02x", key->hash[i]);
}
