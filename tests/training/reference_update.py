"""One PPO update from beginning to end, in float64 numpy: what the trainer does, without anything that makes it fast.

Read it from top to bottom to see what an iteration of training is. Nothing here is packed, padded, parallel, chunked
or compiled; nothing is imported from the trainer. One trajectory is computed after the other, position by position
where that is clearer. The trainer must give the same numbers (test_reference_update.py).

    1. derivatives   a float64 array that remembers how it was made
    2. the model     Qwen3-MoE, with the experts of the rollout replayed; its two heads, vocabulary and value
    3. credit        which value belongs to which token, advantages, returns
    4. the losses    of the critic and of the actor
    5. the step      one mean over all loss tokens, clipped gradient, Adam

Letters in shapes: T tokens of a trajectory, n of them sampled, H hidden size, V vocabulary, A query heads, G key/value
heads, D head size, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

# ======================================================================================================================
# 1. Derivatives. Every operation notes, for each operand, how a gradient of its result becomes one of the operand.
#    `backward` walks from a scalar to everything it was made of, results before operands, and adds up what arrives.
# ======================================================================================================================


class Array:
    """A float64 array and, after `backward`, the derivative of the final number by each of its elements."""

    def __init__(self, value, operands: tuple = ()):
        self.value = np.asarray(value, np.float64)
        self.gradient = np.zeros_like(self.value)
        self.operands = operands  # pairs (operand, function from the gradient of this to that of the operand)

    def __add__(self, other):
        other = constant(other)
        return Array(
            self.value + other.value,
            ((self, lambda g: summed_to(g, self.value.shape)), (other, lambda g: summed_to(g, other.value.shape))),
        )

    def __mul__(self, other):
        other = constant(other)
        return Array(
            self.value * other.value,
            (
                (self, lambda g: summed_to(g * other.value, self.value.shape)),
                (other, lambda g: summed_to(g * self.value, other.value.shape)),
            ),
        )

    def __matmul__(self, other):
        other = constant(other)

        def turned(matrix):
            return np.swapaxes(matrix, -1, -2)

        return Array(
            self.value @ other.value,
            (
                (self, lambda g: summed_to(g @ turned(other.value), self.value.shape)),
                (other, lambda g: summed_to(turned(self.value) @ g, other.value.shape)),
            ),
        )

    def __pow__(self, exponent: float):
        return Array(self.value**exponent, ((self, lambda g: g * exponent * self.value ** (exponent - 1)),))

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + (-constant(other))

    def __truediv__(self, other):
        return self * constant(other) ** -1.0

    def __getitem__(self, key):
        """Some elements; one that is taken several times gets the sum of its gradients."""

        def back(g):
            whole = np.zeros_like(self.value)
            np.add.at(whole, key, g)
            return whole

        return Array(self.value[key], ((self, back),))

    def sum(self, axis=None):
        """Sum, with the axis kept."""
        keep = axis is not None
        return Array(
            self.value.sum(axis=axis, keepdims=keep), ((self, lambda g: np.broadcast_to(g, self.value.shape)),)
        )

    def reshape(self, *shape):
        return Array(self.value.reshape(shape), ((self, lambda g: g.reshape(self.value.shape)),))

    def transpose(self, *axes):
        return Array(self.value.transpose(axes), ((self, lambda g: g.transpose(np.argsort(axes))),))


def constant(value) -> Array:
    return value if isinstance(value, Array) else Array(value)


def summed_to(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Undo broadcasting: an operand that was repeated gets the sum over its repetitions."""
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    repeated = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum(axis=repeated, keepdims=True)


def exp(x: Array) -> Array:
    value = np.exp(x.value)
    return Array(value, ((x, lambda g: g * value),))


def log(x: Array) -> Array:
    return Array(np.log(x.value), ((x, lambda g: g / x.value),))


def where(condition: np.ndarray, one: Array, other: Array) -> Array:
    """Element by element; the condition is a fact and has no derivative."""
    return constant(one) * condition + constant(other) * ~condition


def maximum(one: Array, other: Array) -> Array:
    return where(one.value >= other.value, one, other)


def placed(rows: Array, where_to: np.ndarray, count: int) -> Array:
    """[count, H] of zeros with `rows` [m, H] added at the row numbers `where_to` [m]."""
    value = np.zeros((count, rows.value.shape[1]))
    np.add.at(value, where_to, rows.value)
    return Array(value, ((rows, lambda g: g[where_to]),))


