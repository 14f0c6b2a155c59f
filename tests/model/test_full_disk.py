"""A checkpoint on a full disk: one readable error, nothing that looks complete. In a mount namespace of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
