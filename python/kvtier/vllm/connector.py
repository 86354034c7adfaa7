"""The class that vLLM makes: hands each call to the half that it is about."""
from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole, SupportsHMA)

from .. import _vllm_names
from .._errors import UnsupportedError
from . import events
from . import settings as settings_module
from .identity import stage_and_rank
from .pages import ONE_GROUP, Model, model_of
from .plan import Step
from .scheduler import Scheduler, hash_tokens
from .stats import Counts, KvtierPromMetrics, KvtierStats
from .store import open_store
from .worker import Worker

_vllm_names.register("KvtierConnector", "kvtier.vllm")

# Not in every version: how a worker names requests whose loads failed, where pages do not.
_TransferResults = getattr(base, "KVConnectorTransferResults", None)


# Nor what workers say to the scheduler in a step: what each stage of a pipeline holds. Each
# connector below MultiConnector has its own there; a handshake when the engine starts would be the
# first connector's alone, and come to all of them.
_WorkerMetadata = getattr(base, "KVConnectorWorkerMetadata", None)


class KvtierMetadata(KVConnectorMetadata):
    """A step's work on its way from the scheduler to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class KvtierStages(_WorkerMetadata or object):
    """What workers of a pipeline hold, by (stage, rank), on its way to the scheduler."""

    def __init__(self, told: dict[tuple[int, int], Model]) -> None:
        self.told = told

    def aggregate(self, other: Any) -> "KvtierStages":
        return KvtierStages({**self.told, **other.told})


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """See kvtier.vllm. A failure of the cache is a miss and a counter, never a failed step."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings_module.parse(transfer.kv_connector_extra_config)
        settings_module.recompute_failed_loads(transfer)
        parallel = vllm_config.parallel_config
        self._stages, self._place = parallel.pipeline_parallel_size, stage_and_rank(parallel)
        model = model_of(kv_cache_config, self._settings.opaque)
        self._check_model(model)
        self._events = events.enabled(vllm_config)
        self._counts = Counts()
        self._store = open_store(vllm_config, kv_cache_config, self._settings)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            ranks = parallel.tensor_parallel_size
            self._scheduler = Scheduler(model, hash_tokens(vllm_config, kv_cache_config),
                                        0 if model.replicated else ranks, self._store,
                                        self._counts, self._events, self._stages)
            self._published = events.Published(parallel.world_size)
        else:
            self._worker = Worker(vllm_config, kv_cache_config, self._settings, self._store,
                                  self._counts)

    def _check_model(self, model: Model) -> None:
        if self._stages > 1 and _WorkerMetadata is None:
            raise UnsupportedError(
                "kvtier: this version of vLLM does not tell the scheduler which layers each stage of "
                "a pipeline holds; 0.25.0 and later do. Use --tensor-parallel-size")
        if not model.one_chain and _TransferResults is None:
            raise UnsupportedError(
                "kvtier: this version of vLLM cannot compute a prompt whose load has failed when "
                f"layers are in {len(model.groups)} groups; 0.30.0 and later can. {ONE_GROUP}")
        if not model.one_chain and not self._settings.load_async:
            raise UnsupportedError(f"kvtier: load={self._settings.load} is for models whose layers "
                                   f"are in one group; {ONE_GROUP}")

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what could not be stored is a miss later."""
        return False

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata.step)

    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        return metadata.step

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Of load=layers; other loads are complete before the layers that read them run."""
        self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any,
                      **kwargs: Any) -> None:
        """Blocks are stored whole, after the pass."""

    def wait_for_save(self) -> None:
        self._worker.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        idle = self.has_connector_metadata() and self._step().idle
        sent, received = self._worker.finished(finished_req_ids, idle)
        return sent or None, received or None

    if _TransferResults is not None:
        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            sent, received = self.get_finished(finished_req_ids)
            return _TransferResults(finished_sending=sent or set(), finished_recving=received or
                                    set(), failed_recving=self._worker.take_failed())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid()

    def build_connector_worker_meta(self) -> Any:
        """For the scheduler of a pipeline, until it knows."""
        return KvtierStages({self._place: self._worker.model}) if self._step().ask else None

    def get_kv_connector_stats(self) -> Any:
        taken = self._counts.take()
        return KvtierStats(data=taken) if taken else None

    def get_kv_connector_kv_cache_events(self) -> Any:
        taken = self._worker.take_events()
        return events.KvtierEvents(taken) if taken else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of the whole pass would not wait for each layer. vLLM asks when it looks its
        configuration over, before anything is loaded: options that make no sense are told here."""
        return settings_module.parse(extra_config).load == "layers"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any. Without graphs this is the first question, after the weights have been loaded and
        before memory is measured: options that make no sense are told here."""
        settings_module.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().get_required_kvcache_layout(vllm_config)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._store is not None:
            self._store.release()
            self._store = None

    # ---- scheduler ----

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, self._settings.load_async and bool(tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
        known = (CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.EXTERNAL_UNSPECIFIED)
        return {source: tokens for source, tokens in
                zip(known, self._scheduler.sources(request, num_external_tokens)) if tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KvtierMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.failed(getattr(connector_output, "failed_recving", None) or set())
        stages = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(stages, KvtierStages):
            self._scheduler.told_stages(stages.told)
        self._published.add(connector_output.kv_cache_events)

    def take_events(self) -> Any:
        return self._published.take()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict | None]:
        return self._scheduler.ended(request), None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict | None]:
        return self._scheduler.ended(request), None

    def reset_cache(self) -> bool | None:
        """Forget every block of this model, in every tier."""
        if self._store.namespace is None:
            return False
        for namespace in self._store.stages:
            namespace.purge()
        return True

    # ---- metrics ----

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return KvtierStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any,
                           per_engine_labelvalues: Any) -> Any:
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
