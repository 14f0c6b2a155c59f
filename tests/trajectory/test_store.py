"""The store: every trajectory exactly once at every moment, whatever is killed."""

from __future__ import annotations

import os

import pytest

from megatron_t1 import safetensors_header
from megatron_t1.errors import IncompleteError, T1Error
from megatron_t1.trajectory import record, tensorfile
from megatron_t1.trajectory.record import Verdict
from megatron_t1.trajectory.store import SHARD_SUFFIX, RolloutStore


def filled(make, directory, count=7):
    store = RolloutStore(directory)
    made = [make(f"task-{number}", seed=number) for number in range(count)]
    for trajectory in made:
        store.add(trajectory)
    return store, {trajectory.header.trajectory_id: trajectory.digest for trajectory in made}


def digests(store):
    return {trajectory.header.trajectory_id: trajectory.digest for trajectory in store}


def test_an_empty_store_has_nothing(tmp_path):
    store = RolloutStore(tmp_path / "none")
    assert store.ids() == [] and list(store) == [] and store.headers() == {} and "a" not in store
    store.seal()
    with pytest.raises(IncompleteError, match="no trajectory 'a'"):
        store.load("a")


def test_sealing_changes_files_but_not_content(make, tmp_path):
    store, expected = filled(make, tmp_path)
    before = [trajectory.header for trajectory in store]
    store.seal(shard_size=3)
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 3 and all(name.endswith(SHARD_SUFFIX) for name in names)
    for reader in (store, RolloutStore(tmp_path)):
        assert digests(reader) == expected and [t.header for t in reader] == before
        assert list(reader.headers()) == reader.ids() == sorted(expected)
        assert reader.load("task-3", verify=True).digest == expected["task-3"] and "task-3" in reader
    store.seal()
    assert sorted(os.listdir(tmp_path)) == names


def test_no_shard_has_a_longer_index_than_can_be_read(make, tmp_path, monkeypatch):
    """Verdicts of many checks, and a limit in the place of the format's 100 MB."""
    checks = {f"{number:03d}-{'n' * 80}": True for number in range(100)}
    made = [make(f"task-{number}", verdict=Verdict(100, 100, -1, trusted=True, checks=checks)) for number in range(9)]
    for module in (tensorfile, safetensors_header):
        monkeypatch.setattr(module, "MAX_HEADER_BYTES", 64_000)
    monkeypatch.setattr("megatron_t1.trajectory.store.INDEX_BYTES", 25_000)
    for directory, store in ((name, RolloutStore(tmp_path / name)) for name in ("one by one", "at once")):
        if directory == "at once":
            store.add_many(made)
        else:
            for trajectory in made:
                store.add(trajectory)
            store.seal()
        assert len(os.listdir(tmp_path / directory)) == 5  # two in each, and what is left
        assert digests(RolloutStore(tmp_path / directory)) == {t.header.trajectory_id: t.digest for t in made}


def test_a_file_that_nobody_could_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(T1Error, match="at most 1000 can be read"):
        tensorfile.write(tmp_path / "a.safetensors", {}, {"text": "n" * 1000})
    assert not os.listdir(tmp_path)


def test_add_many_writes_shards_at_once(make, tmp_path):
    store = RolloutStore(tmp_path)
    made = [make(f"demo-{number}", seed=number, routes=False) for number in range(5)]
    store.add_many(made, shard_size=2)
    assert len(os.listdir(tmp_path)) == 3
    assert digests(RolloutStore(tmp_path)) == {t.header.trajectory_id: t.digest for t in made}
    store.add_many(made, shard_size=2)  # repeated after a kill
    assert len(os.listdir(tmp_path)) == 3
    with pytest.raises(T1Error, match="'demo-9'"):
        store.add_many([make("demo-9"), make("demo-9", seed=1)])
    with pytest.raises(T1Error, match="'demo-1'"):
        store.add_many([make("demo-1", seed=77)])


@pytest.mark.parametrize("sealed", [False, True])
def test_an_id_is_taken_once(make, tmp_path, sealed):
    store, _ = filled(make, tmp_path, 2)
    if sealed:
        store.seal()
    names = sorted(os.listdir(tmp_path))
    store.add(make("task-1", seed=1))
    with pytest.raises(T1Error, match="already"):
        store.add(make("task-1", seed=5))
    assert len(store) == 2 and sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize(
    "bad", ["", "../x", "a/b", "/etc/x", ".hidden", "a\x00b", "a b", "x" * 201, "a.shard", "a.partial", "-x"]
)
def test_no_id_leaves_the_directory(make, tmp_path, bad):
    store = RolloutStore(tmp_path / "in")
    with pytest.raises(T1Error, match="trajectory id"):
        store.add(make("task-0", trajectory_id=bad))
    with pytest.raises(T1Error, match="trajectory id"):
        store.load(bad)
    assert not (tmp_path / "in").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", range(14))
def test_a_seal_killed_after_any_step_loses_and_repeats_nothing(make, tmp_path, monkeypatch, after):
    store, expected = filled(make, tmp_path, 5)
    steps = 0

    def step(real):
        def counted(*arguments, **options):
            nonlocal steps
            if steps == after:
                raise Killed
            steps += 1
            result = real(*arguments, **options)
            observed = RolloutStore(tmp_path)
            assert digests(observed) == expected and list(observed.headers()) == sorted(expected)
            return result

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "unlink", step(type(tmp_path).unlink))
        patch.setattr(tensorfile, "write", step(tensorfile.write))
        try:
            store.seal(shard_size=2)
        except Killed:
            pass
    again = RolloutStore(tmp_path)
    assert digests(again) == expected
    again.seal(shard_size=2)
    assert digests(RolloutStore(tmp_path)) == expected and not again._list_singles()


