"""Goal: as a secondary tier of vLLM's tiering manager kvtier keeps the pages of its CPU cache across
restarts, coded where it knows what they hold, and never brings wrong ones. Method: the real
TieringOffloadingSpec and TieringOffloadingManager, with vLLM's own fs tier beside it where sizes
are compared; what a GPU would write into the CPU cache is drawn here. Then the real engine on the
CPU with the real connector (vllm_tier_child.py): a restart, and damage. The adapter of names for
older releases is tested with classes of their shape (the releases are too large to install)."""
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import time
import types
import uuid

import pytest
from conftest import SEED, need
from vllm_rig import RANKS

need("vllm", "vllm")
import torch  # noqa: E402
from kvtier import ConfigError, UnsupportedError, _engines, _vllm_names  # noqa: E402
from kvtier import vllm_tier as tier_module  # noqa: E402
from kvtier.vllm_tier import KvtierTier  # noqa: E402
from vllm.v1.kv_offload import base, config  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402

HERE = pathlib.Path(__file__).parent
LAYERS, HEADS, DIM, TOKENS = 4, 2, 128, 32
PAGE = LAYERS * HEADS * 2 * DIM * TOKENS * 2  # bytes in bf16: 131,072
GEOMETRY = {"order": "lthcd", "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM,
            "dtype": "bfloat16"}


def test_contract():
    """Every name and signature that the tier uses; drift is said here."""
    assert _engines.get("vllm tier").drift() == []


@pytest.fixture
def weights(tmp_path):
    where = tmp_path / "weights"
    where.mkdir()
    (where / "model.safetensors").write_bytes(b"these are the weights")
    return where


def make_spec(model, tiers, pages=32, groups=1, blocks=1, workers=1, events=False):
    """The real spec of an engine with so many pages in its CPU cache."""
    layers = tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS))
    return TieringOffloadingSpec(config.OffloadingConfig(
        groups=tuple(config.OffloadingGroupConfig(TOKENS, layers, g) for g in range(groups)),
        worker_kv_bytes_per_block=PAGE, enable_kv_cache_events=events, engine_id=uuid.uuid4().hex,
        extra_config={"cpu_bytes_to_use": pages * blocks * workers * PAGE,
                      "secondary_tiers": tiers},
        model=config.OffloadingModelConfig(str(model), "bfloat16"),
        cache=config.OffloadingCacheConfig(TOKENS, blocks),
        parallel=config.OffloadingParallelConfig(0, workers, workers, 1, 1, 1, 0, 1, None, True)))


def ours(store, **more):
    return {"type": "KvtierTier", "module_path": "kvtier.vllm_tier", "dram": "16MiB",
            "disk": f"{store}:1GiB", "env": "no", "plan": "off", "threads": 1, **more}


class Engine:
    """What the scheduler and a GPU do, by hand."""

    def __init__(self, *arguments, **more):
        self.spec = make_spec(*arguments, **more)
        self.manager = self.spec.get_manager()
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.tiers = self.manager.secondary_tiers
        self.noted = None  # what the connector does with each request of an engine with LoRA

    def step(self):
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))

    def settle(self):
        began = time.monotonic()
        while self.manager.has_pending_work():
            assert time.monotonic() - began < 300, "transfers do not end"
            self.step()

    def request(self, keys, name=None):
        context = base.ReqContext(name or uuid.uuid4().hex)
        if self.noted is not None:
            self.tiers[0]._adapted.note(types.SimpleNamespace(
                request_id=context.req_id, lora_request=self.noted))
        for number, key in enumerate(keys, 1):
            context.set_offload_key_position(key, number * TOKENS)
        self.manager.on_new_request(context)
        return context

    def store(self, keys, content):
        context = self.request(keys)
        out = self.manager.prepare_store(keys, context)
        places = dict(zip(out.keys_to_store, out.store_spec.chunk_ids))
        for key, data in zip(keys, content):
            if key in places:
                self.page(int(places[key]))[:len(data)] = data
        self.manager.complete_store(out.keys_to_store, context)
        self.settle()
        self.manager.on_request_finished(context)
        self.step()

    def load(self, keys):
        """Contents of the leading pages that are found, as vLLM asks for them."""
        context = self.request(keys)
        for _ in range(20):
            results = []
            for key in keys:
                results.append(self.manager.lookup(key, context))
                if results[-1] is base.LookupResult.MISS:
                    break
            if not any(r in (base.LookupResult.RETRY, base.LookupResult.HIT_PENDING)
                       for r in results):
                break
            self.step()
            self.settle()
        hits = keys[:sum(r is base.LookupResult.HIT for r in results)]
        out = []
        if hits:
            spec = self.manager.prepare_load(hits, context)
            out = [bytes(self.page(int(page))) for page in spec.chunk_ids]
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        self.step()
        return out

    def page(self, page):
        """Bytes of a page of the CPU cache."""
        size = self.view.strides[0]
        flat = self.view.cast("B")
        return flat[page * size:(page + 1) * size]

    def close(self):
        self.manager.shutdown()


