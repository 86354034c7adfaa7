"""Goal: as a storage backend of SGLang's HiCache kvtier keeps pages of its host pools, coded from
where they lie or to the byte, through the v1, v2 and flat interfaces, across restarts and apart
for each rank and model. Method: SGLang's own classes (its storage interface, factory and
transfers); host pools of the shape of SGLang's in place of those that want a GPU. Only the modules
that are used of the package are imported: the package itself wants CUDA."""
import ast
import dataclasses
import importlib.machinery
import importlib.util
import random
import sys
import types

import pytest
import shown
from conftest import SEED, absent, need

need("torch", "torch")
import torch  # noqa: E402
from kvtier import ConfigError, _engines  # noqa: E402


def narrow():
    """Let sglang's modules be imported without those of its packages' __init__ that want a GPU."""
    found = importlib.machinery.PathFinder.find_spec("sglang")
    if found is None:
        absent("sglang", "No module named 'sglang'")
    package = types.ModuleType("sglang")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["sglang"] = package


narrow()
from sglang.srt.mem_cache import hicache_storage as hi  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from kvtier import sglang as ours  # noqa: E402

LAYERS, PAGE, PAGES, HEADS, DIM = 3, 32, 12, 2, 64
DIMS = {"layer_first": (2, LAYERS, PAGES * PAGE, HEADS, DIM),
        "page_first": (2, PAGES * PAGE, LAYERS, HEADS, DIM),
        "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
        "page_head": (2, PAGES, HEADS, PAGE, LAYERS, DIM)}


