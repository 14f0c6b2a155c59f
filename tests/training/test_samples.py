from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_t1.config.schema import Config
from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from megatron_t1.routing.validation import RoutesError
from megatron_t1.training.results import batch_metrics
from megatron_t1.training.samples import (
    Sample,
    attach,
    load_demonstrations,
    load_rollouts,
    router_dtype,
    tokenizer_digest,
)
from megatron_t1.trajectory.record import EndReason, Origin, Verdict
from megatron_t1.trajectory.selection import MIXED, demonstrates, trainable
from megatron_t1.trajectory.sidecar import read_sidecar, write_sidecar
from megatron_t1.trajectory.store import RolloutStore
from tests.training.synthetic import EXPERTS, LAYERS, TOP_K, contract, episode

FACTS = {
    "tokenizer_sha256": "0" * 64,
    "chat_format": "chatml_bash",
    "model_dtype": "float32",
    "num_experts": EXPERTS,
    "top_k": TOP_K,
    "num_moe_layers": LAYERS,
}


def stored(directory, *trajectories):
    RolloutStore(directory).add_many(trajectories)
    return directory


def test_records_become_samples_in_the_order_of_their_ids(tmp_path):
    records = [episode(f"task{number}-0") for number in (2, 0, 1)]
    data = load_rollouts(stored(tmp_path, *records), Config(), FACTS)
    assert [sample.name for sample in data.samples] == ["task0-0", "task1-0", "task2-0"]
    first = records[1]
    sample = data.samples[0]
    assert sample.key == first.digest and sample.reward == first.header.reward["total"]
    assert np.array_equal(sample.loss_mask, first.origin == Origin.SAMPLED)
    assert np.array_equal(sample.fields["sampler_logprobs"], first.logprobs[first.origin == Origin.SAMPLED])
    assert np.isfinite(sample.fields["sampler_logprobs"]).all()
    metrics = batch_metrics(data)
    assert metrics["batch/loss_tokens"] == sum((record.origin == Origin.SAMPLED).sum() for record in records)
    assert metrics["batch/trajectories"] == 3 and metrics["batch/excluded"] == 0


@pytest.mark.parametrize(
    ("field", "sampled", "trained"),
    [
        ("tokenizer_sha256", "1" * 64, "0" * 64),
        ("temperature", 0.7, 1.0),  # miles#1345 OpenRLHF#853 OpenRLHF#857 verl#6240 vime#69
        ("top_p", 0.9, 1.0),  # ms-swift#8427 marin#1879
        ("chat_format", "other", "chatml_bash"),
        ("model_dtype", "bfloat16", "float32"),
        ("num_experts", 16, EXPERTS),
        ("top_k", 4, TOP_K),
        ("num_moe_layers", 48, LAYERS),
    ],
)
def test_another_contract_is_refused_with_both_values(tmp_path, field, sampled, trained):
    stored(tmp_path, episode("good-0"), episode("odd-0", agreed=contract(**{field: sampled})))
    said = f"{field}: the rollout has {sampled!r}, training has {trained!r}"
    with pytest.raises(MismatchError, match=said) as caught:
        load_rollouts(tmp_path, Config(), FACTS)
    assert "odd-0" in caught.value.where


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
def test_missing_routes_fail_before_any_step_when_a_role_replays(tmp_path, role):  # miles#407
    stored(tmp_path, episode("with-0"), episode("without-0", routes=False))
    config = Config()
    config.train.actor.kl_coef = 0.1 if role == "reference" else 0.0
    for each in ("actor", "critic", "reference"):
        setattr(config.train.replay, each, each == role)
    with pytest.raises(T1Error, match="replay is on but the trajectory has no routes") as caught:
        load_rollouts(tmp_path, config, FACTS)
    assert "without-0" in caught.value.where
    setattr(config.train.replay, role, False)
    assert [sample.routes is None for sample in load_rollouts(tmp_path, config, FACTS).samples] == [False, True]


