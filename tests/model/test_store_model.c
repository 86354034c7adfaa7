/* Goal: whatever happens in whatever order, the store gives exact bytes or a miss.
 * Method: random operations beside a plain table of what may be handed out: stores (fill, commit,
 * abort, lost races), loads (held, cancelled, past their deadline), lookups, touches, pins,
 * prefetches, purges, flushes, write policies, clients that vanish, completions held back and
 * released in any order, I/O errors, damaged records, orderly restarts and crashes, over
 * configurations from "DRAM only" to "no DRAM at all", with a good hash and with one that collides
 * always, and with a log that turns over and moves what is in use. After every
 * operation kvt_store_check() verifies the store's own invariants.
 *
 * The table says, per block, which level maps may be seen (committed and not purged since) and
 * which one must be (the last commit, unless a restart may have brought back an older copy). Bytes
 * of a block follow from (namespace, key, map), so other bytes cannot go unnoticed.
 */
#include "support/store_rig.h"

#include <string.h>

#include "base/rng.h"
#include "kvtier/error.h"
#include "store/index.h"
#include "support/fault_io.h"

enum { CHAINS = 6, DEPTH = 12, NAMESPACES = 2, BLOCKS = CHAINS * DEPTH };
enum { FILLS_MAX = 24, HOLDS_MAX = 64, LOADS_MAX = 12, CLIENTS = 3 };

static const uint32_t pages_of[NAMESPACES + 1][7] = {
    {0}, {0, 0, 2, 0, 0, 4, 8}, {0, 1, 3, 0, 0, 5, 9}};
static const uint8_t maps[3] = {2, 5, 6};

struct block {
    uint8_t may;     /* bit m: map m may be seen */
    uint8_t must;    /* the map that is seen if any; 0: any of `may` */
    bool durable;    /* flushed since its last commit */
    bool doubtful;   /* perhaps what a flush has told as lost; it says so once */
    uint32_t purges; /* how often it was purged */
};

struct fill {
    uint32_t client, ns, purges;
    uint64_t number;
    uint8_t map;
    uint64_t checksum;
    struct kvt_alloc_entry entry;
};

struct held {
    uint32_t client;
    uint32_t slot, generation;
};

struct load {
    uint64_t cookie;
    uint32_t client, ns, n, have;
    uint8_t min;
    bool ended; /* a key got no record: the rest must not either */
    uint64_t numbers[8];
};

struct model {
    struct rig rig;
    struct kvt_rng rng;
    uint32_t ns[NAMESPACES + 1]; /* handles */
    struct block blocks[NAMESPACES + 1][BLOCKS];
    struct fill fills[FILLS_MAX];
    uint32_t fill_count;
    struct held holds[HOLDS_MAX];
    uint32_t hold_count;
    struct load loads[LOADS_MAX];
    uint32_t load_count;
    struct kvt_msg_grant grants[1024]; /* not handled yet */
    uint32_t grant_clients[1024];
    uint8_t grant_must[1024]; /* what had to be seen when the grant came */
    uint32_t grant_count;
    bool lossy;          /* faults or evictions: durable blocks may be gone */
    uint64_t older_back; /* as of the last look */
    uint64_t good, missed, damaged, commits, moved, recycled, back;
};

static uint32_t roll(struct model *m, uint32_t bound)
{
    return (uint32_t)kvt_rng_below(&m->rng, bound);
}

/* Block i: chain and depth; chains 3.. branch off chain 0 after depth 4. */
static uint64_t number_of(uint32_t i)
{
    return i + 1;
}

static uint32_t parent_index(uint32_t i)
{
    uint32_t depth = i % DEPTH;

    if (depth == 0)
        return i / DEPTH >= 3 ? 4 : UINT32_MAX;
    return i - 1;
}

static uint64_t parent_of(uint32_t i)
{
    return parent_index(i) == UINT32_MAX ? 0 : number_of(parent_index(i));
}

