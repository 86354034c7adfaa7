/* The threads of a launch on one CPU thread: what the words of CUDA (cuda.hpp) are made of.
 *
 * A thread is a fiber that runs until it must wait; scheduler.cpp then goes on with another one,
 * in an order drawn from the launch's seed. Nothing but what is asked for orders threads: a shuffle
 * waits for the lane that it reads and for no other (votes and reductions wait for all), so that
 * shared memory which is used without
 * __syncwarp() or __syncthreads() between shows as wrong bytes, in some order. Not modelled: two
 * threads in the middle of such a stretch at once, weak memory, time. */
#ifndef KVT_TESTS_WARP_HPP
#define KVT_TESTS_WARP_HPP

#include <cstdint>
#include <cstring>

struct Index {
    uint32_t x;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator
{

/* What lanes do together. All lanes of a warp do the same ones, in the same order. */
enum class Act { SHUFFLE, VOTE, REDUCE, MATCH, SYNC, MULTIPLY };

constexpr unsigned LANES = 32;

struct Gift { /* of a lane to the others */
    uint64_t number;
    Act act;
    uint32_t words[6];
};

/* This thread's launch is broken: says so and never returns. */
[[noreturn]] void fault(const char *what);
inline void require(bool holds, const char *what)
{
    if (!holds)
        fault(what);
}

/* Hands the words to the warp and returns the act's number; bytes <= sizeof(Gift.words). */
uint64_t give(Act act, const void *words, size_t bytes);
/* What lane `from` gave; waits for it. */
const Gift &take(uint64_t number, Act act, unsigned from);
/* Waits until all lanes have given. Then take() does not wait. */
void meet(uint64_t number, Act act);
/* The act is over for this lane: all has been taken. */
void leave(uint64_t number);
void sync_block();
uint32_t random_word();

/* Shared memory of the CTA: what the launch asked for, and one object of the kernel's own. */
uint8_t *launch_memory();
size_t launch_memory_bytes();
void *own_memory(size_t bytes);

template <typename T> T exchange(T value, unsigned from)
{
    T out;
    static_assert(sizeof(T) <= sizeof(Gift::words));
    uint64_t number = give(Act::SHUFFLE, &value, sizeof(value));
    memcpy(&out, take(number, Act::SHUFFLE, from % LANES).words, sizeof(out));
    leave(number);
    return out;
}

/* All 32 lanes' words, folded: out = fold(out, word, lane). */
template <typename F> uint32_t gather(Act act, uint32_t word, uint32_t out, F fold)
{
    uint64_t number = give(act, &word, sizeof(word));
    meet(number, act);
    for (unsigned lane = 0; lane < LANES; lane++)
        out = fold(out, take(number, act, lane).words[0], lane);
    leave(number);
    return out;
}

} // namespace emulator

#endif
