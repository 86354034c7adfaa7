/* L2 log: purges and their journal.
 *
 * Goal: after a purge returned, no restart finds what it covered, whatever happens to the journal;
 * what it did not cover stays, as far as that is certain; the journal stays small; bytes go.
 * Method: roots in memory, many purges, reopened; journal and superblock damaged by hand; the set
 * of items compared with a plain list. */
#include <errno.h>
#include <string.h>

#include "support/store_help.h"

#include "base/checked.h"
#include "kvtier/error.h"
#include "store/l2_internal.h"
#include "support/fault_io.h"
#include "support/l2_help.h"
#include "support/power_io.h"

#define CAP (8u << 20)

static struct l2_env env;
static struct kvt_rng rng;

static struct kvt_io *mem(void)
{
    struct kvt_io *io = NULL;

    assert_int_equal(kvt_io_mem_new(1u << 30, &io), 0);
    return io;
}

static void destroy(struct kvt_io *io)
{
    io->ops->destroy(io);
}

static void reopen(struct kvt_io *io)
{
    if (env.l2)
        l2_env_close(&env);
    assert_int_equal(l2_env_open(&env, io), 0);
}

static struct kvt_io *root_with(uint32_t count)
{
    struct kvt_io *io = mem();

    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 2), 0);
    return io;
}

static void set_bytes(struct kvt_io *io, const char *name, uint64_t page, int value)
{
    void *bytes = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    int file = io->ops->open(io, name, KVT_IO_OPEN_CREATE);

    memset(bytes, value, KVT_PAGE_BYTES);
    assert_int_equal(kvt_io_write_now(io, file, page * KVT_PAGE_BYTES, bytes, KVT_PAGE_BYTES),
                     KVT_PAGE_BYTES);
    io->ops->close(io, file);
    free(bytes);
}

static uint64_t journal_bytes(struct kvt_io *io)
{
    int file = io->ops->open(io, "journal", KVT_IO_OPEN_READ_ONLY);
    int64_t bytes = io->ops->size(io, file);

    io->ops->close(io, file);
    return (uint64_t)bytes;
}

static void test_purges_survive(void **state)
{
    struct kvt_io *io = root_with(200);

    (void)state;
    assert_int_equal(l2_env_purge_key(&env, 5), 0);
    assert_int_equal(l2_env_purge_key(&env, 6), 0);
    assert_int_equal(l2_env_purge_ns(&env, 3), 0);
    assert_int_equal(l2_env_put(&env, 6, 2, 2), 0); /* put again: there */
    assert_int_equal(l2_env_put(&env, 7, 2, 2), 0); /* of the purged namespace */
    for (int life = 0; life < 3; life++) {
        reopen(io);
        assert_int_equal(l2_env_count(&env), 200 - 50 - 1 + 1);
        assert_false(env.index[5].present);
        assert_int_equal(l2_env_get(&env, 6), 0);
        assert_int_equal(l2_env_get(&env, 7), 0);
        assert_int_equal(l2_env_verify(&env), l2_env_count(&env));
    }
    l2_env_close(&env);
    destroy(io);
}

/* One at a time; malformed items are refused. */
static void never(void *ctx, int status)
{
    (void)status;
    ++*(int *)ctx;
}

static void test_refusals(void **state)
{
    struct kvt_io *io = root_with(1);
    struct kvt_journal_item item = {.kind = KVT_JOURNAL_PURGE_ALL, .value = env.sequence};
    struct kvt_journal_item *many = calloc(100000, sizeof *many);
    int calls = 0;

    (void)state;
    assert_int_equal(kvt_l2_journal(env.l2, &item, 0, never, &calls), KVT_E_INVAL);
    item.kind = KVT_JOURNAL_LEVEL_MAP;
    assert_int_equal(kvt_l2_journal(env.l2, &item, 1, never, &calls), KVT_E_INVAL);
    item.kind = KVT_JOURNAL_PURGE_KEY; /* of a key without a hash */
    assert_int_equal(kvt_l2_journal(env.l2, &item, 1, never, &calls), KVT_E_INVAL);
    for (uint32_t i = 0; i < 100000; i++)
        many[i] = (struct kvt_journal_item){.kind = KVT_JOURNAL_PURGE_ALL, .value = 1};
    assert_int_equal(kvt_l2_journal(env.l2, many, 100000, never, &calls), KVT_E_LIMIT);
    item.kind = KVT_JOURNAL_PURGE_NS;
    assert_int_equal(kvt_l2_journal(env.l2, &item, 1, never, &calls), 0);
    assert_int_equal(kvt_l2_journal(env.l2, &item, 1, never, &calls), -EAGAIN);
    assert_int_equal(calls, 0);
    l2_env_close(&env); /* finishes it */
    assert_int_equal(calls, 1);
    free(many);
    destroy(io);
}