/* A piece of a chain: first index and up to `max` numbers. */
static uint32_t pick_piece(struct model *m, uint64_t *numbers, uint32_t max, uint32_t *first)
{
    uint32_t chain = roll(m, CHAINS), depth = roll(m, 2) ? 0 : roll(m, DEPTH);
    uint32_t n = 1 + roll(m, max);

    *first = chain * DEPTH + depth;
    if (n > DEPTH - depth)
        n = DEPTH - depth;
    for (uint32_t i = 0; i < n; i++)
        numbers[i] = number_of(*first + i);
    return n;
}

static struct block *block_of(struct model *m, uint32_t ns, uint64_t number)
{
    return &m->blocks[ns][number - 1];
}

static bool on_grant(void *ctx, uint32_t client, const struct kvt_msg_grant *grant)
{
    struct model *m = ctx;

    for (uint32_t i = 0; i < m->load_count; i++) {
        if (m->loads[i].cookie != grant->msg.cookie || m->loads[i].client != client)
            continue;
        assert_true(m->grant_count < 1024);
        m->grant_clients[m->grant_count] = client;
        m->grant_must[m->grant_count] =
            block_of(m, m->loads[i].ns, m->loads[i].numbers[grant->index])->must;
        m->grants[m->grant_count++] = *grant;
        return true;
    }
    return false;
}

/* A record was handed out for a block: it must be one that may be seen. must_before: the same of a
 * moment ago, when the grant came; an operation may have put a better record since. */
static void expect_seen(struct model *m, uint32_t ns, uint64_t number, uint8_t map, uint8_t min,
                        uint8_t must_before)
{
    const struct block *b = block_of(m, ns, number);

    if (!(b->may >> map & 1) || map < min || (b->must && b->must != map && must_before != map))
        fail_msg("block %llu of namespace %u came with map %u; may %02x, must %u, minimum %u",
                 (unsigned long long)number, ns, map, b->may, b->must, min);
    m->good++;
}

static void handle_grant(struct model *m, uint32_t client, const struct kvt_msg_grant *grant,
                         uint8_t must_before)
{
    struct load *load = m->loads;
    int status = grant->msg.status;

    while (load->cookie != grant->msg.cookie)
        load++;
    assert_int_equal(grant->index, load->have); /* one each, in chain order */
    load->have++;
    if (status) {
        load->ended = true;
        m->missed++;
    } else {
        assert_false(load->ended);
        status = rig_verify(&m->rig, m->ns[load->ns], load->numbers[grant->index], grant);
        if (status)
            m->damaged++;
        else
            expect_seen(m, load->ns, load->numbers[grant->index], grant->map, load->min,
                        must_before);
        if (!status && m->hold_count < HOLDS_MAX && roll(m, 2))
            m->holds[m->hold_count++] = (struct held){client, grant->slot, grant->generation};
        else
            rig_release(&m->rig, client, grant, status);
    }
    if (load->have == load->n)
        *load = m->loads[--m->load_count];
}

/* A record went before it was written, and the one that it had replaced is back: which block it
 * was, nobody says. */
static void note_older(struct model *m)
{
    uint64_t now = rig_stats(&m->rig).older_back;

    if (now == m->older_back)
        return;
    m->older_back = now;
    for (uint32_t ns = 1; ns <= NAMESPACES; ns++)
        for (uint32_t i = 0; i < BLOCKS; i++)
            if (!m->blocks[ns][i].durable)
                m->blocks[ns][i].must = 0;
}

static void handle_grants(struct model *m)
{
    note_older(m);
    do { /* releasing may let the store grant more */
        uint32_t count = m->grant_count;
        struct kvt_msg_grant grants[1024];

        memcpy(grants, m->grants, count * sizeof(grants[0]));
        m->grant_count = 0;
        for (uint32_t i = 0; i < count; i++)
            handle_grant(m, m->grant_clients[i], &grants[i], m->grant_must[i]);
        rig_settle(&m->rig);
    } while (m->grant_count);
}

