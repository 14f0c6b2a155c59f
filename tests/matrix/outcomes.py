"""Cases run when a test asks for them, all of one world size in one start of the processes."""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.matrix.cases import Case, core_defect

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

    def require_equal(self, case: Case, core: str, record_property, gradient: float = GRADIENT_TOLERANCE) -> None:
        """The case gives the loss and gradient of one process; skipped where this core is known to fail."""
        record_property("layout", case.name)
        if defect := core_defect(case, core):
            pytest.skip(defect)
        outcome = self.of(case)
        assert "error" not in outcome, outcome["error"]
        record_property("loss", outcome["loss"])
        record_property("gradient", outcome["gradient"])
        assert outcome["loss"] <= LOSS_TOLERANCE and outcome["gradient"] <= gradient, outcome

    def of(self, case: Case) -> dict:
        if case.world not in self._worlds:
            self._worlds[case.world] = self._run(case.world, [])
        return self._worlds[case.world]["cases"][case.name]
