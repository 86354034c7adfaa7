"""docs/testing.md and the sources agree on which function settles which case from the field.

Every function test_cNN_... of the tests stands in the table, in the row of its number; every function
named in the table exists. --write prints the rows anew from the sources and the old descriptions.
"""
import pathlib
import re
import sys

TABLE = pathlib.Path("docs/testing.md")
ROW = re.compile(r"^\| C(\d+) \| ([^|]*) \| ([^|]*) \|$")
DEFINED = re.compile(r"^static (?:void|int) (test_c(\d+)_\w+)\(", re.M)


def from_sources():
    found = {}
    for path in sorted(pathlib.Path("tests").rglob("test_*.c")):
        for name, number in DEFINED.findall(path.read_text()):
            found.setdefault(int(number), []).append((path.stem, name))
    return found


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
    return f"| C{number} | {what} | {text or 'not yet'} |"


def main():
    found, rows = from_sources(), from_table()
    if "--write" in sys.argv:
        head = TABLE.read_text().split("| case |")[0]
        lines = ["| case | what must hold | test |", "|---|---|---|"]
        for number in sorted(set(found) | set(rows)):
            lines.append(render(number, rows.get(number, ("?", ""))[0], found.get(number, [])))
        TABLE.write_text(head + "\n".join(lines) + "\n")
        return 0
    failed = 0
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
