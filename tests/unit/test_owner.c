/* Goal: the owner thread moves messages both ways, sleeps when idle, survives clients that leave or
 * misbehave, and loses nothing when it stops.
 * Method: real threads and rings over a store without disk or with one in memory; clients on their
 * own threads; CPU time of the process while idle is measured. Run under the thread sanitizer too.
 */
#include "support/store_help.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "format/record.h"
#include "kvtier/error.h"
#include "store/owner.h"

enum { RECORD = 8192, RING = 1 << 18 };

struct fixture {
    struct kvt_owner *owner;
    struct kvt_io *io;
    uint8_t *arena;
    struct kvt_store_params params;
};

static void fixture_open(struct fixture *f, bool disk)
{
    struct kvt_store *store;

    memset(f, 0, sizeof(*f));
    f->arena = aligned_alloc(4096, 1 << 20);
    assert_non_null(f->arena);
    assert_int_equal(kvt_owner_new(&f->owner), 0);
    f->params = (struct kvt_store_params){.arena = f->arena,
                                          .arena_bytes = 1 << 20,
                                          .staging_bytes = 1 << 17,
                                          .write_queue_bytes = 1 << 19,
                                          .seed = 1,
                                          .clock = kvt_clock_system(),
                                          .reply = kvt_owner_reply,
                                          .reply_ctx = f->owner};
    if (disk) {
        assert_int_equal(kvt_io_mem_new(256u << 20, &f->io), 0);
        f->params.root_count = 1;
        f->params.roots[0].io = f->io;
        f->params.roots[0].cap_bytes = 64u << 20;
    }
    assert_int_equal(kvt_store_open(&f->params, &store, NULL), 0);
    assert_int_equal(kvt_owner_start(f->owner, store, &f->params), 0);
}

static void fixture_close(struct fixture *f)
{
    kvt_owner_stop(f->owner, 1000000000);
    if (f->io)
        f->io->ops->destroy(f->io);
    free(f->arena);
}

static void send_msg(struct kvt_channel *channel, const void *msg, uint32_t bytes)
{
    void *frame;

    while (!(frame = kvt_ring_reserve(&channel->requests, bytes)))
        usleep(100);
    memcpy(frame, msg, bytes);
    kvt_ring_push(&channel->requests, bytes);
}

/* Wait for the next reply; 0 when none comes within 5 s. */
static uint32_t next_reply(struct kvt_channel *channel, void *out)
{
    for (int tries = 0; tries < 500; tries++) {
        const void *frame;
        int bytes = kvt_ring_peek(&channel->replies, &frame);

        if (bytes > 0) {
            memcpy(out, frame, (size_t)bytes);
            kvt_ring_pop(&channel->replies);
            return (uint32_t)bytes;
        }
        if (kvt_ring_sleep(&channel->replies)) {
            struct pollfd pfd = {.fd = channel->replies.event_fd, .events = POLLIN};
            uint64_t rung;

            (void)poll(&pfd, 1, 10);
            if (read(channel->replies.event_fd, &rung, 8) < 0)
                rung = 0;
        }
        kvt_ring_awake(&channel->replies);
    }
    return 0;
}

union reply {
    struct kvt_msg msg;
    struct kvt_msg_alloc_reply alloc;
    struct kvt_msg_grant grant;
    struct kvt_msg_slots slots;
    _Alignas(8) uint8_t bytes[KVT_MSG_BYTES_MAX];
};

static uint32_t open_ns(struct kvt_channel *channel)
{
    struct kvt_msg_ns_open msg = {
        .msg = {.bytes = sizeof(msg), .op = KVT_OP_NS_OPEN, .cookie = 1},
        .id = {7},
        .block_tokens = 16,
    };
    static _Thread_local union reply reply;

    msg.record_bytes[2] = RECORD;
    send_msg(channel, &msg, sizeof(msg));
    assert_true(next_reply(channel, &reply) > 0);
    assert_int_equal(reply.msg.status, 0);
    return reply.msg.ns;
}

struct one_key {
    union {
        struct kvt_msg_alloc alloc;
        struct kvt_msg_acquire acquire;
        uint8_t bytes[160];
    } u;
};

static struct kvt_msg_key key_of(uint64_t number)
{
    struct kvt_msg_key key = {.hash_len = 8};

    memcpy(key.hash, &number, 8);
    return key;
}

