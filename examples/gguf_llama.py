"""Weights of a Llama model out of a GGUF file, as numpy arrays under transformers' names.

For machines that have transformers but not the package gguf, such as torch_gpu.py's: types F32, F16,
Q4_0, Q4_1 and Q8_0 of one file of version 2 or 3. Not a converter: no other architecture, no
tokenizer.
"""
import struct

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
          "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
          "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
          "ffn_down": "mlp.down_proj"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class _Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def scalar(self, kind):
        size = struct.calcsize("<" + kind)
        value = struct.unpack_from("<" + kind, self.data, self.at)[0]
        self.at += size
        return value

    def text(self):
        size = self.scalar("Q")
        self.at += size
        return bytes(self.data[self.at - size:self.at]).decode(errors="replace")

    def value(self, kind):
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def _nibbles(packed):
    """Low halves of 16 bytes first, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)


def _half(raw):
    return raw.copy().view(np.float16).astype(np.float32)


def _floats(kind, raw):
    """raw: bytes of whole rows."""
    if kind == 0:
        return raw.view(np.float32).copy()
    if kind == 1:
        return raw.view(np.float16).astype(np.float32)
    if kind == 2:  # Q4_0: 32 elements of 18 bytes
        blocks = raw.reshape(-1, 18)
        return (_nibbles(blocks[:, 2:]) - 8) * _half(blocks[:, :2])
    if kind == 3:  # Q4_1: scale, minimum, 16 bytes
        blocks = raw.reshape(-1, 20)
        return _nibbles(blocks[:, 4:]) * _half(blocks[:, :2]) + _half(blocks[:, 2:4])
    if kind == 8:  # Q8_0
        blocks = raw.reshape(-1, 34)
        return blocks[:, 2:].copy().view(np.int8).astype(np.float32) * _half(blocks[:, :2])
    raise ValueError(f"tensor type {kind} of GGUF is not known here")


_BYTES = {0: (4, 1), 1: (2, 1), 2: (18, 32), 3: (20, 32), 8: (34, 32)}  # bytes of so many elements


def _straight(weight, heads):
    """Rows of Q and K as transformers has them: GGUF keeps the halves of a rotary pair side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def load(path):
    """{name of transformers: float32 array} of every tensor of the file."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    reader = _Reader(data)
    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file")
    reader.at = 4
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"{path}: version {version} of GGUF is not known here")
    tensors, keys = reader.scalar("Q"), reader.scalar("Q")
    meta = {}
    for _ in range(keys):
        name = reader.text()
        meta[name] = reader.value(reader.scalar("I"))
    listed = []
    for _ in range(tensors):
        name, dims = reader.text(), reader.scalar("I")
        shape = [reader.scalar("Q") for _ in range(dims)][::-1]
        listed.append((name, shape, reader.scalar("I"), reader.scalar("Q")))
    align = meta.get("general.alignment", 32)
    start = -(-reader.at // align) * align
    heads = {"attn_q": meta["llama.attention.head_count"],
             "attn_k": meta.get("llama.attention.head_count_kv", meta["llama.attention.head_count"])}
    out = {}
    for name, shape, kind, offset in listed:
        if kind not in _BYTES:
            raise ValueError(f"{name}: tensor type {kind} of GGUF is not known here")
        size, of = _BYTES[kind]
        count = int(np.prod(shape))
        raw = np.asarray(data[start + offset:start + offset + count // of * size])
        weight = _floats(kind, raw).reshape(shape)
        words = name.split(".")
        if words[0] == "blk":
            if words[2] in heads:
                weight = _straight(weight, heads[words[2]])
            target = f"model.layers.{words[1]}.{_NAMES[words[2]]}.{words[3]}"
        elif words[0] in _TOP:
            target = f"{_TOP[words[0]]}.{words[1]}"
        else:
            continue  # tables that transformers makes by itself
        out[target] = weight
    return out
