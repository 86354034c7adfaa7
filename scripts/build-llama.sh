#!/bin/bash
# Build libllama alone from the pinned source package, once, and print the prefix:
#   include/  llama.h, ggml*.h, gguf.h      lib/  static archives, position-independent
#   BUILD     what it is, one line (becomes part of the identity of stored blocks)    LICENSE
# The prefix is keyed by version, flags and compiler; a second run only prints it.
#   build-llama.sh [--source FILE]    use this source package instead of downloading it
# KVTIER_JOBS (or JOBS) limits the parallel compilations (default: all processors).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/cache.sh"
. "$here/llama.pin"

source_file=
if [ "${1:-}" = --source ]; then
    source_file=${2:?--source needs a file}
elif [ $# -gt 0 ]; then
    die "unknown option '$1'; the only one is --source FILE"
fi

flags=(
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON
    -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF -DGGML_LLAMAFILE=OFF -DLLAMA_CURL=OFF
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
)
# Fixed instruction sets, not "native": the same machine class gives the same bits everywhere.
if grep -qw avx2 /proc/cpuinfo && grep -qw fma /proc/cpuinfo && grep -qw f16c /proc/cpuinfo; then
    flags+=(-DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
            -DGGML_SSE42=ON)
fi

cxx=${CXX:-c++}
cc=${CC:-cc}
for program in cmake "$cc" "$cxx"; do
    command -v "$program" >/dev/null || die "$program is needed to build llama.cpp"
done
key=$(printf '%s\n' "$LLAMA_SHA256" "${flags[@]}" "$("$cc" --version | head -1)" \
    "$("$cxx" --version | head -1)" | sha256sum | cut -c1-16)

cache=$(kvt_cache_dir)
prefix=$cache/llama.cpp-$LLAMA_VERSION-$key
if [ -f "$prefix/BUILD" ]; then
    echo "$prefix"
    exit
fi

if [ -n "$source_file" ]; then
    kvt_digest_ok "$source_file" "$LLAMA_SHA256" ||
        die "$source_file is not $LLAMA_FILE (SHA-256 $LLAMA_SHA256)"
else
    source_file=$("$here/fetch-llama.sh")
fi
kvt_cache_lock "$cache"
if [ -f "$prefix/BUILD" ]; then # built while we waited
    echo "$prefix"
    exit
fi
kvt_cache_sweep "$cache"
tmp=$(mktemp -d "$cache/.tmp.XXXXXX")
trap 'rm -rf "$tmp"' EXIT

mkdir "$tmp/source"
tar -xzf "$source_file" -C "$tmp/source" --strip-components=1 --wildcards '*/vendor/llama.cpp/*' ||
    die "cannot unpack $source_file"
tree=$tmp/source/vendor/llama.cpp
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
say "building llama.cpp ($LLAMA_COMMIT), once; a few minutes"
log=$tmp/build.log
if ! { cmake "${generator[@]}" -S "$tree" -B "$tmp/build" "${flags[@]}" >"$log" 2>&1 </dev/null &&
    run_logged "$log" "building llama.cpp" \
        cmake --build "$tmp/build" --target llama --parallel "${KVTIER_JOBS:-${JOBS:-$(nproc)}}"; }; then
    tail -n 40 "$log" >&2
    die "llama.cpp did not build"
fi

out=$tmp/prefix
mkdir -p "$out/include" "$out/lib"
cp "$tree"/include/llama.h "$tree"/ggml/include/{ggml,ggml-alloc,ggml-backend,ggml-cpu,ggml-opt,gguf}.h \
    "$out/include/"
cp "$tree/LICENSE" "$out/LICENSE"
find "$tmp/build" -name '*.a' -exec cp {} "$out/lib/" \;
[ -f "$out/lib/libllama.a" ] || die "the build made no libllama.a"
echo "llama-cpp-python $LLAMA_VERSION, llama.cpp $LLAMA_COMMIT, build $key" >"$out/BUILD"
mv "$out" "$prefix"
echo "$prefix"
