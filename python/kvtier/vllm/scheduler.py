"""The scheduler's half: which blocks of a prompt are worth loading, and which to store.

A block's key is vLLM's own chained hash of it, which covers tokens, images, adapter name and
cache_salt; for requests with an adapter a digest of the adapter's weights is mixed in.
Threads: the engine's scheduler thread alone.
"""
from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from .._errors import KvtierError
from ..layout import Keys, Tier
from .identity import Adapters
from .plan import Step, Transfer
from .stats import Counts
from .store import Store

_log = logging.getLogger("vllm.kvtier")
_ANSWER_SECONDS = 0.25  # how long an answer to the same question is good


@dataclass
class _Request:
    """What is known of a request of the engine."""

    request: Any
    adapter: bytes
    hashes: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    stored: int = 0           # blocks [0, stored) are in the store or on their way
    asked: tuple[int, float, int] | None = None   # (computed tokens, when, answer)
    tiers: list[int] = field(default_factory=list)
    first: int = 0            # block that tiers[0] is about
    sent: bool = False        # some block was handed to the worker to be stored
    loading: bool = False


class Scheduler:
    """See the file's head."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, store: Store, counts: Counts,
                 load_async: bool) -> None:
        self._store, self._counts, self._async = store, counts, load_async
        group = kv_cache_config.kv_cache_groups[0]
        self._block = group.kv_cache_spec.block_size
        hashed = getattr(kv_cache_config, "hash_block_size", None) or \
            getattr(vllm_config.cache_config, "hash_block_size", None) or self._block
        self._per_block = max(1, self._block // hashed)
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._adapters = Adapters()
        self._requests: dict[str, _Request] = {}
        self._loads: list[Transfer] = []
        self._cancelled: list[str] = []

    # ---- keys ----

    def _state(self, request: Any) -> _Request | None:
        state = self._requests.get(request.request_id)
        if state is None:
            adapter = self._adapters.digest(getattr(request, "lora_request", None))
            if adapter is None:
                return None
            state = self._requests[request.request_id] = _Request(request, adapter)
        self._update_hashes(state)
        return state

    def _update_hashes(self, state: _Request) -> None:
        theirs, step = state.request.block_hashes, self._per_block
        for i in range(len(state.hashes), len(theirs) // step):
            value = bytes(theirs[(i + 1) * step - 1])
            if state.adapter:
                value = hashlib.sha256(value + state.adapter).digest()
            state.hashes.append(value)

    def _look_up(self, state: _Request, usable: int) -> list[int]:
        """Tiers of the leading blocks that every rank has, up to `usable`."""
        namespace = self._store.namespace
        if namespace is None or usable == 0:
            return []
        found = namespace.lookup(Keys.from_hashes(state.hashes[:usable]),
                                 shards=0 if self._store.model.replicated else self._ranks,
                                 prompt_tokens=state.request.num_tokens)
        return list(found.tiers[:found.n])

    # ---- what vLLM asks ----

    def matched(self, request: Any, computed: int) -> int:
        """Tokens behind `computed` that are worth loading. Repeated questions change nothing."""
        state = self._state(request)
        if state is None or computed % self._block:
            return 0
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

    def _decide(self, state: _Request, computed: int, again: bool) -> int:
        tokens = state.request.num_tokens
        usable = min(len(state.hashes), max(0, tokens - 1) // self._block)
        tiers = self._look_up(state, usable)
        first = computed // self._block
        state.stored, state.tiers, state.first = len(tiers), tiers[first:], first
        if not again:
            self._counts.add(lookups=1, asked_tokens=max(0, tokens - computed),
                             found_tokens=len(state.tiers) * self._block)
        if not state.tiers:
            return 0
        plan = self._store.namespace.plan(state.tiers, first_tokens=computed, prompt_tokens=tokens)
        loaded = plan.count if plan.first == 0 else 0
        if not again:
            self._counts.add(planned_tokens=loaded * self._block,
                             declined_tokens=(len(state.tiers) - loaded) * self._block)
        return loaded * self._block

    def allocated(self, request: Any, pages: list[int], external: int) -> None:
        """Pages of the request as they are now; external: tokens to be loaded into them."""
        state = self._state(request)
        if state is None:
            return
        state.pages = list(pages)
        if not external:
            return
        first = state.first
        last = first + external // self._block
        if last > len(state.hashes) or last > len(pages):
            _log.warning("kvtier: %d tokens to load for %d hashes and %d pages", external,
                         len(state.hashes), len(pages))
        self._loads.append(Transfer(request.request_id, state.hashes[first:last],
                                    state.pages[first:last], first))
        state.loading = True

    def sources(self, request: Any, external: int) -> tuple[int, int]:
        """(tokens from DRAM, tokens from disk) of `external` tokens about to be loaded."""
        state = self._requests.get(request.request_id)
        tiers = state.tiers[:external // self._block] if state else []
        dram = sum(tier == Tier.DRAM for tier in tiers) * self._block
        return dram, external - dram

    def step(self, output: Any) -> Step:
        """What the workers have to do in this step."""
        step = Step(loads=self._loads, cancelled=self._cancelled,
                    idle=output.total_num_scheduled_tokens == 0)
        self._loads, self._cancelled = [], []
        for new in output.scheduled_new_reqs:
            self._scheduled(step, output, new.req_id, list(new.block_ids[0]), True,
                            new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            pages = cached.new_block_ids[i]
            self._scheduled(step, output, name, list(pages[0]) if pages else [],
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

    def _scheduled(self, step: Step, output: Any, name: str, pages: list[int], all_pages: bool,
                   computed: int) -> None:
        """Note the pages of a request that runs in this step, and store what it fills."""
        state = self._requests.get(name)
        if state is None:
            return
        had = computed // self._block if all_pages else len(state.pages)
        state.pages = pages if all_pages else state.pages + pages
        step.new_pages += state.pages[had:]
        state.loading = False
        self._update_hashes(state)
        full = min(len(state.hashes), len(state.pages),
                   (computed + output.num_scheduled_tokens[name]) // self._block)
        if full > state.stored:
            first = state.stored
            step.stores.append(Transfer(name, state.hashes[first:full], state.pages[first:full],
                                        first, state.hashes[first - 1] if first else None))
            state.stored, state.sent = full, True

    def ended(self, request: Any) -> bool:
        """A request has ended. True: its pages are still read, the worker says when they are not."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        if state.loading:
            self._cancelled.append(request.request_id)
        return state.sent
