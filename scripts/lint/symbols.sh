#!/bin/bash
# The symbols that a library exports are those of its map, no more, no less; none is C++; it needs
# nothing but the libraries that docs/dependencies.md names.  symbols.sh BUILD_DIR
set -euo pipefail

build=${1:-build}
failed=0

compare() { # compare LIBRARY MAP
    local wanted have
    wanted=$(sed -e 's|/\*.*\*/||' "$2" | tr -d '\n' | sed -e 's/.*global:\(.*\)local:.*/\1/' |
        tr ';' '\n' | tr -d ' \t' | sed '/^$/d' | sort)
    have=$(nm -D --defined-only "$1" | awk '$2 != "A" {print $3}' | sed 's/@.*//' | sort)
    if [ "$wanted" != "$have" ]; then
        echo "$1 and $2 differ (< map, > library):"
        diff <(echo "$wanted") <(echo "$have") || true
        failed=1
    fi
}
compare "$build/libkvtier.so" src/libkvtier.map
if [ -e "$build/libkvtier-llama.so" ]; then # needs a build with KVT_LLAMA_PREFIX
    compare "$build/libkvtier-llama.so" src/adapters/libkvtier-llama.map
fi
if nm -D "$build/libkvtier.so" | grep -E ' _Z|GLIBCXX|CXXABI'; then
    echo "$build/libkvtier.so: C++ symbols"
    failed=1
fi
needed=$(objdump -p "$build/libkvtier.so" | awk '/NEEDED/ {print $2}' | sed 's/\.so.*//' | sort -u)
while read -r library; do
    case $library in
    libc | libm | libpthread | libcrypto | libssl | libxxhash | liburing | ld-linux-*) ;;
    *) echo "$build/libkvtier.so needs $library"; failed=1 ;;
    esac
done <<<"$needed"
exit $failed
