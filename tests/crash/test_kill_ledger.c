/* kill -9, with a ledger of what was acknowledged.
 *
 * Goal:   whatever a process was doing when it was killed (opening, storing, flushing, purging,
 *         scrubbing, taking a root over, closing), the next open serves every block whose flush had
 *         returned, or it was evicted by right; nothing whose purge had returned; and never other
 *         bytes. What one recovery served, the next one serves too; fsck finds nothing.
 * Method: this program starts itself as a child with a cache over real files. The child writes into
 *         a ledger outside of the root what it begins and what was acknowledged. It is killed at a
 *         random moment; the parent reads the ledger, opens the root, loads every chain there ever
 *         was and compares each byte. One root lives through many cycles, so that segments are
 *         recycled, and is then replaced. "Evicted by right": since the block was first written,
 *         more than WINDOW bytes were, a tenth of the cap: seven eighths of each segment may be old
 *         records that moved.
 *         KVT_KILL_CYCLES, or KVT_SOAK_SECONDS: how long; of both the shorter.
 */
#include "support/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "store/fsck.h"
#include "support/tally.h"

enum {
    CHAIN = 8,
    CHAINS = 192,
    CYCLES_OF_A_ROOT = 50,
    RECORD_BYTES = 16 << 10, /* 12 KiB, and at most one batch header each */
    SEGMENT_BYTES = 1 << 20
};
#define DISK_CAP "64MiB"
#define WINDOW_BYTES (UINT64_C(6) << 20)

#if defined(__SANITIZE_THREAD__)
enum { CYCLES = 30 };
#elif defined(__SANITIZE_ADDRESS__)
enum { CYCLES = 60 };
#else
enum { CYCLES = 320 };
#endif

/* What the child is busy with when it is killed. */
enum mode { WORK, OPEN, PURGE, SCRUB, TAKEOVER, CLOSE, MODES };
static const char *const mode_names[MODES] = {"storing",   "recovering",  "purging",
                                              "scrubbing", "taking over", "closing"};

enum kind { STORE_BEGINS = 1, STORED, FLUSHED, PURGE_BEGINS, PURGED, DROPPED };
struct entry {
    uint32_t kind, life, chain, fresh; /* fresh: blocks that were not there before */
};

static struct rig rig;
static char dir[100], ledger_name[120];
static int ledger = -1;
static uint64_t tried, passed;

static void make_rig(const char *config)
{
    struct rig_shape shape = rig_shape_small(CHAIN);

    rig_init(&rig, &shape, config, NULL);
    snprintf(rig.dir, sizeof(rig.dir), "%s", dir);
    snprintf(rig.disk_cap, sizeof(rig.disk_cap), "%s", DISK_CAP);
}

static uint64_t seed_of(uint32_t chain)
{
    return 1 + (uint64_t)chain * CHAIN;
}

/* ---- the child ---- */

static uint32_t life;

static void say(char word)
{
    if (write(STDOUT_FILENO, &word, 1) != 1)
        _exit(1);
}

static void note(enum kind kind, uint32_t chain, uint32_t fresh)
{
    struct entry entry = {(uint32_t)kind, life, chain, fresh};

    if (write(ledger, &entry, sizeof(entry)) != (ssize_t)sizeof(entry))
        _exit(1);
}

static void child_store(uint32_t chain)
{
    int32_t status[CHAIN];
    uint32_t fresh = 0;
    size_t ok;

    note(STORE_BEGINS, chain, 0);
    ok = rig_store(&rig, seed_of(chain), CHAIN, 0, status);
    for (uint32_t i = 0; i < CHAIN; i++)
        fresh += status[i] == 0;
    if (ok == CHAIN)
        note(STORED, chain, fresh);
}

static void child_purge(uint32_t chain)
{
    bool disk =
        rig_stat(&rig, "disk.roots") == 1; /* without it, nothing is promised for the disk */
    struct kvt_key keys[CHAIN];

    for (uint32_t i = 0; i < CHAIN; i++)
        keys[i] = rig_key(seed_of(chain) + i);
    note(PURGE_BEGINS, chain, 0);
    if (kvt_purge(rig.ns, keys, CHAIN) >= 0 && disk)
        note(PURGED, chain, 0);
}

/* A flush says once that blocks had to leave DRAM unwritten: the next ones do not speak for what
 * was stored before that. */
static void child_flush(void)
{
    int rc = kvt_flush(rig.cache);

    if (rc == 0 && rig_stat(&rig, "disk.roots") == 1)
        note(FLUSHED, 0, 0);
    else if (rc == KVT_E_DROPPED)
        note(DROPPED, 0, 0);
}

