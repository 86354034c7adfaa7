"""The shape of a KV cache and the keys of its blocks: plain values, no library call but for keys.

A *block* is block_tokens consecutive tokens of one sequence; a *part* is one tensor slice of it
(layer, K or V or MLA latent or opaque); a *pool* is engine memory with many blocks ("pages"). Where
a part lies is a Place: an address and four strides in bytes. pages() makes one from a tensor.
"""
from __future__ import annotations

import ctypes as C
import enum
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _c
from ._errors import KvtierError

KEY_SCHEME = "kvt-sha256-v1"  # of Keys.chain(), for Identity.key_scheme


class Dtype(enum.IntEnum):
    """Element type of a part in the pool. BYTE: opaque or 8-bit pages, stored raw, never coded."""

    BF16 = 1
    F16 = 2
    F32 = 3
    BYTE = 4

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return (2, 2, 4, 1)[self - 1]


class Kind(enum.IntEnum):
    """What a part is. MLA: one latent row per token (heads = 1). OPAQUE: always raw."""

    K = 1
    V = 2
    MLA = 3
    OPAQUE = 4


class GroupKind(enum.IntEnum):
    """What a hit of n tokens needs of a group of layers that share a block table."""

    FULL = 0    # every block of [0, n)
    WINDOW = 1  # the blocks that cover the last window_tokens before n
    STATE = 2   # the block that ends at n


class Level(enum.IntEnum):
    """Levels by quality: a larger number is never worse. DEFAULT: what the configuration says."""

    DEFAULT = 0
    INT4 = 1
    KV4 = 2
    KV5 = 3
    KV6 = 4
    KV8 = 5
    RAW = 6

    @classmethod
    def parse(cls, value: "Level | int | str | None") -> "Level":
        """A level from its name ("kv4", "raw"), number, or None for DEFAULT; ValueError names
        all."""
        if value is None:
            return cls.DEFAULT
        if isinstance(value, str):
            try:
                return cls[value.strip().upper()]
            except KeyError:
                names = ", ".join(level.name.lower() for level in cls)
                raise ValueError(f"level {value!r} is none of {names}") from None
        return cls(value)


class Tier(enum.IntEnum):
    """Where a block was found. PENDING: being stored right now, neither hit nor empty."""

    MISS = 0
    DRAM = 1
    DISK = 2
    REMOTE = 3
    PENDING = 4


@dataclass(frozen=True)
class Part:
    """One part of a block. heads: KV heads of this shard; head_dim: elements of a (token, head)
    row, 16 to 1,024, a multiple of 16; layer: the engine's number, for people and statistics."""

    kind: Kind
    dtype: Dtype
    heads: int
    head_dim: int
    layer: int = 0
    group: int = 0


@dataclass(frozen=True)
class Group:
    """A group whose blocks are not those of the layout, or which is not full attention.
    block_tokens 0: the layout's. window_tokens: for WINDOW alone."""

    group: int
    kind: GroupKind = GroupKind.FULL
    block_tokens: int = 0
    window_tokens: int = 0


@dataclass(frozen=True)
class Layout:
    """block_tokens (16 to 4,096, a multiple of 16) and the parts of a block, in record order.
    Groups that are not listed are full attention of block_tokens."""

    block_tokens: int
    parts: tuple[Part, ...]
    groups: tuple[Group, ...] = ()

    def to_c(self) -> _c.kvt_layout:
        """The C struct; it keeps the arrays that it points to alive."""
        parts = (_c.kvt_part * len(self.parts))(*(
            _c.kvt_part(p.kind, p.dtype, p.group, p.layer, p.heads, p.head_dim)
            for p in self.parts))
        groups = (_c.kvt_group * len(self.groups))(*(
            _c.kvt_group(g.group, g.kind, 0, g.block_tokens, g.window_tokens)
            for g in self.groups))
        return _c.kvt_layout(C.sizeof(_c.kvt_layout), self.block_tokens, len(parts), parts,
                             len(groups), groups if groups else None)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the engine's pages, all parts that hold tokens."""
        return sum(p.heads * p.head_dim * Dtype(p.dtype).size for p in self.parts)


@dataclass(frozen=True)
class Place:
    """Where one part lies: element (block, head, token, elem) is at
    base + block*stride_block + head*stride_head + token*stride_token + elem*stride_elem, in bytes.
    Strides may be in any order; each is a non-negative multiple of the element's size."""

    base: int
    stride_block: int
    stride_head: int
    stride_token: int
    stride_elem: int


def pool_desc(places: Sequence[Place], block_count: int, device: int) -> _c.kvt_pool_desc:
    """The C struct of engine memory; it keeps the array that it points to alive."""
    made = (_c.kvt_part_place * len(places))(*(
        _c.kvt_part_place(p.base, p.stride_block, p.stride_head, p.stride_token, p.stride_elem)
        for p in places))
    return _c.kvt_pool_desc(C.sizeof(_c.kvt_pool_desc), device, block_count, len(places), made)


