"""SGLang: `KvtierStorage`, a storage backend for HiCache: pages beyond the host's memory, on disk,
coded, and across restarts.

    python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-hierarchical-cache
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "kvtier", "module_path": "kvtier.sglang", "class_name": "KvtierStorage",
          "interface_v1": 1, "disk": "/nvme/kv:500GiB", "model_path": "/models/MODEL"}'

With "interface_v1" SGLang hands over places in its host pool, and pages are coded from where they
lie (the layouts layer_first, page_first, page_first_direct and page_head of MHA and MLA pools);
without it, with pages of fewer than 16 tokens (SGLang's default is 1), and for the other pools of
the v2 interface (SWA, Mamba, indexer), pages are bytes and are kept as they are. Calls are
synchronous, as SGLang's are; they come from threads of its own.
Errors: ConfigError from the constructor; afterwards a doubt is a miss, and is counted (counts).
"""
from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ._errors import ConfigError, KvtierError
from ._pagestore import (Counts, PageStore, Staging, as_bytes, fetch, open_cache, save,
                         split_options, weights)
from .geometry import GRAIN, PageShape, dtype_of, opaque
from .layout import Identity, Kind, Layout, Part

from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402  the engine, last
    HiCacheStorage, PoolHitPolicy, PoolTransferResult)

_log = logging.getLogger("kvtier.sglang")
WHERE = "kvtier.sglang"
OWN = ("backend_name", "module_path", "class_name", "interface_v1", "weights_digest", "model_path",
       "salt", "pages")
# Options that SGLang reads out of the same object.
SGLANG = ("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
          "prefetch_timeout_max", "prefetch_timeout_per_page",
          "hicache_storage_pass_prefix_keys", "tp_lcm_size")
KV = "kv"
# Axes of the host pool's buffer: c K and V, l layer, s slot (page and token in it), p page, t
# token in the page, h head, d element; MLA pools have no c, and one head.
_AXES = {"layer_first": "clshd", "page_first": "cslhd", "page_first_direct": "cplthd",
         "page_head": "cphtld"}


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def host_shape(host: Any) -> tuple[PageShape, int, int, int]:
    """(shape, address of page 0, bytes from page to page, pages) of a host pool as SGLang
    describes it. ValueError: the reason why its pages cannot be coded."""
    buffer, page = getattr(host, "kv_buffer", None), int(getattr(host, "page_size", 0))
    axes = _AXES.get(str(getattr(host, "layout", "")))
    if axes is None or not hasattr(buffer, "data_ptr") or page < 1:
        raise ValueError(f"a pool of layout {getattr(host, 'layout', None)!r}")
    if buffer.dim() == len(axes) - 1:
        axes = axes[1:]
    dtype = dtype_of(buffer.dtype)
    if buffer.dim() != len(axes) or dtype is None or buffer.device.type != "cpu":
        raise ValueError(f"a buffer of {buffer.dim()} dimensions of {buffer.dtype}")
    size = dict(zip(axes, buffer.shape))
    step = {a: s * buffer.element_size() for a, s in zip(axes, buffer.stride())}
    if "s" in axes:
        step["t"], step["p"] = step["s"], page * step["s"]
        size["t"], size["p"] = page, size["s"] // page
    heads, dim, mla = size["h"], size["d"], "c" not in axes
    if size["t"] != page or page % 16 or dim % 16 or not 16 <= dim <= 1024 or (mla and heads != 1):
        raise ValueError(f"pages of {size['t']} tokens, {heads} heads, {dim} elements")
    if size.get("c", 2) != 2 or buffer.numel() * buffer.element_size() <= 0:
        raise ValueError(f"a buffer of shape {tuple(buffer.shape)}")
    parts, spots = [], []
    for layer in range(size["l"]):
        for number, kind in enumerate((Kind.MLA,) if mla else (Kind.K, Kind.V)):
            parts.append(Part(kind, dtype, heads, dim, layer))
            spots.append((layer * step["l"] + number * step.get("c", 0), step["h"], step["t"],
                          step["d"]))
    layout = Layout(page, tuple(parts))
    return (PageShape(layout, tuple(spots), page * layout.token_bytes, "sglang-coded"),
            buffer.data_ptr(), step["p"], size["p"])


