/* Clients that are killed, stopped or write nonsense, and daemons that are killed.
 *
 * Goal:   no wrong byte, no leaked slot or pin, no sibling that stands still, whoever dies when.
 * Method: victims are processes of this very program that store, load, look up and pin by random,
 *         and are killed after random times; siblings check every block they get and how long they
 *         wait. Daemons are killed between and during requests: what was flushed is there after
 *         each. The seed is printed (KVT_TEST_SEED); a soak goes on for KVT_SOAK_SECONDS, or for
 *         KVT_DAEMON_KILLS kills, a quarter of them daemons.
 */
#include "support/rig.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/rng.h"
#include "client/link.h"
#include "format/message.h"
#include "support/daemon_rig.h"
#include "support/tally.h"

/* Waits fail a test only where something stands still for good: how long they really took, a
 * machine with other work says by the line at the end. */
enum { BLOCKS = 32, CHAINS = 8, CLIENT_KILLS = 300, DAEMON_KILLS = 100, STALL_MS = 20000 };

static struct daemon server;
static struct rig rig;
static uint64_t kills; /* of clients and daemons, all tests together */
static int64_t reclaim_ns_max, stall_ns_max;

/* Kills of one kind: the usual number, or that many quarters of KVT_DAEMON_KILLS. */
static unsigned kills_wanted(unsigned usual, unsigned quarters)
{
    const char *text = getenv("KVT_DAEMON_KILLS");
    unsigned long wanted = text ? strtoul(text, NULL, 10) / 4 * quarters : usual;

    return wanted > usual ? (unsigned)wanted : usual;
}

/* A long run says every ten seconds how far it is. */
static void progress(void)
{
    static int64_t start_ns, told_ns;
    const int64_t now_ns = rig_now_ns();

    if (start_ns == 0)
        start_ns = told_ns = now_ns;
    if (now_ns - told_ns < INT64_C(10000000000))
        return;
    told_ns = now_ns;
    print_message("             %llu kills in %lld s\n", (unsigned long long)kills,
                  (long long)((now_ns - start_ns) / 1000000000));
    fflush(stdout);
}

/* Whether there is another round: that many, and in a soak as long as there is time (each of three
 * tests gets a third of KVT_SOAK_SECONDS). start_ns: of the test. */
static bool again(unsigned round, unsigned rounds, int64_t start_ns)
{
    const char *soak = getenv("KVT_SOAK_SECONDS");
    int64_t seconds = soak ? strtoll(soak, NULL, 10) / 3 : 0;

    if (soak || getenv("KVT_DAEMON_KILLS"))
        progress();

    return round < rounds || rig_now_ns() - start_ns < seconds * INT64_C(1000000000);
}

static void sibling_end(void);

static int tear_down(void **state)
{
    (void)state;
    sibling_end();
    rig_close(&rig);
    rig_free(&rig);
    memset(&rig, 0, sizeof(rig));
    daemon_free(&server);
    return 0;
}

static void engine_open(struct rig *one, const char *config)
{
    struct rig_shape shape = rig_shape_small(BLOCKS);

    rig_init(one, &shape, config, NULL);
    rig_open(one);
}

/* First block of a chain; all processes mean the same bytes by it. */
static uint64_t chain_seed(uint64_t chain)
{
    return 1 + chain * BLOCKS;
}

/* ---- the victim ------------------------------------------------------------------------------ */

/* Do things for ever; every block that is loaded is checked by the rig. */
static int victim(const char *config, uint64_t seed)
{
    struct kvt_rng rng;
    struct kvt_key keys[BLOCKS];

    rng = (struct kvt_rng){seed};
    engine_open(&rig, config);
    for (;;) {
        uint64_t first = chain_seed(kvt_rng_below(&rng, CHAINS));
        uint32_t n = 1 + (uint32_t)kvt_rng_below(&rng, BLOCKS);

        for (uint32_t i = 0; i < n; i++)
            keys[i] = rig_key(first + i);
        switch (kvt_rng_below(&rng, 5)) {
        case 0:
        case 1:
            (void)rig_store(&rig, first, n, 0, NULL);
            break;
        case 2:
            (void)rig_load(&rig, first, n, NULL);
            break;
        case 3:
            (void)kvt_pin(rig.ns, keys, n);
            break;
        default:
            (void)rig_lookup(&rig, first, n);
        }
    }
    return 0;
}

