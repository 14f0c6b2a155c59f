"""Status, apply, revert and diff on a miniature tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from megatron_t1.patching import operations
from megatron_t1.patching.errors import DeclarationError, PatchError
from megatron_t1.patching.record import RECORD
from megatron_t1.patching.transaction import JOURNAL, LOCK, locked
from megatron_t1.patching.tree import Tree
from tests.patching.conftest import ROUTER, TRAINING, contents, declarations, make_patches, make_tree

ROUTER_FILE = "megatron/core/router.py"


def states(tree, patches) -> dict[str, str]:
    return {finding.name: finding.state for finding in operations.status(tree, patches)}


def run_router(tree):
    """The patched module, loaded from its text (our own, not Megatron's)."""
    namespace = {}
    exec(compile(tree.read(ROUTER_FILE), ROUTER_FILE, "exec"), namespace)
    return namespace


def the_router_asks(tree) -> None:
    """The patched router does what the patches say: scaled, and another object's choice where there is one."""
    module = run_router(tree)
    router = module["Router"](None)
    assert module["run"](router, [1.0, 1.0, 2.0]) == 2 * [2 / 4, 1 / 4, 1 / 4]

    class Asked:
        def take(self, values, count, default):
            return default(values, count - 1)

    router.asked = Asked()
    assert module["run"](router, [1.0, 1.0, 2.0]) == 2 * [2 / 3, 1 / 3]


def edit(tree, old: str, new: str) -> None:
    path = tree.path(ROUTER_FILE)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_apply_then_revert_gives_every_byte_back(tree, patches):
    before = contents(tree.root)
    assert states(tree, patches) == dict.fromkeys(("ask", "scale", "training"), "applicable")
    plan, _ = operations.apply(tree, patches)
    assert plan.patches == ("ask", "scale", "training")
    assert states(tree, patches) == dict.fromkeys(("ask", "scale", "training"), "applied")
    the_router_asks(tree)
    assert operations.revert(tree, patches).patches == ("ask", "scale", "training")
    assert contents(tree.root) == before


def test_apply_again_changes_nothing(tree, patches):
    operations.apply(tree, patches)
    before = contents(tree.root)
    plan, _ = operations.apply(tree, patches)
    assert (plan.patches, dict(plan.changes)) == ((), {})
    assert contents(tree.root) == before


def test_dry_run_and_diff_write_nothing(tree, patches):
    before = contents(tree.root)
    plan, _ = operations.apply(tree, patches, dry_run=True)
    shown = operations.diff(tree, patches)
    assert contents(tree.root) == before
    assert set(plan.changes) == {ROUTER_FILE, "megatron/training/loop.py"}
    operations.apply(tree, patches)
    assert operations.diff(tree, patches) == shown  # what was applied, against the files without it
    operations.revert(tree, patches, dry_run=True)
    assert states(tree, patches)["ask"] == "applied"


def test_the_diff_is_one_that_git_applies(tree, patches, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tree.root, copy)
    shown = operations.diff(tree, patches)
    operations.apply(tree, patches)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    subprocess.run(["git", "apply", "-p1"], input=shown, cwd=copy, text=True, check=True)
    assert (copy / ROUTER_FILE).read_bytes() == tree.read(ROUTER_FILE)


@pytest.mark.parametrize("odd", ["\f", "\u2028", "\u0085", "\v", "\x1c"])
@pytest.mark.parametrize("tool", [("git", "apply", "-p1"), ("patch", "-p1", "--quiet")])
def test_the_diff_is_one_for_lines_with_odd_characters_too(tmp_path, patches, odd, tool):
    if shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]} on this machine")
    router = ROUTER.replace("# the largest first", f"# the largest{odd} first").replace("# kept as", f"# kept{odd} as")
    tree, copy = Tree(make_tree(tmp_path / "odd", router=router)), tmp_path / "copy"
    shutil.copytree(tree.root, copy)
    shown = operations.diff(tree, patches)
    operations.apply(tree, patches)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    subprocess.run(tool, input=shown.encode(), cwd=copy, check=True)
    assert (copy / ROUTER_FILE).read_bytes() == tree.read(ROUTER_FILE)


