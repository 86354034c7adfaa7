/* The ring between the client half and the store half.
 *
 * Goal:   frames arrive whole, once, in order; a sleeping consumer is always woken; nothing a peer
 *         writes into shared memory leads this side out of the buffer.
 * Method: random frame sizes against a copy of the stream, one thread and two; every word of the
 * shared part overwritten with nonsense, with guard bytes around the ring.
 */
#include "base/ring.h"

#include "support/store_help.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/rng.h"
#include "kvtier/error.h"

#define CAPACITY 4096u
#define GUARD 4096u

struct mapping {
    uint8_t *bytes; /* guard, ring, guard */
    struct kvt_ring producer, consumer;
    int fd;
};

static void setup(struct mapping *m, uint64_t capacity)
{
    size_t len = kvt_ring_bytes(capacity);

    m->bytes = aligned_alloc(4096, (size_t)kvt_round_up(len + 2 * GUARD, 4096));
    assert_non_null(m->bytes);
    memset(m->bytes, 0xee, len + 2 * GUARD);
    memset(m->bytes + GUARD, 0, len);
    m->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    assert_true(m->fd >= 0);
    assert_int_equal(kvt_ring_init(&m->producer, m->bytes + GUARD, capacity, m->fd, 1), 0);
    assert_int_equal(kvt_ring_init(&m->consumer, m->bytes + GUARD, capacity, m->fd, 0), 0);
}

static void teardown(struct mapping *m)
{
    size_t len = kvt_ring_bytes(m->producer.capacity);

    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(m->bytes[i], 0xee);
        assert_int_equal(m->bytes[GUARD + len + i], 0xee);
    }
    close(m->fd);
    free(m->bytes);
}

/* The content of frame number n: its size and its words. */
static uint32_t frame_bytes(uint64_t n, uint64_t capacity)
{
    struct kvt_rng rng = {n};

    return (uint32_t)(8 * (1 + kvt_rng_below(&rng, n % 3 ? 8 : capacity / 4 / 8)));
}

static void frame_fill(uint64_t *words, uint64_t n, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes / 8; i++)
        words[i] = n * 1000003 + i;
}

static int push_frame(struct kvt_ring *ring, uint64_t n)
{
    uint32_t bytes = frame_bytes(n, ring->capacity);
    uint64_t *words = kvt_ring_reserve(ring, bytes);

    if (!words)
        return 0;
    assert_int_equal((uintptr_t)words % 8, 0);
    frame_fill(words, n, bytes);
    kvt_ring_push(ring, bytes);
    return 1;
}

static int pop_frame(struct kvt_ring *ring, uint64_t n)
{
    const void *frame = NULL, *again = NULL;
    int bytes = kvt_ring_peek(ring, &frame);
    const uint64_t *words = frame;

    if (!bytes)
        return 0;
    assert_int_equal(bytes, frame_bytes(n, ring->capacity));
    for (int i = 0; i < bytes / 8; i++)
        assert_int_equal(words[i], n * 1000003 + (uint64_t)i);
    assert_int_equal(kvt_ring_peek(ring, &again), bytes); /* peeking takes nothing */
    assert_ptr_equal(again, frame);
    kvt_ring_pop(ring);
    return 1;
}

static void test_sizes(void **state)
{
    _Alignas(64) static uint8_t memory[8192 + 256];
    struct kvt_ring ring;

    (void)state;
    assert_int_equal(kvt_ring_bytes(4096), sizeof(struct kvt_ring_shared) + 4096);
    assert_int_equal(kvt_ring_bytes(0), 0);
    assert_int_equal(kvt_ring_bytes(2048), 0);
    assert_int_equal(kvt_ring_bytes(5000), 0);
    assert_int_equal(kvt_ring_bytes((uint64_t)KVT_RING_CAPACITY_MAX * 2), 0);
    assert_int_equal(kvt_ring_init(&ring, memory, 5000, -1, 1), KVT_E_INVAL);
    assert_int_equal(kvt_ring_init(&ring, memory + 8, 4096, -1, 1), KVT_E_INVAL);
    assert_int_equal(kvt_ring_init(&ring, NULL, 4096, -1, 1), KVT_E_INVAL);
    assert_int_equal(kvt_ring_init(&ring, memory, 4096, -1, 1), 0);
    assert_null(kvt_ring_reserve(&ring, 0));
    assert_null(kvt_ring_reserve(&ring, 4));
    assert_null(kvt_ring_reserve(&ring, 1025));
    assert_null(kvt_ring_reserve(&ring, 1032));
    assert_null(kvt_ring_reserve(&ring, UINT32_MAX - 7));
    assert_non_null(kvt_ring_reserve(&ring, 1024));
}

