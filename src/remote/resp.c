/* RESP: see resp.h. Pure; allocates nothing. */
#include "remote/resp.h"

#include <string.h>

#define DEPTH_MAX 8
#define ELEMENTS_MAX 65536
#define BODY_MAX (INT64_C(512) << 20) /* as long as a server takes */

static bool number_of(const char *text, size_t len, int64_t *out)
{
    bool minus = len > 0 && text[0] == '-';
    int64_t value = 0;

    if (len == minus || len > 18)
        return false;
    for (size_t i = minus; i < len; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        value = value * 10 + (text[i] - '0');
    }
    *out = minus ? -value : value;
    return true;
}

long kvt_resp_head(const char *bytes, size_t len, struct kvt_resp_head *out)
{
    size_t scan = len < KVT_RESP_LINE_MAX ? len : KVT_RESP_LINE_MAX;
    const char *end = scan ? memchr(bytes, '\n', scan) : NULL;

    memset(out, 0, sizeof(*out));
    if (end == NULL)
        return len < KVT_RESP_LINE_MAX ? 0 : -1;
    if (end - bytes < 2 || end[-1] != '\r')
        return -1;
    out->type = bytes[0];
    out->text = bytes + 1;
    out->text_len = (size_t)(end - bytes) - 2;
    switch (out->type) {
    case '+':
    case '-':
        break;
    case ':':
        if (!number_of(out->text, out->text_len, &out->number))
            return -1;
        break;
    case '$':
        if (!number_of(out->text, out->text_len, &out->number) || out->number < -1 ||
            out->number > BODY_MAX)
            return -1;
        break;
    case '*':
        if (!number_of(out->text, out->text_len, &out->number) || out->number < -1 ||
            out->number > ELEMENTS_MAX)
            return -1;
        break;
    default:
        return -1;
    }
    return (long)(end - bytes) + 1;
}

/* Without recursion: how many values are still to come, in all open arrays together. */
long kvt_resp_whole(const char *bytes, size_t len)
{
    int64_t open[DEPTH_MAX];
    int depth = 0;
    size_t at = 0;

    open[0] = 1;
    for (;;) {
        struct kvt_resp_head head;
        long used;

        while (open[depth] == 0) {
            if (depth == 0)
                return (long)at;
            depth--;
        }
        open[depth]--;
        used = kvt_resp_head(bytes + at, len - at, &head);
        if (used <= 0)
            return used;
        at += (size_t)used;
        if (head.type == '$' && head.number >= 0) {
            if (len - at < (size_t)head.number + 2)
                return 0;
            at += (size_t)head.number + 2;
        } else if (head.type == '*' && head.number > 0) {
            if (depth + 1 == DEPTH_MAX)
                return -1;
            open[++depth] = head.number;
        }
    }
}

long kvt_resp_string(const char *bytes, size_t len, const char **text, size_t *text_len)
{
    struct kvt_resp_head head;
    long used = kvt_resp_head(bytes, len, &head);

    if (used <= 0)
        return -1;
    if (head.type == '+' || head.type == ':') {
        *text = head.text;
        *text_len = head.text_len;
        return used;
    }
    if (head.type != '$' || head.number < 0 || len - (size_t)used < (size_t)head.number + 2)
        return -1;
    *text = bytes + used;
    *text_len = (size_t)head.number;
    return used + (long)head.number + 2;
}

uint16_t kvt_resp_slot(const char *name, size_t len)
{
    unsigned crc = 0; /* CRC-16/XMODEM: polynomial 0x1021, from 0 */

    for (size_t i = 0; i < len; i++) {
        crc ^= (unsigned)(unsigned char)name[i] << 8;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 0x8000u ? (crc << 1) ^ 0x1021u : crc << 1;
        crc &= 0xffffu;
    }
    return (uint16_t)(crc % KVT_RESP_SLOTS);
}

/* An array's head: its elements, or -1. */
static int64_t array_head(const char *bytes, size_t len, size_t *at)
{
    struct kvt_resp_head head;
    long used = kvt_resp_head(bytes + *at, len - *at, &head);

    if (used <= 0 || head.type != '*' || head.number < 0)
        return -1;
    *at += (size_t)used;
    return head.number;
}

static bool take_number(const char *bytes, size_t len, size_t *at, int64_t max, int64_t *out)
{
    struct kvt_resp_head head;
    long used = kvt_resp_head(bytes + *at, len - *at, &head);

    if (used <= 0 || head.type != ':' || head.number < 0 || head.number > max)
        return false;
    *at += (size_t)used;
    *out = head.number;
    return true;
}

/* One node of a range: its host and port; what else is said of it is skipped. */
static bool take_node(const char *bytes, size_t len, size_t *at, const char **host,
                      size_t *host_len, int64_t *port)
{
    size_t start = *at;
    long whole = kvt_resp_whole(bytes + start, len - start), used;

    if (whole <= 0 || array_head(bytes, len, at) < 2)
        return false;
    used = kvt_resp_string(bytes + *at, len - *at, host, host_len);
    if (used <= 0) { /* a server that does not know its own name says nil: the one asked */
        struct kvt_resp_head head;

        used = kvt_resp_head(bytes + *at, len - *at, &head);
        if (used <= 0 || head.number != -1)
            return false;
        *host = "";
        *host_len = 0;
    }
    *at += (size_t)used;
    if (!take_number(bytes, len, at, 65535, port))
        return false;
    *at = start + (size_t)whole;
    return true;
}

bool kvt_resp_slots(const char *bytes, size_t len,
                    void (*each)(void *ctx, uint32_t first, uint32_t last, uint32_t place,
                                 const char *host, size_t host_len, uint32_t port),
                    void *ctx)
{
    size_t at = 0;
    int64_t ranges = array_head(bytes, len, &at);

    for (int64_t i = 0; i < ranges; i++) {
        size_t start = at;
        long whole = kvt_resp_whole(bytes + at, len - at);
        int64_t first, last, port, elements = whole > 0 ? array_head(bytes, len, &at) : -1;

        if (elements < 3 || !take_number(bytes, len, &at, KVT_RESP_SLOTS - 1, &first) ||
            !take_number(bytes, len, &at, KVT_RESP_SLOTS - 1, &last) || first > last)
            return false;
        for (int64_t place = 0; place < elements - 2; place++) {
            const char *host;
            size_t host_len;

            if (!take_node(bytes, len, &at, &host, &host_len, &port))
                return false;
            each(ctx, (uint32_t)first, (uint32_t)last, (uint32_t)place, host, host_len,
                 (uint32_t)port);
        }
        at = start + (size_t)whole;
    }
    return ranges >= 0;
}
