"""Dry runs: tiny models in every kind of cut on the installed core, all ranks of the 122B on one that can cut it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_t1.config.compose import compose
from megatron_t1.config.validate import check
from megatron_t1.planner.dryrun import DryRun, dry_run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).resolve().parents[2]
CUT = ["layout=single", "model.path=''", "layout.distributed_optimizer=true"]
TINY = ["model=tiny", "model.architecture.vocab_size=640", "model.dtype=bfloat16", *CUT]
HYBRID = ["model=tiny_hybrid", "model.architecture.vocab_size=640", *CUT]
HYBRID_CUT = [*HYBRID, "layout.processes=4", "layout.pipeline=2", "layout.expert=2"]
LAYOUTS = {
    ("every axis", "policy"): [*TINY, "layout.processes=16", "layout.tensor=2", "layout.pipeline=2",
        "layout.virtual_pipeline=2", "layout.context=2", "layout.expert=4", "layout.recompute=full"],
    ("experts cut, all-gather", "value"): [*TINY, "layout.processes=8", "layout.tensor=2", "layout.expert_tensor=2",
        "layout.expert=2", "layout.dispatcher=allgather"],
    ("nothing sharded", "value"): [*TINY, "layout.processes=2", "layout.distributed_optimizer=false",
        "model.dtype=float32"],
    ("hybrid", "policy"): HYBRID_CUT,
    ("hybrid", "value"): HYBRID_CUT,
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    """All in one start, as importing Megatron takes most of the time."""
    runs = []
    for (name, role), overrides in LAYOUTS.items():
        config = compose(overrides)
        check(config)
        runs.append(DryRun(name, config, role))
    return {(each.name, each.role): each for each in dry_run(runs, workers=1)}


@pytest.mark.parametrize("which", LAYOUTS, ids=" ".join)
def test_ranks_hold_the_model_the_batch_and_the_plan_exactly_once(which, found):
    layout = found[which]
    assert layout.problems() == []
    assert layout.parameters == layout.planned_parameters > 0
    routes = sum(len(rank.batch.routed) * len(rank.batch.layers) for rank in layout.ranks)
    assert routes == layout.tokens * layout.layers > 0


def test_the_check_would_see_another_model(found):
    layout = found["every axis", "policy"]
    first, *rest = layout.ranks
    grown = replace(first, bytes=replace(first.bytes, gradient_bytes=first.bytes.gradient_bytes + 4))
    assert "rank 0 first" in "\n".join(replace(layout, ranks=[grown, *rest]).problems())


def test_all_ranks_of_the_122b_on_48_gpus():
    script = [sys.executable, str(ROOT / "scripts" / "dryrun.py"), "--layouts", "gpus48"]
    done = subprocess.run([*script, "--", "--policy"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip()[-300:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "122,111,526,912 parameters" in done.stdout and "48 ranks TP2 PP6 CP4 EP8" in done.stdout
    assert "Each exactly once, bytes as planned." in done.stdout
