"""One run of vLLM on the CPU as a client of an LMCache server, in a process of its own.

job on stdin: {model, port and pid: of the server, ask: [tokens, ...]}
answer on the last line: {answers: [{tokens, logprobs, cached}]}
"""
import builtins
import json
import os
import socket
import sys
import time

import shown


def wait_for(port, pid):
    for _ in range(6000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        with open(f"/proc/{pid}/stat", "rb") as stat:
            if stat.read().rpartition(b") ")[2][:1] == b"Z":
                break
        time.sleep(0.1)
    raise RuntimeError("the server does not listen")


def main():
    job = json.load(sys.stdin)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.triton_utils import dispatcher
    # Its scan over all modules meets objects of numba, which LMCache imports, that vars() refuses.
    dispatcher.vars = lambda value: builtins.vars(value) if isinstance(
        getattr(value, "__dict__", None), dict) else {}
    wait_for(job["port"], job["pid"])
    llm = LLM(model=job["model"], skip_tokenizer_init=True, enforce_eager=True, seed=0,
              dtype="float32", max_model_len=640, kv_cache_memory_bytes=48 << 20, block_size=32,
              kv_transfer_config={
                  **shown.told(shown.command("lmcache", "serve"), "--kv-transfer-config"),
                  "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1",
                                                "lmcache.mp.port": job["port"]}})
    sampling = SamplingParams(temperature=0, detokenize=False, max_tokens=16, logprobs=1)
    answers = []
    for tokens in job["ask"]:
        out = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]
        answers.append({
            "tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens,
            "logprobs": [max(e.logprob for e in step.values())
                         for step in out.outputs[0].logprobs]})
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"answers": answers}), flush=True)
    os._exit(0)  # LMCache's threads may outlive its engine


if __name__ == "__main__":
    main()
