/* A way to a server on loopback that keeps what it was given: from hold() on, what comes over the
 * connections there are then is kept, whatever becomes of their clients, and is delivered by
 * release(); connections that are made later pass. As a server that is frozen and carries on, or a
 * network that is slow, only that the test says when. */
#ifndef KVT_TESTS_LATE_PROXY_H
#define KVT_TESTS_LATE_PROXY_H

#include <stddef.h>

struct late_proxy;

/* Listens on a free port of loopback, which is told, for a server on another one. */
struct late_proxy *late_proxy_start(int server, int *port);
void late_proxy_hold(struct late_proxy *proxy);
/* Bytes kept so far. */
size_t late_proxy_kept(struct late_proxy *proxy);
/* Deliver. Returns how many of the connections that were held the server had closed before. */
unsigned late_proxy_release(struct late_proxy *proxy);
void late_proxy_stop(struct late_proxy *proxy);

#endif
