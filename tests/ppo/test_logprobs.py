"""Log-probs and entropy from chunks of vocabulary-parallel logits, against full logits in float64."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_t1.errors import T1Error
from megatron_t1.ppo import sums
from megatron_t1.ppo.logprobs import token_logprobs


def inputs(count=37, hidden=24, vocabulary=101, scale=1.0, seed=0, padded=0):
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(count, hidden, generator=random)
    weight = torch.randn(vocabulary + padded, hidden, generator=random) * scale
    targets = torch.randint(0, vocabulary, (count,), generator=random)
    return states, weight, targets


def full(states, weight, targets, temperature, vocabulary):
    """Autograd through full float64 logits."""
    logs = (states.double() @ weight[:vocabulary].double().t() / temperature).log_softmax(dim=1)
    return logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(dim=1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])  # miles#1345 trl#6789
@pytest.mark.parametrize("chunk", [1, 10, 1000])
@pytest.mark.parametrize("padded", [0, 27])
def test_values_and_gradients(temperature, chunk, padded):
    states, weight, targets = inputs(padded=padded)
    grad_logprobs, grad_entropy = torch.randn(2, len(targets), generator=torch.Generator().manual_seed(1))
    results = []
    for compute in (
        lambda s, w: token_logprobs(s, w, targets, temperature=temperature, vocab_size=101, chunk=chunk),
        lambda s, w: full(s, w, targets, temperature, 101),
    ):
        s, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = compute(s, w)
        (logprobs * grad_logprobs).sum().add((entropy * grad_entropy).sum()).backward()
        results.append([logprobs.detach(), entropy.detach(), s.grad, w.grad])
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), exact.double(), rtol=1e-4, atol=1e-5)
    assert not results[0][3][101:].any()
    slow = oracle.token_logprobs(states.numpy(), weight.numpy()[:101], targets.numpy(), temperature)
    np.testing.assert_allclose(results[0][0].numpy(), slow[0], atol=1e-5)
    np.testing.assert_allclose(results[0][1].numpy(), slow[1], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_on_a_large_vocabulary(dtype):  # OpenRLHF#634 transformers#31267 torchtitan#3667 prime-rl#2438
    states, weight, targets = inputs(128, 64, 32_768, scale=0.3)
    states, weight = states.to(dtype), weight.to(dtype)
    logprobs, entropy = token_logprobs(states, weight, targets, chunk=50)
    exact = full(states, weight, targets, 1.0, 32_768)
    assert logprobs.dtype == torch.float32 and (logprobs - exact[0]).abs().max() < 1e-5
    assert (entropy - exact[1]).abs().max() < 1e-4
    if dtype == torch.bfloat16:
        careless = (states @ weight.t()).log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)
        assert (careless - exact[0]).abs().mean() > 1e-3  # what the chunked fp32 path is there to avoid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_logits_are_those_of_an_engine_that_puts_out_bfloat16(dtype):  # OpenRLHF#634
    states, weight, targets = inputs(64, 32, 500, scale=0.5)
    states, weight = states.to(dtype), weight.to(dtype)
    found, _ = token_logprobs(states, weight, targets, temperature=0.7, chunk=7, rounded=torch.bfloat16)
    logits = (states.float() @ weight.float().t()).to(torch.bfloat16).double() / 0.7
    expected = logits.log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert (found - token_logprobs(states, weight, targets, temperature=0.7)[0]).abs().mean() > 1e-3


def test_low_precision_gradients_have_the_dtype_of_their_input():
    states, weight, targets = inputs()
    s, w = states.bfloat16().requires_grad_(), weight.requires_grad_()
    token_logprobs(s, w, targets)[0].sum().backward()
    assert s.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float32


def test_never_a_full_tensor_of_logits():  # slime#1523 verl#6446 SkyRL#1610 trl#4013
    states, weight, targets = inputs(512, 8, 20_000)
    states.requires_grad_()
    weight.requires_grad_()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            nonlocal largest
            result = function(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        logprobs, entropy = token_logprobs(states, weight, targets, chunk=16)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest <= 16 * 20_000


def test_the_weight_hook_fires_and_frozen_inputs_get_no_gradient():
    states, weight, targets = inputs()
    fired = []
    weight.requires_grad_().register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad.shape))
    token_logprobs(states, weight, targets)[0].sum().backward()
    assert fired == [weight.shape] and states.grad is None
    states.requires_grad_()
    token_logprobs(states, weight.detach(), targets)[0].sum().backward()
    assert states.grad is not None


def test_without_entropy():
    states, weight, targets = inputs()
    logprobs, entropy = token_logprobs(states, weight, targets, entropy=False)
    torch.testing.assert_close(logprobs, token_logprobs(states, weight, targets)[0], rtol=0, atol=1e-6)
    assert not entropy.any()


def test_a_micro_batch_without_trainable_tokens_keeps_its_graph():  # NeMo-RL#158
    states, weight, _ = inputs()
    weight.requires_grad_()
    states = states[:0].requires_grad_()
    logprobs, entropy = token_logprobs(states, weight, torch.zeros(0, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == (0,) and weight.grad is not None and not weight.grad.any()


def test_extreme_logits():
    states, weight, targets = inputs(scale=300.0)
    logprobs, entropy = token_logprobs(states, weight, targets)
    exact = full(states, weight, targets, 1.0, 101)
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=1e-5, atol=1e-2)
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"targets": torch.tensor([0, 5, 101])}, "target 2 is token id 101"),
        ({"targets": torch.tensor([0, -1, 5])}, "target 1 is token id -1"),
        ({"targets": torch.tensor([0, 5])}, r"have shapes \[3, 24\]"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"chunk": 0}, "chunk must be positive"),
    ],
)
def test_bad_input_is_named(changes, message):
    states, weight, targets = inputs(3)
    with pytest.raises(T1Error, match=message):
        token_logprobs(**{"hidden": states, "weight": weight, "targets": targets, **changes})


def parallel_rank(rank, ranks, file, padded, result):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    states, weight, targets = inputs(padded=padded)
    rows = weight.shape[0] // ranks
    s = states.requires_grad_()
    w = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    logprobs, entropy = token_logprobs(
        s, w, targets, temperature=0.8, vocab_size=101, vocab_start=rank * rows, tp_group=dist.group.WORLD, chunk=16
    )
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    reduced = s.grad.clone()
    s.grad = None
    logprobs, entropy = token_logprobs(
        s,
        w,
        targets,
        temperature=0.8,
        vocab_size=101,
        vocab_start=rank * rows,
        tp_group=dist.group.WORLD,
        reduce_hidden_grad=False,
    )
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    w.grad /= 2
    # A rank's mean over few tokens must not weigh as much as another's over many (trl#6380).
    metrics = sums.reduce({"loss": sums.weighted(torch.full((1 + 2 * rank,), float(rank)), torch.ones(1 + 2 * rank))})
    torch.save([logprobs.detach(), entropy.detach(), reduced, w.grad, s.grad, metrics["loss"]], f"{result}.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("padded", [1, 133])  # 133: the second rank holds padding only
def test_two_vocabulary_parallel_ranks_equal_one(tmp_path, padded):  # Megatron-LM#6700
    mp.spawn(parallel_rank, (2, tmp_path / "rendezvous", padded, str(tmp_path / "result")), nprocs=2)
    states, weight, targets = inputs(padded=padded)
    s, w = states.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = full(s, w, targets, 0.8, 101)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    found = [torch.load(f"{tmp_path}/result.{rank}", weights_only=True) for rank in range(2)]
    for rank in range(2):
        torch.testing.assert_close(found[rank][0].double(), logprobs.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(found[rank][1].double(), entropy.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(found[rank][2], s.grad, rtol=1e-4, atol=1e-5)
        assert found[rank][5].tolist() == [3.0, 4.0]
    torch.testing.assert_close(found[0][4] + found[1][4], s.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([found[0][3], found[1][3]]), w.grad, rtol=1e-4, atol=1e-5)


def test_a_weight_that_lacks_rows_is_refused():
    with pytest.raises(T1Error, match="the vocabulary has 20 tokens, the weight ends with row 9"):
        token_logprobs(torch.randn(2, 8), torch.randn(10, 8), torch.tensor([1, 3]), vocab_size=20)


def test_autocast_does_not_reach_the_logits():
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([1, 3, 0, 9])
    expected, _ = token_logprobs(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(token_logprobs(hidden, weight, targets)[0], expected)
