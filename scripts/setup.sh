#!/bin/bash
# Install what is missing for a step: setup.sh build|demo|lint|test|engines
# Knows Debian 12 and Ubuntu 22.04/24.04 (apt). Elsewhere it names what is missing and stops.
# Installs nothing, and asks nobody, when everything is there.
set -euo pipefail

step=${1:-build}
packages=()

have_program() { command -v "$1" >/dev/null 2>&1; }
have_library() { have_program pkg-config && pkg-config --exists "$1"; }
need_program() { have_program "$1" || packages+=("$2"); }
need_library() { have_library "$1" || packages+=("$2"); }
optional=()
want_library() { have_library "$1" || optional+=("$2"); } # works without, so its absence fails nothing

need_build() {
    need_program cc build-essential
    need_program c++ build-essential
    need_program cmake cmake
    need_program ninja ninja-build
    need_program pkg-config pkg-config
    need_library libxxhash libxxhash-dev
    need_library libcrypto libssl-dev
    need_library jansson libjansson-dev
    need_library cmocka libcmocka-dev
    want_library liburing liburing-dev
    want_library ncurses libncurses-dev
}
need_demo() { # llama.cpp's sources and the model come as packages of PyPI
    need_program python3 python3
    python3 -m pip --version >/dev/null 2>&1 || packages+=(python3-pip)
    [ -e /etc/ssl/certs/ca-certificates.crt ] || packages+=(ca-certificates)
}
need_engines() { # an environment of Python for the wheel and the engines
    python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || packages+=(python3-venv)
}
need_lint() {
    need_program python3 python3
    need_program clang clang
    need_program clang-format clang-format
    need_program clang-tidy clang-tidy
    need_program cppcheck cppcheck
    need_program shellcheck shellcheck
}

case $step in
build) need_build ;;
demo) need_build; need_demo ;;
lint) need_build; need_lint ;;
test) need_build; need_demo; need_lint ;;
engines) need_build; need_demo; need_engines ;;
*) echo "setup.sh: unknown step '$step': build, demo, lint, test or engines" >&2; exit 2 ;;
esac

as_root=()
may_install=no # without asking anybody
if have_program apt-get; then
    if [ "$(id -u)" -eq 0 ]; then
        may_install=yes
    elif have_program sudo && sudo -n true 2>/dev/null; then
        may_install=yes
        as_root=(sudo)
    fi
fi
# What is only wanted is tried where that asks nobody, before the first build.
if [ "$may_install" = no ] || [ -e "$(dirname "$0")/../build/CMakeCache.txt" ]; then
    optional=()
fi
# What tests of the shared tier start on loopback; where it cannot be had they are skipped.
if [ "$step" = test ] && [ "$may_install" = yes ] && ! have_program redis-server; then
    optional+=(redis-server)
fi
[ $((${#packages[@]} + ${#optional[@]})) -gt 0 ] || exit 0
mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sed '/^$/d' | sort -u)

if [ ${#packages[@]} -gt 0 ] && [ "$may_install" = no ]; then
    if ! have_program apt-get; then
        echo "setup.sh: missing here (Debian names): ${packages[*]}" >&2
        echo "setup.sh: no apt-get; install them with your package manager and try again" >&2
        exit 1
    elif have_program sudo && [ -t 0 ]; then
        as_root=(sudo)
    else
        echo "setup.sh: missing packages, and neither root nor sudo to install them. Run:" >&2
        echo "  apt-get install -y ${packages[*]}" >&2
        exit 1
    fi
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() { # another apt may be at work: wait for its lock; a slow mirror gets three tries
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 \
        -o Acquire::Retries=3 "$@" >>"$log" 2>&1
}
try_install() { apt install -y --no-install-recommends "$@"; }
# The list of packages may be absent or stale: fetch it only when the first try fails.
install() { try_install "$@" || { apt update && try_install "$@"; }; }

if [ ${#packages[@]} -gt 0 ]; then
    echo "installing: ${packages[*]}"
    if ! install "${packages[@]}"; then
        tail -n 30 "$log" >&2
        echo "setup.sh: could not install: ${packages[*]}" >&2
        exit 1
    fi
fi
if [ ${#optional[@]} -gt 0 ]; then
    echo "installing, optional: ${optional[*]}"
    install "${optional[@]}" || echo "setup.sh: going on without ${optional[*]}" >&2
fi
