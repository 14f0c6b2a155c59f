"""Which tasks a run plays: decided once, from sources, weights and stored trials, and the same after every restart."""

import json
import os
import threading
from pathlib import Path

import pytest

from megatron_t1.config.compose import absolute, compose, load_run_config, save
from megatron_t1.config.inputs import missing_inputs
from megatron_t1.config.schema import EnvConfig, SelectionConfig
from megatron_t1.config.validate import validate
from megatron_t1.environment.baseline import Baseline, write_baselines
from megatron_t1.environment.loading import write_task
from megatron_t1.environment.selection import TaskRate, kept_choice, load_sources, objection, rates_of
from megatron_t1.environment.task import Task
from megatron_t1.environment.trials import Trial, read_trials
from megatron_t1.errors import T1Error
from megatron_t1.trajectory.record import Verdict


@pytest.fixture
def sets(tmp_path, make_task):
    for source, count in (("easy", 4), ("hard", 3)):
        for number in range(count):
            write_task(make_task(name=f"{source}_{number}"), tmp_path / source / f"{source}_{number}")
    return tmp_path


def environment(sets, **options):
    return EnvConfig(sources={name: str(sets / name) for name in ("easy", "hard")}, **options)


def write_trials(folder, task, results, total=3):
    """Harbor trial folders: a number of passed checks each, None for a trial without a result."""
    for number, passed in enumerate(results):
        trial = folder / f"{task}__{number:07d}"
        trial.mkdir(parents=True, exist_ok=True)
        (trial / "trajectory.json").write_text("[]")
        if passed is not None:
            statuses = ["passed"] * passed + ["failed"] * (total - passed)
            tests = [{"name": f"c{index}", "status": status} for index, status in enumerate(statuses)]
            (trial / "ctrf.json").write_text(json.dumps({"results": {"tests": tests}}))


def choice(sets, env, selection):
    return kept_choice(sets / "run" / "tasks.json", env, selection, load_sources(env))


def test_rates_count_trusted_trials_of_tasks_that_are_known():
    def trial(task, passed, trusted=True, baseline=-1):
        return Trial(task, "x", Verdict(passed, 3, baseline, trusted=trusted))

    tasks = [Task("a", "", package="org/a"), Task("b", "", baseline=1)]
    rates = rates_of(
        [trial("a", 3), trial("org/a", 0), trial("a", 2, trusted=False), trial("b", 1), trial("b", 2), trial("c", 3),
         trial("a", 2, baseline=2)],
        tasks,
    )  # fmt: skip
    assert rates == {"a": TaskRate(3, 1, 1), "b": TaskRate(2, 0, 1)}


@pytest.mark.parametrize(
    ("rate", "options", "said"),
    [
        (TaskRate(4, 4, 4), {"max_pass_rate": 0.99}, "4 of 4 trials solve it: more than max_pass_rate=0.99"),
        (TaskRate(3, 3, 3), {"max_pass_rate": 0.99}, ""),  # too few trials
        (TaskRate(4, 3, 4), {"max_pass_rate": 0.99}, ""),
        (TaskRate(4, 0, 0), {"drop_untouched": True}, "none of 4 trials passes a check beyond the baseline"),
        (TaskRate(4, 0, 1), {"drop_untouched": True}, ""),
        (TaskRate(10, 1, 9), {"min_pass_rate": 0.2}, "less than min_pass_rate=0.2"),
        (TaskRate(4, 4, 4), {}, ""),
        (TaskRate(), {"max_pass_rate": 0.0, "drop_untouched": True}, ""),
    ],
)
def test_objections(rate, options, said):
    assert said in objection(rate, SelectionConfig(**options)) and bool(said) == bool(
        objection(rate, SelectionConfig(**options))
    )


def test_always_solved_and_never_touched_tasks_are_left_out_for_good(sets, capsys):
    trials = sets / "trials"
    write_trials(trials, "easy_0", [3, 3, 3, 3])
    write_trials(trials, "easy_1", [3, 3, 3, None])  # three trusted ones: too few
    write_trials(trials, "hard_0", [0, 0, 0, 0, None])
    write_trials(trials, "hard_1", [1, 0, 0, 0])
    env = environment(sets, weights={"easy": 3.0})
    selection = SelectionConfig(trials=[str(trials)], max_pass_rate=0.99, drop_untouched=True)
    first = choice(sets, env, selection)
    names = {source.name: (source.weight, source.names) for source in first.sources}
    assert names == {"easy": (3.0, ("easy_1", "easy_2", "easy_3")), "hard": (1.0, ("hard_1", "hard_2"))}
    assert set(first.left_out) == {"easy_0", "hard_0"}
    assert "left out: easy_0: 4 of 4 trials solve it" in capsys.readouterr().out
    write_trials(trials, "hard_1", [0, 0, 0, 0, 0])  # what the trials say later changes nothing
    assert choice(sets, env, selection) == first
    trials.rename(sets / "moved")
    assert choice(sets, env, selection) == first
    with pytest.raises(T1Error, match="no such directory"):
        choice(sets, env, SelectionConfig(trials=[str(trials)], max_pass_rate=0.5))


