/* What clients send and what comes back. See sim.h. A client is an id of the store and what it
 * holds: slots being filled, grants, requests that wait. It dies in the middle of anything. */
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "kvtier/error.h"
#include "sim/sim.h"
#include "store/store_impl.h"

#define LATE_NS 25000000 /* of the scheduler: sim_advance() */

static union {
    struct kvt_msg msg;
    struct kvt_msg_ns_open open;
    struct kvt_msg_keys keys;
    struct kvt_msg_alloc alloc;
    struct kvt_msg_acquire acquire;
    struct kvt_msg_slots slots;
    struct kvt_msg_cancel cancel;
    uint8_t bytes[4096];
} out;

static void begin(struct sim *sim, uint16_t op, size_t bytes, uint32_t ns, uint32_t count)
{
    memset(&out, 0, bytes + 8);
    out.msg.bytes = (uint32_t)((bytes + 7) / 8 * 8);
    out.msg.op = op;
    out.msg.cookie = ++sim->cookie;
    out.msg.ns = ns;
    out.msg.count = count;
}

static void send(struct sim *sim, uint32_t client)
{
    sim->answers = 0;
    sim_log(sim, out.msg.op, (uint64_t)client << 32 | out.msg.count);
    sim_tell(sim, "client %u sends %u, cookie %llu, namespace %u, %u keys", client, out.msg.op,
             (unsigned long long)out.msg.cookie, out.msg.ns, out.msg.count);
    SIM_CHECK(sim, kvt_store_handle(sim->store, client, &out.msg) == 0);
}

static uint32_t some_client(struct sim *sim)
{
    return sim->clients[sim_roll(sim, SIM_CLIENTS)];
}

/* A piece of a chain: its first block; returns how many. */
static uint32_t some_piece(struct sim *sim, uint32_t *first)
{
    uint32_t chain = sim_roll(sim, SIM_CHAINS);
    uint32_t depth = sim_roll(sim, 2) ? 0 : sim_roll(sim, SIM_DEPTH);
    uint32_t n = 1 + sim_roll(sim, SIM_PIECE);

    *first = chain * SIM_DEPTH + depth;
    return KVT_MIN(n, SIM_DEPTH - depth);
}

static uint32_t map_index(struct sim *sim, uint8_t map)
{
    uint32_t i = sim_map_index(map);

    if (i > 2)
        sim_fail(sim, "a record under map %u", map);
    return i;
}

/* ---- what comes back */

static void take_slots(struct sim *sim, uint32_t client, const struct kvt_msg_alloc_reply *reply)
{
    for (uint32_t i = 0; i < reply->msg.count; i++) {
        uint32_t index = sim->alloc_first + i;
        struct sim_fill *fill = &sim->fills[sim->fill_count];

        if (reply->entries[i].status)
            continue;
        SIM_CHECK(sim, sim->fill_count < SIM_FILLS);
        *fill = (struct sim_fill){.client = client,
                                  .ns = sim->alloc_ns,
                                  .index = index,
                                  .map = sim->alloc_map,
                                  .purges = sim->blocks[sim->alloc_ns][index].purges,
                                  .since_ns = sim->now_ns,
                                  .entry = reply->entries[i]};
        sim_fill_record(sim, fill, &fill->checksum);
        sim->fill_count++;
    }
}

void sim_give_back(struct sim *sim, uint32_t client, const struct kvt_slot_ref *ref)
{
    begin(sim, KVT_OP_RELEASE, sizeof out.slots + sizeof out.slots.slots[0], 0, 1);
    out.msg.cookie = 0;
    out.slots.slots[0] = *ref;
    send(sim, client);
}

/* It was there when it was asked for, for all that anybody can know. */
static void check_alive(struct sim *sim, const struct sim_load *load, uint32_t i)
{
    uint32_t index = load->index[i];

    if (load->dead >> i & 1 && sim->blocks[load->ns][index].last_commit < load->op)
        sim_fail(sim, "namespace %u, block %u had expired and was granted", load->ns, index);
}

