"""The phases in a lone process: what they write, count and refuse."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_t1.errors import ConfigError, IncompleteError, MismatchError, T1Error
from megatron_t1.paths import RunPaths
from megatron_t1.trajectory.record import EndReason
from megatron_t1.trajectory.sidecar import read_sidecar, write_sidecar
from megatron_t1.trajectory.store import RolloutStore
from tests.tiny_model import ARCHITECTURE, write_hf
from tests.training.synthetic import episode, save_config
from tests.training.weights import parameters, tree_digest

pytestmark = pytest.mark.slow


def copy_of(config, name: str):
    """The same run in another directory, with all its files."""
    other = replace(config, run=replace(config.run, dir=str(Path(config.run.dir).with_name(name))))
    shutil.copytree(config.run.dir, other.run.dir)
    save_config(other)
    return other


def finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def test_warmup_leaves_the_actor_alone(make_run, run, model):  # verl#1209
    config = make_run(warmup=2)
    before = tree_digest(model)
    for iteration in (0, 1):
        result = run("critic", config, iteration)
        assert all(file.path.startswith(("checkpoints/critic/", "values/")) for file in result.outputs)
    assert tree_digest(model) == before
    root = RunPaths.of(config.run.dir).root
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["critic"]
    assert not (root / "hf").exists()


def test_each_role_counts_its_own_steps(make_run, run):  # NeMo-RL#4213
    config = make_run(warmup=1)
    config.train.actor = replace(config.train.actor, lr=1e-3, decay="linear", decay_steps=10, minibatches=2)
    config.train.critic = replace(config.train.critic, lr=1e-3, decay="linear", decay_steps=10, minibatches=2)
    warm = run("critic", config, 0)  # 2 warm-up epochs
    assert warm.metrics["critic/optimizer_steps"] == 4
    assert warm.metrics["critic/learning_rate"] == pytest.approx(1e-3 * np.mean([1.0, 0.9, 0.8, 0.7]))
    critic, actor = run("critic", config, 1), run("actor", config, 1)
    assert critic.metrics["critic/optimizer_steps"] == 6
    assert critic.metrics["critic/learning_rate"] == pytest.approx(1e-3 * np.mean([0.6, 0.5]))
    assert actor.metrics["actor/optimizer_steps"] == 2
    assert actor.metrics["actor/learning_rate"] == pytest.approx(1e-3 * np.mean([1.0, 0.9]))


def test_going_on_from_checkpoints_is_running_on(make_run, run, backend, monkeypatch):  # slime#1558
    """Iteration 1 with models loaded from iteration 0's checkpoints, and with those that were never unloaded."""
    from megatron_t1.training import actor, critic
    from megatron_t1.training.context import Context

    config = make_run()
    config.train.critic = replace(config.train.critic, warmup_steps=5)
    config.train.actor = replace(config.train.actor, warmup_steps=5, decay="cosine", decay_steps=20)
    kept = {}
    new_critic, load_critic, load_actor = critic.new_critic, critic._load, actor.load_actor
    monkeypatch.setattr(critic, "new_critic", lambda *a: kept.setdefault("critic", new_critic(*a)))
    monkeypatch.setattr(actor, "load_actor", lambda *a, **k: kept.setdefault("actor", load_actor(*a, **k)))
    for role in ("critic", "actor"):
        run(role, config, 0)
    resumed = copy_of(config, "resumed")
    monkeypatch.setattr(critic, "_load", lambda *a: [])
    running_on = {role: run(role, config, 1) for role in ("critic", "actor")}
    monkeypatch.setattr(critic, "new_critic", new_critic)
    monkeypatch.setattr(critic, "_load", load_critic)
    monkeypatch.setattr(actor, "load_actor", load_actor)
    for role in ("critic", "actor"):
        again = run(role, resumed, 1)
        assert again.metrics == pytest.approx(running_on[role].metrics, rel=1e-12), role
        assert again.metrics[f"{role}/optimizer_steps"] == 4
        one, other = (parameters(which, backend, role, 2) for which in (resumed, config))
        assert torch.equal(one, other)
    assert Context(resumed, backend, 1).counters.policy == 1