static void drop_fill(struct model *m, uint32_t i)
{
    m->fills[i] = m->fills[--m->fill_count];
}

static void op_alloc(struct model *m)
{
    struct kvt_alloc_entry entries[6];
    uint64_t numbers[6];
    uint32_t first, client = 1 + roll(m, CLIENTS), ns = 1 + roll(m, NAMESPACES);
    uint32_t n = pick_piece(m, numbers, 6, &first);
    uint8_t map = maps[roll(m, 3)];

    if (m->fill_count + n > FILLS_MAX)
        return;
    rig_alloc(&m->rig, client, m->ns[ns], numbers, n, parent_of(first), map, (uint8_t)roll(m, 3),
              entries);
    for (uint32_t i = 0; i < n; i++) {
        struct fill *fill = &m->fills[m->fill_count];

        if (entries[i].status) {
            assert_true(entries[i].status == KVT_E_EXISTS || entries[i].status == KVT_E_DROPPED ||
                        entries[i].status == KVT_E_ORPHAN);
            if (entries[i].status == KVT_E_EXISTS)
                assert_true(block_of(m, ns, numbers[i])->may);
            continue;
        }
        *fill = (struct fill){
            client, ns, block_of(m, ns, numbers[i])->purges, numbers[i], map, 0, entries[i]};
        fill->checksum = rig_fill(&m->rig, m->ns[ns], numbers[i],
                                  parent_of((uint32_t)numbers[i] - 1), map, &entries[i]);
        m->fill_count++;
    }
}

static void op_commit(struct model *m)
{
    uint32_t i;
    struct fill fill;
    struct block *b;
    int32_t status;

    if (!m->fill_count)
        return;
    i = roll(m, m->fill_count);
    fill = m->fills[i];
    drop_fill(m, i);
    b = block_of(m, fill.ns, fill.number);
    if (!roll(m, 16)) { /* a checksum that is not the header's: refused, nothing is published */
        status = rig_commit(&m->rig, fill.client, &fill.entry, fill.checksum + 1);
        assert_true(status == KVT_E_CORRUPT || fill.purges != b->purges);
        return;
    }
    status = rig_commit(&m->rig, fill.client, &fill.entry, fill.checksum);
    if (fill.purges != b->purges) {
        assert_int_equal(status, KVT_E_CANCELED);
        return;
    }
    if (status == KVT_E_EXISTS || status == KVT_E_STALE) { /* lost against an earlier one */
        assert_true(b->may != 0);
        return;
    }
    assert_int_equal(status, 0);
    b->may |= (uint8_t)(1u << fill.map);
    b->must = fill.map;
    b->durable = b->doubtful = false;
    m->commits++;
}

/* What a well-behaved client does: a whole piece, filled and committed in chain order. */
static void op_put(struct model *m)
{
    uint64_t numbers[DEPTH];
    int32_t statuses[DEPTH];
    uint32_t first, ns = 1 + roll(m, NAMESPACES);
    uint32_t n = pick_piece(m, numbers, DEPTH, &first);
    uint8_t map = maps[roll(m, 3)];

    rig_put(&m->rig, m->ns[ns], numbers, n, parent_of(first), map, (uint8_t)roll(m, 3), statuses);
    for (uint32_t i = 0; i < n; i++) {
        struct block *b = block_of(m, ns, numbers[i]);

        if (statuses[i] == KVT_E_EXISTS)
            assert_true(b->may != 0);
        if (statuses[i])
            continue;
        b->may |= (uint8_t)(1u << map);
        b->must = map;
        b->durable = b->doubtful = false;
        m->commits++;
    }
}

static void op_abort(struct model *m)
{
    uint32_t i;

    if (!m->fill_count)
        return;
    i = roll(m, m->fill_count);
    rig_abort(&m->rig, m->fills[i].client, &m->fills[i].entry);
    if (roll(m, 2)) /* a second time, and a commit: stale, no effect */
        assert_int_equal(
            rig_commit(&m->rig, m->fills[i].client, &m->fills[i].entry, m->fills[i].checksum),
            KVT_E_STALE);
    drop_fill(m, i);
}

