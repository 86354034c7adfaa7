"""The codec alone: blocks of a pool in host memory <-> payload bytes, without a cache.

For people who only want the compression. docs/codec.md defines the bytes; every instruction set
gives the same ones. Threads: any; calls release the GIL. Nothing is kept between calls.
"""
from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

from . import _c
from ._errors import ErrorCode, KvtierError
from .layout import Layout, Level, Place, pool_desc


def isa() -> str:
    """The instruction set in force: "avx2", "scalar". KVTIER_CODEC_ISA forces one."""
    return _c.load().kvt_codec_isa().decode()


def bits(level: Level | str, head_dim: int, dtype: int, key: bool) -> float:
    """Bits per element of one row of head_dim elements, scales and offsets included."""
    return _c.load().kvt_level_bits(Level.parse(level), head_dim, dtype, key)


class Codec:
    """Encodes and decodes pages of host memory. Raises KvtierError for a layout or places that make
    no sense. owner: what must live as long as the codec (the tensors)."""

    def __init__(self, layout: Layout, places: Sequence[Place], block_count: int,
                 owner: object = None) -> None:
        self._lib, self._layout, self.owner = _c.load(), layout.to_c(), owner
        self._pool = pool_desc(places, block_count, _c.DEVICE_HOST)
        _c.check(self._lib.kvt_layout_check(C.byref(self._layout)), "layout")
        _c.check(self._lib.kvt_pool_check(C.byref(self._layout), C.byref(self._pool)), "pool")

    def payload_bytes(self, level: Level | str, group: int = 0) -> int:
        """Bytes of one encoded block."""
        return self._lib.kvt_payload_bytes(C.byref(self._layout), group, Level.parse(level))

    def encode(self, page: int, level: Level | str, *, group: int = 0, guard: bool = True) -> bytes:
        """The payload of a page. KvtierError GUARD: worse than the level allows, use the next one;
        NONFINITE: NaN, Inf or an overflowing scale, store it raw."""
        size = self.payload_bytes(level, group)
        room = C.create_string_buffer(size + 16)  # the payload must be 16-byte aligned
        start = -C.addressof(room) % 16
        _c.check(self._lib.kvt_encode_block(
            C.byref(self._layout), group, Level.parse(level), C.byref(self._pool), page,
            C.addressof(room) + start, size, int(guard), None), f"encode page {page}")
        return room.raw[start:start + size]

    def decode(self, payload: bytes, page: int, level: Level | str, *, group: int = 0) -> None:
        """Write every element of the group's parts of a page."""
        if len(payload) != self.payload_bytes(level, group):
            raise KvtierError(f"a payload of {len(payload)} bytes, not "
                              f"{self.payload_bytes(level, group)}", ErrorCode.INVAL)
        room = C.create_string_buffer(len(payload) + 16)
        start = -C.addressof(room) % 16
        C.memmove(C.addressof(room) + start, payload, len(payload))
        _c.check(self._lib.kvt_decode_block(
            C.byref(self._layout), group, Level.parse(level), C.addressof(room) + start,
            len(payload), C.byref(self._pool), page), f"decode page {page}")
