#!/bin/bash
# Man pages and shell completion, printed by the programs themselves: make-share.sh KVTIER KVTIERD DIR
#   DIR/man1/kvtier*.1, DIR/man8/kvtierd.8, DIR/bash-completion/completions/kvtier, DIR/zsh/site-functions/_kvtier
set -euo pipefail

tool=${1:?usage: make-share.sh KVTIER KVTIERD DIR}
daemon=${2:?usage: make-share.sh KVTIER KVTIERD DIR}
dir=${3:?usage: make-share.sh KVTIER KVTIERD DIR}
rm -rf "$dir"
mkdir -p "$dir/man1" "$dir/man8" "$dir/bash-completion/completions" "$dir/zsh/site-functions"

"$tool" help --man >"$dir/man1/kvtier.1"
# "name" and "built" of each command, one command a line; and the words that several begin with
names=$("$tool" help --json | sed 's/},{/}\n{/g' | sed -n 's/.*"name":"\([^"]*\)".*"built":true.*/\1/p')
families=$(sed -n 's/ .*//p' <<<"$names" | sort -u)
while read -r name; do
    [ -n "$name" ] || continue
    read -ra words <<<"$name"
    "$tool" help --man "${words[@]}" >"$dir/man1/kvtier-${name// /-}.1"
done <<<"$names"$'\n'"$families"
"$daemon" --man >"$dir/man8/kvtierd.8"
"$tool" help --complete bash >"$dir/bash-completion/completions/kvtier"
"$tool" help --complete zsh >"$dir/zsh/site-functions/_kvtier"
touch "$dir/made"
