"""A PPO step on a GPU against the same step on the CPU; without a GPU, what the comparison itself is worth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.gpu.devices import gpu_backends, needs_gpu
from tests.gpu.parity import compute, largest_difference

ROOT = Path(__file__).resolve().parent.parent.parent
# float32 on both sides: what is left is the order of summation. A step of Adam makes a sign of a gradient, so a weight
# whose gradient is almost zero may go the other way: parameters are compared by their learning rate, 1e-3 and 2e-3.
LIMITS = {"logprobs": 1e-5, "entropy": 1e-5, "values": 1e-5, "sums": 1e-5, "after": 4e-3}


def on(name: str, run: str, tmp_path: Path) -> dict[str, np.ndarray]:
    file = tmp_path / f"{name}.safetensors"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if name == "cpu" else {}
    command = [sys.executable, "-m", "tests.gpu.parity", run, name, str(file)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **hidden}, check=True, timeout=240)
    return load_file(file)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", gpu_backends())
def test_a_step_on_the_gpu_is_that_on_the_cpu(name, stored_run, tmp_path):
    reference, found = on("cpu", stored_run, tmp_path), on(name, stored_run, tmp_path)
    differences = {part: largest_difference(found, reference, part) for part in LIMITS}
    assert all(differences[part] <= limit for part, limit in LIMITS.items()), differences


@pytest.mark.slow
def test_the_step_is_reproducible_and_replay_changes_it(backend, stored_run):
    if backend.name != "cpu":
        pytest.skip("the CPU backend needs a process without a CUDA device")
    first, again = compute(Path(stored_run), backend), compute(Path(stored_run), backend)
    native = compute(Path(stored_run), backend, replay=False)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert all(np.isfinite(values).all() for values in first.values())
    for part in ("logprobs", "values", "sums"):  # a comparison of devices would see a router that isn't replayed
        assert largest_difference(native, first, part) > 100 * LIMITS[part]