/* Judged at once; released later, by the client, when the store is not on the stack. */
static void take_grant(struct sim *sim, uint32_t client, const struct kvt_msg_grant *grant)
{
    struct sim_load *load = sim->loads;
    struct sim_held *held = &sim->held[sim->held_count];
    uint32_t map = 0, index;

    while (load < sim->loads + sim->load_count &&
           (load->cookie != grant->msg.cookie || load->client != client))
        load++;
    if (load == sim->loads + sim->load_count)
        sim_fail(sim, "a grant that nobody waits for: client %u", client);
    SIM_CHECK(sim, grant->index == load->have); /* in chain order, one each */
    if (sim->net && !sim->hurry && sim->now_ns - load->end_ns > LATE_NS)
        sim_fail(sim, "a load has taken longer than it may, by %lld ns",
                 (long long)(sim->now_ns - load->end_ns));
    index = load->index[load->have++];
    sim->status = grant->msg.status;
    if (grant->msg.status) {
        load->ended = true;
        sim->counts.missed++;
    } else {
        SIM_CHECK(sim, !load->ended && (!grant->direct || load->direct));
        sim->grants++;
        check_alive(sim, load, grant->index);
        map = map_index(sim, grant->map);
    }
    if (!grant->msg.status && grant->direct) {
        sim_direct_granted(sim, client, load, grant, map);
    } else if (!grant->msg.status) {
        SIM_CHECK(sim, grant->arena_offset + grant->record_bytes <=
                           sim->shape.cache_bytes + sim->shape.staging_bytes);
        SIM_CHECK(sim, sim->held_count < SIM_HELD);
        *held = (struct sim_held){.client = client,
                                  .ns = load->ns,
                                  .index = index,
                                  .map = map,
                                  .slot = grant->slot,
                                  .generation = grant->generation,
                                  .offset = grant->arena_offset,
                                  .bytes = grant->record_bytes};
        sim_used(sim, load->ns, index);
        sim->status = sim_judge(sim, load->ns, index, map, sim->arena + grant->arena_offset,
                                grant->record_bytes, grant->checksum);
        if (sim->status) {
            held->bytes = 0; /* damaged: to be given back as bad */
            sim->counts.damaged++;
            if (!sim->lied)
                sim_fail(sim, "a damaged record on an honest drive");
        } else {
            sim_seen(sim, load->ns, index, map, load->min);
        }
        sim->held_count++;
    }
    if (load->have == load->n)
        *load = sim->loads[--sim->load_count];
}

static void take_answer(struct sim *sim, const struct kvt_msg *msg)
{
    for (uint32_t i = 0; i < SIM_WAITS; i++) {
        struct sim_wait *wait = &sim->waits[i];

        if (!wait->op || wait->cookie != msg->cookie)
            continue;
        if (wait->op == KVT_OP_FLUSH && !sim->closing)
            sim_flush_done(sim, wait, msg->status);
        if (wait->op == KVT_OP_PURGE)
            sim_purge_done(sim, wait, msg->status);
        wait->op = 0;
        return;
    }
}

/* dead: bit i had expired when it was asked for, in operation op. What the shared tier is said to
 * have is a hint. */
static void check_found(struct sim *sim, const struct sim_asked *asked)
{
    for (uint32_t i = 0; i < (uint32_t)sim->status; i++) {
        const struct sim_block *block = &sim->blocks[asked->ns][asked->first + i];

        if (sim->net && sim->looked[i].tier == KVT_TIER_REMOTE)
            continue;
        if (!block->may)
            sim_fail(sim, "namespace %u, block %u is found in tier %u, and may not be there",
                     asked->ns, asked->first + i, sim->looked[i].tier);
        if (asked->dead >> i & 1 && block->last_commit < asked->op &&
            sim->anew_ns < asked->since_ns)
            sim_fail(sim, "namespace %u, block %u had expired and is found in tier %u", asked->ns,
                     asked->first + i, sim->looked[i].tier);
    }
}

