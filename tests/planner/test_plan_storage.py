"""Bytes that an iteration writes, beside files that are really written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_t1.config.schema import Config, ModelConfig
from megatron_t1.planner.storage import VALUE_FIELDS, token_bytes, written
from megatron_t1.trajectory.routes import route_row_bytes
from megatron_t1.trajectory.sidecar import write_sidecar
from megatron_t1.trajectory.store import RolloutStore
from tests.tiny_model import ARCHITECTURE
from tests.training.synthetic import episode


def test_bytes_of_records_are_those_of_a_store(tmp_path):
    """What two stores of different size differ by has no headers of the file in it, only of the episodes."""
    sizes, tokens = [], []
    for turns in (40, 240):
        directory = tmp_path / str(turns)
        trajectories = [episode(f"task{number}-0", turns=turns) for number in range(4)]
        RolloutStore(directory).add_many(trajectories)
        sizes.append(sum(path.stat().st_size for path in directory.glob("*.safetensors")))
        tokens.append(sum(len(each.ids) for each in trajectories))
    each = (sizes[1] - sizes[0]) / (tokens[1] - tokens[0])
    planned = token_bytes() + route_row_bytes(ARCHITECTURE)
    # A header names the policy of each turn: some bytes of JSON for every dozen tokens.
    assert planned <= each < 1.1 * planned


def test_bytes_of_values_are_those_of_a_sidecar(tmp_path):
    def size(count: int) -> int:
        fields = {name: np.zeros(count, np.float32) for name in ("old_values", "advantages", "returns")}
        return write_sidecar(tmp_path / str(count), 0, {"0" * 64: fields}).stat().st_size

    assert abs(size(20_000) - size(10_000) - 10_000 * 4 * VALUE_FIELDS) < 64


def test_what_stays_follows_from_what_is_kept():
    config = Config(model=ModelConfig(dtype="bfloat16", architecture=ARCHITECTURE))
    config.loop = replace(config.loop, warmup_iterations=1, iterations=9)
    found = written(config).parts
    one = found["critic's checkpoint"] + found["actor's checkpoint"]
    records = sum(found[name] for name in ("records, without routes", "routes", "exchange log", "values"))
    assert written(config).lasting == 2 * one + 10 * records + 2 * found["export"]
    config.loop.keep_rollouts, config.loop.keep_exports, config.train.keep_checkpoints = 3, 1, 4
    assert written(config).lasting == 4 * one + 3 * records + found["export"]
    config.rollout.routes = False
    assert written(config).parts["routes"] == 0
