/* While the caller's thread writes files for us, a limit on their size is an error of the write
 * (EFBIG) and not a signal that ends the process.
 */
#ifndef KVT_CLIENT_FSIZE_H
#define KVT_CLIENT_FSIZE_H

#include <signal.h>
#include <stdbool.h>

struct kvt_fsize_guard {
    sigset_t before;
    bool held;
};
void kvt_fsize_hold(struct kvt_fsize_guard *guard);
void kvt_fsize_release(struct kvt_fsize_guard *guard);

#endif
