/* Text to values, strictly: the whole text must be one value, no blanks, no signs but "-" of
 * integers, nothing guessed. Used by the configuration and the command line.
 *
 * All return 0; KVT_E_CONFIG_VALUE when the text is not of the form; KVT_E_LIMIT when it is, but
 * the value does not fit. *out is written only on success. Threads: any; no state, no locale.
 */
#ifndef KVT_BASE_PARSE_H
#define KVT_BASE_PARSE_H

#include <stddef.h>
#include <stdint.h>

#define KVT_PARSE_RESULT __attribute__((warn_unused_result))

/* Bytes: "4096", "4096B", "64KiB", "1.5GiB", "4MB". Units: B; KiB MiB GiB TiB (powers of 1024); kB
 * MB GB TB (powers of 1000). A fraction (at most 9 digits) needs a unit and is cut to whole bytes.
 */
KVT_PARSE_RESULT int kvt_parse_size(const char *text, uint64_t *out);

/* Nanoseconds: "250ms", "1.5s", "0". Units: ns us ms s min h d; only 0 may go without. */
KVT_PARSE_RESULT int kvt_parse_duration(const char *text, int64_t *out);

/* yes no, true false, on off, 1 0. */
KVT_PARSE_RESULT int kvt_parse_bool(const char *text, int *out);

/* A decimal integer within [min, max]. */
KVT_PARSE_RESULT int kvt_parse_int(const char *text, int64_t min, int64_t max, int64_t *out);

/* The valid unit nearest to the one in `text`, for messages ("64gb" -> "GB"); NULL when nothing is
 * near. Static strings. */
const char *kvt_nearest_size_unit(const char *text);
const char *kvt_nearest_duration_unit(const char *text);

/* Edits (insert, delete, replace, swap of neighbours) that turn a into b, case ignored and '-'
 * equal to '_'. Only the first 63 bytes of each are looked at. */
unsigned kvt_edit_distance(const char *a, const char *b);

/* The choice nearest to word; the first one of equals. NULL when none is near enough to be meant
 * (more than a third of its letters, at least one, would have to change). */
const char *kvt_nearest(const char *word, const char *const *choices, size_t count);

#endif
