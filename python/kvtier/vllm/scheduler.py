"""The scheduler's half: which blocks of a prompt are worth loading, and which to store.

A block's key is vLLM's own chained hash of it, which covers tokens, images, adapter name and
cache_salt; for requests with an adapter a digest of the adapter's weights is mixed in. Each group of
layers (full attention, sliding windows) has a block table and a chain of its own; a hit ends where a
block of each ends. In a pipeline it is what every stage has. Threads: the engine's scheduler thread alone.
"""
from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._errors import KvtierError
from ..cache import Namespace
from ..layout import GroupKind, Keys, Tier
from .identity import Adapters
from .pages import Model
from .plan import Step, Told, Transfer
from .stats import Counts
from .store import Store, stages_of

_log = logging.getLogger("vllm.kvtier")
_ANSWER_SECONDS = 0.25  # how long an answer to the same question is good
_STAGES_SECONDS = 30.0  # that prompts wait for the workers of a pipeline to tell what they hold
_NOTHING = 0            # number of the page that vLLM's tables hold where there is none


@dataclass
class _Chain:
    """A request's blocks of one group."""

    hashes: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    stored: int = 0  # blocks [0, stored) are in the store, on their way, or not to be had


@dataclass
class _Hit:
    """What a prompt can load: `tokens` from its start on. tiers: of the first full group's blocks
    behind those that the engine has; roots: what they are on, where that is known."""

    tokens: int = 0
    tiers: Sequence[int] = ()
    roots: Sequence[int] = ()


@dataclass
class _Request:
    """What is known of a request of the engine."""

    request: Any
    adapter: bytes
    chains: list[_Chain]
    asked: tuple[int, float, int] | None = None   # (computed tokens, when, answer)
    hit: _Hit = field(default_factory=_Hit)
    end: int = 0              # tokens that are computed, or being loaded, as far as is known
    sent: bool = False        # some block was handed to the worker to be stored
    loading: bool = False
    failed: bool = False      # a load of it came to nothing: it is computed


def _behind(found: Sequence[int], first: int, count: int) -> Sequence[int]:
    """found[first:first + count] of a ctypes array, in the same memory."""
    if not count or not found:
        return ()
    kind = found._type_
    return (kind * count).from_buffer(found, first * ctypes.sizeof(kind))


def hash_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of each of a request's block hashes."""
    try:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
        return resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
    except ImportError:  # one group: a hash a block
        return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