def test_options_of_a_run_without_results_choose_again_and_added_tasks_wait(sets, make_task):
    env = EnvConfig(tasks=str(sets / "easy"))
    first = choice(sets, env, SelectionConfig())
    assert first.sources[0].names == tuple(f"easy_{number}" for number in range(4)) and not first.left_out
    write_task(make_task(name="easy_9"), sets / "easy" / "easy_9")
    assert choice(sets, env, SelectionConfig()) == first
    assert [source.name for source in choice(sets, environment(sets), SelectionConfig()).sources] == ["easy", "hard"]


def test_what_a_run_plays_must_stay(sets):
    env = environment(sets)
    choice(sets, env, SelectionConfig())
    (sets / "easy/easy_1").rename(sets / "easy_1")
    with pytest.raises(T1Error, match="1 tasks that this run plays are gone, for example 'easy_1'"):
        choice(sets, env, SelectionConfig())
    (sets / "easy_1").rename(sets / "hard/easy_2")
    with pytest.raises(T1Error, match="have the name of another source's, for example 'easy_2' of 'easy'"):
        load_sources(env)


def test_a_filter_that_leaves_nothing_is_refused(sets):
    for number in range(3):
        write_trials(sets / "trials", f"hard_{number}", [3, 3, 3, 3])
    with pytest.raises(T1Error, match=r"no task of .*hard is left: 4 of 4"):
        choice(sets, environment(sets), SelectionConfig(trials=[str(sets / "trials")], max_pass_rate=0.9))


def test_the_first_of_many_workers_decides(sets):
    env, chosen = environment(sets), []
    loaded = load_sources(env)
    start = threading.Barrier(6)

    def work():
        start.wait()
        chosen.append(kept_choice(sets / "run/tasks.json", env, SelectionConfig(), loaded))

    workers = [threading.Thread(target=work) for _ in range(6)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert len(chosen) == 6 and all(each == chosen[0] for each in chosen)
    assert os.listdir(sets / "run") == ["tasks.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"version": 9}',
        '{"version": 1, "sources": {"a": {}}}',
        '{"version": 1, "sources": {"a": {"path": "", "weight": 1, "tasks": [1]}}}',
    ],
)
def test_a_damaged_file_is_named(sets, text):
    (sets / "run").mkdir()
    (sets / "run/tasks.json").write_text(text)
    with pytest.raises(T1Error, match="choice of tasks can't be read"):
        choice(sets, environment(sets), SelectionConfig())


def test_a_list_brings_the_baselines_beside_it(sets):
    (sets / "lists").mkdir()
    (sets / "lists/tasks.list").write_text("../easy/easy_1\n")
    write_baselines(sets / "lists/baseline.json", {"easy_1": Baseline({"a": True, "b": False})})
    task = load_sources(EnvConfig(tasks=str(sets / "lists/tasks.list")))["tasks"]["easy_1"]
    assert (task.baseline, task.baseline_checks) == (1, {"a": True, "b": False})


def test_options_by_hand(sets):
    words = [f"env.sources.easy={sets / 'easy'}", "env.sources.hard=hard", "env.weights.easy=2",
             "rollout.selection.trials=[old]", "rollout.selection.max_pass_rate=0.9"]  # fmt: skip
    config = absolute(compose(words), sets)
    assert config.env.sources == {"easy": str(sets / "easy"), "hard": str(sets / "hard")}
    assert config.env.weights == {"easy": 2.0} and config.rollout.selection.trials == [str(sets / "old")]
    assert not validate(config)
    save(config, sets / "run/config.yaml")
    again = load_run_config(sets / "run")  # a phase that starts by itself
    assert (again.env, again.rollout.selection) == (config.env, config.rollout.selection)
    assert missing_inputs(config, ["env.tasks"]) == [f"rollout.selection.trials: {sets / 'old'}: no such directory"]
    config.env.sources["gone"], config.env.weights["else"], config.env.weights["easy"] = "/nowhere", 1.0, 0.0
    config.rollout.selection.trials, config.rollout.selection.min_pass_rate = [], 0.95
    config.eval.tasks = str(sets / "hard")
    said = "\n".join([*validate(config), *missing_inputs(config, ["env.tasks"])])
    for part in ("env.weights.else: env.sources names no else", "env.weights.easy=0.0 must be", "need each other",
                 "env.sources.hard and eval.tasks are both", "env.sources.gone=/nowhere: no such directory",
                 "rollout.selection.min_pass_rate=0.95 exceeds"):  # fmt: skip
        assert part in said


@pytest.mark.skipif(not os.environ.get("T1_HARBOR_TRIALS"), reason="T1_HARBOR_TRIALS names no directory of real trials")
def test_real_trials_select_real_tasks():
    trials = read_trials(Path(os.environ["T1_HARBOR_TRIALS"]))
    tasks = [Task(name, "") for name in {trial.task for trial in trials}]
    rates = rates_of(trials, tasks)
    assert sum(rate.trials for rate in rates.values()) == sum(trial.verdict.trusted for trial in trials)
    left = [name for name, rate in rates.items() if objection(rate, SelectionConfig(min_trials=1, max_pass_rate=0.99))]
    assert 0 < len(left) < len(rates) and all(rates[name].solved == rates[name].trials for name in left)