/* Thousands of purges: the file stays within its bound; what is purged stays so; when the records
 * are recycled the items go. */
static void test_journal_stays_small(void **state)
{
    struct kvt_io *io = root_with(400);
    uint64_t largest = 0;

    (void)state;
    for (uint32_t round = 0; round < 1000; round++) {
        uint32_t id = round % 200;

        assert_int_equal(l2_env_purge_key(&env, id), 0);
        if (round % 3 == 0)
            assert_int_equal(l2_env_put(&env, id, round + 2, 1), 0);
        largest = KVT_MAX(largest, journal_bytes(io));
        if (round % 250 == 249)
            reopen(io);
    }
    assert_true(largest <= 640 << 10);
    for (uint32_t i = 0; i < 200; i++)
        assert_int_equal(env.index[i].present, i + 800 < 1000 && (i + 800) % 3 == 0);
    for (uint32_t i = 200; i < 400; i++)
        assert_int_equal(l2_env_get(&env, i), 0);
    for (uint32_t i = 1000; i < 1900; i++) /* everything is recycled */
        assert_int_equal(l2_env_put(&env, i, 1, 4), 0);
    for (uint32_t i = 0; i < 150; i++)
        assert_int_equal(l2_env_purge_key(&env, 3000), 0);
    reopen(io);
    assert_true(env.l2->journal.count < 150);
    l2_env_close(&env);
    destroy(io);
}

/* More purges than the journal can name, of records that are all alive: it purges more than asked,
 * at a restart, and never less. */
static void test_overflow_purges_more_never_less(void **state)
{
    struct kvt_io *io = root_with(100);
    struct kvt_journal_item *items = calloc(1000, sizeof *items);
    int calls = 0;

    (void)state;
    for (uint32_t k = 0; k < 12; k++) {
        for (uint32_t i = 0; i < 1000; i++) {
            uint32_t id = 5000 + (k * 1000 + i) * 4; /* all in namespace 0 */

            items[i] =
                (struct kvt_journal_item){.kind = KVT_JOURNAL_PURGE_KEY, .value = env.sequence};
            l2_key(id, &items[i].key);
        }
        assert_int_equal(kvt_l2_journal(env.l2, items, 1000, never, &calls), 0);
        while (calls == (int)k)
            l2_env_turn(&env);
    }
    assert_true(journal_bytes(io) <= 640 << 10);
    reopen(io);
    for (uint32_t i = 0; i < 100; i++) /* namespace 0 went, the others are untouched */
        assert_int_equal(env.index[i].present, i % 4 != 0);
    assert_int_equal(l2_env_put(&env, 0, 3, 2), 0);
    reopen(io);
    assert_int_equal(l2_env_get(&env, 0), 0);
    l2_env_close(&env);
    free(items);
    destroy(io);
}

/* A journal that may have lost a purge: nothing counts any more, for good; new records do. */
static void doubt(struct kvt_io *io)
{
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_count(&env), 0);
    assert_int_equal(l2_env_put(&env, 1, 50, 2), 0);
    reopen(io);
    assert_int_equal(l2_env_count(&env), 1);
    assert_int_equal(l2_env_get(&env, 1), 0);
    l2_env_close(&env);
}

