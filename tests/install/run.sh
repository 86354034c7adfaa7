#!/bin/bash
# Goal: what `make install` leaves behind is enough to build and run a program outside the tree.
# Method: install into an empty prefix, and once below DESTDIR; build examples/remember.c by
# pkg-config and by find_package; run both, the second time against the directory that the first
# left; the same with examples/sessions.c, which must find in a second process what it computed in
# the first; run the installed tool from its new place.   run.sh SOURCE_DIR BUILD_DIR
set -euo pipefail

source_dir=$1
build_dir=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
fail() { echo "install: $*" >&2; exit 1; }

cmake --install "$build_dir" --prefix "$prefix" >"$work/log" || { cat "$work/log"; exit 1; }
DESTDIR=$work/dest cmake --install "$build_dir" --prefix /opt/kvtier >>"$work/log"
[ -x "$work/dest/opt/kvtier/bin/kvtier" ] || fail "DESTDIR is not obeyed"
for header in "$source_dir"/include/kvtier/*.h; do # llama.h comes with its own library
    name=${header##*/}
    [ "$name" = llama.h ] || [ -e "$prefix/include/kvtier/$name" ] || fail "$name is not installed"
done

for file in man/man1/kvtier.1 man/man8/kvtierd.8 kvtierd/{kvtierd.{conf,service,socket,sysusers},Containerfile} \
    man/man1/kvtier-bench-index.1 bash-completion/completions/kvtier \
    man/man1/kvtier-bench.1 zsh/site-functions/_kvtier doc/kvtier/{LICENSE,README.md} \
    doc/kvtier/docs/{config,format,codec,durability,operating}.md doc/kvtier/docs/engines/vllm.md \
    doc/kvtier/examples/{remember,sessions}.c; do
    [ -s "$prefix/share/$file" ] || fail "share/$file is not installed"
done

# what is installed links to what is installed, and says all the rest as text
for page in "$prefix"/share/doc/kvtier/{README.md,docs/*.md,docs/engines/*.md}; do
    [ -s "$page" ] || fail "$page is empty"
    while read -r link; do
        case $link in *://* | mailto:*) continue ;; esac
        [ -e "${page%/*}/${link%%#*}" ] || fail "${page#"$prefix/"} links to $link, which is not installed"
    done < <(grep -oE '\]\([^()#]+' "$page" | cut -c 3-)
done
grep -q '](docs/config.md' "$prefix/share/doc/kvtier/README.md" || fail "the installed README has lost its links"

# units name the place that was chosen at install time, and systemd takes them where it is there to say
grep -q "^ExecStart=/opt/kvtier/bin/kvtierd " "$work/dest/opt/kvtier/share/kvtierd/kvtierd.service" ||
    fail "the unit does not start the installed kvtierd"
if command -v systemd-analyze >/dev/null; then
    cmake --install "$build_dir" --prefix "$prefix" >>"$work/log" # the unit of this prefix
    systemd-analyze verify --man=no "$prefix/share/kvtierd/kvtierd.service" 2>"$work/units" || true
    ! grep kvtierd "$work/units" || fail "systemd does not take kvtierd.service"
fi
# Its keys; 1: what the unit makes before the start (directories, a user) is not here.
"$prefix/bin/kvtierd" --config "$prefix/share/kvtierd/kvtierd.conf" --check >>"$work/log" 2>&1 ||
    [ $? = 1 ] || fail "the installed kvtierd.conf is refused"
grep -q "every key is good\|the configuration is good" "$work/log" ||
    fail "the installed kvtierd.conf is not called good"

PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name kvtier.pc)")
LD_LIBRARY_PATH=$(dirname "$(find "$prefix" -name libkvtier.so)")
export PKG_CONFIG_PATH LD_LIBRARY_PATH
[ "$(pkg-config --modversion kvtier)" = "$("$prefix/bin/kvtier" --version | grep -o '[0-9.]*' | head -n 1)" ] ||
    fail "kvtier.pc and the tool disagree on the version"
mkdir "$work/outside"
cp "$source_dir"/examples/{remember,sessions}.c "$source_dir"/tests/install/{CMakeLists.txt,from_cxx.cpp} \
    "$work/outside"
read -ra flags < <(pkg-config --cflags --libs kvtier)
cc -std=c11 -Wall -Wextra -Werror -o "$work/by_pkg_config" "$work/outside/remember.c" "${flags[@]}"
"$work/by_pkg_config" "$work/store" | tee "$work/first"
grep -q 'found before: 0 blocks' "$work/first" || fail "a new directory holds blocks"
grep -q 'the same' "$work/first" || fail "loaded bytes differ"

cmake -S "$work/outside" -B "$work/outside/build" -DCMAKE_PREFIX_PATH="$prefix" \
    >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
cmake --build "$work/outside/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$work/outside/build/remember" "$work/store" | tee "$work/second"
grep -q 'found before: 2 blocks' "$work/second" || fail "blocks did not survive the process"
"$work/outside/build/from_cxx"

for run in 1 2; do
    # what is loaded and what computed is not to depend on how busy the machine is
    KVTIER_CONFIG=plan=off "$work/outside/build/sessions" "$work/talks" >"$work/talks.$run" ||
        fail "examples/sessions.c fails"
    tail -n 1 "$work/talks.$run"
    grep -q ' 0 of them without a record (success)' "$work/talks.$run" || fail "sessions lost blocks"
done
grep -q '^talk 8, turn 4: *296 tokens: .* 72 computed' "$work/talks.1" || fail "sessions computes too much"
grep -q '^talk 1, turn 1: *122 tokens: .* 112 from disk,  10 computed' "$work/talks.2" ||
    fail "conversations did not survive the process"

unset LD_LIBRARY_PATH # the tool must find what it needs by itself
"$prefix/bin/kvtier" stat "$work/store" --json | tee "$work/stat"
grep -q '"records":2' "$work/stat" || fail "the installed tool does not see the two records"
echo "install: pkg-config, CMake package, C++ and the installed tool work"
