/* Two-ended restore: the engine computes blocks from the front while blocks arrive from the back.
 *
 *   blocks   0 ........ front | not yet | back ........ end
 *            computed in seq             loaded into the staging, the last ones first
 *
 * Where the two meet is found by going there: the bandwidth and the rate of computing are needed
 * for no more than the size of a step, and for whether the next one is worth it. A step cannot be
 * broken off, so the engine computes no more blocks than it is expected to be done with when the
 * loads of the others are; when that is less than one, it waits for them, and when they do not
 * come, computes after all. What is expected is what the plan said, then what was seen. Then the
 * computed rows are copied out of the context to the front of the staging, and the caller gives the
 * whole to the context by one call, in ascending position: attention sums in cell order, so any
 * other order would change the logits.
 *
 * A block that does not load ends the chain: either the engine computes past it, or what lies
 * behind it is given up, whichever costs fewer tokens. Threads: one at a time. llama_decode() runs
 * in the caller's thread, loads on the cache's.
 */
#include <errno.h>
#include <stdbool.h>
#include <string.h>

#include "llama_internal.h"

#define FLIGHTS 4u      /* loads asked for at a time: they go on while a step is computed */
#define CHUNKS 16u      /* into which what is to be loaded is divided, at most */
#define CHUNK_BLOCKS 4u /* at least: a request has a price */
#define STEP_TOKENS \
    64u          /* computed at a time, where that many are to be: fewer do not fill the engine */
#define STEPS 8u /* into which what is expected to be computed is divided */
#define OVERDUE 1.5 /* times what was expected, after which a load is not waited for */

struct flight {
    struct kvt_req *req; /* NULL: ended */
    size_t from, to;     /* blocks */
    int64_t asked_ns;
};

struct hybrid {
    struct kvt_llama *llama;
    struct kvt_llama_report *report;
    struct kvt_pool *pool;
    const int32_t *tokens;
    int32_t seq;
    size_t front;  /* blocks computed */
    size_t back;   /* blocks [back, end) are loaded */
    size_t end;    /* of what the restore will give */
    size_t asked;  /* blocks [asked, ..) are loaded or asked for */
    size_t blocks; /* of the staging */
    size_t step, chunk;
    double load_s, compute_s;       /* seconds a block, as expected */
    int64_t landed_ns;              /* when the last load ended; 0: none has */
    bool closed;                    /* nothing more is asked for */
    int64_t deadline_ns;            /* of the loads, absolute; 0: none */
    struct flight flights[FLIGHTS]; /* the oldest, nearest to the end, first */
    size_t flight_count;
};

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