static void op_acquire(struct model *m)
{
    struct load *load = &m->loads[m->load_count];
    int64_t deadline = roll(m, 3) ? INT64_MAX : m->rig.now_ns + (int64_t)roll(m, 20000000);
    uint32_t first;

    if (m->load_count == LOADS_MAX)
        return;
    load->client = 1 + roll(m, CLIENTS);
    load->ns = 1 + roll(m, NAMESPACES);
    load->n = pick_piece(m, load->numbers, 8, &first);
    load->have = 0;
    load->ended = false;
    load->min = roll(m, 4) ? 0 : 5;
    m->load_count++;
    /* The cookie is known before anything is granted: acquire only queues. */
    load->cookie = rig_acquire(&m->rig, load->client, m->ns[load->ns], load->numbers, load->n,
                               load->min, deadline);
    rig_settle(&m->rig);
}

static void op_release(struct model *m)
{
    uint32_t i;
    struct kvt_msg_grant grant = {0};

    if (!m->hold_count)
        return;
    i = roll(m, m->hold_count);
    grant.slot = m->holds[i].slot;
    grant.generation = m->holds[i].generation;
    /* Somebody who does not hold it releases nothing. */
    if (!roll(m, 4))
        rig_release(&m->rig, 99, &grant, 0);
    rig_release(&m->rig, m->holds[i].client, &grant, 0);
    m->holds[i] = m->holds[--m->hold_count];
    rig_settle(&m->rig);
}

static void op_cancel(struct model *m)
{
    if (!m->load_count)
        return;
    rig_cancel(&m->rig, m->loads[roll(m, m->load_count)].client,
               m->loads[roll(m, m->load_count)].cookie);
}

static void op_client_gone(struct model *m)
{
    uint32_t client = 1 + roll(m, CLIENTS);

    kvt_store_client_gone(m->rig.store, client);
    for (uint32_t i = m->fill_count; i-- > 0;)
        if (m->fills[i].client == client)
            drop_fill(m, i);
    for (uint32_t i = m->hold_count; i-- > 0;)
        if (m->holds[i].client == client)
            m->holds[i] = m->holds[--m->hold_count];
    for (uint32_t i = m->load_count; i-- > 0;)
        if (m->loads[i].client == client)
            m->loads[i] = m->loads[--m->load_count];
    rig_settle(&m->rig);
}

static void unhold_io(struct model *m)
{
    if (m->rig.held_io)
        rig_hold(&m->rig, false);
    handle_grants(m);
}

static void op_lookup(struct model *m)
{
    uint64_t numbers[8];
    uint8_t tiers[8];
    uint32_t first, ns = 1 + roll(m, NAMESPACES);
    uint32_t n = pick_piece(m, numbers, 8, &first);
    uint32_t run = rig_lookup(&m->rig, m->ns[ns], numbers, n, 0, tiers);

    for (uint32_t i = 0; i < run; i++)
        assert_true(block_of(m, ns, numbers[i])->may);
    if (run < n)
        assert_true(tiers[run] == KVT_TIER_MISS || tiers[run] == KVT_TIER_PENDING);
}

/* A synchronous load of what a lookup promises. */
static void op_get(struct model *m)
{
    uint64_t numbers[8];
    int32_t statuses[8];
    uint8_t seen[8];
    uint32_t first, ns = 1 + roll(m, NAMESPACES), run, got;
    uint32_t n = pick_piece(m, numbers, 8, &first);

    unhold_io(m);
    run = rig_lookup(&m->rig, m->ns[ns], numbers, n, 0, NULL);
    got = rig_get(&m->rig, m->ns[ns], numbers, n, 0, statuses, seen);
    note_older(m);
    for (uint32_t i = 0; i < got; i++)
        expect_seen(m, ns, numbers[i], seen[i], 0, 0);
    /* Nothing came between the two; with room and a good disk the promise holds. */
    if (!m->lossy && m->hold_count == 0 && m->load_count == 0 && m->fill_count == 0)
        assert_int_equal(got, run);
}

