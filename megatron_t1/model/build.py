"""From published architecture numbers and a parallel layout to Megatron model chunks. Families: Qwen3-MoE, Qwen3.5-MoE.

Only `padded_vocabulary` and `resolve_architecture` work without torch; the rest needs a prepared backend.

A model without memory, to count and to check shapes: initialise Megatron's parallel state (a fake process group will
do, with `create_gloo_process_groups=False`), then within `torch.device("meta")` and with a backend whose stand-in for
CUDA is the meta device (`cpu_backend`), call `build_model(config, backend, role, initialize=False)`. Every parameter is
then a meta tensor of its real shape and type.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_t1.config.families import family_problems, number_problems
from megatron_t1.config.schema import ArchitectureConfig, Config, LayoutConfig, ModelConfig
from megatron_t1.errors import ConfigError
from megatron_t1.model.backend import Backend
from megatron_t1.model.stored import architecture_from_hf, require_equal_architecture

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

Role = Literal["policy", "value"]
DTYPES = ("float32", "bfloat16")


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding: the vocabulary rounded up so that every tensor-parallel rank has the same number."""
    return -(-vocab_size // tensor) * tensor


def transformer_config(
    architecture: ArchitectureConfig,
    layout: LayoutConfig,
    dtype: str,
    *,
    backend: Backend,
    aux_loss_coef: float = 0.0,
    initialize: bool = True,
    **overrides: Any,
) -> TransformerConfig:
    """Megatron's configuration of one model.

    Losses are per token (`calculate_per_token_loss`): a loss function returns a sum and a count. There is no dropout,
    and the router computes in fp32. Fused kernels are used where the backend has them, except the fused router, which
    would bypass replay.

    Args:
        architecture: vocab_size must be known.
        dtype: "float32" or "bfloat16", of parameters and activations.
        aux_loss_coef: load balancing loss; 0 builds the model without it.
        initialize: random parameters; without it they are whatever memory held, for models that are loaded at once.
        overrides: any field of TransformerConfig, applied last.

    Raises:
        ConfigError: unknown family or dtype, a piece this family doesn't have, an option that this core lacks, or one
            that trains wrong on this backend.
    """
    import torch
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    _require_buildable(architecture, dtype)
    torch_dtype = getattr(torch, dtype)
    pipelined, fused = layout.pipeline > 1, backend.fused
    fields: dict[str, Any] = dict(
        num_layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.intermediate_size or 4 * architecture.hidden_size,  # dense layers, if any
        layernorm_epsilon=architecture.rms_norm_eps,
        init_method_std=architecture.initializer_range,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        # experts
        num_moe_experts=architecture.num_experts,
        moe_ffn_hidden_size=architecture.moe_intermediate_size,
        moe_router_topk=architecture.num_experts_per_tok,
        moe_router_score_function="softmax",
        moe_router_pre_softmax=False,  # softmax over the chosen k: softmax over all, renormalised
        moe_router_dtype="fp32",
        moe_router_fusion=False,
        moe_router_load_balancing_type="aux_loss" if aux_loss_coef else "none",
        moe_aux_loss_coeff=aux_loss_coef * aux_loss_correction(layout, inspect.getsource(TopKRouter)),
        moe_token_dispatcher_type=layout.dispatcher,
        moe_grouped_gemm=fused,
        moe_permute_fusion=fused,
        # parallel sizes
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,  # Megatron trains MoE under tensor parallelism only so
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        variable_seq_lengths=pipelined and layout.virtual_pipeline == 1 and layout.dispatcher == "alltoall",
        deallocate_pipeline_outputs=pipelined and backend.name == "cuda",
        # Batched point-to-point mixes up the next and the previous rank where both are the same peer.
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
        # numbers
        params_dtype=torch_dtype,
        pipeline_dtype=torch_dtype,
        bf16=dtype == "bfloat16",
        calculate_per_token_loss=True,
        # kernels
        use_cpu_initialization=not fused,
        perform_initialization=initialize,
        masked_softmax_fusion=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
        gradient_accumulation_fusion=False,
    )
    if architecture.family == "qwen3_5_moe":
        fields.update(_hybrid_fields(architecture))
    if layout.recompute == "full":
        fields.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif layout.recompute == "moe":
        fields.update(recompute_granularity="selective", recompute_modules=["moe"])
    fields.update(overrides)
    if backend.name == "cpu" and layout.virtual_pipeline > 1 and fields["deallocate_pipeline_outputs"]:
        raise ConfigError(
            "deallocate_pipeline_outputs with virtual pipeline stages trains wrong on gloo",
            where="TransformerConfig.deallocate_pipeline_outputs",
            remedy="leave it off on CPU",
        )
    return TransformerConfig(**_known_to_core(fields, TransformerConfig))


def build_model(
    config: Config,
    backend: Backend,
    role: Role,
    aux_loss_coef: float = 0.0,
    *,
    initialize: bool = True,
    **overrides: Any,
) -> list[GPTModel]:
    """The chunks of this pipeline rank, one for each virtual stage (usually one), without DDP around them.

    `chunk(input_ids [b, s], position_ids [b, s], attention_mask, packed_seq_params=...)` returns at the last stage
    hidden states [b, s/tp, H] (policy) or values float32 [b, s] (value); at other stages what the next one reads.
    Each chunk carries `.architecture` and `.role`.

    Raises:
        ConfigError: the architecture can't be built.
    """
    from megatron.core import parallel_state

    from megatron_t1.model.heads import PolicyModel, ValueModel

    architecture, layout = resolve_architecture(config.model), config.layout
    transformer = transformer_config(
        architecture,
        layout,
        config.model.dtype,
        backend=backend,
        aux_loss_coef=aux_loss_coef,
        initialize=initialize,
        **overrides,
    )
    virtual = layout.virtual_pipeline > 1
    chunks = []
    for stage in range(layout.virtual_pipeline):
        where = {"ignore_virtual": False, "vp_stage": stage} if virtual else {}
        chunk = (PolicyModel if role == "policy" else ValueModel)(
            config=transformer,
            transformer_layer_spec=backend.layer_spec(transformer, stage if virtual else None),
            vocab_size=padded_vocabulary(architecture.vocab_size, layout.tensor),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            rotary_percent=architecture.partial_rotary_factor,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings and role == "policy",
            **({"vp_stage": stage} if virtual else {}),
        )
        chunk.architecture, chunk.role = architecture, role
        backend.after_build(chunk)
        chunks.append(chunk)
    return chunks


def resolve_architecture(model: ModelConfig) -> ArchitectureConfig:
    """The architecture of `model.path`'s checkpoint, which must be the configured one; a vocabulary of 0 is open.

    Without `model.path` it is the configured one as it stands.

    Raises:
        IncompleteError: there is no readable config.json.
        MismatchError: options and checkpoint disagree about a number that shapes the model.
    """
    if not model.path:
        return model.architecture
    stored = architecture_from_hf(model.path)
    resolved = replace(model.architecture, vocab_size=model.architecture.vocab_size or stored.vocab_size)
    require_equal_architecture(stored, resolved, where=str(Path(model.path) / "config.json"))
    return stored


def _hybrid_fields(architecture: ArchitectureConfig) -> dict[str, Any]:
    """What Qwen3.5-MoE has besides: gated delta nets, gated attention, a gated shared expert, norms of 1 + weight.

    Its checkpoints' multi-token prediction isn't trained, so it isn't built.
    """
    return dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=architecture.full_attention_interval,  # every n-th layer is *not* linear
        linear_num_key_heads=architecture.linear_num_key_heads,
        linear_num_value_heads=architecture.linear_num_value_heads,
        linear_key_head_dim=architecture.linear_key_head_dim,
        linear_value_head_dim=architecture.linear_value_head_dim,
        linear_conv_kernel_dim=architecture.linear_conv_kernel_dim,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        moe_shared_expert_intermediate_size=architecture.shared_expert_intermediate_size,
        moe_shared_expert_gate=True,
        moe_shared_expert_overlap=False,
    )


