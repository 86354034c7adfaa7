"""own_quota and own_ttl: options of a Cache that the library does not have. What each namespace that
the cache opens may have of the store, where ns_quota and ttl are those of all who use a kvtierd, and
ns_limit is its configuration's.

Sizes and times as in docs/config.md. Plain functions; no library call.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ._errors import ConfigError, ErrorCode

OPTIONS = (
    ("own_quota", "none", "record bytes that each namespace opened here may hold; none: not said"),
    ("own_ttl", "none", "how long its blocks live without being used; none: not said"),
)
_SIZES = {"": 1, **{f"{p}iB": 1024 ** i for i, p in enumerate("KMGT", 1)},
          **{f"{p}B": 1000 ** i for i, p in enumerate("kMGT", 1)}}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUOTA_MIN, _QUOTA_MAX, _TTL_MIN = 64 << 10, 64 << 40, 1.0


@dataclass(frozen=True)
class Limits:
    """For Namespace.limit(); None: not said."""

    quota: int | None = None
    ttl: float | None = None

    def __bool__(self) -> bool:
        return self.quota is not None or self.ttl is not None


def _number(key: str, value: str, units: dict[str, float], example: str) -> float:
    found = re.fullmatch(r"(\d+)([a-zA-Z]*)", value)
    if not found or found[2] not in units:
        raise ConfigError(f"{key}: {value!r}: a number with one of {', '.join(filter(None, units))}, "
                          f"as {example}, or none", ErrorCode.CONFIG_VALUE)
    return int(found[1]) * units[found[2]]


def split(pairs: Iterable[tuple[str, str]]) -> tuple[Limits, list[tuple[str, str]]]:
    """(limits, the options of the library). ConfigError names a value that makes no sense."""
    quota, ttl, rest = None, None, []
    for key, value in pairs:
        if key == "own_quota":
            quota = None if value == "none" else int(_number(key, value, _SIZES, "50GiB"))
            if quota is not None and not _QUOTA_MIN <= quota <= _QUOTA_MAX:
                raise ConfigError(f"own_quota: {value!r} is not within 64KiB to 64TiB",
                                  ErrorCode.CONFIG_VALUE)
        elif key == "own_ttl":
            ttl = None if value == "none" else _number(key, value, _TIMES, "7d")
            if ttl is not None and ttl < _TTL_MIN:
                raise ConfigError(f"own_ttl: {value!r} is shorter than 1s", ErrorCode.CONFIG_VALUE)
        else:
            rest.append((key, value))
    return Limits(quota, ttl), rest
