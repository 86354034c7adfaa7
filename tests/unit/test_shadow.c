/* Goal: in shadow mode an engine finds nothing and gets nothing, stores as always, and the
 * statistics say what loading would have saved, by the plan: nothing where computing is faster. A
 * prompt that is asked about again within a second counts once; probes see what there is; what
 * would have been loaded is touched, so that eviction goes on as if it had been.
 * Method: a live cache over DRAM, and one over a disk; groups; counters of both halves.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "kvtier/error.h"
#include "support/rig.h"

#define BLOCKS 40

static void open_rig(struct rig *rig, const char *config, const char *disk)
{
    struct rig_shape shape = rig_shape_small(256);
    rig_init(rig, &shape, config, disk);
    rig_open(rig);
}

static long look(struct rig *rig, uint64_t seed, size_t n, uint32_t flags, enum kvt_tier *tiers)
{
    struct kvt_key keys[256];
    const struct kvt_lookup_opts opts = {.struct_size = sizeof(opts), .flags = flags};
    for (size_t i = 0; i < n; i++)
        keys[i] = rig_key(seed + i);
    return kvt_lookup(rig->ns, keys, n, &opts, tiers);
}

static void nothing_is_found_and_all_is_counted(void **state)
{
    (void)state;
    struct rig rig;
    enum kvt_tier tiers[BLOCKS];
    char text[64];
    open_rig(&rig, "dram=64MiB,shadow=yes,plan_prefill=1000", NULL);
    const uint64_t tokens = (uint64_t)BLOCKS * rig.shape.tokens;
    rig_stat_text(&rig, "cache.state", text, sizeof(text));
    assert_string_equal(text, "shadow");
    assert_int_equal(look(&rig, 1, BLOCKS, 0, tiers), 0); /* a first prompt: nothing is there */
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_stat(&rig, "shadow.hits"), 0);
    rig_sleep_ms(1100);
    assert_int_equal(look(&rig, 1, BLOCKS, 0, tiers), 0);
    for (size_t i = 0; i < BLOCKS; i++)
        assert_int_equal(tiers[i], KVT_TIER_MISS);
    assert_int_equal(look(&rig, 1, BLOCKS, 0, NULL), 0); /* the engine asks again at once */
    assert_int_equal(rig_stat(&rig, "shadow.prompts"), 2);
    assert_int_equal(rig_stat(&rig, "shadow.hits"), 1);
    assert_int_equal(rig_stat(&rig, "shadow.blocks_dram"), BLOCKS);
    assert_int_equal(rig_stat(&rig, "shadow.blocks_disk"), 0);
    assert_int_equal(rig_stat(&rig, "shadow.tokens"), tokens);
    /* 1,000 tokens a second and a little for attention: all of it but the load is saved */
    uint64_t prefill = rig_stat(&rig, "shadow.prefill_us");
    uint64_t saved = rig_stat(&rig, "shadow.saved_ttft_us");
    assert_true(prefill >= 2 * tokens * 1000 && prefill < 3 * tokens * 1000);
    assert_true(saved > tokens * 900 && saved < tokens * 1100);
    assert_true(rig_stat(&rig, "shadow.saved_gpu_us") > tokens * 900);
    /* what is there is there for whoever only looks */
    assert_int_equal(look(&rig, 1, BLOCKS, KVT_LOOKUP_PROBE, tiers), BLOCKS);
    assert_int_equal(tiers[BLOCKS - 1], KVT_TIER_DRAM);
    assert_int_equal(look(&rig, 1, BLOCKS, 2, NULL), KVT_E_INVAL);
    assert_int_equal(rig_stat(&rig, "shadow.prompts"), 2);
    /* a load brings nothing and touches no page */
    int32_t status[BLOCKS];
    assert_int_equal(rig_load(&rig, 1, BLOCKS, status), 0);
    for (size_t i = 0; i < BLOCKS; i++)
        assert_int_equal(status[i], KVT_E_MISS);
    assert_int_equal(rig_stat(&rig, "shadow.load_blocks"), BLOCKS);
    assert_int_equal(rig_stat(&rig, "load.granted_dram"), 0);
    struct kvt_key key = rig_key(1);
    assert_int_equal(kvt_prefetch(rig.ns, &key, 1, NULL), 0);
    rig_free(&rig);
}

