"""An OpenAI-compatible server over llama.cpp whose prompts are remembered on disk.

    python -m kvtier.llama_server --model model.gguf --disk /var/cache/kvtier:50GiB

POST /v1/chat/completions, POST /v1/completions (both also as a stream of server-sent events),
GET /v1/models, GET /health, GET /stats (counters as JSON). One model, one context: requests are
answered one after the other, first come first served; those that wait are at most --queue, and
what is stored of their prompts comes from disk meanwhile.
On SIGTERM or SIGINT no new request is taken, the running one may finish for --grace seconds, and
everything is written to disk; a second signal ends at once.

Built on http.server of the standard library: one thread a connection, which waits for the engine
most of the time. Listens on 127.0.0.1 unless told otherwise; behind anything public it wants a
proxy.
"""
from __future__ import annotations

import argparse
import collections
import hmac
import http.server
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from . import _openai
from ._errors import KvtierError
from ._openai import ApiError

_log = logging.getLogger("kvtier.llama_server")
BODY_BYTES_MAX = 32 << 20
SOCKET_TIMEOUT_S = 60  # for a client that sends nothing, or takes nothing


class Aborted(Exception):
    """The server is stopping: the generation ends before its next token."""


class Engine:
    """The one model. Requests take it in the order in which they came."""

    def __init__(self, llama: Any, name: str, queue_max: int) -> None:
        self.llama, self.name, self.queue_max = llama, name, queue_max
        self.since = int(time.time())
        self.stopping = False
        self.prefetched = 0  # requests whose prompt was asked for while they waited
        self._turn = threading.Condition()
        self._waiting: collections.deque[object] = collections.deque()

    def take(self) -> object:
        """Wait for the engine; the ticket is for give(). ApiError 429 or 503."""
        ticket = object()
        with self._turn:
            if self.stopping:
                raise ApiError(503, "the server is stopping", "server_error")
            if len(self._waiting) > self.queue_max:
                raise ApiError(429, f"{len(self._waiting)} requests are waiting already; try again "
                               "later", "rate_limit_error", code="queue_full")
            self._waiting.append(ticket)
            while self._waiting[0] is not ticket and not self.stopping:
                self._turn.wait()
            if self._waiting[0] is not ticket:
                self._waiting.remove(ticket)
                raise ApiError(503, "the server is stopping", "server_error")
        return ticket

    def give(self, ticket: object) -> None:
        """Let the next one have it."""
        with self._turn:
            self._waiting.remove(ticket)
            self._turn.notify_all()

    def stop(self, grace_s: float) -> None:
        """Refuse who comes and who waits; give the one that runs grace_s seconds, then end it."""
        with self._turn:
            self.stopping = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._waiting, timeout=grace_s)
            self.llama.abort = True
            self._turn.wait_for(lambda: not self._waiting, timeout=grace_s + 5)

    def run(self, arguments: dict[str, Any], chat: bool) -> Any:
        """The engine's answer: an object, or an iterator of chunks when arguments say stream."""
        call = self.llama.create_chat_completion if chat else self.llama.create_completion
        try:
            return call(model=self.name, **arguments)
        except ValueError as error:
            raise _openai.refused(error, chat) from None

    def prefetch(self, arguments: dict[str, Any], chat: bool) -> None:
        """While another request has the engine: bring what is stored of this prompt into DRAM. A
        hint: what goes wrong here is said when it is this request's turn."""
        with self._turn:
            if not self._waiting or self.stopping:
                return
        try:
            tokens = prompt_tokens(self.llama, arguments, chat)
            if tokens and self.llama.kvtier_prefetch(tokens) > 0:
                self.prefetched += 1
        except Exception as error:
            _log.debug("no prefetch: %s", error)


class _Captured(Exception):
    """The prompt of a chat, on its way to the engine."""


class _Template:
    """Stands for the engine while llama_cpp's handler makes a prompt of messages: it works on the
    vocabulary alone, which any thread may read."""

    def __init__(self, llama: Any) -> None:
        self._llama = llama

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def create_completion(self, prompt: Any, **_: Any) -> Any:
        raise _Captured(prompt)


