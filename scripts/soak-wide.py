#!/usr/bin/env python3
"""The soak on a machine with many processors and nothing installed: programs built elsewhere.

soak-wide.py pack DIR     from the builds of this tree (release, asan, tsan, fuzz; see NEEDED) into
                          DIR: programs, stripped, with the libraries that they need; redis-server
                          and redis-cli; the sources and what they are built with, for the planted
                          bugs (cmake, ninja and a compiler must be there). And DIR.tar.xz of it all
soak-wide.py run DIR OUT SECONDS [PROCESSORS] [--fuzz SECONDS] [--history OPERATIONS]
                 [--planted JOBS] [--scale N] [--only KIND,...] [--detach]
                          everything of plan() once, cut into pieces that run side by side; each
                          fuzzer for so many seconds (1,200), so many operations of history (10^8),
                          every planted bug (in 4 copies of the sources; 0: none). --scale: that
                          much less of each piece. --only: kinds of pieces, by the first word of
                          their names. --detach: in the background, in a session of its own, and
                          return at once: OUT/run.log has the output.
                          KVT_TEST_SEED moves all seeds.
Ends when all is done or SECONDS are over; a piece under way then is asked to end (SIGTERM) and counts
as far as it came. OUT/soak.json, written anew every minute, and the last line: one line of JSON, as
`make soak` has it, with pieces that were cut off or not reached, and the seconds that each fuzzer had;
"done" is true in the last one. OUT/soak.log: all output. Exit 1 when anything failed."""
import argparse
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from soak_pack import pack  # noqa: E402
from tally import PRACTICES, add  # noqa: E402

WAITING = 12  # pieces at a time that mostly wait (kill -9), beside those that compute
FUZZ_PIECE_S = 100
HISTORY_PIECE_S = 100
HISTORY_PIECE_OPS = 2000000
# Processor seconds that the plan and the planted bugs took where they were last run: what is left of
# the machine goes to history from the start.
PLAN_S, PLANTED_S = 9000, 5000
MARGIN_S = 12  # before the end: time to print what was done


