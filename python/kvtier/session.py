"""Sessions: the tiered manager for an engine that has pages and nothing that manages them.

Thin over kvtier/session.h and docs/sessions.md. A manager owns pages of one pool; a session is a
sequence of tokens that gets pages for the engine to fill, shares full blocks with sessions of the
same prefix, is stored when it goes idle, and comes back by resume(). Threads: any; work goes on in
the manager's calls alone, above all work().
"""
from __future__ import annotations

import ctypes as C
import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _c
from .cache import Namespace
from .layout import Level, Tier
from .pool import Pool, _Child, deadline_ns, timeout_ns


class State(enum.IntEnum):
    """IDLE: its pages may be taken; RESTORING: a load is going on; ACTIVE: its pages are there."""

    IDLE = 1
    RESTORING = 2
    ACTIVE = 3


@dataclass(frozen=True)
class ResumePlan:
    """Tokens of the sequence from its start: in L0, loaded, and the last ones, to be computed.
    reason: why the load was shorter than planned (an ErrorCode), 0 when it was not."""

    tokens: int
    in_l0: int
    from_dram: int
    from_disk: int
    recompute: int
    reason: int


@dataclass(frozen=True)
class Info:
    """State of a session; filled: tokens with KV in the pages; blocks: full ones of them."""

    state: State
    tokens: int
    filled: int
    blocks: int


class Record(enum.IntEnum):
    """What the manager believes of a block's record; the store may have evicted it."""

    NONE = 0
    WINDOW = 1  # at the window's level
    FINAL = 2   # as coarse as it gets


@dataclass(frozen=True)
class Block:
    """Where a block is. page: in L0, or None; page_level: of its bytes, RAW exact, else where they
    came from; sessions: that hold it; tier: of the record."""

    page: int | None
    page_level: Level
    sessions: int
    record: Record
    tier: Tier


_NUMBERS = ("window_tokens", "sessions_max", "tokens_max", "blocks_max", "first_page", "page_count",
            "scratch_pages", "shard")
_GROUP_NUMBERS = ("first_page", "page_count", "scratch_pages")


class SessionManager(_Child):
    """Owns pages [first_page, first_page + page_count) of a pool. Options of 0 are defaults:
    kvt_session_mgr_opts has them. groups: pages of single groups of the layout, {1: {"first_page": 0,
    "page_count": 64}}; the others have those above. Namespace and pool must outlive it."""

    def __init__(self, ns: Namespace, pool: Pool, *, level: Level | str | None = None,
                 window_level: Level | str | None = None,
                 groups: Mapping[int, Mapping[str, int]] | None = None, **numbers: int) -> None:
        opts = _c.kvt_session_mgr_opts(C.sizeof(_c.kvt_session_mgr_opts))
        opts.level, opts.window_level = Level.parse(level), Level.parse(window_level)
        _set_numbers(opts, "SessionManager", _NUMBERS, numbers)
        of_groups = (_c.kvt_session_group * len(groups or {}))()
        for made, (number, pages) in zip(of_groups, (groups or {}).items()):
            made.group = number
            _set_numbers(made, f"SessionManager: group {number}", _GROUP_NUMBERS, pages)
        opts.groups, opts.group_count = C.addressof(of_groups), len(of_groups)
        out = C.c_void_p()
        _c.check(ns._lib.kvt_session_mgr_open(ns.handle, pool.handle, C.byref(opts),
                                              C.byref(out)), "session manager")
        super().__init__(ns._cache, out.value)
        self._keep = (ns, pool)

    def work(self, timeout: float = 0.0) -> int:
        """Let stores, loads and cooling go on; wait up to timeout seconds for something to end.
        Returns how many requests are in flight or waiting."""
        return _c.check(self._lib.kvt_session_mgr_work(self.handle, timeout_ns(timeout)), "work")

    def flush(self) -> None:
        """Store every filled block of every session, and flush the cache. Blocks."""
        _c.check(self._lib.kvt_session_mgr_flush(self.handle), "flush")

    def open(self, salt: bytes = b"", *, store: bool = True) -> "Session":
        """An empty, idle session; sessions of different salts share nothing. store False: its
        blocks stay in L0, and are computed again when they have left it."""
        out = C.c_uint64()
        _c.check(self._lib.kvt_session_open(self.handle, salt or None, len(salt), C.byref(out)),
                 "session")
        if not store:
            _c.check(self._lib.kvt_session_no_store(self.handle, out.value), "session")
        return Session(self, out.value)

    def stats(self) -> dict[str, int]:
        """The counters of kvt_session_stats by name."""
        out = _c.kvt_session_stats(C.sizeof(_c.kvt_session_stats))
        _c.check(self._lib.kvt_session_mgr_stats(self.handle, C.byref(out)), "stats")
        return {name: getattr(out, name) for name, _ in out._fields_[1:]}

    def _end(self, handle: int) -> None:
        self._lib.kvt_session_mgr_close(handle)