static int64_t later(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Ask for the chunk before those that are asked for, as far as `floor`. */
static int ask(struct hybrid *h, size_t floor)
{
    struct kvt_llama *llama = h->llama;
    struct kvt_load_opts opts = {.struct_size = sizeof(opts), .min_level = llama->min_level};
    const size_t from = h->asked > floor + h->chunk ? h->asked - h->chunk : floor;

    if (h->deadline_ns != 0) {
        opts.deadline_ns = h->deadline_ns - kvt_llama_now_ns();
        if (opts.deadline_ns <= 0)
            return -EAGAIN;
    }
    struct flight *flight = &h->flights[h->flight_count];
    int rc = kvt_load(llama->ns, h->pool, &llama->keys[from], &llama->ids[from], h->asked - from,
                      &opts, &flight->req);
    if (rc != 0)
        return rc;
    flight->from = from;
    flight->to = h->asked;
    flight->asked_ns = kvt_llama_now_ns();
    h->asked = from;
    h->flight_count++;
    return 0;
}

/* Blocks [bad, next_good) did not load. What is behind them is of use only if the engine computes
 * them; what is before them only if the restore ends there. The cheaper of the two, in tokens. */
static void chain_ends(struct hybrid *h, const struct flight *flight, size_t bad, size_t next_good)
{
    if (next_good < h->end && (h->report->late || next_good - h->front <= h->end - bad)) {
        h->back = next_good;
        h->closed = true;
        return;
    }
    h->end = bad;
    h->back = flight->from;
}

/* Note how the oldest load ended: it is the one next to what is loaded. */
static void landed(struct hybrid *h, const struct flight *flight)
{
    struct kvt_req_report done = {.struct_size = sizeof(done)};
    size_t n = 0, bad;
    const int32_t *status = kvt_req_status(flight->req, &n);

    if (kvt_req_report(flight->req, &done) == 0) {
        h->report->blocks_dram += done.blocks_dram;
        h->report->blocks_disk += done.blocks_disk;
        h->report->blocks_remote += done.blocks_remote;
        h->report->bytes_moved += done.bytes_moved;
    }
    if (done.blocks_ok == n && n > 0) { /* the newest counts for half */
        const int64_t began = later(h->landed_ns, flight->asked_ns);
        /* a later one may have ended before it: no time is negative */
        h->landed_ns = later(began, flight->asked_ns + done.elapsed_ns);
        h->load_s += ((double)(h->landed_ns - began) * 1e-9 / (double)n - h->load_s) / 2;
    }
    const size_t computed = h->front > flight->from ? h->front - flight->from : 0;
    size_t good = n; /* blocks [good, n) of it are there */
    while (good > 0 && status[good - 1] == 0)
        good--;
    if (good <= computed) {
        h->back = flight->from;
        return;
    }
    h->report->late |= status[good - 1] == KVT_E_DEADLINE;
    for (bad = computed; status[bad] == 0;)
        bad++;
    chain_ends(h, flight, flight->from + bad, flight->from + good);
}

static void drop_oldest(struct hybrid *h)
{
    kvt_req_free(h->flights[0].req); /* waits: no byte comes after it */
    h->flight_count--;
    memmove(&h->flights[0], &h->flights[1], h->flight_count * sizeof(h->flights[0]));
}

static void cancel_all(struct hybrid *h)
{
    for (size_t i = 0; i < h->flight_count; i++)
        kvt_req_cancel(h->flights[i].req);
    while (h->flight_count > 0)
        drop_oldest(h);
}

/* Note what has ended, oldest first; wait that long for the oldest. */
static void reap(struct hybrid *h, int64_t wait_ns)
{
    while (h->flight_count > 0 && kvt_req_wait(h->flights[0].req, wait_ns) == 1) {
        landed(h, &h->flights[0]);
        drop_oldest(h);
        if (h->closed)
            cancel_all(h); /* they lie before what is to be computed */
        wait_ns = 0;
    }
}

/* Compute that many blocks; not further than what is loaded. */
static int compute_step(struct hybrid *h, size_t blocks)
{
    const size_t unit = h->llama->block_tokens;
    const size_t to = least(h->front + blocks, h->back);
    int64_t start = kvt_llama_now_ns();

    int rc = kvt_llama_decode(h->llama, h->seq, h->tokens, h->front * unit, to * unit, 0);
    h->report->compute_ns += kvt_llama_now_ns() - start;
    if (rc == 0) {
        h->front = to;
        h->compute_s = (double)h->report->compute_ns * 1e-9 / (double)to;
    }
    return rc;
}

/* Seconds until what is neither computed nor loaded would be loaded. */
static double load_left_s(const struct hybrid *h)
{
    double left = h->load_s * (double)(h->back - h->front);

    if (h->flight_count > 0)
        left -= (double)(kvt_llama_now_ns() - later(h->landed_ns, h->flights[0].asked_ns)) * 1e-9;
    return left > 0 ? left : 0;
}

/* How many blocks the engine can compute while all others are loaded. */
static size_t worth_computing(const struct hybrid *h)
{
    if (h->closed)
        return h->back - h->front;
    return (size_t)(load_left_s(h) / (h->load_s + h->compute_s));
}

/* Wait for the oldest load: no longer than computing all would take, nor much longer than expected.
 * false: it has not come, and slower ones are to be expected. */
static bool wait_for_loads(struct hybrid *h)
{
    const double all = h->compute_s * (double)(h->back - h->front);
    const double late = OVERDUE * load_left_s(h) + h->load_s * (double)h->chunk;
    const size_t before = h->flight_count;

    reap(h, (int64_t)((late < all ? late : all) * 1e9));
    if (h->flight_count < before)
        return true;
    h->load_s = 2 * h->load_s + h->compute_s;
    return false;
}

static int meet(struct hybrid *h)
{
    int rc = 0;

    while (h->front < h->back && rc == 0) {
        size_t blocks = worth_computing(h);
        while (!h->closed && h->flight_count < FLIGHTS && h->asked > h->front + blocks)
            h->closed = ask(h, h->front + blocks) != 0;
        reap(h, 0);
        if (h->front >= h->back)
            break;
        if (blocks > 0)
            rc = compute_step(h, least(blocks, h->step));
        else if (h->flight_count == 0 || !wait_for_loads(h))
            rc = compute_step(h, 1);
    }
    cancel_all(h);
    return rc;
}

/* Rows [0, cells) of the sequence to the front of the staging, part by part. */
static int copy_front(struct hybrid *h)
{
    struct kvt_llama *llama = h->llama;
    const uint32_t unit = llama->block_tokens, parts = 2 * llama->shape.layers;
    const uint32_t cells = (uint32_t)(h->front * unit), all = (uint32_t)(h->blocks * unit);
    struct kvt_staging rows = {NULL, 0};

    if (cells == 0)
        return 0;
    int rc = kvt_llama_copy_rows(llama, h->seq, 0, cells, &rows);
    for (uint32_t part = 0; part < parts && rc == 0; part++)
        memcpy(llama->load.bytes + kvt_blob_rows_offset(&llama->shape, part, all),
               rows.bytes + kvt_blob_rows_offset(&llama->shape, part, cells),
               (size_t)cells * llama->shape.rows[part].bytes);
    kvt_staging_free(&rows);
    return rc;
}

static void sizes(struct hybrid *h, const struct kvt_plan *plan)
{
    const size_t unit = h->llama->block_tokens;
    const size_t batch = most(llama_n_batch(h->llama->ctx) / unit, 1);
    const size_t ubatch = most(llama_n_ubatch(h->llama->ctx) / unit, 1);

    h->step = most(plan->first / STEPS, (STEP_TOKENS + unit - 1) / unit);
    h->step = least(h->step, least(batch, ubatch));
    h->chunk = most(plan->count / CHUNKS, CHUNK_BLOCKS);
    h->load_s = plan->load_s / (double)plan->count;
    h->compute_s = plan->recompute_s / (double)(plan->first + plan->count);
}

long kvt_llama_hybrid(struct kvt_llama *llama, int32_t seq, const int32_t *tokens,
                      const struct kvt_plan *plan, struct kvt_llama_report *report,
                      size_t *loaded_from)
{
    const size_t end = plan->first + plan->count;
    struct hybrid h = {.llama = llama,
                       .report = report,
                       .tokens = tokens,
                       .seq = seq,
                       .back = end,
                       .end = end,
                       .asked = end,
                       .blocks = end};

    sizes(&h, plan);
    if (plan->deadline_s > 0)
        h.deadline_ns = kvt_llama_now_ns() + (int64_t)(plan->recompute_s * 1e9);
    int rc =
        kvt_llama_pool(llama, llama->load.bytes, (uint32_t)(end * llama->block_tokens), &h.pool);
    if (rc == 0)
        rc = meet(&h);
    kvt_pool_unregister(h.pool);
    if (rc == 0)
        rc = copy_front(&h);
    llama_memory_seq_rm(llama_get_memory(llama->ctx), seq, -1, -1);
    *loaded_from = h.front;
    report->tokens_computed = h.front * llama->block_tokens;
    return rc == 0 ? (long)h.end : rc;
}
