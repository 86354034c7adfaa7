/* Shared by the files of `kvtier demo` (cmd_demo*.c); `kvtier quality` uses the model, the texts
 * and the paths. One process, one thread. */
#ifndef KVT_TOOLS_DEMO_H
#define KVT_TOOLS_DEMO_H

#include <jansson.h>
#include <kvtier/kvtier.h>
#include <kvtier/llama.h>
#include <limits.h>
#include <llama.h>
#include <stddef.h>
#include <stdint.h>

#define DEMO_QUESTIONS 3
#define DEMO_TOKENS 2000       /* of the first prompt, unless asked otherwise */
#define DEMO_ANSWER_TOKENS 48  /* longest answer that is generated */
#define DEMO_FORCED_TOKENS 256 /* text of the quality measurement */
#define DEMO_BATCH_TOKENS 512

/* What the command line says; the same in the processes of both phases. */
struct demo_config {
    const char *model;       /* path of the GGUF */
    const char *dir;         /* directory of the store */
    const char *prompt_file; /* NULL: the built-in document */
    const char *digest_dir;  /* NULL: model digests are not remembered */
    const char *remote; /* a tier that machines share, and no disk: each process is a machine */
    const char *socket; /* of a kvtierd that holds the store; NULL: each process holds it */
    int level;
    int64_t tokens; /* of the first prompt */
    int64_t threads;
    int64_t window;
    int say_short; /* say when the text has fewer tokens than asked for */
    int64_t block; /* tokens of a block */
};

/* --- cmd_demo_engine.c: a model and a context --- */
struct demo_engine {
    const char *command; /* whose name the messages bear */
    struct llama_model *model;
    struct llama_context *ctx;
    struct llama_context_params params;
    struct ggml_threadpool *pool;
    const struct llama_vocab *vocab;
    struct llama_batch batch;
    char failure[1024]; /* last error lines of llama.cpp, "a; b" */
};

/* Load a model (command: in messages, borrowed); then make a context of n_ctx tokens. Each prints
 * the reason and returns -1 on failure; close in any case. */
int demo_engine_open(struct demo_engine *engine, const char *command, const char *model);
int demo_engine_context(struct demo_engine *engine, int64_t threads, uint32_t n_ctx);
void demo_engine_close(struct demo_engine *engine);

/* Tokens of a text; *count is set; the array is the caller's (free). NULL on failure. special: the
 * text holds control tokens (a chat template). */
int32_t *demo_tokenize(const struct demo_engine *engine, const char *text, size_t len, int special,
                       size_t *count);
/* Text of tokens; the caller frees it. NULL on failure. */
char *demo_detokenize(const struct demo_engine *engine, const int32_t *tokens, size_t count);

/* Compute tokens[from..to) of sequence 0 at their positions; logits of the last one, or of all (at
 * most DEMO_BATCH_TOKENS then). what: shown as progress, or NULL.
 * 0; -1 interrupted or failed (said). */
int demo_decode(struct demo_engine *engine, const int32_t *tokens, size_t from, size_t to,
                int all_logits, const char *what);

/* Most probable token at output i of the last decode (-1: the last). */
int32_t demo_argmax(const struct demo_engine *engine, int32_t i);

/* --- cmd_demo_prompt.c: what is asked --- */
struct demo_question {
    const char *text;
    int32_t *tokens; /* whole prompt: template, document, question */
    size_t count;
    char *prompt; /* its text */
};
struct demo_prompt {
    struct demo_question questions[DEMO_QUESTIONS];
    int32_t *forced; /* DEMO_FORCED_TOKENS of the document, behind what the prompt took of it */
    char title[128];
};

/* Make the prompts; the engine needs no context yet. Prints the reason and
 * returns -1 on failure. */
int demo_prompt_make(struct demo_prompt *prompt, const struct demo_engine *engine,
                     const struct demo_config *config);
void demo_prompt_free(struct demo_prompt *prompt);
/* Longest prompt. */
size_t demo_prompt_max(const struct demo_prompt *prompt);
/* A file of UTF-8 text without NULs, as llama.cpp's tokenizers want it; the caller frees it. NULL:
 * the reason has been printed. option: how the file was named, for the message. */
char *demo_read_text(const char *command, const char *option, const char *path, size_t *len);

/* --- cmd_demo.c --- */
struct demo_paths {
    char cache[PATH_MAX - 64]; /* of the scripts */
    char model[PATH_MAX];
    char digests[PATH_MAX];
    char dir[PATH_MAX];
};
/* 0, or -1 when there is no HOME. */
int demo_cache_paths(struct demo_paths *paths);
/* The processors, at most 8. */
int64_t demo_default_threads(void);

/* --- cmd_demo_phase.c: what the processes do --- */
/* request: {"phase": "first"|"restart"|"prefetch", the configuration, "expect": [...]}; the result
 * goes as one JSON document to fd. Returns an exit code. */
int demo_child(const char *request, int fd);

/* --- cmd_demo_report.c --- */
/* The public JSON document of the phases' results; prefetch: NULL when there was none. */
json_t *demo_report(const struct demo_config *config, const json_t *first, const json_t *restart,
                    const json_t *prefetch);
void demo_print(const json_t *report);

int64_t demo_now_ns(void);
/* llama.cpp's log to nowhere. */
void demo_quiet(enum ggml_log_level level, const char *text, void *arg);

#endif
