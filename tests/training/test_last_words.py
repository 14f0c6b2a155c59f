"""A rank that fails is gone at once, also where nobody can be told why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FAILING = """
import threading, time
from megatron_t1.training.main import guarded

def fail():
    print("going on", flush=False)
    raise {error}

threading.Thread(target=time.sleep, args=(600,)).start()  # as a runtime's, which Python would wait for
guarded(fail)
"""


@pytest.mark.parametrize("error", ['OSError(28, "No space left on device")', 'RuntimeError("Timed out waiting")'])
def test_a_log_that_cannot_be_written_keeps_no_rank(error):
    """The logs lie in the run: its disk is full when this is to be said."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", FAILING.format(error=error)], cwd=ROOT, stdout=full, stderr=full, timeout=120
        )
    assert ended.returncode == 1
