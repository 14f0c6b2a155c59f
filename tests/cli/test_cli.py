import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_t1.cli import main
from megatron_t1.command_table import COMMANDS
from megatron_t1.commands.sweep import jobs
from megatron_t1.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("T1_DEBUG", raising=False)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "usage: t1"),
        (["--help"], 0, "t1 tasks generate"),
        (["--version"], 0, "megatron-t1"),
        (["rum"], 2, "near: run"),
        (["train"], 2, "t1 train sft, t1 train critic, t1 train actor"),
        (["train", "acto"], 2, "t1 train actor"),
        (["run", "--fast"], 2, "unknown option --fast"),
        (["run", "modle=tiny"], 2, "near: model"),
        (["run", "--cfg"], 2, "--cfg job"),
        (["run", "train.actor.lr=1,2"], 2, "add -m"),
        (["run", "-m"], 2, "several values"),
        (["run"], 2, "env.tasks"),
        (["train", "sft"], 2, "train.sft.demonstrations"),
        (["show"], 2, "required: run"),
        (["show", "absent"], 1, "no such run directory"),
        (["show", "."], 1, "manifest.json"),
        (["compare", ".", "."], 1, "no finished evaluation"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_status_and_message(capsys, words, status, said):
    assert main(words) == status
    output = capsys.readouterr()
    assert said in output.out + output.err
    assert "Traceback" not in output.err


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("T1_DEBUG", "1")
    assert main(["show", "absent"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.words))
def test_every_command_has_a_help_and_an_implementation(capsys, command):
    import importlib

    assert main([*command.words, "--help"]) == 0
    assert f"t1 {' '.join(command.words)}:" in capsys.readouterr().out
    module, _, function = command.target.partition(":")
    assert callable(getattr(importlib.import_module(f"megatron_t1.commands.{module}"), function))


def test_cfg_job_prints_what_is_in_force(capsys):
    assert main(["run", "experiment=quickstart", "train.actor.lr=1e-5", "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["train"]["actor"]["lr"] == 1e-5
    assert printed["loop"]["iterations"] == 3
    assert not Path("runs").exists()


def test_the_configuration_of_an_existing_run_is_its_own(capsys, tmp_path):
    run = f"run.dir={tmp_path / 'run'}"
    main(["run", "experiment=learn", run, "train.actor.lr=1e-5", "loop.iterations=20", "--cfg", "job"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(capsys.readouterr().out)
    main(["train", "actor", run, "iteration=3", "--cfg", "job"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["train"]["actor"]["lr"], printed["loop"]["iterations"], printed["iteration"]) == (1e-5, 20, 3)


def test_sweep_makes_one_job_for_each_combination():
    made = jobs(["train.actor.lr=1e-4,3e-4", "run.seed=range(0,2)", "model=tiny"])
    assert [name for name, _ in made] == [
        "train.actor.lr=0.0001,run.seed=0", "train.actor.lr=0.0001,run.seed=1",
        "train.actor.lr=0.0003,run.seed=0", "train.actor.lr=0.0003,run.seed=1",
    ]  # fmt: skip
    assert made[3][1] == ["model=tiny", "train.actor.lr=0.0003", "run.seed=1"]
    with pytest.raises(ConfigError):
        jobs(["model=tiny"])


def test_sweep_checks_every_job_before_the_first(capsys):
    assert main(["run", "-m", "train.gae.gamma=1.0,2.0"]) == 2
    output = capsys.readouterr()
    assert "train.gae.gamma=2.0" in output.err and "== run" not in output.out


def test_sweep_looks_for_the_inputs_of_every_job_before_the_first(capsys, tmp_path):
    assert main(["run", "-m", "run.seed=0,1", f"env.tasks={tmp_path / 'none'}"]) == 2
    output = capsys.readouterr()
    assert f"env.tasks={tmp_path / 'none'}: no such directory" in output.err and "== run" not in output.out


@pytest.mark.parametrize("words", [["eval"], ["train", "sft"], ["rollout"], ["export"]])
def test_only_whole_runs_are_swept(capsys, words):
    assert main([*words, "-m", "run.seed=0,1"]) == 2
    assert f"`t1 run -m`, not `t1 {' '.join(words)}`" in capsys.readouterr().err


@pytest.mark.slow
def test_sweep_gives_each_job_its_directory_and_reports_failures(capfd, tmp_path):
    model, tasks, others = tmp_path / "model", tmp_path / "tasks", tmp_path / "held_out"
    for directory in (tasks, others):
        (directory / "broken").mkdir(parents=True)
        (directory / "broken" / "task.toml").write_text("not toml")
    assert main(["model", "init", f"model.path={model}", "generate.pool=small"]) == 0
    paths = [f"model.path={model}", f"env.tasks={tasks}", f"eval.tasks={others}"]
    assert main(["run", "-m", "run.seed=0,1", *paths]) == 1
    output = capfd.readouterr()
    assert "runs/default/00_run.seed=0" in output.out and "runs/default/01_run.seed=1" in output.out
    assert "2 of 2 runs failed" in output.err


def test_configuration_needs_no_heavy_import():
    code = (
        "import sys; from megatron_t1.cli import main; main(['run', '--cfg', 'job']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'matplotlib', 'tensorboard', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0
