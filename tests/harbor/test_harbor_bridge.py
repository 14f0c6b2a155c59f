"""Against the real harbor package (Python 3.12): its environments as our sandboxes, and ours, with our agent, in it.

The Python is T1_HARBOR_PYTHON, or a python3.12 on the PATH, and must have `harbor` and this project's dependencies.
"""

import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
ENVIRONMENT = "megatron_t1.harbor.environment:SandboxEnvironment"
AGENT = "megatron_t1.harbor.agent:TerminalAgent"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def harbor():
    """Run words with the Python that has Harbor; returns what they printed."""
    python = os.environ.get("T1_HARBOR_PYTHON") or shutil.which("python3.12")
    if not python:
        pytest.skip("no python3.12, and T1_HARBOR_PYTHON names none")
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HARBOR_TELEMETRY": "off", "OMP_NUM_THREADS": "1"}

    def run(*words, **options):
        command = [python, *map(str, words)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, **options)

    found = run("-c", "import harbor, megatron_t1.harbor.agent")
    if found.returncode:
        pytest.skip(f"{python} can't import harbor with this project: {found.stderr.strip().splitlines()[-1]}")
    return run


TASK = {
    "task.toml": 'schema_version = "1.4"\n[environment]\nmemory_mb = 300\n[environment.env]\nFROM_TOML = "yes"\n',
    "instruction.md": "Write done into a.txt",
    "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY a.txt /app/\n",
    "environment/a.txt": "hi\n",
    "solution/solve.sh": "#!/bin/bash\n[ $FROM_TOML = yes ] && cat a.txt && echo done > a.txt\n",
    "tests/helpers/words.txt": "done\n",
    "tests/test.sh": "#!/bin/bash\ngrep -qf /tests/helpers/words.txt /app/a.txt\n"
    "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
}
STEPS = {
    "task.toml": 'schema_version = "1.4"\n[[steps]]\nname = "one"\nmin_reward = 0.5\n[[steps]]\nname = "two"\n',
    "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\n",
    "steps/one/instruction.md": "Write done into a.txt",
    "steps/one/solution/solve.sh": "#!/bin/bash\ncd /tmp; echo done > /app/a.txt\n",
    "steps/one/tests/test.sh": "#!/bin/bash\ngrep -q done /app/a.txt\necho $((1 - $?)) > /logs/verifier/reward.txt\n",
    "steps/two/instruction.md": "Write done into b.txt",
    "steps/two/workdir/given.txt": "done\n",
    "steps/two/workdir/setup.sh": "cp given.txt set-up.txt\n",
    "steps/two/solution/solve.sh": "#!/bin/bash\ncp set-up.txt b.txt\n",
    "steps/two/tests/test.sh": "#!/bin/bash\n[ ! -e /tests/mine ] && grep -q done /app/b.txt\n"
    "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
}


@pytest.fixture
def job(harbor, tmp_path):
    """Run one trial of a small task with `harbor run`; returns its result.json and the trial's directory."""

    def run(agent, files=TASK, **environment):
        for name, text in files.items():
            path = tmp_path / "task" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        config = {
            "job_name": "job",
            "jobs_dir": str(tmp_path / "jobs"),
            "n_concurrent_trials": 1,
            "environment": {"import_path": ENVIRONMENT, "kwargs": environment},
            "agents": [agent],
            "tasks": [{"path": str(tmp_path / "task")}],
        }
        (tmp_path / "job.json").write_text(json.dumps(config))
        command = "from harbor.cli.main import app; app()"
        done = harbor("-c", command, "run", "-y", "-c", tmp_path / "job.json", cwd=tmp_path)
        trials = list((tmp_path / "jobs/job").glob("task__*"))
        assert len(trials) == 1, done.stdout + done.stderr
        return json.loads((trials[0] / "result.json").read_text()), trials[0]

    return run


def test_harbor_runs_a_task_in_our_sandbox(job):
    result, trial = job({"name": "oracle"}, max_processes=64)
    assert result["exception_info"] is None and result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert "hi" in (trial / "agent/oracle.txt").read_text()


def test_doing_nothing_scores_nothing(job):
    result, _ = job({"name": "nop"})
    assert result["exception_info"] is None and result["verifier_result"]["rewards"] == {"reward": 0.0}


