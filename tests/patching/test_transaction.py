"""Whatever happens while files are written, a checkout has all of a change or none of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_t1.patching import operations, transaction
from megatron_t1.patching.errors import PatchError
from megatron_t1.patching.record import RECORD
from megatron_t1.patching.transaction import JOURNAL, LOCK
from megatron_t1.patching.tree import Tree
from tests.patching.conftest import contents, declarations, make_patches, make_tree

ROOT = Path(__file__).resolve().parents[2]

# Dies at the given system call (of those that change the disk), counted over the whole command.
CHILD = """
    import os, signal, sys
    from megatron_t1.patching import operations
    from megatron_t1.patching.declaration import load_patches
    from megatron_t1.patching.tree import Tree

    action, checkout, declared, stop = *sys.argv[1:4], int(sys.argv[4])
    calls = 0

    def counted(function):
        def call(*arguments, **keys):
            global calls
            calls += 1
            if calls == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keys)
        return call

    for name in ("replace", "fsync", "unlink", "chmod", "open"):
        setattr(os, name, counted(getattr(os, name)))
    tree, patches = Tree(checkout), load_patches(declared)
    getattr(operations, action)(tree, patches)
    print(calls)
"""


def child(action: str, checkout: Path, declared: Path, stop: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), action, str(checkout), str(declared), str(stop)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def files(root: Path) -> dict[str, bytes]:
    """The tree without the tool's own files."""
    return {name: data for name, data in contents(root).items() if not name.startswith(".t1-patches")}


@pytest.mark.slow
@pytest.mark.parametrize("action", ["apply", "revert"])
def test_killed_at_every_write(tmp_path, action):
    patches = make_patches(tmp_path / "patches", **declarations())
    stop = 0
    while True:
        stop += 1
        tree = Tree(make_tree(tmp_path / f"{action}-{stop}"))
        pristine = files(tree.root)
        operations.apply(tree, patches)
        patched = files(tree.root)
        if action == "apply":
            operations.revert(tree, patches)
        done = child(action, tree.root, tmp_path / "patches", stop)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        operations.apply(tree, patches, ["training"]) if action == "apply" else operations.revert(tree, patches)
        left = {name for name in contents(tree.root) if name.startswith(".t1-patches") or name.endswith(".partial")}
        if action == "revert":
            assert files(tree.root) == pristine and not left
            continue
        assert left == {RECORD}
        names = {finding.name for finding in operations.status(tree, patches) if finding.state == "applied"}
        assert names in ({"training"}, {"ask", "scale", "training"})  # the killed one took effect wholly or not at all
        assert (files(tree.root) == patched) == (len(names) == 3)
        operations.revert(tree, patches)
        assert contents(tree.root) == pristine
    assert stop > 8 and int(done.stdout) < stop


@pytest.fixture
def failing(monkeypatch):
    """Let the n-th write of a file fail as on a full disk."""

    def start(at: int) -> None:
        write, calls = transaction._write, 0

        def failing_write(tree, file, data):
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(28, "No space left on device", file)
            write(tree, file, data)

        monkeypatch.setattr(transaction, "_write", failing_write)

    return start


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_full_disk_leaves_nothing_behind(tree, patches, failing, at):
    before = contents(tree.root)
    failing(at)
    with pytest.raises(OSError, match="No space left"):
        operations.apply(tree, patches)
    assert contents(tree.root) == before


def test_a_file_that_changes_meanwhile_is_refused(tree, patches, monkeypatch):
    loop = tree.path("megatron/training/loop.py")
    write = transaction._write

    def edited_meanwhile(of, file, data):
        if file == JOURNAL and data is not None:
            loop.write_text("edited = 1\n")
        write(of, file, data)

    before = contents(tree.root)
    monkeypatch.setattr(transaction, "_write", edited_meanwhile)
    with pytest.raises(PatchError, match="changed while it was about to be patched"):
        operations.apply(tree, patches)
    assert contents(tree.root) == before | {"megatron/training/loop.py": b"edited = 1\n"}


def interrupted(tree, patches, tmp_path) -> None:
    """Leave the checkout as a process that was killed before the record was written."""
    plan, _ = operations.apply(tree, patches, dry_run=True)
    journal = {"pid": 1, "record_sha256": "0" * 64, "files": {}}
    for file, (before, after) in plan.changes.items():
        journal["files"][file] = {
            "before_zlib_base64": transaction.pack(before),
            "before_sha256": transaction.sha256(before),
            "after_sha256": transaction.sha256(after),
        }
        tree.path(file).write_bytes(after)
    (tree.root / JOURNAL).write_text(json.dumps(journal))


def test_an_interrupted_change_is_reported_and_taken_back(tree, patches, tmp_path):
    before = contents(tree.root)
    interrupted(tree, patches, tmp_path)
    assert operations.interrupted(tree)
    for read_only in (operations.diff, lambda *a: operations.apply(*a, dry_run=True)):
        with pytest.raises(PatchError, match="was cut off"):
            read_only(tree, patches)
    operations.revert(tree, patches)
    assert contents(tree.root) == before


def test_an_edit_after_an_interrupted_change_isnt_overwritten(tree, patches, tmp_path):
    interrupted(tree, patches, tmp_path)
    tree.path("megatron/training/loop.py").write_text("edited = 1\n")
    with pytest.raises(PatchError, match="edited after a change of it was cut off"):
        operations.apply(tree, patches)
    assert tree.read("megatron/training/loop.py") == b"edited = 1\n"


@pytest.mark.parametrize("damage", ["", "{}", '{"pid": "x", "record_sha256": "1", "files": {}}'])
def test_a_damaged_journal_is_named(tree, patches, damage):
    (tree.root / JOURNAL).write_text(damage)
    with pytest.raises(PatchError, match="journal of an interrupted change is damaged"):
        operations.apply(tree, patches)


def test_links_in_place_of_the_tools_own_files_arent_followed(tree, patches, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tree.root / LOCK).symlink_to(outside)
    with pytest.raises(OSError):
        operations.apply(tree, patches)
    (tree.root / LOCK).unlink()
    (tree.root / RECORD).symlink_to(outside)
    with pytest.raises(PatchError, match="leads out of the checkout"):
        operations.apply(tree, patches)
    assert outside.read_text() == "precious"


def test_a_left_lock_file_is_no_obstacle(tree, patches):
    (tree.root / LOCK).touch()
    operations.apply(tree, patches)
    assert not (tree.root / LOCK).exists()
