#!/usr/bin/env python3
"""Lines and branches reached, from gcc's counters: coverage.py BUILD_DIR FOLDER... [--missing].

A line counts once however often its code was inlined or linked; so does each of its branches. A
branch is one way out of a condition as gcc compiles it without optimisation. --missing: also lists
what was not reached."""
import collections
import gzip
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def gcov(notes):
    """gcov's JSON documents for some .gcda files."""
    done = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities"] + notes,
                          cwd=ROOT, capture_output=True, check=True)
    out = done.stdout
    if out[:2] == b"\x1f\x8b":
        out = gzip.decompress(out)
    for line in out.decode().splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def collect(build, folders):
    lines = collections.defaultdict(dict)  # file -> line -> count
    branches = collections.defaultdict(dict)  # file -> (line, number) -> count
    notes = sorted(str(path.resolve()) for folder in folders
                   for path in (ROOT / build / folder).parent.rglob("*.gcda")
                   if f"/{folder.removeprefix('src/')}/" in str(path))
    if not notes:
        sys.exit(f"no counters below {build}: scripts/coverage.sh makes them")
    for document in gcov(notes):
        base = document.get("current_working_directory", "")
        for file in document["files"]:
            name = os.path.relpath(os.path.normpath(os.path.join(base, file["file"])), ROOT)
            if not any(name.startswith(folder + "/") for folder in folders):
                continue
            for line in file["lines"]:
                number = line["line_number"]
                lines[name][number] = max(lines[name].get(number, 0), line["count"])
                for i, branch in enumerate(line.get("branches", [])):
                    key = (number, i)
                    branches[name][key] = max(branches[name].get(key, 0), branch["count"])
    return lines, branches


def row(name, lines, branches):
    hit, all_lines = sum(1 for n in lines if n), len(lines)
    took, all_branches = sum(1 for n in branches if n), len(branches)
    print(f"| {name} | {all_lines} | {100 * hit / max(all_lines, 1):.1f} | "
          f"{all_branches} | {100 * took / max(all_branches, 1):.1f} |")


def main():
    args = [arg for arg in sys.argv[1:] if arg != "--missing"]
    if len(args) < 2:
        sys.exit(__doc__)
    build, folders = args[0], args[1:]
    lines, branches = collect(build, folders)
    print("| folder or file | lines | % | branches | % |\n|---|--:|--:|--:|--:|")
    for folder in folders + [""]:
        names = [name for name in sorted(lines) if name.startswith(folder + "/") or not folder]
        row(folder or "all", [n for name in names for n in lines[name].values()],
            [n for name in names for n in branches[name].values()])
    print()
    for name in sorted(lines):
        row(name, lines[name].values(), branches[name].values())
        if "--missing" in sys.argv:
            print("    lines", [n for n, count in sorted(lines[name].items()) if not count])
            print("    branches", sorted({n for (n, _), count in branches[name].items()
                                          if not count}))


if __name__ == "__main__":
    main()
