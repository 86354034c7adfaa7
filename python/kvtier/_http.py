"""HTTP of the server: connections and their limits, paths, answers, streams of events.

Built on http.server of the standard library: one thread a connection, which waits for the engine
most of the time. What a client may hold is bounded: connections, the bytes of all bodies that are
in flight, and the time that a request takes to arrive. A client's mistake is an answer with a 4xx
status in OpenAI's form; one that is gone is no error and leaves no traceback.
Threads: one a connection. The engine's turns are _serving.py's, what a body may say _openai.py's.
"""
from __future__ import annotations

import hmac
import http.server
import io
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from . import _openai
from ._openai import ApiError
from ._serving import Aborted, Engine, Gone

_log = logging.getLogger("kvtier.llama_server")
BODY_BYTES_MAX = 32 << 20
BODIES_BYTES_MAX = 64 << 20  # of all requests that arrive, wait or are answered
SOCKET_TIMEOUT_S = 60  # for a client that sends nothing, takes nothing, or does not come to an end
CONNECTIONS_MAX = 256
LAST_S = 2  # for a refused client to stop sending, so that it reads the answer and no reset
NOT_OFFERED = ("/v1/embeddings", "/v1/responses", "/v1/images", "/v1/audio", "/v1/moderations",
               "/v1/files", "/v1/batches", "/v1/fine_tuning", "/v1/assistants", "/v1/threads")


