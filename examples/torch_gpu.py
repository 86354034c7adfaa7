#!/usr/bin/env python3
"""A transformers model whose KV cache comes back from kvtier instead of being computed again.

The cache tensors of a Hugging Face model (a StaticCache: one K and one V tensor a layer, in GPU
memory) are registered as a pool; kvtier's GPU kernels read and write them where they are. The
program fills the cache with a prompt, stores it, wipes the tensors, loads it back from DRAM, and
goes on generating; then does the same from disk in a new process. Tokens are compared with those of
a run that was never interrupted, and the time to the first token with that of computing the prompt.

    LD_LIBRARY_PATH=build python3 torch_gpu.py                      # 8B geometry, random weights
    python3 torch_gpu.py --model DIR --text FILE --tokens 2048      # a real model, of real text

At level raw the bytes of the tensors after a load are compared too, all of them.
Attention is PyTorch's flash kernel over the filled part of the cache, K and V as they are (GQA), as
engines run it; --attention sdpa takes the way that transformers goes by itself, which copies K and V
for every query head and makes a mask as long as the cache. With sdpa, tokens generated twice from the
same cache differ on some GPUs (seen on an H200 with PyTorch 2.11, without any load): compare bytes.

DIR is a folder of transformers (config.json, tokenizer.json, weights). Where it has a .gguf file and no
safetensors the weights are taken from there, dequantised (gguf_llama.py).

Needs: PyTorch with CUDA, transformers, libkvtier.so with GPU kernels. Prints JSON on the last line.
Not done here: paged attention. The pool's pages are slices of 16 tokens of the contiguous cache.
"""
import argparse
import ctypes as C
import gc
import glob
import json
import os
import subprocess
import sys
import time

BLOCK = 16
FEW = 64  # new tokens
KVT_PART_K, KVT_PART_V, KVT_DTYPE_BF16 = 1, 2, 1
WAIT_FOR_STREAM = 1


class Part(C.Structure):
    _fields_ = [("kind", C.c_uint8), ("dtype", C.c_uint8), ("group", C.c_uint16),
                ("layer", C.c_uint32), ("heads", C.c_uint32), ("head_dim", C.c_uint32)]


class Layout(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("block_tokens", C.c_uint32),
                ("part_count", C.c_uint32), ("parts", C.POINTER(Part)),
                ("group_count", C.c_uint32), ("groups", C.c_void_p)]


class Place(C.Structure):
    _fields_ = [("base", C.c_void_p), ("block", C.c_int64), ("head", C.c_int64),
                ("token", C.c_int64), ("elem", C.c_int64)]


class Pool(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("device", C.c_int32), ("block_count", C.c_uint32),
                ("place_count", C.c_uint32), ("places", C.POINTER(Place))]


class Key(C.Structure):
    _fields_ = [("hash", C.c_uint8 * 32), ("hash_len", C.c_uint8), ("reserved", C.c_uint8),
                ("group", C.c_uint16), ("shard", C.c_uint32)]


class Identity(C.Structure):
    _fields_ = [("struct_size", C.c_size_t)] + [(name, C.c_char_p) for name in (
        "engine", "key_scheme", "model", "revision", "adapter", "layout", "rope", "rotation",
        "extra")] + [("salt", C.c_void_p), ("salt_len", C.c_size_t), ("tp_size", C.c_uint32),
                     ("pp_size", C.c_uint32), ("pp_rank", C.c_uint32)]


class StoreOpts(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("parent", C.POINTER(Key)), ("first_pos", C.c_uint32),
                ("level", C.c_int), ("exact", C.c_int), ("cool", C.c_int), ("write", C.c_int),
                ("wait", C.c_int), ("wait_for", C.c_void_p)]


class LoadOpts(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("deadline_ns", C.c_int64), ("min_level", C.c_int),
                ("wait", C.c_int), ("wait_for", C.c_void_p)]


class Report(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("blocks_ok", C.c_size_t),
                ("blocks_run_ok", C.c_size_t), ("blocks_dram", C.c_size_t),
                ("blocks_disk", C.c_size_t), ("bytes_moved", C.c_uint64),
                ("elapsed_ns", C.c_int64)]


