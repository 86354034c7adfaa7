"""Pools and requests: what a cache's namespaces move blocks in and by.

Made by Cache.pool() and by Namespace.store() and load(), never by hand. Lifetime: both end with
their cache. A pool keeps its tensors alive until it is closed, and a request keeps its pool; a
request that is dropped in flight goes on and is freed by the cache later. Threads: any.
"""
from __future__ import annotations

import ctypes as C
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _c
from ._errors import ClosedError, ErrorCode
from .layout import Layout, Place, pool_desc

if TYPE_CHECKING:
    from .cache import Cache


@dataclass(frozen=True)
class Report:
    """What became of a request. blocks_run_ok: the longest leading run that is good."""

    blocks_ok: int
    blocks_run_ok: int
    blocks_dram: int
    blocks_disk: int
    bytes_moved: int
    elapsed_ns: int
    blocks_remote: int = 0


def timeout_ns(seconds: float | None) -> int:
    """Of a wait: None and infinity for ever (-1). ValueError: negative, or no number."""
    if seconds is None or seconds == float("inf"):
        return -1
    if not seconds >= 0:
        raise ValueError(f"a timeout of {seconds} s: 0 only looks, None waits for ever")
    return int(min(seconds * 1e9, _c.LIMIT_NONE))


def deadline_ns(seconds: float | None) -> int:
    """Of a load: None as configured (0), negative and infinite none (-1). ValueError: no number."""
    if seconds is None:
        return 0
    if seconds != seconds:
        raise ValueError("a deadline of nan s")
    if seconds < 0 or seconds == float("inf"):
        return -1
    return int(min(max(1, seconds * 1e9), _c.LIMIT_NONE))


class Calls:
    """The library's functions for one cache, whose close() waits for the calls under way: threads
    go on calling while an interpreter ends. After end() every call is refused by ClosedError.

    It takes no lock, which a fork could leave taken: adding to a set and removing are atomic."""

    def __init__(self, library: C.CDLL) -> None:
        self.raw, self._ended, self._pid = library, False, os.getpid()
        self._under_way: set[tuple[int, object]] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, under_way = getattr(self.raw, name), self._under_way

        def call(*args: Any) -> Any:
            mark = (threading.get_ident(), object())
            try:
                under_way.add(mark)
                if self._ended:
                    raise ClosedError("the cache is closed", ErrorCode.CLOSED)
                return function(*args)
            finally:
                under_way.discard(mark)

        setattr(self, name, call)
        return call

    def end(self, cancel: Callable[[], None]) -> None:
        """Refuse calls from now on, and wait for those of other threads of this process. cancel():
        ends what they may wait for; again and again, since one may have begun to just now."""
        self._ended, me = True, threading.get_ident()
        while os.getpid() == self._pid and any(mark[0] != me for mark in list(self._under_way)):
            cancel()
            time.sleep(0.001)


