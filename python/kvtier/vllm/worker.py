"""The worker's half: pools over the engine's KV tensors, loads and stores in flight.

Pages and requests of the engine:
- a page that is being loaded belongs to a request that waits for it; it is reported as received
  when every load of it has ended, whatever came of it, with the pages that hold nothing (or, where
  layers are in several groups, as failed as a whole);
- a step that computes while blocks arrive, or after some did not, may have computed from pages that
  hold nothing: what it filled is not stored;
- a page that is being stored may be handed out again before the store has read it (preemption):
  the step that would overwrite it waits first;
- a request that ends is held by the scheduler until its stores have ended.
Threads: the engine's worker thread alone.
"""
from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from .._errors import BusyError, ErrorCode, KvtierError, UnsupportedError
from ..cache import Pool, Request
from ..layout import Keys
from .identity import stage_and_rank
from .pages import Model, find_places, layer_numbers, model_of
from .plan import Step, Told, Transfer
from .settings import Settings
from .stats import Counts
from .store import Store

_log = logging.getLogger("vllm.kvtier")
_IDLE_WAIT = 0.002   # seconds that a step without work waits for blocks to arrive
_BATCH = 2048         # blocks of one request to the library
_FINE = (0, int(ErrorCode.EXISTS))


def _cut(what: Transfer, start: int, end: int) -> Transfer:
    """Blocks [start, end) of a transfer."""
    told = what.told
    if told is not None:
        tokens = len(told.tokens) // len(told.hashes)
        told = Told(told.hashes[start:end], told.hashes[start - 1] if start else told.parent,
                    told.tokens[start * tokens:end * tokens], told.lora_id, told.lora_name)
    return Transfer(what.request, what.hashes[start:end], what.pages[start:end],
                    what.first_block + start, what.hashes[start - 1] if start else what.parent,
                    what.group, told)


class _Load:
    """Loads of one request of the engine."""

    def __init__(self) -> None:
        self.left: list[Transfer] = []      # not yet handed to the library
        self.parts: list[tuple[Request, Transfer]] = []
        self.failed: set[int] = set()       # pages
        self.began = time.monotonic()
        self.cancelled = False


