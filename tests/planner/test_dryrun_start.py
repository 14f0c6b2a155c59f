"""What `t1 dryrun` says where it can't begin: no torch, no such interpreter, a megatron-core that is too old."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from megatron_t1.cli import main
from megatron_t1.config.compose import compose
from megatron_t1.errors import T1Error
from megatron_t1.planner.dryrun import DryRun, dry_run


def test_what_an_interpreter_lacks_is_said_in_one_sentence(tmp_path, monkeypatch):
    """The loop's own environment has no torch, and `t1 dryrun` is asked there first."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = compose(["model=tiny", "model.architecture.vocab_size=640", "model.path=''", "layout=single"])
    with pytest.raises(T1Error, match="torch isn't installed in this environment") as caught:
        dry_run([DryRun("single", config)])
    assert caught.value.where == sys.executable and "megatron-t1[train]" in caught.value.remedy
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("cluster.train.container=/images/train.sqsh", "can't cut packed sequences of gated delta nets"),
        ("cluster.train.python=/nowhere/python", "cluster.train.python=/nowhere/python: no such interpreter"),
    ],
)
def test_what_the_interpreter_of_a_dry_run_can_not_do_is_said_before_it_starts(option, said, monkeypatch, capsys):
    """A container is for training phases: the dry run takes the interpreter at hand, whatever its megatron-core."""
    monkeypatch.setattr(metadata, "version", lambda _: "0.16.1")
    assert main(["dryrun", "experiment=ppo_122b", option]) == 2
    assert said in capsys.readouterr().err
