"""Pages that an engine names by keys of its own, one by one: what the adapters for vLLM's tiering
manager, SGLang and LMCache have in common.

A Job is the store or load of some pages. Nothing here blocks but Job.wait() and close(); a load that
the library has no room for just now waits for its turn, a store is dropped and counted. Keys of one
call are taken for a run of one sequence, in order, whose beginning is not known: each is stored
whatever is there before it.

A page that was loaded coarse may come back under the same key through the engine's own tiers; it is
stored at kv8 then, so that what was coded once at 4 bits is not coded so again (Memory).
Threads: any; each Job belongs to the thread that made it.
"""
from __future__ import annotations

import ctypes as C
import logging
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._errors import BusyError, ConfigError, ErrorCode, KvtierError
from .cache import Cache, Namespace, Pool, Request, check_options, each_option
from .geometry import PageShape, unknown
from .layout import Identity, Keys, Level

_log = logging.getLogger("kvtier")
_BATCH = 1024          # pages of one request to the library
_PATIENCE_S = 30.0     # that a load waits for room in the library before it is a miss
_ALIGN = 4096
_FINE = (0, int(ErrorCode.EXISTS))
_REMEMBERED = 1 << 18  # keys that were loaded coarse

COUNTERS = {
    "asked": "Pages that were looked up",
    "found": "Pages of those that the store holds, as far as the first that it does not",
    "declined": "Pages of those that are quicker to compute",
    "loaded": "Pages loaded",
    "loaded_disk": "Pages of those that came from disk",
    "loaded_remote": "Pages of those that came from the tier that machines share",
    "failed": "Pages that were found and could not be loaded",
    "stored": "Pages stored, or stored before",
    "dropped": "Pages that the store had no room or time for",
}


class Counts:
    """Numbers by the names of COUNTERS."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all = dict.fromkeys(COUNTERS, 0)
        self._taken = dict(self._all)

    def add(self, **more: int) -> None:
        with self._lock:
            for name, value in more.items():
                self._all[name] += value

    def all(self) -> dict[str, int]:
        """Since the start."""
        with self._lock:
            return dict(self._all)

    def take(self) -> dict[str, int]:
        """Since the last call, without zeros."""
        with self._lock:
            out = {name: value - self._taken[name] for name, value in self._all.items()}
            self._taken = dict(self._all)
        return {name: value for name, value in out.items() if value}


def split_options(where: str, extra: Mapping[str, Any] | None,
                  own: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the adapter's own options, those of the library). ConfigError names one that does not exist,
    with the nearest that does, or a value that makes no sense."""
    library = [name for name, _, _ in each_option()]
    mine: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in (extra or {}).items():
        if key in own:
            mine[key] = value
        elif key in library:
            rest[key] = value
        else:
            raise unknown(where, key, [*library, *own])
    try:
        check_options(rest)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", error.code) from None
    return mine, rest


