"""The hybrid model with replay of foreign routes: loss and gradients of one process, in every layout.

A few layouts here; `make test-hybrid` runs all of them on megatron-core 0.16.1, 0.18.2 and 0.19.2.
"""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from tests.matrix.cases import HYBRID_ALL, HYBRID_FEW, core_defect
from tests.matrix.outcomes import Outcomes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CORE = metadata.version("megatron-core")
CASES = HYBRID_ALL if os.environ.get("T1_HYBRID_LAYOUTS") == "all" else HYBRID_FEW
# Delta nets divide by the size of outputs that may be close to 0: rounding grows a hundredfold (docs/hybrid.md).
GRADIENT_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return Outcomes(tmp_path_factory.mktemp("references"), [case for case in CASES if not core_defect(case, CORE)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_hybrid_model_is_the_same_in_every_layout(outcomes, case, record_property):
    outcomes.require_equal(case, CORE, record_property, GRADIENT_TOLERANCE)
