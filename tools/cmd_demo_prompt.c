/* kvtier demo: the document, the questions, and the prompts made of them.
 *
 * Every prompt is the model's chat template around "document, blank line, question", so that all
 * share the document as prefix. The document is cut at the end of a sentence such that the first
 * prompt has at most the tokens asked for, and about half a block beyond its whole blocks: those
 * are computed each time, and half a block is the average of all prompts. What follows the cut is
 * the text of the quality measurement (its beginning again, when it is too short).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "demo.h"
#include "demo_document.h" /* generated: demo_document[], demo_document_len */

#define FILE_BYTES_MAX ((size_t)16 << 20)
#define SMOL_SYSTEM "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
#define CUT_TRIES 16
#define TOKEN_BYTES_MAX 64 /* bytes of text per token, more than any text has on average */

/* Answers: Tomas Breck; Clara Venn; Elias Fenn. The text is invented: no model knows them by heart.
 */
static const char *const document_questions[DEMO_QUESTIONS] = {
    "Who was the first keeper of Cape Orrin?",
    "Who is the keeper of Port Lammas?",
    "What was the name of the captain in the storm of 1904?",
};
static const char *const file_questions[DEMO_QUESTIONS] = {
    "What is the text above about? Answer in one sentence.",
    "Which names does the text above mention? Answer briefly.",
    "What does the text above say first? Answer in one sentence.",
};

/* Bytes of the UTF-8 character at text, at most left; 0 when there is none, or it is a NUL: the
 * tokenizer of llama.cpp ends the process on such bytes. */
static size_t character(const unsigned char *text, size_t left)
{
    size_t n = text[0] < 0x80   ? 1
               : text[0] < 0xc2 ? 0
               : text[0] < 0xe0 ? 2
               : text[0] < 0xf0 ? 3
                                : 4;

    if (n == 0 || n > left || text[0] == 0 || text[0] > 0xf4)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    /* overlong forms, surrogates, beyond U+10FFFF */
    if ((text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xed && text[1] > 0x9f) ||
        (text[0] == 0xf0 && text[1] < 0x90) || (text[0] == 0xf4 && text[1] > 0x8f))
        return 0;
    return n;
}

static int is_text(const char *text, size_t len)
{
    for (size_t at = 0, n; at < len; at += n) {
        n = character((const unsigned char *)text + at, len - at);
        if (n == 0)
            return 0;
    }
    return 1;
}

/* Why what was read is no text to ask about; NULL: it is one. */
static const char *text_problem(const char *text, FILE *file, size_t len, int error)
{
    if (text == NULL)
        return "cannot be read: out of memory";
    if (ferror(file))
        return error == EISDIR ? "is a directory: name a text file" : "cannot be read";
    if (len == 0)
        return "is empty";
    if (len == FILE_BYTES_MAX)
        return "is too long: less than 16 MiB, please";
    if (memchr(text, 0, len) != NULL)
        return "is not text: it holds a NUL byte";
    return is_text(text, len) ? NULL : "is not UTF-8 text";
}

char *demo_read_text(const char *command, const char *option, const char *path, size_t *len)
{
    char *text = NULL;
    FILE *file = fopen(path, "rbe");

    if (file == NULL) {
        kvt_cli_error(command, "cannot read %s: %m", path);
        return NULL;
    }
    text = malloc(FILE_BYTES_MAX);
    errno = 0;
    *len = text != NULL ? fread(text, 1, FILE_BYTES_MAX, file) : 0;
    const char *problem = text_problem(text, file, *len, errno);
    if (problem != NULL) {
        kvt_cli_error(command, "%s: %s %s", option, path, problem);
        free(text);
        text = NULL;
    }
    fclose(file);
    return text;
}

