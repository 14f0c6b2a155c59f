"""Critic warm-up on stored rollouts alone: what it reads, refuses, leaves, and what a run makes of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_t1.audit.rollouts import rollouts_of
from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from megatron_t1.paths import RunPaths
from megatron_t1.phase import RESULT_FILE
from megatron_t1.training.progress import forget_progress
from megatron_t1.trajectory.store import RolloutStore
from tests.training.synthetic import save_config, write_rollout
from tests.training.weights import checkpoint_parameters, tree_digest

EXPLAINED = "held_out_explained_variance"


@pytest.fixture
def stored(make_run):
    """A configuration in a directory of its own, for a warm-up on the two rollouts of a run; and that run."""
    run = make_run("played", warmup=2)
    config = make_run("warm", rollouts=0)
    config.train.critic = replace(
        config.train.critic, rollouts=[run.run.dir], warmup_holdout=4, lr=1e-2, warmup_epochs=6, warmup_patience=2
    )
    config.rollout.tasks_per_iteration, config.rollout.samples_per_task = 9, 1
    save_config(config)
    return config, run


@pytest.fixture
def warm_up(run):
    """Run the phase to its end, as `training.main` does: its checkpoints are gone then."""

    def end(config):
        result, paths = run("warmup", config), RunPaths.of(config.run.dir)
        result.write(paths.phase(0, "warmup"))
        forget_progress(paths)
        (paths.phase(0, "warmup") / RESULT_FILE).unlink()  # as a next start does
        return result

    return end


def directories(paths: list[str]) -> list[str]:
    return [str(target.directory.name) for target in rollouts_of(paths)]


def test_paths_name_rollouts(make_run, tmp_path):
    run = Path(make_run("run").run.dir)
    both = ["iter_0000", "iter_0001"]
    assert directories([str(run)]) == directories([str(run / "rollouts")]) == both
    assert directories([str(run / "rollouts/iter_0001"), str(run)]) == both[::-1]  # each once
    shutil.copytree(run / "rollouts" / "iter_0000", tmp_path / "imported")
    assert directories([str(tmp_path / "imported")]) == ["imported"]
    with pytest.raises(IncompleteError, match="no such file or directory"):
        rollouts_of([str(tmp_path / "nothing")])
    shard = next((tmp_path / "imported").glob("*.shard.safetensors"))
    with pytest.raises(T1Error, match="one file"):
        rollouts_of([str(shard)])
    (RunPaths.of(run).phase(1, "rollout") / "result.json").unlink()
    with pytest.raises(IncompleteError, match="isn't finished") as caught:
        rollouts_of([str(run)])
    assert caught.value.where.endswith("iter_0001")
    shutil.copytree(run / "rollouts", run / "evaluations")
    with pytest.raises(T1Error, match="only evaluations"):
        rollouts_of([str(run / "evaluations")])


@pytest.mark.slow
def test_a_warmup_on_stored_rollouts(stored, run, warm_up, model, backend):  # verl#1209 slime#2259
    from megatron_t1.model.checkpoint import read_marker

    config, played = stored
    before = tree_digest(model), tree_digest(Path(played.run.dir))
    result = warm_up(config)
    assert (tree_digest(model), tree_digest(Path(played.run.dir))) == before
    assert result.details["newly_initialised"] == ["output_layer.weight", "output_layer.bias"]
    metrics, history = result.metrics, result.details["warmup"]
    assert metrics["batch/trajectories"] == 18 and metrics["critic/held_out_trajectories"] == 4
    # As many trajectories in a step as in the loop (9 in 2 steps): 14 to train on make 3 steps, measured after 2 and 3.
    assert [line["step"] for line in history[:5]] == [0, 2, 3, 5, 6]
    assert history[1]["epoch"] == pytest.approx(2 / 3) and "value_loss" not in history[0]
    best = max(history, key=lambda line: line[EXPLAINED])
    assert metrics[f"critic/{EXPLAINED}"] == best[EXPLAINED]
    assert metrics["critic/warmup_best_epoch"] == best["epoch"]
    assert metrics["critic/optimizer_steps"] == best["step"] and metrics["critic/warmup_steps"] == history[-1]["step"]
    assert {file.path.partition("/")[0] for file in result.outputs} == {"critic"}
    critic = Path(config.run.dir) / "critic"
    kept = checkpoint_parameters(critic, backend, "critic")

    # A run takes it: the critic's first values are those of the one that was kept; its optimizer begins anew.
    config.train.critic = replace(config.train.critic, rollouts=[], start=str(critic), warmup_holdout=0, lr=1e-30)
    shutil.copytree(Path(played.run.dir) / "rollouts", Path(config.run.dir) / "rollouts")
    shutil.copytree(Path(played.run.dir) / "phases", Path(config.run.dir) / "phases", dirs_exist_ok=True)
    first = run("critic", config)
    assert first.details["newly_initialised"] == [] and first.metrics["critic/optimizer_steps"] == 2
    assert torch.equal(
        checkpoint_parameters(RunPaths.of(config.run.dir).checkpoint("critic", 1), backend, "critic"), kept
    )

    # Going on from a critic instead of a policy: steps that only make it worse leave it as it was.
    config.train.critic = replace(config.train.critic, rollouts=[played.run.dir], warmup_holdout=4, lr=10.0)
    again = warm_up(config)
    assert again.metrics[f"critic/{EXPLAINED}_before"] == pytest.approx(metrics[f"critic/{EXPLAINED}"], rel=1e-6)
    assert again.metrics["critic/warmup_best_epoch"] == 0 and again.metrics["critic/optimizer_steps"] == 0
    assert again.metrics["critic/warmup_steps"] > 0 and again.outputs
    assert torch.equal(checkpoint_parameters(critic, backend, "critic"), kept)
    assert read_marker(critic)["optimizer"]["steps"] == 0  # nor do their moments move it later


@pytest.mark.slow
def test_targets_that_depend_on_the_critic_are_renewed(stored, warm_up, monkeypatch):
    from megatron_t1.training import stored as module

    config, _ = stored
    config.train.critic = replace(config.train.critic, warmup_epochs=3, warmup_min_epochs=3, warmup_patience=3)
    made = []
    monkeypatch.setattr(module, "fill_targets", lambda *a, fill=module.fill_targets: made.append(fill(*a)))
    warm_up(config)
    assert len(made) == 1  # at lambda 1 they are the discounted reward
    config.train.gae = replace(config.train.gae, lambda_critic=0.9)
    warm_up(config)
    assert len(made) == 4


@pytest.mark.slow
def test_what_a_warmup_refuses(stored, warm_up, tmp_path, model):
    config, played = stored
    imported = tmp_path / "imported"
    shutil.copytree(RunPaths.of(played.run.dir).rollouts(0), imported)
    config.train.critic = replace(config.train.critic, rollouts=[played.run.dir, str(imported)], warmup_epochs=1)
    assert warm_up(config).details["excluded"] == {"also in another rollout": 9}

    store = RolloutStore(tmp_path / "bare")
    store.add_many(replace(record, routes=None, routed=record.routed & False) for record in RolloutStore(imported))
    config.train.critic = replace(config.train.critic, rollouts=[str(tmp_path / "bare")])
    assert warm_up(config).metrics["batch/trajectories"] == 9  # routes are wanted only where the critic replays
    config.train.replay.critic = True
    with pytest.raises(T1Error, match="no routes"):
        warm_up(config)
    config.train.replay.critic = False

    shard = next(imported.glob("*.shard.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    config.train.critic = replace(config.train.critic, rollouts=[str(imported)])
    with pytest.raises(IncompleteError, match="digest|SHA-256"):
        warm_up(config)
    shutil.copy(shard, next(RunPaths.of(played.run.dir).rollouts(0).glob("*.shard.safetensors")))
    config.train.critic = replace(config.train.critic, rollouts=[played.run.dir])
    with pytest.raises((IncompleteError, MismatchError), match="changed since|SHA-256|digest|bytes"):
        warm_up(config)
    with pytest.raises(T1Error, match="leaves none of 9 to train on"):
        config.train.critic = replace(config.train.critic, rollouts=[str(tmp_path / "bare")], warmup_holdout=0)
        warm_up(config)


def test_rollouts_of_another_reward_are_refused(stored):
    from megatron_t1.commands.outside import _rollout_problems

    config, played = stored
    save_config(played)
    assert _rollout_problems(config) == []
    config.reward.scale = 0.5
    (problem,) = _rollout_problems(config)  # one line for the run, not one for each of its rollouts
    assert played.run.dir in problem and "reward.scale=0.25, here it is 0.5" in problem


@pytest.mark.slow
def test_the_command_over_two_processes(make_run, model, tmp_path, capfd, monkeypatch):
    """`t1 train critic` as a user gives it again: with the options that the directory was started with."""
    from megatron_t1.cli import main
    from megatron_t1.phase import PhaseResult

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    played = make_run("played", rollouts=0)
    write_rollout(RunPaths.of(played.run.dir).rollouts(0), model, count=80)
    config = make_run("warm", rollouts=0, processes=2, expert=2)
    config.cluster.rollout.processes_per_node = 1
    config.train.critic = replace(config.train.critic, rollouts=[str(Path(played.run.dir) / "rollouts")])
    save_config(config)
    assert main(["train", "critic", f"run.dir={config.run.dir}"]) == 0
    said = capfd.readouterr().out
    assert "80 trajectories of 1 rollouts, 64 held out" in said and "files are untouched" in said
    result = PhaseResult.read(RunPaths.of(config.run.dir).phase(0, "warmup"))
    assert result.timings_s["engine/passes"] + result.timings_s["start"] < result.timings_s["total"]
    assert {file.path.partition("/")[0] for file in result.outputs} == {"critic"}
    assert (Path(config.run.dir) / "plots" / "warmup.png").is_file()
