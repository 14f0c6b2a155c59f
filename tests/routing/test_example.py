"""The example of docs/routing-replay.md runs, and the page shows what runs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "replay_in_megatron.py"


def test_the_page_shows_the_example():
    page = (ROOT / "docs" / "routing-replay.md").read_text()
    (shown,) = re.findall(r"<!-- example: begin -->\n```python\n(.*?)```\n<!-- example: end -->", page, re.DOTALL)
    assert shown.strip() in EXAMPLE.read_text()
    lines = [line for line in shown.splitlines() if line.strip()]
    assert "RoutingReplay(model)" in shown and len(lines) <= 32
    imported = set(re.findall(r"(?:from|import) (megatron_t1[\w.]*)", shown))
    assert imported == {"megatron_t1.routing.replay", "megatron_t1.routing.slot"}


@pytest.mark.slow
def test_the_example_records_and_replays():  # Megatron-LM#4168
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    native, replayed = (re.findall(r"\d+\.\d+", line) for line in done.stdout.splitlines()[-2:])
    assert len(native) == len(replayed) == 4
    assert native[0] == replayed[0] and native[1:] != replayed[1:]
    assert float(replayed[2]) < float(replayed[0])