class Worker:
    """See the file's head. model: what its pages hold, once register() has found out."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings, store: Store,
                 counts: Counts) -> None:
        self._config, self._kv_cache_config = vllm_config, kv_cache_config
        self._settings, self._store, self._counts = settings, store, counts
        self._rank = 0  # of the tensor-parallel group, 0 where all hold the same bytes
        self._pool: Pool | None = None
        self.model: Model | None = None
        self._layers: dict[str, int] = {}
        self._device = torch.device("cpu")
        self._loads: dict[str, _Load] = {}
        self._stores: dict[str, list[tuple[Request, Transfer]]] = {}
        self._storing: Counter[int] = Counter()  # pages that stores still read
        self._held: set[str] = set()  # requests with stores: the scheduler holds them at their end
        self._finishing: set[str] = set()
        self._invalid: set[int] = set()
        self._failed: set[str] = set()  # requests whose loads failed, where pages do not name them
        self._waited: list[str] = []    # loads that this step waits for
        self._spoiled = False           # this step computes from pages that hold nothing
        self._events: list[Any] = []
        self._step_began = 0.0
        self._timing: list[tuple[Any, Any, tuple[int, int]]] = []

    # ---- the engine's pages ----

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """Make the pool. UnsupportedError: the pages cannot be understood or shared."""
        model = model_of(self._kv_cache_config, self._settings.opaque)
        layers = self._config.compilation_config.static_forward_context
        blocks = self._kv_cache_config.num_blocks
        places = find_places(model.shapes, tensors, layers, blocks)
        if places is None:
            if self._settings.daemon:
                raise UnsupportedError('kvtier: the inside of this engine\'s pages is not known; '
                                       'set "pages": "opaque" in kv_connector_extra_config to '
                                       "store them as they are")
            model = model_of(self._kv_cache_config, opaque=True)
            places = find_places(model.shapes, tensors, layers, blocks)
        first = tensors[model.shapes[0].layer]
        self._device = first.device
        index = -1 if first.device.type == "cpu" else first.device.index or 0
        namespace = self._store.open_namespace(model)
        self._pool = self._store.cache.pool(model.layout, places, blocks, index,
                                            list(tensors.values()))
        self.model, self._layers = model, layer_numbers(model)
        self._rank = 0 if model.replicated else stage_and_rank(self._config.parallel_config)[1]
        _log.info("kvtier: %d layers, %d pages of %d tokens, %d bytes a block in the engine, %d "
                  "stored, namespace %s", len(model.shapes), blocks, model.layout.block_tokens,
                  model.block_bytes(0), namespace.record_bytes(), namespace.id.hex())
        for group in model.groups[1:]:
            _log.info("kvtier: group %d: %s, %d tokens and %d bytes a block in the engine, %d "
                      "stored", group.group, f"windows of {group.window_tokens} tokens" if
                      group.window_tokens else "full attention", group.block_tokens,
                      model.block_bytes(group.group), namespace.record_bytes(group=group.group))

    def _keys(self, hashes: Iterable[bytes], group: int) -> Keys:
        return Keys.from_hashes(hashes, group, self._rank)

    def _stream(self) -> int | None:
        return torch.cuda.current_stream(self._device).cuda_stream \
            if self._device.type == "cuda" else None

    # ---- a step ----

    def begin(self, step: Step) -> None:
        """Before the forward pass: pages that are handed out anew must not be read any more, and
        hold exact KV from now on."""
        self._held.update(what.request for what in step.stores)
        self._waited, self._spoiled = [], False
        if self._pool is None:
            return
        for name in step.cancelled:
            if name in self._loads:
                self._cancel(self._loads[name])
        if step.new_pages:
            self._let_go(step.new_pages)
            self._pool.reset_origin(step.new_pages)
        if step.prefill:
            self._step_began = time.monotonic()
            if self._device.type == "cuda":
                start = torch.cuda.Event(enable_timing=True)
                start.record()
                self._timing.append((start, None, step.prefill))

    def _let_go(self, pages: Iterable[int]) -> None:
        busy = {page for page in pages if page in self._storing}
        if not busy:
            return
        self._counts.add(store_waits=1)
        for pending in list(self._stores.values()):
            for request, what in pending:
                if not busy.isdisjoint(what.pages):
                    request.wait()
        self._reap_stores()

    def load(self, step: Step) -> None:
        """Start the loads of the step, and wait as the option "load" says."""
        for what in step.loads:
            self._let_go(what.pages)
            load = self._loads.setdefault(what.request, _Load())
            load.left += [_cut(what, start, start + _BATCH)
                          for start in range(0, len(what.hashes), _BATCH)]
        names = list(dict.fromkeys(what.request for what in step.loads))
        for name in names:
            self._submit_load(self._loads[name])
        if not self._settings.load_async:
            self._waited = names
        if self._settings.load == "sync":
            self._finish_waited()
        for name in self._waited:  # a wait for a layer needs all of the requests
            while self._loads[name].left:
                time.sleep(_IDLE_WAIT)
                self._submit_load(self._loads[name])

    def wait_layer(self, name: str) -> None:
        """Before a layer computes: its part of the step's loads has come. Whether it was good is
        known after the last layer, and nothing leaves the step before (_finish_waited)."""
        for waited in self._waited:
            for request, _ in self._loads[waited].parts:
                request.wait_layer(self._layers.get(name, 0))

    def _finish_waited(self) -> None:
        """Wait for the end of the loads that this step waits for."""
        for name in self._waited:
            load = self._loads[name]
            while not self._load_ended(load):
                if load.parts:
                    load.parts[0][0].wait()
                else:  # the library takes no more requests just now
                    time.sleep(_IDLE_WAIT)
            del self._loads[name]
            self._invalid |= load.failed
            self._spoiled |= bool(load.failed)
        self._waited = []

    def _submit_load(self, load: _Load) -> None:
        layers = self._settings.load == "layers"
        while load.left and not load.cancelled:
            what = load.left[0]
            try:
                request = self._store.namespace.load(
                    self._pool, self._keys(what.hashes, what.group), what.pages,
                    stream=self._stream(), layers=layers)
            except BusyError:
                return  # the next step tries again
            except KvtierError as error:
                _log.warning("kvtier: a load was refused, its blocks are computed: %s", error)
                self._fail(load, [page for left in load.left for page in left.pages])
                load.left = []
                return
            load.left.pop(0)
            load.parts.append((request, what))

    def _cancel(self, load: _Load) -> None:
        load.cancelled = True
        load.failed.update(page for left in load.left for page in left.pages)
        load.left = []
        for request, _ in load.parts:
            request.cancel()

    def _fail(self, load: _Load, pages: list[int]) -> None:
        load.failed.update(pages)
        self._counts.add(failed_blocks=len(pages))
        self._pool.reset_origin(pages)  # they will be computed

    def _load_ended(self, load: _Load) -> bool:
        """Take in what has ended; true: all of it."""
        self._submit_load(load)
        waiting = []
        for request, what in load.parts:
            if not request.wait(0):
                waiting.append((request, what))
                continue
            bad = [page for page, code in zip(what.pages, request.status()) if code != 0]
            report = request.report()
            request.close()
            self._counts.add(loaded_blocks=len(what.pages) - len(bad),
                             loaded_dram_blocks=report.blocks_dram,
                             loaded_disk_blocks=report.blocks_disk,
                             loaded_remote_blocks=report.blocks_remote)
            if bad:
                self._fail(load, bad)
        load.parts = waiting
        if waiting or load.left:
            return False
        self._counts.add(loads=1, load_seconds=time.monotonic() - load.began)
        return True

    def save(self, step: Step) -> None:
        """After the forward pass: store the blocks that it has filled."""
        if self._pool is None:
            return
        self._finish_waited()
        self._observe(step)
        if self._spoiled:
            self._counts.add(dropped_blocks=sum(len(what.pages) for what in step.stores))
            return
        for what in step.stores:
            for start in range(0, len(what.hashes), _BATCH):
                self._store_some(_cut(what, start, start + _BATCH))

    def _store_some(self, what: Transfer) -> None:
        tokens = self.model.groups[what.group].block_tokens
        parent = self._keys([what.parent], what.group) if what.parent is not None else None
        try:
            request = self._store.namespace.store(
                self._pool, self._keys(what.hashes, what.group), what.pages, parent=parent,
                first_pos=what.first_block * tokens, stream=self._stream())
        except KvtierError as error:
            self._counts.add(dropped_blocks=len(what.pages))
            if not isinstance(error, BusyError):
                _log.warning("kvtier: a store was refused: %s", error)
            return
        self._stores.setdefault(what.request, []).append((request, what))
        self._storing.update(what.pages)

    def _observe(self, step: Step) -> None:
        """Tell the planner what a prompt cost, from steps that compute nothing else."""
        if self._device.type == "cuda":
            if step.prefill and self._timing and self._timing[-1][1] is None:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                start, _, tokens = self._timing.pop()
                self._timing.append((start, end, tokens))
            while self._timing and self._timing[0][1] is not None and self._timing[0][1].query():
                start, end, (new, cached) = self._timing.pop(0)
                self._store.namespace.observe_prefill(new, cached,
                                                      start.elapsed_time(end) / 1000)
        elif step.prefill:
            self._store.namespace.observe_prefill(*step.prefill,
                                                  time.monotonic() - self._step_began)

    def _reap_stores(self) -> None:
        for name in list(self._stores):
            left = []
            for request, what in self._stores[name]:
                if not request.wait(0):
                    left.append((request, what))
                    continue
                good = [code in _FINE for code in request.status()]
                request.close()
                self._counts.add(stored_blocks=sum(good), dropped_blocks=len(good) - sum(good))
                self._storing.subtract(what.pages)
                if what.told is not None:
                    from .events import stored
                    self._events += stored(what, good, self.model.groups[what.group].block_tokens)
            if left:
                self._stores[name] = left
            else:
                del self._stores[name]
        if not self._stores:
            self._storing.clear()
        else:
            self._storing = +self._storing

    def finished(self, ended: set[str], idle: bool) -> tuple[set[str], set[str]]:
        """(requests whose stores have ended, requests whose loads have ended). ended: requests that
        have come to their end; those with stores are named once no page of theirs is read."""
        if idle and self._loads:
            load = next(iter(self._loads.values()))
            for request, _ in load.parts[:1]:
                request.wait(_IDLE_WAIT)
        elif idle and self._stores and self._finishing:
            next(iter(self._stores.values()))[0][0].wait(_IDLE_WAIT)
        self._reap_stores()
        self._finishing |= ended & self._held
        sent = {name for name in self._finishing if name not in self._stores}
        self._finishing -= sent
        self._held -= sent
        received = set()
        for name in list(self._loads):
            load = self._loads[name]
            if self._load_ended(load):
                del self._loads[name]
                received.add(name)
                if self.model.one_chain:
                    self._invalid |= load.failed
                elif load.failed:
                    self._failed.add(name)
        return sent, received

    def take_failed(self) -> set[str]:
        """Requests whose loads have failed, of models of several groups, since the last call."""
        out, self._failed = self._failed, set()
        return out

    def take_events(self) -> list[Any]:
        """Events about what was stored since the last call."""
        out, self._events = self._events, []
        return out

    def take_invalid(self) -> set[int]:
        """Pages that were to be loaded and hold nothing, since the last call."""
        out, self._invalid = self._invalid, set()
        return out

    def close(self) -> None:
        """End what is in flight. Blocks until no page is read or written any more."""
        for load in self._loads.values():
            self._cancel(load)
        self._loads.clear()
        self._stores.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
