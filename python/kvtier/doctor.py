"""python -m kvtier doctor: which engines are here, which versions are known to work, what would
not.

Imports no engine unless --probe says so: then every name and signature that an adapter uses is
looked for in the installed version. Exit 0: the library loads and no engine that was found would
fail; 1: something would not work; 2: wrong usage.
"""
from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

from . import _c, codec
from ._engines import ENGINES, Engine
from ._errors import KvtierError


def library() -> dict[str, Any]:
    """What there is to say about libkvtier."""
    out: dict[str, Any] = {"path": str(_c.library_path()), "package": _c.VERSION, "ok": False}
    try:
        loaded = _c.load()
        out |= {"version": loaded.kvt_version().decode(), "ok": True,
                "build": loaded.kvt_build_info().decode(), "isa": codec.isa()}
    except KvtierError as error:
        out["problem"] = str(error)
    return out


def examine(engine: Engine, probe: bool) -> dict[str, Any]:
    """State of one engine: "absent", "works", "untested" or "broken", and why."""
    version = engine.version()
    out: dict[str, Any] = {"engine": engine.name, "version": version, "adapter": engine.adapter,
                           "tested": list(engine.tested)}
    if version is None:
        return out | {"state": "absent", "why": "not installed"}
    missing = engine.needs()
    if missing:
        return out | {"state": "broken", "why": missing}
    if probe:
        try:
            drift = engine.drift()
        except Exception as error:  # an engine that cannot even be imported
            drift = [f"it cannot be imported: {type(error).__name__}: {error}"]
        if drift:
            return out | {"state": "broken", "why": "; ".join(drift)}
    if version in engine.tested:
        return out | {"state": "works", "why": "this version is tested" +
                      (", and its names and signatures are as expected" if probe else "")}
    why = "names and signatures are as expected" if probe else \
        "--probe looks at its names and signatures"
    return out | {"state": "untested", "why": f"not tested with this version; {why}"}


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvtier doctor", description=(
        "which engines are here, which versions are known to work, and what would not"))
    parser.add_argument("--probe", action="store_true",
                        help="import each engine and compare every name and signature that is used")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    found, engines = library(), [examine(engine, arguments.probe) for engine in ENGINES]
    bad = not found["ok"] or any(engine["state"] == "broken" for engine in engines)
    if arguments.json:
        print(json.dumps({"library": found, "python": platform.python_version(),
                          "engines": engines}, indent=2))
        return int(bad)
    print(f"kvtier {_c.VERSION}, Python {platform.python_version()}")
    print(f"library     {found['path']}")
    if found["ok"]:
        print(f"            {found['build']}; codec {found['isa']}")
    else:
        print(f"            PROBLEM: {found['problem']}")
    for engine in engines:
        print(f"{engine['engine']:<18}{engine['version'] or '-':<12}{engine['state']:<10}"
              f"{engine['why']}")
        if engine["state"] in ("untested", "broken"):
            print(f"{'':<30}tested: {', '.join(engine['tested'])}; adapter {engine['adapter']}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
