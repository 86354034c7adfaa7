"""Hugging Face transformers: prompts of model.generate() are remembered in DRAM and on disk.

    with kvtier.transformers.cached(model, disk="/var/cache/kvtier:50GiB") as prefixes:
        model.generate(**inputs)          # the longest stored prefix is loaded, new blocks are
        stored
    print(prefixes.counters)

restore() puts the stored blocks of a token list into a DynamicCache, save() stores what is new;
cached() calls both around generate(). The shape of the cache is learnt from the model (one token is
computed), not assumed. A pool is registered over the very tensors that are loaded or stored, in
host memory or on a CUDA device (by kvtier's GPU kernels; loads and stores follow the current
stream).

Rules: a call that is not understood (several sequences, beams, embeddings, a cache of its own, ...)
is passed on untouched and counted with the reason. Restored blocks are never stored again, so that
nothing lossy is stored as exact. Threads: one generate() at a time per model, as transformers.
Supported: full-attention models whose layers are DynamicLayer, on one device; bf16, f16, f32.
Others are refused with the reason (UnsupportedError). Tested with transformers 5.19.
"""
from __future__ import annotations

import collections
import contextlib
import hashlib
import inspect
import json
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import (BusyError, ClosedError, ErrorCode, KvtierError, UnsupportedError,
                      code_name)
from .cache import Cache, Namespace, Plan, Pool, Request, usable_blocks
from .layout import KEY_SCHEME, Identity, Keys, Kind, Layout, Level, Part, layout_of, pages

_log = logging.getLogger("kvtier.transformers")
_PENDING_MAX = 4  # saves whose tensors are kept alive; more are dropped and counted
_CALIBRATE = (16, 64, 256, 1024)  # tokens computed to see how fast the model is; the first warms up
_CALIBRATE_S = 0.5  # no further step once this has passed
# Of a configuration; where a model came from and which version wrote it change no KV.
_NOT_OF_IDENTITY = ("_name_or_path", "transformers_version", "_commit_hash", "use_cache")
# Options of generate() under which the cache holds something else than one plain sequence.
_PLAIN = {"num_beams": (None, 1), "num_return_sequences": (None, 1), "use_cache": (None, True),
          "cache_implementation": (None, "dynamic", "dynamic_full"), "assistant_model": (None,),
          "prompt_lookup_num_tokens": (None,), "assistant_early_exit": (None,),
          "custom_generate": (None,), "penalty_alpha": (None,), "dola_layers": (None,)}


def weights_digest(model: Any) -> str:
    """SHA-256 over every parameter and buffer of a model: what names its weights. About a second
    per GB; pass revision= to cached() instead where that is too long."""
    import torch
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type == "meta":
            raise UnsupportedError(f"{name} is not in memory (offloaded): pass revision=, a "
                                   "text that names the weights", ErrorCode.UNSUPPORTED)
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        for start in range(0, flat.numel(), 64 << 20):  # bounded copies off a GPU
            digest.update(memoryview(flat[start:start + (64 << 20)].cpu().numpy()))
    return digest.hexdigest()


_ROW = 4096  # words of 8 bytes: tensors are summed up in rows and columns of so many
_digests: "weakref.WeakKeyDictionary[Any, tuple[str, str]]" = weakref.WeakKeyDictionary()


def _sums(tensor: Any) -> bytes:
    """All of a tensor, but for a fraction of the time that its digest takes: sums of its words by
    rows and by columns, and what is left over as it is. One word that changes, or two that change
    places, change a sum."""
    import torch
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = flat.numel() // (8 * _ROW) * (8 * _ROW)
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    table = words.view(torch.int64).view(-1, _ROW)
    return b"".join(part.cpu().numpy().tobytes()
                    for part in (table.sum(0), table.sum(1), flat[whole:]))


def _state(model: Any) -> str:
    """What changes when weights do: where each tensor is, how often it was written in place, and
    sums over it, since writing through .data is not counted."""
    import torch
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return ""
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{tensor.data_ptr()}\0"
                      f"{tensor._version}\0".encode() + _sums(tensor))
    return digest.hexdigest()


def remembered_digest(model: Any) -> str:
    """weights_digest(), made once for each model for as long as its weights stay as they are."""
    state = _state(model)
    known = _digests.get(model)
    if known is None or not state or known[0] != state:
        known = _digests[model] = (state, weights_digest(model))
    return known[1]


@dataclass(frozen=True)
class Restored:
    """What restore() brought: `tokens` of the prompt are in `past`; why: "load", "miss",
    "recompute", "late", ... ; plan: what it was weighed by; seconds: it took."""

    past: Any
    tokens: int
    why: str
    plan: Plan | None
    seconds: float


