#!/usr/bin/env python3
"""Time to the first token of a prompt that comes back, by llama_server and by transformers.

    ttft.py llama --model model.gguf [--tokens 2000] [--threads 2]
    ttft.py transformers --model FOLDER [--tokens 2000] [--threads 2]

Cold, from DRAM after other work, and after a restart of the process; the last line is JSON with the
ratios to cold. llama: over HTTP, until the first event of the stream, so tokenising and the wire
count. transformers: generate() of one token. Needs the installed package kvtier and the engine. The
text is the documentation beside this file; the store is a directory of its own, removed afterwards.
"""
import argparse
import http.client
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def text(characters):
    """Enough words for the tokens wanted; three characters a token is on the safe side."""
    parts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    return " ".join(" ".join(parts).split())[:characters]


class LlamaServer:
    def __init__(self, arguments, folder):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.llama_server", "--model", arguments.model, "--port", "0",
             "--n-ctx", str(arguments.tokens + 256), "--threads", str(arguments.threads), "--disk",
             f"{folder}/kv:2GiB", "--level", arguments.level, "--config", "env=no"],
            stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1].split("/")[0])

    def ask(self, prompt):
        """(seconds to the first event, usage)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = dict(prompt=prompt, max_tokens=2, temperature=0, stream=True,
                    stream_options={"include_usage": True})
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        first = answer.readline()
        seconds = time.perf_counter() - start
        assert answer.status == 200, first + answer.read()
        events = [line[6:] for line in (first + answer.read()).decode().splitlines()
                  if line.startswith("data: {")]
        connection.close()
        return seconds, json.loads(events[-1])["usage"]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def bench_llama(arguments, folder):
    prompt, out = text(arguments.tokens * 6), {}
    server = LlamaServer(arguments, folder)
    measured = server.ask(prompt[:len(prompt) // 8])[1]["prompt_tokens"]
    cut = len(prompt) * arguments.tokens // measured
    prompt = "Read this. " + prompt[:cut // 8]
    out["cold"], used = server.ask(prompt)
    out["tokens"] = used["prompt_tokens"]
    server.ask("Something else. " + prompt[:200])
    out["dram"], used = server.ask(prompt)
    out["dram_cached"] = used["prompt_tokens_details"]["cached_tokens"]
    server.stop()
    server = LlamaServer(arguments, folder)
    out["restart"], used = server.ask(prompt)
    out["restart_cached"] = used["prompt_tokens_details"]["cached_tokens"]
    server.stop()
    return out


PROGRAM = """
import json, sys, time, torch, transformers as hf
from kvtier.transformers import cached
torch.set_num_threads({threads})
model = hf.AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.bfloat16).eval()
ids = hf.AutoTokenizer.from_pretrained({model!r})({text!r}, return_tensors="pt").input_ids
ids = ids[:, :{tokens}]
times, cached_tokens = [], []
with cached(model, disk={disk!r}, level={level!r}, env=False) as prefixes:
    for turn in range(2):
        before = prefixes.counters["tokens.restored"]
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        times.append(time.perf_counter() - start)
        cached_tokens.append(prefixes.counters["tokens.restored"] - before)
        prefixes.sync()
print(json.dumps([ids.shape[1], times, cached_tokens]))
"""


def bench_transformers(arguments, folder):
    program = PROGRAM.format(threads=arguments.threads, model=arguments.model,
                             level=arguments.level, text=text(arguments.tokens * 8), tokens=arguments.tokens,
                             disk=f"{folder}/kv:2GiB")
    runs = [json.loads(subprocess.run([sys.executable, "-c", program], check=True, text=True,
                                      stdout=subprocess.PIPE).stdout.splitlines()[-1])
            for _ in range(2)]
    return {"tokens": runs[0][0], "cold": runs[0][1][0], "dram": runs[0][1][1],
            "dram_cached": runs[0][2][1], "restart": runs[1][1][0],
            "restart_cached": runs[1][2][0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=("llama", "transformers"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", default="kv4")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = bench_llama if arguments.engine == "llama" else bench_transformers
        out = dict(engine=arguments.engine, level=arguments.level, threads=arguments.threads,
                   **bench(arguments, folder))
    for name in ("dram", "restart"):
        out[f"{name}_of_cold"] = round(out[name] / out["cold"], 4)
    print(f"{out['tokens']} tokens: cold {out['cold']:.2f} s, DRAM {out['dram']:.3f} s, after a "
          f"restart {out['restart']:.3f} s")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
