/* Pinning of the arena: plan, thread, and the host's hook. See pin.h for the states.
 *
 * Pinning a piece may take a third of a second, so nothing waits for it but kvt_pin_now() and the
 * join in kvt_pin_stop(). A refusal anywhere lets go of everything: half pinned memory would be
 * neither fast nor within its limit. Allocates nothing.
 */
#include "client/pin.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "base/checked.h"
#include "client/client.h"
#include "client/options.h"

/* ---- the plan ------------------------------------------------------------------------------ */

bool kvt_pin_plan(uint64_t bytes, uint64_t row_bytes, uint64_t max_bytes, struct kvt_pin_plan *plan)
{
    if (bytes == 0 || row_bytes == 0 || row_bytes > max_bytes)
        return false;
    plan->bytes = bytes;
    plan->piece_bytes = max_bytes / row_bytes * row_bytes;
    plan->count = bytes / plan->piece_bytes + (bytes % plan->piece_bytes != 0);
    return true;
}

void kvt_pin_piece(const struct kvt_pin_plan *plan, uint64_t i, uint64_t *offset, uint64_t *bytes)
{
    *offset = i * plan->piece_bytes;
    *bytes = KVT_MIN(plan->piece_bytes, plan->bytes - *offset);
}

uint64_t kvt_pin_cut(const struct kvt_pin_plan *plan, uint64_t offset, uint64_t bytes)
{
    return KVT_MIN(bytes, plan->piece_bytes - offset % plan->piece_bytes);
}

/* ---- the host's hook ----------------------------------------------------------------------- */

static int host_pin(void *ctx, void *base, uint64_t bytes)
{
    (void)ctx;
    if (mlock(base, bytes) == 0)
        return 0;
    return errno == ENOSYS ? KVT_E_UNSUPPORTED : -errno;
}

static void host_unpin(void *ctx, void *base, uint64_t bytes)
{
    (void)ctx;
    (void)munlock(base, bytes); /* fails only for memory that is not ours */
}

const struct kvt_pin_ops *kvt_pin_host_ops(void)
{
    static const struct kvt_pin_ops ops = {"mlock", host_pin, host_unpin, NULL};
    return &ops;
}

/* ---- pinning ------------------------------------------------------------------------------- */

void kvt_pin_init(struct kvt_pin *pin, void *base, uint64_t bytes, uint64_t row_bytes,
                  const struct kvt_log *log)
{
    memset(pin, 0, sizeof(*pin));
    pin->base = base;
    pin->log = *log;
    (void)kvt_pin_plan(bytes, KVT_MIN(row_bytes, KVT_PIN_PIECE_BYTES), KVT_PIN_PIECE_BYTES,
                       &pin->plan);
}

static void let_go(struct kvt_pin *pin)
{
    uint64_t left = atomic_load_explicit(&pin->pinned_bytes, memory_order_relaxed);
    for (uint64_t i = 0, offset, bytes; left > 0; i++, left -= bytes) {
        kvt_pin_piece(&pin->plan, i, &offset, &bytes);
        pin->ops.unpin(pin->ops.ctx, pin->base + offset, bytes);
    }
    atomic_store_explicit(&pin->pinned_bytes, 0, memory_order_relaxed);
}

static bool stopped(struct kvt_pin *pin)
{
    return atomic_load_explicit(&pin->stop, memory_order_relaxed) != 0;
}

/* Piece by piece, until one is refused or somebody wants to stop. */
static int pin_all(struct kvt_pin *pin)
{
    for (uint64_t i = 0, offset, bytes; i < pin->plan.count; i++) {
        if (stopped(pin))
            return -EINTR; /* whoever stops us lets go */
        kvt_pin_piece(&pin->plan, i, &offset, &bytes);
        if (pin->huge && !kvt_huge_make(pin->base + offset, bytes, &pin->stop))
            pin->huge = false; /* there are none left: not looked for again */
        int rc = pin->ops.pin(pin->ops.ctx, pin->base + offset, bytes);
        if (rc != 0) {
            let_go(pin);
            atomic_store_explicit(&pin->error, rc, memory_order_relaxed);
            atomic_store_explicit(&pin->state, KVT_PIN_FAILED, memory_order_release);
            return rc;
        }
        atomic_fetch_add_explicit(&pin->pinned_bytes, bytes, memory_order_relaxed);
    }
    atomic_store_explicit(&pin->state, KVT_PIN_READY, memory_order_release);
    return 0;
}