def prompt_tokens(llama: Any, arguments: dict[str, Any], chat: bool) -> list[int]:
    """The tokens that a request will be computed from. From any thread."""
    prompt = arguments.get("prompt")
    if chat:
        from llama_cpp import llama_chat_format
        handler = llama._chat_handlers.get(llama.chat_format) or \
            llama_chat_format.get_chat_completion_handler(llama.chat_format)
        try:
            handler(llama=_Template(llama), **{
                name: arguments[name] for name in ("messages", "tools", "tool_choice")
                if name in arguments})
            return []
        except _Captured as captured:
            prompt = captured.args[0]
    if isinstance(prompt, str):
        return llama.tokenize(prompt.encode(), special=True)
    return list(prompt or ())


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "kvtier"
    timeout = SOCKET_TIMEOUT_S
    engine: Engine
    api_key = ""

    def log_message(self, format: str, *args: Any) -> None:
        _log.info("%s %s", self.address_string(), format % args)

    # ---- answers ----

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _event(self, body: Any) -> None:
        self._chunk(b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode())
                    + b"\n\n")

    def _stream(self, chunks: Iterator[Any], chat: bool, with_usage: bool) -> None:
        """Server-sent events. The first chunk is made before the headers go, so that what cannot
        be answered is an error with a status; a client that is gone ends the generation."""
        last = first = next(chunks, None)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if first is not None:
                self._event(first)
                for last in chunks:
                    self._event(last)
            if with_usage:
                self._event(_openai.usage_chunk(last, self.engine.name, chat,
                                                self.engine.llama.kvtier_last))
            self._event(b"[DONE]")
        except Aborted:
            self._event(ApiError(503, "the server is stopping", "server_error").body())
        except (OSError, GeneratorExit):
            raise
        except Exception as error:
            _log.exception("a stream failed")
            self._event(ApiError(500, f"the engine failed: {error}", "server_error").body())
        self._chunk(b"")

    # ---- requests ----

    def do_GET(self) -> None:
        """/health, /v1/models, /stats."""
        self._guarded(self._get)

    def do_POST(self) -> None:
        """/v1/completions, /v1/chat/completions."""
        self._guarded(self._post)

    def do_OTHER(self) -> None:
        """Anything else."""
        def refuse() -> None:
            self.close_connection = True  # a body may follow that nobody reads
            raise ApiError(405, f"{self.command} is not supported", code="method_not_allowed")
        self._guarded(refuse)

    do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_OTHER

    def _guarded(self, answer: Any) -> None:
        self._sent = False
        try:
            if self.api_key and not hmac.compare_digest(
                    self.headers.get("Authorization", "").encode(),
                    f"Bearer {self.api_key}".encode()) and self.path != "/health":
                self.close_connection = True
                raise ApiError(401, "wrong or missing API key", code="invalid_api_key")
            answer()
        except ApiError as error:
            self._send(error.status, error.body())
        except Aborted:
            self._send(503, ApiError(503, "the server is stopping", "server_error").body())
        except (BrokenPipeError, ConnectionResetError, socket.timeout):
            self.close_connection = True  # the client is gone
        except Exception as error:
            _log.exception("a request failed")
            self.close_connection = True
            if not self._sent:
                self._send(500, ApiError(500, f"the engine failed: {error}",
                                         "server_error").body())

    def send_response(self, code: int, message: str | None = None) -> None:
        self._sent = True
        super().send_response(code, message)

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            return self._send(200, {"status": "stopping" if self.engine.stopping else "ok"})
        if path == "/v1/models":
            return self._send(200, _openai.models(self.engine.name, self.engine.since))
        if path == f"/v1/models/{self.engine.name}":
            return self._send(200, _openai.models(self.engine.name, self.engine.since)["data"][0])
        if path == "/stats":
            return self._send(200, {**self.engine.llama.kvtier_stats(),
                                    "server.prefetched": self.engine.prefetched})
        raise ApiError(404, f"no such path: {path}", code="not_found")

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self.close_connection = True
            raise ApiError(411, "a Content-Length is required")
        if int(length) > BODY_BYTES_MAX:
            self.close_connection = True
            raise ApiError(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
        data = self.rfile.read(int(length))
        try:
            return json.loads(data)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None

    def _post(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/v1/completions", "/v1/chat/completions"):
            self.close_connection = True
            raise ApiError(404, f"no such path: {path}", code="not_found")
        chat = path == "/v1/chat/completions"
        arguments = _openai.parse(self._body(), chat)
        with_usage = arguments.pop("_usage")
        self.engine.prefetch(arguments, chat)
        ticket = self.engine.take()
        try:
            answer = self.engine.run(arguments, chat)
            if not arguments.get("stream"):
                answer["usage"] = _openai.usage(self.engine.llama.kvtier_last)
                return self._send(200, answer)
            try:
                self._stream(answer, chat, with_usage)
            finally:
                answer.close()  # ends the generation, and saves what there is
        except ValueError as error:  # of the first chunk of a stream
            raise _openai.refused(error, chat) from None
        finally:
            self.engine.give(ticket)


def make_server(engine: Engine, host: str, port: int,
                api_key: str = "") -> http.server.ThreadingHTTPServer:
    """A server that is bound and not yet running."""
    handler = type("BoundHandler", (Handler,), {"engine": engine, "api_key": api_key})

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server((host, port), handler)


def load_model(arguments: argparse.Namespace) -> Any:
    """The model with its memory, as a Llama that Aborted can end."""
    from .llama_cpp import Llama

    class Served(Llama):
        """Looks before each evaluation whether it is to end."""

        abort = False

        def eval(self, tokens):
            if self.abort:
                raise Aborted
            super().eval(tokens)

    options = [("disk", disk) for disk in arguments.disk or []]
    if arguments.dram:
        options.append(("dram", arguments.dram))
    text = ",".join([*(f"{key}={value}" for key, value in options),
                     *([arguments.config] if arguments.config else [])])
    return Served(arguments.model, n_ctx=arguments.n_ctx, n_threads=arguments.threads,
                  n_threads_batch=arguments.threads, n_gpu_layers=arguments.n_gpu_layers,
                  chat_format=arguments.chat_format, verbose=arguments.verbose, kvtier=text,
                  kvtier_level=arguments.level, kvtier_window_tokens=arguments.window_tokens,
                  kvtier_salt=(arguments.salt or "").encode(), kvtier_digest_dir=_digest_dir())


def _digest_dir() -> str | None:
    """Where digests of model files are remembered, so that a start need not read them again."""
    base = os.environ.get("KVTIER_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvtier")
    path = os.path.join(base, "digests")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError:
        return None
    return path


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.llama_server", description=(
        "OpenAI-compatible server over llama.cpp; prompts are remembered in DRAM and on disk"))
    add = parser.add_argument
    add("--model", required=True, metavar="GGUF", help="the model's file")
    add("--alias", metavar="NAME", help="the model's name in answers (default: the file's)")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=8080, help="0: any free one (default %(default)s)")
    add("--disk", action="append", metavar="/PATH:SIZE",
        help="where prompts are kept across restarts; repeat it for more drives")
    add("--dram", metavar="SIZE", help="memory for prompts (default 1GiB)")
    add("--level", metavar="LEVEL", help="raw kv8 kv6 kv5 kv4 int4 (default kv4)")
    add("--window-tokens", type=int, default=4096, metavar="N",
        help="the last tokens of a prompt are kept at kv8, the others at --level (default %(default)s)")
    add("--config", metavar="KEY=VALUE,...", help="other options of docs/config.md")
    add("--salt", metavar="TEXT", help="prompts of different salts share nothing")
    add("--n-ctx", type=int, default=4096, metavar="N",
        help="tokens of the context, 0: the model's (default %(default)s)")
    add("--threads", type=int, metavar="N", help="threads of llama.cpp (default: half the CPUs)")
    add("--n-gpu-layers", type=int, default=0, metavar="N", help="layers on a GPU (default 0)")
    add("--chat-format", metavar="NAME", help="of llama_cpp (default: the model's own template)")
    add("--api-key", default=os.environ.get("KVTIER_API_KEY", ""), metavar="KEY",
        help="required of clients; better in the environment, as KVTIER_API_KEY")
    add("--queue", type=int, default=32, metavar="N",
        help="requests that may wait; more get status 429 (default %(default)s)")
    add("--grace", type=float, default=10.0, metavar="S",
        help="seconds for the running request when the server stops (default %(default)s)")
    add("--verbose", action="store_true", help="llama.cpp's own messages too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run until a signal. 0 stopped in order; 1 could not start; 2 wrong usage."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    _log.info("loading %s", arguments.model)
    try:
        llama = load_model(arguments)
    except (KvtierError, ValueError, RuntimeError, OSError) as error:
        print(f"llama_server: {error}", file=sys.stderr)
        return 1
    name = arguments.alias or os.path.basename(arguments.model)
    engine = Engine(llama, name, arguments.queue)
    try:
        server = make_server(engine, arguments.host, arguments.port, arguments.api_key)
    except OSError as error:
        print(f"llama_server: {arguments.host}:{arguments.port}: {error}", file=sys.stderr)
        llama.close()
        return 1
    stop = threading.Event()

    def on_signal(_number: int, _frame: Any) -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    host, port = server.server_address[:2]
    print(f"kvtier llama_server: {name} on http://{host}:{port}/v1", flush=True)
    while not stop.wait(3600):
        pass
    _log.info("stopping")
    server.shutdown()
    engine.stop(arguments.grace)
    server.server_close()
    thread.join()
    llama.close()  # everything that was saved is on disk now
    _log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
