"""`t1 gap` finds what was planted: each cause is put into a rollout that has no other gap."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_t1.attribution.findings import Scored, findings
from megatron_t1.attribution.job import OUTCOME_FILE, Job
from megatron_t1.attribution.measures import Step
from megatron_t1.attribution.retokenised import Retokenised
from megatron_t1.attribution.settings import BASELINE, COMPONENTS, Alternative, Kept, alternatives, as_trained
from megatron_t1.paths import RunPaths
from megatron_t1.trajectory.sidecar import read_sidecar
from megatron_t1.trajectory.store import RolloutStore
from tests.tiny_model import write_hf
from tests.training.planted import played, records

pytestmark = pytest.mark.slow
COUNT = 12


@pytest.fixture
def config(make_run):
    return make_run(rollouts=0)


@pytest.fixture
def attributed(config, backend, tmp_path):
    """Store the records as the run's rollout and take their gap apart: attributed(records) -> the report."""

    def attribute(taken, streams=None):
        from megatron_t1.training.context import Context
        from megatron_t1.training.scorer import rescore

        paths = RunPaths.of(config.run.dir)
        RolloutStore(paths.rollouts(0)).add_many(taken)
        kept = Kept.of(paths, config.model.path)
        baseline = as_trained(config, 0, kept, replay=config.train.replay.actor)
        others, missing = alternatives(
            baseline.setting, kept, has_routes=True, rerendered="" if streams else "nothing differs"
        )
        work = tmp_path / "work"
        work.mkdir()
        Job([record.header.trajectory_id for record in taken], baseline, others, kept).write(work, streams or {})
        rescore(Context(config, backend, 0), work)
        outcome = json.loads((work / OUTCOME_FILE).read_text())
        found = [Alternative.from_json(raw) for raw in outcome["alternatives"]]
        scores = read_sidecar(work)
        steps = [Step(**step) for step in outcome["steps"]]
        numbers = [scores[record.digest] for record in taken]
        scored = Scored(taken, numbers, {a.name: a for a in found}, outcome["routes"], steps)
        report = findings(scored, lambda ids: str(ids.tolist()), 3)
        return {setting["name"]: setting for setting in report["settings"]}, report["attribution"], missing

    return attribute


def dominated_by(attribution: dict, component: str, least: float = 0.95) -> None:
    shares = {name: share["in_turn"] for name, share in attribution["shares"].items()}
    assert shares.pop(component) > least
    assert max(shares.values()) < 1 - least
    total = sum(share["in_turn"] for share in attribution["shares"].values())
    assert total + attribution["remainder"] == pytest.approx(1.0)


def test_a_rollout_of_equal_weights_and_arithmetic_has_no_gap(config, backend, model, attributed):
    settings, attribution, missing = attributed(played(config, backend, model, records(COUNT, model)))
    assert settings[BASELINE]["gap"] < 1e-6 and settings[BASELINE]["routes"]["route_difference"] == 0
    assert all(share["in_turn"] == 0 for share in attribution["shares"].values())
    assert settings["bfloat16"]["change"] > 1e-3 > settings["bfloat16"]["error"]
    assert settings["head_bfloat16"]["gap"] > 1e-4 and settings["temperature_fitted"]["gap"] > 1e-3
    assert set(missing) == {"router", "weights", "tokens"} and set(attribution["shares"]) < set(COMPONENTS)


@pytest.mark.parametrize(("stated", "true"), [(0.7, 1.0), (1.0, 0.8)])
def test_a_wrong_temperature_is_found(config, backend, model, attributed, stated, true):  # miles#1345 OpenRLHF#853
    taken = played(config, backend, model, records(COUNT, model, temperature=stated), temperature=true)
    config.rollout.temperature = stated
    settings, attribution, _ = attributed(taken)
    dominated_by(attribution, "temperature")
    name = attribution["shares"]["temperature"]["setting"]
    assert name == ("temperature_1" if true == 1.0 else "temperature_fitted")
    assert settings[name]["setting"]["temperature"] == pytest.approx(true, rel=0.01)
    assert {token["explained_by"] for token in settings[BASELINE]["worst"]} == {name}


def test_log_probs_of_other_weights_are_found(config, backend, model, attributed):
    newer = write_hf(RunPaths.of(config.run.dir).hf(1, model), seed=2)
    settings, attribution, _ = attributed(played(config, backend, newer, records(COUNT, model)))
    dominated_by(attribution, "weights")
    assert attribution["shares"]["weights"]["setting"] == "policy_1"
    assert settings["policy_1"]["routes"]["route_difference"] == 0 < settings[BASELINE]["routes"]["route_difference"]


def test_routes_of_another_layer_are_found(config, backend, model, attributed):
    taken = played(config, backend, model, records(COUNT, model))
    taken = [replace(record, routes=np.ascontiguousarray(record.routes[:, [1, 0, 3, 2]])) for record in taken]
    settings, attribution, _ = attributed(taken)
    dominated_by(attribution, "routing")
    assert settings[BASELINE]["routes"]["route_difference"] > 0.5 and settings["own_routes"]["gap"] < 1e-6


def test_a_sampler_in_bfloat16_is_found(config, backend, model, attributed):
    sampler = replace(config, model=replace(config.model, dtype="bfloat16"))
    _, attribution, _ = attributed(played(sampler, backend, model, records(COUNT, model)))
    dominated_by(attribution, "format")


def test_logits_that_the_sampler_rounded_are_found(config, backend, model, attributed):  # OpenRLHF#634
    taken = played(config, backend, model, records(COUNT, model), rounded=torch.bfloat16)
    _, attribution, _ = attributed(taken)
    dominated_by(attribution, "head")


def test_ids_that_were_encoded_again_are_found(config, backend, model, attributed):
    """The records hold other prompts than were sampled from; the streams are what was."""
    true = played(config, backend, model, records(COUNT, model))
    taken, streams = [], {}
    for record in true:
        ids = record.ids.copy()
        ids[1] = (ids[1] + 1) % 60
        taken.append(replace(record, ids=ids))
        source = np.arange(len(ids))
        source[1] = -1
        streams[taken[-1].digest] = Retokenised(record.ids, source)
    settings, attribution, _ = attributed(taken, streams)
    dominated_by(attribution, "tokens", least=0.8)  # where the token was, the router chooses now
    assert settings["rerendered"]["tokens"] == settings[BASELINE]["tokens"]


def test_two_causes_leave_an_interaction_and_no_remainder(config, backend, model, attributed):
    newer = write_hf(RunPaths.of(config.run.dir).hf(1, model), seed=2)
    taken = played(config, backend, newer, records(COUNT, model, temperature=0.7), temperature=1.0)
    config.rollout.temperature = 0.7
    settings, attribution, _ = attributed(taken)
    shares = {name: share["in_turn"] for name, share in attribution["shares"].items()}
    assert shares["weights"] > 0.5 and shares["temperature"] > 0.05
    assert attribution["remainder"] < 0.01 and min(setting["gap"] for setting in settings.values()) < 1e-6
    assert sum(shares.values()) + attribution["remainder"] == pytest.approx(1.0)
    alone = sum(share["alone"] for share in attribution["shares"].values())
    assert attribution["interaction"] == pytest.approx(sum(shares.values()) - alone)
