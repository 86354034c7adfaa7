"""vLLM: `KvtierConnector` remembers KV blocks in DRAM and on disk, across restarts of the engine.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"dram": "64GiB", "disk": "/nvme/kv:500GiB"}}'

connector.py   the class that vLLM makes, once in the scheduler and once in each worker
scheduler.py   what to load and what to store: keys, look-ups, plans
worker.py      pools over the engine's tensors, loads and stores in flight
pages.py       where the engine keeps which element, found out and then proved by writing and reading
identity.py    whose cache it is: weights, adapters, hashes
settings.py    kv_connector_extra_config
events.py      KV events: what the store has taken, for routers
stats.py       counters for vLLM's log and /metrics

Nothing of vLLM is imported before `KvtierConnector` is asked for.
"""
from __future__ import annotations

from typing import Any

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvtierConnector":
        from .connector import KvtierConnector
        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
