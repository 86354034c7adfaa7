"""vLLM's own CPU offload with kvtier behind it: KvtierTier is a secondary tier of its tiering
manager. Pages of vLLM's CPU cache are coded on their way to disk and come back after a restart.

    --kv-transfer-config '{"kv_connector": "KvtierOffloadingConnector",
        "kv_connector_module_path": "kvtier.vllm_tier", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 68719476736,
            "secondary_tiers": [{"type": "KvtierTier", "module_path": "kvtier.vllm_tier",
                                 "disk": "/nvme/kv:500GiB"}]}}'

KvtierOffloadingConnector is vLLM's OffloadingConnector, which tells the tier what the engine is:
its weights, and how its pages are laid out. The tier also runs under OffloadingConnector itself;
then it is told less, and a page is stored as it is unless its "geometry" is given.

The tier lives in the scheduler's process alone and reads and writes vLLM's CPU cache where it lies,
the pages of all workers at once: tensor parallel engines need no daemon. A doubt is a miss, and is
counted; pages that could not be loaded are computed. Threads: the scheduler's alone; lookups ask
the library once for each run of a request's keys, transfers are its own threads'.
"""
from __future__ import annotations

import ctypes
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import _vllm_names
from ._errors import ConfigError, ErrorCode, KvtierError, UnsupportedError
from ._pagestore import COUNTERS, Counts, Job, PageStore, open_cache, split_options
from .geometry import Geometry, PageShape, dtype_of, given, opaque
from .layout import Identity

_tiering, _base = _vllm_names.modules()
_names = _vllm_names.Names(_tiering, _base)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # noqa: E402
    OffloadingConnector)

_vllm_names.register("KvtierOffloadingConnector", "kvtier.vllm_tier")
_log = logging.getLogger("vllm.kvtier")
WHERE = "kvtier.vllm_tier"
OWN = ("weights_digest", "salt", "geometry", "pages", "locality", "enable_kv_events")
_CHAIN_MAX = 1 << 16     # keys of one look-up
_ADAPTED_MAX = 1 << 16   # requests whose adapters are remembered
# Orders of axes by the names of vLLM's layouts (K and V side by side in each row). A page of the
# CPU cache holds layer after layer where layers are outermost, else whole blocks.
_ORDERS = {"LBNHC": "wlbthcd", "LBHNC": "wlbhtcd", "BLNHC": "wblthcd", "BLHNC": "wblhtcd",
           "BHLNC": "wbhltcd"}

# What KvtierOffloadingConnector knows of an engine, by its id: configurations, and the tensors of
# a worker that lives in this process.
_engines: dict[str, tuple[Any, Any]] = {}
_tensors: dict[str, dict[str, Any]] = {}
_adapted: dict[str, "Adapted"] = {}


class Adapted:
    """LoRA adapters of an engine's requests, which vLLM's keys know by name only: digests of their
    weights, by the requests' ids. What a name stands for today must not be found tomorrow."""

    def __init__(self) -> None:
        from .vllm.identity import Adapters
        self._digests = Adapters()
        self._of: OrderedDict[str, bytes | None] = OrderedDict()

    def note(self, request: Any) -> None:
        """A request that is about to be looked up."""
        self._of[request.request_id] = self._digests.digest(getattr(request, "lora_request", None))
        while len(self._of) > _ADAPTED_MAX:
            self._of.popitem(last=False)

    def of(self, request_id: str) -> bytes | None:
        """32 bytes; b"" without an adapter; None: not known, so nothing is stored or loaded."""
        return self._of.get(request_id)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._of.pop(request_id, None)


def check_extra(extra: Mapping[str, Any]) -> None:
    """ConfigError: a KvtierTier of the connector's configuration has an option that does not exist
    or makes no sense. Opens nothing."""
    tiers = extra.get("secondary_tiers")
    for tier in tiers if isinstance(tiers, (list, tuple)) else ():
        if isinstance(tier, Mapping) and tier.get("type") == "KvtierTier":
            own, _ = split_options(WHERE, {key: value for key, value in tier.items() if key not in
                                           ("type", "module_path", "backpressure_detector")}, OWN)
            _pages_of(own)
            _events_of(own)