static void test_fill_and_empty(void **state)
{
    struct mapping m;
    uint64_t in = 0, out = 0;

    (void)state;
    setup(&m, CAPACITY);
    assert_false(pop_frame(&m.consumer, 0));
    for (int round = 0; round < 2000; round++) {
        while (push_frame(&m.producer, in))
            in++;
        assert_true(in > out);
        while (pop_frame(&m.consumer, out))
            out++;
        assert_int_equal(in, out);
    }
    kvt_ring_pop(&m.consumer); /* nothing peeked: nothing given back */
    assert_false(pop_frame(&m.consumer, out));
    teardown(&m);
}

static void test_random_interleaving(void **state)
{
    struct kvt_rng rng = {test_seed()};
    struct mapping m;
    uint64_t in = 0, out = 0;

    (void)state;
    setup(&m, CAPACITY);
    for (int step = 0; step < 200000; step++) {
        if (kvt_rng_below(&rng, 2))
            in += (uint64_t)push_frame(&m.producer, in);
        else
            out += (uint64_t)pop_frame(&m.consumer, out);
    }
    assert_true(in > 50000 && in - out < CAPACITY / 16);
    teardown(&m);
}

/* The largest frame always fits an empty ring, wherever the positions are. */
static void test_largest_frame(void **state)
{
    struct mapping m;
    const void *frame;

    (void)state;
    setup(&m, CAPACITY);
    for (int i = 0; i < 1000; i++) {
        uint32_t small = 8 * (1 + (uint32_t)i % 17);

        assert_non_null(kvt_ring_reserve(&m.producer, small));
        kvt_ring_push(&m.producer, small);
        assert_int_equal(kvt_ring_peek(&m.consumer, &frame), small);
        kvt_ring_pop(&m.consumer);
        assert_non_null(kvt_ring_reserve(&m.producer, CAPACITY / 4));
        kvt_ring_push(&m.producer, CAPACITY / 4);
        assert_int_equal(kvt_ring_peek(&m.consumer, &frame), CAPACITY / 4);
        kvt_ring_pop(&m.consumer);
    }
    teardown(&m);
}

static void test_push_less_than_reserved(void **state)
{
    struct mapping m;
    const void *frame;

    (void)state;
    setup(&m, CAPACITY);
    for (int i = 0; i < 3000; i++) { /* over many wrap-arounds */
        uint64_t *words = kvt_ring_reserve(&m.producer, 1024);

        assert_non_null(words);
        words[0] = (uint64_t)i;
        kvt_ring_push(&m.producer, 8 * (1 + (uint32_t)i % 128));
        assert_int_equal(kvt_ring_peek(&m.consumer, &frame), 8 * (1 + i % 128));
        assert_int_equal(*(const uint64_t *)frame, i);
        kvt_ring_pop(&m.consumer);
    }
    teardown(&m);
}

/* A reservation that is not pushed is invisible, and may be made again. */
static void test_reserve_without_push(void **state)
{
    struct mapping m;
    const void *frame;

    (void)state;
    setup(&m, CAPACITY);
    for (int i = 0; i < 100; i++) {
        assert_non_null(kvt_ring_reserve(&m.producer, 1024));
        assert_int_equal(kvt_ring_peek(&m.consumer, &frame), 0);
        assert_true(push_frame(&m.producer, (uint64_t)i));
        assert_true(pop_frame(&m.consumer, (uint64_t)i));
    }
    teardown(&m);
}

static int rung(int fd)
{
    uint64_t word;

    return read(fd, &word, sizeof word) == sizeof word;
}

static void test_sleep_handshake(void **state)
{
    struct mapping m;

    (void)state;
    setup(&m, CAPACITY);
    assert_true(push_frame(&m.producer, 0));
    assert_false(rung(m.fd)); /* awake: not rung */
    assert_int_equal(kvt_ring_sleep(&m.consumer), 0);
    assert_true(pop_frame(&m.consumer, 0));
    assert_int_equal(kvt_ring_sleep(&m.consumer), 1);
    assert_false(rung(m.fd));
    assert_true(push_frame(&m.producer, 1));
    assert_true(rung(m.fd));
    assert_true(push_frame(&m.producer, 2));
    assert_false(rung(m.fd)); /* once per sleep */
    kvt_ring_awake(&m.consumer);
    assert_true(pop_frame(&m.consumer, 1) && pop_frame(&m.consumer, 2));
    assert_int_equal(kvt_ring_sleep(&m.consumer), 1);
    kvt_ring_awake(&m.consumer);
    assert_true(push_frame(&m.producer, 3));
    assert_false(rung(m.fd));
    teardown(&m);
}

