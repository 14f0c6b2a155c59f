"""A GPT with a multi-token prediction layer, as a plain Megatron-Core training loop has it: labels in, losses out."""

from __future__ import annotations

from typing import Any

EVEN_VOCABULARY = 68  # plain GPTModel counts padded rows of the vocabulary in its softmax


def build_with_mtp(config, backend, role: str, **overrides: Any) -> list:
    """Chunks of a `GPTModel` with one multi-token prediction layer on the last stage; a policy only."""
    import dataclasses

    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megatron_t1.model.build import transformer_config
    from megatron_t1.model.cpu_modules import TorchRMSNorm

    architecture = dataclasses.replace(config.model.architecture, vocab_size=EVEN_VOCABULARY)
    transformer = transformer_config(
        architecture,
        config.layout,
        "float32",
        backend=backend,
        mtp_num_layers=1,
        mtp_loss_scaling_factor=0.5,
        **overrides,
    )
    virtual = config.layout.virtual_pipeline > 1
    chunks = []
    for stage in range(config.layout.virtual_pipeline):
        where = {"ignore_virtual": False, "vp_stage": stage} if virtual else {}
        vp = {"vp_stage": stage} if virtual else {}
        spec = backend.layer_spec(transformer, stage if virtual else None)
        mtp = get_gpt_mtp_block_spec(transformer, spec, use_transformer_engine=False, **vp)
        for layer in [] if mtp is None else mtp.layer_specs:
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = TorchRMSNorm
        chunk = GPTModel(
            config=transformer,
            transformer_layer_spec=spec,
            mtp_block_spec=mtp,
            vocab_size=architecture.vocab_size,
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=state.is_pipeline_first_stage(**where),
            post_process=state.is_pipeline_last_stage(**where),
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            **vp,
        )
        chunk.architecture, chunk.role = architecture, role
        backend.after_build(chunk)
        chunks.append(chunk)
    return chunks