@dataclass(frozen=True)
class Identity:
    """Everything that makes two KV caches incompatible; caches of equal identity and layout may
    exchange blocks. model or revision (a digest of the weights) is required. salt: tenant."""

    engine: str
    model: str = ""
    revision: str = ""
    key_scheme: str = KEY_SCHEME
    adapter: str = ""
    layout: str = ""
    rope: str = ""
    rotation: str = ""
    extra: str = ""
    salt: bytes = b""
    tp_size: int = 1
    pp_size: int = 1
    pp_rank: int = 0

    def to_c(self) -> _c.kvt_identity:
        """The C struct. ValueError: a NUL in a text, which C would take for its end."""
        out = _c.kvt_identity()
        _c.load().kvt_identity_init(C.byref(out))
        for name in ("engine", "key_scheme", "model", "revision", "adapter", "layout", "rope",
                     "rotation", "extra"):
            text = getattr(self, name)
            if "\0" in text:
                raise ValueError(f"identity: {name} holds a NUL")
            setattr(out, name, text.encode("utf-8", "surrogateescape"))
        out._salt = self.salt  # the bytes must outlive the struct
        out.salt = C.cast(C.c_char_p(self.salt), C.c_void_p) if self.salt else None
        out.salt_len = len(self.salt)
        out.tp_size, out.pp_size, out.pp_rank = self.tp_size, self.pp_size, self.pp_rank
        return out