class _Transfers:
    """Pages and GB/s of the last transfers one way; those that nobody asks for are forgotten."""

    def __init__(self, room: int = 4096) -> None:
        self.pages: deque[int] = deque(maxlen=room)
        self.rates: deque[float] = deque(maxlen=room)

    def timed(self, record_bytes: int, transfer: Callable[[], list[bool]]) -> list[bool]:
        """transfer(), which says of each page whether it was moved."""
        began = time.monotonic()
        good = transfer()
        if count := sum(good):
            self.pages.append(count)
            self.rates.append(count * record_bytes / max(1e-9, time.monotonic() - began) / 1e9)
        return good

    def take(self) -> tuple[list[int], list[float]]:
        """Since the last call."""
        return tuple([of.popleft() for _ in range(len(of))] for of in (self.pages, self.rates))


class _Pool:
    """One host pool of SGLang's, and where its pages are kept. direct: they are coded from, and
    into, the host pool itself; else they go through staging memory as SGLang's flat pages."""

    def __init__(self, owner: "KvtierStorage", name: str, host: Any, direct: bool) -> None:
        self.host, self.page = host, max(1, int(getattr(host, "page_size", 1) or 1))
        self.owner = owner
        self.staging: Staging | None = None
        why = "the interface hands over flat pages"
        if direct:
            try:
                shape, base, step, count = host_shape(host)
                self.store = owner.open(name, shape, base, step, count, host.kv_buffer)
                _log.info("kvtier: pool %s: %d pages of %d tokens, coded, %d bytes stored each, "
                          "namespace %s", name, count, self.page,
                          self.store.ns.record_bytes(), self.store.ns.id.hex())
                return
            except (ValueError, KeyError, KvtierError) as error:
                if isinstance(error, ConfigError):
                    raise
                why = str(error)
        flat = host.get_dummy_flat_data_page()
        self.bytes = flat.numel() * flat.element_size()
        shape = opaque(-(-self.bytes // GRAIN) * GRAIN, self.page)
        self.staging = Staging(shape.page_bytes)
        self.store = owner.open(f"{name}-{self.bytes}", shape, self.staging.base, self.staging.step,
                                self.staging.count, None)
        _log.info("kvtier: pool %s: pages of %d tokens, %d bytes, as they are (%s), namespace %s",
                  name, self.page, self.bytes, why, self.store.ns.id.hex())

    def pages(self, indices: Any, count: int) -> list[int]:
        """Page numbers of host indices, of which each page has page_size."""
        return [int(indices[i * self.page]) // self.page for i in range(count)]

    def set(self, keys: Sequence[str], indices: Any, position: int) -> list[bool]:
        return self.owner.written.timed(self.store.ns.record_bytes(),
                                        lambda: self._set(keys, indices, position))

    def get(self, keys: Sequence[str], indices: Any) -> list[bool]:
        return self.owner.read.timed(self.store.ns.record_bytes(), lambda: self._get(keys, indices))

    def _set(self, keys: Sequence[str], indices: Any, position: int) -> list[bool]:
        hashes = [_hash(key) for key in keys]
        if self.staging is None:
            return self.store.store(hashes, self.pages(indices, len(keys)), position).wait()
        flats = [_flat(self.host.get_data_page(int(indices[i * self.page]), flat=True))
                 for i in range(len(keys))]
        return self.set_flat(hashes, flats, position)

    def _get(self, keys: Sequence[str], indices: Any) -> list[bool]:
        hashes = [_hash(key) for key in keys]
        if self.staging is None:
            return self.store.load(hashes, self.pages(indices, len(keys))).wait()
        flats = [self.host.get_dummy_flat_data_page() for _ in keys]
        good = self.get_flat(hashes, [_flat(flat) for flat in flats])
        for number, (flat, fine) in enumerate(zip(flats, good)):
            if fine:
                self.host.set_from_flat_data_page(int(indices[number * self.page]), flat)
        return good

    def set_flat(self, hashes: list[bytes], flats: list[memoryview], position: int) -> list[bool]:
        if any(flat.nbytes != self.bytes for flat in flats):
            return [False] * len(hashes)
        return save(self.store, self.staging, hashes, flats, position)

    def get_flat(self, hashes: list[bytes], flats: list[memoryview]) -> list[bool]:
        if any(flat.nbytes != self.bytes for flat in flats):
            return [False] * len(hashes)
        return fetch(self.store, self.staging, hashes, flats)


def _flat(tensor: Any) -> memoryview:
    """The bytes of a tensor; TypeError: they do not lie together."""
    import torch
    if not tensor.is_contiguous():
        raise TypeError("a tensor whose bytes do not lie together")
    return as_bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


class KvtierStorage(HiCacheStorage):
    """See the module. storage_config: SGLang's HiCacheStorageConfig; kwargs: of its factory."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = {key: value for key, value in (storage_config.extra_config or {}).items()
                 if key not in SGLANG}
        own, library = split_options(f"{WHERE}: extra config", extra, OWN)
        if own.get("pages", "auto") not in ("auto", "opaque"):
            raise ConfigError(f"{WHERE}: pages={own['pages']!r} is neither auto nor opaque")
        self._direct = bool(own.get("interface_v1", 0)) and own.get("pages") != "opaque"
        self._config, self._own = storage_config, own
        self._shared = bool(storage_config.is_mla_model)  # all ranks hold the same bytes
        self._model = self._name_model()
        self.counts = Counts()
        self.read, self.written = _Transfers(), _Transfers()
        self._lock = threading.Lock()
        self._pools: dict[str, _Pool] = {}
        self._cache = open_cache(WHERE, self._of_rank(library))

    def _name_model(self) -> str:
        digest = weights(WHERE, self._own, self._config.model_name)
        if not digest:
            raise ConfigError(
                f"{WHERE}: SGLang's keys do not name the model ({self._config.model_name!r}): set "
                "\"model_path\" to the directory of its weights, or \"weights_digest\" to a text "
                "that changes whenever they do")
        return digest

    def _of_rank(self, library: dict[str, Any]) -> dict[str, Any]:
        """The library's options for this rank: "{rank}" in a disk's path is its number."""
        ranks = self._config.tp_size * self._config.pp_size
        if ranks == 1 or str(library.get("store", "")).startswith("unix:"):
            return library
        if self._shared and self._config.tp_size > 1:
            raise ConfigError(
                f"{WHERE}: all {self._config.tp_size} ranks of an MLA model read what one has "
                "written: start kvtierd, and set \"store\": \"unix:/run/kvtier.sock\" instead of "
                "disk and dram")
        disks = library.get("disk") or []
        disks = disks if isinstance(disks, (list, tuple)) else [disks]
        if any("{rank}" not in str(disk) for disk in disks):
            raise ConfigError(
                f"{WHERE}: {ranks} ranks, each a process of its own, and one directory: write "
                "{rank} into the path of \"disk\" (\"/nvme/kv-{rank}:100GiB\"), or use kvtierd "
                "(\"store\": \"unix:/run/kvtier.sock\")")
        number = self._config.pp_rank * self._config.tp_size + self._config.tp_rank
        return {**library, "disk": [str(disk).replace("{rank}", str(number)) for disk in disks]}

    def open(self, name: str, shape: PageShape, base: int, step: int, count: int,
             owner: Any) -> PageStore:
        """A store for the pages of one pool."""
        config = self._config
        parallel = {name: getattr(config, name, None) for name in (
            "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size", "should_split_heads",
            "tp_lcm_size")}
        identity = Identity(
            "sglang", model=str(config.model_name or ""), revision=self._model, layout=shape.text,
            key_scheme="sglang-page", salt=str(self._own.get("salt", "")).encode(),
            extra=f"pool={name} {parallel}", tp_size=1 if self._shared else config.tp_size,
            pp_size=config.pp_size, pp_rank=config.pp_rank)
        return PageStore(self._cache, identity, shape, base, step, count, owner, self.counts,
                         0 if self._shared else config.tp_rank)

    # ---- pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        with self._lock:
            self._pools[KV] = _Pool(self, KV, mem_pool_host, self._direct)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        with self._lock:
            if name not in self._pools or self._pools[name].host is not host_pool:
                self._pools[name] = _Pool(self, name, host_pool,
                                          self._own.get("pages") != "opaque")

    @staticmethod
    def _position(extra_info: Any) -> int:
        """Pages before the first one, as far as SGLang says; 1: not known."""
        return len(getattr(extra_info, "prefix_keys", None) or ()) or 1

    # ---- v1 ----

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Leading pages that are there, and quicker to load than to compute."""
        pool = self._pools[KV]
        before = len(getattr(extra_info, "prefix_keys", None) or ()) * pool.page
        try:
            return pool.store.find([_hash(key) for key in keys], before) if keys else 0
        except KvtierError as error:
            _log.warning("kvtier: a look-up failed: %s", error)
            return 0

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: Any,
                     extra_info: Any = None) -> list[bool]:
        return self._safe(len(keys), lambda: self._pools[KV].get(keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any,
                     extra_info: Any = None) -> list[bool]:
        return self._safe(len(keys), lambda: self._pools[KV].set(
            keys, host_indices, self._position(extra_info)))

    @staticmethod
    def _safe(count: int, call: Any) -> list[bool]:
        """call(), or all misses: what is raised on a thread of SGLang's ends it for good."""
        try:
            return call() if count else []
        except Exception as error:
            _log.warning("kvtier: %d pages: %s", count, error)
            return [False] * count

    # ---- v2 ----

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None,
                        extra_info: Any = None) -> Any:
        usable = self.batch_exists(keys, extra_info)
        hits = {KV: usable} if usable else {}
        kv_pages = usable
        for transfer in pool_transfers or []:
            if usable == 0:
                break
            pool = self._pools.get(str(transfer.name))
            have = self._safe(kv_pages, lambda: pool.store.present(
                [_hash(key) for key in keys[:kv_pages]])) if pool else [False] * kv_pages
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                found = have.index(False) if False in have else kv_pages
            else:
                tail = max(1, len(transfer.keys or ()))
                found = next((n for n in range(kv_pages, 0, -1)
                              if all(have[max(0, n - tail):n])), 0)
            if found:
                hits[transfer.name] = found
            usable = min(usable, found)
        return PoolTransferResult(usable, hits)

    def _each(self, transfers: Any, call: Any) -> dict[str, list[bool]]:
        out = {}
        for transfer in transfers:
            keys, pool = transfer.keys or [], self._pools.get(str(transfer.name))
            indices = transfer.host_indices
            if pool is None or indices is None or len(indices) != len(keys) * pool.page:
                out[transfer.name] = [False] * len(keys)
                continue
            out[transfer.name] = self._safe(len(keys), lambda: call(pool, keys, indices))
        return out

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, lambda pool, keys, indices: pool.get(keys, indices))

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        position = self._position(extra_info)
        return self._each(transfers, lambda pool, keys, indices: pool.set(keys, indices, position))

    # ---- flat pages ----

    def batch_get(self, keys: list[str], target_locations: Any = None,
                  target_sizes: Any = None) -> list[Any]:
        targets = list(target_locations or [])
        good = self._safe(len(keys), lambda: self._pools[KV].get_flat(
            [_hash(key) for key in keys], [_flat(target) for target in targets])) \
            if len(targets) == len(keys) else [False] * len(keys)
        return [target if fine else None for target, fine in zip(targets, good)] \
            if targets else [None] * len(keys)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0] if target_location is not None else None

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None,
                  target_sizes: Any = None) -> bool:
        flats = list(values or [])
        return len(flats) == len(keys) and all(self._safe(len(keys), lambda: self._pools[
            KV].set_flat([_hash(key) for key in keys], [_flat(flat) for flat in flats], 1)))

    def set(self, key: str, value: Any = None, target_location: Any = None,
            target_sizes: Any = None) -> bool:
        return value is not None and self.batch_set([key], [value])

    # ---- the rest ----

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since its last question: pages of each transfer, and the GB/s of
        what is stored of them. None: this version has no such class."""
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:
            return None
        (read, fast), (written, slow) = self.read.take(), self.written.take()
        return StorageMetrics(prefetch_pgs=read, prefetch_bandwidth=fast, backup_pgs=written,
                              backup_bandwidth=slow)

    def clear(self) -> None:
        """Forget every page of this model, in every tier."""
        for pool in self._pools.values():
            pool.store.ns.purge()

    def close(self) -> None:
        """Write what is queued. Waits for what is under way."""
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.store.close()
        self._cache.close()
