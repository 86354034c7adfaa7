"""Where vLLM keeps which element of its KV cache.

The layout (what a block is made of) comes from the KV cache specs, which the scheduler and every
worker have alike. Where the parts lie comes from the tensors, and from rules of the backends; a
rule is believed only after the engine's own kernel has written rows that are found where the rule
says. A page that no rule explains, or whose elements are not 16-bit or 32-bit floats, is stored as
opaque bytes: raw, exact, not coded.
"""
from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..layout import Dtype, Group, GroupKind, Kind, Layout, Part, Place
from .._errors import UnsupportedError

_log = logging.getLogger("vllm.kvtier")
_DTYPES = {torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16, torch.float32: Dtype.F32}
_DIM_MAX, _DIM_STEP = 1024, 16


@dataclass(frozen=True)
class Shape:
    """What a layer's page holds. opaque: one part of bytes instead of K and V (or MLA rows)."""

    layer: str
    tokens: int
    heads: int
    k_dim: int
    v_dim: int  # 0: MLA, one row per token
    dtype: torch.dtype
    page_bytes: int
    opaque: bool
    group: int = 0

    @property
    def is_mla(self) -> bool:
        return self.v_dim == 0


@dataclass(frozen=True)
class Model:
    """The layers that are stored. groups: as the layout has them, by the engine's number: tokens
    of a block, and of the window that a hit needs (0: every block)."""

    shapes: tuple[Shape, ...]
    groups: tuple[Group, ...]
    layout: Layout
    replicated: bool  # every tensor-parallel rank holds the same bytes

    def block_bytes(self, group: int) -> int:
        """Of a block in the engine."""
        tokens = self.groups[group].block_tokens
        return tokens * sum(p.heads * p.head_dim * Dtype(p.dtype).size
                            for p in self.layout.parts if p.group == group)

    @property
    def one_chain(self) -> bool:
        """One group of full attention: what failed to load is named by its pages."""
        return len(self.groups) == 1 and self.groups[0].kind == GroupKind.FULL


def _layer_number(name: str, default: int) -> int:
    found = re.findall(r"\d+", name)
    return int(found[0]) if found else default


def layer_numbers(model: Model) -> dict[str, int]:
    """Part.layer of each of the engine's layers."""
    return {shape.layer: _layer_number(shape.layer, i) for i, shape in enumerate(model.shapes)}


def _codable(dim: int) -> bool:
    return dim % _DIM_STEP == 0 and _DIM_STEP <= dim <= _DIM_MAX


def _shape(name: str, spec: Any, group: Group, opaque: bool) -> Shape:
    block_tokens = group.block_tokens
    mla = type(spec).__name__.startswith("MLA")
    k_dim = spec.head_size
    v_dim = 0 if mla else (getattr(spec, "head_size_v", None) or spec.head_size)
    quantised = getattr(spec, "kv_quant_mode", 0) != 0  # KVQuantMode.NONE
    packed = getattr(spec, "state_content_bytes", None) is not None and not mla
    if (spec.dtype not in _DTYPES or quantised or packed or not _codable(k_dim) or
            (v_dim and not _codable(v_dim)) or block_tokens % _DIM_STEP):
        opaque = True
    return Shape(name, block_tokens, 1 if mla else spec.num_kv_heads, k_dim, v_dim, spec.dtype,
                 spec.page_size_bytes, opaque, group.group)


def _row_of_bytes(page_bytes: int, tokens: int) -> tuple[int, int]:
    """(heads, head_dim) of an opaque page cut into `tokens` rows of heads * head_dim bytes."""
    row = page_bytes // tokens
    if row * tokens != page_bytes:
        raise UnsupportedError(f"kvtier: a page of {page_bytes} bytes has no whole number of bytes "
                               f"for each of {tokens} tokens")
    for dim in range(_DIM_MAX, 0, -_DIM_STEP):
        if row % dim == 0 and row // dim <= 1024:
            return row // dim, dim
    raise UnsupportedError(f"kvtier: {row} bytes a token are not a multiple of {_DIM_STEP}")


def _parts(shape: Shape, number: int) -> Iterator[Part]:
    if shape.opaque:
        heads, dim = _row_of_bytes(shape.page_bytes, shape.tokens)
        yield Part(Kind.OPAQUE, Dtype.BYTE, heads, dim, number, shape.group)
    elif shape.is_mla:
        yield Part(Kind.MLA, _DTYPES[shape.dtype], 1, shape.k_dim, number, shape.group)
    else:
        for kind, dim in ((Kind.K, shape.k_dim), (Kind.V, shape.v_dim)):
            yield Part(kind, _DTYPES[shape.dtype], shape.heads, dim, number, shape.group)


def _spec_of(group: Any, layer: str) -> Any:
    spec = group.kv_cache_spec
    return getattr(spec, "kv_cache_specs", {}).get(layer, spec)