class Prefixes:
    """Prefixes of one model in one cache. Made by cached(), or by hand for an own loop.

    revision: names the weights; None: weights_digest(model), remembered. adapter: names a LoRA adapter in
    force, required for PEFT models. salt: prefixes of different salts share nothing. block_tokens:
    16 to 4,096, a multiple of 16; level: of blocks older than the last window_tokens of a saved
    sequence, which are stored at kv8 at least (None: a sixteenth of the sequence, from 128 to
    4,096); min_level: that a restored block must have.
    """

    def __init__(self, model: Any, cache: Cache, *, revision: str | None = None, adapter: str = "",
                 salt: bytes = b"", block_tokens: int = 16, level: Level | str | None = None,
                 min_level: Level | str | None = None, window_tokens: int | None = None) -> None:
        self.model, self.cache, self.salt, self.block_tokens = model, cache, salt, block_tokens
        self.level = Level.parse(level) or Level.parse(str(cache.stats()["config.level"]))
        self.min_level = Level.parse(min_level)
        self.window_tokens = window_tokens
        self.counters: collections.Counter[str] = collections.Counter()
        self._pending: list[tuple[list[Request], Pool]] = []
        self._dtype, self.layout, self.device = self._learn()
        self.ns: Namespace = cache.namespace(self._identity(revision, adapter), self.layout)

    # ---- what the model is ----

    def _learn(self) -> tuple[Any, Layout, Any]:
        """Compute one token and look at the cache that it leaves."""
        import torch
        import transformers as hf
        config = self.model.config
        if getattr(config, "is_encoder_decoder", False):
            raise _refuse("the model has an encoder")
        past = hf.DynamicCache(config=config)
        token = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        with torch.no_grad():
            self.model(input_ids=token, past_key_values=past, use_cache=True)
        parts: list[Part] = []
        for number, layer in enumerate(past.layers):
            if type(layer) is not hf.cache_utils.DynamicLayer:
                raise _refuse(f"layer {number} keeps its cache as {type(layer).__name__}: only "
                              "full attention (DynamicLayer) can be cut into blocks of tokens")
            for kind, tensor in ((Kind.K, layer.keys), (Kind.V, layer.values)):
                if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != 1:
                    raise _refuse(f"layer {number}: a cache of shape {tuple(tensor.shape)}, not "
                                  "[batch, heads, tokens, dim]")
                if tensor.device != past.layers[0].keys.device:
                    raise _refuse("its layers are on several devices")
                seen = pages(tensor, "1hte", 1)
                parts.append(seen.part(kind, number))
        if not parts or past.get_seq_length() != 1:
            raise _refuse("its cache did not take a token")
        first = past.layers[0].keys
        return first.dtype, Layout(self.block_tokens, tuple(parts)), first.device

    def _identity(self, revision: str | None, adapter: str) -> Identity:
        import transformers as hf
        if getattr(self.model, "peft_config", None) and not adapter:
            raise _refuse("it is a PEFT model: pass adapter=, a text that names adapter and scale, "
                          "or merge it")
        settings = self.model.config.to_dict()
        for key in _NOT_OF_IDENTITY:
            settings.pop(key, None)
        text = json.dumps(settings, sort_keys=True, default=str)
        attention = getattr(self.model.config, "_attn_implementation", None)
        return Identity(
            engine=f"transformers {hf.__version__}", key_scheme=KEY_SCHEME,
            model=type(self.model).__name__, adapter=adapter, salt=self.salt,
            revision=revision if revision is not None else remembered_digest(self.model),
            layout="dynamic", rope=json.dumps(settings.get("rope_parameters"), sort_keys=True,
                                              default=str),
            extra=f"config={hashlib.sha256(text.encode()).hexdigest()} attention={attention}")

    def keys(self, tokens: Sequence[int]) -> Keys:
        """Keys of the full blocks of a token list."""
        return Keys.chain(tokens, self.block_tokens, salt=self.salt)

    def calibrate(self) -> None:
        """Tell the plan how fast the model computes prompts, before there is any: a few short ones
        are computed. Half a second, or one prompt of 64 tokens where that takes longer."""
        import torch
        import transformers as hf
        begin = time.perf_counter()
        for count in _CALIBRATE:
            ids = torch.arange(count, device=self.model.device)[None] % self.model.config.vocab_size
            start = time.perf_counter()
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=True,
                           past_key_values=hf.DynamicCache(config=self.model.config))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            if count > _CALIBRATE[0]:
                self.ns.observe_prefill(count, 0, now - start)
                if now - begin > _CALIBRATE_S:
                    break

    # ---- restore and save ----

    def restore(self, tokens: Sequence[int]) -> Restored:
        """A new DynamicCache that holds the longest stored prefix of a prompt that is loaded faster
        than computed; at least one token is left to compute. Blocks while blocks are read."""
        import transformers as hf
        start = time.perf_counter()
        past = hf.DynamicCache(config=self.model.config)
        plan, count, why = None, 0, "short"
        keys = self.keys(tokens)[:usable_blocks(self.block_tokens, len(tokens))]
        try:
            if len(keys):
                found = self.ns.lookup(keys, self.min_level, prompt_tokens=len(tokens))
                plan = self.ns.plan(found.tiers, prompt_tokens=len(tokens), roots=found.roots) \
                    if found.n else None
                why = plan.reason.name.lower() if plan else "miss"
                if plan and plan.count:
                    count = self._load(past, keys[:plan.count], plan)
                    why = why if count == plan.count else "late"
        except KvtierError as error:  # a doubt is a miss
            _log.warning("restore: %s", error)
            past, count, why = hf.DynamicCache(config=self.model.config), 0, "error"
        self.counters[f"restore.{why}"] += 1
        self.counters["tokens.restored"] += count * self.block_tokens
        self.counters["tokens.prompt"] += len(tokens)
        return Restored(past, count * self.block_tokens, why, plan, time.perf_counter() - start)

    def _load(self, past: Any, keys: Keys, plan: Plan) -> int:
        """Load blocks into fresh tensors and hand the leading good ones to the cache."""
        import torch
        tensors = [torch.empty((1, part.heads, len(keys) * self.block_tokens, part.head_dim),
                               dtype=self._dtype, device=self.device) for part in self.layout.parts]
        with self._pool(tensors) as pool:
            request = self.ns.load(pool, keys, range(len(keys)), min_level=self.min_level,
                                   deadline=plan.deadline_s or None, stream=self._stream())
            request.wait()
            good = request.report().blocks_run_ok
            request.close()
        if good:
            for number, layer in enumerate(past.layers):
                keys_states, values = (t[:, :, :good * self.block_tokens]
                                       for t in tensors[2 * number:2 * number + 2])
                layer.update(keys_states, values)
        return good

    def save(self, tokens: Sequence[int], past: Any, restored: int = 0) -> int:
        """Store the full blocks of tokens, which `past` holds from position 0 on, but for the first
        `restored` tokens. Encoding goes on in the background: the tensors are kept until then.
        Returns blocks queued; 0: nothing new, or dropped because four saves are in flight."""
        self._reap(wait=False)
        length = min(len(tokens), past.get_seq_length())
        blocks, first = length // self.block_tokens, restored // self.block_tokens
        if blocks <= first:
            return 0
        if len(self._pending) >= _PENDING_MAX:
            self.counters["save.dropped"] += blocks - first
            return 0
        keys = self.keys(tokens[:blocks * self.block_tokens])
        tensors = [t for layer in past.layers for t in (layer.keys, layer.values)]
        try:
            return self._store(keys, tensors, first)
        except KvtierError as error:
            self.counters["save.busy" if isinstance(error, BusyError) else "save.error"] += 1
            _log.warning("save: %s", error)
            return 0

    def _store(self, keys: Keys, tensors: list[Any], first: int) -> int:
        window = self.window_tokens
        if window is None:  # one as long as the prompt would leave nothing for the level
            window = min(max(128, len(keys) * self.block_tokens // 16), 4096)
        cut = max(first, len(keys) - -(-window // self.block_tokens))
        pool, requests = self._pool(tensors), []
        self._pending.append((requests, pool))
        for start, stop, level in ((first, cut, self.level),
                                   (cut, len(keys), max(self.level, Level.KV8))):
            if start < stop:
                requests.append(self.ns.store(
                    pool, keys[start:stop], range(start, stop), level=level,
                    parent=keys[start - 1:start] if start else None,
                    first_pos=start * self.block_tokens, stream=self._stream()))
        self.counters["blocks.queued"] += len(keys) - first
        return len(keys) - first

    def _pool(self, tensors: list[Any]) -> Pool:
        seen = [pages(tensor, "1hte", self.block_tokens) for tensor in tensors]
        made = layout_of([(part.kind, page) for part, page in zip(self.layout.parts, seen)],
                         [part.layer for part in self.layout.parts])
        return self.cache.pool(made, [page.place for page in seen], seen[0].block_count,
                               seen[0].device, tensors)

    def _stream(self) -> int | None:
        import torch
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).cuda_stream

    def _reap(self, wait: bool) -> None:
        kept = []
        for requests, pool in self._pending:
            if not wait and not all(request.wait(0) for request in requests):
                kept.append((requests, pool))
                continue
            for request in requests:
                request.wait()
                for code in request.status():
                    name = code_name(code).removeprefix("KVT_E_").lower() or "stored"
                    self.counters[f"blocks.{name}"] += 1
                request.close()
            pool.close()
        self._pending = kept

    def sync(self) -> None:
        """Wait until everything that was saved is encoded and committed."""
        self._reap(wait=True)

    def close(self) -> None:
        """Let go of the namespace; waits for saves."""
        self.sync()
        self.ns.close()

    # ---- generate() ----

    def generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """original(*args, **kwargs), a model's generate(), with its prompt restored and saved."""
        why, ids = _why_not(self.model, original, args, kwargs)
        if why:
            self.counters[f"passed.{why}"] += 1
            return original(*args, **kwargs)
        tokens = ids[0].tolist()
        restored = self.restore(tokens)
        kwargs["past_key_values"] = restored.past
        watch = _FirstToken(self.device)
        kwargs["logits_processor"] = [*(kwargs.get("logits_processor") or []), watch]
        out = original(*args, **kwargs)
        with contextlib.suppress(ClosedError):  # save() counts it
            if watch.seconds is not None:
                self.ns.observe_prefill(len(tokens) - restored.tokens, restored.tokens,
                                        watch.seconds)
        sequences = out if not hasattr(out, "sequences") else out.sequences
        self.save(sequences[0].tolist(), restored.past, restored.tokens)
        return out


class _FirstToken:
    """A logits processor that changes nothing and notes when the prompt had been computed."""

    def __init__(self, device: Any) -> None:
        self.start, self.seconds, self.device = time.perf_counter(), None, device

    def __call__(self, _ids: Any, scores: Any) -> Any:
        if self.seconds is None:
            if self.device.type == "cuda":
                import torch
                torch.cuda.synchronize(self.device)
            self.seconds = time.perf_counter() - self.start
        return scores


def _refuse(reason: str) -> UnsupportedError:
    return UnsupportedError(f"kvtier.transformers: {reason}", ErrorCode.UNSUPPORTED)


def _why_not(model: Any, original: Any, args: tuple, kwargs: dict) -> tuple[str, Any]:
    """("", input ids) of a call that is one plain sequence; else the reason why it is not."""
    import torch
    names = [name for name in inspect.signature(original).parameters if name != "self"]
    given = {**dict(zip(names, args)), **{k: v for k, v in kwargs.items() if v is not None}}
    ids = given.pop("inputs", None)
    ids = given.pop("input_ids", None) if ids is None else ids
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return "no_input_ids", None
    if ids.shape[0] != 1:
        return "batch", None
    if given.get("past_key_values") is not None:
        return "own_cache", None
    mask = given.pop("attention_mask", None)
    if mask is not None and (mask.shape != ids.shape or not bool((mask == 1).all())):
        return "masked", None
    if any(isinstance(value, torch.Tensor) for value in given.values()):
        return "other_inputs", None
    settings = given.get("generation_config") or model.generation_config
    for name, plain in _PLAIN.items():
        value = given.get(name, getattr(settings, name, None))
        if value not in plain:
            return name, None
    return "", ids


@contextlib.contextmanager
def cached(model: Any, cache: Cache | None = None, *, revision: str | None = None,
           adapter: str = "", salt: bytes = b"", block_tokens: int = 16,
           level: Level | str | None = None, min_level: Level | str | None = None,
           window_tokens: int | None = None, calibrate: bool = True,
           **options: Any) -> Iterator[Prefixes]:
    """Within the block, model.generate() remembers its prompts; yields the Prefixes.

    cache: an open kvtier.Cache to share; else one is opened from the options of docs/config.md
    (dram="8GiB", disk="/path:SIZE", ...) and closed at the end, when everything is on disk.
    calibrate: see how fast the model is first, half a second, so that loads are weighed rightly.
    The other arguments are those of Prefixes. UnsupportedError: the model cannot be served, with
    the reason; ConfigError: an option that makes no sense."""
    opened = Cache(options) if cache is None else None
    if cache is not None and options:
        raise TypeError(f"options for a cache that is open already: {', '.join(options)}")
    try:
        prefixes = Prefixes(model, cache or opened, revision=revision, adapter=adapter, salt=salt,
                            block_tokens=block_tokens, level=level, min_level=min_level,
                            window_tokens=window_tokens)
        if calibrate:
            prefixes.calibrate()
        had, original = "generate" in vars(model), model.generate
        model.generate = lambda *args, **kwargs: prefixes.generate(original, *args, **kwargs)
        try:
            yield prefixes
        finally:
            if had:
                model.generate = original
            else:
                del model.generate
            prefixes.close()
    finally:
        if opened is not None:
            opened.close()
