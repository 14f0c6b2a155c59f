"""What `t1 gap` refuses before a process is started."""

from __future__ import annotations

import pytest

from megatron_t1.cli import main
from megatron_t1.commands.gap import _workplace
from megatron_t1.paths import RunPaths
from tests.tiny_model import write_hf
from tests.training.synthetic import run_config, save_config, write_rollout


@pytest.fixture
def config(tmp_path):
    return run_config(tmp_path / "run", write_hf(tmp_path / "model"))


def refused(capsys, *words: str) -> str:
    assert main(["gap", *words]) in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no run"),
        (["RUN", "--sample", "-1"], "aren't negative"),
        (["RUN", "--sample", "1"], "fewer than 4 trajectories"),
        (["RUN", "--iteration", "-5"], "aren't negative"),
        (["RUN", "--iteration", "x"], "invalid int value"),
        (["RUN"], "every policy of this run that sampled something is deleted"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_a_wrong_command_line_is_named(config, capsys, arguments, said):
    words = [config.run.dir if word == "RUN" else word for word in arguments]
    assert said in refused(capsys, *words)


def test_a_fine_tuning_has_no_gap(config, capsys):
    RunPaths.of(config.run.dir).phase(0, "sft").mkdir(parents=True)
    assert "this directory holds a fine-tuning (`t1 train sft`), which samples nothing" in refused(
        capsys, config.run.dir
    )


def test_two_at_once_have_workplaces_of_their_own(tmp_path):
    with _workplace(tmp_path / "gap.json") as one, _workplace(tmp_path / "gap.json") as other:
        assert one != other and one.is_dir() and other.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_gone_is_named(config, tmp_path, capsys):
    config.model.path = str(tmp_path / "gone")
    save_config(config)
    assert "model.path" in refused(capsys, config.run.dir)


def test_a_rollout_whose_policy_is_deleted_is_named(config, tmp_path, capsys):
    for iteration in (0, 1):
        write_rollout(RunPaths.of(config.run.dir).rollouts(iteration), tmp_path / "model", count=2, iteration=iteration)
    said = refused(capsys, config.run.dir, "--iteration", "1")
    assert "policy 1, which sampled it, is deleted" in said and "--iteration can be: 0" in said
    assert "there is no rollout" in refused(capsys, config.run.dir, "--iteration", "7")
    assert "can't be written" in refused(capsys, config.run.dir, "--out", str(tmp_path))
