/* The arena in physical memory. C37: a hook that fails leaves a cache that works unpinned, with one
 * warning and pinned_bytes 0. C39: how a range is cut. Also: pin=required opens or says why;
 * closing while pinning is quick and leaves nothing pinned.
 *
 * Method: a hook that counts, can be made to fail at piece N and can be held at piece N, over small
 * pieces of a real mapping (struct kvt_pin alone) and below a real cache; the host's own hook under
 * a limit of its own, in a child process that gave up its rights.
 */
#include "support/rig.h"

#include <errno.h>
#include <semaphore.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "client/client.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

/* ---- the plan ------------------------------------------------------------------------------ */

static void check_plan(uint64_t bytes, uint64_t row, uint64_t max, uint64_t want_count)
{
    struct kvt_pin_plan plan;
    uint64_t at = 0;
    assert_true(kvt_pin_plan(bytes, row, max, &plan));
    assert_int_equal(plan.count, want_count);
    for (uint64_t i = 0; i < plan.count; i++) {
        uint64_t offset, piece;
        kvt_pin_piece(&plan, i, &offset, &piece);
        assert_int_equal(offset, at); /* no gap, no overlap */
        assert_true(piece > 0 && piece <= max);
        assert_int_equal(offset % row, 0); /* no row is split */
        at += piece;
    }
    assert_int_equal(at, bytes);
}

static void test_c39_pieces_split_no_row(void **state)
{
    struct kvt_pin_plan plan;
    (void)state;
    check_plan(600 * GIB, MIB, 64 * GIB, 10);
    check_plan(600 * GIB, 3 * MIB, 64 * GIB, 10); /* 64 GiB is no multiple of the row */
    check_plan(64 * GIB, MIB, 64 * GIB, 1);
    check_plan(64 * GIB + 1, MIB, 64 * GIB, 2);
    check_plan(10, 3, 7, 2);
    check_plan(1, MIB, GIB, 1);
    assert_false(kvt_pin_plan(0, MIB, GIB, &plan));
    assert_false(kvt_pin_plan(GIB, 0, GIB, &plan));
    assert_false(kvt_pin_plan(GIB, GIB + 1, GIB, &plan)); /* one row would be split */
}

static void copies_are_cut_where_pieces_meet(void **state)
{
    struct kvt_pin_plan plan;
    (void)state;
    assert_true(kvt_pin_plan(10 * GIB, 2 * MIB, GIB, &plan));
    assert_int_equal(kvt_pin_cut(&plan, 0, 4 * GIB), GIB);
    assert_int_equal(kvt_pin_cut(&plan, GIB - 4096, 8192), 4096);
    assert_int_equal(kvt_pin_cut(&plan, GIB, 8192), 8192);
    assert_int_equal(kvt_pin_cut(&plan, 3 * GIB + 5, 7), 7);
}

/* ---- a hook under control ------------------------------------------------------------------ */

struct hook {
    int fail_at;  /* piece, from 0; -1 never */
    int error;    /* what it fails with */
    int block_at; /* piece that waits for `go`; -1 never */
    sem_t entered, go;
    _Atomic int calls;
    _Atomic long held; /* bytes */
};

static int hook_pin(void *ctx, void *base, uint64_t bytes)
{
    struct hook *hook = ctx;
    int call = atomic_fetch_add(&hook->calls, 1);
    assert_true((uintptr_t)base % 4096 == 0);
    if (call == hook->block_at) {
        sem_post(&hook->entered);
        while (sem_wait(&hook->go) != 0)
            ;
    }
    if (call == hook->fail_at)
        return hook->error;
    atomic_fetch_add(&hook->held, (long)bytes);
    return 0;
}

static void hook_unpin(void *ctx, void *base, uint64_t bytes)
{
    struct hook *hook = ctx;
    (void)base;
    atomic_fetch_sub(&hook->held, (long)bytes);
}

static struct kvt_pin_ops hook_ops(struct hook *hook)
{
    memset(hook, 0, sizeof(*hook));
    hook->fail_at = hook->block_at = -1;
    assert_int_equal(sem_init(&hook->entered, 0, 0), 0);
    assert_int_equal(sem_init(&hook->go, 0, 0), 0);
    return (struct kvt_pin_ops){"test hook", hook_pin, hook_unpin, hook};
}

