/* Namespaces and shapes: what a cache must know of a layout before blocks of it move.
 *
 * A shape is a layout with the record sizes of every level, made once per distinct layout and
 * cache, so that the data path compares pointers. A namespace is an identity over a shape, known
 * to the store by a handle. Threads: any. Allocates; blocks for one round trip.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "client/client.h"
#include "kvtier/codec.h"
#include "kvtier/key.h"

static uint64_t dtype_bytes(int dtype)
{
    if (dtype == KVT_DTYPE_F32)
        return 4;
    return dtype == KVT_DTYPE_BYTE ? 1 : 2;
}

static bool layouts_equal(const struct kvt_layout *a, const struct kvt_layout *b)
{
    if (a->block_tokens != b->block_tokens || a->part_count != b->part_count)
        return false;
    for (uint32_t i = 0; i < a->part_count; i++) {
        const struct kvt_part *x = &a->parts[i], *y = &b->parts[i];
        if (x->kind != y->kind || x->dtype != y->dtype || x->group != y->group ||
            x->layer != y->layer || x->heads != y->heads || x->head_dim != y->head_dim)
            return false;
    }
    return true;
}

static struct kvt_shape *shape_make(const struct kvt_layout *layout)
{
    size_t parts_bytes = layout->part_count * sizeof(struct kvt_part);
    struct kvt_shape *shape = calloc(1, sizeof(*shape) + parts_bytes);
    if (shape == NULL)
        return NULL;
    struct kvt_part *parts = (struct kvt_part *)(shape + 1);
    memcpy(parts, layout->parts, parts_bytes);
    shape->layout = *layout;
    shape->layout.struct_size = sizeof(shape->layout);
    shape->layout.parts = parts;
    for (uint32_t i = 0; i < layout->part_count; i++)
        shape->block_bytes += (uint64_t)parts[i].heads * parts[i].head_dim * layout->block_tokens *
                              dtype_bytes(parts[i].dtype);
    for (int level = KVT_LEVEL_INT4; level <= KVT_LEVEL_RAW; level++) {
        size_t payload = kvt_payload_bytes(&shape->layout, 0, level);
        if (payload == 0 || kvt_record_bytes(payload) == 0)
            continue;
        shape->payload_bytes[level] = (uint32_t)payload;
        shape->record_bytes[level] = kvt_record_bytes(payload);
    }
    return shape;
}

const struct kvt_shape *kvt_shape_intern(struct kvt_cache *cache, const struct kvt_layout *layout)
{
    struct kvt_shape *shape;
    for (shape = cache->shapes; shape != NULL; shape = shape->next)
        if (layouts_equal(&shape->layout, layout))
            return shape;
    shape = shape_make(layout);
    if (shape == NULL)
        return NULL;
    shape->next = cache->shapes;
    cache->shapes = shape;
    return shape;
}

bool kvt_keys_ok(const struct kvt_ns *ns, const struct kvt_key *keys, size_t n)
{
    (void)ns; /* groups: only group 0 exists so far; kvt_ns_open() refuses the others */
    for (size_t i = 0; i < n; i++)
        if (keys[i].hash_len == 0 || keys[i].hash_len > KVT_HASH_BYTES_MAX ||
            keys[i].reserved != 0 || keys[i].group != 0)
            return false;
    return true;
}

/* What people see of the model's name: printable ASCII, cut. It never enters a path or a key. */
static void make_label(const char *model, char *label, size_t len)
{
    size_t used = 0;
    for (; model != NULL && *model != '\0' && used + 1 < len; model++)
        label[used++] = *model >= ' ' && *model <= '~' ? *model : '?';
    label[used] = '\0';
}

static int shape_check(const struct kvt_layout *layout)
{
    int rc = kvt_layout_check(layout);
    if (rc != 0)
        return rc;
    if (layout->group_count != 0)
        return KVT_E_UNSUPPORTED;
    for (uint32_t i = 0; i < layout->part_count; i++)
        if (layout->parts[i].group != 0)
            return KVT_E_UNSUPPORTED;
    return 0;
}

static int ns_register(struct kvt_cache *cache, struct kvt_ns *ns, struct kvt_msg_ns_open *msg,
                       const struct kvt_layout *layout)
{
    int rc = kvt_cache_enter(cache);
    if (rc != 0)
        return rc;
    cache->callers++;
    ns->shape = kvt_shape_intern(cache, layout);
    rc = -ENOMEM;
    if (ns->shape != NULL && ns->shape->record_bytes[KVT_LEVEL_RAW] == 0) {
        rc = KVT_E_LIMIT; /* a raw record would be larger than any record may be */
    } else if (ns->shape != NULL) {
        msg->block_tokens = layout->block_tokens;
        memcpy(msg->record_bytes, ns->shape->record_bytes, sizeof(msg->record_bytes));
        rc = kvt_call_ns_open(cache, msg, &ns->handle);
    }
    if (rc == 0)
        TAILQ_INSERT_TAIL(&cache->namespaces, ns, list);
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    return rc;
}

int kvt_ns_open(struct kvt_cache *cache, const struct kvt_identity *identity,
                const struct kvt_layout *layout, struct kvt_ns **out)
{
    if (cache == NULL || identity == NULL || layout == NULL || out == NULL)
        return KVT_E_INVAL;
    int rc = shape_check(layout);
    if (rc != 0)
        return rc;
    struct kvt_msg_ns_open msg = {0};
    rc = kvt_namespace_id(identity, layout, msg.id);
    if (rc != 0)
        return rc;
    make_label(identity->model, msg.label, sizeof(msg.label));
    struct kvt_ns *ns = calloc(1, sizeof(*ns));
    if (ns == NULL)
        return -ENOMEM;
    ns->cache = cache;
    memcpy(ns->id, msg.id, sizeof(ns->id));
    rc = ns_register(cache, ns, &msg, layout);
    if (rc != 0) {
        free(ns);
        return rc;
    }
    *out = ns;
    return 0;
}

void kvt_ns_close(struct kvt_ns *ns)
{
    if (ns == NULL || kvt_cache_enter(ns->cache) != 0)
        return;
    struct kvt_cache *cache = ns->cache;
    cache->callers++;
    while (ns->refs > 0)
        pthread_cond_wait(&cache->idle, &cache->lock);
    TAILQ_REMOVE(&cache->namespaces, ns, list);
    cache->callers--;
    pthread_cond_broadcast(&cache->idle);
    pthread_mutex_unlock(&cache->lock);
    free(ns);
}

const uint8_t *kvt_ns_id(const struct kvt_ns *ns)
{
    return ns->id;
}

size_t kvt_ns_record_bytes(const struct kvt_ns *ns, uint16_t group, int level)
{
    if (level == KVT_LEVEL_DEFAULT)
        level = ns->cache->settings->level;
    if (group != 0 || level < 0 || level > KVT_LEVEL_RAW)
        return 0;
    return ns->shape->record_bytes[level];
}
