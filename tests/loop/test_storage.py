import os
import shutil

import pytest

from megatron_t1.errors import T1Error
from megatron_t1.loop.manifest import new_manifest
from megatron_t1.loop.space import expected_bytes, require_space
from megatron_t1.loop.steps import Step
from megatron_t1.loop.storage import retire, sweep
from megatron_t1.manifest import FinishedStep, Manifest
from megatron_t1.paths import RunPaths


def manifest_after(config, policies, evaluated=()):
    """One warm-up iteration, then `policies` complete iterations; the run has as many at least."""
    config.loop.iterations = max(config.loop.iterations, policies)
    manifest = new_manifest(config)
    keys = [(0, "rollout"), (0, "critic")]
    for policy in range(policies):
        keys += [(policy + 1, phase) for phase in ("rollout", "critic", "actor", "export")]
    keys += [(policy + 1 if policy else 0, "evaluation") for policy in evaluated]
    manifest.finished = [FinishedStep(*key, "0" * 64, "l", {}, 1.0, 1, 1, 1, 0.0) for key in keys]
    return manifest


def make(config, policies):
    paths = RunPaths.of(config.run.dir)
    for version in range(1, policies + 1):
        paths.checkpoint("actor", version).mkdir(parents=True)
        (paths.root / "hf" / f"iter_{version:04d}").mkdir(parents=True)
    for version in range(1, policies + 2):
        paths.checkpoint("critic", version).mkdir(parents=True)
    return paths


def left(paths, *parts):
    return [int(entry.name[-4:]) for entry in sorted(paths.root.joinpath(*parts).iterdir())]


def test_newest_and_newest_evaluated_are_kept(config):
    paths = make(config, 6)
    retire(config, manifest_after(config, 6, evaluated=[0, 2, 3]))
    assert left(paths, "checkpoints", "actor") == [3, 5, 6]
    assert left(paths, "checkpoints", "critic") == [4, 6, 7]
    assert left(paths, "hf") == [2, 3, 5, 6]


@pytest.mark.parametrize("policies", [1, 2, 5])
def test_what_the_next_step_reads_is_never_deleted(config, policies):
    config.train.keep_checkpoints = 1
    paths = make(config, policies)
    retire(config, manifest_after(config, policies))
    assert left(paths, "checkpoints", "actor") == [policies]
    assert left(paths, "checkpoints", "critic") == [policies + 1]
    assert left(paths, "hf") == [policies]


@pytest.mark.parametrize(
    ("unfinished", "actors", "critics", "exports"),
    [
        ([(3, "export")], [2, 3], [4], [2]),  # actor 3 can be repeated from actor 2
        ([(3, "actor"), (3, "export")], [2], [3, 4], [2]),  # critic 4 can be repeated from critic 3
        ([(3, "critic"), (3, "actor"), (3, "export")], [2], [3], [2]),
    ],
)
def test_what_a_repeated_step_reads_is_kept(config, unfinished, actors, critics, exports):
    config.train.keep_checkpoints = 1
    manifest = manifest_after(config, 3)
    manifest.finished = [step for step in manifest.finished if step.key not in unfinished]
    paths = make(config, 3)
    for role, newest in (("actor", actors[-1]), ("critic", critics[-1])):
        for version in range(newest + 1, 5):
            if paths.checkpoint(role, version).exists():
                paths.checkpoint(role, version).rmdir()
    if (3, "export") in unfinished:
        (paths.root / "hf" / "iter_0003").rmdir()
    retire(config, manifest)
    assert left(paths, "checkpoints", "actor") == actors
    assert left(paths, "checkpoints", "critic") == critics
    assert left(paths, "hf") == exports


def test_unrecorded_newer_versions_and_foreign_names_stay(config):
    paths = make(config, 3)
    (paths.checkpoint("actor", 1).parent / "notes").mkdir()
    retire(config, manifest_after(config, 1))
    assert sorted(entry.name for entry in (paths.root / "checkpoints" / "actor").iterdir()) == [
        "iter_0001", "iter_0002", "iter_0003", "notes",
    ]  # fmt: skip