static void wait_until_settled(const struct kvt_pin *pin)
{
    for (int i = 0; i < 10000 && kvt_pin_state(pin) == KVT_PIN_PINNING; i++)
        rig_sleep_ms(1);
    assert_int_not_equal(kvt_pin_state(pin), KVT_PIN_PINNING);
}

/* A pin object over address space that is never touched, in pieces of 1 MiB. */
static uint8_t ground[1];
static void pin_make(struct kvt_pin *pin, uint64_t pieces)
{
    static const struct kvt_log quiet;
    kvt_pin_init(pin, (void *)((uintptr_t)ground & ~(uintptr_t)4095), pieces * MIB, 4096, &quiet);
    assert_true(kvt_pin_plan(pieces * MIB, 4096, MIB, &pin->plan));
}

static void pins_all_and_lets_go_of_all(void **state)
{
    struct kvt_pin pin;
    struct hook hook;
    struct kvt_pin_ops ops = hook_ops(&hook);
    char text[100];
    (void)state;
    pin_make(&pin, 5);
    assert_string_equal(kvt_pin_text(&pin, text, sizeof(text)), "off");
    assert_int_equal(kvt_pin_start(&pin, &ops), 0);
    wait_until_settled(&pin);
    assert_int_equal(kvt_pin_state(&pin), KVT_PIN_READY);
    assert_string_equal(kvt_pin_text(&pin, text, sizeof(text)), "ready");
    assert_int_equal(kvt_pin_bytes(&pin), 5 * MIB);
    assert_int_equal(hook.held, 5 * MIB);
    assert_int_equal(kvt_pin_start(&pin, &ops), 0); /* again: nothing */
    assert_int_equal(kvt_pin_now(&pin, &ops), 0);
    assert_int_equal(hook.calls, 5);
    kvt_pin_stop(&pin);
    kvt_pin_stop(&pin);
    assert_int_equal(hook.held, 0);
    assert_int_equal(kvt_pin_bytes(&pin), 0);
    assert_string_equal(kvt_pin_text(&pin, text, sizeof(text)), "off");
}

static void another_hook_takes_over(void **state)
{
    struct kvt_pin pin;
    struct hook first, second;
    struct kvt_pin_ops ops1 = hook_ops(&first), ops2 = hook_ops(&second);
    (void)state;
    pin_make(&pin, 3);
    assert_int_equal(kvt_pin_now(&pin, &ops1), 0);
    assert_int_equal(first.held, 3 * MIB);
    assert_int_equal(kvt_pin_now(&pin, &ops2), 0);
    assert_int_equal(first.held, 0);
    assert_int_equal(second.held, 3 * MIB);
    kvt_pin_stop(&pin);
    assert_int_equal(second.held, 0);
}

static void stop_waits_for_one_piece_only(void **state)
{
    struct kvt_pin pin;
    struct hook hook;
    struct kvt_pin_ops ops = hook_ops(&hook);
    (void)state;
    pin_make(&pin, 1000);
    hook.block_at = 3;
    assert_int_equal(kvt_pin_start(&pin, &ops), 0);
    while (sem_wait(&hook.entered) != 0)
        ;
    assert_int_equal(kvt_pin_state(&pin), KVT_PIN_PINNING);
    assert_int_equal(kvt_pin_bytes(&pin), 3 * MIB);
    atomic_store(&pin.stop, 1); /* what kvt_pin_stop() says first */
    sem_post(&hook.go);
    kvt_pin_stop(&pin);
    assert_int_equal(hook.calls, 4);
    assert_int_equal(hook.held, 0);
    assert_int_equal(kvt_pin_bytes(&pin), 0);
}

/* ---- huge pages first ---------------------------------------------------------------------- */

