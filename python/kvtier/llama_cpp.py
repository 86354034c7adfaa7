"""llama-cpp-python with a memory: Llama is llama_cpp.Llama whose prompts are kept on disk.

    from kvtier.llama_cpp import Llama
    llm = Llama("model.gguf", n_ctx=4096, kvtier="disk=/var/cache/kvtier:50GiB")
    llm.create_chat_completion(messages=...)     # as ever; a prompt that comes back is loaded

A drop-in subclass: every method of llama_cpp.Llama works as before. Before a prompt is evaluated,
the longest stored prefix is loaded into the context, unless the context itself still holds as much;
after a generation the whole sequence is stored. Over libkvtier-llama (kvtier/llama.h), on the
libllama.so that llama_cpp has loaded.

Errors: ConfigError, UnsupportedError (the model, with the reason), LibraryError (versions) from the
constructor; afterwards a doubt is a miss, counted in kvtier_stats(), and the prompt is evaluated.
Threads: one at a time, as llama_cpp. Not supported: embedding=True, draft models; of chat handlers
with images the text alone is remembered as text is, so they are refused too.
"""
from __future__ import annotations

import ctypes as C
import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from . import _c, _llama
from ._errors import ClosedError, ErrorCode, UnsupportedError
from .cache import Cache, collect_stats, usable_blocks
from .layout import Keys, Level, Tier

_llama.provide_library()

import llama_cpp as _engine  # noqa: E402  (after provide_library(), which may name its library)

_log = logging.getLogger("kvtier.llama_cpp")
_SEQUENCE = 0
_ERROR_BYTES = 1024


