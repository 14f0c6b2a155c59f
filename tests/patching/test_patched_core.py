"""Our own model builder on a core that `t1 patch` has changed: nothing is corrected twice."""

from __future__ import annotations

import pytest

from megatron_t1.config.schema import LayoutConfig
from megatron_t1.model.build import aux_loss_correction
from megatron_t1.patching import operations
from megatron_t1.patching.declaration import load_patches
from megatron_t1.patching.tree import Tree
from tests.patching.releases import VERSIONS, release

ROUTER = "megatron/core/transformer/moe/router.py"


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_auxiliary_loss_is_corrected_once(tmp_path, version):
    """Megatron's factor 1 / (tp * cp) is taken back by the builder or by the patch, never by both."""
    layout = LayoutConfig(tensor=2, context=2)
    router = tmp_path / ROUTER
    router.parent.mkdir(parents=True)
    router.write_text((release(version) / ROUTER).read_text())
    if version != "0.19.2":  # which has it
        assert aux_loss_correction(layout, router.read_text()) == 4.0
        operations.apply(Tree(tmp_path), load_patches(), ["aux_loss_per_token"])
    assert aux_loss_correction(layout, router.read_text()) == 1.0
