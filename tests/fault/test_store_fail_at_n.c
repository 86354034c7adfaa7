/* Fail at N: whichever single operation of the drive goes wrong, nobody gets other bytes.
 *
 * Goal: for every scenario (what is done x how the drive fails) and for N = 1, 2, ... the N-th
 * operation from the opening on goes wrong, until N is past the last one and the scenario passes
 * untouched. Each time: the store opens or refuses; every load is exact or a miss; invariants hold
 * after each step (the rig's); once the drive is well again the store takes blocks and gives them
 * back; and what a crash right then leaves behind opens on a sound drive, exact or miss. Where the
 * drive is honest (it says when it fails), a FLUSH that returned 0 means that all is there after
 * the crash, but for what lay in a segment that has been recycled since (the medium says so:
 * support/place.h) and the blocks behind it, and a PURGE that returned 0 that it is gone. Method:
 * support/store_rig over support/fault_io over memory, the test's clock; media are copied, so that
 * each N starts from the same files. KVT_FAIL_AT_STEP=n tries every n-th N only. KVT_FAIL_AT_IO=
 * posix or uring: over real files below TMPDIR instead (support/step_io.h). KVT_FAIL_AT_PART=k/n:
 * the k-th of n parts of the scenarios (k from 0), for several processors. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "support/fault_io.h"
#include "support/place.h"
#include "support/practice.h"
#include "support/step_io.h"
#include "support/store_rig.h"

#define N_MAX 5000u
#define CHAIN 8u

static const uint32_t pages[7] = {0, 1, 1, 2, 2, 3, 4};

struct failure {
    const char *name;
    bool honest; /* an operation that did not do what was asked says so */
    struct fault_rule rule;
};

static const struct failure failures[] = {
    {"EIO once", true, {.ops = FAULT_ALL, .times = 1, .action = FAULT_FAIL, .error = EIO}},
    {"EIO from then on", true, {.ops = FAULT_ALL, .times = 0, .action = FAULT_FAIL, .error = EIO}},
    {"EIO four times", true, {.ops = FAULT_ALL, .times = 4, .action = FAULT_FAIL, .error = EIO}},
    {"EINTR once", true, {.ops = FAULT_ALL, .times = 1, .action = FAULT_FAIL, .error = EINTR}},
    {"EAGAIN twice", true, {.ops = FAULT_ALL, .times = 2, .action = FAULT_FAIL, .error = EAGAIN}},
    {"the queue is full three times", true, {.ops = FAULT_DATA, .times = 3, .action = FAULT_BUSY}},
    {"reads of segments fail from then on",
     true,
     {.ops = FAULT_READ, .name = "seg-", .times = 0, .action = FAULT_FAIL, .error = EIO}},
    {"opening files fails twice",
     true,
     {.ops = FAULT_OPEN, .times = 2, .action = FAULT_FAIL, .error = EIO}},
    {"ENOSPC once",
     true,
     {.ops = FAULT_WRITE | FAULT_ALLOCATE | FAULT_TRUNCATE | FAULT_OPEN,
      .times = 1,
      .action = FAULT_FAIL,
      .error = ENOSPC}},
    {"ENOSPC from then on",
     true,
     {.ops = FAULT_WRITE | FAULT_ALLOCATE | FAULT_TRUNCATE,
      .times = 0,
      .action = FAULT_FAIL,
      .error = ENOSPC}},
    {"EDQUOT twice",
     true,
     {.ops = FAULT_WRITE | FAULT_ALLOCATE, .times = 2, .action = FAULT_FAIL, .error = EDQUOT}},
    {"a sync fails",
     true,
     {.ops = FAULT_SYNC | FAULT_SYNC_DIR, .times = 1, .action = FAULT_FAIL, .error = EIO}},
    {"a write is torn, and says so",
     true,
     {.ops = FAULT_WRITE, .times = 1, .action = FAULT_TORN, .error = EIO, .arg = 9}},
    {"a write is torn in its first page",
     false,
     {.ops = FAULT_WRITE, .times = 1, .action = FAULT_TORN, .arg = 1}},
    {"a write is torn at a page",
     false,
     {.ops = FAULT_WRITE, .times = 1, .action = FAULT_TORN, .arg = 8}},
    {"a write is lost", false, {.ops = FAULT_WRITE, .times = 1, .action = FAULT_LOST}},
    {"all writes are lost", false, {.ops = FAULT_WRITE, .times = 0, .action = FAULT_LOST}},
    {"a write lands a page further",
     false,
     {.ops = FAULT_WRITE, .times = 1, .action = FAULT_MISDIRECT, .arg = 1}},
    {"a bit flips in a read",
     true,
     {.ops = FAULT_READ, .times = 1, .action = FAULT_FLIP, .arg = FAULT_RANDOM}},
    {"a read is short", true, {.ops = FAULT_READ, .times = 1, .action = FAULT_SHORT, .arg = 1}},
    {"a bit flips in a write",
     false,
     {.ops = FAULT_WRITE, .times = 1, .action = FAULT_FLIP, .arg = FAULT_RANDOM}},
    {"a read comes from a page further",
     false,
     {.ops = FAULT_READ, .times = 1, .action = FAULT_MISDIRECT, .arg = 1}},
};

