"""Log-probabilities and entropy of tokens from hidden states and a vocabulary-parallel output layer.

A full [tokens, vocabulary] tensor of a long trajectory is tens of gigabytes (SkyRL#1610), so tokens are projected in
chunks, in forward and again in backward. Everything from the logits on is fp32: a log-softmax in bf16 is off by 0.02
nats on average, as much as the whole gap between sampler and trainer (OpenRLHF#634). Ranks of a tensor-parallel group
exchange four numbers per token, never logits (Megatron-LM#6700).

Legend: N tokens, H hidden size, V vocabulary without padding, tp tensor-parallel size, U columns of this rank's weight.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_t1.errors import T1Error

DEFAULT_CHUNK = 1024
_HAS_WIDE_OUTPUT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int = DEFAULT_CHUNK,
    reduce_hidden_grad: bool = True,
    entropy: bool = True,
    wide: bool = False,
    rounded: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of its distribution.

    Project only the positions that need a loss: select them from the hidden states before the call. Both results carry
    gradients to `hidden` and `weight`; weight's gradient goes through autograd as usual, so hooks on it fire.

    Args:
        hidden: [N, H], float32 or bfloat16, equal on all ranks of `tp_group`.
        weight: [U, H], this rank's rows of the output layer, possibly padded. In float32 it is the fp32 head.
        targets: int [N], token ids in 0 .. vocab_size - 1.
        temperature: logits are divided by it, as the sampling contract says.
        vocab_size: V; columns at and beyond it are padding and get no probability. None: all of `weight`'s (one rank
            only).
        vocab_start: token id of this rank's first row.
        tp_group: ranks that hold the other rows; None: this rank holds all.
        chunk: tokens projected at a time; memory is a few times chunk * U * 4 bytes.
        reduce_hidden_grad: sum the gradient of `hidden` over `tp_group`. Switch off where what produced `hidden` does
            it (Megatron's gather from the sequence-parallel region, whose backward is a reduce-scatter).
        entropy: whether the entropy is wanted; without, zeros are returned and a pass over the logits is saved.
        wide: multiply in fp32 throughout. Otherwise low-precision inputs on CUDA are multiplied by tensor cores: their
            logits are the same fp32 sums, but the gradient of the logits is rounded before it is multiplied.
        rounded: round the logits to this type first, as an engine does whose output layer puts it out: for measuring
            what that costs. The gradient passes the rounding unchanged.

    Returns:
        log-probabilities float32 [N], and entropy in nats float32 [N].

    Raises:
        T1Error: a target outside the vocabulary, a temperature that isn't positive, shapes that don't fit.
    """
    if vocab_size is None:
        if tp_group is not None and dist.get_world_size(tp_group) > 1:
            raise T1Error("vocab_size is needed when the vocabulary is spread over ranks", where="token_logprobs")
        vocab_size = vocab_start + weight.shape[0]
    _check(hidden, weight, targets, temperature, vocab_size, chunk)
    if tp_group is not None and dist.get_world_size(tp_group) == 1:
        tp_group = None
    if tp_group is None and vocab_size > vocab_start + weight.shape[0]:
        raise T1Error(
            f"the vocabulary has {vocab_size} tokens, the weight ends with row {vocab_start + weight.shape[0] - 1}",
            where="token_logprobs",
            remedy="give tp_group, the ranks that hold the other rows",
        )
    real = min(max(vocab_size - vocab_start, 0), weight.shape[0])
    options = (float(temperature), vocab_start, real, tp_group, chunk, reduce_hidden_grad, entropy, wide, rounded)
    device = "cpu" if hidden.is_meta else hidden.device.type  # shapes alone have no autocast of their own
    with torch.autocast(device, enabled=False):  # everything from the logits on is fp32
        return _TokenLogprobs.apply(hidden, weight, targets, options)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, vocab_size: int, chunk: int) -> None:
    problem = ""
    if hidden.ndim != 2 or weight.ndim != 2 or targets.shape != hidden.shape[:1] or hidden.shape[1] != weight.shape[1]:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (hidden, weight, targets))
        problem = f"hidden, weight and targets have shapes {shapes}; expected [N, H], [U, H], [N]"
    elif not temperature > 0:
        problem = f"temperature is {temperature}; log-probs of greedy sampling don't exist"
    elif chunk < 1:
        problem = f"chunk must be positive, got {chunk}"
    elif len(targets) and not targets.is_meta and bool((wrong := (targets < 0) | (targets >= vocab_size)).any()):
        token = int(wrong.nonzero()[0])
        problem = f"target {token} is token id {int(targets[token])}, but the vocabulary has {vocab_size} tokens"
    if problem:
        raise T1Error(problem, where="token_logprobs")


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, options: tuple) -> tuple[Tensor, Tensor]:
        temperature, vocab_start, real, group, chunk, _, want_entropy, wide, rounded = options
        count = len(targets)
        project = _Projection(weight, real, temperature, wide, min(chunk, count), rounded)
        other = project.buffer() if want_entropy else None
        logprobs = hidden.new_empty(count, dtype=torch.float32)
        entropy = hidden.new_zeros(count, dtype=torch.float32)
        normaliser = hidden.new_empty(count, dtype=torch.float32)  # log of the sum of exp(logits)
        for rows in _chunks(count, chunk):
            logits = project(hidden[rows])
            top = logits.amax(dim=1) if real else logits.new_full((logits.shape[0],), -torch.inf)
            if group is not None:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            logits.sub_(top.unsqueeze(1))
            column, mine = _own_column(targets[rows], vocab_start, real)
            chosen = _pick(logits, column, mine)
            if want_entropy:
                exponentials = torch.exp(logits, out=other[: len(logits)])
                total = exponentials.sum(dim=1)
                mean = torch.linalg.vecdot(exponentials, logits) if real else torch.zeros_like(total)
            else:
                total = logits.exp_().sum(dim=1)
                mean = torch.zeros_like(total)
            packed = torch.stack([total, chosen, mean])
            if group is not None:
                dist.all_reduce(packed, group=group)
            total, chosen, mean = packed.unbind()
            log_total = total.log()
            logprobs[rows] = chosen - log_total
            normaliser[rows] = log_total + top
            if want_entropy:
                entropy[rows] = log_total - mean / total
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        temperature, vocab_start, real, group, chunk, reduce_hidden_grad, _, wide, rounded = ctx.options
        project = _Projection(weight, real, temperature, wide, min(chunk, len(targets)), rounded)
        other = None if grad_entropy is None else project.buffer()
        # The derivative of a logit divided by the temperature.
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs / temperature
        grad_entropy = None if grad_entropy is None else grad_entropy / temperature
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(targets), chunk) if real else []:
            logs = project(hidden[rows]).sub_(normaliser[rows].unsqueeze(1))
            if grad_entropy is None:
                grad_logits = logs.exp_().mul_(-grad_logprobs[rows].unsqueeze(1))
            else:
                probabilities = torch.exp(logs, out=other[: len(logs)])
                grad_logits = _grad_logits(logs, probabilities, grad_logprobs[rows], entropy[rows], grad_entropy[rows])
            column, mine = _own_column(targets[rows], vocab_start, real)
            grad_logits.scatter_add_(1, column.unsqueeze(1), torch.where(mine, grad_logprobs[rows], 0.0).unsqueeze(1))
            if grad_hidden is not None:
                grad_hidden[rows] = project.to_hidden(grad_logits).to(hidden.dtype)
            if grad_weight is not None:
                project.add_to_weight(grad_weight[:real], grad_logits, hidden[rows])
        if grad_hidden is not None and group is not None and reduce_hidden_grad:
            summed = grad_hidden.float()
            dist.all_reduce(summed, group=group)
            grad_hidden = summed.to(hidden.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _grad_logits(
    logs: Tensor, probabilities: Tensor, grad_logprobs: Tensor, entropy: Tensor, grad_entropy: Tensor
) -> Tensor:
    """Gradient of the logits, without the target's own term, in place of `probabilities` [n, U]; `logs` is used up.

    d logprob / d logit_j = [j is target] - p_j;  d entropy / d logit_j = -p_j (log p_j + entropy).
    """
    constant = grad_logprobs + grad_entropy * entropy
    factor = logs.mul_(-grad_entropy.unsqueeze(1)).sub_(constant.unsqueeze(1))
    return probabilities.mul_(factor)


class _Projection:
    """fp32 logits from hidden states, and the way back. Logits of all chunks share one buffer.

    In low precision on CUDA the tensor cores multiply low-precision inputs and give out their fp32 sums; elsewhere the
    inputs are widened first, which is the same up to the order of summation.
    """

    def __init__(
        self, weight: Tensor, real: int, temperature: float, wide: bool, chunk: int, rounded: torch.dtype | None = None
    ):
        low_precision = weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
        self.mixed = low_precision and _HAS_WIDE_OUTPUT and not wide
        self.weight = weight[:real].detach() if self.mixed else weight[:real].detach().float()
        self.temperature, self.rounded = temperature, rounded
        self.shape = (chunk, real)
        self.logits = None if self.mixed else self.buffer()

    def buffer(self) -> Tensor:
        """float32 [chunk, U], uninitialised: fresh memory for every chunk would cost more than what is done with it."""
        return self.weight.new_empty(self.shape, dtype=torch.float32)

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, H] -> float32 [n, U] logits, divided by the temperature; valid until the next call."""
        rows = rows.detach()
        if self.rounded is not None:
            logits = self._multiply(rows, self.weight.t()).to(self.rounded).float()
            return logits.div_(self.temperature)
        if self.mixed:
            logits = self._multiply(rows, self.weight.t())
            return logits if self.temperature == 1.0 else logits.div_(self.temperature)
        return torch.mm(rows.float() / self.temperature, self.weight.t(), out=self.logits[: len(rows)])

    def to_hidden(self, grad_logits: Tensor) -> Tensor:
        """[n, U] -> float32 [n, H]."""
        return self._multiply(grad_logits, self.weight)

    def add_to_weight(self, grad_weight: Tensor, grad_logits: Tensor, rows: Tensor) -> None:
        """Add the chunk's part to float32 [U, H]."""
        if self.mixed:
            grad_weight += self._multiply(grad_logits.t(), rows)
        else:
            grad_weight.addmm_(grad_logits.t(), rows.float())

    def _multiply(self, left: Tensor, right: Tensor) -> Tensor:
        if self.mixed:
            dtype = self.weight.dtype
            return torch.mm(left.to(dtype), right.to(dtype), out_dtype=torch.float32)
        return left.float() @ right.float()


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _own_column(targets: Tensor, vocab_start: int, real: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this rank's slice, and whether it lies there."""
    column = targets.long() - vocab_start
    mine = (column >= 0) & (column < real)
    return column.clamp(0, max(real - 1, 0)), mine


def _pick(logits: Tensor, column: Tensor, mine: Tensor) -> Tensor:
    if logits.shape[1] == 0:
        return logits.new_zeros(len(column))
    return torch.where(mine, logits.gather(1, column.unsqueeze(1)).squeeze(1), 0.0)
