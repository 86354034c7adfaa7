#!/bin/bash
# Every header compiles alone: public ones as C11 and C++17 with nothing but include/ in sight,
# internal ones as C17. The adapter's need llama.cpp's header: without it they are left out.
# headers.sh BUILD_DIR
set -uo pipefail

failed=0
llama=$(sed -n 's/^KVT_LLAMA_PREFIX:[A-Z]*=//p' "${1:-build}/CMakeCache.txt" 2>/dev/null)
strict=(-Wall -Wextra -Wpedantic -Werror -fsyntax-only)
for header in include/kvtier/*.h; do
    cc -std=c11 "${strict[@]}" -I include -x c "$header" -Wno-pragma-once-outside-header 2>&1 ||
        { echo "$header: not a C11 header on its own"; failed=1; }
    c++ -std=c++17 "${strict[@]}" -I include -x c++ "$header" 2>&1 ||
        { echo "$header: not a C++17 header on its own"; failed=1; }
done
while read -r header; do
    isa=() # headers of one instruction set need its switch, and exist for one processor only
    if [[ $header == *avx2* ]]; then
        [ "$(uname -m)" = x86_64 ] || continue
        isa=(-mavx2)
    fi
    cc -std=c17 -D_GNU_SOURCE "${isa[@]}" -Wall -Wextra -Werror -fsyntax-only -I include -I src -I tools \
        ${llama:+-isystem "$llama/include"} -x c "$header" 2>&1 ||
        { echo "$header: does not compile on its own"; failed=1; }
done < <(find src tools -name '*.h' | { [ -n "$llama" ] && cat || grep -v -e '^src/adapters/' -e '^tools/demo'; } | sort)
exit $failed