static void test_damaged_journal(void **state)
{
    struct kvt_io *io = root_with(50), *copy;

    (void)state;
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(l2_env_purge_key(&env, i), 0);
    l2_env_close(&env);
    assert_int_equal(journal_bytes(io), 4 * KVT_PAGE_BYTES);
    for (uint64_t page = 0; page < 4; page++)
        for (int value = 0; value < 2; value++) { /* rot, and a page that went back to zeros */
            copy = l2_clone(io);
            set_bytes(copy, "journal", page, value * 0x55);
            doubt(copy);
            destroy(copy);
        }
    copy = l2_clone(io); /* a page after the last acknowledged one: a purge that did not return */
    set_bytes(copy, "journal", 4, 0x55);
    assert_int_equal(l2_env_open(&env, copy), 0);
    assert_int_equal(l2_env_count(&env), 46);
    assert_int_equal(l2_env_purge_key(&env, 10), 0);
    reopen(copy);
    assert_int_equal(l2_env_count(&env), 45);
    l2_env_close(&env);
    destroy(copy);
    copy = l2_clone(io); /* the file is gone */
    assert_int_equal(copy->ops->unlink(copy, "journal"), 0);
    doubt(copy);
    destroy(copy);
    copy = l2_clone(io); /* an older journal has come back (another file was restored, say) */
    reopen(io);
    for (uint32_t i = 0; i < 200; i++)
        assert_int_equal(l2_env_purge_key(&env, 20 + i % 20), 0);
    l2_env_close(&env);
    assert_true(journal_bytes(io) > 0);
    for (uint32_t page = 0; page < 2; page++) {
        int from = io->ops->open(io, "superblock", KVT_IO_OPEN_READ_ONLY);
        int to = copy->ops->open(copy, "superblock", 0);
        void *bytes = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);

        assert_int_equal(kvt_io_read_now(io, from, page * 4096ull, bytes, 4096), 4096);
        assert_int_equal(kvt_io_write_now(copy, to, page * 4096ull, bytes, 4096), 4096);
        free(bytes);
        io->ops->close(io, from);
        copy->ops->close(copy, to);
    }
    doubt(copy);
    destroy(copy);
    destroy(io);
}

/* Where nothing was ever purged, a lost journal costs nothing. */
static void test_lost_journal_without_purges(void **state)
{
    struct kvt_io *io = root_with(50);

    (void)state;
    l2_env_close(&env);
    assert_int_equal(io->ops->unlink(io, "journal"), 0);
    assert_int_equal(l2_env_open(&env, io), 0);
    assert_int_equal(l2_env_count(&env), 50);
    reopen(io);
    assert_int_equal(l2_env_count(&env), 50);
    l2_env_close(&env);
    destroy(io);
}

/* Do the bytes of a record stand anywhere in the files? */
static bool on_disk(struct kvt_io *io, const void *record, struct kvt_l2_where where)
{
    char name[KVT_IO_NAME_MAX];
    void *bytes = aligned_alloc(KVT_PAGE_BYTES, KVT_PAGE_BYTES);
    int file;
    bool same;

    snprintf(name, sizeof name, "seg-%08x", (unsigned)where.segment);
    file = io->ops->open(io, name, KVT_IO_OPEN_READ_ONLY);
    assert_int_equal(kvt_io_read_now(io, file, (where.page + 1) * 4096ull, bytes, 4096), 4096);
    same = !memcmp(bytes, (const uint8_t *)record + 4096, 4096);
    io->ops->close(io, file);
    free(bytes);
    return same;
}

