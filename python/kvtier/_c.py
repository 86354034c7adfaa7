"""ctypes core: the C interface of libkvtier as it is, without comfort.

Structures have the names and fields of the C headers, functions are declared by their C prototypes
(PROTOTYPES). tests/python/test_abi.py compiles a C program against the headers that compares every
size, offset, constant and prototype, so that a header that moves fails there and not in a user's
process. What is meant for use is in kvtier.cache, kvtier.layout and kvtier.codec.

Threads: as the C functions; every call releases the GIL. The library is loaded by the first call of
load(), never by an import.
"""
from __future__ import annotations

import ctypes as C
import os
import pathlib
import re
import threading

from ._errors import ErrorCode as ErrorCode
from ._errors import LibraryError, make_error

VERSION = "0.1.0"  # KVT_VERSION_STRING of the headers that this file describes
SONAME = "libkvtier.so.0"

HASH_BYTES_MAX = 32
NS_BYTES = 16
DEVICE_HOST = -1
LIMIT_NONE = (1 << 63) - 1
NO_PAGE = 0xFFFFFFFF
STATS_FN = C.CFUNCTYPE(None, C.c_void_p, C.c_char_p, C.c_uint64, C.c_char_p, C.c_char_p)
LOG_FN = C.CFUNCTYPE(None, C.c_void_p, C.c_int, C.c_char_p)
CONFIG_FN = C.CFUNCTYPE(None, C.c_void_p, C.c_char_p, C.c_char_p, C.c_char_p, C.c_char_p)

# Constants of the headers by their C names: what the Python enums are made of.
CONSTANTS = {
    "KVT_HASH_BYTES_MAX": HASH_BYTES_MAX, "KVT_NS_BYTES": NS_BYTES, "KVT_TILE_TOKENS": 16,
    "KVT_BLOCK_TOKENS_MAX": 4096, "KVT_HEAD_DIM_MAX": 1024, "KVT_DEVICE_HOST": DEVICE_HOST,
    "KVT_LIMIT_NONE": LIMIT_NONE,
    "KVT_PARTS_MAX": 4096, "KVT_GROUPS_MAX": 16, "KVT_SESSION_NO_PAGE": NO_PAGE,
    "KVT_DTYPE_BF16": 1, "KVT_DTYPE_F16": 2, "KVT_DTYPE_F32": 3, "KVT_DTYPE_BYTE": 4,
    "KVT_PART_K": 1, "KVT_PART_V": 2, "KVT_PART_MLA": 3, "KVT_PART_OPAQUE": 4,
    "KVT_LEVEL_DEFAULT": 0, "KVT_LEVEL_INT4": 1, "KVT_LEVEL_KV4": 2, "KVT_LEVEL_KV5": 3,
    "KVT_LEVEL_KV6": 4, "KVT_LEVEL_KV8": 5, "KVT_LEVEL_RAW": 6,
    "KVT_GROUP_FULL": 0, "KVT_GROUP_WINDOW": 1, "KVT_GROUP_STATE": 2,
    "KVT_TIER_MISS": 0, "KVT_TIER_DRAM": 1, "KVT_TIER_DISK": 2, "KVT_TIER_REMOTE": 3,
    "KVT_TIER_PENDING": 4,
    "KVT_WRITE_DEFAULT": 0, "KVT_WRITE_THROUGH": 1, "KVT_WRITE_EVICT": 2, "KVT_WRITE_IDLE": 3,
    "KVT_WRITE_AUTO": 4,
    "KVT_LOOKUP_PROBE": 1,
    "KVT_WAIT_FOR_NOTHING": 0, "KVT_WAIT_FOR_STREAM": 1, "KVT_WAIT_FOR_EVENT": 2,
    "KVT_PLAN_CUT_NONE": 0, "KVT_PLAN_CUT_SERIAL": 1, "KVT_PLAN_CUT_OVERLAP": 2,
    "KVT_PLAN_NO_BLOCKS": 0, "KVT_PLAN_LOAD": 1, "KVT_PLAN_RECOMPUTE": 2, "KVT_PLAN_CUT": 3,
    "KVT_PLAN_PREFIX": 4, "KVT_PLAN_PROBE": 5, "KVT_PLAN_OFF": 6,
    "KVT_SESSION_RECORD_NONE": 0, "KVT_SESSION_RECORD_WINDOW": 1, "KVT_SESSION_RECORD_FINAL": 2,
    "KVT_SESSION_IDLE": 1, "KVT_SESSION_RESTORING": 2, "KVT_SESSION_ACTIVE": 3,
}


