import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from jobs import ROOT, SIZES, environment, user_environment
from queue_of_links import config, setting, slurm  # noqa: F401
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


@pytest.fixture
def t1(cluster, inputs, tmp_path):
    """Runs `t1` on the virtual cluster; in jobs the tests' phases stand in for the real ones."""
    extra = environment()["PYTHONPATH"]

    def run(*words: str, status: int = 0, **more: str) -> str:
        if words[:2] == ("slurm", "submit"):
            words = (
                "slurm", "submit", *SIZES, f"model.path={inputs / 'model'}", f"env.tasks={inputs / 'tasks/train'}",
                f"eval.tasks={inputs / 'tasks/held_out'}", "run.dir=run", "cluster.backend=cpu",
                "cluster.slurm.time=10", *words[2:],
            )  # fmt: skip
        path = os.pathsep.join([str(ROOT / "tests/slurm/driven"), extra])
        done = subprocess.run(
            [sys.executable, "-m", "megatron_t1.cli", *words], cwd=tmp_path, capture_output=True, text=True,
            env={**cluster.env, **user_environment(), "PYTHONPATH": path, **more},
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
