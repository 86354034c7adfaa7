/* See state_help.h. */
#include "support/state_help.h"

#include "support/rig.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "format/hash.h"

size_t state_get(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return 0;
    size_t len = fread(text, 1, room - 1, file);
    text[len] = '\0';
    fclose(file);
    return len;
}

void state_put(const char *path, const char *text, size_t len)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, len, file), len);
    fclose(file);
}

void state_put_lines(const char *path, const char *lines)
{
    char text[20000];
    int n = snprintf(text, sizeof(text), "%s", lines);
    n += snprintf(text + n, sizeof(text) - (size_t)n, "end %016" PRIx64 "\n",
                  kvt_hash64(lines, strlen(lines)));
    state_put(path, text, (size_t)n);
}
