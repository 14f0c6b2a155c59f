"""`t1 patch` as a user types it."""

from __future__ import annotations

import pytest

from megatron_t1.cli import main
from megatron_t1.patching.record import RECORD
from megatron_t1.patching.transaction import JOURNAL
from tests.patching.conftest import ROUTER, contents, make_tree
from tests.patching.test_transaction import interrupted


@pytest.fixture
def declared(patches, tmp_path):
    return str(tmp_path / "patches")


def t1(capsys, *words: str) -> tuple[int, str]:
    status = main(["patch", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_status_diff_apply_revert(tree, declared, capsys):
    before = contents(tree.root)
    options = ["--checkout", str(tree.root), "--patches", declared]
    status, said = t1(capsys, "status", *options)
    assert status == 0 and "megatron-core 0.15.1" in said and said.count("applicable") == 3
    status, said = t1(capsys, "diff", *options, "--only", "scale")
    assert status == 0 and said.count("\n+") == 2 and "2 * ([value / total for value in chosen])" in said
    status, said = t1(capsys, "apply", *options, "--dry-run")
    assert status == 0 and "would apply: ask, scale, training" in said and contents(tree.root) == before
    status, said = t1(capsys, "apply", *options, "--only", "ask", "--only", "scale")
    assert status == 0 and "applied: ask, scale\n  megatron/core/router.py" in said
    status, said = t1(capsys, "apply", *options, "--only", "ask")
    assert status == 0 and "nothing to do" in said
    assert (tree.root / RECORD).is_file()
    status, said = t1(capsys, "revert", *options)
    assert status == 0 and "reverted: ask, scale" in said and contents(tree.root) == before


def test_a_conflict_ends_with_status_1_and_shows_both_sides(tmp_path, declared, capsys):
    root = make_tree(tmp_path / "fork", router=ROUTER.replace("[:count]", "[: count + 1]"))
    options = ["--checkout", str(root), "--patches", declared]
    status, said = t1(capsys, "status", *options)
    assert status == 1 and "conflict" in said
    status, said = t1(capsys, "apply", *options)
    assert status == 1 and "nothing was applied" in said
    assert "expected: 1 place: the nested function that takes the largest" in said and "found:" in said


@pytest.mark.parametrize(
    ("words", "expected", "text"),
    [
        ([], 2, "required: action, --checkout"),
        (["undo", "--checkout", "."], 2, "invalid choice"),
        (["status", "--checkout", "CHECKOUT", "--only", "nothing"], 1, "there is no patch nothing"),
        (["status", "--checkout", "/nowhere/at/all"], 1, "no such directory"),
        (["apply", "--checkout", "CHECKOUT", "--patches", "/nowhere"], 1, "no patches in"),
    ],
)
def test_wrong_words(tree, capsys, words, expected, text):
    status, said = t1(capsys, *[str(tree.root) if word == "CHECKOUT" else word for word in words])
    assert status == expected and text in said


def test_help_lists_the_actions(capsys):
    status, said = t1(capsys, "--help")
    assert status == 0
    for word in ("status", "diff", "apply", "revert", "--only", "--dry-run"):
        assert word in said


def lost_record(tree, declared, capsys):
    options = ["--checkout", str(tree.root), "--patches", declared]
    assert t1(capsys, "apply", *options)[0] == 0
    (tree.root / RECORD).unlink()
    return options


def test_lines_of_ours_without_a_record_are_recognised(tree, declared, capsys):
    options = lost_record(tree, declared, capsys)
    patched = contents(tree.root)
    status, said = t1(capsys, "revert", *options)
    assert status == 1 and f"applied by this tool, but {RECORD}" in said and "nothing to do" not in said
    assert "git checkout -- megatron/" in said and contents(tree.root) == patched
    status, said = t1(capsys, "status", *options)
    assert status == 0 and "there" in said and f"{RECORD} is missing" in said
    assert said.count("applied by this tool") == 2 and said.count("by hand") == 1  # "scale" leaves no comment


def test_a_tree_without_our_lines_has_nothing_to_revert(tree, declared, capsys):
    status, said = t1(capsys, "revert", "--checkout", str(tree.root), "--patches", declared)
    assert status == 0 and "nothing to do" in said


def test_half_applied_patches_arent_there(tree, patches, declared, tmp_path, capsys):
    options = ["--checkout", str(tree.root), "--patches", declared]
    before = contents(tree.root)
    interrupted(tree, patches, tmp_path)
    status, said = t1(capsys, "status", *options)
    assert status == 1 and "there  " not in said and said.count("interrupted") == 3 and "cut off" in said
    assert t1(capsys, "revert", *options)[0] == 0 and contents(tree.root) == before
    assert t1(capsys, "status", *options)[0] == 0


@pytest.mark.parametrize("damage", ["", "[]", "5", "null", '{"pid": 1, "record_sha256": "1", "files": {"a": 1}}'])
def test_a_damaged_journal_has_exit_status_1(tree, patches, declared, tmp_path, capsys, damage):
    interrupted(tree, patches, tmp_path)
    (tree.root / JOURNAL).write_text(damage)
    status, said = t1(capsys, "status", "--checkout", str(tree.root), "--patches", declared)
    assert status == 1 and "there  " not in said and "journal of an interrupted change is damaged" in said
    assert "bring the files back with git, then delete the journal" in said