/* What the store acknowledged: only ever asked of an honest drive. */
struct acks {
    bool flushed[256], purged[256];
    uint64_t first[256]; /* of the chain that the block was flushed with */
    struct place places[256];
};

static struct kvt_io *image; /* a root with chain 1..8 flushed and 9..12 purged */
static struct acks image_acks;
static uint64_t scenarios, fired_points, recycled_blocks;
static int backend = -1; /* of real files; -1: memory */

static void chain(uint64_t first, uint32_t count, uint64_t *numbers)
{
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = first + i;
}

/* Where the flushed ones are now: they may have been moved. One that was just flushed and is
 * nowhere has gone with a segment since it was written. */
static void note_places(struct rig *rig, uint32_t ns, struct acks *acks)
{
    for (uint64_t i = 0; i < 256; i++) {
        struct kvt_msg_key key = rig_key(i);
        struct place place;

        if (!acks->flushed[i])
            continue;
        place = place_of(rig->store, ns, &key);
        if (place.known)
            acks->places[i] = place;
        if (acks->places[i].known)
            continue;
        if (!rig_stats(rig).evict_disk_segments)
            fail_msg("block %llu was flushed and is nowhere", (unsigned long long)i);
        acks->flushed[i] = false;
    }
}

/* Store a chain of its own; flushed when every commit and the flush went well. */
static void put_flushed(struct rig *rig, uint32_t ns, uint64_t first, uint32_t count, uint8_t map,
                        uint8_t replace, struct acks *acks)
{
    uint64_t numbers[64];
    uint32_t committed;

    chain(first, count, numbers);
    for (uint32_t i = 0; i < count; i++) {
        acks->purged[numbers[i]] = false;
        acks->flushed[numbers[i]] = false;
        acks->places[numbers[i]].known = false;
    }
    committed = rig_put(rig, ns, numbers, count, 0, map, replace, NULL);
    if (rig_flush(rig) == 0 && committed == count)
        for (uint32_t i = 0; i < count; i++) {
            acks->flushed[numbers[i]] = true;
            acks->first[numbers[i]] = first;
        }
    note_places(rig, ns, acks);
}

static void purge(struct rig *rig, uint32_t ns, uint64_t first, uint32_t count, struct acks *acks)
{
    uint64_t numbers[64];
    int32_t status;

    chain(first, count, numbers);
    for (uint32_t i = 0; i < count; i++)
        acks->flushed[numbers[i]] = false;
    status = rig_keys(rig, KVT_OP_PURGE, ns, numbers, count);
    for (uint32_t i = 0; i < count && status >= 0; i++)
        acks->purged[numbers[i]] = true;
}

static void get(struct rig *rig, uint32_t ns, uint64_t first, uint32_t count)
{
    uint64_t numbers[64];

    chain(first, count, numbers);
    (void)rig_get(rig, ns, numbers, count, 0, NULL, NULL); /* fails the test on other bytes */
}

