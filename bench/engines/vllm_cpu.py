#!/usr/bin/env python3
"""What the vLLM connector costs and what it brings, on the CPU.

    vllm_cpu.py overhead --model FOLDER [--pairs 8]   an empty cache against no connector, in pairs
    vllm_cpu.py restart --model FOLDER [--tokens 2000]  TTFT of a prompt that comes back after a restart
    vllm_cpu.py lookup [--keys 8192]                  the scheduler's question, first and again
    vllm_cpu.py all --model FOLDER [--out FILE]

The last line is JSON. Engines run in processes of their own, one at a time in turns, so that the two
of a pair see the same machine. overhead: prompts that never come back, so that every look-up misses
and every block is stored; medians of the ratios of pairs, for TTFT (one request) and for throughput
(8 at a time). restart: each measurement in a fresh process, median of three. lookup: the real Scheduler
of the connector over a store in DRAM, without an engine. Measure on a machine that does nothing else.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types

clock = time.perf_counter


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "restart", "lookup", "all", "child"])
    parser.add_argument("--model", help="folder in Hugging Face form (scripts/smollm2-hf.sh)")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--level", default="kv4")
    parser.add_argument("--out", help="file for the JSON")
    return parser.parse_args()


def prompt(count, seed):
    draw = random.Random(seed)
    return [draw.randrange(100, 30000) for _ in range(count)]


# ---- an engine in a process of its own: a request a line on stdin, an answer a line on stdout ----

def child():
    job = json.loads(sys.stdin.readline())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
    from vllm import LLM, SamplingParams
    options = {"model": job["model"], "skip_tokenizer_init": True, "enforce_eager": True,
               "dtype": "bfloat16", "max_model_len": job["room"], "block_size": 128, "seed": 0,
               "kv_cache_memory_bytes": 768 << 20}
    if job["kvtier"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": job["kvtier"]}
    llm = LLM(**options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        sampling = SamplingParams(max_tokens=ask["answer"], temperature=0, ignore_eos=True,
                                  detokenize=False)
        began = clock()
        outputs = llm.generate([{"prompt_token_ids": p} for p in ask["prompts"]], sampling,
                               use_tqdm=False)
        print(json.dumps({"seconds": clock() - began,
                          "cached": [o.num_cached_tokens for o in outputs]}),
              file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


class Engine:
    def __init__(self, model, kvtier, room):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                       "TORCHDYNAMO_DISABLE": "1"}
        self.process = subprocess.Popen([sys.executable, __file__, "child"], text=True, bufsize=1,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env=environment)
        self.say({"model": model, "kvtier": kvtier, "room": room})
        self.hear()

    def say(self, what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended: {self.process.wait()}")
        return json.loads(line)

    def ask(self, prompts, answer=1):
        self.say({"prompts": prompts, "answer": answer})
        return self.hear()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def overhead(options):
    """Ratios with kvtier to without, in pairs whose order alternates."""
    room = options.tokens + 512
    with tempfile.TemporaryDirectory() as folder:
        plain = Engine(options.model, None, room)
        ours = Engine(options.model, {"dram": "512MiB", "disk": f"{folder}/kv:4GiB", "env": "no",
                                      "level": options.level}, room)
        out = {"ttft": [], "throughput": []}
        for engine in (plain, ours):
            engine.ask([prompt(options.tokens, 1)])
        for pair in range(options.pairs):
            for what, prompts, answer in (
                    ("ttft", [prompt(options.tokens, 100 + pair)], 1),
                    ("throughput", [prompt(256, 1000 + 8 * pair + i) for i in range(8)], 32)):
                took = {}
                for engine in (plain, ours) if pair % 2 else (ours, plain):
                    took[engine] = engine.ask(prompts, answer)["seconds"]
                out[what].append((took[plain], took[ours]))
                print(f"{what}: {took[plain]:.3f} s without, {took[ours]:.3f} with", flush=True)
        plain.close()
        ours.close()
    return {what: {"pairs": pairs, "ratio": statistics.median(b / a for a, b in pairs), "at_most":
                   1.02} for what, pairs in out.items()}


def restart(options):
    """TTFT cold, and in a process after a restart, from disk."""
    room, asked = options.tokens + 512, prompt(options.tokens, 7)
    cold, hits = [], []
    for turn in range(3):
        with tempfile.TemporaryDirectory() as folder:
            store = {"dram": "512MiB", "disk": f"{folder}/kv:4GiB", "env": "no",
                     "level": options.level}
            for where, seen in ((cold, 0), (hits, options.tokens // 128 * 128)):
                engine = Engine(options.model, store, room)
                engine.ask([prompt(options.tokens // 4, 8 + turn)])  # the first request warms up
                answer = engine.ask([asked])
                engine.close()
                if seen and answer["cached"][0] < seen - 128:
                    raise RuntimeError(f"{answer['cached'][0]} tokens were cached, not {seen}")
                where.append(answer["seconds"])
        print(f"cold {cold[-1]:.3f} s, after a restart {hits[-1]:.3f} s", flush=True)
    return {"tokens": options.tokens, "cold": cold, "restart": hits, "at_most": 0.15,
            "ratio": statistics.median(hits) / statistics.median(cold)}


def lookup(options):
    """Seconds of Scheduler.matched() for a prompt whose blocks are all in DRAM."""
    import kvtier
    from kvtier import Identity, Keys, Kind
    from kvtier.vllm.pages import Model
    from kvtier.vllm.scheduler import Scheduler
    from kvtier.vllm.stats import Counts
    tokens, pages, dim = 16, 64, 16
    memory = bytearray(2 * pages * tokens * dim * 4)
    size = len(memory) // 2
    views = [kvtier.pages(memoryview(memory)[i * size:(i + 1) * size].cast(
        "f", (pages, tokens, 1, dim)), "bthe") for i in range(2)]
    with kvtier.Cache(dram="256MiB", level="raw", env="no", plan="off") as cache:
        pool = cache.pool_of(list(zip((Kind.K, Kind.V), views)))
        namespace = cache.namespace(Identity("bench", model="m"), pool.layout)
        hashes = [random.Random(i).randbytes(32) for i in range(options.keys)]
        for start in range(0, options.keys, pages):
            keys = Keys.from_hashes(hashes[start:start + pages])
            parent = Keys.from_hashes(hashes[start - 1:start]) if start else None
            request = namespace.store(pool, keys, range(len(keys)), parent=parent,
                                      first_pos=start * tokens)
            request.wait()
            request.close()
        model = Model((), (kvtier.Group(0, block_tokens=tokens),), pool.layout, False)
        store = types.SimpleNamespace(namespace=namespace, stages=(namespace,))
        scheduler = Scheduler(model, tokens, 1, store, Counts(), False)
        first, again = [], []
        for turn in range(21):
            request = types.SimpleNamespace(request_id=str(turn), block_hashes=list(hashes),
                                            num_tokens=options.keys * tokens + 8, lora_request=None)
            for where in (first, again):
                began = clock()
                found = scheduler.matched(request, 0)
                where.append(clock() - began)
                if found != options.keys * tokens:
                    raise RuntimeError(f"{found} tokens were found")
    return {"keys": options.keys, "first_ms": 1e3 * statistics.median(first[1:]), "first_at_most": 3,
            "again_us": 1e6 * statistics.median(again[1:]), "again_at_most": 100}


def main():
    options = arguments()
    if options.what == "child":
        return child()
    parts = {"overhead": overhead, "restart": restart, "lookup": lookup}
    wanted = parts if options.what == "all" else {options.what: parts[options.what]}
    out = {"cpus": os.cpu_count(), "level": options.level,
           **{name: part(options) for name, part in wanted.items()}}
    if options.out:
        with open(options.out, "w") as file:
            json.dump(out, file, indent=1)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