/* Bytes of the mapping at `base` that huge pages serve, as the kernel tells it. */
static uint64_t huge_bytes(uint8_t *base, uint64_t bytes)
{
    volatile const uint8_t *touched = base;
    unsigned long from, to, kib = 0;
    uint64_t sum = 0;
    bool inside = false;
    char line[512];
    FILE *file;
    for (uint64_t at = 0; at < bytes; at += KVT_HUGE_BYTES)
        (void)touched[at]; /* mapped anew, where the pages have been moved together */
    file = fopen("/proc/self/smaps", "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file) != NULL) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            inside = (uintptr_t)base >= from && (uintptr_t)base < to;
        else if (inside && sscanf(line, "ShmemPmdMapped: %lu", &kib) == 1)
            sum += (uint64_t)kib << 10;
    }
    (void)fclose(file);
    return sum;
}

struct huge_hook {
    uint8_t *base;
    uint64_t bytes, found;
};

static int huge_pin(void *ctx, void *base, uint64_t bytes)
{
    struct huge_hook *hook = ctx;
    (void)base;
    (void)bytes;
    hook->found = huge_bytes(hook->base, hook->bytes);
    return 0;
}

static void huge_unpin(void *ctx, void *base, uint64_t bytes)
{
    (void)ctx;
    (void)base;
    (void)bytes;
}

/* What a device has pinned stays small: so the huge pages are there before, if they are wanted. */
static void shared_memory_gets_huge_pages_before_it_is_pinned(void **state)
{
    static const struct kvt_log quiet;
    const uint64_t bytes = KVT_HUGE_ARENA_MIN;
    _Atomic int stop = 1;
    struct kvt_arena_map map;
    struct huge_hook hook = {.bytes = bytes};
    struct kvt_pin_ops ops = {"test hook", huge_pin, huge_unpin, &hook};
    struct kvt_pin pin;
    int fd = memfd_create("kvtier-test", MFD_CLOEXEC);
    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    assert_int_equal(kvt_arena_map_fd(fd, bytes, &map), 0);
    (void)close(fd);
    hook.base = map.arena;
    for (uint64_t at = 0; at < bytes; at += 4096)
        map.arena[at] = (uint8_t)(at >> 12);
    (void)kvt_huge_make(map.arena, bytes, &stop); /* told to stop: nothing */
    const uint64_t before = huge_bytes(map.arena, bytes);
    kvt_pin_init(&pin, map.arena, bytes, KVT_HUGE_BYTES, &quiet);
    assert_int_equal(kvt_pin_now(&pin, &ops), 0);
    assert_int_equal(hook.found, before); /* nobody wants them */
    kvt_pin_stop(&pin);
    pin.huge = true;
    assert_int_equal(kvt_pin_now(&pin, &ops), 0);
    printf("           huge pages: %llu MiB before, %llu of %llu when it was pinned\n",
           (unsigned long long)(before >> 20), (unsigned long long)(hook.found >> 20),
           (unsigned long long)(bytes >> 20));
    assert_int_equal(kvt_pin_state(&pin), KVT_PIN_READY); /* also where there are none */
    if (before < bytes && madvise(map.arena, KVT_HUGE_BYTES, 25 /* MADV_COLLAPSE */) == 0)
        assert_true(hook.found >= bytes / 2); /* a busy machine may not have them all */
    for (uint64_t at = 0; at < bytes; at += 4096)
        assert_int_equal(map.arena[at], (uint8_t)(at >> 12));
    kvt_pin_stop(&pin);
    kvt_arena_unmap(&map);
}

/* ---- below a cache ------------------------------------------------------------------------- */

static struct rig rig;
static struct kvt_pin_ops rig_ops;

static void use_hook(struct kvt_config *config)
{
    config->settings.pin_ops = &rig_ops;
}

static void rig_end(void)
{
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
}

static int tear_down(void **state)
{
    (void)state;
    rig_end();
    return 0;
}

