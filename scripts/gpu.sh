#!/usr/bin/env bash
# Everything that wants one GPU, in under five minutes: tests/gpu, then one table. Needs torch, megatron-core, this
# package and pytest; Transformer Engine's layers are taken too where they are installed.
#     scripts/gpu.sh [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if ! command -v "$python" >/dev/null; then
    echo "gpu: there is no $python; name an interpreter: scripts/gpu.sh PYTHON" >&2
    exit 2
fi
if ! lacking=$("$python" -c "import torch, megatron.core, megatron_t1, pytest" 2>&1); then
    echo "gpu: $python can't import what this needs: ${lacking##*$'\n'}" >&2
    exit 2
fi
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "gpu: torch finds no CUDA device here, so nothing was run"
    exit 0
fi
status=0
"$python" -m pytest tests/gpu -q -m gpu -p no:cacheprovider || status=$?
"$python" benchmarks/gpu.py --backend cuda_torch || status=$?
if "$python" -c "import transformer_engine.pytorch" 2>/dev/null; then
    "$python" benchmarks/gpu.py --backend cuda replay step || status=$?
fi
exit "$status"