/* Frames pushed without a bell are there for who is awake; who sleeps is woken by the bell, once.
 */
static void test_quiet_frames_and_a_bell(void **state)
{
    struct mapping m;

    (void)state;
    setup(&m, CAPACITY);
    assert_non_null(kvt_ring_reserve(&m.producer, 8));
    kvt_ring_push_quiet(&m.producer, 8);
    assert_int_equal(kvt_ring_sleep(&m.consumer), 0); /* it is seen */
    for (int i = 0; i < 2; i++) {
        const void *frame;

        assert_int_equal(kvt_ring_peek(&m.consumer, &frame), 8);
        kvt_ring_pop(&m.consumer);
        assert_int_equal(kvt_ring_sleep(&m.consumer), 1);
        for (int k = 0; k < 3; k++) {
            assert_non_null(kvt_ring_reserve(&m.producer, 8));
            kvt_ring_push_quiet(&m.producer, 8);
        }
        assert_false(rung(m.fd));
        kvt_ring_bell(&m.producer);
        assert_true(rung(m.fd));
        kvt_ring_bell(&m.producer);
        assert_false(rung(m.fd));
        for (int k = 0; k < 2; k++) {
            assert_int_equal(kvt_ring_peek(&m.consumer, &frame), 8);
            kvt_ring_pop(&m.consumer);
        }
    }
    teardown(&m);
}

/* Sleep on the word: the descriptor stays quiet, one push ends it, and so does a close; who
 * announces for the descriptor behind it is rung as ever. */
static void test_sleep_on_the_word(void **state)
{
    struct mapping m;
    _Atomic uint32_t *word;

    (void)state;
    setup(&m, CAPACITY);
    assert_true(push_frame(&m.producer, 0));
    assert_null(kvt_ring_sleep_word(&m.consumer));
    assert_true(pop_frame(&m.consumer, 0));
    word = kvt_ring_sleep_word(&m.consumer);
    assert_non_null(word);
    kvt_ring_word_wait(word, 1000000); /* nothing comes: the time is up */
    assert_int_equal(atomic_load(word), KVT_RING_BY_WORD);
    assert_true(push_frame(&m.producer, 1));
    assert_int_equal(atomic_load(word), KVT_RING_AWAKE);
    assert_false(rung(m.fd));
    kvt_ring_word_wait(word, INT64_C(600000000000)); /* awake already: at once */
    assert_true(pop_frame(&m.consumer, 1));

    assert_non_null(kvt_ring_sleep_word(&m.consumer));
    kvt_ring_word_wake(word); /* somebody else has our frame */
    assert_int_equal(atomic_load(word), KVT_RING_AWAKE);
    assert_int_equal(kvt_ring_sleep(&m.consumer), 1);
    kvt_ring_word_wake(word); /* not whom it was meant for */
    assert_int_equal(atomic_load(word), KVT_RING_BY_EVENT);
    assert_true(push_frame(&m.producer, 2));
    assert_true(rung(m.fd));
    assert_true(pop_frame(&m.consumer, 2));

    word = kvt_ring_sleep_word(&m.consumer);
    assert_non_null(word);
    kvt_ring_close(&m.producer);
    assert_int_equal(atomic_load(word), KVT_RING_AWAKE);
    assert_null(kvt_ring_sleep_word(&m.consumer));
    teardown(&m);
}

struct stream {
    struct mapping m;
    uint64_t count;
    uint64_t slept;
};

static void *produce(void *arg)
{
    struct stream *s = arg;
    struct kvt_rng rng = {1};

    for (uint64_t n = 0; n < s->count;) {
        if (push_frame(&s->m.producer, n))
            n++;
        else
            sched_yield();
        if (kvt_rng_below(&rng, 1000) == 0)
            usleep(50); /* let the consumer run dry */
    }
    return NULL;
}

