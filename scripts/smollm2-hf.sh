#!/bin/bash
# The model of scripts/fetch-model.sh as a Hugging Face folder, for the tests of kvtier.transformers;
# prints its path. Made once (a minute), kept beside the GGUF.   smollm2-hf.sh PYTHON
# PYTHON has torch, transformers, gguf and accelerate; the weights are dequantised to bfloat16.
set -euo pipefail
python=${1:?usage: smollm2-hf.sh PYTHON}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/cache.sh"
gguf=$("$here/fetch-model.sh")
cache=$(kvt_cache_dir)
out=$cache/models/smollm2-hf
if [ ! -e "$out/config.json" ]; then
    kvt_cache_lock "$cache"
    kvt_cache_sweep "$cache"
    if [ ! -e "$out/config.json" ]; then
        tmp=$(mktemp -d "$cache/.tmp.XXXXXX")
        trap 'rm -rf "$tmp"' EXIT
        say "converting the model, once"
        HF_HUB_OFFLINE=1 "$python" - "$gguf" "$tmp/hf" >"$tmp/log" 2>&1 <<'PYTHON' || { tail -n 20 "$tmp/log" >&2; die "the model could not be converted"; }
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder, name = os.path.split(sys.argv[1])
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(sys.argv[2])
AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.bfloat16,
    quantization_config=GgufConfig(dequantize=True)).save_pretrained(sys.argv[2])
PYTHON
        mv "$tmp/hf" "$out"
    fi
fi
echo "$out"
