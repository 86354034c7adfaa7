#!/bin/bash
# Download the pinned llama.cpp source package and check it; print its path.
# llama.cpp travels inside the source package of llama-cpp-python (MIT), which is versioned and
# immutable. See cache.sh for where things go.
set -euo pipefail
. "$(dirname "$0")/cache.sh"
. "$(dirname "$0")/llama.pin"

cache=$(kvt_cache_dir)
kvt_cache_lock "$cache"
kvt_pip_file "$cache" "$LLAMA_FILE" "$LLAMA_SHA256" "$LLAMA_MB" \
    --no-binary llama-cpp-python "llama-cpp-python==$LLAMA_VERSION"
