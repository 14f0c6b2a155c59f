"""What training of one role puts on the checkout's model, and when it goes on with values it finds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_t1.checkout.gae import write_gae  # noqa: E402
from megatron_t1.checkout.job import Job  # noqa: E402
from megatron_t1.checkout.models import Models  # noqa: E402
from megatron_t1.checkout.options import options_of  # noqa: E402
from megatron_t1.errors import ConfigError  # noqa: E402


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_without_replay_nothing_is_bound(command, role):
    """So options that replay can't live with, and a core that has no seam, are no obstacle."""

    def models(*words: str) -> Models:
        options = options_of(command("--t1-role", role, *words, moe_router_topk=2))
        made = Models(command(), role, None, options.model, replaying=options.replay)
        made.chunks = [torch.nn.Linear(1, 1)]  # has no configuration, no router, nothing that could be bound
        return made

    assert models("--t1-replay", "off").replay is None
    with pytest.raises(AttributeError):
        _ = models("--t1-replay", "on").replay


@pytest.mark.parametrize(("words", "agree"), [((), False), (("--t1-gae-gamma", "0.9"), True)])
def test_a_critic_goes_on_with_the_options_it_began_with(command, tmp_path, words, agree):
    write_gae(tmp_path / "values", options_of(command("--t1-gae-gamma", "0.9")).config.train.gae)
    job = object.__new__(Job)
    job.options = options_of(command("--t1-role", "critic", *words))
    if agree:
        job._require_same_gae()
        return
    with pytest.raises(ConfigError, match="--t1-gae-gamma is 1.0, they have 0.9"):
        job._require_same_gae()
