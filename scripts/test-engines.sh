#!/bin/bash
# The Python package with the real engines: builds the wheel, installs it with pinned engines into an
# environment outside the tree, runs tests/python by Python 3.10 to 3.13 as far as they are here, and
# prints a summary with what was skipped and why. `make test-engines`; .ci/run calls it.
#   test-engines.sh [PYTEST-ARGUMENTS]
# KVTIER_CACHE_DIR: where environments and models are kept (scripts/cache.sh). What cannot be installed
# here (no network, no pip, no such platform) is skipped and said, unless KVT_REQUIRE names it
# (transformers,llama-cpp-python,model,vllm,sglang,lmcache); a failing test always fails.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/cache.sh
. scripts/llama.pin

start=$SECONDS
summary=() failed=0 passes=0 failures=0 skips=0
note() { summary+=("$1"); echo "== $1"; }
finish() {
    printf '%s\n' "" "test-engines, $((SECONDS - start)) s:" "${summary[@]}"
    [ $failed = 0 ] || [ $failures != 0 ] || failures=1
    echo "engines: $passes passed, $failures failed, $skips skipped"
    exit $failed
}
skip_all() { skips=1; note "SKIPPED all: $1"; finish; }

python=${KVT_PYTHON:-python3}
command -v "$python" >/dev/null || skip_all "no $python"
"$python" -c 'import ensurepip, venv' 2>/dev/null || skip_all "$python has no venv (Debian: python3-venv)"
cache=$(kvt_cache_dir)
exec 8>"$cache/.lock-engines" # not the cache's own lock, which the scripts called below take
flock -n 8 || { say "waiting for another run of the engines' tests"; flock 8; }
work=$cache/test-engines.log
: >"$work"

# An environment, kept under a digest of what is in it; made under its final name, as environments do
# not move, and used only when it is complete. A change of a fill_* function changes the recipe.
recipe=1
environment() { # NAME PYTHON FUNCTION FILE...: sets $env
    local name=$1 interpreter=$2 fill=$3
    shift 3
    local key
    key=$({ "$interpreter" -VV; cat /dev/null "$@"; echo "$recipe $LLAMA_SHA256"; } | sha256sum | cut -c1-12)
    env=$cache/python-$name-$key
    [ ! -e "$env/complete" ] || return 0
    rm -rf "$cache/python-$name-"*
    "$interpreter" -m venv "$env" >>"$work" 2>&1 && "$fill" && touch "$env/complete"
}
pip_install() { # into $env
    run_logged "$work" "installing packages" "$env/bin/python" -m pip install --quiet \
        --disable-pip-version-check "$@"
}

# Packages beside those of an environment, of which they need some: a folder for PYTHONPATH, kept as
# environments are. They are not installed into it, since vLLM is another one when they are there.
overlay() { # NAME ENVIRONMENT LOCK: sets $beside
    local key
    key=$({ "$2/bin/python" -VV; cat "$3"; echo "$recipe"; } | sha256sum | cut -c1-12)
    beside=$cache/python-$1-$key
    [ ! -e "$beside/complete" ] || return 0
    rm -rf "$cache/python-$1-"*
    run_logged "$work" "installing packages for $1" "$2/bin/python" -m pip install --quiet \
        --disable-pip-version-check --no-deps --no-compile --target "$beside" -r "$3" &&
        touch "$beside/complete"
}

fill_build() { pip_install "scikit-build-core>=0.10,<2" "pytest>=7"; }
fill_torch() { # LOCK: its packages; where PyTorch's CUDA libraries are not all here, empty ones
    pip_install --no-compile --no-deps -r "$1" || return 1
    if ! "$env/bin/python" -c 'import torch' 2>>"$work"; then
        "$python" tests/python/cuda_stubs.py "$(echo "$env"/lib/python3*/site-packages)" >>"$work" 2>&1 || true
    fi
}
fill_vllm() { fill_torch tests/python/vllm.lock; }
fill_engines() {
    fill_torch tests/python/engines.lock || return 1
    # llama-cpp-python without its library, which takes minutes: the wheel of kvtier carries one.
    local source tmp
    source=$(scripts/fetch-llama.sh) || return 1
    tmp=$(mktemp -d "$cache/.engines.XXXXXX")
    tar -xzf "$source" -C "$tmp" --strip-components=1 --wildcards '*/llama_cpp/*' '*/README.md' \
        "${LLAMA_FILE%.tar.gz}/CMakeLists.txt" "${LLAMA_FILE%.tar.gz}/pyproject.toml" '*/LICENSE.md' \
        --exclude='*/vendor/*' &&
        CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" pip_install --no-deps "$tmp"
    local status=$?
    rm -rf "$tmp"
    return $status
}