/* Whether it is the answer to a LOOKUP that had to wait for the shared tier. */
static bool take_found(struct sim *sim, uint64_t cookie)
{
    for (uint32_t i = 0; i < SIM_ASKED; i++) {
        struct sim_asked *asked = &sim->asked[i];

        if (!asked->cookie || asked->cookie != cookie)
            continue;
        if (!sim->closing) {
            check_found(sim, asked);
            sim->wanted = *asked;
            sim->wanted.n = sim->net ? (uint32_t)KVT_MAX(sim->status, 0) : 0;
        }
        if (!sim->hurry && sim->now_ns - asked->end_ns > LATE_NS)
            sim_fail(sim, "a look-up has taken longer than it may, by %lld ns",
                     (long long)(sim->now_ns - asked->end_ns));
        asked->cookie = 0;
        return true;
    }
    return false;
}

void sim_reply(void *ctx, uint32_t client, const struct kvt_msg *msg)
{
    struct sim *sim = ctx;

    sim_log(sim, 200 + msg->op, msg->cookie << 16 ^ (uint64_t)(int64_t)msg->status);
    sim_tell(sim, "answer to %u of cookie %llu: %d", msg->reply_to, (unsigned long long)msg->cookie,
             msg->status);
    sim->answers++;
    if (sim->cut) {
        SIM_CHECK(sim, msg->status == KVT_E_INVAL);
        return;
    }
    if (msg->op == KVT_OP_GRANT) {
        take_grant(sim, client, (const struct kvt_msg_grant *)msg);
        return;
    }
    sim->status = msg->status;
    if (msg->reply_to == KVT_OP_NS_OPEN) {
        sim->looked_count = msg->ns;
    } else if (msg->reply_to == KVT_OP_ALLOC && msg->status >= 0) {
        take_slots(sim, client, (const struct kvt_msg_alloc_reply *)msg);
    } else if (msg->reply_to == KVT_OP_COMMIT) {
        sim->status = ((const struct kvt_msg_slots *)msg)->slots[0].status;
    } else if (msg->reply_to == KVT_OP_LOOKUP) {
        sim->looked_count = KVT_MIN(msg->count, (uint32_t)SIM_PIECE);
        memcpy(sim->looked, ((const struct kvt_msg_lookup_reply *)msg)->entries,
               sim->looked_count * sizeof sim->looked[0]);
        (void)take_found(sim, msg->cookie);
    } else {
        take_answer(sim, msg);
    }
}

/* ---- operations */

/* LOOKUP of a piece: checked when it is answered, at once or later. */
static void look_up(struct sim *sim, uint32_t ns, uint32_t first, uint32_t n)
{
    struct sim_asked asked = {.ns = ns, .first = first, .n = n, .op = sim->op};
    struct sim_asked *later = sim->asked;

    begin(sim, KVT_OP_LOOKUP, sizeof out.keys + n * sizeof out.keys.keys[0], sim->ns[ns], n);
    asked.cookie = out.msg.cookie;
    asked.since_ns = sim->now_ns;
    asked.end_ns = sim_net_answer_by(sim);
    for (uint32_t i = 0; i < n; i++) {
        out.keys.keys[i] = sim_key(ns, first + i);
        asked.dead |= (uint32_t)sim_expired(sim, ns, first + i) << i;
    }
    while (later->cookie)
        SIM_CHECK(sim, ++later < sim->asked + SIM_ASKED);
    *later = asked;
    send(sim, some_client(sim));
    SIM_CHECK(sim, sim->net || (sim->answers == 1 && sim->looked_count == n));
    for (uint32_t i = 0; i < n; i++)
        sim_used(sim, ns, first + i);
}

