import json

import pytest

from megatron_t1.config.compose import flatten
from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.loop.manifest import FinishedStep, Manifest, config_digest, is_free, open_manifest
from megatron_t1.paths import RunPaths


def finished(iteration=0, phase="rollout"):
    return FinishedStep(iteration, phase, "a" * 64, "launch", {}, 1.0, 1, 1, 10, 0.0)


def written(config):
    manifest = Manifest.new(config)
    manifest.finished.append(finished())
    path = RunPaths.of(config.run.dir).manifest
    manifest.write(path)
    return manifest, path


def test_round_trip(config):
    manifest, path = written(config)
    assert Manifest.read(path) == manifest
    assert open_manifest(config).keys == {(0, "rollout")}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', "null"])
def test_damaged_manifest_is_never_taken_for_an_empty_one(config, damage):
    _, path = written(config)
    path.write_text(damage)
    with pytest.raises(IncompleteError, match="manifest"):
        open_manifest(config)


def test_unknown_version_is_refused(config):
    _, path = written(config)
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "version": 99}))
    with pytest.raises(IncompleteError, match="version 99"):
        open_manifest(config)


def test_another_configuration_is_refused_with_both_values(config):
    written(config)
    config.train.actor.lr, config.reward.scale = 1.0, 0.5
    with pytest.raises(MismatchError) as caught:
        open_manifest(config)
    text = str(caught.value)
    assert "train.actor.lr: the run has 0.0003, now 1.0" in text
    assert "reward.scale: the run has 0.25, now 0.5" in text


def test_free_options_may_change(config):
    _, path = written(config)
    config.loop.iterations, config.cluster.stop_grace_s, config.rollout.concurrency = 9, 3.0, 7
    manifest = open_manifest(config)
    assert manifest.config["loop.iterations"] == 9
    assert manifest.config_sha256 == config_digest(flatten(config))


def test_what_decides_the_result_is_not_free():
    for key in ("train.actor.lr", "run.seed", "layout.expert", "reward.scale", "rollout.temperature", "model.path",
                "loop.warmup_iterations"):  # fmt: skip
        assert not is_free(key)


def test_checkpoints_without_a_manifest_are_not_started_over(config):  # rllm#897
    RunPaths.of(config.run.dir).checkpoint("critic", 1).mkdir(parents=True)
    with pytest.raises(IncompleteError, match="no manifest"):
        open_manifest(config)


def test_versions_and_revision_are_recorded(config):
    manifest = Manifest.new(config)
    assert "numpy" in manifest.environments[0]["packages"]
    assert manifest.seed == config.run.seed