class _Child:
    """What ends with its cache."""

    def __init__(self, cache: Cache, handle: int) -> None:
        self._cache = cache
        self._handle: int | None = handle
        self._lib = cache._lib
        cache._children.add(self)

    @property
    def handle(self) -> int:
        """The C pointer; ClosedError after close(), or when the cache is closed."""
        if self._handle is None:
            raise ClosedError(f"the {type(self).__name__.lower()} is closed", ErrorCode.CLOSED)
        return self._handle

    def _forget(self) -> None:
        self._handle = None

    def _end(self, handle: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Let go. Twice is allowed; a closed cache has done it already."""
        handle, self._handle = self._handle, None
        if handle is not None and self._cache._handle is not None:
            try:
                self._end(handle)
            except ClosedError:  # by another thread, in the meantime
                pass

    def __enter__(self):
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()


class Pool(_Child):
    """Engine memory that was registered. Its tensors live as long as it does."""

    def __init__(self, cache: Cache, layout: Layout, places: Sequence[Place], block_count: int,
                 device: int, owner: Any) -> None:
        if len(places) != len(layout.parts):
            raise ValueError(f"{len(places)} places for a layout of {len(layout.parts)} parts")
        desc = pool_desc(places, block_count, device)
        out = C.c_void_p()
        _c.check(cache._lib.kvt_pool_register(cache.handle, C.byref(layout.to_c()), C.byref(desc),
                                              C.byref(out)), "pool")
        super().__init__(cache, out.value)
        self.layout, self.block_count, self.device, self.owner = layout, block_count, device, owner
        self._requests: set[int] = set()  # handles of those that are not freed

    def reset_origin(self, ids: Iterable[int], group: int | None = None) -> None:
        """Say that pages were computed anew and hold exact KV: call it before their new content is
        stored, best when they are allocated. group None: of every group."""
        pages = array("I", ids)
        address = pages.buffer_info()[0]
        code = self._lib.kvt_pool_reset_origin(self.handle, address, len(pages)) \
            if group is None else self._lib.kvt_pool_reset_origin_group(
                self.handle, group, address, len(pages))
        _c.check(code, "reset origin")

    def _end(self, handle: int) -> None:
        with self._cache._lock:  # whoever takes a request out of the set frees it, and nobody else
            requests, self._requests = self._requests, set()
        for request in requests:  # those of live Request objects too: their outcome is lost
            self._lib.kvt_req_wait(request, -1)
            self._lib.kvt_req_free(request)
        self._lib.kvt_pool_unregister(handle)
        self.owner = None


class Request(_Child):
    """A store or load in flight. Dropping it is allowed: it goes on, and is freed later."""

    def __init__(self, cache: Cache, handle: int, pool: Pool) -> None:
        super().__init__(cache, handle)
        self._pool = pool
        pool._requests.add(handle)

    @property
    def handle(self) -> int:
        if self._handle is None or self._handle not in self._pool._requests:
            raise ClosedError("the request is freed", ErrorCode.CLOSED)
        return self._handle

    def wait(self, timeout: float | None = None) -> bool:
        """True: complete. timeout in seconds; None: for ever, 0: only look. ClosedError: the cache
        was closed meanwhile."""
        return _c.check(self._lib.kvt_req_wait(self.handle, timeout_ns(timeout)), "wait") == 1

    def wait_layer(self, layer: int, timeout: float | None = None) -> bool:
        """Of a load by layers: True when Part.layer `layer` and all before it have come. Their
        bytes are provisional until the request is complete: look at status() before anything
        leaves that was computed from them. Any other request: wait()."""
        return _c.check(self._lib.kvt_req_wait_layer(self.handle, layer, timeout_ns(timeout)),
                        "wait") == 1

    def cancel(self) -> None:
        """Ask for an early end; the request still completes, once."""
        self._lib.kvt_req_cancel(self.handle)

    def status(self) -> list[int]:
        """Per block, after completion: 0 done, else a number of ErrorCode (EXISTS, MISS, ...)."""
        count = C.c_size_t()
        where = self._lib.kvt_req_status(self.handle, C.byref(count))
        return list((C.c_int32 * count.value).from_address(where)) if where else []

    def report(self) -> Report:
        """The sums, after completion."""
        out = _c.kvt_req_report(C.sizeof(_c.kvt_req_report))
        _c.check(self._lib.kvt_req_report(self.handle, C.byref(out)), "report")
        return Report(out.blocks_ok, out.blocks_run_ok, out.blocks_dram, out.blocks_disk,
                      out.bytes_moved, out.elapsed_ns, out.blocks_remote)

    def _end(self, handle: int) -> None:
        with self._cache._lock:
            if handle not in self._pool._requests:  # the pool was closed and has freed it
                return
            if self._lib.kvt_req_wait(handle, 0) == 0:
                self._cache._orphans.append((handle, self._pool))
                return
            self._pool._requests.discard(handle)
            self._lib.kvt_req_free(handle)