def keys_of(count, seed=1, group=0):
    draw = random.Random(SEED + seed)
    return [base.make_offload_key(draw.randbytes(32), group) for _ in range(count)]


def rows(count, seed=1, size=PAGE):
    made = torch.randn(count, size // 2, generator=torch.Generator().manual_seed(SEED + seed))
    return [row.view(torch.uint8).numpy().tobytes() for row in made.to(torch.bfloat16)]


def error_of(want, have):
    one, other = (torch.frombuffer(bytearray(b), dtype=torch.bfloat16).float()
                  for b in (want, have))
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize("more, blocks, workers", [
    ({}, 1, 1), ({"level": "raw", "geometry": GEOMETRY}, 1, 1),
    ({"level": "raw", "geometry": {**GEOMETRY, "order": "wlbthcd"}}, 2, 2)],
    ids=["bytes", "raw", "raw of two workers"])
def test_pages_are_found_after_a_restart_to_the_byte(weights, tmp_path, more, blocks, workers):
    """Level raw where the geometry is known, else bytes. Loads begin in the middle of the chain
    too; a model of other weights finds nothing."""
    size, tier = PAGE * blocks * workers, ours(tmp_path / "store", **more)
    keys, content = keys_of(12), rows(12, size=size)
    engine = Engine(weights, [tier], blocks=blocks, workers=workers)
    engine.store(keys[:7], content[:7])
    engine.store(keys[7:], content[7:])
    engine.close()
    engine = Engine(weights, [tier], blocks=blocks, workers=workers)
    assert engine.load(keys) == content
    assert engine.tiers[0].counts.all()["loaded_disk"] == 12
    assert engine.load(keys_of(3, 9)) == []
    engine.close()
    (weights / "model.safetensors").write_bytes(b"these are the others")
    engine = Engine(weights, [tier], blocks=blocks, workers=workers)
    assert engine.load(keys) == []
    engine.close()


def test_coded_pages_take_less_than_a_third_of_what_the_fs_tier_takes(weights, tmp_path):
    """Both tiers side by side, the same pages in bf16, kv4; what comes back is close."""
    keys, content = keys_of(60), rows(60)
    engine = Engine(weights, [ours(tmp_path / "store", geometry=GEOMETRY, guard="off"),
                              {"type": "fs", "root_dir": str(tmp_path / "fs"), "n_read_threads": 1,
                               "n_write_threads": 1}], pages=64)
    engine.store(keys, content)
    theirs = sum(f.stat().st_size for f in (tmp_path / "fs").rglob("*.bin"))
    engine.tiers[0]._cache.flush()
    mine = engine.tiers[0]._cache.stat("disk.written_bytes")
    print(f"fs {theirs} bytes, kvtier {mine}: {mine / theirs:.3f}")
    assert theirs >= 60 * PAGE and 0 < mine <= 0.30 * theirs
    engine.close()
    engine = Engine(weights, [ours(tmp_path / "store", geometry=GEOMETRY, guard="off")],
                    pages=64)
    have = engine.load(keys)
    assert have[0] == content[0]  # the first page of a sequence is exact
    for want, got in zip(content[1:], have[1:], strict=True):
        assert 0 < error_of(want, got) < 0.2
    engine.close()


def test_the_kernel_says_how_pages_lie(tmp_path):
    """From places that were found by the engine's kernel, and from the names of layouts."""
    where = _vllm_names.Deployment("m", "bfloat16", 32, 2, 1, 3, 1, "id", False, "LBNHC", 1)
    assert set(tier_module._ORDERS) <= set(dir(_layouts()))
    shape, why = tier_module.page_shape(where, 1 << 20, {})
    assert not shape.coded and "OffloadingConnector" in why
    assert shape.page_bytes == 1 << 20 and shape.layout.block_tokens == 64


def _layouts():
    from vllm.v1.kv_cache_layout import KVCacheLayout
    return KVCacheLayout


def damage(root):
    """One byte in every 4 KiB of what was written, but for the first 64 KiB of each file."""
    for path in root.rglob("*"):
        if path.is_file() and path.stat().st_size >= 1 << 20:
            with open(path, "r+b") as file:
                data = bytearray(file.read())
                for at in range(65536 + 777, len(data), 4096):
                    data[at] ^= 0x10
                file.seek(0)
                file.write(data)


def test_damaged_pages_are_computed_and_not_asked_for_again(weights, tmp_path):
    """A failed promotion is a miss for as long as its request lives: vLLM would ask for ever."""
    keys, content = keys_of(8), rows(8)
    engine = Engine(weights, [ours(tmp_path / "store")])
    engine.store(keys, content)
    engine.close()
    damage(tmp_path / "store")
    engine = Engine(weights, [ours(tmp_path / "store")])
    assert engine.load(keys) == []
    counts = engine.tiers[0].counts.all()
    assert counts["found"] == 8 and counts["failed"] == 8 and counts["loaded"] == 0
    engine.store(keys, content)  # computed, and stored anew
    engine.close()
    engine = Engine(weights, [ours(tmp_path / "store")])
    assert engine.load(keys) == content
    engine.close()


def test_what_of_a_load_is_good_is_kept(weights, tmp_path):
    """A page that goes between look-up and load costs that page and those behind it."""
    keys, content = keys_of(8), rows(8)
    engine = Engine(weights, [ours(tmp_path / "store", dram="0")])
    engine.store(keys, content)
    engine.manager.reset_cache()
    tier = engine.tiers[0]
    context = engine.request(keys)
    assert all(engine.manager.lookup(key, context) is base.LookupResult.HIT_PENDING
               for key in keys)
    tier._pages.ns.purge(tier._pages.keys([tier._hash(keys[5])]))
    engine.step()
    tier.drain_jobs()
    done = list(tier.get_finished_jobs())
    assert len(done) == 1 and not done[0].success
    assert set(done[0].successful_keys) == set(keys[:5])
    tier.get_finished_jobs = lambda: done  # the manager hears of it
    engine.step()
    del tier.get_finished_jobs
    engine.settle()
    found = [engine.manager.lookup(key, context) for key in keys]
    assert found == [base.LookupResult.HIT] * 5 + [base.LookupResult.MISS] * 3
    engine.manager.on_request_finished(context)
    engine.close()


def test_drain_waits_and_reset_keeps_the_store(weights, tmp_path):
    keys, content = keys_of(6), rows(6)
    engine = Engine(weights, [ours(tmp_path / "store")])
    context = engine.request(keys)
    out = engine.manager.prepare_store(keys, context)
    for page, data in zip(out.store_spec.chunk_ids, content):
        engine.page(int(page))[:] = data
    engine.manager.complete_store(out.keys_to_store, context)
    tier = engine.tiers[0]
    tier.drain_jobs()
    assert all(work.poll() for _, work in tier._jobs.values())
    engine.manager.reset_cache()
    engine.manager.on_request_finished(context)
    assert engine.load(keys) == content
    engine.close()


def test_the_plan_may_decline_and_says_so(weights, tmp_path):
    """A machine that computes 10^8 tokens a second loads nothing."""
    keys = keys_of(6)
    engine = Engine(weights, [ours(tmp_path / "store", plan="deterministic",
                                   plan_prefill="100000000")])
    engine.store(keys, rows(6))
    engine.manager.reset_cache()
    assert engine.load(keys) == []
    counts = engine.tiers[0].counts.all()
    assert counts["declined"] == counts["found"] == 6 and counts["loaded"] == 0
    engine.close()


def test_groups_keep_apart_and_are_bytes(weights, tmp_path):
    engine = Engine(weights, [ours(tmp_path / "store")], groups=2)
    one, two = keys_of(3, group=0), keys_of(3, group=1)
    first, second = rows(3, 1), rows(3, 2)
    engine.store(one, first)
    engine.store(two, second)
    engine.manager.reset_cache()
    assert engine.load(two) == second and engine.load(one) == first
    engine.close()


def test_counters_reach_vllm(weights, tmp_path):
    engine = Engine(weights, [ours(tmp_path / "store")])
    engine.store(keys_of(5), rows(5))
    stats = engine.manager.get_stats().reduce()
    assert stats["vllm:kvtier_tier_stored"] == 5
    defined = KvtierTier.build_metric_definitions({})
    assert {name for name in stats if "kvtier" in name} <= set(defined)
    engine.close()


@pytest.mark.parametrize("more, words", [
    ({"dramm": "1GiB"}, "'dramm'; did you mean 'dram'"),
    ({"weight_digest": "x"}, "did you mean 'weights_digest'"),
    ({"pages": "coded"}, "neither auto nor opaque"),
    ({"enable_kv_events": "yes"}, "neither true nor false"),
    ({"level": "kv3"}, "kvtier.vllm_tier"),
    ({"geometry": {**GEOMETRY, "layers": 5}}, "the geometry makes 163840 bytes"),
    ({"geometry": {**GEOMETRY, "kv_head": 5}}, "did you mean 'kv_heads'")])
def test_options_that_make_no_sense_stop_the_start(weights, tmp_path, more, words):
    with pytest.raises(ConfigError) as error:
        Engine(weights, [ours(tmp_path / "store", **more)])
    assert words in str(error.value)


@pytest.mark.parametrize("more, words", [
    ({"dsik": "/x:1GiB"}, "'dsik'; did you mean 'disk'"), ({"dram": "much"}, "much"),
    ({"pages": "coded"}, "neither auto nor opaque"),
    ({"enable_kv_events": "yes"}, "neither true nor false")])
def test_the_connector_looks_at_the_tier_s_options_before_anything_is_loaded(tmp_path, more, words):
    from kvtier.vllm_tier import KvtierOffloadingConnector
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20,
             "secondary_tiers": [{"type": "fs", "dsik": 1}, ours(tmp_path / "store", **more)]}
    config = types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=extra))
    for ask in (lambda: KvtierOffloadingConnector.requires_piecewise_for_cudagraph(extra),
                lambda: KvtierOffloadingConnector.get_required_kvcache_layout(config),
                lambda: KvtierOffloadingConnector(config, None, None)):
        with pytest.raises(ConfigError, match=words):
            ask()
    extra["secondary_tiers"][1] = ours(tmp_path / "store")
    assert KvtierOffloadingConnector.requires_piecewise_for_cudagraph(extra) is False
    assert not (tmp_path / "store").exists()