def test_a_repeated_phase_gives_the_same_bits(make_run, run, backend):
    config = make_run()
    run("critic", config)
    values = tree_digest(RunPaths.of(config.run.dir).values(0))
    first = run("actor", config)
    weights = parameters(config, backend, "actor", 1)
    repeated = run("critic", config)
    assert tree_digest(RunPaths.of(config.run.dir).values(0)) == values
    assert repeated.metrics["critic/optimizer_steps"] == 2
    assert run("actor", config).metrics == first.metrics
    assert torch.equal(parameters(config, backend, "actor", 1), weights)


def test_what_is_never_read_changes_nothing(make_run, run, backend):
    """Poison in the routes of last tokens, in excluded episodes, and in what an earlier attempt left behind."""
    config = make_run()
    clean = {role: run(role, config).metrics for role in ("critic", "actor")}
    weights = parameters(config, backend, "actor", 1)
    poisoned = copy_of(config, "poisoned")
    paths = RunPaths.of(poisoned.run.dir)
    records = list(RolloutStore(RunPaths.of(config.run.dir).rollouts(0)))
    shutil.rmtree(paths.rollouts(0))
    changed = []
    for record in records:
        routes = record.routes.copy()
        routes[-1] = 0
        changed.append(replace(record, routes=routes))
    lost = episode("zzz-0", agreed=records[0].header.contract, end_reason=EndReason.SANDBOX_LOST, reward={"total": 1e9})
    RolloutStore(paths.rollouts(0)).add_many([*changed, lost])
    write_sidecar(paths.values(0), 3, {"f" * 64: {"advantages": np.full(2, np.nan, np.float32)}}, ranks=7)
    shutil.copytree(paths.checkpoint("actor", 1), paths.checkpoint("actor", 1).with_name("iter_0001.partial"))
    for role in ("critic", "actor"):
        metrics = run(role, poisoned).metrics
        assert metrics.pop("batch/excluded") == 1
        assert metrics == {name: value for name, value in clean[role].items() if name != "batch/excluded"}
    assert torch.equal(parameters(poisoned, backend, "actor", 1), weights)