/* One step, on chains of this parity only: 0, 1, or 2 for all of them. */
static void child_step(struct kvt_rng *rng, enum mode mode, uint32_t parity)
{
    uint32_t chain = (uint32_t)kvt_rng_below(rng, CHAINS);
    uint32_t what = (uint32_t)kvt_rng_below(rng, 100);

    if (parity < 2)
        chain = (chain & ~1u) | parity;
    if (what < (mode == PURGE ? 50u : 15u))
        child_purge(chain);
    else if (what < 70)
        child_store(chain);
    else if (what < 90)
        (void)rig_load(&rig, seed_of(chain), CHAIN, NULL);
    else
        child_flush();
}

static _Noreturn void child(enum mode mode, const char *config, uint64_t seed, uint32_t parity)
{
    struct kvt_rng rng = {seed};

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    make_rig(config);
    say('s');
    for (;;) {
        rig_open(&rig);
        say('o');
        for (int steps = mode == CLOSE || mode == SCRUB ? 6 : INT32_MAX; steps; steps--)
            child_step(&rng, mode, parity);
        if (mode == SCRUB) /* begins a second after the last request */
            for (;;)
                pause();
        rig_close(&rig);
    }
}

/* ---- children, seen from the parent ---- */

struct child {
    pid_t pid;
    int from;
};

