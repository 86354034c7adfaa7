"""One run of vLLM with its tiering manager and kvtier's tier, in a process of its own.

job on stdin: {model, tier: {...}, engine: {LLM() options}, steps: [{ask: tokens} | {reset: true} | {damage: true}]}
answer on the last line: {answers: [{tokens, logprobs, cached}], counts: of the tier, coded}

vLLM's worker copies between a GPU and the CPU cache; CpuSpec puts one in its place that copies
between the CPU backend's pages and the CPU cache. Everything else is vLLM's own.
"""
import ctypes
import json
import os
import pathlib
import sys
import time

import shown
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """memcpy, done when it is submitted."""

    def __init__(self, kv_caches, blocks_per_chunk, region):
        self.blocks, self.region, self.done = blocks_per_chunk, region, []
        self.pairs = [(t.tensor, t.page_size_bytes,
                       region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk))
                      for t in kv_caches.tensors]

    def _copy(self, job_id, engine, cpu, store):
        assert len(engine.group_sizes) == 1
        skip, moved = engine.block_indices[0] % self.blocks, 0
        for number, block in enumerate(engine.block_ids):
            chunk = int(cpu.block_ids[(skip + number) // self.blocks])
            part = (skip + number) % self.blocks
            for tensor, page, view in self.pairs:
                ours = tensor.data_ptr() + int(block) * tensor.stride(0)
                theirs = view.data_ptr() + chunk * view.stride(0) + part * page
                ctypes.memmove(*((theirs, ours) if store else (ours, theirs)), page)
                moved += page
        self.done.append(TransferResult(job_id, True, moved, 1e-6))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, False)

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self.pairs.clear()
        self.region.cleanup()


class CpuSpec(TieringOffloadingSpec):
    """vLLM's, for engines whose pages are in host memory."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker)
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


def damage(root):
    for path in pathlib.Path(root).rglob("*"):
        if path.is_file() and path.stat().st_size >= 1 << 20:
            with open(path, "r+b") as file:
                data = bytearray(file.read())
                for at in range(65536 + 777, len(data), 4096):
                    data[at] ^= 0x10
                file.seek(0)
                file.write(data)


def ask(llm, tokens, sampling):
    out = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]
    return {"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens,
            "logprobs": [max(e.logprob for e in step.values())
                         for step in out.outputs[0].logprobs]}


def settle(llm, tier):
    """Stores are made in the steps after a request: let them all end."""
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(30000):
        core.step()
        if not tier._jobs and not core.scheduler.connector.connector_scheduler.manager._jobs:
            return
        time.sleep(0.01)
    raise RuntimeError("stores do not end")


def transfer_config(tier):
    """As docs/engines/vllm-tier.md shows it, for a small CPU cache, a tier with other places and
    sizes, and an engine whose pages are in host memory."""
    page = shown.told(shown.command("vllm-tier", "serve"), "--kv-transfer-config")
    extra = page["kv_connector_extra_config"]
    return {**page, "kv_connector_extra_config": {
        **extra, "spec_name": "CpuSpec", "spec_module_path": "vllm_tier_child",
        "cpu_bytes_to_use": 32 << 20, "secondary_tiers": [{**extra["secondary_tiers"][0], **tier}]}}


def main():
    job = json.load(sys.stdin)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    llm = LLM(model=job["model"], skip_tokenizer_init=True, enforce_eager=True, seed=0,
              dtype="float32", max_model_len=640, kv_cache_memory_bytes=48 << 20, block_size=32,
              kv_transfer_config=transfer_config(job["tier"]), **job.get("engine", {}))
    sampling = SamplingParams(temperature=0, detokenize=False, max_tokens=16, logprobs=1)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler
    tier = scheduler.manager.secondary_tiers[0]
    answers = []
    for step in job["steps"]:
        if "ask" in step:
            answers.append(ask(llm, step["ask"], sampling))
            settle(llm, tier)
        elif "reset" in step:
            assert llm.reset_prefix_cache(reset_connector=True)
        else:
            tier._cache.flush()
            damage(job["tier"]["disk"].rpartition(":")[0])
    answer = {"answers": answers, "counts": tier.counts.all(), "coded": tier._pages.shape.coded}
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.modules["vllm_tier_child"] = sys.modules["__main__"]
    main()