_RANGES = {kind: (0, (1 << 8 * C.sizeof(kind)) - 1) if kind(-1).value > 0 else
           (-(1 << 8 * C.sizeof(kind) - 1), (1 << 8 * C.sizeof(kind) - 1) - 1)
           for kind in (C.c_uint8, C.c_uint16, C.c_uint32, C.c_uint64, C.c_size_t, C.c_int,
                        C.c_int32, C.c_int64, C.c_long)}


def _fits(kind: type, value: object, what: str) -> None:
    """ValueError for a number that does not fit its C type: ctypes would cut it without a word."""
    limits = _RANGES.get(kind)
    if limits and isinstance(value, int) and not limits[0] <= value <= limits[1]:
        raise ValueError(f"{what}: {value} is not within {limits[0]} to {limits[1]}")


class _Struct(C.Structure):
    """A C struct that takes no number that does not fit its field."""

    def __init__(self, *values, **named) -> None:
        for (name, kind), value in zip(self._fields_, values):
            _fits(kind, value, name)
        super().__init__(*values)
        for name, value in named.items():
            setattr(self, name, value)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._kinds = dict(cls.__dict__["_fields_"])

    def __setattr__(self, name: str, value) -> None:
        _fits(self._kinds.get(name), value, name)
        super().__setattr__(name, value)


def _checked(kind: type) -> type:
    """The type of an argument that takes no number that does not fit."""
    class Checked(kind):
        @classmethod
        def from_param(cls, value):
            if isinstance(value, kind):
                return value
            _fits(kind, value, "argument")
            return kind(value)
    return Checked


class kvt_part(_Struct):
    _fields_ = [("kind", C.c_uint8), ("dtype", C.c_uint8), ("group", C.c_uint16),
                ("layer", C.c_uint32), ("heads", C.c_uint32), ("head_dim", C.c_uint32)]


class kvt_group(_Struct):
    _fields_ = [("group", C.c_uint16), ("kind", C.c_uint8), ("reserved", C.c_uint8),
                ("block_tokens", C.c_uint32), ("window_tokens", C.c_uint32)]


class kvt_layout(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("block_tokens", C.c_uint32),
                ("part_count", C.c_uint32), ("parts", C.POINTER(kvt_part)),
                ("group_count", C.c_uint32), ("groups", C.POINTER(kvt_group))]


class kvt_part_place(_Struct):
    _fields_ = [("base", C.c_void_p), ("stride_block", C.c_int64), ("stride_head", C.c_int64),
                ("stride_token", C.c_int64), ("stride_elem", C.c_int64)]


class kvt_pool_desc(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("device", C.c_int32), ("block_count", C.c_uint32),
                ("place_count", C.c_uint32), ("places", C.POINTER(kvt_part_place))]


class kvt_key(_Struct):
    _fields_ = [("hash", C.c_uint8 * HASH_BYTES_MAX), ("hash_len", C.c_uint8),
                ("reserved", C.c_uint8), ("group", C.c_uint16), ("shard", C.c_uint32)]


class kvt_key_extra(_Struct):
    _fields_ = [("type", C.c_uint32), ("len", C.c_uint32), ("bytes", C.c_void_p)]


class kvt_identity(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("engine", C.c_char_p), ("key_scheme", C.c_char_p),
                ("model", C.c_char_p), ("revision", C.c_char_p), ("adapter", C.c_char_p),
                ("layout", C.c_char_p), ("rope", C.c_char_p), ("rotation", C.c_char_p),
                ("extra", C.c_char_p), ("salt", C.c_void_p), ("salt_len", C.c_size_t),
                ("tp_size", C.c_uint32), ("pp_size", C.c_uint32), ("pp_rank", C.c_uint32)]