static void op_keys(struct model *m, int op)
{
    uint64_t numbers[8];
    uint32_t first;
    uint32_t n = pick_piece(m, numbers, 8, &first);

    assert_true(rig_keys(&m->rig, op, m->ns[1 + roll(m, NAMESPACES)], numbers, n) >= 0);
}

static void op_purge(struct model *m)
{
    uint64_t numbers[8];
    uint32_t first, ns = 1 + roll(m, NAMESPACES);
    uint32_t n = roll(m, 4) ? pick_piece(m, numbers, 8, &first) : 0;
    int32_t status;

    unhold_io(m);
    status = rig_keys(&m->rig, KVT_OP_PURGE, m->ns[ns], numbers, n);
    handle_grants(m);
    for (uint32_t i = 0; i < (n ? n : BLOCKS); i++) {
        struct block *b = n ? block_of(m, ns, numbers[i]) : &m->blocks[ns][i];

        b->purges++;
        if (status >= 0)
            *b = (struct block){.purges = b->purges};
        else
            b->must = 0; /* gone now, but an older copy may come back after a restart */
        b->durable = false;
    }
    if (status >= 0)
        assert_int_equal(rig_lookup(&m->rig, m->ns[ns], numbers, n ? 1 : 0, 0, NULL), 0);
}

static void op_flush(struct model *m)
{
    bool lost;

    unhold_io(m);
    lost = rig_flush(&m->rig) != 0;
    for (uint32_t ns = 1; ns <= NAMESPACES && m->rig.io; ns++)
        for (uint32_t i = 0; i < BLOCKS; i++) {
            struct block *b = &m->blocks[ns][i];

            b->doubtful = b->doubtful || (lost && !b->durable);
            if (!lost)
                b->durable = b->must != 0 && (b->durable || !b->doubtful);
        }
}

static void open_spaces(struct model *m)
{
    for (uint32_t ns = 1; ns <= NAMESPACES; ns++)
        m->ns[ns] = rig_ns(&m->rig, (uint8_t)ns, pages_of[ns]);
}

/* Durable with all its ancestors: it must have survived. */
static bool survives(struct model *m, uint32_t ns, uint32_t i)
{
    for (; i != UINT32_MAX; i = parent_index(i))
        if (!m->blocks[ns][i].durable)
            return false;
    return true;
}

static void note_losses(struct model *m)
{
    struct kvt_store_stats stats = rig_stats(&m->rig);

    if (stats.evict_disk_blocks || stats.evict_index_blocks || stats.evict_dram_lost ||
        stats.checksum_fail || stats.read_fail || stats.write_fail || stats.enospc)
        m->lossy = true;
}

/* Counters begin anew with each life of the store. */
static void note_moves(struct model *m)
{
    m->moved += rig_stats(&m->rig).reinserted;
    m->recycled += rig_stats(&m->rig).evict_disk_segments;
}

static void op_restart(struct model *m)
{
    bool crash = roll(m, 2);

    unhold_io(m);
    note_losses(m);
    note_moves(m);
    m->load_count = m->hold_count = m->fill_count = 0; /* all clients start again */
    m->back += m->older_back;
    m->older_back = 0;
    if (crash)
        rig_crash(&m->rig);
    else
        rig_reopen(&m->rig);
    /* Closing writes what was left, which may recycle segments. */
    if (!crash && m->rig.io && rig_filed_stat(&m->rig, "disk.evicted"))
        m->lossy = true;
    open_spaces(m);
    for (uint32_t ns = 1; ns <= NAMESPACES; ns++) {
        for (uint32_t i = 0; i < BLOCKS; i++) {
            struct block *b = &m->blocks[ns][i];
            uint64_t number = number_of(i);

            if (!m->rig.io)
                *b = (struct block){.purges = b->purges};
            if (!m->lossy && survives(m, ns, i) &&
                rig_lookup(&m->rig, m->ns[ns], &number, 1, 0, NULL) != 1)
                fail_msg("block %u of namespace %u was flushed and is gone", i, ns);
            if (!survives(m, ns, i)) /* unreachable blocks are dropped after a restart */
                b->durable = false;
            if (!b->durable || m->lossy) /* a bad read at open hides the newer copy of two */
                b->must = 0;
        }
    }
}