/* Purged bytes are overwritten: by holes, or by zeros where there are none. */
static void test_bytes_are_erased(void **state)
{
    for (int punch = 0; punch < 2; punch++) {
        struct kvt_io *inner = mem(), *io = fault_io_new(inner, 1);
        const struct fault_rule rule = {
            .ops = FAULT_PUNCH, .action = FAULT_FAIL, .error = EOPNOTSUPP};
        struct kvt_l2_where where[30];
        void *records[30];

        (void)state;
        if (!punch)
            fault_io_rule(io, &rule);
        l2_env_init(&env, CAP);
        assert_int_equal(l2_env_open(&env, io), 0);
        for (uint32_t i = 0; i < 30; i++) {
            uint32_t pages = i % 5 ? 3 : 60; /* some are longer than one request of zeros needs */

            records[i] = l2_record(i, 1, pages, env.sequence, NULL);
            assert_int_equal(l2_env_put(&env, i, 1, pages), 0);
            where[i] = env.index[i].where;
            assert_true(on_disk(inner, records[i], where[i]));
        }
        for (uint32_t i = 0; i < 30; i += 2)
            assert_int_equal(l2_env_purge_key(&env, i), 0);
        for (uint32_t turns = 0; turns < 200; turns++)
            l2_env_turn(&env);
        for (uint32_t i = 0; i < 30; i++) {
            assert_int_equal(on_disk(inner, records[i], where[i]), i % 2);
            assert_int_equal(l2_env_get(&env, i), i % 2 ? 0 : KVT_E_MISS);
            free(records[i]);
        }
        for (uint32_t i = 100; i < 600; i++) /* holes do not hinder recycling */
            assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
        assert_int_equal(l2_env_verify(&env), l2_env_count(&env));
        l2_env_close(&env);
        io->ops->destroy(io);
    }
}

/* A write error while purging is the purge's status; the next one works and includes it. */
/* The first append of a life fails, and no file of this life but its own is touched: it used to
 * close whatever had number 0. */
static void test_a_failed_append_closes_nothing_else(void **state)
{
    static const unsigned ops[] = {FAULT_WRITE, FAULT_SYNC};

    (void)state;
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(ops); i++) {
        struct kvt_io *io = fault_io_new(mem(), 1);
        const struct fault_rule rule = {
            .ops = ops[i], .name = "journal", .times = 1, .action = FAULT_FAIL, .error = EIO};

        l2_env_init(&env, CAP);
        assert_int_equal(l2_env_open(&env, io), 0);
        for (uint32_t id = 0; id < 20; id++)
            assert_int_equal(l2_env_put(&env, id, 1, 2), 0);
        assert_int_equal(l2_env_purge_key(&env, 0), 0);
        reopen(io); /* the journal is whole: not rewritten, appended to */
        fault_io_rule(io, &rule);
        assert_int_equal(l2_env_purge_key(&env, 1), -EIO);
        fault_io_clear(io);
        for (uint32_t id = 20; id < 40; id++)
            assert_int_equal(l2_env_put(&env, id, 1, 2), 0);
        for (uint32_t id = 2; id < 6; id++) /* a rewrite, then appends */
            assert_int_equal(l2_env_purge_key(&env, id), 0);
        assert_int_equal(l2_env_flush(&env), 0);
        assert_int_equal(l2_env_verify(&env), 35);
        reopen(io);
        assert_true(l2_env_verify(&env) >= 34); /* 1 may be purged, or not */
        assert_int_equal(l2_env_get(&env, 2), KVT_E_MISS);
        l2_env_close(&env);
        io->ops->destroy(io);
    }
}

/* The process is gone, perhaps the power; then the root is opened again. */
static void die(struct kvt_io *io, enum power_loss loss)
{
    struct kvt_rng chance = {3};

    fault_io_clear(io);
    fault_io_pull_the_plug(io);
    l2_env_close(&env);
    (void)power_io_loss(fault_io_inner(io), loss, &chance);
    fault_io_plug_in(io);
    assert_int_equal(l2_env_open(&env, io), 0);
}

/* A page of the journal was written and its sync failed. The next life finds it, and loses power
 * before anything else has happened: the superblock must not have counted a page that is gone, for
 * then nothing on disk counts. The same with a rewrite whose new name was not durable. */
