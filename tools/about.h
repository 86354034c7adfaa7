/* What --help and the man pages say of a command beyond its options. Tools only. */
#ifndef KVT_TOOLS_ABOUT_H
#define KVT_TOOLS_ABOUT_H

struct kvt_about {
    const char *command;
    const char *text;     /* paragraphs, separated by an empty line; filled when printed */
    const char *examples; /* lines as they are; NULL: none */
};

/* NULL: nothing is known of the command but its summary. */
const struct kvt_about *kvt_about(const char *command);

#endif
