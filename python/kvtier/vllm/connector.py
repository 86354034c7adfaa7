"""The class that vLLM makes: hands each call to the half that it is about."""
from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1,
                                                               KVConnectorMetadata,
                                                               KVConnectorRole, SupportsHMA)

from . import settings as settings_module
from .plan import Step
from .scheduler import Scheduler
from .stats import Counts, KvtierPromMetrics, KvtierStats
from .store import open_store
from .worker import Worker

_log = logging.getLogger("vllm.kvtier")


class KvtierMetadata(KVConnectorMetadata):
    """A step's work on its way from the scheduler to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """See kvtier.vllm. A failure of the cache is a miss and a counter, never a failed step."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings_module.parse(transfer.kv_connector_extra_config)
        if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
            raise ValueError('kvtier: set "kv_load_failure_policy": "recompute" in '
                             "--kv-transfer-config: a block that was evicted between look-up and "
                             "load is computed then, instead of failing the request")
        self._counts = Counts()
        self._store = open_store(vllm_config, kv_cache_config, self._settings)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(vllm_config, kv_cache_config, self._store, self._counts,
                                        self._settings.load_async)
        else:
            self._worker = Worker(vllm_config, kv_cache_config, self._settings, self._store,
                                  self._counts)

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
        self._worker.load(self._step(), not self._settings.load_async)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the layers that read them run: nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any,
                      **kwargs: Any) -> None:
        """Blocks are stored whole, after the pass."""

    def wait_for_save(self) -> None:
        self._worker.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        idle = self.has_connector_metadata() and self._step().idle
        sent, received = self._worker.finished(finished_req_ids, idle)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid()

    def get_kv_connector_stats(self) -> Any:
        taken = self._counts.take()
        return KvtierStats(data=taken) if taken else None

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
        return tokens, self._settings.load_async and tokens > 0

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
        dram, disk = self._scheduler.sources(request, num_external_tokens)
        return {source: tokens for source, tokens in
                ((CacheHitSource.HOST, dram), (CacheHitSource.DISK, disk)) if tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KvtierMetadata(self._scheduler.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict | None]:
        return self._scheduler.ended(request), None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict | None]:
        return self._scheduler.ended(request), None

    def reset_cache(self) -> bool | None:
        """Forget every block of this model, in every tier."""
        if self._store.namespace is None:
            return False
        self._store.namespace.purge()
        return True

    # ---- metrics ----

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return KvtierStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: Any,
                           per_engine_labelvalues: Any) -> Any:
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
