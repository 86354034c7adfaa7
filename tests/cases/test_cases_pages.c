/* A failure from the field about page sizes: C40.
 *
 * Method: this program defines sysconf(), mmap() and madvise(), which the library then calls: pages
 * are said to be 64 KiB, and every advice and every length is checked against that. What the real
 * kernel gives is used underneath. Not in sanitizer builds, which define these themselves.
 */
#include "support/rig.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/checked.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

#define STUB_PAGE 65536u

static unsigned advices, maps, unaligned;
static uint64_t base_skew; /* the kernel's mapping of an arena starts here in a 64 KiB page */

long sysconf(int name)
{
    if (name == _SC_PAGESIZE)
        return STUB_PAGE;
    return name == _SC_NPROCESSORS_ONLN ? 2 : -1;
}

void *mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
    long at = syscall(SYS_mmap, addr, len, prot, flags, fd, offset);
    if ((flags & MAP_NORESERVE) != 0 && fd < 0 && (prot & PROT_WRITE) != 0) {
        maps++;
        unaligned += len % STUB_PAGE != 0;
        base_skew = (uint64_t)at % STUB_PAGE;
    }
    return (void *)at;
}

int madvise(void *addr, size_t len, int advice)
{
    if (advice == MADV_HUGEPAGE || advice == MADV_DONTFORK) {
        uint64_t start = (uintptr_t)addr;
        advices++;
        /* a real kernel with such pages would have aligned the mapping itself */
        unaligned += start % STUB_PAGE != 0 && start % STUB_PAGE != base_skew;
        unaligned += len % STUB_PAGE != 0;
    }
    return (int)syscall(SYS_madvise, addr, len, advice);
}

static void test_c40_mappings_follow_the_page_size(void **state)
{
    static const char *const drams[] = {"1MiB", "1100000", "8388607", "100MiB", "70000001"};
    struct rig rig;
    (void)state;
    for (size_t i = 0; i < KVT_ARRAY_LEN(drams); i++) {
        struct rig_shape shape = rig_shape_small(16);
        char config[64];
        snprintf(config, sizeof(config), "dram=%s", drams[i]);
        rig_init(&rig, &shape, config, NULL);
        rig_open(&rig);
        uint64_t bytes = rig_stat(&rig, "client.arena_bytes");
        assert_int_equal(bytes % STUB_PAGE, 0);
        assert_int_equal(rig_store(&rig, 1, 16, 0, NULL), 16);
        assert_int_equal(rig_load(&rig, 1, 16, NULL), 16);
        rig_free(&rig);
    }
    assert_int_equal(maps, KVT_ARRAY_LEN(drams));
    assert_int_equal(advices, KVT_ARRAY_LEN(drams) + 2); /* two are large enough for huge pages */
    assert_int_equal(unaligned, 0);
}

#else

static void test_c40_mappings_follow_the_page_size(void **state)
{
    (void)state;
    skip();
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_c40_mappings_follow_the_page_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