static void op_alloc(struct sim *sim)
{
    uint32_t first, n = some_piece(sim, &first), parent = sim_parent(first), before;
    uint64_t older_back;

    if (sim->fill_count + n > SIM_FILLS)
        return;
    sim->alloc_ns = sim_roll(sim, SIM_NS);
    sim->alloc_map = sim_roll(sim, 3);
    sim->alloc_first = first;
    if (sim_net_others(sim, first) && sim_more(sim, 4)) { /* perhaps they have */
        look_up(sim, sim->alloc_ns, first, n);
        return;
    }
    begin(sim, KVT_OP_ALLOC, sizeof out.alloc + n * sizeof out.alloc.keys[0],
          sim->ns[sim->alloc_ns], n);
    out.alloc.map = sim_maps[sim->alloc_map];
    out.alloc.replace = (uint8_t)sim_roll(sim, 3);
    out.alloc.write = (uint8_t)sim_roll(sim, 5);
    out.alloc.block_tokens = 16;
    if (parent != UINT32_MAX) {
        struct kvt_msg_key key = sim_key(sim->alloc_ns, parent);

        out.alloc.parent_len = key.hash_len;
        memcpy(out.alloc.parent, key.hash, sizeof out.alloc.parent);
        sim_used(sim, sim->alloc_ns, parent);
    }
    for (uint32_t i = 0; i < n; i++) {
        out.alloc.keys[i] = sim_key(sim->alloc_ns, first + i);
        sim_used(sim, sim->alloc_ns, first + i);
    }
    before = sim->fill_count;
    older_back = sim->store->counts.older_back;
    send(sim, some_client(sim));
    SIM_CHECK(sim, sim->answers == 1);
    if (sim->fill_count > before)
        sim_check_quota(sim, sim->alloc_ns, older_back);
}

static void commit(struct sim *sim, uint32_t i)
{
    struct sim_fill fill = sim->fills[i];
    struct sim_block *block = &sim->blocks[fill.ns][fill.index];

    memmove(&sim->fills[i], &sim->fills[i + 1], (--sim->fill_count - i) * sizeof sim->fills[0]);
    begin(sim, KVT_OP_COMMIT, sizeof out.slots + sizeof out.slots.slots[0], 0, 1);
    out.slots.slots[0] = (struct kvt_slot_ref){
        .slot = fill.entry.slot, .generation = fill.entry.generation, .checksum = fill.checksum};
    send(sim, fill.client);
    SIM_CHECK(sim, sim->answers == 1);
    if (fill.purges != block->purges)
        SIM_CHECK(sim, sim->status == KVT_E_CANCELED);
    else if (sim->status == 0)
        sim_committed(sim, &fill);
    else
        SIM_CHECK(sim, sim->status == KVT_E_EXISTS || sim->status == KVT_E_STALE);
}

/* What a well-behaved client does: a whole piece, filled and committed in chain order. */
static void op_put(struct sim *sim)
{
    uint32_t before = sim->fill_count;

    op_alloc(sim);
    while (sim->fill_count > before)
        commit(sim, before);
}

static void op_abort(struct sim *sim)
{
    uint32_t i = sim->fill_count ? sim_roll(sim, sim->fill_count) : 0;
    struct sim_fill fill = sim->fills[i];

    if (!sim->fill_count)
        return;
    sim->fills[i] = sim->fills[--sim->fill_count];
    begin(sim, KVT_OP_ABORT, sizeof out.slots + sizeof out.slots.slots[0], 0, 1);
    out.slots.slots[0] =
        (struct kvt_slot_ref){.slot = fill.entry.slot, .generation = fill.entry.generation};
    send(sim, fill.client);
}

static void acquire(struct sim *sim, uint32_t ns, uint32_t first, uint32_t n, int64_t deadline_ns,
                    uint8_t min, bool direct)
{
    struct sim_load *load = &sim->loads[sim->load_count];
    uint32_t client = some_client(sim);

    if (sim->load_count == SIM_LOADS)
        return;
    begin(sim, KVT_OP_ACQUIRE, sizeof out.acquire + n * sizeof out.acquire.keys[0], sim->ns[ns], n);
    out.acquire.deadline_ns = deadline_ns;
    out.acquire.min_level = min;
    out.acquire.direct = direct;
    *load =
        (struct sim_load){.cookie = out.msg.cookie, .client = client, .ns = ns, .n = n, .min = min};
    load->op = sim->op;
    load->direct = direct;
    load->end_ns = deadline_ns;
    for (uint32_t i = 0; i < n; i++) {
        out.acquire.keys[i] = sim_key(ns, first + i);
        load->index[i] = first + i;
        load->dead |= (uint32_t)sim_expired(sim, ns, first + i) << i;
        sim_used(sim, ns, first + i);
    }
    sim->load_count++;
    send(sim, client);
}