def backward(result: Array) -> None:
    """Add the derivative of a scalar to `gradient` of everything it was made of."""
    order: list[Array] = []
    seen: set[int] = set()
    stack = [(result, False)]
    while stack:  # results after their operands, without recursion: the graphs are deep
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(operand, False) for operand, _ in node.operands]
    result.gradient = np.ones_like(result.value)
    for node in reversed(order):
        for operand, back in node.operands:
            operand.gradient = operand.gradient + back(node.gradient)


# ======================================================================================================================
# 2. The model. Weights carry their Hugging Face names. A weight matrix is [out, in], so it is turned to be applied.
# ======================================================================================================================


@dataclass
class Numbers:
    """What config.json says about a Qwen3-MoE."""

    layers: int
    heads: int
    groups: int
    head_dim: int
    experts: int
    top_k: int
    epsilon: float
    rope_theta: float


@dataclass
class Episode:
    """One trajectory as it was recorded, and what the update works out about its n sampled tokens."""

    ids: np.ndarray  # int [T]
    sampled: np.ndarray  # bool [T]: tokens the policy chose; the rest was given to it
    routes: np.ndarray  # int [T, layers, K]: experts each token took in the sampler
    routed: np.ndarray  # bool [T]: whether they were recorded; the very last token's never are
    reward: float
    sampler_logprobs: np.ndarray  # [n]
    old_values: np.ndarray = field(default_factory=lambda: np.zeros(0))
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0))
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def reading_positions(self) -> np.ndarray:
        """Where the model is read for each sampled token: the position before it, where it is about to be chosen. For
        the first token after tool output that is the output's last token."""
        return np.flatnonzero(self.sampled) - 1


Weights = dict[str, Array]


def linear(x: Array, weight: Array) -> Array:
    return x @ weight.transpose(1, 0)


def softmax(x: Array) -> Array:
    """Over the last axis. Subtracting the largest number changes nothing but keeps exp in range."""
    e = exp(x - x.value.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1)


def silu(x: Array) -> Array:
    return x / (exp(-x) + 1.0)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    size = x.value.shape[-1]
    return x * ((x * x).sum(axis=-1) * (1.0 / size) + epsilon) ** -0.5 * weight


def rotated(x: Array, numbers: Numbers) -> Array:
    """Rotary positions: number i and number i + D/2 of a head turn by position * theta**(-2i/D)."""
    length, size = x.value.shape[0], numbers.head_dim
    angles = np.outer(np.arange(length), numbers.rope_theta ** (-np.arange(0, size, 2) / size))
    angles = np.concatenate([angles, angles], axis=1)[:, None, :]  # [T, 1, D]
    swap = np.zeros((size, size))  # (first half, second half) -> (-second half, first half)
    half = size // 2
    swap[half:, :half], swap[:half, half:] = -np.eye(half), np.eye(half)
    return x * np.cos(angles) + (x @ swap) * np.sin(angles)


def attention(x: Array, weights: Weights, prefix: str, numbers: Numbers) -> Array:
    """Causal, with fewer key/value heads than query heads: A / G neighbouring query heads share one."""
    length, size = x.value.shape[0], numbers.head_dim
    query = linear(x, weights[prefix + "q_proj.weight"]).reshape(length, numbers.heads, size)
    key = linear(x, weights[prefix + "k_proj.weight"]).reshape(length, numbers.groups, size)
    value = linear(x, weights[prefix + "v_proj.weight"]).reshape(length, numbers.groups, size)
    query = rotated(rms_norm(query, weights[prefix + "q_norm.weight"], numbers.epsilon), numbers).transpose(1, 0, 2)
    key = rotated(rms_norm(key, weights[prefix + "k_norm.weight"], numbers.epsilon), numbers).transpose(1, 0, 2)
    shared = np.arange(numbers.heads) // (numbers.heads // numbers.groups)
    key, value = key[shared], value.transpose(1, 0, 2)[shared]
    scores = query @ key.transpose(0, 2, 1) * size**-0.5
    future = np.triu(np.ones((length, length), bool), 1)
    mixed = softmax(where(future, constant(np.full(scores.value.shape, -1e30)), scores)) @ value
    return linear(mixed.transpose(1, 0, 2).reshape(length, -1), weights[prefix + "o_proj.weight"])


