#!/usr/bin/env python3
"""Golden keys and namespaces, made from docs/format.md with hashlib alone.

Shares no code with the library, so that an error in either shows. Usage:
    make_keys.py            write keys.txt and namespaces.txt beside this file
    make_keys.py --check    compare with what is there; exit 1 when they differ
"""
import hashlib
import os
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
MASK = (1 << 64) - 1


class Splitmix64:
    """The generator that the tests use, so that token lists need not be stored."""

    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, bound):
        return (self.next() * bound) >> 64


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def string(data):
    return u64(len(data)) + data


def key_root(salt):
    return hashlib.sha256(b"kvt-sha256-v1:root\0" + string(salt)).digest()


def key_block(parent, tokens, extras):
    message = b"kvt-sha256-v1:block\0" + parent
    message += u32(len(tokens)) + b"".join(u32(token) for token in tokens)
    message += u32(len(extras))
    for kind, data in extras:
        message += u32(kind) + u32(len(data)) + data
    return hashlib.sha256(message).digest()


def token_list(number):
    """List `number`: block size, salt, extras and tokens, drawn in this order."""
    rng = Splitmix64(number)
    block = (16, 64, 128, 256, 1, 7)[rng.below(6)]
    salt = bytes(rng.below(256) for _ in range(rng.below(40)))
    extras = []
    for _ in range(rng.below(3)):
        kind = rng.below(1 << 32)
        extras.append((kind, bytes(rng.below(256) for _ in range(rng.below(48)))))
    vocabulary = 151936 if rng.below(10) else 1 << 32
    tokens = [rng.below(vocabulary) for _ in range(rng.below(2000))]
    return block, salt, extras, tokens


def keys_text():
    lines = ["# list, full blocks, key of the first, key of the last, SHA-256 over all keys"]
    for number in range(1000):
        block, salt, extras, tokens = token_list(number)
        parent, keys = key_root(salt), []
        for at in range(0, len(tokens) - block + 1, block):
            parent = key_block(parent, tokens[at : at + block], extras)
            keys.append(parent)
        ends = (keys[0].hex(), keys[-1].hex()) if keys else ("-", "-")
        total = hashlib.sha256(b"".join(keys)).hexdigest()
        lines.append(f"{number} {len(keys)} {ends[0][:16]} {ends[1]} {total[:16]}")
    return "\n".join(lines) + "\n"


STRINGS = (
    "engine",
    "key_scheme",
    "model",
    "revision",
    "adapter",
    "layout",
    "rope",
    "rotation",
    "extra",
)


WITH_GROUPS = 200  # layouts from this number on list groups


def namespace(identity, block_tokens, parts, groups=(), codec_version=0):
    message = b"kvt-namespace-v1\0"
    for name in STRINGS:
        message += string(identity.get(name, b""))
    message += string(identity.get("salt", b""))
    for name, default in (("tp_size", 1), ("pp_size", 1), ("pp_rank", 0)):
        message += u32(identity.get(name, default))
    message += u32(block_tokens) + u32(len(parts))
    for part in parts:
        message += b"".join(u32(field) for field in part)
    if groups:
        message += u32(len(groups))
    for number, kind, tokens, window in groups:
        message += u32(number) + u32(kind) + u32(tokens or block_tokens) + u32(window)
    message += u32(codec_version)
    return hashlib.sha256(message).digest()[:16]


def identity(number):
    """Identity and layout `number`: strings, sizes, parts and groups, drawn in this order."""
    rng = Splitmix64(1000003 + number)
    result = {}
    for name in STRINGS:
        result[name] = bytes(33 + rng.below(94) for _ in range(rng.below(30)))
    result["salt"] = bytes(rng.below(256) for _ in range(rng.below(30)))
    result["tp_size"] = 1 + rng.below(16)
    result["pp_size"] = 1 + rng.below(16)
    result["pp_rank"] = rng.below(result["pp_size"])
    block_tokens = 16 * (1 + rng.below(256))
    parts = []
    for layer in range(1 + rng.below(40)):
        heads, dim = 1 + rng.below(64), 16 * (1 + rng.below(64))
        dtype, group = 1 + rng.below(3), rng.below(4)
        for kind in (1, 2):
            parts.append((kind, dtype, group, layer, heads, dim))
    groups = []
    for group in range(1 + rng.below(4) if number >= WITH_GROUPS else 0):
        kind = rng.below(3)
        tokens = 16 * (1 + rng.below(64)) if rng.below(4) else 0
        groups.append((group, kind, tokens, 1 + rng.below(8192) if kind == 1 else 0))
    return result, block_tokens, parts, groups


def namespaces_text():
    lines = ["# identity, namespace id"]
    for number in range(WITH_GROUPS + 100):
        lines.append(f"{number} {namespace(*identity(number)).hex()}")
    return "\n".join(lines) + "\n"


def main():
    differing = 0
    for name, text in (("keys.txt", keys_text()), ("namespaces.txt", namespaces_text())):
        path = os.path.join(HERE, name)
        if "--check" in sys.argv[1:]:
            with open(path, encoding="ascii") as file:
                if file.read() != text:
                    print(f"{name} differs", file=sys.stderr)
                    differing = 1
        else:
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
    return differing


if __name__ == "__main__":
    sys.exit(main())