@pytest.mark.parametrize("correction", ["truncated", "band", "sequence"])
def test_recomputed_old_logprobs_with_correction(make_run, run, correction):
    config = make_run()
    config.train.actor = replace(
        config.train.actor, old_logprobs="recomputed", correction=correction, correction_low=0.5, correction_cap=1.5
    )
    run("critic", config)
    metrics = run("actor", config).metrics
    assert 0 < metrics["actor/effective_sample_share"] < 1
    tokens = metrics["batch/loss_tokens"] * metrics["actor/effective_sample_share"]
    assert metrics["actor/effective_sample_tokens"] == pytest.approx(tokens)
    if correction != "sequence":  # whose means lie within the cap here
        assert 0 < metrics["actor/correction_touched"] < 1
    assert (metrics["actor/correction_rejected"] > 0) == (correction == "band")
    # The old policy is the trainer's own: the first of two steps starts at a ratio of 1 whatever the sampler said.
    assert abs(metrics["actor/ratio"] - 1) < 0.05
    assert metrics["gap/logprob_gap_replay"] > 0.3

    config.train.actor = replace(config.train.actor, old_logprobs="sampler", correction="none")
    sampler = run("actor", config).metrics
    assert abs(sampler["actor/ratio"] - 1) > 0.05 and "actor/effective_sample_share" not in sampler


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_a_reference_policy(make_run, run, backend, model, estimator):
    """The start model as its own reference: no divergence at the first step, some after it has moved."""
    config = make_run()
    config.train.actor = replace(config.train.actor, minibatches=1, kl_estimator=estimator)
    run("critic", config)
    free = run("actor", config)
    assert "actor/reference_kl" not in free.metrics
    moved = parameters(config, backend, "actor", 1)

    config.train.actor = replace(config.train.actor, kl_coef=1e-9)
    first = run("actor", config).metrics
    assert first["actor/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    config.train.replay.reference = False  # its own experts: another network, although of equal weights
    assert abs(run("actor", config).metrics["actor/reference_kl"]) > 1e-4
    config.train.replay.reference = True

    config.train.actor = replace(config.train.actor, epochs=4)
    assert run("actor", config).metrics["actor/reference_kl"] != pytest.approx(0.0, abs=1e-6)
    config.train.actor = replace(config.train.actor, epochs=1, kl_coef=0.0)
    assert torch.equal(moved, (run("actor", config), parameters(config, backend, "actor", 1))[1])


def test_a_reference_of_its_own_and_one_of_another_tokenizer(make_run, run, tmp_path):
    config = make_run()
    run("critic", config)
    other = write_hf(tmp_path / "reference", seed=2)
    config.train.actor = replace(config.train.actor, kl_coef=0.1, reference=str(other))
    assert run("actor", config).metrics["actor/reference_kl"] > 0.01
    (other / "tokenizer.json").write_text('{"another": 1}')
    with pytest.raises(MismatchError, match="another tokenizer"):
        run("actor", config)


def test_one_denominator_for_the_whole_rollout(make_run, run):
    """It changes nothing where there is one step, and the gradients' norms where there are several."""
    config = make_run()
    config.train.loss_denominator = "rollout"
    config.train.critic = replace(config.train.critic, lr=1e-30, epochs=1, clip_grad=0.0, minibatches=1)
    whole = run("critic", config).metrics
    config.train.loss_denominator = "step"
    assert run("critic", config).metrics == pytest.approx(whole)  # one step: nothing to tell apart
    config.train.critic = replace(config.train.critic, minibatches=3)
    step = run("critic", config).metrics["critic/grad_norm"]
    config.train.loss_denominator = "rollout"
    assert run("critic", config).metrics["critic/grad_norm"] != pytest.approx(step, rel=1e-4)


def test_turn_level_advantages_differ_between_turns_only(make_run, run):
    config = make_run()
    config.train.gae = replace(config.train.gae, turn_level=True, gamma=0.9, lambda_actor=0.8)
    run("critic", config)
    stored = read_sidecar(RunPaths.of(config.run.dir).values(0))
    for record in RolloutStore(RunPaths.of(config.run.dir).rollouts(0)):
        fields, turns = stored[record.digest], record.turn[record.loss_mask]
        totals = fields["advantages"] + fields["old_values"]
        inside = turns[1:] == turns[:-1]
        np.testing.assert_allclose(totals[1:][inside], totals[:-1][inside], atol=1e-5)
        assert totals[-1] == pytest.approx(record.header.reward["total"], abs=1e-5)


def test_a_critic_starts_from_a_policy_and_says_what_is_new(make_run, run, model):  # NeMo-RL#2825 NeMo-RL#2530
    config = make_run(warmup=1)
    first = run("critic", config, 0)
    assert first.details["newly_initialised"] == ["output_layer.weight", "output_layer.bias"]
    assert first.metrics["critic/mean_value"] == pytest.approx(first.metrics["batch/mean_reward"], rel=1e-5)
    assert first.metrics["critic/optimizer_steps"] == 4  # its own, from zero (NeMo-RL#3821)
    second = run("critic", config, 1)
    assert second.details["newly_initialised"] == [] and second.metrics["critic/optimizer_steps"] == 6


def test_only_loss_tokens_meet_the_vocabulary(make_run, run, monkeypatch):
    from megatron_t1.training import passes

    config = make_run()
    config.train.replay.measure_gap = False
    config.train.head_dtype = "float32"
    run("critic", config)
    projected = []
    project = passes.token_logprobs

    def watched(rows, *arguments, **options):
        assert options["wide"]
        projected.append(len(rows))
        return project(rows, *arguments, **options)

    monkeypatch.setattr(passes, "token_logprobs", watched)
    metrics = run("actor", config).metrics
    assert sum(projected) == metrics["batch/loss_tokens"] < metrics["batch/tokens"]


def test_a_warmup_ends_when_held_out_tasks_say_so(make_run, run, backend):
    config = make_run(warmup=1)
    config.train.critic = replace(
        config.train.critic, lr=3e-3, warmup_holdout=3, warmup_epochs=12, warmup_min_epochs=2, warmup_patience=1
    )
    result = run("critic", config)
    history, metrics = [line["held_out_explained_variance"] for line in result.details["warmup"]], result.metrics
    assert metrics["critic/held_out_trajectories"] == 3
    assert math.isnan(metrics["critic/held_out_explained_variance_task_mean"])  # one attempt at each task
    epochs, best = int(metrics["critic/warmup_epochs"]), int(metrics["critic/warmup_best_epoch"])
    assert len(history) == epochs + 1 and 2 <= epochs < 12 and history[best] == max(history)
    assert metrics["critic/held_out_explained_variance"] == history[best]
    assert metrics["critic/optimizer_steps"] == 2 * best and metrics["critic/warmup_steps"] == 2 * epochs

    kept = parameters(config, backend, "critic", 1)  # of the best epoch: training only that long gives the same
    shutil.rmtree(RunPaths.of(config.run.dir).progress(0, "critic"))  # which would refuse another number of epochs
    config.train.critic = replace(config.train.critic, warmup_epochs=best, warmup_min_epochs=best)
    run("critic", config)
    assert torch.equal(parameters(config, backend, "critic", 1), kept)


@pytest.mark.parametrize(("lambda_critic", "times"), [(1.0, 0), (0.9, 2)])
def test_targets_follow_the_critic_of_a_warmup(make_run, run, monkeypatch, lambda_critic, times):
    """As in a warm-up on stored rollouts; PPO's own epochs keep the targets of their rollout."""
    from megatron_t1.training import critic

    made = []
    monkeypatch.setattr(critic, "fill_targets", lambda *a, fill=critic.fill_targets: made.append(fill(*a)))
    config = make_run(warmup=1)
    config.train.gae = replace(config.train.gae, lambda_critic=lambda_critic)
    config.train.critic = replace(config.train.critic, warmup_epochs=3, epochs=2)
    run("critic", config)
    assert len(made) == times
    run("critic", config, 1)
    assert len(made) == times


def test_a_rollout_of_other_weights_stops_the_actor_before_its_update(make_run, run):
    config = make_run()
    run("critic", config)
    config.train.replay.max_gap = -1.0
    with pytest.raises(T1Error, match="trainer and sampler disagree about the sampled tokens"):
        run("actor", config)
    assert not RunPaths.of(config.run.dir).checkpoint("actor", 1).exists()


def test_no_gap_is_computed_that_nobody_asked_for(make_run, run):
    config = make_run()
    config.train.replay.measure_gap = False
    run("critic", config)
    assert not [name for name in run("actor", config).metrics if name.startswith("gap/")]


def test_values_that_miss_a_record_stop_the_actor(make_run, run):  # miles#1735
    config = make_run()
    run("critic", config)
    paths = RunPaths.of(config.run.dir)
    with pytest.raises(IncompleteError, match="no sidecar file"):
        run("actor", config, 1)
    values = read_sidecar(paths.values(0))
    kept = {key: {name: array.copy() for name, array in values[key].items()} for key in list(values)[1:]}
    missing = next(
        record.header.trajectory_id for record in RolloutStore(paths.rollouts(0)) if record.digest not in kept
    )
    shutil.rmtree(paths.values(0))
    write_sidecar(paths.values(0), 0, kept)
    with pytest.raises(IncompleteError, match="no entry") as caught:
        run("actor", config)
    assert missing in caught.value.where
    assert not paths.checkpoint("actor", 1).exists()


def test_a_gradient_that_is_not_finite_stops_the_phase(make_run, run):  # verl#498
    config = make_run()
    run("critic", config)
    paths = RunPaths.of(config.run.dir)
    values = read_sidecar(paths.values(0))
    broken = {key: {name: np.full_like(array, np.inf) for name, array in values[key].items()} for key in values}
    shutil.rmtree(paths.values(0))
    write_sidecar(paths.values(0), 0, broken)
    with pytest.raises(T1Error, match=r"isn.t finite in optimizer step 0 of the policy model: the loss of task\d-0"):
        run("actor", config)
    assert not paths.checkpoint("actor", 1).exists()


def test_a_trajectory_longer_than_a_micro_batch_is_named(make_run, run):  # ROLL#298
    config = make_run()
    config.train.capacity = 20
    with pytest.raises(T1Error, match=r"task\d-0 with \d+ tokens .* exceeds the capacity of 20"):
        run("critic", config)


def test_another_model_or_its_checkpoint_is_refused(make_run, run, tmp_path):
    config = make_run()
    run("critic", config)
    run("actor", config)
    other = write_hf(tmp_path / "other", replace(ARCHITECTURE, num_hidden_layers=2))
    (other / "tokenizer.json").write_text('{"another": 1}')
    config.model.path, config.model.architecture = str(other), replace(ARCHITECTURE, num_hidden_layers=2)
    with pytest.raises(MismatchError, match="tokenizer_sha256.*num_moe_layers: the rollout has 4, training has 2"):
        run("critic", config, 1)
    with pytest.raises(MismatchError, match="num_hidden_layers: the checkpoint has 4, the model 2"):
        run("export", config, 0)


def test_sft_lowers_the_loss_and_leaves_a_model(make_run, run):
    config = make_run(rollouts=0)
    directory = Path(config.run.dir) / "demonstrations"
    RolloutStore(directory).add_many(episode(f"d{number}-0", demonstration=True, turns=2) for number in range(30))
    config.train.sft = replace(
        config.train.sft, demonstrations=str(directory), tokens=3000, tokens_per_step=300, holdout=5, warmup_steps=0
    )
    result = run("sft", config)
    assert result.metrics["sft/loss"] < 0.95 * math.log(ARCHITECTURE.vocab_size)
    assert result.metrics["sft/tokens"] >= 3000 and result.metrics["sft/demonstrations"] == 25
    written = Path(config.run.dir) / "model"
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= {path.name for path in written.iterdir()}
    assert {file.path for file in result.outputs} >= {f"model/{path.name}" for path in written.iterdir()}
    config.model.path = str(written)
    with pytest.raises(ConfigError, match="would replace the checkpoint"):
        run("sft", config)
    config.run.dir = str(Path(config.run.dir) / "again")
    assert run("sft", config).metrics["sft/held_out_loss_before"] == pytest.approx(result.metrics["sft/held_out_loss"])


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for rollouts and values, and not for a checkpoint."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "t1", place]).returncode:
        pytest.skip("only root can mount a small file system")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_fills_up_while_saving_is_named_and_costs_nothing(make_run, run, small_disk):
    config = make_run("disk/run")
    with pytest.raises(T1Error, match="No space left on device") as caught:
        run("critic", config)
    assert "checkpoints/critic/iter_0001" in caught.value.where and caught.value.remedy
    paths = RunPaths.of(config.run.dir)
    assert not paths.checkpoint("critic", 1).exists()
    assert len(list(RolloutStore(paths.rollouts(0)))) == 9
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert run("critic", config).metrics["critic/optimizer_steps"] == 2
    assert [path.name for path in paths.checkpoint("critic", 1).parent.iterdir()] == ["iter_0001"]
