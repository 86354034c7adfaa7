/* Traces: read from a file, or made.
 *
 * What comes from a file is bounded: a line, a chain, a length. What is not of the form is an error
 * with its line, since a trace with holes answers another question. Threads: one.
 */
#include "replay_trace.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"
#include "cli.h"

#define LINE_MAX_BYTES (1u << 20)
#define TOKENS_MAX (1 << 28)
#define BLOCK_TOKENS_MAX 65536
#define AT_MS_MAX (INT64_MAX / 2000000)
#define BYTE_VALUES 256
#define SYSTEM_PROMPTS 8u
#define SESSIONS 64u

static struct replay_request *grow(struct replay_trace *trace, uint32_t count)
{
    if (trace->count == trace->room) {
        size_t room = trace->room ? 2 * trace->room : 1024;
        void *more = realloc(trace->requests, room * sizeof(*trace->requests));
        if (!more)
            return NULL;
        trace->requests = more;
        trace->room = room;
    }
    struct replay_request *request = &trace->requests[trace->count];
    *request = (struct replay_request){.count = count,
                                       .ids = calloc(count + 1u, sizeof(uint64_t)),
                                       .ranks = calloc(count + 1u, sizeof(uint32_t))};
    trace->count++;
    if (!request->ids || !request->ranks)
        return NULL;
    trace->blocks += count;
    return request;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* Sort by one byte after the other, the lowest first: a trace may have a hundred million ids, and
 * who interrupts waits for one byte at most. Returns where they are: ids or spare; NULL
 * interrupted.
 */
static uint64_t *sort_ids(uint64_t *ids, uint64_t *spare, size_t n)
{
    for (unsigned shift = 0; shift < 64; shift += 8) {
        size_t begin[BYTE_VALUES + 1] = {0};
        if (kvt_cli_interrupted())
            return NULL;
        for (size_t i = 0; i < n; i++)
            begin[(ids[i] >> shift & 0xff) + 1]++;
        if (n == 0 || begin[(ids[0] >> shift & 0xff) + 1] == n)
            continue; /* the same in all */
        for (size_t i = 0; i < BYTE_VALUES; i++)
            begin[i + 1] += begin[i];
        for (size_t i = 0; i < n; i++)
            spare[begin[ids[i] >> shift & 0xff]++] = ids[i];
        uint64_t *sorted = spare;
        spare = ids;
        ids = sorted;
    }
    return ids;
}

/* Number the different blocks: their ranks are small numbers, which arrays can be indexed by. */
static int rank_blocks(struct replay_trace *trace)
{
    uint64_t *both = malloc((trace->blocks + 1) * 2 * sizeof(*both)), *all = both;
    size_t n = 0, different = 0;

    if (!both)
        return -1;
    for (size_t i = 0; i < trace->count; i++) {
        memcpy(all + n, trace->requests[i].ids, trace->requests[i].count * sizeof(*all));
        n += trace->requests[i].count;
    }
    all = sort_ids(both, both + trace->blocks, n);
    if (!all)
        different = SIZE_MAX;
    for (size_t i = 0; all && i < n; i++)
        if (different == 0 || all[i] != all[different - 1])
            all[different++] = all[i];
    trace->distinct = different;
    for (size_t i = 0; all && i < trace->count; i++) {
        struct replay_request *request = &trace->requests[i];
        if (kvt_cli_interrupted())
            different = SIZE_MAX;
        if (different > UINT32_MAX)
            break;
        for (uint32_t j = 0; j < request->count; j++) {
            const uint64_t *at = bsearch(&request->ids[j], all, different, sizeof(*all), by_value);
            request->ranks[j] = at ? (uint32_t)(at - all) : 0;
        }
    }
    free(both);
    return different > UINT32_MAX ? -1 : 0;
}

/* What is wrong with the times and lengths of a line; NULL: nothing. */
static const char *check_numbers(const json_t *entry, json_int_t block_tokens, size_t ids)
{
    const json_t *at = json_object_get(entry, "timestamp");
    const json_t *length = json_object_get(entry, "input_length");
    json_int_t tokens = json_integer_value(length);

    if (!at)
        return "has no timestamp";
    if (!json_is_integer(at) || json_integer_value(at) < 0 || json_integer_value(at) > AT_MS_MAX)
        return "has a timestamp that is not written as a whole number of milliseconds from 0 to "
               "4611686018427";
    if (!json_is_integer(length) || tokens < 1 || tokens > TOKENS_MAX)
        return "has no input_length from 1 to 2^28";
    if (block_tokens < 1 || block_tokens > BLOCK_TOKENS_MAX)
        return "has block_tokens that are no whole number from 1 to 65,536";
    if (ids > (size_t)((tokens + block_tokens - 1) / block_tokens))
        return "has more hash_ids than its input_length has blocks (of 512 tokens, or of its "
               "block_tokens)";
    return NULL;
}

/* What is wrong with a line that is no JSON, or not of our numbers. */
static const char *why_no_json(const json_error_t *error)
{
    if (json_error_code(error) == json_error_numeric_overflow)
        return "has a number beyond 2^63 - 1; a hash_id of 64 bits is taken with its highest bit "
               "cleared";
    return "is no JSON object";
}

/* What is wrong with the line; NULL: it was taken. */
static const char *take_line(struct replay_trace *trace, const char *line)
{
    json_error_t error;
    json_t *entry = json_loads(line, 0, &error);
    const json_t *ids = json_object_get(entry, "hash_ids");
    const json_t *block = json_object_get(entry, "block_tokens");
    json_int_t block_tokens = block ? json_integer_value(block) : REPLAY_BLOCK_TOKENS;
    const char *wrong = NULL;

    if (!json_is_object(entry))
        wrong = entry ? "is no JSON object" : why_no_json(&error);
    else if (!json_is_array(ids) || json_array_size(ids) > REPLAY_CHAIN_MAX)
        wrong = "has no hash_ids, or more than 65,536";
    else
        wrong = check_numbers(entry, block_tokens, json_array_size(ids));
    if (!wrong && trace->block_tokens && trace->block_tokens != block_tokens)
        wrong = "has other block_tokens than the lines before it";
    struct replay_request *request = wrong ? NULL : grow(trace, (uint32_t)json_array_size(ids));
    if (!wrong && !request)
        wrong = "does not fit into memory";
    for (uint32_t i = 0; request && i < request->count; i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id))
            wrong = "has a hash_id that is no whole number";
        request->ids[i] = (uint64_t)json_integer_value(id);
    }
    if (request && !wrong) {
        trace->block_tokens = (uint32_t)block_tokens;
        request->at_ms = json_integer_value(json_object_get(entry, "timestamp"));
        request->tokens = (uint32_t)json_integer_value(json_object_get(entry, "input_length"));
        trace->short_chains += request->count < request->tokens / trace->block_tokens;
        if (trace->count > 1 && request->at_ms < request[-1].at_ms) {
            trace->reordered++;
            request->at_ms = request[-1].at_ms;
        }
    }
    json_decref(entry);
    return wrong;
}

