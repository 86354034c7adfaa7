#!/bin/bash
# Goal: a program outside the tree remembers prompts of its own llama.cpp with what `make install`
# leaves behind: through the shared library and through the archive; the installed `kvtier demo` runs.
# Method: examples/llama_remember.c, built by pkg-config, run twice in two processes on a tiny model.
#   install.sh SOURCE_DIR BUILD_DIR LLAMA_PREFIX TINY_MODEL_PROGRAM
set -euo pipefail

source_dir=$1
build_dir=$2
llama=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "install: $*" >&2; exit 1; }

prefix=$work/prefix
cmake --install "$build_dir" --prefix "$prefix" >"$work/log" || { cat "$work/log"; exit 1; }
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name kvtier-llama.pc)")
libdir=$(dirname "$(find "$prefix" -name libkvtier-llama.a)")
export PKG_CONFIG_PATH
"$4" "$work/tiny.gguf"
for i in $(seq 200); do echo "Line $i of a text that takes some tokens."; done >"$work/text"

if [ -e "$llama/lib/libllama.a" ]; then
    engine=("-Wl,--start-group" "$llama"/lib/lib*.a "-Wl,--end-group" -lstdc++ -lm -ldl -lpthread)
else
    engine=(-L"$llama/lib" "-Wl,-rpath,$llama/lib" -lllama -lggml -lggml-base)
fi
read -ra shared < <(pkg-config --libs kvtier-llama)
archive=("$libdir/libkvtier-llama.a" "-L$libdir" -lkvtier -lcrypto)
read -ra cflags < <(pkg-config --cflags kvtier-llama)
build() { # NAME LIBRARIES...
    local name=$1
    shift
    cc -std=c11 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Werror -o "$work/$name" \
        "$source_dir/examples/llama_remember.c" "${cflags[@]}" -isystem "$llama/include" "$@" \
        "${engine[@]}" -Wl,-rpath,"$libdir"
}
build by_shared "${shared[@]}"
build by_archive "${archive[@]}"
for way in shared archive; do
    mkdir "$work/store_$way"
    "$work/by_$way" "$work/tiny.gguf" "$work/store_$way" "$work/text" >"$work/first"
    "$work/by_$way" "$work/tiny.gguf" "$work/store_$way" "$work/text" >"$work/second"
    grep -q '^loaded 0 of' "$work/first" || fail "a new store loaded something: $(cat "$work/first")"
    grep -q '^loaded 0 of' "$work/second" && fail "nothing was remembered: $(cat "$work/second")"
done
# one format, whichever way the adapter was linked
"$work/by_shared" "$work/tiny.gguf" "$work/store_archive" "$work/text" >"$work/third"
[ "$(cut -d, -f1 "$work/third")" = "$(cut -d, -f1 "$work/second")" ] ||
    fail "the shared library does not load what the archive stored"

KVTIER_CACHE_DIR=$work "$prefix/bin/kvtier" demo --model "$work/tiny.gguf" --tokens 200 --threads 1 \
    --json >"$work/demo"
grep -q '"ttft_ms"' "$work/demo" || fail "the installed demo does not run"
echo "install: the shared adapter, the archive and the installed demo work"