static void *pin_main(void *arg)
{
    struct kvt_pin *pin = arg;
    int rc = pin_all(pin);
    if (rc != 0 && rc != -EINTR) {
        char text[400];
        kvt_pin_describe(pin->ops.name, pin->plan.bytes, rc, text, sizeof(text));
        kvt_log(&pin->log, KVT_LOG_WARN, "%s (going on unpinned)", text);
    }
    return NULL;
}

/* Ready to pin by `ops`: true when there is something to do. */
static bool begin(struct kvt_pin *pin, const struct kvt_pin_ops *ops)
{
    if (pin->ops.pin == ops->pin && pin->ops.ctx == ops->ctx && kvt_pin_state(pin) != KVT_PIN_OFF)
        return false;
    kvt_pin_stop(pin);
    pin->ops = *ops;
    atomic_store_explicit(&pin->stop, 0, memory_order_relaxed);
    atomic_store_explicit(&pin->state, KVT_PIN_PINNING, memory_order_release);
    return true;
}

int kvt_pin_start(struct kvt_pin *pin, const struct kvt_pin_ops *ops)
{
    if (!begin(pin, ops))
        return 0;
    int rc = kvt_thread_start(&pin->thread, "kvt-pin", pin_main, pin);
    pin->running = rc == 0;
    if (rc != 0)
        atomic_store_explicit(&pin->state, KVT_PIN_OFF, memory_order_release);
    return rc;
}

int kvt_pin_now(struct kvt_pin *pin, const struct kvt_pin_ops *ops)
{
    if (begin(pin, ops))
        return pin_all(pin);
    if (pin->running)
        (void)pthread_join(pin->thread, NULL);
    pin->running = false;
    return atomic_load_explicit(&pin->error, memory_order_relaxed);
}

void kvt_pin_stop(struct kvt_pin *pin)
{
    atomic_store_explicit(&pin->stop, 1, memory_order_relaxed);
    if (pin->running)
        (void)pthread_join(pin->thread, NULL);
    pin->running = false;
    let_go(pin);
    atomic_store_explicit(&pin->error, 0, memory_order_relaxed);
    atomic_store_explicit(&pin->state, KVT_PIN_OFF, memory_order_release);
}

/* ---- for people ---------------------------------------------------------------------------- */

enum kvt_pin_state kvt_pin_state(const struct kvt_pin *pin)
{
    return (enum kvt_pin_state)atomic_load_explicit(&pin->state, memory_order_acquire);
}

uint64_t kvt_pin_bytes(const struct kvt_pin *pin)
{
    return atomic_load_explicit(&pin->pinned_bytes, memory_order_relaxed);
}

const char *kvt_pin_text(const struct kvt_pin *pin, char *buffer, size_t len)
{
    switch (kvt_pin_state(pin)) {
    case KVT_PIN_OFF:
        return "off";
    case KVT_PIN_PINNING:
        return "pinning";
    case KVT_PIN_READY:
        return "ready";
    case KVT_PIN_FAILED:
        break;
    }
    int error = atomic_load_explicit(&pin->error, memory_order_relaxed);
    (void)snprintf(buffer, len, "failed: %s", kvt_strerror(error));
    return buffer;
}

void kvt_pin_describe(const char *name, uint64_t bytes, int error, char *text, size_t len)
{
    char size[32], limit[32] = "unlimited";
    struct rlimit memlock;
    (void)kvt_size_text(bytes, size, sizeof(size));
    if (error != -EPERM && error != -ENOMEM && error != -EAGAIN) {
        (void)snprintf(text, len, "%s of DRAM cannot be pinned by %s: %s", size, name,
                       kvt_strerror(error));
        return;
    }
    if (getrlimit(RLIMIT_MEMLOCK, &memlock) == 0 && memlock.rlim_cur != RLIM_INFINITY)
        (void)kvt_size_text(memlock.rlim_cur, limit, sizeof(limit));
    (void)snprintf(text, len,
                   "%s of DRAM cannot be pinned by %s: %s; the limit of locked memory "
                   "(RLIMIT_MEMLOCK) is %s: raise it (ulimit -l, LimitMEMLOCK= of a service, "
                   "--ulimit memlock= of a container), give CAP_IPC_LOCK, or make dram smaller",
                   size, name, kvt_strerror(error), limit);
}