/* Messages in the model's chat template; the caller frees the text. */
static char *format_chat(const char *template, const struct llama_chat_message *messages,
                         size_t count)
{
    int32_t need = llama_chat_apply_template(template, messages, count, true, NULL, 0);

    if (need < 0) { /* a template that llama.cpp does not know: the commonest one */
        template = "chatml";
        need = llama_chat_apply_template(template, messages, count, true, NULL, 0);
    }
    char *out = need > 0 ? malloc((size_t)need + 1) : NULL;
    if (out != NULL) {
        llama_chat_apply_template(template, messages, count, true, out, need + 1);
        out[need] = '\0';
    }
    return out;
}

/* "document, blank line, question" as a chat; the caller frees it. */
static char *apply_template(const struct demo_engine *engine, const char *document, size_t len,
                            const char *question)
{
    const size_t room = len + strlen(question) + 8;
    char *content = malloc(room), *out = NULL;
    const char *template = llama_model_chat_template(engine->model, NULL);

    if (content == NULL)
        return NULL;
    snprintf(content, room, "%.*s\n\n%s", (int)len, document, question);
    const struct llama_chat_message messages[2] = {{"system", SMOL_SYSTEM}, {"user", content}};
    /* the template of SmolLM2 begins with this message when there is no other; llama.cpp knows
     * templates by their kind and leaves it out */
    if (template != NULL && strstr(template, SMOL_SYSTEM) != NULL)
        out = format_chat(template, messages, 2);
    else
        out = format_chat(template, messages + 1, 1);
    free(content);
    return out;
}

static int make_question(struct demo_question *question, const struct demo_engine *engine,
                         const char *document, size_t len)
{
    char *text = apply_template(engine, document, len, question->text);

    free(question->tokens);
    free(question->prompt);
    question->tokens = NULL;
    question->prompt = text;
    if (text != NULL)
        question->tokens = demo_tokenize(engine, text, strlen(text), 1, &question->count);
    if (question->tokens == NULL)
        kvt_cli_error("demo", "the prompt cannot be made of tokens (out of memory?)");
    return question->tokens != NULL ? 0 : -1;
}

/* The end of the last sentence or paragraph at or before len; 0 when the second half has none. */
static size_t sentence_end(const char *text, size_t len)
{
    for (size_t i = len; i > len / 2; i--)
        if (text[i - 1] == '\n' || (i < len && text[i - 1] == '.' && text[i] == ' '))
            return i;
    return 0;
}

/* Tokens of the first len bytes; SIZE_MAX on failure. */
static size_t count_tokens(const struct demo_engine *engine, const char *text, size_t len)
{
    size_t count = 0;
    int32_t *tokens = demo_tokenize(engine, text, len, 0, &count);

    if (tokens == NULL)
        return SIZE_MAX;
    free(tokens);
    return count;
}

/* The last sentence end up to `end` that leaves three eighths to a half of a block of the first
 * prompt beyond its usable blocks; of the last CUT_TRIES ends the one that leaves most, but no more
 * than half a block; `end` when none does; 0 on failure. */
static size_t cut_by_rest(struct demo_prompt *prompt, const struct demo_engine *engine,
                          const char *text, size_t end, size_t block)
{
    size_t at = end, best = 0, best_rest = 0;

    for (int tries = 0; tries < CUT_TRIES && at > 0 && 8 * best_rest < 3 * block; tries++) {
        if (make_question(&prompt->questions[0], engine, text, at) != 0)
            return 0;
        const size_t count = prompt->questions[0].count;
        const size_t rest = count - block * kvt_usable_blocks((uint32_t)block, count);
        if (rest <= block / 2 && rest > best_rest) {
            best = at;
            best_rest = rest;
        }
        at = sentence_end(text, at - 1);
    }
    return best > 0 ? best : end;
}

