"""Generalized advantage estimation over sampled tokens (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

Tokens are compressed: of every trajectory only the sampled ones, in order, concatenated over trajectories. Tool output,
prompts and repairs are no steps of the policy: they aren't in these arrays, so they can neither take up a reward nor
leak into a value (miles#1827, verl#2337). Shapes: N sampled tokens of S trajectories.

Which value belongs to which token: the value of a sampled token is the critic's output at the position before it, where
everything the policy knew when it chose the token has been read. After tool output that is the output's last token:

    position        0        1          2            3        4
    token           prompt   sampled a  tool output  sampled b  sampled c
    value read at            0          -            2        3
    compressed      values = [V(0), V(2), V(3)]       (of a, b, c)

    delta_a = g * V(2) - V(0)      the next state of a is the one b is chosen in, after the tool has answered
    delta_b = g * V(3) - V(2)
    delta_c = reward - V(3)        the reward is paid with the last sampled token; nothing follows it
    A_c = delta_c,  A_b = delta_b + g l A_c,  A_a = delta_a + g l A_b

A trajectory cut by a limit but verified is terminal too: its reward is known, bootstrapping would count it twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_t1.errors import T1Error


def generalized_advantages(
    values: Tensor,
    lengths: Tensor,
    rewards: Tensor,
    *,
    gamma: float,
    lambda_: float | Tensor,
    token_rewards: Tensor | None = None,
    turns: Tensor | None = None,
) -> Tensor:
    """Advantages of all sampled tokens.

    Args:
        values: [N], the critic's value of each sampled token.
        lengths: int [S], sampled tokens of each trajectory, at least 1; their sum is N.
        rewards: [S], paid with the last sampled token of each trajectory.
        gamma: discount, 0 to 1.
        lambda_: trace decay, 0 to 1: one number, or [S].
        token_rewards: [N], added to each step (a KL penalty, for example).
        turns: int [N]; when given, discount and trace apply only between turns, and not inside one.

    Returns:
        float32 [N]. Computed in float64: at lambda near 1 and 131,072 tokens fp32 sums lose the fourth digit.

    Raises:
        T1Error: shapes that don't fit, gamma or lambda outside 0 to 1, a trajectory without tokens.
    """
    lengths = lengths.to(values.device, torch.int64)
    decays = torch.as_tensor(lambda_, dtype=torch.float64, device=values.device)
    _check(values, lengths, rewards, gamma, decays)
    count = len(values)
    if count == 0:
        return values.new_zeros(0, dtype=torch.float32)
    last = lengths.cumsum(0) - 1
    exact = values.double()
    discount = torch.full((count,), float(gamma), dtype=torch.float64, device=values.device)
    trace = decays.expand(count).clone() if decays.ndim == 0 else decays.repeat_interleave(lengths)
    if turns is not None:
        inside = torch.zeros(count, dtype=torch.bool, device=values.device)
        inside[:-1] = turns[1:] == turns[:-1]
        discount[inside] = 1.0
        trace[inside] = 1.0
    discount[last] = 0.0
    deltas = torch.empty_like(exact)
    torch.mul(discount[:-1], exact[1:], out=deltas[:-1])
    deltas[-1] = 0.0
    deltas -= exact
    deltas[last] += rewards.to(deltas)
    if token_rewards is not None:
        deltas += token_rewards
    return reverse_scan(deltas, trace.mul_(discount)).float()


def reverse_scan(inputs: Tensor, decays: Tensor) -> Tensor:
    """Solve y[t] = inputs[t] + decays[t] * y[t+1] with y[N] = 0, in about 2 sqrt(N) vectorised steps.

    The sequence is cut into about sqrt(N) chunks that are solved side by side, as if nothing followed them; what
    follows enters through the product of decays from a token to the end of its chunk. A decay of 0 ends a trajectory.

    Args:
        inputs, decays: float [N].

    Returns:
        [N], dtype of `inputs`.
    """
    count = len(inputs)
    if count == 0:
        return inputs.clone()
    steps = max(1, int(count**0.5))
    chunks = -(-count // steps)

    def by_step(flat: Tensor) -> Tensor:  # [steps, chunks], so that one step of all chunks is contiguous
        padded = flat.new_zeros(chunks * steps)
        padded[:count] = flat
        return padded.view(chunks, steps).t().contiguous()

    solved, products = by_step(inputs), by_step(decays)
    rows, factors = solved.unbind(), products.unbind()
    for step in range(steps - 2, -1, -1):
        rows[step].addcmul_(factors[step], rows[step + 1])
        factors[step].mul_(factors[step + 1])
    heads, through = rows[0].tolist(), factors[0].tolist()
    following, carry = [0.0] * chunks, 0.0
    for chunk in range(chunks - 1, -1, -1):
        following[chunk] = carry
        carry = heads[chunk] + through[chunk] * carry
    solved.addcmul_(products, torch.tensor(following, dtype=inputs.dtype, device=inputs.device))
    return solved.t().reshape(-1)[:count]


def returns(values: Tensor, advantages: Tensor) -> Tensor:
    """float32 [N]: the critic's targets, advantages (of the critic's own lambda) + values."""
    return (values.double() + advantages.double()).float()


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """float64 [S]: lambda = 1 - 1 / (alpha * sampled tokens) (VAPO, arXiv 2504.05118, eq. 6), not below 0."""
    if not alpha > 0:
        raise T1Error(f"alpha must be positive, got {alpha}", where="train.gae.length_adaptive_alpha")
    return (1.0 - 1.0 / (alpha * lengths.double())).clamp(min=0.0)


def _check(values: Tensor, lengths: Tensor, rewards: Tensor, gamma: float, decays: Tensor) -> None:
    problem = ""
    if values.ndim != 1 or lengths.ndim != 1 or int(lengths.sum()) != len(values):
        problem = f"lengths add up to {int(lengths.sum())}, but values have shape {list(values.shape)}"
    elif len(lengths) and int(lengths.min()) < 1:
        problem = f"trajectory {int(lengths.argmin())} has no sampled token; exclude it (trajectory.selection)"
    elif rewards.shape != lengths.shape:
        problem = f"rewards have shape {list(rewards.shape)}, but there are {len(lengths)} trajectories"
    elif not 0.0 <= gamma <= 1.0:
        problem = f"gamma is {gamma}, it must be in 0 to 1"
    elif decays.ndim and decays.shape != lengths.shape:
        problem = f"lambda has shape {list(decays.shape)}, but there are {len(lengths)} trajectories"
    elif decays.numel() and not bool(((decays >= 0) & (decays <= 1)).all()):
        problem = "lambda must be in 0 to 1"
    elif not bool(torch.isfinite(values).all()):
        problem = f"the value of sampled token {int((~torch.isfinite(values)).nonzero()[0])} isn't finite"
    elif not bool(torch.isfinite(rewards).all()):
        problem = f"the reward of trajectory {int((~torch.isfinite(rewards)).nonzero()[0])} isn't finite"
    if problem:
        raise T1Error(problem, where="generalized_advantages")