class Kvtier:
    """The few calls of kvtier/cache.h that are needed."""

    def __init__(self, library, dram, disk, level, ctas, load_ctas):
        self.lib = C.CDLL(library)
        self.lib.kvt_strerror.restype = C.c_char_p
        self.lib.kvt_lookup.restype = C.c_long
        self.lib.kvt_key_chain.restype = C.c_long
        self.lib.kvt_key_chain.argtypes = [C.c_void_p, C.c_void_p, C.c_size_t, C.c_uint32,
                                           C.c_void_p, C.c_size_t, C.c_uint16, C.c_uint32,
                                           C.c_void_p, C.c_size_t]
        self.lib.kvt_lookup.argtypes = [C.c_void_p, C.c_void_p, C.c_size_t, C.c_void_p, C.c_void_p]
        self.lib.kvt_req_wait.argtypes = [C.c_void_p, C.c_int64]
        for name in ("kvt_req_free", "kvt_close", "kvt_ns_close", "kvt_pool_unregister",
                     "kvt_config_free"):
            getattr(self.lib, name).argtypes = [C.c_void_p]
            getattr(self.lib, name).restype = None
        config, self.cache, error = C.c_void_p(), C.c_void_p(), C.create_string_buffer(512)
        self.check(self.lib.kvt_config_new(C.byref(config)), "config")
        for key, value in (("dram", dram), ("disk", disk), ("level", level), ("env", "no"),
                           ("gpu_store_ctas", ctas), ("gpu_ctas", load_ctas),
                           ("request_blocks_max", "65536")):
            if value:
                self.check(self.lib.kvt_config_set(config, key.encode(), str(value).encode()), key)
        rc = self.lib.kvt_open(config, C.byref(self.cache), error, C.c_size_t(512))
        if error.value:
            print("kvtier:", error.value.decode(), file=sys.stderr)
        self.check(rc, "open")
        self.lib.kvt_config_free(config)
        self.ns = self.pool = None

    def check(self, rc, what):
        if rc < 0:
            raise RuntimeError(f"{what}: {self.lib.kvt_strerror(rc).decode()}")
        return rc

    def register(self, tensors, model):
        """tensors: [(key, value)] of the layers, each [1, heads, tokens, dim] of bf16."""
        parts, places = (Part * (2 * len(tensors)))(), (Place * (2 * len(tensors)))()
        for layer, pair in enumerate(tensors):
            for which, tensor in enumerate(pair):
                _, heads, tokens, dim = tensor.shape
                i, size = 2 * layer + which, tensor.element_size()
                parts[i] = Part(KVT_PART_V if which else KVT_PART_K, KVT_DTYPE_BF16, 0, layer,
                                heads, dim)
                _, head, token, elem = (size * stride for stride in tensor.stride())
                places[i] = Place(tensor.data_ptr(), BLOCK * token, head, token, elem)
        layout = Layout(C.sizeof(Layout), BLOCK, len(parts), parts, 0, None)
        desc = Pool(C.sizeof(Pool), tensors[0][0].device.index or 0, tokens // BLOCK, len(places),
                    places)
        identity = Identity()
        self.lib.kvt_identity_init(C.byref(identity))
        identity.engine, identity.model = b"transformers", model.encode()
        identity.key_scheme = b"kvt-sha256-v1"
        self.ns, self.pool = C.c_void_p(), C.c_void_p()
        self.check(self.lib.kvt_ns_open(self.cache, C.byref(identity), C.byref(layout),
                                        C.byref(self.ns)), "namespace")
        self.check(self.lib.kvt_pool_register(self.cache, C.byref(layout), C.byref(desc),
                                              C.byref(self.pool)), "pool")

    def keys(self, tokens):
        root, n = (C.c_uint8 * 32)(), len(tokens) // BLOCK
        ids, keys = (C.c_uint32 * len(tokens))(*tokens), (Key * n)()
        self.check(self.lib.kvt_key_root(None, C.c_size_t(0), root), "root")
        self.check(self.lib.kvt_key_chain(root, ids, len(tokens), BLOCK, None, 0, 0, 0, keys, n),
                   "keys")
        return keys

    def finish(self, req, what, want):
        self.lib.kvt_req_wait(req, -1)
        report = Report(C.sizeof(Report))
        self.check(self.lib.kvt_req_report(req, C.byref(report)), what)
        self.lib.kvt_req_free(req)
        if report.blocks_ok != want:
            raise RuntimeError(f"{what}: {report.blocks_ok} of {want} blocks")
        return report

    def _call(self, fn, keys, opts, what):
        n, req = len(keys), C.c_void_p()
        pages = (C.c_uint32 * n)(*range(n))
        self.check(fn(self.ns, self.pool, keys, pages, C.c_size_t(n), C.byref(opts),
                      C.byref(req)), what)
        return self.finish(req, what, n)

    def store(self, keys, stream):
        opts = StoreOpts(C.sizeof(StoreOpts))
        opts.wait, opts.wait_for = WAIT_FOR_STREAM, stream
        return self._call(self.lib.kvt_store, keys, opts, "store")

    def load(self, keys, stream):
        opts = LoadOpts(C.sizeof(LoadOpts))
        opts.wait, opts.wait_for = WAIT_FOR_STREAM, stream
        return self._call(self.lib.kvt_load, keys, opts, "load")

    def hits(self, keys):
        return self.check(self.lib.kvt_lookup(self.ns, keys, len(keys), None, None), "lookup")

    def stat(self, name):
        value = C.c_uint64()
        self.check(self.lib.kvt_stats_get(self.cache, name.encode(), C.byref(value)), name)
        return value.value

    def wait_pinned(self, seconds=120):
        before, until = -1, time.monotonic() + seconds
        while time.monotonic() < until:
            now = self.stat("dram.pinned_bytes")
            if now > 0 and now == before:
                return
            before = now
            time.sleep(2.0)

    def flush(self):
        self.check(self.lib.kvt_flush(self.cache), "flush")

    def close(self):
        self.lib.kvt_pool_unregister(self.pool)
        self.lib.kvt_ns_close(self.ns)
        self.lib.kvt_close(self.cache)


