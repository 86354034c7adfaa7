#!/usr/bin/env python3
"""The soak on a machine with many processors and nothing installed: programs built elsewhere.

soak-wide.py pack DIR         from the builds of this tree (release, asan, tsan, fuzz; see NEEDED)
                              into DIR: programs, stripped, with the libraries that they need
soak-wide.py run DIR OUT SECONDS [PROCESSORS]
                              everything of PLAN once, cut into pieces that run side by side; what is
                              left of the time goes to fuzzers and history. The last line, and
                              OUT/soak.json: one line of JSON, as `make soak` has it, with the
                              pieces that were not reached. OUT/soak.log: all output. Exit 1 when
                              anything failed."""
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tally import PRACTICES, add  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
NEEDED = {
    "build/tests": ["test_sim", "test_power_loss", "test_bit_flips", "test_kill_ledger",
                    "test_store_fail_at_n"],
    "build-asan/tests": ["test_alloc_fail", "test_alloc_fail_flows"],
    "build-tsan/tests": ["test_history"],
    "build-fuzz/fuzz": [f.stem for f in sorted((ROOT / "tests/fuzz").glob("fuzz_*.c"))],
}
SYSTEM = r"^(ld-|libc\.|libm\.|libdl\.|libpthread\.|librt\.|libgcc_s\.|linux-vdso)"
WAITING = 12  # pieces at a time that mostly wait (kill -9), beside those that compute


def pack(target):
    (target / "lib").mkdir(parents=True, exist_ok=True)
    for folder, names in NEEDED.items():
        place = target / folder.split("/")[0]
        place.mkdir(exist_ok=True)
        for name in names:
            subprocess.run(["strip", "--strip-debug", "-o", place / name, ROOT / folder / name],
                           check=True)
            said = subprocess.run(["ldd", place / name], capture_output=True, text=True).stdout
            for library, path in re.findall(r"^\s*(\S+) => (\S+)", said, re.M):
                if not re.match(SYSTEM, library):
                    shutil.copy(path, target / "lib" / library)
    shutil.copytree(ROOT / "tests/fuzz/corpus", target / "corpus", dirs_exist_ok=True)


