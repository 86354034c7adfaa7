"""Goal: python -m kvtier.llama_server speaks OpenAI's HTTP, remembers prompts across a restart, and
ends in order. Method: the real server in a process of its own, over sockets of the standard
library; two clients at a time; mistakes of clients; a client that leaves; SIGTERM while it
answers."""
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import absent, gguf

from kvtier import _engines, _openai

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text()


class Server:
    """A running server; its log is in `log`."""

    def __init__(self, tmp_path, *more):
        self.log = open(tmp_path / "server.log", "a+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.llama_server", "--model", gguf(), "--port", "0",
             "--n-ctx", "2048", "--threads", "1", "--disk", f"{tmp_path}/kv:256MiB", "--config",
             "env=no,threads=1,plan=off", *more], stdout=subprocess.PIPE, stderr=self.log,
            text=True)
        line = self.process.stdout.readline()
        assert "http://" in line, (line, self.text())
        self.address = line.rsplit("/", 2)[1].split(":")
        self.address = (self.address[0], int(self.address[1]))

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def connect(self):
        return http.client.HTTPConnection(*self.address, timeout=120)

    def call(self, method, path, body=None, headers=None, raw=False):
        connection = self.connect()
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return (answer, text) if raw else (answer.status, json.loads(text))

    def complete(self, prompt, n=4, **more):
        return self.call("POST", "/v1/completions",
                         dict(prompt=prompt, max_tokens=n, temperature=0, **more))

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.process.stdout.close()
        self.log.close()
        return code


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if why := _engines.get("llama-cpp-python").needs():
        absent("llama-cpp-python", why)
    made = Server(tmp_path_factory.mktemp("server"), "--queue", "2", "--grace", "20")
    yield made
    assert made.stop() == 0


def events(text):
    """The data of a stream of server-sent events."""
    blocks = [block for block in text.decode().split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks), blocks
    return [block.removeprefix("data: ") for block in blocks]


# ---- the form of requests, without a server ----

