/* Sockets of loopback, for servers that a test has in a thread of its own. */
#ifndef KVT_TESTS_LOOPBACK_H
#define KVT_TESTS_LOOPBACK_H

#include <stdbool.h>
#include <stddef.h>

/* A socket that is bound to a port of its own, and does not listen yet. Fails the test. */
int loopback_bind(int *port);
/* All of it. false: the other end has gone. */
bool loopback_send(int fd, const char *bytes, size_t len);

#endif
