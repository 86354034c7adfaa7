"""Whose cache it is. Two engines share blocks only if nothing here differs.

The weights are named by a digest of their files: SHA-256 of each, remembered beside size, time and
inode so that a start reads them once. A file in a Hugging Face cache is named by its digest already.
"""
from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..layout import Identity

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ALSO = ("config.json", "adapter_config.json")
_BLOCK = 1 << 20
_log = logging.getLogger("vllm.kvtier")


def _memory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kvtier" / "digests.json"


def _recall() -> dict[str, str]:
    try:
        known = json.loads(_memory().read_text())
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        return {}


def _remember(known: dict[str, str]) -> None:
    path = _memory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known, indent=0))
        os.replace(fresh, path)
    except OSError:
        pass  # the next start reads the files again


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _named_by_digest(path: Path) -> str:
    """The SHA-256 in the name of a Hugging Face blob, or ""."""
    if path.is_symlink():
        name = path.resolve().name
        if len(name) == 64 and all(c in "0123456789abcdef" for c in name):
            return name
    return ""


def files_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over names and contents of files. OSError: one cannot be read."""
    known = _recall()
    paths = sorted(paths)

    def one(path: Path) -> tuple[str, str, str]:
        seen = path.stat()
        mark = f"{path.resolve()}:{seen.st_size}:{seen.st_mtime_ns}:{seen.st_ino}"
        return mark, path.name, _named_by_digest(path) or known.get(mark) or _file_digest(path)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as readers:
        each = list(readers.map(one, paths))
    added = {mark: digest for mark, _, digest in each if known.get(mark) != digest}
    if added:
        _remember({**known, **added})
    return hashlib.sha256(json.dumps([(n, d) for _, n, d in each]).encode()).hexdigest()


def directory_digest(where: Path) -> str:
    """The digest of a model or adapter in a directory or file. FileNotFoundError: no weights."""
    if where.is_file():
        return files_digest([where])
    files = [p for p in where.iterdir() if p.suffix in _WEIGHTS or p.name in _ALSO]
    if not any(p.suffix in _WEIGHTS for p in files):
        raise FileNotFoundError(f"{where} holds no weights ({', '.join(_WEIGHTS)})")
    return files_digest(files)


def model_directory(model: str, revision: str | None) -> Path:
    """Where vLLM reads the weights from: the path itself, or the snapshot of a hub name."""
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def weights_digest(vllm_config: Any, given: str) -> str:
    """A digest of the engine's weights. ValueError: none can be made; it names the remedy."""
    if given:
        return given
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if load_format.rpartition(".")[2].lower() == "dummy":
        text = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
        return "dummy-" + hashlib.sha256(f"{text}{model.seed}".encode()).hexdigest()
    try:
        return directory_digest(model_directory(model.model, model.revision))
    except Exception as error:
        raise ValueError(
            f"kvtier: the weights of {model.model!r} cannot be read to tell them from others "
            f"({error}); set \"weights_digest\" in kv_connector_extra_config to a text that "
            "changes whenever they do") from error


def hash_scheme(vllm_config: Any) -> str:
    """How this engine's block hashes are made, and from which root: hashes of two schemes never
    mean the same block. ValueError: the root is random, and not known in this process."""
    from vllm.v1.core import kv_cache_utils
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "builtin"))
    seed = os.environ.get("PYTHONHASHSEED")
    default = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    if seed is not None:
        root = f"seed-{seed}"
    elif default is not None and algorithm.startswith("sha"):
        root = f"seed-{default}"
    elif isinstance(root_hash := getattr(kv_cache_utils, "NONE_HASH", None), bytes):
        _log.warning("kvtier: block hashes start from a random root (%s, PYTHONHASHSEED is not "
                     "set): what is stored is of no use after a restart. Set PYTHONHASHSEED=0, or "
                     "--prefix-caching-hash-algo sha256", algorithm)
        root = bytes(root_hash).hex()
    else:
        raise ValueError(f"kvtier: block hashes start from a random root that this process does "
                         f"not know ({algorithm}): set PYTHONHASHSEED=0 for the whole engine")
    return f"vllm-{algorithm}-{root}"


def identity_of(vllm_config: Any, digest: str, salt: bytes) -> Identity:
    """The identity of an engine's cache, the same in the scheduler and in every worker; in a
    pipeline that of this process's stage (the scheduler's: the first)."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    config = model.hf_text_config.to_dict()
    rope = {name: config.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters",
                                                "partial_rotary_factor") if config.get(name)}
    extra = {"cache_dtype": str(vllm_config.cache_config.cache_dtype), "dtype": str(model.dtype),
             "quantization": str(model.quantization),
             "hf_overrides": json.dumps(getattr(model, "hf_overrides", None), sort_keys=True,
                                        default=str)}
    return Identity(
        "vllm", model=Path(model.model).name, revision=digest, key_scheme=hash_scheme(vllm_config),
        rope=json.dumps(rope, sort_keys=True, default=str), extra=json.dumps(extra, sort_keys=True),
        salt=salt, tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size, pp_rank=stage_and_rank(parallel)[0])


def stage_and_rank(parallel: Any) -> tuple[int, int]:
    """Of this process: stage of the pipeline, and rank in the tensor-parallel group of the stage."""
    return divmod(parallel.rank, parallel.tensor_parallel_size)


class Adapters:
    """Digests of LoRA adapters. vLLM's hashes hold an adapter's name; what is stored for longer
    than the engine lives must not depend on what a name stands for today."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], bytes | None] = {}
        self._names: dict[str, bytes] = {}

    def digest(self, lora: Any) -> bytes | None:
        """32 bytes; b"" without an adapter; None: nothing of the request is stored or loaded, since
        the adapter's files cannot be read, or its name has stood for other weights in this engine,
        whose own caches go by the name."""
        if lora is None:
            return b""
        mark = (lora.lora_name, lora.lora_path)
        if mark not in self._known or getattr(lora, "load_inplace", False):
            try:
                self._known[mark] = bytes.fromhex(directory_digest(
                    model_directory(lora.lora_path, None)))
            except Exception:
                self._known[mark] = None
        found = self._known[mark]
        if found is None:
            return None
        if self._names.setdefault(lora.lora_name, found) != found:
            if self._names[lora.lora_name]:
                _log.warning("kvtier: the name of LoRA adapter %r stands for other weights than "
                             "before: nothing of it is stored or loaded until the engine starts "
                             "anew; give new weights a new name", lora.lora_name)
            self._names[lora.lora_name] = b""
            return None
        return found
