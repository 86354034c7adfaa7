#!/usr/bin/env python3
"""First corpus of every fuzz target: make_seeds.py CORPUS_DIR [STORE_DIR].

STORE_DIR is a real root directory (of tests or of kvtier): its superblock, journal and first segment
are cut into pages. Without it only what is made by hand is written. Files that are there stay."""
import pathlib
import struct
import sys

PAGE = 4096
out = pathlib.Path(sys.argv[1])


def seed(target, name, data):
    path = out / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(data.rstrip(b"\0") or b"\0")


def from_store(root):
    superblock = (root / "superblock").read_bytes()
    for copy in range(2):
        seed("superblock", f"real{copy}", bytes([copy, 0]) + superblock[copy * PAGE:][:PAGE])
        seed("superblock", f"fit{copy}", bytes([copy, 1]) + superblock[copy * PAGE:][:PAGE])
    journal = (root / "journal").read_bytes() if (root / "journal").exists() else b""
    for page in range(min(3, len(journal) // PAGE)):
        seed("journal", f"real{page}", bytes([0, 1]) + journal[page * PAGE:][:PAGE])
        seed("journal", f"fit{page}", bytes([1, 1]) + journal[page * PAGE:][:PAGE])
    for number, path in enumerate(sorted(root.glob("seg-*"))[:2]):
        segment = path.read_bytes()
        pages = len(segment) // PAGE
        where = bytes([max(0, pages // 256 - 1) & 255])
        seed("batch", f"segment{number}", bytes([2, 0]) + where + segment[:PAGE])
        batch = segment[PAGE:2 * PAGE]
        seed("batch", f"batch{number}", bytes([0, 0]) + where + batch)
        seed("batch", f"batch_fit{number}", bytes([0, 1]) + where + batch)
        trailer = segment[-PAGE:]
        seed("batch", f"trailer{number}", bytes([1, 1]) + where + trailer)
        if trailer.startswith(b"KVTEND0"):
            first, count = struct.unpack_from("<II", trailer, 24)
            entries = segment[first * PAGE:][:min(count, 8) * 128]
            seed("batch", f"footer{number}", bytes([3, 0]) + where + entries)
        header_pages, = struct.unpack_from("<I", batch, 28)
        record = segment[(1 + header_pages) * PAGE:]
        record = record[:struct.unpack_from("<I", record, 100)[0]][:4 * PAGE]
        seed("record", f"real{number}", bytes([len(record) // PAGE - 1, 0]) + record)
        seed("record", f"fit{number}", bytes([len(record) // PAGE - 1, 1]) + record[:200])


def config():
    texts = ["dram=1GiB", "dram=64MiB,level=kv8,write=idle", "disk=/a/b:16MiB,disk=/c:1.5GiB",
             " dram = 1.5 GiB ,,", "exclude_layers=0,1", "exclude_layers=none", "deadline=250ms",
             "io=uring,pin=auto,scrub=8MB", "dram=-1", "nonsense=1", "level=kv9", "=", ",", "dram=",
             "window=4096,window_level=kv8", "disk=/a:8MiB:9MiB", "fds_max=64", "stats=on"]
    for i, text in enumerate(texts):
        seed("config", f"all{i:02}", b"\1" + text.encode())
        if "," not in text and "=" in text:
            seed("config", f"one{i:02}", b"\0" + text.replace("=", "\0", 1).encode())
    seed("config", "layers", b"\0exclude_layers\0" + b"0,1,-1,-2")


def codec():
    for level in range(6):
        for part in ([1, 1], [2, 2], [1, 3], [3, 1], [4, 4]):
            seed("codec", f"level{level}_{part[0]}{part[1]}",
                 bytes([0, level, 0, 0, level % 3, level % 3] + part + [1, 3] +
                       [2, 1, 0, 7] * 2) + bytes(range(1, 255)))
    for wide in (0x7f80, 0x7c00, 0xffff, 0x0001):
        seed("codec", f"odd{wide:04x}", bytes([0, 1, 0, 0, 0, 0, 1, 1, 0, 3]) +
             struct.pack("<H", wide) * 40)
    for name in (7, 8, 14, 15):
        seed("codec", f"mixed{name}", bytes([1, 0xC0 | name, 0, 8, 0, 0, 1, 1, 1, 3]) +
             struct.pack("<IIQ", 2, 1024, 0) + b"\x66\x22\x11" + bytes(range(1, 99)))


def blob():
    def state(cells, layers, rows, seq=3):
        data = struct.pack("<IiII", 0xaf143cd8, seq, 1, cells)
        for i in range(cells):
            data += struct.pack("<iIi", 16 + (i ^ 1 if cells > 1 else i), 1, seq)
        data += struct.pack("<II", 0, layers)
        for kind, size in rows:
            data += struct.pack("<iQ", kind, size) + bytes([kind + 1]) * (size * cells)
        return data

    rows = [(1, 24), (1, 24), (1, 40), (30, 40)]
    for cells in (1, 2, 4, 8):
        seed("blob", f"cells{cells}", bytes([cells - 1]) + state(cells, 2, rows))
    seed("blob", "one_layer", b"\0" + state(1, 1, [(1, 8), (8, 34)]))


def digest():
    seed("digest", "good", b"\0" + b"0123456789abcdef" * 4 + b"\n")
    seed("digest", "short", b"\0" + b"0123456789abcdef" * 3 + b"\n")
    seed("digest", "upper", b"\0" + b"0123456789ABCDEF" * 4 + b"\n")
    seed("digest", "name", b"\1model.gguf")
    seed("digest", "split", b"\1model-00001-of-00003.gguf")
    seed("digest", "many", b"\1m-00001-of-99999.gguf")


def message():
    def step(op, client, count, how, fields, body=b""):
        return bytes([op, client, count, how, fields]) + body

    def key(number):
        return bytes([number]) + bytes(39)

    alloc_fields = bytes([2, 0, 1, 0]) + bytes(8) + struct.pack("<I", 16) + bytes(40)
    ns1, ns2 = 0x20, 0x28
    keys = b"".join(key(n) for n in range(8))
    alloc = step(3, 0, 8, 4, 0x20 + 24, alloc_fields[:56] + keys)
    commit = step(4, 0, 8, 2 | 4, 1, bytes(24 * 8))
    for name, steps in {
        "store": [alloc, commit, step(14, 0, 0, 4, 1)],
        "load": [alloc, commit, step(6, 1, 8, 4, ns1, b"\xff" * 7 + b"\x7f" + bytes(25) + keys),
                 step(8, 1, 8, 2 | 4, 1, bytes(24 * 8))],
        "purge": [alloc, commit, step(14, 0, 0, 4 | 8, 1), step(13, 0, 0, 4, ns1),
                  step(2, 0, 8, 0, ns1, bytes(32) + keys)],
        "pin": [alloc, commit, step(11, 0, 8, 4, ns1, bytes(32) + keys),
                step(12, 0, 8, 4, ns1, bytes(32) + keys), step(9, 0, 8, 0, ns2, bytes(32) + keys)],
        "leave": [alloc, step(5, 0, 3, 2, 1), step(1, 0, 0, 16, 0), commit],
        "lies": [step(op, 0, 3, 1, 7, bytes(200)) for op in range(18)],
        "prefetch": [alloc, commit, step(14, 0, 0, 4, 1),
                     step(10, 1, 8, 4, ns1, bytes(32) + keys), step(7, 1, 0, 4, 1, bytes(8)),
                     step(15, 1, 0, 0, 1)],
    }.items():
        seed("message", name, b"".join(steps))


def root():
    def edit(file, page, offset, data):
        return bytes([file, page]) + struct.pack("<H", offset) + bytes([len(data)]) + data

    seed("root", "nothing", b"\0")
    for field, offset in {"cap": 40, "bytes": 48, "count": 52, "generation": 56, "sequence": 64,
                          "epoch": 72, "pages": 80, "clean_generation": 88, "clean_page": 96}.items():
        for copy in range(2):
            seed("root", f"superblock_{field}{copy}", edit(0, copy, offset, b"\xff" * 4))
    seed("root", "journal", edit(1, 0, 28, b"\5") + edit(1, 1, 24, b"\x40"))
    for number in (2, 3):
        seed("root", f"header{number}", edit(number, 0, 32, b"\1\0\0\0\0\1"))
        seed("root", f"batch{number}", edit(number, 1, 36, b"\2") + edit(number, 1, 64, b"\1" * 32))
        seed("root", f"trailer{number}", edit(number, 0xff, 24, b"\1\0\0\0\1\0\0\0"))
        seed("root", f"cut{number}", edit(number | 0x40, 3, 100, b""))
        seed("root", f"payload{number}", edit(number | 0x80, 2, 200, b"\1\2\3"))
    seed("root", "both", edit(0x80, 0, 0, bytes(8)) + edit(0x80, 1, 0, bytes(8)))


if len(sys.argv) > 2:
    from_store(pathlib.Path(sys.argv[2]))
def wire():
    def step(kind, data=b"", word=0):
        return bytes([kind, len(data) // 2]) + struct.pack("<Q", word) + data

    def msg(op, body=b"", ns=1, count=0):
        return struct.pack("<IHHQIIiI", 32 + len(body), op, 0, 7, ns, count, 0, 0) + body

    def keys(n):
        return b"".join(bytes([65 + i]) * 8 + bytes(24) + bytes([8]) + bytes(7) for i in range(n))

    opened = step(3)
    alloc = struct.pack("<BBBBIIIB7x", 2, 0, 0, 0, 0, 0, 16, 0) + bytes(32)
    for name, steps in {
        "lookup": [step(2, msg(2, bytes(8) + keys(3), count=3))],
        "alloc": [step(2, msg(3, alloc + keys(3), count=3)), step(2, msg(15, ns=0))],
        "pin": [step(2, msg(11, bytes(8) + keys(2), count=2)), step(5, word=1999999999)],
        "position": [step(4, word=(64 << 48) | 2), step(1, b"\x10\0\0\0RFVK" + b"A" * 16),
                     step(4, word=2**63)],
        "poke": [step(0, b"\xff" * 64), step(0, bytes(32), word=64), step(2, b"z" * 40)],
        "usage": [step(2, msg(16, struct.pack("<II", at, 0), ns=0)) for at in (0, 2**32 - 1)],
    }.items():
        seed("wire", name, opened + b"".join(steps))


for make in (config, codec, blob, digest, message, root, wire):
    make()
