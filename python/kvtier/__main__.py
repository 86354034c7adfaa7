"""python -m kvtier doctor|daemon: what is found here; the daemon that the wheel carries."""
import os
import sys

from . import _c, doctor

USAGE = """usage: python -m kvtier doctor [--probe] [--json]    what is found here, and what would not work
       python -m kvtier daemon --socket PATH ...    kvtierd: one store for many processes"""


def daemon(arguments: list[str]) -> int:
    """Become kvtierd; returns only where there is none."""
    path = os.environ.get("KVTIERD") or str(_c.library_dir().parent / "bin/kvtierd")
    if not os.access(path, os.X_OK):
        print(f"kvtier: no kvtierd at {path}: install the wheel, or name one in KVTIERD",
              file=sys.stderr)
        return 1
    os.execv(path, [path, *arguments])


def main(argv: list[str]) -> int:
    """Exit code of a subcommand; 2 for wrong usage."""
    if argv[:1] == ["doctor"]:
        return doctor.main(argv[1:])
    if argv[:1] == ["daemon"]:
        return daemon(argv[1:])
    wanted = argv[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
