#!/usr/bin/env python3
"""Reads a store from docs/format.md alone: list and verify every record of a root.

Shares no code with the library; XXH3-64 is libxxhash's own. Usage:
    read_store.py DIR       one line per record that counts: key hash, sequence, segment, page, pages;
                            exit 1 when a record that counts does not verify, 77 without libxxhash
"""
import ctypes
import os
import re
import struct
import sys

PAGE = 4096
VERSION = 0
MAGIC = {"superblock": b"VTIERSB0", "segment": b"KVTSEG0\0", "batch": b"KVTBAT0\0"}
MAGIC.update(trailer=b"KVTEND0\0", journal=b"KVTJRN0\0")


class Refused(Exception):
    pass


class Newer(Exception):
    pass


def load_hash():
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_64bits.restype = ctypes.c_uint64
    library.XXH3_64bits.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
    return lambda data: library.XXH3_64bits(data, len(data))


def need(condition):
    if not condition:
        raise Refused


def page_fields(data, kind, layout):
    """Fields of a one-page structure after magic and version; layout ends before the zeros."""
    need(len(data) == PAGE and data[:8] == MAGIC[kind])
    need(struct.unpack_from("<Q", data, 4088)[0] == H(data[:4088]))
    if struct.unpack_from("<I", data, 8)[0] > VERSION:
        raise Newer
    fields = struct.unpack_from("<" + layout, data, 12)
    need(not any(data[12 + struct.calcsize("<" + layout) : 4088]))
    return fields


def full_key(data):
    hash_len = data[50]
    need(1 <= hash_len <= 32 and not any(data[16 + hash_len : 48]) and data[51] == 0)
    return data


def entry(data, segment_pages):
    key = full_key(data[:56])
    sequence, checksum, page, pages, first_pos, level, parent_len = struct.unpack_from(
        "<QQIIIBB", data, 88
    )
    need(1 <= level <= 15 and parent_len <= 32 and not any(data[56 + parent_len : 88]))
    need(not any(data[118:128]) and page >= 1 and pages >= 1 and page + pages < segment_pages)
    return {
        "key": key,
        "parent": data[56:88],
        "parent_len": parent_len,
        "sequence": sequence,
        "checksum": checksum,
        "page": page,
        "pages": pages,
        "first_pos": first_pos,
        "map": level,
    }


