"""The cache behind the connectors of one process: opened once, shared by scheduler and worker.

vLLM makes a connector for its scheduler and one for each worker. Where both live in one process
(one GPU, or a CPU) they share an in-process store; a worker in a process of its own needs kvtierd,
as two processes cannot own one directory.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ..cache import Cache, Namespace
from .._errors import UnsupportedError
from .identity import identity_of, weights_digest
from .pages import Model, model_of
from .settings import Settings

_lock = threading.Lock()
_stores: dict[tuple, "Store"] = {}


@dataclass
class Store:
    """A cache and the namespace of the engine. namespace: None until a worker has registered its
    pages, or for ever where the engine is not supported by the library."""

    cache: Cache
    identity: Any
    key: tuple
    users: int = 0
    namespace: Namespace | None = None
    model: Model | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open_namespace(self, model: Model) -> Namespace:
        """The namespace for a layout, the same object for every caller in the process."""
        with self.lock:
            if self.namespace is None or self.model != model:
                self.namespace = self.cache.namespace(self.identity, model.layout)
                self.model = model
            return self.namespace

    def release(self) -> None:
        """One user less; the last one closes the cache, which writes what is queued."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            _stores.pop(self.key, None)
        self.cache.close()


def check_processes(vllm_config: Any, settings: Settings) -> None:
    """UnsupportedError: an engine whose processes cannot share the store as configured."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            "kvtier: pipeline parallel engines are not supported: a block is there when every "
            "stage has its layers, and the scheduler is told the layers of one stage alone. Use "
            "--tensor-parallel-size, with kvtierd")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"kvtier: {name} above 1 is not supported")
    if parallel.world_size > 1 and not settings.load_async:
        raise UnsupportedError(
            f"kvtier: load={settings.load} is for engines of one rank: a rank whose load fails in "
            "the middle of a step cannot tell the others not to store what they computed from it")
    if settings.daemon:
        return
    backend = str(parallel.distributed_executor_backend or "uni")
    if parallel.world_size > 1 or backend not in ("uni", "UniProcExecutor"):
        raise UnsupportedError(
            f"kvtier: this engine has workers in processes of their own (executor {backend}, "
            f"{parallel.world_size} ranks), which share a store through kvtierd: start it, and set "
            '"store": "unix:/run/kvtier.sock" in kv_connector_extra_config instead of dram and '
            "disk")


def open_store(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Store:
    """The store of this process for an engine; release() it. Raises what Cache() raises."""
    check_processes(vllm_config, settings)
    digest = weights_digest(vllm_config, settings.weights_digest)
    identity = identity_of(vllm_config, digest, settings.salt)
    key = (tuple(sorted((k, str(v)) for k, v in settings.options.items())), identity)
    with _lock:
        store = _stores.get(key)
        if store is None:
            store = _stores[key] = Store(Cache(settings.options), identity, key)
        store.users += 1
    if settings.daemon:
        store.open_namespace(model_of(kv_cache_config, settings.opaque))
    return store