class Session:
    """One sequence. Errors: KvtierError STATE for a call that its state does not allow."""

    def __init__(self, manager: SessionManager, number: int) -> None:
        self._manager, self.id, self._lib = manager, number, manager._lib

    def _call(self, what: str, code: int) -> int:
        return _c.check(code, f"session {self.id}: {what}")

    def resume(self, tokens: Sequence[int] = (), deadline: float | None = None) -> ResumePlan:
        """Bring it back with more tokens at its end: plan, take pages, begin the load. deadline:
        seconds; None: as configured, negative: none. BusyError: call work() and try again."""
        ids = array("I", tokens)
        opts = _c.kvt_session_resume_opts(
            C.sizeof(_c.kvt_session_resume_opts), deadline_ns(deadline))
        out = _c.kvt_session_plan(C.sizeof(_c.kvt_session_plan))
        self._call("resume", self._lib.kvt_session_resume(
            self._manager.handle, self.id, ids.buffer_info()[0], len(ids), C.byref(opts),
            C.byref(out)))
        return _plan(out)

    def wait(self, timeout: float | None = None) -> bool:
        """True: it is no longer RESTORING."""
        return self._call("wait", self._lib.kvt_session_wait(
            self._manager.handle, self.id, timeout_ns(timeout))) == 1

    def plan(self) -> ResumePlan:
        """What became of the last resume; while RESTORING what is planned."""
        out = _c.kvt_session_plan(C.sizeof(_c.kvt_session_plan))
        self._call("plan", self._lib.kvt_session_get_plan(self._manager.handle, self.id,
                                                          C.byref(out)))
        return _plan(out)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to an active session, and pages for them."""
        ids = array("I", tokens)
        self._call("append", self._lib.kvt_session_append(
            self._manager.handle, self.id, ids.buffer_info()[0], len(ids)))

    def pages(self, first: int, count: int) -> list[int]:
        """Page numbers of blocks [first, first + count), as many as there are; of the layout's
        first group."""
        room = (C.c_uint32 * count)()
        n = self._call("pages", self._lib.kvt_session_pages(self._manager.handle, self.id, first,
                                                            room, count))
        return list(room[:n])

    def group_pages(self, group: int, first: int, count: int) -> list[int | None]:
        """The same for a group of the layout. None: the session needs no page there, as of a window
        before its last tokens."""
        room = (C.c_uint32 * count)()
        n = self._call("pages", self._lib.kvt_session_group_pages(
            self._manager.handle, self.id, group, first, room, count))
        return [None if page == _c.NO_PAGE else page for page in room[:n]]

    def block(self, index: int, group: int = 0) -> Block:
        """Where a full block of a group is. One round trip."""
        out = _c.kvt_session_block(C.sizeof(_c.kvt_session_block))
        self._call("block", self._lib.kvt_session_get_group_block(
            self._manager.handle, self.id, group, index, C.byref(out)))
        return Block(None if out.page == _c.NO_PAGE else out.page, Level(out.page_level),
                     out.sessions, Record(out.record), Tier(out.tier))

    def filled(self, tokens: int) -> None:
        """Say that the pages hold the KV of the first `tokens` tokens."""
        self._call("filled", self._lib.kvt_session_filled(self._manager.handle, self.id, tokens))

    def truncate(self, tokens: int) -> None:
        """Cut it back to its first `tokens` tokens; info().filled says what need not be filled."""
        self._call("truncate", self._lib.kvt_session_truncate(self._manager.handle, self.id,
                                                              tokens))

    def idle(self) -> None:
        """The engine is done with it for now: it is stored, its pages may be taken."""
        self._call("idle", self._lib.kvt_session_idle(self._manager.handle, self.id))

    def info(self) -> Info:
        """Its state and sizes."""
        out = _c.kvt_session_info(C.sizeof(_c.kvt_session_info))
        self._call("info", self._lib.kvt_session_get_info(self._manager.handle, self.id,
                                                          C.byref(out)))
        return Info(State(out.state), out.tokens, out.filled, out.blocks)

    def close(self) -> None:
        """Close it in any state; its blocks stay for others until they are evicted."""
        self._call("close", self._lib.kvt_session_close(self._manager.handle, self.id))


def _set_numbers(made: Any, what: str, known: Sequence[str], numbers: Mapping[str, int]) -> None:
    for name, value in numbers.items():
        if name not in known:
            raise TypeError(f"{what} has no option {name!r}: {', '.join(known)}")
        setattr(made, name, value)


def _plan(out: Any) -> ResumePlan:
    return ResumePlan(out.tokens, out.in_l0, out.from_dram, out.from_disk, out.recompute,
                      out.reason)
