/* What a context is: refusals, the layout of its cache, and the identity of its blocks.
 *
 * Rule: everything that changes the bytes of a KV row, given the tokens before it, goes into the
 * identity; what cannot be known is refused. The model's own constants (RoPE base, head counts,
 * norms) are covered by the digest of its file; what a caller can set on a context is taken from
 * the parameters that it was made from. Threads: one at a time. No decode happens here.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama_digest.h"
#include "llama_internal.h"

#define TEXT_BYTES 512
#define META_BYTES 128
#define BUILD_BYTES 256 /* of engine_build */

#ifndef KVT_LLAMA_BUILD
#define KVT_LLAMA_BUILD "unpinned"
#endif

/* Value of "<architecture>.<key>" as text; 0 when the model has no such key. */
static int meta(const struct llama_model *model, const char *key, char value[META_BYTES])
{
    char arch[META_BYTES / 2], full[META_BYTES];

    if (llama_model_meta_val_str(model, "general.architecture", arch, sizeof(arch)) < 0)
        return 0;
    snprintf(full, sizeof(full), "%s.%s", arch, key);
    return llama_model_meta_val_str(model, full, value, META_BYTES) >= 0;
}

/* Unsigned number of the metadata, or `otherwise`. */
static uint32_t meta_number(const struct llama_model *model, const char *key, uint32_t otherwise)
{
    char text[META_BYTES], *end;

    if (!meta(model, key, text))
        return otherwise;
    unsigned long number = strtoul(text, &end, 10);
    return *end == '\0' && number > 0 && number <= UINT32_MAX ? (uint32_t)number : otherwise;
}

static const char *refuse_model(const struct llama_model *model)
{
    char causal[META_BYTES];
    const enum llama_rope_type rope = llama_model_rope_type(model);

    if (llama_model_is_recurrent(model))
        return "the model is recurrent: its state cannot be cut into token blocks";
    if (llama_model_is_hybrid(model))
        return "the model is a hybrid with recurrent layers: their state cannot be cut into blocks";
    if (llama_model_is_diffusion(model))
        return "the model is a diffusion model: its tokens depend on later ones";
    if (llama_model_has_encoder(model) || !llama_model_has_decoder(model))
        return "the model has an encoder: only decoder-only models are supported";
    if (meta(model, "attention.causal", causal) && strcmp(causal, "false") == 0)
        return "the model's attention is not causal: its tokens depend on later ones";
    if (llama_model_n_swa(model) > 0)
        return "the model has sliding-window attention layers, which are not supported yet";
    if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE ||
        rope == LLAMA_ROPE_TYPE_VISION)
        return "the model has several positions per token (M-RoPE), which are not supported";
    return NULL;
}

static const char *refuse_params(const struct llama_context *ctx,
                                 const struct llama_context_params *params)
{
    const uint32_t seqs = llama_n_seq_max(ctx);

    if ((params->n_seq_max > 1 ? params->n_seq_max : 1) != seqs)
        return "context_params are not those of this context: n_seq_max differs";
    if (params->ctx_other != NULL)
        return "the context shares its cache with another context";
    if (params->ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT)
        return "the context is not a plain one (multi-token prediction)";
    if (params->attention_type == LLAMA_ATTENTION_TYPE_NON_CAUSAL)
        return "attention_type is non-causal: tokens depend on later ones";
    if (seqs > 1 && (!params->kv_unified || llama_n_ctx_seq(ctx) != llama_n_ctx(ctx)))
        return "the cache has one stream per sequence: set kv_unified = true";
    if (params->flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED)
        return "flash attention is off, so V is stored transposed: set flash_attn_type to enabled";
    return NULL;
}

