#!/usr/bin/env python3
"""Strict about Prometheus' text format 0.0.4: prom_check.py FILE | --selftest.

Every family is announced once by HELP and TYPE, before its samples, and stands in one piece; names,
labels and escapes are well formed; no sample stands twice; label names of a family are the same in
each sample; counters end in _total; a histogram has buckets with rising bounds and counts, +Inf last
and equal to _count, and a _sum. Exit 0 good, 1 not (said by line). Standard library only."""
import math
import re
import sys

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)\Z")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|\Z)')
KINDS = {"counter", "gauge", "histogram"}
SUFFIXES = ("_bucket", "_sum", "_count")


class Bad(Exception):
    pass


def need(good, text):
    if not good:
        raise Bad(text)


def labels_of(text):
    text = text or ""
    out, at = {}, 0
    while at < len(text):
        found = LABEL.match(text, at)
        need(found, f"labels are malformed at {text[at:]!r}")
        need(found[1] not in out, f"label {found[1]} stands twice")
        out[found[1]] = found[2]
        at = found.end()
    need(not text.endswith(","), "a comma after the last label")
    return out


def value_of(text):
    if text in ("+Inf", "-Inf", "NaN"):
        return float(text.replace("Inf", "inf"))
    need(re.match(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\Z", text), f"{text!r} is no number")
    return float(text)


def family_of(name, kinds):
    for suffix in SUFFIXES:
        base = name[:-len(suffix)]
        if name.endswith(suffix) and kinds.get(base) == "histogram":
            return base, suffix
    return name, ""


def histogram(name, samples):
    """samples: [(suffix, labels, value)] in order."""
    series = {}
    for suffix, labels, value in samples:
        key = tuple(sorted((k, v) for k, v in labels.items() if k != "le"))
        series.setdefault(key, []).append((suffix, labels, value))
    for key, lines in series.items():
        bounds = [(value_of(l["le"]), v) for s, l, v in lines if s == "_bucket"]
        sums = [v for s, _, v in lines if s == "_sum"]
        counts = [v for s, _, v in lines if s == "_count"]
        need(len(sums) == 1 and len(counts) == 1, f"{name}{key}: one _sum and one _count")
        need(len(bounds) > 1 and math.isinf(bounds[-1][0]), f"{name}{key}: +Inf is the last bucket")
        need(all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(bounds, bounds[1:])),
             f"{name}{key}: bounds and counts must rise")
        need(bounds[-1][1] == counts[0], f"{name}{key}: _count is not that of +Inf")
        need(sums[0] >= 0 and (counts[0] > 0 or sums[0] == 0), f"{name}{key}: a sum of nothing")
        need(all(float(v).is_integer() for _, v in bounds), f"{name}{key}: counts are whole")


def check(text):
    """(families, samples); Bad."""
    need(text.endswith("\n"), "the last line does not end")
    helps, kinds, seen, samples, label_names, current = {}, {}, set(), {}, {}, None
    for number, line in enumerate(text[:-1].split("\n"), 1):
        try:
            if line.startswith("# HELP ") or line.startswith("# TYPE "):
                what, name, rest = (line[2:].split(" ", 2) + [""])[:3]
                need(NAME.match(name), f"{name!r} is no name")
                table = helps if what == "HELP" else kinds
                need(name not in table, f"{what} of {name} stands twice")
                need(name not in samples, f"{what} of {name} comes after its samples")
                need(rest, f"{what} of {name} says nothing")
                need(what == "HELP" or rest in KINDS, f"{rest!r} is no type")
                table[name] = rest
                continue
            need(not line.startswith("#") and line, "neither a sample nor HELP nor TYPE")
            found = SAMPLE.match(line)
            need(found, "no sample")
            labels, value = labels_of(found[2]), value_of(found[3])
            name, suffix = family_of(found[1], kinds)
            need(name in kinds and name in helps, f"{name} was not announced")
            need(name == current or name not in samples, f"{name} stands in several pieces")
            current = name
            key = (found[1], tuple(sorted(labels.items())))
            need(key not in seen, "this sample stands twice")
            seen.add(key)
            names = frozenset(labels) - {"le"}
            need(label_names.setdefault(name, names) == names, f"{name}: other label names")
            if kinds[name] == "counter":
                need(name.endswith("_total"), "a counter ends in _total")
                need(value >= 0, "a counter is not negative")
            elif kinds[name] == "gauge":
                need(not name.endswith("_total"), "_total is for counters")
            else:
                need(suffix, "a histogram has buckets, a sum and a count")
                need(("le" in labels) == (suffix == "_bucket"), "le is for buckets")
            samples.setdefault(name, []).append((suffix, labels, value))
        except Bad as bad:
            raise Bad(f"line {number}: {bad}: {line}") from None
    for name, kind in kinds.items():
        need(name in helps, f"{name} has no HELP")
        if kind == "histogram":
            need(name in samples, f"{name}: a histogram without samples")
            histogram(name, samples[name])
    return len(kinds), len(seen)


GOOD = """# HELP a_total things
# TYPE a_total counter
a_total{x="1",y="\\\\q\\"\\n"} 3
a_total{x="2",y=""} 0
# HELP h seconds
# TYPE h histogram
h_bucket{op="a",le="0.5"} 1
h_bucket{op="a",le="+Inf"} 2
h_sum{op="a"} 7.25
h_count{op="a"} 2
"""
WRONG = [('y=""', 'z=""'), ("# HELP a_total things\n", ""),
         ("counter", "count"), ("a_total", "a"), ('le="0.5"} 1', 'le="0.5"} 3'),
         ("h_count{op=\"a\"} 2", "h_count{op=\"a\"} 3"), ("h_sum{op=\"a\"} 7.25\n", ""),
         ('h_bucket{op="a",le="+Inf"} 2\n', ""), ("} 3\n", "} 3,5\n"), ("\\\\q", "\\q"),
         ('} 0\n', '} -1\n'), ('x="2",y=""', 'x="1",y="\\\\q\\"\\n"'), ("7.25", "7.25 "),
         ("a_total{x=\"2\"", "\na_total{x=\"2\""), ("h_sum{", "h_sum{le=\"1\","),
         ("h_count{op=\"a\"} 2\n", "h_count{op=\"a\"} 2\na_total{x=\"3\",y=\"\"} 1\n")]


def selftest():
    check(GOOD)
    for old, new in WRONG:
        assert GOOD.count(old) >= 1, old
        try:
            check(GOOD.replace(old, new))
        except Bad:
            continue
        raise SystemExit(f"not refused: {old!r} -> {new!r}")


def main():
    if sys.argv[1:] == ["--selftest"]:
        selftest()
        return 0
    try:
        families, samples = check(open(sys.argv[1], encoding="utf-8").read())
    except Bad as bad:
        print(bad)
        return 1
    print(f"{families} families, {samples} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
