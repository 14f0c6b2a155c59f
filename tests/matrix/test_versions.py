"""The replay tests on the oldest and the newest megatron-core and on 0.16.1, every value of a layout factor once.

All pairs are left to `make test-matrix`.

The release that is installed here runs them as part of tests/routing, so it isn't run again.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNAVAILABLE = 3  # exit status of the script when a release can't be downloaded
HERE = metadata.version("megatron-core")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", [version for version in ("0.13.1", "0.16.1", "0.19.2") if version != HERE])
def test_one_code_path_on_the_oldest_and_the_newest_core(version):
    command = [sys.executable, "scripts/test_matrix.py", "--versions", version, "--strength", "1"]
    done = subprocess.run([*command, "--tests", "tests/routing"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip()[-300:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert f"megatron-core {version:<7} passed" in done.stdout