class Filled:
    """Tokens that the cache holds once the present step has written its own."""
    tokens = 1 << 62


def flash(module, query, key, value, attention_mask, scaling=None, **_):
    """Attention of n new tokens over all before them and, causally, themselves. Few new ones take two
    steps, as engines do it: the query heads of one KV head together over what was there before, so
    that it is read once, and the new tokens among themselves; then one weighted sum."""
    import torch
    op = torch.ops.aten._scaled_dot_product_flash_attention
    heads, n, dim = query.shape[1:]
    until = min(Filled.tokens, key.shape[2])
    key, value = key[:, :, :until], value[:, :, :until]
    if n > FEW or n == until:
        return op(query, key, value, 0.0, n > 1, False, scale=scaling)[0].transpose(1, 2), None
    before = until - n
    folded = query.reshape(1, key.shape[1], -1, dim)
    old, old_lse = op(folded, key[:, :, :before], value[:, :, :before], 0.0, False, False,
                      scale=scaling)[:2]
    new, new_lse = op(query, key[:, :, before:], value[:, :, before:], 0.0, n > 1, False,
                      scale=scaling)[:2]
    share = torch.sigmoid(old_lse.reshape(1, heads, n, 1) - new_lse.reshape(1, heads, n, 1))
    out = old.reshape(1, heads, n, dim) * share + new * (1 - share)
    return out.to(query.dtype).transpose(1, 2), None


def from_gguf(folder, torch, attention):
    """The model of a folder with config.json and one GGUF file, or None."""
    found = glob.glob(os.path.join(folder, "*.gguf"))
    if len(found) != 1 or glob.glob(os.path.join(folder, "*.safetensors")):
        return None
    import gguf_llama
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig.from_pretrained(folder)
    config._attn_implementation = attention
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = {name: torch.from_numpy(array).to(torch.bfloat16)
               for name, array in gguf_llama.load(found[0]).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"} or (
            missing and not config.tie_word_embeddings):
        raise RuntimeError(f"{found[0]}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def build_model(args, torch):
    from transformers import (AttentionInterface, AutoModelForCausalLM, LlamaConfig,
                              LlamaForCausalLM)
    torch.manual_seed(1)
    attention = "sdpa"
    if args.attention == "flash":
        attention = "kvtier_gqa"  # "flash" in it would fetch kernels; no mask is made
        AttentionInterface.register(attention, flash)
    if args.model:
        model = from_gguf(args.model, torch, attention)
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16,
                                                         attn_implementation=attention)
        return model.to("cuda").eval(), os.path.basename(os.path.normpath(args.model))
    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=args.layers,
                         num_attention_heads=32, num_key_value_heads=8, vocab_size=32000,
                         max_position_embeddings=262144, rope_theta=500000.0)
    config._attn_implementation = attention
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model, f"llama-8b-geometry-{args.layers}-layers-random"


