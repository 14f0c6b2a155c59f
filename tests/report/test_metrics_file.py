import contextlib
import json

import pytest

from megatron_t1.errors import IncompleteError
from megatron_t1.paths import RunPaths
from megatron_t1.phase import PhaseResult
from megatron_t1.report.metrics import MetricsWriter, read_metrics, series


def result(iteration=0, phase="actor", **metrics):
    return PhaseResult(phase, iteration, metrics or {"actor/approx_kl": 0.25}, {"update": 2.0})


def events(paths):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(paths.tensorboard))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_each_phase_is_written_exactly_once(tmp_path):
    paths = RunPaths.of(tmp_path)
    for _ in range(2):  # a restart
        writer = MetricsWriter(paths)
        writer.append(result(0), seconds=3.0)
        writer.append(result(1), seconds=3.0)
        writer.close()
    assert [(line["iteration"], line["phase"]) for line in read_metrics(tmp_path)] == [(0, "actor"), (1, "actor")]
    assert events(paths)["actor/approx_kl"] == [(0, 0.25), (1, 0.25)]
    assert events(paths)["time/actor_s"] == [(0, 3.0), (1, 3.0)]


def test_torn_line_is_cut_off_and_written_again(tmp_path):
    paths = RunPaths.of(tmp_path)
    writer = MetricsWriter(paths)
    writer.append(result(0), seconds=1.0)
    writer.append(result(1), seconds=1.0)
    writer.close()
    whole = paths.metrics.read_bytes()
    paths.metrics.write_bytes(whole[:-20])
    assert len(read_metrics(tmp_path)) == 1
    writer = MetricsWriter(paths)
    assert writer.append(result(1), seconds=1.0)
    writer.close()
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize("old, new", [("{", "["), ('"metrics"', '"metrIcs"'), ("0.25", '"0"'), ('"actor"', "7")])
def test_damaged_line_in_the_middle_is_named(tmp_path, old, new):
    paths = RunPaths.of(tmp_path)
    with contextlib.closing(MetricsWriter(paths)) as writer:
        writer.append(result(0), seconds=1.0)
        writer.append(result(1), seconds=1.0)
    paths.metrics.write_text(paths.metrics.read_text().replace(old, new, 1))
    with pytest.raises(IncompleteError, match="line 1"):
        read_metrics(tmp_path)


def test_not_a_number_is_null_not_zero(tmp_path):
    paths = RunPaths.of(tmp_path)
    writer = MetricsWriter(paths)
    writer.append(result(0, **{"critic/explained_variance": float("nan"), "critic/loss": 1.0}), seconds=1.0)
    writer.close()
    line = json.loads(paths.metrics.read_text())
    assert line["metrics"] == {"critic/explained_variance": None, "critic/loss": 1.0}
    assert series([line], "actor", "critic/explained_variance") == {}
    assert "critic/explained_variance" not in events(paths)


def test_groups_that_several_phases_report_stay_apart(tmp_path):
    paths = RunPaths.of(tmp_path)
    writer = MetricsWriter(paths)
    for phase in ("critic", "actor"):
        writer.append(result(0, phase, **{"batch/tokens": 5.0}), seconds=1.0)
    writer.close()
    assert {"critic/batch/tokens", "actor/batch/tokens"} <= set(events(paths))


def test_series_takes_the_first_name_that_was_measured():
    lines = [{"iteration": 2, "phase": "actor", "metrics": {"actor/kl": 0.1}, "timings_s": {}}]
    assert series(lines, "actor", "actor/approx_kl", "actor/kl") == {2: 0.1}


def test_a_repeated_phase_replaces_what_it_measured_before(tmp_path):
    paths = RunPaths.of(tmp_path)
    for value in (0.25, 0.5):  # the second one in another start of the loop
        writer = MetricsWriter(paths)
        writer.append(result(0, **{"actor/approx_kl": value}), seconds=3.0)
        writer.append(result(1, **{"actor/approx_kl": 0.125}), seconds=3.0)
        writer.close()
    assert series(read_metrics(tmp_path), "actor", "actor/approx_kl") == {0: 0.5, 1: 0.125}
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [0, 1]
    assert len(paths.metrics.read_text().splitlines()) == 3
    assert events(paths)["actor/approx_kl"] == [(0, 0.5), (1, 0.125)]
