/* What `kvtier inspect` shows, as JSON: the one source of both outputs. Tools only. */
#ifndef KVT_TOOLS_INSPECT_H
#define KVT_TOOLS_INSPECT_H

#include <jansson.h>

#include "store_dir.h"

/* The root, its namespaces with their level maps, its segments. NULL: out of memory, or the
 * directory cannot be listed. */
json_t *kvt_inspect_root(struct kvt_dir *dir);

/* One record: header fields as they stand on disk, whether it verifies, its chain to the start. */
json_t *kvt_inspect_record(struct kvt_dir *dir, size_t index);

/* Key and place of a record in one line each, for lists. */
json_t *kvt_inspect_brief(const struct kvt_dir_record *record);

/* Records that a word names: SEGMENT:PAGE (segment as in its file name, hexadecimal; any page of
 * the record), or the first hexadecimal digits of a key's hash. ns: only of this one; NULL: any.
 * Writes up to room indices, returns how many there are; -1: the word is neither. */
long kvt_inspect_find(const struct kvt_dir *dir, const char *word, const uint8_t *ns,
                      size_t *indices, size_t room);

#endif