def _pages_of(own: Mapping[str, Any]) -> str:
    pages = str(own.get("pages", "auto"))
    if pages not in ("auto", "opaque"):
        raise ConfigError(f"{WHERE}: pages={pages!r} is neither auto nor opaque")
    return pages


def _events_of(own: Mapping[str, Any]) -> bool:
    wanted = own.get("enable_kv_events", False)
    if not isinstance(wanted, bool):
        raise ConfigError(f"{WHERE}: enable_kv_events={wanted!r} is neither true nor false")
    return wanted


class KvtierOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector; see the module."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """vLLM asks when it looks its configuration over: options of the tier that make no sense
        are told here, before anything is loaded."""
        check_extra(extra_config)
        return super().requires_piecewise_for_cudagraph(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Where there are no graphs, this is what vLLM asks first."""
        check_extra(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().get_required_kvcache_layout(vllm_config)

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_extra(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._kvtier_id = str(vllm_config.kv_transfer_config.engine_id)
        _engines[self._kvtier_id] = (vllm_config, kv_cache_config)
        if getattr(vllm_config, "lora_config", None) is not None:
            _adapted.setdefault(self._kvtier_id, Adapted())
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if self._kvtier_id in _adapted:
            _adapted[self._kvtier_id].note(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        _tensors[self._kvtier_id] = kv_caches
        super().register_kv_caches(kv_caches)

    def shutdown(self) -> None:
        super().shutdown()
        _tensors.pop(self._kvtier_id, None)
        _engines.pop(self._kvtier_id, None)
        _adapted.pop(self._kvtier_id, None)


# ---- what a page of the CPU cache holds ----

def _told_shape(value: Any, where: _vllm_names.Deployment) -> PageShape:
    return given(WHERE, value, where.tokens_per_block, blocks=where.blocks,
                 workers=where.workers).shape()


def _from_tensors(where: _vllm_names.Deployment, model: Any, tensors: Mapping[str, Any]) \
        -> PageShape:
    """The layout as the engine's own kernel was seen to use it (kvtier.vllm.pages)."""
    from .vllm.pages import find_places
    config, shapes = where.vllm_config, model.shapes
    places = find_places(shapes, tensors, config.compilation_config.static_forward_context,
                         where.kv_cache_config.num_blocks)
    if places is None:
        raise ValueError("the inside of its pages is not known")
    first, second = (places[i] for i in ((0, 1) if not shapes[0].is_mla else (0, 0)))
    shape, tensor = shapes[0], tensors[shapes[0].layer]
    size, page = tensor.element_size(), shape.page_bytes
    if first.stride_block != page or first.base != tensor.data_ptr():
        raise ValueError("its pages are not one after the other")
    want = [(0, first.stride_head, first.stride_token, first.stride_elem)]
    if not shape.is_mla:
        want.append((second.base - first.base, second.stride_head, second.stride_token,
                     second.stride_elem))
    orders = [("htd", False)] if shape.is_mla else [
        ("thcd", False), ("htcd", False), ("cthd", False), ("chtd", False), ("hctd", True)]
    for order, transposed in orders:
        made = Geometry("wlb" + order, len(shapes), shape.heads, shape.k_dim, shape.tokens,
                        dtype_of(shape.dtype), where.blocks, where.workers, transposed).shape()
        have = list(made.spots[:len(want)])
        if shape.heads == 1:  # the stride of the one head means nothing
            want, have = ([(o, 0, t, e) for o, _, t, e in some] for some in (want, have))
        if have == want:
            return made
    raise ValueError(f"elements of {size} bytes, pages of {page}: an order that is not known")


def _known_shape(where: _vllm_names.Deployment) -> PageShape:
    """From the engine's configuration. ValueError, UnsupportedError: the reason why not."""
    from .vllm.pages import model_of
    if where.kv_cache_config is None:
        raise ValueError("vLLM's own OffloadingConnector does not say how pages are laid out; "
                         "KvtierOffloadingConnector does, or give \"geometry\"")
    if where.pipeline > 1 or where.canonical or where.groups > 1:
        raise ValueError("pipeline parallel, canonical layouts and models of several groups of "
                         "layers are stored as they are")
    model = model_of(where.kv_cache_config)
    shape = model.shapes[0]
    if any(s.opaque or (s.heads, s.k_dim, s.v_dim, s.dtype, s.page_bytes) != (
            shape.heads, shape.k_dim, shape.v_dim, shape.dtype, shape.page_bytes)
           for s in model.shapes) or (not shape.is_mla and shape.k_dim != shape.v_dim):
        raise ValueError("its layers' pages are of several kinds, or hold no 16-bit or 32-bit "
                         "floats")
    tensors = _tensors.get(where.engine_id)
    if tensors is not None and where.workers == 1:
        return _from_tensors(where, model, tensors)
    from vllm.platforms import current_platform
    order = _ORDERS.get(where.layout)
    if order is None or not current_platform.is_cuda_alike():
        raise ValueError(f"the layout {where.layout or 'of this version'} is not known here; give "
                         "\"geometry\"")
    if shape.is_mla:
        order = "wlbhtd" if order.startswith("wl") else "wblhtd"
    return Geometry(order, len(model.shapes), shape.heads, shape.k_dim, shape.tokens,
                    dtype_of(shape.dtype), where.blocks, where.workers).shape()


def page_shape(where: _vllm_names.Deployment, row_bytes: int, own: Mapping[str, Any]) \
        -> tuple[PageShape, str]:
    """The shape of a row of the CPU cache, and why it is not coded ("": it is)."""
    pages = _pages_of(own)
    reason = "as told"
    if pages == "auto":
        try:
            shape = _told_shape(own["geometry"], where) if "geometry" in own else \
                _known_shape(where)
        except (ValueError, UnsupportedError) as error:
            if "geometry" in own:
                raise
            shape, reason = None, str(error).removeprefix("kvtier: ")
        if shape is not None and shape.page_bytes <= row_bytes < shape.page_bytes + 4096 * 16:
            return shape, ""
        if shape is not None:
            reason = f"the geometry makes {shape.page_bytes} bytes, and a page has {row_bytes}"
            if "geometry" in own:
                raise ConfigError(f"{WHERE}: geometry: {reason}")
    return opaque(row_bytes, where.tokens_per_block * where.blocks), reason


# ---- whose pages they are ----

def identity_for(where: _vllm_names.Deployment, own: Mapping[str, Any], text: str) -> Identity:
    """The identity. ConfigError: weights that cannot be told from others; UnsupportedError: LoRA
    without KvtierOffloadingConnector, which knows more of adapters than their names."""
    from .vllm import identity
    salt, digest = str(own.get("salt", "")).encode(), str(own.get("weights_digest", ""))
    if where.vllm_config is not None:
        if getattr(where.vllm_config, "lora_config", None) is not None and \
                where.engine_id not in _adapted:
            raise UnsupportedError(
                f"{WHERE}: vLLM's offload keys tell LoRA adapters apart by name, not by their "
                "weights; under KvtierOffloadingConnector they are told apart by a digest",
                ErrorCode.UNSUPPORTED)
        try:
            digest = identity.weights_digest(where.vllm_config, digest)
            made = identity.identity_of(where.vllm_config, digest, salt)
        except ValueError as error:
            raise ConfigError(f"{WHERE}: {error}") from error
        return replace(made, engine="vllm-tier", layout=text)
    if not digest:
        try:
            if not Path(where.model).exists():
                raise FileNotFoundError("it is no directory here, and its revision is not known")
            digest = identity.directory_digest(Path(where.model))
        except OSError as error:
            raise ConfigError(
                f"{WHERE}: the weights of {where.model!r} cannot be told from others ({error}): use "
                "KvtierOffloadingConnector, or set \"weights_digest\" of the tier to a text that "
                "changes whenever they do") from error
    return Identity("vllm-tier", model=Path(where.model).name, revision=digest, layout=text,
                    key_scheme="vllm-offload", salt=salt, extra=f"dtype={where.dtype}",
                    tp_size=where.workers)


def _address(view: memoryview) -> int:
    """Of a writable view; nothing is held on to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))


# ---- the tier ----

class _Refused:
    """In place of a Job: nothing is moved."""

    def __init__(self, load: bool, count: int) -> None:
        self.load, self.good, self.bytes, self.seconds = load, [False] * count, 0, 0.0

    def poll(self) -> bool:
        return True

    def wait(self) -> list[bool]:
        return self.good


class _Asked:
    """What a request has been told of its keys, and their order."""

    def __init__(self) -> None:
        self.verdicts: dict[bytes, bool] = {}
        self._order: dict[int, list[bytes]] = {}
        self._place: dict[bytes, tuple[int, int]] = {}

    def chain(self, key: bytes, context: Any) -> list[bytes]:
        """key and those that follow it in its group, as far as nothing is known of them."""
        positions = getattr(context, "_offload_key_positions", None)
        if positions and key not in self._place:
            groups: dict[int, list[bytes]] = {}
            for one in sorted(positions, key=positions.__getitem__):
                groups.setdefault(int.from_bytes(one[-4:], "big"), []).append(one)
            self._order = groups
            self._place = {one: (group, number) for group, keys in groups.items()
                           for number, one in enumerate(keys)}
        if key not in self._place:
            return [key]
        group, number = self._place[key]
        out = []
        for one in self._order[group][number:number + _CHAIN_MAX]:
            if one in self.verdicts:
                break
            out.append(one)
        return out


class KvtierTier(_tiering.SecondaryTierManager):
    """See the module. options: those of docs/config.md, and weights_digest, salt, pages,
    geometry."""

    medium = _names.medium

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 **options: Any) -> None:
        detector = options.pop("backpressure_detector", None)
        more = {} if detector is None else {"backpressure_detector": detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        options.pop("module_path", None)
        own, library = split_options(WHERE, options, OWN)
        if own.get("locality") is not None and hasattr(_base, "Locality"):
            self.locality = _base.Locality(own["locality"])
        where = _vllm_names.deployment(offloading_spec)
        if where.vllm_config is None and where.engine_id in _engines:
            config, kv = _engines[where.engine_id]
            where = replace(where, vllm_config=config, kv_cache_config=kv)
        rows, row_bytes = primary_kv_view.shape
        shape, why = page_shape(where, row_bytes, own)
        identity = identity_for(where, own, f"{shape.text}-groups{where.groups}")
        self._adapted = _adapted.get(where.engine_id)
        self._events = self._wanted_events(offloading_spec, own, tier_type)
        self.counts = Counts()
        self._groups, self._page_tokens = where.groups, where.tokens_per_block * where.blocks
        self._weigh = shape.layout.block_tokens == self._page_tokens
        self._jobs: dict[int, tuple[Any, Job | _Refused]] = {}
        self._requests: dict[str, _Asked] = {}
        self._cache = open_cache(WHERE, library)
        try:
            self._pages = PageStore(self._cache, identity, shape, _address(primary_kv_view),
                                    primary_kv_view.strides[0], rows, counts=self.counts)
        except BaseException:
            self._cache.close()
            raise
        _log.info("kvtier: tier %s: %d pages of %d tokens, %d bytes each, %d stored (%s), namespace "
                  "%s", tier_type, rows, self._page_tokens, row_bytes,
                  self._pages.ns.record_bytes(), why and f"as they are: {why}" or "coded",
                  self._pages.ns.id.hex())

    @staticmethod
    def _wanted_events(spec: Any, own: Mapping[str, Any], tier_type: str) -> list[Any] | None:
        """A list for events, None: nobody wants them."""
        wanted = _events_of(own)
        config = getattr(spec, "kv_events_config", None)
        if wanted and not getattr(config, "enable_kv_cache_events", False):
            _log.warning("kvtier: tier %s has enable_kv_events, and the engine publishes no events: "
                         "--kv-events-config '{\"enable_kv_cache_events\": true}'", tier_type)
            return None
        if wanted and _names.medium is None:
            _log.warning("kvtier: tiers of this version of vLLM publish no events")
            return None
        return [] if wanted else None

    def _hash(self, key: bytes, adapter: bytes = b"") -> bytes:
        """A key of vLLM is a block hash and the number of a group."""
        if self._groups == 1 and len(key) <= 36 and not adapter:
            return bytes(key[:-4])
        return hashlib.sha256(bytes(key) + adapter).digest()

    def _hashes(self, keys: Iterable[bytes], context: Any) -> list[bytes] | None:
        """Of a request's keys; None: its adapter is not known."""
        adapter = self._adapted.of(context.req_id) if self._adapted is not None else b""
        return None if adapter is None else [self._hash(key, adapter) for key in keys]

    # ---- look-ups ----

    def lookup(self, key: bytes, req_context: Any) -> Any:
        asked = self._requests.setdefault(req_context.req_id, _Asked())
        if key not in asked.verdicts:
            self._ask(key, req_context, asked)
        return _names.hit if asked.verdicts.get(key) else _names.miss

    def _ask(self, key: bytes, context: Any, asked: _Asked) -> None:
        chain = asked.chain(key, context)
        before = None
        if self._weigh:
            end = (getattr(context, "_offload_key_positions", None) or {}).get(key)
            before = end - self._page_tokens if end is not None and end >= self._page_tokens else 0
        try:
            hashes = self._hashes(chain, context)
            count = self._pages.find(hashes, before) if hashes is not None else 0
        except KvtierError as error:
            _log.warning("kvtier: a look-up failed, its pages are computed: %s", error)
            count = 0
        asked.verdicts.update(dict.fromkeys(chain[:count], True))
        if count < len(chain):
            asked.verdicts[chain[count]] = False

    def on_new_request(self, req_context: Any) -> Any:
        return _names.context()

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.pop(req_context.req_id, None)
        if self._adapted is not None:
            self._adapted.forget(req_context.req_id)

    get_request_offloading_context = on_new_request
    request_finished = on_request_finished

    # ---- transfers ----

    def submit_store(self, job_metadata: Any) -> None:
        keys, context = list(job_metadata.keys), job_metadata.req_context
        hashes = self._hashes(keys, context)
        position = self._position(keys[0], context) if keys else 1
        if hashes is None:
            self.counts.add(dropped=len(keys))
        self._jobs[job_metadata.job_id] = (
            job_metadata, _Refused(False, len(keys)) if hashes is None else
            self._pages.store(hashes, _names.pages(job_metadata), position))

    def submit_load(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        hashes = self._hashes(keys, job_metadata.req_context)
        if hashes is None:
            self.counts.add(failed=len(keys))
        self._jobs[job_metadata.job_id] = (
            job_metadata, _Refused(True, len(keys)) if hashes is None else
            self._pages.load(hashes, _names.pages(job_metadata)))

    def _position(self, key: bytes, context: Any) -> int:
        """Of a page in its sequence, counted in pages of the layout; 1 where it is not known."""
        end = (getattr(context, "_offload_key_positions", None) or {}).get(key)
        return 1 if end is None else max(0, end // self._page_tokens - 1)

    def get_finished_jobs(self) -> Iterable[Any]:
        out = []
        for job_id in list(self._jobs):
            job, work = self._jobs[job_id]
            if work.poll():
                del self._jobs[job_id]
                out.append(self._result(job_id, job, work))
        return out

    get_finished = get_finished_jobs

    def take_events(self) -> Iterable[Any]:
        """What was stored since the last call: keys are in the store now, and leave it unannounced."""
        if self._events is not None:
            yield from self._events
            self._events.clear()

    def _result(self, job_id: int, job: Any, work: Job | _Refused) -> Any:
        keys = list(job.keys)
        if self._events is not None and not work.load and any(work.good):
            self._events.append(_names.event(
                [key for key, fine in zip(keys, work.good) if fine], self.locality))
        asked = self._requests.get(job.req_context.req_id)
        if work.load and asked is not None:  # what could not be loaded is not asked for again
            asked.verdicts.update({k: False for k, fine in zip(keys, work.good) if not fine})
        return _names.result(job_id, keys, work.good, work.load, work.seconds, work.bytes)

    def drain_jobs(self) -> None:
        """Until no page is read or written; results come with the next get_finished_jobs()."""
        for _, work in self._jobs.values():
            work.wait()

    def shutdown(self) -> None:
        """Wait for transfers, write what is queued, let go of the CPU cache. Twice is allowed."""
        self.drain_jobs()
        self._pages.close()
        self._cache.close()

    # ---- metrics ----

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return _names.metrics({f"vllm:kvtier_tier_{name}": text
                               for name, text in COUNTERS.items()})

    def get_stats(self) -> Any:
        return _names.stats({f"vllm:kvtier_tier_{name}": value
                             for name, value in self.counts.take().items()})
