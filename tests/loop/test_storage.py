import pytest

from megatron_t1.loop.manifest import new_manifest
from megatron_t1.loop.storage import retire
from megatron_t1.manifest import FinishedStep
from megatron_t1.paths import RunPaths


def manifest_after(config, policies, evaluated=()):
    """One warm-up iteration, then `policies` complete iterations."""
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
