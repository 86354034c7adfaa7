"""Exceptions of kvtier, made from the library's own codes and sentences.

A miss is a result, never an exception. What the library refuses is a KvtierError (or a subclass)
with the code, its name and the library's sentence. Per-block outcomes are numbers (ErrorCode).
"""
from __future__ import annotations

import enum
import errno


class ErrorCode(enum.IntEnum):
    """Codes of kvtier/error.h; numbers above -5000 are a negated errno of the system."""

    INVAL = -5001
    VERSION = -5002
    CONFIG_KEY = -5003
    CONFIG_VALUE = -5004
    LAYOUT = -5005
    LIMIT = -5006
    CLOSED = -5007
    STATE = -5008
    NO_SESSION = -5009
    NOT_OURS = -5010
    LOCKED = -5011
    NEWER = -5012
    READ_ONLY = -5013
    SYMLINK = -5014
    NO_SPACE = -5015
    TOO_SMALL = -5016
    CORRUPT = -5020
    EXISTS = -5021
    STALE = -5022
    GUARD = -5023
    NONFINITE = -5024
    DEADLINE = -5030
    CANCELED = -5031
    DROPPED = -5032
    MISS = -5033
    ORPHAN = -5034
    UNSUPPORTED = -5040
    ENGINE = -5041
    DEVICE = -5042


def code_name(code: int) -> str:
    """"KVT_E_MISS", "EAGAIN", ... ; "" for a number that is no error known here."""
    if code in ErrorCode._value2member_map_:
        return "KVT_E_" + ErrorCode(code).name
    return errno.errorcode.get(-code, "")


class KvtierError(Exception):
    """A call that the library refused. code: a number of ErrorCode, or a negated errno."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code

    @property
    def name(self) -> str:
        """"KVT_E_LAYOUT", "ENOMEM", ... or "" for an error of the package itself."""
        return code_name(self.code)


class ConfigError(KvtierError, ValueError):
    """An option that does not exist or whose value makes no sense; names the nearest valid one."""


class ClosedError(KvtierError):
    """The cache, namespace, pool or request has been closed."""


class BusyError(KvtierError):
    """Too many requests or blocks are in flight (-EAGAIN): try again, or go on without."""


class UnsupportedError(KvtierError):
    """Not supported by this build, model or engine; the message has the reason."""


class LibraryError(KvtierError, ImportError):
    """libkvtier is missing, cannot be loaded, or is of another version than the package."""


_CLASSES = {
    ErrorCode.CONFIG_KEY: ConfigError,
    ErrorCode.CONFIG_VALUE: ConfigError,
    ErrorCode.CLOSED: ClosedError,
    ErrorCode.UNSUPPORTED: UnsupportedError,
    -errno.EAGAIN: BusyError,
}


def make_error(code: int, sentence: str) -> KvtierError:
    """The exception for a code; the sentence says what was refused and why."""
    return _CLASSES.get(code, KvtierError)(sentence, code)
