"""Goal: kvtier.transformers gives a model's prompts back, bit for bit at raw, and touches nothing
that it does not understand. Method: the real transformers with a tiny Llama of random weights,
whose output depends on its cache (a poison check shows it), in float32; SmolLM2, where it is there
(KVT_TEST_HF), cold, from DRAM and from disk in a new process."""
import json
import math
import os
import pathlib
import random
import subprocess
import sys

import pytest
from conftest import SEED, need

need("transformers", "torch")
hf = need("transformers", "transformers")
import torch  # noqa: E402

import kvtier  # noqa: E402
from kvtier import _engines, transformers as adapter  # noqa: E402

BLOCK = 16
torch.set_num_threads(1)  # its threads spin: two of them on a busy machine are slower than one


def tiny(**changes):
    """Weights large enough that the content of the cache decides the output."""
    torch.manual_seed(SEED % (1 << 31))
    config = hf.LlamaConfig(**{**dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, initializer_range=0.15),
        **changes})
    return hf.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


def prompt(n, seed=1):
    torch.manual_seed(seed)
    return torch.randint(3, 500, (1, n))


def ask(model, ids, **more):
    return model.generate(ids, max_new_tokens=12, do_sample=False,
                          attention_mask=torch.ones_like(ids), pad_token_id=0, **more)


def raw(**more):
    return dict(dram="64MiB", level="raw", env=False, threads=1, plan="off", **more)


def test_contract():
    """Every name and signature of transformers that is used; drift is said here."""
    assert _engines.get("transformers").drift() == []


def test_a_prompt_comes_back_from_dram_with_the_same_tokens(model):
    ids = prompt(100)
    cold = ask(model, ids)
    with adapter.cached(model, **raw()) as prefixes:
        first = ask(model, ids)
        prefixes.sync()
        second = ask(model, ids)
    assert torch.equal(cold, first) and torch.equal(cold, second)
    assert prefixes.counters["restore.miss"] == 1 and prefixes.counters["restore.off"] == 1
    assert prefixes.counters["tokens.restored"] == 96
    assert model.generate.__func__ is hf.LlamaForCausalLM.generate  # nothing is left behind


def test_a_longer_prompt_loads_its_known_beginning_and_adds_the_rest(model):
    ids = prompt(200)
    with adapter.cached(model, **raw()) as prefixes:
        ask(model, ids[:, :80])
        prefixes.sync()
        before = prefixes.counters["tokens.restored"]
        out = ask(model, ids)
        prefixes.sync()
        assert prefixes.counters["tokens.restored"] - before == 80
        assert prefixes.ns.lookup(prefixes.keys(ids[0].tolist())).n == 200 // BLOCK
    assert torch.equal(out, ask(model, ids))


def test_what_is_restored_is_bit_for_bit_what_was_computed(model):
    ids = prompt(130)
    with torch.no_grad():
        exact = model(ids, use_cache=True).past_key_values
    with kvtier.Cache(raw()) as cache:
        prefixes = adapter.Prefixes(model, cache)
        assert prefixes.save(ids[0].tolist(), exact) == 8
        prefixes.sync()
        restored = prefixes.restore(ids[0].tolist())
        assert (restored.tokens, restored.past.get_seq_length()) == (128, 128)
        for a, b in zip(exact.layers, restored.past.layers):
            assert torch.equal(a.keys[:, :, :128], b.keys)
            assert torch.equal(a.values[:, :, :128], b.values)
        prefixes.close()


def test_the_output_depends_on_the_cache(model):
    """Else all tests here would prove nothing."""
    ids = prompt(100)
    with kvtier.Cache(raw()) as cache:
        prefixes = adapter.Prefixes(model, cache)
        with torch.no_grad():
            past = model(ids, use_cache=True).past_key_values
        for layer in past.layers:
            layer.values.zero_()
        prefixes.save(ids[0].tolist(), past)
        prefixes.sync()
        poisoned = prefixes.restore(ids[0].tolist())
        assert poisoned.tokens == 96
        assert not torch.equal(ask(model, ids, past_key_values=poisoned.past), ask(model, ids))
        prefixes.close()