def test_weights_that_cannot_be_told_apart_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="weights_digest"):
        Engine("org/model", [ours(tmp_path / "store")])
    engine = Engine("org/model", [ours(tmp_path / "store", weights_digest="1")])
    engine.store(keys_of(2), rows(2))
    engine.close()
    engine = Engine("org/model", [ours(tmp_path / "store", weights_digest="2")])
    assert engine.load(keys_of(2)) == []
    engine.close()


def test_lora_is_refused_where_adapters_are_known_by_name_only():
    where = dataclasses.replace(
        _vllm_names.Deployment("m", "bfloat16", 32, 1, 1, 3, 1, "id", False, "", 1),
        vllm_config=types.SimpleNamespace(lora_config=object()))
    with pytest.raises(UnsupportedError, match="by name"):
        tier_module.identity_for(where, {}, "x")


class Adapter:
    """A LoRARequest as far as it is looked at."""

    load_inplace = False

    def __init__(self, name, where, content):
        self.lora_name, self.lora_path = name, str(where)
        where.mkdir(exist_ok=True)
        (where / "adapter_model.safetensors").write_bytes(content)


def test_adapters_are_told_apart_by_their_weights(weights, tmp_path, vllm_log):
    """A name finds what was stored with the same weights; one that stood for others in this engine
    finds and stores nothing, nor does a request that nobody has told of."""
    one, two = (Adapter("a", tmp_path / name, name.encode()) for name in ("one", "two"))
    keys, content = keys_of(4), rows(4)
    store = [ours(tmp_path / "store")]

    def restarted(adapter):
        engine = Engine(weights, store)
        engine.tiers[0]._adapted, engine.noted = tier_module.Adapted(), adapter
        return engine

    engine = restarted(one)
    engine.store(keys, content)
    assert not engine.tiers[0]._adapted._of  # ended requests are forgotten
    engine.close()
    engine = restarted(one)
    assert engine.load(keys) == content
    engine.close()
    engine = restarted(two)
    assert engine.load(keys) == []
    engine.noted = one
    assert engine.load(keys) == [] and "other weights" in vllm_log.text
    engine.store(keys, rows(4, 9))
    counts = engine.tiers[0].counts.all()
    assert counts["dropped"] == 4 and counts["stored"] == counts["loaded"] == 0
    engine.manager.reset_cache()
    engine.noted = None  # not told of
    assert engine.load(keys) == []
    engine.close()
    engine = restarted(one)
    assert engine.load(keys) == content
    engine.close()


