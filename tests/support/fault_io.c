/* The lying backend: see fault_io.h.
 *
 * A data request becomes a shadow request to the inner backend, so that what is asked of inner may
 * differ from what the submitter asked; the shadow's result is translated when it is reaped.
 * Lists: in inner -> late (when it takes time) -> held (when holding) -> ready. The event fd is an
 * epoll over inner's and one of our own, rung while the ready list is not empty.
 */
#include "support/fault_io.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/checked.h"
#include "base/rng.h"
#include "io/io_common.h"

#define OPS 11
#define SECTOR 512u

struct shadow {
    struct kvt_io_req req;  /* what inner gets; user is the submitter's request */
    struct fault_rule rule; /* the one that fired; action 0: none */
    uint64_t bytes;         /* what the submitter asked for */
    uint8_t *torn;          /* page made up for FAULT_TORN, or a copy of all with FAULT_FLIP */
};

struct late {
    struct kvt_io_req *req;
    int64_t due_ns; /* INT64_MAX: never */
};

struct list {
    struct kvt_io_req **items;
    size_t count, room;
};

struct fault_io {
    struct kvt_io io;
    struct kvt_io *inner;
    struct kvt_rng rng;
    pthread_mutex_t lock; /* of the rules: a test may change them while the owner works */
    struct fault_rule rules[FAULT_RULES_MAX];
    int rule_count;
    struct fault_rule fired; /* the owner's copy of the one that fired last */
    uint64_t counts[OPS];
    char (*names)[KVT_IO_NAME_MAX]; /* by file number */
    int name_count;
    bool holding, dead;
    unsigned flying; /* shadows that inner has */
    struct list held, ready;
    struct late *late;
    size_t late_count, late_room;
    struct kvt_clock clock; /* now_ns NULL: nothing takes time */
    int64_t latency_min, latency_max, stalled_until;
    struct kvt_io *then;  /* of fault_io_remember() */
    uint64_t stale_reads; /* that brought other bytes */
    int own_fd, epoll_fd; /* -1 when inner has no event fd */
};

static struct fault_io *fault_of(struct kvt_io *io)
{
    return (struct fault_io *)io;
}

/* Running out of memory in a test is not a case to handle. */
static void *must(void *memory)
{
    if (!memory)
        abort();
    return memory;
}

/* ---- rules ---- */

static unsigned op_index(unsigned op)
{
    unsigned index = 0;

    while (op >>= 1)
        index++;
    return index;
}

/* Count the operation; the rule that fires for it, or NULL. */
static struct fault_rule *fire(struct fault_io *fault, unsigned op, const char *name)
{
    struct fault_rule *fired = NULL;

    fault->counts[op_index(op)]++;
    pthread_mutex_lock(&fault->lock);
    for (int i = 0; i < fault->rule_count; i++) {
        struct fault_rule *rule = &fault->rules[i];

        if (!(rule->ops & op) || (rule->name && strncmp(name, rule->name, strlen(rule->name)) != 0))
            continue;
        if (rule->seen++ < rule->skip || fired || (rule->times && rule->fired >= rule->times))
            continue;
        rule->fired++;
        fault->fired = *rule;
        fired = &fault->fired;
    }
    pthread_mutex_unlock(&fault->lock);
    return fired;
}

/* A control operation: 0 to go on, or the error to return. */
static int control(struct kvt_io *io, unsigned op, const char *name)
{
    struct fault_io *fault = fault_of(io);
    struct fault_rule *rule = fire(fault, op, name ? name : "");

    if (fault->dead)
        return -EIO;
    return rule && rule->action == FAULT_FAIL ? -rule->error : 0;
}

static const char *name_of(struct kvt_io *io, int file)
{
    struct fault_io *fault = fault_of(io);

    return file >= 0 && file < fault->name_count ? fault->names[file] : "";
}

static void remember_name(struct fault_io *fault, int file, const char *name)
{
    if (file >= fault->name_count) {
        int count = KVT_MAX(file + 1, fault->name_count * 2);

        fault->names = must(realloc(fault->names, (size_t)count * sizeof *fault->names));
        memset(fault->names + fault->name_count, 0,
               (size_t)(count - fault->name_count) * sizeof *fault->names);
        fault->name_count = count;
    }
    memcpy(fault->names[file], name, strlen(name) + 1);
}

/* ---- control calls ---- */