# ---- the wheel ----
environment build "$python" fill_build ||
    skip_all "scikit-build-core and pytest cannot be installed: $(tail -n 1 "$work")"
build_env=$env
KVT_LLAMA_PREFIX=$(scripts/build-llama.sh) && export KVT_LLAMA_PREFIX
rm -rf dist
if ! KVT_GPU=${KVT_GPU:-off} run_logged "$work" "building the wheel" "$build_env/bin/python" -m pip wheel \
    --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .; then
    tail -n 40 "$work" >&2
    note "FAILED: the wheel does not build"
    failed=1
    finish
fi
wheel=$(echo dist/kvtier-*-py3-none-linux_*.whl)
[ -e "$wheel" ] || { note "FAILED: not a py3-none-linux wheel: $(ls dist)"; failed=1; finish; }
note "wheel ${wheel#dist/} ($(stat -c %s "$wheel") bytes)"

results=$cache/test-engines.xml
run_tests() { # LABEL ENVIRONMENT PYTEST-ARGUMENTS...: one line of summary
    local label=$1 where=$2 status=0 ran bad skipped
    shift 2
    "$where/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --force-reinstall "$wheel" || { note "FAILED: $label: the wheel cannot be installed"; failed=1; return; }
    (cd tests/python && "$where/bin/python" -m pytest -q -rs -p no:cacheprovider \
        --junit-xml="$results" "$@") || status=$?
    [ $status = 0 ] || failed=1
    local counts
    counts=$("$python" scripts/pytest-counts.py "$results")
    read -r ran bad skipped < <(head -n 1 <<<"$counts")
    passes=$((passes + ran)) failures=$((failures + bad)) skips=$((skips + skipped))
    note "$label: $ran passed, $bad failed, $skipped skipped$(tail -n +2 <<<"$counts" | sed 's/^/\n    /')"
}

# ---- the core, by each Python that is here: the same wheel ----
core=(test_abi.py test_core.py test_doctor.py test_docs.py test_daemon.py test_pagestore.py)
for version in 3.10 3.11 3.12 3.13; do
    interpreter=
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
        if "$candidate" -c "import ensurepip, sys; assert sys.version.startswith('$version')" 2>/dev/null; then
            interpreter=$candidate
            break
        fi
    done
    if [ -z "$interpreter" ]; then
        note "SKIPPED Python $version: not on this machine"
    elif environment "core$version" "$interpreter" fill_build; then
        run_tests "core, Python $version" "$env" "${core[@]}" "$@"
    else
        note "SKIPPED Python $version: pytest cannot be installed"
    fi
done

# ---- the engines ----
if environment engines "$python" fill_engines tests/python/engines.lock tests/python/cuda_stubs.py; then
    engines_env=$env
    if KVT_TEST_HF=$(scripts/smollm2-hf.sh "$engines_env/bin/python" 2>>"$work"); then
        export KVT_TEST_HF
    else
        note "SKIPPED SmolLM2 for transformers: $(tail -n 1 "$work")"
        KVT_TEST_HF=
    fi
    run_tests "transformers and llama-cpp-python" "$engines_env" test_transformers.py test_llama_cpp.py \
        test_llama_server.py test_llama_http.py "$@"
else
    note "SKIPPED the engines: they cannot be installed here: $(tail -n 1 "$work")"
    case ${KVT_REQUIRE:-} in *transformers* | *llama*) failed=1 ;; esac
fi
if environment vllm "$python" fill_vllm tests/python/vllm.lock tests/python/cuda_stubs.py; then
    vllm_env=$env
    run_tests "vLLM" "$vllm_env" test_vllm.py test_vllm_models.py test_vllm_server.py "$@"
    run_tests "vLLM's tiering manager" "$vllm_env" test_vllm_tier.py "$@"
    for name in sglang lmcache; do
        if overlay $name "$vllm_env" tests/python/$name.lock; then
            PYTHONPATH=$beside run_tests $name "$vllm_env" test_$name.py "$@"
        else
            note "SKIPPED $name: it cannot be installed here: $(tail -n 1 "$work")"
            case ${KVT_REQUIRE:-} in *$name*) failed=1 ;; esac
        fi
    done
else
    note "SKIPPED vLLM, its tiering manager, SGLang and LMCache: vLLM cannot be installed here: $(tail -n 1 "$work")"
    case ${KVT_REQUIRE:-} in *vllm* | *sglang* | *lmcache*) failed=1 ;; esac
fi
finish
