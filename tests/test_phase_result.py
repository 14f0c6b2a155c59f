"""What a phase wrote is what the next one reads."""

from __future__ import annotations

import pytest

from megatron_t1 import atomic
from megatron_t1.errors import IncompleteError
from megatron_t1.paths import RunPaths
from megatron_t1.phase import SMALL_BYTES, PhaseResult, WrittenFile, missing_outputs, require_recorded


def flip(path, position=-1):
    """Change one bit of a file and nothing else."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.fixture
def paths(tmp_path):
    """A run whose rollout left three files, the last one large."""
    paths = RunPaths.of(tmp_path)
    directory = paths.rollouts(0)
    directory.mkdir(parents=True)
    sizes = {"a.safetensors": 100, "b.safetensors": 200, "large.safetensors": SMALL_BYTES + 1}
    for name, size in sizes.items():
        (directory / name).write_bytes(bytes(size))
    outputs = [
        WrittenFile(str((directory / name).relative_to(paths.root)), size, atomic.sha256_file(directory / name))
        for name, size in sizes.items()
    ]
    PhaseResult("rollout", 0, outputs=outputs).write(paths.phase(0, "rollout"))
    return paths


def test_untouched_files_pass(paths):
    require_recorded(paths, 0, "rollout", paths.rollouts(0))
    assert missing_outputs(PhaseResult.read(paths.phase(0, "rollout")), paths.root, digests=True) == []


@pytest.mark.parametrize("name", ["a.safetensors", "large.safetensors"])
def test_one_bit_is_noticed_and_both_digests_are_named(paths, name):
    recorded = atomic.sha256_file(paths.rollouts(0) / name)
    flip(paths.rollouts(0) / name)
    with pytest.raises(IncompleteError) as caught:
        require_recorded(paths, 0, "rollout", paths.rollouts(0))
    found = atomic.sha256_file(paths.rollouts(0) / name)
    for text in (f"iter_0000/{name}", found[:16], recorded[:16], "the rollout phase of iteration 0"):
        assert text in caught.value.problem
    assert caught.value.remedy


def test_missing_short_and_added_files_are_named(paths):
    directory = paths.rollouts(0)
    (directory / "a.safetensors").unlink()
    (directory / "b.safetensors").write_bytes(b"short")
    (directory / "new.safetensors").touch()
    with pytest.raises(IncompleteError) as caught:
        require_recorded(paths, 0, "rollout", directory)
    for text in ("a.safetensors: missing", "b.safetensors: 5 bytes, expected 200", "new.safetensors: not among"):
        assert text in caught.value.problem


def test_processes_that_share_the_reading_read_everything(paths):
    flip(paths.rollouts(0) / "b.safetensors")
    noticed = 0
    for part in range(2):
        try:
            require_recorded(paths, 0, "rollout", paths.rollouts(0), part=part, parts=2)
        except IncompleteError:
            noticed += 1
    assert noticed == 1


def test_without_a_result_or_a_recorded_file_nothing_is_read(paths):
    with pytest.raises(IncompleteError, match="no readable phase result"):
        require_recorded(paths, 1, "rollout", paths.rollouts(1))
    with pytest.raises(IncompleteError, match="no file was recorded"):
        require_recorded(paths, 0, "rollout", paths.values(0))


def test_the_loop_compares_the_content_of_small_files_only(paths):
    result = PhaseResult.read(paths.phase(0, "rollout"))
    flip(paths.rollouts(0) / "large.safetensors")
    assert missing_outputs(result, paths.root) == []
    flip(paths.rollouts(0) / "a.safetensors")
    assert ["a.safetensors: its SHA-256" in line for line in missing_outputs(result, paths.root)] == [True]
    assert len(missing_outputs(result, paths.root, digests=True)) == 2
