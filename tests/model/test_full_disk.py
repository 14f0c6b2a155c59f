"""A checkpoint on a full disk: one readable error, nothing that looks complete. In a mount namespace of its own."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.tiny_model import write_hf

SAVE = """
import sys
from pathlib import Path
from megatron_t1.errors import readable
from tests.model.workers import train_and_save
from tests.tiny_model import write_hf

directory = Path(sys.argv[1])
write_hf(directory / "hf")
try:
    train_and_save(str(directory), {}, "policy")
except Exception as error:
    print("complete" if (directory / "checkpoint").exists() else "absent", readable(error))
"""

LEAVE = """
import os, sys
from megatron_t1.errors import readable
from tests.model.workers import save_with_a_failing_rank

try:
    save_with_a_failing_rank(sys.argv[1])
except Exception as error:  # as megatron_t1.training.main does
    print(f"error on rank {os.environ['RANK']}: {readable(error)}", file=sys.stderr, flush=True)
    os._exit(1)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
# The weights take 330 KB, the checkpoint 1.6 MB: full within the first bytes, the weights, and the optimizer's state.
@pytest.mark.parametrize("size_kib", [360, 500, 900, 1500])
def test_a_full_disk_is_one_readable_error_and_no_checkpoint(tmp_path, size_kib):
    mount = f'mount -t tmpfs -o size={size_kib}k none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, SAVE]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("absent the checkpoint can't be written"), done.stdout + done.stderr
    assert "MiB are free there" in done.stdout and f"where:  {tmp_path / 'checkpoint'}" in done.stdout


@pytest.mark.slow
def test_a_rank_that_fails_alone_in_a_save_does_not_wait_for_the_others(tmp_path):
    write_hf(tmp_path / "hf")
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-c"]
    command[-1:] = ["--no-python", sys.executable, "-c", LEAVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert (
        "error on rank 0: the checkpoint can't be written" in done.stderr and "No space left on device" in done.stderr
    )
    assert not (tmp_path / "checkpoint").exists()