def experts(x: Array, weights: Weights, prefix: str, routes: np.ndarray, routed: np.ndarray, numbers: Numbers) -> Array:
    """The mixture. Which experts a token takes is replayed from the rollout: the sampler's router and this one may
    differ in a near tie, and then the log-prob would be that of another network. How much each of them counts comes
    from the current router, so the router has a gradient. Softmax over all experts, renormalised to the chosen ones, is
    softmax over the chosen ones.
    """
    length = x.value.shape[0]
    scores = linear(x, weights[prefix + "gate.weight"])  # [T, E]
    own = np.argsort(-scores.value, axis=1, kind="stable")[:, : numbers.top_k]
    chosen = np.where(routed[:, None], routes, own)  # [T, K]
    shares = softmax(scores[np.arange(length)[:, None], chosen])
    result = constant(np.zeros(x.value.shape))
    for number in range(numbers.experts):
        tokens, slots = np.nonzero(chosen == number)
        if len(tokens) == 0:
            continue
        name = f"{prefix}experts.{number}."
        inside = x[tokens]
        gate = silu(linear(inside, weights[name + "gate_proj.weight"]))
        output = linear(gate * linear(inside, weights[name + "up_proj.weight"]), weights[name + "down_proj.weight"])
        result = result + placed(output * shares[tokens, slots].reshape(-1, 1), tokens, length)
    return result


def hidden_states(episode: Episode, weights: Weights, numbers: Numbers) -> Array:
    """[T, H] after the last norm."""
    x = weights["model.embed_tokens.weight"][episode.ids]
    for layer in range(numbers.layers):
        prefix = f"model.layers.{layer}."
        x = x + attention(
            rms_norm(x, weights[prefix + "input_layernorm.weight"], numbers.epsilon),
            weights, prefix + "self_attn.", numbers,
        )  # fmt: skip
        x = x + experts(
            rms_norm(x, weights[prefix + "post_attention_layernorm.weight"], numbers.epsilon),
            weights, prefix + "mlp.", episode.routes[:, layer], episode.routed, numbers,
        )  # fmt: skip
    return rms_norm(x, weights["model.norm.weight"], numbers.epsilon)


def values_of(episode: Episode, critic: Weights, numbers: Numbers) -> Array:
    """[n]: what the critic expects of each sampled token's future, read before the token is known."""
    hidden = hidden_states(episode, critic, numbers)[episode.reading_positions]
    return (linear(hidden, critic["value.weight"]) + critic["value.bias"]).reshape(-1)


def logprobs_of(episode: Episode, actor: Weights, numbers: Numbers, temperature: float) -> tuple[Array, Array]:
    """[n] log-probability of each sampled token, and [n] entropy of the distribution it was drawn from."""
    logits = linear(hidden_states(episode, actor, numbers)[episode.reading_positions], actor["lm_head.weight"])
    logits = logits * (1.0 / temperature)
    largest = logits.value.max(axis=1, keepdims=True)
    logs = logits - (log(exp(logits - largest).sum(axis=1)) + largest)
    tokens = episode.ids[episode.sampled]
    return logs[np.arange(len(tokens)), tokens], -(exp(logs) * logs).sum(axis=1).reshape(-1)


# ======================================================================================================================
# 3. Credit. The sampled tokens of a trajectory are the steps of a Markov decision process; what a tool printed between
#    two of them is part of the environment's answer. There is one reward, the verifier's, with the last sampled token.
# ======================================================================================================================


def advantages_of(values: np.ndarray, reward: float, gamma: float, lambda_: float) -> np.ndarray:
    """Generalized advantage estimation, from the last sampled token to the first. Nothing follows the last one: a
    trajectory that a limit cut short was verified like any other, so its reward is known and isn't estimated again."""
    result = np.zeros(len(values))
    advantage_after = value_after = 0.0
    for step in reversed(range(len(values))):
        paid = reward if step == len(values) - 1 else 0.0
        surprise = paid + gamma * value_after - values[step]
        result[step] = advantage_after = surprise + gamma * lambda_ * advantage_after
        value_after = values[step]
    return result


# ======================================================================================================================
# 4. The losses, as sums over sampled tokens.
# ======================================================================================================================


def value_loss(values: Array, returns: np.ndarray) -> Array:
    return ((values - returns) ** 2.0).sum() * 0.5


def policy_loss(
    new: Array, old: np.ndarray, advantages: np.ndarray, clip_low: float, clip_high: float
) -> tuple[Array, dict[str, float]]:
    """PPO's clipped surrogate: the policy gains nothing by moving a token's probability further than the clip allows in
    the direction its advantage asks for."""
    ratio = exp(new - old)
    limited = where(ratio.value < 1 - clip_low, constant(np.full(len(old), 1 - clip_low)), ratio)
    limited = where(ratio.value > 1 + clip_high, constant(np.full(len(old), 1 + clip_high)), limited)
    loss = maximum(ratio * -advantages, limited * -advantages)
    stopped = ((ratio.value < 1 - clip_low) & (advantages < 0)) | ((ratio.value > 1 + clip_high) & (advantages > 0))
    log_ratio = new.value - old
    sums = {
        "policy_loss": loss.value.sum(),
        "ratio": ratio.value.sum(),
        "clip_fraction": stopped.sum(),
        "approx_kl": (np.exp(log_ratio) - 1 - log_ratio).sum() if len(old) else 0.0,
    }
    return loss.sum(), sums


