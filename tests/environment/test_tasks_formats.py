"""Harbor's fields, steps and versions, the older Terminal-Bench format, and lists of tasks."""

import os
from pathlib import Path

import pytest

from megatron_t1.environment.digest import task_digest
from megatron_t1.environment.image import CopyFiles, RunCommand
from megatron_t1.environment.loading import TaskFolder, find_tasks, load_task, load_tasks, write_list
from megatron_t1.environment.task import Resources
from megatron_t1.environment.terminal_bench import convert
from megatron_t1.errors import T1Error

HARBOR = """\
schema_version = "1.4"
source = "somewhere"
artifacts = ["/app/out", {source = "/var/log", exclude = ["*.gz"]}]
novel = 7
[task]
name = "org/one"
authors = [{name = "A", email = "a@b"}]
[metadata]
difficulty = "hard"
made = 2026-01-02
[agent]
timeout_sec = 30
[verifier]
timeout_sec = 9.5
env = {JUDGE = "${JUDGE:-none}"}
[environment]
cpus = 1.5
memory = "2G"
storage_mb = 10240
build_timeout_sec = 60
allow_internet = true
workdir = "/job"
env = {HOME_OF = "${HOME:-/nowhere}", PLAIN = "x"}
novel = {a = [1]}
[solution.env]
KEY = "value"
"""
COMPOSE = """\
services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["TEST_DIR=${T_BENCH_TEST_DIR}", "MODE=fast run"]
    working_dir: /srv
    volumes: ["${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}"]
"""
OLD = {
    "task.yaml": "instruction: |-\n  do it\ndifficulty: hard\ntags: [a]\n"
    "max_test_timeout_sec: 30\nparser_name: pytest\n",
    "docker-compose.yaml": COMPOSE,
    "Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY . /app/\n",
    "run-tests.sh": "pytest $TEST_DIR/test_outputs.py\n",
    "solution.sh": "touch done\n",
    "tests/test_outputs.py": "def test_a(): pass\n",
    "data/input": "1\n",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(
        tmp_path / "tasks" / "one",
        {
            "task.toml": HARBOR, "instruction.md": "<!-- canary GUID 1 -->\n# CANARY 2\n\ndo it\n# canary stays here\n",
            "environment/Dockerfile": "FROM a\nWORKDIR /app\n", "tests/test.sh": "true\n",
            "solution/solve.sh": "true\n",
        },
    )  # fmt: skip


@pytest.fixture
def old(tmp_path):
    return write(tmp_path / "old" / "two", OLD)


def test_fields_of_harbor(folder, monkeypatch):
    monkeypatch.setenv("JUDGE", "secret of this machine")
    task = load_task(folder)
    assert (task.name, task.package, task.workdir) == ("one", "org/one", "/job")
    assert task.instruction == "do it\n# canary stays here"
    assert task.resources == Resources(cpus=1.5, memory_mb=2048, storage_mb=10240, build_timeout_s=60.0)
    assert task.env == {"HOME_OF": "/nowhere", "PLAIN": "x"} and task.verifier_env == {"JUDGE": "none"}
    assert task.solution_env == {"KEY": "value"} and task.obstacles == ()
    assert task.metadata["unknown_fields"] == {"novel": 7, "environment.novel": {"a": [1]}}
    assert task.metadata["made"] == "2026-01-02"


@pytest.mark.parametrize(
    ("text", "obstacle"),
    [
        ('[environment]\nos = "windows"', "environment.os"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ('[environment]\ntpu = {type = "v6e", topology = "2x4"}', "environment.tpu"),
        ('[environment]\nmcp_servers = [{name = "a", url = "http://b"}]', "environment.mcp_servers"),
        ('[environment]\nskills_dir = "/skills"', "environment.skills_dir"),
        ('[environment.healthcheck]\ncommand = "true"', "environment.healthcheck"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.b"]', "environment.network_mode"),
        ('[environment]\nenv = {TOKEN = "${TOKEN}"}', "environment.env.TOKEN"),
        ('[agent]\nuser = "agent"', "agent.user"),
        ("[verifier]\nuser = 1000", "verifier.user"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment_mode"),
        ('[[verifier.collect]]\ncommand = "dump"', "verifier.collect"),
        ('[verifier]\nenv = {KEY = "${OPENAI_API_KEY}"}', "verifier.env.KEY"),
    ],
)
def test_what_no_sandbox_gives_is_named_when_it_is_to_be_played(folder, text, obstacle, monkeypatch):
    monkeypatch.setenv("TOKEN", "a secret of this machine")
    (folder / "task.toml").write_text(text)
    task = load_task(folder)
    assert len(task.obstacles) == 1 and task.obstacles[0].startswith(obstacle)
    assert "a secret" not in repr(task)
    with pytest.raises(T1Error, match=f"one: can't be played: {obstacle}"):
        load_tasks(folder.parent)


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [("trajectory.json", "trajectory.json"), ("environment/docker-compose.yaml", "more than one container"),
     ("tests/.harborignore", "tests/.harborignore"), ("steps/a/instruction.md", "steps/")],
)  # fmt: skip
def test_files_that_no_sandbox_follows(folder, name, obstacle):
    write(folder, {name: "{}"})
    assert any(obstacle in found for found in load_task(folder).obstacles)


def test_root_and_ordinary_networks_are_no_obstacle(folder):
    (folder / "task.toml").write_text(
        'version = "1.0"\n[agent]\nuser = "root"\nnetwork_mode = "public"\n[verifier]\nuser = 0\n'
        'environment_mode = "shared"\n[environment]\nnetwork_mode = "no-network"\nos = "Linux"\ngpus = 0\n'
    )
    assert load_task(folder).obstacles == ()


def test_a_ready_image_needs_no_dockerfile(folder):
    (folder / "environment/Dockerfile").unlink()
    (folder / "task.toml").write_text('[environment]\ndocker_image = "org/image:1"\nworkdir = "/w"\nenv = {A = "1"}\n')
    image = load_task(folder).image
    assert (image.workdir, image.env, image.steps, image.base) == ("/w", {"A": "1"}, (), "org/image:1")


def test_an_engine_builds_dockerfiles_that_no_sandbox_follows(folder, old):
    for task in (folder / "environment", old):
        (task / "Dockerfile").write_text("FROM a AS one\nFROM b\nCOPY --from=one /x /\n")
    for task in (folder, old):
        with pytest.raises(T1Error, match="more than one build stage"):
            load_task(task)
        assert load_task(task, engine_builds=True).name == task.name
    (folder / "environment/Dockerfile").unlink()
    with pytest.raises(T1Error, match="environment/Dockerfile: missing"):
        load_task(folder, engine_builds=True)


def test_steps_are_read(folder):
    (folder / "task.toml").write_text(
        '[agent]\ntimeout_sec = 40\n[[steps]]\nname = "first"\nmin_reward = 0.5\n'
        '[[steps]]\nname = "then"\n[steps.agent]\ntimeout_sec = 7\n[steps.verifier]\ntimeout_sec = 8\n'
    )
    write(folder, {"steps/first/instruction.md": "a\n", "steps/then/instruction.md": "b\n"})
    (folder / "instruction.md").unlink()
    task = load_task(folder)
    assert [(step.name, step.instruction, step.agent_timeout_s, step.verifier_timeout_s) for step in task.steps] == [
        ("first", "a", 40.0, 600.0),
        ("then", "b", 7.0, 8.0),
    ]
    assert load_tasks(folder.parent) == [task]
    (folder / "steps/then/instruction.md").unlink()
    (folder / "tests/test.sh").unlink()
    with pytest.raises(T1Error) as caught:
        load_task(folder)
    for part in ("steps/then/instruction.md: missing", "steps/first/tests/test.sh: missing, and so is tests/test.sh"):
        assert part in caught.value.problem


def test_terminal_bench_task_becomes_a_harbor_task(old):
    task = load_task(old)
    assert (task.name, task.instruction, task.agent_timeout_s, task.verifier_timeout_s) == ("two", "do it", 360.0, 30.0)
    assert task.metadata["difficulty"] == "hard" and task.metadata["category"] == "software_engineering"
    assert task.metadata["unknown_fields"] == {"parser_name": "pytest"}
    assert task.image.env == {"TEST_DIR": "/tests", "MODE": "fast run"} and task.image.workdir == "/srv"
    copied = {path for step in task.image.steps if isinstance(step, CopyFiles) for path in step.files}
    assert "/app/data/input" in copied and not [path for path in copied if "test" in path or "solution" in path]
    script = task.test_files()["test.sh"][0].decode()
    assert script.startswith("pytest /tests/test_outputs.py\n") and "reward.txt" in script
    assert task.solution_files() == {"solve.sh": (b"touch done\n", 0o755)}
    assert not [step for step in task.image.steps if isinstance(step, RunCommand)]


def test_a_build_context_of_its_own_and_an_image_made_with_tests(tmp_path):
    files = {
        **OLD, "docker-compose.yaml": COMPOSE.replace("{dockerfile: Dockerfile}", "./client"),
        "client/Dockerfile": "FROM a\nCOPY tests /mine/\nCOPY program /bin/\n", "client/program": "p\n",
    }  # fmt: skip
    del files["Dockerfile"]
    convert(write(tmp_path / "old", files), tmp_path / "new")
    found = {str(path.relative_to(tmp_path / "new")) for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert found == {
        "task.toml", "instruction.md", "solution/solve.sh", "tests/test.sh", "tests/test_outputs.py",
        "environment/Dockerfile", "environment/program", "environment/data/input", "environment/tests/test_outputs.py",
    }  # fmt: skip
    assert load_task(tmp_path / "new").image.workdir == "/srv"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("task.yaml", "instruction: [", "task.yaml: while parsing"),
        ("task.yaml", "- a\n", "is not a table"),
        ("task.yaml", "difficulty: hard\n", "task.yaml: instruction: missing"),
        ("task.yaml", "instruction: 3\n", "task.yaml: instruction: 3 is not a text"),
        ("task.yaml", "instruction: x\ndifficulty: nightmare\n", "difficulty: 'nightmare' is none of"),
        ("task.yaml", "instruction: x\ntags: a\n", "tags: 'a' is not a list of texts"),
        ("task.yaml", "instruction: x\nmax_agent_timeout_sec: -1\n", "max_agent_timeout_sec: -1"),
        ("task.yaml", "instruction: x\nmax_test_timeout_sec: .nan\n", "max_test_timeout_sec: nan"),
        ("task.yaml", "instruction: x\nexpert_time_estimate_min: soon\n", "expert_time_estimate_min: 'soon'"),
        ("task.yaml", "a: &a [x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\ninstruction: *c\n", "instruction: [["),
        ("task.yaml", "{" * 3000, "task.yaml: "),
        ("task.yaml", "!!python/object/apply:os.system [true]\n", "could not determine a constructor"),
        ("docker-compose.yaml", None, "docker-compose.yaml: missing"),
        ("docker-compose.yaml", "services: []\nversion: 3\n", "services: [] is not a table"),
        ("docker-compose.yaml", "services: {a: 3}\n", "services.a: 3 is not a table"),
        ("docker-compose.yaml", COMPOSE + "  db:\n    image: postgres\n", "services client, db: more than one"),
        ("docker-compose.yaml", COMPOSE + "    privileged: true\n", "services.client.privileged is not supported"),
        ("docker-compose.yaml", COMPOSE + "networks: {a: {}}\n", "networks is not supported"),
        ("docker-compose.yaml", "services: {a: {volumes: ['/:/host']}}\n", "services.a.volumes"),
        ("docker-compose.yaml", "services: {a: {build: ../..}}\n", "build context '../..' is no folder in the task"),
        ("docker-compose.yaml", "services: {a: {build: [1]}}\n", "build: [1] names no folder"),
        ("docker-compose.yaml", "services: {a: {environment: [1]}}\n", "services.a.environment: [1]"),
        ("docker-compose.yaml", "services: {a: {environment: {A: [1]}}}\n", "services.a.environment: [1]"),
        ("docker-compose.yaml", 'services: {a: {environment: ["A=1\\nRUN x"]}}\n', "services.a.environment"),
        ("docker-compose.yaml", 'services: {a: {working_dir: "/a\\nUSER x"}}\n', "services.a.working_dir"),
        ("Dockerfile", None, "Dockerfile: missing"),
        ("run-tests.sh", None, "run-tests.sh: missing"),
        ("solution.yaml", "- command: x\n", "solution.yaml: a solution of keystrokes"),
        ("run-tests.sh", b"\xff\xfe", "run-tests.sh: not UTF-8"),
    ],
)
def test_problems_of_terminal_bench_tasks(old, name, text, problem):
    (old / name).unlink(missing_ok=True)
    if text is not None:
        (old / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(T1Error) as caught:
        load_task(old)
    assert problem in caught.value.problem and caught.value.where == str(old) and len(caught.value.problem) < 900


def test_links_out_of_a_terminal_bench_task(old, tmp_path):
    (tmp_path / "secret").write_text("x")
    (old / "data/link").symlink_to(tmp_path / "secret")
    with pytest.raises(T1Error, match="data/link: links out of the task"):
        load_task(old)


def test_lists(folder, old, tmp_path):
    (tmp_path / "mine.list").write_text(f"# two\n\ntasks/one\n{old}\n")
    assert [task.name for task in load_tasks(tmp_path / "mine.list")] == ["one", "two"]
    proven = [TaskFolder(folder, task_digest(folder))]
    write_list(tmp_path / "lists" / "a.list", proven)
    assert "../tasks/one" in (tmp_path / "lists" / "a.list").read_text()
    assert find_tasks(tmp_path / "lists" / "a.list")[0].path.resolve() == folder.resolve()
    assert len(load_tasks(tmp_path / "lists" / "a.list")) == 1
    (folder / "tests/test.sh").write_text("false\n")
    with pytest.raises(T1Error, match="one: changed since `t1 tasks check` proved it"):
        load_tasks(tmp_path / "lists" / "a.list")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no task"), ("nowhere\n", "line 1: there is no directory"), ("{\n", "line 1: "),
        ('{"path": 3}\n', "has no path"), ('{"path": "tasks/one", "sha256": 3}\n', "has no path"),
        ("tasks/one\ntasks/one\n", "two tasks are named 'one'"), ("[" * 5000 + "\n", "line 1"),
        ("{" * 5000 + "\n", "line 1"), ("a\0b\n", "line 1"), ("x" * 5000, "line 1"),
    ],
)  # fmt: skip
def test_broken_lists(folder, tmp_path, text, problem):
    (tmp_path / "a.list").write_text(text)
    with pytest.raises(T1Error) as caught:
        load_tasks(tmp_path / "a.list")
    assert problem in caught.value.problem


def test_a_digest_is_of_names_contents_and_what_can_be_run(folder):
    seen = {task_digest(folder)}
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert task_digest(folder) in seen
    for change in (
        lambda: (folder / "tests/test.sh").chmod(0o755),
        lambda: (folder / "tests/test.sh").write_text("truer\n"),
        lambda: (folder / "tests/test.sh").rename(folder / "tests/other.sh"),
        lambda: (folder / "tests/link").symlink_to("other.sh"),
    ):
        change()
        assert task_digest(folder) not in seen
        seen.add(task_digest(folder))


@pytest.mark.skipif(not os.environ.get("T1_HARBOR_TASKS"), reason="T1_HARBOR_TASKS names no directory of real tasks")
def test_real_tasks_load():
    tasks = load_tasks(os.environ["T1_HARBOR_TASKS"])
    assert len(tasks) == 16
    for task in tasks:
        assert task.instruction and not task.obstacles and "unknown_fields" not in task.metadata
        assert (task.agent_timeout_s, task.verifier_timeout_s, task.resources.memory_mb) == (900.0, 240.0, 2048)
        assert task.image.env["TEST_DIR"] == "/tests" and "test_outputs.py" in task.test_files()
        assert Path(task.image.workdir).is_absolute()
