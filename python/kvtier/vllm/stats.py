"""Counters of the connector: for vLLM's periodic log line and its /metrics."""
from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (KVConnectorPromMetrics,
                                                                  KVConnectorStats)

COUNTERS = {
    "lookups": "Look-ups of prompts",
    "asked_tokens": "Tokens of prompts that the engine did not hold itself",
    "found_tokens": "Tokens of those that the store held",
    "planned_tokens": "Tokens of those that were worth loading",
    "declined_tokens": "Tokens of those that were quicker to compute",
    "loaded_blocks": "Blocks loaded into the engine's pages",
    "loaded_dram_blocks": "Blocks loaded from DRAM",
    "loaded_disk_blocks": "Blocks loaded from disk",
    "loaded_remote_blocks": "Blocks loaded from the tier that machines share",
    "failed_blocks": "Blocks that were found but could not be loaded, and were computed",
    "stored_blocks": "Blocks handed to the store",
    "dropped_blocks": "Blocks that the store had no room or time for",
    "load_seconds": "Seconds that loads took, summed over requests",
    "loads": "Requests that loaded blocks",
    "store_waits": "Steps that waited for a store, because its pages were handed out again",
}


class Counts(dict):
    """Numbers by name, all of COUNTERS, at 0 to begin with."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COUNTERS, 0))

    def add(self, **more: float) -> None:
        for name, value in more.items():
            self[name] += value

    def take(self) -> dict[str, float]:
        """What was counted since the last call, without zeros."""
        out = {name: value for name, value in self.items() if value}
        for name in out:
            self[name] = 0
        return out


class KvtierStats(KVConnectorStats):
    """Sums of one interval. Of the module, not of a function: workers send it by pickle."""

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: Any) -> Any:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in self.data.items()}


class KvtierPromMetrics(KVConnectorPromMetrics):
    """vllm:kvtier_<name>_total, one counter for each of COUNTERS."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kvtier_{name}", documentation=text,
                                        labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values
                                    in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
