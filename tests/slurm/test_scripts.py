"""The batch scripts of all sizes: alike but for their headers, and their experiments can be composed."""

import pytest
from jobs import ROOT

from megatron_t1.config.compose import compose
from megatron_t1.config.schema import Config
from megatron_t1.config.validate import train_nodes, validate
from megatron_t1.loop.submission import ELSEWHERE, SCRIPT

SCRIPTS = sorted((ROOT / "slurm").glob("*.sh"))
MARK = "# From here on all scripts of this directory are the same."


def test_what_they_do_on_a_node_that_lacks_something_is_what_submitted_jobs_do():
    assert all(ELSEWHERE in path.read_text() and ELSEWHERE in SCRIPT for path in SCRIPTS)


def test_sizes_differ_in_their_headers_only():
    bodies = {path.read_text().partition(MARK)[2] for path in SCRIPTS}
    assert len(SCRIPTS) >= 3 and len(bodies) == 1 and bodies != {""}


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_header_fits_the_experiment(path):
    header = path.read_text().partition(MARK)[0]
    asked = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in header.splitlines()
        if line.startswith("#SBATCH --") and "=" in line
    )
    (experiment,) = [line.partition("=")[2] for line in header.splitlines() if line.startswith("EXPERIMENT=")]
    assert experiment == path.stem
    config: Config = compose([f"+experiment={experiment}", "cluster=slurm"])
    assert validate(config) == []
    assert train_nodes(config) <= int(asked["nodes"])
    assert config.cluster.train.processes_per_node <= int(asked.get("gpus-per-node", 1))
    parts = config.cluster.rollout.processes_per_node * config.rollout.engine.tensor_parallel
    assert parts == int(asked.get("gpus-per-node", parts))
    assert int(asked["signal"].partition("@")[2]) > config.cluster.stop_grace_s
