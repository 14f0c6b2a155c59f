"""The batch scripts of all sizes: alike but for their headers, and their experiments can be composed."""

import os
import shlex
import subprocess

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


SHOWN = (  # by Slurm for number 12, which all tasks of an array have in common with one of them
    "JobId=12 ArrayJobId=12 ArrayTaskId=1 JobName=a ExcNodeList=n7 Features=(null)\n"
    "JobId=11 ArrayJobId=12 ArrayTaskId=0 JobName=a ExcNodeList=(null) Features=(null)\n"
)


@pytest.mark.parametrize(
    ("shown", "word", "left_out"),
    [(SHOWN, "12_1", "n7,n3"), ("JobId=12 JobName=a ExcNodeList=(null) Features=(null)\n", "12", "n3")],
)
def test_a_job_goes_elsewhere_alone(tmp_path, shown, word, left_out):
    """Whatever array it was handed in from, whose variables it may have."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/bash\n"
        f"case $2 in\n  job) printf {shlex.quote(shown)} ;;\n  hostnames) tr , '\\n' <<<$3 ;;\n"
        f'  *) echo "$@" >>{tmp_path}/calls ;;\nesac\n'
    )
    scontrol.chmod(0o755)
    around = {"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n3", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "9"}
    script = f"set -euo pipefail\n{ELSEWHERE}\nelsewhere 'no interpreter'"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **around}
    ended = subprocess.run(["bash", "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 127 and f"job {word} can't begin on n3: no interpreter" in ended.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [
        f"update JobId={word} Requeue=1", f"requeue {word}", f"update JobId={word} ExcNodeList={left_out}"
    ]  # fmt: skip


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