def test_routes_of_no_expert_are_named_by_token_and_layer(tmp_path):
    record = episode("task-0")
    routes = record.routes.copy()
    routes[5, 2] = [1, EXPERTS]
    stored(tmp_path, replace(record, routes=routes))
    with pytest.raises(RoutesError) as caught:
        load_rollouts(tmp_path, Config(), FACTS)
    assert "task-0" in caught.value.where and "token 5, MoE layer 3" in caught.value.where


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    record = episode("task-0")
    ids = record.ids.copy()
    ids[4] = 67
    stored(tmp_path, replace(record, ids=ids))
    with pytest.raises(MismatchError, match="token 4 is 67, the model has 67") as caught:
        load_rollouts(tmp_path, Config(), {**FACTS, "vocab_size": 67})
    assert "task-0" in caught.value.where
    with pytest.raises(MismatchError, match="token 4 is 67"):
        shown = episode("task-0", demonstration=True)
        load_demonstrations(stored(tmp_path / "shown", replace(shown, ids=ids)), vocab_size=67)


def test_demonstrations_of_another_tokenizer_are_refused(tmp_path):
    stored(tmp_path, episode("task-0", demonstration=True))
    (tmp_path / "demonstrations.json").write_text(json.dumps({"tokenizer_sha256": "a" * 64}))
    assert len(load_demonstrations(tmp_path, tokenizer_sha256="a" * 64)) == 1
    with pytest.raises(MismatchError, match=f"tokenizer {'a' * 64}, the model has {'b' * 64}"):
        load_demonstrations(tmp_path, tokenizer_sha256="b" * 64)


def test_a_record_that_is_partly_sampled_and_partly_demonstrated_is_nobodys(tmp_path):
    """A loss reads the whole mask: demonstration tokens have no log-prob, sampled ones are no demonstration."""
    record = episode("task0-0")
    origin, logprobs = record.origin.copy(), record.logprobs.copy()
    first = int(np.flatnonzero(record.loss_mask)[0])
    origin[first], logprobs[first] = Origin.DEMONSTRATION, np.nan
    mixed = replace(record, origin=origin, logprobs=logprobs)
    assert trainable(mixed) == demonstrates(mixed) == MIXED
    data = load_rollouts(stored(tmp_path / "both", mixed, episode("task1-0")), Config(), FACTS)
    assert [sample.name for sample in data.samples] == ["task1-0"] and data.excluded == {MIXED: 1}
    with pytest.raises(T1Error, match="no demonstration: sampled and demonstrated"):
        load_demonstrations(stored(tmp_path / "mixed", mixed))


def test_ppo_refuses_demonstrations(tmp_path):
    stored(tmp_path, episode("shown-0", demonstration=True))
    with pytest.raises(IncompleteError, match="none of 1 trajectories can be trained on: {'unverified': 1}"):
        load_rollouts(tmp_path, Config(), FACTS)
    verdict = Verdict(passed=1, total=1, baseline=0, trusted=True)
    stored(tmp_path, replace_header(episode("sampled-0"), contract=None, verdict=verdict))
    with pytest.raises(T1Error, match="without a sampling contract") as caught:
        load_rollouts(tmp_path, Config(), FACTS)
    assert "t1 train sft" in caught.value.remedy


def test_sft_refuses_rollouts(tmp_path):
    stored(tmp_path, episode("sampled-0"))
    with pytest.raises(T1Error, match="no demonstration") as caught:
        load_demonstrations(tmp_path)
    assert "sampled-0" in caught.value.where


def replace_header(record, **changes):
    return replace(record, header=replace(record.header, **changes))


def test_untrusted_and_lost_episodes_are_counted_and_left_out(tmp_path):  # rllm#677
    untrusted = Verdict(passed=0, total=4, baseline=0, trusted=False, reason="the verifier crashed")
    stored(
        tmp_path,
        episode("kept-0"),
        replace_header(episode("untrusted-0"), verdict=untrusted, reward={}),
        replace_header(episode("lost-0"), end_reason=EndReason.SANDBOX_LOST),
        replace_header(episode("late-0"), end_reason=EndReason.AGENT_TIMEOUT),
    )
    data = load_rollouts(tmp_path, Config(), FACTS)
    assert [sample.name for sample in data.samples] == ["kept-0", "late-0"]
    assert data.excluded == {"untrusted_verdict": 1, "infrastructure_lost": 1}
    config = Config()
    config.env.timed_out_policy = "exclude"
    assert load_rollouts(tmp_path, config, FACTS).excluded["agent_timeout"] == 1


