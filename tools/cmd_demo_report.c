/* kvtier demo: the results of both processes as one JSON document, and that document as a table.
 * Nothing is measured here.
 */
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "demo.h"

static json_t *at(const json_t *object, const char *key)
{
    return json_object_get(object, key);
}

static double number(const json_t *object, const char *key)
{
    return json_number_value(at(object, key));
}

static json_t *or_null(json_t *value)
{
    return value != NULL ? json_incref(value) : json_null();
}

/* Both phases of one question side by side. */
static json_t *join_question(const json_t *first, const json_t *restart, size_t q)
{
    const json_t *a = json_array_get(at(first, "questions"), q);
    const json_t *b = json_array_get(at(restart, "questions"), q);

    return json_pack("{s:O, s:O, s:o, s:o, s:o}", "question", at(a, "question"), "prompt_tokens",
                     at(a, "prompt_tokens"), "cold", or_null(at(a, "cold")), "dram",
                     or_null(at(a, "dram")), "disk", or_null(at(b, "disk")));
}

json_t *demo_report(const struct demo_config *config, const json_t *first, const json_t *restart,
                    const json_t *prefetch)
{
    json_t *questions = json_array();

    for (size_t q = 0; q < json_array_size(at(first, "questions")); q++)
        json_array_append_new(questions, join_question(first, restart, q));
    const json_t *head = json_array_get(questions, 0);
    const json_t *cold = at(head, "cold"), *dram = at(head, "dram"), *disk = at(head, "disk");
    json_t *ahead = at(prefetch, "disk");
    const double loaded = number(dram, "loaded_tokens");
    const double stored = loaded > 0 ? number(dram, "bytes_moved") / loaded : 0;
    const double agree_dram = number(first, "agreement"), agree_disk = number(restart, "agreement");
    const char *slash = strrchr(config->model, '/');

    json_t *report = json_pack(
        "{s:s, s:O, s:O, s:s, s:I, s:I, s:O, s:i, s:{s:f, s:f, s:f, s:f},"
        " s:{s:f, s:f, s:f}, s:{s:O, s:O}, s:O, s:O, s:f, s:O, s:f, s:i, s:{s:f, s:f}, s:{s:O, "
        "s:O}, s:o, s:O, s:o}",
        "model", slash != NULL ? slash + 1 : config->model, "model_desc", at(first, "model_desc"),
        "document", at(first, "title"), "level", kvt_level_name(config->level), "window_tokens",
        (json_int_t)config->window, "threads", (json_int_t)config->threads, "prompt_tokens",
        at(head, "prompt_tokens"), "block_tokens", (int)config->block, "ttft_ms", "cold",
        number(cold, "ttft_ms"), "dram", number(dram, "ttft_ms"), "disk", number(disk, "ttft_ms"),
        "disk_prefetched", number(ahead, "ttft_ms"), "speedup", "dram",
        number(cold, "ttft_ms") / number(dram, "ttft_ms"), "disk",
        number(cold, "ttft_ms") / number(disk, "ttft_ms"), "disk_prefetched",
        number(cold, "ttft_ms") / number(ahead, "ttft_ms"), "loaded_tokens", "dram",
        at(dram, "loaded_tokens"), "disk", at(disk, "loaded_tokens"), "prefetched", ahead,
        "engine_bytes_per_token", at(first, "engine_bytes_per_token"), "stored_bytes_per_token",
        stored, "direct_io", at(restart, "direct_io"), "top1_agreement",
        agree_dram < agree_disk ? agree_dram : agree_disk, "agreement_tokens", DEMO_FORCED_TOKENS,
        "top1_agreement_by_tier", "dram", agree_dram, "disk", agree_disk, "logits_identical",
        "dram", at(first, "identical"), "disk", at(restart, "identical"), "save",
        or_null(at(first, "save")), "found_before", at(first, "found_before"), "questions",
        questions);
    if (report != NULL)
        json_object_set_new(report, "daemon", json_boolean(config->socket != NULL));
    if (report != NULL)
        json_object_set_new(report, "remote", json_boolean(config->remote != NULL));
    return report;
}

/* The process that read ahead. */
static void print_prefetched(const json_t *report, const char *place)
{
    const json_t *ahead = at(report, "prefetched");

    printf(
        "\nfirst question, new process, reading from %s since the prompt was tokenised (%.1f ms):"
        "\n  time to first token %.0f ms, %.0f x; %.0f of %.0f blocks had come\n",
        place, number(ahead, "tokenise_ms"), number(ahead, "ttft_ms"),
        number(at(report, "speedup"), "disk_prefetched"), number(ahead, "blocks_dram"),
        number(ahead, "blocks_dram") + number(ahead, "blocks_disk") +
            number(ahead, "blocks_remote"));
}

static void print_times(const char *name, const json_t *question, const char *key, const char *unit,
                        double scale)
{
    const char *const columns[] = {"cold", "dram", "disk"};

    printf("  %-24s", name);
    for (int i = 0; i < 3; i++) {
        const json_t *cell = at(at(question, columns[i]), key);
        if (cell == NULL)
            printf("%16s", "-");
        else
            printf("%12.*f %-3s", scale < 1 ? 1 : 0, json_number_value(cell) * scale, unit);
    }
    printf("\n");
}

static void print_speedup(const json_t *question)
{
    const double cold = number(at(question, "cold"), "ttft_ms");

    if (cold <= 0)
        return;
    printf("  %-24s%12s    %11.0f x   %11.0f x\n", "  faster than cold", "",
           cold / number(at(question, "dram"), "ttft_ms"),
           cold / number(at(question, "disk"), "ttft_ms"));
}

