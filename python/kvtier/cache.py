"""The cache: store blocks of an engine's pool, look them up by key, load them back.

    with kvtier.Cache(dram="8GiB", disk="/var/cache/kvtier:200GiB") as cache:
        ns = cache.namespace(Identity("my-engine", model="m", revision=digest), layout)
        pool = cache.pool(layout, places, block_count)
        found = ns.lookup(keys)                     # leading blocks that can be loaded
        request = ns.load(pool, keys[:found.n], page_numbers)
        request.wait()

Thin over kvtier/cache.h, which has the whole contract. Threads: any call from any thread; every
call releases the GIL; store(), load(), plan() never block. Errors: _errors.py; a miss is a result.
Lifetime: a cache outlives its namespaces, pools and requests and ends them when it is closed; pages
are read or written until a request is complete, and a Pool keeps their tensors alive.
"""
from __future__ import annotations

import atexit
import ctypes as C
import enum
import logging
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _c, _limits
from ._errors import ClosedError, ConfigError, ErrorCode, KvtierError, make_error
from .layout import Identity, Keys, Kind, Layout, Level, Pages, Place, Tier, layout_of
from .pool import Calls, Pool, Report, Request, _Child, deadline_ns

_log = logging.getLogger("kvtier")
_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
_ERROR_BYTES = 2048
_open_caches: "weakref.WeakSet[Cache]" = weakref.WeakSet()


class Write(enum.IntEnum):
    """When stored blocks go to disk; DEFAULT: as configured."""

    DEFAULT = 0
    THROUGH = 1
    EVICT = 2
    IDLE = 3
    AUTO = 4


class Cut(enum.IntEnum):
    """What the engine can do with blocks that are not at the front of the prompt."""

    NONE = 0     # nothing: blocks are loaded from the front on
    SERIAL = 1   # compute [0, s), load [s, N), one after the other
    OVERLAP = 2  # both at a time


class Reason(enum.IntEnum):
    """Why a plan says what it says."""

    NO_BLOCKS = 0
    LOAD = 1
    RECOMPUTE = 2
    CUT = 3
    PREFIX = 4
    PROBE = 5
    OFF = 6


@dataclass(frozen=True)
class Lookup:
    """n leading blocks can be loaded; tiers: where each key is (Tier numbers), MISS after them;
    roots: number of the root that each one with tier DISK is on, else 0. plan() takes both."""

    n: int
    tiers: Sequence[int]
    roots: Sequence[int] = ()


@dataclass(frozen=True)
class Plan:
    """Load blocks [first, first + count); compute the rest. Times in seconds are expectations.
    deadline_s: cut the load off after it, since the rest is then computed sooner; 0: no load, or
    not weighed (pass it to load() as deadline, or None for 0)."""

    first: int
    count: int
    reason: Reason
    unsure: bool
    ttft_s: float
    load_s: float
    gpu_s: float
    recompute_s: float
    load_all_s: float
    deadline_s: float


def _text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else os.fspath(value) \
        if isinstance(value, os.PathLike) else str(value)


def options(config: Mapping[str, Any] | str | None = None, **more: Any) -> list[tuple[str, str]]:
    """(key, value) pairs of options given as "key=value,key=value", a mapping or keywords. A list
    sets a key several times ("disk"); None leaves it alone. "unix:/path" means store=unix:/path."""
    out: list[tuple[str, str]] = []
    if isinstance(config, str):
        entries = (entry.strip() for entry in config.split(","))
        pairs = (("store=" + entry if entry.startswith("unix:") else entry).partition("=")
                 for entry in entries if entry)
        out += [(key.strip(), value.strip()) for key, _, value in pairs]
        config = None
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError("options are given as \"key=value,key=value\" or as a mapping, not as "
                          f"{type(config).__name__}", ErrorCode.CONFIG_VALUE)
    for key, value in [*(config or {}).items(), *more.items()]:
        if not isinstance(key, str):
            raise ConfigError(f"an option's name is a text, not {key!r}", ErrorCode.CONFIG_KEY)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is not None:
                out.append((key, _text(one)))
    return out


