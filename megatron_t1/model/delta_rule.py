"""The three functions that core's gated delta net takes from flash-linear-attention (FLA), in plain torch.

They stand in where FLA isn't installed (on a CPU): `bind` gives them to core, and a real FLA wins. All compute in
float32 (in float64 for float64 inputs) and return the type of their input, as FLA's kernels do.

Shapes: b sequences of t tokens, or b = 1 and sequences packed along t; h heads, k key and v value size; d channels,
w taps of the convolution; N chunks of C tokens.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens; the kernels' own size
CORE_MODULE = "megatron.core.ssm.gated_delta_net"


def l2norm(x: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Depthwise convolution over each sequence's own past: [b, t, d] -> ([b, t, d], None).

    Args:
        weight: [d, w]; the last tap is the token itself.
        activation: None, "silu" or "swish", applied before the result is rounded to x's type.
        cu_seqlens: int [sequences + 1], where each packed sequence starts; None: every row is one sequence.

    Raises:
        NotImplementedError: a state is given or asked for, which training doesn't do.
    """
    _refuse_states(initial_state, output_final_state)
    wide, taps = _wide(x), _wide(weight)
    length, width = x.shape[1], weight.shape[1]
    position = _positions(cu_seqlens, length, x.device)
    total = wide * taps[:, -1]
    for back in range(1, width):
        earlier = F.pad(wide, (0, 0, back, 0))[:, :length]
        total = total + (earlier * (position >= back)[:, None]) * taps[:, width - 1 - back]
    if bias is not None:
        total = total + bias
    return (F.silu(total) if activation in ("silu", "swish") else total).to(x.dtype), None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Outputs o_t = S_t^T q_t of the recurrence S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T.

    Computed in chunks: the updates of a chunk follow from one triangular system (Yang et al., Gated Delta Networks,
    arXiv 2412.06464, section 3.3), and only the state is carried from chunk to chunk. A sequence begins a new chunk and
    a state of zeros, so packed sequences never meet.

    Args:
        q, k: [b, t, h, k]. v: [b, t, h, v].
        g: [b, t, h], log of the decay, at most 0. beta: [b, t, h], in [0, 1].
        scale: of q; None: k ** -0.5.
        cu_seqlens: as for `causal_conv1d`.

    Returns:
        ([b, t, h, v] in v's type, None).

    Raises:
        NotImplementedError: as `causal_conv1d`.
    """
    _refuse_states(initial_state, output_final_state)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    batch, length = q.shape[:2]
    rows, places, starts = _chunks(batch, length, cu_seqlens)
    rows, places = rows.to(q.device), places.to(q.device)
    scaled = _wide(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
    query, key, value, decay, rate = (_cut(tensor, rows) for tensor in (scaled, k, v, g, beta))  # [N, h, C, ...]

    total = decay.cumsum(-1)  # log of the decay since the chunk began
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()  # [N, h, C, C]
    weighted = key * rate[..., None]
    system = (weighted @ key.transpose(-1, -2)) * between
    # Right-hand sides together: what the chunk writes by itself, and what it corrects of the state it finds.
    sides = torch.cat([value * rate[..., None], weighted * total.exp()[..., None]], dim=-1)
    written, corrected = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    within = (query @ key.transpose(-1, -2)) * between
    query = query * total.exp()[..., None]
    key = (key * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    kept = total[..., -1].exp()[..., None, None]

    outputs, state = [], None
    for chunk, starts_sequence in enumerate(starts):
        if starts_sequence:
            update = written[chunk]
            outputs.append(within[chunk] @ update)
            state = key[chunk] @ update
        else:
            update = written[chunk] - corrected[chunk] @ state
            outputs.append(query[chunk] @ state + within[chunk] @ update)
            state = state * kept[chunk] + key[chunk] @ update
    flat = torch.stack(outputs).transpose(1, 2).flatten(0, 1)  # [N * C, h, v]
    return flat.index_select(0, places).reshape(batch, length, *v.shape[2:]).to(v.dtype), None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _refuse_states(initial_state: Tensor | None, output_final_state: bool) -> None:
    if initial_state is not None or output_final_state:
        raise NotImplementedError("states are carried between calls only in inference, which needs FLA's kernels")


def _positions(cu_seqlens: Tensor | None, length: int, device: torch.device) -> Tensor:
    """int64 [t]: position of each token in its own sequence."""
    positions = torch.arange(length)
    if cu_seqlens is not None:
        starts = cu_seqlens.long().cpu()
        positions = positions - torch.repeat_interleave(starts[:-1], starts.diff())
    return positions.to(device)


def _chunks(batch: int, length: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, list[bool]]:
    """(token of each place in the chunks, or b * t where there is none, int64 [N * C]; the inverse, int64 [b * t];
    whether a chunk is the first of its sequence)."""
    if cu_seqlens is None:
        lengths = [length] * batch
    else:
        lengths = cu_seqlens.diff().tolist()
        if batch != 1 or sum(lengths) != length:
            raise ValueError(f"cu_seqlens of {sum(lengths)} tokens for {batch} rows of {length} tokens")
    places, starts, first = [], [], 0
    for tokens in lengths:
        chunks = -(-tokens // CHUNK)
        places.append(torch.arange(first, first + tokens))
        starts += [number == 0 for number in range(chunks)]
        first += chunks * CHUNK
    inverse = torch.cat(places)
    rows = torch.full((first,), batch * length)
    rows[inverse] = torch.arange(batch * length)
    return rows, inverse, starts


def _cut(tensor: Tensor, rows: Tensor) -> Tensor:
    """[b, t, h, ...] -> [N, h, C, ...], zeros where a chunk is longer than what is left of its sequence."""
    flat = _wide(tensor).flatten(0, 1)
    flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
    return flat.index_select(0, rows).reshape(-1, CHUNK, *flat.shape[1:]).transpose(1, 2)


def bind() -> None:
    """Give core's gated delta net these functions where it found no FLA. Idempotent; nothing of core is replaced.

    Core takes the names when it is imported, and a layer refuses to be built while `HAVE_FLA` is false.
    """
    if importlib.import_module(CORE_MODULE).HAVE_FLA:
        return
    for name, module in list(sys.modules.items()):  # one module to core 0.18, a package of several after
        if name == CORE_MODULE or name.startswith(CORE_MODULE + "."):
            module.HAVE_FLA = True
            for function in (l2norm, causal_conv1d, chunk_gated_delta_rule):
                setattr(module, function.__name__, function)
