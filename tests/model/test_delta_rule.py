"""The stand-ins for FLA's functions against the recurrence they compute, written token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_t1.model.delta_rule import CHUNK, causal_conv1d, chunk_gated_delta_rule, l2norm

HEADS, KEY, VALUE = 2, 6, 5


def recurrence(q, k, v, g, beta):
    """[t, h, v]: S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t / sqrt(k)."""
    states, outputs = [torch.zeros(KEY, VALUE, dtype=q.dtype)] * HEADS, []
    for t in range(len(q)):
        for head in range(HEADS):
            key, decay = k[t, head], g[t, head].exp()
            forget = torch.eye(KEY, dtype=q.dtype) - beta[t, head] * torch.outer(key, key)
            states[head] = decay * (forget @ states[head]) + beta[t, head] * torch.outer(key, v[t, head])
        outputs.append(torch.stack([q[t, head] @ states[head] for head in range(HEADS)]) * KEY**-0.5)
    return torch.stack(outputs)


def inputs(length: int, dtype=torch.float64):
    torch.manual_seed(length)
    q, k = (l2norm(torch.randn(1, length, HEADS, KEY, dtype=dtype)) for _ in range(2))
    v = torch.randn(1, length, HEADS, VALUE, dtype=dtype)
    return q, k, v, -3 * torch.rand(1, length, HEADS, dtype=dtype), torch.rand(1, length, HEADS, dtype=dtype)


@settings(max_examples=12)
@given(st.lists(st.sampled_from([1, 2, 31, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]), min_size=1, max_size=3))
def test_every_packed_sequence_follows_its_own_recurrence(lengths):
    tensors = inputs(sum(lengths))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    found, state = chunk_gated_delta_rule(*tensors, cu_seqlens=ends)
    parts = zip(*(tensor[0].split(lengths) for tensor in tensors), strict=True)
    assert state is None
    assert (found[0] - torch.cat([recurrence(*part) for part in parts])).abs().max() < 1e-12


def test_rows_without_boundaries_are_sequences():
    tensors = [torch.cat([one, one.flip(1)]) for one in inputs(70)]
    found, _ = chunk_gated_delta_rule(*tensors)
    for row in range(2):
        assert (found[row] - recurrence(*(tensor[row] for tensor in tensors))).abs().max() < 1e-12


def test_gradients_are_those_of_the_recurrence():
    tensors = [tensor.requires_grad_() for tensor in inputs(66)]
    weight = torch.randn(66, HEADS, VALUE, dtype=torch.float64)
    ends = torch.tensor([0, 2, 66])
    found = torch.autograd.grad((chunk_gated_delta_rule(*tensors, cu_seqlens=ends)[0][0] * weight).sum(), tensors)
    parts = zip(*(tensor[0].split([2, 64]) for tensor in tensors), strict=True)
    expected = torch.autograd.grad((torch.cat([recurrence(*part) for part in parts]) * weight).sum(), tensors)
    assert max((one - other).abs().max() for one, other in zip(found, expected, strict=True)) < 1e-11


def test_a_long_strong_decay_stays_finite():
    q, k, v, g, beta = inputs(300, torch.float32)
    g = (g - 40).requires_grad_()
    found, _ = chunk_gated_delta_rule(q, k, v, g, beta)
    assert found.isfinite().all()
    assert torch.autograd.grad(found.sum(), g)[0].isfinite().all()


def test_the_convolution_sees_only_its_own_past():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, 9, 3), torch.randn(3, 4), torch.randn(3)
    found, _ = causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=torch.tensor([0, 2, 9]))
    for first, last in ((0, 2), (2, 9)):
        for t in range(first, last):
            taps = sum(weight[:, 3 - back] * x[0, t - back] for back in range(4) if t - back >= first)
            assert torch.allclose(found[0, t], torch.nn.functional.silu(taps + bias), atol=1e-6)


def test_types_are_kept_and_states_refused():
    q, k, v, g, beta = (tensor.bfloat16() for tensor in inputs(5))
    assert chunk_gated_delta_rule(q, k, v, g, beta)[0].dtype == l2norm(q).dtype == torch.bfloat16
    assert causal_conv1d(v.flatten(2), torch.ones(HEADS * VALUE, 4))[0].dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="inference"):
        chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 4]))
