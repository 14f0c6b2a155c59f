"""The shipped patches on the released sources, on mutated copies of them, and on full checkouts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import libcst as cst
import pytest

from megatron_t1.patching import operations
from megatron_t1.patching.declaration import load_patches
from megatron_t1.patching.errors import PatchError
from megatron_t1.patching.record import RECORD
from megatron_t1.patching.tree import PACKAGE_INFO, Tree
from tests.patching.conftest import contents
from tests.patching.releases import VERSIONS, checkouts, release

OURS = ("aux_loss_per_token", "padding_mask_expert_bias", "replay_refusals", "router_replay", "te_general_gemm")
ROUTER, UTILS = "megatron/core/transformer/moe/router.py", "megatron/core/transformer/moe/moe_utils.py"
FILES = (PACKAGE_INFO, ROUTER, UTILS)
NEEDED = {
    "0.13.1": {"aux_loss_per_token", "replay_refusals", "router_replay", "te_general_gemm"},
    "0.14.0": {"aux_loss_per_token", "replay_refusals", "router_replay", "te_general_gemm"},
    "0.15.3": {"aux_loss_per_token", "replay_refusals", "router_replay", "te_general_gemm"},
    "0.16.1": {"aux_loss_per_token", "padding_mask_expert_bias", "replay_refusals", "te_general_gemm"},
    "0.17.1": {"aux_loss_per_token", "padding_mask_expert_bias", "replay_refusals"},
    "0.18.2": {"aux_loss_per_token", "padding_mask_expert_bias", "replay_refusals"},
    "0.19.2": {"padding_mask_expert_bias", "replay_refusals"},
}


def test_every_release_has_its_patches_listed():
    assert tuple(NEEDED) == VERSIONS
    assert set(OURS) <= set(load_patches())


@pytest.fixture
def core_patches():
    return {name: patch for name, patch in load_patches().items() if name in OURS}


def copy_of(version: str, target: Path) -> Tree:
    """Just the files the patches are about."""
    for file in FILES:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(release(version) / file, target / file)
    return Tree(target)


def states(tree: Tree, patches) -> dict[str, str]:
    return {finding.name: finding.state for finding in operations.status(tree, patches)}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_apply_and_revert_on_a_release(tmp_path, core_patches, version):
    tree = copy_of(version, tmp_path)
    before = contents(tmp_path)
    expected = {name: "applicable" if name in NEEDED[version] else "not needed" for name in OURS}
    assert states(tree, core_patches) == expected
    plan, _ = operations.apply(tree, core_patches)
    assert set(plan.patches) == NEEDED[version]
    for file in (ROUTER, UTILS):
        compile(tree.read(file), file, "exec")
    done = contents(tmp_path)
    operations.apply(tree, core_patches)
    assert contents(tmp_path) == done
    for name in plan.patches:  # one by one, in another order than they came
        operations.revert(tree, core_patches, [name])
    assert contents(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_patched_sources_committed_to_a_fork_are_recognised(tmp_path, core_patches, version):
    tree = copy_of(version, tmp_path)
    operations.apply(tree, core_patches)
    (tmp_path / RECORD).unlink()
    expected = {name: "there" if name in NEEDED[version] else "not needed" for name in OURS}
    assert states(tree, core_patches) == expected


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.13.1", "0.14.0", "0.15.3"])
def test_the_seam_of_0_16_is_recognised_in_an_older_tree(tmp_path, core_patches, version):
    """A fork that took the newer router files by hand, and kept its version."""
    copy_of("0.16.1", tmp_path)
    shutil.copyfile(release(version) / PACKAGE_INFO, tmp_path / PACKAGE_INFO)
    tree = Tree(tmp_path)
    if version != "0.13.1":  # 0.13's function has another name: there the patch can't tell
        assert states(tree, core_patches)["router_replay"] == "there"
    else:
        assert states(tree, core_patches)["router_replay"] == "conflict"


# ---------------------------------------------------------------------- mutated copies

LOCALS = (
    "compute_topk",
    "top_indices",
    "routing_map",
    "padding_mask",
    "num_tokens",
    "aux_loss",
    "z_loss",
    "activation",
)


class Renaming(cst.CSTTransformer):
    """Renames locals of functions, leaving what callers see: parameters' names, keywords, attributes."""

    def __init__(self, names):
        self.names, self.stack = names, []

    def visit_FunctionDef(self, node):
        parameters = {p.name.value for p in (*node.params.params, *node.params.kwonly_params)}
        nested = bool(self.stack)
        self.stack.append(set() if nested else parameters)

    def leave_FunctionDef(self, original_node, updated_node):
        self.stack.pop()
        return updated_node

    def visit_Attribute(self, node):
        return False

    def leave_Arg(self, original_node, updated_node):
        if original_node.keyword is None:
            return updated_node
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node, updated_node):
        name = original_node.value
        if self.stack and name in self.names and not any(name in parameters for parameters in self.stack):
            return updated_node.with_changes(value=f"renamed_{name}")
        return updated_node