static void op_acquire(struct sim *sim)
{
    uint32_t first, n = some_piece(sim, &first), ns;
    int64_t deadline = sim_roll(sim, 3) ? INT64_MAX : sim->now_ns + (int64_t)sim_roll(sim, 5000000);
    uint8_t min;

    min = sim_roll(sim, 4) ? 0 : KVT_LEVEL_KV8;
    ns = sim_roll(sim, SIM_NS);
    if (sim->net && sim->wanted.n) { /* what has been looked up */
        ns = sim->wanted.ns, first = sim->wanted.first, n = sim->wanted.n;
        sim->wanted.n = 0;
    } else if (sim->net && sim_more(sim, 3)) {
        look_up(sim, ns, first, n);
        return;
    }
    acquire(sim, ns, first, n, deadline, min, sim->reads && sim_more(sim, 2));
}

/* While it was held, nobody may have changed it. */
static void release(struct sim *sim, uint32_t i)
{
    struct sim_held held = sim->held[i];
    const uint8_t *record = sim->arena + held.offset;

    sim->held[i] = sim->held[--sim->held_count];
    if (held.bytes)
        SIM_CHECK(sim, sim_judge(sim, held.ns, held.index, held.map, record, held.bytes,
                                 ((const struct kvt_record_header *)record)->checksum) == 0);
    sim_give_back(sim, held.client,
                  &(struct kvt_slot_ref){.slot = held.slot,
                                         .generation = held.generation,
                                         .status = held.bytes ? 0 : KVT_E_CORRUPT});
}

static void op_release(struct sim *sim)
{
    uint32_t n = sim->held_count > 24 ? sim->held_count : sim->held_count ? 1 : 0;

    while (n--)
        release(sim, sim_roll(sim, sim->held_count));
}

static void op_cancel(struct sim *sim)
{
    const struct sim_load *load = &sim->loads[sim->load_count ? sim_roll(sim, sim->load_count) : 0];

    if (!sim->load_count)
        return;
    begin(sim, KVT_OP_CANCEL, sizeof out.cancel, 0, 0);
    out.msg.cookie = 0;
    out.cancel.target = load->cookie;
    send(sim, load->client);
}

void sim_forget_client(struct sim *sim, uint32_t client)
{
    for (uint32_t i = sim->fill_count; i-- > 0;)
        if (sim->fills[i].client == client)
            sim->fills[i] = sim->fills[--sim->fill_count];
    for (uint32_t i = sim->held_count; i-- > 0;)
        if (sim->held[i].client == client)
            sim->held[i] = sim->held[--sim->held_count];
    for (uint32_t i = sim->load_count; i-- > 0;)
        if (sim->loads[i].client == client)
            sim->loads[i] = sim->loads[--sim->load_count];
    sim_direct_died(sim, client);
    for (uint32_t i = 0; i < SIM_WAITS; i++) {
        struct sim_wait *wait = &sim->waits[i];

        if (wait->client == client && wait->op == KVT_OP_PURGE) /* it may fail: nobody will know */
            sim_purge_done(sim, wait, KVT_E_CLOSED);
        if (wait->client == client)
            wait->op = 0;
    }
}

/* It is gone in the middle of whatever it did; somebody new comes in its place. */
static void client_dies(struct sim *sim, uint32_t i)
{
    uint32_t client = sim->clients[i];

    sim_log(sim, 103, client);
    sim_forget_client(sim, client);
    kvt_store_client_gone(sim->store, client);
    sim->clients[i] = ++sim->next_client;
    sim->counts.deaths++;
}

static void op_keys(struct sim *sim, uint16_t op)
{
    uint32_t first, n = some_piece(sim, &first), ns = sim_roll(sim, SIM_NS);

    if (op == KVT_OP_LOOKUP) {
        look_up(sim, ns, first, n);
        return;
    }
    begin(sim, op, sizeof out.keys + n * sizeof out.keys.keys[0], sim->ns[ns], n);
    for (uint32_t i = 0; i < n; i++)
        out.keys.keys[i] = sim_key(ns, first + i);
    send(sim, some_client(sim));
    for (uint32_t i = 0; i < n; i++) {
        sim_used(sim, ns, first + i);
        if (op != KVT_OP_TOUCH)
            sim_kept(sim, ns, first + i);
    }
}