/* Some editors begin a file with U+FEFF. */
static const char *behind_mark(const char *line, size_t number)
{
    static const char mark[] = "\xef\xbb\xbf";

    return number == 1 && !strncmp(line, mark, sizeof(mark) - 1) ? line + sizeof(mark) - 1 : line;
}

int replay_trace_read(struct replay_trace *trace, const char *path, char *error, size_t len)
{
    FILE *file = fopen(path, "re");
    char *line = malloc(LINE_MAX_BYTES);
    const int why = errno;
    const char *wrong = file && line ? NULL : "cannot be opened";
    size_t number = 0;

    memset(trace, 0, sizeof(*trace));
    while (!wrong && fgets(line, LINE_MAX_BYTES, file)) {
        number++;
        size_t bytes = strlen(line);
        if (bytes == LINE_MAX_BYTES - 1)
            wrong = "is longer than a MiB";
        const char *text = behind_mark(line, number);
        if (kvt_cli_interrupted())
            wrong = "was read when it was interrupted";
        else if (!wrong && text[strspn(text, " \t\r\n")] != '\0')
            wrong = take_line(trace, text);
    }
    if (!wrong && trace->count == 0)
        wrong = "is where the file ends: no request";
    if (!wrong && rank_blocks(trace))
        wrong = "does not fit into memory";
    if (wrong) {
        if (number)
            snprintf(error, len, "%s, line %zu: %s", path, number, wrong);
        else if (file && line)
            snprintf(error, len, "%s: is empty, or cannot be read", path);
        else
            snprintf(error, len, "%s: %s: %s", path, wrong, strerror(why));
        replay_trace_free(trace);
    }
    free(line);
    if (file)
        fclose(file);
    return wrong ? -1 : 0;
}

int replay_trace_make(struct replay_trace *trace, uint64_t seed, size_t requests)
{
    struct {
        uint64_t ids[256];
        uint32_t count;
    } *sessions = calloc(SESSIONS, sizeof(*sessions));
    struct kvt_rng rng = {seed};
    uint64_t next = SYSTEM_PROMPTS * 16;
    int rc = sessions ? 0 : -1;

    memset(trace, 0, sizeof(*trace));
    trace->block_tokens = REPLAY_BLOCK_TOKENS;
    for (size_t i = 0; i < requests && !rc; i++) {
        size_t s = kvt_rng_below(&rng, SESSIONS);
        if (sessions[s].count > 200 || kvt_rng_below(&rng, 12) == 0)
            sessions[s].count = 0;
        if (sessions[s].count == 0) { /* a new one, behind a system prompt of up to 16 blocks */
            uint64_t prompt = kvt_rng_below(&rng, SYSTEM_PROMPTS);
            while (sessions[s].count < 1 + 2 * prompt) {
                sessions[s].ids[sessions[s].count] = prompt * 16 + sessions[s].count;
                sessions[s].count++;
            }
        }
        for (uint64_t more = 1 + kvt_rng_below(&rng, 12); more; more--)
            sessions[s].ids[sessions[s].count++] = next++;
        struct replay_request *request = grow(trace, sessions[s].count);
        if (!request || kvt_cli_interrupted()) {
            rc = -1;
            break;
        }
        request->at_ms = (int64_t)i * 300;
        request->tokens = request->count * REPLAY_BLOCK_TOKENS - 100;
        memcpy(request->ids, sessions[s].ids, request->count * sizeof(uint64_t));
    }
    free(sessions);
    if (!rc)
        rc = rank_blocks(trace);
    if (rc)
        replay_trace_free(trace);
    return rc;
}

int replay_trace_whole_blocks(struct replay_trace *trace)
{
    trace->blocks = 0;
    for (size_t i = 0; i < trace->count; i++) {
        struct replay_request *request = &trace->requests[i];
        uint32_t whole = request->tokens / trace->block_tokens;

        request->count = request->count > whole ? whole : request->count;
        trace->blocks += request->count;
    }
    return rank_blocks(trace);
}

void replay_trace_free(struct replay_trace *trace)
{
    for (size_t i = 0; i < trace->count; i++) {
        free(trace->requests[i].ids);
        free(trace->requests[i].ranks);
    }
    free(trace->requests);
    memset(trace, 0, sizeof(*trace));
}