static void test_two_threads(void **state)
{
    struct stream s = {.count = 200000};
    pthread_t thread;

    (void)state;
    setup(&s.m, CAPACITY);
    assert_int_equal(pthread_create(&thread, NULL, produce, &s), 0);
    for (uint64_t n = 0; n < s.count;) {
        if (pop_frame(&s.m.consumer, n)) {
            n++;
            continue;
        }
        if (kvt_ring_sleep(&s.m.consumer)) {
            struct pollfd wait = {.fd = s.m.fd, .events = POLLIN};

            s.slept++;
            assert_int_equal(poll(&wait, 1, 10000), 1); /* a lost wake-up would time out */
            (void)rung(s.m.fd);
        }
        kvt_ring_awake(&s.m.consumer);
    }
    pthread_join(thread, NULL);
    assert_true(s.slept > 0);
    print_message("             slept %llu times over %llu frames\n", (unsigned long long)s.slept,
                  (unsigned long long)s.count);
    teardown(&s.m);
}

/* The same, asleep on the word. */
static void test_two_threads_by_word(void **state)
{
    struct stream s = {.count = 100000};
    pthread_t thread;

    (void)state;
    setup(&s.m, CAPACITY);
    assert_int_equal(pthread_create(&thread, NULL, produce, &s), 0);
    for (uint64_t n = 0; n < s.count;) {
        _Atomic uint32_t *word;

        if (pop_frame(&s.m.consumer, n)) {
            n++;
            continue;
        }
        word = kvt_ring_sleep_word(&s.m.consumer);
        if (word == NULL)
            continue;
        s.slept++;
        kvt_ring_word_wait(word, INT64_C(600000000000)); /* a lost wake-up: the test times out */
    }
    pthread_join(thread, NULL);
    assert_true(s.slept > 0);
    assert_false(rung(s.m.fd));
    teardown(&s.m);
}

/* Consumer against a producer that writes nonsense: an error or a frame inside the buffer. */
static void test_hostile_producer(void **state)
{
    struct kvt_rng rng = {test_seed()};
    uint64_t corrupt = 0;

    (void)state;
    for (int round = 0; round < 20000; round++) {
        struct mapping m;
        const void *frame = NULL;
        int bytes = 0;

        setup(&m, CAPACITY);
        for (uint64_t n = 0; n < 4; n++)
            push_frame(&m.producer, n);
        if (round % 2) { /* frame words */
            uint64_t word = kvt_rng_next(&rng);
            if (round % 4 == 1) /* plausible kind, wild size */
                word = (round % 8 == 1 ? 0x4b564652ull : 0x4b564649ull) << 32 | (uint32_t)word;
            memcpy(m.producer.data, &word, sizeof word);
        } else { /* the position */
            atomic_store(&m.producer.shared->tail,
                         round % 4 ? kvt_rng_next(&rng) : kvt_rng_below(&rng, 2 * CAPACITY));
        }
        for (int i = 0; i < 5 && (bytes = kvt_ring_peek(&m.consumer, &frame)) > 0; i++) {
            const uint8_t *at = frame;

            assert_true(at >= m.consumer.data + 8 &&
                        at + bytes <= m.consumer.data + m.consumer.capacity);
            kvt_ring_pop(&m.consumer);
        }
        assert_true(bytes >= 0 || bytes == KVT_E_CORRUPT);
        corrupt += bytes < 0;
        teardown(&m);
    }
    assert_true(corrupt > 10000);
}

/* Producer against a consumer that moves its position: full, or a reservation inside the buffer. */
static void test_hostile_consumer(void **state)
{
    struct kvt_rng rng = {test_seed()};
    struct mapping m;

    (void)state;
    setup(&m, CAPACITY);
    for (int round = 0; round < 100000; round++) {
        uint32_t bytes = 8 * (1 + (uint32_t)kvt_rng_below(&rng, 128));
        uint8_t *at;

        atomic_store(&m.producer.shared->head,
                     round % 2 ? kvt_rng_next(&rng)
                               : m.producer.tail - kvt_rng_below(&rng, 2 * CAPACITY));
        at = kvt_ring_reserve(&m.producer, bytes);
        if (at) {
            assert_true(at >= m.producer.data + 8 &&
                        at + bytes <= m.producer.data + m.producer.capacity);
            memset(at, 0x11, bytes);
            kvt_ring_push(&m.producer, bytes);
        }
    }
    teardown(&m);
}