_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW = "SlidingWindowSpec"
_REASONS = {
    "MambaSpec": "a state changes in place with every token: what a block held at its end is gone "
                 "before it could be stored",
    "ChunkedLocalAttentionSpec": "which of its blocks a prompt of some length needs is not known "
                                 "to the store",
    "CrossAttentionSpec": "its KV belongs to an encoder's input, which block hashes do not name",
}
ONE_GROUP = "--disable-hybrid-kv-cache-manager makes one group of full and sliding-window layers"


def _group(number: int, group: Any) -> Group:
    """What a hit needs of a group. UnsupportedError names the group, its kind and the reason."""
    names = group.layer_names
    specs = [_spec_of(group, name) for name in names]
    for name, spec in zip(names, specs):
        kind = type(spec).__name__
        if kind not in (*_FULL, _WINDOW):
            why = _REASONS.get(kind, "layers of full attention, MLA and sliding windows are known")
            raise UnsupportedError(f"kvtier: group {number} ({len(names)} layers, {name} and so on)"
                                   f" is of kind {kind}, which is not stored: {why}")
        if getattr(spec, "tokens_per_state", 1) != 1:
            raise UnsupportedError(f"kvtier: group {number}: layer {name} keeps "
                                   f"{spec.tokens_per_state} tokens in one state")
    windows = {max(1, spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0))
               if type(spec).__name__ == _WINDOW else 0 for spec in specs}
    if len(windows) != 1:
        raise UnsupportedError(f"kvtier: group {number} mixes windows of {sorted(windows)} tokens")
    window, tokens = windows.pop(), group.kv_cache_spec.block_size
    return Group(number, GroupKind.WINDOW if window else GroupKind.FULL, tokens, window)


def model_of(kv_cache_config: Any, opaque: bool = False) -> Model:
    """The layout of an engine's cache. UnsupportedError: what is not stored, and why.
    opaque: pages as bytes, where their inside is not known."""
    engine = kv_cache_config.kv_cache_groups
    groups = tuple(_group(number, group) for number, group in enumerate(engine))
    if not any(group.kind == GroupKind.FULL for group in groups):
        raise UnsupportedError("kvtier: every layer of the model has a sliding window: a prompt's "
                               "last blocks are all that its hit needs, and what is planned by is "
                               "a chain of full attention")
    shapes = [_shape(name, _spec_of(theirs, name), ours, opaque)
              for ours, theirs in zip(groups, engine) for name in theirs.layer_names]
    if any(s.opaque for s in shapes):
        shapes = [replace(s, opaque=True) for s in shapes]
    parts = [part for i, shape in enumerate(shapes)
             for part in _parts(shape, _layer_number(shape.layer, i))]
    tokens = groups[0].block_tokens
    listed = tuple(g for g in groups if (g.kind, g.block_tokens) != (GroupKind.FULL, tokens))
    return Model(tuple(shapes), groups, Layout(tokens, tuple(parts), listed),
                 all(s.is_mla for s in shapes))


# ---- places ----

Pair = tuple[Place, ...]


def _bytes_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(s * tensor.element_size() for s in tensor.stride())


def _cpu_vector_places(tensor: torch.Tensor, shape: Shape) -> Pair | None:
    """CPU kernels: per (block, head) a K plane [dim][tokens], then a V plane [tokens][dim]."""
    if tensor.dim() != 4 or shape.is_mla:
        return None
    size = tensor.element_size()
    block, head = _bytes_strides(tensor)[:2]
    base = tensor.data_ptr()
    plane = shape.k_dim * shape.tokens * size
    return (Place(base, block, head, size, shape.tokens * size),
            Place(base + plane, block, head, shape.v_dim * size, size))


def _packed_places(tensor: torch.Tensor, shape: Shape) -> Pair | None:
    """[blocks, heads, tokens, k_dim + v_dim] in any physical order: K and V side by side."""
    if tensor.dim() != 4 or shape.is_mla or \
            tuple(tensor.shape[1:]) != (shape.heads, shape.tokens, shape.k_dim + shape.v_dim):
        return None
    block, head, token, elem = _bytes_strides(tensor)
    base = tensor.data_ptr()
    return (Place(base, block, head, token, elem),
            Place(base + shape.k_dim * elem, block, head, token, elem))


def _split_places(tensor: torch.Tensor, shape: Shape) -> Pair | None:
    """Five dimensions, one of them of size 2 for K and V: [2, blocks, tokens, heads, dim],
    [blocks, 2, tokens, heads, dim] or, head-major, [.., heads, tokens, dim]."""
    if tensor.dim() != 5 or shape.is_mla or shape.k_dim != shape.v_dim:
        return None
    both = 1 if tensor.shape[1] == 2 else 0 if tensor.shape[0] == 2 else None
    if both is None or tensor.shape[4] != shape.k_dim:
        return None
    inner = tuple(tensor.shape[2:4])
    strides = _bytes_strides(tensor)
    if inner == (shape.tokens, shape.heads):
        token, head = strides[2], strides[3]
    elif inner == (shape.heads, shape.tokens):
        head, token = strides[2], strides[3]
    else:
        return None
    base = tensor.data_ptr()
    return tuple(Place(base + kv * strides[both], strides[1 - both], head, token, strides[4])
                 for kv in (0, 1))