/* Store one block; the status of its COMMIT. */
static int32_t store_block(struct kvt_channel *channel, uint32_t ns, uint64_t number)
{
    static _Thread_local union reply reply;
    struct one_key request = {0};
    struct kvt_msg_slots *commit = (struct kvt_msg_slots *)request.u.bytes;
    struct kvt_record_header *header;
    struct kvt_alloc_entry entry;

    request.u.alloc.msg = (struct kvt_msg){.bytes = sizeof(struct kvt_msg_alloc) + 40,
                                           .op = KVT_OP_ALLOC,
                                           .cookie = 2,
                                           .ns = ns,
                                           .count = 1};
    request.u.alloc.map = 2;
    request.u.alloc.keys[0] = key_of(number);
    send_msg(channel, &request, request.u.alloc.msg.bytes);
    assert_true(next_reply(channel, &reply) > 0);
    entry = reply.alloc.entries[0];
    if (entry.status)
        return entry.status;
    header = (struct kvt_record_header *)(channel->arena + entry.arena_offset);
    memset(header, (int)number, entry.record_bytes);
    memset(header, 0, sizeof(*header));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = 2;
    header->key.ns[0] = 7;
    header->key.hash_len = 8;
    memcpy(header->key.hash, &number, 8);
    header->record_bytes = entry.record_bytes;
    header->payload_bytes = entry.record_bytes - sizeof(*header);
    header->sequence = entry.sequence;
    header->checksum = kvt_record_checksum(header, entry.record_bytes);
    memset(&request, 0, sizeof(request));
    commit->msg = (struct kvt_msg){.bytes = sizeof(*commit) + sizeof(commit->slots[0]),
                                   .op = KVT_OP_COMMIT,
                                   .cookie = 3,
                                   .count = 1};
    commit->slots[0] = (struct kvt_slot_ref){
        .slot = entry.slot, .generation = entry.generation, .checksum = header->checksum};
    send_msg(channel, commit, commit->msg.bytes);
    assert_true(next_reply(channel, &reply) > 0);
    return reply.slots.slots[0].status;
}

/* Load one block, compare a byte, release when asked to. The status of its GRANT. */
static int32_t load_block(struct kvt_channel *channel, uint32_t ns, uint64_t number, bool release)
{
    static _Thread_local union reply reply;
    struct one_key request = {0};
    struct kvt_msg_slots *slots = (struct kvt_msg_slots *)request.u.bytes;
    struct kvt_msg_grant grant;

    request.u.acquire.msg = (struct kvt_msg){.bytes = sizeof(struct kvt_msg_acquire) + 40,
                                             .op = KVT_OP_ACQUIRE,
                                             .cookie = 4,
                                             .ns = ns,
                                             .count = 1};
    request.u.acquire.deadline_ns = INT64_MAX;
    request.u.acquire.keys[0] = key_of(number);
    send_msg(channel, &request, request.u.acquire.msg.bytes);
    assert_true(next_reply(channel, &reply) > 0);
    grant = reply.grant;
    assert_int_equal(grant.msg.op, KVT_OP_GRANT);
    if (grant.msg.status)
        return grant.msg.status;
    assert_int_equal(channel->arena[grant.arena_offset + 4096], (uint8_t)number);
    memset(&request, 0, sizeof(request));
    slots->msg = (struct kvt_msg){
        .bytes = sizeof(*slots) + sizeof(slots->slots[0]), .op = KVT_OP_RELEASE, .count = 1};
    slots->slots[0] = (struct kvt_slot_ref){.slot = grant.slot, .generation = grant.generation};
    if (release)
        send_msg(channel, slots, slots->msg.bytes);
    return 0;
}

static uint64_t stat_of(struct kvt_channel *channel, size_t index)
{
    static _Thread_local union reply reply;
    struct kvt_msg msg = {.bytes = sizeof(msg), .op = KVT_OP_STAT, .cookie = 9};

    send_msg(channel, &msg, sizeof(msg));
    assert_true(next_reply(channel, &reply) > 0);
    assert_true(reply.msg.count >= KVT_STORE_STAT_COUNT);
    return ((struct kvt_msg_stat_reply *)&reply)->values[index];
}

#define STAT(channel, field) \
    stat_of(channel, offsetof(struct kvt_store_stats, field) / sizeof(uint64_t))