static void op_fault(struct model *m)
{
    static const unsigned ops[] = {FAULT_READ, FAULT_WRITE, FAULT_SYNC, FAULT_ALLOCATE};
    struct fault_rule rule = {.ops = ops[roll(m, 4)],
                              .name = "seg-",
                              .skip = roll(m, 10),
                              .times = 1 + roll(m, 3),
                              .action = FAULT_FAIL,
                              .error = roll(m, 2) ? 5 /* EIO */ : 28 /* ENOSPC */};

    if (!m->rig.io)
        return;
    m->lossy = true;
    fault_io_clear(m->rig.io);
    if (rule.ops == FAULT_READ && roll(m, 2)) {
        rule.action = FAULT_FLIP;
        rule.arg = FAULT_RANDOM;
    }
    if (roll(m, 3))
        assert_true(fault_io_rule(m->rig.io, &rule) >= 0);
}

static void op_io(struct model *m)
{
    if (!m->rig.held_io)
        rig_hold(&m->rig, true);
    else if (roll(m, 4))
        rig_release_io(&m->rig, 1 + roll(m, 3), roll(m, 2));
    else
        unhold_io(m);
}

static void op_any(struct model *m, bool faults)
{
    uint32_t dice = roll(m, 100);

    m->rig.write = (uint8_t)roll(m, 5); /* of the stores of this operation */

    if (dice < 14)
        op_alloc(m);
    else if (dice < 34)
        op_commit(m);
    else if (dice < 42)
        op_put(m);
    else if (dice < 45)
        op_abort(m);
    else if (dice < 57)
        op_acquire(m);
    else if (dice < 67)
        op_release(m);
    else if (dice < 69)
        op_cancel(m);
    else if (dice < 70)
        op_client_gone(m);
    else if (dice < 74)
        op_lookup(m);
    else if (dice < 79)
        op_get(m);
    else if (dice < 81)
        op_keys(m, KVT_OP_TOUCH);
    else if (dice < 83)
        op_keys(m, KVT_OP_PREFETCH);
    else if (dice < 85)
        op_keys(m, KVT_OP_PIN);
    else if (dice < 87)
        op_keys(m, KVT_OP_UNPIN);
    else if (dice < 88)
        op_purge(m);
    else if (dice < 90)
        op_flush(m);
    else if (dice < 91)
        op_restart(m);
    else if (dice < 96)
        op_io(m);
    else if (dice < 98)
        rig_advance(&m->rig, (int64_t)roll(m, 50000000));
    else if (faults)
        op_fault(m);
}

/* Everything given back: nothing is pinned, and an empty store is empty. */
static void finish(struct model *m)
{
    struct kvt_store_stats stats;

    unhold_io(m);
    if (m->rig.io)
        fault_io_clear(m->rig.io);
    rig_advance(&m->rig, 2000000000); /* loads that lack slots give up */
    handle_grants(m);
    for (uint32_t client = 1; client <= CLIENTS; client++)
        kvt_store_client_gone(m->rig.store, client);
    m->load_count = m->hold_count = m->fill_count = 0;
    rig_settle(&m->rig);
    stats = rig_stats(&m->rig);
    assert_int_equal(stats.dram_pins, 0);
    for (uint32_t ns = 1; ns <= NAMESPACES; ns++)
        assert_true(rig_keys(&m->rig, KVT_OP_PURGE, m->ns[ns], NULL, 0) >= 0);
    stats = rig_stats(&m->rig);
    assert_int_equal(stats.blocks, 0);
    assert_int_equal(stats.dram_bytes_used, 0);
    assert_int_equal(stats.disk_blocks, 0);
    assert_int_equal(stats.pinned_blocks, 0);
}

