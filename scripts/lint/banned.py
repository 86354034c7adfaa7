"""Banned words of the code, comments and strings left out.

Everywhere: functions that cannot be bounded or that hide errors. In src/: whatever prints, ends the
process or keeps hidden state. In comments: notes to self that nobody else will act upon.
"""
import pathlib
import re
import sys

EVERYWHERE = {
    "strcpy": "no bound: snprintf or memcpy", "strcat": "no bound", "sprintf": "no bound: snprintf",
    "vsprintf": "no bound: vsnprintf", "gets": "no bound", "stpcpy": "no bound",
    "strncpy": "leaves no terminator: snprintf or memcpy", "atoi": "hides errors: base/parse.h",
    "atol": "hides errors", "atoll": "hides errors", "atof": "hides errors",
    "system": "a shell: posix_spawn", "popen": "a shell: posix_spawn", "tmpnam": "races",
    "mktemp": "races: mkstemp", "alloca": "unbounded stack", "strtok": "hidden state",
    "longjmp": "hidden control flow", "setjmp": "hidden control flow",
}
IN_LIBRARY = {
    "printf": "the library never prints: kvt_log", "fprintf": "the library never prints",
    "vprintf": "the library never prints", "puts": "the library never prints",
    "putchar": "the library never prints", "perror": "the library never prints",
    "exit": "the library never exits", "_exit": "the library never exits",
    "quick_exit": "the library never exits", "abort": "the library never aborts",
    "assert": "the library never aborts: static_assert, or an error code",
    "rand": "randomness is a parameter", "srand": "randomness is a parameter",
    "signal": "signals belong to the program", "sigaction": "signals belong to the program",
    "setlocale": "the locale belongs to the program",
}
# Descriptors: through base/fd.h, so that none gets the number of a standard one that is closed.
OPENS = {
    "open", "openat", "creat", "socket", "socketpair", "accept", "accept4", "eventfd", "memfd_create",
    "epoll_create", "epoll_create1", "timerfd_create", "signalfd", "inotify_init", "inotify_init1",
    "pipe", "pipe2", "dup", "shm_open", "opendir", "fopen", "mkstemp", "mkostemp", "pidfd_open",
    "io_uring_setup",
}
OPENS_AT_LEAST_3 = "kvt_fd_high("
OPENS_EXEMPT = ("src/base/fd.h", "src/daemon/")  # the daemon holds the three: daemon/standard.h
NOTES = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
PATHS = re.compile(r"/home/|/root/|/Users/")
TOKENS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def blank(match):
    text = match.group(0)
    return re.sub(r"[^\n]", " ", text)


def check(path, words, out):
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        if NOTES.search(line):
            out.append(f"{path}:{number}: a note to self; do it, or file it")
        if PATHS.search(line):
            out.append(f"{path}:{number}: a path of one machine")
    code = TOKENS.sub(blank, text)
    for number, line in enumerate(code.splitlines(), 1):
        for call in re.finditer(r"(?<![\w.>])(\w+)\s*\(", line):
            if call.group(1) in words:
                out.append(f"{path}:{number}: {call.group(1)}(): {words[call.group(1)]}")


def check_opens(path, out):
    if path.as_posix().startswith(OPENS_EXEMPT):
        return
    code = TOKENS.sub(blank, path.read_text())
    for call in re.finditer(r"(?<![\w.>])(\w+)\s*\(", code):
        if call.group(1) in OPENS and not code[:call.start()].rstrip().endswith(OPENS_AT_LEAST_3):
            number = code.count("\n", 0, call.start()) + 1
            out.append(f"{path}:{number}: {call.group(1)}(): may give 0, 1 or 2: base/fd.h")


def main():
    out = []
    for folder in ("include", "src", "tools", "tests", "examples"):
        words = dict(EVERYWHERE)
        if folder in ("include", "src"):
            words.update(IN_LIBRARY)
        if folder == "tests":  # cmocka brings its own assert; a test may end its own process
            words.pop("setjmp")
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.suffix in (".c", ".h", ".cpp"):
                check(path, words, out)
                if folder == "src":
                    check_opens(path, out)
    print("\n".join(out), end="\n" if out else "")
    return 1 if out else 0


if __name__ == "__main__":
    sys.exit(main())
