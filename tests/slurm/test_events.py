"""Events of a cluster (cluster_events.py) against trainings: whatever happens, they end as an undisturbed one.

A few of them, with light phases, are tests. `make slurm-events` drives all of them against the real vLLM and
Megatron-Core: T1_SLURM_EVENTS=real (or light), T1_SLURM_REPORT (a file with the table, which is kept up to date).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cluster_events import EVENTS, Event, happen
from cluster_training import Training
from event_table import write_row

PHASES = os.environ.get("T1_SLURM_EVENTS", "")
REPORT = os.environ.get("T1_SLURM_REPORT", "")
REAL = PHASES == "real"
LIMIT_S = 900 if REAL else 150  # of anything that is waited for
TESTS = [("one job", "slurmd killed on the batch host", "rollout")]
CHOSEN = [event for event in EVENTS if PHASES or (event.mode, event.name, event.phase) in TESTS]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def undisturbed(cluster, inputs, tmp_path_factory) -> Training | None:
    """Of the real phases; what light ones leave is known."""
    if not REAL:
        return None
    training = Training(cluster, tmp_path_factory.mktemp("undisturbed"), inputs, "one job", False, LIMIT_S)
    training.submit()
    training.finish()
    return training


@pytest.mark.parametrize("event", CHOSEN, ids=[event.id for event in CHOSEN])
def test_the_training_is_the_same(event: Event, cluster, inputs, undisturbed, tmp_path):  # open-instruct#1523
    training = Training(cluster, tmp_path, inputs, event.mode, not REAL, LIMIT_S)
    recovery = happen(event, training)
    alike = undisturbed.outcome() if undisturbed else training.intended()
    for each in (training, *training.others):
        assert each.outcome() == alike
    if REPORT:
        write_row(Path(REPORT), event, recovery, training.distance(undisturbed) if undisturbed else None)
    cluster.wait_until_idle()
    for each in (training, *training.others):
        shutil.rmtree(each.paths.root)