class Scheduler:
    """See the file's head. ranks: shards of each block; events: tell what is stored; stages: of the
    pipeline."""

    def __init__(self, model: Model, hash_tokens: int, ranks: int, store: Store, counts: Counts,
                 events: bool, stages: int = 1) -> None:
        self._store, self._counts, self._events, self._ranks = store, counts, events, ranks
        self._groups = model.groups
        self._full = next(g for g in model.groups if g.kind == GroupKind.FULL)
        self._block = self._full.block_tokens
        self._step_tokens = math.lcm(*(g.block_tokens for g in model.groups))
        self._per_block = [max(1, g.block_tokens // hash_tokens) for g in model.groups]
        self._adapters = Adapters()
        self._requests: dict[str, _Request] = {}
        self._loads: list[Transfer] = []
        self._cancelled: list[str] = []
        self._stage_count, self._asking = stages, stages > 1
        self._asked_since: float | None = None
        self._stages: dict[tuple[int, int], Model] = {}

    # ---- the stages of a pipeline ----

    def told_stages(self, told: Mapping[tuple[int, int], Model]) -> None:
        """What workers hold, by (stage, rank). Where the stages cannot be asked together nothing is
        found, and the log says why: the engine is running by now."""
        self._stages.update(told)
        if not self._asking or len({stage for stage, _ in self._stages}) < self._stage_count:
            return
        self._asking = False
        try:
            self._store.open_stages(stages_of(self._stages, self._stage_count))
        except KvtierError as error:
            _log.error("kvtier: nothing will be found for this pipeline: %s", error)

    def _must_wait(self) -> bool:
        """Whether a prompt is to be asked about again, since the first step has not told yet."""
        if not self._asking:
            return False
        now = time.monotonic()
        self._asked_since = self._asked_since or now
        return now - self._asked_since < _STAGES_SECONDS

    # ---- keys ----

    def _state(self, request: Any) -> _Request | None:
        state = self._requests.get(request.request_id)
        if state is None:
            adapter = self._adapters.digest(getattr(request, "lora_request", None))
            if adapter is None:
                return None
            state = self._requests[request.request_id] = _Request(
                request, adapter, [_Chain() for _ in self._groups])
        self._update_hashes(state)
        return state

    def _update_hashes(self, state: _Request) -> None:
        theirs = state.request.block_hashes
        for chain, step in zip(state.chains, self._per_block):
            have = len(chain.hashes)
            if have >= len(theirs) // step:
                continue
            fresh = theirs[(have + 1) * step - 1::step]
            if state.adapter:
                fresh = [hashlib.sha256(bytes(h) + state.adapter).digest() for h in fresh]
            chain.hashes += fresh

    # ---- what vLLM asks ----

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens behind `computed` that are worth loading; None: ask again in the next step.
        Repeated questions change nothing."""
        state = self._state(request)
        if state is None or state.failed or computed % self._step_tokens:
            return 0
        if self._must_wait():
            return None
        now = time.monotonic()
        if state.asked and state.asked[0] == computed and now - state.asked[1] < _ANSWER_SECONDS:
            return state.asked[2]
        again = state.asked is not None and state.asked[0] == computed
        try:
            answer = self._decide(state, computed, again)
        except KvtierError as error:
            _log.warning("kvtier: a look-up failed, the prompt is computed: %s", error)
            answer = 0
        state.asked = (computed, now, answer)
        return answer

    def _look_up(self, state: _Request, computed: int, most: int) -> _Hit:
        """What every rank of every stage has of the prompt's first `most` tokens."""
        stages = self._store.stages
        if not stages or most < self._step_tokens:
            return _Hit()
        while True:
            found = [self._ask(stage, state, most) for stage in stages]
            tokens = min(hit.tokens for hit in found)
            if not tokens:
                return _Hit()
            # a shorter hit may need other blocks of a window: those that had more say so
            if len(self._groups) == 1 or all(hit.tokens == tokens for hit in found):
                break
            most = tokens
        first = computed // self._block
        count = max(0, tokens // self._block - first)
        tiers = [_behind(hit.tiers, first, count) for hit in found]
        if len(tiers) > 1:
            return _Hit(tokens, [max(of) for of in zip(*tiers)])
        return _Hit(tokens, tiers[0], _behind(found[0].roots, first, count))

    def _ask(self, stage: Namespace, state: _Request, most: int) -> _Hit:
        """Of one stage, with the tiers of all of the full group's blocks."""
        usable = [chain.hashes[:most // group.block_tokens]
                  for chain, group in zip(state.chains, self._groups)]
        if len(usable) == 1:
            found = stage.lookup(Keys.from_hashes(usable[0]), shards=self._ranks,
                                 prompt_tokens=state.request.num_tokens)
            return _Hit(found.n * self._block, found.tiers, found.roots)
        tiers: dict[int, Sequence[int]] = {}
        tokens, _ = stage.lookup_groups(
            {g.group: Keys.from_hashes(hashes, g.group) for g, hashes in zip(self._groups, usable)},
            most, shards=self._ranks, prompt_tokens=state.request.num_tokens, tiers=tiers)
        return _Hit(tokens, tiers[self._full.group])

    def _decide(self, state: _Request, computed: int, again: bool) -> int:
        tokens = state.request.num_tokens
        hit = state.hit = self._look_up(state, computed, max(0, tokens - 1))
        for chain, group in zip(state.chains, self._groups):
            chain.stored = hit.tokens // group.block_tokens
        found = max(0, hit.tokens - computed)
        if not again:
            self._counts.add(lookups=1, asked_tokens=max(0, tokens - computed), found_tokens=found)
        if not found:
            return 0
        plan = self._store.namespace.plan(hit.tiers, first_tokens=computed, prompt_tokens=tokens,
                                          group=self._full.group, roots=hit.roots)
        loaded = plan.count * self._block if plan.first == 0 else 0
        if loaded and computed + loaded < hit.tokens:
            state.hit = self._look_up(state, computed, computed + loaded)
            loaded = max(0, state.hit.tokens - computed)
        if not again:
            self._counts.add(planned_tokens=loaded, declined_tokens=found - loaded)
        return loaded

    def allocated(self, request: Any, pages: Sequence[Sequence[int]], external: int) -> None:
        """Pages of the request as they are now; external: tokens to be loaded into them."""
        state = self._state(request)
        if state is None:
            return
        for chain, table in zip(state.chains, pages):
            chain.pages = list(table)
        if not external:
            return
        start = state.asked[0] if state.asked else 0
        state.end, state.loading = start + external, True
        for group, chain in zip(self._groups, state.chains):
            first, last = start // group.block_tokens, state.end // group.block_tokens
            blocks = [i for i in range(first, min(last, len(chain.hashes), len(chain.pages)))
                      if group.kind == GroupKind.FULL or chain.pages[i] != _NOTHING]
            if blocks:  # of a window: those that its table has pages for
                self._loads.append(Transfer(request.request_id, [chain.hashes[i] for i in blocks],
                                            [chain.pages[i] for i in blocks], blocks[0],
                                            group=group.group))

    def sources(self, request: Any, external: int) -> tuple[int, int, int]:
        """Of `external` tokens about to be loaded: (from DRAM, from disk, from elsewhere)."""
        state = self._requests.get(request.request_id)
        tiers = state.hit.tiers[:external // self._block] if state else []
        dram = sum(tier == Tier.DRAM for tier in tiers) * self._block
        remote = sum(tier == Tier.REMOTE for tier in tiers) * self._block
        return dram, external - dram - remote, remote

    def failed(self, names: set[str]) -> None:
        """Loads of requests that came to nothing at all: they are computed."""
        for name in names:
            if name in self._requests:
                self._requests[name].failed = True

    def step(self, output: Any) -> Step:
        """What the workers have to do in this step."""
        step = Step(loads=self._loads, cancelled=self._cancelled,
                    idle=output.total_num_scheduled_tokens == 0, ask=self._asking)
        self._loads, self._cancelled = [], []
        for new in output.scheduled_new_reqs:
            self._scheduled(step, output, new.req_id, new.block_ids, True, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            self._scheduled(step, output, name, cached.new_block_ids[i],
                            name in cached.resumed_req_ids, cached.num_computed_tokens[i])
        if len(output.num_scheduled_tokens) == 1 and not step.loads:
            (name, new), = output.num_scheduled_tokens.items()
            state = self._requests.get(name)
            if state and new > 1:
                step.prefill = (new, self._computed(output, name))
        return step

    @staticmethod
    def _computed(output: Any, name: str) -> int:
        for new in output.scheduled_new_reqs:
            if new.req_id == name:
                return new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        return cached.num_computed_tokens[cached.req_ids.index(name)]

    def _scheduled(self, step: Step, output: Any, name: str, pages: Any, all_pages: bool,
                   computed: int) -> None:
        """Note the pages of a request that runs in this step, and store what it fills."""
        state = self._requests.get(name)
        if state is None:
            return
        state.loading = False
        again = computed < state.end  # computed anew: a load has failed, or pages were taken away
        state.end = computed + output.num_scheduled_tokens[name]
        self._update_hashes(state)
        for i, (group, chain) in enumerate(zip(self._groups, state.chains)):
            filled = computed // group.block_tokens
            fresh = list(pages[i]) if pages else []
            had = filled if all_pages else len(chain.pages)
            chain.pages = fresh if all_pages else chain.pages + fresh
            step.new_pages += chain.pages[had:]
            if again:
                chain.stored = min(chain.stored, filled)
            if group.kind != GroupKind.FULL and not all_pages:
                chain.stored = max(chain.stored, filled)  # pages behind a window may be others'
            self._store_filled(step, state, name, group, chain)

    def _store_filled(self, step: Step, state: _Request, name: str, group: Any,
                      chain: _Chain) -> None:
        full = min(len(chain.hashes), len(chain.pages), state.end // group.block_tokens)
        first = chain.stored
        while group.kind != GroupKind.FULL and first < full and chain.pages[first] == _NOTHING:
            first += 1
        if full > first:
            told = self._tell(state, group, first, full) if self._events else None
            step.stores.append(Transfer(name, chain.hashes[first:full], chain.pages[first:full],
                                        first, chain.hashes[first - 1] if first else None,
                                        group.group, told))
            chain.stored, state.sent = full, True

    def _tell(self, state: _Request, group: Any, first: int, last: int) -> Told:
        request, per_block = state.request, self._per_block[group.group]
        theirs = request.block_hashes[per_block - 1::per_block]
        lora = getattr(request, "lora_request", None)
        return Told(list(theirs[first:last]), theirs[first - 1] if first else None,
                    list(request.all_token_ids[first * group.block_tokens:
                                               last * group.block_tokens]),
                    getattr(lora, "adapter_id", None), getattr(lora, "name", None))

    def ended(self, request: Any) -> bool:
        """A request has ended. True: its pages are still read, the worker says when they are not."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        if state.loading:
            self._cancelled.append(request.request_id)
        return state.sent
