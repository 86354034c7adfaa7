"""docs/testing.md and the sources agree on which function settles which case from the field.

Every function test_cNN_... of the tests stands in the table, in the row of its number; every function
named in the table exists. A case without a function stands in docs/known-gaps.md ("case C1: what must
hold"), not in the table. --write prints the rows anew from the sources and the old descriptions, and
takes a case that has got its function out of the known gaps.
"""
import pathlib
import re
import sys

TABLE = pathlib.Path("docs/testing.md")
GAPS = pathlib.Path("docs/known-gaps.md")
GAP = re.compile(r"^\| case C(\d+) \| No test yet: ([^|]*) \|$", re.M)
ROW = re.compile(r"^\| C(\d+) \| ([^|]*) \| ([^|]*) \|$")
DEFINED = re.compile(r"^(?:static (?:void|int)|def) (test_c(\d+)_\w+)\(", re.M)


def from_sources():
    found = {}
    tests = pathlib.Path("tests")
    for path in [*sorted(tests.rglob("test_*.c")), *sorted(tests.rglob("test_*.py"))]:
        for name, number in DEFINED.findall(path.read_text()):
            tests = found.setdefault(int(number), [])
            if (path.stem, name) not in tests:  # one of two branches of an #if
                tests.append((path.stem, name))
    return found


def from_gaps():
    return {int(number): what for number, what in GAP.findall(GAPS.read_text())}


def from_table():
    rows = {}
    for line in TABLE.read_text().splitlines():
        row = ROW.match(line)
        if row:
            rows[int(row.group(1))] = (row.group(2).strip(), row.group(3).strip())
    return rows


def render(number, what, tests):
    places = {}
    for stem, name in tests:
        places.setdefault(stem, []).append(f"`{name}`")
    text = "; ".join(f"{stem}: {', '.join(names)}" for stem, names in places.items())
    return f"| C{number} | {what} | {text} |"


def write(found, rows, gaps):
    head = TABLE.read_text().split("| case |")[0]
    lines = ["| case | what must hold | test |", "|---|---|---|"]
    for number in sorted(found):
        what = rows.get(number, (gaps.get(number, "?"), ""))[0]
        lines.append(render(number, what, found[number]))
    TABLE.write_text(head + "\n".join(lines) + "\n")
    kept = [
        line
        for line in GAPS.read_text().splitlines()
        if not (GAP.match(line) and int(GAP.match(line).group(1)) in found)
    ]
    for number in sorted(set(rows) - set(found)):  # its function is gone
        kept.append(f"| case C{number} | No test yet: {rows[number][0]} |")
    GAPS.write_text("\n".join(kept) + "\n")


def main():
    found, rows = from_sources(), from_table()
    gaps = from_gaps()
    if "--write" in sys.argv:
        write(found, rows, gaps)
        return 0
    failed = 0
    for number in sorted(set(found) & set(gaps)):
        print(f"docs/known-gaps.md: C{number} has a test: {found[number][0][1]}")
        failed = 1
    for number in sorted(set(found) | set(rows)):
        what, _ = rows.get(number, ("?", ""))
        want = render(number, what, found.get(number, []))
        have = f"| C{number} | {what} | {rows[number][1]} |" if number in rows else "no row"
        if want != have or what == "?":
            print(f"docs/testing.md: C{number}: {have}\n    the sources say: {want}")
            failed = 1
    if failed:
        print("scripts/lint/cases.py --write brings the table up to date")
    return failed


if __name__ == "__main__":
    sys.exit(main())
