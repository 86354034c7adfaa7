"""Goal: the server's HTTP bounds what a client may hold, computes nothing for one that is gone, and
tells mistakes as 4xx in OpenAI's form; it has its port before it has a model. Method: the real
server, queue and parser over sockets, with an engine in place of llama.cpp's that waits, counts
and looks as that one does; limits are made small for the tests that reach them."""
import http.client
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvtier import _http, _serving, llama_server
from kvtier._serving import Engine, Gone

PATIENCE_S = 60


class Llama:
    """Stands for llama.cpp: answers when `gate` is open, and looks before each step."""

    chat_format, _chat_handlers, abort = "none", {}, False
    kvtier_last = {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 2}

    def __init__(self):
        self.gate = threading.Event()
        self.begun, self.ended, self.closed = [], [], False

    def n_vocab(self):
        return 100

    def kvtier_stats(self):
        return {"llama.restores": 0}

    def kvtier_prefetch(self, tokens):
        return 0

    def tokenize(self, text, special=True):
        return list(text)

    def close(self):
        self.closed = True

    def _steps(self, prompt):
        self.begun.append(prompt)
        try:
            while not self.gate.wait(0.01):
                self.look()
                yield {"id": "a", "created": 1, "choices": [{"text": "x"}]}
        finally:
            self.ended.append(prompt)
        yield {"id": "a", "created": 1, "choices": [{"text": "end"}]}

    def create_completion(self, model=None, prompt=None, stream=False, **_):
        steps = self._steps(prompt)
        if stream:
            return steps
        for answer in steps:
            pass
        return dict(answer)

    def create_chat_completion(self, messages=None, **more):
        return self.create_completion(prompt=messages[-1]["content"], **more)


class Rig:
    def __init__(self, llama, queue=4):
        self.llama, self.engine = llama, Engine(llama, "m", queue)
        self.server = llama_server.make_server(self.engine, "127.0.0.1", 0)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever,
                                       kwargs={"poll_interval": 0.01})
        self.thread.start()

    def send(self, data):
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        raw.sendall(data)
        return raw

    def post(self, body, path="/v1/completions", more=""):
        return self.send(post(body, path, more))

    def close(self):
        self.llama and self.llama.gate.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def rig():
    made = Rig(Llama())
    yield made
    made.close()


def post(body, path="/v1/completions", more=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(data)}\r\n\r\n"
            .encode() + data)


def answer(raw):
    """(status, body) of what comes; (0, b"") when the other end only closes."""
    with raw:
        got = http.client.HTTPResponse(raw)
        try:
            got.begin()
        except (ConnectionError, http.client.HTTPException):
            return 0, b""
        text = got.read()
        return got.status, json.loads(text) if text.startswith(b"{") else text


def until(true, what):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


# ---- who has hung up is not computed ----

def test_who_hangs_up_while_it_waits_is_not_computed(rig):
    first = rig.post({"prompt": "first"})
    until(lambda: rig.llama.begun == ["first"], "the first one has begun")
    gone = [rig.post({"prompt": "gone"}) for _ in range(3)]
    last = rig.post({"prompt": "last"})
    until(lambda: rig.engine.waiting() == 5, "all wait")
    [one.close() for one in gone]
    until(lambda: rig.engine.waiting() == 2, "those that are gone have left the queue")
    rig.llama.gate.set()
    assert answer(first)[0] == 200 and answer(last)[0] == 200
    assert rig.llama.begun == ["first", "last"]
    assert rig.engine.stats()["server.gone"] == 3


def test_a_full_queue_has_room_again_when_who_waits_hangs_up(rig):
    first = rig.post({"prompt": "first"})
    until(lambda: rig.llama.begun == ["first"], "the first one has begun")
    gone = [rig.post({"prompt": "gone"}) for _ in range(4)]
    until(lambda: rig.engine.waiting() == 5, "the queue is full")
    status, body = answer(rig.post({"prompt": "one too many"}))
    assert status == 429 and body["error"]["code"] == "queue_full"
    [one.close() for one in gone]
    until(lambda: rig.engine.waiting() == 1, "the queue is empty")
    rig.llama.gate.set()
    assert answer(rig.post({"prompt": "now"}))[0] == 200
    assert answer(first)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_while_it_is_computed_ends_it(rig, stream):
    raw = rig.post({"prompt": "long", "stream": stream})
    until(lambda: rig.llama.begun == ["long"], "it has begun")
    if stream:
        assert raw.recv(12) == b"HTTP/1.1 200"
    raw.close()
    until(lambda: rig.llama.ended == ["long"], "it has ended, though the gate is shut")
    until(lambda: rig.engine.waiting() == 0, "the engine is free")
    assert not rig.llama.gate.is_set()


