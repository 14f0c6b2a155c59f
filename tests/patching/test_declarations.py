"""Declarations: those shipped are well formed, malformed ones are named."""

from __future__ import annotations

import pytest

from megatron_t1.patching.declaration import load_patch, load_patches
from megatron_t1.patching.errors import DeclarationError
from megatron_t1.patching.plan import Survey, chosen
from tests.patching.conftest import ASK, declarations


def test_the_shipped_patches_say_what_they_are_for():
    patches = load_patches()
    assert {"router_replay", "replay_refusals", "te_general_gemm"} <= set(patches)
    for patch in patches.values():
        assert patch.title and patch.why and patch.drop
        assert patch.upstream == "" or patch.upstream.startswith("https://github.com/NVIDIA/Megatron-LM/")
        for variant in patch.variants:
            assert variant.edits


def replaced(old: str, new: str) -> str:
    assert old in ASK
    return declarations()["ask"].replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("title = ", "Invalid value"),
        (replaced('title = "routers ask"\n', ""), "missing: title"),
        (replaced("drop =", "drops ="), "missing: drop"),
        (replaced('insert = "end"', 'insert = "middle"'), "insert='middle'"),
        (replaced('insert = "end"', 'insert = "before"'), "needs a place"),
        (replaced('parameters = ["self"]\n', ""), "parameters says which"),
        (replaced('file = "megatron/core', 'file = "../megatron/core'), "isn't a path inside"),
        (replaced('file = "megatron/core', 'file = "/megatron/core'), "isn't a path inside"),
        (replaced('add_parameter = "asked=None"', 'add_parameter = "asked"'), "isn't name=value"),
        (replaced('add_parameter = "asked=None"\n', ""), "one operation of"),
        (replaced('place.call = "choose"\n', 'place.binds = "choose"\n'), "needs place.call"),
        (replaced('place.says = "the call of choose"\n', ""), "missing: says"),
        (replaced('{ call = "asked.take" }', '{ calls = "asked.take" }'), "a sign is one of"),
        (replaced(">=0.15,<0.17", "0.15 to 0.17"), "Invalid specifier"),
        (replaced('lines = "self.asked = None"\n', ""), "lines go with insert"),
        (replaced("capture =", "captures ="), "unknown: captures"),
        (declarations()["scale"].replace("2 * ($expression)", "2"), "no \\$expression"),
    ],
)
def test_malformed_declarations_are_refused(tmp_path, text, problem):
    (tmp_path / "ask").mkdir()
    path = tmp_path / "ask" / "patch.toml"
    path.write_text(text)
    with pytest.raises(DeclarationError, match=problem) as caught:
        load_patch(path)
    assert str(path) in str(caught.value)


def test_a_fingerprint_has_sixteen_digits(tmp_path):
    (tmp_path / "ask").mkdir()
    (tmp_path / "ask" / "patch.toml").write_text(ASK)
    with pytest.raises(DeclarationError, match="'FINGERPRINT' isn't a fingerprint"):
        load_patches(tmp_path)


def test_a_requirement_that_isnt_there(tmp_path):
    (tmp_path / "ask").mkdir()
    (tmp_path / "ask" / "patch.toml").write_text('requires = ["more"]\n' + declarations()["ask"])
    with pytest.raises(DeclarationError, match="ask requires more"):
        load_patches(tmp_path)


def test_the_plugin_brings_the_router_s_seam(tree):
    """It replays by default, and on a core before 0.16 nothing asks for routes without the seam."""
    names = chosen(load_patches(), Survey.of(tree), ["checkout_plugin"], with_required=True)
    assert names == ["router_replay", "checkout_plugin"]
