"""Goal: the package serves and uses kvtierd: DRAM outlives the engine's process, and a daemon that is
gone is a miss. Method: python -m kvtier daemon in a process, caches of others over its socket."""
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from conftest import TOKENS, Engine

import kvtier
from kvtier import _c

KVTIERD = os.environ.get("KVTIERD") or str(_c.library_dir().parent / "bin/kvtierd")
pytestmark = pytest.mark.skipif(not os.access(KVTIERD, os.X_OK), reason=f"no {KVTIERD}")


@pytest.fixture
def socket(tmp_path):
    path = tmp_path / "kvtier.sock"
    process = subprocess.Popen([sys.executable, "-m", "kvtier", "daemon", "--socket", path, "--dram",
                                "64MiB"], stderr=subprocess.PIPE, text=True)
    for _ in range(6000):
        if path.exists() or process.poll() is not None:
            break
        time.sleep(0.01)
    assert process.poll() is None, process.stderr.read()
    yield path, process
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    process.stderr.close()


def test_dram_outlives_a_process(socket):
    path, _ = socket
    program = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import kvtier
from conftest import Engine, TOKENS
with kvtier.Cache(store="unix:{path}", env=False) as cache:
    engine = Engine(cache)
    [engine.fill(page) for page in range(4)]
    assert engine.store(kvtier.Keys.chain(range(4 * TOKENS), TOKENS), range(4), exact=True) == [0] * 4
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    with kvtier.Cache(store=f"unix:{path}", env=False) as cache:
        engine = Engine(cache)
        before = [engine.fill(page) for page in range(4)]  # the same seed
        keys = kvtier.Keys.chain(range(4 * TOKENS), TOKENS)
        found = engine.ns.lookup(keys)
        assert (found.n, list(found.tiers)) == (4, [kvtier.Tier.DRAM] * 4)
        assert engine.load(keys, [8, 9, 10, 11]) == [0] * 4
        assert [engine.read(page) for page in (8, 9, 10, 11)] == before


def test_a_daemon_that_is_gone_is_a_miss(tmp_path):
    with kvtier.Cache(store=f"unix:{tmp_path}/none.sock", env=False) as cache:
        engine = Engine(cache)
        engine.fill(0)
        keys = kvtier.Keys.chain(range(TOKENS), TOKENS)
        assert engine.ns.lookup(keys).n == 0
        engine.store(keys, [0])
        assert engine.ns.lookup(keys).n == 0 and cache.stats()["daemon.state"] != "connected"
        assert cache.stat("daemon.miss_keys") >= 2  # asked, and no kvtierd there