class Engine:
    """Prefill in chunks and greedy decoding over one StaticCache."""

    def __init__(self, model, torch, room):
        from transformers import StaticCache
        self.model, self.torch, self.graph = model, torch, None
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        with torch.inference_mode():  # its tensors are made by the first use
            self.run([1], 0)
        self.tensors = [(layer.keys, layer.values) for layer in self.cache.layers]
        self.wipe()

    def wipe(self):
        for pair in self.tensors:
            for tensor in pair:
                tensor.zero_()

    def step(self, ids, where, at):
        for layer in self.cache.layers:  # versions that count by themselves
            if hasattr(layer, "cumulative_length") and not isinstance(
                    layer.cumulative_length, int):
                layer.cumulative_length.fill_(at)
            elif hasattr(layer, "cumulative_length"):
                layer.cumulative_length = at
        Filled.tokens = at + ids.shape[1]
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True,
                         cache_position=where, position_ids=where[None], logits_to_keep=1)
        return out.logits[0, -1].float().argmax()

    def run(self, tokens, at):
        torch = self.torch
        return int(self.step(torch.tensor([tokens], device="cuda"),
                             torch.arange(at, at + len(tokens), device="cuda"), at))

    def capture(self, tokens, at):
        """The step over `tokens` at place `at` as a CUDA graph, as engines run short steps."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        ids = torch.tensor([tokens], device="cuda")
        where = torch.arange(at, at + len(tokens), device="cuda")
        with torch.cuda.stream(side):
            for _ in range(2):
                self.step(ids, where, at)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token = self.step(ids, where, at)
        # The graph reads ids and where at each replay: they must live as long.
        self.graph = (len(tokens), at, lambda: (graph.replay(), int(token))[1], ids, where)

    def prefill(self, tokens, at, chunk):
        if self.graph and self.graph[:2] == (len(tokens) - at, at):
            return self.graph[2]()
        token = None
        for start in range(at, len(tokens), chunk):
            token = self.run(tokens[start:start + chunk], start)
        return token

    def go_on(self, first, at, count):
        tokens = [first]
        while len(tokens) < count:
            tokens.append(self.run([tokens[-1]], at + len(tokens) - 1))
        return tokens


def timed(torch, fn):
    torch.cuda.synchronize()
    start = time.perf_counter()
    value = fn()
    torch.cuda.synchronize()
    return value, time.perf_counter() - start


def prompt_of(args, vocabulary):
    import random
    if args.text:
        from transformers import AutoTokenizer
        text = "".join(open(path, encoding="utf-8").read() for path in args.text)
        tokens = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
        if len(tokens) < args.tokens:
            raise SystemExit(f"torch_gpu: the text has {len(tokens)} tokens of {args.tokens}")
        return tokens[:args.tokens]
    numbers = random.Random(7)
    return [numbers.randrange(3, min(vocabulary, 30000)) for _ in range(args.tokens)]


def same(a, b):
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))


def restore(args, torch, engine, tier, prompt, keys):
    """One turn on top of what is stored: lookup, load, the last tokens, and on. Times it."""
    usable = (len(prompt) - 1) // BLOCK
    stream = torch.cuda.current_stream().cuda_stream

    def first_token():
        found = min(tier.hits(keys), usable)
        wanted = (Key * found).from_buffer(keys)
        report = tier.load(wanted, stream)
        return engine.prefill(prompt, found * BLOCK, args.chunk), report

    (token, report), seconds = timed(torch, first_token)
    tokens = engine.go_on(token, len(prompt), args.generate)
    return tokens, seconds, report


def open_tier(args, engine, name):
    disk = f"{args.dir}:{args.disk}" if args.dir else None
    tier = Kvtier(args.library, args.dram, disk, args.level, args.store_ctas,
                  args.load_ctas)
    tier.register(engine.tensors, name)
    return tier


def second_process(args, torch, engine, name, prompt):
    """After a restart: nothing in DRAM, everything on disk."""
    tier = open_tier(args, engine, name)
    tier.wait_pinned()
    keys = tier.keys(prompt)
    engine.prefill(prompt[:args.chunk], 0, args.chunk)  # kernels are loaded
    tail = (len(prompt) - 1) // BLOCK * BLOCK
    engine.prefill(prompt, tail, args.chunk)
    graph = try_graph(engine, prompt, tail)
    engine.wipe()
    tokens, seconds, report = restore(args, torch, engine, tier, prompt, keys)
    engine.wipe()
    again, warm, second = restore(args, torch, engine, tier, prompt, keys)
    tier.close()
    return {"tokens": tokens, "ttft_s": seconds, "load_s": report.elapsed_ns * 1e-9,
            "blocks_disk": report.blocks_disk, "blocks_dram": report.blocks_dram, "graph": graph,
            "same_again": same(tokens, again), "again": {"tokens": again, "ttft_s": warm, "blocks_dram": second.blocks_dram}}


def recompute_at_once(torch, model, prompt, attention):
    """The prompt in one step with the library's own growing cache."""
    ids, own = torch.tensor([prompt], device="cuda"), model.config._attn_implementation
    model.set_attn_implementation(attention or own)
    Filled.tokens = len(prompt)
    model(input_ids=ids[:, :1024], use_cache=True, logits_to_keep=1)
    _, seconds = timed(torch, lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1))
    torch.cuda.empty_cache()
    model.set_attn_implementation(own)
    return seconds


