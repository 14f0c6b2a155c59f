"""A whole iteration of the trainer against the one-file reference: values, credit, losses, gradients, new weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_t1.paths import RunPaths
from megatron_t1.trajectory.sidecar import read_sidecar
from megatron_t1.trajectory.store import RolloutStore
from tests.tiny_model import ARCHITECTURE
from tests.training import reference_update as reference
from tests.training.synthetic import save_config

NUMBERS = reference.Numbers(
    layers=ARCHITECTURE.num_hidden_layers,
    heads=ARCHITECTURE.num_attention_heads,
    groups=ARCHITECTURE.num_key_value_heads,
    head_dim=ARCHITECTURE.head_dim,
    experts=ARCHITECTURE.num_experts,
    top_k=ARCHITECTURE.num_experts_per_tok,
    epsilon=ARCHITECTURE.rms_norm_eps,
    rope_theta=ARCHITECTURE.rope_theta,
)


def test_the_reference_differentiates_itself_correctly():
    """Its derivatives against differences of its losses, for a few elements of every kind of weight."""
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (67, 32), "model.norm.weight": (32,), "lm_head.weight": (67, 32),
    }  # fmt: skip
    layer = {
        "input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_norm": (16,),
        "self_attn.k_norm": (16,), "self_attn.q_proj": (64, 32), "self_attn.k_proj": (32, 32),
        "self_attn.v_proj": (32, 32), "self_attn.o_proj": (32, 64), "mlp.gate": (8, 32),
        **{f"mlp.experts.{n}.{part}_proj": (16, 32) for n in range(8) for part in ("gate", "up")},
        **{f"mlp.experts.{n}.down_proj": (32, 16) for n in range(8)},
    }  # fmt: skip
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    weights = {name: reference.Array(random.normal(size=shape) * 0.3) for name, shape in shapes.items()}
    numbers = replace(NUMBERS, layers=1)
    sampled = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)
    routes = random.random((8, 1, 8)).argsort(axis=2)[:, :, :2]
    episode = reference.Episode(
        random.integers(0, 67, 8), sampled, routes, np.arange(8) < 7, 1.0, -3 - random.random(4)
    )  # fmt: skip
    advantages = random.normal(size=4)

    def loss() -> reference.Array:
        new, entropy = reference.logprobs_of(episode, weights, numbers, 0.8)
        return reference.policy_loss(new, episode.sampler_logprobs, advantages, 0.9, 5.0)[0] - entropy.sum() * 0.3

    reference.backward(loss())
    for name, weight in weights.items():
        place = np.unravel_index(np.abs(weight.gradient).argmax(), weight.value.shape)
        at, found = weight.value[place], []
        for step in (1e-6, -1e-6):
            weight.value[place] = at + step
            found.append(float(loss().value))
        weight.value[place] = at
        assert (found[0] - found[1]) / 2e-6 == pytest.approx(weight.gradient[place], rel=1e-4, abs=1e-7), name


def hugging_face_weights(config, backend, role: str, version: int) -> dict[str, np.ndarray]:
    """Weights of a checkpoint under their Hugging Face names, the value head's under value.weight and value.bias."""
    import torch

    from megatron_t1.model.binding import bind
    from megatron_t1.model.build import build_model
    from megatron_t1.model.checkpoint import load_checkpoint
    from megatron_t1.model.convert import load_hf
    from megatron_t1.model.names import CheckpointNames

    kind = "policy" if role == "actor" else "value"
    chunks = build_model(config, backend, kind, initialize=False)
    if version:
        load_checkpoint(RunPaths.of(config.run.dir).checkpoint(role, version), chunks, None)
    else:
        load_hf(chunks, config.model.path, kind)
    bound, heads = bind(chunks, CheckpointNames())
    found = {
        name: torch.cat(blocks)
        for item in bound
        for name, blocks in zip(item.source.names, item.packing.unpack([item.parameter.detach()]), strict=True)
    }
    found |= {name.replace("output_layer", "value"): parameter.detach() for name, parameter in heads}
    return {name: tensor.double().numpy().copy() for name, tensor in found.items()}


