#!/usr/bin/env python3
"""Let the CUDA build of PyTorch from PyPI be imported on a machine without a GPU.

It is linked with libraries that a CPU never calls. Where the CUDA toolkit of the machine has most
of them, four remain (cusparseLt, nvshmem, cufile, nccl): this makes empty ones beside torch's own,
with the symbols that torch asks for; each aborts when it is called. For the tests of kvtier only.
Usage: cuda_stubs.py SITE-PACKAGES    needs nm and cc; says what it made
"""
import pathlib
import re
import subprocess
import sys
import tempfile

LIBRARIES = {"libcusparseLt.so.0": "cusparseLt", "libnvshmem_host.so.3": "nvshmem",
             "libcufile.so.0": "cuFile", "libnccl.so.2": "nccl[A-Z]"}


def undefined(folder):
    """Symbols, with their versions, that the libraries of a folder take from elsewhere."""
    found = set()
    for library in folder.glob("*.so"):
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True,
                                text=True, check=True).stdout
        found |= {line.split()[-1] for line in listed.splitlines() if line.strip()}
    return found


def make(library, symbols, folder, work):
    names = sorted({symbol.partition("@")[0] for symbol in symbols})
    versions = sorted({symbol.rpartition("@")[2] for symbol in symbols if "@" in symbol})
    source, script = work / "stub.c", work / "stub.map"
    source.write_text("#include <stdlib.h>\n" +
                      "".join(f"void {name}(void) {{ abort(); }}\n" for name in names))
    flags = []
    if versions:
        script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
        flags = [f"-Wl,--version-script={script}"]
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", folder / library,
                    f"-Wl,-soname,{library}", *flags, source], check=True)
    print(f"{library}: {len(names)} empty functions")


def main():
    folder = pathlib.Path(sys.argv[1]) / "torch/lib"
    symbols = undefined(folder)
    with tempfile.TemporaryDirectory() as work:
        for library, pattern in LIBRARIES.items():
            wanted = [symbol for symbol in symbols if re.match(pattern, symbol)]
            if not (folder / library).exists():
                make(library, wanted, folder, pathlib.Path(work))


if __name__ == "__main__":
    main()
