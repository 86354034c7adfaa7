/* One Redis server as the shared tier.
 *
 * Goal:   what was put comes back byte for byte, or not at all, whatever the server does: killed,
 *         frozen, full, another password, other people's objects, damaged ones; every request comes
 *         back once, and by its deadline; a server that is back is used again without being told.
 * Method: real redis-server processes on loopback (support/redis_rig.h); skipped where there is
 *         none. Times are asserted one way only: what must have come back, has.
 */
#include "support/rig.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509v3.h>

#include "kvtier/error.h"
#include "remote/remote_seal.h"
#include "support/redis_rig.h"
#include "support/remote_help.h"

#define PAGES 3u
#define NS 0x5A

static struct redis_rig redis;
static struct remote_help help;
static char dir[128], url[512];

static int tear_down(void **state)
{
    (void)state;
    remote_help_close(&help);
    redis_rig_stop(&redis);
    if (dir[0])
        rig_dir_remove(dir);
    dir[0] = '\0';
    return 0;
}

static bool begin(const char *options)
{
    if (!redis_rig_able())
        return false;
    redis_rig_start(&redis, options);
    redis_rig_url(&redis, url, sizeof(url));
    return true;
}

static const char *file_with(const char *name, const char *text, size_t len)
{
    static char paths[4][192];
    static unsigned next;
    char *path = paths[next++ % 4];
    FILE *file;

    if (!dir[0])
        rig_dir_make(dir, sizeof(dir));
    snprintf(path, sizeof(paths[0]), "%s/%s", dir, name);
    file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, len, file), len);
    fclose(file);
    assert_int_equal(chmod(path, 0600), 0);
    return path;
}

static struct kvt_remote_stats stats(void)
{
    struct kvt_remote_stats s;

    help.remote->ops->stats(help.remote, &s);
    return s;
}

/* Ask until it answers: connecting again takes its time. */
static void wait_alive(void)
{
    int status = -1;

    for (int i = 0; i < 1200 && status; i++) {
        (void)remote_help_probe(&help, NS, 1, 1, &status);
        if (status)
            rig_sleep_ms(50);
    }
    assert_int_equal(status, 0);
}

/* ---- what it is for ------------------------------------------------------------------------ */

static void test_put_get_probe_drop(void **state)
{
    uint64_t removed;
    int other;

    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 40, PAGES, NULL), 40);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 40, PAGES, &other), 0);
    assert_int_equal(other, KVT_E_EXISTS);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 40, PAGES, NULL), 40);
    assert_int_equal(remote_help_get_many(&help, NS, 30, 20, PAGES, &other), 11);
    assert_int_equal(other, KVT_E_MISS);
    assert_int_equal(remote_help_probe(&help, NS, 21, 1000, NULL), 20);
    assert_int_equal(remote_help_get(&help, NS + 1, 1, PAGES), KVT_E_MISS);
    assert_int_equal(remote_help_drop(&help, NS, 1, 10, &removed), 0);
    assert_int_equal(removed, 10);
    assert_int_equal(remote_help_probe(&help, NS, 1, 40, NULL), 30);
    assert_int_equal(stats().nodes, 1);
    assert_int_equal(stats().nodes_down, 0);
}

/* A record of 8 MiB, one after the other and many small ones at a time. */
static void test_long_records(void **state)
{
    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 3, 2048, NULL), 3);
    assert_int_equal(remote_help_put_many(&help, NS, 101, 64, 1, NULL), 64);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 3, 2048, NULL), 3);
    assert_int_equal(remote_help_get_many(&help, NS, 101, 64, 1, NULL), 64);
}

static void test_a_better_record_replaces(void **state)
{
    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES + 1, false), KVT_E_EXISTS);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES + 1), KVT_E_STALE);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES + 1, true), 0);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_STALE);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES + 1), 0);
}

