/* Messages of any bytes from two clients into a store with a disk: it never crashes, keeps every
 * invariant, answers only those who asked, and a slot that it hands out lies inside the arena and
 * belongs to no other block that is being filled.
 * Input: messages, each {op, client, count, how, argument, fields ...}. `how` says whether the size
 * is made to fit, whether slots are real ones, and whether time moves. */
#include "base/checked.h"
#include "format/message.h"
#include "fuzz/fuzz.h"
#include "kvtier/error.h"
#include "store/store.h"

enum { HOW_SIZE_LIES = 1, HOW_REAL_SLOTS = 2, HOW_RUN = 4, HOW_LATER = 8, HOW_LEAVE = 16 };
#define ARENA_BYTES (96u << 12)
#define REFS_MAX 64u
#define STEPS_MAX 48u

struct world {
    struct kvt_store *store;
    struct kvt_io *io;
    uint8_t *arena;
    int64_t now;
    struct kvt_slot_ref refs[REFS_MAX];
    uint32_t ref_count;
};

static int64_t world_now(void *ctx)
{
    return ((struct world *)ctx)->now;
}

static void remember(struct world *world, uint32_t slot, uint32_t generation, uint64_t checksum)
{
    world->refs[world->ref_count++ % REFS_MAX] =
        (struct kvt_slot_ref){.slot = slot, .generation = generation, .checksum = checksum};
}

static void take_reply(void *ctx, uint32_t client, const struct kvt_msg *msg)
{
    struct world *world = ctx;

    FUZZ_CHECK(client == 1 || client == 2);
    FUZZ_CHECK(msg->bytes >= sizeof *msg && msg->bytes % 8 == 0 && msg->bytes <= KVT_MSG_BYTES_MAX);
    if (msg->op == KVT_OP_GRANT) {
        const struct kvt_msg_grant *grant = (const struct kvt_msg_grant *)msg;

        if (msg->status != 0)
            return;
        FUZZ_CHECK(grant->arena_offset % 4096 == 0 && grant->record_bytes % 4096 == 0);
        FUZZ_CHECK(grant->direct || grant->arena_offset + grant->record_bytes <= ARENA_BYTES);
        remember(world, grant->slot, grant->generation, grant->checksum);
        return;
    }
    FUZZ_CHECK(msg->op == KVT_OP_REPLY);
    if (msg->reply_to == KVT_OP_ALLOC && msg->status >= 0 && msg->count) {
        const struct kvt_msg_alloc_reply *reply = (const struct kvt_msg_alloc_reply *)msg;

        FUZZ_CHECK(msg->bytes >= sizeof *reply + msg->count * sizeof reply->entries[0]);
        for (uint32_t i = 0; i < msg->count; i++) {
            const struct kvt_alloc_entry *entry = &reply->entries[i];

            if (entry->status != 0)
                continue;
            FUZZ_CHECK(entry->arena_offset + entry->record_bytes <= ARENA_BYTES);
            memset(world->arena + entry->arena_offset, (int)entry->slot, entry->record_bytes);
            remember(world, entry->slot, entry->generation, entry->sequence);
        }
    }
}

static void world_open(struct world *world)
{
    struct kvt_store_params params = {.arena_bytes = ARENA_BYTES,
                                      .staging_bytes = ARENA_BYTES / 4,
                                      .write_queue_bytes = 16u << 12,
                                      .pin_bytes_max = 16u << 12,
                                      .blocks_max = 256,
                                      .root_count = 1,
                                      .seed = 42,
                                      .clock = {world_now, world},
                                      .reply = take_reply,
                                      .reply_ctx = world};

    memset(world, 0, sizeof *world);
    world->now = 1000000000;
    FUZZ_CHECK(posix_memalign((void **)&world->arena, 4096, ARENA_BYTES) == 0);
    memset(world->arena, 0xa5, ARENA_BYTES);
    FUZZ_CHECK(kvt_io_mem_new(32u << 20, &world->io) == 0);
    params.arena = world->arena;
    params.roots[0] = (struct kvt_store_root){.io = world->io, .cap_bytes = 16u << 20};
    FUZZ_CHECK(kvt_store_open(&params, &world->store, NULL) == 0);
}

static void world_close(struct world *world)
{
    kvt_store_close(world->store, 1000000);
    world->io->ops->destroy(world->io);
    free(world->arena);
}

