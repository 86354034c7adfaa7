"""Shared by the tests with the real vLLM: tiny models whose output depends on their cache, runs in
processes of their own (vllm_child.py), and what damages a store.

    vllm_rig.py flip DIR [AT]      one byte in every 4 KiB of the records of a store, or at AT alone
    vllm_rig.py wait PORTS COUNT   until redis-servers (1,2,...) have so many records together
    vllm_rig.py replaced PORT      until a cluster is whole again after a node has failed
"""
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import time

from conftest import SEED

HERE = pathlib.Path(__file__).parent
ROUNDING = 1e-3  # of a log-probability between two ways of computing it in float32; seen: 2e-5
ENGINE = {"dtype": "float32", "max_model_len": 640, "kv_cache_memory_bytes": 48 << 20,
          "block_size": 32}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1",
         "GLOO_SOCKET_IFNAME": "lo"}  # for workers in processes of their own
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
         "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1,
         "eos_token_id": 2, "initializer_range": 0.15}


def save_model(where, kind="Llama", seed=SEED, **more):
    """A tiny model in a folder, with a tokenizer of words t0 to t1023. Weights are large enough that
    the content of the cache decides the output."""
    import torch
    import transformers
    torch.manual_seed(seed % (1 << 31))
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(torch.float32).save_pretrained(where)
    words().save_pretrained(where)
    return str(where)


def words(*special):
    """A tokenizer of words t0 to t1023, the last ones of which are `special`."""
    import tokenizers
    import transformers
    size = SHAPE["vocab_size"]
    known = [f"t{i}" for i in range(size - len(special))] + list(special)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(known)}, unk_token="t0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="t0",
                                                bos_token="t1", eos_token="t2", pad_token="t0")


IMAGE_WORDS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>")
IMAGE = SHAPE["vocab_size"] - 1  # stands for an image in a prompt: 19 tokens


