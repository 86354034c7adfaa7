"""Where the KV of some tokens lies in a page of bytes, for engines that hand pages over as bytes.

A page is what an engine stores under one key. With its geometry known, the parts of it (layer, K or
V) are described to the library by offset and strides, and are coded; without it the page is
opaque(): stored as it is, to the byte. Plain values: no library call, no engine.
"""
from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import ConfigError
from .layout import Dtype, Kind, Layout, Part, Place

_ROW_MAX, _ROW_STEP, _TILE = 1024, 16, 16
_HEADS_MAX, _PARTS_MAX, _TOKENS_MAX = 1024, 4096, 4096
_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.F16, "half": Dtype.F16, "float32": Dtype.F32,
           "float": Dtype.F32}
GRAIN = _TILE * _ROW_STEP  # an opaque page is a multiple of so many bytes


@dataclass(frozen=True)
class PageShape:
    """A layout and where each of its parts lies: (offset in the page, and the strides of head,
    token and element), in bytes. text names all of it, for an Identity."""

    layout: Layout
    spots: tuple[tuple[int, int, int, int], ...]
    page_bytes: int
    text: str

    @property
    def coded(self) -> bool:
        """Whether levels below raw do anything."""
        return any(part.dtype != Dtype.BYTE for part in self.layout.parts)

    def places(self, base: int, step: int) -> list[Place]:
        """Of pages of which the first is at base, and each other one `step` bytes further."""
        return [Place(base + offset, step, head, token, elem)
                for offset, head, token, elem in self.spots]


def opaque(page_bytes: int, tokens: int = _TILE) -> PageShape:
    """Pages as bytes. page_bytes: a multiple of GRAIN; tokens: what a page stands for, where the
    bytes can be cut into so many rows, else the page counts as 16."""
    if page_bytes <= 0 or page_bytes % GRAIN:
        raise ValueError(f"an opaque page of {page_bytes} bytes: a multiple of {GRAIN} is needed")
    if tokens % _TILE or not _TILE <= tokens <= _TOKENS_MAX or page_bytes % (tokens * _ROW_STEP):
        tokens = _TILE
    parts: list[Part] = []
    spots: list[tuple[int, int, int, int]] = []
    largest, at = tokens * _ROW_MAX * _HEADS_MAX, 0
    while at < page_bytes:
        left = min(page_bytes - at, largest)
        dim = _ROW_MAX if left >= tokens * _ROW_MAX else left // tokens
        heads = left // (tokens * dim)
        parts.append(Part(Kind.OPAQUE, Dtype.BYTE, heads, dim, len(parts)))
        spots.append((at, dim, heads * dim, 1))
        at += tokens * heads * dim
    return PageShape(Layout(tokens, tuple(parts)), tuple(spots), page_bytes,
                     f"bytes-{page_bytes}")


