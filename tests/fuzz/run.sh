#!/bin/bash
# Run one libFuzzer program: run.sh PROGRAM TARGET SECONDS WORK_DIR. Starts from the corpus of the
# sources and what earlier runs have kept in WORK_DIR/corpus; what fails is left in WORK_DIR/found.
# The last line says how many inputs were run and whether one failed (scripts/tally.py adds them up).
set -uo pipefail

program=$1 target=$2 seconds=$3 work=$4
seeds=$(dirname "$0")/corpus/$target
kept=$work/corpus/$target found=$work/found
log=$found/$target.log
mkdir -p "$kept" "$found"
failed=0
"$program" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=16384 \
    -artifact_prefix="$found/$target-" -print_final_stats=1 "$kept" "$seeds" >"$log" 2>&1 || failed=1
[ $failed = 0 ] || tail -n 40 "$log"
runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
echo "$target: ${runs:-0} runs in $seconds s, $(find "$kept" -type f | wc -l) inputs kept"
printf '{"fuzz": {"tried": %s, "failed": %s}}\n' "${runs:-0}" $failed
exit $failed