@pytest.mark.parametrize("chat, body, param", [
    (False, {"prompt": 5}, "prompt"), (False, {}, "prompt"), (False, {"prompt": ["a", "b"]},
                                                              "prompt"),
    (False, {"prompt": ""}, "prompt"), (False, {"prompt": [""]}, "prompt"),
    (False, {"prompt": "a", "n": 2}, "n"), (False, {"prompt": "a", "best_of": 2}, "best_of"),
    (False, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (False, {"prompt": "a", "temperature": -1}, "temperature"),
    (False, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (False, {"prompt": "a", "max_tokens": True}, "max_tokens"),
    (False, {"prompt": "a", "logprobs": 3}, "logprobs"),
    (False, {"prompt": "a", "logprobs": 0}, "logprobs"),
    (True, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
    (False, {"prompt": [7, 2**31]}, "prompt"), (False, {"prompt": [1, -2]}, "prompt"),
    (True, {}, "messages"), (True, {"messages": []}, "messages"),
    (True, {"messages": ["hi"]}, "messages[0].role"),
    (True, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (True, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content"),
    (True, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content")])
def test_mistakes_name_their_parameter(chat, body, param):
    with pytest.raises(_openai.ApiError) as caught:
        _openai.parse(body, chat)
    assert caught.value.status == 400 and caught.value.param == param
    assert set(caught.value.body()["error"]) == {"message", "type", "param", "code"}


def test_what_is_understood_and_what_is_left_out():
    out = _openai.parse({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "user": "me",
        "store": True, "max_completion_tokens": 7, "model": "any", "stream_options": {"include_usage": True},
        "temperature": 0}, chat=True)
    assert out == {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 7,
                   "temperature": 0, "_usage": True}
    assert _openai.parse({"prompt": ["one"]}, chat=False)["prompt"] == "one"
    assert _openai.parse({"prompt": [[1, 2]], "stop": "x"}, chat=False) == {
        "prompt": [1, 2], "stop": "x", "max_tokens": 16, "_usage": False}
    with pytest.raises(_openai.ApiError):
        _openai.parse([1], chat=True)


# ---- over HTTP ----

def test_health_models_and_stats(server):
    assert server.call("GET", "/health") == (200, {"status": "ok"})
    status, listed = server.call("GET", "/v1/models")
    name = listed["data"][0]["id"]
    assert status == 200 and listed["object"] == "list" and name.endswith(".gguf")
    assert server.call("GET", f"/v1/models/{name}")[1]["id"] == name
    assert "llama.restores" in server.call("GET", "/stats")[1]


def test_completion_and_chat(server):
    status, answer = server.complete(TEXT[:300], n=6)
    assert status == 200 and answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] in range(1, 7)
    assert answer["usage"]["total_tokens"] == (answer["usage"]["prompt_tokens"] +
                                               answer["usage"]["completion_tokens"])
    status, answer = server.call("POST", "/v1/chat/completions", dict(
        messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0))
    assert status == 200 and answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"]


def test_streams_are_server_sent_events_that_add_up(server):
    body = dict(messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0)
    whole = server.call("POST", "/v1/chat/completions", body)[1]
    answer, text = server.call("POST", "/v1/chat/completions", dict(
        body, stream=True, stream_options={"include_usage": True}), raw=True)
    assert answer.getheader("Content-Type").startswith("text/event-stream")
    *chunks, done = events(text)
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert said == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] > 0
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    answer, text = server.call("POST", "/v1/completions", dict(
        prompt=TEXT[:300], max_tokens=5, temperature=0, stream=True), raw=True)
    assert events(text)[-1] == "[DONE]"


def test_errors_are_in_openai_s_form(server):
    for method, path, body, headers, status, code in (
            ("GET", "/nothing", None, {}, 404, "not_found"),
            ("POST", "/v1/nothing", {}, {}, 404, "not_found"),
            ("PUT", "/v1/completions", {}, {}, 405, "method_not_allowed"),
            ("POST", "/v1/completions", b"{broken", {}, 400, None),
            ("POST", "/v1/completions", b"\xff\xfe", {}, 400, None),
            ("POST", "/v1/completions", {"prompt": 1}, {}, 400, None),
            ("POST", "/v1/completions", {"prompt": "word " * 3000}, {}, 400,
             "context_length_exceeded"),
            ("POST", "/v1/completions", {"prompt": "word " * 3000, "stream": True}, {}, 400,
             "context_length_exceeded"),
            ("POST", "/v1/completions", None, {"Content-Length": str(1 << 40)}, 413, None)):
        got, answer = server.call(method, path, body, headers)
        assert (got, answer["error"]["code"]) == (status, code), (path, answer)
        assert answer["error"]["message"] and answer["error"]["type"]
    assert server.complete("still there", n=1)[0] == 200


def test_two_clients_at_a_time_get_their_own_answers(server):
    prompts = [TEXT[:400], TEXT[1000:1500]]
    alone = [server.complete(prompt)[1] for prompt in prompts]
    counts = [answer["usage"]["prompt_tokens"] for answer in alone]
    assert counts[0] != counts[1]
    answers = [[], []]

    def client(i):
        for _ in range(2):
            answers[i].append(server.complete(prompts[i])[1])

    threads = [threading.Thread(target=client, args=(i,)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for i in range(2):
        assert [answer["usage"]["prompt_tokens"] for answer in answers[i]] == [counts[i]] * 2
        for answer in answers[i]:  # each prompt was loaded, or was in the context still
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= counts[i] - 16
            assert answer["choices"][0]["text"]


def test_most_of_a_prompt_is_at_kv4_by_default(server):
    """The window of kv8 is a sixteenth of the context, not all of it."""
    def stored():
        stats = server.call("GET", "/stats")[1]
        return [stats[f"client.store_{what}"] for what in ("bytes", "logical_bytes", "blocks")]
    before = stored()
    status, answer = server.complete("Something else first. " + TEXT[2000:5000], n=1)
    blocks = answer["usage"]["prompt_tokens"] // 16
    end = time.monotonic() + 60
    while stored()[2] < before[2] + blocks:
        assert status == 200 and time.monotonic() < end
        time.sleep(0.1)
    coded, raw = [a - b for a, b in zip(stored(), before)][:2]
    assert 0.25 < coded / raw < 0.4, (coded, raw)


def test_who_waits_is_bounded(server):
    results = []

    def client():
        results.append(server.complete(TEXT[:100], n=24)[0])

    threads = [threading.Thread(target=client) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert set(results) == {200, 429} and results.count(200) >= 3, results


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(server, stream):
    gone = server.call("GET", "/stats")[1]["server.gone"]
    body = json.dumps(dict(prompt=TEXT[:200], max_tokens=1500, stream=stream,
                           logit_bias={"0": -100, "2": -100})).encode()  # it does not end itself
    with socket.create_connection(server.address) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
                    % (len(body), body))
        end = time.monotonic() + 60
        while not stream and server.call("GET", "/stats")[1]["server.waiting"] == 0:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert not stream or raw.recv(100).startswith(b"HTTP/1.1 200")
    start = time.monotonic()
    assert server.complete("next", n=1)[0] == 200
    if stream:
        assert time.monotonic() - start < 60  # 1,500 tokens would take longer
    else:
        assert server.call("GET", "/stats")[1]["server.gone"] == gone + 1


def test_a_restart_loads_the_prompt_from_disk(tmp_path):
    if why := _engines.get("llama-cpp-python").needs():
        absent("llama-cpp-python", why)
    prompt, seen = TEXT[:1500], []
    for _ in range(2):
        one = Server(tmp_path, "--api-key", "secret")
        assert one.complete(prompt)[0] == 401
        headers = {"Authorization": "Bearer secret"}
        start = time.monotonic()
        status, answer = one.call("POST", "/v1/completions", dict(
            prompt=prompt, max_tokens=1, temperature=0), headers)
        seen.append((answer["usage"]["prompt_tokens_details"]["cached_tokens"],
                     time.monotonic() - start))
        assert status == 200
        # a signal while it answers: the answer comes, then the server ends in order
        late = []
        thread = threading.Thread(target=lambda: late.append(one.call(
            "POST", "/v1/completions", dict(prompt=prompt, max_tokens=20), headers)[0]))
        thread.start()
        end = time.monotonic() + 60
        while not late and one.call("GET", "/stats", headers=headers)[1]["server.waiting"] == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert one.stop() == 0
        thread.join()
        assert late == [200]
    print(f"cold {seen[0][1]:.2f} s, after a restart {seen[1][1]:.2f} s")
    assert seen[0][0] == 0 and seen[1][0] > 400


def test_what_cannot_start_says_why(tmp_path):
    if why := _engines.get("llama-cpp-python").needs():
        absent("llama-cpp-python", why)
    for more, words in ((["--model", str(tmp_path / "none")], "none"),
                        (["--model", gguf(), "--config", "dramm=1"], "dramm"),
                        (["--model", gguf(), "--level", "kv7"], "kv7")):
        done = subprocess.run([sys.executable, "-m", "kvtier.llama_server", *more],
                              capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 1 and words in done.stderr, done.stderr[-500:]
        assert "Traceback" not in done.stderr