def rollouts(config, policies):
    paths = make(config, policies)
    for iteration in range(policies + 1):
        paths.rollouts(iteration).mkdir(parents=True)
        paths.values(iteration).mkdir(parents=True)
        (paths.rollouts(iteration) / "a.shard.safetensors").touch()
    return paths


def test_all_rollouts_stay_unless_the_options_say_otherwise(config):
    paths = rollouts(config, 4)
    retire(config, manifest_after(config, 4))
    assert left(paths, "rollouts") == left(paths, "values") == [0, 1, 2, 3, 4]


def test_newest_rollouts_stay_with_values_and_the_exports_that_sampled_them(config):
    config.loop.keep_rollouts, config.loop.keep_exports = 3, 1
    paths, manifest = rollouts(config, 4), manifest_after(config, 4)
    retire(config, manifest)
    assert left(paths, "rollouts") == left(paths, "values") == [2, 3, 4]
    assert left(paths, "hf") == [1, 2, 3, 4]  # rollout 2 was sampled by policy 1: its audit scores it again
    kept = Manifest.read(paths.manifest)
    assert {"rollouts/iter_0000", "values/iter_0001", "checkpoints/actor/iter_0001"} <= set(kept.retired)


@pytest.mark.parametrize(("keep_evaluated", "stay"), [(0, [1, 2, 4, 5]), (1, [2, 4, 5]), (5, [1, 2, 4, 5])])
def test_exports_of_evaluated_policies(config, keep_evaluated, stay):
    config.loop.keep_evaluated = keep_evaluated
    paths = make(config, 5)
    retire(config, manifest_after(config, 5, evaluated=[1, 2]))
    assert left(paths, "hf") == stay


def test_rollouts_that_a_step_still_has_to_read_stay(config):
    config.loop.keep_rollouts = 1
    paths, manifest = rollouts(config, 3), manifest_after(config, 3)
    manifest.finished.append(FinishedStep(4, "rollout", "0" * 64, "l", {}, 1.0, 1, 1, 1, 0.0))
    paths.rollouts(4).mkdir()
    retire(config, manifest)
    assert left(paths, "rollouts") == [4]


def test_rollouts_of_a_step_that_can_be_repeated_stay(config):
    """Nobody has exported the actor of iteration 3 (somebody played the next rollout by hand)."""
    config.loop.keep_rollouts = 1
    paths, manifest = rollouts(config, 4), manifest_after(config, 3)
    manifest.finished = [step for step in manifest.finished if step.key != (3, "export")]
    manifest.finished.append(FinishedStep(4, "rollout", "0" * 64, "l", {}, 1.0, 1, 1, 1, 0.0))
    retire(config, manifest)
    assert left(paths, "rollouts") == left(paths, "values") == [3, 4]


@pytest.mark.parametrize("moment", ["recorded", "renamed", "half deleted"])
def test_killed_while_it_deletes_the_next_start_ends_it(config, moment, monkeypatch):
    config.loop.keep_rollouts = 1
    paths, manifest = rollouts(config, 4), manifest_after(config, 4)

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    def half(path):
        next(path.iterdir(), path / "nothing").unlink(missing_ok=True)
        raise Killed

    what = {"recorded": ("os.rename", die), "renamed": ("shutil.rmtree", die), "half deleted": ("shutil.rmtree", half)}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(*what[moment])
        retire(config, manifest)
    manifest = Manifest.read(paths.manifest)  # what is gone is known to be: it was recorded first
    assert "rollouts/iter_0000" in manifest.retired
    sweep(paths.root)
    retire(config, manifest)
    assert left(paths, "rollouts") == [4]
    assert not [path for path in paths.root.rglob("*") if path.name.endswith(".deleting")]


