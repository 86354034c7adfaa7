"""The cache behind the connectors of one process: opened once, shared by scheduler and worker.

vLLM makes a connector for its scheduler and one for each worker. Where both live in one process
(one GPU, or a CPU) they share an in-process store; a worker in a process of its own needs kvtierd,
as two processes cannot own one directory. The stages of a pipeline have other layers each, and so a
namespace each; the scheduler asks all of them (Store.stages).
"""
from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    pages, or for ever where the engine is not supported by the library; of a worker that of its own
    stage. stages: those that hold a block together, in the order of the pipeline."""

    cache: Cache
    identity: Any
    key: tuple
    users: int = 0
    namespace: Namespace | None = None
    stages: tuple[Namespace, ...] = ()
    model: Model | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open_namespace(self, model: Model) -> Namespace:
        """The namespace for a layout, the same object for every caller in the process."""
        with self.lock:
            if self.namespace is None or self.model != model:
                self.namespace = self.cache.namespace(self.identity, model.layout)
                self.stages, self.model = (self.namespace,), model
            return self.namespace

    def open_stages(self, models: Sequence[Model]) -> None:
        """The namespaces of a pipeline, from what each stage holds (stages_of())."""
        with self.lock:
            self.stages = tuple(
                self.cache.namespace(replace(self.identity, pp_rank=rank), model.layout)
                for rank, model in enumerate(models))
            self.namespace, self.model = self.stages[0], models[0]

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


def stages_of(told: Mapping[tuple[int, int], Model], count: int) -> list[Model]:
    """What each of `count` stages holds, from what their workers told: {(stage, rank): Model}.
    UnsupportedError: they cannot be asked together."""
    models = []
    for stage in range(count):
        of_stage = [model for (number, _), model in sorted(told.items(), key=lambda item: item[0])
                    if number == stage]
        if not of_stage:
            raise UnsupportedError(f"kvtier: stage {stage} of the pipeline did not tell which layers "
                                   "it holds")
        if any(model.layout != of_stage[0].layout for model in of_stage):
            raise UnsupportedError(f"kvtier: the ranks of stage {stage} lay their pages out "
                                   'differently; set "pages": "opaque" in '
                                   "kv_connector_extra_config")
        models.append(of_stage[0])
    if any(model.groups != models[0].groups for model in models):
        raise UnsupportedError("kvtier: the stages of the pipeline group their layers differently")
    return models


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
    if settings.daemon and vllm_config.parallel_config.pipeline_parallel_size == 1:
        store.open_namespace(model_of(kv_cache_config, settings.opaque))
    return store
