"""Goal: as a native_plugin connector or a plugin adapter of LMCache kvtier keeps chunks, coded or to
the byte, finds them after a restart, and tells each completion once. Method: LMCache's own adapter over the connector,
with its keys and memory objects; then the whole of it: `lmcache server`, vLLM on the CPU with
LMCache's connector, a restart of both (lmcache_child.py)."""
import json
import os
import pathlib
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time

import pytest
import shown
from conftest import SEED, need

need("lmcache", "lmcache")
import torch  # noqa: E402
from kvtier import ConfigError, KvtierError, _engines  # noqa: E402
from kvtier.lmcache import KvtierConnector  # noqa: E402

HERE = pathlib.Path(__file__).parent
LAYERS, HEADS, DIM, TOKENS = 3, 2, 64, 256
CHUNK = 2 * LAYERS * TOKENS * HEADS * DIM * 2
GEOMETRY = {"order": "clthd", "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM,
            "dtype": "bfloat16"}


def test_contract():
    """Every name and signature of LMCache that counts here; drift is said here."""
    assert _engines.get("lmcache").drift() == []


def params(where, **more):
    return {"disk": f"{where}:1GiB", "dram": "32MiB", "threads": 1, "env": "no", **more}


def chunk(seed, size=CHUNK):
    made = torch.randn(size // 2, generator=torch.Generator().manual_seed(SEED + seed))
    return bytearray(made.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())


def names(count, model="org/model", seed=1):
    draw = random.Random(SEED + seed)
    return [f"{model}@00000000@0@{draw.randbytes(16).hex()}" for _ in range(count)]


def odd(size):
    """A buffer at an odd address."""
    return memoryview(bytearray(size + 1))[1:]


class Client:
    """The connector, and the completions that it has told."""

    def __init__(self, where, **more):
        self.plug = KvtierConnector(**params(where, **more))
        self.told = {}

    def result(self, number):
        for _ in range(6000):
            if number in self.told:
                return self.told.pop(number)
            if select.select([self.plug.event_fd()], [], [], 0.1)[0]:
                for told, *rest in self.plug.drain_completions():
                    assert told not in self.told
                    self.told[told] = rest
        raise AssertionError("no completion")

    def set(self, keys, chunks):
        return self.result(self.plug.submit_batch_set(keys, chunks))

    def get(self, keys, buffers):
        return self.result(self.plug.submit_batch_get(keys, buffers))

    def exists(self, keys):
        return self.result(self.plug.submit_batch_exists(keys))[2]


@pytest.mark.parametrize("more", [{}, {"geometry": GEOMETRY, "level": "raw"}],
                         ids=["bytes", "raw"])
def test_chunks_come_back_to_the_byte_after_a_restart(tmp_path, more):
    """Of three sizes, one of them odd, out of and into buffers at odd addresses; a look-up before
    anything was stored or loaded finds them by their sizes."""
    keys = names(6)
    want = [chunk(0), chunk(1), chunk(2), chunk(3, CHUNK // 2), bytearray(b"x" * 4001), chunk(5)]
    client = Client(tmp_path, **more)
    assert client.exists(keys) == [False] * 6
    assert client.set(keys, want) == [True, "", [True] * 6]
    client.plug.close()
    client = Client(tmp_path, **more)
    assert client.exists(keys[:3] + names(1, seed=9) + keys[3:]) == [True] * 3 + [False] + \
        [True] * 3
    have = [odd(len(data)) for data in want]
    assert client.get(keys, have) == [True, "", [True] * 6]
    assert [bytes(h) for h in have] == [bytes(w) for w in want]
    missing = odd(CHUNK)
    assert client.get(names(1, seed=9), [missing])[2] == [False] and not any(missing)
    assert client.get(keys[:1], [odd(777)])[2] == [False]  # no chunk has that size
    assert client.result(client.plug.submit_batch_delete(keys[:2] + names(1, seed=9)))[2] == \
        [True, True, False]
    assert client.exists(keys) == [False] * 2 + [True] * 4
    client.plug.close()


def test_with_a_geometry_chunks_are_coded(tmp_path):
    client = Client(tmp_path, geometry=GEOMETRY, level="kv4", guard="off")
    keys, want = names(8), [chunk(i) for i in range(8)]
    assert client.set(keys, want)[0]
    client.plug.cache.flush()
    assert 8 * 0.25 * CHUNK < client.plug.cache.stat("disk.written_bytes") < 8 * 0.31 * CHUNK
    have = [odd(CHUNK) for _ in keys]
    assert client.get(keys, have)[2] == [True] * 8
    for one, other in zip(want, have):
        a, b = (torch.frombuffer(bytearray(x), dtype=torch.bfloat16).float()
                for x in (one, other))
        assert 0 < (a - b).norm() / a.norm() < 0.2
    other_size = bytearray(b"y" * (CHUNK + 100))
    assert client.set(names(1, seed=4), [other_size])[0]
    assert client.get(names(1, seed=4), [back := odd(CHUNK + 100)])[2] == [True]
    assert bytes(back) == bytes(other_size)
    client.plug.close()


def test_models_salts_and_digests_keep_apart(tmp_path):
    """LMCache's keys name the model; where the name is a path, the weights there count too."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"one")
    keys, store = names(2, str(model)), tmp_path / "store"
    client = Client(store)
    assert client.set(keys, [chunk(0), chunk(1)])[0]
    assert client.exists(names(2, "org/other")) == [False] * 2
    client.plug.close()
    for more in ({"salt": "tenant"}, {"weights_digest": "v2"}):
        client = Client(store, **more)
        assert client.exists(keys) == [False] * 2
        assert client.set(names(1, str(model), 8), [chunk(5)])[0]  # its sizes are known from now on
        assert client.exists(keys) == [False] * 2
        client.plug.close()
    (model / "model.safetensors").write_bytes(b"two, of another length")
    client = Client(store)
    assert client.exists(keys) == [False] * 2
    client.plug.close()


@pytest.mark.parametrize("more, words", [
    ({"dissk": "/x:1GiB"}, "'dissk'; did you mean 'disk'"),
    ({"geometri": {}}, "did you mean 'geometry'"),
    ({"geometry": {**GEOMETRY, "dtype": "fp8"}}, "'fp8'"),
    ({"geometry": "auto"}, "must be an object"),
    ({"level": "kv3"}, "kvtier.lmcache")])
def test_params_that_make_no_sense_stop_the_start(tmp_path, more, words):
    with pytest.raises(ConfigError) as error:
        KvtierConnector(**params(tmp_path, **more))
    assert words in str(error.value)


def test_close_ends_what_was_submitted(tmp_path):
    client = Client(tmp_path)
    event = client.plug.event_fd()
    numbers = [client.plug.submit_batch_set([key], [chunk(i)])
               for i, key in enumerate(names(20))]
    client.plug.close()
    told = client.plug.drain_completions()
    assert [t[0] for t in told] == numbers and all(t[1] for t in told)
    other = os.eventfd(1, os.EFD_NONBLOCK)
    os.dup2(other, event)  # the number of the one that was closed is another file's now
    assert client.plug.drain_completions() == [] and os.eventfd_read(other) == 1
    os.close(event)
    os.close(other)
    client.plug.close()
    with pytest.raises(KvtierError, match="closed"):
        client.plug.submit_batch_exists(names(1))


def test_what_fails_is_a_completion(tmp_path):
    client = Client(tmp_path)
    ok, error, results = client.set(names(2), [chunk(0), bytearray(0)])
    assert not ok and "1 of 2" in error and results is None
    client.plug.cache.close()
    assert client.exists(names(2)) is None
    assert client.get(names(1), [odd(CHUNK)])[2] in ([False], None)
    client.plug.close()


def until(what):
    for _ in range(6000):
        if (out := what()) not in (None, {}):
            return out
        time.sleep(0.1)
    raise AssertionError("LMCache's adapter does not answer")


def test_lmcaches_own_adapter_over_it(tmp_path):
    """Its factory makes the connector, and its adapter stores, looks up, loads and deletes."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters import native_plugin_l2_adapter as plugin
    config = plugin.NativePluginL2AdapterConfig.from_dict({
        "type": "native_plugin", "module_path": "kvtier.lmcache", "class_name": "KvtierConnector",
        "adapter_params": params(tmp_path)})
    adapter = plugin._create_native_plugin_l2_adapter(config)
    assert adapter.report_status()["is_healthy"]
    keys = [ObjectKey(chunk_hash=bytes([i]) * 32, model_name="org/model", kv_rank=0)
            for i in range(3)]

    class Memory:
        def __init__(self, data):
            self.byte_array = memoryview(data)

    want = [chunk(i) for i in range(3)]
    adapter.submit_store_task(keys, [Memory(data) for data in want])
    until(adapter.pop_completed_store_tasks)
    task = adapter.submit_lookup_and_lock_task(keys, {})
    found = until(lambda: adapter.query_lookup_and_lock_result(task))
    assert [found.test(i) for i in range(3)] == [True] * 3
    have = [bytearray(CHUNK) for _ in keys]
    load = adapter.submit_load_task(keys, [Memory(data) for data in have])
    loaded = until(lambda: adapter.query_load_result(load))
    assert [loaded.test(i) for i in range(3)] == [True] * 3 and have == want
    adapter.delete(keys[:1])
    task = adapter.submit_lookup_and_lock_task(keys, {})
    found = until(lambda: adapter.query_lookup_and_lock_result(task))
    assert [found.test(i) for i in range(3)] == [False, True, True]
    adapter.close()


def memory(data, shape, dtype):
    """A memory object of LMCache's over bytes."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    raw = torch.frombuffer(data, dtype=torch.uint8)
    return TensorMemoryObj(raw, MemoryObjMetadata(
        torch.Size(shape), dtype, raw.data_ptr(), len(data), 1, fmt=MemoryFormat.KV_2LTD), None)


class Plugin:
    """The adapter as LMCache's factory makes it."""

    def __init__(self, where, **more):
        from lmcache.v1.distributed.l2_adapters import plugin_l2_adapter as plugin
        self.adapter = plugin._create_plugin_adapter(plugin.PluginL2AdapterConfig.from_dict({
            "type": "plugin", "module_path": "kvtier.lmcache_adapter",
            "class_name": "KvtierAdapter", "adapter_params": params(where, **more)}))

    def store(self, keys, objects):
        self.adapter.submit_store_task(keys, objects)
        return until(self.adapter.pop_completed_store_tasks)

    def found(self, keys, layouts):
        task = self.adapter.submit_lookup_and_lock_task(keys, layouts)
        seen = until(lambda: self.adapter.query_lookup_and_lock_result(task))
        return [seen.test(i) for i in range(len(keys))]

    def load(self, keys, objects):
        task = self.adapter.submit_load_task(keys, objects)
        seen = until(lambda: self.adapter.query_load_result(task))
        return [seen.test(i) for i in range(len(keys))]

    def coded(self, size):
        return self.adapter._kvtier._chunks[size].store.shape.coded


@pytest.mark.parametrize("shape, told", [
    ((2, LAYERS, TOKENS, HEADS * DIM), {"kv_heads": 1, "head_dim": 128}),
    ((LAYERS, TOKENS, 2 * HEADS * DIM), {"order": "lthd", "head_dim": 256}),
    ((2, LAYERS, 2 * TOKENS, HEADS * DIM // 2), {"kv_heads": 1, "head_dim": 64})])
def test_the_plugin_adapter_learns_what_chunks_hold(tmp_path, shape, told):
    """From the objects that are stored; after a restart from its store, before anything is said."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    keys = [ObjectKey(chunk_hash=bytes([i]) * 32, model_name="org/model", kv_rank=0)
            for i in range(3)]
    want = [chunk(i) for i in range(3)]
    plugin = Plugin(tmp_path, level="kv8", guard="off")
    assert plugin.found(keys, {0: MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])}) == \
        [False] * 3
    plugin.store(keys, [memory(data, shape, torch.bfloat16) for data in want])
    assert plugin.coded(CHUNK)
    assert told.items() <= plugin.adapter._kvtier._learned[CHUNK].items()
    plugin.adapter.close()
    plugin = Plugin(tmp_path, level="kv8", guard="off")
    assert plugin.found(keys, {}) == [True] * 3 and plugin.coded(CHUNK)
    have = [bytearray(CHUNK) for _ in keys]
    assert plugin.load(keys, [memory(data, shape, torch.bfloat16) for data in have]) == [True] * 3
    assert have != want  # coded: close, and not the same
    for one, other in zip(have, want):
        one, other = (torch.frombuffer(x, dtype=torch.bfloat16).float() for x in (one, other))
        assert (one - other).abs().max() < 0.1
    plugin.adapter.close()


@pytest.mark.parametrize("shapes, dtypes", [
    ([(2, LAYERS, TOKENS, HEADS * DIM * 2)], [torch.float8_e4m3fn]),
    ([(2, LAYERS, TOKENS * 4, 32), (2, LAYERS, TOKENS, 32)], [torch.bfloat16] * 2),
    ([(3, LAYERS, TOKENS, HEADS * DIM)], [torch.bfloat16]),
    ([(2, LAYERS * TOKENS * DIM, 1, HEADS)], [torch.bfloat16]),
    ([(CHUNK,)], [torch.uint8]), ([], [])])
def test_what_is_not_understood_is_kept_to_the_byte(tmp_path, shapes, dtypes):
    from kvtier.lmcache_adapter import _Learner
    made = _Learner(**params(tmp_path))
    made.learn([torch.Size(shape) for shape in shapes], dtypes)
    assert not made.shape(CHUNK).coded
    made.close()


def test_the_geometry_of_the_page_is_taken(tmp_path):
    """As docs/engines/lmcache.md shows it: chunks of 256 tokens of an 8B model are coded."""
    page = (shown.PAGES / "lmcache.md").read_text()
    given = json.loads("{" + re.search(r"```json\n(.*?)```", page, re.S)[1] + "}")
    made = KvtierConnector(**{**given["adapter_params"], **params(tmp_path / "store")})
    assert made.shape(256 * 32 * 2 * 8 * 128 * 2).coded
    made.close()


# ---- the whole of it ----

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`lmcache server` with the connector as its second level."""

    def __init__(self, store, log):
        self.port, self.log = free_port(), log
        page = shown.command("lmcache", "lmcache", "server")
        adapter = shown.told(page, "--l2-adapter")
        adapter["adapter_params"] |= params(store, level="raw")
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from lmcache.cli.main import main; "
             "sys.exit(main())", *shown.changed(page, l1_size_gb=1, l2_adapter=adapter)[1:],
             "--host", "127.0.0.1", "--port", str(self.port), "--http-host", "127.0.0.1",
             "--http-port", str(free_port()), "--chunk-size", "64", "--supported-transfer-mode",
             "engine_driven"], stdout=open(log, "wb"),
            stderr=subprocess.STDOUT, env={**os.environ, "LMCACHE_TRACK_USAGE": "false",
                                           "LMCACHE_LOG_LEVEL": "DEBUG"})

    def until_stored(self, count):
        """Until so many chunks are; LMCache queues them for its second level."""
        for _ in range(6000):
            said = re.findall(r"kvtier: (\d+) chunks of \d+ bytes stored",
                              self.log.read_text(errors="replace"))
            if sum(map(int, said)) >= count:
                return
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-6000:]
            time.sleep(0.1)
        raise AssertionError(f"{count} chunks are not stored: " +
                             self.log.read_text(errors="replace")[-6000:])

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(300)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def ask(server, model, prompts):
    done = subprocess.run(
        [sys.executable, HERE / "lmcache_child.py"], capture_output=True, text=True, timeout=1500,
        input=json.dumps({"model": model, "port": server.port, "pid": server.process.pid,
                          "ask": prompts}), env={
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1", "LMCACHE_MP_TRANSFER_MODE": "engine_driven",
            "LMCACHE_TRACK_USAGE": "false"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:] + \
        server.log.read_text(errors="replace")[-3000:]
    return json.loads(done.stdout.strip().rsplit("\n", 1)[-1])["answers"]


@pytest.fixture
def tiny(tmp_path):
    """Weights large enough that the content of the cache decides the output."""
    from transformers import LlamaConfig, LlamaForCausalLM
    where = tmp_path / "tiny"
    torch.manual_seed(SEED % (1 << 31))
    LlamaForCausalLM(LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=1024, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, initializer_range=0.15,
    )).to(torch.float32).save_pretrained(where)
    return str(where)


def test_vllm_finds_its_prompt_after_a_restart_of_the_server(tiny, tmp_path):
    """vLLM stores into LMCache's server, that into kvtier; both are ended. A new server and a new
    vLLM answer from disk, with the tokens and log-probabilities of a hit of vLLM's own prefix
    cache, bit for bit."""
    pytest.importorskip("vllm")
    prompt = [random.Random(SEED + i).randrange(3, 1000) for i in range(400)]
    server = Server(tmp_path / "store", tmp_path / "first.log")
    try:
        cold, native = ask(server, tiny, [prompt, prompt])
        assert cold["cached"] == 0 and native["cached"] == 384
        server.until_stored(384 // 64)
        assert re.search(r"kvtier: chunks of \d+ bytes, coded, \d+ stored, namespace",
                         server.log.read_text(errors="replace"))
    finally:
        server.stop()
    server = Server(tmp_path / "store", tmp_path / "second.log")
    try:
        hit, = ask(server, tiny, [prompt])
    finally:
        server.stop()
    assert hit["cached"] == 384
    assert (hit["tokens"], hit["logprobs"]) == (native["tokens"], native["logprobs"])
