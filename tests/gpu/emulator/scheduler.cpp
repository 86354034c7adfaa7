/* A launch: CTAs, of which up to three are at work at once, their warps, and whose turn it is.
 *
 *   thread: runs -> waits for a word to reach a number -> runs -> ... -> is over
 *
 * Rounds: every warp in a random order gets some passes; a pass runs each of its threads that does
 * not wait, in a random order, until it waits. A round in which nobody could run is a deadlock: a
 * fault of the launch, with a sentence on stderr. */
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

extern "C" {
#include "gpu/fake_kernels.h"
}
#include "fiber.hpp"
#include "gpu/kernel_abi.h"
#include "warp.hpp"

Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator
{

constexpr unsigned RING = 256; /* acts that a lane may be ahead of the slowest: a row's and more */
constexpr unsigned RESIDENT_MAX = 3; /* CTAs at work */
constexpr unsigned BLOCK_MAX = 1024;
constexpr size_t STACK_BYTES = 192u << 10;

struct Warp;
struct Block;

struct Thread {
    Fiber fiber;
    Block *block;
    Warp *warp;
    uint32_t x;
    const uint64_t *await; /* runs when this has reached `want` */
    uint64_t want;
    uint64_t begun, done; /* acts */
    bool over;
};

struct Warp {
    Thread threads[LANES];
    Gift ring[LANES][RING];
    uint64_t met;     /* the last act that all lanes have come to */
    uint64_t meeting; /* that some lanes wait in */
    unsigned here;    /* so many */
    unsigned over;
};

struct Block {
    uint32_t x;
    bool at_work;
    Warp *warps;
    uint64_t syncs;
    unsigned at_sync, alive;
    uint8_t *memory;
    void *own;
    size_t own_bytes;
};

struct Launch {
    const struct fake_launch *order;
    Fiber main;
    Thread *now;
    uint64_t state; /* of the random numbers */
    unsigned warps, next_block;
    Block blocks[RESIDENT_MAX];
    bool broken;
};

static Launch *launch;

uint32_t random_word()
{
    uint64_t z = (launch->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    return static_cast<uint32_t>((z ^ (z >> 27)) >> 32);
}

/* ---- what a thread asks for ---- */

static void pause()
{
    fiber_switch(launch->now->fiber, launch->main);
}

static void wait(const uint64_t *await, uint64_t want)
{
    Thread *own = launch->now;
    while (*await < want) {
        own->await = await;
        own->want = want;
        pause();
    }
}

static void be_over()
{
    Thread *own = launch->now;
    own->over = true;
    own->done = UINT64_MAX;
    own->warp->over++;
    own->block->alive--;
    if (own->block->at_sync > 0 && own->block->at_sync == own->block->alive) {
        own->block->at_sync = 0;
        own->block->syncs++;
    }
    for (;;)
        fiber_switch(own->fiber, launch->main, true);
}

void fault(const char *what)
{
    fprintf(stderr, "%s, CTA %u, thread %u: %s\n", launch->order->kernel, blockIdx.x, threadIdx.x,
            what);
    launch->broken = true;
    for (;;)
        fiber_switch(launch->now->fiber, launch->main, true);
}

uint64_t give(Act act, const void *words, size_t bytes)
{
    Thread *own = launch->now;
    Warp *warp = own->warp;
    uint64_t number = ++own->begun;
    if (number % (RING / 2) == 0) /* the half that comes next has been read by all */
        for (Thread &other : warp->threads)
            wait(&other.done, number - RING / 2);
    Gift &gift = warp->ring[own->x % LANES][number % RING];
    gift.act = act;
    if (bytes > 0)
        memcpy(gift.words, words, bytes);
    gift.number = number;
    return number;
}

const Gift &take(uint64_t number, Act act, unsigned from)
{
    const Gift &gift = launch->now->warp->ring[from][number % RING];
    wait(&gift.number, number);
    require(gift.number == number && gift.act == act, "lanes of a warp do different things");
    return gift;
}

void meet(uint64_t number, Act act)
{
    Warp *warp = launch->now->warp;
    if (warp->here == 0)
        warp->meeting = number;
    require(warp->meeting == number, "lanes of a warp meet at different places");
    if (++warp->here == LANES) {
        warp->here = 0;
        warp->met = number;
        for (unsigned lane = 0; lane < LANES; lane++)
            (void)take(number, act, lane);
        pause(); /* the last to come is not the first to go */
    }
    wait(&warp->met, number);
}

void leave(uint64_t number)
{
    launch->now->done = number;
}

void sync_block()
{
    Block *block = launch->now->block;
    uint64_t want = block->syncs + 1;
    if (++block->at_sync == block->alive) {
        block->at_sync = 0;
        block->syncs = want;
        pause();
    }
    wait(&block->syncs, want);
}

uint8_t *launch_memory()
{
    return launch->now->block->memory;
}

size_t launch_memory_bytes()
{
    return launch->order->shared_bytes;
}

void *own_memory(size_t bytes)
{
    Block *block = launch->now->block;
    if (block->own == nullptr) {
        block->own = aligned_alloc(16, (bytes + 15) / 16 * 16);
        require(block->own != nullptr, "no memory");
        memset(block->own, static_cast<int>(random_word() & 255u), bytes);
        block->own_bytes = bytes;
    }
    require(block->own_bytes == bytes, "two objects of one kernel in shared memory");
    return block->own;
}

/* ---- the kernels ---- */

extern "C" {
void kvt_gpu_decode(kvt_gpu_coding);
void kvt_gpu_encode_dense_c4(kvt_gpu_coding);
void kvt_gpu_encode_dense_c5(kvt_gpu_coding);
void kvt_gpu_encode_c4(kvt_gpu_coding);
void kvt_gpu_encode_c5(kvt_gpu_coding);
void kvt_gpu_encode_uniform(kvt_gpu_coding);
void kvt_gpu_raw_gather(kvt_gpu_coding);
void kvt_gpu_raw_scatter(kvt_gpu_coding);
void kvt_gpu_pages(kvt_gpu_paging);
}

struct Kernel {
    const char *name;
    void (*coding)(kvt_gpu_coding);
    void (*paging)(kvt_gpu_paging);
};
static const Kernel kernels[] = {
    {"kvt_gpu_decode", kvt_gpu_decode, nullptr},
    {"kvt_gpu_encode_dense_c4", kvt_gpu_encode_dense_c4, nullptr},
    {"kvt_gpu_encode_dense_c5", kvt_gpu_encode_dense_c5, nullptr},
    {"kvt_gpu_encode_c4", kvt_gpu_encode_c4, nullptr},
    {"kvt_gpu_encode_c5", kvt_gpu_encode_c5, nullptr},
    {"kvt_gpu_encode_uniform", kvt_gpu_encode_uniform, nullptr},
    {"kvt_gpu_raw_gather", kvt_gpu_raw_gather, nullptr},
    {"kvt_gpu_raw_scatter", kvt_gpu_raw_scatter, nullptr},
    {"kvt_gpu_pages", nullptr, kvt_gpu_pages},
};
static const Kernel *kernel; /* of the launch */

static void run_thread()
{
    if (kernel->coding != nullptr)
        kernel->coding(*static_cast<const kvt_gpu_coding *>(launch->order->parameter));
    else
        kernel->paging(*static_cast<const kvt_gpu_paging *>(launch->order->parameter));
    be_over();
}

/* ---- turns ---- */

static char *stacks; /* of all threads that can be at work, and their warps; kept */
static Warp *all_warps;
static uint64_t first_act; /* the number before the first one of the CTA that started last */

static void *zeroed(size_t bytes)
{
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        abort();
    return at;
}

static void start_block(Block &block, unsigned slot)
{
    const unsigned threads = launch->warps * LANES;
    block.x = launch->next_block++;
    block.at_work = true;
    block.syncs = block.at_sync = 0;
    block.alive = threads;
    block.own = nullptr;
    block.memory = nullptr;
    if (launch->order->shared_bytes > 0) {
        block.memory = static_cast<uint8_t *>(aligned_alloc(16, launch->order->shared_bytes));
        if (block.memory == nullptr)
            abort();
        memset(block.memory, static_cast<int>(random_word() & 255u), launch->order->shared_bytes);
    }
    first_act += uint64_t{1} << 32; /* what the rings hold is past */
    for (unsigned i = 0; i < launch->warps; i++) {
        Warp &warp = block.warps[i];
        warp.met = first_act;
        warp.here = warp.over = 0;
    }
    for (unsigned i = 0; i < threads; i++) {
        Thread &thread = block.warps[i / LANES].threads[i % LANES];
        thread.await = nullptr;
        thread.begun = thread.done = first_act;
        thread.over = false;
        thread.block = &block;
        thread.warp = &block.warps[i / LANES];
        thread.x = i;
        thread.fiber.stack = stacks + (static_cast<size_t>(slot) * BLOCK_MAX + i) * STACK_BYTES;
        thread.fiber.bytes = STACK_BYTES;
        fiber_make(thread.fiber, run_thread);
    }
}

static void end_block(Block &block)
{
    free(block.memory);
    free(block.own);
    block.at_work = false;
}

/* Each thread of the warp that can run does, once; of the lanes in `mask`. How many did. */
static unsigned pass(Warp &warp, uint32_t mask)
{
    unsigned ran = 0, word = random_word();
    for (unsigned i = 0; i < LANES && !launch->broken; i++) {
        unsigned lane = ((i ^ word) * (word >> 5 | 1u) + (word >> 10)) % LANES;
        Thread &thread = warp.threads[lane];
        if (!(mask >> lane & 1u) || thread.over ||
            (thread.await != nullptr && *thread.await < thread.want))
            continue;
        thread.await = nullptr;
        launch->now = &thread;
        threadIdx.x = thread.x;
        blockIdx.x = thread.block->x;
        fiber_switch(launch->main, thread.fiber);
        ran++;
    }
    return ran;
}

static unsigned go_round()
{
    const unsigned total = RESIDENT_MAX * launch->warps;
    unsigned order[RESIDENT_MAX * BLOCK_MAX / LANES], ran = 0;
    for (unsigned i = 0; i < total; i++) {
        unsigned j = random_word() % (i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (unsigned i = 0; i < total && !launch->broken; i++) {
        Block &block = launch->blocks[order[i] / launch->warps];
        Warp &warp = block.warps[order[i] % launch->warps];
        if (!block.at_work || warp.over == LANES)
            continue;
        if (random_word() % 4 == 0) { /* one row's lanes run ahead, as far as they can */
            uint32_t row = 15u << random_word() % 8 * 4;
            for (unsigned more = 1; more > 0 && !launch->broken;)
                ran += more = pass(warp, row);
        }
        for (unsigned left = 1 + random_word() % 16, more = 1; left > 0 && more > 0; left--)
            ran += more = pass(warp, ~0u);
    }
    return ran;
}

static void run_launch(unsigned resident)
{
    unsigned busy = 0;
    do {
        for (unsigned i = 0; i < resident; i++) {
            Block &block = launch->blocks[i];
            if (block.at_work && block.alive == 0) {
                end_block(block);
                busy--;
            }
            if (!block.at_work && launch->next_block < launch->order->grid) {
                start_block(block, i);
                busy++;
            }
        }
        if (busy > 0 && go_round() == 0 && !launch->broken) {
            fprintf(stderr, "%s: threads wait for each other for ever\n", launch->order->kernel);
            launch->broken = true;
        }
    } while (busy > 0 && !launch->broken);
    for (Block &block : launch->blocks)
        if (block.at_work)
            end_block(block);
}

static int run(const struct fake_launch *order)
{
    Launch own = {};
    if (order->block % LANES != 0 || order->block > BLOCK_MAX)
        return -1;
    if (stacks == nullptr) {
        stacks = static_cast<char *>(zeroed(RESIDENT_MAX * BLOCK_MAX * STACK_BYTES));
        all_warps = static_cast<Warp *>(zeroed(RESIDENT_MAX * BLOCK_MAX / LANES * sizeof(Warp)));
    }
    own.order = order;
    own.state = order->seed;
    own.warps = order->block / LANES;
    launch = &own;
    for (unsigned i = 0; i < RESIDENT_MAX; i++)
        own.blocks[i].warps = all_warps + i * (BLOCK_MAX / LANES);
    blockDim.x = order->block;
    gridDim.x = order->grid;
    run_launch(1 + random_word() % RESIDENT_MAX);
    launch = nullptr;
    return own.broken ? -1 : 0;
}

static const Kernel *kernel_of(const char *name)
{
    for (const Kernel &known : kernels)
        if (strcmp(known.name, name) == 0)
            return &known;
    return nullptr;
}

} // namespace emulator

extern "C" size_t fake_kernel_parameter_bytes(const char *name)
{
    const emulator::Kernel *known = emulator::kernel_of(name);
    return known != nullptr && known->paging != nullptr ? sizeof(kvt_gpu_paging)
                                                        : sizeof(kvt_gpu_coding);
}

extern "C" int fake_kernel_run(const struct fake_launch *order)
{
    emulator::kernel = emulator::kernel_of(order->kernel);
    return emulator::kernel != nullptr ? emulator::run(order) : -1;
}