def open_cache(where: str, options: Mapping[str, Any]) -> Cache:
    """Cache(options), with the adapter's name in what an error says, and what it runs without."""
    try:
        cache = Cache(options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", error.code) from None
    if cache.notes:
        _log.warning("%s: %s", where, cache.notes)
    return cache


class Memory:
    """The last keys that were loaded coarse."""

    def __init__(self, room: int = _REMEMBERED) -> None:
        self._lock, self._keys, self._room = threading.Lock(), OrderedDict(), room

    def add(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._room:
                self._keys.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._keys


class Job:
    """The store or load of pages. good: which of them, once poll() or wait() has said that it is
    done; bytes: of records that were moved; seconds: it took."""

    def __init__(self, pages: "PageStore", load: bool, hashes: Sequence[bytes],
                 ids: Sequence[int], position: int) -> None:
        self.load, self.hashes, self.ids, self._pages = load, hashes, ids, pages
        self.good = [False] * len(hashes)
        self.bytes, self.seconds = 0, 0.0
        self._position = position  # of the first page in its sequence, in pages
        self._began, self._next, self._done = time.monotonic(), 0, False
        self._parts: list[tuple[Request, int]] = []
        self._submit()

    def _submit(self) -> None:
        while self._next < len(self.hashes):
            first = self._next
            end = min(first + _BATCH, len(self.hashes))
            try:
                if self.load:
                    request = self._pages.start_load(self.hashes[first:end], self.ids[first:end])
                else:
                    request, taken = self._pages.start_store(
                        self.hashes[first:end], self.ids[first:end], self._position + first)
                    end = first + taken
            except BusyError:
                if self.load and time.monotonic() - self._began < _PATIENCE_S:
                    return
                end = len(self.hashes)
            except KvtierError as error:
                _log.warning("kvtier: a %s was refused: %s", "load" if self.load else "store",
                             error)
                end = len(self.hashes)
            else:
                self._parts.append((request, first))
            self._next = end

    def poll(self) -> bool:
        """True: it is done. Never blocks."""
        if self._done:
            return True
        self._submit()
        waiting = []
        for request, first in self._parts:
            if not request.wait(0):
                waiting.append((request, first))
                continue
            self._take(request, first)
        self._parts = waiting
        if not waiting and self._next >= len(self.hashes):
            self._end()
        return self._done

    def _take(self, request: Request, first: int) -> None:
        for number, code in enumerate(request.status(), first):
            self.good[number] = code == 0 if self.load else code in _FINE
        report = request.report()
        self.bytes += report.bytes_moved
        if self.load:
            self._pages.counts.add(loaded_disk=report.blocks_disk,
                                   loaded_remote=report.blocks_remote)
        request.close()

    def _end(self) -> None:
        self._done = True
        self.seconds = time.monotonic() - self._began
        fine = sum(self.good)
        if self.load:
            self._pages.counts.add(loaded=fine, failed=len(self.good) - fine)
            self._pages.loaded(self.hashes, self.good)
        else:
            self._pages.counts.add(stored=fine, dropped=len(self.good) - fine)

    def wait(self) -> list[bool]:
        """Until it is done; returns good. No page is read or written afterwards."""
        while not self.poll():
            if self._parts:
                self._parts[0][0].wait()
            else:
                time.sleep(0.001)  # the library takes no more requests just now
        return self.good


class PageStore:
    """One kind of pages in one cache: a namespace, and a pool over the engine's memory."""

    def __init__(self, cache: Cache, identity: Identity, shape: PageShape, base: int, step: int,
                 count: int, owner: Any = None, counts: Counts | None = None,
                 shard: int = 0) -> None:
        self.cache, self.shape, self._shard = cache, shape, shard
        self.counts = counts or Counts()
        self.ns: Namespace = cache.namespace(identity, shape.layout)
        self.pool: Pool = cache.pool(shape.layout, shape.places(base, step), count, owner=owner)
        level = Level.parse(str(cache.stats()["config.level"]))
        self._coarse = Memory() if shape.coded and level < Level.KV8 else None

    def keys(self, hashes: Sequence[bytes]) -> Keys:
        """Of the library; shard is the rank that holds these bytes."""
        return Keys.from_hashes(hashes, 0, self._shard)

    def find(self, hashes: Sequence[bytes], first_tokens: int | None = None) -> int:
        """How many leading pages are there and worth loading. first_tokens: of the sequence before
        the first page; None: not weighed against computing them."""
        found = self.ns.lookup(self.keys(hashes))
        use = found.n
        if use and first_tokens is not None:
            plan = self.ns.plan(found.tiers[:use], first_tokens=first_tokens,
                                roots=found.roots[:use])
            use = plan.count if plan.first == 0 else 0
        self.counts.add(asked=len(hashes), found=found.n, declined=found.n - use)
        return use

    def present(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which pages are there, wherever they stand."""
        keys, out, at = self.keys(hashes), [False] * len(hashes), 0
        while at < len(hashes):
            found = self.ns.lookup(keys[at:], probe=at > 0)
            out[at:at + found.n] = [True] * found.n
            at += found.n + 1
        self.counts.add(asked=len(hashes), found=sum(out))
        return out

    def start_load(self, hashes: Sequence[bytes], ids: Sequence[int]) -> Request:
        """A request for pages; BusyError and others as Namespace.load()."""
        return self.ns.load(self.pool, self.keys(hashes), ids)

    def start_store(self, hashes: Sequence[bytes], ids: Sequence[int],
                    position: int) -> tuple[Request, int]:
        """A request for the leading pages that can be stored alike, and how many they are. Pages
        hold what the engine put there, not what was loaded into them before."""
        again, taken = False, len(hashes)
        if self._coarse is not None:
            seen = [h in self._coarse for h in hashes]
            again = seen[0]
            taken = seen.index(not again) if (not again) in seen else taken
        self.pool.reset_origin(ids[:taken])
        tokens = self.shape.layout.block_tokens
        return self.ns.store(
            self.pool, self.keys(hashes[:taken]), ids[:taken], first_pos=position * tokens,
            level=Level.KV8 if again else None), taken

    def loaded(self, hashes: Sequence[bytes], good: Sequence[bool]) -> None:
        """Remember what came back coarse."""
        if self._coarse is not None:
            self._coarse.add(h for h, fine in zip(hashes, good) if fine)

    def store(self, hashes: Sequence[bytes], ids: Sequence[int], position: int = 1) -> Job:
        """Start to store pages. position: of the first one in its sequence, counted in pages; 0:
        the sequence begins with it, and it is stored raw."""
        return Job(self, False, hashes, ids, position)

    def load(self, hashes: Sequence[bytes], ids: Sequence[int]) -> Job:
        """Start to load pages. Those that are not good afterwards hold nothing of use."""
        return Job(self, True, hashes, ids, 0)

    def close(self) -> None:
        """Let go of the pages: waits until none is read or written any more."""
        self.pool.close()
        self.ns.close()


class Staging:
    """Pages of our own, for an engine whose buffers lie anywhere. Threads: any; take() waits for
    a free page, so that whoever holds one must not wait for another."""

    def __init__(self, page_bytes: int, room: int = 64 << 20) -> None:
        self.step = -(-page_bytes // _ALIGN) * _ALIGN
        self.count = max(2, min(256, room // self.step))
        self._memory = mmap.mmap(-1, self.step * self.count)
        self.base = C.addressof(C.c_char.from_buffer(self._memory))
        self._view = memoryview(self._memory)
        self._free = list(range(self.count))
        self._change = threading.Condition()

    def take(self, most: int) -> list[int]:
        """One to `most` pages."""
        with self._change:
            while not self._free:
                self._change.wait()
            taken, self._free = self._free[-most:], self._free[:-most]
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Back again."""
        with self._change:
            self._free.extend(pages)
            self._change.notify_all()

    def fill(self, page: int, data: memoryview) -> None:
        """Copy bytes into a page; what is beyond them becomes 0."""
        start, size = page * self.step, data.nbytes
        self._view[start:start + size] = data
        self._view[start + size:start + self.step] = bytes(self.step - size)

    def copy_out(self, page: int, data: memoryview) -> None:
        """Copy the beginning of a page to where somebody wants it."""
        start = page * self.step
        data[:] = self._view[start:start + data.nbytes]


def as_bytes(buffer: Any) -> memoryview:
    """A view of a buffer's bytes. TypeError: it has none, or they do not lie together."""
    return memoryview(buffer).cast("B")


def save(pages: PageStore, staging: Staging, hashes: Sequence[bytes],
         sources: Sequence[memoryview], position: int = 1) -> list[bool]:
    """Store buffers through staging pages. Blocks until they are encoded; returns which are."""
    out: list[bool] = []
    while len(out) < len(hashes):
        at = len(out)
        ids = staging.take(len(hashes) - at)
        try:
            for number, page in enumerate(ids, at):
                staging.fill(page, sources[number])
            out += pages.store(hashes[at:at + len(ids)], ids, position + at).wait()
        finally:
            staging.give(ids)
    return out


def fetch(pages: PageStore, staging: Staging, hashes: Sequence[bytes],
          targets: Sequence[memoryview]) -> list[bool]:
    """Load into buffers through staging pages. Blocks. A target whose page was not there is left
    as it was."""
    out: list[bool] = []
    while len(out) < len(hashes):
        at = len(out)
        ids = staging.take(len(hashes) - at)
        try:
            good = pages.load(hashes[at:at + len(ids)], ids).wait()
            for number, (page, fine) in enumerate(zip(ids, good), at):
                if fine:
                    staging.copy_out(page, targets[number])
            out += good
        finally:
            staging.give(ids)
    return out


def weights(where: str, own: Mapping[str, Any], model: str | None) -> str:
    """A digest of a model's weights: as given by weights_digest, else of the files of model_path,
    else of `model` where that is a path. "": there is none. ConfigError: files cannot be read."""
    from .vllm.identity import directory_digest
    if own.get("weights_digest"):
        return str(own["weights_digest"])
    path = own.get("model_path") or (model if model and os.path.exists(model) else None)
    if path is None:
        return ""
    try:
        return directory_digest(Path(str(path)))
    except OSError as error:
        raise ConfigError(f"{where}: the weights in {path} cannot be read: {error}") from error
