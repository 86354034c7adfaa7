/* SHA-256 of a model's files: what tells two models apart that share a name.
 * Thread: any. Blocks: reads the whole file unless a digest of it is remembered. Errors: -errno.
 */
#ifndef KVT_ADAPTERS_LLAMA_DIGEST_H
#define KVT_ADAPTERS_LLAMA_DIGEST_H

#define KVT_DIGEST_HEX 64

/* Digest, in lower-case hex, of the model whose first file is `path`: of the file itself, or, for
 * a model split as NAME-00001-of-0000N.gguf, of the digests of its parts.
 * remember: a directory (made if need be, 0700) where digests are kept under a name made of device,
 * inode, size, mtime and ctime; NULL: read the files every time.
 * 0; -errno of the file that cannot be read; KVT_E_ENGINE a file that changed while it was read. */
__attribute__((warn_unused_result)) int kvt_model_digest(const char *path, const char *remember,
                                                         char hex[KVT_DIGEST_HEX + 1]);

#endif
