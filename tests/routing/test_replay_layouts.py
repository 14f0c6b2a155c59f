"""Replay of foreign routes gives the loss and the gradients of one process without recomputation, in every layout."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from tests.matrix.cases import Case, core_defect, selection
from tests.matrix.outcomes import Outcomes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first test of a world size waits for all of them
STRENGTH = int(os.environ.get("T1_LAYOUT_STRENGTH", "2"))  # see tests.matrix.cases
CORE = metadata.version("megatron-core")


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
    outcomes.require_equal(case, CORE, record_property)