/* A namespace goes, more than one walk of it, and nothing else does. */
static void test_drop_namespace(void **state)
{
    uint64_t removed;
    char out[64];

    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    for (uint32_t i = 0; i < 25; i++) {
        assert_int_equal(remote_help_put_many(&help, NS, 1 + i * 64, 64, 1, NULL), 64);
        assert_int_equal(remote_help_put_many(&help, NS + 1, 1 + i * 4, 4, 1, NULL), 4);
    }
    redis_rig_cli(&redis, 0, "SET other 1", out, sizeof(out));
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 1600);
    assert_int_equal(remote_help_probe(&help, NS, 1, 1000, NULL), 0);
    assert_int_equal(remote_help_probe(&help, NS + 1, 1, 100, NULL), 100);
    assert_int_equal(redis_rig_number(&redis, 0, "DBSIZE"), 101);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 0);
}

/* Milliseconds that a record will live; -1: for ever, -2: it is not there. */
static long left_of(uint64_t number)
{
    struct kvt_full_key key = remote_help_key(NS, number);
    char words[KVT_REMOTE_NAME_BYTES + 8] = "PTTL ";

    (void)kvt_remote_name(&key, words + strlen(words));
    return redis_rig_number(&redis, 0, words);
}

static void test_time_to_live(void **state)
{
    char out[512];

    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    remote_help_close(&help);
    memset(&help, 0, sizeof(help));
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    help.params = (struct kvt_remote_params){.where = url, .ttl_ns = INT64_C(600000000000)};
    assert_int_equal(kvt_remote_tier_open(&help.params, &help.remote, (char[512]){0}, 512), 0);
    assert_int_equal(remote_help_put(&help, NS, 2, PAGES, false), 0);
    assert_int_equal(remote_help_get(&help, NS, 2, PAGES), 0);
    /* one of the two has an end */
    redis_rig_cli(&redis, 0, "INFO keyspace", out, sizeof(out));
    assert_non_null(strstr(out, "keys=2,expires=1"));
    /* of what a namespace says and what the option does the shorter one holds */
    help.ttl_ns = INT64_C(1000000000000);
    assert_int_equal(remote_help_put(&help, NS, 3, PAGES, false), 0);
    help.ttl_ns = INT64_C(300000000000);
    assert_int_equal(remote_help_put(&help, NS, 4, PAGES, false), 0);
    assert_in_range(left_of(3), 300001, 600000);
    assert_in_range(left_of(4), 1, 300000);
    remote_help_close(&help);
    remote_help_open(&help, url, NULL, NULL, NULL);
    help.ttl_ns = 1; /* less than the server can tell */
    assert_int_equal(remote_help_put(&help, NS, 5, PAGES, false), 0);
    for (int i = 0; i < 600 && left_of(5) != -2; i++)
        rig_sleep_ms(10);
    assert_int_equal(left_of(5), -2);
}

static void test_unix_socket(void **state)
{
    char options[256], where[256];

    (void)state;
    if (!redis_rig_able())
        return;
    rig_dir_make(dir, sizeof(dir));
    snprintf(options, sizeof(options), "--unixsocket %s/s", dir);
    redis_rig_start(&redis, options);
    snprintf(where, sizeof(where), "redis+unix:%s/s", dir);
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 20, PAGES, NULL), 20);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 20, PAGES, NULL), 20);
}

/* TLS: records as long as several of its own, and many small ones; who is not known is not trusted,
 * nor is a certificate that is for somebody else. */
static void test_tls(void **state)
{
    char cert[192], where[128];

    (void)state;
    if (!redis_rig_able())
        return;
    if (!redis_rig_tls(&redis, "")) {
        print_message("           skipped: no openssl here\n");
        return;
    }
    redis_rig_url(&redis, url, sizeof(url));
    snprintf(cert, sizeof(cert), "%s/cert.pem", redis.dir);
    remote_help_open(&help, url, NULL, NULL, cert);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 40, PAGES, NULL), 40);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 40, PAGES, NULL), 40);
    assert_int_equal(remote_help_put_many(&help, NS, 101, 4, 1024, NULL), 4);
    assert_int_equal(remote_help_get_many(&help, NS, 101, 4, 1024, NULL), 4);
    assert_int_equal(remote_help_probe(&help, NS, 1, 1000, NULL), 44);
    remote_help_close(&help);
    remote_help_open(&help, url, NULL, NULL, NULL); /* the system's authorities */
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), -EHOSTDOWN);
    remote_help_close(&help);
    snprintf(where, sizeof(where), "rediss://localhost:%d", redis.ports[0]);
    remote_help_open(&help, where, NULL, NULL, cert);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), -EHOSTDOWN);
    remote_help_close(&help);
    snprintf(where, sizeof(where), "redis://127.0.0.1:%d", redis.ports[0]); /* not TLS */
    remote_help_open(&help, where, NULL, NULL, NULL);
    assert_int_not_equal(remote_help_get(&help, NS, 1, PAGES), 0);
}

