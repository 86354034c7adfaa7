#!/bin/bash
# The documentation that is installed: README.md, CHANGELOG.md, LICENSE, docs/*.md and docs/engines/*.md,
# at the same places; a link to a file of the tree that is not among them becomes its text.
#   make-docs.sh SOURCE_DIR DIR
set -euo pipefail

source_dir=${1:?usage: make-docs.sh SOURCE_DIR DIR}
dir=${2:?usage: make-docs.sh SOURCE_DIR DIR}
rm -rf "$dir"
mkdir -p "$dir/docs/engines" "$dir/examples"
cd "$source_dir"
cp LICENSE "$dir"
cp examples/remember.c examples/sessions.c "$dir/examples"
pages=(README.md CHANGELOG.md docs/*.md docs/engines/*.md)
for page in "${pages[@]}"; do # all of them first: they link to each other
    : >"$dir/$page"
done
for page in "${pages[@]}"; do
    links=$(grep -oE '\]\([^()]+\)' "$page" | sed -E 's/^\]\(//; s/\)$//' | sort -u || true)
    gone=$(while read -r link; do
        case $link in '' | '#'* | *://* | mailto:*) continue ;; esac
        [ -e "$dir/$(dirname "$page")/${link%%#*}" ] || printf '%s\n' "$link"
    done <<<"$links")
    # the whole page is one record: the text of a link may begin on the line before
    GONE=$gone awk '
        BEGIN { RS = "\001"; n = split(ENVIRON["GONE"], list, "\n"); for (i = 1; i <= n; i++) gone[list[i]] = 1 }
        {
            out = ""; rest = $0
            while (match(rest, /\[[^][]*\]\([^()]*\)/)) {
                link = substr(rest, RSTART, RLENGTH); at = index(link, "](")
                target = substr(link, at + 2, length(link) - at - 2)
                out = out substr(rest, 1, RSTART - 1) (target in gone ? substr(link, 2, at - 2) : link)
                rest = substr(rest, RSTART + RLENGTH)
            }
            printf "%s", out rest
        }' "$page" >"$dir/$page"
done
