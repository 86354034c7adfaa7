"""Goal: with the connector vLLM answers exactly as without it, finds its prompts again after a
restart, and never fails a request because of the store. Method: the real vLLM on the CPU, each run a
process of its own (vllm_child.py); a tiny model whose output depends on its cache, in float32 at
level raw; SmolLM2, where it is there (KVT_TEST_HF), at kv4. A hit from the store is compared with a
hit of vLLM's own prefix cache, which computes the same shapes; what was computed otherwise is equal
but for rounding."""
import os
import types

import pytest
from conftest import TOKENS, Engine, need
from vllm_rig import (ENGINE, HERE, ROUNDING, disk, flip, job, prompts, redis, run, run_jobs, same,
                      save_model, tokens)

need("vllm", "vllm")
import kvtier  # noqa: E402
from kvtier import ConfigError, UnsupportedError, _engines  # noqa: E402
from kvtier.vllm import settings  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"))


def test_contract():
    """Every name and signature of vLLM that is used; drift is said here."""
    assert _engines.get("vllm").drift() == []


def test_options_that_do_not_exist_are_named():
    with pytest.raises(ConfigError, match="'dramm'.*did you mean 'dram'"):
        settings.parse({"dramm": "1GiB"})
    with pytest.raises(ConfigError, match="none of async, sync and layers"):
        settings.parse({"load": "later"})
    with pytest.raises(ConfigError, match="kv_connector_extra_config: .*level.*kv3"):
        settings.parse({"level": "kv3"})  # a value, and nothing has been opened
    own = settings.parse({"load": "sync", "salt": "tenant", "dram": "1GiB"})
    assert (own.load_async, own.salt, own.options) == (False, b"tenant", {"dram": "1GiB"})


def config_of(extra, connector="KvtierConnector", module="kvtier.vllm"):
    from vllm.config import KVTransferConfig
    return types.SimpleNamespace(kv_transfer_config=KVTransferConfig(
        kv_connector=connector, kv_connector_module_path=module, kv_role="kv_both",
        kv_connector_extra_config=extra))