class Llama(_engine.Llama):
    """llama_cpp.Llama with remembered prompts.

    kvtier: options of docs/config.md as text or mapping ("dram=8GiB,disk=/path:SIZE"), or an open
    kvtier.Cache to share; None: the defaults and KVTIER_CONFIG. kvtier_level, kvtier_min_level,
    kvtier_block_tokens, kvtier_salt, kvtier_digest_dir: as in kvtier/llama.h.
    kvtier_window_tokens: the last tokens of a prompt, which are kept at kv8; None: a sixteenth of
    the context, from 128 to 4,096. kvtier_calibrate: compute a prompt of so many tokens first, so
    that loads are weighed rightly from the start; 0: not. Everything else: llama_cpp.Llama, with
    flash_attn=True by default, which the adapter needs.
    """

    def __init__(self, model_path: str, *, kvtier: Cache | Mapping[str, Any] | str | None = None,
                 kvtier_level: Level | str | None = None,
                 kvtier_min_level: Level | str | None = None,
                 kvtier_window_tokens: int | None = None, kvtier_block_tokens: int = 16,
                 kvtier_salt: bytes = b"",
                 kvtier_digest_dir: str | None = None, kvtier_calibrate: int = 256,
                 flash_attn: bool = True, **kwargs: Any) -> None:
        self._kvt: int | None = None
        self.kvtier_last = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
        self._kvt_own_cache = not isinstance(kvtier, Cache)
        for name in ("embedding", "draft_model", "chat_handler"):
            if kwargs.get(name):
                raise _refuse(f"{name} is not supported")
        if not flash_attn:
            raise _refuse("flash_attn=False stores V transposed: leave it on")
        self._kvt_cache = Cache(kvtier) if self._kvt_own_cache else kvtier
        if self._kvt_cache.own_limits:
            raise _refuse("own_quota and own_ttl are not for llama.cpp: set ns_quota and ttl, or "
                          "ns_limit")
        try:
            super().__init__(model_path, flash_attn=True, **kwargs)
            self._kvt_block = kvtier_block_tokens
            self._kvt_salt = kvtier_salt
            self._attach(kvtier_level, kvtier_min_level, kvtier_window_tokens, kvtier_digest_dir)
            if kvtier_calibrate:
                tokens = min(kvtier_calibrate, self.n_ctx() // 2)
                _c.check(self._kvt_lib.kvt_llama_calibrate(self._kvt, tokens), "calibrate")
        except BaseException:
            self._detach()
            raise

    @property
    def context_params(self) -> Any:
        """llama_context_params, as llama_cpp.Llama fills them before it makes its context."""
        return self._kvt_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        params.n_seq_max = 2  # one spare sequence for the adapter
        params.kv_unified = True
        self._kvt_params = params

    def _attach(self, level: Any, min_level: Any, window: int | None,
                digest_dir: str | None) -> None:
        self._kvt_lib = _llama.load()
        opts = _llama.kvt_llama_opts()
        self._kvt_lib.kvt_llama_opts_init(C.byref(opts))
        build = _llama.engine_build().encode()
        opts.context_params = C.addressof(self.context_params)
        opts.model_path = self.model_path.encode()
        opts.lora = f"{_file_digest(self.lora_path)} scale={self.lora_scale!r}".encode() \
            if self.lora_path else None
        opts.digest_dir = digest_dir.encode() if digest_dir else None
        opts.salt, opts.salt_len = self._kvt_salt or None, len(self._kvt_salt)
        opts.block_tokens = self._kvt_block
        # a window as long as the context would leave nothing for kvtier_level
        opts.window_tokens = min(max(128, self.n_ctx() // 16), 4096) if window is None else window
        opts.level = Level.parse(level) or Level.parse(str(self._kvt_cache.stats()["config.level"]))
        opts.min_level = self._kvt_min_level = Level.parse(min_level)
        self._kvt_shadow = self._kvt_cache.stats()["config.shadow"] == "yes"
        opts.engine_build = build
        self._kvt_cut = opts.cut
        out, error = C.c_void_p(), C.create_string_buffer(_ERROR_BYTES)
        code = self._kvt_lib.kvt_llama_new(self._kvt_cache.handle, self._ctx.ctx, C.byref(opts),
                                           C.byref(out), error, _ERROR_BYTES)
        _c.check(code, "kvtier.llama_cpp", error.value.decode(errors="replace"))
        self._kvt = out.value

    def _detach(self) -> None:
        handle, self._kvt = self._kvt, None
        if handle is not None and self._kvt_cache._handle is not None:
            self._kvt_lib.kvt_llama_free(handle)
        if self._kvt_own_cache and getattr(self, "_kvt_cache", None) is not None:
            self._kvt_cache.close()

    def close(self) -> None:
        """Wait for what is being stored, write it to disk, and free the model."""
        if hasattr(self, "_kvt_own_cache"):
            self._detach()
        if hasattr(self, "_stack"):
            super().close()

    # ---- remember ----

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any):
        """llama_cpp.Llama.generate(), with the stored prefix of tokens loaded before and the
        sequence stored when the generator ends, by itself or because it is closed. kvtier_last
        counts the tokens of the last call: cached ones were in the context or loaded."""
        tokens = list(tokens)
        cached = self.kvtier_restore(tokens) if kwargs.get("reset", True) else self.n_tokens
        last = self.kvtier_last = {"prompt_tokens": len(tokens), "completion_tokens": 0,
                                   "cached_tokens": min(cached, max(0, len(tokens) - 1))}
        try:
            made, sent = super().generate(tokens, *args, **kwargs), None
            while True:
                try:
                    token = made.send(sent)
                except StopIteration:
                    return
                last["completion_tokens"] += 1
                sent = yield token
        finally:
            made.close()
            self.kvtier_save()

    def kvtier_restore(self, tokens: Sequence[int]) -> int:
        """Bring what is stored of a prompt into the context, if that is more than the context
        holds. Returns how many tokens of the prompt the context holds now."""
        if self._kvt is None:
            return 0
        held = _common(self._input_ids, tokens)
        ids = array("i", tokens)
        found, tiers = self._stored(ids, held)
        if found < held + self._kvt_block or not self._worth(tiers, found, len(ids), held):
            return held
        self._ctx.kv_cache_seq_rm(_SEQUENCE, 0, -1)
        got = self._kvt_lib.kvt_llama_restore(self._kvt, _SEQUENCE, ids.buffer_info()[0], len(ids),
                                              None)
        if got < 0:
            _log.warning("restore: %s", self._kvt_lib.kvt_llama_error(self._kvt).decode(
                errors="replace"))
        self.n_tokens = max(0, got)
        self.input_ids[:self.n_tokens] = tokens[:self.n_tokens]
        self._requires_eval = True  # a restored state has no logits
        return self.n_tokens

    def _stored(self, ids: array, held: int) -> tuple[int, Any]:
        """(tokens of the prompt that the store has, their tiers); 0 tokens where it cannot be more
        than held."""
        usable = usable_blocks(self._kvt_block, len(ids))
        if usable * self._kvt_block < held + self._kvt_block:
            return 0, None
        # the restore that follows is the request; in shadow mode this is, and finds nothing
        flags = 0 if self._kvt_shadow else _c.CONSTANTS["KVT_LOOKUP_PROBE"]
        opts = _c.kvt_lookup_opts(C.sizeof(_c.kvt_lookup_opts), self._kvt_min_level, flags, 0,
                                  len(ids))
        keys, tiers = self._keys(ids), (C.c_int * usable)()
        found = self._kvt_cache._lib.kvt_lookup(
            self._kvt_lib.kvt_llama_ns(self._kvt), keys.address, usable, C.byref(opts), tiers)
        return max(0, found) * self._kvt_block, tiers

    def _keys(self, ids: array) -> Keys:
        return Keys.chain(array("I", ids.tobytes()), self._kvt_block, salt=self._kvt_salt)

    def _worth(self, tiers: Any, found: int, prompt: int, held: int) -> bool:
        """Whether a restore would bring more than the context holds: it begins by emptying it, and
        may then choose to compute."""
        query = _c.kvt_plan_query(C.sizeof(_c.kvt_plan_query), C.addressof(tiers),
                                  found // self._kvt_block, 0, prompt, 0.0, 0, self._kvt_cut, 0)
        plan = _c.kvt_plan(C.sizeof(_c.kvt_plan))
        code = self._kvt_cache._lib.kvt_plan(self._kvt_lib.kvt_llama_ns(self._kvt), C.byref(query),
                                             C.byref(plan))
        return code == 0 and plan.count > 0 and \
            (plan.first + plan.count) * self._kvt_block > held

    def kvtier_prefetch(self, tokens: Sequence[int]) -> int:
        """Bring what is stored of a prompt from disk into DRAM, for a call that comes later. From
        any thread, also while the model works. Returns how many blocks that are."""
        handle = self._kvt
        if handle is None or self._kvt_shadow:
            return 0
        ids = array("i", tokens)
        found, tiers = self._stored(ids, 0)
        blocks = found // self._kvt_block
        away = sum(tier not in (Tier.DRAM, Tier.PENDING) for tier in (tiers or ())[:blocks])
        if away:
            keys = self._keys(ids)
            opts = _c.kvt_load_opts(C.sizeof(_c.kvt_load_opts), 0, self._kvt_min_level)
            self._kvt_cache._lib.kvt_prefetch(self._kvt_lib.kvt_llama_ns(handle), keys.address,
                                              blocks, C.byref(opts))
        return away

    def kvtier_save(self) -> int:
        """Store the full blocks of the sequence that the context holds. Encoding and the disk go
        on in the background. Returns blocks queued."""
        if self._kvt is None or self.n_tokens < self._kvt_block:
            return 0
        ids = array("i", self.input_ids[:self.n_tokens].tolist())
        queued = self._kvt_lib.kvt_llama_save(self._kvt, _SEQUENCE, ids.buffer_info()[0], len(ids))
        if queued < 0:
            _log.warning("save: %s", self._kvt_lib.kvt_llama_error(self._kvt).decode(
                errors="replace"))
        return max(0, queued)

    def kvtier_sync(self) -> None:
        """Wait until everything saved is encoded, and flush it to disk."""
        if self._kvt is None:
            raise ClosedError("the model is closed", ErrorCode.CLOSED)
        _c.check(self._kvt_lib.kvt_llama_sync(self._kvt), "sync")
        self._kvt_cache.flush()

    def kvtier_stats(self) -> dict[str, int | str]:
        """Counters of the cache, and of the adapter under "llama."."""
        if self._kvt is None:
            raise ClosedError("the model is closed", ErrorCode.CLOSED)
        mine = collect_stats(self._kvt_lib.kvt_llama_stats_each, self._kvt)
        return {**self._kvt_cache.stats(),
                **{name if name.startswith("llama.") else f"llama.{name}": value
                   for name, value, _ in mine}}


def _common(held: Any, tokens: Sequence[int]) -> int:
    """Length of the common beginning of the context's tokens and a prompt."""
    n = 0
    for a, b in zip(held.tolist(), tokens):
        if a != b:
            break
        n += 1
    return n


def _file_digest(path: str) -> str:
    import hashlib
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def _refuse(reason: str) -> UnsupportedError:
    return UnsupportedError(f"kvtier.llama_cpp: {reason}", ErrorCode.UNSUPPORTED)
