/* Goal: `kvtier bench plan` measures what it says, as JSON and as text, cleans up after itself, and
 * says what is wrong with what it is given. The figures themselves are those of a busy machine and
 * a tiny model: only that they are there, and fit each other, is tested. The same for the slowed
 * drive under it, which must not be faster than it was told to be.
 * Method: the built binary; a wrapper over files in memory.
 */
#include "tool_help.h"

#include <math.h>

#include "base/clock.h"
#include "io/io.h"
#include "slow_io.h"

static int files_left(const char *dir)
{
    DIR *list = opendir(dir);
    int count = 0;

    assert_non_null(list);
    for (struct dirent *entry; (entry = readdir(list)) != NULL;)
        count += strncmp(entry->d_name, "kvtier-bench-plan", 17) == 0;
    closedir(list);
    return count;
}

static void it_measures_and_cleans_up(void **state)
{
    (void)state;
    struct outcome outcome;
    const char *const words[] = {"plan", "--model", model, "--tokens", "256", "--reps",
                                 "1",    "--dir",   work,  "--json",   NULL};
    run_tool(&outcome, "bench", words);
    if (outcome.status != 0)
        fail_msg("%d: %s", outcome.status, outcome.err);
    json_t *doc = json_loads(outcome.out, 0, NULL);
    assert_non_null(doc);
    const json_t *cells = json_object_get(doc, "cells");
    assert_int_equal(json_array_size(cells), 15);
    double worst = 0, even = number(doc, "break_even_bytes_per_s", NULL);
    assert_true(even > 0 && number(doc, "bytes_per_token", NULL) > 0);
    for (size_t i = 0; i < 15; i++) {
        const json_t *cell = json_array_get(cells, i);
        const json_t *load = json_object_get(cell, "load_all_ms");
        double best = number(cell, "recompute_ms", NULL), plan = number(cell, "plan_ms", NULL);
        if (load != NULL)
            best = fmin(best, json_number_value(load));
        assert_true(plan > 0 && best > 0);
        assert_true(fabs(number(cell, "regret", NULL) - plan / best) < 1e-6 * plan / best);
        worst = fmax(worst, plan / best);
        if (json_is_true(json_object_get(cell, "same_work")))
            assert_true(number(cell, "loaded_tokens", NULL) == 0 &&
                        number(cell, "regret", NULL) <=
                            number(doc, "worst_regret_same_work", NULL));
        assert_true(number(cell, "loaded_tokens", NULL) >= 0);
        assert_true(number(cell, "loaded_tokens", NULL) <= number(cell, "tokens", NULL));
        assert_non_null(json_object_get(json_object_get(cell, "expected_ms"), "load_all"));
    }
    assert_true(fabs(number(doc, "worst_regret", NULL) - worst) < 1e-6 * worst);
    assert_non_null(json_object_get(json_object_get(doc, "collapse"), "loads_down"));
    assert_int_equal(files_left(work), 0);
    json_decref(doc);

    const char *const text[] = {"plan",   "--model", model,   "--tokens", "64",
                                "--reps", "1",       "--dir", work,       NULL};
    run_tool(&outcome, "bench", text);
    assert_int_equal(outcome.status, 0);
    assert_non_null(strstr(outcome.out, "worst regret"));
    assert_non_null(strstr(outcome.out, "as it is"));
    assert_string_equal(outcome.err, "");
    assert_int_equal(files_left(work), 0);
}