static void flow_load(struct rig *rig, uint32_t ns, struct acks *acks)
{
    (void)acks;
    get(rig, ns, 1, CHAIN);
    get(rig, ns, 1, CHAIN);
}

static void flow_store(struct rig *rig, uint32_t ns, struct acks *acks)
{
    put_flushed(rig, ns, 20, CHAIN, 2, 0, acks);
    get(rig, ns, 20, CHAIN);
}

static void flow_store_slowly(struct rig *rig, uint32_t ns, struct acks *acks)
{
    for (uint64_t first = 20; first < 26; first++) {
        put_flushed(rig, ns, first, 1, 4, 0, acks);
        rig_advance(rig, 3000000000);
    }
    get(rig, ns, 24, 1);
}

static void flow_purge_keys(struct rig *rig, uint32_t ns, struct acks *acks)
{
    purge(rig, ns, 5, 4, acks);
    get(rig, ns, 1, CHAIN);
    rig_advance(rig, 1000000000);
}

static void flow_purge_all(struct rig *rig, uint32_t ns, struct acks *acks)
{
    memset(acks->flushed, 0, sizeof acks->flushed);
    if (rig_keys(rig, KVT_OP_PURGE, ns, NULL, 0) >= 0)
        memset(acks->purged, 1, sizeof acks->purged);
    get(rig, ns, 1, CHAIN);
    put_flushed(rig, ns, 1, 4, 2, 0, acks);
}

static void flow_raise(struct rig *rig, uint32_t ns, struct acks *acks)
{
    put_flushed(rig, ns, 1, 4, 6, KVT_REPLACE_RAISE, acks);
    get(rig, ns, 1, CHAIN);
}

/* More than DRAM holds and than one segment: seals, evictions, reads back. */
static void flow_fill(struct rig *rig, uint32_t ns, struct acks *acks)
{
    for (uint64_t first = 40; first < 240; first += 40) {
        put_flushed(rig, ns, first, 40, 6, 0, acks);
        get(rig, ns, first >= 80 ? first - 40 : first, 40);
    }
}

static void flow_mixed(struct rig *rig, uint32_t ns, struct acks *acks)
{
    get(rig, ns, 1, CHAIN);
    put_flushed(rig, ns, 20, 4, 2, 0, acks);
    purge(rig, ns, 20, 2, acks);
    put_flushed(rig, ns, 20, 2, 3, 0, acks);
    purge(rig, ns, 22, 2, acks);
    get(rig, ns, 20, 4);
}

/* A quota of twelve blocks and a time to live, said of a namespace that has blocks: some are given
 * up, the others expire and are journaled as gone. Nothing is demanded but exact or miss. */
static void flow_limits(struct rig *rig, uint32_t ns, struct acks *acks)
{
    rig->ns_quota = UINT64_C(12) * 2 * KVT_PAGE_BYTES;
    rig->ns_ttl_ns = 2000000000;
    assert_int_equal(rig_ns(rig, 1, pages), ns);
    rig->ns_quota = 0;
    rig->ns_ttl_ns = 0;
    for (uint64_t first = 20; first < 44; first += CHAIN)
        put_flushed(rig, ns, first, CHAIN, 3, 0, acks);
    rig_advance(rig, 1500000000);
    get(rig, ns, 36, CHAIN);
    rig_advance(rig, 1500000000);
    get(rig, ns, 20, CHAIN);
    memset(acks->flushed, 0, sizeof acks->flushed);
    rig_advance(rig, 2500000000);
    put_flushed(rig, ns, 60, 4, 3, 0, acks);
}

static const struct {
    const char *name;
    bool on_image; /* else on an empty medium */
    void (*run)(struct rig *rig, uint32_t ns, struct acks *acks);
} flows[] = {
    {"make a root, store", false, flow_store},
    {"store", true, flow_store},
    {"store slowly", true, flow_store_slowly},
    {"load", true, flow_load},
    {"purge keys", true, flow_purge_keys},
    {"purge all, store again", true, flow_purge_all},
    {"raise", true, flow_raise},
    {"fill", true, flow_fill},
    {"mixed", true, flow_mixed},
    {"a quota and a time to live", true, flow_limits},
};