@pytest.mark.parametrize("make", [lambda path: path / "absent", lambda path: path])
def test_no_rollout_and_an_empty_one(tmp_path, make):
    with pytest.raises(IncompleteError) as caught:
        load_rollouts(make(tmp_path), Config(), FACTS)
    assert caught.value.remedy
    with pytest.raises(IncompleteError, match="no demonstrations"):
        load_demonstrations(make(tmp_path))


def test_values_missing_for_a_record_name_it(tmp_path):  # miles#1735
    one, two = Sample.of(episode("one-0")), Sample.of(episode("two-0"))
    values = {one.key: {"advantages": np.zeros(one.loss_tokens, np.float32)}}
    write_sidecar(tmp_path, 0, values)
    attach([one], read_sidecar(tmp_path), ("advantages",))
    assert one.fields["advantages"].shape == (one.loss_tokens,)
    with pytest.raises(IncompleteError, match="no entry") as caught:
        attach([two], read_sidecar(tmp_path), ("advantages",))
    assert "two-0" in str(caught.value)
    with pytest.raises(IncompleteError, match="returns") as caught:
        attach([one], read_sidecar(tmp_path), ("returns",))
    assert "one-0" in str(caught.value)


def test_a_first_token_with_loss_is_refused():
    record = episode("task-0").truncated(1)
    with pytest.raises(T1Error, match="first token"):
        Sample.of(replace(record, origin=np.full(1, Origin.SAMPLED, np.uint8), logprobs=np.zeros(1, np.float32)))


def test_a_model_without_tokenizer_is_named(tmp_path):
    with pytest.raises(IncompleteError, match="no tokenizer.json"):
        tokenizer_digest(tmp_path)


def test_a_changed_demonstration_is_refused(tmp_path):
    stored(tmp_path, episode("task-0", demonstration=True))
    path = next(tmp_path.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(IncompleteError, match="digest"):
        load_demonstrations(tmp_path)


@pytest.mark.parametrize(("sampler", "router", "warned"), [("bfloat16", "float32", True), ("bfloat16", "model", False),
                                                           ("", "float32", False)])  # fmt: skip
def test_routers_of_another_type_are_said(tmp_path, recwarn, sampler, router, warned):  # prime-rl#2952 Automodel#3650
    agreed = contract(model_dtype="bfloat16", router_dtype=sampler)
    config = Config()
    config.model.dtype, config.train.router_dtype = "bfloat16", router
    facts = {**FACTS, "model_dtype": "bfloat16", "router_dtype": router_dtype(config)}
    load_rollouts(stored(tmp_path, episode("task-0", agreed=agreed)), config, facts)
    found = [str(warning.message) for warning in recwarn if "routers" in str(warning.message)]
    assert bool(found) == warned
    if warned:
        assert "computed in bfloat16, training's compute in float32" in found[0]


@pytest.mark.parametrize(("mode", "temperature"), [("raw", 0.7), ("unknown", 1.0), ("raw", 1.0), ("processed", 0.7)])
def test_log_probs_of_another_mode_are_refused(tmp_path, mode, temperature):  # vllm#42259
    config = Config()
    config.rollout.temperature = temperature
    stored(tmp_path, episode("task-0", agreed=contract(logprobs_mode=mode, temperature=temperature)))
    if (mode, temperature) in (("raw", 1.0), ("processed", 0.7)):
        assert load_rollouts(tmp_path, config, FACTS).samples
    else:
        with pytest.raises(MismatchError, match=mode):
            load_rollouts(tmp_path, config, FACTS)


def test_some_trajectories_of_a_rollout(tmp_path):
    stored(tmp_path, *(episode(f"task{number}-0") for number in range(3)))
    found = load_rollouts(tmp_path, Config(), FACTS, only={"task2-0", "task0-0"})
    assert [sample.name for sample in found.samples] == ["task0-0", "task2-0"]
