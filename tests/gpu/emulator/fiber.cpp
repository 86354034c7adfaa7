#include "fiber.hpp"

#include <cstdint>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVT_FIBER_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define KVT_FIBER_ASAN
#endif
#ifdef KVT_FIBER_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator
{

static Fiber *came_from; /* whoever switched last */

static void arrived([[maybe_unused]] Fiber *own)
{
#ifdef KVT_FIBER_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(own != nullptr ? own->hidden : nullptr, &bottom, &bytes);
    if (came_from->stack == nullptr) { /* now we know the thread's own */
        came_from->stack = static_cast<char *>(const_cast<void *>(bottom));
        came_from->bytes = bytes;
    }
#endif
}

/* Whoever ran on it before has left marks of its frames. */
static void clean([[maybe_unused]] Fiber &fiber)
{
#ifdef KVT_FIBER_ASAN
    __asan_unpoison_memory_region(fiber.stack, fiber.bytes);
#endif
    fiber.hidden = nullptr;
}

static void (*first_run)();

static void enter()
{
    arrived(nullptr);
    first_run();
}

#ifdef __x86_64__

extern "C" void kvt_fiber_jump(void **save, void *to);
/* What a callee must keep; floating-point modes stay as they are. */
asm(".text\n"
    ".type kvt_fiber_jump,@function\n"
    "kvt_fiber_jump:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size kvt_fiber_jump, . - kvt_fiber_jump\n");

void fiber_make(Fiber &fiber, void (*run)())
{
    uintptr_t end = reinterpret_cast<uintptr_t>(fiber.stack + fiber.bytes) / 16 * 16;
    void **top = reinterpret_cast<void **>(end) - 8; /* six registers, where to go, no caller */
    for (int i = 0; i < 8; i++)
        top[i] = nullptr;
    top[6] = reinterpret_cast<void *>(enter);
    first_run = run;
    fiber.top = top;
    clean(fiber);
}

static void jump(Fiber &from, Fiber &to)
{
    kvt_fiber_jump(&from.top, to.top);
}

#else

void fiber_make(Fiber &fiber, void (*run)())
{
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = fiber.bytes;
    fiber.context.uc_link = nullptr;
    first_run = run;
    makecontext(&fiber.context, enter, 0);
    clean(fiber);
}

static void jump(Fiber &from, Fiber &to)
{
    swapcontext(&from.context, &to.context);
}

#endif

void fiber_switch(Fiber &from, Fiber &to, [[maybe_unused]] bool ends)
{
    came_from = &from;
#ifdef KVT_FIBER_ASAN
    __sanitizer_start_switch_fiber(ends ? nullptr : &from.hidden, to.stack, to.bytes);
#endif
    jump(from, to);
    arrived(&from);
}

} // namespace emulator