def test_options_are_looked_at_before_anything_is_loaded():
    """By the questions that vLLM asks of the class: the first one when its configuration is looked
    over (with graphs), the other before memory is measured. Below MultiConnector too."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    for extra, words in (({"dramm": "1GiB"}, "did you mean 'dram'"), ({"dram": "much"}, "much")):
        config = config_of(extra)
        ours = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        several = {"connectors": [{
            "kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.vllm",
            "kv_role": "kv_both", "kv_connector_extra_config": extra}]}
        for ask in (lambda: ours.requires_piecewise_for_cudagraph(extra),
                    lambda: ours.get_required_kvcache_layout(config),
                    lambda: MultiConnector.requires_piecewise_for_cudagraph(several)):
            with pytest.raises(ConfigError, match=words):
                ask()
    good = {"dram": "1GiB", "disk": "/not/here:1GiB"}  # that one only an open can tell
    assert ours.get_required_kvcache_layout(config_of(good)) is None
    assert not ours.requires_piecewise_for_cudagraph(good)
    assert ours.requires_piecewise_for_cudagraph({**good, "load": "layers"})


def test_failed_loads_are_computed_without_being_told(monkeypatch):
    """The other tests set no policy, and damage is computed in them; where it cannot be set, and was
    not, the engine does not start."""
    assert settings.policy_can_be_set()
    transfer = types.SimpleNamespace(kv_load_failure_policy="fail")
    settings.recompute_failed_loads(transfer)
    assert transfer.kv_load_failure_policy == "recompute"
    monkeypatch.setattr(settings, "policy_can_be_set", lambda: False)
    settings.recompute_failed_loads(transfer)
    with pytest.raises(ConfigError, match='set "kv_load_failure_policy": "recompute"'):
        settings.recompute_failed_loads(types.SimpleNamespace(kv_load_failure_policy="fail"))


@pytest.mark.parametrize("parallel, extra, words", [
    ({"world_size": 2}, {}, "kvtierd"),
    ({"world_size": 2}, {"load": "layers", "store": "unix:/s"}, "one rank"),
    ({"world_size": 2, "pipeline_parallel_size": 2}, {}, "kvtierd"),
    ({"world_size": 2, "decode_context_parallel_size": 2}, {}, "decode_context_parallel_size"),
    ({"world_size": 2}, {"store": "unix:/s"}, ""),
    ({"world_size": 2, "pipeline_parallel_size": 2}, {"store": "unix:/s"}, "")])
def test_engines_whose_processes_cannot_share_a_store_are_refused(parallel, extra, words):
    from kvtier.vllm.store import check_processes
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(
        **{"pipeline_parallel_size": 1, "distributed_executor_backend": "mp", **parallel}))
    if not words:
        return check_processes(config, settings.parse(extra))
    with pytest.raises(UnsupportedError, match=words):
        check_processes(config, settings.parse(extra))


class Spec(types.SimpleNamespace):
    """A KV cache spec as far as the layout looks at it."""

    def __init__(self, kind, **more):
        import torch
        super().__init__(**{"head_size": 64, "num_kv_heads": 2, "dtype": torch.float32,
                            "block_size": 32, "page_size_bytes": 32768, **more})
        self.__class__ = type(kind, (Spec,), {})


def groups(*specs):
    return types.SimpleNamespace(kv_cache_groups=[
        types.SimpleNamespace(layer_names=[f"model.layers.{i}.attn"], kv_cache_spec=spec)
        for i, spec in enumerate(specs)])


@pytest.mark.parametrize("specs, words", [
    ([("FullAttentionSpec", {}), ("MambaSpec", {})], "group 1 .*MambaSpec.*changes in place"),
    ([("ChunkedLocalAttentionSpec", {})], "group 0 .*ChunkedLocal"),
    ([("FullAttentionSpec", {}), ("NewSpec", {})], "NewSpec.*full attention, MLA and sliding"),
    ([("SlidingWindowSpec", {"sliding_window": 64})], "every layer .* sliding window"),
    ([("FullAttentionSpec", {"tokens_per_state": 4})], "4 tokens in one state")])
def test_groups_that_are_not_stored_are_named_with_the_reason(specs, words):
    from kvtier.vllm.pages import model_of
    with pytest.raises(UnsupportedError, match=words):
        model_of(groups(*(Spec(kind, **more) for kind, more in specs)))


def test_windows_beside_full_attention_are_groups_of_the_layout():
    """A hit of n tokens needs the window's last tokens but one: token n is computed."""
    from kvtier import Group, GroupKind
    from kvtier.vllm.pages import model_of
    model = model_of(groups(Spec("FullAttentionSpec"), Spec("SlidingWindowSpec", sliding_window=64)))
    assert model.layout.groups == (Group(1, GroupKind.WINDOW, 32, 63),) and not model.one_chain
    assert [p.group for p in model.layout.parts] == [0, 0, 1, 1]
    assert model_of(groups(Spec("FullAttentionSpec"))).one_chain


ASKED = tokens(400, 1)


@pytest.fixture(scope="module")
def restarted(tiny, tmp_path_factory):
    """A prompt is computed by an engine; then, in another process, asked of an engine with the same
    store, and of one with a store of its own, as on another machine. Where a redis-server can be
    started, both stores have it for a tier that they share."""
    where = tmp_path_factory.mktemp("restarted")
    with redis(where) as server:
        shared = server and {"remote": server.url, "remote_write": "all", "remote_deadline": "60s"}
        first = run(tiny, [[ASKED], [ASKED], [tokens(40, 5)]], disk(where / "store", **shared or {}),
                    between={"2": server.wait_command(12)} if server else None)
        jobs = [job(tiny, [[ASKED]], disk(where / "store"))]
        if server:
            jobs.append(job(tiny, [[ASKED]], disk(where / "other", **shared)))
        again, *elsewhere = run_jobs(*jobs)
    return where / "store", first, again, elsewhere


