"""An OpenAI-compatible server over llama.cpp whose prompts are remembered on disk.

    python -m kvtier.llama_server --model model.gguf --disk /var/cache/kvtier:50GiB

POST /v1/chat/completions, POST /v1/completions (both also as a stream of server-sent events),
GET /v1/models, GET /health, GET /stats (counters as JSON). One model, one context: requests are
answered one after the other, first come first served; those that wait are at most --queue, and
what is stored of their prompts comes from disk meanwhile. The port is there before the model is:
until then the status is 503. A request whose client hangs up is not computed any further.
On SIGTERM or SIGINT no new request is taken, the running one may finish for --grace seconds, and
everything is written to disk; a second signal ends at once.

Listens on 127.0.0.1 unless told otherwise; behind anything public it wants a proxy. The parts:
_http.py (connections), _serving.py (the queue), _openai.py (what requests and answers say).
"""
from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from ._errors import KvtierError
from ._http import Server, make_server
from ._serving import Aborted, Engine

_log = logging.getLogger("kvtier.llama_server")


def load_model(arguments: argparse.Namespace) -> Any:
    """The model with its memory, as a Llama that Aborted can end."""
    from .llama_cpp import Llama

    class Served(Llama):
        """Looks before each step whether it is to end, and whether somebody waits for it."""

        abort = False
        look = staticmethod(lambda: None)  # may raise

        def eval(self, tokens):
            for at in range(0, len(tokens), self.n_batch):  # as it would be computed anyway
                if self.abort:
                    raise Aborted
                self.look()
                super().eval(tokens[at:at + self.n_batch])

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


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.llama_server", description=(
        "OpenAI-compatible server over llama.cpp; prompts are remembered in DRAM and on disk"))
    add = parser.add_argument
    add("--model", required=True, metavar="GGUF", help="the model's file")
    add("--alias", metavar="NAME", help="the model's name in answers (default: the file's)")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=_port, default=8080, help="0: any free one (default %(default)s)")
    add("--disk", action="append", metavar="/PATH:SIZE",
        help="where prompts are kept across restarts; repeat it for more drives")
    add("--dram", metavar="SIZE", help="memory for prompts (default 1GiB)")
    add("--level", metavar="LEVEL", help="raw kv8 kv6 kv5 kv4 int4 (default kv4)")
    add("--window-tokens", type=int, metavar="N",
        help="the last tokens of a prompt are kept at kv8, the others at --level (default: a "
        "sixteenth of the context, from 128 to 4096)")
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


def _listen(engine: Engine, arguments: argparse.Namespace) -> Server | None:
    """The server, bound and running; None: it could not listen, which has been said."""
    host, port = arguments.host, arguments.port
    try:
        server = make_server(engine, host, port, arguments.api_key)
    except OSError as error:
        print(f"llama_server: {host}:{port}: {error.strerror or error} (another server there? "
              "--port 0 takes any free one)", file=sys.stderr)
        return None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1},
                     daemon=True).start()
    return server


def _url(server: Server) -> str:
    host, port = server.server_address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _serve(engine: Engine, server: Server, arguments: argparse.Namespace) -> None:
    """From here on the model is there: answer until a signal, then end in order."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: Any) -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    print(f"kvtier llama_server: {engine.name} on {_url(server)}/v1", flush=True)
    while not stop.wait(3600):
        pass
    _log.info("stopping")
    server.shutdown()
    engine.stop(arguments.grace)
    server.server_close()
    engine.llama.close()  # everything that was saved is on disk now
    _log.info("stopped")


def main(argv: list[str] | None = None) -> int:
    """Run until a signal. 0 stopped in order; 1 could not start; 2 wrong usage. The port is taken
    before the model is loaded, so that a start in vain says so at once; while it is loaded, a
    signal ends the process as it is: nothing is to be kept yet."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    engine = Engine(None, arguments.alias or os.path.basename(arguments.model), arguments.queue)
    server = _listen(engine, arguments)
    if server is None:
        return 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _log.info("loading %s; %s/health says when it is there", arguments.model, _url(server))
        start = time.monotonic()
        try:
            engine.loaded(load_model(arguments))
        except (KvtierError, ValueError, RuntimeError, OSError) as error:
            print(f"llama_server: {error}", file=sys.stderr)
            return 1
        _log.info("loaded in %.1f s", time.monotonic() - start)
        _serve(engine, server, arguments)
        return 0
    finally:
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