def _log_to(write: Callable[[int, str], None]) -> Callable[[Any, int, bytes], None]:
    """The callback of a log. It holds no Cache: one that is dropped ends at once, on that thread."""
    def on_log(_arg: Any, level: int, message: bytes) -> None:
        try:
            write(min(level, 3), message.decode(errors="replace"))
        except Exception:  # a log of the user's must not end a thread of the library
            pass
    return on_log


def _set_all(library: Any, made: C.c_void_p, pairs: list[tuple[str, str]]) -> None:
    for key, value in pairs:
        if "\0" in key + value:
            raise make_error(ErrorCode.CONFIG_VALUE, f"{key!r}: {value!r} holds a NUL")
        code = library.kvt_config_set(made, key.encode(), value.encode())
        if code < 0:
            text = library.kvt_config_error(made).decode(errors="replace")
            raise make_error(code, text or f"{key}={value}: {_c.strerror(code)}")


def check_options(config: Mapping[str, Any] | str | None = None, **more: Any) -> None:
    """ConfigError: an option that does not exist, or a value that makes no sense, as Cache() would
    say; nothing is opened. What only an open can tell (a directory that is not there) is not
    said."""
    library, made = _c.load(), C.c_void_p()
    _, pairs = _limits.split(options(config, **more))
    _c.check(library.kvt_config_new(C.byref(made)), "config")
    try:
        _set_all(library, made, pairs)
    finally:
        library.kvt_config_free(made)


