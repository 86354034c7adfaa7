/* kvtier quality: the result as a JSON document, and that document as a table with an advice.
 * Nothing is measured here.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "quality.h"

/* What "safe" means in the advice; docs/quality.md says why. */
#define SAFE_KL_MEAN 5e-3
#define SAFE_KL_P99 1e-1
#define SAFE_PPL_PCT 1.0

static json_t *level_json(const struct kvt_llama *llama, struct quality_level *level,
                          double exact_nll)
{
    const double rows = (double)level->kl_count;
    uint32_t layer, head;
    const double worst = quality_worst(llama, level, &layer, &head);
    const double mean = quality_mean(level->kl, level->kl_count);
    json_t *worst_json = isfinite(worst) ? json_pack("{s:I, s:I, s:f}", "layer", (json_int_t)layer,
                                                     "head", (json_int_t)head, "sqnr_db", worst)
                                         : json_null();

    return json_pack("{s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:I, s:I, s:I}", "level",
                     kvt_level_name(level->level), "bits_per_element",
                     quality_bits(llama, level->level), "ppl", exp(level->nll / rows),
                     "ppl_delta_pct", 100 * expm1((level->nll - exact_nll) / rows), "kl_mean", mean,
                     "kl_p99", quality_quantile(level->kl, level->kl_count, 0.99), "top1",
                     (double)level->top1_same / rows, "worst", worst_json, "blocks",
                     (json_int_t)level->blocks, "blocks_below_guard",
                     (json_int_t)level->blocks_below, "blocks_raw", (json_int_t)level->blocks_raw);
}

static double number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static int is_safe(const json_t *level)
{
    return number(level, "kl_mean") <= SAFE_KL_MEAN && number(level, "kl_p99") <= SAFE_KL_P99 &&
           number(level, "ppl_delta_pct") <= SAFE_PPL_PCT;
}

/* The safe level of the fewest bits; NULL: none of those measured. */
static const json_t *advised(const json_t *levels)
{
    const json_t *best = NULL, *level;
    size_t i;

    json_array_foreach((json_t *)(uintptr_t)levels, i,
                       level) if (is_safe(level) &&
                                  (best == NULL || number(level, "bits_per_element") <
                                                       number(best, "bits_per_element"))) best =
        level;
    return best;
}

/* The (layer, head) that the coarsest level hurts most. */
static json_t *overall_worst(const json_t *levels)
{
    json_t *worst = NULL, *level;
    size_t i;

    json_array_foreach((json_t *)(uintptr_t)levels, i, level)
    {
        json_t *own = json_object_get(level, "worst");
        if (json_is_object(own) &&
            (worst == NULL || number(own, "sqnr_db") < number(worst, "sqnr_db")))
            worst = own;
    }
    json_t *copy = worst != NULL ? json_deep_copy(worst) : json_null();
    return copy;
}

json_t *quality_report(const struct quality_config *config, const struct kvt_llama *llama,
                       struct quality_level *levels, double exact_nll, json_t *texts, json_t *alone)
{
    const char *slash = strrchr(config->model, '/');
    json_t *list = json_array();

    for (size_t i = 0; i < config->level_count; i++)
        json_array_append_new(list, level_json(llama, &levels[i], exact_nll));
    const json_t *advice = advised(list);
    const double rows = (double)config->score * (double)json_array_size(texts);
    json_t *name = advice != NULL ? json_incref(json_object_get(advice, "level")) : json_null();
    return json_pack("{s:s, s:b, s:O, s:I, s:I, s:I, s:I, s:I, s:f, s:o, s:o, s:o, s:o}", "model",
                     slash != NULL ? slash + 1 : config->model, "weights_f32", !config->as_is,
                     "texts", texts, "tokens", (json_int_t)config->tokens, "score",
                     (json_int_t)config->score, "window", (json_int_t)config->window, "grow",
                     (json_int_t)config->grow, "threads", (json_int_t)config->threads, "ppl_exact",
                     exp(exact_nll / rows), "worst", overall_worst(list), "recommended", name,
                     "levels", list, "alone", alone != NULL ? alone : json_null());
}

