import json
from dataclasses import asdict

import pytest

from megatron_t1.config.compose import flatten
from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.loop.manifest import config_digest, is_free, new_manifest, open_manifest
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import RunPaths


def finished(iteration=0, phase="rollout"):
    return FinishedStep(iteration, phase, "a" * 64, "launch", {}, 1.0, 1, 1, 10, 0.0)


def written(config):
    manifest = new_manifest(config)
    manifest.finished.append(finished())
    path = RunPaths.of(config.run.dir).manifest
    manifest.write(path)
    return manifest, path


def test_round_trip(config):
    manifest, path = written(config)
    assert Manifest.read(path) == manifest
    assert open_manifest(config).keys == {(0, "rollout")}


def test_a_first_start_that_failed_binds_to_nothing(config):
    manifest, path = written(config)
    manifest.finished = []
    manifest.write(path)
    rollouts = RunPaths.of(config.run.dir).rollouts(0)
    rollouts.mkdir(parents=True)
    (rollouts / "played").touch()
    assert open_manifest(config).created_at == manifest.created_at and (rollouts / "played").exists()
    config.reward.scale = 0.5
    assert open_manifest(config).config["reward.scale"] == 0.5
    assert not rollouts.exists()  # an episode played under the old options is never mixed with new ones
    assert (RunPaths.of(config.run.dir).root / "superseded_1/rollouts/iter_0000/played").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"config": 5},
        {"finished": [5]},
        {"finished": {}},
        {"seed": "x"},
        {"start_model": []},
        {"start_model": {"a": 1}},
        {"unknown": 1},
    ]
    + [{"finished": [{**asdict(finished()), **odd}]} for odd in ({"iteration": "0"}, {"phase": None}, {"inputs": 1})],
)
def test_odd_entries_are_a_damaged_manifest(config, change):
    _, path = written(config)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(IncompleteError, match="no readable manifest"):
        open_manifest(config)


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


def test_a_run_from_before_an_option_existed_has_its_default(config):
    manifest, path = written(config)
    del manifest.config["train.critic.value_clip"], manifest.config["train.router_dtype"]
    manifest.write(path)
    assert open_manifest(config).keys == {(0, "rollout")}
    config.train.critic.value_clip = 0.5
    with pytest.raises(MismatchError, match="train.critic.value_clip: the run has 0.0, now 0.5"):
        open_manifest(config)


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
    manifest = new_manifest(config)
    assert "numpy" in manifest.environments[0]["packages"]
    assert manifest.seed == config.run.seed
