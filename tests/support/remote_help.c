/* See remote_help.h. */
#include "support/remote_help.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "kvtier/error.h"
#include "support/rig.h"

#define PATIENCE_NS INT64_C(120000000000)

static int64_t now(void)
{
    struct kvt_clock clock = kvt_clock_system();

    return kvt_clock_now(&clock);
}

static void say(void *arg, int level, const char *message)
{
    (void)arg;
    print_message("           log %d: %s\n", level, message);
}

struct kvt_log remote_help_log;

void remote_help_open(struct remote_help *help, const char *where, const char *auth,
                      const char *mac, const char *ca)
{
    char error[512] = "";

    memset(help, 0, sizeof(*help));
    help->deadline_ns = REMOTE_HELP_DEADLINE_NS;
    help->params = (struct kvt_remote_params){
        .where = where, .auth_file = auth, .mac_file = mac, .ca_file = ca};
    help->params.log = remote_help_log;
    if (getenv("KVT_TEST_LOG"))
        help->params.log = (struct kvt_log){say, NULL, KVT_LOG_DEBUG};
    if (kvt_remote_tier_open(&help->params, &help->remote, error, sizeof(error)) != 0)
        fail_msg("%s", error);
}

void remote_help_close(struct remote_help *help)
{
    if (help->remote) {
        help->remote->ops->stop(help->remote);
        help->remote->ops->destroy(help->remote);
    }
    memset(help, 0, sizeof(*help));
}

struct kvt_full_key remote_help_key(uint8_t ns, uint64_t number)
{
    struct kvt_full_key key;

    memset(&key, 0, sizeof(key));
    memset(key.ns, ns, sizeof(key.ns));
    memcpy(key.hash, &number, sizeof(number));
    key.hash_len = 16;
    key.hash[15] = 1;
    return key;
}

void remote_help_record(uint8_t ns, uint64_t number, uint32_t pages, void *out)
{
    struct kvt_record_header *header = out;
    struct kvt_rng rng = {number * 257 + ns};
    uint32_t bytes = pages * KVT_PAGE_BYTES;

    for (uint32_t at = 0; at < bytes; at += 8) {
        uint64_t word = kvt_rng_next(&rng);

        memcpy((uint8_t *)out + at, &word, sizeof(word));
    }
    memset(header, 0, sizeof(*header));
    header->magic = KVT_RECORD_MAGIC;
    header->version = KVT_RECORD_VERSION;
    header->map = KVT_LEVEL_KV4;
    header->key = remote_help_key(ns, number);
    header->record_bytes = bytes;
    header->payload_bytes = bytes - (uint32_t)sizeof(*header);
    header->sequence = number + 1;
    header->checksum = kvt_record_checksum(out, bytes);
}

void remote_help_do(struct remote_help *help, struct kvt_remote_req *reqs, uint32_t count)
{
    struct kvt_remote_req *done[REMOTE_HELP_BATCH];
    int64_t start = now();
    uint32_t left = count;

    for (uint32_t i = 0; i < count; i++) {
        reqs[i].deadline_ns = start + help->deadline_ns;
        reqs[i].ttl_ns = help->ttl_ns;
        reqs[i].user = help;
        assert_int_equal(help->remote->ops->submit(help->remote, &reqs[i]), 0);
    }
    while (left) {
        struct pollfd fd = {.fd = help->remote->ops->event_fd(help->remote), .events = POLLIN};
        uint32_t got;

        (void)poll(&fd, 1, 100);
        while ((got = help->remote->ops->reap(help->remote, done, REMOTE_HELP_BATCH)) != 0) {
            assert_true(got <= left);
            left -= got;
            for (uint32_t i = 0; i < got; i++) {
                assert_ptr_equal(done[i]->user, help);
                done[i]->user = NULL; /* once */
            }
        }
        if (now() - start > PATIENCE_NS)
            fail_msg("%u requests of %u never came back", left, count);
    }
    help->took_ns = now() - start;
}

/* Requests of one kind for numbers first.., with memory of their own. */
struct many {
    struct kvt_full_key *keys;
    struct kvt_remote_req *reqs;
    uint8_t *records;
};

static void many_new(struct many *many, enum kvt_remote_op op, uint8_t ns, uint64_t first,
                     uint32_t count, uint32_t pages)
{
    many->keys = calloc(count, sizeof(*many->keys));
    many->reqs = calloc(count, sizeof(*many->reqs));
    many->records = aligned_alloc(KVT_PAGE_BYTES, (size_t)count * pages * KVT_PAGE_BYTES);
    assert_true(many->keys && many->reqs && many->records);
    memset(many->records, 0xEE, (size_t)count * pages * KVT_PAGE_BYTES);
    for (uint32_t i = 0; i < count; i++) {
        many->keys[i] = remote_help_key(ns, first + i);
        many->reqs[i] =
            (struct kvt_remote_req){.op = op,
                                    .count = 1,
                                    .keys = &many->keys[i],
                                    .record = many->records + (size_t)i * pages * KVT_PAGE_BYTES,
                                    .record_bytes = pages * KVT_PAGE_BYTES,
                                    .sequence = op == KVT_REMOTE_GET ? 7 : 0,
                                    .map = KVT_LEVEL_KV4};
        if (op == KVT_REMOTE_PUT)
            remote_help_record(ns, first + i, pages, many->reqs[i].record);
    }
}

