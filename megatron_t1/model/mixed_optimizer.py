"""Megatron's optimizer for bfloat16 parameters, where some parameters are float32 (a delta net's `A_log`).

Megatron trains such a mixture, but numbers the entries of its checkpoint as if every parameter were bfloat16. The
distributed optimizer keeps each type in buffers of its own and needs nothing.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


class MixedTypeOptimizer(Float16OptimizerWithFloat16Params):
    """Stores moments of all parameters, and master weights of those that have any."""

    def _model_parameters(self) -> list[list[Any]]:
        """Of each group, in the order in which the inner optimizer numbers them, the parameter of the model."""
        model_of = {
            id(master): parameter
            for parameters, masters in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True)
            for parameter, master in zip(parameters, masters, strict=True)
        }
        return [[model_of.get(id(one), one) for one in group["params"]] for group in self.optimizer.param_groups]

    def sharded_state_dict(
        self, model_sharded_state_dict: dict, is_loading: bool = False, metadata: dict | None = None, **_: Any
    ) -> dict:
        """As Megatron's, with every entry under its own parameter."""
        if is_loading:
            self.init_state_fn(self.optimizer, self.config)
        state, groups = self.state_dict(), self._model_parameters()
        parameters = [parameter for group in groups for parameter in group]
        entry_of = get_param_id_to_sharded_param_map(model_sharded_state_dict, parameters)
        number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        state["fp32_from_fp16_params"] = [
            [
                make_sharded_optimizer_tensor(
                    entry_of[number_of[id(parameter)]], master, prefix="optimizer.state.fp32_param"
                )
                for parameter, master in zip(parameters, masters, strict=True)
            ]
            for parameters, masters in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True)
        ]
        step = self._extract_common_per_param_step(state["optimizer"])
        optim_state_to_sharding_state(state["optimizer"], entry_of, exclude_keys="step")
        if step:
            state["optimizer"]["state"]["common_step"] = step
        return state


def store_mixed_types(optimizer: Any) -> None:
    """Let a built optimizer's checkpoints hold float32 parameters beside bfloat16 ones, where it has both."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if type(part) is Float16OptimizerWithFloat16Params and any(getattr(part, "fp32_from_fp32_groups", ())):
            part.__class__ = MixedTypeOptimizer