class Cache:
    """An open cache: in-process, or of a daemon where the configuration names one.

    config and options: docs/config.md. own_limits: what they say of the namespaces that are opened
    here (own_quota, own_ttl). log: called with (level 0 to 3, message) from threads of the
    library; None: the logger "kvtier". ConfigError: an option that does not exist or makes no
    sense. notes: sentences about disks that the cache runs without.
    """

    def __init__(self, config: Mapping[str, Any] | str | None = None, *,
                 log: Callable[[int, str], None] | None = None, **more: Any) -> None:
        self._handle: int | None = None
        self._lib = Calls(_c.load())
        self._children: "weakref.WeakSet[_Child]" = weakref.WeakSet()
        self._orphans: list[tuple[int, Pool]] = []
        self._lock = threading.RLock()  # a collection inside may drop a Request
        write = log or (lambda level, text: _log.log(_LEVELS[level], "%s", text))
        self._log_fn = _c.LOG_FN(_log_to(write))  # must live as long as the cache
        handle = C.c_void_p()
        error = C.create_string_buffer(_ERROR_BYTES)
        made = C.c_void_p()
        self.own_limits, pairs = _limits.split(options(config, **more))
        _c.check(self._lib.kvt_config_new(C.byref(made)), "config")
        try:
            self._lib.kvt_config_log(made, self._log_fn, None)
            _set_all(self._lib, made, pairs)
            code = self._lib.kvt_open(made, C.byref(handle), error, _ERROR_BYTES)
        finally:
            self._lib.kvt_config_free(made)
        self.notes = error.value.decode(errors="replace")
        if code < 0:
            raise make_error(code, self.notes or f"open: {_c.strerror(code)}")
        self._handle = handle.value
        _open_caches.add(self)

    @property
    def handle(self) -> int:
        """struct kvt_cache *; ClosedError after close()."""
        if self._handle is None:
            raise ClosedError("the cache is closed", ErrorCode.CLOSED)
        return self._handle

    def close(self) -> None:
        """Cancel what is in flight, write what is queued, sync. Blocks, also until the calls of
        other threads have returned; later ones are refused by ClosedError. Twice is allowed."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        _open_caches.discard(self)
        self._lib.end(self._cancel_all)
        for child in self._living():
            child._forget()
        self._orphans.clear()
        self._lib.raw.kvt_close(handle)

    def _cancel_all(self) -> None:
        with self._lock:
            for pool in self._living():
                for request in list(pool._requests) if isinstance(pool, Pool) else ():
                    self._lib.raw.kvt_req_cancel(request)

    def _living(self) -> list[_Child]:
        while True:
            try:
                return list(self._children)
            except RuntimeError:  # another thread made one meanwhile
                pass

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def namespace(self, identity: Identity, layout: Layout) -> "Namespace":
        """Open the namespace of an identity and layout. Blocks briefly."""
        out = C.c_void_p()
        code = self._lib.kvt_ns_open(self.handle, C.byref(identity.to_c()),
                                     C.byref(layout.to_c()), C.byref(out))
        _c.check(code, "namespace")
        opened = Namespace(self, out.value, layout, owned=True)
        if self.own_limits:
            opened.limit(self.own_limits.quota, self.own_limits.ttl)
        return opened

    def pool(self, layout: Layout, places: Sequence[Place], block_count: int,
             device: int = _c.DEVICE_HOST, owner: Any = None) -> "Pool":
        """Register engine memory. places: one for each part of the layout, in its order; page
        numbers are < block_count; device: -1 for host memory, else a CUDA ordinal. owner: what must
        live as long as the pool (tensors)."""
        return Pool(self, layout, places, block_count, device, owner)

    def pool_of(self, parts: Sequence[tuple[Kind, Pages]],
                layers: Sequence[int] | None = None) -> "Pool":
        """A pool over tensors seen by kvtier.pages(): [(Kind.K, pages), (Kind.V, pages), ...]."""
        layout = layout_of(parts, layers)
        first = parts[0][1]
        return Pool(self, layout, [p.place for _, p in parts], first.block_count, first.device,
                    [p.owner for _, p in parts])

    def flush(self) -> None:
        """Write what is queued and sync it: afterwards a crash loses none of it. Blocks.
        KvtierError DROPPED: some blocks had to leave DRAM unwritten, the rest is there."""
        _c.check(self._lib.kvt_flush(self.handle), "flush")

    def enable(self, on: bool) -> None:
        """The run-time switch: off makes every lookup a miss and every store a no-op."""
        self._lib.kvt_enable(self.handle, int(on))

    def event_fd(self) -> int:
        """Readable when any request completes; read 8 bytes to reset. Owned by the cache."""
        return _c.check(self._lib.kvt_event_fd(self.handle), "event fd")

    def stats(self) -> dict[str, int | str]:
        """Every counter, gauge and text by its dotted name ("dram.hits"). One round trip."""
        return {name: value for name, value, _ in self._stats()}

    def stats_help(self) -> dict[str, str]:
        """What each entry of stats() means."""
        return {name: text for name, _, text in self._stats()}

    def _stats(self) -> list[tuple[str, int | str, str]]:
        return collect_stats(self._lib.kvt_stats_each, self.handle)

    def stat(self, name: str) -> int:
        """One number of stats(); KvtierError INVAL for a name that is none."""
        value = C.c_uint64()
        if "\0" in name:
            raise make_error(ErrorCode.INVAL, f"stat {name!r}: it holds a NUL")
        _c.check(self._lib.kvt_stats_get(self.handle, name.encode(), C.byref(value)),
                 f"stat {name}")
        return value.value

    def reap(self) -> int:
        """Free requests that were dropped while they were in flight and are complete by now.
        Returns how many are not. Called by store() and load()."""
        with self._lock:
            left = []
            for handle, pool in self._orphans:
                if handle not in pool._requests:
                    continue  # its pool has been closed, and has freed it
                if self._lib.kvt_req_wait(handle, 0) == 0:
                    left.append((handle, pool))
                    continue
                pool._requests.discard(handle)
                self._lib.kvt_req_free(handle)
            self._orphans = left
        return len(left)


def collect_stats(each: Callable[..., Any], handle: int) -> list[tuple[str, int | str, str]]:
    """(name, number or text, help) of a *_stats_each() function."""
    out: list[tuple[str, int | str, str]] = []

    def take(_arg, name, value, text, about):
        out.append((name.decode(), value if text is None else text.decode(errors="replace"),
                    (about or b"").decode()))

    code = each(handle, _c.STATS_FN(take), None)
    if code is not None:
        _c.check(code, "stats")
    return out


class Namespace(_Child):
    """Blocks of one identity and layout."""

    def __init__(self, cache: Cache, handle: int, layout: Layout, owned: bool) -> None:
        super().__init__(cache, handle)
        self.layout, self._owned = layout, owned

    @property
    def id(self) -> bytes:
        """16 bytes, for tools and logs."""
        return C.string_at(self._lib.kvt_ns_id(self.handle), _c.NS_BYTES)

    def limit(self, quota: int | None = None, ttl: float | None = None) -> None:
        """What it may have of the store, all its groups together: bytes of records, and the seconds
        that a block lives without being used. None leaves it as it is, math.inf lifts it; the
        options ns_quota and ttl hold besides. Blocks briefly."""
        for name, given, unit in (("quota", quota, "bytes"), ("ttl", ttl, "seconds")):
            if given is not None and (not isinstance(given, (int, float)) or given != given):
                raise make_error(ErrorCode.INVAL, f"limit: {name} is {given!r}; a number of {unit} "
                                 "is expected, or math.inf")
        made = _c.kvt_ns_limits(C.sizeof(_c.kvt_ns_limits))
        if quota is not None:  # 0 would say nothing: a number that is refused
            made.quota_bytes = int(min(max(quota, 1), _c.LIMIT_NONE))
        if ttl is not None:
            made.ttl_ns = int(min(max(ttl * 1e9, 1), _c.LIMIT_NONE))
        _c.check(self._lib.kvt_ns_limit(self.handle, C.byref(made)), "limit")

    def record_bytes(self, level: Level | str | None = None, group: int = 0) -> int:
        """Bytes of one stored record, header and padding included."""
        return self._lib.kvt_ns_record_bytes(self.handle, group, Level.parse(level))

    def lookup(self, keys: Keys, min_level: Level | str | None = None, shards: int = 0,
               probe: bool = False, prompt_tokens: int = 0) -> Lookup:
        """How many leading keys can be loaded, and from where. One round trip to the store.
        shards: ranks that hold a part of each block; the keys name shard 0, and a block is there
        when the parts of all ranks are. 0, 1: each key as it is. probe: no prompt is about to be
        computed: not for the options trace and shadow, which prompt_tokens (0: of the keys) is."""
        tiers, roots = (C.c_int * len(keys))(), (C.c_uint8 * len(keys))()
        opts = _c.kvt_lookup_opts(C.sizeof(_c.kvt_lookup_opts), Level.parse(min_level),
                                  int(probe), shards, prompt_tokens, C.addressof(roots))
        n = self._lib.kvt_lookup(self.handle, keys.address, len(keys), C.byref(opts), tiers)
        return Lookup(_c.check(n, "lookup"), tiers, roots)

    def lookup_groups(self, chains: Mapping[int, Keys], max_tokens: int,
                      min_level: Level | str | None = None, shards: int = 0,
                      prompt_tokens: int = 0, tiers: dict[int, Sequence[int]] | None = None
                      ) -> tuple[int, dict[int, range]]:
        """The longest prefix, in tokens, that every group can serve, and the blocks of each group
        that it needs. chains: the keys of each group from the start of the prompt on. shards,
        prompt_tokens: as of lookup(). tiers: if given, filled with where each key is, by group."""
        made = (_c.kvt_group_chain * len(chains))()
        keep: dict[int, Any] = {}
        for chain, (group, keys) in zip(made, chains.items()):
            keep[group] = (C.c_int * len(keys))()
            chain.group, chain.keys, chain.n = group, keys.address, len(keys)
            chain.tiers = C.addressof(keep[group])
        opts = _c.kvt_lookup_opts(C.sizeof(_c.kvt_lookup_opts), Level.parse(min_level), 0, shards,
                                  prompt_tokens)
        n = _c.check(self._lib.kvt_lookup_groups(self.handle, made, len(chains), max_tokens,
                                                 C.byref(opts)), "lookup")
        if tiers is not None:
            tiers.update(keep)
        return n, {c.group: range(c.first, c.first + c.count) for c in made}

    def plan(self, tiers: Sequence[int], *, first_tokens: int = 0, prompt_tokens: int = 0,
             gpu_busy: float = 0.0, cut: Cut = Cut.NONE, group: int = 0,
             roots: Sequence[int] = ()) -> Plan:
        """Load or recompute? tiers, roots: of Lookup; without roots those on disk are taken to lie
        as the blocks loaded lately did. first_tokens: the engine has them already, before the first
        block; prompt_tokens: of the whole prompt (0: it ends with the last block);
        gpu_busy: 0 idle to 1 requests wait. A query that makes no sense: KvtierError INVAL."""
        if not isinstance(tiers, C.Array):
            tiers = (C.c_int * len(tiers))(*tiers)
        if len(roots) not in (0, len(tiers)):
            raise ValueError(f"{len(roots)} roots for {len(tiers)} tiers")
        if not isinstance(roots, C.Array):
            roots = (C.c_uint8 * len(roots))(*roots)
        query = _c.kvt_plan_query(C.sizeof(_c.kvt_plan_query), C.addressof(tiers), len(tiers),
                                  first_tokens, prompt_tokens, gpu_busy, group, cut, 0,
                                  C.addressof(roots) if len(roots) else None)
        out = _c.kvt_plan(C.sizeof(_c.kvt_plan))
        _c.check(self._lib.kvt_plan(self.handle, C.byref(query), C.byref(out)), "plan")
        return Plan(out.first, out.count, Reason(out.reason), bool(out.unsure), out.ttft_s,
                    out.load_s, out.gpu_s, out.recompute_s, out.load_all_s,
                    out.deadline_s)

    def observe_prefill(self, new_tokens: int, cached_tokens: int, seconds: float) -> bool:
        """Tell what a prefill took: new_tokens computed behind cached_tokens. False: not taken."""
        return self._lib.kvt_observe_prefill(self.handle, new_tokens, cached_tokens, seconds) == 0

    def store(self, pool: Pool, keys: Keys, ids: Sequence[int], *, parent: Keys | None = None,
              first_pos: int = 0, level: Level | str | None = None, exact: bool = False,
              cool: bool = False, write: Write = Write.DEFAULT, stream: int | None = None,
              event: int | None = None) -> Request:
        """Queue the store of blocks out of pool pages. ids: a page number for each key.
        parent: the key (Keys of length 1) of the block before keys[0]; without it the blocks of the
        call end with ORPHAN. first_pos: of the first token of keys[0].
        stream, event: what a GPU pool waits for before pages are read (0: the default stream).
        Never blocks. BusyError: the queue is full; other errors as kvt_store()."""
        opts = _c.kvt_store_opts(C.sizeof(_c.kvt_store_opts), parent.address if parent else None,
                                 first_pos, Level.parse(level), exact, cool, write)
        return self._submit(self._lib.kvt_store, "store", pool, keys, ids, opts, stream, event)

    def load(self, pool: Pool, keys: Keys, ids: Sequence[int], *, deadline: float | None = None,
             min_level: Level | str | None = None, stream: int | None = None,
             event: int | None = None, layers: bool = False) -> Request:
        """Queue the load of blocks into pool pages. deadline: seconds from now; None: as
        configured, negative: none. layers: the first layers of all blocks come first, where that
        can be done (GPU pools): Request.wait_layer(). Only pages whose status is 0 hold what the
        level promises. Never blocks. Errors as kvt_load()."""
        opts = _c.kvt_load_opts(C.sizeof(_c.kvt_load_opts), deadline_ns(deadline),
                                Level.parse(min_level))
        opts.layers = layers
        return self._submit(self._lib.kvt_load, "load", pool, keys, ids, opts, stream, event)

    def _submit(self, call: Any, what: str, pool: Pool, keys: Keys, ids: Sequence[int], opts: Any,
                stream: int | None, event: int | None) -> Request:
        if len(ids) != len(keys):
            raise ValueError(f"{what}: {len(ids)} pages for {len(keys)} keys")
        if stream is not None and event is not None:
            raise ValueError(f"{what}: a stream or an event, not both")
        if stream is not None or event is not None:
            opts.wait = 1 if stream is not None else 2
            opts.wait_for = (stream if stream is not None else event) or None
        self._cache.reap() if self._cache._orphans else None
        pages, out = array("I", ids), C.c_void_p()
        code = call(self.handle, pool.handle, keys.address, pages.buffer_info()[0], len(keys),
                    C.byref(opts), C.byref(out))
        _c.check(code, what)
        return Request(self._cache, out.value, pool)

    def prefetch(self, keys: Keys, min_level: Level | str | None = None) -> int:
        """Bring blocks from disk into DRAM. Fire and forget; returns blocks queued."""
        opts = _c.kvt_load_opts(C.sizeof(_c.kvt_load_opts), 0, Level.parse(min_level))
        return _c.check(self._lib.kvt_prefetch(self.handle, keys.address, len(keys),
                                               C.byref(opts)), "prefetch")

    def pin(self, keys: Keys) -> int:
        """Keep blocks from eviction, within the option pin_max. Returns blocks pinned."""
        return _c.check(self._lib.kvt_pin(self.handle, keys.address, len(keys)), "pin")

    def unpin(self, keys: Keys) -> int:
        """Undo pin(). Returns blocks unpinned."""
        return _c.check(self._lib.kvt_unpin(self.handle, keys.address, len(keys)), "unpin")

    def purge(self, keys: Keys | None = None) -> int:
        """Remove blocks, or the whole namespace (None), for good from every tier. Blocks.
        An empty Keys removes nothing. Returns blocks removed."""
        if keys is not None and len(keys) == 0:
            return 0
        return _c.check(self._lib.kvt_purge(self.handle, keys.address if keys else None,
                                            len(keys) if keys else 0), "purge")

    def _end(self, handle: int) -> None:
        if self._owned:
            self._lib.kvt_ns_close(handle)


def usable_blocks(block_tokens: int, n_tokens: int) -> int:
    """Whole blocks of a prompt that may be loaded so that one token is left to compute."""
    return max(0, n_tokens - 1) // block_tokens


def each_option() -> list[tuple[str, str, str]]:
    """(key, default, help) of every option of the loaded library, and of Cache beside them."""
    library, made, out = _c.load(), C.c_void_p(), []
    _c.check(library.kvt_config_new(C.byref(made)), "config")

    def take(_arg, key, _value, default, about):
        out.append((key.decode(), (default or b"").decode(), (about or b"").decode()))

    library.kvt_config_each(made, _c.CONFIG_FN(take), None)
    library.kvt_config_free(made)
    return [*out, *_limits.OPTIONS]


@atexit.register
def _close_all() -> None:
    """Logs come from threads of the library: none may run when the interpreter is gone."""
    for cache in list(_open_caches):
        cache.close()


__all__ = ["Cache", "Cut", "KvtierError", "Lookup", "Namespace", "Plan", "Pool", "Reason",
           "Report", "Request", "Tier", "Write", "check_options", "collect_stats", "each_option",
           "options", "usable_blocks"]
