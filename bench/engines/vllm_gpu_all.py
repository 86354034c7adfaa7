#!/usr/bin/env python3
"""vLLM on one GPU, every tier in one run: computed, vLLM's own DRAM and fs tiers, kvtier.

    vllm_gpu_all.py OUT.json --model DIR --dummy [--dir DIR] [--sizes ...] [--limit SECONDS]

Runs vllm_gpu.py, one process a kind, several at a time on one GPU: engines start together, then take
turns by a lock, measurement by measurement, so that what is compared alternates. First computed, DRAM
of vLLM and of kvtier; then, when those have ended, vLLM's fs tier and kvtier from disk in a process
after a restart. OUT.json has every line, the machine, and the goals of docs/engines/vllm.md with what
was seen. Lines that were measured stay in it when a kind fails or the time is over (exit 1).
"""
import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
WAVES = (("none", "native-dram", "kvtier"), ("native-fs", "kvtier-disk"))
COMPUTED = {"none": "8192:3,32768:3,65536:2,131072:1", "kvtier": "8192:3,32768:3,65536:2,131072:1",
            "native-dram": "8192:1,32768:1,65536:1,131072:1",
            "native-fs": "8192:1,32768:1,65536:1,131072:1",
            "kvtier-disk": "8192:3,32768:2,65536:2,131072:1"}
TOKEN_BYTES = 131072  # Llama-3-8B: 32 layers, 8 KV heads of 128, K and V, bf16


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dir", default="/tmp/kvtier-bench")
    parser.add_argument("--sizes", default="8192,32768,65536,131072")
    parser.add_argument("--limit", type=float, default=390, help="seconds for all of it")
    parser.add_argument("--kv-gib", type=float, default=19)
    parser.add_argument("--stalls", type=int, default=65536)
    parser.add_argument("--dram", type=float, default=40, help="GiB for vLLM's own DRAM tier")
    parser.add_argument("--commit", default="", help="of the tree, to be noted")
    parser.add_argument("--dummy", action="store_true")
    return parser.parse_args()


def command(options, kind, lines):
    base = pathlib.Path(options.dir)
    where = base / ("fs" if kind == "native-fs" else "kvtier")
    dram = {"native-dram": options.dram, "native-fs": options.dram / 2}.get(kind, options.dram / 2)
    more = ["--stalls", str(options.stalls)] if kind in ("native-dram", "kvtier") else []
    repeat = {"native-fs": "1", "none": "0"}.get(kind, "4")
    return [sys.executable, str(HERE / "vllm_gpu.py"), kind, str(lines), "--model", options.model,
            "--sizes", options.sizes, "--dir", str(where), "--dram", str(dram), "--repeat", repeat,
            "--memory", "0.25", "--kv-gib", str(options.kv_gib), "--lock", str(base / "lock"),
            "--computed", COMPUTED[kind], *more, *(["--dummy"] if options.dummy else []),
            *(["--profile"] if kind == "kvtier" else [])]


def run_wave(options, kinds, lines, deadline):
    """Start the kinds together and wait; {kind: exit status}."""
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP":
                   "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
                   "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **os.environ}
    running = {}
    for kind in kinds:
        log = open(f"{options.out}.{kind}.log", "w")
        running[kind] = subprocess.Popen(command(options, kind, lines), env=environment, stdout=log,
                                         stderr=subprocess.STDOUT)
    out = {}
    for kind, process in running.items():
        try:
            out[kind] = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out[kind] = "killed: the time was over"
    return out


def read(lines):
    found = []
    if lines.exists():
        found = [json.loads(line) for line in lines.read_text().splitlines() if line.strip()]
    return found