def _require_buildable(architecture: ArchitectureConfig, dtype: str) -> None:
    wrong = [*family_problems(architecture), *number_problems(architecture)]
    if architecture.vocab_size <= 0:
        wrong.append("vocab_size is 0; read the architecture from the checkpoint's config.json")
    if dtype not in DTYPES:
        wrong.append(f"dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if wrong:
        raise ConfigError(
            "the model can't be built:\n  - " + "\n  - ".join(wrong), where="model.architecture, model.dtype"
        )


def _known_to_core(options: dict[str, Any], config_class: type) -> dict[str, Any]:
    """The options without those that this core lacks and that are off anyway.

    Raises:
        ConfigError: an option that is on and that this core doesn't have.
    """
    known = {field.name for field in dataclasses.fields(config_class)}
    lacking = [name for name, value in options.items() if name not in known and value]
    if lacking:
        raise ConfigError(
            f"this megatron-core has no option {', '.join(sorted(lacking))}",
            where="TransformerConfig",
            remedy="install a later megatron-core, or leave the option off",
        )
    return {name: value for name, value in options.items() if name in known}


def aux_loss_correction(layout: LayoutConfig, router_source: str) -> float:
    """With per-token loss, cores before 0.19 scale the auxiliary loss by a rank's share of tokens, 1 / (tp * cp).

    What counts is the code and not its version: `t1 patch` brings the later cores' factor into earlier ones.

    Args:
        router_source: of core's TopKRouter.
    """
    weights = [
        ast.unparse(call.args[1])
        for call in ast.walk(ast.parse(router_source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "MoEAuxLossAutoScaler.apply"
    ]
    if any("tp_cp_group.size()" in weight for weight in weights):
        return 1.0
    return float(layout.tensor * layout.context)
