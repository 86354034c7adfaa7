/* Descriptors that a forked child does not keep: see fork.h. The handlers are registered once and
 * go with the library, where it can be unloaded (glibc). */
#include "base/fork.h"

#include <pthread.h>
#include <stddef.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvt_fork_fd *first; /* lock */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    while (first != NULL) {
        struct kvt_fork_fd *entry = first;
        first = entry->next;
        (void)close(*entry->fd);
        *entry->fd = -1;
        *entry = (struct kvt_fork_fd){0};
    }
    pthread_mutex_unlock(&lock);
}

static void watch(void)
{
    int rc = pthread_atfork(before_fork, in_parent, in_child);
    (void)rc; /* no memory: children keep what they inherit, as they would have */
}

void kvt_fork_hold(void)
{
    (void)pthread_once(&once, watch);
    pthread_mutex_lock(&lock);
}

void kvt_fork_let(void)
{
    pthread_mutex_unlock(&lock);
}

void kvt_fork_add(struct kvt_fork_fd *entry, int *fd)
{
    *entry = (struct kvt_fork_fd){.fd = fd, .next = first};
    if (first != NULL)
        first->prev = entry;
    first = entry;
}

void kvt_fork_drop(struct kvt_fork_fd *entry)
{
    pthread_mutex_lock(&lock);
    if (entry->fd != NULL) {
        if (entry->prev != NULL)
            entry->prev->next = entry->next;
        else
            first = entry->next;
        if (entry->next != NULL)
            entry->next->prev = entry->prev;
    }
    *entry = (struct kvt_fork_fd){0};
    pthread_mutex_unlock(&lock);
}