def test_the_place_at_the_front_of_the_queue_is_looked_at_too():
    engine = Engine(Llama(), "m", 4)
    with pytest.raises(Gone):
        engine.take(lambda: True)
    assert engine.waiting() == 0 and engine.gone == 1
    engine.give(engine.take())


def test_a_client_that_is_gone_leaves_no_traceback(rig, caplog, capfd):
    with caplog.at_level(logging.INFO):
        for body in (b"{broken", b'{"prompt": 5}', b'{"prompt": "a"}'):
            for _ in range(5):
                raw = rig.post(body)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                raw.close()  # resets the connection
        until(lambda: rig.server.connections == 0, "all connections have ended")
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


# ---- mistakes ----

@pytest.mark.parametrize("data, status", [
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 411),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 411),
    (b"POST /v1/completions HTTP/1.1\r\n\r\n", 411),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
    (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 14\r\n\r\n{}", 411),
    (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
     411),
    (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 300 + b"\r\n", 431),
    (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
    (b"\x16\x03\x01\0\r\n\r\n", 400), (b"PRI * HTTP/2.0\r\n\r\n", 505),
    (b"TRACE / HTTP/1.1\r\n\r\n", 501),
    (post(b"[" * 100000), 400), (post(b'{"prompt":' + b"[" * 100000), 400),
    (post(b'{"prompt": "a", "temperature": NaN}'), 400),
    (post(b'{"prompt": "a", "repeat_penalty": Infinity}'), 400),
    (post(b'{"prompt": "a", "top_p": 1e999}'), 400),
    (post(b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}"), 400),
    (post({"prompt": "a", "seed": 2**70}), 400), (post({"prompt": "a", "top_k": 2**40}), 400),
    (post({"prompt": [100]}), 400), (post({"prompt": [2**70]}), 400),
    (post({"prompt": "a", "stop": [5, None]}), 400), (post({"prompt": "a", "stop": ""}), 400),
    (post({"prompt": "a", "logit_bias": {"x": 1}}), 400),
    (post({"prompt": "a", "logit_bias": {"1": "y"}}), 400),
    (post(b'{"prompt": "\\ud800"}'), 400),
    (post({"messages": [{"role": "assistant", "content": None, "tool_calls": 5}]},
          "/v1/chat/completions"), 400),
    (post({"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]},
          "/v1/chat/completions"), 400),
    (post(b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "/v1/chat/completions"), 400),
    (post({"input": "a"}, "/v1/embeddings"), 400), (post({"prompt": "a", "logprobs": 0}), 400),
    (post({"messages": [{"role": "user", "content": "a"}], "logprobs": True},
          "/v1/chat/completions"), 400)])
def test_mistakes_are_told_in_openai_s_form(rig, data, status):
    got, body = answer(rig.send(data))
    assert got == status, body
    assert body["error"]["message"] and body["error"]["type"] == "invalid_request_error"
    assert rig.llama.begun == []


def test_what_is_no_mistake(rig):
    rig.llama.gate.set()
    for body in ({"prompt": "a", "seed": -5, "stop": "abc", "logit_bias": {"7": -1.5}},
                 {"prompt": [99], "stop": ["a", "b"], "logprobs": None, "max_tokens": 2**70}):
        assert answer(rig.post(body))[0] == 200
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": False, "top_logprobs": 0}
    assert answer(rig.post(chat, "/v1/chat/completions"))[0] == 200
    assert rig.llama.begun == ["a", [99], "a"]


def test_a_body_that_ends_early_is_nobody_s_request(rig):
    raw = rig.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{}")
    raw.shutdown(socket.SHUT_WR)
    assert answer(raw) == (0, b"")


def test_a_connection_is_used_again(rig):
    rig.llama.gate.set()
    connection = http.client.HTTPConnection("127.0.0.1", rig.port, timeout=PATIENCE_S)
    for body, status in (({"prompt": "a"}, 200), ({"prompt": 5}, 400), ({"prompt": "b"}, 200)):
        connection.request("POST", "/v1/completions", json.dumps(body))
        got = connection.getresponse()
        got.read()
        assert got.status == status
    assert rig.server.connections == 1
    connection.close()


# ---- limits ----

def test_bodies_in_flight_are_bounded(rig, monkeypatch):
    monkeypatch.setattr(_http, "BODIES_BYTES_MAX", 1000)
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 900\r\n\r\n"
    slow = rig.send(head + b"{")
    until(lambda: rig.server._held == 900, "the first body is on its way")
    status, body = answer(rig.post({"prompt": "a" * 200}))
    assert status == 429 and body["error"]["code"] == "bodies_full"
    slow.close()
    until(lambda: rig.server._held == 0, "its room is given back")
    rig.llama.gate.set()
    assert answer(rig.post({"prompt": "a" * 200}))[0] == 200


def test_who_sends_much_that_nobody_wants_reads_why(rig, monkeypatch):
    """A reset would take the answer away from it."""
    monkeypatch.setattr(_http, "LAST_S", PATIENCE_S)
    for head, status in ((b"POST /v1/completions HTTP/1.1\r\nContent-Length: 999999999999", 413),
                         (b"POST /v1/nothing HTTP/1.1\r\nContent-Length: 999999999999", 404)):
        raw = rig.send(head + b"\r\n\r\n")
        for _ in range(64):
            raw.sendall(b"x" * (1 << 16))
        assert answer(raw)[0] == status


def test_connections_are_bounded(rig, monkeypatch):
    monkeypatch.setattr(_http, "CONNECTIONS_MAX", 2)
    held = [rig.send(b"GET ") for _ in range(2)]
    until(lambda: rig.server.connections == 2, "two are open")
    with socket.create_connection(("127.0.0.1", rig.port), timeout=PATIENCE_S) as third:
        assert third.recv(12) == b"HTTP/1.1 503"
    [one.close() for one in held]
    until(lambda: rig.server.connections == 0, "they are gone")
    assert answer(rig.send(b"GET /health HTTP/1.1\r\n\r\n"))[0] == 200


def test_a_request_that_drips_ends(rig, monkeypatch):
    monkeypatch.setattr(_http, "SOCKET_TIMEOUT_S", 0.5)
    raw = rig.send(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
    end = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < end:
            raw.sendall(b" ")  # each byte comes in time, the whole does not
            time.sleep(0.05)
    except ConnectionError:
        pass
    assert time.monotonic() < end
    raw.close()


# ---- the port comes first ----

def test_until_the_model_is_there_the_status_is_503():
    rig = Rig(None)
    try:
        assert answer(rig.send(b"GET /health HTTP/1.1\r\n\r\n")) == (503, {"status": "loading"})
        for data in (b"GET /v1/models HTTP/1.1\r\n\r\n", post({"prompt": "a"}),
                     b"GET /stats HTTP/1.1\r\n\r\n"):
            status, body = answer(rig.send(data))
            assert status == 503 and body["error"]["code"] == "loading"
        rig.llama = Llama()
        rig.llama.gate.set()
        rig.engine.loaded(rig.llama)
        assert answer(rig.send(b"GET /health HTTP/1.1\r\n\r\n")) == (200, {"status": "ok"})
        assert answer(rig.post({"prompt": "a"}))[0] == 200
        rig.engine.stopping = True
        assert answer(rig.send(b"GET /health HTTP/1.1\r\n\r\n")) == (503, {"status": "stopping"})
    finally:
        rig.close()


def test_a_port_in_use_is_told_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "kvtier.llama_server", "--model", str(tmp_path / "none"),
             "--port", port], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use" in done.stderr, done.stderr
    assert "none" not in done.stderr and "Traceback" not in done.stderr  # nothing of the model


@pytest.mark.parametrize("port", ["70000", "-1", "x", "\N{SUPERSCRIPT TWO}"])
def test_a_port_that_is_none_is_told(port, capsys):
    with pytest.raises(SystemExit) as caught:
        llama_server.parse_arguments(["--model", "m", f"--port={port}"])
    assert caught.value.code == 2 and "is no port" in capsys.readouterr().err


LIFE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from test_llama_http import Llama
from kvtier import llama_server
def load(arguments):
    sys.stdin.readline()  # as long as the test likes
    llama = Llama()
    llama.gate.set()
    return llama
llama_server.load_model = load
sys.exit(llama_server.main(sys.argv[1:]))
"""


def test_a_server_s_life(request):
    """Its log names the port while it loads; a line says that it serves; SIGTERM ends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", LIFE, str(request.path.parent), "--model", "/x/some.gguf", "--port",
         "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        assert "loading /x/some.gguf" in line
        port = int(line.split("127.0.0.1:")[1].split("/")[0])

        def ask(data):
            raw = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            raw.sendall(data)
            return answer(raw)

        assert ask(b"GET /health HTTP/1.1\r\n\r\n") == (503, {"status": "loading"})
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == \
            f"kvtier llama_server: some.gguf on http://127.0.0.1:{port}/v1\n"
        assert ask(b"GET /health HTTP/1.1\r\n\r\n") == (200, {"status": "ok"})
        assert ask(post({"prompt": "a"}))[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert "stopped" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_where_the_queue_looks():
    assert 0 < _serving.LOOK_S <= 1 and not _serving.nobody_gone()
