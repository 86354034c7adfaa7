/* The terminal of `kvtier top`. Nothing else in the tool knows ncurses.
 *
 * Signals: the interrupt flag of cli.c ends the wait, so that kvt_screen_close() runs and the
 * terminal is given back as it was. ncurses installs its own handlers only where none is.
 * Threads: one.
 */
#include "top_screen.h"

#ifdef KVT_HAVE_NCURSES

#include <curses.h>
#include <errno.h>
#include <poll.h>
#include <term.h>
#include <unistd.h>

#include "cli.h"

#define SLICE_MS 250 /* a signal just before poll() is noticed this late */
#define KEY_ESCAPE 27

static SCREEN *screen;

int kvt_screen_open(void)
{
    int known;

    /* initscr() would end the process where a terminal is not known; newterm() would leak. */
    if (setupterm(NULL, STDOUT_FILENO, &known) != OK)
        return -1;
    del_curterm(cur_term);
    screen = newterm(NULL, stdout, stdin);
    if (!screen)
        return -1;
    cbreak();
    noecho();
    nodelay(stdscr, TRUE);
    keypad(stdscr, TRUE);
    set_escdelay(25);
    curs_set(0);
    return 0;
}

void kvt_screen_close(void)
{
    if (!screen)
        return;
    endwin();
    delscreen(screen);
    screen = NULL;
}

void kvt_screen_show(const struct kvt_top_view *view)
{
    erase();
    for (unsigned i = 0; i < view->count && (int)i < LINES; i++) {
        if (view->strong[i])
            attron(A_BOLD);
        mvaddnstr((int)i, 0, view->line[i], COLS > 0 ? COLS : 1);
        if (view->strong[i])
            attroff(A_BOLD);
    }
    refresh();
}

enum kvt_screen_event kvt_screen_wait(int milliseconds)
{
    struct pollfd keyboard = {.fd = STDIN_FILENO, .events = POLLIN};

    while (milliseconds > 0 && !kvt_cli_interrupted()) {
        int slice = milliseconds < SLICE_MS ? milliseconds : SLICE_MS;
        int n = poll(&keyboard, 1, slice);
        int key = getch(); /* also tells of a new size, which interrupts poll() */
        if (key == 'q' || key == 'Q' || key == KEY_ESCAPE)
            return KVT_SCREEN_QUIT;
        if (key != ERR)
            return KVT_SCREEN_REDRAW;
        if (n > 0 && (keyboard.revents & (POLLHUP | POLLERR | POLLNVAL)))
            return KVT_SCREEN_QUIT; /* the terminal is gone */
        if (n > 0 && key == ERR && !(keyboard.revents & POLLIN))
            return KVT_SCREEN_QUIT;
        milliseconds -= n == 0 ? slice : 1;
    }
    return kvt_cli_interrupted() ? KVT_SCREEN_QUIT : KVT_SCREEN_TIME;
}

#else

int kvt_screen_open(void)
{
    return -1;
}

void kvt_screen_close(void)
{
}

void kvt_screen_show(const struct kvt_top_view *view)
{
    (void)view;
}

enum kvt_screen_event kvt_screen_wait(int milliseconds)
{
    (void)milliseconds;
    return KVT_SCREEN_QUIT;
}

#endif
