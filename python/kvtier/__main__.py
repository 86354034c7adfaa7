"""python -m kvtier doctor [--probe] [--json]"""
import sys

from . import doctor

USAGE = "usage: python -m kvtier doctor [--probe] [--json]"


def main(argv: list[str]) -> int:
    """Exit code of a subcommand; 2 for wrong usage."""
    if argv[:1] == ["doctor"]:
        return doctor.main(argv[1:])
    wanted = argv[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
