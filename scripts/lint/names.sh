#!/bin/bash
# File names are unique (an editor's "open file" finds the one meant), there are at most 10 public
# headers, and every folder of src/ says what it is.
set -euo pipefail

failed=0
double=$(find include src tools tests examples -type f \( -name '*.c' -o -name '*.h' -o -name '*.cpp' \) \
    -printf '%f\n' | sort | uniq -d)
if [ -n "$double" ]; then
    echo "file names that occur twice:" "$double"
    failed=1
fi
count=$(find include/kvtier -name '*.h' | wc -l)
if [ "$count" -gt 10 ]; then
    echo "include/kvtier has $count headers, at most 10"
    failed=1
fi
for folder in src/*/; do
    if [ ! -s "$folder/README.md" ]; then
        echo "$folder has no README.md"
        failed=1
    fi
done
exit $failed
