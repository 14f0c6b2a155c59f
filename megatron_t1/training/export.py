"""The export phase: actor checkpoint (Megatron) to a Hugging Face directory that vLLM loads."""

from __future__ import annotations

from megatron_t1.model.convert import export_hf
from megatron_t1.phase import PhaseResult
from megatron_t1.training.actor import load_actor
from megatron_t1.training.context import Context


def run_export(context: Context) -> PhaseResult:
    """Export the policy that iteration's actor phase wrote."""
    version = context.counters.policy + 1
    target = context.paths.hf(version, context.start_model)
    with context.timed("load_model"):
        engine = load_actor(context, version, with_optimizer=False)
    with context.timed("export"):
        files = export_hf(
            engine.chunks,
            target,
            context.start_model,
            context.config.model.dtype,
            relative_to=context.paths.root,
        )
    return PhaseResult(
        phase="export",
        iteration=context.iteration,
        metrics={},
        timings_s=context.timings_s,
        outputs=files,
        details={"policy": version},
    )
