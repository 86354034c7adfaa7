/* Descriptors 0, 1 and 2 of a program of ours. */
#ifndef KVT_DAEMON_STANDARD_H
#define KVT_DAEMON_STANDARD_H

#include <stdbool.h>

/* Those that whoever started us has closed are taken by /dev/null, and still of no use. Else DRAM,
 * or a file of a root, would get their numbers, and what is said be written over it. Before
 * anything is opened. False: it cannot be done; nothing should be opened then. */
__attribute__((warn_unused_result)) bool kvt_standard_hold(void);

#endif
