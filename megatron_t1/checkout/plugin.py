"""What a patched `pretrain` calls instead of the script's own model builder, data sets and forward step.

Every call asks for `--t1-role` first and passes through to the script's own callable without it. Order of events:
`pretrain` has parsed and checked its options and built its process groups; it builds the model (here all problems are
reported, records read, heads and start weights put in), its optimizer, and loads a checkpoint; it asks for data sets
(here a critic scores the records, once); it runs its loop, whose forward step is this project's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megatron_t1.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megatron_t1.checkout.job import Job


class Plugin:
    """One `pretrain` call.

    Args:
        dataset_provider, model_provider, forward_step: the script's own.
    """

    def __init__(self, dataset_provider: Callable, model_provider: Callable | None, forward_step: Callable):
        self._dataset_provider, self._model_provider = dataset_provider, model_provider
        self._forward_step = forward_step
        self._job: Job | None = None
        self.datasets = Datasets(self)

    def model(self, *args: Any, **kwargs: Any) -> Any:
        """The checkout's `model_provider`."""
        if not _options().t1_role:
            return self._model_provider(*args, **kwargs)
        if self._job is None:
            from megatron_t1.checkout.job import Job

            self._job = Job(_options())
        return self._job.build(self._model_provider, *args, **kwargs)

    def forward_step(self, data_iterator: Iterator, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The checkout's `forward_step_func`."""
        if not _options().t1_role:
            return self._forward_step(data_iterator, model, *args, **kwargs)
        return self._require_job().forward_step(data_iterator, model)

    def _require_job(self) -> Job:
        if self._job is None:
            raise ConfigError(
                "the checkout didn't build its model through `pretrain`'s model_provider",
                where="--t1-role",
                remedy="use a release whose pretrain takes a model_provider, and give it one",
            )
        return self._job


class Datasets:
    """The checkout's `train_valid_test_dataset_provider`: a callable with an attribute that the loop asks for."""

    def __init__(self, plugin: Plugin):
        self._plugin = plugin

    @property
    def is_distributed(self) -> bool:
        """Whether every rank calls the provider: records are read, and laid out, by every rank for itself."""
        return bool(_options().t1_role) or getattr(self._plugin._dataset_provider, "is_distributed", False)

    def __call__(self, train_val_test_num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        if not _options().t1_role:
            stage = {} if vp_stage is None else {"vp_stage": vp_stage}
            return self._plugin._dataset_provider(train_val_test_num_samples, **stage)
        return self._plugin._require_job().training_data(), None, None


def _options() -> argparse.Namespace:
    from megatron.training import get_args

    return get_args()
