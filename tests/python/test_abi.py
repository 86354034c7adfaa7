"""Goal: kvtier._c describes the C headers as they are.
Method: a C program made from _c (every struct, constant, prototype, error code) is compiled against
include/kvtier: prototypes that differ do not compile, and what it prints (sizeof, offsetof,
constants) must be what ctypes says. Needs a C compiler and the source tree. Each kind of drift is
made once on purpose, and must be seen.
"""
import ctypes as C
import pathlib
import re
import shutil
import subprocess

import pytest

from kvtier import _c, _errors, cache, layout, session

ROOT = pathlib.Path(__file__).resolve().parents[2]
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler")


def c_program(structs, constants, prototypes):
    lines = ["#include <kvtier/kvtier.h>", "#include <kvtier/session.h>",
             "#include <kvtier/codec.h>", "#include <stdio.h>", prototypes, "int main(void) {"]
    for struct in structs:
        name = struct.__name__
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        lines += [f'printf("{name}.{field[0]} %zu %zu\\n", offsetof(struct {name}, {field[0]}), '
                  f'sizeof(((struct {name} *)0)->{field[0]}));' for field in struct._fields_]
    lines += [f'printf("{name} %lld\\n", (long long){name});' for name in constants]
    lines += ['printf("version %s\\n", KVT_VERSION_STRING);', "return 0; }"]
    return "\n".join(lines) + "\n"


def run_c(tmp_path, text):
    source, program = tmp_path / "abi.c", tmp_path / "abi"
    source.write_text(text)
    flags = ["-std=c11", "-Wall", "-Werror", "-Wno-array-parameter", "-Wno-unknown-warning-option"]
    done = subprocess.run([CC, *flags, "-I", str(ROOT / "include"), "-o", str(program),
                           str(source)], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError("the prototypes are not those of the headers:\n" + done.stderr[:4000])
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout


def python_side(structs, constants):
    out = []
    for struct in structs:
        out.append(f"{struct.__name__} {C.sizeof(struct)}")
        for field in struct._fields_:
            place = getattr(struct, field[0])
            out.append(f"{struct.__name__}.{field[0]} {place.offset} {place.size}")
    out += [f"{name} {value}" for name, value in constants.items()]
    return out + [f"version {_c.VERSION}"]


def test_structs_constants_and_prototypes_are_those_of_the_headers(tmp_path):
    printed = run_c(tmp_path, c_program(_c.STRUCTS, _c.CONSTANTS, _c.PROTOTYPES)).splitlines()
    assert printed == python_side(_c.STRUCTS, _c.CONSTANTS)


@pytest.mark.parametrize("change", [
    lambda f: [f[0], f[2], f[1], *f[3:]],                                # two fields exchanged
    lambda f: [*f[:2], (f[2][0], C.c_uint8), *f[3:]],                    # a field too narrow
    lambda f: f[:-1],                                                    # the last one forgotten
])
def test_drift_of_a_struct_is_seen(tmp_path, change):
    moved = type("kvt_load_opts", (C.Structure,),
                 {"_fields_": change(list(_c.kvt_load_opts._fields_))})
    printed = run_c(tmp_path, c_program([_c.kvt_load_opts], {}, "")).splitlines()
    assert printed != python_side([moved], {})


def test_drift_of_a_prototype_or_constant_is_seen(tmp_path):
    with pytest.raises(AssertionError, match="kvt_flush"):
        run_c(tmp_path, c_program([], {}, "int kvt_flush(struct kvt_cache *, int);"))
    printed = run_c(tmp_path, c_program([], {"KVT_TIER_DISK": 0}, "")).splitlines()
    assert printed != python_side([], {"KVT_TIER_DISK": 1})


def test_enums_are_made_of_the_checked_constants():
    for enum, prefix in ((layout.Dtype, "DTYPE"), (layout.Kind, "PART"), (layout.Level, "LEVEL"),
                         (layout.GroupKind, "GROUP"), (layout.Tier, "TIER"), (cache.Write, "WRITE"),
                         (cache.Cut, "PLAN_CUT"), (cache.Reason, "PLAN"),
                         (session.State, "SESSION")):
        for member in enum:
            assert _c.CONSTANTS[f"KVT_{prefix}_{member.name}"] == member.value, member


def test_error_codes_are_those_of_the_header():
    text = (ROOT / "include/kvtier/error.h").read_text()
    codes = {name: int(value) for name, value in re.findall(r"X\(KVT_E_(\w+), (-\d+),", text)}
    assert codes == {code.name: code.value for code in _errors.ErrorCode}


def test_every_exported_function_is_bound_or_left_out_on_purpose():
    exported = set(re.findall(r"\bkvt_\w+", (ROOT / "src/libkvtier.map").read_text()))
    bound = {_c.parse_prototype(line)[0] for line in _c.PROTOTYPES.strip().splitlines()}
    assert exported == bound | set(_c.NOT_BOUND)
    assert not bound & set(_c.NOT_BOUND)


def test_the_library_has_every_function_and_the_version():
    assert _c.load().kvt_version().decode() == _c.VERSION
