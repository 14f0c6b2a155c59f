"""slurm/ppo_122b.sh as sbatch takes it: resources, where it runs, what reaches t1, and what stops it first."""

import json
import shutil
import subprocess
import sys

import pytest
from jobs import SCRIPT, TINY, user_environment


def test_is_valid_bash_and_reads_nothing_beside_it():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text()
    assert "$0" not in text and "BASH_SOURCE" not in text and "source " not in text


@pytest.mark.slow
def test_command_line_wins_over_the_header(cluster):
    """The header asks for 8 nodes with 8 GPUs each; this cluster has 4 without."""

    def accepted(*options):
        command = ["sbatch", "--test-only", *options, str(SCRIPT), "model=tiny"]
        return subprocess.run(command, env=cluster.env, capture_output=True).returncode == 0

    assert accepted("-N2", "--gpus-per-node=0")
    assert accepted("-N1", "--gpus-per-node=0", "--time=1", "--partition=debug")
    assert not accepted()
    assert not accepted("-N2")
    assert not accepted("-N5", "--gpus-per-node=0")


@pytest.mark.slow
def test_overrides_reach_t1_unchanged(cluster, tmp_path):
    """From the spool directory, also when the script itself is gone by then."""
    heard = tmp_path / "heard.json"
    t1 = tmp_path / "t1"
    t1.write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump([sys.argv[1:], os.getcwd()], open({str(heard)!r}, 'w'))\n"
    )
    t1.chmod(0o755)
    script = tmp_path / "gone.sh"
    shutil.copy(SCRIPT, script)
    submitted_from = tmp_path / "with a space"
    submitted_from.mkdir()
    words = [
        "e=[1,2]",
        "cluster.rollout.env={A: b}",
        'x="two words"',
        "y=$HOME",
        "z=*",
        "q='single'",
        "w=a\\,b",
        "+n=1",
    ]
    job = cluster.submit(
        "-N2", "--gpus-per-node=0", "--begin=now+2", "-o", str(tmp_path / "log"), str(script), *words,
        cwd=submitted_from, env={"T1": str(t1)},
    )  # fmt: skip
    script.unlink()
    assert cluster.finish(job) == "COMPLETED", (tmp_path / "log").read_text()
    assert json.loads(heard.read_text()) == [
        ["run", "+experiment=ppo_122b", "cluster=slurm", *words],
        str(submitted_from),
    ]


@pytest.mark.slow
def test_without_t1_it_says_how_to_get_it(cluster, tmp_path):
    job = cluster.submit(
        "-N1", "--gpus-per-node=0", "-o", str(tmp_path / "log"), str(SCRIPT),
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )  # fmt: skip
    assert cluster.finish(job) == "FAILED"
    assert cluster.exit_code(job) == "2:0"
    text = (tmp_path / "log").read_text()
    assert "t1 is not on PATH" in text and "pip install megatron-t1" in text


def write_model(directory):
    """Something that says of itself to be the tiny model, without a tensor."""
    from megatron_t1.config.compose import compose
    from megatron_t1.model.initial import hf_config

    directory.mkdir(parents=True)
    settings = hf_config(compose(["model=tiny"]).model.architecture, "float32", 512, 1, 0)
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").touch()
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


@pytest.mark.slow
def test_allocation_is_compared_with_the_layout_first(cluster, tmp_path):
    for name in ("tasks/train/one", "tasks/held_out/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "task.toml").touch()
    write_model(tmp_path / "models" / "tiny_start")
    job = cluster.submit(
        "-N2", "--gpus-per-node=0", "--time=5", "-o", str(tmp_path / "log"), str(SCRIPT), "run.dir=run", *TINY,
        "layout.processes=4", "cluster.rollout.python=/nowhere/python",
        cwd=tmp_path, env=user_environment(),
    )  # fmt: skip
    assert cluster.finish(job) == "FAILED"
    assert cluster.exit_code(job) == "1:0"
    text = (tmp_path / "log").read_text()
    assert "on 2 nodes: n[1-2]" in text
    assert "training needs 4 nodes (1 processes each), the allocation has 2: submit with -N4" in text
    assert "cluster.rollout.python=/nowhere/python: no such interpreter" in text
    assert not (tmp_path / "run" / "phases").exists()