int kvt_llama_check_model(const struct llama_context *ctx, const struct kvt_llama_opts *opts,
                          char *error, size_t error_len)
{
    const uint32_t seqs = llama_n_seq_max(ctx);
    const char *reason = refuse_model(llama_get_model(ctx));

    if (reason == NULL && llama_get_memory(ctx) == NULL)
        reason = "the context has no cache";
    if (reason == NULL)
        reason = refuse_params(ctx, opts->context_params);
    if (reason != NULL) {
        snprintf(error, error_len, "%s", reason);
        return KVT_E_UNSUPPORTED;
    }
    if (opts->staging_seq >= 0 && (uint32_t)opts->staging_seq >= seqs) {
        snprintf(error, error_len, "staging_seq is %d, but the context has n_seq_max = %u",
                 opts->staging_seq, seqs);
        return KVT_E_INVAL;
    }
    return 0;
}

static int dtype_of(int32_t type)
{
    switch (type) {
    case GGML_TYPE_F16:
        return KVT_DTYPE_F16;
    case GGML_TYPE_BF16:
        return KVT_DTYPE_BF16;
    case GGML_TYPE_F32:
        return KVT_DTYPE_F32;
    default:
        return 0;
    }
}

/* One part from one row description; 0 or KVT_E_UNSUPPORTED with the reason. */
static int make_part(const struct kvt_blob_row *row, uint8_t kind, uint32_t layer,
                     uint32_t head_dim, struct kvt_part *part, char *error, size_t error_len)
{
    const int dtype = dtype_of(row->type);

    if (dtype == 0) {
        const char *name = row->type >= 0 && row->type < GGML_TYPE_COUNT
                               ? ggml_type_name((enum ggml_type)row->type)
                               : NULL;
        snprintf(error, error_len,
                 "the %s cache is of type %s: only f16, bf16 and f32 caches are supported; kvtier "
                 "quantises what it stores itself",
                 kind == KVT_PART_K ? "K" : "V", name != NULL ? name : "unknown");
        return KVT_E_UNSUPPORTED;
    }
    const uint32_t bytes = dtype == KVT_DTYPE_F32 ? 4 : 2;
    if (head_dim == 0 || row->bytes % (bytes * head_dim) != 0) {
        snprintf(error, error_len, "layer %u: a row of %u bytes is not whole heads of %u elements",
                 layer, row->bytes, head_dim);
        return KVT_E_UNSUPPORTED;
    }
    *part = (struct kvt_part){.kind = kind,
                              .dtype = (uint8_t)dtype,
                              .group = 0,
                              .layer = layer,
                              .heads = row->bytes / (bytes * head_dim),
                              .head_dim = head_dim};
    return 0;
}

int kvt_llama_make_parts(struct kvt_llama *llama, char *error, size_t error_len)
{
    const struct llama_model *model = llama_get_model(llama->ctx);
    const uint32_t layers = llama->shape.layers;
    const int32_t heads = llama_model_n_head(model), width = llama_model_n_embd(model);
    const uint32_t dim = heads > 0 && width > 0 ? (uint32_t)(width / heads) : 0;
    const uint32_t dim_k = meta_number(model, "attention.key_length", dim);
    const uint32_t dim_v = meta_number(model, "attention.value_length", dim);
    int rc = 0;

    llama->parts = calloc(2 * (size_t)layers, sizeof(*llama->parts));
    if (llama->parts == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; rc == 0 && i < layers; i++) {
        rc = make_part(&llama->shape.rows[i], KVT_PART_K, i, dim_k, &llama->parts[2 * i], error,
                       error_len);
        if (rc == 0)
            rc = make_part(&llama->shape.rows[layers + i], KVT_PART_V, i, dim_v,
                           &llama->parts[2 * i + 1], error, error_len);
    }
    return rc;
}

/* The bits of a float: printing them does not depend on the locale. */
static uint32_t bits(float value)
{
    uint32_t out;

    memcpy(&out, &value, sizeof(out));
    return out;
}

