"""python -m kvtier doctor|daemon|tool: what is found here; the programs that the wheel carries."""
import difflib
import os
import sys

from . import _c, doctor

USAGE = """usage: python -m kvtier doctor [--probe] [--json]    what is found here, and what would not work
       python -m kvtier daemon --socket PATH ...    kvtierd: one store for many processes
       python -m kvtier tool COMMAND ...            the tool kvtier: stat, top, plan, fsck, ..."""


def _become(name: str, variable: str, arguments: list[str]) -> int:
    """Become a program of the wheel; returns only where there is none."""
    path = os.environ.get(variable) or str(_c.library_dir().parent / "bin" / name)
    if not os.access(path, os.X_OK):
        print(f"kvtier: no {name} at {path}: install the wheel, or name one in {variable}",
              file=sys.stderr)
        return 1
    os.execv(path, [path, *arguments])


def daemon(arguments: list[str] | None = None) -> int:
    """kvtierd, with the arguments of the command line."""
    return _become("kvtierd", "KVTIERD", sys.argv[1:] if arguments is None else arguments)


def tool(arguments: list[str] | None = None) -> int:
    """The tool kvtier, with the arguments of the command line."""
    return _become("kvtier", "KVTIER", sys.argv[1:] if arguments is None else arguments)


COMMANDS = {"doctor": doctor.main, "daemon": daemon, "tool": tool}


def main(argv: list[str]) -> int:
    """Exit code of a subcommand; 2 for wrong usage."""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    wanted = argv[:1] in (["-h"], ["--help"])
    if argv and not wanted:
        near = difflib.get_close_matches(argv[0], COMMANDS, 1)
        print(f"kvtier: no command is called {argv[0]!r}" +
              (f"; did you mean {near[0]!r}?" if near else ""), file=sys.stderr)
    print(USAGE, file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