class kvt_ns_limits(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("quota_bytes", C.c_uint64), ("ttl_ns", C.c_int64)]


class kvt_lookup_opts(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("min_level", C.c_int), ("flags", C.c_uint32),
                ("shards", C.c_uint32), ("prompt_tokens", C.c_uint32), ("roots", C.c_void_p)]


class kvt_group_chain(_Struct):
    _fields_ = [("group", C.c_uint16), ("reserved", C.c_uint16), ("keys", C.c_void_p),
                ("n", C.c_size_t), ("tiers", C.c_void_p), ("first", C.c_size_t),
                ("count", C.c_size_t)]


class kvt_store_opts(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("parent", C.c_void_p), ("first_pos", C.c_uint32),
                ("level", C.c_int), ("exact", C.c_int), ("cool", C.c_int), ("write", C.c_int),
                ("wait", C.c_int), ("wait_for", C.c_void_p)]


class kvt_load_opts(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("deadline_ns", C.c_int64), ("min_level", C.c_int),
                ("wait", C.c_int), ("wait_for", C.c_void_p), ("layers", C.c_int),
                ("reserved", C.c_int)]


class kvt_plan_query(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("tiers", C.c_void_p), ("n", C.c_size_t),
                ("first_tokens", C.c_uint64), ("prompt_tokens", C.c_uint64),
                ("gpu_busy", C.c_double), ("group", C.c_uint16), ("cut", C.c_uint16),
                ("reserved", C.c_uint32), ("roots", C.c_void_p)]


class kvt_plan(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("first", C.c_size_t), ("count", C.c_size_t),
                ("reason", C.c_int), ("unsure", C.c_int), ("ttft_s", C.c_double),
                ("load_s", C.c_double), ("gpu_s", C.c_double), ("recompute_s", C.c_double),
                ("load_all_s", C.c_double), ("deadline_s", C.c_double)]


class kvt_req_report(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("blocks_ok", C.c_size_t),
                ("blocks_run_ok", C.c_size_t), ("blocks_dram", C.c_size_t),
                ("blocks_disk", C.c_size_t), ("bytes_moved", C.c_uint64),
                ("elapsed_ns", C.c_int64), ("blocks_remote", C.c_size_t)]


class kvt_encode_report(_Struct):
    _fields_ = [("sqnr_db_min", C.c_float), ("part", C.c_uint32), ("head", C.c_uint32),
                ("tile", C.c_uint32)]


class kvt_session_group(_Struct):
    _fields_ = [("group", C.c_uint16), ("reserved", C.c_uint16), ("first_page", C.c_uint32),
                ("page_count", C.c_uint32), ("scratch_pages", C.c_uint32)]


class kvt_session_mgr_opts(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("window_tokens", C.c_uint32),
                ("window_level", C.c_int), ("level", C.c_int), ("sessions_max", C.c_uint32),
                ("tokens_max", C.c_uint32), ("blocks_max", C.c_uint32),
                ("first_page", C.c_uint32), ("page_count", C.c_uint32),
                ("scratch_pages", C.c_uint32), ("shard", C.c_uint32),
                ("groups", C.c_void_p), ("group_count", C.c_uint32), ("reserved", C.c_uint32)]


class kvt_session_resume_opts(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("deadline_ns", C.c_int64), ("cut", C.c_int),
                ("gpu_busy", C.c_double)]


class kvt_session_plan(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("tokens", C.c_uint32), ("in_l0", C.c_uint32),
                ("from_dram", C.c_uint32), ("from_disk", C.c_uint32), ("recompute", C.c_uint32),
                ("reason", C.c_int32), ("decision", C.c_int32), ("head", C.c_uint32)]


class kvt_session_info(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("state", C.c_int), ("tokens", C.c_uint32),
                ("filled", C.c_uint32), ("blocks", C.c_uint32)]


class kvt_session_block(_Struct):
    _fields_ = [("struct_size", C.c_size_t), ("page", C.c_uint32), ("sessions", C.c_uint32),
                ("page_level", C.c_int), ("record", C.c_int), ("tier", C.c_int)]