static size_t fixed_bytes(unsigned op)
{
    static const size_t fixed[] = {[KVT_OP_NS_OPEN] = sizeof(struct kvt_msg_ns_open),
                                   [KVT_OP_LOOKUP] = sizeof(struct kvt_msg_keys),
                                   [KVT_OP_ALLOC] = sizeof(struct kvt_msg_alloc),
                                   [KVT_OP_COMMIT] = sizeof(struct kvt_msg_slots),
                                   [KVT_OP_ABORT] = sizeof(struct kvt_msg_slots),
                                   [KVT_OP_ACQUIRE] = sizeof(struct kvt_msg_acquire),
                                   [KVT_OP_CANCEL] = sizeof(struct kvt_msg_cancel),
                                   [KVT_OP_RELEASE] = sizeof(struct kvt_msg_slots),
                                   [KVT_OP_TOUCH] = sizeof(struct kvt_msg_keys),
                                   [KVT_OP_PREFETCH] = sizeof(struct kvt_msg_keys),
                                   [KVT_OP_PIN] = sizeof(struct kvt_msg_keys),
                                   [KVT_OP_UNPIN] = sizeof(struct kvt_msg_keys),
                                   [KVT_OP_PURGE] = sizeof(struct kvt_msg_keys),
                                   [KVT_OP_FLUSH] = sizeof(struct kvt_msg),
                                   [KVT_OP_STAT] = sizeof(struct kvt_msg)};

    return op < sizeof fixed / sizeof fixed[0] && fixed[op] ? fixed[op] : sizeof(struct kvt_msg);
}

static bool has_slots(unsigned op)
{
    return op == KVT_OP_COMMIT || op == KVT_OP_ABORT || op == KVT_OP_RELEASE;
}

/* Keys from a small set, so that they meet again; one in sixteen is as the input has it. */
static void tame_keys(uint8_t *at, size_t room, uint32_t count)
{
    for (uint32_t i = 0; i < count && (i + 1) * sizeof(struct kvt_msg_key) <= room; i++) {
        struct kvt_msg_key key;
        uint8_t number = at[i * sizeof key];

        if (number >= 0xf0)
            continue;
        key = (struct kvt_msg_key){.hash = {(uint8_t)(number % 24)}, .hash_len = 8};
        memcpy(at + i * sizeof key, &key, sizeof key);
    }
}

static void step(struct world *world, struct fuzz_input *in)
{
    unsigned op = fuzz_u8(in), client = 1u + (fuzz_u8(in) & 1u), count = fuzz_u8(in) % 24u;
    uint8_t how = fuzz_u8(in), fields = fuzz_u8(in);
    size_t fixed = fixed_bytes(op), entry = has_slots(op) ? 24 : op <= KVT_OP_PURGE ? 40 : 0;
    size_t bytes;
    struct kvt_msg *msg;

    if (op == KVT_OP_NS_OPEN || op == KVT_OP_CANCEL)
        entry = 0;
    bytes = (fixed + entry * count + 7) / 8 * 8;
    msg = fuzz_memory(bytes);
    memset(msg, 0, bytes);
    fuzz_take(in, (uint8_t *)msg + sizeof *msg,
              KVT_MIN((size_t)fields + entry * count, bytes - sizeof *msg));
    msg->bytes = (uint32_t)bytes;
    msg->op = (uint16_t)op;
    msg->cookie = fields & 7u;
    msg->ns = 1u + (fields >> 3 & 1u);
    msg->count = count;
    if (how & HOW_SIZE_LIES) { /* never more than there is: the transport sees to that */
        msg->bytes = (uint32_t)KVT_MIN((size_t)fields * 8, bytes);
        msg->count = fields * 5u;
        msg->ns = fields;
    } else if (entry == 40) {
        tame_keys((uint8_t *)msg + fixed, bytes - fixed, count);
    }
    if (how & HOW_REAL_SLOTS && has_slots(op) && world->ref_count && !(how & HOW_SIZE_LIES))
        for (uint32_t i = 0; i < count; i++)
            ((struct kvt_msg_slots *)msg)->slots[i] =
                world->refs[(fields + i) % KVT_MIN(world->ref_count, REFS_MAX)];
    (void)kvt_store_handle(world->store, client, msg);
    free(msg);
    if (how & HOW_LATER)
        world->now += (int64_t)fields * 10000000;
    if (how & HOW_RUN)
        (void)kvt_store_run(world->store);
    if ((how & 0xf0) == HOW_LEAVE)
        kvt_store_client_gone(world->store, client);
}

static void open_namespaces(struct world *world)
{
    struct kvt_msg_ns_open msg = {.msg = {.bytes = sizeof msg, .op = KVT_OP_NS_OPEN, .cookie = 1},
                                  .block_tokens = 16,
                                  .record_bytes = {0, 4096, 4096, 8192, 8192, 12288, 16384, 0}};

    for (uint8_t id = 1; id <= 2; id++) {
        memset(msg.id, id, sizeof msg.id);
        msg.loose = id == 2;
        FUZZ_CHECK(kvt_store_handle(world->store, 1, &msg.msg) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};
    struct world world;
    char why[256] = "";

    world_open(&world);
    open_namespaces(&world);
    for (unsigned i = 0; i < STEPS_MAX && in.size; i++)
        step(&world, &in);
    (void)kvt_store_run(world.store);
    if (kvt_store_check(world.store, why, sizeof why) != 0) {
        fprintf(stderr, "%s\n", why);
        abort();
    }
    for (uint32_t client = 1; client <= 2; client++)
        kvt_store_client_gone(world.store, client);
    if (kvt_store_check(world.store, why, sizeof why) != 0) {
        fprintf(stderr, "after the clients left: %s\n", why);
        abort();
    }
    world_close(&world);
    return 0;
}
