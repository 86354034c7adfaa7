#!/usr/bin/env python3
"""Counts of a JUnit file of pytest: "PASSED FAILED SKIPPED", then each reason of a skip on a line.
Usage: pytest-counts.py FILE    a file that is none counts as one failure"""
import sys
import xml.etree.ElementTree as tree

try:
    root = tree.parse(sys.argv[1]).getroot()
    suites = [root] if root.tag == "testsuite" else list(root)
    total = {name: sum(int(suite.get(name, 0)) for suite in suites)
             for name in ("tests", "failures", "errors", "skipped")}
    bad = total["failures"] + total["errors"]
    print(total["tests"] - bad - total["skipped"], bad, total["skipped"])
    for reason in sorted({skip.get("message", "") for skip in root.iter("skipped")}):
        print("skipped:", reason)
except (OSError, tree.ParseError) as error:
    print("0 1 0")
    print("no result of pytest:", error)
