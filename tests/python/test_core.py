"""Goal: the ctypes core and the friendly classes do what kvtier/cache.h says, and no mistake of a
caller ends the process. Method: a small engine in bytearrays (conftest.py) over a real cache in
DRAM and on disk; other processes where a restart is meant."""
import array
import ctypes as C
import gc
import hashlib
import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest
from conftest import DIM, HEADS, LAYERS, PAGES, SEED, TOKENS, Engine

import kvtier
from kvtier import Cut, ErrorCode, Keys, Kind, Level, Reason, Tier, codec

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


def chain(n, start=0, **more):
    return Keys.chain(range(start, start + n * TOKENS), TOKENS, **more)


# ---- keys ----

def test_c20_keys_from_python_are_those_of_the_golden_file():
    """The same lists as tests/golden/make_keys.py, through the package."""
    sys.path.insert(0, str(GOLDEN))
    import make_keys
    lines = [line.split() for line in (GOLDEN / "keys.txt").read_text().splitlines()
             if not line.startswith("#")]
    assert len(lines) == 1000
    for number, blocks, first, last, everything in lines:
        block_tokens, salt, extras, tokens = make_keys.token_list(int(number))
        keys = list(Keys.chain(tokens, block_tokens, salt=salt, extras=extras))
        ends = (keys[0].hex()[:16], keys[-1].hex()) if keys else ("-", "-")
        digest = hashlib.sha256(b"".join(keys)).hexdigest()[:16]
        assert (len(keys), *ends, digest) == (int(blocks), first, last, everything), number


def test_c20_keys_do_not_depend_on_the_process():
    program = ("import kvtier; k = kvtier.Keys.chain(range(64), 16, salt=b's');"
               "print([h.hex() for h in k])")
    seen = set()
    for seed, locale in (("0", "C"), ("1", "C.UTF-8"), ("77", "POSIX")):
        env = dict(os.environ, PYTHONHASHSEED=seed, LC_ALL=locale)
        seen.add(subprocess.run([sys.executable, "-c", program], env=env, check=True,
                                capture_output=True, text=True).stdout)
    assert len(seen) == 1


def test_keys_are_a_sequence_that_shares_memory():
    keys = chain(5)
    assert len(keys) == 5 and len(keys[1:3]) == 2
    assert keys[1:3].address == keys.address + Keys.SIZE
    assert list(keys[1:3]) == [keys[1], keys[2]] and keys[-1] == keys[4]
    assert (keys[:2] + keys[2:]).raw() == keys.raw()
    assert len(keys[3:3]) == 0 and keys[3:3].address is None
    tail = Keys.chain(range(2 * TOKENS, 5 * TOKENS), TOKENS, parent=keys[1])
    assert list(tail) == list(keys[2:])
    with pytest.raises(IndexError):
        keys[5]
    with pytest.raises(ValueError):
        keys[::2]
    with pytest.raises(ValueError):
        Keys.chain(range(16), 16, parent=b"short")


def test_keys_from_hashes_are_the_c_structs():
    hashes = [bytes([i]) * 20 for i in range(3)]
    keys = Keys.from_hashes(hashes, group=3, shard=70000)
    key = kvtier._c.kvt_key.from_address(keys.address + Keys.SIZE)
    assert (bytes(key.hash[:20]), key.hash_len, key.group, key.shard) == (hashes[1], 20, 3, 70000)
    assert list(keys) == hashes and len(Keys.from_hashes([])) == 0
    for wrong in ([b""], [b"x" * 33], [b"a", b"bb"]):
        with pytest.raises(ValueError):
            Keys.from_hashes(wrong)


# ---- store, lookup, load ----

def test_raw_blocks_come_back_bit_for_bit(engine):
    before = [engine.fill(page) for page in range(4)]
    keys = chain(4)
    assert engine.store(keys, range(4), exact=True) == [0] * 4
    found = engine.ns.lookup(keys)
    assert found.n == 4 and list(found.tiers) == [Tier.DRAM] * 4
    assert engine.load(keys, [9, 8, 7, 6]) == [0] * 4
    assert [engine.read(page) for page in (9, 8, 7, 6)] == before, f"seed {SEED}"
    assert engine.store(keys, range(4), exact=True) == [ErrorCode.EXISTS] * 4


def test_levels_and_minimum_level(engine):
    for page in range(4):
        engine.fill(page)
    keys = chain(4)
    assert engine.store(keys, range(4), level="kv4") == [0] * 4
    assert engine.ns.lookup(keys).n == 4
    assert engine.ns.lookup(keys, min_level="raw").n == 1  # the first block is always raw
    assert engine.ns.record_bytes("kv4") < engine.ns.record_bytes(Level.RAW)
    with pytest.raises(ValueError, match="kv6"):
        engine.ns.lookup(keys, min_level="kv7")


