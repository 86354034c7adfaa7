"""ctypes view of libkvtier-llama, and how it comes to share the one llama.cpp of the process.

The adapter leaves the symbols of llama.cpp undefined. llama_cpp loads its libllama.so privately;
load() opens that same library again with RTLD_GLOBAL, which makes no second copy, and then the
adapter, whose symbols are thereby those of the library that made the contexts
(docs/decisions/0019). Where llama_cpp was installed without a library, the one of the wheel serves:
provide_library() must run before llama_cpp is imported.
"""
from __future__ import annotations

import ctypes as C
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import threading

from . import _c
from ._errors import LibraryError

SONAME = "libkvtier-llama.so.0"
LLAMA_CPP_PYTHON = "0.3.36"  # the version whose llama.cpp the adapter is compiled for


class kvt_llama_opts(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("context_params", C.c_void_p),
                ("model_path", C.c_char_p), ("lora", C.c_char_p), ("digest_dir", C.c_char_p),
                ("salt", C.c_char_p), ("salt_len", C.c_size_t), ("block_tokens", C.c_uint32),
                ("window_tokens", C.c_uint32), ("level", C.c_int), ("min_level", C.c_int),
                ("staging_seq", C.c_int32), ("cut", C.c_int), ("engine_build", C.c_char_p)]


class kvt_llama_report(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("tokens_usable", C.c_size_t),
                ("tokens_found", C.c_size_t), ("tokens_loaded", C.c_size_t),
                ("blocks_dram", C.c_size_t), ("blocks_disk", C.c_size_t),
                ("bytes_moved", C.c_uint64), ("lookup_ns", C.c_int64), ("load_ns", C.c_int64),
                ("set_state_ns", C.c_int64), ("plan_reason", C.c_int), ("plan_unsure", C.c_int),
                ("late", C.c_int), ("tokens_planned", C.c_size_t),
                ("tokens_computed", C.c_size_t), ("compute_ns", C.c_int64),
                ("plan_ttft_s", C.c_double), ("plan_recompute_s", C.c_double),
                ("plan_load_all_s", C.c_double), ("blocks_remote", C.c_size_t)]


STRUCTS = (kvt_llama_opts, kvt_llama_report)
CONSTANTS: dict[str, int] = {}
PROTOTYPES = """
void kvt_llama_opts_init(struct kvt_llama_opts *);
int kvt_llama_check_file(const char *, char *, size_t);
int kvt_llama_new(struct kvt_cache *, struct llama_context *, const struct kvt_llama_opts *, struct kvt_llama **, char *, size_t);
void kvt_llama_free(struct kvt_llama *);
long kvt_llama_prefetch(struct kvt_llama *, const int32_t *, size_t);
long kvt_llama_restore(struct kvt_llama *, int32_t, const int32_t *, size_t, struct kvt_llama_report *);
int kvt_llama_calibrate(struct kvt_llama *, size_t);
long kvt_llama_save(struct kvt_llama *, int32_t, const int32_t *, size_t);
int kvt_llama_sync(struct kvt_llama *);
size_t kvt_llama_token_bytes(const struct kvt_llama *);
struct kvt_ns *kvt_llama_ns(struct kvt_llama *);
const uint8_t *kvt_llama_ns_id(const struct kvt_llama *);
void kvt_llama_stats_each(const struct kvt_llama *, kvt_stats_fn, void *);
const char *kvt_llama_error(const struct kvt_llama *);
"""
NOT_BOUND = ("kvt_llama_compute",)

_lock = threading.Lock()
_library: C.CDLL | None = None


def library_path() -> pathlib.Path:
    """The adapter that load() takes: $KVTIER_LLAMA_LIBRARY, else the one of the wheel."""
    named = os.environ.get("KVTIER_LLAMA_LIBRARY")
    return pathlib.Path(named) if named else _c.library_dir() / SONAME


def provide_library() -> None:
    """Let llama_cpp find a libllama.so: its own, else the one that came with the adapter. Raises
    LibraryError when llama_cpp is not installed, is of another version, or there is none."""
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError(f"llama-cpp-python is not installed: pip install llama-cpp-python=="
                           f"{LLAMA_CPP_PYTHON}") from None
    if version != LLAMA_CPP_PYTHON:
        raise LibraryError(f"llama-cpp-python {version} is installed; this kvtier is compiled for "
                           f"{LLAMA_CPP_PYTHON}, and llama.cpp's structs change between versions: "
                           f"pip install llama-cpp-python=={LLAMA_CPP_PYTHON}")
    if not library_path().exists():
        raise LibraryError(f"no {library_path()}: this wheel was built without the adapter for "
                           "llama.cpp (KVT_LLAMA_PREFIX=$(scripts/build-llama.sh) pip install .)")
    if os.environ.get("LLAMA_CPP_LIB_PATH"):
        return
    package = importlib.util.find_spec("llama_cpp")
    places = package.submodule_search_locations if package else None
    if any((pathlib.Path(place) / "lib/libllama.so").exists() for place in places or ()):
        return
    ours = library_path().parent / "llama"
    if not (ours / "libllama.so").exists():
        raise LibraryError("llama_cpp was installed without its library, and neither does this "
                           f"wheel carry one ({ours}): install llama-cpp-python with it")
    os.environ["LLAMA_CPP_LIB_PATH"] = str(ours)


def load() -> C.CDLL:
    """The adapter, bound to the libllama.so that llama_cpp uses. Loads libkvtier too."""
    global _library
    with _lock:
        if _library is None:
            _c.load()
            import llama_cpp.llama_cpp as engine
            C.CDLL(engine._lib._name, mode=C.RTLD_GLOBAL)  # the copy that is there, now for all
            try:
                library = C.CDLL(str(library_path()))
            except OSError as error:
                raise LibraryError(f"{library_path()} cannot be loaded: {error}") from None
            _c.declare(library, PROTOTYPES)
            _library = library
    return _library


def engine_build() -> str:
    """Which libraries compute: a digest over libllama.so and the ggml beside it."""
    import llama_cpp.llama_cpp as engine
    path = pathlib.Path(engine._lib._name)
    digest = hashlib.sha256()
    for file in sorted({path, *path.parent.glob("libggml*.so")}):
        with open(file, "rb") as opened:
            digest.update(file.name.encode() + b"\0")
            while piece := opened.read(1 << 20):
                digest.update(piece)
    return f"llama-cpp-python {LLAMA_CPP_PYTHON} sha256:{digest.hexdigest()}"