static pid_t victim_start(uint64_t seed)
{
    char seed_text[32];
    pid_t pid;

    snprintf(seed_text, sizeof(seed_text), "%llu", (unsigned long long)seed);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when a test fails */
        execl("/proc/self/exe", "victim", "--victim", server.config, seed_text, (char *)NULL);
        _exit(127);
    }
    return pid;
}

static void victim_kill(pid_t pid)
{
    int status;

    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFSIGNALED(status)) /* it found a wrong byte, or could not work */
        fail_msg("a victim ended by itself: %d", WEXITSTATUS(status));
    kills++;
}

/* ---- siblings -------------------------------------------------------------------------------- */

struct sibling {
    pthread_t thread;
    _Atomic int stop;
    _Atomic int64_t last_ns; /* when the last round ended */
    _Atomic uint64_t rounds;
    uint64_t loaded;
};

static struct sibling *running; /* also when a test has failed */

static void *sibling_main(void *arg)
{
    struct sibling *sibling = arg;
    uint64_t at = 0;

    while (!atomic_load(&sibling->stop)) {
        uint64_t first = chain_seed(at++ % CHAINS);

        (void)rig_store(&rig, first, BLOCKS, 0, NULL);
        sibling->loaded += rig_load(&rig, first, BLOCKS, NULL);
        sibling->rounds++;
        atomic_store(&sibling->last_ns, rig_now_ns());
        rig_sleep_ms(2);
    }
    return NULL;
}

static void sibling_start(struct sibling *sibling)
{
    memset(sibling, 0, sizeof(*sibling));
    atomic_store(&sibling->last_ns, rig_now_ns());
    assert_int_equal(pthread_create(&sibling->thread, NULL, sibling_main, sibling), 0);
    running = sibling;
}

static void sibling_end(void)
{
    if (running == NULL)
        return;
    atomic_store(&running->stop, 1);
    pthread_join(running->thread, NULL);
    running = NULL;
}

static void sibling_check(struct sibling *sibling)
{
    int64_t silent = rig_now_ns() - atomic_load(&sibling->last_ns);

    if (silent > stall_ns_max)
        stall_ns_max = silent;
    if (silent > STALL_MS * INT64_C(1000000))
        fail_msg("a sibling has stood still for %lld ms", (long long)(silent / 1000000));
}

static void sibling_stop(struct sibling *sibling)
{
    sibling_check(sibling);
    sibling_end();
}

/* Until the daemon says so, and how long that took at most. */
static void wait_given_back(const char *name, uint64_t value)
{
    const int64_t start_ns = rig_now_ns();

    daemon_wait_stat(&server, name, value, 20000);
    if (rig_now_ns() - start_ns > reclaim_ns_max)
        reclaim_ns_max = rig_now_ns() - start_ns;
}