static int fault_open(struct kvt_io *io, const char *name, int flags)
{
    struct kvt_io *inner = fault_of(io)->inner;
    int file = control(io, FAULT_OPEN, name);

    if (!file)
        file = inner->ops->open(inner, name, flags);
    if (file >= 0)
        remember_name(fault_of(io), file, name);
    return file;
}

static void fault_close(struct kvt_io *io, int file)
{
    fault_of(io)->inner->ops->close(fault_of(io)->inner, file);
}

static int64_t fault_size(struct kvt_io *io, int file)
{
    return fault_of(io)->inner->ops->size(fault_of(io)->inner, file);
}

static int fault_truncate(struct kvt_io *io, int file, uint64_t bytes)
{
    struct kvt_io *inner = fault_of(io)->inner;
    int rc = control(io, FAULT_TRUNCATE, name_of(io, file));

    return rc ? rc : inner->ops->truncate(inner, file, bytes);
}

static int fault_allocate(struct kvt_io *io, int file, uint64_t bytes)
{
    struct kvt_io *inner = fault_of(io)->inner;
    int rc = control(io, FAULT_ALLOCATE, name_of(io, file));

    return rc ? rc : inner->ops->allocate(inner, file, bytes);
}

static int fault_punch(struct kvt_io *io, int file, uint64_t offset, uint64_t bytes)
{
    struct kvt_io *inner = fault_of(io)->inner;
    int rc = control(io, FAULT_PUNCH, name_of(io, file));

    return rc ? rc : inner->ops->punch(inner, file, offset, bytes);
}

static int fault_unlink(struct kvt_io *io, const char *name)
{
    struct kvt_io *inner = fault_of(io)->inner;
    int rc = control(io, FAULT_UNLINK, name);

    return rc ? rc : inner->ops->unlink(inner, name);
}

static int fault_rename(struct kvt_io *io, const char *from, const char *to)
{
    struct kvt_io *inner = fault_of(io)->inner;
    int rc = control(io, FAULT_RENAME, from);

    return rc ? rc : inner->ops->rename(inner, from, to);
}

static int fault_sync_dir(struct kvt_io *io)
{
    struct kvt_io *inner = fault_of(io)->inner;
    int rc = control(io, FAULT_SYNC_DIR, NULL);

    return rc ? rc : inner->ops->sync_dir(inner);
}

static int fault_list(struct kvt_io *io, int (*fn)(void *arg, const char *name), void *arg)
{
    struct kvt_io *inner = fault_of(io)->inner;
    int rc = control(io, FAULT_LIST, NULL);

    return rc ? rc : inner->ops->list(inner, fn, arg);
}

static int fault_lock(struct kvt_io *io, int64_t *owner_pid)
{
    return fault_of(io)->inner->ops->lock(fault_of(io)->inner, owner_pid);
}

static void fault_info(struct kvt_io *io, struct kvt_io_info *info)
{
    fault_of(io)->inner->ops->info(fault_of(io)->inner, info);
}

/* ---- data ---- */

static void list_add(struct list *list, struct kvt_io_req *req)
{
    if (list->count == list->room) {
        list->room = list->room ? list->room * 2 : 64;
        list->items = must(realloc(list->items, list->room * sizeof *list->items));
    }
    list->items[list->count++] = req;
}

static struct kvt_io_req *list_take(struct list *list, bool last)
{
    struct kvt_io_req *req = list->items[last ? list->count - 1 : 0];

    list->count--;
    if (!last)
        memmove(list->items, list->items + 1, list->count * sizeof *list->items);
    return req;
}

/* Our own fd is readable if and only if something is ready. */
static void show_ready(struct fault_io *fault)
{
    uint64_t word = 1;

    if (fault->own_fd < 0)
        return;
    if (fault->ready.count)
        (void)!write(fault->own_fd, &word, sizeof word);
    else
        (void)!read(fault->own_fd, &word, sizeof word);
}

static void arrive(struct fault_io *fault, struct kvt_io_req *req)
{
    list_add(fault->holding ? &fault->held : &fault->ready, req);
}

