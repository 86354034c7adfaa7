#!/bin/bash
# Install what is missing for a step: setup.sh build|demo|lint|test
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
*) echo "setup.sh: unknown step '$step': build, demo, lint or test" >&2; exit 2 ;;
esac

# What is only wanted is tried once, before the first build, where that asks nobody.
if [ ${#optional[@]} -gt 0 ] && [ ! -e "$(dirname "$0")/../build/CMakeCache.txt" ] &&
    have_program apt-get && [ "$(id -u)" -eq 0 ]; then
    echo "installing, optional: ${optional[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 install -y \
        --no-install-recommends "${optional[@]}" >/dev/null 2>&1 ||
        echo "setup.sh: going on without ${optional[*]}" >&2
fi
[ ${#packages[@]} -gt 0 ] || exit 0
mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)

if ! have_program apt-get; then
    echo "setup.sh: missing here (Debian names): ${packages[*]}" >&2
    echo "setup.sh: no apt-get; install them with your package manager and try again" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if have_program sudo && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        as_root=(sudo)
    else
        echo "setup.sh: missing packages, and neither root nor sudo to install them. Run:" >&2
        echo "  apt-get install -y ${packages[*]}" >&2
        exit 1
    fi
fi
echo "installing: ${packages[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt() { # another apt may be at work: wait for its lock; a slow mirror gets three tries
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 \
        -o Acquire::Retries=3 "$@" >>"$log" 2>&1
}
install_all() { apt install -y --no-install-recommends "${packages[@]}"; }
# The list of packages may be absent or stale: fetch it only when the first try fails.
if ! install_all && ! { apt update && install_all; }; then
    tail -n 30 "$log" >&2
    echo "setup.sh: could not install: ${packages[*]}" >&2
    exit 1
fi
