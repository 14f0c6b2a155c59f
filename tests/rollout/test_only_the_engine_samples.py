"""Sampled ids are never produced from text: the code has no way to do it by accident. Each way is tried here."""

import ast
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import megatron_t1
from megatron_t1.rollout.engine.completion import Completion
from megatron_t1.rollout.formats import Span
from megatron_t1.rollout.stream import TokenStream
from megatron_t1.trajectory.record import Origin
from tests.rollout.conftest import completion

PACKAGE = Path(megatron_t1.__file__).parent
ENGINE = PACKAGE / "rollout" / "engine"


@cache
@cache
def modules():
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


def names(tree):
    """Every name that is called, and every attribute that is called on something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_a_completion_is_made_by_the_engine_client_only():  # trl#5224, ms-swift#10012
    makers = {path for path, tree in modules() if "from_response" in names(tree)}
    assert makers == {ENGINE / "client.py"}
    assert not [path for path, tree in modules() if "Completion" in names(tree)]
    with pytest.raises(TypeError, match="engine client only"):
        Completion(ids=np.array([1], np.int32))


def test_the_constructor_is_gone_around_in_its_own_module_only():
    """`object.__new__(Completion)` is the one way to make one without the engine's answer."""
    makers = {path for path, tree in modules() if "__new__" in names(tree) and "Completion" in path.read_text()}
    assert makers == {ENGINE / "completion.py"}


def test_a_subclass_or_a_look_alike_is_not_taken():
    class Forged(Completion):
        def __init__(self):
            object.__setattr__(self, "ids", np.array([1], np.int32))

    class LookAlike:
        ids, logprobs, routes, prompt_length = np.array([1], np.int32), np.zeros(1, np.float32), None, 1

    stream = TokenStream()
    stream.append(np.array([1], np.int32), Origin.PROMPT)
    for forged in (Forged(), LookAlike(), np.array([1], np.int32), [1], "text", None):
        with pytest.raises(TypeError, match="the engine's Completion and nothing else"):
            stream.append_sampled(forged)
    assert len(stream) == 1 and stream.turns == 0


def test_sampled_tokens_are_appended_by_the_engines_sampler_only():
    callers = {path for path, tree in modules() if "append_sampled" in names(tree)}
    assert callers == {PACKAGE / "rollout" / "samplers.py"}


def test_nothing_reaches_into_the_stream():
    """The one method that changes it is called by the stream itself."""
    for path, tree in modules():
        if path.name != "stream.py":
            touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not touched & {"_apply_edit", "_begin_turn"}, path


@pytest.mark.parametrize("origin", [Origin.SAMPLED, Origin.DEMONSTRATION, Origin.PROMPT])
def test_a_chat_format_can_not_make_sampled_tokens(origin):
    with pytest.raises(ValueError, match=f"makes no {origin.name} tokens"):
        Span(np.array([1], np.int32), origin)


def test_what_was_sampled_can_not_be_changed_afterwards():
    stream = TokenStream()
    stream.append(np.array([1], np.int32), Origin.PROMPT)
    made = completion([5, 6], 1)
    stream.append_sampled(made)
    for change in (lambda: made.ids.__setitem__(0, 9), lambda: stream.ids.__setitem__(1, 9)):
        with pytest.raises(ValueError, match="read-only"):
            change()
    with pytest.raises(AttributeError, match="immutable"):
        made.ids = np.array([9], np.int32)
