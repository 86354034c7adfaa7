#!/usr/bin/env python3
"""vLLM on a GPU: time to first token of a prompt that comes back, with kvtier and with vLLM's own tiers.

    vllm_gpu.py KIND OUT.jsonl [--model DIR] [--sizes 8192,32768,...] [--dir DIR] [--dram GIB] ...
    KIND: none           computed, and hits of the engine's own prefix cache
          native-dram    OffloadingConnector
          native-fs      OffloadingConnector with its "fs" tier
          kvtier         loads from DRAM; leaves its store in DIR
          kvtier-disk    in a process after that one: loads from the disk, then from DRAM
          exact          a tiny model whose output depends on its cache: hits of kvtier against hits of
                         the engine's prefix cache, token by token (run it twice on one DIR)

One process a kind; one JSON line a measurement. Weights may be dummies: times do not depend on them.
The prompts of a size are the same in every kind. Every hit is checked by the number of cached tokens.
--lock FILE: several kinds at a time on one GPU take turns, so that their measurements alternate and
nothing else runs during one (vllm_gpu_all.py). Waits and loads of the other kinds are not in a time.
"""
import argparse
import contextlib
import fcntl
import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("PYTHONHASHSEED", "0")
TAIL = 8  # tokens of a prompt behind its whole blocks
clock = time.perf_counter


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["none", "native-dram", "native-fs", "kvtier",
                                         "kvtier-disk", "exact"])
    parser.add_argument("out")
    parser.add_argument("--model", required=True)
    parser.add_argument("--sizes", default="8192,32768,65536,131072")
    parser.add_argument("--dir", default="/tmp/kvtier-bench")
    parser.add_argument("--dram", type=float, default=32, help="GiB of host memory for the tier")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory")
    parser.add_argument("--stalls", type=int, default=0, help="tokens of a prompt that arrives "
                        "while 8 requests decode; 0: not measured")
    parser.add_argument("--computed", default="", help="SIZE:COUNT,...: prompts of a size that are "
                        "computed, the last of which is asked for again; default 2 each")
    parser.add_argument("--kv-gib", type=float, default=0, help="GiB of KV cache in the GPU, "
                        "instead of what --memory leaves")
    parser.add_argument("--lock", help="file that kinds which run at a time take turns by")
    parser.add_argument("--extra", default="{}", help="more kv_connector_extra_config, JSON")
    parser.add_argument("--profile", action="store_true", help="one more hit of the largest size "
                        "under cProfile, printed to stderr")
    parser.add_argument("--dummy", action="store_true", help="no weights: config.json is enough")
    return parser.parse_args()


def transfer(options):
    """kv_transfer_config of a kind, or None."""
    more = json.loads(options.extra)
    size = int(options.dram * (1 << 30))
    if options.kind == "native-dram":
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": size, **more}}
    if options.kind == "native-fs":
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": size,
                    "secondary_tiers": [{"type": "fs", "root_dir": options.dir}], **more}}
    if options.kind == "none":
        return None
    return {"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"dram": f"{size >> 20}MiB",
                                          "disk": f"{options.dir}:48GiB", "env": "no",
                                          "plan": "off", **more}}


