"""Goal: what the adapters for vLLM's tiers, SGLang and LMCache share: pages whose inside is known
are coded and found where they lie, others come back to the byte, options that do not exist are
named, jobs end whatever becomes of the store. Method: pages in memory of our own with drawn content,
the real library; a page is read back element by element through its shape."""
import array
import random
import struct
import threading

import pytest
from conftest import SEED

import kvtier
from kvtier import BusyError, ConfigError, Dtype, Identity, KvtierError, Level
from kvtier import _pagestore as ps
from kvtier.geometry import GRAIN, Geometry, given, opaque


def geometry(order="lthcd", **more):
    return Geometry(**{"order": order, "layers": 2, "heads": 2, "head_dim": 32, "tokens": 16,
                       "dtype": Dtype.F32, **more})


def element(shape, part, head, token, elem):
    offset, by_head, by_token, by_elem = shape.spots[part]
    return offset + head * by_head + token * by_token + elem * by_elem


@pytest.mark.parametrize("order, more", [
    ("lthcd", {}), ("lhtcd", {}), ("lcthd", {}), ("clthd", {}), ("lhctd", {"k_transposed": True}),
    ("wlbthcd", {"workers": 2, "blocks": 3}), ("wblthcd", {"workers": 2, "blocks": 3}),
    ("lthd", {})])
def test_every_byte_of_a_page_is_one_element(order, more):
    shape = geometry(order, **more).shape()
    seen = set()
    for number, part in enumerate(shape.layout.parts):
        for head in range(part.heads):
            for token in range(16):
                for elem in range(part.head_dim):
                    at = element(shape, number, head, token, elem)
                    assert at % 4 == 0
                    seen.add(at)
    assert seen == set(range(0, shape.page_bytes, 4))


def test_k_and_v_lie_where_the_order_says():
    packed = geometry("lthcd").shape()  # layer, token, head, then 32 of K and 32 of V
    assert element(packed, 0, 0, 0, 0) == 0 and element(packed, 1, 0, 0, 0) == 32 * 4
    assert element(packed, 2, 1, 3, 5) == 4 * (16 * 2 * 64 + 3 * 128 + 64 + 5)
    turned = geometry("lhctd", k_transposed=True).shape()
    assert element(turned, 0, 0, 3, 5) == 4 * (5 * 16 + 3)  # K as [d][t]
    assert element(turned, 1, 0, 3, 5) == 4 * (16 * 32 + 3 * 32 + 5)  # V as [t][d]


@pytest.mark.parametrize("size, tokens", [
    (256, 16), (4096, 16), (4096, 32), (16384 + 256, 16), (3 * 16384, 48), (20 << 20, 16),
    (4096, 100)])
def test_an_opaque_page_is_all_of_its_bytes(size, tokens):
    shape = opaque(size, tokens)
    assert not shape.coded
    at = 0
    for part, spot in zip(shape.layout.parts, shape.spots):
        assert spot == (at, part.head_dim, part.heads * part.head_dim, 1)
        at += part.heads * part.head_dim * shape.layout.block_tokens
    assert at == size == shape.page_bytes


@pytest.mark.parametrize("size", [0, 100, GRAIN + 1])
def test_sizes_that_cannot_be_cut_are_refused(size):
    with pytest.raises(ValueError, match=str(GRAIN)):
        opaque(size)


@pytest.mark.parametrize("value, words", [
    ([], "must be an object"), ({"order": "lthcd"}, "lacks layers, kv_heads, head_dim, dtype"),
    ({"layer": 2}, "'layer'; did you mean 'layers'"),
    ({"order": "lth", "layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": "float32"}, "each of"),
    ({"order": "lthcd", "layers": 2, "kv_heads": 2, "head_dim": 33, "dtype": "float32"}, "33"),
    ({"order": "lthcd", "layers": "x", "kv_heads": 2, "head_dim": 32, "dtype": "float32"}, "'x'"),
    ({"order": "lthcd", "layers": 2, "kv_heads": 2, "head_dim": 32, "dtype": "fp8"}, "'fp8'")])
def test_a_geometry_that_makes_no_sense_says_why(value, words):
    with pytest.raises(ConfigError) as error:
        given("somewhere", value, 16)
    assert "somewhere" in str(error.value) and words in str(error.value)


def test_options_go_to_whom_they_belong_and_unknown_ones_are_named():
    own, library = ps.split_options("here", {"salt": "a", "dram": "1GiB"}, ("salt",))
    assert (own, library) == ({"salt": "a"}, {"dram": "1GiB"})
    with pytest.raises(ConfigError, match="here.*'sallt'; did you mean 'salt'"):
        ps.split_options("here", {"sallt": "a"}, ("salt",))
    with pytest.raises(ConfigError, match="'dramm'; did you mean 'dram'"):
        ps.split_options("here", {"dramm": "1GiB"}, ())
    with pytest.raises(ConfigError, match="^here: .*level"):
        ps.split_options("here", {"level": "kv3"}, ())
    with pytest.raises(ConfigError, match="^here: .*level"):
        ps.open_cache("here", {"level": "kv3", "env": False})


