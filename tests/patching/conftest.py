"""A miniature Megatron tree of our own, and patches for it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from megatron_t1.patching.declaration import Patch, load_patches
from megatron_t1.patching.tree import Tree

ROUTER = '''\
"""A router."""

import math


class Router:
    """Chooses."""

    def __init__(self, config):
        """Keep the configuration."""
        self.config = config   # kept as it is

    def choose(self, scores, top=2):
        def best(values, count):
            # the largest first
            return sorted(values, reverse=True)[:count]

        chosen = best(scores, top)
        total = math.fsum(chosen)
        return [value / total for value in chosen]


def run(router, scores):
    return router.choose(
        scores,
        top=3,
    )
'''
LOOP = "def train(model, steps):\n    for step in range(steps):\n        model(step)\n"
PACKAGE_INFO = (
    "MAJOR = 0\nMINOR = {minor}\nPATCH = 1\nPRE_RELEASE = {pre!r}\n\nVERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n"
)

ASK = """
title = "routers ask"
why = "nobody asked"
upstream = ""
drop = "never"

[[variants]]
versions = ">=0.15,<0.17"

[[variants.edits]]
file = "megatron/core/router.py"
target = "Router.choose"
add_parameter = "asked=None"
parameters = ["scores"]

[[variants.edits]]
file = "megatron/core/router.py"
target = "Router.choose"
insert = "after"
place.says = "the nested function that takes the largest"
place.fingerprints = ["FINGERPRINT"]
capture = { best = "@0" }
present = [{ call = "asked.take" }]
lines = '''
if asked is not None:
    default = $best

    def $best(values, count):
        return asked.take(values, count, default)
'''

[[variants.edits]]
file = "megatron/core/router.py"
target = "run"
add_argument = "asked=router.asked"
place.says = "the call of choose"
place.call = "choose"

[[variants.edits]]
file = "megatron/core/router.py"
target = "Router.__init__"
insert = "end"
parameters = ["self"]
present = [{ assigns = "self.asked" }]
lines = "self.asked = None"
"""

SCALE = """
title = "twice as much"
why = "too little"
upstream = ""
drop = "never"

[[variants]]
versions = ">=0.15"

[[variants.edits]]
file = "megatron/core/router.py"
target = "Router.choose"
wrap = "2 * ($expression)"
place.says = "what choose returns"
place.returns = true
present = [{ fingerprint = "TWICE" }]
"""

TRAINING = """
title = "training says so"
why = "silence"
upstream = ""
drop = "never"

[[variants]]
versions = ">=0.15"

[[variants.edits]]
file = "megatron/training/loop.py"
target = "train"
insert = "start"
parameters = ["model", "steps"]
lines = "print(steps)"
"""


def make_tree(root: Path, *, router: str = ROUTER, minor: int = 15, pre: str = "", newline: str = "\n") -> Path:
    core = root / "megatron" / "core"
    core.mkdir(parents=True)
    (root / "megatron" / "training").mkdir()
    (core / "package_info.py").write_text(PACKAGE_INFO.format(minor=minor, pre=pre))
    (core / "router.py").write_bytes(router.replace("\n", newline).encode())
    (root / "megatron" / "training" / "loop.py").write_text(LOOP)
    return root


def make_patches(root: Path, **declarations: str) -> dict[str, Patch]:
    for name, text in declarations.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "patch.toml").write_text(textwrap.dedent(text))
    return load_patches(root)


def best_fingerprint() -> str:
    from megatron_t1.patching.syntax import Source

    target = Source.parse(ROUTER.encode(), "router.py").target("Router.choose")
    return target.form(target.source.target("Router.choose.best").node).fingerprint


def twice_fingerprint() -> str:
    from megatron_t1.patching.fingerprint import form

    code = "(2 * ([value / total for value in chosen]))"
    return form(code, frozenset({"value", "total", "chosen"})).fingerprint


def declarations() -> dict[str, str]:
    return {
        "ask": ASK.replace("FINGERPRINT", best_fingerprint()),
        "scale": SCALE.replace("TWICE", twice_fingerprint()),
        "training": TRAINING,
    }


@pytest.fixture
def patches(tmp_path):
    return make_patches(tmp_path / "patches", **declarations())


@pytest.fixture
def tree(tmp_path):
    return Tree(make_tree(tmp_path / "checkout"))


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a tree, by relative path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