def test_a_patch_with_another_declaration_than_applied_is_outdated(tree, patches, tmp_path, capsys):
    from megatron_t1.cli import main

    operations.apply(tree, patches)
    later = make_patches(tmp_path / "later", **{**declarations(), "training": TRAINING.replace("print(", "repr(")})
    found = {finding.name: finding for finding in operations.status(tree, later)}
    assert {name: finding.state for name, finding in found.items()} == {
        "ask": "applied",
        "scale": "applied",
        "training": "outdated",
    }
    assert "revert all patches, then apply again" in found["training"].detail
    assert "print(steps)" in operations.diff(tree, later, ["training"])  # what stands there
    command = ["--checkout", str(tree.root), "--patches", str(tmp_path / "later")]
    assert main(["patch", "apply", *command]) == 0
    assert "training  outdated" in (told := capsys.readouterr().out) and "nothing to do" in told
    assert main(["patch", "status", *command]) == 1
    operations.revert(tree, later)
    operations.apply(tree, later)
    assert b"repr(steps)" in tree.read("megatron/training/loop.py")
    assert states(tree, later)["training"] == "applied"


def test_one_patch_of_several_is_taken_back(tree, patches, tmp_path):
    only_scale = Tree(make_tree(tmp_path / "other"))
    operations.apply(only_scale, patches, ["scale"])
    operations.apply(tree, patches)
    assert operations.revert(tree, patches, ["ask"]).patches == ("ask",)
    assert tree.read(ROUTER_FILE) == only_scale.read(ROUTER_FILE)
    assert states(tree, patches) == {"ask": "applicable", "scale": "applied", "training": "applied"}
    operations.revert(tree, patches)
    assert tree.read(ROUTER_FILE) == ROUTER.encode()
    assert not tree.has(RECORD)


def test_nothing_is_applied_when_one_patch_doesnt_fit(tmp_path, patches):
    tree = Tree(make_tree(tmp_path / "fork", router=ROUTER.replace("reverse=True", "reverse=False")))
    before = contents(tree.root)
    with pytest.raises(PatchError) as caught:
        operations.apply(tree, patches)
    assert "ask: expected: 1 place: the nested function that takes the largest" in str(caught.value)
    assert contents(tree.root) == before
    assert states(tree, patches) == {"ask": "conflict", "scale": "applicable", "training": "applicable"}
    assert operations.apply(tree, patches, ["scale"])[0].patches == ("scale",)


FORKS = {
    "renamed": ROUTER.replace("best", "pick").replace("chosen", "winners").replace("values", "items"),
    "moved": ROUTER.replace("class Router:", "def helper():\n    return 1\n\n\nclass Router:"),
    "reformatted": ROUTER.replace("best(values, count):", "best(\n            values,\n            count,\n        ):"),
    "edited around": ROUTER.replace("        total =", "        print(chosen)\n        total =").replace(
        "math", "cmath"
    ),
    "tabs": ROUTER.replace("    ", "\t"),
    "annotated": ROUTER.replace("best(values, count):", "best(values: list, count: int) -> list:"),
}


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_forks_with_local_changes(tmp_path, patches, fork, newline):
    tree = Tree(make_tree(tmp_path / "fork", router=FORKS[fork], newline=newline))
    before = contents(tree.root)
    operations.apply(tree, patches)
    done = tree.read(ROUTER_FILE)
    assert b"asked.take" in done and done.count(b"\n") == done.count(newline.encode())
    compile(done, ROUTER_FILE, "exec")
    operations.revert(tree, patches)
    assert contents(tree.root) == before


def test_a_class_moved_to_another_file_is_followed(tmp_path, patches):
    head, _, rest = ROUTER.partition("class Router:")
    body, _, run = rest.partition("def run(")
    stays = f"from .impl import Router\n\n\ndef run({run}"
    tree = Tree(make_tree(tmp_path / "fork", router=stays))
    moved = tree.root / "megatron/core/impl.py"
    moved.write_text(f"{head}class Router:{body}")
    before = contents(tree.root)
    operations.apply(tree, patches)
    assert b"asked.take" in moved.read_bytes() and b"asked=router.asked" in tree.read(ROUTER_FILE)
    operations.revert(tree, patches)
    assert contents(tree.root) == before


def test_a_change_made_by_hand_is_recognised(tree, patches, tmp_path):
    operations.apply(tree, patches)
    committed = tree.root.rename(tmp_path / "committed")
    (committed / RECORD).unlink()  # as in a fork that committed the patched files
    tree = Tree(committed)
    before = contents(tree.root)
    assert states(tree, patches) == dict.fromkeys(("ask", "scale", "training"), "there")
    assert operations.apply(tree, patches)[0].patches == ()
    with pytest.raises(PatchError, match=f"ask, training: applied by this tool, but {RECORD}") as caught:
        operations.revert(tree, patches)
    assert "Where a fork committed the patched files, nothing is to be done" in caught.value.remedy
    assert contents(tree.root) == before