class Soak:
    def __init__(self, programs, out, seconds, processors):
        self.programs, self.out, self.processors = programs, out, processors
        self.end = time.monotonic() + seconds
        self.begin = time.monotonic()
        self.sums = {practice: {"tried": 0, "failed": 0} for practice in PRACTICES}
        self.failures, self.cut, self.took = [], [], {}
        self.lock = threading.Lock()
        self.log = open(out / "soak.log", "w", errors="replace")
        self.calm = []  # address randomisation off: old sanitizers know fewer bits of it
        if subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0:
            self.calm = ["setarch", "-R"]

    def left(self):
        return self.end - time.monotonic()

    def run(self, name, program, args=(), env=None, sanitized=False):
        """One piece: what it said. Killed when the time is over, and then not counted."""
        whole = dict(os.environ, LD_LIBRARY_PATH=str(self.programs / "lib"), TMPDIR="/tmp")
        whole.update(env or {})
        if os.path.isdir("/dev/shm") and "KVT_FAIL_AT_IO" in whole:
            whole["TMPDIR"] = "/dev/shm"
        start = time.monotonic()
        command = (self.calm if sanitized else []) + [str(self.programs / program)] + list(args)
        try:
            done = subprocess.run(command, env=whole, stdout=subprocess.PIPE, text=True,
                                  stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  errors="replace", timeout=max(1, self.left()))
            text, failed = done.stdout, done.returncode != 0
        except subprocess.TimeoutExpired:
            text, failed = None, False
        with self.lock:
            kind = name.split(" ")[0]
            self.took[kind] = self.took.get(kind, 0) + time.monotonic() - start
            if text is None:
                self.cut.append(name)
                return ""
            self.log.write(f"== {name}\n{text}\n")
            add(self.sums, text, program, failed)
            if failed:
                self.failures.append(name)
                print(f"FAILED: {name}\n{text[-3000:]}", flush=True)
            return text

    def fuzz(self, target, seconds):
        work = self.out / "fuzz" / target
        work.mkdir(parents=True, exist_ok=True)
        with_seeds = [str(work), str(self.programs / "corpus" / target)]
        program = f"build-fuzz/fuzz_{target}"
        text = self.run(f"fuzz {target}", program,
                 [f"-max_total_time={int(seconds)}", "-timeout=20", "-rss_limit_mb=4096",
                  "-max_len=16384", "-print_final_stats=1",
                  f"-artifact_prefix={self.out}/{target}-"] + with_seeds, sanitized=True)
        runs = re.search(r"stat::number_of_executed_units: *(\d+)", text)
        with self.lock:
            self.sums["fuzz"]["tried"] += int(runs[1]) if runs else 0
            self.sums["fuzz"]["failed"] += "SUMMARY:" in text

    def history(self, seconds, seed):
        self.run(f"history {seed}", "build-tsan/test_history", sanitized=True,
                 env={"KVT_SOAK_SECONDS": str(int(seconds)), "KVT_TEST_SEED": str(seed),
                      "TSAN_OPTIONS": "halt_on_error=1"})

    def plan(self, scale):
        """Pieces that compute, the longest first, and those that mostly wait."""
        computing, waiting = [], []
        for name in ("test_alloc_fail_flows", "test_alloc_fail"):
            computing.append(lambda n=name: self.run(f"alloc {n}", f"build-asan/{n}",
                                                     sanitized=True))
        for io in ("posix", "uring", ""):
            for part in range(20):
                env = {"KVT_FAIL_AT_PART": f"{part}/20", "KVT_FAIL_AT_STEP": "1"}
                if io:
                    env["KVT_FAIL_AT_IO"] = io
                computing.append(lambda e=env, i=io, p=part: self.run(
                    f"fail_at_n {i or 'mem'} {p}", "build/test_store_fail_at_n", env=e))
        for i in range(20):
            env = {"KVT_BIT_FLIPS": str(500000 // scale), "KVT_TEST_SEED": str(1000 + i)}
            computing.append(lambda e=env, i=i: self.run(f"bit_flips {i}", "build/test_bit_flips",
                                                         env=e))
        for i in range(50):
            env = {"KVT_SIM_SEED": str(50000000 + i * 1000), "KVT_SIM_SEEDS": str(1000 // scale)}
            computing.append(lambda e=env, i=i: self.run(f"power_loss {i}",
                                                         "build/test_power_loss", env=e))
        for i in range(200):
            env = {"KVT_SIM_SEED": str(30000000 + i * 500), "KVT_SIM_SEEDS": str(500 // scale)}
            computing.append(lambda e=env, i=i: self.run(f"simulation {i}", "build/test_sim",
                                                         env=e))
        for i in range(25):
            env = {"KVT_KILL_CYCLES": str(200 // scale), "KVT_TEST_SEED": str(7000 + i)}
            waiting.append(lambda e=env, i=i: self.run(f"kill9 {i}", "build/test_kill_ledger",
                                                       env=e))
        return computing, waiting

    def worker(self, pieces):
        while self.left() > 5:
            try:
                piece = pieces.get_nowait()
            except queue.Empty:
                return
            piece()

    def rest(self, number, fuzzers):
        """Fuzzers, and history on every fourth processor, until the end."""
        seed = 1
        while self.left() > 15:
            if number % 4 == 0 and self.left() > 45:  # its parts need seconds each
                self.history(min(60, self.left() - 12), 9000 + number * 100 + seed)
            else:
                with self.lock:
                    target = fuzzers[0]
                    fuzzers.append(fuzzers.pop(0))
                self.fuzz(target, min(40, self.left() - 8))
            seed += 1

    def whole(self, scale):
        computing, waiting = self.plan(scale)
        lists = [(queue.Queue(), computing), (queue.Queue(), waiting)]
        for pieces, all_of_them in lists:
            for piece in all_of_them:
                pieces.put(piece)
        fuzzers = sorted(p.name[len("fuzz_"):] for p in (self.programs / "build-fuzz").iterdir())

        def lane(number):
            if number >= self.processors:
                self.worker(lists[1][0])
                return
            if number > 2 or self.processors < 8:  # those three begin with the rest
                self.worker(lists[0][0])
            self.rest(number, fuzzers)

        lanes = [threading.Thread(target=lane, args=(i,))
                 for i in range(self.processors + min(WAITING, self.processors))]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
        missed = lists[0][0].qsize() + lists[1][0].qsize()
        result = dict(self.sums, failures=self.failures, cut=sorted(self.cut), not_begun=missed,
                      seconds=int(time.monotonic() - self.begin), processors=self.processors,
                      cpu_or_wait_s={k: int(v) for k, v in sorted(self.took.items())})
        (self.out / "soak.json").write_text(json.dumps(result) + "\n")
        shutil.rmtree(self.out / "fuzz", ignore_errors=True)
        print(json.dumps(result))
        return 1 if self.failures else 0


def main():
    args = sys.argv[1:]
    if len(args) == 2 and args[0] == "pack":
        pack(pathlib.Path(args[1]))
        return 0
    if len(args) not in (4, 5) or args[0] != "run":
        sys.exit(__doc__)
    out = pathlib.Path(args[2])
    out.mkdir(parents=True, exist_ok=True)
    processors = int(args[4]) if len(args) == 5 else os.cpu_count()
    soak = Soak(pathlib.Path(args[1]).resolve(), out, int(args[3]), processors)
    return soak.whole(int(os.environ.get("KVT_SOAK_SCALE", "1")))


if __name__ == "__main__":
    sys.exit(main())
