/* A server that says what a test wants: it speaks RESP on some ports of loopback, and a function of
 * the test answers each command. For what a real redis-server does not do on demand. */
#ifndef KVT_TESTS_FAKE_REDIS_H
#define KVT_TESTS_FAKE_REDIS_H

#include <stddef.h>

#define FAKE_REDIS_PORTS 4u

/* The answer to one command that has come to port number `at`, as RESP text. words: the command,
 * a space between. Called by the server's thread. */
typedef void fake_redis_answer(void *ctx, unsigned at, const char *words, char *out, size_t len);

struct fake_redis;

struct fake_redis *fake_redis_start(unsigned ports, fake_redis_answer *answer, void *ctx);
int fake_redis_port(const struct fake_redis *fake, unsigned at);
void fake_redis_stop(struct fake_redis *fake);
/* A port at which nobody listens, as long as the descriptor in *fd is open. */
int fake_redis_closed_port(int *fd);

#endif
