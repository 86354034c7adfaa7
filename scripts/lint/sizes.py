"""Size ratchet: files, functions and lines that nobody can hold in his head.

Files at most 1,000 lines (tests 1,500), a remark over 500; functions at most 100 lines; lines at
most 100 columns. Functions are found by the house style: "{" and "}" alone in column 0.
"""
import pathlib
import re
import sys

FILE_MAX, FILE_TEST_MAX, FILE_REMARK, FUNCTION_MAX, COLUMNS_MAX = 1000, 1500, 500, 100, 100
FOLDERS = ("include", "src", "tools", "tests", "examples")
NOT_A_FUNCTION = re.compile(r"^(static |const |extern |typedef )*(struct|union|enum)\b[^()]*$|=\s*$")


def functions(lines):
    start = None
    for number, line in enumerate(lines, 1):
        if line == "{" and number > 1 and not NOT_A_FUNCTION.match(lines[number - 2]):
            start = number
        elif line == "}" and start:
            yield start, number - start - 1
            start = None


def main():
    failed = 0
    for folder in FOLDERS:
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.suffix not in (".c", ".h", ".cpp"):
                continue
            lines = path.read_text().splitlines()
            limit = FILE_TEST_MAX if folder == "tests" else FILE_MAX
            if len(lines) > limit:
                print(f"{path}: {len(lines)} lines, at most {limit}: split it")
                failed = 1
            elif len(lines) > FILE_REMARK and folder != "tests":
                print(f"{path}: {len(lines)} lines: think about splitting (remark only)")
            for number, length in functions(lines):
                if length > FUNCTION_MAX:
                    print(f"{path}:{number}: function of {length} lines, at most {FUNCTION_MAX}")
                    failed = 1
            for number, line in enumerate(lines, 1):
                if len(line.expandtabs(4)) > COLUMNS_MAX:
                    print(f"{path}:{number}: {len(line)} columns, at most {COLUMNS_MAX}")
                    failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
