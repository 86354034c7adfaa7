#!/bin/bash
# The long forms of the tests that try to break the store: soak.sh [MINUTES [NAME...]] (30, all of
# them), builds not counted.
# Two lanes at a time, each a list of programs that get a share of the time (KVT_SOAK_SECONDS) and a
# fresh seed, which their logs in build/soak tell. A program that cannot stop in time (a scenario of
# fail at N, the planted bug under way) runs to its end; fail at N takes every N from 60 minutes on.
# The last line is one of JSON: what was tried and what failed, added up by scripts/tally.py from what
# the programs printed. Exit 1 when anything failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

minutes=${1:-30}
[ $# -eq 0 ] || shift
only=" $* "
total=$((minutes * 60))
out=build/soak
export KVT_TEST_SEED=${KVT_TEST_SEED:-$(date +%s)}
released=(test_sim test_power_loss test_bit_flips test_kill_ledger test_full_disk
    test_daemon_kill test_redis_cluster
    test_store_model test_session_model test_store_crash test_l2_crash)
sanitized=(test_store_fail_at_n test_alloc_fail test_alloc_fail_flows)

wanted() { # wanted NAME: no names were given, or this one was
    [ "$only" = "  " ] || [[ $only == *" $1 "* ]]
}
there() { # of the programs named, those that are wanted and that this tree has
    local name
    for name in "$@"; do
        wanted "$name" || wanted seeds || continue
        [ -z "$(find tests -name "$name.c")" ] || echo "$name"
    done
}
mapfile -t released < <(there "${released[@]}")
mapfile -t sanitized < <(there "${sanitized[@]}")
[ ${#released[@]} = 0 ] || scripts/build.sh release "${released[@]}" || exit 1
[ ${#sanitized[@]} = 0 ] || scripts/build.sh asan "${sanitized[@]}" || exit 1
! wanted test_history || scripts/build.sh tsan test_history || exit 1
fuzzers=no
if wanted fuzz && command -v clang >/dev/null; then
    scripts/build.sh fuzz fuzzers || exit 1
    fuzzers=yes
fi
mkdir -p "$out"
rm -rf "${out:?}"/*

# job NAME PERCENT COMMAND...: of the lane's time. What fails is said at once and noted.
job() {
    local name=$1 seconds=$((total * $2 / 100)) start=$SECONDS
    shift 2
    wanted "$name" || return 0
    if KVT_SOAK_SECONDS=$seconds "$@" >"$out/$name.log" 2>&1; then
        echo "soak: $name: $((SECONDS - start)) s"
    else
        echo "soak: FAILED: $name (see $out/$name.log)" | tee -a "$out/failures"
    fi
}
program() { # program BUILD NAME PERCENT, if this tree has it
    [ ! -x "$1/tests/$2" ] || job "$2" "$3" "${@:4}" "$1/tests/$2"
}
seeds() { # models and crash images under fresh seeds, for as long as there is time
    local end=$((SECONDS + KVT_SOAK_SECONDS)) failed=0 name
    while [ $SECONDS -lt $end ]; do
        export KVT_TEST_SEED=$RANDOM$RANDOM
        for name in test_store_model test_session_model test_store_crash test_l2_crash; do
            env -u KVT_SOAK_SECONDS "build/tests/$name" >"$out/seed.txt" 2>&1 && continue
            echo "$name fails with KVT_TEST_SEED=$KVT_TEST_SEED"
            cat "$out/seed.txt"
            failed=1
        done
    done
    return $failed
}
planted() { # the tests in it are to take their usual time
    local seconds=$KVT_SOAK_SECONDS
    env -u KVT_SOAK_SECONDS -u KVT_TEST_SEED tests/planted/run.py --seconds "$seconds"
}
fuzz() {
    local count
    count=$(find tests/fuzz -name 'fuzz_*.c' | wc -l)
    scripts/fuzz.sh $((KVT_SOAK_SECONDS / count > 5 ? KVT_SOAK_SECONDS / count : 5))
}

lane_of_processors() {
    local every=()
    [ "$minutes" -lt 60 ] || every=(env KVT_FAIL_AT_STEP=1)
    program build test_sim 30
    program build test_power_loss 15
    program build test_bit_flips 5
    program build-asan test_alloc_fail_flows 5
    program build-asan test_alloc_fail 5
    program build-asan test_store_fail_at_n 15 "${every[@]}"
    job planted 25 planted
}
lane_of_waits() {
    local launch=()
    ! setarch -R true 2>/dev/null || launch=(setarch -R)
    program build test_kill_ledger 15
    [ "$minutes" -lt 60 ] || export KVT_DAEMON_KILLS=10000
    program build test_daemon_kill 10
    program build-tsan test_history 20 "${launch[@]}"
    program build test_full_disk 5
    program build test_redis_cluster 15
    job seeds 10 seeds
    [ $fuzzers = no ] || job fuzz 25 fuzz
}
echo "soak: $minutes minutes, seed $KVT_TEST_SEED"
lane_of_processors &
lane_of_waits
wait
[ $fuzzers = yes ] || ! wanted fuzz || echo "soak: no clang: fuzzers left out"
scripts/tally.py "$out"/*.log
[ ! -e "$out/failures" ]
