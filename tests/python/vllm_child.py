"""Runs of vLLM in a process of its own: JSON jobs on stdin, JSON answers on the last line.

job: {model, engine: {LLM() options}, batches: [[prompt, ...], ...],
      kvtier: extra config, several of them for connectors below MultiConnector, or null,
      sampling: {...}, between: {number of a batch: shell command before it},
      file_limit: bytes that a file may grow to from batch 0 on, or null,
      lora: {name: folder}, events: whether KV events are counted,
      forget: numbers of batches before which the engine's own prefix cache is emptied}
prompt: token ids, or {tokens, salt, lora: name of an adapter, image: seed of one}
answer: {batches: [[{tokens, logprobs, cached}]], seconds: [...], metrics: {kvtier counter: value},
         stats: of the library, where the store lives in this process, events: [{...}]}
Several jobs ({jobs: [...]} instead of one) are run one after the other, each with an engine and a
store of its own that are closed before the next; the answer is a list then, with {error} for a
job that failed.
"""
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback

import shown


def transfer_config(extra):
    """As docs/engines/vllm.md shows it, for a store of its own; of several below MultiConnector."""
    if isinstance(extra, list):
        return {"kv_connector": "MultiConnector", "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [transfer_config(e) for e in extra]}}
    return {**shown.told(shown.command("vllm", "serve"), "--kv-transfer-config"),
            "kv_connector_extra_config": extra}


def image_of(seed):
    """A small image, another one for each seed."""
    import numpy
    import PIL.Image
    pixels = numpy.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
    return PIL.Image.fromarray(pixels)


class Events:
    """The engine's publisher at work, with a list instead of a socket behind it."""

    def __init__(self, llm):
        self.seen = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.kv_event_publisher.publish = self.publish

    def publish(self, batch):
        for event in batch.events:
            if type(event).__name__ == "BlockStored" and event.medium == "CPU":
                self.seen.append({
                    "hashes": [h.hex() if isinstance(h, bytes) else h for h in event.block_hashes],
                    "parent": event.parent_block_hash and event.parent_block_hash.hex(),
                    "tokens": list(event.token_ids), "block": event.block_size,
                    "group": event.group_idx, "lora": event.lora_name})


def prompt_of(given):
    if not isinstance(given, dict):
        return {"prompt_token_ids": given}
    out = {"prompt_token_ids": given["tokens"]}
    if given.get("salt"):
        out["cache_salt"] = given["salt"]
    if given.get("image") is not None:
        out["multi_modal_data"] = {"image": image_of(given["image"])}
    return out


def adapters(prompts, lora):
    """LoRARequest of each prompt, or None."""
    if not lora:
        return None
    from vllm.lora.request import LoRARequest
    known = {name: LoRARequest(name, number + 1, where)
             for number, (name, where) in enumerate(sorted(lora.items()))}
    return [known.get(p.get("lora")) if isinstance(p, dict) else None for p in prompts]


def run_batch(llm, prompts, sampling, lora):
    began = time.monotonic()
    outputs = llm.generate([prompt_of(p) for p in prompts], sampling, use_tqdm=False,
                           lora_request=adapters(prompts, lora))
    took = time.monotonic() - began
    return took, [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens,
                   "logprobs": [max(e.logprob for e in step.values())
                                for step in o.outputs[0].logprobs or []]} for o in outputs]


def forget_prefixes(llm, seconds=120):
    """Empty the engine's own prefix cache, once no block of it is held by a store any more."""
    until = time.monotonic() + seconds
    while not llm.reset_prefix_cache():
        if time.monotonic() > until:
            raise RuntimeError("blocks are held for ever")
        llm.llm_engine.step()
        time.sleep(0.01)


def warm_up(worker):
    """vLLM's runner for the CPU makes what goes from stage to stage when it warms up, and does not
    warm up in eager mode."""
    worker.model_runner.profile_run()


def run_job(job):
    from vllm import LLM, SamplingParams
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False,
               "seed": 0, **job["engine"]}
    if job.get("kvtier") is not None:
        options["kv_transfer_config"] = transfer_config(job["kvtier"])
    if job.get("events"):
        options["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "null"}
    if job.get("lora"):
        options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    llm = LLM(model=job["model"], **options)
    if options.get("pipeline_parallel_size", 1) > 1:
        llm.collective_rpc(warm_up)
    events = Events(llm) if job.get("events") else None
    sampling = SamplingParams(temperature=0, detokenize=False, **job["sampling"])
    answer = {"batches": [], "seconds": []}
    if job.get("file_limit"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], resource.RLIM_INFINITY))
    for number, prompts in enumerate(job["batches"]):
        command = (job.get("between") or {}).get(str(number))
        if command:
            subprocess.run(command, shell=True, check=True)
        if number in job.get("forget", ()):
            forget_prefixes(llm)
        took, results = run_batch(llm, prompts, sampling, job.get("lora"))
        answer["seconds"].append(took)
        answer["batches"].append(results)
    answer["metrics"] = {m.name.removeprefix("vllm:kvtier_"): m.value for m in llm.get_metrics()
                         if m.name.startswith("vllm:kvtier_")}
    answer["preemptions"] = sum(m.value for m in llm.get_metrics()
                                if m.name == "vllm:num_preemptions")
    answer["stats"], answer["events"] = {}, events.seen if events else []
    if job.get("kvtier") is not None:
        from kvtier.vllm import store
        for one in store._stores.values():
            answer["stats"].update(one.cache.stats())
    llm.llm_engine.engine_core.shutdown()
    return answer


def forget_metrics():
    """Counters are of the process: the next engine's begin at nothing, as in a process of its own."""
    import prometheus_client
    for collector in list(prometheus_client.REGISTRY._collector_to_names):
        prometheus_client.REGISTRY.unregister(collector)


def main():
    job = json.load(sys.stdin)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if "jobs" in job:
        answer = []
        for one in job["jobs"]:
            try:
                answer.append(run_job(one))
            except Exception:  # the others are of use without it
                answer.append({"error": traceback.format_exc()[-6000:]})
            gc.collect()
            forget_metrics()
    else:
        answer = run_job(job)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