def test_kv_events_name_what_is_stored(weights, tmp_path, vllm_log):
    keys = keys_of(5)
    engine = Engine(weights, [ours(tmp_path / "store", enable_kv_events=True)], events=True)
    engine.store(keys, rows(5))
    told = [event for event in engine.manager.take_events() if event.medium is base.Medium.STORAGE]
    assert sorted(key for event in told for key in event.keys) == sorted(keys)
    assert not any(event.removed for event in told)
    assert not [e for e in engine.manager.take_events() if e.medium is base.Medium.STORAGE]
    engine.close()
    engine = Engine(weights, [ours(tmp_path / "other", enable_kv_events=True)])
    assert "enable_kv_events" in vllm_log.text
    engine.store(keys, rows(5))
    assert not [e for e in engine.manager.take_events() if e.medium is base.Medium.STORAGE]
    engine.close()


@dataclasses.dataclass
class OldResult:
    job_id: int
    success: bool


class OldManager:
    def lookup(self, key: bytes, req_context: object) -> bool | None:
        return None


class OldContext:
    pass


def test_names_of_older_releases():
    """lookup() answers with booleans, jobs have block_ids, results say less, the specification
    holds vLLM's configuration itself."""
    old = _vllm_names.Names(
        types.SimpleNamespace(SecondaryTierManager=OldManager, JobResult=OldResult),
        types.SimpleNamespace(RequestOffloadingContext=OldContext))
    assert (old.hit, old.miss, old.medium) == (True, False, None)
    assert old.pages(types.SimpleNamespace(block_ids=[3, 4])) == [3, 4]
    assert old.pages(types.SimpleNamespace(chunk_ids=[5], block_ids=[3])) == [5]
    assert old.result(7, [b"a", b"b"], [True, False], True, 0.1, 5) == OldResult(7, False)
    assert old.metrics({"a": "b"}) == {} and isinstance(old.context(), OldContext)
    new = _vllm_names.Names(*_vllm_names.modules())
    partial = new.result(7, [b"a", b"b"], [True, False], True, 0.1, 5)
    assert partial.successful_keys == (b"a",) and partial.transfer_bytes == 5
    assert new.result(7, [b"a"], [True], True, 0.1, 5).successful_keys is None
    spec = types.SimpleNamespace(
        block_size_factor=4, kv_cache_config=types.SimpleNamespace(kv_cache_groups=[
            types.SimpleNamespace(layer_names=["0", "1"],
                                  kv_cache_spec=types.SimpleNamespace(block_size=16))]),
        vllm_config=types.SimpleNamespace(
            model_config=types.SimpleNamespace(model="m", dtype="torch.bfloat16"),
            cache_config=types.SimpleNamespace(cache_dtype="auto", block_size=16),
            parallel_config=types.SimpleNamespace(world_size=2, pipeline_parallel_size=1),
            kv_transfer_config=types.SimpleNamespace(engine_id="e")))
    said = _vllm_names.deployment(spec)
    assert (said.dtype, said.tokens_per_block, said.blocks, said.layers, said.workers) == (
        "bfloat16", 16, 4, 2, 2)
    for name in ("get_finished", "request_finished", "get_request_offloading_context"):
        assert callable(getattr(KvtierTier, name))


