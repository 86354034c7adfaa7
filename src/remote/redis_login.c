/* What a connection says first: AUTH, READONLY where replicas are read, INFO where somebody wants
 * to know what answers, and, where it writes, CLIENT ID and the end of its predecessor (rule 5 of
 * redis_impl.h); PING last, whose answer makes it READY. All of it is sent at once; the answers are
 * read in redis_reply.c. The password is read from its file at each connect. Threads: the
 * backend's. Blocks: for that file.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <openssl/crypto.h>

#include "kvtier/error.h"
#include "remote/redis_impl.h"
#include "remote/remote_secret.h"

#define AUTH_MAX 512u

/* "password" or "user password", the first line of the file. Returns words, 0: none, -1: error,
 * with a sentence. */
static int read_auth(const char *path, char text[AUTH_MAX], const char *words[2], char *error,
                     size_t error_len)
{
    ssize_t got;
    char *space;

    if (!path[0])
        return 0;
    got = kvt_remote_secret_read("remote_auth", path, text, AUTH_MAX - 1, error, error_len);
    if (got < 0)
        return -1;
    text[got] = '\0';
    if (got == AUTH_MAX - 1 && !strpbrk(text, "\r\n")) {
        (void)snprintf(error, error_len,
                       "remote_auth: the first line of %.200s has more than %u bytes", path,
                       AUTH_MAX - 2);
        return -1;
    }
    text[strcspn(text, "\r\n")] = '\0';
    if (!text[0]) {
        (void)snprintf(error, error_len,
                       "remote_auth: the first line of %.200s is empty: write \"password\" or "
                       "\"user password\" there",
                       path);
        return -1;
    }
    space = strchr(text, ' ');
    words[0] = text;
    if (!space)
        return 1;
    *space = '\0';
    words[1] = space + 1;
    return 2;
}

int redis_auth_check(const struct redis *redis, char *error, size_t error_len)
{
    char text[AUTH_MAX];
    const char *words[2];
    int count = read_auth(redis->auth_file, text, words, error, error_len);

    OPENSSL_cleanse(text, sizeof(text));
    return count < 0 ? KVT_E_CONFIG_VALUE : 0;
}

static void login_op(struct redis *redis, struct redis_conn *conn, int number, enum redis_kind kind)
{
    struct redis_op *op = &conn->login[number];

    memset(op, 0, sizeof(*op));
    op->kind = (uint8_t)kind;
    op->sent_ns = redis->now_ns;
    redis_push(&conn->sent, op);
}

static void login_say(struct redis *redis, struct redis_conn *conn, int number,
                      enum redis_kind kind, const char *command)
{
    memcpy(conn->out + conn->out_len, command, strlen(command));
    conn->out_len += strlen(command);
    login_op(redis, conn, number, kind);
}

bool redis_log_in(struct redis *redis, struct redis_conn *conn)
{
    char text[AUTH_MAX], why[512];
    const char *words[2];
    int count = read_auth(redis->auth_file, text, words, why, sizeof(why));
    int len = 0;

    conn->state = CONN_LOGIN;
    if (count < 0) {
        OPENSSL_cleanse(text, sizeof(text));
        (void)atomic_fetch_add_explicit(&redis->auth_fails, 1, memory_order_relaxed);
        if (!redis->auth_told)
            kvt_log(&redis->log, KVT_LOG_WARN, "%s (trying again)", why);
        redis->auth_told = true;
        conn->told = true;
        return false;
    }
    if (count == 1)
        len = snprintf(conn->out, sizeof(conn->out), "*2\r\n$4\r\nAUTH\r\n$%zu\r\n%s\r\n",
                       strlen(words[0]), words[0]);
    if (count == 2)
        len = snprintf(conn->out, sizeof(conn->out),
                       "*3\r\n$4\r\nAUTH\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n", strlen(words[0]),
                       words[0], strlen(words[1]), words[1]);
    conn->out_len = (size_t)len;
    if (count)
        login_op(redis, conn, 0, REDIS_AUTH);
    OPENSSL_cleanse(text, sizeof(text));
    if (redis->url.replicas)
        login_say(redis, conn, 1, REDIS_READONLY, "*1\r\n$8\r\nREADONLY\r\n");
    if (conn->lane == LANE_WRITE)
        login_say(redis, conn, 2, REDIS_ID, "*2\r\n$6\r\nCLIENT\r\n$2\r\nID\r\n");
    if (conn->lane == LANE_WRITE && conn->node->fence_id) {
        char number[24], command[128];
        int digits = snprintf(number, sizeof(number), "%" PRIu64, conn->node->fence_id);

        (void)snprintf(command, sizeof(command),
                       "*4\r\n$6\r\nCLIENT\r\n$4\r\nKILL\r\n$2\r\nID\r\n$%d\r\n%s\r\n", digits,
                       number);
        login_say(redis, conn, 3, REDIS_FENCE, command);
    }
    if (redis->about_wanted && conn->lane == LANE_ASK)
        login_say(redis, conn, 5, REDIS_INFO, "*2\r\n$4\r\nINFO\r\n$6\r\nserver\r\n");
    login_say(redis, conn, 4, REDIS_PING, "*1\r\n$4\r\nPING\r\n");
    return true;
}