@dataclass(frozen=True)
class Geometry:
    """The axes of a page, outermost first, one letter each: w worker, l layer, b block of tokens,
    c K and V (absent: one MLA row per token), t token, h head, d element. tokens: of one block.
    k_transposed: K lies as [d][t] where V lies as [t][d], as on vLLM's CPU backend."""

    order: str
    layers: int
    heads: int
    head_dim: int
    tokens: int
    dtype: Dtype
    blocks: int = 1
    workers: int = 1
    k_transposed: bool = False

    def sizes(self) -> dict[str, int]:
        """Extent of each axis."""
        return {"w": self.workers, "l": self.layers, "b": self.blocks, "c": 2, "t": self.tokens,
                "h": self.heads, "d": self.head_dim}

    def strides(self) -> dict[str, int]:
        """Of each axis in bytes; 0 for one that is not in the order."""
        out, step, sizes = dict.fromkeys("wlbcthd", 0), self.dtype.size, self.sizes()
        for axis in reversed(self.order):
            out[axis] = step
            step *= sizes[axis]
        return out

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without what an engine pads it with."""
        out, sizes = self.dtype.size, self.sizes()
        for axis in self.order:
            out *= sizes[axis]
        return out

    def check(self) -> None:
        """ValueError with the reason why such pages cannot be coded."""
        order = self.order
        if len(set(order)) != len(order) or not set("lthd") <= set(order) <= set("wlbcthd"):
            raise ValueError(f"order {order!r}: each of l t h d once, and c b w as need be")
        for axis, count in (("w", self.workers), ("b", self.blocks)):
            if count > 1 and axis not in order:
                raise ValueError(f"order {order!r} has no {axis} for {count} of them")
        if self.k_transposed and not order.endswith("td"):
            raise ValueError(f"order {order!r}: only one that ends with td can be transposed")
        if self.head_dim % _ROW_STEP or not _ROW_STEP <= self.head_dim <= _ROW_MAX:
            raise ValueError(f"head_dim {self.head_dim} is no multiple of {_ROW_STEP} up to "
                             f"{_ROW_MAX}")
        if self.tokens % _TILE or not _TILE <= self.tokens <= _TOKENS_MAX:
            raise ValueError(f"{self.tokens} tokens a block are no multiple of {_TILE} up to "
                             f"{_TOKENS_MAX}")
        if not 1 <= self.heads <= _HEADS_MAX or min(self.layers, self.blocks, self.workers) < 1:
            raise ValueError(f"{self.layers} layers of {self.heads} heads")
        if self.layers * self.blocks * self.workers * 2 > _PARTS_MAX:
            raise ValueError(f"more than {_PARTS_MAX} parts in a page")

    def shape(self) -> PageShape:
        """The layout and the places. ValueError as check()."""
        self.check()
        step, parts, spots = self.strides(), [], []
        kinds = (Kind.K, Kind.V) if "c" in self.order else (Kind.MLA,)
        for worker in range(self.workers):
            for layer in range(self.layers):
                for block in range(self.blocks):
                    start = worker * step["w"] + layer * step["l"] + block * step["b"]
                    for number, kind in enumerate(kinds):
                        parts.append(Part(kind, self.dtype, self.heads, self.head_dim,
                                          worker * self.layers + layer))
                        token, elem = step["t"], step["d"]
                        if self.k_transposed and kind == Kind.K:
                            token, elem = step["d"], self.tokens * step["d"]
                        spots.append((start + number * step["c"], step["h"], token, elem))
        sizes = self.sizes()
        text = self.order + ("-kt" if self.k_transposed else "") + "".join(
            f"-{axis}{sizes[axis]}" for axis in self.order) + f"-{self.dtype.name.lower()}"
        return PageShape(Layout(self.tokens, tuple(parts)), tuple(spots), self.page_bytes, text)


def dtype_of(name: Any) -> Dtype | None:
    """"bfloat16", "torch.float16", ... ; None: no type that is coded."""
    return _DTYPES.get(str(name).removeprefix("torch."))


def unknown(where: str, key: Any, known: Sequence[str]) -> ConfigError:
    """The error for an option that does not exist: it names the nearest that does."""
    near = difflib.get_close_matches(str(key), known, 1)
    return ConfigError(f"{where}: no option is called {key!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"))


_GIVEN = ("order", "layers", "kv_heads", "head_dim", "dtype")


def given(where: str, value: Any, tokens: int, **more: int) -> Geometry:
    """The geometry that a user wrote: {"order": "lthcd", "layers": 32, "kv_heads": 8, "head_dim":
    128, "dtype": "bfloat16"}. ConfigError names what is wrong. more: blocks, workers."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: geometry must be an object with {', '.join(_GIVEN)}")
    for key in value:
        if key not in _GIVEN:
            raise unknown(f"{where}: geometry", key, _GIVEN)
    missing = [key for key in _GIVEN if key not in value]
    if missing:
        raise ConfigError(f"{where}: geometry lacks {', '.join(missing)}")
    dtype = dtype_of(value["dtype"])
    if dtype is None:
        raise ConfigError(f"{where}: geometry: dtype {value['dtype']!r} is none of "
                          f"{', '.join(_DTYPES)}; without a geometry pages are stored as they are")
    try:
        numbers = [int(value[key]) for key in ("layers", "kv_heads", "head_dim")]
        out = Geometry(str(value["order"]), *numbers, tokens, dtype, **more)
        out.check()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: geometry: {error}") from None
    return out