class Keys(Sequence):
    """Keys of one chain, parents first, in the C layout; slices share the memory.

    Keys.from_hashes(): an engine's own block hashes (1 to 32 bytes each).
    Keys.chain(): SHA-256 chains over tokens, for engines that have none.
    """

    __slots__ = ("_owner", "_address", "_count")
    SIZE = C.sizeof(_c.kvt_key)

    def __init__(self, owner: Any, address: int, count: int) -> None:
        self._owner, self._address, self._count = owner, address, count

    @classmethod
    def _of(cls, data: bytes) -> "Keys":
        return cls(data, C.cast(C.c_char_p(data), C.c_void_p).value or 0, len(data) // cls.SIZE)

    @classmethod
    def from_hashes(cls, hashes: Iterable[bytes], group: int = 0, shard: int = 0) -> "Keys":
        """One key for each hash, all of one length. 8,192 hashes take half a millisecond."""
        if not isinstance(hashes, list):
            hashes = list(hashes)
        length = len(hashes[0]) if hashes else 1
        if not 1 <= length <= _c.HASH_BYTES_MAX:
            raise ValueError(f"a hash of {length} bytes; 1 to {_c.HASH_BYTES_MAX} are taken")
        if hashes and set(map(len, hashes)) != {length}:
            raise ValueError("hashes of one chain must be of one length")
        tail = (bytes(_c.HASH_BYTES_MAX - length) + bytes((length, 0)) +
                group.to_bytes(2, "little") + shard.to_bytes(4, "little"))
        return cls._of(tail.join(hashes) + tail if hashes else b"")

    @classmethod
    def chain(cls, tokens: Sequence[int], block_tokens: int, *, salt: bytes = b"",
              parent: bytes | None = None, extras: Sequence[tuple[int, bytes]] = (),
              group: int = 0, shard: int = 0) -> "Keys":
        """Keys of the full blocks of a token list; a partial tail has none.
        parent: the 32-byte hash of the block before tokens[0]; None: a root made from salt.
        extras: (type, bytes) that distinguish blocks of equal tokens, such as an image's digest."""
        if block_tokens < 1:
            raise ValueError(f"blocks of {block_tokens} tokens")
        library = _c.load()
        ids = array("I", tokens)
        root = (C.c_uint8 * 32)()
        if parent is None:
            _c.check(library.kvt_key_root(salt, len(salt), root), "keys")
        elif len(parent) != 32:
            raise ValueError(f"a parent of {len(parent)} bytes; Keys.chain() makes hashes of 32")
        else:
            C.memmove(root, parent, 32)
        texts = [bytes(memoryview(data)) for _, data in extras]
        more = (_c.kvt_key_extra * len(texts))(*(
            _c.kvt_key_extra(kind, len(data), C.cast(C.c_char_p(data), C.c_void_p))
            for (kind, _), data in zip(extras, texts)))
        room = len(ids) // block_tokens
        out = (_c.kvt_key * room)()
        count = _c.check(library.kvt_key_chain(
            root, ids.buffer_info()[0], len(ids), block_tokens, more if texts else None,
            len(texts), group, shard, out, room), "keys")
        return cls(out, C.addressof(out), count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):
        """keys[i] is the hash of a block, keys[a:b] are Keys."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            if step != 1:
                raise ValueError("a slice of keys must be a run of the chain")
            return Keys(self._owner, self._address + start * self.SIZE, max(0, stop - start))
        if not -self._count <= index < self._count:
            raise IndexError("key index out of range")
        key = _c.kvt_key.from_address(self._address + index % self._count * self.SIZE)
        return bytes(key.hash[:key.hash_len])

    def __add__(self, other: "Keys") -> "Keys":
        return Keys._of(self.raw() + other.raw())

    def raw(self) -> bytes:
        """The kvt_key structs as bytes."""
        return C.string_at(self._address, self._count * self.SIZE) if self._count else b""

    @property
    def address(self) -> int | None:
        """Of the first kvt_key; borrowed while self lives."""
        return self._address if self._count else None


# ---- tensors ----

_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.F16, "float32": Dtype.F32}
_NOT_CODED = ("int8", "uint8", "float8")


@dataclass(frozen=True)
class Pages:
    """A tensor seen as the pages of one part (made by pages())."""

    place: Place
    dtype: Dtype
    heads: int
    head_dim: int
    block_tokens: int
    block_count: int
    device: int
    owner: Any = field(repr=False, default=None)

    def part(self, kind: Kind, layer: int = 0, group: int = 0) -> Part:
        """The part that these pages hold."""
        return Part(kind, self.dtype, self.heads, self.head_dim, layer, group)


def _describe(tensor: Any):
    """(address, shape, strides in bytes, dtype name, device) of a torch tensor or a buffer."""
    if hasattr(tensor, "data_ptr"):
        size = tensor.element_size()
        device = tensor.device
        index = device.index if device.index is not None else 0
        return (tensor.data_ptr(), tuple(tensor.shape), tuple(s * size for s in tensor.stride()),
                str(tensor.dtype).removeprefix("torch."),
                _c.DEVICE_HOST if device.type == "cpu" else index)
    if hasattr(tensor, "__array_interface__"):
        face = tensor.__array_interface__
        if face["data"][1]:
            raise ValueError("the array is read only: kvtier writes pages when it loads blocks")
        strides = face["strides"]
        if strides is None:
            strides, step = [], tensor.itemsize
            for extent in reversed(face["shape"]):
                strides.insert(0, step)
                step *= extent
        return (face["data"][0], tuple(face["shape"]), tuple(strides), str(tensor.dtype),
                _c.DEVICE_HOST)
    view = memoryview(tensor)
    if view.readonly:
        raise ValueError("the buffer is read only: kvtier writes pages when it loads blocks")
    name = {"f": "float32", "e": "float16", "B": "uint8", "b": "int8"}.get(view.format, view.format)
    address = C.addressof(C.c_char.from_buffer(view.cast("B") if view.contiguous else view))
    return address, view.shape, view.strides, name, _c.DEVICE_HOST


def pages(tensor: Any, axes: str, block_tokens: int | None = None) -> Pages:
    """See a strided tensor (torch, numpy, any writable buffer) as the pages of one part.

    axes: one letter for each dimension: "b" block, "t" token in the block, "h" head, "e" element,
    "1" a dimension of size 1. Without "b" the tokens are cut into pages of block_tokens, which a
    contiguous cache such as [1, heads, tokens, dim] ("1hte") allows; a tail that fills no page is
    left out. A missing "h" is one head. Raises ValueError for axes that do not fit."""
    address, shape, strides, name, device = _describe(tensor)
    if len(axes) != len(shape) or len(set(axes.replace("1", ""))) != len(axes.replace("1", "")):
        raise ValueError(f"axes {axes!r} do not fit a tensor of {len(shape)} dimensions")
    sizes = dict(zip(axes, shape))
    steps = dict(zip(axes, strides))
    if any(axis not in "bthe1" for axis in axes) or not {"t", "e"} <= set(axes):
        raise ValueError(f"axes {axes!r}: letters are b t h e 1, and t and e are required")
    if any(extent != 1 for axis, extent in zip(axes, shape) if axis == "1"):
        raise ValueError(f"axes {axes!r}: a dimension called 1 is larger in shape {tuple(shape)}")
    dtype = Dtype.BYTE if name.startswith(_NOT_CODED) else _DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"elements of type {name} are not supported; view them as bytes (uint8)")
    if "b" in axes:
        if block_tokens not in (None, sizes["t"]):
            raise ValueError(f"pages of {sizes['t']} tokens, not {block_tokens}")
        tokens, count, step = sizes["t"], sizes["b"], steps["b"]
    elif block_tokens:
        tokens, count = block_tokens, sizes["t"] // block_tokens
        step = block_tokens * steps["t"]
    else:
        raise ValueError("block_tokens is needed: the tensor has no block axis")
    place = Place(address, step, steps.get("h", dtype.size), steps["t"], steps["e"])
    return Pages(place, dtype, sizes.get("h", 1), sizes["e"], tokens, count, device, tensor)


def layout_of(parts: Sequence[tuple[Kind, Pages]], layers: Sequence[int] | None = None,
              groups: Sequence[Group] = ()) -> Layout:
    """The layout of full-attention parts that share block table 0, in the given order."""
    if not parts:
        raise ValueError("a layout of no parts")
    first = parts[0][1]
    for _, seen in parts:
        if (seen.block_tokens, seen.block_count, seen.device) != (
                first.block_tokens, first.block_count, first.device):
            raise KvtierError("parts of one pool differ in tokens, pages or device")
    numbers = layers if layers is not None else [i // 2 for i in range(len(parts))]
    return Layout(first.block_tokens, tuple(
        seen.part(kind, layer) for (kind, seen), layer in zip(parts, numbers)), tuple(groups))
