/* Namespace ids: everything that makes two KV caches incompatible, hashed. docs/format.md gives the
 * exact bytes. Any thread, no state. Adding a field means a new tag. */
#include <string.h>

#include "format/digest.h"
#include "kvtier/codec.h"
#include "kvtier/key.h"

static const char namespace_tag[] = "kvt-namespace-v1";

void kvt_identity_init(struct kvt_identity *identity)
{
    memset(identity, 0, sizeof *identity);
    identity->struct_size = sizeof *identity;
    identity->tp_size = 1;
    identity->pp_size = 1;
}

static void digest_text(struct kvt_digest *digest, const char *text)
{
    kvt_digest_string(digest, text, text ? strlen(text) : 0);
}

static void digest_identity(struct kvt_digest *digest, const struct kvt_identity *identity)
{
    digest_text(digest, identity->engine);
    digest_text(digest, identity->key_scheme);
    digest_text(digest, identity->model);
    digest_text(digest, identity->revision);
    digest_text(digest, identity->adapter);
    digest_text(digest, identity->layout);
    digest_text(digest, identity->rope);
    digest_text(digest, identity->rotation);
    digest_text(digest, identity->extra);
    kvt_digest_string(digest, identity->salt, identity->salt_len);
    kvt_digest_u32(digest, identity->tp_size);
    kvt_digest_u32(digest, identity->pp_size);
    kvt_digest_u32(digest, identity->pp_rank);
}

static void digest_layout(struct kvt_digest *digest, const struct kvt_layout *layout)
{
    kvt_digest_u32(digest, layout->block_tokens);
    kvt_digest_u32(digest, layout->part_count);
    for (uint32_t i = 0; i < layout->part_count; i++) {
        const struct kvt_part *part = &layout->parts[i];

        kvt_digest_u32(digest, part->kind);
        kvt_digest_u32(digest, part->dtype);
        kvt_digest_u32(digest, part->group);
        kvt_digest_u32(digest, part->layer);
        kvt_digest_u32(digest, part->heads);
        kvt_digest_u32(digest, part->head_dim);
    }
    if (!layout->group_count) /* as it was before there were groups */
        return;
    kvt_digest_u32(digest, layout->group_count);
    for (uint32_t i = 0; i < layout->group_count; i++) {
        const struct kvt_group *group = &layout->groups[i];

        kvt_digest_u32(digest, group->group);
        kvt_digest_u32(digest, group->kind);
        kvt_digest_u32(digest, group->block_tokens ? group->block_tokens : layout->block_tokens);
        kvt_digest_u32(digest, group->window_tokens);
    }
}

int kvt_namespace_id(const struct kvt_identity *identity, const struct kvt_layout *layout,
                     uint8_t id[KVT_NS_BYTES])
{
    uint8_t full[KVT_DIGEST_BYTES];
    struct kvt_digest digest;
    int rc;

    if (!identity || !layout || !id)
        return KVT_E_INVAL;
    if (identity->struct_size != sizeof *identity || layout->struct_size != sizeof *layout)
        return KVT_E_VERSION;
    if ((!identity->salt && identity->salt_len) || !identity->tp_size || !identity->pp_size ||
        identity->pp_rank >= identity->pp_size)
        return KVT_E_INVAL;
    if (!layout->block_tokens || layout->block_tokens > KVT_BLOCK_TOKENS_MAX ||
        !layout->part_count || layout->part_count > KVT_PARTS_MAX || !layout->parts ||
        layout->group_count > KVT_GROUPS_MAX || (layout->group_count && !layout->groups))
        return KVT_E_INVAL;
    kvt_digest_open(&digest);
    kvt_digest_start(&digest);
    kvt_digest_bytes(&digest, namespace_tag, sizeof namespace_tag);
    digest_identity(&digest, identity);
    digest_layout(&digest, layout);
    kvt_digest_u32(&digest, KVT_CODEC_FORMAT_VERSION);
    rc = kvt_digest_final(&digest, full);
    kvt_digest_close(&digest);
    if (!rc)
        memcpy(id, full, KVT_NS_BYTES);
    return rc;
}
