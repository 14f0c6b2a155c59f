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

    G = A + V         the lambda-return, the critic's target

A trajectory cut by a limit but verified is terminal too: its reward is known, bootstrapping would count it twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_t1.errors import T1Error

CHUNK = 64  # tokens solved by one row of a matrix product


def generalized_advantages(values: Tensor, lengths: Tensor, rewards: Tensor, **options: Any) -> Tensor:
    """Advantages of all sampled tokens, float32 [N]: `lambda_returns` (same arguments, same errors) minus values."""
    return lambda_returns(values, lengths, rewards, **options).sub_(values.detach())


def lambda_returns(
    values: Tensor,
    lengths: Tensor,
    rewards: Tensor,
    *,
    gamma: float,
    lambda_: float | Tensor,
    token_rewards: Tensor | None = None,
    turns: Tensor | None = None,
) -> Tensor:
    """Lambda-returns of all sampled tokens: the critic's targets, and the advantages when values are subtracted.

    The sum of eq. 16 is rearranged into G_t = r_t + gamma ((1 - lambda) V_{t+1} + lambda G_{t+1}), A_t = G_t - V_t.
    At lambda = 1 the values cancel exactly instead of in a sum of 131,072 differences, so fp32 suffices inside a chunk
    of tokens; what is carried from chunk to chunk is float64.

    Args:
        values: [N], the critic's value of each sampled token.
        lengths: int [S], sampled tokens of each trajectory, at least 1; their sum is N.
        rewards: [S], paid with the last sampled token of each trajectory.
        gamma: discount, 0 to 1.
        lambda_: trace decay, 0 to 1: one number, or [S].
        token_rewards: [N], added to each step (a KL penalty, for example).
        turns: int [N]; when given, discount and trace apply only between turns, and not inside one.

    Returns:
        float32 [N].

    Raises:
        T1Error: shapes that don't fit, gamma or lambda outside 0 to 1, a trajectory without tokens, numbers that
            aren't finite.
    """
    lambdas = torch.as_tensor(lambda_, dtype=torch.float64)
    _check(values, lengths, rewards, gamma, lambdas)
    _check_tokens(values, token_rewards, turns)
    if len(values) == 0:
        return values.new_zeros(0, dtype=torch.float32)
    sizes, lambdas = lengths.tolist(), lambdas.expand(len(lengths)).tolist()
    with torch.autocast(values.device.type, enabled=False):  # which would multiply in low precision
        if turns is not None:
            return _by_turn(values, sizes, rewards, gamma, lambdas, token_rewards, turns)
        return _by_token(values.detach().float(), sizes, rewards, gamma, lambdas, token_rewards)


