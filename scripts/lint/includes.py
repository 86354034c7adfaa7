"""Include direction: each folder may include only what the table of ARCHITECTURE.md says.

Public headers take <kvtier/...> and the C standard library; no header of CUDA, liburing or an
engine. Exit 1 with one line per finding.
"""
import pathlib
import re
import sys

# folder -> what it may include in quotes, by folder of src/ or by single header
ALLOWED = {
    "src/base": {"base"},
    "src/format": {"base", "format"},
    "src/codec": {"base", "codec"},
    "src/io": {"base", "io"},
    "src/plan": {"base", "plan"},
    "src/remote": {"base", "format", "remote"},
    "src/store": {"base", "format", "io", "plan", "remote", "store"},
    "src/client": {"base", "format", "codec", "plan", "client", "store/owner.h",
                   "io/io.h", "gpu/gpu.h", "gpu/gds.h", "gpu/gds_read.h", "gpu/tune.h", "remote/remote.h"},
    "src/daemon": {"base", "format", "daemon", "store/owner.h", "io/io.h", "remote/remote.h", "client/host.h",
                   "client/settings.h", "client/options.h", "client/pin.h", "client/link.h"},
    "src/gpu": {"base", "format", "codec", "gpu"},
    "src/adapters": {"adapters", "base/fd.h"},
}
STANDARD = {
    "stddef.h", "stdint.h", "stdbool.h", "stdarg.h", "limits.h", "inttypes.h",
}
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]')


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found = INCLUDE.match(line)
        if found:
            yield number, found.group(1), found.group(2)


def check_public(path, out):
    for number, _, name in includes(path):
        if not name.startswith("kvtier/") and name not in STANDARD:
            out.append(f"{path}:{number}: a public header may not include {name}")


def check_internal(path, folder, out):
    own = folder.split("/")[1]
    for number, quote, name in includes(path):
        if name.startswith("kvtier/"):
            if quote == "<" and folder != "src/adapters":
                out.append(f'{path}:{number}: write "{name}" inside the library')
            continue
        if quote == "<":
            continue
        top = name.split("/")[0] if "/" in name else own
        if top not in ALLOWED[folder] and name not in ALLOWED[folder]:
            out.append(f"{path}:{number}: {folder} may not include {name}")


def main():
    out = []
    for path in sorted(pathlib.Path("include").rglob("*.h")):
        check_public(path, out)
    for folder in sorted(p for p in pathlib.Path("src").iterdir() if p.is_dir()):
        name = folder.as_posix()
        if name not in ALLOWED:
            out.append(f"{name}: no rule for this folder in scripts/lint/includes.py")
            continue
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".c", ".h", ".cpp"):
                check_internal(path, name, out)
    print("\n".join(out), end="\n" if out else "")
    return 1 if out else 0


if __name__ == "__main__":
    sys.exit(main())