def test_harbor_evaluates_a_model_with_our_agent(job, tmp_path):
    from megatron_t1.rollout.formats import load_format

    model_dir = _model_dir(tmp_path)
    chat = load_format("chatml_bash", model_dir)
    turns = [chat.command("cd /tmp; export WORD=done"), chat.command("echo $WORD > /app/a.txt; pwd"), chat.submission()]
    with _engine(turns) as (url, requests):
        result, trial = job(
            {
                "import_path": AGENT,
                "model_name": "t1",
                "kwargs": {"url": url, "model_dir": str(model_dir), "max_turns": 5},
            }
        )
    assert result["exception_info"] is None, result["exception_info"]
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    outcome = result["agent_result"]
    assert outcome["metadata"]["end_reason"] == "submitted" and outcome["metadata"]["turns"] == 3
    (detail,) = outcome["rollout_details"]
    assert detail["completion_token_ids"] == [turn.tolist() for turn in turns]
    assert detail["prompt_token_ids"] == [request["token_ids"] for request in requests]
    assert "/tmp" in chat.tokenizer.decode(requests[2]["token_ids"])  # the shell stayed in its directory
    assert json.loads((trial / "agent/episode.json").read_text())["turns"] == 3


def test_nothing_that_our_agent_defines_runs_for_harbors_verifier(job, tmp_path):
    from megatron_t1.rollout.formats import load_format

    model_dir = _model_dir(tmp_path)
    chat = load_format("chatml_bash", model_dir)
    fake = 'exec() { [ "$1" = env ] && { echo 1 > /logs/verifier/reward.txt; exit 0; }; builtin exec "$@"; }'
    turns = [chat.command(fake)]
    kwargs = {"url": "", "model_dir": str(model_dir), "max_turns": 5}
    with _engine([*turns, chat.submission()]) as (kwargs["url"], _):
        result, _ = job({"import_path": AGENT, "kwargs": kwargs})
    assert result["exception_info"] is None and result["verifier_result"]["rewards"] == {"reward": 0.0}, result


def test_harbor_runs_every_step_in_our_sandbox(job, tmp_path):
    from megatron_t1.environment.trials import read_trials

    result, _ = job({"name": "oracle"}, STEPS)
    assert result["verifier_result"]["rewards"] == {"reward": 1.0} and len(result["step_results"]) == 2
    (trial,) = read_trials(tmp_path / "jobs")
    assert trial.verdict.checks == {"one/reward": True, "two/reward": True} and trial.verdict.solved


SAME_RULES = """
import random
from types import SimpleNamespace as Names
from harbor.trial.multi_step import MultiStepTrial
from megatron_t1.environment.steps import below_minimum, combine
from megatron_t1.environment.task import Step
from megatron_t1.trajectory.record import Verdict

random.seed(0)
names = lambda: random.sample(["reward", "a", "b"], random.randint(1, 3))
draw = lambda: {name: random.choice([0, 0.25, 0.5, 1]) for name in names()}
for _ in range(500):
    steps = {str(number): draw() for number in range(random.randint(1, 4))}
    results = [Names(verifier_result=Names(rewards=rewards)) for rewards in steps.values()]
    theirs = MultiStepTrial._aggregate_step_rewards(Names(result=Names(step_results=results))).rewards
    ours = combine({name: Verdict(0, 1, -1, True, rewards=rewards) for name, rewards in steps.items()}).rewards
    assert theirs == ours, (steps, theirs, ours)
    least = draw()
    for threshold in (least, 0.5):
        own = threshold if threshold is least else {"reward": threshold}
        failed = MultiStepTrial._min_reward_failure(steps["0"], threshold) is not None
        verdict = Verdict(0, 1, -1, True, rewards=steps["0"])
        assert failed == bool(below_minimum(Step("0", "", 1, 1, min_reward=own), verdict)), (steps, threshold)
"""


