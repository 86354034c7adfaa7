"""LMCache: `KvtierConnector`, a native_plugin connector for its second level: chunks on disk, coded
where their geometry is given, and across restarts.

    lmcache server ... --l2-adapter '{"type": "native_plugin", "module_path": "kvtier.lmcache",
        "class_name": "KvtierConnector", "adapter_params": {"disk": "/nvme/kv:500GiB"}}'

LMCache hands over chunks as buffers that lie anywhere, under keys that name model, rank and salt;
they go through staging memory. With "geometry" a chunk is coded, else it is kept to the byte;
kvtier.lmcache_adapter learns the geometry from LMCache.
submit_*() queue and return a number; two threads work, one for gets and lookups, one for sets and
deletes; a completion is told once by drain_completions(), and event_fd() is readable then. Errors:
ConfigError from the constructor; afterwards a doubt is a miss, and is counted (counts).
Nothing of LMCache is imported here.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import queue
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._errors import ConfigError, KvtierError
from ._pagestore import (Counts, PageStore, Staging, as_bytes, fetch, open_cache, save,
                         split_options, weights)
from .geometry import GRAIN, PageShape, dtype_of, given, opaque
from .layout import Identity

_log = logging.getLogger("lmcache.kvtier")  # of LMCache's own, which alone have a handler there
WHERE = "kvtier.lmcache"
OWN = ("weights_digest", "salt", "geometry")
_SIZES_MAX = 64  # sizes of chunks that are kept apart
_SIZE = "<QH"
_SIZE_BYTES = struct.calcsize(_SIZE)
Completion = tuple[int, bool, str, "list[bool] | None"]


class _Chunks:
    """Chunks of one size: a store, and memory for those on their way."""

    def __init__(self, owner: "KvtierConnector", size: int) -> None:
        shape = owner.shape(size)
        self.staging = Staging(shape.page_bytes)
        identity = Identity("lmcache", model="lmcache", revision=owner.digest, layout=shape.text,
                            key_scheme="lmcache-key", salt=owner.salt, extra=f"bytes={size}")
        self.store = PageStore(owner.cache, identity, shape, self.staging.base, self.staging.step,
                               self.staging.count, counts=owner.counts)
        _log.info("kvtier: chunks of %d bytes, %s, %d stored, namespace %s", size,
                  "coded" if shape.coded else "as they are", self.store.ns.record_bytes(),
                  self.store.ns.id.hex())


class _Sizes:
    """The sizes of the chunks that were ever stored, and what was learnt of their geometry: records
    of a namespace of their own, since a look-up tells no size. A record: the size, the length of a
    text, the text, zeros. One that is lost costs the hits until the size is stored again."""

    def __init__(self, owner: "KvtierConnector") -> None:
        shape = opaque(GRAIN)
        self._staging = Staging(GRAIN, 0)
        self._store = PageStore(owner.cache, Identity(
            "lmcache", model=owner.remembers, revision=owner.digest, layout=shape.text,
            salt=owner.salt), shape, self._staging.base, self._staging.step, self._staging.count)
        self._keys = [hashlib.sha256(b"size %d" % i).digest() for i in range(_SIZES_MAX)]
        self.all: list[int] = []
        self._taken = self._store.present(self._keys)
        for number, there in enumerate(self._taken):
            data = bytearray(GRAIN)
            if there and fetch(self._store, self._staging, [self._keys[number]],
                               [memoryview(data)])[0]:
                size, length = struct.unpack_from(_SIZE, data)
                self.all.append(size)
                owner.recall(size, bytes(data[_SIZE_BYTES:_SIZE_BYTES + length]))
        self._pin()

    def _pin(self) -> None:
        for key, there in zip(self._keys, self._taken):
            if there:
                self._store.ns.pin(self._store.keys([key]))

    def add(self, size: int, text: bytes) -> bool:
        """False: there are too many."""
        if size in self.all:
            return True
        if len(self.all) >= _SIZES_MAX or False not in self._taken:
            return False
        number = self._taken.index(False)
        self._taken[number] = save(self._store, self._staging, [self._keys[number]],
                                   [memoryview(struct.pack(_SIZE, size, len(text)) + text)])[0]
        self.all.append(size)
        self._pin()
        return True

    def close(self) -> None:
        self._store.close()


def _of_tensor(shape: Sequence[int], dtype: Any) -> dict[str, Any] | None:
    """The geometry of LMCache's chunks, [2, layers, tokens, hidden] or, of MLA, [layers, tokens,
    hidden]. How hidden is cut into heads LMCache does not say: rows of 128 are what is coded."""
    *kinds, layers, _, hidden = shape
    if kinds == [2]:
        dim = next((dim for dim in (128, 64, 32, 16) if hidden % dim == 0), 0)
        order = "clthd"
    else:
        dim, order = hidden, "lthd"
    if kinds not in ([], [2]) or not dim or dtype_of(dtype) is None:
        return None
    return {"order": order, "layers": layers, "kv_heads": hidden // dim, "head_dim": dim,
            "dtype": str(dtype).removeprefix("torch.")}


class KvtierConnector:
    """See the module. params: adapter_params, the options of docs/config.md and OWN."""

    remembers = "sizes of chunks"  # name of what _Sizes keeps

    def __init__(self, **params: Any) -> None:
        own, library = split_options(f"{WHERE}: adapter_params", params, OWN)
        self.salt = str(own.get("salt", "")).encode()
        self.digest = str(own.get("weights_digest", "")) or "named by LMCache"
        self._geometry = own.get("geometry")
        self._learned: dict[int, dict[str, Any] | None] = {}  # geometries by sizes of chunks
        if self._geometry is not None:
            given(WHERE, self._geometry, 16)  # says what is wrong with it, before anything is open
        self.counts = Counts()
        self._models: dict[str, bytes] = {}
        self._chunks: dict[int, _Chunks] = {}
        self._lock = threading.Lock()
        self._done: list[Completion] = []
        self._next, self._closed = 0, False
        self.cache = open_cache(WHERE, library)
        try:
            self._sizes = _Sizes(self)
        except BaseException:
            self.cache.close()
            raise
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._work: dict[str, queue.SimpleQueue] = {}
        self._threads = []
        for name in ("get", "set"):
            self._work[name] = queue.SimpleQueue()
            thread = threading.Thread(target=self._run, args=(self._work[name],),
                                      name=f"kvtier-lmcache-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def shape(self, size: int) -> PageShape:
        """Of chunks of so many bytes: coded when the geometry fits, else bytes."""
        geometry = self._geometry or self._learned.get(size)
        if isinstance(geometry, Mapping):
            one = given(WHERE, geometry, 16)
            tokens, rest = divmod(size * 16, one.page_bytes)
            try:
                if not rest:
                    return given(WHERE, geometry, tokens).shape()
            except ConfigError as error:
                _log.warning("kvtier: chunks of %d bytes are stored as they are: %s", size, error)
            else:
                _log.warning("kvtier: chunks of %d bytes are no whole number of tokens of %d bytes "
                             "each, as the geometry has it: they are stored as they are", size,
                             one.page_bytes // 16)
        return opaque(-(-size // GRAIN) * GRAIN)

    def learn(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        """What LMCache says of chunks, before any of that size is looked up or stored. Chunks of
        several tensors, and of what is not coded, are kept to the byte."""
        if len(shapes) != 1 or not 3 <= len(shapes[0]) <= 4:
            return
        shape = [int(extent) for extent in shapes[0]]
        made = _of_tensor(shape, dtypes[0])
        if made is None:
            return
        size = math.prod(shape) * dtype_of(dtypes[0]).size
        with self._lock:
            if size not in self._learned and size not in self._chunks:
                try:
                    given(WHERE, made, shape[-2])
                except ConfigError as error:
                    _log.warning("kvtier: chunks of %d bytes are stored as they are: %s", size, error)
                    made = None
                self._learned[size] = made

    def recall(self, size: int, text: bytes) -> None:
        """What was learnt before a restart."""
        with contextlib.suppress(ValueError, ConfigError):
            if text:
                made = json.loads(text)
                given(WHERE, made, 16)
                self._learned[size] = made

    # ---- what LMCache calls ----

    def event_fd(self) -> int:
        """Readable when there are completions."""
        return self._event

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Load chunks into buffers; the completion says which have come."""
        return self._submit("get", lambda: self._get(keys, memoryviews))

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Store buffers; they are read until the completion."""
        return self._submit("set", lambda: self._set(keys, memoryviews))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Which chunks are there."""
        return self._submit("get", lambda: self._exists(keys))

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Remove chunks from every tier."""
        return self._submit("set", lambda: self._delete(keys))

    def drain_completions(self) -> list[Completion]:
        """(number, whether all went well, what did not, result of each key), each told once."""
        with self._lock:
            if self._event >= 0:
                with contextlib.suppress(BlockingIOError):  # nothing new
                    os.eventfd_read(self._event)
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End what was submitted, and write what is queued. Twice is allowed. Blocks."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for work in self._work.values():
            work.put(None)
        for thread in self._threads:
            thread.join()
        for chunks in self._chunks.values():
            chunks.store.close()
        self._sizes.close()
        self.cache.close()
        with self._lock:  # its number may be another file's from now on
            event, self._event = self._event, -1
        os.close(event)

    # ---- the threads ----

    def _submit(self, name: str, call: Callable[[], list[bool]]) -> int:
        with self._lock:
            if self._closed:
                raise KvtierError(f"{WHERE}: the connector is closed")
            number, self._next = self._next, self._next + 1
            self._work[name].put((number, call))
        return number

    def _run(self, work: queue.SimpleQueue) -> None:
        while (item := work.get()) is not None:
            number, call = item
            try:
                good, error = call(), ""
            except Exception as raised:
                _log.warning("kvtier: %s", raised)
                good, error = None, str(raised) or type(raised).__name__
            done = (number, good is not None, error, good)
            with self._lock:
                self._done.append(done)
            os.eventfd_write(self._event, 1)

    def _hash(self, key: str) -> bytes:
        """Of LMCache's key. Where it names the model by a path, the weights there are part of it:
        another model in the same place finds nothing."""
        model = key.partition("@")[0]
        known = self._models.get(model)
        if known is None:
            here = model if os.path.isabs(model) and Path(model).is_dir() else None
            known = self._models[model] = weights(WHERE, {}, here).encode() if here else b""
        return hashlib.sha256(known + b"\0" + key.encode("utf-8", "surrogateescape")).digest()

    def _of_size(self, size: int) -> _Chunks:
        with self._lock:
            if size not in self._chunks:
                self._chunks[size] = _Chunks(self, size)
            return self._chunks[size]

    def _by_size(self, views: Sequence[memoryview]) -> dict[int, list[int]]:
        """Numbers of the buffers of each size, in order."""
        out: dict[int, list[int]] = {}
        for number, view in enumerate(views):
            out.setdefault(view.nbytes, []).append(number)
        return out

    def _get(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        views, out = [as_bytes(b) for b in buffers], [False] * len(keys)
        for size, some in self._by_size(views).items():
            if size not in self._sizes.all:
                continue
            chunks = self._of_size(size)
            good = fetch(chunks.store, chunks.staging, [self._hash(keys[i]) for i in some],
                         [views[i] for i in some])
            for number, fine in zip(some, good):
                out[number] = fine
        return out

    def _set(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[bool]:
        views, out = [as_bytes(b) for b in buffers], [False] * len(keys)
        for size, some in self._by_size(views).items():
            known = self._learned.get(size)
            text = json.dumps(known).encode() if known else b""
            if size == 0 or not self._sizes.add(size, text):
                _log.warning("kvtier: chunks of %d bytes are not stored: there are %d sizes "
                             "already", size, len(self._sizes.all))
                continue
            chunks = self._of_size(size)
            good = save(chunks.store, chunks.staging, [self._hash(keys[i]) for i in some],
                        [views[i] for i in some])
            _log.debug("kvtier: %d chunks of %d bytes stored", sum(good), size)
            for number, fine in zip(some, good):
                out[number] = fine
        if not all(out):
            raise KvtierError(f"{out.count(False)} of {len(out)} chunks were not stored")
        return out

    def _exists(self, keys: Sequence[str]) -> list[bool]:
        hashes, out = [self._hash(key) for key in keys], [False] * len(keys)
        for size in list(self._sizes.all):
            left = [i for i, there in enumerate(out) if not there]
            if not left:
                break
            for number, there in zip(left, self._of_size(size).store.present(
                    [hashes[i] for i in left])):
                out[number] = there
        return out

    def _delete(self, keys: Sequence[str]) -> list[bool]:
        there = self._exists(keys)
        gone = [self._hash(key) for key, present in zip(keys, there) if present]
        for size in list(self._sizes.all):
            if gone:
                store = self._of_size(size).store
                store.ns.purge(store.keys(gone))
        return there