static void test_round_trips(void **state)
{
    struct fixture f;
    struct kvt_channel channel;
    uint32_t ns;

    (void)state;
    fixture_open(&f, true);
    assert_int_equal(kvt_owner_connect(f.owner, RING, &channel), 0);
    assert_ptr_equal(channel.arena, f.arena);
    ns = open_ns(&channel);
    for (uint64_t i = 0; i < 100; i++) /* fits into DRAM: nothing depends on the disk's speed */
        assert_int_equal(store_block(&channel, ns, i), 0);
    for (uint64_t i = 0; i < 100; i++)
        assert_int_equal(load_block(&channel, ns, i, true), 0);
    assert_int_equal(load_block(&channel, ns, 1000, true), KVT_E_MISS);
    kvt_owner_enable(f.owner, 0);
    for (int i = 0; i < 20000 && load_block(&channel, ns, 99, true) == 0; i++)
        usleep(1000);
    assert_int_equal(load_block(&channel, ns, 99, true), KVT_E_MISS);
    kvt_owner_disconnect(f.owner, &channel);
    fixture_close(&f);
}

struct worker {
    struct fixture *f;
    uint64_t first;
    pthread_t thread;
};

static void *work(void *arg)
{
    struct worker *w = arg;

    for (int life = 0; life < 5; life++) {
        struct kvt_channel channel;
        uint32_t ns;

        assert_int_equal(kvt_owner_connect(w->f->owner, RING, &channel), 0);
        ns = open_ns(&channel);
        for (uint64_t i = 0; i < 40; i++) {
            int32_t status = store_block(&channel, ns, w->first + i % 60);

            assert_true(status == 0 || status == KVT_E_EXISTS || status == KVT_E_DROPPED ||
                        status == KVT_E_ORPHAN);
            load_block(&channel, ns, w->first + i % 7, i % 3 != 0); /* some are left held */
        }
        kvt_owner_disconnect(w->f->owner, &channel);
    }
    return NULL;
}