static void fails_and_runs(int error, const char *reason)
{
    struct rig_shape shape = rig_shape_small(8);
    struct hook hook;
    char text[200];
    rig_ops = hook_ops(&hook);
    hook.fail_at = 0;
    hook.error = error;
    rig_init(&rig, &shape, "dram=1MiB", NULL);
    rig_open(&rig);
    assert_int_equal(kvt_pin_start(&rig.cache->pin, &rig_ops), 0); /* as a GPU pool does */
    wait_until_settled(&rig.cache->pin);
    assert_int_equal(kvt_pin_start(&rig.cache->pin, &rig_ops), 0); /* a second pool */
    assert_int_equal(rig_stat(&rig, "dram.pinned_bytes"), 0);
    rig_stat_text(&rig, "dram.pin_state", text, sizeof(text));
    assert_non_null(strstr(text, "failed: "));
    assert_non_null(strstr(text, reason));
    assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
    assert_int_equal(rig_load(&rig, 1, 8, NULL), 8);
    rig_close(&rig);
    assert_int_equal(rig.warnings, 1);
    assert_non_null(strstr(rig.log, "going on unpinned"));
    assert_int_equal(hook.held, 0);
    assert_int_equal(hook.calls, 1);
    rig_end();
}

static void test_c37_a_hook_that_fails_leaves_a_cache_that_works(void **state)
{
    (void)state;
    fails_and_runs(-EPERM, "not permitted");
    fails_and_runs(-ENOMEM, "emory");
    fails_and_runs(KVT_E_UNSUPPORTED, kvt_strerror(KVT_E_UNSUPPORTED));
}

static void test_c37_a_refusal_half_way_lets_go_of_what_was_pinned(void **state)
{
    struct kvt_pin pin;
    struct hook hook;
    struct kvt_pin_ops ops = hook_ops(&hook);
    (void)state;
    for (int at = 0; at < 4; at++) {
        ops = hook_ops(&hook);
        hook.fail_at = at;
        hook.error = -ENOMEM;
        pin_make(&pin, 4);
        assert_int_equal(kvt_pin_now(&pin, &ops), -ENOMEM);
        assert_int_equal(kvt_pin_state(&pin), KVT_PIN_FAILED);
        assert_int_equal(kvt_pin_bytes(&pin), 0);
        assert_int_equal(hook.held, 0);
        assert_int_equal(kvt_pin_now(&pin, &ops), -ENOMEM); /* not tried again */
        assert_int_equal(hook.calls, at + 1);
        kvt_pin_stop(&pin);
    }
}

static void test_c37_stores_and_loads_run_while_pinning(void **state)
{
    struct rig_shape shape = rig_shape_small(8);
    struct hook hook;
    char text[64];
    (void)state;
    rig_ops = hook_ops(&hook);
    hook.block_at = 0;
    rig_init(&rig, &shape, "dram=1MiB", NULL);
    rig_open(&rig);
    assert_int_equal(kvt_pin_start(&rig.cache->pin, &rig_ops), 0);
    while (sem_wait(&hook.entered) != 0)
        ;
    rig_stat_text(&rig, "dram.pin_state", text, sizeof(text));
    assert_string_equal(text, "pinning");
    assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
    assert_int_equal(rig_load(&rig, 1, 8, NULL), 8);
    sem_post(&hook.go);
    wait_until_settled(&rig.cache->pin);
    assert_int_equal(rig_stat(&rig, "dram.pinned_bytes"), MIB);
    assert_int_equal(rig_load(&rig, 1, 8, NULL), 8);
    rig_close(&rig);
    assert_int_equal(hook.held, 0);
}

static void closing_while_pinning_leaves_nothing_pinned(void **state)
{
    struct rig_shape shape = rig_shape_small(8);
    struct hook hook;
    (void)state;
    for (int round = 0; round < 20; round++) {
        rig_ops = hook_ops(&hook);
        rig_init(&rig, &shape, "dram=1MiB", NULL);
        rig_open(&rig);
        assert_int_equal(kvt_pin_start(&rig.cache->pin, &rig_ops), 0);
        rig_end();
        assert_int_equal(hook.held, 0);
    }
}

static void auto_and_off_leave_a_cpu_user_alone(void **state)
{
    static const char *const configs[] = {"dram=1MiB", "dram=1MiB,pin=off"};
    struct rig_shape shape = rig_shape_small(8);
    struct hook hook;
    char text[64];
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(configs); i++) {
        rig_ops = hook_ops(&hook);
        rig_init(&rig, &shape, configs[i], NULL);
        rig.tweak = use_hook;
        rig_open(&rig);
        rig_stat_text(&rig, "dram.pin_state", text, sizeof(text));
        assert_string_equal(text, "off");
        assert_int_equal(rig_store(&rig, 1, 8, 0, NULL), 8);
        rig_end();
        assert_int_equal(hook.calls, 0);
    }
}