static void test_pages_count_when_they_are_durable(void **state)
{
    static const struct fault_rule rules[] = {
        {.ops = FAULT_SYNC, .name = "journal", .times = 1, .action = FAULT_FAIL, .error = EIO},
        {.ops = FAULT_SYNC_DIR, .times = 1, .action = FAULT_FAIL, .error = EIO},
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(rules); i++) {
        struct kvt_io *io = fault_io_new(power_io_new(mem()), 1);

        l2_env_init(&env, CAP);
        assert_int_equal(l2_env_open(&env, io), 0);
        for (uint32_t id = 0; id < 20; id++)
            assert_int_equal(l2_env_put(&env, id, 1, 2), 0);
        assert_int_equal(l2_env_purge_key(&env, 0), 0);
        assert_int_equal(l2_env_flush(&env), 0);
        env.l2->journal.broken = i == 1; /* so that it is rewritten */
        fault_io_rule(io, &rules[i]);
        assert_int_equal(l2_env_purge_key(&env, 1), -EIO);
        die(io, POWER_KEEPS);
        assert_true(l2_env_verify(&env) >= 18);
        die(io, POWER_DROPS);
        assert_true(l2_env_verify(&env) >= 18);
        assert_int_equal(l2_env_get(&env, 0), KVT_E_MISS);
        l2_env_close(&env);
        io->ops->destroy(io);
    }
}

/* A purge is journaled while records that are older than it are still to be appended (a store takes
 * its blocks out of the queue after that): its item must outlive the rewrite, although nothing on
 * disk is that old yet. */
static void test_a_purge_before_its_records(void **state)
{
    struct kvt_io *io = mem();
    uint64_t before;

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    before = env.sequence;
    env.sequence += 10;                            /* the purge's bound */
    assert_int_equal(l2_env_purge_ns(&env, 0), 0); /* the first one: a rewrite */
    env.sequence = before;
    for (uint32_t id = 0; id < 6; id++)
        assert_int_equal(l2_env_put(&env, id, 1, 2), 0);
    reopen(io);
    assert_true(l2_env_count(&env) > 0 && l2_env_count(&env) < 6);
    assert_int_equal(l2_env_get(&env, 0), KVT_E_MISS);
    l2_env_close(&env);
    io->ops->destroy(io);
}

static void test_journal_errors(void **state)
{
    struct kvt_io *io = fault_io_new(mem(), 1);
    static const unsigned ops[] = {FAULT_WRITE, FAULT_SYNC, FAULT_RENAME, FAULT_OPEN,
                                   FAULT_SYNC_DIR};

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 60; i++)
        assert_int_equal(l2_env_put(&env, i, 1, 2), 0);
    for (uint32_t i = 0; i < KVT_ARRAY_LEN(ops); i++)
        for (int first = 0; first < 2; first++) {
            const struct fault_rule rule = {.ops = ops[i],
                                            .name = ops[i] == FAULT_SYNC_DIR ? NULL : "journal",
                                            .times = 1,
                                            .action = FAULT_FAIL,
                                            .error = first ? ENOSPC : EIO};
            uint32_t id = i * 2 + (uint32_t)first;
            int rc;

            env.l2->journal.broken = true; /* rewrite: all five are on its way */
            fault_io_rule(io, &rule);
            rc = l2_env_purge_key(&env, id);
            assert_int_equal(rc, first ? KVT_E_NO_SPACE : -EIO);
            fault_io_clear(io);
            assert_int_equal(l2_env_purge_key(&env, id), 0);
        }
    reopen(io);
    assert_int_equal(l2_env_count(&env), 50);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* While a segment is being given a new life its old records are still on disk: the items that hide
 * them are kept until the new header is durable. */
static void test_items_outlive_the_life_they_hide(void **state)
{
    struct kvt_io *io = fault_io_new(mem(), 1);
    uint32_t preparing = 0;

    (void)state;
    l2_env_init(&env, CAP);
    assert_int_equal(l2_env_open(&env, io), 0);
    for (uint32_t i = 0; i < 170; i++) /* every file exists and holds records */
        assert_int_equal(l2_env_put(&env, i, 1, 10), 0);
    fault_io_hold(io, 1);
    for (uint32_t i = 200; i < 300; i++) {
        assert_int_equal(l2_env_queue(&env, &i, 1, 1, 10), 0);
        while (env.in_flight) {
            const struct kvt_l2_prepare *prepare = &env.l2->prepare;

            if (prepare->step == KVT_L2_WRITE || prepare->step == KVT_L2_SYNC) {
                assert_true(env.l2->segments[prepare->segment].min_sequence < UINT64_MAX);
                preparing++;
            }
            fault_io_release(io, 1, 0);
            l2_env_turn(&env);
        }
    }
    assert_true(preparing > 0 && env.evictions > 0);
    fault_io_hold(io, 0);
    l2_env_close(&env);
    io->ops->destroy(io);
}