/* Done: reported now, or when its time has come. */
static void arrive_late(struct fault_io *fault, struct kvt_io_req *req,
                        const struct fault_rule *rule)
{
    int64_t now, due;

    if (!fault->clock.now_ns || fault->dead) {
        arrive(fault, req);
        return;
    }
    now = kvt_clock_now(&fault->clock);
    due = now + fault->latency_min;
    if (fault->latency_max > fault->latency_min)
        due += (int64_t)kvt_rng_below(&fault->rng,
                                      (uint64_t)(fault->latency_max - fault->latency_min + 1));
    if (rule->action == FAULT_LATE)
        due += (int64_t)rule->arg;
    if (rule->action == FAULT_STALL)
        fault->stalled_until = now + (int64_t)rule->arg;
    due = KVT_MAX(due, fault->stalled_until);
    if (rule->action == FAULT_NEVER)
        due = INT64_MAX;
    if (due <= now) {
        arrive(fault, req);
        return;
    }
    if (fault->late_count == fault->late_room) {
        fault->late_room = fault->late_room ? fault->late_room * 2 : 64;
        fault->late = must(realloc(fault->late, fault->late_room * sizeof *fault->late));
    }
    fault->late[fault->late_count++] = (struct late){req, due};
}

/* Those whose time has come, earliest first. all: whatever their time. */
static void late_arrive(struct fault_io *fault, bool all)
{
    while (fault->late_count) {
        size_t best = 0;

        for (size_t i = 1; i < fault->late_count; i++)
            if (fault->late[i].due_ns < fault->late[best].due_ns)
                best = i;
        if (!all && fault->late[best].due_ns > kvt_clock_now(&fault->clock))
            return;
        arrive(fault, fault->late[best].req);
        fault->late_count--;
        memmove(&fault->late[best], &fault->late[best + 1],
                (fault->late_count - best) * sizeof *fault->late);
    }
}

static int finish_now(struct fault_io *fault, struct kvt_io_req *req, int64_t result)
{
    static const struct fault_rule none = {.action = 0};

    req->result = result;
    req->elapsed_ns = 0;
    arrive_late(fault, req, &none);
    show_ready(fault);
    return 0;
}

/* Keep the first `sectors` sectors of the write: whole pages as they are, then a page of ours that
 * is torn. */
static void tear(struct shadow *shadow, uint64_t sectors)
{
    struct kvt_io_req *req = &shadow->req;
    struct iovec whole[KVT_IO_IOV_MAX];
    uint64_t keep = KVT_MIN(sectors * SECTOR, shadow->bytes), left = keep / KVT_IO_ALIGN;
    size_t rest = keep % KVT_IO_ALIGN;
    uint32_t count = 0;

    memcpy(whole, req->iov, sizeof whole);
    for (uint32_t i = 0; i < req->iov_count; i++) {
        uint64_t pages = KVT_MIN(whole[i].iov_len / KVT_IO_ALIGN, left);

        if (pages)
            req->iov[count++] = (struct iovec){whole[i].iov_base, pages * KVT_IO_ALIGN};
        left -= pages;
        if (!left && pages * KVT_IO_ALIGN < whole[i].iov_len && rest) {
            shadow->torn = must(aligned_alloc(KVT_IO_ALIGN, KVT_IO_ALIGN));
            memset(shadow->torn, 0, KVT_IO_ALIGN);
            memcpy(shadow->torn, (uint8_t *)whole[i].iov_base + pages * KVT_IO_ALIGN, rest);
            if (count < KVT_IO_IOV_MAX)
                req->iov[count++] = (struct iovec){shadow->torn, KVT_IO_ALIGN};
            rest = 0;
        }
    }
    req->iov_count = count;
}

static unsigned data_op(int kind)
{
    return kind == KVT_IO_READ    ? FAULT_READ
           : kind == KVT_IO_WRITE ? FAULT_WRITE
           : kind == KVT_IO_PUNCH ? FAULT_PUNCH
                                  : FAULT_SYNC;
}

/* A copy of what is written, with one bit that is wrong. */
static void flip_write(struct fault_io *fault, struct shadow *shadow, uint64_t bit)
{
    struct kvt_io_req *req = &shadow->req;
    uint64_t at = 0;

    shadow->torn = must(aligned_alloc(KVT_IO_ALIGN, shadow->bytes));
    for (uint32_t i = 0; i < req->iov_count; i++) {
        memcpy(shadow->torn + at, req->iov[i].iov_base, req->iov[i].iov_len);
        at += req->iov[i].iov_len;
    }
    bit = bit == FAULT_RANDOM ? kvt_rng_below(&fault->rng, at * 8) : bit % (at * 8);
    shadow->torn[bit / 8] ^= (uint8_t)(1u << bit % 8);
    req->iov_count = 1;
    req->iov[0] = (struct iovec){shadow->torn, at};
}

