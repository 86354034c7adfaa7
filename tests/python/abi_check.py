#!/usr/bin/env python3
"""Are kvtier._c and the C headers the same? Standard library and a C compiler only.

A C program made from _c (every struct, constant and prototype) is compiled against include/kvtier:
prototypes that differ do not compile, and what it prints (sizeof, offsetof, constants) must be what
ctypes says. Usage: abi_check.py    exit 0 the same, 1 drift (said line by line), 77 no C compiler.
"""
import ctypes as C
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
FLAGS = ["-std=c11", "-Wall", "-Werror", "-Wno-array-parameter", "-Wno-unknown-warning-option"]


def c_program(structs, constants, prototypes):
    lines = ["#include <kvtier/kvtier.h>", "#include <kvtier/session.h>",
             "#include <kvtier/codec.h>", "#include <kvtier/llama.h>", "#include <stdio.h>",
             prototypes, "int main(void) {"]
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
    done = subprocess.run([CC, *FLAGS, "-I", str(ROOT / "include"), "-o", str(program),
                           str(source)], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError("the prototypes are not those of the headers:\n" + done.stderr[:4000])
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout


def python_side(structs, constants, version):
    out = []
    for struct in structs:
        out.append(f"{struct.__name__} {C.sizeof(struct)}")
        for field in struct._fields_:
            place = getattr(struct, field[0])
            out.append(f"{struct.__name__}.{field[0]} {place.offset} {place.size}")
    out += [f"{name} {value}" for name, value in constants.items()]
    return out + [f"version {version}"]


def exported(version_map):
    """Functions of a version map."""
    return set(re.findall(r"\bkvt_\w+", (ROOT / version_map).read_text()))


def drift(core, work, version_map="src/libkvtier.map"):
    """Sentences about what differs between the module kvtier._c and the headers."""
    out = differences(core, work, core.VERSION, version_map)
    text = (ROOT / "include/kvtier/error.h").read_text()
    codes = {name: int(value) for name, value in re.findall(r"X\(KVT_E_(\w+), (-\d+),", text)}
    mine = {code.name: code.value for code in core.ErrorCode}
    for name in sorted(codes.keys() ^ mine.keys()):
        out.append(f"KVT_E_{name}: in one of error.h and kvtier._errors")
    return out + [f"KVT_E_{name} is {codes[name]} in error.h, {mine[name]} in kvtier._errors"
                  for name in sorted(codes.keys() & mine.keys()) if codes[name] != mine[name]]


def differences(core, work, version, version_map):
    """The same for a module with STRUCTS, CONSTANTS, PROTOTYPES and NOT_BOUND: all but errors."""
    name_of = core.__name__ if hasattr(core, "__name__") else "kvtier._c"
    out = []
    try:
        printed = run_c(work, c_program(core.STRUCTS, core.CONSTANTS, core.PROTOTYPES))
    except AssertionError as error:
        return [str(error)]
    said = python_side(core.STRUCTS, core.CONSTANTS, version)
    for c_line, python_line in zip(printed.splitlines(), said):
        if c_line != python_line:
            out.append(f"the headers have '{c_line}', {name_of} has '{python_line}'")
    bound = {re.search(r"(kvt_\w+)\(", line).group(1)
             for line in core.PROTOTYPES.strip().splitlines()} | set(core.NOT_BOUND)
    for name in sorted(exported(version_map) ^ bound):
        out.append(f"{name}: in one of {version_map} and {name_of} (PROTOTYPES, NOT_BOUND)")
    return out


def main():
    if CC is None:
        print("abi_check: no C compiler")
        return 77
    sys.path.insert(0, str(ROOT / "python"))
    from kvtier import _c, _llama
    with tempfile.TemporaryDirectory() as work:
        found = drift(_c, pathlib.Path(work))
        found += differences(_llama, pathlib.Path(work), _c.VERSION,
                             "src/adapters/libkvtier-llama.map")
    for sentence in found:
        print(sentence)
    structs = len(_c.STRUCTS) + len(_llama.STRUCTS)
    print(f"kvtier._c, kvtier._llama: {structs} structs, {len(_c.CONSTANTS)} constants, "
          f"{len(found)} differences from the headers")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