static void required_opens_pinned_or_not_at_all(void **state)
{
    struct rig_shape shape = rig_shape_small(8);
    struct hook hook;
    (void)state;
    rig_ops = hook_ops(&hook);
    rig_init(&rig, &shape, "dram=1MiB,pin=required", NULL);
    rig.tweak = use_hook;
    rig_open(&rig);
    assert_int_equal(rig_stat(&rig, "dram.pinned_bytes"), MIB);
    rig_close(&rig);
    assert_int_equal(hook.held, 0);

    hook.fail_at = 1;
    hook.error = -EPERM;
    assert_int_equal(rig_try_open(&rig), -EPERM);
    assert_non_null(strstr(rig.error, "pin=required"));
    assert_non_null(strstr(rig.error, "1MiB"));
    assert_non_null(strstr(rig.error, "RLIMIT_MEMLOCK"));
    assert_non_null(strstr(rig.error, "pin=auto"));
    assert_int_equal(rig.warnings, 0);
    assert_null(rig.cache);
}

/* The host's own hook: in a child without CAP_IPC_LOCK, under a limit of 64 KiB. */
static int host_child(void)
{
    struct rlimit limit = {64 << 10, 64 << 10};
    struct kvt_pin pin;
    static const struct kvt_log quiet;
    char text[500];
    void *map = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED || setrlimit(RLIMIT_MEMLOCK, &limit) != 0)
        return 1;
    if (geteuid() == 0 && setuid(65534) != 0)
        return 77;
    kvt_pin_init(&pin, map, MIB, 4096, &quiet);
    int rc = kvt_pin_now(&pin, kvt_pin_host_ops());
    if (rc != -ENOMEM && rc != -EPERM)
        return 2;
    kvt_pin_describe("mlock", MIB, rc, text, sizeof(text));
    if (strstr(text, "RLIMIT_MEMLOCK) is 64KiB") == NULL || strstr(text, "ulimit -l") == NULL)
        return 3;
    kvt_pin_stop(&pin);
    kvt_pin_init(&pin, map, 16384, 4096, &quiet); /* within the limit */
    if (kvt_pin_now(&pin, kvt_pin_host_ops()) != 0 || kvt_pin_bytes(&pin) != 16384)
        return 4;
    kvt_pin_stop(&pin);
    kvt_pin_init(&pin, map, 65536, 4096, &quiet); /* only if the 16 KiB were let go */
    if (kvt_pin_now(&pin, kvt_pin_host_ops()) != 0)
        return 5;
    kvt_pin_stop(&pin);
    return 0;
}

static void the_host_hook_obeys_the_limit(void **state)
{
    int status;
    (void)state;
    if (strstr(kvt_build_info(), "sanitizer") != NULL)
        skip(); /* sanitizers make mlock() do nothing */
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(host_child());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c39_pieces_split_no_row),
        cmocka_unit_test(copies_are_cut_where_pieces_meet),
        cmocka_unit_test(pins_all_and_lets_go_of_all),
        cmocka_unit_test(another_hook_takes_over),
        cmocka_unit_test(stop_waits_for_one_piece_only),
        cmocka_unit_test(shared_memory_gets_huge_pages_before_it_is_pinned),
        cmocka_unit_test_teardown(test_c37_a_hook_that_fails_leaves_a_cache_that_works, tear_down),
        cmocka_unit_test(test_c37_a_refusal_half_way_lets_go_of_what_was_pinned),
        cmocka_unit_test_teardown(test_c37_stores_and_loads_run_while_pinning, tear_down),
        cmocka_unit_test_teardown(closing_while_pinning_leaves_nothing_pinned, tear_down),
        cmocka_unit_test_teardown(auto_and_off_leave_a_cpu_user_alone, tear_down),
        cmocka_unit_test_teardown(required_opens_pinned_or_not_at_all, tear_down),
        cmocka_unit_test(the_host_hook_obeys_the_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
