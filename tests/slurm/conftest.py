import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from virtual_cluster import VirtualCluster, unavailable

PARTITIONS = {"sampling": "n[1-2]", "training": "n[3-4]"}


@pytest.fixture(scope="session")
def cluster():
    """Four virtual nodes with 8 CPUs and no GPU each, in one partition; two of its own for each kind of phase."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="t1-slurm-") as directory:  # short: socket paths have a length limit
        virtual = VirtualCluster(Path(directory), nodes=4, gpus=0, partitions=PARTITIONS)
        try:
            virtual.start()
            yield virtual
        finally:
            virtual.stop()


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """tasks/ and model/, by the commands a user makes them with."""
    pytest.importorskip("vllm")
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("inputs")
    t1 = Path(sys.executable).parent / "t1"
    for command in (
        ("tasks", "generate", "generate.train=12", "generate.held_out=6", "generate.workers=4"),
        ("model", "init", "model=tiny"),
    ):
        options = ("generate.pool=small", f"generate.out={folder / 'tasks'}", f"model.path={folder / 'model'}")
        done = subprocess.run([t1, *command, *options], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder
