/* The note that remembers a model's digest, of any bytes, and model names of any bytes: a note is
 * taken only as 64 hex digits and a newline; anything else, and the file is read.
 * Input: 0 and a note, or 1 and the name of a model. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz/fuzz.h"
#include "llama_digest.h"

static char dir[256], model[300], note[600], truth[KVT_DIGEST_HEX + 1];

static void tidy(void)
{
    unlink(note);
    unlink(model);
    rmdir(dir);
}

static long long stamp(struct timespec at)
{
    return (long long)at.tv_sec * 1000000000 + at.tv_nsec;
}

static void prepare(void)
{
    const char *tmp = getenv("TMPDIR");
    struct stat st;
    int fd;

    snprintf(dir, sizeof dir, "%s/kvt-fuzz-XXXXXX", tmp ? tmp : "/tmp");
    FUZZ_CHECK(mkdtemp(dir) != NULL);
    atexit(tidy);
    snprintf(model, sizeof model, "%s/model.gguf", dir);
    fd = open(model, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    FUZZ_CHECK(fd >= 0 && write(fd, "GGUF", 4) == 4 && fstat(fd, &st) == 0 && close(fd) == 0);
    snprintf(note, sizeof note, "%s/%llx-%llx-%llx-%llx-%llx.sha256", dir,
             (unsigned long long)st.st_dev, (unsigned long long)st.st_ino,
             (unsigned long long)st.st_size, (unsigned long long)stamp(st.st_mtim),
             (unsigned long long)stamp(st.st_ctim));
    FUZZ_CHECK(kvt_model_digest(model, NULL, truth) == 0);
}

static void check_note(struct fuzz_input *in)
{
    char hex[KVT_DIGEST_HEX + 1];
    int fd = open(note, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    size_t bytes = in->size < 4096 ? in->size : 4096;

    FUZZ_CHECK(fd >= 0 && write(fd, in->data, bytes) == (ssize_t)bytes && close(fd) == 0);
    FUZZ_CHECK(kvt_model_digest(model, dir, hex) == 0);
    FUZZ_CHECK(strlen(hex) == KVT_DIGEST_HEX && strspn(hex, "0123456789abcdef") == 64);
    if (strcmp(hex, truth) != 0) /* then the note said so, whole and in its form */
        FUZZ_CHECK(bytes == 65 && in->data[64] == '\n' && memcmp(hex, in->data, 64) == 0);
    unlink(note);
}

static void check_name(struct fuzz_input *in)
{
    char path[700], hex[KVT_DIGEST_HEX + 1];
    size_t len = (size_t)snprintf(path, sizeof path, "%s/", dir);

    for (size_t i = 0; i < in->size && i < 250; i++)
        path[len++] = in->data[i] == '/' ? '_' : (char)in->data[i];
    path[len] = 0;
    if (kvt_model_digest(path, NULL, hex) == 0)
        FUZZ_CHECK(strcmp(hex, truth) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input in = {data, size};

    if (!dir[0])
        prepare();
    if (fuzz_u8(&in) & 1)
        check_name(&in);
    else
        check_note(&in);
    return 0;
}
