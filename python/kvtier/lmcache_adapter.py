"""LMCache: `KvtierAdapter`, a plugin adapter for its second level that is told by LMCache what chunks
hold, so that they are coded without a "geometry".

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvtier.lmcache_adapter",
        "class_name": "KvtierAdapter", "adapter_params": {"disk": "/nvme/kv:500GiB"}}'

It is LMCache's own adapter for native connectors around kvtier.lmcache.KvtierConnector, which has
the rest: options, keys, threads. What a native connector is given are bytes; here the shape and type
of each chunk are seen, in look-ups as well. This module imports LMCache.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter

from .lmcache import KvtierConnector


class _Learner(KvtierConnector):
    """Keeps apart what a connector without geometries has stored in the same place."""

    remembers = "sizes and geometries of chunks"


class KvtierAdapter(NativeConnectorL2Adapter):
    """See the module. params: as of KvtierConnector."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        self._kvtier = _Learner(**params)
        super().__init__(self._kvtier, type_name="KvtierAdapter")

    def _learn(self, objects: Sequence[Any]) -> None:
        for item in {len(item.byte_array): item for item in objects}.values():
            about = getattr(item, "metadata", None)
            if about is None or about.dtype is None:
                continue
            self._kvtier.learn(about.shapes or [about.shape], about.dtypes or [about.dtype])

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> Any:
        self._learn(objects)
        return super().submit_store_task(keys, objects)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> Any:
        self._learn(objects)
        return super().submit_load_task(keys, objects)

    def submit_lookup_and_lock_task(self, keys: list[Any],
                                    group_layout_descs: Mapping[int, Any]) -> Any:
        for layout in group_layout_descs.values():
            self._kvtier.learn(layout.shapes, layout.dtypes)
        return super().submit_lookup_and_lock_task(keys, group_layout_descs)