def test_means_and_minimal_rewards_are_harbors_own(harbor):
    done = harbor("-c", SAME_RULES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("resume", [False, True])
def test_our_agent_in_a_task_of_several_steps(job, tmp_path, resume):
    """A new conversation for each step; with resume_trajectory the one before goes on. The shell begins at home."""
    from megatron_t1.rollout.formats import load_format

    model_dir = _model_dir(tmp_path)
    chat = load_format("chatml_bash", model_dir)
    turns = [chat.command("echo done > a.txt; cd /tmp; mkdir -p /tests; touch /tests/mine"), chat.submission(),
             chat.command("cat given.txt > b.txt; pwd"), chat.submission()]  # fmt: skip
    kwargs = {"url": "", "model_dir": str(model_dir), "max_turns": 5}
    with _engine(turns) as (kwargs["url"], requests):
        result, trial = job({"import_path": AGENT, "resume_trajectory": resume, "kwargs": kwargs}, STEPS)
    one, two = result["step_results"]
    assert one["exception_info"] is two["exception_info"] is None, result
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    details = [step["agent_result"]["rollout_details"][0] for step in (one, two)]
    assert [len(detail["completion_token_ids"]) for detail in details] == [2, 2]
    prompts = [request["token_ids"] for request in requests]
    assert details[1]["prompt_token_ids"] == prompts[2:]
    before = [*prompts[1], *turns[1].tolist()]
    text = chat.tokenizer.decode(np.array(prompts[2], np.int32))
    assert (prompts[2][: len(before)] == before) == resume == ("a.txt" in text) and "Write done into b.txt" in text
    assert "/app" in chat.tokenizer.decode(np.array(prompts[3][len(prompts[2]) :], np.int32))
    record = trial / f"steps/two/agent/episode{'_2' if resume else ''}.json"
    assert json.loads(record.read_text())["turns"] == (4 if resume else 2)


def test_an_engine_that_is_gone_is_an_exception_and_no_score(job, tmp_path):  # rllm#677 verifiers#1665
    model_dir = _model_dir(tmp_path)
    agent = {"import_path": AGENT, "kwargs": {"url": "http://127.0.0.1:9", "model_dir": str(model_dir)}}
    result, _ = job(agent)
    assert "engine" in result["exception_info"]["exception_message"]


def test_a_harbor_environment_is_a_sandbox(harbor):
    done = harbor(HERE / "harbor_sandbox_script.py", ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["changes at first"] == []
    expected = [
        [0, "/app\na.txt\nd\n"], [0, ""], [0, "f5\n/app/d\n"], [1, "1\n2\n3\n"], None, [0, "5\n"],
        [3, ""], [0, "/app/d\n[]\n"], [0, "[]\n"], [None, ""], [0, ""], [0, "hidden\n"],
        [0, "ab\ufffd"], None, [0, "now\n"],
        [0, "late\ntwo\n"], None, [0, "/app/d\n"], [0, "70001\n"],
    ]  # fmt: skip
    for number, wanted in enumerate(expected):
        if wanted is not None:
            assert said["commands"][number][:2] == wanted, number
    assert said["commands"][4][2] and said["commands"][16][2]  # at their time limit
    assert said["commands"][13][0] == 0 and said["commands"][13][3] == 98_000
    assert said["mode"] == "640\n"
    assert said["fetched"][0] == {"/app/n/new/x": "616263ff"} and set(said["fetched"][1]) == {"/none", "/app"}
    changes = dict(said["changes"])
    assert changes["/app/a.txt"] == "modified" and changes["/app/d"] == "removed" and changes["/app/n/new/x"] == "added"
    assert said["verdict"] == [True, 1, 1, ""] and said["after"] == "refused"
    assert said["alive"] == "0\n" and said["blocked"] == "can't write /app/n: something else stands there"


def _model_dir(tmp_path):
    from megatron_t1.config.schema import ModelConfig
    from megatron_t1.model.initial import create_initial_model

    corpus = ["echo $WORD > /app/a.txt; pwd", "cd /tmp; export WORD=done", "Write done into a.txt"] * 3
    return create_initial_model(tmp_path / "model", ModelConfig(), 0, corpus)


class _engine:
    """The token endpoint of an engine that says these turns, one after another; also the requests it got."""

    def __init__(self, turns):
        said, self.requests = list(turns), []

        class Handler(BaseHTTPRequestHandler):
            requests = self.requests

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                ids = said[len(self.requests)].tolist()
                self.requests.append(request)
                words = [{"token_id": token, "logprob": -0.5} for token in ids]
                choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": words}}
                body = json.dumps({"choices": [choice], "usage": {}}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}", self.requests

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