def _by_token(
    values: Tensor, sizes: list[int], rewards: Tensor, gamma: float, lambdas: list[float], token_rewards: Tensor | None
) -> Tensor:
    """One decay inside each trajectory: a chunk of tokens is solved by one product with a triangular matrix.

    Every trajectory is cut into whole chunks from its end; the first one is filled up with zeros in front. What
    follows a chunk enters with its last token: G_last = x_last + gamma lambda G_next.
    """
    counts = [-(-size // CHUNK) for size in sizes]
    inputs = values.new_empty(sum(counts), CHUNK)
    flat, places, start, row = inputs.view(-1), [], 0, 0
    for size, count, lambda_ in zip(sizes, counts, lambdas, strict=True):
        stop = (row + count) * CHUNK
        flat[row * CHUNK : stop - size] = 0.0
        torch.mul(values[start + 1 : start + size], gamma * (1.0 - lambda_), out=flat[stop - size : stop - 1])
        places.append((slice(start, start + size), slice(stop - size, stop), slice(row, row + count)))
        start, row = start + size, row + count
    ends = torch.tensor([rows.stop - 1 for _, _, rows in places], device=values.device)
    inputs[ends, -1] = rewards.to(inputs)
    if token_rewards is not None:
        for tokens, place, _ in places:
            flat[place] += token_rewards[tokens]
    decays = {gamma * lambda_ for lambda_ in lambdas}
    parts = [(decays.pop(), slice(None))] if len(decays) == 1 else [
        (gamma * lambda_, rows) for lambda_, (_, _, rows) in zip(lambdas, places, strict=True)
    ]  # fmt: skip
    heads, through = inputs.new_empty(row, dtype=torch.float64), inputs.new_empty(row, dtype=torch.float64)
    powers = torch.arange(CHUNK, dtype=torch.float64, device=values.device)
    for decay, rows in parts:
        heads[rows] = (inputs[rows] @ (decay**powers).float()).double()
        through[rows] = decay**CHUNK
    through[ends] = 0.0
    following = torch.zeros_like(heads)
    following[:-1] = reverse_scan(heads, through)[1:]
    following[ends] = 0.0
    solved = torch.empty_like(inputs)
    distance = powers.unsqueeze(1) - powers  # of the token that receives, to the right, from the one that gives
    for decay, rows in parts:
        inputs[rows, -1] += (decay * following[rows]).float()
        kernel = torch.where(distance >= 0, decay ** distance.clamp(min=0.0), 0.0).float()
        torch.mm(inputs[rows], kernel, out=solved[rows])
    result, flat = torch.empty_like(values), solved.view(-1)
    for tokens, place, _ in places:
        result[tokens] = flat[place]
    return result


def _by_turn(
    values: Tensor,
    sizes: list[int],
    rewards: Tensor,
    gamma: float,
    lambdas: list[float],
    token_rewards: Tensor | None,
    turns: Tensor,
) -> Tensor:
    """Inside a turn neither discount nor trace: every token of a turn gets the return of the turn's last one."""
    exact, lengths = values.detach().double(), torch.tensor(sizes, device=values.device)
    trace = torch.tensor(lambdas, dtype=torch.float64, device=values.device).repeat_interleave(lengths)
    discount = torch.full_like(exact, gamma)
    inside = turns[1:] == turns[:-1]
    discount[:-1][inside] = trace[:-1][inside] = 1.0
    last = lengths.cumsum(0) - 1
    discount[last] = 0.0
    inputs = torch.zeros_like(exact)
    inputs[:-1] = discount[:-1] * (1.0 - trace[:-1]) * exact[1:]
    inputs[last] += rewards.to(inputs)
    if token_rewards is not None:
        inputs += token_rewards
    return reverse_scan(inputs, trace * discount).float()


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


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """float64 [S]: lambda = 1 - 1 / (alpha * sampled tokens) (VAPO, arXiv 2504.05118, eq. 6), not below 0."""
    if not alpha > 0:
        raise T1Error(f"alpha must be positive, got {alpha}", where="train.gae.length_adaptive_alpha")
    return (1.0 - 1.0 / (alpha * lengths.double())).clamp(min=0.0)


def _check_tokens(values: Tensor, token_rewards: Tensor | None, turns: Tensor | None) -> None:
    problem = ""
    for name, field in (("token_rewards", token_rewards), ("turns", turns)):
        if field is not None and field.shape != values.shape:
            problem = f"{name} have shape {list(field.shape)}, but there are {len(values)} sampled tokens"
    if not problem and token_rewards is not None and not bool((finite := torch.isfinite(token_rewards)).all()):
        problem = f"the reward of sampled token {int((~finite).nonzero()[0])} isn't finite"
    if problem:
        raise T1Error(problem, where="lambda_returns")


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
    elif not bool(torch.isfinite(values.sum())) and not bool((finite := torch.isfinite(values)).all()):
        problem = f"the value of sampled token {int((~finite).nonzero()[0])} isn't finite"
    elif not bool((finite := torch.isfinite(rewards)).all()):
        problem = f"the reward of trajectory {int((~finite).nonzero()[0])} isn't finite"
    if problem:
        raise T1Error(problem, where="lambda_returns")
