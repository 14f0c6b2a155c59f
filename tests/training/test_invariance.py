"""The same batch split in every way gives the same loss, the same metrics and the same gradient.

`make invariance` runs all layouts (T1_INVARIANCE=all); otherwise a selection in which every pair of choices occurs.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from megatron_t1.paths import RunPaths
from tests.distributed import run_distributed
from tests.training.invariance import PAIRWISE, REFERENCE, ROLES, selected
from tests.training.synthetic import run_config, save_config, write_rollout
from tests.training.weights import checkpoint_parameters, distance

pytestmark = pytest.mark.slow
PER_START = 12  # layouts one after another in the same processes, which keep the threads of every group they were in
LOSSES = ("policy_loss", "value_loss", "reference_kl", "entropy")


@pytest.fixture(scope="module")
def results(tmp_path_factory, model):
    """Run directory, and the metrics of every case and role, from one start for each number of processes."""
    directory = tmp_path_factory.mktemp("invariance") / "run"
    config = run_config(directory, model)
    config.rollout.max_context = 64
    options = config.train.actor
    options.old_logprobs, options.correction, options.kl_coef, options.entropy_coef = "recomputed", "band", 0.1, 0.01
    save_config(config)
    write_rollout(RunPaths.of(directory).rollouts(0), model, count=11)
    cases = [REFERENCE, *selected()]
    found = {}
    for processes in sorted({case.processes for case in cases}):
        own = [asdict(case) for case in cases if case.processes == processes]
        for part in (own[start : start + PER_START] for start in range(0, len(own), PER_START)):
            ranks = run_distributed(
                "tests.training.invariance:compute",
                processes,
                timeout_s=120 + 30 * len(part),
                run_dir=str(directory),
                cases=part,
            )
            assert all(rank == ranks[0] for rank in ranks)
            found.update(ranks[0])
    return directory, found


@pytest.fixture(scope="module")
def reference_gradients(results, backend):
    directory, _ = results
    return {
        role: checkpoint_parameters(directory / "gradients" / REFERENCE.name / role, backend, role) for role in ROLES
    }


def test_the_gradients_are_ones(reference_gradients, results):
    for role in ROLES:
        assert float(reference_gradients[role].norm()) == pytest.approx(
            results[1][REFERENCE.name][role]["grad_norm"], rel=1e-5
        )


@pytest.mark.parametrize("case", selected(), ids=lambda case: case.name)
@pytest.mark.timeout(3600)
def test_the_split_changes_nothing(results, reference_gradients, backend, case):
    # verl#6957 miles#3231 slime#2235 prime-rl#2358 prime-rl#2359 prime-rl#2562 Megatron-LM#936
    directory, found = results
    for role in ROLES:
        expected = found[REFERENCE.name][role]
        assert found[case.name][role].keys() == expected.keys()
        for name, value in found[case.name][role].items():
            close = {"rel": 0, "abs": 1e-6} if name in LOSSES else {"rel": 1e-5, "abs": 1e-6}
            assert value == pytest.approx(expected[name], **close), f"{role}/{name}"
        gradient = checkpoint_parameters(directory / "gradients" / case.name / role, backend, role)
        assert distance(gradient, reference_gradients[role]) <= 1e-5, role


def test_the_selection_is_small_and_covers_every_pair():
    assert len(PAIRWISE) <= 12 and len(set(PAIRWISE)) == len(PAIRWISE)
    sizes = [(c.processes // (c.context * c.pipeline * c.tensor), c.expert, c.context, c.pipeline) for c in PAIRWISE]
    for one, other in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        assert {(1, 1), (1, 2), (2, 1), (2, 2)} <= {(size[one], size[other]) for size in sizes}, (one, other)
