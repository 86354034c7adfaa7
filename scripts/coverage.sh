#!/bin/bash
# Lines and branches that the tests reach: coverage.sh [FOLDER...] (src/format src/io src/store).
# Builds everything by gcc with counters, runs the tests that concern these folders (a failure is
# said, and no reason to stop: without optimisation, limits of time may not hold), and prints a table
# by scripts/coverage.py. COVERAGE_TESTS: a regular expression of tests to run instead. What would
# repeat itself for minutes does so for seconds: it reaches nothing new.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- src/format src/io src/store
scripts/build.sh coverage
export KVT_KILL_CYCLES=${KVT_KILL_CYCLES:-40} KVT_HISTORY_OPS=${KVT_HISTORY_OPS:-100000}
find build-coverage -name '*.gcda' -delete
ctest --test-dir build-coverage -j "${JOBS:-$(nproc)}" -E 'lint|llama|planted|install|bench|gpu|quality|demo' \
    -R "${COVERAGE_TESTS:-.}" </dev/null | grep -v ' Passed \| Start ' || true
scripts/coverage.py build-coverage "$@"
