"""The replay tests on the oldest and the newest megatron-core, and on the one of `make setup`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNAVAILABLE = 3  # exit status of the script when a release can't be downloaded


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_code_path_on_the_oldest_and_the_newest_core():
    command = [sys.executable, "scripts/test_matrix.py", "--versions", "0.13.1", "0.16.1", "0.19.2", "--strength", "1"]
    tests = ["--tests", "tests/routing"]
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip()[-300:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    for version in ("0.13.1", "0.16.1", "0.19.2"):
        assert f"megatron-core {version:<7} passed" in done.stdout