def save_image_model(where, seed=SEED):
    """A tiny Idefics3 (the language model of save_model() behind 8 x 8 patches of an image, four of
    which are a token), with a processor."""
    import torch
    import transformers
    torch.manual_seed(seed % (1 << 31))
    config = transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**SHAPE), image_token_id=IMAGE, scale_factor=2,
        pad_token_id=0, tie_word_embeddings=False, vision_config={
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "initializer_range": 0.15})
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.to(torch.float32).save_pretrained(where)
    words(*IMAGE_WORDS).save_pretrained(where)
    where = pathlib.Path(where)
    (where / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False,
        "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}}))
    (where / "processor_config.json").write_text(json.dumps({
        "processor_class": "Idefics3Processor", "image_seq_len": 16}))
    return str(where)


def save_adapter(where, seed):
    """A LoRA adapter of the Llama of save_model(), large enough to be seen in the output."""
    import safetensors.torch
    import torch
    where = pathlib.Path(where)
    where.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn((8, 256), generator=draw) * 0.2
        tensors[f"{name}.lora_B.weight"] = torch.randn((128, 8), generator=draw) * 0.2
    safetensors.torch.save_file(tensors, where / "adapter_model.safetensors")
    (where / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny"}))
    return str(where)


def disk(where, size="2GiB", **more):
    """kv_connector_extra_config of a store that changes nothing: level raw, every hit is loaded, and
    damage is found by loads alone, not by a scrub that is there first."""
    return {"dram": "64MiB", "disk": f"{where}:{size}", "level": "raw", "plan": "off",
            "env": "no", "scrub": "off", **more}


def job(model, batches, kvtier=None, sampling=None, between=None, engine=None, limits=None, **more):
    """A job of vllm_child.py."""
    return {"model": model, "engine": {**ENGINE, **(engine or {})}, "kvtier": kvtier,
            "batches": batches, "sampling": {"max_tokens": 16, "logprobs": 1, **(sampling or {})},
            "between": between, "file_limit": limits, **more}


def start(what, **environment):
    return subprocess.run([sys.executable, HERE / "vllm_child.py"], input=json.dumps(what),
                          capture_output=True, text=True, timeout=900,
                          env={**os.environ, **ENVIRONMENT, **environment})


def answer(done):
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    lines = [line for line in done.stdout.splitlines() if line[:2] in ('{"', '[{')]
    return json.loads(lines[-1])  # vLLM may have more to say at its end


def run(*args, **more):
    """One job in a process of its own."""
    return answer(start(job(*args, **more)))


def run_jobs(*jobs, **environment):
    """Jobs in one process, each with an engine and a store of its own."""
    return answer(start({"jobs": jobs}, **environment))


def tokens(count, seed):
    draw = random.Random(SEED + seed)
    return [draw.randrange(3, 1000) for _ in range(count)]


def prompts(count, seed, shared=3):
    """Prompts of 100 to 500 tokens, many with a common beginning."""
    draw = random.Random(SEED + seed)
    begins = [[draw.randrange(3, 1000) for _ in range(300)] for _ in range(shared)]
    return [begins[i % shared][:draw.randrange(100, 300)] +
            [draw.randrange(3, 1000) for _ in range(draw.randrange(5, 200))] for i in range(count)]


def same(one, other, rounding=0.0):
    """Every token alike, every log-probability within `rounding`."""
    assert [r["tokens"] for r in one] == [r["tokens"] for r in other]
    worst = max(abs(a - b) for p, q in zip(one, other)
                for a, b in zip(p["logprobs"], q["logprobs"]))
    assert worst <= rounding
    return worst


def flip(where, at=None):
    """One byte in every 4 KiB of each file of records, but for its first 64 KiB, or the byte at `at`
    alone; how many."""
    count = 0
    for path in pathlib.Path(where).rglob("*"):
        if not path.is_file() or path.stat().st_size < 1 << 20:
            continue
        with open(path, "r+b") as file:
            data = bytearray(file.read())
            for place in [at] if at else range(65536 + 777, len(data), 4096):
                data[place] ^= 0x10
                count += 1
            file.seek(0)
            file.write(data)
    return count


def damage_stage(where, first_pos):
    """One byte of the record at a position, of the namespace that has the longest records: of a
    pipeline's stages the one with most layers. How many (docs/format.md has the places)."""
    found = []
    for path in pathlib.Path(where).rglob("seg-*"):
        data = path.read_bytes()
        for at in range(0, len(data) - 4095, 4096):
            if data[at:at + 4] == b"KVTR":
                position, size = struct.unpack_from("<II", data, at + 96)
                found.append((size, position, path, at))
    longest = max(size for size, *_ in found)
    hit = [(path, at) for size, position, path, at in found
           if (size, position) == (longest, first_pos)]
    for path, at in hit:
        with open(path, "r+b") as file:
            file.seek(at + 5000)
            byte = file.read(1)
            file.seek(at + 5000)
            file.write(bytes([byte[0] ^ 0x10]))
    return len(hit)


def flip_command(where, at=""):
    """For `between` of a job."""
    return f"{sys.executable} {HERE / 'vllm_rig.py'} flip {where} {at}"


# ---- a redis-server ----

SERVER = os.environ.get("KVT_TEST_REDIS_SERVER") or "redis-server"


class Redis:
    """One on loopback, or several that are a cluster; pids: of their processes."""

    def __init__(self, ports, pids=()):
        self.ports, self.pids = ports, pids
        self.url = "redis://" + "+".join(f"127.0.0.1:{port}" for port in ports)

    def records(self):
        """How many they have. OSError: one does not answer."""
        count = 0
        for port in self.ports:
            with socket.create_connection(("127.0.0.1", port), 10) as link:
                link.sendall(b"DBSIZE\r\n")
                count += int(link.makefile("rb").readline().decode().strip().removeprefix(":"))
        return count

    def wait(self, count, seconds=120):
        """Whether it has so many records within some time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if self.records() >= count:
                    return True
            time.sleep(0.05)
        return False

    def wait_command(self, count):
        """For `between` of a job."""
        return (f"{sys.executable} {HERE / 'vllm_rig.py'} wait {','.join(map(str, self.ports))} "
                f"{count}")

    def kill_command(self, node):
        """For `between`."""
        return f"kill -9 {self.pids[node]}"

    def replaced_command(self, node):
        """For `between`: until others have taken the place of one that was killed, as `node` sees
        it."""
        return f"{sys.executable} {HERE / 'vllm_rig.py'} replaced {self.ports[node]}"


def ask(port, *words):
    """What redis-cli prints."""
    return subprocess.run(["redis-cli", "-p", str(port), *words], capture_output=True, text=True,
                          timeout=120).stdout


def until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def replaced(port):
    return until(lambda: "cluster_state:ok" in ask(port, "CLUSTER", "INFO") and
                 re.search(r"[ ,]fail[ ,]", ask(port, "CLUSTER", "NODES")))


def free_ports(count):
    """Below what the kernel gives to clients, with the ports of a cluster's bus above them."""
    found, place = [], 10000 + os.getpid() * 16 % 12000
    while len(found) < count:
        place = place + 1 if place < 22000 else 10000
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", place))
            bus.bind(("127.0.0.1", place + 10000))
            found.append(place)
    return found


@contextlib.contextmanager
def redis(folder, nodes=1):
    """A server that keeps nothing on disk, or a cluster of six, three of them replicas; None where
    there is no redis-server (KVT_TEST_REDIS_SERVER may name another program)."""
    program = shutil.which(SERVER)
    if not program or (nodes > 1 and not shutil.which("redis-cli")):
        yield None
        return
    ports = free_ports(nodes)
    more = ["--cluster-enabled", "yes", "--cluster-node-timeout", "8000"] if nodes > 1 else []
    processes = [subprocess.Popen(
        [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder),
         *more, *(["--cluster-config-file", f"nodes.{port}.conf"] if more else [])],
        stdout=subprocess.DEVNULL) for port in ports]
    try:
        server = Redis(ports, [process.pid for process in processes])
        assert server.wait(0), "redis-server does not answer"
        if nodes > 1:
            made = ask(ports[0], "--cluster", "create", *(f"127.0.0.1:{port}" for port in ports),
                       "--cluster-replicas", "1", "--cluster-yes")
            assert until(lambda: all("cluster_state:ok" in ask(port, "CLUSTER", "INFO") and
                                     "cluster_known_nodes:6" in ask(port, "CLUSTER", "INFO")
                                     for port in ports)), made
        yield server
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "flip":
        good = flip(words[0], *map(int, words[1:]))
    elif what == "replaced":
        good = replaced(int(words[0]))
    else:
        good = Redis([int(port) for port in words[0].split(",")]).wait(int(words[1]))
    sys.exit(0 if good else 1)