def adam(options) -> reference.Adam:
    return reference.Adam(
        options.lr, options.beta1, options.beta2, options.eps, options.weight_decay, options.clip_grad
    )  # fmt: skip


@pytest.mark.slow
def test_the_trainer_makes_the_same_update(make_run, backend):  # Megatron-LM#936 NeMo-RL#212 slime#365 verl#7200
    from megatron_t1.training.context import Context
    from megatron_t1.training.main import _phase

    config = make_run(rollouts=1)
    # A large epsilon keeps Adam's step proportional to the gradient, so that weights compare gradients too; several
    # micro-batches in a step, two steps of each role, so that ratios leave 1 and Adam has a memory.
    common = dict(lr=2e-2, eps=1e-2, weight_decay=0.05, clip_grad=0.4, minibatches=1, epochs=2)
    config.train.actor = replace(config.train.actor, **common, entropy_coef=0.02, clip_low=0.2, clip_high=0.28)
    config.train.critic = replace(config.train.critic, **common, head_bias="mean_return")
    config.train.gae = replace(config.train.gae, gamma=0.99, lambda_actor=0.9, lambda_critic=0.97)
    config.train.replay.critic = True
    config.train.capacity = 64
    config.rollout.max_context = 64
    config.rollout.temperature = 1.0
    save_config(config)

    records = list(RolloutStore(RunPaths.of(config.run.dir).rollouts(0)))
    episodes = [
        reference.Episode(
            ids=record.ids.astype(int),
            sampled=record.loss_mask,
            routes=record.routes.astype(int),
            routed=record.routed,
            reward=record.header.reward["total"],
            sampler_logprobs=record.logprobs[record.loss_mask].astype(np.float64),
        )
        for record in records
    ]
    start = {role: hugging_face_weights(config, backend, role, 0) for role in ("actor", "critic")}
    start["critic"]["value.bias"][:] = np.mean([episode.reward for episode in episodes])
    weights = {
        role: {name: reference.Array(value) for name, value in named.items()} for role, named in start.items()
    }  # fmt: skip
    options = reference.Update(
        gamma=0.99, lambda_actor=0.9, lambda_critic=0.97, clip_low=0.2, clip_high=0.28, entropy_coef=0.02,
        temperature=1.0, critic_epochs=2, actor_epochs=2,
    )  # fmt: skip
    adams = {"actor": adam(config.train.actor), "critic": adam(config.train.critic)}
    expected = reference.iteration(episodes, weights["actor"], weights["critic"], NUMBERS, options, adams)

    metrics = {}
    for role in ("critic", "actor"):
        metrics |= _phase(role)(Context(config, backend, 0)).metrics
    stored = read_sidecar(RunPaths.of(config.run.dir).values(0))
    for record, episode in zip(records, episodes, strict=True):
        for name in ("old_values", "advantages", "returns"):
            found = stored[record.digest][name]
            np.testing.assert_allclose(found, getattr(episode, name), rtol=1e-4, atol=1e-5, err_msg=name)
    for role, steps in expected.items():
        assert metrics[f"{role}/optimizer_steps"] == 2
        for name in steps[0]:
            mean = np.mean([step[name] for step in steps])
            assert metrics[f"{role}/{name}"] == pytest.approx(mean, rel=2e-4, abs=1e-6), f"{role}/{name}"
        moved = off = 0.0
        for name, value in hugging_face_weights(config, backend, role, 1).items():
            own = weights[role][name].value
            moved += ((own - start[role][name]) ** 2).sum()
            off += ((value - own) ** 2).sum()
            largest = np.abs(own - start[role][name]).max()
            assert np.abs(value - own).max() < 2e-3 * largest + 1e-7, name
        assert (off / moved) ** 0.5 < 1e-4, role
    assert metrics["actor/clip_fraction"] > 0
    assert all(steps[0]["grad_norm"] > 0.4 for steps in expected.values())  # the clip is in force