static struct sim_wait *new_wait(struct sim *sim, uint16_t op, uint32_t client)
{
    for (uint32_t i = 0; i < SIM_WAITS; i++)
        if (!sim->waits[i].op) {
            sim->waits[i] = (struct sim_wait){
                .op = op, .client = client, .cookie = sim->cookie + 1, .sent = sim->op};
            return &sim->waits[i];
        }
    return NULL;
}

static void op_purge(struct sim *sim)
{
    uint32_t first, n = some_piece(sim, &first), client = some_client(sim);
    struct sim_wait *wait = new_wait(sim, KVT_OP_PURGE, client);

    if (!wait)
        return;
    wait->ns = sim_roll(sim, SIM_NS);
    wait->n = sim_roll(sim, 8) ? n : 0;
    begin(sim, KVT_OP_PURGE, sizeof out.keys + wait->n * sizeof out.keys.keys[0], sim->ns[wait->ns],
          wait->n);
    for (uint32_t i = 0; i < wait->n; i++) {
        out.keys.keys[i] = sim_key(wait->ns, first + i);
        wait->index[i] = first + i;
    }
    sim_purge_sent(sim, wait);
    sim_tell(sim, "purge of namespace %u, %u blocks from %u", wait->ns, wait->n, first);
    send(sim, client);
    if (!wait->op && sim->status == -EAGAIN) /* at once: too many are under way, this never was */
        sim_purge_refused(sim, wait);
}

static void op_flush(struct sim *sim)
{
    uint32_t client = some_client(sim);

    if (!new_wait(sim, KVT_OP_FLUSH, client))
        return;
    begin(sim, KVT_OP_FLUSH, sizeof out.msg, 0, 0);
    send(sim, client);
}

int sim_send_cut(struct sim *sim)
{
    static const uint16_t ops[] = {KVT_OP_LOOKUP, KVT_OP_PREFETCH, KVT_OP_PIN,     KVT_OP_PURGE,
                                   KVT_OP_ALLOC,  KVT_OP_ACQUIRE,  KVT_OP_RELEASE, KVT_OP_COMMIT};
    uint16_t op = ops[sim_more(sim, KVT_ARRAY_LEN(ops))];
    uint32_t n = 1 + sim_more(sim, SIM_PIECE), ns = sim_more(sim, SIM_NS);
    size_t fixed = op == KVT_OP_ALLOC     ? sizeof out.alloc
                   : op == KVT_OP_ACQUIRE ? sizeof out.acquire
                                          : sizeof out.keys;
    int rc;

    if (op == KVT_OP_COMMIT || op == KVT_OP_RELEASE)
        begin(sim, op, sizeof out.slots + n * sizeof out.slots.slots[0], 0, n);
    else
        begin(sim, op, fixed + n * sizeof out.keys.keys[0], sim->ns[ns], n);
    if (op != KVT_OP_COMMIT && op != KVT_OP_RELEASE)
        for (uint32_t i = 0; i < n; i++)
            ((struct kvt_msg_key *)(void *)(out.bytes + fixed))[i] =
                sim_key(ns, sim_more(sim, SIM_BLOCKS));
    switch (sim_more(sim, 4)) {
    case 0:
        out.msg.bytes -= 8 * (1 + sim_more(sim, 3));
        break;
    case 1:
        out.msg.bytes = 8 * sim_more(sim, 3);
        break;
    case 2:
        out.msg.count += 1 + sim_more(sim, 2000);
        break;
    default:
        out.msg.bytes -= 1 + sim_more(sim, 7);
        break;
    }
    sim->cut = true;
    rc = kvt_store_handle(sim->store, sim->clients[sim_more(sim, SIM_CLIENTS)], &out.msg);
    sim->cut = false;
    SIM_CHECK(sim, rc == 1 || rc == KVT_E_INVAL);
    return rc;
}