static void run(const char *name, const struct rig_options *options, bool faults, uint32_t steps,
                uint64_t seed)
{
    struct model *m = calloc(1, sizeof(*m));

    assert_non_null(m);
    m->rng.state = seed;
    m->lossy = options->blocks_max != 0;
    rig_open(&m->rig, options, NULL);
    m->rig.on_grant = on_grant;
    m->rig.on_grant_ctx = m;
    open_spaces(m);
    for (uint32_t step = 0; step < steps; step++) {
        op_any(m, faults);
        handle_grants(m);
    }
    note_moves(m);
    m->back += m->older_back;
    finish(m);
    assert_true(faults || m->damaged == 0);
    printf("           %-12s %llu commits, %llu good, %llu missed, %llu damaged, %llu back%s\n",
           name, (unsigned long long)m->commits, (unsigned long long)m->good,
           (unsigned long long)m->missed, (unsigned long long)m->damaged,
           (unsigned long long)m->back, m->lossy ? ", lossy" : "");
    if (m->recycled)
        printf("           %llu segments recycled, %llu blocks moved\n",
               (unsigned long long)m->recycled, (unsigned long long)m->moved);
    assert_true(!options->turns_over || m->moved > 0);
    assert_true(m->good > steps / 100);
    rig_close(&m->rig);
    free(m);
}

static uint32_t steps_wanted(void)
{
    const char *text = getenv("KVT_MODEL_STEPS");

    return text ? (uint32_t)strtoul(text, NULL, 10) : 6000;
}

static void test_roomy(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.cache_bytes = 8u << 20;
    run("roomy", &o, false, steps_wanted(), test_seed());
}

static void test_tight(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.cache_bytes = 400u << 10;
    o.staging_bytes = 128u << 10;
    o.disk_cap_bytes = 10u << 20;
    o.write_queue_bytes = 128u << 10;
    o.pin_bytes_max = 64u << 10;
    run("tight", &o, false, steps_wanted(), test_seed() + 1);
}

static void test_faults(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.cache_bytes = 300u << 10;
    run("faults", &o, true, steps_wanted(), test_seed() + 2);
}

static void test_no_dram(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.cache_bytes = 0;
    o.staging_bytes = 160u << 10;
    run("no dram", &o, true, steps_wanted(), test_seed() + 3);
}

static void test_no_disk(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.cache_bytes = 500u << 10;
    o.staging_bytes = 64u << 10;
    o.disk_cap_bytes = 0;
    run("no disk", &o, false, steps_wanted(), test_seed() + 4);
}

static void test_collisions(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.collide = KVT_COLLIDE_HOME;
    run("one home", &o, false, steps_wanted(), test_seed() + 5);
}

/* The log turns over: what is asked for is moved, beside everything else. */
static void test_turn_over(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.cache_bytes = 400u << 10;
    o.disk_cap_bytes = 8u << 20;
    o.turns_over = true;
    run("turn-over", &o, false, steps_wanted() * 2, test_seed() + 7);
    run("and faults", &o, true, steps_wanted() * 2, test_seed() + 8);
}

static void test_small_index(void **state)
{
    struct rig_options o = rig_defaults();

    (void)state;
    o.blocks_max = 40;
    run("small index", &o, true, steps_wanted(), test_seed() + 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_roomy),       cmocka_unit_test(test_tight),
        cmocka_unit_test(test_faults),      cmocka_unit_test(test_no_dram),
        cmocka_unit_test(test_no_disk),     cmocka_unit_test(test_collisions),
        cmocka_unit_test(test_small_index), cmocka_unit_test(test_turn_over),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
