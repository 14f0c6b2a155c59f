"""Each operation on small sources: what is written, what is recognised, what is refused."""

from __future__ import annotations

import pytest

from megatron_t1.patching.declaration import Edit, Place
from megatron_t1.patching.edits import perform
from megatron_t1.patching.errors import DeclarationError, MissingError, PatchError, PlaceError
from megatron_t1.patching.fingerprint import form
from megatron_t1.patching.syntax import Source

LOCAL = frozenset({"x", "y", "z"})


def run(code: str, **keys) -> str | None:
    """The code after an edit; None when the edit was there already."""
    place = Place(says="the place", **keys.pop("place")) if "place" in keys else None
    edit = Edit(file="f.py", target=keys.pop("target", "f"), place=place, **keys)
    outcome = perform(edit, Source.parse(code.encode(), "f.py"), "mine")
    return None if outcome.present else outcome.source.module.code


def test_start_goes_behind_the_docstring():
    done = run('def f(x):\n    """Text."""\n    return x\n', insert="start", lines="x += 1")
    assert done == 'def f(x):\n    """Text."""\n    # t1 patch: mine\n    x += 1\n    return x\n'


def test_end_of_a_class_and_of_a_file():
    assert (
        run("class f:\n    a = 1\n", insert="end", lines="b = 2")
        == "class f:\n    a = 1\n    # t1 patch: mine\n    b = 2\n"
    )
    assert run("a = 1\n", target="", insert="end", lines="b = 2").endswith("a = 1\n# t1 patch: mine\nb = 2\n")


def test_before_and_after_keep_a_statements_comments_with_it():
    code = "def f(x):\n    # why\n    y = g(x)  # how\n    return y\n"
    before = run(code, insert="before", lines="x += 1", place={"call": "g"})
    assert before == "def f(x):\n    # t1 patch: mine\n    x += 1\n    # why\n    y = g(x)  # how\n    return y\n"
    after = run(code, insert="after", lines="x += 1", place={"call": "g"})
    assert after == "def f(x):\n    # why\n    y = g(x)  # how\n    # t1 patch: mine\n    x += 1\n    return y\n"


def test_a_block_on_one_line_becomes_lines():
    done = run("def f(x):\n    if x: return g(x)\n", insert="before", lines="x += 1", place={"call": "g"})
    assert done == "def f(x):\n    if x:\n        # t1 patch: mine\n        x += 1\n        return g(x)\n"


def test_captured_names_are_those_of_the_tree():
    shape = form("x = x & ~y", LOCAL).fingerprint
    code = "def f(mask, pad):\n    mask = mask & ~pad\n    return mask\n"
    done = run(code, insert="before", lines="$m = $m[0]", capture={"m": "@1"}, place={"fingerprints": (shape,)})
    assert "    pad = pad[0]\n    mask = mask & ~pad" in done
    assert run(done, insert="before", lines="$m = $m[0]", capture={"m": "@1"}, place={"fingerprints": (shape,)}) is None


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("f(x)", "f(x, new=None)"),
        ("f()", "f(new=None)"),
        ("f(x, *, y)", "f(x, *, y, new=None)"),
        ("f(*x)", "f(*x, new=None)"),
        ("f(x, **y)", "f(x, new=None, **y)"),
        ("f(\n    x,\n    y=1,\n)", "f(\n    x,\n    y=1,\n    new=None,\n)"),
    ],
)
def test_a_parameter_is_added_where_it_may_stand(signature, expected):
    done = run(f"def {signature}:\n    pass\n", add_parameter="new=None")
    assert done == f"def {expected}:\n    pass\n"
    assert run(done, add_parameter="new=None") is None


def test_an_argument_is_added_to_every_call_in_the_targets_style():
    code = "def f(x):\n    a.g(x)\n    return g(\n        x,\n        g(1),\n    )\n"
    done = run(code, add_argument="new=x", place={"call": "g", "count": 0})
    assert done == (
        "def f(x):\n    a.g(x, new=x)\n    return g(\n        x,\n        g(1, new=x),\n        new=x,\n    )\n"
    )
    assert run(done, add_argument="new=x", place={"call": "g", "count": 0}) is None


