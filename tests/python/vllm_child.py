"""One run of vLLM in a process of its own: a JSON job on stdin, a JSON answer on the last line.

job: {model, engine: {LLM() options}, kvtier: extra config or null, batches: [[token ids, ...], ...],
      sampling: {...}, between: {number of a batch: shell command before it},
      file_limit: bytes that a file may grow to from batch 0 on, or null}
answer: {batches: [[{tokens, logprobs, cached}]], seconds: [...], metrics: {kvtier counter: value},
         stats: of the library, where the store lives in this process}
"""
import json
import os
import resource
import signal
import subprocess
import sys
import time


def transfer_config(extra):
    return {"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.vllm",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra}


def run_batch(llm, prompts, sampling):
    began = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    took = time.monotonic() - began
    return took, [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens,
                   "logprobs": [max(e.logprob for e in step.values())
                                for step in o.outputs[0].logprobs or []]} for o in outputs]


def main():
    job = json.load(sys.stdin)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False,
               "seed": 0, **job["engine"]}
    if job.get("kvtier") is not None:
        options["kv_transfer_config"] = transfer_config(job["kvtier"])
    llm = LLM(model=job["model"], **options)
    sampling = SamplingParams(temperature=0, detokenize=False, **job["sampling"])
    answer = {"batches": [], "seconds": []}
    if job.get("file_limit"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], resource.RLIM_INFINITY))
    for number, prompts in enumerate(job["batches"]):
        command = (job.get("between") or {}).get(str(number))
        if command:
            subprocess.run(command, shell=True, check=True)
        took, results = run_batch(llm, prompts, sampling)
        answer["seconds"].append(took)
        answer["batches"].append(results)
    answer["metrics"] = {m.name.removeprefix("vllm:kvtier_"): m.value for m in llm.get_metrics()
                         if m.name.startswith("vllm:kvtier_")}
    answer["preemptions"] = sum(m.value for m in llm.get_metrics()
                                if m.name == "vllm:num_preemptions")
    answer["stats"] = {}
    if job.get("kvtier") is not None:
        from kvtier.vllm import store
        for one in store._stores.values():
            answer["stats"].update(one.cache.stats())
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