def machine():
    def ask(*what):
        try:
            return subprocess.run(what, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""
    return {"gpu": ask("nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                       "--format=csv,noheader"),
            "cpus": os.cpu_count(), "kernel": platform.release(),
            "python": platform.python_version()}


def median(lines, kind, event, tokens, key="ttft", cached=None):
    """Of the lines that were what they should be; None: there are none."""
    seen = [line[key] for line in lines if line["kind"] == kind and line["event"] == event and
            line.get("tokens") == tokens and (cached is None or line["cached"] == cached)]
    return statistics.median(seen) if seen else None


def ratio(one, other):
    return round(one / other, 4) if one is not None and other else None


def goals(lines, sizes):
    """What the documentation promises, and what was seen: [(name, seen, at most)]."""
    out = []
    for n in sizes:
        cold = median(lines, "none", "computed", n, cached=0)
        ours = median(lines, "kvtier", "hit_dram", n, cached=n)
        theirs = median(lines, "native-dram", "hit_dram", n, cached=n)
        disk = median(lines, "kvtier-disk", "hit_disk", n, cached=n)
        files = median(lines, "native-fs", "hit_disk", n, cached=n)
        stored = median(lines, "kvtier", "computed", n, cached=0)
        limit = {32768: 0.6, 131072: 0.45}.get(n)
        out.append((f"DRAM, of vLLM's DRAM tier, {n}", ratio(ours, theirs), limit))
        out.append((f"disk, of computing, {n}", ratio(disk, cold), 1.05 if n < 32768 else 1.0))
        out.append((f"disk, of vLLM's fs tier, {n}", ratio(disk, files), 0.3333))
        out.append((f"computing and storing, of computing, {n}", ratio(stored, cold), 1.03))
        out.append((f"submit of a load, ms, {n}",
                    median(lines, "kvtier", "hit_dram", n, "submit_ms", n), 5.0))
        out.append((f"submit of a load, vLLM's DRAM tier, ms, {n}",
                    median(lines, "native-dram", "hit_dram", n, "submit_ms", n), None))
    for line in lines:
        if line["event"] == "stalls" and line["what"] == "load":
            out.append((f"worst step while a load arrives, of an idle one, {line['kind']}",
                        ratio(line["worst_ms"], line["idle_ms"]),
                        4.0 if line["kind"] == "kvtier" else None))
    for line in lines:
        if line["event"] == "flush" and line["kind"] == "kvtier":
            stats = line["stats"]
            logical = stats.get("client.store_logical_bytes")
            out.append(("DRAM bytes, of the engine's bytes", ratio(
                stats.get("client.store_bytes"), logical), 0.30))
            break
    ours = [line["stats"] for line in lines if line["event"] == "flush" and line["kind"] == "kvtier"]
    files = [line for line in lines if line["event"] == "bytes" and line["kind"] == "native-fs"]
    if ours and files:
        per_token = ours[0]["disk.written_bytes"] / (ours[0]["client.store_logical_bytes"] /
                                                     TOKEN_BYTES)
        out.append(("bytes on disk a token, of vLLM's fs tier",
                    ratio(per_token, files[0]["disk"] / files[0]["tokens"]), 0.30))
    return [{"what": what, "seen": seen, "at_most": limit,
             "held": None if seen is None or limit is None else seen <= limit}
            for what, seen, limit in out]


def main():
    options = arguments()
    began = time.monotonic()
    shutil.rmtree(options.dir, ignore_errors=True)
    os.makedirs(options.dir)
    lines = pathlib.Path(options.out + ".lines")
    sizes = [int(s) for s in options.sizes.split(",")]
    ended = {}
    for kinds in WAVES:
        ended |= run_wave(options, kinds, lines, began + options.limit)
        print(f"{time.monotonic() - began:.0f} s: {ended}", flush=True)
    found = read(lines)
    result = {"machine": machine(), "command": " ".join(sys.argv), "commit": options.commit,
              "seconds": round(time.monotonic() - began, 1), "ended": ended,
              "goals": goals(found, sizes), "lines": found}
    pathlib.Path(options.out).write_text(json.dumps(result, indent=1))
    for goal in result["goals"]:
        print(f"{goal['what']:<60} {goal['seen']!s:>10} {goal['at_most']!s:>8} {goal['held']}")
    return int(any(status != 0 for status in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
