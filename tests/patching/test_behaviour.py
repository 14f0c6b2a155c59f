"""What the patches do: functions of released cores, before and after, run on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_t1.patching import operations
from megatron_t1.patching.declaration import load_patches
from megatron_t1.patching.tree import Tree
from tests.distributed import run_distributed
from tests.patching.releases import VERSIONS, python_path, release
from tests.patching.workers import SCORES

pytestmark = pytest.mark.slow
WITHOUT_SEAM = ("0.13.1", "0.14.0", "0.15.3")
WITHOUT_GEMM = (*WITHOUT_SEAM, "0.16.1")
WITH_PADDING_MASK = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
UNSCALED = ("0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a worker on a release, as it is or with all patches; results are kept."""
    trees: dict[str, Path] = {}
    kept: dict[tuple, list] = {}

    def call(worker: str, version: str, *, patched: bool, world: int = 1, **keywords):
        key = (worker, version, patched, world, *keywords.items())
        if key in kept:
            return kept[key]
        core = release(version)
        if patched and version not in trees:
            trees[version] = tmp_path_factory.mktemp("patched") / "site-packages"
            shutil.copytree(core, trees[version])
            operations.apply(Tree(trees[version]), load_patches())
        core = trees[version] if patched else core
        with pytest.MonkeyPatch.context() as patch:
            before = os.environ.get("PYTHONPATH")
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [python_path(version, core), before])))
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
            kept[key] = run_distributed(f"tests.patching.workers:{worker}", world, **keywords)
        if worker == "alone":
            assert Path(kept[key][0]["where"]).is_relative_to(core)
        return kept[key]

    return call


@pytest.mark.parametrize("version", WITHOUT_SEAM)
def test_the_seam_equals_that_of_0_16(run, version):
    native = run("alone", "0.16.1", patched=False)[0]["seam"]
    before = run("alone", version, patched=False)[0]["seam"]
    assert "router_replay" in before  # TypeError: an unexpected keyword argument
    after = run("alone", version, patched=True)[0]["seam"]
    for name in SCORES:
        for who in ("nobody", "own", "foreign"):
            assert after[name][who] == native[name][who], (name, who)
        assert after[name]["own"]["probs"] == after[name]["nobody"]["probs"]
        assert after[name]["foreign"]["map"] != after[name]["own"]["map"]
        assert len(after[name]["own"]["asked"]) == 1


@pytest.mark.parametrize("version", WITHOUT_GEMM)
def test_routers_run_without_transformer_engine(run, version):
    assert run("alone", version, patched=False)[0]["gating"] == "NameError"
    assert run("alone", version, patched=True)[0]["gating"] == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("version", WITH_PADDING_MASK)
def test_padding_tokens_stay_out_of_expert_bias(run, version):
    assert run("alone", version, patched=False)[0]["expert_bias"] == "RuntimeError"
    assert run("alone", version, patched=True)[0]["expert_bias"] == [4.0, 2.0, 2.0, 0.0]


@pytest.mark.parametrize("version", VERSIONS)
def test_replay_is_refused_where_it_would_be_ignored(run, version):
    before = run("alone", version, patched=False)[0]["refusals"]
    after = run("alone", version, patched=True)[0]["refusals"]
    assert after["aux_loss"] == "asked"
    assert before["sinkhorn"] == "ignored"
    assert after["sinkhorn"].startswith("moe_router_load_balancing_type=sinkhorn")
    if version != "0.13.1":  # which has no fused router
        assert before["fused"] == "ignored"
        assert "moe_router_fusion=False" in after["fused"]
        assert "fused router" in after["function"]
    if version == "0.19.2":
        assert before["quantile"] == "ignored"
        assert after["quantile"].startswith("moe_router_load_balancing_type=quantile_balancing")


@pytest.mark.parametrize(("version", "axis"), zip(UNSCALED, ("tensor", "context") * 3, strict=True))
def test_auxiliary_losses_have_the_weight_they_have_on_one_rank(run, version, axis):
    layout = {axis: 2}
    alone = run("auxiliary_gradients", version, patched=False)[0]
    before = run("auxiliary_gradients", version, patched=False, world=2, **layout)[0]
    after = run("auxiliary_gradients", version, patched=True, world=2, **layout)[0]
    for loss in ("aux", "z"):
        expected = np.array(alone[loss])
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(2 * np.array(before[loss]), expected, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(after[loss], expected, rtol=1e-4, atol=1e-7)


def test_auxiliary_losses_are_right_from_0_19_on(run):
    alone = run("auxiliary_gradients", "0.19.2", patched=False)[0]
    shared = run("auxiliary_gradients", "0.19.2", patched=False, world=2, tensor=2)[0]
    for loss in ("aux", "z"):
        np.testing.assert_allclose(shared[loss], alone[loss], rtol=1e-4, atol=1e-7)