static void it_says_what_is_wrong(void **state)
{
    (void)state;
    struct outcome outcome;
    const char *const no_model[] = {"plan", "--model", "/nowhere/x.gguf", NULL};
    run_tool(&outcome, "bench", no_model);
    assert_int_equal(outcome.status, 1);
    assert_non_null(strstr(outcome.err, "/nowhere/x.gguf"));
    const char *const no_dir[] = {"plan", "--model", model, "--dir", "/nowhere", NULL};
    run_tool(&outcome, "bench", no_dir);
    assert_int_equal(outcome.status, 1);
    assert_non_null(strstr(outcome.err, "/nowhere"));
    const char *const few[] = {"plan", "--tokens", "3", NULL};
    run_tool(&outcome, "bench", few);
    assert_int_equal(outcome.status, 2);
    const char *const help[] = {"plan", "--help", NULL};
    run_tool(&outcome, "bench", help);
    assert_int_equal(outcome.status, 0);
    assert_non_null(strstr(outcome.out, "--tokens"));
}

/* ---- the slowed drive ---------------------------------------------------------------------- */

static double seconds_to_read(struct kvt_io *io, int file, unsigned requests, size_t bytes,
                              uint8_t *buffer)
{
    static struct kvt_io_req reqs[16];
    struct kvt_io_req *out[16];
    struct kvt_clock clock = kvt_clock_system();
    int64_t start = kvt_clock_now(&clock);

    for (unsigned i = 0; i < requests; i++) {
        reqs[i] = (struct kvt_io_req){.kind = KVT_IO_READ, .file = file, .iov_count = 1};
        reqs[i].offset = i * bytes;
        reqs[i].iov[0] = (struct iovec){buffer + i * bytes, bytes};
        assert_int_equal(io->ops->submit(io, &reqs[i]), 0);
    }
    for (unsigned done = 0; done < requests;) {
        unsigned got = io->ops->reap(io, out, 16);
        for (unsigned i = 0; i < got; i++)
            assert_int_equal(out[i]->result, (int64_t)bytes);
        done += got;
        if (got == 0)
            usleep(200);
    }
    return (double)(kvt_clock_now(&clock) - start) * 1e-9;
}

static void a_slowed_drive_is_slow(void **state)
{
    (void)state;
    struct kvt_slow_speed speed = {0};
    struct kvt_io_posix_params params = {.path = work, .threads = 2, .direct = 0};
    struct kvt_io *inner = NULL;
    uint8_t *buffer = aligned_alloc(4096, 1 << 20), *back = aligned_alloc(4096, 1 << 20);

    assert_true(buffer != NULL && back != NULL);
    assert_int_equal(kvt_io_posix_new(&params, &inner), 0);
    struct kvt_io *io = kvt_slow_io_new(&speed, inner);
    assert_non_null(io);
    int file = io->ops->open(io, "slow", KVT_IO_OPEN_CREATE);
    assert_true(file >= 0);
    for (int i = 0; i < 1 << 20; i++)
        buffer[i] = (uint8_t)(i * 31 >> 8);
    assert_int_equal(kvt_io_write_now(io, file, 0, buffer, 1 << 20), 1 << 20);
    assert_int_equal(io->ops->size(io, file), 1 << 20);
    double fast = seconds_to_read(io, file, 16, 65536, back);
    assert_memory_equal(buffer, back, 1 << 20);
    atomic_store(&speed.bytes_per_s, 10 << 20); /* 1 MiB: 0.1 s, however many at a time */
    double slow = seconds_to_read(io, file, 16, 65536, back);
    atomic_store(&speed.latency_ns, 50000000);
    double late = seconds_to_read(io, file, 1, 4096, back);
    printf("1 MiB in %.4f s, slowed down %.4f s; 4 KiB with latency %.4f s\n", fast, slow, late);
    assert_true(slow >= 0.0999 && late >= 0.0499);
    assert_true(kvt_io_read_now(io, file, 0, back, 65536) == 65536); /* its event fd wakes us */
    io->ops->close(io, file);
    assert_int_equal(io->ops->unlink(io, "slow"), 0);
    io->ops->destroy(io);
    free(buffer);
    free(back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_measures_and_cleans_up),
        cmocka_unit_test(it_says_what_is_wrong),
        cmocka_unit_test(a_slowed_drive_is_slow),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
