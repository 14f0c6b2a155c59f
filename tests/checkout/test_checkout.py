"""Full checkouts of Megatron-LM: their own pretrain_gpt.py and loop, on records, against this project's trainer.

T1_MEGATRON_CHECKOUTS names a directory of checkouts (release tags 0.15 to 0.18). Each test works on a patched copy.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_t1.checkout import PATCH
from megatron_t1.model.checkpoint import _model_entries
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.trajectory.sidecar import read_sidecar
from tests.checkout.launch import pretrain
from tests.distributed import run_distributed
from tests.tiny_model import tiny_config, write_hf
from tests.training.synthetic import run_config, save_config, write_rollout
from tests.training.weights import distance, parameters

pytestmark = pytest.mark.slow
SEED = 7  # of the trainer's critic; its actor orders mini-batches by a seed that is 500 larger
CRITIC = ("--t1-role", "critic", "--seed", str(SEED), "--lr", "2e-3", "--t1-epochs", "1", "--t1-minibatches", "2")
ACTOR = ("--t1-role", "actor", "--seed", str(SEED + 500), "--lr", "1e-3", "--t1-minibatches", "2")
EXPERTS = ("--expert-model-parallel-size", "2")
RECOMPUTE = ("--recompute-method", "uniform", "--recompute-num-layers", "1")


def checkouts() -> list[Path]:
    root = os.environ.get("T1_MEGATRON_CHECKOUTS")
    return sorted(path.parent for path in Path(root).glob("*/pretrain_gpt.py")) if root else []


@pytest.fixture(scope="module", params=checkouts() or [None], ids=lambda path: path.name if path else "none")
def checkout(request, tmp_path_factory):
    """A patched copy of one checkout, without what isn't needed to train a GPT."""
    if request.param is None:
        pytest.skip("T1_MEGATRON_CHECKOUTS names no directory of Megatron-LM checkouts")
    pytest.importorskip("libcst")
    from megatron_t1.patching import operations
    from megatron_t1.patching.declaration import load_patches
    from megatron_t1.patching.tree import Tree

    copy = tmp_path_factory.mktemp("checkout") / request.param.name
    copy.mkdir()
    shutil.copytree(request.param / "megatron", copy / "megatron")
    for script in request.param.glob("*.py"):
        shutil.copy(script, copy)
    tree = Tree(copy)
    plan, _ = operations.apply(tree, load_patches(None), [])
    if PATCH not in plan.patches:
        pytest.skip(f"{PATCH} isn't for megatron-core {tree.version}")
    return copy


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A rollout and what this project's trainer makes of it, in two expert-parallel processes."""
    root = tmp_path_factory.mktemp("trained")
    model = write_hf(root / "hf")
    config = run_config(root / "run", model, processes=2, expert=2)
    config.run.seed = SEED
    save_config(config)
    write_rollout(root / "run" / "rollouts" / "iter_0000", model)
    run_distributed(
        "tests.training.workers:run_phases", 2, run_dir=config.run.dir, iteration=0, roles=["critic", "actor"]
    )
    return config


@pytest.fixture(scope="module")
def records(trained):
    paths = RunPaths.of(trained.run.dir)
    return ("--t1-rollouts", str(paths.rollouts(0)), "--t1-model", trained.model.path)


def stored_parameters(directory: Path, backend, role: str) -> torch.Tensor:
    """float64 [parameters] of a checkpoint that a checkout wrote, in the order of `weights.parameters`."""
    from megatron.core import dist_checkpointing

    from megatron_t1.model.build import build_model

    chunks = build_model(tiny_config(), backend, role, initialize=False)
    step = int((directory / "latest_checkpointed_iteration.txt").read_text())
    loaded = dist_checkpointing.load(_model_entries(chunks), str(directory / f"iter_{step:07d}"))
    chunks[0].load_state_dict(loaded["model"], strict=False)
    return torch.cat([value.detach().reshape(-1).double() for _, value in sorted(chunks[0].named_parameters())])


@pytest.fixture(scope="module")
def critic(checkout, records, tmp_path_factory):
    """A critic that the checkout trained on the records from the start model: output, sidecars, checkpoint."""
    place = tmp_path_factory.mktemp("critic")
    values, save = place / "values", place / "checkpoint"
    options = ("--t1-values", str(values), "--save", str(save), "--train-iters", "2", "--global-batch-size", "4")
    output = pretrain(checkout, *CRITIC, *records, *options, *EXPERTS, processes=2)
    assert output.code == 0, output.text
    return output, values, save


def test_its_loop_trains_the_critic_as_the_trainer_does(critic, trained, backend):
    output, values, save = critic
    paths = RunPaths.of(trained.run.dir)
    expected, found = read_sidecar(paths.values(0)), read_sidecar(values)
    assert set(found) == set(expected)
    for key in expected:
        for name in ("old_values", "advantages", "returns"):
            np.testing.assert_allclose(found[key][name], expected[key][name], atol=1e-6)
    metrics = PhaseResult.read(paths.phase(0, "critic")).metrics
    first, last = metrics["critic/value_loss_first"], metrics["critic/value_loss_last"]
    logged = output.logged("value_loss")
    assert logged[0] == pytest.approx(first, rel=1e-5)
    # Cores from 0.16 on don't empty their running mean after a run's very first line.
    assert logged[1] in (pytest.approx(last, rel=1e-5), pytest.approx((first + last) / 2, rel=1e-5))
    start = parameters(trained, backend, "critic", 0)
    ours, theirs = parameters(trained, backend, "critic", 1), stored_parameters(save, backend, "value")
    assert distance(theirs, ours) < 1e-5 < distance(start, ours)


