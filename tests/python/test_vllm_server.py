"""Goal: what a user runs works: vLLM's API server with workers in processes of their own, tensor
parallel, over kvtierd; a prompt is found again over HTTP after a restart of the server, and /metrics
says so; and pipelines, whose stages have other layers each. Method: kvtierd and the engine as
processes, the tiny model in float32 at level raw; each of two ranks, or stages, stores its own part of
every block."""
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import need
from vllm_child import transfer_config
from vllm_rig import (ENGINE, ENVIRONMENT, RANKS, ROUNDING, damage_stage, job, run_jobs, same,
                      save_model, tokens)

need("vllm", "vllm")
from kvtier import _c  # noqa: E402

KVTIERD = os.environ.get("KVTIERD") or str(_c.library_dir().parent / "bin/kvtierd")
pytestmark = pytest.mark.skipif(not os.access(KVTIERD, os.X_OK), reason=f"no {KVTIERD}")
START_SECONDS = 600


class Daemon:
    def __init__(self, folder):
        self.socket = folder / "kvtier.sock"
        self.process = subprocess.Popen(
            [KVTIERD, "--socket", self.socket, "--dram", "64MiB", "--disk", f"{folder}/kv:1GiB",
             "--scrub", "off"],
            stderr=subprocess.PIPE, text=True)
        for _ in range(6000):
            if self.socket.exists() or self.process.poll() is not None:
                break
            time.sleep(0.01)
        assert self.process.poll() is None, self.process.stderr.read()

    def kill_command(self):
        """For `between` of a job."""
        return f"kill -9 {self.process.pid}"

    def close(self, killed=False):
        if not killed:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == (-signal.SIGKILL if killed else 0)
        self.process.stderr.close()


class Server:
    """vLLM's OpenAI server."""

    def __init__(self, model, store, ranks, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = open(log, "w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
             "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port),
             "--enforce-eager", "--dtype", ENGINE["dtype"], "--block-size", str(ENGINE["block_size"]),
             "--max-model-len", str(ENGINE["max_model_len"]), "--kv-cache-memory-bytes",
             str(ENGINE["kv_cache_memory_bytes"]), "--tensor-parallel-size", str(ranks),
             "--enable-prompt-tokens-details", "--kv-transfer-config",
             json.dumps(transfer_config(store))],
            stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **ENVIRONMENT, **RANKS})
        until = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < until:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        self.close()
        raise AssertionError(pathlib.Path(log).read_text()[-8000:])

    def get(self, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None,
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def ask(self, prompt):
        """(text, log-probabilities, cached tokens)"""
        status, text = self.get("/v1/completions", {
            "model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1,
            "ignore_eos": True})
        assert status == 200, text
        answer = json.loads(text)
        choice = answer["choices"][0]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return choice["text"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens", 0)

    def metrics(self):
        """{name: sum over labels} of /metrics."""
        out = {}
        for line in self.get("/metrics")[1].splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                out[name] = out.get(name, 0.0) + float(line.rpartition(" ")[2])
        return out

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def test_tensor_parallel_over_http_after_a_restart(tmp_path):
    model = save_model(tmp_path / "model")
    daemon = Daemon(tmp_path)
    store = {"store": f"unix:{daemon.socket}", "level": "raw", "plan": "off", "env": "no"}
    asked = tokens(200, 21)
    try:
        server = Server(model, store, 2, tmp_path / "first.log")
        try:
            cold, native = server.ask(asked), server.ask(asked)
            metrics = server.metrics()
        finally:
            server.close()
        assert (cold[2], native[2]) == (0, 192)
        # each rank counts its own blocks: 6 of the prompt, at the least
        assert metrics["vllm:kvtier_stored_blocks_total"] >= 12
        server = Server(model, store, 2, tmp_path / "second.log")
        try:
            again, other, metrics = server.ask(asked), server.ask(tokens(200, 22)), server.metrics()
        finally:
            server.close()
    finally:
        daemon.close()
    assert again == native
    assert other[2] == 0
    assert metrics["vllm:kvtier_loaded_blocks_total"] == 12
    assert metrics["vllm:kvtier_failed_blocks_total"] == 0
    assert metrics["vllm:external_prefix_cache_hits_total"] == 192


PIPELINE = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """Stages of one and of three layers, each with a store of its own layers: a prompt, again, again
    when the engine's own cache has been emptied, and another one. Then kvtierd is started anew, one
    record of the second stage is damaged, and an engine whose connector is beside another tenant's,
    below MultiConnector, is asked the first one twice, and once more when kvtierd has been killed."""
    where = tmp_path_factory.mktemp("pipeline")
    model, asked = save_model(where / "model"), tokens(200, 23)

    def run(prompts, forget, *salts, kill=None):
        daemon = Daemon(where)
        store = {"store": f"unix:{daemon.socket}", "level": "raw", "plan": "off", "env": "no"}
        beside = [{**store, "salt": salt} for salt in salts]
        try:
            answer, = run_jobs(job(model, prompts, [store, *beside] if beside else store,
                                   engine=PIPELINE, forget=forget,
                                   between={kill: daemon.kill_command()} if kill else None),
                               VLLM_PP_LAYER_PARTITION="1,3", **RANKS)
        finally:
            daemon.close(killed=kill is not None)
        assert "error" not in answer, answer["error"]
        return answer

    first = run([[asked], [asked], [asked], [tokens(200, 24)]], [2])
    damaged = damage_stage(where / "kv", 3 * ENGINE["block_size"])
    return first, damaged, run([[asked], [asked], [asked]], [1, 2], "another", kill="2")


def test_the_stages_of_a_pipeline_find_a_prompt_again(pipeline):
    """When the engine's own cache has been emptied, the answer is that of a hit in it, bit for
    bit."""
    ran, _, _ = pipeline
    cold, native, again, other = (batch[0] for batch in ran["batches"])
    assert [b["cached"] for b in (cold, native, again, other)] == [0, 192, 192, 0]
    same([again], [native])
    assert ran["metrics"]["loaded_blocks"] == 12  # each stage counts its own
    assert ran["metrics"]["failed_blocks"] == 0


def test_a_load_that_fails_in_one_stage_is_computed_in_all(pipeline):
    """The first stage has loaded all of its blocks, the second one lacks the fourth: what is behind
    it is computed by both, and is whole in the store afterwards. The connector is not alone."""
    first, damaged, ran = pipeline
    cold, native = (batch[0] for batch in first["batches"][:2])
    poisoned, again, _ = (batch[0] for batch in ran["batches"])
    assert damaged == 2  # the prompt's, and the other prompt's
    assert ran["metrics"]["failed_blocks"] == 1
    assert ran["metrics"]["loaded_blocks"] == 11 + 12
    same([poisoned], [cold], ROUNDING)
    assert again["cached"] == 192
    same([again], [native], ROUNDING)


def test_a_daemon_that_dies_under_an_engine_costs_hits_only(pipeline):
    first, _, ran = pipeline
    gone = ran["batches"][2][0]
    assert gone["cached"] == 0
    same([gone], first["batches"][0], ROUNDING)
