/* kvtier quality: the texts as tokens, those shipped or the user's. Files are read here, and
 * nothing else is done.
 */
#include <stdlib.h>

#include "cli.h"
#include "quality.h"
#include "quality_texts.h" /* generated: quality_texts[] {name, text, len} */

size_t quality_wanted(const struct quality_config *config)
{
    return (size_t)(config->tokens + config->score) + 1; /* the last one is only predicted */
}

static int add_text(const struct quality_config *config, const struct demo_engine *engine,
                    struct quality_text *text, const char *name, const char *bytes, size_t len)
{
    text->name = name;
    text->tokens = demo_tokenize(engine, bytes, len, 0, &text->count);
    if (text->tokens == NULL) {
        kvt_cli_error("quality", "%s cannot be made of tokens (out of memory?)", name);
        return -1;
    }
    if (text->count >= quality_wanted(config))
        return 0;
    kvt_cli_error("quality",
                  "%s has %zu tokens, %zu are needed (--tokens, --score, and one): give "
                  "smaller ones, or a longer text",
                  name, text->count, quality_wanted(config));
    return -1;
}

size_t quality_read_texts(const struct quality_config *config, const struct demo_engine *engine,
                          struct quality_text texts[QUALITY_TEXTS_MAX])
{
    const size_t own = config->text_count;
    const size_t count = own > 0 ? own : sizeof(quality_texts) / sizeof(quality_texts[0]);

    for (size_t i = 0; i < count; i++) {
        int rc;
        if (own == 0) {
            rc = add_text(config, engine, &texts[i], quality_texts[i].name, quality_texts[i].text,
                          quality_texts[i].len);
        } else {
            size_t len = 0;
            char *bytes = demo_read_text("quality", "--text", config->texts[i], &len);
            rc = bytes != NULL ? add_text(config, engine, &texts[i], config->texts[i], bytes, len)
                               : -1;
            free(bytes);
        }
        if (rc != 0)
            return 0;
    }
    return count;
}
