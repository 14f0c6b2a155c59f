"""benchmarks/gpu.py runs whole where there is no GPU, so that the first run on one isn't the first run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_every_part_runs_at_small_sizes():
    command = [sys.executable, "benchmarks/gpu.py", "--backend", "cpu", "--small", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for part in ("core's own replay", "replay, checked", "forward and backward", "layers of tiny", "at the highest"):
        assert part in done.stdout


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "benchmarks/gpu.py", "replay"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "torch finds no CUDA device" in done.stderr and "Traceback" not in done.stderr


def test_the_script_says_what_an_interpreter_lacks(tmp_path):
    """Not that there was no GPU, with status 0, as if that had been looked for."""
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    bare.chmod(0o755)
    for python, said in ((str(bare), "No module named 'torch'"), (str(tmp_path / "none"), "there is no")):
        done = subprocess.run([ROOT / "scripts" / "gpu.sh", python], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and said in done.stderr and "CUDA" not in done.stdout
