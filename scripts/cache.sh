# shellcheck shell=bash
# Shared by fetch-llama.sh, fetch-model.sh and build-llama.sh; sourced, not run.
#
# The cache: ${KVTIER_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvtier}, with
#   downloads/   packages as they came, named like upstream names them
#   llama.cpp-VERSION-DIGEST/   one prefix per version and build flags: include/ lib/
#   models/      GGUF files
# Everything is made under a temporary name beside its place and renamed when it is complete and its
# digest is right, so an interrupted run leaves nothing that a later one would trust.
# A file put into downloads/ by hand is used when its digest is right: no network is needed then.

set -euo pipefail
. "${BASH_SOURCE[0]%/*}/progress.sh"

say() { echo "$*" >&2; }
die() { echo "${0##*/}: $*" >&2; exit 1; }

kvt_cache_dir() {
    local dir=${KVTIER_CACHE_DIR:-}
    if [ -z "$dir" ]; then
        [ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || die "set KVTIER_CACHE_DIR: there is no HOME"
        dir=${XDG_CACHE_HOME:-$HOME/.cache}/kvtier
    fi
    mkdir -p "$dir"
    (cd "$dir" && pwd)
}

# One script at a time per cache; the lock goes with the process.
kvt_cache_lock() {
    exec 9>"$1/.lock"
    if ! flock -n 9; then
        say "waiting for another run that fills $1"
        flock 9
    fi
}

# Remove what interrupted runs of this kind left (called with the lock held).
kvt_cache_sweep() { rm -rf "$1"/.tmp.*; }

kvt_digest_ok() { # FILE SHA256
    [ -f "$1" ] && echo "$2  $1" | sha256sum --check --status
}

# Get FILE of a PyPI package into downloads/ and print its path.
kvt_pip_file() { # CACHE FILE SHA256 MEGABYTES PIP-ARGUMENTS...
    local cache=$1 file=$2 sha=$3 megabytes=$4
    shift 4
    local dir=$cache/downloads
    mkdir -p "$dir"
    if kvt_digest_ok "$dir/$file" "$sha"; then
        echo "$dir/$file"
        return
    fi
    rm -f "$dir/$file"
    command -v python3 >/dev/null || die "python3 is needed to download $file"
    python3 -m pip --version >/dev/null 2>&1 ||
        die "pip is needed to download $file (Debian, Ubuntu: apt install python3-pip)"
    kvt_cache_sweep "$dir"
    local tmp
    tmp=$(mktemp -d "$dir/.tmp.XXXXXX")
    say "downloading $file, $megabytes MB"
    run_logged "$tmp/log" "still downloading $file" \
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$tmp" "$@" ||
        { cat "$tmp/log" >&2; rm -rf "$tmp"; die "the download of $file failed"; }
    [ -f "$tmp/$file" ] || { rm -rf "$tmp"; die "the download did not bring $file"; }
    kvt_digest_ok "$tmp/$file" "$sha" ||
        { rm -rf "$tmp"; die "$file does not have the expected SHA-256 $sha; refused"; }
    mv "$tmp/$file" "$dir/$file"
    rm -rf "$tmp"
    echo "$dir/$file"
}