class Host:
    """A host pool: a buffer as SGLang lays it out, and its flat pages."""

    def __init__(self, layout="page_first", mla=False, dtype=torch.bfloat16):
        dims = DIMS[layout]
        if mla:
            dims = {"layer_first": (LAYERS, PAGES * PAGE, 1, 576),
                    "page_first": (PAGES * PAGE, LAYERS, 1, 576)}[layout]
        self.layout, self.page_size, self.dtype = layout, PAGE, dtype
        self.kv_buffer = torch.randn(
            dims, generator=torch.Generator().manual_seed(SEED)).to(dtype)
        self.axis = {"layer_first": 2, "page_first": 1}.get(layout, 1) - mla

    def view(self, index):
        """All that a page holds, as a view."""
        if self.layout in ("layer_first", "page_first"):
            return self.kv_buffer.narrow(self.axis, index, PAGE)
        return self.kv_buffer.narrow(1, index // PAGE, 1)

    def get_data_page(self, index, flat=True):
        return self.view(index).reshape(-1).clone()

    def get_dummy_flat_data_page(self):
        return torch.zeros(self.view(0).numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index, data_page):
        self.view(index).copy_(data_page.reshape(self.view(index).shape))


def config(extra, **more):
    return hi.HiCacheStorageConfig(**{
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": True, "model_name": "org/model", "extra_config": extra, **more})


def extra(where, **more):
    """As docs/engines/sglang.md shows it, with other places and sizes."""
    page = shown.told(shown.command("sglang", "sglang.launch_server"),
                      "--hicache-storage-backend-extra-config")
    page.pop("model_path")
    return {**page, "prefetch_threshold": 64, "disk": f"{where}:1GiB", "dram": "32MiB",
            "threads": 1, "env": "no", "plan": "off", "weights_digest": "v1", **more}


def backend(host, options, **more):
    """Made as SGLang makes it."""
    made = StorageBackendFactory.create_backend("dynamic", config(options, **more), host)
    made.register_mem_pool_host(host)
    return made


def keys(count, seed=1):
    draw = random.Random(SEED + seed)
    return [draw.randbytes(32).hex() for _ in range(count)]


def indices(*pages):
    return torch.cat([torch.arange(p * PAGE, (p + 1) * PAGE) for p in pages])


def test_contract():
    """Every name and signature that the backend uses; drift is said here."""
    assert _engines.get("sglang").drift() == []


@pytest.mark.parametrize("layout", DIMS)
def test_v1_pages_come_back_into_other_places_after_a_restart(tmp_path, layout):
    """At level raw, to the bit, from where they lie in each of the host pool's layouts."""
    host = Host(layout)
    want = [host.get_data_page(p * PAGE) for p in range(4)]
    store = backend(host, extra(tmp_path / "store", level="raw"))
    assert store._pools["kv"].staging is None
    assert store.batch_set_v1(keys(4), indices(0, 1, 2, 3)) == [True] * 4
    assert store.batch_exists(keys(4) + keys(2, 9)) == 4 and not store.exists(keys(1, 9)[0])
    store.close()
    host = Host(layout)
    store = backend(host, extra(tmp_path / "store", level="raw"))
    info = hi.HiCacheStorageExtraInfo(prefix_keys=keys(1, 7))
    assert store.batch_get_v1(keys(4) + keys(1, 9), indices(7, 9, 8, 6, 5), info) == \
        [True] * 4 + [False]
    assert all(torch.equal(host.get_data_page(p * PAGE), data)
               for p, data in zip((7, 9, 8, 6), want))
    assert store.counts.all()["loaded_disk"] == 4
    store.clear()
    assert store.batch_exists(keys(4)) == 0
    store.close()


def test_layouts_of_the_host_pool_share_pages(tmp_path):
    """Coded at kv4: small, close, and readable by an engine that lays its host pool out anew."""
    host = Host("page_first")
    store = backend(host, extra(tmp_path / "store", level="kv4", guard="off"))
    assert all(store.batch_set_v1(keys(4), indices(0, 1, 2, 3)))
    assert store._pools["kv"].store.ns.record_bytes() < 0.4 * 2 * LAYERS * PAGE * HEADS * DIM * 2
    store.close()
    other = Host("layer_first")
    before = other.kv_buffer.clone()
    store = backend(other, extra(tmp_path / "store", level="kv4", guard="off"))
    assert all(store.batch_get_v1(keys(4), indices(4, 5, 6, 7)))
    for number in range(4):
        want = host.kv_buffer[:, number * PAGE:(number + 1) * PAGE].float()
        have = other.kv_buffer[:, :, (4 + number) * PAGE:(5 + number) * PAGE].float()
        error = (want.permute(0, 2, 1, 3, 4) - have).norm() / want.norm()
        assert 0 < error < 0.2
    untouched = [*range(0, 4 * PAGE), *range(8 * PAGE, PAGES * PAGE)]
    assert torch.equal(other.kv_buffer[:, :, untouched], before[:, :, untouched])
    store.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_mla_pages(tmp_path, layout):
    host = Host(layout, mla=True)
    want = host.get_data_page(0)
    store = backend(host, extra(tmp_path / "store"), is_mla_model=True)
    assert store._pools["kv"].staging is None
    assert store.batch_set_v1(keys(1), indices(0)) == [True]
    assert store.batch_get_v1(keys(1), indices(5)) == [True]
    have = host.get_data_page(5 * PAGE)
    assert (have.float() - want.float()).norm() / want.float().norm() < 0.02  # kv8 at the least
    store.close()


@pytest.mark.parametrize("why, change", [
    ("as asked", {"pages": "opaque"}), ("flat", {"interface_v1": 0})])
def test_pages_as_bytes(tmp_path, why, change):
    """Where SGLang hands over flat pages, or the inside shall not matter: to the byte at kv4."""
    host = Host()
    want = [host.get_data_page(p * PAGE) for p in range(3)]
    store = backend(host, extra(tmp_path / "store", level="kv4", **change))
    assert store._pools["kv"].staging is not None
    assert store.batch_set(keys(3), want) and store.set(keys(1, 5)[0], want[2])
    assert store.batch_exists(keys(3)) == 3
    store.close()
    store = backend(host, extra(tmp_path / "store", level="kv4", **change))
    blank = [host.get_dummy_flat_data_page() for _ in range(4)]
    got = store.batch_get(keys(3) + keys(1, 9), blank)
    assert [g is not None for g in got] == [True] * 3 + [False]
    assert all(torch.equal(g, w) for g, w in zip(got, want))
    assert not blank[3].any()
    assert torch.equal(store.get(keys(1, 5)[0], host.get_dummy_flat_data_page()), want[2])
    assert store.get(keys(1, 9)[0], host.get_dummy_flat_data_page()) is None
    assert store.batch_set_v1(keys(1, 8), indices(4)) == [True]
    assert store.batch_get_v1(keys(1, 8), indices(6)) == [True]
    assert torch.equal(host.get_data_page(4 * PAGE), host.get_data_page(6 * PAGE))
    assert store.batch_get(keys(1), [torch.zeros(8)]) == [None]  # a page of another size
    assert not store.set(keys(1, 6)[0], torch.zeros(8)) and not store.set(keys(1, 6)[0])
    store.close()


@pytest.mark.parametrize("size", [1, 8, 24])
def test_pages_of_few_tokens_are_not_coded(size):
    """The codec wants rows of 16 tokens; 1 is the default of SGLang."""
    host = Host()
    host.page_size = size
    with pytest.raises(ValueError, match=f"pages of {size} tokens"):
        ours.host_shape(host)


class State:
    """A pool of states (Mamba): one page is one slot of odd size, no layout that is known."""

    layout, page_size, kv_buffer = "state", 1, None

    def __init__(self):
        self.slots = torch.randn(8, 333, generator=torch.Generator().manual_seed(SEED))

    def get_data_page(self, index, flat=True):
        return self.slots[index].clone()

    def get_dummy_flat_data_page(self):
        return torch.zeros(333)

    def set_from_flat_data_page(self, index, data_page):
        self.slots[index] = data_page


def transfer(name, names, where, policy=hi.PoolHitPolicy.ALL_PAGES):
    return hi.PoolTransfer(name=name, host_indices=where, keys=names, hit_policy=policy)


def test_c61_the_shortest_pool_decides(tmp_path):
    """v2: KV of 10 pages; a sidecar of 7 makes 7; a trailing pool that holds pages 6 and 7 makes 8,
    and one that holds none makes 0."""
    host, state, trail = Host(), State(), State()
    store = backend(host, extra(tmp_path / "store", level="raw"))
    store.register_mem_host_pool_v2(host, hi.PoolName.KV)
    store.register_mem_host_pool_v2(state, hi.PoolName.INDEXER)
    store.register_mem_host_pool_v2(trail, hi.PoolName.SWA)
    names = keys(10)
    kv = transfer(hi.PoolName.KV, names, indices(*range(10)))
    side = transfer(hi.PoolName.INDEXER, names[:7], torch.arange(7))
    assert store.batch_set_v2([kv, side]) == {
        hi.PoolName.KV: [True] * 10, hi.PoolName.INDEXER: [True] * 7}
    found = store.batch_exists_v2(names, [transfer(hi.PoolName.INDEXER, names, None)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (
        7, {"kv": 10, hi.PoolName.INDEXER: 7})
    last = transfer(hi.PoolName.SWA, names[:2], None, hi.PoolHitPolicy.TRAILING_PAGES)
    assert store.batch_exists_v2(names, [last]).kv_hit_pages == 0
    assert all(store.batch_set_v2([transfer(hi.PoolName.SWA, names[6:8], torch.arange(2))])[
        hi.PoolName.SWA])
    assert store.batch_exists_v2(names, [last]).kv_hit_pages == 8
    assert store.batch_exists_v2(names).kv_hit_pages == 10
    want = state.slots[:7].clone()
    state.slots.zero_()
    got = store.batch_get_v2([transfer(hi.PoolName.INDEXER, names[:7], torch.arange(7)),
                              transfer(hi.PoolName.SWA, names[:1], torch.arange(1)),
                              transfer(hi.PoolName.MAMBA, names[:1], torch.arange(1)),
                              transfer(hi.PoolName.KV, names[:2], torch.arange(3))])
    assert got == {hi.PoolName.INDEXER: [True] * 7, hi.PoolName.SWA: [False],
                   hi.PoolName.MAMBA: [False], hi.PoolName.KV: [False] * 2}
    assert torch.equal(state.slots[:7], want)
    store.close()


def test_models_and_salts_on_one_directory_keep_apart(tmp_path):
    host = Host()
    for options, found in (({}, 0), ({"weights_digest": "v2"}, 0), ({"salt": "tenant"}, 0),
                           ({}, 2)):
        store = backend(host, extra(tmp_path / "store", **options))
        assert store.batch_exists(keys(2)) == found
        if not options:
            assert all(store.batch_set_v1(keys(2), indices(0, 1)))
        store.close()


def test_ranks_want_directories_of_their_own_or_the_daemon(tmp_path):
    host, two = Host(), {"tp_size": 2}
    with pytest.raises(ConfigError, match="{rank}.*kvtierd"):
        backend(host, extra(tmp_path / "store"), **two)
    with pytest.raises(ConfigError, match="MLA.*kvtierd"):
        backend(host, extra(tmp_path / "store-{rank}"), is_mla_model=True, **two)
    each = [backend(host, extra(tmp_path / "store-{rank}"), tp_rank=rank, **two)
            for rank in (0, 1)]
    assert all(each[0].batch_set_v1(keys(2), indices(0, 1)))
    assert [store.batch_exists(keys(2)) for store in each] == [2, 0]
    for store in each:
        store.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store-0", "store-1"]


@pytest.mark.parametrize("change, words", [
    ({"dissk": "/x:1GiB"}, "'dissk'; did you mean 'disk'"),
    ({"pages": "coded"}, "neither auto nor opaque"),
    ({"level": "kv3"}, "kvtier.sglang"),
    ({"weights_digest": None}, "model_path"),
    ({"weights_digest": None, "model_path": "/nowhere/at/all"}, "/nowhere/at/all")])
def test_options_that_make_no_sense_stop_the_start(tmp_path, change, words):
    options = {k: v for k, v in extra(tmp_path / "store", **change).items() if v is not None}
    with pytest.raises(ConfigError) as error:
        backend(Host(), options)
    assert words in str(error.value)


def test_a_store_that_fails_is_misses(tmp_path):
    """What is raised on SGLang's threads would end them: nothing is."""
    store = backend(Host(), extra(tmp_path / "store"))
    assert all(store.batch_set_v1(keys(2), indices(0, 1)))
    store._cache.close()
    assert store.batch_get_v1(keys(2), indices(2, 3)) == [False] * 2
    assert store.batch_set_v1(keys(2, 5), indices(2, 3)) == [False] * 2
    assert store.batch_exists(keys(2)) == 0 and store.batch_exists([]) == 0
    assert store.batch_exists_v2(keys(2), [transfer(hi.PoolName.SWA, keys(1), None)]) \
        .kv_hit_pages == 0
    store.close()


def metrics_module():
    """SGLang's module of metrics with StorageMetrics alone, from its source: the rest wants a GPU."""
    name = "sglang.srt.observability.metrics_collector"
    path = sys.modules["sglang"].__path__[0] + "/srt/observability/metrics_collector.py"
    with open(path) as file:
        tree = ast.parse(file.read())
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "StorageMetrics"]
    assert tree.body, f"{name} has no StorageMetrics any more"
    module = types.ModuleType(name)
    vars(module).update(dataclass=dataclasses.dataclass, field=dataclasses.field, List=list)
    exec(compile(tree, path, "exec"), vars(module))
    return name, module


def test_what_sglang_asks_for_its_metrics(tmp_path, monkeypatch):
    """Pages and rates of each transfer since the last question; what was not there does not count."""
    monkeypatch.setitem(sys.modules, *metrics_module())
    store = backend(Host(), extra(tmp_path / "store"))
    assert all(store.batch_set_v1(keys(3), indices(0, 1, 2)))
    assert store.batch_get_v1(keys(2) + keys(1, 9), indices(5, 6, 7)) == [True, True, False]
    assert store.batch_get_v1(keys(1, 9), indices(7)) == [False]
    stats = store.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
    assert store.get_stats() == type(stats)()
    store.close()


def test_the_plan_may_decline(tmp_path):
    store = backend(Host(), extra(tmp_path / "store", plan="deterministic",
                                  plan_prefill="100000000"))
    assert all(store.batch_set_v1(keys(4), indices(0, 1, 2, 3)))
    assert store.batch_exists(keys(4)) == 0 and store.counts.all()["declined"] == 4
    store.close()
