"""The checkout's own model with this project's head, start weights and routing replay."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from megatron_t1.checkout import cpu
from megatron_t1.checkout.facts import KNOWN_FAMILY
from megatron_t1.checkout.stored import find_checkpoint, has_value_head
from megatron_t1.config.schema import ArchitectureConfig
from megatron_t1.errors import ConfigError, IncompleteError
from megatron_t1.model.convert import load_hf
from megatron_t1.model.heads import as_policy, as_value_model, set_value_bias, value_heads
from megatron_t1.routing.replay import RoutingReplay


class Models:
    """The chunks of this rank, in the order the checkout builds them.

    Args:
        role: "policy" or "value".
        architecture: as `facts.architecture_of` gives it.
        replaying: whether recorded experts are replayed; without it the routers are left alone, whatever they are.
    """

    def __init__(
        self, args: argparse.Namespace, role: str, architecture: ArchitectureConfig, model_dir: Path, *, replaying: bool
    ):
        self.args, self.role, self.architecture, self.model_dir = args, role, architecture, model_dir
        self.replaying = replaying
        self.chunks: list[nn.Module] = []
        self._replay: RoutingReplay | None = None

    def build(self, provider: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        """The provider's chunk with this role's head; start weights when it was the last one.

        Raises:
            ConfigError: the provider builds no GPT, or builds the model a second time.
        """
        from megatron.core.models.gpt import GPTModel

        if len(self.chunks) == self._expected:
            raise ConfigError(
                "the checkout builds its model a second time, and only one can be trained on records",
                where="model_provider",
                remedy="leave out the option that asks for a second model (a teacher, an inference model)",
            )
        chunk = provider(*args, **kwargs)
        if not isinstance(chunk, GPTModel):
            raise ConfigError(
                f"the checkout's model is a {type(chunk).__name__}; heads are known for GPTModel and its subclasses",
                where="model_provider",
            )
        cpu.adapt(chunk)
        chunk = as_policy(chunk) if self.role == "policy" else as_value_model(chunk)
        chunk.architecture, chunk.role = self.architecture, self.role
        self.chunks.append(chunk)
        if len(self.chunks) == self._expected:
            self._start()
        return chunk

    @property
    def _expected(self) -> int:
        return self.args.virtual_pipeline_model_parallel_size or 1

    def _start(self) -> None:
        """Weights of the Hugging Face directory, unless Megatron loads a checkpoint after this."""
        checkpoint = find_checkpoint(self.args)
        if checkpoint is not None:
            for head in value_heads(self.chunks):
                head.stored = has_value_head(checkpoint)
            return
        if self.architecture.family != KNOWN_FAMILY:
            raise IncompleteError(
                f"there is no checkpoint to start from, and weights of a {self.architecture.family} model can't be "
                "read from a Hugging Face directory",
                where=str(self.model_dir),
                remedy="convert it for the checkout (Megatron-Bridge) and name the result with --load and --finetune",
            )
        load_hf(self.chunks, self.model_dir, self.role)

    def start_head_at(self, value: float) -> None:
        """A value head that no checkpoint will overwrite begins at this constant; after `build`."""
        set_value_bias(self.chunks, value)

    def loaded(self) -> None:
        """Call when the checkout has loaded what it loads: from here on a head is saved with the rest."""
        for head in value_heads(self.chunks):
            head.stored = True

    @property
    def replay(self) -> RoutingReplay | None:
        """Bound to the routers of all chunks, which must be built; None without replay."""
        if self._replay is None and self.replaying:
            self._replay = RoutingReplay(
                self.chunks, num_experts=self.args.num_experts or 0, top_k=self.args.moe_router_topk
            )
        return self._replay