def test_limits_of_a_namespace(engine):
    """Three records of 20 KiB, and what is more is not stored; a limit that makes no sense is refused
    and changes nothing."""
    for page in range(6):
        engine.fill(page)
    keys = chain(6)
    engine.ns.limit(quota=64 << 10)
    for wrong in ({"quota": 0}, {"quota": -1}, {"quota": 1000}, {"ttl": 0}, {"ttl": -3}, {"ttl": 0.5}):
        with pytest.raises(kvtier.KvtierError) as caught:
            engine.ns.limit(**wrong)
        assert caught.value.code == ErrorCode.INVAL
    for wrong in ({"quota": "1"}, {"ttl": "1ns"}, {"ttl": math.nan}, {"quota": [1]}):
        with pytest.raises(kvtier.KvtierError, match=f"{next(iter(wrong))} is .* a number of"):
            engine.ns.limit(**wrong)
    assert engine.ns.record_bytes(Level.RAW) == 20 << 10
    stored = engine.store(keys, range(6), exact=True)
    assert stored[:3] == [0] * 3 and 0 not in stored[3:]
    assert engine.ns.lookup(keys).n == 3
    engine.ns.limit(quota=math.inf, ttl=3600)
    assert engine.store(keys, range(6), exact=True)[3:] == [0] * 3
    engine.ns.limit(ttl=math.inf)
    assert engine.ns.lookup(keys).n == 6


def test_a_cache_s_own_limits_hold_for_its_namespaces(options):
    """As set by an option, which every adapter takes: own_quota is namespace.limit()."""
    with kvtier.Cache({**options, "own_quota": "64KiB", "own_ttl": "1h"}) as cache:
        assert (cache.own_limits.quota, cache.own_limits.ttl) == (64 << 10, 3600.0)
        engine = Engine(cache)
        for page in range(6):
            engine.fill(page)
        stored = engine.store(chain(6), range(6), exact=True)
        assert stored[:3] == [0] * 3 and 0 not in stored[3:]
    with kvtier.Cache("own_quota=none,own_ttl=none", env=False) as cache:
        assert not cache.own_limits
    for key, value, words in (
            ("own_quota", "50", "64KiB to 64TiB"), ("own_quota", "5 GiB", "as 50GiB"),
            ("own_quota", "5gib", "one of KiB"), ("own_quota", "65TiB", "64KiB to 64TiB"),
            ("own_ttl", "7", "one of ns"), ("own_ttl", "7days", "as 7d"), ("own_ttl", "900ms", "1s")):
        with pytest.raises(kvtier.ConfigError, match=words):
            kvtier.Cache({**options, key: value})
    from kvtier.cache import each_option
    assert {"own_quota", "own_ttl"} <= {key for key, _, _ in each_option()}


def test_a_missing_block_ends_the_run_and_an_orphan_is_refused(engine):
    keys = chain(5)
    for page in range(5):
        engine.fill(page)
    assert engine.store(keys[:2], [0, 1]) == [0, 0]
    assert engine.store(keys[3:], [3, 4], parent=keys[2:3], first_pos=3 * TOKENS) == \
        [ErrorCode.ORPHAN] * 2
    assert engine.ns.lookup(keys).n == 2
    assert engine.store(keys[2:], [2, 3, 4], parent=keys[1:2], first_pos=2 * TOKENS) == [0] * 3
    assert engine.ns.lookup(keys).n == 5
    assert engine.load(chain(2, start=9000), [10, 11]) == [ErrorCode.MISS] * 2


def test_a_block_of_several_ranks_is_there_when_all_parts_are(engine):
    for page in range(2):
        engine.fill(page)
    for shard in range(2):
        engine.store(chain(2 - shard, shard=shard), range(2 - shard), exact=True)
    keys = chain(2)
    assert engine.ns.lookup(keys).n == 2 and engine.ns.lookup(keys, shards=2).n == 1
    assert engine.ns.lookup(keys, shards=3).n == 0
    assert engine.ns.lookup(keys, probe=True, prompt_tokens=1000).n == 2
    with pytest.raises(kvtier.KvtierError):
        engine.ns.lookup(keys, shards=257)


def test_another_identity_sees_nothing(cache, engine):
    engine.fill(0)
    keys = chain(1)
    engine.store(keys, [0])
    for field in ("model", "revision", "adapter", "rope", "rotation", "extra", "layout"):
        other = cache.namespace(kvtier.Identity("test", **{"model": "test", field: "other"}),
                                engine.pool.layout)
        assert other.lookup(keys).n == 0 and other.id != engine.ns.id
    salted = cache.namespace(kvtier.Identity("test", model="test", salt=b"a\0b"),
                             engine.pool.layout)
    assert salted.lookup(keys).n == 0