/* ---- what is said ---------------------------------------------------------------------------- */

static struct {
    pthread_mutex_t lock;
    unsigned count;
    char text[2048];
} said = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void take_line(void *arg, int level, const char *message)
{
    (void)arg;
    (void)level;
    pthread_mutex_lock(&said.lock);
    said.count++;
    snprintf(said.text + strlen(said.text), sizeof(said.text) - strlen(said.text), "%s\n", message);
    pthread_mutex_unlock(&said.lock);
}

/* A backend that does not get in: one warning, that names the server and has all these words. */
static void says(const char *where, const char *auth, const char *ca, const char *const words[3])
{
    char error[512] = "";

    memset(&help, 0, sizeof(help));
    said.count = 0;
    said.text[0] = '\0';
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    help.params = (struct kvt_remote_params){.where = where,
                                             .auth_file = auth,
                                             .ca_file = ca,
                                             .log = {.fn = take_line, .level_max = KVT_LOG_WARN}};
    assert_int_equal(kvt_remote_tier_open(&help.params, &help.remote, error, sizeof(error)), 0);
    for (int i = 0; i < 3; i++) {
        assert_int_not_equal(remote_help_get(&help, NS, 1, PAGES), 0);
        rig_sleep_ms(150); /* it tries again meanwhile, and fails again */
    }
    remote_help_close(&help);
    for (int i = 0; i < 3 && words[i]; i++)
        if (!strstr(said.text, words[i]))
            fail_msg("%s: \"%s\" is not in \"%s\"", where, words[i], said.text);
    if (said.count != 1)
        fail_msg("%s: %u lines: %s", where, said.count, said.text);
}

static void test_why_it_does_not_get_in(void **state)
{
    char where[300], at[32];

    (void)state;
    if (!begin("--requirepass first"))
        return;
    snprintf(redis.password, sizeof(redis.password), "first");
    snprintf(at, sizeof(at), "127.0.0.1:%d", redis.ports[0]);
    says(url, NULL, NULL, (const char *const[3]){at, "NOAUTH", "remote_auth"});
    says(url, file_with("auth", "wrong\n", 6), NULL,
         (const char *const[3]){at, "WRONGPASS", "remote_auth"});
    snprintf(where, sizeof(where), "rediss://%s", at);
    says(where, NULL, NULL, (const char *const[3]){at, "TLS", "redis://"});
    says("redis://127.0.0.1:1", NULL, NULL,
         (const char *const[3]){"127.0.0.1:1 ", "refused", NULL});
    snprintf(where, sizeof(where), "redis+unix:%s/no.sock", redis.dir);
    says(where, NULL, NULL, (const char *const[3]){"no.sock", "No such file", NULL});
}

/* A certificate that has expired an hour ago, and its key: old.pem, old.key. */
static void expired_certificate(const char *rig_dir)
{
    EVP_PKEY *key = EVP_RSA_gen(2048);
    X509 *cert = X509_new();
    X509_NAME *name = X509_NAME_new();
    X509_EXTENSION *san = X509V3_EXT_nconf_nid(NULL, NULL, NID_subject_alt_name, "IP:127.0.0.1");
    char path[192];
    FILE *file;

    assert_true(key && cert && name && san);
    assert_int_equal(
        X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const uint8_t *)"kvtier", -1, -1, 0),
        1);
    assert_int_equal(X509_set_version(cert, 2), 1);
    assert_int_equal(ASN1_INTEGER_set(X509_get_serialNumber(cert), 7), 1);
    assert_int_equal(X509_set_subject_name(cert, name), 1);
    assert_int_equal(X509_set_issuer_name(cert, name), 1);
    assert_non_null(X509_gmtime_adj(X509_getm_notBefore(cert), -7200));
    assert_non_null(X509_gmtime_adj(X509_getm_notAfter(cert), -3600));
    assert_int_equal(X509_add_ext(cert, san, -1), 1);
    assert_int_equal(X509_set_pubkey(cert, key), 1);
    assert_true(X509_sign(cert, key, EVP_sha256()) > 0);
    snprintf(path, sizeof(path), "%s/old.pem", rig_dir);
    file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(PEM_write_X509(file, cert), 1);
    fclose(file);
    snprintf(path, sizeof(path), "%s/old.key", rig_dir);
    file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL), 1);
    fclose(file);
    X509_EXTENSION_free(san);
    X509_NAME_free(name);
    X509_free(cert);
    EVP_PKEY_free(key);
}

