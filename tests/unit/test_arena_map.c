/* The arena's memory: huge pages, NUMA node, and a cache without DRAM of its own.
 *
 * Goal:   the options do what they say or are refused by a sentence that names them; a cache works
 *         with every choice, byte for byte; the arena never takes more than its cap.
 * Method: caches with each choice, filled and read; what the kernel made of the advice is read from
 *         /proc/self/smaps for the arena's own addresses. Where the system has no huge pages, or
 *         forbids mbind, that is said and the refusal is what is tested.
 */
#include "support/rig.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/client.h"
#include "client/host.h"

enum { BLOCKS = 16 };

static struct rig rig;

static int tear_down(void **state)
{
    (void)state;
    rig_close(&rig);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    return 0;
}

static void begin(const char *config, const char *disk)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(&rig, &shape, config, disk);
}

/* Whether the smaps entry that holds an address has a flag. */
static bool smaps_flag(const void *address, const char *flag)
{
    FILE *file = fopen("/proc/self/smaps", "re");
    char line[512];
    bool inside = false, found = false;

    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        unsigned long from, to;

        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            inside = (uintptr_t)address >= from && (uintptr_t)address < to;
        else if (inside && strncmp(line, "VmFlags:", 8) == 0)
            found = strstr(line, flag) != NULL;
    }
    (void)fclose(file);
    return found;
}

static void store_and_load(void)
{
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

static void test_huge_pages(void **state)
{
    static const struct {
        const char *config;
        bool huge, none;
    } cases[] = {
        {"dram=70MiB", true, false},
        {"dram=70MiB,huge_pages=auto", true, false},
        {"dram=32MiB", false, false},
        {"dram=32MiB,huge_pages=on", true, false},
        {"dram=1MiB,huge_pages=on", false, false}, /* no room for one */
        {"dram=70MiB,huge_pages=off", false, true},
    };
    bool have = access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK) == 0;
    char text[64];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        begin(cases[i].config, NULL);
        if (!have) {
            printf("           no huge pages on this system\n");
            assert_int_equal(rig_try_open(&rig) != 0, i == 3);
            rig_close(&rig);
            rig_free(&rig);
            continue;
        }
        rig_open(&rig);
        assert_int_equal(smaps_flag(rig.cache->arena, " hg"), cases[i].huge);
        assert_int_equal(smaps_flag(rig.cache->arena, " nh"), cases[i].none);
        if (cases[i].huge)
            assert_int_equal((uintptr_t)rig.cache->arena % KVT_HUGE_BYTES, 0);
        assert_true(rig.cache->arena_bytes <= rig.cache->settings->dram);
        rig_stat_text(&rig, "dram.huge_pages", text, sizeof(text));
        assert_string_equal(text, cases[i].huge ? "asked for" : "no");
        store_and_load();
        rig_close(&rig);
        rig_free(&rig);
    }
    begin("dram=1MiB", NULL);
}

/* A share of what the machine or the container has, and no more than that among all ranks. */
static void test_share(void **state)
{
    uint64_t allowed = kvt_memory_allowed(), share;
    (void)state;
    assert_true(allowed > 64u << 20);
    begin("dram=64TiB,dram_share=2,ranks=2,numa_device=63", NULL); /* nobody knows that one */
    rig_open(&rig);
    share = rig.cache->settings->dram;
    assert_int_equal(share, kvt_memory_share(allowed, 2, 2));
    assert_true(share > 0 && share * 2 <= allowed / 50);
    assert_int_equal(share % (1u << 20), 0);
    assert_true(rig.cache->arena_bytes <= share);
}

static void test_numa_node(void **state)
{
    (void)state;
    begin("dram=8MiB,numa_node=0", NULL);
    if (rig_try_open(&rig) != 0) { /* a container may forbid it: then by a sentence */
        printf("           refused: %s\n", rig.error);
        assert_non_null(strstr(rig.error, "numa_node=0"));
        assert_null(rig.cache);
    } else {
        rig_close(&rig);
        rig_open(&rig);
        store_and_load();
        rig_close(&rig);
    }
    rig_free(&rig);
    begin("dram=8MiB,numa_node=1000", NULL);
    assert_true(rig_try_open(&rig) != 0);
    assert_null(rig.cache);
    assert_non_null(strstr(rig.error, "numa_node=1000"));
    printf("           %s\n", rig.error);
    rig_free(&rig);
    begin("dram=8MiB,numa_node=none", NULL);
    rig_open(&rig);
    store_and_load();
}