def test_strided_and_transposed_pages(cache):
    """[K transposed as (dim, tokens)]: what a CPU kernel of vLLM keeps."""
    memory = bytearray(PAGES * HEADS * DIM * TOKENS * 4)
    view = memoryview(memory).cast("f", (PAGES, HEADS, DIM, TOKENS))
    seen = kvtier.pages(view, "bhet")
    assert (seen.heads, seen.head_dim, seen.block_tokens, seen.block_count) == (
        HEADS, DIM, TOKENS, PAGES)
    place = seen.place
    assert (place.stride_elem, place.stride_token) == (TOKENS * 4, 4)
    flat = bytearray(memory)
    plain = kvtier.pages(memoryview(flat).cast("f", (PAGES, HEADS, TOKENS, DIM)), "bhte")
    a, b = cache.pool_of([(Kind.K, seen)]), cache.pool_of([(Kind.K, plain)])
    ns = cache.namespace(kvtier.Identity("t", model="m"), a.layout)
    numbers = memoryview(memory).cast("f")
    for i in range(HEADS * DIM * TOKENS):
        numbers[i] = i
    keys = chain(1)
    request = ns.store(a, keys, [0], exact=True)
    assert request.wait(20) and request.status() == [0]
    request = ns.load(b, keys, [2])
    assert request.wait(20) and request.status() == [0]
    out = memoryview(flat).cast("f")[2 * HEADS * DIM * TOKENS:]
    for head, token, elem in ((0, 0, 0), (1, 3, 5), (0, 15, 31)):
        assert out[(head * TOKENS + token) * DIM + elem] == (head * DIM + elem) * TOKENS + token


def test_pages_of_a_contiguous_cache_and_axes_that_do_not_fit():
    memory = bytearray(HEADS * 40 * DIM * 4)
    seen = kvtier.pages(memoryview(memory).cast("f", (1, HEADS, 40, DIM)), "1hte", 16)
    assert seen.block_count == 2 and seen.place.stride_block == 16 * DIM * 4
    for axes, tokens in (("hte", 16), ("1hteb", 16), ("2hte", 16), ("1hte", None), ("1hee", 16),
                         ("h1te", 16)):
        with pytest.raises(ValueError):
            kvtier.pages(memoryview(memory).cast("f", (1, HEADS, 40, DIM)), axes, tokens)
    with pytest.raises(ValueError, match="read only"):
        kvtier.pages(memoryview(bytes(memory)).cast("f", (1, HEADS, 40, DIM)), "1hte", 16)
    address = C.addressof(C.c_char.from_buffer(memory))
    for read_only in (False, True):  # numpy says so beside the address: a mapped file, a broadcast
        array_like = types.SimpleNamespace(dtype="float32", itemsize=4, __array_interface__={
            "data": (address, read_only), "strides": None, "shape": (1, HEADS, 40, DIM)})
        if read_only:
            with pytest.raises(ValueError, match="read only"):
                kvtier.pages(array_like, "1hte", 16)
        else:
            assert kvtier.pages(array_like, "1hte", 16).place.base == address


def test_restart_of_the_process_reads_from_disk(tmp_path, options):
    program = """
import json, sys
sys.path.insert(0, {here!r})
import kvtier
from conftest import Engine, TOKENS
options = json.loads({options!r})
with kvtier.Cache(options) as cache:
    engine = Engine(cache)
    before = [engine.fill(page) for page in range(6)]
    keys = kvtier.Keys.chain(range(6 * TOKENS), TOKENS)
    found = engine.ns.lookup(keys)
    print(found.n, [int(t) for t in found.tiers][:1])
    if found.n:
        assert engine.load(keys, range(10, 16), min_level="raw") == [0] * 6
        assert [engine.read(page) for page in range(10, 16)] == before
    else:
        engine.store(keys, range(6), exact=True)
        cache.flush()
"""
    text = program.format(here=str(pathlib.Path(__file__).parent), options=json.dumps(
        dict(options, disk=f"{tmp_path}/kv:64MiB")))
    lines = [subprocess.run([sys.executable, "-c", text], check=True, capture_output=True,
                            text=True).stdout.strip() for _ in range(2)]
    assert lines == ["0 [0]", "6 [2]"]


# ---- errors ----

@pytest.mark.parametrize("options, words", [
    ({"dramm": "1GiB"}, ["dramm", "dram"]), ({"dram": "12 parsecs"}, ["dram", "12 parsecs"]),
    ({"level": "kv7"}, ["level", "kv7"]), ({"threads": 0}, ["threads"])])
