/* The option exclude_layers: a list of layers, as text and as ranges.
 * Threads: one at a time per config. Which layers a model has is not known here.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "client/options.h"
#include "kvtier/layout.h"

/* A layer number or "last"; moves *text behind it. */
static bool take_layer(const char **text, uint32_t *layer)
{
    const char *at = *text;
    uint64_t number = 0;
    if (strncmp(at, "last", 4) == 0) {
        *layer = KVT_LAYER_LAST;
        *text = at + 4;
        return true;
    }
    for (; *at >= '0' && *at <= '9' && number < KVT_PARTS_MAX; at++)
        number = number * 10 + (uint64_t)(*at - '0');
    if (at == *text || number >= KVT_PARTS_MAX)
        return false;
    *layer = (uint32_t)number;
    *text = at;
    return true;
}

int kvt_layers_set(struct kvt_config *config, const char *value)
{
    struct kvt_settings *settings = &config->settings;
    struct kvt_layer_range ranges[KVT_EXCLUDES_MAX];
    uint32_t count = 0;
    const char *at = value;
    bool good = true, more = true;
    if (strcmp(value, "none") == 0) {
        settings->exclude_count = 0;
        return 0;
    }
    while (good && more && count < KVT_EXCLUDES_MAX) {
        struct kvt_layer_range *range = &ranges[count++];
        good = take_layer(&at, &range->from);
        range->to = range->from;
        if (good && *at == '-') {
            at++;
            good = take_layer(&at, &range->to) && range->from <= range->to;
        }
        more = *at == '+' || *at == ',';
        at += more;
    }
    if (!good || more || *at != '\0')
        return kvt_config_refuse(config, KVT_E_CONFIG_VALUE,
                                 "exclude_layers: \"%.64s\" is not a list of layers: at most %u "
                                 "numbers, ranges and last, as 0+last or 0-3+30-last; or none",
                                 value, KVT_EXCLUDES_MAX);
    memcpy(settings->exclude, ranges, count * sizeof(ranges[0]));
    settings->exclude_count = count;
    return 0;
}

static size_t layer_text(char *buffer, size_t len, uint32_t layer)
{
    int n = layer == KVT_LAYER_LAST ? snprintf(buffer, len, "last")
                                    : snprintf(buffer, len, "%" PRIu32, layer);
    return n > 0 ? (size_t)n : 0;
}

const char *kvt_layers_text(const struct kvt_settings *settings, char *buffer, size_t len)
{
    size_t used = 0;
    (void)snprintf(buffer, len, "none");
    for (uint32_t i = 0; i < settings->exclude_count && used + 16 < len; i++) {
        const struct kvt_layer_range *range = &settings->exclude[i];
        if (i > 0)
            buffer[used++] = '+';
        used += layer_text(buffer + used, len - used, range->from);
        if (range->to == range->from)
            continue;
        buffer[used++] = '-';
        used += layer_text(buffer + used, len - used, range->to);
    }
    return buffer;
}