static void test_why_tls_does_not_get_in(void **state)
{
    char where[400], cert[192], at[32], out[256];

    (void)state;
    if (!redis_rig_able() || !redis_rig_tls(&redis, ""))
        return;
    redis_rig_url(&redis, url, sizeof(url));
    snprintf(cert, sizeof(cert), "%s/cert.pem", redis.dir);
    snprintf(at, sizeof(at), "127.0.0.1:%d", redis.ports[0]);
    says(url, NULL, NULL, (const char *const[3]){at, "certificate", "remote_ca"});
    snprintf(where, sizeof(where), "redis://%s", at);
    says(where, NULL, NULL, (const char *const[3]){at, "rediss://", NULL});
    /* another name for it, where this machine's "localhost" is that address */
    snprintf(where, sizeof(where), "rediss://localhost:%d", redis.ports[0]);
    says(where, NULL, cert, (const char *const[3]){"localhost", NULL, NULL});
    if (!strstr(said.text, "another name") && !strstr(said.text, "cannot be connected"))
        fail_msg("%s", said.text);
    /* it expires: who is connected stays so, nobody connects any more, and why is told */
    remote_help_open(&help, url, NULL, NULL, cert);
    wait_alive();
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS); /* over a second one */
    expired_certificate(redis.dir);
    snprintf(where, sizeof(where), "CONFIG SET tls-cert-file %s/old.pem tls-key-file %s/old.key",
             redis.dir, redis.dir);
    redis_rig_cli(&redis, 0, where, out, sizeof(out));
    if (strcmp(out, "OK") != 0)
        return; /* not one at a time: a server of before 7.0 */
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS);
    remote_help_close(&help);
    snprintf(cert, sizeof(cert), "%s/old.pem", redis.dir);
    says(url, NULL, cert, (const char *const[3]){at, "certificate", "expired"});
}

/* ?replicas of a server that has none in its map. */
static void test_replicas_of_a_single_server(void **state)
{
    char where[600];

    (void)state;
    if (!begin(""))
        return;
    snprintf(where, sizeof(where), "%s?replicas=yes", url);
    memset(&help, 0, sizeof(help));
    said.count = 0;
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    help.params = (struct kvt_remote_params){.where = where,
                                             .log = {.fn = take_line, .level_max = KVT_LOG_WARN}};
    assert_int_equal(kvt_remote_tier_open(&help.params, &help.remote, where, sizeof(where)), 0);
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
    remote_help_close(&help);
    assert_int_equal(said.count, 1);
    assert_non_null(strstr(said.text, "?replicas=yes has no effect"));
}

/* ---- who may ------------------------------------------------------------------------------- */

/* No password, a wrong one, the right one; then another one on the server and in the file. */
static void test_password_changes(void **state)
{
    const char *file;
    char out[256];

    (void)state;
    if (!begin("--requirepass first"))
        return;
    snprintf(redis.password, sizeof(redis.password), "first");
    file = file_with("auth", "wrong\n", 6);
    remote_help_open(&help, url, file, NULL, NULL);
    assert_int_not_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    assert_true(stats().auth_fails > 0);
    file_with("auth", "first\n", 6);
    assert_int_equal(chmod(file, 0644), 0); /* others may read it: not used */
    for (int i = 0; i < 3; i++) {
        assert_int_not_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
        rig_sleep_ms(200);
    }
    assert_int_equal(chmod(file, 0600), 0);
    wait_alive();
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
    redis_rig_cli(&redis, 0, "CONFIG SET requirepass second", out, sizeof(out));
    snprintf(redis.password, sizeof(redis.password), "second");
    redis_rig_cli(&redis, 0, "CLIENT KILL TYPE normal SKIPME yes", out, sizeof(out));
    for (int i = 0; i < 3; i++)
        assert_int_not_equal(remote_help_get(&help, NS, 1, PAGES), 0);
    file_with("auth", "second\n", 7);
    wait_alive();
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
}

