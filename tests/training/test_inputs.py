"""What a training phase reads is what its maker recorded, and a gap that shows other weights stops the actor."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult, WrittenFile
from megatron_t1.trajectory import tensorfile
from megatron_t1.trajectory.sidecar import read_sidecar, write_sidecar
from tests.training.synthetic import write_rollout


def record_values(paths):
    """A sidecar of the rollout's critic phase, and the phase's result."""
    path = write_sidecar(paths.values(0), 0, {"a" * 64: {"advantages": np.ones(3, np.float32)}})
    from megatron_t1 import atomic

    written = WrittenFile(str(path.relative_to(paths.root)), path.stat().st_size, atomic.sha256_file(path))
    PhaseResult("critic", 0, outputs=[written]).write(paths.phase(0, "critic"))


@pytest.fixture
def context(tmp_path, model):
    paths = RunPaths.of(tmp_path / "run")
    write_rollout(paths.rollouts(0), model)
    record_values(paths)
    return SimpleNamespace(paths=paths, iteration=0)


def require(context, role):
    from megatron_t1.training.inputs import require_inputs

    require_inputs(context, role)


def test_untouched_inputs_pass(backend, context):
    for role in ("critic", "actor", "export", "sft"):
        require(context, role)


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_a_changed_logprob_in_a_shard_is_refused(backend, context, role):
    path = next(context.paths.rollouts(0).glob("*.shard.safetensors"))
    entry = tensorfile.TensorFile(path).entries["3/logprobs"]
    content = bytearray(path.read_bytes())
    content[entry.start] ^= 1
    path.write_bytes(content)
    with pytest.raises(IncompleteError, match="what the rollout phase of iteration 0 wrote has changed") as caught:
        require(context, role)
    assert path.name in caught.value.problem


def test_a_record_that_is_not_what_the_engine_said_is_refused(backend, context):  # trl#5224
    from megatron_t1.trajectory.exchange import REFERENCE, ExchangeLog
    from megatron_t1.trajectory.store import RolloutStore

    directory = context.paths.rollouts(0)
    records = list(RolloutStore(directory))
    for path in directory.glob("*.safetensors"):
        path.unlink()
    store = RolloutStore(directory)
    with ExchangeLog(directory) as log:
        for number, record in enumerate(records):
            session = log.session(record.header.trajectory_id, 0)
            sampled = np.flatnonzero(record.loss_mask)
            drift = number == 4  # the record was built from other tokens than came from the engine
            session.add(
                record.ids[: sampled[0]],
                sampled=record.ids[sampled[0] : sampled[0] + 1] + drift,
                logprobs=record.logprobs[sampled[:1]],
                response_sha256="0" * 64,
                finish_reason="length",
                state={},
            )
            store.add(record.truncated(int(sampled[0]) + 1).noting(**{REFERENCE: session.reference}))
    store.seal()
    PhaseResult("rollout", 0, outputs=store.written_files(context.paths.root)).write(context.paths.phase(0, "rollout"))
    with pytest.raises(MismatchError, match="changed token at turn 0, token") as caught:
        require(context, "critic")
    assert records[4].header.trajectory_id in caught.value.where


def test_multiplied_advantages_are_refused(backend, context):
    values = read_sidecar(context.paths.values(0))
    changed = {key: {name: array * np.float32(1000) for name, array in values[key].items()} for key in list(values)}
    write_sidecar(context.paths.values(0), 0, changed)
    require(context, "critic")  # doesn't read them
    with pytest.raises(IncompleteError, match="what the critic phase of iteration 0 wrote has changed") as caught:
        require(context, "actor")
    assert "sidecar-00000-of-00001.safetensors: its SHA-256 is" in caught.value.problem


def alarm(gap, **changes):
    from megatron_t1.config.schema import Config
    from megatron_t1.training.gap import _require_small_gap

    config = Config()
    for name, value in changes.items():
        section, _, option = name.rpartition("__")
        owner = config
        for part in section.split("__"):
            owner = getattr(owner, part)
        setattr(owner, option, value)
    _require_small_gap(config, {"gap/logprob_gap_replay": gap})


@pytest.mark.parametrize("gap", [2e-3, float("nan")])
def test_a_gap_of_other_weights_stops_the_actor(backend, gap):
    with pytest.raises(T1Error, match="trainer and sampler disagree") as caught:
        alarm(gap)
    assert "train.replay.max_gap" in caught.value.remedy
    alarm(gap, train__replay__max_gap=0.0)
    alarm(gap, model__dtype="bfloat16")
    alarm(gap, rollout__engine__dtype="bfloat16")


def test_rounding_is_no_alarm_and_the_bound_can_be_set(backend):
    alarm(3e-7)
    alarm(2e-3, train__replay__max_gap=0.01)
    with pytest.raises(T1Error, match="by 0.02 nats on average, allowed: 0.01"):
        alarm(0.02, model__dtype="bfloat16", train__replay__max_gap=0.01)
