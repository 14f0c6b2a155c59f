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


@pytest.fixture
def job(harbor, tmp_path):
    """Run one trial of a small task with `harbor run`; returns its result.json and the trial's directory."""
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n[environment]\nmemory_mb = 300\n[environment.env]\nFROM_TOML = "yes"\n',
        "instruction.md": "Write done into a.txt",
        "environment/Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY a.txt /app/\n",
        "environment/a.txt": "hi\n",
        "solution/solve.sh": "#!/bin/bash\n[ $FROM_TOML = yes ] && cat a.txt && echo done > a.txt\n",
        "tests/helpers/words.txt": "done\n",
        "tests/test.sh": "#!/bin/bash\ngrep -qf /tests/helpers/words.txt /app/a.txt\n"
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
    }.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(agent, **environment):
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