static uint64_t digest(const struct kvt_io_req *req)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < req->iov_count; i++)
        sum = sum * 31 + XXH3_64bits(req->iov[i].iov_base, req->iov[i].iov_len);
    return sum;
}

/* A read brings the bytes of the picture, where that has the file. */
static void read_then(struct fault_io *fault, struct kvt_io_req *req)
{
    int file = fault->then->ops->open(fault->then, name_of(&fault->io, req->file), 0);
    struct kvt_io_req old = *req;
    uint64_t now = digest(req);

    if (file < 0)
        return;
    old.file = file;
    if (fault->then->ops->submit(fault->then, &old) == 0) {
        struct kvt_io_req *got[1];

        (void)fault->then->ops->reap(fault->then, got, 1);
    }
    fault->then->ops->close(fault->then, file);
    fault->stale_reads += digest(req) != now;
}

/* A torn request of which nothing is done; holes are made of whole pages. */
static bool kept_none(const struct kvt_io_req *req, const struct fault_rule *rule)
{
    return req->kind == KVT_IO_PUNCH ? rule->arg * SECTOR < KVT_IO_ALIGN : !rule->arg;
}

static int fault_submit(struct kvt_io *io, struct kvt_io_req *req)
{
    struct fault_io *fault = fault_of(io);
    int64_t bytes = kvt_io_req_bytes(req);
    struct fault_rule *rule = fire(fault, data_op(req->kind), name_of(io, req->file));
    struct shadow *shadow;
    int64_t done = req->kind == KVT_IO_PUNCH ? KVT_MIN(bytes, 0) : bytes;
    int rc;

    if (fault->dead)
        return finish_now(fault, req, -EIO);
    if (rule && rule->action == FAULT_BUSY)
        return -EAGAIN;
    if (rule && rule->action == FAULT_FAIL)
        return finish_now(fault, req, -rule->error);
    if (rule && bytes >= 0 && rule->action == FAULT_LOST && req->kind != KVT_IO_READ)
        return finish_now(fault, req, done);
    if (rule && rule->action == FAULT_TORN && kept_none(req, rule))
        return finish_now(fault, req, rule->error ? -rule->error : done);
    shadow = must(calloc(1, sizeof *shadow));
    shadow->req = *req;
    shadow->req.user = req;
    if (rule)
        shadow->rule = *rule; /* the table may change before this one is reaped */
    shadow->bytes = bytes < 0 ? 0 : (uint64_t)bytes;
    if (rule && bytes > 0 && req->kind == KVT_IO_WRITE) {
        if (rule->action == FAULT_TORN)
            tear(shadow, rule->arg);
        if (rule->action == FAULT_FLIP)
            flip_write(fault, shadow, rule->arg);
    }
    if (rule && bytes > 0 && req->kind == KVT_IO_PUNCH && rule->action == FAULT_TORN)
        shadow->req.iov[0].iov_len =
            KVT_MIN(shadow->bytes, rule->arg * SECTOR / KVT_IO_ALIGN * KVT_IO_ALIGN);
    if (rule && bytes > 0 && rule->action == FAULT_MISDIRECT)
        shadow->req.offset += rule->arg * KVT_IO_ALIGN;
    rc = fault->inner->ops->submit(fault->inner, &shadow->req);
    if (rc) {
        free(shadow->torn);
        free(shadow);
    }
    fault->flying += !rc;
    return rc;
}

static void flip(struct fault_io *fault, const struct kvt_io_req *req, uint64_t bit)
{
    uint64_t bits = (uint64_t)req->result * 8, byte;

    if (req->result <= 0)
        return;
    bit = bit == FAULT_RANDOM ? kvt_rng_below(&fault->rng, bits) : bit % bits;
    byte = bit / 8;
    for (uint32_t i = 0; i < req->iov_count; i++) {
        if (byte < req->iov[i].iov_len) {
            ((uint8_t *)req->iov[i].iov_base)[byte] ^= (uint8_t)(1u << bit % 8);
            return;
        }
        byte -= req->iov[i].iov_len;
    }
}

