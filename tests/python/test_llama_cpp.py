"""Goal: kvtier.llama_cpp.Llama is llama_cpp.Llama whose prompts come back: the same tokens, after
other work and after a restart, and nothing that it does not understand.
Method: the real llama_cpp with SmolLM2 (KVT_TEST_MODEL, or that of scripts/fetch-model.sh), one
thread, greedy."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import absent, gguf

from kvtier import _engines, _llama

ENGINE = _engines.get("llama-cpp-python")
if ENGINE.needs():
    absent("llama-cpp-python", ENGINE.needs())
import llama_cpp  # noqa: E402

import kvtier  # noqa: E402
from kvtier.llama_cpp import Llama  # noqa: E402

MODEL = gguf()
TEXT = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text()
THREADS = dict(n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)


def options(**more):
    return dict(dram="128MiB", level="raw", env=False, threads=1, plan="off", **more)


@pytest.fixture(scope="module")
def llm():
    made = Llama(MODEL, kvtier=options(), kvtier_calibrate=0, **THREADS)
    yield made
    made.close()


def ask(llm, prompt, n=8, **more):
    return llm.create_completion(prompt, max_tokens=n, temperature=0, **more)["choices"][0]["text"]


@pytest.fixture(scope="module")
def native():
    """What llama_cpp itself says when it reuses `cached` tokens of a prompt that it computed. Not
    what it says cold: with int8 activations another size of batch rounds in another way, and a
    small model's choice may flip (docs/llama.md)."""
    plain = llama_cpp.Llama(MODEL, flash_attn=True, **THREADS)

    def answer(prompt, cached):
        plain.reset()
        ask(plain, prompt, n=1)
        plain.n_tokens = cached  # its own prefix match truncates the context to this
        return ask(plain, prompt)

    yield answer
    plain.close()


def test_contract():
    """Every name and signature of llama_cpp that is used; drift is said here."""
    assert ENGINE.drift() == []


def test_there_is_one_llama_in_the_process(llm):
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "libllama.so" in line}) == 1
    assert isinstance(llm, llama_cpp.Llama)


def test_prompts_come_back_after_other_work(llm, native):
    ask(llm, TEXT[:700])
    llm.kvtier_sync()
    assert llm.kvtier_last["cached_tokens"] == 0
    ask(llm, TEXT[2000:2200])  # takes the context
    before = llm.kvtier_stats()["llama.restored_tokens"]
    answer, last = ask(llm, TEXT[:700]), llm.kvtier_last
    assert answer == native(TEXT[:700], last["cached_tokens"])
    assert last["cached_tokens"] >= last["prompt_tokens"] - 16
    assert llm.kvtier_stats()["llama.restored_tokens"] - before == last["cached_tokens"]


def test_what_the_context_holds_is_not_loaded_again(llm):
    ask(llm, TEXT[:700])
    before = llm.kvtier_stats()["llama.restores"]
    assert ask(llm, TEXT[:700] + " And so")
    assert llm.kvtier_stats()["llama.restores"] == before
    assert llm.kvtier_last["cached_tokens"] > 100


def test_what_the_context_holds_stays_where_the_plan_would_compute():
    """A machine that computes 10^8 tokens a second loads nothing, and keeps what it has."""
    fast = Llama(MODEL, kvtier=dict(options(), plan="deterministic", plan_prefill="100000000"),
                 kvtier_calibrate=0, **THREADS)
    prompt = fast.tokenize(TEXT.encode())[:200]
    ask(fast, prompt, n=1)
    fast.kvtier_sync()
    ask(fast, prompt[:70] + prompt[100:160], n=1)
    before = fast.kvtier_stats()["llama.restores"]
    assert fast.kvtier_restore(prompt) == 70
    assert fast.kvtier_stats()["llama.restores"] == before and fast.n_tokens > 70
    ask(fast, prompt, n=1)
    assert fast.kvtier_last["cached_tokens"] == 70
    fast.close()


def test_a_prompt_that_waits_is_brought_from_disk(tmp_path):
    """By the server's thread that waits for the engine: the same tokens as the engine computes
    from, of a text and of a chat."""
    from kvtier import _serving
    chat = {"messages": [{"role": "system", "content": TEXT[:600]},
                         {"role": "user", "content": "Hello"}]}
    text = {"prompt": TEXT[:500]}
    disk = options(disk=f"{tmp_path}/store:256MiB")
    first = Llama(MODEL, kvtier=disk, kvtier_calibrate=0, **THREADS)
    for arguments, is_chat in ((chat, True), (text, False)):
        call = first.create_chat_completion if is_chat else first.create_completion
        call(max_tokens=1, **arguments)
        tokens = _serving.prompt_tokens(first, arguments, is_chat)
        assert list(first.input_ids[:len(tokens)]) == tokens
        assert first.kvtier_last["prompt_tokens"] == len(tokens)
    first.close()
    again = Llama(MODEL, kvtier=disk, kvtier_calibrate=0, **THREADS)
    engine = _serving.Engine(again, "m", 4)
    engine.prefetch(chat, True)
    assert engine.prefetched == 0  # nobody has the engine: it is this one's turn
    ticket = engine.take()
    engine.prefetch(chat, True)
    engine.prefetch({"prompt": "Never seen before, " * 20}, False)
    engine.prefetch({"prompt": object()}, False)
    assert engine.prefetched == 1
    engine.give(ticket)
    again.create_chat_completion(max_tokens=1, **chat)
    assert again.kvtier_last["cached_tokens"] > 100
    again.close()


