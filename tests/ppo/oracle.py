"""The formulas of PPO, written as slowly and plainly as possible in float64: what the fast ones are checked against."""

from __future__ import annotations

import math

import numpy as np


def advantages(stream_values, mask, reward, gamma, lambda_, turns=None):
    """GAE of one trajectory on its whole stream, tool output included.

    stream_values[p] is the critic's output at position p; mask[t] says that token t was sampled. Walks back from the
    end and looks only at sampled tokens, with the value of token t at position t - 1.
    """
    sampled = [t for t in range(len(mask)) if mask[t]]
    result = np.full(len(mask), np.nan)
    following_value = following_advantage = 0.0
    following_turn = None
    for t in reversed(sampled):
        last = following_turn is None
        inside = not last and turns is not None and turns[t] == following_turn
        g = 1.0 if inside else gamma
        trace = 1.0 if inside else lambda_
        value = float(stream_values[t - 1])
        delta = (reward if last else 0.0) + g * following_value - value
        following_advantage = delta + g * trace * following_advantage
        following_value = value
        following_turn = turns[t] if turns is not None else 0
        result[t] = following_advantage
    return result


def exact(array):
    """float64 numbers: a numpy float32 times a Python float would stay float32."""
    return np.asarray(array, np.float64)


def policy_loss(new, old, advantage, low, high, dual_clip, weights, correction):
    total = 0.0
    for n, o, a, w, c in zip(*map(exact, (new, old, advantage, weights, correction)), strict=True):
        if w == 0:
            continue
        ratio = math.exp(n - o)
        loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
        if dual_clip and a < 0:
            loss = min(loss, -a * dual_clip)
        total += w * c * loss
    return total


def kl(policy, reference, kind):
    r = reference - policy
    return {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r}[kind]


def value_loss(values, old, returns, clip, kind, delta, weights):
    def of(error):
        if kind == "mse":
            return error**2 / 2
        return error**2 / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2)

    total = 0.0
    for v, o, r, w in zip(*map(exact, (values, old, returns, weights)), strict=True):
        if w == 0:
            continue
        loss = of(v - r)
        if clip:
            loss = max(loss, of(min(max(v, o - clip), o + clip) - r))
        total += w * loss
    return total


def token_logprobs(hidden, weight, targets, temperature):
    """float64 log-probs and entropies of full logits."""
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T / temperature
    logits -= logits.max(axis=1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logs[np.arange(len(targets)), targets], -(np.exp(logs) * logs).sum(axis=1)
