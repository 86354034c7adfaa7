#!/bin/bash
# Run the libFuzzer programs: fuzz.sh [SECONDS [TARGET...]]: SECONDS for each (60), all targets by
# default, FUZZ_JOBS (1) at a time. New inputs stay in build-fuzz/corpus; what fails is left in
# build-fuzz/found, and the exit code is 1. `fuzz.sh merge` adds to tests/fuzz/corpus what reaches
# code that it does not.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
[ $# -eq 0 ] || shift
command -v clang >/dev/null || { echo "fuzz.sh: needs clang" >&2; exit 77; }
scripts/build.sh fuzz fuzzers
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(cd tests/fuzz && printf '%s\n' fuzz_*.c | sed 's/fuzz_\(.*\)\.c/\1/')
if [ "$seconds" = merge ]; then
    for target in "${targets[@]}"; do
        mkdir -p "build-fuzz/corpus/$target"
        "build-fuzz/fuzz/fuzz_$target" -merge=1 -max_len=4200 "tests/fuzz/corpus/$target" \
            "build-fuzz/corpus/$target" 2>&1 | tail -n 1
    done
    exit
fi
printf '%s\n' "${targets[@]}" | xargs -P "${FUZZ_JOBS:-1}" -I {} \
    tests/fuzz/run.sh build-fuzz/fuzz/fuzz_{} {} "$seconds" build-fuzz