def eagerly(args, torch, engine, tier, prompt, keys):
    """Without a CUDA graph: the tokens, and the median time to the first."""
    runs = []
    for _ in range(3):
        engine.wipe()
        tokens, seconds, _ = restore(args, torch, engine, tier, prompt, keys)
        runs.append(seconds)
    return tokens, sorted(runs)[1]


def step_seconds(args, torch, engine, prompt, at):
    """The last step alone: the tokens that no whole block covers, over a full cache."""
    runs = [timed(torch, lambda: engine.prefill(prompt, at, args.chunk))[1] for _ in range(args.reps)]
    return sorted(runs)[len(runs) // 2]


def bytes_differ(torch, engine, tier, keys, kept):
    """Tensors of which a byte is another one after wiping and loading. kept: as they were."""
    engine.wipe()
    tier.load(keys, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    until, wrong = len(keys) * BLOCK, 0
    for (key, value), pair in zip(engine.tensors, kept):
        for now, before in zip((key, value), pair):
            wrong += not torch.equal(now[:, :, :until].view(torch.int16), before.view(torch.int16))
    return wrong


def try_graph(engine, prompt, at):
    try:
        engine.capture(prompt[at:], at)
        return True
    except Exception as why:  # a library that synchronises while it builds masks, say
        print(f"torch_gpu: no CUDA graph of the last step: {why}", file=sys.stderr)
        engine.torch.cuda.synchronize()
        engine.graph = None
        return False


def first_process(args, torch, engine, name, prompt):
    out = {"model": name, "tokens": len(prompt), "level": args.level, "chunk": args.chunk,
           "attention": args.attention}
    engine.prefill(prompt[:args.chunk], 0, args.chunk)
    _, out["recompute_ttft_s"] = timed(torch, lambda: engine.prefill(prompt, 0, args.chunk))
    out["recompute_chunked_s"] = out["recompute_ttft_s"]
    out["recompute_at_once_s"] = recompute_at_once(torch, engine.model, prompt, None)
    out["recompute_at_once_sdpa_s"] = recompute_at_once(torch, engine.model, prompt, "sdpa")
    out["recompute_ttft_s"] = min(out["recompute_chunked_s"], out["recompute_at_once_s"],
                                  out["recompute_at_once_sdpa_s"])
    tier = open_tier(args, engine, name)
    tier.wait_pinned()
    keys = tier.keys(prompt)
    usable = (Key * ((len(prompt) - 1) // BLOCK)).from_buffer(keys)
    report, out["store_s"] = timed(
        torch, lambda: tier.store(usable, torch.cuda.current_stream().cuda_stream))
    out["store_bytes"] = report.bytes_moved
    # The run that is never interrupted takes the same steps, over the exact cache: a step's numbers
    # depend on how many tokens it has, and on whether it is a graph.
    tail = len(usable) * BLOCK
    plain = engine.go_on(engine.prefill(prompt, tail, args.chunk), len(prompt), args.generate)
    out["graph"] = try_graph(engine, prompt, tail)
    exact = engine.go_on(engine.prefill(prompt, tail, args.chunk), len(prompt), args.generate)
    out["same_tokens_graph"] = same(plain, exact)
    out["last_step_s"] = step_seconds(args, torch, engine, prompt, tail)
    kept = None
    if args.level == "raw":
        kept = [tuple(t[:, :, :tail].clone() for t in pair) for pair in engine.tensors]
    graph, engine.graph = engine.graph, None
    tokens, out["eager_dram_ttft_s"] = eagerly(args, torch, engine, tier, prompt, keys)
    out["same_tokens_eager"] = same(plain, tokens)
    if kept:
        out["tensors_wrong"] = bytes_differ(torch, engine, tier, usable, kept)
    engine.graph = graph
    runs, tokens = [], None
    for _ in range(args.reps):
        engine.wipe()
        tokens, seconds, report = restore(args, torch, engine, tier, prompt, keys)
        runs.append(seconds)
        out["dram_load_s"] = report.elapsed_ns * 1e-9
        out["dram_blocks"] = report.blocks_dram
    out["dram_ttft_s"] = sorted(runs)[len(runs) // 2]
    out["speedup_dram"] = out["recompute_ttft_s"] / out["dram_ttft_s"]
    n = len(prompt)  # an engine's prefill of an 8B model on such a GPU, as measured elsewhere
    out["vllm_model_ttft_s"] = 23e-6 * n + 0.43e-9 * n * n
    out["speedup_dram_vllm_model"] = out["vllm_model_ttft_s"] / out["dram_ttft_s"]
    out["speedup_dram_load_alone"] = out["recompute_ttft_s"] / out["dram_load_s"]
    out["same_tokens_dram"] = same(exact, tokens)
    out["generated"] = len(exact)
    out["generated_tokens"], out["generated_tokens_dram"] = exact, tokens
    out["gpu_failed_blocks"] = tier.stat("gpu.failed_blocks")
    if args.dir:
        _, out["flush_s"] = timed(torch, tier.flush)
    tier.close()
    return out, exact


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="libkvtier.so.0")
    parser.add_argument("--model", help="directory of a model; else the 8B geometry, random weights")
    parser.add_argument("--text", nargs="+", help="the prompt, for a --model with a tokenizer; else "
                        "random tokens")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of one prefill step")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--level", default="kv4")
    parser.add_argument("--attention", choices=("flash", "sdpa"), default="flash")
    parser.add_argument("--dram", default="12GiB")
    parser.add_argument("--dir", help="of the disk tier; none: DRAM only")
    parser.add_argument("--disk", default="16GiB")
    parser.add_argument("--store-ctas", default="96")
    parser.add_argument("--load-ctas", default="16")
    parser.add_argument("--second", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    import torch
    with torch.inference_mode():
        model, name = build_model(args, torch)
        prompt = prompt_of(args, model.config.vocab_size)
        room = (len(prompt) + args.generate + 2 * BLOCK) // BLOCK * BLOCK
        engine = Engine(model, torch, room)
        if args.second:
            print(json.dumps(second_process(args, torch, engine, name, prompt)))
            return 0
        out, exact = first_process(args, torch, engine, name, prompt)
    if args.dir:
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()
        text = subprocess.run([sys.executable, os.path.abspath(__file__)] + sys.argv[1:] +
                              ["--second"], check=True, capture_output=True, text=True).stdout
        after = json.loads(text.splitlines()[-1])
        out["disk_ttft_s"], out["disk_load_s"] = after["ttft_s"], after["load_s"]
        out["disk_blocks"] = after["blocks_disk"]
        out["speedup_disk"] = out["recompute_ttft_s"] / out["disk_ttft_s"]
        out["same_tokens_disk"] = same(exact, after["tokens"])
        out["same_tokens_restart_dram"] = after["same_again"]
        out["restart_dram_ttft_s"] = after["again"]["ttft_s"]
    print(json.dumps(out))
    return 0 if out["dram_blocks"] == (len(prompt) - 1) // BLOCK else 1


if __name__ == "__main__":
    sys.exit(main())
