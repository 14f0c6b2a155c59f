import json
import os
import random
from dataclasses import asdict

import pytest

from megatron_t1 import sealed
from megatron_t1.config.compose import flatten
from megatron_t1.errors import IncompleteError, MismatchError
from megatron_t1.loop.manifest import config_digest, is_free, new_manifest, open_manifest
from megatron_t1.loop.position import contract_of, position_of
from megatron_t1.manifest import FinishedStep, Manifest, predecessor
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult


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
    sealed.write(path, {**sealed.read(path), **change})
    with pytest.raises(IncompleteError, match="no readable manifest"):
        open_manifest(config)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', "null"])
def test_damaged_manifest_is_never_taken_for_an_empty_one(config, damage):
    _, path = written(config)
    path.write_text(damage)
    with pytest.raises(IncompleteError, match="manifest"):
        open_manifest(config)


def grown(config):
    """A manifest with two steps, whose predecessor has the first one."""
    manifest, path = written(config)
    manifest.finished.append(finished(0, "critic"))
    manifest.write(path)
    return manifest, path


@pytest.mark.parametrize("damage", [b"", b"{", b"null", None])
def test_a_damaged_or_lost_manifest_gives_way_to_the_one_before_and_says_so(config, capsys, damage):
    _, path = grown(config)
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    manifest = open_manifest(config)
    assert manifest.keys == {(0, "rollout")}
    assert "going on from manifest.previous.json" in capsys.readouterr().err
    manifest.write(path)  # what was damaged doesn't become anybody's predecessor
    assert Manifest.read_exactly(predecessor(path)).keys == Manifest.read_exactly(path).keys == {(0, "rollout")}


def test_no_bit_of_a_manifest_turns_unnoticed(config):
    manifest, path = grown(config)
    good, before = path.read_bytes(), {(0, "rollout")}
    for position in random.Random(0).sample(range(8 * len(good)), 200):
        damaged = bytearray(good)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            assert Manifest.read(path).keys == before
        except IncompleteError as error:
            assert "format version" in str(error)
        except AssertionError:  # a space has become another one
            assert json.loads(damaged) == json.loads(good) and Manifest.read(path) == manifest


def test_a_step_that_is_taken_back_has_no_predecessor_to_come_back_from(config):
    manifest, path = grown(config)
    manifest.finished.pop()
    manifest.write_anew(path)
    assert Manifest.read(path).keys == {(0, "rollout")} and not predecessor(path).exists()


def test_a_write_that_is_killed_leaves_both(config):
    """After the predecessor was made and before the new manifest took its name, the file has both names."""
    manifest, path = grown(config)
    predecessor(path).unlink()
    os.link(path, predecessor(path))
    manifest.finished.append(finished(1, "rollout"))
    manifest.write(path)
    assert (
        len(Manifest.read_exactly(path).finished) == 3 and len(Manifest.read_exactly(predecessor(path)).finished) == 2
    )
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["manifest.json", "manifest.previous.json"]


def test_unknown_version_is_refused(config):
    _, path = written(config)
    sealed.write(path, {**sealed.read(path), "version": 99})
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
    for key in ("train.actor.lr", "run.seed", "reward.scale", "rollout.temperature", "model.path",
                "loop.warmup_iterations"):  # fmt: skip
        assert not is_free(key)
    for key in ("layout.expert", "train.critic.nonfinite", "train.actor.checkpoint_every", "cluster.launcher"):
        assert is_free(key)


def test_checkpoints_without_a_manifest_are_not_started_over(config):  # rllm#897
    RunPaths.of(config.run.dir).checkpoint("critic", 1).mkdir(parents=True)
    with pytest.raises(IncompleteError, match="no manifest"):
        open_manifest(config)


def test_versions_and_revision_are_recorded(config):
    manifest = new_manifest(config)
    assert "numpy" in manifest.environments[0]["packages"]
    assert manifest.seed == config.run.seed


def test_a_step_says_where_the_training_stands(config):
    played = PhaseResult("rollout", 2, details={"contract": {"temperature": 1.0}})
    assert position_of(played, config) == {"seed": 0, "policy": 1, "tasks_from": 2 * 128, "tasks_to": 3 * 128}
    trained = PhaseResult("actor", 2, {"actor/optimizer_steps": 4.0, "actor/learning_rate": 3e-4, "actor/ratio": 1.0})
    assert position_of(trained, config) == {"seed": 0, "version": 2, "optimizer_steps": 4.0, "learning_rate": 3e-4}
    digest, contract = contract_of(played)
    assert contract == {"temperature": 1.0} and len(digest) == 64 and contract_of(trained) == ("", {})
