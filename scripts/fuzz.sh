#!/bin/bash
# Run the libFuzzer programs: fuzz.sh [SECONDS [TARGET...]]: SECONDS for each (60), all targets by
# default. New inputs stay in build-fuzz/corpus; what fails is left in build-fuzz/found, and the exit
# code is 1. `fuzz.sh merge` adds to tests/fuzz/corpus what reaches code that it does not.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
[ $# -eq 0 ] || shift
command -v clang >/dev/null || { echo "fuzz.sh: needs clang" >&2; exit 77; }
scripts/build.sh fuzz fuzzers
found=build-fuzz/found
mkdir -p "$found"
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(cd tests/fuzz && printf '%s\n' fuzz_*.c | sed 's/fuzz_\(.*\)\.c/\1/')
failed=0
for target in "${targets[@]}"; do
    kept=build-fuzz/corpus/$target seeds=tests/fuzz/corpus/$target
    mkdir -p "$kept"
    program=build-fuzz/fuzz/fuzz_$target
    if [ "$seconds" = merge ]; then
        "$program" -merge=1 -max_len=4200 "$seeds" "$kept" 2>&1 | tail -n 1
        continue
    fi
    log=$found/$target.log
    if ! "$program" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=16384 \
        -artifact_prefix="$found/$target-" -print_final_stats=1 "$kept" "$seeds" >"$log" 2>&1; then
        failed=1
        tail -n 40 "$log"
    fi
    printf '%s: %s runs\n' "$target" "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")"
done
exit $failed