def test_configuration_errors_have_the_library_s_sentence(options, words):
    with pytest.raises(kvtier.ConfigError) as caught:
        kvtier.Cache(options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert isinstance(caught.value, ValueError) and caught.value.name.startswith("KVT_E_CONFIG")


def test_options_as_text_lists_bools_and_paths(tmp_path):
    from kvtier.cache import options
    assert options("dram=1GiB, level=kv4,", threads=2, env=False, disk=["/a:1GiB", "/b:1GiB"],
                   pin=None) == [("dram", "1GiB"), ("level", "kv4"), ("threads", "2"),
                                 ("env", "no"), ("disk", "/a:1GiB"), ("disk", "/b:1GiB")]
    assert options(" unix:/run/k=v.sock , spin=5us") == [("store", "unix:/run/k=v.sock"),
                                                         ("spin", "5us")]


def test_a_disk_that_cannot_be_used_is_said(tmp_path, caplog):
    tmp_path.joinpath("file").write_text("x")
    with kvtier.Cache(env=False, disk=f"{tmp_path}/file:64MiB") as cache:
        assert "file" in cache.notes
    with pytest.raises(kvtier.KvtierError) as caught:
        kvtier.Cache(env=False, disk=f"{tmp_path}/file:64MiB", disk_required=True)
    assert "file" in str(caught.value) and caught.value.code < 0


def test_logs_go_where_they_are_wanted(tmp_path, caplog):
    lines = []
    tmp_path.joinpath("file").write_text("x")
    with kvtier.Cache(env=False, disk=f"{tmp_path}/file:64MiB",
                      log=lambda level, text: lines.append((level, text))):
        pass
    assert any("file" in text for _, text in lines)
    with kvtier.Cache(env=False, log=lambda level, text: 1 / 0):
        pass  # a log that raises ends nothing


def test_a_closed_cache_is_an_exception_everywhere(cache, engine):
    keys = chain(1)
    cache.close()
    cache.close()
    for call in (cache.stats, cache.flush, lambda: engine.ns.lookup(keys),
                 lambda: engine.ns.store(engine.pool, keys, [0]),
                 lambda: engine.pool.reset_origin([0])):
        with pytest.raises(kvtier.ClosedError):
            call()
    engine.pool.close()
    engine.ns.close()


def test_wrong_arguments_are_refused_and_name_the_matter(cache, engine):
    keys = chain(2)
    for call, error in (
            (lambda: engine.ns.store(engine.pool, keys, [0]), ValueError),
            (lambda: engine.ns.store(engine.pool, keys, [0, PAGES]), kvtier.KvtierError),
            (lambda: engine.ns.store(engine.pool, keys, [0, 1], stream=0), kvtier.KvtierError),
            (lambda: engine.ns.load(engine.pool, keys, [0, 1], stream=1, event=2), ValueError),
            (lambda: cache.stat("no.such"), kvtier.KvtierError),
            (lambda: cache.namespace(kvtier.Identity("x"), engine.pool.layout), kvtier.KvtierError),
            (lambda: cache.namespace(kvtier.Identity("x", model="a\0b"), engine.pool.layout),
             ValueError),
            (lambda: cache.pool(engine.pool.layout, [], 1), ValueError),
            (lambda: engine.ns.plan([1, 1], prompt_tokens=3), kvtier.KvtierError)):
        with pytest.raises(error):
            call()
    assert engine.ns.lookup(keys).n == 0


def test_numbers_that_do_not_fit_are_refused_and_never_cut(cache, engine):
    """ctypes alone takes 2**33 for a shard, and makes it shard 0: the blocks of another rank."""
    keys = chain(2)
    refused = (ValueError, C.ArgumentError)
    for more in ({"group": 70000}, {"group": -1}, {"shard": 2**33}, {"extras": [(2**40, b"x")]}):
        with pytest.raises(refused):
            chain(2, **more)
    with pytest.raises(TypeError):
        chain(2, extras=[(1, 5)])  # not five zero bytes
    with pytest.raises(ValueError):
        Keys.chain(range(16), 0)
    with pytest.raises(refused):
        engine.ns.store(engine.pool, keys, [0, 1], first_pos=2**32)
    for shards in (2**32 + 1, -1):
        with pytest.raises(refused):
            engine.ns.lookup(keys, shards=shards)
    with pytest.raises(refused):
        cache.pool(engine.pool.layout, [view.place for view in engine.views], 2**32 + PAGES)
    with pytest.raises(ValueError, match="no parts"):
        cache.pool_of([])
    with pytest.raises(kvtier.ConfigError, match="NUL"):
        kvtier.Cache({"dram\0x": "64MiB"})
    with pytest.raises(kvtier.KvtierError, match="NUL"):
        cache.stat("dram.hits\0x")
    request = engine.ns.load(engine.pool, keys, [0, 1], deadline=math.inf)
    for timeout in (-1, math.nan):
        with pytest.raises(ValueError):
            request.wait(timeout)
    assert request.wait(math.inf)


@pytest.mark.parametrize("given", [5, b"dram=64MiB", ["dram=64MiB"], 1.5, {5: "x"}])
def test_options_of_another_kind_are_a_config_error(given):
    with pytest.raises(kvtier.ConfigError, match="given as|name is a text"):
        kvtier.Cache(given, env=False)


def test_a_cache_is_closed_under_threads_that_go_on(options):
    """close(), and the end of the interpreter, wait for the calls of threads that nobody stops;
    whoever waits for a request is told, and later calls are refused."""
    for _ in range(20):
        cache = kvtier.Cache(options)
        engine = Engine(cache)
        outcomes, begun = [], threading.Semaphore(0)

        def work(what):
            begun.release()
            try:
                while True:
                    what()
            except kvtier.KvtierError as error:
                outcomes.append(error)

        def load():
            engine.ns.load(engine.pool, chain(2), [0, 1]).wait()

        threads = [threading.Thread(target=work, args=(what,), daemon=True) for what in (
            cache.stats, load, lambda: engine.ns.lookup(chain(2)), cache.flush)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=60)
        time.sleep(0.002)
        cache.close()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == len(threads)
        assert {error.code for error in outcomes} <= {ErrorCode.CLOSED, ErrorCode.CANCELED}, outcomes


def test_a_library_that_is_missing_or_another_one(tmp_path):
    for library, words in ((tmp_path / "none.so", "pip install"), ("libc.so.6", "kvt_version")):
        if library == "libc.so.6":
            library = next(path for path in pathlib.Path("/lib").rglob("libc.so.6"))
        done = subprocess.run([sys.executable, "-c", "import kvtier\nkvtier.Cache()"],
                              env=dict(os.environ, KVTIER_LIBRARY=str(library)),
                              capture_output=True, text=True)
        assert done.returncode == 1 and "LibraryError" in done.stderr and words in done.stderr


def test_import_loads_no_library_and_no_engine():
    program = ("import kvtier, sys; assert kvtier._c._library is None;"
               "bad = {'torch', 'transformers', 'vllm', 'llama_cpp', 'numpy', 'sglang', 'lmcache'};"
               "assert not bad & set(sys.modules), bad & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- life of requests ----

def test_a_pool_is_closed_while_another_thread_reaps(cache):
    """A request that was dropped is freed once, by the one or by the other."""
    over = threading.Event()

    def reap():
        while not over.is_set():
            cache.reap()

    threads = [threading.Thread(target=reap, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(30):
            engine = Engine(cache, model=f"reaped {number}")
            for page in range(8):
                engine.fill(page)
            for page in range(8):
                engine.ns.store(engine.pool, kvtier.Keys.chain(range(16), 16), [page])
            kept = engine.ns.store(engine.pool, kvtier.Keys.chain(range(16), 16), [0])
            engine.pool.close()
            with pytest.raises(kvtier.ClosedError):
                kept.status()
            engine.ns.close()
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert cache.reap() == 0 and not cache._orphans


def test_requests_that_are_dropped_go_on_and_are_freed(cache, engine):
    for page in range(8):
        engine.fill(page)
    keys = chain(8)
    engine.ns.store(engine.pool, keys, range(8))  # dropped at once
    gc.collect()
    for _ in range(2000):
        if cache.reap() == 0:
            break
        threading.Event().wait(0.005)
    assert cache.reap() == 0 and engine.ns.lookup(keys).n == 8
    assert not engine.pool._requests


def test_closing_a_pool_waits_for_its_requests(cache, engine):
    for page in range(8):
        engine.fill(page)
    keys = chain(8)
    request = engine.ns.store(engine.pool, keys, range(8))
    engine.pool.close()
    with pytest.raises(kvtier.ClosedError):
        request.wait()
    request.close()
    assert engine.ns.lookup(keys).n == 8


def test_pool_keeps_its_memory_alive(cache):
    engine = Engine(cache)
    seen = weakref.ref(engine.pool)
    keys = chain(2)
    engine.fill(0), engine.fill(1)
    request = engine.ns.store(engine.pool, keys, [0, 1])
    del engine
    gc.collect()
    assert seen() is not None  # by the request
    assert request.wait(20)
    del request
    gc.collect()
    assert seen() is None


def test_reports_cancel_and_event_fd(cache, engine):
    for page in range(4):
        engine.fill(page)
    keys = chain(4)
    request = engine.ns.store(engine.pool, keys, range(4))
    assert request.wait(20) and request.wait(0)
    report = request.report()
    assert (report.blocks_ok, report.blocks_run_ok) == (4, 4) and report.bytes_moved > 0
    assert int.from_bytes(os.read(cache.event_fd(), 8), "little") >= 1
    load = engine.ns.load(engine.pool, keys, [8, 9, 10, 11])
    load.cancel()
    load.cancel()
    assert load.wait(20)
    assert set(load.status()) <= {0, ErrorCode.CANCELED}


def test_a_load_by_layers_is_complete_after_its_last_layer(engine):
    before = [engine.fill(page) for page in range(3)]
    keys = chain(3)
    engine.store(keys, range(3), exact=True)
    request = engine.ns.load(engine.pool, keys, [9, 10, 11], layers=True)
    assert all(request.wait_layer(layer, 20) for layer in range(LAYERS))
    assert request.wait(0) and request.status() == [0] * 3
    assert [engine.read(page) for page in (9, 10, 11)] == before


def test_pin_purge_enable_stats(cache, engine):
    for page in range(3):
        engine.fill(page)
    keys = chain(3)
    engine.store(keys, range(3))
    assert engine.ns.pin(keys) == 3 and engine.ns.unpin(keys) == 3
    assert engine.ns.purge(keys[3:]) == 0 and engine.ns.lookup(keys).n == 3
    cache.enable(False)
    assert engine.ns.lookup(keys).n == 0
    cache.enable(True)
    assert engine.ns.lookup(keys).n == 3
    assert engine.ns.purge(keys[2:]) == 1 and engine.ns.lookup(keys).n == 2
    assert engine.ns.purge() == 2 and engine.ns.lookup(keys).n == 0
    stats = cache.stats()
    assert stats["config.dram"] == "64MiB" and stats["config.env"] == "no"
    assert cache.stat("client.freed_twice") == stats["client.freed_twice"] == 0
    assert set(cache.stats_help()) == set(stats) and any(cache.stats_help().values())


def test_reset_origin_lets_a_page_be_exact_again(engine):
    engine.fill(0), engine.fill(1)
    keys = chain(2)
    engine.store(keys, [0, 1], level="kv4")
    assert engine.load(keys, [2, 3]) == [0, 0]
    other = chain(2, start=5000)
    engine.store(other, [2, 3], exact=True)
    assert engine.ns.lookup(other, min_level="raw").n < 2  # page 3 came from a lossy record
    engine.pool.reset_origin([2, 3])
    engine.pool.reset_origin([2], group=0)
    third = chain(2, start=7000)
    engine.store(third, [2, 3], exact=True)
    assert engine.ns.lookup(third, min_level="raw").n == 2


def test_calls_from_many_threads(cache, engine):
    for page in range(8):
        engine.fill(page)
    keys = [chain(1, start=1000 * i) for i in range(8)]
    failures = []

    def work(i):
        try:
            for _ in range(20):
                engine.store(keys[i], [i], exact=True)
                assert engine.ns.lookup(keys[i]).n == 1
                assert engine.load(keys[i], [8 + i]) == [0]
                assert engine.read(8 + i) == engine.read(i)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join(300) for thread in threads]
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_a_forked_child_disturbs_nothing(engine, cache):
    engine.fill(0)
    keys = chain(1)
    engine.store(keys, [0])
    child = os.fork()
    if child == 0:
        try:
            engine.ns.lookup(keys)
            os._exit(3)
        except kvtier.ClosedError:
            cache.close()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.ns.lookup(keys).n == 1


# ---- plan, groups, codec ----

def test_plan_and_observations(cache, engine):
    ns = engine.ns
    plan = ns.plan([Tier.DRAM] * 8, prompt_tokens=8 * TOKENS + 1)
    assert plan.count in (0, 8) and plan.reason in (Reason.LOAD, Reason.RECOMPUTE)
    assert ns.plan([]).reason == Reason.NO_BLOCKS
    assert ns.observe_prefill(1000, 0, 0.5) and not ns.observe_prefill(0, 0, 1.0)
    assert not ns.observe_prefill(10, 0, float("nan"))
    for _ in range(20):
        ns.observe_prefill(128, 0, 10.0)  # a very slow engine
    plan = ns.plan(array.array("i", [Tier.DRAM] * 8), prompt_tokens=8 * TOKENS + 1,
                   cut=Cut.SERIAL)
    assert (plan.first, plan.count, plan.reason) == (0, 8, Reason.LOAD)
    assert plan.recompute_s > plan.ttft_s > 0


def test_lookup_over_groups(cache):
    memory = [bytearray(PAGES * TOKENS * DIM * 4) for _ in range(2)]
    seen = [kvtier.pages(memoryview(m).cast("f", (PAGES, TOKENS, DIM)), "bte") for m in memory]
    layout = kvtier.Layout(TOKENS, (seen[0].part(Kind.K), seen[1].part(Kind.K, 1, 1)),
                           (kvtier.Group(1, kvtier.GroupKind.WINDOW, 0, 2 * TOKENS),))
    ns = cache.namespace(kvtier.Identity("g", model="m"), layout)
    pool = cache.pool(layout, [s.place for s in seen], PAGES, owner=memory)
    for group, blocks in ((0, range(6)), (1, range(4, 6))):
        keys = chain(6, group=group)
        request = ns.store(pool, keys[blocks[0]:], list(blocks), first_pos=blocks[0] * TOKENS,
                           exact=True)
        assert request.wait(20) and request.status() == [0] * len(blocks)
    tokens, need = ns.lookup_groups({0: chain(6), 1: chain(6, group=1)}, 6 * TOKENS)
    assert tokens == 6 * TOKENS and need == {0: range(0, 6), 1: range(4, 6)}
    tiers = {}
    assert ns.lookup_groups({0: chain(6), 1: chain(6, group=1)}, 6 * TOKENS, tiers=tiers)[0] == tokens
    assert list(tiers[0]) == [Tier.DRAM] * 6 and list(tiers[1])[4:] == [Tier.DRAM] * 2
    # a second rank has stored nothing
    assert ns.lookup_groups({0: chain(6), 1: chain(6, group=1)}, 6 * TOKENS, shards=2)[0] == 0


def test_codec_alone():
    memory = bytearray(4 * HEADS * TOKENS * DIM * 4)
    seen = kvtier.pages(memoryview(memory).cast("f", (4, HEADS, TOKENS, DIM)), "bhte")
    layout = kvtier.layout_of([(Kind.K, seen)])
    coder = codec.Codec(layout, [seen.place], 4, memory)
    numbers = memoryview(memory).cast("f")
    for i in range(HEADS * TOKENS * DIM):
        numbers[i] = ((i * 2654435761) % 1000) / 500 - 1
    size = HEADS * TOKENS * DIM
    for level, worst in (("raw", 0.0), ("kv8", 0.05), ("kv4", 0.6)):
        payload = coder.encode(0, level, guard=False)
        assert len(payload) == coder.payload_bytes(level)
        coder.decode(payload, 1, level)
        error = max(abs(numbers[i] - numbers[size + i]) for i in range(size))
        assert error <= worst and (level == "raw") == (error == 0.0)
    assert codec.bits("kv4", 128, kvtier.Dtype.BF16, False) == pytest.approx(4.125, abs=0.1)
    assert codec.isa() in ("avx2", "scalar", "neon", "avx512")
    numbers[0] = float("nan")
    with pytest.raises(kvtier.KvtierError) as caught:
        coder.encode(0, "kv4")
    assert caught.value.code == ErrorCode.NONFINITE
    for call in (lambda: coder.decode(b"short", 1, "kv4"), lambda: coder.encode(4, "kv4")):
        with pytest.raises(kvtier.KvtierError):
            call()


def test_sessions(cache, engine):
    from kvtier.session import SessionManager, State
    manager = SessionManager(engine.ns, engine.pool, page_count=8, level="kv8")
    with pytest.raises(TypeError):
        SessionManager(engine.ns, engine.pool, pagecount=8)
    session = manager.open()
    prompt = list(range(3 * TOKENS))
    plan = session.resume(prompt)
    assert plan.recompute == len(prompt) and session.info().state == State.ACTIVE
    for page in session.pages(0, 8):
        engine.fill(page)
    session.filled(len(prompt))
    session.idle()
    with pytest.raises(kvtier.KvtierError) as caught:
        session.idle()
    assert caught.value.code == ErrorCode.STATE
    while manager.work(0.05):
        pass
    manager.flush()
    plan = session.resume([1, 2])
    assert plan.in_l0 == 3 * TOKENS and session.wait(5) and session.plan().tokens == plan.tokens
    session.append([7])
    assert session.info().tokens == plan.tokens + 1
    session.truncate(plan.tokens)
    assert session.info().tokens == plan.tokens
    session.idle()
    session.close()
    assert manager.stats()["resumed"] >= 1
    manager.close()


def test_sessions_of_several_groups(cache, engine):
    """A layer of full attention and one of a window, whose pages are a range of their own: pages
    before the window are given up, and a block says where it is."""
    from kvtier.session import Record, SessionManager
    full, window = 0, 1
    layout = kvtier.Layout(TOKENS, tuple(
        kvtier.Part(kind, kvtier.Dtype.F32, HEADS, DIM, group, group)
        for group in (full, window) for kind in (Kind.K, Kind.V)),
        (kvtier.Group(window, kvtier.GroupKind.WINDOW, TOKENS, TOKENS),))
    ns = cache.namespace(kvtier.Identity("test", model="groups"), layout)
    pool = cache.pool(layout, [view.place for view in engine.views], PAGES, owner=engine.parts)
    for bad, words in (({"pages": 8}, "group 1 has no option 'pages'"),
                       ({"shard": 8}, "group 1 has no option 'shard'")):
        with pytest.raises(TypeError, match=words):
            SessionManager(ns, pool, groups={window: bad})
    with pytest.raises(kvtier.KvtierError) as caught:
        SessionManager(ns, pool, page_count=12, groups={7: {"page_count": 12}})
    assert caught.value.code == ErrorCode.INVAL
    with SessionManager(ns, pool, page_count=12, level="kv8",
                        groups={window: {"first_page": 12, "page_count": 12}}) as manager:
        session, count = manager.open(), 6
        session.resume(list(range(count * TOKENS)))
        pages, of_window = session.group_pages(full, 0, 9), session.group_pages(window, 0, 9)
        assert pages == session.pages(0, 9) and len(pages) == len(of_window) == count
        assert set(pages) <= set(range(12)) and set(of_window) <= set(range(12, 24))
        for page in (*pages, *of_window):
            engine.fill(page)
        session.filled(count * TOKENS)
        left = session.group_pages(window, 0, count)
        assert left[:2] == [None, None] and left[-1] == of_window[-1]
        first = session.block(0)
        assert (first.page, first.page_level, first.sessions) == (pages[0], kvtier.Level.RAW, 1)
        assert first.record == Record.NONE
        session.idle()
        while manager.work(0.05):
            pass
        last = session.block(count - 1, window)
        assert last.record != Record.NONE and last.tier == kvtier.Tier.DRAM
        for call in (lambda: session.block(count), lambda: session.block(0, 7),
                     lambda: session.group_pages(7, 0, 1)):
            with pytest.raises(kvtier.KvtierError):
                call()


def test_a_lookup_says_which_root_a_block_is_on(tmp_path, options):
    """Blocks of two drives, found after a restart: every one is on disk, on a root that there is,
    and both are used; plans take the roots as they come."""
    store = {**options, "disk": [f"{tmp_path}/{name}:64MiB" for name in "ab"], "write": "through"}
    keys = Keys.chain(list(range(PAGES * TOKENS)), TOKENS)
    with kvtier.Cache(store) as cache:
        engine = Engine(cache)
        for page in range(PAGES):
            engine.fill(page)
        for page in range(PAGES):  # a batch is on one root
            parent = keys[page - 1:page] if page else None
            assert engine.store(keys[page:page + 1], [page], parent=parent,
                                first_pos=page * TOKENS) == [0]
            cache.flush()
        held = engine.ns.lookup(keys)
        assert set(held.tiers) == {kvtier.Tier.DRAM} and set(held.roots) == {0}
    with kvtier.Cache(store) as cache:
        engine = Engine(cache)
        found = engine.ns.lookup(keys)
        assert found.n == PAGES and set(found.tiers) == {kvtier.Tier.DISK}
        assert set(found.roots) == {0, 1}
        for roots in (found.roots, list(found.roots), ()):
            assert engine.ns.plan(found.tiers, roots=roots).reason != kvtier.Reason.NO_BLOCKS
        with pytest.raises(ValueError, match="1 roots for"):
            engine.ns.plan(found.tiers, roots=found.roots[:1])


def test_options_are_listed():
    from kvtier.cache import each_option
    kvtier.cache.check_options(dram="1GiB", disk=["/not/here:1GiB"], own_quota="1GiB")
    for bad, words in (({"dramm": 1}, "dramm"), ({"dram": "much"}, "much"), ({"own_ttl": "x"}, "own_ttl"),
                       ({"level": "kv3"}, "kv3")):
        with pytest.raises(kvtier.ConfigError, match=words):
            kvtier.cache.check_options(bad)
    listed = {key: default for key, default, _ in each_option()}
    assert listed["level"] == "kv4" and "disk" in listed
    assert C.sizeof(kvtier._c.kvt_key) == Keys.SIZE and LAYERS == 2
