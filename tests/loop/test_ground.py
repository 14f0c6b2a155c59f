"""What a launch finds on its node before it starts: leftovers of earlier launches, GPUs in use."""

import os
import subprocess
import sys
import time

import pytest

from megatron_t1 import fence, sealed
from megatron_t1.errors import T1Error
from megatron_t1.loop import ground
from megatron_t1.processes import LAUNCH_MARK, RUN_MARK, start_ticks

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]


@pytest.fixture
def process(tmp_path):
    """Starts processes with the marks of a launch."""
    started = []

    def start(launch: str, run: str = str(tmp_path), line=SLEEP) -> int:
        marks = {RUN_MARK: run, LAUNCH_MARK: launch}
        started.append(subprocess.Popen(line, env={**os.environ, **marks}, start_new_session=True))
        return started[-1].pid

    yield start
    for each in started:
        each.kill()
        each.wait()


def test_only_other_launches_of_the_same_run_are_ended(process, tmp_path):  # vllm#55510 AReaL#622
    old, own, another = process("old", line=STUBBORN), process("new"), process("old", run="/another/run")
    assert ground.leftovers(str(tmp_path), "new") == [old]
    assert ground.clear(str(tmp_path), "new", grace_s=0.2) == 1
    assert start_ticks(old) is None
    assert start_ticks(own) and start_ticks(another)
    assert ground.clear(str(tmp_path), "new", grace_s=5.0) == 0  # at once: nothing is waited for


def test_what_ends_by_itself_is_waited_for(process, tmp_path):
    process("old", line=[sys.executable, "-c", "import time; time.sleep(1)"])
    assert ground.clear(str(tmp_path), "new", grace_s=20.0) == 0


def fake_smi(folder, used: str):
    """An nvidia-smi that knows two GPUs, and process 77 on them."""
    path = folder / "nvidia-smi"
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  *compute-apps*) echo '77, 60000' ;;\n"
        f"  *--id=1*) echo '1, 100, 80000' ;;\n"
        f"  *) echo '0, {used}, 80000'; echo '1, 100, 80000' ;;\n"
        "esac\n"
    )
    path.chmod(0o755)


def test_a_gpu_in_use_is_named_with_its_holder(tmp_path, monkeypatch):
    fake_smi(tmp_path, "60000")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ground, "MEMORY_S", 0.0)
    with pytest.raises(T1Error, match="GPU 0 is in use .*: 60000 of 80000 MiB; held by process 77"):
        ground.require_free([], 0.9)
    ground.require_free(["1"], 0.9)
    ground.require_free([], 0.2)
    fake_smi(tmp_path, "[N/A]")
    ground.require_free([], 0.9)


@pytest.mark.parametrize(
    ("visible", "rank", "own"),
    [
        ("0,1,2", "1", ["1"]),
        ("4,5", "", ["4", "5"]),
        ("", "", []),
        ("", "1", ["1"]),
        ("7", "3", ["7"]),  # each task was left its own
        ("GPU-a,GPU-b", "1", ["GPU-b"]),
    ],
)
def test_a_rank_looks_at_its_own_gpu(visible, rank, own):
    environment = {"CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": rank}
    assert ground.own_gpus(environment) == own


@pytest.mark.parametrize("log", ["log", "/dev/full"])
def test_a_process_ends_when_its_phase_was_launched_anew(tmp_path, log):
    sealed.write(tmp_path / fence.LAUNCH_FILE, {"launch": "first"})
    assert fence.named(tmp_path) == "first" and fence.named(tmp_path / "nowhere") is None
    code = (
        "import pathlib, sys, time; from megatron_t1.fence import watch; "
        "watch(pathlib.Path(sys.argv[1]), 'first', every_s=0.05); time.sleep(30)"
    )
    with open(tmp_path / log, "w") as stderr:
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=stderr)
    time.sleep(1.0)
    assert process.poll() is None
    sealed.write(tmp_path / fence.LAUNCH_FILE, {"launch": "second"})
    assert process.wait(timeout=20) == -15
    assert log == "/dev/full" or "started again elsewhere" in (tmp_path / log).read_text()