def test_another_model_prompt_or_salt_finds_nothing(model):
    ids = prompt(64)
    other = tiny(rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    with kvtier.Cache(raw()) as cache:
        with adapter.cached(model, cache):
            ask(model, ids)
        for changed in (dict(model=other), dict(salt=b"tenant"), dict(revision="r2"),
                        dict(adapter="lora"), dict(block_tokens=32)):
            changed = {"model": model, **changed}
            one = changed.pop("model")
            again = adapter.Prefixes(one, cache, **changed)
            assert again.restore(ids[0].tolist()).tokens == 0, changed
            again.close()
        same = adapter.Prefixes(model, cache)
        assert same.restore(ids[0].tolist()).tokens == 48
        assert same.restore(prompt(64, seed=2)[0].tolist()).tokens == 0
        assert same.ns.id == prefixes_id(model, cache)
        same.close()


def prefixes_id(model, cache):
    made = adapter.Prefixes(model, cache)
    number = made.ns.id
    made.close()
    return number


def test_the_plan_knows_how_fast_the_model_is(model):
    with adapter.cached(model, **raw(calibrate=False)) as prefixes:
        assert prefixes.cache.stat("plan.prefills") == 0
        prefixes.calibrate()
        assert prefixes.cache.stat("plan.prefills") >= 1
        assert prefixes.cache.stat("plan.prefills_refused") == 0
        before = prefixes.cache.stat("plan.prefills")
        ask(model, prompt(40))
        assert prefixes.cache.stat("plan.prefills") == before + 1


def test_weights_that_differ_in_one_bit_have_another_digest():
    one, two = tiny(), tiny()
    assert adapter.weights_digest(one) == adapter.weights_digest(two)
    with torch.no_grad():
        next(two.parameters()).view(-1)[7] += 1e-3
    assert adapter.weights_digest(one) != adapter.weights_digest(two)


@pytest.mark.parametrize("more, reason", [
    (dict(num_beams=2), "num_beams"), (dict(num_return_sequences=2, do_sample=True),
                                       "num_return_sequences"),
    (dict(use_cache=False), "use_cache"), (dict(prompt_lookup_num_tokens=3),
                                           "prompt_lookup_num_tokens"),
    (dict(past_key_values="own"), "own_cache"), (dict(attention_mask="left"), "masked"),
    (dict(batch=2), "batch"), (dict(cache_implementation="static"), "cache_implementation")])
def test_calls_that_are_not_plain_pass_untouched(model, more, reason):
    ids = prompt(40)
    if more.pop("batch", 1) == 2:
        ids = torch.cat([ids, ids + 1])
    mask = torch.ones_like(ids)
    if more.get("attention_mask") == "left":
        mask[:, :5] = 0
    more.pop("attention_mask", None)

    def call():
        torch.manual_seed(5)
        own = dict(more, past_key_values=hf.DynamicCache(config=model.config)) \
            if "past_key_values" in more else more
        return model.generate(ids, attention_mask=mask, max_new_tokens=5, pad_token_id=0,
                              **{"do_sample": False, **own})

    plain = call()
    with adapter.cached(model, **raw()) as prefixes:
        assert torch.equal(call(), plain)
    assert prefixes.counters == {f"passed.{reason}": 1}


def test_the_digest_is_made_once_for_as_long_as_the_weights_stay(monkeypatch):
    """In place, through .data as adapters are merged, and by another tensor in its place."""
    from kvtier import transformers as ours
    made, real = [], ours.weights_digest
    monkeypatch.setattr(ours, "weights_digest", lambda m: made.append(1) or real(m))
    model = tiny()
    first = ours.remembered_digest(model)
    assert ours.remembered_digest(model) == first == real(model) and len(made) == 1
    weight = model.model.layers[0].self_attn.k_proj.weight
    changes = [lambda: weight.detach()[0, 0].add_(1), lambda: weight.data.mul_(1.5),
               lambda: setattr(weight, "data", weight.data.clone())]
    for number, change in enumerate(changes, 2):
        change()
        assert ours.remembered_digest(model) == real(model) and len(made) == number
    assert ours.remembered_digest(tiny()) == first and len(made) == 5


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shape", [(3,), (7, 11), (130, 257)])  # of a row, and of several
def test_every_element_that_changes_is_seen(offset, shape):
    """Through .data, which counts nothing: one of them, and two that change places."""
    count = math.prod(shape)
    weight = torch.randn(count + offset, generator=torch.Generator().manual_seed(1))[offset:]
    weight = weight.view(shape)
    seen = {adapter._sums(weight)}
    order = random.Random(SEED).sample(range(count), min(count, 40))
    for at, other in zip(order, order[1:]):
        was = weight.data.view(-1)[at].clone()
        weight.data.view(-1)[at] = was.nextafter(torch.tensor(9.0))
        seen.add(adapter._sums(weight))
        weight.data.view(-1)[at] = weight.data.view(-1)[other]
        weight.data.view(-1)[other] = was
        seen.add(adapter._sums(weight))
    assert len(seen) == 1 + 2 * (len(order) - 1)


def test_models_that_cannot_be_served_say_why():
    with pytest.raises(kvtier.UnsupportedError, match="SlidingWindow"):
        mistral = hf.MistralForCausalLM(hf.MistralConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=64, sliding_window=32))
        with adapter.cached(mistral, **raw()):
            pass
    with pytest.raises(kvtier.UnsupportedError, match="encoder"):
        with adapter.cached(hf.T5ForConditionalGeneration(hf.T5Config(
                d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=64)), **raw()):
            pass
    with pytest.raises(kvtier.ConfigError, match="dramm"):
        with adapter.cached(tiny(), dramm="1GiB"):
            pass
    lora = tiny()
    lora.peft_config = {"default": object()}
    with pytest.raises(kvtier.UnsupportedError, match="adapter="):
        with adapter.cached(lora, **raw()):
            pass