/* How many bytes of the document make the first prompt at most --tokens; 0: none, or failed. */
static size_t cut_document(struct demo_prompt *prompt, const struct demo_engine *engine,
                           const char *text, size_t len, const struct demo_config *config)
{
    const size_t want = (size_t)config->tokens;
    size_t low = 0, high = len;

    if (make_question(&prompt->questions[0], engine, "", 0) != 0 ||
        want <= prompt->questions[0].count)
        return 0;
    const size_t room = want - prompt->questions[0].count;
    if (high / TOKEN_BYTES_MAX > room)
        high = room * TOKEN_BYTES_MAX;
    while (low < high) { /* the longest prefix that fits */
        const size_t middle = high - (high - low) / 2;
        const size_t count = count_tokens(engine, text, middle);
        if (count == SIZE_MAX)
            return 0;
        if (count <= room)
            low = middle;
        else
            high = middle - 1;
    }
    if (low == len) /* all of it fits */
        return len;
    const size_t end = sentence_end(text, low);
    return cut_by_rest(prompt, engine, text, end > 0 ? end : low, (size_t)config->block);
}

static int make_forced(struct demo_prompt *prompt, const struct demo_engine *engine,
                       const char *text, size_t len, size_t cut)
{
    size_t count = 0;
    int32_t *tokens = demo_tokenize(engine, text + cut, len - cut, 0, &count);

    if (tokens != NULL && count < DEMO_FORCED_TOKENS) {
        free(tokens);
        tokens = demo_tokenize(engine, text, len, 0, &count);
    }
    if (tokens == NULL || count < DEMO_FORCED_TOKENS) {
        kvt_cli_error("demo", "the text has %zu tokens; at least %d are needed", count,
                      DEMO_FORCED_TOKENS);
        free(tokens);
        return -1;
    }
    prompt->forced = tokens;
    return 0;
}

int demo_prompt_make(struct demo_prompt *prompt, const struct demo_engine *engine,
                     const struct demo_config *config)
{
    const char *text = demo_document;
    size_t len = demo_document_len;
    char *from_file = NULL;
    int rc = -1;

    memset(prompt, 0, sizeof(*prompt));
    if (config->prompt_file != NULL) {
        text = from_file = demo_read_text("demo", "--prompt-file", config->prompt_file, &len);
        if (text == NULL)
            return -1;
    }
    for (int q = 0; q < DEMO_QUESTIONS; q++)
        prompt->questions[q].text = from_file != NULL ? file_questions[q] : document_questions[q];
    snprintf(prompt->title, sizeof(prompt->title), "%s",
             from_file != NULL ? config->prompt_file
                               : "The Keeper's Handbook of the Orrin Coast (shipped)");
    size_t cut = cut_document(prompt, engine, text, len, config);
    if (cut == 0) {
        kvt_cli_error("demo", "no sentence of the text fits into --tokens %lld",
                      (long long)config->tokens);
        goto out;
    }
    for (int q = 0; q < DEMO_QUESTIONS; q++)
        if (make_question(&prompt->questions[q], engine, text, cut) != 0)
            goto out;
    if (cut == len && config->say_short && prompt->questions[0].count < (size_t)config->tokens)
        kvt_cli_error("demo",
                      "the whole text makes a prompt of %zu tokens, fewer than --tokens %lld",
                      prompt->questions[0].count, (long long)config->tokens);
    rc = make_forced(prompt, engine, text, len, cut);
out:
    free(from_file);
    if (rc != 0)
        demo_prompt_free(prompt);
    return rc;
}

void demo_prompt_free(struct demo_prompt *prompt)
{
    for (int q = 0; q < DEMO_QUESTIONS; q++) {
        free(prompt->questions[q].tokens);
        free(prompt->questions[q].prompt);
    }
    free(prompt->forced);
    memset(prompt, 0, sizeof(*prompt));
}

size_t demo_prompt_max(const struct demo_prompt *prompt)
{
    size_t max = 0;

    for (int q = 0; q < DEMO_QUESTIONS; q++)
        if (prompt->questions[q].count > max)
            max = prompt->questions[q].count;
    return max;
}