def test_wrap_puts_code_round_an_argument():
    code = "def f(x, y):\n    g(x, y * x)\n    g(x, y)\n"
    shape = form("(x * y)", LOCAL).fingerprint
    keys = {"wrap": "($expression) * 2", "place": {"call": "g", "argument": 1, "fingerprints": (shape,)}}
    assert run(code, **keys) == "def f(x, y):\n    g(x, (y * x) * 2)\n    g(x, y)\n"


def test_replace_keeps_the_comments_above():
    done = run("def f(x):\n    # why\n    g(x)\n", replace=True, lines="h(x)", place={"call": "g"})
    assert done == "def f(x):\n    # why\n    # t1 patch: mine\n    h(x)\n"


def test_outermost_is_the_statement_of_the_targets_own_body():
    code = "try:\n    from a import b\nexcept ImportError:\n    c = 1\n"
    done = run(code, target="", insert="before", lines="b = None", place={"binds": "b", "outermost": True})
    assert done == "# t1 patch: mine\nb = None\n" + code


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", ["    ", "\t", "  "])
def test_line_ends_and_indentation_are_the_files_own(newline, indent):
    code = f"def f(x):{newline}{indent}if x:{newline}{indent}{indent}return x{newline}{indent}return 0{newline}"
    done = run(code, insert="start", lines="if x is None:\n    return -1")
    mark = f"{indent}# t1 patch: mine{newline}"
    lines = f"{indent}if x is None:{newline}{indent}{indent}return -1{newline}"
    assert done == code.replace(f"{newline}", f"{newline}{mark}{lines}", 1)


def test_own_lines_under_other_local_names_are_recognised():
    code = "def f(scores, asked=None):\n    if asked is not None:\n        kept = scores\n        asked(kept)\n"
    assert run(code, insert="start", lines="if asked is not None:\n    held = scores\n    asked(held)") is None


def test_refusals_show_what_was_expected_and_what_stands_there():
    code = "def f(x, y):\n    # note\n    z = g(x, 1)\n    return z\n"
    with pytest.raises(PlaceError) as caught:
        run(code, insert="before", lines="x = 1", place={"call": "g", "fingerprints": ("0" * 16,)})
    said = str(caught.value)
    assert "expected: 1 place: the place (form 0000000000000000)" in said
    assert "3      z = g(x, 1)" in said and "f.py:1 (f)" in said
    with pytest.raises(PlaceError, match="missing: fused"):
        run(code, insert="start", lines="x = 1", parameters=("x", "fused"))
    with pytest.raises(PlaceError, match="found:    2"):
        run("def f(x):\n    g(x)\n    g(x)\n", insert="before", lines="x = 1", place={"call": "g"})
    with pytest.raises(PlaceError, match="2, in lines 1, 3"):
        run("def f():\n    pass\ndef f():\n    pass\n", insert="start", lines="x = 1")
    with pytest.raises(MissingError, match="elsewhere than expected"):
        run("class A:\n    def f(self):\n        pass\n", insert="start", lines="x = 1")


def test_an_elif_is_no_place_to_insert_before():
    code = "def f(x):\n    if x == 1:\n        pass\n    elif x == 2:\n        g(x)\n"
    done = run(code, insert="before", lines="h(x)", place={"call": "g"})
    assert done == code.replace("        g(x)", "        # t1 patch: mine\n        h(x)\n        g(x)")


def test_a_file_that_isnt_python_is_refused():
    with pytest.raises(PatchError, match="can't be parsed"):
        Source.parse(b"def f(:\n", "f.py")


def test_lines_that_arent_python_are_the_declarations_fault():
    with pytest.raises(DeclarationError, match="aren't Python"):
        run("def f(x):\n    pass\n", insert="start", lines="x = = 1")
