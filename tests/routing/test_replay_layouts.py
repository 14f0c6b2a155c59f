"""Replay in Megatron's own schedules: the same losses as in one process without recomputation."""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.model.workers import losses_from_hf
from tests.routing.workers import losses_with_replay
from tests.tiny_model import write_hf


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"expert": 2, "recompute": "full"},
        {"pipeline": 2, "recompute": "full"},
        {"pipeline": 2, "recompute": "moe"},
        {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"},
        {"tensor": 2, "expert": 2, "recompute": "moe"},
    ],
    ids=str,
)
def test_replay_is_the_same_in_every_layout(tmp_path, backend, layout):  # NeMo-RL#2740 AReaL#1166 slime#951
    write_hf(tmp_path / "hf")
    expected = losses_with_replay(str(tmp_path), {})
    results = run_distributed("tests.routing.workers:losses_with_replay", 2, directory=str(tmp_path), layout=layout)
    assert results[0] == results[1] == pytest.approx(expected, abs=3e-6)
    assert losses_from_hf(str(tmp_path), {}, "policy") != pytest.approx(expected, abs=1e-3)
