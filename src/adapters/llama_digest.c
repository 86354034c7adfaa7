/* Full digests of model files, remembered where the caller allows it.
 *
 * Why the whole file: two models that differ in one row must not share a cache, and no sample finds
 * one row. Why remember: a 40 GB file takes half a minute even with SHA instructions.
 * Invariants: a remembered digest is used only for the same device, inode, size, mtime and ctime
 * (ctime cannot be set back by a program), and only files whose last change is older than
 * SETTLED_NS are remembered: a file may change twice within one tick of its time stamp. A file
 * that changes while it is read gives an error. Threads: any. It prints nothing.
 */
#include "llama_digest.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <kvtier/error.h>
#include <openssl/evp.h>

#include "base/fd.h"

#define READ_BYTES ((size_t)4 << 20)
#define SETTLED_NS 2000000000
#define PATH_BYTES 4096
#define SPLIT_TAIL 20 /* "-00001-of-00003.gguf" */
#define NS_PER_S 1000000000

static void to_hex(const uint8_t digest[32], char hex[KVT_DIGEST_HEX + 1])
{
    for (int i = 0; i < 32; i++)
        snprintf(hex + 2 * (size_t)i, 3, "%02x", digest[i]);
}

static int64_t stamp_ns(struct timespec at)
{
    return (int64_t)at.tv_sec * NS_PER_S + at.tv_nsec;
}

static int same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           stamp_ns(a->st_mtim) == stamp_ns(b->st_mtim) &&
           stamp_ns(a->st_ctim) == stamp_ns(b->st_ctim);
}

static int hash_fd(int fd, char hex[KVT_DIGEST_HEX + 1])
{
    int rc = -ENOMEM;
    uint8_t digest[EVP_MAX_MD_SIZE];
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    uint8_t *buffer = malloc(READ_BYTES);

    if (md == NULL || buffer == NULL || EVP_DigestInit_ex(md, EVP_sha256(), NULL) != 1)
        goto out;
    for (;;) {
        ssize_t got = read(fd, buffer, READ_BYTES);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            rc = -errno;
            goto out;
        }
        if (got == 0)
            break;
        if (EVP_DigestUpdate(md, buffer, (size_t)got) != 1)
            goto out;
    }
    if (EVP_DigestFinal_ex(md, digest, NULL) != 1)
        goto out;
    to_hex(digest, hex);
    rc = 0;
out:
    free(buffer);
    EVP_MD_CTX_free(md);
    return rc;
}

/* Name of the note for a file: every field that changes when its bytes may have. */
static int note_path(const char *dir, const struct stat *st, char path[PATH_BYTES])
{
    int len = snprintf(path, PATH_BYTES, "%s/%llx-%llx-%llx-%llx-%llx.sha256", dir,
                       (unsigned long long)st->st_dev, (unsigned long long)st->st_ino,
                       (unsigned long long)st->st_size, (unsigned long long)stamp_ns(st->st_mtim),
                       (unsigned long long)stamp_ns(st->st_ctim));
    return len > 0 && len < PATH_BYTES;
}

static int read_note(const char *path, char hex[KVT_DIGEST_HEX + 1])
{
    char text[KVT_DIGEST_HEX + 2];
    int fd = kvt_fd_high(open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW));

    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof(text));
    close(fd);
    if (got != KVT_DIGEST_HEX + 1 || text[KVT_DIGEST_HEX] != '\n')
        return 0;
    for (int i = 0; i < KVT_DIGEST_HEX; i++)
        if (!isxdigit((unsigned char)text[i]) || isupper((unsigned char)text[i]))
            return 0;
    memcpy(hex, text, KVT_DIGEST_HEX);
    hex[KVT_DIGEST_HEX] = '\0';
    return 1;
}

