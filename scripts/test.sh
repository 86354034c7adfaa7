#!/bin/bash
# Every test from nothing: set-up, llama.cpp and the model, four builds (release, address and
# undefined sanitizers, thread sanitizer, fuzzers), then one ctest run over all of them; a line of
# JSON with what was tried to break the store, and ctest's summary, are the last things printed.
# KVT_TEST_LLAMA=0 leaves llama.cpp out, and says so. KVT_FUZZ_SECONDS (60): for each fuzzer.
set -euo pipefail

cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
steps=()

step() { # step NAME COMMAND...: run, time, remember; stop at the first failure
    local name=$1 start=$SECONDS
    shift
    echo "== $name"
    if ! "$@"; then
        echo "== $name FAILED after $((SECONDS - start)) s" >&2
        exit 1
    fi
    steps+=("$name $((SECONDS - start)) s")
}

prefix_of_llama() {
    KVT_LLAMA_PREFIX=$(scripts/build-llama.sh) && export KVT_LLAMA_PREFIX
}
fetch_model() { scripts/fetch-model.sh >/dev/null; }

step set-up scripts/setup.sh test
if [ "${KVT_TEST_LLAMA:-1}" = 1 ]; then
    step llama.cpp prefix_of_llama
    step model fetch_model
else
    steps+=("llama.cpp left out (KVT_TEST_LLAMA=0)")
fi
step "build release" env KVT_GPU="${KVT_GPU:-auto}" scripts/build.sh release
step "build asan" scripts/build.sh asan
step "build tsan" scripts/build.sh tsan
step "build fuzz" scripts/build.sh fuzz fuzzers

mkdir -p build/ctest
root=$(pwd)
echo "subdirs(\"$root/build\" \"$root/build-asan\" \"$root/build-tsan\" \"$root/build-fuzz\")" \
    >build/ctest/CTestTestfile.cmake

printf '== %s\n' "steps so far:" "${steps[@]}" "ctest over release, asan, tsan and fuzz"
# Absent sanitizer features must not pass silently.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}
# Many tests wait, for a drive, a deadline or a child: with half as many more tests than there are
# processors those have something to do meanwhile.
ctest --test-dir build/ctest --output-on-failure -j $((jobs + (jobs + 1) / 2)) </dev/null |
    scripts/tally.py --before-summary build/ctest/Testing/Temporary/LastTest.log
