"""A recomputation takes the routes of its own forward, whatever else is in the same backward or went wrong."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_t1.errors import T1Error
from megatron_t1.routing.forwards import tensors_in
from megatron_t1.routing.slot import MicroBatchRoutes
from tests.routing.helpers import assert_equal, build, foreign_routes, forward_of, gradients, replay_of, slot_of

FIRST, SECOND = foreign_routes(32, 5), foreign_routes(32, 6)


@dataclass
class Output:
    hidden: object


def expected_gradients(backend, *routes) -> dict:
    """Of the micro-batches 1, 2, ... with these routes (None: native), one by one and without recomputation."""
    model = build(backend)
    replay = replay_of(model)
    for seed, part in enumerate(routes, start=1):
        with replay.native() if part is None else replay_mode(replay):
            replay.run(model, part if part is None else slot_of(part), forward_of(model, seed)).mean().backward()
    return gradients(model)


def replay_mode(replay):
    replay.mode = "replay"
    return torch.enable_grad()


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("recompute", ["full", "moe"])
@pytest.mark.parametrize("native_first", [True, False])
def test_passes_in_one_backward_keep_apart(backend, recompute, native_first):
    model = build(backend, recompute)
    replay = replay_of(model)

    def native():
        with replay.native():
            return replay.run(model, None, forward_of(model, 1))

    def replayed():
        return replay.run(model, slot_of(SECOND), forward_of(model, 2))

    parts = (native(), replayed()) if native_first else (replayed(), native())
    (parts[0].mean() + parts[1].mean()).backward()
    assert_close(gradients(model), expected_gradients(backend, None, SECOND))


@pytest.mark.parametrize("native_first", [True, False])
@pytest.mark.parametrize("mode", ["replay", "off"])
def test_forward_that_replay_did_not_see_never_takes_anothers_routes(backend, native_first, mode):
    model = build(backend, "full")
    replay = replay_of(model)
    bare = None
    if native_first:
        with replay.native():
            bare = forward_of(model, 1)()
    seen = replay.run(model, slot_of(SECOND), forward_of(model, 2))
    if bare is None:
        with replay.native():
            bare = forward_of(model, 1)()
    replay.mode = mode
    if mode == "replay":
        with pytest.raises(T1Error, match="recomputed in the backward of a forward that no routes were given for"):
            (bare.mean() + seen.mean()).backward()
    else:  # then its recomputation is native, and the other pass still replays
        (bare.mean() + seen.mean()).backward()
        assert_close(gradients(model), expected_gradients(backend, None, SECOND))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: {"a": [{"b": (y,)}]},
        lambda y: Output({"hidden": y}),
        lambda y: namedtuple("Named", "hidden")(y),
    ],
    ids=["tensor", "nested", "dataclass", "namedtuple"],
)
def test_outputs_of_any_container_are_bound(backend, wrap):
    model = build(backend, "full")
    replay = replay_of(model)
    outputs = [
        replay.run(model, slot_of(part), lambda seed=seed: wrap(forward_of(model, seed)()))
        for seed, part in enumerate((FIRST, SECOND), start=1)
    ]
    sum(next(tensors_in(output)).mean() for output in outputs).backward()
    assert_close(gradients(model), expected_gradients(backend, FIRST, SECOND))


def test_output_that_cannot_be_seen_raises_instead_of_taking_anothers_routes(backend):
    model = build(backend, "full")
    replay = replay_of(model)
    hidden = replay.run(model, slot_of(FIRST), lambda: SimpleNamespace(y=forward_of(model, 1)())).y
    seen = replay.run(model, slot_of(SECOND), forward_of(model, 2))
    with pytest.raises(T1Error, match="return what its backward starts from"):
        (hidden.mean() + seen.mean()).backward()


def test_exception_in_a_backward_leaves_no_routes_behind(backend):
    model = build(backend, "full")
    replay = replay_of(model)
    output = replay.run(model, slot_of(FIRST), forward_of(model, 1))
    weight = model.decoder.layers[0].self_attention.linear_proj.weight
    handle = weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.mean().backward()
    handle.remove()
    model.zero_grad()
    replay.mode = "off"
    forward_of(model, 2)().mean().backward()  # not seen by replay
    reference = build(backend)
    forward_of(reference, 2)().mean().backward()
    assert_equal(gradients(model), gradients(reference))
    replay.mode = "replay"
    model.zero_grad()
    replay.run(model, slot_of(FIRST), forward_of(model, 1)).mean().backward()
    assert_equal(gradients(model), expected_gradients(backend, FIRST))


@pytest.mark.parametrize("kind", ["replay", "record"])
def test_closing_before_the_backward_raises_in_it(backend, kind):
    model = build(backend, "full")
    replay = replay_of(model)
    with replay.native():
        native = replay.run(model, None, forward_of(model, 1))
    if kind == "replay":
        output = replay.run(model, slot_of(FIRST), forward_of(model, 1))
    else:
        output = replay.record(model, forward_of(model, 1))[0]
    replay.close()
    with pytest.raises(T1Error, match="closed between this forward and its backward"):
        output.mean().backward()
    native.mean().backward()  # as it would have been
    for call in (lambda: replay.run(model, slot_of(FIRST), forward_of(model, 1)), lambda: replay.record(model, None)):
        with pytest.raises(T1Error, match="this RoutingReplay is closed"):
            call()
    model.zero_grad()
    replay_of(model).run(model, slot_of(FIRST), forward_of(model, 1)).mean().backward()
    assert_equal(gradients(model), expected_gradients(backend, FIRST))


def test_dropped_between_forward_and_backward_it_lives_until_then(backend):
    model = build(backend, "full")
    replay = replay_of(model)
    routes = slot_of(FIRST)
    output, held = replay.run(model, routes, forward_of(model, 1)), [weakref.ref(replay), weakref.ref(routes)]
    del replay, routes
    output.mean().backward()
    assert_equal(gradients(model), expected_gradients(backend, FIRST))
    del output
    gc.collect()
    assert [reference() for reference in held] == [None, None]


@pytest.mark.parametrize("kind", ["replay", "record"])
def test_model_called_twice_in_one_forward_is_refused(backend, kind):
    model = build(backend)
    replay = replay_of(model)

    def twice():
        return forward_of(model, 1)() + forward_of(model, 2)()

    with pytest.raises(T1Error, match="router of layer 1 was called twice in one forward"):
        replay.run(model, slot_of(FIRST), twice) if kind == "replay" else replay.record(model, twice)


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_torch_and_nested_ones_find_their_routes(backend, reentrant, in_thread):
    """The inner checkpoint's nodes are made in the backward, and it is recomputed once more, in another pass.

    In a thread of its own, as on a GPU, the backward numbers these nodes like early ones of the forward's thread.
    """

    def checkpointed(forward):
        def call(hidden_states, *args, **kwargs):
            inner = partial(forward, **kwargs)
            return checkpoint(inner, hidden_states, *args, use_reentrant=reentrant)

        return call

    model = build(backend)
    for layer in model.decoder.layers:
        layer.mlp.forward = checkpointed(layer.mlp.forward)
        layer.forward = checkpointed(layer.forward)
    replay = replay_of(model)
    outputs = [
        replay.run(model, slot_of(part), forward_of(model, seed)) for seed, part in enumerate((FIRST, SECOND), start=1)
    ]
    total = outputs[0].mean() + outputs[1].mean()
    if in_thread:
        thread = threading.Thread(target=total.backward)
        thread.start()
        thread.join()
    else:
        total.backward()
    assert_close(gradients(model), expected_gradients(backend, FIRST, SECOND))


def test_run_within_a_checkpoint_is_recomputed_with_its_routes(backend):
    model = build(backend)
    replay = replay_of(model)
    scale = torch.ones((), requires_grad=True)

    def step(scale):
        return replay.run(model, slot_of(FIRST), forward_of(model, 1)) * scale

    checkpoint(step, scale, use_reentrant=True).mean().backward()
    assert_equal(gradients(model), expected_gradients(backend, FIRST))


def test_bare_forward_of_another_thread_takes_no_routes(backend):
    model = build(backend)
    replay, raised = replay_of(model), []

    def other():
        for call in (forward_of(model, 2), lambda: replay.run(model, slot_of(SECOND), forward_of(model, 2))):
            try:
                call()
            except T1Error as error:
                raised.append(str(error))

    def forward():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return forward_of(model, 1)()

    replay.run(model, slot_of(FIRST), forward)
    assert len(raised) == 2
    assert "runs in another thread" in raised[0] and "running already" in raised[1]


@pytest.mark.parametrize("given", [FIRST.numpy(), FIRST.tolist(), None])
def test_routes_that_are_no_tensor_are_named(given):
    with pytest.raises(T1Error, match=f"routes are a {type(given).__name__}"):
        MicroBatchRoutes(given)


def test_routes_without_dimensions_and_marks_of_other_types_are_named():
    with pytest.raises(T1Error, match="don't belong together"):
        MicroBatchRoutes(torch.tensor(1))
    with pytest.raises(T1Error, match="valid are a ndarray"):
        MicroBatchRoutes(FIRST, valid=torch.ones(32, dtype=torch.bool).numpy())