class kvt_session_stats(_Struct):
    _fields_ = [("struct_size", C.c_size_t)] + [(name, C.c_uint64) for name in (
        "sessions", "pages", "pages_free", "blocks", "in_flight", "resumed", "blocks_l0",
        "blocks_loaded", "load_short", "met", "blocks_beside", "shared", "duplicates",
        "stored_window", "stored_final", "cooled_record", "store_failed", "cool_failed", "evicted",
        "evicted_unsaved", "tails_lost", "cut_tokens", "refused_busy", "refused_limit",
        "truncated_tokens")]


STRUCTS = (kvt_part, kvt_group, kvt_layout, kvt_part_place, kvt_pool_desc, kvt_key, kvt_key_extra,
           kvt_identity, kvt_ns_limits, kvt_lookup_opts, kvt_group_chain, kvt_store_opts,
           kvt_load_opts,
           kvt_plan_query, kvt_plan, kvt_req_report, kvt_encode_report, kvt_session_group,
           kvt_session_mgr_opts, kvt_session_resume_opts, kvt_session_plan, kvt_session_info,
           kvt_session_block, kvt_session_stats)

# As they stand in the headers, on one line each. Pointers become c_void_p (which takes byref(),
# arrays, integers and None), returned "const char *" becomes bytes.
PROTOTYPES = """
const char *kvt_version(void);
const char *kvt_build_info(void);
const char *kvt_strerror(int);
const char *kvt_error_name(int);
const char *kvt_codec_isa(void);
int kvt_level_parse(const char *);
const char *kvt_level_name(int);
int kvt_level_supported(int);
int kvt_level_for_part(int, const struct kvt_part *);
double kvt_level_bits(int, uint32_t, int, int);
int kvt_layout_check(const struct kvt_layout *);
int kvt_pool_check(const struct kvt_layout *, const struct kvt_pool_desc *);
size_t kvt_payload_bytes(const struct kvt_layout *, uint16_t, int);
int kvt_encode_block(const struct kvt_layout *, uint16_t, int, const struct kvt_pool_desc *, uint32_t, void *, size_t, int, struct kvt_encode_report *);
int kvt_decode_block(const struct kvt_layout *, uint16_t, int, const void *, size_t, const struct kvt_pool_desc *, uint32_t);
uint32_t kvt_group_tokens(const struct kvt_layout *, uint16_t);
int kvt_key_root(const void *, size_t, uint8_t *);
long kvt_key_chain(const uint8_t *, const uint32_t *, size_t, uint32_t, const struct kvt_key_extra *, size_t, uint16_t, uint32_t, struct kvt_key *, size_t);
void kvt_identity_init(struct kvt_identity *);
int kvt_namespace_id(const struct kvt_identity *, const struct kvt_layout *, uint8_t *);
int kvt_config_new(struct kvt_config **);
void kvt_config_free(struct kvt_config *);
int kvt_config_set(struct kvt_config *, const char *, const char *);
int kvt_config_set_all(struct kvt_config *, const char *);
const char *kvt_config_error(const struct kvt_config *);
void kvt_config_log(struct kvt_config *, kvt_log_fn, void *);
void kvt_config_each(const struct kvt_config *, kvt_config_each_fn, void *);
int kvt_open(const struct kvt_config *, struct kvt_cache **, char *, size_t);
int kvt_open_at(const char *, struct kvt_cache **, char *, size_t);
void kvt_close(struct kvt_cache *);
int kvt_ns_open(struct kvt_cache *, const struct kvt_identity *, const struct kvt_layout *, struct kvt_ns **);
void kvt_ns_close(struct kvt_ns *);
int kvt_ns_limit(struct kvt_ns *, const struct kvt_ns_limits *);
const uint8_t *kvt_ns_id(const struct kvt_ns *);
size_t kvt_ns_record_bytes(const struct kvt_ns *, uint16_t, int);
int kvt_pool_register(struct kvt_cache *, const struct kvt_layout *, const struct kvt_pool_desc *, struct kvt_pool **);
void kvt_pool_unregister(struct kvt_pool *);
int kvt_pool_reset_origin(struct kvt_pool *, const uint32_t *, size_t);
int kvt_pool_reset_origin_group(struct kvt_pool *, uint16_t, const uint32_t *, size_t);
long kvt_lookup(struct kvt_ns *, const struct kvt_key *, size_t, const struct kvt_lookup_opts *, enum kvt_tier *);
long kvt_lookup_groups(struct kvt_ns *, struct kvt_group_chain *, size_t, size_t, const struct kvt_lookup_opts *);
size_t kvt_usable_blocks(uint32_t, size_t);
int kvt_store(struct kvt_ns *, struct kvt_pool *, const struct kvt_key *, const uint32_t *, size_t, const struct kvt_store_opts *, struct kvt_req **);
int kvt_load(struct kvt_ns *, struct kvt_pool *, const struct kvt_key *, const uint32_t *, size_t, const struct kvt_load_opts *, struct kvt_req **);
long kvt_prefetch(struct kvt_ns *, const struct kvt_key *, size_t, const struct kvt_load_opts *);
int kvt_plan(struct kvt_ns *, const struct kvt_plan_query *, struct kvt_plan *);
int kvt_observe_prefill(struct kvt_ns *, uint64_t, uint64_t, double);
int kvt_req_wait(struct kvt_req *, int64_t);
int kvt_req_wait_layer(struct kvt_req *, uint32_t, int64_t);
void kvt_req_cancel(struct kvt_req *);
const int32_t *kvt_req_status(const struct kvt_req *, size_t *);
int kvt_req_report(const struct kvt_req *, struct kvt_req_report *);
void kvt_req_free(struct kvt_req *);
int kvt_event_fd(struct kvt_cache *);
long kvt_pin(struct kvt_ns *, const struct kvt_key *, size_t);
long kvt_unpin(struct kvt_ns *, const struct kvt_key *, size_t);
long kvt_purge(struct kvt_ns *, const struct kvt_key *, size_t);
int kvt_flush(struct kvt_cache *);
void kvt_enable(struct kvt_cache *, int);
int kvt_stats_each(struct kvt_cache *, kvt_stats_fn, void *);
int kvt_stats_get(struct kvt_cache *, const char *, uint64_t *);
int kvt_session_mgr_open(struct kvt_ns *, struct kvt_pool *, const struct kvt_session_mgr_opts *, struct kvt_session_mgr **);
void kvt_session_mgr_close(struct kvt_session_mgr *);
long kvt_session_mgr_work(struct kvt_session_mgr *, int64_t);
int kvt_session_mgr_flush(struct kvt_session_mgr *);
int kvt_session_mgr_stats(struct kvt_session_mgr *, struct kvt_session_stats *);
int kvt_session_open(struct kvt_session_mgr *, const void *, size_t, uint64_t *);
int kvt_session_no_store(struct kvt_session_mgr *, uint64_t);
int kvt_session_close(struct kvt_session_mgr *, uint64_t);
int kvt_session_resume(struct kvt_session_mgr *, uint64_t, const uint32_t *, size_t, const struct kvt_session_resume_opts *, struct kvt_session_plan *);
int kvt_session_wait(struct kvt_session_mgr *, uint64_t, int64_t);
int kvt_session_meet(struct kvt_session_mgr *, uint64_t, uint32_t, uint32_t *, uint32_t *);
int kvt_session_get_plan(struct kvt_session_mgr *, uint64_t, struct kvt_session_plan *);
int kvt_session_append(struct kvt_session_mgr *, uint64_t, const uint32_t *, size_t);
long kvt_session_pages(struct kvt_session_mgr *, uint64_t, size_t, uint32_t *, size_t);
long kvt_session_group_pages(struct kvt_session_mgr *, uint64_t, uint16_t, size_t, uint32_t *, size_t);
int kvt_session_filled(struct kvt_session_mgr *, uint64_t, uint32_t);
int kvt_session_truncate(struct kvt_session_mgr *, uint64_t, uint32_t);
int kvt_session_idle(struct kvt_session_mgr *, uint64_t);
int kvt_session_get_info(struct kvt_session_mgr *, uint64_t, struct kvt_session_info *);
int kvt_session_get_group_block(struct kvt_session_mgr *, uint64_t, uint16_t, size_t, struct kvt_session_block *);
"""
# In the version map, and left out here on purpose.
NOT_BOUND = ("kvt_map_entries", "kvt_map_payload_bytes", "kvt_encode_map", "kvt_decode_map",
             "kvt_map_fit", "kvt_session_get_block")