def _mla_places(tensor: torch.Tensor, shape: Shape) -> Pair | None:
    """[blocks, tokens, dim], or with a dimension of size 1 for the one head."""
    if not shape.is_mla:
        return None
    while tensor.dim() > 3 and 1 in tensor.shape[1:-1]:
        tensor = tensor.squeeze(1 + list(tensor.shape[1:-1]).index(1))
    if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (shape.tokens, shape.k_dim):
        return None
    block, token, elem = _bytes_strides(tensor)
    return (Place(tensor.data_ptr(), block, elem, token, elem),)


_RULES = (_packed_places, _split_places, _cpu_vector_places, _mla_places)


def _opaque_places(tensor: torch.Tensor, shape: Shape, blocks: int) -> Pair:
    """Bytes of whole pages. UnsupportedError: a block's bytes do not lie together."""
    axis = 1 if tensor.dim() == 5 and tensor.shape[0] == 2 and tensor.shape[1] == blocks else 0
    step = _bytes_strides(tensor)[axis]
    inside = sorted((s, n) for i, (s, n) in enumerate(zip(_bytes_strides(tensor), tensor.shape))
                    if i != axis and n > 1)
    extent = tensor.element_size()
    for stride, count in inside:
        if stride != extent:
            raise UnsupportedError(f"kvtier: the bytes of a page of layer {shape.layer} do not lie "
                                   "together, and their layout is not known")
        extent *= count
    heads, dim = _row_of_bytes(shape.page_bytes, shape.tokens)
    if extent > step or extent > shape.page_bytes:
        raise UnsupportedError(f"kvtier: pages of layer {shape.layer} hold {extent} bytes, not "
                               f"{shape.page_bytes}")
    return (Place(tensor.data_ptr(), step, dim, heads * dim, 1),)


def _view(tensor: torch.Tensor, place: Place, shape: tuple[int, int, int],
          block: int) -> torch.Tensor:
    """[heads, tokens, dim] of one block where a place says, as a view of the tensor's storage."""
    size = tensor.element_size()
    start = (place.base - tensor.untyped_storage().data_ptr()) + block * place.stride_block
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    strides = (place.stride_head, place.stride_token, place.stride_elem)
    return whole.as_strided(shape, tuple(s // size for s in strides), start // size)


def _proved(layer: Any, tensor: torch.Tensor, shape: Shape, places: Pair, blocks: int) -> bool:
    """Let the engine's kernel write rows into the last block, and look for them by `places`.
    The block is left as it was. RuntimeError and the like: the kernel cannot be asked so."""
    block = blocks - 1
    dims = [(shape.heads, shape.tokens, d) for d in (shape.k_dim, shape.v_dim)]
    views = [_view(tensor, place, dim, block) for place, dim in zip(places, dims)]
    before = [view.clone() for view in views]
    generator = torch.Generator(device="cpu").manual_seed(7)
    rows = [torch.rand((d[1], d[0], d[2]), generator=generator).to(tensor.dtype).to(tensor.device)
            for d in dims]
    slots = torch.arange(block * shape.tokens, (block + 1) * shape.tokens, dtype=torch.int64,
                         device=tensor.device)
    layer.impl.do_kv_cache_update(layer, rows[0], rows[1], tensor, slots)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    found = all(torch.equal(view, row.transpose(0, 1)) for view, row in zip(views, rows))
    for view, old in zip(views, before):
        view.copy_(old)
    return found


def _candidates(tensor: torch.Tensor, shape: Shape) -> Iterator[tuple[str, Pair]]:
    for rule in _RULES:
        places = rule(tensor, shape)
        if places is not None:
            yield rule.__name__.strip("_"), places


def find_places(shapes: Sequence[Shape], tensors: dict[str, torch.Tensor], layers: dict[str, Any],
                blocks: int) -> list[Place] | None:
    """A place for each part, or None: the pages' inside is not known (register them as opaque).
    The first layer is proved by its kernel, where that can be asked; all follow the same rule."""
    first = shapes[0]
    if first.opaque:
        return [p for s in shapes for p in _opaque_places(tensors[s.layer], s, blocks)]
    tensor = tensors[first.layer]
    chosen = None
    for name, places in _candidates(tensor, first):
        try:
            if _proved(layers[first.layer], tensor, first, places, blocks):
                chosen = name
                break
        except (AttributeError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
            if tensor.device.type == "cuda" and name != "cpu_vector_places":
                _log.info("kvtier: page layout %s taken from the shape; the kernel could not be "
                          "asked (%s)", name, error)
                chosen = name
                break
    if chosen is None:
        _log.warning("kvtier: the inside of pages of shape %s is not known; they are stored as "
                     "they are, exact and not coded", tuple(tensor.shape))
        return None
    out: list[Place] = []
    for shape in shapes:
        match = dict(_candidates(tensors[shape.layer], shape)).get(chosen)
        if match is None:
            return None
        out += match
    return out
