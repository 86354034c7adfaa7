#!/usr/bin/env python3
"""An independent reading of docs/codec.md: recomputes the `example` lines of codec-v0.txt (payload from
input, output from payload) in plain Python. Usage: check_codec.py [FILE]; exits 1 on a difference.
binary64 results rounded to binary32 are the correctly rounded ones for +, -, *, / and sqrt."""
import math
import os
import struct
import sys

D = 16
SIGNS = bytes.fromhex("4449d0423ee576b2568f0c4daf5e0c9f")
LEVELS = {4: [6, 18, 31, 44, 58, 75, 96, 127],
          5: [3, 8, 13, 18, 24, 29, 35, 41, 47, 54, 61, 70, 79, 90, 105, 127]}
SETS = {4: [[24, 49, 75, 102, 133, 171, 223], [22, 45, 68, 93, 121, 156, 203],
            [26, 53, 82, 111, 145, 186, 243]],
        5: [[11, 21, 31, 42, 53, 64, 76, 88, 101, 115, 131, 149, 169, 195, 232],
            [10, 19, 28, 38, 48, 58, 69, 80, 92, 105, 119, 136, 154, 177, 211],
            [12, 23, 34, 46, 58, 70, 83, 96, 110, 125, 143, 162, 184, 213, 253]]}
G = {4: "42b9e76d", 5: "429bcac1"}
BITS = {"int4": 4, "kv4": 4, "kv5": 5, "kv6": 6, "kv8": 8}


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bits_of(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def from_bits(b):
    return struct.unpack("<f", struct.pack("<I", b))[0]


def bf16(x):
    b = bits_of(x)
    return (b + 0x7FFF + ((b >> 16) & 1)) >> 16


def widen(h):
    return from_bits(h << 16)


def tree(v):
    v = list(v)
    while len(v) > 1:
        half = len(v) // 2
        v = [f32(v[i] + v[i + half]) for i in range(half)]
    return v[0]


def negative(i):
    return SIGNS[i // 8] >> (7 - i % 8) & 1


def transform(y, add):
    y, h = list(y), 1
    while h < len(y):
        for i in range(len(y)):
            if not i & h:
                y[i], y[i + h] = add(y[i] + y[i + h]), add(y[i] - y[i + h])
        h *= 2
    return y


def gauss(y, bits):
    s = tree([f32(v * v) for v in y])
    sigma = f32(math.sqrt(f32(s / D)))
    if sigma == 0:
        return 0, [0] * D
    f = f32(from_bits(int(G[bits], 16)) / sigma)
    t = [round(f32(v * f)) for v in y]
    best = None
    for thresholds in SETS[bits]:
        index = [sum(x <= abs(v) for x in thresholds) for v in t]
        num = sum(LEVELS[bits][i] * abs(v) for i, v in zip(index, t))
        den = sum(LEVELS[bits][i] ** 2 for i in index)
        score = f32(f32(f32(num) * f32(num)) / f32(den))
        if best is None or score > best[0]:
            best = (score, num, den, index)
    _, num, den, index = best
    a = bf16(f32(f32(f32(num) / f32(den)) / f))
    return a, [i + (1 << (bits - 1)) * (v < 0) for i, v in zip(index, t)]


def uniform(v, bits, top, low):
    m = max(abs(x) for x in v)
    a = bf16(f32(m / top))
    if f32(widen(a) * (top + 0.5)) < m:
        a += 1
    q = [0 if a == 0 else max(low, min(top, round(f32(x / widen(a))))) for x in v]
    return a, [x & ((1 << bits) - 1) for x in q]


def code_row(level, y):
    if level == "int4":
        return uniform(y, 4, 7, -8)
    if level in ("kv4", "kv5"):
        return gauss(y, BITS[level])
    top = 31 if level == "kv6" else 127
    return uniform(y, BITS[level], top, -top)


def encode(level, x):
    bits, means, stored = BITS[level], b"", [0.0] * D
    if level != "int4":
        mean = [f32(tree([x[t][c] for t in range(16)]) * 0.0625) for c in range(D)]
        chosen = sorted(range(D), key=lambda c: (-(bits_of(mean[c]) & 0x7FFFFFFF), c))[:D // 4]
        for c in chosen:
            stored[c] = widen(bf16(mean[c]))
        values = b"".join(struct.pack("<H", bf16(mean[c])) for c in chosen)
        means = values.ljust(16, b"\0") + bytes(chosen).ljust(16, b"\0")
    codes, plane, scales = b"", b"", b""
    for row in x:
        y = [f32(row[c] - stored[c]) for c in range(D)]
        if level != "int4":
            y = transform([-v if negative(i) else v for i, v in enumerate(y)], f32)
        a, code = code_row(level, y)
        scales += struct.pack("<H", a)
        if bits == 8:
            codes += bytes(code)
            continue
        codes += bytes(code[i] & 15 | (code[i + 1] & 15) << 4 for i in range(0, D, 2))
        upper = sum((c >> 4) << (i * (bits - 4)) for i, c in enumerate(code))
        plane += upper.to_bytes(D * (bits - 4) // 8, "little")
    return codes + plane + scales + means


def level_of(level, code):
    bits = BITS[level]
    if level in ("kv4", "kv5"):
        half = 1 << (bits - 1)
        return -LEVELS[bits][code - half] if code & half else LEVELS[bits][code]
    return code - (1 << bits) if code >> (bits - 1) else code


def decode(level, payload):
    bits, out = BITS[level], []
    row_bytes = D if bits == 8 else D // 2
    plane_bytes = 0 if bits == 8 else D * (bits - 4) // 8
    plane_at = 16 * row_bytes
    scales_at = plane_at + 16 * plane_bytes
    stored = [0.0] * D
    for k in range(D // 4 if level != "int4" else 0):
        at = scales_at + 32
        stored[payload[at + 16 + k]] = widen(struct.unpack_from("<H", payload, at + 2 * k)[0])
    for t in range(16):
        a = widen(struct.unpack_from("<H", payload, scales_at + 2 * t)[0])
        row = payload[t * row_bytes:(t + 1) * row_bytes]
        at = plane_at + t * plane_bytes
        upper = int.from_bytes(payload[at:at + plane_bytes], "little")
        if bits == 8:
            code = list(row)
        else:
            code = [row[i // 2] >> (4 * (i % 2)) & 15 for i in range(D)]
            mask = (1 << (bits - 4)) - 1
            code = [c | (upper >> (i * (bits - 4)) & mask) << 4 for i, c in enumerate(code)]
        w = [level_of(level, c) for c in code]
        if level == "int4":
            x = [f32(v * a) for v in w]
        else:
            w = transform(w, int)
            w = [-v if negative(i) else v for i, v in enumerate(w)]
            x = [f32(stored[i] + f32(v * f32(a / D))) for i, v in enumerate(w)]
        out += [bf16(v) for v in x]
    return struct.pack("<256H", *out)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "codec-v0.txt")
    checked = 0
    for line in open(path):
        words = line.split()
        if words[0] != "example":
            continue
        level = words[1]
        data, payload, output = (bytes.fromhex(words[i]) for i in (5, 7, 9))
        halves = struct.unpack("<256H", data)
        x = [[widen(h) for h in halves[16 * t:16 * t + 16]] for t in range(16)]
        if encode(level, x) != payload or decode(level, payload) != output:
            print(f"{level}: differs")
            return 1
        checked += 1
    print(f"{checked} examples agree")
    return 0 if checked == 5 else 1


if __name__ == "__main__":
    sys.exit(main())
