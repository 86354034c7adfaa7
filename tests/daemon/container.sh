#!/bin/bash
# The container file of share/kvtierd, built and used: container.sh BUILD [BASE]. By hand: it needs
# root, buildah, and debootstrap with Debian's packages in reach; no registry of images, no daemon of
# containers. BASE: a Debian 12 tree to begin with, made there when it is not there; else a new one
# that goes with the rest. BUILD: where kvtier and its library are built, which talk to the container
# from outside. Exit 0 ok, 1 a step failed (its log is shown), 77 not here.
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "${1:?usage: container.sh BUILD [BASE]}" && pwd)
[ "$(id -u)" = 0 ] && command -v buildah debootstrap >/dev/null || exit 77
work=$(mktemp -d)
base=${2:-$work/base}
runner=
cleanup() {
    [ -z "$runner" ] || kill "$runner" 2>/dev/null || true
    rm -rf --one-file-system "$work"
}
trap cleanup EXIT
store() { buildah --root "$work/storage" --runroot "$work/runroot" --storage-driver vfs "$@"; }
step() { # its output is shown only when it fails
    "$@" >"$work/log" 2>&1 || { tail -n 40 "$work/log"; exit 1; }
}

# What FROM names, made of Debian's own packages.
[ -d "$base/usr" ] || step debootstrap --variant=minbase bookworm "$base"
container=$(store from scratch)
step store add "$container" "$base" /
step store commit --rm "$container" docker.io/library/debian:bookworm-slim

mkdir "$work/source" "$work/disk"
mkdir -m 700 "$work/run"
(cd "$here" && git archive HEAD) | tar x -C "$work/source"
cd "$work/source"
step store bud --isolation chroot --pull-never -t kvtierd -f share/kvtierd/Containerfile .
container=$(store from --pull-never localhost/kvtierd)
mapfile -t command < <(store inspect --type image \
    --format '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}' localhost/kvtierd | sed '/^$/d')
[ "${command[0]}" = /usr/local/bin/kvtierd ]

socket=$work/run/kvtier.sock
start() {
    store run --isolation chroot -v "$work/run:/run/kvtier" -v "$work/disk:/var/lib/kvtier" \
        "$container" -- "${command[@]}" --dram 64MiB --disk /var/lib/kvtier:256MiB \
        >>"$work/daemon" 2>&1 &
    runner=$!
    for _ in $(seq 600); do
        [ ! -S "$socket" ] || break
        sleep 0.1
    done
    "$build/kvtier" stat "unix:$socket" --json >"$work/stat" || { cat "$work/daemon"; exit 1; }
}
stop() { # as docker stop does it
    kill -TERM "$(sed -n 's/.*"writer.pid": *\([0-9]*\).*/\1/p' "$work/stat")"
    wait "$runner" || { cat "$work/daemon"; exit 1; }
    runner=
    [ ! -e "$socket" ]
}
remember() { # stores two blocks, or finds them; says whether what it loads is what was stored
    KVTIER_CONFIG=unix:$socket "$work/remember" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    grep -qx "found before: $1 blocks" "$work/log" || { cat "$work/log"; exit 1; }
}
cc -o "$work/remember" "$here/examples/remember.c" -I"$here/include" -L"$build" -lkvtier \
    -Wl,-rpath,"$build"

start
remember 0
remember 2 # another process: DRAM is warm
stop
start
remember 2 # another daemon: from disk
stop
echo "container: built, run, asked, used from outside, stopped, started again over the same disk"
