#!/usr/bin/env python3
"""What the tests that try to break the store have tried, and what failed: one line of JSON.

tally.py [--before-summary] LOG...: adds up the lines {"kill9": {"tried": 300, "failed": 0}} that
programs print (tests/support/tally.h) in logs of ctest (LastTest.log) or of single programs. A test
of ctest's log that failed although it says "failed": 0, or that says nothing, counts as one more
failure of its practice, known by its name. Nothing here is a constant: a practice that printed
nothing has tried nothing.
--before-summary: copies standard input to standard output, and prints the line before ctest's
summary; the logs are read when ctest has ended, since it keeps them elsewhere until then."""
import json
import re
import sys

PRACTICES = ["fail_at_n", "alloc_fail", "power_loss", "simulation", "kill9", "fuzz", "bit_flips",
             "history", "planted", "remote"]
LINE = re.compile(r'\{"(%s)": \{"tried": (\d+), "failed": (\d+)\}' % "|".join(PRACTICES))
# Which practice a test of ctest belongs to that has died without a word.
BY_NAME = [("fail_at_n", r"fail_at_n"), ("alloc_fail", r"alloc_fail"),
           ("power_loss", r"power_loss|crash$"), ("simulation", r"test_sim"),
           ("kill9", r"test_kill|test_cases_kill|test_daemon_kill"), ("fuzz", r"replay_|fuzz\."),
           ("bit_flips", r"bit_flip"), ("history", r"test_history"), ("planted", r"planted"),
           ("remote", r"test_redis_cluster")]
TEST = re.compile(r"^\d+/\d+ Testing: (.*)$", re.M)


def add(sums, text, name=None, failed=False):
    """Counts of one program's output. failed: it ended badly; name: ctest's name of it."""
    said = {}
    for practice, tried, bad in LINE.findall(text):
        tried_before, bad_before = said.get(practice, (0, 0))
        said[practice] = (tried_before + int(tried), bad_before + int(bad))
    if failed and not any(bad for _, bad in said.values()):
        guess = [practice for practice, pattern in BY_NAME if re.search(pattern, name or "")]
        for practice in list(said)[:1] or guess[:1]:
            tried, bad = said.get(practice, (0, 0))
            said[practice] = (tried, bad + 1)
    for practice, (tried, bad) in said.items():
        sums[practice]["tried"] += tried
        sums[practice]["failed"] += bad


def count(paths):
    sums = {practice: {"tried": 0, "failed": 0} for practice in PRACTICES}
    for path in paths:
        try:
            with open(path, errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        parts = TEST.split(text)  # before the first test; then name, output, name, output, ...
        if len(parts) == 1:
            add(sums, text)
        for name, output in zip(parts[1::2], parts[2::2]):
            add(sums, output, name, failed="\nTest Passed." not in output)
    return sums


def main():
    args = sys.argv[1:]
    if "--before-summary" not in args:
        print(json.dumps(count(args)))
        return
    logs = [arg for arg in args if arg != "--before-summary"]
    summary = []
    for line in sys.stdin:
        if summary or re.match(r"\d+% tests passed", line):
            summary.append(line)
        else:
            sys.stdout.write(line)
            sys.stdout.flush()
    print(json.dumps(count(logs)), end="\n\n")
    sys.stdout.write("".join(summary))


if __name__ == "__main__":
    main()
