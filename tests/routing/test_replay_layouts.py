"""Replay of foreign routes gives the loss and the gradients of one process without recomputation, in every layout."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from tests.distributed import run_distributed
from tests.matrix.cases import Case, core_defect, selection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first test of a world size waits for all of them
STRENGTH = int(os.environ.get("T1_LAYOUT_STRENGTH", "2"))  # see tests.matrix.cases
CORE = metadata.version("megatron-core")
LOSS_TOLERANCE = 1e-6  # fp32, relative
GRADIENT_TOLERANCE = 1e-5  # of the norm of the whole parameter's gradient, for any parameter


class Outcomes:
    """Runs the selected cases, all of one world size in one start of the processes, when the first is asked for."""

    def __init__(self, directory, cases: list[Case]):
        self.directory, self.cases = str(directory), cases
        pairs = sorted({(case.model, role) for case in cases for role in case.trained_roles})
        self._worlds = {1: self._run(1, pairs)}
        self.references = self._worlds[1]["references"]

    def _run(self, world: int, references) -> dict:
        cases = sorted((case for case in self.cases if case.world == world), key=lambda case: case.name)
        ranks = run_distributed(
            "tests.matrix.run:run_cases", world, timeout_s=1500.0, directory=self.directory,
            cases=[case.to_dict() for case in cases], references=references,
        )  # fmt: skip
        assert all(rank["megatron"] == ranks[0]["megatron"] for rank in ranks)
        return ranks[0]

    def of(self, case: Case) -> dict:
        if case.world not in self._worlds:
            self._worlds[case.world] = self._run(case.world, [])
        return self._worlds[case.world]["cases"][case.name]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Of the cases that this run of pytest selected."""
    mine = [item for item in request.session.items if item.module is request.module]
    selected = [item.callspec.params["case"] for item in mine if "case" in item.fixturenames]
    possible = [case for case in selected if not core_defect(case, CORE)]
    return Outcomes(tmp_path_factory.mktemp("references"), possible or [Case()])


def test_foreign_routes_change_the_loss(outcomes):
    for name, (first, second, native) in outcomes.references.items():
        assert abs(first - second) > 1e-3 * abs(second), name
        assert abs(native - second) > 1e-3 * abs(second), name


@pytest.mark.parametrize("case", selection(STRENGTH), ids=lambda case: case.name)
def test_replay_is_the_same_in_every_layout(outcomes, case, record_property):
    # verl#5452 NeMo-RL#2740 AReaL#1166 slime#951 Megatron-LM#2693 Megatron-LM#7404
    record_property("layout", case.name)
    if defect := core_defect(case, CORE):
        pytest.skip(defect)
    outcome = outcomes.of(case)
    assert "error" not in outcome, outcome["error"]
    record_property("loss", outcome["loss"])
    record_property("gradient", outcome["gradient"])
    assert outcome["loss"] <= LOSS_TOLERANCE and outcome["gradient"] <= GRADIENT_TOLERANCE, outcome
