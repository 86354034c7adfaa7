#!/usr/bin/env python3
"""The smallest whole use of the Python package: store two blocks of a pool, load them back.

Usage:  remember.py [DIRECTORY]    with a directory the blocks also survive the process
The "engine" is two bytearrays: one layer, two KV heads of 64 elements, blocks of 16 tokens, float32.
A torch or numpy tensor is described in the same way: kvtier.pages(tensor, "bhte").
"""
import sys

import kvtier
from kvtier import Identity, Keys, Kind

BLOCKS, HEADS, TOKENS, DIM = 8, 2, 16, 64


def main():
    memory = [bytearray(BLOCKS * HEADS * TOKENS * DIM * 4) for _ in range(2)]
    tensors = [memoryview(part).cast("f", (BLOCKS, HEADS, TOKENS, DIM)) for part in memory]
    for seed, part in enumerate(memory):  # stands for what the model computed
        numbers = memoryview(part).cast("f")
        for i in range(len(numbers)):
            numbers[i] = ((i * 2654435761 + seed) % 1000) / 500 - 1

    options = {"dram": "64MiB", "disk": f"{sys.argv[1]}:256MiB" if len(sys.argv) > 1 else None}
    with kvtier.Cache(options) as cache:
        if cache.notes:
            print("remember:", cache.notes, file=sys.stderr)
        pool = cache.pool_of([(Kind.K, kvtier.pages(tensors[0], "bhte")),
                              (Kind.V, kvtier.pages(tensors[1], "bhte"))])
        ns = cache.namespace(Identity("example", model="none"), pool.layout)
        keys = Keys.chain(range(100, 100 + 2 * TOKENS), TOKENS)
        print(f"found before: {ns.lookup(keys).n} blocks")
        ns.store(pool, keys, [0, 1], exact=True).wait()
        ns.load(pool, keys, [5, 6]).wait()
        size = HEADS * TOKENS * DIM * 4
        same = all(part[5 * size:7 * size] == part[:2 * size] for part in memory)
    print("loaded bytes are", "the same" if same else "different")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