/* A user that may do what is needed and no more. */
static void test_acl_user(void **state)
{
    char out[512];
    uint64_t removed;

    (void)state;
    if (!begin(""))
        return;
    redis_rig_cli(&redis, 0,
                  "ACL SETUSER kv on >secret ~kvt0:* +getrange +get +set +exists +unlink +scan "
                  "+ping",
                  out, sizeof(out));
    assert_string_equal(out, "OK");
    remote_help_open(&help, url, file_with("auth", "kv secret\n", 10), NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 4, PAGES, NULL), 4);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 4, PAGES, NULL), 4);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, &removed), 0);
    assert_int_equal(removed, 4);
    redis_rig_cli(&redis, 0, "ACL SETUSER kv -set", out, sizeof(out));
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), -EACCES);
}

/* ---- what is not ours, or not any more ----------------------------------------------------- */

static void name_of(uint64_t number, char out[KVT_REMOTE_NAME_BYTES])
{
    struct kvt_full_key key = remote_help_key(NS, number);

    (void)kvt_remote_name(&key, out);
}

static void test_damaged_and_foreign_objects(void **state)
{
    char words[512], key[KVT_REMOTE_NAME_BYTES], six[KVT_REMOTE_NAME_BYTES], out[256];

    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 6, PAGES, NULL), 6);
    name_of(1, key);
    snprintf(words, sizeof(words), "SETRANGE %s 5000 x", key); /* a byte of the payload */
    assert_int_equal(redis_rig_number(&redis, 0, words), PAGES * KVT_PAGE_BYTES);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_CORRUPT);
    name_of(2, key);
    snprintf(words, sizeof(words), "APPEND %s x", key);
    assert_int_equal(redis_rig_number(&redis, 0, words), PAGES * KVT_PAGE_BYTES + 1);
    assert_int_equal(remote_help_get(&help, NS, 2, PAGES), KVT_E_CORRUPT);
    name_of(3, key);
    snprintf(words, sizeof(words), "SET %s short", key);
    redis_rig_cli(&redis, 0, words, out, sizeof(out));
    assert_int_equal(remote_help_get(&help, NS, 3, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 3), KVT_E_CORRUPT);
    name_of(4, key);
    snprintf(words, sizeof(words), "DEL %s", key);
    redis_rig_cli(&redis, 0, words, out, sizeof(out));
    snprintf(words, sizeof(words), "LPUSH %s 1 2 3", key);
    redis_rig_cli(&redis, 0, words, out, sizeof(out));
    assert_int_equal(remote_help_get(&help, NS, 4, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 4), KVT_E_CORRUPT);
    assert_int_equal(remote_help_found(&help, NS, 40), KVT_E_MISS);
    /* the record of another key under this name */
    name_of(6, six);
    name_of(5, key);
    snprintf(words, sizeof(words), "COPY %s %s REPLACE", six, key);
    assert_int_equal(redis_rig_number(&redis, 0, words), 1);
    assert_int_equal(remote_help_get(&help, NS, 5, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_get(&help, NS, 6, PAGES), 0);
    /* a whole record of another length is no damage */
    assert_int_equal(remote_help_put(&help, NS, 7, PAGES + 1, false), 0);
    assert_int_equal(remote_help_get(&help, NS, 7, PAGES), KVT_E_STALE);
    assert_int_equal(remote_help_get(&help, NS, 7, PAGES + 2), KVT_E_STALE);
    /* each of them is replaced, whatever it is, when it is put for that */
    for (uint64_t number = 1; number <= 7; number++) {
        assert_int_equal(remote_help_put(&help, NS, number, PAGES, false), KVT_E_EXISTS);
        assert_int_equal(remote_help_put(&help, NS, number, PAGES, true), 0);
    }
    assert_int_equal(remote_help_get_many(&help, NS, 1, 7, PAGES, NULL), 7);
}