static struct child start(enum mode mode, const char *config, uint64_t seed, uint32_t number,
                          uint32_t parity)
{
    char words[4][32];
    struct child child;
    int ends[2];

    snprintf(words[0], sizeof(words[0]), "%d", (int)mode);
    snprintf(words[1], sizeof(words[1]), "%llu", (unsigned long long)seed);
    snprintf(words[2], sizeof(words[2]), "%u", number);
    snprintf(words[3], sizeof(words[3]), "%u", parity);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    child.pid = fork();
    assert_true(child.pid >= 0);
    if (!child.pid) {
        (void)dup2(ends[1], STDOUT_FILENO);
        (void)execl("/proc/self/exe", "test_kill_ledger", dir, ledger_name, config, words[0],
                    words[1], words[2], words[3], (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    child.from = ends[0];
    return child;
}

static void wait_for(struct child *child, char word)
{
    char got = 0;
    ssize_t n;

    do
        n = read(child->from, &got, 1);
    while ((n < 0 && errno == EINTR) || (n == 1 && got != word));
    if (n != 1)
        fail_msg("a child ended before it said '%c'", word);
}

static void kill_child(struct child *child)
{
    int status;

    (void)kill(child->pid, SIGKILL);
    assert_int_equal(waitpid(child->pid, &status, 0), child->pid);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
        fail_msg("a child ended by itself: status %#x", (unsigned)status);
    close(child->from);
}

static void sleep_us(uint64_t us)
{
    struct timespec time = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};

    nanosleep(&time, NULL);
}

/* ---- what must be there ---- */

static struct {
    bool there;     /* may be there; else it must not be */
    bool acked;     /* must be there */
    uint32_t life;  /* that has stored it, not flushed yet; 0: none */
    bool under_way; /* of a store that has not ended */
    bool dropped;   /* or a block before it was, says a flush: no later one spoke for it */
    uint64_t at;    /* bytes_written when it was first stored */
} chains[CHAINS];
static uint64_t bytes_written; /* since the root was made; never less than what was */
static off_t ledger_read;
static uint64_t acked_sum, evicted_sum, purged_sum, dropped_sum, gone_sum;

static void take_entry(const struct entry *entry)
{
    assert_true(entry->chain < CHAINS);
    switch (entry->kind) {
    case STORE_BEGINS:
        if (!chains[entry->chain].there)
            chains[entry->chain].at = bytes_written;
        chains[entry->chain].there = true;
        chains[entry->chain].under_way = true;
        break;
    case STORED:
        chains[entry->chain].under_way = false;
        chains[entry->chain].life = entry->life;
        chains[entry->chain].dropped = false;
        bytes_written += (uint64_t)entry->fresh * RECORD_BYTES;
        break;
    case FLUSHED:
        for (uint32_t i = 0; i < CHAINS; i++)
            chains[i].acked |= chains[i].life == entry->life;
        break;
    case DROPPED:
        for (uint32_t i = 0; i < CHAINS; i++)
            if (chains[i].life == entry->life) {
                chains[i].life = 0;
                chains[i].dropped = !chains[i].acked;
            }
        dropped_sum++;
        break;
    case PURGE_BEGINS:
        chains[entry->chain].acked = false;
        chains[entry->chain].life = 0;
        break;
    case PURGED:
        chains[entry->chain].there = false;
        purged_sum++;
        break;
    default:
        fail_msg("a ledger entry of kind %u", entry->kind);
    }
}

static void take_ledger(void)
{
    struct entry entry;

    while (pread(ledger, &entry, sizeof(entry), ledger_read) == (ssize_t)sizeof(entry)) {
        ledger_read += (off_t)sizeof(entry);
        take_entry(&entry);
    }
    for (uint32_t i = 0; i < CHAINS; i++) {
        bytes_written += chains[i].under_way ? CHAIN * RECORD_BYTES : 0;
        chains[i].under_way = false;
        chains[i].life = 0; /* its process has ended */
    }
    bytes_written += SEGMENT_BYTES; /* recovery may seal a segment early */
}

static void check_chain(uint32_t chain, const char *when)
{
    int32_t status[CHAIN] = {0};
    uint32_t got = (uint32_t)rig_load(&rig, seed_of(chain), CHAIN, status);
    struct kvt_key keys[CHAIN];
    uint32_t missing = 0;

    while (missing < CHAIN - 1 && status[missing] == 0)
        missing++;
    if (got && !chains[chain].there)
        fail_msg("chain %u was purged, and is back (%s)", chain, when);
    if (chains[chain].acked) {
        acked_sum++;
        evicted_sum += got < CHAIN;
        if (got < CHAIN && bytes_written - chains[chain].at <= WINDOW_BYTES)
            fail_msg("chain %u was flushed, %u of its blocks are there, block %u is %d (%s)", chain,
                     got, missing, status[missing], when);
    }
    gone_sum += chains[chain].dropped && got < CHAIN;
    chains[chain].dropped = false;
    if (got && got < CHAIN) { /* a clean slate: its blocks would be of different ages */
        for (uint32_t i = 0; i < CHAIN; i++)
            keys[i] = rig_key(seed_of(chain) + i);
        assert_true(kvt_purge(rig.ns, keys, CHAIN) >= 0);
        got = 0;
    }
    /* what a recovery has served is on disk: the next one serves it too */
    chains[chain].acked = chains[chain].there = got == CHAIN;
}

static void found(void *ctx, bool problem, const char *text)
{
    (void)ctx;
    if (problem)
        printf("           fsck: %s\n", text);
}

static void check_fsck(const char *when)
{
    struct kvt_io_posix_params params = {.path = dir, .threads = 1, .read_only = 1};
    struct kvt_fsck_params fsck = {.found = found};
    struct kvt_fsck_report report;

    assert_int_equal(kvt_io_posix_new(&params, &fsck.io), 0);
    assert_int_equal(kvt_fsck(&fsck, &report), 0);
    fsck.io->ops->destroy(fsck.io);
    if (report.problems)
        fail_msg("fsck has something to say (%s)", when);
}

/* Open what is left, and look at all of it. */
static void check_all(const char *config, const char *when, bool fsck)
{
    take_ledger();
    make_rig(config);
    rig_open(&rig);
    for (uint32_t chain = 0; chain < CHAINS; chain++)
        check_chain(chain, when);
    assert_int_equal(rig_stat(&rig, "verify.checksum_fail"), 0);
    rig_close(&rig);
    rig.dir[0] = '\0'; /* the directory stays */
    rig_free(&rig);
    if (fsck)
        check_fsck(when);
}

/* ---- cycles ---- */

static enum mode pick_mode(struct kvt_rng *rng, uint64_t cycle)
{
    uint32_t what = (uint32_t)kvt_rng_below(rng, 100);

    if (cycle < MODES) /* each at least once */
        return (enum mode)cycle;
    return what < 45   ? WORK
           : what < 65 ? OPEN
           : what < 83 ? PURGE
           : what < 86 ? SCRUB
           : what < 91 ? TAKEOVER
                       : CLOSE;
}

static void pick_config(struct kvt_rng *rng, enum mode mode, char *config, size_t len)
{
    static const char *const policies[] = {"through", "evict", "idle", "auto"};
    static const char *const backends[] = {"io=posix", "io=posix,direct=off", "io=auto"};

    snprintf(config, len, "dram=%s,threads=1,write=%s,%s,disk_required=%s,scrub=%s",
             kvt_rng_below(rng, 2) ? "2MiB" : "24MiB", policies[kvt_rng_below(rng, 4)],
             backends[kvt_rng_below(rng, 3)], mode == TAKEOVER ? "no" : "yes",
             mode == SCRUB ? "1GiB" : "off");
}

static void run_and_kill(struct kvt_rng *rng, enum mode mode, const char *config)
{
    static uint32_t lives;
    struct child one, two;
    uint32_t parity = mode == TAKEOVER ? 0 : 2;

    one = start(mode, config, kvt_rng_next(rng), ++lives, parity);
    wait_for(&one, 's');
    if (mode == OPEN) {
        sleep_us(kvt_rng_below(rng, 12000));
        kill_child(&one);
        return;
    }
    wait_for(&one, 'o');
    if (mode == TAKEOVER) {
        two = start(mode, config, kvt_rng_next(rng), ++lives, 1);
        wait_for(&two, 'o');
        sleep_us(kvt_rng_below(rng, 40000));
        kill_child(&one);
        sleep_us(kvt_rng_below(rng, 700000)); /* it tries the lock twice a second */
        kill_child(&two);
        return;
    }
    sleep_us(mode == SCRUB ? 1000000 + kvt_rng_below(rng, 200000) : kvt_rng_below(rng, 60000));
    kill_child(&one);
}

static void new_root(void)
{
    memset(chains, 0, sizeof(chains));
    bytes_written = 0;
    rig_dir_remove(dir);
    rig_dir_make(dir, sizeof(dir));
}

static bool goes_on(uint64_t cycle, int64_t start_ns)
{
    const char *cycles = getenv("KVT_KILL_CYCLES"), *seconds = getenv("KVT_SOAK_SECONDS");

    if (seconds && rig_now_ns() - start_ns >= strtoll(seconds, NULL, 10) * INT64_C(1000000000))
        return false;
    return (seconds && !cycles) || cycle < (cycles ? strtoull(cycles, NULL, 10) : CYCLES);
}

static void test_killed_in_whatever_it_does(void **state)
{
    struct kvt_rng rng = {rig_seed()};
    uint64_t kills[MODES] = {0}, cycle = 0;
    int64_t start_ns = rig_now_ns();
    char config[160], when[256];

    (void)state;
    rig_dir_make(dir, sizeof(dir));
    snprintf(ledger_name, sizeof(ledger_name), "%s.ledger", dir);
    ledger = open(ledger_name, O_RDWR | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
    assert_true(ledger >= 0);
    for (; goes_on(cycle, start_ns); cycle++) {
        enum mode mode = pick_mode(&rng, cycle);

        if (cycle && cycle % CYCLES_OF_A_ROOT == 0)
            new_root();
        pick_config(&rng, mode, config, sizeof(config));
        snprintf(when, sizeof(when), "cycle %llu, killed while %s, %s", (unsigned long long)cycle,
                 mode_names[mode], config);
        tried++;
        run_and_kill(&rng, mode, config);
        check_all(config, when, cycle % 4 == 3);
        kills[mode]++;
        passed++;
    }
    for (int mode = 0; mode < MODES; mode++)
        printf("           killed while %s: %llu\n", mode_names[mode],
               (unsigned long long)kills[mode]);
    printf("           %llu chains had to be there, of those %llu evicted by right; %llu purged\n",
           (unsigned long long)acked_sum, (unsigned long long)evicted_sum,
           (unsigned long long)purged_sum);
    printf("           %llu flushes said that blocks were dropped; %llu chains were without them\n",
           (unsigned long long)dropped_sum, (unsigned long long)gone_sum);
    assert_true(acked_sum - evicted_sum > cycle && purged_sum > cycle / 4);
}

static int tear_down(void **state)
{
    (void)state;
    tally_print("kill9", tried, tried - passed);
    if (tried != passed) {
        printf("           %s and %s are left to look at\n", dir, ledger_name);
        return 0;
    }
    close(ledger);
    (void)unlink(ledger_name);
    rig_dir_remove(dir);
    return 0;
}

int main(int argc, char *argv[])
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_in_whatever_it_does),
    };

    if (argc == 8) {
        snprintf(dir, sizeof(dir), "%s", argv[1]);
        ledger = open(argv[2], O_WRONLY | O_APPEND | O_CLOEXEC);
        life = (uint32_t)strtoul(argv[6], NULL, 10);
        child((enum mode)strtoul(argv[4], NULL, 10), argv[3], strtoull(argv[5], NULL, 10),
              (uint32_t)strtoul(argv[7], NULL, 10));
    }
    return cmocka_run_group_tests(tests, NULL, tear_down);
}