static void print_level(const json_t *level)
{
    const json_t *worst = json_object_get(level, "worst");

    printf("%-6s%8.2f%11.3f%+10.3f%12.2e%12.2e%9.2f",
           json_string_value(json_object_get(level, "level")), number(level, "bits_per_element"),
           number(level, "ppl"), number(level, "ppl_delta_pct"), number(level, "kl_mean"),
           number(level, "kl_p99"), 100 * number(level, "top1"));
    if (json_is_object(worst))
        printf("%9.1f dB, layer %.0f head %.0f\n", number(worst, "sqnr_db"), number(worst, "layer"),
               number(worst, "head"));
    else
        printf("          -\n");
}

static void print_advice(const json_t *report)
{
    const json_t *levels = json_object_get(report, "levels"), *level = advised(levels);

    if (level == NULL) {
        printf("\nnone of these levels is safe for this model: store it raw\n");
        return;
    }
    printf("\n%s is safe for this model: mean KL %.1e, perplexity %+.2f %%, the same next token in "
           "%.1f %%\n",
           json_string_value(json_object_get(level, "level")), number(level, "kl_mean"),
           number(level, "ppl_delta_pct"), 100 * number(level, "top1"));
    const double below = number(level, "blocks_below_guard"), blocks = number(level, "blocks");
    if (below > 0)
        printf("(the store's guard would raise %.1f %% of its blocks to a better level)\n",
               100 * below / blocks);
}

/* KL of each layer coded alone, eight in a row; then the keys of the worst one's heads. */
static void print_alone(const json_t *alone)
{
    const json_t *layers = json_object_get(alone, "layers_kl");
    const json_t *heads = json_object_get(alone, "heads_kl");

    if (!json_is_object(alone))
        return;
    printf("\nKL mean with one layer at %s and all others exact; worst: layer %.0f\n",
           json_string_value(json_object_get(alone, "level")), number(alone, "layer"));
    for (size_t i = 0; i < json_array_size(layers); i++)
        printf("%s%10.2e", i % 8 == 0 ? i > 0 ? "\n" : "" : " ",
               json_number_value(json_array_get(layers, i)));
    printf("\nonly the keys of one head of that layer, on the last text; worst: head %.0f\n",
           number(alone, "head"));
    for (size_t i = 0; i < json_array_size(heads); i++)
        printf("%s%10.2e", i > 0 ? " " : "", json_number_value(json_array_get(heads, i)));
    printf("\n");
}

void quality_print(const json_t *report)
{
    const json_t *texts = json_object_get(report, "texts");
    json_t *level;
    size_t i;

    printf("%s, weights %s; context %.0f tokens, next %.0f scored, window %.0f",
           json_string_value(json_object_get(report, "model")),
           json_is_true(json_object_get(report, "weights_f32")) ? "float32" : "as they are",
           number(report, "tokens"), number(report, "score"), number(report, "window"));
    if (number(report, "grow") > 0)
        printf(", coded every %.0f", number(report, "grow"));
    printf("\ntexts:");
    for (i = 0; i < json_array_size(texts); i++)
        printf("%s %s", i > 0 ? "," : "", json_string_value(json_array_get(texts, i)));
    printf("\nperplexity of the exact cache: %.3f\n\n", number(report, "ppl_exact"));
    printf("%-6s%8s%11s%10s%12s%12s%9s   %s\n", "level", "bits", "perplexity", "change %",
           "KL mean", "KL p99", "top-1 %", "worst keys, centred SQNR");
    json_array_foreach(json_object_get(report, "levels"), i, level) print_level(level);
    print_advice(report);
    print_alone(json_object_get(report, "alone"));
}
