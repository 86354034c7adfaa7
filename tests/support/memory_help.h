/* What a test's process takes of memory, as the kernel finds it in its page tables. The counters of
 * statm are sums that each processor is behind with by some pages, and huge pages come and go
 * behind a program's back: neither is good enough where a few hundred KiB decide. */
#ifndef KVT_TESTS_MEMORY_HELP_H
#define KVT_TESTS_MEMORY_HELP_H

#include <stdint.h>

/* From now on no huge pages for this process, nor for its children: what is resident is what was
 * touched. Where the kernel cannot do it, nothing happens. */
void memory_small_pages(void);
/* Bytes resident. */
uint64_t memory_resident_bytes(void);
/* Of those, memory of our own: pages of files, which come in as code is first run, do not count. */
uint64_t memory_own_bytes(void);

#endif