/* Tell the submitter what the rule wants it to believe. */
static void translate(struct fault_io *fault, struct shadow *shadow)
{
    struct kvt_io_req *req = shadow->req.user;
    const struct fault_rule *rule = &shadow->rule;

    req->result = shadow->req.result;
    req->elapsed_ns = shadow->req.elapsed_ns;
    if (req->result >= 0 && req->kind == KVT_IO_WRITE && rule->action == FAULT_TORN)
        req->result = rule->error ? -rule->error : (int64_t)shadow->bytes;
    if (req->kind == KVT_IO_READ && rule->action == FAULT_SHORT)
        req->result = KVT_MAX(req->result - (int64_t)(rule->arg * KVT_IO_ALIGN), (int64_t)0);
    if (req->kind == KVT_IO_READ && rule->action == FAULT_FLIP)
        flip(fault, req, rule->arg);
    if (req->kind == KVT_IO_READ && rule->action == FAULT_STALE && req->result > 0 && fault->then)
        read_then(fault, req);
    if (req->result >= 0 && req->kind == KVT_IO_PUNCH && rule->action == FAULT_TORN)
        req->result = -rule->error;
    arrive_late(fault, req, rule);
    fault->flying--;
    free(shadow->torn);
    free(shadow);
}

static void drain_inner(struct fault_io *fault)
{
    struct kvt_io_req *got[16];
    unsigned count;

    while ((count = fault->inner->ops->reap(fault->inner, got, KVT_ARRAY_LEN(got))))
        for (unsigned i = 0; i < count; i++)
            translate(fault, (struct shadow *)got[i]);
}

static unsigned fault_reap(struct kvt_io *io, struct kvt_io_req **out, unsigned max)
{
    struct fault_io *fault = fault_of(io);
    unsigned count = 0;

    drain_inner(fault);
    late_arrive(fault, fault->dead);
    while (count < max && fault->ready.count)
        out[count++] = list_take(&fault->ready, false);
    show_ready(fault);
    return count;
}

static int fault_event_fd(struct kvt_io *io)
{
    return fault_of(io)->epoll_fd;
}

static void fault_destroy(struct kvt_io *io)
{
    struct fault_io *fault = fault_of(io);
    /* shadows are ours to free: wait for those that inner still has */
    for (drain_inner(fault); fault->flying; drain_inner(fault)) {
        struct pollfd wait = {.fd = fault->inner->ops->event_fd(fault->inner), .events = POLLIN};

        (void)poll(&wait, 1, 1000);
    }
    fault->inner->ops->destroy(fault->inner);
    if (fault->then)
        fault->then->ops->destroy(fault->then);
    pthread_mutex_destroy(&fault->lock);
    if (fault->epoll_fd >= 0)
        close(fault->epoll_fd);
    if (fault->own_fd >= 0)
        close(fault->own_fd);
    free(fault->late);
    free(fault->held.items);
    free(fault->ready.items);
    free(fault->names);
    free(fault);
}

static const struct kvt_io_ops fault_ops = {
    .name = "fault",
    .destroy = fault_destroy,
    .open = fault_open,
    .close = fault_close,
    .size = fault_size,
    .truncate = fault_truncate,
    .allocate = fault_allocate,
    .punch = fault_punch,
    .unlink = fault_unlink,
    .rename = fault_rename,
    .sync_dir = fault_sync_dir,
    .list = fault_list,
    .lock = fault_lock,
    .info = fault_info,
    .submit = fault_submit,
    .reap = fault_reap,
    .event_fd = fault_event_fd,
};

/* ---- for the test ---- */

struct kvt_io *fault_io_new(struct kvt_io *inner, uint64_t seed)
{
    struct fault_io *fault = must(calloc(1, sizeof *fault));
    int inner_fd = inner->ops->event_fd(inner);

    fault->io.ops = &fault_ops;
    fault->inner = inner;
    fault->rng.state = seed;
    pthread_mutex_init(&fault->lock, NULL);
    fault->own_fd = fault->epoll_fd = -1;
    if (inner_fd >= 0) {
        struct epoll_event event = {.events = EPOLLIN};

        fault->own_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        fault->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
        if (fault->own_fd < 0 || fault->epoll_fd < 0 ||
            epoll_ctl(fault->epoll_fd, EPOLL_CTL_ADD, inner_fd, &event) < 0 ||
            epoll_ctl(fault->epoll_fd, EPOLL_CTL_ADD, fault->own_fd, &event) < 0)
            abort();
    }
    return &fault->io;
}

struct kvt_io *fault_io_inner(struct kvt_io *io)
{
    return fault_of(io)->inner;
}

int fault_io_rule(struct kvt_io *io, const struct fault_rule *rule)
{
    struct fault_io *fault = fault_of(io);
    int number = -1;

    pthread_mutex_lock(&fault->lock);
    if (fault->rule_count < FAULT_RULES_MAX) {
        number = fault->rule_count++;
        fault->rules[number] = *rule;
        fault->rules[number].seen = fault->rules[number].fired = 0;
    }
    pthread_mutex_unlock(&fault->lock);
    return number;
}

