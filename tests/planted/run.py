#!/usr/bin/env python3
"""Does the suite catch bugs? Plants each of bugs.py in a copy of the sources, builds the tests that
should notice, and runs them: run.py [--all | --rotate | --seconds N | --check | NAME...]
[--jobs N] [--json FILE].

--check: only whether the list fits the sources. --rotate: one, by the date (CI). --seconds: from
that one on, as many as begin within so long. --jobs: so many at a time, each in a copy of its own.
Works below build-planted/ (build-planted-2, ...), or KVT_PLANTED_DIR; the sources themselves are not
touched, and hold no code for this. KVT_PLANTED_PREFIX: a directory with the libraries, headers and
the pkg-config that soak-wide.py packs, for a machine that has none of them. Every program is first
run without a bug, since a test that fails anyway catches nothing. Exit 0: all caught; 1: a bug got
through; 2: the list does not fit the sources."""
import json
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from bugs import BUGS  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = os.environ.get("KVT_PLANTED_PREFIX")
TIMEOUT_S = 600
STUCK_S = 45  # without any processor time: it hangs


def environment():
    env = dict(os.environ)
    env.pop("KVT_DAEMON", None)  # a kvtierd of another build has no bug
    if PREFIX:
        env["PKG_CONFIG"] = f"{PREFIX}/bin/pkg-config"
        env["OPENSSL_ROOT_DIR"] = PREFIX
        env["LD_LIBRARY_PATH"] = f"{PREFIX}/lib"
    return env


ENV = environment()


def sources():
    """Names of the files to copy: git's, or, in an unpacked archive, all but what builds made."""
    said = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                          capture_output=True, text=True)
    if said.returncode == 0 and said.stdout:
        return list(filter(None, said.stdout.split("\n")))
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
            if not path.relative_to(ROOT).parts[0].startswith(("build", ".", "dist"))]


def kill(group):
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def ticks(session):
    """Processor time of all processes of a session."""
    used = 0
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used += int(words[11]) + int(words[12]) if int(words[3]) == session else 0
    return used


class Result:
    """What the copies have found out, all together."""

    def __init__(self, bugs, seconds):
        self.bugs = queue.Queue()
        for bug in bugs:
            self.bugs.put(bug)
        self.end = None if seconds is None else time.monotonic() + seconds
        self.lock = threading.Lock()
        self.sound = {}  # test: whether it passes without a bug
        self.asking = {}  # test: held by the copy that finds that out
        self.children = set()
        self.caught, self.missed, self.broken = [], [], []

    def next(self):
        if len(self.broken) > 2 or (self.end is not None and time.monotonic() > self.end):
            return None
        try:
            return self.bugs.get_nowait()
        except queue.Empty:
            return None

    def say(self, name, test):
        with self.lock:
            (self.caught if test else self.missed).append(name)
            print(f"{name}: {'caught by ' + test if test else 'NOT CAUGHT'}", flush=True)


class Copy:
    """A copy of the sources with a build of its own."""

    def __init__(self, number, result):
        self.result = result
        place = pathlib.Path(os.environ.get("KVT_PLANTED_DIR", ROOT))
        self.tree = place / ("build-planted" if number == 1 else f"build-planted-{number}")
        self.build_dir = self.tree / "build"

    def make(self, names):
        for name in names:
            source, target = ROOT / name, self.tree / name
            if not source.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists() or target.read_bytes() != source.read_bytes():
                shutil.copy(source, target)
        subprocess.run(["cmake", "-S", self.tree, "-B", self.build_dir, "-G", "Ninja",
                        "-DCMAKE_BUILD_TYPE=Release", "-DKVT_GPU=off"], check=True,
                       capture_output=True, env=ENV)

    def build(self, test):
        """None, or what the compiler said."""
        done = subprocess.run(["cmake", "--build", self.build_dir, "-j", os.environ.get("JOBS", "2"),
                               "--target", test], capture_output=True, text=True, env=ENV)
        return None if done.returncode == 0 else done.stdout[-2000:]

    def passes(self, test):
        args = [self.build_dir / "tests" / test]
        if test.startswith("replay_"):
            target = test[len("replay_"):]
            args += [target, ROOT / "tests" / "fuzz" / "corpus" / target]
        child = subprocess.Popen(args, cwd=self.build_dir, env=ENV, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                 start_new_session=True)
        self.result.children.add(child.pid)
        end, used, moved = time.monotonic() + TIMEOUT_S, 0, time.monotonic()
        while child.poll() is None and time.monotonic() < min(end, moved + STUCK_S):
            try:
                child.wait(1)
            except subprocess.TimeoutExpired:
                now = ticks(child.pid)
                moved = time.monotonic() if now > used else moved
                used = max(used, now)
        kill(child.pid)  # a hang is a failure; and whoever it left behind
        self.result.children.discard(child.pid)
        return child.wait() == 0

    def is_sound(self, test):
        """Whether it passes without a bug: asked once of all copies."""
        with self.result.lock:
            asking = self.result.asking.setdefault(test, threading.Lock())
        with asking:
            if test not in self.result.sound:
                said = self.build(test)
                if said:
                    raise RuntimeError(f"{test} does not build:\n{said}")
                self.result.sound[test] = self.passes(test)
                if not self.result.sound[test]:
                    print(f"  {test} fails without a bug: it proves nothing", flush=True)
        return self.result.sound[test]

    def plant(self, bug):
        """The test that caught it; None."""
        name, path, text, wrong, tests = bug
        source = self.tree / path
        whole = source.read_text()
        for test in filter(self.is_sound, tests):
            source.write_text(whole.replace(text, wrong))
            try:
                said = self.build(test)
                if said:
                    raise RuntimeError(f"{name} does not build:\n{said}")
                if not self.passes(test):
                    return test
            finally:
                source.write_text(whole)
        return None

    def work(self, names):
        try:
            self.make(names)
        except (OSError, subprocess.CalledProcessError) as error:
            self.result.broken.append(str(error) + str(getattr(error, "stderr", "") or ""))
            return
        while (bug := self.result.next()) is not None:
            try:
                self.result.say(bug[0], self.plant(bug))
            except (RuntimeError, OSError) as error:
                self.result.broken.append(f"{bug[0]}: {error}")


def check_list():
    bad = 0
    for name, path, text, _, _ in BUGS:
        count = (ROOT / path).read_text().count(text)
        if count != 1:
            print(f"{name}: its text stands {count} times in {path}")
            bad = 2
    return bad


def take(args, option, otherwise=None):
    return args.pop(args.index(option) + 1) if option in args else otherwise


def main():
    args = sys.argv[1:]
    out, jobs = take(args, "--json"), int(take(args, "--jobs", "1"))
    if "--check" in args:
        return check_list()
    seconds = take(args, "--seconds")
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
    result = Result(bugs, None if seconds is None else int(seconds))
    files = sources()
    copies = [threading.Thread(target=Copy(i, result).work, args=(files,), daemon=True)
              for i in range(1, min(jobs, len(bugs)) + 1)]
    told = threading.Event()  # to end: what was found out so far is said all the same
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    for copy in copies:
        copy.start()
    while not told.is_set() and any(copy.is_alive() for copy in copies):
        told.wait(0.2)
    for child in list(result.children):
        kill(child)
    print("\n".join(result.broken), end="\n" if result.broken else "")
    said = {"planted": {"tried": len(result.caught) + len(result.missed),
                        "failed": len(result.missed)}}
    print(json.dumps(said))
    if out:
        pathlib.Path(out).write_text(json.dumps(said) + "\n")
    return 1 if result.missed or result.broken else 0


if __name__ == "__main__":
    sys.exit(main())
