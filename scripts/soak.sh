#!/bin/bash
# The long forms of the tests that try to break the store: soak.sh [MINUTES] (30). Fail at N with
# every N, allocation failures and power losses under the address sanitizer; every planted bug; then
# models and crashes under fresh seeds and the fuzzers, until the time is up. The first parts are run
# to their end whatever MINUTES says. The last line is one of JSON: what was tried and what failed;
# logs and seeds are in build/soak. Exit 1 when anything failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

minutes=${1:-30}
end=$((SECONDS + minutes * 60))
out=build/soak
seeded=(test_store_model test_session_model test_store_crash test_l2_crash)
scripts/build.sh release "${seeded[@]}" || exit 1
scripts/build.sh asan test_store_fail_at_n test_alloc_fail || exit 1
mkdir -p "$out"
rm -f "$out"/*

number() { # number KEY FILE: N of {"KEY": {"tried": N
    local n
    n=$(sed -n "s/.*\"$1\": {\"tried\": \([0-9]*\).*/\1/p" "$2" | tail -n 1)
    echo "${n:-0}"
}
failures=0
attempt() { # attempt LOG COMMAND...: 0 or 1, counted and said
    local log=$out/$1
    shift
    "$@" >"$log" 2>&1 && return 0
    echo "soak: FAILED: $* (see $log)"
    failures=$((failures + 1))
    return 1
}

fail_at_n=0 alloc=0 planted=0 fuzz_failed=0 seeds=0 seeds_failed=0
attempt fail_at_n.log env KVT_FAIL_AT_STEP=1 build-asan/tests/test_store_fail_at_n || fail_at_n=1
attempt alloc_fail.log build-asan/tests/test_alloc_fail || alloc=1
attempt planted.log tests/planted/run.py --all || planted=1
half=$((SECONDS + (end - SECONDS) / 2)) # of what is left, the fuzzers get the other half
while [ $SECONDS -lt $half ]; do
    seed=$RANDOM$RANDOM
    for test in "${seeded[@]}"; do
        if attempt "$test-$seed.log" env KVT_TEST_SEED=$seed "build/tests/$test"; then
            rm "$out/$test-$seed.log"
        else
            seeds_failed=$((seeds_failed + 1))
        fi
        seeds=$((seeds + 1))
    done
done
targets=$(find tests/fuzz -name 'fuzz_*.c' | wc -l)
each=$(((end - SECONDS) / targets))
fuzz_runs=0
if command -v clang >/dev/null; then
    attempt fuzz.log scripts/fuzz.sh $((each > 5 ? each : 5)) || fuzz_failed=1
    fuzz_runs=$(sed -n 's/^[a-z]*: \([0-9]*\) runs$/\1/p' "$out/fuzz.log" | awk '{n += $1} END {print n + 0}')
else
    echo "soak: no clang: fuzzers left out"
fi
printf '{"fail_at_n": {"tried": %s, "failed": %s}, "alloc_fail": {"tried": %s, "failed": %s}, ' \
    "$(number fail_at_n $out/fail_at_n.log)" $fail_at_n "$(number alloc_fail $out/alloc_fail.log)" $alloc
printf '"seeds": {"tried": %s, "failed": %s}, "fuzz": {"tried": %s, "failed": %s}, ' \
    $seeds $seeds_failed "${fuzz_runs:-0}" $fuzz_failed
printf '"planted": {"tried": %s, "failed": %s}}\n' \
    "$(grep -c 'caught by\|NOT CAUGHT' $out/planted.log)" "$(grep -c 'NOT CAUGHT' $out/planted.log)"
[ $failures = 0 ] && [ $planted = 0 ]
