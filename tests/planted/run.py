#!/usr/bin/env python3
"""Does the suite catch bugs? Plants each of bugs.py in a copy of the sources, builds the tests that
should notice, and runs them: run.py [--all | --rotate | --seconds N | --check | NAME...]
[--json FILE].

--check: only whether the list fits the sources. --rotate: one, by the date (CI). --seconds: from
that one on, as many as begin within so long. Works below build-planted/; the sources themselves are
not touched, and hold no code for this. Every program is first run without a bug, since a test that
fails anyway catches nothing. Exit 0: all caught; 1: a bug got through; 2: the list does not fit the sources."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from bugs import BUGS  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
TREE = ROOT / "build-planted"
BUILD = TREE / "build"
TIMEOUT_S = 600


def copy_tree():
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, files):
        source, target = ROOT / name, TREE / name
        if not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copy(source, target)


def build(targets):
    """None, or what the compiler said."""
    done = subprocess.run(["cmake", "--build", BUILD, "-j", os.environ.get("JOBS", "2"), "--target"]
                          + targets, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stdout[-2000:]


def configure():
    subprocess.run(["cmake", "-S", TREE, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                    "-DKVT_GPU=off"], check=True, capture_output=True)


def passes(test):
    args = [BUILD / "tests" / test]
    if test.startswith("replay_"):
        target = test[len("replay_"):]
        args += [target, ROOT / "tests" / "fuzz" / "corpus" / target]
    try:
        return subprocess.run(args, cwd=BUILD, capture_output=True, timeout=TIMEOUT_S,
                              stdin=subprocess.DEVNULL).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def check_list():
    bad = 0
    for name, path, text, _, _ in BUGS:
        count = (ROOT / path).read_text().count(text)
        if count != 1:
            print(f"{name}: its text stands {count} times in {path}")
            bad = 2
    return bad


def plant(bug, sound):
    """The test that caught it; None."""
    name, path, text, wrong, tests = bug
    source = TREE / path
    whole = source.read_text()
    for test in tests:
        if test not in sound:
            said = build([test])
            if said:
                sys.exit(f"{test} does not build:\n{said}")
            sound[test] = passes(test)
            if not sound[test]:
                print(f"  {test} fails without a bug: it proves nothing", flush=True)
        if not sound[test]:
            continue
        source.write_text(whole.replace(text, wrong))
        try:
            said = build([test])
            if said:
                sys.exit(f"{name} does not build:\n{said}")
            if not passes(test):
                return test
        finally:
            source.write_text(whole)
    return None


def main():
    args = sys.argv[1:]
    out = args.pop(args.index("--json") + 1) if "--json" in args else None
    if "--check" in args:
        return check_list()
    seconds = int(args.pop(args.index("--seconds") + 1)) if "--seconds" in args else None
    names = [arg for arg in args if not arg.startswith("--")]
    bugs = [bug for bug in BUGS if bug[0] in names or "--all" in args]
    today = int(time.time() // 86400)
    if "--rotate" in args:
        bugs = [BUGS[today % len(BUGS)]]
    if seconds is not None:
        first = today % len(BUGS)
        bugs = BUGS[first:] + BUGS[:first]
    if not bugs:
        sys.exit(__doc__)
    failed = check_list()
    if failed:
        return failed
    copy_tree()
    configure()
    sound, missed, tried, start = {}, [], 0, time.monotonic()
    for bug in bugs:
        if seconds is not None and time.monotonic() - start > seconds:
            break
        tried += 1
        caught = plant(bug, sound)
        print(f"{bug[0]}: {'caught by ' + caught if caught else 'NOT CAUGHT'}", flush=True)
        if not caught:
            missed.append(bug[0])
    result = {"planted": {"tried": tried, "failed": len(missed)}}
    print(json.dumps(result))
    if out:
        pathlib.Path(out).write_text(json.dumps(result) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
