/* The terminal of `kvtier top`: by ncurses where the build has it. Tools only. */
#ifndef KVT_TOOLS_TOP_SCREEN_H
#define KVT_TOOLS_TOP_SCREEN_H

#define KVT_TOP_LINES_MAX 96u
#define KVT_TOP_COLUMNS_MAX 160u

struct kvt_top_view {
    unsigned count;
    char line[KVT_TOP_LINES_MAX][KVT_TOP_COLUMNS_MAX];
    unsigned char strong[KVT_TOP_LINES_MAX]; /* 1: a headline, or something to look at */
};

/* Take the terminal over. 0; -1 this build has no ncurses, or it does not know this terminal. */
int kvt_screen_open(void);
void kvt_screen_close(void); /* the terminal is as it was; also after a signal */

/* Draw; what does not fit is cut. */
void kvt_screen_show(const struct kvt_top_view *view);

enum kvt_screen_event { KVT_SCREEN_TIME, KVT_SCREEN_REDRAW, KVT_SCREEN_QUIT };

/* Wait for a key ('q' and Escape quit), a new size, a signal (quits), or the end of the time. */
enum kvt_screen_event kvt_screen_wait(int milliseconds);

#endif
