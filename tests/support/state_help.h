/* Files of client/state_file.h as a test writes and reads them: whole, and with the hash that
 * belongs to their lines. A step that fails fails the test. */
#ifndef KVT_TESTS_STATE_HELP_H
#define KVT_TESTS_STATE_HELP_H

#include <stddef.h>

/* Its text, with a NUL behind it, at most room - 1 bytes; the length, 0 when there is no file. */
size_t state_get(const char *path, char *text, size_t room);
void state_put(const char *path, const char *text, size_t len);
/* Lines, and the hash that belongs to them. */
void state_put_lines(const char *path, const char *lines);

#endif