def test_a_prompt_is_found_after_a_restart_and_damage_is_computed(tiny, restarted):
    """The hit equals one of vLLM's own prefix cache to the last bit; a store in which every record
    is damaged changes no token."""
    store, first, again, _ = restarted
    cold, native, _ = first["batches"]
    assert cold[0]["cached"] == 0 and native[0]["cached"] == 384
    assert "error" not in again, again["error"]
    hit = again["batches"][0]
    assert hit[0]["cached"] == 384 and again["metrics"]["loaded_disk_blocks"] == 12
    same(hit, native)
    assert flip(store)
    poisoned = run(tiny, [[ASKED]], disk(store))
    assert poisoned["metrics"]["loaded_blocks"] == 0
    same(poisoned["batches"][0], cold, ROUNDING)


def test_a_prompt_of_another_machine_is_found_in_the_tier_that_both_share(restarted):
    """An engine with empty DRAM and disk answers from the server without computing the prompt: as a
    hit of vLLM's own prefix cache, bit for bit."""
    _, first, _, elsewhere = restarted
    if not elsewhere:
        pytest.skip("no redis-server here (scripts/setup.sh test installs it)")
    other = elsewhere[0]
    assert "error" not in other, other["error"]
    assert other["batches"][0][0]["cached"] == 384
    same(other["batches"][0], first["batches"][1])
    assert other["stats"]["remote.got"] == other["metrics"]["loaded_blocks"] == 12
    assert other["metrics"]["failed_blocks"] == 0


