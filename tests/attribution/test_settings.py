from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_t1.attribution.job import Job
from megatron_t1.attribution.settings import (
    COARSE,
    COMPONENTS,
    NEAR,
    Kept,
    Setting,
    alternatives,
    as_trained,
    temperatures,
    together,
)
from megatron_t1.config.schema import Config
from megatron_t1.paths import RunPaths

BASELINE = Setting(True, "float32", "model", "float32", 1.0, "checkpoint", 3)
KEPT = Kept(frozenset({0, 3, 5}), frozenset({3, 4}))


def names(found) -> set[str]:
    return {alternative.name for alternative in found}


def test_every_alternative_differs_in_its_component_only():
    own = {"routing": {"replay"}, "format": {"dtype", "weights"}, "head": {"head"}, "router": {"router"},
           "temperature": {"temperature"}, "weights": {"weights", "version"}, "tokens": {"retokenised"}}  # fmt: skip
    for baseline in (BASELINE, replace(BASELINE, dtype="bfloat16", temperature=0.7, replay=False)):
        found, missing = alternatives(baseline, KEPT, has_routes=True)
        for alternative in found:
            changed = set(alternative.setting.changes(baseline))
            assert changed and changed <= own[alternative.component], alternative.name
        measured = {alternative.component for alternative in found}
        assert measured | set(missing) | {"temperature"} == set(COMPONENTS) and not measured & set(missing)


def test_a_bfloat16_run_has_more_to_compare():
    found, missing = alternatives(replace(BASELINE, dtype="bfloat16", temperature=0.7), KEPT, has_routes=True)
    assert {"float32", "head_float32", "head_bfloat16", "router_model", "temperature_1"} <= names(found)
    assert missing == {}
    found, missing = alternatives(BASELINE, KEPT, has_routes=True, rerendered="all the same")
    assert not names(found) & {"head_float32", "router_model", "temperature_1", "rerendered"}
    assert set(missing) == {"router", "tokens"} and missing["tokens"] == "all the same"


def test_the_nearest_kept_versions_are_compared_and_the_export_with_the_checkpoint():
    found, _ = alternatives(BASELINE, KEPT, has_routes=True)
    by_name = {alternative.name: alternative for alternative in found}
    assert by_name["policy_0"].setting.weights == "export" and "3 updates older" in by_name["policy_0"].label
    assert by_name["policy_4"].setting.weights == "checkpoint" and "1 update newer" in by_name["policy_4"].label
    assert by_name["export"].setting.version == 3 and "policy_5" not in by_name
    alone = Kept(frozenset(), frozenset({3}))
    found, missing = alternatives(BASELINE, alone, has_routes=False)
    assert set(missing) >= {"weights", "format", "routing"} and names(found) == {"head_bfloat16", "rerendered"}


def test_kept_versions_are_read_from_the_run(tmp_path):
    paths = RunPaths.of(tmp_path / "run")
    for directory in (paths.hf(2, ""), paths.checkpoint("actor", 1), paths.checkpoint("actor", 2)):
        directory.mkdir(parents=True)
    (paths.root / "hf" / "iter_0009.partial").mkdir()
    start = tmp_path / "start"
    start.mkdir()
    assert Kept.of(paths, str(start)) == Kept(frozenset({2}), frozenset({1, 2}))
    (start / "config.json").write_text("{}")
    kept = Kept.of(paths, str(start))
    assert kept.versions == {0, 1, 2} and kept.kind(0) == "export" and kept.kind(2) == "checkpoint"


def test_the_baseline_is_what_training_does():
    config = Config()
    config.model.dtype, config.train.head_dtype, config.rollout.temperature = "bfloat16", "float32", 0.8
    setting = as_trained(config, 3, KEPT, replay=True).setting
    assert setting == Setting(True, "bfloat16", "float32", "float32", 0.8, "checkpoint", 3)
    assert "without replay" in as_trained(config, 3, KEPT, replay=False).label


def test_several_changes_at_once():
    found, _ = alternatives(BASELINE, KEPT, has_routes=True)
    by_name = {alternative.name: alternative for alternative in found}

    def at_once(*chosen):
        return together("x", "x", [by_name[name] for name in chosen], BASELINE, KEPT).setting

    assert at_once("own_routes", "policy_0") == replace(BASELINE, replay=False, weights="export", version=0)
    assert at_once("bfloat16", "policy_0") == replace(BASELINE, dtype="bfloat16", weights="export", version=0)
    # Of policy 4 there is a checkpoint only, which has the type it was saved in.
    assert at_once("bfloat16", "policy_4") == replace(BASELINE, weights="checkpoint", version=4)


@pytest.mark.parametrize("around", [1.0, 0.7, 0.98])
def test_temperatures_are_told_apart_from_the_contracts(around):
    baseline = replace(BASELINE, temperature=0.7)
    values = [alternative.setting.temperature for alternative in temperatures(baseline, around, (*COARSE, 1.0))]
    assert all(abs(value / 0.7 - 1) > NEAR for value in values) and len(values) >= len(COARSE)
    assert len(names(temperatures(baseline, around, COARSE))) == len(COARSE) - sum(
        abs(round(around * factor, 6) / 0.7 - 1) <= NEAR for factor in COARSE
    )


def test_a_job_is_read_as_it_was_written(tmp_path: Path):
    found, _ = alternatives(BASELINE, KEPT, has_routes=True)
    job = Job(["b", "a"], as_trained(Config(), 3, KEPT, replay=True), found, KEPT)
    job.write(tmp_path, {})
    assert Job.read(tmp_path) == job and Job.retokenised(tmp_path) == {}
