/* Stacks to run on in turn. x86-64 switches by itself, since ucontext asks the kernel each time;
 * other machines take ucontext. The address sanitizer is told. */
#ifndef KVT_TESTS_FIBER_HPP
#define KVT_TESTS_FIBER_HPP

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator
{

struct Fiber { /* all zero: the thread's own stack */
    char *stack;
    size_t bytes;
    void *hidden; /* what the sanitizer keeps of a stack that waits */
#ifdef __x86_64__
    void *top; /* where its registers were pushed */
#else
    ucontext_t context;
#endif
};

/* The next switch to it calls run(), on its own stack. run() never returns: it switches away. */
void fiber_make(Fiber &fiber, void (*run)());
/* ends: nobody will come back. */
void fiber_switch(Fiber &from, Fiber &to, bool ends = false);

} // namespace emulator

#endif
