"""Record and replay the experts of every token in a plain Megatron-Core training loop.

    python docs/examples/replay_in_megatron.py

Of megatron_t1 it uses `megatron_t1.routing` alone. It trains a tiny model, also on a machine without a GPU, twice from
the same weights: with the experts its routers choose, and with a rollout's (here: recorded from this very model before
the training). It prints both losses: equal in the first step, and apart as soon as the router has moved.
"""

from __future__ import annotations

import os
from functools import partial

import torch

STEPS, MICRO_BATCHES, SEQUENCES, LENGTH, VOCABULARY = 4, 2, 2, 32, 128


def train(model, optimizer, batches, steps, replayed: bool) -> list[float]:
    """The part to take away: `batches` are (ids, labels) of one step's micro-batches; returns each step's mean loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_t1.routing.replay import RoutingReplay
    from megatron_t1.routing.slot import MicroBatchRoutes

    def forward(ids, labels):
        positions = torch.arange(LENGTH, device=ids.device)
        hidden = positions[None, None, None] > positions[None, None, :, None]  # what a token may not see
        return model(ids, positions.expand_as(ids), hidden, labels=labels)

    def forward_step(iterator, model):
        batch, routes = next(iterator)
        output = replay.run(model, MicroBatchRoutes(routes), partial(forward, *batch))
        return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    replay, losses = RoutingReplay(model), []
    with torch.no_grad():  # a rollout gives the sampler's routes instead
        routes = [replay.record(model, partial(forward, *batch))[1] for batch in batches]
    replay.mode = "replay" if replayed else "off"
    for _ in range(steps):
        optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(zip(batches, routes, strict=True)), model=model,
            num_microbatches=len(batches), seq_length=LENGTH, micro_batch_size=SEQUENCES, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        losses.append(float(sum(part["loss"] for part in parts) / len(parts)))
    replay.close()
    return losses


def build():
    """A GPT with 2 MoE layers of 8 experts, 4 for each token, with activation recomputation."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, hidden_dropout=0, attention_dropout=0,
        num_moe_experts=8, moe_ffn_hidden_size=32, moe_router_topk=4, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather", add_bias_linear=False, recompute_granularity="full",
        recompute_method="uniform", recompute_num_layers=1, use_cpu_initialization=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    return model.to(torch.cuda.current_device())


def main() -> None:
    if not torch.cuda.is_available():
        from megatron_t1.model.backend import select_backend

        select_backend("cpu").prepare()  # lets Megatron-Core run without CUDA; nothing to do with replay
    from megatron.core import parallel_state

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel()
    device = torch.cuda.current_device()
    ids = torch.randint(
        0, VOCABULARY, (MICRO_BATCHES, SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(2)
    )
    batches = [(part[:, :-1].to(device), part[:, 1:].to(device)) for part in ids]
    for replayed in (False, True):
        model = build()
        losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches, STEPS, replayed)
        print("replayed:" if replayed else "native:  ", " ".join(f"{loss:.6f}" for loss in losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
