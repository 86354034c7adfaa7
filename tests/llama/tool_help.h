/* Help for the tests of the tools that run a model: the built binary with words, its output, a work
 * directory with a tiny model that is also its cache directory. Failures are cmocka assertions.
 */
#ifndef KVT_TESTS_TOOL_HELP_H
#define KVT_TESTS_TOOL_HELP_H

#include <jansson.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "llama_help.h"

extern char **environ;

static char work[64], model[128];

struct outcome {
    int status; /* exit code, or -signal */
    char out[65536], err[8192];
};

static inline void read_all(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "rb");

    assert_non_null(file);
    size_t len = fread(text, 1, room - 1, file);
    text[len] = '\0';
    fclose(file);
}

static inline pid_t start(const char *const argv[], const char *out, const char *err)
{
    posix_spawn_file_actions_t actions;
    pid_t child;

    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    assert_int_equal(
        posix_spawn_file_actions_addopen(&actions, 1, out, O_WRONLY | O_CREAT | O_TRUNC, 0600), 0);
    assert_int_equal(
        posix_spawn_file_actions_addopen(&actions, 2, err, O_WRONLY | O_CREAT | O_TRUNC, 0600), 0);
    assert_int_equal(
        posix_spawn(&child, KVT_TOOL, &actions, NULL, (char *const *)(uintptr_t)argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    return child;
}

/* Run `kvtier COMMAND` with up to 20 more words (NULL ends). */
static inline void run_tool(struct outcome *outcome, const char *command, const char *const words[])
{
    const char *argv[24] = {"kvtier", command};
    char out[128], err[128];
    int status;

    for (int i = 0; words[i] != NULL; i++)
        argv[i + 2] = words[i];
    snprintf(out, sizeof(out), "%s/out", work);
    snprintf(err, sizeof(err), "%s/err", work);
    pid_t child = start(argv, out, err);
    assert_int_equal(waitpid(child, &status, 0), child);
    outcome->status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    read_all(out, outcome->out, sizeof(outcome->out));
    read_all(err, outcome->err, sizeof(outcome->err));
}

static inline int setup(void **state)
{
    (void)state;
    struct tiny_spec spec = tiny_plain;

    snprintf(work, sizeof(work), "/var/tmp/kvt-test-tool-XXXXXX");
    assert_non_null(mkdtemp(work));
    snprintf(model, sizeof(model), "%s/tiny.gguf", work);
    spec.words = 1;
    struct llama_model *tiny = tiny_model(&spec);
    llama_model_save_to_file(tiny, model);
    llama_model_free(tiny);
    assert_int_equal(setenv("KVTIER_CACHE_DIR", work, 1), 0);
    return 0;
}

static inline void remove_tree(const char *dir)
{
    char path[4200];
    struct dirent *entry;
    DIR *list = opendir(dir);

    if (list == NULL)
        return;
    while ((entry = readdir(list)) != NULL) {
        struct stat st;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (snprintf(path, sizeof(path), "%s/%s", dir, entry->d_name) >= (int)sizeof(path))
            continue;
        if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode))
            remove_tree(path);
        else
            (void)unlink(path);
    }
    closedir(list);
    (void)rmdir(dir);
}

static inline int teardown(void **state)
{
    (void)state;
    remove_tree(work);
    return 0;
}

static inline double number(const json_t *object, const char *a, const char *b)
{
    const json_t *value = json_object_get(object, a);

    if (b != NULL)
        value = json_object_get(value, b);
    if (!json_is_number(value))
        fail_msg("no number %s %s", a, b != NULL ? b : "");
    return json_number_value(value);
}

#endif