def rename_locals(code: str) -> str:
    return cst.parse_module(code).visit(Renaming(LOCALS)).code


def reformat(code: str) -> str:
    """The whole file printed anew: no comments, other quotes, other line breaks, everything on its shortest lines."""
    import ast

    return ast.unparse(ast.parse(code)) + "\n"


def move_functions(code: str) -> str:
    """Top-level definitions in the opposite order where nothing needs another at import time."""
    module = cst.parse_module(code)
    functions = [s for s in module.body if isinstance(s, cst.FunctionDef)]
    rest = [s for s in module.body if not isinstance(s, cst.FunctionDef)]
    return module.with_changes(body=[*rest, *reversed(functions)]).code


def move_methods(code: str) -> str:
    class Reverse(cst.CSTTransformer):
        def leave_ClassDef(self, original_node, updated_node):
            body = list(updated_node.body.body)
            methods = [s for s in body if isinstance(s, cst.FunctionDef)]
            others = [s for s in body if not isinstance(s, cst.FunctionDef)]
            return updated_node.with_changes(body=updated_node.body.with_changes(body=[*others, *reversed(methods)]))

    return cst.parse_module(code).visit(Reverse()).code


def edit_around(code: str) -> str:
    """A line of the fork's own at the start of every function with a body of its own."""
    return re.sub(r"(?m)^( +)(seq_length, bsz = .*)$", r'\1print("ours")\n\1\2\n\1assert bsz', code)


MUTATIONS = {
    "renamed locals": rename_locals,
    "reformatted": reformat,
    "moved functions": move_functions,
    "moved methods": move_methods,
    "edited around": edit_around,
    "tabs": lambda code: re.sub(r"(?m)^(?: {4})+", lambda m: "\t" * (len(m[0]) // 4), code),
    "windows line ends": lambda code: code.replace("\n", "\r\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.13.1", "0.15.3", "0.16.1", "0.19.2"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutated_copies(tmp_path, core_patches, version, mutation):
    tree = copy_of(version, tmp_path)
    for file in (ROUTER, UTILS):
        original = tree.read(file).decode()
        changed = MUTATIONS[mutation](original)
        tree.path(file).write_bytes(changed.encode())
        compile(changed, file, "exec")
    before = contents(tmp_path)
    assert before[ROUTER] != (release(version) / ROUTER).read_bytes() or mutation == "moved functions"
    plan, _ = operations.apply(tree, core_patches)
    assert set(plan.patches) == NEEDED[version]
    for file in (ROUTER, UTILS):
        compile(tree.read(file), file, "exec")
    operations.revert(tree, core_patches)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_another_choice_of_experts_is_refused(tmp_path, core_patches):
    tree = copy_of("0.15.3", tmp_path)
    path = tree.path(UTILS)
    code = path.read_text()
    path.write_text(code.replace("return torch.topk(scores, k=topk, dim=1)", "return own_topk(scores, topk)"))
    before = contents(tmp_path)
    with pytest.raises(PatchError) as caught:
        operations.apply(tree, core_patches)
    said = str(caught.value)
    assert "expected: 1 place: the nested function that takes the top k" in said
    assert f"{path}:" in said and "topk_routing_with_score_function" in said
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_no_line_of_megatron_is_in_the_patches():
    """No two lines of a patch stand one after the other in a release."""
    theirs = {pair for version in VERSIONS for file in (ROUTER, UTILS) for pair in _pairs(release(version) / file)}
    for patch in load_patches().values():
        for variant in patch.variants:
            for edit in variant.edits:
                assert not _pairs_of(edit.lines) & theirs, patch.name


def _pairs(path: Path) -> set[tuple[str, str]]:
    return _pairs_of(path.read_text())


def _pairs_of(text: str) -> set[tuple[str, str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {(a, b) for a, b in zip(lines, lines[1:], strict=False) if len(a + b) > 12}


@pytest.mark.slow
def test_full_checkouts(tmp_path):
    """All patches, those for full checkouts too, on copies of what the patches and the version need."""
    patches = load_patches()
    files = {PACKAGE_INFO} | {e.file for p in patches.values() for v in p.variants for e in v.edits}
    for checkout in checkouts():
        copy = tmp_path / checkout.name
        for file in sorted(files):
            if (checkout / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkout / file, copy / file)
        tree = Tree(copy)
        before = contents(copy)
        found = states(tree, patches)
        assert set(found.values()) <= {"applicable", "not needed", "there"}, (checkout.name, found)
        operations.apply(tree, patches)
        for file in files:
            if tree.has(file):
                compile(tree.read(file), file, "exec")
        operations.revert(tree, patches)
        assert contents(copy) == before
