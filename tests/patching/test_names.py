"""A patch's own names and those of the function it goes into."""

from __future__ import annotations

import libcst as cst
import pytest

from megatron_t1.patching import operations
from megatron_t1.patching.errors import PlaceError
from megatron_t1.patching.names import Rename, bound_by, fresh_names
from megatron_t1.patching.tree import Tree
from tests.patching.conftest import ROUTER, make_tree
from tests.patching.test_edits import run
from tests.patching.test_operations import states, the_router_asks


@pytest.mark.parametrize(
    ("code", "made", "changed"),
    [
        ("a = 1", {"a"}, set()),
        ("a = a + 1", set(), {"a"}),
        ("a += 1", set(), {"a"}),
        ("a, b = f(a, b)", set(), {"a", "b"}),
        ("a = 1\na = a + 1", {"a"}, set()),
        ("if c:\n    a = b\n    def g(x):\n        return a\n    b = g", {"a", "g"}, {"b"}),
        ("import os.path\nfrom a import b", set(), set()),
        ("for i in x:\n    a = i\nelse:\n    b = a", {"i", "a", "b"}, set()),
        ("with f() as g:\n    h = g", {"g", "h"}, set()),
        ("try:\n    a = 1\nexcept E as e:\n    b = a", {"a", "b"}, set()),
    ],
)
def test_what_lines_make_and_what_they_change(code, made, changed):
    assert bound_by(code) == (made, changed)


def test_renaming_leaves_attributes_and_keywords_alone():
    module = cst.parse_module("a = b.a(a=1)\nprint(a)\n")
    fresh = fresh_names(["a"], {"a", "a_t1"})
    assert module.visit(Rename(fresh)).code == "a_t12 = b.a(a=1)\nprint(a_t12)\n"


def test_a_fork_with_a_local_of_the_patch_s_name_still_works(tmp_path, patches):
    """`default` is what the lines of `ask` call the function they replace."""
    tree = Tree(make_tree(tmp_path / "fork", router=ROUTER.replace("best", "default")))
    assert states(tree, patches)["ask"] == "applicable"
    operations.apply(tree, patches)
    the_router_asks(tree)
    assert states(tree, patches)["ask"] == "applied"
    tree.path(".t1-patches.json").unlink()
    assert states(tree, patches)["ask"] == "there"  # recognised under the other name too


def test_a_global_that_the_function_reads_is_not_hidden():
    code = "def f(x):\n    y = g(x)\n    return total(y)\n"
    done = run(code, insert="after", lines="total = 1\nuse(total)", place={"call": "g"})
    assert "    total_t1 = 1\n    use(total_t1)\n    return total(y)" in done


@pytest.mark.parametrize("body", ["asked = 1", "return asked"])
def test_a_parameter_takes_no_other_name_s_place(body):
    with pytest.raises(PlaceError, match="a function without a name asked"):
        run(f"def f(x):\n    {body}\n", add_parameter="asked=None", parameters=("x",))


def test_lines_that_change_a_local_need_it():
    lines = "parser = add(parser)"
    assert "parser = add(parser)" in run("def f(parser):\n    pass\n", insert="start", parameters=(), lines=lines)
    with pytest.raises(PlaceError, match="a function that has parser, which the lines change"):
        run("def f(p):\n    pass\n", insert="start", parameters=(), lines=lines)


def test_blank_lines_among_the_lines_are_empty():
    done = run("def f(x):\n    if x:\n        g(x)\n", insert="before", lines="a()\n\nb()", place={"call": "g"})
    assert "        a()\n\n        b()\n" in done