static void many_free(struct many *many)
{
    free(many->keys);
    free(many->reqs);
    free(many->records);
}

static uint32_t count_good(const struct many *many, uint32_t count, int *other)
{
    uint32_t good = 0;

    if (other)
        *other = 0;
    for (uint32_t i = 0; i < count; i++) {
        good += many->reqs[i].status == 0;
        if (other && many->reqs[i].status)
            *other = many->reqs[i].status;
    }
    return good;
}

uint32_t remote_help_put_many(struct remote_help *help, uint8_t ns, uint64_t first, uint32_t count,
                              uint32_t pages, int *other)
{
    struct many many;
    uint32_t good;

    many_new(&many, KVT_REMOTE_PUT, ns, first, count, pages);
    remote_help_do(help, many.reqs, count);
    good = count_good(&many, count, other);
    many_free(&many);
    return good;
}

/* What was put, but for the number. */
static void compare(uint8_t ns, uint64_t number, uint32_t pages, const uint8_t *record)
{
    uint32_t bytes = pages * KVT_PAGE_BYTES;
    struct kvt_full_key key = remote_help_key(ns, number);
    const struct kvt_record_header *header = (const struct kvt_record_header *)record;
    uint8_t *want = aligned_alloc(KVT_PAGE_BYTES, bytes);

    assert_non_null(want);
    remote_help_record(ns, number, pages, want);
    assert_int_equal(kvt_record_verify(record, bytes, &key, 0), 0);
    assert_int_equal(header->sequence, 7);
    assert_memory_equal(record + sizeof(*header), want + sizeof(*header), bytes - sizeof(*header));
    free(want);
}

uint32_t remote_help_get_many(struct remote_help *help, uint8_t ns, uint64_t first, uint32_t count,
                              uint32_t pages, int *other)
{
    struct many many;
    uint32_t good;

    many_new(&many, KVT_REMOTE_GET, ns, first, count, pages);
    remote_help_do(help, many.reqs, count);
    for (uint32_t i = 0; i < count; i++)
        if (many.reqs[i].status == 0)
            compare(ns, first + i, pages, many.reqs[i].record);
    good = count_good(&many, count, other);
    many_free(&many);
    return good;
}

int remote_help_put(struct remote_help *help, uint8_t ns, uint64_t number, uint32_t pages,
                    bool replace)
{
    struct many many;
    int status;

    many_new(&many, KVT_REMOTE_PUT, ns, number, 1, pages);
    many.reqs[0].replace = replace;
    remote_help_do(help, many.reqs, 1);
    status = many.reqs[0].status;
    many_free(&many);
    return status;
}

int remote_help_get(struct remote_help *help, uint8_t ns, uint64_t number, uint32_t pages)
{
    int status;

    (void)remote_help_get_many(help, ns, number, 1, pages, &status);
    return status;
}

uint32_t remote_help_probe(struct remote_help *help, uint8_t ns, uint64_t first, uint32_t count,
                           int *status)
{
    struct kvt_full_key *keys = calloc(count, sizeof(*keys));
    struct kvt_remote_found *found = calloc(count, sizeof(*found));
    struct kvt_remote_req req = {
        .op = KVT_REMOTE_PROBE, .count = count, .keys = keys, .found = found};
    uint32_t there = 0;

    assert_true(keys && found);
    for (uint32_t i = 0; i < count; i++)
        keys[i] = remote_help_key(ns, first + i);
    remote_help_do(help, &req, 1);
    for (uint32_t i = 0; i < count; i++) {
        if (found[i].status)
            continue;
        there++;
        assert_int_equal(kvt_record_header_check(&found[i].header), 0);
        assert_memory_equal(&found[i].header.key, &keys[i], sizeof(keys[i]));
    }
    if (status)
        *status = req.status;
    free(keys);
    free(found);
    return there;
}

int remote_help_drop(struct remote_help *help, uint8_t ns, uint64_t first, uint32_t count,
                     uint64_t *removed)
{
    struct kvt_full_key *keys = calloc(count + 1, sizeof(*keys));
    struct kvt_remote_req req = {.op = count ? KVT_REMOTE_DROP : KVT_REMOTE_DROP_NS,
                                 .count = count ? count : 1,
                                 .keys = keys};

    assert_non_null(keys);
    for (uint32_t i = 0; i <= count; i++)
        keys[i] = remote_help_key(ns, first + i);
    remote_help_do(help, &req, 1);
    free(keys);
    if (removed)
        *removed = req.removed;
    return req.status;
}

int remote_help_found(struct remote_help *help, uint8_t ns, uint64_t number)
{
    struct kvt_full_key key = remote_help_key(ns, number);
    struct kvt_remote_found found = {.status = 1};
    struct kvt_remote_req req = {.op = KVT_REMOTE_PROBE, .count = 1, .keys = &key, .found = &found};

    remote_help_do(help, &req, 1);
    return req.status ? req.status : found.status;
}
