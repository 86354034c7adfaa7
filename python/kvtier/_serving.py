"""The one engine of the server, and who has it when.

Requests take it in the order in which they came. One whose client hangs up, while it waits or
while it is computed, gives its place up: what was computed of it is stored, so that the next try
finds it. Until the model is loaded, and once the server stops, everything is refused with 503.
Threads: any. Apart from HTTP (_http.py) and from the form of requests (_openai.py).
"""
from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from . import _openai
from ._openai import ApiError

_log = logging.getLogger("kvtier.llama_server")
LOOK_S = 0.25  # how often one that waits looks whether its client is still there


class Aborted(Exception):
    """The server is stopping: the generation ends before its next token."""


class Gone(Exception):
    """The client has hung up: nobody would read the answer."""


def nobody_gone() -> bool:
    """For calls without a client that could hang up."""
    return False


class Engine:
    """The one model, or the place where it will be: llama is None until loaded() is called."""

    def __init__(self, llama: Any, name: str, queue_max: int) -> None:
        self.llama, self.name, self.queue_max = llama, name, queue_max
        self.since = int(time.time())
        self.stopping = False
        self.prefetched = 0  # requests whose prompt was asked for while they waited
        self.gone = 0  # requests given up because their client had hung up
        self._turn = threading.Condition()
        self._waiting: collections.deque[object] = collections.deque()

    def loaded(self, llama: Any) -> None:
        """The model is there: requests are taken from now on."""
        with self._turn:
            self.llama = llama

    def state(self) -> str:
        """ok, loading or stopping."""
        return "stopping" if self.stopping else "loading" if self.llama is None else "ok"

    def check(self) -> None:
        """ApiError 503 unless a request can be taken."""
        state = self.state()
        if state == "stopping":
            raise ApiError(503, "the server is stopping", "server_error")
        if state == "loading":
            raise ApiError(503, "the model is being loaded; try again later", "server_error",
                           code="loading")

    def waiting(self) -> int:
        """Requests that wait, or are being answered."""
        return len(self._waiting)

    def take(self, gone: Callable[[], bool] = nobody_gone) -> object:
        """Wait for the engine; the ticket is for give(). gone: whether the client has hung up.
        ApiError 429 or 503; Gone."""
        ticket = object()
        with self._turn:
            self.check()
            if len(self._waiting) > self.queue_max:
                raise ApiError(429, f"{len(self._waiting)} requests are waiting already; try again "
                               "later", "rate_limit_error", code="queue_full")
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket:
                    self.check()
                    self.look(gone)
                    self._turn.wait(LOOK_S)
                self.look(gone)
            except BaseException:
                self._leave(ticket)
                raise
        return ticket

    def look(self, gone: Callable[[], bool]) -> None:
        """Gone, counted, when nobody waits for the answer any more."""
        if gone():
            with self._turn:  # one that waits may count too; its lock is taken twice then
                self.gone += 1
            raise Gone

    def give(self, ticket: object) -> None:
        """Let the next one have it."""
        with self._turn:
            self._leave(ticket)

    def _leave(self, ticket: object) -> None:
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

    def run(self, arguments: dict[str, Any], chat: bool,
            gone: Callable[[], bool] = nobody_gone) -> Any:
        """The engine's answer: an object, or an iterator of chunks when arguments say stream. The
        engine calls llama.look before each step: Gone ends the generation there."""
        self.llama.look = lambda: self.look(gone)
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

    def stats(self) -> dict[str, int | str]:
        """Counters of the cache, the adapter and the server."""
        return {**self.llama.kvtier_stats(), "server.prefetched": self.prefetched,
                "server.gone": self.gone, "server.waiting": self.waiting()}


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