# ======================================================================================================================
# 5. The step. The loss is divided once, by the number of sampled tokens of the whole batch, so it is the same however
#    the batch is split.
# ======================================================================================================================


@dataclass
class Adam:
    """Adam with decoupled weight decay (of matrices only), and the norm of the whole gradient clipped before it."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float
    clip: float
    steps: int = 0
    first: dict[str, np.ndarray] = field(default_factory=dict)
    second: dict[str, np.ndarray] = field(default_factory=dict)

    def step(self, weights: Weights) -> float:
        """Move the weights along their gradients, forget these, and return their norm before clipping."""
        norm = np.sqrt(sum((weight.gradient**2).sum() for weight in weights.values()))
        shrink = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        self.steps += 1
        for name, weight in weights.items():
            gradient = weight.gradient * shrink
            first = self.first[name] = self.beta1 * self.first.get(name, 0.0) + (1 - self.beta1) * gradient
            second = self.second[name] = self.beta2 * self.second.get(name, 0.0) + (1 - self.beta2) * gradient**2
            unbiased_first = first / (1 - self.beta1**self.steps)
            unbiased_second = second / (1 - self.beta2**self.steps)
            if weight.value.ndim > 1:
                weight.value = weight.value * (1 - self.rate * self.decay)
            weight.value = weight.value - self.rate * unbiased_first / (np.sqrt(unbiased_second) + self.epsilon)
            weight.gradient = np.zeros_like(weight.value)
        return float(norm)


def one_step(
    weights: Weights, episodes: list[Episode], loss_of: Callable[[Episode], tuple[Array, dict[str, float]]], adam: Adam
) -> dict[str, float]:
    """One optimizer step over all episodes; means of what `loss_of` sums up, and the norm of the gradient."""
    tokens = sum(int(episode.sampled.sum()) for episode in episodes)
    totals: dict[str, float] = {}
    for episode in episodes:
        loss, sums = loss_of(episode)
        backward(loss * (1.0 / tokens))
        for name, total in sums.items():
            totals[name] = totals.get(name, 0.0) + float(total)
    return {**{name: total / tokens for name, total in totals.items()}, "grad_norm": adam.step(weights)}


@dataclass
class Update:
    """Options of an iteration; the names are those of the configuration."""

    gamma: float
    lambda_actor: float
    lambda_critic: float
    clip_low: float
    clip_high: float
    entropy_coef: float
    temperature: float
    critic_epochs: int
    actor_epochs: int


def iteration(
    episodes: list[Episode], actor: Weights, critic: Weights, numbers: Numbers, options: Update, adams: dict[str, Adam]
) -> dict[str, list[dict[str, float]]]:
    """The whole update. Values come first, under the critic as it is; from them advantages (for the actor) and returns
    (for the critic); then each learns from the same trajectories. Returns what each optimizer step saw."""
    for episode in episodes:
        values = values_of(episode, critic, numbers).value
        episode.old_values = values
        episode.advantages = advantages_of(values, episode.reward, options.gamma, options.lambda_actor)
        episode.returns = values + advantages_of(values, episode.reward, options.gamma, options.lambda_critic)

    def critic_loss(episode: Episode) -> tuple[Array, dict[str, float]]:
        loss = value_loss(values_of(episode, critic, numbers), episode.returns)
        return loss, {"value_loss": float(loss.value)}

    def actor_loss(episode: Episode) -> tuple[Array, dict[str, float]]:
        new, entropy = logprobs_of(episode, actor, numbers, options.temperature)
        loss, sums = policy_loss(
            new, episode.sampler_logprobs, episode.advantages, options.clip_low, options.clip_high
        )  # fmt: skip
        sums["entropy"] = entropy.value.sum()
        return loss - entropy.sum() * options.entropy_coef, sums

    return {
        "critic": [one_step(critic, episodes, critic_loss, adams["critic"]) for _ in range(options.critic_epochs)],
        "actor": [one_step(actor, episodes, actor_loss, adams["actor"]) for _ in range(options.actor_epochs)],
    }