/* L1 = 0: blocks pass through staging to the disk and back, whatever the pages. */
static void test_without_dram(void **state)
{
    static const char *const configs[] = {
        "dram=0,staging=1MiB", "dram=0,staging=4MiB,huge_pages=on",
        "dram=0,staging=1MiB,write=evict", "dram=0,staging=1MiB,write=idle"};

    (void)state;
    for (size_t i = 0; i < sizeof(configs) / sizeof(configs[0]); i++) {
        begin(configs[i], "32MiB");
        rig_open(&rig);
        for (uint64_t seed = 1; seed < 1 + 8 * BLOCKS; seed += BLOCKS) {
            size_t stored = rig_store(&rig, seed, BLOCKS, 0, NULL);

            assert_int_equal(kvt_flush(rig.cache), 0);
            assert_int_equal(rig_lookup(&rig, seed, BLOCKS), stored);
            assert_int_equal(rig_load(&rig, seed, BLOCKS, NULL), stored);
            assert_true(stored > 0);
        }
        assert_int_equal(rig_stat(&rig, "dram.pins"), 0);
        assert_true(rig_stat(&rig, "dram.bytes_used") <= rig_stat(&rig, "dram.bytes_max"));
        rig_reopen(&rig);
        assert_true(rig_load(&rig, 1, BLOCKS, NULL) > 0);
        rig_close(&rig);
        rig_free(&rig);
    }
    begin("dram=1MiB", NULL);
}

/* A file below a directory of made control groups, with its directories. */
static void put(const char *dir, const char *name, const char *text)
{
    char path[512];

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    for (char *at = path + strlen(dir) + 1; (at = strchr(at, '/')) != NULL; *at++ = '/') {
        *at = '\0';
        (void)mkdir(path, 0700);
    }
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* The least limit of the process's group and of those above it, in both versions; what is no number
 * is none. Control groups made of files. */
static void test_limits_of_control_groups(void **state)
{
    static const struct {
        const char *groups, *files[4][2];
        uint64_t limit;
    } cases[] = {
        {"0::/\n", {{"memory.max", "500\n"}}, 500},
        {"0::/\n", {{"memory.max", "max\n"}}, UINT64_MAX},
        {"0::/a/b/c\n", {{"a/b/c/memory.max", "max\n"}, {"a/memory.max", "700\n"}}, 700},
        {"0::/a/b/c\n",
         {{"a/b/c/memory.max", "900\n"}, {"a/b/memory.max", "800\n"}, {"a/memory.max", "850\n"}},
         800},
        {"0::/a/b/c\n", {{"a/b/c/memory.max", "100\n"}, {"a/memory.max", "800\n"}}, 100},
        {"0::/a/b/\n", {{"a/x/memory.max", "3\n"}, {"b/memory.max", "4\n"}}, UINT64_MAX},
        {"3:cpu,cpuacct:/q\n2:memory:/a/b\n",
         {{"memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"},
          {"memory/a/memory.limit_in_bytes", "640\n"},
          {"memory/q/memory.limit_in_bytes", "6\n"}},
         640},
        {"4:hugetlb,memory:/a:b\n", {{"memory/a:b/memory.limit_in_bytes", "77\n"}}, 77},
        {"4:hugetlb,memory2:/a\n", {{"memory/a/memory.limit_in_bytes", "77\n"}}, UINT64_MAX},
        {"nonsense\n1:\n\n0::relative\n", {{"memory.max", "12x\n"}}, 12},
        {"", {{"memory/memory.limit_in_bytes", "55\n"}}, 55},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char dir[128], groups[160];
        rig_dir_make(dir, sizeof(dir));
        (void)snprintf(groups, sizeof(groups), "%s/groups", dir);
        put(dir, "groups", cases[i].groups);
        for (size_t j = 0; j < 4 && cases[i].files[j][0] != NULL; j++)
            put(dir, cases[i].files[j][0], cases[i].files[j][1]);
        uint64_t limit = kvt_cgroup_limit(groups, dir);
        if (limit != cases[i].limit)
            fail_msg("%zu: %llu", i, (unsigned long long)limit);
        rig_dir_remove(dir);
    }
    assert_true(kvt_cgroup_limit("/nowhere", "/nowhere") == UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_huge_pages, tear_down),
        cmocka_unit_test_teardown(test_share, tear_down),
        cmocka_unit_test(test_limits_of_control_groups),
        cmocka_unit_test_teardown(test_numa_node, tear_down),
        cmocka_unit_test_teardown(test_without_dram, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