@pytest.mark.parametrize(
    "layout",
    [EXPERTS, ("--pipeline-model-parallel-size", "2"), ("--recompute-granularity", "full", *RECOMPUTE, *EXPERTS)],
)
def test_its_loop_trains_the_actor_on_replayed_routes_as_the_trainer_does(
    checkout, records, trained, backend, tmp_path, layout
):
    values = RunPaths.of(trained.run.dir).values(0)
    options = ("--t1-values", str(values), "--save", str(tmp_path), "--train-iters", "2", "--global-batch-size", "4")
    output = pretrain(checkout, *ACTOR, *records, *options, *layout, processes=2)
    assert output.code == 0, output.text
    assert len(output.logged("entropy")) == 2  # what isn't positive, Megatron's log leaves out
    start = parameters(trained, backend, "actor", 0)
    ours, theirs = parameters(trained, backend, "actor", 1), stored_parameters(tmp_path, backend, "policy")
    assert distance(theirs, ours) < 1e-5 < distance(start, ours)


def test_a_critic_goes_on_from_its_checkpoint_head_included(checkout, records, critic, backend, tmp_path):
    """One step, stopped, and the second from the checkpoint, equal two steps in one run; old values are kept."""
    _, values, whole = critic
    common = (*CRITIC, *records, "--t1-values", str(values), "--global-batch-size", "4", *EXPERTS)
    first = pretrain(checkout, *common, "--save", str(tmp_path), "--train-iters", "1", processes=2)
    assert first.code == 0, first.text
    resumed = ("--load", str(tmp_path), "--save", str(tmp_path), "--train-iters", "2", "--override-opt_param-scheduler")
    second = pretrain(checkout, *common, *resumed, processes=2)
    assert second.code == 0, second.text
    assert len(second.logged("value_loss")) == 1
    assert "values of" not in second.text
    one, other = (stored_parameters(directory, backend, "value") for directory in (tmp_path, whole))
    assert distance(one, other) < 1e-6


def test_a_critic_starts_from_a_policys_checkpoint(checkout, records, trained, critic, backend, tmp_path):
    values = RunPaths.of(trained.run.dir).values(0)
    common = (*records, "--train-iters", "2", "--global-batch-size", "2")
    policy = (*ACTOR, "--t1-values", str(values), "--save", str(tmp_path / "actor"))
    assert (output := pretrain(checkout, *policy, *common)).code == 0, output.text
    options = (*CRITIC, "--t1-values", str(tmp_path / "values"), "--save", str(tmp_path / "critic"), *common)
    refused = pretrain(checkout, *options, "--load", str(tmp_path / "actor"))
    assert refused.code != 0 and "is a policy's checkpoint" in refused.text
    output = pretrain(checkout, *options, "--load", str(tmp_path / "actor"), "--finetune")
    assert output.code == 0, output.text
    assert "load_return" not in output.text  # Megatron's fallback when keys are missing
    sidecar = read_sidecar(tmp_path / "values")
    first = np.concatenate([sidecar[key]["old_values"] for key in sidecar])
    assert np.ptp(first) < 1e-6 and abs(first[0]) > 0.01  # the head's weight is zero, its bias the mean return
    assert stored_parameters(tmp_path / "critic", backend, "value").isfinite().all()


def test_without_replay_the_router_s_options_are_the_checkout_s_own(checkout, records, tmp_path):
    """A critic that doesn't replay trains with a capacity factor, which replay refuses."""
    options = (*CRITIC, *records, "--t1-values", str(tmp_path), "--train-iters", "1", "--global-batch-size", "2")
    capacity = ("--moe-expert-capacity-factor", "1.0")
    output = pretrain(checkout, *options, *capacity)
    assert output.code == 0, output.text
    assert len(output.logged("value_loss")) == 1
    other = pretrain(checkout, *options, *capacity, "--t1-gae-gamma", "0.9")
    assert other.code != 0 and "--t1-gae-gamma is 0.9, they have 1.0" in other.text


def test_all_clashes_are_listed_before_the_model_is_built(checkout, tmp_path):
    output = pretrain(
        checkout,
        *("--t1-role", "actor", "--t1-rollouts", str(tmp_path / "none"), "--train-iters", "2", "--lr", "1e-3"),
        *("--micro-batch-size", "2", "--hidden-dropout", "0.1", "--moe-router-load-balancing-type", "sinkhorn"),
        *("--eval-iters", "3", "--global-batch-size", "4"),
    )
    assert output.code != 0
    for words in (
        "--t1-rollouts",
        "--t1-values is missing",
        "--t1-model is missing",
        "--micro-batch-size is 2, it must be 1",
        "--hidden-dropout is 0.1",
        "--eval-iters is 3",
        "sinkhorn",
    ):
        assert words in output.text, words
    assert "building GPT model" not in output.text