def test_a_node_of_a_cluster_dies_while_requests_are_served(tiny, tmp_path):
    """What another machine has put to a cluster is loaded until a master is killed: from then on its
    records are misses, which are computed; no request fails or answers otherwise. When its replica
    has taken over all of them are found."""
    asked = prompts(8, 12, shared=8)
    blocks = sum((len(prompt) - 1) // ENGINE["block_size"] for prompt in asked)
    last = [tokens(40, 5)]
    with redis(tmp_path, 6) as nodes:
        if not nodes:
            pytest.skip("no redis-server here (scripts/setup.sh test installs it)")
        shared = {"remote": nodes.url, "remote_write": "all", "remote_deadline": "60s"}
        all_put = nodes.wait_command(2 * blocks) + " && sleep 1"  # blocks of answers count, too
        plain, first, killed, after = run_jobs(
            job(tiny, [asked]),
            job(tiny, [asked, last], disk(tmp_path / "first", **shared),
                between={"1": all_put}),
            job(tiny, [asked[:4], asked[4:], prompts(8, 13, shared=8)],
                disk(tmp_path / "other", **shared), between={"1": nodes.kill_command(0)}),
            job(tiny, [asked], disk(tmp_path / "after", **shared),
                between={"0": nodes.replaced_command(1)}))
    for answer in (plain, first, killed, after):
        assert "error" not in answer, answer["error"]
    for answer in (first, after):
        same(answer["batches"][0], plain["batches"][0], ROUNDING)
    same(killed["batches"][0] + killed["batches"][1], plain["batches"][0], ROUNDING)
    print("killed:", {name: value for name, value in killed["stats"].items()
                      if name.startswith("remote.") and value},
          {name: value for name, value in killed["metrics"].items() if value})
    assert 0 < killed["stats"]["remote.got"] < blocks and killed["stats"]["remote.losses"] > 0
    assert after["stats"]["remote.got"] == after["metrics"]["loaded_blocks"] == blocks
    assert after["metrics"]["failed_blocks"] == 0


def test_many_requests_at_once_with_chunks_and_preemption(tiny, tmp_path):
    """16 requests with common beginnings, a pool that holds two of them, prompts cut into chunks:
    as without kvtier, with the store cold, warm, and after a restart."""
    asked = prompts(16, 2)
    tight = {"max_num_batched_tokens": 256, "kv_cache_memory_bytes": 5 << 20}
    long = {"max_tokens": 48}
    plain = run(tiny, [asked], None, long, engine=tight)["batches"][0]
    store = tmp_path / "store"
    first = run(tiny, [asked, asked], disk(store), long, engine=tight)
    assert first["preemptions"] > 0 and first["metrics"]["loads"] > 0
    second = run(tiny, [asked], disk(store, load="sync"), long, engine=tight)
    assert second["metrics"]["loaded_disk_blocks"] > 0
    for batch in (*first["batches"], *second["batches"]):
        same(batch, plain, ROUNDING)


def test_a_pipeline_has_what_every_stage_has():
    """Two stages with a namespace each, one of which holds less, or holds it elsewhere: that is what
    counts; and stages that cannot be asked together are refused."""
    import dataclasses
    from kvtier.vllm.pages import model_of
    from kvtier.vllm.scheduler import Scheduler
    from kvtier.vllm.stats import Counts
    from kvtier.vllm.store import Store, stages_of
    model = model_of(groups(Spec("FullAttentionSpec", block_size=TOKENS)))
    opaque = model_of(groups(Spec("FullAttentionSpec", block_size=TOKENS)), opaque=True)
    hashes = [bytes([i]) * 32 for i in range(8)]
    with kvtier.Cache(dram="64MiB", env=False, plan="off", level="raw") as cache:
        store = Store(cache, kvtier.Identity("test", model="m", pp_size=2), ())
        scheduler = Scheduler(model, TOKENS, 1, store, Counts(), False)
        asked = types.SimpleNamespace(request_id="a", block_hashes=hashes, lora_request=None,
                                      num_tokens=8 * TOKENS + 1)
        assert scheduler.matched(asked, 0) == 0  # no stage has told what it holds
        engines = [Engine(cache, pp_rank=rank, pp_size=2) for rank in range(2)]
        store.stages = tuple(engine.ns for engine in engines)
        store.namespace = store.stages[0]
        for engine, count in zip(engines, (8, 3)):
            [engine.fill(page) for page in range(count)]
            assert engine.store(kvtier.Keys.from_hashes(hashes[:count]), range(count)) == [0] * count
        asked.request_id = "b"
        assert scheduler.matched(asked, 0) == 3 * TOKENS
        assert scheduler.sources(asked, 3 * TOKENS) == (3 * TOKENS, 0, 0)
        asked.request_id = "c"
        assert scheduler.matched(asked, 4 * TOKENS) == 0
    told = {(1, 0): model, (0, 0): opaque, (0, 1): opaque}
    assert stages_of(told, 2) == [opaque, model]
    for bad, words in (({(0, 0): model}, "stage 1"), ({**told, (0, 1): model}, "ranks of stage 0"),
                       ({**told, (1, 0): dataclasses.replace(model, groups=())}, "group their")):
        with pytest.raises(UnsupportedError, match=words):
            stages_of(bad, 2)


def test_a_prompt_waits_until_every_stage_has_told_what_it_holds(vllm_log, monkeypatch):
    """Asked before the first step has come back, or never told: the prompt is asked about again, or
    computed; stages that cannot be asked together find nothing, and fail no step."""
    import dataclasses
    from kvtier.vllm import scheduler as module
    from kvtier.vllm.pages import model_of
    from kvtier.vllm.stats import Counts
    from kvtier.vllm.store import Store
    model = model_of(groups(Spec("FullAttentionSpec", block_size=TOKENS)))
    nothing = types.SimpleNamespace(
        total_num_scheduled_tokens=0, scheduled_new_reqs=[], num_scheduled_tokens={},
        scheduled_cached_reqs=types.SimpleNamespace(req_ids=[]))
    asked = types.SimpleNamespace(request_id="a", block_hashes=[bytes(32)] * 8, lora_request=None,
                                  num_tokens=8 * TOKENS + 1)

    def of_two(cache):
        store = Store(cache, kvtier.Identity("test", model="m", pp_size=2), ())
        return store, module.Scheduler(model, TOKENS, 1, store, Counts(), False, stages=2)

    with kvtier.Cache(dram="16MiB", env=False) as cache:
        store, scheduler = of_two(cache)
        assert scheduler.matched(asked, 0) is None and scheduler.step(nothing).ask
        scheduler.told_stages({(1, 0): model})
        assert scheduler.matched(asked, 0) is None and not store.stages
        scheduler.told_stages({(0, 0): model})
        assert scheduler.matched(asked, 0) == 0 and not scheduler.step(nothing).ask
        assert len({stage.id for stage in store.stages}) == 2
        scheduler.told_stages({(0, 0): model, (1, 0): model})  # a step that was on its way
        store, scheduler = of_two(cache)
        scheduler.told_stages({(0, 0): model, (1, 0): dataclasses.replace(model, groups=())})
        assert scheduler.matched(asked, 0) == 0 and not store.stages
        assert "nothing will be found" in vllm_log.text and "group their layers" in vllm_log.text
        _, scheduler = of_two(cache)
        monkeypatch.setattr(module, "_STAGES_SECONDS", 0.0)
        assert scheduler.matched(asked, 0) == 0


def test_a_store_that_dies_or_is_full_costs_hits_only(tiny, tmp_path):
    """Its files vanish in mid-run; then no file may grow beyond 1 MiB."""
    asked = prompts(6, 3)
    plain = run(tiny, [asked], None)["batches"][0]
    store = tmp_path / "store"
    gone = run(tiny, [asked, asked, prompts(6, 4)], disk(store, dram="16MiB"),
               between={"1": f"find {store} -type f -exec truncate -s 0 {{}} +",
                        "2": f"rm -rf {store}"})
    same(gone["batches"][0], plain, ROUNDING)
    same(gone["batches"][1], plain, ROUNDING)
    full = run(tiny, [asked, asked], disk(tmp_path / "full"), limits=1 << 20)
    for batch in full["batches"]:
        same(batch, plain, ROUNDING)


@pytest.fixture(scope="session")
def smollm2():
    where = os.environ.get("KVT_TEST_HF", "")
    if not os.path.exists(os.path.join(where, "config.json")):
        pytest.skip("KVT_TEST_HF names no SmolLM2 (scripts/smollm2-hf.sh)")
    return where


def test_smollm2_at_kv4_answers_as_before(smollm2, tmp_path):
    """A fixed question about a document that is loaded after a restart, coded at kv4: the same
    answer, and where the model is shown its own exact answer the same next token."""
    text = HERE.parent.parent / "share" / "demo"
    asked, answer_of = question(smollm2, next(text.glob("*.txt")))
    engine = {"dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory_bytes": 96 << 20,
              "block_size": 128}
    kv4 = disk(tmp_path / "store", level="kv4", dram="256MiB")
    sampling = {"max_tokens": 12}
    exact = run(smollm2, [[asked]], kv4, sampling, engine=engine)["batches"][0][0]
    steps = [asked + exact["tokens"][:i] for i in range(len(exact["tokens"]))]
    shown = run(smollm2, [[asked], *[[s] for s in steps]], kv4, sampling, engine=engine)
    loaded = shown["batches"][0][0]
    assert loaded["cached"] >= 640
    blocks, raw_block = loaded["cached"] // 128, 128 * 23040  # the first block of a prompt is raw
    assert shown["stats"]["client.load_blocks"] == blocks
    assert shown["stats"]["client.load_bytes"] <= 1.01 * raw_block + 0.33 * (blocks - 1) * raw_block
    print("exact:", answer_of(exact["tokens"]), "\nkv4:", answer_of(loaded["tokens"]))
    agree = sum(batch[0]["tokens"][0] == want
                for batch, want in zip(shown["batches"][1:], exact["tokens"]))
    assert agree >= 0.9 * len(steps)
    assert answer_of(loaded["tokens"]).split(".")[0] == answer_of(exact["tokens"]).split(".")[0]


def question(model, document):
    """(tokens of a chat that asks about a document, text of tokens)."""
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    body = tokenizer(document.read_text())["input_ids"][:700]
    text = ("<|im_start|>user\n" + tokenizer.decode(body) +
            "\nWho was the first keeper of Cape Orrin?<|im_end|>\n<|im_start|>assistant\n")
    return tokenizer(text)["input_ids"], tokenizer.decode