static void nothing_is_left(void)
{
    wait_given_back("dram.pins", 0);
    wait_given_back("pin.blocks", 0);
    assert_int_equal(daemon_stat(&server, "daemon.clients_broken"), 0);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void killed_clients_lose_what_was_theirs_and_nobody_else_anything(void **state)
{
    const uint64_t seed = rig_seed();
    const int64_t start_ns = rig_now_ns();
    struct kvt_rng rng;
    struct sibling sibling;
    unsigned round = 0;
    pid_t pids[2];

    (void)state;
    rng = (struct kvt_rng){seed};
    daemon_init(&server, "--dram 2MiB --disk {store}:64MiB");
    daemon_start(&server);
    engine_open(&rig, server.config);
    sibling_start(&sibling);
    for (; again(round, kills_wanted(CLIENT_KILLS, 3) / 2, start_ns); round++) {
        for (int i = 0; i < 2; i++)
            pids[i] = victim_start(kvt_rng_next(&rng));
        for (int i = 0; i < 2; i++) {
            usleep((useconds_t)kvt_rng_below(&rng, 25000));
            victim_kill(pids[i]);
        }
        sibling_check(&sibling);
        if (round % 25 == 24)
            wait_given_back("daemon.clients", 1);
    }
    sibling_stop(&sibling);
    wait_given_back("daemon.clients", 1);
    nothing_is_left();
    assert_true(sibling.loaded > 0);
    assert_int_equal(rig.warnings, 0);
    print_message("%u clients killed, %llu of them connected; the sibling loaded %llu blocks\n",
                  2 * round, (unsigned long long)daemon_stat(&server, "daemon.clients_died"),
                  (unsigned long long)sibling.loaded);
}

static void wait_connected(void)
{
    char text[512] = "";

    for (int i = 0; i < 1000 && strcmp(text, "connected") != 0; i++) {
        rig_sleep_ms(5);
        rig_stat_text(&rig, "daemon.state", text, sizeof(text));
    }
    assert_string_equal(text, "connected");
}

static void killed_daemons_lose_nothing_that_was_flushed(void **state)
{
    const int64_t start_ns = rig_now_ns();
    struct kvt_rng rng;
    uint32_t present = 0;
    unsigned killed = 0;

    (void)state;
    rng = (struct kvt_rng){rig_seed() + 1};
    daemon_init(&server, "--dram 2MiB --disk {store}:64MiB");
    daemon_start(&server);
    engine_open(&rig, server.config);
    for (unsigned round = 0; again(round, kills_wanted(DAEMON_KILLS, 1), start_ns); round++) {
        uint64_t first = chain_seed(kvt_rng_below(&rng, CHAINS));
        bool flushed = false;

        (void)rig_store(&rig, first, BLOCKS, 0, NULL);
        if (kvt_rng_below(&rng, 2) == 0)
            flushed = kvt_flush(rig.cache) == 0;
        usleep((useconds_t)kvt_rng_below(&rng, 4000));
        daemon_kill(&server);
        killed++;
        kills++;
        (void)rig_load(&rig, first, BLOCKS, NULL); /* exact or a miss: the rig asserts */
        daemon_start(&server);
        wait_connected();
        present = (uint32_t)rig_load(&rig, first, BLOCKS, NULL);
        if (flushed)
            assert_int_equal(present, BLOCKS);
    }
    nothing_is_left();
    assert_int_equal(rig_stat(&rig, "client.bad_move"), 0);
    assert_int_equal(rig_stat(&rig, "client.requests_active"), 0);
    print_message("%u daemons killed\n", killed);
}

static void a_stopped_client_stalls_nobody(void **state)
{
    struct kvt_rng rng;
    const int64_t start_ns = rig_now_ns();
    struct sibling sibling;
    pid_t pids[3];

    (void)state;
    rng = (struct kvt_rng){rig_seed() + 2};
    daemon_init(&server, "--dram 2MiB --disk {store}:64MiB");
    daemon_start(&server);
    engine_open(&rig, server.config);
    sibling_start(&sibling);
    for (unsigned round = 0; again(round, 10, start_ns); round++) {
        for (int i = 0; i < 3; i++)
            pids[i] = victim_start(kvt_rng_next(&rng));
        usleep(20000 + (useconds_t)kvt_rng_below(&rng, 30000));
        for (int i = 0; i < 3; i++)
            assert_int_equal(kill(pids[i], SIGSTOP), 0);
        uint64_t before = sibling.rounds;
        for (int i = 0; i < 20; i++) {
            rig_sleep_ms(20);
            sibling_check(&sibling);
        }
        assert_true(sibling.rounds > before);
        for (int i = 0; i < 3; i++)
            victim_kill(pids[i]);
    }
    sibling_stop(&sibling);
    nothing_is_left();
}

/* ---- slots being filled -----------------------------------------------------------------------
 */

static void send_and_wait(struct kvt_channel *channel, const void *msg, uint32_t bytes,
                          struct kvt_msg *reply)
{
    void *frame = kvt_ring_reserve(&channel->requests, bytes);
    const void *got;

    memcpy(frame, msg, bytes);
    kvt_ring_push(&channel->requests, bytes);
    for (int i = 0; i < 4000; i++) {
        int n = kvt_ring_peek(&channel->replies, &got);

        if (n >= (int)sizeof(*reply)) {
            memcpy(reply, got, sizeof(*reply));
            kvt_ring_pop(&channel->replies);
            return;
        }
        usleep(500);
    }
    _exit(5);
}

/* A client that holds a slot to fill it, closes its socket without a word, and lives on. */
static int leaver(const char *socket)
{
    struct kvt_msg_ns_open open = {
        .msg = {.bytes = sizeof(open), .op = KVT_OP_NS_OPEN, .cookie = 1},
        .id = {9},
        .block_tokens = 16};
    const struct kvt_msg_key key = {.hash = {1}, .hash_len = 8};
    union {
        struct kvt_msg_alloc head;
        uint8_t bytes[sizeof(struct kvt_msg_alloc) + sizeof(struct kvt_msg_key)];
    } alloc = {
        .head = {.msg = {.bytes = sizeof(alloc), .op = KVT_OP_ALLOC, .cookie = 2, .count = 1},
                 .map = 2,
                 .block_tokens = 16}};
    struct kvt_channel channel = {0};
    struct kvt_link link;
    struct kvt_msg reply;
    char text[512];

    memcpy(alloc.bytes + sizeof(struct kvt_msg_alloc), &key, sizeof(key));
    for (int map = 1; map <= 6; map++)
        open.record_bytes[map] = 8192;
    kvt_link_init(&link, socket);
    if (kvt_link_dial(&link, text, sizeof(text)) != 0 ||
        kvt_channel_attach(&channel, &link.wire) != 0)
        return 3;
    send_and_wait(&channel, &open, sizeof(open), &reply);
    alloc.head.msg.ns = reply.ns;
    send_and_wait(&channel, &alloc, sizeof(alloc), &reply);
    if (reply.status != 0)
        return 4;
    close(link.sock);
    for (;;)
        pause();
}

static void a_slot_is_taken_back_when_nobody_can_write_to_it_any_more(void **state)
{
    pid_t pid;

    (void)state;
    daemon_init(&server, "--dram 4MiB");
    daemon_start(&server);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when a test fails */
        execl("/proc/self/exe", "leaver", "--leaver", server.socket, "0", (char *)NULL);
        _exit(127);
    }
    daemon_wait_stat(&server, "dram.pins", 1, 20000);
    for (int i = 0; i < 30; i++) { /* its socket has ended, and it could still write */
        rig_sleep_ms(100);
        assert_int_equal(daemon_stat(&server, "dram.pins"), 1);
    }
    assert_int_equal(daemon_stat(&server, "dram.parted_bytes"), 8192);
    assert_true(daemon_said(&server, "was disconnected and lives on"));
    victim_kill(pid);
    wait_given_back("dram.pins", 0);
    assert_int_equal(daemon_stat(&server, "dram.parted_bytes"), 0);
    wait_given_back("daemon.clients", 0);
}