/* Clients come, share keys, leave with slots held; in the end nothing is pinned. */
static void test_many_clients(void **state)
{
    struct worker workers[4];
    struct kvt_channel channel;
    struct fixture f;

    (void)state;
    fixture_open(&f, true);
    for (unsigned i = 0; i < 4; i++) {
        workers[i] = (struct worker){.f = &f, .first = i / 2 * 30};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (unsigned i = 0; i < 4; i++)
        pthread_join(workers[i].thread, NULL);
    assert_int_equal(kvt_owner_connect(f.owner, RING, &channel), 0);
    for (int i = 0; i < 20000 && STAT(&channel, dram_pins); i++)
        usleep(1000); /* writes in flight: as long as the drive takes */
    assert_int_equal(STAT(&channel, dram_pins), 0);
    kvt_owner_disconnect(f.owner, &channel);
    fixture_close(&f);
}

/* A client that never reads its replies, and one that sends nonsense: others do not notice. */
static void test_bad_clients(void **state)
{
    struct kvt_msg stat = {.bytes = sizeof(stat), .op = KVT_OP_STAT, .cookie = 1};
    struct kvt_msg nonsense = {.bytes = 4096, .op = KVT_OP_STAT, .cookie = 1};
    struct kvt_channel deaf, mad, good;
    struct fixture f;
    uint32_t ns;

    (void)state;
    fixture_open(&f, false);
    assert_int_equal(kvt_owner_connect(f.owner, 4096, &deaf), 0);
    assert_int_equal(kvt_owner_connect(f.owner, 4096, &mad), 0);
    assert_int_equal(kvt_owner_connect(f.owner, RING, &good), 0);
    for (int i = 0; i < 40; i++)
        send_msg(&deaf, &stat, sizeof(stat));
    send_msg(&mad, &nonsense, sizeof(nonsense));
    ns = open_ns(&good);
    assert_int_equal(store_block(&good, ns, 1), 0);
    assert_int_equal(load_block(&good, ns, 1, true), 0);
    /* handled before the good one's messages, and told */
    assert_int_equal(kvt_ring_closed(&deaf.replies), 1);
    assert_int_equal(kvt_ring_closed(&mad.replies), 1);
    assert_int_equal(kvt_ring_closed(&good.replies), 0);
    kvt_owner_disconnect(f.owner, &deaf);
    kvt_owner_disconnect(f.owner, &mad);
    kvt_owner_disconnect(f.owner, &good);
    assert_int_equal(kvt_owner_connect(f.owner, RING, &good), 0); /* the places are free again */
    kvt_owner_disconnect(f.owner, &good);
    fixture_close(&f);
}

static int64_t cpu_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void test_idle_sleeps(void **state)
{
    struct kvt_channel channel;
    struct fixture f;
    int64_t before;
    uint32_t ns;

    (void)state;
    fixture_open(&f, true);
    assert_int_equal(kvt_owner_connect(f.owner, RING, &channel), 0);
    ns = open_ns(&channel);
    assert_int_equal(store_block(&channel, ns, 1), 0);
    usleep(200000);
    before = cpu_ns();
    usleep(500000);
    assert_true(cpu_ns() - before < 20000000); /* 4 % of a core would be a spin in disguise */
    kvt_owner_disconnect(f.owner, &channel);
    fixture_close(&f);
}

/* A client that is parted with costs no place, keeps what it was filling, and loses that, and only
 * that, when it is reclaimed: as often as there are places, and more. */
static void test_parted_clients(void **state)
{
    enum { ROUNDS = 5, HELD = 3 };
    struct kvt_channel channel, good;
    uint32_t numbers[ROUNDS];
    struct fixture f;
    uint32_t ns;

    (void)state;
    fixture_open(&f, false);
    assert_int_equal(kvt_owner_connect(f.owner, RING, &good), 0);
    ns = open_ns(&good);
    assert_int_equal(store_block(&good, ns, 1), 0);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        static union reply reply;
        struct one_key request = {0};

        assert_int_equal(kvt_owner_connect(f.owner, RING, &channel), 0);
        numbers[i] = channel.client;
        ns = open_ns(&channel);
        assert_int_equal(load_block(&channel, ns, 1, false), 0); /* a grant, never released */
        for (uint64_t held = 0; held < HELD; held++) {
            request.u.alloc.msg = (struct kvt_msg){.bytes = sizeof(struct kvt_msg_alloc) + 40,
                                                   .op = KVT_OP_ALLOC,
                                                   .cookie = 2,
                                                   .ns = ns,
                                                   .count = 1};
            request.u.alloc.map = 2;
            request.u.alloc.keys[0] = key_of(100 + i * HELD + held);
            send_msg(&channel, &request, request.u.alloc.msg.bytes);
            assert_true(next_reply(&channel, &reply) > 0);
            assert_int_equal(reply.alloc.entries[0].status, 0);
        }
        assert_int_equal(STAT(&good, dram_pins), i * HELD + HELD + 1);
        kvt_owner_part(f.owner, channel.client); /* frees the memory of its rings too */
        assert_int_equal(STAT(&good, dram_pins), (i + 1) * HELD); /* the grant is gone */
    }
    for (int i = 0; i < 3 * (int)KVT_OWNER_CLIENTS_MAX; i++) {
        assert_int_equal(kvt_owner_connect(f.owner, 4096, &channel), 0);
        kvt_owner_part(f.owner, channel.client);
        kvt_owner_reclaim(f.owner, channel.client);
    }
    for (uint32_t i = ROUNDS; i-- > 0;) {
        assert_int_equal(STAT(&good, dram_pins), (i + 1) * HELD);
        kvt_owner_reclaim(f.owner, numbers[i]);
        for (int tries = 0; tries < 5000 && STAT(&good, dram_pins) != i * HELD; tries++)
            usleep(1000);
    }
    assert_int_equal(STAT(&good, dram_pins), 0);
    assert_int_equal(load_block(&good, ns, 1, true), 0);
    kvt_owner_disconnect(f.owner, &good);
    fixture_close(&f);
}

static void test_limits(void **state)
{
    struct kvt_channel channels[KVT_OWNER_CLIENTS_MAX + 1];
    struct kvt_owner *owner;
    struct fixture f;

    (void)state;
    assert_int_equal(kvt_owner_new(&owner), 0);
    kvt_owner_stop(owner, 0); /* never started: just freed */
    fixture_open(&f, false);
    assert_int_equal(kvt_owner_connect(f.owner, 1000, &channels[0]), KVT_E_INVAL);
    for (uint32_t i = 0; i < KVT_OWNER_CLIENTS_MAX; i++)
        assert_int_equal(kvt_owner_connect(f.owner, 4096, &channels[i]), 0);
    assert_int_equal(kvt_owner_connect(f.owner, 4096, &channels[KVT_OWNER_CLIENTS_MAX]),
                     KVT_E_LIMIT);
    for (uint32_t i = 0; i < KVT_OWNER_CLIENTS_MAX; i += 2)
        kvt_owner_disconnect(f.owner, &channels[i]);
    fixture_close(&f); /* the others are dead after this */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),    cmocka_unit_test(test_many_clients),
        cmocka_unit_test(test_bad_clients),    cmocka_unit_test(test_idle_sleeps),
        cmocka_unit_test(test_parted_clients), cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
