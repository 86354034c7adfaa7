#!/bin/bash
# Configure a preset and build targets of it: build.sh release|dev|asan|tsan|fuzz|coverage [TARGET...]
# KVT_LLAMA_PREFIX in the environment adds the llama.cpp adapter; a build keeps it once it has it.
# KVT_GPU=auto|on|off: whether kernels for NVIDIA GPUs are compiled (minutes, once: they are cached).
# Quiet unless something fails or takes long.
set -euo pipefail

cd "$(dirname "$0")/.."
. scripts/progress.sh
preset=${1:?usage: build.sh PRESET [TARGET...]}
shift
dir=build
[ "$preset" = release ] || dir=build-$preset
log=$dir/build.log
mkdir -p "$dir"

options=()
if [ "$preset" = release ] && [ -n "${KVT_LLAMA_PREFIX:-}" ]; then
    options+=("-DKVT_LLAMA_PREFIX=$KVT_LLAMA_PREFIX")
fi
# Warnings are errors where we look at them; a newer compiler elsewhere may have new ones.
if [ "$preset" != dev ]; then
    [ -n "${CI:-}" ] && options+=(-DKVT_WERROR=ON) || options+=(-DKVT_WERROR=OFF)
fi
# A second compiler sees the code for free: clang, where there is one, makes the thread sanitizer's.
if [ "$preset" = tsan ] && [ ! -e "$dir/CMakeCache.txt" ] && command -v clang >/dev/null; then
    options+=(-DCMAKE_C_COMPILER=clang)
fi
# Kernels for GPUs: auto (where nvcc is), on, off. A build keeps what it was told.
if [ -n "${KVT_GPU:-}" ]; then
    options+=("-DKVT_GPU=$KVT_GPU")
fi
if ! cmake --preset "$preset" "${options[@]}" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
targets=()
[ $# -eq 0 ] || targets=(--target "$@")
if ! run_logged "$log" "building kvtier ($preset)" \
    cmake --build "$dir" -j "${JOBS:-$(nproc)}" "${targets[@]}"; then
    grep -v '^\[[0-9]*/[0-9]*\] Building' "$log" | tail -n 80 >&2
    echo "build.sh: building '$preset' failed; the whole log is $log" >&2
    exit 1
fi
