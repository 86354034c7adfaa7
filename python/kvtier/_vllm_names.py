"""What vLLM, above all its tiering manager, calls things in the version that is installed: the one
place that knows its releases apart (0.25 and later).

    older                                newer
    JobMetadata.block_ids                TransferJob.chunk_ids
    lookup() -> bool or None             lookup() -> LookupResult
    get_finished()                       get_finished_jobs()
    request_finished()                   on_request_finished()
    get_request_offloading_context()     on_new_request()
    JobResult(job_id, success)           ... successful_keys, transfer_time, transfer_bytes
    spec.vllm_config                     spec.config (OffloadingConfig)
"""
from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ._errors import ErrorCode, UnsupportedError

TIERING = "vllm.v1.kv_offload.tiering.base"
BASE = "vllm.v1.kv_offload.base"
STATS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


def modules() -> tuple[ModuleType, ModuleType]:
    """(base of the tiers, base of the offloading); UnsupportedError: this vLLM has no tiers."""
    import importlib
    try:
        return importlib.import_module(TIERING), importlib.import_module(BASE)
    except ImportError as error:
        try:
            import vllm
            version = vllm.__version__
        except Exception:
            version = "none"
        raise UnsupportedError(
            f"kvtier.vllm_tier needs the tiering manager of vLLM 0.25 or later; found {version} "
            f"({error})", ErrorCode.UNSUPPORTED) from error


def register(name: str, module: str) -> None:
    """Tell vLLM a connector's class by its name: below MultiConnector its counters are read by it,
    wherever the configuration says that the class is."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    try:
        KVConnectorFactory.register_connector(name, module, name)
    except ValueError:  # it is known already
        pass


class Names:
    """The adapter of names. tiering, base: the two modules, or what stands for them in a test."""

    def __init__(self, tiering: Any, base: Any) -> None:
        self._tiering, self._base = tiering, base
        answer = str(inspect.signature(tiering.SecondaryTierManager.lookup).return_annotation)
        results = getattr(base, "LookupResult", None)
        if results is not None and "LookupResult" in answer:
            self.hit, self.miss = results.HIT, results.MISS
        else:
            self.hit, self.miss = True, False
        self.medium = getattr(getattr(base, "Medium", None), "STORAGE", None)
        self._context = base.RequestOffloadingContext
        self._fields = {field.name for field in dataclasses.fields(tiering.JobResult)}
        self._counter = getattr(base, "OffloadingCounterMetadata", None)

    @staticmethod
    def pages(job: Any) -> list[int]:
        """Page numbers of a job."""
        ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        return [int(number) for number in ids]

    def context(self) -> Any:
        """The answer to a new request: nothing special."""
        return self._context()

    def result(self, job_id: int, keys: Sequence[bytes], good: Sequence[bool], load: bool,
               seconds: float, moved: int) -> Any:
        """A JobResult; which keys of a load are good, where the version can be told."""
        more: dict[str, Any] = {"transfer_time": seconds, "transfer_bytes": moved}
        if load and not all(good) and any(good):
            more["successful_keys"] = tuple(k for k, fine in zip(keys, good) if fine)
        return self._tiering.JobResult(
            job_id=job_id, success=all(good),
            **{name: value for name, value in more.items() if name in self._fields})

    def event(self, keys: Sequence[bytes], locality: Any) -> Any:
        """An OffloadingEvent: keys are stored."""
        made = self._base.OffloadingEvent
        more = {"locality": locality} if "locality" in {
            field.name for field in dataclasses.fields(made)} else {}
        return made(keys=list(keys), medium=self.medium, removed=False, **more)

    def metrics(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Definitions of counters, {} where the version has none."""
        if self._counter is None:
            return {}
        return {name: self._counter(documentation=text) for name, text in texts.items()}

    @staticmethod
    def stats(values: Mapping[str, int]) -> Any:
        """What get_stats() returns; None: nothing to tell, or nobody to tell it to."""
        if not values:
            return None
        try:
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
                OffloadingConnectorStats)
            out = OffloadingConnectorStats()
            for name, value in values.items():
                out.increase_counter(name, value)
        except (ImportError, AttributeError, TypeError):
            return None
        return out


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What a spec says of the engine. vllm_config, kv_cache_config: None where it does not say."""

    model: str
    dtype: str
    tokens_per_block: int
    blocks: int          # of the engine in one page
    groups: int
    layers: int
    workers: int         # whose bytes stand side by side in a page
    engine_id: str
    canonical: bool
    layout: str          # name of the engine's page layout, "" if it has none
    pipeline: int
    vllm_config: Any = None
    kv_cache_config: Any = None


def deployment(spec: Any) -> Deployment:
    """Read an OffloadingSpec of any version."""
    config = getattr(spec, "config", None)
    if config is not None and hasattr(config, "groups"):
        copies = 1 if getattr(spec, "replicated_layout", False) else config.parallel.world_size
        return Deployment(
            config.model.name, config.model.dtype, config.groups[0].tokens_per_block,
            config.cache.blocks_per_chunk, len(config.groups), len(config.groups[0].layer_names),
            copies, config.engine_id, bool(getattr(config, "canonical_layout", False)),
            getattr(config, "kv_cache_layout", None) or "", config.parallel.pp_size)
    vllm_config = spec.vllm_config
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    kv = getattr(spec, "kv_cache_config", None)
    groups = kv.kv_cache_groups if kv is not None else ()
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    blocks = getattr(spec, "blocks_per_chunk", None) or getattr(spec, "block_size_factor", 1)
    tokens = groups[0].kv_cache_spec.block_size if groups else cache.block_size
    return Deployment(
        model.model, str(dtype).removeprefix("torch."), tokens, int(blocks), max(1, len(groups)),
        len(groups[0].layer_names) if groups else 0, parallel.world_size,
        str(vllm_config.kv_transfer_config.engine_id), False, "",
        parallel.pipeline_parallel_size, vllm_config, kv)