/* An answer on one line, cut to what a terminal shows. */
static void print_answer(const char *name, const json_t *cell, const char *than)
{
    const char *text = json_string_value(at(cell, "answer"));

    if (text == NULL)
        return;
    if (than != NULL && strcmp(text, than) == 0) {
        printf("  %-7s (the same)\n", name);
        return;
    }
    printf("  %-7s ", name);
    for (size_t i = 0; text[i] != '\0'; i++)
        putchar(text[i] == '\n' ? ' ' : text[i]);
    printf("\n");
}

static void print_question(const json_t *question, int daemon)
{
    const char *cold = json_string_value(at(at(question, "cold"), "answer"));
    const char *dram = json_string_value(at(at(question, "dram"), "answer"));

    printf("\n\"%s\"\n", json_string_value(at(question, "question")));
    printf("  %-24s%12s    %12s    %12s\n", "", "cold", "DRAM",
           daemon ? "new process" : "disk, new process");
    print_times("time to first token", question, "ttft_ms", "ms", 1);
    print_speedup(question);
    print_times("  of it computing", question, "compute_ms", "ms", 1);
    print_times("tokens loaded", question, "loaded_tokens", "", 1);
    print_times("tokens computed", question, "computed_tokens", "", 1);
    print_times("bytes moved", question, "bytes_moved", "MiB", 1.0 / (1 << 20));
    print_answer("cold:", at(question, "cold"), NULL);
    print_answer("DRAM:", at(question, "dram"), cold);
    print_answer(daemon ? "new:" : "disk:", at(question, "disk"), cold != NULL ? cold : dram);
}

/* Where the new process found its blocks. */
static void print_daemon(const json_t *report)
{
    const json_t *found = at(json_array_get(at(report, "questions"), 0), "disk");

    printf("\nthe store is a kvtierd's: the new process found %.0f of %.0f blocks in DRAM\n",
           number(found, "blocks_dram"),
           number(found, "blocks_dram") + number(found, "blocks_disk") +
               number(found, "blocks_remote"));
}

/* What an earlier run left, and where the DRAM column's blocks really came from. */
static void print_found(const json_t *report)
{
    const double found = number(report, "found_before");
    const json_t *dram = at(json_array_get(at(report, "questions"), 0), "dram");

    if (found > 0)
        printf("%.0f blocks were in the directory from an earlier run; they were brought into DRAM "
               "first, and only new ones stored\n",
               found);
    if (number(dram, "blocks_disk") > 0)
        printf("of the column DRAM, %.0f of %.0f blocks came from disk all the same\n",
               number(dram, "blocks_disk"),
               number(dram, "blocks_disk") + number(dram, "blocks_dram"));
}

static int differs(const json_t *question)
{
    const char *cold = json_string_value(at(at(question, "cold"), "answer"));
    const char *const tiers[] = {"dram", "disk"};

    for (int i = 0; i < 2 && cold != NULL; i++) {
        const char *text = json_string_value(at(at(question, tiers[i]), "answer"));
        if (text != NULL && strcmp(text, cold) != 0)
            return 1;
    }
    return 0;
}

/* Why an answer is another one than the cold one, where one is. */
static void print_why_different(const json_t *report)
{
    const char *level = json_string_value(at(report, "level"));
    const json_t *questions = at(report, "questions");
    int count = 0;

    for (size_t q = 0; q < json_array_size(questions); q++)
        count += differs(json_array_get(questions, q));
    if (count > 0 && strcmp(level, "raw") != 0)
        printf("%d of %zu answers differ from the cold one: %s is a lossy level, and greedy text "
               "forks at the first token that flips; with quantised weights any change of the "
               "cache, be "
               "it its last bit, flips a few in a hundred; --level raw keeps every bit\n",
               count, json_array_size(questions), level);
}

void demo_print(const json_t *report)
{
    const double engine = number(report, "engine_bytes_per_token");
    const double stored = number(report, "stored_bytes_per_token");
    const json_t *tiers = at(report, "top1_agreement_by_tier");
    const json_t *identical = at(report, "logits_identical");
    const json_t *questions = at(report, "questions");
    const int remote = json_is_true(at(report, "remote"));
    const int daemon = json_is_true(at(report, "daemon"));
    const char *place = remote ? "shared tier" : daemon ? "new process" : "disk";

    printf("%s (%s), level %s, %lld threads\n", json_string_value(at(report, "model")),
           json_string_value(at(report, "model_desc")), json_string_value(at(report, "level")),
           (long long)json_integer_value(at(report, "threads")));
    printf("%.0f tokens: %s\n", number(report, "prompt_tokens"),
           json_string_value(at(report, "document")));
    print_found(report);
    for (size_t q = 0; q < json_array_size(questions); q++)
        print_question(json_array_get(questions, q), daemon || remote);
    if (daemon)
        print_daemon(report);
    else if (remote)
        printf("\nthe new process shares nothing with the first one but the server: all that it "
               "loaded came from there\n");
    if (!daemon)
        print_prefetched(report, place);
    printf("\nbytes per token: %.0f in the engine, %.0f stored (%.2f)\n", engine, stored,
           engine > 0 ? stored / engine : 0);
    printf("same next token as the exact cache, %d tokens of text: DRAM %.1f %%, %s %.1f %%%s\n",
           DEMO_FORCED_TOKENS, 100 * number(tiers, "dram"), place, 100 * number(tiers, "disk"),
           json_is_true(at(identical, "dram")) && json_is_true(at(identical, "disk"))
               ? " (every logit identical)"
               : "");
    print_why_different(report);
    printf("times: cold and %s measured once each, DRAM the median of three; a busy machine moves "
           "all of them\n",
           place);
    if (daemon || remote)
        return;
    printf("disk reads: %s\n", json_is_true(at(report, "direct_io"))
                                   ? "O_DIRECT, past the page cache"
                                   : "buffered; the page cache was emptied first");
}
