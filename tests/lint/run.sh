#!/bin/bash
# Goal: every check of scripts/lint.sh can fail: a check that finds nothing in a planted fault is
# a defect of the check.
# Method: a copy of the sources, one fault planted at a time, the check must report it by name, and
# must be content again when the fault is gone.   run.sh SOURCE_DIR BUILD_DIR
set -euo pipefail

source_dir=$1
build_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

cd "$source_dir"
tar cf - --exclude-vcs include src tools tests examples scripts docs .ci .clang-format .clang-tidy | tar xf - -C "$work"
cd "$work"
mkdir build
ln -s "$build_dir/libkvtier.so" build/libkvtier.so
cp "$build_dir/CMakeCache.txt" build/
export KVT_BUILD_DIR=build

# plant CHECK FILE TEXT WORD: append TEXT to FILE; CHECK must fail and name WORD
plant() {
    local check=$1 file=$2 text=$3 word=$4 existed=0
    [ -e "$file" ] && { existed=1; cp "$file" "$work/saved"; }
    printf '%b\n' "$text" >>"$file"
    if scripts/lint.sh "$check" >"$work/out" 2>&1; then
        echo "lint $check accepts: $text"
        failed=1
    elif [ $? -eq 77 ]; then
        echo "lint $check cannot run here"
    elif ! grep -q -- "$word" "$work/out"; then
        echo "lint $check fails without naming $word:"
        cat "$work/out"
        failed=1
    fi
    if [ $existed -eq 1 ]; then cp "$work/saved" "$file"; else rm "$file"; fi
}

long=$(printf '    x++;\\n%.0s' $(seq 101))
plant format src/base/log.c 'int  kvt_badly( void ) ;' log.c
plant includes src/base/log.c '#include "store/store.h"' store/store.h
plant includes src/codec/level.c '#include "io/io.h"' io/io.h
plant includes src/store/index.c '#include "client/settings.h"' client/settings.h
plant includes include/kvtier/key.h '#include <sys/uio.h>' sys/uio.h
plant includes include/kvtier/key.h '#include "base/ring.h"' base/ring.h
plant sizes src/base/log.c "static int long_one(int x)\n{\n${long}    return x;\n}" 'function of 10[0-9] lines'
plant sizes src/base/log.c "$(printf '/* x */\\n%.0s' $(seq 1001))" 'at most 1000'
plant sizes src/base/log.c "/* $(printf 'x%.0s' $(seq 100)) */" 'columns'
plant banned src/base/log.c 'static void f(void) { printf("x"); }' 'printf()'
plant banned src/base/log.c 'static void f(char *a) { strcpy(a, "x"); }' 'strcpy()'
plant banned src/base/log.c 'static void f(void) { abort(); }' 'abort()'
plant banned src/store/index.c 'static int f(void) { return open("x", 0); }' 'open()'
plant banned src/store/index.c 'static int f(void) { return kvt_fd_high(x) + eventfd(0, 0); }' 'eventfd()'
plant banned tools/cli.c 'static int f(void) { return atoi("1"); }' 'atoi()'
plant banned tools/cli.c '/* TO''DO later */' 'note to self'
plant names src/store/log.c 'int x;' log.c
plant cases tests/unit/test_cli.c 'static void test_c99_planted(void **state) {}' C99
plant cases docs/testing.md '| C98 | x | test_cli: `test_c98_absent` |' C98
plant planted src/format/record.c '/* if (key && memcmp(key, &header->key, sizeof *key)) */' record_of_another_key_taken
mkdir src/new
plant names src/new/new_part.c 'int x;' src/new
plant includes src/new/new_part.c 'int x;' src/new
rmdir src/new
plant headers include/kvtier/key.h 'uint64_t kvt_x(struct kvt_new { int class; } *a);' key.h
plant headers src/base/rng.h 'undeclared_type kvt_x(void);' rng.h
plant shell scripts/build.sh 'for f in $(ls *.c); do rm $f; done; x=$y; local z' SC
plant cppcheck src/base/log.c 'int kvt_y(int n);\nint kvt_y(int n) { int a[4]; return n > 2 ? a[5] : a[n]; }' a
sed -i 's/kvt_version;/kvt_versoin;/' src/libkvtier.map
if scripts/lint.sh symbols >out 2>&1 || ! grep -q kvt_versoin out; then
    echo "lint symbols accepts a map that differs from the library"
    failed=1
fi

# The code as it is must pass what needs no tool: else "fails" above proves nothing.
sed -i 's/kvt_versoin;/kvt_version;/' src/libkvtier.map
scripts/lint.sh includes sizes banned planted headers symbols >out 2>&1 || { cat out; failed=1; }
[ $failed -eq 0 ] && echo "lint: every check can fail"
exit $failed