static struct rig_options options(void)
{
    struct rig_options o = rig_defaults();

    o.disk_cap_bytes = 12u << 20;
    o.cache_bytes = 512u << 10;
    return o;
}

static struct kvt_io *copy(const struct kvt_io *of)
{
    struct kvt_io *io = NULL;
    int file, rc;

    if (backend >= 0)
        io = of ? step_io_copy(of, backend) : step_io_new(backend, &rc);
    else if (of)
        assert_int_equal(kvt_io_mem_clone(of, &io), 0);
    else
        assert_int_equal(kvt_io_mem_new(64u << 20, &io), 0);
    file = io->ops->open(io, "lock", KVT_IO_OPEN_CREATE); /* whoever opens a root has locked it */
    assert_true(file >= 0);
    io->ops->close(io, file);
    return io;
}

static void make_image(void)
{
    struct rig rig;
    struct rig_options o = options();
    struct acks *acks = &image_acks;
    uint32_t ns;

    rig_open(&rig, &o, copy(NULL));
    ns = rig_ns(&rig, 1, pages);
    put_flushed(&rig, ns, 1, CHAIN, 2, 0, acks);
    put_flushed(&rig, ns, 9, 4, 2, 0, acks);
    purge(&rig, ns, 9, 4, acks);
    assert_true(acks->flushed[1] && acks->places[1].known && acks->purged[9]);
    kvt_store_close(rig.store, 1000000000);
    rig.store = NULL;
    image = copy(fault_io_inner(rig.io));
    rig_close(&rig);
}

/* What a crash leaves opens on a sound drive; nothing else comes back than what was put. */
static void verify(struct kvt_io *medium, const struct acks *acks, bool honest, const char *what,
                   uint64_t n)
{
    struct rig rig;
    struct rig_options o = options();
    bool recycled[256] = {false};
    uint32_t ns;
    int rc;

    for (uint64_t i = 1; i < 256 && honest; i++) /* it, or a block before it in its chain */
        recycled[i] = acks->flushed[i] &&
                      ((i > acks->first[i] && (recycled[i - 1] || !acks->flushed[i - 1])) ||
                       place_recycled(medium, &acks->places[i]));
    rc = rig_try_open(&rig, &o, medium);
    if (rc != 0) { /* a drive that lies may leave what nobody can take for a root */
        if (honest)
            fail_msg("%s, N = %llu: does not open any more: %d", what, (unsigned long long)n, rc);
        rig_close(&rig);
        return;
    }
    ns = rig_ns(&rig, 1, pages);
    rig.check_each_step = false; /* once is enough here */
    for (uint64_t number = 1; number < 240; number++) {
        uint8_t tier = 0;
        int32_t status = KVT_E_MISS;

        (void)rig_lookup(&rig, ns, &number, 1, 0, &tier);
        if (tier != KVT_TIER_MISS)
            (void)rig_get(&rig, ns, &number, 1, 0, &status, NULL);
        if (!honest)
            continue;
        if (acks->flushed[number] && status != 0 && recycled[number])
            recycled_blocks++;
        else if (acks->flushed[number] && status != 0)
            fail_msg("%s, N = %llu: block %llu was flushed and is %d", what, (unsigned long long)n,
                     (unsigned long long)number, (int)status);
        if (acks->purged[number] && status == 0)
            fail_msg("%s, N = %llu: block %llu was purged and is back", what, (unsigned long long)n,
                     (unsigned long long)number);
    }
    rig_close(&rig);
}

/* The drive is well again: the store works. */
static void works_again(struct rig *rig, uint32_t ns, const char *what, uint64_t n)
{
    uint64_t number = 250;

    for (int tries = 0; tries < 4; tries++) {
        rig_advance(rig, 20000000000);
        if (rig_put(rig, ns, &number, 1, 0, 2, 0, NULL) != 1)
            continue;
        if (rig_get(rig, ns, &number, 1, 0, NULL, NULL) == 1)
            return;
    }
    fail_msg("%s, N = %llu: the store takes nothing any more", what, (unsigned long long)n);
}