class Pages:
    """Pages of random floats and a store over them."""

    def __init__(self, cache, shape, count=16, model="m", seed=SEED):
        self.shape, self.size = shape, shape.page_bytes
        self.memory = ps.Staging(self.size, room=count * (self.size + 4096))
        self.draw = random.Random(seed)
        self.store = ps.PageStore(cache, Identity("t", model=model, layout=shape.text), shape,
                                  self.memory.base, self.memory.step, self.memory.count)

    def fill(self, page):
        floats = [self.draw.gauss(0, 1) for _ in range(self.size // 4)]
        data = struct.pack(f"{len(floats)}f", *floats)
        self.memory.fill(page, memoryview(data))
        return data

    def read(self, page):
        out = bytearray(self.size)
        self.memory.copy_out(page, memoryview(out))
        return bytes(out)


def names(count, seed=1):
    return [random.Random(f"{SEED}{seed}{i}").randbytes(32) for i in range(count)]


def close_to(one, other):
    """Relative error of two pages of floats."""
    a, b = (array.array("f", data) for data in (one, other))
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(x * x for x in a)) ** 0.5


@pytest.mark.parametrize("shape", [opaque(8192), geometry("lthcd").shape()], ids=["bytes", "raw"])
def test_pages_come_back_to_the_byte(options, tmp_path, shape):
    """Also after a restart, and only under their keys."""
    keys = names(6)
    more = {**options, "disk": f"{tmp_path}/store:256MiB", "level": "raw"}
    with kvtier.Cache(more) as cache:
        pages = Pages(cache, shape)
        content = [pages.fill(page) for page in range(6)]
        assert pages.store.store(keys, range(6)).wait() == [True] * 6
        assert pages.store.find(keys) == 6
        assert pages.store.present(keys[:2] + names(2, 9) + keys[2:]) == [True] * 2 + \
            [False] * 2 + [True] * 4
        cache.flush()
    with kvtier.Cache(more) as cache:
        pages = Pages(cache, shape)
        job = pages.store.load(keys + names(1, 9), [*range(9, 3, -1), 10])
        assert job.wait() == [True] * 6 + [False]
        assert [pages.read(page) for page in range(9, 3, -1)] == content
        counts = pages.store.counts.all()
        assert (counts["loaded"], counts["failed"], counts["loaded_disk"]) == (6, 1, 6)
        other = Pages(cache, shape, model="another")
        assert other.store.find(keys) == 0


def test_coded_pages_are_small_and_what_came_back_coarse_is_kept_at_kv8(options):
    shape = geometry("lhctd", k_transposed=True, head_dim=64).shape()
    with kvtier.Cache({**options, "level": "kv4", "guard": "off"}) as cache:
        pages = Pages(cache, shape)
        keys = names(4)
        content = [pages.fill(page) for page in range(4)]
        assert all(pages.store.store(keys, range(4)).wait())
        assert pages.store.ns.record_bytes() < 0.4 * shape.page_bytes
        assert all(pages.store.load(keys, range(4, 8)).wait())
        for want, page in zip(content, range(4, 8)):
            assert 0 < close_to(want, pages.read(page)) < 0.2
        pages.store.ns.purge()
        mixed = keys[:2] + names(2, 5)  # two that came back coarse, two that did not
        for page in (2, 3):
            pages.fill(page)
        coarse = [pages.read(page) for page in (4, 5)]
        assert all(pages.store.store(mixed, [4, 5, 2, 3]).wait())
        assert all(pages.store.load(mixed, range(8, 12)).wait())
        for want, page in zip(coarse, (8, 9)):
            assert close_to(want, pages.read(page)) < 0.02  # kv8, not coded at 4 bits again
        lookup = pages.store.ns.lookup(pages.store.keys(mixed), min_level=Level.KV8)
        assert lookup.n == 2


def test_the_first_page_of_a_sequence_is_exact(options):
    shape = geometry(head_dim=64).shape()
    with kvtier.Cache({**options, "level": "kv4", "guard": "off"}) as cache:
        pages = Pages(cache, shape)
        content = [pages.fill(page) for page in range(2)]
        assert all(pages.store.store(names(2), range(2), position=0).wait())
        assert all(pages.store.load(names(2), (4, 5)).wait())
        assert pages.read(4) == content[0] and pages.read(5) != content[1]


def test_a_page_is_taken_as_it_is_now(options):
    """What was loaded into a page says nothing of what the engine has written there since."""
    shape = geometry(head_dim=64).shape()
    with kvtier.Cache({**options, "level": "kv4", "guard": "off"}) as cache:
        pages = Pages(cache, shape)
        pages.fill(0)
        assert all(pages.store.store(names(1), [0]).wait())
        assert all(pages.store.load(names(1), [0]).wait())
        pages.fill(0)
        assert all(pages.store.store(names(1, 2), [0]).wait())
        found = pages.store.ns.lookup(pages.store.keys(names(1, 2)), min_level=Level.KV8)
        assert found.n == 0  # kv4, as pages that the engine computed are


def test_a_busy_library_makes_loads_wait_and_stores_drop(options, monkeypatch):
    with kvtier.Cache(options) as cache:
        pages = Pages(cache, opaque(4096))
        pages.fill(0)
        keys = names(3)
        assert pages.store.store(keys[:1], [0]).wait() == [True]
        real, times = pages.store.start_load, []

        def busy(*arguments):
            times.append(1)
            if len(times) < 4:
                raise BusyError("full", -11)
            return real(*arguments)

        monkeypatch.setattr(pages.store, "start_load", busy)
        job = pages.store.load(keys[:1], [1])
        assert not job.poll()
        assert job.wait() == [True] and len(times) == 4

        def always(*_):
            raise BusyError("full", -11)

        monkeypatch.setattr(pages.store, "start_store", always)
        assert pages.store.store(keys[1:], [0, 1]).wait() == [False, False]
        assert pages.store.counts.all()["dropped"] == 2

        def broken(*_):
            raise KvtierError("no")

        monkeypatch.setattr(pages.store, "start_load", broken)
        assert pages.store.load(keys, [1, 2, 3]).wait() == [False] * 3
        monkeypatch.setattr(ps, "_PATIENCE_S", 0.0)
        monkeypatch.setattr(pages.store, "start_load", always)
        assert pages.store.load(keys, [1, 2, 3]).wait() == [False] * 3


def test_a_closed_cache_is_misses(options):
    cache = kvtier.Cache(options)
    pages = Pages(cache, opaque(4096))
    cache.close()
    assert pages.store.load(names(2), [0, 1]).wait() == [False] * 2
    assert pages.store.store(names(2), [0, 1]).wait() == [False] * 2


def test_many_pages_in_several_requests(options, monkeypatch):
    monkeypatch.setattr(ps, "_BATCH", 4)
    with kvtier.Cache(options) as cache:
        pages = Pages(cache, opaque(4096), count=24)
        content = [pages.fill(page) for page in range(11)]
        assert pages.store.store(names(11), range(11)).wait() == [True] * 11
        assert pages.store.load(names(11), range(12, 23)).wait() == [True] * 11
        assert [pages.read(page) for page in range(12, 23)] == content
        empty = pages.store.load([], [])
        assert empty.poll() and empty.good == []


def test_staging_copies_what_lies_anywhere(options):
    """More buffers than staging pages, at odd addresses, from several threads; the last bytes of a
    page that a buffer does not fill are zero."""
    with kvtier.Cache(options) as cache:
        size = 5000  # of a page of 5,120
        shape = opaque(-(-size // GRAIN) * GRAIN)
        staging = ps.Staging(shape.page_bytes, room=3 * 8192)
        store = ps.PageStore(cache, Identity("t", model="s"), shape, staging.base, staging.step,
                             staging.count)
        assert staging.count == 3
        keys, draw = names(20), random.Random(SEED)
        content = [draw.randbytes(size) for _ in keys]
        room = bytearray(size * 20 + 1)
        views = [memoryview(room)[1 + i * size:1 + (i + 1) * size] for i in range(20)]
        results = []

        def work(some):
            results.extend(ps.save(store, staging, [keys[i] for i in some],
                                   [memoryview(content[i]) for i in some]))
            results.extend(ps.fetch(store, staging, [keys[i] for i in some],
                                    [views[i] for i in some]))

        threads = [threading.Thread(target=work, args=(range(i, 20, 4),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 40 and [bytes(view) for view in views] == content
        untouched = bytearray(b"\xa5" * size)
        assert ps.fetch(store, staging, names(1, 7), [memoryview(untouched)]) == [False]
        assert untouched == b"\xa5" * size
        assert sorted(staging.take(9)) == [0, 1, 2]


def test_weights_are_named_by_what_is_there(tmp_path):
    assert ps.weights("w", {}, None) == ps.weights("w", {}, "org/name") == ""
    assert ps.weights("w", {"weights_digest": "v1"}, "org/name") == "v1"
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = ps.weights("w", {}, str(tmp_path))
    assert first and ps.weights("w", {"model_path": str(tmp_path)}, "x") == first
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert ps.weights("w", {}, str(tmp_path)) != first
    with pytest.raises(ConfigError, match="w: the weights in /nowhere/at/all"):
        ps.weights("w", {"model_path": "/nowhere/at/all"}, None)


def test_memory_forgets_the_oldest():
    memory = ps.Memory(2)
    memory.add([b"a", b"b"])
    memory.add([b"a", b"c"])
    assert b"a" in memory and b"c" in memory and b"b" not in memory
