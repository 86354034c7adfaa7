"""Shared by the tests of the package: a small engine in host memory, and where things lie.

The engine is LAYERS layers of K and V, HEADS heads of DIM float32 elements, pages of 16 tokens in
one bytearray for each part; its content is drawn from a seed that a failing test prints.
KVT_REQUIRE=name,name: engines whose tests may not be skipped here (CI); without it a test whose
engine is absent says so and is skipped.
"""
import importlib
import logging
import os
import random
import struct

import pytest

import kvtier
from kvtier import Identity, Kind

LAYERS, HEADS, DIM, TOKENS, PAGES = 2, 2, 32, 16, 24
SEED = int(os.environ.get("KVT_TEST_SEED", "20261129"))


def pytest_report_header():
    return f"seed {SEED}; library {kvtier._c.library_path()}"


class Engine:
    """Pages of an engine, and a pool over them."""

    def __init__(self, cache, seed=SEED, model="test", **identity):
        self.random = random.Random(seed)
        self.parts = [bytearray(PAGES * TOKENS * HEADS * DIM * 4) for _ in range(2 * LAYERS)]
        self.views = [self._pages(part) for part in self.parts]
        kinds = [Kind.K, Kind.V] * LAYERS
        self.pool = cache.pool_of(list(zip(kinds, self.views)))
        self.ns = cache.namespace(Identity("test", model=model, **identity), self.pool.layout)

    @staticmethod
    def _pages(part):
        return kvtier.pages(memoryview(part).cast("f", (PAGES, TOKENS, HEADS, DIM)), "bthe")

    def fill(self, page):
        """New KV in a page; returns it."""
        size = TOKENS * HEADS * DIM
        for part in self.parts:
            part[page * size * 4:(page + 1) * size * 4] = struct.pack(
                f"{size}f", *(self.random.gauss(0, 1) for _ in range(size)))
        return self.read(page)

    def read(self, page):
        size = TOKENS * HEADS * DIM * 4
        return b"".join(bytes(part[page * size:(page + 1) * size]) for part in self.parts)

    def store(self, keys, ids, **options):
        request = self.ns.store(self.pool, keys, ids, **options)
        assert request.wait(20)
        return request.status()

    def load(self, keys, ids, **options):
        request = self.ns.load(self.pool, keys, ids, **options)
        assert request.wait(20)
        return request.status()


@pytest.fixture
def options():
    return {"dram": "64MiB", "threads": 1, "env": False}


@pytest.fixture
def cache(options):
    with kvtier.Cache(options) as opened:
        yield opened


@pytest.fixture
def engine(cache):
    return Engine(cache)


@pytest.fixture
def vllm_log(caplog):
    """What the adapters for vLLM log: its logger hands nothing up to where caplog listens."""
    logger = logging.getLogger("vllm.kvtier")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def absent(name, why):
    """Skip the module, or fail where CI demands the engine."""
    if name in os.environ.get("KVT_REQUIRE", "").split(","):
        pytest.fail(f"{name} must work here: {why}", pytrace=False)
    pytest.skip(f"{name}: {why}", allow_module_level=True)


def need(name, module):
    """The module of an engine."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return absent(name, str(error))


def gguf():
    """The model of scripts/fetch-model.sh, or that of KVT_TEST_MODEL."""
    cache = os.environ.get("KVTIER_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvtier")
    path = os.environ.get("KVT_TEST_MODEL") or os.path.join(
        cache, "models/SmolLM2-135M-Instruct.Q4_1.gguf")
    return path if os.path.exists(path) else absent("model", f"no {path}: scripts/fetch-model.sh")
