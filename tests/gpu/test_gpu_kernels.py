"""Log-probs and replay on a GPU: exact against float64, no wait of the host, no host-side copy of what is large."""

from __future__ import annotations

import pytest
import torch

from megatron_t1.ppo.gae import generalized_advantages
from megatron_t1.ppo.logprobs import token_logprobs
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [32_768, 248_320])
def test_logprobs_against_float64(dtype, vocabulary):
    random = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(256, 512, generator=random, device="cuda").to(dtype)
    weight = (torch.randn(vocabulary, 512, generator=random, device="cuda") * 0.05).to(dtype)
    targets = torch.randint(0, vocabulary, (256,), generator=random, device="cuda")
    logs = (hidden.double() @ weight.double().t()).log_softmax(dim=1)
    exact = logs.gather(1, targets[:, None]).squeeze(1)
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=100)
    assert float((logprobs - exact).abs().max()) < 1e-5
    assert float((entropy + (logs.exp() * logs).sum(dim=1)).abs().max()) < 1e-4


def test_gradients_of_logprobs_in_low_precision():
    random = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(64, 128, generator=random, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(4096, 128, generator=random, device="cuda") * 0.1).bfloat16().requires_grad_()
    targets = torch.randint(0, 4096, (64,), generator=random, device="cuda")
    token_logprobs(hidden, weight, targets)[0].sum().backward()
    one, other = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    (one @ other.t()).log_softmax(dim=1).gather(1, targets[:, None]).sum().backward()
    for found, exact in ((hidden.grad, one.grad), (weight.grad, other.grad)):
        assert float((found.double() - exact).norm() / exact.norm()) < 1e-2


def test_advantages_on_the_gpu_are_those_on_the_cpu():
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5000, 1, 333, 4096])
    values, rewards = torch.randn(int(lengths.sum()), generator=random), torch.tensor([1.0, 0.5, 0.0, 2.0])
    options = {"gamma": 0.999, "lambda_": 0.97}
    here = generalized_advantages(values, lengths, rewards, **options)
    there = generalized_advantages(values.cuda(), lengths.cuda(), rewards.cuda(), **options)
    torch.testing.assert_close(here, there.cpu(), rtol=1e-5, atol=1e-4)


def test_replay_takes_the_recorded_experts_without_waiting_for_the_gpu():
    from megatron_t1.config.schema import LayoutConfig
    from megatron_t1.model.backend import select_backend

    backend = select_backend("cuda_torch")
    backend.prepare()
    from megatron_t1.model.parallel import destroy_parallel, initialize_parallel
    from megatron_t1.routing.options import ReplayOptions
    from megatron_t1.routing.replay import RoutingReplay
    from megatron_t1.routing.slot import MicroBatchRoutes
    from tests.routing.stack import HostReads, RouterStack, router_config

    initialize_parallel(LayoutConfig(processes=1, expert=1), backend, seed=0)
    try:
        stack = RouterStack(router_config(2, 256, 8, 64)).to(backend.device)
        hidden = torch.randn(512, 1, 64, device=backend.device, requires_grad=True)
        routes = torch.rand(512, 2, 256, device=backend.device).argsort(dim=-1)[..., :8].to(torch.uint8)
        slot = MicroBatchRoutes(routes, torch.ones(512, dtype=torch.bool, device=backend.device))
        replay = RoutingReplay(stack, options=ReplayOptions(check=False))
        with HostReads() as reads:
            total = replay.run(stack, slot, lambda: stack(hidden))
            total.sum().backward()
        taken = torch.zeros(512, 256, dtype=torch.bool, device=backend.device)
        for layer in range(2):
            taken.scatter_(1, routes[:, layer].long(), True)
        assert torch.equal(total.detach() > 0, taken)
        assert not reads.counts
        assert all(float(router.weight.grad.abs().sum()) > 0 for router in stack.routers)
        replay.close()
    finally:
        destroy_parallel()