/* Best effort: without the note the next run reads the file again. */
static void write_note(const char *dir, const char *path, const char *hex)
{
    char tmp[PATH_BYTES + 16];
    char text[KVT_DIGEST_HEX + 2];

    (void)mkdir(dir, 0700);
    snprintf(tmp, sizeof(tmp), "%s.XXXXXX", path);
    int fd = kvt_fd_high(mkostemp(tmp, O_CLOEXEC)); /* 0600 */
    if (fd < 0)
        return;
    snprintf(text, sizeof(text), "%s\n", hex);
    int ok = write(fd, text, KVT_DIGEST_HEX + 1) == KVT_DIGEST_HEX + 1;
    ok = close(fd) == 0 && ok;
    if (!ok || rename(tmp, path) != 0)
        (void)unlink(tmp);
}

static int file_digest(const char *path, const char *remember, char hex[KVT_DIGEST_HEX + 1])
{
    char note[PATH_BYTES];
    struct stat before, after;
    struct timespec now;
    int fd = kvt_fd_high(open(path, O_RDONLY | O_CLOEXEC));

    if (fd < 0)
        return -errno;
    int rc = fstat(fd, &before) != 0 ? -errno : 0;
    if (rc == 0 && !S_ISREG(before.st_mode))
        rc = -EINVAL;
    if (rc != 0)
        goto out;
    if (remember != NULL && !note_path(remember, &before, note))
        remember = NULL;
    if (remember != NULL && read_note(note, hex))
        goto out;
    rc = hash_fd(fd, hex);
    if (rc != 0)
        goto out;
    if (fstat(fd, &after) != 0 || !same_file(&before, &after)) {
        rc = KVT_E_ENGINE;
        goto out;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    if (remember != NULL && stamp_ns(now) - stamp_ns(before.st_ctim) > SETTLED_NS)
        write_note(remember, note, hex);
out:
    close(fd);
    return rc;
}

/* Five digits as a number; 0 when there are other characters (no part has number 0). */
static unsigned five_digits(const char *text)
{
    unsigned number = 0;

    for (int i = 0; i < 5; i++) {
        if (!isdigit((unsigned char)text[i]))
            return 0;
        number = number * 10 + (unsigned)(text[i] - '0');
    }
    return number;
}

/* Number of parts when the name ends in "-00001-of-NNNNN.gguf", else 0. */
static unsigned split_count(const char *path)
{
    size_t len = strlen(path);

    if (len < SPLIT_TAIL)
        return 0;
    const char *tail = path + len - SPLIT_TAIL;
    if (tail[0] != '-' || memcmp(tail + 6, "-of-", 4) != 0 || strcmp(tail + 15, ".gguf") != 0)
        return 0;
    const unsigned count = five_digits(tail + 10);
    return five_digits(tail + 1) == 1 && count > 1 ? count : 0;
}

int kvt_model_digest(const char *path, const char *remember, char hex[KVT_DIGEST_HEX + 1])
{
    char part_path[PATH_BYTES], part_hex[KVT_DIGEST_HEX + 1];
    uint8_t digest[EVP_MAX_MD_SIZE];
    const unsigned parts = split_count(path);
    EVP_MD_CTX *md;

    if (parts == 0)
        return file_digest(path, remember, hex);
    md = EVP_MD_CTX_new();
    int rc = md != NULL && EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1 ? 0 : -ENOMEM;
    for (unsigned i = 1; rc == 0 && i <= parts; i++) {
        int len = snprintf(part_path, sizeof(part_path), "%.*s-%05u-of-%05u.gguf",
                           (int)(strlen(path) - SPLIT_TAIL), path, i, parts);
        rc = len > 0 && len < PATH_BYTES ? file_digest(part_path, remember, part_hex)
                                         : -ENAMETOOLONG;
        if (rc == 0 && EVP_DigestUpdate(md, part_hex, KVT_DIGEST_HEX) != 1)
            rc = -ENOMEM;
    }
    if (rc == 0 && EVP_DigestFinal_ex(md, digest, NULL) != 1)
        rc = -ENOMEM;
    if (rc == 0)
        to_hex(digest, hex);
    EVP_MD_CTX_free(md);
    return rc;
}