def test_a_reader_that_listed_before_the_seal_still_finds_everything(make, tmp_path, monkeypatch):
    store, expected = filled(make, tmp_path, 3)
    reader = RolloutStore(tmp_path)
    ids = reader.ids()
    store.seal()
    assert {name: reader.load(name).digest for name in ids} == expected
    stale = RolloutStore(tmp_path)
    monkeypatch.setattr(stale, "_list_singles", lambda: sorted(expected))
    assert list(stale.headers()) == sorted(expected)


def test_a_damaged_record_is_named_and_nothing_is_removed(make, tmp_path):
    store, _ = filled(make, tmp_path, 3)
    (tmp_path / "task-1.safetensors").write_bytes(b"short")
    with pytest.raises(IncompleteError) as error:
        store.seal()
    assert "task-1" in error.value.where and len(os.listdir(tmp_path)) == 3


def test_a_renamed_file_is_noticed(make, tmp_path):
    store, _ = filled(make, tmp_path, 2)
    os.rename(tmp_path / "task-0.safetensors", tmp_path / "other-0.safetensors")
    with pytest.raises(IncompleteError, match="holds trajectory 'task-0'"):
        store.load("other-0")


def test_written_files_carry_the_digests_of_their_content(make, tmp_path):
    from megatron_t1 import atomic

    store, _ = filled(make, tmp_path / "rollouts" / "iter_0000", 5)
    store.seal(shard_size=2)
    store.add(make("late-0"))
    for lister in (store, RolloutStore(store.directory)):
        files = lister.written_files(tmp_path)
        assert len(files) == 4
        for file in files:
            assert file.sha256 == atomic.sha256_file(tmp_path / file.path)
            assert file.size == (tmp_path / file.path).stat().st_size


def test_thousands_of_small_records_hold_no_file_descriptors(make, tmp_path):
    store, _ = filled(make, tmp_path, 60)
    before = len(os.listdir("/proc/self/fd"))
    kept = list(store)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 and len(kept) == 60


def test_partial_files_are_invisible(make, tmp_path):
    store, expected = filled(make, tmp_path, 1)
    (tmp_path / "task-5.safetensors.77.partial").write_bytes(b"half")
    assert store.ids() == sorted(expected)
    assert record.load_header(tmp_path / "task-0.safetensors") == store.headers()["task-0"]


def change_logprob(path):
    """Another value in the first stored log-prob; the file stays a valid safetensors file."""
    name = next(name for name in tensorfile.TensorFile(path).entries if name.endswith("logprobs"))
    entry = tensorfile.TensorFile(path).entries[name]
    content = bytearray(path.read_bytes())
    content[entry.start] ^= 1
    path.write_bytes(content)


def test_a_changed_record_is_never_sealed(tmp_path, make):
    path = RolloutStore(tmp_path).add(make("task-0"))
    change_logprob(path)
    with pytest.raises(IncompleteError, match="digest"):
        RolloutStore(tmp_path).seal()
    assert path.exists()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_changed_record_gets_no_new_digest(tmp_path, make, sealed):
    store = RolloutStore(tmp_path)
    store.add(make("task-0"))
    if sealed:
        store.seal()
    assert len(RolloutStore(tmp_path).written_files(tmp_path)) == 1
    change_logprob(next(tmp_path.glob("*.safetensors")))
    with pytest.raises(IncompleteError, match="digest"):
        RolloutStore(tmp_path).written_files(tmp_path)


def test_logs_beside_the_records_are_sealed_and_listed_with_them(make, tmp_path):
    from megatron_t1.trajectory.exchange import ExchangeLog
    from megatron_t1.trajectory.exchange_reader import read_exchange

    store = RolloutStore(tmp_path)
    store.add(make("a-0"))
    log = ExchangeLog(tmp_path)  # its writer is killed: never closed
    log.session("a-0", 0)
    store.seal()
    assert read_exchange(log.path).sealed
    names = [file.path for file in store.written_files(tmp_path)]
    assert log.path.name in names and len(names) == 2
    log.path.write_bytes(log.path.read_bytes()[:-20] + b"x" * 20)
    with pytest.raises(IncompleteError, match="damaged"):
        RolloutStore(tmp_path).written_files(tmp_path)


@pytest.mark.parametrize("place", ["a-0.safetensors", ""])
def test_a_record_sealed_between_two_looks_at_its_file_is_read_from_the_shard(tmp_path, make, monkeypatch, place):
    record = make("a-0")
    store = RolloutStore(tmp_path)
    store.add(record)
    opened = tensorfile.TensorFile.__init__

    def sealing(self, path):
        opened(self, path)
        if not path.name.endswith(".shard.safetensors"):
            monkeypatch.setattr(tensorfile.TensorFile, "__init__", opened)
            RolloutStore(tmp_path).seal()

    monkeypatch.setattr(tensorfile.TensorFile, "__init__", sealing)
    found = store.load_from(place, "a-0", verify=True) if place else store.load("a-0")
    assert found.digest == record.digest