def test_a_conversation_goes_on(llm):
    turns = [{"role": "user", "content": "Name a colour. " + TEXT[:300]}]
    for _ in range(2):
        answer = llm.create_chat_completion(turns, max_tokens=8, temperature=0)
        turns += [answer["choices"][0]["message"], {"role": "user", "content": "Another one."}]
    assert llm.kvtier_last["cached_tokens"] > 60
    assert len([*llm.create_chat_completion(turns, max_tokens=3, temperature=0, stream=True)]) > 2


def test_a_stream_that_is_left_is_saved_too(llm):
    stream = llm.create_completion(TEXT[3000:3600], max_tokens=20, temperature=0, stream=True)
    next(stream)
    stream.close()
    llm.kvtier_sync()
    ask(llm, "x")
    ask(llm, TEXT[3000:3600], n=1)
    assert llm.kvtier_last["cached_tokens"] >= llm.kvtier_last["prompt_tokens"] - 16


def test_two_models_on_one_cache_and_salts():
    with kvtier.Cache(options()) as cache:
        one = Llama(MODEL, kvtier=cache, kvtier_calibrate=0, **THREADS)
        ask(one, TEXT[:500], n=1)
        one.kvtier_sync()
        for more, found in ((dict(), True), (dict(kvtier_salt=b"tenant"), False),
                            (dict(kvtier_block_tokens=32), False), (dict(rope_freq_base=20000.0),
                                                                    False)):
            two = Llama(MODEL, kvtier=cache, kvtier_calibrate=0, **{**THREADS, **more})
            ask(two, TEXT[:500], n=1)
            assert (two.kvtier_last["cached_tokens"] > 0) == found, more
            two.close()
        one.close()


def test_what_cannot_be_is_refused_with_the_reason(tmp_path):
    for more, words in ((dict(embedding=True), "embedding"), (dict(flash_attn=False), "flash_attn"),
                        (dict(type_k=8, type_v=8), "f16")):
        with pytest.raises(kvtier.UnsupportedError, match=words):
            Llama(MODEL, kvtier=options(), **{**THREADS, **more})
    with pytest.raises(kvtier.ConfigError, match="dram"):
        Llama(MODEL, kvtier="dramm=1GiB", **THREADS)
    with pytest.raises(ValueError, match="does not exist"):
        Llama(str(tmp_path / "none.gguf"), kvtier=options(), **THREADS)


def test_a_closed_model_says_so():
    made = Llama(MODEL, kvtier=options(), kvtier_calibrate=0, **THREADS)
    made.close()
    made.close()
    with pytest.raises(kvtier.ClosedError):
        made.kvtier_sync()
    with pytest.raises(kvtier.ClosedError):
        made.kvtier_stats()


def test_a_store_that_is_gone_is_a_miss(llm):
    want = ask(llm, TEXT[:500])
    llm._kvt_cache.enable(False)
    try:
        ask(llm, "x", n=1)
        assert ask(llm, TEXT[:500]) == want and llm.kvtier_last["cached_tokens"] <= 2
    finally:
        llm._kvt_cache.enable(True)


@pytest.mark.parametrize("change, words", [
    (dict(LLAMA_CPP_PYTHON="0.0.1"), "0.0.1"), (dict(library="/nowhere/lib.so"), "/nowhere")])
def test_another_version_or_a_wheel_without_the_adapter_is_said(monkeypatch, change, words):
    if "library" in change:
        monkeypatch.setenv("KVTIER_LLAMA_LIBRARY", change["library"])
    else:
        monkeypatch.setattr(_llama, "LLAMA_CPP_PYTHON", change["LLAMA_CPP_PYTHON"])
    with pytest.raises(kvtier.LibraryError, match=words):
        _llama.provide_library()


PROGRAM = """
import json, sys, time
from kvtier.llama_cpp import Llama
llm = Llama({model!r}, kvtier=json.loads({options!r}), kvtier_calibrate=0, kvtier_level={level!r},
            kvtier_window_tokens=64, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
start = time.perf_counter()
text = llm.create_completion({text!r}, max_tokens=8, temperature=0)["choices"][0]["text"]
print(json.dumps(dict(text=text, seconds=time.perf_counter() - start, **llm.kvtier_last)))
llm.close()
"""


@pytest.mark.parametrize("level", ["raw", "kv4"])
def test_a_restart_finds_the_prompt_on_disk(tmp_path, level, native):
    text = PROGRAM.format(model=MODEL, options=json.dumps(options(disk=f"{tmp_path}/kv:256MiB")),
                          text=TEXT[:900], level=level)
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", text], env=dict(os.environ),
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    print(f"{level}: cold {cold['seconds']:.2f} s, after a restart {warm['seconds']:.2f} s")
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] >= warm["prompt_tokens"] - 16
    if level == "raw":
        assert warm["text"] == native(TEXT[:900], warm["cached_tokens"])
