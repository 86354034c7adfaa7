/* Any bytes in the memory of a client's two rings: the owner's side never reads or writes out of
 * bounds, copies before it looks, answers only into the reply ring, and the store keeps every
 * invariant; a broken ring stays broken. Here the owner's turn is played without its thread.
 * Input: steps. Each says where and what is written into the rings (or that well-formed messages
 * are pushed, or time passes), and then the other side takes its turn. */
#include "base/checked.h"
#include "base/ring.h"
#include "format/message.h"
#include "fuzz/fuzz.h"
#include "kvtier/error.h"
#include "store/store.h"

enum { STEP_POKE, STEP_FILL, STEP_FRAME, STEP_NS, STEP_POSITION, STEP_LATER, STEP_KINDS };
#define RING 16384u
#define ARENA_BYTES (64u << 12)
#define STEPS_MAX 64u

struct world {
    struct kvt_store *store;
    uint8_t *arena, *memory;
    struct kvt_ring requests, replies; /* the owner's ends */
    struct kvt_ring client;            /* the client's end of the requests */
    int64_t now;
    int broken;
    _Alignas(8) uint8_t message[KVT_MSG_BYTES_MAX];
};

static int64_t world_now(void *ctx)
{
    return ((struct world *)ctx)->now;
}

/* kvt_owner_reply() without the places. */
static void take_reply(void *ctx, uint32_t client, const struct kvt_msg *msg)
{
    struct world *world = ctx;
    uint8_t *frame;

    FUZZ_CHECK(client == 65);
    if (world->broken)
        return;
    frame = kvt_ring_reserve(&world->replies, msg->bytes);
    if (!frame) {
        world->broken = 1;
        return;
    }
    FUZZ_CHECK(frame >= world->replies.data &&
               frame + msg->bytes <= world->replies.data + world->replies.capacity);
    memcpy(frame, msg, msg->bytes);
    kvt_ring_push(&world->replies, msg->bytes);
}

/* As client_turn() of the owner for a remote client. */
static void owner_turn(struct world *world)
{
    struct kvt_msg *msg = (struct kvt_msg *)world->message;

    for (int count = 0; !world->broken && count < 64; count++) {
        const void *frame;
        int bytes = kvt_ring_peek(&world->requests, &frame);

        if (bytes == 0)
            break;
        world->broken = bytes < (int)sizeof(*msg) || bytes > (int)sizeof(world->message);
        if (world->broken)
            break;
        FUZZ_CHECK((const uint8_t *)frame >= world->requests.data &&
                   (const uint8_t *)frame + bytes <=
                       world->requests.data + world->requests.capacity);
        memcpy(msg, frame, (size_t)bytes);
        kvt_ring_pop(&world->requests);
        world->broken =
            msg->bytes > (uint32_t)bytes || kvt_store_handle(world->store, 65, msg) != 0;
    }
    if (world->broken) {
        kvt_store_client_stop(world->store, 65);
        kvt_store_client_gone(world->store, 65);
    }
    for (int i = 0; i < 8; i++)
        (void)kvt_store_run(world->store);
}

static void push(struct world *world, const void *bytes, uint32_t count)
{
    uint8_t *frame = kvt_ring_reserve(&world->client, (uint32_t)kvt_round_up(count, 8));

    if (!frame)
        return;
    memset(frame, 0, (size_t)kvt_round_up(count, 8));
    memcpy(frame, bytes, count);
    kvt_ring_push(&world->client, (uint32_t)kvt_round_up(count, 8));
}

static void push_ns(struct world *world)
{
    struct kvt_msg_ns_open open = {
        .msg = {.bytes = sizeof(open), .op = KVT_OP_NS_OPEN, .cookie = 5}, .block_tokens = 16};

    open.id[0] = 1;
    for (int map = 1; map <= 6; map++)
        open.record_bytes[map] = 8192;
    push(world, &open, sizeof(open));
}

static void step(struct world *world, struct fuzz_input *in)
{
    uint8_t bytes[512];
    uint32_t kind = fuzz_u8(in) % STEP_KINDS, count = fuzz_u8(in) * 2u, at;
    uint64_t word;

    fuzz_take(in, &word, sizeof(word));
    fuzz_take(in, bytes, count);
    switch (kind) {
    case STEP_POKE: /* anywhere, the rings' heads and tails too */
        at = (uint32_t)(word % (2 * kvt_ring_bytes(RING) - sizeof(bytes)));
        memcpy(world->memory + at, bytes, count);
        break;
    case STEP_FILL: /* where the next frame begins */
        at = (uint32_t)(world->requests.head % RING);
        memcpy(world->requests.data + at, bytes, KVT_MIN(count, RING - at));
        break;
    case STEP_FRAME: /* a frame of these bytes, made to look like a message if the word says so */
        if (word & 1 && count >= 8) {
            uint32_t size = count & ~7u;
            memcpy(bytes, &size, sizeof(size));
            bytes[4] = (uint8_t)(word >> 8) % 18;
            bytes[5] = bytes[6] = bytes[7] = 0;
        }
        if (count)
            push(world, bytes, count);
        break;
    case STEP_NS:
        push_ns(world);
        break;
    case STEP_POSITION:
        atomic_store(&world->requests.shared->tail,
                     word & 2 ? world->requests.head + (word >> 48) : word);
        break;
    default:
        world->now += (int64_t)(word % 2000000000u);
    }
    owner_turn(world);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct world world;
    struct fuzz_input in = {data, size};
    struct kvt_store_params params = {.arena_bytes = ARENA_BYTES,
                                      .staging_bytes = ARENA_BYTES / 4,
                                      .pin_bytes_max = 8u << 12,
                                      .client_bytes_max = ARENA_BYTES / 4,
                                      .blocks_max = 256,
                                      .seed = 42,
                                      .clock = {world_now, &world},
                                      .reply = take_reply,
                                      .reply_ctx = &world};
    size_t ring_bytes = (size_t)kvt_round_up(kvt_ring_bytes(RING), 64);
    char why[256];

    memset(&world, 0, sizeof(world));
    world.now = 1000000000;
    world.arena = aligned_alloc(4096, ARENA_BYTES);
    world.memory = aligned_alloc(64, 2 * ring_bytes);
    FUZZ_CHECK(world.arena && world.memory);
    memset(world.memory, 0, 2 * ring_bytes);
    params.arena = world.arena;
    FUZZ_CHECK(kvt_store_open(&params, &world.store, NULL) == 0);
    FUZZ_CHECK(kvt_ring_init(&world.requests, world.memory, RING, -1, 1) == 0);
    FUZZ_CHECK(kvt_ring_init(&world.replies, world.memory + ring_bytes, RING, -1, 1) == 0);
    FUZZ_CHECK(kvt_ring_init(&world.client, world.memory, RING, -1, 0) == 0);
    for (uint32_t i = 0; i < STEPS_MAX && in.size > 0; i++) {
        step(&world, &in);
        if (kvt_store_check(world.store, why, sizeof(why)) != 0) {
            fprintf(stderr, "%s\n", why);
            FUZZ_CHECK(!"invariants of the store");
        }
    }
    kvt_store_client_gone(world.store, 65);
    struct kvt_store_stats stats;
    kvt_store_stats(world.store, &stats);
    FUZZ_CHECK(stats.dram_pins == 0 && stats.pinned_blocks == 0);
    kvt_store_close(world.store, 0);
    free(world.arena);
    free(world.memory);
    return 0;
}