static void where_computing_is_faster_nothing_is_saved(void **state)
{
    (void)state;
    struct rig rig;
    open_rig(&rig, "dram=64MiB,shadow=yes,plan_prefill=100000000,plan_dram=1MiB,plan=deterministic",
             NULL);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(look(&rig, 1, BLOCKS, 0, NULL), 0);
    assert_int_equal(rig_stat(&rig, "shadow.prompts"), 1);
    assert_int_equal(rig_stat(&rig, "shadow.hits"), 0);
    assert_int_equal(rig_stat(&rig, "shadow.tokens"), 0);
    assert_int_equal(rig_stat(&rig, "shadow.saved_ttft_us"), 0);
    rig_free(&rig);
}

/* From disk; and after a restart without shadow mode everything is there to be loaded. */
static void what_is_on_disk_is_told_apart(void **state)
{
    (void)state;
    struct rig rig;
    open_rig(&rig, "dram=16MiB,shadow=yes,plan_prefill=1000", "64MiB");
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    rig_reopen(&rig);
    assert_int_equal(look(&rig, 1, BLOCKS, 0, NULL), 0);
    assert_int_equal(rig_stat(&rig, "shadow.blocks_disk"), BLOCKS);
    assert_int_equal(rig_stat(&rig, "shadow.blocks_dram"), 0);
    assert_int_equal(rig_stat(&rig, "disk.read_blocks"), 0);
    (void)snprintf(rig.config, sizeof(rig.config), "dram=16MiB");
    rig_reopen(&rig);
    assert_int_equal(rig_lookup(&rig, 1, BLOCKS), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
    assert_int_equal(rig_stat(&rig, "shadow.prompts"), 0);
    rig_free(&rig);
}

/* Looked up in shadow mode again and again, a chain stays while others come and go. */
static void what_would_be_loaded_stays(void **state)
{
    (void)state;
    struct rig rig;
    open_rig(&rig, "dram=2MiB,staging=256KiB,shadow=yes,plan_prefill=1000", NULL);
    assert_int_equal(rig_store(&rig, 1, 20, 0, NULL), 20);
    for (uint64_t i = 0; i < 60; i++) {
        assert_int_equal(look(&rig, 1, 20 + i, 0, NULL), 0); /* longer each time: another prompt */
        rig_store(&rig, 10000 + 100 * i, 20, 0, NULL);
    }
    assert_true(rig_stat(&rig, "dram.evicted") > 100);
    assert_true(look(&rig, 1, 20, KVT_LOOKUP_PROBE, NULL) >= 19);
    rig_free(&rig);
}

struct asker {
    struct rig *rig;
    uint64_t first;
    long worst;
};

static void *ask_often(void *arg)
{
    struct asker *asker = arg;
    for (uint64_t i = 0; i < 150; i++) {
        long run = look(asker->rig, asker->first, 20 + i % 100, 0, NULL);
        long seen = look(asker->rig, 1, 20, KVT_LOOKUP_PROBE, NULL);
        if (run != 0 || seen != 20)
            asker->worst = run != 0 ? run : seen - 20;
    }
    return NULL;
}

/* Several engines' threads ask at a time, with a trace beside it: each is answered with nothing,
 * none is counted twice, and every line is whole. */
static void many_ask_at_a_time(void **state)
{
    (void)state;
    struct rig rig;
    struct asker askers[4];
    pthread_t threads[4];
    char dir[128], path[256], config[512], line[4096];
    unsigned lines = 0;
    rig_dir_make(dir, sizeof(dir));
    (void)snprintf(path, sizeof(path), "%s/trace", dir);
    (void)snprintf(config, sizeof(config), "dram=64MiB,shadow=yes,trace=%s", path);
    open_rig(&rig, config, NULL);
    assert_int_equal(rig_store(&rig, 1, 20, 0, NULL), 20);
    for (size_t i = 0; i < 4; i++) {
        askers[i] = (struct asker){&rig, i < 2 ? 1 : 1000 * i, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, ask_often, &askers[i]), 0);
    }
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(askers[i].worst, 0);
    }
    assert_true(rig_stat(&rig, "shadow.prompts") > 0 && rig_stat(&rig, "shadow.prompts") <= 600);
    uint64_t written = rig_stat(&rig, "trace.written");
    assert_int_equal(written + rig_stat(&rig, "trace.repeated"), 600);
    rig_free(&rig);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file) != NULL) {
        size_t n = strlen(line);
        assert_true(line[0] == '{' && n > 3 && strcmp(line + n - 3, "]}\n") == 0);
        lines++;
    }
    assert_int_equal(fclose(file), 0);
    assert_int_equal(lines, written);
    rig_dir_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_found_and_all_is_counted),
        cmocka_unit_test(where_computing_is_faster_nothing_is_saved),
        cmocka_unit_test(what_is_on_disk_is_told_apart),
        cmocka_unit_test(what_would_be_loaded_stays),
        cmocka_unit_test(many_ask_at_a_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