def test_what_more_may_stay_after_all_is_not_retired(config, monkeypatch):
    """Killed after it was recorded, and started again with an option that keeps it."""
    config.loop.keep_exports = 1
    paths, manifest = make(config, 4), manifest_after(config, 4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        retire(config, manifest)
    config.loop.keep_exports = config.train.keep_checkpoints = 3
    manifest = Manifest.read(paths.manifest)
    assert {"hf/iter_0001", "hf/iter_0003"} <= set(manifest.retired)
    retire(config, manifest)
    assert left(paths, "hf") == [2, 3, 4]
    for known in (manifest, Manifest.read(paths.manifest)):
        assert "hf/iter_0001" in known.retired and "hf/iter_0003" not in known.retired
        assert (4, "evaluation") not in known.settled and (2, "evaluation") in known.settled


def test_what_killed_writers_left_is_swept_and_nothing_else(config):
    paths = rollouts(config, 1)
    half = [paths.root / "config.yaml.123.partial", paths.rollouts(0) / "a.safetensors.45.partial",
            paths.phase(0, "rollout") / "result.json.6.partial"]  # fmt: skip
    directories = [paths.rollouts(7).with_name("iter_0007.deleting"), paths.root / "critic.partial",
                   paths.checkpoint("actor", 2).with_name("iter_0002.replaced"),
                   paths.hf(3, "").with_name("iter_0003.partial")]  # fmt: skip
    kept = [paths.rollouts(0) / "a.partial", paths.rollouts(0) / "x.1.partial.txt", paths.root / "mine.deleting/a",
            paths.root / "iter_2.partial/a", paths.root / "partial/a"]  # fmt: skip
    for path in [*half, *kept, *(directory / "b" for directory in directories)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert sorted(sweep(paths.root)) == sorted([*half, *directories])
    assert all(path.exists() for path in kept) and not any(path.exists() for path in [*half, *directories])


def test_room_of_a_first_execution_is_estimated_from_the_model(config):
    manifest = new_manifest(config)
    manifest.start_model = {"a.safetensors": {"size": 4000}, "b.safetensors": {"size": 400}, "config.json": {"size": 9}}
    config.rollout.tasks_per_iteration, config.rollout.samples_per_task, config.rollout.max_context = 2, 3, 100
    tokens, routes = 600, 4 * 4  # layers x top-k, one byte each
    assert expected_bytes(config, manifest, "rollout") == tokens * (24 + routes)
    assert expected_bytes(config, manifest, "export") == 4400
    assert expected_bytes(config, manifest, "actor") == 3 * 4400  # float32 weights and two moments
    config.model.dtype = "bfloat16"
    assert expected_bytes(config, manifest, "actor") == 7 * 4400  # master weights as well
    assert expected_bytes(config, manifest, "critic") == 7 * 4400 + 12 * tokens
    manifest.finished.append(FinishedStep(1, "actor", "0" * 64, "l", {}, 1.0, 1, 1, 1000, 0.0))
    assert expected_bytes(config, manifest, "actor") == 1200


def test_a_file_system_without_inodes_is_named(config, monkeypatch):
    class Full:
        f_files, f_favail = 10_000, 7

    os.makedirs(config.run.dir)
    monkeypatch.setattr("os.statvfs", lambda path: Full)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(2**50, 0, 2**50))
    with pytest.raises(T1Error, match="too few free inodes for iteration 0: rollout: 7, about"):
        require_space(config, new_manifest(config), Step(0, ("rollout",)))


def test_what_cannot_be_deleted_ends_no_training(config, monkeypatch, capsys):
    """On a network file system a file that another node's process has open leaves a name in its directory."""
    paths, manifest = make(config, 4), manifest_after(config, 4)
    kept = left(paths, "checkpoints", "actor")
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(OSError(39, "Directory not empty")))
        retire(config, manifest)
    assert "can't be deleted yet: Directory not empty" in capsys.readouterr().err
    assert left(paths, "checkpoints", "actor") == kept == [1, 2, 3, 4]
    retire(config, manifest)
    assert left(paths, "checkpoints", "actor") == [3, 4]


def test_what_is_retired_is_known_also_where_the_newest_manifest_is_lost(config):
    paths, manifest = make(config, 4), manifest_after(config, 4)
    manifest.write(paths.manifest)
    retire(config, manifest)
    paths.manifest.unlink()
    assert "checkpoints/actor/iter_0001" in manifest.retired == Manifest.read(paths.manifest).retired