_TYPES = {
    "void": None, "int": C.c_int, "long": C.c_long, "double": C.c_double, "size_t": C.c_size_t,
    "uint8_t": C.c_uint8, "uint16_t": C.c_uint16, "uint32_t": C.c_uint32, "uint64_t": C.c_uint64,
    "int32_t": C.c_int32, "int64_t": C.c_int64, "kvt_stats_fn": STATS_FN, "kvt_log_fn": LOG_FN,
    "kvt_config_each_fn": CONFIG_FN,
}
_ARGUMENTS = {name: _checked(kind) for name, kind in _TYPES.items() if kind in _RANGES}
_PROTOTYPE = re.compile(r"^(.+?)(kvt_\w+)\((.*)\);$")


def _type(text: str, returned: bool):
    text = text.strip()
    if text == "const char *" and returned:
        return C.c_char_p
    if text.endswith("*"):
        return C.c_void_p
    return _TYPES[text] if returned else _ARGUMENTS.get(text, _TYPES[text])


def parse_prototype(line: str):
    """(name, result type, argument types) of one line of PROTOTYPES."""
    found = _PROTOTYPE.match(line)
    if not found:
        raise ValueError(f"not a prototype: {line}")
    result, name, arguments = found.groups()
    types = [_type(a, False) for a in arguments.split(",")]
    return name, _type(result, True), [] if types == [None] else types


