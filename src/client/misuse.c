/* Sentences for calls that were refused: which argument, what it is, what it may be.
 *
 * The checks themselves stay where they are and return codes; here the same conditions are gone
 * through once more, in the same order, to find the one that failed. A condition that has no
 * sentence is told by its code's text. Setup calls are logged as warnings; stores and loads, which
 * a defective program may repeat without end, at debug level.
 * Threads: any; reads arguments and immutable state only.
 */
#include "client/misuse.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "codec/piece.h"
#include "kvtier/codec.h"

#define SAY(...) (void)snprintf(text, len, __VA_ARGS__)

static void say_identity(const struct kvt_identity *identity, char *text, size_t len)
{
    const char *model = identity->model, *revision = identity->revision;
    if (identity->struct_size != sizeof(*identity))
        SAY("identity.struct_size is %zu, not %zu: call kvt_identity_init() first",
            identity->struct_size, sizeof(*identity));
    else if (identity->salt == NULL && identity->salt_len != 0)
        SAY("identity.salt is NULL and salt_len is %zu", identity->salt_len);
    else if (identity->tp_size == 0 || identity->pp_size == 0)
        SAY("identity.tp_size and pp_size are at least 1; kvt_identity_init() sets them");
    else if (identity->pp_rank >= identity->pp_size)
        SAY("identity.pp_rank is %" PRIu32 " of %" PRIu32, identity->pp_rank, identity->pp_size);
    else if ((model == NULL || *model == '\0') && (revision == NULL || *revision == '\0'))
        SAY("the identity names neither a model nor a revision: blocks of two models would be "
            "taken for each other's");
}

static void say_part(const struct kvt_part *part, uint32_t i, char *text, size_t len)
{
    if (part->kind < KVT_PART_K || part->kind > KVT_PART_OPAQUE)
        SAY("part %" PRIu32 ": kind %u is none of enum kvt_part_kind", i, part->kind);
    else if (part->dtype < KVT_DTYPE_BF16 || part->dtype > KVT_DTYPE_BYTE)
        SAY("part %" PRIu32 ": dtype %u is none of enum kvt_dtype", i, part->dtype);
    else if (part->heads == 0 || part->heads > KVT_HEADS_MAX)
        SAY("part %" PRIu32 ": %" PRIu32 " heads; 1 to %u", i, part->heads, KVT_HEADS_MAX);
    else if (part->head_dim == 0 || part->head_dim % 16 != 0 || part->head_dim > KVT_HEAD_DIM_MAX)
        SAY("part %" PRIu32 ": head_dim %" PRIu32 "; a multiple of 16 up to %u", i, part->head_dim,
            KVT_HEAD_DIM_MAX);
    else if (part->kind == KVT_PART_MLA && part->heads != 1)
        SAY("part %" PRIu32 ": an MLA latent has one head, not %" PRIu32, i, part->heads);
}

static void say_group(const struct kvt_layout *layout, uint32_t i, char *text, size_t len)
{
    const struct kvt_group *group = &layout->groups[i];
    bool any = false, coded = false, twice = false;
    for (uint32_t p = 0; p < layout->part_count; p++) {
        if (layout->parts[p].group != group->group)
            continue;
        any = true;
        coded = coded || kvt_level_for_part(KVT_LEVEL_INT4, &layout->parts[p]) != KVT_LEVEL_RAW;
    }
    for (uint32_t j = 0; j < i; j++)
        twice = twice || layout->groups[j].group == group->group;
    if (group->kind > KVT_GROUP_STATE)
        SAY("groups[%" PRIu32 "]: kind %u is none of enum kvt_group_kind", i, group->kind);
    else if (!any)
        SAY("groups[%" PRIu32 "]: no part is of group %u", i, group->group);
    else if (twice)
        SAY("groups[%" PRIu32 "]: group %u is listed twice", i, group->group);
    else if ((group->kind == KVT_GROUP_WINDOW) != (group->window_tokens != 0))
        SAY("groups[%" PRIu32 "]: window_tokens is %" PRIu32 "; more than 0 for a window, else 0",
            i, group->window_tokens);
    else if (group->block_tokens > KVT_BLOCK_TOKENS_MAX)
        SAY("groups[%" PRIu32 "]: block_tokens is %" PRIu32 "; at most %u", i, group->block_tokens,
            KVT_BLOCK_TOKENS_MAX);
    else if (coded && group->block_tokens % KVT_TILE_TOKENS != 0)
        SAY("groups[%" PRIu32 "]: block_tokens is %" PRIu32 "; a multiple of %u where parts are "
            "coded, as these are",
            i, group->block_tokens, KVT_TILE_TOKENS);
    else if (group->reserved != 0)
        SAY("groups[%" PRIu32 "]: reserved is not 0", i);
}

