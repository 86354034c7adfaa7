/* A root directory in memory as a store leaves it, and edits of it: for the fuzzer of whole roots.
 * The image is made once per process by the production log: sealed segments, an open one, a
 * journal, 160 records. Aborts on failure, since it runs without a test framework. Threads: one. */
#ifndef KVT_TESTS_ROOT_IMAGE_H
#define KVT_TESTS_ROOT_IMAGE_H

#include <stdbool.h>

#include "io/io.h"

#define ROOT_IMAGE_CAP (12ull << 20)

enum {
    ROOT_EDIT_FILE = 7, /* superblock, journal, segments 0, 1, 2, ... */
    ROOT_EDIT_CUT = 0x40,
    ROOT_EDIT_UNFIT = 0x80
};

struct root_edit {
    uint32_t file; /* ROOT_EDIT_FILE, and flags */
    uint32_t page; /* counted from the end when the file is a segment and it is 0xff: the trailer */
    uint32_t offset, bytes;
    uint8_t data[64];
};

/* A copy of the image; destroy() it. */
struct kvt_io *root_image_clone(void);
void root_image_edit(struct kvt_io *io, const struct root_edit *edit);
/* Whether exactly these bytes were written as a record. */
bool root_image_holds(const void *record, uint32_t bytes);

#endif