/* ---- nonsense -------------------------------------------------------------------------------- */

static void scribble(struct kvt_channel *channel, const struct kvt_link *link, int how,
                     struct kvt_rng *rng)
{
    uint8_t *rings = link->rings.map;
    struct kvt_ring *ring = &channel->requests;
    uint8_t *frame;

    if (how == 0) { /* frames of random bytes */
        frame = kvt_ring_reserve(ring, 256);
        for (int i = 0; frame != NULL && i < 256; i++)
            frame[i] = (uint8_t)kvt_rng_next(rng);
        kvt_ring_push(ring, 256);
    } else if (how == 1) { /* a position from nowhere */
        atomic_store(&ring->shared->tail, kvt_rng_next(rng));
    } else if (how == 2) { /* everything of both rings */
        for (uint64_t at = 0; at < link->rings.map_bytes; at += 8) {
            uint64_t word = kvt_rng_next(rng);
            memcpy(rings + at, &word, 8);
        }
    } else if (how == 3) { /* well formed, but for a handle that was never given out */
        struct kvt_msg_keys *msg = kvt_ring_reserve(ring, sizeof(*msg) + sizeof(msg->keys[0]));
        memset(msg, 0, sizeof(*msg) + sizeof(msg->keys[0]));
        msg->msg.bytes = sizeof(*msg) + sizeof(msg->keys[0]);
        msg->msg.op = KVT_OP_LOOKUP;
        msg->msg.cookie = 1;
        msg->msg.count = 1;
        msg->msg.ns = 77;
        msg->keys[0].hash_len = 8;
        kvt_ring_push(ring, msg->msg.bytes);
    } else { /* a message that is longer than its frame */
        struct kvt_msg *msg = kvt_ring_reserve(ring, sizeof(*msg));
        memset(msg, 0, sizeof(*msg));
        msg->bytes = 4096;
        msg->op = KVT_OP_STAT;
        kvt_ring_push(ring, sizeof(*msg));
    }
    uint64_t one = 1;
    assert_int_equal(write(link->wire.request_fd, &one, sizeof(one)), sizeof(one));
}