def batch(data, segment, generation, page, segment_pages):
    """Header of the batch at `page`: its entries, its pages and its checksum."""
    head = data[page * PAGE :]
    need(head[:8] == MAGIC["batch"])
    version, number, life, where, header_pages, pages, count, previous, zero, checksum = (
        struct.unpack_from("<IIQIIIIQQQ", head, 8)
    )
    need(1 <= count <= 65535)
    size = -(-(64 + 128 * count) // PAGE) * PAGE
    need(size <= len(head) and checksum == H(head[:56] + head[64:size]))
    if version > VERSION:
        raise Newer
    need((number, life, where, zero) == (segment, generation, page, 0))
    need(header_pages == size // PAGE and page + pages < segment_pages)
    need(not any(head[64 + 128 * count : size]))
    entries, at = [], page + header_pages
    for i in range(count):
        entries.append(entry(head[64 + 128 * i : 192 + 128 * i], segment_pages))
        need(entries[-1]["page"] == at)
        at += entries[-1]["pages"]
    need(at == page + pages)
    return entries, pages, previous, checksum


def footer(data, segment, generation, segment_pages):
    number, life, page, count, checksum = page_fields(data[-PAGE:], "trailer", "IQIIQ")
    need((number, life) == (segment, generation) and page >= 1)
    need(page + -(-128 * count // PAGE) < segment_pages)
    raw = data[page * PAGE : page * PAGE + 128 * count]
    need(H(raw) == checksum)
    return [entry(raw[128 * i : 128 * i + 128], segment_pages) for i in range(count)]


def walk(data, segment, generation, segment_pages):
    entries, page, before = [], 1, 0
    while page + 2 < segment_pages:
        try:
            found, pages, previous, checksum = batch(
                data, segment, generation, page, segment_pages
            )
            need(previous == before)
        except Refused:
            break
        entries += found
        page, before = page + pages, checksum
    return entries


def superblock(path):
    best = None
    data = open(path, "rb").read()
    for copy in (0, 1):
        try:
            fields = page_fields(data[copy * PAGE : copy * PAGE + PAGE], "superblock", "I16sQQIIQQQQQQ")
            need(fields[0] == copy)
        except Refused:
            continue
        if best is None or fields[2] > best[2]:
            best = fields
    need(best)
    names = "copy root_id update cap_bytes segment_bytes segment_count next_generation next_sequence"
    names += " journal_epoch journal_pages clean_generation clean_page"
    return dict(zip(names.split(), best))


def journal_page(page, i, epoch):
    """Items (kind, key, value) of page i."""
    items = []
    number, life, count, zero = page_fields(page, "journal", "IQII3960s")[:4]
    need((number, life, zero) == (i, epoch, 0) and 1 <= count <= 55)
    for k in range(count):
        raw = page[32 + 72 * k : 104 + 72 * k]
        kind, zero = struct.unpack_from("<II", raw)
        need(zero == 0)
        items.append((kind, raw[8:64], struct.unpack_from("<Q", raw, 64)[0]))
    return items


def journal(path, epoch, sure):
    """All items. When a page that a purge relies on is bad, that is a doubt: nothing counts."""
    everything = [(4, b"", 1 << 64)]
    if not os.path.exists(path):
        return [] if not epoch else everything
    data = open(path, "rb").read()
    filled = -(-len(data.rstrip(b"\0")) // PAGE)
    life = struct.unpack_from("<Q", data, 16)[0] if len(data) >= PAGE else 0
    if life < epoch:
        return everything
    items = []
    for i in range(max(filled, sure)):
        try:
            items += journal_page(data[i * PAGE : i * PAGE + PAGE], i, life)
        except (Refused, struct.error):
            if i < sure or life > epoch:
                return everything
            break  # a purge that did not return
    return items


def gone(record, items):
    for kind, key, value in items:
        if record["sequence"] >= value:
            continue
        if kind == 4 or (kind == 1 and key[:16] == record["key"][:16]):
            return True
        if kind == 2 and key == record["key"]:
            return True
    return False


def verify(record, data):
    """Section 4: the record's bytes are what its entry says."""
    raw = data[record["page"] * PAGE : (record["page"] + record["pages"]) * PAGE]
    magic, version, level, parent_len = struct.unpack_from("<4sHBB", raw)
    first_pos, record_bytes, payload_bytes, flags = struct.unpack_from("<IIII", raw, 96)
    sequence, checksum = struct.unpack_from("<QQ", raw, 112)
    hashes = [H(raw[:120] + bytes(8) + raw[128:PAGE])]
    hashes += [H(raw[at : at + PAGE]) for at in range(PAGE, len(raw), PAGE)]
    need(magic == b"KVTR" and version == VERSION and flags == 0)
    need(full_key(raw[8:64]) == record["key"] and raw[64:96] == record["parent"])
    need((level, parent_len) == (record["map"], record["parent_len"]))
    need((first_pos, sequence) == (record["first_pos"], record["sequence"]))
    need(payload_bytes >= 1 and record_bytes == -(-(128 + payload_bytes) // PAGE) * PAGE)
    need(record_bytes == len(raw) and not any(raw[128 + payload_bytes :]))
    need(checksum == record["checksum"] == H(struct.pack(f"<{len(hashes)}Q", *hashes)))
    if level >= 7:
        mixed_map(level, raw[128 : 128 + payload_bytes])


def mixed_map(ident, payload):
    """Section 4.1: the payload begins with levels, of which the lowest is what the id says."""
    entries, coded_bytes, zero = struct.unpack_from("<IIQ", payload)
    packed = payload[16 : 16 + (entries + 1) // 2]
    levels = [byte >> shift & 15 for byte in packed for shift in (0, 4)][:entries]
    heads = -(-(16 + len(packed)) // 16) * 16
    need(zero == 0 and entries >= 1 and len(levels) == entries and coded_bytes >= 1)
    need(all(1 <= one <= 6 for one in levels))
    need(min(levels) == {7: 1, 8: 2, 9: 2, 10: 2, 11: 3, 12: 3, 13: 4, 14: 5, 15: 5}[ident])
    need(entries % 2 == 0 or packed[-1] >> 4 == 0)
    need(not any(payload[16 + len(packed) : heads]))
    need(heads + coded_bytes <= len(payload) and not any(payload[heads + coded_bytes :]))


def read_root(root):
    block = superblock(os.path.join(root, "superblock"))
    items = journal(
        os.path.join(root, "journal"), block["journal_epoch"], block["journal_pages"]
    )
    best, bad = {}, 0
    for name in sorted(os.listdir(root)):
        if not re.fullmatch("seg-[0-9a-f]{8}", name):
            continue
        with open(os.path.join(root, name), "rb") as file:
            data = file.read()
        try:
            segment, root_id, generation, size = page_fields(data[:PAGE], "segment", "I16sQQ")
            need(segment == int(name[4:], 16) and root_id == block["root_id"])
            need(generation < block["next_generation"] and size == block["segment_bytes"])
        except Refused:
            continue
        pages = size // PAGE
        try:
            need(len(data) == size)
            entries = footer(data, segment, generation, pages)
        except Refused:
            entries = walk(data, segment, generation, pages)
        for record in entries:
            rank = (record["sequence"], generation)
            if not gone(record, items) and rank >= best.get(record["key"], ((0, 0),))[0]:
                best[record["key"]] = (rank, segment, record, data)
    for key, (_, segment, record, data) in sorted(best.items()):
        try:
            verify(record, data)
        except Refused:
            bad += 1
            continue
        text = key[16 : 16 + key[50]].hex()
        print(text, record["sequence"], segment, record["page"], record["pages"])
    if bad:
        print(f"{bad} records do not verify", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        H = load_hash()
    except OSError:
        sys.exit(77)
    sys.exit(read_root(sys.argv[1]))