const struct fault_rule *fault_io_rule_state(const struct kvt_io *io, int rule)
{
    return &((const struct fault_io *)io)->rules[rule];
}

void fault_io_clear(struct kvt_io *io)
{
    struct fault_io *fault = fault_of(io);

    pthread_mutex_lock(&fault->lock);
    fault->rule_count = 0;
    pthread_mutex_unlock(&fault->lock);
    for (size_t i = 0; i < fault->late_count; i++) /* what would never come comes now */
        if (fault->late[i].due_ns == INT64_MAX)
            fault->late[i].due_ns = INT64_MIN;
    fault->stalled_until = 0;
}

void fault_io_pull_the_plug(struct kvt_io *io)
{
    struct fault_io *fault = fault_of(io);

    fault->dead = true;
    fault_io_hold(io, 0);
    show_ready(fault);
}

void fault_io_plug_in(struct kvt_io *io)
{
    struct fault_io *fault = fault_of(io);

    fault->dead = false;
    fault->stalled_until = 0;
    fault->held.count = fault->ready.count = fault->late_count = 0;
}

void fault_io_clock(struct kvt_io *io, struct kvt_clock clock)
{
    fault_of(io)->clock = clock;
}

void fault_io_latency(struct kvt_io *io, int64_t min_ns, int64_t max_ns)
{
    fault_of(io)->latency_min = min_ns;
    fault_of(io)->latency_max = max_ns;
}

int64_t fault_io_next(const struct kvt_io *io)
{
    const struct fault_io *fault = (const struct fault_io *)io;
    int64_t next = fault->ready.count ? INT64_MIN : INT64_MAX;

    for (size_t i = 0; i < fault->late_count; i++)
        next = KVT_MIN(next, fault->late[i].due_ns);
    return next;
}

void fault_io_remember(struct kvt_io *io, const struct kvt_io *memory)
{
    struct fault_io *fault = fault_of(io);

    if (fault->then)
        fault->then->ops->destroy(fault->then);
    fault->then = NULL;
    if (kvt_io_mem_clone(memory, &fault->then))
        abort();
}

uint64_t fault_io_stale_reads(const struct kvt_io *io)
{
    return ((const struct fault_io *)io)->stale_reads;
}

void fault_io_hold(struct kvt_io *io, int on)
{
    fault_of(io)->holding = on;
    if (!on)
        (void)fault_io_release(io, UINT32_MAX, 0);
}

unsigned fault_io_held(struct kvt_io *io)
{
    drain_inner(fault_of(io));
    return (unsigned)fault_of(io)->held.count;
}

unsigned fault_io_release(struct kvt_io *io, unsigned count, int backwards)
{
    struct fault_io *fault = fault_of(io);
    unsigned done = 0;

    drain_inner(fault);
    for (; done < count && fault->held.count; done++)
        list_add(&fault->ready, list_take(&fault->held, backwards));
    show_ready(fault);
    return done;
}

uint64_t fault_io_count(const struct kvt_io *io, unsigned ops)
{
    uint64_t sum = 0;

    for (unsigned i = 0; i < OPS; i++)
        sum += ops >> i & 1 ? ((const struct fault_io *)io)->counts[i] : 0;
    return sum;
}

int fault_io_corrupt(struct kvt_io *io, const char *name, uint64_t byte, unsigned bit)
{
    struct kvt_io *inner = fault_of(io)->inner;
    uint64_t offset = byte & ~(uint64_t)(KVT_IO_ALIGN - 1);
    uint8_t *page = must(aligned_alloc(KVT_IO_ALIGN, KVT_IO_ALIGN));
    int file = inner->ops->open(inner, name, 0);
    int64_t rc = file;

    if (file >= 0) {
        rc = kvt_io_read_now(inner, file, offset, page, KVT_IO_ALIGN);
        if (rc >= 0 && rc < KVT_IO_ALIGN)
            rc = -ERANGE; /* beyond the end, or a partial last page: not one that we write */
        if (rc >= 0) {
            page[byte - offset] ^= (uint8_t)(1u << bit % 8);
            rc = kvt_io_write_now(inner, file, offset, page, KVT_IO_ALIGN);
        }
        inner->ops->close(inner, file);
    }
    free(page);
    return rc < 0 ? (int)rc : 0;
}