static void a_client_that_writes_nonsense_is_disconnected_and_nobody_notices(void **state)
{
    struct kvt_rng rng;
    struct sibling sibling;
    char text[512];

    (void)state;
    rng = (struct kvt_rng){rig_seed() + 3};
    daemon_init(&server, "--dram 4MiB --disk {store}:64MiB");
    daemon_start(&server);
    engine_open(&rig, server.config);
    sibling_start(&sibling);
    for (int round = 0; round < 50; round++) {
        struct kvt_channel channel = {0};
        struct kvt_link link;
        const int64_t end = rig_now_ns() + INT64_C(20000000000);

        kvt_link_init(&link, server.socket);
        assert_int_equal(kvt_link_dial(&link, text, sizeof(text)), 0);
        assert_int_equal(kvt_channel_attach(&channel, &link.wire), 0);
        scribble(&channel, &link, round % 5, &rng);
        while (daemon_stat(&server, "daemon.clients_broken") != (uint64_t)round + 1) {
            assert_true(rig_now_ns() < end);
            rig_sleep_ms(1);
        }
        kvt_link_hang_up(&link);
        sibling_check(&sibling);
    }
    sibling_stop(&sibling);
    wait_given_back("daemon.clients", 1);
    wait_given_back("dram.pins", 0);
    assert_int_equal(rig.warnings, 0);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

/* Damage to the arena by one of its clients is a miss for the others, never other bytes. */
static void damage_in_shared_memory_is_a_miss(void **state)
{
    struct kvt_link link;
    char text[512];

    (void)state;
    daemon_init(&server, "--dram 4MiB");
    daemon_start(&server);
    engine_open(&rig, server.config);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    kvt_link_init(&link, server.socket);
    assert_int_equal(kvt_link_dial(&link, text, sizeof(text)), 0);
    for (uint64_t at = 1000; at < link.memory.arena_bytes; at += 4096)
        link.memory.arena[at] ^= 1u;
    kvt_link_hang_up(&link);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), 0);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), 0);
    assert_true(daemon_stat(&server, "verify.checksum_fail") > 0);
    assert_int_equal(rig_store(&rig, 1, BLOCKS, 0, NULL), BLOCKS);
    assert_int_equal(rig_load(&rig, 1, BLOCKS, NULL), BLOCKS);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(killed_clients_lose_what_was_theirs_and_nobody_else_anything,
                                  tear_down),
        cmocka_unit_test_teardown(killed_daemons_lose_nothing_that_was_flushed, tear_down),
        cmocka_unit_test_teardown(a_stopped_client_stalls_nobody, tear_down),
        cmocka_unit_test_teardown(a_client_that_writes_nonsense_is_disconnected_and_nobody_notices,
                                  tear_down),
        cmocka_unit_test_teardown(a_slot_is_taken_back_when_nobody_can_write_to_it_any_more,
                                  tear_down),
        cmocka_unit_test_teardown(damage_in_shared_memory_is_a_miss, tear_down),
    };

    if (argc == 4 && strcmp(argv[1], "--victim") == 0)
        return victim(argv[2], strtoull(argv[3], NULL, 10));
    if (argc == 4 && strcmp(argv[1], "--leaver") == 0)
        return leaver(argv[2]);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);

    printf("given back after at most %lld ms, siblings silent for at most %lld ms\n",
           (long long)(reclaim_ns_max / 1000000), (long long)(stall_ns_max / 1000000));
    tally_print("kill9", kills, (uint64_t)failed);
    return failed;
}
