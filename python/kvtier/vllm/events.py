"""KV events: which blocks the store has taken, for vLLM's publisher (--kv-events-config).

A worker makes one BlockStored for each run of blocks that a request stored; the scheduler publishes
those that every rank has reported. Hashes and tokens are the engine's own, medium is "CPU": a block
is in DRAM when it is announced, and on disk some time later. What leaves the store is not announced
(there is no BlockRemoved): consumers take these events for hints, as a router does.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockStored, KVConnectorKVEvents, KVEventAggregator
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from .plan import Transfer

MEDIUM = "CPU"
_WAITING_MAX = 1 << 16  # events that not every rank has reported; a rank that drops a block never does


def enabled(vllm_config: Any) -> bool:
    """Whether the engine publishes events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(config is not None and config.enable_kv_cache_events)


def stored(what: Transfer, good: Sequence[bool], block_tokens: int) -> Iterable[BlockStored]:
    """Events about the blocks of a store; good: whether each is in the store now."""
    told = what.told
    if told is None:
        return
    start = 0
    while start < len(good):
        if not good[start]:
            start += 1
            continue
        end = start
        while end < len(good) and good[end]:
            end += 1
        parent = told.hashes[start - 1] if start else told.parent
        yield BlockStored(
            block_hashes=[maybe_convert_block_hash(h) for h in told.hashes[start:end]],
            parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
            token_ids=told.tokens[start * block_tokens:end * block_tokens],
            block_size=block_tokens, lora_id=told.lora_id, medium=MEDIUM, lora_name=told.lora_name,
            group_idx=what.group)
        start = end


class KvtierEvents(KVConnectorKVEvents):
    """Events of one step, on their way from the workers. Of the module: workers send it by
    pickle."""

    def __init__(self, events: list[Any], workers: int = 1) -> None:
        self._counted = KVEventAggregator(workers)
        self._counted.add_events(events)

    def add_events(self, events: list[Any]) -> None:
        self._counted.add_events(events)

    def aggregate(self) -> "KvtierEvents":
        common = self._counted.get_common_events()
        self._counted.clear_events()
        self._counted.add_events(common)
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._counted.increment_workers(count)

    def get_all_events(self) -> list[Any]:
        return self._counted.get_all_events()

    def get_number_of_workers(self) -> int:
        return self._counted.get_number_of_workers()

    def clear_events(self) -> None:
        self._counted.clear_events()


class Published:
    """The scheduler's end: counts how many ranks have reported an event, since their stores end in
    different steps, and gives out those that all have."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._seen: dict[Any, int] = {}
        self._ready: list[Any] = []

    def add(self, events: Any) -> None:
        """KvtierEvents of a step, of all ranks; anything else is not ours."""
        if not isinstance(events, KvtierEvents):
            return
        for event in events.get_all_events():
            count = self._seen.pop(event, 0) + 1
            if count < self._ranks:
                self._seen[event] = count
            else:
                self._ready.append(event)
        while len(self._seen) > _WAITING_MAX:
            del self._seen[next(iter(self._seen))]

    def take(self) -> list[Any]:
        """What is ready since the last call."""
        out, self._ready = self._ready, []
        return out