/* One point. Returns whether the failure happened. */
static bool run_at(size_t flow, const struct failure *failure, uint64_t n, const char *what)
{
    struct kvt_io *faulty = fault_io_new(copy(flows[flow].on_image ? image : NULL), n), *after;
    struct fault_rule rule = failure->rule;
    static struct acks acks;
    struct rig rig;
    struct rig_options o = options();
    bool fired;
    int rc, number;

    assert_non_null(faulty);
    practice_point();
    memset(&acks, 0, sizeof acks);
    if (flows[flow].on_image)
        acks = image_acks;
    rule.skip = n - 1;
    if (getenv("KVT_TEST_LOG"))
        printf("%s; N = %llu\n", what, (unsigned long long)n);
    number = fault_io_rule(faulty, &rule);
    rc = rig_try_open(&rig, &o, faulty);
    assert_true(rc <= 0);
    if (rc == 0) {
        uint32_t ns = rig_ns(&rig, 1, pages);

        rig.patient = true;
        flows[flow].run(&rig, ns, &acks);
        note_places(&rig, ns, &acks);
        fired = fault_io_rule_state(faulty, number)->fired != 0;
        after = copy(fault_io_inner(faulty)); /* a crash, here and now */
        fault_io_clear(faulty);
        works_again(&rig, ns, what, n);
    } else {
        fired = fault_io_rule_state(faulty, number)->fired != 0;
        assert_true(fired);
        after = copy(fault_io_inner(faulty));
    }
    rig_close(&rig);
    verify(after, &acks, failure->honest, what, n);
    practice_passed();
    return fired;
}

/* KVT_FAIL_AT_IO. False: that one cannot be had here. */
static bool choose_backend(void)
{
    const char *name = getenv("KVT_FAIL_AT_IO");
    struct kvt_io *io;
    int rc;

    if (!name)
        return true;
    backend = strcmp(name, "uring") == 0 ? KVT_IO_URING : KVT_IO_POSIX;
    io = step_io_new(backend, &rc);
    if (io)
        io->ops->destroy(io);
    else
        print_message("           no %s here: %d\n", name, rc);
    return io != NULL;
}

static void test_every_operation_of_every_scenario(void **state)
{
    const char *step_text = getenv("KVT_FAIL_AT_STEP"), *part_text = getenv("KVT_FAIL_AT_PART");
    uint64_t step = step_text ? strtoull(step_text, NULL, 0) : 0;
    unsigned part = 0, parts = 1;

    (void)state;
    if (part_text && (sscanf(part_text, "%u/%u", &part, &parts) != 2 || !parts))
        fail_msg("KVT_FAIL_AT_PART is k/n");
    if (!choose_backend())
        skip();
    make_image();
    for (size_t flow = 0; flow < KVT_ARRAY_LEN(flows); flow++)
        for (size_t i = 0; i < KVT_ARRAY_LEN(failures); i++) {
            char what[128];
            uint64_t n = 1;

            if ((flow * KVT_ARRAY_LEN(failures) + i) % parts != part)
                continue;
            snprintf(what, sizeof what, "%s; %s", flows[flow].name, failures[i].name);
            while (run_at(flow, &failures[i], n, what)) {
                n += step ? step : flows[flow].run == flow_fill ? 2 : 1;
                fired_points++;
                assert_true(n < N_MAX);
            }
            scenarios++;
        }
    image->ops->destroy(image);
    print_message("           %llu scenarios, %llu points; %llu blocks had been recycled\n",
                  (unsigned long long)scenarios, (unsigned long long)fired_points,
                  (unsigned long long)recycled_blocks);
    assert_true(parts > 1 || (scenarios >= 30 && fired_points * (step ? step : 1) >= 5000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_operation_of_every_scenario),
    };

    (void)test_seed();
    practice_begin("fail_at_n");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