class Soak:
    def __init__(self, options):
        self.o = options
        self.programs, self.out = pathlib.Path(options.dir).resolve(), pathlib.Path(options.out)
        self.begin = time.monotonic()
        self.end = self.begin + options.seconds
        self.seed = int(os.environ.get("KVT_TEST_SEED", "0"))
        self.sums = {practice: {"tried": 0, "failed": 0} for practice in PRACTICES}
        self.pieces, self.fuzzed, self.took = {}, {}, {}
        self.failures, self.cut = [], []
        self.history_going = 0
        self.history_number = 0
        self.queues = {}
        self.lock = threading.Lock()
        self.log = open(self.out / "soak.log", "w", errors="replace")
        self.calm = []  # address randomisation off: old sanitizers know fewer bits of it
        if subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0:
            self.calm = ["setarch", "-R"]

    def left(self):
        return self.end - time.monotonic()

    def environment(self, more):
        env = dict(os.environ, LD_LIBRARY_PATH=str(self.programs / "lib"), TMPDIR="/tmp",
                   PATH=f"{self.programs / 'bin'}:{os.environ['PATH']}",
                   KVT_DAEMON=str(self.programs / "build/kvtierd"))
        env.pop("KVT_TEST_SEED", None)
        env.update(more)
        if os.path.isdir("/dev/shm") and "KVT_FAIL_AT_IO" in more:
            env["TMPDIR"] = "/dev/shm"
        return env

    def run(self, name, command, env=None, sanitized=False, counts=True):
        """One piece: what it said. When the time is over it is told to end; what it says then
        counts, and it is no failure."""
        kind, start = name.split(" ")[0], time.monotonic()
        child = subprocess.Popen(
            (self.calm if sanitized else []) + [str(word) for word in command],
            env=self.environment(env or {}), stdout=subprocess.PIPE, text=True, errors="replace",
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        cut = False
        try:
            text = child.communicate(timeout=max(1, self.left()))[0]
        except subprocess.TimeoutExpired:
            cut = True
            child.terminate()
            try:
                text = child.communicate(timeout=8)[0]
            except subprocess.TimeoutExpired:
                self.kill(child)
                text = child.communicate()[0]
        self.kill(child)  # whoever it left behind
        failed = child.returncode != 0 and not cut
        with self.lock:
            self.took[kind] = self.took.get(kind, 0) + time.monotonic() - start
            of_kind = self.pieces.setdefault(kind, {"ended": 0, "failed": 0})
            of_kind["ended"] += not cut
            of_kind["failed"] += failed
            if cut:
                self.cut.append(name)
            self.log.write(f"== {name}, {time.monotonic() - start:.0f} s\n{text}\n")
            self.log.flush()
            if counts:
                add(self.sums, text, pathlib.Path(command[0]).name, failed)
            if failed:
                self.failures.append(name)
                print(f"FAILED: {name}\n{text[-3000:]}", flush=True)
        return text

    @staticmethod
    def kill(child):
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def fuzz(self, target, seconds):
        work = self.out / "fuzz" / target
        work.mkdir(parents=True, exist_ok=True)
        seconds = int(min(seconds, self.left() - MARGIN_S))
        if seconds < 5:
            return
        text = self.run(f"fuzz {target}",
                        [self.programs / f"build-fuzz/fuzz_{target}",
                         f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096",
                         "-max_len=16384", "-print_final_stats=1",
                         f"-artifact_prefix={self.out}/{target}-", work,
                         self.programs / "corpus" / target],
                        sanitized=True, counts=False)
        runs = re.search(r"stat::number_of_executed_units: *(\d+)", text)
        spent = re.search(r"Done \d+ runs in (\d+) second", text)
        with self.lock:
            self.sums["fuzz"]["tried"] += int(runs[1]) if runs else 0
            self.sums["fuzz"]["failed"] += "SUMMARY:" in text
            self.fuzzed[target] = self.fuzzed.get(target, 0) + (int(spent[1]) if spent else 0)

    def history(self):
        """A piece of what is missing of history; False when nothing is, or there is no time."""
        with self.lock:
            missing = self.o.history - self.sums["history"]["tried"] - self.history_going
            operations = min(missing, HISTORY_PIECE_OPS)
            seconds = min(HISTORY_PIECE_S, self.left() - MARGIN_S - 8)
            if operations <= 0 or seconds < 10:
                return False
            self.history_going += operations
            self.history_number += 1
            seed = self.seed + 9000 + self.history_number
        self.run(f"history {seed}", [self.programs / "build-tsan/test_history"], sanitized=True,
                 env={"KVT_SOAK_SECONDS": str(int(seconds)), "KVT_TEST_SEED": str(seed),
                      "KVT_HISTORY_OPS": str(operations), "TSAN_OPTIONS": "halt_on_error=1"})
        with self.lock:
            self.history_going -= operations
        return True

    def planted(self):
        out = self.out / "planted.json"
        self.run("planted all",
                 [sys.executable, self.programs / "tree/tests/planted/run.py", "--all", "--jobs",
                  self.o.planted, "--json", out],
                 env={"KVT_PLANTED_PREFIX": str(self.programs / "prefix"), "JOBS": "4",
                      "KVT_PLANTED_DIR": str(self.out / "planted")})

    def wanted(self, kind):
        return not self.o.only or kind in self.o.only.split(",")

    def program(self, where, name, folder="build", **env):
        """A piece: its name, whose first word is the kind, and what runs it."""
        return name, lambda: self.run(name, [self.programs / folder / where],
                                      env={key: str(value) for key, value in env.items()},
                                      sanitized=folder != "build")

    def plan(self):
        """Pieces that compute, the longest first, and those that mostly wait."""
        scale, computing, waiting = self.o.scale, [], []
        if self.o.planted and (self.programs / "tree").is_dir():
            waiting.append(("planted all", self.planted))
        redis_s = int(max(30, min(1000, self.left() - 90)))
        waiting.append(self.program("test_redis_cluster", "remote 0", KVT_SOAK_SECONDS=redis_s,
                                    KVT_TEST_FILTER="test_kills_and_moves*",
                                    KVT_TEST_SEED=self.seed + 20261130))
        waiting.append(self.program("test_full_disk", "full_disk 0", KVT_SOAK_SECONDS=60,
                                    KVT_TEST_SEED=self.seed + 5000))
        for i in range(10):
            waiting.append(self.program("test_daemon_kill", f"daemon_kill {i}",
                                        KVT_DAEMON_KILLS=max(400, 1004 // scale),
                                        KVT_TEST_SEED=self.seed + 4000 + i))
        for i in range(25):
            waiting.append(self.program("test_kill_ledger", f"kill9 {i}",
                                        KVT_KILL_CYCLES=200 // scale,
                                        KVT_TEST_SEED=self.seed + 7000 + i))
        for name in ("test_alloc_fail_flows", "test_alloc_fail"):
            computing.append(self.program(name, f"alloc {name}", "build-asan"))
        for io in ("posix", "uring", ""):
            for part in range(20):
                env = {"KVT_FAIL_AT_IO": io} if io else {}
                computing.append(self.program("test_store_fail_at_n",
                                              f"fail_at_n {io or 'mem'} {part}",
                                              KVT_FAIL_AT_PART=f"{part}/20", KVT_FAIL_AT_STEP=1,
                                              **env))
        for i in range(200):
            computing.append(self.program("test_sim", f"simulation {i}",
                                          KVT_SIM_SEED=self.seed + 30000000 + i * 500,
                                          KVT_SIM_SEEDS=500 // scale))
        for i in range(50):
            computing.append(self.program("test_power_loss", f"power_loss {i}",
                                          KVT_SIM_SEED=self.seed + 50000000 + i * 1000,
                                          KVT_SIM_SEEDS=1000 // scale))
        for i in range(20):
            computing.append(self.program("test_bit_flips", f"bit_flips {i}",
                                          KVT_BIT_FLIPS=500000 // scale,
                                          KVT_TEST_SEED=self.seed + 1000 + i))
        for name, seeds in (("test_store_model", 20), ("test_session_model", 20),
                            ("test_store_crash", 6), ("test_l2_crash", 6)):
            for i in range(max(1, seeds // scale)):
                computing.append(self.program(name, f"model {name} {i}",
                                              KVT_TEST_SEED=self.seed + 11000 + i))
        targets = sorted(p.name[len("fuzz_"):] for p in (self.programs / "build-fuzz").iterdir())
        for at in range(0, self.o.fuzz, FUZZ_PIECE_S):
            for target in targets:
                piece_s = min(FUZZ_PIECE_S, self.o.fuzz - at)
                computing.append((f"fuzz {target}",
                                  lambda t=target, s=piece_s: self.fuzz(t, s)))
        self.fuzzed = {target: 0 for target in targets}
        return [[piece for piece in pieces if self.wanted(piece[0].split(" ")[0])]
                for pieces in (computing, waiting)]

    def worker(self, kind):
        """Pieces of one list until it is empty; then history, if they compute."""
        while self.left() > MARGIN_S:
            try:
                _, piece = self.queues[kind].get_nowait()
            except queue.Empty:
                break
            piece()
        if kind == "computing" and self.wanted("history"):
            self.historian()

    def historian(self):
        while self.history():
            pass

    @staticmethod
    def lane(processors, work, *args):
        os.sched_setaffinity(0, processors)  # of this thread, and of what it starts
        work(*args)

    def lanes(self):
        """Threads, each with the processors that its pieces run on."""
        count = self.o.processors
        usable = sorted(os.sched_getaffinity(0))[:count]
        busy = (PLAN_S / self.o.scale + 11 * self.o.fuzz + (PLANTED_S if self.o.planted else 0))
        pairs = max(count // 8, count - int(busy / self.o.seconds + 1)) // 2
        pairs = pairs if self.wanted("history") else 0
        lanes = [(set(usable[2 * i:2 * i + 2]), self.historian)
                 for i in range(pairs) for _ in range(4)]  # they wait for the drive now and then
        lanes += [({cpu}, self.worker, "computing") for cpu in usable[2 * pairs:]]
        lanes += [(set(usable), self.worker, "waiting")] * min(WAITING, max(2, count))
        return [threading.Thread(target=self.lane, args=args) for args in lanes]

    def result(self, done):
        with self.lock:
            missed = sum(pieces.qsize() for pieces in self.queues.values())
            return dict(self.sums, failures=list(self.failures), cut=sorted(self.cut),
                        not_begun=missed, pieces=dict(sorted(self.pieces.items())),
                        fuzz_s=dict(sorted(self.fuzzed.items())),
                        seconds=int(time.monotonic() - self.begin), done=done,
                        processors=self.o.processors, seed=self.seed,
                        commit=(self.programs / "commit").read_text().strip(),
                        cpu_or_wait_s={k: int(v) for k, v in sorted(self.took.items())})

    def write(self, done):
        text = json.dumps(self.result(done))
        whole = self.out / "soak.json.new"
        whole.write_text(text + "\n")
        whole.rename(self.out / "soak.json")
        return text

    def whole(self):
        for name, pieces in zip(("computing", "waiting"), self.plan()):
            self.queues[name] = queue.Queue()
            for piece in pieces:
                self.queues[name].put(piece)
        lanes = self.lanes()
        for lane in lanes:
            lane.start()
        written = time.monotonic()
        self.write(False)
        while any(lane.is_alive() for lane in lanes):
            time.sleep(0.5)
            if time.monotonic() - written > 60:
                written = time.monotonic()
                self.write(False)
        shutil.rmtree(self.out / "fuzz", ignore_errors=True)
        shutil.rmtree(self.out / "planted", ignore_errors=True)
        print(self.write(True), flush=True)
        return 1 if self.failures else 0


def options():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("what", choices=["pack", "run"])
    parser.add_argument("dir")
    parser.add_argument("out", nargs="?")
    parser.add_argument("seconds", nargs="?", type=int)
    parser.add_argument("processors", nargs="?", type=int,
                        default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fuzz", type=int, default=1200)
    parser.add_argument("--history", type=int, default=100000000)
    parser.add_argument("--planted", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--detach", action="store_true")
    return parser.parse_args()


def main():
    chosen = options()
    if chosen.what == "pack":
        pack(pathlib.Path(chosen.dir))
        return 0
    if not chosen.seconds:
        sys.exit(__doc__)
    out = pathlib.Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    if chosen.detach:
        words = [word for word in sys.argv if word != "--detach"]
        with open(out / "run.log", "w") as log:
            child = subprocess.Popen([sys.executable, "-u"] + words, stdin=subprocess.DEVNULL,
                                     stdout=log, stderr=log, start_new_session=True)
        print(f"pid {child.pid}")
        return 0
    return Soak(chosen).whole()


if __name__ == "__main__":
    sys.exit(main())