static void say_layout(const struct kvt_layout *layout, char *text, size_t len)
{
    if (layout->struct_size != sizeof(*layout))
        SAY("layout.struct_size is %zu, not %zu: set it to sizeof(struct kvt_layout)",
            layout->struct_size, sizeof(*layout));
    else if (layout->block_tokens == 0 || layout->block_tokens % KVT_TILE_TOKENS != 0 ||
             layout->block_tokens > KVT_BLOCK_TOKENS_MAX)
        SAY("layout.block_tokens is %" PRIu32 "; a multiple of %u up to %u", layout->block_tokens,
            KVT_TILE_TOKENS, KVT_BLOCK_TOKENS_MAX);
    else if (layout->part_count == 0 || layout->parts == NULL || layout->part_count > KVT_PARTS_MAX)
        SAY("layout.parts: %" PRIu32 " parts%s; 1 to %u", layout->part_count,
            layout->parts == NULL ? " at NULL" : "", KVT_PARTS_MAX);
    else if (layout->group_count > KVT_GROUPS_MAX || (layout->group_count != 0 && !layout->groups))
        SAY("layout.groups: %" PRIu32 " groups%s; up to %u", layout->group_count,
            layout->groups == NULL ? " at NULL" : "", KVT_GROUPS_MAX);
    else {
        for (uint32_t i = 0; i < layout->part_count && text[0] == '\0'; i++)
            say_part(&layout->parts[i], i, text, len);
        for (uint32_t i = 0; i < layout->group_count && text[0] == '\0'; i++)
            say_group(layout, i, text, len);
    }
}

static void say_place(const struct kvt_layout *layout, const struct kvt_pool_desc *desc, uint32_t i,
                      char *text, size_t len)
{
    const struct kvt_part_place *place = &desc->places[i];
    const int64_t strides[] = {place->stride_block, place->stride_head, place->stride_token,
                               place->stride_elem};
    static const char *const names[] = {"stride_block", "stride_head", "stride_token",
                                        "stride_elem"};
    int64_t element = kvt_dtype_bytes(layout->parts[i].dtype);
    if (place->base == NULL)
        SAY("place %" PRIu32 ": base is NULL", i);
    for (int s = 0; s < 4 && text[0] == '\0'; s++)
        if (strides[s] < 0 || strides[s] % element != 0)
            SAY("place %" PRIu32 ": %s is %" PRId64
                "; in bytes, a multiple of the element's %" PRId64,
                i, names[s], strides[s], element);
}

static void say_pool(const struct kvt_layout *layout, const struct kvt_pool_desc *desc, int code,
                     char *text, size_t len)
{
    if (desc->struct_size != sizeof(*desc))
        SAY("desc.struct_size is %zu, not %zu: set it to sizeof(struct kvt_pool_desc)",
            desc->struct_size, sizeof(*desc));
    else if (desc->block_count == 0 || desc->places == NULL)
        SAY("the pool has %" PRIu32 " blocks, and its places are%s given", desc->block_count,
            desc->places == NULL ? " not" : "");
    else if (desc->place_count != layout->part_count)
        SAY("desc.place_count is %" PRIu32 ", but the layout has %" PRIu32
            " parts: one place for each",
            desc->place_count, layout->part_count);
    else if (desc->device < KVT_DEVICE_HOST)
        SAY("desc.device is %" PRId32 "; KVT_DEVICE_HOST (-1) or the number of a CUDA device",
            desc->device);
    else {
        for (uint32_t i = 0; i < desc->place_count && text[0] == '\0'; i++)
            say_place(layout, desc, i, text, len);
        if (text[0] == '\0' && code == KVT_E_INVAL && desc->device == KVT_DEVICE_HOST)
            SAY("in one of the places two elements share a byte, or the last one lies past the end "
                "of the address space: look at strides and block_count");
    }
}

void kvt_misuse_setup(const struct kvt_cache *cache, const char *call, int code,
                      const struct kvt_identity *identity, const struct kvt_layout *layout,
                      const struct kvt_pool_desc *desc)
{
    char text[400] = "";
    if (code > -5000) /* of the system: not the caller's mistake */
        return;
    if (layout != NULL)
        say_layout(layout, text, sizeof(text));
    if (text[0] == '\0' && identity != NULL)
        say_identity(identity, text, sizeof(text));
    if (text[0] == '\0' && desc != NULL && layout != NULL)
        say_pool(layout, desc, code, text, sizeof(text));
    kvt_log(&cache->log, KVT_LOG_WARN, "%s: refused: %s", call,
            text[0] != '\0' ? text : kvt_strerror(code));
}

static void say_key(const struct kvt_ns *ns, const struct kvt_key *keys, size_t i, char *text,
                    size_t len)
{
    if (!kvt_keys_ok(ns, &keys[i], 1, true))
        SAY("keys[%zu]: hash_len is %u (1 to %u), group %u, reserved %u (0)", i, keys[i].hash_len,
            KVT_HASH_BYTES_MAX, keys[i].group, keys[i].reserved);
    else if (keys[i].group != keys[0].group)
        SAY("keys[%zu] is of group %u, keys[0] of group %u: one group a call", i, keys[i].group,
            keys[0].group);
}