# ---- the real engine ----

@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Weights large enough that the content of the cache decides the output."""
    from transformers import LlamaConfig, LlamaForCausalLM
    where = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(SEED % (1 << 31))
    LlamaForCausalLM(LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=1024, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, initializer_range=0.15,
    )).to(torch.float32).save_pretrained(where)
    return str(where)


def child(model, store, steps, **engine):
    job = {"model": model, "tier": ours(store, level="raw", dram="0"), "steps": steps,
           "engine": engine}
    done = subprocess.run([sys.executable, HERE / "vllm_tier_child.py"], input=json.dumps(job),
                          capture_output=True, text=True, timeout=1500, env={
                              **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                              "TORCHDYNAMO_DISABLE": "1", **(RANKS if engine else {})})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-8000:]
    return json.loads(done.stdout.strip().rsplit("\n", 1)[-1])


def test_the_engine_finds_its_prompt_after_a_restart(tiny, tmp_path):
    """vLLM with OffloadingConnector's own code, its tiering manager, and the tier, which proves by
    the engine's kernel how pages lie. What comes from disk after a restart gives the tokens and
    log-probabilities of a hit of vLLM's own prefix cache, bit for bit; damage is computed."""
    store = tmp_path / "store"
    asked = [random.Random(SEED + i).randrange(3, 1000) for i in range(400)]
    first = child(tiny, store, [{"ask": asked}, {"ask": asked}])
    cold, native = first["answers"]
    assert cold["cached"] == 0 and native["cached"] == 384 and first["coded"]
    again = child(tiny, store, [{"ask": asked}, {"damage": True}, {"reset": True}, {"ask": asked}])
    hit, poisoned = again["answers"]
    assert hit["cached"] == 384 and again["counts"]["loaded_disk"] == 12
    assert hit["tokens"] == native["tokens"] and hit["logprobs"] == native["logprobs"]
    assert poisoned["cached"] == 0 and again["counts"]["failed"] > 0
    assert poisoned["tokens"] == cold["tokens"]
    assert max(abs(a - b) for a, b in zip(poisoned["logprobs"], cold["logprobs"])) < 1e-3


def test_the_pages_of_two_ranks_lie_side_by_side(tiny, tmp_path):
    """Tensor parallel: workers in processes of their own share vLLM's CPU cache, and the tier in the
    scheduler's reads and writes it for both. Their layout is not proved from there: pages are bytes.
    When vLLM has forgotten all, the prompt comes from disk, as a hit of its own cache, bit for bit."""
    asked = [random.Random(SEED + i).randrange(3, 1000) for i in range(400)]
    ran = child(tiny, tmp_path / "store", [{"ask": asked}, {"ask": asked}, {"reset": True},
                                           {"ask": asked}],
                tensor_parallel_size=2, distributed_executor_backend="mp")
    cold, native, again = ran["answers"]
    assert [a["cached"] for a in ran["answers"]] == [0, 384, 384] and not ran["coded"]
    assert ran["counts"]["loaded_disk"] == 12 and ran["counts"]["failed"] == 0
    assert (again["tokens"], again["logprobs"]) == (native["tokens"], native["logprobs"])
    assert cold["tokens"] == native["tokens"]
