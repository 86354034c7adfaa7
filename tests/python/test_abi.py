"""Goal: kvtier._c describes the C headers as they are.
Method: abi_check.py (a C program compiled against include/kvtier). Each kind of drift is made once
on purpose, and must be seen."""
import ctypes as C

import pytest
from abi_check import CC, c_program, differences, drift, python_side, run_c

from kvtier import _c, _llama, cache, layout, session

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")


def test_the_core_is_that_of_the_headers(tmp_path):
    assert drift(_c, tmp_path) == []
    assert differences(_llama, tmp_path, _c.VERSION, "src/adapters/libkvtier-llama.map") == []


@pytest.mark.parametrize("change", [
    lambda f: [f[0], f[2], f[1], *f[3:]],                                # two fields exchanged
    lambda f: [*f[:2], (f[2][0], C.c_uint8), *f[3:]],                    # a field too narrow
    lambda f: f[:-1],                                                    # the last one forgotten
])
def test_drift_of_a_struct_is_seen(tmp_path, change):
    moved = type("kvt_load_opts", (C.Structure,),
                 {"_fields_": change(list(_c.kvt_load_opts._fields_))})
    printed = run_c(tmp_path, c_program([_c.kvt_load_opts], {}, "")).splitlines()
    assert printed != python_side([moved], {}, _c.VERSION)
    assert printed == python_side([_c.kvt_load_opts], {}, _c.VERSION)


class Changed:
    """kvtier._c with one thing changed."""

    def __init__(self, **changes):
        self.__dict__.update(changes)

    def __getattr__(self, name):
        return getattr(_c, name)


@pytest.mark.parametrize("changes, word", [
    ({"PROTOTYPES": _c.PROTOTYPES.replace("int kvt_flush(struct kvt_cache *)",
                                          "int kvt_flush(struct kvt_cache *, int)")}, "kvt_flush"),
    ({"PROTOTYPES": _c.PROTOTYPES.replace("void kvt_close(struct kvt_cache *);\n", "")},
     "kvt_close"),
    ({"CONSTANTS": dict(_c.CONSTANTS, KVT_TIER_DISK=1)}, "KVT_TIER_DISK"),
    ({"VERSION": "9.9.9"}, "9.9.9"),
    ({"STRUCTS": _c.STRUCTS, "ErrorCode": list(_c.ErrorCode)[1:]}, "KVT_E_INVAL"),
])
def test_drift_of_anything_else_is_seen(tmp_path, changes, word):
    assert any(word in sentence for sentence in drift(Changed(**changes), tmp_path))


def test_enums_are_made_of_the_checked_constants():
    for enum, prefix in ((layout.Dtype, "DTYPE"), (layout.Kind, "PART"), (layout.Level, "LEVEL"),
                         (layout.GroupKind, "GROUP"), (layout.Tier, "TIER"), (cache.Write, "WRITE"),
                         (cache.Cut, "PLAN_CUT"), (cache.Reason, "PLAN"),
                         (session.State, "SESSION")):
        for member in enum:
            assert _c.CONSTANTS[f"KVT_{prefix}_{member.name}"] == member.value, member


def test_the_library_has_every_function_and_the_version():
    assert _c.load().kvt_version().decode() == _c.VERSION