void kvt_misuse_say(const struct kvt_cache *cache, int level, const char *call, const char *format,
                    ...)
{
    char text[300];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    kvt_log(&cache->log, level, "%s: refused: %s", call, text);
}

void kvt_misuse_keys(const char *call, const struct kvt_ns *ns, const struct kvt_key *keys,
                     size_t n, int code)
{
    char text[200] = "";
    const size_t len = sizeof(text);
    if (code > -5000 || code == KVT_E_CLOSED)
        return;
    if (code == KVT_E_VERSION)
        SAY("opts.struct_size is not set, or comes from another version of the headers");
    else if (keys == NULL && n != 0)
        SAY("keys is NULL and n is %zu", n);
    for (size_t i = 0; i < n && text[0] == '\0'; i++)
        say_key(ns, keys, i, text, sizeof(text));
    if (text[0] == '\0' && code == KVT_E_INVAL)
        SAY("opts.min_level is none of enum kvt_level");
    kvt_log(&ns->cache->log, KVT_LOG_DEBUG, "%s: refused: %s", call,
            text[0] != '\0' ? text : kvt_strerror(code));
}

static void say_arrays(const struct kvt_misuse_request *ask, char *text, size_t len)
{
    uint64_t blocks_max = ask->ns->cache->settings->request_blocks_max;
    if (ask->pool == NULL)
        SAY("pool is NULL");
    else if (ask->pool->cache != ask->ns->cache)
        SAY("pool and namespace belong to two caches");
    else if (ask->n != 0 && (ask->keys == NULL || ask->ids == NULL))
        SAY("%s is NULL and n is %zu", ask->keys == NULL ? "keys" : "ids", ask->n);
    else if (ask->n > blocks_max)
        SAY("n is %zu, more than request_blocks_max (%" PRIu64 "): store or load in parts", ask->n,
            blocks_max);
    else if (ask->pool->shape != ask->ns->shape)
        SAY("the pool was registered with another layout than the namespace was opened with");
    else
        for (size_t i = 0; i < ask->n && text[0] == '\0'; i++) {
            if (ask->ids[i] >= ask->pool->desc.block_count)
                SAY("ids[%zu] is %" PRIu32 ", and the pool has %" PRIu32 " blocks", i, ask->ids[i],
                    ask->pool->desc.block_count);
            else
                say_key(ask->ns, ask->keys, i, text, len);
        }
}

static void say_store(const struct kvt_misuse_request *ask, char *text, size_t len)
{
    const struct kvt_store_opts *opts = ask->store;
    uint8_t index = ask->n > 0 ? kvt_ns_group_index(ask->ns, ask->keys[0].group) : 0;
    uint32_t tokens = ask->ns->shape->groups[index].block_tokens;
    if (opts->level < KVT_LEVEL_DEFAULT || opts->level > KVT_LEVEL_RAW)
        SAY("opts.level %d is none of enum kvt_level", opts->level);
    else if (opts->parent != NULL && !kvt_keys_ok(ask->ns, opts->parent, 1, true))
        SAY("opts.parent is not a key: hash_len %u", opts->parent->hash_len);
    else if (opts->write < KVT_WRITE_DEFAULT || opts->write > KVT_WRITE_AUTO)
        SAY("opts.write %d is none of enum kvt_write", (int)opts->write);
    else if (opts->parent != NULL && ask->n > 0 && opts->parent->group != ask->keys[0].group)
        SAY("opts.parent is of group %u, the keys of group %u", opts->parent->group,
            ask->keys[0].group);
    else if (opts->first_pos % tokens != 0)
        SAY("opts.first_pos is %" PRIu32 ", and blocks of %" PRIu32
            " tokens begin at multiples of that",
            opts->first_pos, tokens);
    else if (opts->parent != NULL && opts->first_pos == 0)
        SAY("opts.parent is given, but first_pos is 0: a first block has none before it");
    else
        SAY("opts.first_pos is %" PRIu32 ": the last of %zu blocks would end beyond 2^32",
            opts->first_pos, ask->n);
}

void kvt_misuse_request(const struct kvt_misuse_request *ask, int code)
{
    char text[400] = "";
    const size_t len = sizeof(text);
    if (code > -5000)
        return;
    if (code == KVT_E_VERSION)
        SAY("opts.struct_size is not set, or comes from another version of the headers");
    else
        say_arrays(ask, text, len);
    if (text[0] == '\0' && code == KVT_E_INVAL && ask->store != NULL)
        say_store(ask, text, len);
    if (text[0] == '\0' && code == KVT_E_INVAL && ask->load != NULL)
        SAY("opts.min_level %d is none of enum kvt_level", ask->load->min_level);
    kvt_log(&ask->ns->cache->log, KVT_LOG_DEBUG, "%s: refused: %s", ask->call,
            text[0] != '\0' ? text : kvt_strerror(code));
}