class _Arriving(io.RawIOBase):
    """What a connection receives. From its first byte on a request has SOCKET_TIMEOUT_S to be here
    whole: one that drips does not hold its thread for ever."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until: float | None = None

    def next_request(self) -> None:
        """What comes now is another request."""
        self._until = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = SOCKET_TIMEOUT_S if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left)
        try:
            got = self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(SOCKET_TIMEOUT_S)
        if self._until is None:
            self._until = time.monotonic() + SOCKET_TIMEOUT_S
        return got


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "kvtier"
    timeout = SOCKET_TIMEOUT_S
    server: Server
    engine: Engine
    api_key = ""

    def setup(self) -> None:
        super().setup()
        self.command, self._refused = "", False
        self._arriving = _Arriving(self.connection)
        self.rfile = io.BufferedReader(self._arriving, 1 << 16)
        self._hung_up = select.poll()
        self._hung_up.register(self.connection, select.POLLRDHUP)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # between two requests
            pass

    def finish(self) -> None:
        super().finish()
        if self._refused:  # with a body on its way that nobody wants
            end = time.monotonic() + LAST_S
            try:
                self.connection.shutdown(socket.SHUT_WR)
                while (left := end - time.monotonic()) > 0:
                    self.connection.settimeout(left)
                    if not self.connection.recv(1 << 16):
                        break
            except OSError:
                pass

    def handle_one_request(self) -> None:
        self._arriving.next_request()
        super().handle_one_request()

    def log_message(self, format: str, *args: Any) -> None:
        _log.info("%s %s", self.address_string(), format % args)

    def gone(self) -> bool:
        """Whether the client has closed its end: it waits for no answer."""
        return bool(self._hung_up.poll(0))

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

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses, in the same form as all else."""
        self.close_connection = self._refused = True
        self.request_version = "HTTP/1.1"
        text = message or http.HTTPStatus(code).phrase
        try:
            self._send(code, ApiError(code, text).body())
        except OSError:
            pass

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
        except (OSError, GeneratorExit, Gone):
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
            refusal = self._answered(answer)
            if refusal is not None and not self._sent:
                self._refused = self.close_connection
                self._send(refusal.status, refusal.body())
        except OSError:
            self.close_connection = True  # the client is gone

    def _answered(self, answer: Any) -> ApiError | None:
        """Call answer(); what the client is told instead, if anything. OSError: it is gone."""
        try:
            if self.api_key and not hmac.compare_digest(
                    self.headers.get("Authorization", "").encode(),
                    f"Bearer {self.api_key}".encode()) and self.path != "/health":
                self.close_connection = True
                raise ApiError(401, "wrong or missing API key", code="invalid_api_key")
            answer()
        except ApiError as error:
            return error
        except Aborted:
            return ApiError(503, "the server is stopping", "server_error")
        except Gone:
            self.close_connection = True
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            _log.exception("a request failed")
            self.close_connection = True
            return ApiError(500, f"the engine failed: {error}", "server_error")
        return None

    def send_response(self, code: int, message: str | None = None) -> None:
        self._sent = True
        super().send_response(code, message)

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            state = self.engine.state()
            return self._send(200 if state == "ok" else 503, {"status": state})
        self.engine.check()
        if path == "/v1/models":
            return self._send(200, _openai.models(self.engine.name, self.engine.since))
        if path == f"/v1/models/{self.engine.name}":
            return self._send(200, _openai.models(self.engine.name, self.engine.since)["data"][0])
        if path == "/stats":
            return self._send(200, {**self.engine.stats(),
                                    "server.connections": self.server.connections})
        raise ApiError(404, f"no such path: {path}", code="not_found")

    def _length(self) -> int:
        """Of the body that follows. ApiError: it cannot be told, or is too long; the connection
        ends, as nobody knows where the next request would begin."""
        if "Transfer-Encoding" in self.headers:
            raise ApiError(411, "Transfer-Encoding is not supported: send a Content-Length alone")
        lengths = set(self.headers.get_all("Content-Length", ()))
        text = lengths.pop() if len(lengths) == 1 else ""
        if not text.isascii() or not text.isdigit():
            raise ApiError(411, "a Content-Length is required")
        if len(text) > 18 or int(text) > BODY_BYTES_MAX:
            raise ApiError(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
        return int(text)

    def _body(self, length: int) -> Any:
        data = self.rfile.read(length)
        if len(data) < length:
            raise Gone
        self.close_connection = self._closes  # it was read whole
        try:
            return json.loads(data, parse_constant=_openai.no_number)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deep") from None

    def _post(self) -> None:
        path = self.path.partition("?")[0]
        self._closes, self.close_connection = self.close_connection, True  # until the body is read
        if path.startswith(NOT_OFFERED):
            raise ApiError(400, f"{path} is not offered: this server completes text, with "
                           "/v1/chat/completions and /v1/completions", code="not_offered")
        if path not in ("/v1/completions", "/v1/chat/completions"):
            raise ApiError(404, f"no such path: {path}", code="not_found")
        self.engine.check()
        length = self._length()
        self.server.hold(length)
        try:
            self._complete(length, path == "/v1/chat/completions")
        finally:
            self.server.release(length)

    def _complete(self, length: int, chat: bool) -> None:
        arguments = _openai.parse(self._body(length), chat, self.engine.llama.n_vocab())
        with_usage = arguments.pop("_usage")
        self.engine.prefetch(arguments, chat)
        ticket = self.engine.take(self.gone)
        try:
            answer = self.engine.run(arguments, chat, self.gone)
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


class Server(http.server.ThreadingHTTPServer):
    """Bound when it is made; no more than CONNECTIONS_MAX connections at a time."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[Handler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.connections = self._held = 0
        self._count = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the look-up of a name that http.server does, which may take seconds."""
        super(http.server.HTTPServer, self).server_bind()
        self.server_name, self.server_port = self.server_address[:2]

    def hold(self, length: int) -> None:
        """Room for a body; ApiError 429."""
        with self._count:
            if self._held + length > BODIES_BYTES_MAX:
                raise ApiError(429, "too much is being sent at the same time; try again later",
                               "rate_limit_error", code="bodies_full")
            self._held += length

    def release(self, length: int) -> None:
        """The end of hold()."""
        with self._count:
            self._held -= length

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._count:
            full = self.connections >= CONNECTIONS_MAX
            self.connections += not full
        if not full:
            try:
                return super().process_request(request, client_address)
            except BaseException:  # no thread
                self._ended()
                raise
        body = json.dumps(ApiError(503, f"{CONNECTIONS_MAX} connections are open already; try again"
                                   " later", "server_error", code="connections_full").body())
        try:
            request.setblocking(False)
            request.send(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close"
                         b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                         % (len(body), body.encode()))
        except OSError:
            pass
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended()

    def _ended(self) -> None:
        with self._count:
            self.connections -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ended by an exception: one line, and a traceback in the log only."""
        _log.exception("a connection of %s failed", client_address)


def make_server(engine: Engine, host: str, port: int, api_key: str = "") -> Server:
    """A server that is bound and not yet running. OSError: it cannot listen there."""
    return Server((host, port),
                  type("BoundHandler", (Handler,), {"engine": engine, "api_key": api_key}))