def declare(library: C.CDLL, prototypes: str) -> None:
    """Give the functions of a library their types; LibraryError names one that is missing."""
    for line in prototypes.strip().splitlines():
        name, result, arguments = parse_prototype(line)
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LibraryError(f"{library._name} has no {name}(): it is another version of kvtier "
                               f"than this package ({VERSION})") from None
        function.restype, function.argtypes = result, arguments


def library_dir() -> pathlib.Path:
    """Where the wheel keeps its shared libraries."""
    return pathlib.Path(__file__).resolve().parent / "lib"


def library_path() -> pathlib.Path:
    """The libkvtier that load() takes: $KVTIER_LIBRARY, else the one of the wheel."""
    named = os.environ.get("KVTIER_LIBRARY")
    return pathlib.Path(named) if named else library_dir() / SONAME


_lock = threading.Lock()
_library: C.CDLL | None = None


def load() -> C.CDLL:
    """libkvtier, loaded once. LibraryError says what is missing and what to do."""
    global _library
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            _library = _open(library_path())
    return _library


def _open(path: pathlib.Path) -> C.CDLL:
    if not path.exists():
        raise LibraryError(f"no libkvtier at {path}: install the wheel (pip install .), or name a "
                           "built one in KVTIER_LIBRARY")
    try:
        library = C.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}. It needs libcrypto.so.3, "
                           "libxxhash.so.0 and, where it was built with it, liburing.so.2 (Debian, "
                           "Ubuntu: libssl3 libxxhash0 liburing2)") from None
    declare(library, PROTOTYPES)
    found = library.kvt_version().decode()
    if found != VERSION:
        raise LibraryError(f"{path} is kvtier {found}, this package is made for {VERSION}: "
                           "install both from the same source")
    return library


def strerror(code: int) -> str:
    """The library's text of a code."""
    return load().kvt_strerror(code).decode(errors="replace")


def check(code: int, what: str, detail: str = "") -> int:
    """code when it is no error; else the exception for it: "what: detail or the code's text"."""
    if code >= 0:
        return code
    raise make_error(code, f"{what}: {detail or strerror(code)}")
