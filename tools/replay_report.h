/* What `kvtier replay` prints: one case in full, or a table of several, and the answer. Tools only.
 */
#ifndef KVT_TOOLS_REPLAY_REPORT_H
#define KVT_TOOLS_REPLAY_REPORT_H

#include "replay_case.h"

struct replay_report {
    const struct replay_base *base;
    const char *model;
    const struct replay_case *cases;
    const struct replay_result *results;
    size_t count;
    int table; /* rows, also when there is only one */
};

const char *replay_admission_name(int policy);
/* Exit code. */
int replay_report_json(const struct replay_report *report);
void replay_report_text(const struct replay_report *report);

#endif
