"""`sbatch --test-only` of every layout of the 122B, on a controller of a cluster of its size."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from virtual_cluster import VirtualCluster, unavailable

from megatron_t1.config.compose import compose, group_names
from megatron_t1.config.validate import train_nodes, validate
from megatron_t1.loop.submission import heterogeneous_job, one_job, write_script
from megatron_t1.resources import resource_dir

pytestmark = pytest.mark.slow
LAYOUTS = [
    name for name in group_names([resource_dir("conf")])["layout"] if name.startswith("gpus") and "30b" not in name
]
LARGEST, GPUS = 32, 8  # nodes, and GPUs of each


class PoweredDownCluster(VirtualCluster):
    """A controller alone. Its nodes are powered down, to be started when a job needs them: it plans as if they ran."""

    def start_node(self, name: str) -> None:
        pass

    def wait_until_idle(self, seconds: float = 60) -> None:
        def up() -> bool:
            return subprocess.run(["scontrol", "ping"], env=self.env, capture_output=True).returncode == 0

        self.wait(up, seconds, "the controller")

    def _configure(self) -> None:
        super()._configure()
        path = self.base / "slurm.conf"
        text = path.read_text().replace("State=UNKNOWN", "State=CLOUD")
        power = "SuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=3600\n"
        path.write_text(power + text)


@pytest.fixture(scope="module")
def controller():
    if reason := unavailable():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="t1-fit-") as directory:
        virtual = PoweredDownCluster(Path(directory), nodes=LARGEST, cpus=64, gpus=GPUS)
        try:
            virtual.start()
            yield virtual
        finally:
            virtual.stop()


def would_start(cluster: VirtualCluster, options: list[str], script: Path) -> subprocess.CompletedProcess:
    command = ["sbatch", "--test-only", *options, str(script)]
    return subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slurm_would_start_the_layout(layout, controller, tmp_path):
    config = compose(["experiment=ppo_122b", f"layout={layout}", f"run.dir={tmp_path}"])
    assert validate(config) == []
    nodes = train_nodes(config)
    assert nodes * GPUS == config.layout.processes
    accepted = would_start(controller, one_job(config, layout), write_script(tmp_path))
    assert accepted.returncode == 0, accepted.stderr
    assert f"on nodes n[1-{nodes}] " in accepted.stderr


def test_slurm_refuses_what_the_cluster_does_not_have(controller, tmp_path):
    config = compose(["experiment=ppo_122b", "layout=gpus256", "layout.processes=512", f"run.dir={tmp_path}"])
    refused = would_start(controller, one_job(config, "too_large"), write_script(tmp_path))
    assert refused.returncode != 0 and "node" in refused.stderr.lower()


def test_slurm_would_start_rollout_and_training_side_by_side(controller, tmp_path):
    overrides = ["experiment=ppo_122b", "layout=gpus96", "cluster.rollout.nodes=12", f"run.dir={tmp_path}"]
    config = compose(overrides)
    accepted = would_start(controller, heterogeneous_job(config, "side_by_side"), write_script(tmp_path))
    assert accepted.returncode == 0, accepted.stderr