/* With a key, what was written without it, or with another one, is not loaded. */
static void test_mac(void **state)
{
    const char *mine, *other;

    (void)state;
    if (!begin(""))
        return;
    mine = file_with("mine", "0123456789abcdef0123456789abcdef", 32);
    other = file_with("other", "fedcba9876543210fedcba9876543210", 32);
    remote_help_open(&help, url, NULL, mine, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 4, PAGES, NULL), 4);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 4, PAGES, NULL), 4);
    remote_help_close(&help);
    remote_help_open(&help, url, NULL, other, NULL);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_put(&help, NS, 5, PAGES, false), 0);
    remote_help_close(&help);
    remote_help_open(&help, url, NULL, NULL, NULL); /* who has no key looks at none */
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
    assert_int_equal(remote_help_put(&help, NS, 6, PAGES, false), 0);
    remote_help_close(&help);
    remote_help_open(&help, url, NULL, mine, NULL);
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), 0);
    assert_int_equal(remote_help_get(&help, NS, 5, PAGES), KVT_E_CORRUPT);
    assert_int_equal(remote_help_get(&help, NS, 6, PAGES), KVT_E_CORRUPT); /* it has no MAC */
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES + 1), KVT_E_STALE);
    assert_int_equal(remote_help_put(&help, NS, 6, PAGES, true), 0);
    assert_int_equal(remote_help_get(&help, NS, 6, PAGES), 0);
}

/* ---- a server in trouble ------------------------------------------------------------------- */

/* Full, and nothing may go: puts are refused. Full, and the oldest goes: misses, never bytes of
 * others. */
static void test_memory_full(void **state)
{
    uint32_t got = 0, put = 0;
    char out[256];
    int other = 0;

    (void)state;
    if (!begin("--maxmemory 12mb --maxmemory-policy noeviction"))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    for (uint32_t i = 0; i < 20 && other != KVT_E_NO_SPACE; i++)
        put += remote_help_put_many(&help, NS, 1 + i * 16, 16, 16, &other);
    assert_int_equal(other, KVT_E_NO_SPACE);
    assert_true(put > 0);
    redis_rig_cli(&redis, 0, "CONFIG SET maxmemory-policy allkeys-lru", out, sizeof(out));
    for (uint32_t i = 0; i < 30; i++) {
        uint32_t now = remote_help_put_many(&help, NS, 1001 + i * 16, 16, 16, &other);

        assert_true(now == 16 || other == KVT_E_EXISTS || other == KVT_E_NO_SPACE);
    }
    for (uint32_t i = 0; i < 30; i++) {
        got += remote_help_get_many(&help, NS, 1001 + i * 16, 16, 16, &other);
        assert_true(other == 0 || other == KVT_E_MISS);
    }
    assert_true(got > 0 && got < 480);
}

static void test_killed_and_started_again(void **state)
{
    int status;

    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 20, PAGES, NULL), 20);
    redis_rig_kill(&redis, 0);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 20, PAGES, &status), 0);
    assert_int_equal(status, -EHOSTDOWN);
    assert_int_equal(remote_help_put(&help, NS, 50, PAGES, false), -EHOSTDOWN);
    assert_int_equal(remote_help_drop(&help, NS, 0, 0, NULL), -EHOSTDOWN);
    assert_int_equal(stats().nodes_down, 1);
    redis_rig_run(&redis, 0);
    wait_alive();
    assert_int_equal(remote_help_get(&help, NS, 1, PAGES), KVT_E_MISS);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 20, PAGES, NULL), 20);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 20, PAGES, NULL), 20);
    assert_int_equal(stats().nodes_down, 0);
}

/* Nobody there from the start. */
static void test_never_there(void **state)
{
    int status;

    (void)state;
    if (!begin(""))
        return;
    redis_rig_kill(&redis, 0);
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_probe(&help, NS, 1, 100, &status), 0);
    assert_int_equal(status, -EHOSTDOWN);
    redis_rig_run(&redis, 0);
    wait_alive();
    assert_int_equal(remote_help_put(&help, NS, 1, PAGES, false), 0);
}

/* A frozen server: requests under way end by their deadline, later ones at once; when it goes on,
 * late answers land nowhere. */