/* Each check alone, with everything else right. */
static void test_malformed_words(void **state)
{
    const uint64_t filler = 0x4b564649ull << 32, message = 0x4b564652ull << 32;
    struct mapping m;
    const void *frame;
    uint64_t word;

    (void)state;
    setup(&m, CAPACITY);
    atomic_store(&m.producer.shared->tail, CAPACITY + 8); /* more than there is room for */
    word = message | 8;
    memcpy(m.producer.data, &word, sizeof word);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), KVT_E_CORRUPT);
    atomic_store(&m.producer.shared->tail, 16);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), 8);
    word = message | 16; /* longer than what was published */
    memcpy(m.producer.data, &word, sizeof word);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), KVT_E_CORRUPT);
    atomic_store(&m.producer.shared->tail, CAPACITY);
    word = message | (CAPACITY / 4 + 8); /* longer than a frame may be */
    memcpy(m.producer.data, &word, sizeof word);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), KVT_E_CORRUPT);
    word = message | 12; /* not whole words */
    memcpy(m.producer.data, &word, sizeof word);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), KVT_E_CORRUPT);
    word = filler | (CAPACITY - 16); /* a filler that ends before the end */
    memcpy(m.producer.data, &word, sizeof word);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), KVT_E_CORRUPT);
    word = filler | (CAPACITY - 8); /* a right one: the ring is empty after it */
    memcpy(m.producer.data, &word, sizeof word);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), 0);
    /* the consumer's position beyond ours: the ring looks full, for ever */
    atomic_store(&m.producer.shared->head, 8);
    assert_null(kvt_ring_reserve(&m.producer, 8));
    teardown(&m);
}

static void test_attach_refuses_nonsense(void **state)
{
    struct kvt_ring ring;
    struct mapping m;

    (void)state;
    setup(&m, CAPACITY);
    atomic_store(&m.producer.shared->tail, 2 * CAPACITY);
    assert_int_equal(kvt_ring_init(&ring, m.bytes + GUARD, CAPACITY, -1, 0), KVT_E_CORRUPT);
    atomic_store(&m.producer.shared->tail, 12);
    assert_int_equal(kvt_ring_init(&ring, m.bytes + GUARD, CAPACITY, -1, 0), KVT_E_CORRUPT);
    atomic_store(&m.producer.shared->tail, 16);
    assert_int_equal(kvt_ring_init(&ring, m.bytes + GUARD, CAPACITY, -1, 0), 0);
    teardown(&m);
}

/* A closed ring wakes whoever sleeps on it, is never slept on again, and still has its frames. */
static void test_close(void **state)
{
    struct pollfd fd;
    struct mapping m;
    const void *frame;

    (void)state;
    setup(&m, CAPACITY);
    fd = (struct pollfd){.fd = m.fd, .events = POLLIN};
    assert_non_null(kvt_ring_reserve(&m.producer, 8));
    kvt_ring_push(&m.producer, 8);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), 8);
    kvt_ring_pop(&m.consumer);
    assert_int_equal(kvt_ring_sleep(&m.consumer), 1);
    assert_int_equal(kvt_ring_closed(&m.consumer), 0);
    assert_int_equal(poll(&fd, 1, 0), 0);
    kvt_ring_close(&m.producer);
    assert_int_equal(poll(&fd, 1, 0), 1);
    kvt_ring_awake(&m.consumer);
    assert_int_equal(kvt_ring_closed(&m.consumer), 1);
    assert_int_equal(kvt_ring_sleep(&m.consumer), 0);
    assert_int_equal(kvt_ring_peek(&m.consumer, &frame), 0);
    kvt_ring_close(&m.producer); /* twice is once */
    assert_int_equal(kvt_ring_closed(&m.consumer), 1);
    teardown(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_fill_and_empty),
        cmocka_unit_test(test_random_interleaving),
        cmocka_unit_test(test_largest_frame),
        cmocka_unit_test(test_push_less_than_reserved),
        cmocka_unit_test(test_reserve_without_push),
        cmocka_unit_test(test_sleep_handshake),
        cmocka_unit_test(test_quiet_frames_and_a_bell),
        cmocka_unit_test(test_sleep_on_the_word),
        cmocka_unit_test(test_two_threads),
        cmocka_unit_test(test_two_threads_by_word),
        cmocka_unit_test(test_hostile_producer),
        cmocka_unit_test(test_hostile_consumer),
        cmocka_unit_test(test_malformed_words),
        cmocka_unit_test(test_attach_refuses_nonsense),
        cmocka_unit_test(test_close),
    };

    return cmocka_run_group_tests_name("ring", tests, NULL, NULL);
}