class Bench:
    """An engine and what is measured of it."""

    def __init__(self, options):
        self.options = options
        self.sizes = [int(s) for s in options.sizes.split(",")]
        self.counts = dict.fromkeys(self.sizes, 2)
        self.counts.update((int(s), int(n)) for s, _, n in
                           (pair.partition(":") for pair in options.computed.split(",") if pair))
        self.stored_tokens = 0
        self.submits = []  # seconds that start_load_kv() held the engine's thread
        began = clock()
        from vllm import LLM, SamplingParams
        self.one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        self.params = SamplingParams
        engine = {"model": options.model, "skip_tokenizer_init": True, "enforce_eager": True,
                  "enable_prefix_caching": True, "gpu_memory_utilization": options.memory,
                  "max_model_len": max(self.sizes) + 4096, "max_num_seqs": 16,
                  "max_num_batched_tokens": 16384, "seed": 0}
        engine.update({"load_format": "dummy", "dtype": "bfloat16"} if options.dummy else {})
        if options.kv_gib:
            engine["kv_cache_memory_bytes"] = int(options.kv_gib * (1 << 30))
        if (config := transfer(options)) is not None:
            engine["kv_transfer_config"] = config
        self.llm = LLM(**engine)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.emit(event="start", seconds=clock() - began, config=config,
                  blocks=self.engine.vllm_config.cache_config.num_gpu_blocks)
        if config is not None:
            self.watch_submits()

    def watch_submits(self):
        """Note how long each start of loads holds the thread that runs the engine."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        connector = get_kv_transfer_group()
        start_load_kv = connector.start_load_kv

        def watched(*args, **more):
            began = clock()
            start_load_kv(*args, **more)
            self.submits.append(clock() - began)

        connector.start_load_kv = watched

    @contextlib.contextmanager
    def turn(self):
        """Alone on the GPU among the kinds that share a lock file."""
        if not self.options.lock:
            yield
            return
        with open(self.options.lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def emit(self, **what):
        line = json.dumps({"kind": self.options.kind, **what})
        print(line, flush=True)
        with open(self.options.out, "a") as file:
            file.write(line + "\n")

    @staticmethod
    def tokens(count, seed):
        draw = random.Random(seed)
        return [draw.randrange(3, 31000) for _ in range(count)]

    def prompt(self, size, which=0):
        return self.tokens(size + TAIL, size + 1000003 * which)

    def stores(self):
        if not self.options.kind.startswith(("kvtier", "exact")):
            return []
        from kvtier.vllm import store
        return list(store._stores.values())

    def drain(self, limit=90.0):
        """Step the engine until nothing is stored or loaded any more."""
        began, steps = clock(), 0
        while clock() - began < limit:
            connector = self.scheduler.connector
            jobs = getattr(getattr(connector, "connector_scheduler", None), "_jobs", None)
            busy = bool(jobs) or self.scheduler.has_requests()
            if hasattr(connector, "connector_scheduler") and not busy:
                manager = getattr(connector.connector_scheduler, "manager", None)
                busy = bool(manager is not None and manager.has_pending_work())
            if steps >= 3 and not busy:
                break
            self.engine.step()
            steps += 1
            time.sleep(0.0005)
        return clock() - began

    def forget(self, tiers=False):
        """Empty the engine's prefix cache; tiers: and the DRAM tier of vLLM's own."""
        for _ in range(50):
            more = {"reset_connector": True} if tiers else {}
            if self.llm.reset_prefix_cache(**more) is not False:
                return
            self.engine.step()
            time.sleep(0.02)
        raise RuntimeError("the prefix cache could not be emptied")

    def first_token(self, prompt):
        began = clock()
        output = self.llm.generate([{"prompt_token_ids": prompt}], self.one, use_tqdm=False)[0]
        return clock() - began, output.num_cached_tokens

    def measure(self, event, size, which=0, forget=None, **more):
        """One prompt; forget: what of it is forgotten before: None, "gpu", or "tiers" too."""
        prompt = self.prompt(size, which)
        with self.turn():
            if forget:
                self.forget(tiers=forget == "tiers")
            self.submits.clear()
            seconds, cached = self.first_token(prompt)
            drained = self.drain()
        if event == "computed":
            self.stored_tokens += size - cached
        self.emit(event=event, tokens=size, which=which, ttft=seconds, cached=cached, drain=drained,
                  submit_ms=1e3 * max(self.submits, default=0), **more)
        return seconds

    def warm_up(self):
        for size in (64, min(20000, max(self.sizes))):
            prompt = self.prompt(size, 77)
            for _ in range(2):
                with self.turn():
                    self.first_token(prompt)
                    self.drain()
                    self.forget()
            self.stored_tokens += size

    def pinned(self, limit=40.0):
        """Wait until kvtier's DRAM is pinned, which it does in the background."""
        began = clock()
        for store in self.stores():
            while clock() - began < limit:
                stats = store.cache.stats()
                if stats.get("dram.pinned_bytes", 0) >= 0.99 * stats.get("client.arena_bytes", 1):
                    break
                time.sleep(0.2)
            self.emit(event="pinned", seconds=clock() - began, gpu=stats.get("gpu.state"),
                      bytes=stats.get("dram.pinned_bytes"))

    def bytes_on_disk(self):
        """Of the directory of a tier, and the tokens whose KV is in it: of a tier of files."""
        total = 0
        for where, _, names in os.walk(self.options.dir):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(where, name)).st_size
        self.emit(event="bytes", disk=total, tokens=self.stored_tokens)

    def flush(self):
        for store in self.stores():
            began = clock()
            store.cache.flush()
            stats = {k: v for k, v in store.cache.stats().items()
                     if v and k.startswith(("gpu.", "disk.", "dram.", "store.", "client."))}
            self.emit(event="flush", seconds=clock() - began, stats=stats)

    def decode_stalls(self, size):
        """8 requests decode; a prompt that is in the tier arrives: the length of each step."""
        sampling = self.params(max_tokens=3000, temperature=0, ignore_eos=True, detokenize=False)
        for tag in ("load", "computed") if self.options.kind != "none" else ("computed",):
            self.forget()
            for i in range(8):
                self.engine.add_request(f"{tag}{i}", {"prompt_token_ids": self.tokens(1024, i)},
                                        sampling)
            self.steps(60)
            idle = self.steps(100)
            prompt = self.prompt(size) if tag == "load" else self.tokens(size + TAIL, 424242)
            began = clock()
            self.engine.add_request("long" + tag, {"prompt_token_ids": prompt}, self.one)
            during, ttft, cached = [], None, None
            while ttft is None and clock() - began < 60:
                start = clock()
                outputs = self.engine.step()
                during.append(clock() - start)
                for output in outputs:
                    if output.request_id.startswith("long") and output.outputs[0].token_ids:
                        ttft, cached = clock() - began, output.num_cached_tokens
            self.engine.abort_request([f"{tag}{i}" for i in range(8)])
            self.steps(5)
            self.drain()
            idle.sort()
            self.emit(event="stalls", what=tag, tokens=size, ttft=ttft, cached=cached,
                      idle_ms=1e3 * idle[len(idle) // 2], worst_ms=1e3 * max(during),
                      steps=len(during), top_ms=[round(1e3 * s, 2) for s in sorted(during)[-5:]])

    def profile(self):
        """Where the engine's thread spends the time of a hit."""
        import cProfile
        import pstats
        self.forget()
        profiler = cProfile.Profile()
        profiler.enable()
        self.first_token(self.prompt(max(self.sizes)))
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(45)
        self.drain()

    def steps(self, count):
        out = []
        for _ in range(count):
            start = clock()
            self.engine.step()
            out.append(clock() - start)
        return out

    # ---- kinds ----

    def run(self):
        kind = self.options.kind
        self.pinned()
        self.warm_up()
        if kind == "kvtier-disk":
            return self.from_disk()
        for size in self.sizes:  # the last one is asked for again, and the newest in any tier
            for which in reversed(range(self.counts[size])):
                self.measure("computed", size, which)
        with self.turn():
            self.flush()
            if kind == "native-fs":
                self.bytes_on_disk()
        for size in self.sizes:
            for _ in range(self.options.repeat):
                self.measure({"none": "hit_gpu", "native-fs": "hit_disk"}.get(kind, "hit_dram"),
                             size, forget={"none": None, "native-fs": "tiers"}.get(kind, "gpu"))
        if self.options.profile:
            with self.turn():
                self.profile()
        if self.options.stalls:
            with self.turn():
                self.decode_stalls(self.options.stalls)
        if kind == "kvtier":
            self.flush()

    def from_disk(self):
        for size in self.sizes:
            for which in range(self.counts[size]):
                self.measure("hit_disk", size, which, forget="gpu")
                self.measure("hit_dram_later", size, which, forget="gpu")
        self.flush()

    def exact(self):
        """Tokens of a hit of kvtier against those of a hit of the prefix cache."""
        sampling = self.params(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False,
                               logprobs=1)

        def ask():
            output = self.llm.generate([{"prompt_token_ids": [t % 1000 + 3 for t in
                                                              self.tokens(1608, 5)]}],
                                       sampling, use_tqdm=False)[0]
            self.drain()
            probabilities = [max(e.logprob for e in s.values()) for s in output.outputs[0].logprobs]
            return list(output.outputs[0].token_ids), probabilities, output.num_cached_tokens

        first, native = ask(), ask()
        self.flush()
        self.forget()
        loaded = ask()
        self.emit(event="exact", first_cached=first[2], native_cached=native[2],
                  loaded_cached=loaded[2], tokens_equal=native[0] == loaded[0],
                  logprobs_equal=native[1] == loaded[1], tokens=native[0])


def main():
    options = arguments()
    bench = Bench(options)
    if options.kind == "exact":
        bench.exact()
    else:
        bench.run()
    bench.engine.engine_core.shutdown()
    bench.emit(event="end")


if __name__ == "__main__":
    sys.exit(main())