void sim_operation(struct sim *sim)
{
    uint32_t dice = sim_roll(sim, 100);

    if (kvt_store_root_joining(sim->store))
        sim->anew_ns = sim->now_ns;
    sim_direct_step(sim);
    sim_rude_step(sim);
    if (sim->wanted.n && sim_more(sim, 4))
        op_acquire(sim);
    else if (dice < 8)
        op_alloc(sim);
    else if (dice < 18 && sim->fill_count)
        commit(sim, sim_roll(sim, sim->fill_count));
    else if (dice < 36)
        op_put(sim);
    else if (dice < 39)
        op_abort(sim);
    else if (dice < 56)
        op_acquire(sim);
    else if (dice < 70)
        op_release(sim);
    else if (dice < 72)
        op_cancel(sim);
    else if (dice < 74)
        client_dies(sim, sim_roll(sim, SIM_CLIENTS));
    else if (dice < 80)
        op_keys(sim, KVT_OP_LOOKUP);
    else if (dice < 82)
        op_keys(sim, KVT_OP_TOUCH);
    else if (dice < 84)
        op_keys(sim, KVT_OP_PREFETCH);
    else if (dice < 86)
        op_keys(sim, KVT_OP_PIN);
    else if (dice < 88)
        op_keys(sim, KVT_OP_UNPIN);
    else if (dice < 90)
        op_purge(sim);
    else if (dice < 93)
        op_flush(sim);
    else if (dice < 95)
        sim_fault(sim);
    else if (dice == 95 && sim->out)
        (void)sim_late_comes(sim);
    else
        sim_advance(sim, (int64_t)(dice == 99 ? 3000000000 : 50000000));
}

/* ---- lives */

void sim_clients_start(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_CLIENTS; i++)
        sim->clients[i] = ++sim->next_client;
    for (uint32_t ns = 0; ns < SIM_NS; ns++) {
        begin(sim, KVT_OP_NS_OPEN, sizeof out.open, 0, 0);
        memset(out.open.id, (int)ns + 1, sizeof out.open.id);
        out.open.block_tokens = 16;
        out.open.quota_bytes = sim->shape.quota_bytes[ns];
        out.open.ttl_ns = sim->shape.ttl_ns[ns];
        for (uint32_t map = 0; map < 3; map++)
            out.open.record_bytes[sim_maps[map]] = sim->shape.pages[ns][map] * KVT_PAGE_BYTES;
        send(sim, sim->clients[0]);
        SIM_CHECK(sim, sim->answers == 1 && sim->status >= 0);
        sim->ns[ns] = sim->looked_count;
    }
}

void sim_clients_die(struct sim *sim)
{
    sim->fill_count = sim->held_count = sim->load_count = 0;
    sim->parted_count = sim->gone_count = 0;
    memset(sim->waits, 0, sizeof sim->waits);
    memset(sim->asked, 0, sizeof sim->asked);
    memset(&sim->wanted, 0, sizeof sim->wanted);
}

void sim_everybody_leaves(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_CLIENTS; i++)
        client_dies(sim, i);
    sim_rude_all(sim);
}

uint8_t sim_look(struct sim *sim, uint32_t ns, uint32_t index, uint8_t *map)
{
    begin(sim, KVT_OP_LOOKUP, sizeof out.keys + sizeof out.keys.keys[0], sim->ns[ns], 1);
    out.keys.keys[0] = sim_key(ns, index);
    send(sim, sim->clients[0]);
    SIM_CHECK(sim, sim->answers == 1 && sim->looked_count == 1);
    *map = sim->looked[0].map;
    if (sim->looked[0].tier != KVT_TIER_MISS &&
        (sim_expired(sim, ns, index) || sim->blocks[ns][index].gone))
        sim_fail(sim, "namespace %u, block %u had expired and is there", ns, index);
    sim_used(sim, ns, index);
    return sim->looked[0].tier;
}

int32_t sim_get(struct sim *sim, uint32_t ns, uint32_t index)
{
    int32_t status;

    sim->status = 1;
    acquire(sim, ns, index, 1, INT64_MAX, 0, false);
    for (uint32_t turns = 0; sim->load_count; turns++) {
        SIM_CHECK(sim, turns < 1000);
        sim_advance(sim, 10000);
    }
    status = sim->status;
    while (sim->held_count)
        release(sim, 0);
    return status;
}
