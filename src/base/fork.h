/* Descriptors that a forked child does not keep: locks, and sockets whose end says that a process
 * has ended. A child that lives on without exec would hold them for as long as it lives, also when
 * its parent is long dead.
 *
 * The list of them belongs to the process, as fork() does: the one piece of global state here. A
 * child that vfork(), posix_spawn() or a bare clone() makes does not call the handlers: it runs
 * another program at once, and the descriptors are close-on-exec. Threads: any.
 */
#ifndef KVT_BASE_FORK_H
#define KVT_BASE_FORK_H

struct kvt_fork_fd { /* zeros: in no list */
    int *fd;
    struct kvt_fork_fd *prev, *next;
};

/* No fork() of the process falls between the two: what is opened there is added in time. They do
 * not nest, and what is between them must not take long. */
void kvt_fork_hold(void);
void kvt_fork_let(void);

/* A forked child closes *fd and sets it to -1 before fork() returns there; the parent's stays.
 * Between hold and let. Both are borrowed until kvt_fork_drop(). */
void kvt_fork_add(struct kvt_fork_fd *entry, int *fd);

/* Before fd is closed or forgotten; also of an entry in no list. Not between hold and let. */
void kvt_fork_drop(struct kvt_fork_fd *entry);

#endif