def test_half_a_change_is_refused(tree, patches):
    edit(tree, "self.config = config", "self.asked = None\n        self.config = config")
    with pytest.raises(PatchError, match="all of the change, or nothing of it"):
        operations.apply(tree, patches, ["ask"])


def test_what_only_strengthens_isnt_missed(tmp_path, tree):
    text = declarations()["ask"] + (
        '\n[[variants.edits]]\nfile = "megatron/core/router.py"\ntarget = "run"\ninsert = "start"\n'
        'parameters = ["router"]\nstrengthens = true\nlines = "assert router"\n'
    )
    plain, strong = make_patches(tmp_path / "a", ask=declarations()["ask"]), make_patches(tmp_path / "b", ask=text)
    operations.apply(tree, plain)
    (tree.root / RECORD).unlink()
    assert states(tree, strong) == {"ask": "there"}


# ---------------------------------------------------------------------- edits after apply


def test_edits_made_elsewhere_stay_when_patches_go(tree, patches):
    operations.apply(tree, patches)
    edit(tree, '"""A router."""', '"""Our router."""')
    assert states(tree, patches)["ask"] == "applied"
    plan = operations.revert(tree, patches)
    assert plan.kept == (ROUTER_FILE,)
    assert tree.path(ROUTER_FILE).read_text() == ROUTER.replace("A router", "Our router")


def test_edits_made_elsewhere_stay_when_one_patch_goes_and_another_comes(tree, patches):
    operations.apply(tree, patches, ["ask"])
    edit(tree, '"""A router."""', '"""Our router."""')
    operations.apply(tree, patches, ["scale"])
    operations.revert(tree, patches, ["ask"])
    assert states(tree, patches)["scale"] == "applied"
    operations.revert(tree, patches)
    assert tree.path(ROUTER_FILE).read_text() == ROUTER.replace("A router", "Our router")


@pytest.mark.parametrize(
    ("old", "new"),
    [("default = best", "default = best  # ours"), ("        # t1 patch: ask\n        self.asked = None\n", "")],
)
def test_edits_of_patched_lines_are_refused_and_shown(tree, patches, old, new):
    operations.apply(tree, patches)
    edit(tree, old, new)
    before = contents(tree.root)
    assert states(tree, patches)["ask"] == "damaged"
    with pytest.raises(PatchError):
        operations.apply(tree, patches)
    if new:
        with pytest.raises(PatchError, match="in or beside the patched lines"):
            operations.revert(tree, patches)
        assert "default = best  # ours\n" in operations.diff(tree, patches)
        assert contents(tree.root) == before
    else:
        operations.revert(tree, patches)  # a patched line that is gone already is no obstacle
        assert tree.path(ROUTER_FILE).read_text() == ROUTER


def test_a_record_whose_files_git_brought_back_is_forgotten(tree, patches):
    before = contents(tree.root)
    operations.apply(tree, patches)
    for file in (ROUTER_FILE, "megatron/training/loop.py"):
        tree.path(file).write_bytes(before[file])
    assert states(tree, patches)["ask"] == "applicable"
    operations.apply(tree, patches)
    assert states(tree, patches)["ask"] == "applied"
    for file in (ROUTER_FILE, "megatron/training/loop.py"):
        tree.path(file).write_bytes(before[file])
    operations.revert(tree, patches)
    assert contents(tree.root) == before


def test_a_patch_that_another_needs_stays(tmp_path, tree):
    texts = declarations() | {"scale": 'requires = ["ask"]\n' + declarations()["scale"].lstrip()}
    patches = make_patches(tmp_path / "p", **texts)
    assert list(patches) == ["ask", "scale", "training"]
    assert operations.apply(tree, patches, ["scale"])[0].patches == ("ask", "scale")
    with pytest.raises(PatchError, match="scale is applied and needs ask"):
        operations.revert(tree, patches, ["ask"])


def test_patches_require_each_other_in_a_circle(tmp_path):
    texts = {name: f'requires = ["{other}"]\n' + declarations()["scale"] for name, other in (("a", "b"), ("b", "a"))}
    with pytest.raises(DeclarationError, match="a -> b -> a"):
        make_patches(tmp_path / "p", **texts)