static void test_frozen(void **state)
{
    int status;

    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 20, 64, NULL), 20);
    assert_int_equal(remote_help_get_many(&help, NS, 1, 20, 64, NULL), 20); /* it is connected */
    redis_rig_freeze(&redis, 0, true);
    help.deadline_ns = 200000000;
    assert_int_equal(remote_help_get_many(&help, NS, 1, 20, 64, &status), 0);
    assert_true(status == KVT_E_DEADLINE || status == -EHOSTDOWN);
    assert_int_equal(remote_help_put_many(&help, NS, 101, 20, 64, &status), 0);
    assert_int_equal(status, -EHOSTDOWN);
    assert_int_equal(remote_help_probe(&help, NS, 1, 500, &status), 0);
    assert_int_equal(status, -EHOSTDOWN);
    redis_rig_freeze(&redis, 0, false);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    wait_alive();
    assert_int_equal(remote_help_get_many(&help, NS, 1, 20, 64, NULL), 20);
}

/* Deadlines that are over while replies are on their way: those that come late are read into
 * nothing, and the ones behind them are right. */
static void test_late_replies_land_nowhere(void **state)
{
    uint32_t got = 0;

    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 24, 512, NULL), 24);
    for (uint32_t i = 0; i < 30; i++) {
        help.deadline_ns = 1000000 + i * 1500000;
        got += remote_help_get_many(&help, NS, 1, 24, 512, NULL);
    }
    print_message("           %u of 720 came in time\n", got);
    help.deadline_ns = REMOTE_HELP_DEADLINE_NS;
    wait_alive();
    assert_int_equal(remote_help_get_many(&help, NS, 1, 24, 512, NULL), 24);
}

/* Stopped with work under way: nothing is touched after. */
static void test_stop_under_load(void **state)
{
    static struct kvt_remote_req reqs[64];
    static struct kvt_full_key keys[64];
    uint8_t *records;

    (void)state;
    if (!begin(""))
        return;
    remote_help_open(&help, url, NULL, NULL, NULL);
    assert_int_equal(remote_help_put_many(&help, NS, 1, 64, 64, NULL), 64);
    records = aligned_alloc(4096, 64 * 64 * 4096);
    assert_non_null(records);
    for (uint32_t i = 0; i < 64; i++) {
        keys[i] = remote_help_key(NS, 1 + i);
        reqs[i] = (struct kvt_remote_req){.op = KVT_REMOTE_GET,
                                          .count = 1,
                                          .keys = &keys[i],
                                          .record = records + (size_t)i * 64 * 4096,
                                          .record_bytes = 64 * 4096,
                                          .deadline_ns = INT64_MAX};
        assert_int_equal(help.remote->ops->submit(help.remote, &reqs[i]), 0);
    }
    help.remote->ops->stop(help.remote);
    free(records);
    remote_help_close(&help);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_put_get_probe_drop, tear_down),
        cmocka_unit_test_teardown(test_long_records, tear_down),
        cmocka_unit_test_teardown(test_a_better_record_replaces, tear_down),
        cmocka_unit_test_teardown(test_drop_namespace, tear_down),
        cmocka_unit_test_teardown(test_time_to_live, tear_down),
        cmocka_unit_test_teardown(test_unix_socket, tear_down),
        cmocka_unit_test_teardown(test_tls, tear_down),
        cmocka_unit_test_teardown(test_replicas_of_a_single_server, tear_down),
        cmocka_unit_test_teardown(test_why_tls_does_not_get_in, tear_down),
        cmocka_unit_test_teardown(test_why_it_does_not_get_in, tear_down),
        cmocka_unit_test_teardown(test_password_changes, tear_down),
        cmocka_unit_test_teardown(test_acl_user, tear_down),
        cmocka_unit_test_teardown(test_damaged_and_foreign_objects, tear_down),
        cmocka_unit_test_teardown(test_mac, tear_down),
        cmocka_unit_test_teardown(test_memory_full, tear_down),
        cmocka_unit_test_teardown(test_killed_and_started_again, tear_down),
        cmocka_unit_test_teardown(test_never_there, tear_down),
        cmocka_unit_test_teardown(test_frozen, tear_down),
        cmocka_unit_test_teardown(test_late_replies_land_nowhere, tear_down),
        cmocka_unit_test_teardown(test_stop_under_load, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
