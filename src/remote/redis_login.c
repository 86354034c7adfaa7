/* What a connection says first: AUTH, READONLY where replicas are read, and, where it writes,
 * CLIENT ID and the end of its predecessor (rule 5 of redis_impl.h); PING last, whose answer makes
 * it READY. All of it is sent at once; the answers are read in redis_reply.c. The password is read
 * from its file at each connect. Threads: the backend's. Blocks: for that file.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <openssl/crypto.h>

#include "remote/redis_impl.h"

#define AUTH_MAX 512u

/* "password" or "user password", the first line of the file. Returns words, 0: none, -1: error. */
static int read_auth(const char *path, char text[AUTH_MAX], const char *words[2])
{
    struct stat st;
    FILE *file;
    char *space;

    if (!path[0])
        return 0;
    file = fopen(path, "re");
    if (file == NULL)
        return -1;
    if (fstat(fileno(file), &st) != 0 || (st.st_mode & 077)) {
        (void)fclose(file);
        return -1;
    }
    text[0] = '\0';
    if (fgets(text, AUTH_MAX, file) == NULL)
        text[0] = '\0';
    (void)fclose(file);
    text[strcspn(text, "\r\n")] = '\0';
    if (!text[0])
        return -1;
    space = strchr(text, ' ');
    words[0] = text;
    if (!space)
        return 1;
    *space = '\0';
    words[1] = space + 1;
    return 2;
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
    char text[AUTH_MAX];
    const char *words[2];
    int count = read_auth(redis->auth_file, text, words);
    int len = 0;

    conn->state = CONN_LOGIN;
    if (count < 0) {
        (void)atomic_fetch_add_explicit(&redis->auth_fails, 1, memory_order_relaxed);
        if (!redis->auth_told)
            kvt_log(&redis->log, KVT_LOG_WARN,
                    "remote_auth: %s cannot be read, is empty, or may be read by others: chmod 600 "
                    "(trying again)",
                    redis->auth_file);
        redis->auth_told = true;
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
    login_say(redis, conn, 4, REDIS_PING, "*1\r\n$4\r\nPING\r\n");
    return true;
}