/* The set of items against a plain list. */
static void test_item_set(void **state)
{
    struct kvt_l2 *l2 = calloc(1, sizeof *l2);
    struct kvt_l2_journal *journal = &l2->journal;
    struct kvt_journal_item plain[300];

    (void)state;
    journal->items = calloc(300, sizeof *journal->items);
    for (uint32_t round = 0; round < 300; round++) {
        uint32_t count = (uint32_t)kvt_rng_below(&rng, 300);
        uint64_t min_live = kvt_rng_below(&rng, 3) ? 0 : kvt_rng_below(&rng, 100);

        for (uint32_t i = 0; i < count; i++) {
            uint64_t dice = kvt_rng_below(&rng, 40);

            memset(&plain[i], 0, sizeof plain[i]);
            plain[i].kind = !dice      ? KVT_JOURNAL_PURGE_ALL
                            : dice < 4 ? KVT_JOURNAL_PURGE_NS
                                       : KVT_JOURNAL_PURGE_KEY;
            l2_key((uint32_t)kvt_rng_below(&rng, 50), &plain[i].key);
            plain[i].value = kvt_rng_below(&rng, dice ? 100 : 20);
        }
        if (count)
            memcpy(journal->items, plain, count * sizeof *plain);
        journal->count = count;
        kvt_l2_purge_merge(journal, min_live);
        assert_true(journal->count <= count);
        for (uint32_t id = 0; id < 50; id++) {
            struct kvt_entry entry;
            bool want = false;

            memset(&entry, 0, sizeof entry);
            l2_key(id, &entry.key);
            entry.sequence = min_live + kvt_rng_below(&rng, 100);
            for (uint32_t i = 0; i < count; i++) {
                const struct kvt_journal_item *item = &plain[i];
                bool fits = item->kind == KVT_JOURNAL_PURGE_ALL ||
                            (item->kind == KVT_JOURNAL_PURGE_NS
                                 ? !memcmp(item->key.ns, entry.key.ns, sizeof entry.key.ns)
                                 : !memcmp(&item->key, &entry.key, sizeof entry.key));

                want = want || (fits && entry.sequence < item->value);
            }
            assert_int_equal(kvt_l2_journal_purged(l2, &entry), want);
            kvt_l2_purge_coarsen(journal, 1000); /* nothing to do */
            assert_int_equal(kvt_l2_journal_purged(l2, &entry), want);
        }
        if (round % 10 == 0) { /* coarser: whatever was purged still is */
            struct kvt_entry entry;

            kvt_l2_purge_coarsen(journal, 1);
            assert_true(journal->count <= 1);
            memset(&entry, 0, sizeof entry);
            for (uint32_t i = 0; i < count; i++) {
                entry.key = plain[i].key;
                entry.sequence = plain[i].value - 1;
                if (plain[i].value > min_live)
                    assert_true(kvt_l2_journal_purged(l2, &entry));
            }
        }
    }
    free(journal->items);
    free(l2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_purges_survive),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_journal_stays_small),
        cmocka_unit_test(test_overflow_purges_more_never_less),
        cmocka_unit_test(test_damaged_journal),
        cmocka_unit_test(test_lost_journal_without_purges),
        cmocka_unit_test(test_bytes_are_erased),
        cmocka_unit_test(test_journal_errors),
        cmocka_unit_test(test_a_failed_append_closes_nothing_else),
        cmocka_unit_test(test_pages_count_when_they_are_durable),
        cmocka_unit_test(test_a_purge_before_its_records),
        cmocka_unit_test(test_items_outlive_the_life_they_hide),
        cmocka_unit_test(test_item_set),
    };

    rng.state = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
