#!/bin/bash
# Checks of the source itself: lint.sh [CHECK...]; all of them without a name. Each is a ctest
# "lint.CHECK" too. Exit 0 clean, 1 findings, 77 the tool for it is not installed.
set -uo pipefail

cd "$(dirname "$0")/.." || exit 1
build=${KVT_BUILD_DIR:-build}
jobs=${JOBS:-$(nproc)}
all=(format includes sizes banned names cases planted headers symbols shell cppcheck tidy)

need() {
    command -v "$1" >/dev/null && return
    echo "lint: $1 is not installed (scripts/setup.sh lint installs it)" >&2
    exit 77
}
c_files() { # of the folders given, or all
    find "${@:-.}" \( -path ./build\* -o -path ./.cache -o -path ./.git \) -prune -o \
        \( -name '*.[ch]' -o -name '*.cpp' \) -print | sed 's|^\./||' | sort
}

check_format() {
    need clang-format
    c_files include src tools tests examples | xargs clang-format --dry-run -Werror
}
check_includes() { need python3; python3 scripts/lint/includes.py; }
check_sizes() { need python3; python3 scripts/lint/sizes.py; }
check_banned() { need python3; python3 scripts/lint/banned.py; }
check_cases() { need python3; python3 scripts/lint/cases.py; }
check_planted() { need python3; python3 tests/planted/run.py --check; }
check_names() { scripts/lint/names.sh; }
check_headers() { need cc; need c++; scripts/lint/headers.sh "$build"; }
check_symbols() { need nm; scripts/lint/symbols.sh "$build"; }
check_shell() {
    need shellcheck
    find scripts tests .ci \( -name '*.sh' -o -path .ci/run \) -exec shellcheck -S warning {} +
}
check_cppcheck() {
    need cppcheck
    mkdir -p "$build/cppcheck"
    # Two headers whose list macros would be syntax errors; other system headers are not needed.
    local macros=() header
    for header in sys/queue.h jansson.h; do
        macros+=("--include=$(echo "#include <$header>" | cc -E - |
            sed -n "s|.*\"\(/.*/$header\)\".*|\1|p" | head -n 1)")
    done
    cppcheck --quiet --std=c11 --language=c --error-exitcode=1 --inline-suppr -j "$jobs" \
        --cppcheck-build-dir="$build/cppcheck" "${macros[@]}" --enable=warning,performance,portability \
        --suppressions-list=scripts/lint/cppcheck.txt -D_GNU_SOURCE -D__x86_64__ -I include -I src \
        -I tools src tools
}
check_tidy() { # needs compile_commands.json of a configured build
    need clang-tidy
    [ -e "$build/compile_commands.json" ] || { echo "lint: configure $build first" >&2; exit 1; }
    # The analyser looks across functions only with KVT_TIDY_DEEP=1: ten times the time, for a release.
    local shallow=(--extra-arg=-Xclang --extra-arg=-analyzer-config
        --extra-arg=-Xclang --extra-arg=mode=shallow)
    [ "${KVT_TIDY_DEEP:-0}" = 1 ] && shallow=()
    # only files of the database: others would be guessed at
    find src tools -name '*.c' | sort | while read -r f; do
        grep -q "/$f\"" "$build/compile_commands.json" && echo "$f"
    done | xargs -P "$jobs" -n 4 clang-tidy --quiet -p "$build" "${shallow[@]}" 2>/dev/null
}

[ $# -gt 0 ] || set -- "${all[@]}"
failed=0
for check in "$@"; do
    case " ${all[*]} " in
    *" $check "*) ;;
    *) echo "lint: unknown check '$check'; one of: ${all[*]}" >&2; exit 2 ;;
    esac
    start=$SECONDS
    ( "check_$check" )
    rc=$?
    if [ $rc -eq 77 ] && [ $# -eq 1 ]; then exit 77; fi
    case $rc in
    0) echo "lint $check: clean ($((SECONDS - start)) s)" ;;
    77) ;;
    *) echo "lint $check: FAILED" >&2; failed=1 ;;
    esac
done
exit $failed