def test_a_store_that_is_gone_is_a_miss_and_generate_goes_on(model):
    ids = prompt(64)
    with adapter.cached(model, **raw()) as prefixes:
        plain = ask(model, ids)
        prefixes.sync()
        prefixes.cache.enable(False)
        assert torch.equal(ask(model, ids), plain)
        prefixes.cache.enable(True)
        prefixes.ns.close()
        assert torch.equal(ask(model, ids), plain)
        assert prefixes.counters["restore.error"] == 1 and prefixes.counters["save.error"] == 1
        prefixes.ns = prefixes.cache.namespace(kvtier.Identity("x", model="y"), prefixes.layout)


def test_restored_lossy_blocks_are_never_stored_again(model):
    ids = prompt(100)
    with kvtier.Cache(dict(raw(), level="kv4")) as cache:
        with adapter.cached(model, cache, level="kv4", window_tokens=0) as prefixes:
            ask(model, ids)
            prefixes.sync()
            keys = prefixes.keys(ids[0].tolist())
            assert prefixes.ns.lookup(keys).n == 6
            prefixes.ns.purge(keys[3:])
            out = prefixes.restore(ids[0].tolist())
            assert out.tokens == 3 * BLOCK
            purged = prefixes.restore(ids[0].tolist())
            prefixes.ns.purge(keys[:3])
            assert prefixes.save(ids[0].tolist(), purged.past, purged.tokens) == 0
            assert prefixes.ns.lookup(keys).n == 0


def test_most_of_a_prompt_is_at_the_level_by_default(model):
    """The window of kv8 is a sixteenth of a prompt, not all of it."""
    ids = prompt(600)
    with torch.no_grad():
        exact = model(ids, use_cache=True)
    with kvtier.Cache(dict(raw(), level="kv4")) as cache:
        shares = []
        for number, window in enumerate((None, 4096, 0)):
            prefixes = adapter.Prefixes(model, cache, level="kv4", window_tokens=window,
                                        salt=b"%d" % number)
            before = cache.stats()
            prefixes.save(ids[0].tolist(), exact.past_key_values)
            prefixes.sync()
            coded, plain = (cache.stats()[f"client.store_{what}"] - before[f"client.store_{what}"]
                            for what in ("bytes", "logical_bytes"))
            shares.append(coded / plain)
            prefixes.close()
        # 8 blocks of 37 at kv8, all of them, none
        assert shares[2] < shares[0] < shares[2] + 0.3 * (shares[1] - shares[2]), shares


def test_kv8_agrees_with_the_exact_cache(model):
    ids = prompt(600)
    with torch.no_grad():
        exact = model(ids, use_cache=True)
    with kvtier.Cache(raw()) as cache:
        prefixes = adapter.Prefixes(model, cache, level="kv8", window_tokens=0)
        prefixes.save(ids[0].tolist(), exact.past_key_values)
        prefixes.sync()
        restored = prefixes.restore(ids[0, :320].tolist())
        with torch.no_grad():
            tail = model(ids[:, restored.tokens:], past_key_values=restored.past)
        same = (tail.logits.argmax(-1) == exact.logits[:, restored.tokens:].argmax(-1))
        assert same.float().mean() > 0.9
        prefixes.close()


# ---- a real model ----

SMOL = os.environ.get("KVT_TEST_HF", "")
TEXT = pathlib.Path(__file__).resolve().parents[2] / "README.md"
PROGRAM = """
import json, time, torch, transformers as hf, kvtier
from kvtier.transformers import cached
torch.set_num_threads(1)
model = hf.AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32).eval()
tokens = hf.AutoTokenizer.from_pretrained({model!r})
ids = tokens({text!r}, return_tensors="pt").input_ids[:, :{n}]
cache = kvtier.Cache(dram="512MiB", disk="{disk}:2GiB", env=False, threads=1, plan="off")
for level in ("raw", "kv4"):
    with cached(model, cache, level=level, salt=level.encode(), revision="smol", calibrate=False,
                window_tokens=64) as p:
        out = dict(level=level)
        for turn in ("first", "second"):
            start = time.perf_counter()
            model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
            out[turn] = time.perf_counter() - start
            p.sync()
        answer = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        out["answer"] = answer[0, {n}:].tolist()
        out["counters"] = dict(p.counters)
    print(json.dumps(out))
cache.close()
"""


@pytest.mark.skipif(not SMOL, reason="KVT_TEST_HF names no model folder")
def test_smollm2_cold_dram_and_disk_after_a_restart(tmp_path):
    text = PROGRAM.format(model=SMOL, text=TEXT.read_text()[:6000], n=320, disk=tmp_path / "kv")
    env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append([json.loads(line) for line in done.stdout.splitlines()[-2:]])
    for cold, warm in zip(*runs):
        print(f"smollm2 {cold['level']}: cold {cold['first']:.2f} s, DRAM {cold['second']:.3f} s, "
              f"after a restart {warm['first']:.3f} s")
        assert cold["counters"]["restore.miss"] == 1 and "restore.miss" not in warm["counters"]
        assert warm["counters"]["tokens.restored"] == 3 * 304
        same = sum(a == b for a, b in zip(warm["answer"], cold["answer"]))
        assert same >= (12 if cold["level"] == "raw" else 6), (warm["answer"], cold["answer"])