/* Everything a caller can set about positions, as canonical text. */
static void rope_text(const struct llama_context *ctx, const struct llama_context_params *p,
                      char text[TEXT_BYTES])
{
    const struct llama_model *model = llama_get_model(ctx);
    uint32_t trained = meta_number(model, "rope.scaling.original_context_length",
                                   (uint32_t)llama_model_n_ctx_train(model));

    /* models with two sets of frequencies take the long one for contexts beyond the trained size */
    snprintf(text, TEXT_BYTES,
             "type=%d scaling=%d base=%08x scale=%08x ext=%08x attn=%08x fast=%08x slow=%08x "
             "orig=%u long=%d",
             (int)llama_model_rope_type(model), (int)p->rope_scaling_type, bits(p->rope_freq_base),
             bits(p->rope_freq_scale), bits(p->yarn_ext_factor), bits(p->yarn_attn_factor),
             bits(p->yarn_beta_fast), bits(p->yarn_beta_slow), p->yarn_orig_ctx,
             llama_n_ctx_seq(ctx) > trained);
}

int kvt_llama_open_ns(struct kvt_llama *llama, const struct kvt_llama_opts *opts, char *error,
                      size_t error_len)
{
    const struct llama_context_params *params = opts->context_params;
    const struct kvt_layout layout = {sizeof(layout), llama->block_tokens, 2 * llama->shape.layers,
                                      llama->parts};
    char digest[KVT_DIGEST_HEX + 1], name[META_BYTES], rope[TEXT_BYTES], extra[TEXT_BYTES];
    const char *build = opts->engine_build != NULL ? opts->engine_build : KVT_LLAMA_BUILD;
    const char *rotation = getenv("LLAMA_ATTN_ROT_DISABLE");
    struct kvt_identity identity;

    if (llama->shape.rows[0].type != (int32_t)params->type_k ||
        llama->shape.rows[llama->shape.layers].type != (int32_t)params->type_v) {
        snprintf(error, error_len,
                 "context_params are not those of this context: the cache types differ");
        return KVT_E_INVAL;
    }
    int rc = kvt_model_digest(opts->model_path, opts->digest_dir, digest);
    if (rc != 0) {
        snprintf(error, error_len, "%s: %s", opts->model_path,
                 rc == KVT_E_ENGINE ? "changed while it was read" : kvt_strerror(rc));
        return rc;
    }
    if (llama_model_meta_val_str(llama_get_model(llama->ctx), "general.name", name, sizeof(name)) <
        0)
        name[0] = '\0';
    rope_text(llama->ctx, params, rope);
    snprintf(extra, sizeof(extra), "llama.cpp=%s build=%s type_k=%d type_v=%d flash_attn=1",
             llama_version(), build, (int)params->type_k, (int)params->type_v);
    if (strlen(build) > BUILD_BYTES) { /* cut off, two builds could look the same */
        snprintf(error, error_len, "engine_build is longer than %d bytes", BUILD_BYTES);
        return KVT_E_INVAL;
    }

    kvt_identity_init(&identity);
    identity.engine = "llama.cpp";
    identity.key_scheme = KVT_KEY_SCHEME;
    identity.model = name;
    identity.revision = digest;
    identity.adapter = opts->lora;
    identity.layout = "rows";
    identity.rope = rope;
    /* rotation acts on quantised caches alone, which are refused; the switch stays part of the
     * identity, so that taking such caches later cannot mix the two */
    identity.rotation = rotation != NULL && strtol(rotation, NULL, 10) != 0 ? "disabled" : "";
    identity.extra = extra;
    identity.salt = opts->salt;
    identity.salt_len = opts->salt_len;
    rc = kvt_layout_check(&layout);
    if (rc != 0) {
        snprintf(error, error_len, "the cache's shape (heads of %u elements, %u layers) %s",
                 llama->parts[0].head_dim, llama->shape.layers, "is not one that kvtier can code");
        return rc;
    }
    rc = kvt_ns_open(llama->cache, &identity, &layout, &llama->ns);
    if (rc != 0)
        snprintf(error, error_len, "cannot open the namespace: %s", kvt_strerror(rc));
    return rc;
}
