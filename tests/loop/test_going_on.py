"""A run that is started again with other options, other versions, or with its start model in another place."""

import collections
import functools
import shutil
from dataclasses import replace

import pytest
from test_storage import left, make, manifest_after

from megatron_t1.errors import IncompleteError, MismatchError, T1Error
from megatron_t1.loop import manifest as binding
from megatron_t1.loop.headway import finished_keys
from megatron_t1.loop.manifest import is_free, open_manifest, require_config
from megatron_t1.loop.runner import opened
from megatron_t1.loop.space import require_space
from megatron_t1.loop.steps import all_steps, next_step
from megatron_t1.loop.storage import retire
from megatron_t1.manifest import Manifest
from megatron_t1.paths import RunPaths


def played(config, policies, **more):
    """A run directory after so many policies, and its manifest as it was written."""
    paths, manifest = make(config, policies), manifest_after(config, policies, **more)
    manifest.write(paths.manifest)
    return paths, manifest


def test_fewer_exports_make_room_for_the_next_step(config, monkeypatch):
    """What the error of a full disk advises is done before the disk is looked at again."""
    config.loop.iterations, config.loop.keep_exports = 5, 4
    paths, _ = played(config, 4, evaluated=[0])
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(0, 0, 2**40 if len(left(paths, "hf")) == 1 else 1))

    def start():
        with opened(config, say=lambda line: None) as runner:
            monkeypatch.setattr(runner, "execute", lambda step: require_space(config, runner.manifest, step) or 1 / 0)
            runner.run()

    with pytest.raises(T1Error, match="the disk is too full") as caught:
        start()
    assert "lower train.keep_checkpoints, loop.keep_rollouts or loop.keep_exports" in caught.value.remedy
    config.loop.keep_exports = 1
    with pytest.raises(ZeroDivisionError):  # there is room
        start()


def test_more_evaluations_are_of_policies_that_are_still_there(config):
    """loop.evaluate_every may be raised at any time: what can't be evaluated any more is said, and no step."""
    config.loop.iterations, config.loop.keep_exports = 4, 1
    paths, manifest = played(config, 3, evaluated=[0])
    retire(config, manifest)
    assert left(paths, "hf") == [3]
    config.loop.evaluate_every, said = 1, []
    assert next_step(config.loop, Manifest.read(paths.manifest).settled).keys == [(4, "evaluation"), (4, "rollout")]
    with opened(config, say=said.append) as runner:
        runner.execute = functools.partial(finish, runner.manifest)
        runner.run()
    assert said[0] == "not evaluated, since their exports were deleted (loop.keep_exports): policies 1, 2"
    assert {key for step in all_steps(config.loop) for key in step.keys} == {*runner.manifest.settled}
    assert finished_keys(config) >= {(2, "evaluation"), (3, "evaluation")}


def finish(manifest, step):
    manifest.finished += [replace(manifest.finished[0], iteration=i, phase=phase) for i, phase in step.keys]


def test_exports_of_policies_that_are_still_to_be_evaluated_stay(config):
    config.loop.iterations, config.loop.keep_exports, config.loop.evaluate_every = 5, 1, 2
    paths, manifest = played(config, 5, evaluated=[0])
    retire(config, manifest)
    assert left(paths, "hf") == [2, 4, 5]


@pytest.mark.parametrize(
    "option",
    ["train.capacity", "rollout.max_untrusted_share", "loop.evaluate_first", "train.replay.load",
     *(f"rollout.engine.{name}" for name in ("tensor_parallel", "kv_cache_bytes", "max_num_seqs", "block_size"))],
)  # fmt: skip
def test_what_errors_advise_and_what_takes_more_or_less_room_may_change(option):
    """As another layout may, which goes with other engines."""
    assert is_free(option)


def test_a_start_model_may_lie_elsewhere_and_must_be_the_same(config, tmp_path):
    for place in ("model", "moved"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text("{}")
    config.model.path = str(tmp_path / "model")
    paths, manifest = played(config, 1)
    shutil.rmtree(tmp_path / "model")
    config.model.path = str(tmp_path / "moved")
    assert open_manifest(config).keys == manifest.keys
    (tmp_path / "moved" / "config.json").write_text('{"a": 1}')
    with pytest.raises(MismatchError, match="the start model is not the one"):
        open_manifest(config)
    manifest.start_model = {}  # of a run that was begun before its files were recorded
    with pytest.raises(MismatchError, match="model.path: the run has"):
        require_config(manifest, config, paths.manifest)


@pytest.mark.parametrize("name", ["rollouts", "evaluations", "values", "hf", "checkpoints/critic"])
def test_work_without_a_manifest_is_not_started_over(config, name):  # rllm#897
    """Its records may have been played by other options, which nothing says any more."""
    (RunPaths.of(config.run.dir).root / name / "iter_0000").mkdir(parents=True)
    with pytest.raises(IncompleteError, match=f"no manifest says what it is: .*{name}"):
        open_manifest(config)


def test_other_versions_are_said(config, monkeypatch, capsys):
    _, manifest = played(config, 1)
    open_manifest(config)
    assert capsys.readouterr().err == ""
    found = {**manifest.environments[0], "packages": {"numpy": "9.9"}, "patches": {"replay": "f" * 64}}
    monkeypatch.setattr(binding, "environment", lambda: found)
    assert open_manifest(config).environments == [*manifest.environments, found]
    said = capsys.readouterr().err
    assert "since the run's last start" in said and "-> 9.9" in said and "patch replay none -> ffffffffffff" in said