def test_declarations_that_changed_since_only_allow_a_full_revert(tmp_path, tree, patches):
    operations.apply(tree, patches)
    newer = make_patches(tmp_path / "newer", **declarations() | {"scale": declarations()["scale"] + "# newer\n"})
    with pytest.raises(PatchError, match="scale would stay, and its declaration has changed"):
        operations.revert(tree, newer, ["ask"])
    operations.revert(tree, newer)
    assert tree.read(ROUTER_FILE) == ROUTER.encode()


# ---------------------------------------------------------------------- trees


def test_versions_decide_and_snapshots_are_tried(tmp_path, patches):
    assert states(Tree(make_tree(tmp_path / "new", minor=17)), patches)["ask"] == "not needed"
    # a snapshot on the way to 0.17 may still look like 0.16
    assert states(Tree(make_tree(tmp_path / "dev", minor=17, pre="rc0")), patches)["ask"] == "applicable"
    unknown = make_tree(tmp_path / "unknown")
    (unknown / "megatron/core/package_info.py").write_text("import os\nMAJOR = os.environ['M']\n")
    assert Tree(unknown).version is None
    assert states(Tree(unknown), patches)["ask"] == "applicable"


def test_an_installed_package_has_no_training_loop(tmp_path, patches):
    root = make_tree(tmp_path / "site-packages")
    shutil.rmtree(root / "megatron/training")
    assert states(Tree(root), patches)["training"] == "not needed"
    assert operations.apply(Tree(root), patches)[0].patches == ("ask", "scale")


def test_a_directory_that_is_no_tree(tmp_path):
    root = make_tree(tmp_path / "checkout")
    with pytest.raises(PatchError, match=f"--checkout {root}"):
        Tree(root / "megatron")
    with pytest.raises(PatchError, match="no such directory"):
        Tree(tmp_path / "nothing")


def test_nothing_outside_the_checkout_is_touched(tmp_path, patches):
    tree = Tree(make_tree(tmp_path / "checkout"))
    outside = tmp_path / "outside.py"
    outside.write_text(ROUTER)
    path = tree.root / ROUTER_FILE
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(PatchError, match="leads out of the checkout"):
        operations.apply(tree, patches)
    assert outside.read_text() == ROUTER
    for file in ("../outside.py", "/etc/passwd", ""):
        with pytest.raises(PatchError):
            tree.path(file)


def test_links_inside_the_checkout_stay_links(tmp_path, patches):
    tree = Tree(make_tree(tmp_path / "checkout"))
    path = tree.root / ROUTER_FILE
    path.rename(tree.root / "real.py")
    path.symlink_to("../../real.py")
    operations.apply(tree, patches)
    assert path.is_symlink() and "asked.take" in (tree.root / "real.py").read_text()
    operations.revert(tree, patches)
    assert path.is_symlink() and (tree.root / "real.py").read_text() == ROUTER


def test_a_record_that_names_files_outside_is_refused(tree, patches):
    operations.apply(tree, patches)
    record = json.loads(tree.read(RECORD))
    record["files"]["../outside.py"] = record["files"].pop(ROUTER_FILE)
    tree.path(RECORD).write_text(json.dumps(record))
    with pytest.raises(PatchError, match="isn't a path inside"):
        operations.revert(tree, patches)


@pytest.mark.parametrize("damage", ["not json", '{"format": 2}', '{"format": 1, "patches": [], "files": {"a": {}}}'])
def test_a_damaged_record_is_named(tree, patches, damage):
    (tree.root / RECORD).write_text(damage)
    with pytest.raises(PatchError, match="record of applied patches is damaged"):
        operations.status(tree, patches)


def test_permissions_stay_and_hard_links_are_left_alone(tree, patches, tmp_path):
    cached = tmp_path / "cached.py"  # installers link files from a shared cache
    path = tree.path(ROUTER_FILE)
    path.chmod(0o640)
    os.link(path, cached)
    operations.apply(tree, patches)
    assert path.stat().st_mode & 0o777 == 0o640
    assert cached.read_text() == ROUTER


def test_two_at_once_are_refused(tree, patches):
    with locked(tree), pytest.raises(PatchError, match="another `t1 patch`"):
        operations.apply(tree, patches)
    assert not (tree.root / LOCK).exists()
    operations.apply(tree, patches)
    assert not (tree.root / JOURNAL).exists()
